//! Held points and deliberate faults for the test suite. In a build without the feature `injection`
//! nothing of this exists but calls that do nothing.

/// A place where a test can hold a session or let it nap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    EnqueueSlotChosen,
    EnqueueRowsWritten,
    EnqueueReserved,
    ClaimBetweenSlots,
    ClaimBetweenEntries,
    ClaimSegmentsRead,
    ClaimBeforeLock,
    CloseBeforeLock,
    CloseLocked,
    HeartbeatWritten,
    PromoteTaken,
    PromoteFolded,
    RescueClosed,
    MaintainEmptied,
    WaitRegistered,
    WaitBeforeSleep,
    WorkerLooked,
}

/// A safety test that a test takes out, to see that something notices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mutant {
    OwnClaims,
    OwnSegments,
    SegmentInProgress,
    ClaimInProgress,
    Frontier,
    SecondLook,
    EpochReserve,
    EpochClaim,
    EpochSlot,
    EpochEmpty,
    Straddle,
    FirstWalk,
    LowMvcc,
}

#[cfg(not(feature = "injection"))]
mod switched {
    use super::{Mutant, Point};

    #[inline(always)]
    pub fn reach(_: Point) {}

    #[inline(always)]
    pub fn mutant(_: Mutant) -> bool {
        false
    }
}

#[cfg(feature = "injection")]
mod switched {
    use super::{Mutant, Point};
    use crate::settings::injection as settings;
    use pgrx::pg_sys;
    use std::cell::Cell;

    fn point_name(p: Point) -> &'static str {
        match p {
            Point::EnqueueSlotChosen => "enqueue.slot_chosen",
            Point::EnqueueRowsWritten => "enqueue.rows_written",
            Point::EnqueueReserved => "enqueue.reserved",
            Point::ClaimBetweenSlots => "claim.between_slots",
            Point::ClaimBetweenEntries => "claim.between_entries",
            Point::ClaimSegmentsRead => "claim.segments_read",
            Point::ClaimBeforeLock => "claim.before_lock",
            Point::CloseBeforeLock => "close.before_lock",
            Point::CloseLocked => "close.locked",
            Point::HeartbeatWritten => "heartbeat.written",
            Point::PromoteTaken => "promote.taken",
            Point::PromoteFolded => "promote.folded",
            Point::RescueClosed => "rescue.closed",
            Point::MaintainEmptied => "maintain.emptied",
            Point::WaitRegistered => "wait.registered",
            Point::WaitBeforeSleep => "wait.before_sleep",
            Point::WorkerLooked => "worker.looked",
        }
    }

    fn mutant_name(m: Mutant) -> &'static str {
        match m {
            Mutant::OwnClaims => "own_claims",
            Mutant::OwnSegments => "own_segments",
            Mutant::SegmentInProgress => "segment_in_progress",
            Mutant::ClaimInProgress => "claim_in_progress",
            Mutant::Frontier => "frontier",
            Mutant::SecondLook => "second_look",
            Mutant::EpochReserve => "epoch_reserve",
            Mutant::EpochClaim => "epoch_claim",
            Mutant::EpochSlot => "epoch_slot",
            Mutant::EpochEmpty => "epoch_empty",
            Mutant::Straddle => "straddle",
            Mutant::FirstWalk => "first_walk",
            Mutant::LowMvcc => "low_mvcc",
        }
    }

    pub fn mutant(m: Mutant) -> bool {
        settings::mutants().split(',').any(|w| w.trim() == mutant_name(m))
    }

    thread_local! {
        static DICE: Cell<u64> = const { Cell::new(0) };
    }

    fn roll(sides: u64) -> bool {
        DICE.with(|d| {
            let mut x = d.get();
            if x == 0 {
                x = u64::from(std::process::id()) | 1;
            }
            x ^= x << 13;
            x ^= x >> 7;
            x ^= x << 17;
            d.set(x);
            sides <= 1 || x % sides == 0
        })
    }

    pub fn reach(p: Point) {
        let name = point_name(p);
        if settings::pause_at().split(',').any(|w| w.trim() == name) {
            wait_for_key(settings::pause_key());
        }
        for nap in settings::sleep_at().split(',') {
            let mut parts = nap.trim().split(':');
            if parts.next() != Some(name) {
                continue;
            }
            let micros = parts.next().and_then(|v| v.parse().ok()).unwrap_or(0);
            let sides = parts.next().and_then(|v| v.parse().ok()).unwrap_or(1);
            if roll(sides) {
                // SAFETY: pg_usleep only sleeps.
                unsafe { pg_sys::pg_usleep(micros) };
            }
        }
    }

    /// Takes and gives back a share lock on the user's advisory key, as pg_advisory_lock_shared(bigint) does. The
    /// lock_timeout of a maintenance step does not end the pause.
    fn wait_for_key(key: i64) {
        let tag = pg_sys::LOCKTAG {
            // SAFETY: MyDatabaseId is set for the life of a backend.
            locktag_field1: unsafe { pg_sys::MyDatabaseId }.to_u32(),
            locktag_field2: (key as u64 >> 32) as u32,
            locktag_field3: key as u32,
            locktag_field4: 1,
            locktag_type: pg_sys::LockTagType::LOCKTAG_ADVISORY as u8,
            locktag_lockmethodid: pg_sys::USER_LOCKMETHOD as u8,
        };
        let mode = pg_sys::ShareLock as pg_sys::LOCKMODE;
        // SAFETY: a complete tag; acquired and released in pairs. LockTimeout is a plain int of this process; where the
        // wait ends in an error the abort sets it back, as steps set it for their transaction.
        unsafe {
            let timeout = pg_sys::LockTimeout;
            pg_sys::LockTimeout = 0;
            pg_sys::LockAcquire(&tag, mode, false, false);
            pg_sys::LockTimeout = timeout;
            pg_sys::LockRelease(&tag, mode, false);
        }
    }
}

pub use switched::{mutant, reach};
