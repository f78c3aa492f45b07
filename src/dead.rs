//! Dead letters: jobs that failed for good, kept with all they had until somebody retries them or their
//! queue's failed_retention is over.

use crate::carry::Carried;
use crate::close::{Finish, Job};
use crate::counts::{self, Counted};
use crate::defer;
use crate::duty::Progress;
use crate::error::{Error, Result};
use crate::logs::{rest, Outcome};
use crate::pg::datum::Value;
use crate::pg::heap;
use crate::pg::index::IndexSet;
use crate::pg::owner;
use crate::pg::rows;
use crate::pg::table::{self, Access, Oid, Table};
use crate::pg::time;
use crate::queue;
use crate::ring::{self, View};
use std::collections::BTreeMap;

/// Rows removed in one step.
const BATCH: i64 = 1000;

pub fn dead_letters_table() -> Result<Oid> {
    table::find("awa_internal", "dead_letters").ok_or(Error::NotInstalled)
}

/// Keeps jobs that were just closed as failed, where their queue wants that. Each comes with its position in
/// the call.
pub fn keep(view: &View, what: &Finish, jobs: &[(usize, Outcome, &Job)], now: i64) -> Result<()> {
    let mut rows: Vec<[Value; 8]> = Vec::new();
    let mut by_queue: BTreeMap<i32, i64> = BTreeMap::new();
    for (position, outcome, job) in jobs {
        let queue = queue::find_by_id(view, job.lane.queue_id())?;
        let Some(body) = job.body.as_ref().filter(|_| queue.is_none_or(|q| q.dead_letters)) else {
            continue;
        };
        let mut carried = Carried::from_body(body, job.segment_at);
        carried.set(
            rest::ERRORS,
            defer::errors_with(what, *outcome, *position, job, body, now),
        );
        rows.push([
            job.head.job_id.into(),
            now.into(),
            job.lane.0.into(),
            job.head.attempt.into(),
            body.max_attempts.into(),
            job.head.kind.into(),
            body.args.into(),
            carried.build(view).into(),
        ]);
        *by_queue.entry(job.lane.queue_id()).or_insert(0) += 1;
    }
    if rows.is_empty() {
        return Ok(());
    }
    let table = Table::open(dead_letters_table()?, Access::Write);
    let indexes = IndexSet::open(&table);
    for row in heap::append_many(&table, &rows) {
        row.enter_all(&table, &indexes);
    }
    for (queue, n) in by_queue {
        counts::add(&view.tables, queue, Counted::DeadLetters, n)?;
    }
    Ok(())
}

/// Removes dead letters whose queue's failed_retention is over, up to a bounded number.
pub fn expire() -> Result<Progress> {
    let tables = ring::tables()?;
    let removed = owner::as_owner_of(tables.ring, || {
        rows::query(
            "WITH gone AS (
                 DELETE FROM awa_internal.dead_letters WHERE ctid = ANY (ARRAY(
                     SELECT d.ctid
                     FROM awa_internal.queues q
                     CROSS JOIN LATERAL (
                         SELECT ctid FROM awa_internal.dead_letters
                         WHERE (lane_id >> 8) = q.queue_id
                           AND failed_at < $1 - COALESCE((q.settings->>'failed_retention')::pg_catalog.interval, interval '14 days')
                         ORDER BY failed_at LIMIT $2 FOR UPDATE SKIP LOCKED) d
                     LIMIT $2))
                 RETURNING (lane_id >> 8)::pg_catalog.int4 AS queue_id)
             SELECT queue_id::pg_catalog.int8, pg_catalog.count(*) FROM gone GROUP BY queue_id",
            &[
                (table::TIMESTAMPTZ, time::now().into()),
                (table::INT8, BATCH.into()),
            ],
            |rows| rows.iter().map(|r| (r.i64(1) as i32, r.i64(2))).collect::<Vec<_>>(),
        )
    })
    .map_err(Error::Internal)?;
    let mut done = 0;
    for (queue, n) in removed {
        counts::add(&tables, queue, Counted::DeadLetters, -n)?;
        done += n;
    }
    Ok(Progress {
        done,
        more: done >= BATCH,
        next_due: None,
    })
}
