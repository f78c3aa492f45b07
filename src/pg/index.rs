//! Indexes of the log tables, recognised by their columns and never by a remembered oid: REINDEX
//! CONCURRENTLY replaces them, and a DBA may add their own. Whoever writes a row writes an entry into
//! every index that is ready for inserts.

use super::compat;
use super::table::{Access, Oid, Table};
use crate::error::{Error, Result};
use pgrx::pg_sys;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// What the catalog says of an index.
pub struct Shape {
    /// Key columns of the table, in order; 0 stands for an expression.
    pub keys: Vec<i16>,
    pub valid: bool,
    ready: bool,
    /// A btree over plain columns of all rows: a scan by its keys finds every row.
    complete: bool,
    /// Such a btree without included columns: an entry is its key columns, nothing else.
    plain: bool,
    /// Checked at once when an entry is made.
    unique: bool,
    /// The column of a predicate `column IS NOT NULL` where that is all of it, else 0.
    not_null_column: i16,
    /// How many leading keys are bigints in the usual ascending order, so that our scans understand them.
    ascending_bigints: usize,
    info: *mut pg_sys::IndexInfo,
    /// Holds `info`.
    context: pg_sys::MemoryContext,
}

impl Drop for Shape {
    fn drop(&mut self) {
        if super::unwinding() {
            return; // a few hundred bytes stay behind
        }
        // SAFETY: the context was made for this shape alone; deleting memory can not raise.
        unsafe { pg_sys::MemoryContextDelete(self.context) }
    }
}

thread_local! {
    static SHAPES: RefCell<HashMap<u32, Rc<Shape>>> = RefCell::new(HashMap::new());
}

/// The btree operator family of integers (INTEGER_BTREE_FAM_OID in pg_opfamily.dat).
const INTEGER_OPS: u32 = 1976;

/// Forgets what is known of an index (of all with None); called by the relcache callback, so it only
/// touches memory.
pub(super) fn forget(oid: Option<Oid>) {
    SHAPES.with(|s| {
        if let Ok(mut map) = s.try_borrow_mut() {
            match oid {
                Some(oid) => {
                    map.remove(&oid.to_u32());
                }
                None => map.clear(),
            }
        }
    });
}

/// An index we opened; closed like a table.
pub struct Index {
    pub(super) rel: pg_sys::Relation,
    access: Access,
    pub shape: Rc<Shape>,
}

impl Index {
    pub fn open(oid: Oid, access: Access) -> Index {
        let mode = lockmode(access);
        // SAFETY: index_open raises where the oid names no index.
        let rel = unsafe { pg_sys::index_open(oid, mode) };
        // SAFETY: rel is open and locked.
        let shape = unsafe { shape_of(rel) };
        Index { rel, access, shape }
    }
}

impl Drop for Index {
    fn drop(&mut self) {
        if super::unwinding() {
            return; // closed by the transaction's abort
        }
        // A written index keeps its lock until commit only by habit of the executor; the table's lock is
        // what protects it, so the lock is given back.
        // SAFETY: opened in `open`, closed only here.
        unsafe { pg_sys::index_close(self.rel, lockmode(self.access)) }
    }
}

fn lockmode(access: Access) -> pg_sys::LOCKMODE {
    match access {
        Access::Read => pg_sys::AccessShareLock as pg_sys::LOCKMODE,
        Access::Write => pg_sys::RowExclusiveLock as pg_sys::LOCKMODE,
    }
}

/// What is known of an index, read once until the catalog changes it.
///
/// # Safety
/// `rel` is an open index.
unsafe fn shape_of(rel: pg_sys::Relation) -> Rc<Shape> {
    // SAFETY: rel is open.
    let oid = unsafe { (*rel).rd_id }.to_u32();
    if let Some(known) = SHAPES.with(|s| s.borrow().get(&oid).cloned()) {
        return known;
    }
    // SAFETY: promised by the caller.
    let shape = Rc::new(unsafe { read_shape(rel) });
    SHAPES.with(|s| s.borrow_mut().insert(oid, shape.clone()));
    shape
}

