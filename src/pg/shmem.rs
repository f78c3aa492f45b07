//! Shared memory, where the library is preloaded: the epoch of the ring, and per lane the next seq and
//! the unresolved ranges. Everything in it is a cache of what the tables say; losing it costs time.
//!
//! An entry's `next` is used under the lane lock, its ranges under the claim lock. The table's own lock
//! only guards finding and adding entries. Entries are never moved and are reused only where the
//! extension was dropped and created again, which no session with a lane lock can live through.

use crate::ranges::{Range, MAX_RANGES};
use pgrx::pg_sys;
use std::sync::atomic::{AtomicI64, AtomicU64, Ordering};

#[repr(C)]
struct Header {
    epoch: AtomicU64,
    /// When the server came back from the crash of one of its processes, microseconds since 2000; 0: it did not.
    crashed_at: AtomicI64,
    capacity: u32,
}

#[repr(C)]
struct Lane {
    used: u32,
    database: u32,
    incarnation: i64,
    lane_id: i64,
    /// The next seq to give out; 0 while unknown.
    next: AtomicI64,
    /// The lowest position that is not resolved.
    low: AtomicI64,
    count: u32,
    ranges: [Range; MAX_RANGES],
}

/// The lock tranche and the name of the segment.
const NAME: &std::ffi::CStr = c"awa_queue";
/// AddinShmemInitLock is the 21st of the fixed LWLocks in PostgreSQL 15 to 18.
const ADDIN_SHMEM_INIT_LOCK: usize = 21;

static mut SEGMENT: *mut Header = std::ptr::null_mut();
static mut LOCK: *mut pg_sys::LWLock = std::ptr::null_mut();
static mut CAPACITY: u32 = 0;
/// How often this postmaster has made the shared memory.
static mut STARTS: u32 = 0;
static mut PREVIOUS_REQUEST: pg_sys::shmem_request_hook_type = None;
static mut PREVIOUS_STARTUP: pg_sys::shmem_startup_hook_type = None;

/// Asks for the shared memory; called from `_PG_init` while the postmaster preloads libraries.
pub fn install(lanes: u32) {
    // SAFETY: the postmaster is single-threaded here; the hooks are chained to who was there before.
    unsafe {
        CAPACITY = lanes;
        PREVIOUS_REQUEST = pg_sys::shmem_request_hook;
        pg_sys::shmem_request_hook = Some(request);
        PREVIOUS_STARTUP = pg_sys::shmem_startup_hook;
        pg_sys::shmem_startup_hook = Some(startup);
    }
}

