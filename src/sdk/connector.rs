//! What makes connections of the SDK's client, anew after each closure.

use std::{
    fmt, io,
    panic::AssertUnwindSafe,
    process::ExitStatus,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use futures_util::FutureExt;
use rmcp::{
    ClientHandler, RoleClient, ServiceError,
    model::{ClientResult, ErrorData, ServerNotification, ServerRequest},
    service::{
        ClientInitializeError, ClientLifecycleMode, NotificationContext, RequestContext, RunningService,
        serve_client_with_lifecycle,
    },
    transport::IntoTransport,
};
use tokio::{process::Command, time::sleep};
use tower::Service;

use super::{
    Http, HttpError, Request, Unauthorized,
    connection::{Connection, Inner, Kind, Running},
    evidence::http_error,
    http,
    questions::Place,
    session::{Memory, restore},
    transport::{AnyTransport, Foreign, Pipe, Witness},
};
use crate::{
    BoxError, CallError,
    connection::{BoxFuture, Classifier, Reaper, UnderWay},
    event::{Implementation, Peer},
    mcp::ToolRules,
    stdio::Child,
    write_safety::ledger::Registrar,
};

/// How long the SDK's client may take to end, with the session's end at the server.
const CLOSE: Duration = Duration::from_secs(6);
/// How long the user's handler may go on with what the server has taken back.
const TAKEN_BACK: Duration = Duration::from_secs(5);

/// Makes connections to one MCP server by the SDK's client: over the pipes of a child process, over Streamable HTTP,
/// or over a transport of the user's. All three are this one type.
///
/// As a `Service<()>` it is always ready, and each call opens the transport, has the SDK shake hands in its
/// [lifecycle mode](Connector::lifecycle), and restores the session: log level, subscriptions, the list of tools
/// where its annotations are trusted. The user's handler is kept, and serves the server's requests over all of its
/// connections. A connect that is given up leaves nothing behind. Its error is an [`InitializeError`], a
/// [`SpawnError`](crate::stdio::SpawnError), or what the user's function gave.
///
/// It has no time limit of its own; the connect timeout of the [`ReconnectLayer`](crate::ReconnectLayer) covers it.
pub struct Connector {
    handler: Arc<dyn Serve>,
    source: Source,
    mode: ClientLifecycleMode,
    probe_timeout: Duration,
    memory: Arc<Memory>,
    under_way: UnderWay,
    wrong: Option<&'static str>,
}

enum Source {
    Child(Child),
    Http(Box<Http>),
    Foreign(Open),
}

type Open = Arc<Mutex<dyn FnMut() -> io::Result<Box<dyn AnyTransport>> + Send>>;

impl Connector {
    fn of(handler: impl ClientHandler, source: Source) -> Self {
        Self {
            handler: Arc::new(Handled(Arc::new(handler))),
            source,
            mode: ClientLifecycleMode::Initialize,
            probe_timeout: Duration::from_secs(5),
            memory: Arc::new(Memory::new(ToolRules::new())),
            under_way: UnderWay::default(),
            wrong: None,
        }
    }

    /// A server that runs as a child process. All that [`crate::stdio`] says of children holds: a process group of
    /// its own that ends with it, one child at a time, its last words in the report of its end.
    pub fn stdio<H: ClientHandler>(handler: H, command: Command) -> Self {
        Self::of(handler, Source::Child(crate::stdio::child(command)))
    }

    /// A server behind Streamable HTTP: its address, or an [`Http`] with more to say.
    ///
    /// The SDK's own replay of requests after a lost session is off, whatever the configuration says, since it sends
    /// writes a second time; so is its own resumption of response streams, which has no end. What follows from a
    /// lost session is the stack's to say, and a stream is resumed as part of its attempt ([`Http::resumptions`]).
    pub fn http<H: ClientHandler>(handler: H, config: impl Into<Http>) -> Self {
        Self::of(handler, Source::Http(Box::new(config.into())))
    }

    /// A server behind any transport of the SDK: `open` is called for each connection. What the transport does not
    /// tell of what it has sent is unknown here, too. A transport that replays requests by itself, as the SDK's
    /// for HTTP does by default, makes attempts that nobody counts.
    pub fn new<H, F, T, E, A>(handler: H, mut open: F) -> Self
    where
        H: ClientHandler,
        F: FnMut() -> io::Result<T> + Send + 'static,
        T: IntoTransport<RoleClient, E, A>,
        E: std::error::Error + Send + Sync + 'static,
    {
        let open = move || open().map(|transport| erase(transport.into_transport()));
        Self::of(handler, Source::Foreign(Arc::new(Mutex::new(open))))
    }

    /// How a connection begins. By default [`ClientLifecycleMode::Initialize`], as with the SDK's `serve`. In the
    /// mode `Auto` it is remembered when a server turned out to know only the handshake, as long as that holds.
    #[must_use]
    pub fn lifecycle(mut self, mode: ClientLifecycleMode) -> Self {
        self.mode = mode;
        self
    }

    /// What the caller says of the server's tools. Without it each `tools/call` is a write.
    #[must_use]
    pub fn tools(mut self, tools: ToolRules) -> Self {
        self.memory = Arc::new(Memory::new(tools));
        self
    }

    /// How long a server that was silent for all of a call's time may take to answer the question whether it is
    /// there (`ping`, or `server/discover` from 2026-07-28 on). By default 5 s. If it does not, the connection counts
    /// as closed.
    #[must_use]
    pub fn probe_timeout(mut self, limit: Duration) -> Self {
        self.probe_timeout = limit;
        self
    }

    /// What to do when an HTTP server refuses the credentials (401): the function gets the server's challenge and
    /// gives a new bearer token, which all later requests carry. It runs once for all calls that were refused
    /// together, in a task of its own that outlives their deadlines; those that only read are then repeated, a
    /// write is returned as not done. A token that is refused in turn is an error, as is a function that takes
    /// longer than two minutes, and the next call asks again. The token is never logged.
    ///
    /// ```
    /// use goaround::sdk::{Connector, Unauthorized};
    ///
    /// let _connector = Connector::http((), "https://example.org/mcp")
    ///     .on_unauthorized(|_refused: Unauthorized| async { Ok("a fresh token".to_owned()) });
    /// ```
    #[must_use]
    pub fn on_unauthorized<F, Fut>(mut self, refresh: F) -> Self
    where
        F: Fn(Unauthorized) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<String, BoxError>> + Send + 'static,
    {
        match &mut self.source {
            Source::Http(http) => http.set_refresh(Arc::new(move |refused| Box::pin(refresh(refused)))),
            _ => self.wrong = Some("on_unauthorized is for HTTP servers"),
        }
        self
    }

    /// Declares that the server's process tree makes its effects itself and locally, so that its end is a fence. See
    /// [`Child::exit_ends_effects`]. For children only.
    #[must_use]
    pub fn exit_ends_effects(self) -> Self {
        self.child("exit_ends_effects is for child processes", Child::exit_ends_effects)
    }

    /// How long a child may take to end. See [`Child::shutdown_grace`]. For children only.
    #[must_use]
    pub fn shutdown_grace(self, stdin_close: Duration, term: Duration) -> Self {
        let wrong = "shutdown_grace is for child processes";
        self.child(wrong, |child| child.shutdown_grace(stdin_close, term))
    }

    /// How many of the last lines of a child's standard error are kept. See [`Child::stderr_lines`]. For children
    /// only.
    #[must_use]
    pub fn stderr_lines(self, lines: usize) -> Self {
        self.child("stderr_lines is for child processes", |child| child.stderr_lines(lines))
    }

    fn child(mut self, wrong: &'static str, set: impl FnOnce(Child) -> Child) -> Self {
        match self.source {
            Source::Child(child) => self.source = Source::Child(set(child)),
            _ => self.wrong = Some(wrong),
        }
        self
    }

    pub(crate) fn rules(&self) -> &ToolRules {
        self.memory.rules()
    }

    /// What each call may do.
    pub(crate) fn classifier(&self) -> Classifier<Request> {
        let memory = Arc::clone(&self.memory);
        Arc::new(move |request| memory.classify(request))
    }

    /// `false` where its servers are no children.
    pub(crate) fn register_with(&mut self, registrar: Registrar) -> bool {
        match &mut self.source {
            Source::Child(child) => {
                child.register_with(registrar);
                true
            }
            _ => false,
        }
    }

    /// What is known of the connect that is under way.
    pub(crate) fn under_way(&self) -> UnderWay {
        self.under_way.clone()
    }

    pub(crate) fn reaper(&self) -> Option<Reaper> {
        match &self.source {
            Source::Child(child) => Some(child.reaper()),
            _ => None,
        }
    }

    pub(crate) fn validate(&self) -> Result<(), BoxError> {
        if let Some(wrong) = self.wrong {
            return Err(wrong.into());
        }
        if self.probe_timeout.is_zero() {
            return Err("probe_timeout is zero".into());
        }
        match &self.source {
            Source::Child(child) => child.validate(),
            Source::Http(http) => http.validate(),
            Source::Foreign(_) => Ok(()),
        }
    }
}

/// The session could not be restored: nothing of anybody's call was sent.
fn unrestored(error: ServiceError, inner: &Inner) -> CallError {
    let http = match &error {
        ServiceError::TransportSend(of) => inner.take_beside().or_else(|| http_error(of)),
        _ => None,
    };
    let error = match http {
        Some(http) => CallError::not_sent(http.caused_by(Some(error))),
        None => CallError::not_sent(error),
    };
    error.connection_lost()
}

fn erase(transport: impl rmcp::transport::Transport<RoleClient> + 'static) -> Box<dyn AnyTransport> {
    Box::new(Foreign(transport))
}

impl Service<()> for Connector {
    type Response = Connection;
    type Error = BoxError;
    type Future = BoxFuture<Result<Connection, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let memory = Arc::clone(&self.memory);
        let opening: BoxFuture<Result<Opened, BoxError>> = match &self.source {
            Source::Child(child) => {
                let starting = child.start();
                let (memory, probe_timeout) = (Arc::clone(&memory), self.probe_timeout);
                Box::pin(async move {
                    let (pipes, process) = starting.await?;
                    let number = memory.begin_session();
                    let (inner, exited) =
                        Inner::new(Kind::Pipe, memory, probe_timeout, Some(process), number);
                    let exited = exited.unwrap_or_else(|| Box::pin(std::future::pending()));
                    let pipe = Pipe::new(Arc::clone(&inner), pipes, exited);
                    Ok(Opened { transport: Box::new(pipe), inner, takes: true })
                })
            }
            Source::Http(http) => {
                let (http, memory, probe_timeout) = (http.clone(), Arc::clone(&memory), self.probe_timeout);
                Box::pin(async move {
                    let number = memory.begin_session();
                    let (inner, _) = Inner::new(Kind::Http, memory, probe_timeout, None, number);
                    let transport = http::transport(&http, Arc::clone(&inner))?;
                    Ok(Opened { transport: erase(transport), inner, takes: true })
                })
            }
            Source::Foreign(open) => {
                let (open, memory, probe_timeout) =
                    (Arc::clone(open), Arc::clone(&memory), self.probe_timeout);
                Box::pin(async move {
                    let transport = open.lock().unwrap_or_else(PoisonError::into_inner)()?;
                    let number = memory.begin_session();
                    let (inner, _) = Inner::new(Kind::Foreign, memory, probe_timeout, None, number);
                    Ok(Opened { transport, inner, takes: false })
                })
            }
        };
        let (handler, under_way) = (Arc::clone(&self.handler), self.under_way());
        let auto = matches!(self.mode, ClientLifecycleMode::Auto { .. });
        // A probe that the server did not understand last time need not be sent again, nor waited for.
        let mode = match (&self.mode, memory.is_legacy()) {
            (ClientLifecycleMode::Auto { legacy_version: None, .. }, true) => ClientLifecycleMode::Initialize,
            (mode, _) => mode.clone(),
        };
        Box::pin(async move {
            let Opened { transport, inner, takes } = opening.await?;
            let until_done = under_way.begin(inner.kind == Kind::Pipe, inner.unread());
            if matches!(mode, ClientLifecycleMode::Initialize) {
                under_way.asks("initialize");
            }
            let end = EndOnDrop(Some(Arc::clone(&inner)));
            let witness = Witness::new(transport, Arc::clone(&inner), takes);
            let (running, client, peer) = match handler.serve(witness, mode).await {
                Ok(served) => served,
                Err(error) => {
                    memory.set_legacy(false);
                    return Err(InitializeError::of(error, &inner).await.into());
                }
            };
            drop(until_done);
            let info = peer.peer_info();
            let protocol = info.as_ref().map(|info| &info.protocol_version);
            memory.set_legacy(auto && !inner.is_modern());
            let about = Peer {
                server: info
                    .as_ref()
                    .and_then(|info| info.server_info.as_ref())
                    .map(|server| Implementation::new(server.name.clone(), server.version.clone())),
                client: Some(client),
                protocol: protocol.map(|version| version.as_str().to_owned()),
            };
            let connection = Connection::new(Arc::clone(&inner), peer, about, running);
            restore(&inner).await.map_err(|error| unrestored(error, &inner))?;
            end.keep();
            Ok(connection)
        })
    }
}

