//! Where jobs are, by their ids: put off, in an entry of a lane, or among the dead letters.
//!
//! All places are read under one snapshot, the latest, so a job that is just moving from one to another is
//! found in exactly one of them. The logs stay open meanwhile, and the ring must be the same when the
//! snapshot is taken as when they were opened.

use crate::bits::Bits;
use crate::body::Reader;
use crate::dead;
use crate::defer;
use crate::error::Result;
use crate::lane::LaneId;
use crate::logs::{claims, closures, ready, segments, Outcome, BY_LANE_AND_SEQ};
use crate::pg::heap::Place;
use crate::pg::index;
use crate::pg::latest::Latest;
use crate::pg::scan::{Cond, Direction, Scan};
use crate::pg::table::{Access, Oid, Table};
use crate::receipt::MAX_PER_CLAIM;
use crate::ring::{self, Slot, View};
use std::rc::Rc;

/// Where a job is.
pub enum Where {
    Nowhere,
    /// A row of `deferred`.
    Deferred(Place),
    Entry(Entry),
    /// A row of `dead_letters`, and no entry any more.
    Dead(Place),
}

/// The entry that tells of a job: the one that lives, or else its newest.
#[derive(Clone)]
pub struct Entry {
    pub slot: u8,
    pub lane: LaneId,
    pub seq: i64,
    pub entry_id: i64,
    /// Of its segment: first entry, when it was written, where its rows lie.
    pub first_entry: i64,
    pub enqueued_at: i64,
    pub runs: Rc<Vec<u8>>,
    pub is: Is,
    /// Its dead letter, where it failed and has one.
    pub letter: Option<Place>,
}

/// The state of an entry.
#[derive(Clone)]
pub enum Is {
    Ready,
    Running {
        claim_no: i64,
        index: u16,
        /// Jobs of the claim.
        n: i64,
    },
    Ended(Ending),
}

#[derive(Clone)]
pub struct Ending {
    pub claim_no: i64,
    pub index: u16,
    /// Jobs of the claim.
    pub n: i64,
    pub outcome: Outcome,
    pub at: i64,
    pub reason: Option<String>,
    pub worker: Option<String>,
}

impl Entry {
    /// Its index in its segment.
    pub fn offset(&self) -> usize {
        (self.entry_id - self.first_entry) as usize
    }

    fn rank(&self) -> (bool, i64, i64) {
        let lives = !matches!(self.is, Is::Ended(_));
        (lives, self.enqueued_at, self.entry_id)
    }
}

/// Scans of one slot's logs.
struct Logs {
    slot: Slot,
    by_entry: Scan,
    moved: Scan,
    claims: Scan,
    closures: Scan,
}

impl Logs {
    fn open(slot: &Slot, latest: &Latest, open: &SlotTables) -> Result<Logs> {
        let scan = |table: &Rc<Table>, keys: &[i16], n: usize| -> Result<Scan> {
            let index = index::scannable(table, keys)?;
            Ok(Scan::latest(table, &index, n, latest))
        };
        Ok(Logs {
            slot: slot.clone(),
            by_entry: scan(&open.segments, &segments::BY_ENTRY, 1)?,
            moved: scan(&open.ready, &ready::BY_JOB, 1)?,
            claims: scan(&open.claims, &claims::BY_SEQ, BY_LANE_AND_SEQ)?,
            closures: scan(&open.closures, &closures::BY_CLAIM, 1)?,
        })
    }

    /// The entry of an id, without its state.
    fn entry(&mut self, entry_id: i64) -> Option<Entry> {
        self.by_entry.seek(&[Cond::AtMost(entry_id)]);
        if !self.by_entry.next(Direction::Backward) {
            return None;
        }
        let first_entry = self.by_entry.i64(segments::FIRST_ENTRY_ID);
        let k = entry_id - first_entry;
        (k < i64::from(self.by_entry.i16(segments::N))).then(|| Entry {
            slot: self.slot.no,
            lane: LaneId(self.by_entry.i64(segments::LANE_ID)),
            seq: self.by_entry.i64(segments::FIRST_SEQ) + k,
            entry_id,
            first_entry,
            enqueued_at: self.by_entry.i64(segments::ENQUEUED_AT),
            runs: Rc::new(self.by_entry.bytes(segments::RUNS).unwrap_or_default()),
            is: Is::Ready,
            letter: None,
        })
    }

    fn moved_entries(&mut self, job_id: i64) -> Vec<i64> {
        let mut entries = Vec::new();
        self.moved.seek(&[Cond::Eq(job_id)]);
        while self.moved.next(Direction::Forward) {
            entries.push(self.moved.i64(ready::ENTRY_ID as i16));
        }
        entries
    }

