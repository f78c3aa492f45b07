//! Every error a caller can meet: its SQLSTATE, message, detail and hint, in one place.
//!
//! Messages follow PostgreSQL's style: lower case, no full stop, names in double quotes; details and hints
//! are sentences. Payloads are never put into a message. XX000 is always our bug.

use pgrx::pg_sys::panic::ErrorReport;
use pgrx::{PgLogLevel, PgSqlErrorCode as Code};

pub type Result<T> = std::result::Result<T, Error>;

#[derive(Debug)]
pub enum Error {
    /// A required argument is NULL.
    Null(&'static str),
    /// An element that must not be NULL is; the position counts from 1.
    NullElement {
        argument: &'static str,
        position: usize,
    },
    /// A value out of its range or of an unknown word.
    BadValue {
        what: String,
        hint: String,
    },
    /// A key that a jsonb argument may not have.
    UnknownKey {
        argument: &'static str,
        key: String,
        known: &'static [&'static str],
    },
    /// Parallel arrays of different lengths.
    Lengths {
        first: &'static str,
        first_len: usize,
        second: &'static str,
        second_len: usize,
    },
    ManyDimensions(String),
    NoSuchQueue(String),
    QueueBeingCreated(String),
    /// A limit of size or number.
    Limit {
        what: String,
        hint: String,
    },
    NotBuilt(String),
    ReadOnly(String),
    Standby(String),
    NeedsReadCommitted(String),
    InTransactionBlock(String),
    Stale {
        stale: usize,
        first: i64,
    },
    LibraryTooOld {
        protocol: i32,
        layout: i32,
    },
    NotInstalled,
    /// What can not be done in a transaction that ran a maintenance step of the ring.
    AfterMaintenance(&'static str),
    /// A log table lacks an index or column that this library needs.
    Layout(String),
    /// What maintenance left out because somebody holds a lock.
    Skipped(String),
    /// What must not happen: our bug.
    Internal(String),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message())?;
        self.detail().map_or(Ok(()), |d| write!(f, " ({d})"))
    }
}

impl Error {
    pub fn bad_value(what: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::BadValue {
            what: what.into(),
            hint: hint.into(),
        }
    }

    pub fn limit(what: impl Into<String>, hint: impl Into<String>) -> Error {
        Error::Limit {
            what: what.into(),
            hint: hint.into(),
        }
    }

    fn code(&self) -> Code {
        match self {
            Error::Null(_) | Error::NullElement { .. } => Code::ERRCODE_NULL_VALUE_NOT_ALLOWED,
            Error::BadValue { .. } | Error::UnknownKey { .. } | Error::Lengths { .. } => {
                Code::ERRCODE_INVALID_PARAMETER_VALUE
            }
            Error::ManyDimensions(_) => Code::ERRCODE_ARRAY_ELEMENT_ERROR,
            Error::NoSuchQueue(_) => Code::ERRCODE_UNDEFINED_OBJECT,
            Error::QueueBeingCreated(_) => Code::ERRCODE_LOCK_NOT_AVAILABLE,
            Error::Limit { .. } => Code::ERRCODE_PROGRAM_LIMIT_EXCEEDED,
            Error::NotBuilt(_) | Error::AfterMaintenance(_) => Code::ERRCODE_FEATURE_NOT_SUPPORTED,
            Error::ReadOnly(_) | Error::Standby(_) => Code::ERRCODE_READ_ONLY_SQL_TRANSACTION,
            Error::NeedsReadCommitted(_) | Error::InTransactionBlock(_) => {
                Code::ERRCODE_ACTIVE_SQL_TRANSACTION
            }
            Error::Stale { .. } | Error::LibraryTooOld { .. } | Error::NotInstalled => {
                Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE
            }
            Error::Skipped(_) => Code::ERRCODE_LOCK_NOT_AVAILABLE,
            Error::Layout(_) => Code::ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
            Error::Internal(_) => Code::ERRCODE_INTERNAL_ERROR,
        }
    }