impl fmt::Debug for Connector {
    // Addresses and commands may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let source = match &self.source {
            Source::Child(_) => "stdio",
            Source::Http(_) => "http",
            Source::Foreign(_) => "new",
        };
        f.debug_struct("Connector").field("source", &source).field("mode", &self.mode).finish_non_exhaustive()
    }
}

/// A transport that was opened, and its place in the register.
struct Opened {
    transport: Box<dyn AnyTransport>,
    inner: Arc<Inner>,
    takes: bool,
}

/// Ends a connection whose connect is given up.
struct EndOnDrop(Option<Arc<Inner>>);

impl EndOnDrop {
    fn keep(mut self) {
        self.0 = None;
    }
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        if let Some(inner) = self.0.take() {
            inner.close("the connect was given up");
        }
    }
}

// ===== impl Handled =====

type Served = (Box<dyn Running>, Implementation, rmcp::Peer<RoleClient>);

/// The user's handler, erased.
trait Serve: Send + Sync {
    fn serve(
        &self,
        witness: Witness,
        mode: ClientLifecycleMode,
    ) -> BoxFuture<Result<Served, ClientInitializeError>>;
}

struct Handled<H>(Arc<H>);

impl<H: ClientHandler> Serve for Handled<H> {
    fn serve(
        &self,
        witness: Witness,
        mode: ClientLifecycleMode,
    ) -> BoxFuture<Result<Served, ClientInitializeError>> {
        let handler = Careful(Arc::clone(&self.0));
        let client = self.0.get_info().client_info;
        Box::pin(async move {
            let running = serve_client_with_lifecycle(handler, witness, mode).await?;
            let peer = running.peer().clone();
            let client = Implementation::new(client.name, client.version);
            Ok((Box::new(Client(running)) as Box<dyn Running>, client, peer))
        })
    }
}

