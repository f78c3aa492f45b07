//! The state machine of queues, pure: what every verb may return and what is left behind.
//!
//! As in the engine nothing is changed in place: entries, claims, endings and deferred jobs are rows with the
//! transaction that wrote them, and a job's state is derived from those that an observer sees. Where the engine
//! may choose (ids, backoff within its limits, times), the model checks the choice and takes it over.

use crate::program::{Held, Spec, Tag, Verb};
use std::collections::{BTreeMap, BTreeSet};

pub type Res<T> = Result<T, String>;
pub type Micros = i64;
pub const SECOND: Micros = 1_000_000;

macro_rules! ensure {
    ($ok:expr, $($why:tt)*) => { if !$ok { return Err(format!($($why)*)); } };
}

/// A queue's policy, as far as programs vary it.
#[derive(Clone, Debug)]
pub struct Queue {
    pub name: &'static str,
    pub settings: &'static str,
    pub strict: bool,
    pub shards: u8,
    pub priority: u8,
    pub max_attempts: i16,
    pub lease: Micros,
    /// base and factor; without jitter where `jitter` is false (else up to a quarter).
    pub backoff: (Micros, i64, bool),
    pub dead_letters: bool,
    pub failed_retention: Micros,
}

impl Queue {
    fn backoff_range(&self, attempt: i16) -> (Micros, Micros) {
        let (base, factor, jitter) = self.backoff;
        let max = 86_400 * SECOND;
        let plain = (base as f64 * (factor as f64).powi(attempt.max(1).into())).min(max as f64) as i64;
        (plain, (plain + if jitter { plain / 4 } else { 0 }).min(max))
    }
}

/// The queues of every program.
pub fn queues() -> Vec<Queue> {
    let plain = Queue {
        name: "plain",
        settings: r#"{"aging_interval": "0", "lease": "1 h"}"#,
        strict: false,
        shards: 1,
        priority: 2,
        max_attempts: 25,
        lease: 3600 * SECOND,
        backoff: (SECOND, 2, true),
        dead_letters: true,
        failed_retention: 14 * 86_400 * SECOND,
    };
    vec![
        plain.clone(),
        Queue {
            name: "Strict 'q\"",
            settings: r#"{"aging_interval": "0", "ordering": "strict", "lease": "200 s", "max_attempts": 2,
                "backoff": {"base": "100 s", "factor": 1, "jitter": 0}, "failed_retention": "1 d"}"#,
            strict: true,
            max_attempts: 2,
            lease: 200 * SECOND,
            backoff: (100 * SECOND, 1, false),
            failed_retention: 86_400 * SECOND,
            ..plain.clone()
        },
        Queue {
            name: "sharded",
            settings: r#"{"aging_interval": "0", "shards": 3, "priority": 3, "max_attempts": 3, "dead_letters": false,
                "backoff": {"base": "0", "factor": 1}}"#,
            shards: 3,
            priority: 3,
            max_attempts: 3,
            lease: 300 * SECOND,
            backoff: (0, 1, true),
            dead_letters: false,
            ..plain
        },
    ]
}

// ---------------------------------------------------------------- transactions

pub type Xid = usize;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Status {
    Running(usize),
    Committed,
    Aborted,
}

/// One level of a session's transaction: all that a ROLLBACK TO its savepoint undoes.
#[derive(Clone, Debug)]
struct Level {
    xids: Vec<Xid>,
}

#[derive(Clone, Debug, Default)]
pub struct Session {
    levels: Vec<Level>,
    /// An error has ended it; only ROLLBACK [TO] is possible.
    pub failed: bool,
    pub repeatable: bool,
}

impl Session {
    pub fn in_transaction(&self) -> bool {
        !self.levels.is_empty()
    }
    pub fn savepoints(&self) -> usize {
        self.levels.len().saturating_sub(1)
    }
}

// ---------------------------------------------------------------- rows

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Outcome {
    Completed,
    Cancelled,
    CancelledOnRequest,
    Failed,
    LeaseFailed,
    Released,
    Retried,
    Rescued,
    Snoozed,
}

impl Outcome {
    fn moves_on(self) -> bool {
        use Outcome::*;
        matches!(self, Released | Retried | Rescued | Snoozed)
    }

    pub fn state(self) -> &'static str {
        use Outcome::*;
        match self {
            Completed => "completed",
            Cancelled | CancelledOnRequest => "cancelled",
            Failed | LeaseFailed => "failed",
            Released => "ready",
            Retried | Rescued => "retryable",
            Snoozed => "scheduled",
        }
    }

    /// A finish that is repeated after a lost connection is no error.
    fn made_by(self, verb: Verb) -> bool {
        use Outcome::*;
        match self {
            Completed => verb == Verb::Complete,
            Cancelled => verb == Verb::CancelClaimed,
            CancelledOnRequest => true,
            Failed | Retried => verb == Verb::Fail,
            Released => verb == Verb::Release,
            Snoozed => verb == Verb::Snooze,
            LeaseFailed | Rescued => false,
        }
    }
}

#[derive(Clone, Debug)]
pub struct Job {
    pub id: i64,
    pub spec: Spec,
    pub priority: u8,
    pub max_attempts: i16,
    xid: Xid,
}

#[derive(Clone, Debug)]
struct Entry {
    job: Tag,
    /// Attempts before this one count in it.
    attempt: i16,
    errors: usize,
    xid: Xid,
    /// Its slot was emptied.
    gone: bool,
}

#[derive(Clone, Debug)]
struct Claim {
    entry: usize,
    receipt: i64,
    xid: Xid,
    lease: Micros,
    expires: Micros,
    worker: String,
}

#[derive(Clone, Debug)]
struct Ending {
    claim: usize,
    outcome: Outcome,
    reason: bool,
    xid: Xid,
}

#[derive(Clone, Debug)]
struct Deferred {
    job: Tag,
    attempt: i16,
    retryable: bool,
    run_at: Micros,
    errors: usize,
    xid: Xid,
    removed: Vec<Xid>,
}

#[derive(Clone, Debug)]
struct Dead {
    job: Tag,
    attempt: i16,
    errors: usize,
    at: (Micros, Micros),
    xid: Xid,
    removed: Vec<Xid>,
}

#[derive(Clone, Debug)]
struct Heartbeat {
    claim: usize,
    until: Micros,
    xid: Xid,
}

/// What is known of a job from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seen {
    pub state: String,
    pub attempt: i16,
    pub max_attempts: i16,
    pub priority: u8,
    pub queue: String,
    pub errors: usize,
}

/// A row of a finishing verb.
#[derive(Clone, Debug)]
pub struct FinishRow {
    pub receipt: i64,
    pub job_id: Option<i64>,
    pub attempt: Option<i16>,
    pub state: String,
    pub run_at: Option<Micros>,
    pub changed: bool,
}

/// A row of a claim.
#[derive(Clone, Debug)]
pub struct ClaimRow {
    pub receipt: i64,
    pub job_id: i64,
    pub queue: String,
    pub tag: Tag,
    pub priority: u8,
    pub attempt: i16,
    pub max_attempts: i16,
    pub has_error: bool,
    pub lease_until: Micros,
}

pub struct Finish {
    pub verb: Verb,
    pub strict: bool,
    pub reason: bool,
    pub permanent: bool,
    pub delay: Option<Micros>,
}

