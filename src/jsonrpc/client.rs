//! The caller's side of a connection: [`Client`], and the future of a call.

use std::{
    borrow::Cow,
    collections::VecDeque,
    fmt,
    future::Future,
    mem,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use serde::Serialize;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
    time::Instant,
};

use super::{
    Builder, Process, Request, Response,
    driver::Late,
    exchange::{Exchange, Kind, Outcome},
};
use crate::{
    Call, CallError, Closure, Deadline, Delivery, Exit, Refusal,
    call::effect_of,
    connection::{BoxFuture, Connection},
    event::Peer,
    wakers::quietly,
};

/// A connection to a JSON-RPC peer, over which any number of calls run at once.
///
/// Clones share the connection. It closes when the peer ends it, when [`Client::close`] is called, or when
/// the last clone and the last future of a call are dropped. It does not reconnect: that is the work of
/// [`ReconnectLayer`](crate::ReconnectLayer).
///
/// A call's future has no timer of its own: the layer that owns the call's deadline (or attempt timeout)
/// polls it when the time has come. Polled at or past it, the future withdraws a request that is not begun
/// ([`Builder::exact_writes`] says when one is), which is then provably not sent; at the deadline it gives up one
/// that is, which is ambiguous. Dropping the future does the same, and tells the peer.
pub struct Client(Arc<Handle>);

/// What one clone and its calls share, so that clones do not contend for one reference count.
struct Handle {
    shared: Arc<Shared>,
}

/// What all clones share with the connection's task.
pub(super) struct Shared {
    /// The connection's own, among all of the process.
    pub(super) number: u64,
    state: Mutex<State>,
    is_closed: AtomicBool,
    closed: watch::Sender<Option<Closure>>,
    /// How many messages of the peer could not be used.
    pub(super) ignored: AtomicU64,
    /// The same, over all connections of a connector.
    pub(super) ignored_in_all: Option<Arc<AtomicU64>>,
    /// How many of them were no JSON-RPC.
    pub(super) unread: Arc<AtomicU64>,
    /// How many answers to the peer's requests were lost with the connection.
    pub(super) dropped_answers: AtomicU64,
    /// The same, over all connections of a connector.
    pub(super) dropped_in_all: Option<Arc<AtomicU64>>,
    wrong: Option<&'static str>,
    max_in_flight: usize,
    peer: Mutex<Option<Peer>>,
    /// Set when the connection is set up, or by a handshake.
    probe: OnceLock<(Request, Duration)>,
    process: Option<ProcessFacts>,
}

pub(crate) struct ProcessFacts {
    pub(crate) exit: watch::Receiver<Option<Exit>>,
    ends_effects: bool,
    pub(crate) stderr: Arc<dyn Fn() -> Vec<String> + Send + Sync>,
    pub(crate) overlapped: bool,
}

impl ProcessFacts {
    pub(crate) fn of(process: &Process) -> Self {
        Self {
            exit: process.exit.clone(),
            ends_effects: process.ends_effects,
            stderr: process.stderr.clone(),
            overlapped: process.overlapped,
        }
    }

    /// The closure of a connection to that process, if it is one to a process.
    pub(crate) fn closure(of: Option<&Self>, reason: Cow<'static, str>, in_flight: usize) -> Closure {
        let ends_effects = of.is_some_and(|process| process.ends_effects);
        let exit = of.map(|process| -> BoxFuture<Exit> {
            let mut exit = process.exit.clone();
            Box::pin(async move {
                let known = match exit.wait_for(Option::is_some).await {
                    Ok(known) => known.clone(),
                    Err(_) => None,
                };
                // Whoever should have seen it is gone: nothing is known of the group.
                known.unwrap_or_else(|| Exit::new(None, false))
            })
        });
        Closure::of_process(reason, in_flight, ends_effects, exit)
    }
}

