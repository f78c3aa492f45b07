//! Runs steps against a server, one statement at a time, and lets the model judge each.

use crate::model::{ClaimRow, Finish, FinishRow, Micros, Model, Res, Seen, When, SECOND};
use crate::program::{Spec, Step, Tag, Verb};
use postgres::{Client, NoTls, SimpleQueryMessage, SimpleQueryRow};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{SystemTime, UNIX_EPOCH};

pub const SESSIONS: usize = 4;
pub const WORKERS: [&str; 2] = ["anna", "ben"];

/// What a statement raised.
#[derive(Debug)]
struct Raised {
    code: String,
    message: String,
}

type Rows = Result<Vec<SimpleQueryRow>, Raised>;

pub struct Driver {
    dsn: String,
    database: String,
    pub model: Model,
    sessions: Vec<Client>,
    /// Seconds that the queue's clock is ahead.
    pub offset: i64,
    features: BTreeSet<String>,
    /// The last emptying of each slot.
    emptied: BTreeMap<u8, i64>,
    /// Statements as they were run, for whoever looks into a failure.
    pub log: Vec<String>,
}

fn literal(s: &str) -> String {
    format!("'{}'", s.replace('\'', "''"))
}

fn seconds(v: Option<i64>) -> String {
    v.map_or("NULL".to_string(), |v| format!("interval '{v} s'"))
}

fn bigints(v: &[i64]) -> String {
    let list: Vec<String> = v.iter().map(i64::to_string).collect();
    format!("'{{{}}}'::bigint[]", list.join(","))
}

const EPOCH_OF: &str = "(extract(epoch from {})*1000000)::bigint";

fn micros_of(column: &str) -> String {
    EPOCH_OF.replace("{}", column)
}

fn get<T: std::str::FromStr>(row: &SimpleQueryRow, column: &str) -> Res<T> {
    row.try_get(column)
        .ok()
        .flatten()
        .ok_or_else(|| format!("column {column} is null"))?
        .parse()
        .map_err(|_| format!("column {column} is {:?}", row.get(column)))
}

fn maybe<T: std::str::FromStr>(row: &SimpleQueryRow, column: &str) -> Option<T> {
    row.try_get(column).ok().flatten()?.parse().ok()
}

fn connect(dsn: &str, database: &str) -> Res<Client> {
    Client::connect(&format!("{dsn} dbname={database}"), NoTls).map_err(|e| format!("connect: {e}"))
}

impl Driver {
    /// A driver with a database of its own.
    pub fn new(dsn: &str, database: &str) -> Res<Driver> {
        let said = |e: postgres::Error| format!("setting up: {e}");
        connect(dsn, "postgres")?
            .batch_execute(&format!("CREATE DATABASE {database}"))
            .map_err(said)?;
        let mut driver = Driver {
            dsn: dsn.to_string(),
            database: database.to_string(),
            model: Model::new(SESSIONS),
            sessions: Vec::new(),
            offset: 0,
            features: BTreeSet::new(),
            emptied: BTreeMap::new(),
            log: Vec::new(),
        };
        let mut admin = connect(dsn, database)?;
        admin.batch_execute("CREATE EXTENSION awa_queue").map_err(said)?;
        for q in &driver.model.queues {
            let sql = format!(
                "SELECT awa.create_queue({}, {})",
                literal(q.name),
                literal(q.settings)
            );
            admin.batch_execute(&sql).map_err(said)?;
        }
        for feature in ["heartbeat", "expire_leases", "cancel", "retry"] {
            let sql = format!("SELECT awa.has_feature('{feature}') AS has");
            for message in admin.simple_query(&sql).map_err(said)? {
                if let SimpleQueryMessage::Row(row) = message {
                    if row.get("has") == Some("t") {
                        driver.features.insert(feature.to_string());
                    }
                }
            }
        }
        for _ in 0..SESSIONS {
            let session = driver.session()?;
            driver.sessions.push(session);
        }
        Ok(driver)
    }

    pub fn has(&self, feature: &str) -> bool {
        self.features.contains(feature)
    }