/// When a statement ran, by the clock of its session.
pub type When = (Micros, Micros);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Ended(Outcome),
    Repeated(Outcome),
    Stale,
    Unknown,
}

#[derive(Clone)]
pub struct Model {
    pub queues: Vec<Queue>,
    pub sessions: Vec<Session>,
    statuses: Vec<Status>,
    pub jobs: BTreeMap<Tag, Job>,
    /// In the order of their lanes.
    entries: Vec<Entry>,
    claims: Vec<Claim>,
    endings: Vec<Ending>,
    deferred: Vec<Deferred>,
    dead: Vec<Dead>,
    heartbeats: Vec<Heartbeat>,
    /// Attempts that were asked to stop.
    requests: Vec<(usize, Xid)>,
    /// Verbs by id hold a lock on it to the end of their transaction.
    locks: Vec<(Tag, Xid)>,
    /// Finishes that came too late: queue, number.
    late: Vec<(usize, i64, Xid)>,
    pub paused: Vec<bool>,
}

const MOST_ERRORS: usize = 10;

impl Model {
    pub fn new(sessions: usize) -> Model {
        let queues = queues();
        Model {
            paused: vec![false; queues.len()],
            queues,
            sessions: vec![Session::default(); sessions],
            statuses: Vec::new(),
            jobs: BTreeMap::new(),
            entries: Vec::new(),
            claims: Vec::new(),
            endings: Vec::new(),
            deferred: Vec::new(),
            dead: Vec::new(),
            heartbeats: Vec::new(),
            requests: Vec::new(),
            locks: Vec::new(),
            late: Vec::new(),
        }
    }

    // ------------------------------------------------------------ transactions

    fn new_xid(&mut self, s: usize) -> Xid {
        self.statuses.push(Status::Running(s));
        self.statuses.len() - 1
    }

    pub fn begin(&mut self, s: usize, repeatable: bool) {
        let xid = self.new_xid(s);
        self.sessions[s] = Session {
            levels: vec![Level { xids: vec![xid] }],
            failed: false,
            repeatable,
        };
    }

    pub fn savepoint(&mut self, s: usize) {
        let xid = self.new_xid(s);
        self.sessions[s].levels.push(Level { xids: vec![xid] });
    }

    fn set_all(&mut self, levels: &[Level], status: Status) {
        for xid in levels.iter().flat_map(|l| &l.xids) {
            if self.statuses[*xid] != Status::Aborted {
                self.statuses[*xid] = status;
            }
        }
    }

    /// COMMIT of a transaction that failed rolls back.
    pub fn commit(&mut self, s: usize) {
        let session = std::mem::take(&mut self.sessions[s]);
        let status = if session.failed {
            Status::Aborted
        } else {
            Status::Committed
        };
        self.set_all(&session.levels, status);
    }

    pub fn rollback(&mut self, s: usize) {
        let session = std::mem::take(&mut self.sessions[s]);
        self.set_all(&session.levels, Status::Aborted);
    }

    pub fn rollback_to(&mut self, s: usize) {
        if let Some(level) = self.sessions[s].levels.pop() {
            self.set_all(&[level], Status::Aborted);
        }
        self.savepoint(s);
        self.sessions[s].failed = false;
    }

    pub fn release_savepoint(&mut self, s: usize) {
        if let Some(level) = self.sessions[s].levels.pop() {
            if let Some(below) = self.sessions[s].levels.last_mut() {
                below.xids.extend(level.xids);
            }
        }
    }

    /// Runs the effects of a statement of the session.
    pub fn statement<T>(&mut self, s: usize, effects: impl FnOnce(&mut Model, Xid) -> Res<T>) -> Res<T> {
        match self.sessions[s].levels.last().and_then(|l| l.xids.last()) {
            Some(xid) => {
                let xid = *xid;
                effects(self, xid)
            }
            None => {
                let xid = self.new_xid(s);
                let done = effects(self, xid);
                self.statuses[xid] = Status::Committed;
                done
            }
        }
    }

    /// A statement raised an error: its (sub)transaction is over at once.
    pub fn error(&mut self, s: usize) {
        if let Some(level) = self.sessions[s].levels.last().cloned() {
            self.set_all(&[level], Status::Aborted);
            self.sessions[s].failed = true;
        }
    }

    fn sees(&self, s: usize, xid: Xid) -> bool {
        matches!(self.statuses[xid], Status::Committed) || self.statuses[xid] == Status::Running(s)
    }
    fn committed(&self, xid: Xid) -> bool {
        self.statuses[xid] == Status::Committed
    }
    fn alive(&self, xid: Xid) -> bool {
        self.statuses[xid] != Status::Aborted
    }
    fn others(&self, s: usize, xid: Xid) -> bool {
        matches!(self.statuses[xid], Status::Running(o) if o != s)
    }

    // ------------------------------------------------------------ producers

    /// Jobs that one statement enqueued; `due` is when, where that is in the future. In lane order.
    pub fn enqueue(
        &mut self,
        s: usize,
        jobs: &[(Spec, i64)],
        when: When,
        run_at: &[Option<Micros>],
    ) -> Res<()> {
        self.statement(s, |m, xid| {
            let mut ids: BTreeSet<i64> = m.jobs.values().map(|j| j.id).collect();
            let mut ready = Vec::new();
            for ((spec, id), run_at) in jobs.iter().zip(run_at) {
                ensure!(ids.insert(*id), "job id {id} was given out twice");
                let q = &m.queues[spec.queue];
                let job = Job {
                    id: *id,
                    priority: spec.priority.unwrap_or(q.priority),
                    max_attempts: spec.max_attempts.unwrap_or(q.max_attempts),
                    spec: spec.clone(),
                    xid,
                };
                let later = spec.run_in.is_some_and(|i| i > 0);
                if later {
                    m.deferred.push(Deferred {
                        job: spec.tag,
                        attempt: 1,
                        retryable: false,
                        run_at: run_at.ok_or("a scheduled job without a time")?,
                        errors: 0,
                        xid,
                        removed: Vec::new(),
                    });
                    let at = run_at.unwrap_or(0);
                    let by = spec.run_in.unwrap_or(0) * SECOND;
                    ensure!(
                        spec.run_at || (when.0 + by <= at && at <= when.1 + by),
                        "run_at of job {} is {at}, not within {when:?} + {by}",
                        spec.tag
                    );
                } else {
                    ready.push((spec.queue, job.priority, spec.tag));
                }
                m.jobs.insert(spec.tag, job);
            }
            // Lane by lane, in input order within.
            ready.sort_by_key(|(q, p, _)| (*q, *p));
            for (_, _, tag) in ready {
                m.append(tag, 1, 0, xid);
            }
            Ok(())
        })
    }

    fn append(&mut self, job: Tag, attempt: i16, errors: usize, xid: Xid) {
        self.entries.push(Entry {
            job,
            attempt,
            errors,
            xid,
            gone: false,
        });
    }

    // ------------------------------------------------------------ claims

    /// Claims of an entry that count: committed or under way.
    fn claims_of(&self, entry: usize) -> impl Iterator<Item = (usize, &Claim)> {
        self.claims
            .iter()
            .enumerate()
            .filter(move |(_, c)| c.entry == entry && self.alive(c.xid))
    }

