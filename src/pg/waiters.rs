//! Who waits for jobs, in shared memory, and how a transaction's end wakes them.
//!
//! A waiter enters itself before its last look at the lanes; a producer's commit is visible before it reads
//! the table. Whichever comes first, one of the two sees the other. As many waiters are woken as there may
//! be jobs for; one that leaves with a wake that it did not look after passes it on.
//!
//! What a transaction has to wake for is noted while its verbs run, in cells of a fixed size. Its end only
//! does atomics and sets latches: an error there would bring the server down. Nobody waiting costs it one
//! atomic read. COMMIT PREPARED runs no callback: such jobs are found by the waiters' regular look.

use super::roster;
use super::shmem;
use pgrx::pg_sys;
use std::cell::Cell;
use std::sync::atomic::{fence, AtomicI32, AtomicPtr, AtomicU32, AtomicU64, Ordering::SeqCst};

/// Queues that an entry names one by one. Who waits for more is woken by every commit of the database.
const MOST_QUEUES: usize = 32;
/// Queues that a transaction notes one by one; beyond, it wakes everybody of the database.
const MOST_NOTED: usize = 32;
/// Queues with `notify` that have news, server-wide; beyond, all of them count as having some.
const MOST_NEWS: usize = 256;
/// Stands for a queue that does not exist yet.
pub const NEW_QUEUE: i32 = 0;

// An entry's state is its lowest two bits; the rest counts its users, so that a wake that was meant for one
// never goes to the next.
const FREE: u64 = 0;
const FILLING: u64 = 1;
const ASLEEP: u64 = 2;
const WOKEN: u64 = 3;
const STATE: u64 = 3;
const ONE_USER: u64 = 4;

#[repr(C)]
struct Header {
    /// Entries in use.
    waiting: AtomicU32,
    /// One more than the highest entry that was ever used.
    high: AtomicU32,
    /// Where the next search for somebody to wake begins.
    turn: AtomicU32,
    capacity: u32,
    /// Counts up when news found no place; each session compares it with what it has seen.
    news_lost: AtomicU64,
    /// Database and queue of those with news; 0: free.
    news: [AtomicU64; MOST_NEWS],
}

#[repr(C)]
struct Waiter {
    state: AtomicU64,
    latch: AtomicPtr<pg_sys::Latch>,
    database: AtomicU32,
    /// Number of queues; more than MOST_QUEUES: any queue of the database.
    count: AtomicU32,
    queues: [AtomicI32; MOST_QUEUES],
}

const NAME: &std::ffi::CStr = c"awa_queue waiters";

static mut SEGMENT: *mut Header = std::ptr::null_mut();
static mut CAPACITY: u32 = 0;
static mut PREVIOUS_REQUEST: pg_sys::shmem_request_hook_type = None;
static mut PREVIOUS_STARTUP: pg_sys::shmem_startup_hook_type = None;

/// Asks for the shared memory; called from `_PG_init` while the postmaster preloads libraries.
pub fn install(waiters: u32) {
    // SAFETY: the postmaster is single-threaded here; the hooks are chained to who was there before.
    unsafe {
        CAPACITY = waiters;
        PREVIOUS_REQUEST = pg_sys::shmem_request_hook;
        pg_sys::shmem_request_hook = Some(request);
        PREVIOUS_STARTUP = pg_sys::shmem_startup_hook;
        pg_sys::shmem_startup_hook = Some(startup);
    }
}

fn size(capacity: u32) -> usize {
    std::mem::size_of::<Header>() + capacity as usize * std::mem::size_of::<Waiter>()
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn request() {
    // SAFETY: called by the postmaster in the phase in which requests are allowed.
    unsafe {
        if let Some(previous) = PREVIOUS_REQUEST {
            previous();
        }
        pg_sys::RequestAddinShmemSpace(size(CAPACITY));
    }
}

#[pgrx::pg_guard]
unsafe extern "C-unwind" fn startup() {
    // SAFETY: called by the postmaster after the segment exists; the initialisation is done once, under the
    // lock meant for it. All-zero bytes are a valid empty table.
    unsafe {
        if let Some(previous) = PREVIOUS_STARTUP {
            previous();
        }
        shmem::with_init_lock(|| {
            let mut found = false;
            let segment = pg_sys::ShmemInitStruct(NAME.as_ptr(), size(CAPACITY), &mut found).cast::<Header>();
            if !found {
                std::ptr::write_bytes(segment.cast::<u8>(), 0, size(CAPACITY));
                (*segment).capacity = CAPACITY;
            }
            SEGMENT = segment;
        });
    }
}

fn header() -> Option<&'static Header> {
    // SAFETY: SEGMENT is null or points to the initialised segment, which lives as long as the process.
    unsafe { SEGMENT.as_ref() }
}

