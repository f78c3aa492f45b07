//! Workers: claim, complete_and_claim, and the verbs that end an attempt.

use crate::claim::{self, Request};
use crate::close::{self, Finish, Verb};
use crate::error::{Error, Result};
use crate::failure;
use crate::options;
use crate::pg::command;
use crate::pg::datum::{self, Varlena};
use crate::pg::fmgr::{sql_function, Call, Output};
use crate::pg::time::Interval;
use crate::queue::{self, Queue};
use crate::ring;
use std::rc::Rc;

sql_function! {
    awa_claim, pg_finfo_awa_claim => claim_one_queue;
    awa_claim_from, pg_finfo_awa_claim_from => claim_from;
    awa_complete_and_claim, pg_finfo_awa_complete_and_claim => complete_and_claim;
    awa_complete, pg_finfo_awa_complete => complete;
    awa_fail, pg_finfo_awa_fail => fail;
    awa_snooze, pg_finfo_awa_snooze => snooze;
    awa_release, pg_finfo_awa_release => release;
    awa_cancel_claimed, pg_finfo_awa_cancel_claimed => cancel_claimed;
}

/// More than this is taken by calling again; a call's rows are held in memory.
const MOST_JOBS: i64 = 100_000;

fn claim_one_queue(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.claim()")?;
    options::refuse_unknown(call, 4)?;
    let name = call.text(0).ok_or(Error::Null("queue"))?;
    claim_rows(call, &[name], 1)
}

fn claim_from(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.claim_from()")?;
    options::refuse_unknown(call, 4)?;
    let names = queue_names(call, 0)?;
    claim_rows(call, &names, 1)
}

pub(super) fn queue_names(call: &Call, argument: usize) -> Result<Vec<String>> {
    let names = call.varlena_array(argument, "queues")?.unwrap_or_default();
    names
        .into_iter()
        .enumerate()
        .map(|(i, n)| {
            n.map(|n| n.text()).ok_or(Error::NullElement {
                argument: "queues",
                position: i + 1,
            })
        })
        .collect()
}

/// Claims from the named queues; max_jobs, worker and lease are the arguments from `first` on.
fn claim_rows(call: &Call, names: &[String], first: usize) -> Result<Output> {
    let max_jobs = call.i64(first).unwrap_or(1);
    if max_jobs < 0 {
        return Err(Error::bad_value(
            format!("max_jobs must not be negative, but is {max_jobs}"),
            "Pass how many jobs to take at most; 0 takes none.",
        ));
    }
    let lease = lease_argument(call, first + 2)?;
    let worker = worker_argument(call, first + 1)?;
    let mut out = call.result_set();
    let queues = known_queues(names)?;
    if max_jobs > 0 && !queues.is_empty() {
        let request = Request {
            queues,
            max_jobs: max_jobs.min(MOST_JOBS),
            worker,
            lease,
        };
        claim::claim(&request, &mut out)?;
    }
    Ok(Output::Rows)
}

pub fn lease_argument(call: &Call, argument: usize) -> Result<Option<Interval>> {
    let lease = call.interval(argument);
    if lease.is_some_and(|l| l.approx_micros() <= 0) {
        return Err(Error::bad_value(
            "lease must be positive",
            "Pass an interval such as '5 min'.",
        ));
    }
    Ok(lease)
}

/// The worker's name, kept short since it is written with each claim under the claim lock.
fn worker_argument(call: &Call, argument: usize) -> Result<Option<Varlena>> {
    let Some(name) = call.text(argument) else {
        return Ok(None);
    };
    let chars = name.chars().count();
    if chars > queue::MAX_NAME_CHARS {
        return Err(Error::limit(
            format!(
                "worker has {chars} characters, more than {}",
                queue::MAX_NAME_CHARS
            ),
            "Choose a shorter name.",
        ));
    }
    Ok(call.varlena(argument))
}

/// The queues that exist, each once; one warning a session for each name that does not.
fn known_queues(names: &[String]) -> Result<Vec<Rc<Queue>>> {
    let view = ring::view()?;
    let mut queues: Vec<Rc<Queue>> = Vec::new();
    for name in names {
        match queue::find(&view, name)? {
            Some(q) if queues.iter().any(|k| k.id == q.id) => {}
            Some(q) => queues.push(q),
            None => queue::warn_unknown(name),
        }
    }
    Ok(queues)
}