    fn lane(&self, entry: usize) -> (usize, u8, Option<&str>) {
        let job = &self.jobs[&self.entries[entry].job];
        let key = (self.queues[job.spec.queue].shards > 1).then(|| job.spec.key.as_deref().unwrap_or(""));
        (job.spec.queue, job.priority, key)
    }

    /// Entries of a queue that a claim of the session may take, in order within each priority.
    fn free(&self, s: usize, queue: usize) -> Vec<usize> {
        let mut free: Vec<usize> = Vec::new();
        if self.paused[queue] {
            return free;
        }
        let mut stopped: BTreeSet<u8> = BTreeSet::new();
        for (i, e) in self.entries.iter().enumerate() {
            let job = &self.jobs[&e.job];
            if job.spec.queue != queue || e.gone || stopped.contains(&job.priority) {
                continue;
            }
            if self.others(s, e.xid) {
                if self.queues[queue].strict {
                    stopped.insert(job.priority);
                }
                continue;
            }
            if self.alive(e.xid) && self.claims_of(i).next().is_none() {
                free.push(i);
            }
        }
        free.sort_by_key(|i| self.jobs[&self.entries[*i].job].priority);
        free
    }

    /// Checks what a claim returned and takes it over.
    #[allow(clippy::too_many_arguments)] // a call with its answer
    pub fn claim(
        &mut self,
        s: usize,
        queues: &[usize],
        n: i64,
        lease: Option<Micros>,
        worker: &str,
        rows: &[ClaimRow],
        when: When,
    ) -> Res<()> {
        let mut total = 0;
        let mut picked: Vec<usize> = Vec::new();
        for &q in queues {
            let free = self.free(s, q);
            total += free.len();
            let mine: Vec<&ClaimRow> = rows.iter().filter(|r| r.queue == self.queues[q].name).collect();
            // Shares are rounded up; who comes last gets what is left.
            let rounded = (n + queues.len() as i64 - 1) / queues.len() as i64;
            let share = (n - (queues.len() as i64 - 1) * rounded)
                .max(0)
                .min(free.len() as i64) as usize;
            ensure!(
                mine.len() >= share,
                "queue {}: {} jobs were claimed, its share is {share}; free: {:?}",
                self.queues[q].name,
                mine.len(),
                self.tags(&free)
            );
            let mut entries = Vec::new();
            for row in &mine {
                let found = free.iter().copied().find(|e| self.entries[*e].job == row.tag);
                let Some(entry) = found else {
                    return Err(format!(
                        "job {} was claimed, free are only {:?}",
                        row.tag,
                        self.tags(&free)
                    ));
                };
                ensure!(
                    !entries.contains(&entry),
                    "job {} was claimed twice in one call",
                    row.tag
                );
                entries.push(entry);
            }
            self.check_order(q, &free, &entries)?;
            picked.extend(entries);
        }
        ensure!(
            picked.len() == rows.len(),
            "rows of queues that were not asked for"
        );
        let want = (n.max(0) as usize).min(total);
        ensure!(
            rows.len() == want,
            "{} jobs were claimed, {want} expected (of {total} free, max_jobs {n})",
            rows.len()
        );
        // In the order of the rows, from here on.
        let by_tag: BTreeMap<Tag, usize> = picked.iter().map(|e| (self.entries[*e].job, *e)).collect();
        self.statement(s, |m, xid| {
            for row in rows {
                let entry = by_tag[&row.tag];
                let e = &m.entries[entry];
                let job = &m.jobs[&row.tag];
                let got = (row.job_id, row.priority, row.attempt, row.max_attempts, row.has_error);
                let want = (job.id, job.priority, e.attempt, job.max_attempts, e.errors > 0);
                ensure!(
                    got == want,
                    "job {} was claimed as (id, priority, attempt, max_attempts, has last_error) {got:?}, expected {want:?}",
                    row.tag
                );
                ensure!(
                    m.claims.iter().all(|c| c.receipt != row.receipt),
                    "receipt {} was given out twice",
                    row.receipt
                );
                let lease = lease.unwrap_or(m.queues[job.spec.queue].lease);
                ensure!(
                    when.0 + lease <= row.lease_until && row.lease_until <= when.1 + lease,
                    "lease of job {} ends at {}, not {lease} after {when:?}",
                    row.tag,
                    row.lease_until
                );
                m.claims.push(Claim {
                    entry,
                    receipt: row.receipt,
                    xid,
                    lease,
                    expires: row.lease_until,
                    worker: worker.to_string(),
                });
            }
            Ok(())
        })
    }

    fn tags(&self, entries: &[usize]) -> Vec<Tag> {
        entries.iter().map(|e| self.entries[*e].job).collect()
    }

