//! Index scans, positioned and read one row at a time.
//!
//! A *dirty* scan also sees rows of transactions that are still running and tells whose they are; rows of
//! aborted transactions it does not see. Rows of the own transaction look committed to PostgreSQL's dirty
//! snapshot, so each row is tested for that here: what the own transaction wrote may still roll back.

use super::compat;
use super::datum::Varlena;
use super::heap::Place;
use super::index::Index;
use super::latest::Latest;
use super::table::Table;
use pgrx::pg_sys;
use std::rc::Rc;

/// Who wrote the row that a scan stands on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writer {
    Committed,
    /// The own transaction, which may still roll back (to a savepoint).
    Own(u32),
    /// Another transaction that is still running: its id, or its subtransaction's.
    Running(u32),
}

/// A condition on the next key column of the index.
#[derive(Clone, Copy)]
pub enum Cond {
    Eq(i64),
    AtMost(i64),
    /// Both ends included; counts as two keys. An end that is known keeps a scan from reading (and copying)
    /// the rest of a leaf page.
    Between(i64, i64),
    /// The same for a timestamptz column, in microseconds since 2000.
    TimeBetween(i64, i64),
    /// Equality of a text column in collation "C".
    TextEq(Varlena),
    /// Equality of an integer (int4) column.
    IntEq(i32),
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    Forward,
    Backward,
}

const MAX_KEYS: usize = 4;

pub struct Scan {
    scan: pg_sys::IndexScanDesc,
    slot: *mut pg_sys::TupleTableSlot,
    dirty: Option<Box<pg_sys::SnapshotData>>,
    nkeys: usize,
    // Dropped after the scan: fields are dropped in the order of declaration, after `drop` itself.
    _index: Rc<Index>,
    _table: Rc<Table>,
}

impl Scan {
    /// Opens a scan that sees rows in progress. About 27 kB of memory and a microsecond: open it lazily.
    pub fn dirty(table: &Rc<Table>, index: &Rc<Index>, nkeys: usize) -> Scan {
        let mut snapshot = Box::new(pg_sys::SnapshotData {
            snapshot_type: pg_sys::SnapshotType::SNAPSHOT_DIRTY,
            ..Default::default()
        });
        let raw: pg_sys::Snapshot = &raw mut *snapshot;
        let mut scan = Scan::begin(table, index, raw, nkeys);
        scan.dirty = Some(snapshot);
        scan
    }

    /// Opens a scan under a snapshot, which must outlive it.
    pub fn latest(table: &Rc<Table>, index: &Rc<Index>, nkeys: usize, snapshot: &Latest) -> Scan {
        Scan::begin(table, index, snapshot.raw(), nkeys)
    }

    fn begin(table: &Rc<Table>, index: &Rc<Index>, snapshot: pg_sys::Snapshot, nkeys: usize) -> Scan {
        // SAFETY: table and index are open and kept so by the Rc; the snapshot is boxed or registered by
        // the caller, so its address is stable. The slot reads the table's own descriptor.
        unsafe {
            let slot = pg_sys::MakeSingleTupleTableSlot(
                (*table.rel).rd_att,
                &raw const pg_sys::TTSOpsBufferHeapTuple,
            );
            let scan = compat::index_beginscan(table.rel, index.rel, snapshot, nkeys as i32);
            Scan {
                scan,
                slot,
                dirty: None,
                nkeys,
                _index: index.clone(),
                _table: table.clone(),
            }
        }
    }

    /// Positions the scan anew; one condition per leading key column of the index, in that order.
    pub fn seek(&mut self, conds: &[Cond]) {
        const EQ: u32 = pg_sys::BTEqualStrategyNumber;
        const LE: u32 = pg_sys::BTLessEqualStrategyNumber;
        const GE: u32 = pg_sys::BTGreaterEqualStrategyNumber;
        let mut keys = [pg_sys::ScanKeyData::default(); MAX_KEYS];
        let mut n = 0;
        let mut add = |column: usize, strategy: u32, function: u32, argument: pg_sys::Datum| {
            assert!(n < MAX_KEYS, "too many scan keys");
            // SAFETY: ScanKeyInit fills the entry; it sets collation "C", which is that of our text keys.
            unsafe {
                pg_sys::ScanKeyInit(
                    &mut keys[n],
                    column as i16 + 1,
                    strategy as u16,
                    function.into(),
                    argument,
                );
            }
            n += 1;
        };
        for (i, cond) in conds.iter().enumerate() {
            match *cond {
                Cond::Eq(v) => add(i, EQ, pg_sys::F_INT8EQ, v.into()),
                Cond::AtMost(v) => add(i, LE, pg_sys::F_INT8LE, v.into()),
                Cond::Between(low, high) => {
                    add(i, GE, pg_sys::F_INT8GE, low.into());
                    add(i, LE, pg_sys::F_INT8LE, high.into());
                }
                Cond::TimeBetween(low, high) => {
                    add(i, GE, pg_sys::F_TIMESTAMPTZ_GE, low.into());
                    add(i, LE, pg_sys::F_TIMESTAMPTZ_LE, high.into());
                }
                Cond::TextEq(v) => add(i, EQ, pg_sys::F_TEXTEQ, v.0),
                Cond::IntEq(v) => add(i, EQ, pg_sys::F_INT4EQ, v.into()),
            }
        }
        assert_eq!(n, self.nkeys, "as many keys as the scan was opened with");
        // SAFETY: the scan is open; index_rescan copies the keys.
        unsafe {
            pg_sys::index_rescan(
                self.scan,
                keys.as_mut_ptr(),
                self.nkeys as i32,
                std::ptr::null_mut(),
                0,
            );
        }
    }

