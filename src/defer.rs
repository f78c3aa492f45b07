//! Jobs that may not run yet: put off with all they bring along, and promoted into their lanes when due.
//!
//! Rows are inserted natively and taken out by SPI. A deferred job keeps its id and gets a new entry, at the
//! tail of its lane, when it is promoted.

use crate::backoff::{self, Backoff};
use crate::body::Body;
use crate::carry::Carried;
use crate::close::{Finish, Job};
use crate::counts::{self, Counted};
use crate::duty::Progress;
use crate::enqueue::{self, Entry};
use crate::error::{Error, Result};
use crate::failure::{self, Failure};
use crate::lane::LaneId;
use crate::logs::{rest, Outcome};
use crate::pg::command;
use crate::pg::composite::Record;
use crate::pg::datum::{self, Value, Varlena};
use crate::pg::heap;
use crate::pg::index::IndexSet;
use crate::pg::inject::{self, Point};
use crate::pg::lock::{Class, Mode, TransactionLock};
use crate::pg::memory::Scratch;
use crate::pg::owner;
use crate::pg::rows::{self, SpiRow};
use crate::pg::subxact;
use crate::pg::table::{Access, Oid, Table};
use crate::pg::time;
use crate::pg::warn;
use crate::pg::xact;
use crate::queue::Queue;
use crate::ring::{self, Tables, View};
use crate::statement;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;

/// A row of `awa_internal.deferred`.
pub struct Deferred {
    pub job_id: i64,
    pub run_at: i64,
    pub lane: LaneId,
    /// The attempt that comes next.
    pub attempt: i16,
    pub max_attempts: i16,
    pub waits: Waits,
    /// None where it is the queue's name.
    pub kind: Option<Varlena>,
    pub args: Varlena,
    pub rest: Option<Varlena>,
}

impl Deferred {
    /// Until when it may wait.
    pub fn expires_at(&self) -> Option<i64> {
        self.rest.map(Record::read).and_then(|r| r.i64(rest::EXPIRES_AT))
    }
}

/// What a deferred job waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Waits {
    /// Its time, as its producer or a snooze said.
    Scheduled,
    /// The end of its backoff.
    Retryable,
}

impl Waits {
    pub fn code(self) -> u8 {
        match self {
            Waits::Scheduled => b's',
            Waits::Retryable => b'r',
        }
    }

    pub fn of(code: u8) -> Waits {
        if code == b'r' {
            Waits::Retryable
        } else {
            Waits::Scheduled
        }
    }

    pub fn counted(self) -> Counted {
        match self {
            Waits::Scheduled => Counted::Scheduled,
            Waits::Retryable => Counted::Retryable,
        }
    }
}

/// Puts jobs off. Their rows belong to the current transaction.
pub fn put(view: &View, jobs: &[Deferred]) -> Result<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let table = Table::open(deferred_table()?, Access::Write);
    let indexes = IndexSet::open(&table);
    let mut scratch = Scratch::new();
    for chunk in jobs.chunks(1024) {
        scratch.run(|| {
            let rows: Vec<[Value; 9]> = chunk
                .iter()
                .map(|j| {
                    [
                        j.job_id.into(),
                        j.run_at.into(),
                        j.lane.0.into(),
                        j.attempt.into(),
                        j.max_attempts.into(),
                        Value::Char(j.waits.code()),
                        j.kind.into(),
                        j.args.into(),
                        j.rest.into(),
                    ]
                })
                .collect();
            for row in heap::append_many(&table, &rows) {
                row.enter_all(&table, &indexes);
            }
        });
    }
    count(&view.tables, jobs.iter().map(|j| (j.lane, j.waits)), 1)
}

pub fn deferred_table() -> Result<Oid> {
    crate::pg::table::find("awa_internal", "deferred").ok_or(Error::NotInstalled)
}

/// Adds `sign` for each job to the counts of its queue.
pub fn count(tables: &Tables, jobs: impl Iterator<Item = (LaneId, Waits)>, sign: i64) -> Result<()> {
    let mut sums: BTreeMap<(i32, u8), i64> = BTreeMap::new();
    for (lane, waits) in jobs {
        *sums.entry((lane.queue_id(), waits.code())).or_insert(0) += sign;
    }
    for ((queue, waits), n) in sums {
        counts::add(tables, queue, Waits::of(waits).counted(), n)?;
    }
    Ok(())
}

