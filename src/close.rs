//! The one closing path: complete, cancel_claimed and release end attempts here.
//!
//! Receipts are grouped by claim. Under the claim's short closing lock its row and its closures are looked
//! up with a dirty scan, and one closure row is appended for what this call ends. A closure of another
//! transaction that is still open is waited for, after everything short was given back, and looked at
//! again, since it may roll back.

use crate::bits::Bits;
use crate::body::{Body, Head, Reader};
use crate::counts::{self, Counted};
use crate::error::{Error, Result};
use crate::lane::LaneId;
use crate::locate::Locator;
use crate::logs::{claims, closures, Outcome};
use crate::pg::command;
use crate::pg::datum::{self, Value, Varlena};
use crate::pg::fmgr::ResultSet;
use crate::pg::heap;
use crate::pg::index::{self, Index, IndexSet};
use crate::pg::inject::{self, Point};
use crate::pg::lock::{self, Class, Mode, ShortLock};
use crate::pg::scan::{Cond, Direction, Scan, Writer};
use crate::pg::table::{Access, Table};
use crate::pg::time;
use crate::queue;
use crate::receipt::{block_floor, Receipt, CLAIMS_PER_BLOCK};
use crate::release;
use crate::ring::{self, Slot, View};
use std::collections::hash_map::Entry as Slotted;
use std::collections::HashMap;
use std::rc::Rc;

/// What a finishing verb does.
pub struct Finish {
    pub outcome: Outcome,
    pub reason: Option<Varlena>,
    /// A stale receipt is an error.
    pub strict: bool,
}

/// What became of one receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Ended by this call.
    Ended,
    /// Had been ended so before: a finish repeated after a lost connection.
    Repeated,
    /// Not held any more.
    Stale,
    /// No such claim, or not one that this session can know of.
    Unknown,
}

/// Block numbers that a clock running ahead may have drawn beyond ours.
const CLOCK_TOLERANCE: i64 = 1 << 24;

/// The claim behind a group of receipts.
#[derive(Clone, Copy)]
struct Claim {
    lane: LaneId,
    first_seq: i64,
    n: i64,
}

/// The tables of one slot, as closing needs them.
struct CloseSlot {
    slot: Slot,
    claims: Rc<Table>,
    claims_index: Rc<Index>,
    closures: Rc<Table>,
    closure_index: Rc<Index>,
    closure_indexes: IndexSet,
}

impl CloseSlot {
    fn open(slot: &Slot) -> Result<CloseSlot> {
        let claim_table = Rc::new(Table::open(slot.claims, Access::Read));
        let claims_index = index::scannable(&claim_table, &claims::BY_NO)?;
        let closure_table = Rc::new(Table::open(slot.closures, Access::Write));
        let closure_indexes = IndexSet::open(&closure_table);
        let closure_index = closure_indexes.scannable(&closure_table, &closures::BY_CLAIM)?;
        Ok(CloseSlot {
            slot: slot.clone(),
            claims: claim_table,
            claims_index,
            closures: closure_table,
            closure_index,
            closure_indexes,
        })
    }
}

/// Receipts of one claim: position in the input and index in the claim, sorted by index.
struct Group {
    claim_no: i64,
    slot: u8,
    members: Vec<(usize, u16)>,
}

fn group(receipts: &[Option<i64>]) -> Vec<Group> {
    let mut decoded: Vec<(Receipt, usize)> = receipts
        .iter()
        .enumerate()
        .filter_map(|(i, r)| Some((Receipt::decode((*r)?)?, i)))
        .collect();
    // Sorted, so that two calls over the same receipts meet in one order.
    decoded.sort();
    let mut groups: Vec<Group> = Vec::new();
    for (r, i) in decoded {
        match groups.last_mut() {
            Some(g) if g.claim_no == r.claim_no && g.slot == r.slot => g.members.push((i, r.index)),
            _ => groups.push(Group {
                claim_no: r.claim_no,
                slot: r.slot,
                members: vec![(i, r.index)],
            }),
        }
    }
    groups
}

/// What the closures of a claim say, by outcome.
struct Closed {
    by: Vec<(Outcome, Bits)>,
}

