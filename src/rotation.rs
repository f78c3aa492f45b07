//! The steps of a slot's life after it was current: sealed, closed, finished, emptied. Each is meant for a
//! transaction of its own, never waits for anybody, and says why it did nothing.
//!
//! Sealed: takes no new folds. Closed: no transaction that wrote into it is left and none can come, so its
//! segments never change again. Finished: every job of it has ended, and what it holds is summed up. Emptied:
//! the same proved again by counts under the lock.

use crate::error::{Error, Result};
use crate::lane::{self, LaneId};
use crate::pg::command;
use crate::pg::horizon;
use crate::pg::inject::{self, Mutant, Point};
use crate::pg::latest::Latest;
use crate::pg::lock::{self, Class, Mode, TableMode, TransactionLock};
use crate::pg::table::{Access, Table};
use crate::pg::time;
use crate::pg::warn;
use crate::pg::xact;
use crate::queue;
use crate::receipt::MAX_SLOTS;
use crate::ring::{self, Events, SlotState, Tables, View, RING_KEY};
use crate::settings;
use crate::statement::{self, number, run};
use crate::sums::{self, Finished, SlotLogs, Stored};
use std::fmt;

/// What a step did, or why it did nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Step {
    Sealed {
        current: u8,
    },
    Closed,
    /// Summed up.
    Finished,
    Emptied,
    /// Another session is at the ring.
    Busy,
    NoEmptySlot,
    IsCurrent,
    NotOpen,
    NotClosed,
    WritersLeft,
    /// Jobs that have not ended, of all jobs of the slot.
    Open {
        open: i64,
        of: i64,
    },
    /// Finished jobs are still to be seen for a while.
    Retained,
    /// An old snapshot may still want to read it.
    Snapshot,
    /// Somebody holds a lock on one of the tables.
    Blocked,
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Step::Sealed { current } => write!(f, "sealed: slot {current} is current"),
            Step::Closed => f.write_str("closed"),
            Step::Finished => f.write_str("finished"),
            Step::Emptied => f.write_str("emptied"),
            Step::Busy => f.write_str("busy"),
            Step::NoEmptySlot => f.write_str("no empty slot"),
            Step::IsCurrent => f.write_str("current"),
            Step::NotOpen => f.write_str("not open"),
            Step::NotClosed => f.write_str("not closed"),
            Step::WritersLeft => f.write_str("writers left"),
            Step::Open { open, of } => write!(f, "open: {open} of {of}"),
            Step::Retained => f.write_str("retained"),
            Step::Snapshot => f.write_str("snapshot"),
            Step::Blocked => f.write_str("blocked"),
        }
    }
}

/// The logs, in the order in which they are locked.
pub const LOGS: [&str; 4] = ["ready", "segments", "claims", "closures"];

pub fn begin(step: &str) -> Result<Tables> {
    command::refuse_read_only(step)?;
    command::require_read_committed(step)?;
    let tables = ring::tables()?;
    ring::check_world(&tables)?;
    xact::watch(tables.ring, tables.queues);
    xact::note_maintenance();
    Ok(tables)
}

/// Sessions that read the ring hold its lock for microseconds, and many of them read it at once after each
/// change: they are let pass. Another maintainer holds it to its COMMIT and is not waited for.
pub fn lock_ring() -> Option<TransactionLock> {
    TransactionLock::try_for(Class::Ring, RING_KEY, Mode::Exclusive, RING_PATIENCE)
}

const RING_PATIENCE: std::time::Duration = std::time::Duration::from_millis(50);

fn add_event(tables: &Tables, no: i64, slot: u8, event: &str, generation: i64) -> Result<()> {
    run(
        tables,
        "INSERT INTO awa_internal.ring (event_no, slot, event, generation, incarnation)
         SELECT $1, $2, $3::pg_catalog.text::\"char\", $4, w.incarnation FROM awa_internal.world w",
        &[no.into(), i16::from(slot).into(), event.into(), generation.into()],
    )
}

/// Makes an empty slot the current one. The one before takes no new folds from then on; a fold that is
/// under way may still land in it.
pub fn seal() -> Result<Step> {
    let tables = begin("awa_internal.seal()")?;
    let Some(ring_lock) = lock_ring() else {
        return Ok(Step::Busy);
    };
    let events = ring::read_events(tables.ring);
    let empty = (0..MAX_SLOTS).filter(|s| events.state(*s) == SlotState::Empty && ring::slot_exists(*s));
    let Some(slot) = empty.min_by_key(|s| events.generation(*s)) else {
        return Ok(Step::NoEmptySlot);
    };
    let no = events.last + 1;
    add_event(&tables, no, slot, "o", no)?;
    xact::bump_ring_at_commit(tables.ring);
    ring_lock.keep();
    Ok(Step::Sealed { current: slot })
}

