use std::{
    borrow::Cow,
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use pin_project::pin_project;
use tokio::time::Instant;
use tower::Service;

use super::{Handle, backoff::Waits, bound};
use crate::{
    Attempt, Call, CallError, Delivery, Effect, Refusal, Rule, Scope,
    call::{Word, replica},
    deadline::{Timer, poll_or_last},
    event::{CallReport, Event, Report},
};

/// Future of [`Retry`](super::Retry).
///
/// Small, since it is moved once by each layer above: what only a call that fails needs is in boxes.
#[pin_project]
pub struct ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    #[pin]
    state: State<S, S::Future>,
    kind: Kind<S, Req>,
    /// The current attempt's time, where that ends before the deadline; or the wait between attempts.
    timer: Option<Pin<Box<Timer>>>,
    /// Until when the current attempt is waited for.
    until: Option<Instant>,
    /// How long the call had stood still when that attempt began; `None` if it had not.
    stood: Option<Box<Duration>>,
    /// Whether the current attempt has been polled.
    polled: bool,
}

#[pin_project(project = StateProj)]
enum State<S, F> {
    /// The call was handed over.
    Attempt(#[pin] F),
    /// The wait before another attempt.
    Waiting,
    /// Another attempt, as soon as this service is ready for it.
    Readying(Box<S>),
    /// The options are wrong.
    Refused(Option<CallError>),
    /// Nothing is left.
    Done,
}

enum Kind<S, Req> {
    /// Not repeated: a write, or a request that cannot be cloned.
    Once { effect: Effect, report: Option<Report> },
    /// May be repeated.
    Read(Read<S, Req>),
}

struct Read<S, Req> {
    handle: Arc<Handle<S>>,
    /// What another attempt is made from.
    kept: Req,
    outermost: bool,
    /// Whether the attempts' marks are this layer's.
    owns_marks: bool,
    /// Made when the first attempt has failed.
    progress: Option<Box<Progress<Req>>>,
}

struct Progress<Req> {
    /// The attempts that have failed so far.
    earlier: Vec<Attempt>,
    notes: Vec<Cow<'static, str>>,
    /// Begun at the first wait.
    waits: Option<Waits>,
    /// How often this layer has handed the call over.
    made: u32,
    /// At how many closures the call was in flight.
    closures: u32,
    /// Whether a closure before the first byte has had its hand-over.
    handed_back: bool,
    /// How long was waited before the current attempt.
    waited: Duration,
    next: Option<Req>,
    /// Whether one of the attempts would be in doubt if it was one of a write.
    doubtful: bool,
    /// By what words of servers the attempts that were given up or lost were taken for reads: what those servers say from
    /// then on still concerns them.
    words: Vec<Arc<dyn Word>>,
    /// Whether the trail is this layer's; else one further out reports the call.
    owns_trail: bool,
}

// ===== impl ResponseFuture =====

impl<S, Req> ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    pub(super) fn refused(error: CallError) -> Self {
        let kind = Kind::Once { effect: error.effect(), report: None };
        Self::new(State::Refused(Some(error)), kind, None)
    }

    #[inline]
    pub(super) fn once(future: S::Future, effect: Effect, report: Report) -> Self {
        Self::new(State::Attempt(future), Kind::Once { effect, report: Some(report) }, None)
    }

    #[inline(always)]
    pub(crate) fn read(
        future: S::Future,
        handle: Arc<Handle<S>>,
        kept: Req,
        until: Option<Instant>,
        outermost: bool,
    ) -> Self
    where
        Req: Call,
    {
        Self {
            state: State::Attempt(future),
            timer: None,
            until,
            stood: until.and_then(|_| stood(&kept)),
            polled: false,
            kind: Kind::Read(Read { handle, kept, outermost, owns_marks: false, progress: None }),
        }
    }

    /// Whether the attempts of a read are marked where this layer alone looks.
    #[inline(always)]
    pub(super) fn with_marks(mut self, owned: bool) -> Self {
        if let Kind::Read(read) = &mut self.kind {
            read.owns_marks = owned;
        }
        self
    }

