//! What one bounded step of a duty reports. Each step runs in a transaction of its own that its caller began
//! (the worker, or CALL awa.maintain()).

/// What a step did, and when the duty has to be looked at again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// How many things it dealt with.
    pub done: i64,
    /// There is more to do at once.
    pub more: bool,
    /// When something becomes due next, microseconds since 2000; None: nothing is known to.
    pub next_due: Option<i64>,
}
