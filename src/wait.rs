//! Waiting until a queue may have a job, without a snapshot: each look is a transaction of its own, and what
//! follows it sleeps in one that has read nothing.
//!
//! With shared memory a waiter is woken by the end of the transaction that makes a job claimable. It also
//! looks every second, which costs little and finds what no callback tells of: COMMIT PREPARED, and jobs whose
//! waiter was woken but never claimed. Without shared memory, or where the table of waiters is full, it
//! polls: after 10 ms, then in growing steps up to 200 ms.

use crate::claim;
use crate::error::Result;
use crate::pg::command;
use crate::pg::inject::{self, Point};
use crate::pg::sleep;
use crate::pg::time;
use crate::pg::waiters::{self, Place};
use crate::queue::{self, Queue};
use crate::ring;
use std::rc::Rc;

const REGULAR_LOOK: i64 = time::SECOND;
const FIRST_POLL: i64 = 10_000;
const LONGEST_POLL: i64 = 200_000;
/// A wait ends so long before statement_timeout would cancel it.
const BEFORE_STATEMENT_TIMEOUT: i64 = time::SECOND / 2;

/// Waits up to `timeout` microseconds; whether a job may be claimable. Called where transactions can be ended.
pub fn wait(names: &[String], timeout: i64) -> Result<bool> {
    let mut deadline = sleep::clock().saturating_add(timeout);
    if let Some(end) = sleep::statement_deadline() {
        deadline = deadline.min(end - BEFORE_STATEMENT_TIMEOUT);
    }
    command::commit_and_begin();
    let mut registered: Option<Vec<i32>> = None;
    let mut place: Option<Place> = None;
    let mut poll = FIRST_POLL;
    loop {
        // Whoever makes a job claimable from here on wakes; what was claimable before is found by the look.
        if let Some(place) = &place {
            place.take_wake();
        }
        inject::reach(Point::WaitRegistered);
        let looked = look(names)?;
        if registered.as_ref() != Some(&looked.ids) && !looked.ready {
            place = None; // one entry at a time
            place = waiters::enter(&looked.ids).or(place);
            registered = Some(looked.ids);
            command::commit_and_begin();
            continue;
        }
        command::commit_and_begin();
        if looked.ready {
            return Ok(true);
        }
        inject::reach(Point::WaitBeforeSleep);
        let nap = match &place {
            Some(_) => REGULAR_LOOK,
            None => poll,
        };
        poll = (poll * 2).min(LONGEST_POLL);
        let nap = sleep::transaction_limit().map_or(nap, |limit| nap.min(limit / 2));
        if !sleep_until(&place, (sleep::clock() + nap).min(deadline), deadline) {
            return Ok(false);
        }
    }
}

/// Sleeps until woken or `until`; false where the deadline has passed without a wake.
fn sleep_until(place: &Option<Place>, until: i64, deadline: i64) -> bool {
    loop {
        if place.as_ref().is_some_and(Place::is_woken) {
            return true;
        }
        let now = sleep::clock();
        if now >= deadline {
            return false;
        }
        if now >= until {
            return true;
        }
        sleep::on_latch(until);
    }
}

/// What a look found.
struct Looked {
    ready: bool,
    /// The queues to be woken for.
    ids: Vec<i32>,
}

fn look(names: &[String]) -> Result<Looked> {
    let view = ring::view()?;
    let mut queues: Vec<Rc<Queue>> = Vec::new();
    let mut ids = Vec::new();
    for name in names {
        let found = match queue::find(&view, name)? {
            // A wake comes a moment before the message that outdates what is remembered.
            Some(q) if q.paused => queue::find_with_settings(&view, name)?.map(|(q, _)| Rc::new(q)),
            found => found,
        };
        match found {
            Some(q) if queues.iter().any(|known| known.id == q.id) => {}
            Some(q) => queues.push(q),
            None => {
                queue::warn_unknown(name);
                ids.push(waiters::NEW_QUEUE);
            }
        }
    }
    ids.extend(queues.iter().map(|q| q.id));
    ids.sort_unstable();
    ids.dedup();
    let ready = claim::any_claimable(&queues)?;
    Ok(Looked { ready, ids })
}
