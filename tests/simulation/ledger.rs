//! A ledger as a database keeps it: each step takes time and may fail, before it is stored or after. It
//! survives a crash of its client. In some worlds the real one in a file does the same: see `durable`.

use std::{collections::BTreeMap, mem::discriminant, time::SystemTime};

use goaround::{
    BoxError, CallId,
    write_safety::ledger::{Entry, EntryId, Ledger, LedgerError, State},
};
use tokio::time::{Instant, sleep};

#[cfg(not(feature = "ledger-durable"))]
use self::without::OnFile;
#[cfg(feature = "ledger-durable")]
use crate::durable::OnFile;
use crate::{
    judge::Wrong,
    world::{Branch, Lies, State as WorldState, World, note},
};

/// What is stored.
#[derive(Default)]
pub struct Book {
    entries: BTreeMap<CallId, Entry>,
    /// How often the client was started.
    pub run: u32,
    /// The writes whose last word could not be stored, or was lost in a crash.
    pub unsettled: Vec<CallId>,
    /// The file that says the same, if there is one.
    pub file: Option<OnFile>,
}

impl Book {
    /// One that is in a file, too.
    pub fn on_file(seed: u64, lies: Lies) -> Self {
        Self { file: OnFile::new(seed, lies), ..Self::default() }
    }
}

/// One run of the client, as far as its database knows it.
#[derive(Clone)]
pub struct Store {
    world: World,
    run: u32,
}

