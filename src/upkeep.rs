//! The duties of maintenance and the engine that runs them: for the background worker (`worker`), which asks
//! when a duty is due, and for CALL awa.maintain(), which runs each once. One step of a duty is one
//! transaction with settings and limits of its own; a duty that fails backs off by itself, the others go on.
//!
//! To add a duty: one line in `DUTIES`. Its step is a `fn() -> Result<Progress>` that does a bounded piece in
//! the transaction it finds, waits for nobody, reports `more` while there is more to do at once and
//! `next_due` when it knows. It is asked again after `period` if anything was committed in between, and at
//! once after `pg::roster::wake_worker()` if it is `prompt`. Duties that touch the ring share its key, so that
//! none of them runs beside another.

use crate::adopt;
use crate::counts;
use crate::dead;
use crate::duty::Progress;
use crate::error::{Error, Result};
use crate::expiry;
use crate::notify;
use crate::pg::bgworker;
use crate::pg::caught::Caught;
use crate::pg::command;
use crate::pg::inject::{self, Point};
use crate::pg::lock::{Class, Mode, TransactionLock};
use crate::pg::roster;
use crate::pg::subxact;
use crate::pg::time::{self, SECOND};
use crate::pg::vacuum;
use crate::pg::warn;
use crate::policy;
use crate::promote;
use crate::rescue;
use crate::ring::{self, Tables};
use crate::statement::run;
use crate::statistics;
use std::cell::Cell;
use std::time::Duration;

/// A duty.
pub struct Duty {
    pub name: &'static str,
    pub step: fn() -> Result<Progress>,
    /// The shortest time between two looks that activity asks for, microseconds.
    period: i64,
    /// `wake_worker()` makes it due.
    prompt: bool,
    /// Duties of one key never run at the same time.
    key: u64,
    /// A step that takes longer is ended.
    limit: Duration,
}

const RING: u64 = 0;
const COUNTS: u64 = 1;

const fn duty(name: &'static str, step: fn() -> Result<Progress>, period: i64, key: u64) -> Duty {
    Duty {
        name,
        step,
        period,
        prompt: false,
        key,
        limit: Duration::from_secs(30),
    }
}

impl Duty {
    /// For duties that `wake_worker()` calls.
    const fn prompt(mut self) -> Duty {
        self.prompt = true;
        self
    }
}

/// In the order in which they run. Keys 2 and up: promotion, rescue, expiry, notify.
pub const DUTIES: &[Duty] = &[
    duty("rescue", rescue::step, SECOND / 2, rescue::DUTY_KEY).prompt(),
    duty("promote", promote::promote, SECOND / 10, promote::DUTY_KEY).prompt(),
    duty("expire", expiry::step, SECOND, 4),
    duty("notify", notify::step, SECOND / 20, 5).prompt(),
    duty("dead letters", dead::expire, 60 * SECOND, 6),
    duty("counts", fold_counts, 2 * SECOND, COUNTS),
    duty("statistics", statistics::analyze_one, 60 * SECOND, RING),
    duty("ring", policy::step, SECOND, RING),
    duty("freeze", freeze, 600 * SECOND, RING),
];

/// Every step begins with these. Roles and databases may set others for all their sessions.
const STEP_SETTINGS: [(&str, &str); 4] = [
    ("lock_timeout", "100ms"),
    ("search_path", "pg_catalog, pg_temp"),
    ("row_security", "off"),
    ("session_replication_role", "origin"),
];

/// Steps of one duty in one pass; what is left comes after the other duties.
const MOST_STEPS: usize = 100;
/// Of CALL maintain, which does not come back by itself.
const MOST_STEPS_OF_CALL: usize = 10_000;

// ---------------------------------------------------------------- steps

fn fold_counts() -> Result<Progress> {
    let done = counts::fold(&ring::tables()?)?;
    Ok(Progress {
        done,
        more: done >= 10_000,
        next_due: None,
    })
}

thread_local! {
    /// Tables that the freezing duty found too old.
    static TO_FREEZE: Cell<Vec<String>> = const { Cell::new(Vec::new()) };
}

/// Finds what is to be frozen; the worker does it after the step, since VACUUM can not run inside one.
fn freeze() -> Result<Progress> {
    TO_FREEZE.set(statistics::old_tables()?);
    // Tables grow old by what other databases do, too.
    Ok(Progress {
        next_due: Some(time::now() + 3600 * SECOND),
        ..Progress::default()
    })
}

