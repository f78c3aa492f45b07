//! When the ring's steps are due: which slot is sealed, closed, summed up, emptied or added next.
//!
//! `step` takes the first that is due and can be done; a slot that refused is left alone for 1, 2, 4 .. 60
//! seconds. (An attempt at an ACCESS EXCLUSIVE lock is WAL-logged, also one that fails at its third table, and
//! stalls the replay of standbys.)

use crate::duty::Progress;
use crate::error::Result;
use crate::grow::{self, Grown};
use crate::logs::segments;
use crate::pg::heap;
use crate::pg::latest::Latest;
use crate::pg::table::{Access, Table};
use crate::pg::time::{self, SECOND};
use crate::pg::xact;
use crate::receipt::MAX_SLOTS;
use crate::ring::{self, Events, SlotState, Tables};
use crate::rotation::{self, Step, LOGS};
use crate::settings;
use crate::statement::number;
use crate::statistics;
use crate::sums::{Finished, Stored};
use std::cell::RefCell;
use std::collections::HashMap;

/// The step of a slot that was refused.
#[derive(Clone, Copy)]
struct Refusal {
    /// It is left alone until then, and for so long.
    until: i64,
    pause: i64,
    /// Jobs that have not ended: nothing changes before somebody writes, and the next transaction id then.
    next_xid: Option<u64>,
}

thread_local! {
    /// By slot and generation.
    static REFUSED: RefCell<HashMap<(u8, i64), Refusal>> = RefCell::new(HashMap::new());
}

const FIRST_PAUSE: i64 = SECOND;
const LONGEST_PAUSE: i64 = 60 * SECOND;

/// Lets every slot be tried again at once: for maintenance that is asked for by hand.
pub fn forget_refusals() {
    REFUSED.with(|r| r.borrow_mut().clear());
}

fn refusal(slot: (u8, i64)) -> Option<Refusal> {
    REFUSED.with(|r| r.borrow().get(&slot).copied())
}

fn rests(slot: (u8, i64)) -> bool {
    refusal(slot).is_some_and(|r| time::now() < r.until)
}

fn refuse(slot: (u8, i64), until_somebody_writes: bool) {
    let pause = pause_after(refusal(slot).map(|r| r.pause));
    let refusal = Refusal {
        until: time::now().saturating_add(pause),
        pause,
        next_xid: until_somebody_writes.then(xact::next_xid),
    };
    REFUSED.with(|r| r.borrow_mut().insert(slot, refusal));
}

/// When a slot is to be tried again of which something is due at `at`; None: when somebody has written.
fn due_again(slot: (u8, i64), at: i64) -> Option<i64> {
    match refusal(slot) {
        Some(r) if r.next_xid == Some(xact::next_xid()) => None,
        Some(r) => Some(r.until.max(at)),
        None => Some(at),
    }
}

fn pause_after(last: Option<i64>) -> i64 {
    last.map_or(FIRST_PAUSE, |pause| (pause * 2).min(LONGEST_PAUSE))
}

fn accept(slot: (u8, i64)) {
    REFUSED.with(|r| r.borrow_mut().remove(&slot));
}

/// The ring as one look at it finds it.
struct Ring {
    tables: Tables,
    events: Events,
    stored: Stored,
}

impl Ring {
    fn read() -> Result<Ring> {
        let tables = ring::tables()?;
        ring::check_world(&tables)?;
        let events = ring::read_events(tables.ring);
        let stored = Stored::read(&Latest::take())?;
        let ring = Ring {
            tables,
            events,
            stored,
        };
        REFUSED.with(|r| {
            let known = |(slot, generation): &(u8, i64)| ring.events.generation(*slot) == *generation;
            r.borrow_mut().retain(|slot, _| known(slot));
        });
        Ok(ring)
    }

    /// Slots in a state, without the current one, oldest generation first.
    fn slots_in(&self, state: SlotState) -> Vec<(u8, i64)> {
        let mut slots: Vec<(u8, i64)> = (0..MAX_SLOTS)
            .filter(|s| self.events.state(*s) == state && *s != self.events.current)
            .map(|s| (s, self.events.generation(s)))
            .collect();
        slots.sort_by_key(|(_, generation)| *generation);
        slots
    }

    fn current(&self) -> (u8, i64) {
        let slot = self.events.current;
        (slot, self.events.generation(slot))
    }

    fn finished(&self, slot: (u8, i64)) -> Option<Finished> {
        self.stored.finished(slot.0, slot.1)
    }

    fn has_empty_slot(&self) -> bool {
        (0..MAX_SLOTS).any(|s| self.events.state(s) == SlotState::Empty && ring::slot_exists(s))
    }

    /// Finished jobs go before their retention is over where no slot is empty or the ring is too large.
    fn is_pressed(&self) -> Result<bool> {
        if !self.has_empty_slot() {
            return Ok(true);
        }
        let mut bytes = 0;
        for slot in (0..MAX_SLOTS).filter(|s| self.events.state(*s) != SlotState::Empty) {
            bytes += bytes_of(slot)?;
        }
        Ok(bytes > settings::retention_bytes())
    }

