//! Taking given positions out of a lane, for verbs that end or move jobs that wait there.
//!
//! A position is taken by a claim row like any other, under the lane's claim lock, and closed by its taker in
//! the same transaction. The lane's ranges are left as they are: they are a cache, and a walk finds the claim.

use crate::error::Result;
use crate::ids;
use crate::lane::LaneId;
use crate::logs::{claims, BY_LANE_AND_SEQ};
use crate::pg::heap;
use crate::pg::index::{Index, IndexSet};
use crate::pg::inject::{self, Point};
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::scan::{Cond, Direction, Scan, Writer};
use crate::pg::table::{Access, Table};
use crate::pg::time;
use crate::receipt::{Receipt, MAX_PER_CLAIM};
use crate::ring::{Slot, View};
use std::rc::Rc;

/// A position of a segment that is committed, or of the own transaction.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Position {
    pub lane: LaneId,
    pub slot: u8,
    pub seq: i64,
    /// Of its segment: a claim row holds positions of one segment alone.
    pub first_entry: i64,
}

/// What became of one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Taken {
    Mine(Receipt),
    /// A claim that is committed, or the own transaction's, holds it: the job is not waiting any more.
    Gone,
    /// This open transaction has taken it.
    By(u32),
}

/// Positions looked at in one turn under a claim lock.
const MOST_IN_TURN: usize = 256;

struct Claims {
    slot: Slot,
    table: Rc<Table>,
    indexes: IndexSet,
    by_seq: Rc<Index>,
}

impl Claims {
    fn open(slot: &Slot) -> Result<Claims> {
        let table = Rc::new(Table::open(slot.claims, Access::Write));
        let indexes = IndexSet::open(&table);
        indexes.scannable(&table, &claims::BY_NO)?;
        let by_seq = indexes.scannable(&table, &claims::BY_SEQ)?;
        Ok(Claims {
            slot: slot.clone(),
            table,
            indexes,
            by_seq,
        })
    }
}

/// Takes what is still free of `positions`, which are sorted, and says of each what became of it. The slots
/// are kept from being emptied by the caller, who has their logs open.
pub fn take(view: &View, positions: &[Position]) -> Result<Vec<Taken>> {
    let mut taken = Vec::with_capacity(positions.len());
    for same in positions.chunk_by(|a, b| (a.lane, a.slot) == (b.lane, b.slot)) {
        let Some(slot) = view.slot(same[0].slot) else {
            taken.extend(same.iter().map(|_| Taken::Gone));
            continue;
        };
        let open = Claims::open(slot)?;
        let mut rest = same;
        while !rest.is_empty() {
            let numbers = ids::prepare_claim_numbers(view)?;
            let n = take_turn(&open, rest, numbers, &mut taken);
            rest = &rest[n..];
        }
    }
    Ok(taken)
}

/// One turn under the claim lock of the positions' lane; returns how many were dealt with.
fn take_turn(open: &Claims, positions: &[Position], numbers: i64, taken: &mut Vec<Taken>) -> usize {
    let lane = positions[0].lane;
    let positions = &positions[..positions.len().min(MOST_IN_TURN)];
    let now = time::now();
    let mut rows = Vec::new();
    let mut scan = Scan::dirty(&open.table, &open.by_seq, BY_LANE_AND_SEQ);
    inject::reach(Point::ClaimBeforeLock);
    let lock = ShortLock::acquire(Class::Claim, lane.key(), Mode::Exclusive);
    let mut done = 0;
    for run in positions.chunk_by(|a, b| a.first_entry == b.first_entry && a.seq + 1 == b.seq) {
        if rows.len() as i64 >= numbers {
            break;
        }
        let free = run
            .iter()
            .take_while(|p| holder(&mut scan, lane, p.seq).is_none());
        let n = free.count();
        if n > 0 {
            let claim_no = ids::next_claim_number();
            let row = heap::append(
                &open.table,
                &[
                    claim_no.into(),
                    lane.0.into(),
                    run[0].seq.into(),
                    now.into(),
                    now.into(), // closed at once: no lease
                    i16::from(open.slot.no).into(),
                    (n as i16).into(),
                ],
            );
            row.enter_ordering(&open.table, &open.indexes, &claims::BY_SEQ);
            rows.push(row);
            taken.extend((0..n).map(|k| {
                Taken::Mine(Receipt {
                    claim_no,
                    slot: open.slot.no,
                    index: k as u16,
                })
            }));
        }
        done += n;
        if let Some(p) = run.get(n) {
            taken.push(match holder(&mut scan, lane, p.seq) {
                Some(Writer::Running(xid)) => Taken::By(xid),
                _ => Taken::Gone,
            });
            done += 1;
            if n + 1 < run.len() {
                break; // the rest of the run in another turn
            }
        }
    }
    drop(lock);
    drop(scan);
    for row in rows {
        row.enter_rest(&open.table, &open.indexes, &claims::BY_SEQ);
    }
    done
}

/// Who wrote the claim that holds a position. Under the claim lock.
fn holder(scan: &mut Scan, lane: LaneId, seq: i64) -> Option<Writer> {
    scan.seek(&[Cond::Eq(lane.0), Cond::Between(seq - MAX_PER_CLAIM + 1, seq)]);
    if !scan.next(Direction::Backward) {
        return None;
    }
    let writer = scan.writer();
    let end = scan.i64(claims::FIRST_SEQ) + i64::from(scan.i16(claims::N));
    (seq < end).then_some(writer)
}
