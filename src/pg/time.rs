//! Time as PostgreSQL counts it: microseconds since 2000-01-01 UTC.

use crate::error::Error;
use pgrx::pg_sys;

pub const SECOND: i64 = 1_000_000;

/// The clock now, not the start of the transaction. Test builds can set it ahead (awa_queue.clock_offset).
pub fn now() -> i64 {
    // SAFETY: reads the clock, nothing else.
    let clock = unsafe { pg_sys::GetCurrentTimestamp() };
    #[cfg(feature = "injection")]
    let clock = clock + crate::settings::injection::clock_offset();
    clock
}

/// The server's clock, also where a test has set the queue's ahead.
pub fn server_now() -> i64 {
    // SAFETY: reads the clock, nothing else.
    unsafe { pg_sys::GetCurrentTimestamp() }
}

/// An interval argument or setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Interval {
    pub months: i32,
    pub days: i32,
    pub micros: i64,
}

impl Interval {
    pub const fn seconds(s: i64) -> Interval {
        Interval {
            months: 0,
            days: 0,
            micros: s * SECOND,
        }
    }

    /// Length in microseconds, a month counted as 30 days: for comparing policies, not for calendars.
    pub fn approx_micros(self) -> i64 {
        let days = i64::from(self.months) * 30 + i64::from(self.days);
        days.saturating_mul(86_400 * SECOND).saturating_add(self.micros)
    }

    /// `at` plus this interval, by PostgreSQL's own calendar arithmetic in the session's time zone.
    pub fn after(self, at: i64) -> i64 {
        if self.months == 0 && self.days == 0 {
            return at.saturating_add(self.micros);
        }
        let mut raw = pg_sys::Interval {
            time: self.micros,
            day: self.days,
            month: self.months,
        };
        // SAFETY: timestamptz_pl_interval takes (timestamptz, interval); raw lives through the call.
        unsafe {
            let d = pg_sys::OidFunctionCall2Coll(
                pg_sys::F_TIMESTAMPTZ_PL_INTERVAL.into(),
                pg_sys::InvalidOid,
                pg_sys::Datum::from(at),
                pg_sys::Datum::from(&raw mut raw),
            );
            d.value() as i64
        }
    }
}

/// Runs one of the server's input functions and turns its complaint into ours, which names what was read.
fn input<R>(what: &str, text: &str, read: impl FnOnce() -> R) -> R {
    let complaint = Error::bad_value(
        format!("{what} \"{text}\" can not be read"),
        "Write an interval as '5 min' or '1 d 2 h', a time as '2026-01-31 12:00:00+00'.",
    );
    pgrx::PgTryBuilder::new(std::panic::AssertUnwindSafe(read))
        .catch_others(move |_| {
            complaint.raise();
            unreachable!("raise never returns")
        })
        .execute()
}

/// Parses an interval as `interval_in` does; raises 22023 where the text is none.
pub fn parse_interval(s: &str) -> Interval {
    input("interval", s, || interval_in(s))
}

fn interval_in(s: &str) -> Interval {
    let c = std::ffi::CString::new(s).unwrap_or_default();
    // SAFETY: interval_in takes (cstring, oid, int4) and returns a palloc'd Interval.
    unsafe {
        let d = pg_sys::OidFunctionCall3Coll(
            pg_sys::F_INTERVAL_IN.into(),
            pg_sys::InvalidOid,
            pg_sys::Datum::from(c.as_ptr()),
            pg_sys::Datum::from(pg_sys::InvalidOid),
            pg_sys::Datum::from(-1i32),
        );
        read_interval(d)
    }
}

/// # Safety
/// `d` is a non-null datum of type interval.
pub(super) unsafe fn read_interval(d: pg_sys::Datum) -> Interval {
    // SAFETY: promised by the caller.
    let raw = unsafe { &*d.cast_mut_ptr::<pg_sys::Interval>() };
    Interval {
        months: raw.month,
        days: raw.day,
        micros: raw.time,
    }
}

/// Parses a timestamp as `timestamptz_in` does; raises 22023 where the text is none.
pub fn parse_timestamp(s: &str) -> i64 {
    input("time", s, || timestamptz_in(s))
}

fn timestamptz_in(s: &str) -> i64 {
    let c = std::ffi::CString::new(s).unwrap_or_default();
    // SAFETY: timestamptz_in takes (cstring, oid, int4).
    unsafe {
        let d = pg_sys::OidFunctionCall3Coll(
            pg_sys::F_TIMESTAMPTZ_IN.into(),
            pg_sys::InvalidOid,
            pg_sys::Datum::from(c.as_ptr()),
            pg_sys::Datum::from(pg_sys::InvalidOid),
            pg_sys::Datum::from(-1i32),
        );
        d.value() as i64
    }
}

/// A timestamp as JSON has it: ISO 8601, whatever the session's DateStyle.
pub fn to_iso(at: i64) -> String {
    let mut buffer = [0 as std::ffi::c_char; pg_sys::MAXDATELEN as usize + 1];
    // SAFETY: the buffer has the length that JsonEncodeDateTime asks for and is NUL-terminated by it.
    unsafe {
        pg_sys::JsonEncodeDateTime(
            buffer.as_mut_ptr(),
            pg_sys::Datum::from(at),
            pg_sys::TIMESTAMPTZOID,
            std::ptr::null(),
        );
        std::ffi::CStr::from_ptr(buffer.as_ptr())
            .to_string_lossy()
            .into_owned()
    }
}
