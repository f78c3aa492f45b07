//! Messages to the client that are not errors.

/// Raises a WARNING with a hint.
pub fn warning(message: &str, hint: &str) {
    pgrx::pg_sys::panic::ErrorReport::new(
        pgrx::PgSqlErrorCode::ERRCODE_WARNING,
        message.to_string(),
        "awa_queue",
    )
    .set_hint(hint)
    .report(pgrx::PgLogLevel::WARNING);
}
