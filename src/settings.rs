//! Every setting, why it exists and why its default.

use pgrx::guc::{GucContext, GucFlags, GucRegistry, GucSetting};

static AUTO_CREATE_QUEUES: GucSetting<bool> = GucSetting::<bool>::new(true);
static MAX_ARGS_BYTES: GucSetting<i32> = GucSetting::<i32>::new(1024 * 1024);
static SLOT_SIZE: GucSetting<i32> = GucSetting::<i32>::new(64);
static SLOT_AGE: GucSetting<i32> = GucSetting::<i32>::new(60);
static RETENTION_SIZE: GucSetting<i32> = GucSetting::<i32>::new(4096);
static MAX_SLOTS: GucSetting<i32> = GucSetting::<i32>::new(32);
static SNAPSHOT_GRACE: GucSetting<i32> = GucSetting::<i32>::new(6 * 3600);
static WORKER: GucSetting<bool> = GucSetting::<bool>::new(true);
static SHARED_LANES: GucSetting<i32> = GucSetting::<i32>::new(2048);
static MAX_WAITERS: GucSetting<i32> = GucSetting::<i32>::new(1024);

/// Queues that are first named in an enqueue are created with default settings.
pub fn auto_create_queues() -> bool {
    AUTO_CREATE_QUEUES.get()
}

/// Largest args of a job, in bytes of jsonb.
pub fn max_args_bytes() -> usize {
    MAX_ARGS_BYTES.get() as usize
}

/// A slot larger than this is sealed, in bytes.
pub fn slot_bytes() -> i64 {
    i64::from(SLOT_SIZE.get()) * 1024 * 1024
}

/// A slot that is not empty is sealed at this age, in microseconds.
pub fn slot_age_micros() -> i64 {
    i64::from(SLOT_AGE.get()) * 1_000_000
}

/// Finished jobs beyond this size of the ring go before their retention is over, in bytes.
pub fn retention_bytes() -> i64 {
    i64::from(RETENTION_SIZE.get()) * 1024 * 1024
}

/// Slots are added up to this number while none is empty.
pub fn max_slots() -> u8 {
    MAX_SLOTS.get() as u8
}

/// How long an old snapshot can keep a finished slot from being emptied, in microseconds.
pub fn snapshot_grace_micros() -> i64 {
    i64::from(SNAPSHOT_GRACE.get()) * 1_000_000
}

/// Whether background workers do the maintenance.
pub fn worker() -> bool {
    WORKER.get()
}

