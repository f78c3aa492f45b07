//! awa_queue: a complete job queue inside PostgreSQL.
//!
//! A job's way: `api::produce` takes it, `enqueue` writes it into the current slot of the `ring` and gives
//! it a place in its `lane`; `api::work` asks for it, `claim` `walk`s the lane's unresolved `ranges` and
//! takes it; `close` ends it; `rotation` empties the slot when all its jobs have ended.

#![deny(unsafe_op_in_unsafe_fn)]

mod adopt;
mod api;
mod backoff;
mod bits;
mod body;
mod by_id;
mod cancel;
mod carry;
mod checkpoint;
mod claim;
mod close;
mod counts;
mod dead;
mod defer;
mod duty;
mod enqueue;
mod error;
mod expiry;
mod failure;
mod find;
mod grow;
mod held;
mod ids;
mod inspect;
mod lane;
mod late;
mod lease;
mod live;
mod locate;
mod logs;
mod notify;
mod options;
mod pg;
mod policy;
mod promote;
mod queue;
mod ranges;
mod receipt;
mod release;
mod rescue;
mod resting;
mod retry;
mod ring;
mod rotation;
mod runs;
mod session;
mod settings;
mod statement;
mod statistics;
mod stats;
mod sums;
mod take;
mod upkeep;
mod wait;
mod walk;
mod worker;

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
        // pg_upgrade's server must not be written to.
        if !pg::bgworker::is_binary_upgrade() {
            pg::roster::install();
            pg::databases::install();
            pg::bgworker::register_launcher();
        }
        pg::waiters::install(settings::max_waiters());
    }
}
