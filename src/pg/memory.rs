//! A scratch memory context: what a long call allocates in PostgreSQL per step is given back per step.

use pgrx::pg_sys;

/// Owns a child of the current memory context.
pub struct Scratch {
    context: pg_sys::MemoryContext,
}

impl Scratch {
    pub fn new() -> Scratch {
        // SAFETY: CurrentMemoryContext is a live context; the name is a static C string.
        let context = unsafe {
            pg_sys::AllocSetContextCreateInternal(
                pg_sys::CurrentMemoryContext,
                c"awa_queue scratch".as_ptr(),
                pg_sys::ALLOCSET_DEFAULT_MINSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_INITSIZE as usize,
                pg_sys::ALLOCSET_DEFAULT_MAXSIZE as usize,
            )
        };
        Scratch { context }
    }

    /// Runs `step` with the scratch context as the current one and frees what it allocated there. What the
    /// step returns must not point into PostgreSQL's memory.
    pub fn run<R>(&mut self, step: impl FnOnce() -> R) -> R {
        // SAFETY: both contexts are live. Where the step raises, transaction abort resets the current context.
        let outer = unsafe { pg_sys::MemoryContextSwitchTo(self.context) };
        let result = step();
        // SAFETY: as above.
        unsafe {
            pg_sys::MemoryContextSwitchTo(outer);
            pg_sys::MemoryContextReset(self.context);
        }
        result
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if super::unwinding() {
            return; // its parent goes with the failed statement
        }
        // SAFETY: created in `new`, deleted only here, and not current any more.
        unsafe { pg_sys::MemoryContextDelete(self.context) }
    }
}
