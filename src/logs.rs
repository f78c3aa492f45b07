//! The four logs: their columns, and the check that the tables have them where this library expects.

use crate::error::{Error, Result};
use crate::pg::table::{self, Oid};

/// Columns by their number from 1. The layout number of the installation vouches for them; columns are
/// only ever added at the end.
pub mod ready {
    pub const ENTRY_ID: usize = 1;
    pub const JOB_ID: usize = 2;
    pub const ATTEMPT: usize = 4;
    pub const MAX_ATTEMPTS: usize = 5;
    pub const KIND: usize = 6;
    pub const ARGS: usize = 7;
    pub const REST: usize = 8;
    pub const NAMES: [&str; 8] = [
        "entry_id",
        "job_id",
        "slot",
        "attempt",
        "max_attempts",
        "kind",
        "args",
        "rest",
    ];
    pub const BY_JOB: [i16; 1] = [JOB_ID as i16];
}

pub mod segments {
    pub const LANE_ID: i16 = 1;
    pub const FIRST_SEQ: i16 = 2;
    pub const FIRST_ENTRY_ID: i16 = 3;
    pub const ENQUEUED_AT: i16 = 4;
    pub const N: i16 = 6;
    pub const RUNS: i16 = 7;
    pub const NAMES: [&str; 7] = [
        "lane_id",
        "first_seq",
        "first_entry_id",
        "enqueued_at",
        "slot",
        "n",
        "runs",
    ];
    pub const BY_SEQ: [i16; 2] = [LANE_ID, FIRST_SEQ];
    pub const BY_ENTRY: [i16; 1] = [FIRST_ENTRY_ID];
}

pub mod claims {
    pub const CLAIM_NO: i16 = 1;
    pub const LANE_ID: i16 = 2;
    pub const FIRST_SEQ: i16 = 3;
    pub const CLAIMED_AT: i16 = 4;
    pub const EXPIRES_AT: i16 = 5;
    pub const N: i16 = 7;
    pub const WORKER: i16 = 8;
    pub const NAMES: [&str; 8] = [
        "claim_no",
        "lane_id",
        "first_seq",
        "claimed_at",
        "expires_at",
        "slot",
        "n",
        "worker",
    ];
    pub const BY_SEQ: [i16; 2] = [LANE_ID, FIRST_SEQ];
    pub const BY_NO: [i16; 1] = [CLAIM_NO];
    pub const BY_EXPIRY: [i16; 1] = [EXPIRES_AT];
}

pub mod closures {
    pub const CLAIM_NO: i16 = 1;
    pub const CLOSED_AT: i16 = 2;
    pub const N: i16 = 4;
    pub const OUTCOME: i16 = 5;
    pub const WHICH: i16 = 6;
    pub const REASON: i16 = 7;
    pub const NAMES: [&str; 7] = ["claim_no", "closed_at", "slot", "n", "outcome", "which", "reason"];
    pub const BY_CLAIM: [i16; 1] = [CLAIM_NO];
}

/// Not a log: awa_internal.attempts.
pub mod attempts {
    pub const CLAIM_NO: i16 = 1;
    pub const INDEX: i16 = 2;
    pub const LEASE_UNTIL: i16 = 4;
}

/// Scan keys of a scan by lane and a range of seqs.
pub const BY_LANE_AND_SEQ: usize = 3;

/// The attributes of awa_internal.job_rest, counted from 0.
pub mod rest {
    pub const ORDERING_KEY: usize = 0;
    pub const UNIQUE_KEY: usize = 1;
    pub const TAGS: usize = 2;
    pub const METADATA: usize = 3;
    pub const ERRORS: usize = 4;
    pub const CHECKPOINT: usize = 5;
    pub const RUN_AT: usize = 6;
    pub const ENQUEUED_AT: usize = 7;
    pub const EXPIRES_AT: usize = 9;
    pub const COUNT: usize = 11;
}

/// What a closure says of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Outcome {
    Completed,
    /// By its worker, or while it waited.
    Cancelled,
    /// A request to cancel came while it ran; its worker's report, whatever it was, ended it so.
    CancelledOnRequest,
    /// By `fail`: attempts used up, or permanent.
    Failed,
    /// Its lease ended and its attempts are used up.
    LeaseFailed,
    /// Given back: the job lives in another entry.
    Released,
    /// By `fail`: the job waits for its next attempt.
    Retried,
    /// Its lease ended: the job waits for its next attempt.
    Rescued,
    /// Put off; the attempt does not count.
    Snoozed,
    /// No ending: somebody asked to cancel it.
    CancelRequested,
    /// No ending: a job that had failed or was cancelled was brought back and lives in another entry.
    BroughtBack,
}

impl Outcome {
    pub const ALL: [Outcome; 11] = [
        Outcome::Completed,
        Outcome::Cancelled,
        Outcome::CancelledOnRequest,
        Outcome::Failed,
        Outcome::LeaseFailed,
        Outcome::Released,
        Outcome::Retried,
        Outcome::Rescued,
        Outcome::Snoozed,
        Outcome::CancelRequested,
        Outcome::BroughtBack,
    ];

    pub fn code(self) -> u8 {
        match self {
            Outcome::Completed => b'c',
            Outcome::Cancelled => b'x',
            Outcome::CancelledOnRequest => b'k',
            Outcome::Failed => b'f',
            Outcome::LeaseFailed => b'd',
            Outcome::Released => b'r',
            Outcome::Retried => b't',
            Outcome::Rescued => b'l',
            Outcome::Snoozed => b'z',
            Outcome::CancelRequested => b'q',
            Outcome::BroughtBack => b'b',
        }
    }

    pub fn of(code: u8) -> Option<Outcome> {
        Outcome::ALL.into_iter().find(|o| o.code() == code)
    }

    /// Whether the attempt is over.
    pub fn ends(self) -> bool {
        !matches!(self, Outcome::CancelRequested | Outcome::BroughtBack)
    }

    /// Whether the job lives on elsewhere: in another entry or in `deferred`.
    pub fn moves_on(self) -> bool {
        matches!(
            self,
            Outcome::Released | Outcome::Retried | Outcome::Rescued | Outcome::Snoozed | Outcome::BroughtBack
        )
    }

    /// The word that the API has for a job that ended so.
    pub fn state(self) -> &'static str {
        match self {
            Outcome::Completed => "completed",
            Outcome::Cancelled | Outcome::CancelledOnRequest => "cancelled",
            Outcome::Failed | Outcome::LeaseFailed => "failed",
            Outcome::Released | Outcome::BroughtBack => "ready",
            Outcome::Retried | Outcome::Rescued => "retryable",
            Outcome::Snoozed => "scheduled",
            Outcome::CancelRequested => "running",
        }
    }
}

/// Checks that a log table has the expected columns at the expected places.
pub fn verify(oid: Oid, name: &str, columns: &[&str]) -> Result<()> {
    for (i, column) in columns.iter().enumerate() {
        if table::column(oid, column) != Some(i as i16 + 1) {
            return Err(Error::Layout(format!(
                "table \"{name}\" of awa_queue has no column \"{column}\" at position {}",
                i + 1
            )));
        }
    }
    Ok(())
}
