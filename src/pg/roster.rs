//! The databases that use the extension, and where their workers are: a small table in shared memory.
//!
//! Backends tell of themselves here (the first verb in a database adds its entry, each commit that did
//! something moves its counter), the launcher and the workers read it. What the end of a transaction does
//! is atomics and SetLatch alone: an error there would bring the server down. Latches of processes lie in
//! shared memory that is never unmapped, so setting one whose process has gone wakes a stranger at worst.

use pgrx::pg_sys;
use std::cell::Cell;
use std::sync::atomic::{AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::SeqCst};

/// Databases that can have a worker. An entry takes 64 bytes.
const CAPACITY: usize = 1024;
const NAME: &std::ffi::CStr = c"awa_queue workers";
/// AddinShmemInitLock is the 21st of the fixed LWLocks in PostgreSQL 15 to 18.
const ADDIN_SHMEM_INIT_LOCK: usize = 21;

#[repr(C)]
struct Header {
    launcher: AtomicPtr<pg_sys::Latch>,
    entries: [Entry; CAPACITY],
}

/// A database. Never moved; free while `database` is 0.
#[repr(C)]
pub struct Entry {
    database: AtomicU32,
    /// 1: somebody used the extension there since the last worker that did not find it.
    wanted: AtomicU32,
    worker: AtomicI32,
    /// The worker sleeps until something happens.
    asleep: AtomicU32,
    latch: AtomicPtr<pg_sys::Latch>,
    /// Transactions that did something.
    activity: AtomicU64,
    /// Calls for the duties that must not wait for their period.
    calls: AtomicU64,
    /// Commands that need the database without its worker.
    holds: AtomicU32,
    /// 1: the worker has found the extension.
    confirmed: AtomicU32,
    /// 1: the last worker ended by an error or a signal in the middle of its work.
    failed: AtomicU32,
}

static mut SEGMENT: *mut Header = std::ptr::null_mut();
static mut LOCK: *mut pg_sys::LWLock = std::ptr::null_mut();
static mut PREVIOUS_REQUEST: pg_sys::shmem_request_hook_type = None;
static mut PREVIOUS_STARTUP: pg_sys::shmem_startup_hook_type = None;

