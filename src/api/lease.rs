//! Leases: heartbeat and progress of running attempts, rescue at a lease's end, and the leases of a worker
//! that is known to be dead. Also the step that makes deferred jobs ready, rescue's neighbour.

use crate::error::{Error, Result};
use crate::lease::{self, Progress};
use crate::options;
use crate::pg::command;
use crate::pg::datum::{self, Value};
use crate::pg::fmgr::{sql_function, Call, Output};
use crate::promote;
use crate::rescue;
use crate::settings;

sql_function! {
    awa_heartbeat, pg_finfo_awa_heartbeat => heartbeat;
    awa_set_progress, pg_finfo_awa_set_progress => set_progress;
    awa_expire_leases, pg_finfo_awa_expire_leases => expire_leases;
    awa_rescue, pg_finfo_awa_rescue => rescue_step;
    awa_promote, pg_finfo_awa_promote => promote_step;
}

const MAX_MESSAGE_BYTES: usize = 8 * 1024;

fn heartbeat(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.heartbeat()")?;
    options::refuse_unknown(call, 2)?;
    let lease = super::work::lease_argument(call, 1)?;
    let receipts = call.i64_array(0, "receipts")?.unwrap_or_default();
    let mut out = call.result_set();
    if !receipts.is_empty() {
        let beats = lease::heartbeat(&receipts, lease)?;
        for (receipt, beat) in receipts.iter().zip(beats) {
            out.push(&[
                (*receipt).into(),
                beat.status.word().into(),
                beat.lease_until.into(),
                Value::Null,
            ]);
        }
    }
    Ok(Output::Rows)
}

fn set_progress(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.set_progress()")?;
    options::refuse_unknown(call, 4)?;
    let receipt = call.i64(0).ok_or(Error::Null("receipt"))?;
    let percent = match call.i64(1) {
        Some(p) if !(0..=100).contains(&p) => {
            return Err(Error::bad_value(
                format!("percent must be between 0 and 100, not {p}"),
                "Pass how much of the work is done.",
            ));
        }
        p => p.map(|p| p as i16),
    };
    let message = call.text(2);
    if let Some(bytes) = message
        .as_ref()
        .map(String::len)
        .filter(|n| *n > MAX_MESSAGE_BYTES)
    {
        return Err(Error::limit(
            format!("message has {bytes} bytes, more than {MAX_MESSAGE_BYTES}"),
            "Write a shorter message; results belong into the checkpoint.",
        ));
    }
    let checkpoint = call.varlena(3);
    let most = settings::max_args_bytes();
    if let Some(bytes) = checkpoint.map(|c| c.size()).filter(|n| *n > most) {
        return Err(Error::limit(
            format!("checkpoint has {bytes} bytes, more than {most}"),
            "Keep what is large in a table of its own, and its key in the checkpoint.",
        ));
    }
    let progress = Progress {
        percent,
        message,
        checkpoint: checkpoint.map(datum::jsonb_to_text),
    };
    Ok(lease::set_progress(receipt, &progress)?.word().into())
}

fn expire_leases(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.expire_leases()")?;
    options::refuse_unknown(call, 1)?;
    let worker = call.text(0).ok_or(Error::Null("worker"))?;
    Ok(rescue::expire(&worker)?.into())
}

fn rescue_step(_: &Call) -> Result<Output> {
    let progress = rescue::step()?;
    let more = if progress.more { ", more" } else { "" };
    Ok(format!("rescued: {}{more}", progress.done).as_str().into())
}

fn promote_step(_: &Call) -> Result<Output> {
    let progress = promote::step()?;
    let more = if progress.more { ", more" } else { "" };
    Ok(format!("promoted: {}{more}", progress.done).as_str().into())
}
