//! A claim as heartbeat and rescue see it: which of its attempts have ended, are just being ended, or are
//! asked to stop, and how far a heartbeat has put off the end of their lease.
//!
//! All of it is read dirty. What another transaction has not committed yet counts, on the careful side.

use crate::bits::Bits;
use crate::error::Result;
use crate::logs::{attempts, claims, closures, Outcome};
use crate::pg::index::{self, Index};
use crate::pg::scan::{Cond, Direction, Scan, Writer};
use crate::pg::table::{Access, Table};
use crate::receipt::MAX_PER_CLAIM;
use crate::ring::{self, Slot, View};
use std::collections::hash_map::Entry;
use std::collections::HashMap;
use std::rc::Rc;

/// A claim row.
#[derive(Clone, Copy)]
pub struct Claim {
    pub claim_no: i64,
    pub slot: u8,
    pub n: u16,
    pub claimed_at: i64,
    pub expires_at: i64,
    pub writer: Writer,
}

impl Claim {
    fn of(scan: &Scan, slot: u8) -> Claim {
        let writer = scan.writer();
        Claim {
            claim_no: scan.i64(claims::CLAIM_NO),
            slot,
            n: i64::from(scan.i16(claims::N)).clamp(0, MAX_PER_CLAIM) as u16,
            claimed_at: scan.i64(claims::CLAIMED_AT),
            expires_at: scan.i64(claims::EXPIRES_AT),
            writer,
        }
    }
}

/// What the closures of a claim say.
pub struct Endings {
    /// Over for good.
    pub ended: Bits,
    /// Being ended by a transaction that may still roll back.
    pub ending: Bits,
    /// Being ended by a rescue that may still roll back.
    pub rescued: Bits,
    /// Ended by the own transaction.
    pub own: Bits,
    /// Somebody asked to cancel it.
    pub cancel_requested: Bits,
}

impl Endings {
    pub fn is_whole(&self, claim: &Claim) -> bool {
        (0..claim.n).all(|i| self.ended.has(i))
    }
}

/// The tables of one slot, as far as they were needed.
struct Opened {
    slot: Slot,
    claims: Rc<Table>,
    by_no: Rc<Index>,
    by_expiry: Rc<Index>,
    closures: Rc<Table>,
    by_claim: Rc<Index>,
}

/// Looks at claims; opens each slot's tables once.
pub struct Looker {
    view: Rc<View>,
    open: HashMap<u8, Rc<Opened>>,
    attempts: Rc<Table>,
    attempts_index: Rc<Index>,
}

impl Looker {
    pub fn new(view: &Rc<View>) -> Result<Looker> {
        let table = Rc::new(Table::open(ring::relation("attempts")?, Access::Read));
        let attempts_index = index::lookup(&table, &[attempts::CLAIM_NO, attempts::INDEX])?;
        Ok(Looker {
            view: view.clone(),
            open: HashMap::new(),
            attempts: table,
            attempts_index,
        })
    }

    fn slot(&mut self, no: u8) -> Result<Option<Rc<Opened>>> {
        match self.open.entry(no) {
            Entry::Occupied(known) => Ok(Some(known.get().clone())),
            Entry::Vacant(new) => {
                let Some(slot) = self.view.slot(no) else {
                    return Ok(None);
                };
                let claim_table = Rc::new(Table::open(slot.claims, Access::Read));
                let closure_table = Rc::new(Table::open(slot.closures, Access::Read));
                let opened = Opened {
                    slot: slot.clone(),
                    by_no: index::scannable(&claim_table, &claims::BY_NO)?,
                    by_expiry: index::lookup(&claim_table, &claims::BY_EXPIRY)?,
                    claims: claim_table,
                    by_claim: index::scannable(&closure_table, &closures::BY_CLAIM)?,
                    closures: closure_table,
                };
                Ok(Some(new.insert(Rc::new(opened)).clone()))
            }
        }
    }

