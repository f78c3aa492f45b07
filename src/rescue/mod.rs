//! Rescue: attempts whose lease has ended without a heartbeat are ended, and their jobs get their next
//! attempt, or fail when that was the last.
//!
//! Claims are found through the index on `expires_at`, slot by slot, from a mark on (`marks`): every claim
//! below it has ended, or is on a list with the time at which it is to be looked at again (`list`): because
//! a heartbeat extended it, because another transaction is just ending it or has not committed it yet, or
//! because ending it failed. So neither finished claims nor long-running ones are looked at again and again,
//! and a heartbeat needs no index of its own. A claimer that stalls between reading the clock and entering
//! its claim into the index can come in behind the mark: the last seconds below it are looked at each time,
//! and all of a slot every quarter of an hour, piece by piece.

mod list;
mod marks;

use crate::close::{self, Fate, Finish, Verb};
use crate::duty::Progress;
use crate::error::{Error, Result};
use crate::held::{Claim, Looker};
use crate::pg::command;
use crate::pg::inject::{self, Point};
use crate::pg::lock::{Class, Mode, TransactionLock};
use crate::pg::scan::Writer;
use crate::pg::subxact;
use crate::pg::time::{self, SECOND};
use crate::pg::warn;
use crate::pg::xact;
use crate::receipt::Receipt;
use crate::ring::{self, View};
use list::Listed;
use marks::{Mark, Marks};
use std::collections::BTreeMap;
use std::rc::Rc;

/// One step at a time: the key of its duty's lock.
pub const DUTY_KEY: u64 = 3;
/// Attempts that one step ends.
const BATCH: usize = 1000;
/// Claims that one step looks at in a slot, beyond those that end at the same microsecond as the last.
const LOOKS: usize = 5000;
/// So far below the mark each step looks again.
const MARGIN: i64 = 2 * SECOND;
/// All claims of a slot are looked at so often.
const SWEEP_EVERY: i64 = 900 * SECOND;
const SWEEP_LOOKS: usize = 2000;
/// What is under way in another transaction is looked at again after this long, doubled up to the longest.
const RETRY: i64 = SECOND;
const LONGEST_RETRY: i64 = 30 * SECOND;
/// What failed is tried again after this long, doubled up to the longest.
const LONGEST_BACKOFF: i64 = 600 * SECOND;
/// Attempts that one call of `expire_leases` ends.
const EXPIRE_AT_ONCE: usize = 10_000;

/// One bounded step: ends attempts whose lease is over.
pub fn step() -> Result<Progress> {
    command::refuse_read_only("awa_internal.rescue()")?;
    command::require_read_committed("awa_internal.rescue()")?;
    xact::note_maintenance();
    let now = time::now();
    // Two at once would do the same twice; the other's step is as good.
    let Some(lock) = TransactionLock::try_acquire(Class::Duty, DUTY_KEY, Mode::Exclusive) else {
        return Ok(Progress {
            next_due: Some(now + RETRY),
            ..Progress::default()
        });
    };
    lock.keep();
    let view = ring::view_for_write()?;
    let mut marks = Marks::load(&view)?;
    let mut pass = Pass::new(&view, now)?;
    let mut more = pass.take_listed()?;
    for slot in &view.slots {
        if pass.is_full() {
            more = true;
            break;
        }
        more |= pass.look_through(marks.of(slot), slot.no)?;
    }
    pass.sweep(&mut marks)?;
    let done = pass.end_batch()?;
    let listed = pass.write_list()?;
    more |= pass.plans.values().any(|p| p.due_at.is_some_and(|at| at <= now));
    marks.save(&view, done > 0 || listed)?;
    Ok(Progress {
        done,
        more,
        next_due: pass.next_due(&marks)?,
    })
}

