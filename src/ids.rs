//! Entry ids and claim numbers, drawn in blocks.

use crate::error::{Error, Result};
use crate::pg::compat::nextval;
use crate::pg::lock::{Class, Mode, ShortLock};
use crate::pg::owner;
use crate::pg::time;
use crate::pg::xact;
use crate::receipt::{block_floor, CLAIMS_PER_BLOCK, MAX_CLAIM_NO};
use crate::ring::View;
use std::cell::Cell;

/// The sequence `entry_ids` counts in steps of this.
pub const ENTRIES_PER_BLOCK: i64 = 1024;
/// Fewer claim numbers than this left: a new block is drawn before the claim lock is taken.
const ENOUGH_CLAIM_NUMBERS: i64 = 16;

#[derive(Clone, Copy)]
struct Block {
    next: i64,
    end: i64,
}

const NONE: Block = Block { next: 0, end: 0 };

/// A block of entry ids older than this is dropped, in microseconds, so that ids grow roughly with time also
/// across sessions.
const ENTRY_BLOCK_LIFE: i64 = 60 * time::SECOND;

thread_local! {
    static ENTRIES_DRAWN_AT: Cell<i64> = const { Cell::new(0) };
    static ENTRIES: Cell<Block> = const { Cell::new(NONE) };
    static CLAIMS: Cell<Block> = const { Cell::new(NONE) };
}

pub fn forget() {
    ENTRIES.set(NONE);
    CLAIMS.set(NONE);
}

/// Draws `n` contiguous entry ids, at most a block, and returns the first. Ids survive a rollback: what is
/// left of a block when more are needed is dropped.
pub fn draw_entries(view: &View, n: usize) -> i64 {
    let n = n as i64;
    debug_assert!(n <= ENTRIES_PER_BLOCK);
    let mut block = ENTRIES.get();
    let now = time::now();
    if block.end - block.next < n || now - ENTRIES_DRAWN_AT.get() > ENTRY_BLOCK_LIFE {
        let first = nextval(view.tables.entry_ids);
        ENTRIES_DRAWN_AT.set(now);
        block = Block {
            next: first,
            end: first + ENTRIES_PER_BLOCK,
        };
    }
    let first = block.next;
    block.next += n;
    ENTRIES.set(block);
    first
}

/// Makes sure that claim numbers are at hand and says how many. Draws and flushes a block if need be:
/// called before any short lock.
pub fn prepare_claim_numbers(view: &View) -> Result<i64> {
    let block = CLAIMS.get();
    if block.end - block.next >= ENOUGH_CLAIM_NUMBERS {
        return Ok(block.end - block.next);
    }
    let sequence = view.tables.claim_blocks;
    let lock = ShortLock::acquire(Class::ClaimNumbers, 0, Mode::Exclusive);
    let number = nextval(sequence).max(block_floor(time::now()));
    if (number + 1) * CLAIMS_PER_BLOCK > MAX_CLAIM_NO {
        return Err(Error::limit(
            "claim numbers are used up",
            "Check the server's clock: numbers last until the year 2162.",
        ));
    }
    owner::as_owner_of(sequence, || owner::set_sequence(sequence, number));
    drop(lock);
    // A claim may commit without a flush; its number must not be drawn again all the same.
    xact::flush_own_wal();
    let first = number * CLAIMS_PER_BLOCK;
    CLAIMS.set(Block {
        next: first,
        end: first + CLAIMS_PER_BLOCK,
    });
    Ok(CLAIMS_PER_BLOCK)
}

/// The next claim number of the block at hand.
pub fn next_claim_number() -> i64 {
    let mut block = CLAIMS.get();
    assert!(block.next < block.end, "claim numbers were not prepared");
    let no = block.next;
    block.next += 1;
    CLAIMS.set(block);
    no
}