    #[inline]
    fn new(state: State<S, S::Future>, kind: Kind<S, Req>, until: Option<Instant>) -> Self {
        Self { state, kind, timer: None, until, stood: None, polled: false }
    }
}

impl<S, Req> Future for ResponseFuture<S, Req>
where
    S: Service<Req, Error = CallError> + Clone,
    Req: Call,
{
    type Output = Result<S::Response, CallError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.as_mut().project();
        let StateProj::Attempt(future) = this.state.project() else { return self.poll_rest(None, cx) };
        let read = match this.kind {
            Kind::Read(read) => read,
            Kind::Once { effect, report } => {
                return future.poll(cx).map_err(|error| once_failed(error, *effect, report.as_ref()));
            }
        };
        if this.timer.is_some() {
            return self.poll_rest(None, cx);
        }
        let polled = future.poll(cx);
        match &polled {
            Poll::Ready(Ok(_)) => {
                read.succeeded();
                return polled;
            }
            // The first poll of an attempt without a time of its own looks at nothing else.
            Poll::Pending if !*this.polled && this.until.is_none() && read.progress.is_none() => {
                *this.polled = true;
                return Poll::Pending;
            }
            Poll::Pending | Poll::Ready(Err(_)) => {}
        }
        self.poll_rest(Some(polled), cx)
    }
}

