//! The unresolved ranges of a lane: positions that are neither dead nor taken by a committed claim.
//!
//! A lane is walked over this list and not from one low-water mark, so that a transaction that stays open
//! leaves a small range behind instead of making every claim walk all that came after it. The last range is
//! open-ended: the frontier. The list is a cache; losing it costs a walk.
//!
//! *Tail* ranges lie above the end of the last committed segment, where the numbers of an aborted
//! transaction are given out again. They are skipped while their transaction runs, since nobody can get
//! their numbers then; when it ends, the frontier falls back to their start.

pub const OPEN_END: i64 = i64::MAX;
/// Seq of a segment start that is not known.
pub const UNKNOWN: i64 = -1;
pub const MAX_RANGES: usize = 64;
/// From this many ranges on, claims of different transactions share one.
const CROWDED: usize = 12;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Looked at by every claim.
    Look,
    /// Taken by claims that may still roll back: looked at again after a while.
    Claimed,
    /// Segments of one running transaction: skipped while it runs.
    Running,
    /// The frontier.
    Open,
    /// Taken by the call that is walking; becomes Claimed when the list is settled.
    Taken,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Range {
    pub from: i64,
    pub to: i64,
    /// First seq of the segment that `from` lies in, or UNKNOWN: then a scan starts with a probe backward.
    pub seg: i64,
    /// The transaction that the range waits for, with its epoch; 0 for none or several.
    pub xid: u64,
    /// The transaction of the range's last positions, 0 if unknown: it decides about the right border.
    pub last_xid: u64,
    /// When a Claimed range was last looked at, microseconds since 2000.
    pub checked: i64,
    pub kind: Kind,
    /// What lies to the left was unresolved when this border was made, so a claim may straddle it: the
    /// scan for claims starts with a probe backward.
    pub edge: bool,
    pub tail: bool,
}

impl Range {
    pub fn piece(from: i64, to: i64, seg: i64, kind: Kind, xid: u64, checked: i64) -> Range {
        Range {
            from,
            to,
            seg,
            xid,
            last_xid: xid,
            checked,
            kind,
            edge: false,
            tail: false,
        }
    }

