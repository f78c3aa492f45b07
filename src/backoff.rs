//! How long a job waits between two attempts.
//!
//! min(base * factor^attempt, max), plus up to `jitter` of it, never more than max: with the defaults
//! min(2^attempt s + up to a quarter, 24 h), which is what awa does.

/// A queue's policy. Times in microseconds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Backoff {
    pub base: i64,
    pub factor: f64,
    /// Share of the delay that is added at random, from 0 to 1.
    pub jitter: f64,
    pub max: i64,
}

pub const SECOND: i64 = 1_000_000;

impl Default for Backoff {
    fn default() -> Backoff {
        Backoff {
            base: SECOND,
            factor: 2.0,
            jitter: 0.25,
            max: 24 * 3600 * SECOND,
        }
    }
}

impl Backoff {
    /// The delay after `attempt` (from 1) has failed; `random` is a number from 0 to 1.
    pub fn delay(&self, attempt: i16, random: f64) -> i64 {
        let max = self.max as f64;
        let plain = (self.base as f64 * self.factor.powi(i32::from(attempt.max(1)))).min(max);
        let delay = (plain + plain * self.jitter * random.clamp(0.0, 1.0)).min(max);
        if delay.is_finite() {
            (delay as i64).max(0)
        } else {
            self.max
        }
    }
}

/// A number from 0 to 1 that follows from `seed` (splitmix64 by Vigna): jobs that fail together are spread, and
/// no state has to be kept.
pub fn spread(seed: u64) -> f64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_doubles_up_to_a_day() {
        let b = Backoff::default();
        assert_eq!(b.delay(1, 0.0), 2 * SECOND);
        assert_eq!(b.delay(5, 0.0), 32 * SECOND);
        assert_eq!(b.delay(3, 1.0), 10 * SECOND);
        assert_eq!(b.delay(30, 1.0), 24 * 3600 * SECOND);
        assert_eq!(b.delay(1000, 0.5), 24 * 3600 * SECOND);
    }

    #[test]
    fn a_policy_may_stay_flat_or_at_zero() {
        let flat = Backoff {
            base: 5,
            factor: 1.0,
            jitter: 0.0,
            max: 100,
        };
        assert_eq!((flat.delay(1, 0.9), flat.delay(9, 0.9)), (5, 5));
        let zero = Backoff {
            base: 0,
            ..Backoff::default()
        };
        assert_eq!(zero.delay(700, 1.0), 0);
    }

    #[test]
    fn the_spread_covers_its_range() {
        let all: Vec<f64> = (0..1000).map(spread).collect();
        assert!(all.iter().all(|r| (0.0..1.0).contains(r)));
        let mean = all.iter().sum::<f64>() / 1000.0;
        assert!((0.45..0.55).contains(&mean), "{mean}");
    }
}