fn entries(header: &'static Header) -> &'static [Waiter] {
    // SAFETY: the entries follow the header in the segment, `capacity` of them, made of atomics alone.
    unsafe {
        let first = std::ptr::from_ref(header).add(1).cast::<Waiter>();
        std::slice::from_raw_parts(first, header.capacity as usize)
    }
}

fn my_database() -> u32 {
    // SAFETY: MyDatabaseId is set for the life of a backend.
    unsafe { pg_sys::MyDatabaseId }.to_u32()
}

// ---------------------------------------------------------------- waiting

thread_local! {
    /// The own entry and its user count.
    static MINE: Cell<Option<(usize, u64)>> = const { Cell::new(None) };
    static EXIT_HOOKED: Cell<bool> = const { Cell::new(false) };
}

/// The own place among the waiters, given back when it goes out of scope, at abort and at the process's exit.
pub struct Place(());

/// Enters this process as a waiter for the queues. None without shared memory or where the table is full.
pub fn enter(queues: &[i32]) -> Option<Place> {
    let header = header()?;
    leave();
    if !EXIT_HOOKED.replace(true) {
        // SAFETY: a plain function that lives as long as the library.
        unsafe { pg_sys::before_shmem_exit(Some(at_exit), pg_sys::Datum::from(0usize)) };
    }
    for (i, entry) in entries(header).iter().enumerate() {
        let seen = entry.state.load(SeqCst);
        if seen & STATE != FREE {
            continue;
        }
        let user = (seen & !STATE).wrapping_add(ONE_USER);
        if entry
            .state
            .compare_exchange(seen, user | FILLING, SeqCst, SeqCst)
            .is_err()
        {
            continue;
        }
        MINE.set(Some((i, user)));
        header.waiting.fetch_add(1, SeqCst);
        header.high.fetch_max(i as u32 + 1, SeqCst);
        // SAFETY: MyLatch is the latch of this process in shared memory, at one address in all processes.
        entry.latch.store(unsafe { pg_sys::MyLatch }, SeqCst);
        entry.database.store(my_database(), SeqCst);
        for (place, queue) in entry.queues.iter().zip(queues) {
            place.store(*queue, SeqCst);
        }
        entry.count.store(queues.len() as u32, SeqCst);
        entry.state.store(user | ASLEEP, SeqCst);
        fence(SeqCst);
        return Some(Place(()));
    }
    None
}

impl Place {
    /// Whether somebody has woken this waiter; from here on it can be woken again. What is looked at after
    /// this call covers the wake.
    pub fn take_wake(&self) -> bool {
        let Some((entry, user)) = mine() else { return false };
        let woken = entry
            .state
            .compare_exchange(user | WOKEN, user | ASLEEP, SeqCst, SeqCst)
            .is_ok();
        fence(SeqCst);
        woken
    }

    pub fn is_woken(&self) -> bool {
        mine().is_some_and(|(entry, user)| entry.state.load(SeqCst) == user | WOKEN)
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        leave();
    }
}

fn mine() -> Option<(&'static Waiter, u64)> {
    let (i, user) = MINE.get()?;
    Some((entries(header()?).get(i)?, user))
}

/// Gives the own entry back. A wake that came and was not looked after is passed on. Only atomics and latches.
pub(super) fn leave() {
    let (Some(header), Some((entry, user))) = (header(), mine()) else {
        return;
    };
    MINE.set(None);
    let count = entry.count.load(SeqCst) as usize;
    let mut queues = [NEW_QUEUE; MOST_QUEUES];
    for (to, from) in queues.iter_mut().zip(&entry.queues) {
        *to = from.load(SeqCst);
    }
    let before = entry.state.swap(user | FREE, SeqCst);
    header.waiting.fetch_sub(1, SeqCst);
    if before & STATE == WOKEN {
        if count > MOST_QUEUES {
            wake_database(header);
        } else {
            for queue in &queues[..count] {
                wake(header, *queue, 1);
            }
        }
    }
}

unsafe extern "C-unwind" fn at_exit(_code: i32, _arg: pg_sys::Datum) {
    leave();
}

// ---------------------------------------------------------------- waking

/// Wakes up to `jobs` of those who wait for a queue of this database, and besides all who wait for any.
fn wake(header: &'static Header, queue: i32, jobs: u32) {
    let mut left = jobs;
    let database = my_database();
    in_turn(header, |entry, seen| {
        if entry.database.load(SeqCst) != database {
            return;
        }
        let count = entry.count.load(SeqCst) as usize;
        if count > MOST_QUEUES {
            rouse(entry, seen);
        } else if left > 0
            && entry.queues[..count].iter().any(|q| q.load(SeqCst) == queue)
            && rouse(entry, seen)
        {
            left -= 1;
        }
    });
}

fn wake_database(header: &'static Header) {
    let database = my_database();
    in_turn(header, |entry, seen| {
        if entry.database.load(SeqCst) == database {
            rouse(entry, seen);
        }
    });
}

/// Calls `with` for every sleeping entry, starting at another one each time.
fn in_turn(header: &'static Header, mut with: impl FnMut(&Waiter, u64)) {
    let high = header.high.load(SeqCst) as usize;
    let entries = entries(header);
    if high == 0 || high > entries.len() {
        return;
    }
    let start = header.turn.fetch_add(1, SeqCst) as usize % high;
    for i in 0..high {
        let entry = &entries[(start + i) % high];
        let seen = entry.state.load(SeqCst);
        if seen & STATE == ASLEEP {
            with(entry, seen);
        }
    }
}

/// Wakes the waiter of an entry that was seen asleep; false where it was quicker or has left.
fn rouse(entry: &Waiter, seen: u64) -> bool {
    let latch = entry.latch.load(SeqCst);
    let woken = (seen & !STATE) | WOKEN;
    if entry.state.compare_exchange(seen, woken, SeqCst, SeqCst).is_err() {
        return false;
    }
    if !latch.is_null() {
        // SAFETY: the latch of a process, in shared memory that is never unmapped. Should its owner have left
        // meanwhile, somebody wakes up once for nothing.
        unsafe { pg_sys::SetLatch(latch) };
    }
    true
}

// ---------------------------------------------------------------- what a transaction will wake for

#[derive(Clone, Copy)]
struct Noted {
    queue: i32,
    produced: u32,
    claimed: u32,
    notify: bool,
}

const NOTHING: Noted = Noted {
    queue: NEW_QUEUE,
    produced: 0,
    claimed: 0,
    notify: false,
};

thread_local! {
    static NOTED: [Cell<Noted>; MOST_NOTED] = const { [const { Cell::new(NOTHING) }; MOST_NOTED] };
    static COUNT: Cell<usize> = const { Cell::new(0) };
    static OVERFLOW: Cell<bool> = const { Cell::new(false) };
}

/// Notes that the transaction put jobs where they can be claimed once it commits.
pub fn note_produced(queue: i32, jobs: usize, notify: bool) {
    note(queue, u32::try_from(jobs).unwrap_or(u32::MAX), 0, notify);
}

/// Notes that the transaction claimed jobs: they are free again if it or a savepoint of it rolls back.
pub fn note_claimed(queue: i32, jobs: usize, notify: bool) {
    note(queue, 0, u32::try_from(jobs).unwrap_or(u32::MAX), notify);
}

/// Notes that everybody who waits for the queue has to look again.
pub fn note_changed(queue: i32) {
    note(queue, u32::MAX, 0, false);
}

fn note(queue: i32, produced: u32, claimed: u32, notify: bool) {
    if header().is_none() {
        return;
    }
    NOTED.with(|noted| {
        let n = COUNT.get();
        let cell = noted[..n].iter().find(|c| c.get().queue == queue);
        let cell = match cell {
            Some(cell) => cell,
            None if n < MOST_NOTED => {
                noted[n].set(Noted { queue, ..NOTHING });
                COUNT.set(n + 1);
                &noted[n]
            }
            None => {
                OVERFLOW.set(true);
                return;
            }
        };
        let was = cell.get();
        cell.set(Noted {
            queue,
            produced: was.produced.saturating_add(produced),
            claimed: was.claimed.saturating_add(claimed),
            notify: was.notify || notify,
        });
    });
}

pub(super) fn at_commit() {
    wake_noted(|n| n.produced);
    forget();
    SENDING.with(|s| s.iter().for_each(|c| c.set(0)));
}

/// Rolled back claims free jobs; a rolled back enqueue opens the gate of a strict lane.
pub(super) fn at_abort() {
    leave();
    wake_noted(|n| n.produced.saturating_add(n.claimed));
    forget();
    SENDING.with(|s| {
        for cell in s {
            if cell.get() != 0 {
                mark_news(cell.replace(0) as u32 as i32);
            }
        }
    });
}

/// Which claims were of the savepoint is not known: all that were noted so far count as free.
pub(super) fn at_subtransaction_abort() {
    wake_noted(|n| n.produced.saturating_add(n.claimed));
}

/// PREPARE TRANSACTION: nothing is visible yet, and no callback will run when it is.
pub(super) fn forget() {
    COUNT.set(0);
    OVERFLOW.set(false);
}

fn wake_noted(jobs: impl Fn(&Noted) -> u32) {
    let n = COUNT.get();
    let overflow = OVERFLOW.get();
    if n == 0 && !overflow {
        return;
    }
    let Some(header) = header() else { return };
    fence(SeqCst);
    let anybody = header.waiting.load(SeqCst) != 0;
    if overflow {
        header.news_lost.fetch_add(1, SeqCst);
        roster::wake_worker();
        if anybody {
            wake_database(header);
        }
    }
    NOTED.with(|noted| {
        for noted in noted[..n].iter().map(Cell::get) {
            let jobs = jobs(&noted);
            if jobs == 0 {
                continue;
            }
            if anybody && !overflow {
                wake(header, noted.queue, jobs);
            }
            if noted.notify && mark_news(noted.queue) {
                roster::wake_worker();
            }
        }
    });
}

// ---------------------------------------------------------------- news for NOTIFY

thread_local! {
    /// Queues whose NOTIFY the current transaction sends: news again if it rolls back. 0: none.
    static SENDING: [Cell<i64>; MOST_NEWS] = const { [const { Cell::new(0) }; MOST_NEWS] };
    static SEEN_LOST: Cell<u64> = const { Cell::new(u64::MAX) };
}

fn news_key(queue: i32) -> u64 {
    u64::from(my_database()) << 32 | u64::from(queue as u32)
}

/// Marks a queue as having news; true where it had none. Only atomics.
fn mark_news(queue: i32) -> bool {
    let Some(header) = header() else { return false };
    let key = news_key(queue);
    if header.news.iter().any(|n| n.load(SeqCst) == key) {
        return false;
    }
    let placed = header
        .news
        .iter()
        .any(|n| n.compare_exchange(0, key, SeqCst, SeqCst).is_ok());
    if !placed {
        header.news_lost.fetch_add(1, SeqCst);
    }
    true
}

/// The queues of this database that have news. None at the first call of a process and where news were lost:
/// all may have some.
pub fn news() -> Option<Vec<i32>> {
    let Some(header) = header() else {
        return Some(Vec::new());
    };
    let lost = header.news_lost.load(SeqCst);
    if SEEN_LOST.replace(lost) != lost {
        return None;
    }
    let database = my_database();
    let mut queues: Vec<i32> = header
        .news
        .iter()
        .map(|n| n.load(SeqCst))
        .filter(|key| (key >> 32) as u32 == database)
        .map(|key| key as u32 as i32)
        .collect();
    queues.sort_unstable();
    queues.dedup();
    Some(queues)
}

/// Takes a queue's news away, before its NOTIFY is sent in this transaction.
pub fn take_news(queue: i32) {
    let Some(header) = header() else { return };
    let key = news_key(queue);
    for place in &header.news {
        let _ = place.compare_exchange(key, 0, SeqCst, SeqCst);
    }
    SENDING.with(|s| {
        if let Some(free) = s.iter().find(|c| c.get() == 0) {
            free.set(i64::from(queue));
        }
    });
}

/// Whether there is shared memory for it.
pub fn available() -> bool {
    header().is_some()
}
