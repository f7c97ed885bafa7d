//! A scripted server in each version of the protocol, in memory and in paused time. What needs a process is in
//! `tests/mcp.rs`.

mod tasks;

use std::{
    future::{pending, poll_fn},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use backon::ConstantBuilder;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream},
    process::Command,
    sync::mpsc,
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};

use tower::{Layer, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};

use super::{
    connection::{Open, connect},
    methods::LISTS,
    settings::Settings,
    *,
};
use crate::{
    Basis, Call, CallError, Cause, DeadlineLayer, Delivery, Effect, Event, Outcome, ReconnectLayer, Refusal,
    RetryReadOnly, RetryReadOnlyLayer, ServerError, Stack, WriteSafetyLayer,
    connection::{self as own, BoxFuture},
    jsonrpc::{Builder, Client, Notification, Response, ServerRequest},
    stdio::Opened,
};

/// The server's end of a connection.
struct Server(BufReader<DuplexStream>);

impl Server {
    /// The next message; `None` at the end.
    async fn read(&mut self) -> Option<Value> {
        let mut line = String::new();
        self.0.read_line(&mut line).await.unwrap();
        (!line.is_empty()).then(|| serde_json::from_str(&line).unwrap())
    }

    /// The next message, a request of that method.
    async fn asked(&mut self, method: &str) -> Value {
        let message = self.read().await.unwrap();
        assert_eq!(message["method"], method, "{message}");
        message
    }

    async fn write(&mut self, message: Value) {
        self.0.write_all(format!("{message}\n").as_bytes()).await.unwrap();
    }

    async fn answer(&mut self, request: &Value, result: Value) {
        self.write(json!({ "jsonrpc": "2.0", "id": request["id"], "result": result })).await;
    }

    async fn refuse(&mut self, request: &Value, code: i64, data: Value) {
        let error = json!({ "code": code, "message": "no", "data": data });
        self.write(json!({ "jsonrpc": "2.0", "id": request["id"], "error": error })).await;
    }

    /// Shakes hands after `server/discover` was refused, if it comes.
    async fn older(&mut self, version: &str) -> Value {
        let mut message = self.read().await.unwrap();
        if message["method"] == "server/discover" {
            self.refuse(&message, -32601, Value::Null).await;
            message = self.read().await.unwrap();
        }
        self.initialized(&message, version).await;
        message
    }

    async fn initialized(&mut self, request: &Value, version: &str) {
        assert_eq!(request["method"], "initialize", "{request}");
        self.answer(request, initialized(version)).await;
        self.asked("notifications/initialized").await;
    }

    async fn modern(&mut self) -> Value {
        let request = self.asked("server/discover").await;
        self.answer(&request, discovered()).await;
        request
    }

    /// Acknowledges a stream, as the reference server does.
    async fn acknowledge(&mut self, request: &Value) {
        let meta = json!({ "io.modelcontextprotocol/subscriptionId": request["id"] });
        let params = json!({ "_meta": meta, "notifications": request["params"]["notifications"] });
        let method = "notifications/subscriptions/acknowledged";
        self.write(json!({ "jsonrpc": "2.0", "method": method, "params": params })).await;
    }

    async fn tools_changed(&mut self) {
        self.write(json!({ "jsonrpc": "2.0", "method": "notifications/tools/list_changed" })).await;
    }

    /// Nothing comes for a while.
    async fn is_quiet(&mut self) {
        let message = timeout(Duration::from_secs(1), self.read()).await;
        assert!(message.is_err(), "{message:?}");
    }
}

fn initialized(version: &str) -> Value {
    let capabilities = json!({ "tools": { "listChanged": true } });
    let server = json!({ "name": "demo", "version": "2" });
    json!({ "protocolVersion": version, "capabilities": capabilities, "serverInfo": server })
}

fn discovered() -> Value {
    json!({
        "resultType": "complete",
        "supportedVersions": ["2026-07-28"],
        "capabilities": { "tools": { "listChanged": true } },
        "ttlMs": 0,
        "_meta": { "io.modelcontextprotocol/serverInfo": { "name": "demo", "version": "2" } },
    })
}

/// A transport whose other ends come out here.
struct Lab {
    settings: Settings,
    memory: Arc<super::session::Memory>,
    tell: mpsc::UnboundedSender<Server>,
    servers: mpsc::UnboundedReceiver<Server>,
}

struct Wire(mpsc::UnboundedSender<Server>);

impl Open for Wire {
    fn open(&self, with: Box<dyn FnOnce(Builder) -> Builder + Send>) -> BoxFuture<Result<Opened, BoxError>> {
        let (ours, theirs) = tokio::io::duplex(64 * 1024);
        let client = with(Client::builder().exact_writes()).connect(ours);
        let _ = self.0.send(Server(BufReader::new(theirs)));
        Box::pin(async { Ok(Opened::new(client)) })
    }
}

type Connecting = JoinHandle<Result<Connection, BoxError>>;

impl Lab {
    fn new() -> Self {
        let (tell, servers) = mpsc::unbounded_channel();
        Self { settings: Settings::default(), memory: Arc::default(), tell, servers }
    }

    fn of(era: Era) -> Self {
        let mut lab = Self::new();
        lab.settings.era = era;
        lab
    }

    fn trusting() -> Self {
        let mut lab = Self::new();
        lab.settings.tools = ToolRules::new().trust_annotations();
        lab
    }

    fn connect(&self) -> Connecting {
        let settings = Arc::new(self.settings.clone());
        tokio::spawn(connect(Wire(self.tell.clone()), settings, self.memory.clone()))
    }

    async fn server(&mut self) -> Server {
        self.servers.recv().await.unwrap()
    }

    /// A connection and its server, of that version.
    async fn pair(&mut self, version: ProtocolVersion) -> (Connection, Server) {
        let connecting = self.connect();
        let mut server = self.server().await;
        if version.has_handshake() {
            server.older(version.as_str()).await;
        } else {
            server.modern().await;
        }
        (connecting.await.unwrap().unwrap(), server)
    }

    fn classify(&self, request: &Request) -> Option<(Effect, Basis)> {
        let catalog = self.memory.catalog();
        self.settings.tools.classify_by(request, |tool| catalog.get(tool))
    }

    /// The request as a stack would stamp it.
    fn stamped(&self, mut request: Request) -> Request {
        if let Some((effect, basis)) = self.classify(&request) {
            request.context_mut().stamp(effect, basis);
        }
        request
    }
}

async fn failed(connecting: Connecting) -> HandshakeError {
    *connecting.await.unwrap().unwrap_err().downcast::<HandshakeError>().unwrap()
}

fn request(method: &'static str, params: Value) -> Request {
    Request::new(method, params).unwrap()
}

fn tool(name: &str) -> Request {
    request("tools/call", json!({ "name": name, "arguments": {} }))
}

/// Sends a request and answers it.
async fn exchange(
    connection: &Connection,
    server: &mut Server,
    request: Request,
    result: Value,
) -> (Value, Response) {
    let method = request.method().to_owned();
    let serve = async {
        let asked = server.asked(&method).await;
        server.answer(&asked, result).await;
        asked
    };
    let (response, asked) = tokio::join!(connection.request(request), serve);
    (asked, response.unwrap())
}

fn older_versions() -> impl Iterator<Item = ProtocolVersion> {
    ProtocolVersion::ALL.into_iter().filter(|version| version.has_handshake())
}

// ----- the beginning

