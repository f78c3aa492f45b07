//! The ring view: which slots are live, which of them are closed, which one is current; and the epoch that
//! says whether a view is still true.
//!
//! A view is read under the ring lock and used until the epoch (shared memory) or a relcache invalidation
//! of the ring table says that the ring changed. Both signals are always used: after a promotion only the
//! second has been seen. Whoever relies on a view checks it again under the lock that makes it last.

use crate::adopt;
use crate::error::{Error, Result};
use crate::logs;
use crate::pg::command;
use crate::pg::heap;
use crate::pg::inject::{self, Mutant};
use crate::pg::latest::Latest;
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::roster;
use crate::pg::shmem;
use crate::pg::table::{self, Access, Oid, Table, NO_OID};
use crate::pg::xact;
use crate::receipt::MAX_SLOTS;
use std::cell::{Cell, RefCell};
use std::rc::Rc;

/// Numbers of the lock tags, the authority for seqs and the receipt format.
pub const PROTOCOL: i32 = 1;
/// Number of the log tables' layout.
pub const LAYOUT: i32 = 1;

const SCHEMA: &str = "awa_internal";
/// The one key of the ring lock.
pub const RING_KEY: u64 = 0;

/// A live slot.
#[derive(Clone, Debug)]
pub struct Slot {
    pub no: u8,
    pub generation: i64,
    /// No segment can be added any more; `lanes.appended_through` covers it.
    pub closed: bool,
    pub ready: Oid,
    pub segments: Oid,
    pub claims: Oid,
    pub closures: Oid,
}

/// The relations that are not per slot.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    pub world: Oid,
    pub ring: Oid,
    pub lanes: Oid,
    pub queues: Oid,
    pub entry_ids: Oid,
    pub claim_blocks: Oid,
    pub rest_type: Oid,
}

#[derive(Debug)]
pub struct View {
    /// A number of its own for each view of this session.
    pub stamp: u64,
    epoch: u64,
    pub incarnation: i64,
    pub slots: Vec<Slot>,
    current: usize,
    pub tables: Tables,
}

impl View {
    /// The slot that takes new folds.
    pub fn current(&self) -> &Slot {
        &self.slots[self.current]
    }

    pub fn slot(&self, no: u8) -> Option<&Slot> {
        self.slots.iter().find(|s| s.no == no)
    }
}

thread_local! {
    static VIEW: RefCell<Option<Rc<View>>> = const { RefCell::new(None) };
    static STAMP: Cell<u64> = const { Cell::new(0) };
    /// The incarnation that this session's memory belongs to.
    static INCARNATION: Cell<Option<i64>> = const { Cell::new(None) };
}

/// The state of one slot as the ring's events tell it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotState {
    Empty,
    Open,
    Closed,
}

/// What the events say of all 64 possible slots.
pub struct Events {
    state: [SlotState; 64],
    generation: [i64; 64],
    last_event: [i64; 64],
    pub last: i64,
    pub current: u8,
}

impl Events {
    /// Folds the events of the ring: the last of a slot is its state. No event at all means that slot 0 is
    /// open as generation 0, so that a fresh installation needs no row in a table that is dumped.
    pub fn fold(events: impl IntoIterator<Item = (i64, u8, u8, i64)>) -> Events {
        let mut e = Events {
            state: [SlotState::Empty; 64],
            generation: [0; 64],
            last_event: [-1; 64],
            last: 0,
            current: 0,
        };
        e.state[0] = SlotState::Open;
        let mut opened = -1;
        for (no, slot, event, generation) in events {
            let s = usize::from(slot & 63);
            e.last = e.last.max(no);
            if event == b'o' && generation > opened {
                opened = generation;
                e.current = slot & 63;
            }
            if no > e.last_event[s] {
                e.last_event[s] = no;
                e.generation[s] = generation;
                e.state[s] = match event {
                    b'o' => SlotState::Open,
                    b'c' => SlotState::Closed,
                    _ => SlotState::Empty,
                };
            }
        }
        e
    }

