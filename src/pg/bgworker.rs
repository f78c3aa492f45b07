//! Background processes: registering, starting, signals, waiting, and one transaction that can not take the
//! process down.

use super::caught::Caught;
use super::roster::{self, Entry};
use pgrx::pg_sys;
use std::cell::Cell;
use std::ffi::{c_char, CString};
use std::panic::AssertUnwindSafe;
use std::time::Duration;

mod raw {
    // Not to be wrapped: they are installed as signal handlers, or can not raise.
    unsafe extern "C-unwind" {
        #[allow(clashing_extern_declarations)]
        pub fn die(signal: i32);
        #[allow(clashing_extern_declarations)]
        pub fn SignalHandlerForConfigReload(signal: i32);
        pub fn enable_timeout_after(id: u32, delay_ms: i32);
        pub fn disable_timeout(id: u32, keep_indicator: bool);
        pub static mut catchupInterruptPending: i32;
    }
}

/// STATEMENT_TIMEOUT of enum TimeoutId, the same in PostgreSQL 15 to 18.
const STATEMENT_TIMEOUT: u32 = 3;
const LIBRARY: &str = "awa_queue";
/// A launcher that ended is started again after so many seconds.
const LAUNCHER_RESTART: i32 = 2;

/// Whether pg_upgrade runs this server: nothing may be written then.
pub fn is_binary_upgrade() -> bool {
    // SAFETY: a plain variable of this process.
    unsafe { pg_sys::IsBinaryUpgrade }
}

fn copy(into: &mut [c_char], text: &str) {
    let room = into.len() - 1;
    for (to, from) in into[..room].iter_mut().zip(text.bytes()) {
        *to = from as c_char;
    }
}

fn description(name: &str, function: &str, arg: usize) -> pg_sys::BackgroundWorker {
    let mut worker = pg_sys::BackgroundWorker {
        bgw_flags: (pg_sys::BGWORKER_SHMEM_ACCESS | pg_sys::BGWORKER_BACKEND_DATABASE_CONNECTION) as i32,
        // On a standby that is after its promotion.
        bgw_start_time: pg_sys::BgWorkerStartTime::BgWorkerStart_RecoveryFinished,
        bgw_restart_time: pg_sys::BGW_NEVER_RESTART,
        bgw_main_arg: pg_sys::Datum::from(arg),
        ..Default::default()
    };
    copy(&mut worker.bgw_name, name);
    copy(&mut worker.bgw_type, name);
    copy(&mut worker.bgw_library_name, LIBRARY);
    copy(&mut worker.bgw_function_name, function);
    worker
}

/// Registers the launcher; called from `_PG_init` while the postmaster preloads libraries.
pub fn register_launcher() {
    let mut launcher = description("awa_queue launcher", "awa_queue_launcher_main", 0);
    launcher.bgw_restart_time = LAUNCHER_RESTART;
    // SAFETY: a complete description, copied by PostgreSQL.
    unsafe { pg_sys::RegisterBackgroundWorker(&mut launcher) }
}

/// A worker that the launcher started.
pub struct Handle(*mut pg_sys::BackgroundWorkerHandle);

impl Handle {
    pub fn has_stopped(&self) -> bool {
        let mut pid = 0;
        // SAFETY: the handle lives in TopMemoryContext as long as this value.
        let status = unsafe { pg_sys::GetBackgroundWorkerPid(self.0, &mut pid) };
        status == pg_sys::BgwHandleStatus::BGWH_STOPPED
    }
}

/// Starts the worker of a database; None where all of max_worker_processes are taken.
pub fn start_worker(entry: &Entry) -> Option<Handle> {
    let mut worker = description("awa_queue worker", "awa_queue_worker_main", entry.position());
    // SAFETY: a complete description; the handle is allocated where it stays.
    unsafe {
        worker.bgw_notify_pid = pg_sys::MyProcPid;
        let before = pg_sys::MemoryContextSwitchTo(pg_sys::TopMemoryContext);
        let mut handle = std::ptr::null_mut();
        let started = pg_sys::RegisterDynamicBackgroundWorker(&mut worker, &mut handle);
        pg_sys::MemoryContextSwitchTo(before);
        started.then_some(Handle(handle))
    }
}

unsafe fn handle_signals() {
    #[cfg(not(feature = "pg18"))]
    use pg_sys::pqsignal as on;
    #[cfg(feature = "pg18")]
    use pg_sys::pqsignal_be as on;
    // SAFETY: PostgreSQL's own handlers; `die` ends a step at its next check for interrupts.
    unsafe {
        on(pg_sys::SIGTERM as i32, Some(raw::die));
        on(pg_sys::SIGHUP as i32, Some(raw::SignalHandlerForConfigReload));
        pg_sys::BackgroundWorkerUnblockSignals();
        // PostgreSQL ignores SIGHUP between the fork and here: a reload in between is made up for.
        (&raw mut pg_sys::ConfigReloadPending).write_volatile(1);
    }
}

