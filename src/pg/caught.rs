//! An error that was caught: what it said, and whose fault it is.

use pgrx::pg_sys::panic::CaughtError;
use pgrx::PgSqlErrorCode as Code;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Caught {
    pub message: String,
    pub detail: Option<String>,
    pub hint: Option<String>,
    pub code: Code,
}

impl Caught {
    pub(super) fn of(error: &CaughtError) -> Caught {
        let (CaughtError::PostgresError(report)
        | CaughtError::ErrorReport(report)
        | CaughtError::RustPanic { ereport: report, .. }) = error;
        Caught {
            message: report.message().to_string(),
            detail: report.detail().map(str::to_string),
            hint: report.hint().map(str::to_string),
            code: report.sql_error_code(),
        }
    }

    /// A cancel of the statement, or a shutdown.
    pub fn is_cancel(&self) -> bool {
        matches!(
            self.code,
            Code::ERRCODE_QUERY_CANCELED | Code::ERRCODE_ADMIN_SHUTDOWN | Code::ERRCODE_CRASH_SHUTDOWN
        )
    }

    /// What has nothing to do with the row at hand and would meet the next one just as well: a cancel, a lock
    /// that somebody holds, no disk space, no memory, a failing device.
    pub fn is_everybodys(&self) -> bool {
        self.is_cancel() || concerns_all(self.code)
    }
}

fn concerns_all(code: Code) -> bool {
    matches!(
        code,
        Code::ERRCODE_LOCK_NOT_AVAILABLE
            | Code::ERRCODE_T_R_DEADLOCK_DETECTED
            | Code::ERRCODE_READ_ONLY_SQL_TRANSACTION
            | Code::ERRCODE_INSUFFICIENT_RESOURCES
            | Code::ERRCODE_DISK_FULL
            | Code::ERRCODE_OUT_OF_MEMORY
            | Code::ERRCODE_TOO_MANY_CONNECTIONS
            | Code::ERRCODE_CONFIGURATION_LIMIT_EXCEEDED
            | Code::ERRCODE_SYSTEM_ERROR
            | Code::ERRCODE_IO_ERROR
            | Code::ERRCODE_UNDEFINED_FILE
            | Code::ERRCODE_DUPLICATE_FILE
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_nobodys_fault_and_a_bad_row_is_its_own() {
        for code in [Code::ERRCODE_DISK_FULL, Code::ERRCODE_LOCK_NOT_AVAILABLE] {
            assert!(concerns_all(code));
        }
        for code in [
            Code::ERRCODE_CHECK_VIOLATION,
            Code::ERRCODE_DATA_CORRUPTED,
            Code::ERRCODE_INTERNAL_ERROR,
        ] {
            assert!(!concerns_all(code));
        }
    }
}
