//! Servers of the Model Context Protocol.
//!
//! [`stdio`](stdio()) is the connector for a server that runs as a child process: everything that
//! [`crate::stdio`] says of child processes, and on top of it
//!
//! - the beginning of each connection in all versions of the protocol: `server/discover` first and, for servers
//!   up to 2025-11-25, the `initialize` handshake ([`Era`]),
//! - the state of a session, restored after a reconnect before any call runs: log level, subscriptions, streams of
//!   notifications ([`Connection`]),
//! - `ping` or `server/discover` as the question that decides whether a silent server is still there, and the
//!   answer to the server's own `ping`,
//! - the server's own requests and notifications, for one [handler](Stdio::handler) over all connections; what is
//!   lost with a connection is counted ([`Stats`]),
//! - progress: a call with an [idle limit](crate::Call::idle) asks the server for it by a token, and is extended by
//!   it ([`Connection`]),
//! - what each call may do ([`ToolRules`]): the methods by the protocol's definition ([`METHODS`]), the tools by
//!   the caller's word, or by the server's where the caller trusts it. A `tools/call`, short
//!   [`Request::tool`], is a write unless somebody says otherwise. Errors, events and ledger do not name the tool,
//!   since a model or a peer makes up such names: [`CallError::call`](crate::CallError::call) and
//!   [`CallContext::assign_id`](crate::CallContext::assign_id) tell calls apart.
//!
//! A tool's call that goes on as a task is waited for by [`tasks`], and [`checks`] has ready-made effect checks.
//!
//! # A server that does not start
//!
//! [`build`](crate::StackBuilder::build) finds a program that is not there. One that ends in its handshake
//! fails the calls that waited for it as not done; what it wrote to its standard error may hold secrets, so it
//! is not in their text but in the [`HandshakeError`]:
//!
//! ```no_run
//! use goaround::{Stack, jsonrpc::Request, mcp::{self, HandshakeError}};
//!
//! # async fn run() -> Result<(), goaround::BoxError> {
//! let server = Stack::builder(mcp::stdio(tokio::process::Command::new("invoice-server"))).build()?;
//! if let Err(error) = server.send(Request::new("tools/list", ())?).await {
//!     eprintln!("{error}");
//!     if let Some(HandshakeError::Closed { stderr, .. }) = error.get_ref() {
//!         eprintln!("its last words: {stderr:?}");
//!     }
//! }
//! # Ok(())
//! # }
//! ```
//!
//! One that starts and does not answer ends the wait at the call's deadline or the connect timeout. The error says
//! then what the server had been asked, and how many lines it has written to its standard output that are no JSON-RPC:
//! a log, a banner or a shell's complaint there is the usual reason. They are ignored, for good or ill, and counted in
//! [`Stats::ignored`]; the first one on each connection is a warning in the log, without its text.

mod catalog;
pub mod checks;
mod connection;
mod envelope;
mod handshake;
mod methods;
mod rules;
mod session;
mod settings;
mod stats;
pub mod tasks;
#[cfg(test)]
mod tests;
mod watch;

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::process::Command;
use tower::Service;

#[cfg(feature = "rmcp")]
pub(crate) use self::{
    catalog::{Catalog, Listed},
    methods::LISTS,
    rules::Params,
    session::Cursors,
};
pub use self::{
    connection::{Connection, ResponseFuture},
    handshake::HandshakeError,
    methods::{METHODS, Method, ProtocolVersion, effect},
    rules::ToolRules,
    settings::Era,
    stats::Stats,
};
use self::{session::Memory, settings::Settings};
use crate::{
    BoxError,
    connection::{BoxFuture, Classifier, UnderWay},
    event::Implementation,
    jsonrpc::{self, Handler, Request},
    stdio::{self, Child},
};

/// The stack around an MCP server that is a child process. Not the connection to it, which is a
/// [`jsonrpc::Client`].
pub type Client = crate::Stack<Stdio, Request, jsonrpc::Response>;

