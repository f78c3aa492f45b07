//! Claims: which lanes are visited and in which order, and how a range of one is taken.

use crate::body::{Body, Reader};
use crate::close;
use crate::error::Result;
use crate::failure;
use crate::ids;
use crate::lane::{self, LaneId, PRIORITIES};
use crate::live::{self, Live};
use crate::logs::{claims, rest};
use crate::pg::command;
use crate::pg::datum::{Value, Varlena};
use crate::pg::fmgr::ResultSet;
use crate::pg::heap::{self, Appended};
use crate::pg::inject::{self, Mutant, Point};
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::memory::Scratch;
use crate::pg::shmem;
use crate::pg::time::{self, Interval};
use crate::pg::waiters;
use crate::pg::xact;
use crate::queue::Queue;
use crate::ranges::RangeList;
use crate::receipt::Receipt;
use crate::ring;
use crate::walk::{Found, Order, Pick, Walk};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::rc::Rc;

/// What a claim asks for.
pub struct Request {
    pub queues: Vec<Rc<Queue>>,
    pub max_jobs: i64,
    pub worker: Option<Varlena>,
    pub lease: Option<Interval>,
}

/// What this session knows of a lane. The ranges are only used where there is no shared memory for them.
#[derive(Default)]
struct Known {
    list: Option<RangeList>,
    head_at: Option<i64>,
    looked_at: i64,
}

thread_local! {
    static LANES: RefCell<HashMap<LaneId, Known>> = RefCell::new(HashMap::new());
    static ROTOR: Cell<u64> = const { Cell::new(0) };
}

/// A head that is not known is looked for this many times per aging interval: ageing has that precision.
const LOOKS_PER_AGING: i64 = 16;
/// Lanes that a session remembers; beyond, it starts afresh.
const MAX_KNOWN: usize = 100_000;

pub fn forget() {
    LANES.with(|l| l.borrow_mut().clear());
    live::forget();
}

/// Claims up to `max_jobs` jobs and appends a row for each to `out`. All work is done before the first row
/// can be read.
pub fn claim(request: &Request, out: &mut ResultSet) -> Result<()> {
    // Where all that was taken had waited too long, others may be waiting behind.
    while claim_once(request, out)? {}
    Ok(())
}

/// One go; true where jobs were taken and none of them can be returned.
fn claim_once(request: &Request, out: &mut ResultSet) -> Result<bool> {
    let relaxed = xact::only_claims_so_far();
    let view = ring::view_for_write()?;
    let now = time::now();
    let mut live = Live::new(view);
    let mut lanes = lanes_to_visit(request, &mut live, now)?;
    let share = share_of(request);
    let mut left = request.max_jobs;
    let mut by_queue: HashMap<i32, i64> = HashMap::new();
    let mut taken = Vec::new();
    let rounds = if request.queues.len() > 1 { 2 } else { 1 };
    for round in 1..=rounds {
        for visit in &mut lanes {
            if left <= 0 {
                break;
            }
            let of_queue = by_queue.entry(visit.queue.id).or_insert(0);
            let want = if round < rounds {
                left.min(share - *of_queue)
            } else {
                left
            };
            if want <= 0 || visit.exhausted {
                continue;
            }
            let n = take_from_lane(&mut live, visit, want, request, &mut taken)?;
            *of_queue += n;
            left -= n;
        }
    }
    if taken.is_empty() {
        return Ok(false);
    }
    // What this transaction has written so far is claims alone; rows that are lost write more.
    if relaxed {
        xact::note_claim_wal();
    }
    for t in &taken {
        let jobs: i64 = t.picks.iter().map(|p| p.n).sum();
        waiters::note_claimed(t.queue.id, jobs as usize, t.queue.notify);
    }
    let read = deliver(&taken, now, out)?;
    drop(live);
    close::close_lost(&read.lost)?;
    close::close_expired(&read.expired)?;
    command::next_command();
    Ok(read.delivered == 0)
}

