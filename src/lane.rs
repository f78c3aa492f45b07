//! Lanes: their numbers, what closed slots left behind of them, and the reservation of seqs.
//!
//! The segment index is the lane's counter: the next seq is one past the end of the lane's highest segment
//! in any live slot that is not closed, committed or in progress, and at least `lanes.appended_through`,
//! which covers closed and emptied slots. Where preloaded the next seq is kept in shared memory.

use crate::error::Result;
use crate::logs::{segments, BY_LANE_AND_SEQ};
use crate::pg::index::{self, Index};
use crate::pg::latest::Latest;
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::scan::{Cond, Direction, Scan};
use crate::pg::shmem;
use crate::pg::table::{Access, Table};
use crate::ring::{self, Slot, View};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

pub const PRIORITIES: i64 = 4;
pub const MAX_SHARDS: i64 = 64;
const LANES_PER_QUEUE: i64 = PRIORITIES * MAX_SHARDS;

/// A lane's number: queue, priority and shard, computed, so that a lane exists without a row of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LaneId(pub i64);

impl LaneId {
    /// `priority` from 1, `shard` from 0.
    pub fn new(queue_id: i32, priority: u8, shard: u8) -> LaneId {
        LaneId(
            i64::from(queue_id) * LANES_PER_QUEUE + (i64::from(priority) - 1) * MAX_SHARDS + i64::from(shard),
        )
    }

    pub fn queue_id(self) -> i32 {
        (self.0 / LANES_PER_QUEUE) as i32
    }

    pub fn priority(self) -> u8 {
        (self.0 % LANES_PER_QUEUE / MAX_SHARDS) as u8 + 1
    }

    pub fn key(self) -> u64 {
        self.0 as u64
    }
}

/// What closed and emptied slots left behind of a lane.
#[derive(Clone, Copy, Debug, Default)]
pub struct Marks {
    pub appended_through: i64,
    pub claimed_through: i64,
}

thread_local! {
    /// Marks by lane, with the stamp of the view they were read under.
    static MARKS: RefCell<HashMap<LaneId, (u64, Marks)>> = RefCell::new(HashMap::new());
    /// A position near the end of a lane's segments in a slot: a probe backward copies a whole leaf page.
    static HINTS: RefCell<HashMap<(LaneId, i64), i64>> = RefCell::new(HashMap::new());
}

pub fn forget() {
    MARKS.with(|m| m.borrow_mut().clear());
    HINTS.with(|h| h.borrow_mut().clear());
}

/// The marks of a lane, read after the view; the check of the view under the lane or claim lock covers them.
pub fn marks(view: &View, lane: LaneId) -> Result<Marks> {
    if let Some((stamp, marks)) = MARKS.with(|m| m.borrow().get(&lane).copied()) {
        if stamp == view.stamp {
            return Ok(marks);
        }
    }
    let latest = Latest::take();
    let table = Rc::new(Table::open(view.tables.lanes, Access::Read));
    let index = index::lookup(&table, &[1])?;
    let mut scan = Scan::latest(&table, &index, 1, &latest);
    scan.seek(&[Cond::Eq(lane.0)]);
    let mut marks = Marks::default();
    if scan.next(Direction::Forward) {
        marks = Marks {
            appended_through: scan.i64(2),
            claimed_through: scan.i64(3),
        };
    }
    MARKS.with(|m| m.borrow_mut().insert(lane, (view.stamp, marks)));
    Ok(marks)
}

/// The segment tables that a reservation looks at, opened before the lane lock.
pub struct Counters {
    slots: Vec<(i64, Rc<Table>, Rc<Index>)>,
    appended_through: i64,
}

impl Counters {
    pub fn open(view: &View, lane: LaneId) -> Result<Counters> {
        let appended_through = marks(view, lane)?.appended_through;
        let mut slots = Vec::new();
        for slot in view.slots.iter().filter(|s| !s.closed) {
            let table = Rc::new(Table::open(slot.segments, Access::Read));
            let index = index::scannable(&table, &segments::BY_SEQ)?;
            slots.push((slot.generation, table, index));
        }
        Ok(Counters {
            slots,
            appended_through,
        })
    }

    /// The next seq of the lane, by the index. Under the lane lock, with the view checked there.
    fn next(&self, lane: LaneId) -> i64 {
        let mut end = self.appended_through;
        for (generation, table, index) in &self.slots {
            end = end.max(end_in_slot(lane, *generation, table, index));
        }
        end + 1
    }
}

