//! Verbs of the contract that this release does not have yet. Their signatures are whole from the start,
//! because neither a parameter nor a result column can be added later without dropping the function.

use crate::error::{Error, Result};
use crate::pg::fmgr::{sql_function, Call, Output};

macro_rules! not_built {
    ($($body:ident, $name:literal;)*) => {$(
        fn $body(_: &Call) -> Result<Output> {
            Err(Error::NotBuilt($name.to_string()))
        }
    )*};
}

not_built! {
    cancel_by_key, "awa.cancel_by_key()";
    park, "awa.park()";
    resume_parked, "awa.resume_parked()";
    fail_parked, "awa.fail_parked()";
    wait_for, "awa.wait_for()";
    drop_queue, "awa.drop_queue()";
    redrive, "awa.redrive()";
    purge, "awa.purge()";
    cancel_where, "awa.cancel_where()";
    retry_where, "awa.retry_where()";
    move_jobs, "awa.move()";
    set_priority, "awa.set_priority()";
    schedule, "awa.schedule()";
    unschedule, "awa.unschedule()";
    grant_queue, "awa.grant_queue()";
    revoke_queue, "awa.revoke_queue()";
    why, "awa.why()";
    doctor, "awa.doctor()";
    health, "awa.health()";
}

sql_function! {
    awa_cancel_by_key, pg_finfo_awa_cancel_by_key => cancel_by_key;
    awa_park, pg_finfo_awa_park => park;
    awa_resume_parked, pg_finfo_awa_resume_parked => resume_parked;
    awa_fail_parked, pg_finfo_awa_fail_parked => fail_parked;
    awa_wait_for, pg_finfo_awa_wait_for => wait_for;
    awa_drop_queue, pg_finfo_awa_drop_queue => drop_queue;
    awa_redrive, pg_finfo_awa_redrive => redrive;
    awa_purge, pg_finfo_awa_purge => purge;
    awa_cancel_where, pg_finfo_awa_cancel_where => cancel_where;
    awa_retry_where, pg_finfo_awa_retry_where => retry_where;
    awa_move, pg_finfo_awa_move => move_jobs;
    awa_set_priority, pg_finfo_awa_set_priority => set_priority;
    awa_schedule, pg_finfo_awa_schedule => schedule;
    awa_unschedule, pg_finfo_awa_unschedule => unschedule;
    awa_grant_queue, pg_finfo_awa_grant_queue => grant_queue;
    awa_revoke_queue, pg_finfo_awa_revoke_queue => revoke_queue;
    awa_why, pg_finfo_awa_why => why;
    awa_doctor, pg_finfo_awa_doctor => doctor;
    awa_health, pg_finfo_awa_health => health;
}
