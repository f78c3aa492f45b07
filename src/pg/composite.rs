//! Reading and building composite values (the nullable `rest` column of ready rows).

use super::datum::{split, RawDatum, Value, Varlena};
use pgrx::pg_sys;

/// The columns of a composite value, taken apart.
pub struct Record {
    values: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl Record {
    /// Takes a composite apart; the value must be inline. Columns point into it.
    pub fn read(value: Varlena) -> Record {
        // SAFETY: the value is a composite datum; its header names its row type, whose descriptor is
        // released again. The arrays have natts entries.
        unsafe {
            let header: pg_sys::HeapTupleHeader = pg_sys::pg_detoast_datum(value.0.cast_mut_ptr()).cast();
            let datum_fields = (*header).t_choice.t_datum;
            let desc = pg_sys::lookup_rowtype_tupdesc(datum_fields.datum_typeid, datum_fields.datum_typmod);
            let natts = (*desc).natts as usize;
            let mut tuple = pg_sys::HeapTupleData {
                t_len: (datum_fields.datum_len_ as u32) >> 2, // varlena header of an inline value
                t_data: header,
                ..Default::default()
            };
            let mut values = vec![pg_sys::Datum::from(0usize); natts];
            let mut nulls = vec![true; natts];
            pg_sys::heap_deform_tuple(&mut tuple, desc, values.as_mut_ptr(), nulls.as_mut_ptr());
            if (*desc).tdrefcount >= 0 {
                pg_sys::DecrTupleDescRefCount(desc);
            }
            Record { values, nulls }
        }
    }

    pub fn varlena(&self, i: usize) -> Option<Varlena> {
        (i < self.nulls.len() && !self.nulls[i]).then(|| Varlena(self.values[i]))
    }

    pub fn i64(&self, i: usize) -> Option<i64> {
        (i < self.nulls.len() && !self.nulls[i]).then(|| self.values[i].value() as i64)
    }

    /// The column as it is, for copying it into another value of the same type.
    pub fn value(&self, i: usize) -> Value {
        if i < self.nulls.len() && !self.nulls[i] {
            Value::Raw(RawDatum(self.values[i]))
        } else {
            Value::Null
        }
    }
}

/// Builds a composite value of the row type `type_oid`; missing trailing columns are null.
pub fn build(type_oid: pg_sys::Oid, values: &[Value]) -> Varlena {
    let (mut datums, mut nulls) = split(values);
    // SAFETY: the descriptor is looked up for a named row type and released; the arrays are padded to
    // its number of columns.
    unsafe {
        let desc = pg_sys::lookup_rowtype_tupdesc(type_oid, -1);
        let natts = (*desc).natts as usize;
        datums.resize(natts, pg_sys::Datum::from(0usize));
        nulls.resize(natts, true);
        let tuple = pg_sys::heap_form_tuple(desc, datums.as_mut_ptr(), nulls.as_mut_ptr());
        let datum = pg_sys::heap_copy_tuple_as_datum(tuple, desc);
        if (*desc).tdrefcount >= 0 {
            pg_sys::DecrTupleDescRefCount(desc);
        }
        Varlena(datum)
    }
}