/// The user's handler, whose panic is an answer too: the SDK would leave the server's question without one, and what
/// stands still for the user's sake would stand still for ever.
struct Careful<H>(Arc<H>);

impl<H: ClientHandler> rmcp::Service<RoleClient> for Careful<H> {
    async fn handle_request(
        &self,
        request: ServerRequest,
        mut context: RequestContext<RoleClient>,
    ) -> Result<ClientResult, ErrorData> {
        let asks_user = matches!(request, ServerRequest::ElicitRequest(_));
        let place = context.extensions.remove::<Place>();
        // Ends with this future too.
        let asking = place.map(|place| place.handle(context.id.clone(), asks_user));
        let taken_back = context.ct.clone();
        let handling = AssertUnwindSafe(rmcp::Service::handle_request(&self.0, request, context));
        let failed = |_| Err(ErrorData::internal_error("the request's handler failed", None));
        let answer = tokio::select! {
            biased;
            answer = handling.catch_unwind() => answer.unwrap_or_else(failed),
            // It may put its things in order, and takes no place for ever.
            () = async { taken_back.cancelled().await; sleep(TAKEN_BACK).await } => {
                Err(ErrorData::internal_error("the request was taken back", None))
            }
        };
        if let Some(asking) = asking {
            asking.end();
        }
        answer
    }

