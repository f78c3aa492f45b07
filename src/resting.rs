//! Rows of `deferred` and `dead_letters` taken out by their place, whatever the isolation level.

use crate::by_id::{Answer, Work};
use crate::counts::{self, Counted};
use crate::dead;
use crate::defer::{self, Deferred, Waits};
use crate::error::Result;
use crate::lane::LaneId;
use crate::pg::datum::{self, Varlena};
use crate::pg::heap::{self, Fetcher, Place, Row};
use crate::pg::latest::Latest;
use crate::pg::table::{Access, Oid, Table};
use crate::ring::View;
use std::collections::BTreeMap;
use std::rc::Rc;

/// What became of a row that was to be taken out.
pub enum Removed {
    Job(Deferred),
    /// It was not meant.
    Left(i64, Answer),
    /// Somebody else took it out.
    Moved(i64),
}

/// Takes the deferred jobs out that are meant. What another transaction is just taking out is waited for, or
/// left.
pub fn remove_deferred(
    view: &View,
    rows: &[(i64, Place)],
    wait: bool,
    meant: impl Fn(&Deferred) -> bool,
) -> Result<Vec<Removed>> {
    let removed = remove(defer::deferred_table()?, rows, wait, meant, |id, row| Deferred {
        job_id: id,
        run_at: row.i64(2).unwrap_or(0),
        lane: LaneId(row.i64(3).unwrap_or(0)),
        attempt: row.i16(4).unwrap_or(1),
        max_attempts: row.i16(5).unwrap_or(1),
        waits: Waits::of(row.char(6).unwrap_or(0)),
        kind: row.varlena(7).map(Varlena::flattened),
        args: args_of(row, 8),
        rest: row.varlena(9).map(Varlena::flattened),
    });
    defer::count(&view.tables, jobs(&removed).map(|j| (j.lane, j.waits)), -1)?;
    Ok(removed)
}

/// Takes dead letters out, as jobs that start over.
pub fn remove_letters(view: &View, rows: &[(i64, Place)]) -> Result<Vec<Removed>> {
    let removed = remove(
        dead::dead_letters_table()?,
        rows,
        true,
        |_| true,
        |id, row| Deferred {
            job_id: id,
            run_at: 0,
            lane: LaneId(row.i64(3).unwrap_or(0)),
            attempt: 1,
            max_attempts: row.i16(5).unwrap_or(1),
            waits: Waits::Scheduled,
            kind: row.varlena(6).map(Varlena::flattened),
            args: args_of(row, 7),
            rest: row.varlena(8).map(Varlena::flattened),
        },
    );
    let mut by_queue: BTreeMap<i32, i64> = BTreeMap::new();
    for job in jobs(&removed) {
        *by_queue.entry(job.lane.queue_id()).or_insert(0) -= 1;
    }
    for (queue, n) in by_queue {
        counts::add(&view.tables, queue, Counted::DeadLetters, n)?;
    }
    Ok(removed)
}

fn jobs(removed: &[Removed]) -> impl Iterator<Item = &Deferred> {
    removed.iter().filter_map(|r| match r {
        Removed::Job(job) => Some(job),
        _ => None,
    })
}

fn args_of(row: &Row, column: usize) -> Varlena {
    row.varlena(column)
        .map_or_else(|| datum::jsonb_from_text("null"), Varlena::flattened)
}

fn remove(
    table: Oid,
    rows: &[(i64, Place)],
    wait: bool,
    meant: impl Fn(&Deferred) -> bool,
    read: impl Fn(i64, &Row) -> Deferred,
) -> Vec<Removed> {
    if rows.is_empty() {
        return Vec::new();
    }
    let table = Rc::new(Table::open(table, Access::Write));
    // Fetching TOASTed values needs an active snapshot.
    let _active = Latest::take_active();
    // All are read before the first is waited for: the fetcher holds a pin.
    let mut fetcher = Fetcher::new(&table);
    let read: Vec<Option<Deferred>> = rows
        .iter()
        .map(|(id, place)| fetcher.fetch(*place, *id).map(|row| read(*id, &row)))
        .collect();
    drop(fetcher);
    rows.iter()
        .zip(read)
        .map(|((id, place), job)| match job {
            Some(job) if !meant(&job) => {
                let state = match job.waits {
                    Waits::Scheduled => "scheduled",
                    Waits::Retryable => "retryable",
                };
                Removed::Left(*id, Answer::of(job.lane, job.kind, state, false))
            }
            Some(job) if heap::delete(&table, *place, wait) => Removed::Job(job),
            _ => Removed::Moved(*id),
        })
        .collect()
}

/// Says of a dead letter what is asked of a finished job.
pub fn answer_of_letter(id: i64, place: Place, work: &mut Work) -> Result<()> {
    let table = Rc::new(Table::open(dead::dead_letters_table()?, Access::Read));
    let row = Fetcher::new(&table).fetch(place, id);
    work.answer(
        id,
        row.map_or(Answer::UNKNOWN, |row| {
            let lane = LaneId(row.i64(3).unwrap_or(0));
            Answer::of(lane, row.varlena(6).map(Varlena::flattened), "failed", false)
        }),
    );
    Ok(())
}
