//! Verbs that name jobs by their ids: cancel and retry.
//!
//! Such a verb locks the ids to the end of its transaction, so that no two of them decide about one job at
//! once, and looks where each job is. Claims, closings and promotions do not take these locks: what moved
//! between the look and the deed is looked at again, after the transaction that moved it has ended.

use crate::error::{Error, Result};
use crate::find::{Entry, Finder, Where};
use crate::lane::LaneId;
use crate::pg::command;
use crate::pg::datum::{Value, Varlena};
use crate::pg::fmgr::ResultSet;
use crate::pg::lock::{self, Class, Mode};
use crate::pg::memory::Scratch;
use crate::queue;
use crate::ring;
use crate::take::Position;
use std::collections::{BTreeSet, HashMap};

/// Ids that a call may name.
const MAX_JOBS: usize = 100_000;
/// Jobs that are looked up and dealt with in one go.
const CHUNK: usize = 1000;
/// Up to so many ids are locked one by one; more by their groups, since the server's lock table is small.
const MOST_LOCKS: usize = 256;
/// Groups of ids.
const GROUPS: u64 = 64;
/// Marks the key of a group.
const GROUP: u64 = 1 << 63;

/// What is said of one job.
#[derive(Clone)]
pub struct Answer {
    pub lane: Option<LaneId>,
    /// None where it is the queue's name.
    pub kind: Option<String>,
    pub state: &'static str,
    pub changed: bool,
}

impl Answer {
    pub const UNKNOWN: Answer = Answer {
        lane: None,
        kind: None,
        state: "unknown",
        changed: false,
    };

    pub fn of(lane: LaneId, kind: Option<Varlena>, state: &'static str, changed: bool) -> Answer {
        Answer {
            lane: Some(lane),
            kind: kind.map(Varlena::text),
            state,
            changed,
        }
    }
}

/// What one go leaves.
#[derive(Default)]
pub struct Work {
    pub answers: HashMap<i64, Answer>,
    /// Moved meanwhile, to be looked for again.
    pub again: Vec<i64>,
    /// Transactions to wait for before that.
    pub wait_for: BTreeSet<u32>,
}

impl Work {
    pub fn answer(&mut self, id: i64, answer: Answer) {
        self.answers.insert(id, answer);
    }
}

/// Deals with jobs: locks their ids, finds them, lets `act` do what is to be done to those found, and again
/// to those that moved. With `wait` false nobody is waited for: what others have in hand is left out.
pub fn work(
    ids: &[i64],
    wait: bool,
    mut act: impl FnMut(Finder, Vec<(i64, Where)>, &mut Work) -> Result<()>,
) -> Result<HashMap<i64, Answer>> {
    let sorted: BTreeSet<i64> = ids.iter().copied().collect();
    let sorted: Vec<i64> = if wait {
        let sorted = sorted.into_iter().collect::<Vec<_>>();
        lock_ids(&sorted);
        sorted
    } else {
        sorted.into_iter().filter(|id| try_lock_id(*id)).collect()
    };
    let mut work = Work::default();
    let mut scratch = Scratch::new();
    for chunk in sorted.chunks(CHUNK) {
        let mut todo = chunk.to_vec();
        while !todo.is_empty() {
            command::check_for_interrupts();
            scratch.run(|| -> Result<()> {
                let mut finder = Finder::new()?;
                let found = todo.iter().map(|id| (*id, finder.find(*id))).collect();
                act(finder, found, &mut work)
            })?;
            command::next_command();
            todo = std::mem::take(&mut work.again);
            if !wait {
                break;
            }
            for xid in std::mem::take(&mut work.wait_for) {
                lock::wait_for_xid(xid);
            }
        }
    }
    Ok(work.answers)
}

fn group_of(id: i64) -> u64 {
    GROUP | (id as u64 % GROUPS)
}

/// Locks ids, sorted, to the end of the transaction. A few: their groups shared, each by itself exclusively.
/// Many: their groups exclusively.
fn lock_ids(sorted: &[i64]) {
    let groups: BTreeSet<u64> = sorted.iter().map(|id| group_of(*id)).collect();
    let many = sorted.len() > MOST_LOCKS;
    for group in groups {
        lock::hold(
            Class::Job,
            group,
            if many { Mode::Exclusive } else { Mode::Share },
        );
    }
    if !many {
        for id in sorted {
            lock::hold(Class::Job, *id as u64, Mode::Exclusive);
        }
    }
}

fn try_lock_id(id: i64) -> bool {
    lock::try_hold(Class::Job, group_of(id), Mode::Share)
        && lock::try_hold(Class::Job, id as u64, Mode::Exclusive)
}

/// The position of a waiting job's entry.
pub fn position(entry: &Entry) -> Position {
    Position {
        lane: entry.lane,
        slot: entry.slot,
        seq: entry.seq,
        first_entry: entry.first_entry,
    }
}

pub fn check_count(ids: &[Option<i64>]) -> Result<()> {
    if ids.len() > MAX_JOBS {
        return Err(Error::limit(
            format!("{} jobs in one call, more than {MAX_JOBS}", ids.len()),
            "Split them over several calls; one transaction can hold them all.",
        ));
    }
    Ok(())
}

/// Ids that can be a job's.
pub fn plausible(ids: &[Option<i64>]) -> Vec<i64> {
    ids.iter().filter_map(|id| id.filter(|id| *id > 0)).collect()
}

/// Appends one row per id, in input order.
pub fn push_rows(ids: &[Option<i64>], answers: &HashMap<i64, Answer>, out: &mut ResultSet) -> Result<()> {
    let view = ring::view_for_write()?;
    for id in ids {
        let answer = id.and_then(|id| answers.get(&id)).unwrap_or(&Answer::UNKNOWN);
        let queue = match answer.lane {
            Some(lane) => queue::find_by_id(&view, lane.queue_id())?,
            None => None,
        };
        let name = queue.as_ref().map(|q| q.name.as_str());
        let kind = answer.kind.as_deref().or(name);
        out.push(&[
            (*id).into(),
            name.into(),
            kind.into(),
            answer.state.into(),
            answer.changed.into(),
            Value::Null,
        ]);
    }
    Ok(())
}
