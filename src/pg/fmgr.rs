//! The border between SQL and Rust: arguments in, one value or a set of rows out.
//!
//! Every function of the API is declared with `sql_function!`, which exports the C symbol that the install
//! script names. A released symbol is never removed, because the library is replaced before the SQL is.

use super::datum::{Value, Varlena};
use super::time::{self, Interval};
use crate::error::{Error, Result};
use pgrx::pg_sys;

/// What a function returns.
pub enum Output {
    Value(Value),
    /// The rows went into the call's result set.
    Rows,
    /// The INOUT arguments of a procedure.
    Record(Vec<Value>),
    /// What a statement trigger returns: no row, but not NULL either.
    Done,
}

impl<T: Into<Value>> From<T> for Output {
    fn from(v: T) -> Self {
        Output::Value(v.into())
    }
}

/// The call of one SQL function.
pub struct Call {
    fcinfo: pg_sys::FunctionCallInfo,
}

impl Call {
    /// # Safety
    /// `fcinfo` is what PostgreSQL passed to the function that is running.
    unsafe fn new(fcinfo: pg_sys::FunctionCallInfo) -> Call {
        Call { fcinfo }
    }

    /// How many arguments the SQL definition passes: an older release may pass fewer than this library knows.
    pub fn nargs(&self) -> usize {
        // SAFETY: fcinfo is live during the call.
        unsafe { (*self.fcinfo).nargs as usize }
    }

    fn datum(&self, i: usize) -> Option<pg_sys::Datum> {
        if i >= self.nargs() {
            return None;
        }
        // SAFETY: i < nargs, and args holds nargs entries.
        let arg = unsafe { *(*self.fcinfo).args.as_ptr().add(i) };
        (!arg.isnull).then_some(arg.value)
    }

    pub fn is_null(&self, i: usize) -> bool {
        self.datum(i).is_none()
    }

    /// A variable-length argument, brought inline.
    pub fn varlena(&self, i: usize) -> Option<Varlena> {
        // SAFETY: the SQL definition gives argument i a variable-length type.
        self.datum(i)
            .map(|d| unsafe { Varlena(pg_sys::Datum::from(pg_sys::pg_detoast_datum(d.cast_mut_ptr()))) })
    }

    pub fn text(&self, i: usize) -> Option<String> {
        self.varlena(i).map(Varlena::text)
    }

    pub fn i64(&self, i: usize) -> Option<i64> {
        self.datum(i).map(|d| d.value() as i64)
    }

    pub fn i32(&self, i: usize) -> Option<i32> {
        self.datum(i).map(|d| d.value() as i32)
    }

    pub fn bool(&self, i: usize) -> Option<bool> {
        self.datum(i).map(|d| d.value() as u8 != 0)
    }

    pub fn interval(&self, i: usize) -> Option<Interval> {
        // SAFETY: the SQL definition gives argument i the type interval.
        self.datum(i).map(|d| unsafe { time::read_interval(d) })
    }

    /// The elements of an array of a variable-length type (text[], jsonb[]); None where the argument is NULL.
    pub fn varlena_array(&self, i: usize, name: &str) -> Result<Option<Vec<Option<Varlena>>>> {
        let Some(array) = self.array(i, name)? else {
            return Ok(None);
        };
        Ok(Some(
            // SAFETY: the element type is variable-length, with int alignment as text and jsonb have.
            unsafe { deconstruct(array, -1, false, pg_sys::TYPALIGN_INT) }
                .into_iter()
                .map(|e| e.map(Varlena))
                .collect(),
        ))
    }

    /// The elements of a `bigint[]`; None where the argument is NULL.
    pub fn i64_array(&self, i: usize, name: &str) -> Result<Option<Vec<Option<i64>>>> {
        let Some(array) = self.array(i, name)? else {
            return Ok(None);
        };
        Ok(Some(
            // SAFETY: the SQL definition gives argument i the type bigint[].
            unsafe { deconstruct(array, 8, true, pg_sys::TYPALIGN_DOUBLE) }
                .into_iter()
                .map(|e| e.map(|d| d.value() as i64))
                .collect(),
        ))
    }

    fn array(&self, i: usize, name: &str) -> Result<Option<*mut pg_sys::ArrayType>> {
        let Some(v) = self.varlena(i) else { return Ok(None) };
        let array: *mut pg_sys::ArrayType = v.0.cast_mut_ptr();
        // SAFETY: a detoasted array starts with an ArrayType header.
        if unsafe { (*array).ndim } > 1 {
            return Err(Error::ManyDimensions(name.to_string()));
        }
        Ok(Some(array))
    }

    /// Prepares the result set of a set-returning function. All work is done before the first row is
    /// read by the caller, so a LIMIT on top can not lose what was done.
    pub fn result_set(&self) -> ResultSet {
        // SAFETY: fcinfo is live; raises where the caller can not take a set.
        unsafe {
            pg_sys::InitMaterializedSRF(self.fcinfo, 0);
            let info = (*self.fcinfo).resultinfo.cast::<pg_sys::ReturnSetInfo>();
            ResultSet {
                store: (*info).setResult,
                desc: (*info).setDesc,
                datums: Vec::new(),
                nulls: Vec::new(),
            }
        }
    }

    /// True where CALL runs at top level and may end transactions.
    pub fn is_nonatomic_call(&self) -> bool {
        // SAFETY: context of a CALL is a CallContext node; of anything else another node or null.
        unsafe {
            let context = (*self.fcinfo).context;
            !context.is_null()
                && (*context).type_ == pg_sys::NodeTag::T_CallContext
                && !(*context.cast::<pg_sys::CallContext>()).atomic
        }
    }
}

