//! Values as PostgreSQL passes them. A payload is never parsed here: it is carried as the datum it came as.

use pgrx::pg_sys;

/// A value of a variable-length type (text, jsonb, bytea, text[]) that lives in PostgreSQL's memory for
/// at least the current call. Only this module and its siblings can make one.
#[derive(Clone, Copy)]
pub struct Varlena(pub(super) pg_sys::Datum);

impl Varlena {
    /// Size in bytes of the value as stored inline, header included.
    pub fn size(self) -> usize {
        // SAFETY: a Varlena always holds a pointer to a live varlena value.
        unsafe { pg_sys::toast_raw_datum_size(self.0) }
    }

    /// The bytes of the value without its header. Copies, since the value may be packed at any alignment.
    pub fn bytes(self) -> Vec<u8> {
        // SAFETY: a Varlena holds a pointer to a live varlena; pg_detoast_datum_packed returns one that is
        // neither external nor compressed, so its header tells where the data is and how long.
        unsafe {
            let p = pg_sys::pg_detoast_datum_packed(self.0.cast_mut_ptr());
            let data = pgrx::varlena::vardata_any(p).cast::<u8>();
            let len = pgrx::varlena::varsize_any_exhdr(p);
            std::slice::from_raw_parts(data, len).to_vec()
        }
    }

    /// The value as a string; the database encoding must be UTF-8, otherwise bytes that are none are replaced.
    pub fn text(self) -> String {
        match String::from_utf8(self.bytes()) {
            Ok(s) => s,
            Err(e) => String::from_utf8_lossy(e.as_bytes()).into_owned(),
        }
    }

    /// A copy of the value in the current memory context, brought inline.
    pub fn copied(self) -> Varlena {
        // SAFETY: a Varlena holds a pointer to a live varlena; the copy is made whole.
        unsafe {
            Varlena(pg_sys::Datum::from(pg_sys::pg_detoast_datum_copy(
                self.0.cast_mut_ptr(),
            )))
        }
    }

    /// The same value held inline: an external TOAST pointer is fetched, so that the value outlives the
    /// lock on the table that it came from. Needs an active snapshot.
    pub fn flattened(self) -> Varlena {
        // SAFETY: a Varlena holds a pointer to a live varlena.
        unsafe {
            let p: *mut pg_sys::varlena = self.0.cast_mut_ptr();
            if pgrx::varlena::varatt_is_1b_e(p) {
                Varlena(pg_sys::Datum::from(pg_sys::detoast_external_attr(p)))
            } else {
                self
            }
        }
    }
}

/// Copies a string into a new text value in the current memory context.
pub fn text(s: &str) -> Varlena {
    varlena_of(s.as_bytes())
}

/// Copies bytes into a new bytea value in the current memory context.
pub fn bytea(b: &[u8]) -> Varlena {
    varlena_of(b)
}

fn varlena_of(b: &[u8]) -> Varlena {
    // SAFETY: cstring_to_text_with_len copies exactly len bytes from the pointer; text and bytea have the
    // same representation.
    unsafe {
        let p = pg_sys::cstring_to_text_with_len(b.as_ptr().cast(), b.len() as i32);
        Varlena(pg_sys::Datum::from(p))
    }
}

/// One column of a row that is built or returned.
#[derive(Clone, Copy)]
pub enum Value {
    Null,
    I16(i16),
    I32(i32),
    I64(i64),
    Bool(bool),
    Char(u8),
    Var(Varlena),
    /// A composite or any other value that is already a datum of the column's type.
    Raw(RawDatum),
}

/// A datum whose type only the code that made it knows.
#[derive(Clone, Copy)]
pub struct RawDatum(pub(super) pg_sys::Datum);

impl Value {
    pub(super) fn parts(self) -> (pg_sys::Datum, bool) {
        match self {
            Value::Null => (pg_sys::Datum::from(0usize), true),
            Value::I16(v) => (pg_sys::Datum::from(v), false),
            Value::I32(v) => (pg_sys::Datum::from(v), false),
            Value::I64(v) => (pg_sys::Datum::from(v), false),
            Value::Bool(v) => (pg_sys::Datum::from(v), false),
            Value::Char(v) => (pg_sys::Datum::from(v as i8), false),
            Value::Var(v) => (v.0, false),
            Value::Raw(v) => (v.0, false),
        }
    }
}

