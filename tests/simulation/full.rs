//! The full harness: the real JSON-RPC client over a pipe in memory, for each generation one.

use std::{
    collections::BTreeMap,
    future::Future,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use goaround::{
    BoxError, Call as _, CallError, Cause, Delivery, Effect, Evidence,
    jsonrpc::{Builder, Client, Request, Response, ResponseFuture},
    mcp,
    write_safety::{KeyedAnswer, KeyedWrites},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, Sleep, sleep},
};
use tower::Service;

use crate::{
    fly::Harness,
    lean::{connect, with_exit},
    world::{Branch, Hint, Process, Reply, Sort, World, ms, note},
};

/// The longest message that clients keep, in bytes. Some answers are longer.
const MAX_LINE: usize = 256;

#[derive(Serialize, Deserialize)]
struct Params {
    t: u32,
}

/// What is said in methods of the server's own.
mod methods {
    use super::*;

    pub(super) fn put(token: u32, effect: Effect) -> Request {
        Request::new("put", Params { t: token }).unwrap().as_effect(effect)
    }

    pub(super) fn get(token: u32) -> Request {
        Request::new("get", Params { t: token }).unwrap().read_only()
    }

    pub(super) fn key() -> KeyedWrites<Request, Response> {
        KeyedWrites::param("/key")
    }

    pub(super) fn token(request: &Request) -> u32 {
        request.params::<Params>().unwrap().t
    }

    pub(super) fn count(response: &Response) -> u32 {
        response.parse().unwrap()
    }

    pub(super) fn response(token: u32) -> Response {
        Response::new(token).unwrap()
    }
}

/// What is said in calls of MCP's tools. What they may do nobody says here: the server's annotations do.
mod tools {
    use super::*;

    #[derive(Serialize, Deserialize)]
    struct Tool<'a> {
        name: &'a str,
        arguments: Params,
    }

    #[derive(Serialize, Deserialize)]
    struct Found {
        n: u32,
    }

    fn call(name: &str, token: u32) -> Request {
        Request::new("tools/call", Tool { name, arguments: Params { t: token } }).unwrap()
    }

    pub(super) fn put(token: u32, effect: Effect) -> Request {
        call(if effect == Effect::Idempotent { "set" } else { "put" }, token)
    }

    pub(super) fn get(token: u32) -> Request {
        call("get", token)
    }

    pub(super) fn key() -> KeyedWrites<Request, Response> {
        KeyedWrites::argument("/key")
    }

    pub(super) fn token(request: &Request) -> u32 {
        let params = request.raw_params().unwrap().get();
        serde_json::from_str::<Tool<'_>>(params).unwrap().arguments.t
    }

    pub(super) fn count(response: &Response) -> u32 {
        response.parse::<Found>().unwrap().n
    }

    pub(super) fn response(token: u32) -> Response {
        Response::new(Found { n: token }).unwrap()
    }
}

/// Our key goes along, and what the server says to a key that it has is read if the plan says so.
fn keyed(
    world: &World,
    key: impl FnOnce() -> KeyedWrites<Request, Response>,
) -> Option<KeyedWrites<Request, Response>> {
    let keeps = world.plan().keeps_keys?;
    let keyed = key().honoured_for(ms(keeps));
    let keyed = keyed.answers(|answer: Result<&Response, &CallError>| {
        let answer = answer.err()?.answer()?;
        match answer.code {
            EXISTS => Some(KeyedAnswer::Landed(None)),
            IN_FLIGHT => Some(KeyedAnswer::InFlight { recheck_after: ms(answer.data.as_ref()?.as_u64()?) }),
            _ => None,
        }
    });
    Some(keyed)
}

macro_rules! harness {
    ($name:ident, $connection:ty, $connector:ty, $make:expr, $sort:ident, $says:ident) => {
        pub enum $name {}

        impl Harness for $name {
            type Req = Request;
            type Res = Response;
            type Conn = $connection;
            type Connector = $connector;
            const SORT: Sort = Sort::$sort;

            fn connector(world: &World) -> $connector {
                $make(world.clone())
            }

            fn put(token: u32, effect: Effect) -> Request {
                $says::put(token, effect)
            }

            fn keyed(world: &World) -> Option<KeyedWrites<Request, Response>> {
                keyed(world, $says::key)
            }

            fn get(token: u32) -> Request {
                $says::get(token)
            }

            fn token(request: &Request) -> u32 {
                $says::token(request)
            }

            fn count(response: &Response) -> u32 {
                $says::count(response)
            }

            fn response(token: u32) -> Response {
                $says::response(token)
            }
        }
    };
}

