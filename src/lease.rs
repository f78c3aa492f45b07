//! Heartbeats and progress of running attempts: rows of `attempts`, which a short job never has.
//!
//! Rescue may be ending the same attempt at the same moment. A heartbeat writes its row first and looks at
//! the claim's closures after it, under the claim's closing lock; a rescue writes its closure first, under
//! that lock, and looks at the heartbeats after it. So at least one of the two sees the other, and no
//! attempt is rescued that was told to be held.

use crate::error::Result;
use crate::held::{Claim, Endings, Looker};
use crate::pg::command;
use crate::pg::inject::{self, Point};
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::scan::Writer;
use crate::pg::time::{self, Interval};
use crate::receipt::Receipt;
use crate::ring::{self, View};
use crate::statement;
use pgrx::datum::DatumWithOid;
use std::collections::{BTreeMap, HashMap};
use std::rc::Rc;

/// What a worker learns of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Held,
    /// Held, but somebody asked to cancel it: the worker should stop and report.
    Cancelled,
    /// Ended, rescued, or never this caller's.
    Lost,
}

impl Status {
    pub fn word(self) -> &'static str {
        match self {
            Status::Held => "held",
            Status::Cancelled => "cancelled",
            Status::Lost => "lost",
        }
    }
}

/// The answer to one receipt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    pub status: Status,
    /// When the lease ends, microseconds since 2000; None where it is lost.
    pub lease_until: Option<i64>,
}

const LOST: Beat = Beat {
    status: Status::Lost,
    lease_until: None,
};

/// No lease ends later (2285): beyond it microseconds are no exact floating point numbers.
const LAST: i64 = 9_000_000_000_000_000;

/// Extends the leases of attempts to `lease` from now (None: the length that the claim was given), never
/// to earlier than they end already. One answer per receipt, in input order.
pub fn heartbeat(receipts: &[Option<i64>], lease: Option<Interval>) -> Result<Vec<Beat>> {
    let view = ring::view_for_write()?;
    let wanted = receipts.iter().filter_map(|r| Receipt::decode((*r)?));
    let mut attempts = Attempts::look(&view, wanted)?;
    let now = time::now();
    let mut extended: Vec<(Receipt, i64)> = Vec::new();
    let mut shorter: Vec<(Receipt, i64)> = Vec::new();
    for (receipt, claim, beat) in attempts.held() {
        let until = match lease {
            Some(lease) => lease.after(now),
            None => now + (claim.expires_at - claim.claimed_at),
        };
        if until > claim.expires_at {
            extended.push((*receipt, until.min(LAST)));
        } else {
            // Where the claim's own lease lasts longer there is nothing to write,
            beat.lease_until = Some(claim.expires_at);
            shorter.push((*receipt, until));
        }
    }
    // unless a heartbeat before extended it: its row says until when.
    let mut known: Option<i64> = None;
    let mut extensions = HashMap::new();
    for (receipt, until) in shorter {
        if known != Some(receipt.claim_no) {
            known = Some(receipt.claim_no);
            extensions = attempts.looker.extensions(receipt.claim_no);
        }
        if extensions.contains_key(&receipt.index) {
            extended.push((receipt, until));
        }
    }
    for (receipt, until) in write_leases(&view, &extended)? {
        if let Some(beat) = attempts.beats.get_mut(&receipt) {
            beat.lease_until = Some(until);
        }
    }
    inject::reach(Point::HeartbeatWritten);
    attempts.look_again()?;
    command::next_command();
    Ok(receipts
        .iter()
        .map(|r| r.and_then(Receipt::decode).map_or(LOST, |r| attempts.answer(&r)))
        .collect())
}

/// What an attempt has to say of itself; what is None stays as it was.
pub struct Progress {
    pub percent: Option<i16>,
    pub message: Option<String>,
    /// Travels with the job to its next attempt.
    pub checkpoint: Option<String>,
}

/// Stores progress of an attempt. It does not extend the lease.
pub fn set_progress(receipt: i64, progress: &Progress) -> Result<Status> {
    let Some(receipt) = Receipt::decode(receipt) else {
        return Ok(Status::Lost);
    };
    let view = ring::view_for_write()?;
    let mut attempts = Attempts::look(&view, [receipt].into_iter())?;
    if attempts.held().next().is_none() {
        return Ok(Status::Lost);
    }
    statement::run(
        &view.tables,
        "INSERT INTO awa_internal.attempts AS a (claim_no, index, slot, percent, message, checkpoint)
         VALUES ($1, $2, $3, $4, $5, $6::pg_catalog.jsonb)
         ON CONFLICT (claim_no, index) DO UPDATE
         SET percent = COALESCE(excluded.percent, a.percent), message = COALESCE(excluded.message, a.message),
             checkpoint = COALESCE(excluded.checkpoint, a.checkpoint)",
        &[
            receipt.claim_no.into(),
            (receipt.index as i16).into(),
            i16::from(receipt.slot).into(),
            progress.percent.into(),
            progress.message.as_deref().into(),
            progress.checkpoint.as_deref().into(),
        ],
    )?;
    attempts.look_again()?;
    Ok(attempts.answer(&receipt).status)
}

