//! A connection of the SDK's client: the register of its calls, its closure, and what is known of a silent server.

use std::{
    borrow::Cow,
    collections::{HashMap, HashSet},
    fmt,
    future::{Future, poll_fn},
    mem,
    pin::Pin,
    process::ExitStatus,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use rmcp::{
    Peer, RoleClient, ServiceError,
    model::{
        ClientNotification, ClientRequest, CustomRequest, GetExtensions, GetMeta, PingRequest, ProgressToken,
        RequestId, ServerJsonRpcMessage, ServerNotification, ServerResult,
    },
    service::{PeerRequestOptions, RequestHandle},
};
use tokio::{
    runtime::Handle as Runtime,
    sync::{Notify, watch},
    time::{Instant, sleep, sleep_until, timeout},
};

use super::{
    HttpError, Request,
    evidence::{Sight, judge},
    exchange::Exchange,
    questions::{Place, Questions},
    session::{Lesson, Memory},
};
use crate::{
    Basis, Call, CallError, Closure, Delivery, Pause, Refusal, Scope,
    call::effect_of,
    connection::{self, BoxFuture},
    deadline::once_more,
    event,
    jsonrpc::{Late, Process, ProcessFacts, Remembered, Said},
    mcp::{Cursors, Listed},
    wakers::quietly,
};

/// How many calls may be in flight at once.
const MAX_IN_FLIGHT: usize = 65_536;
/// Why a connection takes no calls any more whose session the server has forgotten.
pub(super) const SESSION_LOST: &str = "the server does not know the session any more";
/// How long calls without a deadline keep a connection open whose server is silent.
const PATIENCE: Duration = Duration::from_secs(300);
/// How long a process whose handshake it ended by its own end is waited for.
const LAST_WORDS: Duration = Duration::from_secs(1);
/// How long it may take to tell the server that nobody waits for an answer any more.
pub(super) const CANCEL: Duration = Duration::from_secs(5);
/// How many cancellations, or answers to the server's questions, are posted at once.
const MAX_BESIDE: usize = 64;
/// After how long a list of tools is read that the server says has changed.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// Why the server is told that nobody waits for an answer any more.
const ABANDONED: &str = "nobody waits for the answer any more";

/// A connection to an MCP server by the SDK's client. A clone shares it; it closes when the last one is dropped,
/// with the last of its calls.
///
/// Calls are given to the SDK when their futures are first polled, and resolve with the server's answer, or with what
/// is known without one. They have no timer: a future that is polled at or past its call's deadline resolves with what
/// it knows, and whoever drops it before it has resolved has the server told (`notifications/cancelled` over this very
/// connection, or the end of the response's stream).
///
/// - A `tools/call` that was taken for harmless by a trusted annotation is refused if the server's list on this
///   connection does not say so, or no longer says so when its turn comes ([`Refusal::EffectChanged`]).
/// - A page of a list by a cursor of an earlier session is refused ([`Refusal::CursorOfAnotherSession`]).
/// - Progress that the server reports for a call extends its [idle limit](Call::idle); while the user's handler
///   answers an elicitation, calls that asked for it ([`Call::pause_while_asking`]) stand still.
pub struct Connection(Arc<Handle>);

/// While one is held the connection stays open.
struct Handle(Arc<Inner>);

/// What the connection goes over.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The pipes of a child process.
    Pipe,
    /// Streamable HTTP, where a closed response is no closed connection.
    Http,
    /// The user's own.
    Foreign,
}

/// The SDK's running client, erased.
pub(super) trait Running: Send {
    /// Ends it, within bounds.
    fn close(self: Box<Self>) -> BoxFuture<()>;
}

pub(super) struct Inner {
    pub(super) kind: Kind,
    pub(super) memory: Arc<Memory>,
    probe_timeout: Duration,
    runtime: Runtime,
    state: Mutex<State>,
    closed: watch::Sender<Option<Closure>>,
    /// A silent server was heard, or a call has ended.
    stirred: Notify,
    peer: OnceLock<Peer<RoleClient>>,
    about: OnceLock<event::Peer>,
    running: Mutex<Option<Box<dyn Running>>>,
    process: Option<ProcessFacts>,
    /// What was seen last of a letter that is no call.
    beside: Mutex<Option<Sight>>,
    ignored: AtomicU64,
    unread: Arc<AtomicU64>,
    /// What the server says of its tools, where the caller trusts that.
    pub(super) tools: Arc<Listed>,
    /// Its number among those of its connector, from 1.
    pub(super) number: u64,
    /// Whether the list of tools is about to be read.
    is_listing: AtomicBool,
    /// How many cancellations and answers are being posted, each by itself.
    posting: watch::Sender<usize>,
    /// Whether it began with the handshake of the versions up to 2025-11-25, whatever version was agreed upon.
    has_handshake: AtomicBool,
}

/// What an answer of the server's is to.
enum Answers {
    /// A request that it may have.
    Asked,
    /// A call that it cannot have read: this says nothing of it.
    Unsent,
    /// No request at all.
    Nothing,
}

