//! How many retries there may be in all, over the calls of one service.
//!
//! A bound per call does not protect a peer that is down: three attempts each are three times the load at the
//! worst moment. [`Throttle`] looks at failures instead, as gRPC does (proposal A6): while calls succeed it
//! does not limit anything, and when most of them fail it stops retries after a handful, until successes have
//! paid it back. It is on by default. Any other [`Budget`] can take its place.

use std::fmt;
#[cfg(not(goaround_loom))]
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

#[cfg(goaround_loom)]
use loom::sync::atomic::{AtomicU64, Ordering::Relaxed};

pub use tower::retry::budget::Budget;

/// A failure-aware budget: a failure costs one token, a success returns a part of one, and there are no
/// retries while half of the tokens or fewer are left.
///
/// It counts exactly, in thousandths of a token, in one atomic. A success at the full level, which is nearly
/// every success, only reads it. With two tokens or fewer it allows no retry at all.
///
/// ```
/// use goaround::retry::budget::{Budget, Throttle};
///
/// let throttle = Throttle::default();
/// let allowed = (0..100).filter(|_| throttle.withdraw()).count();
/// assert_eq!(allowed, 4); // down to six tokens of ten
/// ```
pub struct Throttle {
    max: u64,
    returned: u64,
    tokens: AtomicU64,
}

/// Thousandths in a token.
const TOKEN: u64 = 1_000;

// ===== impl Throttle =====

impl Throttle {
    /// A budget of `max_tokens`, full, to which a success returns that many thousandths of a token.
    #[cfg(not(goaround_loom))]
    pub const fn new(max_tokens: u32, thousandths_per_success: u32) -> Self {
        let max = max_tokens as u64 * TOKEN;
        Self { max, returned: thousandths_per_success as u64, tokens: AtomicU64::new(max) }
    }

    /// The same, for a build in which no atomic can be made before the program runs.
    #[cfg(goaround_loom)]
    pub fn new(max_tokens: u32, thousandths_per_success: u32) -> Self {
        let max = u64::from(max_tokens) * TOKEN;
        Self { max, returned: u64::from(thousandths_per_success), tokens: AtomicU64::new(max) }
    }
}

impl Default for Throttle {
    /// Ten tokens, a tenth of a token for a success.
    fn default() -> Self {
        Self::new(10, 100)
    }
}

impl Budget for Throttle {
    #[inline]
    fn deposit(&self) {
        // Relaxed throughout: the level says nothing about other memory, and a read-modify-write loses no
        // token in any order.
        let mut level = self.tokens.load(Relaxed);
        while level < self.max {
            let next = level.saturating_add(self.returned).min(self.max);
            match self.tokens.compare_exchange_weak(level, next, Relaxed, Relaxed) {
                Ok(_) => return,
                Err(now) => level = now,
            }
        }
    }

    fn withdraw(&self) -> bool {
        let mut level = self.tokens.load(Relaxed);
        while level > 0 {
            let next = level.saturating_sub(TOKEN);
            match self.tokens.compare_exchange_weak(level, next, Relaxed, Relaxed) {
                Ok(_) => return next * 2 > self.max,
                Err(now) => level = now,
            }
        }
        false
    }
}