harness!(Wrapped, Adapter, Wrapping, Wrapping, Meaning, methods);
harness!(Plain, Client, Connector, Connector, Plain, methods);
harness!(Annotated, mcp::Connection, mcp::Stdio, annotated, Annotated, tools);

// ===== Connectors =====

/// Connects clients as they are.
#[derive(Clone)]
pub struct Connector(World);

type Connecting<C> = Pin<Box<dyn Future<Output = Result<C, BoxError>> + Send>>;

impl Service<()> for Connector {
    type Response = Client;
    type Error = BoxError;
    type Future = Connecting<Client>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let world = self.0.clone();
        Box::pin(async move { Ok(start(&world).await?.0) })
    }
}

/// Connects clients behind an adapter that knows of the process and of what its errors mean.
#[derive(Clone)]
pub struct Wrapping(World);

impl Service<()> for Wrapping {
    type Response = Adapter;
    type Error = BoxError;
    type Future = Connecting<Adapter>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let world = self.0.clone();
        Box::pin(async move {
            let (client, process) = start(&world).await?;
            Ok(Adapter { client, process })
        })
    }
}

/// Connects MCP's sessions, whose servers say what their tools do.
fn annotated(world: World) -> mcp::Stdio {
    let connector = mcp::over(move |builder| {
        let world = world.clone();
        async move { Ok(start_with(&world, builder).await?.0) }
    });
    let tools = mcp::ToolRules::new().read_only(["get"]).trust_annotations();
    connector.era(mcp::Era::Initialize).tools(tools)
}

async fn start(world: &World) -> Result<(Client, Process), BoxError> {
    start_with(world, Client::builder()).await
}

async fn start_with(world: &World, builder: Builder) -> Result<(Client, Process), BoxError> {
    let process = connect(world).await?;
    let pipe = Arc::new(Pipe { process: process.clone(), state: Mutex::default() });
    let hook = Arc::clone(&pipe);
    process.on_close(move || hook.end());
    if !process.is_open() {
        pipe.end();
    }
    let plan = world.plan();
    let mut builder = builder.max_line(MAX_LINE);
    if !plan.leaks || plan.lies.exact_writes {
        builder = builder.exact_writes();
    }
    if plan.silence_probe {
        builder = builder.probe(Request::new("ping", ()).unwrap().read_only(), world.wait(2_000) + ms(50));
    }
    if plan.few_in_flight {
        builder = builder.max_in_flight(2);
    }
    Ok((builder.connect(End(pipe)), process))
}

#[derive(Clone)]
pub struct Adapter {
    client: Client,
    process: Process,
}

impl Service<Request> for Adapter {
    type Response = Response;
    type Error = CallError;
    type Future = Adapted;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.client.poll_ready(cx).map_err(|error| adapt(&self.process, error))
    }

    fn call(&mut self, request: Request) -> Adapted {
        if request.method() == "put" {
            self.process.handed(methods::token(&request));
        }
        Adapted { future: self.client.request(request), process: self.process.clone() }
    }
}

pub struct Adapted {
    future: ResponseFuture,
    process: Process,
}

impl Future for Adapted {
    type Output = Result<Response, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = Pin::new(&mut self.future).poll(cx);
        answer.map_err(|error| adapt(&self.process, error))
    }
}

/// What the adapter makes of an error, as those for other protocols do.
fn adapt(process: &Process, error: CallError) -> CallError {
    if let (Cause::AttemptTimeout | Cause::Deadline, Delivery::NotSent) = (error.cause(), error.delivery()) {
        process.world.cover(Branch::Withdrawn);
    }
    if let Cause::Closed(_) = error.cause() {
        return with_exit(process, error);
    }
    let Some(answer) = error.answer() else { return error };
    match answer.code {
        RATE_LIMIT => {
            let wait = answer.data.as_ref().and_then(serde_json::Value::as_u64).unwrap_or_default();
            CallError::evidence(Evidence::TooManyRequests, error).after(ms(wait))
        }
        UNAVAILABLE => CallError::evidence(Evidence::Unavailable, error),
        SESSION_UNKNOWN => {
            process.give_up();
            CallError::evidence(Evidence::SessionUnknown, error)
        }
        RESET => CallError::ambiguous(error),
        _ => error,
    }
}

