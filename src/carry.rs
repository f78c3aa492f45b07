//! What a job takes along when it leaves its entry: for the tail of its lane, for `deferred`, for `dead_letters`.

use crate::body::Body;
use crate::logs::rest;
use crate::pg::composite::{self, Record};
use crate::pg::datum::{Value, Varlena};
use crate::ring::View;

/// The rare columns, taken apart so that some can be changed.
pub struct Carried {
    values: [Value; rest::COUNT],
}

impl Carried {
    pub fn none() -> Carried {
        Carried {
            values: [Value::Null; rest::COUNT],
        }
    }

    /// All that the job had, and when it was first enqueued; `segment_at` is when this entry was. When it was
    /// due does not go along.
    pub fn from_body(body: &Body, segment_at: i64) -> Carried {
        let mut carried = Carried::from_record(body.rest.as_ref());
        carried.set(rest::ENQUEUED_AT, body.enqueued_at(segment_at));
        carried.set(rest::RUN_AT, Value::Null);
        carried
    }

    pub fn from_record(record: Option<&Record>) -> Carried {
        let mut carried = Carried::none();
        if let Some(record) = record {
            for (i, v) in carried.values.iter_mut().enumerate() {
                *v = record.value(i);
            }
        }
        carried
    }

    /// Takes a checkpoint along, where there is a new one.
    pub fn set_checkpoint(&mut self, checkpoint: Option<Varlena>) {
        if checkpoint.is_some() {
            self.set(rest::CHECKPOINT, checkpoint);
        }
    }

    pub fn set(&mut self, attribute: usize, value: impl Into<Value>) {
        self.values[attribute] = value.into();
    }

    pub fn build(&self, view: &View) -> Varlena {
        composite::build(view.tables.rest_type, &self.values)
    }
}