impl<S, Req> ResponseFuture<S, Req>
where
    S: Service<Req, Error = CallError> + Clone,
    Req: Call,
{
    /// Everything but an attempt that succeeds or is pending for the first time. `polled` is what the attempt
    /// said just now, if it was asked.
    #[cold]
    #[inline(never)]
    fn poll_rest(
        self: Pin<&mut Self>,
        mut polled: Option<Poll<<Self as Future>::Output>>,
        cx: &mut Context<'_>,
    ) -> Poll<<Self as Future>::Output> {
        let mut this = self.project();
        // What has run out during this poll, so that the inner future is polled for the last time.
        let mut over = None;
        loop {
            let read = match this.kind {
                Kind::Read(read) => read,
                Kind::Once { .. } => {
                    let StateProj::Refused(error) = this.state.project() else {
                        panic!("polled after completion")
                    };
                    return Poll::Ready(Err(error.take().expect("polled after completion")));
                }
            };
            let error = match this.state.as_mut().project() {
                StateProj::Attempt(future) => {
                    // The timer first, so that the poll after it is the one more.
                    if over.is_none()
                        && let (Some(timer), Some(until)) = (this.timer.as_mut(), *this.until)
                        && read.poll_attempt(timer.as_mut(), until, this.stood, cx).is_ready()
                    {
                        match read.is_a_write_inside() {
                            // As of every write, its attempts' time is none of this layer's business.
                            true => (*this.timer, *this.until) = (None, None),
                            false => over = Some(Over::Attempt),
                        }
                    }
                    let polled = polled.take().unwrap_or_else(|| poll_or_last(future, over.is_some(), cx));
                    match (polled, over.take()) {
                        (Poll::Ready(Ok(response)), _) => {
                            read.succeeded();
                            return Poll::Ready(Ok(response));
                        }
                        (Poll::Ready(Err(error)), _) => error,
                        (Poll::Pending, Some(Over::Deadline)) => {
                            this.state.set(State::Done);
                            read.note_word();
                            let error = CallError::deadline(Delivery::Ambiguous);
                            return Poll::Ready(Err(read.ended(error)));
                        }
                        (Poll::Pending, Some(Over::Attempt)) => {
                            read.give_up_attempt();
                            CallError::attempt_timeout(Delivery::Ambiguous)
                        }
                        (Poll::Pending, None) => {
                            let first = !mem::replace(this.polled, true) && read.progress.is_none();
                            if !first && read.is_past() {
                                over = Some(Over::Deadline);
                            } else if let (Some(until), None) = (*this.until, this.timer.as_ref()) {
                                let timer = this.timer.insert(Box::pin(Timer::at(until)));
                                if read.poll_attempt(timer.as_mut(), until, this.stood, cx).is_pending() {
                                    return Poll::Pending;
                                }
                                if read.is_a_write_inside() {
                                    (*this.timer, *this.until) = (None, None);
                                    return Poll::Pending;
                                }
                                over = Some(Over::Attempt);
                            } else {
                                return Poll::Pending;
                            }
                            continue;
                        }
                    }
                }
                StateProj::Waiting => {
                    if this.timer.as_mut().is_some_and(|timer| timer.as_mut().poll_fixed(cx).is_ready()) {
                        *this.timer = None;
                        this.state.set(State::Readying(Box::new(read.handle.service())));
                        continue;
                    }
                    if read.is_past() {
                        this.state.set(State::Done);
                        return Poll::Ready(Err(read.not_started()));
                    }
                    return Poll::Pending;
                }
                StateProj::Readying(service) => {
                    let ready = service.poll_ready(cx);
                    match ready {
                        Poll::Ready(Err(error)) => {
                            read.begins();
                            CallError::not_ready(error)
                        }
                        _ if read.is_past() => {
                            this.state.set(State::Done);
                            return Poll::Ready(Err(read.not_started()));
                        }
                        Poll::Pending => return Poll::Pending,
                        Poll::Ready(Ok(())) if read.is_taken_back() => {
                            this.state.set(State::Done);
                            return Poll::Ready(Err(read.not_repeated()));
                        }
                        Poll::Ready(Ok(())) => {
                            let mut request = read.begins().expect("made at the decision");
                            let limit = read.handle.options.attempt_timeout;
                            *this.until = limit.and_then(|limit| bound(request.context_mut(), limit));
                            *this.stood = this.until.and_then(|_| stood(&read.kept));
                            *this.polled = false;
                            let future = service.call(request);
                            this.state.set(State::Attempt(future));
                            continue;
                        }
                    }
                }
                StateProj::Refused(_) | StateProj::Done => panic!("polled after completion"),
            };

            // Of the attempt that has ended.
            *this.timer = None;
            match read.decide(error) {
                Ok(None) => {
                    let service = Box::new(read.handle.service());
                    this.state.set(State::Readying(service));
                }
                Ok(Some(until)) => {
                    *this.timer = Some(Box::pin(Timer::at(until)));
                    this.state.set(State::Waiting);
                }
                Err(error) => {
                    this.state.set(State::Done);
                    return Poll::Ready(Err(error));
                }
            }
        }
    }
}

/// What has run out.
#[derive(Clone, Copy)]
enum Over {
    Attempt,
    Deadline,
}

/// How long the call has stood still.
#[inline]
fn stood<Req: Call>(call: &Req) -> Option<Box<Duration>> {
    call.context().progress()?;
    Some(Box::new(call.context().until().stood()))
}

#[cold]
fn once_failed(error: CallError, effect: Effect, report: Option<&Report>) -> CallError {
    match report {
        Some(report) => report.failed(report.ended(error, "", effect).with_attempt(None)),
        None => error,
    }
}

// ===== impl Read =====

impl<S, Req: Call> Read<S, Req> {
    /// Whether the call's deadline has passed. Reads the clock only where there is a deadline.
    fn is_past(&self) -> bool {
        self.kept.context().until().is_over()
    }

    /// Whether a layer further in takes the call for a write, and reports what becomes of it.
    fn is_a_write_inside(&self) -> bool {
        self.kept.context().activity().is_some_and(|activity| activity.is_a_write_inside())
    }

    /// Whoever holds the attempt up must not begin with it any more: it may be a write there. The next one has marks of
    /// its own.
    fn give_up_attempt(&mut self) {
        self.note_word();
        let own = self.kept.context().activity().filter(|_| self.owns_marks);
        if let Some(activity) = own {
            activity.end();
            self.kept.context_mut().set_activity(Some(Arc::default()));
        }
    }

