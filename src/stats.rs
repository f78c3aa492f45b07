//! Counts per queue and per slot, from the logs themselves: rows of segments, claims and closures are read,
//! not jobs, and slots that were emptied are in the totals.

use crate::claim;
use crate::error::Result;
use crate::lane::LaneId;
use crate::live::Live;
use crate::logs::{claims, closures, segments, Outcome};
use crate::pg::datum::Value;
use crate::pg::fmgr::ResultSet;
use crate::pg::heap;
use crate::pg::latest::Latest;
use crate::pg::table::{Access, Table};
use crate::queue;
use crate::ring::{self, Slot};
use std::collections::{BTreeMap, HashMap};

#[derive(Default, Clone)]
struct Counts {
    entries: i64,
    claimed: i64,
    ended: BTreeMap<u8, i64>,
}

impl Counts {
    fn of(&self, outcome: Outcome) -> i64 {
        self.ended.get(&outcome.code()).copied().unwrap_or(0)
    }

    fn all_ended(&self) -> i64 {
        self.ended
            .iter()
            .filter(|(o, _)| Outcome::of(**o).is_some_and(Outcome::ends))
            .map(|(_, n)| n)
            .sum()
    }
}

fn add_slot(slot: &Slot, latest: &Latest, counts: &mut BTreeMap<LaneId, Counts>) {
    let table = Table::open(slot.segments, Access::Read);
    heap::scan(&table, latest, |r| {
        let lane = LaneId(r.i64(segments::LANE_ID as usize).unwrap_or(0));
        counts.entry(lane).or_default().entries += i64::from(r.i16(segments::N as usize).unwrap_or(0));
        true
    });
    let mut lane_of: HashMap<i64, LaneId> = HashMap::new();
    let table = Table::open(slot.claims, Access::Read);
    heap::scan(&table, latest, |r| {
        let lane = LaneId(r.i64(claims::LANE_ID as usize).unwrap_or(0));
        lane_of.insert(r.i64(claims::CLAIM_NO as usize).unwrap_or(0), lane);
        counts.entry(lane).or_default().claimed += i64::from(r.i16(claims::N as usize).unwrap_or(0));
        true
    });
    let table = Table::open(slot.closures, Access::Read);
    heap::scan(&table, latest, |r| {
        let claim_no = r.i64(closures::CLAIM_NO as usize).unwrap_or(0);
        if let Some(lane) = lane_of.get(&claim_no) {
            let ended = &mut counts.entry(*lane).or_default().ended;
            let code = r.char(closures::OUTCOME as usize).unwrap_or(0);
            *ended.entry(code).or_insert(0) += i64::from(r.i16(closures::N as usize).unwrap_or(0));
        }
        true
    });
}

/// Appends per queue: id, ready, running, completed, failed, cancelled, released, stale, entries (all of the
/// live slots) and the time the oldest ready job was enqueued.
pub fn queues(out: &mut ResultSet) -> Result<()> {
    let view = ring::view()?;
    let latest = Latest::take_active();
    let mut lanes: BTreeMap<LaneId, Counts> = BTreeMap::new();
    for slot in &view.slots {
        add_slot(slot, &latest, &mut lanes);
    }
    let mut live = Live::for_reading(view.clone());
    let mut by_queue: BTreeMap<i32, (Counts, Option<i64>)> = BTreeMap::new();
    for (lane, c) in lanes {
        let strict = queue::find_by_id(&view, lane.queue_id())?.is_some_and(|q| q.strict);
        let head = if c.entries > c.claimed {
            claim::head(&mut live, lane, strict)?
        } else {
            None
        };
        let (sum, oldest) = by_queue.entry(lane.queue_id()).or_default();
        sum.entries += c.entries;
        sum.claimed += c.claimed;
        for (code, n) in c.ended {
            *sum.ended.entry(code).or_insert(0) += n;
        }
        *oldest = match (*oldest, head) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
    for (queue_id, (c, oldest)) in by_queue {
        out.push(&[
            queue_id.into(),
            (c.entries - c.claimed).into(),
            (c.claimed - c.all_ended()).into(),
            c.of(Outcome::Completed).into(),
            c.of(Outcome::Failed).into(),
            c.of(Outcome::Cancelled).into(),
            c.of(Outcome::Released).into(),
            c.of(Outcome::Stale).into(),
            c.entries.into(),
            oldest.into(),
        ]);
    }
    Ok(())
}

/// Appends per live slot: number, generation, state, jobs and how many of them have not ended.
pub fn slots(out: &mut ResultSet) -> Result<()> {
    let view = ring::view()?;
    let latest = Latest::take_active();
    for slot in &view.slots {
        let mut lanes: BTreeMap<LaneId, Counts> = BTreeMap::new();
        add_slot(slot, &latest, &mut lanes);
        let jobs: i64 = lanes.values().map(|c| c.entries).sum();
        let ended: i64 = lanes.values().map(Counts::all_ended).sum();
        let state = if slot.no == view.current().no {
            "current"
        } else if slot.closed {
            "closed"
        } else {
            "sealed"
        };
        out.push(&[
            Value::I32(i32::from(slot.no)),
            slot.generation.into(),
            state.into(),
            jobs.into(),
            (jobs - ended).into(),
        ]);
    }
    Ok(())
}
