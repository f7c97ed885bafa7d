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
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project::{pin_project, pinned_drop};
use tokio::time::{Instant, Sleep, sleep_until};
use tower::Service;

use super::{
    Attempted, Lane,
    fence::{Fence, FenceBasis},
    settle::{self, settle},
    verdict::{Verdict, VerdictKind},
};
use crate::{
    Attempt, Basis, Call, CallError, CallId, Cause, Delivery, Effect, Outcome, Rule, Settled,
    call::{Trail, replica},
    connection::BoxFuture,
    deadline::Until,
    event::{CallReport, DoubtReport, Event, Events},
};

/// Below this much time left, an attempt gets no attempt timeout of its own any more.
const LEAST_ATTEMPT: Duration = Duration::from_millis(1);
/// How many hand-overs of which nothing was sent are remembered.
const ATTEMPTS_KEPT: usize = 64;

/// The future of a [`WriteSafety`](super::WriteSafety) service's call.
#[pin_project(PinnedDrop)]
pub struct ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    /// The attempt under way. Of a write, it stays here while it is in doubt.
    #[pin]
    attempt: Option<S::Future>,
    /// Tells when the attempt has taken long enough; armed when it is first pending.
    #[pin]
    timer: Option<Sleep>,
    kind: Kind<S, Req, S::Response>,
}

#[expect(clippy::large_enum_variant, reason = "a box would cost each write an allocation")]
enum Kind<S, Req, Res> {
    /// A read, on its way through; with what reports it, if this layer is the outermost.
    Passing {
        reporter: Option<Events>,
        call: CallId,
        basis: Basis,
        effect: Effect,
    },
    Refused(Option<CallError>),
    Write(WriteCall<S, Req, Res>),
    Done,
}

struct WriteCall<S, Req, Res> {
    lane: Arc<Lane<S, Req, Res>>,
    /// The request, where a replay may follow.
    kept: Option<Req>,
    name: Cow<'static, str>,
    effect: Effect,
    basis: Basis,
    call: CallId,
    until: Until,
    events: Events,
    outermost: bool,
    /// The attempt under way.
    current: Attempted,
    /// This write's place among the stack's writes.
    sequence: u64,
    /// The attempts that have ended.
    attempts: Vec<Attempt>,
    polled: bool,
    timed_out: bool,
    doubt: Option<Box<Doubt<Res>>>,
    way: Option<Box<Way<S, Req>>>,
    replay: Option<Replay>,
    /// How long was waited before it.
    waited: Duration,
    /// The attempt under way, as a verdict has settled it.
    replaced: Option<Attempt>,
    /// The refusal that a trusted replay follows.
    refused: Option<CallError>,
    trail: Option<Arc<Trail>>,
    /// Whether a service is being called, so that a panic leaves a doubt.
    handing_over: bool,
    /// Whether an attempt itself succeeded, rather than a check that found it.
    answered: bool,
}

/// A doubt about a write.
struct Doubt<Res> {
    /// When it arose: the attempt ended or timed out.
    since: Instant,
    /// When the attempt ended; `None` while it may still answer.
    ended_at: Option<Instant>,
    /// What ended it.
    error: Option<CallError>,
    settling: Option<BoxFuture<Verdict<Res>>>,
    checking: Arc<AtomicBool>,
    /// Whether the attempt ended while a check was under way, so that another may find a fence.
    again: bool,
    verdict: Option<VerdictKind>,
    fence: Option<Fence>,
    reason: Option<Cow<'static, str>>,
}

/// On the way to another hand-over.
struct Way<S, Req> {
    service: S,
    request: Req,
    wait: Option<Pin<Box<Sleep>>>,
    waited: Duration,
    /// `None`: nothing was sent, so that it is no replay.
    replay: Option<Replay>,
}

