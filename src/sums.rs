//! What a slot holds, in numbers: counted from its logs while it changes, stored once it can not change any
//! more. `slot_sums` has the entries of a closed slot and, once every job of it has ended, its endings;
//! `finished_slots` says of which slots that is true. Emptying adds the sums to `queue_totals`.

use crate::error::Result;
use crate::lane::LaneId;
use crate::logs::{claims, closures, segments, Outcome};
use crate::pg::heap;
use crate::pg::latest::Latest;
use crate::pg::table::{Access, Table};
use crate::ring::{self, Tables};
use crate::statement::run;
use std::collections::{BTreeMap, HashMap};
use std::fmt::Write;

/// The code that stands for entries among the outcomes.
pub const ENTRIES: u8 = b'e';

/// What the logs of a slot say of one lane.
#[derive(Default, Clone, Debug)]
pub struct Counts {
    pub entries: i64,
    pub claimed: i64,
    pub closed: BTreeMap<u8, i64>,
}

impl Counts {
    pub fn ended(&self) -> i64 {
        let ends = |code: &u8| Outcome::of(*code).is_some_and(Outcome::ends);
        self.closed.iter().filter(|(o, _)| ends(o)).map(|(_, n)| n).sum()
    }

    pub fn open(&self) -> i64 {
        self.entries - self.ended()
    }
}

/// A claim of which something is still running.
#[derive(Clone, Debug)]
pub struct Running {
    pub claimed_at: i64,
    pub worker: Option<String>,
}

/// A claim while its closures are taken off it.
struct OpenClaim {
    claim_no: i64,
    lane: LaneId,
    left: i64,
    claimed_at: i64,
}

/// The logs of a slot, counted.
#[derive(Default)]
pub struct SlotCounts {
    pub lanes: BTreeMap<LaneId, Counts>,
    pub last_closed_at: Option<i64>,
    pub oldest_running: Option<Running>,
}

impl SlotCounts {
    pub fn jobs(&self) -> i64 {
        self.lanes.values().map(|c| c.entries).sum()
    }

    pub fn open(&self) -> i64 {
        self.lanes.values().map(Counts::open).sum()
    }
}

/// The logs of a slot that counts are read from. While they are open nobody empties it.
pub struct SlotLogs {
    segments: Table,
    claims: Table,
    closures: Table,
}

impl SlotLogs {
    pub fn open(slot: u8) -> Result<SlotLogs> {
        let open = |log| Ok(Table::open(ring::slot_relation(log, slot)?, Access::Read));
        Ok(SlotLogs {
            segments: open("segments")?,
            claims: open("claims")?,
            closures: open("closures")?,
        })
    }

    /// Endings in the logs, of whatever claim: fewer than the slot has entries mean that it is not finished.
    /// Reads the closures alone, a small part of what `count` does.
    pub fn endings(&self, latest: &Latest) -> i64 {
        let mut endings = 0;
        heap::scan(&self.closures, latest, |r| {
            if r.char(closures::OUTCOME as usize)
                .and_then(Outcome::of)
                .is_some_and(Outcome::ends)
            {
                endings += i64::from(r.i16(closures::N as usize).unwrap_or(0));
            }
            true
        });
        endings
    }

