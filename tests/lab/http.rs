//! A raw HTTP/1.1 server on loopback that plays an MCP server: exact bytes where a test scripts them, an honest
//! server everywhere else. It keeps every request that it saw, and every effect that a tool had.
//!
//! Two tools: `append` has an effect, its argument `line`; `lines` tells all effects. Where nothing is scripted
//! the server has sessions, refuses the GET stream with 405, and answers everything else.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    collections::{HashSet, VecDeque},
    future::poll_fn,
    net::{Ipv4Addr, SocketAddr},
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    sync::{Notify, Semaphore},
    task::{AbortHandle, JoinSet},
    time::{Instant, sleep, timeout},
};

/// Longer than any test waits for something that comes.
const PATIENCE: Duration = Duration::from_secs(20);

// ===== What a server does with a request =====

#[derive(Clone)]
enum Step {
    /// A whole answer with its length: status line, further headers, body.
    Answer(String, Vec<(String, String)>, String),
    Bytes(Vec<u8>),
    /// As one chunk of the transfer encoding.
    Chunk(Vec<u8>),
    /// A chunk for each byte.
    Crumbs(Vec<u8>),
    Wait(Duration),
    /// Until a test opens it.
    Gate(Gate),
    /// The tool has its effect.
    Execute,
    /// All sessions are forgotten.
    Forget,
    /// One chunk again and again, until the client has gone.
    Repeat(Duration, Vec<u8>),
    /// Nothing more, until the client has gone.
    Stall,
    Close,
    Reset,
}

/// The bytes and events of one answer, in their order. In text, `$ID` stands for the request's id, `$STRING` for
/// the id as a string, `$TOKEN` for its progress token, `$CALL` for the id of the last call of a tool.
#[derive(Clone, Default)]
pub struct Reply(Vec<Step>);

/// What holds an answer back until a test opens it. Open it once for each answer.
#[derive(Clone)]
pub struct Gate(Arc<Semaphore>);

impl Gate {
    pub fn new() -> Self {
        Self(Arc::new(Semaphore::new(0)))
    }

    pub fn open(&self, answers: usize) {
        self.0.add_permits(answers);
    }
}

pub const JSON: (&str, &str) = ("Content-Type", "application/json");
pub const SSE: (&str, &str) = ("Content-Type", "text/event-stream");

impl Reply {
    /// Nothing so far.
    pub fn new() -> Self {
        Self::default()
    }

    /// A whole answer, as `404 Not Found`, with its `Content-Length`.
    pub fn http(status: &str, headers: &[(&str, &str)], body: impl Into<String>) -> Self {
        Self::new().then_http(status, headers, body)
    }

    /// A whole JSON answer with status 200.
    pub fn json(body: impl Into<String>) -> Self {
        Self::http("200 OK", &[JSON], body)
    }