    fn session(&self) -> Res<Client> {
        let mut client = connect(&self.dsn, &self.database)?;
        // What waits for another session would wait for ever: it gives up at once.
        client
            .batch_execute(&format!(
                "SET lock_timeout = 30; SET statement_timeout = '20s'; SET client_min_messages = error;
                 SET awa_queue.clock_offset = {}",
                self.offset * 1000
            ))
            .map_err(|e| format!("session: {e}"))?;
        Ok(client)
    }

    /// Ends the sessions and drops the database.
    pub fn drop(mut self) {
        self.sessions.clear();
        if let Ok(mut admin) = connect(&self.dsn, "postgres") {
            let _ = admin.batch_execute(&format!("DROP DATABASE IF EXISTS {} WITH (FORCE)", self.database));
        }
    }

    fn now(&self) -> Micros {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        now.as_micros() as i64 + self.offset * SECOND
    }

    /// Runs one statement; when it ran is by the clock of the sessions.
    fn run(&mut self, s: usize, sql: &str) -> Res<(Rows, When)> {
        let from = self.now();
        let result = self.sessions[s].simple_query(sql);
        let when = (from, self.now());
        self.log.push(format!("{s}: {sql}"));
        match result {
            Ok(messages) => {
                let rows = messages.into_iter().filter_map(|m| match m {
                    SimpleQueryMessage::Row(row) => Some(row),
                    _ => None,
                });
                Ok((Ok(rows.collect()), when))
            }
            Err(e) => match e.as_db_error() {
                Some(db) => {
                    let raised = Raised {
                        code: db.code().code().to_string(),
                        message: db.message().to_string(),
                    };
                    self.log.push(format!("   -> {} {}", raised.code, raised.message));
                    Ok((Err(raised), when))
                }
                None => Err(format!("the connection broke: {e}")),
            },
        }
    }

    /// A statement that must not fail.
    fn rows(&mut self, s: usize, sql: &str) -> Res<(Vec<SimpleQueryRow>, When)> {
        let (rows, when) = self.run(s, sql)?;
        match rows {
            Ok(rows) => Ok((rows, when)),
            Err(e) => Err(format!("{}: {} (in {sql})", e.code, e.message)),
        }
    }

    fn finish_rows(&self, rows: &[SimpleQueryRow]) -> Res<Vec<FinishRow>> {
        rows.iter()
            .map(|r| {
                Ok(FinishRow {
                    receipt: get(r, "receipt")?,
                    job_id: maybe(r, "job_id"),
                    attempt: maybe(r, "attempt"),
                    state: get(r, "state")?,
                    run_at: maybe(r, "run_at"),
                    changed: get::<String>(r, "changed")? == "t",
                })
            })
            .collect()
    }

    fn claim_rows(&self, rows: &[SimpleQueryRow]) -> Res<Vec<ClaimRow>> {
        rows.iter()
            .map(|r| {
                Ok(ClaimRow {
                    receipt: get(r, "receipt")?,
                    job_id: get(r, "job_id")?,
                    queue: get(r, "queue")?,
                    tag: get(r, "args")?,
                    priority: get(r, "priority")?,
                    attempt: get(r, "attempt")?,
                    max_attempts: get(r, "max_attempts")?,
                    has_error: get::<String>(r, "has_error")? == "t",
                    lease_until: get(r, "lease_until")?,
                })
            })
            .collect()
    }

    fn claim_columns() -> String {
        format!(
            "SELECT receipt, job_id, queue, args, priority, attempt, max_attempts, last_error IS NOT NULL AS has_error, {} AS lease_until",
            micros_of("lease_until")
        )
    }

    fn finish_columns() -> String {
        format!(
            "SELECT receipt, job_id, attempt, state, {} AS run_at, changed",
            micros_of("run_at")
        )
    }

    fn queue_names(&self, queues: &[usize]) -> String {
        let names: Vec<String> = queues
            .iter()
            .map(|q| literal(self.model.queues[*q].name))
            .collect();
        format!("ARRAY[{}]", names.join(", "))
    }

