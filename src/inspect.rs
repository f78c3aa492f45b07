//! Looking at jobs: one by its id, or all that are in the live slots. Nothing here writes; all of it works
//! on a standby too.
//!
//! A fresh job is found by one probe of the segments' index on entry ids per live slot, one that moved on
//! by the partial index on job ids. Its state follows from the claim that covers its seq and that claim's
//! closures.

use crate::bits::Bits;
use crate::body::{Body, Reader};
use crate::dead;
use crate::defer::{self, Waits};
use crate::error::{Error, Result};
use crate::failure::{self, Failure};
use crate::lane::LaneId;
use crate::logs::{claims, closures, ready, rest, segments, Outcome, BY_LANE_AND_SEQ};
use crate::pg::command;
use crate::pg::composite::Record;
use crate::pg::datum::{Value, Varlena};
use crate::pg::fmgr::ResultSet;
use crate::pg::heap;
use crate::pg::index;
use crate::pg::latest::Latest;
use crate::pg::memory::Scratch;
use crate::pg::scan::{Cond, Direction, Scan};
use crate::pg::table::{Access, Table};
use crate::queue;
use crate::receipt::MAX_PER_CLAIM;
use crate::ring::{self, Slot, View};
use std::collections::{HashMap, HashSet};
use std::rc::Rc;

/// Columns of `awa.jobs`.
const COLUMNS: usize = 21;
const ERRORS_COLUMN: usize = 14;

/// Where an entry stands: its place in the lane and its segment.
struct Entry {
    entry_id: i64,
    lane: LaneId,
    seq: i64,
    offset: usize,
    enqueued_at: i64,
    runs: Rc<Vec<u8>>,
}

impl Entry {
    /// Which of two entries of a job is the newer one.
    fn age(&self) -> (i64, i64) {
        (self.enqueued_at, self.entry_id)
    }
}

/// A claim that covers a seq.
#[derive(Clone)]
struct Claim {
    claim_no: i64,
    lane: LaneId,
    first_seq: i64,
    n: i64,
    claimed_at: i64,
    expires_at: i64,
    worker: Option<String>,
}

/// How an attempt ended.
#[derive(Clone)]
struct Ending {
    outcome: Outcome,
    at: i64,
    reason: Option<String>,
}

/// Appends the job of an id, wherever it is.
pub fn job(id: i64, out: &mut ResultSet) -> Result<()> {
    // A slot that was opened behind the view may hold the job by the time of the snapshot.
    for _ in 0..MOST_LOOKS {
        let view = ring::view()?;
        let latest = Latest::take_active();
        let found = look_for(&view, &latest, id)?;
        let current = ring::is_current(&view) || command::in_recovery();
        if found.is_some() || current {
            if let Some(row) = found {
                out.push(&row);
            }
            return Ok(());
        }
    }
    Ok(())
}

/// How often a job that is not found is looked for while the ring changes.
const MOST_LOOKS: usize = 5;

fn look_for(view: &View, latest: &Latest, id: i64) -> Result<Option<[Value; COLUMNS]>> {
    if let Some(row) = deferred_row(view, latest, id)? {
        return Ok(Some(row));
    }
    let mut reader = Reader::new();
    let mut newest: Option<((i64, i64), [Value; COLUMNS], bool)> = None;
    for slot in &view.slots {
        let mut entries = moved_entries(slot, latest, id)?;
        entries.push(id);
        for entry_id in entries {
            let Some(entry) = find_entry(slot, latest, entry_id)? else {
                continue;
            };
            let body = reader.read(slot, &entry.runs, entry.offset, entry_id);
            let Some(body) = body.filter(|b| b.head.job_id == id) else {
                continue;
            };
            let claim = find_claim(slot, latest, entry.lane, entry.seq)?;
            let ending = match &claim {
                Some(c) => find_ending(slot, latest, c, entry.seq)?,
                None => None,
            };
            if ending.as_ref().is_some_and(|e| e.outcome.moves_on()) {
                continue; // it lives on elsewhere
            }
            // A job that was brought back after it had ended is what its newest entry says.
            if newest.as_ref().is_none_or(|(age, _, _)| *age < entry.age()) {
                let row = row(view, &entry, &body, claim.as_ref(), ending.as_ref())?;
                let failed = ending.is_some_and(|e| e.outcome.state() == "failed");
                newest = Some((entry.age(), row, failed));
            }
        }
    }
    let Some((_, mut row, failed)) = newest else {
        return dead_row(view, latest, id);
    };
    if failed {
        take_errors_of_letter(&mut row, view, latest, id)?;
    }
    Ok(Some(row))
}

