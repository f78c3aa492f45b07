//! A bitmap over the indexes of a claim, as a closure stores it.

use crate::receipt::MAX_PER_CLAIM;

const BYTES: usize = MAX_PER_CLAIM as usize / 8;

#[derive(Clone)]
pub struct Bits([u8; BYTES]);

impl Bits {
    pub fn none() -> Bits {
        Bits([0; BYTES])
    }

    /// The stored bitmap; none stored means all of the claim.
    pub fn of(stored: Option<&[u8]>) -> Bits {
        let mut bits = Bits::none();
        match stored {
            None => bits.0.fill(0xff),
            Some(b) => {
                let n = b.len().min(BYTES);
                bits.0[..n].copy_from_slice(&b[..n]);
            }
        }
        bits
    }

    pub fn has(&self, i: u16) -> bool {
        let byte = self.0.get(usize::from(i) / 8);
        byte.is_some_and(|b| b & (1 << (i % 8)) != 0)
    }

    pub fn set(&mut self, i: u16) {
        self.0[usize::from(i) / 8] |= 1 << (i % 8);
    }

    /// Sets all that `other` has.
    pub fn add(&mut self, other: &Bits) {
        for (mine, theirs) in self.0.iter_mut().zip(other.0) {
            *mine |= theirs;
        }
    }

    /// The bytes that a claim of `n` jobs stores.
    pub fn stored(&self, n: i64) -> &[u8] {
        &self.0[..(n as usize).div_ceil(8)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bitmap_without_bytes_means_all() {
        assert!(Bits::of(None).has(1023));
    }

    #[test]
    fn what_is_stored_comes_back() {
        let mut b = Bits::none();
        b.set(9);
        assert_eq!(b.stored(10).len(), 2);
        let again = Bits::of(Some(b.stored(10)));
        assert!(again.has(9) && !again.has(8) && !again.has(1000) && !again.has(5000));
    }
}