/// A connector that starts `command`, an MCP server, for each connection. See [`stdio::child`].
///
/// ```no_run
/// # async fn connect() -> Result<(), goaround::BoxError> {
/// use goaround::{jsonrpc::Request, mcp};
/// use tower::Service;
///
/// let mut connector = mcp::stdio(tokio::process::Command::new("invoice-server"))
///     .client_info("my-agent", "1.0.0")
///     .tools(mcp::ToolRules::new().read_only(["get_invoice"]));
/// let connection = connector.call(()).await?;
/// let tools = connection.request(Request::new("tools/list", ())?).await?;
/// # Ok(())
/// # }
/// ```
pub fn stdio(command: Command) -> Stdio {
    Stdio { child: stdio::child(command), pipes: None, settings: Settings::default(), memory: Arc::default() }
}

/// The same over pipes that somebody else makes, and no child: for the simulator, whose servers are no processes.
#[doc(hidden)]
pub fn over<F, C>(connect: F) -> Stdio
where
    F: Fn(jsonrpc::Builder) -> C + Send + Sync + 'static,
    C: Future<Output = Result<jsonrpc::Client, BoxError>> + Send + 'static,
{
    Stdio { pipes: Some(Arc::new(connection::Pipes(connect))), ..stdio(Command::new("")) }
}

/// The connector for MCP servers that are child processes. [`stdio`](stdio()) makes one.
///
/// As a `Service<()>` it is always ready, and each call starts a child, connects to it, agrees with it on a
/// version and restores the session. To drop such a call's future ends the child. Its error is a
/// [`SpawnError`](stdio::SpawnError) or a [`HandshakeError`].
///
/// It has no time limit of its own for a server that never answers; the connect timeout of the
/// [`ReconnectLayer`](crate::ReconnectLayer) covers it.
///
/// One connector is for one server, and remembers what it has learnt of it: the era, the state of the session,
/// the list of tools.
pub struct Stdio {
    child: Child,
    /// What is connected to in the child's place.
    pipes: Option<Arc<dyn connection::Open>>,
    settings: Settings,
    memory: Arc<Memory>,
}

impl Stdio {
    /// Who the client is, for the server. By default this crate's name and version.
    #[must_use]
    pub fn client_info(mut self, name: impl Into<String>, version: impl Into<String>) -> Self {
        self.settings.client = Implementation::new(name, version);
        self
    }

    /// What the client can do, for the server: the object `capabilities` of `initialize`, and the
    /// `clientCapabilities` of each request on 2026-07-28. By default empty.
    ///
    /// Whoever says `sampling`, `roots` or `elicitation` here has a [`handler`](Stdio::handler) for it, and
    /// whoever says `{ "extensions": { tasks::EXTENSION: {} } }` calls tools by [`tasks::run`], since any call may
    /// then become a task.
    #[must_use]
    pub fn capabilities(mut self, capabilities: serde_json::Value) -> Self {
        self.settings.capabilities = capabilities;
        self
    }

    /// Which era of the protocol the server is of; by default it is found out ([`Era::Auto`]).
    #[must_use]
    pub fn era(mut self, era: Era) -> Self {
        self.settings.era = era;
        self
    }

    /// How long a server may leave `server/discover` unanswered before it is sent `initialize` too; by default
    /// 3 seconds. What it says to the later one counts, so that a server which is only slow to start is
    /// understood all the same.
    #[must_use]
    pub fn probe_timeout(mut self, timeout: Duration) -> Self {
        self.settings.probe = timeout;
        self
    }

    /// Which version to offer in `initialize`: by default 2025-11-25. The server may answer with any other that
    /// this crate knows and that has a handshake.
    ///
    /// Each connect fails if the version has no handshake ([`ProtocolVersion::has_handshake`]); for those see
    /// [`Era::Discover`].
    #[must_use]
    pub fn protocol_version(mut self, version: ProtocolVersion) -> Self {
        self.settings.offer = version;
        self
    }

