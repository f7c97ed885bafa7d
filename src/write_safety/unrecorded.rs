//! Doubts that stayed when their calls were over, and that the ledger has not recorded. Without them it would let later
//! writes with their keys in.

use std::{
    collections::BTreeMap,
    future::{Future, poll_fn},
    ops::Bound,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::Poll,
};

use super::{
    account::PATIENCE,
    ledger::{DynLedger, EntryId, LedgerError, MOST_IN_DOUBT, State},
};

/// For how many keys it is tried, at most, to make room for a write when there is none.
const TRIES: usize = 4;

/// Such a doubt.
#[derive(Clone, Debug)]
pub(super) struct Unrecorded {
    pub(super) id: EntryId,
    pub(super) method: String,
    pub(super) revision: u64,
    /// Whether its replay may have been claimed since.
    pub(super) claiming: bool,
    pub(super) state: State,
}

/// All of them, of all services that share a ledger, until it has recorded them, which each write with a conflict key
/// tries. When there are as many as the ledger in memory would hold no such write is entered; none is forgotten to make
/// room.
#[derive(Debug, Default)]
pub(super) struct Backlog(Mutex<Doubts>);

#[derive(Debug, Default)]
struct Doubts {
    of: BTreeMap<Arc<str>, Vec<Unrecorded>>,
    count: usize,
    /// The key whose turn was last.
    tried: Option<Arc<str>>,
}

impl Backlog {
    pub(super) fn is_empty(&self) -> bool {
        self.lock().count == 0
    }

    fn is_full(&self) -> bool {
        self.lock().count >= MOST_IN_DOUBT
    }

    pub(super) fn keep(&self, key: &Arc<str>, doubt: Unrecorded) {
        let mut doubts = self.lock();
        doubts.of.entry(Arc::clone(key)).or_default().push(doubt);
        doubts.count += 1;
    }

    fn with(&self, key: &str) -> Vec<Unrecorded> {
        self.lock().of.get(key).cloned().unwrap_or_default()
    }

    /// Those with the key whose turn it is.
    fn next(&self) -> Option<(Arc<str>, Vec<Unrecorded>)> {
        let mut doubts = self.lock();
        let Doubts { of, tried, .. } = &mut *doubts;
        let after = tried.as_deref().map_or(Bound::Unbounded, Bound::Excluded);
        let next = of.range::<str, _>((after, Bound::Unbounded)).next();
        let (key, with_it) = next.or_else(|| of.first_key_value())?;
        *tried = Some(Arc::clone(key));
        Some((Arc::clone(key), with_it.clone()))
    }

    fn remove(&self, key: &str, id: EntryId) {
        let mut doubts = self.lock();
        let Doubts { of, count, .. } = &mut *doubts;
        let Some(with_it) = of.get_mut(key) else { return };
        let before = with_it.len();
        with_it.retain(|doubt| doubt.id != id);
        *count -= before - with_it.len();
        if with_it.is_empty() {
            of.remove(key);
        }
    }

    /// Before a write with that key is entered: the ledger has to record those with the same key, and others until
    /// there is room for one more.
    pub(super) async fn make_way(&self, ledger: &Arc<dyn DynLedger>, key: &str) -> Result<(), LedgerError> {
        for doubt in self.with(key) {
            if !self.record(ledger, key, &doubt).await {
                return Err(LedgerError::KeyInDoubt { id: doubt.id, method: doubt.method });
            }
        }
        if self.is_full() {
            let _ = tokio::time::timeout(PATIENCE, self.make_room(ledger)).await;
        }
        // Calls under way may still add to them.
        if self.is_full() { Err(LedgerError::Full(MOST_IN_DOUBT)) } else { Ok(()) }
    }

    async fn make_room(&self, ledger: &Arc<dyn DynLedger>) {
        for _ in 0..TRIES {
            self.record_next(ledger).await;
            if !self.is_full() {
                return;
            }
        }
    }

    /// Has the ledger record those with one key. Another one has its turn next, be it that this fails.
    async fn record_next(&self, ledger: &Arc<dyn DynLedger>) {
        let Some((key, doubts)) = self.next() else { return };
        for doubt in doubts {
            if !self.record(ledger, &key, &doubt).await {
                return;
            }
        }
    }

    /// Waits for the first; what is left is tried meanwhile, as far as it comes by then.
    pub(super) async fn record_some_during<T>(
        &self,
        ledger: &Arc<dyn DynLedger>,
        first: impl Future<Output = T>,
    ) -> T {
        let (mut first, mut besides) = (pin!(first), pin!(self.record_next(ledger)));
        let mut goes_on = true;
        poll_fn(|cx| {
            goes_on = goes_on && besides.as_mut().poll(cx).is_pending();
            first.as_mut().poll(cx)
        })
        .await
    }

