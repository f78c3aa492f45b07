//! What hangs on the transaction: its ids, what happens at its end, and what other sessions' commits
//! invalidate here.
//!
//! The callbacks run inside commit and abort, where an error would bring the server down: they touch
//! cells and atomics only.

use super::shmem;
use super::table::Oid;
use super::time;
use super::waiters;
use pgrx::pg_sys;
use std::cell::Cell;

thread_local! {
    static RING: Cell<u32> = const { Cell::new(0) };
    static QUEUES: Cell<u32> = const { Cell::new(0) };
    static RING_VALID: Cell<bool> = const { Cell::new(false) };
    static QUEUES_VALID: Cell<bool> = const { Cell::new(false) };
    static BUMP_PENDING: Cell<bool> = const { Cell::new(false) };
    /// A maintenance step ran in this transaction: it may hold the ring lock.
    static MAINTENANCE: Cell<bool> = const { Cell::new(false) };
    static FORGET_ON_ABORT: Cell<bool> = const { Cell::new(false) };
    /// End of the WAL that this transaction's claims wrote, while they are all it wrote.
    static CLAIM_WAL: Cell<u64> = const { Cell::new(0) };
    static SAVED_SYNC: Cell<i32> = const { Cell::new(NOT_SAVED) };
}

const NOT_SAVED: i32 = i32::MIN;

/// Registers the callbacks. Called from `_PG_init`: with preload ours is then the first registered and so
/// the last to run before commit, and nobody writes WAL after it has looked.
pub fn install() {
    // SAFETY: the callbacks are plain functions that live as long as the library.
    unsafe {
        pg_sys::RegisterXactCallback(Some(at_transaction_event), std::ptr::null_mut());
        pg_sys::RegisterSubXactCallback(Some(at_subtransaction_event), std::ptr::null_mut());
        pg_sys::CacheRegisterRelcacheCallback(Some(at_relcache_invalidation), pg_sys::Datum::from(0usize));
    }
}

unsafe extern "C-unwind" fn at_transaction_event(
    event: pg_sys::XactEvent::Type,
    _arg: *mut std::ffi::c_void,
) {
    match event {
        pg_sys::XactEvent::XACT_EVENT_PRE_COMMIT => relax_commit_of_claims(),
        pg_sys::XactEvent::XACT_EVENT_PRE_PREPARE if MAINTENANCE.get() => refuse_prepare(),
        pg_sys::XactEvent::XACT_EVENT_COMMIT => {
            if BUMP_PENDING.get() {
                // The commit is visible, the ring lock still held: who reads the ring from here on sees
                // the new one, who read it before finds the epoch moved.
                shmem::bump_epoch();
            }
            waiters::at_commit();
            end_of_transaction(false);
        }
        pg_sys::XactEvent::XACT_EVENT_ABORT => {
            waiters::at_abort();
            end_of_transaction(true);
        }
        pg_sys::XactEvent::XACT_EVENT_PREPARE => {
            waiters::forget();
            end_of_transaction(true);
        }
        _ => {}
    }
}

unsafe extern "C-unwind" fn at_subtransaction_event(
    event: pg_sys::SubXactEvent::Type,
    _my_subid: pg_sys::SubTransactionId,
    _parent_subid: pg_sys::SubTransactionId,
    _arg: *mut std::ffi::c_void,
) {
    if event == pg_sys::SubXactEvent::SUBXACT_EVENT_ABORT_SUB {
        waiters::at_subtransaction_abort();
        if FORGET_ON_ABORT.get() {
            QUEUES_VALID.set(false);
        }
    }
}

unsafe extern "C-unwind" fn at_relcache_invalidation(_arg: pg_sys::Datum, relid: Oid) {
    let all = relid == pg_sys::InvalidOid;
    if all || relid.to_u32() == RING.get() {
        RING_VALID.set(false);
    }
    if all || relid.to_u32() == QUEUES.get() {
        QUEUES_VALID.set(false);
    }
    super::index::forget((!all).then_some(relid));
}

