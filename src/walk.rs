//! Walking a lane's unresolved ranges: what is free, what is taken, what is still undecided.
//!
//! A position is free when a segment covers it that is committed (or the own transaction's) and no claim
//! that is committed or in progress. The walk runs under the claim lock, so claims stand still; segments
//! do not, and the rules for gaps come from that:
//!
//! - the frontier never passes the end of the last committed segment, since numbers above it come back when
//!   their transaction aborts;
//! - a gap below a committed segment is dead only after a second look that began after that segment was
//!   seen, over all live slots of a view checked after it: a scan can miss an entry that is inserted behind
//!   it and see a later one. A listed range lies below a committed segment that an earlier walk saw, so
//!   walking it is the second look;
//! - what the own transaction wrote counts as undecided for all that is remembered.

use crate::lane::LaneId;
use crate::live::{LiveSlot, Log, Merged, Span};
use crate::logs::segments;
use crate::pg::command;
use crate::pg::inject::{self, Mutant, Point};
use crate::pg::scan::Writer;
use crate::pg::xact;
use crate::ranges::{Kind, Range, RangeList, OPEN_END, UNKNOWN};
use crate::receipt::MAX_PER_CLAIM;
use crate::ring::{self, View};
use std::rc::Rc;

/// How long a range taken by open claims is left alone, in microseconds. An in-progress test per claim in
/// flight made the walk six times as long with 32 workers.
const CLAIMED_REST_MICROS: i64 = 50_000;

/// Positions beyond what is wanted that the scan for segments reads in one go: so many may be taken already.
const WINDOW: i64 = 256;

/// Contiguous free positions of one segment that a claim takes.
pub struct Pick {
    pub seq: i64,
    pub n: i64,
    pub slot: Rc<LiveSlot>,
    /// Of the own transaction: a claim row never crosses the border between these and committed ones.
    pub own: bool,
    /// Entry id of the first of these positions.
    pub entry_id: i64,
    /// Index of that position in the segment.
    pub offset: usize,
    pub runs: Rc<Vec<u8>>,
    pub enqueued_at: i64,
    /// A new claim row begins here: one row holds a contiguous range of one slot, own or committed, of at
    /// most 1,024 jobs.
    pub starts_claim: bool,
}

/// What a walk is for.
pub struct Order {
    pub lane: LaneId,
    pub strict: bool,
    /// How many positions to take; 0 only looks.
    pub want: i64,
    /// In how many claim rows at most.
    pub max_claims: i64,
    pub now: i64,
}

/// What a walk found.
#[derive(Default)]
pub struct Found {
    pub list: RangeList,
    pub picks: Vec<Pick>,
    pub taken: i64,
    /// When the first free position that was not taken was enqueued; None where there is none.
    pub head_at: Option<i64>,
}

/// The ring changed under the walk: nothing that it saw counts.
#[derive(Debug)]
pub struct Moved;

pub struct Walk<'a> {
    view: &'a View,
    order: Order,
    segments: Merged,
    claims: Merged,
    next_xid: u64,
    found: Found,
    claim_rows: i64,
    /// Jobs in the claim row that the last pick belongs to.
    row_size: i64,
    border: Border,
}

