//! One call through write safety. A read passes; a write goes from its attempt, if that ends without an
//! answer, to fence, check and perhaps one replay.

use std::{
    borrow::Cow,
    fmt,
    future::Future,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use pin_project::{pin_project, pinned_drop};
use tokio::time::{Instant, Sleep};
use tower::Service;

use super::{
    Account, Attempted, Hold, KeyedAnswer, Lane,
    account::{Closing, GivenBack, News},
    conflicts::{InLine, Passage, ShutOut},
    fence::{Fence, FenceBasis},
    guard,
    ledger::{LedgerError, State},
    refused,
    settle::{self, Unwinding, has_outlived, settle},
    verdict::{Verdict, VerdictKind},
};
use crate::{
    Activity, Attempt, Basis, Call, CallError, CallId, Cause, Closure, Delivery, Effect, Outcome, Rule,
    Scope, Settled,
    call::{Giver, Guard, Trail, replica},
    connection::BoxFuture,
    deadline::{Timer, Until, later, poll_or_last},
    event::{CallReport, DoubtReport, Event, Events},
};

/// Below this much time left, an attempt gets no attempt timeout of its own any more.
const LEAST_ATTEMPT: Duration = Duration::from_millis(1);
/// How many hand-overs of which nothing was sent are remembered.
const ATTEMPTS_KEPT: usize = 64;
/// What a replay by a quarantine is not made for, or was made in spite of.
const OUTLIVED: &str = "the old process is still there, so that no fence holds";
/// Nor this one, over which what another call has left might still land.
const KEY_IN_DOUBT: &str = "not replayed: another write with its conflict key has come into doubt since";

/// Nor this one, which may have been any write.
const TAKEN_BACK: &str = "not replayed: the server no longer says that it is idempotent";

/// Nor this one, which would go past what that layer knows of other writes and of those who claim this one.
const KEPT_APART: &str = "not replayed: a layer further out has another conflict_key or ledger for it; give both the same, \
                          or that one the check";

/// What is said of a call of which nothing was done, as far as is known here.
pub(super) const TAKEN_OVER: &str = "somebody else has settled or claimed it in the ledger";

/// The future of a [`WriteSafety`](super::WriteSafety) service's call.
#[pin_project(PinnedDrop)]
pub struct ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    /// The attempt under way. Of a write, it stays here while it is in doubt.
    #[pin]
    attempt: Option<S::Future>,
    kind: Kind<S, Req, S::Response>,
}

enum Kind<S, Req, Res> {
    /// A read, on its way through.
    Passing(Passing),
    /// The same of a write for which a layer further out answers.
    Passed(Box<Passed>),
    Refused(Option<CallError>),
    /// Behind a box, so that reads do not carry a write's state about.
    Write(BoxedWrite<S, Req, Res>),
    Closing(Box<Closing<Res>>),
    Done,
}

/// A call on its way through, with what reports it if this layer is the outermost.
pub(super) struct Passing {
    pub(super) reporter: Option<Events>,
    pub(super) call: CallId,
    pub(super) basis: Basis,
    pub(super) effect: Effect,
}

/// A write on its way through.
pub(super) struct Passed {
    pub(super) passing: Passing,
    /// The marks of the layer further out, and this one.
    pub(super) marks: Option<(Arc<Activity>, Giver)>,
    /// Its place among those of this layer, if it has any.
    pub(super) passage: Option<Passage>,
}

type BoxedWrite<S, Req, Res> = Pin<Box<Write<S, Req, Res>>>;

#[pin_project]
struct Write<S, Req, Res> {
    /// Tells when the attempt has taken long enough; armed when it is first pending.
    #[pin]
    timer: Option<Timer>,
    call: WriteCall<S, Req, Res>,
}

/// A write whose service is being called: should that panic, this reports it.
pub(super) struct Begun<S, Req>(Option<BoxedWrite<S, Req, S::Response>>)
where
    S: Service<Req>;

/// What a write begins with.
pub(super) struct Parts<S, Req, Res> {
    pub(super) lane: Arc<Lane<S, Req, Res>>,
    /// The request, where a replay may follow.
    pub(super) kept: Option<Req>,
    pub(super) name: Cow<'static, str>,
    pub(super) effect: Effect,
    pub(super) basis: Basis,
    pub(super) call: CallId,
    pub(super) until: Until,
    /// The attempt under way.
    pub(super) current: Attempted,
    /// On its conflict key, if it has one.
    pub(super) hold: Option<Box<Hold>>,
    /// Whether it carries our idempotency key.
    pub(super) keyed: bool,
    pub(super) account: Account,
    pub(super) events: Events,
    pub(super) outermost: bool,
    /// Of a layer further out that leaves the report to this one.
    pub(super) above: Option<Box<Above>>,
    /// Whether one keeps the write by a conflict key, or where it may be claimed, that are not this layer's.
    pub(super) apart: bool,
}

/// What a layer further out gave the request.
pub(super) struct Above {
    /// Its marks.
    pub(super) activity: Arc<Activity>,
    pub(super) attempt_until: Option<Instant>,
}

struct WriteCall<S, Req, Res> {
    parts: Parts<S, Req, Res>,
    /// This write's place among the stack's writes.
    sequence: u64,
    /// The attempt under way, where it has to wait for a connection.
    line: Option<Arc<InLine>>,
    /// The attempts that have ended.
    attempts: Vec<Attempt>,
    polled: bool,
    timed_out: bool,
    doubt: Option<Box<Doubt<Res>>>,
    way: Option<Box<Way<S, Req>>>,
    replay: Option<Box<Replayed>>,
    /// Of a replay without a check: how many attempts came before it, and how the last of them ended.
    unchecked: Option<(usize, Option<Closure>)>,
    /// How long was waited before it.
    waited: Duration,
    /// The attempt under way, that a replay is to follow.
    replaced: Option<Box<Attempt>>,
    /// The refusal that a trusted replay follows.
    refused: Option<CallError>,
    trail: Option<Arc<Trail>>,
    /// Whether a service is being called, so that a panic leaves a doubt.
    handing_over: bool,
    /// Whether one was called that has yet to be polled: another thread may have called its own just before it.
    called: bool,
    /// How many times the attempt under way has gone, as far as it was looked at: what is held back below, or handed over
    /// there again, goes later than it was counted.
    goings: u32,
    /// Whether the end of an attempt is being judged, which calls the caller's code, so that a panic leaves a doubt.
    judging: bool,
    /// Whether an attempt itself succeeded, rather than a check that found it.
    answered: bool,
}

/// A doubt about a write.
struct Doubt<Res> {
    /// When it arose: the attempt ended or timed out.
    since: Instant,
    /// When the attempt ended; `None` while it may still answer.
    ended_at: Option<Instant>,
    /// Until when the server asks not to be asked.
    not_before: Option<Instant>,
    /// What ended it.
    error: Option<CallError>,
    /// The caller's check and the connector's futures included.
    settling: Option<Unwinding<Verdict<Res>>>,
    checking: Arc<AtomicBool>,
    /// Whether a check has found the write applied in part.
    partial: Arc<AtomicBool>,
    /// Whether a check has found that the server had begun with it.
    begun: Arc<AtomicBool>,
    /// Whether the attempt ended while a check was under way, so that another may find a fence.
    again: bool,
    verdict: Option<VerdictKind>,
    fence: Option<Fence>,
    /// The end of the connection beside whose process the replay must not go.
    beside: Option<Closure>,
    reason: Option<Cow<'static, str>>,
}

/// On the way to a hand-over.
struct Way<S, Req> {
    service: S,
    request: Req,
    wait: Option<Pin<Box<Sleep>>>,
    waited: Duration,
    /// Whether the service was asked and is not ready: it may have a place in a line below.
    in_line: bool,
    readied: bool,
    errand: Errand,
}

enum Errand {
    /// The first hand-over, once the ledger has entered the write.
    First,
    /// Another one of which nothing was sent before, so that it is no replay.
    Again,
    Replay(Replay),
}

/// Why a replay is allowed.
#[derive(Clone)]
enum Replay {
    /// A check has found that the earlier attempt did not land.
    Fenced(Fence),
    /// The server keeps our key, so that it does not matter whether it did.
    Keyed(Fence),
    /// The caller declared that it does not matter.
    Idempotent,
    Trusted,
}

/// A replay that was handed over.
struct Replayed {
    why: Replay,
    /// What ended the attempts before it.
    before: Option<CallError>,
}

/// How a call ends: at once, or when its ledger has recorded it.
type Closed<Res> = Result<Result<Res, CallError>, Box<Closing<Res>>>;

/// What follows from the end of an attempt or from a verdict.
enum Next<Res> {
    Resolve(Result<Res, CallError>),
    Continue,
}

impl<S, Req> ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    pub(crate) fn passing(
        attempt: S::Future,
        reporter: Option<Events>,
        call: CallId,
        basis: Basis,
        effect: Effect,
    ) -> Self {
        Self { attempt: Some(attempt), kind: Kind::Passing(Passing { reporter, call, basis, effect }) }
    }

    pub(super) fn passed(attempt: S::Future, passed: Passed) -> Self {
        Self { attempt: Some(attempt), kind: Kind::Passed(Box::new(passed)) }
    }

    pub(super) fn refused(error: CallError) -> Self {
        Self { attempt: None, kind: Kind::Refused(Some(error)) }
    }
}