    /// Counts rows of n, not jobs. `known` are the entries of a closed slot, whose segments are not read then.
    pub fn count(&self, latest: &Latest, known: Option<&[Sum]>) -> SlotCounts {
        let mut counts = SlotCounts::default();
        match known.filter(|sums| !sums.is_empty()) {
            Some(sums) => {
                for sum in sums.iter().filter(|s| s.outcome == ENTRIES) {
                    counts.lanes.entry(sum.lane).or_default().entries += sum.n;
                }
            }
            None => heap::scan(&self.segments, latest, |r| {
                let lane = LaneId(r.i64(segments::LANE_ID as usize).unwrap_or(0));
                let n = i64::from(r.i16(segments::N as usize).unwrap_or(0));
                counts.lanes.entry(lane).or_default().entries += n;
                true
            }),
        }
        let mut open: Vec<OpenClaim> = Vec::new();
        heap::scan(&self.claims, latest, |r| {
            let lane = LaneId(r.i64(claims::LANE_ID as usize).unwrap_or(0));
            let n = i64::from(r.i16(claims::N as usize).unwrap_or(0));
            let at = r.i64(claims::CLAIMED_AT as usize).unwrap_or(0);
            open.push(OpenClaim {
                claim_no: r.i64(claims::CLAIM_NO as usize).unwrap_or(0),
                lane,
                left: n,
                claimed_at: at,
            });
            counts.lanes.entry(lane).or_default().claimed += n;
            true
        });
        // Nearly in order as they lie, and so are the closures: what follows the last one is tried first.
        open.sort_by_key(|c| c.claim_no);
        let mut next = 0;
        heap::scan(&self.closures, latest, |r| {
            let claim_no = r.i64(closures::CLAIM_NO as usize).unwrap_or(0);
            let found = match open.get(next) {
                Some(c) if c.claim_no == claim_no => Some(next),
                _ => open.binary_search_by_key(&claim_no, |c| c.claim_no).ok(),
            };
            if let Some(i) = found {
                let claim = &mut open[i];
                next = i + 1;
                let code = r.char(closures::OUTCOME as usize).unwrap_or(0);
                let n = i64::from(r.i16(closures::N as usize).unwrap_or(0));
                if Outcome::of(code).is_some_and(Outcome::ends) {
                    claim.left -= n;
                }
                let closed = &mut counts.lanes.entry(claim.lane).or_default().closed;
                *closed.entry(code).or_insert(0) += n;
            }
            counts.last_closed_at = counts.last_closed_at.max(r.i64(closures::CLOSED_AT as usize));
            true
        });
        let oldest = open.iter().filter(|c| c.left > 0);
        if let Some(claim) = oldest.min_by_key(|c| (c.claimed_at, c.claim_no)) {
            counts.oldest_running = Some(Running {
                claimed_at: claim.claimed_at,
                worker: self.worker_of(latest, claim.claim_no),
            });
        }
        counts
    }

    fn worker_of(&self, latest: &Latest, claim_no: i64) -> Option<String> {
        let mut worker = None;
        heap::scan(&self.claims, latest, |r| {
            let this = r.i64(claims::CLAIM_NO as usize) == Some(claim_no);
            if this {
                worker = r.varlena(claims::WORKER as usize).map(|w| w.text());
            }
            !this
        });
        worker
    }
}

/// A stored count.
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    pub lane: LaneId,
    pub outcome: u8,
    pub n: i64,
}

/// A slot of which every job has ended.
#[derive(Clone, Copy, Debug)]
pub struct Finished {
    pub incarnation: i64,
    /// When the last job ended; None where the slot holds none.
    pub ended_at: Option<i64>,
    /// Whose horizon has reached this transaction id sees all endings.
    pub seen_after: u64,
}

/// All that is stored, as a snapshot sees it.
#[derive(Default)]
pub struct Stored {
    sums: HashMap<(u8, i64), Vec<Sum>>,
    finished: HashMap<(u8, i64), Finished>,
}

impl Stored {
    pub fn read(latest: &Latest) -> Result<Stored> {
        let mut stored = Stored::default();
        let table = Table::open(ring::relation("slot_sums")?, Access::Read);
        heap::scan(&table, latest, |r| {
            let slot = (r.i16(1).unwrap_or(0) as u8, r.i64(2).unwrap_or(0));
            stored.sums.entry(slot).or_default().push(Sum {
                lane: LaneId(r.i64(3).unwrap_or(0)),
                outcome: r.char(4).unwrap_or(0),
                n: r.i64(5).unwrap_or(0),
            });
            true
        });
        let table = Table::open(ring::relation("finished_slots")?, Access::Read);
        heap::scan(&table, latest, |r| {
            let slot = (r.i16(1).unwrap_or(0) as u8, r.i64(2).unwrap_or(0));
            stored.finished.insert(
                slot,
                Finished {
                    incarnation: r.i64(3).unwrap_or(0),
                    ended_at: r.i64(4),
                    seen_after: r.i64(5).unwrap_or(0) as u64,
                },
            );
            true
        });
        Ok(stored)
    }

