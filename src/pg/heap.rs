//! Rows appended to and read from a table directly, past the executor.
//!
//! This skips privileges, row security, NOT NULL, CHECK, defaults, triggers and partition routing. The
//! logs have none of these but NOT NULL and their partition bound, which the callers fill by construction.

use super::datum::{Value, Varlena};
use super::index::{IndexSet, Inserted};
use super::latest::Latest;
use super::table::Table;
use pgrx::pg_sys;
use std::rc::Rc;

/// Where a row lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    pub block: u32,
    pub offset: u16,
}

impl Place {
    pub(super) fn of(tid: &pg_sys::ItemPointerData) -> Place {
        Place {
            block: (u32::from(tid.ip_blkid.bi_hi) << 16) | u32::from(tid.ip_blkid.bi_lo),
            offset: tid.ip_posid,
        }
    }

    fn tid(self) -> pg_sys::ItemPointerData {
        pg_sys::ItemPointerData {
            ip_blkid: pg_sys::BlockIdData {
                bi_hi: (self.block >> 16) as u16,
                bi_lo: self.block as u16,
            },
            ip_posid: self.offset,
        }
    }
}

/// A row that was appended, for entering it into indexes.
pub struct Appended {
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
    tuple: pg_sys::HeapTuple,
    tid: pg_sys::ItemPointerData,
}

impl Appended {
    fn inserted(&self) -> Inserted<'_> {
        Inserted {
            tid: self.tid,
            values: &self.values,
            nulls: &self.nulls,
            tuple: self.tuple,
        }
    }

    /// Enters the row into the indexes with leading keys `keys` only.
    pub fn enter_ordering(&self, table: &Table, indexes: &IndexSet, keys: &[i16]) {
        indexes.insert_ordering(table, keys, &self.inserted());
    }

    /// Enters the row into all indexes but those.
    pub fn enter_rest(&self, table: &Table, indexes: &IndexSet, except: &[i16]) {
        indexes.insert_rest(table, Some(except), &self.inserted());
    }

    /// Enters the row into all indexes.
    pub fn enter_all(&self, table: &Table, indexes: &IndexSet) {
        indexes.insert_rest(table, None, &self.inserted());
    }
}

fn padded(table: &Table, values: &[Value]) -> (Vec<pg_sys::Datum>, Vec<bool>) {
    let columns = table.columns();
    assert!(values.len() <= columns, "more values than the table has columns");
    let mut datums = Vec::with_capacity(columns);
    let mut nulls = Vec::with_capacity(columns);
    for v in values {
        let (datum, null) = v.parts();
        datums.push(datum);
        nulls.push(null);
    }
    datums.resize(columns, pg_sys::Datum::from(0usize));
    nulls.resize(columns, true);
    (datums, nulls)
}

/// Appends one row. Columns that a later release added are null.
pub fn append(table: &Table, values: &[Value]) -> Appended {
    let (mut values, mut nulls) = padded(table, values);
    table.keep_lock();
    // SAFETY: the table is open and locked for writing; values and nulls cover all columns with datums of
    // their types. No BulkInsertState: its buffer ring makes each backend write its own dirty pages.
    unsafe {
        let tuple = pg_sys::heap_form_tuple((*table.rel).rd_att, values.as_mut_ptr(), nulls.as_mut_ptr());
        let cid = pg_sys::GetCurrentCommandId(true);
        pg_sys::heap_insert(table.rel, tuple, cid, 0, std::ptr::null_mut());
        Appended {
            values,
            nulls,
            tuple,
            tid: (*tuple).t_self,
        }
    }
}

/// Appends many rows with as few WAL records as pages, and returns them for their indexes.
pub fn append_many<const N: usize>(table: &Table, rows: &[[Value; N]]) -> Vec<Appended> {
    if let [one] = rows {
        return vec![append(table, one)];
    }
    table.keep_lock();
    // SAFETY: as in `append`. The slots use a copy of the descriptor that is not reference-counted, so
    // they leave nothing with the resource owner; heap_multi_insert fills tts_tid of each.
    unsafe {
        let desc = pg_sys::CreateTupleDescCopyConstr((*table.rel).rd_att);
        let mut appended = Vec::with_capacity(rows.len());
        let mut slots = Vec::with_capacity(rows.len());
        for row in rows {
            let (mut values, mut nulls) = padded(table, row);
            let tuple = pg_sys::heap_form_tuple(desc, values.as_mut_ptr(), nulls.as_mut_ptr());
            (*tuple).t_tableOid = (*table.rel).rd_id;
            let slot = pg_sys::MakeSingleTupleTableSlot(desc, &raw const pg_sys::TTSOpsHeapTuple);
            pg_sys::ExecStoreHeapTuple(tuple, slot, false);
            slots.push(slot);
            appended.push(Appended {
                values,
                nulls,
                tuple,
                tid: Default::default(),
            });
        }
        let cid = pg_sys::GetCurrentCommandId(true);
        pg_sys::heap_multi_insert(
            table.rel,
            slots.as_mut_ptr(),
            slots.len() as i32,
            cid,
            0,
            std::ptr::null_mut(),
        );
        for (row, &slot) in appended.iter_mut().zip(&slots) {
            row.tid = (*slot).tts_tid;
            pg_sys::ExecDropSingleTupleTableSlot(slot);
        }
        appended
    }
}

