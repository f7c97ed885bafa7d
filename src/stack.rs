//! The four layers in their order, as one service.

mod direct;

use std::{
    fmt,
    future::{Future, poll_fn},
    marker::PhantomData,
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use pin_project::{pin_project, pinned_drop};
use tokio::{sync::Notify, time::Instant};
use tower::{Layer, Service};

use self::direct::{Direct, Lane};
use crate::{
    Basis, BoxError, Call, CallError, Deadline, DeadlineLayer, DeadlineService, Effect, InDoubt, Reconnect,
    ReconnectHandle, ReconnectLayer, Refusal, Retry, RetryReadOnly, RetryReadOnlyLayer, Verdict, WriteSafety,
    WriteSafetyLayer,
    call::{effect_of, replica},
    census::{AnySeat, Census, Seat, drain},
    connection::{Classifier, classifier_of, register_with, tool_rules_of, validate},
    deadline,
    event::{Event, Events},
    write_safety::{self, ledger::AnyLedger},
};

type Layers<M, Req, Res> = DeadlineService<WriteSafety<Retry<Reconnect<M>>, Req, Res>>;
type Layered<M, Req> = deadline::ResponseFuture<write_safety::ResponseFuture<Retry<Reconnect<M>>, Req>>;

/// Deadline, write safety, retries of reads and reconnecting around a connector, in the one order in which
/// they work together.
///
/// A [`Service`] of calls, and [`send`](Stack::send) by reference. Clones share connection, budget and
/// everything else; give each thread or task that calls a lot a clone of its own.
///
/// ```
/// use std::time::Duration;
/// use goaround::{CallError, Effect, RetryReadOnly, Stack, Tagged};
/// use tower::service_fn;
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), goaround::BoxError> {
/// // A connector makes connections; a connection answers calls.
/// let connector = service_fn(|()| async {
///     Ok::<_, CallError>(service_fn(|call: Tagged<u32>| async move { Ok::<_, CallError>(*call + 1) }))
/// });
/// let stack = Stack::builder(connector)
///     .deadline(Duration::from_secs(30))
///     .retry(RetryReadOnly.attempts(4))
///     .build()?;
/// assert_eq!(stack.send(Tagged::new(1, Effect::ReadOnly)).await?, 2);
/// assert_eq!(stack.generation(), Some(1));
/// assert_eq!(stack.shutdown(Duration::from_secs(5)).await, 0);
/// # Ok(())
/// # }
/// ```
pub struct Stack<M: Service<()>, Req, Res> {
    /// What a clone is called by. Behind a lock so that it can be shared; no call goes this way by reference.
    ways: Mutex<Ways<M, Req, Res>>,
    /// What `send` calls by: taken out for as long as a call is handed over, which is foreign code's time, too. Who
    /// finds it taken makes one of its own.
    shared_ways: Mutex<Option<Box<Ways<M, Req, Res>>>>,
    seat: Arc<StackSeat>,
}

/// What a clone gives its calls to.
struct Ways<M: Service<()>, Req, Res> {
    layers: Layers<M, Req, Res>,
    /// Made at the first call that goes [the short way](direct), and again for each connection.
    lane: Option<Arc<Lane<M>>>,
}

struct StackSeat {
    shared: Arc<Shared>,
    held: AtomicBool,
}

struct Shared {
    closing: AtomicBool,
    ended: Notify,
    census: Mutex<Census<AnySeat>>,
    reconnect: ReconnectHandle,
    /// For what concerns more than one call.
    events: Events,
}

impl<M, Req, Res> Stack<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    /// Starts to build a stack around that connector.
    pub fn builder(connector: M) -> StackBuilder<M, Req, Res> {
        StackBuilder {
            connector,
            deadline: DeadlineLayer::new(Duration::from_secs(60)),
            writes: None,
            retry: RetryReadOnly.into(),
            reconnect: ReconnectLayer::once(),
            classify: None,
            events: Events::default(),
            wrong: None,
            of: PhantomData,
        }
    }

    /// Sends a call and waits for its answer.
    ///
    /// # Errors
    ///
    /// Everything that can go wrong; see [`CallError`].
    pub fn send(&self, request: Req) -> impl Future<Output = Result<Res, CallError>> + Send + '_ {
        let mut request = Some(request);
        async move {
            let mut taken = None;
            let handed_over = poll_fn(|cx| {
                let ways = taken.get_or_insert_with(|| self.take_ways());
                ready!(ways.layers.poll_ready(cx))?;
                let Some(request) = request.take() else { return Poll::Pending };
                let future = hand_over(ways, &self.seat, request);
                self.put_back(taken.take());
                Poll::Ready(Ok::<_, CallError>(future))
            });
            handed_over.await?.await
        }
    }

    /// Shuts down: new calls are refused as not sent ([`Refusal::Shutdown`]), calls in flight, with what they
    /// need to settle a doubt, may finish within `grace`; then the connection closes and its process is
    /// reaped.
    ///
    /// Returns how many calls were still in flight when the grace was over. Those that wait for an answer over a
    /// connection of this crate end at once, and writes among them are reported; a foreign connection closes when
    /// the last clone of the stack and the last of its calls are dropped. A write in doubt that waits for its fence or
    /// its check goes on until that has ended, or its deadline, and is reported then; its check finds no connection
    /// any more. Drop its future to end it before. A connection that does not close, since the runtime that it lives on does not
    /// run, is waited for 10 s.
    pub async fn shutdown(&self, grace: Duration) -> usize {
        let shared = &self.seat.shared;
        shared.closing.store(true, Ordering::Release);
        let end = Instant::now().checked_add(grace);
        let cut_off = drain(|| shared.census().in_flight(), &shared.ended, end).await;
        shared.reconnect.shutdown(Duration::ZERO).await;
        cut_off
    }
}