/// Ends all open attempts of a worker that is known to be dead, whatever their lease; returns how many, at
/// most 10,000 a call.
pub fn expire(worker: &str) -> Result<i64> {
    let view = ring::view_for_write()?;
    // The marks first: what a later rescue takes off the list then has ended.
    let marks = Marks::read(&view)?;
    let listed = list::all(&view.tables)?;
    let mut pass = Pass::new(&view, time::now())?;
    pass.whatever_the_lease = true;
    let mut found: Vec<Claim> = Vec::new();
    for slot in &view.slots {
        let from = marks
            .get(slot)
            .and_then(|m| m.through)
            .map_or(i64::MIN, |t| t - MARGIN);
        pass.looker.each_expiring(slot.no, from, i64::MAX, |claim| {
            found.push(*claim);
            true
        })?;
    }
    for l in listed {
        if let Some(claim) = pass.looker.claim(l.slot, l.claim_no)? {
            found.push(claim);
        }
    }
    for claim in found {
        if pass.batch.len() >= EXPIRE_AT_ONCE {
            break;
        }
        if pass.looker.is_of_worker(&claim, worker)? {
            pass.consider(&claim, false)?;
        }
    }
    pass.batch.sort_unstable();
    pass.batch.dedup();
    pass.end_batch()
}

/// A claim that a step has looked at.
struct Plan {
    slot: u8,
    /// When it has to be looked at again; None: not any more.
    due_at: Option<i64>,
    /// What is known of it from the list.
    listed: Option<Listed>,
    failed: bool,
    waiting: bool,
}

impl Plan {
    fn again_at(&mut self, at: i64) {
        self.due_at = Some(self.due_at.map_or(at, |known| known.min(at)));
    }
}

/// What one step looks at, and what comes of it.
struct Pass {
    view: Rc<View>,
    looker: Looker,
    now: i64,
    batch: Vec<Receipt>,
    plans: BTreeMap<i64, Plan>,
    /// Of what the list holds beyond this step.
    next_listed: Option<i64>,
    sweeping: bool,
    whatever_the_lease: bool,
}

impl Pass {
    fn new(view: &Rc<View>, now: i64) -> Result<Pass> {
        Ok(Pass {
            view: view.clone(),
            looker: Looker::new(view)?,
            now,
            batch: Vec::new(),
            plans: BTreeMap::new(),
            next_listed: None,
            sweeping: false,
            whatever_the_lease: false,
        })
    }

    fn is_full(&self) -> bool {
        self.batch.len() >= BATCH
    }

    /// Looks at the claims of the list that are due; true where some were left for the next step.
    fn take_listed(&mut self) -> Result<bool> {
        let rows = list::first(&self.view.tables, BATCH as i64)?;
        let whole = rows.len() < BATCH;
        for row in rows {
            if row.due_at > self.now {
                self.next_listed = Some(row.due_at);
                return Ok(false);
            }
            if self.is_full() {
                return Ok(true);
            }
            let claim = self.looker.claim(row.slot, row.claim_no)?;
            let plan = Plan {
                slot: row.slot,
                due_at: None,
                listed: Some(row),
                failed: false,
                waiting: false,
            };
            self.plans.insert(row.claim_no, plan);
            if let Some(claim) = claim {
                self.consider(&claim, false)?;
            }
        }
        Ok(!whole)
    }

    /// Looks at the claims of a slot from a little below its mark to now and moves the mark; true where there
    /// is more than one step looks at.
    fn look_through(&mut self, mark: &mut Mark, slot: u8) -> Result<bool> {
        // The clock may have gone back.
        let through = mark.through.map(|t| t.min(self.now));
        if let Some(through) = through {
            self.look(slot, through - MARGIN, through - 1, LOOKS)?;
        }
        let (reached, looks) = self.look(slot, through.unwrap_or(i64::MIN), self.now, LOOKS)?;
        // A test's clock may be ahead in one session only: what it looks at counts as seen by the server's.
        let new = reached.unwrap_or(self.now).min(time::server_now());
        mark.looked(Some(through.map_or(new, |t| t.max(new))), looks);
        Ok(reached.is_some())
    }

    /// Looks at claims whose lease as it was given ends within [from, to]. Returns where it stopped, if not at
    /// the end, and how many it looked at.
    fn look(&mut self, slot: u8, from: i64, to: i64, limit: usize) -> Result<(Option<i64>, usize)> {
        let mut found: Vec<Claim> = Vec::new();
        let mut stopped = None;
        self.looker.each_expiring(slot, from, to, |claim| {
            // Only between two times: the next step begins with this one.
            if found.len() >= limit && found.last().is_some_and(|l| l.expires_at < claim.expires_at) {
                stopped = Some(claim.expires_at);
                return false;
            }
            found.push(*claim);
            true
        })?;
        for (i, claim) in found.iter().enumerate() {
            let between = i > 0 && found[i - 1].expires_at < claim.expires_at;
            if self.is_full() && between {
                return Ok((Some(claim.expires_at), i));
            }
            self.consider(claim, true)?;
        }
        Ok((stopped, found.len()))
    }