#[derive(Default)]
struct State {
    calls: HashMap<u64, Arc<Exchange>>,
    last_key: u64,
    /// The calls that are on the wire, by the SDK's ids.
    sent: HashMap<i64, Arc<Exchange>>,
    /// The calls that want to know of progress, by the SDK's tokens.
    watched: HashMap<ProgressToken, u64>,
    remembered: Remembered,
    /// The last id that the SDK gave to a request.
    last_id: i64,
    heard: u64,
    /// Whether a probe is under way, or has failed.
    suspected: bool,
    /// It has failed, and calls that still have time put off the end.
    doomed: bool,
    /// No call is taken any more.
    closure: Option<Closure>,
    /// Since the session is gone at the server.
    session_gone: bool,
    /// Nor is one waited for.
    ended: bool,
    /// What the server asks, and what stands still while the user is asked.
    questions: Questions,
    pauses: HashMap<u64, Pause>,
    /// The cursors that this session has handed out.
    cursors: Cursors,
    /// What the last calls were lost by that were lost together, and the last one that was in flight then.
    loss: Option<(u64, Closure)>,
}

// ===== impl Inner =====

impl Inner {
    pub(super) fn new(
        kind: Kind,
        memory: Arc<Memory>,
        probe_timeout: Duration,
        process: Option<Process>,
        number: u64,
    ) -> (Arc<Self>, Option<BoxFuture<()>>) {
        let facts = process.as_ref().map(ProcessFacts::of);
        let exited = process.map(|process| process.exited);
        let inner = Self {
            kind,
            memory,
            probe_timeout,
            runtime: Runtime::current(),
            state: Mutex::default(),
            closed: watch::Sender::new(None),
            stirred: Notify::new(),
            peer: OnceLock::new(),
            about: OnceLock::new(),
            running: Mutex::new(None),
            process: facts,
            beside: Mutex::default(),
            ignored: AtomicU64::new(0),
            unread: Arc::default(),
            tools: Arc::default(),
            number,
            is_listing: AtomicBool::new(false),
            posting: watch::Sender::new(0),
            has_handshake: AtomicBool::new(false),
        };
        (Arc::new(inner), exited)
    }

    /// Waits, within bounds, until the process is gone and its last words are known.
    pub(super) async fn last_words(&self) -> (Option<ExitStatus>, Vec<String>) {
        let mut status = None;
        if let Some(process) = &self.process {
            let mut exit = process.exit.clone();
            if let Ok(Ok(exit)) = timeout(LAST_WORDS, exit.wait_for(Option::is_some)).await {
                status = exit.as_ref().and_then(|exit| exit.status);
            }
        }
        (status, self.stderr())
    }

    /// Notes what the transport saw of a letter that is no call, such as the handshake's.
    pub(super) fn saw_beside(&self, sight: Sight) {
        *self.beside.lock().unwrap_or_else(PoisonError::into_inner) = Some(sight);
    }

    /// The last of that, if it is an error of HTTP.
    pub(super) fn take_beside(&self) -> Option<HttpError> {
        self.beside.lock().unwrap_or_else(PoisonError::into_inner).take()?.http()
    }

