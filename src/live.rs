//! The live slots as a claim opens them, and scans over all of them at once in seq order.

use crate::error::Result;
use crate::lane::LaneId;
use crate::logs::{claims, segments, BY_LANE_AND_SEQ};
use crate::pg::index::{self, Index, IndexSet};
use crate::pg::inject::{self, Point};
use crate::pg::scan::{Cond, Direction, Scan, Writer};
use crate::pg::table::{Access, Table};
use crate::receipt::MAX_PER_CLAIM;
use crate::ring::{Slot, View};
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// Lowest seq and end (exclusive) of a lane's segments in a closed slot, which never change.
#[derive(Clone, Copy, Debug)]
struct Bounds {
    low: i64,
    end: i64,
}

thread_local! {
    /// Bounds by lane and the slot's generation.
    static BOUNDS: RefCell<HashMap<(LaneId, i64), Bounds>> = RefCell::new(HashMap::new());
}

pub fn forget() {
    BOUNDS.with(|b| b.borrow_mut().clear());
}

/// One live slot's tables.
pub struct LiveSlot {
    pub slot: Slot,
    pub segments: Rc<Table>,
    segments_index: Rc<Index>,
    pub claims: Rc<Table>,
    claims_index: Rc<Index>,
    /// All indexes of the claims, where claims are going to be made.
    pub claim_indexes: Option<IndexSet>,
}

impl LiveSlot {
    fn open(slot: &Slot, access: Access) -> Result<LiveSlot> {
        let segments_table = Rc::new(Table::open(slot.segments, Access::Read));
        let segments_index = index::scannable(&segments_table, &segments::BY_SEQ)?;
        let claims_table = Rc::new(Table::open(slot.claims, access));
        let claim_indexes = match access {
            Access::Read => None,
            Access::Write => {
                let all = IndexSet::open(&claims_table);
                // A claim that could not be found by its number could never be finished.
                all.scannable(&claims_table, &claims::BY_NO)?;
                Some(all)
            }
        };
        let claims_index = match &claim_indexes {
            Some(all) => all.scannable(&claims_table, &claims::BY_SEQ)?,
            None => index::scannable(&claims_table, &claims::BY_SEQ)?,
        };
        Ok(LiveSlot {
            slot: slot.clone(),
            segments: segments_table,
            segments_index,
            claims: claims_table,
            claims_index,
            claim_indexes,
        })
    }
}

/// The live slots, opened one by one as they are needed. Opening takes no lane into account, so one
/// `Live` serves all lanes of a call.
pub struct Live {
    pub view: Rc<View>,
    access: Access,
    slots: Vec<Option<Rc<LiveSlot>>>,
}

impl Live {
    /// For making claims.
    pub fn new(view: Rc<View>) -> Live {
        Live::with_access(view, Access::Write)
    }

    /// For looking only, also on a standby.
    pub fn for_reading(view: Rc<View>) -> Live {
        Live::with_access(view, Access::Read)
    }

    fn with_access(view: Rc<View>, access: Access) -> Live {
        let slots = view.slots.iter().map(|_| None).collect();
        Live { view, access, slots }
    }

    fn get(&mut self, i: usize) -> Result<Rc<LiveSlot>> {
        if let Some(open) = &self.slots[i] {
            return Ok(open.clone());
        }
        let open = Rc::new(LiveSlot::open(&self.view.slots[i], self.access)?);
        self.slots[i] = Some(open.clone());
        Ok(open)
    }

    /// The slots that may hold segments of the lane at `low` or above: all that are not closed, and the
    /// closed ones whose bounds say so. Called before the claim lock.
    pub fn for_lane(&mut self, lane: LaneId, low: i64) -> Result<Vec<Rc<LiveSlot>>> {
        let mut open = Vec::new();
        for i in 0..self.slots.len() {
            let (closed, generation) = {
                let s = &self.view.slots[i];
                (s.closed, s.generation)
            };
            if closed {
                let known = BOUNDS.with(|b| b.borrow().get(&(lane, generation)).copied());
                let bounds = match known {
                    Some(bounds) => bounds,
                    None => self.read_bounds(lane, i, generation)?,
                };
                if bounds.end <= low {
                    continue;
                }
            }
            open.push(self.get(i)?);
        }
        Ok(open)
    }

    fn read_bounds(&mut self, lane: LaneId, i: usize, generation: i64) -> Result<Bounds> {
        let slot = self.get(i)?;
        let mut bounds = Bounds {
            low: i64::MAX,
            end: 0,
        };
        let mut scan = Scan::dirty(&slot.segments, &slot.segments_index, BY_LANE_AND_SEQ);
        let all = [Cond::Eq(lane.0), Cond::Between(0, i64::MAX)];
        scan.seek(&all);
        if scan.next(Direction::Forward) {
            bounds.low = scan.i64(segments::FIRST_SEQ);
            scan.seek(&all);
            if scan.next(Direction::Backward) {
                bounds.end = scan.i64(segments::FIRST_SEQ) + i64::from(scan.i16(segments::N));
            }
        }
        BOUNDS.with(|b| {
            let mut b = b.borrow_mut();
            if b.len() > 65_536 {
                b.clear();
            }
            b.insert((lane, generation), bounds);
        });
        Ok(bounds)
    }
}

/// Which log a merged scan reads.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Log {
    Segments,
    Claims,
}