impl From<i64> for Value {
    fn from(v: i64) -> Self {
        Value::I64(v)
    }
}
impl From<i32> for Value {
    fn from(v: i32) -> Self {
        Value::I32(v)
    }
}
impl From<i16> for Value {
    fn from(v: i16) -> Self {
        Value::I16(v)
    }
}
impl From<bool> for Value {
    fn from(v: bool) -> Self {
        Value::Bool(v)
    }
}
impl From<Varlena> for Value {
    fn from(v: Varlena) -> Self {
        Value::Var(v)
    }
}
impl From<&str> for Value {
    fn from(v: &str) -> Self {
        Value::Var(text(v))
    }
}
impl<T: Into<Value>> From<Option<T>> for Value {
    fn from(v: Option<T>) -> Self {
        v.map_or(Value::Null, Into::into)
    }
}

/// Splits values into the two arrays that PostgreSQL's tuple functions take.
pub(super) fn split(values: &[Value]) -> (Vec<pg_sys::Datum>, Vec<bool>) {
    values.iter().map(|v| v.parts()).unzip()
}

/// Builds a `bigint[]` of the given numbers.
pub fn bigint_array(ids: &[i64]) -> RawDatum {
    let mut elems: Vec<pg_sys::Datum> = ids.iter().map(|&i| pg_sys::Datum::from(i)).collect();
    // SAFETY: elems holds ids.len() by-value int8 datums; construct_array copies them.
    unsafe {
        let a = pg_sys::construct_array(
            elems.as_mut_ptr(),
            elems.len() as i32,
            pg_sys::INT8OID,
            8,
            true,
            pg_sys::TYPALIGN_DOUBLE as std::ffi::c_char,
        );
        RawDatum(pg_sys::Datum::from(a))
    }
}

/// The stable 64-bit hash that PostgreSQL itself uses for text in hash partitioning (seed 0, byte order
/// of collation "C").
pub fn hash_text(t: Varlena) -> u64 {
    // SAFETY: hashtextextended takes (text, int8); both datums are of those types.
    unsafe {
        let d = pg_sys::OidFunctionCall2Coll(
            pg_sys::F_HASHTEXTEXTENDED.into(),
            pg_sys::C_COLLATION_OID,
            t.0,
            pg_sys::Datum::from(0i64),
        );
        d.value() as u64
    }
}

/// Parses JSON text into a jsonb value.
pub fn jsonb_from_text(json: &str) -> Varlena {
    let c = std::ffi::CString::new(json).unwrap_or_default();
    // SAFETY: jsonb_in takes a cstring; c lives through the call.
    unsafe {
        Varlena(pg_sys::OidFunctionCall1Coll(
            pg_sys::F_JSONB_IN.into(),
            pg_sys::InvalidOid,
            pg_sys::Datum::from(c.as_ptr()),
        ))
    }
}

/// The text form of a jsonb value.
pub fn jsonb_to_text(j: Varlena) -> String {
    // SAFETY: jsonb_out takes a jsonb and returns a NUL-terminated cstring in palloc'd memory.
    unsafe {
        let d = pg_sys::OidFunctionCall1Coll(pg_sys::F_JSONB_OUT.into(), pg_sys::InvalidOid, j.0);
        std::ffi::CStr::from_ptr(d.cast_mut_ptr())
            .to_string_lossy()
            .into_owned()
    }
}

/// Builds a `text[]` of the given strings.
pub fn text_array(strings: &[String]) -> Varlena {
    let mut elems: Vec<pg_sys::Datum> = strings.iter().map(|s| text(s).0).collect();
    // SAFETY: elems holds text datums; construct_array copies them.
    unsafe {
        let a = pg_sys::construct_array(
            elems.as_mut_ptr(),
            elems.len() as i32,
            pg_sys::TEXTOID,
            -1,
            false,
            pg_sys::TYPALIGN_INT as std::ffi::c_char,
        );
        Varlena(pg_sys::Datum::from(a))
    }
}

/// The md5 of a string as PostgreSQL's md5(text) gives it, in hexadecimal.
pub fn md5(s: &str) -> String {
    // SAFETY: md5_text takes a text and returns a text.
    unsafe {
        let d = pg_sys::OidFunctionCall1Coll(pg_sys::F_MD5_TEXT.into(), pg_sys::InvalidOid, text(s).0);
        Varlena(d).text()
    }
}
