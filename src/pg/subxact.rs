//! A part of a transaction that may fail without taking the rest along.

use crate::error::Result as Ours;
use pgrx::pg_sys;
use pgrx::pg_sys::panic::CaughtError;

/// Runs `body` in a subtransaction. Where it raises or returns an error, everything that it did is undone and
/// the message is returned; a cancel or shutdown goes on.
pub fn attempt<R>(body: impl FnOnce() -> Ours<R>) -> Result<R, String> {
    // SAFETY: plain reads of process state; the internal subtransaction is ended on both ways below, and context
    // and resource owner are set back as the server's own callers of BeginInternalSubTransaction do.
    let (context, owner) = unsafe {
        let saved = (pg_sys::CurrentMemoryContext, pg_sys::CurrentResourceOwner);
        pg_sys::BeginInternalSubTransaction(std::ptr::null());
        pg_sys::MemoryContextSwitchTo(saved.0);
        saved
    };
    let result = pgrx::PgTryBuilder::new(std::panic::AssertUnwindSafe(|| match body() {
        Ok(value) => Ok(value),
        Err(e) => {
            e.raise();
            unreachable!("raise never returns")
        }
    }))
    .catch_others(|caught| {
        let message = match &caught {
            CaughtError::PostgresError(e) | CaughtError::ErrorReport(e) => {
                if is_cancel(e.sql_error_code()) {
                    caught.rethrow()
                }
                e.message().to_string()
            }
            CaughtError::RustPanic { ereport, .. } => ereport.message().to_string(),
        };
        Err(message)
    })
    .execute();
    // SAFETY: as above.
    unsafe {
        if result.is_ok() {
            pg_sys::ReleaseCurrentSubTransaction();
        } else {
            pg_sys::RollbackAndReleaseCurrentSubTransaction();
        }
        pg_sys::MemoryContextSwitchTo(context);
        pg_sys::CurrentResourceOwner = owner;
    }
    result
}

fn is_cancel(code: pgrx::PgSqlErrorCode) -> bool {
    use pgrx::PgSqlErrorCode as Code;
    matches!(
        code,
        Code::ERRCODE_QUERY_CANCELED | Code::ERRCODE_ADMIN_SHUTDOWN | Code::ERRCODE_CRASH_SHUTDOWN
    )
}
