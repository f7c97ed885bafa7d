//! What the ledger says, in memory. The same rules read the file and serve the calls.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    sync::Arc,
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use super::{
    super::{Entry, EntryId, FenceBasis, LedgerError, ServerProcess, State, order::Order},
    format::{Owner, Record},
};

/// How many writes that are not settled it holds.
pub(super) const MOST: usize = 10_000;
/// And how long their records may be together.
const MOST_BYTES: usize = 64 << 20;
/// How many writes settled by hand it remembers.
pub(super) const MOST_CLOSED: usize = 1_000;
/// How many server processes it remembers of one stack.
const MOST_SERVERS: usize = 256;
/// No entry changes so often; beyond that, numbers could run over.
const MOST_REVISION: u64 = u64::MAX / 2;

/// What is large in it is shared with whoever lists or writes it, so that nobody holds its lock for as long as
/// copying takes.
#[derive(Debug, Default)]
pub(super) struct Book {
    /// In the order in which they came.
    slots: BTreeMap<u64, Slot>,
    places: HashMap<EntryId, u64>,
    /// Those in doubt that have that key.
    doubts: HashMap<String, BTreeSet<u64>>,
    order: Order,
    servers: HashMap<Owner, Arc<Vec<ServerProcess>>>,
    /// What was settled by hand.
    closed: VecDeque<Arc<Entry>>,
    last: u64,
    bytes: usize,
}

#[derive(Debug)]
struct Slot {
    entry: Arc<Entry>,
    /// It was there when the ledger was opened: its call is over.
    earlier: bool,
    bytes: usize,
}

impl Slot {
    fn in_doubt(&self) -> bool {
        match self.entry.state {
            State::Open => self.earlier,
            _ => !self.entry.state.is_closed(),
        }
    }
}

impl Book {
    /// Whether such a write may be handed over.
    pub(super) fn admit(&self, entry: &Entry, bytes: usize) -> Result<(), LedgerError> {
        if !enterable(entry) || self.places.contains_key(&entry.id) {
            return Err(LedgerError::Conflict(entry.id));
        }
        if let Some(held) = entry.key.as_ref().and_then(|key| self.doubts.get(key)?.first())
            && let Some(held) = self.slots.get(held)
        {
            return Err(LedgerError::KeyInDoubt { id: held.entry.id, method: held.entry.method.clone() });
        }
        if self.slots.len() >= MOST || self.bytes + bytes > MOST_BYTES {
            return Err(LedgerError::Full(self.slots.len()));
        }
        Ok(())
    }

    pub(super) fn insert(&mut self, entry: Entry, bytes: usize) {
        self.last += 1;
        self.bytes += bytes;
        self.places.insert(entry.id, self.last);
        if let Some(key) = &entry.key {
            self.order.entered(key, self.last);
        }
        self.slots.insert(self.last, Slot { entry: Arc::new(entry), earlier: false, bytes });
        self.index(self.last, false);
    }

    fn place(&self, id: EntryId) -> Result<u64, LedgerError> {
        self.places.get(&id).copied().ok_or(LedgerError::Conflict(id))
    }

    pub(super) fn get(&self, id: EntryId) -> Result<&Arc<Entry>, LedgerError> {
        let slot = self.slots.get(&self.place(id)?);
        slot.map(|slot| &slot.entry).ok_or(LedgerError::Conflict(id))
    }

    /// Whether its replay would not land on another write with its conflict key, of whichever stack.
    pub(super) fn may_claim(&self, id: EntryId) -> Result<(), LedgerError> {
        let overtaken = match &self.get(id)?.key {
            Some(key) => self.order.is_overtaken(key, self.place(id)?) && !off!(OtherWrites),
            None => false,
        };
        if overtaken { Err(LedgerError::Overtaken(id)) } else { Ok(()) }
    }

    pub(super) fn settle(
        &mut self,
        id: EntryId,
        revision: u64,
        state: State,
        now: SystemTime,
    ) -> Result<u64, LedgerError> {
        self.change(id, |entry| Arc::make_mut(entry).settle(revision, state, now))
    }

    pub(super) fn claim(&mut self, id: EntryId, revision: u64, now: SystemTime) -> Result<u64, LedgerError> {
        self.change(id, |entry| Arc::make_mut(entry).claim(revision, now))
    }

