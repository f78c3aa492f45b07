//! The background processes: a launcher, and a worker for each database that has the extension.
//!
//! The launcher is connected to no database. It has every database looked into once, when it starts, and is
//! told of others by their first verb (`pg::roster`). A worker that finds no extension ends at once; one that
//! finds it runs the duties of `upkeep` when they are due, and sleeps otherwise: an idle database costs no
//! statement at all.

use crate::pg::bgworker::{self, Handle};
use crate::pg::databases;
use crate::pg::roster::{self, Entry};
use crate::pg::time;
use crate::settings;
use crate::upkeep::{self, Closed, Engine};
use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Workers that are still looking for the extension, at most; they share max_worker_processes with others.
const MOST_LOOKING: usize = 2;
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
/// A worker that ran so long did not fail at its start.
const HEALTHY: Duration = Duration::from_secs(60);
/// One that ended sooner though it is wanted did.
const SHORT: Duration = Duration::from_millis(500);

// ---------------------------------------------------------------- launcher

struct Child {
    handle: Option<Handle>,
    started: Instant,
    failures: u32,
    not_before: Instant,
}

/// The launcher's life.
pub fn launch() {
    if bgworker::is_binary_upgrade() {
        return;
    }
    let mut children: HashMap<u32, Child> = HashMap::new();
    let mut scanned = false;
    let mut said_full = false;
    loop {
        bgworker::heed_signals(1);
        let mut next: Option<Instant> = None;
        if settings::worker() {
            if !scanned {
                scanned = scan();
            }
            next = tend(&mut children, &mut said_full);
        }
        bgworker::sleep(next.map(|at| at.saturating_duration_since(Instant::now())));
    }
}

fn existing() -> Option<Vec<u32>> {
    bgworker::transaction(Duration::from_secs(60), databases::connectable).ok()
}

fn scan() -> bool {
    let Some(found) = existing() else { return false };
    for database in found {
        match roster::find_or_add(database) {
            Some(entry) => entry.set_wanted(true),
            None => bgworker::log(
                pgrx::PgLogLevel::WARNING,
                "awa_queue: too many databases, some get no worker",
                None,
                Some("Run CALL awa.maintain() there by cron."),
            ),
        }
    }
    true
}

/// Starts what is missing; returns when to look again.
fn tend(children: &mut HashMap<u32, Child>, said_full: &mut bool) -> Option<Instant> {
    let now = Instant::now();
    let mut next: Option<Instant> = None;
    let mut soon = |at: Instant| next = Some(next.map_or(at, |n| n.min(at)));
    let mut looking = 0;
    for entry in roster::entries() {
        let child = children.entry(entry.database()).or_insert_with(|| Child {
            handle: None,
            started: now,
            failures: 0,
            not_before: now,
        });
        if child.handle.as_ref().is_some_and(Handle::has_stopped) {
            child.handle = None;
            let ran = now - child.started;
            // One that ended in order while it is wanted was sent away, and comes back at once when it may.
            let failed = entry.take_failed() || (entry.is_wanted() && !entry.is_held() && ran < SHORT);
            if !failed || ran > HEALTHY {
                child.failures = 0;
            }
            child.failures += u32::from(failed);
            child.not_before = now + backoff(child.failures);
        }
        if child.handle.is_some() && !entry.is_confirmed() {
            looking += 1;
        }
    }
    for entry in roster::entries() {
        let Some(child) = children.get_mut(&entry.database()) else {
            continue;
        };
        if child.handle.is_some() || !entry.is_wanted() || entry.is_held() || entry.worker() != 0 {
            continue;
        }
        if now < child.not_before {
            soon(child.not_before);
            continue;
        }
        if looking >= MOST_LOOKING {
            break; // one of them tells when it has found out
        }
        if child.failures > 0 && existing().is_some_and(|e| !e.contains(&entry.database())) {
            entry.forget(entry.database());
            continue;
        }
        entry.set_confirmed(false);
        child.started = now;
        child.handle = bgworker::start_worker(entry);
        if child.handle.is_some() {
            looking += 1;
            *said_full = false;
        } else {
            child.not_before = now + Duration::from_secs(10);
            soon(child.not_before);
            if !std::mem::replace(said_full, true) {
                bgworker::log(
                    pgrx::PgLogLevel::WARNING,
                    "awa_queue: no background process is free for a worker",
                    None,
                    Some("Raise max_worker_processes: one for the launcher and one for each database with the extension."),
                );
            }
        }
    }
    next
}