/// Closes a sealed slot into which nobody can write any more, and notes how far its lanes were appended.
pub fn close(slot: u8) -> Result<Step> {
    let tables = begin("awa_internal.close()")?;
    let Some(ring_lock) = lock_ring() else {
        return Ok(Step::Busy);
    };
    let events = ring::read_events(tables.ring);
    if let Some(why) = not_in_state(&events, slot, SlotState::Open, Step::NotOpen) {
        return Ok(why);
    }
    let segments = ring::slot_relation("segments", slot)?;
    // SHARE meets every writer's ROW EXCLUSIVE, which is held to its COMMIT, also by prepared transactions.
    if !lock::try_lock_tables(&[segments], TableMode::Share) {
        return Ok(Step::WritersLeft);
    }
    ring_lock.keep();
    // Read after the lock, so nothing that was committed before it is missed.
    run(
        &tables,
        &format!(
            "INSERT INTO awa_internal.lanes AS l (lane_id, appended_through)
             SELECT s.lane_id, pg_catalog.max(s.first_seq + s.n - 1)
             FROM awa_internal.segments_{slot} s GROUP BY s.lane_id ORDER BY s.lane_id
             ON CONFLICT (lane_id) DO UPDATE
             SET appended_through = GREATEST(l.appended_through, excluded.appended_through)"
        ),
        &[],
    )?;
    sums::store_entries(&tables, slot, events.generation(slot))?;
    add_event(&tables, events.last + 1, slot, "c", events.generation(slot))?;
    xact::bump_ring_at_commit(tables.ring);
    Ok(Step::Closed)
}

fn not_in_state(events: &Events, slot: u8, state: SlotState, otherwise: Step) -> Option<Step> {
    if slot >= MAX_SLOTS || events.state(slot) == SlotState::Empty {
        Some(otherwise)
    } else if events.current == slot {
        Some(Step::IsCurrent)
    } else if events.state(slot) != state {
        Some(otherwise)
    } else {
        None
    }
}

/// Sums up a closed slot once every job of it has ended.
pub fn finish(slot: u8) -> Result<Step> {
    let tables = begin("awa_internal.close()")?;
    let events = ring::read_events(tables.ring);
    if let Some(why) = not_in_state(&events, slot, SlotState::Closed, Step::NotClosed) {
        return Ok(why);
    }
    let finished = finished_or_why_not(&tables, slot, events.generation(slot))?;
    Ok(finished.map_or_else(|why| why, |_| Step::Finished))
}

/// What is noted of a finished slot, noted now where it was not; or why it is not.
fn finished_or_why_not(
    tables: &Tables,
    slot: u8,
    generation: i64,
) -> Result<std::result::Result<Finished, Step>> {
    let latest = Latest::take();
    let stored = Stored::read(&latest)?;
    if let Some(finished) = stored.finished(slot, generation) {
        return Ok(Ok(finished));
    }
    // Counted before the ring lock, for which sessions wait that have to read the ring. Once every job has
    // ended nothing of this changes any more. What keeps a slot busy for long is asked about again and again,
    // while rescue and promotion wait for their turn: that answer must be cheap.
    let sums = stored.sums(slot, generation);
    let logs = SlotLogs::open(slot)?;
    let entries = sums::entries(sums);
    let endings = logs.endings(&latest);
    if endings < entries {
        return Ok(Err(Step::Open {
            open: entries - endings,
            of: entries,
        }));
    }
    let counts = logs.count(&latest, Some(sums));
    if counts.open() != 0 {
        return Ok(Err(Step::Open {
            open: counts.open(),
            of: counts.jobs(),
        }));
    }
    let Some(ring_lock) = lock_ring() else {
        return Ok(Err(Step::Busy));
    };
    let events = ring::read_events(tables.ring);
    if events.state(slot) != SlotState::Closed || events.generation(slot) != generation {
        return Ok(Err(Step::NotClosed));
    }
    let noted = || Ok(Stored::read(&Latest::take())?.finished(slot, generation));
    if let Some(finished) = noted()? {
        return Ok(Ok(finished)); // by another session, meanwhile
    }
    ring_lock.keep();
    sums::store_finished(tables, slot, generation, &counts)?;
    match noted()? {
        Some(finished) => Ok(Ok(finished)),
        None => Err(Error::Internal(format!("slot {slot} was not noted as finished"))),
    }
}