impl fmt::Debug for Throttle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Throttle")
            .field("max_thousandths", &self.max)
            .field("thousandths", &self.tokens.load(Relaxed))
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn level(throttle: &Throttle) -> u64 {
        throttle.tokens.load(Relaxed)
    }

    #[test]
    fn no_retries_at_half_or_below_and_failures_go_on_costing() {
        let throttle = Throttle::default();
        let allowed: Vec<bool> = (0..12).map(|_| throttle.withdraw()).collect();
        assert_eq!(allowed, [[true; 4].as_slice(), &[false; 8]].concat());
        assert_eq!(level(&throttle), 0);
    }

    #[test]
    fn a_success_returns_a_tenth_exactly_and_never_more_than_the_maximum() {
        let throttle = Throttle::default();
        (0..12).for_each(|_| _ = throttle.withdraw());
        (0..60).for_each(|_| throttle.deposit());
        assert_eq!(level(&throttle), 6_000);
        assert!(!throttle.withdraw()); // to five: not above half
        (0..11).for_each(|_| throttle.deposit());
        assert!(throttle.withdraw()); // to 5.1
        (0..1_000).for_each(|_| throttle.deposit());
        assert_eq!(level(&throttle), 10_000);
    }

    #[test]
    fn extreme_values_neither_panic_nor_wrap() {
        for tokens in [0, 1, 2] {
            let throttle = Throttle::new(tokens, u32::MAX);
            throttle.deposit();
            assert!(!throttle.withdraw());
            throttle.deposit();
            assert_eq!(level(&throttle), u64::from(tokens) * TOKEN);
        }
        let throttle = Throttle::new(u32::MAX, u32::MAX);
        assert!(throttle.withdraw());
        throttle.deposit();
        assert_eq!(level(&throttle), u64::from(u32::MAX) * TOKEN);
        let throttle = Throttle::new(3, 0);
        assert!(throttle.withdraw());
        throttle.deposit();
        assert!(!throttle.withdraw());
    }

    #[test]
    fn a_random_walk_agrees_with_plain_arithmetic() {
        let mut random = fastrand::Rng::with_seed(7);
        let walks = if cfg!(miri) { 5 } else { 200 };
        for _ in 0..walks {
            let (max, returned) = (random.u32(0..20), random.u32(0..2_000));
            let throttle = Throttle::new(max, returned);
            let mut model = i64::from(max) * 1_000;
            for _ in 0..200 {
                if random.bool() {
                    throttle.deposit();
                    model = (model + i64::from(returned)).min(i64::from(max) * 1_000);
                } else {
                    model = (model - 1_000).max(0);
                    assert_eq!(throttle.withdraw(), model > i64::from(max) * 500);
                }
                assert_eq!(level(&throttle) as i64, model);
            }
        }
    }

    #[test]
    fn no_token_is_lost_or_made_among_threads() {
        // High enough that no bound is touched: the level must come out exactly.
        let throttle = Throttle::new(1_000_000, 100);
        let (first, times) = if cfg!(miri) { (1_000, 100) } else { (100_000, 10_000) };
        (0..first).for_each(|_| _ = throttle.withdraw());
        let before = level(&throttle);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..times {
                        throttle.deposit();
                        throttle.withdraw();
                        throttle.deposit();
                    }
                });
            }
        });
        assert_eq!(level(&throttle), before + 4 * times * 200 - 4 * times * TOKEN);

        // And threads that race for the last permits get exactly as many as there are.
        let throttle = Throttle::new(1_000, 100);
        let allowed = std::thread::scope(|scope| {
            let threads: Vec<_> =
                (0..4).map(|_| scope.spawn(|| (0..1_000).filter(|_| throttle.withdraw()).count())).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum::<usize>()
        });
        assert_eq!((allowed, level(&throttle)), (499, 0));
    }
}

#[cfg(all(test, goaround_loom))]
mod loom_tests {
    use loom::{sync::Arc, thread};

    use super::*;

    #[test]
    fn loom_the_last_retry_is_allowed_to_one_of_two() {
        loom::model(|| {
            let throttle = Arc::new(Throttle::new(3, 0));
            let other = thread::spawn({
                let throttle = Arc::clone(&throttle);
                move || throttle.withdraw()
            });
            let own = throttle.withdraw();
            assert!(own ^ other.join().unwrap());
            assert_eq!(throttle.tokens.load(Relaxed), TOKEN);
        });
    }

    #[test]
    fn loom_no_token_is_lost_between_a_failure_and_a_success() {
        loom::model(|| {
            let throttle = Arc::new(Throttle::new(10, 100));
            throttle.withdraw();
            let other = thread::spawn({
                let throttle = Arc::clone(&throttle);
                move || throttle.deposit()
            });
            throttle.withdraw();
            other.join().unwrap();
            assert_eq!(throttle.tokens.load(Relaxed), 8 * TOKEN + 100);
        });
    }
}
