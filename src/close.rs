//! The one closing path: complete, fail, snooze, release, cancel_claimed and the rescue of expired leases end
//! attempts here.
//!
//! Receipts are grouped by claim. Under the claim's short closing lock its closures are looked up with a dirty
//! scan, and one closure row per outcome is appended for what this call ends. A closure of another
//! transaction that is still open is waited for, after everything short was given back, and looked at
//! again, since it may roll back; maintenance skips such attempts instead.
//!
//! Where the outcome depends on the job (is another attempt left?), its row is read before the lock.

use crate::bits::Bits;
use crate::body::{Body, Head, Reader};
use crate::checkpoint::Checkpoints;
use crate::counts::{self, Counted};
use crate::dead;
use crate::defer;
use crate::error::{Error, Result};
use crate::expiry;
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
use crate::pg::time::{self, Interval};
use crate::queue;
use crate::receipt::{block_floor, Receipt, CLAIMS_PER_BLOCK};
use crate::release;
use crate::ring::{self, Slot, View};
use std::collections::hash_map::Entry as Slotted;
use std::collections::HashMap;
use std::rc::Rc;

/// Who ends the attempts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verb {
    Complete,
    Fail,
    Snooze,
    Release,
    CancelClaimed,
    /// The end of the lease.
    Rescue,
}

impl Verb {
    /// Whether the outcome depends on the job itself.
    fn needs_job(self) -> bool {
        matches!(self, Verb::Fail | Verb::Rescue)
    }

    /// Whether an attempt that ended so was ended by this verb, so that repeating it is no error. A cancelled
    /// job's report is accepted again whatever the worker reports.
    fn made(self, outcome: Outcome) -> bool {
        match outcome {
            Outcome::Completed => self == Verb::Complete,
            Outcome::Cancelled => self == Verb::CancelClaimed,
            Outcome::CancelledOnRequest => self != Verb::Rescue,
            Outcome::Failed | Outcome::Retried => self == Verb::Fail,
            Outcome::LeaseFailed | Outcome::Rescued => self == Verb::Rescue,
            Outcome::Released => self == Verb::Release,
            Outcome::Snoozed => self == Verb::Snooze,
            Outcome::CancelRequested | Outcome::BroughtBack => false,
        }
    }
}

/// What a finishing verb does.
pub struct Finish {
    pub verb: Verb,
    /// Of a failure its message, of a cancellation its reason.
    pub reason: Option<Varlena>,
    /// Of failures, by input position.
    pub details: Vec<Option<Varlena>>,
    /// A stale receipt is an error.
    pub strict: bool,
    /// Instead of the queue's backoff.
    pub retry_in: Option<Interval>,
    /// No further attempt.
    pub permanent: bool,
    /// How long snoozed jobs are put off.
    pub delay: Interval,
    /// Until when, instead of the delay.
    pub run_at: Option<i64>,
    /// Whether an attempt that another open transaction is ending is waited for, or skipped.
    pub wait: bool,
}

impl Finish {
    pub fn by(verb: Verb) -> Finish {
        Finish {
            verb,
            reason: None,
            details: Vec::new(),
            strict: false,
            retry_in: None,
            permanent: false,
            delay: Interval::default(),
            run_at: None,
            wait: true,
        }
    }

    /// How the attempt ends, if nobody asked to cancel it.
    fn outcome(&self, job: Option<&Job>) -> Outcome {
        let last = job.is_none_or(|j| j.body.as_ref().is_none_or(|b| j.head.attempt >= b.max_attempts));
        match self.verb {
            Verb::Complete => Outcome::Completed,
            Verb::Snooze => Outcome::Snoozed,
            Verb::Release => Outcome::Released,
            Verb::CancelClaimed => Outcome::Cancelled,
            // Without its row a job can not go anywhere: it ends here.
            Verb::Fail if self.permanent || last => Outcome::Failed,
            Verb::Fail => Outcome::Retried,
            Verb::Rescue if last => Outcome::LeaseFailed,
            Verb::Rescue => Outcome::Rescued,
        }
    }
}