impl<S, Req> Begun<S, Req>
where
    S: Service<Req>,
{
    /// Inlined all the way from where its parts are made. Its place is there before them, so that they are put together
    /// in it.
    #[inline(always)]
    pub(super) fn new(parts: impl FnOnce() -> Parts<S, Req, S::Response>) -> Self {
        let place = Box::new_uninit();
        let write = Write { timer: None, call: WriteCall::new(parts()) };
        Self(Some(Box::into_pin(Box::write(place, write))))
    }

    /// Its service is called now. `false`: it must not be, since its key came into doubt while the caller's functions were
    /// asked about it.
    #[inline(always)]
    pub(super) fn hand_over(&mut self) -> bool {
        if let Some(write) = &mut self.0 {
            let call = write.as_mut().project().call;
            if call.parts.hold.as_deref().and_then(Hold::in_its_way).is_some() && !off!(KeyInDoubt) {
                return false;
            }
            call.count_hand_over();
            call.handing_over = true;
        }
        true
    }

    /// Its service has been called.
    #[inline(always)]
    pub(super) fn handed_over(mut self, attempt: S::Future) -> ResponseFuture<S, Req> {
        if let Some(write) = &mut self.0 {
            write.as_mut().project().call.handing_over = false;
        }
        ResponseFuture { attempt: Some(attempt), kind: self.0.take().map_or(Kind::Done, Kind::Write) }
    }

    /// Lets its ledger enter it first, if that cannot be done at once, and looks at its key again then.
    #[cold]
    pub(super) fn enter(mut self, request: Req, service: impl FnOnce() -> S) -> ResponseFuture<S, Req> {
        // It is not handed over: should the service or the ledger panic, there is nothing to report.
        let write = self.0.take().map(|mut write| {
            let service = service();
            let call = write.as_mut().project().call;
            let Parts { account, name, effect, hold, lane, above, .. } = &mut call.parts;
            if let Some(above) = above {
                above.activity.waits();
            }
            if lane.shared.ledger.memory().is_none() {
                account.enter(name, *effect, hold.as_deref());
            }
            call.way = Some(Box::new(Way {
                service,
                request,
                wait: None,
                waited: Duration::ZERO,
                in_line: false,
                readied: true,
                errand: Errand::First,
            }));
            write
        });
        ResponseFuture { attempt: None, kind: write.map_or(Kind::Done, Kind::Write) }
    }
}

impl<S, Req> Drop for Begun<S, Req>
where
    S: Service<Req>,
{
    fn drop(&mut self) {
        if let Some(mut write) = self.0.take() {
            write.as_mut().project().call.abandon(false);
        }
    }
}

impl Passing {
    fn failed(&self, error: CallError) -> CallError {
        let error = error.of_attempt(Some(self.call), "", self.effect).judged_by(self.basis);
        let Some(events) = &self.reporter else { return error };
        let error = error.with_attempt(None);
        events.failed(self.basis, &error);
        error
    }
}

impl<S, Req> Future for ResponseFuture<S, Req>
where
    Req: Call + Send + 'static,
    S: Service<Req, Error = CallError> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
{
    type Output = Result<S::Response, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.as_mut().project();
        match this.kind {
            Kind::Passing(passing) => {
                let Some(attempt) = this.attempt.as_mut().as_pin_mut() else { return Poll::Pending };
                let result = ready!(attempt.poll(cx)).map_err(|error| passing.failed(error));
                this.attempt.set(None);
                *this.kind = Kind::Done;
                Poll::Ready(result)
            }
            Kind::Passed(write) => {
                let Some(attempt) = this.attempt.as_mut().as_pin_mut() else { return Poll::Pending };
                let Passed { passing, marks, passage } = &mut **write;
                if let Some(passage) = passage {
                    passage.look();
                }
                let result = attempt.poll(cx);
                if let Some(passage) = passage {
                    passage.look_again();
                }
                let result = ready!(result).map_err(|error| passing.failed(error));
                if let (Err(error), Some((activity, by))) = (&result, marks)
                    && error.is_given_back()
                {
                    activity.given_back(*by);
                }
                this.attempt.set(None);
                *this.kind = Kind::Done;
                Poll::Ready(result)
            }
            Kind::Refused(error) => error.take().map_or(Poll::Pending, |error| Poll::Ready(Err(error))),
            Kind::Write(write) => {
                let write = write.as_mut().project();
                let result = ready!(write.call.poll(this.attempt.as_mut(), write.timer, cx));
                // Resolved: from here on nobody abandons it.
                put_down(this.attempt.as_mut());
                match write.call.close(result) {
                    Ok(result) => {
                        *this.kind = Kind::Done;
                        return Poll::Ready(result);
                    }
                    // Before the ledger is polled: should that panic, the write is not abandoned besides.
                    Err(closing) => *this.kind = Kind::Closing(closing),
                }
                self.poll(cx)
            }
            Kind::Closing(closing) => {
                let result = ready!(closing.poll(cx));
                *this.kind = Kind::Done;
                Poll::Ready(result)
            }
            Kind::Done => Poll::Pending,
        }
    }
}