    /// What the caller knows of the server's tools. Without it all of them are writes.
    ///
    /// A [`Stack`](crate::Stack) around this connector takes the rules from it, as it stands: not from within
    /// another service around it. Layers put together by hand know nothing of connectors, and every call is a
    /// write to them, `tools/list` too, unless they are told:
    ///
    /// ```
    /// use goaround::{WriteSafetyLayer, jsonrpc::{Request, Response}, mcp::ToolRules};
    ///
    /// let rules = ToolRules::new().read_only(["get_invoice"]);
    /// let layer = WriteSafetyLayer::<Request, Response>::refuse()
    ///     .classify(move |request| rules.classify(request).map(|(effect, _)| effect));
    /// ```
    #[must_use]
    pub fn tools(mut self, rules: ToolRules) -> Self {
        self.settings.tools = rules;
        self
    }

    /// Who answers the server's requests and gets its notifications, on every connection. The server's `ping`
    /// is answered without it; every other request is, without one, answered with "method not found".
    ///
    /// It is the same one over all connections. An answer whose connection is gone when it is there is dropped
    /// and counted ([`Stats::dropped_answers`]): it belongs to no other. The handler of a request that the server
    /// takes back (`notifications/cancelled`) is dropped where it waits next, and nothing is answered.
    #[must_use]
    pub fn handler(mut self, handler: impl Handler) -> Self {
        self.settings.handler = Arc::new(handler);
        self
    }

    /// What is counted over all connections of this connector.
    pub fn stats(&self) -> Stats {
        self.memory.stats.clone()
    }

    /// See [`Child::exit_ends_effects`].
    #[must_use]
    pub fn exit_ends_effects(self) -> Self {
        self.child(Child::exit_ends_effects)
    }

    /// See [`Child::shutdown_grace`].
    #[must_use]
    pub fn shutdown_grace(self, stdin_close: Duration, term: Duration) -> Self {
        self.child(|child| child.shutdown_grace(stdin_close, term))
    }

    /// See [`Child::stderr_lines`].
    #[must_use]
    pub fn stderr_lines(self, lines: usize) -> Self {
        self.child(|child| child.stderr_lines(lines))
    }

    /// See [`Child::max_line`].
    #[must_use]
    pub fn max_line(self, bytes: usize) -> Self {
        self.child(|child| child.max_line(bytes))
    }

    /// See [`Child::max_in_flight`].
    #[must_use]
    pub fn max_in_flight(self, calls: usize) -> Self {
        self.child(|child| child.max_in_flight(calls))
    }

    /// `false` if it starts no process.
    pub(crate) fn register_with(&mut self, registrar: crate::write_safety::ledger::Registrar) -> bool {
        self.child.register_with(registrar);
        self.pipes.is_none()
    }

    fn child(mut self, change: impl FnOnce(Child) -> Child) -> Self {
        self.child = change(self.child);
        self
    }

    /// Whether the program is there, as far as that can be seen without starting it, and the version that is
    /// offered has a handshake.
    pub(crate) fn validate(&self) -> Result<(), BoxError> {
        self.settings.validate()?;
        if self.pipes.is_some() { Ok(()) } else { self.child.validate() }
    }

    pub(crate) fn under_way(&self) -> UnderWay {
        self.memory.under_way.clone()
    }

    pub(crate) fn reaper(&self) -> crate::connection::Reaper {
        self.child.reaper()
    }

    pub(crate) fn rules(&self) -> &ToolRules {
        &self.settings.tools
    }

    /// What each call may do.
    pub(crate) fn classifier(&self) -> Classifier<Request> {
        let tools = self.settings.tools.clone();
        let memory = self.memory.clone();
        Arc::new(move |request| tools.classify_by(request, |tool| memory.catalog().get(tool)))
    }
}

impl Service<()> for Stdio {
    type Response = Connection;
    type Error = BoxError;
    type Future = BoxFuture<Result<Connection, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Service::<()>::poll_ready(&mut self.child, cx)
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let (settings, memory) = (Arc::new(self.settings.clone()), self.memory.clone());
        match &self.pipes {
            None => Box::pin(connection::connect(self.child.share(), settings, memory)),
            Some(pipes) => Box::pin(connection::connect(Arc::clone(pipes), settings, memory)),
        }
    }
}

impl fmt::Debug for Stdio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stdio")
            .field("child", &self.child)
            .field("client", &self.settings.client)
            .field("era", &self.settings.era)
            .field("tools", &self.settings.tools)
            .finish_non_exhaustive()
    }
}