/// # Safety
/// `array` is a detoasted array whose elements have the given length, passing and alignment.
unsafe fn deconstruct(
    array: *mut pg_sys::ArrayType,
    len: i32,
    by_value: bool,
    align: u8,
) -> Vec<Option<pg_sys::Datum>> {
    let mut elems: *mut pg_sys::Datum = std::ptr::null_mut();
    let mut nulls: *mut bool = std::ptr::null_mut();
    let mut n = 0i32;
    // SAFETY: promised by the caller; the results are arrays of n entries in palloc'd memory.
    unsafe {
        pg_sys::deconstruct_array(
            array,
            (*array).elemtype,
            len,
            by_value,
            align as std::ffi::c_char,
            &mut elems,
            &mut nulls,
            &mut n,
        );
        (0..n as usize)
            .map(|k| (!*nulls.add(k)).then(|| *elems.add(k)))
            .collect()
    }
}

/// Rows that a function returns.
pub struct ResultSet {
    store: *mut pg_sys::Tuplestorestate,
    desc: pg_sys::TupleDesc,
    // Kept from row to row.
    datums: Vec<pg_sys::Datum>,
    nulls: Vec<bool>,
}

impl ResultSet {
    /// Appends a row. An older SQL definition may have fewer columns than this library fills: the rest is
    /// left out; a newer one has more: they are null.
    pub fn push(&mut self, values: &[Value]) {
        // SAFETY: desc belongs to the running call.
        let natts = unsafe { (*self.desc).natts as usize };
        self.datums.clear();
        self.nulls.clear();
        for v in values.iter().take(natts) {
            let (datum, null) = v.parts();
            self.datums.push(datum);
            self.nulls.push(null);
        }
        self.datums.resize(natts, pg_sys::Datum::from(0usize));
        self.nulls.resize(natts, true);
        // SAFETY: both arrays have natts entries of the column types; the store copies them.
        unsafe {
            pg_sys::tuplestore_putvalues(
                self.store,
                self.desc,
                self.datums.as_mut_ptr(),
                self.nulls.as_mut_ptr(),
            );
        }
    }
}

/// Runs the body of a function and turns its error into a PostgreSQL one.
///
/// # Safety
/// Called by PostgreSQL's function manager with its call info.
pub unsafe fn run(fcinfo: pg_sys::FunctionCallInfo, body: fn(&Call) -> Result<Output>) -> pg_sys::Datum {
    // SAFETY: promised by the caller.
    let call = unsafe { Call::new(fcinfo) };
    let (datum, null) = match body(&call) {
        Ok(Output::Value(v)) => v.parts(),
        // SAFETY: fcinfo is live.
        Ok(Output::Record(values)) => (unsafe { record(fcinfo, &values) }, false),
        Ok(Output::Rows) => (pg_sys::Datum::from(0usize), true),
        Ok(Output::Done) => (pg_sys::Datum::from(0usize), false),
        Err(e) => {
            e.raise();
            unreachable!("raise never returns")
        }
    };
    // SAFETY: fcinfo is live.
    unsafe { (*fcinfo).isnull = null };
    datum
}

/// Builds the row that a procedure returns.
///
/// # Safety
/// `fcinfo` is the call info of a procedure with as many INOUT arguments as there are values.
unsafe fn record(fcinfo: pg_sys::FunctionCallInfo, values: &[Value]) -> pg_sys::Datum {
    let mut desc: pg_sys::TupleDesc = std::ptr::null_mut();
    let (mut datums, mut nulls): (Vec<_>, Vec<_>) = values.iter().map(|v| v.parts()).unzip();
    // SAFETY: the descriptor is made of the procedure's declaration; both arrays have an entry for each of
    // its columns, which is checked.
    unsafe {
        pg_sys::get_call_result_type(fcinfo, std::ptr::null_mut(), &mut desc);
        assert!(
            !desc.is_null() && (*desc).natts as usize == datums.len(),
            "the procedure is not declared as this library knows it"
        );
        let desc = pg_sys::BlessTupleDesc(desc);
        let tuple = pg_sys::heap_form_tuple(desc, datums.as_mut_ptr(), nulls.as_mut_ptr());
        pg_sys::HeapTupleHeaderGetDatum((*tuple).t_data)
    }
}

static V1: pg_sys::Pg_finfo_record = pg_sys::Pg_finfo_record { api_version: 1 };

/// The record that tells the function manager which calling convention a symbol has.
pub fn finfo() -> &'static pg_sys::Pg_finfo_record {
    &V1
}

macro_rules! sql_function {
    ($($symbol:ident, $finfo:ident => $body:path;)*) => {$(
        /// Entry point named by the install script.
        ///
        /// # Safety
        /// Called by PostgreSQL's function manager.
        #[unsafe(no_mangle)]
        #[pgrx::pg_guard]
        pub unsafe extern "C-unwind" fn $symbol(
            fcinfo: pgrx::pg_sys::FunctionCallInfo,
        ) -> pgrx::pg_sys::Datum {
            // SAFETY: fcinfo comes from the function manager.
            unsafe { $crate::pg::fmgr::run(fcinfo, $body) }
        }

        #[doc(hidden)]
        #[unsafe(no_mangle)]
        pub extern "C" fn $finfo() -> &'static pgrx::pg_sys::Pg_finfo_record {
            $crate::pg::fmgr::finfo()
        }
    )*};
}
pub(crate) use sql_function;