    /// Of an attempt that is given up, or was lost on a connection that may live on.
    fn note_word(&mut self) {
        if let Some(word) = self.kept.context().activity().and_then(|activity| activity.word()) {
            self.progress().words.push(word);
        }
    }

    /// Whether an attempt that was given up may have been a write after all.
    fn is_taken_back(&self) -> bool {
        self.progress.as_ref().is_some_and(|progress| progress.words.iter().any(|word| !word.holds()))
    }

    /// Ready once the attempt has taken long enough.
    fn poll_attempt(
        &self,
        timer: Pin<&mut Timer>,
        until: Instant,
        stood: &Option<Box<Duration>>,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        let stood = stood.as_deref().copied().unwrap_or_default();
        self.kept.context().until().poll_attempt(timer, until, stood, cx)
    }

    /// What follows from the end of an attempt: another one, now (`None`) or at that instant, or the error to
    /// return.
    fn decide(&mut self, error: CallError) -> Result<Option<Instant>, CallError> {
        let mut error = self.stamp(error);
        if !error.effect().is_write() && self.is_a_write_inside() {
            // A service in between gave it up and does not know.
            error = error.of_a_write();
        }
        if error.effect().is_write() || self.is_taken_back() {
            // A layer below knows better. What may happen to a write is none of this layer's business.
            return Err(self.finish(error));
        }
        if error.rule(Effect::ReadOnly, false) == Rule::Return {
            return Err(self.finish(error));
        }
        let doubtful = error.is_ambiguous_as_a_write();
        if doubtful {
            self.note_word();
        }
        match self.another(&error) {
            Ok((until, next)) => {
                let progress = self.progress();
                progress.doubtful |= doubtful;
                progress.notes.extend(error.notes().map(|note| Cow::Owned(note.to_owned())));
                progress.earlier.append(error.attempts_mut());
                progress.next = Some(next);
                Ok(until)
            }
            Err(Some(note)) => Err(self.finish(error.note(note))),
            Err(None) => Err(self.finish(error)),
        }
    }

    /// When the next attempt is due and with what request, or why there is none where the error alone does
    /// not say.
    fn another(&mut self, error: &CallError) -> Result<(Option<Instant>, Req), Option<Cow<'static, str>>> {
        self.progress();
        let Self { handle, kept, progress: Some(progress), .. } = self else { return Err(None) };
        let options = &handle.options;

        let closed = error.closure().filter(|_| error.scope() == Scope::Connection);
        let freed = match (closed, error.delivery()) {
            // A session that is gone takes its calls down as a connection does.
            (Some(closure), Delivery::Ambiguous | Delivery::NotProcessed) => {
                progress.closures += 1;
                if progress.closures > 1 {
                    return Err(Some(match closure.in_flight() {
                        0 | 1 => "given up after the second closure".into(),
                        2 => "given up after the second closure; 1 other call was in flight at it".into(),
                        n => format!(
                            "given up after the second closure; {} other calls were in flight at it",
                            n - 1
                        )
                        .into(),
                    }));
                }
                closed
            }
            (Some(_), Delivery::NotSent) if !mem::replace(&mut progress.handed_back, true) => closed,
            _ => None,
        };
        let budget = options.budget.as_ref();
        let (granted, wait) = match freed {
            Some(closure) => {
                let granted =
                    off!(Budget) || budget.is_none_or(|budget| closure.charge_once(|| budget.withdraw()));
                (granted, Duration::ZERO)
            }
            None if progress.made >= options.attempts => return Err(None),
            None => {
                let waits = progress.waits.get_or_insert_with(|| options.schedule.start());
                let Some(wait) = waits.next() else {
                    return Err(Some("no further attempt: the backoff schedule has ended".into()));
                };
                // What was in flight at one event costs as much as one call.
                let loss = error.loss().filter(|_| progress.made == 1);
                let granted = budget.is_none_or(|budget| match loss {
                    Some(loss) => loss.charge_once(|| budget.withdraw()),
                    None => budget.withdraw(),
                });
                (granted || off!(Budget), wait)
            }
        };
        if !granted {
            return Err(Some("retry suppressed by the budget".into()));
        }

