//! Whose database this is. `awa_internal.world` is not dumped and says which server and database the tables
//! were taken into use in. Where it says another one, or none yet, the tables are new, restored (perhaps only
//! in part so far), cloned, or replicated: the worker then does nothing. The first verb of a user that may
//! write takes them over, since verbs are not called before a restore has ended; `awa_internal.adopt()` does
//! it too, and more, for a logical subscriber.

use crate::error::{Error, Result};
use crate::pg::command;
use crate::pg::heap;
use crate::pg::latest::Latest;
use crate::pg::lock::{Class, Mode, ShortLock, TransactionLock};
use crate::pg::owner;
use crate::pg::table::{self, Access, Table};
use crate::pg::xact;
use crate::ring::{self, Tables, RING_KEY};
use crate::statement::{number, run};
use std::cell::Cell;

const ADOPT_KEY: u64 = 0;
const SEQUENCES_KEY: u64 = 1;
/// Columns of `world`.
const INCARNATION: usize = 2;
const SYSTEM_ID: usize = 6;
const DATABASE: usize = 7;

thread_local! {
    /// The incarnation that is known to be ours, committed.
    static OURS: Cell<Option<i64>> = const { Cell::new(None) };
    /// The take-over itself writes the ring's incarnation: no reason to read the ring again.
    static QUIET: Cell<bool> = const { Cell::new(false) };
}

/// Whether a write to `ring` or `world` is part of a take-over, which changes nothing that a view holds.
pub fn is_quiet() -> bool {
    QUIET.get()
}

struct World {
    incarnation: i64,
    ours: bool,
    /// Written by this transaction, which may still roll back.
    own: bool,
}

fn world(tables: &Tables) -> World {
    let (system, database) = (command::system_id(), command::database());
    let mut found = World {
        incarnation: 0,
        ours: false,
        own: false,
    };
    let table = Table::open(tables.world, Access::Read);
    let next = xact::next_xid();
    heap::scan(&table, &Latest::take(), |row| {
        found = World {
            incarnation: row.i64(INCARNATION).unwrap_or(0),
            ours: row.i64(SYSTEM_ID) == Some(system) && row.i32(DATABASE).map(|d| d as u32) == Some(database),
            own: xact::is_own(xact::widen(row.xmin, next)),
        };
        false
    });
    found
}

/// Whether the ring's rows are all of this installation: a restore of the data alone brings others.
fn ring_is_of(tables: &Tables, incarnation: i64) -> bool {
    let table = Table::open(tables.ring, Access::Read);
    let mut same = true;
    heap::scan(&table, &Latest::take(), |row| {
        same = row.i64(5) == Some(incarnation);
        same
    });
    same
}

/// Whether the tables belong to this database of this server, as committed.
pub fn is_ours(tables: &Tables) -> bool {
    let world = world(tables);
    world.ours && ring_is_of(tables, world.incarnation)
}

/// Takes the tables over where they are not known as ours, with the verb's transaction. Never waits: while
/// another transaction is at it, this one only makes sure of the sequences.
pub fn at_first_verb(tables: &Tables, incarnation: i64) -> Result<()> {
    if OURS.get() == Some(incarnation) {
        return Ok(());
    }
    let seen = world(tables);
    if seen.ours && ring_is_of(tables, seen.incarnation) {
        if !seen.own {
            OURS.set(Some(incarnation));
        }
        return Ok(());
    }
    raise_sequences(tables)?;
    if let Some(lock) = TransactionLock::try_acquire(Class::Adopt, ADOPT_KEY, Mode::Exclusive) {
        lock.keep();
        let _quiet = Quiet::new();
        name_as_ours(tables)?;
    }
    Ok(())
}

/// Forgets what is known: the tables are looked at again at the next verb.
pub fn forget() {
    OURS.set(None);
}

struct Quiet;

impl Quiet {
    fn new() -> Quiet {
        QUIET.set(true);
        Quiet
    }
}

impl Drop for Quiet {
    fn drop(&mut self) {
        QUIET.set(false);
    }
}