/// Each queue of a claim over several is given its share first.
fn share_of(request: &Request) -> i64 {
    let queues = request.queues.len().max(1) as i64;
    (request.max_jobs + queues - 1) / queues
}

/// A lane on the way of a claim.
struct Visit {
    lane: LaneId,
    queue: Rc<Queue>,
    exhausted: bool,
}

/// Whole `aging_interval`s that a job has waited, as far as they can raise its priority.
fn steps_of_age(queue: &Queue, waited: i64) -> i64 {
    if queue.aging > 0 {
        (waited / queue.aging).clamp(0, PRIORITIES)
    } else {
        0
    }
}

/// Priority after ageing: one step for each whole `aging_interval` that the job has waited.
fn effective_priority(queue: &Queue, priority: u8, waited: i64) -> u8 {
    i64::from(priority)
        .saturating_sub(steps_of_age(queue, waited))
        .max(1) as u8
}

/// The lanes of the queues that may hold something, by effective priority, then by the age of their head;
/// among equals a different shard comes first each time.
fn lanes_to_visit(request: &Request, live: &mut Live, now: i64) -> Result<Vec<Visit>> {
    let turn = ROTOR.with(|r| {
        r.set(r.get().wrapping_add(1));
        r.get()
    });
    let mut lanes = Vec::new();
    for queue in request.queues.iter().filter(|q| !q.paused) {
        for priority in 1..=PRIORITIES as u8 {
            for i in 0..queue.shards {
                let shard = ((turn + u64::from(i)) % u64::from(queue.shards)) as u8;
                let lane = LaneId::new(queue.id, priority, shard);
                if is_surely_empty(live, lane) {
                    continue;
                }
                let head = head_of(live, queue, lane, priority, now)?;
                let effective = effective_priority(queue, priority, head.map_or(0, |at| now - at));
                let visit = Visit {
                    lane,
                    queue: queue.clone(),
                    exhausted: false,
                };
                lanes.push((effective, head.unwrap_or(now), visit));
            }
        }
    }
    lanes.sort_by_key(|(effective, head, _)| (*effective, *head));
    Ok(lanes.into_iter().map(|(_, _, visit)| visit).collect())
}

/// Told by shared memory alone: every seq that was given out is below the frontier and nothing is
/// undecided.
fn is_surely_empty(live: &Live, lane: LaneId) -> bool {
    shmem::find(live.view.incarnation, lane.0).is_some_and(|e| e.next().is_some_and(|next| e.low() == next))
}

/// When the lane's first free job was enqueued, as known or as found by a look without the claim lock.
/// Only needed where ageing can change the order.
fn head_of(live: &mut Live, queue: &Queue, lane: LaneId, priority: u8, now: i64) -> Result<Option<i64>> {
    if priority == 1 || queue.aging == 0 {
        return Ok(LANES.with(|l| l.borrow().get(&lane).and_then(|k| k.head_at)));
    }
    let (head, looked) = LANES.with(|l| {
        l.borrow()
            .get(&lane)
            .map_or((None, 0), |k| (k.head_at, k.looked_at))
    });
    if head.is_some() || now - looked < queue.aging / LOOKS_PER_AGING {
        return Ok(head);
    }
    let head = self::head(live, lane, queue.strict)?;
    remember(lane, |k| {
        k.head_at = head;
        k.looked_at = now;
    });
    Ok(head)
}

fn remember(lane: LaneId, change: impl FnOnce(&mut Known)) {
    LANES.with(|l| {
        let mut l = l.borrow_mut();
        if l.len() > MAX_KNOWN {
            l.clear();
        }
        change(l.entry(lane).or_default());
    });
}

/// The list of a lane for a walk that only looks: the shared one, copied under the claim lock, since a range
/// that waits for an open transaction would otherwise make the look walk all that came after it.
fn list_to_look_at(live: &Live, lane: LaneId) -> Result<RangeList> {
    if let Some(entry) = shmem::find(live.view.incarnation, lane.0) {
        let _lock = ShortLock::acquire(Class::Claim, lane.key(), Mode::Exclusive);
        let ranges = entry.load();
        if !ranges.is_empty() {
            return Ok(RangeList { ranges });
        }
    }
    known_list(live, lane)
}

