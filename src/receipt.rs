//! Receipts: a bigint that names one attempt of one job.
//!
//! `claim_no << 16 | slot << 10 | index`: 47 bits of claim number, 64 slots, 1,024 jobs a claim.

/// Jobs that one claim can hold, and rows of one segment.
pub const MAX_PER_CLAIM: i64 = 1024;
pub const MAX_SLOTS: u8 = 64;
pub const CLAIMS_PER_BLOCK: i64 = 64;

/// Claim numbers are drawn in blocks, never below this many blocks a second since 2026-01-01: a server that
/// lost its last draws (crash, promotion, point-in-time recovery) can not give a number out again.
const BLOCKS_PER_SECOND: i64 = 512;
/// 2026-01-01 00:00 UTC in microseconds since 2000-01-01.
const EPOCH_MICROS: i64 = 820_454_400 * 1_000_000;
/// Highest claim number a receipt can hold.
pub const MAX_CLAIM_NO: i64 = (1 << 47) - 1;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Receipt {
    pub claim_no: i64,
    pub slot: u8,
    pub index: u16,
}

impl Receipt {
    pub fn encode(self) -> i64 {
        self.claim_no << 16 | i64::from(self.slot) << 10 | i64::from(self.index)
    }

    /// None for a number that can not be a receipt.
    pub fn decode(receipt: i64) -> Option<Receipt> {
        if receipt <= 0 {
            return None;
        }
        let r = Receipt {
            claim_no: receipt >> 16,
            slot: (receipt >> 10 & 63) as u8,
            index: (receipt & 1023) as u16,
        };
        (r.claim_no > 0).then_some(r)
    }
}

/// The lowest block of claim numbers that may be drawn at a time (microseconds since 2000-01-01).
pub fn block_floor(now: i64) -> i64 {
    ((now - EPOCH_MICROS) / 1_000_000).max(0) * BLOCKS_PER_SECOND
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_comes_back_as_it_went() {
        for r in [
            Receipt {
                claim_no: 1,
                slot: 0,
                index: 0,
            },
            Receipt {
                claim_no: MAX_CLAIM_NO,
                slot: 63,
                index: 1023,
            },
            Receipt {
                claim_no: 1_000_000_007,
                slot: 17,
                index: 512,
            },
        ] {
            assert!(r.encode() > 0);
            assert_eq!(Receipt::decode(r.encode()), Some(r));
        }
    }

    #[test]
    fn what_is_no_receipt_is_refused() {
        assert_eq!(Receipt::decode(0), None);
        assert_eq!(Receipt::decode(-1), None);
        assert_eq!(Receipt::decode(65_535), None);
        assert_eq!(Receipt::decode(i64::MIN), None);
    }

    #[test]
    fn claim_numbers_last_for_a_century() {
        let in_2126 = EPOCH_MICROS + 100 * 366 * 86_400 * 1_000_000;
        assert!(block_floor(in_2126) * CLAIMS_PER_BLOCK < MAX_CLAIM_NO);
        assert_eq!(block_floor(0), 0);
        assert_eq!(block_floor(EPOCH_MICROS + 2_500_000), 2 * BLOCKS_PER_SECOND);
    }
}
