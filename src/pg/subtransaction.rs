//! A subtransaction around a piece of work that may fail without failing the rest.

use crate::error::Result;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;
use pgrx::PgSqlErrorCode as Code;
use std::panic::AssertUnwindSafe;

/// Runs `body`; where it fails, what it did is undone and the message of its error is returned. A request to
/// stop is no failure of the work and goes on up.
pub fn contained<R>(body: impl FnOnce() -> Result<R>) -> std::result::Result<R, String> {
    // SAFETY: called inside a transaction; both are restored below, as every user of internal
    // subtransactions does.
    let (context, owner) = unsafe {
        let saved = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        pg_sys::MemoryContextSwitchTo(saved.0);
        saved
    };
    let outcome = pgrx::PgTryBuilder::new(AssertUnwindSafe(|| body().map_err(|e| e.message())))
        .catch_others(|caught| Err(message_of(caught)))
        .catch_rust_panic(|caught| Err(message_of(caught)))
        .execute();
    // SAFETY: the subtransaction begun above is the current one: what `body` began it has ended, or the
    // error has.
    unsafe {
        pg_sys::MemoryContextSwitchTo(context);
        match &outcome {
            Ok(_) => pg_sys::ReleaseCurrentSubTransaction(),
            Err(_) => pg_sys::RollbackAndReleaseCurrentSubTransaction(),
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
    }
    outcome
}

fn message_of(caught: CaughtError) -> String {
    let report = match &caught {
        CaughtError::PostgresError(report) | CaughtError::ErrorReport(report) => report,
        CaughtError::RustPanic { ereport, .. } => ereport,
    };
    let stop = matches!(
        report.sql_error_code(),
        Code::ERRCODE_QUERY_CANCELED
            | Code::ERRCODE_ADMIN_SHUTDOWN
            | Code::ERRCODE_CRASH_SHUTDOWN
            | Code::ERRCODE_DATABASE_DROPPED
    );
    if stop {
        caught.rethrow();
    }
    report.message().to_string()
}
