//! Opened tables and indexes, and what the catalog says of an index.

use pgrx::pg_sys;
use std::cell::Cell;

pub type Oid = pg_sys::Oid;

pub const INT8: Oid = pgrx::pg_sys::INT8OID;
pub const INT8_ARRAY: Oid = pgrx::pg_sys::INT8ARRAYOID;
pub const TIMESTAMPTZ: Oid = pgrx::pg_sys::TIMESTAMPTZOID;

pub const NO_OID: Oid = pg_sys::InvalidOid;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// ACCESS SHARE.
    Read,
    /// ROW EXCLUSIVE.
    Write,
}

impl Access {
    fn lockmode(self) -> pg_sys::LOCKMODE {
        match self {
            Access::Read => pg_sys::AccessShareLock as pg_sys::LOCKMODE,
            Access::Write => pg_sys::RowExclusiveLock as pg_sys::LOCKMODE,
        }
    }
}

/// A table we opened. Dropping it closes it and gives the lock back, unless `keep_lock` was called: then
/// the lock stays until the transaction ends, as it must where something was written.
pub struct Table {
    pub(super) rel: pg_sys::Relation,
    access: Access,
    keep: Cell<bool>,
}

impl Table {
    pub fn open(oid: Oid, access: Access) -> Table {
        // SAFETY: table_open raises where the oid names no table.
        let rel = unsafe { pg_sys::table_open(oid, access.lockmode()) };
        Table {
            rel,
            access,
            keep: Cell::new(false),
        }
    }

    pub fn keep_lock(&self) {
        self.keep.set(true);
    }

    pub fn oid(&self) -> Oid {
        // SAFETY: rel is open.
        unsafe { (*self.rel).rd_id }
    }

    pub fn name(&self) -> String {
        // SAFETY: rel is open; relname is NUL-terminated.
        unsafe { pgrx::name_data_to_str(&(*(*self.rel).rd_rel).relname).to_string() }
    }

    pub fn columns(&self) -> usize {
        // SAFETY: rel is open.
        unsafe { (*(*self.rel).rd_att).natts as usize }
    }

    /// The type of a column, by its number from 1.
    pub fn column_type(&self, column: usize) -> Oid {
        // SAFETY: rel is open; the getter checks nothing, so the column is checked here.
        unsafe {
            let desc = (*self.rel).rd_att;
            assert!(column >= 1 && column <= (*desc).natts as usize);
            pg_sys::get_atttype((*self.rel).rd_id, column as i16)
        }
    }

    /// Number of blocks of the main fork, asked from the storage manager.
    pub fn blocks(&self) -> u32 {
        // SAFETY: rel is open.
        unsafe { pg_sys::RelationGetNumberOfBlocksInFork(self.rel, pg_sys::ForkNumber::MAIN_FORKNUM) }
    }

    /// Number of bytes of the table with its indexes and its TOAST.
    pub fn total_bytes(&self) -> i64 {
        // SAFETY: pg_total_relation_size(regclass) takes the oid of an open relation.
        unsafe {
            pg_sys::OidFunctionCall1Coll(
                pg_sys::F_PG_TOTAL_RELATION_SIZE.into(),
                pg_sys::InvalidOid,
                pg_sys::Datum::from(self.oid()),
            )
            .value() as i64
        }
    }

    /// A number that changes when the table's storage is replaced (VACUUM FULL, TRUNCATE, CLUSTER).
    pub fn storage(&self) -> u64 {
        // SAFETY: rel is open, rd_rel is its pg_class row.
        unsafe { u64::from((*(*self.rel).rd_rel).relfilenode.to_u32()) }
    }

    /// The indexes of the table as of now. Called after the table was locked: an index that is being
    /// built concurrently waits for everybody who might not have seen it in this list.
    pub fn index_oids(&self) -> Vec<Oid> {
        // SAFETY: rel is open; the list is a fresh copy of oids.
        unsafe {
            let list = pg_sys::RelationGetIndexList(self.rel);
            if list.is_null() {
                return Vec::new();
            }
            let n = (*list).length as usize;
            let oids = (0..n).map(|i| (*(*list).elements.add(i)).oid_value).collect();
            pg_sys::list_free(list);
            oids
        }
    }
}

impl Drop for Table {
    fn drop(&mut self) {
        if super::unwinding() {
            return; // closed by the transaction's abort
        }
        let mode = if self.keep.get() {
            pg_sys::NoLock as pg_sys::LOCKMODE
        } else {
            self.access.lockmode()
        };
        // SAFETY: opened in `open`, closed only here.
        unsafe { pg_sys::table_close(self.rel, mode) }
    }
}

/// The oid of a relation of a schema, or None.
pub fn find(schema: &str, name: &str) -> Option<Oid> {
    let schema = std::ffi::CString::new(schema).ok()?;
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: both strings are NUL-terminated and live through the calls.
    unsafe {
        let ns = pg_sys::get_namespace_oid(schema.as_ptr(), true);
        if ns == pg_sys::InvalidOid {
            return None;
        }
        let oid = pg_sys::get_relname_relid(name.as_ptr(), ns);
        (oid != pg_sys::InvalidOid).then_some(oid)
    }
}

/// The number of a column by its name, or None.
pub fn column(table: Oid, name: &str) -> Option<i16> {
    let name = std::ffi::CString::new(name).ok()?;
    // SAFETY: name is NUL-terminated and lives through the call.
    let number = unsafe { pg_sys::get_attnum(table, name.as_ptr()) };
    (number > 0).then_some(number)
}