    /// A piece of the look at all claims of the slot that has gone longest without one.
    fn sweep(&mut self, marks: &mut Marks) -> Result<()> {
        let Some((slot, mark)) = marks.longest_unswept(self.now - SWEEP_EVERY) else {
            return Ok(());
        };
        if self.is_full() {
            return Ok(());
        }
        let from = mark.swept_through.unwrap_or(i64::MIN);
        let Some(to) = mark.through else { return Ok(()) };
        let (stopped, _) = self.look(slot, from, to, SWEEP_LOOKS)?;
        mark.swept(stopped, self.now);
        self.sweeping = stopped.is_some();
        Ok(())
    }

    /// Decides what is to be done about a claim whose lease, as it was given, is over. `to_list`: where the
    /// batch is full it is put on the list.
    fn consider(&mut self, claim: &Claim, to_list: bool) -> Result<()> {
        if to_list && self.plans.contains_key(&claim.claim_no) {
            return Ok(()); // looked at already, by way of the list
        }
        let endings = self.looker.endings(claim)?;
        if endings.is_whole(claim) {
            return Ok(());
        }
        let full = to_list && self.is_full();
        let extensions = self.looker.extensions(claim.claim_no);
        let plan = self.plans.entry(claim.claim_no).or_insert(Plan {
            slot: claim.slot,
            due_at: None,
            listed: None,
            failed: false,
            waiting: false,
        });
        if claim.writer != Writer::Committed {
            plan.waiting = true;
            return Ok(());
        }
        for index in 0..claim.n {
            if endings.ended.has(index) {
                continue;
            }
            if endings.ending.has(index) {
                plan.waiting = true;
                continue;
            }
            let extended = extensions.get(&index).filter(|(until, _)| *until > self.now);
            match extended {
                Some((until, committed)) if !self.whatever_the_lease => {
                    plan.waiting |= !committed;
                    plan.again_at(*until);
                }
                _ if full => plan.again_at(self.now),
                _ => self.batch.push(Receipt {
                    claim_no: claim.claim_no,
                    slot: claim.slot,
                    index,
                }),
            }
        }
        Ok(())
    }

    /// Ends the attempts of the batch; returns how many it ended.
    fn end_batch(&mut self) -> Result<i64> {
        let batch = std::mem::take(&mut self.batch);
        let mut ended = 0;
        for part in batch.chunks(BATCH) {
            ended += self.end(part.to_vec());
        }
        Ok(ended)
    }

    /// Ends attempts, all of them in one subtransaction; where that fails, each half in one of its own, so that
    /// a damaged row keeps nobody else from being rescued.
    fn end(&mut self, mut receipts: Vec<Receipt>) -> i64 {
        loop {
            if receipts.is_empty() {
                return 0;
            }
            let mut extended: Vec<(Receipt, i64)> = Vec::new();
            let outcome = subxact::attempt(|| {
                let fates = finish(&receipts)?;
                inject::reach(Point::RescueClosed);
                extended = self.extended_meanwhile(&receipts, &fates);
                if extended.is_empty() {
                    Ok(fates)
                } else {
                    Err(Error::Internal("extended meanwhile".to_string()))
                }
            });
            match outcome {
                Ok(fates) => {
                    for (receipt, fate) in receipts.iter().zip(&fates) {
                        if *fate == Fate::Skipped {
                            if let Some(plan) = self.plans.get_mut(&receipt.claim_no) {
                                plan.waiting = true;
                            }
                        }
                    }
                    return fates.iter().filter(|f| f.ended().is_some()).count() as i64;
                }
                // Undone: their workers were told that they hold them. The others once more.
                Err(_) if !extended.is_empty() => {
                    for (receipt, until) in &extended {
                        if let Some(plan) = self.plans.get_mut(&receipt.claim_no) {
                            plan.again_at(*until);
                            plan.waiting = true;
                        }
                    }
                    receipts.retain(|r| !extended.iter().any(|(e, _)| e == r));
                }
                Err(caught) if receipts.len() == 1 => {
                    self.note_failure(receipts[0], &caught.message);
                    return 0;
                }
                Err(_) => {
                    let right = receipts.split_off(receipts.len() / 2);
                    return self.end(receipts) + self.end(right);
                }
            }
        }
    }

