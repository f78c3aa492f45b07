//! Commands on whole databases, before which a worker has to leave: nothing in the server tells a
//! background worker, and DROP DATABASE and CREATE DATABASE ... TEMPLATE fail after five seconds.

use super::roster;
use super::table::Oid;
use pgrx::pg_sys;
use std::ffi::{c_char, CStr};
use std::time::{Duration, Instant};

static mut PREVIOUS: pg_sys::ProcessUtility_hook_type = None;

/// Such a command waits for the worker so long; then it goes on and says itself who is in the way.
const PATIENCE: Duration = Duration::from_secs(10);
const NAP_US: i64 = 2_000;

mod raw {
    use pgrx::pg_sys;
    // Without pgrx's guard: errors of other people's statements pass through untouched, with their position
    // in the statement.
    unsafe extern "C-unwind" {
        #[allow(clashing_extern_declarations)]
        pub fn standard_ProcessUtility(
            pstmt: *mut pg_sys::PlannedStmt,
            query: *const std::ffi::c_char,
            read_only_tree: bool,
            context: pg_sys::ProcessUtilityContext::Type,
            params: pg_sys::ParamListInfo,
            env: *mut pg_sys::QueryEnvironment,
            dest: *mut pg_sys::DestReceiver,
            qc: *mut pg_sys::QueryCompletion,
        );
        pub fn kill(pid: i32, signal: i32) -> i32;
    }
}

/// Called from `_PG_init` while the postmaster preloads libraries.
pub fn install() {
    // SAFETY: the postmaster is single-threaded here; the hook is chained to who was there before.
    unsafe {
        PREVIOUS = pg_sys::ProcessUtility_hook;
        pg_sys::ProcessUtility_hook = Some(process_utility);
    }
}

// An error of the statement jumps over this frame, which holds nothing.
unsafe extern "C-unwind" fn process_utility(
    pstmt: *mut pg_sys::PlannedStmt,
    query: *const c_char,
    read_only_tree: bool,
    context: pg_sys::ProcessUtilityContext::Type,
    params: pg_sys::ParamListInfo,
    env: *mut pg_sys::QueryEnvironment,
    dest: *mut pg_sys::DestReceiver,
    qc: *mut pg_sys::QueryCompletion,
) {
    use pg_sys::NodeTag::*;
    // SAFETY: PostgreSQL passes a utility statement; everything is handed on as it came.
    unsafe {
        match (*(*pstmt).utilityStmt).type_ {
            T_DropdbStmt | T_CreatedbStmt | T_RenameStmt | T_AlterDatabaseStmt => {
                send_worker_away((*pstmt).utilityStmt);
            }
            _ => {}
        }
        let next = PREVIOUS.unwrap_or(raw::standard_ProcessUtility);
        next(pstmt, query, read_only_tree, context, params, env, dest, qc);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn send_worker_away(statement: *mut pg_sys::Node) {
    // SAFETY: a complete statement node.
    let Some((database, drops)) = (unsafe { needed(statement) }) else {
        return;
    };
    let Some(entry) = roster::hold(database.to_u32(), drops) else {
        return;
    };
    let deadline = Instant::now() + PATIENCE;
    let mut told = 0;
    while entry.worker() != 0 && Instant::now() < deadline {
        let pid = entry.worker();
        // SAFETY: only a process of this server is told, and SIGTERM is what it expects.
        unsafe {
            if pid != told && pid != 0 && !pg_sys::BackendPidGetProc(pid).is_null() {
                raw::kill(pid, pg_sys::SIGTERM as i32);
                told = pid;
            }
            pg_sys::pg_usleep(NAP_US);
        }
        pgrx::check_for_interrupts!();
    }
}

/// The database that a statement needs without anybody else in it, and whether it drops it.
///
/// # Safety
/// `statement` is a statement of one of the four kinds.
unsafe fn needed(statement: *mut pg_sys::Node) -> Option<(Oid, bool)> {
    use pg_sys::NodeTag::*;
    // SAFETY: each node is cast to the type that its tag names; names are NUL-terminated.
    unsafe {
        match (*statement).type_ {
            T_DropdbStmt => {
                let s = statement.cast::<pg_sys::DropdbStmt>();
                named((*s).dbname).map(|d| (d, true))
            }
            T_CreatedbStmt => {
                let s = statement.cast::<pg_sys::CreatedbStmt>();
                let template = option((*s).options, c"template")?;
                named(pg_sys::defGetString(template)).map(|d| (d, false))
            }
            T_RenameStmt => {
                let s = statement.cast::<pg_sys::RenameStmt>();
                ((*s).renameType == pg_sys::ObjectType::OBJECT_DATABASE)
                    .then(|| named((*s).subname))
                    .flatten()
                    .map(|d| (d, false))
            }
            T_AlterDatabaseStmt => {
                let s = statement.cast::<pg_sys::AlterDatabaseStmt>();
                option((*s).options, c"tablespace")?;
                named((*s).dbname).map(|d| (d, false))
            }
            _ => None,
        }
    }
}

unsafe fn named(name: *const c_char) -> Option<Oid> {
    if name.is_null() {
        return None;
    }
    // SAFETY: a NUL-terminated name; called inside the statement's transaction.
    let oid = unsafe { pg_sys::get_database_oid(name, true) };
    (oid != pg_sys::InvalidOid).then_some(oid)
}

/// An option of a statement that has a value.
unsafe fn option(list: *mut pg_sys::List, name: &CStr) -> Option<*mut pg_sys::DefElem> {
    if list.is_null() {
        return None;
    }
    // SAFETY: a list of DefElem nodes with NUL-terminated names.
    unsafe {
        (0..(*list).length as usize)
            .map(|i| (*(*list).elements.add(i)).ptr_value.cast::<pg_sys::DefElem>())
            .find(|d| CStr::from_ptr((**d).defname) == name && !(**d).arg.is_null())
    }
}

/// The databases that accept connections and are no templates. For the launcher, in a transaction.
pub fn connectable() -> Vec<u32> {
    let mut found = Vec::new();
    // SAFETY: a catalog scan inside a transaction; rows have pg_database's layout.
    unsafe {
        let rel = pg_sys::table_open(
            pg_sys::DatabaseRelationId,
            pg_sys::AccessShareLock as pg_sys::LOCKMODE,
        );
        let scan = pg_sys::table_beginscan_catalog(rel, 0, std::ptr::null_mut());
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_database>();
            // A negative limit below -1 marks a database whose DROP was interrupted.
            if (*form).datallowconn && !(*form).datistemplate && (*form).datconnlimit >= -1 {
                found.push((*form).oid.to_u32());
            }
        }
        // SAFETY of the end: the scan was begun above.
        ((*(*rel).rd_tableam).scan_end.unwrap_unchecked())(scan);
        pg_sys::table_close(rel, pg_sys::AccessShareLock as pg_sys::LOCKMODE);
    }
    found
}