    fn state(&mut self, lane: LaneId, seq: i64) -> Is {
        let scan = &mut self.claims;
        scan.seek(&[Cond::Eq(lane.0), Cond::Between(seq - MAX_PER_CLAIM + 1, seq)]);
        if !scan.next(Direction::Backward) {
            return Is::Ready;
        }
        let first_seq = scan.i64(claims::FIRST_SEQ);
        let n = i64::from(scan.i16(claims::N));
        if seq >= first_seq + n {
            return Is::Ready;
        }
        let claim_no = scan.i64(claims::CLAIM_NO);
        let index = (seq - first_seq) as u16;
        let mut ending = None;
        self.closures.seek(&[Cond::Eq(claim_no)]);
        while self.closures.next(Direction::Forward) {
            let outcome = Outcome::of(self.closures.char(closures::OUTCOME));
            let bits = Bits::of(self.closures.bytes(closures::WHICH).as_deref());
            let told = |o: &Outcome| (o.ends() || *o == Outcome::BroughtBack) && bits.has(index);
            if let Some(outcome) = outcome.filter(told) {
                let found = Is::Ended(Ending {
                    claim_no,
                    index,
                    n,
                    outcome,
                    at: self.closures.i64(closures::CLOSED_AT),
                    reason: self.closures.text(closures::REASON),
                    worker: self.claims.text(claims::WORKER),
                });
                if outcome == Outcome::BroughtBack {
                    return found; // whatever its ending was
                }
                ending = Some(found);
            }
        }
        ending.unwrap_or(Is::Running { claim_no, index, n })
    }
}

struct SlotTables {
    ready: Rc<Table>,
    segments: Rc<Table>,
    claims: Rc<Table>,
    closures: Rc<Table>,
}

fn open_read(oid: Oid) -> Rc<Table> {
    Rc::new(Table::open(oid, Access::Read))
}

/// Finds jobs. Dropped before anybody is waited for, since it holds scans.
pub struct Finder {
    logs: Vec<Logs>,
    deferred: Scan,
    dead: Scan,
    pub reader: Reader,
    pub view: Rc<View>,
    latest: Rc<Latest>,
}

impl Finder {
    pub fn new() -> Result<Finder> {
        loop {
            let view = ring::view_for_write()?;
            let tables: Vec<SlotTables> = view
                .slots
                .iter()
                .map(|s| SlotTables {
                    ready: open_read(s.ready),
                    segments: open_read(s.segments),
                    claims: open_read(s.claims),
                    closures: open_read(s.closures),
                })
                .collect();
            let latest = Rc::new(Latest::take());
            if !ring::is_current(&view) {
                continue;
            }
            let logs = view
                .slots
                .iter()
                .zip(&tables)
                .map(|(slot, open)| Logs::open(slot, &latest, open))
                .collect::<Result<_>>()?;
            let by_id = |oid: Oid| -> Result<Scan> {
                let table = open_read(oid);
                let index = index::lookup(&table, &[1])?;
                Ok(Scan::latest(&table, &index, 1, &latest))
            };
            return Ok(Finder {
                logs,
                deferred: by_id(defer::deferred_table()?)?,
                dead: by_id(dead::dead_letters_table()?)?,
                reader: Reader::new(),
                view,
                latest,
            });
        }
    }

    /// The snapshot that all was read under, for outliving the finder: it keeps the rows that were found from
    /// being vacuumed away.
    pub fn snapshot(&self) -> Rc<Latest> {
        self.latest.clone()
    }

    /// An entry by its own id, with its state.
    pub fn entry(&mut self, entry_id: i64) -> Option<Entry> {
        self.logs.iter_mut().find_map(|logs| {
            let mut entry = logs.entry(entry_id)?;
            entry.is = logs.state(entry.lane, entry.seq);
            Some(entry)
        })
    }

    pub fn find(&mut self, id: i64) -> Where {
        if let Some(place) = row_of(&mut self.deferred, id) {
            return Where::Deferred(place);
        }
        let mut best: Option<Entry> = None;
        for logs in &mut self.logs {
            let mut entries = logs.moved_entries(id);
            entries.push(id);
            for entry_id in entries {
                let Some(mut entry) = logs.entry(entry_id) else {
                    continue;
                };
                if entry_id == id {
                    // It may be another job's, one that moved on.
                    let head = self
                        .reader
                        .read_head(&logs.slot, &entry.runs, entry.offset(), entry_id);
                    if head.is_some_and(|h| h.job_id != id) {
                        continue;
                    }
                }
                entry.is = logs.state(entry.lane, entry.seq);
                let moved = matches!(&entry.is, Is::Ended(e) if e.outcome.moves_on());
                if !moved && best.as_ref().is_none_or(|b| b.rank() < entry.rank()) {
                    best = Some(entry);
                }
            }
        }
        match best {
            None => row_of(&mut self.dead, id).map_or(Where::Nowhere, Where::Dead),
            Some(mut entry) => {
                if matches!(&entry.is, Is::Ended(e) if e.outcome.state() == "failed") {
                    entry.letter = row_of(&mut self.dead, id);
                }
                Where::Entry(entry)
            }
        }
    }
}

fn row_of(scan: &mut Scan, id: i64) -> Option<Place> {
    scan.seek(&[Cond::Eq(id)]);
    scan.next(Direction::Forward).then(|| scan.place())
}