/// Behind a lock that is held for moments, and never while foreign code runs.
#[derive(Default)]
pub(super) struct State {
    pub(super) queue: VecDeque<Arc<Exchange>>,
    /// About how many frames in the queue have been withdrawn.
    pub(super) withdrawn: usize,
    /// Calls that somebody waits for: whoever ends the waiting gives their places back, the caller when it gives
    /// up and the connection's task when it has an outcome. For a moment below zero where both do at once.
    pub(super) in_flight: isize,
    /// How often the peer has been heard.
    pub(super) heard: u64,
    pub(super) notes: Vec<Note>,
    pub(super) handles: usize,
    pub(super) closing: bool,
    pub(super) closure: Option<Closure>,
    /// Wakes the connection's task.
    pub(super) waker: Option<Waker>,
}

/// What the connection's task must learn of a call.
pub(super) enum Note {
    /// It ended at its deadline without an answer.
    Expired(Arc<Exchange>),
    /// Nobody holds its future any more.
    Dropped(Arc<Exchange>),
}

// ===== impl Client =====

impl Client {
    /// Connects over that transport with the defaults of [`Client::builder`], by a task on the current tokio
    /// runtime.
    ///
    /// Outside of a runtime the client refuses each call.
    pub fn new<T>(io: T) -> Self
    where
        T: AsyncRead + AsyncWrite + Send + 'static,
    {
        Self::builder().connect(io)
    }

    /// Sets up a connection.
    pub fn builder() -> Builder {
        Builder::default()
    }

    pub(super) fn of(shared: Arc<Shared>) -> Self {
        shared.lock().handles += 1;
        Self(Arc::new(Handle { shared }))
    }

    /// Calls a method. The request is queued now, in the order of these calls; the future waits for the
    /// answer.
    pub fn request(&self, request: Request) -> ResponseFuture {
        self.start(request, Kind::Call)
    }

    /// Sends a notification, and waits until the transport has accepted its last byte and was flushed. It is never
    /// replayed.
    ///
    /// # Errors
    ///
    /// If the parameters are not what [`Request::new`] takes, or the connection closed first; the error says
    /// whether anything was sent.
    pub async fn notify(
        &self,
        method: impl Into<Cow<'static, str>>,
        params: impl Serialize,
    ) -> Result<(), CallError> {
        let sending = match Request::new(method, params) {
            Ok(request) => self.start(request, Kind::Notification),
            Err(error) => return Err(CallError::not_sent(error)),
        };
        sending.await.map(drop)
    }