impl<M: Service<()>, Req, Res> Stack<M, Req, Res> {
    fn new(layers: Layers<M, Req, Res>, shared: Arc<Shared>) -> Self {
        let seat = StackSeat::new(shared, true);
        Self { ways: Mutex::new(Ways { layers, lane: None }), shared_ways: Mutex::new(None), seat }
    }

    /// What is ready for nobody else.
    fn take_ways(&self) -> Box<Ways<M, Req, Res>> {
        let shared = self.shared_ways.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.unwrap_or_else(|| Box::new(Ways { layers: self.lock().layers.clone(), lane: None }))
    }

    fn put_back(&self, ways: Option<Box<Ways<M, Req, Res>>>) {
        let old = {
            let mut shared = self.shared_ways.lock().unwrap_or_else(PoisonError::into_inner);
            mem::replace(&mut *shared, ways)
        };
        // Foreign code, so without the lock.
        drop(old);
    }

    fn lock(&self) -> MutexGuard<'_, Ways<M, Req, Res>> {
        self.ways.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The number of the connection in use; `None` where there is none. A number that has changed tells that
    /// state which the server kept for the connection may be gone.
    pub fn generation(&self) -> Option<u64> {
        self.seat.shared.reconnect.generation()
    }

    /// What a call is taken for, and who says so.
    pub(crate) fn judge(&self, request: &Req) -> (Effect, Basis)
    where
        Req: Call,
    {
        let classify = self.lock().layers.get_ref().classifier().cloned();
        let judged = classify.and_then(|classify| classify(request));
        judged.unwrap_or_else(|| (effect_of(request), request.context().basis()))
    }

    /// What that deadline is for something that begins now, with the default where it has none of its own.
    pub(crate) fn resolve(&self, deadline: Deadline) -> Deadline {
        self.lock().layers.resolve(deadline)
    }

    /// Where this stack's events go.
    pub(crate) fn events(&self) -> &Events {
        &self.seat.shared.events
    }

    /// Where the writes are entered: what is in doubt can be listed and settled there.
    pub fn ledger(&self) -> AnyLedger {
        self.lock().layers.get_ref().ledger()
    }

    /// The connection in use, if it is one of this crate's.
    #[cfg(feature = "rmcp")]
    pub(crate) fn connection(&self) -> Option<Arc<dyn crate::connection::Connection>> {
        self.seat.shared.reconnect.connection()
    }

    /// How many calls are in flight.
    pub fn in_flight(&self) -> usize {
        self.seat.shared.census().in_flight()
    }
}

impl<M, Req, Res> Ways<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    Req: Call,
{
    /// Makes a lane on the connection in use, where reads can go the short way over it. `false` if they cannot.
    #[cold]
    fn renew_lane(&mut self, seat: &Arc<StackSeat>) -> bool {
        let retry = self.layers.get_ref().get_ref();
        let Some(local) = retry.get_ref().ready_for_read().filter(|_| retry.is_plain()) else { return false };
        let local = Arc::clone(local);
        let lane = Lane::new(&seat.shared, self.layers.get_mut().get_mut().handle(), &local);
        if let Some(old) = self.lane.replace(lane) {
            old.release();
        }
        true
    }
}

