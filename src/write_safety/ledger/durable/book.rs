//! What the ledger says, in memory. The same rules read the file and serve the calls.

use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque},
    time::{Duration, SystemTime},
};

use tokio::time::Instant;

use super::{
    super::{Entry, EntryId, FenceBasis, LedgerError, ServerProcess, State},
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

#[derive(Clone, Debug, Default)]
pub(super) struct Book {
    slots: HashMap<EntryId, Slot>,
    /// In the order in which they came.
    order: BTreeMap<u64, EntryId>,
    /// Those in doubt that have that key.
    doubts: HashMap<String, BTreeSet<u64>>,
    servers: HashMap<Owner, Vec<ServerProcess>>,
    /// What was settled by hand.
    closed: VecDeque<Entry>,
    last: u64,
    bytes: usize,
}

#[derive(Clone, Debug)]
struct Slot {
    place: u64,
    entry: Entry,
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
        if !enterable(entry) || self.slots.contains_key(&entry.id) {
            return Err(LedgerError::Conflict(entry.id));
        }
        if let Some(held) = entry.key.as_ref().and_then(|key| self.doubts.get(key)?.first())
            && let Some(held) = self.order.get(held).and_then(|id| self.slots.get(id))
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
        self.order.insert(self.last, entry.id);
        let id = entry.id;
        self.slots.insert(id, Slot { place: self.last, entry, earlier: false, bytes });
        self.index(id, false);
    }

    pub(super) fn get(&self, id: EntryId) -> Result<&Entry, LedgerError> {
        self.slots.get(&id).map(|slot| &slot.entry).ok_or(LedgerError::Conflict(id))
    }

    pub(super) fn settle(
        &mut self,
        id: EntryId,
        revision: u64,
        state: State,
        now: SystemTime,
    ) -> Result<u64, LedgerError> {
        self.change(id, |entry| entry.settle(revision, state, now))
    }

    pub(super) fn claim(&mut self, id: EntryId, revision: u64, now: SystemTime) -> Result<u64, LedgerError> {
        self.change(id, |entry| entry.claim(revision, now))
    }

    /// Makes an entry what it was, if it is at that revision still.
    pub(super) fn restore(&mut self, revision: u64, was: Entry) {
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
        change: impl FnOnce(&mut Entry) -> Result<u64, LedgerError>,
    ) -> Result<u64, LedgerError> {
        let slot = self.slots.get_mut(&id).ok_or(LedgerError::Conflict(id))?;
        let was = slot.in_doubt();
        let revision = change(&mut slot.entry)?;
        if !slot.entry.state.is_closed() {
            self.index(id, was);
        } else if let Some(entry) = self.remove(id)
            && by_hand(&entry.state)
        {
            self.remember(entry);
        }
        Ok(revision)
    }

    /// Takes an entry out, as if it had never been there.
    pub(super) fn remove(&mut self, id: EntryId) -> Option<Entry> {
        let Slot { place, entry, bytes, .. } = self.slots.remove(&id)?;
        self.order.remove(&place);
        self.bytes -= bytes;
        self.unindex(entry.key.as_deref(), place);
        Some(entry)
    }

    /// Brings the keys in doubt up to date with that entry.
    fn index(&mut self, id: EntryId, was: bool) {
        let Some(slot) = self.slots.get(&id) else { return };
        let Some(key) = &slot.entry.key else { return };
        match (was, slot.in_doubt()) {
            (false, true) => {
                self.doubts.entry(key.clone()).or_default().insert(slot.place);
            }
            (true, false) => {
                let (key, place) = (key.clone(), slot.place);
                self.unindex(Some(&key), place);
            }
            _ => {}
        }
    }

    fn unindex(&mut self, key: Option<&str>, place: u64) {
        if let Some(key) = key
            && let Some(places) = self.doubts.get_mut(key)
        {
            places.remove(&place);
            if places.is_empty() {
                self.doubts.remove(key);
            }
        }
    }

    fn remember(&mut self, mut entry: Entry) {
        // Nothing will be checked any more.
        entry.arguments = None;
        if self.closed.len() == MOST_CLOSED {
            self.closed.pop_front();
        }
        self.closed.push_back(entry);
    }

    /// The entries in doubt, oldest first.
    pub(super) fn in_doubt(&self) -> Vec<Entry> {
        let slots = self.order.values().filter_map(|id| self.slots.get(id)).filter(|slot| slot.in_doubt());
        let with_servers = |slot: &Slot| {
            let mut entry = slot.entry.clone();
            let servers = self.servers.get(&Owner(entry.id.owner())).into_iter().flatten();
            let servers = servers.filter(|server| server.stack == entry.stack);
            let news: Vec<_> = servers.filter(|server| !entry.servers.contains(server)).cloned().collect();
            entry.servers.extend(news);
            entry
        };
        slots.map(with_servers).collect()
    }

    /// What was settled by hand, oldest first.
    pub(super) fn closed(&self) -> Vec<Entry> {
        self.closed.iter().cloned().collect()
    }

    pub(super) fn servers(&self, owner: Owner) -> Vec<ServerProcess> {
        self.servers.get(&owner).cloned().unwrap_or_default()
    }

    pub(super) fn started(&mut self, owner: Owner, server: ServerProcess) {
        self.servers.entry(owner).or_default().push(server);
    }

    /// Leaves out those that nothing can be learnt from.
    pub(super) fn prune(&mut self, owner: Owner, gone: &[ServerProcess]) {
        if let Some(servers) = self.servers.get_mut(&owner) {
            prune(servers, gone);
        }
    }

    /// Takes over what a process left that is gone now: the calls of all these entries are over.
    pub(super) fn adopt(&mut self, now: Instant) {
        let ids: Vec<_> = self.order.values().copied().collect();
        for &id in &ids {
            let Some(slot) = self.slots.get_mut(&id) else { continue };
            let was = slot.in_doubt();
            slot.earlier = true;
            // In this very process the connection may live on, and hold bytes that are not written yet.
            slot.entry.orphaned = (!id.is_own()).then_some(now);
            self.index(id, was);
        }
        let needed: BTreeSet<_> =
            self.slots.values().map(|slot| (slot.entry.id.owner(), slot.entry.stack)).collect();
        for (owner, servers) in &mut self.servers {
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
                (enterable(&entry) && !self.slots.contains_key(&entry.id)).then_some(())?;
                self.insert(entry.into_owned(), bytes);
            }
            Record::Settle { id, revision, at_ms, to } => {
                self.settle(id, revision, to.into_owned(), time(at_ms)?).ok()?;
            }
            Record::Claim { id, revision, at_ms } => {
                self.claim(id, revision, time(at_ms)?).ok()?;
            }
            Record::Server { owner, server } => self.started(owner, server.into_owned()),
            Record::Closed(entry) => {
                entry.state.is_closed().then_some(())?;
                self.remember(entry.into_owned());
            }
        }
        Some(())
    }

    /// All that has to be in a new file.
    pub(super) fn records(&self) -> Vec<Record<'_>> {
        let servers = self.servers.iter().flat_map(|(&owner, servers)| {
            servers.iter().map(move |server| Record::Server { owner, server: Cow::Borrowed(server) })
        });
        let closed = self.closed.iter().map(|entry| Record::Closed(Cow::Borrowed(entry)));
        let slots = self.order.values().filter_map(|id| self.slots.get(id));
        let entries = slots.map(|slot| Record::Entry(Cow::Borrowed(&slot.entry)));
        servers.chain(closed).chain(entries).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.slots.len()
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