fn size(capacity: u32) -> usize {
    std::mem::size_of::<Header>() + capacity as usize * std::mem::size_of::<Lane>()
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn request() {
    // SAFETY: called by the postmaster in the phase in which requests are allowed.
    unsafe {
        if let Some(previous) = PREVIOUS_REQUEST {
            previous();
        }
        pg_sys::RequestAddinShmemSpace(size(CAPACITY));
        pg_sys::RequestNamedLWLockTranche(NAME.as_ptr(), 1);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn startup() {
    // SAFETY: called by the postmaster (or a process it started by exec) after the segment exists; the
    // initialisation is done once, under the lock meant for it.
    unsafe {
        if let Some(previous) = PREVIOUS_STARTUP {
            previous();
        }
        with_init_lock(initialise);
    }
}

/// Runs `body` under the lock that guards the making of shared memory.
///
/// # Safety
/// Called from a shmem_startup_hook.
pub(super) unsafe fn with_init_lock(body: impl FnOnce()) {
    // SAFETY: the main lock array exists by then.
    unsafe {
        let init_lock = &raw mut (*pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).lock;
        pg_sys::LWLockAcquire(init_lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        body();
        pg_sys::LWLockRelease(init_lock);
    }
}

fn initialise() {
    // SAFETY: called under the initialisation lock, in the phase of making shared memory.
    unsafe {
        let mut found = false;
        let segment = pg_sys::ShmemInitStruct(NAME.as_ptr(), size(CAPACITY), &mut found).cast::<Header>();
        if !found {
            std::ptr::write_bytes(segment.cast::<u8>(), 0, size(CAPACITY));
            (*segment).capacity = CAPACITY;
            (*segment).epoch.store(1, Ordering::SeqCst);
            // The postmaster makes shared memory anew after a crash; this counter is its own and stays.
            if STARTS > 0 {
                (*segment)
                    .crashed_at
                    .store(pg_sys::GetCurrentTimestamp(), Ordering::SeqCst);
            }
            STARTS += 1;
        }
        LOCK = &raw mut (*pg_sys::GetNamedLWLockTranche(NAME.as_ptr())).lock;
        SEGMENT = segment;
    }
}

fn header() -> Option<&'static Header> {
    // SAFETY: SEGMENT is null or points to the initialised segment, which lives as long as the process.
    unsafe { SEGMENT.as_ref() }
}

/// Whether the library was preloaded, so that there is shared memory.
pub fn available() -> bool {
    header().is_some()
}

/// The ring's epoch; None without shared memory.
pub fn epoch() -> Option<u64> {
    header().map(|h| h.epoch.load(Ordering::SeqCst))
}

/// When the server last came back from a crash of one of its processes; None where it did not.
pub fn crashed_at() -> Option<i64> {
    header()
        .map(|h| h.crashed_at.load(Ordering::SeqCst))
        .filter(|at| *at != 0)
}

/// Only atomics: called inside commit.
pub(super) fn bump_epoch() {
    if let Some(h) = header() {
        h.epoch.fetch_add(1, Ordering::SeqCst);
    }
}

/// A lane's entry. Not kept across calls. What is read without the lane's lock is only a hint.
pub struct Entry(*mut Lane);

/// The entry of a lane, if there is one.
pub fn find(incarnation: i64, lane_id: i64) -> Option<Entry> {
    search(incarnation, lane_id, false)
}

/// The entry of a lane, added if there is room.
pub fn find_or_add(incarnation: i64, lane_id: i64) -> Option<Entry> {
    search(incarnation, lane_id, false).or_else(|| search(incarnation, lane_id, true))
}

fn search(incarnation: i64, lane_id: i64, add: bool) -> Option<Entry> {
    let header = header()?;
    if header.capacity == 0 {
        return None;
    }
    // SAFETY: MyDatabaseId is set for the life of a backend.
    let database = unsafe { pg_sys::MyDatabaseId }.to_u32();
    let mode = if add {
        pg_sys::LWLockMode::LW_EXCLUSIVE
    } else {
        pg_sys::LWLockMode::LW_SHARED
    };
    let mut found = None;
    // SAFETY: LOCK and the entries behind the header are initialised with the segment; entries are read and
    // written under LOCK; nothing between acquire and release can raise.
    unsafe {
        let lanes: *mut Lane = SEGMENT.add(1).cast();
        pg_sys::LWLockAcquire(LOCK, mode);
        let start = slot_hash(database, lane_id) % u64::from(header.capacity);
        let mut reusable: *mut Lane = std::ptr::null_mut();
        for i in 0..u64::from(header.capacity).min(MOST_PROBES) {
            let lane = lanes.add(((start + i) % u64::from(header.capacity)) as usize);
            if (*lane).used == 0 {
                if reusable.is_null() {
                    reusable = lane;
                }
                break;
            }
            if (*lane).database == database && (*lane).lane_id == lane_id {
                if (*lane).incarnation == incarnation {
                    found = Some(Entry(lane));
                } else {
                    reusable = lane;
                }
                break;
            }
        }
        if found.is_none() && add && !reusable.is_null() {
            let lane = reusable;
            (*lane).database = database;
            (*lane).incarnation = incarnation;
            (*lane).lane_id = lane_id;
            (*lane).next.store(0, Ordering::SeqCst);
            (*lane).low.store(0, Ordering::SeqCst);
            (*lane).count = 0;
            (*lane).used = 1;
            found = Some(Entry(lane));
        }
        pg_sys::LWLockRelease(LOCK);
    }
    found
}

/// Places looked at for a lane. A lane that finds none of them free does without an entry; entries never go
/// away, so it is found (or not) in the same places by everybody.
const MOST_PROBES: u64 = 64;

/// Spreads lanes over the table; the constant is 2^64 divided by the golden ratio (Knuth's
/// multiplicative hashing).
fn slot_hash(database: u32, lane_id: i64) -> u64 {
    ((lane_id as u64) ^ (u64::from(database) << 40)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 16
}

impl Entry {
    /// The next seq to give out, or None while unknown. Authoritative under the lane lock only.
    pub fn next(&self) -> Option<i64> {
        // SAFETY: the entry is never unmapped.
        let next = unsafe { (*self.0).next.load(Ordering::SeqCst) };
        (next != 0).then_some(next)
    }

    pub fn set_next(&self, next: i64) {
        // SAFETY: as above.
        unsafe { (*self.0).next.store(next, Ordering::SeqCst) }
    }

    /// The lowest unresolved position, a lower bound at any later time; 0 while unknown.
    pub fn low(&self) -> i64 {
        // SAFETY: as above.
        unsafe { (*self.0).low.load(Ordering::SeqCst) }
    }

    /// The unresolved ranges; under the claim lock.
    pub fn load(&self) -> Vec<Range> {
        // SAFETY: the claim lock of the lane is held, so nobody writes; count never exceeds the array.
        unsafe {
            let n = ((*self.0).count as usize).min(MAX_RANGES);
            (&(*self.0).ranges)[..n].to_vec()
        }
    }

    /// Replaces the ranges; under the claim lock. A plain copy that nothing can interrupt half-way.
    pub fn store(&self, ranges: &[Range]) {
        let n = ranges.len().min(MAX_RANGES);
        // SAFETY: the claim lock of the lane is held.
        unsafe {
            (&mut (*self.0).ranges)[..n].copy_from_slice(&ranges[..n]);
            (*self.0).count = n as u32;
            (*self.0)
                .low
                .store(ranges.first().map_or(0, |r| r.from), Ordering::SeqCst);
        }
    }
}