    /// Moves to the next row; false at the end.
    pub fn next(&mut self, direction: Direction) -> bool {
        let direction = match direction {
            Direction::Forward => pg_sys::ScanDirection::ForwardScanDirection,
            Direction::Backward => pg_sys::ScanDirection::BackwardScanDirection,
        };
        // SAFETY: the scan is open and positioned, the slot is of the kind the heap stores into.
        unsafe { pg_sys::index_getnext_slot(self.scan, direction, self.slot) }
    }

    /// Who wrote the row that the scan stands on. Asked right after `next`, before anything else uses the
    /// snapshot.
    pub fn writer(&self) -> Writer {
        let Some(snapshot) = &self.dirty else {
            return Writer::Committed;
        };
        // SAFETY: the slot holds a buffer heap tuple after a successful `next`.
        unsafe {
            if snapshot.xmin != pg_sys::InvalidTransactionId {
                return Writer::Running(snapshot.xmin.into_inner());
            }
            let tuple = (*self.slot.cast::<pg_sys::BufferHeapTupleTableSlot>()).base.tuple;
            let header = (*tuple).t_data;
            let committed = (*header).t_infomask & pg_sys::HEAP_XMIN_COMMITTED as u16 != 0;
            if committed {
                return Writer::Committed;
            }
            let xmin = pg_sys::htup::HeapTupleHeaderGetRawXmin(header);
            if pg_sys::TransactionIdIsCurrentTransactionId(xmin) {
                Writer::Own(xmin.into_inner())
            } else {
                Writer::Committed
            }
        }
    }

    /// Where the row lies.
    pub fn place(&self) -> Place {
        // SAFETY: the slot holds a row of the table; the heap stored its place with it.
        Place::of(unsafe { &(*self.slot).tts_tid })
    }

    fn attr(&self, column: i16) -> Option<pg_sys::Datum> {
        // SAFETY: the slot holds a row and has at least `column` columns; slot_getsomeattrs_int deforms up
        // to that column where it is not deformed yet (what the inline slot_getattr does).
        unsafe {
            if (*self.slot).tts_nvalid < column {
                pg_sys::slot_getsomeattrs_int(self.slot, i32::from(column));
            }
            let i = column as usize - 1;
            (!*(*self.slot).tts_isnull.add(i)).then(|| *(*self.slot).tts_values.add(i))
        }
    }

    pub fn i64(&self, column: i16) -> i64 {
        self.attr(column).map_or(0, |d| d.value() as i64)
    }

    pub fn i32(&self, column: i16) -> i32 {
        self.attr(column).map_or(0, |d| d.value() as i32)
    }

    pub fn i16(&self, column: i16) -> i16 {
        self.attr(column).map_or(0, |d| d.value() as i16)
    }

    pub fn char(&self, column: i16) -> u8 {
        self.attr(column).map_or(0, |d| d.value() as u8)
    }

    pub fn opt_i64(&self, column: i16) -> Option<i64> {
        self.attr(column).map(|d| d.value() as i64)
    }

    /// The bytes of a bytea column (kept inline in the row: its storage is PLAIN), copied.
    pub fn bytes(&self, column: i16) -> Option<Vec<u8>> {
        self.attr(column).map(|d| Varlena(d).bytes())
    }

    pub fn text(&self, column: i16) -> Option<String> {
        self.attr(column).map(|d| Varlena(d).text())
    }

    /// A variable-length column; good until the scan moves.
    pub fn varlena(&self, column: i16) -> Option<Varlena> {
        self.attr(column).map(Varlena)
    }
}

impl Drop for Scan {
    fn drop(&mut self) {
        if super::unwinding() {
            return; // buffers and descriptors go with the resource owner
        }
        // SAFETY: begun in `begin`, ended only here; the slot's pin is dropped first.
        unsafe {
            pg_sys::ExecDropSingleTupleTableSlot(self.slot);
            pg_sys::index_endscan(self.scan);
        }
    }
}
