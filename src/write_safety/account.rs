//! One write's entry in the ledger, from before its first byte to its end.

use std::{
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use super::{
    FirstSent, Shared, WallClock,
    conflicts::Hold,
    ledger::{DynLedger, Entry, EntryId, LedgerError, MemoryLedger, State},
};
use crate::{CallError, Effect, connection::BoxFuture, deadline::Until};

/// How long the caller's answer waits until its ledger has recorded it, at most.
const PATIENCE: Duration = Duration::from_secs(5);

/// A write's entry. In memory there is one only if the write ends in doubt; a ledger that has to be waited for
/// is told of each step.
pub(super) struct Account {
    id: EntryId,
    arguments: Option<String>,
    first_sent: FirstSent,
    stack: u64,
    /// The ledger, where it has to be waited for.
    other: Option<Arc<dyn DynLedger>>,
    /// As of the last step that has ended; `None` while nobody knows it.
    revision: Option<u64>,
    step: Option<BoxFuture<Result<u64, LedgerError>>>,
    /// Whether somebody else has settled it.
    lost: bool,
}

impl Account {
    pub(super) fn new(id: EntryId, arguments: Option<String>, shared: &Shared, clock: &WallClock) -> Self {
        Self {
            id,
            arguments,
            first_sent: FirstSent::now(clock),
            stack: shared.stack,
            other: shared.ledger.other(),
            revision: None,
            step: None,
            lost: false,
        }
    }

    /// When it was begun, which is before it was handed over.
    pub(super) fn first_sent(&self) -> &FirstSent {
        &self.first_sent
    }

    fn entry(&mut self, method: &str, effect: Effect, hold: Option<&Hold>) -> Entry {
        let mut entry = Entry::new(self.id, method.to_owned(), effect, self.stack, self.first_sent.wall);
        entry.key = hold.map(|hold| hold.key().to_string());
        entry.arguments = self.arguments.take();
        entry
    }

    /// Begins to enter it.
    pub(super) fn enter(&mut self, method: &str, effect: Effect, hold: Option<&Hold>) {
        let entry = self.entry(method, effect, hold);
        self.step = self.other.clone().map(|ledger| ledger.enter(entry));
    }

    /// Begins to claim its replay.
    pub(super) fn claim(&mut self) {
        if let (Some(ledger), Some(revision), None) = (&self.other, self.revision, &self.step) {
            self.step = Some(Arc::clone(ledger).claim(self.id, revision));
        }
    }

    /// Waits until the step that was begun is recorded.
    pub(super) fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LedgerError>> {
        let Some(step) = &mut self.step else { return Poll::Ready(Ok(())) };
        let result = ready!(step.as_mut().poll(cx));
        self.step = None;
        self.revision = result.as_ref().ok().copied();
        self.lost = matches!(result, Err(LedgerError::Conflict(_)));
        Poll::Ready(result.map(drop))
    }

    /// Whether somebody else has settled or claimed it: then nothing more is to be said of it here.
    pub(super) fn is_lost(&self) -> bool {
        self.lost
    }

    /// The call is over, and that is what is known of the write. What is left is to wait until it is recorded,
    /// where that takes time.
    pub(super) fn close(
        &mut self,
        state: &State,
        memory: Option<&MemoryLedger>,
        method: &str,
        effect: Effect,
        hold: Option<&Hold>,
    ) -> Option<BoxFuture<Result<u64, LedgerError>>> {
        if self.lost {
            return None;
        }
        match (self.other.clone(), self.revision, &self.step) {
            (None, ..) => {
                if let (State::InDoubt { .. }, Some(memory)) = (state, memory) {
                    let mut entry = self.entry(method, effect, hold);
                    entry.state = state.clone();
                    entry.changed = self.first_sent.clock.now();
                    memory.keep(entry);
                }
                None
            }
            (Some(ledger), Some(revision), None) => Some(ledger.settle(self.id, revision, state.clone())),
            // A step is under way, and may have been taken.
            (Some(ledger), ..) => {
                ledger.abandon(self.id, state.clone());
                None
            }
        }
    }

    /// From here on nothing can be waited for: the ledger gets a hint.
    pub(super) fn interrupt(&mut self) {
        self.revision = None;
    }

    /// Keeps the result until that step is recorded.
    pub(super) fn closing<Res>(
        &self,
        step: BoxFuture<Result<u64, LedgerError>>,
        state: State,
        result: Result<Res, CallError>,
        hold: Option<Hold>,
        until: Until,
    ) -> Closing<Res> {
        let step = Box::pin(async move {
            if !matches!(
                tokio::time::timeout(PATIENCE, step).await,
                Ok(Ok(_) | Err(LedgerError::Conflict(_)))
            ) {
                tracing::warn!(target: "goaround", "the ledger could not record a write's end; its entry stays open");
            }
        });
        let ledger = self.other.clone();
        Closing { result: Some(result), step, ledger, id: self.id, state: Some(state), until, _hold: hold }
    }
}

/// A call whose outcome is known, and whose ledger has yet to record it. The outcome reaches the caller in any
/// case.
pub(super) struct Closing<Res> {
    result: Option<Result<Res, CallError>>,
    step: BoxFuture<()>,
    ledger: Option<Arc<dyn DynLedger>>,
    id: EntryId,
    /// Until it is recorded.
    state: Option<State>,
    until: Until,
    /// Its key is free only then.
    _hold: Option<Hold>,
}

impl<Res> Closing<Res> {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Res, CallError>> {
        if self.step.as_mut().poll(cx).is_ready() {
            self.state = None;
        } else if !self.until.is_over() {
            return Poll::Pending;
        }
        self.result.take().map_or(Poll::Pending, Poll::Ready)
    }
}

impl<Res> Drop for Closing<Res> {
    fn drop(&mut self) {
        if let (Some(ledger), Some(state)) = (&self.ledger, self.state.take()) {
            ledger.abandon(self.id, state);
        }
    }
}
