//! The latest committed state, whatever isolation level the caller's transaction has.

use pgrx::pg_sys;

/// A registered snapshot of what is committed now (and what the own transaction did). Under REPEATABLE
/// READ the transaction's own snapshot would hide jobs that are ready.
pub struct Latest {
    snapshot: pg_sys::Snapshot,
    pushed: bool,
}

impl Latest {
    pub fn take() -> Latest {
        // SAFETY: called inside a transaction, outside parallel mode (all verbs are PARALLEL UNSAFE).
        let snapshot = unsafe { pg_sys::RegisterSnapshot(pg_sys::GetLatestSnapshot()) };
        Latest {
            snapshot,
            pushed: false,
        }
    }

    /// As `take`, and makes it the active snapshot as well, which fetching TOASTed values needs.
    pub fn take_active() -> Latest {
        let mut latest = Latest::take();
        // SAFETY: the snapshot was just registered.
        unsafe { pg_sys::PushActiveSnapshot(latest.snapshot) };
        latest.pushed = true;
        latest
    }

    pub(super) fn raw(&self) -> pg_sys::Snapshot {
        self.snapshot
    }
}

impl Drop for Latest {
    fn drop(&mut self) {
        if super::unwinding() {
            return; // the resource owner and the snapshot stack are cleaned by the abort
        }
        // SAFETY: pushed and registered by this value, once each.
        unsafe {
            if self.pushed {
                pg_sys::PopActiveSnapshot();
            }
            pg_sys::UnregisterSnapshot(self.snapshot);
        }
    }
}
