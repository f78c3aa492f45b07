//! Release: a running job goes back to the tail of its lane as a new entry. Its attempt does not count; its
//! place in the lane is lost.

use crate::body::Body;
use crate::close::Job;
use crate::enqueue::{self, Entry};
use crate::error::{Error, Result};
use crate::lane::LaneId;
use crate::logs::rest;
use crate::pg::composite;
use crate::pg::datum::{Value, Varlena};
use crate::ring::{self, View};
use std::collections::{BTreeMap, HashSet};

/// Puts jobs that were just closed as released at the tail of their lanes: same id, same attempt.
pub fn put_back<'j>(jobs: impl Iterator<Item = Option<&'j Job>>) -> Result<()> {
    let view = ring::view_for_write()?;
    let mut by_lane: BTreeMap<LaneId, Vec<Entry>> = BTreeMap::new();
    let mut seen = HashSet::new();
    for job in jobs {
        let Some((job, body)) = job.and_then(|j| Some((j, j.body.as_ref()?))) else {
            // Closed, it would be gone; the error undoes that.
            return Err(Error::Layout(
                "the row of a job that is to be released is lost".to_string(),
            ));
        };
        if !seen.insert(job.head.entry_id) {
            continue; // the receipt twice in one call
        }
        by_lane.entry(job.lane).or_default().push(Entry {
            job_id: Some(job.head.job_id),
            attempt: job.head.attempt,
            max_attempts: body.max_attempts,
            kind: job.head.kind,
            args: body.args,
            rest: Some(rest_of_moved(&view, body, job.segment_at)),
        });
    }
    for (lane, entries) in by_lane {
        enqueue::fold(lane, &entries)?;
    }
    Ok(())
}

/// The rare columns of a job that moves on: all it had, and when it was first enqueued.
fn rest_of_moved(view: &View, body: &Body, segment_at: i64) -> Varlena {
    let mut values = [Value::Null; rest::COUNT];
    if let Some(rest) = &body.rest {
        for (i, v) in values.iter_mut().enumerate() {
            *v = rest.value(i);
        }
    }
    values[rest::ENQUEUED_AT] = body.enqueued_at(segment_at).into();
    values[rest::RUN_AT] = Value::Null;
    composite::build(view.tables.rest_type, &values)
}