    pub fn message(&self) -> String {
        match self {
            Error::Null(argument) => format!("{argument} must not be null"),
            Error::NullElement { argument, position } => {
                format!("element {position} of {argument} must not be null")
            }
            Error::BadValue { what, .. } | Error::Limit { what, .. } => what.clone(),
            Error::UnknownKey { argument, key, .. } => format!("unknown key \"{key}\" in {argument}"),
            Error::Lengths {
                first,
                first_len,
                second,
                second_len,
            } => {
                format!("{second} has {second_len} elements, {first} has {first_len}")
            }
            Error::ManyDimensions(argument) => format!("{argument} has more than one dimension"),
            Error::NoSuchQueue(name) => format!("queue \"{name}\" does not exist"),
            Error::QueueBeingCreated(name) => {
                format!("queue \"{name}\" is being created by another transaction")
            }
            Error::NotBuilt(what) => format!("{what} is not built yet"),
            Error::AfterMaintenance(what) => {
                format!("{what} is not possible in a transaction that ran a maintenance step")
            }
            Error::ReadOnly(verb) => format!("cannot execute {verb} in a read-only transaction"),
            Error::Standby(verb) => format!("cannot execute {verb} on a standby server"),
            Error::NeedsReadCommitted(step) => {
                format!("{step} needs a transaction in READ COMMITTED")
            }
            Error::InTransactionBlock(what) => format!("{what} cannot run inside a transaction block"),
            Error::Stale { stale: 1, .. } => "1 receipt is stale".to_string(),
            Error::Stale { stale, .. } => format!("{stale} receipts are stale"),
            Error::LibraryTooOld { .. } => {
                "the loaded awa_queue library does not know this version of its tables".to_string()
            }
            Error::NotInstalled => "extension awa_queue is not installed in this database".to_string(),
            Error::Layout(what) | Error::Skipped(what) | Error::Internal(what) => what.clone(),
        }
    }

    fn detail(&self) -> Option<String> {
        match self {
            Error::Stale { first, .. } => Some(format!(
                "Receipt {first} is not held any more: its job was rescued, released or ended otherwise. Nothing was changed."
            )),
            Error::LibraryTooOld { protocol, layout } => Some(format!(
                "The tables have protocol {protocol} and layout {layout}; the library knows protocol {} and layout {}.",
                crate::ring::PROTOCOL,
                crate::ring::LAYOUT
            )),
            _ => None,
        }
    }

    fn hint(&self) -> Option<String> {
        Some(match self {
            Error::Null(_) => "Pass a value for it.".into(),
            Error::NullElement { .. } => "Remove the element, or pass 'null'::jsonb for a JSON null.".into(),
            Error::BadValue { hint, .. } | Error::Limit { hint, .. } => hint.clone(),
            Error::UnknownKey { known, .. } => {
                if known.is_empty() {
                    "No key is known here.".into()
                } else {
                    format!("Known keys: {}.", known.join(", "))
                }
            }
            Error::Lengths { first, .. } => format!("Pass one element for each of {first}, or leave it out."),
            Error::ManyDimensions(_) => "Pass a one-dimensional array.".into(),
            Error::NoSuchQueue(_) => "Create it with awa.create_queue(), or check the name.".into(),
            Error::QueueBeingCreated(_) => {
                "Try again, or create queues beforehand with awa.create_queue().".into()
            }
            Error::NotBuilt(_) => "Ask awa.has_feature() for what this version can do.".into(),
            Error::AfterMaintenance(_) => "Commit the maintenance step first.".into(),
            Error::ReadOnly(_) => "Use a read-write transaction.".into(),
            Error::Standby(_) => "Connect to the primary server.".into(),
            Error::NeedsReadCommitted(_) => {
                "Run it by CALL awa.maintain(), or BEGIN ISOLATION LEVEL READ COMMITTED.".into()
            }
            Error::InTransactionBlock(_) => "Run it in autocommit, outside BEGIN and COMMIT.".into(),
            Error::Stale { .. } => {
                "Roll back, and let the job's new attempt do the work; or leave out strict => true to go on."
                    .into()
            }
            Error::LibraryTooOld { .. } => {
                "Reconnect; with shared_preload_libraries, restart the server after the package was upgraded."
                    .into()
            }
            Error::NotInstalled => "CREATE EXTENSION awa_queue.".into(),
            Error::Skipped(_) => "It is tried again by itself.".into(),
            Error::Layout(_) => "Restore the index or column, or reinstall the extension.".into(),
            Error::Internal(_) => "Please report this with the server log.".into(),
        })
    }

    /// Raises the error; does not return.
    pub fn raise(&self) {
        let mut report = ErrorReport::new(self.code(), self.message(), "awa_queue");
        if let Some(detail) = self.detail() {
            report = report.set_detail(detail);
        }
        if let Some(hint) = self.hint() {
            report = report.set_hint(hint);
        }
        report.report(PgLogLevel::ERROR);
    }
}