    /// A result with the request's id.
    pub fn result(result: &Value) -> Self {
        Self::json(format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{result}}}"#))
    }

    /// An error with the request's id.
    pub fn error(code: i64, message: &str) -> Self {
        Self::json(format!(
            r#"{{"jsonrpc":"2.0","id":$ID,"error":{{"code":{code},"message":{}}}}}"#,
            json!(message)
        ))
    }

    /// The head of a stream of events in chunks.
    pub fn sse() -> Self {
        Self::new()
            .bytes("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
    }

    /// The head of a stream of events that ends with the connection.
    pub fn sse_until_close() -> Self {
        Self::new().bytes("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
    }

    /// A stream of one event, the request's result.
    pub fn sse_result(result: &Value) -> Self {
        Self::sse()
            .chunk(format!("data: {{\"jsonrpc\":\"2.0\",\"id\":$ID,\"result\":{result}}}\n\n"))
            .end_of_chunks()
    }

    pub fn then_http(mut self, status: &str, headers: &[(&str, &str)], body: impl Into<String>) -> Self {
        let headers = headers.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        self.0.push(Step::Answer(status.to_owned(), headers, body.into()));
        self
    }

    fn then(mut self, step: Step) -> Self {
        self.0.push(step);
        self
    }

    pub fn bytes(self, bytes: impl Into<Vec<u8>>) -> Self {
        self.then(Step::Bytes(bytes.into()))
    }

    pub fn chunk(self, bytes: impl Into<Vec<u8>>) -> Self {
        self.then(Step::Chunk(bytes.into()))
    }

    /// A chunk for each byte.
    pub fn crumbs(self, bytes: impl Into<Vec<u8>>) -> Self {
        self.then(Step::Crumbs(bytes.into()))
    }

    /// The chunk that says that there are no more.
    pub fn end_of_chunks(self) -> Self {
        self.bytes("0\r\n\r\n")
    }

    pub fn wait(self, wait: Duration) -> Self {
        self.then(Step::Wait(wait))
    }

    pub fn gate(self, gate: &Gate) -> Self {
        self.then(Step::Gate(gate.clone()))
    }

    pub fn executes(self) -> Self {
        self.then(Step::Execute)
    }

    pub fn forgets(self) -> Self {
        self.then(Step::Forget)
    }

    pub fn repeat(self, every: Duration, chunk: impl Into<Vec<u8>>) -> Self {
        self.then(Step::Repeat(every, chunk.into()))
    }

    pub fn stall(self) -> Self {
        self.then(Step::Stall)
    }

    pub fn close(self) -> Self {
        self.then(Step::Close)
    }

    pub fn reset(self) -> Self {
        self.then(Step::Reset)
    }

    /// This, after the effect.
    pub fn after_the_effect(mut self) -> Self {
        self.0.insert(0, Step::Execute);
        self
    }
}

// ===== What a server saw =====

/// One request.
#[derive(Clone, Debug)]
pub struct Seen {
    /// The how manyth request of the server it is.
    pub nth: usize,
    /// The how manyth connection of the server it came on.
    pub connection: usize,
    pub at: Instant,
    pub verb: String,
    pub path: String,
    pub headers: Vec<(String, String)>,
    pub session: Option<String>,
    pub message: Value,
    /// The id of the last call of a tool, up to this.
    pub last_call: Value,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        let mut headers = self.headers.iter();
        headers.find(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.as_str())
    }

    /// The JSON-RPC method; empty where there is none.
    pub fn method(&self) -> &str {
        self.message["method"].as_str().unwrap_or_default()
    }

    pub fn id(&self) -> &Value {
        &self.message["id"]
    }

    pub fn tool(&self) -> Option<&str> {
        match self.method() {
            "tools/call" => self.message["params"]["name"].as_str(),
            _ => None,
        }
    }

    pub fn arguments(&self) -> &Value {
        &self.message["params"]["arguments"]
    }

    /// Short, for comparisons: the tool or method, or the verb, and the session.
    pub fn brief(&self) -> String {
        let what = self.tool().unwrap_or(match self.method() {
            "" => &self.verb,
            method => method,
        });
        match &self.session {
            Some(session) => format!("{what} {session}"),
            None => what.to_owned(),
        }
    }

    fn fill(&self, text: &[u8]) -> Vec<u8> {
        let Ok(text) = std::str::from_utf8(text) else { return text.to_vec() };
        if !text.contains('$') {
            return text.as_bytes().to_vec();
        }
        let id = self.id();
        let string = id.as_str().map_or_else(|| id.to_string(), str::to_owned);
        let token = &self.message["params"]["_meta"]["progressToken"];
        text.replace("$ID", &id.to_string())
            .replace("$STRING", &Value::from(string).to_string())
            .replace("$TOKEN", &token.to_string())
            .replace("$CALL", &self.last_call.to_string())
            .into_bytes()
    }
}

