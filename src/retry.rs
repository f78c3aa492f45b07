//! Running jobs again: deferred ones at once, failed and cancelled ones from the start, as a new entry with the
//! same id.

use crate::by_id::{self, Answer, Work};
use crate::cancel;
use crate::carry::Carried;
use crate::close::{self, Finish, Verb};
use crate::counts::{self, Counted};
use crate::defer::{self, Deferred, Waits};
use crate::enqueue;
use crate::error::Result;
use crate::failure::{self, Failure};
use crate::find::{Ending, Entry, Finder, Is, Where};
use crate::lane::LaneId;
use crate::logs::rest;
use crate::logs::Outcome;
use crate::pg::composite::Record;
use crate::pg::datum::Value;
use crate::pg::time;
use crate::resting::{self, Removed};
use crate::ring::View;
use std::collections::{BTreeMap, HashMap};

/// Lets jobs run at `run_at`, or now where that has come, and says what became of each that there is.
pub fn retry(ids: &[i64], run_at: Option<i64>) -> Result<HashMap<i64, Answer>> {
    let later = run_at.filter(|at| *at > time::now());
    by_id::work(ids, true, |finder, jobs, work| act(finder, jobs, later, work))
}

fn act(mut finder: Finder, jobs: Vec<(i64, Where)>, later: Option<i64>, work: &mut Work) -> Result<()> {
    let view = finder.view.clone();
    let mut ready = Vec::new();
    let mut deferred = Vec::new();
    let mut letters = Vec::new();
    let mut ended: Vec<Deferred> = Vec::new();
    let mut superseded: BTreeMap<(i64, u8, i64), Vec<u16>> = BTreeMap::new();
    for (id, place) in jobs {
        let entry = match place {
            Where::Nowhere => {
                work.answer(id, Answer::UNKNOWN);
                continue;
            }
            Where::Dead(place) => {
                letters.push((id, place));
                continue;
            }
            Where::Deferred(place) => {
                deferred.push((id, place));
                continue;
            }
            Where::Entry(entry) => entry,
        };
        let body = view.slot(entry.slot).and_then(|slot| {
            finder
                .reader
                .read(slot, &entry.runs, entry.offset(), entry.entry_id)
        });
        let kind = body.as_ref().and_then(|b| b.head.kind);
        let answer = |state, changed| Answer::of(entry.lane, kind, state, changed);
        match (&entry.is, body) {
            (Is::Ready, _) if later.is_some() => {
                ready.push((by_id::position(&entry), id, answer("scheduled", true)));
            }
            (Is::Ready, _) => work.answer(id, answer("ready", false)),
            (Is::Running { .. }, _) => work.answer(id, answer("running", false)),
            (Is::Ended(ending), Some(body)) if may_run_again(ending.outcome) => {
                let key = (ending.claim_no, entry.slot, ending.n);
                superseded.entry(key).or_default().push(ending.index);
                match entry.letter {
                    Some(place) => letters.push((id, place)),
                    None => ended.push(started_over(&view, id, &entry, ending, &body)),
                }
            }
            (Is::Ended(ending), _) => work.answer(id, answer(ending.outcome.state(), false)),
        }
    }
    let receipts = cancel::take_waiting(&view, ready, work)?;
    for ((claim_no, slot, n), indexes) in superseded {
        close::note_brought_back(&view, slot, claim_no, n, &indexes)?;
    }
    let snapshot = finder.snapshot();
    drop(finder);
    if !receipts.is_empty() {
        let put_off = Finish {
            run_at: later,
            ..Finish::by(Verb::Snooze)
        };
        close::finish(&receipts, &put_off, None)?;
    }
    let mut waiting = kept(resting::remove_deferred(&view, &deferred, true, |_| true)?, work);
    // In the order in which they were due.
    waiting.sort_by_key(|j| (j.run_at, j.job_id));
    let letters = kept(resting::remove_letters(&view, &letters)?, work);
    let letters = letters.into_iter().map(|job| without_expiry(&view, job));
    let brought_back: Vec<Deferred> = letters.chain(ended).collect();
    let mut by_queue: BTreeMap<i32, i64> = BTreeMap::new();
    for job in &brought_back {
        *by_queue.entry(job.lane.queue_id()).or_insert(0) += 1;
    }
    for (queue, n) in by_queue {
        counts::add(&view.tables, queue, Counted::BroughtBack, n)?;
    }
    waiting.extend(brought_back);
    run(&view, waiting, later, work)?;
    drop(snapshot);
    Ok(())
}

fn may_run_again(outcome: Outcome) -> bool {
    matches!(outcome.state(), "failed" | "cancelled")
}

fn kept(removed: Vec<Removed>, work: &mut Work) -> Vec<Deferred> {
    removed
        .into_iter()
        .filter_map(|r| match r {
            Removed::Job(job) => Some(job),
            Removed::Left(id, answer) => {
                work.answer(id, answer);
                None
            }
            Removed::Moved(id) => {
                work.again.push(id);
                None
            }
        })
        .collect()
}

/// A job of the logs that ended, from its start.
fn started_over(view: &View, id: i64, entry: &Entry, ending: &Ending, body: &crate::body::Body) -> Deferred {
    let mut carried = Carried::from_body(body, entry.enqueued_at);
    carried.set(rest::EXPIRES_AT, Value::Null);
    if ending.outcome.state() == "failed" {
        let failure = Failure {
            at: ending.at,
            attempt: body.head.attempt,
            message: ending.reason.as_deref(),
            detail: None,
            worker: ending.worker.as_deref(),
            outcome: "failed",
        };
        let errors = failure::added(body.rest_varlena(rest::ERRORS), &failure);
        carried.set(rest::ERRORS, errors);
    }
    Deferred {
        job_id: id,
        run_at: 0,
        lane: entry.lane,
        attempt: 1,
        max_attempts: body.max_attempts,
        waits: Waits::Scheduled,
        kind: body.head.kind,
        args: body.args,
        rest: Some(carried.build(view)),
    }
}

/// A job that starts over has no time limit any more: that of its first life is over.
fn without_expiry(view: &View, mut job: Deferred) -> Deferred {
    let record = job.rest.map(Record::read);
    if record.as_ref().is_some_and(|r| r.i64(rest::EXPIRES_AT).is_some()) {
        let mut carried = Carried::from_record(record.as_ref());
        carried.set(rest::EXPIRES_AT, Value::Null);
        job.rest = Some(carried.build(view));
    }
    job
}

/// Puts jobs that are in no place any more where they belong.
fn run(view: &View, mut jobs: Vec<Deferred>, later: Option<i64>, work: &mut Work) -> Result<()> {
    if let Some(run_at) = later {
        for job in &mut jobs {
            job.run_at = run_at;
        }
        defer::put(view, &jobs)?;
    } else {
        let now = time::now();
        let mut by_lane: BTreeMap<LaneId, Vec<enqueue::Entry>> = BTreeMap::new();
        for job in &jobs {
            let entry = defer::entry_of(view, job, now);
            by_lane.entry(job.lane).or_default().push(entry);
        }
        for (lane, entries) in by_lane {
            enqueue::fold(lane, &entries)?;
        }
    }
    for job in &jobs {
        let state = match (later, job.waits) {
            (None, _) => "ready",
            (Some(_), Waits::Scheduled) => "scheduled",
            (Some(_), Waits::Retryable) => "retryable",
        };
        work.answer(job.job_id, Answer::of(job.lane, job.kind, state, true));
    }
    Ok(())
}
