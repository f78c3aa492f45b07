//! Short locks and transaction locks under tags of our own.
//!
//! A tag is an advisory lock tag whose class no user can name (users get classes 1 and 2), so it shows
//! in pg_locks and never meets a user's lock. Waiting in the lock manager's queue costs a context switch
//! per hand-over, so a short lock is tried, with naps between, before it is waited for: 1.3 to 1.8 times
//! the throughput under contention.

use pgrx::pg_sys;

/// What a tag protects; the number shows as objsubid in pg_locks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u16)]
pub enum Class {
    /// Reservation of seqs in a lane.
    Lane = 81,
    /// Taking from a lane.
    Claim = 82,
    /// Closing attempts of a claim.
    Close = 83,
    /// What becomes of a job, by its id; held to the end of the transaction. Bulk calls lock groups of ids.
    Job = 84,
    /// The ring: loaders share it, maintenance holds it to the end of its transaction.
    Ring = 85,
    /// Creation of a queue, by the hash of its name.
    Queue = 86,
    /// Drawing a block of claim numbers.
    ClaimNumbers = 87,
    /// A duty of maintenance: worker and CALL awa.maintain() do not do the same one at once.
    Duty = 88,
    /// Taking over a database that is not known as ours.
    Adopt = 89,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mode {
    Share,
    Exclusive,
}

impl Mode {
    fn raw(self) -> pg_sys::LOCKMODE {
        match self {
            Mode::Share => pg_sys::ShareLock as pg_sys::LOCKMODE,
            Mode::Exclusive => pg_sys::ExclusiveLock as pg_sys::LOCKMODE,
        }
    }
}

const NAPS: u32 = 100;
const FIRST_NAPS: u32 = 10;
const SHORT_NAP_US: i64 = 10;
const LONG_NAP_US: i64 = 100;

fn tag(class: Class, key: u64) -> pg_sys::LOCKTAG {
    pg_sys::LOCKTAG {
        // SAFETY: MyDatabaseId is set for the life of a backend.
        locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
        locktag_field2: (key >> 32) as u32,
        locktag_field3: key as u32,
        locktag_field4: class as u16,
        locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
        locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
    }
}

fn acquire(tag: &pg_sys::LOCKTAG, mode: Mode, dont_wait: bool) -> bool {
    // SAFETY: the tag is a complete advisory tag; held by the current resource owner, hence freed on error.
    let result = unsafe { pg_sys::LockAcquire(tag, mode.raw(), false, dont_wait) };
    result != pg_sys::LockAcquireResult::LOCKACQUIRE_NOT_AVAIL
}

/// A lock that is given back before the call ends.
pub struct ShortLock {
    tag: pg_sys::LOCKTAG,
    mode: Mode,
}

impl ShortLock {
    /// Tries with short naps, about ten milliseconds in all, then waits in the queue.
    pub fn acquire(class: Class, key: u64, mode: Mode) -> ShortLock {
        let lock = ShortLock {
            tag: tag(class, key),
            mode,
        };
        for i in 0..NAPS {
            if acquire(&lock.tag, mode, true) {
                return lock;
            }
            pgrx::check_for_interrupts!();
            // SAFETY: pg_usleep only sleeps.
            unsafe { pg_sys::pg_usleep(if i < FIRST_NAPS { SHORT_NAP_US } else { LONG_NAP_US }) };
        }
        acquire(&lock.tag, mode, false);
        lock
    }
}

impl Drop for ShortLock {
    fn drop(&mut self) {
        if super::unwinding() {
            return; // the resource owner gives it back
        }
        // SAFETY: acquired in `acquire` with the same tag and mode, released only here.
        unsafe { pg_sys::LockRelease(&self.tag, self.mode.raw(), false) };
    }
}

/// A lock that is held to the end of the transaction once it is kept, and given back otherwise.
pub struct TransactionLock(ShortLock);

impl TransactionLock {
    /// None where somebody else has it.
    pub fn try_acquire(class: Class, key: u64, mode: Mode) -> Option<TransactionLock> {
        let lock = ShortLock {
            tag: tag(class, key),
            mode,
        };
        if acquire(&lock.tag, mode, true) {
            return Some(TransactionLock(lock));
        }
        std::mem::forget(lock); // was not acquired, must not be released
        None
    }

