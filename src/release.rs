//! Release: a running job goes back to the tail of its lane as a new entry. Its attempt does not count; its
//! place in the lane is lost.

use crate::carry::Carried;
use crate::checkpoint::Checkpoints;
use crate::close::{self, Job};
use crate::enqueue::{self, Entry};
use crate::error::Result;
use crate::lane::LaneId;
use crate::ring;
use std::collections::BTreeMap;

/// Puts jobs that were just closed as released at the tail of their lanes: same id, same attempt.
pub fn put_back<'j>(jobs: impl Iterator<Item = Option<&'j Job>>) -> Result<()> {
    let mut by_lane: BTreeMap<LaneId, Vec<Entry>> = BTreeMap::new();
    let mut view = None;
    let mut checkpoints = None;
    for job in jobs {
        let (job, body) = close::whole(job)?;
        let view = match &view {
            Some(view) => view,
            None => view.insert(ring::view_for_write()?),
        };
        let checkpoints = match &checkpoints {
            Some(checkpoints) => checkpoints,
            None => checkpoints.insert(Checkpoints::open()?),
        };
        let mut carried = Carried::from_body(body, job.segment_at);
        carried.set_checkpoint(checkpoints.of(job.receipt));
        by_lane.entry(job.lane).or_default().push(Entry {
            job_id: Some(job.head.job_id),
            attempt: job.head.attempt,
            max_attempts: body.max_attempts,
            kind: job.head.kind,
            args: body.args,
            rest: Some(carried.build(view)),
        });
    }
    for (lane, entries) in by_lane {
        enqueue::fold(lane, &entries)?;
    }
    Ok(())
}
