//! From where an index in order of time is read, again and again, for what has become due.
//!
//! What was taken out leaves dead entries behind, and as long as any session holds an old snapshot nobody may
//! remove them: a day of that, and reading from the beginning takes seconds. So a reading goes on where the
//! last one ended. But rows can commit behind that place: a producer that stays open longer than its job is
//! put off, a row that somebody had locked. For those, wider looks come after it, each as a step of its own
//! and the more seldom the more it costs:
//!
//! - *behind*: from when the oldest transaction began that was writing at the last wider look. Nobody puts a
//!   job off to a time that is already over, so what commits late was due after its transaction began.
//! - *whole*: from the beginning. It finds the rest: rows of prepared transactions, and what a clock that was
//!   set made older than it is.

use crate::error::Result;
use crate::pg::time::{self, SECOND};
use crate::pg::xact;
use crate::ring::Tables;
use crate::statement;
use std::cell::Cell;
use std::time::Instant;

/// The shortest time between two wider looks, microseconds.
const SHORTEST: i64 = 2 * SECOND;
/// A wider look may take one part in so many of the time.
const SHARE: i64 = 200;
/// What a wider look that did not come back is taken to cost, microseconds: twice as much each time.
const LEAST_FAILED: i64 = SECOND / 10;
const MOST_FAILED: i64 = 30 * SECOND;
const LONG_AGO: i64 = statement::BEGIN_OF_TIME;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Width {
    Narrow,
    Behind,
    Whole,
}

/// When a wider look was and is to be.
#[derive(Clone, Copy)]
struct Wide {
    at: i64,
    cost: i64,
}

impl Wide {
    const NEVER: Wide = Wide {
        at: LONG_AGO,
        cost: 0,
    };

    fn next(self) -> i64 {
        self.at.saturating_add((self.cost * SHARE).max(SHORTEST))
    }

    /// Begun, and to be tried again later should it fail.
    fn begun(self, now: i64) -> Wide {
        Wide {
            at: now,
            cost: (self.cost * 2).clamp(LEAST_FAILED, MOST_FAILED),
        }
    }

    /// Also where the clock went back.
    fn is_due(self, now: i64) -> bool {
        now >= self.next() || now < self.at
    }
}

#[derive(Clone, Copy)]
struct State {
    /// All that had committed and was due before is taken.
    through: i64,
    /// The same, once this transaction has committed.
    proposed: Option<(u64, i64)>,
    /// What may have been on its way at the last wider look is due after this.
    behind_from: i64,
    /// The narrow look before a wider one is done.
    narrow_done: bool,
    behind: Wide,
    whole: Wide,
}

impl State {
    const NEW: State = State {
        through: LONG_AGO,
        proposed: None,
        behind_from: LONG_AGO,
        narrow_done: false,
        behind: Wide::NEVER,
        whole: Wide::NEVER,
    };

    fn width(&self, now: i64) -> Width {
        if self.through == LONG_AGO {
            Width::Whole
        } else if !self.narrow_done {
            Width::Narrow
        } else if self.whole.is_due(now) {
            Width::Whole
        } else if self.behind.is_due(now) {
            Width::Behind
        } else {
            Width::Narrow
        }
    }
}

/// Where the readings of one table have got to, in this session.
pub struct Reading(Cell<State>);

/// One reading.
pub struct Look {
    /// What is due at this time or later is to be read.
    pub from: i64,
    now: i64,
    width: Width,
    /// What was being written when it began.
    writers: Writers,
    began: Instant,
}

impl Reading {
    pub const fn new() -> Reading {
        Reading(Cell::new(State::NEW))
    }

    /// All is looked at again next time.
    pub fn forget(&self) {
        self.0.set(State::NEW);
    }

    /// Begins a reading of what is due at `now`.
    pub fn begin(&self, tables: &Tables, now: i64) -> Result<Look> {
        let mut state = self.0.get();
        if let Some((xid, through)) = state.proposed.take() {
            // What a transaction took that was rolled back is not taken.
            if xact::has_committed(xid, xact::next_xid()) {
                state.through = through;
            }
        }
        let width = state.width(now);
        let from = match width {
            Width::Narrow => state.through,
            Width::Behind => state.behind_from.min(state.through),
            Width::Whole => LONG_AGO,
        };
        let mut writers = Writers::default();
        if width != Width::Narrow {
            state.narrow_done = false;
            state.behind = state.behind.begun(now);
            if width == Width::Whole {
                state.whole = state.whole.begun(now);
            }
            // Before the reading takes its snapshot: who commits in between is seen by it.
            writers = Writers::now(tables)?;
        }
        self.0.set(state);
        Ok(Look {
            from,
            now,
            width,
            writers,
            began: Instant::now(),
        })
    }

