//! Operators: queues and their settings, pausing, maintenance and its single steps.

use crate::adopt;
use crate::error::{Error, Result};
use crate::options;
use crate::pg::command;
use crate::pg::datum::{self, Value};
use crate::pg::fmgr::{sql_function, Call, Output};
use crate::pg::owner;
use crate::pg::waiters;
use crate::pg::xact;
use crate::queue::{self, Queue, Settings};
use crate::receipt::MAX_SLOTS;
use crate::ring::{self, View};
use crate::rotation::{self, Step};
use crate::upkeep;
use pgrx::datum::DatumWithOid;
use pgrx::Spi;

sql_function! {
    awa_create_queue, pg_finfo_awa_create_queue => create_queue;
    awa_alter_queue, pg_finfo_awa_alter_queue => alter_queue;
    awa_pause_queue, pg_finfo_awa_pause_queue => pause_queue;
    awa_resume_queue, pg_finfo_awa_resume_queue => resume_queue;
    awa_maintain, pg_finfo_awa_maintain => maintain;
    awa_seal, pg_finfo_awa_seal => seal;
    awa_close, pg_finfo_awa_close => close;
    awa_empty, pg_finfo_awa_empty => empty;
    awa_adopt, pg_finfo_awa_adopt => adopt;
    awa_ring_changed, pg_finfo_awa_ring_changed => ring_changed;
}

fn json_argument(call: &Call, argument: usize) -> Result<Option<serde_json::Value>> {
    call.varlena(argument)
        .map(|j| {
            serde_json::from_str(&datum::jsonb_to_text(j)).map_err(|e| {
                Error::bad_value(
                    format!("settings can not be read: {e}"),
                    "Pass an object such as '{\"shards\": 4}'.",
                )
            })
        })
        .transpose()
}

fn create_queue(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.create_queue()")?;
    options::refuse_unknown(call, 2)?;
    let name = call.text(0).ok_or(Error::Null("queue"))?;
    queue::check_name(&name, "queue")?;
    let settings = match json_argument(call, 1)? {
        None => Settings::default(),
        Some(change) => Settings::merge(&Settings::default(), &change)?,
    };
    queue::check_intervals(&settings)?;
    let view = ring::view_for_write()?;
    if queue::find(&view, &name)?.is_some() {
        return Ok(false.into());
    }
    Ok(queue::create(&view, &name, &settings, false)?.into())
}

fn existing(view: &View, name: &str) -> Result<(Queue, Settings)> {
    queue::find_with_settings(view, name)?.ok_or_else(|| Error::NoSuchQueue(name.to_string()))
}

/// Changes a queue's row as the owner of the table and tells all sessions.
fn update(view: &View, sql: &str, args: &[DatumWithOid]) -> Result<()> {
    xact::forget_queues_on_abort();
    owner::as_owner_of(view.tables.queues, || Spi::run_with_args(sql, args))
        .map_err(|e| Error::Internal(format!("changing a queue: {e}")))?;
    xact::invalidate_queues(view.tables.queues);
    xact::set_queues_valid(false);
    Ok(())
}

fn alter_queue(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.alter_queue()")?;
    options::refuse_unknown(call, 2)?;
    let name = call.text(0).ok_or(Error::Null("queue"))?;
    let change = json_argument(call, 1)?.ok_or(Error::Null("settings"))?;
    let view = ring::view_for_write()?;
    // Locked first, so that two changes at once do not undo each other.
    let (queue, _) = existing(&view, &name)?;
    lock_row(&view, queue.id)?;
    let (_, before) = existing(&view, &name)?;
    let after = Settings::merge(&before, &change)?;
    queue::check_intervals(&after)?;
    if after.shards.unwrap_or(1) < before.shards.unwrap_or(1) {
        return Err(Error::bad_value(
            "shards can only grow",
            "Jobs in the shards that would go could not be claimed; create another queue with fewer shards.",
        ));
    }
    let stored = serde_json::to_string(&after).map_err(|e| Error::Internal(e.to_string()))?;
    update(
        &view,
        "UPDATE awa_internal.queues SET settings = $2::pg_catalog.jsonb WHERE queue_id = $1",
        &[queue.id.into(), stored.as_str().into()],
    )?;
    let effective = queue::effective(&after).to_string();
    Ok(Output::Value(Value::Var(datum::jsonb_from_text(&effective))))
}