/// Of a job that failed, its dead letter has the whole of the last error.
fn take_errors_of_letter(row: &mut [Value; COLUMNS], view: &View, latest: &Latest, id: i64) -> Result<()> {
    if let Some(letter) = dead_row(view, latest, id)? {
        row[ERRORS_COLUMN] = letter[ERRORS_COLUMN];
    }
    Ok(())
}

fn deferred_row(view: &View, latest: &Latest, id: i64) -> Result<Option<[Value; COLUMNS]>> {
    let table = Rc::new(Table::open(defer::deferred_table()?, Access::Read));
    let index = index::lookup(&table, &[1])?;
    let mut scan = Scan::latest(&table, &index, 1, latest);
    scan.seek(&[Cond::Eq(id)]);
    if !scan.next(Direction::Forward) {
        return Ok(None);
    }
    Resting {
        job_id: id,
        at: scan.i64(2),
        lane: LaneId(scan.i64(3)),
        attempt: scan.i16(4),
        max_attempts: scan.i16(5),
        state: deferred_state(scan.char(6)),
        kind: scan.varlena(7),
        args: scan.varlena(8),
        rest: scan.varlena(9),
    }
    .row(view)
    .map(Some)
}

fn deferred_state(code: u8) -> &'static str {
    match Waits::of(code) {
        Waits::Scheduled => "scheduled",
        Waits::Retryable => "retryable",
    }
}

fn dead_row(view: &View, latest: &Latest, id: i64) -> Result<Option<[Value; COLUMNS]>> {
    let table = Rc::new(Table::open(dead::dead_letters_table()?, Access::Read));
    let index = index::lookup(&table, &[1])?;
    let mut scan = Scan::latest(&table, &index, 1, latest);
    scan.seek(&[Cond::Eq(id)]);
    if !scan.next(Direction::Forward) {
        return Ok(None);
    }
    Resting {
        job_id: id,
        at: scan.i64(2),
        lane: LaneId(scan.i64(3)),
        attempt: scan.i16(4),
        max_attempts: scan.i16(5),
        state: "failed",
        kind: scan.varlena(6),
        args: scan.varlena(7),
        rest: scan.varlena(8),
    }
    .row(view)
    .map(Some)
}

/// A job outside of the logs: deferred, or a dead letter.
struct Resting {
    job_id: i64,
    /// When it runs, or when it failed.
    at: i64,
    lane: LaneId,
    attempt: i16,
    max_attempts: i16,
    state: &'static str,
    kind: Option<Varlena>,
    args: Option<Varlena>,
    rest: Option<Varlena>,
}

impl Resting {
    fn row(self, view: &View) -> Result<[Value; COLUMNS]> {
        let queue = queue::find_by_id(view, self.lane.queue_id())?;
        let name = queue.as_ref().map(|q| q.name.as_str());
        let rest = self.rest.map(|v| Record::read(v.flattened()));
        let part = |i: usize| rest.as_ref().and_then(|r| r.varlena(i));
        let failed = self.state == "failed";
        Ok([
            self.job_id.into(),
            name.into(),
            self.kind
                .map_or_else(|| name.into(), |k| Value::from(k.flattened())),
            self.state.into(),
            i32::from(self.lane.priority()).into(),
            i32::from(self.attempt).into(),
            i32::from(self.max_attempts).into(),
            self.args.map(Varlena::flattened).into(),
            part(rest::ORDERING_KEY).into(),
            part(rest::UNIQUE_KEY).into(),
            part(rest::TAGS).into(),
            part(rest::METADATA).into(),
            Value::Null, // progress
            Value::Null, // output
            part(rest::ERRORS).into(),
            (!failed).then_some(self.at).into(),
            rest.as_ref().and_then(|r| r.i64(rest::ENQUEUED_AT)).into(),
            Value::Null, // claimed_at
            Value::Null, // lease_until
            failed.then_some(self.at).into(),
            Value::Null, // worker
        ])
    }
}

