//! Claims below the marks that have not ended, each with the time at which it is looked at again
//! (awa_internal.rescue_list). Written by the rescue alone, one step at a time.

use crate::error::Result;
use crate::ring::Tables;
use crate::statement;
use pgrx::spi::{SpiHeapTupleData, SpiResult};

/// A claim on the list.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Listed {
    pub claim_no: i64,
    pub slot: u8,
    pub due_at: i64,
    /// How often in a row another transaction was at it.
    pub tries: i16,
    /// How often in a row ending it failed.
    pub failures: i16,
}

fn read(row: &SpiHeapTupleData) -> SpiResult<Listed> {
    Ok(Listed {
        claim_no: row.get::<i64>(1)?.unwrap_or(0),
        slot: row.get::<i16>(2)?.unwrap_or(0) as u8,
        due_at: statement::micros(row, 3)?.unwrap_or(i64::MIN),
        tries: row.get::<i16>(4)?.unwrap_or(0),
        failures: row.get::<i16>(5)?.unwrap_or(0),
    })
}

/// The first to be looked at.
pub fn first(tables: &Tables, limit: i64) -> Result<Vec<Listed>> {
    statement::rows_with(
        tables,
        "SELECT claim_no, slot, due_at, tries, failures FROM awa_internal.rescue_list ORDER BY due_at LIMIT $1",
        &[limit.into()],
        read,
    )
}

pub fn all(tables: &Tables) -> Result<Vec<Listed>> {
    statement::rows(
        tables,
        "SELECT claim_no, slot, due_at, tries, failures FROM awa_internal.rescue_list",
        read,
    )
}

pub fn put(tables: &Tables, rows: &[Listed]) -> Result<()> {
    if rows.is_empty() {
        return Ok(());
    }
    let claims: Vec<i64> = rows.iter().map(|r| r.claim_no).collect();
    let slots: Vec<i16> = rows.iter().map(|r| i16::from(r.slot)).collect();
    let due = rows
        .iter()
        .map(|r| statement::time(r.due_at))
        .collect::<Result<Vec<_>>>()?;
    let tries: Vec<i16> = rows.iter().map(|r| r.tries).collect();
    let failures: Vec<i16> = rows.iter().map(|r| r.failures).collect();
    statement::run(
        tables,
        "INSERT INTO awa_internal.rescue_list (claim_no, slot, due_at, tries, failures)
         SELECT * FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2), pg_catalog.unnest($3),
                                  pg_catalog.unnest($4), pg_catalog.unnest($5)) AS claim
         ON CONFLICT (claim_no) DO UPDATE
         SET due_at = excluded.due_at, tries = excluded.tries, failures = excluded.failures",
        &[
            claims.into(),
            slots.into(),
            due.into(),
            tries.into(),
            failures.into(),
        ],
    )
}

pub fn remove(tables: &Tables, claims: &[i64]) -> Result<()> {
    if claims.is_empty() {
        return Ok(());
    }
    statement::run(
        tables,
        "DELETE FROM awa_internal.rescue_list WHERE claim_no = ANY ($1)",
        &[claims.to_vec().into()],
    )
}