    /// Of each lane the first are taken, in order; of a less urgent lane nothing while a more urgent one has any.
    fn check_order(&self, queue: usize, free: &[usize], picked: &[usize]) -> Res<()> {
        let sharded = self.queues[queue].shards > 1;
        // What is free and what was picked, by lane.
        type Lanes<'k> = BTreeMap<(u8, Option<&'k str>), (Vec<usize>, Vec<usize>)>;
        let mut lanes = Lanes::new();
        for e in free {
            let (_, p, key) = self.lane(*e);
            lanes.entry((p, key)).or_default().0.push(*e);
        }
        for e in picked {
            let (_, p, key) = self.lane(*e);
            lanes.entry((p, key)).or_default().1.push(*e);
        }
        for ((p, key), (free, picked)) in &lanes {
            // Jobs without a key are spread over the shards by turns.
            if sharded && key == &Some("") {
                continue;
            }
            ensure!(
                free.starts_with(picked),
                "queue {} priority {p} key {key:?}: jobs {:?} were claimed, in order are {:?}",
                self.queues[queue].name,
                self.tags(picked),
                self.tags(free)
            );
        }
        let priority = |e: &usize| self.lane(*e).1;
        let last = picked.iter().map(priority).max().unwrap_or(0);
        let left = free.iter().find(|e| priority(e) < last && !picked.contains(e));
        ensure!(
            left.is_none(),
            "a job of priority {last} was claimed while {:?} is free",
            left.map(|e| self.entries[*e].job)
        );
        Ok(())
    }

    /// The receipts of what a program names.
    pub fn receipts(&self, held: &[Held]) -> Vec<i64> {
        held.iter()
            .filter_map(|(tag, n)| self.receipts_of(*tag).nth(*n))
            .collect()
    }

    fn receipts_of(&self, tag: Tag) -> impl Iterator<Item = i64> + '_ {
        self.claims
            .iter()
            .filter(move |c| self.entries[c.entry].job == tag && c.receipt > 0)
            .map(|c| c.receipt)
    }

    /// All receipts that were ever given out, by the names of programs; with them whether they are held.
    pub fn all_held(&self) -> Vec<(Held, bool)> {
        let mut counts: BTreeMap<Tag, usize> = BTreeMap::new();
        let mut all = Vec::new();
        for (i, c) in self.claims.iter().enumerate() {
            if c.receipt < 0 {
                continue;
            }
            let tag = self.entries[c.entry].job;
            let n = counts.entry(tag).or_insert(0);
            let open = self.alive(c.xid) && !self.endings.iter().any(|e| e.claim == i && self.alive(e.xid));
            all.push(((tag, *n), open));
            *n += 1;
        }
        all
    }

    fn claim_of(&self, receipt: i64) -> Option<usize> {
        self.claims.iter().position(|c| c.receipt == receipt)
    }

    fn ending_of(&self, claim: usize, sees: impl Fn(Xid) -> bool) -> Option<&Ending> {
        self.endings.iter().find(|e| e.claim == claim && sees(e.xid))
    }

    /// Whether the session would have to wait for another transaction that ends one of the attempts.
    pub fn would_wait(&self, s: usize, receipts: &[i64]) -> bool {
        receipts.iter().filter_map(|r| self.claim_of(*r)).any(|c| {
            self.sees(s, self.claims[c].xid)
                && !self.entries[self.claims[c].entry].gone
                && (self.ending_of(c, |x| self.others(s, x)).is_some()
                    || self.is_requested(c, |x| self.others(s, x)))
        })
    }

    fn is_requested(&self, claim: usize, counts: impl Fn(Xid) -> bool) -> bool {
        self.requests.iter().any(|(c, x)| *c == claim && counts(*x))
    }

    // ------------------------------------------------------------ finishing

    fn fates(&self, s: usize, receipts: &[i64], what: &Finish) -> Vec<Fate> {
        receipts
            .iter()
            .map(|r| {
                let Some(c) = self.claim_of(*r) else {
                    return Fate::Stale;
                };
                let claim = &self.claims[c];
                if !self.alive(claim.xid) || self.entries[claim.entry].gone {
                    return Fate::Stale;
                }
                if self.others(s, claim.xid) {
                    return Fate::Unknown;
                }
                match self.ending_of(c, |x| self.sees(s, x)) {
                    Some(e) if e.outcome.made_by(what.verb) => Fate::Repeated(e.outcome),
                    Some(_) => Fate::Stale,
                    None if what.verb != Verb::CancelClaimed && self.is_requested(c, |x| self.sees(s, x)) => {
                        Fate::Ended(Outcome::CancelledOnRequest)
                    }
                    None => Fate::Ended(self.outcome(c, what)),
                }
            })
            .collect()
    }

    fn outcome(&self, claim: usize, what: &Finish) -> Outcome {
        let entry = &self.entries[self.claims[claim].entry];
        match what.verb {
            Verb::Complete => Outcome::Completed,
            Verb::Snooze => Outcome::Snoozed,
            Verb::Release => Outcome::Released,
            Verb::CancelClaimed => Outcome::Cancelled,
            Verb::Fail if what.permanent || entry.attempt >= self.jobs[&entry.job].max_attempts => {
                Outcome::Failed
            }
            Verb::Fail => Outcome::Retried,
        }
    }

    /// The SQLSTATE that a finishing verb has to raise, if any.
    pub fn finish_error(&self, s: usize, receipts: &[i64], what: &Finish) -> Option<&'static str> {
        if self.would_wait(s, receipts) {
            return Some("55P03");
        }
        let stale = |f: &Fate| matches!(f, Fate::Stale | Fate::Unknown);
        (what.strict && self.fates(s, receipts, what).iter().any(stale)).then_some("55000")
    }

    /// Checks the rows of a finishing verb (None: of complete_and_claim) and takes its effects over.
    pub fn finish(
        &mut self,
        s: usize,
        receipts: &[i64],
        what: &Finish,
        rows: Option<&[FinishRow]>,
        when: When,
    ) -> Res<()> {
        let fates = self.fates(s, receipts, what);
        if let Some(rows) = rows {
            ensure!(
                rows.len() == receipts.len(),
                "{} rows for {} receipts",
                rows.len(),
                receipts.len()
            );
            for ((row, receipt), fate) in rows.iter().zip(receipts).zip(&fates) {
                ensure!(row.receipt == *receipt, "rows are not in input order");
                let (state, changed) = match fate {
                    Fate::Ended(o) => (o.state(), true),
                    Fate::Repeated(o) => (o.state(), false),
                    Fate::Stale => ("stale", false),
                    Fate::Unknown => ("unknown", false),
                };
                let entry = self
                    .claim_of(*receipt)
                    .map(|c| &self.entries[self.claims[c].entry]);
                let job = entry.map(|e| (self.jobs[&e.job].id, e.attempt));
                ensure!(
                    (row.state.as_str(), row.changed) == (state, changed),
                    "{:?} of job {:?} returned {} (changed {}), expected {state} (changed {changed})",
                    what.verb,
                    entry.map(|e| e.job),
                    row.state,
                    row.changed
                );
                let known = matches!(fate, Fate::Ended(_) | Fate::Repeated(_));
                ensure!(
                    if known {
                        (row.job_id, row.attempt) == (job.map(|j| j.0), job.map(|j| j.1))
                    } else {
                        row.job_id.is_none() || row.job_id == job.map(|j| j.0)
                    },
                    "{:?} returned job {:?}, attempt {:?}, expected {job:?}",
                    what.verb,
                    row.job_id,
                    row.attempt
                );
            }
        }
        self.statement(s, |m, xid| {
            let mut late: BTreeMap<usize, BTreeSet<i64>> = BTreeMap::new();
            let mut seen = BTreeSet::new();
            let mut released = Vec::new();
            for (i, (receipt, fate)) in receipts.iter().zip(&fates).enumerate() {
                let Some(c) = m.claim_of(*receipt) else { continue };
                let entry = m.claims[c].entry;
                match fate {
                    // A claim that was rolled back or emptied is not there to be counted.
                    Fate::Stale if m.alive(m.claims[c].xid) && !m.entries[entry].gone => {
                        let queue = m.jobs[&m.entries[entry].job].spec.queue;
                        late.entry(queue).or_default().insert(*receipt);
                    }
                    Fate::Ended(outcome) if seen.insert(*receipt) => {
                        let run_at = rows.and_then(|r| r[i].run_at);
                        m.end(c, *outcome, what, run_at, when, xid)?;
                        if *outcome == Outcome::Released {
                            released.push(entry);
                        }
                    }
                    _ => {}
                }
            }
            for entry in released {
                let Entry {
                    job, attempt, errors, ..
                } = m.entries[entry].clone();
                m.append(job, attempt, errors, xid);
            }
            for (queue, receipts) in late {
                m.late.push((queue, receipts.len() as i64, xid));
            }
            Ok(())
        })
    }

    fn end(
        &mut self,
        claim: usize,
        outcome: Outcome,
        what: &Finish,
        run_at: Option<Micros>,
        when: When,
        xid: Xid,
    ) -> Res<()> {
        let entry = self.entries[self.claims[claim].entry].clone();
        let job = self.jobs[&entry.job].clone();
        self.endings.push(Ending {
            claim,
            outcome,
            reason: what.reason && outcome != Outcome::CancelledOnRequest,
            xid,
        });
        let more = (entry.errors + 1).min(MOST_ERRORS);
        match outcome {
            Outcome::Snoozed | Outcome::Retried | Outcome::Rescued => {
                let range = match (outcome, what.delay) {
                    (Outcome::Snoozed | Outcome::Retried, Some(delay)) => (delay, delay),
                    _ => self.queues[job.spec.queue].backoff_range(entry.attempt),
                };
                let snoozed = outcome == Outcome::Snoozed;
                let at = run_at.ok_or("a job that is put off without run_at")?;
                ensure!(
                    when.0 + range.0 <= at && at <= when.1 + range.1,
                    "job {} attempt {} runs again at {at}, expected {range:?} after {when:?}",
                    entry.job,
                    entry.attempt
                );
                self.deferred.push(Deferred {
                    job: entry.job,
                    attempt: entry.attempt + i16::from(!snoozed),
                    retryable: !snoozed,
                    run_at: at,
                    errors: if snoozed { entry.errors } else { more },
                    xid,
                    removed: Vec::new(),
                });
            }
            Outcome::Failed | Outcome::LeaseFailed if self.queues[job.spec.queue].dead_letters => {
                self.dead.push(Dead {
                    job: entry.job,
                    attempt: entry.attempt,
                    errors: more,
                    at: when,
                    xid,
                    removed: Vec::new(),
                });
            }
            _ => {}
        }
        Ok(())
    }

    // ------------------------------------------------------------ leases

    /// When the lease of a claim ends; with what open transactions say where `dirty`.
    fn lease_until(&self, claim: usize, counts: impl Fn(Xid) -> bool) -> Micros {
        let beats = self
            .heartbeats
            .iter()
            .filter(|h| h.claim == claim && counts(h.xid));
        beats.map(|h| h.until).fold(self.claims[claim].expires, i64::max)
    }

    /// Another transaction's heartbeat or ending of one of these is under way.
    pub fn is_touched_by_others(&self, s: usize, receipts: &[i64]) -> bool {
        self.would_wait(s, receipts)
            || receipts.iter().filter_map(|r| self.claim_of(*r)).any(|c| {
                self.heartbeats
                    .iter()
                    .any(|h| h.claim == c && self.others(s, h.xid))
            })
    }

    pub fn heartbeat(
        &mut self,
        s: usize,
        receipts: &[i64],
        lease: Option<Micros>,
        rows: &[(i64, String, Option<Micros>)],
        when: When,
    ) -> Res<()> {
        ensure!(
            rows.len() == receipts.len(),
            "{} rows for {} receipts",
            rows.len(),
            receipts.len()
        );
        self.statement(s, |m, xid| {
            for (receipt, (got, status, until)) in receipts.iter().zip(rows) {
                ensure!(receipt == got, "rows are not in input order");
                let claim = m.claim_of(*receipt).filter(|c| {
                    m.sees(s, m.claims[*c].xid)
                        && !m.entries[m.claims[*c].entry].gone
                        && m.ending_of(*c, |x| m.sees(s, x)).is_none()
                });
                let Some(c) = claim else {
                    ensure!(
                        status == "lost" && until.is_none(),
                        "heartbeat of receipt {receipt} says {status} {until:?}, expected lost"
                    );
                    continue;
                };
                let tag = m.entries[m.claims[c].entry].job;
                let want = if m.is_requested(c, |x| m.sees(s, x)) { "cancelled" } else { "held" };
                ensure!(status == want, "heartbeat of job {tag} says {status}, expected {want}");
                let before = m.lease_until(c, |x| m.sees(s, x));
                let lease = lease.unwrap_or(m.claims[c].lease);
                let range = (before.max(when.0 + lease), before.max(when.1 + lease));
                let until = until.unwrap_or(0);
                ensure!(
                    range.0 <= until && until <= range.1,
                    "heartbeat of job {tag}: its lease ends at {until}, expected within {range:?} (it was {before})"
                );
                m.heartbeats.push(Heartbeat { claim: c, until, xid });
            }
            Ok(())
        })
    }

    /// Attempts that a rescue has to end: committed, not ended, none of it under way, lease over. Those about
    /// which the clock does not decide are asked about.
    fn end_leases(
        &mut self,
        s: usize,
        when: When,
        whose: impl Fn(&Model, usize) -> Option<bool>,
        seen: &BTreeMap<Tag, (Seen, Option<Micros>)>,
    ) -> Res<i64> {
        let mut n = 0;
        for c in 0..self.claims.len() {
            let claim = &self.claims[c];
            let entry = self.entries[claim.entry].clone();
            if !self.committed(claim.xid) || entry.gone || self.ending_of(c, |x| self.alive(x)).is_some() {
                continue;
            }
            let requested = self.is_requested(c, |x| self.committed(x));
            if !requested && self.is_requested(c, |x| self.alive(x)) {
                continue; // another transaction has it in hand
            }
            let now = seen.get(&entry.job);
            let rescued = match whose(self, c) {
                Some(decided) => decided,
                None => now.is_some_and(|(j, _)| j.state != "running"),
            };
            if !rescued {
                continue;
            }
            n += 1;
            let last = entry.attempt >= self.jobs[&entry.job].max_attempts;
            let outcome = match last {
                _ if requested => Outcome::CancelledOnRequest,
                true => Outcome::LeaseFailed,
                false => Outcome::Rescued,
            };
            let run_at = now.and_then(|(_, at)| *at);
            ensure!(
                now.is_some_and(|(j, _)| j.state != "running"),
                "the lease of job {} is over and it was not rescued",
                entry.job
            );
            let what = Finish {
                verb: Verb::Fail,
                strict: false,
                reason: false,
                permanent: false,
                delay: None,
            };
            self.statement(s, |m, xid| m.end(c, outcome, &what, run_at, when, xid))?;
        }
        Ok(n)
    }

    /// `seen`: all jobs right after it.
    pub fn expire_leases(
        &mut self,
        s: usize,
        worker: &str,
        returned: i64,
        when: When,
        seen: &BTreeMap<Tag, (Seen, Option<Micros>)>,
    ) -> Res<()> {
        let n = self.end_leases(s, when, |m, c| Some(m.claims[c].worker == worker), seen)?;
        ensure!(
            n == returned,
            "expire_leases ended {returned} attempts, expected {n}"
        );
        Ok(())
    }

    // ------------------------------------------------------------ by id

    /// The newest entry that the session sees, its claim and its ending; endings that move on are passed over.
    fn place(&self, s: usize, tag: Tag) -> Option<(usize, Option<usize>, Option<&Ending>)> {
        let found = (0..self.entries.len()).rev().find_map(|i| {
            let e = &self.entries[i];
            if e.job != tag || !self.sees(s, e.xid) {
                return None;
            }
            let claim = self
                .claims_of(i)
                .find(|(_, c)| self.sees(s, c.xid))
                .map(|(c, _)| c);
            let ending = claim.and_then(|c| self.ending_of(c, |x| self.sees(s, x)));
            (!ending.is_some_and(|e| e.outcome.moves_on())).then_some((i, claim, ending))
        });
        // What it was before does not come back when its end is forgotten.
        found.filter(|(i, _, _)| !self.entries[*i].gone)
    }

    fn waits(&self, s: usize, tag: Tag) -> Option<usize> {
        self.deferred
            .iter()
            .position(|d| d.job == tag && self.sees(s, d.xid) && !d.removed.iter().any(|x| self.sees(s, *x)))
    }

    fn letter(&self, s: usize, tag: Tag) -> Option<usize> {
        self.dead
            .iter()
            .position(|d| d.job == tag && self.sees(s, d.xid) && !d.removed.iter().any(|x| self.sees(s, *x)))
    }

    /// Whether cancel (or retry, where it would touch a job that is ready) waits for another transaction.
    pub fn by_id_waits(&self, s: usize, tags: &[Tag], retry: Option<bool>) -> bool {
        tags.iter().any(|tag| {
            if self.locks.iter().any(|(t, x)| t == tag && self.others(s, *x)) {
                return true;
            }
            if self.waits(s, *tag).is_some() {
                return false;
            }
            match self.place(s, *tag) {
                Some((i, None, _)) => {
                    retry != Some(false) && self.claims_of(i).any(|(_, c)| self.others(s, c.xid))
                }
                Some((_, Some(c), None)) if retry.is_none() => {
                    self.ending_of(c, |x| self.others(s, x)).is_some()
                        || self.is_requested(c, |x| self.others(s, x))
                }
                _ => false,
            }
        })
    }

    /// A claim that is closed at once, in a slot.
    fn taken(&mut self, entry: usize, slot: u8, outcome: Outcome, reason: bool, xid: Xid) {
        let receipt = -(self.claims.len() as i64 + 1) << 16 | i64::from(slot) << 10;
        self.claims.push(Claim {
            entry,
            receipt,
            xid,
            lease: 0,
            expires: 0,
            worker: String::new(),
        });
        self.endings.push(Ending {
            claim: self.claims.len() - 1,
            outcome,
            reason,
            xid,
        });
    }

    fn answer(&self, tag: Tag, row: Option<&(i64, String, bool)>, state: &str, changed: bool) -> Res<()> {
        ensure!(
            row == Some(&(self.jobs[&tag].id, state.to_string(), changed)),
            "job {tag} came back as {row:?}, expected {state} (changed {changed})"
        );
        Ok(())
    }

    /// In the order of their ids. `rows`: by job; `slots`: where each job's newest entry lies.
    pub fn cancel(
        &mut self,
        s: usize,
        tags: &[Tag],
        reason: bool,
        rows: &BTreeMap<Tag, (i64, String, bool)>,
        slots: &BTreeMap<Tag, u8>,
    ) -> Res<()> {
        self.statement(s, |m, xid| {
            for tag in tags {
                m.locks.push((*tag, xid));
                let row = rows.get(tag);
                let slot = slots.get(tag).copied().unwrap_or(0);
                if let Some(d) = m.waits(s, *tag) {
                    m.answer(*tag, row, "cancelled", true)?;
                    m.deferred[d].removed.push(xid);
                    let d = m.deferred[d].clone();
                    m.append(*tag, d.attempt, d.errors, xid);
                    m.taken(m.entries.len() - 1, slot, Outcome::Cancelled, reason, xid);
                    continue;
                }
                match m.place(s, *tag) {
                    None if m.letter(s, *tag).is_some() => m.answer(*tag, row, "failed", false)?,
                    None => m.answer(*tag, row, "unknown", false)?,
                    Some((entry, None, _)) => {
                        m.answer(*tag, row, "cancelled", true)?;
                        m.taken(entry, slot, Outcome::Cancelled, reason, xid);
                    }
                    Some((_, Some(c), None)) => {
                        let fresh = !m.is_requested(c, |x| m.sees(s, x));
                        m.answer(*tag, row, "running", fresh)?;
                        if fresh {
                            m.requests.push((c, xid));
                        }
                    }
                    Some((_, _, Some(ending))) => m.answer(*tag, row, ending.outcome.state(), false)?,
                }
            }
            Ok(())
        })
    }

    /// In the order of their ids; `later`: a run_at in the future.
    pub fn retry(
        &mut self,
        s: usize,
        tags: &[Tag],
        later: Option<Micros>,
        rows: &BTreeMap<Tag, (i64, String, bool)>,
        slots: &BTreeMap<Tag, u8>,
    ) -> Res<()> {
        self.statement(s, |m, xid| {
            // (job, attempt, errors, retryable), in the order in which they go into their lanes.
            let mut waiting = Vec::new();
            let mut letters = Vec::new();
            let mut ended = Vec::new();
            let word = if later.is_some() { "scheduled" } else { "ready" };
            for tag in tags {
                m.locks.push((*tag, xid));
                let row = rows.get(tag);
                if let Some(d) = m.waits(s, *tag) {
                    let (run_at, d) = {
                        m.deferred[d].removed.push(xid);
                        (m.deferred[d].run_at, m.deferred[d].clone())
                    };
                    let state = if later.is_some() && d.retryable {
                        "retryable"
                    } else {
                        word
                    };
                    m.answer(*tag, row, state, true)?;
                    waiting.push((run_at, m.jobs[tag].id, (*tag, d.attempt, d.errors, d.retryable)));
                    continue;
                }
                let place = m.place(s, *tag).map(|(e, c, ending)| (e, c, ending.cloned()));
                let failed = match &place {
                    None => true,
                    Some((_, _, ending)) => ending.as_ref().is_some_and(|e| e.outcome.state() == "failed"),
                };
                if let Some(l) = m.letter(s, *tag).filter(|_| failed) {
                    m.answer(*tag, row, word, true)?;
                    m.dead[l].removed.push(xid);
                    letters.push((*tag, 1, m.dead[l].errors, false));
                    continue;
                }
                match place {
                    None => m.answer(*tag, row, "unknown", false)?,
                    Some((entry, None, _)) => match later {
                        None => m.answer(*tag, row, "ready", false)?,
                        Some(run_at) => {
                            m.answer(*tag, row, "scheduled", true)?;
                            let slot = slots.get(tag).copied().unwrap_or(0);
                            m.taken(entry, slot, Outcome::Snoozed, false, xid);
                            let e = m.entries[entry].clone();
                            m.deferred.push(Deferred {
                                job: *tag,
                                attempt: e.attempt,
                                retryable: false,
                                run_at,
                                errors: e.errors,
                                xid,
                                removed: Vec::new(),
                            });
                        }
                    },
                    Some((_, _, None)) => m.answer(*tag, row, "running", false)?,
                    Some((entry, _, Some(ending))) => match ending.outcome.state() {
                        "completed" => m.answer(*tag, row, "completed", false)?,
                        state => {
                            m.answer(*tag, row, word, true)?;
                            let errors = m.entries[entry].errors + usize::from(state == "failed");
                            ended.push((*tag, 1, errors.min(MOST_ERRORS), false));
                        }
                    },
                }
            }
            waiting.sort();
            let waiting = waiting.into_iter().map(|(_, _, job)| job);
            for (job, attempt, errors, retryable) in waiting.chain(letters).chain(ended) {
                match later {
                    None => m.append(job, attempt, errors, xid),
                    Some(run_at) => m.deferred.push(Deferred {
                        job,
                        attempt,
                        retryable,
                        run_at,
                        errors,
                        xid,
                        removed: Vec::new(),
                    }),
                }
            }
            Ok(())
        })
    }

    // ------------------------------------------------------------ maintenance

    /// CALL awa.maintain(): rescue, promotion, expiry of dead letters. `seen`: all jobs right after it.
    pub fn maintain(
        &mut self,
        s: usize,
        when: When,
        seen: &BTreeMap<Tag, (Seen, Option<Micros>)>,
    ) -> Res<()> {
        let over = |m: &Model, c: usize| {
            // An open transaction may have extended it.
            let until = m.lease_until(c, |x| m.alive(x));
            match () {
                _ if until <= when.0 => Some(true),
                _ if until > when.1 => Some(false),
                _ => None,
            }
        };
        self.end_leases(s, when, over, seen)?;
        let mut due: Vec<usize> = (0..self.deferred.len())
            .filter(|i| {
                let d = &self.deferred[*i];
                let free = self.committed(d.xid) && !d.removed.iter().any(|x| self.alive(*x));
                let undecided = d.run_at > when.0 && d.run_at <= when.1;
                free && if undecided {
                    seen.get(&d.job).is_some_and(|(j, _)| j.state == "ready")
                } else {
                    d.run_at <= when.0
                }
            })
            .collect();
        due.sort_by_key(|i| (self.deferred[*i].run_at, self.jobs[&self.deferred[*i].job].id));
        for i in due {
            self.statement(s, |m, xid| {
                let d = m.deferred[i].clone();
                m.deferred[i].removed.push(xid);
                m.append(d.job, d.attempt, d.errors, xid);
                Ok(())
            })?;
        }
        for i in 0..self.dead.len() {
            let d = &self.dead[i];
            if !self.committed(d.xid) || d.removed.iter().any(|x| self.alive(*x)) {
                continue;
            }
            let end = self.queues[self.jobs[&d.job].spec.queue].failed_retention;
            if d.at.1 + end < when.0 {
                self.statement(s, |m, xid| {
                    m.dead[i].removed.push(xid);
                    Ok(())
                })?;
            } else {
                ensure!(
                    d.at.0 + end > when.1,
                    "a dead letter expires at this very moment: the program's times are badly chosen"
                );
            }
        }
        Ok(())
    }

    /// A slot was emptied: all that was in it has to have ended.
    pub fn emptied(&mut self, slot: u8) -> Res<()> {
        let of_slot = |c: &Claim| (c.receipt >> 10 & 63) as u8 == slot;
        let mut gone = Vec::new();
        for (i, c) in self.claims.iter().enumerate() {
            if !of_slot(c) || self.entries[c.entry].gone || !self.alive(c.xid) {
                continue;
            }
            ensure!(
                self.committed(c.xid) && self.ending_of(i, |x| self.committed(x)).is_some(),
                "slot {slot} was emptied with job {} in it, which has not ended",
                self.entries[c.entry].job
            );
            gone.push(c.entry);
        }
        for entry in gone {
            self.entries[entry].gone = true;
        }
        Ok(())
    }

    // ------------------------------------------------------------ what is seen

    /// A job as the session has to see it; None where it is gone (or never was, for this session).
    pub fn job(&self, s: usize, tag: Tag) -> Option<Seen> {
        let job = &self.jobs[&tag];
        let seen = |state: &str, attempt: i16, errors: usize| Seen {
            state: state.to_string(),
            attempt,
            max_attempts: job.max_attempts,
            priority: job.priority,
            queue: self.queues[job.spec.queue].name.to_string(),
            errors,
        };
        let waits = self.waits(s, tag).map(|d| &self.deferred[d]);
        if let Some(d) = waits {
            let state = if d.retryable { "retryable" } else { "scheduled" };
            return Some(seen(state, d.attempt, d.errors));
        }
        let letter = self.letter(s, tag).map(|d| &self.dead[d]);
        if let Some((entry, claim, ending)) = self.place(s, tag) {
            let e = &self.entries[entry];
            return Some(match (claim, ending) {
                (None, _) => seen("ready", e.attempt, e.errors),
                (_, None) => seen("running", e.attempt, e.errors),
                (_, Some(ending)) => {
                    let errors = match letter {
                        Some(d) if ending.outcome.state() == "failed" => d.errors,
                        _ => (e.errors + usize::from(ending.reason)).min(MOST_ERRORS),
                    };
                    seen(ending.outcome.state(), e.attempt, errors)
                }
            });
        }
        letter.map(|d| seen("failed", d.attempt, d.errors))
    }

    /// The jobs with a dead letter, as the session sees them.
    pub fn dead_letters(&self, s: usize) -> BTreeSet<Tag> {
        self.dead
            .iter()
            .filter(|d| self.sees(s, d.xid) && !d.removed.iter().any(|x| self.sees(s, *x)))
            .map(|d| d.job)
            .collect()
    }

    /// awa.queue_stats as the session has to see it: by column.
    pub fn stats(&self, s: usize, queue: usize) -> BTreeMap<&'static str, i64> {
        use Outcome::*;
        let of = |tag: Tag| self.jobs[&tag].spec.queue == queue;
        let mut n: BTreeMap<&'static str, i64> = [
            "ready",
            "scheduled",
            "retryable",
            "blocked",
            "waiting",
            "running",
            "completed",
            "failed",
            "cancelled",
            "enqueued_total",
            "completed_total",
            "failed_total",
            "retried_total",
            "rescued_total",
            "stale_total",
        ]
        .into_iter()
        .map(|c| (c, 0))
        .collect();
        let mut add = |column: &'static str, by: i64| *n.entry(column).or_insert(0) += by;
        for job in self
            .jobs
            .values()
            .filter(|j| j.spec.queue == queue && self.sees(s, j.xid))
        {
            let _ = job;
            add("enqueued_total", 1);
        }
        for (i, e) in self.entries.iter().enumerate() {
            if of(e.job)
                && !e.gone
                && self.sees(s, e.xid)
                && !self.claims_of(i).any(|(_, c)| self.sees(s, c.xid))
            {
                add("ready", 1);
            }
        }
        for (i, c) in self.claims.iter().enumerate() {
            let e = &self.entries[c.entry];
            if !of(e.job) || !self.sees(s, c.xid) {
                continue;
            }
            let Some(ending) = self.ending_of(i, |x| self.sees(s, x)) else {
                add("running", 1);
                continue;
            };
            let kept = i64::from(!e.gone);
            match ending.outcome {
                Completed => {
                    add("completed", kept);
                    add("completed_total", 1);
                }
                Cancelled | CancelledOnRequest => add("cancelled", kept),
                Failed | LeaseFailed => {
                    add("failed_total", 1);
                    add("rescued_total", i64::from(ending.outcome == LeaseFailed));
                    if !self.queues[queue].dead_letters {
                        add("failed", kept);
                    }
                }
                Retried | Rescued => {
                    add("retried_total", 1);
                    add("rescued_total", i64::from(ending.outcome == Rescued));
                }
                Released | Snoozed => {}
            }
        }
        for d in &self.deferred {
            if of(d.job) && self.sees(s, d.xid) && !d.removed.iter().any(|x| self.sees(s, *x)) {
                add(if d.retryable { "retryable" } else { "scheduled" }, 1);
            }
        }
        if self.queues[queue].dead_letters {
            let letters = self.dead_letters(s).into_iter().filter(|t| of(*t)).count();
            add("failed", letters as i64);
        }
        for (q, by, xid) in &self.late {
            if *q == queue && self.sees(s, *xid) {
                add("stale_total", *by);
            }
        }
        n
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enqueued(m: &mut Model, s: usize, tags: &[Tag], queue: usize) {
        let jobs: Vec<(Spec, i64)> = tags
            .iter()
            .map(|tag| {
                let spec = Spec {
                    tag: *tag,
                    queue,
                    ..Spec::default()
                };
                (spec, i64::from(*tag) + 1000)
            })
            .collect();
        m.enqueue(s, &jobs, (0, 0), &vec![None; tags.len()]).unwrap();
    }

    fn row(m: &Model, tag: Tag, receipt: i64, attempt: i16) -> ClaimRow {
        let job = &m.jobs[&tag];
        let q = &m.queues[job.spec.queue];
        ClaimRow {
            receipt,
            job_id: job.id,
            queue: q.name.to_string(),
            tag,
            priority: job.priority,
            attempt,
            max_attempts: job.max_attempts,
            has_error: attempt > 1,
            lease_until: q.lease,
        }
    }

    fn claimed(m: &mut Model, s: usize, queue: usize, n: i64, rows: &[(Tag, i64, i16)]) -> Res<()> {
        let rows: Vec<ClaimRow> = rows.iter().map(|(t, r, a)| row(m, *t, *r, *a)).collect();
        m.claim(s, &[queue], n, None, "anna", &rows, (0, 0))
    }

    fn by(verb: Verb) -> Finish {
        Finish {
            verb,
            strict: false,
            reason: true,
            permanent: false,
            delay: None,
        }
    }

    fn state(m: &Model, s: usize, tag: Tag) -> String {
        m.job(s, tag).map_or("none".to_string(), |j| j.state)
    }

    #[test]
    fn a_claim_in_order_is_right_and_any_other_is_not() {
        let mut m = Model::new(2);
        enqueued(&mut m, 0, &[1, 2, 3], 0);
        assert!(claimed(&mut m.clone(), 1, 0, 2, &[(1, 7, 1), (2, 8, 1)]).is_ok());
        for wrong in [
            &[(2, 7, 1), (1, 8, 1)][..],
            &[(1, 7, 1)],
            &[(1, 7, 1), (1, 8, 1)],
            &[(1, 7, 2), (2, 8, 1)],
        ] {
            assert!(claimed(&mut m.clone(), 1, 0, 2, wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn a_savepoint_that_is_rolled_back_frees_what_was_claimed_in_it() {
        let mut m = Model::new(2);
        enqueued(&mut m, 0, &[1, 2], 0);
        m.begin(0, false);
        claimed(&mut m, 0, 0, 1, &[(1, 7, 1)]).unwrap();
        m.savepoint(0);
        claimed(&mut m, 0, 0, 1, &[(2, 8, 1)]).unwrap();
        assert_eq!(
            (state(&m, 0, 2).as_str(), state(&m, 1, 2).as_str()),
            ("running", "ready")
        );
        assert!(claimed(&mut m.clone(), 1, 0, 1, &[]).is_ok());
        m.rollback_to(0);
        claimed(&mut m, 1, 0, 9, &[(2, 9, 1)]).unwrap();
        m.commit(0);
        assert_eq!(
            (state(&m, 1, 1).as_str(), state(&m, 1, 2).as_str()),
            ("running", "running")
        );
        assert_eq!(m.receipts(&[(2, 0), (2, 1), (2, 2)]), [8, 9]);
    }

    #[test]
    fn an_open_producer_stops_a_strict_lane_and_no_relaxed_one() {
        for (queue, free) in [(0, vec![2]), (1, vec![])] {
            let mut m = Model::new(2);
            m.begin(0, false);
            enqueued(&mut m, 0, &[1], queue);
            enqueued(&mut m, 1, &[2], queue);
            assert_eq!(m.tags(&m.free(1, queue)), free);
            m.rollback(0);
            assert_eq!(m.tags(&m.free(1, queue)), [2]);
        }
    }

    #[test]
    fn a_job_fails_until_its_attempts_are_used_up() {
        let mut m = Model::new(1);
        enqueued(&mut m, 0, &[1], 1);
        claimed(&mut m, 0, 1, 1, &[(1, 7, 1)]).unwrap();
        let fail = |m: &mut Model, receipt, attempt, state: &str, run_at| {
            let row = FinishRow {
                receipt,
                job_id: Some(1001),
                attempt: Some(attempt),
                state: state.to_string(),
                run_at,
                changed: true,
            };
            m.finish(0, &[receipt], &by(Verb::Fail), Some(&[row]), (0, 0))
        };
        assert!(
            fail(&mut m.clone(), 7, 1, "retryable", Some(99 * SECOND)).is_err(),
            "too early"
        );
        assert!(fail(&mut m.clone(), 7, 1, "failed", None).is_err());
        fail(&mut m, 7, 1, "retryable", Some(100 * SECOND)).unwrap();
        assert_eq!(m.stats(0, 1)["retryable"], 1);
        m.maintain(0, (100 * SECOND, 100 * SECOND), &BTreeMap::new())
            .unwrap();
        assert_eq!(m.free(0, 1).len(), 1);
        claimed(&mut m, 0, 1, 1, &[(1, 8, 2)]).unwrap();
        fail(&mut m, 8, 2, "failed", None).unwrap();
        let job = m.job(0, 1).unwrap();
        assert_eq!((job.state.as_str(), job.attempt, job.errors), ("failed", 2, 2));
        let stats = m.stats(0, 1);
        assert_eq!(
            (stats["failed"], stats["failed_total"], stats["retried_total"]),
            (1, 1, 1)
        );
        assert_eq!(
            (stats["enqueued_total"], stats["running"], stats["ready"]),
            (1, 0, 0)
        );
    }

    #[test]
    fn a_late_finish_is_stale_and_one_that_is_repeated_is_not() {
        let mut m = Model::new(2);
        enqueued(&mut m, 0, &[1], 0);
        claimed(&mut m, 0, 0, 1, &[(1, 7, 1)]).unwrap();
        m.finish(0, &[7], &by(Verb::Complete), None, (0, 0)).unwrap();
        assert_eq!(
            m.fates(0, &[7], &by(Verb::Complete)),
            [Fate::Repeated(Outcome::Completed)]
        );
        assert_eq!(m.fates(0, &[7], &by(Verb::Release)), [Fate::Stale]);
        let strict = Finish {
            strict: true,
            ..by(Verb::Fail)
        };
        assert_eq!(m.finish_error(0, &[7], &strict), Some("55000"));
        m.finish(0, &[7], &by(Verb::Release), None, (0, 0)).unwrap();
        assert_eq!(m.stats(0, 0)["stale_total"], 1);
    }

    #[test]
    fn a_slot_may_be_emptied_once_all_of_it_has_ended() {
        let mut m = Model::new(1);
        enqueued(&mut m, 0, &[1], 0);
        let receipt = 5 << 16 | 3 << 10;
        claimed(&mut m, 0, 0, 1, &[(1, receipt, 1)]).unwrap();
        assert!(m.emptied(3).is_err());
        assert!(m.emptied(2).is_ok());
        m.finish(0, &[receipt], &by(Verb::Complete), None, (0, 0))
            .unwrap();
        m.emptied(3).unwrap();
        assert_eq!(state(&m, 0, 1), "none");
        assert_eq!(
            (m.stats(0, 0)["completed"], m.stats(0, 0)["completed_total"]),
            (0, 1)
        );
    }
}
