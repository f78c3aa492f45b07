//! The only unsafe code of the crate: thin, named wrappers over what PostgreSQL exports. Everything above
//! this module is safe Rust that speaks of tables, scans, locks and snapshots.
//!
//! A PostgreSQL ERROR passes through Rust as a panic (pgrx guards each call), so destructors run on the
//! way out. They must not call PostgreSQL then: `unwinding()` is asked first, and the transaction's abort
//! gives back what they would have.

pub mod bgworker;
pub mod caught;
pub mod command;
pub mod compat;
pub mod composite;
pub mod databases;
pub mod datum;
pub mod fmgr;
pub mod heap;
pub mod horizon;
pub mod index;
pub mod inject;
pub mod json;
pub mod latest;
pub mod lock;
pub mod memory;
pub mod owner;
pub mod roster;
pub mod rows;
pub mod scan;
pub mod shmem;
pub mod sleep;
pub mod subxact;
pub mod table;
pub mod time;
pub mod vacuum;
pub mod waiters;
pub mod warn;
pub mod xact;

/// True while an error is on its way out; a destructor then leaves its resource to transaction abort,
/// because a second error inside it would abort the whole process.
pub(crate) fn unwinding() -> bool {
    std::thread::panicking()
}

/// Whether the postmaster is loading the library for all sessions to come.
pub fn preloading() -> bool {
    // SAFETY: a plain variable of this process.
    unsafe { pgrx::pg_sys::process_shared_preload_libraries_in_progress }
}
