//! Readers: version, features, and a look at a lane for debugging.

use crate::claim;
use crate::error::{Error, Result};
use crate::inspect;
use crate::lane::LaneId;
use crate::notify;
use crate::options;
use crate::pg::fmgr::{sql_function, Call, Output};
use crate::ring;
use crate::statement;
use crate::stats;

sql_function! {
    awa_version, pg_finfo_awa_version => version;
    awa_has_feature, pg_finfo_awa_has_feature => has_feature;
    awa_channel, pg_finfo_awa_channel => channel;
    awa_lane_state, pg_finfo_awa_lane_state => lane_state;
    awa_job, pg_finfo_awa_job => job;
    awa_jobs, pg_finfo_awa_jobs => jobs;
    awa_queue_counts, pg_finfo_awa_queue_counts => queue_counts;
    awa_slot_counts, pg_finfo_awa_slot_counts => slot_counts;
}

/// What this library can do, by name: verbs and parameters of the contract that are built.
const FEATURES: &[&str] = &[
    "enqueue",
    "enqueue_batch",
    "enqueue_jobs",
    "claim",
    "claim_from",
    "complete",
    "complete_and_claim",
    "fail",
    "snooze",
    "cancel",
    "expires_in",
    "retry",
    "run_at",
    "run_in",
    "dead_letters",
    "backoff",
    "failed_retention",
    "release",
    "cancel_claimed",
    "create_queue",
    "alter_queue",
    "channel",
    "pause_queue",
    "resume_queue",
    "maintain",
    "wait",
    "job",
    "jobs",
    "queue_stats",
    "ring_status",
    "heartbeat",
    "set_progress",
    "expire_leases",
];

fn version(call: &Call) -> Result<Output> {
    options::refuse_unknown(call, 0)?;
    let mut out = call.result_set();
    let tables = ring::tables()?;
    let sql = "SELECT extversion FROM pg_catalog.pg_extension WHERE extname = 'awa_queue'";
    let installed = statement::rows(&tables, sql, |row| row.get::<String>(1))?;
    let installed = installed.into_iter().next().flatten();
    out.push(&[env!("CARGO_PKG_VERSION").into(), installed.as_deref().into()]);
    Ok(Output::Rows)
}

fn channel(call: &Call) -> Result<Output> {
    options::refuse_unknown(call, 1)?;
    let queue = call.text(0).ok_or(Error::Null("queue"))?;
    Ok(notify::channel(&queue).as_str().into())
}

fn has_feature(call: &Call) -> Result<Output> {
    options::refuse_unknown(call, 1)?;
    let feature = call.text(0).ok_or(Error::Null("feature"))?;
    Ok(FEATURES.contains(&feature.as_str()).into())
}

fn lane_state(call: &Call) -> Result<Output> {
    let lane = call.i64(0).ok_or(Error::Null("lane_id"))?;
    Ok(claim::describe(LaneId(lane))?.as_str().into())
}

fn job(call: &Call) -> Result<Output> {
    options::refuse_unknown(call, 1)?;
    let id = call.i64(0).ok_or(Error::Null("job_id"))?;
    inspect::job(id, &mut call.result_set())?;
    Ok(Output::Rows)
}

fn jobs(call: &Call) -> Result<Output> {
    inspect::jobs(&mut call.result_set())?;
    Ok(Output::Rows)
}

fn queue_counts(call: &Call) -> Result<Output> {
    stats::queues(&mut call.result_set())?;
    Ok(Output::Rows)
}

fn slot_counts(call: &Call) -> Result<Output> {
    stats::slots(&mut call.result_set())?;
    Ok(Output::Rows)
}
