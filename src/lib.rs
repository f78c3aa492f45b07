//! awa_queue: a complete job queue inside PostgreSQL.
//!
//! A job's way: `api::produce` takes it, `enqueue` writes it into the current slot of the `ring` and gives
//! it a place in its `lane`; `api::work` asks for it, `claim` `walk`s the lane's unresolved `ranges` and
//! takes it; `close` ends it; `rotation` empties the slot when all its jobs have ended.

#![deny(unsafe_op_in_unsafe_fn)]

mod api;
mod bits;
mod body;
mod claim;
mod close;
mod counts;
mod duty;
mod enqueue;
mod error;
mod ids;
mod inspect;
mod lane;
mod live;
mod locate;
mod logs;
mod notify;
mod options;
mod pg;
mod queue;
mod ranges;
mod receipt;
mod release;
mod ring;
mod rotation;
mod runs;
mod session;
mod settings;
mod statement;
mod stats;
mod upkeep;
mod wait;
mod walk;

pgrx::pg_module_magic!(name, version);

/// Called by PostgreSQL when the library is loaded, by the postmaster or by a session.
#[allow(non_snake_case)] // the name is PostgreSQL's
#[pgrx::pg_guard]
pub extern "C-unwind" fn _PG_init() {
    let preloading = pg::preloading();
    settings::register(preloading);
    pg::xact::install();
    if preloading {
        pg::shmem::install(settings::shared_lanes());
        pg::waiters::install(settings::max_waiters());
    }
}
