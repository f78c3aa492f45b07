//! Counts that many sessions change: each adds a row, maintenance folds the rows into `queue_totals`.

use crate::error::Result;
use crate::ring::Tables;
use crate::statement::run;

/// What is counted besides the logs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    Scheduled,
    Retryable,
    DeadLetters,
    BroughtBack,
    /// A finish that came too late; its slot may be summed up already.
    Stale,
}

impl Counted {
    pub fn code(self) -> &'static str {
        match self {
            Counted::Scheduled => "S",
            Counted::Retryable => "R",
            Counted::DeadLetters => "D",
            Counted::BroughtBack => "B",
            Counted::Stale => "s",
        }
    }
}

/// Adds `n` (which may be negative) to a count of a queue, with the current transaction.
pub fn add(tables: &Tables, queue_id: i32, what: Counted, n: i64) -> Result<()> {
    if n == 0 {
        return Ok(());
    }
    run(
        tables,
        "INSERT INTO awa_internal.count_changes (queue_id, what, n) VALUES ($1, $2::pg_catalog.text::\"char\", $3)",
        &[queue_id.into(), what.code().into(), n.into()],
    )
}

/// Folds the changes that are committed into the totals, up to a bounded number of rows; returns how many.
pub fn fold(tables: &Tables) -> Result<i64> {
    let folded = crate::statement::number(
        tables,
        "WITH gone AS (
             DELETE FROM awa_internal.count_changes
             WHERE change_no IN (SELECT change_no FROM awa_internal.count_changes LIMIT 10000 FOR UPDATE SKIP LOCKED)
             RETURNING queue_id, what, n),
         folded AS (
             INSERT INTO awa_internal.queue_totals AS t (queue_id, outcome, n)
             SELECT queue_id, what, pg_catalog.sum(n)::pg_catalog.int8 FROM gone
             GROUP BY queue_id, what ORDER BY queue_id, what
             ON CONFLICT (queue_id, outcome) DO UPDATE SET n = t.n + excluded.n)
         SELECT pg_catalog.count(*) FROM gone",
    )?;
    Ok(folded.unwrap_or(0))
}