    /// Counts a message of the server that is of no use. What it holds is in no log.
    pub(super) fn ignore(&self, is_json_rpc: bool) {
        self.ignored.fetch_add(1, Ordering::Relaxed);
        if !is_json_rpc && self.unread.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                target: "goaround",
                "what the server writes is not all JSON-RPC, and the rest is ignored: its standard output must carry \
                 nothing else"
            );
        }
    }

    /// How many of those were no JSON-RPC.
    pub(super) fn unread(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.unread)
    }

    pub(super) fn stderr(&self) -> Vec<String> {
        self.process.as_ref().map_or_else(Vec::new, |process| (process.stderr)())
    }

    pub(super) fn peer(&self) -> Option<&Peer<RoleClient>> {
        self.peer.get()
    }

    /// Whether each request stands for itself, as from 2026-07-28 on.
    pub(super) fn is_modern(&self) -> bool {
        !self.has_handshake.load(Ordering::Relaxed)
    }

    /// The SDK begins with the handshake, or falls back to it.
    pub(super) fn shakes_hands(&self) {
        self.has_handshake.store(true, Ordering::Relaxed);
    }

    // ----- what is told beside the calls

    /// Begins to post something beside the calls; `None` if too much of it is under way.
    pub(super) fn post_beside(self: &Arc<Self>) -> Option<Beside> {
        let begins = self.posting.send_if_modified(|posting| {
            let begins = *posting < MAX_BESIDE;
            *posting += usize::from(begins);
            begins
        });
        begins.then(|| Beside(Arc::clone(self)))
    }

    /// Waits until nothing is posted beside the calls.
    async fn all_is_told(&self) {
        let mut posting = self.posting.subscribe();
        let _ = quietly(posting.wait_for(|posting| *posting == 0)).await;
    }

    /// Waits for the connection's end.
    pub(super) async fn until_closed(&self) {
        let mut closed = self.closed.subscribe();
        // Its sender is here.
        let _ = quietly(closed.wait_for(Option::is_some)).await;
    }

    // ----- what the transport tells

    /// A call is given to the transport.
    pub(super) fn sending(&self, exchange: &Arc<Exchange>, id: i64, token: Option<ProgressToken>) {
        let mut state = self.lock();
        exchange.set_heard(state.heard);
        // One that was withdrawn while it was queued at the SDK has left, and nobody would take it out again.
        if exchange.is_given_up() || !state.calls.contains_key(&exchange.key) {
            return;
        }
        state.sent.insert(id, Arc::clone(exchange));
        if let Some(token) = token
            && exchange.request.context().progress().is_some()
        {
            state.watched.insert(token, exchange.key);
        }
    }

    /// A request goes out with that id, be it a call's or not.
    pub(super) fn numbered(&self, id: i64) {
        let mut state = self.lock();
        state.last_id = state.last_id.max(id);
    }

    /// Something came from the server.
    pub(super) fn heard(&self) {
        let suspected = {
            let mut state = self.lock();
            state.heard += 1;
            state.doomed = false;
            state.suspected
        };
        if suspected {
            self.stirred.notify_waiters();
        }
    }

    pub(super) fn times_heard(&self) -> u64 {
        self.lock().heard
    }

    /// A message came from the server. `false`: the SDK is not to see it.
    pub(super) fn received(self: &Arc<Self>, message: &mut ServerJsonRpcMessage) -> bool {
        let answers = match message {
            ServerJsonRpcMessage::Response(answer) => self.answered(Some(&answer.id), true),
            ServerJsonRpcMessage::Error(answer) => self.answered(answer.id.as_ref(), false),
            _ => Answers::Asked,
        };
        match answers {
            Answers::Asked => {}
            // What the SDK drops shows no call that it is at work, and what a probe finds out is not forestalled.
            Answers::Nothing => return true,
            Answers::Unsent => {
                tracing::debug!(target: "goaround", "an answer to a call that was not sent yet was ignored");
                return false;
            }
        }
        self.heard();
        match message {
            ServerJsonRpcMessage::Response(_) | ServerJsonRpcMessage::Error(_) => {}
            ServerJsonRpcMessage::Notification(notification) => match &notification.notification {
                ServerNotification::ProgressNotification(progress) => {
                    let state = self.lock();
                    let call = state.watched.get(&progress.params.progress_token);
                    let call = call.and_then(|key| state.calls.get(key));
                    if let Some(progress) = call.and_then(|call| call.request.context().progress()) {
                        progress.made();
                    }
                }
                ServerNotification::ToolListChangedNotification(_) if self.memory.wants_tools() => {
                    self.tools.changed();
                    if !self.is_listing.swap(true, Ordering::AcqRel) {
                        self.runtime.spawn(read_tools_soon(Arc::downgrade(self)));
                    }
                }
                ServerNotification::CancelledNotification(cancelled) => {
                    if let Some(id) = &cancelled.params.request_id {
                        drop(self.with_questions(|questions| questions.end(id)));
                    }
                }
                _ => {}
            },
            ServerJsonRpcMessage::Request(request) => {
                let place = {
                    let mut state = self.lock();
                    let place = state.questions.open(&request.id, self);
                    place.map(|place| (state.questions.ask(&request.id, &place), place))
                };
                let Some((_replaced, place)) = place else {
                    tracing::debug!(target: "goaround", "a question of a server that reads no answers was ignored");
                    return false;
                };
                // Whoever drops the request frees its place, the SDK in its handshake for one.
                request.request.extensions_mut().insert(place);
            }
        }
        true
    }

    /// An answer with that id came.
    fn answered(&self, id: Option<&RequestId>, success: bool) -> Answers {
        let Some(id) = id.and_then(number_of) else { return Answers::Nothing };
        let late = {
            let mut state = self.lock();
            if !(0..=state.last_id).contains(&id) {
                return Answers::Nothing;
            }
            // The ids are easily guessed, and the SDK would believe it.
            if state.sent.get(&id).is_some_and(|call| !call.is_out()) {
                return Answers::Unsent;
            }
            let late = state.late(id);
            if let Some(call) = state.sent.remove(&id) {
                call.answered(if success { Said::Result } else { Said::Error });
            }
            late
        };
        if let Some(late) = late.filter(|_| success) {
            late.emit();
        }
        Answers::Asked
    }

    /// The server asks something of the user, if it still does: calls that want it stand still.
    pub(super) fn user_is_asked(&self, begin: impl FnOnce(&mut Questions) -> bool) {
        let mut state = self.lock();
        if begin(&mut state.questions) {
            let calls: Vec<_> = state.calls.values().cloned().collect();
            for call in calls {
                state.pause(&call);
            }
        }
    }

    /// Whether that is the id of a call that is not out, or of nothing that was asked so far: no answer to it is one.
    pub(super) fn is_unasked(&self, id: i64) -> bool {
        let state = self.lock();
        id > state.last_id || state.sent.get(&id).is_some_and(|call| !call.is_out())
    }

    /// An answer with that id came that the SDK cannot read. `Some`: the SDK may wait for it, for that call if it is one.
    pub(super) fn answered_oddly(&self, id: i64, said: Said) -> Option<Option<Arc<Exchange>>> {
        let late = {
            let mut state = self.lock();
            match (state.late(id), state.sent.get(&id)) {
                (Some(late), _) => late,
                (None, Some(call)) => {
                    let call = Some(call).filter(|call| call.is_out())?;
                    call.answered(said);
                    return Some(Some(Arc::clone(call)));
                }
                (None, None) => return (0..=state.last_id).contains(&id).then_some(None),
            }
        };
        late.report_as(said);
        None
    }

    /// Changes what is known of the server's questions. What stood still while the user was asked goes on when he no
    /// longer is.
    pub(super) fn with_questions<T>(&self, change: impl FnOnce(&mut Questions) -> T) -> T {
        let (changed, over) = {
            let mut state = self.lock();
            let changed = change(&mut state.questions);
            let over = !state.questions.is_user_asked();
            (changed, if over { mem::take(&mut state.pauses) } else { HashMap::new() })
        };
        drop(over);
        changed
    }

    /// An answer to a question is given to the transport. Its place is held until it is written.
    pub(super) fn answers(self: &Arc<Self>, id: &RequestId) -> Option<Place> {
        let place = self.with_questions(|questions| questions.end(id));
        place.or_else(|| self.with_questions(|questions| questions.open(id, self)))
    }

    // ----- the end

    /// No call is taken any more, since the session is gone; those in flight are judged each by itself.
    pub(super) fn retire(&self, reason: &'static str) -> Closure {
        let closure = {
            let mut state = self.lock();
            state.session_gone = true;
            let in_flight = state.calls.len();
            state.closure.get_or_insert_with(|| self.new_closure(reason.into(), in_flight)).clone()
        };
        self.closed.send_replace(Some(closure.clone()));
        closure
    }

    pub(super) fn closure(&self) -> Option<Closure> {
        self.lock().closure.clone()
    }

    pub(super) fn has_lost_session(&self) -> bool {
        self.lock().session_gone
    }

    /// Ends the connection, and every call with what is known of its bytes.
    pub(super) fn close(&self, reason: impl Into<Cow<'static, str>>) {
        let (closure, calls, pauses) = {
            let mut state = self.lock();
            if state.ended {
                return;
            }
            state.ended = true;
            let in_flight = state.calls.len();
            let closure =
                state.closure.get_or_insert_with(|| self.new_closure(reason.into(), in_flight)).clone();
            // Who waits for them takes them out of `sent`: until then a guess at what has not left is none here, too.
            state.watched.clear();
            (closure, mem::take(&mut state.calls), mem::take(&mut state.pauses))
        };
        drop(pauses);
        self.closed.send_replace(Some(closure.clone()));
        for call in calls.into_values() {
            call.close(&closure);
        }
        self.stirred.notify_waiters();
        let running = lock(&self.running).take();
        drop(running);
    }

    fn new_closure(&self, reason: Cow<'static, str>, in_flight: usize) -> Closure {
        ProcessFacts::closure(self.process.as_ref(), reason, in_flight)
    }

    // ----- calls

    /// Enters a call; an error says why it is not taken.
    fn enter(&self, request: Request) -> Result<Arc<Exchange>, Box<(CallError, Request)>> {
        let mut state = self.lock();
        if let Some(closure) = state.closure.clone() {
            drop(state);
            return Err(Box::new((CallError::of_closure(closure, Delivery::NotSent), request)));
        }
        if state.calls.len() >= MAX_IN_FLIGHT {
            drop(state);
            let refusal = Refusal::Overloaded("calls in flight on the connection");
            return Err(Box::new((CallError::refused(refusal), request)));
        }
        state.last_key += 1;
        let exchange = Arc::new(Exchange::new(request, state.last_key, state.heard));
        state.calls.insert(exchange.key, Arc::clone(&exchange));
        if state.questions.is_user_asked() {
            state.pause(&exchange);
        }
        Ok(exchange)
    }

    /// The call has ended; `late` is what is kept of one that was given up, if its answer has not come: that one is
    /// late, too.
    fn leave(&self, exchange: &Exchange, mut late: Option<Late>) {
        let (pause, is_drained) = {
            let mut state = self.lock();
            state.calls.remove(&exchange.key);
            // Of one that is being written no answer can come: see `written`.
            if late.is_none() || exchange.said().is_some() || exchange.is_out() {
                state.forget(exchange, &mut late);
            }
            if exchange.request.context().progress().is_some() {
                state.watched.retain(|_, key| *key != exchange.key);
            }
            let is_drained = state.session_gone && state.calls.is_empty();
            (state.pauses.remove(&exchange.key), is_drained)
        };
        drop(pause);
        if let (Some(late), Some(said)) = (late, exchange.said()) {
            late.report_as(said);
        }
        self.stirred.notify_waiters();
        if is_drained {
            self.close("the session is gone");
        }
    }

    /// The pipe has accepted the whole call: from here on an answer to it is a late one, if it was given up meanwhile.
    pub(super) fn written(&self, exchange: &Exchange) {
        if exchange.is_given_up() {
            let mut state = self.lock();
            if !state.calls.contains_key(&exchange.key) {
                state.forget(exchange, &mut Some(Late::of_call(&exchange.request)));
            }
        }
    }

    /// By what a call was lost whose connection lives on. What was in flight when the first one was lost shares it:
    /// a server that dies takes down many responses, and is one event.
    fn lost(&self, exchange: &Exchange) -> Closure {
        let mut state = self.lock();
        if let Some((last, loss)) = &state.loss
            && exchange.key <= *last
        {
            return loss.clone();
        }
        let loss = Closure::new("calls were lost");
        state.loss = Some((state.last_key, loss.clone()));
        loss
    }

    /// Whether the call may go out now: if its time is up, or the annotation by which it was taken for harmless was taken
    /// back while it waited for its turn, it is refused.
    pub(super) fn lets_go_out(&self, exchange: &Exchange) -> bool {
        let request = &exchange.request;
        if let Some(overdue) = request.context().overdue() {
            exchange.refuse(Sight::Overdue(overdue));
            return false;
        }
        if self.upholds(request) {
            return true;
        }
        exchange.refuse(Sight::EffectChanged);
        false
    }

    /// Whether what a trusted annotation made of the call still holds on this connection.
    fn upholds(&self, request: &Request) -> bool {
        request.context().basis() != Basis::TrustedAnnotation
            || self.tools.upholds(request.tool_name(), effect_of(request))
            || off!(Annotation)
    }

    /// Nobody knows whether the server did the call before or after it said that its tool had changed.
    pub(super) fn judge_effect(&self, request: &Request, error: &mut CallError) {
        if error.is_ambiguous_as_a_write() && !self.upholds(request) {
            error.misjudge();
        }
    }

    fn takes_cursor(&self, cursor: &str) -> bool {
        self.number == 1 || self.is_modern() || self.lock().cursors.knows(cursor)
    }

    pub(super) fn hands_out(&self, cursor: &str) {
        self.lock().cursors.insert(cursor);
    }

    // ----- silence

    /// A call's deadline passed: if nothing was heard since it was sent, one probe decides about the connection.
    fn expired(self: &Arc<Self>, exchange: &Exchange) {
        let suspect = {
            let mut state = self.lock();
            let suspect = exchange.heard() == state.heard && !state.suspected && !state.ended;
            state.suspected |= suspect;
            suspect
        };
        if suspect {
            self.runtime.spawn(judge_silence(Arc::downgrade(self)));
        }
    }

    /// The question whether the server is there, and its name.
    fn ask(&self) -> Option<(&'static str, BoxFuture<Result<(), CallError>>)> {
        let peer = self.peer.get()?.clone();
        let (name, request): (_, ClientRequest) = if self.is_modern() {
            // The SDK's own request would wait until no other one is on its way.
            ("server/discover", CustomRequest::new("server/discover", None).into())
        } else {
            ("ping", PingRequest::default().into())
        };
        let limit = self.probe_timeout;
        let asking = async move {
            let options = PeerRequestOptions::no_options();
            let asked = async {
                let handle = peer.send_request_with_option(request, options).await?;
                handle.await_response().await
            };
            match timeout(limit, asked).await {
                // A server that does not know the question is there.
                Ok(Ok(_) | Err(ServiceError::McpError(_))) => Ok(()),
                Ok(Err(error)) => Err(CallError::ambiguous(error)),
                Err(_) => Err(CallError::deadline(Delivery::Ambiguous)),
            }
        };
        Some((name, Box::pin(asking)))
    }

    /// Waits while the server counts as gone: what is sent to it would be in doubt for nothing. Over HTTP each request
    /// goes its own way, and may be the one that is answered. `false`: it may not go any more, since of what waits it is
    /// asked in which order it goes.
    async fn may_send(&self, exchange: &Exchange) -> bool {
        let activity = exchange.request.context().activity();
        while self.is_doomed() {
            if let Some(activity) = activity {
                // Its layer sees that before it polls this again.
                activity.waits();
            }
            let stirred = self.stirred.notified();
            tokio::pin!(stirred);
            // Registered before it is looked at what happened.
            stirred.as_mut().enable();
            if self.is_doomed() {
                quietly(stirred).await;
            }
        }
        activity.is_none_or(|activity| activity.goes_on())
    }

    fn is_doomed(&self) -> bool {
        self.kind != Kind::Http && self.lock().doomed
    }

    /// Until when calls in flight put off the end of a silent connection; `None` if none does.
    fn last_deadline(&self, now: Instant, patience: Instant, doomed: &HashSet<u64>) -> Option<Instant> {
        let state = self.lock();
        // What was not sent the next connection may have; on this one it would wait until its own deadline.
        let is_unwritten = |call: &Exchange| self.kind != Kind::Http && call.is_unwritten();
        let calls = state.calls.values().filter(|call| doomed.contains(&call.key) && !is_unwritten(call));
        // A stream that waits for ever is no reason to wait.
        let calls =
            calls.filter(|call| call.request.method() != "subscriptions/listen" && !call.is_given_up());
        let ends = calls.map(|call| call.request.context().until().instant().unwrap_or(patience));
        ends.filter(|end| *end > now).max()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads the list of tools, once for all that was said of it meanwhile.
async fn read_tools_soon(connection: Weak<Inner>) {
    sleep(DEBOUNCE).await;
    let Some(inner) = connection.upgrade() else { return };
    inner.is_listing.store(false, Ordering::Release);
    super::session::read_tools(&inner).await;
}

/// Probes a silent server, and ends the connection if that fails, after the calls that still have time.
async fn judge_silence(connection: Weak<Inner>) {
    let Some(inner) = connection.upgrade() else { return };
    let asking = inner.ask();
    let heard = inner.times_heard();
    drop(inner);
    let answered = match asking {
        Some((_, asking)) => asking.await.is_ok(),
        None => true,
    };
    let patience = Instant::now() + PATIENCE;
    let mut doomed: Option<HashSet<u64>> = None;
    loop {
        let Some(inner) = connection.upgrade() else { return };
        let stirred = inner.stirred.notified();
        tokio::pin!(stirred);
        // Registered before it is looked at what happened.
        stirred.as_mut().enable();
        {
            let mut state = inner.lock();
            if answered || state.ended || state.heard != heard {
                state.suspected = false;
                return;
            }
            state.doomed = true;
            doomed.get_or_insert_with(|| state.calls.keys().copied().collect());
        }
        let calls = doomed.as_ref().map(|doomed| inner.last_deadline(Instant::now(), patience, doomed));
        let Some(Some(until)) = calls else {
            return inner.close("the server is silent and did not answer a probe");
        };
        tokio::select! {
            () = stirred => {}
            () = sleep_until(until) => {}
        }
    }
}

// ===== impl Beside =====

/// Something that is posted beside the calls.
pub(super) struct Beside(Arc<Inner>);

impl Drop for Beside {
    fn drop(&mut self) {
        self.0.posting.send_modify(|posting| *posting -= 1);
    }
}

// ===== impl State =====

impl State {
    /// No answer to the call is waited for any more; what is kept of it tells of one that comes all the same.
    fn forget(&mut self, exchange: &Exchange, late: &mut Option<Late>) {
        let Some(id) = exchange.id() else { return };
        let was_sent = self.sent.remove(&id).is_some();
        if was_sent
            && exchange.said().is_none()
            && let Some(late) = late.take()
        {
            self.remembered.insert(id.unsigned_abs(), late);
        }
    }

    /// What was kept of a call that nobody waits for and that an answer with that id is to.
    fn late(&mut self, id: i64) -> Option<Late> {
        // A closure takes them out of `calls`, too, and there somebody may yet take the answer.
        let has_left =
            |call: &Arc<Exchange>| !self.calls.contains_key(&call.key) && call.is_given_up() && call.is_out();
        if self.sent.get(&id).is_some_and(has_left) {
            return self.sent.remove(&id).map(|call| Late::of_call(&call.request));
        }
        self.remembered.remove(u64::try_from(id).ok()?)
    }

    fn pause(&mut self, call: &Exchange) {
        let progress = call.request.context().progress();
        if let Some(progress) = progress.filter(|progress| progress.pauses_while_asking()) {
            self.pauses.entry(call.key).or_insert_with(|| progress.pause());
        }
    }
}

// ===== impl Connection =====

impl Connection {
    /// The connection, once its handshake is done.
    pub(super) fn new(
        inner: Arc<Inner>,
        peer: Peer<RoleClient>,
        about: event::Peer,
        running: Box<dyn Running>,
    ) -> Self {
        let _ = inner.peer.set(peer);
        let _ = inner.about.set(about);
        *lock(&inner.running) = Some(running);
        if inner.lock().ended {
            // It has ended meanwhile; nobody else ends this one.
            let running = lock(&inner.running).take();
            drop(running);
        }
        Self(Arc::new(Handle(inner)))
    }

    pub(super) fn inner(&self) -> &Arc<Inner> {
        &self.0.0
    }

    /// The SDK's handle on this connection. What is sent by it is not seen here: no deadline, no retry, no check.
    pub fn peer(&self) -> Option<Peer<RoleClient>> {
        self.inner().peer().cloned()
    }

    /// Sends a notification, once.
    ///
    /// # Errors
    ///
    /// Not sent, if the connection is closed; ambiguous, if the transport failed.
    pub async fn notify(&self, notification: impl Into<ClientNotification>) -> Result<(), CallError> {
        let inner = self.inner();
        let (None, Some(peer)) = (inner.closure(), inner.peer()) else {
            return Err(CallError::not_sent(ServiceError::TransportClosed).connection_lost());
        };
        peer.send_notification(notification.into()).await.map_err(|error| match error {
            ServiceError::TransportClosed => CallError::closed(error),
            error => CallError::ambiguous(error),
        })
    }

    /// How the connection closed, if it has.
    pub fn closure(&self) -> Option<Closure> {
        self.inner().closure()
    }

    /// Waits until the connection takes no calls any more, and says how it ended. The future does not keep it open.
    pub fn closed(&self) -> impl Future<Output = Closure> + Send + 'static + use<> {
        let mut closed = self.inner().closed.subscribe();
        async move {
            match quietly(closed.wait_for(Option::is_some)).await.map(|closure| closure.clone()) {
                Ok(Some(closure)) => closure,
                _ => Closure::new("the connection was dropped"),
            }
        }
    }

    /// How many messages of a server that is a child process could not be used: what it writes to its standard output
    /// that is no JSON-RPC, and messages above the size limit that are no answers.
    pub fn ignored(&self) -> u64 {
        self.inner().ignored.load(Ordering::Relaxed)
    }

    /// Closes the connection: calls in flight end at once.
    pub fn close(&self) {
        self.inner().close("the connection was closed by the client");
    }

    fn request(&self, request: Request) -> ResponseFuture {
        let inner = self.inner();
        if !inner.upholds(&request) {
            return ResponseFuture::refused(Refusal::EffectChanged, &request);
        }
        if request.cursor().is_some_and(|cursor| !inner.takes_cursor(cursor)) {
            return ResponseFuture::refused(Refusal::CursorOfAnotherSession, &request);
        }
        if request.context().activity().is_some_and(|activity| !activity.adopt()) {
            let error = CallError::attempt_timeout(Delivery::NotSent);
            let error = error.of_request(&request, effect_of(&request));
            return ResponseFuture(Phase::Failed(error.with_request(request)));
        }
        if let Some(progress) = request.context().progress() {
            progress.made();
        }
        if request.context().basis() == Basis::TrustedAnnotation
            && let Some(activity) = request.context().activity()
        {
            activity.taken_by(inner.tools.word(request.tool_name().map(Into::into), effect_of(&request)));
        }
        let exchange = match inner.enter(request) {
            Ok(exchange) => exchange,
            Err(refused) => {
                let (error, request) = *refused;
                let error = error.of_request(&request, effect_of(&request));
                if let Some(activity) = request.context().activity() {
                    activity.withdrawn();
                }
                return ResponseFuture(Phase::Failed(error.with_request(request)));
            }
        };
        let Some(peer) = inner.peer().cloned() else {
            inner.leave(&exchange, None);
            let closure = Closure::new("there is no connection yet");
            return ResponseFuture(Phase::Failed(exchange.not_sent(&closure)));
        };
        let ticketed = exchange.ticketed();
        let (inner, held_back) = (Arc::clone(inner), Arc::clone(&exchange));
        let sending = async move {
            if !inner.may_send(&held_back).await {
                return None;
            }
            Some(peer.send_request_with_option(ticketed, PeerRequestOptions::no_options()).await)
        };
        ResponseFuture(Phase::Waiting(Box::new(Waiting {
            handle: Arc::clone(&self.0),
            exchange,
            sending: Some(Box::pin(sending)),
            answer: None,
            polled: false,
        })))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close("the last handle of the connection was dropped");
    }
}