fn complete_and_claim(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.complete_and_claim()")?;
    options::refuse_unknown(call, 8)?;
    if !call.is_null(5) {
        return Err(Error::NotBuilt("outputs".to_string()));
    }
    if !call.is_null(7) {
        return Err(Error::NotBuilt("follow_ups".to_string()));
    }
    let names = queue_names(call, 1)?;
    // Arguments are checked before anything is finished.
    if call.i64(2).unwrap_or(1) < 0 {
        return claim_rows(call, &names, 2);
    }
    lease_argument(call, 4)?;
    worker_argument(call, 3)?;
    let receipts = call.i64_array(0, "receipts")?.unwrap_or_default();
    if !receipts.is_empty() {
        let what = Finish {
            strict: call.bool(6).unwrap_or(false),
            ..Finish::by(Verb::Complete)
        };
        close::finish(&receipts, &what, None)?;
    }
    claim_rows(call, &names, 2)
}

fn complete(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.complete()")?;
    options::refuse_unknown(call, 4)?;
    if !call.is_null(1) {
        return Err(Error::NotBuilt("outputs".to_string()));
    }
    if !call.is_null(3) {
        return Err(Error::NotBuilt("follow_ups".to_string()));
    }
    let what = Finish {
        strict: call.bool(2).unwrap_or(false),
        ..Finish::by(Verb::Complete)
    };
    finish(call, &what)
}

fn fail(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.fail()")?;
    options::refuse_unknown(call, 6)?;
    let retry_in = call.interval(2);
    not_negative("retry_in", retry_in)?;
    let details = call.varlena_array(4, "details")?.unwrap_or_default();
    if !call.is_null(4) {
        let receipts = call.i64_array(0, "receipts")?.unwrap_or_default();
        if details.len() != receipts.len() {
            return Err(Error::Lengths {
                first: "receipts",
                first_len: receipts.len(),
                second: "details",
                second_len: details.len(),
            });
        }
    }
    let what = Finish {
        reason: reason_argument(call, 1),
        details,
        retry_in,
        permanent: call.bool(3).unwrap_or(false),
        strict: call.bool(5).unwrap_or(false),
        ..Finish::by(Verb::Fail)
    };
    finish(call, &what)
}

fn snooze(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.snooze()")?;
    options::refuse_unknown(call, 2)?;
    let delay = call.interval(1).ok_or(Error::Null("delay"))?;
    not_negative("delay", Some(delay))?;
    let what = Finish {
        delay,
        ..Finish::by(Verb::Snooze)
    };
    finish(call, &what)
}

fn not_negative(name: &str, value: Option<Interval>) -> Result<()> {
    if value.is_some_and(|v| v.approx_micros() < 0) {
        return Err(Error::bad_value(
            format!("{name} must not be negative"),
            "Pass an interval such as '5 min'.",
        ));
    }
    Ok(())
}

fn release(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.release()")?;
    options::refuse_unknown(call, 1)?;
    finish(call, &Finish::by(Verb::Release))
}

fn cancel_claimed(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.cancel_claimed()")?;
    options::refuse_unknown(call, 2)?;
    let what = Finish {
        reason: reason_argument(call, 1),
        ..Finish::by(Verb::CancelClaimed)
    };
    finish(call, &what)
}

/// A message or reason, cut where it is too long to be kept.
pub fn reason_argument(call: &Call, argument: usize) -> Option<Varlena> {
    call.text(argument)
        .map(|r| datum::text(failure::cut(&r, failure::MAX_ERROR_BYTES)))
}

/// Ends the attempts of the receipts in argument 0.
fn finish(call: &Call, what: &Finish) -> Result<Output> {
    let receipts = call.i64_array(0, "receipts")?.unwrap_or_default();
    let mut out = call.result_set();
    if !receipts.is_empty() {
        close::finish(&receipts, what, Some(&mut out))?;
    }
    Ok(Output::Rows)
}