impl Closed {
    fn outcome_of(&self, i: u16) -> Option<Outcome> {
        self.by.iter().find(|(_, bits)| bits.has(i)).map(|(o, _)| *o)
    }
}

/// Ends attempts and appends one row per receipt to `out`, in input order.
pub fn finish(receipts: &[Option<i64>], what: &Finish, out: Option<&mut ResultSet>) -> Result<()> {
    let view = ring::view_for_write()?;
    let mut fates = vec![Fate::Unknown; receipts.len()];
    let mut claims_of: HashMap<(i64, u8), Claim> = HashMap::new();
    let mut open: HashMap<u8, CloseSlot> = HashMap::new();
    let groups = group(receipts);
    for g in &groups {
        let Some(slot) = view.slot(g.slot) else {
            for (i, _) in &g.members {
                fates[*i] = missing(g.claim_no);
            }
            continue;
        };
        let tables = match open.entry(g.slot) {
            Slotted::Occupied(known) => known.into_mut(),
            Slotted::Vacant(new) => new.insert(CloseSlot::open(slot)?),
        };
        if let Some(claim) = close_group(tables, g, what, &mut fates)? {
            claims_of.insert((g.claim_no, g.slot), claim);
        }
    }
    if what.strict {
        refuse_stale(receipts, &fates)?;
    }
    drop(open);
    if out.is_none() && what.outcome != Outcome::Released {
        command::next_command();
        return Ok(()); // nobody asks what the jobs were
    }
    let moves_on = what.outcome == Outcome::Released;
    let jobs = read_jobs(&view, &groups, &claims_of, receipts.len(), moves_on)?;
    if moves_on {
        let ended = jobs.iter().zip(&fates).filter(|(_, fate)| **fate == Fate::Ended);
        release::put_back(ended.map(|(job, _)| job.as_ref()))?;
    }
    if let Some(out) = out {
        for (i, receipt) in receipts.iter().enumerate() {
            out.push(&result_row(
                &view,
                *receipt,
                fates[i],
                what.outcome,
                jobs[i].as_ref(),
            )?);
        }
    }
    command::next_command();
    Ok(())
}

fn refuse_stale(receipts: &[Option<i64>], fates: &[Fate]) -> Result<()> {
    let stale: Vec<i64> = receipts
        .iter()
        .zip(fates)
        .filter(|(r, f)| r.is_some() && matches!(f, Fate::Stale | Fate::Unknown))
        .filter_map(|(r, _)| *r)
        .collect();
    match stale.first() {
        Some(first) => Err(Error::Stale {
            stale: stale.len(),
            first: *first,
        }),
        None => Ok(()),
    }
}

/// A claim that is not found has been emptied with its slot, or rolled back, or never was.
fn missing(claim_no: i64) -> Fate {
    let plausible = (block_floor(time::now()) + CLOCK_TOLERANCE) * CLAIMS_PER_BLOCK;
    if claim_no <= plausible {
        Fate::Stale
    } else {
        Fate::Unknown
    }
}

fn close_group(slot: &CloseSlot, g: &Group, what: &Finish, fates: &mut [Fate]) -> Result<Option<Claim>> {
    loop {
        inject::reach(Point::CloseBeforeLock);
        let lock = ShortLock::acquire(Class::Close, g.claim_no as u64, Mode::Exclusive);
        let Some(found) = find_claim(slot, g.claim_no) else {
            for (i, _) in &g.members {
                fates[*i] = missing(g.claim_no);
            }
            return Ok(None);
        };
        let Some(claim) = found else {
            for (i, _) in &g.members {
                fates[*i] = Fate::Unknown;
            }
            return Ok(None);
        };
        inject::reach(Point::CloseLocked);
        match read_closures(slot, g, &claim) {
            Err(xid) => {
                drop(lock);
                lock::wait_for_xid(xid);
            }
            Ok(closed) => {
                append_closures(slot, g, &claim, &closed, what, fates, lock)?;
                return Ok(Some(claim));
            }
        }
    }
}