/// What became of one receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Ended by this call.
    Ended(Outcome),
    /// Had been ended so before: a finish repeated after a lost connection.
    Repeated(Outcome),
    /// Not held any more.
    Stale,
    /// No such claim, or not one that this session can know of.
    Unknown,
    /// Another open transaction is ending it, and it was not waited for.
    Skipped,
}

impl Fate {
    pub fn ended(self) -> Option<Outcome> {
        match self {
            Fate::Ended(outcome) => Some(outcome),
            _ => None,
        }
    }
}

/// Block numbers that a clock running ahead may have drawn beyond ours.
const CLOCK_TOLERANCE: i64 = 1 << 24;

/// The claim behind a group of receipts.
#[derive(Clone)]
struct Claim {
    lane: LaneId,
    first_seq: i64,
    n: i64,
    /// Only read where a failure is noted with it.
    worker: Option<String>,
}

/// The tables of one slot, as closing needs them.
pub struct CloseSlot {
    slot: Slot,
    claims: Rc<Table>,
    claims_index: Rc<Index>,
    pub closures: Rc<Table>,
    pub closure_index: Rc<Index>,
    pub closure_indexes: IndexSet,
}

impl CloseSlot {
    pub fn open(slot: &Slot) -> Result<CloseSlot> {
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

impl Group {
    fn all(&self, fates: &mut [Fate], fate: Fate) {
        for (i, _) in &self.members {
            fates[*i] = fate;
        }
    }
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
    /// Closed by transactions that are still open.
    in_progress: Bits,
    /// Asked to be cancelled.
    cancel: Bits,
}

impl Closed {
    fn outcome_of(&self, i: u16) -> Option<Outcome> {
        self.by.iter().find(|(_, bits)| bits.has(i)).map(|(o, _)| *o)
    }
}

/// Ends attempts and appends one row per receipt to `out`, in input order.
pub fn finish(receipts: &[Option<i64>], what: &Finish, out: Option<&mut ResultSet>) -> Result<Vec<Fate>> {
    let view = ring::view_for_write()?;
    let mut fates = vec![Fate::Unknown; receipts.len()];
    let mut open: HashMap<u8, CloseSlot> = HashMap::new();
    let groups = group(receipts);
    let mut known: Vec<(&Group, Claim)> = Vec::new();
    for g in &groups {
        let Some(slot) = view.slot(g.slot) else {
            g.all(&mut fates, missing(g.claim_no));
            continue;
        };
        let tables = match open.entry(g.slot) {
            Slotted::Occupied(open) => open.into_mut(),
            Slotted::Vacant(new) => new.insert(CloseSlot::open(slot)?),
        };
        // A claim's row never changes, so it is looked up before the lock.
        match find_claim(tables, g.claim_no, what.verb.needs_job()) {
            Found::Claim(claim) => known.push((g, claim)),
            Found::OfOthers => {}
            Found::Nothing => g.all(&mut fates, missing(g.claim_no)),
        }
    }
    let mut jobs: Vec<Option<Job>> = Vec::new();
    if what.verb.needs_job() {
        jobs = read_jobs(&view, &known, receipts.len(), true)?;
    }
    for (g, claim) in &known {
        close_group(&open[&g.slot], g, claim, what, &jobs, &mut fates)?;
    }
    if what.strict {
        refuse_stale(receipts, &fates)?;
    }
    drop(open);
    let moved = fates.iter().any(|f| f.ended().is_some_and(Outcome::moves_on));
    if out.is_none() && !moved && jobs.is_empty() {
        command::next_command();
        return Ok(fates); // nobody asks what the jobs were
    }
    if jobs.is_empty() {
        jobs = read_jobs(&view, &known, receipts.len(), moved)?;
    }
    let run_at = move_on(&view, what, &fates, &jobs)?;
    if let Some(out) = out {
        for (i, receipt) in receipts.iter().enumerate() {
            out.push(&result_row(
                &view,
                *receipt,
                fates[i],
                jobs[i].as_ref(),
                run_at[i],
            )?);
        }
    }
    command::next_command();
    Ok(fates)
}

/// Takes jobs that live on, or are kept as dead letters, to where they go; returns when each is due.
fn move_on(view: &Rc<View>, what: &Finish, fates: &[Fate], jobs: &[Option<Job>]) -> Result<Vec<Option<i64>>> {
    let mut due = vec![None; fates.len()];
    let now = time::now();
    let mut released = Vec::new();
    let mut put_off = Vec::new();
    let mut checkpoints = None;
    let mut dead = Vec::new();
    let mut seen = std::collections::HashSet::new();
    for (i, fate) in fates.iter().enumerate() {
        let Some(outcome) = fate.ended() else { continue };
        let job = jobs[i].as_ref();
        let first = job.is_none_or(|j| seen.insert(j.head.entry_id)); // else the receipt twice in one call
        match outcome {
            Outcome::Released => {
                due[i] = Some(now);
                if first {
                    released.push(job);
                }
            }
            Outcome::Snoozed | Outcome::Retried | Outcome::Rescued => {
                let (job, body) = whole(job)?;
                let queue = queue::find_by_id(view, job.lane.queue_id())?;
                let checkpoints = match &checkpoints {
                    Some(checkpoints) => checkpoints,
                    None => checkpoints.insert(Checkpoints::open()?),
                };
                let checkpoint = checkpoints.of(job.receipt);
                let queue = queue.as_deref();
                let put = defer::between_attempts(view, what, outcome, i, job, body, queue, checkpoint, now);
                due[i] = Some(put.run_at);
                if first {
                    put_off.push(put);
                }
            }
            Outcome::Failed | Outcome::LeaseFailed => {
                if let Some(job) = job.filter(|j| first && j.body.is_some()) {
                    dead.push((i, outcome, job));
                }
            }
            _ => {}
        }
    }
    release::put_back(released.into_iter())?;
    defer::put(view, &put_off)?;
    dead::keep(view, what, &dead, now)?;
    Ok(due)
}

/// The job with its body, where it has to be taken along.
pub fn whole(job: Option<&Job>) -> Result<(&Job, &Body)> {
    // Closed without it, it would be gone; the error undoes that.
    job.and_then(|j| Some((j, j.body.as_ref()?)))
        .ok_or_else(|| Error::Layout("the row of a job that lives on is lost".to_string()))
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

fn close_group(
    slot: &CloseSlot,
    g: &Group,
    claim: &Claim,
    what: &Finish,
    jobs: &[Option<Job>],
    fates: &mut [Fate],
) -> Result<()> {
    loop {
        inject::reach(Point::CloseBeforeLock);
        let lock = ShortLock::acquire(Class::Close, g.claim_no as u64, Mode::Exclusive);
        inject::reach(Point::CloseLocked);
        match read_closures(slot, g, claim, what.wait) {
            Err(xid) => {
                drop(lock);
                lock::wait_for_xid(xid);
            }
            Ok(closed) => {
                append_closures(slot, g, claim, &closed, what, jobs, fates, lock)?;
                return Ok(());
            }
        }
    }
}

/// What the claims say of a number.
enum Found {
    Claim(Claim),
    /// It belongs to another transaction that has not committed.
    OfOthers,
    Nothing,
}

fn find_claim(slot: &CloseSlot, claim_no: i64, with_worker: bool) -> Found {
    let mut scan = Scan::dirty(&slot.claims, &slot.claims_index, 1);
    scan.seek(&[Cond::Eq(claim_no)]);
    if !scan.next(Direction::Forward) {
        return Found::Nothing;
    }
    if matches!(scan.writer(), Writer::Running(_)) {
        return Found::OfOthers;
    }
    Found::Claim(Claim {
        lane: LaneId(scan.i64(claims::LANE_ID)),
        first_seq: scan.i64(claims::FIRST_SEQ),
        n: i64::from(scan.i16(claims::N)),
        worker: if with_worker {
            scan.text(claims::WORKER)
        } else {
            None
        },
    })
}

/// What is closed of a claim, or the transaction to wait for: one that is open and closes what this call
/// wants to close (or asks to cancel it).
fn read_closures(slot: &CloseSlot, g: &Group, claim: &Claim, wait: bool) -> std::result::Result<Closed, u32> {
    let mut closed = Closed {
        by: Vec::new(),
        in_progress: Bits::none(),
        cancel: Bits::none(),
    };
    let mut scan = Scan::dirty(&slot.closures, &slot.closure_index, 1);
    scan.seek(&[Cond::Eq(g.claim_no)]);
    while scan.next(Direction::Forward) {
        let writer = scan.writer();
        let Some(outcome) = Outcome::of(scan.char(closures::OUTCOME)) else {
            continue;
        };
        if outcome == Outcome::BroughtBack {
            continue;
        }
        let bits = Bits::of(scan.bytes(closures::WHICH).as_deref());
        if let Writer::Running(xid) = writer {
            let mut wanted = g
                .members
                .iter()
                .filter(|(_, k)| i64::from(*k) < claim.n && bits.has(*k));
            if wait && wanted.next().is_some() {
                return Err(xid);
            }
            closed.in_progress.add(&bits);
        } else if outcome == Outcome::CancelRequested {
            closed.cancel.add(&bits);
        } else {
            closed.by.push((outcome, bits));
        }
    }
    Ok(closed)
}

#[allow(clippy::too_many_arguments)] // the lock goes in and is given back half-way
fn append_closures(
    slot: &CloseSlot,
    g: &Group,
    claim: &Claim,
    closed: &Closed,
    what: &Finish,
    jobs: &[Option<Job>],
    fates: &mut [Fate],
    lock: ShortLock,
) -> Result<()> {
    let mut mine: Vec<(Outcome, Bits, i64)> = Vec::new();
    let mut late = Bits::none();
    let mut stale = 0i64;
    for (i, k) in &g.members {
        let twice = mine.iter().find(|(_, bits, _)| bits.has(*k)).map(|(o, _, _)| *o);
        fates[*i] = if i64::from(*k) >= claim.n {
            Fate::Unknown
        } else if let Some(outcome) = twice {
            Fate::Ended(outcome) // the receipt twice in one call
        } else {
            match closed.outcome_of(*k) {
                None if closed.in_progress.has(*k) => Fate::Skipped,
                None => {
                    let outcome = if closed.cancel.has(*k) && what.verb != Verb::CancelClaimed {
                        Outcome::CancelledOnRequest
                    } else {
                        what.outcome(jobs.get(*i).and_then(Option::as_ref))
                    };
                    match mine.iter_mut().find(|(o, _, _)| *o == outcome) {
                        Some((_, bits, n)) => {
                            bits.set(*k);
                            *n += 1;
                        }
                        None => {
                            let mut bits = Bits::none();
                            bits.set(*k);
                            mine.push((outcome, bits, 1));
                        }
                    }
                    Fate::Ended(outcome)
                }
                Some(o) if what.verb.made(o) => Fate::Repeated(o),
                Some(_) => {
                    // Each once, however often the call names it.
                    stale += i64::from(!late.has(*k));
                    late.set(*k);
                    Fate::Stale
                }
            }
        };
    }
    if what.verb == Verb::Rescue {
        stale = 0; // nobody's report came late: the rescue did
    }
    let mut rows = Vec::new();
    for (outcome, bits, n) in &mine {
        let whole = *n == claim.n && closed.by.is_empty();
        let which = (!whole).then(|| datum::bytea(bits.stored(claim.n)));
        let reason = what.reason.filter(|_| *outcome != Outcome::CancelledOnRequest);
        rows.push(closure_row(slot, g.claim_no, *n, *outcome, which, reason));
    }
    drop(lock);
    for row in rows {
        row.enter_rest(&slot.closures, &slot.closure_indexes, &closures::BY_CLAIM);
    }
    if stale > 0 {
        counts::add(&ring::tables()?, claim.lane.queue_id(), Counted::Stale, stale)?;
    }
    Ok(())
}

pub fn closure_row(
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
    pub receipt: Receipt,
    /// Who held it, where that is noted with a failure.
    pub worker: Option<String>,
    pub head: Head,
    /// All that it brings along, where it moves on.
    pub body: Option<Body>,
    pub segment_at: i64,
}

/// Reads the jobs behind the receipts of known claims, by input position.
fn read_jobs(view: &View, known: &[(&Group, Claim)], n: usize, whole: bool) -> Result<Vec<Option<Job>>> {
    let mut jobs: Vec<Option<Job>> = (0..n).map(|_| None).collect();
    let mut reader = Reader::new();
    let mut locators: HashMap<u8, Locator> = HashMap::new();
    for (g, claim) in known {
        let Some(slot) = view.slot(g.slot) else {
            continue;
        };
        let locator = match locators.entry(g.slot) {
            Slotted::Occupied(known) => known.into_mut(),
            Slotted::Vacant(new) => new.insert(Locator::open(slot)?),
        };
        for (i, index) in &g.members {
            if i64::from(*index) >= claim.n {
                continue;
            }
            let seq = claim.first_seq + i64::from(*index);
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
                receipt: Receipt {
                    claim_no: g.claim_no,
                    slot: g.slot,
                    index: *index,
                },
                worker: claim.worker.clone(),
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
    job: Option<&Job>,
    run_at: Option<i64>,
) -> Result<[Value; 8]> {
    let state = match fate {
        Fate::Ended(outcome) | Fate::Repeated(outcome) => outcome.state(),
        Fate::Stale | Fate::Skipped => "stale",
        Fate::Unknown => "unknown",
    };
    let mut row = [Value::Null; 8];
    row[0] = receipt.into();
    row[5] = state.into();
    row[6] = run_at.into();
    row[7] = fate.ended().is_some().into();
    let Some(job) = job.filter(|_| fate != Fate::Unknown) else {
        return Ok(row);
    };
    let queue = queue::find_by_id(view, job.lane.queue_id())?;
    let queue_name = queue.as_ref().map(|q| q.name.as_str());
    row[1] = job.head.job_id.into();
    row[2] = queue_name.into();
    row[3] = job.head.kind.map_or_else(|| queue_name.into(), Value::from);
    row[4] = i32::from(job.head.attempt).into();
    Ok(row)
}

/// Notes that ended jobs of a claim were brought back, so that their old entries do not speak for them any more: a
/// job's new entry may go with its slot before the old one does.
pub fn note_brought_back(view: &View, slot: u8, claim_no: i64, n: i64, indexes: &[u16]) -> Result<()> {
    let Some(tables) = view.slot(slot).map(CloseSlot::open).transpose()? else {
        return Ok(()); // emptied: nothing tells of them there
    };
    let mut bits = Bits::none();
    indexes.iter().for_each(|k| bits.set(*k));
    let which = Some(datum::bytea(bits.stored(n)));
    let count = indexes.len() as i64;
    let lock = ShortLock::acquire(Class::Close, claim_no as u64, Mode::Exclusive);
    let row = closure_row(&tables, claim_no, count, Outcome::BroughtBack, which, None);
    drop(lock);
    row.enter_rest(&tables.closures, &tables.closure_indexes, &closures::BY_CLAIM);
    Ok(())
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
        reason: Some(datum::text("row lost")),
        permanent: true,
        ..Finish::by(Verb::Fail)
    };
    finish(&receipts, &what, None)?;
    Ok(())
}

/// Closes jobs that were claimed and have waited longer than they may.
pub fn close_expired(expired: &[Receipt]) -> Result<()> {
    if expired.is_empty() {
        return Ok(());
    }
    let receipts: Vec<Option<i64>> = expired.iter().map(|r| Some(r.encode())).collect();
    let what = Finish {
        reason: Some(datum::text(expiry::REASON)),
        ..Finish::by(Verb::CancelClaimed)
    };
    finish(&receipts, &what, None)?;
    Ok(())
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