/// The list to start from as far as it is known without the claim lock: of the shared one the lower bound,
/// since reading it whole could tear it.
fn known_list(live: &Live, lane: LaneId) -> Result<RangeList> {
    if let Some(entry) = shmem::find(live.view.incarnation, lane.0) {
        if entry.low() > 0 {
            return Ok(RangeList::from_low(entry.low()));
        }
    }
    if let Some(list) = LANES.with(|l| l.borrow().get(&lane).and_then(|k| k.list.clone())) {
        return Ok(list);
    }
    Ok(RangeList::cold(lane::marks(&live.view, lane)?.claimed_through))
}

/// A claim row that was made: which picks it holds and where its numbers come from.
struct Taken {
    queue: Rc<Queue>,
    lane: LaneId,
    claim_no: i64,
    first_seq: i64,
    claimed_at: i64,
    expires_at: i64,
    picks: Vec<Pick>,
}

/// Takes up to `want` jobs of one lane, in as many short turns under its claim lock as it takes, and
/// returns how many.
fn take_from_lane(
    live: &mut Live,
    visit: &mut Visit,
    want: i64,
    request: &Request,
    taken: &mut Vec<Taken>,
) -> Result<i64> {
    let mut total = 0;
    while total < want && !visit.exhausted {
        let (n, more) = take_turn(live, visit, want - total, request, taken)?;
        total += n;
        visit.exhausted = !more;
    }
    Ok(total)
}

/// One turn under the claim lock: how many were taken, and whether there was more.
fn take_turn(
    live: &mut Live,
    visit: &Visit,
    want: i64,
    request: &Request,
    taken: &mut Vec<Taken>,
) -> Result<(i64, bool)> {
    let lane = visit.lane;
    let numbers = ids::prepare_claim_numbers(&live.view)?;
    lane::learn_next(&live.view, lane)?;
    loop {
        let view = ring::view_for_write()?;
        if view.stamp != live.view.stamp {
            *live = Live::new(view);
        }
        let cold = first_walk(live, visit)?;
        let slots = live.for_lane(lane, cold.low())?;
        inject::reach(Point::ClaimBeforeLock);
        let lock = ShortLock::acquire(Class::Claim, lane.key(), Mode::Exclusive);
        if !inject::mutant(Mutant::EpochClaim) && !ring::is_current(&live.view) {
            continue;
        }
        let shared = shmem::find_or_add(live.view.incarnation, lane.0);
        let list = match &shared {
            Some(entry) => {
                let ranges = entry.load();
                if ranges.is_empty() {
                    cold
                } else {
                    RangeList { ranges }
                }
            }
            None => cold,
        };
        let now = time::now();
        let order = Order {
            lane,
            strict: visit.queue.strict,
            want,
            max_claims: numbers,
            now,
        };
        let Ok(found) = Walk::new(&live.view, &slots, order).run(&list) else {
            continue;
        };
        let Found {
            list,
            picks,
            taken: n,
            head_at,
        } = found;
        let list = if n > 0 {
            list.settle(xact::widen(xact::current_xid(), xact::next_xid()))
        } else {
            list
        };
        let mut rows = insert_claims(visit, picks, request, now);
        // What was found by a second look lies lower: rows are returned in seq order.
        rows.sort_by_key(|(_, made)| made.first_seq);
        match &shared {
            Some(entry) => entry.store(&list.ranges),
            None => remember(lane, |k| k.list = Some(list)),
        }
        drop(lock);
        remember(lane, |k| {
            k.head_at = head_at;
            k.looked_at = now;
        });
        for (row, made) in rows {
            let slot = &made.picks[0].slot;
            if let Some(indexes) = &slot.claim_indexes {
                row.enter_rest(&slot.claims, indexes, &claims::BY_SEQ);
            }
            taken.push(made);
        }
        return Ok((n, head_at.is_some()));
    }
}