thread_local! {
    /// The entry of this session's database.
    static OWN: Cell<Option<&'static Entry>> = const { Cell::new(None) };
    /// A verb that may write ran in this transaction.
    static ACTIVE: Cell<bool> = const { Cell::new(false) };
    /// The database that a command of this transaction needs for itself, and whether it drops it.
    static HELD: Cell<Option<(&'static Entry, u32, bool)>> = const { Cell::new(None) };
}

/// Asks for the shared memory; called from `_PG_init` while the postmaster preloads libraries.
pub fn install() {
    // SAFETY: the postmaster is single-threaded here; the hooks are chained to who was there before.
    unsafe {
        PREVIOUS_REQUEST = pg_sys::shmem_request_hook;
        pg_sys::shmem_request_hook = Some(request);
        PREVIOUS_STARTUP = pg_sys::shmem_startup_hook;
        pg_sys::shmem_startup_hook = Some(startup);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn request() {
    // SAFETY: called by the postmaster in the phase in which requests are allowed.
    unsafe {
        if let Some(previous) = PREVIOUS_REQUEST {
            previous();
        }
        pg_sys::RequestAddinShmemSpace(std::mem::size_of::<Header>());
        pg_sys::RequestNamedLWLockTranche(NAME.as_ptr(), 1);
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn startup() {
    // SAFETY: called after the segment exists; initialised once, under the lock meant for it. All zeros is
    // a valid header: no launcher, no database.
    unsafe {
        if let Some(previous) = PREVIOUS_STARTUP {
            previous();
        }
        let init_lock = &raw mut (*pg_sys::MainLWLockArray.add(ADDIN_SHMEM_INIT_LOCK)).lock;
        pg_sys::LWLockAcquire(init_lock, pg_sys::LWLockMode::LW_EXCLUSIVE);
        let size = std::mem::size_of::<Header>();
        let mut found = false;
        let segment = pg_sys::ShmemInitStruct(NAME.as_ptr(), size, &mut found).cast::<Header>();
        if !found {
            std::ptr::write_bytes(segment.cast::<u8>(), 0, size);
        }
        LOCK = &raw mut (*pg_sys::GetNamedLWLockTranche(NAME.as_ptr())).lock;
        SEGMENT = segment;
        pg_sys::LWLockRelease(init_lock);
    }
}

fn header() -> Option<&'static Header> {
    // SAFETY: SEGMENT is null or points to the initialised segment, which lives as long as the process and is
    // only changed through atomics.
    unsafe { SEGMENT.as_ref() }
}

fn set(latch: &AtomicPtr<pg_sys::Latch>) {
    let latch = latch.load(SeqCst);
    if !latch.is_null() {
        // SAFETY: a latch of a PGPROC, which is never unmapped; SetLatch raises nothing.
        unsafe { pg_sys::SetLatch(latch) }
    }
}

fn my_latch() -> *mut pg_sys::Latch {
    // SAFETY: a plain variable of this process; in processes with a PGPROC it points to the shared latch.
    unsafe { pg_sys::MyLatch }
}

fn my_database() -> u32 {
    // SAFETY: set for the life of a backend; 0 in the launcher.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

/// All entries that are in use.
pub fn entries() -> impl Iterator<Item = &'static Entry> {
    header()
        .map(|h| &h.entries[..])
        .unwrap_or_default()
        .iter()
        .filter(|e| e.database() != 0)
}

/// The entry at a position, in use or not.
pub fn at(position: usize) -> Option<&'static Entry> {
    header().and_then(|h| h.entries.get(position))
}

pub fn find(database: u32) -> Option<&'static Entry> {
    entries().find(|e| e.database() == database)
}

/// The entry of a database, added where there is room.
pub fn find_or_add(database: u32) -> Option<&'static Entry> {
    let header = header()?;
    if let Some(entry) = find(database) {
        return Some(entry);
    }
    // SAFETY: LOCK is initialised with the segment; nothing between acquire and release can raise.
    unsafe { pg_sys::LWLockAcquire(LOCK, pg_sys::LWLockMode::LW_EXCLUSIVE) };
    let entry = find(database).or_else(|| {
        let free = header.entries.iter().find(|e| e.database() == 0)?;
        free.wanted.store(0, SeqCst);
        free.holds.store(0, SeqCst);
        free.asleep.store(0, SeqCst);
        free.database.store(database, SeqCst);
        Some(free)
    });
    // SAFETY: acquired above.
    unsafe { pg_sys::LWLockRelease(LOCK) };
    entry
}

impl Entry {
    pub fn database(&self) -> u32 {
        self.database.load(SeqCst)
    }

    pub fn position(&self) -> usize {
        header().map_or(0, |h| {
            (std::ptr::from_ref(self) as usize - h.entries.as_ptr() as usize) / std::mem::size_of::<Entry>()
        })
    }

    /// The database has gone.
    pub fn forget(&self, database: u32) {
        let _ = self.database.compare_exchange(database, 0, SeqCst, SeqCst);
    }

    pub fn is_wanted(&self) -> bool {
        self.wanted.load(SeqCst) != 0
    }

    pub fn set_wanted(&self, wanted: bool) {
        self.wanted.store(u32::from(wanted), SeqCst);
    }

    pub fn worker(&self) -> i32 {
        self.worker.load(SeqCst)
    }

    pub fn activity(&self) -> u64 {
        self.activity.load(SeqCst)
    }

    pub fn calls(&self) -> u64 {
        self.calls.load(SeqCst)
    }

    pub fn is_held(&self) -> bool {
        self.holds.load(SeqCst) != 0
    }

    fn release(&self) {
        let _ = self.holds.fetch_update(SeqCst, SeqCst, |n| n.checked_sub(1));
        wake_launcher();
    }

    /// This process becomes the worker of the database; false where it has one.
    pub fn enter(&self) -> bool {
        // SAFETY: a plain variable of this process.
        let pid = unsafe { pg_sys::MyProcPid };
        let entered = self.worker.compare_exchange(0, pid, SeqCst, SeqCst).is_ok();
        if entered {
            self.latch.store(my_latch(), SeqCst);
        }
        entered
    }

    pub fn is_confirmed(&self) -> bool {
        self.confirmed.load(SeqCst) != 0
    }

    /// The worker has found the extension, or (false) is still to find out.
    pub fn set_confirmed(&self, confirmed: bool) {
        self.confirmed.store(u32::from(confirmed), SeqCst);
        if confirmed {
            wake_launcher();
        }
    }

    /// Whether the last worker ended badly.
    pub fn take_failed(&self) -> bool {
        self.failed.swap(0, SeqCst) != 0
    }

    /// The end of `enter`; called while the process exits.
    pub fn leave(&self, failed: bool) {
        self.failed.store(u32::from(failed), SeqCst);
        self.latch.store(std::ptr::null_mut(), SeqCst);
        self.asleep.store(0, SeqCst);
        self.worker.store(0, SeqCst);
        wake_launcher();
    }

    /// From here on the next activity sets the worker's latch. Look at `activity` once more after it.
    pub fn fall_asleep(&self) {
        self.asleep.store(1, SeqCst);
    }

    pub fn wake_up(&self) {
        self.asleep.store(0, SeqCst);
    }
}

// ---------------------------------------------------------------- what sessions tell

/// A verb that may write runs: the database is known to the launcher from this transaction's end on.
pub fn note_verb() {
    let Some(_) = header() else { return };
    ACTIVE.set(true);
    let database = my_database();
    if OWN.get().is_none_or(|e| e.database() != database) {
        OWN.set(find_or_add(database));
    }
}

/// The worker itself is in its database.
pub(super) fn note_own() {
    OWN.set(find(my_database()));
}

/// Tells the worker of this database that something is due at once (or earlier than it knows). For commit
/// callbacks too.
pub fn wake_worker() {
    if let Some(entry) = OWN.get().filter(|e| e.database() == my_database()) {
        entry.calls.fetch_add(1, SeqCst);
        set(&entry.latch);
    }
}

/// Called at the end of each transaction, committed, aborted or prepared.
pub(super) fn end_of_transaction(aborted: bool) {
    if let Some((entry, database, drops)) = HELD.take() {
        if drops && !aborted {
            entry.forget(database);
        }
        entry.release();
    }
    if !ACTIVE.replace(false) {
        return;
    }
    // SAFETY: reads local transaction state. A transaction without an id wrote nothing.
    let wrote = unsafe { pg_sys::GetTopTransactionIdIfAny() } != pg_sys::InvalidTransactionId;
    let Some(entry) = OWN.get().filter(|e| wrote && e.database() == my_database()) else {
        return;
    };
    entry.activity.fetch_add(1, SeqCst);
    if entry.asleep.load(SeqCst) != 0 && entry.asleep.swap(0, SeqCst) != 0 {
        set(&entry.latch);
    }
    if !entry.is_wanted() && entry.wanted.swap(1, SeqCst) == 0 {
        wake_launcher();
    }
}

/// Keeps the worker away from a database until this transaction ends, however it ends. One database a
/// transaction: none of the commands that need it can follow another in one transaction, but renaming.
pub fn hold(database: u32, drops: bool) -> Option<&'static Entry> {
    let entry = find(database)?;
    if let Some((before, ..)) = HELD.take() {
        before.release();
    }
    entry.holds.fetch_add(1, SeqCst);
    HELD.set(Some((entry, database, drops)));
    Some(entry)
}

// ---------------------------------------------------------------- the launcher

pub fn enter_launcher() {
    if let Some(h) = header() {
        h.launcher.store(my_latch(), SeqCst);
    }
}

pub fn leave_launcher() {
    if let Some(h) = header() {
        h.launcher.store(std::ptr::null_mut(), SeqCst);
    }
}

pub fn wake_launcher() {
    if let Some(h) = header() {
        set(&h.launcher);
    }
}