    /// Ends a reading; `whole` where it took all it found but for what somebody has in hand, and then `left` is
    /// when the first of what there still is was or is due. Returns whether another reading is to follow at
    /// once, and when the next one is due.
    pub fn end(&self, look: &Look, whole: bool, left: Option<i64>) -> (bool, Option<i64>) {
        let mut state = self.0.get();
        if !whole {
            if look.width != Width::Narrow {
                // Goes on, after what has become due meanwhile.
                state.behind = Wide::NEVER;
                if look.width == Width::Whole {
                    state.whole = Wide::NEVER;
                }
                state.narrow_done = true;
                self.0.set(state);
            }
            return (true, None);
        }
        let now = look.now;
        // The clock of a test may be ahead in one session only.
        let through = now.min(time::server_now());
        if xact::has_written() {
            state.proposed = Some((xact::full_xid(), through));
        } else {
            state.through = through;
        }
        let in_hand = left.filter(|at| *at <= now);
        let cost = i64::try_from(look.began.elapsed().as_micros()).unwrap_or(MOST_FAILED);
        let done = Wide { at: now, cost };
        if look.width != Width::Narrow {
            state.behind = done;
            state.behind_from = look.writers.since.min(through);
        }
        if look.width == Width::Whole {
            state.whole = done;
        }
        if let Some(at) = in_hand {
            state.behind_from = state.behind_from.min(at);
        }
        let wide = state.behind.next().min(state.whole.next());
        state.narrow_done = look.width == Width::Narrow && wide <= now;
        self.0.set(state);
        // After a wider look nothing can commit late without activity, and that asks for a narrow one. But of
        // COMMIT PREPARED, and of who lets go of what was in hand, nobody hears.
        let silent = in_hand.is_some() || look.writers.prepared;
        let wider = (look.width == Width::Narrow || silent).then_some(wide);
        let ahead = left.filter(|at| *at > now);
        (state.narrow_done, ahead.into_iter().chain(wider).min())
    }
}

/// Transactions that have written something, other than the own one.
#[derive(Clone, Copy)]
struct Writers {
    /// When the oldest of them began; the beginning of time where that can't be known.
    since: i64,
    /// Some are prepared.
    prepared: bool,
}

impl Default for Writers {
    fn default() -> Writers {
        Writers {
            since: LONG_AGO,
            prepared: false,
        }
    }
}

impl Writers {
    fn now(tables: &Tables) -> Result<Writers> {
        let found = statement::rows(
            tables,
            "SELECT pg_catalog.min(xact_start), pg_catalog.bool_or(xact_start IS NULL),
                    EXISTS (SELECT FROM pg_catalog.pg_prepared_xacts WHERE database = pg_catalog.current_database())
             FROM pg_catalog.pg_stat_get_activity(NULL)
             WHERE backend_xid IS NOT NULL AND pid <> pg_catalog.pg_backend_pid()
               AND datid = (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())",
            |row| {
                let prepared = row.get::<bool>(3)? == Some(true);
                let unknown = prepared || row.get::<bool>(2)? == Some(true);
                let since = statement::micros(row, 1)?.unwrap_or(i64::MAX);
                Ok(Writers {
                    since: if unknown { LONG_AGO } else { since },
                    prepared,
                })
            },
        )?;
        Ok(found.into_iter().next().unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::{State, Wide, Width, LEAST_FAILED, LONG_AGO, MOST_FAILED, SHARE, SHORTEST};
    use crate::pg::time::SECOND;

    const NOW: i64 = 1_000 * SECOND;

    fn read_before() -> State {
        let done = Wide { at: NOW, cost: 100 };
        State {
            through: NOW,
            behind: done,
            whole: done,
            ..State::NEW
        }
    }

    #[test]
    fn the_first_look_is_whole() {
        assert_eq!(State::NEW.width(NOW), Width::Whole);
    }

    #[test]
    fn a_narrow_look_comes_before_a_wider_one() {
        let mut state = read_before();
        let later = NOW + SHORTEST;
        assert_eq!(state.width(later), Width::Narrow);
        state.narrow_done = true;
        assert_eq!(state.width(later), Width::Whole);
        assert_eq!(state.width(later - 1), Width::Narrow);
        state.whole.cost = SECOND;
        assert_eq!(state.width(later), Width::Behind);
    }

    #[test]
    fn a_dear_look_is_seldom() {
        let look = Wide {
            at: NOW,
            cost: 5 * SECOND,
        };
        assert!(!look.is_due(NOW + 5 * SECOND * SHARE - 1));
        assert!(look.is_due(NOW + 5 * SECOND * SHARE));
    }

    #[test]
    fn after_the_clock_went_back_all_is_looked_at() {
        assert!(Wide { at: NOW, cost: 0 }.is_due(NOW - 1));
    }

    #[test]
    fn a_look_that_fails_is_tried_more_and_more_seldom() {
        let mut look = Wide::NEVER;
        assert!(look.is_due(LONG_AGO + SHORTEST));
        look = look.begun(NOW);
        assert_eq!(look.next(), NOW + LEAST_FAILED * SHARE);
        for _ in 0..20 {
            look = look.begun(NOW);
        }
        assert_eq!(look.next(), NOW + MOST_FAILED * SHARE);
    }
}
