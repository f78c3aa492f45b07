//! What differs between PostgreSQL 15 and 18, in one place.

use pgrx::pg_sys;

/// `index_beginscan`; 18 added an instrumentation argument.
///
/// # Safety
/// Both relations are open and locked, and `snapshot` outlives the scan.
pub(super) unsafe fn index_beginscan(
    heap: pg_sys::Relation,
    index: pg_sys::Relation,
    snapshot: pg_sys::Snapshot,
    nkeys: i32,
) -> pg_sys::IndexScanDesc {
    #[cfg(feature = "pg18")]
    // SAFETY: promised by the caller; a null instrumentation means none.
    unsafe {
        pg_sys::index_beginscan(heap, index, snapshot, std::ptr::null_mut(), nkeys, 0)
    }
    #[cfg(not(feature = "pg18"))]
    // SAFETY: promised by the caller.
    unsafe {
        pg_sys::index_beginscan(heap, index, snapshot, nkeys, 0)
    }
}

/// `ExecInsertIndexTuples`; 16 added a flag for summarising indexes only.
///
/// # Safety
/// `info` has its indexes open, `slot` holds a stored tuple with its tid, `estate` is live.
pub(super) unsafe fn exec_insert_index_tuples(
    info: *mut pg_sys::ResultRelInfo,
    slot: *mut pg_sys::TupleTableSlot,
    estate: *mut pg_sys::EState,
) {
    #[cfg(feature = "pg15")]
    // SAFETY: promised by the caller.
    unsafe {
        pg_sys::ExecInsertIndexTuples(
            info,
            slot,
            estate,
            false,
            false,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
        );
    }
    #[cfg(not(feature = "pg15"))]
    // SAFETY: promised by the caller.
    unsafe {
        pg_sys::ExecInsertIndexTuples(
            info,
            slot,
            estate,
            false,
            false,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            false,
        );
    }
}

unsafe extern "C-unwind" {
    // commands/sequence.h is not among the headers that pgrx reads.
    fn nextval_internal(relid: pg_sys::Oid, check_permissions: bool) -> i64;
}

/// `nextval` without a permission check: the caller of a verb needs EXECUTE on it and nothing else.
pub fn nextval(sequence: pg_sys::Oid) -> i64 {
    // SAFETY: nextval_internal is exported by every supported server with this signature; it raises where
    // the oid is no sequence, which the guard turns into a panic.
    unsafe { pg_sys::ffi::pg_guard_ffi_boundary(|| nextval_internal(sequence, false)) }
}