    /// Waits until the connection has closed, and says how. The future does not keep it open.
    pub fn closed(&self) -> impl Future<Output = Closure> + Send + 'static + use<> {
        let mut closed = self.0.shared.closed.subscribe();
        async move {
            loop {
                if let Some(closure) = closed.borrow_and_update().clone() {
                    return closure;
                }
                if quietly(closed.changed()).await.is_err() {
                    // Not reached: the connection's task says how it ended before it lets go of the sender.
                    return Closure::new("the connection is gone");
                }
            }
        }
    }

    /// How the connection closed, if it has.
    pub fn closure(&self) -> Option<Closure> {
        self.0.shared.closure()
    }

    /// Closes the connection: calls in flight end at once.
    pub fn close(&self) {
        let waker = {
            let mut state = self.0.shared.lock();
            state.closing = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// How many answers of ours to the peer's requests were lost, since the connection closed before they were
    /// written. They are sent over no other connection.
    pub fn dropped_answers(&self) -> u64 {
        self.0.shared.dropped_answers.load(Ordering::Relaxed)
    }

    /// How many messages of the peer could not be used: what is not JSON-RPC, answers to no call of this
    /// connection, messages above the size limit that are no answers.
    pub fn ignored(&self) -> u64 {
        self.0.shared.ignored.load(Ordering::Relaxed)
    }

    #[cfg(test)]
    pub(super) fn queue_len(&self) -> usize {
        self.0.shared.lock().queue.len()
    }

    #[cfg(test)]
    pub(super) fn in_flight(&self) -> isize {
        self.0.shared.lock().in_flight
    }

    /// Notes who is there, as a handshake has said.
    pub(crate) fn set_peer(&self, peer: Peer) {
        *self.0.shared.peer.lock().unwrap_or_else(PoisonError::into_inner) = Some(peer);
    }

    /// Sets the probe of a connection that was set up without one, once a handshake knows what to ask.
    pub(crate) fn set_probe(&self, request: Request, timeout: Duration) {
        let _ = self.0.shared.probe.set((request, timeout));
    }

    /// A handle that does not keep the connection open.
    pub(crate) fn downgrade(&self) -> WeakClient {
        WeakClient(Arc::downgrade(&self.0.shared))
    }

    fn start(&self, request: Request, kind: Kind) -> ResponseFuture {
        let shared = &self.0.shared;
        if let Some(wrong) = shared.wrong {
            return ResponseFuture::failed(CallError::refused(Refusal::Config(wrong)), &request);
        }
        if shared.is_closed.load(Ordering::Acquire)
            && let Some(closure) = shared.closure()
        {
            return ResponseFuture::not_sent(closure, request);
        }
        if request.route().is_some_and(|route| !route.permits(shared.number)) {
            let error = CallError::refused(Refusal::AnotherConnection);
            return ResponseFuture::failed(error, &request);
        }
        if request.context().activity().is_some_and(|activity| !activity.adopt()) {
            let error = named(CallError::attempt_timeout(Delivery::NotSent), &request);
            return ResponseFuture(Phase::Failed(error.with_request(request)));
        }
        if let Some(progress) = request.context().progress() {
            progress.made();
        }
        let exchange = Arc::new(Exchange::new(request, kind));
        let waker = {
            let mut state = shared.lock();
            if let Some(closure) = state.closure.clone() {
                drop(state);
                exchange.mark_withdrawn();
                return ResponseFuture::not_sent(closure, exchange.request.for_attempt());
            }
            if usize::try_from(state.in_flight).is_ok_and(|calls| calls >= shared.max_in_flight) {
                drop(state);
                exchange.mark_withdrawn();
                let refusal = Refusal::Overloaded("calls in flight on the connection");
                return ResponseFuture::failed(CallError::refused(refusal), &exchange.request);
            }
            state.in_flight += 1;
            exchange.set_heard(state.heard);
            state.queue.push_back(exchange.clone());
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
        ResponseFuture(Phase::Waiting { handle: self.0.clone(), exchange, polled: false })
    }
}

/// A [`Client`] that does not keep its connection open.
pub(crate) struct WeakClient(Weak<Shared>);

impl WeakClient {
    /// The client, while somebody else holds the connection open.
    pub(crate) fn upgrade(&self) -> Option<Client> {
        let shared = self.0.upgrade()?;
        {
            let mut state = shared.lock();
            if state.handles == 0 {
                return None;
            }
            state.handles += 1;
        }
        Some(Client(Arc::new(Handle { shared })))
    }
}

impl Clone for Client {
    fn clone(&self) -> Self {
        Self::of(self.0.shared.clone())
    }
}

impl fmt::Debug for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Client").field("closure", &self.closure()).finish_non_exhaustive()
    }
}

impl tower::Service<Request> for Client {
    type Response = Response;
    type Error = CallError;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        // What was configured wrongly is told by the call, as final.
        if self.0.shared.wrong.is_none()
            && self.0.shared.is_closed.load(Ordering::Acquire)
            && let Some(closure) = self.closure()
        {
            return Poll::Ready(Err(CallError::of_closure(closure, Delivery::NotSent)));
        }
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> ResponseFuture {
        self.request(request)
    }
}