    /// Whether a step can be run as things stand. What a shrunk program can not do any more is left out.
    fn is_possible(&self, step: &Step) -> bool {
        use Step::*;
        let m = &self.model;
        let idle = |s: usize| !m.sessions[s].in_transaction();
        let ready = |s: usize| !m.sessions[s].failed;
        match step {
            Begin { s, .. }
            | Reconnect { s }
            | Maintain { s }
            | Seal { s }
            | Close { s, .. }
            | Empty { s, .. } => idle(*s),
            Commit { s } | Rollback { s } => !idle(*s),
            Savepoint { s } => !idle(*s) && ready(*s),
            RollbackTo { s } => m.sessions[*s].savepoints() > 0,
            ReleaseSavepoint { s } => m.sessions[*s].savepoints() > 0 && ready(*s),
            Enqueue { s, job } => ready(*s) && !m.jobs.contains_key(&job.tag),
            Batch { s, jobs } | Jobs { s, jobs } => {
                ready(*s) && !jobs.is_empty() && jobs.iter().all(|j| !m.jobs.contains_key(&j.tag))
            }
            Claim { s, .. } | Finish { s, .. } | CompleteAndClaim { s, .. } | Check { s } => ready(*s),
            Heartbeat { s, receipts, .. } => {
                self.has("heartbeat")
                    && ready(*s)
                    && !m.sessions[*s].repeatable
                    && !m.is_touched_by_others(*s, &m.receipts(receipts))
            }
            ExpireLeases { s, .. } => self.has("expire_leases") && idle(*s),
            // Where an entry lies is asked by a plain statement, which must not have an old snapshot.
            Cancel { s, .. } => self.has("cancel") && ready(*s) && !m.sessions[*s].repeatable,
            Retry { s, .. } => self.has("retry") && ready(*s) && !m.sessions[*s].repeatable,
            Pause { s, .. } | Resume { s, .. } => idle(*s),
            Forward { by } => (self.offset + by) * 1000 < i64::from(i32::MAX),
        }
    }

