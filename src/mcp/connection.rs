//! A connection to an MCP server: the JSON-RPC client, and the session that it carries.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, atomic::AtomicU64},
    task::{Context, Poll, ready},
};

use serde::{Deserialize, Serialize};
use serde_json::{json, value::RawValue};

use super::{
    ProtocolVersion,
    handshake::{self, Plan},
    methods::LISTS,
    rules::tool_of,
    session::{Inbox, LISTEN, Memory, Session, Wires},
    settings::Settings,
    watch::{Watch, taken_back},
};
use crate::{
    Basis, BoxError, Call, CallError, Closure, Refusal,
    call::{Word, effect_of},
    connection::{self, BoxFuture},
    event::Peer,
    jsonrpc::{self, Builder, Client, Request, Response},
    stdio::{Child, Opened},
};

/// A connection to an MCP server, on which client and server have agreed on a version.
///
/// It is a [`jsonrpc::Client`], and everything that is said there of calls, their futures and the connection's
/// end holds here too. On top of that
///
/// - on 2026-07-28 each request gets what the protocol wants in its `_meta`: version, client and log level.
///   Members that the caller put there stay. A `logging/setLevel`, which that version has no more, is answered
///   here and goes with every later request.
/// - what belongs to the session is noted when it succeeds, for the next one: the log level,
///   `resources/subscribe` and `unsubscribe`, and streams of notifications (`subscriptions/listen`) once they
///   are acknowledged, which must happen within 10 seconds. A stream is answered when it ends; to drop its
///   future ends it. After a closure it is asked for again, with a new id, and whoever asks for the same within
///   30 seconds takes it over, as the replay of [`RetryReadOnly`](crate::RetryReadOnly) does. That gives up at
///   the second closure, as with every read: to listen for ever, ask again in a loop. An
///   [attempt timeout](crate::RetryReadOnlyLayer::attempt_timeout) ends streams too.
/// - a call with an [idle limit](Call::idle) gets a `progressToken` of its own, unless the caller gave it one, and
///   `notifications/progress` with exactly that token extend the limit. The handler gets them too.
/// - while the handler answers an `elicitation/create`, the calls on this connection that asked for it
///   ([`Call::pause_while_asking`]) stand still: nobody can say for which of them the server asks. A question that
///   the server takes back (`notifications/cancelled`) holds up nothing. On 2026-07-28 a
///   server asks by its answer, which ends the call.
/// - a page of a list by a cursor that another session handed out is refused
///   ([`Refusal::CursorOfAnotherSession`]), since cursors must not be kept across sessions. The first session
///   of a connector lets all cursors pass, every later one those that it has handed out itself.
/// - a call that was taken for harmless by a trusted annotation is refused if the server's annotation on this
///   connection does not say so ([`Refusal::EffectChanged`]), be it that it says so no more when the call's turn
///   to be written comes. One that was written by then and gets no answer may have been a write.
pub struct Connection {
    client: Client,
    session: Arc<Session>,
}

/// Starts what a connection goes over.
pub(super) trait Open: Send + Sync + 'static {
    fn open(&self, with: Box<dyn FnOnce(Builder) -> Builder + Send>) -> BoxFuture<Result<Opened, BoxError>>;
}

impl Open for Child {
    fn open(&self, with: Box<dyn FnOnce(Builder) -> Builder + Send>) -> BoxFuture<Result<Opened, BoxError>> {
        Child::open(self, with)
    }
}

/// What connects clients over pipes of its own.
pub(super) struct Pipes<F>(pub(super) F);

impl<F, C> Open for Pipes<F>
where
    F: Fn(Builder) -> C + Send + Sync + 'static,
    C: Future<Output = Result<Client, BoxError>> + Send + 'static,
{
    fn open(&self, with: Box<dyn FnOnce(Builder) -> Builder + Send>) -> BoxFuture<Result<Opened, BoxError>> {
        let connecting = (self.0)(with(Client::builder()));
        Box::pin(async { connecting.await.map(Opened::new) })
    }
}

impl Open for Arc<dyn Open> {
    fn open(&self, with: Box<dyn FnOnce(Builder) -> Builder + Send>) -> BoxFuture<Result<Opened, BoxError>> {
        (**self).open(with)
    }
}