impl Connection for Client {
    fn peer(&self) -> Option<Peer> {
        self.0.shared.peer.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn has_process(&self) -> bool {
        self.0.shared.process.is_some()
    }

    fn overlapped(&self) -> bool {
        self.0.shared.process.as_ref().is_some_and(|process| process.overlapped)
    }

    fn stderr(&self) -> Vec<String> {
        self.0.shared.process.as_ref().map_or_else(Vec::new, |process| (process.stderr)())
    }

    fn probe(&self) -> Option<(String, BoxFuture<Result<(), CallError>>)> {
        let (request, timeout) = self.0.shared.probe()?;
        let name = request.method().to_owned();
        let client = self.clone();
        let probe = async move {
            // The timeout owns the timer, and the deadline lets the call tell what it knows.
            let deadline = Deadline::within(timeout);
            let mut call = client.start(request.read_only().deadline(deadline), Kind::Probe);
            match tokio::time::timeout(timeout, &mut call).await {
                Ok(answer) => answer.map(drop),
                Err(_) => call.await.map(drop),
            }
        };
        Some((name, Box::pin(probe)))
    }

    fn close(&self) -> BoxFuture<()> {
        Client::close(self);
        let closed = self.closed();
        let exit = self.0.shared.process.as_ref().map(|process| process.exit.clone());
        Box::pin(async move {
            closed.await;
            if let Some(mut exit) = exit {
                // An error: the connector's task is gone, and nothing more will be known.
                let _ = quietly(exit.wait_for(Option::is_some)).await;
            }
        })
    }
}

// ===== impl Handle =====

impl Drop for Handle {
    fn drop(&mut self) {
        let waker = {
            let mut state = self.shared.lock();
            state.handles -= 1;
            if state.handles == 0 { state.waker.take() } else { None }
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

// ===== impl Shared =====

impl Shared {
    pub(super) fn new(wrong: Option<&'static str>, builder: &Builder, process: Option<&Process>) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        Self {
            number: NUMBERS.fetch_add(1, Ordering::Relaxed),
            state: Mutex::default(),
            is_closed: AtomicBool::new(false),
            closed: watch::Sender::new(None),
            ignored: AtomicU64::new(0),
            ignored_in_all: builder.ignored.clone(),
            unread: Arc::clone(&builder.unread),
            dropped_answers: AtomicU64::new(0),
            dropped_in_all: builder.dropped_answers.clone(),
            wrong,
            max_in_flight: builder.max_in_flight,
            peer: Mutex::new(None),
            probe: builder.probe.clone().map(OnceLock::from).unwrap_or_default(),
            process: process.map(ProcessFacts::of),
        }
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn closure(&self) -> Option<Closure> {
        self.lock().closure.clone()
    }

    /// The request that shows whether a silent peer is still there.
    pub(super) fn probe(&self) -> Option<(Request, Duration)> {
        self.probe.get().cloned()
    }

    /// The closure that ends this connection now.
    pub(super) fn new_closure(&self, reason: Cow<'static, str>, in_flight: usize) -> Closure {
        ProcessFacts::closure(self.process.as_ref(), reason, in_flight)
    }

    /// Makes the closure known to all that wait for it.
    pub(super) fn publish(&self, closure: Closure) {
        self.lock().closure.get_or_insert_with(|| closure.clone());
        self.is_closed.store(true, Ordering::Release);
        self.closed.send_replace(Some(closure));
    }

    /// Accounts for a frame that the caller withdrew.
    fn withdrawn(&self, exchange: &Arc<Exchange>) {
        let gone = {
            let mut state = self.lock();
            state.in_flight -= 1;
            state.withdrawn += 1;
            // Behind a stalled pipe nobody else clears the queue.
            if state.withdrawn > 32 && state.withdrawn > state.queue.len() / 2 {
                state.withdrawn = 0;
                let (queued, gone): (VecDeque<_>, VecDeque<_>) =
                    mem::take(&mut state.queue).into_iter().partition(|exchange| exchange.frame.is_queued());
                state.queue = queued;
                gone
            } else {
                VecDeque::new()
            }
        };
        drop(gone);
        exchange.mark_withdrawn();
    }

    /// Accounts for a call whose frame is taken and that the caller waits for no longer. Its place is free at once,
    /// not when the connection's task has heard of it: the next call may be of the same caller.
    fn given_up(&self, note: Option<Note>) {
        self.lock().in_flight -= 1;
        if let Some(note) = note {
            self.note(note);
        }
    }

    fn note(&self, note: Note) {
        let waker = {
            let mut state = self.lock();
            if state.closure.is_some() {
                return;
            }
            state.notes.push(note);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// The error, with the call's name and effect.
pub(super) fn named(error: CallError, request: &Request) -> CallError {
    error.of_request(request, effect_of(request))
}

// ===== impl ResponseFuture =====

/// The future of a call. It has no timer: see [`Client`].
#[must_use = "a call whose future is dropped is cancelled"]
pub struct ResponseFuture(Phase);

enum Phase {
    Failed(CallError),
    Waiting {
        handle: Arc<Handle>,
        exchange: Arc<Exchange>,
        polled: bool,
    },
    /// Ended at its deadline with its frame taken; the peer is told when nobody holds the future.
    Expired {
        handle: Arc<Handle>,
        exchange: Arc<Exchange>,
    },
    Done,
}

impl ResponseFuture {
    fn failed(error: CallError, request: &Request) -> Self {
        Self(Phase::Failed(named(error, request)))
    }

    /// The id on the wire, once the request was taken to be written and while it is waited for.
    pub(crate) fn wire_id(&self) -> Option<u64> {
        match &self.0 {
            Phase::Waiting { exchange, .. } => Some(exchange.id()).filter(|id| *id != 0),
            _ => None,
        }
    }

    fn not_sent(closure: Closure, request: Request) -> Self {
        let error = named(CallError::of_closure(closure, Delivery::NotSent), &request);
        Self(Phase::Failed(error.with_request(request)))
    }
}

impl Future for ResponseFuture {
    type Output = Outcome;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Outcome> {
        let outcome = match &mut self.0 {
            Phase::Waiting { handle, exchange, polled } => {
                ready!(poll_waiting(&handle.shared, exchange, mem::replace(polled, true), cx))
            }
            Phase::Failed(_) => match mem::replace(&mut self.0, Phase::Done) {
                Phase::Failed(error) => return Poll::Ready(Err(error)),
                _ => return Poll::Pending,
            },
            Phase::Expired { .. } | Phase::Done => return Poll::Pending,
        };
        let this = &mut *self;
        match (outcome, mem::replace(&mut this.0, Phase::Done)) {
            (Waited::Ended(outcome), _) => Poll::Ready(outcome),
            (Waited::Expired, Phase::Waiting { handle, exchange, .. }) => {
                let error = named(CallError::deadline(Delivery::Ambiguous), &exchange.request);
                handle.shared.given_up(Some(Note::Expired(exchange.clone())));
                this.0 = Phase::Expired { handle, exchange };
                Poll::Ready(Err(error))
            }
            (Waited::Expired, _) => Poll::Pending,
        }
    }
}

enum Waited {
    Ended(Outcome),
    /// The deadline passed, with the frame taken.
    Expired,
}

fn poll_waiting(
    shared: &Shared,
    exchange: &Arc<Exchange>,
    polled: bool,
    cx: &mut Context<'_>,
) -> Poll<Waited> {
    // An answer that is there wins over time that is up.
    if let Some(outcome) = exchange.poll(cx) {
        return Poll::Ready(Waited::Ended(outcome));
    }
    let context = exchange.request.context();
    let (deadline, until) = (context.until(), context.attempt_until().filter(|_| !off!(AttemptTime)));
    if !polled || (!deadline.has_end() && until.is_none()) {
        return Poll::Pending;
    }
    let now = Instant::now();
    let at_deadline = deadline.is_past(now);
    if !at_deadline && until.is_none_or(|at| now < at) {
        return Poll::Pending;
    }
    if exchange.frame.withdraw() {
        shared.withdrawn(exchange);
        let error = if at_deadline {
            if shared.probe.get().is_some() {
                shared.note(Note::Expired(exchange.clone()));
            }
            CallError::deadline(Delivery::NotSent)
        } else {
            CallError::attempt_timeout(Delivery::NotSent)
        };
        let request = exchange.request.for_attempt();
        return Poll::Ready(Waited::Ended(Err(named(error, &request).with_request(request))));
    }
    if !at_deadline {
        return Poll::Pending;
    }
    // What came since is an answer, or what is known at a closure.
    Poll::Ready(exchange.give_up().map_or(Waited::Expired, Waited::Ended))
}

impl Drop for ResponseFuture {
    fn drop(&mut self) {
        match mem::replace(&mut self.0, Phase::Done) {
            Phase::Waiting { handle, exchange, .. } => {
                if exchange.frame.withdraw() {
                    return handle.shared.withdrawn(&exchange);
                }
                match exchange.give_up() {
                    Some(outcome) => Late::not_taken(&exchange, &outcome),
                    None => {
                        let note = exchange.answered.then_some(Note::Dropped(exchange));
                        handle.shared.given_up(note);
                    }
                }
            }
            Phase::Expired { handle, exchange } => handle.shared.note(Note::Dropped(exchange)),
            Phase::Failed(_) | Phase::Done => {}
        }
    }
}

impl fmt::Debug for ResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
