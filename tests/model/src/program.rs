//! A program: steps of several sessions, one statement each. Jobs are named by tags and receipts by the job and
//! how often it had been claimed before, so that a step means the same after others were taken out; what a
//! step names and is not there is left out of it.

use serde::{Deserialize, Serialize};

pub type Tag = u32;

/// The n-th receipt of a job, from 0.
pub type Held = (Tag, usize);

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Verb {
    Complete,
    Fail,
    Snooze,
    Release,
    CancelClaimed,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Spec {
    pub tag: Tag,
    pub queue: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<i16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// Seconds; with `run_at` as a time instead of an interval.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub run_in: Option<i64>,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub run_at: bool,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Step {
    Begin {
        s: usize,
        repeatable: bool,
    },
    Commit {
        s: usize,
    },
    Rollback {
        s: usize,
    },
    Savepoint {
        s: usize,
    },
    /// To the newest savepoint.
    RollbackTo {
        s: usize,
    },
    ReleaseSavepoint {
        s: usize,
    },
    /// A new connection.
    Reconnect {
        s: usize,
    },
    Enqueue {
        s: usize,
        job: Spec,
    },
    /// All like the first, but for its tag and key.
    Batch {
        s: usize,
        jobs: Vec<Spec>,
    },
    Jobs {
        s: usize,
        jobs: Vec<Spec>,
    },
    Claim {
        s: usize,
        queues: Vec<usize>,
        n: i64,
        lease: Option<i64>,
        worker: String,
    },
    Finish {
        s: usize,
        verb: Verb,
        receipts: Vec<Held>,
        strict: bool,
        reason: bool,
        permanent: bool,
        /// retry_in of a failure, delay of a snooze; seconds.
        delay: Option<i64>,
    },
    CompleteAndClaim {
        s: usize,
        receipts: Vec<Held>,
        strict: bool,
        queues: Vec<usize>,
        n: i64,
    },
    Heartbeat {
        s: usize,
        receipts: Vec<Held>,
        lease: Option<i64>,
    },
    ExpireLeases {
        s: usize,
        worker: String,
    },
    Cancel {
        s: usize,
        jobs: Vec<Tag>,
        reason: bool,
    },
    /// `run_in`: run_at so many seconds ahead.
    Retry {
        s: usize,
        jobs: Vec<Tag>,
        run_in: Option<i64>,
    },
    Pause {
        s: usize,
        queue: usize,
    },
    Resume {
        s: usize,
        queue: usize,
    },
    /// The clock of all sessions, in seconds.
    Forward {
        by: i64,
    },
    Maintain {
        s: usize,
    },
    Seal {
        s: usize,
    },
    Close {
        s: usize,
        slot: u8,
    },
    Empty {
        s: usize,
        slot: u8,
    },
    /// Compares everything as the session sees it.
    Check {
        s: usize,
    },
}