fn find_entry(slot: &Slot, latest: &Latest, entry_id: i64) -> Result<Option<Entry>> {
    let table = Rc::new(Table::open(slot.segments, Access::Read));
    let index = index::scannable(&table, &segments::BY_ENTRY)?;
    let mut scan = Scan::latest(&table, &index, 1, latest);
    scan.seek(&[Cond::AtMost(entry_id)]);
    if !scan.next(Direction::Backward) {
        return Ok(None);
    }
    let first = scan.i64(segments::FIRST_ENTRY_ID);
    let k = entry_id - first;
    if k >= i64::from(scan.i16(segments::N)) {
        return Ok(None);
    }
    Ok(Some(Entry {
        entry_id,
        lane: LaneId(scan.i64(segments::LANE_ID)),
        seq: scan.i64(segments::FIRST_SEQ) + k,
        offset: k as usize,
        enqueued_at: scan.i64(segments::ENQUEUED_AT),
        runs: Rc::new(scan.bytes(segments::RUNS).unwrap_or_default()),
    }))
}

/// Entries of a job that moved on: their rows carry its id.
fn moved_entries(slot: &Slot, latest: &Latest, id: i64) -> Result<Vec<i64>> {
    let table = Rc::new(Table::open(slot.ready, Access::Read));
    let index = index::scannable(&table, &ready::BY_JOB)?;
    let mut scan = Scan::latest(&table, &index, 1, latest);
    scan.seek(&[Cond::Eq(id)]);
    let mut entries = Vec::new();
    while scan.next(Direction::Forward) {
        entries.push(scan.i64(ready::ENTRY_ID as i16));
    }
    Ok(entries)
}

fn find_claim(slot: &Slot, latest: &Latest, lane: LaneId, seq: i64) -> Result<Option<Claim>> {
    let table = Rc::new(Table::open(slot.claims, Access::Read));
    let index = index::scannable(&table, &claims::BY_SEQ)?;
    let mut scan = Scan::latest(&table, &index, BY_LANE_AND_SEQ, latest);
    scan.seek(&[Cond::Eq(lane.0), Cond::Between(seq - MAX_PER_CLAIM + 1, seq)]);
    if !scan.next(Direction::Backward) {
        return Ok(None);
    }
    let claim = Claim {
        claim_no: scan.i64(claims::CLAIM_NO),
        lane,
        first_seq: scan.i64(claims::FIRST_SEQ),
        n: i64::from(scan.i16(claims::N)),
        claimed_at: scan.i64(claims::CLAIMED_AT),
        expires_at: scan.i64(claims::EXPIRES_AT),
        worker: scan.text(claims::WORKER),
    };
    Ok((seq < claim.first_seq + claim.n).then_some(claim))
}

fn find_ending(slot: &Slot, latest: &Latest, claim: &Claim, seq: i64) -> Result<Option<Ending>> {
    let table = Rc::new(Table::open(slot.closures, Access::Read));
    let index = index::scannable(&table, &closures::BY_CLAIM)?;
    let mut scan = Scan::latest(&table, &index, 1, latest);
    scan.seek(&[Cond::Eq(claim.claim_no)]);
    let mut found: Option<Ending> = None;
    while scan.next(Direction::Forward) {
        let outcome = Outcome::of(scan.char(closures::OUTCOME)).filter(|o| tells(*o));
        let Some(outcome) = outcome else { continue };
        let bits = Bits::of(scan.bytes(closures::WHICH).as_deref());
        if bits.has((seq - claim.first_seq) as u16) && !is_brought_back(found.as_ref()) {
            found = Some(Ending {
                outcome,
                at: scan.i64(closures::CLOSED_AT),
                reason: scan.text(closures::REASON),
            });
        }
    }
    Ok(found)
}