thread_local! {
    static ENTERED: Cell<Option<&'static Entry>> = const { Cell::new(None) };
}

unsafe extern "C-unwind" fn leave_roster(code: i32, _arg: pg_sys::Datum) {
    match ENTERED.take() {
        Some(entry) => entry.leave(code != 0),
        None => roster::leave_launcher(),
    }
}

/// # Safety
/// Called by PostgreSQL as the main function of the launcher.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub unsafe extern "C-unwind" fn awa_queue_launcher_main(_arg: pg_sys::Datum) {
    // SAFETY: a background process of its own; connected to the shared catalogs alone, so it is in nobody's
    // way. The latch is announced as long as the process lives.
    unsafe {
        handle_signals();
        pg_sys::BackgroundWorkerInitializeConnection(std::ptr::null(), std::ptr::null(), 0);
        pg_sys::on_shmem_exit(Some(leave_roster), pg_sys::Datum::from(0usize));
    }
    roster::enter_launcher();
    crate::worker::launch();
    exit(0);
}

/// # Safety
/// Called by PostgreSQL as the main function of a worker.
#[unsafe(no_mangle)]
#[pgrx::pg_guard]
pub unsafe extern "C-unwind" fn awa_queue_worker_main(arg: pg_sys::Datum) {
    let Some(entry) = roster::at(arg.value()) else {
        exit(0)
    };
    // SAFETY: a background process of its own. It is announced before it connects, so that who wants the
    // database for himself either sees it or is seen by it.
    unsafe {
        handle_signals();
        if !entry.enter() {
            exit(0);
        }
        ENTERED.set(Some(entry));
        pg_sys::on_shmem_exit(Some(leave_roster), pg_sys::Datum::from(0usize));
        let database = entry.database();
        if entry.is_held() || database == 0 {
            exit(0);
        }
        pg_sys::BackgroundWorkerInitializeConnectionByOid(pg_sys::Oid::from(database), pg_sys::InvalidOid, 0);
    }
    roster::note_own();
    crate::worker::work(entry);
    exit(0);
}

/// Ends the process. Code 0: it has done its work, the postmaster does not start it again; 1: it does, where
/// the process was registered so.
pub fn exit(code: i32) -> ! {
    // SAFETY: PostgreSQL's way out of a process.
    unsafe { pg_sys::proc_exit(code) };
    #[allow(unreachable_code)]
    {
        unreachable!("proc_exit does not return")
    }
}

/// Does what signals asked for since the last call: ends the process, reads the configuration again, takes
/// part in what all processes are asked to (a DROP DATABASE waits for that).
pub fn heed_signals(exit_code: i32) {
    // SAFETY: plain variables of this process, set by its signal handlers; called outside transactions.
    unsafe {
        if (&raw const pg_sys::ProcDiePending).read_volatile() != 0 {
            exit(exit_code);
        }
        if (&raw const pg_sys::ConfigReloadPending).read_volatile() != 0 {
            (&raw mut pg_sys::ConfigReloadPending).write_volatile(0);
            pg_sys::ProcessConfigFile(pg_sys::GucContext::PGC_SIGHUP);
        }
        if (&raw const raw::catchupInterruptPending).read_volatile() != 0 {
            pg_sys::ProcessCatchupInterrupt();
        }
    }
    pgrx::check_for_interrupts!();
}

/// Sleeps until the latch is set or the time is over; ends the process with the postmaster.
pub fn sleep(limit: Option<Duration>) {
    let mut events = pg_sys::WL_LATCH_SET | pg_sys::WL_EXIT_ON_PM_DEATH;
    let mut ms = -1;
    if let Some(limit) = limit {
        events |= pg_sys::WL_TIMEOUT;
        // Rounded up: a step that is due in half a millisecond is not looked at before.
        ms = limit.as_micros().div_ceil(1_000).min(86_400_000) as std::ffi::c_long;
    }
    // SAFETY: the process's own latch, and plain variables that its signal handlers set before the latch.
    unsafe {
        // A wait for a lock resets the latch, too, and knows nothing of reloads.
        if (&raw const pg_sys::ConfigReloadPending).read_volatile() != 0
            || (&raw const pg_sys::ProcDiePending).read_volatile() != 0
        {
            return;
        }
        pg_sys::WaitLatch(pg_sys::MyLatch, events as i32, ms, pg_sys::PG_WAIT_EXTENSION);
        pg_sys::ResetLatch(pg_sys::MyLatch);
    }
}