impl<S, Req> WriteCall<S, Req, S::Response>
where
    Req: Call + Send + 'static,
    S: Service<Req, Error = CallError> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
{
    fn poll(
        &mut self,
        mut attempt: Pin<&mut Option<S::Future>>,
        mut timer: Pin<&mut Option<Timer>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<S::Response, CallError>> {
        // With a ledger it has been read by then.
        let mut first = !mem::replace(&mut self.polled, true) && self.way.is_none();
        // What is there wins over what has just run out.
        let mut last = false;
        loop {
            // As long as nothing has happened the first poll reads no clock.
            let first = mem::replace(&mut first, false);
            self.close_by_fence();
            if first {
                self.look_as_it_begins();
            }
            if self.parts.current.activity.is_waiting() {
                self.stand_in_line();
            }
            if !first && !self.called {
                // What went since it was polled last, on a task of its own, was counted at that moment.
                let goings = self.parts.current.activity.goings();
                if mem::replace(&mut self.goings, goings) != goings
                    && let Some(line) = &self.line
                {
                    line.went();
                }
            }
            // The attempt itself first: what it says is better evidence than any check's.
            let polled = attempt.as_mut().as_pin_mut().map(|future| poll_or_last(future, last, cx));
            if self.line.is_some() {
                self.take_place();
            }
            let begun = mem::take(&mut self.called) || first;
            let goings = self.parts.current.activity.goings();
            if begun || goings != self.goings {
                self.goings = goings;
                self.look_as_it_begins();
            }
            if let Some(Poll::Ready(result)) = polled {
                put_down(attempt.as_mut());
                timer.set(None);
                self.judging = true;
                let next = self.attempt_ended(result);
                self.judging = false;
                match next {
                    Next::Resolve(result) => return Poll::Ready(result),
                    Next::Continue => continue,
                }
            }

            if begun && attempt.is_some() {
                self.stays();
            }

            if attempt.is_some() && !self.timed_out {
                if let Some(until) = self.parts.current.until {
                    if timer.is_none() {
                        timer.set(Some(Timer::at(until)));
                    }
                    if let Some(timer) = timer.as_mut().as_pin_mut()
                        && match self.parts.current.stood {
                            Some(stood) => self.parts.until.poll_attempt(timer, until, stood, cx),
                            None => timer.poll_fixed(cx),
                        }
                        .is_ready()
                    {
                        // Once more, now past its time: what is still queued is withdrawn, and what some layer
                        // below holds up must not be sent later, when the fence has been found to hold.
                        self.timed_out = true;
                        self.parts.current.activity.close();
                        last = true;
                        continue;
                    }
                }
            } else if attempt.is_some()
                && self.doubt.is_none()
                && !self.is_over()
                && let Next::Resolve(result) = self.outlasted(cx)
            {
                return Poll::Ready(result);
            }

            if let Some(doubt) = &mut self.doubt
                && let Some(settling) = &mut doubt.settling
                && let Poll::Ready(verdict) = poll_or_last(Pin::new(settling), last, cx)
            {
                doubt.settling = None;
                let verdict = verdict.unwrap_or_else(|| Verdict::Unknown("settling it panicked".into()));
                match self.settled(verdict, attempt.is_some(), cx) {
                    Next::Resolve(result) => return Poll::Ready(result),
                    Next::Continue => continue,
                }
            }

            if self.way.is_some() {
                match self.poll_way(attempt.as_mut(), cx) {
                    Poll::Ready(Ok(())) => {
                        timer.set(None);
                        continue;
                    }
                    Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
                    Poll::Pending => {}
                }
            }

            if !first && self.is_over() {
                if !mem::replace(&mut last, true) {
                    continue;
                }
                let pending = attempt.is_some();
                return Poll::Ready(Err(self.out_of_time(pending)));
            }
            return Poll::Pending;
        }
    }

    /// Why no check can be made, if none can.
    fn no_check(&self) -> Option<&'static str> {
        match (&self.parts.lane.config.check, &self.parts.kept) {
            (None, _) if self.parts.apart && self.parts.lane.config.may_settle() => Some(KEPT_APART),
            (None, _) => Some("no effect check"),
            (Some(_), None) => Some("the request cannot be cloned, so that no check could ask for it"),
            (Some(_), Some(_)) => None,
        }
    }

    /// The attempt has taken too long, and may still answer.
    fn outlasted(&mut self, cx: &mut Context<'_>) -> Next<S::Response> {
        match self.unchecked_replay() {
            // As long as bytes are unwritten no replay starts.
            Some(_) if self.parts.current.activity.poll_sent(cx).is_err() => Next::Continue,
            Some((replay, request)) => {
                let attempt = self.kept_attempt();
                self.replaced = Some(Box::new(attempt));
                self.replay_unchecked(replay, request, Duration::ZERO);
                Next::Continue
            }
            None if self.no_check().is_none() => self.enter_doubt(None),
            None => Next::Continue,
        }
    }

    /// Why the write may be replayed without a check, if it may; with the request.
    fn unchecked_replay(&self) -> Option<(Replay, Req)> {
        if (self.replay.is_some() && !off!(Once)) || self.was_found_in_part() || self.parts.apart {
            return None;
        }
        let config = &self.parts.lane.config;
        let by_key = || {
            let window = config.key_window().filter(|_| self.parts.keyed)?;
            let open = self.parts.account.first_sent().window_end(window).is_ok();
            open.then(|| Replay::Keyed(Fence::deduplicated(self.parts.call, window)))
        };
        let idempotent = config.replay_idempotent && self.parts.effect == Effect::Idempotent;
        let idempotent = idempotent && self.is_upheld();
        let replay = by_key().or_else(|| idempotent.then_some(Replay::Idempotent))?;
        Some((replay, self.parts.kept.as_ref().and_then(replica)?))
    }

    /// Whether the attempt's server still says what the call was taken for by its word.
    fn is_upheld(&self) -> bool {
        self.parts.current.activity.word().is_none_or(|word| word.holds())
    }

    /// The server has taken back what the call was taken for: it may have been any write.
    fn misjudged(&mut self) {
        (self.parts.effect, self.parts.basis) = (Effect::Write, Basis::Default);
    }

    /// Whether a check has found the write applied in part: then it is never replayed.
    fn was_found_in_part(&self) -> bool {
        self.doubt.as_ref().is_some_and(|doubt| doubt.partial.load(Ordering::Relaxed))
    }

    fn replay_unchecked(&mut self, replay: Replay, request: Req, wait: Duration) {
        let doubt = self.begin_doubt();
        // A check that is under way would say nothing of the replay.
        doubt.settling = None;
        doubt.fence = match &replay {
            Replay::Keyed(fence) => Some(fence.clone()),
            _ => None,
        };
        self.set_out(request, Errand::Replay(replay), Some(wait).filter(|wait| !wait.is_zero()));
    }

    fn begin_doubt(&mut self) -> &mut Doubt<S::Response> {
        if let Some(hold) = &self.parts.hold {
            hold.doubt(&self.parts.name);
        }
        self.doubt.get_or_insert_with(|| Box::new(Doubt::new()))
    }

    /// Whether the deadline has passed.
    fn is_over(&self) -> bool {
        self.parts.until.is_over()
    }

    fn attempt_ended(&mut self, result: Result<S::Response, CallError>) -> Next<S::Response> {
        if result.is_err() {
            // A service in between may have given it up, and hold it back still.
            self.parts.current.activity.close();
        }
        let result = result.map_err(|error| {
            let Parts { call, name, effect, current, .. } = &self.parts;
            let error = error.of_attempt(Some(*call), name, *effect);
            error.with_attempt(current.activity.generation_number())
        });
        if result.as_ref().is_err_and(CallError::is_misjudged) {
            self.misjudged();
        }
        let mut error = match (self.keyed_answer(&result), result) {
            (Some(KeyedAnswer::Landed(response)), result) => {
                return self.answered_landed(response, result.err());
            }
            (Some(KeyedAnswer::InFlight { recheck_after }), _) => {
                self.begin_doubt().not_before = Some(later(Instant::now(), recheck_after));
                let generation = self.parts.current.activity.generation_number();
                CallError::in_progress().of_call(&self.parts.name, self.parts.effect).with_attempt(generation)
            }
            (None, Ok(response)) => {
                self.answered = true;
                self.own_answer();
                return Next::Resolve(Ok(response));
            }
            (None, Err(error)) => error,
        };
        if let Some(attempt) = error.attempts_mut().first_mut() {
            attempt.waited += mem::take(&mut self.waited);
        }
        // What a check found begun was sent and processed, whatever its end says; and of several copies one end says
        // nothing of the others.
        let activity = &self.parts.current.activity;
        let doubtful =
            self.was_found_begun() || activity.was_copied() || (error.is_given_back() && activity.has_gone());
        if doubtful {
            error.contradicted();
        }
        let trusted = match error.cause() {
            Cause::Evidence(evidence) => self.parts.lane.config.trust.contains(evidence) && !doubtful,
            _ => false,
        };
        let rule = error.rule(self.parts.effect, trusted);
        if trusted && rule == Rule::Retry {
            error.trusted();
        }
        if error.delivery() == Delivery::NotSent
            && let Some(why) = self.line.as_deref().and_then(InLine::shut_out)
        {
            return Next::Resolve(Err(self.shut_out(error, why)));
        }
        if self.replay.is_some() && !off!(Once) {
            // One replay in all. One more check may run, for the report only.
            return match rule {
                Rule::Check => self.in_doubt(error),
                Rule::Return | Rule::HandOver | Rule::Retry => {
                    let overtaken = error.delivery() == Delivery::NotSent && !self.is_last_write();
                    Next::Resolve(Err(if overtaken { error.note(self.overtaken()) } else { error }))
                }
            };
        }
        if error.delivery() == Delivery::Ambiguous
            && let Some(Way { errand: Errand::Replay(replay), .. }) = self.way.as_deref()
        {
            // Its replay is on its way already.
            let replay = replay.clone();
            return self.replaced_ended(error, rule, &replay);
        }
        match rule {
            Rule::HandOver | Rule::Return if self.was_withdrawn(&error) && !error.is_repeated() => {
                self.hand_over_again(error)
            }
            Rule::Retry if trusted => self.replay_trusted(error),
            Rule::Return | Rule::HandOver | Rule::Retry => {
                if error.delivery() == Delivery::Answered {
                    self.own_answer();
                }
                let ambiguous = error.delivery() == Delivery::Ambiguous;
                let reason = self.doubt.as_ref().and_then(|doubt| doubt.reason.clone());
                let reason = reason.or_else(|| self.no_check().map(Cow::Borrowed)).filter(|_| ambiguous);
                Next::Resolve(Err(match reason {
                    Some(reason) => error.note(reason),
                    None => error,
                }))
            }
            // As long as bytes are unwritten no replay starts.
            Rule::Check if error.scope() == Scope::Call && self.is_unsent() => self.in_doubt(error),
            Rule::Check => match self.unchecked_replay() {
                Some((replay, request)) => self.replay_after(error, replay, request),
                None => self.in_doubt(error),
            },
        }
    }

    /// Whether bytes of the attempt are still to be sent, as far as its connection tells.
    fn is_unsent(&self) -> bool {
        self.parts.current.activity.poll_sent(&mut Context::from_waker(Waker::noop())).is_err()
    }

    /// What the server's answer to our own key says, if the caller can read it.
    fn keyed_answer(&self, result: &Result<S::Response, CallError>) -> Option<KeyedAnswer<S::Response>> {
        let read = self.parts.lane.config.keyed.as_ref()?.answers.as_ref().filter(|_| self.parts.keyed)?;
        let answer = match result {
            Ok(response) => Ok(response),
            Err(error) if error.delivery() == Delivery::Answered => Err(error),
            Err(_) => return None,
        };
        // Foreign code: if it panics the answer stands as it is.
        catch_unwind(AssertUnwindSafe(|| read(answer))).ok().flatten()
    }

    /// The server's answer says that an earlier attempt landed.
    fn answered_landed(
        &mut self,
        response: Option<S::Response>,
        error: Option<CallError>,
    ) -> Next<S::Response> {
        let mut error = error.unwrap_or_else(|| {
            let generation = self.parts.current.activity.generation_number();
            let error = CallError::answered("the answer to the key of an earlier attempt");
            error.of_call(&self.parts.name, self.parts.effect).with_attempt(generation)
        });
        for attempt in error.attempts_mut() {
            attempt.settled = Some(Settled::Landed);
        }
        self.attempts.append(error.attempts_mut());
        let doubt = self.begin_doubt();
        doubt.verdict = Some(VerdictKind::Landed);
        doubt.reason = Some("the server's answer to its key says so".into());
        doubt.error = Some(error);
        self.landed(response, false)
    }

    /// A write in doubt that needs no check is replayed.
    fn replay_after(&mut self, mut error: CallError, replay: Replay, request: Req) -> Next<S::Response> {
        let now = Instant::now();
        // An earlier one that is still being processed is given its time.
        let not_before = self.doubt.as_ref().and_then(|doubt| doubt.not_before);
        let wait = not_before.map_or(Duration::ZERO, |at| at.saturating_duration_since(now));
        let wait = wait.max(error.retry_after().unwrap_or_default());
        if !self.parts.until.allows(now, wait) {
            return Next::Resolve(Err(error.note("no time for another attempt before the deadline")));
        }
        let ended = error.take_attempts();
        self.attempts.extend(ended);
        self.replay_unchecked(replay, request, wait);
        let doubt = self.begin_doubt();
        doubt.ended_at = Some(Instant::now());
        doubt.error = Some(error);
        Next::Continue
    }

    /// The attempt in doubt has answered itself: the best evidence there is.
    fn own_answer(&mut self) {
        if let Some(doubt) = &mut self.doubt
            && self.replay.is_none()
        {
            doubt.reason = Some("the attempt's own answer arrived".into());
        }
    }

    /// Whether nothing was sent because the attempt's time was up, as far as its end says.
    fn was_withdrawn(&self, error: &CallError) -> bool {
        error.delivery() == Delivery::NotSent
            && match error.cause() {
                Cause::AttemptTimeout => true,
                // A connection that is not of this crate has no other way to say it.
                Cause::Other | Cause::Closed(_) | Cause::NotReady => {
                    self.timed_out || self.parts.current.until.is_some_and(|until| Instant::now() >= until)
                }
                _ => false,
            }
    }

    /// An attempt that was kept has ended while its replay was on its way.
    fn replaced_ended(&mut self, mut error: CallError, rule: Rule, replay: &Replay) -> Next<S::Response> {
        if let Replay::Fenced(fence) = replay {
            settle_all(error.attempts_mut(), &Settled::NotLanded(fence.clone()));
        }
        self.replaced = None;
        if rule == Rule::Return {
            return Next::Resolve(
                Err(error.note("the deadline passed before it could be handed over again")),
            );
        }
        let ended = error.take_attempts();
        self.attempts.extend(ended);
        if let Some(doubt) = &mut self.doubt {
            doubt.error = Some(error);
        }
        Next::Continue
    }

    /// An attempt has ended, and nobody knows whether it landed.
    fn in_doubt(&mut self, mut error: CallError) -> Next<S::Response> {
        let ended = error.take_attempts();
        self.attempts.extend(ended);
        let partial = self.doubt.as_ref().is_some_and(|doubt| doubt.verdict == Some(VerdictKind::Partial));
        let why = match self.no_check() {
            // What was applied in part is never replayed, so that no further verdict counts.
            None if partial && self.replay.is_none() => Some("applied in part"),
            None if self.is_over() => Some("the deadline passed before the doubt was settled"),
            why => why,
        };
        match why {
            Some(why) => Next::Resolve(Err(error.note(why))),
            None => self.enter_doubt(Some(error)),
        }
    }

    /// Nothing was sent, and the attempt's time was up: another hand-over, which is no replay.
    fn hand_over_again(&mut self, mut error: CallError) -> Next<S::Response> {
        if self.parts.above.as_ref().is_some_and(|above| above.activity.has_ended()) {
            // Nobody waits for it further out, so that nothing of it would be sent now either.
            return Next::Resolve(Err(error));
        }
        let request = error
            .take_request_of::<Req>(Some(self.parts.call))
            .or_else(|| self.parts.kept.as_ref().and_then(replica));
        let in_time = self.parts.until.left(Instant::now()).is_none_or(|left| left > LEAST_ATTEMPT);
        match request {
            Some(request) if in_time => {
                self.no_doubt();
                if self.parts.current.activity.is_waiting() {
                    only_attempts(&mut error);
                }
                if self.attempts.len() < ATTEMPTS_KEPT {
                    self.attempts.append(error.attempts_mut());
                }
                self.set_out(request, Errand::Again, None);
                Next::Continue
            }
            Some(_) => Next::Resolve(Err(error.note("no time for another attempt before the deadline"))),
            None => Next::Resolve(Err(error)),
        }
    }

    /// What was in doubt has turned out not to be.
    fn no_doubt(&mut self) {
        if let Some(hold) = &self.parts.hold {
            hold.no_doubt();
        }
        self.doubt = None;
        self.way = None;
        self.replaced = None;
    }

    /// The peer refused the write before processing it, and the caller trusts that this is so.
    fn replay_trusted(&mut self, mut error: CallError) -> Next<S::Response> {
        if self.parts.apart {
            return Next::Resolve(Err(error.note(KEPT_APART)));
        }
        let wait = error.retry_after().unwrap_or_default();
        if !self.parts.until.allows(Instant::now(), wait) {
            return Next::Resolve(Err(error.note("no time for another attempt before the deadline")));
        }
        let Some(request) = self.parts.kept.as_ref().and_then(replica) else {
            return Next::Resolve(Err(error.note("the request cannot be cloned")));
        };
        self.no_doubt();
        let ended = error.take_attempts();
        self.attempts.extend(ended);
        self.refused = Some(error);
        self.set_out(request, Errand::Replay(Replay::Trusted), Some(wait).filter(|wait| !wait.is_zero()));
        Next::Continue
    }

    fn set_out(&mut self, mut request: Req, errand: Errand, wait: Option<Duration>) {
        let trail = Arc::clone(self.trail.get_or_insert_default());
        request.context_mut().set_trail(trail);
        self.way = Some(Box::new(Way {
            service: self.parts.lane.spare(),
            request,
            wait: wait.map(|wait| Box::pin(tokio::time::sleep(wait))),
            waited: wait.unwrap_or_default(),
            in_line: false,
            readied: false,
            errand,
        }));
    }

    /// Waits for its time, and until the service is ready for it.
    fn poll_readied(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        let Some(way) = &mut self.way else { return Poll::Pending };
        if let Some(wait) = &mut way.wait {
            ready!(wait.as_mut().poll(cx));
            way.wait = None;
        }
        if way.readied {
            return Poll::Ready(Ok(()));
        }
        if matches!(way.errand, Errand::Replay(_)) {
            // Before it takes a place below, which the other one may need.
            ready!(self.poll_others(cx));
            if let Err(why) = self.lets_replay_go() {
                return Poll::Ready(Err(self.not_replayed(why)));
            }
        }
        let Some(way) = &mut self.way else { return Poll::Pending };
        if matches!(way.errand, Errand::Again)
            && let Some(above) = self.parts.above.as_ref().filter(|above| !above.activity.is_waiting())
        {
            // The layer whose attempt it is a part of sees that before it polls this again.
            above.activity.waits();
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let readied = way.service.poll_ready(cx);
        way.in_line = readied.is_pending();
        match ready!(readied) {
            // The caller sees to it that the deadline ends this.
            Ok(()) if self.parts.until.is_over() => Poll::Pending,
            Ok(()) => {
                way.readied = true;
                Poll::Ready(Ok(()))
            }
            Err(error) => {
                self.keep_replaced();
                let error = CallError::not_ready(error).of_call(&self.parts.name, self.parts.effect);
                Poll::Ready(Err(error.with_attempt(None)))
            }
        }
    }

    /// Hands the call over as soon as the service is ready for it, and the ledger has granted it.
    fn poll_way(
        &mut self,
        mut attempt: Pin<&mut Option<S::Future>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CallError>> {
        if let Err(error) = ready!(self.poll_readied(cx)) {
            self.way = None;
            return Poll::Ready(Err(error));
        }
        if self.way.as_ref().is_some_and(|way| matches!(way.errand, Errand::Replay(_))) {
            if let Err(why) = self.lets_replay_go() {
                self.way = None;
                return Poll::Ready(Err(self.not_replayed(why)));
            }
            if self.is_beside() {
                self.way = None;
                return Poll::Ready(Err(self.not_replayed(ShutOut::Outlived)));
            }
            self.parts.account.claim();
        }
        // The ledger comes last, so that what it grants is used at once.
        let granted = ready!(self.parts.account.poll_step(cx));
        if granted.is_ok() && self.is_over() {
            return Poll::Pending;
        }
        let Some(way) = self.way.take() else { return Poll::Pending };
        let Way { mut service, mut request, errand, waited, .. } = *way;
        if let Err(error) = granted {
            return Poll::Ready(Err(self.not_granted(error, &errand)));
        }
        if !matches!(errand, Errand::Replay(_))
            && let Some((id, method)) = self.parts.hold.as_deref().and_then(Hold::in_its_way)
        {
            let error = refused(LedgerError::KeyInDoubt { id, method });
            let error = error.of_call(&self.parts.name, self.parts.effect);
            return Poll::Ready(Err(error.with_attempt(None)));
        }
        if !matches!(errand, Errand::Replay(_))
            && let Some(above) = &self.parts.above
        {
            // It goes later than it was counted there, too.
            above.activity.ask_the_gates();
            if above.activity.has_ended() {
                let error = CallError::attempt_timeout(Delivery::NotSent);
                let error = error.of_request(&request, self.parts.effect).with_attempt(None);
                return Poll::Ready(Err(error.with_request(request)));
            }
        }
        self.waited = waited;
        self.timed_out = false;
        self.line = None;
        match errand {
            // What the ledger took is not the attempt's time.
            Errand::First | Errand::Again => {
                let guard = self.guard();
                let now = Instant::now();
                let deadline = self.parts.until.most(now);
                self.parts.current = match deadline.left(now) {
                    // Too little is left to divide it once more.
                    Some(left) if left <= LEAST_ATTEMPT * 2 => Attempted::bounded(&mut request, None, guard),
                    _ => Attempted::prepare(&self.parts.lane.config, &mut request, deadline, now, guard),
                };
                self.count_hand_over();
            }
            Errand::Replay(replay) => {
                self.keep_replaced();
                if let Replay::Fenced(fence) = &replay {
                    self.parts.current.activity.set_replaced(fence.clone());
                }
                // What it replaces ends before it begins: whoever has it may still stop it, and its connection
                // remembers it and tells the server. Before it is claimed, too: that is foreign code, which may take its
                // time.
                put_down(attempt.as_mut());
                // A key counts only until the server may have forgotten it: a wait, or a slow ledger, may have
                // outlasted it, and what is handed over now must not be sent later.
                let end = match self.key_end(&replay) {
                    Ok(end) => end,
                    Err(why) => return Poll::Ready(Err(self.key_is_over(why))),
                };
                if let Err(why) = self.claim_replay() {
                    return Poll::Ready(Err(self.not_replayed(why)));
                }
                if let (Some(doubt), Replay::Fenced(_)) = (&mut self.doubt, &replay) {
                    doubt.beside = doubt.error.as_ref().and_then(CallError::closure).cloned();
                }
                if matches!(replay, Replay::Keyed(_) | Replay::Idempotent) {
                    let error = self.doubt.as_ref().and_then(|doubt| doubt.error.as_ref());
                    let closure = error.and_then(CallError::closure).cloned();
                    self.unchecked = Some((self.attempts.len(), closure));
                }
                let mut before = self.refused.take();
                if let Some(doubt) = &mut self.doubt {
                    before = doubt.error.take().or(before);
                    (doubt.ended_at, doubt.reason, doubt.again) = (None, None, false);
                    // That was said of the attempts before it.
                    doubt.begun = Arc::default();
                }
                self.replay = Some(Box::new(Replayed { why: replay, before }));
                // Doubt about a replay leads to no further one, so that it may take all the time that is left.
                let end = end.filter(|_| !off!(WindowWait));
                self.parts.current = Attempted::bounded(&mut request, end, self.guard());
                // It may wait for a connection, and is asked once more when it goes.
                self.parts.current.activity.waits();
                self.stand_in_line();
            }
        }
        if let Some(above) = &self.parts.above {
            self.parts.current.activity.is_within(&above.activity);
        }
        self.handing_over = true;
        attempt.set(Some(service.call(request)));
        (self.handing_over, self.called) = (false, true);
        Poll::Ready(Ok(()))
    }

    /// Waits until no other write with its key is in doubt. What is waited for below is given up meanwhile.
    fn poll_others(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let Parts { hold: Some(hold), lane, .. } = &self.parts else { return Poll::Ready(()) };
        if lane.config.independent_writes || hold.poll_others(cx).is_ready() {
            return Poll::Ready(());
        }
        if let Some(way) = &mut self.way
            && mem::take(&mut way.in_line)
        {
            way.service = lane.spare();
        }
        Poll::Pending
    }

    /// A connection may send only what is polled, and a caller may poll what it has called only later: what is polled for
    /// the first time counts as handed over now. But it may have been sent then, so that its own replay keeps its place.
    /// It is looked at again once it was polled: another thread may have sent something just before it.
    #[inline]
    fn look_as_it_begins(&self) {
        if !self.is_last_write() && !off!(FirstPoll) {
            self.count_anew();
        }
    }

    #[cold]
    fn count_anew(&self) {
        match &self.parts.hold {
            Some(hold) => hold.goes_later(),
            None if self.is_counted() => _ = self.parts.lane.shared.conflicts.hand_over(),
            None => {}
        }
    }

    /// Its first poll has left it where it is: it may go from there, or once more, on a task of its own.
    fn stays(&mut self) {
        let activity = &self.parts.current.activity;
        if !activity.is_with_somebody() {
            // A service in between holds it back.
            activity.waits();
            return self.stand_in_line();
        }
        if self.line.is_some() {
            return;
        }
        let conflicts = &self.parts.lane.shared.conflicts;
        let standing = match &self.parts.hold {
            Some(hold) => hold.standing(),
            None if self.is_counted() => conflicts.standing(self.sequence),
            None => return,
        };
        let goings = activity.set_order(standing);
        if mem::replace(&mut self.goings, goings) != goings {
            // On another thread, just before that.
            self.look_as_it_begins();
        }
    }

    /// What waits for a connection goes out later than it was counted: whoever gives it to one asks the order of writes
    /// at that moment.
    #[cold]
    fn stand_in_line(&mut self) {
        if self.line.is_some() {
            return;
        }
        let (Lane { config, shared, .. }, replay) = (&*self.parts.lane, self.replay.is_some());
        // By a quarantine, the replay must not go beside the old process.
        let beside = match (replay, &self.doubt) {
            (true, Some(doubt)) if doubt.fence.as_ref().is_some_and(is_quarantine) => doubt.beside.clone(),
            _ => None,
        };
        let independent = config.independent_writes || off!(OtherWrites);
        let line = match &self.parts.hold {
            Some(hold) => hold.in_line(replay, independent),
            None if (self.is_counted() && !independent) || beside.is_some() => {
                shared.conflicts.in_line(self.sequence, replay, independent)
            }
            None => return,
        };
        let line = Arc::new(line.not_beside(beside));
        self.parts.current.activity.set_own_gate(Arc::<InLine>::clone(&line));
        self.line = Some(line);
    }

    /// It may have gone since it stood in line, and have been counted again.
    #[cold]
    fn take_place(&mut self) {
        let Some(line) = &self.line else { return };
        match &mut self.parts.hold {
            Some(hold) => hold.take_place(line),
            None => self.sequence = line.place().writes,
        }
        if line.went() && !off!(WriteWait) {
            self.look_as_it_begins();
        }
    }

    /// A replay may wait below this layer, for a connection or a process's end, and the machine may sleep meanwhile.
    /// Once its key's time is over, by either clock, it must not be sent any more; nor once the old process is known
    /// to have outlived its signals.
    fn close_by_fence(&self) {
        if let Some(replay) = self.replay.as_deref()
            && ((self.key_end(&replay.why).is_err() && !off!(WindowWait)) || self.is_beside())
        {
            self.parts.current.activity.close();
        }
    }

    /// Until when the server keeps the key by which that replay is allowed, where the deadline may come later. The server
    /// forgets it by its own clock, also while the call stands still.
    fn key_end(&self, replay: &Replay) -> Result<Option<Instant>, &'static str> {
        let (Replay::Keyed(fence) | Replay::Fenced(fence)) = replay else {
            return if self.is_upheld() { Ok(None) } else { Err(TAKEN_BACK) };
        };
        let Some(window) = fence.window() else { return Ok(None) };
        let end = self.parts.account.first_sent().window_end(window)?;
        Ok(end.filter(|end| !self.parts.until.ends_before(*end)))
    }

    /// The server may have forgotten the key, so that nothing is known of the write any more.
    fn key_is_over(&mut self, why: &'static str) -> CallError {
        unsettle(&mut self.attempts, |_| true);
        self.last_error().note(why)
    }

    /// Another write forbids the replay.
    fn not_replayed(&mut self, why: ShutOut) -> CallError {
        self.keep_replaced();
        let why = match why {
            ShutOut::Overtaken => self.overtaken(),
            ShutOut::KeyInDoubt => KEY_IN_DOUBT,
            ShutOut::Outlived => OUTLIVED,
        };
        self.last_error().note(why)
    }

    /// The same of one that was handed over and waited for a connection. It was given to none, so that there was no
    /// replay.
    #[cold]
    fn shut_out(&mut self, mut error: CallError, why: ShutOut) -> CallError {
        only_attempts(&mut error);
        self.attempts.append(error.attempts_mut());
        let before = self.replay.take().and_then(|replay| replay.before);
        match &mut self.doubt {
            Some(doubt) => doubt.error = before,
            None => self.refused = before,
        }
        self.not_replayed(why)
    }

    fn overtaken(&self) -> &'static str {
        match &self.parts.hold {
            Some(_) => {
                "not replayed: another write was handed over since, with the same conflict key or without one"
            }
            None => {
                "not replayed: another write was handed over since; independent_writes() or conflict_key(..) would \
                 declare that they do not touch each other"
            }
        }
    }

    /// The ledger has refused.
    fn not_granted(&mut self, error: LedgerError, errand: &Errand) -> CallError {
        if matches!(errand, Errand::First) {
            return refused(error).of_call(&self.parts.name, self.parts.effect).with_attempt(None);
        }
        self.keep_replaced();
        if self.parts.account.is_lost() {
            claimed_by_another(&mut self.attempts);
            return self
                .last_error()
                .note("not replayed: somebody else has settled or claimed it in the ledger");
        }
        self.last_error().note(match error {
            LedgerError::Overtaken(_) => {
                "not replayed: another write that touches it was entered by another process or stack"
            }
            _ => "not replayed: the ledger could not claim the replay",
        })
    }

    /// Starts to settle the doubt about the attempt, unless a check is under way already.
    fn enter_doubt(&mut self, error: Option<CallError>) -> Next<S::Response> {
        let is_replay = self.replay.is_some();
        self.begin_doubt();
        let Some(doubt) = &mut self.doubt else { return Next::Continue };
        if error.is_some() {
            let now = Instant::now();
            doubt.ended_at = Some(now);
            if is_replay {
                // The first attempt's doubt is settled: this is another one.
                doubt.since = now;
            }
            doubt.error = error;
        }
        if doubt.settling.is_some() && doubt.checking.load(Ordering::Relaxed) {
            // It goes on: what it finds to have landed has landed.
            doubt.again = true;
            return Next::Continue;
        }
        let Some(request) = self.parts.kept.as_ref().and_then(replica) else {
            let why = "the request cannot be cloned again, so that no check could ask for it";
            doubt.reason = Some(why.into());
            return match doubt.ended_at {
                Some(_) => Next::Resolve(Err(self.last_error().note(why))),
                None => Next::Continue,
            };
        };
        doubt.checking = Arc::default();
        let facts = settle::Facts {
            call: self.parts.call,
            attempts: self.attempts.clone(),
            closure: doubt.error.as_ref().and_then(|error| error.closure().cloned()),
            activity: Arc::clone(&self.parts.current.activity),
            first_sent: self.parts.account.first_sent().clone(),
            since: doubt.since,
            not_before: doubt.not_before,
            pause: doubt.asks_for_a_pause(),
            stopped_at: doubt.ended_at.filter(|_| doubt.is_stopped()),
            until: self.parts.until.clone(),
            checking: Arc::clone(&doubt.checking),
            partial: Arc::clone(&doubt.partial),
            begun: Arc::clone(&doubt.begun),
        };
        doubt.settling = Some(Unwinding::new(settle(Arc::clone(&self.parts.lane), request, facts)));
        Next::Continue
    }

    /// A check has come to a verdict; `pending` says whether the attempt may still answer.
    fn settled(
        &mut self,
        verdict: Verdict<S::Response>,
        pending: bool,
        cx: &mut Context<'_>,
    ) -> Next<S::Response> {
        let Some(doubt) = &mut self.doubt else { return Next::Continue };
        doubt.verdict = Some(verdict.kind());
        let again = mem::take(&mut doubt.again);
        let why: Cow<'static, str> = match verdict {
            Verdict::Landed(response) => return self.landed(response, pending),
            Verdict::NotLanded(fence) => {
                let sending = fence.basis() == FenceBasis::Declared
                    && !off!(Unsent)
                    && !doubt.is_stopped()
                    && self.parts.current.activity.poll_sent(cx).is_err();
                // Its connection may have closed since the check began.
                let closure = doubt.error.as_ref().and_then(CallError::closure);
                let outlived = is_quarantine(&fence) && has_outlived(closure);
                if !sending && !outlived {
                    return self.not_landed(fence, pending);
                }
                doubt.verdict = Some(VerdictKind::Unknown);
                match outlived {
                    true => settle::OUTLIVED.into(),
                    false => {
                        "absent, but the request is not sent to its end, so that no declared fence holds"
                            .into()
                    }
                }
            }
            Verdict::InFlight { .. } => "still being processed".into(),
            Verdict::Partial => "applied in part".into(),
            Verdict::Unknown(why) => why,
        };
        doubt.reason = Some(why.clone());
        if pending {
            // Its late answer may still come, and its end may bring a fence.
            return Next::Continue;
        }
        let partial = doubt.verdict == Some(VerdictKind::Partial);
        if again && !partial && !self.is_over() {
            return self.enter_doubt(None);
        }
        Next::Resolve(Err(self.last_error().note(why)))
    }

    fn landed(&mut self, response: Option<S::Response>, pending: bool) -> Next<S::Response> {
        if pending {
            let attempt = self.kept_attempt();
            self.attempts.push(attempt);
        }
        settle_all(&mut self.attempts, &Settled::Landed);
        // Foreign code: if it panics the result is lost, and not the report too.
        let made = || Some((self.parts.lane.config.landed_with.as_ref()?)(self.parts.kept.as_ref()?));
        let response = response.map_or_else(|| catch_unwind(AssertUnwindSafe(made)), |it| Ok(Some(it)));
        Next::Resolve(match response {
            Ok(Some(response)) => Ok(response),
            Ok(None) => Err(self.last_error()),
            Err(_) => Err(self.last_error().note("landed_with panicked")),
        })
    }

    fn not_landed(&mut self, fence: Fence, pending: bool) -> Next<S::Response> {
        let settled = Settled::NotLanded(fence.clone());
        let from = self.covered_by(&fence);
        settle_all(&mut self.attempts[from..], &settled);
        if pending {
            let mut attempt = self.kept_attempt();
            attempt.settled = Some(settled);
            self.replaced = Some(Box::new(attempt));
        }
        let mut wait = Duration::ZERO;
        if let Some(doubt) = &mut self.doubt {
            doubt.fence = Some(fence.clone());
            // What the peer asked for counts from when it did.
            if let (Some(error), Some(ended_at)) = (&doubt.error, doubt.ended_at) {
                wait = error.retry_after().unwrap_or_default().saturating_sub(ended_at.elapsed());
            }
        }
        if self.replay.is_some() && !off!(Once) {
            return Next::Resolve(Err(self.last_error().note("not replayed a second time")));
        }
        let request = self.parts.kept.as_ref().and_then(replica);
        let why = match &request {
            _ if self.parts.apart => Some(KEPT_APART),
            Some(_) if self.parts.until.allows(Instant::now(), wait) => None,
            Some(_) => Some("no time for another attempt before the deadline"),
            None => Some("the request cannot be cloned again"),
        };
        let (Some(request), None) = (request, why) else {
            self.keep_replaced();
            return Next::Resolve(Err(self.last_error().note(why.unwrap_or_default())));
        };
        self.set_out(
            request,
            Errand::Replay(Replay::Fenced(fence)),
            Some(wait).filter(|wait| !wait.is_zero()),
        );
        Next::Continue
    }

    /// The first of the attempts of which that fence says that they did not land. One that the layer found for a
    /// replay says nothing of an earlier attempt that went unchecked, if that one's process lives.
    fn covered_by(&self, fence: &Fence) -> usize {
        let Some((before, closure)) = &self.unchecked else { return 0 };
        let generation = |attempt: &Attempt| attempt.generation;
        let same = || {
            let last = self.attempts.last().and_then(generation);
            last.is_some() && self.attempts[..*before].iter().all(|attempt| generation(attempt) == last)
        };
        if let Some(closure) = closure {
            closure.learn_exit();
        }
        let covers = match fence.basis() {
            _ if fence.is_of_the_check() => true,
            FenceBasis::Observed => same() || closure.as_ref().is_some_and(settle::is_gone),
            FenceBasis::Declared => !settle::is_still_there(closure.as_ref()),
        };
        if covers { 0 } else { *before }
    }

    /// The attempt that timed out and may still answer.
    fn kept_attempt(&mut self) -> Attempt {
        let error = CallError::attempt_timeout(Delivery::Ambiguous);
        let mut attempt = Attempt::of(&error, self.parts.current.activity.generation_number());
        attempt.waited = mem::take(&mut self.waited);
        attempt
    }

    /// What ended the attempt in doubt, or its own time if it has not ended.
    fn last_error(&mut self) -> CallError {
        if let (None, Some(doubt)) = (&self.replay, &mut self.doubt)
            && let Some(closure) = doubt.error.as_ref().and_then(CallError::closure)
        {
            // The error goes, and whether its process is still there may show only now.
            doubt.beside = Some(closure.clone());
        }
        let error = self.doubt.as_mut().and_then(|doubt| doubt.error.take()).or_else(|| self.refused.take());
        error.unwrap_or_else(|| {
            CallError::attempt_timeout(Delivery::Ambiguous).of_call(&self.parts.name, self.parts.effect)
        })
    }

    /// The deadline has passed: what is known so far.
    fn out_of_time(&mut self, pending: bool) -> CallError {
        self.parts.current.activity.end();
        let reason = self.doubt.as_ref().and_then(|doubt| doubt.reason.clone());
        if let Some(way) = self.way.take() {
            self.keep_replaced();
            let error = CallError::deadline(Delivery::NotSent).of_call(&self.parts.name, self.parts.effect);
            return error.note(match way.errand {
                Errand::First => "the deadline passed before it was entered in the ledger and handed over",
                Errand::Again | Errand::Replay(_) => {
                    "the deadline passed before it could be handed over again"
                }
            });
        }
        let error = if pending {
            let error = CallError::deadline(Delivery::Ambiguous).of_call(&self.parts.name, self.parts.effect);
            let mut error = error.with_attempt(self.parts.current.activity.generation_number());
            if let Some(attempt) = error.attempts_mut().first_mut() {
                attempt.waited = mem::take(&mut self.waited);
            }
            error
        } else {
            self.last_error().note("the deadline passed before the doubt was settled")
        };
        match reason.or_else(|| self.no_check().map(Cow::Borrowed)) {
            Some(reason) => error.note(reason),
            None => error,
        }
    }

    /// The end of the call: its entry in the ledger, one report, and the attempts into the error. Where the ledger
    /// has to be waited for, what is left of the call is that.
    fn close(&mut self, mut result: Result<S::Response, CallError>) -> Closed<S::Response> {
        if result.is_ok() && self.is_plain() {
            if self.parts.above.is_some() {
                self.what_goes_back(false, false).give();
            }
            return Ok(result);
        }
        // A layer in between may have it on a task of its own: no part of it begins any more.
        self.parts.current.activity.end();
        if let Err(error) = &mut result {
            self.hand_back(error);
        }
        let trail = self.trail.take();
        let in_between = trail.as_ref().map(|trail| trail.take()).unwrap_or_default();
        let mut result = match result {
            Ok(response) => {
                self.attempts.extend(in_between);
                Ok(response)
            }
            Err(error) => {
                let error = error.with_id(Some(self.parts.call)).judged_by(self.parts.basis);
                let mut error = error.after_attempts(mem::take(&mut self.attempts));
                if error.delivery() != Delivery::Answered {
                    let beside = self.is_beside();
                    unsettle(error.attempts_mut(), |fence| {
                        !fence.stops_the_attempt() || (beside && is_quarantine(fence))
                    });
                    if beside {
                        error = error.note(OUTLIVED);
                    }
                }
                Err(error)
            }
        };
        let outcome = result.as_ref().err().map(CallError::outcome);
        let doubtful = match &result {
            Ok(_) => self.doubt.is_some(),
            Err(error) => {
                self.doubt.is_some()
                    || matches!(outcome, Some(Outcome::Unknown | Outcome::DoneResultLost))
                    || error.may_have_landed()
            }
        };
        if self.answered && (doubtful || !self.attempts.is_empty()) {
            let mut attempt = Attempt::answered(self.parts.current.activity.generation_number());
            attempt.waited = self.waited;
            self.attempts.push(attempt);
        }
        let reason = match (self.doubt.as_ref().and_then(|doubt| doubt.reason.clone()), &result) {
            (Some(reason), _) => Some(reason.into_owned()),
            (None, Err(error)) if doubtful => error.notes().last().map(str::to_owned),
            (None, _) => None,
        };
        // First the ledger: whoever is told of the doubt finds it there.
        let state = self.state(&result, reason.as_deref());
        let told = doubtful && self.tells(matches!(state, State::InDoubt { .. }));
        let step = self.enter_end(&state, told);
        if doubtful && let Err(error) = &mut result {
            error.set_reported();
        }
        let doubt = told.then(|| self.doubt_report(&result, reason, outcome));
        // Also if a layer further in has told otherwise.
        let may_be_lost = step.is_some() && outcome == Some(Outcome::NotDone);
        let lost = may_be_lost
            .then(|| self.doubt_report(&result, Some(TAKEN_OVER.to_owned()), Some(Outcome::Unknown)));
        // What a caller that goes away before it is recorded would be the only one to know.
        let untold = !doubtful && outcome != Some(Outcome::NotDone);
        let abandoned = (untold && step.is_some()).then(|| self.untold(&result));
        let success = (result.is_ok() && self.attempts.len() > 1).then(|| {
            let attempts = mem::take(&mut self.attempts);
            self.call_report(attempts, None)
        });
        let failure = Some(self.parts.basis).filter(|_| self.parts.outermost);
        let news = News { events: self.parts.events.share(), doubt, lost, success, failure, abandoned };
        let not_done = outcome == Some(Outcome::NotDone);
        let mut back = self.what_goes_back(doubtful && result.is_err() && !not_done, not_done);
        match step {
            None => {
                back.give();
                news.tell(&result);
                Ok(result)
            }
            Some(step) => {
                let (hold, until) = (self.parts.hold.take(), self.parts.until.clone());
                let method = self.parts.name.clone().into_owned();
                let closing =
                    self.parts.account.closing(step, state, result, (news, back), method, hold, until);
                Err(Box::new(closing))
            }
        }
    }

    /// A request that was handed back goes on as it came: what this layer has put into it would tell those that have it
    /// next that this layer still answers for it. It does not go on once it was attempted: a replay is this layer's alone.
    fn hand_back(&self, error: &mut CallError) {
        let was_sent = |attempt: &Attempt| attempt.delivery != Delivery::NotSent;
        if self.replay.is_some() || self.attempts.iter().any(was_sent) {
            return error.set_repeated();
        }
        let Some(mut request) = error.take_request_of::<Req>(Some(self.parts.call)) else { return };
        let context = request.context_mut();
        context.set_guarded(false);
        context.set_activity(self.parts.above.as_ref().map(|above| Arc::clone(&above.activity)));
        context.set_attempt_until(self.parts.above.as_ref().and_then(|above| above.attempt_until));
        error.give_request(request);
    }

    fn doubt_report(
        &self,
        result: &Result<S::Response, CallError>,
        reason: Option<String>,
        outcome: Option<Outcome>,
    ) -> DoubtReport {
        let attempts = match result {
            Ok(_) => self.attempts.clone(),
            Err(error) => error.attempts().to_vec(),
        };
        DoubtReport {
            call: self.parts.call,
            method: self.parts.name.clone().into_owned(),
            effect: self.parts.effect,
            basis: self.parts.basis,
            attempts,
            verdict: self.doubt.as_ref().and_then(|doubt| doubt.verdict),
            reason,
            fence: self.doubt.as_ref().and_then(|doubt| doubt.fence.clone()),
            replayed: self.replay.is_some(),
            outcome,
        }
    }
}