/// What is known of the border at the right end of the range that was dealt with last.
#[derive(Clone, Copy)]
struct Border {
    at: i64,
    standing: Standing,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Standing {
    /// A claim may straddle it.
    Unknown,
    /// No claim straddles it now, nor can one while the claim lock is held.
    Intact,
    /// No claim ever will: what lies to the left is taken for good up to here, or dead.
    Settled,
}

const NO_BORDER: Border = Border {
    at: i64::MIN,
    standing: Standing::Unknown,
};

/// How the walk of one range ended.
#[derive(PartialEq, Eq)]
enum End {
    Walked,
    /// Enough was taken, or a strict lane's gate was met.
    Stop,
}

impl<'a> Walk<'a> {
    pub fn new(view: &'a View, slots: &[Rc<LiveSlot>], order: Order) -> Walk<'a> {
        let lane = order.lane;
        Walk {
            view,
            segments: Merged::new(Log::Segments, lane, slots),
            claims: Merged::new(Log::Claims, lane, slots),
            next_xid: xact::next_xid(),
            order,
            found: Found::default(),
            claim_rows: 0,
            row_size: 0,
            border: NO_BORDER,
        }
    }

    /// Walks the list and returns its successor with what was taken. Ranges left alone at first are looked
    /// at after all if not enough was found: a claim that was rolled back frees its jobs at once.
    pub fn run(mut self, list: &RangeList) -> Result<Found, Moved> {
        let rested = self.pass(list, true)?;
        let enough = self.found.taken >= self.order.want && self.order.want > 0;
        if rested && !enough && self.found.head_at.is_none() {
            let again = std::mem::take(&mut self.found.list);
            self.pass_rested(&again)?;
        }
        Ok(self.found)
    }

    fn pass(&mut self, list: &RangeList, rest: bool) -> Result<bool, Moved> {
        let mut rested = false;
        let mut done = 0;
        let mut stopped = false;
        for r in &list.ranges {
            done += 1;
            if r.tail {
                if !self.order.strict && self.waits(r) {
                    self.found.list.push(*r);
                    self.border = NO_BORDER;
                    continue;
                }
                // Its transaction has ended: what lies above is the frontier's again.
                let fallen = Range {
                    to: OPEN_END,
                    seg: UNKNOWN,
                    tail: false,
                    kind: Kind::Open,
                    ..*r
                };
                self.walk(&fallen)?;
                return Ok(rested);
            }
            if self.is_done(r) {
                // Its one transaction has committed its claims: nothing of it is left.
                let standing = if r.last_xid != 0 {
                    Standing::Settled
                } else {
                    Standing::Unknown
                };
                self.border = Border { at: r.to, standing };
                continue;
            }
            if rest && self.rests(r) {
                rested |= r.kind == Kind::Claimed;
                self.found.list.push(*r);
                self.border = Border {
                    at: r.to,
                    standing: self.standing_of_rested(r),
                };
                continue;
            }
            if self.walk(r)? == End::Stop {
                stopped = true;
                break;
            }
        }
        if stopped {
            for r in &list.ranges[done..] {
                self.found.list.push(*r);
            }
        }
        Ok(rested)
    }

    /// Walks only what the first pass left alone and what can have changed.
    fn pass_rested(&mut self, list: &RangeList) -> Result<(), Moved> {
        let mut stopped = false;
        for r in &list.ranges {
            self.border = NO_BORDER;
            if !stopped && r.kind == Kind::Claimed && !r.tail && !self.waits(r) {
                stopped = self.walk(r)? == End::Stop;
            } else {
                self.found.list.push(*r);
            }
        }
        Ok(())
    }

    /// A range that is left alone ends with a claim of `last_xid` that ends there. While that transaction
    /// runs, or once it has committed, no other claim can reach across: it would overlap. (Of segments in
    /// progress nothing is known: their own transaction may have claimed across.)
    fn standing_of_rested(&self, r: &Range) -> Standing {
        let xid = r.last_xid;
        let holds = r.kind == Kind::Claimed
            && xid != 0
            && (xact::is_running(xid, self.next_xid) || xact::has_committed(xid, self.next_xid));
        if holds {
            Standing::Intact
        } else {
            Standing::Unknown
        }
    }

    /// Whether the scan for claims of a range has to begin before it. Clears the range's mark where its left
    /// border is settled.
    fn needs_probe(&self, r: &mut Range) -> bool {
        if !r.edge || inject::mutant(Mutant::Straddle) {
            return false;
        }
        let standing = if self.border.at == r.from {
            self.border.standing
        } else {
            Standing::Unknown
        };
        if standing == Standing::Settled {
            r.edge = false;
        }
        standing == Standing::Unknown
    }

    /// Whether the one transaction that a range hangs on is still running, so that nothing in it can have
    /// changed.
    fn waits(&self, r: &Range) -> bool {
        // Segments of the own transaction can be claimed by it.
        let own_segments = r.kind == Kind::Running && xact::is_own(r.xid);
        r.xid != 0 && !own_segments && xact::is_running(r.xid, self.next_xid)
    }

    fn is_done(&self, r: &Range) -> bool {
        r.kind == Kind::Claimed && r.xid != 0 && !self.waits(r) && xact::has_committed(r.xid, self.next_xid)
    }

    fn rests(&self, r: &Range) -> bool {
        if self.order.strict {
            return false;
        }
        match r.kind {
            Kind::Running => self.waits(r),
            // Of several transactions: some may have rolled back, which is seen a little later.
            Kind::Claimed if r.xid == 0 => self.order.now - r.checked < CLAIMED_REST_MICROS,
            Kind::Claimed => self.waits(r),
            Kind::Look | Kind::Open | Kind::Taken => false,
        }
    }

    fn piece(&self, from: i64, to: i64, seg: i64, kind: Kind, xid: u32) -> Range {
        let xid = if xid == 0 {
            0
        } else {
            xact::widen(xid, self.next_xid)
        };
        Range::piece(from, to, seg, kind, xid, self.order.now)
    }

    fn walk(&mut self, r: &Range) -> Result<End, Moved> {
        let mut r = *r;
        let probe = self.needs_probe(&mut r);
        let r = &r;
        // Of the right end: dead as long as nothing is found there.
        let mut standing = Standing::Settled;
        let open = r.to == OPEN_END;
        let mut cur = r.from;
        let mut seg = if r.seg == UNKNOWN { r.from } else { r.seg };
        // End of the last committed segment: how far the frontier may go.
        let mut committed_end = r.from;
        let mut end = End::Walked;
        let first_piece = self.found.list.ranges.len();

        let mut claims_sought = false;
        let mut claim: Option<Span> = None;
        self.segments
            .seek(seg, r.to, r.seg == UNKNOWN, self.order.want + WINDOW);
        while let Some(s) = self.segments.next() {
            command::check_for_interrupts();
            if s.first >= r.to {
                break;
            }
            let send = s.end.min(r.to);
            if send <= cur {
                continue;
            }
            let committed = s.writer == Writer::Committed
                || (matches!(s.writer, Writer::Own(_)) && inject::mutant(Mutant::OwnSegments));
            let running = matches!(s.writer, Writer::Running(_));
            if s.first > cur {
                // A listed range: this walk began after the committed segment above it was seen.
                let dead = if !open || inject::mutant(Mutant::Frontier) {
                    true
                } else if running && self.order.strict {
                    false
                } else {
                    self.gap_is_dead(cur, s.first)?
                };
                if !dead {
                    if self.order.strict {
                        seg = cur;
                        end = End::Stop;
                        break;
                    }
                    self.push(first_piece, r, self.piece(cur, s.first, UNKNOWN, Kind::Look, 0));
                } else if open && !committed {
                    // Empty now, and nobody can get these numbers while the segment above is alive; but
                    // they come back when it aborts: they hang on its transaction.
                    if let Writer::Running(xid) | Writer::Own(xid) = s.writer {
                        self.push(
                            first_piece,
                            r,
                            self.piece(cur, s.first, UNKNOWN, Kind::Running, xid),
                        );
                    }
                }
                cur = s.first;
            }
            seg = s.first;
            if let Writer::Running(xid) = s.writer {
                if self.order.strict {
                    end = End::Stop;
                    break;
                }
                if inject::mutant(Mutant::SegmentInProgress) {
                    committed_end = send;
                } else {
                    let start = if open { UNKNOWN } else { s.first };
                    self.push(first_piece, r, self.piece(cur, send, start, Kind::Running, xid));
                }
                if inject::mutant(Mutant::Frontier) {
                    committed_end = send;
                }
                cur = send;
                seg = send;
                standing = Standing::Unknown;
                continue;
            }
            if committed {
                committed_end = committed_end.max(send);
            }
            if !claims_sought {
                // Claims stand still under the claim lock, so it does not matter when they are looked up. (A walk
                // without it may meet one that reaches beyond the segments it has seen: RangeList::unlocked.)
                // where no segment is found they never are.
                claims_sought = true;
                inject::reach(Point::ClaimSegmentsRead);
                self.claims.seek(r.from, r.to, probe, i64::MAX);
                claim = self.claims.next();
            }
            while cur < send {
                while claim.is_some_and(|c| c.end <= cur) {
                    claim = self.claims.next();
                }
                match claim {
                    Some(c) if c.first <= cur => {
                        let to = c.end.min(send);
                        let undecided = match c.writer {
                            Writer::Committed => None,
                            Writer::Own(x) => (!inject::mutant(Mutant::OwnClaims)).then_some(x),
                            Writer::Running(x) => (!inject::mutant(Mutant::ClaimInProgress)).then_some(x),
                        };
                        standing = match undecided {
                            _ if c.end > r.to => Standing::Unknown,
                            Some(_) => Standing::Intact,
                            None => Standing::Settled,
                        };
                        if let Some(xid) = undecided {
                            let mut claimed = self.piece(cur, to, s.first, Kind::Claimed, xid);
                            if c.end > to {
                                claimed.last_xid = 0; // goes on beyond: the border here is inside the claim
                            }
                            self.push(first_piece, r, claimed);
                        }
                        cur = to;
                    }
                    _ => {
                        let free_end = claim.map_or(send, |c| c.first.min(send));
                        let n = self.take(&s, cur, free_end);
                        if n > 0 {
                            let taken = self.piece(cur, cur + n, s.first, Kind::Taken, 0);
                            self.push(first_piece, r, taken);
                            cur += n;
                            standing = Standing::Intact;
                        }
                        // Stops right behind what it took: further on it might stand inside a claim that
                        // spans the end of this segment, and a border there would hide that claim.
                        if cur < free_end || (self.order.want > 0 && self.found.taken >= self.order.want) {
                            self.note_head();
                            end = End::Stop;
                            break;
                        }
                    }
                }
            }
            if cur >= send {
                seg = send;
            }
            if end == End::Stop {
                break;
            }
        }
        if end == End::Walked && !open {
            // Behind the last segment of a listed range nothing can appear any more.
            let standing = if cur < r.to { Standing::Settled } else { standing };
            self.border = Border { at: r.to, standing };
        } else {
            self.border = NO_BORDER;
        }
        if open {
            self.end_at_frontier(r, first_piece, cur, committed_end, seg);
        } else if end == End::Stop {
            self.push(first_piece, r, self.piece(cur, r.to, seg, Kind::Look, 0));
        }
        Ok(end)
    }

    fn end_at_frontier(&mut self, r: &Range, first_piece: usize, cur: i64, committed_end: i64, seg: i64) {
        let frontier = cur.min(committed_end);
        let frontier_seg = if frontier == cur {
            seg
        } else if frontier == r.from {
            r.seg
        } else {
            frontier
        };
        // Where nothing of this range is left in front of the frontier, its left border is still the old one.
        let edge = r.edge && self.found.list.ranges.len() == first_piece && frontier == r.from;
        if committed_end > r.from {
            self.found.list.tail_is_covered();
        }
        self.found.list.close_walk(frontier, frontier_seg, edge);
    }

    /// Adds a piece of range `r`; the first one that starts where the range does keeps its edge.
    fn push(&mut self, first_piece: usize, r: &Range, mut piece: Range) {
        if piece.from == r.from && self.found.list.ranges.len() == first_piece {
            piece.edge |= r.edge;
        }
        self.found.list.push(piece);
    }

    fn gap_is_dead(&mut self, from: i64, before: i64) -> Result<bool, Moved> {
        if inject::mutant(Mutant::SecondLook) {
            return Ok(true);
        }
        // Who only looks needs no proof (and on a standby no view is ever current).
        let looking = self.order.want == 0;
        if !looking && !inject::mutant(Mutant::EpochClaim) && !ring::is_current(self.view) {
            return Err(Moved);
        }
        Ok(!self.segments.reaches_into(from, before))
    }

    fn note_head(&mut self) {
        if self.found.head_at.is_none() {
            self.found.head_at = self
                .segments
                .here()
                .map(|(_, scan)| scan.i64(segments::ENQUEUED_AT));
        }
    }

    /// Takes free positions [from, to) as far as they are wanted and returns how many.
    fn take(&mut self, s: &Span, from: i64, to: i64) -> i64 {
        let n = (to - from).min(self.order.want - self.found.taken);
        if n <= 0 {
            return 0;
        }
        let own = matches!(s.writer, Writer::Own(_));
        let Some((slot, scan)) = self.segments.here() else {
            return 0;
        };
        let starts_claim = !self.found.picks.last().is_some_and(|p| {
            p.seq + p.n == from
                && p.own == own
                && p.slot.slot.no == slot.slot.no
                && self.row_size + n <= MAX_PER_CLAIM
        });
        if starts_claim && self.claim_rows >= self.order.max_claims {
            return 0;
        }
        let offset = (from - s.first) as usize;
        let pick = Pick {
            seq: from,
            n,
            slot: slot.clone(),
            own,
            entry_id: scan.i64(segments::FIRST_ENTRY_ID) + offset as i64,
            offset,
            runs: Rc::new(scan.bytes(segments::RUNS).unwrap_or_default()),
            enqueued_at: scan.i64(segments::ENQUEUED_AT),
            starts_claim,
        };
        if starts_claim {
            self.claim_rows += 1;
            self.row_size = 0;
        }
        self.row_size += n;
        self.found.picks.push(pick);
        self.found.taken += n;
        n
    }
}