/// What pg_stat_activity shows of this process.
pub fn report(doing: Option<&str>) {
    let text = doing.and_then(|d| CString::new(d).ok());
    // SAFETY: the text is copied.
    unsafe {
        match &text {
            Some(t) => pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_RUNNING, t.as_ptr()),
            None => pg_sys::pgstat_report_activity(pg_sys::BackendState::STATE_IDLE, std::ptr::null()),
        }
    }
}

/// Brings what this process did into the statistics views; nothing else does in a background process.
pub fn flush_statistics() {
    // SAFETY: called outside transactions.
    unsafe {
        pg_sys::pgstat_report_stat(true);
    }
}

/// Runs `body` and catches what it raises. The transaction is broken then and must be aborted at once, from
/// outside of any command; inside one, `subxact` is the way.
fn catch<R>(body: impl FnOnce() -> R) -> Result<R, Caught> {
    // SAFETY: a plain variable; the context is set back where an error left another.
    let context = unsafe { pg_sys::CurrentMemoryContext };
    pgrx::PgTryBuilder::new(AssertUnwindSafe(|| Ok(body())))
        .catch_others(|error| Err(Caught::of(&error)))
        .execute()
        .inspect_err(|_| {
            // SAFETY: the context was current before, so it lives as long as the caller.
            unsafe { pg_sys::MemoryContextSwitchTo(context) };
        })
}

/// Runs `body` in a transaction of its own, with a limit to its time; rolls back where it raises.
pub fn transaction<R>(limit: Duration, body: impl FnOnce() -> R) -> Result<R, Caught> {
    let result = catch(|| {
        // SAFETY: outside any transaction; the timeout's handler was installed when the process connected.
        unsafe {
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            raw::enable_timeout_after(STATEMENT_TIMEOUT, limit.as_millis() as i32);
            pg_sys::PushActiveSnapshot(pg_sys::GetTransactionSnapshot());
        }
        let result = body();
        // SAFETY: begun above.
        unsafe {
            pg_sys::PopActiveSnapshot();
            raw::disable_timeout(STATEMENT_TIMEOUT, false);
            pg_sys::CommitTransactionCommand();
        }
        result
    });
    if result.is_err() {
        clean_up();
    }
    result
}

fn clean_up() {
    // SAFETY: what PostgreSQL's own workers do after an error.
    unsafe {
        raw::disable_timeout(STATEMENT_TIMEOUT, false);
        pg_sys::QueryCancelPending = 0;
        pg_sys::InterruptHoldoffCount += 1;
        pg_sys::AbortCurrentTransaction();
        pg_sys::InterruptHoldoffCount -= 1;
    }
}

/// Runs `body`, which begins and ends transactions by itself, inside one that is only there to start from.
pub fn outside_transaction(limit: Duration, body: impl FnOnce()) -> Result<(), Caught> {
    let result = catch(|| {
        // SAFETY: outside any transaction; no snapshot is pushed, so that the body may commit.
        unsafe {
            pg_sys::SetCurrentStatementStartTimestamp();
            pg_sys::StartTransactionCommand();
            raw::enable_timeout_after(STATEMENT_TIMEOUT, limit.as_millis() as i32);
        }
        body();
        // SAFETY: begun above, or by the body.
        unsafe {
            raw::disable_timeout(STATEMENT_TIMEOUT, false);
            pg_sys::CommitTransactionCommand();
        }
    });
    if result.is_err() {
        clean_up();
    }
    result
}

/// Writes to the server log.
pub fn log(level: pgrx::PgLogLevel, message: &str, detail: Option<&str>, hint: Option<&str>) {
    let code = pgrx::PgSqlErrorCode::ERRCODE_SUCCESSFUL_COMPLETION;
    let mut report = pg_sys::panic::ErrorReport::new(code, message.to_string(), "awa_queue");
    if let Some(detail) = detail {
        report = report.set_detail(detail);
    }
    if let Some(hint) = hint {
        report = report.set_hint(hint);
    }
    report.report(level);
}

/// Sets settings of this session, or of the running transaction alone, past what role and database set.
pub fn set_settings(settings: &[(&str, &str)], for_transaction: bool) {
    let action = if for_transaction {
        pg_sys::GucAction::GUC_ACTION_LOCAL
    } else {
        pg_sys::GucAction::GUC_ACTION_SET
    };
    for (name, value) in settings {
        let (Ok(name), Ok(value)) = (CString::new(*name), CString::new(*value)) else {
            continue;
        };
        // SAFETY: NUL-terminated strings, copied. As a superuser would: the settings are ours, not the caller's.
        unsafe {
            pg_sys::set_config_option(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_SUSET,
                pg_sys::GucSource::PGC_S_SESSION,
                action,
                true,
                pg_sys::WARNING as i32,
                false,
            );
        }
    }
}
