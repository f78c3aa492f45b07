//! Producers: enqueue, enqueue_batch, enqueue_jobs.

use crate::carry::Carried;
use crate::defer::{self, Deferred, Waits};
use crate::enqueue::{self, Entry};
use crate::error::{Error, Result};
use crate::expiry;
use crate::ids;
use crate::lane::LaneId;
use crate::logs::rest;
use crate::options;
use crate::pg::command;
use crate::pg::composite::{self, Record};
use crate::pg::datum::{self, Value, Varlena};
use crate::pg::fmgr::{sql_function, Call, Output};
use crate::pg::time::{self, Interval};
use crate::queue::{self, Queue};
use crate::ring::{self, View};
use std::cell::Cell;

mod jobs;

sql_function! {
    awa_enqueue, pg_finfo_awa_enqueue => enqueue_one;
    awa_enqueue_batch, pg_finfo_awa_enqueue_batch => enqueue_batch;
    awa_enqueue_jobs, pg_finfo_awa_enqueue_jobs => jobs::enqueue_jobs;
}

const MAX_JOBS: usize = 100_000;
const MAX_TAGS: usize = 20;

thread_local! {
    /// Which shard the next call without an ordering key uses.
    static ROTOR: Cell<u64> = const { Cell::new(0) };
}

/// What is common to the jobs of one call, checked.
struct Common {
    kind: Option<Varlena>,
    priority: u8,
    max_attempts: i16,
    tags: Option<Varlena>,
    metadata: Option<Varlena>,
    /// Until when it may wait.
    expires_at: Option<i64>,
}

fn enqueue_one(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.enqueue()")?;
    options::refuse_unknown(call, 19)?;
    let name = call.text(0).ok_or(Error::Null("queue"))?;
    let args = call.varlena(1).ok_or(Error::Null("args"))?;
    refuse_unbuilt(
        call,
        &[
            (7, "unique_key"),
            (8, "unique_by"),
            (9, "unique_until"),
            (10, "unique_for"),
            (11, "on_duplicate"),
            (15, "lease"),
            (17, "after"),
            (18, "on_parent_failure"),
        ],
    )?;
    let due = due_of(call, 4, 14)?;
    let ordering_key = call.varlena(6);
    let view = ring::view_for_write()?;
    let queue = queue::find_or_create(&view, &name)?;
    let mut common = common_of(call, &queue, 2, 3, 5, 12, 13)?;
    common.expires_at = expires_at(call.interval(16), due)?;
    check_args(&queue, args)?;
    let lane = lane_of(&queue, common.priority, ordering_key);
    let entry = entry_of(&view, &common, args, ordering_key);
    let ids = match due {
        None => enqueue::fold(lane, &[entry])?,
        Some(due) => schedule(&view, vec![(lane, entry, due)])?,
    };
    note_expiry(&ids, common.expires_at)?;
    Ok(ids[0].into())
}

fn enqueue_batch(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.enqueue_batch()")?;
    options::refuse_unknown(call, 17)?;
    let name = call.text(0).ok_or(Error::Null("queue"))?;
    let args = call.varlena_array(1, "args")?.unwrap_or_default();
    refuse_unbuilt(
        call,
        &[
            (7, "unique_keys"),
            (8, "unique_by"),
            (9, "unique_until"),
            (10, "unique_for"),
            (11, "on_duplicate"),
            (15, "lease"),
        ],
    )?;
    let due = due_of(call, 4, 14)?;
    let keys = call.varlena_array(6, "ordering_keys")?;
    if let Some(keys) = &keys {
        if keys.len() != args.len() {
            return Err(Error::Lengths {
                first: "args",
                first_len: args.len(),
                second: "ordering_keys",
                second_len: keys.len(),
            });
        }
    }
    check_count(args.len())?;
    queue::check_name(&name, "queue")?;
    if args.is_empty() {
        return Ok(Output::Value(Value::Raw(datum::bigint_array(&[]))));
    }
    let args: Vec<Varlena> = args
        .into_iter()
        .enumerate()
        .map(|(i, a)| {
            a.ok_or(Error::NullElement {
                argument: "args",
                position: i + 1,
            })
        })
        .collect::<Result<_>>()?;
    let view = ring::view_for_write()?;
    let queue = queue::find_or_create(&view, &name)?;
    let mut common = common_of(call, &queue, 2, 3, 5, 12, 13)?;
    common.expires_at = expires_at(call.interval(16), due)?;
    for a in &args {
        check_args(&queue, *a)?;
    }
    let ids = match keys {
        keys if due.is_some() => {
            let jobs = args.iter().enumerate().map(|(i, a)| {
                let key = keys.as_ref().and_then(|k| k[i]);
                (
                    lane_of(&queue, common.priority, key),
                    entry_of(&view, &common, *a, key),
                    due.unwrap_or_default(),
                )
            });
            schedule(&view, jobs.collect())?
        }
        None => {
            let shared = entry_of(&view, &common, args[0], None);
            let entries: Vec<Entry> = args.iter().map(|a| Entry { args: *a, ..shared }).collect();
            enqueue::fold(lane_of(&queue, common.priority, None), &entries)?
        }
        Some(keys) => {
            let jobs = args.iter().zip(&keys).map(|(a, key)| {
                (
                    lane_of(&queue, common.priority, *key),
                    entry_of(&view, &common, *a, *key),
                )
            });
            fold_by_lane(jobs.collect())?
        }
    };
    note_expiry(&ids, common.expires_at)?;
    Ok(Output::Value(Value::Raw(datum::bigint_array(&ids))))
}