impl Appended {
    pub fn place(&self) -> Place {
        Place::of(&self.tid)
    }
}

/// A row that was read, copied out of its page.
pub struct Row {
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
    pub place: Place,
    /// The transaction that wrote the row, 2 where it is frozen.
    pub xmin: u32,
}

impl Row {
    fn of(table: &Table) -> Row {
        let columns = table.columns();
        Row {
            values: vec![pg_sys::Datum::from(0usize); columns],
            nulls: vec![true; columns],
            place: Place { block: 0, offset: 0 },
            xmin: 0,
        }
    }

    /// Takes in what `tuple` holds, in the room of the row before.
    ///
    /// # Safety
    /// `tuple` is a tuple of `table`, for which this row was made, and stays valid as long as the row's values
    /// are used.
    unsafe fn fill(&mut self, table: &Table, tuple: pg_sys::HeapTuple) {
        // SAFETY: promised by the caller; both arrays have one entry per column.
        unsafe {
            let (values, nulls) = (self.values.as_mut_ptr(), self.nulls.as_mut_ptr());
            pg_sys::heap_deform_tuple(tuple, (*table.rel).rd_att, values, nulls);
            self.place = Place::of(&(*tuple).t_self);
            self.xmin = pg_sys::htup::HeapTupleHeaderGetXmin((*tuple).t_data).into_inner();
        }
    }

    fn get(&self, column: usize) -> Option<pg_sys::Datum> {
        let i = column - 1;
        (i < self.nulls.len() && !self.nulls[i]).then(|| self.values[i])
    }

    pub fn i64(&self, column: usize) -> Option<i64> {
        self.get(column).map(|d| d.value() as i64)
    }

    pub fn i32(&self, column: usize) -> Option<i32> {
        self.get(column).map(|d| d.value() as i32)
    }

    pub fn i16(&self, column: usize) -> Option<i16> {
        self.get(column).map(|d| d.value() as i16)
    }

    pub fn char(&self, column: usize) -> Option<u8> {
        self.get(column).map(|d| d.value() as u8)
    }

    pub fn varlena(&self, column: usize) -> Option<Varlena> {
        self.get(column).map(Varlena)
    }
}

/// Deletes a row that a snapshot has just shown; false where another transaction did first. One that is just
/// doing it is waited for where `wait` says so; the caller holds no short lock and no scan. Whatever the isolation level: what
/// matters is the row.
pub fn delete(table: &Table, place: Place, wait: bool) -> bool {
    table.keep_lock();
    let mut tid = place.tid();
    // SAFETY: the table is open and locked for writing; the place was that of a visible row, which nobody can
    // have vacuumed away without heap_delete telling: its line pointer would be unused, and the caller's
    // snapshot holds it back.
    let result = unsafe {
        let mut failure = pg_sys::TM_FailureData::default();
        pg_sys::heap_delete(
            table.rel,
            &mut tid,
            pg_sys::GetCurrentCommandId(true),
            std::ptr::null_mut(),
            wait,
            &mut failure,
            false,
        )
    };
    result == pg_sys::TM_Result::TM_Ok
}

/// Reads rows by their place. Keeps the pin while the next one is on the same page.
pub struct Fetcher {
    table: Rc<Table>,
    buffer: pg_sys::Buffer,
    block: u32,
    blocks: u32,
}

impl Fetcher {
    pub fn new(table: &Rc<Table>) -> Fetcher {
        Fetcher {
            table: table.clone(),
            buffer: 0,
            block: u32::MAX,
            blocks: 0,
        }
    }