    /// Runs a step and compares; false where it was not possible.
    pub fn step(&mut self, step: &Step) -> Res<bool> {
        if !self.is_possible(step) {
            return Ok(false);
        }
        match step.clone() {
            Step::Begin { s, repeatable } => {
                let level = if repeatable {
                    "REPEATABLE READ"
                } else {
                    "READ COMMITTED"
                };
                self.rows(s, &format!("BEGIN ISOLATION LEVEL {level}"))?;
                if repeatable {
                    self.rows(s, "SELECT 1")?; // its snapshot is taken now
                }
                self.model.begin(s, repeatable);
            }
            Step::Commit { s } => {
                self.rows(s, "COMMIT")?;
                self.model.commit(s);
                self.set_clock(s)?; // SET is undone, too
            }
            Step::Rollback { s } => {
                self.rows(s, "ROLLBACK")?;
                self.model.rollback(s);
                self.set_clock(s)?; // SET is undone, too
            }
            Step::Savepoint { s } => {
                self.rows(s, &format!("SAVEPOINT s{}", self.model.sessions[s].savepoints()))?;
                self.model.savepoint(s);
            }
            Step::RollbackTo { s } => {
                self.rows(
                    s,
                    &format!("ROLLBACK TO s{}", self.model.sessions[s].savepoints() - 1),
                )?;
                self.model.rollback_to(s);
                self.set_clock(s)?; // SET is undone, too
            }
            Step::ReleaseSavepoint { s } => {
                self.rows(
                    s,
                    &format!("RELEASE s{}", self.model.sessions[s].savepoints() - 1),
                )?;
                self.model.release_savepoint(s);
            }
            Step::Reconnect { s } => {
                self.sessions[s] = self.session()?;
            }
            Step::Enqueue { s, job } => self.enqueue(s, &job)?,
            Step::Batch { s, jobs } => self.enqueue_batch(s, &jobs)?,
            Step::Jobs { s, jobs } => self.enqueue_jobs(s, &jobs)?,
            Step::Claim {
                s,
                queues,
                n,
                lease,
                worker,
            } => self.claim(s, &queues, n, lease, &worker)?,
            Step::Finish {
                s,
                verb,
                receipts,
                strict,
                reason,
                permanent,
                delay,
            } => {
                let what = Finish {
                    verb,
                    strict: strict && matches!(verb, Verb::Complete | Verb::Fail),
                    reason: reason && matches!(verb, Verb::Fail | Verb::CancelClaimed),
                    permanent: permanent && verb == Verb::Fail,
                    delay: match verb {
                        Verb::Snooze => Some(delay.unwrap_or(60) * SECOND),
                        Verb::Fail => delay.map(|d| d * SECOND),
                        _ => None,
                    },
                };
                let receipts = self.model.receipts(&receipts);
                self.finish(s, &receipts, &what)?;
            }
            Step::CompleteAndClaim {
                s,
                receipts,
                strict,
                queues,
                n,
            } => {
                let receipts = self.model.receipts(&receipts);
                self.complete_and_claim(s, &receipts, strict, &queues, n)?;
            }
            Step::Heartbeat { s, receipts, lease } => {
                let receipts = self.model.receipts(&receipts);
                let sql = format!(
                    "SELECT receipt, status, {} AS lease_until FROM awa.heartbeat({}, {})",
                    micros_of("lease_until"),
                    bigints(&receipts),
                    seconds(lease)
                );
                let (rows, when) = self.rows(s, &sql)?;
                let rows = rows
                    .iter()
                    .map(|r| Ok((get(r, "receipt")?, get(r, "status")?, maybe(r, "lease_until"))))
                    .collect::<Res<Vec<_>>>()?;
                self.model
                    .heartbeat(s, &receipts, lease.map(|l| l * SECOND), &rows, when)?;
            }
            Step::ExpireLeases { s, worker } => {
                let sql = format!("SELECT awa.expire_leases({}) AS n", literal(&worker));
                let (rows, when) = self.rows(s, &sql)?;
                let seen = self.all_jobs(s)?;
                self.model
                    .expire_leases(s, &worker, get(&rows[0], "n")?, when, &seen)?;
            }
            Step::Cancel { s, jobs, reason } => {
                let reason_sql = if reason { "'why'" } else { "NULL" };
                if let Some((tags, rows)) = self.by_id(s, &jobs, None, "cancel", reason_sql)? {
                    let slots = self.slots(s, &tags)?;
                    self.model.cancel(s, &tags, reason, &rows, &slots)?;
                }
            }
            Step::Retry { s, jobs, run_in } => {
                let at = run_in.map(|by| self.at(by));
                let at_sql = at.map_or("NULL".to_string(), |at| {
                    format!("timestamptz 'epoch' + interval '{at} microseconds'")
                });
                let later = at.filter(|_| run_in.is_some_and(|by| by > 0));
                if let Some((tags, rows)) = self.by_id(s, &jobs, Some(later.is_some()), "retry", &at_sql)? {
                    let slots = self.slots(s, &tags)?;
                    self.model.retry(s, &tags, later, &rows, &slots)?;
                }
            }
            Step::Pause { s, queue } => {
                let name = literal(self.model.queues[queue].name);
                self.rows(s, &format!("SELECT awa.pause_queue({name})"))?;
                self.model.paused[queue] = true;
            }
            Step::Resume { s, queue } => {
                let name = literal(self.model.queues[queue].name);
                self.rows(s, &format!("SELECT awa.resume_queue({name})"))?;
                self.model.paused[queue] = false;
            }
            Step::Forward { by } => self.forward(by)?,
            Step::Maintain { s } => {
                // What was under way in another transaction is looked at again after up to 30 seconds.
                self.forward(40)?;
                let (_, when) = self.rows(s, "CALL awa.maintain()")?;
                let seen = self.all_jobs(s)?;
                self.model.maintain(s, when, &seen)?;
                self.look_at_ring(s)?;
            }
            Step::Seal { s } => {
                self.rows(s, "SELECT awa_internal.seal()")?;
            }
            Step::Close { s, slot } => {
                self.rows(s, &format!("SELECT awa_internal.close({slot})"))?;
            }
            Step::Empty { s, slot } => {
                self.rows(s, &format!("SELECT awa_internal.\"empty\"({slot}, true)"))?;
                self.look_at_ring(s)?;
            }
            Step::Check { s } => self.check(s)?,
        }
        Ok(true)
    }

    fn forward(&mut self, by: i64) -> Res<()> {
        self.offset += by;
        for s in 0..SESSIONS {
            if self.model.sessions[s].failed {
                continue;
            }
            self.set_clock(s)?;
        }
        Ok(())
    }

