//! Rows of a statement as datums, for what is carried on as it is.

use super::datum::{Value, Varlena};
use super::table::Oid;
use pgrx::pg_sys;

/// The result of a statement, good while it is looked at.
pub struct Rows {
    table: *mut pg_sys::SPITupleTable,
    count: usize,
}

/// One row of it.
pub struct SpiRow {
    tuple: pg_sys::HeapTuple,
    desc: pg_sys::TupleDesc,
}

/// Runs a statement that may write, under a snapshot of its own, and lets `look` read its rows.
pub fn query<R>(sql: &str, args: &[(Oid, Value)], look: impl FnOnce(&Rows) -> R) -> Result<R, String> {
    let sql = std::ffi::CString::new(sql).unwrap_or_default();
    let mut types: Vec<Oid> = args.iter().map(|(t, _)| *t).collect();
    let (mut values, nulls): (Vec<pg_sys::Datum>, Vec<bool>) = args.iter().map(|(_, v)| v.parts()).unzip();
    let nulls: Vec<std::ffi::c_char> = nulls
        .into_iter()
        .map(|n| if n { b'n' } else { b' ' } as std::ffi::c_char)
        .collect();
    // SAFETY: the arrays have one entry per argument; SPI_finish is reached unless something raises, and then
    // (sub)transaction abort cleans the SPI stack. The result table lives until SPI_finish.
    unsafe {
        pg_sys::SPI_connect();
        let code = pg_sys::SPI_execute_with_args(
            sql.as_ptr(),
            args.len() as i32,
            types.as_mut_ptr(),
            values.as_mut_ptr(),
            nulls.as_ptr(),
            false,
            0,
        );
        if code < 0 {
            pg_sys::SPI_finish();
            return Err(format!("SPI code {code}"));
        }
        let table = pg_sys::SPI_tuptable;
        let count = if table.is_null() {
            0
        } else {
            (*table).numvals as usize
        };
        let result = look(&Rows { table, count });
        pg_sys::SPI_finish();
        Ok(result)
    }
}

impl Rows {
    pub fn iter(&self) -> impl Iterator<Item = SpiRow> + '_ {
        (0..self.count).map(|i| {
            // SAFETY: i is below the number of rows, and the table lives while `self` is looked at.
            unsafe {
                SpiRow {
                    tuple: *(*self.table).vals.add(i),
                    desc: (*self.table).tupdesc,
                }
            }
        })
    }
}

impl SpiRow {
    fn get(&self, column: i32) -> Option<pg_sys::Datum> {
        let mut null = false;
        // SAFETY: the row and its descriptor live while the result is looked at.
        let datum = unsafe { pg_sys::SPI_getbinval(self.tuple, self.desc, column, &mut null) };
        (!null).then_some(datum)
    }

    pub fn i64(&self, column: i32) -> i64 {
        self.get(column).map_or(0, |d| d.value() as i64)
    }

    pub fn i16(&self, column: i32) -> i16 {
        self.get(column).map_or(0, |d| d.value() as i16)
    }

    pub fn char(&self, column: i32) -> u8 {
        self.get(column).map_or(0, |d| d.value() as u8)
    }

    /// Brought inline.
    pub fn varlena(&self, column: i32) -> Option<Varlena> {
        self.get(column).map(|d| Varlena(d).flattened())
    }
}