    pub fn state(&self, slot: u8) -> SlotState {
        self.state[usize::from(slot)]
    }

    pub fn generation(&self, slot: u8) -> i64 {
        self.generation[usize::from(slot)]
    }
}

/// Reads the ring's events, latest committed state.
pub fn read_events(ring: Oid) -> Events {
    let table = Table::open(ring, Access::Read);
    let latest = Latest::take();
    let mut rows = Vec::new();
    heap::scan(&table, &latest, |row| {
        let event_no = row.i64(1).unwrap_or(0);
        let slot = row.i16(2).unwrap_or(0) as u8;
        rows.push((event_no, slot, row.char(3).unwrap_or(0), row.i64(4).unwrap_or(0)));
        true
    });
    Events::fold(rows)
}

/// A table of ours by its name.
pub fn relation(name: &str) -> Result<Oid> {
    table::find(SCHEMA, name).ok_or(Error::NotInstalled)
}

pub fn slot_relation(log: &str, slot: u8) -> Result<Oid> {
    let name = format!("{log}_{slot}");
    table::find(SCHEMA, &name)
        .ok_or_else(|| Error::Layout(format!("table \"{name}\" of awa_queue does not exist")))
}

/// Whether a slot's tables exist.
pub fn slot_exists(slot: u8) -> bool {
    table::find(SCHEMA, &format!("ready_{slot}")).is_some()
}

/// The oids of the tables, by name.
pub fn tables() -> Result<Tables> {
    let ready = relation("ready")?;
    Ok(Tables {
        world: relation("world")?,
        ring: relation("ring")?,
        lanes: relation("lanes")?,
        queues: relation("queues")?,
        entry_ids: relation("entry_ids")?,
        claim_blocks: relation("claim_blocks")?,
        rest_type: Table::open(ready, Access::Read).column_type(logs::ready::REST),
    })
}

/// The view as of now, read anew where it is not true any more.
pub fn view() -> Result<Rc<View>> {
    let known = VIEW.with(|v| v.borrow().clone());
    match known {
        Some(v) if is_current(&v) => Ok(v),
        _ => load(),
    }
}

/// As `view`, for a verb that writes: refused behind a maintenance step of the same transaction, whose
/// slots nobody else can see yet.
pub fn view_for_write() -> Result<Rc<View>> {
    if xact::ring_bump_is_pending() {
        return Err(Error::AfterMaintenance("this verb"));
    }
    roster::note_verb();
    let view = view()?;
    adopt::at_first_verb(&view.tables, view.incarnation)?;
    Ok(view)
}

/// Whether a view is still true. Takes in what has been committed so far.
pub fn is_current(view: &View) -> bool {
    xact::accept_invalidations();
    xact::ring_is_valid()
        && shmem::epoch().is_none_or(|e| e == view.epoch)
        && STAMP.with(Cell::get) == view.stamp
}