/// Gives a call to the layers, which are ready, and counts it.
#[inline(never)]
fn hand_over<M, Req, Res>(
    ways: &mut Ways<M, Req, Res>,
    seat: &Arc<StackSeat>,
    mut request: Req,
) -> ResponseFuture<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    let writes = ways.layers.get_ref();
    let judged = match writes.classifier() {
        Some(classify) => {
            if let Some((effect, basis)) = classify(&request) {
                request.context_mut().stamp(effect, basis);
            }
            true
        }
        None => false,
    };
    let effect = effect_of(&request);
    let retry = writes.get_ref();
    if !effect.is_write()
        // Who gives one wants to know on which connection the call is, which only the layers note.
        && request.context().activity().is_none()
        && request.context().trail().is_none()
        && (ways.lane.as_ref().is_some_and(|lane| retry.get_ref().is_ready_on(lane.number))
            || ways.renew_lane(seat))
    {
        let context = request.context_mut();
        if context.effect().is_none() {
            context.stamp(effect, Basis::Default);
        }
        let outermost = ways.layers.enter(context);
        let settled = ways.layers.settle(context).map(|_| ());
        let reconnect = ways.layers.get_mut().get_mut().inner_mut();
        if let Err(error) = settled {
            return match seat.shared.closing.load(Ordering::Acquire) {
                true => ResponseFuture::shut_down(reconnect, request, effect),
                false => ResponseFuture::refused(reconnect, error.of_request(&request, effect)),
            };
        }
        if let Some(lane) = &ways.lane {
            // Counted only now, when the request is as it is moved into the future: to count waits until it is written
            // anyway, and what is moved right after it was written waits once more.
            let lane = Arc::clone(lane);
            // The lane was taken before the flag is read: as with the seat below.
            if lane.shared.closing.load(Ordering::Acquire) {
                return ResponseFuture::shut_down(reconnect, request, effect);
            }
            // The copy is sent: it is made where the connection takes it from, and only the other one is moved.
            if let Some((connection, ready)) = reconnect.readied()
                && let Some(copy) = replica(&request)
            {
                *ready = false;
                let direct = Direct::new(connection.call(copy), lane, request, outermost);
                return ResponseFuture { kind: Kind::Direct { direct } };
            }
        }
        // It can be sent only once. The layers have not seen it yet.
        request.context_mut().set_entered(!outermost);
    }
    // Taken before the flag is read, so that a shutdown that sets it sees either this call or its refusal.
    let seat = Arc::clone(seat);
    if seat.shared.closing.load(Ordering::Acquire) {
        return ResponseFuture::shut_down(ways.layers.get_mut().get_mut().inner_mut(), request, effect);
    }
    request.context_mut().set_judged(judged);
    // The layers are one after the other here, so that one reading of the clock serves them all.
    let future = match ways.layers.let_in(&mut request) {
        Ok(entered) => {
            let now = entered.now;
            entered.with(ways.layers.get_mut().call_at(request, now))
        }
        Err(error) => deadline::ResponseFuture::past(error, &request),
    };
    ways.layers.get_mut().get_mut().inner_mut().release_unused();
    ResponseFuture { kind: Kind::Layered { future, seat } }
}

impl<M, Req, Res> Service<Req> for Stack<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    type Response = Res;
    type Error = CallError;
    type Future = ResponseFuture<M, Req, Res>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.ways.get_mut().unwrap_or_else(PoisonError::into_inner).layers.poll_ready(cx)
    }

    #[inline]
    fn call(&mut self, request: Req) -> Self::Future {
        let ways = self.ways.get_mut().unwrap_or_else(PoisonError::into_inner);
        hand_over(ways, &self.seat, request)
    }
}

impl<M: Service<()>, Req, Res> Clone for Stack<M, Req, Res> {
    fn clone(&self) -> Self {
        let layers = self.lock().layers.clone();
        Self::new(layers, Arc::clone(&self.seat.shared))
    }
}

impl<M: Service<()>, Req, Res> Drop for Stack<M, Req, Res> {
    fn drop(&mut self) {
        self.seat.held.store(false, Ordering::Release);
    }
}

