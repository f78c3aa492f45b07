//! A queue: its policy, where it comes from, and the first use that creates it.

use crate::backoff::Backoff;
use crate::error::{Error, Result};
use crate::pg::datum::{self, Varlena};
use crate::pg::index;
use crate::pg::latest::Latest;
use crate::pg::lock::{self, Class, Mode};
use crate::pg::owner;
use crate::pg::scan::{Cond, Direction, Scan};
use crate::pg::table::{Access, Table};
use crate::pg::time::{self, Interval};
use crate::pg::waiters;
use crate::pg::xact;
use crate::ring::View;
use pgrx::Spi;
use serde::{Deserialize, Serialize};
use std::cell::RefCell;
use std::collections::{HashMap, HashSet};
use std::rc::Rc;
use std::time::Duration;

pub const MAX_NAME_CHARS: usize = 200;
const CREATION_WAIT: Duration = Duration::from_secs(1);

/// The settings as they are stored: only what differs from the defaults.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(default)]
pub struct Settings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shards: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ordering: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_attempts: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lease: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub retention: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failed_retention: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub backoff: Option<BackoffSettings>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dead_letters: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub aging_interval: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_args_bytes: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub notify: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<String>,
}

/// The setting `backoff`: absent keys keep their default.
#[derive(Clone, Debug, Default, Deserialize, Serialize, PartialEq)]
#[serde(default, deny_unknown_fields)]
pub struct BackoffSettings {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub base: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub factor: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jitter: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<String>,
}

impl BackoffSettings {
    fn policy(&self) -> Backoff {
        let default = Backoff::default();
        let micros = |text: &Option<String>, default: i64| {
            text.as_deref()
                .map_or(default, |t| time::parse_interval(t).approx_micros())
        };
        Backoff {
            base: micros(&self.base, default.base),
            factor: self.factor.unwrap_or(default.factor),
            jitter: self.jitter.unwrap_or(default.jitter),
            max: micros(&self.max, default.max),
        }
    }
}

pub const SETTING_NAMES: &[&str] = &[
    "shards",
    "ordering",
    "priority",
    "max_attempts",
    "lease",
    "retention",
    "failed_retention",
    "backoff",
    "dead_letters",
    "aging_interval",
    "max_args_bytes",
    "notify",
    "description",
];

/// Settings of the contract whose effect is not built yet: refused rather than ignored.
pub const LATER_SETTINGS: &[&str] = &[
    "max_running",
    "key_concurrency",
    "rate_limit",
    "rate_burst",
    "key_rate_limit",
    "max_depth",
    "on_full",
];

pub const DEFAULT_PRIORITY: u8 = 2;
pub const DEFAULT_MAX_ATTEMPTS: i16 = 25;
pub const DEFAULT_LEASE: Interval = Interval::seconds(300);
pub const DEFAULT_RETENTION: Interval = Interval {
    months: 0,
    days: 1,
    micros: 0,
};
pub const DEFAULT_AGING: Interval = Interval::seconds(60);

impl Settings {
    /// Reads settings from a JSON object; `base` is what they change. A null value means the default.
    pub fn merge(base: &Settings, change: &serde_json::Value) -> Result<Settings> {
        let serde_json::Value::Object(change) = change else {
            return Err(Error::bad_value(
                "settings must be a JSON object",
                "Pass an object such as '{\"shards\": 4}'.",
            ));
        };
        for key in change.keys() {
            if LATER_SETTINGS.contains(&key.as_str()) {
                return Err(Error::NotBuilt(format!("the queue setting \"{key}\"")));
            }
            if !SETTING_NAMES.contains(&key.as_str()) {
                return Err(Error::UnknownKey {
                    argument: "settings",
                    key: key.clone(),
                    known: SETTING_NAMES,
                });
            }
        }
        let stored = serde_json::to_value(base).map_err(|e| Error::Internal(e.to_string()))?;
        let serde_json::Value::Object(mut merged) = stored else {
            return Err(Error::Internal("settings are no object".to_string()));
        };
        for (key, value) in change {
            check_type(key, value)?;
            if value.is_null() {
                merged.remove(key);
            } else {
                merged.insert(key.clone(), value.clone());
            }
        }
        let settings: Settings = serde_json::from_value(serde_json::Value::Object(merged)).map_err(|e| {
            Error::bad_value(
                format!("settings can not be read: {e}"),
                "backoff is an object with base, factor, jitter and max, such as {\"base\": \"1 s\", \"factor\": 2}.",
            )
        })?;
        settings.check()?;
        Ok(settings)
    }

