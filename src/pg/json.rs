//! Taking jsonb apart with the server's own functions: what is not looked into stays the value it is.

use super::datum::{jsonb_to_text, Varlena};
use pgrx::pg_sys;

/// One key of an object and its value, itself a jsonb.
pub struct Field {
    pub key: String,
    pub value: Varlena,
}

impl Field {
    pub fn is_null(&self) -> bool {
        jsonb_to_text(self.value) == "null"
    }

    fn parsed(&self) -> Option<serde_json::Value> {
        serde_json::from_str(&jsonb_to_text(self.value)).ok()
    }

    pub fn string(&self) -> Option<String> {
        self.parsed()?.as_str().map(str::to_string)
    }

    pub fn integer(&self) -> Option<i64> {
        self.parsed()?.as_i64()
    }

    pub fn strings(&self) -> Option<Vec<String>> {
        self.parsed()?
            .as_array()?
            .iter()
            .map(|v| v.as_str().map(str::to_string))
            .collect()
    }
}

/// The elements of a jsonb array; None where it is none.
pub fn array_elements(j: Varlena) -> Option<Vec<Varlena>> {
    walk(j, pg_sys::JB_FARRAY).map(|items| items.into_iter().map(|(_, v)| v).collect())
}

/// The fields of a jsonb object; None where it is none.
pub fn object_fields(j: Varlena) -> Option<Vec<Field>> {
    walk(j, pg_sys::JB_FOBJECT).map(|items| {
        items
            .into_iter()
            .map(|(key, value)| Field { key, value })
            .collect()
    })
}

fn walk(j: Varlena, container_kind: u32) -> Option<Vec<(String, Varlena)>> {
    // SAFETY: j is a jsonb brought inline with a four-byte header, as the iterator needs; keys are read while
    // the container is alive; JsonbValueToJsonb copies the value.
    unsafe {
        let jsonb: *mut pg_sys::Jsonb = pg_sys::pg_detoast_datum(j.0.cast_mut_ptr()).cast();
        let root = &raw mut (*jsonb).root;
        let header = (*root).header;
        if header & container_kind == 0 || header & pg_sys::JB_FSCALAR != 0 {
            return None;
        }
        let mut iterator = pg_sys::JsonbIteratorInit(root);
        let mut value = pg_sys::JsonbValue::default();
        let mut items = Vec::new();
        let mut key = String::new();
        let mut entered = false;
        loop {
            // The outermost container is entered, those inside are taken whole.
            let token = pg_sys::JsonbIteratorNext(&mut iterator, &mut value, entered);
            entered = true;
            match token {
                pg_sys::JsonbIteratorToken::WJB_DONE => return Some(items),
                pg_sys::JsonbIteratorToken::WJB_KEY => {
                    let s = value.val.string;
                    let bytes = std::slice::from_raw_parts(s.val.cast::<u8>(), s.len as usize);
                    key = String::from_utf8_lossy(bytes).into_owned();
                }
                pg_sys::JsonbIteratorToken::WJB_VALUE | pg_sys::JsonbIteratorToken::WJB_ELEM => {
                    let copy = pg_sys::JsonbValueToJsonb(&mut value);
                    items.push((std::mem::take(&mut key), Varlena(pg_sys::Datum::from(copy))));
                }
                _ => {}
            }
        }
    }
}