/// Which requests a script is for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum On {
    Any,
    Post,
    Get,
    Delete,
    Method(&'static str),
    Tool(&'static str),
}

impl On {
    fn matches(self, seen: &Seen) -> bool {
        match self {
            On::Any => true,
            On::Post => seen.verb == "POST",
            On::Get => seen.verb == "GET",
            On::Delete => seen.verb == "DELETE",
            On::Method(method) => seen.method() == method,
            On::Tool(tool) => seen.tool() == Some(tool),
        }
    }
}

// ===== The server =====

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Era {
    /// A session that begins with `initialize`.
    Sessions,
    /// The same at 2026-07-28, by a server that compares the method in a request's head with that in its body.
    NewSessions,
    /// `initialize`, and no session.
    NoSessions,
    /// `server/discover`, and no session: 2026-07-28.
    Modern,
}

struct Script {
    on: On,
    reply: Reply,
    /// Whether it is for one request only.
    once: bool,
}

struct State {
    era: Era,
    sessions: HashSet<String>,
    issued: usize,
    unknown_session: Reply,
    scripts: VecDeque<Script>,
    seen: Vec<Seen>,
    last_call: Value,
    /// Requests whose clients went while the answer was outstanding, by their number.
    left: Vec<usize>,
    effects: Vec<String>,
}

struct Shared {
    state: Mutex<State>,
    changed: Notify,
    connections: AtomicUsize,
}

pub struct Server {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// The listener's task, which owns those of its connections.
    listener: Mutex<Option<AbortHandle>>,
}

impl Server {
    pub async fn start() -> Self {
        Self::of(Era::Sessions).await
    }

    pub async fn of(era: Era) -> Self {
        let state = State {
            era,
            sessions: HashSet::new(),
            issued: 0,
            unknown_session: session_not_found(),
            scripts: VecDeque::new(),
            seen: Vec::new(),
            last_call: Value::Null,
            left: Vec::new(),
            effects: Vec::new(),
        };
        let shared = Arc::new(Shared { state: state.into(), changed: Notify::new(), connections: 0.into() });
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let server = Self { address, shared, listener: Mutex::new(None) };
        server.listen(listener);
        server
    }

    fn listen(&self, listener: TcpListener) {
        let shared = Arc::clone(&self.shared);
        let task = tokio::spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                tokio::select! {
                    accepted = listener.accept() => {
                        let Ok((stream, _)) = accepted else { continue };
                        connections.spawn(serve(stream, Arc::clone(&shared)));
                    }
                    Some(_) = connections.join_next(), if !connections.is_empty() => {}
                }
            }
        });
        *self.listener.lock().expect("no panic under it") = Some(task.abort_handle());
    }

    /// The process dies: the listener and all connections close.
    pub fn stop(&self) {
        if let Some(task) = self.listener.lock().expect("no panic under it").take() {
            task.abort();
        }
        self.state().sessions.clear();
    }

    /// It is there again, at the same address, and knows no session.
    pub async fn start_again(&self) {
        let begin = Instant::now();
        let listener = loop {
            match TcpListener::bind(self.address).await {
                Ok(listener) => break listener,
                Err(error) => assert!(begin.elapsed() < PATIENCE, "{error}"),
            }
            sleep(Duration::from_millis(2)).await;
        };
        self.listen(listener);
    }

    pub fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.shared.state()
    }

    /// What becomes of the next such request. Of more, the first that matches is used first.
    pub fn on(&self, on: On, reply: Reply) -> &Self {
        self.state().scripts.push_back(Script { on, reply, once: true });
        self
    }

    /// What becomes of all such requests, from now on.
    pub fn always(&self, on: On, reply: Reply) -> &Self {
        self.state().scripts.push_back(Script { on, reply, once: false });
        self
    }

    /// From now on an honest server.
    pub fn heal(&self) {
        self.state().scripts.clear();
    }

    /// What becomes of a request whose session is not known; [`session_not_found`] by default.
    pub fn unknown_session(&self, reply: Reply) -> &Self {
        self.state().unknown_session = reply;
        self
    }

    pub fn forget_sessions(&self) {
        self.state().sessions.clear();
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.state().seen.clone()
    }

    /// The requests that were calls of that tool.
    pub fn calls(&self, tool: &str) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.tool() == Some(tool)).collect()
    }

    /// The requests with that method.
    pub fn requests(&self, method: &str) -> Vec<Seen> {
        self.seen().into_iter().filter(|seen| seen.method() == method).collect()
    }

    /// How many sessions it has issued.
    pub fn sessions(&self) -> usize {
        self.state().issued
    }

    /// How many connections were made to it.
    pub fn connections(&self) -> usize {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// The effects of all calls, in their order.
    pub fn effects(&self) -> Vec<String> {
        self.state().effects.clone()
    }

    /// Whether the client went while that request waited for its answer.
    pub fn left(&self, seen: &Seen) -> bool {
        self.state().left.contains(&seen.nth)
    }

    /// Waits until what it saw fulfils that.
    pub async fn until(&self, fulfilled: impl Fn(&[Seen]) -> bool) {
        let wait = async {
            loop {
                let changed = self.shared.changed.notified();
                if fulfilled(&self.seen()) {
                    return;
                }
                changed.await;
            }
        };
        if timeout(PATIENCE, wait).await.is_err() {
            let seen: Vec<_> = self.seen().iter().map(Seen::brief).collect();
            panic!("the server saw only {seen:?}");
        }
    }

    /// Waits until so many calls of that tool have come.
    pub async fn until_called(&self, tool: &str, times: usize) {
        self.until(|seen| seen.iter().filter(|seen| seen.tool() == Some(tool)).count() >= times).await;
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().expect("no panic under it")
    }

    /// Notes a request, and says what becomes of it.
    fn reply(&self, mut seen: Seen) -> (Seen, Reply) {
        let mut state = self.state();
        seen.nth = state.seen.len();
        if seen.tool().is_some() {
            state.last_call = seen.id().clone();
        }
        seen.last_call = state.last_call.clone();
        state.seen.push(seen.clone());
        let scripted = state.scripts.iter().position(|script| script.on.matches(&seen));
        let reply = match scripted {
            Some(at) if state.scripts[at].once => state.scripts.remove(at).map(|script| script.reply),
            Some(at) => Some(state.scripts[at].reply.clone()),
            None => None,
        };
        let reply = reply.unwrap_or_else(|| state.honest(&seen));
        drop(state);
        self.changed.notify_waiters();
        (seen, reply)
    }
}