/// Defines the settings; `preloading` while the postmaster loads the library.
pub fn register(preloading: bool) {
    GucRegistry::define_bool_guc(
        c"awa_queue.auto_create_queues",
        c"Creates a queue with default settings when enqueue first names it.",
        c"Off: enqueue into an unknown queue is an error (42704).",
        &AUTO_CREATE_QUEUES,
        GucContext::Userset,
        GucFlags::default(),
    );
    // One mebibyte: larger payloads belong into a table of their own, with their key in the job.
    GucRegistry::define_int_guc(
        c"awa_queue.max_args_bytes",
        c"Largest args of a job, as jsonb.",
        c"A queue's max_args_bytes setting goes before it.",
        &MAX_ARGS_BYTES,
        1024,
        256 * 1024 * 1024,
        GucContext::Suset,
        GucFlags::UNIT_BYTE,
    );
    // 64 MB hold some 400,000 small jobs: emptying one took 75 to 97 ms.
    GucRegistry::define_int_guc(
        c"awa_queue.slot_size",
        c"Size at which the current slot of the ring is sealed.",
        c"All four tables and their indexes count.",
        &SLOT_SIZE,
        1,
        16 * 1024,
        GucContext::Sighup,
        GucFlags::UNIT_MB,
    );
    GucRegistry::define_int_guc(
        c"awa_queue.slot_age",
        c"Age at which the current slot of the ring is sealed if it holds anything.",
        c"Longer where the longest retention would need more slots than there are: retention / (slots / 2).",
        &SLOT_AGE,
        1,
        7 * 86_400,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    GucRegistry::define_int_guc(
        c"awa_queue.retention_size",
        c"Size of the ring beyond which finished jobs go before their retention is over, oldest first.",
        c"Jobs that are not finished are never removed.",
        &RETENTION_SIZE,
        64,
        1024 * 1024,
        GucContext::Sighup,
        GucFlags::UNIT_MB,
    );
    // 64 MB each by default: 2 GB before the current slot has to grow. A receipt has room for 64.
    GucRegistry::define_int_guc(
        c"awa_queue.max_slots",
        c"Number of slots up to which the ring is extended while no slot is empty.",
        c"Slots are never taken away again. Beyond the number the current slot grows.",
        &MAX_SLOTS,
        16,
        64,
        GucContext::Sighup,
        GucFlags::default(),
    );
    // TRUNCATE is not MVCC: a dump that began before would miss jobs that waited at its snapshot.
    GucRegistry::define_int_guc(
        c"awa_queue.snapshot_grace",
        c"How long an older snapshot (a running dump) keeps finished slots from being emptied.",
        c"After that they are emptied although the snapshot may still want them.",
        &SNAPSHOT_GRACE,
        0,
        30 * 86_400,
        GucContext::Sighup,
        GucFlags::UNIT_S,
    );
    // Off is for a server whose maintenance is run by hand, or while something is looked into.
    GucRegistry::define_bool_guc(
        c"awa_queue.worker",
        c"Background workers do the maintenance of each database that has the extension.",
        c"Only where the library is preloaded. Off: CALL awa.maintain() does the same.",
        &WORKER,
        GucContext::Sighup,
        GucFlags::default(),
    );
    if preloading {
        // A lane's entry takes about 3 kB; lanes beyond the number use their index instead.
        GucRegistry::define_int_guc(
            c"awa_queue.shared_lanes",
            c"Number of lanes whose next seq and unresolved ranges are kept in shared memory.",
            c"A lane is one priority and shard of a queue. Needs a restart.",
            &SHARED_LANES,
            0,
            1_000_000,
            GucContext::Postmaster,
            GucFlags::default(),
        );
        // 160 bytes each; who finds the table full polls, as without preload.
        GucRegistry::define_int_guc(
            c"awa_queue.max_waiters",
            c"Number of sessions that can sleep in awa.wait at the same time, in all databases.",
            c"Further ones look for jobs in intervals instead of being woken. Needs a restart.",
            &MAX_WAITERS,
            0,
            100_000,
            GucContext::Postmaster,
            GucFlags::default(),
        );
    }
    #[cfg(feature = "injection")]
    injection::register();
}

/// Number of lane entries in shared memory.
pub fn shared_lanes() -> u32 {
    SHARED_LANES.get() as u32
}

/// Number of entries for sleeping waiters in shared memory.
pub fn max_waiters() -> u32 {
    MAX_WAITERS.get() as u32
}

/// Switches of test builds.
#[cfg(feature = "injection")]
pub mod injection {
    use super::{GucContext, GucFlags, GucRegistry, GucSetting};
    use std::ffi::CString;

    static PAUSE_AT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(None);
    static PAUSE_KEY: GucSetting<i32> = GucSetting::<i32>::new(4242);
    static SLEEP_AT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(None);
    static CLOCK_OFFSET: GucSetting<i32> = GucSetting::<i32>::new(0);
    static MUTANT: GucSetting<Option<CString>> = GucSetting::<Option<CString>>::new(None);

    fn string(s: &GucSetting<Option<CString>>) -> String {
        s.get()
            .map_or_else(String::new, |c| c.to_string_lossy().into_owned())
    }

    pub fn pause_at() -> String {
        string(&PAUSE_AT)
    }
    pub fn pause_key() -> i64 {
        i64::from(PAUSE_KEY.get())
    }
    /// Microseconds.
    pub fn clock_offset() -> i64 {
        i64::from(CLOCK_OFFSET.get()) * 1_000
    }
    pub fn sleep_at() -> String {
        string(&SLEEP_AT)
    }
    pub fn mutants() -> String {
        string(&MUTANT)
    }

    pub(super) fn register() {
        for (name, what, setting) in [
            (
                c"awa_queue.pause_at",
                c"Points at which this session waits for awa_queue.pause_key.",
                &PAUSE_AT,
            ),
            (
                c"awa_queue.sleep_at",
                c"Naps as point:microseconds:one_in_n.",
                &SLEEP_AT,
            ),
            (c"awa_queue.mutant", c"Safety tests that are left out.", &MUTANT),
        ] {
            GucRegistry::define_string_guc(
                name,
                what,
                c"",
                setting,
                GucContext::Userset,
                GucFlags::default(),
            );
        }
        GucRegistry::define_int_guc(
            c"awa_queue.clock_offset",
            c"How far the queue's clock is ahead of the server's.",
            c"Set it in a session, or by ALTER SYSTEM and a reload for the workers too.",
            &CLOCK_OFFSET,
            i32::MIN,
            i32::MAX,
            GucContext::Userset,
            GucFlags::UNIT_MS,
        );
        GucRegistry::define_int_guc(
            c"awa_queue.pause_key",
            c"Advisory lock key that a pause waits for.",
            c"",
            &PAUSE_KEY,
            0,
            i32::MAX,
            GucContext::Userset,
            GucFlags::default(),
        );
    }
}