impl Clone for Connection {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection").field("closure", &self.closure()).finish_non_exhaustive()
    }
}

impl tower::Service<Request> for Connection {
    type Response = ServerResult;
    type Error = CallError;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(match self.closure() {
            Some(closure) => Err(CallError::of_closure(closure, Delivery::NotSent)),
            None => Ok(()),
        })
    }

    fn call(&mut self, request: Request) -> ResponseFuture {
        self.request(request)
    }
}

impl connection::Connection for Connection {
    fn peer(&self) -> Option<event::Peer> {
        self.inner().about.get().cloned()
    }

    fn has_process(&self) -> bool {
        self.inner().process.is_some()
    }

    fn overlapped(&self) -> bool {
        self.inner().process.as_ref().is_some_and(|process| process.overlapped)
    }

    fn stderr(&self) -> Vec<String> {
        self.inner().stderr()
    }

    fn probe(&self) -> Option<(String, BoxFuture<Result<(), CallError>>)> {
        let (name, asking) = self.inner().ask()?;
        Some((name.to_owned(), asking))
    }

    fn close(&self) -> BoxFuture<()> {
        let inner = self.inner();
        let running = lock(&inner.running).take();
        inner.close("the connection was closed by the client");
        let exit = inner.process.as_ref().map(|process| process.exit.clone());
        Box::pin(async move {
            if let Some(running) = running {
                running.close().await;
            }
            if let Some(mut exit) = exit {
                // An error: the connector's task is gone, and nothing more will be known.
                let _ = quietly(exit.wait_for(Option::is_some)).await;
            }
        })
    }
}