/// Puts jobs into their lanes, lane by lane in (queue, priority, shard) order, one lock at a time; returns
/// their ids in input order.
fn fold_by_lane(jobs: Vec<(LaneId, Entry)>) -> Result<Vec<i64>> {
    let mut order: Vec<usize> = (0..jobs.len()).collect();
    order.sort_by_key(|&i| jobs[i].0);
    let mut ids = vec![0i64; jobs.len()];
    for same in order.chunk_by(|&a, &b| jobs[a].0 == jobs[b].0) {
        let entries: Vec<Entry> = same.iter().map(|&i| jobs[i].1).collect();
        for (&i, id) in same.iter().zip(enqueue::fold(jobs[same[0]].0, &entries)?) {
            ids[i] = id;
        }
    }
    Ok(ids)
}

fn lane_of(queue: &Queue, priority: u8, key: Option<Varlena>) -> LaneId {
    let shard = match key {
        _ if queue.shards <= 1 => 0,
        Some(key) => queue::shard_of_key(queue, key),
        None => ROTOR.with(|r| {
            r.set(r.get().wrapping_add(1));
            (r.get() % u64::from(queue.shards)) as u8
        }),
    };
    LaneId::new(queue.id, priority, shard)
}

fn entry_of(view: &View, common: &Common, args: Varlena, key: Option<Varlena>) -> Entry {
    Entry {
        job_id: None,
        attempt: 1,
        max_attempts: common.max_attempts,
        kind: common.kind,
        args,
        rest: rest_of(view, common, key),
    }
}

/// The rare columns, where the job has any of them.
fn rest_of(view: &View, common: &Common, key: Option<Varlena>) -> Option<Varlena> {
    let any = key.is_some() || common.tags.is_some() || common.metadata.is_some();
    if !any && common.expires_at.is_none() {
        return None;
    }
    let mut values = [Value::Null; rest::COUNT];
    values[rest::ORDERING_KEY] = key.into();
    values[rest::TAGS] = common.tags.into();
    values[rest::METADATA] = common.metadata.into();
    values[rest::EXPIRES_AT] = common.expires_at.into();
    Some(composite::build(view.tables.rest_type, &values))
}

fn common_of(
    call: &Call,
    queue: &Queue,
    kind: usize,
    priority: usize,
    max_attempts: usize,
    tags: usize,
    metadata: usize,
) -> Result<Common> {
    let kind = match call.text(kind) {
        None => None,
        Some(k) => {
            queue::check_name(&k, "kind")?;
            (k != queue.name).then(|| datum::text(&k))
        }
    };
    let tag_list = call.varlena_array(tags, "tags")?;
    if let Some(list) = &tag_list {
        check_tags(list)?;
    }
    Ok(Common {
        kind,
        priority: check_priority(queue, call.i64(priority))?,
        max_attempts: check_attempts(queue, call.i64(max_attempts))?,
        tags: tag_list
            .filter(|t| !t.is_empty())
            .and_then(|_| call.varlena(tags)),
        metadata: call.varlena(metadata),
        expires_at: None,
    })
}

fn check_priority(queue: &Queue, priority: Option<i64>) -> Result<u8> {
    match priority {
        None => Ok(queue.priority),
        Some(p @ 1..=4) => Ok(p as u8),
        Some(p) => Err(Error::bad_value(
            format!("priority must be between 1 and 4, not {p}"),
            "1 is the most urgent; leave it out for the queue's default.",
        )),
    }
}

