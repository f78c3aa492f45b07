//! The transaction and the command that a verb runs in.

use crate::error::{Error, Result};
use pgrx::pg_sys;

/// Refuses where nothing may be written: a read-only transaction or a standby.
pub fn refuse_read_only(verb: &str) -> Result<()> {
    // SAFETY: reads process state and shared memory.
    let (read_only, recovery) = unsafe { (pg_sys::XactReadOnly, pg_sys::RecoveryInProgress()) };
    if recovery {
        Err(Error::Standby(verb.to_string()))
    } else if read_only {
        Err(Error::ReadOnly(verb.to_string()))
    } else {
        Ok(())
    }
}

/// Refuses on a standby alone.
pub fn refuse_standby(verb: &str) -> Result<()> {
    if in_recovery() {
        return Err(Error::Standby(verb.to_string()));
    }
    Ok(())
}

pub fn in_recovery() -> bool {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::RecoveryInProgress() }
}

/// Whether a savepoint or a PL/pgSQL exception block is open.
pub fn in_subtransaction() -> bool {
    // SAFETY: reads the state of this process.
    unsafe { pg_sys::GetCurrentTransactionNestLevel() > 1 }
}

/// Lets a cancel or shutdown through, in a loop that may be long.
pub fn check_for_interrupts() {
    pgrx::check_for_interrupts!();
}

/// Makes what this call wrote visible to what follows in the same statement.
pub fn next_command() {
    // SAFETY: called outside parallel mode.
    unsafe { pg_sys::CommandCounterIncrement() }
}

/// Refuses a maintenance step whose later statements would read an old snapshot.
pub fn require_read_committed(step: &str) -> Result<()> {
    // SAFETY: a plain variable of this process.
    if unsafe { pg_sys::XactIsoLevel } as u32 >= pg_sys::XACT_REPEATABLE_READ {
        return Err(Error::NeedsReadCommitted(step.to_string()));
    }
    Ok(())
}

/// Ends the current transaction of a procedure and begins the next, which reads committed state and may
/// write whatever the session's defaults are.
pub fn commit_and_begin() {
    // SAFETY: called from a procedure that was called non-atomically, connected to SPI non-atomically.
    unsafe {
        pg_sys::SPI_commit();
        begin_settings();
    }
}

/// Rolls back the current transaction of a procedure and begins the next. Not after an error that went through
/// a statement of ours: that leaves its snapshot behind, and the server refuses; `subxact` cleans up.
pub fn roll_back_and_begin() {
    // SAFETY: as above.
    unsafe {
        pg_sys::SPI_rollback();
        begin_settings();
    }
}

/// Sets the transaction's own properties against `default_transaction_*` of role or database.
pub fn begin_settings() {
    // SAFETY: plain variables of this process, reset by PostgreSQL at the next transaction start; set
    // before the transaction takes its first snapshot of its own.
    unsafe {
        pg_sys::XactIsoLevel = pg_sys::XACT_READ_COMMITTED as i32;
        pg_sys::XactReadOnly = pg_sys::RecoveryInProgress();
    }
}

/// Connects to SPI so that transactions can be ended inside `body`.
pub fn with_transaction_control<R>(body: impl FnOnce() -> R) -> R {
    // SAFETY: finished below; where body raises, transaction abort cleans the SPI stack.
    unsafe { pg_sys::SPI_connect_ext(pg_sys::SPI_OPT_NONATOMIC as i32) };
    let result = body();
    // SAFETY: connected above.
    unsafe { pg_sys::SPI_finish() };
    result
}

/// Identifier of this server's data directory and its standbys, from its control file.
pub fn system_id() -> i64 {
    // SAFETY: reads shared memory.
    unsafe { pg_sys::GetSystemIdentifier() as i64 }
}

/// The oid of the database this session is in.
pub fn database() -> u32 {
    // SAFETY: set for the life of a backend.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

unsafe extern "C-unwind" {
    // commands/async.h is not among the headers that pgrx reads.
    fn Async_Notify(channel: *const std::ffi::c_char, payload: *const std::ffi::c_char);
}

/// Sends a notification with an empty payload when the transaction commits.
pub fn notify(channel: &str) {
    let channel = std::ffi::CString::new(channel).unwrap_or_default();
    // SAFETY: both strings end with NUL and are copied; an error passes the guard as a panic.
    unsafe {
        pg_sys::ffi::pg_guard_ffi_boundary(|| Async_Notify(channel.as_ptr(), c"".as_ptr()));
    }
}

/// The name of the current user.
pub fn current_user() -> String {
    // SAFETY: GetUserNameFromId returns a palloc'd NUL-terminated string.
    unsafe {
        let p = pg_sys::GetUserNameFromId(pg_sys::GetUserId(), false);
        std::ffi::CStr::from_ptr(p).to_string_lossy().into_owned()
    }
}