impl Store {
    pub fn new(world: &World) -> Self {
        let mut state = world.lock();
        let run = state.book.run;
        if let Some(file) = &mut state.book.file {
            let left = file.open(run);
            state.covered |= 1 << Branch::OnFile as u64;
            state.covered |= u128::from(left > 0) << Branch::FileHadDoubts as u64;
        }
        drop(state);
        Self { world: world.clone(), run }
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

    /// Changes an entry, here and in the file.
    fn change(
        &self,
        id: EntryId,
        on_file: impl FnOnce(&mut OnFile, Option<&Entry>) -> Result<u64, LedgerError>,
        change: impl FnOnce(&mut Entry) -> Result<u64, LedgerError>,
    ) -> Result<u64, LedgerError> {
        let mut guard = self.world.lock();
        let state = &mut *guard;
        let held = state.book.entries.get(&id.call());
        let here = held.cloned().ok_or(LedgerError::Conflict(id));
        let here = here.and_then(|mut entry| Ok((change(&mut entry)?, entry)));
        let on_file = state.book.file.as_mut().map(|file| on_file(file, held));
        let (told, entry) = match here {
            Ok((revision, entry)) => (Ok(revision), Some(entry)),
            Err(error) => (Err(error), None),
        };
        let (told, agree) = said_by_both(state, on_file, told);
        if let Some(entry) = entry.filter(|_| told.is_ok()) {
            state.changed(self.run, entry);
        }
        drop(guard);
        self.differs(id, agree);
        told
    }

    fn differs(&self, id: EntryId, agree: bool) {
        if !agree {
            let write = self.world.lock().tokens.get(&id.call()).copied().unwrap_or_default();
            self.world.wrong(Wrong::Ledger { write, what: "its file says otherwise" });
        }
    }
}

/// What the file says, if there is one, and whether that is what is said here.
fn said_by_both(
    state: &WorldState,
    on_file: Option<Result<u64, LedgerError>>,
    here: Result<u64, LedgerError>,
) -> (Result<u64, LedgerError>, bool) {
    let Some(on_file) = on_file else { return (here, true) };
    let agree = match (&on_file, &here) {
        (Ok(one), Ok(other)) => one == other,
        // That is not looked at here.
        (Err(LedgerError::Overtaken(id)), Ok(_)) => {
            let key = state.book.entries.get(&id.call()).and_then(|entry| entry.key.as_ref());
            let has_it = |other: &&Entry| other.key.as_ref() == key;
            key.is_some() && state.book.entries.values().filter(has_it).count() > 1
        }
        (Err(one), Err(other)) => discriminant(one) == discriminant(other),
        _ => false,
    };
    (on_file, agree)
}

impl WorldState {
    /// Keeps an entry as it is now, changed by that run of the client.
    fn changed(&mut self, run: u32, entry: Entry) {
        let call = entry.id.call();
        if entry.state.is_closed() && self.runs.get(&call).is_some_and(|entered| *entered < run) {
            if self.book.file.is_some() {
                self.covered |= 1 << Branch::FileResolved as u64;
            }
            // What the crash left open is settled, so that its key is free.
            let seen = self.tokens.get(&call).and_then(|token| self.calls.get_mut(token));
            seen.into_iter().for_each(|seen| seen.in_doubt = None);
        }
        self.book.entries.insert(call, entry);
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
        let mut guard = self.world.lock();
        let (state, run) = (&mut *guard, self.run);
        let is_earlier = |held: &Entry| state.runs.get(&held.id.call()) != Some(&run);
        let in_the_way = |held: &&Entry| {
            let in_doubt = matches!(held.state, State::InDoubt { .. })
                || (matches!(held.state, State::Open) && is_earlier(held));
            held.key.is_some() && held.key == entry.key && in_doubt
        };
        let held = state.book.entries.values().find(in_the_way);
        let from_before = held.is_some_and(is_earlier);
        let here = match held {
            Some(held) => Err(LedgerError::KeyInDoubt { id: held.id, method: held.method.clone() }),
            None => Ok(entry.revision),
        };
        let on_file = state.book.file.as_mut().map(|file| file.enter(&entry));
        if from_before && on_file.is_some() {
            state.covered |= 1 << Branch::FileRefusedKey as u64;
        }
        let (told, agree) = said_by_both(state, on_file, here);
        let id = entry.id;
        let before = match &told {
            Ok(_) => {
                state.runs.insert(id.call(), run);
                state.book.entries.insert(id.call(), entry)
            }
            Err(_) => None,
        };
        drop(guard);
        self.differs(id, agree);
        let revision = told?;
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
            self.world.lock().book.unsettled.push(id.call());
        }
        let acknowledged = acknowledged?;
        note!(self.world, "ledger: {to:?}");
        let on_file = {
            let to = to.clone();
            move |file: &mut OnFile, was: Option<&Entry>| file.settle(id, revision, to, was)
        };
        let settled = self.change(id, on_file, |entry| entry.settle(revision, to, SystemTime::UNIX_EPOCH));
        if acknowledged { settled } else { Err(unavailable()) }
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let acknowledged = self.step().await;
        if acknowledged.is_err() {
            self.world.cover(Branch::LedgerCannotClaim);
        }
        let acknowledged = acknowledged?;
        let claimed = self.change(
            id,
            |file, _| file.claim(id, revision),
            |entry| entry.claim(revision, SystemTime::UNIX_EPOCH),
        );
        note!(self.world, "ledger: claimed: {}", claimed.is_ok());
        if acknowledged {
            self.world.lock().claimed.insert(id.call());
            claimed
        } else {
            Err(unavailable())
        }
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let state = self.world.lock();
        let run = self.run;
        let listed = state.book.entries.values().filter(|entry| match entry.state {
            State::Open => state.runs.get(&entry.id.call()) != Some(&run),
            State::InDoubt { .. } => true,
            _ => false,
        });
        let mut listed: Vec<Entry> = listed.cloned().collect();
        let on_file = state.book.file.as_ref().map(OnFile::in_doubt);
        drop(state);
        if let Some(on_file) = on_file {
            let on_file = on_file?;
            self.world.judge_file(&listed, &on_file);
            return Ok(on_file);
        }
        listed.iter_mut().for_each(|entry| entry.orphaned = Some(Instant::now()));
        Ok(listed)
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let to = State::Forgotten { by: by.to_owned() };
        let on_file = |file: &mut OnFile, was: Option<&Entry>| file.forget(id, by, was);
        let forget = |entry: &mut Entry| entry.settle(entry.revision, to, SystemTime::UNIX_EPOCH);
        self.change(id, on_file, forget).map(drop)
    }