/// The list to start from. The first walk of a session without any is done before the claim lock is
/// taken, because it may be long; under the lock it is then repeated shortly.
fn first_walk(live: &mut Live, visit: &Visit) -> Result<RangeList> {
    let lane = visit.lane;
    let shared = shmem::find(live.view.incarnation, lane.0).is_some_and(|e| e.low() > 0);
    let local = LANES.with(|l| l.borrow().get(&lane).is_some_and(|k| k.list.is_some()));
    let list = known_list(live, lane)?;
    if shared || local {
        return Ok(list);
    }
    let slots = live.for_lane(lane, list.low())?;
    let order = Order {
        lane,
        strict: visit.queue.strict,
        want: 0,
        max_claims: 0,
        now: time::now(),
    };
    Ok(Walk::new(&live.view, &slots, order).run(&list).map_or(list, |f| {
        if inject::mutant(Mutant::FirstWalk) {
            f.list
        } else {
            f.list.unlocked()
        }
    }))
}

/// Inserts one claim row per contiguous range: of one slot, at most 1,024 jobs, own or committed ones.
/// Under the claim lock; the entries that order claims in their lane are made here, the others after it.
fn insert_claims(visit: &Visit, picks: Vec<Pick>, request: &Request, now: i64) -> Vec<(Appended, Taken)> {
    let lease = request.lease.unwrap_or(visit.queue.lease);
    let expires_at = lease.after(now);
    let mut groups: Vec<Vec<Pick>> = Vec::new();
    for pick in picks {
        match groups.last_mut() {
            Some(group) if !pick.starts_claim => group.push(pick),
            _ => groups.push(vec![pick]),
        }
    }
    groups
        .into_iter()
        .map(|picks| {
            let slot = picks[0].slot.clone();
            let first_seq = picks[0].seq;
            let n: i64 = picks.iter().map(|p| p.n).sum();
            let claim_no = ids::next_claim_number();
            let row = heap::append(
                &slot.claims,
                &[
                    claim_no.into(),
                    visit.lane.0.into(),
                    first_seq.into(),
                    now.into(),
                    expires_at.into(),
                    i16::from(slot.slot.no).into(),
                    (n as i16).into(),
                    request.worker.into(),
                ],
            );
            if let Some(indexes) = &slot.claim_indexes {
                row.enter_ordering(&slot.claims, indexes, &claims::BY_SEQ);
            }
            let made = Taken {
                queue: visit.queue.clone(),
                lane: visit.lane,
                claim_no,
                first_seq,
                claimed_at: now,
                expires_at,
                picks,
            };
            (row, made)
        })
        .collect()
}

/// What became of the rows that were taken.
#[derive(Default)]
struct Read {
    delivered: i64,
    /// Their rows are nowhere.
    lost: Vec<Receipt>,
    /// They have waited too long.
    expired: Vec<Receipt>,
}

/// Reads the rows of what was taken and returns them, but for those that are lost or have expired.
fn deliver(taken: &[Taken], now: i64, out: &mut ResultSet) -> Result<Read> {
    let mut reader = Reader::new();
    let mut read = Read::default();
    let mut scratch = Scratch::new();
    for t in taken {
        for pick in &t.picks {
            for k in 0..pick.n {
                let index = (pick.seq + k - t.first_seq) as u16;
                let receipt = Receipt {
                    claim_no: t.claim_no,
                    slot: pick.slot.slot.no,
                    index,
                };
                let offset = pick.offset + k as usize;
                let entry_id = pick.entry_id + k;
                let found = scratch.run(|| {
                    let body = reader.read(&pick.slot.slot, &pick.runs, offset, entry_id)?;
                    let expired = body.expires_at().is_some_and(|at| at <= now);
                    if !expired {
                        out.push(&result_row(t, pick, receipt, &body, now));
                    }
                    Some(expired)
                });
                match found {
                    None => read.lost.push(receipt),
                    Some(true) => read.expired.push(receipt),
                    Some(false) => read.delivered += 1,
                }
            }
        }
    }
    Ok(read)
}