/// The job of an attempt that ended with another one to come: after its backoff (or snooze), with its error
/// noted.
#[allow(clippy::too_many_arguments)] // one job with all that decides about it
pub fn between_attempts(
    view: &View,
    what: &Finish,
    outcome: Outcome,
    position: usize,
    job: &Job,
    body: &Body,
    queue: Option<&Queue>,
    checkpoint: Option<Varlena>,
    now: i64,
) -> Deferred {
    let mut carried = Carried::from_body(body, job.segment_at);
    carried.set_checkpoint(checkpoint);
    let snoozed = outcome == Outcome::Snoozed;
    if !snoozed {
        carried.set(rest::ERRORS, errors_with(what, outcome, position, job, body, now));
    }
    let run_at = if snoozed {
        what.run_at.unwrap_or_else(|| what.delay.after(now))
    } else if let Some(retry_in) = what.retry_in {
        retry_in.after(now)
    } else {
        let policy = queue.map_or_else(Backoff::default, |q| q.backoff);
        let seed = job.receipt.encode() as u64 ^ now as u64;
        now + policy.delay(job.head.attempt, backoff::spread(seed))
    };
    Deferred {
        job_id: job.head.job_id,
        run_at,
        lane: job.lane,
        attempt: job.head.attempt + i16::from(!snoozed),
        max_attempts: body.max_attempts,
        waits: if snoozed {
            Waits::Scheduled
        } else {
            Waits::Retryable
        },
        kind: job.head.kind,
        args: body.args,
        rest: Some(carried.build(view)),
    }
}

/// The job's errors with that of the attempt that just ended.
pub fn errors_with(
    what: &Finish,
    outcome: Outcome,
    position: usize,
    job: &Job,
    body: &Body,
    now: i64,
) -> Varlena {
    let message = what.reason.map(Varlena::text);
    failure::added(
        body.rest_varlena(rest::ERRORS),
        &Failure {
            at: now,
            attempt: job.head.attempt,
            message: message.as_deref(),
            detail: what.details.get(position).copied().flatten(),
            worker: job.worker.as_deref(),
            outcome: match outcome {
                Outcome::Rescued | Outcome::LeaseFailed => "lease ended",
                _ => outcome.state(),
            },
        },
    )
}

// ---------------------------------------------------------------- promotion

/// One step at a time: the key of its duty's lock.
pub const DUTY_KEY: u64 = 2;
/// Jobs promoted in one transaction.
const BATCH: i64 = 1000;
/// Rows that commit late may lie before what was promoted last: all of the index is looked at this often,
/// microseconds. In between its dead entries, which an old snapshot keeps, are not walked again.
const FULL_LOOK: i64 = 2 * time::SECOND;
/// A row that could not be promoted is left alone so long, microseconds.
const BAD_REST: i64 = 60 * time::SECOND;
/// Bad rows that are remembered.
const MOST_BAD: usize = 1000;
const LONG_AGO: i64 = i64::MIN / 2;

thread_local! {
    /// Where the last promotion stopped, and when all was looked at.
    static STOPPED_AT: Cell<i64> = const { Cell::new(LONG_AGO) };
    static LOOKED_AT: Cell<i64> = const { Cell::new(LONG_AGO) };
    /// Jobs that could not be promoted, and until when they are left alone.
    static BAD: RefCell<Vec<(i64, i64)>> = const { RefCell::new(Vec::new()) };
    /// The first job of the batch under way.
    static FIRST: Cell<Option<i64>> = const { Cell::new(None) };
}

pub fn forget() {
    STOPPED_AT.set(LONG_AGO);
    LOOKED_AT.set(LONG_AGO);
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
    promote()
}

