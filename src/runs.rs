//! Runs: where the rows of a segment lie, as (block, offset, count) triples of eight bytes.
//!
//! They are hints. Every row read through one is checked by its entry id; a rewrite of the table makes
//! them point elsewhere, and the row is then searched for.

use crate::pg::heap::Place;

const BYTES: usize = 8;
/// A segment is cut where it would need more runs: 200 stay inline in the row.
pub const MAX_RUNS: usize = 200;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    pub block: u32,
    pub offset: u16,
    pub n: u16,
}

/// The runs of consecutive places, as many of them as fit one segment. Returns the runs and how many
/// places they cover.
pub fn gather(places: &[Place]) -> (Vec<Run>, usize) {
    let mut runs: Vec<Run> = Vec::new();
    for (i, p) in places.iter().enumerate() {
        if let Some(r) = runs.last_mut() {
            if r.block == p.block && r.offset + r.n == p.offset {
                r.n += 1;
                continue;
            }
        }
        if runs.len() == MAX_RUNS {
            return (runs, i);
        }
        runs.push(Run {
            block: p.block,
            offset: p.offset,
            n: 1,
        });
    }
    (runs, places.len())
}

pub fn encode(runs: &[Run]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(runs.len() * BYTES);
    for r in runs {
        bytes.extend_from_slice(&r.block.to_le_bytes());
        bytes.extend_from_slice(&r.offset.to_le_bytes());
        bytes.extend_from_slice(&r.n.to_le_bytes());
    }
    bytes
}

/// The place of the k-th row of a segment, if the runs know it.
pub fn place_of(bytes: &[u8], k: usize) -> Option<Place> {
    let mut left = k;
    for b in bytes.chunks_exact(BYTES) {
        let n = usize::from(u16::from_le_bytes([b[6], b[7]]));
        if left < n {
            return Some(Place {
                block: u32::from_le_bytes([b[0], b[1], b[2], b[3]]),
                offset: u16::from_le_bytes([b[4], b[5]]).checked_add(left as u16)?,
            });
        }
        left -= n;
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn p(block: u32, offset: u16) -> Place {
        Place { block, offset }
    }

    #[test]
    fn neighbours_share_a_run() {
        let (runs, n) = gather(&[p(7, 3), p(7, 4), p(7, 5), p(9, 1), p(9, 3)]);
        assert_eq!(n, 5);
        assert_eq!(
            runs,
            vec![
                Run {
                    block: 7,
                    offset: 3,
                    n: 3
                },
                Run {
                    block: 9,
                    offset: 1,
                    n: 1
                },
                Run {
                    block: 9,
                    offset: 3,
                    n: 1
                }
            ]
        );
    }

    #[test]
    fn every_row_is_found_again() {
        let places: Vec<Place> = (0..50).map(|i| p(i / 7, (i % 7 + 1) as u16)).collect();
        let (runs, n) = gather(&places);
        assert_eq!(n, 50);
        let bytes = encode(&runs);
        for (k, place) in places.iter().enumerate() {
            assert_eq!(place_of(&bytes, k), Some(*place));
        }
        assert_eq!(place_of(&bytes, 50), None);
    }

    #[test]
    fn a_segment_is_cut_at_its_limit_of_runs() {
        let places: Vec<Place> = (0..500).map(|i| p(i * 2, 1)).collect();
        let (runs, n) = gather(&places);
        assert_eq!((runs.len(), n), (MAX_RUNS, MAX_RUNS));
        assert!(encode(&runs).len() < 2000);
    }

    #[test]
    fn damaged_runs_find_nothing() {
        assert_eq!(place_of(&[], 0), None);
        assert_eq!(place_of(&[1, 2, 3], 0), None);
    }
}