    fn abandon(&self, id: EntryId, to: State) {
        // A process that has crashed says nothing.
        if self.world.lock().book.run == self.run {
            note!(self.world, "ledger: abandoned as {to:?}");
            let on_file = {
                let to = to.clone();
                move |file: &mut OnFile, was: Option<&Entry>| file.abandon(id, to, was)
            };
            let _ = self.change(id, on_file, |entry| match entry.state {
                State::Open => entry.settle(entry.revision, to, SystemTime::UNIX_EPOCH),
                _ => Err(LedgerError::Conflict(id)),
            });
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

    /// What the file says is not settled, against what was told of it.
    pub fn judge_file(&self, expected: &[Entry], found: &[Entry]) {
        let found: BTreeMap<_, _> = found.iter().map(|entry| (entry.id.call(), entry)).collect();
        let mut wrong = Vec::new();
        {
            let state = self.lock();
            let token = |entry: &Entry| state.tokens.get(&entry.id.call()).copied().unwrap_or_default();
            for entry in expected {
                let write = token(entry);
                match found.get(&entry.id.call()) {
                    None => {
                        let what = "its file has not kept it";
                        wrong.push(Wrong::Report { write, what, reports: String::new() });
                    }
                    Some(found) => {
                        // Another process has other names for them, and knows since when they are orphaned.
                        let mut found = Entry::clone(found);
                        (found.id, found.orphaned) = (entry.id, entry.orphaned);
                        if found != *entry {
                            wrong.push(Wrong::Ledger { write, what: "its file says otherwise" });
                        }
                    }
                }
            }
            let known = |entry: &Entry| expected.iter().any(|known| known.id.call() == entry.id.call());
            for entry in found.values().filter(|entry| !known(entry)) {
                wrong.push(Wrong::Ledger { write: token(entry), what: "its file has it, and it is settled" });
            }
        }
        wrong.into_iter().for_each(|wrong| self.wrong(wrong));
    }

    /// Opens the file once more at the end of time, in some worlds: it has what is not settled, and nothing else.
    pub fn judge_what_is_left(&self) {
        let (expected, found) = {
            let mut state = self.lock();
            let Some(found) = state.book.file.as_mut().and_then(OnFile::left) else { return };
            let open = state.book.entries.values().filter(|entry| !entry.state.is_closed());
            (open.cloned().collect::<Vec<_>>(), found)
        };
        self.judge_file(&expected, &found);
    }

    /// The client's process is gone: nothing of it reaches the ledger any more.
    pub fn crash(&self) {
        note!(self, "CRASH");
        let lost = {
            let mut state = self.lock();
            state.book.run += 1;
            state.book.file.as_mut().map(OnFile::crash).unwrap_or_default()
        };
        if !lost.is_empty() {
            self.cover(Branch::FileTorn);
            note!(self, "ledger: the last {} changes are lost", lost.len());
        }
        {
            let mut guard = self.lock();
            let state = &mut *guard;
            for was in lost.into_iter().rev() {
                state.book.unsettled.push(was.id.call());
                state.book.entries.insert(was.id.call(), was);
            }
        }
        self.cover(Branch::Crash);
        self.give_all_up();
    }

    /// The calls that the crash has ended are in doubt, as far as the ledger knows of them and not how they ended.
    pub fn are_crashed(&self) {
        let mut guard = self.lock();
        let now = guard.tick();
        let state = &mut *guard;
        for seen in state.calls.values_mut() {
            seen.crashed = seen.told.is_none();
        }
        for entry in state.book.entries.values().filter(|entry| !entry.state.is_closed()) {
            let seen = state.tokens.get(&entry.id.call()).and_then(|token| state.calls.get_mut(token));
            if let Some(seen) = seen.filter(|seen| seen.crashed) {
                seen.in_doubt = Some(now);
            }
        }
    }
}

/// Without the ledger in a file nothing is.
#[cfg(not(feature = "ledger-durable"))]
mod without {
    use super::*;

    /// A file that there is not.
    pub enum OnFile {}

    impl OnFile {
        pub fn new(_: u64, _: Lies) -> Option<Self> {
            None
        }

        pub fn open(&mut self, _: u32) -> usize {
            match *self {}
        }

        pub fn enter(&mut self, _: &Entry) -> Result<u64, LedgerError> {
            match *self {}
        }

        pub fn claim(&mut self, _: EntryId, _: u64) -> Result<u64, LedgerError> {
            match *self {}
        }

        pub fn settle(
            &mut self,
            _: EntryId,
            _: u64,
            _: State,
            _: Option<&Entry>,
        ) -> Result<u64, LedgerError> {
            match *self {}
        }

        pub fn forget(&mut self, _: EntryId, _: &str, _: Option<&Entry>) -> Result<u64, LedgerError> {
            match *self {}
        }

        pub fn abandon(&mut self, _: EntryId, _: State, _: Option<&Entry>) -> Result<u64, LedgerError> {
            match *self {}
        }

        pub fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
            match *self {}
        }

        pub fn left(&mut self) -> Option<Vec<Entry>> {
            match *self {}
        }

        pub fn crash(&mut self) -> Vec<Entry> {
            match *self {}
        }
    }
}