    fn handle_notification(
        &self,
        notification: ServerNotification,
        context: NotificationContext<RoleClient>,
    ) -> impl Future<Output = Result<(), ErrorData>> + Send + '_ {
        rmcp::Service::handle_notification(&self.0, notification, context)
    }

    fn get_info(&self) -> <RoleClient as rmcp::service::ServiceRole>::Info {
        ClientHandler::get_info(&self.0)
    }
}

/// The SDK's running client. Dropping it ends it.
struct Client<H: ClientHandler>(RunningService<RoleClient, Careful<H>>);

impl<H: ClientHandler> Running for Client<H> {
    fn close(mut self: Box<Self>) -> BoxFuture<()> {
        Box::pin(async move {
            let _ = self.0.close_with_timeout(CLOSE).await;
        })
    }
}

// ===== impl InitializeError =====

/// Why the SDK's client could not begin a connection. Its text says nothing that the server supplied but a code and a
/// status; the SDK's error is in [`error`](InitializeError::error), and a child's last words are in
/// [`stderr`](InitializeError::stderr).
///
/// Over HTTP its [source](std::error::Error::source) is an [`HttpError`] that says what was wrong, as of calls, where
/// that is known; so [`CallError::get_ref::<HttpError>`](CallError::get_ref) finds it. Else, and as the source of that,
/// it is the SDK's error.
pub struct InitializeError {
    source: Arc<ClientInitializeError>,
    http: Option<HttpError>,
    exit: Option<ExitStatus>,
    stderr: Vec<String>,
}

