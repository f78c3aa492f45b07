//! Jobs that may not run yet: put off with all they bring along, until `promote` puts them into their lanes.
//!
//! Rows are inserted natively and taken out by SPI. A deferred job keeps its id and gets a new entry, at the
//! tail of its lane, when it is promoted.

use crate::backoff::{self, Backoff};
use crate::body::Body;
use crate::carry::Carried;
use crate::close::{Finish, Job};
use crate::counts::{self, Counted};
use crate::enqueue::Entry;
use crate::error::{Error, Result};
use crate::failure::{self, Failure};
use crate::lane::LaneId;
use crate::logs::{rest, Outcome};
use crate::pg::composite::Record;
use crate::pg::datum::{self, Value, Varlena};
use crate::pg::heap;
use crate::pg::index::IndexSet;
use crate::pg::memory::Scratch;
use crate::pg::rows::SpiRow;
use crate::pg::table::{Access, Oid, Table};
use crate::queue::Queue;
use crate::ring::{Tables, View};
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
