//! Messages to the client that are not errors.

/// Writes a line into the server's log.
pub fn log(message: &str) {
    pgrx::pg_sys::panic::ErrorReport::new(
        pgrx::PgSqlErrorCode::ERRCODE_WARNING,
        message.to_string(),
        "awa_queue",
    )
    .report(pgrx::PgLogLevel::LOG);
}

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