    /// The row at a place, whoever wrote it, if the bigint in its first column is `key`. Keys are never
    /// used twice, so the key proves the row; visibility is proved by what led here.
    pub fn fetch(&mut self, place: Place, key: i64) -> Option<Row> {
        if place.block >= self.blocks {
            self.blocks = self.table.blocks();
            if place.block >= self.blocks {
                return None;
            }
        }
        // SAFETY: the block exists; the page is read under its share lock and the tuple copied before the
        // lock goes, with the item pointer checked against the page.
        let tuple = unsafe {
            if self.block != place.block {
                if self.buffer != 0 {
                    pg_sys::ReleaseBuffer(self.buffer);
                    self.buffer = 0;
                }
                self.buffer = pg_sys::ReadBuffer(self.table.rel, place.block);
                self.block = place.block;
            }
            pg_sys::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_SHARE as i32);
            let tuple = copy_tuple(&self.table, self.buffer, place);
            pg_sys::LockBuffer(self.buffer, pg_sys::BUFFER_LOCK_UNLOCK as i32);
            tuple
        };
        if tuple.is_null() {
            return None;
        }
        let mut row = Row::of(&self.table);
        // SAFETY: the copy lives in the current memory context.
        unsafe { row.fill(&self.table, tuple) };
        (row.i64(1) == Some(key)).then_some(row)
    }
}

impl Drop for Fetcher {
    fn drop(&mut self) {
        if super::unwinding() || self.buffer == 0 {
            return;
        }
        // SAFETY: pinned in `fetch`, released only here or there.
        unsafe { pg_sys::ReleaseBuffer(self.buffer) }
    }
}

/// # Safety
/// `buffer` is pinned and share-locked and holds `place.block` of `table`.
unsafe fn copy_tuple(table: &Table, buffer: pg_sys::Buffer, place: Place) -> pg_sys::HeapTuple {
    // SAFETY: promised by the caller; the offset is checked against the page before it is used.
    unsafe {
        let page = pg_sys::BufferGetPage(buffer).cast::<pg_sys::PageHeaderData>();
        if place.offset == 0 || place.offset > max_offset(page) {
            return std::ptr::null_mut();
        }
        // PageGetItemId: ((ItemId) (&((PageHeader) (page))->pd_linp[(offsetNumber) - 1]))
        let items: *const pg_sys::ItemIdData = (&raw const (*page).pd_linp).cast();
        let item = items.add(usize::from(place.offset) - 1);
        if (*item).lp_flags() != pg_sys::LP_NORMAL {
            return std::ptr::null_mut();
        }
        // PageGetItem: (Item) (((char *) (page)) + ItemIdGetOffset(itemId))
        let data = page.cast::<u8>().add((*item).lp_off() as usize);
        let mut tuple = pg_sys::HeapTupleData {
            t_len: (*item).lp_len(),
            t_self: place.tid(),
            t_tableOid: (*table.rel).rd_id,
            t_data: data.cast(),
        };
        pg_sys::heap_copytuple(&mut tuple)
    }
}

/// PageGetMaxOffsetNumber: the number of line pointers, 0 on a page that was never initialised.
///
/// # Safety
/// `page` is a page of a buffer that is pinned and locked.
unsafe fn max_offset(page: *const pg_sys::PageHeaderData) -> u16 {
    // SAFETY: promised by the caller.
    let lower = usize::from(unsafe { (*page).pd_lower });
    let header = std::mem::offset_of!(pg_sys::PageHeaderData, pd_linp);
    (lower.saturating_sub(header) / std::mem::size_of::<pg_sys::ItemIdData>()) as u16
}

/// Visits every row of a table that a snapshot sees, until `visit` returns false. The row's values are
/// only good during the visit.
pub fn scan(table: &Table, snapshot: &Latest, mut visit: impl FnMut(&Row) -> bool) {
    let mut row = Row::of(table);
    // SAFETY: the table is open, the snapshot registered; the scan is ended below. Where `visit` raises,
    // transaction abort ends it.
    unsafe {
        let flags = pg_sys::ScanOptions::SO_TYPE_SEQSCAN
            | pg_sys::ScanOptions::SO_ALLOW_STRAT
            | pg_sys::ScanOptions::SO_ALLOW_SYNC
            | pg_sys::ScanOptions::SO_ALLOW_PAGEMODE;
        let scan = pg_sys::heap_beginscan(
            table.rel,
            snapshot.raw(),
            0,
            std::ptr::null_mut(),
            std::ptr::null_mut(),
            flags,
        );
        loop {
            let tuple = pg_sys::heap_getnext(scan, pg_sys::ScanDirection::ForwardScanDirection);
            if tuple.is_null() {
                break;
            }
            pgrx::check_for_interrupts!();
            row.fill(table, tuple);
            if !visit(&row) {
                break;
            }
        }
        pg_sys::heap_endscan(scan);
    }
}