fn result_row(t: &Taken, pick: &Pick, receipt: Receipt, body: &Body, now: i64) -> [Value; 20] {
    let priority = t.lane.priority();
    let effective = effective_priority(&t.queue, priority, now - pick.enqueued_at);
    [
        receipt.encode().into(),
        body.head.job_id.into(),
        t.queue.name.as_str().into(),
        body.head
            .kind
            .map_or_else(|| t.queue.name.as_str().into(), Value::from),
        body.args.into(),
        i32::from(priority).into(),
        i32::from(effective).into(),
        i32::from(body.head.attempt).into(),
        i32::from(body.max_attempts).into(),
        body.rest_varlena(rest::ORDERING_KEY).into(),
        body.rest_varlena(rest::UNIQUE_KEY).into(),
        body.rest_varlena(rest::TAGS).into(),
        body.rest_varlena(rest::METADATA).into(),
        body.rest_varlena(rest::CHECKPOINT).into(),
        Value::Null, // callback: parked jobs are not built yet
        failure::last(body.rest_varlena(rest::ERRORS)).into(),
        body.run_at(pick.enqueued_at).into(),
        body.enqueued_at(pick.enqueued_at).into(),
        t.claimed_at.into(),
        t.expires_at.into(),
    ]
}

/// When the first free job of a lane was enqueued, found by a walk that takes nothing.
pub fn head(live: &mut Live, lane: LaneId, strict: bool) -> Result<Option<i64>> {
    let list = list_to_look_at(live, lane)?;
    let slots = live.for_lane(lane, list.low())?;
    let order = Order {
        lane,
        strict,
        want: 0,
        max_claims: 0,
        now: time::now(),
    };
    Ok(Walk::new(&live.view, &slots, order)
        .run(&list)
        .ok()
        .and_then(|found| found.head_at))
}

/// Whether a queue that is not paused may have a free job now. What claims leave alone for a moment is looked
/// at too: a claim that rolled back frees its jobs at once.
pub fn any_claimable(queues: &[Rc<Queue>]) -> Result<bool> {
    let mut live = Live::for_reading(ring::view()?);
    for queue in queues.iter().filter(|q| !q.paused) {
        for priority in 1..=PRIORITIES as u8 {
            for shard in 0..queue.shards {
                let lane = LaneId::new(queue.id, priority, shard);
                if !is_surely_empty(&live, lane) && head(&mut live, lane, queue.strict)?.is_some() {
                    return Ok(true);
                }
            }
        }
    }
    Ok(false)
}

/// The ranges that this session would start from, for looking at them.
pub fn describe(lane: LaneId) -> Result<String> {
    let view = ring::view()?;
    let next = shmem::find(view.incarnation, lane.0).and_then(|e| e.next());
    let list = list_to_look_at(&Live::for_reading(view), lane)?;
    Ok(match next {
        Some(next) => format!("{list} next={next}"),
        None => list.to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(aging: i64) -> Queue {
        Queue {
            id: 1,
            name: "q".into(),
            paused: false,
            shards: 1,
            strict: false,
            priority: 2,
            max_attempts: 25,
            lease: Interval::seconds(300),
            backoff: crate::backoff::Backoff::default(),
            dead_letters: true,
            aging,
            max_args_bytes: None,
            notify: false,
        }
    }

    #[test]
    fn waiting_raises_priority_step_by_step_up_to_one() {
        let q = queue(60);
        assert_eq!(effective_priority(&q, 4, 59), 4);
        assert_eq!(effective_priority(&q, 4, 60), 3);
        assert_eq!(effective_priority(&q, 4, 125), 2);
        assert_eq!(effective_priority(&q, 4, 100_000), 1);
        assert_eq!(effective_priority(&q, 1, 100_000), 1);
        assert_eq!(effective_priority(&q, 3, -5), 3);
    }

    #[test]
    fn without_ageing_priority_stays() {
        assert_eq!(effective_priority(&queue(0), 4, i64::MAX), 4);
    }
}