fn load() -> Result<Rc<View>> {
    // From here to the end there is no view: whatever goes wrong in between, an old one is not used again.
    VIEW.with(|v| v.borrow_mut().take());
    adopt::forget();
    let stamp = STAMP.with(|s| {
        s.set(s.get() + 1);
        s.get()
    });
    let tables = tables()?;
    xact::watch(tables.ring, tables.queues);
    let lock = ShortLock::acquire(Class::Ring, RING_KEY, Mode::Share);
    // Valid from before the reading on: what is committed meanwhile turns it invalid again.
    let epoch = shmem::epoch().unwrap_or(0);
    xact::set_ring_valid(true);
    let incarnation = check_world(&tables)?;
    let events = read_events(tables.ring);
    drop(lock);
    let mut slots = Vec::new();
    let mut current = None;
    for no in 0..MAX_SLOTS {
        let state = events.state(no);
        if state == SlotState::Empty {
            continue;
        }
        let slot = Slot {
            no,
            generation: events.generation(no),
            closed: state == SlotState::Closed,
            ready: slot_relation("ready", no)?,
            segments: slot_relation("segments", no)?,
            claims: slot_relation("claims", no)?,
            closures: slot_relation("closures", no)?,
        };
        logs::verify(slot.ready, "ready", &logs::ready::NAMES)?;
        logs::verify(slot.segments, "segments", &logs::segments::NAMES)?;
        logs::verify(slot.claims, "claims", &logs::claims::NAMES)?;
        logs::verify(slot.closures, "closures", &logs::closures::NAMES)?;
        if no == events.current {
            current = Some(slots.len());
        }
        slots.push(slot);
    }
    let current =
        current.ok_or_else(|| Error::Layout("the ring of awa_queue has no open slot".to_string()))?;
    let view = Rc::new(View {
        stamp,
        epoch,
        incarnation,
        slots,
        current,
        tables,
    });
    if INCARNATION.with(Cell::get) != Some(incarnation) {
        crate::session::forget();
        INCARNATION.set(Some(incarnation));
    }
    VIEW.with(|v| v.borrow_mut().replace(view.clone()));
    if xact::ring_bump_is_pending() {
        // What this transaction did to the ring may still roll back, to a savepoint too.
        xact::set_ring_valid(false);
    }
    if command::in_recovery() {
        // No callback and no epoch tells a standby's session of its promotion.
        xact::set_ring_valid(false);
    }
    Ok(view)
}

/// Makes all sessions read the ring again from this transaction's commit on.
pub fn announce_change() -> Result<()> {
    if !inject::mutant(Mutant::EpochEmpty) {
        xact::note_maintenance();
        xact::bump_ring_at_commit(relation("ring")?);
    }
    Ok(())
}

/// Refuses tables whose protocol or layout this library does not know, before anything is written, and
/// returns their incarnation.
pub fn check_world(tables: &Tables) -> Result<i64> {
    let (incarnation, protocol, layout) = read_world(tables.world)?;
    if protocol != PROTOCOL || layout != LAYOUT {
        return Err(Error::LibraryTooOld { protocol, layout });
    }
    Ok(incarnation)
}

fn read_world(world: Oid) -> Result<(i64, i32, i32)> {
    debug_assert!(world != NO_OID);
    let table = Table::open(world, Access::Read);
    let latest = Latest::take();
    let mut found = None;
    heap::scan(&table, &latest, |row| {
        found = Some((
            row.i64(2).unwrap_or(0),
            row.i32(3).unwrap_or(0),
            row.i32(4).unwrap_or(0),
        ));
        false
    });
    found.ok_or_else(|| Error::Layout("table \"world\" of awa_queue is empty".to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fresh_ring_has_slot_zero_open() {
        let e = Events::fold([]);
        assert_eq!(e.state(0), SlotState::Open);
        assert_eq!((e.current, e.last), (0, 0));
        assert_eq!(e.state(1), SlotState::Empty);
    }

    #[test]
    fn the_last_event_of_a_slot_is_its_state_whatever_the_order_of_rows() {
        let events = [(3, 0, b'e', 0), (1, 5, b'o', 1), (2, 0, b'c', 0), (4, 7, b'o', 2)];
        let e = Events::fold(events);
        assert_eq!(e.state(0), SlotState::Empty);
        assert_eq!(e.state(5), SlotState::Open);
        assert_eq!((e.state(7), e.current, e.last), (SlotState::Open, 7, 4));
        let reversed = Events::fold(events.into_iter().rev());
        assert_eq!((reversed.state(0), reversed.current), (SlotState::Empty, 7));
    }

    #[test]
    fn a_slot_that_is_used_again_has_a_new_generation() {
        let e = Events::fold([(1, 3, b'o', 1), (2, 0, b'c', 0), (3, 0, b'e', 0), (4, 0, b'o', 2)]);
        assert_eq!((e.state(0), e.generation(0), e.current), (SlotState::Open, 2, 0));
    }
}
