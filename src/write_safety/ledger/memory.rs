//! The ledger in memory.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use super::{super::conflicts::Keys, Entry, EntryId, Ledger, LedgerError, State, order::Order};

/// How many entries in doubt it holds.
pub(in super::super) const MOST: usize = 10_000;
/// How many of them are listed at a time: nobody waits for a whole listing.
const PORTION: usize = 256;

/// The default ledger: in memory, gone with the process. A clone is the same ledger.
///
/// It keeps the writes in doubt alone, so that a write that is answered costs next to nothing. It holds 10,000
/// of them. When it is full the oldest one without a conflict key makes place, which its event has reported;
/// those with a key stay, since their keys would be free without a word, and where all have one the next write
/// is refused. Of what is settled or forgotten by hand nothing stays but a line to `tracing`; `DurableLedger` keeps a
/// record.
///
/// Of nested layers that share it, a write has one entry, under the key of the outermost that has one; it blocks the
/// keys of all of them.
///
/// ```
/// use goaround::{WriteSafetyLayer, jsonrpc::{Request, Response}, write_safety::ledger::{Ledger, MemoryLedger}};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), goaround::BoxError> {
/// let ledger = MemoryLedger::new();
/// let _layer = WriteSafetyLayer::<Request, Response>::refuse().ledger(ledger.clone());
/// // … later: what became of the writes that nobody knows of?
/// for entry in ledger.in_doubt().await? {
///     println!("{} {}", entry.id, entry.method);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Default)]
pub struct MemoryLedger(Arc<Inner>);

#[derive(Default)]
struct Inner {
    book: Mutex<Book>,
    keys: Keys,
}

#[derive(Default)]
struct Book {
    /// In the order in which they came.
    slots: BTreeMap<u64, Slot>,
    places: HashMap<EntryId, u64>,
    /// Those of them in doubt without a key.
    keyless: BTreeSet<u64>,
    /// Those in doubt with that key.
    keys: HashMap<String, Vec<u64>>,
    order: Order,
    last: u64,
}

struct Slot {
    /// Shared with whoever lists it.
    entry: Arc<Entry>,
    /// What other layers of the same write call it.
    further_keys: Vec<String>,
}

impl Slot {
    fn keys(&self) -> impl Iterator<Item = &String> {
        self.entry.key.iter().chain(&self.further_keys)
    }
}

impl MemoryLedger {
    /// An empty ledger.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whether a write with that key may be handed over.
    pub(in super::super) fn admit(&self, key: &str) -> Result<(), LedgerError> {
        self.book().admit(Some(key))
    }

    /// Keeps a write whose call is over, and of which nobody knows.
    pub(in super::super) fn keep(&self, entry: Entry) {
        self.book().insert(entry);
    }

