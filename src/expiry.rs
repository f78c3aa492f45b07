//! Jobs that may only wait so long. Each has a row in `expiries`, so that those that nobody claims are found
//! without looking at any other job; a claim that meets one past its time ends it itself.

use crate::cancel::{self, Cancel};
use crate::duty::Progress;
use crate::error::Result;
use crate::late::Reading;
use crate::pg::datum::{self, Value};
use crate::pg::heap;
use crate::pg::index::IndexSet;
use crate::pg::table::{Access, Table};
use crate::pg::time::{self, SECOND};
use crate::ring::{self, Tables};
use crate::statement;
use std::cell::RefCell;

/// Why such a job is cancelled.
pub const REASON: &str = "expired";
/// Jobs dealt with in one step.
const BATCH: i64 = 1000;
/// Jobs that another transaction has in hand are left alone so long.
const REST: i64 = SECOND;
const MOST_RESTING: usize = 10_000;

thread_local! {
    static READING: Reading = const { Reading::new() };
    /// Jobs that are left alone, and until when.
    static RESTING: RefCell<Vec<(i64, i64)>> = const { RefCell::new(Vec::new()) };
}

/// Notes until when jobs may wait, by job id.
pub fn note(jobs: &[(i64, i64)]) -> Result<()> {
    if jobs.is_empty() {
        return Ok(());
    }
    let table = Table::open(ring::relation("expiries")?, Access::Write);
    let indexes = IndexSet::open(&table);
    for chunk in jobs.chunks(1024) {
        let rows: Vec<[Value; 2]> = chunk
            .iter()
            .map(|(id, expires_at)| [(*expires_at).into(), (*id).into()])
            .collect();
        for row in heap::append_many(&table, &rows) {
            row.enter_all(&table, &indexes);
        }
    }
    Ok(())
}

/// Cancels jobs that have waited too long, up to a bounded number. Waits for nobody.
pub fn step() -> Result<Progress> {
    let tables = ring::tables()?;
    let now = time::now();
    let resting: Vec<i64> = RESTING.with(|r| {
        let mut r = r.borrow_mut();
        r.retain(|(_, until)| *until > now);
        r.iter().map(|(id, _)| *id).collect()
    });
    let look = READING.with(|r| r.begin(&tables, now))?;
    let due = statement::rows_with(
        &tables,
        "SELECT job_id FROM awa_internal.expiries
         WHERE expires_at >= $1 AND expires_at <= $2 AND job_id <> ALL ($3)
         ORDER BY expires_at, job_id LIMIT $4",
        &[
            statement::time(look.from)?.into(),
            statement::time(now)?.into(),
            resting.into(),
            BATCH.into(),
        ],
        |row| row.get::<i64>(1),
    )?;
    let due: Vec<i64> = due.into_iter().flatten().collect();
    let mut done = 0;
    if !due.is_empty() {
        let what = Cancel {
            reason: Some(datum::text(REASON)),
            running: false,
            expired_at: Some(now),
            wait: false,
        };
        let answers = cancel::cancel(&due, what)?;
        let (dealt, left): (Vec<i64>, Vec<i64>) = due.iter().partition(|id| answers.contains_key(id));
        done = dealt.len() as i64;
        RESTING.with(|r| {
            let mut r = r.borrow_mut();
            let room = MOST_RESTING.saturating_sub(r.len());
            r.extend(left.iter().take(room).map(|id| (*id, now + REST)));
        });
        statement::run(
            &tables,
            "DELETE FROM awa_internal.expiries
             WHERE expires_at >= $1 AND expires_at <= $2 AND job_id = ANY ($3)",
            &[
                statement::time(look.from)?.into(),
                statement::time(now)?.into(),
                dealt.into(),
            ],
        )?;
    }
    let whole = (due.len() as i64) < BATCH;
    let left = if whole {
        first_left(&tables, look.from)?
    } else {
        None
    };
    let (more, next) = READING.with(|r| r.end(&look, whole, left));
    let again = RESTING.with(|r| r.borrow().iter().map(|(_, until)| *until).min());
    Ok(Progress {
        done,
        more,
        next_due: next.into_iter().chain(again).min(),
    })
}

/// When the first job that is still there, of those from `from` on, may wait no longer.
fn first_left(tables: &Tables, from: i64) -> Result<Option<i64>> {
    let first = statement::rows_with(
        tables,
        "SELECT expires_at FROM awa_internal.expiries WHERE expires_at >= $1 ORDER BY expires_at LIMIT 1",
        &[statement::time(from)?.into()],
        |row| statement::micros(row, 1),
    )?;
    Ok(first.into_iter().flatten().next())
}

pub fn forget() {
    READING.with(Reading::forget);
    RESTING.with(|r| r.borrow_mut().clear());
}