fn lock_row(view: &View, queue_id: i32) -> Result<()> {
    owner::as_owner_of(view.tables.queues, || {
        Spi::run_with_args(
            "SELECT 1 FROM awa_internal.queues WHERE queue_id = $1 FOR UPDATE",
            &[queue_id.into()],
        )
    })
    .map_err(|e| Error::Internal(format!("locking a queue: {e}")))
}

fn pause_queue(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.pause_queue()")?;
    options::refuse_unknown(call, 3)?;
    if !call.is_null(2) {
        return Err(Error::NotBuilt("pausing a single kind".to_string()));
    }
    let name = call.text(0).ok_or(Error::Null("queue"))?;
    let reason = call.text(1);
    let by = command::current_user();
    set_paused(&name, true, &by, reason.as_deref())
}

fn resume_queue(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.resume_queue()")?;
    options::refuse_unknown(call, 2)?;
    if !call.is_null(1) {
        return Err(Error::NotBuilt("resuming a single kind".to_string()));
    }
    let name = call.text(0).ok_or(Error::Null("queue"))?;
    set_paused(&name, false, "", None)
}

fn set_paused(name: &str, paused: bool, by: &str, reason: Option<&str>) -> Result<Output> {
    let view = ring::view_for_write()?;
    let (queue, _) = existing(&view, name)?;
    lock_row(&view, queue.id)?;
    let (queue, _) = existing(&view, name)?;
    if queue.paused == paused {
        return Ok(false.into());
    }
    update(
        &view,
        "UPDATE awa_internal.queues
         SET paused_at = CASE WHEN $2 THEN pg_catalog.clock_timestamp() END,
             paused_by = CASE WHEN $2 THEN $3 END,
             pause_reason = CASE WHEN $2 THEN $4 END
         WHERE queue_id = $1",
        &[queue.id.into(), paused.into(), by.into(), reason.into()],
    )?;
    if !paused {
        waiters::note_changed(queue.id);
    }
    Ok(true.into())
}

fn maintain(call: &Call) -> Result<Output> {
    // Its own transactions are read-write whatever the role's or database's default is.
    command::refuse_standby("awa.maintain()")?;
    options::refuse_unknown(call, 0)?;
    if !call.is_nonatomic_call() {
        return Err(Error::InTransactionBlock("CALL awa.maintain()".to_string()));
    }
    command::with_transaction_control(upkeep::run_all)?;
    Ok(Output::Value(Value::Null))
}

fn seal(_: &Call) -> Result<Output> {
    said(&rotation::seal()?)
}

fn slot_argument(call: &Call) -> Result<u8> {
    let slot = call.i32(0).ok_or(Error::Null("slot"))?;
    u8::try_from(slot).ok().filter(|s| *s < MAX_SLOTS).ok_or_else(|| {
        Error::bad_value(
            format!("slot must be between 0 and 63, not {slot}"),
            "See awa.ring_status.",
        )
    })
}

fn close(call: &Call) -> Result<Output> {
    said(&rotation::close(slot_argument(call)?)?)
}

fn empty(call: &Call) -> Result<Output> {
    said(&rotation::empty(
        slot_argument(call)?,
        call.bool(1).unwrap_or(false),
    )?)
}

fn adopt(_: &Call) -> Result<Output> {
    Ok(adopt::adopt()?.into())
}

/// Statement trigger: somebody else than our steps wrote the ring (a restore, say), so all sessions have to
/// read it again.
fn ring_changed(_: &Call) -> Result<Output> {
    if !adopt::is_quiet() {
        ring::announce_change()?;
    }
    Ok(Output::Done)
}

fn said(step: &Step) -> Result<Output> {
    Ok(step.to_string().as_str().into())
}