/// What the protocol wants for a session that has ended.
pub fn session_not_found() -> Reply {
    let body = r#"{"jsonrpc":"2.0","error":{"code":-32001,"message":"Session not found"},"id":null}"#;
    Reply::http("404 Not Found", &[JSON], body)
}

/// What server-everything says instead.
pub fn no_valid_session() -> Reply {
    let body = concat!(
        r#"{"jsonrpc":"2.0","error":{"code":-32000,"#,
        r#""message":"Bad Request: No valid session ID provided"},"id":null}"#
    );
    Reply::http("400 Bad Request", &[JSON], body)
}

/// What an honest server answers to a call of `append`.
pub fn appended() -> Value {
    json!({ "content": [{ "type": "text", "text": "appended" }] })
}

impl State {
    fn honest(&mut self, seen: &Seen) -> Reply {
        let known = seen.session.as_ref().is_some_and(|session| self.sessions.contains(session));
        if matches!(self.era, Era::Sessions | Era::NewSessions) && !known && seen.method() != "initialize" {
            return self.unknown_session.clone();
        }
        match seen.verb.as_str() {
            "POST" => {}
            "DELETE" => {
                self.sessions.remove(seen.session.as_deref().unwrap_or_default());
                return Reply::http("200 OK", &[], "");
            }
            _ => return Reply::http("405 Method Not Allowed", &[("Allow", "POST, DELETE")], ""),
        }
        if seen.id().is_null() || seen.method().is_empty() {
            return Reply::http("202 Accepted", &[], "");
        }
        match (seen.method(), self.era) {
            ("initialize", Era::Modern) => Reply::http(
                "400 Bad Request",
                &[JSON],
                r#"{"jsonrpc":"2.0","id":$ID,"error":{"code":-32601,"message":"Method not found"}}"#,
            ),
            ("initialize", era) => self.initialize(seen, era),
            ("server/discover", Era::Modern) => self.result(json!({
                "supportedVersions": ["2026-07-28"],
                "capabilities": { "tools": {} },
                "ttlMs": 0,
                "cacheScope": "private",
            })),
            ("ping", Era::NewSessions)
                if seen.header("mcp-method").is_some_and(|method| method != "ping") =>
            {
                let error = r#"{"jsonrpc":"2.0","id":$ID,"error":{"code":-32020,"message":"Mcp-Method"}}"#;
                Reply::http("400 Bad Request", &[JSON], error)
            }
            ("ping", _) => self.result(json!({})),
            ("tools/list", _) => self.result(json!({ "tools": [
                {
                    "name": "append",
                    "inputSchema": { "type": "object", "properties": { "line": { "type": "string" } } },
                },
                {
                    "name": "lines",
                    "inputSchema": { "type": "object" },
                    "annotations": { "readOnlyHint": true },
                },
            ], "ttlMs": 0, "cacheScope": "private" })),
            ("tools/call", _) => match seen.tool() {
                Some("append") => {
                    let mut result = appended();
                    self.complete(&mut result);
                    Reply::result(&result).after_the_effect()
                }
                Some("lines") => {
                    let lines = json!({ "result": self.effects });
                    let text = lines.to_string();
                    self.result(json!({
                        "content": [{ "type": "text", "text": text }],
                        "structuredContent": lines,
                    }))
                }
                _ => Reply::error(-32602, "Unknown tool"),
            },
            _ => Reply::error(-32601, "Method not found"),
        }
    }

    fn complete(&self, result: &mut Value) {
        if self.era == Era::Modern {
            result["resultType"] = "complete".into();
        }
    }

    fn result(&self, mut result: Value) -> Reply {
        self.complete(&mut result);
        Reply::result(&result)
    }