fn backoff(failures: u32) -> Duration {
    if failures == 0 {
        return Duration::ZERO;
    }
    Duration::from_secs(1 << (failures - 1).min(6)).min(LONGEST_BACKOFF)
}

// ---------------------------------------------------------------- worker

/// What a session of ours never takes from the role or the database.
const SESSION_SETTINGS: &[(&str, &str)] = &[
    ("default_transaction_isolation", "read committed"),
    ("default_transaction_read_only", "off"),
    ("default_transaction_deferrable", "off"),
    ("statement_timeout", "0"),
    ("lock_timeout", "1s"),
    ("idle_in_transaction_session_timeout", "0"),
    ("idle_session_timeout", "0"),
    #[cfg(any(feature = "pg17", feature = "pg18"))]
    ("transaction_timeout", "0"),
    ("search_path", "pg_catalog, pg_temp"),
    ("row_security", "off"),
    ("session_replication_role", "origin"),
    ("application_name", "awa_queue worker"),
];

/// A worker's life.
pub fn work(entry: &'static Entry) {
    if bgworker::is_binary_upgrade() {
        return;
    }
    bgworker::set_settings(SESSION_SETTINGS, false);
    // Before the look: who creates the extension after it wants a worker again.
    entry.set_wanted(false);
    // Each look is as old as the activity before it: a verb that commits in the middle is looked at again.
    let mut looked_at = entry.activity();
    let mut closed = upkeep::check();
    if closed == Some(Closed::NotInstalled) {
        bgworker::flush_statistics();
        return;
    }
    entry.set_wanted(true);
    entry.set_confirmed(true);
    let mut engine = Engine::new();
    let mut said = None;
    loop {
        bgworker::heed_signals(0);
        if !settings::worker() || entry.is_held() {
            return; // still wanted: the launcher starts another when it may
        }
        let (activity, calls) = (entry.activity(), entry.calls());
        if closed.is_some() && activity != looked_at {
            // A verb takes the database over, an update of the extension ends in one.
            looked_at = activity;
            closed = upkeep::check();
            engine.all_due();
        }
        if closed.is_none() {
            looked_at = activity;
            closed = engine.pass(activity, calls);
        }
        if closed == Some(Closed::NotInstalled) {
            entry.set_wanted(false);
            looked_at = entry.activity();
            closed = upkeep::check();
            if closed == Some(Closed::NotInstalled) {
                bgworker::flush_statistics();
                return;
            }
            entry.set_wanted(true);
        }
        bgworker::flush_statistics();
        if let Some(why) = &closed {
            say_once(&mut said, why);
            engine.nothing_due(activity, calls);
            sleep_until_activity(entry, looked_at, calls, None);
            continue;
        }
        said = None;
        match engine.next_due(activity) {
            Some(at) => {
                let wait = at - time::now();
                if wait > 0 {
                    // Calls and activity beyond that are seen then: the first sets the latch, the second
                    // only where nothing else wakes the worker soon.
                    sleep_until_activity(entry, activity, calls, Some(wait));
                }
            }
            None => sleep_until_activity(entry, activity, calls, None),
        }
    }
}

/// Sleeps for at most `limit` microseconds, or until a transaction did something or the worker is called.
fn sleep_until_activity(entry: &Entry, activity: u64, calls: u64, limit: Option<i64>) {
    // Registered before the last look, so that nothing is missed in between. A short sleep is not cut short
    // by each of a thousand commits a second.
    let short = limit.is_some_and(|l| l <= time::SECOND);
    if !short {
        entry.fall_asleep();
    }
    if (short || entry.activity() == activity) && entry.calls() == calls {
        let limit = limit.map(|l| Duration::from_micros(l.max(0) as u64));
        bgworker::sleep(limit);
    }
    entry.wake_up();
}

fn say_once(said: &mut Option<Closed>, why: &Closed) {
    if said.as_ref() == Some(why) {
        return;
    }
    *said = Some(why.clone());
    match why {
        Closed::Versions(message) => bgworker::log(
            pgrx::PgLogLevel::WARNING,
            &format!("awa_queue: the worker does nothing: {message}"),
            None,
            Some("Restart the server after the package was upgraded, then ALTER EXTENSION awa_queue UPDATE."),
        ),
        Closed::Foreign => bgworker::log(
            pgrx::PgLogLevel::LOG,
            "awa_queue: the worker waits for the first use of the queues here",
            Some("The tables are new, restored or cloned; nothing is done before a verb or awa_internal.adopt()."),
            None,
        ),
        Closed::NotInstalled => {}
    }
}