// ---------------------------------------------------------------- one step

/// 1, 2, 4 ... 60 seconds after so many failures in a row.
fn backoff(failures: u32) -> i64 {
    (SECOND << failures.saturating_sub(1).min(6)).min(60 * SECOND)
}

/// Why no duty is done at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Closed {
    NotInstalled,
    /// The tables are another database's, or only half restored.
    Foreign,
    /// Library and SQL do not fit.
    Versions(String),
}

enum Outcome {
    Ran(Progress),
    /// Another session is at this duty.
    Busy,
    Closed(Closed),
}

thread_local! {
    /// The installation that the last step found.
    static INCARNATION: Cell<i64> = const { Cell::new(0) };
}

/// Whether anything may be done in this database.
fn gate() -> Result<Option<Closed>> {
    let tables = match ring::tables() {
        Err(Error::NotInstalled) => return Ok(Some(Closed::NotInstalled)),
        other => other?,
    };
    match ring::check_world(&tables) {
        Err(e @ Error::LibraryTooOld { .. }) => Ok(Some(Closed::Versions(e.to_string()))),
        Err(e) => Err(e),
        Ok(incarnation) => {
            INCARNATION.set(incarnation);
            Ok((!adopt::is_ours(&tables)).then_some(Closed::Foreign))
        }
    }
}

/// One step of a duty, in the running transaction.
fn run_step(duty: &Duty, gated: bool) -> Result<Outcome> {
    bgworker::set_settings(&STEP_SETTINGS, true);
    if gated {
        if let Some(why) = gate()? {
            return Ok(Outcome::Closed(why));
        }
    }
    let Some(lock) = TransactionLock::try_acquire(Class::Duty, duty.key, Mode::Exclusive) else {
        return Ok(Outcome::Busy);
    };
    lock.keep();
    Ok(Outcome::Ran((duty.step)()?))
}

fn raise<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|e| {
        e.raise();
        unreachable!("raise never returns")
    })
}

// ---------------------------------------------------------------- what is noted of each duty

#[derive(Clone, Debug, Default)]
struct Record {
    last_run: i64,
    last_done: Option<i64>,
    done: i64,
    failures: u32,
    error: Option<(i64, String)>,
    dirty: bool,
}

impl Record {
    fn note(&mut self, outcome: &std::result::Result<Progress, Caught>, now: i64, noted_at: i64) {
        self.last_run = now;
        match outcome {
            Ok(progress) => {
                if progress.done > 0 {
                    self.done += progress.done;
                    self.last_done = Some(now);
                    self.dirty = true;
                }
                if self.failures > 0 || now - noted_at >= 60 * SECOND || now < noted_at {
                    self.dirty = true;
                }
                self.failures = 0;
            }
            Err(e) => {
                self.failures = self.failures.saturating_add(1);
                self.error = Some((now, e.message.clone()));
                self.dirty = true;
            }
        }
    }

    fn write(&mut self, tables: &Tables, duty: &str) -> Result<()> {
        const AT: &str = "timestamptz '2000-01-01 00:00:00+00' + interval '1 microsecond' *";
        run(
            tables,
            &format!(
                "INSERT INTO awa_internal.duties AS d (duty, last_run, last_done, done, failures, last_error, failed_at)
                 VALUES ($1, {AT} $2, {AT} $3, $4, $5, $6, {AT} $7)
                 ON CONFLICT (duty) DO UPDATE
                 SET last_run = excluded.last_run, last_done = COALESCE(excluded.last_done, d.last_done),
                     done = d.done + excluded.done, failures = excluded.failures,
                     last_error = COALESCE(excluded.last_error, d.last_error),
                     failed_at = COALESCE(excluded.failed_at, d.failed_at)"
            ),
            &[
                duty.into(),
                self.last_run.into(),
                self.last_done.into(),
                self.done.into(),
                (self.failures as i32).into(),
                self.error.as_ref().map(|e| e.1.as_str()).into(),
                self.error.as_ref().map(|e| e.0).into(),
            ],
        )
    }

    fn clear(&mut self) {
        *self = Record {
            last_run: self.last_run,
            failures: self.failures,
            ..Record::default()
        };
    }
}

// ---------------------------------------------------------------- CALL awa.maintain()

