//! Statements of ours on the mutable tables, run as their owner.
//!
//! Each takes a snapshot of its own, after the locks that were taken before it. (pgrx runs a plain `select`
//! under the caller's older snapshot, and `update` always takes a transaction id; a statement that is
//! prepared as a writing one does neither.)

use crate::error::{Error, Result};
use crate::pg::owner;
use crate::ring::Tables;
use pgrx::datum::{DatumWithOid, TimestampWithTimeZone};
use pgrx::spi::{SpiHeapTupleData, SpiResult};
use pgrx::{PgOid, Spi};

/// The earliest timestamptz (4713 BC), microseconds since 2000.
pub const BEGIN_OF_TIME: i64 = -211_813_488_000_000_000;

/// Runs a statement.
pub fn run(tables: &Tables, sql: &str, args: &[DatumWithOid]) -> Result<()> {
    owner::as_owner_of(tables.ring, || Spi::run_with_args(sql, args)).map_err(|e| failed(&e))
}

/// One bigint; None where it is null or there is no row.
pub fn number(tables: &Tables, sql: &str) -> Result<Option<i64>> {
    let rows = rows(tables, sql, |row| row.get::<i64>(1))?;
    Ok(rows.into_iter().next().flatten())
}

/// All rows, each read by `read`.
pub fn rows<T>(
    tables: &Tables,
    sql: &str,
    read: impl Fn(&SpiHeapTupleData) -> SpiResult<T>,
) -> Result<Vec<T>> {
    rows_with(tables, sql, &[], read)
}

/// As `rows`, for a statement with parameters.
pub fn rows_with<T>(
    tables: &Tables,
    sql: &str,
    args: &[DatumWithOid],
    read: impl Fn(&SpiHeapTupleData) -> SpiResult<T>,
) -> Result<Vec<T>> {
    let types: Vec<PgOid> = args.iter().map(|a| PgOid::from(a.oid())).collect();
    owner::as_owner_of(tables.ring, || {
        Spi::connect(|client| {
            let statement = client.prepare_mut(sql, &types)?;
            client
                .select(&statement, None, args)?
                .map(|row| read(&row))
                .collect::<SpiResult<Vec<T>>>()
        })
    })
    .map_err(|e| failed(&e))
}

/// A time as a parameter.
pub fn time(micros: i64) -> Result<TimestampWithTimeZone> {
    TimestampWithTimeZone::try_from(micros).map_err(|_| Error::Internal(format!("no time: {micros}")))
}

/// A time of a row, microseconds since 2000.
pub fn micros(row: &SpiHeapTupleData, column: usize) -> SpiResult<Option<i64>> {
    Ok(row.get::<TimestampWithTimeZone>(column)?.map(i64::from))
}

fn failed(e: &pgrx::spi::Error) -> Error {
    Error::Internal(format!("a statement on awa_queue's own tables: {e}"))
}
