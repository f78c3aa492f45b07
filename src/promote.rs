//! Promotion: jobs that were put off and are due now are taken out of `deferred` and put into their lanes, in
//! due order, in bounded batches. A row that can not be promoted is reported and left alone for a while; it
//! stops nobody else.

use crate::defer::{self, Deferred};
use crate::duty::Progress;
use crate::enqueue::{self, Entry};
use crate::error::{Error, Result};
use crate::lane::LaneId;
use crate::late::Reading;
use crate::pg::command;
use crate::pg::datum::{self, Value};
use crate::pg::inject::{self, Point};
use crate::pg::lock::{Class, Mode, TransactionLock};
use crate::pg::owner;
use crate::pg::rows;
use crate::pg::subxact;
use crate::pg::table::{INT8, INT8_ARRAY, TIMESTAMPTZ};
use crate::pg::time;
use crate::pg::warn;
use crate::pg::xact;
use crate::ring::{self, Tables, View};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// One step at a time: the key of its duty's lock.
pub const DUTY_KEY: u64 = 2;
/// Jobs promoted in one transaction.
const BATCH: i64 = 1000;
/// A row that could not be promoted is left alone so long, microseconds.
const BAD_REST: i64 = 60 * time::SECOND;
/// Bad rows that are remembered.
const MOST_BAD: usize = 1000;

thread_local! {
    static READING: Reading = const { Reading::new() };
    /// Jobs that could not be promoted, and until when they are left alone.
    static BAD: RefCell<Vec<(i64, i64)>> = const { RefCell::new(Vec::new()) };
    /// The first job of the batch under way.
    static FIRST: Cell<Option<i64>> = const { Cell::new(None) };
}

pub fn forget() {
    READING.with(Reading::forget);
    BAD.with(|b| b.borrow_mut().clear());
}

/// One bounded step for the owner, in the transaction that it finds; another one's is as good.
pub fn step() -> Result<Progress> {
    command::refuse_read_only("awa_internal.promote()")?;
    command::require_read_committed("awa_internal.promote()")?;
    xact::note_maintenance();
    let Some(lock) = TransactionLock::try_acquire(Class::Duty, DUTY_KEY, Mode::Exclusive) else {
        return Ok(Progress::default());
    };
    lock.keep();
    let near = promote()?;
    if !near.more || near.done >= BATCH {
        return Ok(near);
    }
    let wider = promote()?;
    Ok(Progress {
        done: near.done + wider.done,
        ..wider
    })
}

/// Promotes jobs that are due, up to a bounded number.
pub fn promote() -> Result<Progress> {
    let tables = ring::tables()?;
    let now = time::now();
    if end_rests(now) {
        READING.with(Reading::forget);
    }
    // What keeps everybody from working is no row's fault.
    ring::view_for_write()?;
    let look = READING.with(|r| r.begin(&tables, now))?;
    let mut limit = BATCH;
    let mut done = 0;
    let mut last = false;
    while done < BATCH && !last {
        FIRST.set(None);
        match subxact::attempt(|| promote_batch(&tables, look.from, now, limit)) {
            Ok(n) => {
                done += n;
                last = n < limit;
            }
            Err(_) if limit > 1 && FIRST.get().is_some() => limit = (limit / 8).max(1),
            Err(why) => match FIRST.get() {
                Some(job_id) => {
                    set_aside(job_id, &why.message, now);
                    limit = BATCH;
                }
                None => return Err(Error::Internal(format!("promotion: {}", why.message))),
            },
        }
    }
    let left = if last {
        first_left(&tables, look.from)?
    } else {
        None
    };
    let (more, next) = READING.with(|r| r.end(&look, last, left));
    let rest = BAD.with(|b| b.borrow().iter().map(|(_, until)| *until).min());
    Ok(Progress {
        done,
        more,
        next_due: next.into_iter().chain(rest).min(),
    })
}