    /// Attempts that this step has just ended although a heartbeat came in between: it may have looked before
    /// the closure was there.
    fn extended_meanwhile(&self, receipts: &[Receipt], fates: &[Fate]) -> Vec<(Receipt, i64)> {
        let mut found = Vec::new();
        if self.whatever_the_lease {
            return found;
        }
        let mut known = None;
        let mut extensions = Default::default();
        for (receipt, fate) in receipts.iter().zip(fates) {
            if known != Some(receipt.claim_no) {
                known = Some(receipt.claim_no);
                extensions = self.looker.extensions(receipt.claim_no);
            }
            match extensions.get(&receipt.index) {
                Some((until, _)) if fate.ended().is_some() && *until > self.now => {
                    found.push((*receipt, *until));
                }
                _ => {}
            }
        }
        found
    }

    /// Reported once, tried again later.
    fn note_failure(&mut self, receipt: Receipt, message: &str) {
        let Some(plan) = self.plans.get_mut(&receipt.claim_no) else {
            return;
        };
        let before = plan.listed.map_or(0, |l| l.failures);
        if before == 0 && !plan.failed {
            warn::warning(
                &format!(
                    "the attempt of receipt {} can not be rescued: {message}",
                    receipt.encode()
                ),
                "Its job stays running; it is tried again later, less and less often.",
            );
        }
        plan.failed = true;
    }

    /// Puts on the list what has to be looked at again, and takes off it what has not. True where it wrote.
    fn write_list(&mut self) -> Result<bool> {
        let mut put = Vec::new();
        let mut gone = Vec::new();
        for (claim_no, plan) in &mut self.plans {
            let before = plan.listed;
            let tries = before.map_or(0, |l| l.tries);
            let failures = before.map_or(0, |l| l.failures);
            let mut row = Listed {
                claim_no: *claim_no,
                slot: plan.slot,
                due_at: 0,
                tries: 0,
                failures: 0,
            };
            if plan.waiting {
                row.tries = tries.saturating_add(1);
                plan.again_at(self.now + later(RETRY, tries, LONGEST_RETRY));
            }
            if plan.failed {
                row.failures = failures.saturating_add(1);
                plan.again_at(self.now + later(SECOND, failures, LONGEST_BACKOFF));
            }
            match plan.due_at {
                Some(due_at) => {
                    row.due_at = due_at;
                    if before != Some(row) {
                        put.push(row);
                    }
                }
                None if before.is_some() => gone.push(*claim_no),
                None => {}
            }
        }
        list::put(&self.view.tables, &put)?;
        list::remove(&self.view.tables, &gone)?;
        Ok(!put.is_empty() || !gone.is_empty())
    }

    /// When there is something to do next: the first of the list, or the first lease that ends.
    fn next_due(&mut self, marks: &Marks) -> Result<Option<i64>> {
        let mut due: Vec<i64> = self.plans.values().filter_map(|p| p.due_at).collect();
        due.extend(self.next_listed);
        if self.sweeping || marks.is_sweeping() {
            due.push(self.now + RETRY);
        }
        let view = self.view.clone();
        for slot in &view.slots {
            self.looker
                .each_expiring(slot.no, self.now + 1, i64::MAX, |claim| {
                    due.push(claim.expires_at);
                    false
                })?;
        }
        Ok(due.into_iter().min())
    }
}

/// `first`, doubled `times` times, at most `longest`.
fn later(first: i64, times: i16, longest: i64) -> i64 {
    first.saturating_mul(1 << times.clamp(0, 20)).min(longest)
}

/// Ends attempts as rescued. Never waits: what another transaction is just ending is skipped.
fn finish(receipts: &[Receipt]) -> Result<Vec<Fate>> {
    let receipts: Vec<Option<i64>> = receipts.iter().map(|r| Some(r.encode())).collect();
    let what = Finish {
        wait: false,
        ..Finish::by(Verb::Rescue)
    };
    close::finish(&receipts, &what, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_are_doubled_up_to_the_longest() {
        assert_eq!(later(RETRY, 0, LONGEST_RETRY), SECOND);
        assert_eq!(later(RETRY, 3, LONGEST_RETRY), 8 * SECOND);
        assert_eq!(later(RETRY, i16::MAX, LONGEST_RETRY), LONGEST_RETRY);
        assert_eq!(later(SECOND, -1, LONGEST_BACKOFF), SECOND);
    }
}