/// Last seq of the lane's highest segment in a slot (0: none), rows in progress included.
fn end_in_slot(lane: LaneId, generation: i64, table: &Rc<Table>, index: &Rc<Index>) -> i64 {
    let hint = HINTS.with(|h| h.borrow().get(&(lane, generation)).copied());
    let mut scan = Scan::dirty(table, index, BY_LANE_AND_SEQ);
    let mut found: Option<(i64, i64)> = None;
    if let Some(hint) = hint {
        scan.seek(&[Cond::Eq(lane.0), Cond::Between(hint, i64::MAX)]);
        let mut steps = 0;
        while scan.next(Direction::Forward) {
            found = Some(first_and_end(&scan));
            steps += 1;
            if steps == MOST_STEPS {
                // The hint is old; the lane lock is not held for a long walk.
                found = None;
                break;
            }
        }
    }
    if found.is_none() {
        scan.seek(&[Cond::Eq(lane.0), Cond::Between(0, i64::MAX)]);
        if scan.next(Direction::Backward) {
            found = Some(first_and_end(&scan));
        }
    }
    let Some((first, end)) = found else { return 0 };
    HINTS.with(|h| {
        let mut h = h.borrow_mut();
        if h.len() > MOST_HINTS {
            h.clear();
        }
        h.insert((lane, generation), first);
    });
    end
}

/// Steps from a remembered position before a probe from the end is cheaper.
const MOST_STEPS: u32 = 32;
const MOST_HINTS: usize = 4096;

/// First and last seq of the segment that a scan stands on.
fn first_and_end(scan: &Scan) -> (i64, i64) {
    let first = scan.i64(segments::FIRST_SEQ);
    (first, first + i64::from(scan.i16(segments::N)) - 1)
}

/// Whether the lane's next seq has to be read from the index (as far as can be told without the lock).
pub fn needs_counters(view: &View, lane: LaneId) -> bool {
    shmem::find(view.incarnation, lane.0)
        .and_then(|e| e.next())
        .is_none()
}

/// Gives out `n` seqs of a lane and returns the first. Under the lane lock. None where the index is needed
/// and was not opened.
pub fn reserve(view: &View, lane: LaneId, n: i64, counters: Option<&Counters>) -> Option<i64> {
    let entry = match counters {
        None => shmem::find(view.incarnation, lane.0),
        Some(_) => shmem::find_or_add(view.incarnation, lane.0),
    };
    let known = entry.as_ref().and_then(shmem::Entry::next);
    let first = match (known, counters) {
        (Some(next), _) => next,
        (None, Some(counters)) => counters.next(lane),
        (None, None) => return None,
    };
    if let Some(entry) = entry {
        // Raised before the segment is inserted: an error in between leaves a gap, never a double.
        entry.set_next(first + n);
    }
    Some(first)
}

/// Puts a lane's next seq into shared memory where there is room and nobody has yet: a claim tells by it that
/// the lane is empty, without opening anything.
pub fn learn_next(view: &View, lane: LaneId) -> Result<()> {
    if shmem::find_or_add(view.incarnation, lane.0).is_none_or(|e| e.next().is_some()) {
        return Ok(());
    }
    let counters = Counters::open(view, lane)?;
    let _lock = ShortLock::acquire(Class::Lane, lane.key(), Mode::Exclusive);
    if ring::is_current(view) {
        reserve(view, lane, 0, Some(&counters));
    }
    Ok(())
}

/// The lowest first_seq of the lane's segments in the other live slots, rows in progress included.
pub fn lowest_elsewhere(view: &View, lane: LaneId, except: &Slot) -> Result<Option<i64>> {
    let mut low: Option<i64> = None;
    for slot in view.slots.iter().filter(|s| s.no != except.no) {
        let table = Rc::new(Table::open(slot.segments, Access::Read));
        let index = index::scannable(&table, &segments::BY_SEQ)?;
        let mut scan = Scan::dirty(&table, &index, BY_LANE_AND_SEQ);
        scan.seek(&[Cond::Eq(lane.0), Cond::Between(0, i64::MAX)]);
        if scan.next(Direction::Forward) {
            let first = scan.i64(segments::FIRST_SEQ);
            low = Some(low.map_or(first, |l| l.min(first)));
        }
    }
    Ok(low)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lane_id_says_what_it_is_made_of() {
        for (q, p, s) in [(1, 1, 0), (1, 4, 63), (77, 2, 5), (i32::MAX, 4, 63)] {
            let lane = LaneId::new(q, p, s);
            assert_eq!(
                (lane.queue_id(), lane.priority(), lane.0 % 64),
                (q, p, i64::from(s))
            );
        }
    }

    #[test]
    fn lanes_sort_by_queue_then_priority_then_shard() {
        let mut lanes = [
            LaneId::new(2, 1, 0),
            LaneId::new(1, 4, 0),
            LaneId::new(1, 1, 3),
            LaneId::new(1, 1, 0),
        ];
        lanes.sort();
        assert_eq!(lanes[0], LaneId::new(1, 1, 0));
        assert_eq!(lanes[3], LaneId::new(2, 1, 0));
    }
}
