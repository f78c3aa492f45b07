//! How far each slot's claims have been looked at: in this session's memory, and now and then in
//! awa_internal.rescue_marks, so that the next session does not look at all that is retained once more.
//!
//! A mark only says that what lies below it has ended or is on the list. Memory is kept from step to step
//! only where the step wrote nothing: then it is true whether its transaction commits or not.

use crate::error::Result;
use crate::pg::time::{self, SECOND};
use crate::pg::xact;
use crate::ring::{Slot, View};
use crate::statement;
use std::cell::RefCell;
use std::collections::BTreeMap;

/// The row is written after so many claims were looked at, or after so long if any were.
const SAVE_AFTER_LOOKS: usize = 500;
const SAVE_AFTER: i64 = 60 * SECOND;

#[derive(Clone, Debug)]
pub struct Mark {
    generation: i64,
    /// Claims whose lease as given ends before are dealt with.
    pub through: Option<i64>,
    /// How far the look at all of them has come; None while none is under way.
    pub swept_through: Option<i64>,
    /// When the last one was done.
    swept_at: i64,
    /// Since it was saved.
    looks: usize,
    saved_at: i64,
    changed: bool,
}

impl Mark {
    fn new(generation: i64) -> Mark {
        Mark {
            generation,
            through: None,
            swept_through: None,
            swept_at: time::now(),
            looks: 0,
            saved_at: time::now(),
            changed: false,
        }
    }

    pub fn looked(&mut self, through: Option<i64>, looks: usize) {
        self.through = through;
        self.looks += looks;
    }

    /// A piece of the look at everything has ended: at `stopped`, or with all looked at.
    pub fn swept(&mut self, stopped: Option<i64>, now: i64) {
        self.swept_through = stopped;
        if stopped.is_none() {
            self.swept_at = now;
        }
        self.changed = true;
    }

    fn is_due(&self) -> bool {
        self.changed
            || self.looks >= SAVE_AFTER_LOOKS
            || (self.looks > 0 && time::now().saturating_sub(self.saved_at) >= SAVE_AFTER)
    }
}

/// The marks of the live slots.
#[derive(Clone)]
pub struct Marks {
    incarnation: i64,
    slots: BTreeMap<u8, Mark>,
}

thread_local! {
    static KNOWN: RefCell<Option<Marks>> = const { RefCell::new(None) };
}

impl Marks {
    /// As this session remembers them, else as they are stored.
    pub fn load(view: &View) -> Result<Marks> {
        let known = KNOWN.with(|k| k.borrow_mut().take());
        match known {
            Some(marks) if marks.incarnation == view.incarnation => Ok(marks),
            _ => Marks::read(view),
        }
    }

    /// As they are stored.
    pub fn read(view: &View) -> Result<Marks> {
        let rows = statement::rows_with(
            &view.tables,
            "SELECT slot, generation, through, swept_through, swept_at FROM awa_internal.rescue_marks WHERE incarnation = $1",
            &[view.incarnation.into()],
            |row| {
                let generation = row.get::<i64>(2)?.unwrap_or(-1);
                let mut mark = Mark::new(generation);
                mark.through = statement::micros(row, 3)?;
                mark.swept_through = statement::micros(row, 4)?;
                mark.swept_at = statement::micros(row, 5)?.unwrap_or(i64::MIN);
                Ok((row.get::<i16>(1)?.unwrap_or(0) as u8, mark))
            },
        )?;
        Ok(Marks {
            incarnation: view.incarnation,
            slots: rows.into_iter().collect(),
        })
    }

    /// The mark of a slot, if one is known of this generation of it.
    pub fn get(&self, slot: &Slot) -> Option<&Mark> {
        self.slots
            .get(&slot.no)
            .filter(|m| m.generation == slot.generation)
    }

    /// The mark of a slot; nothing is known of a new generation.
    pub fn of(&mut self, slot: &Slot) -> &mut Mark {
        let mark = self
            .slots
            .entry(slot.no)
            .or_insert_with(|| Mark::new(slot.generation));
        if mark.generation != slot.generation {
            *mark = Mark::new(slot.generation);
        }
        mark
    }

    /// The slot that was looked at as a whole longest ago, before `since`, or one where that is under way.
    pub fn longest_unswept(&mut self, since: i64) -> Option<(u8, &mut Mark)> {
        self.slots
            .iter_mut()
            .filter(|(_, m)| m.swept_through.is_some() || m.swept_at < since)
            .min_by_key(|(_, m)| (m.swept_through.is_none(), m.swept_at))
            .map(|(slot, mark)| (*slot, mark))
    }

    pub fn is_sweeping(&self) -> bool {
        self.slots.values().any(|m| m.swept_through.is_some())
    }

    /// Stores the marks where the step `wrote` anyway or they have moved far; else they are remembered.
    pub fn save(&mut self, view: &View, wrote: bool) -> Result<()> {
        let live = |no: &u8, mark: &Mark| view.slot(*no).is_some_and(|s| s.generation == mark.generation);
        self.slots.retain(|no, mark| live(no, mark));
        if !wrote && !self.slots.values().any(Mark::is_due) {
            if !xact::has_written() {
                KNOWN.with(|k| *k.borrow_mut() = Some(self.clone()));
            }
            return Ok(());
        }
        for (no, mark) in &self.slots {
            if !mark.changed && mark.looks == 0 {
                continue;
            }
            statement::run(
                &view.tables,
                "INSERT INTO awa_internal.rescue_marks (slot, generation, incarnation, through, swept_through, swept_at)
                 VALUES ($1, $2, $3, $4, $5, $6)
                 ON CONFLICT (slot) DO UPDATE
                 SET generation = excluded.generation, incarnation = excluded.incarnation, through = excluded.through,
                     swept_through = excluded.swept_through, swept_at = excluded.swept_at",
                &[
                    i16::from(*no).into(),
                    mark.generation.into(),
                    self.incarnation.into(),
                    mark.through.map(statement::time).transpose()?.into(),
                    mark.swept_through.map(statement::time).transpose()?.into(),
                    statement::time(mark.swept_at)?.into(),
                ],
            )?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(swept_through: Option<i64>, swept_at: i64) -> Mark {
        Mark {
            generation: 0,
            through: Some(100),
            swept_through,
            swept_at,
            looks: 0,
            saved_at: 0,
            changed: false,
        }
    }

    #[test]
    fn a_look_at_everything_is_finished_before_the_next_begins() {
        let mut marks = Marks {
            incarnation: 1,
            slots: [(0, mark(None, 5)), (1, mark(Some(50), 9)), (2, mark(None, 3))].into(),
        };
        assert_eq!(marks.longest_unswept(10).map(|(s, _)| s), Some(1));
        marks.of_slot_done(1, 20);
        assert_eq!(marks.longest_unswept(10).map(|(s, _)| s), Some(2));
        assert_eq!(marks.longest_unswept(3).map(|(s, _)| s), None);
    }

    impl Marks {
        fn of_slot_done(&mut self, slot: u8, now: i64) {
            if let Some(m) = self.slots.get_mut(&slot) {
                m.swept(None, now);
            }
        }
    }
}
