//! Sleeping in the middle of a command, until the process latch is set or a deadline passes.

use super::time;
use pgrx::pg_sys;

/// The clock that sleeping goes by: never the one that tests set.
pub fn clock() -> i64 {
    // SAFETY: reads the clock, nothing else.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// Sleeps until the latch of this process is set or `until`; a cancel or shutdown is let through.
pub fn on_latch(until: i64) {
    let micros = (until - clock()).clamp(0, 3600 * time::SECOND);
    let millis = (micros + 999) / 1000;
    // SAFETY: MyLatch is this process's own latch. Where the postmaster dies the process exits.
    unsafe {
        pg_sys::WaitLatch(
            pg_sys::MyLatch,
            (pg_sys::WL_LATCH_SET | pg_sys::WL_TIMEOUT | pg_sys::WL_EXIT_ON_PM_DEATH) as i32,
            millis,
            pg_sys::PG_WAIT_EXTENSION,
        );
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
    pgrx::check_for_interrupts!();
}

unsafe extern "C-unwind" {
    // utils/timeout.h is not among the headers that pgrx reads.
    fn get_timeout_active(id: u32) -> bool;
    fn get_timeout_finish_time(id: u32) -> i64;
}

/// STATEMENT_TIMEOUT is the fourth of the timeouts in PostgreSQL 15 to 18.
const STATEMENT_TIMEOUT: u32 = 3;

/// When statement_timeout will cancel the running statement; None: it will not.
pub fn statement_deadline() -> Option<i64> {
    // SAFETY: both only read variables of this process.
    unsafe { get_timeout_active(STATEMENT_TIMEOUT).then(|| get_timeout_finish_time(STATEMENT_TIMEOUT)) }
}

/// The longest that a transaction may last by transaction_timeout, in microseconds; None: no limit.
pub fn transaction_limit() -> Option<i64> {
    #[cfg(feature = "pg18")]
    // SAFETY: a plain int of this process.
    let millis = unsafe { pg_sys::TransactionTimeout };
    #[cfg(not(feature = "pg18"))]
    let millis = 0;
    (millis > 0).then(|| i64::from(millis) * 1000)
}
