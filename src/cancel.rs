//! Cancelling jobs by id. A waiting job is taken out of its lane and closed as cancelled, a deferred one gets an
//! entry first, so that the logs tell of it as of any other. A running one is asked to stop: a closure that
//! ends nothing, which its worker learns of by its heartbeat and which decides how its report ends.

use crate::bits::Bits;
use crate::by_id::{self, Answer, Work};
use crate::close::{self, CloseSlot, Finish, Verb};
use crate::defer::{self, Deferred};
use crate::enqueue;
use crate::error::{Error, Result};
use crate::find::{Entry, Finder, Is, Where};
use crate::lane::LaneId;
use crate::logs::{closures, Outcome};
use crate::pg::command;
use crate::pg::datum::{self, Varlena};
use crate::pg::inject::{self, Point};
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::scan::{Cond, Direction, Scan, Writer};
use crate::resting::{self, Removed};
use crate::ring::{self, View};
use crate::take::{self, Position, Taken};
use std::collections::{BTreeMap, HashMap};

/// What a cancellation does.
#[derive(Clone, Copy)]
pub struct Cancel {
    pub reason: Option<Varlena>,
    /// Running jobs are asked to stop.
    pub running: bool,
    /// Only jobs that may not wait beyond this time.
    pub expired_at: Option<i64>,
    /// Others' open transactions are waited for; or jobs that they have in hand are left out.
    pub wait: bool,
}

/// Cancels jobs and says what became of each that there is.
pub fn cancel(ids: &[i64], what: Cancel) -> Result<HashMap<i64, Answer>> {
    by_id::work(ids, what.wait, |finder, jobs, work| act(finder, jobs, what, work))
}

/// An attempt that is asked to stop.
struct Running {
    id: i64,
    index: u16,
    answer: Answer,
}

fn act(mut finder: Finder, jobs: Vec<(i64, Where)>, what: Cancel, work: &mut Work) -> Result<()> {
    let view = finder.view.clone();
    let mut ready: Vec<(Position, i64, Answer)> = Vec::new();
    let mut running: BTreeMap<(i64, u8, i64), Vec<Running>> = BTreeMap::new();
    let mut deferred = Vec::new();
    for (id, place) in jobs {
        let entry = match place {
            Where::Nowhere => {
                work.answer(id, Answer::UNKNOWN);
                continue;
            }
            Where::Dead(place) => {
                resting::answer_of_letter(id, place, work)?;
                continue;
            }
            Where::Deferred(place) => {
                deferred.push((id, place));
                continue;
            }
            Where::Entry(entry) => entry,
        };
        let head = view.slot(entry.slot).and_then(|slot| {
            finder
                .reader
                .read_head(slot, &entry.runs, entry.offset(), entry.entry_id)
        });
        let answer = |state, changed| Answer::of(entry.lane, head.and_then(|h| h.kind), state, changed);
        match &entry.is {
            Is::Ready if !may_be_cancelled(&mut finder, &entry, what) => {
                work.answer(id, answer("ready", false));
            }
            Is::Ready => ready.push((by_id::position(&entry), id, answer("cancelled", true))),
            Is::Running { claim_no, index, n } if what.running => running
                .entry((*claim_no, entry.slot, *n))
                .or_default()
                .push(Running {
                    id,
                    index: *index,
                    answer: answer("running", true),
                }),
            Is::Running { .. } => work.answer(id, answer("running", false)),
            Is::Ended(ending) => work.answer(id, answer(ending.outcome.state(), false)),
        }
    }
    let receipts = take_waiting(&view, ready, work)?;
    let snapshot = finder.snapshot();
    drop(finder);
    close_as_cancelled(&receipts, what)?;
    cancel_deferred(&view, &deferred, what, work)?;
    for ((claim_no, slot, n), mut members) in running {
        members.sort_by_key(|m| m.index);
        request(claim_no, slot, n, members, what, work)?;
    }
    drop(snapshot);
    Ok(())
}

/// Whether a waiting job is one of those that are meant.
fn may_be_cancelled(finder: &mut Finder, entry: &Entry, what: Cancel) -> bool {
    let Some(at) = what.expired_at else { return true };
    let view = finder.view.clone();
    let body = view.slot(entry.slot).and_then(|slot| {
        finder
            .reader
            .read(slot, &entry.runs, entry.offset(), entry.entry_id)
    });
    body.and_then(|b| b.expires_at()).is_some_and(|until| until <= at)
}

/// Takes waiting jobs out of their lanes, as far as they still wait, and returns the receipts.
pub fn take_waiting(
    view: &View,
    mut ready: Vec<(Position, i64, Answer)>,
    work: &mut Work,
) -> Result<Vec<Option<i64>>> {
    ready.sort_by_key(|(position, _, _)| *position);
    let positions: Vec<Position> = ready.iter().map(|(p, _, _)| *p).collect();
    let mut receipts = Vec::new();
    for ((_, id, answer), taken) in ready.into_iter().zip(take::take(view, &positions)?) {
        match taken {
            Taken::Mine(receipt) => {
                receipts.push(Some(receipt.encode()));
                work.answer(id, answer);
            }
            Taken::Gone => work.again.push(id),
            Taken::By(xid) => {
                work.again.push(id);
                work.wait_for.insert(xid);
            }
        }
    }
    Ok(receipts)
}