    fn set_clock(&mut self, s: usize) -> Res<()> {
        let sql = format!("SET awa_queue.clock_offset = {}", self.offset * 1000);
        self.sessions[s].simple_query(&sql).map_err(|e| e.to_string())?;
        Ok(())
    }

    fn at(&self, by: i64) -> Micros {
        self.now() + by * SECOND
    }

    /// The arguments of a job after its args, and its run_at where that is given as a time.
    fn arguments(&self, job: &Spec) -> (String, Option<Micros>) {
        let mut sql = String::new();
        let mut run_at = None;
        if let Some(p) = job.priority {
            sql += &format!(", priority => {p}");
        }
        if let Some(n) = job.max_attempts {
            sql += &format!(", max_attempts => {n}");
        }
        match job.run_in {
            Some(by) if job.run_at => {
                let at = self.at(by);
                sql += &format!(", run_at => timestamptz 'epoch' + interval '{at} microseconds'");
                run_at = Some(at);
            }
            Some(by) => sql += &format!(", run_in => interval '{by} s'"),
            None => {}
        }
        (sql, run_at)
    }

    /// When jobs that this call put off are due.
    fn run_ats(&mut self, s: usize, ids: &[i64]) -> Res<Vec<Option<Micros>>> {
        let sql = format!(
            "SELECT {} AS run_at FROM unnest({}) WITH ORDINALITY AS i (id, n) LEFT JOIN LATERAL awa.job(id) j ON true ORDER BY n",
            micros_of("j.run_at"),
            bigints(ids)
        );
        Ok(self.rows(s, &sql)?.0.iter().map(|r| maybe(r, "run_at")).collect())
    }

    fn enqueued(&mut self, s: usize, jobs: &[Spec], ids: &[i64], when: When) -> Res<()> {
        if jobs.len() != ids.len() {
            return Err(format!("{} ids for {} jobs", ids.len(), jobs.len()));
        }
        let run_at = self.run_ats(s, ids)?;
        let jobs: Vec<(Spec, i64)> = jobs.iter().cloned().zip(ids.iter().copied()).collect();
        self.model.enqueue(s, &jobs, when, &run_at)
    }

    fn enqueue(&mut self, s: usize, job: &Spec) -> Res<()> {
        let (more, _) = self.arguments(job);
        let key = job
            .key
            .as_ref()
            .map_or(String::new(), |k| format!(", ordering_key => {}", literal(k)));
        let name = literal(self.model.queues[job.queue].name);
        let (rows, when) = self.rows(
            s,
            &format!("SELECT awa.enqueue({name}, '{}'{more}{key}) AS id", job.tag),
        )?;
        let id = get(&rows[0], "id")?;
        self.enqueued(s, std::slice::from_ref(job), &[id], when)
    }

    fn enqueue_batch(&mut self, s: usize, jobs: &[Spec]) -> Res<()> {
        let first = jobs[0].clone();
        let jobs: Vec<Spec> = jobs
            .iter()
            .map(|j| Spec {
                tag: j.tag,
                key: j.key.clone(),
                ..first.clone()
            })
            .collect();
        let (more, _) = self.arguments(&first);
        let args: Vec<String> = jobs.iter().map(|j| j.tag.to_string()).collect();
        let keys = if jobs.iter().any(|j| j.key.is_some()) {
            let keys: Vec<String> = jobs
                .iter()
                .map(|j| j.key.as_ref().map_or("NULL".to_string(), |k| literal(k)))
                .collect();
            format!(", ordering_keys => ARRAY[{}]::text[]", keys.join(", "))
        } else {
            String::new()
        };
        let name = literal(self.model.queues[first.queue].name);
        let sql = format!(
            "SELECT i AS id FROM unnest(awa.enqueue_batch({name}, '{{{}}}'{more}{keys})) WITH ORDINALITY AS t (i, n) ORDER BY n",
            args.join(",")
        );
        let (rows, when) = self.rows(s, &sql)?;
        let ids = rows.iter().map(|r| get(r, "id")).collect::<Res<Vec<i64>>>()?;
        self.enqueued(s, &jobs, &ids, when)
    }

