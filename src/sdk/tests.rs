//! Calls over the pipe to a child process, where the test says how many bytes the pipe accepts.

use std::{
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use futures_util::future::join_all;
use rmcp::{
    RoleClient, ServiceError,
    model::{CallToolRequestParams, CustomRequest, ErrorCode},
    service::{ClientLifecycleMode, RunningService, serve_client_with_lifecycle},
};
use serde_json::{Value, json};
use tokio::{
    io::{
        AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, DuplexStream, ReadBuf, ReadHalf,
        WriteHalf, duplex, split,
    },
    sync::oneshot,
    time::{Instant, advance, sleep},
};
use tokio_test::task::{self, Spawn};
use tower::Service;

use super::{
    Connection, Request,
    connection::{Inner, Kind, ResponseFuture, Running},
    evidence::seen,
    exchange::Exchange,
    session::Memory,
    transport::{AnyTransport, Pipe, Witness},
};
use crate::{
    Activity, Basis, Call, CallContext, CallError, Cause, Deadline, Delivery, Effect, Event, Refusal,
    call::Gate,
    connection::BoxFuture,
    event::{Events, Peer},
    mcp::{Catalog, ToolRules, checks::Subject},
    write_safety::Fence,
};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

/// A pipe that accepts so many bytes as there is room for.
struct Narrow {
    pipe: DuplexStream,
    room: Arc<Mutex<Room>>,
}

struct Room {
    bytes: usize,
    /// Who waits for more.
    waker: Option<Waker>,
    /// Whether the server reads no more.
    is_broken: bool,
}

impl AsyncRead for Narrow {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_read(cx, buf)
    }
}

impl AsyncWrite for Narrow {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let Self { pipe, room } = &mut *self;
        let mut room = room.lock().unwrap();
        if room.is_broken {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        if room.bytes == 0 {
            room.waker = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let written = Pin::new(pipe).poll_write(cx, &buf[..buf.len().min(room.bytes)]);
        if let Poll::Ready(Ok(written)) = &written {
            room.bytes -= written;
        }
        written
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.pipe).poll_shutdown(cx)
    }
}

struct Client(RunningService<RoleClient, ()>);

impl Running for Client {
    fn close(self: Box<Self>) -> BoxFuture<()> {
        Box::pin(async move { drop(self.0.cancel().await) })
    }
}

/// A connection over a narrow pipe, to a server that answers every call of a tool but `mute`.
struct Lab {
    connection: Connection,
    inner: Arc<Inner>,
    room: Arc<Mutex<Room>>,
    /// The tools that the server was asked for.
    asked: Arc<Mutex<Vec<String>>>,
    /// The requests that it was told nobody waits for.
    cancelled: Arc<Mutex<Vec<u64>>>,
    /// Where the server writes.
    output: Output,
}

type Output = Arc<tokio::sync::Mutex<WriteHalf<DuplexStream>>>;

impl Lab {
    async fn new() -> Self {
        let (ours, theirs) = duplex(1 << 20);
        let asked: Arc<Mutex<Vec<String>>> = Arc::default();
        let (input, output) = split(theirs);
        let output = Arc::new(tokio::sync::Mutex::new(output));
        let cancelled: Arc<Mutex<Vec<u64>>> = Arc::default();
        tokio::spawn(serve(input, Arc::clone(&output), Arc::clone(&asked), Arc::clone(&cancelled)));
        let room = Arc::new(Mutex::new(Room { bytes: usize::MAX, waker: None, is_broken: false }));
        let memory = Arc::new(Memory::new(ToolRules::new()));
        let (inner, _) = Inner::new(Kind::Pipe, memory, 5 * SECOND, None, 1);
        let narrow = Narrow { pipe: ours, room: Arc::clone(&room) };
        let pipe = Pipe::new(Arc::clone(&inner), narrow, Box::pin(std::future::pending()));
        let witness = Witness::new(Box::new(pipe), Arc::clone(&inner), true);
        let running = serve_client_with_lifecycle((), witness, ClientLifecycleMode::Initialize);
        let running = running.await.unwrap();
        let (peer, about) = (running.peer().clone(), Peer { server: None, client: None, protocol: None });
        let connection = Connection::new(Arc::clone(&inner), peer, about, Box::new(Client(running)));
        let lab = Self { connection, inner, room, asked, cancelled, output };
        settle().await;
        lab
    }

