//! Counts per queue and per slot. Logs are read of those slots alone that are not finished, and rows of segments,
//! claims and closures are read, not jobs; what finished and emptied slots held is stored.
//!
//! Everything is read under one snapshot, the latest. Emptying is not MVCC, so the logs that are read stay open
//! meanwhile, and the ring must be the same when the snapshot is taken as when they were opened.

use crate::claim;
use crate::error::Result;
use crate::lane::LaneId;
use crate::live::Live;
use crate::logs::Outcome;
use crate::pg::command;
use crate::pg::datum::Value;
use crate::pg::fmgr::ResultSet;
use crate::pg::heap;
use crate::pg::index;
use crate::pg::latest::Latest;
use crate::pg::scan::{Cond, Direction, Scan};
use crate::pg::table::{Access, Table};
use crate::pg::time::{self, SECOND};
use crate::pg::xact;
use crate::queue;
use crate::ring::{self, Slot, View};
use crate::rotation;
use crate::sums::{SlotCounts, SlotLogs, Stored, ENTRIES};
use std::collections::BTreeMap;
use std::rc::Rc;

/// The live slots at one moment.
struct Moment {
    view: Rc<View>,
    /// Not finished: their logs, open.
    unfinished: Vec<(Slot, SlotLogs)>,
    stored: Stored,
    latest: Latest,
}

const MOST_TRIES: u32 = 20;

impl Moment {
    fn take() -> Result<Moment> {
        let mut tries = 0;
        loop {
            tries += 1;
            let view = ring::view()?;
            let before = Stored::read(&Latest::take())?;
            let mut unfinished = Vec::new();
            for slot in &view.slots {
                if before.finished(slot.no, slot.generation).is_none() {
                    unfinished.push((slot.clone(), SlotLogs::open(slot.no)?));
                }
            }
            let latest = Latest::take_active();
            // On a standby, and behind a step of the own transaction, no view counts as true for longer.
            let settled = ring::is_current(&view) || command::in_recovery() || xact::ring_bump_is_pending();
            if settled || tries == MOST_TRIES {
                return Ok(Moment {
                    view,
                    unfinished,
                    stored: Stored::read(&latest)?,
                    latest,
                });
            }
        }
    }

    /// The slots that are not finished, counted.
    fn counted(&self) -> Vec<(&Slot, SlotCounts)> {
        let not_finished = |s: &Slot| self.stored.finished(s.no, s.generation).is_none();
        self.unfinished
            .iter()
            .filter(|(slot, _)| not_finished(slot))
            .map(|(slot, logs)| {
                let known = self.stored.sums(slot.no, slot.generation);
                (slot, logs.count(&self.latest, Some(known)))
            })
            .collect()
    }
}

/// What is known of a queue: counts by letter, of the live slots and of all time.
#[derive(Default)]
struct Queue {
    live: BTreeMap<u8, i64>,
    all: BTreeMap<u8, i64>,
    ready: i64,
    running: i64,
    overdue: i64,
    oldest: Option<i64>,
}

impl Queue {
    fn add(&mut self, letter: u8, n: i64) {
        *self.live.entry(letter).or_insert(0) += n;
        *self.all.entry(letter).or_insert(0) += n;
    }

    fn live(&self, outcomes: &[Outcome]) -> i64 {
        outcomes.iter().filter_map(|o| self.live.get(&o.code())).sum()
    }

    fn all(&self, outcomes: &[Outcome]) -> i64 {
        outcomes.iter().filter_map(|o| self.all.get(&o.code())).sum()
    }

    fn letter(&self, letter: u8) -> i64 {
        self.all.get(&letter).copied().unwrap_or(0)
    }

    /// Jobs that were ever put in: each entry is one appearance of a job, and each that moved on appears again.
    fn enqueued(&self) -> i64 {
        let moved_on: Vec<Outcome> = Outcome::ALL
            .into_iter()
            .filter(|o| o.ends() && o.moves_on())
            .collect();
        self.letter(ENTRIES) - self.all(&moved_on) + self.letter(b'S') + self.letter(b'R') - self.letter(b'B')
    }
}

/// Adds the rows of a table of counts: queue_id, letter and n by their columns.
fn add_letters(
    name: &str,
    columns: [usize; 3],
    latest: &Latest,
    queues: &mut BTreeMap<i32, Queue>,
) -> Result<()> {
    let table = Table::open(ring::relation(name)?, Access::Read);
    heap::scan(&table, latest, |r| {
        let queue = queues.entry(r.i32(columns[0]).unwrap_or(0)).or_default();
        let n = r.i64(columns[2]).unwrap_or(0);
        *queue.all.entry(r.char(columns[1]).unwrap_or(0)).or_insert(0) += n;
        true
    });
    Ok(())
}

/// A deferred job counts as overdue so long after its time.
const OVERDUE_AFTER: i64 = 5 * SECOND;
/// Overdue jobs are counted up to so many.
const MOST_OVERDUE: usize = 100_000;

