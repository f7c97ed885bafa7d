//! One write's entry in the ledger, from before its first byte to its end.

use std::{
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::time::Instant;

use super::{
    FirstSent, Shared,
    conflicts::{Hold, Keys},
    copies::Entering,
    future::{TAKEN_OVER, claimed_by_another},
    ledger::{DynLedger, Entry, EntryId, LedgerError, MemoryLedger, State},
    unrecorded::caught,
};
use crate::{
    Activity, Basis, CallError, Effect, Outcome,
    connection::BoxFuture,
    deadline::{Until, poll_in_time},
    event::{CallReport, DoubtReport, Event, Events},
};

/// How long the caller's answer waits until its ledger has recorded it, at most.
pub(super) const PATIENCE: Duration = Duration::from_secs(5);

/// A write's entry. In memory there is one only if the write ends in doubt; a ledger that has to be waited for
/// is told of each step.
pub(super) struct Account {
    id: EntryId,
    arguments: Option<String>,
    first_sent: FirstSent,
    stack: u64,
    servers_entered: bool,
    /// Whether somebody else has settled it.
    lost: bool,
    recorded: Option<Box<Recorded>>,
}

/// What a ledger that has to be waited for knows of it.
struct Recorded {
    ledger: Arc<dyn DynLedger>,
    /// As of the last step that has ended; `None` while nobody knows it.
    revision: Option<u64>,
    /// The last one that was known.
    last: u64,
    step: Option<BoxFuture<Result<u64, LedgerError>>>,
    /// Whether its replay was claimed, also if it was not needed in the end.
    claim: Claim,
    /// Among the copies of the call.
    entering: Entering,
}

#[derive(Clone, Copy, PartialEq)]
enum Claim {
    None,
    UnderWay,
    Granted,
}

impl Account {
    #[inline(always)]
    pub(super) fn new(
        id: EntryId,
        arguments: Option<String>,
        first_sent: FirstSent,
        shared: &Shared,
    ) -> Self {
        let recorded = shared.ledger.other().map(|ledger| Recorded::new(ledger, id, shared.ledger.keys()));
        let Shared { stack, servers_entered, .. } = *shared;
        Self { id, arguments, first_sent, stack, servers_entered, lost: false, recorded }
    }

    /// Whether there is an entry only if the write ends in doubt.
    pub(super) fn is_in_memory(&self) -> bool {
        self.recorded.is_none()
    }

    /// When it was begun, which is before it was handed over.
    pub(super) fn first_sent(&self) -> &FirstSent {
        &self.first_sent
    }

    fn entry(&mut self, method: &str, effect: Effect, hold: Option<&Hold>) -> Entry {
        let mut entry = Entry::new(self.id, method.to_owned(), effect, self.stack, self.first_sent.wall());
        entry.key = hold.map(|hold| hold.key().to_string());
        entry.arguments = self.arguments.take();
        entry.servers_entered = self.servers_entered;
        entry
    }

    /// Begins to enter it.
    pub(super) fn enter(&mut self, method: &str, effect: Effect, hold: Option<&Hold>) {
        let entry = self.entry(method, effect, hold);
        let Some(recorded) = &mut self.recorded else { return };
        let ledger = Arc::clone(&recorded.ledger);
        let Some(hold) = hold.filter(|hold| !hold.backlog().is_empty()) else {
            recorded.step = Some(ledger.enter(entry));
            return;
        };
        let (key, backlog) = (Arc::clone(hold.key()), Arc::clone(hold.backlog()));
        recorded.step = Some(Box::pin(async move {
            backlog.make_way(&ledger, &key).await?;
            backlog.record_some_during(&ledger, Arc::clone(&ledger).enter(entry)).await
        }));
    }

    /// Begins to claim its replay, if it is not claimed already.
    pub(super) fn claim(&mut self) {
        if let Some(recorded) = &mut self.recorded
            && recorded.claim == Claim::None
            && !off!(Claim)
            && let (Some(revision), None) = (recorded.revision, &recorded.step)
        {
            recorded.claim = Claim::UnderWay;
            recorded.step = Some(Arc::clone(&recorded.ledger).claim(self.id, revision));
        }
    }

    /// Waits until the step that was begun is recorded.
    pub(super) fn poll_step(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), LedgerError>> {
        let Some(recorded) = self.recorded.as_deref_mut().filter(|_| !off!(Enter)) else {
            return Poll::Ready(Ok(()));
        };
        let Some(step) = &mut recorded.step else { return Poll::Ready(Ok(())) };
        let result = match recorded.entering.begin() {
            true => ready!(step.as_mut().poll(cx)),
            false => Err(LedgerError::Conflict(self.id)),
        };
        recorded.step = None;
        match &result {
            // Nothing has changed.
            Err(LedgerError::Overtaken(_)) => recorded.claim = Claim::None,
            result => recorded.revision = result.as_ref().ok().copied(),
        }
        recorded.last = recorded.revision.unwrap_or(recorded.last);
        if recorded.claim == Claim::UnderWay && result.is_ok() {
            recorded.claim = Claim::Granted;
        }
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
        if let (State::InDoubt { .. }, Some(hold)) = (state, hold) {
            hold.end_in_doubt(method);
        }
        let Some(recorded) = &mut self.recorded else {
            if let (State::InDoubt { .. }, Some(memory)) = (state, memory) {
                let mut entry = self.entry(method, effect, hold);
                entry.state = state.clone();
                entry.changed = self.first_sent.clock.now_or_system();
                memory.keep(entry);
            }
            return None;
        };
        let (ledger, id, last) = (&recorded.ledger, self.id, recorded.last);
        match (recorded.step.take(), recorded.revision) {
            (None, Some(revision)) => return Some(Arc::clone(ledger).settle(id, revision, state.clone())),
            (Some(step), _) => {
                // It may have been taken: what it comes to is waited for. Not every ledger takes hints.
                let (ledger, state) = (Arc::clone(ledger), state.clone());
                let claiming = recorded.claim == Claim::UnderWay;
                return Some(Box::pin(async move {
                    let revision = match caught(step).await {
                        Some(Ok(revision)) => revision,
                        // Nothing has changed, or somebody else has it, which shows at its end.
                        Some(Err(LedgerError::Overtaken(_))) => last,
                        Some(Err(LedgerError::Conflict(id)))
                            if claiming && matches!(state, State::NotLanded { .. }) =>
                        {
                            return Err(LedgerError::Conflict(id));
                        }
                        Some(Err(LedgerError::Conflict(_))) if claiming => last,
                        // It was never entered: whoever has an entry of it, a layer further out, says what becomes of it.
                        Some(Err(
                            LedgerError::Conflict(_)
                            | LedgerError::KeyInDoubt { .. }
                            | LedgerError::Full(_)
                            | LedgerError::TooLong { .. },
                        )) if !claiming => return Ok(last),
                        Some(Err(error)) => return Err(error),
                        None => return Err(LedgerError::Unavailable("the ledger panicked".into())),
                    };
                    ledger.settle(id, revision, state).await
                }));
            }
            (None, None) => {}
        }
        // Nothing can be waited for, or nobody knows what came of the last step.
        if let (State::InDoubt { .. }, Some(hold)) = (state, hold) {
            recorded.leave(hold, method.to_owned(), state);
        }
        recorded.hint(self.id, state.clone());
        None
    }

    /// From here on nothing can be waited for: the ledger gets a hint.
    pub(super) fn interrupt(&mut self) {
        if let Some(recorded) = &mut self.recorded {
            recorded.revision = None;
            // Foreign code, and there is more to be said after it.
            let step = recorded.step.take();
            let _ = catch_unwind(AssertUnwindSafe(|| drop(step)));
        }
    }

    /// Keeps the result until that step is recorded.
    #[expect(clippy::too_many_arguments, reason = "they go on from here to where they stay")]
    pub(super) fn closing<Res>(
        &mut self,
        step: BoxFuture<Result<u64, LedgerError>>,
        state: State,
        result: Result<Res, CallError>,
        (news, back): (News, GivenBack),
        method: String,
        hold: Option<Box<Hold>>,
        until: Until,
    ) -> Closing<Res> {
        // Nor is the report kept back for longer.
        let patience = until.left(Instant::now()).map_or(PATIENCE, |left| left.min(PATIENCE));
        let step = Box::pin(async move {
            match tokio::time::timeout(patience, step).await {
                Ok(Ok(_)) => End::Recorded,
                Ok(Err(LedgerError::Conflict(_))) => End::Lost,
                _ => {
                    tracing::warn!(target: "goaround", "the ledger could not record a write's end; its entry stays open");
                    End::Open
                }
            }
        });
        Closing {
            result: Some(result),
            news: Some(news),
            back,
            step,
            recorded: self.recorded.take(),
            id: self.id,
            method,
            state: Some(state),
            until,
            hold,
        }
    }
}

/// What the ledger makes of a write's end.
enum End {
    Recorded,
    /// Somebody else has settled the write, or claimed it.
    Lost,
    Open,
}

/// A call whose outcome is known, and whose ledger has yet to record it. The outcome reaches the caller in any
/// case.
pub(super) struct Closing<Res> {
    result: Option<Result<Res, CallError>>,
    /// Until it is told, which is when the ledger has it: whoever is told of a doubt finds it there.
    news: Option<News>,
    back: GivenBack,
    step: BoxFuture<End>,
    /// As of the call's end.
    recorded: Option<Box<Recorded>>,
    id: EntryId,
    method: String,
    /// Until it is recorded.
    state: Option<State>,
    until: Until,
    /// Its key is free only then.
    hold: Option<Box<Hold>>,
}

impl<Res> Closing<Res> {
    pub(super) fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Res, CallError>> {
        match ready!(poll_in_time(self.step.as_mut(), || self.until.is_over(), cx)) {
            Some(End::Recorded) => self.state = None,
            Some(End::Lost) => self.lose(),
            _ => self.leave(),
        }
        self.tell();
        self.result.take().map_or(Poll::Pending, Poll::Ready)
    }

    /// Whoever has it may have handed it over: that nothing was done is no longer known here.
    #[cold]
    fn lose(&mut self) {
        self.state = None;
        let is_lost = |result: &mut Result<Res, CallError>| {
            result.as_ref().is_err_and(|error| error.outcome() == Outcome::NotDone)
        };
        let Some(Err(mut error)) = self.result.take_if(is_lost) else { return };
        error.set_repeated();
        claimed_by_another(error.attempts_mut());
        // By what is told below, or by a layer further out that tells of no read.
        error.set_reported();
        let error = error.note(TAKEN_OVER);
        if let Some(news) = &mut self.news {
            news.doubt = news.lost.take().map(|mut doubt| {
                doubt.attempts = error.attempts().to_vec();
                doubt
            });
            self.back.told |= news.doubt.is_some();
            if self.back.above.as_ref().is_some_and(|above| news.doubt.is_some() && !above.lets_tell()) {
                news.doubt = None;
            }
        }
        self.back.not_done = false;
        self.result = Some(Err(error));
    }

    /// The ledger has not recorded it, and is not waited for any more.
    fn leave(&mut self) {
        let (Some(state), Some(recorded)) = (self.state.take(), &self.recorded) else { return };
        if let (State::InDoubt { .. }, Some(hold)) = (&state, &self.hold) {
            recorded.leave(hold, std::mem::take(&mut self.method), &state);
        }
        recorded.hint(self.id, state);
    }

    fn tell(&mut self) {
        self.back.give();
        if let (Some(news), Some(result)) = (self.news.take(), &self.result) {
            news.tell(result);
        }
    }
}

/// What a layer further out that left the report to this one learns of the call's end.
pub(super) struct GivenBack {
    pub(super) above: Option<Arc<Activity>>,
    /// Whether its caller is told of a doubt.
    pub(super) told: bool,
    pub(super) not_done: bool,
}

impl GivenBack {
    pub(super) fn give(&mut self) {
        if let Some(above) = self.above.take() {
            above.give_the_report_back(self.told, self.not_done);
        }
    }

    /// Gives it back where the caller goes away: the layer further out cannot see that nothing was done, and its key
    /// would stay blocked with nobody told.
    pub(super) fn give_unread(&mut self) {
        if self.not_done
            && let Some(above) = &self.above
        {
            above.withdrawn();
        }
        self.give();
    }
}

/// What is to be said of a call's end.
pub(super) struct News {
    pub(super) events: Events,
    pub(super) doubt: Option<DoubtReport>,
    /// That of a call of which nothing was done, should it turn out that somebody else has the write.
    pub(super) lost: Option<DoubtReport>,
    /// Of a call that succeeded.
    pub(super) success: Option<CallReport>,
    /// Who judged the call, where this layer reports its failure.
    pub(super) failure: Option<Basis>,
    /// What is said in place of all that where the caller goes away before it is told: of a write that may have landed,
    /// of which nobody would know.
    pub(super) abandoned: Option<CallReport>,
}

impl News {
    pub(super) fn tell<Res>(self, result: &Result<Res, CallError>) {
        if let Some(doubt) = &self.doubt {
            self.events.emit(Event::InDoubt(doubt));
        }
        if let Some(success) = &self.success {
            self.events.emit(Event::Call(success));
        }
        if let (Err(error), Some(basis)) = (result, self.failure) {
            self.events.failed(basis, error);
        }
    }
}

impl Recorded {
    fn new(ledger: Arc<dyn DynLedger>, id: EntryId, keys: &Keys) -> Box<Self> {
        let entering = Entering::new(Arc::clone(keys.entered()), id);
        Box::new(Self { ledger, revision: None, last: 0, step: None, claim: Claim::None, entering })
    }

    /// Its doubt stays, and nobody knows whether the ledger has recorded it.
    fn leave(&self, hold: &Hold, method: String, doubt: &State) {
        hold.leave(method, self.last, self.claim == Claim::UnderWay, doubt.clone());
    }

    /// Gives the ledger a hint, if the entry is this call's own, or can only be; mostly from a destructor, where a panic
    /// would abort.
    fn hint(&self, id: EntryId, state: State) {
        if self.last > 0 || self.entering.hints() {
            let _ = catch_unwind(AssertUnwindSafe(|| self.ledger.abandon(id, state)));
        }
    }
}

impl<Res> Drop for Closing<Res> {
    fn drop(&mut self) {
        self.leave();
        if let Some(news) = &self.news
            && (news.abandoned.is_some() || news.doubt.is_some())
            && !self.back.not_done
        {
            // What else it tells is known. A layer further out may yet tell its own caller that it is unknown.
            let is_unknown = |error: &CallError| error.outcome() == Outcome::Unknown;
            self.back.told =
                self.result.as_ref().is_some_and(|result| result.as_ref().is_err_and(is_unknown));
            if let Some(above) = self.back.above.as_ref().filter(|_| !self.back.told) {
                above.resolve(news.doubt.is_some());
            }
        }
        self.back.give_unread();
        if let (Some(news), Some(result)) = (self.news.take(), &self.result) {
            match &news.abandoned {
                Some(_) if off!(DropGuard) => {}
                Some(report) => news.events.emit(Event::Abandoned(report)),
                None => news.tell(result),
            }
        }
    }
}