/// Promotes jobs that are due, in due order, up to a bounded number. A row that can not be promoted is
/// reported and left alone for a while; it stops nobody else.
pub fn promote() -> Result<Progress> {
    let tables = ring::tables()?;
    let now = time::now();
    BAD.with(|b| b.borrow_mut().retain(|(_, until)| *until > now));
    let full = now - LOOKED_AT.get() >= FULL_LOOK || now < LOOKED_AT.get();
    let from = if full { LONG_AGO } else { STOPPED_AT.get() };
    // What keeps everybody from working is no row's fault.
    ring::view_for_write()?;
    let mut limit = BATCH;
    let mut done = 0;
    let mut last = false;
    while done < BATCH && !last {
        FIRST.set(None);
        match subxact::attempt(|| promote_batch(&tables, from, now, limit)) {
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
    if full && last {
        LOOKED_AT.set(now);
    }
    let from = if last { now } else { from };
    if last {
        STOPPED_AT.set(now);
    }
    Ok(Progress {
        done,
        more: !last,
        next_due: next_due(&tables, from)?,
    })
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

/// When the next job is due; `from` is where nothing is due before.
fn next_due(tables: &Tables, from: i64) -> Result<Option<i64>> {
    let due = owner::as_owner_of(tables.ring, || {
        owner::with_plain_plans(|| {
            rows::query(
                "SELECT run_at FROM awa_internal.deferred WHERE run_at >= $1 ORDER BY run_at LIMIT 1",
                &[(
                    crate::pg::table::TIMESTAMPTZ,
                    from.max(statement::BEGIN_OF_TIME).into(),
                )],
                |rows| rows.iter().map(|r| r.i64(1)).next(),
            )
        })
    });
    due.map_err(Error::Internal)
}

fn promote_batch(tables: &Tables, from: i64, now: i64, limit: i64) -> Result<i64> {
    let bad: Vec<i64> = BAD.with(|b| b.borrow().iter().map(|(id, _)| *id).collect());
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
                    (
                        crate::pg::table::TIMESTAMPTZ,
                        from.max(statement::BEGIN_OF_TIME).into(),
                    ),
                    (crate::pg::table::TIMESTAMPTZ, now.into()),
                    (
                        crate::pg::table::INT8_ARRAY,
                        Value::Raw(datum::bigint_array(&bad)),
                    ),
                    (crate::pg::table::INT8, limit.into()),
                ],
                |rows| {
                    // Known before anything of a row is brought inline, which may be what fails.
                    FIRST.set(rows.iter().map(|r| r.i64(1)).next());
                    let jobs: Vec<Deferred> = rows.iter().map(|r| read_row(&r)).collect();
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

/// A deferred job as it comes out of a statement with the table's columns in their order.
pub fn read_row(row: &SpiRow) -> Deferred {
    Deferred {
        job_id: row.i64(1),
        run_at: row.i64(2),
        lane: LaneId(row.i64(3)),
        attempt: row.i16(4),
        max_attempts: row.i16(5),
        waits: Waits::of(row.char(6)),
        kind: row.varlena(7),
        args: row.varlena(8).unwrap_or_else(|| datum::jsonb_from_text("null")),
        rest: row.varlena(9),
    }
}

/// Puts jobs that were taken out of `deferred` into their lanes, in due order.
pub fn fold_promoted(view: &View, mut jobs: Vec<Deferred>) -> Result<i64> {
    if jobs.is_empty() {
        return Ok(0);
    }
    jobs.sort_by_key(|j| (j.run_at, j.job_id));
    let mut by_lane: BTreeMap<LaneId, Vec<Entry>> = BTreeMap::new();
    for job in &jobs {
        by_lane
            .entry(job.lane)
            .or_default()
            .push(entry_of(view, job, job.run_at));
    }
    for (lane, entries) in by_lane {
        enqueue::fold(lane, &entries)?;
    }
    count(&view.tables, jobs.iter().map(|j| (j.lane, j.waits)), -1)?;
    Ok(jobs.len() as i64)
}

/// The entry of a job that becomes ready; `run_at` is when it was due.
pub fn entry_of(view: &View, job: &Deferred, run_at: i64) -> Entry {
    let record = job.rest.map(Record::read);
    let mut carried = Carried::from_record(record.as_ref());
    carried.set(rest::RUN_AT, run_at);
    Entry {
        job_id: Some(job.job_id),
        attempt: job.attempt,
        max_attempts: job.max_attempts,
        kind: job.kind,
        args: job.args,
        rest: Some(carried.build(view)),
    }
}