fn name_as_ours(tables: &Tables) -> Result<()> {
    run(
        tables,
        "UPDATE awa_internal.world SET system_id = $1, database = $2::pg_catalog.oid",
        &[command::system_id().into(), i64::from(command::database()).into()],
    )?;
    run(
        tables,
        "UPDATE awa_internal.ring r SET incarnation = w.incarnation FROM awa_internal.world w
         WHERE r.incarnation <> w.incarnation",
        &[],
    )
}

/// Sequences are neither replicated nor safe after a restore of the data alone: each is set above every
/// number that the tables hold. Index probes; takes effect at once, whatever the transaction does.
fn raise_sequences(tables: &Tables) -> Result<()> {
    let slots: Vec<u8> = (0..crate::receipt::MAX_SLOTS)
        .filter(|s| ring::slot_exists(*s))
        .collect();
    let highest = |one: &dyn Fn(u8) -> String| {
        let parts: Vec<String> = slots.iter().map(|s| one(*s)).collect();
        parts.join(", ")
    };
    // The sequence counts in blocks of 1,024 that start at its value.
    let entry = number(
        tables,
        &format!(
            "SELECT GREATEST(
                 (SELECT pg_catalog.max(job_id) FROM awa_internal.deferred),
                 (SELECT pg_catalog.max(job_id) FROM awa_internal.dead_letters), {})",
            highest(&|s| {
                format!(
                "(SELECT first_entry_id + n - 1 FROM awa_internal.segments_{s} ORDER BY first_entry_id DESC LIMIT 1)"
            )
            })
        ),
    )?;
    let claim = number(
        tables,
        &format!(
            "SELECT GREATEST({}) / 64",
            highest(&|s| format!("(SELECT pg_catalog.max(claim_no) FROM awa_internal.claims_{s})"))
        ),
    )?;
    let queue = number(
        tables,
        "SELECT pg_catalog.max(queue_id)::pg_catalog.int8 FROM awa_internal.queues",
    )?;
    // Set well above: others may draw numbers between the look and the setting, which must not go back.
    let _one_at_a_time = ShortLock::acquire(Class::Adopt, SEQUENCES_KEY, Mode::Exclusive);
    for (name, lowest, above) in [
        ("entry_ids", entry.map(|e| e / 1024 * 1024), 1 << 20),
        ("claim_blocks", claim, 1 << 10),
        ("queue_ids", queue, 8),
    ] {
        let Some(lowest) = lowest else { continue };
        let last = number(
            tables,
            &format!("SELECT last_value FROM awa_internal.{name} WHERE is_called"),
        )?;
        if last.is_none_or(|l| l < lowest) {
            let sequence = table::find("awa_internal", name).ok_or(Error::NotInstalled)?;
            owner::as_owner_of(tables.ring, || owner::set_sequence(sequence, lowest + above));
        }
    }
    Ok(())
}

/// `awa_internal.adopt()`: takes the tables over with a fresh incarnation, so that nothing that any session
/// remembers is used again. Meant for a transaction of its own.
pub fn adopt() -> Result<&'static str> {
    command::refuse_read_only("awa_internal.adopt()")?;
    command::require_read_committed("awa_internal.adopt()")?;
    let tables = ring::tables()?;
    ring::check_world(&tables)?;
    xact::watch(tables.ring, tables.queues);
    xact::note_maintenance();
    let (Some(adopting), Some(ring_lock)) = (
        TransactionLock::try_acquire(Class::Adopt, ADOPT_KEY, Mode::Exclusive),
        TransactionLock::try_for(
            Class::Ring,
            RING_KEY,
            Mode::Exclusive,
            std::time::Duration::from_millis(50),
        ),
    ) else {
        return Ok("busy");
    };
    adopting.keep();
    ring_lock.keep();
    raise_sequences(&tables)?;
    run(
        &tables,
        "UPDATE awa_internal.world
         SET incarnation = pg_catalog.hashtextextended(pg_catalog.gen_random_uuid()::pg_catalog.text, 0)",
        &[],
    )?;
    name_as_ours(&tables)?;
    xact::bump_ring_at_commit(tables.ring);
    forget();
    Ok("adopted")
}
