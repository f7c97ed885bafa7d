//! How long to wait before an attempt.
//!
//! Schedules are those of [`backon`]: whatever builds an iterator of durations. A schedule that ends ends the
//! retries (backon's own builders end after three waits unless told otherwise). The default of
//! [`RetryReadOnly`](crate::RetryReadOnly) is exponential, 50 ms doubled up to 5 s, with [`FullJitter`].

use std::{fmt, sync::Arc, time::Duration};

use backon::{BackoffBuilder, ExponentialBuilder};

/// Draws each wait uniformly between zero and what the schedule says.
///
/// Clients that failed together do not come back together, which is what a peer that just recovered needs;
/// jitter that only adds to a delay leaves them in a bunch. Each wait is drawn by itself, from a generator
/// that is seeded anew on each thread.
///
/// ```
/// use std::time::Duration;
/// use backon::{BackoffBuilder, ConstantBuilder};
/// use goaround::retry::backoff::FullJitter;
///
/// let schedule = FullJitter(ConstantBuilder::new().with_delay(Duration::from_secs(1)).with_max_times(2));
/// let waits: Vec<_> = schedule.build().collect();
/// assert_eq!(waits.len(), 2);
/// assert!(waits.iter().all(|wait| *wait <= Duration::from_secs(1)));
/// ```
#[derive(Clone, Copy, Debug)]
pub struct FullJitter<B>(pub B);

/// The waits of [`FullJitter`].
#[derive(Clone, Debug)]
pub struct Jittered<I>(I);

/// A schedule of the [`backoff`](https://docs.rs/backoff) crate, for those who have one already.
///
/// It is cloned and reset for each call. What it measures of the time that has passed it measures with its
/// own clock, not with tokio's.
///
/// ```
/// use goaround::{RetryReadOnly, retry::backoff::Legacy};
///
/// let layer = RetryReadOnly.backoff(Legacy(backoff::ExponentialBackoff::default()));
/// ```
#[cfg(feature = "backoff")]
#[derive(Clone, Copy, Debug)]
pub struct Legacy<B>(pub B);

/// The waits of [`Legacy`].
#[cfg(feature = "backoff")]
#[derive(Clone, Debug)]
pub struct LegacyWaits<B>(B);

pub(crate) type Waits = Box<dyn backon::Backoff>;

/// Makes a schedule for a call. Erased, so that the layer and its service have no type parameter for it; the
/// box is made when the first attempt has failed.
#[derive(Clone)]
pub(crate) struct Schedule(Arc<dyn Fn() -> Waits + Send + Sync>);

// ===== impl FullJitter =====

impl<B: BackoffBuilder> BackoffBuilder for FullJitter<B> {
    type Backoff = Jittered<B::Backoff>;

    fn build(self) -> Self::Backoff {
        Jittered(self.0.build())
    }
}

impl<I: Iterator<Item = Duration>> Iterator for Jittered<I> {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        const NANOS: u128 = 1_000_000_000;
        let drawn = fastrand::u128(0..=self.0.next()?.as_nanos());
        // Both parts fit: the draw is at most the nanoseconds of a `Duration`.
        Some(Duration::new((drawn / NANOS) as u64, (drawn % NANOS) as u32))
    }
}

// ===== impl Legacy =====

#[cfg(feature = "backoff")]
impl<B> BackoffBuilder for Legacy<B>
where
    B: backoff::backoff::Backoff + Send + Sync + Unpin,
{
    type Backoff = LegacyWaits<B>;

    fn build(mut self) -> Self::Backoff {
        self.0.reset();
        LegacyWaits(self.0)
    }
}

#[cfg(feature = "backoff")]
impl<B: backoff::backoff::Backoff> Iterator for LegacyWaits<B> {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next_backoff()
    }
}

// ===== impl Schedule =====

impl Schedule {
    pub(crate) fn new(builder: impl BackoffBuilder<Backoff: 'static> + Clone + 'static) -> Self {
        Self(Arc::new(move || Box::new(builder.clone().build())))
    }

    /// Doubled from `min` up to `max`, with full jitter, without end.
    pub(crate) fn exponential(min: Duration, max: Duration) -> Self {
        let builder = ExponentialBuilder::new().with_factor(2.0).with_min_delay(min).with_max_delay(max);
        Self::new(FullJitter(builder.without_max_times()))
    }

    pub(crate) fn start(&self) -> Waits {
        (self.0)()
    }
}

impl Default for Schedule {
    fn default() -> Self {
        Self::exponential(Duration::from_millis(50), Duration::from_secs(5))
    }
}

impl fmt::Debug for Schedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Schedule(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_doubles_from_50_ms_to_5_s_and_never_ends() {
        let mut most = [Duration::ZERO; 10];
        for _ in 0..2_000 {
            for (most, wait) in most.iter_mut().zip(Schedule::default().start()) {
                *most = wait.max(*most);
            }
        }
        for (n, most) in most.into_iter().enumerate() {
            let ceiling = Duration::from_millis((50 << n).min(5_000));
            // f32 arithmetic of backon: off by nanoseconds.
            assert!(most <= ceiling + Duration::from_micros(1), "{n}: {most:?} > {ceiling:?}");
            assert!(most >= ceiling.mul_f64(0.95), "{n}: {most:?} is far from {ceiling:?}");
        }
        assert_eq!(Schedule::default().start().take(1_000).count(), 1_000);
    }

    #[test]
    fn the_jitter_is_full_and_uniform() {
        let delay = Duration::from_secs(8);
        let mut buckets = [0_u32; 8];
        for wait in FullJitter(std::iter::repeat_n(delay, 8_000)).build() {
            assert!(wait <= delay);
            buckets[(wait.as_secs() as usize).min(7)] += 1;
        }
        assert!(buckets.iter().all(|count| (800..1_200).contains(count)), "{buckets:?}");
    }

    #[test]
    fn enormous_and_tiny_delays_are_drawn_without_loss() {
        let waits: Vec<_> = FullJitter(std::iter::repeat_n(Duration::MAX, 8)).build().collect();
        assert!(waits.iter().any(|wait| wait.subsec_nanos() != 0 && wait.as_secs() > u64::MAX / 64));
        let tiny: Vec<_> = FullJitter(std::iter::repeat_n(Duration::from_nanos(1), 64)).build().collect();
        assert!(tiny.contains(&Duration::from_nanos(1)) && tiny.contains(&Duration::ZERO));
    }

    #[cfg(feature = "backoff")]
    #[test]
    fn a_legacy_schedule_is_reset_for_each_call_and_its_end_ends_it() {
        use backoff::backoff::Backoff;

        #[derive(Clone)]
        struct Two(u32);
        impl Backoff for Two {
            fn reset(&mut self) {
                self.0 = 2;
            }
            fn next_backoff(&mut self) -> Option<Duration> {
                self.0 = self.0.checked_sub(1)?;
                Some(Duration::from_secs(1))
            }
        }
        let schedule = Schedule::new(Legacy(Two(0)));
        assert_eq!(schedule.start().count(), 2);
        assert_eq!(schedule.start().count(), 2);
    }
}