/// The claim of a number: None where there is none, Some(None) where it belongs to another transaction
/// that has not committed.
fn find_claim(slot: &CloseSlot, claim_no: i64) -> Option<Option<Claim>> {
    let mut scan = Scan::dirty(&slot.claims, &slot.claims_index, 1);
    scan.seek(&[Cond::Eq(claim_no)]);
    if !scan.next(Direction::Forward) {
        return None;
    }
    if matches!(scan.writer(), Writer::Running(_)) {
        return Some(None);
    }
    Some(Some(Claim {
        lane: LaneId(scan.i64(claims::LANE_ID)),
        first_seq: scan.i64(claims::FIRST_SEQ),
        n: i64::from(scan.i16(claims::N)),
    }))
}

/// What is closed of a claim, or the transaction to wait for: one that is open and closes what this call
/// wants to close.
fn read_closures(slot: &CloseSlot, g: &Group, claim: &Claim) -> std::result::Result<Closed, u32> {
    let mut closed = Closed { by: Vec::new() };
    let mut scan = Scan::dirty(&slot.closures, &slot.closure_index, 1);
    scan.seek(&[Cond::Eq(g.claim_no)]);
    while scan.next(Direction::Forward) {
        let writer = scan.writer();
        let Some(outcome) = Outcome::of(scan.char(closures::OUTCOME)) else {
            continue;
        };
        if outcome == Outcome::Stale {
            continue;
        }
        let bits = Bits::of(scan.bytes(closures::WHICH).as_deref());
        if let Writer::Running(xid) = writer {
            let wanted = g
                .members
                .iter()
                .any(|(_, k)| i64::from(*k) < claim.n && bits.has(*k));
            if wanted {
                return Err(xid);
            }
        }
        closed.by.push((outcome, bits));
    }
    Ok(closed)
}

fn append_closures(
    slot: &CloseSlot,
    g: &Group,
    claim: &Claim,
    closed: &Closed,
    what: &Finish,
    fates: &mut [Fate],
    lock: ShortLock,
) -> Result<()> {
    let mut mine = Bits::none();
    let mut late = Bits::none();
    let mut fresh = 0i64;
    let mut stale = 0i64;
    for (i, k) in &g.members {
        fates[*i] = if i64::from(*k) >= claim.n {
            Fate::Unknown
        } else if mine.has(*k) {
            Fate::Ended // the receipt twice in one call
        } else {
            match closed.outcome_of(*k) {
                None => {
                    mine.set(*k);
                    fresh += 1;
                    Fate::Ended
                }
                Some(o) if o == what.outcome => Fate::Repeated,
                Some(_) => {
                    // Each once, however often the call names it.
                    stale += i64::from(!late.has(*k));
                    late.set(*k);
                    Fate::Stale
                }
            }
        };
    }
    let mut rows = Vec::new();
    if fresh > 0 {
        let whole = fresh == claim.n && closed.by.is_empty();
        let which = (!whole).then(|| datum::bytea(mine.stored(claim.n)));
        rows.push(closure_row(
            slot,
            g.claim_no,
            fresh,
            what.outcome,
            which,
            what.reason,
        ));
    }
    drop(lock);
    for row in rows {
        row.enter_rest(&slot.closures, &slot.closure_indexes, &closures::BY_CLAIM);
    }
    counts::add(&ring::tables()?, claim.lane.queue_id(), Counted::Stale, stale)
}

fn closure_row(
    slot: &CloseSlot,
    claim_no: i64,
    n: i64,
    outcome: Outcome,
    which: Option<Varlena>,
    reason: Option<Varlena>,
) -> heap::Appended {
    let row = heap::append(
        &slot.closures,
        &[
            claim_no.into(),
            time::now().into(),
            i16::from(slot.slot.no).into(),
            (n as i16).into(),
            Value::Char(outcome.code()),
            which.into(),
            reason.into(),
        ],
    );
    row.enter_ordering(&slot.closures, &slot.closure_indexes, &closures::BY_CLAIM);
    row
}

/// A job behind a receipt.
pub struct Job {
    pub lane: LaneId,
    pub head: Head,
    /// All that it brings along, where it moves on.
    pub body: Option<Body>,
    pub segment_at: i64,
}

