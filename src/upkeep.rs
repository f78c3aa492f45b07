//! The duties of maintenance: what is due, decided and done in steps of one transaction each.

use crate::error::Result;
use crate::notify;
use crate::pg::command;
use crate::receipt::MAX_SLOTS;
use crate::ring::{self, Events, SlotState, Tables};
use crate::rotation;
use crate::settings;
use crate::statement::number;

/// Does all that is due, once, each step in its own transaction.
pub fn run_all() -> Result<()> {
    command::commit_and_begin();
    if is_current_slot_due()? {
        rotation::seal()?;
        command::commit_and_begin();
    }
    for slot in slots_in(SlotState::Open)? {
        rotation::close(slot)?;
        command::commit_and_begin();
    }
    for slot in slots_in(SlotState::Closed)? {
        let pressed = is_ring_pressed()?;
        rotation::empty(slot, pressed)?;
        command::commit_and_begin();
    }
    notify::step()?;
    command::commit_and_begin();
    Ok(())
}

/// Slots in a state, without the current one, oldest generation first.
fn slots_in(state: SlotState) -> Result<Vec<u8>> {
    let tables = ring::tables()?;
    let events = ring::read_events(tables.ring);
    let mut slots: Vec<u8> = (0..MAX_SLOTS)
        .filter(|s| events.state(*s) == state && *s != events.current)
        .collect();
    slots.sort_by_key(|s| events.generation(*s));
    Ok(slots)
}

/// Whether the current slot is large, or old and not empty.
fn is_current_slot_due() -> Result<bool> {
    let tables = ring::tables()?;
    let events = ring::read_events(tables.ring);
    let slot = events.current;
    if size_of(&tables, slot)? >= settings::slot_bytes() {
        return Ok(true);
    }
    let age = number(
        &tables,
        &format!(
            "SELECT (pg_catalog.date_part('epoch', pg_catalog.clock_timestamp() - enqueued_at) * 1000000)::pg_catalog.int8
             FROM awa_internal.segments_{slot} LIMIT 1"
        ),
    )?;
    let limit = settings::slot_age_micros().max(longest_retention(&tables)? / (slot_count() / 2).max(1));
    Ok(age.is_some_and(|a| a >= limit))
}

/// Finished jobs go before their retention is over where no slot is empty or the ring is too large.
fn is_ring_pressed() -> Result<bool> {
    let tables = ring::tables()?;
    let events = ring::read_events(tables.ring);
    let any_empty = (0..slot_count() as u8).any(|s| events.state(s) == SlotState::Empty);
    Ok(!any_empty || size_of_ring(&tables, &events)? > settings::retention_bytes())
}

fn slot_count() -> i64 {
    (0..MAX_SLOTS).take_while(|s| ring::slot_exists(*s)).count() as i64
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

fn size_of(tables: &Tables, slot: u8) -> Result<i64> {
    let sql = format!(
        "SELECT pg_catalog.sum(pg_catalog.pg_total_relation_size(t::pg_catalog.regclass))::pg_catalog.int8
         FROM pg_catalog.unnest(ARRAY['awa_internal.ready_{slot}', 'awa_internal.segments_{slot}',
                                      'awa_internal.claims_{slot}', 'awa_internal.closures_{slot}']) t"
    );
    Ok(number(tables, &sql)?.unwrap_or(0))
}

fn size_of_ring(tables: &Tables, events: &Events) -> Result<i64> {
    let mut total = 0;
    for slot in (0..MAX_SLOTS).filter(|s| events.state(*s) != SlotState::Empty) {
        total += size_of(tables, slot)?;
    }
    Ok(total)
}
