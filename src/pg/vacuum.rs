//! VACUUM by a background worker: it can not run inside a transaction, so neither by SPI nor by CALL.

use pgrx::pg_sys;
use std::ffi::CString;

/// Runs `VACUUM (FREEZE, SKIP_LOCKED) table`. Called in a transaction without a snapshot, as the only thing
/// in it.
pub fn freeze(table: &str) {
    let Ok(sql) = CString::new(format!("VACUUM (FREEZE, SKIP_LOCKED) {table}")) else {
        return;
    };
    // SAFETY: the statement is parsed by the server and lives, like VACUUM's own memory, in a context below
    // TopMemoryContext, which its commits leave alone.
    unsafe {
        let context = pg_sys::AllocSetContextCreateInternal(
            pg_sys::TopMemoryContext,
            c"awa_queue vacuum".as_ptr(),
            pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
            pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
        );
        let before = pg_sys::MemoryContextSwitchTo(context);
        pg_sys::PortalContext = context;
        let list = pg_sys::pg_parse_query(sql.as_ptr());
        let parsed = (*(*list).elements).ptr_value.cast::<pg_sys::RawStmt>();
        let state = pg_sys::make_parsestate(std::ptr::null_mut());
        pg_sys::ExecVacuum(state, (*parsed).stmt.cast(), true);
        pg_sys::PortalContext = std::ptr::null_mut();
        pg_sys::MemoryContextSwitchTo(before);
        pg_sys::MemoryContextDelete(context);
    }
}
