//! The errors of a job's attempts, as they travel with it: the last ten, each cut to 8 kB.
//!
//! The list is put together as text and read by PostgreSQL, so that a detail's numbers stay what they are.

use crate::pg::datum::{self, Varlena};
use crate::pg::json;
use crate::pg::time;

const MOST_ERRORS: usize = 10;
pub const MAX_ERROR_BYTES: usize = 8 * 1024;

/// One attempt that failed.
pub struct Failure<'a> {
    pub at: i64,
    pub attempt: i16,
    pub message: Option<&'a str>,
    pub detail: Option<Varlena>,
    pub worker: Option<&'a str>,
    pub outcome: &'a str,
}

/// The longest beginning of `s` that has at most `bytes` bytes and ends between characters.
pub fn cut(s: &str, bytes: usize) -> &str {
    let mut end = bytes.min(s.len());
    while !s.is_char_boundary(end) {
        end -= 1;
    }
    &s[..end]
}

fn quoted(s: Option<&str>) -> String {
    s.map_or_else(|| "null".to_string(), |s| serde_json::Value::from(s).to_string())
}

/// A detail that is too long is kept as the beginning of its text.
fn detail_text(detail: Option<Varlena>) -> String {
    let Some(detail) = detail else {
        return "null".to_string();
    };
    let text = datum::jsonb_to_text(detail);
    if text.len() <= MAX_ERROR_BYTES {
        text
    } else {
        quoted(Some(cut(&text, MAX_ERROR_BYTES)))
    }
}

fn object(f: &Failure) -> String {
    let message = f.message.map(|m| cut(m, MAX_ERROR_BYTES));
    format!(
        "{{\"at\": \"{}\", \"attempt\": {}, \"message\": {}, \"detail\": {}, \"worker\": {}, \"outcome\": {}}}",
        time::to_iso(f.at),
        f.attempt,
        quoted(message),
        detail_text(f.detail),
        quoted(f.worker),
        quoted(Some(f.outcome)),
    )
}

/// The list with one more failure at its end.
pub fn added(errors: Option<Varlena>, failure: &Failure) -> Varlena {
    let old = errors.and_then(json::array_elements).unwrap_or_default();
    let skip = (old.len() + 1).saturating_sub(MOST_ERRORS);
    let mut all: Vec<String> = old[skip..].iter().map(|e| datum::jsonb_to_text(*e)).collect();
    all.push(object(failure));
    datum::jsonb_from_text(&format!("[{}]", all.join(", ")))
}

/// The last error of a list.
pub fn last(errors: Option<Varlena>) -> Option<Varlena> {
    json::array_elements(errors?)?.pop()
}

#[cfg(test)]
mod tests {
    use super::{cut, quoted};

    #[test]
    fn a_long_text_is_cut_between_characters() {
        assert_eq!(cut("abc", 8), "abc");
        assert_eq!(cut("abcdef", 3), "abc");
        assert_eq!(cut("aää", 2), "a");
        assert_eq!(cut("ä", 1), "");
    }

    #[test]
    fn text_is_quoted_as_json_has_it() {
        assert_eq!(quoted(Some("a\"b\n")), "\"a\\\"b\\n\"");
        assert_eq!(quoted(None), "null");
    }
}
