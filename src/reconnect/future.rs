//! One call on its way to a connection, over at most one second hand-over.

use std::{
    borrow::Cow,
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project::{pin_project, pinned_drop};
use tokio::time::Instant;
use tower::Service;

use super::{
    Link,
    single_flight::{Local, Shared, Waiter},
};
use crate::{
    Activity, Attempt, Basis, BoxError, Call, CallError, CallId, Cause, Deadline, Delivery, Effect, Rule,
    Scope,
    call::{Giver, effect_of},
    deadline::{Until, poll_in_time},
    event::{CallReport, Event, Events},
};

/// The future of a [`Reconnect`](super::Reconnect) service's call.
///
/// Small, since it is moved once by each layer above: what a call needs only before it is sent is in a box.
#[pin_project(PinnedDrop)]
pub struct ResponseFuture<M, Req>
where
    M: Service<()>,
    M::Response: Service<Req>,
{
    #[pin]
    state: State<M, Req>,
    call: Facts,
}

/// What is still needed of the request once it was given away.
struct Facts {
    deadline: Deadline,
    attempt_until: Option<Instant>,
    id: Option<CallId>,
    events: Events,
    activity: Option<Arc<Activity>>,
    rare: Option<Box<Rare>>,
    effect: Effect,
    basis: Basis,
    outermost: bool,
    polled: bool,
}

/// What few calls need.
#[derive(Default)]
struct Rare {
    /// The method, where it may be wanted: on a connection that has yet to show that it works.
    name: Cow<'static, str>,
    /// Attempts of this call that this future made and that nothing was sent of.
    earlier: Vec<Attempt>,
}

#[pin_project(project = StateProj)]
enum State<M, Req>
where
    M: Service<()>,
    M::Response: Service<Req>,
{
    /// With the connection.
    Sent {
        #[pin]
        future: <M::Response as Service<Req>>::Future,
        local: Arc<Local<M>>,
    },
    /// On its way to one.
    Unsent(Box<Unsent<M, Req>>),
    /// Was with the connection, and has failed.
    Failed { error: Option<CallError>, local: Arc<Local<M>> },
    /// Refused at once.
    Refused(Option<CallError>),
    /// Has resolved.
    Done,
}

/// An attempt, and the connection that it is on.
type Handed<M, Req> = (<<M as Service<()>>::Response as Service<Req>>::Future, Arc<Local<M>>);

enum Unsent<M: Service<()>, Req> {
    /// Waits for a connection.
    Waiting { request: Option<Req>, waiter: Waiter<M> },
    /// Waits for the connection to be ready.
    Readying { request: Option<Req>, local: Arc<Local<M>>, connection: M::Response },
}

impl<M, Req> ResponseFuture<M, Req>
where
    M: Service<()>,
    M::Response: Service<Req, Error = CallError>,
    Req: Call,
{
    #[inline(always)]
    pub(super) fn sent(request: Req, effect: Effect, outermost: bool, link: &mut Link<M>) -> Self
    where
        M::Response: Clone,
        Req: Send + 'static,
    {
        let Link { local, connection, .. } = &mut *link;
        let mut call = Facts::of(&request, effect, outermost);
        if !local.generation.has_shown(effect) {
            call.set_name(&request);
        }
        if !call.mark(local) {
            link.release();
            let error = call.unsent(CallError::attempt_timeout(Delivery::NotSent), Some(request));
            return Self { state: State::Refused(Some(error)), call };
        }
        let local = Arc::clone(local);
        Self { state: State::Sent { future: connection.call(request), local }, call }
    }

    /// A call that was sent elsewhere, and that has failed so.
    pub(crate) fn failed(request: &Req, local: Arc<Local<M>>, error: CallError) -> Self {
        let mut call = Facts::of(request, effect_of(request), false);
        call.polled = true;
        Self { state: State::Failed { error: Some(error), local }, call }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn waiting(
        request: Req,
        effect: Effect,
        outermost: bool,
        shared: Arc<Shared<M>>,
        found_dead: Option<Attempt>,
    ) -> Self {
        let mut call = Facts::of(&request, effect, outermost);
        call.set_name(&request);
        call.rare().earlier.extend(found_dead);
        call.waits();
        let waiter = Waiter::new(shared);
        let unsent = Unsent::Waiting { request: Some(request), waiter };
        Self { state: State::Unsent(Box::new(unsent)), call }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn refused(request: &Req, effect: Effect, error: CallError) -> Self {
        let error = error.of_call(request.method(), effect);
        Self { state: State::Refused(Some(error)), call: Facts::of(request, effect, false) }
    }
}

impl<M, Req> Future for ResponseFuture<M, Req>
where
    M: Service<()>,
    M::Error: Into<BoxError>,
    M::Response: Service<Req, Error = CallError> + Clone + 'static,
    Req: Call + Send + 'static,
{
    type Output = Result<<M::Response as Service<Req>>::Response, CallError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.as_mut().project();
        let call = this.call;
        let StateProj::Sent { future, local } = this.state.as_mut().project() else {
            return self.poll_rest(None, cx);
        };
        let error = match future.poll(cx) {
            Poll::Ready(Ok(response)) => {
                local.generation.note_answer(call.effect, call.name());
                if call.rare.is_some() || call.events.trail().is_some() || local.shared.is_closing() {
                    return Poll::Ready(self.resolve(Ok(response)));
                }
                this.state.set(State::Done);
                return Poll::Ready(Ok(response));
            }
            Poll::Ready(Err(error)) => error,
            // The first poll reads no clock.
            Poll::Pending if !mem::replace(&mut call.polled, true) || !call.until().is_over() => {
                return Poll::Pending;
            }
            Poll::Pending => return self.poll_rest(None, cx),
        };
        self.poll_rest(Some(error), cx)
    }
}

impl<M, Req> ResponseFuture<M, Req>
where
    M: Service<()>,
    M::Error: Into<BoxError>,
    M::Response: Service<Req, Error = CallError> + Clone + 'static,
    Req: Call + Send + 'static,
{
    /// Everything but a call that is sent and answered. `ended` is how its attempt has ended just now.
    #[cold]
    #[inline(never)]
    fn poll_rest(
        mut self: Pin<&mut Self>,
        ended: Option<CallError>,
        cx: &mut Context<'_>,
    ) -> Poll<<Self as Future>::Output> {
        let result = ready!(self.as_mut().poll_inner(ended, cx));
        Poll::Ready(self.resolve(result))
    }

    /// The end of the call.
    #[cold]
    #[inline(never)]
    fn resolve(self: Pin<&mut Self>, result: <Self as Future>::Output) -> <Self as Future>::Output {
        let mut this = self.project();
        let (shared, generation) = this.state.whereabouts();
        // The count of calls in flight must have gone down when a shutdown is told to look at it.
        let closing = shared.filter(|shared| shared.is_closing()).map(Arc::clone);
        if let (Err(error), Some(activity), Some(shared)) = (&result, &this.call.activity, shared)
            && error.delivery() == Delivery::NotSent
        {
            activity.not_sent(Giver::of(shared));
        }
        this.state.set(State::Done);
        if let Some(shared) = closing {
            shared.ended.notify_waiters();
        }
        let earlier = this.call.take_earlier();
        match result {
            Ok(response) => {
                if !earlier.is_empty() || this.call.events.trail().is_some() {
                    this.call.succeeded(earlier, generation);
                }
                Ok(response)
            }
            Err(error) => {
                let error = error.after_attempts(earlier).with_id(this.call.id);
                if this.call.outermost {
                    this.call.events.failed(this.call.basis, &error);
                }
                Err(error)
            }
        }
    }

    fn poll_inner(
        self: Pin<&mut Self>,
        mut ended: Option<CallError>,
        cx: &mut Context<'_>,
    ) -> Poll<<Self as Future>::Output> {
        let mut this = self.project();
        let call = this.call;
        loop {
            let first = !mem::replace(&mut call.polled, true);
            let (error, local) = match this.state.as_mut().project() {
                StateProj::Sent { future, local } => {
                    let error = match ended.take() {
                        Some(error) => error,
                        None => match poll_in_time(future, || !first && call.until().is_over(), cx) {
                            Poll::Ready(Some(Ok(response))) => {
                                local.generation.note_answer(call.effect, call.name());
                                return Poll::Ready(Ok(response));
                            }
                            Poll::Ready(Some(Err(error))) => error,
                            // A connection of this crate would have resolved: nobody knows what became of it.
                            Poll::Ready(None) => CallError::deadline(Delivery::Ambiguous),
                            Poll::Pending => return Poll::Pending,
                        },
                    };
                    (error, local)
                }
                StateProj::Failed { error, local } => {
                    let Some(error) = error.take() else { return Poll::Pending };
                    (error, local)
                }
                StateProj::Unsent(unsent) => match ready!(call.poll_unsent(unsent, first, cx)) {
                    Ok(Some((future, local))) => {
                        this.state.set(State::Sent { future, local });
                        continue;
                    }
                    Ok(None) => continue,
                    Err(error) => return Poll::Ready(Err(error)),
                },
                StateProj::Refused(error) => {
                    return error.take().map_or(Poll::Pending, |error| Poll::Ready(Err(error)));
                }
                StateProj::Done => return Poll::Pending,
            };
            let mut error = call.ended(error, local);
            if error.is_given_back()
                && let Some(activity) = &call.activity
            {
                activity.given_back(Giver::of(&local.shared));
            }
            let again = error.rule(call.effect, false) == Rule::HandOver
                && call.is_first_hand_over()
                && !matches!(error.cause(), Cause::AttemptTimeout)
                && !call.is_over();
            let Some(request) = again.then(|| error.take_request_of::<Req>(call.id)).flatten() else {
                return Poll::Ready(Err(error));
            };
            call.set_name(&request);
            call.rare().earlier = error.take_attempts();
            if !off!(HandedBack) {
                call.waits();
            }
            let waiter = Waiter::new(Arc::clone(&local.shared));
            let unsent = Unsent::Waiting { request: Some(request), waiter };
            this.state.set(State::Unsent(Box::new(unsent)));
            // The next connection may be there already, and others may have gone over it. Whoever keeps the order of
            // writes sees first that this one waits, and is asked when it goes.
            if call.activity.is_some() && !off!(HandedBack) {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }
}

impl<M, Req> State<M, Req>
where
    M: Service<()>,
    M::Response: Service<Req>,
{
    /// The service that the call is on, and the number of its connection.
    fn whereabouts(&self) -> (Option<&Arc<Shared<M>>>, Option<u64>) {
        let local = match self {
            State::Sent { local, .. } | State::Failed { local, .. } => local,
            State::Unsent(unsent) => match &**unsent {
                Unsent::Readying { local, .. } => local,
                Unsent::Waiting { waiter, .. } => return (Some(waiter.shared()), None),
            },
            State::Refused(_) | State::Done => return (None, None),
        };
        (Some(&local.shared), Some(local.generation.number))
    }
}

#[pinned_drop]
impl<M, Req> PinnedDrop for ResponseFuture<M, Req>
where
    M: Service<()>,
    M::Response: Service<Req>,
{
    fn drop(self: Pin<&mut Self>) {
        let mut this = self.project();
        if let State::Unsent(unsent) = &*this.state
            && let Unsent::Waiting { request: Some(_), .. } | Unsent::Readying { request: Some(_), .. } =
                &**unsent
            && let Some(activity) = &this.call.activity
            && let (Some(shared), _) = this.state.whereabouts()
        {
            // It was never given to a connection: who dropped a write must not believe it in doubt.
            activity.never_given(Giver::of(shared));
        }
        // One that waits is not counted.
        if let (Some(shared), Some(_)) = this.state.whereabouts()
            && shared.is_closing()
        {
            let shared = Arc::clone(shared);
            this.state.set(State::Done);
            shared.ended.notify_waiters();
        }
    }
}

impl<M, Req> fmt::Debug for ResponseFuture<M, Req>
where
    M: Service<()>,
    M::Response: Service<Req>,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("reconnect::ResponseFuture { .. }")
    }
}

// ===== impl Facts =====

impl Facts {
    #[inline]
    fn of<Req: Call>(request: &Req, effect: Effect, outermost: bool) -> Self {
        let context = request.context();
        Self {
            deadline: context.deadline(),
            attempt_until: context.attempt_until().filter(|_| !off!(AttemptTime)),
            id: context.id(),
            events: context.events.share(),
            activity: context.activity().cloned(),
            rare: None,
            effect,
            basis: context.basis(),
            outermost,
            polled: false,
        }
    }

    /// Notes, for who wants to know, that the call waits for a connection.
    fn waits(&self) {
        if let Some(activity) = &self.activity {
            activity.waits();
        }
    }

    #[inline]
    fn until(&self) -> Until {
        Until { deadline: self.deadline, progress: self.events.progress().cloned() }
    }

    fn rare(&mut self) -> &mut Rare {
        self.rare.get_or_insert_default()
    }

    #[cold]
    fn set_name<Req: Call>(&mut self, request: &Req) {
        self.rare().name = request.name();
    }

    fn name(&self) -> &str {
        self.rare.as_ref().map_or("", |rare| &rare.name)
    }

    /// Whether the call has not been handed over before.
    fn is_first_hand_over(&self) -> bool {
        self.rare.as_ref().is_none_or(|rare| rare.earlier.is_empty())
    }

    fn take_earlier(&mut self) -> Vec<Attempt> {
        self.rare.as_mut().map(|rare| mem::take(&mut rare.earlier)).unwrap_or_default()
    }

    /// One step of a call on its way to a connection: `Ok(None)` if there is another, else its attempt.
    fn poll_unsent<M, Req>(
        &mut self,
        unsent: &mut Unsent<M, Req>,
        first: bool,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Option<Handed<M, Req>>, CallError>>
    where
        M: Service<()>,
        M::Error: Into<BoxError>,
        M::Response: Service<Req, Error = CallError> + Clone + 'static,
        Req: Call + Send + 'static,
    {
        match unsent {
            Unsent::Waiting { request, waiter } => {
                let shared = Arc::clone(waiter.shared());
                match shared.poll_connected(waiter, self.waits_until(), cx) {
                    Poll::Ready(Ok((local, connection))) => {
                        let request = request.take();
                        *unsent = Unsent::Readying { request, local, connection };
                        Poll::Ready(Ok(None))
                    }
                    Poll::Ready(Err(error)) => Poll::Ready(Err(self.unsent(error, request.take()))),
                    Poll::Pending => self.give_up_waiting(first, request, |error| shared.unconnected(error)),
                }
            }
            Unsent::Readying { request, local, connection } => match connection.poll_ready(cx) {
                Poll::Ready(Ok(())) => {
                    let Some(request) = request.take() else { return Poll::Pending };
                    if self.is_over() {
                        let error = if self.until().is_past(Instant::now()) {
                            CallError::deadline(Delivery::NotSent)
                        } else {
                            CallError::attempt_timeout(Delivery::NotSent)
                        };
                        return Poll::Ready(Err(self.unsent(error, Some(request))));
                    }
                    if !self.mark(local) {
                        let error = CallError::attempt_timeout(Delivery::NotSent);
                        return Poll::Ready(Err(self.unsent(error, Some(request))));
                    }
                    Poll::Ready(Ok(Some((connection.call(request), Arc::clone(local)))))
                }
                Poll::Ready(Err(error)) => {
                    let mut error = self.ended(CallError::not_ready(error).connection_lost(), local);
                    if !self.is_first_hand_over() || self.is_over() {
                        return Poll::Ready(Err(self.unsent(error, request.take())));
                    }
                    self.rare().earlier = error.take_attempts();
                    self.waits();
                    let waiter = Waiter::new(Arc::clone(&local.shared));
                    let request = request.take();
                    *unsent = Unsent::Waiting { request, waiter };
                    Poll::Ready(Ok(None))
                }
                Poll::Pending => self.give_up_waiting(first, request, |error| error),
            },
        }
    }

    /// Notes, for who wants to know, on what connection the call is; `false` if it must not be sent, since
    /// whoever made the attempt has stopped counting on it.
    fn mark<M: Service<()>>(&self, local: &Local<M>) -> bool {
        let (number, began) = (local.generation.number, local.generation.began);
        let given =
            |activity: &Arc<Activity>| activity.on_generation(number, began, Giver::of(&local.shared));
        self.activity.as_ref().is_none_or(given)
    }

    /// Until when a hand-over may happen.
    fn waits_until(&self) -> Deadline {
        match (self.until().instant(), self.attempt_until) {
            (Some(deadline), Some(until)) => Deadline::At(deadline.min(until)),
            (Some(at), None) | (None, Some(at)) => Deadline::At(at),
            (None, None) => self.deadline,
        }
    }

    /// Whether nothing may be handed over any more.
    fn is_over(&self) -> bool {
        self.until().is_over() || self.attempt_until.is_some_and(|until| Instant::now() >= until)
    }

    /// Ends a wait, and returns the request, if its time is up.
    fn give_up_waiting<T, Req: Call + Send + 'static>(
        &self,
        first: bool,
        request: &mut Option<Req>,
        explained: impl FnOnce(CallError) -> CallError,
    ) -> Poll<Result<T, CallError>> {
        if first || !self.is_over() {
            return Poll::Pending;
        }
        let error = if self.until().is_past(Instant::now()) {
            CallError::deadline(Delivery::NotSent)
        } else {
            CallError::attempt_timeout(Delivery::NotSent)
        };
        Poll::Ready(Err(self.unsent(explained(error), request.take())))
    }

    /// An error of a call that was not given to a connection.
    fn unsent<Req: Call + Send + 'static>(&self, error: CallError, request: Option<Req>) -> CallError {
        let Some(request) = request else { return error };
        let error = error.of_call(request.method(), self.effect).judged_by(self.basis);
        error.with_attempt(None).with_request(request)
    }

    /// An attempt on a connection has ended with an error.
    fn ended<M: Service<()>>(&self, error: CallError, local: &Local<M>) -> CallError
    where
        M::Error: Into<BoxError>,
    {
        let generation = &local.generation;
        let mut error = error.of_attempt(self.id, self.name(), self.effect).judged_by(self.basis);
        if error.delivery() == Delivery::Answered {
            generation.note_error(error.method());
        } else if error.scope() == Scope::Connection {
            let closure = generation.closure(&error);
            error = match generation.known {
                Some(_) => error.at_closure(closure),
                None => error.beside_closure(closure),
            };
        }
        if let Some(closure) = error.closure() {
            closure.set_generation(generation.number);
        }
        let error = error.with_attempt(Some(generation.number));
        if error.scope() == Scope::Connection {
            local.shared.lost(generation, &error, Some(self.effect));
        }
        error
    }

    /// A call that was handed over a second time was answered. Whoever replays it above reports it; else
    /// only this layer knows.
    fn succeeded(&self, mut attempts: Vec<Attempt>, generation: Option<u64>) {
        match self.events.trail() {
            Some(trail) => {
                trail.extend(attempts);
                if let Some(generation) = generation {
                    trail.answered_on(generation);
                }
            }
            None => {
                attempts.push(Attempt::answered(generation));
                self.events.emit(Event::Call(&CallReport {
                    call: self.id,
                    method: self.name().to_owned(),
                    effect: self.effect,
                    basis: self.basis,
                    attempts,
                    outcome: None,
                    notes: Vec::new(),
                }));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        future::{Ready, ready},
        sync::Mutex,
        time::Duration,
    };

    use tokio::time::advance;
    use tower::{Layer, ServiceExt, service_fn};

    use super::*;
    use crate::{CallContext, Closure, Outcome, ReconnectLayer};

    /// A request that this layer must not clone.
    #[derive(Debug, Default)]
    struct Unique(CallContext);

    impl Call for Unique {
        fn method(&self) -> &str {
            "unique"
        }

        fn effect(&self) -> Effect {
            Effect::Write
        }

        fn context(&self) -> &CallContext {
            &self.0
        }

        fn context_mut(&mut self) -> &mut CallContext {
            &mut self.0
        }

        fn try_clone(&self) -> Option<Self> {
            panic!("cloned");
        }
    }

    type Treatment = fn(Unique) -> Result<u8, CallError>;

    /// How connections treat the calls, one after the other.
    type Script = Arc<Mutex<VecDeque<Treatment>>>;

    #[derive(Clone)]
    struct Scripted(Script);

    impl Service<Unique> for Scripted {
        type Response = u8;
        type Error = CallError;
        type Future = Ready<Result<u8, CallError>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Unique) -> Self::Future {
            let next = self.0.lock().unwrap().pop_front().expect("no further hand-over");
            ready(next(request))
        }
    }

    fn closed(request: Unique) -> Result<u8, CallError> {
        let error = CallError::of_closure(Closure::new("gone"), Delivery::NotSent);
        Err(error.with_request(request))
    }

    fn client<const N: usize>(
        script: [Treatment; N],
    ) -> (impl Service<Unique, Response = u8, Error = CallError> + Clone, Script, crate::ReconnectHandle)
    {
        let script: Script = Arc::new(Mutex::new(VecDeque::from(script)));
        let connection = Scripted(Arc::clone(&script));
        let connector = service_fn(move |()| ready(Ok::<_, CallError>(connection.clone())));
        let layer = ReconnectLayer::once();
        let handle = layer.handle();
        (layer.layer(connector), script, handle)
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_handed_back_is_handed_over_once_more_without_a_clone() {
        for effect in [Effect::ReadOnly, Effect::Idempotent, Effect::Write] {
            let (client, script, handle) = client([closed, |_| Ok(7)]);
            let request = Unique::default().as_effect(effect);
            assert_eq!(client.clone().oneshot(request).await.unwrap(), 7);
            assert!(script.lock().unwrap().is_empty());
            assert_eq!(handle.generation(), Some(2));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn the_second_time_it_is_returned_with_the_request() {
        for effect in [Effect::ReadOnly, Effect::Write] {
            let (client, _, _) = client([closed, closed]);
            let mut error = client.oneshot(Unique::default().as_effect(effect)).await.unwrap_err();
            let generations: Vec<_> = error.attempts().iter().map(|attempt| attempt.generation).collect();
            assert_eq!(generations, [Some(1), Some(2)]);
            assert_eq!((error.outcome(), error.delivery()), (Outcome::NotDone, Delivery::NotSent));
            assert!(error.take_request::<Unique>().is_some());
        }
    }

    /// So that the layer that keeps the order of writes can look whether it still may.
    #[tokio::test(start_paused = true)]
    async fn a_write_that_is_handed_back_does_not_go_on_within_the_same_poll() {
        for may_go in [true, false] {
            let (client, script, _) = client([closed, |_| Ok(7)]);
            let activity = Arc::new(Activity::default());
            let mut request = Unique::default().as_effect(Effect::Write);
            request.0.set_activity(Some(Arc::clone(&activity)));
            let mut calling = tokio_test::task::spawn(client.oneshot(request));
            assert!(calling.poll().is_pending());
            assert!(calling.is_woken() && activity.is_waiting());
            assert_eq!(script.lock().unwrap().len(), 1);
            if may_go {
                assert_eq!(tokio_test::assert_ready_ok!(calling.poll()), 7);
            } else {
                activity.close();
                let error = tokio_test::assert_ready_err!(calling.poll());
                assert_eq!((error.outcome(), script.lock().unwrap().len()), (Outcome::NotDone, 1));
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_handed_back_for_another_reason_is_returned() {
        let reasons: [Treatment; 4] = [
            // Nothing below hands a call over after its attempt's time was up.
            |request| Err(CallError::attempt_timeout(Delivery::NotSent).with_request(request)),
            |request| Err(CallError::deadline(Delivery::NotSent).with_request(request)),
            |request| Err(CallError::refused(crate::Refusal::NotAProbe).with_request(request)),
            // Not handed back to whom it came from.
            |_| Err(CallError::of_closure(Closure::new("gone"), Delivery::NotSent).with_request(1_u8)),
        ];
        for reason in reasons {
            let (client, ..) = client([reason]);
            let error = client.oneshot(Unique::default()).await.unwrap_err();
            assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NotDone, 1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_handed_over_again_once_its_time_is_up() {
        let second = Duration::from_secs(1);
        for by_deadline in [true, false] {
            let (connection, gate) = (Scripted(Script::default()), Arc::new(tokio::sync::Notify::new()));
            connection.0.lock().unwrap().push_back(closed as Treatment);
            let opens = Arc::clone(&gate);
            let slow = service_fn(move |request: Unique| {
                let (mut slow, opens) = (connection.clone(), Arc::clone(&opens));
                async move {
                    opens.notified().await;
                    slow.call(request).await
                }
            });
            let connector = service_fn(move |()| ready(Ok::<_, CallError>(slow.clone())));
            let mut request = Unique::default();
            match by_deadline {
                true => request = request.within(second),
                false => request.0.set_attempt_until(Some(Instant::now() + second)),
            }
            let client = ReconnectLayer::once().layer(connector);
            let mut calling = tokio_test::task::spawn(client.oneshot(request));
            assert!(calling.poll().is_pending());
            advance(second).await;
            gate.notify_one();
            let error = tokio_test::assert_ready_err!(calling.poll());
            assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NotDone, 1));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_withdrawal_from_one_connection_is_forgotten_at_the_next() {
        let activity = Arc::new(Activity::default());
        let (client, ..) = client([
            |request| {
                let activity = Arc::clone(request.context().activity().unwrap());
                assert!(activity.adopt());
                activity.withdrawn();
                closed(request)
            },
            |request| {
                assert!(request.context().activity().unwrap().adopt());
                Ok(1)
            },
        ]);
        let mut request = Unique::default();
        request.0.set_activity(Some(Arc::clone(&activity)));
        client.oneshot(request).await.unwrap();
        assert!(!activity.was_withdrawn());
        assert_eq!(activity.generation().unwrap().0, 2);
    }
}