/// # Safety
/// `rel` is an open index.
unsafe fn read_shape(rel: pg_sys::Relation) -> Shape {
    // SAFETY: rd_index is the index's catalog row; BuildIndexInfo allocates in the current context, which
    // is made the cache's context because the shape outlives the call.
    unsafe {
        let form = (*rel).rd_index;
        let context = pg_sys::AllocSetContextCreateInternal(
            pg_sys::TopMemoryContext,
            c"awa_queue index".as_ptr(),
            pg_sys::ALLOCSET_SMALL_MINSIZE as usize,
            pg_sys::ALLOCSET_SMALL_INITSIZE as usize,
            pg_sys::ALLOCSET_SMALL_MAXSIZE as usize,
        );
        let outer = pg_sys::MemoryContextSwitchTo(context);
        let info = pg_sys::BuildIndexInfo(rel);
        pg_sys::MemoryContextSwitchTo(outer);
        let nkeys = (*info).ii_NumIndexKeyAttrs as usize;
        let keys = (&(*info).ii_IndexAttrNumbers)[..nkeys].to_vec();
        let all_keys = (*info).ii_NumIndexAttrs == (*info).ii_NumIndexKeyAttrs;
        let no_expressions = (*info).ii_Expressions.is_null();
        let btree = (*(*rel).rd_rel).relam == pg_sys::BTREE_AM_OID && no_expressions;
        let simple = btree && all_keys && (*info).ii_ExclusionOps.is_null() && (*form).indimmediate;
        Shape {
            keys,
            valid: (*form).indisvalid,
            ready: (*form).indisready,
            complete: btree && (*info).ii_Predicate.is_null(),
            plain: simple && (*info).ii_Predicate.is_null(),
            unique: (*info).ii_Unique,
            ascending_bigints: (0..nkeys)
                .take_while(|&k| {
                    *(*rel).rd_indoption.add(k) == 0
                        && *(*rel).rd_opcintype.add(k) == pg_sys::INT8OID
                        && *(*rel).rd_opfamily.add(k) == pg_sys::Oid::from(INTEGER_OPS)
                })
                .count(),
            not_null_column: if simple && !(*info).ii_Unique {
                not_null_predicate((*info).ii_Predicate)
            } else {
                0
            },
            info,
            context,
        }
    }
}

/// The column of a predicate list that is exactly one `column IS NOT NULL`, else 0.
///
/// # Safety
/// `list` is null or a list of expression nodes.
unsafe fn not_null_predicate(list: *mut pg_sys::List) -> i16 {
    // SAFETY: promised by the caller; each cast is preceded by a check of the node's tag.
    unsafe {
        if list.is_null() || (*list).length != 1 {
            return 0;
        }
        let node: *mut pg_sys::Node = (*(*list).elements).ptr_value.cast();
        if (*node).type_ != pg_sys::NodeTag::T_NullTest {
            return 0;
        }
        let test = node.cast::<pg_sys::NullTest>();
        let arg = (*test).arg.cast::<pg_sys::Node>();
        if (*test).nulltesttype != pg_sys::NullTestType::IS_NOT_NULL
            || (*test).argisrow
            || arg.is_null()
            || (*arg).type_ != pg_sys::NodeTag::T_Var
        {
            return 0;
        }
        (*arg.cast::<pg_sys::Var>()).varattno
    }
}

impl Shape {
    /// Whether writers enter a row into this index while they hold the lock that orders such rows, so that
    /// a scan by these leading keys under that lock sees every row.
    fn orders(&self, keys: &[i16]) -> bool {
        let partial = self.not_null_column != 0 && keys == [self.not_null_column];
        !self.unique
            && (self.plain || partial)
            && self.keys.starts_with(keys)
            && keys.len() <= self.ascending_bigints
    }
}

/// Opens the index of a log table that can be scanned by the given leading key columns.
pub fn scannable(table: &Table, keys: &[i16]) -> Result<Rc<Index>> {
    open_first(table, keys, |shape| shape.valid && shape.orders(keys))
}

/// Opens an index (unique or not) of an ordinary table by its leading key columns.
pub fn lookup(table: &Table, keys: &[i16]) -> Result<Rc<Index>> {
    open_first(table, keys, |shape| {
        shape.valid && shape.complete && shape.keys.starts_with(keys)
    })
}

fn open_first(table: &Table, keys: &[i16], fits: impl Fn(&Shape) -> bool) -> Result<Rc<Index>> {
    table
        .index_oids()
        .into_iter()
        .find_map(|oid| {
            let index = Index::open(oid, Access::Read);
            fits(&index.shape).then(|| Rc::new(index))
        })
        .ok_or_else(|| missing(table, keys))
}

fn missing(table: &Table, keys: &[i16]) -> Error {
    Error::Layout(format!(
        "table \"{}\" of awa_queue has no valid index on its columns {keys:?}",
        table.name()
    ))
}

/// A row that was inserted: where it lies and its column values.
pub struct Inserted<'a> {
    pub(super) tid: pg_sys::ItemPointerData,
    pub(super) values: &'a [pg_sys::Datum],
    pub(super) nulls: &'a [bool],
    pub(super) tuple: pg_sys::HeapTuple,
}

/// All indexes of a table that take inserts, opened for that.
pub struct IndexSet {
    simple: Vec<Rc<Index>>,
    has_others: bool,
}

impl IndexSet {
    /// Opens every index of `table` that is ready for inserts. The table is locked for writing already.
    pub fn open(table: &Table) -> IndexSet {
        let mut set = IndexSet {
            simple: Vec::new(),
            has_others: false,
        };
        for oid in table.index_oids() {
            let index = Index::open(oid, Access::Write);
            if !index.shape.ready {
                continue;
            }
            if index.shape.plain || index.shape.not_null_column != 0 {
                set.simple.push(Rc::new(index));
            } else {
                set.has_others = true;
            }
        }
        set
    }