/// Reads the jobs behind the receipts of known claims, by input position.
fn read_jobs(
    view: &View,
    groups: &[Group],
    claims_of: &HashMap<(i64, u8), Claim>,
    n: usize,
    whole: bool,
) -> Result<Vec<Option<Job>>> {
    let mut jobs: Vec<Option<Job>> = (0..n).map(|_| None).collect();
    let mut reader = Reader::new();
    let mut locators: HashMap<u8, Locator> = HashMap::new();
    for g in groups {
        let (Some(claim), Some(slot)) = (claims_of.get(&(g.claim_no, g.slot)), view.slot(g.slot)) else {
            continue;
        };
        let locator = match locators.entry(g.slot) {
            Slotted::Occupied(known) => known.into_mut(),
            Slotted::Vacant(new) => new.insert(Locator::open(slot)?),
        };
        for (i, k) in &g.members {
            if i64::from(*k) >= claim.n {
                continue;
            }
            let seq = claim.first_seq + i64::from(*k);
            let Some(at) = locator.find(claim.lane, seq, claim.first_seq + claim.n - 1) else {
                continue;
            };
            let k = (seq - at.first_seq) as usize;
            let entry_id = at.first_entry + k as i64;
            let body = whole.then(|| reader.read(slot, &at.runs, k, entry_id)).flatten();
            let head = match &body {
                Some(body) => Some(body.head),
                None => reader.read_head(slot, &at.runs, k, entry_id),
            };
            jobs[*i] = head.map(|head| Job {
                lane: claim.lane,
                head,
                body,
                segment_at: at.enqueued_at,
            });
        }
    }
    Ok(jobs)
}

fn result_row(
    view: &View,
    receipt: Option<i64>,
    fate: Fate,
    outcome: Outcome,
    job: Option<&Job>,
) -> Result<[Value; 8]> {
    let state = match fate {
        Fate::Ended | Fate::Repeated => outcome.state(),
        Fate::Stale => "stale",
        Fate::Unknown => "unknown",
    };
    let mut row = [Value::Null; 8];
    row[0] = if fate == Fate::Unknown && receipt.is_none() {
        Value::Null
    } else {
        receipt.into()
    };
    row[5] = state.into();
    row[7] = (fate == Fate::Ended).into();
    let Some(job) = job.filter(|_| fate != Fate::Unknown) else {
        return Ok(row);
    };
    let queue = queue::find_by_id(view, job.lane.queue_id())?;
    let queue_name = queue.as_ref().map(|q| q.name.as_str());
    row[1] = job.head.job_id.into();
    row[2] = queue_name.into();
    row[3] = job.head.kind.map_or_else(|| queue_name.into(), Value::from);
    row[4] = i32::from(job.head.attempt).into();
    if fate == Fate::Ended && outcome == Outcome::Released {
        row[6] = time::now().into();
    }
    Ok(row)
}

/// Closes jobs whose row is nowhere to be found as failed, with a warning, so that a damaged table never
/// stops a lane.
pub fn close_lost(lost: &[Receipt]) -> Result<()> {
    if lost.is_empty() {
        return Ok(());
    }
    crate::pg::warn::warning(
        &format!(
            "{} jobs were closed as failed because their rows are lost",
            lost.len()
        ),
        "Check the ready tables in schema awa_internal for damage or for rows that somebody removed.",
    );
    let receipts: Vec<Option<i64>> = lost.iter().map(|r| Some(r.encode())).collect();
    let what = Finish {
        outcome: Outcome::Failed,
        reason: Some(datum::text("row lost")),
        strict: false,
    };
    finish(&receipts, &what, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receipt(claim_no: i64, index: u16) -> Option<i64> {
        Some(
            Receipt {
                claim_no,
                slot: 3,
                index,
            }
            .encode(),
        )
    }

    #[test]
    fn receipts_are_grouped_by_claim_whatever_their_order() {
        let groups = group(&[
            receipt(9, 4),
            None,
            receipt(7, 1),
            receipt(9, 2),
            Some(-5),
            receipt(7, 1),
        ]);
        assert_eq!(groups.len(), 2);
        assert_eq!(
            (groups[0].claim_no, groups[0].members.clone()),
            (7, vec![(2, 1), (5, 1)])
        );
        assert_eq!(
            (groups[1].claim_no, groups[1].members.clone()),
            (9, vec![(3, 2), (0, 4)])
        );
    }
}