impl<S, Req, Res> WriteCall<S, Req, Res> {
    #[inline(always)]
    fn new(parts: Parts<S, Req, Res>) -> Self {
        Self {
            parts,
            sequence: 0,
            attempts: Vec::new(),
            polled: false,
            timed_out: false,
            doubt: None,
            way: None,
            replay: None,
            unchecked: None,
            waited: Duration::ZERO,
            replaced: None,
            refused: None,
            trail: None,
            line: None,
            handing_over: false,
            called: false,
            goings: 0,
            judging: false,
            answered: false,
        }
    }

    /// Whether an attempt itself has succeeded and there is nothing to say of it, neither to anybody who watches
    /// nor to the ledger.
    fn is_plain(&self) -> bool {
        self.answered
            && self.doubt.is_none()
            && self.attempts.is_empty()
            && self.trail.is_none()
            && self.parts.account.is_in_memory()
    }

    /// It is handed over for the first time, or anew since nothing of it was sent. Counted only where somebody
    /// may ask.
    fn count_hand_over(&mut self) {
        let counted = self.is_counted();
        match &mut self.parts.hold {
            Some(hold) => hold.hand_over(),
            None if counted => self.sequence = self.parts.lane.shared.conflicts.hand_over(),
            None => {}
        }
    }

    /// Whether somebody may ask for its place among those without a key.
    fn is_counted(&self) -> bool {
        let config = &self.parts.lane.config;
        config.may_replay() && !config.independent_writes
    }