const RATE_LIMIT: i64 = 429;
const UNAVAILABLE: i64 = 503;
const SESSION_UNKNOWN: i64 = 404;
const RESET: i64 = 500;
const QUOTA: i64 = -32000;
const EXISTS: i64 = -32009;
const IN_FLIGHT: i64 = -32010;

// ===== The pipe =====

/// The pipe to a process and back.
pub struct Pipe {
    process: Process,
    state: Mutex<PipeState>,
}

#[derive(Default)]
struct PipeState {
    /// On its way to the client.
    out: Vec<u8>,
    out_ended: bool,
    reader: Option<Waker>,
    /// What was accepted of the message that is being written.
    line: Vec<u8>,
    /// How much of it is accepted before something happens, once that is decided.
    verdict: Option<(usize, Then)>,
    /// What was offered beyond that, as a transport remembers it that keeps copies.
    offered: Vec<u8>,
    stall: Option<Pin<Box<Sleep>>>,
    /// Since when messages wait behind those that are held up, by the count of what happens, and until when.
    queue: Option<(u64, Instant)>,
    broken: bool,
    /// The messages that may still be cancelled.
    cancels: BTreeMap<u64, Arc<AtomicBool>>,
}

#[derive(Clone, Copy)]
enum Then {
    GoOn,
    Stall(Duration),
    Break,
}

impl PipeState {
    /// Since when what arrives now may have waited in the client's queue.
    fn queues_since(&self) -> Option<u64> {
        self.queue.filter(|(_, until)| *until >= Instant::now()).map(|(since, _)| since)
    }
}