    /// Makes an entry what it was, if it is at that revision still.
    pub(super) fn restore(&mut self, revision: u64, was: Arc<Entry>) {
        let _ = self.change(was.id, |entry| {
            if entry.revision == revision {
                *entry = was;
            }
            Ok(0)
        });
    }

    fn change(
        &mut self,
        id: EntryId,
        change: impl FnOnce(&mut Arc<Entry>) -> Result<u64, LedgerError>,
    ) -> Result<u64, LedgerError> {
        let place = self.place(id)?;
        let slot = self.slots.get_mut(&place).ok_or(LedgerError::Conflict(id))?;
        let was = slot.in_doubt();
        let revision = change(&mut slot.entry)?;
        if !slot.entry.state.is_closed() {
            self.index(place, was);
        } else if let Some(entry) = self.take(place, true)
            && by_hand(&entry.state)
        {
            self.remember(entry);
        }
        Ok(revision)
    }

    /// Takes an entry out, as if it had never been there.
    pub(super) fn remove(&mut self, id: EntryId) {
        if let Ok(place) = self.place(id) {
            self.take(place, false);
        }
    }

    fn take(&mut self, place: u64, settled: bool) -> Option<Arc<Entry>> {
        let Slot { entry, bytes, .. } = self.slots.remove(&place)?;
        self.places.remove(&entry.id);
        self.bytes -= bytes;
        if let Some(key) = &entry.key {
            self.unindex(key, place);
            self.order.ended(key, place, Some(&entry.state).filter(|_| settled));
        }
        Some(entry)
    }

    /// Brings the keys in doubt up to date with the entry at that place.
    fn index(&mut self, place: u64, was: bool) {
        let Some(slot) = self.slots.get(&place) else { return };
        let Some(key) = &slot.entry.key else { return };
        match (was, slot.in_doubt()) {
            (false, true) => {
                self.doubts.entry(key.clone()).or_default().insert(place);
            }
            (true, false) => {
                let key = key.clone();
                self.unindex(&key, place);
            }
            _ => {}
        }
    }

    fn unindex(&mut self, key: &str, place: u64) {
        if let Some(places) = self.doubts.get_mut(key) {
            places.remove(&place);
            if places.is_empty() {
                self.doubts.remove(key);
            }
        }
    }

    fn remember(&mut self, mut entry: Arc<Entry>) {
        if entry.arguments.is_some() {
            // Nothing will be checked any more.
            Arc::make_mut(&mut entry).arguments = None;
        }
        if self.closed.len() == MOST_CLOSED {
            self.closed.pop_front();
        }
        self.closed.push_back(entry);
    }

    /// The first of those in doubt from that place on, oldest first, as far as they are among so many, and where to
    /// go on.
    pub(super) fn in_doubt(&self, from: u64, most: usize) -> (Vec<Listed>, Option<u64>) {
        let slots = || self.slots.range(from..).take(most);
        let next = slots().nth(most - 1).map(|(place, _)| place + 1);
        let listed = |slot: &Slot| Listed {
            entry: Arc::clone(&slot.entry),
            servers: self.servers.get(&Owner(slot.entry.id.owner())).cloned(),
        };
        (slots().map(|(_, slot)| slot).filter(|slot| slot.in_doubt()).map(listed).collect(), next)
    }

    /// What was settled by hand, oldest first.
    pub(super) fn closed(&self) -> Vec<Arc<Entry>> {
        self.closed.iter().cloned().collect()
    }

    pub(super) fn servers(&self, owner: Owner) -> Arc<Vec<ServerProcess>> {
        self.servers.get(&owner).cloned().unwrap_or_default()
    }

    pub(super) fn started(&mut self, owner: Owner, server: ServerProcess) {
        Arc::make_mut(self.servers.entry(owner).or_default()).push(server);
    }

    /// Leaves out those that nothing can be learnt from.
    pub(super) fn prune(&mut self, owner: Owner, gone: &[ServerProcess]) {
        if let Some(servers) = self.servers.get_mut(&owner) {
            prune(Arc::make_mut(servers), gone);
        }
    }