/// Empties a closed slot of which every job has ended, whose retention is over (unless ignored) and which
/// no older snapshot can want any more.
pub fn empty(slot: u8, ignore_retention: bool) -> Result<Step> {
    let tables = begin("awa_internal.empty()")?;
    let events = ring::read_events(tables.ring);
    if let Some(why) = not_in_state(&events, slot, SlotState::Closed, Step::NotClosed) {
        return Ok(why);
    }
    let generation = events.generation(slot);
    let oids = LOGS
        .iter()
        .map(|log| ring::slot_relation(log, slot))
        .collect::<Result<Vec<_>>>()?;
    // Another session may be emptying this slot right now: not waited for.
    if !lock::try_lock_tables(&oids, TableMode::AccessShare) {
        return Ok(Step::Busy);
    }
    // First without any lock that disturbs: most tries end here.
    let finished = match finished_or_why_not(&tables, slot, generation)? {
        Ok(finished) => finished,
        Err(why) => return Ok(why),
    };
    if !ignore_retention && retained_until(&tables, slot, &finished)?.is_some_and(|t| time::now() < t) {
        return Ok(Step::Retained);
    }
    let wanted = is_wanted_by_snapshot(&tables, slot, &finished)?;
    if wanted && finished.grace_ends().is_some_and(|t| time::now() < t) {
        return Ok(Step::Snapshot);
    }
    // Nobody adds to what points into a finished slot, so most of it goes before the locks.
    clear_references(&tables, slot)?;
    let Some(ring_lock) = lock_ring() else {
        return Ok(Step::Busy);
    };
    if !lock::try_lock_tables(&oids, TableMode::AccessExclusive) {
        return Ok(Step::Blocked);
    }
    // Proved again under the locks, with snapshots taken after them.
    let events = ring::read_events(tables.ring);
    if let Some(why) = not_in_state(&events, slot, SlotState::Closed, Step::NotClosed) {
        return Ok(why);
    }
    let counts = SlotLogs::open(slot)?.count(&Latest::take(), None);
    if events.generation(slot) != generation || counts.open() != 0 {
        return Ok(Step::Open {
            open: counts.open(),
            of: counts.jobs(),
        });
    }
    if clear_references(&tables, slot)? > 0 {
        return Ok(Step::Blocked);
    }
    ring_lock.keep();
    note_claimed(&tables, slot)?;
    sums::move_to_totals(&tables, slot, generation)?;
    let names: Vec<String> = LOGS
        .iter()
        .map(|log| format!("awa_internal.{log}_{slot}"))
        .collect();
    run(&tables, &format!("TRUNCATE {}", names.join(", ")), &[])?;
    run(
        &tables,
        "DELETE FROM awa_internal.ring WHERE slot = $1",
        &[i16::from(slot).into()],
    )?;
    add_event(&tables, events.last + 1, slot, "e", generation)?;
    if !inject::mutant(Mutant::EpochEmpty) {
        xact::bump_ring_at_commit(tables.ring);
    }
    inject::reach(Point::MaintainEmptied);
    if wanted {
        warn::log(&format!(
            "awa_queue: slot {slot} is emptied although a snapshot from before its last job ended is still in use: \
             awa_queue.snapshot_grace is over; a dump that uses the snapshot misses jobs that waited then"
        ));
    }
    Ok(Step::Emptied)
}

/// What may point into a slot, each table with its column: none of it outlives the slot. (`deferred` and
/// `dead_letters` hold copies of their jobs and point nowhere; `rescue_marks` says of which generation it is.)
const REFERENCES: [(&str, &str); 2] = [("attempts", "slot"), ("rescue_list", "slot")];

/// Deletes what points into a finished slot, except rows that an open transaction has locked; returns how many
/// are left.
fn clear_references(tables: &Tables, slot: u8) -> Result<i64> {
    let mut left = 0;
    for (table, column) in REFERENCES {
        run(
            tables,
            &format!(
                "DELETE FROM awa_internal.{table} WHERE ctid = ANY (ARRAY(
                     SELECT ctid FROM awa_internal.{table} WHERE {column} = $1 FOR UPDATE SKIP LOCKED))"
            ),
            &[i16::from(slot).into()],
        )?;
        let count = format!("SELECT pg_catalog.count(*) FROM awa_internal.{table} WHERE {column} = {slot}");
        left += number(tables, &count)?.unwrap_or(0);
    }
    Ok(left)
}

