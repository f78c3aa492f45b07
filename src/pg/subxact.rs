//! A part of a transaction that may fail without taking the rest along.

use super::caught::Caught;
use crate::error::Result as Ours;
use pgrx::pg_sys;

/// Runs `body` in a subtransaction, which undoes what it did where it raises or returns an error. An error
/// that any other row would have met as well goes on, and ends the caller.
pub fn attempt<R>(body: impl FnOnce() -> Ours<R>) -> Result<R, Caught> {
    inside(body, Caught::is_everybodys)
}

/// As `attempt`, for a step that fails as a whole: only a cancel or shutdown goes on.
pub fn attempt_step<R>(body: impl FnOnce() -> Ours<R>) -> Result<R, Caught> {
    inside(body, Caught::is_cancel)
}

/// The subtransaction is ended before an error goes on: whoever catches it outside (a PL/pgSQL exception
/// block, say) would roll back this one instead of its own.
fn inside<R>(body: impl FnOnce() -> Ours<R>, goes_on: fn(&Caught) -> bool) -> Result<R, Caught> {
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
    .catch_others(|error| Err(Box::new(error)))
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
    result.map_err(|error| {
        let caught = Caught::of(&error);
        if goes_on(&caught) {
            error.rethrow()
        }
        caught
    })
}
