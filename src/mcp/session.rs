//! The beginning of a session: the `initialize` handshake.

use std::process::ExitStatus;

use serde_json::{Value, json};

use super::ProtocolVersion;
use crate::{
    Call, CallError, Cause, Deadline, ServerError,
    connection::Connection,
    event::{Implementation, Peer},
    jsonrpc::{Client, Handler, Notification, Request, Response, ServerRequest},
};

/// Why an MCP handshake failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The server answered `initialize` with an error.
    #[error("the server refused `initialize`: {0}")]
    Refused(ServerError),
    /// The server wants a version that is unknown here, or that has no handshake.
    #[error("the server wants the protocol version {0:?}, which has no handshake known here")]
    Version(String),
    /// The answer to `initialize` is not what the protocol says.
    #[error("the server's answer to `initialize` is malformed: {0}")]
    Malformed(&'static str),
    /// The connection closed, perhaps since the server's process ended.
    #[error("the connection closed during the handshake{}", status(.exit))]
    Closed {
        /// How the server's process ended, if it did.
        exit: Option<ExitStatus>,
        /// The last lines of its standard error. They are not in this error's text.
        stderr: Vec<String>,
        /// How the connection did. Not this error's source: its text speaks of `initialize` and is not to be
        /// taken for the call's that waited for the connection.
        error: CallError,
    },
    /// The call failed in another way.
    #[error("the handshake failed: {}", crate::error::safe_text(.0).unwrap_or_default())]
    Failed(CallError),
    /// The version to offer ([`Stdio::protocol_version`](super::Stdio::protocol_version)) has no handshake.
    #[error("wrong configuration: the protocol version {0} has no `initialize` handshake")]
    NoHandshake(ProtocolVersion),
}

fn status(exit: &Option<ExitStatus>) -> String {
    exit.as_ref().map(|status| format!(" ({status})")).unwrap_or_default()
}

impl HandshakeError {
    async fn of(error: CallError, client: &Client) -> Self {
        match (error.cause(), error.closure()) {
            (Cause::Answered(answer), _) => HandshakeError::Refused(answer.clone()),
            (_, Some(closure)) => {
                // The process is about to end or has ended, within bounds: that says more than a closed pipe.
                let exit = closure.exited().await.and_then(|exit| exit.status);
                HandshakeError::Closed { exit, stderr: Connection::stderr(client), error }
            }
            _ => HandshakeError::Failed(error),
        }
    }
}

/// What each connection begins with.
#[derive(Clone, Debug)]
pub(super) struct Session {
    pub(super) client: Implementation,
    pub(super) capabilities: Value,
    pub(super) offer: ProtocolVersion,
}

impl Default for Session {
    fn default() -> Self {
        Self {
            client: Implementation::new(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
            capabilities: json!({}),
            offer: ProtocolVersion::V2025_11_25,
        }
    }
}

impl Session {
    pub(super) fn validate(&self) -> Result<(), HandshakeError> {
        if self.offer.has_handshake() { Ok(()) } else { Err(HandshakeError::NoHandshake(self.offer)) }
    }

    /// Shakes hands with the server. Without a time limit: the connect as a whole has one.
    pub(super) async fn begin(&self, client: &Client) -> Result<(), HandshakeError> {
        self.validate()?;
        let params = json!({
            "protocolVersion": self.offer.as_str(),
            "capabilities": self.capabilities,
            "clientInfo": self.client,
        });
        let initialize = Request::new("initialize", params)
            .map_err(|error| HandshakeError::Failed(CallError::not_sent(error)))?
            .deadline(Deadline::Never);
        let answer = match client.request(initialize).await {
            Ok(answer) => answer,
            Err(error) => return Err(HandshakeError::of(error, client).await),
        };
        let peer = self.peer(&answer)?;
        if let Err(error) = client.notify("notifications/initialized", ()).await {
            return Err(HandshakeError::of(error, client).await);
        }
        client.set_peer(peer);
        Ok(())
    }

    fn peer(&self, answer: &Response) -> Result<Peer, HandshakeError> {
        let malformed = HandshakeError::Malformed;
        let answer: Value = answer.parse().map_err(|_| malformed("it is not JSON"))?;
        let version = answer.get("protocolVersion").and_then(Value::as_str);
        let version = version.ok_or(malformed("it names no protocol version"))?;
        match ProtocolVersion::parse(version) {
            Some(known) if known.has_handshake() => {}
            // A server can send what it likes, and this goes into logs.
            _ => return Err(HandshakeError::Version(version.chars().take(40).collect())),
        }
        // Not worth a refusal, if a server leaves out who it is.
        let text = |key| answer.get("serverInfo")?.get(key)?.as_str().map(short);
        let server = text("name").map(|name| Implementation::new(name, text("version").unwrap_or_default()));
        Ok(Peer { server, client: Some(self.client.clone()), protocol: Some(version.to_owned()) })
    }
}

fn short(text: &str) -> String {
    text.chars().take(128).collect()
}

/// Answers the server's `ping`; the rest is for the caller's handler.
#[derive(Debug)]
pub(super) struct Pings<H>(pub(super) H);

impl<H: Handler> Handler for Pings<H> {
    async fn request(&self, request: ServerRequest) -> Result<Response, ServerError> {
        if request.method() == "ping" {
            return Response::new(json!({})).map_err(|_| ServerError::new(-32603, "internal error"));
        }
        self.0.request(request).await
    }