    pub fn finished(&self, slot: u8, generation: i64) -> Option<Finished> {
        self.finished.get(&(slot, generation)).copied()
    }

    pub fn sums(&self, slot: u8, generation: i64) -> &[Sum] {
        self.sums.get(&(slot, generation)).map_or(&[], Vec::as_slice)
    }
}

/// The entries among stored sums.
pub fn entries(sums: &[Sum]) -> i64 {
    sums.iter().filter(|s| s.outcome == ENTRIES).map(|s| s.n).sum()
}

/// Stores the entries of a slot that is being closed.
pub fn store_entries(tables: &Tables, slot: u8, generation: i64) -> Result<()> {
    run(
        tables,
        &format!(
            "INSERT INTO awa_internal.slot_sums (slot, generation, lane_id, outcome, n)
             SELECT $1, $2, lane_id, 'e', pg_catalog.sum(n)::pg_catalog.int8
             FROM awa_internal.segments_{slot} GROUP BY lane_id
             ON CONFLICT DO NOTHING"
        ),
        &[i16::from(slot).into(), generation.into()],
    )
}

/// Stores what a slot holds of which every job has ended. Under the ring lock.
pub fn store_finished(tables: &Tables, slot: u8, generation: i64, counts: &SlotCounts) -> Result<()> {
    let mut rows = String::new();
    for (lane, c) in &counts.lanes {
        let endings = c.closed.iter().map(|(outcome, n)| (*outcome, *n));
        for (outcome, n) in endings.chain([(ENTRIES, c.entries)]) {
            let comma = if rows.is_empty() { "" } else { ", " };
            // Numbers and letters of our own only.
            let _ = write!(
                rows,
                "{comma}({slot}, {generation}, {}, '{}', {n})",
                lane.0,
                char::from(outcome)
            );
        }
    }
    if !rows.is_empty() {
        let sql = format!(
            "INSERT INTO awa_internal.slot_sums (slot, generation, lane_id, outcome, n) VALUES {rows}
             ON CONFLICT DO NOTHING"
        );
        run(tables, &sql, &[])?;
    }
    // Its snapshot was taken after the counting: all that was counted has an id below its xmax.
    run(
        tables,
        "INSERT INTO awa_internal.finished_slots (slot, generation, incarnation, ended_at, seen_after)
         SELECT $1, $2, w.incarnation, timestamptz '2000-01-01 00:00:00+00' + $3 * interval '1 microsecond',
                pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())::pg_catalog.text::pg_catalog.int8
         FROM awa_internal.world w",
        &[
            i16::from(slot).into(),
            generation.into(),
            counts.last_closed_at.into(),
        ],
    )
}

/// Adds the stored sums of a slot to the totals of its queues, which outlive it. With the slot's emptying.
pub fn move_to_totals(tables: &Tables, slot: u8, generation: i64) -> Result<()> {
    run(
        tables,
        "INSERT INTO awa_internal.queue_totals AS t (queue_id, outcome, n)
         SELECT (lane_id >> 8)::pg_catalog.int4, outcome, pg_catalog.sum(n)::pg_catalog.int8
         FROM awa_internal.slot_sums WHERE slot = $1 AND generation = $2
         GROUP BY 1, 2 ORDER BY 1, 2
         ON CONFLICT (queue_id, outcome) DO UPDATE SET n = t.n + excluded.n",
        &[i16::from(slot).into(), generation.into()],
    )?;
    for table in ["slot_sums", "finished_slots"] {
        run(
            tables,
            &format!("DELETE FROM awa_internal.{table} WHERE slot = $1"),
            &[i16::from(slot).into()],
        )?;
    }
    Ok(())
}