    fn guard(&self) -> Guard {
        guard(&self.parts.lane.shared, self.parts.hold.as_deref())
    }

    /// Whether a check has found that the server had begun with the attempt under way, or with one before it: then no
    /// word that it was not sent or not processed is to be believed.
    fn was_found_begun(&self) -> bool {
        self.doubt.as_ref().is_some_and(|doubt| doubt.begun.load(Ordering::Relaxed))
    }

    /// The attempt that a replay was to follow is one of those that have ended.
    fn keep_replaced(&mut self) {
        self.attempts.extend(self.replaced.take().map(|replaced| *replaced));
    }

    /// Whether no write that touches it was handed over since.
    #[inline]
    fn is_last_write(&self) -> bool {
        let Lane { config, shared, .. } = &*self.parts.lane;
        config.independent_writes
            || off!(OtherWrites)
            || match &self.parts.hold {
                Some(hold) => hold.is_last(),
                None => shared.conflicts.is_last(self.sequence),
            }
    }

    /// Whether another write lets the replay go.
    fn lets_replay_go(&self) -> Result<(), ShutOut> {
        let independent = self.parts.lane.config.independent_writes || off!(OtherWrites);
        match &self.parts.hold {
            Some(hold) => hold.lets_go(independent),
            None if self.is_last_write() => Ok(()),
            None => Err(ShutOut::Overtaken),
        }
    }

