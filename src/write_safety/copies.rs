//! Copies of a call that enter its write in one ledger. There is one entry of them, and a hint, which names no revision,
//! would be of whichever of them has it.

use std::{
    collections::HashMap,
    mem,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use super::ledger::EntryId;

/// The writes that calls under way have begun to enter, of all services that share a ledger.
#[derive(Debug, Default)]
pub(super) struct Entered(Mutex<HashMap<EntryId, Copies>>);

#[derive(Debug, Default)]
struct Copies {
    count: usize,
    /// Whether one gives a hint: then none begins any more.
    hinted: bool,
}

/// One such call.
#[derive(Debug)]
pub(super) struct Entering {
    of: Arc<Entered>,
    id: EntryId,
    begun: bool,
}

impl Entered {
    fn lock(&self) -> MutexGuard<'_, HashMap<EntryId, Copies>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entering {
    pub(super) fn new(of: Arc<Entered>, id: EntryId) -> Self {
        Self { of, id, begun: false }
    }

    /// It enters it now. `false`: another copy is giving a hint, so that it must not.
    pub(super) fn begin(&mut self) -> bool {
        if self.begun {
            return true;
        }
        let mut entered = self.of.lock();
        let copies = entered.entry(self.id).or_default();
        if copies.hinted {
            return false;
        }
        copies.count += 1;
        self.begun = true;
        true
    }

    /// Whether the entry can only be its own, if there is one. A hint follows.
    pub(super) fn hints(&self) -> bool {
        let mut entered = self.of.lock();
        let sole = entered.get_mut(&self.id).filter(|copies| self.begun && copies.count == 1);
        sole.map(|copies| copies.hinted = true).is_some()
    }
}

impl Drop for Entering {
    fn drop(&mut self) {
        if !mem::take(&mut self.begun) {
            return;
        }
        let mut entered = self.of.lock();
        if let Some(copies) = entered.get_mut(&self.id) {
            copies.count -= 1;
            if copies.count == 0 {
                entered.remove(&self.id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallContext, call::CallIds};

    #[test]
    fn only_the_sole_copy_that_has_begun_gives_a_hint_and_none_begins_beside_it() {
        let entered = Arc::new(Entered::default());
        let id = EntryId::of(CallContext::new().identify(&mut CallIds::default()));
        let [mut one, mut two, mut late] = [(); 3].map(|()| Entering::new(Arc::clone(&entered), id));
        assert!(!one.hints());
        assert!(one.begin() && one.begin() && !two.hints());
        assert!(two.begin() && !one.hints() && !two.hints());
        drop(two);
        assert!(one.hints() && !late.begin());
        drop(late);
        drop(one);
        assert!(entered.lock().is_empty());
    }
}