impl InitializeError {
    async fn of(error: ClientInitializeError, inner: &Inner) -> Self {
        let mut of = &error;
        while let ClientInitializeError::LegacyFallbackFailed { fallback, .. } = of {
            of = fallback;
        }
        let (http, (exit, stderr)) = match of {
            ClientInitializeError::ConnectionClosed(_) => (inner.take_beside(), inner.last_words().await),
            ClientInitializeError::TransportError { error, .. } => {
                (inner.take_beside().or_else(|| http_error(error)), inner.last_words().await)
            }
            _ => (None, (None, inner.stderr())),
        };
        let source = Arc::new(error);
        let http = http.map(|http| http.of_handshake(Arc::clone(&source)));
        Self { source, http, exit, stderr }
    }

    /// The SDK's error.
    pub fn error(&self) -> &ClientInitializeError {
        &self.source
    }

    /// What was wrong with how an HTTP server answered, or with the way to it.
    pub fn http(&self) -> Option<&HttpError> {
        self.http.as_ref()
    }

    /// How a child process ended, if it did in the handshake, as far as that is known.
    pub fn exit(&self) -> Option<ExitStatus> {
        self.exit
    }

    /// The last lines that a child process wrote to its standard error. They may hold anything.
    pub fn stderr(&self) -> &[String] {
        &self.stderr
    }
}

impl fmt::Debug for InitializeError {
    /// Without the SDK's error and the last words, which may hold anything.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "InitializeError({:?})", self.to_string())
    }
}

impl fmt::Display for InitializeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the handshake failed: ")?;
        if let Some(http) = &self.http {
            return http.fmt(f);
        }
        f.write_str(match &*self.source {
            ClientInitializeError::ConnectionClosed(_) => "the server closed the connection",
            ClientInitializeError::JsonRpcError(error) => {
                return write!(
                    f,
                    "the server answered with the error {} (its message is in the `InitializeError`)",
                    error.code.0
                );
            }
            error if error.is_authorization_required() => "the credentials were refused",
            ClientInitializeError::TransportError { .. } => "the transport failed",
            ClientInitializeError::NoCompatibleProtocolVersion { .. } => "no version in common",
            ClientInitializeError::NoPreferredProtocolVersion => "no preferred version",
            ClientInitializeError::ConflictInitResponseId(..)
            | ClientInitializeError::UncorrelatedErrorResponse { .. } => {
                "the server answered with an id that is not the request's"
            }
            ClientInitializeError::LegacyFallbackFailed { .. } => "in neither of its two forms",
            _ => "the server answered something else",
        })?;
        let words = (!self.stderr.is_empty()).then_some("its stderr is in the `InitializeError`");
        match (&self.exit, words) {
            (Some(status), Some(words)) => write!(f, " ({status}; {words})"),
            (Some(status), None) => write!(f, " ({status})"),
            (None, Some(words)) => write!(f, " ({words})"),
            (None, None) => Ok(()),
        }
    }
}

impl std::error::Error for InitializeError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(match &self.http {
            Some(http) => http,
            None => &*self.source,
        })
    }
}