    fn enqueue_jobs(&mut self, s: usize, jobs: &[Spec]) -> Res<()> {
        let objects: Vec<String> = jobs
            .iter()
            .map(|j| {
                let mut o = serde_json::json!({"queue": self.model.queues[j.queue].name, "args": j.tag});
                if let Some(p) = j.priority {
                    o["priority"] = p.into();
                }
                if let Some(n) = j.max_attempts {
                    o["max_attempts"] = n.into();
                }
                if let Some(k) = &j.key {
                    o["ordering_key"] = k.clone().into();
                }
                if let Some(by) = j.run_in {
                    o["run_in"] = format!("{by} s").into();
                }
                o.to_string()
            })
            .collect();
        let sql = format!(
            "SELECT idx, job_id, status FROM awa.enqueue_jobs({}) ORDER BY idx",
            literal(&format!("[{}]", objects.join(",")))
        );
        let (rows, when) = self.rows(s, &sql)?;
        for (i, (row, job)) in rows.iter().zip(jobs).enumerate() {
            let status: String = get(row, "status")?;
            let want = if job.run_in.is_some_and(|by| by > 0) {
                "scheduled"
            } else {
                "ready"
            };
            if status != want || get::<usize>(row, "idx")? != i + 1 {
                return Err(format!(
                    "enqueue_jobs says {status} of job {}, expected {want}",
                    job.tag
                ));
            }
        }
        let ids = rows.iter().map(|r| get(r, "job_id")).collect::<Res<Vec<i64>>>()?;
        let plain: Vec<Spec> = jobs
            .iter()
            .map(|j| Spec {
                run_at: false,
                ..j.clone()
            })
            .collect();
        self.enqueued(s, &plain, &ids, when)
    }

    fn claim(&mut self, s: usize, queues: &[usize], n: i64, lease: Option<i64>, worker: &str) -> Res<()> {
        let verb = match queues {
            [one] => format!("awa.claim({}", literal(self.model.queues[*one].name)),
            more => format!("awa.claim_from({}", self.queue_names(more)),
        };
        let sql = format!(
            "{} FROM {verb}, {n}, {}, {})",
            Self::claim_columns(),
            literal(worker),
            seconds(lease)
        );
        let (rows, when) = self.rows(s, &sql)?;
        let rows = self.claim_rows(&rows)?;
        self.log_rows(&rows);
        self.model
            .claim(s, queues, n, lease.map(|l| l * SECOND), worker, &rows, when)
    }

    fn log_rows(&mut self, rows: &[ClaimRow]) {
        let tags: Vec<String> = rows
            .iter()
            .map(|r| format!("{} ({})", r.tag, r.receipt))
            .collect();
        self.log.push(format!("   -> {}", tags.join(", ")));
    }

    /// A statement that the model may want to fail: None where it did and had to.
    fn rows_or(
        &mut self,
        s: usize,
        sql: &str,
        error: Option<&str>,
    ) -> Res<Option<(Vec<SimpleQueryRow>, When)>> {
        let (rows, when) = self.run(s, sql)?;
        match (rows, error) {
            (Ok(rows), None) => Ok(Some((rows, when))),
            (Err(e), Some(code)) if e.code == code => {
                self.model.error(s);
                Ok(None)
            }
            (Ok(_), Some(code)) => Err(format!("no error, expected {code} (in {sql})")),
            (Err(e), None) => Err(format!("{}: {} (in {sql})", e.code, e.message)),
            (Err(e), Some(code)) => Err(format!("{}: {}, expected {code} (in {sql})", e.code, e.message)),
        }
    }

    fn finish(&mut self, s: usize, receipts: &[i64], what: &Finish) -> Res<()> {
        let list = bigints(receipts);
        let reason = if what.reason { "'why'" } else { "NULL" };
        let delay = what.delay.map(|d| d / SECOND);
        let call = match what.verb {
            Verb::Complete => format!("complete({list}, strict => {})", what.strict),
            Verb::Fail => format!(
                "fail({list}, {reason}, {}, {}, strict => {})",
                seconds(delay),
                what.permanent,
                what.strict
            ),
            Verb::Snooze => format!("snooze({list}, {})", seconds(delay)),
            Verb::Release => format!("release({list})"),
            Verb::CancelClaimed => format!("cancel_claimed({list}, {reason})"),
        };
        let error = self.model.finish_error(s, receipts, what);
        let sql = format!("{} FROM awa.{call}", Self::finish_columns());
        if let Some((rows, when)) = self.rows_or(s, &sql, error)? {
            let rows = self.finish_rows(&rows)?;
            self.model.finish(s, receipts, what, Some(&rows), when)?;
        }
        Ok(())
    }

