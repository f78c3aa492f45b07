//! A job's row in `ready`, read through the runs of its segment, or searched for where they mislead.

use crate::logs::{ready, rest};
use crate::pg::composite::Record;
use crate::pg::datum::Varlena;
use crate::pg::heap::{self, Fetcher, Place, Row};
use crate::pg::latest::Latest;
use crate::pg::table::{Access, Oid, Table};
use crate::ring::Slot;
use crate::runs;
use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

/// What identifies a job's attempt.
#[derive(Clone, Copy)]
pub struct Head {
    pub entry_id: i64,
    pub job_id: i64,
    pub attempt: i16,
    /// None where it is the queue's name.
    pub kind: Option<Varlena>,
}

impl Head {
    fn from_row(entry_id: i64, row: &Row) -> Head {
        Head {
            entry_id,
            job_id: row.i64(ready::JOB_ID).unwrap_or(entry_id),
            attempt: row.i16(ready::ATTEMPT).unwrap_or(1),
            kind: row.varlena(ready::KIND).map(Varlena::flattened),
        }
    }
}

/// What a job brings along. All values are inline and outlive the lock on the table.
pub struct Body {
    pub head: Head,
    pub max_attempts: i16,
    pub args: Varlena,
    /// The rare columns, taken apart.
    pub rest: Option<Record>,
}

impl Body {
    fn from_row(entry_id: i64, row: &Row) -> Body {
        let args = row.varlena(ready::ARGS).map(Varlena::flattened);
        Body {
            head: Head::from_row(entry_id, row),
            max_attempts: row.i16(ready::MAX_ATTEMPTS).unwrap_or(1),
            args: args.unwrap_or_else(|| crate::pg::datum::jsonb_from_text("null")),
            rest: row.varlena(ready::REST).map(|v| Record::read(v.flattened())),
        }
    }

    pub fn rest_varlena(&self, attribute: usize) -> Option<Varlena> {
        self.rest.as_ref().and_then(|r| r.varlena(attribute))
    }

    /// When the job was first enqueued; `segment_at` is when this entry was.
    pub fn enqueued_at(&self, segment_at: i64) -> i64 {
        self.rest
            .as_ref()
            .and_then(|r| r.i64(rest::ENQUEUED_AT))
            .unwrap_or(segment_at)
    }

    /// Until when it may wait.
    pub fn expires_at(&self) -> Option<i64> {
        self.rest.as_ref().and_then(|r| r.i64(rest::EXPIRES_AT))
    }

    /// When it became ready.
    pub fn run_at(&self, segment_at: i64) -> i64 {
        self.rest
            .as_ref()
            .and_then(|r| r.i64(rest::RUN_AT))
            .unwrap_or(segment_at)
    }
}

/// Places of all entries of one ready table, made by one scan when its runs turned out to mislead.
struct Map {
    table: Oid,
    storage: u64,
    places: HashMap<i64, Place>,
}

thread_local! {
    static MAP: RefCell<Option<Map>> = const { RefCell::new(None) };
}

pub fn forget() {
    MAP.with(|m| *m.borrow_mut() = None);
}

/// One slot's table.
struct Opened {
    table: Rc<Table>,
    fetcher: Fetcher,
    /// This reader made a map of it.
    mapped: bool,
}

/// Reads bodies; opens each slot's table once and gives it back when dropped.
pub struct Reader {
    // Fetching TOASTed values needs an active snapshot.
    snapshot: Latest,
    tables: HashMap<u8, Opened>,
}

impl Reader {
    pub fn new() -> Reader {
        Reader {
            snapshot: Latest::take_active(),
            tables: HashMap::new(),
        }
    }

    /// The body of entry `entry_id`, the k-th row of a segment with these runs; None where no such row is
    /// to be found at all.
    pub fn read(&mut self, slot: &Slot, runs: &[u8], k: usize, entry_id: i64) -> Option<Body> {
        self.row(slot, runs, k, entry_id)
            .map(|row| Body::from_row(entry_id, &row))
    }

    /// As `read`, without the payload, which may be large and lie elsewhere.
    pub fn read_head(&mut self, slot: &Slot, runs: &[u8], k: usize, entry_id: i64) -> Option<Head> {
        self.row(slot, runs, k, entry_id)
            .map(|row| Head::from_row(entry_id, &row))
    }

    fn row(&mut self, slot: &Slot, runs: &[u8], k: usize, entry_id: i64) -> Option<Row> {
        let snapshot = &self.snapshot;
        let Opened {
            table,
            fetcher,
            mapped,
        } = self.tables.entry(slot.no).or_insert_with(|| {
            let table = Rc::new(Table::open(slot.ready, Access::Read));
            Opened {
                fetcher: Fetcher::new(&table),
                table,
                mapped: false,
            }
        });
        runs::place_of(runs, k)
            .and_then(|place| fetcher.fetch(place, entry_id))
            .or_else(|| fetcher.fetch(search(table, snapshot, entry_id, mapped)?, entry_id))
    }
}

/// Where an entry lies, by the table's map. That it is nowhere only a map says that this reader made: rows
/// may have come since into pages that were there before.
fn search(table: &Table, snapshot: &Latest, entry_id: i64, mapped: &mut bool) -> Option<Place> {
    let known = MAP.with(|m| {
        let map = m.borrow();
        let map = map.as_ref()?;
        let same = map.table == table.oid() && map.storage == table.storage();
        same.then(|| map.places.get(&entry_id).copied())
    });
    match known {
        Some(Some(place)) => return Some(place),
        Some(None) if *mapped => return None,
        _ => {}
    }
    let mut places = HashMap::new();
    heap::scan(table, snapshot, |row| {
        if let Some(id) = row.i64(ready::ENTRY_ID) {
            places.insert(id, row.place);
        }
        true
    });
    let place = places.get(&entry_id).copied();
    MAP.with(|m| {
        *m.borrow_mut() = Some(Map {
            table: table.oid(),
            storage: table.storage(),
            places,
        });
    });
    *mapped = true;
    place
}