    /// Takes over what a process left that is gone now: the calls of all these entries are over.
    pub(super) fn adopt(&mut self, now: Instant) {
        let places: Vec<_> = self.slots.keys().copied().collect();
        for place in places {
            let Some(slot) = self.slots.get_mut(&place) else { continue };
            let was = slot.in_doubt();
            slot.earlier = true;
            // In this very process the connection may live on, and hold bytes that are not written yet.
            let own = slot.entry.id.is_own();
            Arc::make_mut(&mut slot.entry).orphaned = (!own).then_some(now);
            self.index(place, was);
        }
        let needed: BTreeSet<_> =
            self.slots.values().map(|slot| (slot.entry.id.owner(), slot.entry.stack)).collect();
        for (owner, servers) in &mut self.servers {
            let servers = Arc::make_mut(servers);
            if owner.0 != super::super::this_run() {
                servers.retain(|server| needed.contains(&(owner.0, server.stack)));
            }
            let gone: Vec<_> = servers.iter().filter(|server| server.is_gone()).cloned().collect();
            prune(servers, &gone);
        }
        self.servers.retain(|_, servers| !servers.is_empty());
    }

    /// Applies a record of the file, that long; `None` where it cannot follow on those before it.
    pub(super) fn apply(&mut self, record: Record<'_>, bytes: usize) -> Option<()> {
        let time = |ms| SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(ms));
        match record {
            Record::Entry(entry) => {
                (enterable(&entry) && !self.places.contains_key(&entry.id)).then_some(())?;
                self.insert(entry.into_owned(), bytes);
            }
            Record::Settle { id, revision, at_ms, to } => {
                self.settle(id, revision, to.into_owned(), time(at_ms)?).ok()?;
            }
            // Whoever claimed it was allowed to then.
            Record::Claim { id, revision, at_ms } => {
                self.claim(id, revision, time(at_ms)?).ok()?;
            }
            Record::Server { owner, server } => self.started(owner, server.into_owned()),
            Record::Closed(entry) => {
                entry.state.is_closed().then_some(())?;
                self.remember(Arc::new(entry.into_owned()));
            }
        }
        Some(())
    }

    /// The book as it is now, to be written.
    pub(super) fn copy(&self) -> Copied {
        Copied {
            servers: self.servers.iter().map(|(&owner, servers)| (owner, Arc::clone(servers))).collect(),
            closed: self.closed(),
            entries: self.slots.values().map(|slot| Arc::clone(&slot.entry)).collect(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }
}

/// An entry in doubt as it is in the book, and its owner's servers.
#[derive(Debug)]
pub(super) struct Listed {
    entry: Arc<Entry>,
    servers: Option<Arc<Vec<ServerProcess>>>,
}

impl Listed {
    /// The entry with its stack's servers.
    pub(super) fn into_entry(self) -> Entry {
        let mut entry = Arc::unwrap_or_clone(self.entry);
        let servers = self.servers.iter().flat_map(|servers| servers.iter());
        let servers = servers.filter(|server| server.stack == entry.stack);
        let news: Vec<_> = servers.filter(|server| !entry.servers.contains(server)).cloned().collect();
        entry.servers.extend(news);
        entry
    }
}

/// What a book said when it was copied.
#[derive(Debug)]
pub(super) struct Copied {
    servers: Vec<(Owner, Arc<Vec<ServerProcess>>)>,
    closed: Vec<Arc<Entry>>,
    entries: Vec<Arc<Entry>>,
}

impl Copied {
    /// All that has to be in a new file.
    pub(super) fn records(&self) -> Vec<Record<'_>> {
        let servers = self.servers.iter().flat_map(|(owner, servers)| {
            servers.iter().map(|server| Record::Server { owner: *owner, server: Cow::Borrowed(server) })
        });
        let closed = self.closed.iter().map(|entry| Record::Closed(Cow::Borrowed(entry)));
        let entries = self.entries.iter().map(|entry| Record::Entry(Cow::Borrowed(entry)));
        servers.chain(closed).chain(entries).collect()
    }
}

fn enterable(entry: &Entry) -> bool {
    !entry.state.is_closed() && entry.revision <= MOST_REVISION
}

/// Whether that is remembered: what somebody said of a write, which nobody saw. A fence that the layer was told
/// of looks the same as the word of a person, and is as good.
fn by_hand(state: &State) -> bool {
    match state {
        State::Landed { by } => by != "check",
        State::NotLanded { basis, .. } => *basis == FenceBasis::Declared,
        State::Forgotten { .. } => true,
        _ => false,
    }
}