/// Whether a closure says how an attempt ended, or that its job lives elsewhere since.
fn tells(outcome: Outcome) -> bool {
    outcome.ends() || outcome == Outcome::BroughtBack
}

fn is_brought_back(ending: Option<&Ending>) -> bool {
    ending.is_some_and(|e| e.outcome == Outcome::BroughtBack)
}

fn row(
    view: &View,
    entry: &Entry,
    body: &Body,
    claim: Option<&Claim>,
    ending: Option<&Ending>,
) -> Result<[Value; COLUMNS]> {
    let queue = queue::find_by_id(view, entry.lane.queue_id())?;
    let name = queue.as_ref().map(|q| q.name.as_str());
    let state = match (claim, ending) {
        (None, _) => "ready",
        (Some(_), None) => "running",
        (Some(_), Some(e)) => e.outcome.state(),
    };
    let held = claim.filter(|_| ending.is_none());
    Ok([
        body.head.job_id.into(),
        name.into(),
        body.head.kind.map_or_else(|| name.into(), Value::from),
        state.into(),
        i32::from(entry.lane.priority()).into(),
        i32::from(body.head.attempt).into(),
        i32::from(body.max_attempts).into(),
        body.args.into(),
        body.rest_varlena(rest::ORDERING_KEY).into(),
        body.rest_varlena(rest::UNIQUE_KEY).into(),
        body.rest_varlena(rest::TAGS).into(),
        body.rest_varlena(rest::METADATA).into(),
        Value::Null, // progress
        Value::Null, // output
        errors_of(body, claim, ending).into(),
        body.run_at(entry.enqueued_at).into(),
        body.enqueued_at(entry.enqueued_at).into(),
        claim.map(|c| c.claimed_at).into(),
        held.map(|c| c.expires_at).into(),
        ending.map(|e| e.at).into(),
        claim.and_then(|c| c.worker.as_deref()).into(),
    ])
}

/// The errors that the job carries and, where the last attempt ended with a reason, that one.
fn errors_of(body: &Body, claim: Option<&Claim>, ending: Option<&Ending>) -> Option<Varlena> {
    let stored = body.rest_varlena(rest::ERRORS);
    let Some((ending, reason)) = ending.and_then(|e| e.reason.as_ref().map(|r| (e, r))) else {
        return stored;
    };
    Some(failure::added(
        stored,
        &Failure {
            at: ending.at,
            attempt: body.head.attempt,
            message: Some(reason),
            detail: None,
            worker: claim.and_then(|c| c.worker.as_deref()),
            outcome: ending.outcome.state(),
        },
    ))
}

/// Appends all jobs: a scan of everything, for looking around and not for polling.
pub fn jobs(out: &mut ResultSet) -> Result<()> {
    let view = ring::view()?;
    let latest = Latest::take_active();
    let mut reader = Reader::new();
    let mut scratch = Scratch::new();
    let mut shown = Shown {
        elsewhere: all_deferred(&view, &latest, out)?,
        newest: newest_entries(&view, &latest)?,
        failed: HashSet::new(),
    };
    for slot in &view.slots {
        let endings = all_endings(slot, &latest);
        let claims = all_claims(slot, &latest);
        for first in all_segments(slot, &latest) {
            for k in 0..first.1 {
                let entry = Entry {
                    entry_id: first.0.entry_id + k,
                    lane: first.0.lane,
                    seq: first.0.seq + k,
                    offset: k as usize,
                    enqueued_at: first.0.enqueued_at,
                    runs: first.0.runs.clone(),
                };
                let claim = claim_of(&claims, entry.lane, entry.seq);
                let ending = claim.and_then(|c| ending_of(&endings, c, entry.seq));
                if ending.is_some_and(|e| e.outcome.moves_on()) {
                    continue;
                }
                scratch.run(|| -> Result<()> {
                    let body = reader.read(slot, &entry.runs, entry.offset, entry.entry_id);
                    if let Some(body) = body.filter(|b| shown.wants(&entry, b, ending)) {
                        let mut row = row(&view, &entry, &body, claim, ending)?;
                        if ending.is_some_and(|e| e.outcome.state() == "failed") {
                            take_errors_of_letter(&mut row, &view, &latest, body.head.job_id)?;
                        }
                        out.push(&row);
                    }
                    Ok(())
                })?;
            }
        }
    }
    all_dead(&view, &latest, &shown.failed, out)
}