    /// Whether one transaction's end decides about the whole range.
    fn hangs_on_one(&self) -> bool {
        match self.kind {
            Kind::Running | Kind::Claimed => self.xid != 0,
            Kind::Taken => true,
            Kind::Look | Kind::Open => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub struct RangeList {
    pub ranges: Vec<Range>,
}

impl RangeList {
    /// The list of a lane of which only the low-water mark is known.
    pub fn cold(claimed_through: i64) -> RangeList {
        let mut list = RangeList::default();
        list.open(claimed_through + 1, claimed_through + 1, false);
        list
    }

    /// The list of a lane of which only the lowest unresolved position is known: it may lie inside a segment
    /// and inside a claim.
    pub fn from_low(low: i64) -> RangeList {
        let mut list = RangeList::default();
        list.open(low, UNKNOWN, true);
        list
    }

    /// The list that a walk without the claim lock found. A claim made meanwhile may reach across any border,
    /// the frontier too: segments are read before claims, so it may span segments that the walk did not see.
    pub fn unlocked(mut self) -> RangeList {
        for r in &mut self.ranges {
            r.edge = true;
            r.last_xid = 0;
        }
        self
    }

    /// The lowest unresolved position.
    pub fn low(&self) -> i64 {
        self.ranges.first().map_or(0, |r| r.from)
    }

    /// Appends a piece, merged into its left neighbour where both are of one kind. Pieces come in order.
    pub fn push(&mut self, mut piece: Range) {
        if piece.from >= piece.to {
            return;
        }
        let full = self.ranges.len() >= MAX_RANGES - 1;
        let crowded = self.ranges.len() >= CROWDED;
        if let Some(last) = self.ranges.last_mut() {
            let touching = last.to == piece.from;
            let same = last.kind == piece.kind && last.tail == piece.tail;
            let mergeable = touching
                && same
                && match piece.kind {
                    Kind::Look | Kind::Taken => true,
                    // Apart, each is known to be done as soon as its transaction is; many of them would
                    // have to be asked about by every claim, so then they are merged and left alone a while.
                    Kind::Claimed => last.xid == piece.xid || crowded,
                    Kind::Running => last.xid == piece.xid,
                    Kind::Open => false,
                };
            if mergeable {
                last.to = piece.to;
                last.checked = last.checked.min(piece.checked);
                if last.xid != piece.xid {
                    last.xid = 0;
                }
                last.last_xid = piece.last_xid;
                return;
            }
            if full && piece.kind != Kind::Open {
                last.to = piece.to;
                last.kind = Kind::Look;
                last.xid = 0;
                last.last_xid = 0;
                // With a tail piece in it, its numbers may come back: it must fall back as a tail does.
                last.tail |= piece.tail;
                return;
            }
            piece.edge |= touching;
        }
        self.ranges.push(piece);
    }

    /// Appends the frontier.
    pub fn open(&mut self, from: i64, seg: i64, edge: bool) {
        let mut frontier = Range::piece(from, OPEN_END, seg, Kind::Open, 0, 0);
        frontier.edge = edge;
        self.push(frontier);
    }

    /// Ends the list after its open end was walked: `frontier` is the end of the last committed segment (or
    /// less), `seg` the segment start belonging to it. Pieces above it are kept only while they follow without
    /// a gap and hang on one transaction each; what comes after is walked again each time.
    pub fn close_walk(&mut self, frontier: i64, seg: i64, edge: bool) {
        let mut above = Vec::new();
        let mut at = frontier;
        for r in self.ranges.iter().filter(|r| r.to > frontier) {
            let from = r.from.max(frontier);
            if from != at || !r.hangs_on_one() {
                break;
            }
            above.push(Range {
                from,
                seg: UNKNOWN,
                edge: true,
                tail: true,
                ..*r
            });
            at = r.to;
        }
        while self.ranges.last().is_some_and(|r| r.from >= frontier) {
            self.ranges.pop();
        }
        if let Some(last) = self.ranges.last_mut() {
            if last.to > frontier {
                last.to = frontier;
                last.last_xid = last.xid;
            }
        }
        let room = (MAX_RANGES - 1).saturating_sub(self.ranges.len());
        if above.len() > room {
            above.truncate(room);
            at = above.last().map_or(frontier, |r| r.to);
        }
        let seg = if at == frontier { seg } else { UNKNOWN };
        let edge = edge || !above.is_empty();
        for r in above {
            self.push(r);
        }
        self.open(at, seg, edge);
    }

    /// A committed segment was seen above the tail: its numbers can not come back any more, so what is left
    /// of it are ordinary ranges.
    pub fn tail_is_covered(&mut self) {
        for r in &mut self.ranges {
            r.tail = false;
        }
    }

    /// Turns what the walking call took into ranges claimed by its transaction.
    pub fn settle(self, xid: u64) -> RangeList {
        let mut settled = RangeList::default();
        for mut r in self.ranges {
            if r.kind == Kind::Taken {
                r.kind = Kind::Claimed;
                r.xid = xid;
                r.last_xid = xid;
            }
            settled.push(r);
        }
        settled
    }

    /// What must hold of every list.
    #[cfg(test)]
    fn is_sound(&self) -> bool {
        let open_last = self
            .ranges
            .last()
            .is_some_and(|r| r.kind == Kind::Open && r.to == OPEN_END);
        let ordered = self
            .ranges
            .windows(2)
            .all(|w| w[0].to <= w[1].from && w[0].kind != Kind::Open);
        open_last && ordered && self.ranges.len() <= MAX_RANGES && self.ranges.iter().all(|r| r.from < r.to)
    }
}

impl std::fmt::Display for RangeList {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for (i, r) in self.ranges.iter().enumerate() {
            let kind = match r.kind {
                Kind::Look => "look",
                Kind::Claimed => "claimed",
                Kind::Running => "running",
                Kind::Open => "open",
                Kind::Taken => "taken",
            };
            if i > 0 {
                f.write_str(" ")?;
            }
            match r.to {
                OPEN_END => write!(f, "[{},inf)", r.from)?,
                to => write!(f, "[{},{to})", r.from)?,
            }
            write!(
                f,
                "{kind}{}{}",
                if r.tail { " tail" } else { "" },
                if r.edge { " edge" } else { "" }
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(from: i64, to: i64, kind: Kind, xid: u64) -> Range {
        Range::piece(from, to, from, kind, xid, 100)
    }

    #[test]
    fn neighbours_of_one_kind_merge() {
        let mut l = RangeList::default();
        l.push(piece(1, 5, Kind::Claimed, 7));
        l.push(piece(5, 9, Kind::Claimed, 7));
        assert_eq!((l.ranges.len(), l.ranges[0].to, l.ranges[0].xid), (1, 9, 7));
        l.push(piece(9, 10, Kind::Claimed, 8));
        assert_eq!((l.ranges.len(), l.ranges[0].to, l.ranges[1].xid), (2, 9, 8));
        for i in 10..40 {
            l.push(piece(i, i + 1, Kind::Claimed, i as u64));
        }
        let crowd = l.ranges.last().unwrap();
        assert_eq!(
            (l.ranges.len(), crowd.to, crowd.xid, crowd.last_xid),
            (CROWDED, 40, 0, 39)
        );
    }

    #[test]
    fn running_segments_merge_only_within_a_transaction() {
        let mut l = RangeList::default();
        l.push(piece(1, 5, Kind::Running, 7));
        l.push(piece(5, 9, Kind::Running, 8));
        assert_eq!(l.ranges.len(), 2);
        assert!(l.ranges[1].edge && !l.ranges[0].edge);
    }

    #[test]
    fn a_border_made_beside_an_unresolved_range_keeps_its_mark() {
        let mut l = RangeList::default();
        l.push(piece(1, 5, Kind::Look, 0));
        l.push(piece(5, 9, Kind::Claimed, 3));
        l.open(9, 9, false);
        assert_eq!(
            l.ranges.iter().map(|r| r.edge).collect::<Vec<_>>(),
            [false, true, true]
        );
    }

    #[test]
    fn a_full_list_loses_precision_and_no_position() {
        let mut l = RangeList::default();
        for i in 0..200 {
            l.push(piece(i * 10, i * 10 + 3, Kind::Running, i as u64 + 1));
        }
        l.open(5000, 5000, false);
        assert!(l.is_sound());
        for i in 0..200 {
            assert!(
                l.ranges.iter().any(|r| r.from <= i * 10 && i * 10 + 3 <= r.to),
                "lost {i}"
            );
        }
    }

    #[test]
    fn the_frontier_never_passes_the_last_committed_end() {
        let mut l = RangeList::default();
        l.push(piece(1, 4, Kind::Claimed, 5));
        l.push(piece(10, 20, Kind::Running, 6)); // above a gap: its numbers may come back
        l.close_walk(4, 4, false);
        assert_eq!(l.ranges.len(), 2);
        assert_eq!((l.ranges[1].from, l.ranges[1].kind), (4, Kind::Open));
        assert!(l.is_sound());
    }

    #[test]
    fn running_segments_above_it_are_skipped_as_tail() {
        let mut l = RangeList::default();
        l.push(piece(1, 4, Kind::Look, 0));
        l.push(piece(4, 20, Kind::Running, 6));
        l.push(piece(20, 30, Kind::Running, 9));
        l.close_walk(4, 4, false);
        let kinds: Vec<_> = l.ranges.iter().map(|r| (r.from, r.to, r.tail)).collect();
        assert_eq!(
            kinds,
            [
                (1, 4, false),
                (4, 20, true),
                (20, 30, true),
                (30, OPEN_END, false)
            ]
        );
        assert_eq!(l.ranges[3].seg, UNKNOWN);
        assert!(l.is_sound());
    }

    #[test]
    fn a_piece_across_the_frontier_is_cut_there() {
        let mut l = RangeList::default();
        l.push(piece(1, 10, Kind::Claimed, 5));
        l.close_walk(6, 6, false);
        let parts: Vec<_> = l.ranges.iter().map(|r| (r.from, r.to, r.tail)).collect();
        assert_eq!(parts, [(1, 6, false), (6, 10, true), (10, OPEN_END, false)]);
        assert!(l.is_sound());
    }

    #[test]
    fn a_mixed_piece_above_the_frontier_is_not_skipped() {
        let mut l = RangeList::default();
        l.push(piece(6, 10, Kind::Claimed, 0));
        l.close_walk(6, 6, false);
        assert_eq!(l.ranges.len(), 1);
        assert_eq!(l.ranges[0].from, 6);
    }

    #[test]
    fn what_was_taken_stays_apart_until_it_is_settled() {
        let mut l = RangeList::default();
        l.push(piece(1, 5, Kind::Claimed, 7));
        l.push(piece(5, 9, Kind::Taken, 0));
        l.close_walk(9, 9, false);
        assert_eq!(l.ranges.len(), 3);
        let l = l.settle(8);
        assert_eq!(l.ranges.len(), 3);
        assert_eq!(
            (l.ranges[1].kind, l.ranges[1].xid, l.ranges[1].to),
            (Kind::Claimed, 8, 9)
        );
        assert!(l.is_sound());
    }

    #[test]
    fn a_tail_merged_into_a_full_list_still_falls_back() {
        let mut l = RangeList::default();
        for i in 0..MAX_RANGES as i64 - 1 {
            l.push(piece(i * 10, i * 10 + 3, Kind::Running, i as u64 + 1));
        }
        let mut tail = piece(5000, 5010, Kind::Running, 99);
        tail.tail = true;
        l.push(tail);
        let last = l.ranges.last().unwrap();
        assert!(last.tail && last.xid == 0 && last.to == 5010);
    }
}
