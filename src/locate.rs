//! From a claimed seq back to its segment.

use crate::error::Result;
use crate::lane::LaneId;
use crate::logs::{segments, BY_LANE_AND_SEQ};
use crate::pg::index;
use crate::pg::scan::{Cond, Direction, Scan};
use crate::pg::table::{Access, Table};
use crate::receipt::MAX_PER_CLAIM;
use crate::ring::Slot;
use std::rc::Rc;

/// A segment, as it is found by a seq.
#[derive(Clone)]
pub struct At {
    pub lane: LaneId,
    pub first_seq: i64,
    pub end: i64,
    pub first_entry: i64,
    pub enqueued_at: i64,
    pub runs: Rc<Vec<u8>>,
}

/// Finds the segments of claimed seqs in one slot, forward as far as they follow one another.
pub struct Locator {
    scan: Scan,
    at: Option<At>,
}

impl Locator {
    pub fn open(slot: &Slot) -> Result<Locator> {
        let table = Rc::new(Table::open(slot.segments, Access::Read));
        let index = index::scannable(&table, &segments::BY_SEQ)?;
        Ok(Locator {
            scan: Scan::dirty(&table, &index, BY_LANE_AND_SEQ),
            at: None,
        })
    }

    /// The segment that holds `seq`; `last` is the last seq that will be asked for.
    pub fn find(&mut self, lane: LaneId, seq: i64, last: i64) -> Option<At> {
        if self.covers(lane, seq) {
            return self.at.clone();
        }
        // The next segment of a range, or a claim that begins with a segment: one step forward. Else the
        // last segment that begins at or before it.
        let follows = self
            .at
            .as_ref()
            .is_some_and(|at| at.lane == lane && at.end <= seq);
        let stepped = follows && self.step(lane, Direction::Forward);
        if !(stepped && self.covers(lane, seq)) {
            self.scan
                .seek(&[Cond::Eq(lane.0), Cond::Between(seq, last.max(seq))]);
            let exact = self.step(lane, Direction::Forward) && self.covers(lane, seq);
            if !exact {
                self.scan
                    .seek(&[Cond::Eq(lane.0), Cond::Between(seq - MAX_PER_CLAIM + 1, seq)]);
                self.step(lane, Direction::Backward);
            }
        }
        if self.covers(lane, seq) {
            self.at.clone()
        } else {
            None
        }
    }

    fn covers(&self, lane: LaneId, seq: i64) -> bool {
        self.at
            .as_ref()
            .is_some_and(|at| at.lane == lane && at.first_seq <= seq && seq < at.end)
    }

    fn step(&mut self, lane: LaneId, direction: Direction) -> bool {
        if !self.scan.next(direction) {
            self.at = None;
            return false;
        }
        let first_seq = self.scan.i64(segments::FIRST_SEQ);
        self.at = Some(At {
            lane,
            first_seq,
            end: first_seq + i64::from(self.scan.i16(segments::N)),
            first_entry: self.scan.i64(segments::FIRST_ENTRY_ID),
            enqueued_at: self.scan.i64(segments::ENQUEUED_AT),
            runs: Rc::new(self.scan.bytes(segments::RUNS).unwrap_or_default()),
        });
        true
    }
}