    fn initialize(&mut self, seen: &Seen, era: Era) -> Reply {
        let asked = seen.message["params"]["protocolVersion"].as_str().unwrap_or_default();
        let result = json!({
            "protocolVersion": if era == Era::NewSessions { asked } else { asked.min("2025-11-25") },
            "capabilities": { "tools": {} },
            "serverInfo": { "name": "raw", "version": "1" },
        });
        if era == Era::NoSessions {
            return Reply::result(&result);
        }
        self.issued += 1;
        let session = format!("s{}", self.issued);
        self.sessions.insert(session.clone());
        let body = format!(r#"{{"jsonrpc":"2.0","id":$ID,"result":{result}}}"#);
        Reply::http("200 OK", &[JSON, ("Mcp-Session-Id", &session)], body)
    }
}

// ===== A connection =====

/// What is left of a connection after an answer.
enum End {
    Open,
    Closed,
}

async fn serve(mut stream: TcpStream, shared: Arc<Shared>) {
    let connection = shared.connections.fetch_add(1, Ordering::Relaxed) + 1;
    let _ = stream.set_nodelay(true);
    let mut buffer = Vec::new();
    while let Some(request) = read_request(&mut stream, &mut buffer, connection).await {
        let (seen, reply) = shared.reply(request);
        if let End::Closed = play(&mut stream, reply, &seen, &shared).await {
            return;
        }
    }
}

/// The next whole request; `None` if the client goes before that, or speaks something else.
async fn read_request(stream: &mut TcpStream, buffer: &mut Vec<u8>, connection: usize) -> Option<Seen> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break at;
        }
        read_more(stream, buffer).await?;
    };
    let head = String::from_utf8(buffer.drain(..end + 4).take(end).collect()).ok()?;
    let mut lines = head.split("\r\n");
    let mut words = lines.next()?.split(' ');
    let (verb, path) = (words.next()?.to_owned(), words.next()?.to_owned());
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.trim().to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let header =
        |name: &str| headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str());
    let body = match header("transfer-encoding") {
        Some(_) => read_chunks(stream, buffer).await?,
        None => {
            let length = header("content-length").map_or(Ok(0), str::parse).ok()?;
            read_exactly(stream, buffer, length).await?
        }
    };
    let session = header("mcp-session-id").map(str::to_owned);
    let message = serde_json::from_slice(&body).unwrap_or_default();
    Some(Seen {
        nth: 0,
        connection,
        at: Instant::now(),
        verb,
        path,
        session,
        headers,
        message,
        last_call: Value::Null,
    })
}

async fn read_more(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    match stream.read_buf(buffer).await {
        Ok(1..) => Some(()),
        _ => None,
    }
}

async fn read_exactly(stream: &mut TcpStream, buffer: &mut Vec<u8>, length: usize) -> Option<Vec<u8>> {
    while buffer.len() < length {
        read_more(stream, buffer).await?;
    }
    Some(buffer.drain(..length).collect())
}

async fn read_chunks(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let end = loop {
            if let Some(at) = buffer.windows(2).position(|bytes| bytes == b"\r\n") {
                break at;
            }
            read_more(stream, buffer).await?;
        };
        let line: Vec<u8> = buffer.drain(..end + 2).collect();
        let length = usize::from_str_radix(std::str::from_utf8(&line).ok()?.trim(), 16).ok()?;
        let chunk = read_exactly(stream, buffer, length + 2).await?;
        body.extend_from_slice(&chunk[..length]);
        if length == 0 {
            return Some(body);
        }
    }
}

