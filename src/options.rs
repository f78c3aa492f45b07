//! The `options` argument that every verb has as its last: a place for what later releases add.

use crate::error::{Error, Result};
use crate::pg::datum;
use crate::pg::fmgr::Call;

/// Refuses options that this release does not know: all of them, so far.
pub fn refuse_unknown(call: &Call, argument: usize) -> Result<()> {
    let Some(options) = call.varlena(argument) else {
        return Ok(());
    };
    let text = datum::jsonb_to_text(options);
    let parsed: serde_json::Value = serde_json::from_str(&text)
        .map_err(|e| Error::bad_value(format!("options can not be read: {e}"), "Leave options out."))?;
    match parsed {
        serde_json::Value::Object(keys) => match keys.keys().next() {
            Some(key) => Err(Error::UnknownKey {
                argument: "options",
                key: key.clone(),
                known: &[],
            }),
            None => Ok(()),
        },
        _ => Err(Error::bad_value(
            "options must be a JSON object",
            "Leave options out.",
        )),
    }
}