    fn check(&self) -> Result<()> {
        in_range("shards", self.shards, 1, 64)?;
        in_range("priority", self.priority, 1, 4)?;
        in_range("max_attempts", self.max_attempts, 1, 1000)?;
        in_range("max_args_bytes", self.max_args_bytes, 1, 256 * 1024 * 1024)?;
        if let Some(backoff) = &self.backoff {
            let share = |v: Option<f64>, low: f64, high: f64| v.is_none_or(|v| (low..=high).contains(&v));
            if !share(backoff.factor, 1.0, 100.0) || !share(backoff.jitter, 0.0, 1.0) {
                return Err(Error::bad_value(
                    "backoff: factor must be between 1 and 100, jitter between 0 and 1",
                    "Leave them out for the defaults 2 and 0.25.",
                ));
            }
        }
        if let Some(ordering) = &self.ordering {
            if ordering != "relaxed" && ordering != "strict" {
                return Err(Error::bad_value(
                    format!("ordering must be relaxed or strict, not \"{ordering}\""),
                    "relaxed passes over jobs whose transaction is still open, strict waits for it.",
                ));
            }
        }
        Ok(())
    }
}

/// Settings that are whole numbers; the others are text.
const NUMBERS: &[&str] = &["shards", "priority", "max_attempts", "max_args_bytes"];

/// Settings that are on or off.
const SWITCHES: &[&str] = &["dead_letters", "notify"];

fn check_type(key: &str, value: &serde_json::Value) -> Result<()> {
    let (fits, expected) = if NUMBERS.contains(&key) {
        (value.as_i64().is_some(), "a whole number")
    } else if SWITCHES.contains(&key) {
        (value.is_boolean(), "true or false")
    } else if key == "backoff" {
        (value.is_object(), "an object")
    } else {
        (value.is_string(), "text")
    };
    if fits || value.is_null() {
        return Ok(());
    }
    Err(Error::bad_value(
        format!("{key} must be {expected}, not {value}"),
        "lease, retention and aging_interval are intervals as text, such as \"5 min\".",
    ))
}

fn in_range(name: &str, value: Option<i64>, low: i64, high: i64) -> Result<()> {
    match value {
        Some(v) if v < low || v > high => Err(Error::bad_value(
            format!("{name} must be between {low} and {high}, not {v}"),
            "Leave it out for the default.",
        )),
        _ => Ok(()),
    }
}

/// Checks the settings that are intervals; they are parsed by PostgreSQL itself.
pub fn check_intervals(settings: &Settings) -> Result<()> {
    let backoff = settings.backoff.clone().unwrap_or_default();
    for (name, value, zero) in [
        ("lease", &settings.lease, false),
        ("retention", &settings.retention, true),
        ("failed_retention", &settings.failed_retention, true),
        ("backoff.base", &backoff.base, true),
        ("backoff.max", &backoff.max, true),
        ("aging_interval", &settings.aging_interval, true),
    ] {
        if let Some(text) = value {
            let micros = time::parse_interval(text).approx_micros();
            if micros < 0 || (micros == 0 && !zero) {
                return Err(Error::bad_value(
                    format!(
                        "{name} must not be negative{}",
                        if zero { "" } else { " or zero" }
                    ),
                    "Pass an interval such as '5 min'.",
                ));
            }
        }
    }
    Ok(())
}

/// What the verbs need to know of a queue.
#[derive(Clone, Debug)]
pub struct Queue {
    pub id: i32,
    pub name: String,
    pub paused: bool,
    pub shards: u8,
    pub strict: bool,
    pub priority: u8,
    pub max_attempts: i16,
    pub lease: Interval,
    pub backoff: Backoff,
    /// Whether jobs that fail for good are kept in dead_letters.
    pub dead_letters: bool,
    /// Microseconds of waiting that raise a job's priority by one; 0: never.
    pub aging: i64,
    /// None: the setting awa_queue.max_args_bytes decides.
    pub max_args_bytes: Option<usize>,
    /// Whether new jobs are announced by NOTIFY.
    pub notify: bool,
}

thread_local! {
    static BY_NAME: RefCell<HashMap<String, Rc<Queue>>> = RefCell::new(HashMap::new());
    static BY_ID: RefCell<HashMap<i32, Rc<Queue>>> = RefCell::new(HashMap::new());
    static WARNED: RefCell<HashSet<String>> = RefCell::new(HashSet::new());
}

fn refresh() {
    xact::accept_invalidations();
    if !xact::queues_are_valid() {
        BY_NAME.with(|m| m.borrow_mut().clear());
        BY_ID.with(|m| m.borrow_mut().clear());
        xact::set_queues_valid(true);
    }
}

fn remember(queue: Queue) -> Rc<Queue> {
    let queue = Rc::new(queue);
    BY_NAME.with(|m| m.borrow_mut().insert(queue.name.clone(), queue.clone()));
    BY_ID.with(|m| m.borrow_mut().insert(queue.id, queue.clone()));
    queue
}