        let wait = error.retry_after().unwrap_or(wait);
        let now = Instant::now();
        let until = now.checked_add(wait).filter(|_| kept.context().until().allows(now, wait));
        let Some(until) = until else {
            return Err(Some("no time for another attempt before the deadline".into()));
        };
        if kept.context().trail().is_none() {
            kept.context_mut().set_trail(Arc::default());
            progress.owns_trail = true;
        }
        let Some(next) = replica(kept) else {
            return Err(Some("no further attempt: the request could not be cloned again".into()));
        };
        progress.waited = wait;
        Ok(((!wait.is_zero()).then_some(until), next))
    }

    /// Hands the call over once more.
    fn begins(&mut self) -> Option<Req> {
        let progress = self.progress();
        progress.made += 1;
        progress.next.take()
    }

    fn progress(&mut self) -> &mut Progress<Req> {
        self.progress.get_or_insert_with(|| {
            Box::new(Progress {
                earlier: Vec::new(),
                notes: Vec::new(),
                waits: None,
                made: 1,
                closures: 0,
                handed_back: false,
                waited: Duration::ZERO,
                next: None,
                doubtful: false,
                words: Vec::new(),
                owns_trail: false,
            })
        })
    }

    /// Names the call and enters the attempt.
    fn stamp(&self, error: CallError) -> CallError {
        let error = error.of_attempt(self.kept.context().id(), self.kept.method(), Effect::ReadOnly);
        let mut error = error.with_attempt(None);
        if let (Some(progress), Some(first)) = (&self.progress, error.attempts_mut().first_mut()) {
            first.waited += progress.waited;
        }
        error
    }

    /// The error of an attempt that ended with the call.
    fn ended(&mut self, error: CallError) -> CallError {
        let error = self.stamp(error);
        self.finish(error)
    }

    /// The deadline passed before another attempt was handed over: what is known are the earlier ones.
    fn not_started(&mut self) -> CallError {
        let error = CallError::deadline(Delivery::NotSent).of_request(&self.kept, Effect::ReadOnly);
        self.finish(error)
    }

    /// Before another attempt it turned out that an earlier one may have been a write.
    fn not_repeated(&mut self) -> CallError {
        let error = CallError::refused(Refusal::EffectChanged).of_request(&self.kept, Effect::ReadOnly);
        self.finish(error)
    }

    /// Puts the earlier attempts in front of the last one's, and reports the failure where that is due.
    fn finish(&mut self, mut error: CallError) -> CallError {
        if self.is_taken_back() {
            error.misjudge();
        }
        if let Some(progress) = &mut self.progress {
            let mut earlier = mem::take(&mut progress.earlier);
            if progress.doubtful && error.is_of_changed_effect() {
                // What says of a read that it was not processed says less of the write that it may have been.
                let refused = earlier.iter_mut().filter(|attempt| attempt.delivery == Delivery::NotProcessed);
                refused.for_each(|attempt| attempt.delivery = Delivery::Ambiguous);
            }
            error = error.after_attempts(earlier);
            for note in mem::take(&mut progress.notes) {
                error = error.note(note);
            }
        }
        match self.outermost {
            true => Report::of(self.kept.context(), true).failed(error),
            false => error,
        }
    }

    /// Pays the budget back, and reports a success that took more than one attempt.
    #[inline]
    fn succeeded(&mut self) {
        self.handle.deposit();
        if let Some(progress) = self.progress.take() {
            self.succeeded_at_last(*progress);
        }
    }

    #[cold]
    fn succeeded_at_last(&mut self, progress: Progress<Req>) {
        let Progress { mut earlier, notes, waited, owns_trail, .. } = progress;
        let context = self.kept.context();
        let mut own = context.trail().map(|trail| trail.take()).unwrap_or_default();
        if owns_trail {
            own.push(context.trail().map_or_else(|| Attempt::answered(None), |trail| trail.answer()));
        }
        if let Some(first) = own.first_mut() {
            first.waited += waited;
        }
        earlier.append(&mut own);
        if !owns_trail {
            if let Some(trail) = context.trail() {
                trail.extend(earlier);
            }
            return;
        }
        let events = if context.events.is_set() { &context.events } else { &self.handle.options.events };
        events.emit(Event::Call(&CallReport {
            call: context.id(),
            method: self.kept.method().to_owned(),
            effect: Effect::ReadOnly,
            basis: context.basis(),
            attempts: earlier,
            outcome: None,
            notes: notes.into_iter().map(Cow::into_owned).collect(),
        }));
    }
}

