//! What no snapshot of this database can miss any more.

use super::heap;
use super::latest::Latest;
use super::table::Table;
use super::xact;
use pgrx::pg_sys;

/// Whether every snapshot that is still in use sees all rows that the table has now: the youngest of them
/// was written before the oldest transaction that any snapshot counts as running.
pub fn everybody_sees(table: &Table) -> bool {
    let latest = Latest::take();
    let mut youngest = 0u32;
    heap::scan(table, &latest, |row| {
        let xmin = row.xmin;
        let normal = xmin >= pg_sys::FirstNormalTransactionId.into_inner();
        if normal && (youngest == 0 || (xmin.wrapping_sub(youngest) as i32) > 0) {
            youngest = xmin;
        }
        true
    });
    if youngest == 0 {
        return true;
    }
    // SAFETY: table is open.
    let horizon = unsafe { pg_sys::GetOldestNonRemovableTransactionId(table.rel) }.into_inner();
    (youngest.wrapping_sub(horizon) as i32) < 0
}

/// Whether every snapshot that is still in use sees what was committed when `xid` (with its epoch) was the next
/// transaction id.
pub fn has_reached(table: &Table, xid: u64) -> bool {
    // SAFETY: table is open.
    let horizon = unsafe { pg_sys::GetOldestNonRemovableTransactionId(table.rel) }.into_inner();
    // The horizon may be the next id itself, which has not been given out yet.
    xid <= xact::widen(horizon, xact::next_xid() + 1)
}