// ===== impl ResponseFuture =====

/// The future of a call. It has no timer: see [`Connection`].
#[must_use = "a call whose future is dropped is cancelled"]
pub struct ResponseFuture(Phase);

enum Phase {
    Failed(CallError),
    Waiting(Box<Waiting>),
    /// Ended at its deadline with its frame taken; the server is told when nobody holds the future.
    Expired(Box<Waiting>),
    Done,
}

struct Waiting {
    handle: Arc<Handle>,
    exchange: Arc<Exchange>,
    /// On its way into the SDK's queue.
    sending: Option<BoxFuture<Sent>>,
    answer: Option<RequestHandle<RoleClient>>,
    polled: bool,
}

/// A call that is in the SDK's queue; `None`: it was held back, and may not go any more.
type Sent = Option<Result<RequestHandle<RoleClient>, ServiceError>>;

/// How a call has ended; `None`: its deadline passed, with the frame taken.
type Waited = Option<Result<ServerResult, CallError>>;

impl ResponseFuture {
    fn refused(refusal: Refusal, request: &Request) -> Self {
        let error = CallError::refused(refusal).of_request(request, effect_of(request));
        Self(Phase::Failed(error))
    }
}

impl Waiting {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Waited> {
        let first = !mem::replace(&mut self.polled, true);
        // An answer that is there wins, also where the task's turn is used up at tokio's channels.
        let mut answer = poll_fn(|cx| self.poll_answer(cx));
        if let Some(outcome) = once_more(Pin::new(&mut answer), cx) {
            return Poll::Ready(Some(outcome));
        }
        if let Some(error) = self.exchange.poll_end(cx) {
            // One that came just before the end does, too.
            return Poll::Ready(Some(match self.take_answer().filter(|_| self.may_be_answered()) {
                Some(Ok(result)) => Ok(result),
                Some(Err(error @ ServiceError::McpError(_))) => Err(self.judged(error)),
                _ => Err(self.overtaken(error)),
            }));
        }
        self.poll_time(first)
    }