    /// Claims the replay, unless another write forbids it.
    fn claim_replay(&mut self) -> Result<(), ShutOut> {
        let Lane { config, shared, .. } = &*self.parts.lane;
        let independent = config.independent_writes || off!(OtherWrites);
        match &mut self.parts.hold {
            Some(hold) => hold.claim(independent),
            None if independent => Ok(()),
            None => {
                let claimed = shared.conflicts.claim(self.sequence);
                self.sequence += u64::from(claimed);
                if claimed { Ok(()) } else { Err(ShutOut::Overtaken) }
            }
        }
    }

    /// Whether the layer's own quarantine is what the replay goes by, and the old process is there all the same. That
    /// may show only now: the connection may have closed while the check ran, and its process ends later still.
    fn is_beside(&self) -> bool {
        let Some(doubt) = &self.doubt else { return false };
        let by = doubt.fence.as_ref().is_some_and(is_quarantine);
        let last = doubt.error.as_ref().filter(|_| self.replay.is_none()).and_then(CallError::closure);
        by && (has_outlived(doubt.beside.as_ref()) || has_outlived(last))
    }

    /// The call is over here. A layer further out reports what becomes of it from now on, unless this one, or one
    /// further in, has told that it is in doubt.
    #[cold]
    #[inline(never)]
    fn what_goes_back(&mut self, told: bool, not_done: bool) -> GivenBack {
        GivenBack { above: self.parts.above.take().map(|above| above.activity), told, not_done }
    }