    /// As `try_acquire`, trying again for `limit`: for a lock that others hold for microseconds.
    pub fn try_for(
        class: Class,
        key: u64,
        mode: Mode,
        limit: std::time::Duration,
    ) -> Option<TransactionLock> {
        let deadline = std::time::Instant::now() + limit;
        loop {
            let lock = TransactionLock::try_acquire(class, key, mode);
            if lock.is_some() || std::time::Instant::now() >= deadline {
                return lock;
            }
            pgrx::check_for_interrupts!();
            // SAFETY: pg_usleep only sleeps.
            unsafe { pg_sys::pg_usleep(1_000) };
        }
    }

    pub fn keep(self) {
        std::mem::forget(self.0);
    }
}

/// Takes a lock to the end of the transaction, waiting for it: `lock_timeout` and deadlock detection apply.
pub fn hold(class: Class, key: u64, mode: Mode) {
    acquire(&tag(class, key), mode, false);
}

/// As `hold`, without waiting; false where somebody else has it.
pub fn try_hold(class: Class, key: u64, mode: Mode) -> bool {
    acquire(&tag(class, key), mode, true)
}

/// Takes a lock to the end of the transaction, trying again for `limit`; false where it was not to be had by
/// then.
pub fn wait_for_transaction(class: Class, key: u64, mode: Mode, limit: std::time::Duration) -> bool {
    let lock = TransactionLock::try_for(class, key, mode, limit);
    let acquired = lock.is_some();
    lock.into_iter().for_each(TransactionLock::keep);
    acquired
}

/// The strength of a lock on a whole table, as maintenance takes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TableMode {
    AccessShare,
    /// As ANALYZE and VACUUM take it.
    ShareUpdateExclusive,
    Share,
    AccessExclusive,
}

impl TableMode {
    fn raw(self) -> pg_sys::LOCKMODE {
        match self {
            TableMode::AccessShare => pg_sys::AccessShareLock as pg_sys::LOCKMODE,
            TableMode::ShareUpdateExclusive => pg_sys::ShareUpdateExclusiveLock as pg_sys::LOCKMODE,
            TableMode::Share => pg_sys::ShareLock as pg_sys::LOCKMODE,
            TableMode::AccessExclusive => pg_sys::AccessExclusiveLock as pg_sys::LOCKMODE,
        }
    }
}

/// Locks tables to the end of the transaction if all are to be had at once; otherwise none. Waiting with a
/// lock_timeout would queue every claim and reservation behind the waiter.
pub fn try_lock_tables(tables: &[super::table::Oid], mode: TableMode) -> bool {
    for (i, table) in tables.iter().enumerate() {
        // SAFETY: locks by oid only; a lock that was taken here is given back by the same oid and mode.
        unsafe {
            if !pg_sys::ConditionalLockRelationOid(*table, mode.raw()) {
                for taken in &tables[..i] {
                    pg_sys::UnlockRelationOid(*taken, mode.raw());
                }
                return false;
            }
        }
    }
    true
}

/// Waits until a transaction (or subtransaction) has ended. `lock_timeout` and deadlock detection apply.
/// The caller holds no short lock and no index scan: a kept pin would hang VACUUM.
pub fn wait_for_xid(xid: u32) {
    // SAFETY: a transaction id that was read from a tuple header; null relation and tid mean no error context.
    unsafe {
        pg_sys::XactLockTableWait(
            pg_sys::TransactionId::from(xid),
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            pg_sys::XLTW_Oper::XLTW_None,
        );
    }
}