fn add_overdue(latest: &Latest, queues: &mut BTreeMap<i32, Queue>) -> Result<()> {
    let table = Rc::new(Table::open(ring::relation("deferred")?, Access::Read));
    let index = index::lookup(&table, &[2, 1])?;
    let mut scan = Scan::latest(&table, &index, 1, latest);
    scan.seek(&[Cond::AtMost(time::now() - OVERDUE_AFTER)]);
    let mut left = MOST_OVERDUE;
    while left > 0 && scan.next(Direction::Forward) {
        left -= 1;
        queues.entry(LaneId(scan.i64(3)).queue_id()).or_default().overdue += 1;
    }
    Ok(())
}

/// Appends per queue what awa.queue_stats shows.
pub fn queues(out: &mut ResultSet) -> Result<()> {
    let moment = Moment::take()?;
    let mut queues: BTreeMap<i32, Queue> = BTreeMap::new();
    let mut ready: BTreeMap<LaneId, i64> = BTreeMap::new();
    for (_, counts) in moment.counted() {
        for (lane, c) in counts.lanes {
            let queue = queues.entry(lane.queue_id()).or_default();
            queue.add(ENTRIES, c.entries);
            queue.running += c.claimed - c.ended();
            for (outcome, n) in &c.closed {
                queue.add(*outcome, *n);
            }
            *ready.entry(lane).or_insert(0) += c.entries - c.claimed;
        }
    }
    for slot in &moment.view.slots {
        if moment.stored.finished(slot.no, slot.generation).is_some() {
            for sum in moment.stored.sums(slot.no, slot.generation) {
                queues
                    .entry(sum.lane.queue_id())
                    .or_default()
                    .add(sum.outcome, sum.n);
            }
        }
    }
    add_letters("queue_totals", [1, 2, 3], &moment.latest, &mut queues)?;
    add_letters("count_changes", [2, 3, 4], &moment.latest, &mut queues)?;
    add_overdue(&moment.latest, &mut queues)?;
    let mut live = Live::for_reading(moment.view.clone());
    for (lane, n) in ready {
        let strict = queue::find_by_id(&moment.view, lane.queue_id())?.is_some_and(|q| q.strict);
        let queue = queues.entry(lane.queue_id()).or_default();
        queue.ready += n;
        if n > 0 {
            let head = claim::head(&mut live, lane, strict)?;
            queue.oldest = [queue.oldest, head].into_iter().flatten().min();
        }
    }
    for (queue_id, q) in queues {
        use Outcome::*;
        out.push(&[
            queue_id.into(),
            q.ready.into(),
            q.letter(b'S').into(),
            q.letter(b'R').into(),
            q.overdue.into(),
            q.running.into(),
            q.live(&[Completed]).into(),
            q.live(&[Failed, LeaseFailed]).into(),
            q.live(&[Cancelled, CancelledOnRequest]).into(),
            q.letter(b'D').into(),
            q.oldest.into(),
            q.enqueued().into(),
            q.all(&[Completed]).into(),
            q.all(&[Failed, LeaseFailed]).into(),
            q.all(&[Retried, Rescued]).into(),
            q.all(&[Rescued, LeaseFailed]).into(),
            q.letter(b's').into(),
        ]);
    }
    Ok(())
}

/// Appends per live slot what awa.ring_status makes its words of.
pub fn slots(out: &mut ResultSet) -> Result<()> {
    let moment = Moment::take()?;
    let counted: BTreeMap<u8, SlotCounts> = moment.counted().into_iter().map(|(s, c)| (s.no, c)).collect();
    for slot in &moment.view.slots {
        let state = if slot.no == moment.view.current().no {
            "current"
        } else if slot.closed {
            "closed"
        } else {
            "sealed"
        };
        let mut row = [Value::Null; 13];
        row[0] = Value::I32(i32::from(slot.no));
        row[1] = slot.generation.into();
        row[2] = state.into();
        if let Some(counts) = counted.get(&slot.no) {
            row[3] = counts.jobs().into();
            row[4] = counts.open().into();
            let mut open: BTreeMap<i32, i64> = BTreeMap::new();
            for (lane, c) in counts.lanes.iter().filter(|(_, c)| c.open() > 0) {
                *open.entry(lane.queue_id()).or_insert(0) += c.open();
            }
            if let Some((queue_id, n)) = open.iter().max_by_key(|(id, n)| (**n, -**id)) {
                row[5] = (*queue_id).into();
                row[6] = (*n).into();
                row[7] = (open.len() as i64 - 1).into();
            }
            if let Some(running) = &counts.oldest_running {
                row[8] = running.claimed_at.into();
                row[9] = running.worker.as_deref().into();
            }
        } else if let Some(finished) = moment.stored.finished(slot.no, slot.generation) {
            let sums = moment.stored.sums(slot.no, slot.generation);
            let jobs: i64 = sums.iter().filter(|s| s.outcome == ENTRIES).map(|s| s.n).sum();
            row[3] = jobs.into();
            row[4] = 0i64.into();
            row[10] = rotation::retained_until(&moment.view.tables, slot.no, &finished)?.into();
            if rotation::is_wanted_by_snapshot(&moment.view.tables, slot.no, &finished)? {
                row[11] = (finished.seen_after as i64).into();
                row[12] = finished.grace_ends().into();
            }
        }
        out.push(&row);
    }
    Ok(())
}