    fn complete_and_claim(
        &mut self,
        s: usize,
        receipts: &[i64],
        strict: bool,
        queues: &[usize],
        n: i64,
    ) -> Res<()> {
        let what = Finish {
            verb: Verb::Complete,
            strict,
            reason: false,
            permanent: false,
            delay: None,
        };
        let error = self.model.finish_error(s, receipts, &what);
        let sql = format!(
            "{} FROM awa.complete_and_claim({}, {}, {n}, strict => {strict})",
            Self::claim_columns(),
            bigints(receipts),
            self.queue_names(queues)
        );
        if let Some((rows, when)) = self.rows_or(s, &sql, error)? {
            let rows = self.claim_rows(&rows)?;
            self.log_rows(&rows);
            self.model.finish(s, receipts, &what, None, when)?;
            self.model.claim(s, queues, n, None, "", &rows, when)?;
        }
        Ok(())
    }

    /// A verb by ids: its rows by job, in the order of the ids; None where it had to give up waiting.
    #[allow(clippy::type_complexity)]
    fn by_id(
        &mut self,
        s: usize,
        jobs: &[Tag],
        retry: Option<bool>,
        verb: &str,
        argument: &str,
    ) -> Res<Option<(Vec<Tag>, BTreeMap<Tag, (i64, String, bool)>)>> {
        let known: Vec<(Tag, i64)> = jobs
            .iter()
            .filter_map(|t| Some((*t, self.model.jobs.get(t)?.id)))
            .collect();
        let ids: Vec<i64> = known.iter().map(|k| k.1).collect();
        let mut tags: Vec<Tag> = known.iter().map(|k| k.0).collect();
        tags.sort_by_key(|t| self.model.jobs[t].id);
        tags.dedup();
        let error = self.model.by_id_waits(s, &tags, retry).then_some("55P03");
        let sql = format!(
            "SELECT job_id, state, changed FROM awa.{verb}({}, {argument})",
            bigints(&ids)
        );
        let Some((rows, _)) = self.rows_or(s, &sql, error)? else {
            return Ok(None);
        };
        if rows.len() != ids.len() {
            return Err(format!("{} rows for {} ids", rows.len(), ids.len()));
        }
        let mut by_job = BTreeMap::new();
        for (row, (tag, id)) in rows.iter().zip(&known) {
            if get::<i64>(row, "job_id")? != *id {
                return Err(format!("rows of awa.{verb} are not in input order"));
            }
            let state: String = get(row, "state")?;
            by_job.insert(*tag, (*id, state, get::<String>(row, "changed")? == "t"));
        }
        Ok(Some((tags, by_job)))
    }