    /// The server says that its tool only reads.
    fn annotate(&self, name: &str) {
        let mut tools = Catalog::default();
        let page = format!(r#"{{"tools":[{{"name":"{name}","annotations":{{"readOnlyHint":true}}}}]}}"#);
        tools.add_json(&page).unwrap();
        self.inner.tools.read(self.inner.tools.as_of(), tools);
    }

    /// The server writes a line.
    async fn says(&self, line: &str) {
        self.output.lock().await.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    /// From now on the pipe accepts so many bytes.
    fn leave_room(&self, bytes: usize) {
        let mut room = self.room.lock().unwrap();
        room.bytes = bytes;
        if let Some(waker) = room.waker.take() {
            waker.wake();
        }
    }

    /// A call as far as it gets by itself.
    async fn begin(&self, request: Request) -> Spawn<ResponseFuture> {
        let mut call = task::spawn(self.connection.clone().call(request));
        assert!(call.poll().is_pending());
        settle().await;
        call
    }

    /// The same of one whose frame the pipe was offered, and has not accepted whole.
    async fn begin_held_up(&self, request: Request) -> Spawn<ResponseFuture> {
        let call = self.begin(request).await;
        assert!(self.room.lock().unwrap().waker.is_some());
        call
    }

    fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }
}

async fn settle() {
    sleep(MS).await;
}

async fn serve(
    input: ReadHalf<DuplexStream>,
    output: Output,
    asked: Arc<Mutex<Vec<String>>>,
    cancelled: Arc<Mutex<Vec<u64>>>,
) {
    let mut input = BufReader::new(input);
    let mut line = String::new();
    while input.read_line(&mut line).await.unwrap_or(0) > 0 {
        let message: Value = serde_json::from_str(&line).unwrap();
        line.clear();
        let result = match message["method"].as_str() {
            Some("notifications/cancelled") => {
                cancelled.lock().unwrap().push(message["params"]["requestId"].as_u64().unwrap());
                continue;
            }
            _ if message.get("id").is_none() => continue,
            Some("initialize") => json!({
                "protocolVersion": "2025-06-18", "capabilities": {},
                "serverInfo": { "name": "mem", "version": "1" },
            }),
            Some("tools/call") => {
                let name = message["params"]["name"].as_str().unwrap();
                asked.lock().unwrap().push(name.to_owned());
                if name == "mute" {
                    continue;
                }
                json!({ "content": [] })
            }
            _ => json!({}),
        };
        let answer = json!({ "jsonrpc": "2.0", "id": message["id"], "result": result });
        output.lock().await.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
    }
}

fn tool(name: &'static str) -> Request {
    Request::tool(name, json!({}))
}

fn seconds(count: u32) -> Deadline {
    Deadline::At(Instant::now() + count * SECOND)
}

/// The first tool, with what is marked of it.
fn watched() -> (Request, Arc<Activity>) {
    let (mut request, activity) = (tool("first"), Arc::<Activity>::default());
    request.context_mut().set_activity(Some(Arc::clone(&activity)));
    (request, activity)
}

fn is_sent(activity: &Activity) -> bool {
    activity.poll_sent(&mut Context::from_waker(Waker::noop())).is_ok()
}

fn failed(call: &mut Spawn<ResponseFuture>) -> CallError {
    match call.poll() {
        Poll::Ready(Err(error)) => error,
        other => panic!("{other:?}"),
    }
}

/// How a call of which the pipe has accepted nothing may end.
#[derive(Clone, Copy, Debug)]
enum End {
    Deadline,
    AttemptTime,
    Dropped,
    Closure,
}

#[tokio::test(start_paused = true)]
async fn a_call_of_which_the_pipe_has_accepted_nothing_was_not_sent_and_what_is_behind_it_goes() {
    for end in [End::Deadline, End::AttemptTime, End::Dropped, End::Closure] {
        let lab = Lab::new().await;
        lab.leave_room(0);
        let (mut request, activity) = watched();
        match end {
            End::Deadline => request.context_mut().set_deadline(seconds(1)),
            End::AttemptTime => request.context_mut().set_attempt_until(seconds(1).instant()),
            End::Dropped | End::Closure => {}
        }
        let mut first = lab.begin_held_up(request).await;
        let mut second = lab.begin(tool("second")).await;
        sleep(2 * SECOND).await;
        let cause = match end {
            End::Deadline => Some("deadline"),
            End::AttemptTime => Some("attempt_timeout"),
            End::Dropped => None,
            End::Closure => {
                lab.connection.close();
                Some("closed")
            }
        };
        match cause {
            None => drop(first),
            Some(cause) => {
                let mut error = failed(&mut first);
                assert_eq!((error.cause().name(), error.delivery()), (cause, Delivery::NotSent));
                assert!(error.take_request::<Request>().is_some(), "{end:?}");
            }
        }
        assert!(activity.was_withdrawn() && !is_sent(&activity), "{end:?}");

        settle().await;
        lab.leave_room(usize::MAX);
        if matches!(end, End::Closure) {
            assert_eq!(failed(&mut second).delivery(), Delivery::NotSent);
            settle().await;
            assert!(lab.asked().is_empty());
            continue;
        }
        second.await.unwrap();
        assert_eq!(lab.asked(), ["second"], "{end:?}");
        assert!(lab.connection.closure().is_none(), "{end:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_of_which_the_pipe_has_accepted_one_byte_is_finished_and_in_doubt_until_then() {
    for end in [End::Deadline, End::AttemptTime, End::Dropped] {
        let lab = Lab::new().await;
        lab.leave_room(1);
        let (mut request, activity) = watched();
        match end {
            End::Deadline => request.context_mut().set_deadline(seconds(1)),
            _ => request.context_mut().set_attempt_until(seconds(1).instant()),
        }
        let mut first = lab.begin_held_up(request).await;
        let second = lab.begin(tool("second")).await;
        sleep(2 * SECOND).await;
        let first = match end {
            End::Deadline => {
                let mut error = failed(&mut first);
                assert_eq!((error.cause().name(), error.delivery()), ("deadline", Delivery::Ambiguous));
                assert!(error.take_request::<Request>().is_none());
                None
            }
            End::Dropped => {
                drop(first);
                None
            }
            _ => {
                assert!(first.poll().is_pending());
                Some(first)
            }
        };
        assert!(!activity.was_withdrawn() && !is_sent(&activity), "{end:?}");
        lab.leave_room(usize::MAX);
        second.await.unwrap();
        assert!(is_sent(&activity), "{end:?}");
        assert_eq!(lab.asked(), ["first", "second"], "{end:?}");
        if let Some(first) = first {
            first.await.unwrap();
        }
    }
}

/// Asked of a replay.
#[derive(Debug)]
struct Open;

impl Gate for Open {
    fn opens(&self) -> bool {
        true
    }

    fn stays_open(&self) -> bool {
        true
    }
}

/// Its task has its turn late: nobody has withdrawn it when the pipe takes more.
#[tokio::test(start_paused = true)]
async fn a_call_whose_time_is_over_when_the_pipe_takes_the_first_of_it_is_not_sent() {
    for is_replay in [false, true] {
        let lab = Lab::new().await;
        lab.leave_room(0);
        let (mut request, activity) = watched();
        if is_replay {
            activity.set_gate(Arc::new(Open));
            request.context_mut().set_attempt_until(seconds(1).instant());
        } else {
            request.context_mut().set_deadline(seconds(1));
        }
        let mut first = lab.begin_held_up(request).await;
        let second = lab.begin(tool("second")).await;
        sleep(2 * SECOND).await;
        lab.leave_room(usize::MAX);
        second.await.unwrap();
        assert!(activity.was_withdrawn() && !is_sent(&activity));
        assert_eq!(lab.asked(), ["second"]);
        assert!(lab.connection.closure().is_none());

        let mut error = failed(&mut first);
        let cause = if is_replay { "attempt_timeout" } else { "deadline" };
        assert_eq!((error.cause().name(), error.delivery()), (cause, Delivery::NotSent));
        assert!(error.take_request::<Request>().is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_attempt_whose_time_is_over_when_the_pipe_takes_the_first_of_it_loses_nothing_by_going() {
    let lab = Lab::new().await;
    lab.leave_room(0);
    let (mut request, activity) = watched();
    request.context_mut().set_attempt_until(seconds(1).instant());
    let first = lab.begin_held_up(request).await;
    sleep(2 * SECOND).await;
    lab.leave_room(usize::MAX);
    settle().await;
    assert!(is_sent(&activity));
    first.await.unwrap();
    assert_eq!(lab.asked(), ["first"]);
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_annotation_is_taken_back_before_the_pipe_takes_the_first_of_it_is_not_sent() {
    for accepted in [0, 1] {
        let lab = Lab::new().await;
        lab.annotate("first");
        lab.leave_room(accepted);
        let (mut request, activity) = watched();
        request.context_mut().stamp(Effect::ReadOnly, Basis::TrustedAnnotation);
        let mut first = lab.begin_held_up(request).await;
        let second = lab.begin(tool("second")).await;
        lab.inner.tools.changed();
        lab.leave_room(usize::MAX);
        second.await.unwrap();
        if accepted > 0 {
            first.await.unwrap();
            assert_eq!(lab.asked(), ["first", "second"]);
            continue;
        }
        let error = failed(&mut first);
        assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
        assert!(activity.was_withdrawn() && !is_sent(&activity));
        assert_eq!(lab.asked(), ["second"]);
        assert!(lab.connection.closure().is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_of_which_the_pipe_has_accepted_nothing_does_not_put_off_the_end_of_a_silent_connection() {
    for accepted in [0, 1] {
        let lab = Lab::new().await;
        lab.leave_room(accepted);
        let mut first = lab.begin_held_up(tool("first")).await;
        let mut second = lab.begin(tool("second").deadline(seconds(1))).await;
        sleep(2 * SECOND).await;
        assert_eq!(failed(&mut second).delivery(), Delivery::NotSent);
        // The question whether it is there has 5 seconds.
        sleep(6 * SECOND).await;
        assert_eq!(lab.connection.closure().is_some(), accepted == 0);
        match accepted {
            0 => assert_eq!(failed(&mut first).delivery(), Delivery::NotSent),
            _ => assert!(first.poll().is_pending()),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_said_before_the_pipe_has_accepted_all_of_a_call_but_its_newline_is_no_answer_to_it() {
    let lab = Lab::new().await;
    lab.leave_room(1_000);
    lab.begin(tool("first")).await.await.unwrap();
    let len = 1_000 - lab.room.lock().unwrap().bytes;
    let answers = [r#""result":{"content":[]}"#, r#""error":{"code":1,"message":"m"}"#, r#""error":1"#];
    let accepted = [0, 1, len - 2, len - 1];
    for (accepted, answer) in
        answers.into_iter().flat_map(|answer| accepted.map(|accepted| (accepted, answer)))
    {
        let lab = Lab::new().await;
        lab.leave_room(accepted);
        let mut first = lab.begin_held_up(tool("first")).await;
        // The handshake was number 0.
        lab.says(&format!(r#"{{"jsonrpc":"2.0","id":1,{answer}}}"#)).await;
        settle().await;
        assert_eq!(first.poll().is_pending(), accepted < len - 1, "{accepted} {answer}");
        if accepted < len - 1 {
            lab.leave_room(usize::MAX);
            first.await.unwrap();
            assert_eq!(lab.asked(), ["first"]);
        }
    }
}

/// Its caller's task has its turn after the SDK's.
#[tokio::test(start_paused = true)]
async fn what_is_said_when_the_connection_has_closed_is_no_answer_to_what_that_has_withdrawn_or_cut() {
    let answers = [r#""result":{"content":[]}"#, r#""error":{"code":1,"message":"m"}"#];
    for (accepted, answer) in answers.into_iter().flat_map(|answer| [(0, answer), (1, answer)]) {
        // The SDK takes what there is in any order.
        for _ in 0..20 {
            let lab = Lab::new().await;
            lab.leave_room(accepted);
            let mut first = lab.begin_held_up(tool("first")).await;
            lab.says(&format!(r#"{{"jsonrpc":"2.0","id":1,{answer}}}"#)).await;
            lab.connection.close();
            settle().await;
            let delivery = if accepted == 0 { Delivery::NotSent } else { Delivery::NotProcessed };
            assert_eq!(failed(&mut first).delivery(), delivery, "{accepted} {answer}");
            assert!(lab.asked().is_empty());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_has_not_left_when_its_response_is_there_does_not_leave_any_more() {
    let exchange = Exchange::new(tool("first"), 1, 0);
    assert!(!exchange.has_left() && !exchange.is_out() && !exchange.frame.take());
    let error = seen(exchange.take_sight().unwrap(), None);
    assert_eq!(error.delivery(), Delivery::NotSent);

    let exchange = Exchange::new(tool("first"), 1, 0);
    assert!(exchange.frame.take() && exchange.has_left() && exchange.is_out());
}

#[tokio::test(start_paused = true)]
async fn a_call_whose_annotation_is_taken_back_while_the_server_has_it_may_have_been_a_write() {
    for (end, is_changed) in
        [End::Deadline, End::Closure].into_iter().flat_map(|end| [(end, true), (end, false)])
    {
        let lab = Lab::new().await;
        lab.annotate("mute");
        let mut request = tool("mute").deadline(seconds(1));
        request.context_mut().stamp(Effect::ReadOnly, Basis::TrustedAnnotation);
        let mut call = lab.begin(request).await;
        if is_changed {
            lab.inner.tools.changed();
        }
        match end {
            End::Closure => lab.connection.close(),
            _ => sleep(2 * SECOND).await,
        }
        let error = failed(&mut call);
        assert_eq!((lab.asked(), error.delivery()), (vec!["mute".to_owned()], Delivery::Ambiguous));
        assert_eq!(error.effect() == Effect::Write, is_changed, "{end:?}");
    }
}

/// The protocol's own call in the SDK's form for what it has no type for.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_written_by_hand_is_judged_by_its_tool_as_others_are() {
    for (name, reads) in [("first", true), ("second", false)] {
        let lab = Lab::new().await;
        lab.annotate("first");
        let params = json!({ "name": name, "arguments": { "x": 1 } });
        let mut request = Request::new(CustomRequest::new("tools/call", Some(params)));
        assert_eq!((request.tool_name(), request.arguments().unwrap()["x"].as_i64()), (Some(name), Some(1)));
        assert_eq!(request.tool_call().unwrap(), Some(json!({ "name": name, "arguments": { "x": 1 } })));
        request.context_mut().stamp(Effect::ReadOnly, Basis::TrustedAnnotation);
        let answer = lab.connection.clone().call(request).await;
        assert_eq!(answer.is_ok(), reads, "{answer:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_long_batch_leaves_others_their_turn_and_is_read_to_its_end() {
    const JUNK: usize = 50_000;
    let lab = Lab::new().await;
    let call = lab.begin(tool("mute")).await;
    let ignored = lab.connection.ignored();
    lab.says(&format!(r#"[{}{{"jsonrpc":"2.0","id":1,"result":{{"content":[]}}}}]"#, "1,".repeat(JUNK)))
        .await;
    let turns = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&turns);
    let other = tokio::spawn(poll_fn(move |cx| {
        counted.fetch_add(1, Ordering::Relaxed);
        cx.waker().wake_by_ref();
        Poll::<()>::Pending
    }));
    call.await.unwrap();
    other.abort();
    assert_eq!(lab.connection.ignored() - ignored, JUNK as u64);
    // It is looked at twice, since half a batch is none.
    assert!(turns.load(Ordering::Relaxed) > 2 * JUNK / 1_000);
}

/// A pipe with that in it, whose other end stays open.
struct Left {
    bytes: Vec<u8>,
    /// Whether something writes that again and again, faster than anybody reads.
    is_flood: bool,
}

impl AsyncRead for Left {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        if self.is_flood {
            let count = buf.remaining().min(4 << 10) / self.bytes.len();
            buf.put_slice(&self.bytes.repeat(count));
            return Poll::Ready(Ok(()));
        }
        if self.bytes.is_empty() {
            return Poll::Pending;
        }
        let count = buf.remaining().min(self.bytes.len());
        buf.put_slice(&self.bytes[..count]);
        self.bytes.drain(..count);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Left {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

#[tokio::test(start_paused = true)]
async fn a_pipe_that_something_floods_leaves_others_their_turn_and_ends_soon_after_its_child() {
    let notification =
        br#"{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}
"#;
    for flood in [&b"y\n"[..], b"yyyy", b"[1,2]\n", notification] {
        let (exit, exited) = oneshot::channel::<()>();
        let pipes = Left { bytes: flood.to_vec(), is_flood: true };
        let mut pipe = pipe(pipes, Box::pin(async move { drop(exited.await) }));
        let mut reading = task::spawn(async move { while pipe.receive().await.is_some() {} });
        // The last of them finds it out.
        let mut turns = |count| (0..count).all(|_| reading.poll().is_pending() && reading.is_woken());
        assert!(turns(2));
        advance(SECOND).await;
        assert!(turns(2));
        exit.send(()).unwrap();
        assert!(turns(2));
        advance(SECOND).await;
        // At most, it is what a pipe holds.
        assert!(!turns(2_000), "{}", flood.escape_ascii());
    }
}

fn pipe(pipes: impl AsyncRead + AsyncWrite + Send + Unpin + 'static, exited: BoxFuture<()>) -> Pipe {
    let memory = Arc::new(Memory::new(ToolRules::new()));
    let (inner, _) = Inner::new(Kind::Pipe, memory, 5 * SECOND, None, 1);
    Pipe::new(inner, pipes, exited)
}

#[tokio::test(start_paused = true)]
async fn an_answer_in_the_pipe_of_a_child_that_has_exited_is_read_however_long_that_takes() {
    let mut bytes = b"a line of log\n".repeat(4_000);
    bytes.extend_from_slice(br#"{"jsonrpc":"2.0","id":1,"result":{}}"#);
    let mut pipe = pipe(Left { bytes, is_flood: false }, Box::pin(std::future::ready(())));
    let mut reading = task::spawn(async { (pipe.receive().await.is_some(), pipe.receive().await.is_some()) });
    for _ in 0..100 {
        if let Poll::Ready(received) = reading.poll() {
            assert_eq!(received, (true, false));
            return;
        }
        // The turn of the others.
        advance(20 * MS).await;
    }
    panic!("the pipe does not end");
}

/// Tokio gives a task 128 polls a turn.
#[tokio::test(start_paused = true)]
async fn answers_that_are_there_win_however_many_calls_one_task_waits_for() {
    for end in [End::Deadline, End::Closure] {
        let lab = Lab::new().await;
        let mut calls = Vec::new();
        for _ in 0..200 {
            let mut request = tool("first");
            request.context_mut().set_deadline(seconds(1));
            calls.push(lab.begin(request).await);
        }
        assert!(calls.iter().all(|call| call.is_woken()));
        match end {
            End::Closure => lab.connection.close(),
            _ => sleep(2 * SECOND).await,
        }
        let ended = join_all(calls).await;
        assert!(ended.iter().all(Result::is_ok), "{end:?}");
    }
}

/// The late answers that are reported of the call, as `may_be_error`, and whether a fence was violated.
fn late_answers(request: &mut Request) -> Arc<Mutex<Vec<(bool, bool)>>> {
    let seen: Arc<Mutex<Vec<_>>> = Arc::default();
    let told = Arc::clone(&seen);
    request.context_mut().events = Events::to(move |event| {
        if let Event::LateAnswer(late) = event {
            told.lock().unwrap().push((late.may_be_error, late.violated.is_some()));
        }
    });
    seen
}

#[tokio::test(start_paused = true)]
async fn a_late_success_is_reported_whatever_its_size_and_whether_the_sdk_can_read_it() {
    let long = "x".repeat((64 << 20) + 1);
    let answers = [
        (r#""result":{"content":[]}"#.to_owned(), &[(false, false)][..]),
        (format!(r#""result":"{long}""#), &[(false, false)]),
        (r#""error":1"#.to_owned(), &[]),
    ];
    for (answer, reports) in answers {
        for is_dropped in [true, false] {
            let lab = Lab::new().await;
            let mut request = tool("mute");
            let seen = late_answers(&mut request);
            let call = lab.begin(request).await;
            let unpolled = (!is_dropped).then_some(call);
            settle().await;
            lab.says(&format!(r#"{{"jsonrpc":"2.0","id":1,{answer}}}"#)).await;
            settle().await;
            drop(unpolled);
            settle().await;
            assert_eq!(*seen.lock().unwrap(), reports, "{} {is_dropped}", &answer[..12]);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_client_of_json_rpc_reads_as_an_answer_is_one_here() {
    for (members, expected) in [
        (r#""jsonrpc":"2.0","result":{"content":[]},"error":null"#, "ok"),
        (r#""error":null,"result":{"content":[]}"#, "ok"),
        (r#""result":null"#, "ok"),
        (r#""result":null,"error":null"#, "ok"),
        (r#""jsonrpc":"2.0","result":null,"error":{"code":-32000,"message":"m"}"#, "-32000 m None"),
        (r#""jsonrpc":"2.0","error":"text""#, r#"0  Some(String("text"))"#),
        // More than the SDK's codes can be.
        (r#""jsonrpc":"2.0","error":{"code":-99999999999,"message":"m"}"#, "-32603 m None"),
    ] {
        let lab = Lab::new().await;
        let mut call = lab.begin(tool("mute")).await;
        lab.says(&format!(r#"{{"id":1,{members}}}"#)).await;
        settle().await;
        let told = match call.poll() {
            Poll::Ready(Ok(_)) => "ok".to_owned(),
            Poll::Ready(Err(error)) => match error.answer() {
                Some(answer) => format!("{} {} {:?}", answer.code, answer.message, answer.data),
                None => format!("{error:?}"),
            },
            Poll::Pending => "nothing".to_owned(),
        };
        assert_eq!(told, expected, "{members}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_first_of_two_answers_counts_also_where_the_sdk_cannot_read_one_of_them() {
    let answer = |answer: &str| format!(r#"{{"jsonrpc":"2.0","id":1,{answer}}}"#);
    let (readable, odd) = (answer(r#""result":{"content":[]}"#), answer(r#""error":1"#));
    for (lines, reports) in
        [(format!("{readable}\n{odd}"), &[(false, false)][..]), (format!("{odd}\n{readable}"), &[])]
    {
        let lab = Lab::new().await;
        let mut request = tool("mute");
        let seen = late_answers(&mut request);
        let call = lab.begin(request).await;
        lab.says(&lines).await;
        settle().await;
        drop(call);
        settle().await;
        assert_eq!(*seen.lock().unwrap(), reports, "{lines}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_no_call_ends_with_an_answer_that_the_sdk_cannot_read() {
    let long = "x".repeat((64 << 20) + 1);
    for answer in
        [r#""result":1,"error":{"code":1,"message":""}"#.to_owned(), format!(r#""result":"{long}""#)]
    {
        let lab = Lab::new().await;
        let peer = lab.inner.peer().unwrap();
        let mut asking = task::spawn(peer.call_tool(CallToolRequestParams::new("mute")));
        assert!(asking.poll().is_pending());
        settle().await;
        // Of what was not asked yet it says nothing.
        for id in [2, 1] {
            assert!(asking.poll().is_pending());
            lab.says(&format!(r#"{{"jsonrpc":"2.0","id":{id},{answer}}}"#)).await;
            settle().await;
        }
        let Poll::Ready(Err(ServiceError::McpError(error))) = asking.poll() else { panic!("it waits") };
        assert_eq!(error.code, ErrorCode::INTERNAL_ERROR);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_nobody_took_is_a_late_one_and_its_call_is_not_cancelled() {
    let lab = Lab::new().await;
    let (mut request, activity) = watched();
    let seen = late_answers(&mut request);
    let first = lab.begin(request).await;
    assert!(first.is_woken());
    activity.set_replaced(Fence::because(CallContext::new().assign_id(), "as tested"));
    drop(first);
    settle().await;
    assert_eq!(*seen.lock().unwrap(), [(false, true)]);
    assert!(lab.cancelled.lock().unwrap().is_empty());

    drop(lab.begin(tool("mute")).await);
    settle().await;
    assert_eq!(*lab.cancelled.lock().unwrap(), [2]);
}

#[tokio::test(start_paused = true)]
async fn an_answer_to_a_call_that_was_given_up_half_written_is_none_before_it_is_there() {
    let lab = Lab::new().await;
    lab.leave_room(9);
    let mut request = tool("first");
    let seen = late_answers(&mut request);
    drop(lab.begin_held_up(request).await);
    settle().await;
    lab.says(r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#).await;
    settle().await;
    assert!(seen.lock().unwrap().is_empty());

    lab.leave_room(usize::MAX);
    settle().await;
    assert_eq!((lab.asked(), &*seen.lock().unwrap()), (vec!["first".to_owned()], &vec![(false, false)]));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_a_server_gave_before_it_read_no_more_is_read_when_a_write_fails() {
    let lab = Lab::new().await;
    let first = lab.begin(tool("mute")).await;
    lab.room.lock().unwrap().is_broken = true;
    let mut second = lab.begin(tool("second")).await;
    lab.says(r#"{"jsonrpc":"2.0","id":1,"result":{"content":[]}}"#).await;
    first.await.unwrap();
    sleep(SECOND).await;
    let error = failed(&mut second);
    assert_eq!((error.delivery(), lab.asked()), (Delivery::NotSent, vec!["mute".to_owned()]));
    assert!(error.to_string().contains("writing to the server failed"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_success_that_the_connections_end_overtakes_is_a_late_one() {
    for (answer, reports) in [
        (r#""result":{"content":[]}"#, &[(false, false)][..]),
        (r#""error":{"code":-32603,"message":"no"}"#, &[]),
    ] {
        let lab = Lab::new().await;
        let mut request = tool("mute");
        let seen = late_answers(&mut request);
        let mut call = lab.begin(request).await;
        let answer = format!(r#"{{"jsonrpc":"2.0","id":1,{answer}}}"#);
        // The SDK has it in its hands from here on.
        assert!(lab.inner.received(&mut serde_json::from_str(&answer).unwrap()));
        lab.connection.close();
        assert_eq!(failed(&mut call).delivery(), Delivery::Ambiguous);
        drop(call);
        settle().await;
        assert_eq!(*seen.lock().unwrap(), reports, "{answer}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_writes_lines_with_brackets_is_heard() {
    for line in ["INFO at it", "[INFO] at it", "[1,2]", "[]"] {
        let lab = Lab::new().await;
        let mut request = tool("mute");
        request.context_mut().set_deadline(seconds(1));
        let mut call = lab.begin(request).await;
        lab.says(line).await;
        sleep(2 * SECOND).await;
        let heard = lab.inner.times_heard();
        lab.says(line).await;
        settle().await;
        assert!(lab.inner.times_heard() > heard, "{line}");
        assert_eq!(failed(&mut call).delivery(), Delivery::Ambiguous);
    }
}