fn end_of_transaction(aborted: bool) {
    super::roster::end_of_transaction(aborted);
    if aborted && FORGET_ON_ABORT.get() {
        QUEUES_VALID.set(false);
    }
    FORGET_ON_ABORT.set(false);
    BUMP_PENDING.set(false);
    MAINTENANCE.set(false);
    CLAIM_WAL.set(0);
    if SAVED_SYNC.get() != NOT_SAVED {
        // SAFETY: a plain int of this process, set back to what it was.
        unsafe { pg_sys::synchronous_commit = SAVED_SYNC.get() };
        SAVED_SYNC.set(NOT_SAVED);
    }
}

/// A transaction that wrote nothing but claims need not wait for its flush: a claim lost in a crash is a
/// redelivery, and everything that depends on it comes later in the WAL.
fn relax_commit_of_claims() {
    let off = pg_sys::SyncCommitLevel::SYNCHRONOUS_COMMIT_OFF as i32;
    // SAFETY: plain variables of this process.
    unsafe {
        if CLAIM_WAL.get() != 0
            && pg_sys::ProcLastRecPtr == CLAIM_WAL.get()
            && pg_sys::synchronous_commit > off
        {
            SAVED_SYNC.set(pg_sys::synchronous_commit);
            pg_sys::synchronous_commit = off;
        }
    }
}

#[pgrx::pg_guard]
extern "C-unwind" fn refuse_prepare() {
    crate::error::Error::AfterMaintenance("PREPARE TRANSACTION").raise();
}

// ---------------------------------------------------------------- what other sessions' commits change

/// Remembers which relations' invalidations matter.
pub fn watch(ring: Oid, queues: Oid) {
    RING.set(ring.to_u32());
    QUEUES.set(queues.to_u32());
}

/// Takes in what other transactions have committed so far.
pub fn accept_invalidations() {
    // SAFETY: called inside a transaction.
    unsafe { pg_sys::AcceptInvalidationMessages() }
}

pub fn ring_is_valid() -> bool {
    RING_VALID.get()
}

pub fn set_ring_valid(valid: bool) {
    RING_VALID.set(valid);
}

pub fn queues_are_valid() -> bool {
    QUEUES_VALID.get()
}

pub fn set_queues_valid(valid: bool) {
    QUEUES_VALID.set(valid);
}

/// What was remembered of queues holds only if the transaction commits.
pub fn forget_queues_on_abort() {
    FORGET_ON_ABORT.set(true);
}

/// Notes that this transaction runs a maintenance step. It can not be prepared: a prepared transaction would
/// keep the ring lock, and no callback runs at its commit.
pub fn note_maintenance() {
    MAINTENANCE.set(true);
}

/// Announces at commit that the ring changed: epoch for those with shared memory, relcache invalidation
/// for everybody (also for a standby, where no callback runs).
pub fn bump_ring_at_commit(ring: Oid) {
    // SAFETY: called in a transaction that writes; ring names a relation.
    unsafe {
        pg_sys::GetCurrentTransactionId();
        pg_sys::CacheInvalidateRelcacheByRelid(ring);
    }
    BUMP_PENDING.set(true);
}

pub fn ring_bump_is_pending() -> bool {
    BUMP_PENDING.get()
}

/// Tells sessions to read the queues again.
pub fn invalidate_queues(queues: Oid) {
    // SAFETY: called in a transaction that writes; queues names a relation.
    unsafe { pg_sys::CacheInvalidateRelcacheByRelid(queues) }
}

// ---------------------------------------------------------------- claims without a flush

/// Whether this transaction has written nothing so far, or nothing but claims.
pub fn only_claims_so_far() -> bool {
    // SAFETY: plain variables of this process.
    unsafe {
        pg_sys::XactLastRecEnd == 0 || (CLAIM_WAL.get() != 0 && pg_sys::ProcLastRecPtr == CLAIM_WAL.get())
    }
}

/// After a crash claims are flushed for so long, in microseconds: a job that crashes the server within a
/// second would otherwise lose its claim with it each time, and its attempt would never count.
const CAREFUL_AFTER_CRASH: i64 = 600 * time::SECOND;

