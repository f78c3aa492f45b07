//! Slots that are added while none is empty.
//!
//! Such a slot is no member of the extension: pg_extension_config_dump works in extension scripts alone, and
//! the rows of a member that is not registered are in no dump. A plain table that is attached to the parent is
//! dumped, restored and dropped with it.

use crate::error::Result;
use crate::pg::lock::{self, TableMode};
use crate::receipt::MAX_SLOTS;
use crate::ring;
use crate::rotation::{self, LOGS};
use crate::settings;
use crate::statement::{self, run};

/// What adding a slot came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grown {
    Added(u8),
    /// There are awa_queue.max_slots already.
    AtLimit,
    /// Somebody holds a lock on a parent table, or is at the ring.
    Busy,
}

/// Adds a slot with the options and indexes that slot 0 has, as the extension's owner. Waits for nobody: the
/// parents are locked before (SHARE UPDATE EXCLUSIVE, which all verbs and dumps pass), or not at all.
pub fn add_slot() -> Result<Grown> {
    let slots = MAX_SLOTS.min(settings::max_slots());
    let Some(slot) = (0..slots).find(|s| !ring::slot_exists(*s)) else {
        return Ok(Grown::AtLimit);
    };
    let tables = rotation::begin("awa_internal.add_slot()")?;
    let Some(ring_lock) = rotation::lock_ring() else {
        return Ok(Grown::Busy);
    };
    let parents = LOGS
        .iter()
        .map(|log| ring::relation(log))
        .collect::<Result<Vec<_>>>()?;
    if !lock::try_lock_tables(&parents, TableMode::ShareUpdateExclusive) {
        return Ok(Grown::Busy);
    }
    ring_lock.keep();
    for log in LOGS {
        let options = statement::rows(
            &tables,
            &format!(
                "SELECT o.option FROM pg_catalog.pg_class c, pg_catalog.unnest(c.reloptions) o (option)
                 WHERE c.oid = 'awa_internal.{log}_0'::pg_catalog.regclass
                 UNION ALL
                 SELECT 'toast.' || o.option FROM pg_catalog.pg_class c JOIN pg_catalog.pg_class t ON t.oid = c.reltoastrelid,
                        pg_catalog.unnest(t.reloptions) o (option)
                 WHERE c.oid = 'awa_internal.{log}_0'::pg_catalog.regclass"
            ),
            |row| row.get::<String>(1),
        )?;
        let options: Vec<String> = options.into_iter().flatten().map(quoted).collect();
        let with = match options.is_empty() {
            true => String::new(),
            false => format!(" WITH ({})", options.join(", ")),
        };
        // One string, so that the tablespace counts for it alone: that of slot 0, whatever the session's default.
        run(
            &tables,
            &format!(
                "SELECT pg_catalog.set_config('default_tablespace', COALESCE(
                     (SELECT s.spcname::pg_catalog.text FROM pg_catalog.pg_class c JOIN pg_catalog.pg_tablespace s ON s.oid = c.reltablespace
                      WHERE c.oid = 'awa_internal.{log}_0'::pg_catalog.regclass), ''), true);
                 CREATE TABLE awa_internal.{log}_{slot} (LIKE awa_internal.{log}_0 INCLUDING ALL) USING heap{with};
                 REVOKE ALL ON TABLE awa_internal.{log}_{slot} FROM PUBLIC;
                 ALTER TABLE awa_internal.{log} ATTACH PARTITION awa_internal.{log}_{slot} FOR VALUES IN ({slot})"
            ),
            &[],
        )?;
    }
    Ok(Grown::Added(slot))
}

/// `name=value` as a storage parameter of CREATE TABLE.
fn quoted(option: String) -> String {
    match option.split_once('=') {
        Some((name, value)) => format!("{name} = '{}'", value.replace('\'', "''")),
        None => option,
    }
}

#[cfg(test)]
mod tests {
    use super::quoted;

    #[test]
    fn options_are_quoted() {
        assert_eq!(
            quoted("toast.vacuum_truncate=off".to_string()),
            "toast.vacuum_truncate = 'off'"
        );
        assert_eq!(quoted("a=it's".to_string()), "a = 'it''s'");
    }
}