    /// What the ledger says of the write from now on.
    fn state(&self, result: &Result<Res, CallError>, reason: Option<&str>) -> State {
        let by_check = || State::Landed { by: "check".to_owned() };
        let error = match result {
            Ok(_) if self.answered => return State::Answered,
            Ok(_) => return by_check(),
            Err(error) => error,
        };
        match error.outcome() {
            Outcome::DoneResultLost => by_check(),
            Outcome::Answered if !error.may_have_landed() => State::Answered,
            Outcome::NotDone => not_landed(error.attempts(), error.cause().name()),
            _ => State::InDoubt { reason: reason.unwrap_or(error.cause().name()).to_owned() },
        }
    }

    /// Whether this layer tells of its doubt, rather than one further in, or one further out that has ended before it.
    fn tells(&self, in_doubt: bool) -> bool {
        let Parts { current, above, .. } = &self.parts;
        match in_doubt {
            true => current.activity.tells() && above.as_ref().is_none_or(|above| above.activity.lets_tell()),
            false => !current.activity.was_told(),
        }
    }

    fn enter_end(&mut self, state: &State, told: bool) -> Option<BoxFuture<Result<u64, LedgerError>>> {
        let Parts { account, lane, name, effect, hold, .. } = &mut self.parts;
        // Another layer keeps what it reports; but it does not know of this one's key.
        let keeps = hold.is_some() || told;
        let memory = lane.shared.ledger.memory().filter(|_| keeps);
        account.close(state, memory, name, *effect, hold.as_deref())
    }