    /// The conflict keys of calls under way, of all stacks.
    pub(in super::super) fn keys(&self) -> &Keys {
        &self.0.keys
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.book.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn admit(&self, key: Option<&str>) -> Result<(), LedgerError> {
        let place = key.and_then(|key| self.keys.get(key)?.first());
        let held = place.and_then(|place| self.slots.get(place));
        match held.map(|slot| &slot.entry) {
            Some(entry) => Err(LedgerError::KeyInDoubt { id: entry.id, method: entry.method.clone() }),
            None if self.slots.len() >= MOST && self.keyless.is_empty() => Err(LedgerError::Full(MOST)),
            None => Ok(()),
        }
    }

    /// Puts an entry in. Of a write that is there, by a layer further in, it takes the place and keeps the keys.
    fn insert(&mut self, entry: Entry) {
        let (place, further_keys) = match self.remove(entry.id, None) {
            Some((place, earlier)) => {
                let keys = earlier.keys().filter(|key| entry.key.as_ref() != Some(*key));
                (place, keys.cloned().collect())
            }
            None => {
                if self.slots.len() >= MOST
                    && let Some(oldest) = self.keyless.first().and_then(|place| self.slots.get(place))
                {
                    self.remove(oldest.entry.id, None);
                }
                self.last += 1;
                (self.last, Vec::new())
            }
        };
        self.places.insert(entry.id, place);
        let slot = Slot { entry: Arc::new(entry), further_keys };
        for key in slot.keys() {
            self.order.entered(key, place);
        }
        self.slots.insert(place, slot);
        self.index(place);
    }

    /// Notes what an entry in doubt blocks, or that it blocks nothing. One of a call under way does neither, nor does
    /// it make place for another.
    fn index(&mut self, place: u64) {
        let Some(slot) = self.slots.get(&place) else { return };
        if !matches!(slot.entry.state, State::InDoubt { .. }) {
            return;
        }
        if slot.keys().next().is_none() {
            self.keyless.insert(place);
        }
        for key in slot.keys() {
            let places = self.keys.entry(key.clone()).or_default();
            if !places.contains(&place) {
                places.push(place);
            }
        }
    }

    /// Takes an entry out, with what became of it, if something did.
    fn remove(&mut self, id: EntryId, state: Option<&State>) -> Option<(u64, Slot)> {
        let place = self.places.remove(&id)?;
        let slot = self.slots.remove(&place)?;
        self.keyless.remove(&place);
        for key in slot.keys() {
            self.order.ended(key, place, state);
            if let Some(places) = self.keys.get_mut(key) {
                places.retain(|other| *other != place);
                if places.is_empty() {
                    self.keys.remove(key);
                }
            }
        }
        Some((place, slot))
    }

    fn get(&self, id: EntryId) -> Result<(u64, &Slot), LedgerError> {
        let slot = self.places.get(&id).and_then(|place| Some((*place, self.slots.get(place)?)));
        slot.ok_or(LedgerError::Conflict(id))
    }

    fn get_mut(&mut self, id: EntryId) -> Result<&mut Entry, LedgerError> {
        let slot = self.places.get(&id).and_then(|place| self.slots.get_mut(place));
        slot.map(|slot| Arc::make_mut(&mut slot.entry)).ok_or(LedgerError::Conflict(id))
    }

    fn settle(&mut self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        let place = self.get(id)?.0;
        let entry = self.get_mut(id)?;
        let revision = entry.settle(revision, state, SystemTime::now())?;
        match entry.state.is_closed().then(|| entry.state.clone()) {
            Some(state) => drop(self.remove(id, Some(&state))),
            None => self.index(place),
        }
        Ok(revision)
    }

    fn claim(&mut self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let (place, slot) = self.get(id)?;
        if slot.keys().any(|key| self.order.is_overtaken(key, place)) && !off!(OtherWrites) {
            return Err(LedgerError::Overtaken(id));
        }
        self.get_mut(id)?.claim(revision, SystemTime::now())
    }
}

impl Ledger for MemoryLedger {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        let mut book = self.book();
        if book.places.contains_key(&entry.id) {
            return Err(LedgerError::Conflict(entry.id));
        }
        book.admit(entry.key.as_deref())?;
        let revision = entry.revision;
        book.insert(entry);
        Ok(revision)
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.book().settle(id, revision, state)
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.book().claim(id, revision)
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let mut entries: Vec<Entry> = Vec::new();
        let mut from = Some(0);
        while let Some(place) = from {
            let listed: Vec<_> = {
                let book = self.book();
                let slots = || book.slots.range(place..).take(PORTION);
                from = slots().nth(PORTION - 1).map(|(place, _)| place + 1);
                let in_doubt = |entry: &&Arc<Entry>| matches!(entry.state, State::InDoubt { .. });
                slots().map(|(_, slot)| &slot.entry).filter(in_doubt).cloned().collect()
            };
            entries.extend(listed.into_iter().map(Arc::unwrap_or_clone));
        }
        Ok(entries)
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let mut book = self.book();
        let revision = book.get(id)?.1.entry.revision;
        book.settle(id, revision, State::Forgotten { by: by.to_owned() })?;
        tracing::info!(target: "goaround", entry = %id, by, "write in doubt forgotten");
        Ok(())
    }