/// Of each stack's servers it keeps those that run; one whose effects may outlast it, if there is any, since
/// then no end of a process is a fence; and at least the last one.
fn prune(servers: &mut Vec<ServerProcess>, gone: &[ServerProcess]) {
    let mut kept: Vec<ServerProcess> = Vec::with_capacity(servers.len());
    for server in servers.drain(..).rev() {
        let same_stack = || kept.iter().filter(|other| other.stack == server.stack);
        let told = match server.exit_ends_effects {
            true => same_stack().next().is_some(),
            false => same_stack().any(|other| !other.exit_ends_effects),
        };
        if !(told && gone.contains(&server)) {
            kept.push(server);
        }
    }
    kept.reverse();
    let stacks: BTreeSet<_> = kept.iter().map(|server| server.stack).collect();
    for stack in stacks {
        let mut excess =
            kept.iter().filter(|server| server.stack == stack).count().saturating_sub(MOST_SERVERS);
        if excess == 0 {
            continue;
        }
        // One of them stands for those that are left out, as a process of which nothing is known.
        kept.retain_mut(|server| match server.stack == stack && excess > 0 {
            true => {
                excess -= 1;
                (server.machine, server.boot, server.started) = (None, None, None);
                excess == 0
            }
            false => true,
        });
    }
    *servers = kept;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(pid: u32, stack: u64, exit_ends_effects: bool) -> ServerProcess {
        ServerProcess {
            pid,
            started: Some(1),
            boot: Some("boot".into()),
            machine: Some("machine".into()),
            namespace: Some("pid:[1]".into()),
            stack,
            exit_ends_effects,
        }
    }

    fn pruned(mut servers: Vec<ServerProcess>, gone: &[u32]) -> Vec<u32> {
        let gone: Vec<_> = servers.iter().filter(|server| gone.contains(&server.pid)).cloned().collect();
        prune(&mut servers, &gone);
        servers.iter().map(|server| server.pid).collect()
    }

    #[test]
    fn what_is_listed_or_written_is_not_copied_under_the_lock_and_changes_no_more() {
        let mut book = Book::default();
        let id = EntryId::of(crate::CallId::from_parts(1, 1).unwrap());
        let doubt = || State::InDoubt { reason: "lost".into() };
        let entry = Entry::new(id, "pay".into(), crate::Effect::Write, 1, SystemTime::now());
        book.insert(Entry { state: doubt(), arguments: Some("x".repeat(9_000)), ..entry }, 10_000);
        let (mut listed, next) = book.in_doubt(0, 2);
        let copied = book.copy();
        let kept = Arc::clone(book.get(id).unwrap());
        assert!(
            next.is_none() && Arc::ptr_eq(&listed[0].entry, &kept) && Arc::ptr_eq(&copied.entries[0], &kept)
        );

        book.settle(id, 1, doubt(), SystemTime::now()).unwrap();
        assert_eq!(book.get(id).unwrap().revision, 2);
        assert_eq!((listed.remove(0).into_entry().revision, copied.entries[0].revision), (1, 1));
    }

    #[test]
    fn of_servers_that_are_gone_the_last_is_kept_if_no_other_is_left() {
        let all = |stack| vec![server(1, stack, true), server(2, stack, true), server(3, stack, true)];
        assert_eq!(pruned(all(1), &[]), [1, 2, 3]);
        assert_eq!(pruned(all(1), &[1, 2]), [3]);
        assert_eq!(pruned(all(1), &[1, 2, 3]), [3]);
        // The last one is kept, be it gone or not: it is the one that says so.
        assert_eq!(pruned(all(1), &[1, 3]), [2, 3]);
    }

    #[test]
    fn a_server_that_is_gone_is_kept_for_its_own_stack() {
        assert_eq!(pruned(vec![server(1, 1, true), server(2, 2, true)], &[1, 2]), [1, 2]);
    }

    #[test]
    fn a_server_whose_effects_outlast_it_is_not_forgotten_for_one_that_ends_them() {
        let servers = vec![server(1, 1, false), server(2, 1, false), server(3, 1, true)];
        assert_eq!(pruned(servers, &[1, 2, 3]), [2, 3]);
    }

    #[test]
    fn beyond_the_bound_one_that_nothing_is_known_of_stands_for_the_rest() {
        let mut servers: Vec<_> = (0..MOST_SERVERS as u32 + 20).map(|pid| server(pid, 1, true)).collect();
        for _ in 0..2 {
            prune(&mut servers, &[]);
            assert_eq!(servers.len(), MOST_SERVERS + 1);
            assert!(!servers[0].is_gone() && servers[0].machine.is_none());
            assert!(servers[1..].iter().all(|server| server.machine.is_some()));
            servers.remove(1);
            servers.push(server(9999, 1, true));
        }
    }
}