    /// The report of a write whose end its caller is not told.
    fn untold(&self, result: &Result<Res, CallError>) -> CallReport {
        let (mut attempts, outcome) = match result {
            Ok(_) => (self.attempts.clone(), Outcome::Answered),
            Err(error) => (error.attempts().to_vec(), error.outcome()),
        };
        if result.is_ok() && attempts.is_empty() {
            attempts.push(Attempt::answered(self.parts.current.activity.generation_number()));
        }
        let mut report = self.call_report(attempts, Some(outcome));
        report.notes.push("abandoned while its end was recorded".to_owned());
        report
    }

    fn call_report(&self, attempts: Vec<Attempt>, outcome: Option<Outcome>) -> CallReport {
        CallReport {
            call: Some(self.parts.call),
            method: self.parts.name.clone().into_owned(),
            effect: self.parts.effect,
            basis: self.parts.basis,
            attempts,
            outcome,
            notes: Vec::new(),
        }
    }

    /// The caller went away. `pending` says whether an attempt may still be with the server.
    fn abandon(&mut self, pending: bool) {
        self.parts.current.activity.end();
        let replaced = self.replaced.take();
        let withdrawn = self.parts.current.activity.was_withdrawn() && !self.was_found_begun();
        let in_doubt = pending && replaced.is_none() && !withdrawn;
        self.attempts.extend(replaced.map(|replaced| *replaced));
        let unjudged = self.judging && !self.attempts.iter().any(Attempt::is_in_doubt);
        if in_doubt || self.handing_over || unjudged {
            let mut attempt = Attempt::unanswered("abandoned");
            attempt.generation = self.parts.current.activity.generation_number();
            self.attempts.push(attempt);
        }
        let beside = self.is_beside();
        unsettle(&mut self.attempts, |fence| !fence.stops_the_attempt() || (beside && is_quarantine(fence)));
        let in_doubt = self.attempts.iter().any(Attempt::is_in_doubt) && !off!(DropGuard);
        let resolved = self.parts.current.activity.resolved();
        let state = match (in_doubt, resolved) {
            (true, None) => State::InDoubt { reason: "abandoned by its caller".to_owned() },
            (true, Some(true)) => State::Landed { by: "a layer further in".to_owned() },
            (true, Some(false)) => State::Answered,
            (false, _) => not_landed(&self.attempts, "abandoned"),
        };
        let told = in_doubt && resolved.is_none() && self.tells(true);
        self.what_goes_back(in_doubt, !in_doubt).give_unread();
        self.parts.account.interrupt();
        let _ = self.enter_end(&state, told);
        if told {
            let attempts = mem::take(&mut self.attempts);
            let report = self.call_report(attempts, Some(Outcome::Unknown));
            self.parts.events.emit(Event::Abandoned(&report));
        }
    }
}

/// To have waited for a connection that did not come is no attempt.
fn only_attempts(error: &mut CallError) {
    let waited = Cause::AttemptTimeout.name();
    error.attempts_mut().retain(|it| it.generation.is_some() || it.cause != waited);
}

/// Lets go of an attempt. It is foreign code: should its destructor panic, what is known of the write stands.
#[inline]
fn put_down<F>(mut attempt: Pin<&mut Option<F>>) {
    let _ = catch_unwind(AssertUnwindSafe(|| attempt.set(None)));
}

/// Not landed: by the fence that says so, or since nothing of it was sent or processed.
fn not_landed(attempts: &[Attempt], why: &str) -> State {
    let fence = attempts.iter().rev().find_map(|attempt| match &attempt.settled {
        Some(Settled::NotLanded(fence)) => Some(fence),
        _ => None,
    });
    fence.map_or_else(|| State::not_done(why), State::by_fence)
}

/// Whether it is the layer's own, that was declared for a server that ends when it is told to.
fn is_quarantine(fence: &Fence) -> bool {
    fence.basis() == FenceBasis::Declared && !fence.is_of_the_check()
}

/// Settles every attempt that is in doubt.
fn settle_all(attempts: &mut [Attempt], by: &Settled) {
    for attempt in attempts.iter_mut().filter(|attempt| attempt.is_in_doubt()) {
        attempt.settled = Some(by.clone());
    }
}

/// Whoever has the write may have handed it over: that it did not land is no longer known here.
pub(super) fn claimed_by_another(attempts: &mut Vec<Attempt>) {
    unsettle(attempts, |_| true);
    if !attempts.iter().any(Attempt::is_in_doubt) {
        // Nor was anything of ours processed: but theirs may have been.
        attempts.push(Attempt::unanswered("claimed_by_another"));
    }
}

/// What a verdict said of the attempts by such a fence holds no longer.
fn unsettle(attempts: &mut [Attempt], by: impl Fn(&Fence) -> bool) {
    for attempt in attempts {
        if matches!(&attempt.settled, Some(Settled::NotLanded(fence)) if by(fence)) {
            attempt.settled = None;
        }
    }
}

impl<Res> Doubt<Res> {
    /// Whether the attempt's connection has ended, so that nothing of it is sent any more.
    fn is_stopped(&self) -> bool {
        self.error.as_ref().is_some_and(|error| error.scope() == Scope::Connection)
    }

    /// Whether the server's answer asks for one.
    fn asks_for_a_pause(&self) -> bool {
        let wait = self.error.as_ref().and_then(CallError::retry_after);
        self.not_before.is_some() || wait.is_some_and(|wait| !wait.is_zero())
    }

    fn new() -> Self {
        Self {
            since: Instant::now(),
            ended_at: None,
            not_before: None,
            error: None,
            settling: None,
            checking: Arc::default(),
            partial: Arc::default(),
            begun: Arc::default(),
            again: false,
            verdict: None,
            fence: None,
            beside: None,
            reason: None,
        }
    }
}

#[pinned_drop]
impl<S, Req> PinnedDrop for ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    fn drop(self: Pin<&mut Self>) {
        let mut this = self.project();
        if let Kind::Write(write) = this.kind {
            // The attempt goes first: its connection marks whether it could still be withdrawn.
            let pending = this.attempt.is_some();
            put_down(this.attempt.as_mut());
            write.as_mut().project().call.abandon(pending);
        }
    }
}

impl<S, Req> fmt::Debug for ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("write_safety::ResponseFuture { .. }")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use tower::{Layer, ServiceExt, service_fn};

    use super::*;
    use crate::{BoxError, InDoubt, Tagged, VerdictKind, WriteSafetyLayer};

    #[tokio::test]
    async fn a_write_that_the_check_finds_is_one_attempt_and_settled() {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        let layer = WriteSafetyLayer::new(|doubt: InDoubt<Tagged<&'static str>, u8>| async move {
            Ok::<_, BoxError>(doubt.landed(7))
        })
        .on_event(move |event| sink.lock().unwrap().push(serde_json::to_value(event).unwrap()));
        let lost = service_fn(|_: Tagged<&'static str>| async { Err::<u8, _>(CallError::ambiguous("lost")) });

        let done = layer.layer(lost).oneshot(Tagged::new("pay", Effect::Write)).await;
        assert_eq!(done.unwrap(), 7);
        let seen = seen.lock().unwrap();
        let [report] = &seen[..] else { panic!("{seen:?}") };
        assert_eq!(report["event"], "in_doubt");
        assert_eq!(report["verdict"], serde_json::to_value(VerdictKind::Landed).unwrap());
        assert_eq!(report["attempts"].as_array().map(Vec::len), Some(1));
        assert_eq!(report["attempts"][0]["settled"], "landed");
    }
}