impl<M: Service<()>, Req, Res> Drop for Ways<M, Req, Res> {
    fn drop(&mut self) {
        if let Some(lane) = &self.lane {
            lane.release();
        }
    }
}

impl<M: Service<()>, Req, Res> fmt::Debug for Stack<M, Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stack").field("generation", &self.generation()).finish_non_exhaustive()
    }
}

impl StackSeat {
    fn new(shared: Arc<Shared>, held: bool) -> Arc<Self> {
        let seat = Arc::new(Self { shared, held: AtomicBool::new(held) });
        let any: Arc<AnySeat> = Arc::<Self>::clone(&seat);
        seat.shared.census().enter(&any);
        seat
    }
}

impl Seat for StackSeat {
    fn held(&self) -> &AtomicBool {
        &self.held
    }
}

impl Shared {
    fn census(&self) -> MutexGuard<'_, Census<AnySeat>> {
        self.census.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// ===== impl ResponseFuture =====

/// The future of a [`Stack`]'s call.
#[pin_project(PinnedDrop)]
pub struct ResponseFuture<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    #[pin]
    kind: Kind<M, Req, Res>,
}

#[pin_project(project = KindProj)]
enum Kind<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    /// Its attempt is the first, and what the layers would do to it is done in one.
    Direct {
        #[pin]
        direct: Direct<<M::Response as Service<Req>>::Future, M, Req>,
    },
    Layered {
        #[pin]
        future: Layered<M, Req>,
        seat: Arc<StackSeat>,
    },
    Refused(Option<CallError>),
    Done,
}

impl<M, Req, Res> ResponseFuture<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    /// The call goes no further, and the connection that was readied for it is so for others.
    #[cold]
    fn refused(reconnect: &mut Reconnect<M>, error: CallError) -> Self {
        reconnect.release_unused();
        Self { kind: Kind::Refused(Some(error)) }
    }

    #[cold]
    fn shut_down(reconnect: &mut Reconnect<M>, mut request: Req, effect: Effect) -> Self {
        // No layer has named it, and whoever gets the error must be able to tell whose it is.
        request.context_mut().assign_id();
        let error = CallError::refused(Refusal::Shutdown);
        Self::refused(reconnect, error.of_request(&request, effect).with_attempt(None))
    }

    /// The call has ended: a shutdown that waits for that looks again.
    #[inline]
    fn leave(self: Pin<&mut Self>) {
        let mut this = self.project();
        match &*this.kind {
            Kind::Direct { direct } if direct.lane.is_closing() => {
                let lane = Arc::clone(&direct.lane);
                this.kind.set(Kind::Done);
                lane.tell();
            }
            Kind::Layered { seat, .. } if seat.shared.closing.load(Ordering::Acquire) => {
                let shared = Arc::clone(&seat.shared);
                // The seat goes before the word does.
                this.kind.set(Kind::Done);
                shared.ended.notify_waiters();
            }
            Kind::Direct { .. } | Kind::Layered { .. } | Kind::Refused(_) => this.kind.set(Kind::Done),
            Kind::Done => {}
        }
    }

    /// Everything but a call that is answered at its first attempt. `ended` is how a direct call's attempt has
    /// ended just now.
    #[cold]
    #[inline(never)]
    fn poll_rest(
        mut self: Pin<&mut Self>,
        ended: Option<CallError>,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Res, CallError>> {
        let mut this = self.as_mut().project();
        if let (Some(error), KindProj::Direct { direct }) = (ended, this.kind.as_mut().project()) {
            let shared = Arc::clone(&direct.lane.shared);
            let Some(future) = direct.layered(error) else { return Poll::Pending };
            // Counted as both for a moment, never as neither.
            let seat = StackSeat::new(shared, false);
            this.kind.set(Kind::Layered { future, seat });
        }
        let result = match this.kind.project() {
            KindProj::Layered { future, .. } => ready!(future.poll(cx)),
            KindProj::Refused(error) => match error.take() {
                Some(error) => Err(error),
                None => return Poll::Pending,
            },
            KindProj::Direct { .. } | KindProj::Done => return Poll::Pending,
        };
        self.leave();
        Poll::Ready(result)
    }
}

