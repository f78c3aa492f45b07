//! Verbs that name jobs by id: cancel and retry.

use crate::by_id;
use crate::cancel::{self, Cancel};
use crate::error::{Error, Result};
use crate::options;
use crate::pg::command;
use crate::pg::fmgr::{sql_function, Call, Output};
use crate::retry;

sql_function! {
    awa_cancel, pg_finfo_awa_cancel => cancel_jobs;
    awa_retry, pg_finfo_awa_retry => retry_jobs;
}

fn cancel_jobs(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.cancel()")?;
    options::refuse_unknown(call, 2)?;
    let ids = call.i64_array(0, "job_ids")?.unwrap_or_default();
    by_id::check_count(&ids)?;
    let what = Cancel {
        reason: super::work::reason_argument(call, 1),
        running: true,
        expired_at: None,
        wait: true,
    };
    let mut out = call.result_set();
    let answers = cancel::cancel(&by_id::plausible(&ids), what)?;
    by_id::push_rows(&ids, &answers, &mut out)?;
    Ok(Output::Rows)
}

fn retry_jobs(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.retry()")?;
    options::refuse_unknown(call, 2)?;
    let ids = call.i64_array(0, "job_ids")?.unwrap_or_default();
    by_id::check_count(&ids)?;
    let run_at = call.i64(1);
    if run_at == Some(i64::MAX) {
        return Err(Error::bad_value(
            "run_at must not be infinite",
            "A job that never runs is none; cancel it instead.",
        ));
    }
    let mut out = call.result_set();
    let answers = retry::retry(&by_id::plausible(&ids), run_at)?;
    by_id::push_rows(&ids, &answers, &mut out)?;
    Ok(Output::Rows)
}