/// Which of a job's appearances is shown: a job that was brought back after it had ended has an old entry too.
struct Shown {
    elsewhere: HashSet<i64>,
    newest: HashMap<i64, (i64, i64)>,
    failed: HashSet<i64>,
}

impl Shown {
    fn wants(&mut self, entry: &Entry, body: &Body, ending: Option<&Ending>) -> bool {
        let id = body.head.job_id;
        let superseded =
            self.elsewhere.contains(&id) || self.newest.get(&id).is_some_and(|newest| *newest > entry.age());
        if !superseded && ending.is_some_and(|e| e.outcome.state() == "failed") {
            self.failed.insert(id);
        }
        !superseded
    }
}

/// The newest entry of each job that has moved on before and is in a lane now.
fn newest_entries(view: &View, latest: &Latest) -> Result<HashMap<i64, (i64, i64)>> {
    let mut newest: HashMap<i64, (i64, i64)> = HashMap::new();
    for slot in &view.slots {
        let table = Rc::new(Table::open(slot.ready, Access::Read));
        let index = index::scannable(&table, &ready::BY_JOB)?;
        let mut scan = Scan::latest(&table, &index, 1, latest);
        scan.seek(&[Cond::AtMost(i64::MAX)]);
        while scan.next(Direction::Forward) {
            let entry_id = scan.i64(ready::ENTRY_ID as i16);
            let job_id = scan.i64(ready::JOB_ID as i16);
            if let Some(entry) = find_entry(slot, latest, entry_id)? {
                let age = newest.entry(job_id).or_insert(entry.age());
                *age = entry.age().max(*age);
            }
        }
    }
    Ok(newest)
}

/// Appends all deferred jobs and returns their ids.
fn all_deferred(view: &View, latest: &Latest, out: &mut ResultSet) -> Result<HashSet<i64>> {
    let table = Table::open(defer::deferred_table()?, Access::Read);
    let mut ids = HashSet::new();
    let mut failed = None;
    heap::scan(&table, latest, |r| {
        let id = r.i64(1).unwrap_or(0);
        ids.insert(id);
        let resting = Resting {
            job_id: id,
            at: r.i64(2).unwrap_or(0),
            lane: LaneId(r.i64(3).unwrap_or(0)),
            attempt: r.i16(4).unwrap_or(0),
            max_attempts: r.i16(5).unwrap_or(0),
            state: deferred_state(r.char(6).unwrap_or(0)),
            kind: r.varlena(7),
            args: r.varlena(8),
            rest: r.varlena(9),
        };
        push_resting(resting, view, out, &mut failed)
    });
    failed.map_or(Ok(ids), Err)
}

/// Appends the dead letters that were not shown as failed already.
fn all_dead(view: &View, latest: &Latest, shown: &HashSet<i64>, out: &mut ResultSet) -> Result<()> {
    let table = Table::open(dead::dead_letters_table()?, Access::Read);
    let mut failed = None;
    heap::scan(&table, latest, |r| {
        let id = r.i64(1).unwrap_or(0);
        if shown.contains(&id) {
            return true;
        }
        let resting = Resting {
            job_id: id,
            at: r.i64(2).unwrap_or(0),
            lane: LaneId(r.i64(3).unwrap_or(0)),
            attempt: r.i16(4).unwrap_or(0),
            max_attempts: r.i16(5).unwrap_or(0),
            state: "failed",
            kind: r.varlena(6),
            args: r.varlena(7),
            rest: r.varlena(8),
        };
        push_resting(resting, view, out, &mut failed)
    });
    failed.map_or(Ok(()), Err)
}