/// The queue of a name, latest committed state; None where there is none.
pub fn find(view: &View, name: &str) -> Result<Option<Rc<Queue>>> {
    refresh();
    if let Some(q) = BY_NAME.with(|m| m.borrow().get(name).cloned()) {
        return Ok(Some(q));
    }
    let key = Cond::TextEq(datum::text(name));
    Ok(read(view, 2, key)?.map(|(queue, _)| remember(queue)))
}

/// The queue of an id; None where there is none.
pub fn find_by_id(view: &View, id: i32) -> Result<Option<Rc<Queue>>> {
    refresh();
    if let Some(q) = BY_ID.with(|m| m.borrow().get(&id).cloned()) {
        return Ok(Some(q));
    }
    Ok(read(view, 1, Cond::IntEq(id))?.map(|(queue, _)| remember(queue)))
}

/// The stored settings of a queue and its policy, read anew.
pub fn find_with_settings(view: &View, name: &str) -> Result<Option<(Queue, Settings)>> {
    read(view, 2, Cond::TextEq(datum::text(name)))
}

fn read(view: &View, column: i16, key: Cond) -> Result<Option<(Queue, Settings)>> {
    let latest = Latest::take_active();
    let table = Rc::new(Table::open(view.tables.queues, Access::Read));
    let index = index::lookup(&table, &[column])?;
    let mut scan = Scan::latest(&table, &index, 1, &latest);
    scan.seek(&[key]);
    if !scan.next(Direction::Forward) {
        return Ok(None);
    }
    let stored = scan
        .varlena(3)
        .map_or_else(|| "{}".to_string(), datum::jsonb_to_text);
    let settings: Settings = serde_json::from_str(&stored)
        .map_err(|e| Error::Internal(format!("stored settings of a queue can not be read: {e}")))?;
    let queue = policy(
        scan.i32(1),
        scan.text(2).unwrap_or_default(),
        scan.opt_i64(4).is_some(),
        &settings,
    );
    Ok(Some((queue, settings)))
}

fn policy(id: i32, name: String, paused: bool, settings: &Settings) -> Queue {
    let interval =
        |text: &Option<String>, default: Interval| text.as_deref().map_or(default, time::parse_interval);
    Queue {
        id,
        name,
        paused,
        shards: settings.shards.unwrap_or(1) as u8,
        strict: settings.ordering.as_deref() == Some("strict"),
        priority: settings.priority.unwrap_or(i64::from(DEFAULT_PRIORITY)) as u8,
        max_attempts: settings.max_attempts.unwrap_or(i64::from(DEFAULT_MAX_ATTEMPTS)) as i16,
        lease: interval(&settings.lease, DEFAULT_LEASE),
        backoff: settings
            .backoff
            .as_ref()
            .map_or_else(Backoff::default, BackoffSettings::policy),
        dead_letters: settings.dead_letters.unwrap_or(true),
        aging: interval(&settings.aging_interval, DEFAULT_AGING).approx_micros(),
        max_args_bytes: settings.max_args_bytes.map(|b| b as usize),
        notify: settings.notify.unwrap_or(false),
    }
}

/// Refuses a name that no queue may have.
pub fn check_name(name: &str, what: &str) -> Result<()> {
    if name.is_empty() {
        return Err(Error::bad_value(
            format!("{what} must not be empty"),
            "Pass a name of 1 to 200 characters.",
        ));
    }
    let chars = name.chars().count();
    if chars > MAX_NAME_CHARS {
        return Err(Error::limit(
            format!("{what} has {chars} characters, more than {MAX_NAME_CHARS}"),
            "Choose a shorter name.",
        ));
    }
    Ok(())
}

/// The queue to enqueue into, created with the defaults at its first use.
pub fn find_or_create(view: &View, name: &str) -> Result<Rc<Queue>> {
    check_name(name, "queue")?;
    if let Some(queue) = find(view, name)? {
        return Ok(queue);
    }
    if !crate::settings::auto_create_queues() {
        return Err(Error::NoSuchQueue(name.to_string()));
    }
    create(view, name, &Settings::default(), true)?;
    find(view, name)?.ok_or_else(|| Error::Internal("a queue just created is not there".to_string()))
}