/// Why a replay is allowed.
#[derive(Clone)]
enum Replay {
    Fenced(Fence),
    Trusted,
}

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
        Self { attempt: Some(attempt), timer: None, kind: Kind::Passing { reporter, call, basis, effect } }
    }

    pub(super) fn refused(error: CallError) -> Self {
        Self { attempt: None, timer: None, kind: Kind::Refused(Some(error)) }
    }

    #[expect(clippy::too_many_arguments, reason = "one caller, and each is a fact of the call")]
    pub(super) fn write(
        attempt: S::Future,
        lane: Arc<Lane<S, Req, S::Response>>,
        kept: Option<Req>,
        name: Cow<'static, str>,
        effect: Effect,
        basis: Basis,
        call: CallId,
        until: Until,
        current: Attempted,
        sequence: u64,
        events: Events,
        outermost: bool,
    ) -> Self {
        let write = WriteCall {
            lane,
            kept,
            name,
            effect,
            basis,
            call,
            until,
            events,
            outermost,
            current,
            sequence,
            attempts: Vec::new(),
            polled: false,
            timed_out: false,
            doubt: None,
            way: None,
            replay: None,
            waited: Duration::ZERO,
            replaced: None,
            refused: None,
            trail: None,
            handing_over: false,
            answered: false,
        };
        Self { attempt: Some(attempt), timer: None, kind: Kind::Write(write) }
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

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        match this.kind {
            Kind::Passing { reporter, call, basis, effect } => {
                let Some(attempt) = this.attempt.as_mut().as_pin_mut() else { return Poll::Pending };
                let result = ready!(attempt.poll(cx));
                let result = match (result, reporter) {
                    (Ok(response), _) => Ok(response),
                    (Err(error), None) => Err(error.judged_by(*basis)),
                    (Err(error), Some(events)) => {
                        let error = error.of_call("", *effect).judged_by(*basis).with_attempt(None);
                        events.failed(Some(*call), *basis, &error);
                        Err(error)
                    }
                };
                this.attempt.set(None);
                *this.kind = Kind::Done;
                Poll::Ready(result)
            }
            Kind::Refused(error) => error.take().map_or(Poll::Pending, |error| Poll::Ready(Err(error))),
            Kind::Write(write) => {
                let result = ready!(write.poll(this.attempt.as_mut(), this.timer.as_mut(), cx));
                // Resolved: from here on nobody abandons it.
                this.attempt.set(None);
                this.timer.set(None);
                let Kind::Write(write) = mem::replace(this.kind, Kind::Done) else {
                    unreachable!("it was one a line ago")
                };
                let basis = write.basis;
                Poll::Ready(write.report(result.map_err(|error| error.judged_by(basis))))
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
        mut timer: Pin<&mut Option<Sleep>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<S::Response, CallError>> {
        let mut first = !mem::replace(&mut self.polled, true);
        loop {
            // As long as nothing has happened the first poll reads no clock.
            let first = mem::replace(&mut first, false);
            // The attempt itself first: what it says is better evidence than any check's.
            if let Some(future) = attempt.as_mut().as_pin_mut()
                && let Poll::Ready(result) = future.poll(cx)
            {
                attempt.set(None);
                timer.set(None);
                match self.attempt_ended(result) {
                    Next::Resolve(result) => return Poll::Ready(result),
                    Next::Continue => continue,
                }
            }

            if attempt.is_some() && !self.timed_out {
                if let Some(until) = self.current.until {
                    if timer.is_none() {
                        timer.set(Some(sleep_until(until)));
                    }
                    if let Some(sleep) = timer.as_mut().as_pin_mut()
                        && self.until.poll_attempt(sleep, until, self.current.stood, cx).is_ready()
                    {
                        // Once more, now past its time: what is still queued is withdrawn, and what some layer
                        // below holds up must not be sent later, when the fence has been found to hold.
                        self.timed_out = true;
                        self.current.activity.close();
                        continue;
                    }
                }
            } else if attempt.is_some()
                && self.doubt.is_none()
                && self.no_check().is_none()
                && !self.is_over()
                && let Next::Resolve(result) = self.enter_doubt(None)
            {
                return Poll::Ready(result);
            }

            if let Some(doubt) = &mut self.doubt
                && let Some(settling) = &mut doubt.settling
                && let Poll::Ready(verdict) = settling.as_mut().poll(cx)
            {
                doubt.settling = None;
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
                let pending = attempt.is_some();
                return Poll::Ready(Err(self.out_of_time(pending)));
            }
            return Poll::Pending;
        }
    }

    /// Why no check can be made, if none can.
    fn no_check(&self) -> Option<&'static str> {
        match (&self.lane.config.check, &self.kept) {
            (None, _) => Some("no effect check"),
            (Some(_), None) => Some("the request cannot be cloned, so that no check could ask for it"),
            (Some(_), Some(_)) => None,
        }
    }

    /// Whether the deadline has passed.
    fn is_over(&self) -> bool {
        self.until.is_over()
    }

    fn attempt_ended(&mut self, result: Result<S::Response, CallError>) -> Next<S::Response> {
        let mut error = match result {
            Ok(response) => {
                self.answered = true;
                self.own_answer();
                return Next::Resolve(Ok(response));
            }
            Err(error) => {
                error.of_call(&self.name, self.effect).with_attempt(self.current.activity.generation_number())
            }
        };
        if let Some(attempt) = error.attempts_mut().first_mut() {
            attempt.waited += mem::take(&mut self.waited);
        }
        let trusted = match error.cause() {
            Cause::Evidence(evidence) => self.lane.config.trust.contains(evidence),
            _ => false,
        };
        let rule = error.rule(self.effect, trusted);
        if trusted && rule == Rule::Retry {
            error.trusted();
        }
        if self.replay.is_some() {
            // One replay in all. One more check may run, for the report only.
            return match rule {
                Rule::Check => self.in_doubt(error),
                Rule::Return | Rule::HandOver | Rule::Retry => Next::Resolve(Err(error)),
            };
        }
        if error.delivery() == Delivery::Ambiguous
            && let Some(Way { replay: Some(Replay::Fenced(fence)), .. }) = self.way.as_deref()
        {
            // A verdict has settled it already, and the replay is on its way.
            let fence = fence.clone();
            return self.settled_before(error, rule, fence);
        }
        match rule {
            Rule::HandOver | Rule::Return if self.was_withdrawn(&error) => self.hand_over_again(error),
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
            Rule::Check => self.in_doubt(error),
        }
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
                    self.timed_out || self.current.until.is_some_and(|until| Instant::now() >= until)
                }
                _ => false,
            }
    }

    /// An attempt that was kept, and that a verdict has settled, has ended while its replay was on its way.
    fn settled_before(&mut self, mut error: CallError, rule: Rule, fence: Fence) -> Next<S::Response> {
        settle_all(error.attempts_mut(), &Settled::NotLanded(fence));
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
        let request = error.take_request::<Req>().or_else(|| self.kept.as_ref().and_then(replica));
        let in_time = self.until.left(Instant::now()).is_none_or(|left| left > LEAST_ATTEMPT);
        match request {
            Some(request) if in_time => {
                self.no_doubt();
                if self.attempts.len() < ATTEMPTS_KEPT {
                    self.attempts.append(error.attempts_mut());
                }
                self.set_out(request, None, None);
                Next::Continue
            }
            Some(_) => Next::Resolve(Err(error.note("no time for another attempt before the deadline"))),
            None => Next::Resolve(Err(error)),
        }
    }

    /// What was in doubt has turned out not to be.
    fn no_doubt(&mut self) {
        self.doubt = None;
        self.way = None;
        self.replaced = None;
    }

    /// The peer refused the write before processing it, and the caller trusts that this is so.
    fn replay_trusted(&mut self, mut error: CallError) -> Next<S::Response> {
        let wait = error.retry_after().unwrap_or_default();
        if !self.until.allows(Instant::now(), wait) {
            return Next::Resolve(Err(error.note("no time for another attempt before the deadline")));
        }
        let Some(request) = self.kept.as_ref().and_then(replica) else {
            return Next::Resolve(Err(error.note("the request cannot be cloned")));
        };
        self.no_doubt();
        let ended = error.take_attempts();
        self.attempts.extend(ended);
        self.refused = Some(error);
        self.set_out(request, Some(Replay::Trusted), Some(wait).filter(|wait| !wait.is_zero()));
        Next::Continue
    }

    fn set_out(&mut self, mut request: Req, replay: Option<Replay>, wait: Option<Duration>) {
        let trail = Arc::clone(self.trail.get_or_insert_default());
        request.context_mut().set_trail(trail);
        self.way = Some(Box::new(Way {
            service: self.lane.spare(),
            request,
            wait: wait.map(|wait| Box::pin(tokio::time::sleep(wait))),
            waited: wait.unwrap_or_default(),
            replay,
        }));
    }

    /// Hands the call over again as soon as the service is ready for it.
    fn poll_way(
        &mut self,
        mut attempt: Pin<&mut Option<S::Future>>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CallError>> {
        let Some(way) = &mut self.way else { return Poll::Pending };
        if let Some(wait) = &mut way.wait {
            ready!(wait.as_mut().poll(cx));
            way.wait = None;
        }
        let readied = ready!(way.service.poll_ready(cx));
        if readied.is_ok() && self.is_over() {
            return Poll::Pending; // The caller sees to it that the deadline ends this.
        }
        let Some(way) = self.way.take() else { return Poll::Pending };
        let Way { mut service, mut request, replay, waited, .. } = *way;
        if let Err(error) = readied {
            self.attempts.extend(self.replaced.take());
            let error = CallError::not_ready(error).of_call(&self.name, self.effect);
            return Poll::Ready(Err(error.with_attempt(None)));
        }
        self.waited = waited;
        self.timed_out = false;
        match replay {
            None => {
                self.current = match self.until.left(Instant::now()) {
                    // Too little is left to divide it once more.
                    Some(left) if left <= LEAST_ATTEMPT * 2 => Attempted::bounded(&mut request, None),
                    _ => Attempted::prepare(&self.lane.config, &mut request, self.until.deadline),
                };
                self.sequence = self.lane.hand_over();
            }
            Some(replay) => {
                self.attempts.extend(self.replaced.take());
                if !self.lane.claim_replay(self.sequence) {
                    return Poll::Ready(Err(self.last_error().note(
                        "not replayed: another write was handed over since; independent_writes() would \
                         declare that they do not touch each other",
                    )));
                }
                if let Replay::Fenced(fence) = &replay {
                    self.current.activity.set_replaced(fence.clone());
                }
                self.replay = Some(replay);
                self.refused = None;
                if let Some(doubt) = &mut self.doubt {
                    (doubt.error, doubt.ended_at, doubt.reason, doubt.again) = (None, None, None, false);
                }
                // Doubt about a replay leads to no further one, so that it may take all the time that is left.
                self.current = Attempted::bounded(&mut request, None);
            }
        }
        // The replaced attempt ends before the next one begins: whoever has it may still stop it, and its
        // connection remembers it and tells the server.
        attempt.set(None);
        self.handing_over = true;
        attempt.set(Some(service.call(request)));
        self.handing_over = false;
        Poll::Ready(Ok(()))
    }

    /// Starts to settle the doubt about the attempt, unless a check is under way already.
    fn enter_doubt(&mut self, error: Option<CallError>) -> Next<S::Response> {
        let is_replay = self.replay.is_some();
        let doubt = self.doubt.get_or_insert_with(|| Box::new(Doubt::new()));
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
        let Some(request) = self.kept.as_ref().and_then(replica) else {
            let why = "the request cannot be cloned again, so that no check could ask for it";
            doubt.reason = Some(why.into());
            return match doubt.ended_at {
                Some(_) => Next::Resolve(Err(self.last_error().note(why))),
                None => Next::Continue,
            };
        };
        doubt.checking = Arc::default();
        let facts = settle::Facts {
            call: self.call,
            attempts: self.attempts.clone(),
            closure: doubt.error.as_ref().and_then(|error| error.closure().cloned()),
            activity: Arc::clone(&self.current.activity),
            since: doubt.since,
            ended_at: doubt.ended_at,
            until: self.until.clone(),
            checking: Arc::clone(&doubt.checking),
        };
        doubt.settling = Some(Box::pin(settle(Arc::clone(&self.lane), request, facts)));
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
                    && pending
                    && self.current.activity.poll_sent(cx).is_err();
                if !sending {
                    return self.not_landed(fence, pending);
                }
                doubt.verdict = Some(VerdictKind::Unknown);
                "absent, but the request is not sent to its end, so that no declared fence holds".into()
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
        let made = || Some((self.lane.config.landed_with.as_ref()?)(self.kept.as_ref()?));
        let response = response.map_or_else(|| catch_unwind(AssertUnwindSafe(made)), |it| Ok(Some(it)));
        Next::Resolve(match response {
            Ok(Some(response)) => Ok(response),
            Ok(None) => Err(self.last_error()),
            Err(_) => Err(self.last_error().note("landed_with panicked")),
        })
    }

    fn not_landed(&mut self, fence: Fence, pending: bool) -> Next<S::Response> {
        let settled = Settled::NotLanded(fence.clone());
        settle_all(&mut self.attempts, &settled);
        if pending {
            let mut attempt = self.kept_attempt();
            attempt.settled = Some(settled);
            self.replaced = Some(attempt);
        }
        let mut wait = Duration::ZERO;
        if let Some(doubt) = &mut self.doubt {
            doubt.fence = Some(fence.clone());
            // What the peer asked for counts from when it did.
            if let (Some(error), Some(ended_at)) = (&doubt.error, doubt.ended_at) {
                wait = error.retry_after().unwrap_or_default().saturating_sub(ended_at.elapsed());
            }
        }
        if self.replay.is_some() {
            return Next::Resolve(Err(self.last_error().note("not replayed a second time")));
        }
        let request = self.kept.as_ref().and_then(replica);
        let why = match &request {
            Some(_) if self.until.allows(Instant::now(), wait) => None,
            Some(_) => Some("no time for another attempt before the deadline"),
            None => Some("the request cannot be cloned again"),
        };
        let (Some(request), None) = (request, why) else {
            self.attempts.extend(self.replaced.take());
            return Next::Resolve(Err(self.last_error().note(why.unwrap_or_default())));
        };
        self.set_out(request, Some(Replay::Fenced(fence)), Some(wait).filter(|wait| !wait.is_zero()));
        Next::Continue
    }

    /// The attempt that timed out and may still answer.
    fn kept_attempt(&mut self) -> Attempt {
        let error = CallError::attempt_timeout(Delivery::Ambiguous);
        let mut attempt = Attempt::of(&error, self.current.activity.generation_number());
        attempt.waited = mem::take(&mut self.waited);
        attempt
    }

    /// What ended the attempt in doubt, or its own time if it has not ended.
    fn last_error(&mut self) -> CallError {
        let error = self.doubt.as_mut().and_then(|doubt| doubt.error.take()).or_else(|| self.refused.take());
        error.unwrap_or_else(|| {
            CallError::attempt_timeout(Delivery::Ambiguous).of_call(&self.name, self.effect)
        })
    }

    /// The deadline has passed: what is known so far.
    fn out_of_time(&mut self, pending: bool) -> CallError {
        self.current.activity.close();
        let reason = self.doubt.as_ref().and_then(|doubt| doubt.reason.clone());
        if self.way.is_some() {
            self.attempts.extend(self.replaced.take());
            let error = CallError::deadline(Delivery::NotSent).of_call(&self.name, self.effect);
            return error.note("the deadline passed before it could be handed over again");
        }
        let error = if pending {
            let error = CallError::deadline(Delivery::Ambiguous).of_call(&self.name, self.effect);
            let mut error = error.with_attempt(self.current.activity.generation_number());
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

    /// The end of the call: one report, and the attempts into the error.
    fn report(mut self, result: Result<S::Response, CallError>) -> Result<S::Response, CallError> {
        let trail = self.trail.take();
        let in_between = trail.as_ref().map(|trail| trail.take()).unwrap_or_default();
        let result = match result {
            Ok(response) => {
                self.attempts.extend(in_between);
                Ok(response)
            }
            Err(error) => Err(error.after_attempts(mem::take(&mut self.attempts))),
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
            let mut attempt = Attempt::answered(self.current.activity.generation_number());
            attempt.waited = self.waited;
            self.attempts.push(attempt);
        }
        if doubtful && !self.current.activity.is_taken_over() {
            let attempts = match &result {
                Ok(_) => self.attempts.clone(),
                Err(error) => error.attempts().to_vec(),
            };
            let reason = match (self.doubt.as_ref().and_then(|doubt| doubt.reason.clone()), &result) {
                (Some(reason), _) => Some(reason.into_owned()),
                (None, Err(error)) => error.notes().last().map(str::to_owned),
                (None, Ok(_)) => None,
            };
            self.events.emit(Event::InDoubt(&DoubtReport {
                call: self.call,
                method: self.name.clone().into_owned(),
                effect: self.effect,
                basis: self.basis,
                attempts,
                verdict: self.doubt.as_ref().and_then(|doubt| doubt.verdict),
                reason,
                fence: self.doubt.as_ref().and_then(|doubt| doubt.fence.clone()),
                replayed: self.replay.is_some(),
                outcome,
            }));
        }
        match &result {
            Ok(_) if self.attempts.len() > 1 => {
                let attempts = mem::take(&mut self.attempts);
                self.events.emit(Event::Call(&self.call_report(attempts, None)));
            }
            Err(error) if self.outermost => self.events.failed(Some(self.call), self.basis, error),
            Ok(_) | Err(_) => {}
        }
        result
    }
}

impl<S, Req, Res> WriteCall<S, Req, Res> {
    fn call_report(&self, attempts: Vec<Attempt>, outcome: Option<Outcome>) -> CallReport {
        CallReport {
            call: Some(self.call),
            method: self.name.clone().into_owned(),
            effect: self.effect,
            basis: self.basis,
            attempts,
            outcome,
            notes: Vec::new(),
        }
    }

    /// The caller went away. `pending` says whether an attempt may still be with the server.
    fn abandon(&mut self, pending: bool) {
        self.current.activity.close();
        let settled = self.replaced.is_some();
        self.attempts.extend(self.replaced.take());
        let in_doubt = pending && !settled && !self.current.activity.was_withdrawn();
        if in_doubt || self.handing_over {
            let mut attempt = Attempt::answered(self.current.activity.generation_number());
            attempt.delivery = Delivery::Ambiguous;
            attempt.cause = "abandoned";
            self.attempts.push(attempt);
        }
        if self.attempts.iter().any(Attempt::is_in_doubt) && !self.current.activity.is_taken_over() {
            let attempts = mem::take(&mut self.attempts);
            let report = self.call_report(attempts, Some(Outcome::Unknown));
            self.events.emit(Event::Abandoned(&report));
        }
    }
}

/// Settles every attempt that is in doubt.
fn settle_all(attempts: &mut [Attempt], by: &Settled) {
    for attempt in attempts.iter_mut().filter(|attempt| attempt.is_in_doubt()) {
        attempt.settled = Some(by.clone());
    }
}

impl<Res> Doubt<Res> {
    fn new() -> Self {
        Self {
            since: Instant::now(),
            ended_at: None,
            error: None,
            settling: None,
            checking: Arc::default(),
            again: false,
            verdict: None,
            fence: None,
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
            this.attempt.set(None);
            write.abandon(pending);
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
