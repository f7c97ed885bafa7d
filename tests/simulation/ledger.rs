//! A ledger as a database keeps it: each step takes time and may fail, before it is stored or after. It
//! survives a crash of its client.

use std::{collections::BTreeMap, time::SystemTime};

use goaround::{
    BoxError,
    write_safety::ledger::{Entry, EntryId, Ledger, LedgerError, State},
};
use tokio::time::{Instant, sleep};

use crate::{
    judge::Wrong,
    world::{Branch, World, note},
};

/// What is stored.
#[derive(Default)]
pub struct Book {
    entries: BTreeMap<EntryId, Entry>,
    /// How often the client was started.
    pub run: u32,
    /// The writes whose last word could not be stored.
    pub unsettled: Vec<EntryId>,
}

/// One run of the client, as far as its database knows it.
#[derive(Clone)]
pub struct Store {
    world: World,
    run: u32,
}

impl Store {
    pub fn new(world: &World) -> Self {
        Self { world: world.clone(), run: world.lock().book.run }
    }

    /// Waits, and decides whether the step fails, and whether it was stored all the same.
    async fn step(&self) -> Result<bool, LedgerError> {
        let world = &self.world;
        if world.chance(30) {
            sleep(world.wait(1_500)).await;
        }
        let fails = world.fault(world.plan().faults.ledger_fails);
        if world.lock().book.run != self.run || (fails && world.chance(50)) {
            return Err(unavailable());
        }
        Ok(!fails)
    }

    fn change(
        &self,
        id: EntryId,
        change: impl FnOnce(&mut Entry) -> Result<u64, LedgerError>,
    ) -> Result<u64, LedgerError> {
        let mut state = self.world.lock();
        change(state.book.entries.get_mut(&id).ok_or(LedgerError::Conflict(id))?)
    }
}

fn unavailable() -> LedgerError {
    LedgerError::Unavailable(BoxError::from("no disk"))
}

impl Ledger for Store {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        let acknowledged = self.step().await;
        if acknowledged.is_err() {
            self.world.cover(Branch::LedgerCannotEnter);
        }
        let acknowledged = acknowledged?;
        let mut state = self.world.lock();
        let run = self.run;
        let in_the_way = |held: &&Entry| {
            let in_doubt = matches!(held.state, State::InDoubt { .. })
                || (matches!(held.state, State::Open) && state.runs.get(&held.id) != Some(&run));
            held.key.is_some() && held.key == entry.key && in_doubt
        };
        if let Some(held) = state.book.entries.values().find(in_the_way) {
            return Err(LedgerError::KeyInDoubt { id: held.id, method: held.method.clone() });
        }
        let (id, revision) = (entry.id, entry.revision);
        state.runs.insert(id, run);
        let before = state.book.entries.insert(id, entry);
        drop(state);
        if before.is_some() {
            self.world.twice(id);
        }
        note!(self.world, "ledger: entered");
        if acknowledged { Ok(revision) } else { Err(unavailable()) }
    }

    async fn settle(&self, id: EntryId, revision: u64, to: State) -> Result<u64, LedgerError> {
        let acknowledged = self.step().await;
        if acknowledged.is_err() {
            self.world.cover(Branch::LedgerCannotSettle);
            self.world.lock().book.unsettled.push(id);
        }
        let acknowledged = acknowledged?;
        note!(self.world, "ledger: {to:?}");
        let settled = self.change(id, |entry| entry.settle(revision, to, SystemTime::UNIX_EPOCH));
        if acknowledged { settled } else { Err(unavailable()) }
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let acknowledged = self.step().await;
        if acknowledged.is_err() {
            self.world.cover(Branch::LedgerCannotClaim);
        }
        let acknowledged = acknowledged?;
        let claimed = self.change(id, |entry| entry.claim(revision, SystemTime::UNIX_EPOCH));
        note!(self.world, "ledger: claimed: {}", claimed.is_ok());
        if acknowledged {
            self.world.lock().claimed.insert(id);
            claimed
        } else {
            Err(unavailable())
        }
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let state = self.world.lock();
        let run = self.run;
        let listed = state.book.entries.values().filter(|entry| match entry.state {
            State::Open => state.runs.get(&entry.id) != Some(&run),
            State::InDoubt { .. } => true,
            _ => false,
        });
        let listed = listed.cloned().map(|mut entry| {
            entry.orphaned = Some(Instant::now());
            entry
        });
        Ok(listed.collect())
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let by = State::Forgotten { by: by.to_owned() };
        self.change(id, |entry| entry.settle(entry.revision, by, SystemTime::UNIX_EPOCH)).map(drop)
    }

    fn abandon(&self, id: EntryId, to: State) {
        // A process that has crashed says nothing.
        if self.world.lock().book.run == self.run {
            note!(self.world, "ledger: abandoned as {to:?}");
            let _ = self.change(id, |entry| entry.settle(entry.revision, to, SystemTime::UNIX_EPOCH));
        }
    }
}

impl World {
    pub fn book(&self) -> Vec<Entry> {
        self.lock().book.entries.values().cloned().collect()
    }

    fn twice(&self, id: EntryId) {
        let token = self.lock().tokens.get(&id.call()).copied();
        self.wrong(Wrong::Ledger { write: token.unwrap_or_default(), what: "it was entered twice" });
    }

    /// Whether the ledger knows how that write ended.
    pub fn is_closed(&self, token: u32) -> bool {
        let state = self.lock();
        let of_it = |entry: &&Entry| state.tokens.get(&entry.id.call()) == Some(&token);
        state.book.entries.values().find(of_it).is_some_and(|entry| entry.state.is_closed())
    }

    /// The client's process is gone: nothing of it reaches the ledger any more.
    pub fn crash(&self) {
        note!(self, "CRASH");
        self.lock().book.run += 1;
        self.cover(Branch::Crash);
        self.give_all_up();
    }
}