impl Pipe {
    fn lock(&self) -> MutexGuard<'_, PipeState> {
        self.state.lock().unwrap()
    }

    fn world(&self) -> &World {
        &self.process.world
    }

    /// Nothing more comes out of it.
    fn end(&self) {
        let reader = {
            let mut state = self.lock();
            state.out_ended = true;
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    fn write_out(&self, bytes: &[u8]) {
        if !self.process.is_open() || self.process.is_silent() {
            return;
        }
        let reader = {
            let mut state = self.lock();
            state.out.extend_from_slice(bytes);
            state.reader.take()
        };
        if let Some(reader) = reader {
            reader.wake();
        }
    }

    /// What is to become of a message of that length.
    fn verdict(&self, length: usize) -> (usize, Then) {
        let world = self.world();
        let faults = &world.plan().faults;
        if world.fault(faults.stall) {
            world.cover(Branch::Stalled);
            let accepted = if world.chance(50) { 0 } else { world.lock().rng.usize(0..length) };
            return (accepted, Then::Stall(world.wait(12_000)));
        }
        if world.fault(faults.cut) {
            world.cover(Branch::Cut);
            let accepted = if world.chance(30) { length - 1 } else { world.lock().rng.usize(1..length) };
            return (accepted, Then::Break);
        }
        if world.fault(faults.refuse_write) {
            world.cover(Branch::RefusedWrite);
            return (0, Then::Break);
        }
        (length, Then::GoOn)
    }

    /// The pipe breaks. What was written of a message may be enough, or a copy of the rest leaks.
    fn break_off(&self, state: &mut PipeState) -> Option<Vec<u8>> {
        state.broken = true;
        note!(
            self.world(),
            "process {}: the pipe breaks after {} bytes",
            self.process.number,
            state.line.len()
        );
        let mut line = std::mem::take(&mut state.line);
        let offered = std::mem::take(&mut state.offered);
        if offered.first() == Some(&b'\n') {
            self.world().cover(Branch::CutButForItsNewline);
            return Some(line);
        }
        if self.world().plan().leaks && self.world().chance(50) {
            line.extend(offered);
            if line.ends_with(b"\n") {
                self.world().cover(Branch::Leaked);
                return Some(line);
            }
        }
        None
    }

    /// The server has read a message.
    fn read(self: &Arc<Self>, line: &[u8]) {
        let line = std::str::from_utf8(line).unwrap();
        let number = |key: &str| -> Option<u64> {
            let digits = &line[line.find(key)? + key.len()..];
            digits[..digits.find(|c: char| !c.is_ascii_digit())?].parse().ok()
        };
        let token = number("\"t\":").unwrap_or_default() as u32;
        let id = number("\"id\":").unwrap_or_default();
        if self.world().plan().annotated && self.read_of_session(line, id) {
            return;
        }
        if line.contains("\"notifications/cancelled\"") {
            let cancel = number("\"requestId\":").and_then(|id| self.lock().cancels.remove(&id));
            if let Some(cancel) = cancel
                && self.world().chance(50)
            {
                note!(self.world(), "process {}: heeds a cancellation", self.process.number);
                cancel.store(true, Ordering::Relaxed);
            }
            return;
        }
        if line.contains("\"ping\"") {
            return self.answer(id, Reply::Done, 0);
        }
        let pipe = Arc::clone(self);
        let is_get = line.contains("\"get\"");
        // What it does is what this process says of it.
        let is_read = is_get || pipe.process.hint(line.contains("\"set\"")) == Hint::ReadOnly;
        if is_read {
            tokio::spawn(async move {
                let reply = pipe.process.get(token).await;
                if !is_get && matches!(reply, Reply::Count(_)) {
                    pipe.world().lock().answered_as_read.insert(token);
                    pipe.world().cover(Branch::AnsweredAsRead);
                }
                pipe.answer(id, reply, token);
            });
            return;
        }
        let cancelled = Arc::new(AtomicBool::new(false));
        self.lock().cancels.insert(id, Arc::clone(&cancelled));
        let first = self.process.arrives(token, self.lock().queues_since());
        let key = line.split_once("\"key\":\"").and_then(|(_, key)| Some(key.split_once('"')?.0.to_owned()));
        tokio::spawn(async move {
            let reply = pipe.process.put(token, key, first, &cancelled).await;
            if cancelled.load(Ordering::Relaxed) && pipe.world().effects(token) > 0 {
                pipe.world().cover(Branch::CancelledAfter);
            }
            pipe.answer(id, reply, token);
        });
    }

    /// The server has read a message that may be of the session; whether it was.
    fn read_of_session(self: &Arc<Self>, line: &str, id: u64) -> bool {
        let result = match line {
            _ if line.contains("\"initialize\"") => concat!(
                r#"{"protocolVersion":"2025-11-25","capabilities":{"tools":{}},"#,
                r#""serverInfo":{"name":"world","version":"1"}}"#
            )
            .to_owned(),
            _ if line.contains("\"notifications/initialized\"") => return true,
            _ if line.contains("\"tools/list\"") => {
                if self.world().fault(5) {
                    self.world().cover(Branch::NoAnnotations);
                    self.answer(id, Reply::Error, 0);
                    return true;
                }
                let tool = |name: &str, idempotent| {
                    let hints = match self.process.hint(idempotent) {
                        Hint::None => "",
                        Hint::ReadOnly => r#","annotations":{"readOnlyHint":true}"#,
                        Hint::Destructive => r#","annotations":{"destructiveHint":true}"#,
                        Hint::Idempotent => r#","annotations":{"idempotentHint":true}"#,
                    };
                    format!(r#"{{"name":"{name}"{hints}}}"#)
                };
                format!(r#"{{"tools":[{},{}]}}"#, tool("put", false), tool("set", true))
            }
            _ => {
                self.process.begin();
                return false;
            }
        };
        note!(self.world(), "process {}: says {result}", self.process.number);
        self.write_out(format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{result}}}\n").as_bytes());
        true
    }

    fn answer(self: &Arc<Self>, id: u64, reply: Reply, token: u32) {
        let annotated = self.world().plan().annotated;
        let result = |result: u32| match annotated {
            true => format!("\"result\":{{\"n\":{result}}}"),
            false => format!("\"result\":{result}"),
        };
        let error = |code: i64, data: u64| {
            format!("\"error\":{{\"code\":{code},\"message\":\"no\",\"data\":{data}}}")
        };
        let world = self.world();
        let said = match reply {
            Reply::Silence => return,
            Reply::Done | Reply::Count(_) if world.fault(3) => {
                world.cover(Branch::TooLong);
                format!("\"result\":\"{}\"", "x".repeat(MAX_LINE))
            }
            Reply::Done => result(token),
            Reply::Count(count) => result(count),
            Reply::RateLimit(wait) => error(RATE_LIMIT, wait.as_millis() as u64),
            Reply::Unavailable => error(UNAVAILABLE, 0),
            Reply::SessionUnknown => error(SESSION_UNKNOWN, 0),
            Reply::Error => error(QUOTA, 0),
            Reply::Reset => error(RESET, 0),
            Reply::Exists => error(EXISTS, 0),
            Reply::InFlight(wait) => error(IN_FLIGHT, wait.as_millis() as u64),
        };
        note!(world, "process {}: answers {id}: {reply:?}", self.process.number);
        let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},{said}}}\n").into_bytes();
        let way = if world.fault(20) { world.lock().rng.u32(0..4) } else { 9 };
        match way {
            // In two parts.
            0 => {
                let half = world.lock().rng.usize(1..line.len());
                self.write_out(&line[..half]);
                let pipe = Arc::clone(self);
                tokio::spawn(async move {
                    sleep(pipe.world().wait(500)).await;
                    // Nothing may come in between.
                    pipe.write_out(&line[half..]);
                });
            }
            // The last that it says, without its newline.
            1 => {
                self.write_out(&line[..line.len() - 1]);
                self.process.close();
            }
            // Twice, and among what is none of ours.
            2 => {
                self.write_out(
                    b"\nServer ready.\n{\"jsonrpc\":\"2.0\",\"method\":\"notifications/message\"}\n[]\n",
                );
                self.write_out(&line);
                self.write_out(&line);
            }
            // The process says something else that breaks off.
            3 => {
                self.write_out(&line);
                self.write_out(b"{\"jsonrpc\":\"2.0\",\"id\":1,");
                self.process.close();
            }
            _ => self.write_out(&line),
        }
    }
}