/// Bad rows whose rest is over are tried again; whether there are any.
fn end_rests(now: i64) -> bool {
    BAD.with(|b| {
        let mut b = b.borrow_mut();
        let before = b.len();
        b.retain(|(_, until)| *until > now);
        b.len() < before
    })
}

fn bad() -> Vec<i64> {
    BAD.with(|b| b.borrow().iter().map(|(id, _)| *id).collect())
}

fn set_aside(job_id: i64, why: &str, now: i64) {
    BAD.with(|b| {
        let mut b = b.borrow_mut();
        if b.len() < MOST_BAD {
            b.push((job_id, now + BAD_REST));
        }
    });
    warn::warning(
        &format!("job {job_id} is due and can not be made ready: {why}"),
        "Look at it with awa.job(); it is tried again every minute, the others go on.",
    );
}

/// When the first job is or was due that is still there, of those due at `from` or later.
fn first_left(tables: &Tables, from: i64) -> Result<Option<i64>> {
    let due = owner::as_owner_of(tables.ring, || {
        owner::with_plain_plans(|| {
            rows::query(
                "SELECT run_at FROM awa_internal.deferred WHERE run_at >= $1 AND job_id <> ALL ($2)
                 ORDER BY run_at LIMIT 1",
                &[
                    (TIMESTAMPTZ, from.into()),
                    (INT8_ARRAY, Value::Raw(datum::bigint_array(&bad()))),
                ],
                |rows| rows.iter().map(|r| r.i64(1)).next(),
            )
        })
    });
    due.map_err(Error::Internal)
}

fn promote_batch(tables: &Tables, from: i64, now: i64, limit: i64) -> Result<i64> {
    let view = ring::view_for_write()?;
    let promoted = owner::as_owner_of(tables.ring, || {
        owner::with_plain_plans(|| {
            rows::query(
                // Found by their place, so that no plan can read the table over and over.
                "DELETE FROM awa_internal.deferred WHERE ctid = ANY (ARRAY(
                     SELECT ctid FROM awa_internal.deferred
                     WHERE run_at >= $1 AND run_at <= $2 AND job_id <> ALL ($3)
                     ORDER BY run_at, job_id LIMIT $4 FOR UPDATE SKIP LOCKED))
                 RETURNING job_id, run_at, lane_id, attempt, max_attempts, state, kind, args, rest",
                &[
                    (TIMESTAMPTZ, from.into()),
                    (TIMESTAMPTZ, now.into()),
                    (INT8_ARRAY, Value::Raw(datum::bigint_array(&bad()))),
                    (INT8, limit.into()),
                ],
                |rows| {
                    // Known before anything of a row is brought inline, which may be what fails.
                    FIRST.set(rows.iter().map(|r| r.i64(1)).next());
                    let jobs: Vec<Deferred> = rows.iter().map(|r| defer::read_row(&r)).collect();
                    if jobs.is_empty() {
                        return Ok(0);
                    }
                    inject::reach(Point::PromoteTaken);
                    let folded = fold_promoted(&view, jobs);
                    inject::reach(Point::PromoteFolded);
                    folded
                },
            )
        })
    });
    promoted.map_err(Error::Internal)?
}

/// Puts jobs that were taken out of `deferred` into their lanes, in due order.
fn fold_promoted(view: &View, mut jobs: Vec<Deferred>) -> Result<i64> {
    if jobs.is_empty() {
        return Ok(0);
    }
    jobs.sort_by_key(|j| (j.run_at, j.job_id));
    let mut by_lane: BTreeMap<LaneId, Vec<Entry>> = BTreeMap::new();
    for job in &jobs {
        by_lane
            .entry(job.lane)
            .or_default()
            .push(defer::entry_of(view, job, job.run_at));
    }
    for (lane, entries) in by_lane {
        enqueue::fold(lane, &entries)?;
    }
    defer::count(&view.tables, jobs.iter().map(|j| (j.lane, j.waits)), -1)?;
    Ok(jobs.len() as i64)
}