    /// What the SDK says.
    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Result<ServerResult, CallError>> {
        let inner = &self.handle.0;
        if let Some(sending) = &mut self.sending {
            let sent = ready!(sending.as_mut().poll(cx));
            self.sending = None;
            match sent {
                None => {
                    self.exchange.withdraw();
                    let error = CallError::attempt_timeout(Delivery::NotSent);
                    return Poll::Ready(Err(self.exchange.hand_back(error)));
                }
                Some(Ok(answer)) => self.answer = Some(answer),
                // It never came into the queue, which closes with the connection.
                Some(Err(_)) => {
                    inner.close("the connection was closed");
                    return match self.exchange.poll_end(cx) {
                        Some(error) => Poll::Ready(Err(error)),
                        None => Poll::Pending,
                    };
                }
            }
        }
        let Some(answer) = &mut self.answer else { return Poll::Pending };
        match ready!(Pin::new(&mut answer.rx).poll(cx)) {
            // Only of what the connection's end has withdrawn or cut: that end is there, or is about to be.
            Ok(Ok(_) | Err(ServiceError::McpError(_))) if !self.may_be_answered() => {
                self.answer = None;
                match self.exchange.poll_end(cx) {
                    Some(error) => Poll::Ready(Err(error)),
                    None => Poll::Pending,
                }
            }
            Ok(Ok(result)) => Poll::Ready(Ok(result)),
            Ok(Err(error)) => {
                // A transport that counts bytes has closed the connection by then, and knows more.
                if inner.kind == Kind::Pipe
                    && matches!(error, ServiceError::TransportSend(_))
                    && let Some(error) = self.exchange.poll_end(cx)
                {
                    return Poll::Ready(Err(error));
                }
                Poll::Ready(Err(self.judged(error)))
            }
            // The SDK's task has ended, and this is how it says so.
            Err(_) => {
                self.answer = None;
                inner.close("the connection's task ended");
                match self.exchange.poll_end(cx) {
                    Some(error) => Poll::Ready(Err(self.overtaken(error))),
                    None => Poll::Pending,
                }
            }
        }
    }