impl<S, Req> fmt::Debug for ResponseFuture<S, Req>
where
    S: Service<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = match self.state {
            State::Attempt(_) => "Attempt",
            State::Waiting => "Waiting",
            State::Readying(_) => "Readying",
            State::Refused(_) => "Refused",
            State::Done => "Done",
        };
        f.debug_struct("ResponseFuture").field("state", &state).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

    use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
    use tower::{Layer, ServiceExt, service_fn};

    use super::*;
    use crate::{Closure, Evidence, Outcome, RetryReadOnly, Tagged, retry::budget::Budget};

    type Script = fn(u32, &Closure) -> Result<u32, CallError>;

    /// Calls `script` with the number of the call among all, and a closure that took down a thousand calls.
    fn scripted(
        script: Script,
    ) -> (impl Service<Tagged<u8>, Response = u32, Error = CallError> + Clone, Arc<AtomicU32>) {
        let (calls, closure) =
            (Arc::new(AtomicU32::new(0)), Closure::of_process("exited", 1_000, false, None));
        let counter = Arc::clone(&calls);
        let service = service_fn(move |_: Tagged<u8>| {
            std::future::ready(script(counter.fetch_add(1, Relaxed), &closure))
        });
        (service, calls)
    }

    fn read() -> Tagged<u8> {
        Tagged::new(0, Effect::ReadOnly)
    }

    fn closed(closure: &Closure, delivery: Delivery) -> CallError {
        CallError::of_closure(closure.clone(), delivery)
    }

    /// Of a read a 503 says that it was not processed, and of a write that nobody knows; a 429 says so of both.
    #[tokio::test(start_paused = true)]
    async fn what_the_next_server_takes_for_a_write_is_unknown_if_it_may_have_been_processed_as_one() {
        for (first, outcome) in
            [(Evidence::Unavailable, Outcome::Unknown), (Evidence::TooManyRequests, Outcome::NotDone)]
        {
            let service = service_fn({
                let calls = Arc::new(AtomicU32::new(0));
                move |_: Tagged<u8>| {
                    std::future::ready(Err::<u32, _>(match calls.fetch_add(1, Relaxed) {
                        0 => CallError::of_evidence(first),
                        _ => CallError::refused(Refusal::EffectChanged),
                    }))
                }
            });
            let error = RetryReadOnly.layer(service).oneshot(read()).await.unwrap_err();
            assert_eq!((error.attempts().len(), error.outcome()), (2, outcome), "{error:?}");
        }
    }

    #[derive(Debug, Default)]
    struct Says(std::sync::atomic::AtomicBool);

    impl Word for Says {
        fn holds(&self) -> bool {
            !self.0.load(Relaxed)
        }
    }

    /// By a server that lives on, where its answer was lost.
    #[tokio::test(start_paused = true)]
    async fn a_read_whose_word_is_taken_back_before_its_next_attempt_has_none() {
        for taken_back in [false, true] {
            let (word, calls) = (Arc::new(Says::default()), Arc::new(AtomicU32::new(0)));
            let (says, counter) = (Arc::clone(&word), Arc::clone(&calls));
            let service = service_fn(move |call: Tagged<u8>| {
                call.context().activity().unwrap().taken_by(says.clone());
                std::future::ready(match counter.fetch_add(1, Relaxed) {
                    0 => Err(CallError::ambiguous("body lost")),
                    nth => Ok(nth),
                })
            });
            let wait = backon::ConstantBuilder::new().with_delay(std::time::Duration::from_secs(5));
            let layer = RetryReadOnly.attempt_timeout(std::time::Duration::from_secs(60)).backoff(wait);
            let mut call = task::spawn(layer.layer(service).oneshot(read()));
            assert_pending!(call.poll());
            word.0.store(taken_back, Relaxed);
            tokio::time::advance(std::time::Duration::from_secs(5)).await;
            match taken_back {
                false => assert_eq!(assert_ready_ok!(call.poll()), 1),
                true => assert_eq!(assert_ready_err!(call.poll()).outcome(), Outcome::Unknown),
            }
            assert_eq!(calls.load(Relaxed), 2 - u32::from(taken_back));
        }
    }

    #[derive(Default)]
    struct Charges(AtomicU32, bool);

    impl Budget for Charges {
        fn deposit(&self) {}

        fn withdraw(&self) -> bool {
            self.0.fetch_add(1, Relaxed);
            !self.1
        }
    }

    /// What a thousand reads cost the budget that are in flight when that happens, and are then answered; and how
    /// many calls it takes.
    async fn a_thousand_lost(how: fn(&Closure) -> CallError) -> (u32, u32) {
        let calls = Arc::new(AtomicU32::new(0));
        let closure = Closure::of_process("exited", 1_000, false, None);
        let (counter, all) = (Arc::clone(&calls), Arc::new(tokio::sync::Barrier::new(1_000)));
        let inner = service_fn(move |_: Tagged<u8>| {
            let (nth, all, closure) = (counter.fetch_add(1, Relaxed), Arc::clone(&all), closure.clone());
            async move {
                if nth >= 1_000 {
                    return Ok(nth);
                }
                all.wait().await;
                Err(how(&closure))
            }
        });
        let budget = Arc::new(Charges::default());
        let service = RetryReadOnly.budget(budget.clone()).layer(inner);
        let reads: Vec<_> = (0..1_000).map(|_| tokio::spawn(service.clone().oneshot(read()))).collect();
        for read in reads {
            assert!(read.await.unwrap().unwrap() >= 1_000);
        }
        (budget.0.load(Relaxed), calls.load(Relaxed))
    }

    #[tokio::test(start_paused = true)]
    #[cfg_attr(miri, ignore = "too many calls")]
    async fn a_thousand_reads_at_one_closure_cost_the_budget_once() {
        let cost = a_thousand_lost(|closure| closed(closure, Delivery::Ambiguous)).await;
        assert_eq!(cost, (1, 2_000));
    }

    #[tokio::test(start_paused = true)]
    #[cfg_attr(miri, ignore = "too many calls")]
    async fn a_thousand_reads_of_a_session_that_is_gone_cost_the_budget_once() {
        let forgotten =
            |closure: &Closure| CallError::of_evidence(Evidence::SessionUnknown).at_closure(closure);
        assert_eq!(a_thousand_lost(forgotten).await, (1, 2_000));
    }

    #[cfg(feature = "rmcp")]
    #[tokio::test(start_paused = true)]
    async fn a_thousand_reads_that_are_lost_together_on_a_living_connection_cost_the_budget_once() {
        let lost = |closure: &Closure| CallError::ambiguous("reset").lost_with(closure.clone());
        assert_eq!(a_thousand_lost(lost).await, (1, 2_000));
    }

    #[tokio::test(start_paused = true)]
    async fn a_budget_that_refuses_a_closure_refuses_it_for_all() {
        let (inner, calls) = scripted(|_, closure| Err(closed(closure, Delivery::Ambiguous)));
        let budget = Arc::new(Charges(AtomicU32::new(0), true));
        let service = RetryReadOnly.budget(budget.clone()).layer(inner);
        for _ in 0..8 {
            let error = service.clone().oneshot(read()).await.unwrap_err();
            assert_eq!(error.notes().collect::<Vec<_>>(), ["retry suppressed by the budget"]);
        }
        assert_eq!((budget.0.load(Relaxed), calls.load(Relaxed)), (1, 8));
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_closure_is_named_with_the_others_that_were_in_flight() {
        let (inner, calls) = scripted(|_, closure| Err(closed(closure, Delivery::Ambiguous)));
        let error = RetryReadOnly.attempts(9).layer(inner).oneshot(read()).await.unwrap_err();
        assert_eq!((calls.load(Relaxed), error.outcome()), (2, Outcome::NoAnswer));
        assert_eq!(
            error.notes().collect::<Vec<_>>(),
            ["given up after the second closure; 999 other calls were in flight at it"]
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_closure_before_the_first_byte_is_not_one_that_the_read_was_in_flight_at() {
        let (inner, _) = scripted(|nth, closure| match nth {
            0 => Err(closed(closure, Delivery::NotSent)),
            1 => Err(closed(closure, Delivery::Ambiguous)),
            nth => Ok(nth),
        });
        // Both are replayed at once, though `attempts` allows no second attempt.
        let mut call = task::spawn(RetryReadOnly.attempts(1).layer(inner).oneshot(read()));
        assert_eq!(assert_ready_ok!(call.poll()), 2);

        // A connection that is never there is an ordinary failure from the second time on.
        let (inner, calls) = scripted(|_, closure| Err(closed(closure, Delivery::NotSent)));
        let mut call = task::spawn(RetryReadOnly.layer(inner).oneshot(read()));
        assert_pending!(call.poll());
        assert_eq!(calls.load(Relaxed), 2);
        tokio::time::advance(Duration::from_secs(1)).await;
        assert_eq!(assert_ready_err!(call.poll()).outcome(), Outcome::NotDone);
        assert_eq!(calls.load(Relaxed), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn no_replay_starts_at_the_deadline_even_after_a_closure() {
        let (inner, calls) = scripted(|_, closure| Err(closed(closure, Delivery::Ambiguous)));
        let call = read().deadline(crate::Deadline::At(Instant::now()));
        let error = RetryReadOnly.layer(inner).oneshot(call).await.unwrap_err();
        assert_eq!((calls.load(Relaxed), error.outcome()), (1, Outcome::NoAnswer));
        assert_eq!(error.notes().collect::<Vec<_>>(), ["no time for another attempt before the deadline"]);
    }

    #[tokio::test(start_paused = true)]
    async fn what_layers_below_did_is_in_the_report_of_a_success() {
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let sink = Arc::clone(&seen);
        let calls = AtomicU32::new(0);
        let calls = Arc::new(calls);
        let inner = service_fn(move |call: Tagged<u8>| {
            std::future::ready(match calls.fetch_add(1, Relaxed) {
                0 => Err(CallError::ambiguous("reset")),
                _ => {
                    // As a reconnect that handed the call over twice.
                    let trail = call.context().trail().unwrap();
                    trail.extend([Attempt::of(&CallError::not_sent("x").connection_lost(), Some(4))]);
                    Ok(1)
                }
            })
        });
        let service = RetryReadOnly.on_event(move |event| {
            if let Event::Call(report) = event {
                sink.lock().unwrap().extend(report.attempts.iter().map(|at| (at.delivery, at.generation)));
            }
        });
        service.layer(inner).oneshot(read()).await.unwrap();
        assert_eq!(
            *seen.lock().unwrap(),
            [(Delivery::Ambiguous, None), (Delivery::NotSent, Some(4)), (Delivery::Answered, None)]
        );
    }
}