    fn abandon(&self, id: EntryId, state: State) {
        let mut book = self.book();
        let Ok((_, slot)) = book.get(id) else { return };
        if slot.entry.state == State::Open {
            let revision = slot.entry.revision;
            let _ = book.settle(id, revision, state);
        }
    }
}

impl fmt::Debug for MemoryLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLedger").field("in_doubt", &self.book().slots.len()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CallId, Effect};

    fn entry(n: u64, key: Option<&str>) -> Entry {
        let id = EntryId::of(CallId::from_parts(7, n).unwrap());
        let mut entry = Entry::new(id, "pay".into(), Effect::Write, 1, SystemTime::now());
        entry.key = key.map(str::to_owned);
        entry.state = State::InDoubt { reason: "lost".into() };
        entry
    }

    #[tokio::test]
    async fn a_key_in_doubt_is_free_again_once_its_write_is_settled_or_forgotten() {
        let ledger = MemoryLedger::new();
        for n in 0..2 {
            let write = entry(n, Some("account 7"));
            ledger.keep(write.clone());
            assert!(
                matches!(ledger.admit("account 7"), Err(LedgerError::KeyInDoubt { id, .. }) if id == write.id)
            );
            ledger.admit("account 8").unwrap();
            match n {
                0 => ledger.forget(write.id, "jane").await.unwrap(),
                _ => {
                    let landed = State::Landed { by: "jane".into() };
                    let stale = ledger.settle(write.id, write.revision + 1, landed.clone()).await;
                    assert!(matches!(stale, Err(LedgerError::Conflict(_))));
                    ledger.settle(write.id, write.revision, landed).await.unwrap();
                }
            }
            ledger.admit("account 7").unwrap();
            assert!(ledger.in_doubt().await.unwrap().is_empty());
            assert!(matches!(ledger.forget(write.id, "jane").await, Err(LedgerError::Conflict(_))));
        }
    }

    #[tokio::test]
    #[cfg_attr(miri, ignore = "ten thousand entries")]
    async fn a_full_ledger_drops_what_blocks_nothing_and_then_admits_no_more() {
        let ledger = MemoryLedger::new();
        ledger.keep(entry(0, None));
        for n in 1..=MOST as u64 {
            ledger.admit("other").unwrap();
            ledger.keep(entry(n, Some(&n.to_string())));
        }
        let kept = ledger.in_doubt().await.unwrap();
        assert_eq!((kept.len(), kept[0].key.as_deref()), (MOST, Some("1")));
        assert!(matches!(ledger.admit("other"), Err(LedgerError::Full(MOST))));
    }

    /// It may come from a copy of the call that was never handed over.
    #[tokio::test]
    async fn a_hint_settles_no_doubt() {
        let ledger = MemoryLedger::new();
        let write = entry(1, Some("account 7"));
        ledger.keep(write.clone());
        Ledger::abandon(&ledger, write.id, State::not_done("its caller left"));
        assert_eq!(ledger.in_doubt().await.unwrap().len(), 1);
        assert!(ledger.admit("account 7").is_err());
    }

    #[tokio::test]
    async fn one_of_two_claims_succeeds() {
        let ledger = MemoryLedger::new();
        let write = entry(1, None);
        let revision = ledger.enter(write.clone()).await.unwrap();
        assert!(matches!(ledger.enter(write.clone()).await, Err(LedgerError::Conflict(_))));
        let claimed = ledger.claim(write.id, revision).await.unwrap();
        for revision in [revision, claimed] {
            assert!(matches!(ledger.claim(write.id, revision).await, Err(LedgerError::Conflict(_))));
        }
    }
}
