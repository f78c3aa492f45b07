//! Planner statistics. Autovacuum never analyses a partitioned table, and is off for the logs; the few
//! statements that read them (views, counts, checks) need to know how large they are.

use crate::duty::Progress;
use crate::error::{Error, Result};
use crate::pg::lock::{try_lock_tables, TableMode};
use crate::pg::table;
use crate::receipt::MAX_SLOTS;
use crate::ring::{self, SlotState, Tables};
use crate::statement::{rows, run};

/// Partitioned parents, then tables that change much.
const TABLES: [&str; 7] = [
    "ready",
    "segments",
    "claims",
    "closures",
    "deferred",
    "dead_letters",
    "attempts",
];
/// So many rows changed, and a fifth of the table.
const LEAST_CHANGED: i64 = 1_000;

/// Analyses one table whose contents moved much. Not waited for where somebody locks it: an error that
/// names it, so that the other tables have their turn at the next look.
pub fn analyze_one() -> Result<Progress> {
    let tables = ring::tables()?;
    let due = rows(
        &tables,
        &format!(
            "SELECT t.name FROM pg_catalog.unnest(ARRAY['{}']) WITH ORDINALITY t (name, no),
                 LATERAL (SELECT pg_catalog.sum(pg_catalog.pg_stat_get_mod_since_analyze(l.relid)) AS changed,
                                 pg_catalog.sum(GREATEST(c.reltuples, 0)) AS n
                          FROM pg_catalog.pg_partition_tree(('awa_internal.' || t.name)::pg_catalog.regclass) l
                          JOIN pg_catalog.pg_class c ON c.oid = l.relid
                          WHERE l.isleaf) s
             WHERE s.changed > {LEAST_CHANGED} AND s.changed > s.n / 5 ORDER BY t.no",
            TABLES.join("', '")
        ),
        |row| row.get::<String>(1),
    )?;
    let mut locked = Vec::new();
    let due: Vec<String> = due.into_iter().flatten().collect();
    for (i, name) in due.iter().enumerate() {
        if !try_lock_tables(&family(name)?, TableMode::ShareUpdateExclusive) {
            locked.push(name.as_str());
            continue;
        }
        run(&tables, &format!("ANALYZE awa_internal.{name}"), &[])?;
        return Ok(Progress {
            done: 1,
            more: i + 1 < due.len(),
            next_due: None,
        });
    }
    if locked.is_empty() {
        return Ok(Progress::default());
    }
    Err(Error::Skipped(format!(
        "statistics not refreshed, tables are locked: {}",
        locked.join(", ")
    )))
}

/// A table and its partitions.
fn family(name: &str) -> Result<Vec<table::Oid>> {
    let find = |n: &str| table::find("awa_internal", n);
    let parent = find(name).ok_or(Error::NotInstalled)?;
    let children = (0..MAX_SLOTS).filter_map(|s| find(&format!("{name}_{s}")));
    Ok([parent].into_iter().chain(children).collect())
}

const AGE: &str = "GREATEST(pg_catalog.age(c.relfrozenxid), pg_catalog.age(t.relfrozenxid))
    > pg_catalog.current_setting('autovacuum_freeze_max_age')::pg_catalog.int8 / 4";
const FROM: &str = "FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
    LEFT JOIN pg_catalog.pg_class t ON t.oid = c.reltoastrelid AND t.oid <> 0
    WHERE n.nspname = 'awa_internal' AND c.relkind = 'r'";

/// The tables of closed slots that are so old that autovacuum would soon freeze them with a lock that nothing
/// can end (a quarter of autovacuum_freeze_max_age).
pub fn old_tables() -> Result<Vec<String>> {
    let tables = ring::tables()?;
    let events = ring::read_events(tables.ring);
    let mut old = Vec::new();
    for slot in (0..MAX_SLOTS).filter(|s| *s != events.current && events.state(*s) == SlotState::Closed) {
        old.extend(old_tables_of(&tables, slot)?);
    }
    Ok(old)
}

/// Tables of a slot that are as old.
pub fn old_tables_of(tables: &Tables, slot: u8) -> Result<Vec<String>> {
    let names = rows(
        tables,
        &format!(
            "SELECT c.relname::pg_catalog.text {FROM} AND {AGE}
             AND c.relname IN ('ready_{slot}', 'segments_{slot}', 'claims_{slot}', 'closures_{slot}')"
        ),
        |row| row.get::<String>(1),
    )?;
    Ok(names.into_iter().flatten().collect())
}