/// Plays an answer. What cannot be written any more is not: the effects come all the same, as a server that
/// works on for a client that is gone.
async fn play(stream: &mut TcpStream, reply: Reply, seen: &Seen, shared: &Shared) -> End {
    for step in reply.0 {
        match step {
            Step::Answer(status, headers, body) => {
                let body = seen.fill(body.as_bytes());
                let mut head = format!("HTTP/1.1 {status}\r\n");
                for (name, value) in headers {
                    head += &format!("{name}: {value}\r\n");
                }
                if !status.starts_with("204") {
                    head += &format!("Content-Length: {}\r\n", body.len());
                }
                let _ = stream.write_all(&[(head + "\r\n").as_bytes(), &body].concat()).await;
            }
            Step::Bytes(bytes) => drop(stream.write_all(&seen.fill(&bytes)).await),
            Step::Chunk(bytes) => drop(write_chunk(stream, &seen.fill(&bytes)).await),
            Step::Crumbs(bytes) => {
                for byte in seen.fill(&bytes) {
                    let _ = write_chunk(stream, &[byte]).await;
                }
            }
            Step::Wait(wait) => sleep(wait).await,
            Step::Gate(gate) => gate.0.acquire().await.expect("it is never closed").forget(),
            Step::Execute => {
                let line = seen.arguments()["line"].as_str().unwrap_or_default().to_owned();
                shared.state().effects.push(line);
                shared.changed.notify_waiters();
            }
            Step::Forget => shared.state().sessions.clear(),
            Step::Repeat(every, chunk) => {
                let chunk = seen.fill(&chunk);
                while write_chunk(stream, &chunk).await.is_ok() {
                    if timeout(every, gone(stream)).await.is_ok() {
                        break;
                    }
                }
                shared.state().left.push(seen.nth);
                shared.changed.notify_waiters();
                return End::Closed;
            }
            Step::Stall => {
                gone(stream).await;
                shared.state().left.push(seen.nth);
                shared.changed.notify_waiters();
                return End::Closed;
            }
            Step::Close => {
                // What the client has sent is read, so that it is an end and not a reset.
                let _ = stream.shutdown().await;
                return End::Closed;
            }
            Step::Reset => {
                let _ = stream.set_zero_linger();
                return End::Closed;
            }
        }
    }
    End::Open
}

async fn write_chunk(stream: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    let head = format!("{:x}\r\n", bytes.len());
    stream.write_all(&[head.as_bytes(), bytes, b"\r\n"].concat()).await
}

/// Waits until the client has closed or reset the connection; takes nothing from it.
async fn gone(stream: &TcpStream) {
    let mut byte = [0];
    loop {
        let peek = poll_fn(|cx| stream.poll_peek(cx, &mut tokio::io::ReadBuf::new(&mut byte)));
        match peek.await {
            Ok(1..) => sleep(Duration::from_millis(5)).await,
            _ => return,
        }
    }
}

// ===== Peers that are not there =====

/// An address where nobody listens.
pub async fn nobody() -> SocketAddr {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
    listener.local_addr().expect("it is bound")
}

/// An address that takes no connection and refuses none: its queue is full.
pub struct BlackHole {
    address: SocketAddr,
    _listener: TcpListener,
    _queue: Vec<TcpStream>,
}

impl BlackHole {
    pub async fn new() -> Self {
        Self::at((Ipv4Addr::LOCALHOST, 0).into()).await
    }

    /// At the address of a server that was stopped.
    pub async fn at(address: SocketAddr) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_reuseaddr(true).expect("it is a socket");
        let begin = Instant::now();
        while let Err(error) = socket.bind(address) {
            assert!(begin.elapsed() < PATIENCE, "{error}");
            sleep(Duration::from_millis(2)).await;
        }
        let listener = socket.listen(1).expect("it listens");
        let address = listener.local_addr().expect("it is bound");
        let mut queue = Vec::new();
        while let Ok(Ok(stream)) = timeout(Duration::from_millis(300), TcpStream::connect(address)).await {
            queue.push(stream);
            assert!(queue.len() < 100, "the queue of a listener has an end");
        }
        Self { address, _listener: listener, _queue: queue }
    }

    pub fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }
}

/// That long from now, as `Retry-After` has it.
pub fn http_date(from_now: Duration) -> String {
    let seconds = (SystemTime::now() + from_now).duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
    date(seconds)
}

/// IMF-fixdate (RFC 9110, section 5.6.7) of so many seconds after 1970.
pub fn date(seconds: u64) -> String {
    let (days, of_day) = (seconds / 86_400, seconds % 86_400);
    let week_day = ["Thu", "Fri", "Sat", "Sun", "Mon", "Tue", "Wed"][(days % 7) as usize];
    let (mut year, mut left) = (1970, days);
    let leap = |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
    while left >= 365 + u64::from(leap(year)) {
        left -= 365 + u64::from(leap(year));
        year += 1;
    }
    let months = [
        ("Jan", 31),
        ("Feb", 28 + u64::from(leap(year))),
        ("Mar", 31),
        ("Apr", 30),
        ("May", 31),
        ("Jun", 30),
        ("Jul", 31),
        ("Aug", 31),
        ("Sep", 30),
        ("Oct", 31),
        ("Nov", 30),
        ("Dec", 31),
    ];
    let mut month = "";
    for (name, length) in months {
        month = name;
        if left < length {
            break;
        }
        left -= length;
    }
    let (hours, minutes, seconds) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{week_day}, {:02} {month} {year} {hours:02}:{minutes:02}:{seconds:02} GMT", left + 1)
}