fn check_attempts(queue: &Queue, attempts: Option<i64>) -> Result<i16> {
    match attempts {
        None => Ok(queue.max_attempts),
        Some(n @ 1..=1000) => Ok(n as i16),
        Some(n) => Err(Error::bad_value(
            format!("max_attempts must be between 1 and 1000, not {n}"),
            "Leave it out for the queue's default.",
        )),
    }
}

fn check_tags(tags: &[Option<Varlena>]) -> Result<()> {
    if let Some(i) = tags.iter().position(Option::is_none) {
        return Err(Error::NullElement {
            argument: "tags",
            position: i + 1,
        });
    }
    if tags.len() > MAX_TAGS {
        return Err(Error::limit(
            format!("{} tags, more than {MAX_TAGS}", tags.len()),
            "Put what is not for filtering into metadata.",
        ));
    }
    Ok(())
}

fn check_args(queue: &Queue, args: Varlena) -> Result<()> {
    let size = args.size();
    let limit = queue
        .max_args_bytes
        .unwrap_or_else(crate::settings::max_args_bytes);
    if size > limit {
        return Err(Error::limit(
            format!("args have {size} bytes, more than {limit}"),
            "Keep large data in a table of its own and pass its key, or raise the queue's max_args_bytes.",
        ));
    }
    Ok(())
}

fn check_count(n: usize) -> Result<()> {
    if n > MAX_JOBS {
        return Err(Error::limit(
            format!("{n} jobs in one call, more than {MAX_JOBS}"),
            "Split them over several calls; one transaction can hold them all.",
        ));
    }
    Ok(())
}

fn refuse_unbuilt(call: &Call, arguments: &[(usize, &str)]) -> Result<()> {
    match arguments.iter().find(|(i, _)| !call.is_null(*i)) {
        Some((_, name)) => Err(Error::NotBuilt((*name).to_string())),
        None => Ok(()),
    }
}

/// When a job may run, where that is in the future: a time that has come means now.
fn due_of(call: &Call, run_at: usize, run_in: usize) -> Result<Option<i64>> {
    due(call.i64(run_at), call.interval(run_in))
}

fn due(run_at: Option<i64>, run_in: Option<Interval>) -> Result<Option<i64>> {
    let now = time::now();
    if run_at.is_some() && run_in.is_some() {
        return Err(Error::bad_value(
            "run_at and run_in are both given",
            "Pass one of them.",
        ));
    }
    if run_at == Some(i64::MAX) {
        return Err(Error::bad_value(
            "run_at must not be infinite",
            "A job that never runs is none; pause a queue instead.",
        ));
    }
    Ok(run_at.or(run_in.map(|i| i.after(now))).filter(|at| *at > now))
}

/// Until when a job may wait: so long from now, or from when it may run.
fn expires_at(expires_in: Option<Interval>, due: Option<i64>) -> Result<Option<i64>> {
    if expires_in.is_some_and(|i| i.approx_micros() <= 0) {
        return Err(Error::bad_value(
            "expires_in must be positive",
            "Pass an interval such as '5 min'.",
        ));
    }
    Ok(expires_in.map(|i| i.after(due.unwrap_or_else(time::now))))
}

fn note_expiry(ids: &[i64], expires_at: Option<i64>) -> Result<()> {
    let Some(at) = expires_at else { return Ok(()) };
    expiry::note(&ids.iter().map(|id| (*id, at)).collect::<Vec<_>>())
}

/// Puts jobs off until their time; returns their ids.
fn schedule(view: &View, jobs: Vec<(LaneId, Entry, i64)>) -> Result<Vec<i64>> {
    let now = time::now();
    let mut ids = Vec::with_capacity(jobs.len());
    for chunk in jobs.chunks(ids::ENTRIES_PER_BLOCK as usize) {
        let first = ids::draw_entries(view, chunk.len());
        ids.extend(first..first + chunk.len() as i64);
    }
    let deferred: Vec<Deferred> = jobs
        .into_iter()
        .zip(&ids)
        .map(|((lane, entry, run_at), &job_id)| {
            let record = entry.rest.map(Record::read);
            let mut carried = Carried::from_record(record.as_ref());
            carried.set(rest::ENQUEUED_AT, now);
            Deferred {
                job_id,
                run_at,
                lane,
                attempt: entry.attempt,
                max_attempts: entry.max_attempts,
                waits: Waits::Scheduled,
                kind: entry.kind,
                args: entry.args,
                rest: Some(carried.build(view)),
            }
        })
        .collect();
    defer::put(view, &deferred)?;
    command::next_command();
    Ok(ids)
}
