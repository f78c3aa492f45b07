//! NOTIFY for queues that ask for it (setting `notify`), sent by maintenance and never by a producer, whose
//! commit would take the lock that all notifying commits of the server share.
//!
//! With shared memory a producer's commit marks its queue as having news, and a step announces the marked
//! ones. Without it, and once in each process, a step announces all that have a job ready: a notification
//! too many is harmless. The payload is empty; who listens calls awa.claim.

use crate::claim;
use crate::duty::Progress;
use crate::error::Result;
use crate::pg::command;
use crate::pg::datum;
use crate::pg::time;
use crate::pg::waiters;
use crate::queue::{self, Queue};
use crate::ring::{self, View};
use crate::statement;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// A queue is announced at most once in so many microseconds.
const WINDOW: i64 = time::SECOND / 10;

/// Longest name of a LISTEN channel, in bytes (NAMEDATALEN - 1).
const MAX_CHANNEL: usize = 63;

thread_local! {
    /// When this process announced a queue last.
    static SENT: RefCell<HashMap<i32, i64>> = RefCell::new(HashMap::new());
}

/// The channel of a queue.
pub fn channel(queue: &str) -> String {
    let plain = format!("awa:{queue}");
    if plain.len() <= MAX_CHANNEL {
        plain
    } else {
        format!("awa:#{}", datum::md5(queue))
    }
}

/// Announces the queues that have news. The notifications leave with the transaction's commit.
pub fn step() -> Result<Progress> {
    let view = ring::view()?;
    let queues = match waiters::news().filter(|_| waiters::available()) {
        Some(ids) => marked(&view, &ids)?,
        None => with_jobs(&view)?,
    };
    let mut progress = Progress::default();
    let now = time::now();
    for queue in queues {
        let last = SENT.with(|s| s.borrow().get(&queue.id).copied());
        if let Some(due) = last
            .map(|at| at + WINDOW)
            .filter(|due| *due > now && *due <= now + WINDOW)
        {
            progress.next_due = Some(progress.next_due.map_or(due, |d: i64| d.min(due)));
            continue;
        }
        // Taken before it is sent: news that come from now on are announced again.
        waiters::take_news(queue.id);
        command::notify(&channel(&queue.name));
        SENT.with(|s| s.borrow_mut().insert(queue.id, now));
        progress.done += 1;
    }
    Ok(progress)
}

/// The queues of the marks that want to be announced; marks of others are taken away.
fn marked(view: &View, ids: &[i32]) -> Result<Vec<Rc<Queue>>> {
    let mut queues = Vec::new();
    for id in ids {
        match queue::find_by_id(view, *id)? {
            Some(queue) if queue.notify => queues.push(queue),
            _ => waiters::take_news(*id),
        }
    }
    Ok(queues)
}

/// The queues that want to be announced and have a job ready.
fn with_jobs(view: &View) -> Result<Vec<Rc<Queue>>> {
    let sql = "SELECT queue_id::pg_catalog.int8 FROM awa_internal.queues WHERE settings->>'notify' = 'true' ORDER BY 1";
    let ids = statement::rows(&view.tables, sql, |row| row.get::<i64>(1))?;
    let mut queues = Vec::new();
    for id in ids.into_iter().flatten() {
        if let Some(queue) = queue::find_by_id(view, id as i32)? {
            if claim::any_claimable(std::slice::from_ref(&queue))? {
                queues.push(queue);
            }
        }
    }
    Ok(queues)
}