fn push_resting(job: Resting, view: &View, out: &mut ResultSet, failed: &mut Option<Error>) -> bool {
    match job.row(view) {
        Ok(row) => out.push(&row),
        Err(e) => *failed = Some(e),
    }
    failed.is_none()
}

type Endings = HashMap<i64, Vec<(Bits, Ending)>>;

fn all_endings(slot: &Slot, latest: &Latest) -> Endings {
    let mut endings: Endings = HashMap::new();
    let table = Table::open(slot.closures, Access::Read);
    heap::scan(&table, latest, |r| {
        let outcome = r.char(closures::OUTCOME as usize).and_then(Outcome::of);
        if let Some(outcome) = outcome.filter(|o| tells(*o)) {
            let which = r.varlena(closures::WHICH as usize).map(Varlena::bytes);
            let ending = Ending {
                outcome,
                at: r.i64(closures::CLOSED_AT as usize).unwrap_or(0),
                reason: r.varlena(closures::REASON as usize).map(Varlena::text),
            };
            let claim_no = r.i64(closures::CLAIM_NO as usize).unwrap_or(0);
            endings
                .entry(claim_no)
                .or_default()
                .push((Bits::of(which.as_deref()), ending));
        }
        true
    });
    endings
}

fn ending_of<'e>(endings: &'e Endings, claim: &Claim, seq: i64) -> Option<&'e Ending> {
    let k = (seq - claim.first_seq) as u16;
    let of_job = endings
        .get(&claim.claim_no)?
        .iter()
        .filter(|(bits, _)| bits.has(k));
    // That it was brought back goes before how it had ended.
    of_job
        .map(|(_, e)| e)
        .max_by_key(|e| e.outcome == Outcome::BroughtBack)
}

fn all_claims(slot: &Slot, latest: &Latest) -> Vec<Claim> {
    let mut all = Vec::new();
    let table = Table::open(slot.claims, Access::Read);
    heap::scan(&table, latest, |r| {
        all.push(Claim {
            claim_no: r.i64(claims::CLAIM_NO as usize).unwrap_or(0),
            lane: LaneId(r.i64(claims::LANE_ID as usize).unwrap_or(0)),
            first_seq: r.i64(claims::FIRST_SEQ as usize).unwrap_or(0),
            n: i64::from(r.i16(claims::N as usize).unwrap_or(0)),
            claimed_at: r.i64(claims::CLAIMED_AT as usize).unwrap_or(0),
            expires_at: r.i64(claims::EXPIRES_AT as usize).unwrap_or(0),
            worker: r.varlena(claims::WORKER as usize).map(Varlena::text),
        });
        true
    });
    all.sort_by_key(|c| (c.lane, c.first_seq));
    all
}

fn claim_of(claims: &[Claim], lane: LaneId, seq: i64) -> Option<&Claim> {
    let after = claims.partition_point(|c| (c.lane, c.first_seq) <= (lane, seq));
    let claim = claims.get(after.checked_sub(1)?)?;
    (claim.lane == lane && seq < claim.first_seq + claim.n).then_some(claim)
}

/// The segments of a slot as their first entry and their length.
fn all_segments(slot: &Slot, latest: &Latest) -> Vec<(Entry, i64)> {
    let mut all = Vec::new();
    let table = Table::open(slot.segments, Access::Read);
    heap::scan(&table, latest, |r| {
        let entry = Entry {
            entry_id: r.i64(segments::FIRST_ENTRY_ID as usize).unwrap_or(0),
            lane: LaneId(r.i64(segments::LANE_ID as usize).unwrap_or(0)),
            seq: r.i64(segments::FIRST_SEQ as usize).unwrap_or(0),
            offset: 0,
            enqueued_at: r.i64(segments::ENQUEUED_AT as usize).unwrap_or(0),
            runs: Rc::new(
                r.varlena(segments::RUNS as usize)
                    .map(Varlena::bytes)
                    .unwrap_or_default(),
            ),
        };
        all.push((entry, i64::from(r.i16(segments::N as usize).unwrap_or(0))));
        true
    });
    all
}
