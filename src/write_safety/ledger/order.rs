//! Which writes with a conflict key were entered after which, so that none is replayed on top of another.

use std::collections::{BTreeSet, HashMap};

use super::State;

/// The places of writes with a key, as long as one with that key is not settled.
#[derive(Clone, Debug, Default)]
pub(super) struct Order(HashMap<String, OfKey>);

#[derive(Clone, Debug, Default)]
struct OfKey {
    unsettled: BTreeSet<u64>,
    /// The latest of those that are settled and may have landed.
    settled: u64,
}

impl Order {
    /// One with that key has that place.
    pub(super) fn entered(&mut self, key: &str, place: u64) {
        if let Some(of_key) = self.0.get_mut(key) {
            of_key.unsettled.insert(place);
        } else {
            self.0.insert(key.to_owned(), OfKey { unsettled: BTreeSet::from([place]), settled: 0 });
        }
    }

    /// It is there no longer, and that is what became of it; `None` if it was taken back.
    pub(super) fn ended(&mut self, key: &str, place: u64, state: Option<&State>) {
        let Some(of_key) = self.0.get_mut(key) else { return };
        of_key.unsettled.remove(&place);
        if state.is_some_and(|state| !matches!(state, State::NotLanded { .. })) {
            of_key.settled = of_key.settled.max(place);
        }
        if of_key.unsettled.is_empty() {
            self.0.remove(key);
        }
    }

    /// Whether another one with that key was entered after it, and may have landed.
    pub(super) fn is_overtaken(&self, key: &str, place: u64) -> bool {
        let Some(of_key) = self.0.get(key) else { return false };
        of_key.settled > place || of_key.unsettled.last().is_some_and(|last| *last > place)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_write_is_overtaken_by_a_later_one_with_its_key_unless_that_one_did_not_land() {
        let mut order = Order::default();
        for (key, place) in [("a", 1), ("b", 2), ("a", 3), ("a", 4)] {
            order.entered(key, place);
        }
        assert!(order.is_overtaken("a", 1) && order.is_overtaken("a", 3));
        assert!(!order.is_overtaken("a", 4) && !order.is_overtaken("b", 2));
        order.ended("a", 4, Some(&State::not_done("refused")));
        assert!(!order.is_overtaken("a", 3), "that one did not land");
        order.ended("a", 3, Some(&State::Answered));
        assert!(order.is_overtaken("a", 1), "this one did");
        order.ended("a", 1, None);
        order.ended("b", 2, Some(&State::Answered));
        assert!(order.0.is_empty(), "nothing is kept of a key that nobody has");
    }
}