/// Connects, agrees on a version, and restores the session.
pub(super) async fn connect(
    transport: impl Open,
    settings: Arc<Settings>,
    memory: Arc<Memory>,
) -> Result<Connection, BoxError> {
    let mut plan = Plan::of(settings.era, memory.version());
    let mut may_start_again = true;
    loop {
        let wires = Arc::new(Wires::default());
        let (inbox, words) = (Inbox { settings: settings.clone(), wires: wires.clone() }, wires.clone());
        let (dropped, ignored) = (memory.stats.count_of_dropped_answers(), memory.stats.count_of_ignored());
        let unread = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&unread);
        let with = Box::new(|builder: Builder| {
            let builder = builder.handler(inbox).taken_back_by(taken_back);
            let builder = builder.upheld_by(words);
            builder.count_dropped_answers(dropped).count_ignored(ignored).count_unread(counted)
        });
        let opened = transport.open(with).await?;
        let until_done = memory.under_way.begin(true, unread);
        let failure = match handshake::begin(opened.client(), &settings, plan, &memory.under_way).await {
            Ok(agreed) => {
                drop(until_done);
                let session = Session::begin(agreed, opened.client(), settings, memory, wires).await?;
                return Ok(Connection { client: opened.keep(), session });
            }
            Err(failure) => failure,
        };
        match failure.instead.filter(|_| std::mem::take(&mut may_start_again)) {
            // What was asked first has cost this process; the next one is asked something else.
            Some(instead) => plan = instead,
            None => {
                if failure.error.is_answer() {
                    memory.forget_version();
                }
                return Err(failure.error.into());
            }
        }
    }
}

impl Connection {
    /// Calls a method. The request is queued now, in the order of these calls; the future waits for the
    /// answer.
    pub fn request(&self, mut request: Request) -> ResponseFuture {
        let session = &self.session;
        let is_trusted = request.context().basis() == Basis::TrustedAnnotation;
        if is_trusted && !session.upholds(&request) && !off!(Annotation) {
            return ResponseFuture::refused(Refusal::EffectChanged, &request);
        }
        let lesson = match Kind::of(request.method()) {
            Kind::Plain if is_trusted => {
                let word = session.wires.tools.word(tool_of(&request), effect_of(&request));
                if let Some(activity) = request.context().activity() {
                    activity.taken_by(Arc::clone(&word));
                }
                Some(Lesson::Trust(word))
            }
            Kind::Plain => None,
            Kind::List if !session.takes_cursor(&request) => {
                return ResponseFuture::refused(Refusal::CursorOfAnotherSession, &request);
            }
            Kind::List if session.is_modern() => None,
            Kind::List => Some(Lesson::Page),
            Kind::Level => match request.params() {
                Ok(Level { level }) if session.set_level(&level) => return ResponseFuture::done(json!({})),
                Ok(Level { level }) => Some(Lesson::Level(level)),
                Err(_) => None,
            },
            Kind::Subscribe => request.params().ok().map(|Resource { uri }| Lesson::Subscribe(uri)),
            Kind::Unsubscribe => request.params().ok().map(|Resource { uri }| Lesson::Unsubscribe(uri)),
            Kind::Listen if session.is_modern() => {
                let listening = session.listen(&self.client, request);
                return ResponseFuture(Phase::Stream(Box::pin(listening.run())));
            }
            Kind::Listen => None,
        };
        let lesson = lesson.map(|lesson| Box::new((Arc::clone(session), lesson)));
        let watched = request.context().progress().is_some();
        if !session.is_modern() && lesson.is_none() && !watched {
            return ResponseFuture(Phase::Plain(self.client.request(request)));
        }
        let original = (session.is_modern() || watched).then(|| request.shared_params());
        // Before it is sent, so that no progress is missed.
        let watch = watched.then(|| session.wires.calls.watch(&mut request)).flatten().map(Box::new);
        let (request, _) = session.dress(request);
        let call = self.client.request(request);
        ResponseFuture(Phase::Followed { call, original, lesson, watch })
    }

    /// Sends a notification. See [`Client::notify`].
    ///
    /// # Errors
    ///
    /// As there.
    pub async fn notify(
        &self,
        method: impl Into<std::borrow::Cow<'static, str>>,
        params: impl Serialize,
    ) -> Result<(), CallError> {
        self.client.notify(method, params).await
    }

    /// The version that client and server have agreed on.
    pub fn version(&self) -> ProtocolVersion {
        self.session.version
    }

    /// Waits until the connection has closed, and says how. The future does not keep it open.
    pub fn closed(&self) -> impl Future<Output = Closure> + Send + 'static + use<> {
        self.client.closed()
    }

    /// How the connection closed, if it has.
    pub fn closure(&self) -> Option<Closure> {
        self.client.closure()
    }

    /// Closes the connection: calls in flight end at once.
    pub fn close(&self) {
        self.client.close();
    }

    /// How many messages of the server could not be used. See [`Client::ignored`].
    pub fn ignored(&self) -> u64 {
        self.client.ignored()
    }
}

impl Clone for Connection {
    fn clone(&self) -> Self {
        Self { client: self.client.clone(), session: Arc::clone(&self.session) }
    }
}

impl fmt::Debug for Connection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Connection")
            .field("version", &self.version())
            .field("client", &self.client)
            .finish_non_exhaustive()
    }
}

impl tower::Service<Request> for Connection {
    type Response = Response;
    type Error = CallError;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.client.poll_ready(cx)
    }

    fn call(&mut self, request: Request) -> ResponseFuture {
        self.request(request)
    }
}

