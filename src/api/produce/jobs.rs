//! enqueue_jobs: jobs of different queues in one call, given as JSON objects.
//!
//! The objects are read by PostgreSQL's own jsonb functions, so that args and metadata stay the values they
//! are: a detour through another JSON library would change numbers.

use super::{
    check_args, check_attempts, check_count, check_priority, check_tags, entry_of, fold_by_lane, lane_of,
    schedule, Common,
};
use crate::enqueue::Entry;
use crate::error::{Error, Result};
use crate::expiry;
use crate::lane::LaneId;
use crate::options;
use crate::pg::command;
use crate::pg::datum::{self, Varlena};
use crate::pg::fmgr::{Call, Output};
use crate::pg::json::{self, Field};
use crate::pg::time;
use crate::queue::{self, Queue};
use crate::ring::{self, View};
use std::rc::Rc;

const KEYS: &[&str] = &[
    "queue",
    "args",
    "kind",
    "priority",
    "run_at",
    "max_attempts",
    "ordering_key",
    "unique_key",
    "unique_by",
    "unique_until",
    "unique_for",
    "on_duplicate",
    "tags",
    "metadata",
    "run_in",
    "lease",
    "expires_in",
    "after",
    "on_parent_failure",
];

const UNBUILT: &[&str] = &[
    "unique_key",
    "unique_by",
    "unique_until",
    "unique_for",
    "on_duplicate",
    "lease",
    "after",
    "on_parent_failure",
];

pub fn enqueue_jobs(call: &Call) -> Result<Output> {
    command::refuse_read_only("awa.enqueue_jobs()")?;
    options::refuse_unknown(call, 1)?;
    let mut out = call.result_set();
    let Some(jobs) = call.varlena(0) else {
        return Ok(Output::Rows);
    };
    let Some(objects) = json::array_elements(jobs) else {
        return Err(Error::bad_value(
            "jobs must be a JSON array of objects",
            "Pass '[{\"queue\": \"mail\", \"args\": {...}}, ...]'.",
        ));
    };
    check_count(objects.len())?;
    let view = ring::view_for_write()?;
    let entries = objects
        .into_iter()
        .enumerate()
        .map(|(i, object)| read_job(&view, i + 1, object))
        .collect::<Result<Vec<_>>>()?;
    let mut ready = Vec::new();
    let mut scheduled = Vec::new();
    let mut is_ready = Vec::with_capacity(entries.len());
    let mut expiries = Vec::new();
    for (lane, entry, due, expires_at) in entries {
        expiries.push(expires_at);
        is_ready.push(due.is_none());
        match due {
            None => ready.push((lane, entry)),
            Some(due) => scheduled.push((lane, entry, due)),
        }
    }
    let mut ready = fold_by_lane(ready)?.into_iter();
    let mut scheduled = schedule(&view, scheduled)?.into_iter();
    let mut expiring = Vec::new();
    for (i, is_ready) in is_ready.into_iter().enumerate() {
        let (id, status) = if is_ready {
            (ready.next(), "ready")
        } else {
            (scheduled.next(), "scheduled")
        };
        out.push(&[(i as i32 + 1).into(), id.into(), status.into()]);
        expiring.extend(id.zip(expiries[i]));
    }
    expiry::note(&expiring)?;
    Ok(Output::Rows)
}

fn read_job(
    view: &View,
    position: usize,
    object: Varlena,
) -> Result<(LaneId, Entry, Option<i64>, Option<i64>)> {
    let Some(fields) = json::object_fields(object) else {
        return Err(Error::bad_value(
            format!("element {position} of jobs is no JSON object"),
            "Each job is an object whose keys are the parameters of awa.enqueue().",
        ));
    };
    for field in &fields {
        if !KEYS.contains(&field.key.as_str()) {
            return Err(Error::UnknownKey {
                argument: "jobs",
                key: field.key.clone(),
                known: KEYS,
            });
        }
        if UNBUILT.contains(&field.key.as_str()) && !field.is_null() {
            return Err(Error::NotBuilt(field.key.clone()));
        }
    }
    let job = Fields { fields, position };
    let due = job.due()?;
    let name = job.text("queue")?.ok_or(Error::Null("queue"))?;
    let queue = queue::find_or_create(view, &name)?;
    // A JSON null as args is a payload like another.
    let args = job
        .get("args")
        .map_or_else(|| datum::jsonb_from_text("{}"), |f| f.value);
    check_args(&queue, args)?;
    let key = job.text("ordering_key")?.map(|k| datum::text(&k));
    let mut common = job.common(&queue)?;
    let expires_in = job.text("expires_in")?;
    common.expires_at = super::expires_at(expires_in.as_deref().map(time::parse_interval), due)?;
    Ok((
        lane_of(&queue, common.priority, key),
        entry_of(view, &common, args, key),
        due,
        common.expires_at,
    ))
}

/// The fields of one job.
struct Fields {
    fields: Vec<Field>,
    position: usize,
}

impl Fields {
    fn get(&self, key: &str) -> Option<&Field> {
        self.fields.iter().find(|f| f.key == key)
    }

    fn given(&self, key: &str) -> Option<&Field> {
        self.get(key).filter(|f| !f.is_null())
    }

    fn bad(&self, key: &str, expected: &str) -> Error {
        Error::bad_value(
            format!(
                "\"{key}\" of element {} of jobs must be {expected}",
                self.position
            ),
            "The types are those of the parameters of awa.enqueue().",
        )
    }

    fn text(&self, key: &str) -> Result<Option<String>> {
        self.given(key)
            .map(|f| f.string().ok_or_else(|| self.bad(key, "a string")))
            .transpose()
    }

    fn integer(&self, key: &str) -> Result<Option<i64>> {
        self.given(key)
            .map(|f| f.integer().ok_or_else(|| self.bad(key, "a whole number")))
            .transpose()
    }

    fn common(&self, queue: &Rc<Queue>) -> Result<Common> {
        let kind = match self.text("kind")? {
            None => None,
            Some(k) => {
                queue::check_name(&k, "kind")?;
                (k != queue.name).then(|| datum::text(&k))
            }
        };
        let tags = match self.given("tags") {
            None => None,
            Some(f) => {
                let list = f
                    .strings()
                    .ok_or_else(|| self.bad("tags", "an array of strings"))?;
                let texts: Vec<Option<Varlena>> = list.iter().map(|t| Some(datum::text(t))).collect();
                check_tags(&texts)?;
                (!list.is_empty()).then(|| datum::text_array(&list))
            }
        };
        Ok(Common {
            kind,
            priority: check_priority(queue, self.integer("priority")?)?,
            max_attempts: check_attempts(queue, self.integer("max_attempts")?)?,
            tags,
            metadata: self.given("metadata").map(|f| f.value),
            expires_at: None,
        })
    }

    fn due(&self) -> Result<Option<i64>> {
        let at = self.text("run_at")?;
        let after = self.text("run_in")?;
        super::due(
            at.as_deref().map(time::parse_timestamp),
            after.as_deref().map(time::parse_interval),
        )
    }
}
