//! Who waits for something of which all are told at once: one place for each, in which its task is woken.

use std::{
    mem,
    sync::{Arc, Mutex, PoisonError, Weak},
    task::Waker,
};

/// The place of one who waits, which has it as long as it waits: with the waker that it was polled with last, however
/// often that was and by however many tasks.
#[derive(Debug, Default)]
pub(crate) struct Place(Mutex<Option<Waker>>);

/// The places of all.
#[derive(Debug, Default)]
pub(crate) struct Places(Vec<Weak<Place>>);

// ===== impl Place =====

impl Place {
    /// Whom to wake from now on; with who was before. Wakers are foreign code: cloned and dropped without a lock.
    #[must_use = "to be dropped without a lock"]
    pub(crate) fn set(&self, waker: Option<Waker>) -> Option<Waker> {
        mem::replace(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner), waker)
    }
}

// ===== impl Places =====

impl Places {
    /// For one who waits from now on. Those who are gone have given theirs up.
    pub(crate) fn enter(&mut self) -> Arc<Place> {
        let place = Arc::default();
        self.0.retain(|place| place.strong_count() > 0);
        self.0.push(Arc::downgrade(&place));
        place
    }

    /// All who wait now, to be woken without a lock.
    #[must_use = "to be woken"]
    pub(crate) fn wakers(&self) -> Vec<Waker> {
        self.0.iter().filter_map(Weak::upgrade).filter_map(|place| place.set(None)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_gone_leaves_no_place_and_nobody_who_waits_is_forgotten() {
        let mut places = Places::default();
        let waits = places.enter();
        for _ in 0..1000 {
            drop(places.enter().set(Some(Waker::noop().clone())));
        }
        assert_eq!(places.0.len(), 2);
        for _ in 0..2 {
            assert_eq!(places.wakers().len(), 0);
            drop(waits.set(Some(Waker::noop().clone())));
            assert_eq!(places.wakers().len(), 1);
        }
    }
}