/// Notes that the last WAL record so far is a claim's. Without preload another library's callback may
/// write after ours has looked, so the commit stays synchronous then.
pub fn note_claim_wal() {
    let careful = shmem::crashed_at().is_some_and(|at| time::now() - at < CAREFUL_AFTER_CRASH);
    if shmem::available() && !careful {
        // SAFETY: a plain variable of this process.
        CLAIM_WAL.set(unsafe { pg_sys::ProcLastRecPtr });
    }
}

/// Waits until all WAL that this session wrote is on disk.
pub fn flush_own_wal() {
    // SAFETY: XactLastRecEnd is the exact end of this session's last record.
    unsafe {
        if pg_sys::XactLastRecEnd != 0 {
            pg_sys::XLogFlush(pg_sys::XactLastRecEnd);
        }
    }
}

// ---------------------------------------------------------------- transaction ids

/// The id of the current (sub)transaction, assigned now if it has none.
pub fn current_xid() -> u32 {
    // SAFETY: called inside a transaction that may write.
    unsafe { pg_sys::GetCurrentTransactionId().into_inner() }
}

/// Whether this transaction has an id, as it gets with its first change of a table.
pub fn has_written() -> bool {
    // SAFETY: reads local transaction state.
    unsafe { pg_sys::GetTopTransactionIdIfAny() != pg_sys::InvalidTransactionId }
}

/// The id of the transaction with its epoch; 0 where it has none.
pub fn full_xid() -> u64 {
    // SAFETY: reads local transaction state.
    unsafe { pg_sys::GetTopFullTransactionIdIfAny().value }
}

/// The next transaction id with its epoch: the clock of `widen` and `is_running`.
pub fn next_xid() -> u64 {
    // SAFETY: reads shared memory under its lock.
    unsafe { pg_sys::ReadNextFullTransactionId().value }
}

/// Gives a 32-bit id that was just read from a live tuple its epoch. Remembered ids need it: a bare one
/// looks like a running transaction again after two billion more.
pub fn widen(xid: u32, next: u64) -> u64 {
    let epoch = next & !0xffff_ffff;
    let full = epoch | u64::from(xid);
    if full >= next {
        full.wrapping_sub(1 << 32)
    } else {
        full
    }
}

/// Whether a remembered id is the own transaction's or a subtransaction's of it.
pub fn is_own(full: u64) -> bool {
    // SAFETY: reads local transaction state.
    unsafe { pg_sys::TransactionIdIsCurrentTransactionId(pg_sys::TransactionId::from(full as u32)) }
}

/// Whether a remembered (sub)transaction is still running, the own one included.
pub fn is_running(full: u64, next: u64) -> bool {
    if next.wrapping_sub(full) >= 1 << 31 {
        return false; // older than any transaction that can be running
    }
    let xid = pg_sys::TransactionId::from(full as u32);
    // SAFETY: both only read shared and local transaction state.
    unsafe { pg_sys::TransactionIdIsCurrentTransactionId(xid) || pg_sys::TransactionIdIsInProgress(xid) }
}

/// Whether a remembered transaction is known to have committed. Only asked of recent ones, since the commit
/// log of old ones may be gone; false also means "not known".
pub fn has_committed(full: u64, next: u64) -> bool {
    const RECENT: u64 = 1 << 16;
    // SAFETY: the transaction is recent, so its commit status is kept.
    next.wrapping_sub(full) < RECENT
        && unsafe { pg_sys::TransactionIdDidCommit(pg_sys::TransactionId::from(full as u32)) }
}

#[cfg(test)]
mod tests {
    use super::widen;

    const EPOCH: u64 = 1 << 32;

    #[test]
    fn an_id_gets_the_epoch_it_was_given_out_in() {
        assert_eq!(widen(100, 3 * EPOCH + 200), 3 * EPOCH + 100);
        // Not given out yet in this epoch, so it is of the one before.
        assert_eq!(
            widen(u32::MAX - 5, 3 * EPOCH + 200),
            2 * EPOCH + u64::from(u32::MAX - 5)
        );
        assert_eq!(widen(199, 200), 199);
    }

    #[test]
    fn the_next_id_itself_is_not_out_yet() {
        assert_eq!(widen(200, EPOCH + 200), 200);
    }
}