/// Creates a queue; false where it exists. Waits at most a second for another transaction that is creating
/// it, and never in the unique index, where it would wait for that transaction's end.
pub fn create(view: &View, name: &str, settings: &Settings, auto: bool) -> Result<bool> {
    let key = datum::hash_text(datum::text(name));
    if !lock::wait_for_transaction(Class::Queue, key, Mode::Exclusive, CREATION_WAIT) {
        return Err(Error::QueueBeingCreated(name.to_string()));
    }
    // Whoever created it before has committed (or rolled back) by now: the lock is held to the end.
    xact::set_queues_valid(false);
    if find(view, name)?.is_some() {
        return Ok(false);
    }
    let stored = serde_json::to_string(settings).map_err(|e| Error::Internal(e.to_string()))?;
    xact::forget_queues_on_abort();
    owner::as_owner_of(view.tables.queues, || {
        Spi::run_with_args(
            "INSERT INTO awa_internal.queues (queue_id, name, settings, auto_created)
             VALUES (pg_catalog.nextval('awa_internal.queue_ids')::pg_catalog.int4, $1, $2::pg_catalog.jsonb, $3)",
            &[name.into(), stored.as_str().into(), auto.into()],
        )
    })
    .map_err(|e| Error::Internal(format!("creating a queue: {e}")))?;
    xact::invalidate_queues(view.tables.queues);
    xact::set_queues_valid(false);
    waiters::note_changed(waiters::NEW_QUEUE);
    Ok(true)
}

/// Warns once a session that a queue is not there.
pub fn warn_unknown(name: &str) {
    if WARNED.with(|w| w.borrow_mut().insert(name.to_string())) {
        crate::pg::warn::warning(
            &format!("queue \"{name}\" does not exist"),
            "It is created by the first awa.enqueue() or by awa.create_queue(); check the name.",
        );
    }
}

/// The effective settings as JSON, defaults filled in.
pub fn effective(settings: &Settings) -> serde_json::Value {
    serde_json::json!({
        "shards": settings.shards.unwrap_or(1),
        "ordering": settings.ordering.as_deref().unwrap_or("relaxed"),
        "priority": settings.priority.unwrap_or(i64::from(DEFAULT_PRIORITY)),
        "max_attempts": settings.max_attempts.unwrap_or(i64::from(DEFAULT_MAX_ATTEMPTS)),
        "lease": settings.lease.as_deref().unwrap_or("5 min"),
        "retention": settings.retention.as_deref().unwrap_or("1 d"),
        "failed_retention": settings.failed_retention.as_deref().unwrap_or("14 d"),
        "backoff": effective_backoff(settings),
        "dead_letters": settings.dead_letters.unwrap_or(true),
        "aging_interval": settings.aging_interval.as_deref().unwrap_or("60 s"),
        "max_args_bytes": settings.max_args_bytes,
        "notify": settings.notify.unwrap_or(false),
        "description": settings.description,
    })
}

fn effective_backoff(settings: &Settings) -> serde_json::Value {
    let backoff = settings.backoff.clone().unwrap_or_default();
    let default = Backoff::default();
    serde_json::json!({
        "base": backoff.base.as_deref().unwrap_or("1 s"),
        "factor": backoff.factor.unwrap_or(default.factor),
        "jitter": backoff.jitter.unwrap_or(default.jitter),
        "max": backoff.max.as_deref().unwrap_or("24 h"),
    })
}

/// Which shard an ordering key belongs to: a stable hash, so that a key's jobs stay in order.
pub fn shard_of_key(queue: &Queue, key: Varlena) -> u8 {
    (datum::hash_text(key) % u64::from(queue.shards)) as u8
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn settings_change_and_go_back_to_their_default() {
        let a = Settings::merge(&Settings::default(), &json!({"shards": 4, "ordering": "strict"})).unwrap();
        assert_eq!((a.shards, a.ordering.as_deref()), (Some(4), Some("strict")));
        let b = Settings::merge(&a, &json!({"shards": null, "priority": 1})).unwrap();
        assert_eq!(
            (b.shards, b.priority, b.ordering.as_deref()),
            (None, Some(1), Some("strict"))
        );
    }

    #[test]
    fn what_is_not_known_or_out_of_range_is_refused() {
        let base = Settings::default();
        assert!(matches!(
            Settings::merge(&base, &json!({"shard": 4})),
            Err(Error::UnknownKey { .. })
        ));
        assert!(matches!(
            Settings::merge(&base, &json!({"max_depth": 10})),
            Err(Error::NotBuilt(_))
        ));
        for bad in [
            json!({"shards": 65}),
            json!({"shards": 0}),
            json!({"priority": 5}),
            json!({"max_attempts": 0}),
            json!({"ordering": "loose"}),
            json!({"shards": "four"}),
            json!({"notify": "yes"}),
            json!([1]),
            json!("x"),
        ] {
            assert!(
                matches!(Settings::merge(&base, &bad), Err(Error::BadValue { .. })),
                "{bad}"
            );
        }
    }

    #[test]
    fn names_are_counted_in_characters() {
        assert!(check_name(&"ä".repeat(200), "queue").is_ok());
        assert!(check_name("a \"quoted\" Name", "queue").is_ok());
        assert!(matches!(
            check_name(&"a".repeat(201), "queue"),
            Err(Error::Limit { .. })
        ));
        assert!(matches!(check_name("", "queue"), Err(Error::BadValue { .. })));
    }
}