/// Runs every duty once, due or not, each step in its own transaction. What fails is rolled back and told as a
/// WARNING; the other duties go on.
pub fn run_all() -> Result<()> {
    command::commit_and_begin();
    // A caller is a user that writes; but it does not wait for a maintainer, as who loads the ring does.
    let tables = ring::tables()?;
    let incarnation = ring::check_world(&tables)?;
    roster::note_verb();
    adopt::at_first_verb(&tables, incarnation)?;
    command::commit_and_begin();
    policy::forget_refusals();
    for duty in DUTIES {
        let mut record = Record::default();
        for _ in 0..MOST_STEPS_OF_CALL {
            command::check_for_interrupts();
            match subxact::attempt_step(|| run_step(duty, false)) {
                Ok(Outcome::Ran(progress)) => {
                    command::commit_and_begin();
                    record.note(&Ok(progress), time::now(), 0);
                    if !progress.more {
                        break;
                    }
                }
                Ok(_) => {
                    command::roll_back_and_begin();
                    break;
                }
                Err(e) => {
                    command::roll_back_and_begin();
                    let hint = e.hint.clone().unwrap_or_else(|| REMEDY.to_string());
                    warn::warning(&format!("duty \"{}\" failed: {}", duty.name, e.message), &hint);
                    record.note(&Err(e), time::now(), 0);
                    break;
                }
            }
        }
        if record.dirty {
            let written = subxact::attempt_step(|| {
                bgworker::set_settings(&STEP_SETTINGS, true);
                record.write(&ring::tables()?, duty.name)
            });
            match written {
                Ok(()) => command::commit_and_begin(),
                Err(_) => command::roll_back_and_begin(),
            }
        }
    }
    Ok(())
}

const REMEDY: &str = "The other duties go on; this one is tried again by itself. See awa_internal.duties.";

// ---------------------------------------------------------------- the worker's side

#[derive(Default)]
struct State {
    /// When it is due without activity; None: nothing is known.
    next: Option<i64>,
    last: i64,
    seen: u64,
    seen_calls: u64,
    record: Record,
    noted_at: i64,
    said: Option<String>,
}

/// The duties of one database as its worker sees them.
pub struct Engine {
    states: Vec<State>,
    /// What this process did itself, so that its duties see each other's work.
    own_activity: u64,
    written_at: i64,
    incarnation: i64,
}

impl Engine {
    pub fn new() -> Engine {
        let mut engine = Engine {
            states: DUTIES.iter().map(|_| State::default()).collect(),
            own_activity: 0,
            written_at: 0,
            incarnation: INCARNATION.get(),
        };
        engine.all_due();
        engine
    }

    /// Everything is looked at again: nothing is known of what became due.
    pub fn all_due(&mut self) {
        let now = time::now();
        for s in &mut self.states {
            s.next = Some(now);
            s.noted_at = 0;
        }
    }

    /// Nothing is due until `all_due`.
    pub fn nothing_due(&mut self, activity: u64, calls: u64) {
        let seen = activity.wrapping_add(self.own_activity);
        for s in &mut self.states {
            (s.next, s.seen, s.seen_calls) = (None, seen, calls);
        }
    }

    fn is_due(&self, i: usize, now: i64, activity: u64, calls: u64) -> bool {
        let s = &self.states[i];
        let moved = s.seen != activity.wrapping_add(self.own_activity);
        s.next.is_some_and(|t| t <= now)
            || s.record.failures == 0 && moved && now >= s.last + DUTIES[i].period
            || DUTIES[i].prompt && s.seen_calls != calls
    }

    /// When to look again without being called; None: not before something happens.
    pub fn next_due(&self, activity: u64) -> Option<i64> {
        let seen = activity.wrapping_add(self.own_activity);
        let due = self.states.iter().zip(DUTIES).filter_map(|(s, d)| {
            let moved = (s.seen != seen && s.record.failures == 0).then_some(s.last + d.period);
            s.next.into_iter().chain(moved).min()
        });
        due.min()
    }