    /// The answer that is there and was not looked at.
    fn take_answer(&mut self) -> Option<Result<ServerResult, ServiceError>> {
        self.answer.as_mut()?.rx.try_recv().ok()
    }

    /// Whether what looks like the server's answer can be one: it may have read the call, and has not guessed its id.
    fn may_be_answered(&self) -> bool {
        self.exchange.said().is_some() || self.exchange.is_out()
    }

    /// The connection's end, which an answer that the SDK still had in its hands is too late for.
    fn overtaken(&self, error: CallError) -> CallError {
        if let Some(said) = self.exchange.said() {
            Late::of_call(&self.exchange.request).report_as(said);
        }
        error
    }

    /// What an error of the SDK's says, here and of the connection.
    fn judged(&self, error: ServiceError) -> CallError {
        let inner = &self.handle.0;
        let bytes = inner.kind != Kind::Http;
        let (judged, is_lost) = judge(error, &self.exchange, bytes);
        let judged = match is_lost {
            true => judged.lost_with(inner.lost(&self.exchange)),
            false => judged,
        };
        if judged.scope() != Scope::Connection {
            return judged;
        }
        match judged.get_ref::<HttpError>() {
            // The session is gone, over the user's own HTTP transport too.
            Some(_) => drop(inner.retire(SESSION_LOST)),
            None => inner.close("the transport failed"),
        }
        match &inner.closure() {
            Some(closure) => judged.at_closure(closure),
            None => judged,
        }
    }