    /// When the current slot gets old: None while it is empty, so an idle queue never rotates.
    fn current_gets_old_at(&self) -> Result<Option<i64>> {
        let Some(since) = first_enqueued_at(self.events.current)? else {
            return Ok(None);
        };
        let slots = (0..MAX_SLOTS).filter(|s| ring::slot_exists(*s)).count() as i64;
        let age = settings::slot_age_micros().max(longest_retention(&self.tables)? / (slots / 2).max(1));
        Ok(Some(since.saturating_add(age)))
    }

    fn is_current_due(&self) -> Result<bool> {
        if bytes_of(self.events.current)? >= settings::slot_bytes() {
            return Ok(true);
        }
        let Some(old_at) = self.current_gets_old_at()? else {
            return Ok(false);
        };
        Ok(old_at <= time::now()
            // Only a closed slot is frozen before autovacuum does so with a lock that nothing can end.
            || !statistics::old_tables_of(&self.tables, self.events.current)?.is_empty())
    }
}

/// Tries the first thing that is due, in the caller's transaction, which ends after it. Where it was refused
/// there may be others to try.
pub fn step() -> Result<Progress> {
    let ring = Ring::read()?;
    let tried = try_one(&ring)?;
    Ok(Progress {
        done: i64::from(tried == Some(true)),
        more: tried.is_some(),
        next_due: match tried {
            Some(_) => None,
            None => due_after(&ring)?,
        },
    })
}

/// Whether the step that was tried changed something; None where there is none to try.
fn try_one(ring: &Ring) -> Result<Option<bool>> {
    for slot in ring.slots_in(SlotState::Open) {
        if !rests(slot) {
            return Ok(Some(did(slot, rotation::close(slot.0)?)));
        }
    }
    let closed = ring.slots_in(SlotState::Closed);
    for slot in closed.iter().filter(|s| ring.finished(**s).is_none()) {
        if !rests(*slot) {
            return Ok(Some(did(*slot, rotation::finish(slot.0)?)));
        }
    }
    let mut pressed = None;
    for slot in closed {
        let Some(finished) = ring.finished(slot) else {
            continue;
        };
        if rests(slot) {
            continue;
        }
        let retained = rotation::retained_until(&ring.tables, slot.0, &finished)?;
        let mut is_due = retained.is_none_or(|until| until <= time::now());
        if !is_due {
            let pressed = match pressed {
                Some(known) => known,
                None => *pressed.insert(ring.is_pressed()?),
            };
            is_due = pressed;
        }
        if is_due {
            return Ok(Some(did(slot, rotation::empty(slot.0, true)?)));
        }
    }
    let current = ring.current();
    if rests(current) || !ring.is_current_due()? {
        return Ok(None);
    }
    match rotation::seal()? {
        Step::NoEmptySlot => match grow::add_slot()? {
            // It becomes the current one with the next step.
            Grown::Added(_) => Ok(Some(true)),
            Grown::AtLimit | Grown::Busy => {
                refuse(current, false);
                Ok(Some(false))
            }
        },
        step => Ok(Some(did(current, step))),
    }
}

/// Whether a step changed something; where it did not, its slot rests.
fn did(slot: (u8, i64), step: Step) -> bool {
    let done = matches!(
        step,
        Step::Sealed { .. } | Step::Closed | Step::Finished | Step::Emptied
    );
    if done {
        accept(slot);
    } else {
        refuse(slot, matches!(step, Step::Open { .. }));
    }
    done
}

/// When the next step is due: None while nothing is known to become due. A current slot that becomes large is
/// not foreseen.
fn due_after(ring: &Ring) -> Result<Option<i64>> {
    let now = time::now();
    let mut due: Vec<i64> = Vec::new();
    for slot in ring.slots_in(SlotState::Open) {
        due.extend(due_again(slot, now));
    }
    for slot in ring.slots_in(SlotState::Closed) {
        let at = match ring.finished(slot) {
            None => now,
            Some(finished) => rotation::retained_until(&ring.tables, slot.0, &finished)?.unwrap_or(now),
        };
        due.extend(due_again(slot, at));
    }
    if let Some(old_at) = ring.current_gets_old_at()? {
        due.extend(due_again(ring.current(), old_at));
    }
    Ok(due.into_iter().min())
}

/// When the first job of a slot was enqueued.
fn first_enqueued_at(slot: u8) -> Result<Option<i64>> {
    let table = Table::open(ring::slot_relation("segments", slot)?, Access::Read);
    let mut first = None;
    heap::scan(&table, &Latest::take(), |row| {
        first = row.i64(segments::ENQUEUED_AT as usize);
        false
    });
    Ok(first)
}

fn longest_retention(tables: &Tables) -> Result<i64> {
    let longest = number(
        tables,
        "SELECT (pg_catalog.date_part('epoch', pg_catalog.max(
             COALESCE((settings->>'retention')::pg_catalog.interval, interval '1 day'))) * 1000000)::pg_catalog.int8
         FROM awa_internal.queues",
    )?;
    Ok(longest.unwrap_or(0))
}

fn bytes_of(slot: u8) -> Result<i64> {
    let mut bytes = 0;
    for log in LOGS {
        bytes += Table::open(ring::slot_relation(log, slot)?, Access::Read).total_bytes();
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_up_to_a_minute() {
        let mut last = None;
        let mut seconds = Vec::new();
        for _ in 0..8 {
            last = Some(pause_after(last));
            seconds.push(last.unwrap_or(0) / SECOND);
        }
        assert_eq!(seconds, [1, 2, 4, 8, 16, 32, 60, 60]);
    }
}