    /// Runs what is due. Returns why nothing may be done, where that is so.
    pub fn pass(&mut self, activity: u64, calls: u64) -> Option<Closed> {
        for (i, duty) in DUTIES.iter().enumerate() {
            let now = time::now();
            if self.states[i].last > now {
                self.states[i].last = now; // the clock went back
            }
            if !self.is_due(i, now, activity, calls) {
                continue;
            }
            bgworker::report(Some(&format!("awa_queue: {}", duty.name)));
            self.states[i].seen = activity.wrapping_add(self.own_activity);
            self.states[i].seen_calls = calls;
            for _ in 0..MOST_STEPS {
                bgworker::heed_signals(0);
                match bgworker::transaction(duty.limit, || raise(run_step(duty, true))) {
                    Ok(Outcome::Closed(why)) => return Some(why),
                    Ok(Outcome::Busy) => {
                        self.states[i].next = Some(time::now() + SECOND);
                        break;
                    }
                    Ok(Outcome::Ran(progress)) => {
                        if self.note(i, Ok(progress)) {
                            break;
                        }
                    }
                    Err(e) => {
                        // After DROP EXTENSION there is nothing to complain about.
                        if let Some(why) = check() {
                            return Some(why);
                        }
                        self.say(i, &e);
                        self.note(i, Err(e));
                        break;
                    }
                }
            }
            self.freeze_tables(i);
        }
        self.write_records();
        if self.incarnation != INCARNATION.get() {
            // Dropped and created anew since the last look: nothing that is known of due times holds.
            self.incarnation = INCARNATION.get();
            self.all_due();
        }
        bgworker::report(None);
        None
    }

    /// Takes in what a step did; true where its duty is done for now.
    fn note(&mut self, i: usize, outcome: std::result::Result<Progress, Caught>) -> bool {
        let now = time::now();
        let s = &mut self.states[i];
        s.last = now;
        s.record.note(&outcome, now, s.noted_at);
        match outcome {
            Ok(progress) => {
                s.said = None;
                s.next = if progress.more {
                    Some(now)
                } else {
                    progress.next_due
                };
                if progress.done > 0 {
                    self.own_activity += 1;
                }
                !progress.more
            }
            Err(_) => {
                s.next = Some(now + backoff(s.record.failures));
                true
            }
        }
    }

    /// An error is logged when it is new, not each time.
    fn say(&mut self, i: usize, e: &Caught) {
        let s = &mut self.states[i];
        // Who holds a lock is no fault; it is noted in the table.
        let quiet = e.code == pgrx::PgSqlErrorCode::ERRCODE_LOCK_NOT_AVAILABLE;
        if quiet || s.said.as_ref() == Some(&e.message) {
            return;
        }
        s.said = Some(e.message.clone());
        bgworker::log(
            pgrx::PgLogLevel::WARNING,
            &format!("awa_queue: duty \"{}\" failed: {}", DUTIES[i].name, e.message),
            e.detail.as_deref(),
            Some(e.hint.as_deref().unwrap_or(REMEDY)),
        );
    }

    /// VACUUM commits by itself, so the duty's lock can not be held through it: CALL maintain may meet it
    /// and say "blocked", once.
    fn freeze_tables(&mut self, i: usize) {
        for table in TO_FREEZE.take() {
            bgworker::heed_signals(0);
            let name = format!("awa_internal.{table}");
            let limit = Duration::from_secs(3600);
            match bgworker::outside_transaction(limit, || vacuum::freeze(&name)) {
                Ok(()) => self.states[i].record.done += 1,
                Err(e) => {
                    self.say(i, &e);
                    self.note(i, Err(e));
                    return;
                }
            }
        }
    }

    /// Notes what the duties did, not more often than every five seconds unless the worker goes to sleep.
    fn write_records(&mut self) {
        let now = time::now();
        let idle = self
            .states
            .iter()
            .all(|s| s.next.is_none_or(|t| t > now + SECOND));
        if !self.states.iter().any(|s| s.record.dirty) || !(idle || now - self.written_at >= 5 * SECOND) {
            return;
        }
        self.written_at = now;
        let written = bgworker::transaction(Duration::from_secs(5), || {
            bgworker::set_settings(&STEP_SETTINGS, true);
            raise(ring::tables().and_then(|tables| {
                for (s, duty) in self.states.iter_mut().zip(DUTIES).filter(|(s, _)| s.record.dirty) {
                    s.record.write(&tables, duty.name)?;
                }
                Ok(())
            }));
        });
        for s in self.states.iter_mut().filter(|s| s.record.dirty) {
            if written.is_ok() {
                s.record.clear();
                s.noted_at = now;
            }
        }
    }
}

/// Whether anything may be done here, in a transaction of its own.
pub fn check() -> Option<Closed> {
    bgworker::transaction(Duration::from_secs(5), || {
        bgworker::set_settings(&STEP_SETTINGS, true);
        let closed = raise(gate());
        inject::reach(Point::WorkerLooked);
        closed
    })
    .unwrap_or(None)
}
