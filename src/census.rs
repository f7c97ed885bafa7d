//! Counts what is in flight over clones, without a counter that they would contend for: each clone has a
//! reference-counted seat of its own, its calls hold it, and whoever wants to know looks at all seats.

use std::{
    pin::pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, timeout_at},
};

use crate::wakers::quietly;

/// How often a shutdown looks without having been told to.
const LOOK: Duration = Duration::from_millis(10);

/// What a clone and its calls hold.
pub(crate) trait Seat {
    /// Whether the clone itself holds it, besides its calls.
    fn held(&self) -> &AtomicBool;

    /// How many calls are in flight that hold something else in its place.
    fn besides(&self) -> usize {
        0
    }
}

/// A seat of any kind.
pub(crate) type AnySeat = dyn Seat + Send + Sync;

/// All seats.
pub(crate) struct Census<T: ?Sized> {
    seats: Vec<Weak<T>>,
    sweep_at: usize,
}

impl<T: Seat + ?Sized> Census<T> {
    pub(crate) const fn new() -> Self {
        Self { seats: Vec::new(), sweep_at: 64 }
    }

    pub(crate) fn enter(&mut self, seat: &Arc<T>) {
        // Swept when it has doubled, so that a seat costs a constant on average.
        if self.seats.len() >= self.sweep_at {
            self.seats.retain(|seat| seat.strong_count() > 0);
            self.sweep_at = (self.seats.len() * 2).max(64);
        }
        self.seats.push(Arc::downgrade(seat));
    }

    /// How many calls hold a seat.
    pub(crate) fn in_flight(&self) -> usize {
        let seats = self.seats.iter().filter_map(Weak::upgrade);
        seats.map(|seat| holding(&seat) + seat.besides()).sum()
    }
}

/// How many calls hold a seat, of which the caller has a reference of its own.
pub(crate) fn holding<T: Seat + ?Sized>(seat: &Arc<T>) -> usize {
    let others = 1 + usize::from(seat.held().load(Ordering::Acquire));
    Arc::strong_count(seat).saturating_sub(others)
}

/// Waits until nothing is in flight any more, at most until `end`: how much still is.
pub(crate) async fn drain(in_flight: impl Fn() -> usize, ended: &Notify, end: Option<Instant>) -> usize {
    loop {
        let mut told = pin!(ended.notified());
        // Registered before the count, so that no end is missed in between.
        told.as_mut().enable();
        let count = in_flight();
        let now = Instant::now();
        if count == 0 || end.is_some_and(|end| now >= end) {
            return count;
        }
        // Calls look whether there is a shutdown before they give their seat up, and clones say that they are
        // gone before they are: one that did so just when the shutdown began tells nobody.
        let next = now + LOOK;
        let _ = timeout_at(end.map_or(next, |end| end.min(next)), quietly(told)).await;
    }
}