impl connection::Connection for Connection {
    fn peer(&self) -> Option<Peer> {
        self.client.peer()
    }

    fn has_process(&self) -> bool {
        self.client.has_process()
    }

    fn overlapped(&self) -> bool {
        self.client.overlapped()
    }

    fn stderr(&self) -> Vec<String> {
        self.client.stderr()
    }

    fn probe(&self) -> Option<(String, BoxFuture<Result<(), CallError>>)> {
        self.client.probe()
    }

    fn close(&self) -> BoxFuture<()> {
        connection::Connection::close(&self.client)
    }
}

/// What a method means to the session.
enum Kind {
    Plain,
    List,
    Level,
    Subscribe,
    Unsubscribe,
    Listen,
}

impl Kind {
    fn of(method: &str) -> Self {
        match method {
            list if LISTS.contains(&list) => Kind::List,
            "logging/setLevel" => Kind::Level,
            "resources/subscribe" => Kind::Subscribe,
            "resources/unsubscribe" => Kind::Unsubscribe,
            LISTEN => Kind::Listen,
            _ => Kind::Plain,
        }
    }
}

#[derive(Deserialize)]
struct Level {
    level: String,
}

#[derive(Deserialize)]
struct Resource {
    uri: String,
}

/// What the session learns from how a call ends.
enum Lesson {
    Page,
    Level(String),
    Subscribe(String),
    Unsubscribe(String),
    /// By a trusted annotation the call was taken for what it is.
    Trust(Arc<dyn Word>),
}

impl Lesson {
    fn learn(self, session: &Session, outcome: &mut Result<Response, CallError>) {
        match (self, outcome) {
            (Lesson::Page, Ok(page)) => session.handed_out(page),
            (Lesson::Level(level), Ok(_)) => session.memory.level_set(&level),
            (Lesson::Subscribe(uri), Ok(_)) => session.memory.subscribed(&uri),
            (Lesson::Unsubscribe(uri), Ok(_)) => session.memory.unsubscribed(&uri),
            // The session is gone, and with it the subscription: nobody wants it back.
            (Lesson::Unsubscribe(uri), Err(error)) if error.closure().is_some() => {
                session.memory.unsubscribed(&uri);
            }
            // Nobody knows whether the server did it before or after it said that the tool had changed.
            (Lesson::Trust(word), Err(error)) if error.is_ambiguous_as_a_write() && !word.holds() => {
                error.misjudge();
            }
            (_, _) => {}
        }
    }
}

/// The future of a call. It has no timer: see [`Client`].
#[must_use = "a call whose future is dropped is cancelled"]
pub struct ResponseFuture(Phase);

enum Phase {
    Plain(jsonrpc::ResponseFuture),
    Followed {
        call: jsonrpc::ResponseFuture,
        /// The caller's own parameters, if others are sent.
        original: Option<Option<Arc<RawValue>>>,
        lesson: Option<Box<(Arc<Session>, Lesson)>>,
        /// Of a call whose deadline moves.
        watch: Option<Box<Watch>>,
    },
    Stream(BoxFuture<Result<Response, CallError>>),
    Known(Option<Result<Response, CallError>>),
}

impl ResponseFuture {
    fn refused(refusal: Refusal, request: &Request) -> Self {
        let error = CallError::refused(refusal).of_request(request, effect_of(request));
        Self(Phase::Known(Some(Err(error))))
    }

    fn done(result: serde_json::Value) -> Self {
        Self(Phase::Known(Some(Response::new(result).map_err(CallError::not_sent))))
    }
}

impl Future for ResponseFuture {
    type Output = Result<Response, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            Phase::Plain(call) => Pin::new(call).poll(cx),
            Phase::Followed { call, original, lesson, watch } => {
                let mut outcome = ready!(Pin::new(call).poll(cx));
                *watch = None;
                if let Some(lesson) = lesson.take() {
                    let (session, lesson) = *lesson;
                    lesson.learn(&session, &mut outcome);
                }
                if let Some(original) = original.take() {
                    outcome = outcome.map_err(|error| undress(error, original.as_ref()));
                }
                Poll::Ready(outcome)
            }
            Phase::Stream(stream) => stream.as_mut().poll(cx),
            Phase::Known(outcome) => outcome.take().map_or(Poll::Pending, Poll::Ready),
        }
    }
}

/// A request that is handed back is the caller's own: the next connection may be of the other era.
pub(super) fn undress(mut error: CallError, original: Option<&Arc<RawValue>>) -> CallError {
    match error.take_request::<Request>() {
        Some(mut request) => {
            request.replace_params(original.cloned());
            error.with_request(request)
        }
        None => error,
    }
}

impl fmt::Debug for ResponseFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ResponseFuture").finish_non_exhaustive()
    }
}
