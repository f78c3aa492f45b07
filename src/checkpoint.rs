//! Checkpoints of attempts that move on: what `set_progress` stored goes along to the next attempt.

use crate::error::Result;
use crate::pg::datum::Varlena;
use crate::pg::index::{self, Index};
use crate::pg::latest::Latest;
use crate::pg::scan::{Cond, Direction, Scan};
use crate::pg::table::{Access, Table};
use crate::receipt::Receipt;
use crate::ring;
use std::rc::Rc;

/// Columns of awa_internal.attempts.
const INDEX: i16 = 2;
const CHECKPOINT: i16 = 7;

/// The stored checkpoints, as of now.
pub struct Checkpoints {
    table: Rc<Table>,
    index: Rc<Index>,
    latest: Latest,
}

impl Checkpoints {
    pub fn open() -> Result<Checkpoints> {
        let table = Rc::new(Table::open(ring::relation("attempts")?, Access::Read));
        let index = index::lookup(&table, &[1])?;
        Ok(Checkpoints {
            index,
            table,
            latest: Latest::take_active(),
        })
    }

    /// What the attempt stored, if anything.
    pub fn of(&self, receipt: Receipt) -> Option<Varlena> {
        let mut scan = Scan::latest(&self.table, &self.index, 1, &self.latest);
        scan.seek(&[Cond::Eq(receipt.claim_no)]);
        while scan.next(Direction::Forward) {
            if scan.i16(INDEX) == receipt.index as i16 {
                // Copied: the scan's page goes with it.
                return scan.varlena(CHECKPOINT).map(Varlena::copied);
            }
        }
        None
    }
}