    /// Enters a row into the indexes whose leading keys are `keys`, and into no other. All of them: while an
    /// index is rebuilt there are two, and which one is scanned changes in between.
    pub fn insert_ordering(&self, table: &Table, keys: &[i16], row: &Inserted) {
        for index in self.simple.iter().filter(|i| i.shape.orders(keys)) {
            insert_simple(index, table, row);
        }
    }

    /// Enters a row into all indexes but those that `insert_ordering` with the same keys fills.
    pub fn insert_rest(&self, table: &Table, except: Option<&[i16]>, row: &Inserted) {
        for index in &self.simple {
            if !except.is_some_and(|keys| index.shape.orders(keys)) {
                insert_simple(index, table, row);
            }
        }
        if self.has_others {
            insert_others(table, row);
        }
    }

    /// True where a row whose partial column is null needs no index entry at all.
    pub fn idle_for(&self, null_column: i16) -> bool {
        !self.has_others && self.simple.iter().all(|i| i.shape.not_null_column == null_column)
    }

    /// An index of the set that can be scanned by the given leading key columns.
    pub fn scannable(&self, table: &Table, keys: &[i16]) -> Result<Rc<Index>> {
        let found = self.simple.iter().find(|i| i.shape.valid && i.shape.orders(keys));
        found.cloned().ok_or_else(|| missing(table, keys))
    }
}

fn insert_simple(index: &Index, table: &Table, row: &Inserted) {
    let shape = &index.shape;
    if shape.not_null_column != 0 && row.nulls[shape.not_null_column as usize - 1] {
        return;
    }
    let mut values = [pg_sys::Datum::from(0usize); pg_sys::INDEX_MAX_KEYS as usize];
    let mut nulls = [true; pg_sys::INDEX_MAX_KEYS as usize];
    for (k, &column) in shape.keys.iter().enumerate() {
        values[k] = row.values[column as usize - 1];
        nulls[k] = row.nulls[column as usize - 1];
    }
    let mut tid = row.tid;
    // SAFETY: both relations are open and locked for writing; values and nulls cover all index columns;
    // the IndexInfo belongs to this index. A unique one may wait for another transaction's entry; no short
    // lock is held then, since such an index orders nothing.
    unsafe {
        pg_sys::index_insert(
            index.rel,
            values.as_mut_ptr(),
            nulls.as_mut_ptr(),
            &mut tid,
            table.rel,
            if shape.unique {
                pg_sys::IndexUniqueCheck::UNIQUE_CHECK_YES
            } else {
                pg_sys::IndexUniqueCheck::UNIQUE_CHECK_NO
            },
            false,
            shape.info,
        );
    }
}

/// The executor's own way, for indexes of a DBA with expressions, predicates, uniqueness or another
/// access method.
fn insert_others(table: &Table, row: &Inserted) {
    // SAFETY: the executor state, the result relation and the slot are made here and released here; the
    // tuple was inserted and carries its tid. Simple indexes are taken out of the list beforehand
    // because they have their entry already.
    unsafe {
        let estate = pg_sys::CreateExecutorState();
        let info =
            pg_sys::palloc0(std::mem::size_of::<pg_sys::ResultRelInfo>()).cast::<pg_sys::ResultRelInfo>();
        pg_sys::InitResultRelInfo(info, table.rel, 1, std::ptr::null_mut(), 0);
        pg_sys::ExecOpenIndices(info, false);
        let mut kept = 0usize;
        for i in 0..(*info).ri_NumIndices as usize {
            let rel = *(*info).ri_IndexRelationDescs.add(i);
            let shape = shape_of(rel);
            if !shape.ready || shape.plain || shape.not_null_column != 0 {
                pg_sys::index_close(rel, pg_sys::RowExclusiveLock as pg_sys::LOCKMODE);
                continue;
            }
            *(*info).ri_IndexRelationDescs.add(kept) = rel;
            *(*info).ri_IndexRelationInfo.add(kept) = *(*info).ri_IndexRelationInfo.add(i);
            kept += 1;
        }
        (*info).ri_NumIndices = kept as i32;
        let slot = pg_sys::MakeSingleTupleTableSlot((*table.rel).rd_att, &raw const pg_sys::TTSOpsHeapTuple);
        pg_sys::ExecStoreHeapTuple(row.tuple, slot, false);
        (*slot).tts_tid = row.tid;
        (*slot).tts_tableOid = (*table.rel).rd_id;
        compat::exec_insert_index_tuples(info, slot, estate);
        pg_sys::ExecCloseIndices(info);
        pg_sys::ExecDropSingleTupleTableSlot(slot);
        pg_sys::FreeExecutorState(estate);
    }
}