    /// What is known when the time is up.
    fn poll_time(&mut self, first: bool) -> Poll<Waited> {
        let exchange = &self.exchange;
        let context = exchange.request.context();
        let (deadline, until) = (context.until(), context.attempt_until());
        if first || (!deadline.has_end() && until.is_none()) {
            return Poll::Pending;
        }
        let now = Instant::now();
        let at_deadline = deadline.is_past(now);
        if !at_deadline && until.is_none_or(|at| now < at) {
            return Poll::Pending;
        }
        if exchange.withdraw() {
            let error = if at_deadline {
                // A request that waits for its turn here says nothing of the server.
                if self.handle.0.kind != Kind::Http || exchange.is_begun() {
                    self.handle.0.expired(exchange);
                }
                CallError::deadline(Delivery::NotSent)
            } else {
                CallError::attempt_timeout(Delivery::NotSent)
            };
            return Poll::Ready(Some(Err(exchange.hand_back(error))));
        }
        if at_deadline { Poll::Ready(None) } else { Poll::Pending }
    }

    /// Nobody waits any more: the server is told, over this very connection.
    fn give_up(self) {
        let Self { handle, exchange, answer, .. } = self;
        let inner = &handle.0;
        exchange.give_up();
        if exchange.withdraw() {
            exchange.mark_withdrawn();
            inner.leave(&exchange, None);
            return;
        }
        inner.leave(&exchange, Some(Late::of_call(&exchange.request)));
        let goes_on = exchange.said().is_none() && inner.closure().is_none();
        let Some(answer) = answer.filter(|_| goes_on) else { return };
        let runtime = inner.runtime.clone();
        runtime.spawn(async move {
            // The connection stays open until it is told.
            let handle = handle;
            let told = async {
                let _ = answer.cancel(Some(ABANDONED.to_owned())).await;
                handle.0.all_is_told().await;
            };
            let _ = timeout(CANCEL, told).await;
        });
    }
}

impl Future for ResponseFuture {
    type Output = Result<ServerResult, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let waited = match &mut self.0 {
            Phase::Waiting(waiting) => ready!(waiting.poll(cx)),
            Phase::Failed(_) => match mem::replace(&mut self.0, Phase::Done) {
                Phase::Failed(error) => return Poll::Ready(Err(error)),
                _ => return Poll::Pending,
            },
            Phase::Expired(_) | Phase::Done => return Poll::Pending,
        };
        let Phase::Waiting(waiting) = mem::replace(&mut self.0, Phase::Done) else { return Poll::Pending };
        let inner = &waiting.handle.0;
        match waited {
            Some(mut outcome) => {
                inner.leave(&waiting.exchange, None);
                Lesson::learn(inner, &waiting.exchange.request, &mut outcome);
                Poll::Ready(outcome)
            }
            None => {
                inner.expired(&waiting.exchange);
                let mut error = waiting.exchange.named(CallError::deadline(Delivery::Ambiguous));
                inner.judge_effect(&waiting.exchange.request, &mut error);
                self.0 = Phase::Expired(waiting);
                Poll::Ready(Err(error))
            }
        }
    }
}

impl Drop for ResponseFuture {
    fn drop(&mut self) {
        match mem::replace(&mut self.0, Phase::Done) {
            Phase::Waiting(waiting) | Phase::Expired(waiting) => waiting.give_up(),
            Phase::Failed(_) | Phase::Done => {}
        }
    }
}

impl fmt::Debug for ResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}

/// The id as a number, as the SDK reads it: also where it was made a text.
fn number_of(id: &RequestId) -> Option<i64> {
    match id {
        RequestId::Number(id) => Some(*id),
        RequestId::String(id) => id.parse().ok(),
    }
}

/// The token under which the server reports the progress of a request.
pub(super) fn token_of(request: &ClientRequest) -> Option<ProgressToken> {
    request.get_meta().get_progress_token()
}
