//! Servers of the Model Context Protocol.
//!
//! [`stdio`](stdio()) is the connector for a server that runs as a child process: everything that
//! [`crate::stdio`] says of child processes, and on top of it
//!
//! - the `initialize` handshake on each new connection, for the protocol's versions up to 2025-11-25,
//! - `ping` as the question that decides whether a silent server is still there, and after each reconnect
//!   whether the new one is, and the answer to the server's own `ping`,
//! - what each call may do ([`ToolRules`]): the methods by the protocol's definition ([`METHODS`]), the tools by
//!   the caller's word. A `tools/call` is a write unless the caller says otherwise.
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

mod methods;
mod rules;
mod session;

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::process::Command;
use tower::Service;

use self::session::{Pings, Session};
pub use self::{
    methods::{METHODS, Method, ProtocolVersion, effect},
    rules::ToolRules,
    session::HandshakeError,
};
use crate::{
    BoxError,
    connection::{BoxFuture, Classifier},
    event::Implementation,
    jsonrpc::{self, Handler, Request},
    stdio::{self, Child},
};

/// The stack around an MCP server that is a child process. Not the connection to it, which is a
/// [`jsonrpc::Client`].
pub type Client = crate::Stack<Stdio, Request, jsonrpc::Response>;

/// How long the answer to a `ping` may take.
const PING: Duration = Duration::from_secs(5);

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
/// let client = connector.call(()).await?;
/// let tools = client.request(Request::new("tools/list", ())?).await?;
/// # Ok(())
/// # }
/// ```
pub fn stdio(command: Command) -> Stdio {
    let mut child = stdio::child(command).handler(Pings(()));
    if let Ok(ping) = Request::new("ping", ()) {
        child = child.probe(ping, PING);
    }
    Stdio { child, session: Session::default(), tools: ToolRules::new() }
}

/// The connector for MCP servers that are child processes. [`stdio`](stdio()) makes one.
///
/// As a `Service<()>` it is always ready, and each call starts a child, connects to it and shakes hands. To
/// drop such a call's future ends the child. Its error is a [`SpawnError`](stdio::SpawnError) or a
/// [`HandshakeError`].
pub struct Stdio {
    child: Child,
    session: Session,
    tools: ToolRules,
}

impl Stdio {
    /// Who the client is, for the server. By default this crate's name and version.
    #[must_use]
    pub fn client_info(mut self, name: impl Into<String>, version: impl Into<String>) -> Self {
        self.session.client = Implementation::new(name, version);
        self
    }

    /// What the client can do, for the server: the object `capabilities` of `initialize`. By default empty.
    ///
    /// Whoever says `sampling`, `roots` or `elicitation` here has a [`handler`](Stdio::handler) for it.
    #[must_use]
    pub fn capabilities(mut self, capabilities: serde_json::Value) -> Self {
        self.session.capabilities = capabilities;
        self
    }

    /// Which version to offer: by default 2025-11-25. The server may answer with any other that this crate
    /// knows and that has a handshake.
    ///
    /// Each connect fails if the version has no handshake ([`ProtocolVersion::has_handshake`]).
    #[must_use]
    pub fn protocol_version(mut self, version: ProtocolVersion) -> Self {
        self.session.offer = version;
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
        self.tools = rules;
        self
    }

    /// Who answers the server's requests and gets its notifications, on every connection. The server's `ping`
    /// is answered without it; every other request is, without one, answered with "method not found".
    #[must_use]
    pub fn handler(self, handler: impl Handler) -> Self {
        self.child(|child| child.handler(Pings(handler)))
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

    fn child(mut self, change: impl FnOnce(Child) -> Child) -> Self {
        self.child = change(self.child);
        self
    }

    /// Whether the program is there, as far as that can be seen without starting it, and the version that is
    /// offered has a handshake.
    pub(crate) fn validate(&self) -> Result<(), BoxError> {
        self.session.validate()?;
        self.child.validate()
    }

    /// What each call may do.
    pub(crate) fn classifier(&self) -> Classifier<Request> {
        let tools = self.tools.clone();
        Arc::new(move |request| tools.classify(request))
    }
}

impl Service<()> for Stdio {
    type Response = jsonrpc::Client;
    type Error = BoxError;
    type Future = BoxFuture<Result<jsonrpc::Client, BoxError>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Service::<()>::poll_ready(&mut self.child, cx)
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let session = self.session.clone();
        self.child.connect(Some(Arc::new(move |client| {
            let session = session.clone();
            Box::pin(async move { Ok(session.begin(&client).await?) })
        })))
    }
}

impl fmt::Debug for Stdio {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stdio")
            .field("child", &self.child)
            .field("client", &self.session.client)
            .field("tools", &self.tools)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn is_send_and_sync<T: Send + Sync + 'static>(_: &T) {}

    #[test]
    fn what_can_be_seen_to_be_wrong_is_seen_before_the_start() {
        let server = || stdio(Command::new(std::env::current_exe().unwrap()));
        is_send_and_sync(&server());
        server().validate().unwrap();
        let wrong = server().protocol_version(ProtocolVersion::V2026_07_28).validate().unwrap_err();
        assert!(wrong.to_string().contains("2026-07-28"), "{wrong}");
        if cfg!(unix) {
            let missing = stdio(Command::new("goaround-no-such-program")).validate().unwrap_err();
            assert!(missing.to_string().contains("goaround-no-such-program"), "{missing}");
        }
    }

    #[test]
    fn the_classifier_is_that_of_the_rules() {
        let classifier = stdio(Command::new("x")).tools(ToolRules::new().read_only(["get"])).classifier();
        let call = |tool| Request::new("tools/call", serde_json::json!({ "name": tool })).unwrap();
        assert_eq!(classifier(&call("get")), Some((crate::Effect::ReadOnly, crate::Basis::Caller)));
        assert_eq!(classifier(&call("pay")), None);
    }
}