    fn notification(&self, notification: Notification) {
        self.0.notification(notification);
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream};

    use super::*;

    struct Server(BufReader<DuplexStream>);

    impl Server {
        async fn read(&mut self) -> Value {
            let mut line = String::new();
            self.0.read_line(&mut line).await.unwrap();
            serde_json::from_str(&line).unwrap()
        }

        async fn write(&mut self, message: Value) {
            self.0.write_all(format!("{message}\n").as_bytes()).await.unwrap();
        }
    }

    fn pair() -> (Client, Server) {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        (Client::builder().handler(Pings(())).connect(ours), Server(BufReader::new(theirs)))
    }

    /// How the handshake goes with a server that answers so, and the connection.
    async fn handshake(session: Session, answer: Value) -> (Result<(), HandshakeError>, Client, Value) {
        let (client, mut server) = pair();
        let serve = async {
            let request = server.read().await;
            let mut message = json!({ "jsonrpc": "2.0", "id": request["id"] });
            message.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
            server.write(message).await;
            request
        };
        let (result, request) = tokio::join!(session.begin(&client), serve);
        if result.is_ok() {
            assert_eq!(server.read().await["method"], "notifications/initialized");
        }
        (result, client, request)
    }

    fn result(version: &str) -> Value {
        let server = json!({ "name": "demo", "version": "2" });
        json!({ "result": { "protocolVersion": version, "capabilities": {}, "serverInfo": server } })
    }

    #[tokio::test]
    async fn every_version_with_a_handshake_is_taken() {
        for version in ProtocolVersion::ALL.into_iter().filter(|version| version.has_handshake()) {
            let (done, client, request) = handshake(Session::default(), result(version.as_str())).await;
            done.unwrap();
            assert_eq!(request["method"], "initialize");
            assert_eq!(request["params"]["protocolVersion"], "2025-11-25");
            assert_eq!(request["params"]["clientInfo"]["name"], "goaround");
            let peer = Connection::peer(&client).unwrap();
            assert_eq!(peer.server, Some(Implementation::new("demo", "2")));
            assert_eq!(peer.protocol.as_deref(), Some(version.as_str()));
        }
    }

    #[tokio::test]
    async fn what_is_no_handshake_is_an_error_that_says_so() {
        let text = async |answer| {
            let (done, client, _) = handshake(Session::default(), answer).await;
            assert!(Connection::peer(&client).is_none());
            done.unwrap_err().to_string()
        };
        let unknown =
            "the server wants the protocol version \"2030-01-01\", which has no handshake known here";
        assert_eq!(text(result("2030-01-01")).await, unknown);
        assert!(text(result("2026-07-28")).await.contains("\"2026-07-28\""));
        assert!(text(json!({ "result": {} })).await.contains("malformed"));
        assert!(text(json!({ "result": [] })).await.contains("malformed"));
        let refused = json!({ "error": { "code": -32602, "message": "no" } });
        assert_eq!(text(refused).await, "the server refused `initialize`: no (code -32602)");

        let (done, ..) =
            handshake(Session::default(), json!({ "result": { "protocolVersion": "2024-11-05" } })).await;
        done.unwrap();
    }

    #[tokio::test]
    async fn a_version_without_a_handshake_is_not_offered() {
        let (client, _server) = pair();
        let session = Session { offer: ProtocolVersion::V2026_07_28, ..Session::default() };
        let error = session.begin(&client).await.unwrap_err();
        assert!(matches!(error, HandshakeError::NoHandshake(_)) && error.to_string().contains("2026-07-28"));
    }

    #[tokio::test]
    async fn a_connection_that_closes_is_said_to() {
        let (client, server) = pair();
        drop(server);
        let error = Session::default().begin(&client).await.unwrap_err();
        assert_eq!(error.to_string(), "the connection closed during the handshake");
    }

    #[tokio::test]
    async fn the_servers_ping_is_answered_and_other_requests_are_not() {
        let (_client, mut server) = pair();
        server.write(json!({ "jsonrpc": "2.0", "id": "a", "method": "ping" })).await;
        assert_eq!(server.read().await, json!({ "jsonrpc": "2.0", "id": "a", "result": {} }));
        server.write(json!({ "jsonrpc": "2.0", "id": 2, "method": "roots/list" })).await;
        assert_eq!(server.read().await["error"]["code"], -32601);
    }
}