/// Writes until when leases are extended, in key order, so that two heartbeats never wait for each other in
/// a circle, and returns what they are now. No index holds `lease_until`: the updates are HOT.
fn write_leases(view: &View, extended: &[(Receipt, i64)]) -> Result<Vec<(Receipt, i64)>> {
    if extended.is_empty() {
        return Ok(Vec::new());
    }
    let receipts: Vec<i64> = extended.iter().map(|(r, _)| r.encode()).collect();
    let until: Vec<i64> = extended.iter().map(|(_, until)| *until).collect();
    let args: [DatumWithOid; 2] = [receipts.into(), until.into()];
    let rows = statement::rows_with(
        &view.tables,
        "INSERT INTO awa_internal.attempts AS a (claim_no, index, slot, lease_until)
         SELECT r >> 16, (r & 1023)::pg_catalog.int2, (r >> 10 & 63)::pg_catalog.int2,
                timestamptz '2000-01-01 00:00:00+00' + u::pg_catalog.float8 * interval '1 microsecond'
         FROM ROWS FROM (pg_catalog.unnest($1), pg_catalog.unnest($2)) AS held (r, u)
         ORDER BY r
         ON CONFLICT (claim_no, index) DO UPDATE SET lease_until = GREATEST(a.lease_until, excluded.lease_until)
         RETURNING claim_no, index, slot, lease_until",
        &args,
        |row| {
            let receipt = Receipt {
                claim_no: row.get::<i64>(1)?.unwrap_or(0),
                index: row.get::<i16>(2)?.unwrap_or(0) as u16,
                slot: row.get::<i16>(3)?.unwrap_or(0) as u8,
            };
            Ok((receipt, statement::micros(row, 4)?))
        },
    )?;
    Ok(rows
        .into_iter()
        .filter_map(|(receipt, until)| Some((receipt, until?)))
        .collect())
}

/// The attempts behind some receipts, with what is to be answered for each.
struct Attempts {
    looker: Looker,
    claims: BTreeMap<i64, Claim>,
    beats: BTreeMap<Receipt, Beat>,
}

impl Attempts {
    fn look(view: &Rc<View>, receipts: impl Iterator<Item = Receipt>) -> Result<Attempts> {
        let mut attempts = Attempts {
            looker: Looker::new(view)?,
            claims: BTreeMap::new(),
            beats: receipts.map(|r| (r, LOST)).collect(),
        };
        let mut known: Option<(i64, u8)> = None;
        let mut endings = None;
        for (receipt, beat) in &mut attempts.beats {
            let key = (receipt.claim_no, receipt.slot);
            if known != Some(key) {
                known = Some(key);
                endings = None;
                if let Some(claim) = attempts.looker.claim(receipt.slot, receipt.claim_no)? {
                    // Of another transaction that is still open nobody can have a receipt.
                    if !matches!(claim.writer, Writer::Running(_)) {
                        endings = Some(attempts.looker.endings(&claim)?);
                        attempts.claims.insert(claim.claim_no, claim);
                    }
                }
            }
            if let (Some(claim), Some(endings)) = (attempts.claims.get(&receipt.claim_no), &endings) {
                beat.status = status(claim, endings, receipt.index);
            }
        }
        Ok(attempts)
    }

    fn held(&mut self) -> impl Iterator<Item = (&Receipt, &Claim, &mut Beat)> {
        let claims = &self.claims;
        self.beats
            .iter_mut()
            .filter(|(_, beat)| beat.status != Status::Lost)
            .filter_map(|(receipt, beat)| Some((receipt, claims.get(&receipt.claim_no)?, beat)))
    }

    /// Once more, after the rows were written: whoever ended an attempt meanwhile is seen now.
    fn look_again(&mut self) -> Result<()> {
        for claim in self.claims.values() {
            let first = Receipt {
                claim_no: claim.claim_no,
                slot: claim.slot,
                index: 0,
            };
            let last = Receipt {
                index: u16::MAX,
                ..first
            };
            if self
                .beats
                .range(first..=last)
                .all(|(_, b)| b.status == Status::Lost)
            {
                continue;
            }
            let lock = ShortLock::acquire(Class::Close, claim.claim_no as u64, Mode::Exclusive);
            let endings = self.looker.endings(claim)?;
            drop(lock);
            for (receipt, beat) in self.beats.range_mut(first..=last) {
                if beat.status != Status::Lost {
                    beat.status = status(claim, &endings, receipt.index);
                }
            }
        }
        Ok(())
    }

    fn answer(&self, receipt: &Receipt) -> Beat {
        match self.beats.get(receipt) {
            Some(beat) if beat.status != Status::Lost => *beat,
            _ => LOST,
        }
    }
}

/// A finish by its worker that is under way may roll back: until then the attempt is held.
fn status(claim: &Claim, endings: &Endings, index: u16) -> Status {
    if index >= claim.n || endings.ended.has(index) || endings.rescued.has(index) || endings.own.has(index) {
        Status::Lost
    } else if endings.cancel_requested.has(index) {
        Status::Cancelled
    } else {
        Status::Held
    }
}
