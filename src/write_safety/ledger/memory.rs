//! The ledger in memory.

use std::{
    collections::{BTreeMap, HashMap},
    fmt,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::SystemTime,
};

use super::{Entry, EntryId, Ledger, LedgerError, State};

/// How many entries in doubt it holds.
const MOST: usize = 10_000;

/// The default ledger: in memory, gone with the process. A clone is the same ledger.
///
/// It keeps the writes in doubt alone, so that a write that is answered costs next to nothing. It holds 10,000
/// of them. When it is full the oldest one without a conflict key makes place, which its event has reported;
/// those with a key stay, since their keys would be free without a word, and where all have one the next write
/// is refused. Of what is settled or forgotten by hand nothing stays but a line to `tracing`; `DurableLedger` keeps a
/// record.
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
pub struct MemoryLedger(Arc<Mutex<Book>>);

#[derive(Default)]
struct Book {
    entries: HashMap<EntryId, (u64, Entry)>,
    /// In the order in which they came.
    order: BTreeMap<u64, EntryId>,
    /// Those of them in doubt without a key.
    keyless: BTreeMap<u64, EntryId>,
    /// Those in doubt with that key.
    keys: HashMap<String, Vec<EntryId>>,
    last: u64,
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

    fn book(&self) -> MutexGuard<'_, Book> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Book {
    fn admit(&self, key: Option<&str>) -> Result<(), LedgerError> {
        let held = key.and_then(|key| self.keys.get(key)).and_then(|ids| self.entries.get(ids.first()?));
        match held {
            Some((_, entry)) => Err(LedgerError::KeyInDoubt { id: entry.id, method: entry.method.clone() }),
            None if self.entries.len() >= MOST && self.keyless.is_empty() => Err(LedgerError::Full(MOST)),
            None => Ok(()),
        }
    }

    fn insert(&mut self, entry: Entry) {
        self.remove(entry.id);
        if self.entries.len() >= MOST
            && let Some(&oldest) = self.keyless.values().next()
        {
            self.remove(oldest);
        }
        self.last += 1;
        self.order.insert(self.last, entry.id);
        let id = entry.id;
        self.entries.insert(id, (self.last, entry));
        self.index(id);
    }

    /// Notes what an entry in doubt blocks, or that it blocks nothing. One of a call under way does neither, nor does
    /// it make place for another.
    fn index(&mut self, id: EntryId) {
        let Some((place, entry)) = self.entries.get(&id) else { return };
        if !matches!(entry.state, State::InDoubt { .. }) {
            return;
        }
        match &entry.key {
            Some(key) => {
                let ids = self.keys.entry(key.clone()).or_default();
                if !ids.contains(&id) {
                    ids.push(id);
                }
            }
            None => drop(self.keyless.insert(*place, id)),
        }
    }

    fn remove(&mut self, id: EntryId) {
        let Some((place, entry)) = self.entries.remove(&id) else { return };
        self.order.remove(&place);
        self.keyless.remove(&place);
        if let Some(key) = entry.key
            && let Some(ids) = self.keys.get_mut(&key)
        {
            ids.retain(|other| *other != id);
            if ids.is_empty() {
                self.keys.remove(&key);
            }
        }
    }

    fn get_mut(&mut self, id: EntryId) -> Result<&mut Entry, LedgerError> {
        self.entries.get_mut(&id).map(|(_, entry)| entry).ok_or(LedgerError::Conflict(id))
    }

    fn settle(&mut self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        let entry = self.get_mut(id)?;
        let revision = entry.settle(revision, state, SystemTime::now())?;
        match entry.state.is_closed() {
            true => self.remove(id),
            false => self.index(id),
        }
        Ok(revision)
    }
}

impl Ledger for MemoryLedger {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        let mut book = self.book();
        if book.entries.contains_key(&entry.id) {
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
        let mut book = self.book();
        book.get_mut(id)?.claim(revision, SystemTime::now())
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let book = self.book();
        let entries = book.order.values().filter_map(|id| book.entries.get(id)).map(|(_, entry)| entry);
        Ok(entries.filter(|entry| matches!(entry.state, State::InDoubt { .. })).cloned().collect())
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let mut book = self.book();
        let revision = book.get_mut(id)?.revision;
        book.settle(id, revision, State::Forgotten { by: by.to_owned() })?;
        tracing::info!(target: "goaround", entry = %id, by, "write in doubt forgotten");
        Ok(())
    }

    fn abandon(&self, id: EntryId, state: State) {
        let mut book = self.book();
        let Ok(revision) = book.get_mut(id).map(|entry| entry.revision) else { return };
        let _ = book.settle(id, revision, state);
    }
}

impl fmt::Debug for MemoryLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLedger").field("in_doubt", &self.book().entries.len()).finish_non_exhaustive()
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