    /// The slots in which the newest entries of jobs lie.
    fn slots(&mut self, s: usize, tags: &[Tag]) -> Res<BTreeMap<Tag, u8>> {
        let ids: Vec<i64> = tags.iter().map(|t| self.model.jobs[t].id).collect();
        let sql = format!(
            "SELECT i.id, (SELECT r.slot FROM awa_internal.ready r
                           JOIN awa_internal.segments g ON g.slot = r.slot
                                AND r.entry_id BETWEEN g.first_entry_id AND g.first_entry_id + g.n - 1
                           WHERE r.job_id = i.id OR r.entry_id = i.id AND r.job_id IS NULL
                           ORDER BY g.enqueued_at DESC LIMIT 1) AS slot FROM unnest({}) AS i (id)",
            bigints(&ids)
        );
        let (rows, _) = self.rows(s, &sql)?;
        Ok(tags
            .iter()
            .zip(&rows)
            .filter_map(|(t, r)| Some((*t, maybe(r, "slot")?)))
            .collect())
    }

    // ------------------------------------------------------------ looking

    /// All jobs by their ids, with their run_at.
    fn all_jobs(&mut self, s: usize) -> Res<BTreeMap<Tag, (Seen, Option<Micros>)>> {
        let ids: Vec<i64> = self.model.jobs.values().map(|j| j.id).collect();
        let sql = format!(
            "SELECT j.job_id, j.args, j.queue, j.state, j.attempt, j.max_attempts, j.priority,
                    COALESCE(jsonb_array_length(j.errors), 0) AS errors, {} AS run_at
             FROM unnest({}) AS i (id), awa.job(i.id) j",
            micros_of("j.run_at"),
            bigints(&ids)
        );
        let (rows, _) = self.rows(s, &sql)?;
        self.seen(&rows)
    }

    fn seen(&self, rows: &[SimpleQueryRow]) -> Res<BTreeMap<Tag, (Seen, Option<Micros>)>> {
        let mut seen = BTreeMap::new();
        for r in rows {
            let tag: Tag = get(r, "args")?;
            let id: i64 = get(r, "job_id")?;
            if self.model.jobs.get(&tag).map(|j| j.id) != Some(id) {
                return Err(format!("job {tag} is shown with id {id}"));
            }
            let one = Seen {
                state: get(r, "state")?,
                attempt: get(r, "attempt")?,
                max_attempts: get(r, "max_attempts")?,
                priority: get(r, "priority")?,
                queue: get(r, "queue")?,
                errors: get(r, "errors")?,
            };
            if seen.insert(tag, (one, maybe(r, "run_at"))).is_some() {
                return Err(format!("job {tag} is shown twice"));
            }
        }
        Ok(seen)
    }

    /// Slots that were emptied since the last look.
    fn look_at_ring(&mut self, s: usize) -> Res<()> {
        let (rows, _) = self.rows(
            s,
            "SELECT slot, max(event_no) AS no FROM awa_internal.ring WHERE event = 'e' GROUP BY slot",
        )?;
        for r in &rows {
            let (slot, no): (u8, i64) = (get(r, "slot")?, get(r, "no")?);
            if self.emptied.insert(slot, no) != Some(no) {
                self.log.push(format!("   -> slot {slot} was emptied"));
                self.model.emptied(slot)?;
            }
        }
        Ok(())
    }

    /// Compares everything as the session sees it.
    fn check(&mut self, s: usize) -> Res<()> {
        let by_id = self.all_jobs(s)?;
        let sql = "SELECT job_id, args, queue, state, attempt, max_attempts, priority,
                          COALESCE(jsonb_array_length(errors), 0) AS errors FROM awa.jobs";
        let (rows, _) = self.rows(s, sql)?;
        let listed = self.seen(&rows)?;
        for tag in self.model.jobs.keys() {
            let want = self.model.job(s, *tag);
            for (name, got) in [("awa.job()", &by_id), ("awa.jobs", &listed)] {
                let got = got.get(tag).map(|g| g.0.clone());
                if got != want {
                    return Err(format!("{name} shows job {tag} as {got:?}, expected {want:?}"));
                }
            }
        }
        let columns = "queue, paused, ready, scheduled, retryable, blocked, waiting, running, completed, failed, cancelled,
            enqueued_total, completed_total, failed_total, retried_total, rescued_total, stale_total";
        let (rows, _) = self.rows(s, &format!("SELECT {columns} FROM awa.queue_stats"))?;
        for q in 0..self.model.queues.len() {
            let name = self.model.queues[q].name;
            let row = rows
                .iter()
                .find(|r| r.get("queue") == Some(name))
                .ok_or_else(|| format!("queue {name} has no statistics"))?;
            for (column, want) in self.model.stats(s, q) {
                let got: i64 = get(row, column)?;
                if got != want {
                    return Err(format!(
                        "awa.queue_stats of {name}: {column} is {got}, expected {want}"
                    ));
                }
            }
        }
        // A plain view, as of the transaction's snapshot.
        if !self.model.sessions[s].repeatable {
            let (rows, _) = self.rows(s, "SELECT args FROM awa.dead_letters")?;
            let got = rows
                .iter()
                .map(|r| get(r, "args"))
                .collect::<Res<BTreeSet<Tag>>>()?;
            let want = self.model.dead_letters(s);
            if got != want {
                return Err(format!("awa.dead_letters holds {got:?}, expected {want:?}"));
            }
        }
        Ok(())
    }
}
