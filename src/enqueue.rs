//! The enqueue fold: rows first, without any lock but the slot's tables', then the lane lock for the few
//! microseconds that a seq and a segment row take.
//!
//! Rollback leaves aborted rows behind and a gap in the seqs; nobody waits for anybody's COMMIT.

use crate::error::Result;
use crate::ids;
use crate::lane::{self, Counters, LaneId};
use crate::logs::segments;
use crate::pg::command;
use crate::pg::datum::{self, Value, Varlena};
use crate::pg::heap::{self, Appended};
use crate::pg::index::IndexSet;
use crate::pg::inject::{self, Mutant, Point};
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::memory::Scratch;
use crate::pg::table::{Access, Table};
use crate::pg::time;
use crate::pg::waiters;
use crate::queue;
use crate::receipt::MAX_PER_CLAIM;
use crate::ring::{self, Slot, View};
use crate::runs;
use std::rc::Rc;

/// A job on its way into a lane.
#[derive(Clone, Copy)]
pub struct Entry {
    /// None for a fresh job, whose id is its entry's.
    pub job_id: Option<i64>,
    pub attempt: i16,
    pub max_attempts: i16,
    /// None where it is the queue's name.
    pub kind: Option<Varlena>,
    pub args: Varlena,
    pub rest: Option<Varlena>,
}

/// The current slot's tables, locked for writing, with the slot proved to be live under these locks.
struct Target {
    view: Rc<View>,
    slot: Slot,
    ready: Table,
    ready_indexes: IndexSet,
    segments: Table,
    segment_indexes: IndexSet,
}

impl Target {
    fn open() -> Result<Target> {
        loop {
            let view = ring::view_for_write()?;
            let slot = view.current().clone();
            inject::reach(Point::EnqueueSlotChosen);
            let ready = Table::open(slot.ready, Access::Write);
            let segment_table = Table::open(slot.segments, Access::Write);
            // The slot may have been sealed, closed and emptied between the choice and the locks. From here on
            // it can not go.
            if inject::mutant(Mutant::EpochSlot) || ring::is_current(&view) {
                let ready_indexes = IndexSet::open(&ready);
                let segment_indexes = IndexSet::open(&segment_table);
                // Without that index nobody would find the segment: refused before anything is written.
                segment_indexes.scannable(&segment_table, &segments::BY_SEQ)?;
                return Ok(Target {
                    view,
                    slot,
                    ready,
                    ready_indexes,
                    segments: segment_table,
                    segment_indexes,
                });
            }
        }
    }
}

/// Puts entries into a lane, in order, and returns their entry ids. All belong to the current transaction
/// and become claimable with its commit.
pub fn fold(lane: LaneId, entries: &[Entry]) -> Result<Vec<i64>> {
    let mut ids = Vec::with_capacity(entries.len());
    if entries.is_empty() {
        return Ok(ids);
    }
    let target = Target::open()?;
    let mut scratch = Scratch::new();
    for chunk in entries.chunks(MAX_PER_CLAIM as usize) {
        scratch.run(|| append_chunk(&target, lane, chunk, &mut ids))?;
    }
    if waiters::available() {
        let queue = queue::find_by_id(&target.view, lane.queue_id())?;
        let notify = queue.is_some_and(|q| q.notify);
        waiters::note_produced(lane.queue_id(), entries.len(), notify);
    }
    command::next_command();
    Ok(ids)
}

fn append_chunk(target: &Target, lane: LaneId, chunk: &[Entry], ids: &mut Vec<i64>) -> Result<()> {
    let first_entry = ids::draw_entries(&target.view, chunk.len());
    let slot = i16::from(target.slot.no);
    let rows: Vec<[Value; 8]> = chunk
        .iter()
        .zip(first_entry..)
        .map(|(e, entry_id)| {
            [
                entry_id.into(),
                e.job_id.into(),
                slot.into(),
                e.attempt.into(),
                e.max_attempts.into(),
                e.kind.into(),
                e.args.into(),
                e.rest.into(),
            ]
        })
        .collect();
    let appended = heap::append_many(&target.ready, &rows);
    enter_ready_indexes(target, chunk, &appended);
    inject::reach(Point::EnqueueRowsWritten);
    let places: Vec<_> = appended.iter().map(Appended::place).collect();
    let mut done = 0;
    while done < places.len() {
        let (runs, n) = runs::gather(&places[done..]);
        append_segment(
            target,
            lane,
            first_entry + done as i64,
            n as i64,
            &runs::encode(&runs),
        )?;
        done += n;
    }
    ids.extend(first_entry..first_entry + chunk.len() as i64);
    Ok(())
}

fn enter_ready_indexes(target: &Target, chunk: &[Entry], appended: &[Appended]) {
    let column = crate::logs::ready::BY_JOB[0];
    let idle = target.ready_indexes.idle_for(column);
    for (entry, row) in chunk.iter().zip(appended) {
        if !(idle && entry.job_id.is_none()) {
            row.enter_all(&target.ready, &target.ready_indexes);
        }
    }
}

/// Reserves the seqs of one segment and appends its row; the lane lock is held for that and no longer.
fn append_segment(target: &Target, lane: LaneId, first_entry: i64, n: i64, runs: &[u8]) -> Result<()> {
    let runs = datum::bytea(runs);
    let mut use_index = false;
    loop {
        let view = if inject::mutant(Mutant::EpochReserve) {
            target.view.clone()
        } else {
            ring::view_for_write()?
        };
        let counters = if use_index || lane::needs_counters(&view, lane) {
            Some(Counters::open(&view, lane)?)
        } else {
            None
        };
        let lock = ShortLock::acquire(Class::Lane, lane.key(), Mode::Exclusive);
        if counters.is_some() && !inject::mutant(Mutant::EpochReserve) && !ring::is_current(&view) {
            continue; // a slot was opened or emptied meanwhile: the counters may miss segments
        }
        let Some(first_seq) = lane::reserve(&view, lane, n, counters.as_ref()) else {
            use_index = true;
            continue;
        };
        inject::reach(Point::EnqueueReserved);
        let row = heap::append(
            &target.segments,
            &[
                lane.0.into(),
                first_seq.into(),
                first_entry.into(),
                time::now().into(),
                i16::from(target.slot.no).into(),
                (n as i16).into(),
                runs.into(),
            ],
        );
        row.enter_ordering(&target.segments, &target.segment_indexes, &segments::BY_SEQ);
        drop(lock);
        row.enter_rest(&target.segments, &target.segment_indexes, &segments::BY_SEQ);
        return Ok(());
    }
}
