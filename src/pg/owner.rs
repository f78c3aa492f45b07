//! Statements on the mutable tables, run as the extension's owner: a caller needs EXECUTE on a verb and
//! no right on any table.

use super::table::Oid;
use pgrx::pg_sys;

/// Runs `body` as the owner of relation `rel`, with a search_path that only the catalog is on. Where the
/// body raises, transaction or savepoint abort restores user and settings.
pub fn as_owner_of<R>(rel: Oid, body: impl FnOnce() -> R) -> R {
    let mut user = pg_sys::InvalidOid;
    let mut context = 0i32;
    // SAFETY: the user is set back below; the settings made at this nest level are undone there too.
    let level = unsafe {
        pg_sys::GetUserIdAndSecContext(&mut user, &mut context);
        pg_sys::SetUserIdAndSecContext(
            owner(rel),
            context
                | pg_sys::SECURITY_LOCAL_USERID_CHANGE as i32
                | pg_sys::SECURITY_RESTRICTED_OPERATION as i32,
        );
        nest_settings(&[
            (c"search_path", c"pg_catalog, pg_temp"),
            (c"row_security", c"off"),
        ])
    };
    let result = body();
    // SAFETY: level and user are those saved above.
    unsafe {
        pg_sys::AtEOXact_GUC(false, level);
        pg_sys::SetUserIdAndSecContext(user, context);
    }
    result
}

/// Runs `body` with plans that go by an index whatever the statistics say.
pub fn with_plain_plans<R>(body: impl FnOnce() -> R) -> R {
    let level = nest_settings(&[
        (c"enable_seqscan", c"off"),
        (c"enable_bitmapscan", c"off"),
        (c"jit", c"off"),
    ]);
    let result = body();
    // SAFETY: level is the one made above.
    unsafe { pg_sys::AtEOXact_GUC(false, level) };
    result
}

/// Makes settings at a nest level of their own, which is returned: its caller undoes them by AtEOXact_GUC, or
/// (sub)transaction abort does.
fn nest_settings(settings: &[(&std::ffi::CStr, &std::ffi::CStr)]) -> i32 {
    // SAFETY: names and values end with NUL and are copied.
    unsafe {
        let level = pg_sys::NewGUCNestLevel();
        for (name, value) in settings {
            pg_sys::set_config_option(
                name.as_ptr(),
                value.as_ptr(),
                pg_sys::GucContext::PGC_USERSET,
                pg_sys::GucSource::PGC_S_SESSION,
                pg_sys::GucAction::GUC_ACTION_SAVE,
                true,
                0,
                false,
            );
        }
        level
    }
}

fn owner(rel: Oid) -> Oid {
    // SAFETY: the tuple is released after its owner is read; a missing relation raises.
    unsafe {
        let tuple = pg_sys::SearchSysCache1(
            pg_sys::SysCacheIdentifier::RELOID as i32,
            pg_sys::Datum::from(rel),
        );
        if tuple.is_null() {
            pgrx::error!("relation {} of awa_queue has gone", rel.to_u32());
        }
        let form = pg_sys::GETSTRUCT(tuple).cast::<pg_sys::FormData_pg_class>();
        let owner = (*form).relowner;
        pg_sys::ReleaseSysCache(tuple);
        owner
    }
}

/// Sets a sequence so that `value` is the last that was given out; always logged.
pub fn set_sequence(sequence: Oid, value: i64) {
    // SAFETY: setval_oid takes (regclass, bigint); the caller runs as the sequence's owner.
    unsafe {
        pg_sys::OidFunctionCall2Coll(
            pg_sys::F_SETVAL_REGCLASS_INT8.into(),
            pg_sys::InvalidOid,
            pg_sys::Datum::from(sequence),
            pg_sys::Datum::from(value),
        );
    }
}