impl<M, Req, Res> Future for ResponseFuture<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    type Output = Result<Res, CallError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        // Asked for alone: to tell all kinds from each other is a jump by a table.
        if !matches!(self.kind, Kind::Direct { .. }) {
            return self.poll_rest(None, cx);
        }
        let KindProj::Direct { mut direct } = self.as_mut().project().kind.project() else {
            return Poll::Pending;
        };
        match ready!(direct.as_mut().poll(cx)) {
            Ok(response) => {
                match direct.lane.is_closing() {
                    true => self.leave(),
                    false => self.project().kind.set(Kind::Done),
                }
                Poll::Ready(Ok(response))
            }
            Err(error) => self.poll_rest(Some(error), cx),
        }
    }
}

#[pinned_drop]
impl<M, Req, Res> PinnedDrop for ResponseFuture<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    #[inline]
    fn drop(self: Pin<&mut Self>) {
        if !matches!(self.kind, Kind::Done) {
            self.leave();
        }
    }
}

impl<M, Req, Res> fmt::Debug for ResponseFuture<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("stack::ResponseFuture { .. }")
    }
}

// ===== impl StackBuilder =====

/// Builds a [`Stack`]. Made by [`Stack::builder`].
pub struct StackBuilder<M, Req, Res> {
    connector: M,
    deadline: DeadlineLayer,
    writes: Option<WriteSafetyLayer<Req, Res>>,
    retry: RetryReadOnlyLayer,
    reconnect: ReconnectLayer,
    classify: Option<Classifier<Req>>,
    events: Events,
    wrong: Option<&'static str>,
    of: PhantomData<fn(Req) -> Res>,
}

/// A function that [`StackBuilder::check`] takes: every `Fn(InDoubt<Req, Res>) -> Fut` is one, and nothing else.
///
/// It is a trait of its own only so that the compiler can say where a check goes that is no function.
#[diagnostic::on_unimplemented(
    message = "`check(..)` takes a function of a write in doubt, and `{Self}` is none",
    label = "no function of an `InDoubt<{Req}, {Res}>`",
    note = "a ready-made check, or another `EffectCheck`, goes in by `.writes(WriteSafetyLayer::new(check))`",
    note = "around the official SDK one of `mcp::checks` has to be wrapped besides: `sdk::check(check)`"
)]
pub trait CheckFunction<Req, Res, Fut>: Fn(InDoubt<Req, Res>) -> Fut {}

impl<F, Fut, Req, Res> CheckFunction<Req, Res, Fut> for F where F: Fn(InDoubt<Req, Res>) -> Fut {}

/// What is wrong with a stack's configuration.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("wrong configuration: {0}")]
pub struct ConfigError(String);