/// The client's end.
struct End(Arc<Pipe>);

impl AsyncRead for End {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        if state.out.is_empty() && !state.out_ended {
            state.reader = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let most = state.out.len().min(buf.remaining());
        buf.put_slice(&state.out[..most]);
        state.out.drain(..most);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for End {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let pipe = &self.0;
        loop {
            let mut state = pipe.lock();
            if state.broken {
                return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
            }
            let left = buf.iter().position(|byte| *byte == b'\n').map_or(buf.len(), |at| at + 1);
            if let Some(stall) = &mut state.stall {
                if stall.as_mut().poll(cx).is_pending() {
                    state.offered = buf[..left].to_vec();
                    return Poll::Pending;
                }
                state.stall = None;
                state.offered.clear();
            }
            let (limit, then) = match state.verdict.take() {
                Some(verdict) => verdict,
                None => {
                    drop(state);
                    let verdict = pipe.verdict(left);
                    pipe.lock().verdict = Some(verdict);
                    continue;
                }
            };
            let accepted = limit.min(left);
            state.line.extend_from_slice(&buf[..accepted]);
            let message = match then {
                Then::GoOn if state.line.ends_with(b"\n") => Some(std::mem::take(&mut state.line)),
                _ if limit > accepted => {
                    state.verdict = Some((limit - accepted, then));
                    None
                }
                Then::GoOn => None,
                Then::Stall(wait) => {
                    let since = state.queues_since().unwrap_or_else(|| pipe.world().lock().tick());
                    state.queue = Some((since, Instant::now() + wait));
                    state.stall = Some(Box::pin(sleep(wait)));
                    state.verdict = Some((usize::MAX, Then::GoOn));
                    None
                }
                Then::Break => {
                    state.offered = buf[accepted..left].to_vec();
                    let message = pipe.break_off(&mut state);
                    drop(state);
                    pipe.process.closes_in(pipe.world().wait(500));
                    if let Some(message) = message {
                        pipe.read(&message);
                    }
                    if accepted == 0 {
                        continue;
                    }
                    return Poll::Ready(Ok(accepted));
                }
            };
            drop(state);
            if let Some(message) = message {
                pipe.read(&message);
            }
            if accepted > 0 {
                return Poll::Ready(Ok(accepted));
            }
        }
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for End {
    /// The client has closed the connection.
    fn drop(&mut self) {
        let pipe = &self.0;
        pipe.process.give_up();
        let message = {
            let mut state = pipe.lock();
            match state.broken {
                true => None,
                false => pipe.break_off(&mut state),
            }
        };
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        if let Some(message) = message {
            pipe.read(&message);
        }
        if pipe.process.is_open() {
            if pipe.process.is_silent() {
                pipe.world().cover(Branch::SilentEnded);
            }
            pipe.process.closes_in(pipe.world().wait(2_000));
        }
    }
}