/// An entry that a merged scan stands on: seqs [first, end) of the lane.
#[derive(Clone, Copy, Debug)]
pub struct Span {
    pub first: i64,
    pub end: i64,
    pub writer: Writer,
}

struct Part {
    slot: Rc<LiveSlot>,
    scan: Option<Scan>,
    /// The scan reads up to here; beyond, it is positioned anew.
    window_end: i64,
    at: Option<Span>,
}

/// Dirty scans of one log in several slots, merged by seq.
pub struct Merged {
    log: Log,
    lane: LaneId,
    parts: Vec<Part>,
    current: Option<usize>,
}

impl Merged {
    pub fn new(log: Log, lane: LaneId, slots: &[Rc<LiveSlot>]) -> Merged {
        let parts = slots
            .iter()
            .map(|s| Part {
                slot: s.clone(),
                scan: None,
                window_end: 0,
                at: None,
            })
            .collect();
        Merged {
            log,
            lane,
            parts,
            current: None,
        }
    }

    /// Positions the scans at the first entry that starts at `from` or later; with `probe`, at the one
    /// before it if that reaches beyond `from`. Slots whose bounds lie outside [from, to) are left out.
    /// About `window` positions are expected to be enough; more are read if they are not.
    pub fn seek(&mut self, from: i64, to: i64, probe: bool, window: i64) {
        self.current = None;
        let last = self.parts.len().saturating_sub(1);
        for (i, part) in self.parts.iter_mut().enumerate() {
            part.at = None;
            if part.slot.slot.closed {
                let key = (self.lane, part.slot.slot.generation);
                let bounds = BOUNDS.with(|b| b.borrow().get(&key).copied());
                if bounds.is_some_and(|b| b.end <= from || b.low >= to) {
                    part.window_end = i64::MAX;
                    continue;
                }
            }
            let (table, index) = match self.log {
                Log::Segments => (&part.slot.segments, &part.slot.segments_index),
                Log::Claims => (&part.slot.claims, &part.slot.claims_index),
            };
            let scan = part
                .scan
                .get_or_insert_with(|| Scan::dirty(table, index, BY_LANE_AND_SEQ));
            let mut start = from;
            if probe {
                // No entry is longer, so none that reaches `from` starts before this.
                let earliest = from - MAX_PER_CLAIM + 1;
                scan.seek(&[Cond::Eq(self.lane.0), Cond::Between(earliest, from)]);
                if scan.next(Direction::Backward) {
                    let span = span_of(self.log, scan);
                    if span.end > from {
                        start = span.first;
                    }
                }
            }
            part.window_end = from.saturating_add(window);
            scan.seek(&[Cond::Eq(self.lane.0), Cond::Between(start, part.window_end)]);
            part.advance(self.log, self.lane);
            if i < last {
                inject::reach(Point::ClaimBetweenSlots);
            }
        }
    }

    /// The next entry in seq order.
    pub fn next(&mut self) -> Option<Span> {
        if let Some(i) = self.current {
            if self.log == Log::Segments {
                inject::reach(Point::ClaimBetweenEntries);
            }
            self.parts[i].advance(self.log, self.lane);
        }
        let lowest = self
            .parts
            .iter()
            .enumerate()
            .filter_map(|(i, p)| p.at.map(|span| (span.first, i)))
            .min();
        self.current = lowest.map(|(_, i)| i);
        self.current.and_then(|i| self.parts[i].at)
    }

    /// The slot and the scan of the entry that `next` returned last.
    pub fn here(&self) -> Option<(&Rc<LiveSlot>, &Scan)> {
        let part = &self.parts[self.current?];
        part.scan.as_ref().map(|scan| (&part.slot, scan))
    }

    /// A second look: whether any live slot holds an entry that reaches into [from, before).
    pub fn reaches_into(&mut self, from: i64, before: i64) -> bool {
        self.parts.iter().any(|part| {
            let mut scan = Scan::dirty(&part.slot.segments, &part.slot.segments_index, BY_LANE_AND_SEQ);
            let earliest = from - MAX_PER_CLAIM + 1;
            scan.seek(&[Cond::Eq(self.lane.0), Cond::Between(earliest, before - 1)]);
            scan.next(Direction::Backward) && span_of(Log::Segments, &scan).end > from
        })
    }
}

impl Part {
    /// Moves to the next entry, beyond the window too.
    fn advance(&mut self, log: Log, lane: LaneId) {
        self.at = None;
        let Some(scan) = self.scan.as_mut() else { return };
        if scan.next(Direction::Forward) {
            self.at = Some(span_of(log, scan));
        } else if self.window_end < i64::MAX {
            let start = self.window_end + 1;
            self.window_end = i64::MAX;
            scan.seek(&[Cond::Eq(lane.0), Cond::Between(start, i64::MAX)]);
            if scan.next(Direction::Forward) {
                self.at = Some(span_of(log, scan));
            }
        }
    }
}

fn span_of(log: Log, scan: &Scan) -> Span {
    let writer = scan.writer();
    let (first, n) = match log {
        Log::Segments => (scan.i64(segments::FIRST_SEQ), scan.i16(segments::N)),
        Log::Claims => (scan.i64(claims::FIRST_SEQ), scan.i16(claims::N)),
    };
    Span {
        first,
        end: first + i64::from(n),
        writer,
    }
}