impl Finished {
    /// When an older snapshot keeps the slot no longer.
    pub fn grace_ends(&self) -> Option<i64> {
        Some(self.ended_at?.saturating_add(settings::snapshot_grace_micros()))
    }
}

/// Until when finished jobs of a slot are to be seen: the longest retention among the queues that have jobs in
/// it. None where it holds none.
pub fn retained_until(tables: &Tables, slot: u8, finished: &Finished) -> Result<Option<i64>> {
    let Some(ended_at) = finished.ended_at else {
        return Ok(None);
    };
    let longest = number(
        tables,
        &format!(
            "SELECT (pg_catalog.date_part('epoch', pg_catalog.max(
                        COALESCE((q.settings->>'retention')::pg_catalog.interval, interval '1 day'))) * 1000000)::pg_catalog.int8
             FROM awa_internal.queues q
             WHERE q.queue_id IN (SELECT (lane_id >> 8)::pg_catalog.int4 FROM awa_internal.slot_sums WHERE slot = {slot})"
        ),
    )?;
    let retention = longest.unwrap_or(queue::DEFAULT_RETENTION.approx_micros());
    Ok(Some(ended_at.saturating_add(retention)))
}

/// TRUNCATE is not MVCC: a dump whose snapshot is older than the last closure would find none of the jobs
/// that waited at its snapshot.
pub fn is_wanted_by_snapshot(tables: &Tables, slot: u8, finished: &Finished) -> Result<bool> {
    if finished.ended_at.is_none() {
        return Ok(false);
    }
    let closures = Table::open(ring::slot_relation("closures", slot)?, Access::Read);
    if finished.incarnation == ring::check_world(tables)? {
        Ok(!horizon::has_reached(&closures, finished.seen_after))
    } else {
        // The note was restored: its transaction id is another server's.
        Ok(!horizon::everybody_sees(&closures))
    }
}

/// Notes for each lane of the slot how far nothing is left to claim: below the lane's lowest segment in the
/// other live slots, read dirty, since an open transaction may have an older one.
fn note_claimed(tables: &Tables, slot: u8) -> Result<()> {
    let view = ring::view()?;
    let Some(this) = view.slot(slot).cloned() else {
        return Err(Error::Internal(format!(
            "slot {slot} is not live while it is emptied"
        )));
    };
    for (lane, appended_through) in lanes_of(tables, slot)? {
        let low = if inject::mutant(Mutant::LowMvcc) {
            lowest_committed_elsewhere(tables, &view, lane, slot)?
        } else {
            lane::lowest_elsewhere(&view, lane, &this)?
        };
        let through = low.map_or(appended_through, |l| (l - 1).min(appended_through));
        run(
            tables,
            "UPDATE awa_internal.lanes SET claimed_through = GREATEST(claimed_through, $2) WHERE lane_id = $1",
            &[lane.0.into(), through.into()],
        )?;
    }
    Ok(())
}

/// The wrong way, for the test that shows why it is wrong.
fn lowest_committed_elsewhere(tables: &Tables, view: &View, lane: LaneId, except: u8) -> Result<Option<i64>> {
    let mut low: Option<i64> = None;
    for s in view.slots.iter().filter(|s| s.no != except) {
        let first = number(
            tables,
            &format!(
                "SELECT pg_catalog.min(first_seq) FROM awa_internal.segments_{} WHERE lane_id = {}",
                s.no, lane.0
            ),
        )?;
        low = match (low, first) {
            (Some(a), Some(b)) => Some(a.min(b)),
            (a, b) => a.or(b),
        };
    }
    Ok(low)
}

fn lanes_of(tables: &Tables, slot: u8) -> Result<Vec<(LaneId, i64)>> {
    let sql = format!(
        "SELECT l.lane_id, l.appended_through FROM awa_internal.lanes l
         WHERE l.lane_id IN (SELECT lane_id FROM awa_internal.slot_sums WHERE slot = {slot})"
    );
    statement::rows(tables, &sql, |row| {
        Ok((
            LaneId(row.get::<i64>(1)?.unwrap_or(0)),
            row.get::<i64>(2)?.unwrap_or(0),
        ))
    })
}