    /// The claim of a number; None where its slot was emptied, its transaction rolled back or it never was.
    pub fn claim(&mut self, slot: u8, claim_no: i64) -> Result<Option<Claim>> {
        let Some(open) = self.slot(slot)? else {
            return Ok(None);
        };
        let mut scan = Scan::dirty(&open.claims, &open.by_no, 1);
        scan.seek(&[Cond::Eq(claim_no)]);
        Ok(scan.next(Direction::Forward).then(|| Claim::of(&scan, slot)))
    }

    /// What the closures of a claim say.
    pub fn endings(&mut self, claim: &Claim) -> Result<Endings> {
        let mut e = Endings {
            ended: Bits::none(),
            ending: Bits::none(),
            rescued: Bits::none(),
            own: Bits::none(),
            cancel_requested: Bits::none(),
        };
        let Some(open) = self.slot(claim.slot)? else {
            return Ok(e);
        };
        let mut scan = Scan::dirty(&open.closures, &open.by_claim, 1);
        scan.seek(&[Cond::Eq(claim.claim_no)]);
        while scan.next(Direction::Forward) {
            let writer = scan.writer();
            let committed = writer == Writer::Committed;
            let Some(outcome) = Outcome::of(scan.char(closures::OUTCOME)) else {
                continue;
            };
            let bits = Bits::of(scan.bytes(closures::WHICH).as_deref());
            match outcome {
                Outcome::BroughtBack => {}
                Outcome::CancelRequested if committed => e.cancel_requested.add(&bits),
                Outcome::CancelRequested => {}
                _ if committed => e.ended.add(&bits),
                _ => {
                    e.ending.add(&bits);
                    if matches!(writer, Writer::Own(_)) {
                        e.own.add(&bits);
                    }
                    if matches!(outcome, Outcome::Rescued | Outcome::LeaseFailed) {
                        e.rescued.add(&bits);
                    }
                }
            }
        }
        Ok(e)
    }

    /// Heartbeats of a claim: index and until when the latest of them extends its lease, and whether that is
    /// committed. A row that is being updated shows as both its versions.
    pub fn extensions(&self, claim_no: i64) -> HashMap<u16, (i64, bool)> {
        let mut found: HashMap<u16, (i64, bool)> = HashMap::new();
        let mut scan = Scan::dirty(&self.attempts, &self.attempts_index, 1);
        scan.seek(&[Cond::Eq(claim_no)]);
        while scan.next(Direction::Forward) {
            let committed = scan.writer() == Writer::Committed;
            let Some(until) = scan.opt_i64(attempts::LEASE_UNTIL) else {
                continue;
            };
            let index = scan.i16(attempts::INDEX) as u16;
            let known = found.entry(index).or_insert((until, committed));
            if until > known.0 {
                *known = (until, committed);
            }
        }
        found
    }

    /// Visits the claims of a slot whose lease, as it was given, ends within [from, to], in that order, until
    /// `visit` returns false.
    pub fn each_expiring(
        &mut self,
        slot: u8,
        from: i64,
        to: i64,
        mut visit: impl FnMut(&Claim) -> bool,
    ) -> Result<()> {
        let Some(open) = self.slot(slot)? else {
            return Ok(());
        };
        let mut scan = Scan::dirty(&open.claims, &open.by_expiry, 2);
        scan.seek(&[Cond::TimeBetween(from, to)]);
        while scan.next(Direction::Forward) {
            if !visit(&Claim::of(&scan, open.slot.no)) {
                break;
            }
        }
        Ok(())
    }

    /// Whether the claim is one of this worker.
    pub fn is_of_worker(&mut self, claim: &Claim, worker: &str) -> Result<bool> {
        let Some(open) = self.slot(claim.slot)? else {
            return Ok(false);
        };
        let mut scan = Scan::dirty(&open.claims, &open.by_no, 1);
        scan.seek(&[Cond::Eq(claim.claim_no)]);
        Ok(scan.next(Direction::Forward) && scan.text(claims::WORKER).as_deref() == Some(worker))
    }
}