impl<M, Req, Res> StackBuilder<M, Req, Res>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    /// How long a call may take over all of its attempts, where it does not say itself; 60 s by default.
    #[must_use]
    pub fn deadline(mut self, limit: Duration) -> Self {
        if limit.is_zero() {
            self.wrong = self.wrong.or(Some("deadline must not be zero"));
        }
        self.deadline = DeadlineLayer::new(limit);
        self
    }

    /// Gives no deadline to calls that have none of their own.
    #[must_use]
    pub fn without_deadline(mut self) -> Self {
        self.deadline = DeadlineLayer::never();
        self
    }

    /// Says what effect a call has; `None` keeps what [`WriteSafetyLayer::classify`] says, or else the
    /// connector's rules, or else the request itself. It holds for probes too.
    #[must_use]
    pub fn classify(mut self, classify: impl Fn(&Req) -> Option<Effect> + Send + Sync + 'static) -> Self {
        self.classify =
            Some(Arc::new(move |request| classify(request).map(|effect| (effect, Basis::Caller))));
        self
    }

    /// Settles writes in doubt by that function of an [`InDoubt`]; a ready-made check goes in by
    /// [`writes`](Self::writes), as `.writes(WriteSafetyLayer::new(check))`.
    ///
    /// It is short for that, and tells a closure what it is given, so that `|doubt| async move { .. }` needs no
    /// types. [`WriteSafetyLayer::new`] takes any [`EffectCheck`](crate::EffectCheck): a function, a closure whose
    /// argument has a type, or one of [`mcp::checks`](crate::mcp::checks). Give one of the two, not both. Without
    /// either, every write in doubt is unknown and none is replayed.
    ///
    /// The check is asked about all writes of the stack. A replay needs a fence besides, such as
    /// [`Child::exit_ends_effects`](crate::stdio::Child::exit_ends_effects) on the connector or
    /// [`WriteSafetyLayer::quarantine`].
    ///
    /// ```
    /// use goaround::{ConfigError, Stack, WriteSafetyLayer, mcp::{self, checks}};
    ///
    /// # fn build(server: mcp::Stdio, other: mcp::Stdio) -> Result<(), ConfigError> {
    /// let _by_a_function =
    ///     Stack::builder(server).check(|doubt| async move { Ok(doubt.unknown("nobody looked")) }).build()?;
    ///
    /// let ready_made = checks::read_back("put").by_tool("get").argument("/id", "/id").same("/text", "/text");
    /// let _by_a_ready_made_one = Stack::builder(other).writes(WriteSafetyLayer::new(ready_made)).build()?;
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn check<F, Fut>(self, check: F) -> Self
    where
        F: CheckFunction<Req, Res, Fut> + Send + Sync + 'static,
        Fut: Future<Output = Result<Verdict<Res>, BoxError>> + Send + 'static,
    {
        self.writes(WriteSafetyLayer::new(check))
    }

    /// How writes are kept safe; [`WriteSafetyLayer::refuse`] by default.
    #[must_use]
    pub fn writes(mut self, writes: WriteSafetyLayer<Req, Res>) -> Self {
        if self.writes.replace(writes).is_some() {
            self.wrong = self.wrong.or(Some("writes(..) and check(..) were given more than once"));
        }
        self
    }

    /// How reads are retried; [`RetryReadOnly`] by default.
    #[must_use]
    pub fn retry(mut self, retry: impl Into<RetryReadOnlyLayer>) -> Self {
        self.retry = retry.into();
        self
    }

    /// How the stack reconnects; [`ReconnectLayer::once`] by default.
    #[must_use]
    pub fn reconnect(mut self, reconnect: ReconnectLayer) -> Self {
        self.reconnect = reconnect;
        self
    }

    /// Where the events of all layers go. Called on the task that the event happens on: be brief.
    #[must_use]
    pub fn on_event(mut self, sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        self.events = Events::to(sink);
        self
    }

    /// Builds the stack. Nothing is connected before the first call.
    ///
    /// # Errors
    ///
    /// What is wrong with the configuration, by name: a zero deadline or attempt count, a command that does
    /// not exist, and the like.
    pub fn build(self) -> Result<Stack<M, Req, Res>, ConfigError> {
        let Self { mut connector, deadline, writes, retry, reconnect, classify, events, wrong, .. } = self;
        let writes = writes.unwrap_or_else(WriteSafetyLayer::refuse);
        let rules = tool_rules_of(&connector).filter(|_| classify.is_none());
        if let Some(wrong) = writes.wrong_check(rules) {
            return Err(ConfigError(wrong));
        }
        let checks = [wrong.map_or(Ok(()), Err), writes.check(), retry.check(), reconnect.check()];
        for check in checks {
            check.map_err(|what| ConfigError(what.to_owned()))?;
        }
        validate(&connector).map_err(ConfigError)?;

        let writes = writes.classify_between(classify, classifier_of::<M, Req>(&connector));
        // The same sink everywhere: each event is emitted by one layer only.
        let (deadline, writes, retry, reconnect) = match events.is_set() {
            true => (
                deadline.with_events(events.clone()),
                writes.with_events(events.inner()),
                retry.with_events(events.inner()),
                reconnect.with_events(events.inner()),
            ),
            false => (deadline, writes, retry, reconnect),
        };
        let number = writes.number();
        let registrar = writes.registrar(number);
        let entered = registrar.is_some_and(|registrar| register_with(&mut connector, registrar));
        let reconnecting = reconnect.layer(connector);
        let shared = Arc::new(Shared {
            closing: AtomicBool::new(false),
            ended: Notify::new(),
            census: Mutex::new(Census::new()),
            // Not the layer's own: that one knows of other services too, if the layer makes any.
            reconnect: ReconnectHandle::of(&reconnecting),
            events,
        });
        let layers = deadline.layer(writes.layer_as(number, entered, retry.layer(reconnecting)));
        Ok(Stack::new(layers, shared))
    }
}

impl<M, Req, Res> fmt::Debug for StackBuilder<M, Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StackBuilder")
            .field("deadline", &self.deadline)
            .field("writes", &self.writes)
            .field("retry", &self.retry)
            .field("reconnect", &self.reconnect)
            .finish_non_exhaustive()
    }
}