    /// Whether the ledger has that doubt now, or somebody else has settled it.
    async fn record(&self, ledger: &Arc<dyn DynLedger>, key: &str, doubt: &Unrecorded) -> bool {
        let settle = |revision| caught(Arc::clone(ledger).settle(doubt.id, revision, doubt.state.clone()));
        let mut settled = settle(doubt.revision).await;
        if doubt.claiming && matches!(settled, Some(Err(LedgerError::Conflict(_)))) {
            // As it is if the claim was taken.
            settled = settle(doubt.revision.saturating_add(1)).await;
        }
        let is_recorded = matches!(settled, Some(Ok(_) | Err(LedgerError::Conflict(_))));
        if is_recorded {
            self.remove(key, doubt.id);
        }
        is_recorded
    }

    fn lock(&self) -> MutexGuard<'_, Doubts> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// `None` if it panics: a ledger is foreign code, and what it does with another write's entry is not this one's affair.
pub(super) async fn caught<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(future);
    poll_fn(|cx| match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
        Ok(polled) => polled.map(Some),
        Err(_) => Poll::Ready(None),
    })
    .await
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::time::Instant;

    use super::{super::ledger::Entry, *};
    use crate::CallId;

    fn id(n: u64) -> EntryId {
        EntryId::of(CallId::from_parts(1, n).unwrap())
    }

    fn doubt(n: u64) -> Unrecorded {
        let state = State::InDoubt { reason: "tested".into() };
        Unrecorded { id: id(n), method: "pay".into(), revision: 1, claiming: false, state }
    }

    /// A ledger for which an entry's number says what becomes of its end.
    struct Moody;

    impl super::super::ledger::Ledger for Moody {
        async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
            Ok(entry.revision)
        }
        async fn settle(&self, of: EntryId, revision: u64, _: State) -> Result<u64, LedgerError> {
            match of {
                _ if of == id(1) => Err(LedgerError::Unavailable("as tested".into())),
                _ if of == id(2) => panic!("as tested"),
                _ if of == id(3) => Err(LedgerError::Conflict(of)),
                _ if of == id(4) => pending().await,
                _ => Ok(revision + 1),
            }
        }
        async fn claim(&self, of: EntryId, _: u64) -> Result<u64, LedgerError> {
            Err(LedgerError::Conflict(of))
        }
        async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
            Ok(Vec::new())
        }
        async fn forget(&self, of: EntryId, _: &str) -> Result<(), LedgerError> {
            Err(LedgerError::Conflict(of))
        }
    }

    fn moody() -> Arc<dyn DynLedger> {
        Arc::new(Moody)
    }

    #[tokio::test]
    async fn what_cannot_be_recorded_does_not_keep_what_can_from_its_turn() {
        let backlog = Backlog::default();
        for (key, n) in [("a", 1), ("b", 2), ("c", 3), ("d", 5), ("d", 6), ("e", 7)] {
            backlog.keep(&key.into(), doubt(n));
        }
        for _ in 0..5 {
            backlog.record_some_during(&moody(), async {}).await;
        }
        let left: Vec<_> = backlog.lock().of.keys().map(|key| key.to_string()).collect();
        assert_eq!((left, backlog.lock().count), (vec!["a".to_owned(), "b".to_owned()], 2));
        // Their own keys stay closed, and no others.
        for (key, n) in [("a", 1), ("b", 2)] {
            let refused = backlog.make_way(&moody(), key).await.unwrap_err();
            assert!(matches!(refused, LedgerError::KeyInDoubt { id: of, .. } if of == id(n)));
        }
        backlog.make_way(&moody(), "c").await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    #[cfg_attr(miri, ignore = "ten thousand doubts")]
    async fn without_room_it_is_made_within_a_time_or_the_write_turned_away() {
        let backlog = Backlog::default();
        backlog.keep(&"hangs".into(), doubt(4));
        for n in 1..MOST_IN_DOUBT as u64 {
            backlog.keep(&format!("key {n}").into(), doubt(1000 + n));
        }
        let start = Instant::now();
        let refused = backlog.make_way(&moody(), "mine").await.unwrap_err();
        assert!(matches!(refused, LedgerError::Full(MOST_IN_DOUBT)));
        assert_eq!(start.elapsed(), PATIENCE);
        // Another one has its turn.
        backlog.make_way(&moody(), "mine").await.unwrap();
        assert_eq!((start.elapsed(), backlog.lock().count), (PATIENCE, MOST_IN_DOUBT - 1));
    }
}