fn close_as_cancelled(receipts: &[Option<i64>], what: Cancel) -> Result<()> {
    if receipts.is_empty() {
        return Ok(());
    }
    let finish = Finish {
        reason: what.reason,
        ..Finish::by(Verb::CancelClaimed)
    };
    let fates = close::finish(receipts, &finish, None)?;
    if fates.iter().any(|f| f.ended() != Some(Outcome::Cancelled)) {
        return Err(Error::Internal(
            "a job that was taken to be cancelled could not be closed".to_string(),
        ));
    }
    Ok(())
}

/// Deferred jobs get an entry of their own, which is taken and closed with this transaction.
fn cancel_deferred(
    view: &View,
    deferred: &[(i64, crate::pg::heap::Place)],
    what: Cancel,
    work: &mut Work,
) -> Result<()> {
    if deferred.is_empty() {
        return Ok(());
    }
    let mut jobs: Vec<Deferred> = Vec::new();
    let meant = |job: &Deferred| {
        what.expired_at
            .is_none_or(|at| job.expires_at().is_some_and(|until| until <= at))
    };
    for removed in resting::remove_deferred(view, deferred, what.wait, meant)? {
        match removed {
            Removed::Job(job) => jobs.push(job),
            Removed::Left(id, answer) => work.answer(id, answer),
            Removed::Moved(id) => work.again.push(id),
        }
    }
    let mut by_lane: BTreeMap<LaneId, Vec<&Deferred>> = BTreeMap::new();
    for job in &jobs {
        by_lane.entry(job.lane).or_default().push(job);
    }
    let mut entry_ids = Vec::new();
    for (lane, jobs) in by_lane {
        let entries: Vec<_> = jobs.iter().map(|j| defer::entry_of(view, j, j.run_at)).collect();
        entry_ids.extend(enqueue::fold(lane, &entries)?);
    }
    if entry_ids.is_empty() {
        return Ok(());
    }
    command::next_command();
    let mut finder = Finder::new()?;
    let found: Vec<Position> = entry_ids
        .iter()
        .filter_map(|id| finder.entry(*id))
        .map(|entry| by_id::position(&entry))
        .collect();
    let taken = take::take(&finder.view.clone(), &found)?;
    drop(finder);
    let receipts: Vec<Option<i64>> = taken
        .iter()
        .filter_map(|t| match t {
            Taken::Mine(receipt) => Some(Some(receipt.encode())),
            _ => None,
        })
        .collect();
    if receipts.len() != jobs.len() {
        return Err(Error::Internal(
            "an entry that was just made is not to be found".to_string(),
        ));
    }
    close_as_cancelled(&receipts, what)?;
    for job in &jobs {
        work.answer(job.job_id, Answer::of(job.lane, job.kind, "cancelled", true));
    }
    Ok(())
}

/// Asks attempts of one claim to stop. Under the claim's closing lock, like every closure; one of another
/// transaction that is still open is waited for.
fn request(
    claim_no: i64,
    slot: u8,
    n: i64,
    members: Vec<Running>,
    what: Cancel,
    work: &mut Work,
) -> Result<()> {
    let view = ring::view_for_write()?;
    let Some(tables) = view.slot(slot).map(CloseSlot::open).transpose()? else {
        work.again.extend(members.iter().map(|m| m.id));
        return Ok(());
    };
    inject::reach(Point::CloseBeforeLock);
    let lock = ShortLock::acquire(Class::Close, claim_no as u64, Mode::Exclusive);
    let mut ended = Bits::none();
    let mut requested = Bits::none();
    let mut open = None;
    let mut scan = Scan::dirty(&tables.closures, &tables.closure_index, 1);
    scan.seek(&[Cond::Eq(claim_no)]);
    while scan.next(Direction::Forward) {
        let writer = scan.writer();
        let outcome = Outcome::of(scan.char(closures::OUTCOME));
        let Some(outcome) = outcome.filter(|o| o.ends() || *o == Outcome::CancelRequested) else {
            continue;
        };
        let bits = Bits::of(scan.bytes(closures::WHICH).as_deref());
        match writer {
            Writer::Running(xid) if members.iter().any(|m| bits.has(m.index)) => open = Some(xid),
            Writer::Running(_) => {}
            _ if outcome == Outcome::CancelRequested => requested.add(&bits),
            _ => ended.add(&bits),
        }
    }
    drop(scan);
    if let Some(xid) = open {
        drop(lock);
        work.again.extend(members.iter().map(|m| m.id));
        work.wait_for.insert(xid);
        return Ok(());
    }
    let mut mine = Bits::none();
    let mut fresh = 0i64;
    for mut m in members {
        if ended.has(m.index) {
            work.again.push(m.id);
            continue;
        }
        m.answer.changed = !requested.has(m.index);
        if m.answer.changed {
            mine.set(m.index);
            fresh += 1;
        }
        work.answer(m.id, m.answer);
    }
    let row = (fresh > 0).then(|| {
        let which = datum::bytea(mine.stored(n));
        close::closure_row(
            &tables,
            claim_no,
            fresh,
            Outcome::CancelRequested,
            Some(which),
            what.reason,
        )
    });
    drop(lock);
    if let Some(row) = row {
        row.enter_rest(&tables.closures, &tables.closure_indexes, &closures::BY_CLAIM);
    }
    Ok(())
}