#[tokio::test(start_paused = true)]
async fn every_older_version_is_spoken_after_server_discover_was_refused_and_at_once_the_next_time() {
    for version in older_versions() {
        let mut lab = Lab::new();
        let connecting = lab.connect();
        let mut server = lab.server().await;
        let discover = server.asked("server/discover").await;
        let meta = &discover["params"]["_meta"];
        assert_eq!(meta["io.modelcontextprotocol/protocolVersion"], "2026-07-28");
        assert_eq!(meta["io.modelcontextprotocol/clientInfo"]["name"], "goaround");
        assert_eq!(meta["io.modelcontextprotocol/clientCapabilities"], json!({}));
        server.refuse(&discover, -32601, Value::Null).await;
        let initialize = server.asked("initialize").await;
        assert_eq!(initialize["params"]["protocolVersion"], "2025-11-25");
        assert_eq!(initialize["params"]["clientInfo"]["name"], "goaround");
        server.initialized(&initialize, version.as_str()).await;
        let connection = connecting.await.unwrap().unwrap();
        assert_eq!(connection.version(), version);
        let peer = own::Connection::peer(&connection).unwrap();
        assert_eq!(peer.server, Some(Implementation::new("demo", "2")));
        assert_eq!(peer.protocol.as_deref(), Some(version.as_str()));

        // Nothing is added to the requests of this era.
        let (asked, _) =
            exchange(&connection, &mut server, request("tools/list", json!({})), json!({})).await;
        assert_eq!(asked["params"], json!({}));
        drop((connection, server));

        let connecting = lab.connect();
        let mut server = lab.server().await;
        let initialize = server.asked("initialize").await;
        server.initialized(&initialize, version.as_str()).await;
        assert_eq!(connecting.await.unwrap().unwrap().version(), version);
        assert_eq!(lab.memory.stats.sessions(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn the_newest_version_has_no_handshake_and_each_request_says_who_asks() {
    let mut lab = Lab::new();
    lab.settings.capabilities = json!({ "elicitation": {} });
    for _ in 0..2 {
        let connecting = lab.connect();
        let mut server = lab.server().await;
        server.modern().await;
        let connection = connecting.await.unwrap().unwrap();
        assert_eq!(connection.version(), ProtocolVersion::V2026_07_28);
        let peer = own::Connection::peer(&connection).unwrap();
        assert_eq!(peer.server, Some(Implementation::new("demo", "2")));
        let call = request("tools/call", json!({ "name": "x", "_meta": { "progressToken": 7 } }));
        let (asked, _) = exchange(&connection, &mut server, call, json!({})).await;
        assert_eq!(
            asked["params"],
            json!({ "name": "x", "_meta": {
                "progressToken": 7,
                "io.modelcontextprotocol/protocolVersion": "2026-07-28",
                "io.modelcontextprotocol/clientInfo": { "name": "goaround", "version": env!("CARGO_PKG_VERSION") },
                "io.modelcontextprotocol/clientCapabilities": { "elicitation": {} },
            } })
        );
        let (asked, _) =
            exchange(&connection, &mut server, request("tools/list", Value::Null), json!({})).await;
        assert_eq!(asked["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"], "2026-07-28");
    }
}

#[tokio::test(start_paused = true)]
async fn a_pinned_era_is_the_only_one() {
    let mut lab = Lab::of(Era::Initialize);
    let connecting = lab.connect();
    let mut server = lab.server().await;
    let initialize = server.asked("initialize").await;
    server.refuse(&initialize, -32022, json!({ "supported": ["2026-07-28"] })).await;
    let error = failed(connecting).await;
    assert_eq!(
        error.to_string(),
        "the server refused `initialize` (code -32022; its message is in the `HandshakeError`)"
    );

    let mut lab = Lab::of(Era::Discover);
    let connecting = lab.connect();
    let mut server = lab.server().await;
    let discover = server.asked("server/discover").await;
    // However long it takes.
    sleep(Duration::from_secs(50)).await;
    server.refuse(&discover, -32601, Value::Null).await;
    let error = failed(connecting).await;
    assert_eq!(
        error.to_string(),
        "the server refused `server/discover` (code -32601; its message is in the `HandshakeError`)"
    );
    assert!(lab.servers.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_does_not_answer_server_discover_is_sent_initialize_in_time() {
    for version in older_versions() {
        let mut lab = Lab::new();
        let began = Instant::now();
        let connecting = lab.connect();
        let mut server = lab.server().await;
        server.asked("server/discover").await;
        let initialize = server.asked("initialize").await;
        assert_eq!(began.elapsed().as_secs(), 3);
        server.initialized(&initialize, version.as_str()).await;
        assert_eq!(connecting.await.unwrap().unwrap().version(), version);
    }
}

#[tokio::test(start_paused = true)]
async fn a_newer_server_that_is_slow_to_start_refuses_initialize_and_is_understood() {
    for reply_first in [true, false] {
        let mut lab = Lab::new();
        let connecting = lab.connect();
        let mut server = lab.server().await;
        sleep(Duration::from_secs(20)).await;
        let discover = server.asked("server/discover").await;
        let initialize = server.asked("initialize").await;
        if reply_first {
            server.answer(&discover, discovered()).await;
        }
        server.refuse(&initialize, -32022, json!({ "supported": ["2026-07-28"] })).await;
        if !reply_first {
            server.answer(&discover, discovered()).await;
        }
        assert_eq!(connecting.await.unwrap().unwrap().version(), ProtocolVersion::V2026_07_28);
        assert!(lab.servers.try_recv().is_err(), "one process is enough");
    }
}

#[tokio::test(start_paused = true)]
async fn of_a_slow_server_that_takes_both_the_later_word_counts() {
    let mut lab = Lab::new();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    let discover = server.asked("server/discover").await;
    let initialize = server.asked("initialize").await;
    server.answer(&discover, discovered()).await;
    server.initialized(&initialize, "2025-11-25").await;
    assert_eq!(connecting.await.unwrap().unwrap().version(), ProtocolVersion::V2025_11_25);
}

#[tokio::test(start_paused = true)]
async fn a_newer_server_that_is_slow_to_start_and_ignores_initialize_is_understood() {
    let mut lab = Lab::new();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    let discover = server.asked("server/discover").await;
    server.asked("initialize").await;
    server.answer(&discover, discovered()).await;
    let connected = timeout(Duration::from_secs(30), connecting).await;
    let connection = connected.expect("it has said which era it is of").unwrap().unwrap();
    assert_eq!(connection.version(), ProtocolVersion::V2026_07_28);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_ends_at_server_discover_gets_a_fresh_process_and_the_handshake_once() {
    for silent in [true, false] {
        let mut lab = Lab::new();
        let connecting = lab.connect();
        let mut server = lab.server().await;
        server.asked("server/discover").await;
        if silent {
            server.asked("initialize").await;
        }
        drop(server);
        let mut server = lab.server().await;
        let initialize = server.asked("initialize").await;
        server.initialized(&initialize, "2025-06-18").await;
        assert_eq!(connecting.await.unwrap().unwrap().version(), ProtocolVersion::V2025_06_18);
    }

    let mut lab = Lab::new();
    let connecting = lab.connect();
    drop(lab.server().await);
    drop(lab.server().await);
    let error = failed(connecting).await;
    assert_eq!(error.to_string(), "the connection closed during the handshake");
    assert!(lab.servers.try_recv().is_err());
}

#[tokio::test(start_paused = true)]
async fn a_server_that_answers_discover_and_refuses_initialize_is_never_sent_it() {
    let mut lab = Lab::new();
    for _ in 0..2 {
        let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
        server.is_quiet().await;
        drop(connection);
        while let Some(message) = server.read().await {
            assert_ne!(message["method"], "initialize");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_remembered_era_that_no_longer_holds_is_given_up_on_the_same_process() {
    // From the newer to the older one, as after a downgrade of the server.
    let mut lab = Lab::new();
    drop(lab.pair(ProtocolVersion::V2026_07_28).await);
    let (connection, server) = lab.pair(ProtocolVersion::V2025_03_26).await;
    assert_eq!(connection.version(), ProtocolVersion::V2025_03_26);
    drop((connection, server));
    // And back.
    let connecting = lab.connect();
    let mut server = lab.server().await;
    let initialize = server.asked("initialize").await;
    server
        .refuse(&initialize, -32022, json!({ "supported": ["2026-07-28"], "requested": "2025-11-25" }))
        .await;
    server.modern().await;
    assert_eq!(connecting.await.unwrap().unwrap().version(), ProtocolVersion::V2026_07_28);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_refuses_initialize_and_does_not_answer_discover_gets_a_fresh_process() {
    let mut lab = Lab::new();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.asked("server/discover").await;
    let initialize = server.asked("initialize").await;
    server.refuse(&initialize, -32022, json!({})).await;
    let mut second = lab.server().await;
    second.modern().await;
    assert_eq!(connecting.await.unwrap().unwrap().version(), ProtocolVersion::V2026_07_28);
}

#[tokio::test(start_paused = true)]
async fn versions_are_negotiated_and_what_is_unknown_is_an_error_that_names_it() {
    let unsupported = |supported: Value| json!({ "error": { "code": -32022, "message": "no", "data": { "supported": supported } } });
    let supported = |versions: Value| json!({ "result": { "supportedVersions": versions } });
    for (first, next) in [
        (unsupported(json!(["2030-01-01", "2025-06-18", "2024-11-05"])), Some("initialize")),
        (unsupported(json!(["2030-01-01", "2026-07-28"])), Some("server/discover")),
        (unsupported(json!(7)), Some("initialize")),
        (supported(json!(["2025-03-26"])), Some("initialize")),
        (supported(json!("2026-07-28")), Some("initialize")),
        (json!({ "result": [] }), Some("initialize")),
        (unsupported(json!(["2030-01-01"])), None),
        (supported(json!(["2030-01-01", "2031-01-01"])), None),
        (supported(json!([])), None),
    ] {
        let mut lab = Lab::new();
        let connecting = lab.connect();
        let mut server = lab.server().await;
        let discover = server.asked("server/discover").await;
        let mut message = json!({ "jsonrpc": "2.0", "id": discover["id"] });
        message.as_object_mut().unwrap().extend(first.as_object().unwrap().clone());
        server.write(message).await;
        match next {
            Some(next) => {
                let second = server.asked(next).await;
                if next == "initialize" {
                    let offered = second["params"]["protocolVersion"].as_str().unwrap();
                    assert!(["2025-11-25", "2025-06-18", "2025-03-26"].contains(&offered), "{offered}");
                    server.initialized(&second, offered).await;
                } else {
                    server.answer(&second, discovered()).await;
                }
                connecting.await.unwrap().unwrap();
            }
            None => {
                let error = failed(connecting).await;
                assert!(matches!(&error, HandshakeError::Version(_)), "{error}");
                assert!(error.to_string().starts_with("no common protocol version: the server speaks ["));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_no_handshake_is_an_error_that_says_so() {
    let refused = json!({ "error": { "code": -32602, "message": "no" } });
    for (answer, text) in [
        (json!({ "result": { "protocolVersion": "2030-01-01" } }), r#"speaks ["2030-01-01"]"#),
        (json!({ "result": { "protocolVersion": "2026-07-28" } }), r#"speaks ["2026-07-28"]"#),
        (json!({ "result": {} }), "`initialize` is malformed"),
        (json!({ "result": [] }), "`initialize` is malformed"),
        (refused, "the server refused `initialize` (code -32602; its message is in the `HandshakeError`)"),
    ] {
        let mut lab = Lab::of(Era::Initialize);
        let connecting = lab.connect();
        let mut server = lab.server().await;
        let initialize = server.asked("initialize").await;
        let mut message = json!({ "jsonrpc": "2.0", "id": initialize["id"] });
        message.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
        server.write(message).await;
        let error = failed(connecting).await.to_string();
        assert!(error.contains(text), "{error}");
    }
}

/// What a server says when it refuses a handshake may hold the key that it refuses.
#[tokio::test(start_paused = true)]
async fn nothing_that_a_server_says_in_the_handshake_is_in_the_text_of_a_calls_error() {
    let refused = json!({ "code": -32000, "message": "invalid key hunter2", "data": { "key": "hunter2" } });
    for (era, answer, text) in [
        (
            Era::Initialize,
            json!({ "error": refused }),
            "the server refused `initialize` (code -32000; its message is in the `HandshakeError`)",
        ),
        (
            Era::Discover,
            json!({ "error": refused }),
            "the server refused `server/discover` (code -32000; its message is in the `HandshakeError`)",
        ),
        (Era::Initialize, json!({ "result": { "protocolVersion": "hunter2" } }), r#"speaks ["?"]"#),
        (
            Era::Discover,
            json!({ "result": { "supportedVersions": ["2031-01-01", "hunter2", "2031-hunt2"] } }),
            r#"speaks ["2031-01-01", "?", "?"]"#,
        ),
    ] {
        let mut lab = Lab::of(era);
        let (tell, settings, memory) = (lab.tell.clone(), Arc::new(lab.settings.clone()), lab.memory.clone());
        let connector = service_fn(move |()| connect(Wire(tell.clone()), settings.clone(), memory.clone()));
        let stack = Stack::builder(BoxCloneService::new(connector)).deadline(Duration::from_secs(60));
        let stack = stack.build().unwrap();
        let call = tokio::spawn(async move { stack.send(tool("pay")).await });
        let mut server = lab.server().await;
        let asked = server.read().await.unwrap();
        let mut message = json!({ "jsonrpc": "2.0", "id": asked["id"] });
        message.as_object_mut().unwrap().extend(answer.as_object().unwrap().clone());
        server.write(message).await;

        let error = call.await.unwrap().unwrap_err();
        assert!(matches!(error.cause(), Cause::ConnectFailed(_)), "{error}");
        assert!(error.to_string().contains(text), "{error}");
        let mut texts = format!("{error} {error:?}");
        let mut source = std::error::Error::source(&error);
        while let Some(inner) = source {
            texts += &format!(" {inner} {inner:?}");
            source = inner.source();
        }
        assert!(!texts.contains("hunt"), "{texts}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_answers_neither_is_waited_for_by_whoever_bounds_the_connect() {
    let mut lab = Lab::new();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.asked("server/discover").await;
    server.asked("initialize").await;
    let mut connecting = connecting;
    assert!(timeout(Duration::from_secs(3600), &mut connecting).await.is_err());
    connecting.abort();
    // The process is not left behind.
    while server.read().await.is_some() {}
}

#[tokio::test(start_paused = true)]
async fn a_banner_before_the_handshake_is_ignored() {
    let mut lab = Lab::new();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.0.write_all(b"Welcome!\n\n{ not json\n").await.unwrap();
    server.older("2025-11-25").await;
    assert_eq!(connecting.await.unwrap().unwrap().ignored(), 2);
}

#[tokio::test(start_paused = true)]
async fn who_waits_in_vain_for_a_handshake_is_told_how_far_it_came_and_what_the_server_printed_instead() {
    /// Its error, where the server has printed that and answered as it does there.
    async fn text(era: Era, says: &'static str, by_deadline: bool) -> (String, Stats) {
        let connector = over(move |builder: Builder| {
            let (ours, mut theirs) = tokio::io::duplex(1024);
            let client = builder.connect(ours);
            tokio::spawn(async move {
                theirs.write_all(says.as_bytes()).await.unwrap();
                sleep(Duration::from_secs(3600)).await;
            });
            async move { Ok::<_, BoxError>(client) }
        });
        let connector = connector.era(era);
        let stats = connector.stats();
        let (deadline, connect) = if by_deadline { (10, 60) } else { (60, 10) };
        let stack: Stack<Stdio, Request, Response> = Stack::builder(connector)
            .deadline(Duration::from_secs(deadline))
            .retry(RetryReadOnly.attempts(1))
            .reconnect(ReconnectLayer::once().connect_timeout(Duration::from_secs(connect)))
            .build()
            .unwrap();
        let error = stack.send(request("tools/list", json!({}))).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::NotDone);
        (error.to_string(), stats)
    }

    let late = "not done: tools/list: the deadline passed; no connection yet; the server was started and has not answered";
    let timed_out = "not done: tools/list: cannot connect: no connection within the connect timeout of 10s; the server was \
                     started and has not answered";
    let hint = "(its standard output must carry nothing else)";
    for (by_deadline, begin) in [(true, late), (false, timed_out)] {
        // A server that prints its log.
        let says = "Welcome!\n\n{ not json\n{\"level\":\"info\"}\n";
        let (error, stats) = text(Era::Auto, says, by_deadline).await;
        let lines = "3 lines of its output were no JSON-RPC messages";
        assert_eq!(error, format!("{begin} `initialize`; {lines} {hint}"));
        assert_eq!((stats.ignored(), stats.sessions()), (3, 0));
        let (error, _) = text(Era::Discover, "token=hunter2\n", by_deadline).await;
        let line = "1 line of its output was no JSON-RPC message";
        assert_eq!(error, format!("{begin} `server/discover`; {line} {hint}"));
        // One that is silent, and one that says something else.
        let (error, _) = text(Era::Initialize, "", by_deadline).await;
        assert_eq!(error, format!("{begin} `initialize`"));
        let says = "{\"jsonrpc\":\"2.0\",\"id\":null,\"result\":{}}\n";
        let (error, stats) = text(Era::Initialize, says, by_deadline).await;
        assert_eq!((error, stats.ignored()), (format!("{begin} `initialize`"), 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_silent_server_is_asked_in_the_words_of_its_era() {
    for (version, probe) in older_versions()
        .map(|older| (older, "ping"))
        .chain([(ProtocolVersion::V2026_07_28, "server/discover")])
    {
        let mut lab = Lab::new();
        let (connection, mut server) = lab.pair(version).await;
        let limit = Duration::from_secs(1);
        let mut call = connection.request(request("tools/list", json!({})).within(limit));
        server.asked("tools/list").await;
        let ended = match timeout(limit, &mut call).await {
            Ok(ended) => ended,
            Err(_) => call.await,
        };
        assert!(matches!(ended.unwrap_err().cause(), Cause::Deadline));
        let mut asked = server.read().await.unwrap();
        if asked["method"] == "notifications/cancelled" {
            asked = server.read().await.unwrap();
        }
        assert_eq!(asked["method"], probe);
        let has_meta = asked["params"]["_meta"]["io.modelcontextprotocol/protocolVersion"] == "2026-07-28";
        assert_eq!(has_meta, !version.has_handshake());
        assert!(connection.closed().await.to_string().contains("did not answer a probe"));
    }
}

// ----- the state of a session

#[tokio::test(start_paused = true)]
async fn log_level_and_subscriptions_are_restored_in_order_before_any_call() {
    for version in older_versions() {
        let mut lab = Lab::new();
        let (connection, mut server) = lab.pair(version).await;
        for (method, params) in [
            ("logging/setLevel", json!({ "level": "error" })),
            ("resources/subscribe", json!({ "uri": "a:1" })),
            ("resources/subscribe", json!({ "uri": "a:2" })),
            ("logging/setLevel", json!({ "level": "debug" })),
            ("resources/subscribe", json!({ "uri": "a:3" })),
            ("resources/subscribe", json!({ "uri": "a:1" })),
            ("resources/unsubscribe", json!({ "uri": "a:2" })),
        ] {
            exchange(&connection, &mut server, request(method, params), json!({})).await;
        }
        // What the server refuses is not in effect.
        let refused = async {
            let asked = server.asked("resources/subscribe").await;
            server.refuse(&asked, -32002, Value::Null).await;
        };
        let call = connection.request(request("resources/subscribe", json!({ "uri": "a:4" })));
        assert!(tokio::join!(call, refused).0.is_err());
        drop((connection, server));

        for _ in 0..2 {
            let connecting = lab.connect();
            let mut server = lab.server().await;
            server.older(version.as_str()).await;
            for (method, params) in [
                ("logging/setLevel", json!({ "level": "debug" })),
                ("resources/subscribe", json!({ "uri": "a:1" })),
                ("resources/subscribe", json!({ "uri": "a:3" })),
            ] {
                let asked = server.asked(method).await;
                assert_eq!(asked["params"], params);
                assert!(!connecting.is_finished());
                server.answer(&asked, json!({})).await;
            }
            connecting.await.unwrap().unwrap();
        }
        assert_eq!(lab.memory.stats.not_restored(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_restored_is_counted_and_the_connection_works() {
    let mut lab = Lab::new();
    lab.memory.level_set("info");
    lab.memory.subscribed("a:1");
    lab.memory.subscribed("a:2");
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.older("2025-11-25").await;
    let asked = server.asked("logging/setLevel").await;
    server.refuse(&asked, -32601, Value::Null).await;
    let asked = server.asked("resources/subscribe").await;
    server.answer(&asked, json!({})).await;
    // This one is never answered.
    server.asked("resources/subscribe").await;
    let connection = connecting.await.unwrap().unwrap();
    assert_eq!(lab.memory.stats.not_restored(), 2);
    server.asked("notifications/cancelled").await;
    exchange(&connection, &mut server, request("tools/list", json!({})), json!({})).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_closes_while_it_is_restored_is_an_error() {
    let mut lab = Lab::new();
    lab.memory.level_set("info");
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.older("2025-11-25").await;
    server.asked("logging/setLevel").await;
    drop(server);
    assert!(matches!(failed(connecting).await, HandshakeError::Closed { .. }));
}

#[tokio::test(start_paused = true)]
async fn an_unsubscribe_that_a_closure_took_down_is_not_undone() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2025_11_25).await;
    let uri = json!({ "uri": "a:1" });
    exchange(&connection, &mut server, request("resources/subscribe", uri.clone()), json!({})).await;
    let call = tokio::spawn(connection.request(request("resources/unsubscribe", uri)));
    server.asked("resources/unsubscribe").await;
    drop(server);
    call.await.unwrap().unwrap_err();
    let (_connection, mut server) = lab.pair(ProtocolVersion::V2025_11_25).await;
    server.is_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn the_log_level_goes_with_each_request_of_the_newer_era() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let level = request("logging/setLevel", json!({ "level": "warning" }));
    connection.request(level).await.unwrap();
    let key = "io.modelcontextprotocol/logLevel";
    let list = || request("tools/list", json!({}));
    let (asked, _) = exchange(&connection, &mut server, list(), json!({})).await;
    assert_eq!(asked["params"]["_meta"][key], "warning");
    let own = request("tools/list", json!({ "_meta": { key: "debug" } }));
    let (asked, _) = exchange(&connection, &mut server, own, json!({})).await;
    assert_eq!(asked["params"]["_meta"][key], "debug");
    drop((connection, server));

    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let (asked, _) = exchange(&connection, &mut server, list(), json!({})).await;
    assert_eq!(asked["params"]["_meta"][key], "warning");
    // What is no level is for the server to refuse.
    let odd = request("logging/setLevel", json!({ "level": "loud" }));
    exchange(&connection, &mut server, odd, json!({})).await;
}

fn listen() -> Request {
    request("subscriptions/listen", json!({ "notifications": { "resourcesListChanged": true } })).read_only()
}

#[tokio::test(start_paused = true)]
async fn a_stream_is_restored_with_a_new_id_and_taken_over_by_its_caller() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let level = request("logging/setLevel", json!({ "level": "info" }));
    connection.request(level).await.unwrap();
    let stream = tokio::spawn(connection.request(listen()));
    let asked = server.asked("subscriptions/listen").await;
    server.acknowledge(&asked).await;
    sleep(Duration::from_secs(3600)).await;
    assert!(!stream.is_finished());
    drop(server);
    let error = stream.await.unwrap().unwrap_err();
    assert!(matches!(error.cause(), Cause::Closed(_)));

    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.modern().await;
    let again = server.asked("subscriptions/listen").await;
    assert_eq!(again["params"]["notifications"], json!({ "resourcesListChanged": true }));
    assert_eq!(again["params"]["_meta"]["io.modelcontextprotocol/logLevel"], "info");
    assert!(!connecting.is_finished());
    server.acknowledge(&again).await;
    let connection = connecting.await.unwrap().unwrap();

    // The caller comes back, and no second stream is asked for.
    let stream = tokio::spawn(connection.request(listen()));
    server.is_quiet().await;
    sleep(Duration::from_secs(3600)).await;
    server.answer(&again, json!({ "_meta": {} })).await;
    stream.await.unwrap().unwrap();
    // It has ended, and is restored no more.
    drop((connection, server));
    let (_connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    server.is_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_whose_caller_does_not_come_back_is_cancelled() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let stream = tokio::spawn(connection.request(listen()));
    let asked = server.asked("subscriptions/listen").await;
    server.acknowledge(&asked).await;
    sleep(Duration::from_secs(1)).await;
    drop(server);
    stream.await.unwrap().unwrap_err();

    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.modern().await;
    let again = server.asked("subscriptions/listen").await;
    server.acknowledge(&again).await;
    let _connection = connecting.await.unwrap().unwrap();
    let cancelled = server.asked("notifications/cancelled").await;
    assert_eq!(cancelled["params"]["requestId"], again["id"]);
    drop(server);
    let (_connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    server.is_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn streams_that_are_not_restored_in_time_hold_up_one_connect_only() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let listening: Vec<_> = (0..2).map(|_| tokio::spawn(connection.request(listen()))).collect();
    for _ in 0..2 {
        let asked = server.asked("subscriptions/listen").await;
        server.acknowledge(&asked).await;
    }
    sleep(Duration::from_secs(1)).await;
    drop(server);
    for stream in listening {
        assert!(stream.await.unwrap().unwrap_err().closure().is_some());
    }

    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.modern().await;
    server.asked("subscriptions/listen").await;
    connecting.await.unwrap().unwrap();

    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.modern().await;
    let began = Instant::now();
    connecting.await.unwrap().unwrap();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_its_caller_drops_is_cancelled_and_not_restored() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let stream = tokio::spawn(connection.request(listen()));
    let asked = server.asked("subscriptions/listen").await;
    server.acknowledge(&asked).await;
    sleep(Duration::from_secs(1)).await;
    stream.abort();
    server.asked("notifications/cancelled").await;
    drop((connection, server));
    let (_connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    server.is_quiet().await;
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_was_acknowledged_in_time_is_begun_however_late_its_task_has_its_turn() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let mut stream = tokio_test::task::spawn(connection.request(listen()));
    assert!(stream.poll().is_pending());
    let asked = server.asked("subscriptions/listen").await;
    server.acknowledge(&asked).await;
    sleep(11 * SECOND).await;
    assert!(stream.poll().is_pending());
    server.answer(&asked, json!({ "resultType": "complete" })).await;
    stream.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_stream_must_be_acknowledged_in_time() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let began = Instant::now();
    let stream = connection.request(listen());
    let error = stream.await.unwrap_err();
    assert_eq!(began.elapsed().as_secs(), 10);
    assert!(error.is_safe_to_repeat(), "{error}");
    server.asked("subscriptions/listen").await;
    server.asked("notifications/cancelled").await;

    // And one that is refused says so.
    let refused = async {
        let asked = server.asked("subscriptions/listen").await;
        server.refuse(&asked, -32603, Value::Null).await;
    };
    let (error, ()) = tokio::join!(connection.request(listen()), refused);
    assert_eq!(error.unwrap_err().answer().unwrap().code, -32603);
    assert!(connection.closure().is_none());
}

// ----- cursors

#[tokio::test(start_paused = true)]
async fn a_page_of_another_session_is_refused() {
    for version in older_versions() {
        let mut lab = Lab::new();
        let (connection, mut server) = lab.pair(version).await;
        for list in LISTS {
            let page = json!({ "items": [], "nextCursor": format!("{list}+2") });
            exchange(&connection, &mut server, request(list, json!({})), page).await;
            let second = request(list, json!({ "cursor": format!("{list}+2") }));
            exchange(&connection, &mut server, second, json!({})).await;
        }
        // Where it comes from, the first session cannot know.
        let foreign = request("tools/list", json!({ "cursor": "foreign" }));
        exchange(&connection, &mut server, foreign, json!({})).await;
        drop((connection, server));

        let (connection, mut server) = lab.pair(version).await;
        for list in LISTS {
            let stale = request(list, json!({ "cursor": format!("{list}+2") })).read_only();
            let error = connection.request(stale).await.unwrap_err();
            assert!(matches!(error.cause(), Cause::Refused(Refusal::CursorOfAnotherSession)));
            assert_eq!(error.delivery(), Delivery::NotSent);
            assert_eq!(
                error.to_string(),
                format!(
                    "not done: {list}: the cursor is of another session; begin again with the first page"
                )
            );
        }
        // The same cursor, handed out once more, is one of this session.
        let page = json!({ "tools": [], "nextCursor": "tools/list+2" });
        exchange(&connection, &mut server, request("tools/list", json!({})), page).await;
        let second = request("tools/list", json!({ "cursor": "tools/list+2" }));
        exchange(&connection, &mut server, second, json!({})).await;
        // Elsewhere a cursor is an argument like any other.
        let other = request("tools/call", json!({ "cursor": "tools/list+3" }));
        exchange(&connection, &mut server, other, json!({})).await;
    }
}

#[tokio::test(start_paused = true)]
async fn without_sessions_a_cursor_is_passed_on() {
    let mut lab = Lab::new();
    drop(lab.pair(ProtocolVersion::V2026_07_28).await);
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let second = request("tools/list", json!({ "cursor": "2" }));
    let (asked, _) = exchange(&connection, &mut server, second, json!({})).await;
    assert_eq!(asked["params"]["cursor"], "2");
}

// ----- trust

fn listed(name: &str, annotations: Value) -> Value {
    json!({ "name": name, "inputSchema": {}, "annotations": annotations })
}

fn reads(name: &str) -> Value {
    listed(name, json!({ "readOnlyHint": true }))
}

/// Connects where the tools are listed, and answers with these pages.
async fn pair_with_tools(
    lab: &mut Lab,
    version: ProtocolVersion,
    pages: Vec<Vec<Value>>,
) -> (Connection, Server) {
    let connecting = lab.connect();
    let mut server = lab.server().await;
    agree(&mut server, version).await;
    list_tools(&mut server, pages).await;
    (connecting.await.unwrap().unwrap(), server)
}

/// Agrees on the version, and is asked to tell of changed tools.
async fn agree(server: &mut Server, version: ProtocolVersion) {
    if version.has_handshake() {
        server.older(version.as_str()).await;
        return;
    }
    server.modern().await;
    let own = server.asked("subscriptions/listen").await;
    assert_eq!(own["params"]["notifications"], json!({ "toolsListChanged": true }));
    server.acknowledge(&own).await;
}

async fn list_tools(server: &mut Server, pages: Vec<Vec<Value>>) {
    let last = pages.len() - 1;
    for (number, tools) in pages.into_iter().enumerate() {
        let asked = server.asked("tools/list").await;
        let cursor = (number > 0).then(|| format!("page {number}"));
        assert_eq!(asked["params"]["cursor"].as_str(), cursor.as_deref());
        let mut page = json!({ "tools": tools });
        if number < last {
            page["nextCursor"] = json!(format!("page {}", number + 1));
        }
        server.answer(&asked, page).await;
    }
}

const READ: Option<(Effect, Basis)> = Some((Effect::ReadOnly, Basis::TrustedAnnotation));

#[tokio::test(start_paused = true)]
async fn annotations_are_read_from_all_pages_and_again_when_the_tools_change() {
    for version in ProtocolVersion::ALL {
        let mut lab = Lab::trusting();
        assert_eq!(lab.classify(&tool("get")), None, "nothing is known yet");
        let pages =
            vec![vec![reads("get")], vec![reads("list"), listed("pay", json!({}))], vec![reads("last")]];
        let (connection, mut server) = pair_with_tools(&mut lab, version, pages).await;
        for name in ["get", "list", "last"] {
            assert_eq!(lab.classify(&tool(name)), READ);
        }
        assert_eq!(lab.classify(&tool("pay")), None);
        assert!(connection.closure().is_none());
        exchange(&connection, &mut server, lab.stamped(tool("get")), json!({})).await;

        // Many words, one list.
        for _ in 0..10 {
            server.tools_changed().await;
        }
        list_tools(&mut server, vec![vec![listed("get", json!({ "readOnlyHint": false })), reads("list")]])
            .await;
        server.is_quiet().await;
        assert_eq!(lab.classify(&tool("get")), Some((Effect::Write, Basis::TrustedAnnotation)));
        assert_eq!(lab.classify(&tool("last")), None);

        // A list that cannot be read makes no read.
        server.tools_changed().await;
        let asked = server.asked("tools/list").await;
        server.refuse(&asked, -32603, Value::Null).await;
        server.is_quiet().await;
        assert_eq!(lab.classify(&tool("list")), None);
    }
}

#[tokio::test(start_paused = true)]
async fn from_the_servers_word_that_its_tools_have_changed_none_is_trusted_until_they_are_listed_anew() {
    for version in ProtocolVersion::ALL {
        let mut lab = Lab::trusting();
        let (connection, mut server) = pair_with_tools(&mut lab, version, vec![vec![reads("get")]]).await;
        let taken = lab.stamped(tool("get"));
        assert_eq!(lab.classify(&taken), READ);
        server.tools_changed().await;
        let first = server.asked("tools/list").await;
        assert_eq!(lab.classify(&tool("get")), None);
        // A call that was taken for a read before that is not sent as one.
        let error = connection.request(taken).await.unwrap_err();
        assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");

        // What was read before they changed once more counts no more either.
        server.tools_changed().await;
        server.answer(&first, json!({ "tools": [reads("get")] })).await;
        let second = server.asked("tools/list").await;
        assert_eq!(lab.classify(&tool("get")), None);
        server.answer(&second, json!({ "tools": [reads("list")] })).await;
        server.is_quiet().await;
        assert_eq!((lab.classify(&tool("get")), lab.classify(&tool("list"))), (None, READ));
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_trusted_effect_no_longer_holds_is_refused_on_the_new_connection() {
    for version in ProtocolVersion::ALL {
        let mut lab = Lab::trusting();
        let label = listed("label", json!({ "idempotentHint": true }));
        let tools = vec![vec![reads("get"), reads("gone"), reads("weaker"), label]];
        drop(pair_with_tools(&mut lab, version, tools).await);
        let calls = ["get", "gone", "weaker", "label"].map(|name| lab.stamped(tool(name)));
        let [get, gone, weaker, label] = calls;
        assert_eq!(label.context().effect(), Some(Effect::Idempotent));

        let tools = vec![
            listed("get", json!({ "readOnlyHint": true, "destructiveHint": true })),
            listed("weaker", json!({ "idempotentHint": true })),
            reads("label"),
        ];
        let (connection, mut server) = pair_with_tools(&mut lab, version, vec![tools]).await;
        for call in [get, gone, weaker] {
            let error = connection.request(call).await.unwrap_err();
            assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
            assert_eq!(error.delivery(), Delivery::NotSent);
        }
        // What may do less than it was taken for is no reason to refuse it.
        exchange(&connection, &mut server, label, json!({})).await;
        // Judged anew, it is a write, and goes.
        assert_eq!(lab.stamped(tool("get")).context().effect(), Some(Effect::Write));
        exchange(&connection, &mut server, lab.stamped(tool("get")), json!({})).await;
        // The caller's own word is the caller's.
        exchange(&connection, &mut server, tool("get").read_only(), json!({})).await;
    }
}

#[tokio::test(start_paused = true)]
async fn from_the_word_that_the_tools_have_changed_on_no_annotation_is_trusted_until_they_are_listed_again() {
    for version in ProtocolVersion::ALL {
        let mut lab = Lab::trusting();
        let tools = || vec![vec![reads("get"), listed("label", json!({ "idempotentHint": true }))]];
        let (connection, mut server) = pair_with_tools(&mut lab, version, tools()).await;
        let [get, label] = ["get", "label"].map(|name| lab.stamped(tool(name)));
        let nothing_is_trusted = async |lab: &Lab| {
            for call in [&get, &label] {
                let error = connection.request(call.clone()).await.unwrap_err();
                assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
            }
            assert_eq!(lab.classify(&tool("get")), None);
        };
        server.tools_changed().await;
        sleep(Duration::from_millis(1)).await;
        nothing_is_trusted(&lab).await;
        // A list that was asked for before another such word is none.
        let asked = server.asked("tools/list").await;
        nothing_is_trusted(&lab).await;
        server.tools_changed().await;
        sleep(Duration::from_millis(1)).await;
        server.answer(&asked, json!({ "tools": tools()[0] })).await;
        sleep(Duration::from_millis(1)).await;
        nothing_is_trusted(&lab).await;
        list_tools(&mut server, tools()).await;
        server.is_quiet().await;
        assert_eq!(lab.classify(&tool("get")), READ);
        exchange(&connection, &mut server, get, json!({})).await;
        exchange(&connection, &mut server, label, json!({})).await;
    }
}

/// A stack that trusts annotations, over a pipe that holds little.
async fn trusting_stack(
    version: ProtocolVersion,
    tools: Vec<Value>,
) -> (Arc<Stack<Stdio, Request, Response>>, Server) {
    let (stack, server, _) = trusting_stack_with(version, tools, RetryReadOnly.into(), |_| {}).await;
    (stack, server)
}

/// With the servers that come later.
async fn trusting_stack_with(
    version: ProtocolVersion,
    tools: Vec<Value>,
    retry: RetryReadOnlyLayer,
    events: impl Fn(Event<'_>) + Send + Sync + 'static,
) -> (Arc<Stack<Stdio, Request, Response>>, Server, mpsc::UnboundedReceiver<Server>) {
    let (tell, mut servers) = mpsc::unbounded_channel();
    let connector = over(move |builder: Builder| {
        let (ours, theirs) = tokio::io::duplex(1024);
        let _ = tell.send(Server(BufReader::new(theirs)));
        let client = builder.exact_writes().connect(ours);
        async move { Ok::<_, BoxError>(client) }
    });
    let connector = connector.era(Era::Auto).tools(ToolRules::new().trust_annotations());
    let writes = WriteSafetyLayer::refuse().replay_idempotent().attempt_timeout(10 * SECOND);
    let stack = Stack::builder(connector).deadline(60 * SECOND).writes(writes).retry(retry).on_event(events);
    let stack = Arc::new(stack.build().unwrap());
    let first = send(&stack, tool("look"));
    let mut server = servers.recv().await.unwrap();
    agree(&mut server, version).await;
    list_tools(&mut server, vec![tools]).await;
    let asked = server.asked("tools/call").await;
    server.answer(&asked, json!({ "content": [] })).await;
    first.await.unwrap().unwrap();
    (stack, server, servers)
}

fn send(
    stack: &Arc<Stack<Stdio, Request, Response>>,
    request: Request,
) -> JoinHandle<Result<Response, CallError>> {
    let stack = Arc::clone(stack);
    tokio::spawn(async move { stack.send(request).await })
}

/// A read that fills the pipe.
fn large_look() -> Request {
    let arguments = json!({ "padding": "x".repeat(100_000) });
    request("tools/call", json!({ "name": "look", "arguments": arguments }))
}

/// Answers everything that comes for a while; how often the tool was called.
async fn serve(server: &mut Server, name: &str, tools: &[Value]) -> usize {
    let mut calls = 0;
    while let Ok(Some(message)) = timeout(30 * SECOND, server.read()).await {
        let result = match message["method"].as_str().unwrap() {
            "tools/list" => json!({ "tools": tools }),
            _ => json!({ "content": [] }),
        };
        calls += usize::from(message["params"]["name"] == name);
        if !message["id"].is_null() {
            server.answer(&message, result).await;
        }
    }
    calls
}

/// More of them than tokio lets one task do in a turn.
#[tokio::test(start_paused = true)]
async fn answers_that_are_there_win_over_the_end_however_many_calls_one_task_waits_for() {
    const CALLS: usize = 300;
    for (by_closure, annotations) in
        [true, false].into_iter().flat_map(|by| ["readOnlyHint", "idempotentHint"].map(|hint| (by, hint)))
    {
        let tools = vec![reads("look"), listed("it", json!({ annotations: true }))];
        let (stack, mut server) = trusting_stack(ProtocolVersion::V2025_11_25, tools.clone()).await;
        let serving = tokio::spawn(async move {
            for _ in 0..CALLS {
                let asked = server.asked("tools/call").await;
                server.answer(&asked, json!({ "content": [] })).await;
            }
            // It ends, or stays.
            (!by_closure).then_some(server)
        });
        let mut calls: Vec<_> = (0..CALLS).map(|_| Box::pin(stack.send(tool("it").within(SECOND)))).collect();
        let mut ended = Vec::new();
        let mut poll_all = |cx: &mut Context<'_>| {
            calls.retain_mut(|call| match call.as_mut().poll(cx) {
                Poll::Ready(answer) => {
                    ended.push(answer);
                    false
                }
                Poll::Pending => true,
            });
            (calls.is_empty(), ended.len())
        };
        assert_eq!(poll_fn(|cx| Poll::Ready(poll_all(cx))).await, (false, 0));
        let _server = serving.await.unwrap();
        sleep(if by_closure { SECOND / 2 } else { 2 * SECOND }).await;
        poll_fn(|cx| if poll_all(cx).0 { Poll::Ready(()) } else { Poll::Pending }).await;
        assert_eq!(ended.len(), CALLS);
        ended.into_iter().for_each(|answer| drop(answer.unwrap()));
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_waits_in_the_queue_while_its_annotation_is_taken_back_is_not_sent() {
    for now in [None, Some(json!({ "readOnlyHint": false })), Some(json!({ "idempotentHint": true }))] {
        let (stack, mut server) =
            trusting_stack(ProtocolVersion::V2025_11_25, vec![reads("look"), reads("odd")]).await;
        let large = send(&stack, large_look());
        sleep(SECOND).await;
        let odd = send(&stack, tool("odd").within(20 * SECOND));
        sleep(SECOND).await;
        server.tools_changed().await;
        sleep(5 * SECOND).await;
        // The client knows, and the server reads on.
        let mut tools = vec![reads("look")];
        tools.extend(now.map(|annotations| listed("odd", annotations)));
        assert_eq!(serve(&mut server, "odd", &tools).await, 0);
        let error = odd.await.unwrap().unwrap_err();
        assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
        assert_eq!((error.outcome(), error.delivery()), (Outcome::NotDone, Delivery::NotSent));
        large.await.unwrap().unwrap();
    }
}

/// The stream that tells of changes had ended, so that no word comes.
#[tokio::test(start_paused = true)]
async fn a_call_that_lies_in_the_buffer_while_the_tools_are_listed_anew_is_not_sent_though_no_word_says_so() {
    let (stack, mut server) =
        trusting_stack(ProtocolVersion::V2026_07_28, vec![reads("look"), reads("odd")]).await;
    // After `server/discover`.
    server.answer(&json!({ "id": 2 }), json!({ "resultType": "complete" })).await;
    sleep(5 * SECOND).await;
    server.asked("subscriptions/listen").await;
    let asked = server.asked("tools/list").await;
    let filler =
        request("tools/call", json!({ "name": "look", "arguments": { "padding": "x".repeat(8_000) } }));
    let (filler, odd) = (send(&stack, filler), send(&stack, tool("odd")));
    sleep(SECOND).await;
    let tools = [reads("look"), listed("odd", json!({ "readOnlyHint": false }))];
    server.answer(&asked, json!({ "resultType": "complete", "tools": tools })).await;
    sleep(SECOND).await;
    assert_eq!(serve(&mut server, "odd", &tools).await, 0);
    filler.await.unwrap().unwrap();
    let error = odd.await.unwrap().unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
    assert_eq!((error.outcome(), error.delivery()), (Outcome::NotDone, Delivery::NotSent));
}

/// It lies in the pipe, or in part with us, when the word comes: nobody knows when the server reads it.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_written_when_its_annotation_is_taken_back_and_gets_no_answer_may_have_been_a_write() {
    for (large, changes) in [(false, true), (true, true), (false, false)] {
        let (stack, mut server) = trusting_stack(ProtocolVersion::V2025_11_25, vec![reads("look")]).await;
        let look = if large { large_look() } else { tool("look") };
        let look = send(&stack, look.within(20 * SECOND));
        sleep(SECOND).await;
        if changes {
            server.tools_changed().await;
        }
        let error = look.await.unwrap().unwrap_err();
        let (outcome, effect) = match changes {
            true => (Outcome::Unknown, Effect::Write),
            false => (Outcome::NoAnswer, Effect::ReadOnly),
        };
        assert_eq!((error.outcome(), error.effect()), (outcome, effect), "{error}");
        assert_eq!(error.may_have_landed(), changes);
    }
    // An answer is one.
    let (stack, mut server) = trusting_stack(ProtocolVersion::V2025_11_25, vec![reads("look")]).await;
    let look = send(&stack, tool("look"));
    let asked = server.asked("tools/call").await;
    server.tools_changed().await;
    sleep(SECOND).await;
    server.answer(&asked, json!({ "content": [] })).await;
    look.await.unwrap().unwrap();
}

/// Its server may have done anything by then, whatever the next one says of itself.
#[tokio::test(start_paused = true)]
async fn a_call_whose_annotation_is_taken_back_before_its_repetition_goes_is_not_repeated_and_reported() {
    #[derive(Debug)]
    enum Lost {
        /// An idempotent one, with its connection.
        Closed,
        /// A read, and the next server does not say that it is one.
        WithItsServer,
        /// A read, for which its layer has waited long enough; by then, or while it waits for the next attempt.
        TimedOut { by_then: bool },
    }
    for lost in [
        Lost::Closed,
        Lost::WithItsServer,
        Lost::TimedOut { by_then: true },
        Lost::TimedOut { by_then: false },
    ] {
        let doubts = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&doubts);
        let events = move |event: Event<'_>| {
            if let Event::InDoubt(report) = event {
                seen.lock().unwrap().push(report.outcome);
            }
        };
        let wait = ConstantBuilder::new().with_delay(10 * SECOND);
        let retry = RetryReadOnly.attempt_timeout(5 * SECOND).backoff(wait);
        let hint = match lost {
            Lost::Closed => json!({ "readOnlyHint": false, "idempotentHint": true }),
            Lost::WithItsServer | Lost::TimedOut { .. } => json!({ "readOnlyHint": true }),
        };
        let (version, tools) = (ProtocolVersion::V2025_11_25, [reads("look"), listed("odd", hint)]);
        let (stack, mut server, mut servers) =
            trusting_stack_with(version, tools.to_vec(), retry, events).await;
        let odd = send(&stack, tool("odd"));
        assert_eq!(server.asked("tools/call").await["params"]["name"], "odd");
        if let Lost::TimedOut { by_then: false } = lost {
            sleep(8 * SECOND).await;
        }
        let mut tools = tools.to_vec();
        match lost {
            Lost::WithItsServer => tools[1] = listed("odd", json!({ "readOnlyHint": false })),
            _ => server.tools_changed().await,
        }
        sleep(SECOND).await;
        drop(server);
        if let Ok(Some(mut next)) = timeout(20 * SECOND, servers.recv()).await {
            agree(&mut next, version).await;
            list_tools(&mut next, vec![tools.clone()]).await;
            assert_eq!(serve(&mut next, "odd", &tools).await, 0, "{lost:?}: repeated");
        }
        let error = odd.await.unwrap().unwrap_err();
        assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Unknown, true), "{lost:?}: {error}");
        assert_eq!(*doubts.lock().unwrap(), [Some(Outcome::Unknown)], "{lost:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_waits_in_the_queue_while_its_annotation_is_taken_back_is_not_sent() {
    let sets = |sets: bool| listed("odd", json!({ "readOnlyHint": false, "idempotentHint": sets }));
    let (stack, mut server) =
        trusting_stack(ProtocolVersion::V2025_11_25, vec![reads("look"), sets(true)]).await;
    // It is done, and its answer is lost. Then the server does not read for a while.
    let odd = send(&stack, tool("odd"));
    assert_eq!(server.asked("tools/call").await["params"]["name"], "odd");
    sleep(5 * SECOND).await;
    let large = send(&stack, large_look());
    // The replay is queued by now.
    sleep(8 * SECOND).await;
    server.tools_changed().await;
    sleep(5 * SECOND).await;
    assert_eq!(serve(&mut server, "odd", &[reads("look"), sets(false)]).await, 0);
    large.await.unwrap().unwrap();
    let error = odd.await.unwrap().unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
    assert!(error.may_have_landed(), "{error}");
}

#[tokio::test(start_paused = true)]
async fn without_trust_the_tools_are_not_listed() {
    for version in ProtocolVersion::ALL {
        let mut lab = Lab::new();
        let (_connection, mut server) = lab.pair(version).await;
        server.tools_changed().await;
        server.is_quiet().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_list_without_an_end_is_none() {
    let mut lab = Lab::trusting();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.older("2025-11-25").await;
    for _ in 0..2 {
        let asked = server.asked("tools/list").await;
        server.answer(&asked, json!({ "tools": [reads("get")], "nextCursor": "2" })).await;
    }
    connecting.await.unwrap().unwrap();
    assert_eq!(lab.classify(&tool("get")), None);
}

#[tokio::test(start_paused = true)]
async fn a_list_whose_pages_come_slowly_does_not_hold_up_the_connect_for_long() {
    let mut lab = Lab::trusting();
    let begun = Instant::now();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.older("2025-11-25").await;
    let endless = tokio::spawn(async move {
        let mut page = 0;
        while let Some(asked) = server.read().await {
            if asked["method"] == "tools/list" {
                sleep(Duration::from_secs(9)).await;
                page += 1;
                let next = format!("{page}");
                server.answer(&asked, json!({ "tools": [reads("get")], "nextCursor": next })).await;
            }
        }
    });
    let connection = connecting.await.unwrap().unwrap();
    assert!(begun.elapsed() < Duration::from_secs(45), "{:?}", begun.elapsed());
    assert_eq!(lab.classify(&tool("get")), None);
    assert!(connection.closure().is_none());
    endless.abort();
}

#[tokio::test(start_paused = true)]
async fn a_server_that_did_not_say_that_its_tools_change_is_heard_all_the_same() {
    let mut lab = Lab::trusting();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    let discover = server.asked("server/discover").await;
    server.refuse(&discover, -32601, Value::Null).await;
    let initialize = server.asked("initialize").await;
    server
        .answer(&initialize, json!({ "protocolVersion": "2025-11-25", "capabilities": { "tools": {} } }))
        .await;
    server.asked("notifications/initialized").await;
    list_tools(&mut server, vec![vec![reads("get")]]).await;
    let _connection = connecting.await.unwrap().unwrap();
    assert_eq!(lab.classify(&tool("get")), READ);
    server.tools_changed().await;
    let listing = timeout(Duration::from_secs(5), list_tools(&mut server, vec![vec![]]));
    listing.await.expect("the tools are listed again");
    server.is_quiet().await;
    assert_eq!(lab.classify(&tool("get")), None);
}

#[tokio::test(start_paused = true)]
async fn a_server_of_the_newer_era_that_tells_without_having_said_so_is_heard_too() {
    let mut lab = Lab::trusting();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    let discover = server.asked("server/discover").await;
    let mut silent = discovered();
    silent["capabilities"] = json!({ "tools": {} });
    server.answer(&discover, silent).await;
    list_tools(&mut server, vec![vec![reads("get")]]).await;
    let _connection = connecting.await.unwrap().unwrap();
    assert_eq!(lab.classify(&tool("get")), READ);
    server.tools_changed().await;
    let listing = timeout(Duration::from_secs(5), list_tools(&mut server, vec![vec![reads("get")]]));
    listing.await.expect("the tools are listed again");
    server.is_quiet().await;
    assert_eq!(lab.classify(&tool("get")), READ);
}

#[tokio::test(start_paused = true)]
async fn the_watch_over_the_tools_keeps_no_connection_open_and_begins_again_when_the_server_ends_it() {
    let mut lab = Lab::trusting();
    let connecting = lab.connect();
    let mut server = lab.server().await;
    server.modern().await;
    let own = server.asked("subscriptions/listen").await;
    server.acknowledge(&own).await;
    list_tools(&mut server, vec![vec![reads("get")]]).await;
    let connection = connecting.await.unwrap().unwrap();
    server.answer(&own, json!({})).await;
    server.asked("subscriptions/listen").await;
    list_tools(&mut server, vec![vec![]]).await;
    sleep(Duration::from_secs(1)).await;
    assert_eq!(lab.classify(&tool("get")), None);
    let closed = connection.closed();
    drop(connection);
    timeout(Duration::from_secs(1), closed).await.unwrap();
}

// ----- what is handed back

#[tokio::test(start_paused = true)]
async fn a_request_that_is_handed_back_is_as_the_caller_gave_it() {
    let mut lab = Lab::new();
    let (connection, server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    drop(server);
    connection.closed().await;
    for call in [request("tools/call", json!({ "name": "x" })), request("ping", Value::Null), listen()] {
        let params = call.raw_params().map(|params| params.get().to_owned());
        let mut error = connection.request(call).await.unwrap_err();
        assert_eq!(error.delivery(), Delivery::NotSent);
        let back = error.take_request::<Request>().unwrap();
        assert_eq!(back.raw_params().map(|params| params.get().to_owned()), params);
    }
}

#[test]
fn a_stream_has_no_deadline_unless_it_is_given_one() {
    assert_eq!(listen().context().deadline(), crate::Deadline::Never);
    let limited = listen().within(Duration::from_secs(1));
    assert!(limited.context().deadline().instant().is_some());
    assert_eq!(tool("x").context().deadline(), crate::Deadline::Inherit);
}

#[tokio::test(start_paused = true)]
async fn a_stream_heeds_the_deadline_that_it_is_given() {
    let mut lab = Lab::new();
    let (connection, mut server) = lab.pair(ProtocolVersion::V2026_07_28).await;
    let began = Instant::now();
    let stream = tokio::spawn(connection.request(listen().within(Duration::from_secs(60))));
    let asked = server.asked("subscriptions/listen").await;
    server.acknowledge(&asked).await;
    let error = stream.await.unwrap().unwrap_err();
    assert!(matches!(error.cause(), Cause::Deadline));
    assert_eq!(began.elapsed().as_secs(), 60);
}

// ----- the server's side

/// Answers `roots/list`; never anything else.
#[derive(Clone, Default)]
struct User(Arc<Mutex<Vec<String>>>);

impl Handler for User {
    async fn request(&self, request: ServerRequest) -> Result<Response, ServerError> {
        self.0.lock().unwrap().push(request.method().to_owned());
        if request.method() == "roots/list" {
            return Ok(Response::new(json!({ "roots": [] })).unwrap());
        }
        pending().await
    }

    fn notification(&self, notification: Notification) {
        self.0.lock().unwrap().push(notification.method().to_owned());
    }
}

#[tokio::test(start_paused = true)]
async fn the_servers_questions_reach_the_same_handler_and_lost_answers_are_counted() {
    for version in older_versions() {
        let user = User::default();
        let mut lab = Lab::new();
        lab.settings.handler = Arc::new(user.clone());
        for generation in 1..=2 {
            let (connection, mut server) = lab.pair(version).await;
            let ask = |id: &str, method: &str| json!({ "jsonrpc": "2.0", "id": id, "method": method });
            server.write(ask("a", "ping")).await;
            assert_eq!(server.read().await.unwrap(), json!({ "jsonrpc": "2.0", "id": "a", "result": {} }));
            server.write(ask("b", "roots/list")).await;
            assert_eq!(server.read().await.unwrap()["result"], json!({ "roots": [] }));
            server.write(ask("c", "sampling/createMessage")).await;
            server.write(ask("d", "elicitation/create")).await;
            server.tools_changed().await;
            sleep(Duration::from_secs(1)).await;
            drop(server);
            connection.closed().await;
            assert_eq!(lab.memory.stats.dropped_answers(), 2 * generation);
        }
        let each = [
            "roots/list",
            "sampling/createMessage",
            "elicitation/create",
            "notifications/tools/list_changed",
        ];
        let mut seen = user.0.lock().unwrap().clone();
        let mut expected = [each, each].concat();
        seen.sort();
        expected.sort();
        assert_eq!(seen, expected);
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_handler_only_ping_is_answered() {
    let mut lab = Lab::new();
    let (_connection, mut server) = lab.pair(ProtocolVersion::V2025_11_25).await;
    server.write(json!({ "jsonrpc": "2.0", "id": 2, "method": "roots/list" })).await;
    assert_eq!(server.read().await.unwrap()["error"]["code"], -32601);
}

// ----- the connector

fn is_send_and_sync<T: Send + Sync + 'static>(_: &T) {}

#[tokio::test]
async fn what_can_be_seen_to_be_wrong_is_seen_before_the_start() {
    let server = || stdio(Command::new(std::env::current_exe().unwrap()));
    is_send_and_sync(&server());
    server().validate().unwrap();
    let wrong = server().protocol_version(ProtocolVersion::V2026_07_28);
    for error in [wrong.validate().unwrap_err().to_string(), {
        let mut wrong = wrong;
        wrong.call(()).await.unwrap_err().to_string()
    }] {
        assert!(error.contains("2026-07-28"), "{error}");
    }
    if cfg!(unix) {
        let missing = stdio(Command::new("goaround-no-such-program")).validate().unwrap_err();
        assert!(missing.to_string().contains("goaround-no-such-program"), "{missing}");
    }
}

#[test]
fn the_classifier_is_that_of_the_rules() {
    let classifier = stdio(Command::new("x")).tools(ToolRules::new().read_only(["get"])).classifier();
    assert_eq!(classifier(&tool("get")), Some((Effect::ReadOnly, Basis::Caller)));
    assert_eq!(classifier(&tool("pay")), None);
}

#[test]
fn a_calls_future_is_send_and_small() {
    fn is_send<T: Send>() {}
    is_send::<ResponseFuture>();
    assert!(size_of::<ResponseFuture>() <= 64, "{}", size_of::<ResponseFuture>());
    let _: fn(CallError) = |_| {};
}

// ----- progress, and questions to the user

const SECOND: Duration = Duration::from_secs(1);

impl Server {
    async fn progress(&mut self, token: &Value) {
        let params = json!({ "progressToken": token, "progress": 1 });
        self.write(json!({ "jsonrpc": "2.0", "method": "notifications/progress", "params": params })).await;
    }
}

fn within_a_minute(
    connection: &Connection,
    call: Request,
) -> JoinHandle<(Duration, Result<Response, CallError>)> {
    let service = DeadlineLayer::new(60 * SECOND).layer(connection.clone());
    let began = Instant::now();
    tokio::spawn(async move {
        let result = service.oneshot(call).await;
        (began.elapsed(), result)
    })
}

#[tokio::test(start_paused = true)]
async fn progress_with_the_calls_own_token_extends_its_idle_limit_up_to_the_maximum() {
    for version in ProtocolVersion::ALL {
        let user = User::default();
        let mut lab = Lab::new();
        lab.settings.handler = Arc::new(user.clone());
        let (connection, mut server) = lab.pair(version).await;
        for own in [None, Some(json!(7)), Some(json!("mine"))] {
            user.0.lock().unwrap().clear();
            let call = match &own {
                None => request("tools/call", json!({ "name": "x" })),
                Some(token) => {
                    request("tools/call", json!({ "name": "x", "_meta": { "progressToken": token } }))
                }
            };
            let calling = within_a_minute(&connection, call.idle(2 * SECOND).within(10 * SECOND));
            let asked = server.asked("tools/call").await;
            let token = asked["params"]["_meta"]["progressToken"].clone();
            match &own {
                None => assert!(token.is_string(), "{asked}"),
                Some(own) => assert_eq!(token, *own),
            }
            let modern = asked["params"]["_meta"].get("io.modelcontextprotocol/protocolVersion");
            assert_eq!(modern.is_some(), !version.has_handshake());
            for _ in 0..6 {
                sleep(3 * SECOND / 2).await;
                assert!(!calling.is_finished());
                server.progress(&token).await;
            }
            let (took, result) = calling.await.unwrap();
            let error = result.unwrap_err();
            assert_eq!((took.as_secs(), error.outcome()), (10, Outcome::Unknown));
            assert_eq!(*user.0.lock().unwrap(), ["notifications/progress"; 6]);
            server.asked("notifications/cancelled").await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_else_extends_it_and_the_call_ends_with_what_is_known() {
    for version in ProtocolVersion::ALL {
        let mut lab = Lab::new();
        let (connection, mut server) = lab.pair(version).await;
        let read = tool("x").read_only();
        for (call, outcome) in [(tool("x"), Outcome::Unknown), (read, Outcome::NoAnswer)] {
            // Another call's token is of no use, and neither is one that looks like it.
            let other = within_a_minute(&connection, tool("other").idle(59 * SECOND));
            let others = server.asked("tools/call").await["params"]["_meta"]["progressToken"].clone();
            let calling = within_a_minute(&connection, call.idle(2 * SECOND));
            let own = server.asked("tools/call").await["params"]["_meta"]["progressToken"].clone();
            assert_ne!(own, others);
            sleep(SECOND).await;
            for token in [others, json!(1), json!("unknown"), Value::Null, json!([own])] {
                server.progress(&token).await;
            }
            let (took, result) = calling.await.unwrap();
            let error = result.unwrap_err();
            assert_eq!((took.as_secs(), error.outcome()), (2, outcome));
            assert!(error.to_string().contains("said nothing of it for 2s"), "{error}");
            // Late progress changes nothing.
            server.progress(&own).await;
            server.asked("notifications/cancelled").await;
            other.abort();
            server.asked("notifications/cancelled").await;
        }
        // A call that asks for no progress gets no token.
        let asked = exchange(&connection, &mut server, tool("x").pause_while_asking(), json!({})).await.0;
        assert_eq!(asked["params"]["_meta"].get("progressToken"), None);
        assert_eq!(asked["params"].get("_meta").is_some(), !version.has_handshake());

        // Behind a pipe that is full, nothing was sent.
        let large = request("tools/call", json!({ "name": "x", "text": "x".repeat(200_000) }));
        let large = within_a_minute(&connection, large);
        sleep(SECOND).await;
        let (took, result) = within_a_minute(&connection, tool("x").idle(2 * SECOND)).await.unwrap();
        assert_eq!((took.as_secs(), result.unwrap_err().outcome()), (2, Outcome::NotDone));
        large.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_keeps_the_idle_limit_and_has_a_token_of_its_own() {
    for version in ProtocolVersion::ALL {
        let mut lab = Lab::new();
        let (tell, settings, memory) = (lab.tell.clone(), Arc::new(lab.settings.clone()), lab.memory.clone());
        let connector =
            tower::service_fn(move |()| connect(Wire(tell.clone()), settings.clone(), memory.clone()));
        let client = ServiceBuilder::new()
            .layer(DeadlineLayer::new(60 * SECOND))
            .layer(RetryReadOnly)
            .layer(ReconnectLayer::once())
            .service(connector);
        let call = tool("x").read_only().idle(2 * SECOND);
        let calling = tokio::spawn(client.oneshot(call));
        let mut tokens = Vec::new();
        for last in [false, true] {
            let mut server = lab.server().await;
            match version.has_handshake() {
                true => drop(server.older(version.as_str()).await),
                false => drop(server.modern().await),
            }
            let asked = server.asked("tools/call").await;
            let token = asked["params"]["_meta"]["progressToken"].clone();
            assert!(token.is_string() && !tokens.contains(&token), "{asked}");
            // From the hand-over on there is the whole limit again.
            sleep(3 * SECOND / 2).await;
            if last {
                server.progress(&token).await;
                sleep(3 * SECOND / 2).await;
                assert!(!calling.is_finished());
                for of_the_first in &tokens {
                    server.progress(of_the_first).await;
                }
                let began = Instant::now();
                while !calling.is_finished() {
                    sleep(SECOND / 10).await;
                }
                assert!(began.elapsed() < SECOND);
            }
            tokens.push(token);
        }
        assert_eq!(calling.await.unwrap().unwrap_err().outcome(), Outcome::NoAnswer);
    }
}

#[tokio::test(start_paused = true)]
async fn a_question_ends_with_its_connection() {
    let mut lab = Lab::new();
    lab.settings.handler = Arc::new(Slow);
    let (tell, settings, memory) = (lab.tell.clone(), Arc::new(lab.settings.clone()), lab.memory.clone());
    let connector =
        tower::service_fn(move |()| connect(Wire(tell.clone()), settings.clone(), memory.clone()));
    let client = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(RetryReadOnly)
        .layer(ReconnectLayer::once())
        .service(connector);
    let calling = tokio::spawn(client.oneshot(tool("x").read_only().idle(2 * SECOND).pause_while_asking()));
    let mut first = lab.server().await;
    first.older("2025-11-25").await;
    first.asked("tools/call").await;
    let question = json!({ "seconds": 100, "message": "Which one?" });
    let ask = json!({ "jsonrpc": "2.0", "id": 1, "method": "elicitation/create", "params": question });
    first.write(ask).await;
    sleep(50 * SECOND).await;
    assert!(!calling.is_finished());
    drop(first);
    let mut second = lab.server().await;
    second.older("2025-11-25").await;
    second.asked("tools/call").await;
    let began = Instant::now();
    assert_eq!(calling.await.unwrap().unwrap_err().outcome(), Outcome::NoAnswer);
    assert_eq!(began.elapsed().as_secs(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_question_that_the_server_takes_back_holds_up_nothing() {
    for id in [json!(7), json!("seven")] {
        let mut lab = Lab::new();
        lab.settings.handler = Arc::new(Slow);
        let (connection, mut server) = lab.pair(ProtocolVersion::V2025_11_25).await;
        let call = within_a_minute(&connection, tool("a").idle(3 * SECOND).pause_while_asking());
        server.asked("tools/call").await;
        let question = json!({ "seconds": 1_000_000, "message": "Which one?" });
        let ask = |id: &Value| json!({ "jsonrpc": "2.0", "id": id, "method": "elicitation/create", "params": question });
        server.write(ask(&id)).await;
        server.write(ask(&json!(8))).await;
        let take_back = |id: &Value| json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": { "requestId": id } });
        sleep(10 * SECOND).await;
        for other in [json!(9), json!(null), json!([7]), json!(8), json!(8)] {
            server.write(take_back(&other)).await;
        }
        sleep(10 * SECOND).await;
        assert!(!call.is_finished());
        server.write(take_back(&id)).await;
        let (took, result) = timeout(60 * SECOND, call).await.unwrap().unwrap();
        assert_eq!((took.as_secs(), result.unwrap_err().outcome()), (23, Outcome::Unknown));

        // In one go, before its handler runs.
        let call = within_a_minute(&connection, tool("b").within(3 * SECOND).pause_while_asking());
        while server.read().await.unwrap()["method"] != "tools/call" {}
        let both = format!("{}\n{}\n", ask(&json!(10)), take_back(&json!(10)));
        server.0.write_all(both.as_bytes()).await.unwrap();
        let (took, _) = timeout(60 * SECOND, call).await.unwrap().unwrap();
        assert_eq!(took.as_secs(), 3);
    }
}

/// Drops are counted, and nothing is answered but `roots/list`.
#[derive(Default)]
struct Stubborn(Arc<AtomicUsize>);

impl Handler for Stubborn {
    async fn request(&self, request: ServerRequest) -> Result<Response, ServerError> {
        struct Dropped(Arc<AtomicUsize>);
        impl Drop for Dropped {
            fn drop(&mut self) {
                self.0.fetch_add(1, Ordering::Relaxed);
            }
        }
        if request.method() == "roots/list" {
            return Ok(Response::new(json!({ "roots": [] })).unwrap());
        }
        let _dropped = Dropped(Arc::clone(&self.0));
        pending().await
    }
}

#[tokio::test(start_paused = true)]
async fn a_question_that_is_taken_back_is_not_answered_and_leaves_its_place_to_another() {
    for method in ["elicitation/create", "sampling/createMessage"] {
        let mut lab = Lab::new();
        let handler = Stubborn::default();
        let dropped = Arc::clone(&handler.0);
        lab.settings.handler = Arc::new(handler);
        let (connection, mut server) = lab.pair(ProtocolVersion::V2025_11_25).await;
        let ask =
            |id: &Value, method: &str| json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": {} });
        let take_back = |id: &Value| {
            let params = json!({ "requestId": id, "reason": "too late" });
            json!({ "jsonrpc": "2.0", "method": "notifications/cancelled", "params": params })
        };
        // As many as are answered at once, and then as many again: some before their handlers run.
        for nth in 0..128 {
            let id = if nth % 2 == 0 { json!(nth) } else { json!(format!("q{nth}")) };
            server.write(ask(&id, method)).await;
            if nth % 3 > 0 {
                sleep(SECOND).await;
            }
            server.write(take_back(&id)).await;
        }
        sleep(SECOND).await;
        assert!(dropped.load(Ordering::Relaxed) >= 80, "{dropped:?}");
        for method in ["ping", "roots/list"] {
            server.write(ask(&json!(method), method)).await;
            let answer = server.read().await.unwrap();
            assert_eq!((&answer["id"], &answer["error"]), (&json!(method), &Value::Null));
        }
        // One that is not taken back keeps its place, and what was answered already is.
        server.write(ask(&json!("stays"), method)).await;
        for other in [json!("ping"), json!("roots/list"), json!("unknown"), json!(null), json!({})] {
            server.write(take_back(&other)).await;
        }
        server.is_quiet().await;
        let before = dropped.load(Ordering::Relaxed);
        drop(connection);
        sleep(SECOND).await;
        // What was taken back is owed to nobody, and so is not lost.
        assert_eq!(dropped.load(Ordering::Relaxed), before + 1);
        assert_eq!(lab.memory.stats.dropped_answers(), 1);
    }
}

/// A user who takes his time to answer: the seconds in the question, or a panic.
struct Slow;

impl Handler for Slow {
    async fn request(&self, request: ServerRequest) -> Result<Response, ServerError> {
        let question: Value = request.params().unwrap();
        sleep(question["seconds"].as_u64().unwrap() as u32 * SECOND).await;
        assert_ne!(question["message"], "panic");
        Ok(Response::new(json!({ "action": "decline" })).unwrap())
    }
}

#[tokio::test(start_paused = true)]
async fn while_the_user_is_asked_the_calls_that_asked_for_it_stand_still() {
    for (version, message) in
        older_versions().flat_map(|version| ["Which one?", "panic"].map(|message| (version, message)))
    {
        let mut lab = Lab::new();
        lab.settings.handler = Arc::new(Slow);
        let (connection, mut server) = lab.pair(version).await;
        let ask = |id: u64, method: &str, seconds: u64| {
            let params = json!({ "message": message, "seconds": seconds });
            json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params })
        };
        let idle = within_a_minute(&connection, tool("a").idle(3 * SECOND).pause_while_asking());
        let most = within_a_minute(&connection, tool("b").within(5 * SECOND).pause_while_asking());
        let other = within_a_minute(&connection, tool("c").within(5 * SECOND));
        for _ in 0..3 {
            server.asked("tools/call").await;
        }
        // A question that is none to the user pauses nothing.
        server.write(ask(1, "sampling/createMessage", 1)).await;
        sleep(SECOND).await;
        server.write(ask(2, "elicitation/create", 100)).await;
        sleep(50 * SECOND).await;
        server.write(ask(3, "elicitation/create", 100)).await;
        sleep(SECOND).await;
        assert_eq!(other.await.unwrap().0.as_secs(), 5);
        // A call that comes while the user is asked stands still from the beginning.
        let late = within_a_minute(&connection, tool("d").within(2 * SECOND).pause_while_asking());
        let mut ended = [0; 3];
        for (ended, call) in ended.iter_mut().zip([idle, most, late]) {
            let (took, result) = call.await.unwrap();
            assert_eq!(result.unwrap_err().outcome(), Outcome::Unknown);
            *ended = took.as_secs();
        }
        // The questions took from 1 to 151, the last call began at 52.
        assert_eq!(ended, [153, 155, 101]);
    }
}
