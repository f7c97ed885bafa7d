//! What the connection knows of every byte, over a transport that accepts exactly as many as it is told to.

use std::{
    io,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::{oneshot, watch},
    time::{Instant, advance},
};
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task::Spawn};

use super::{Builder, Client, Process, Request, ResponseFuture, Upholds, exchange::Exchange};
use crate::{
    Activity, Basis, Call, CallContext, CallError, Cause, Deadline, Delivery, Effect, Event, Evidence, Exit,
    Refusal, Scope, connection::Connection, event::Events, write_safety::Fence,
};

// ----- the scripted transport

#[derive(Clone, Default)]
struct Wire(Arc<Mutex<WireState>>);

#[derive(Default)]
struct WireState {
    /// How many bytes more are accepted.
    room: usize,
    /// What happens on another thread during the next write.
    meanwhile: Option<Box<dyn FnOnce() + Send>>,
    /// Whether what is accepted waits in a buffer, and no flush comes to its end.
    holds_back: bool,
    written: Vec<u8>,
    /// How often some were.
    writes: usize,
    write_error: Option<io::ErrorKind>,
    input: Vec<u8>,
    read_error: Option<io::ErrorKind>,
    eof: bool,
    /// Which of its functions panic.
    panics: &'static [&'static str],
    closed: bool,
    wakers: Vec<Waker>,
}

impl Wire {
    fn new() -> Self {
        Self::default()
    }

    /// A transport that accepts everything.
    fn open() -> Self {
        let wire = Self::new();
        wire.0.lock().unwrap().room = usize::MAX;
        wire
    }

    fn set(&self, set: impl FnOnce(&mut WireState)) {
        let wakers = {
            let mut state = self.0.lock().unwrap();
            set(&mut state);
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    async fn hold_back(&self, holds_back: bool) {
        self.set(|state| state.holds_back = holds_back);
        settle().await;
    }

    async fn accept(&self, bytes: usize) {
        self.set(|state| state.room = state.room.saturating_add(bytes));
        settle().await;
    }

    async fn send(&self, text: &str) {
        self.set(|state| {
            state.input.extend_from_slice(text.as_bytes());
            state.input.push(b'\n');
        });
        settle().await;
    }

    async fn eof(&self) {
        self.set(|state| state.eof = true);
        settle().await;
    }

    fn lock(&self) -> MutexGuard<'_, WireState> {
        self.0.lock().unwrap()
    }

    fn written(&self) -> String {
        String::from_utf8(self.0.lock().unwrap().written.clone()).unwrap()
    }

    fn called(&self, function: &str) {
        let panics = self.lock().panics.contains(&function);
        assert!(!panics, "as tested");
    }

    fn is_closed(&self) -> bool {
        self.0.lock().unwrap().closed
    }

    fn connect(&self, builder: Builder) -> Client {
        builder.connect(Io(self.clone()))
    }
}

struct Io(Wire);

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.0.called("read");
        let mut state = self.0.0.lock().unwrap();
        if !state.input.is_empty() {
            let count = state.input.len().min(buf.remaining());
            buf.put_slice(&state.input[..count]);
            state.input.drain(..count);
            return Poll::Ready(Ok(()));
        }
        if let Some(error) = state.read_error {
            return Poll::Ready(Err(error.into()));
        }
        if state.eof {
            return Poll::Ready(Ok(()));
        }
        state.wakers.push(cx.waker().clone());
        Poll::Pending
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(meanwhile) = self.0.lock().meanwhile.take() {
            meanwhile();
        }
        self.0.called("write");
        let mut state = self.0.lock();
        if let Some(error) = state.write_error {
            return Poll::Ready(Err(error.into()));
        }
        let count = bytes.len().min(state.room);
        if count == 0 {
            state.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        state.room -= count;
        state.writes += 1;
        state.written.extend_from_slice(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.called("flush");
        let mut state = self.0.0.lock().unwrap();
        if let Some(error) = state.write_error {
            return Poll::Ready(Err(error.into()));
        }
        if state.holds_back {
            state.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.called("shutdown");
        Poll::Ready(Ok(()))
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        self.0.lock().closed = true;
        self.0.called("drop");
    }
}

/// Lets the connection's task do what it can.
async fn settle() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn request(method: &'static str) -> Request {
    Request::new(method, ()).unwrap()
}

fn big(bytes: usize) -> Request {
    Request::new("big", ["x".repeat(bytes)]).unwrap()
}

/// The request with an activity, as a layer above would set it.
fn watched(mut request: Request) -> (Request, Arc<Activity>) {
    let activity = Arc::new(Activity::default());
    request.context_mut().set_activity(Some(activity.clone()));
    (request, activity)
}

fn is_sent(activity: &Activity) -> bool {
    let mut task = tokio_test::task::spawn(());
    task.enter(|cx, _| activity.poll_sent(cx)).is_ok_and(|at| at.is_some())
}

async fn start(client: &Client, request: Request) -> Spawn<ResponseFuture> {
    let mut call = tokio_test::task::spawn(client.request(request));
    assert_pending!(call.poll());
    settle().await;
    call
}

fn frame(id: u64, method: &str) -> String {
    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"{method}\"}}\n")
}

fn built(exact: bool) -> Builder {
    if exact { Client::builder().exact_writes() } else { Client::builder() }
}

/// Writes that lie in one buffer, which nobody writes out yet, and how long each of their frames is.
async fn in_one_buffer<const N: usize>(
    client: &Client,
    mut requests: [Request; N],
) -> ([Spawn<ResponseFuture>; N], [Arc<Activity>; N]) {
    let marks = std::array::from_fn(|at| {
        let (request, marks) = watched(requests[at].for_attempt());
        requests[at] = request;
        marks
    });
    let calls = requests.map(|request| start_now(client, request));
    settle().await;
    assert_eq!(client.queue_len(), 0);
    (calls, marks)
}

/// How many of the frames of three letters the transport may have, once it has accepted that many bytes.
fn begun(exact: bool, accepted: usize) -> usize {
    let length = frame(1, "one").len();
    if exact { accepted.div_ceil(length) } else { accepted / length + 1 }
}

fn failed(call: &mut Spawn<ResponseFuture>) -> CallError {
    assert!(call.is_woken());
    assert_ready_err!(call.poll())
}

fn handed_back(error: &mut CallError) -> bool {
    error.take_request::<Request>().is_some()
}

// ----- at a closure

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many cuts")]
async fn a_closure_says_of_every_frame_what_its_accepted_bytes_prove() {
    let length = frame(1, "one").len();
    for exact in [false, true] {
        for accepted in 0..=length + 1 {
            let wire = Wire::new();
            let client = wire.connect(built(exact));
            let mut one = tokio_test::task::spawn(client.request(request("one")));
            let mut two = tokio_test::task::spawn(client.request(request("two")));
            assert_pending!(one.poll());
            assert_pending!(two.poll());
            settle().await;
            wire.accept(accepted).await;
            let mut queued = start(&client, request("three")).await;
            wire.eof().await;
            assert!(wire.is_closed());

            let mut error = failed(&mut one);
            let expected = match accepted {
                _ if !exact => Delivery::Ambiguous,
                0 => Delivery::NotSent,
                n if n < length - 1 => Delivery::NotProcessed,
                _ => Delivery::Ambiguous,
            };
            assert_eq!((error.delivery(), error.scope()), (expected, Scope::Connection), "{accepted}");
            assert_eq!(handed_back(&mut error), expected == Delivery::NotSent);
            match error.cause() {
                Cause::Evidence(evidence) => {
                    assert_eq!((*evidence, expected), (Evidence::FrameCut, Delivery::NotProcessed));
                }
                Cause::Closed(closure) => assert_eq!(closure.in_flight(), 3),
                other => panic!("{other:?}"),
            }
            let mut error = failed(&mut two);
            let expected = match accepted {
                _ if !exact => Delivery::Ambiguous,
                n if n <= length => Delivery::NotSent,
                _ => Delivery::NotProcessed,
            };
            assert_eq!(error.delivery(), expected, "{accepted}");
            assert_eq!(handed_back(&mut error), expected == Delivery::NotSent);
            let mut error = failed(&mut queued);
            assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Connection));
            assert!(handed_back(&mut error));

            // A call on what is closed.
            let mut late = tokio_test::task::spawn(client.request(request("late")));
            let mut error = assert_ready_err!(late.poll());
            assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Connection));
            assert!(error.closure().is_some() && handed_back(&mut error));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_failing_write_leaves_what_it_was_offered_in_doubt_unless_writes_are_exact() {
    for exact in [false, true] {
        let wire = Wire::new();
        let client = wire.connect(built(exact));
        let (one, marks) = watched(request("one"));
        let mut one = tokio_test::task::spawn(client.request(one));
        let mut two = tokio_test::task::spawn(client.request(request("two")));
        assert_pending!(one.poll());
        assert_pending!(two.poll());
        settle().await;
        let mut queued = start(&client, request("three")).await;
        wire.set(|state| state.write_error = Some(io::ErrorKind::BrokenPipe));
        settle().await;
        // What is still in the pipe is read first.
        assert_pending!(one.poll());
        assert!(client.closure().is_none());
        advance(Duration::from_millis(51)).await;
        settle().await;
        let expected = if exact { Delivery::NotSent } else { Delivery::Ambiguous };
        for call in [&mut one, &mut two] {
            let mut error = failed(call);
            assert_eq!((error.delivery(), error.scope()), (expected, Scope::Connection));
            assert_eq!(handed_back(&mut error), exact);
            assert!(error.to_string().contains("broken pipe"), "{error}");
        }
        let mut error = failed(&mut queued);
        assert_eq!(error.delivery(), Delivery::NotSent);
        assert!(handed_back(&mut error));
        assert!(!is_sent(&marks));
        assert_eq!(marks.was_withdrawn(), exact);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_in_the_pipe_when_a_write_fails_is_an_answer() {
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let mut one = start(&client, request("one")).await;
    wire.set(|state| state.write_error = Some(io::ErrorKind::BrokenPipe));
    let mut two = start(&client, request("two")).await;
    wire.send(r#"{"id":1,"result":1}"#).await;
    assert_ready_ok!(one.poll());
    wire.eof().await;
    assert!(failed(&mut two).to_string().contains("broken pipe"));
}

#[tokio::test(start_paused = true)]
async fn a_read_error_closes() {
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let mut one = start(&client, request("one")).await;
    wire.set(|state| {
        state.input = br#"{"id":2,"result":"#.to_vec();
        state.read_error = Some(io::ErrorKind::ConnectionReset);
    });
    settle().await;
    let error = failed(&mut one);
    assert_eq!((error.delivery(), error.scope()), (Delivery::Ambiguous, Scope::Connection));
    assert!(error.to_string().contains("connection reset"), "{error}");
    assert_eq!(client.ignored(), 1);
}

// ----- marks and withdrawal

#[tokio::test(start_paused = true)]
async fn the_last_byte_is_marked_for_each_of_the_frames_that_share_a_write() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder());
    let (one, first) = watched(request("one"));
    let (two, second) = watched(request("two"));
    let mut one = tokio_test::task::spawn(client.request(one));
    let mut two = tokio_test::task::spawn(client.request(two));
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    settle().await;
    let length = frame(1, "one").len();
    wire.accept(length - 1).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (false, false));
    wire.accept(1).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (true, false));
    wire.accept(length - 1).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (true, false));
    wire.accept(10).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (true, true));
    assert_eq!(wire.written(), frame(1, "one") + &frame(2, "two"));
}

#[tokio::test(start_paused = true)]
async fn what_lies_in_the_transports_own_buffer_is_marked_when_it_is_flushed() {
    let wire = Wire::open();
    wire.hold_back(true).await;
    let client = wire.connect(Client::builder().exact_writes());
    let (one, first) = watched(request("one"));
    let mut one = start(&client, one).await;
    assert_eq!((wire.written(), is_sent(&first)), (frame(1, "one"), false));
    // Behind a flush nothing more is offered, so that it can be withdrawn.
    let (mut two, second) = watched(request("two"));
    two.context_mut().set_attempt_until(Some(Instant::now() + SECOND));
    let mut two = start(&client, two).await;
    let (three, third) = watched(request("three"));
    let mut three = start(&client, three).await;
    advance(SECOND).await;
    let mut error = assert_ready_err!(two.poll());
    assert_eq!(error.delivery(), Delivery::NotSent);
    assert!(handed_back(&mut error) && second.was_withdrawn());
    assert_eq!((wire.written(), client.queue_len()), (frame(1, "one"), 2));

    // An answer that is there is one all the same: the buffer has sent it on, and waits for something else.
    wire.send(r#"{"id":1,"result":1}"#).await;
    assert_eq!(assert_ready_ok!(one.poll()).raw().get(), "1");
    assert!(!is_sent(&first));
    wire.hold_back(false).await;
    assert_eq!((is_sent(&first), is_sent(&third)), (true, true));
    assert_eq!(wire.written(), frame(1, "one") + &frame(2, "three"));
    wire.send(r#"{"id":2,"result":2}"#).await;
    assert_eq!(assert_ready_ok!(three.poll()).raw().get(), "2");
    assert_eq!(client.in_flight(), 0);
}

/// Whether trusted annotations hold, except for one that always does.
#[derive(Default)]
struct Word {
    is_taken_back: AtomicBool,
    changes: AtomicU64,
    asked: AtomicUsize,
}

impl Word {
    fn take_back(&self) {
        self.is_taken_back.store(true, Ordering::Relaxed);
        self.changes.fetch_add(1, Ordering::Relaxed);
    }
}

impl Upholds for Word {
    fn upholds(&self, request: &Request) -> bool {
        self.asked.fetch_add(1, Ordering::Relaxed);
        request.method() == "other" || !self.is_taken_back.load(Ordering::Relaxed)
    }

    fn changes(&self) -> u64 {
        self.changes.load(Ordering::Relaxed)
    }
}

/// A read by a trusted annotation.
fn trusted(method: &'static str) -> Request {
    let mut request = request(method);
    request.context_mut().stamp(Effect::ReadOnly, Basis::TrustedAnnotation);
    request
}

fn is_refused(call: &mut Spawn<ResponseFuture>) -> bool {
    let error = failed(call);
    let is_it = matches!(error.cause(), Cause::Refused(Refusal::EffectChanged));
    is_it && error.delivery() == Delivery::NotSent && !error.method().is_empty()
}

#[tokio::test(start_paused = true)]
async fn a_trusted_annotation_is_asked_for_when_a_calls_turn_to_be_written_has_come() {
    for kind in [Effect::ReadOnly, Effect::Idempotent] {
        let wire = Wire::new();
        let word = Arc::new(Word::default());
        let client = wire.connect(Client::builder().upheld_by(word.clone()));
        let length = "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"big\",\"params\":[\"\"]}\n".len() + 20_000;
        let _stalled = start(&client, big(20_000)).await;
        let (mut one, activity) = watched(trusted("one"));
        one.context_mut().stamp(kind, Basis::TrustedAnnotation);
        let (mut one, mut other) = (start_now(&client, one), start_now(&client, trusted("other")));
        let mut own = start(&client, request("own").read_only()).await;
        word.take_back();
        wire.accept(length).await;
        assert!(is_refused(&mut one));
        assert!(activity.was_withdrawn() && !is_sent(&activity));
        // Of whom only the annotation speaks, and not of those that somebody else judged.
        assert_eq!(word.asked.load(Ordering::Relaxed), 2);
        wire.accept(usize::MAX / 2).await;
        assert!(wire.written().ends_with(&(frame(2, "other") + &frame(3, "own"))));
        assert!(!wire.written().contains("one"));
        wire.send(r#"[{"id":2,"result":2},{"id":3,"result":3}]"#).await;
        assert_ready_ok!(other.poll());
        assert_ready_ok!(own.poll());
        assert_eq!(client.in_flight(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_not_upheld_is_taken_out_of_the_buffer_unless_the_transport_may_have_a_copy() {
    for exact in [false, true] {
        let wire = Wire::new();
        let word = Arc::new(Word::default());
        let client = wire.connect(built(exact).upheld_by(word.clone()));
        let mut calls = [
            start_now(&client, request("own")),
            start_now(&client, trusted("begun")),
            start_now(&client, trusted("whole")),
            start_now(&client, request("last")),
            start_now(&client, trusted("end")),
        ];
        // All of them are in one buffer.
        settle().await;
        assert_eq!(client.queue_len(), 0);
        wire.accept(frame(1, "own").len() + 1).await;
        // However that became known: whatever has the connection's task look at its buffer again.
        word.take_back();
        wire.set(|_| {});
        settle().await;
        let refused: Vec<_> = calls.iter_mut().map(|call| call.is_woken() && is_refused(call)).collect();
        assert_eq!(refused, [false, false, exact, false, exact]);
        wire.accept(usize::MAX / 2).await;
        let (begun, last) = (frame(1, "own") + &frame(2, "begun"), frame(4, "last"));
        let expected = match exact {
            true => begun + &last,
            false => begun + &frame(3, "whole") + &last + &frame(5, "end"),
        };
        assert_eq!(wire.written(), expected);
        assert_eq!(client.in_flight(), if exact { 3 } else { 5 });
        wire.send(r#"{"id":4,"result":4}"#).await;
        assert_eq!(assert_ready_ok!(calls[3].poll()).raw().get(), "4");
    }
}

#[tokio::test(start_paused = true)]
async fn a_frame_that_is_accepted_in_part_does_not_hold_up_the_mark_of_the_one_before_it() {
    let wire = Wire::new();
    wire.hold_back(true).await;
    let client = wire.connect(Client::builder());
    let (one, first) = watched(request("one"));
    let (two, second) = watched(request("two"));
    let (_one, _two) = (start_now(&client, one), start_now(&client, two));
    settle().await;
    wire.accept(frame(1, "one").len() + 5).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (false, false));
    wire.hold_back(false).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (true, false));
    wire.accept(usize::MAX / 2).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (true, true));
}

#[tokio::test(start_paused = true)]
async fn what_was_not_flushed_is_ambiguous_at_a_closure_and_may_be_answered_before_it() {
    for exact in [false, true] {
        let wire = Wire::open();
        wire.hold_back(true).await;
        let builder = Client::builder();
        let client = wire.connect(if exact { builder.exact_writes() } else { builder });
        let (one, activity) = watched(request("one"));
        let mut one = start(&client, one).await;
        let mut told = tokio_test::task::spawn(client.notify("told", ()));
        assert_pending!(told.poll());
        settle().await;
        // It is behind the flush.
        let mut queued = start(&client, request("queued")).await;
        wire.eof().await;
        assert_eq!(failed(&mut one).delivery(), Delivery::Ambiguous);
        for error in [assert_ready_err!(told.poll()), failed(&mut queued)] {
            assert_eq!(error.delivery(), Delivery::NotSent);
        }
        assert!(!is_sent(&activity) && !activity.was_withdrawn());
        assert_eq!(client.closure().unwrap().in_flight(), 3);
    }
    // Nor is a notification answered of which the transport has accepted nothing, or all but its newline.
    for exact in [false, true] {
        for accepted in [0, r#"{"jsonrpc":"2.0","method":"told"}"#.len()] {
            let wire = Wire::new();
            let client = wire.connect(built(exact));
            let mut told = tokio_test::task::spawn(client.notify("told", ()));
            assert_pending!(told.poll());
            settle().await;
            wire.accept(accepted).await;
            wire.eof().await;
            let expected = if exact && accepted == 0 { Delivery::NotSent } else { Delivery::Ambiguous };
            assert_eq!(assert_ready_err!(told.poll()).delivery(), expected);
            assert_eq!(client.closure().unwrap().in_flight(), 1, "{exact} {accepted}");
        }
    }
    // A flush that fails ends the connection as a write does.
    let wire = Wire::open();
    wire.hold_back(true).await;
    let client = wire.connect(Client::builder().exact_writes());
    let mut one = start(&client, request("one")).await;
    wire.set(|state| state.write_error = Some(io::ErrorKind::BrokenPipe));
    settle().await;
    advance(Duration::from_millis(51)).await;
    settle().await;
    assert_eq!(failed(&mut one).delivery(), Delivery::Ambiguous);
}

#[tokio::test(start_paused = true)]
async fn a_queued_frame_is_withdrawn_at_the_attempts_end_and_never_written() {
    for by_deadline in [false, true] {
        let wire = Wire::new();
        let client = wire.connect(Client::builder());
        let mut stalled = start(&client, big(100)).await;
        let (mut queued, activity) = watched(request("queued"));
        let until = Instant::now() + Duration::from_secs(1);
        if by_deadline {
            queued.context_mut().set_deadline(Deadline::At(until));
        } else {
            queued.context_mut().set_deadline(Deadline::At(until + Duration::from_secs(9)));
            queued.context_mut().set_attempt_until(Some(until));
        }
        let mut queued = start(&client, queued).await;
        assert_pending!(queued.poll());
        advance(Duration::from_secs(1)).await;
        let mut error = assert_ready_err!(queued.poll());
        assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Call));
        assert!(matches!(
            (error.cause(), by_deadline),
            (Cause::Deadline, true) | (Cause::AttemptTimeout, false)
        ));
        let back = error.take_request::<Request>().unwrap();
        assert!(back.context().activity().is_some());
        assert!(activity.was_withdrawn() && !is_sent(&activity));
        wire.accept(10_000).await;
        assert!(!wire.written().contains("queued"));
        assert_pending!(stalled.poll());
    }
}

#[tokio::test(start_paused = true)]
async fn a_taken_frame_is_waited_for_beyond_the_attempt_and_finished_after_the_deadline() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder());
    let (mut taken, activity) = watched(request("taken"));
    let now = Instant::now();
    taken.context_mut().set_attempt_until(Some(now + Duration::from_secs(1)));
    taken.context_mut().set_deadline(Deadline::At(now + Duration::from_secs(2)));
    let mut taken = start(&client, taken).await;
    advance(Duration::from_secs(1)).await;
    assert_pending!(taken.poll());
    advance(Duration::from_secs(1)).await;
    let mut error = assert_ready_err!(taken.poll());
    assert!(matches!(error.cause(), Cause::Deadline));
    assert_eq!((error.delivery(), error.scope()), (Delivery::Ambiguous, Scope::Call));
    assert!(!handed_back(&mut error) && !activity.was_withdrawn() && !is_sent(&activity));
    // The frame was begun: it is finished, and the peer is told once the future is dropped.
    wire.accept(usize::MAX / 2).await;
    assert_eq!(wire.written(), frame(1, "taken"));
    assert!(is_sent(&activity));
    drop(taken);
    settle().await;
    assert!(
        wire.written().contains(r#""method":"notifications/cancelled","params":{"#),
        "{}",
        wire.written()
    );
    assert!(wire.written().contains(r#""requestId":1"#));
}

// ----- in the buffer, and not begun

/// What the transport has of the frames `one`, `two` and so on, in order.
fn frames(methods: &[&str]) -> String {
    methods.iter().zip(1..).map(|(method, id)| frame(id, method)).collect()
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many calls")]
async fn what_lies_in_the_buffer_is_withdrawn_at_its_time_as_long_as_the_transport_has_nothing_of_it() {
    let (length, names) = (frame(1, "one").len(), ["one", "two", "six", "ten"]);
    for exact in [false, true] {
        for accepted in [0, 1, length - 1, length, length + 1, 3 * length] {
            for way in ["deadline", "attempt", "drop"] {
                let wire = Wire::new();
                let client = wire.connect(built(exact));
                let until = Instant::now() + SECOND;
                let timed = names.map(|name| {
                    let mut request = request(name);
                    match way {
                        "deadline" => request.context_mut().set_deadline(Deadline::At(until)),
                        "attempt" => request.context_mut().set_attempt_until(Some(until)),
                        _ => {}
                    }
                    request
                });
                let (calls, marks) = in_one_buffer(&client, timed).await;
                wire.accept(accepted).await;
                advance(SECOND).await;
                let begun = begun(exact, accepted);
                for (at, mut call) in calls.into_iter().enumerate() {
                    assert!(!marks[at].was_withdrawn());
                    let told = if way == "drop" { Poll::Pending } else { call.poll() };
                    match told {
                        _ if way == "drop" => {}
                        Poll::Ready(Err(mut error)) if at >= begun => {
                            assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Call));
                            assert!(matches!(
                                (error.cause(), way),
                                (Cause::Deadline, "deadline") | (Cause::AttemptTimeout, "attempt")
                            ));
                            assert!(handed_back(&mut error));
                        }
                        Poll::Ready(Err(error)) => {
                            assert_eq!((error.delivery(), way), (Delivery::Ambiguous, "deadline"));
                        }
                        Poll::Pending => assert!(at < begun && way == "attempt"),
                        told => panic!("{told:?}"),
                    }
                    drop(call);
                    assert_eq!(marks[at].was_withdrawn(), at >= begun, "{at}, {exact}, {accepted}, {way}");
                }
                // Its place is another's, and what is behind it goes.
                let mut last = start(&client, request("last")).await;
                wire.accept(usize::MAX / 2).await;
                let written = wire.written();
                assert!(written.starts_with(&frames(&names[..begun])), "{written}");
                for (at, name) in names.iter().enumerate() {
                    assert_eq!(written.matches(&format!("{name:?}")).count(), usize::from(at < begun));
                }
                // Of what was never sent the peer is told nothing.
                assert_eq!(written.matches("notifications/cancelled").count(), begun);
                assert_eq!(written.matches("\"last\"").count(), 1);
                wire.send(r#"[{"id":5,"result":0},{"id":6,"result":0}]"#).await;
                assert_ready_ok!(last.poll());
                assert_eq!((client.in_flight(), client.queue_len()), (0, 0));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_lies_in_the_buffer_does_not_go_after_its_time_though_its_task_has_its_turn_late() {
    for exact in [false, true] {
        for accepted in [0, 5] {
            let wire = Wire::new();
            let client = wire.connect(built(exact));
            let late = |name| request(name).within(SECOND);
            let requests = [request("one"), late("two"), request("six"), late("ten"), late("end")];
            let (mut calls, marks) = in_one_buffer(&client, requests).await;
            wire.accept(accepted).await;
            advance(SECOND + Duration::from_millis(1)).await;
            wire.accept(usize::MAX / 2).await;
            for at in [1, 3, 4] {
                let mut error = failed(&mut calls[at]);
                assert!(matches!(error.cause(), Cause::Deadline));
                assert_eq!(error.delivery(), Delivery::NotSent);
                assert!(handed_back(&mut error) && marks[at].was_withdrawn());
            }
            assert_eq!(wire.written(), frame(1, "one") + &frame(3, "six"));
            assert_eq!((is_sent(&marks[0]), is_sent(&marks[2]), client.in_flight()), (true, true, 2));
            wire.send(r#"[{"id":1,"result":1},{"id":3,"result":3}]"#).await;
            assert_eq!(assert_ready_ok!(calls[2].poll()).raw().get(), "3");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_closure_hands_back_what_lies_in_the_buffer_and_was_not_begun() {
    for exact in [false, true] {
        for accepted in [0, 5] {
            for by in ["the peer", "us", "a failing write", "the runtime"] {
                let wire = Wire::new();
                let client = wire.connect(built(exact));
                let requests = ["one", "two", "six", "ten"].map(request);
                let ([mut one, two, mut six, mut ten], marks) = in_one_buffer(&client, requests).await;
                wire.accept(accepted).await;
                drop(two);
                match by {
                    "the peer" => wire.eof().await,
                    "us" => client.close(),
                    "a failing write" => {
                        wire.set(|state| state.write_error = Some(io::ErrorKind::BrokenPipe))
                    }
                    _ => wire.set(|state| state.panics = &["read"]),
                }
                settle().await;
                advance(Duration::from_millis(51)).await;
                settle().await;
                // The one that was withdrawn is none that the closure took down.
                assert_eq!(client.closure().unwrap().in_flight(), 3, "{by}");
                let mut error = failed(&mut one);
                assert_eq!(
                    error.delivery(),
                    match (exact, accepted) {
                        (false, _) => Delivery::Ambiguous,
                        (true, 0) => Delivery::NotSent,
                        (true, _) => Delivery::NotProcessed,
                    }
                );
                assert_eq!(handed_back(&mut error), exact && accepted == 0);
                for call in [&mut six, &mut ten] {
                    let mut error = failed(call);
                    assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Connection));
                    assert!(handed_back(&mut error));
                }
                let withdrawn = marks.map(|marks| marks.was_withdrawn());
                assert_eq!(withdrawn, [exact && accepted == 0, true, true, true]);
                assert_eq!(wire.written().len(), accepted);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_panics_has_not_said_what_it_accepted() {
    let wire = Wire::new();
    wire.set(|state| state.panics = &["write"]);
    let client = wire.connect(Client::builder().exact_writes());
    let (one, marks) = watched(request("one"));
    let mut one = start_now(&client, one);
    settle().await;
    let mut error = failed(&mut one);
    assert_eq!(error.delivery(), Delivery::Ambiguous);
    assert!(!handed_back(&mut error) && !marks.was_withdrawn());
}

#[tokio::test(start_paused = true)]
async fn whatever_of_a_transport_panics_each_call_ends_with_what_is_known_of_it_and_the_connection_too() {
    for panics in [
        &["read"][..],
        &["read", "drop"],
        &["write"],
        &["write", "drop"],
        &["flush"],
        &["flush", "drop"],
        &["shutdown"],
        &["drop"],
        &["shutdown", "drop"],
    ] {
        let wire = Wire::new();
        // What is behind a flush has not been offered.
        wire.hold_back(panics.contains(&"flush")).await;
        wire.accept(frame(1, "one").len()).await;
        let client = wire.connect(Client::builder().exact_writes());
        let mut one = start(&client, request("one")).await;
        let mut two = start(&client, request("two")).await;
        let mut closed = tokio_test::task::spawn(client.closed());
        assert_pending!(closed.poll());
        wire.set(|state| state.panics = panics);
        settle().await;
        wire.eof().await;
        assert_eq!(failed(&mut one).delivery(), Delivery::Ambiguous, "{panics:?}");
        let mut error = failed(&mut two);
        let expected = if panics.contains(&"write") { Delivery::Ambiguous } else { Delivery::NotSent };
        assert_eq!((error.delivery(), handed_back(&mut error)), (expected, expected == Delivery::NotSent));
        assert_eq!(assert_ready!(closed.poll()).in_flight(), 2);
        assert!(wire.is_closed() && client.closure().is_some());
    }
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many calls")]
async fn what_the_transport_had_nothing_of_is_sent_in_order_and_once_when_it_takes_more() {
    let names = ["one", "two", "six", "ten", "end", "new"];
    let all = frames(&names);
    for exact in [false, true] {
        for step in [1, 7, frame(1, "one").len(), 200] {
            let wire = Wire::new();
            let client = wire.connect(built(exact));
            let mut calls = Vec::new();
            for name in names {
                // Those for which somebody answers, and others.
                let request = if calls.len() % 3 == 1 { request(name) } else { watched(request(name)).0 };
                calls.push(start_now(&client, request));
                // Some come into one buffer, and some later.
                if calls.len() % 2 == 0 {
                    wire.accept(step).await;
                }
            }
            for _ in 0..=all.len() / step {
                wire.accept(step).await;
                // It is looked at again for all kinds of reasons.
                wire.send(r#"{"method":"something"}"#).await;
            }
            assert_eq!(wire.written(), all);
            let answers = (1..=names.len()).map(|id| format!("{{\"id\":{id},\"result\":{id}}}"));
            wire.send(&answers.collect::<Vec<_>>().join("\n")).await;
            for (call, id) in calls.iter_mut().zip(1..) {
                assert_eq!(assert_ready_ok!(call.poll()).raw().get(), format!("{id}"));
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn frames_go_in_one_write_unless_a_copy_could_be_kept_of_one_for_which_somebody_answers() {
    const MANY: usize = 64;
    for (exact, is_watched, writes) in
        [(true, true, 1), (true, false, 1), (false, false, 1), (false, true, MANY)]
    {
        let wire = Wire::open();
        let client = wire.connect(built(exact));
        let request = |_| if is_watched { watched(request("one")).0 } else { request("one") };
        let _calls: Vec<_> = (0..MANY).map(|n| start_now(&client, request(n))).collect();
        settle().await;
        assert_eq!(wire.written().lines().count(), MANY);
        assert_eq!(wire.0.lock().unwrap().writes, writes);
    }
}

#[tokio::test(start_paused = true)]
async fn a_frame_that_is_given_up_while_it_is_offered_does_not_go_after_it_was_put_back() {
    for by_deadline in [false, true] {
        let wire = Wire::new();
        let client = wire.connect(Client::builder().exact_writes());
        let mut one = start(&client, request("one").within(SECOND)).await;
        let two = start(&client, request("two")).await;
        advance(SECOND).await;
        // As another thread has its turn just then.
        let told = Arc::new(Mutex::new(None));
        let say = told.clone();
        wire.set(|state| {
            state.meanwhile = Some(Box::new(move || {
                let was_told = if by_deadline { one.poll() } else { Poll::Pending };
                *say.lock().unwrap() = Some(was_told);
            }));
        });
        settle().await;
        match told.lock().unwrap().take() {
            Some(Poll::Ready(Err(error))) if by_deadline => assert_eq!(error.delivery(), Delivery::Ambiguous),
            Some(Poll::Pending) if !by_deadline => {}
            told => panic!("{told:?}"),
        }
        drop(two);
        let mut last = start(&client, request("last")).await;
        wire.accept(usize::MAX / 2).await;
        assert_eq!(wire.written(), frame(3, "last"));
        wire.send(r#"{"id":3,"result":0}"#).await;
        assert_ready_ok!(last.poll());
        assert_eq!(client.in_flight(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_poll_reads_no_clock() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder());
    let past = Deadline::At(Instant::now());
    let mut call = tokio_test::task::spawn(client.request(request("late").deadline(past)));
    assert_pending!(call.poll());
    let error = assert_ready_err!(call.poll());
    assert_eq!(error.delivery(), Delivery::NotSent);
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_there_wins_over_a_deadline_that_has_passed() {
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let mut call = start(&client, request("one").within(Duration::from_secs(1))).await;
    wire.send(r#"{"jsonrpc":"2.0","id":1,"result":{}}"#).await;
    advance(Duration::from_secs(2)).await;
    assert_ready_ok!(call.poll());
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many calls")]
async fn frames_behind_a_stalled_pipe_can_be_withdrawn_and_do_not_pile_up() {
    for exact in [false, true] {
        let wire = Wire::new();
        let client = wire.connect(built(exact).max_in_flight(2));
        let mut stalled = start(&client, big(1 << 20)).await;
        for _ in 0..10_000 {
            // Each of them is in the bound's last place, and gives it back.
            drop(start_now(&client, request("queued")));
        }
        let mut queued = start(&client, request("last")).await;
        let refused = assert_ready_err!(tokio_test::task::spawn(client.request(request("more"))).poll());
        assert!(matches!(refused.cause(), Cause::Refused(Refusal::Overloaded(_))));
        assert_eq!(refused.delivery(), Delivery::NotSent);
        assert!(client.queue_len() < 100);
        wire.accept(usize::MAX / 2).await;
        assert!(!wire.written().contains("queued"));
        wire.send(r#"[{"id":1,"result":0},{"id":2,"result":0}]"#).await;
        assert_ready_ok!(stalled.poll());
        assert_ready_ok!(queued.poll());
    }
}

fn start_now(client: &Client, request: Request) -> Spawn<ResponseFuture> {
    let mut call = tokio_test::task::spawn(client.request(request));
    assert_pending!(call.poll());
    call
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many calls")]
async fn a_batch_is_small_so_that_the_rest_can_be_withdrawn() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder());
    let calls: Vec<_> = (0..1000).map(|_| start_now(&client, big(1000))).collect();
    settle().await;
    drop(calls);
    wire.accept(usize::MAX / 2).await;
    let written = wire.written();
    let begun = written.matches("\"big\"").count();
    assert!((10..=17).contains(&begun), "{begun}");
    assert_eq!(written.matches("notifications/cancelled").count(), begun);
}

#[test]
fn a_call_in_flight_is_small() {
    assert!(size_of::<Exchange>() + size_of::<ResponseFuture>() + 64 <= 1024);
}

// ----- calls that were given up

#[tokio::test(start_paused = true)]
async fn a_dropped_call_is_cancelled_if_it_was_begun_and_never_an_initialize() {
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    drop(start_now(&client, request("queued")));
    settle().await;
    assert_eq!(wire.written(), "");
    drop(start(&client, request("initialize")).await);
    settle().await;
    assert_eq!(wire.written(), frame(1, "initialize"));
    let answered = start(&client, request("answered")).await;
    wire.send(r#"{"id":2,"result":1}"#).await;
    drop(answered);
    settle().await;
    assert!(!wire.written().contains("cancelled"));
    drop(start(&client, request("gone")).await);
    settle().await;
    let cancelled = wire.written().lines().last().unwrap().to_owned();
    let cancelled: serde_json::Value = serde_json::from_str(&cancelled).unwrap();
    assert_eq!(cancelled["method"], "notifications/cancelled");
    assert_eq!(cancelled["params"]["requestId"], 3);
    assert!(cancelled.get("id").is_none());
}

#[tokio::test(start_paused = true)]
async fn the_cancellation_can_be_replaced_and_left_out() {
    let wire = Wire::open();
    let client = wire.connect(
        Client::builder().cancel_with(|id, method| Request::new("$/cancel", (id, method.to_owned())).ok()),
    );
    drop(start(&client, request("one")).await);
    settle().await;
    assert!(wire.written().ends_with("\"method\":\"$/cancel\",\"params\":[1,\"one\"]}\n"));

    let wire = Wire::open();
    let client = wire.connect(Client::builder().without_cancel());
    drop(start(&client, request("one")).await);
    settle().await;
    assert_eq!(wire.written(), frame(1, "one"));

    let wire = Wire::open();
    let client = wire.connect(Client::builder().cancel_with(|_, _| panic!("as tested")));
    drop(start(&client, request("one")).await);
    settle().await;
    assert!(client.closure().is_none());
}

type Seen = Arc<Mutex<Vec<(String, bool)>>>;

/// The request of a call whose late answers are noted: method, and whether a fence was violated.
fn reporting(method: &'static str, seen: &Seen) -> Request {
    let mut request = request(method);
    let seen = seen.clone();
    request.context_mut().events = Events::to(move |event| {
        if let Event::LateAnswer(late) = event {
            seen.lock().unwrap().push((late.method.clone(), late.violated.is_some()));
        }
    });
    request
}

#[tokio::test(start_paused = true)]
async fn late_answers_are_reported_once_and_name_the_fence_that_does_not_hold() {
    let seen = Seen::default();
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let (replaced, activity) = watched(reporting("replaced", &seen));
    let replaced = start(&client, replaced).await;
    let dropped = start(&client, reporting("dropped", &seen)).await;
    let error = start(&client, reporting("error", &seen)).await;
    let mut expired =
        start(&client, reporting("expired", &seen).deadline(Deadline::At(Instant::now()))).await;
    assert_ready_err!(expired.poll());
    activity.set_replaced(Fence::because(CallContext::new().assign_id(), "as tested"));
    drop((replaced, dropped, error));
    settle().await;
    for _ in 0..2 {
        wire.send(r#"{"id":2,"result":1}"#).await;
        wire.send(r#"{"id":1,"result":1}"#).await;
        wire.send(r#"{"id":3,"error":{"code":1,"message":"no"}}"#).await;
        wire.send(r#"{"id":4,"result":1}"#).await;
    }
    let expected = [("dropped", false), ("replaced", true), ("expired", false)];
    assert_eq!(*seen.lock().unwrap(), expected.map(|(method, violated)| (method.to_owned(), violated)));
    assert_eq!(client.ignored(), 4);
    // It has been answered: there is nothing to cancel.
    let written = wire.written().len();
    drop(expired);
    settle().await;
    assert_eq!(wire.written().len(), written);
}

#[tokio::test(start_paused = true)]
async fn a_late_error_is_no_late_success_however_large_it_is_and_what_cannot_be_told_is_said_to_be_so() {
    let pad = "x".repeat(200);
    let answers = [
        (format!(r#"{{"id":1,"error":{{"code":1,"message":"{pad}"}}}}"#), None),
        (format!(r#"{{"error":{{"code":1,"message":"{pad}"}},"id":1}}"#), None),
        (format!(r#"{{"id":1,"result":"{pad}"}}"#), Some(false)),
        (format!(r#"{{"id":1,"result":null,"error":{{"message":"{pad}"}}}}"#), Some(true)),
    ];
    // Given up before it comes, or when it is there and nobody has taken it.
    for ((answer, expected), is_there) in answers.iter().flat_map(|of| [(of, false), (of, true)]) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let wire = Wire::open();
        let client = wire.connect(Client::builder().max_line(100));
        let (mut replaced, activity) = watched(request("replaced"));
        let told = seen.clone();
        replaced.context_mut().events = Events::to(move |event| {
            if let Event::LateAnswer(late) = event {
                told.lock().unwrap().push((late.may_be_error, late.violated.is_some()));
            }
        });
        let replaced = start(&client, replaced).await;
        activity.set_replaced(Fence::because(CallContext::new().assign_id(), "as tested"));
        if is_there {
            wire.send(answer).await;
            assert!(replaced.is_woken());
            drop(replaced);
        } else {
            drop(replaced);
            settle().await;
            wire.send(answer).await;
        }
        let expected: Vec<_> = expected.iter().map(|may_be_error| (*may_be_error, true)).collect();
        assert_eq!(*seen.lock().unwrap(), expected, "{answer}");
        assert_eq!(client.ignored(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_nobody_took_is_a_late_one() {
    let seen = Seen::default();
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let call = start(&client, reporting("one", &seen)).await;
    wire.send(r#"{"id":1,"result":1}"#).await;
    assert!(call.is_woken());
    drop(call);
    assert_eq!(*seen.lock().unwrap(), [("one".to_owned(), false)]);
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many calls")]
async fn the_last_thousand_calls_are_remembered() {
    let seen = Seen::default();
    let wire = Wire::open();
    let client = wire.connect(Client::builder().without_cancel());
    for _ in 0..1030 {
        drop(start(&client, reporting("one", &seen)).await);
    }
    settle().await;
    let answer = |id: u64| format!(r#"{{"id":{id},"result":1}}"#);
    wire.send(&answer(6)).await;
    assert_eq!((seen.lock().unwrap().len(), client.ignored()), (0, 1));
    wire.send(&answer(7)).await;
    assert_eq!((seen.lock().unwrap().len(), client.ignored()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn an_id_whose_frame_the_peer_cannot_have_read_is_not_answered() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder().exact_writes());
    let mut call = start(&client, request("one")).await;
    let length = frame(1, "one").len();
    wire.accept(length - 2).await;
    wire.send(r#"{"id":1,"result":"guessed"}"#).await;
    assert_pending!(call.poll());
    assert_eq!(client.ignored(), 1);
    // Some servers run a message that lacks its newline.
    wire.accept(1).await;
    wire.send(r#"{"id":1,"result":"read"}"#).await;
    assert_eq!(assert_ready_ok!(call.poll()).parse::<String>().unwrap(), "read");
    wire.accept(1).await;
    assert_eq!(wire.written(), frame(1, "one"));
}

/// Such a transport may send what it is offered and say later that it has accepted it, as one over a channel does.
#[tokio::test(start_paused = true)]
async fn where_copies_may_be_kept_an_answer_counts_from_when_its_frame_was_offered() {
    let answers = "{\"id\":1,\"result\":1}\n{\"id\":2,\"result\":2}\n{\"id\":3,\"result\":3}";
    for accepted in [0, 5] {
        for closes in [false, true] {
            let wire = Wire::new();
            let client = wire.connect(Client::builder());
            // The second one is not offered: somebody answers for what becomes of it, and it lies behind the first.
            let requests = ["one", "two"].map(request);
            let ([mut one, mut two], [first, second]) = in_one_buffer(&client, requests).await;
            wire.accept(accepted).await;
            wire.send(answers).await;
            assert_eq!(assert_ready_ok!(one.poll()).raw().get(), "1");
            assert_pending!(two.poll());
            assert_eq!((client.ignored(), client.in_flight()), (2, 1));
            // It is answered once.
            wire.send(r#"{"id":1,"result":1}"#).await;
            assert_eq!(client.ignored(), 3);
            drop(one);
            if closes {
                wire.eof().await;
                assert_eq!(failed(&mut two).delivery(), Delivery::NotSent);
                assert_eq!(client.closure().unwrap().in_flight(), 1);
                continue;
            }
            wire.accept(usize::MAX / 2).await;
            assert_eq!(wire.written(), frame(1, "one") + &frame(2, "two"));
            assert!(is_sent(&first) && is_sent(&second));
            wire.send(answers).await;
            assert_eq!(assert_ready_ok!(two.poll()).raw().get(), "2");
            assert_eq!(client.in_flight(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_answered_before_it_was_accepted_does_not_postpone_the_end() {
    let wire = Wire::new();
    let client = judged(&wire);
    let one = start(&client, request("one")).await;
    wire.send(r#"{"id":1,"result":1}"#).await;
    assert!(one.is_woken());
    let mut late = start(&client, request("late").within(SECOND)).await;
    // By now the callers know how often the peer has been heard.
    let mut later = start(&client, request("later").within(2 * SECOND)).await;
    advance(SECOND).await;
    assert_ready_err!(late.poll());
    settle().await;
    advance(SECOND).await;
    assert_ready_err!(later.poll());
    settle().await;
    assert!(client.closure().is_none());
    advance(10 * SECOND).await;
    settle().await;
    assert!(client.closure().is_some());
    drop(one);
}

#[tokio::test(start_paused = true)]
async fn the_place_of_a_call_that_is_given_up_is_the_next_ones_at_once() {
    let wire = Wire::open();
    let client = wire.connect(Client::builder().max_in_flight(1));
    let now = Deadline::At(Instant::now());
    // Their frames are written: the connection's task has to hear of it, and does not before the next call.
    drop(start(&client, request("dropped")).await);
    let mut expired = start(&client, request("expired").deadline(now)).await;
    assert_ready_err!(expired.poll());
    let mut next = start(&client, request("next")).await;
    drop(expired);
    let refused = assert_ready_err!(tokio_test::task::spawn(client.request(request("more"))).poll());
    assert!(matches!(refused.cause(), Cause::Refused(Refusal::Overloaded(_))));
    wire.send(r#"[{"id":1,"result":0},{"id":2,"result":0},{"id":3,"result":0}]"#).await;
    assert_ready_ok!(next.poll());
    assert_eq!(client.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_given_up_while_its_answer_is_handed_over_gives_one_place_back() {
    /// Drops another call when the first one is woken.
    struct Drops(std::sync::Mutex<Option<ResponseFuture>>);
    impl std::task::Wake for Drops {
        fn wake(self: Arc<Self>) {
            let dropped = self.0.lock().unwrap().take();
            drop(dropped);
        }
    }

    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let (mut first, second) = (client.request(request("first")), client.request(request("second")));
    let waker = Waker::from(Arc::new(Drops(std::sync::Mutex::new(Some(second)))));
    assert_pending!(Pin::new(&mut first).poll(&mut Context::from_waker(&waker)));
    settle().await;
    assert_eq!(client.in_flight(), 2);
    wire.send(r#"[{"id":1,"result":0},{"id":2,"result":0}]"#).await;
    assert_ready_ok!(Pin::new(&mut first).poll(&mut Context::from_waker(&waker)));
    assert_eq!(client.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn whatever_ends_a_call_it_is_in_flight_no_more() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder().max_line(100));
    // Begun, and given up before it is written.
    let now = Deadline::At(Instant::now());
    let mut expired = start(&client, request("expired").deadline(now)).await;
    assert_ready_err!(expired.poll());
    assert_eq!(client.in_flight(), 0);
    drop(expired);
    let dropped = start(&client, request("dropped").deadline(now)).await;
    assert_eq!(client.in_flight(), 1);
    drop(dropped);
    assert_eq!(client.in_flight(), 0);
    let mut withdrawn = start(&client, request("withdrawn").deadline(now)).await;
    assert_ready_err!(withdrawn.poll());
    assert_eq!(client.in_flight(), 0);
    wire.accept(usize::MAX / 2).await;
    assert_eq!(client.in_flight(), 0);
    // Given up after it was written.
    let mut expired = start(&client, request("expired").deadline(now)).await;
    assert_ready_err!(expired.poll());
    assert_eq!(client.in_flight(), 0);
    drop(expired);
    settle().await;
    assert_eq!(client.in_flight(), 0);
    drop(start(&client, request("dropped")).await);
    assert_eq!(client.in_flight(), 0);
    settle().await;
    assert_eq!(client.in_flight(), 0);
    let telling = tokio_test::task::spawn(client.notify("told", ()));
    drop(telling);
    assert_eq!(client.in_flight(), 0);
    let mut told = tokio_test::task::spawn(client.notify("told", ()));
    assert_pending!(told.poll());
    settle().await;
    assert_ready_ok!(told.poll());
    // Answered: well, with an error, with too much.
    for answer in [r#""result":1"#.to_owned(), r#""error":1"#.to_owned(), format!("\"result\":[{:200}]", 1)] {
        let mut call = start(&client, request("answered")).await;
        let id = wire.written().lines().last().unwrap().split([':', ',']).nth(3).unwrap().to_owned();
        wire.send(&format!("{{{answer},\"id\":{id}}}")).await;
        let _ = assert_ready!(call.poll());
    }
    assert_eq!(client.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_panic_of_foreign_code_hangs_nobody() {
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let mut loud = request("loud");
    loud.context_mut().events = Events::to(|_| panic!("as tested"));
    drop(start(&client, loud).await);
    let mut other = start(&client, request("other")).await;
    wire.send("{\"id\":1,\"result\":1}\n{\"id\":2,\"result\":1}").await;
    assert_ready_ok!(other.poll());
    assert!(client.closure().is_none());

    // The transport itself: the connection is gone.
    let mut call = start(&client, request("one")).await;
    wire.set(|state| state.panics = &["read"]);
    settle().await;
    assert_eq!(failed(&mut call).delivery(), Delivery::Ambiguous);
}

/// A task whose waker panics, as one does whose executor is gone.
struct Loud;

impl Wake for Loud {
    fn wake(self: Arc<Self>) {
        panic!("as tested");
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_sent_is_marked_so_though_who_waits_for_the_mark_before_has_a_waker_that_panics() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder());
    let ((one, first), (two, second)) = (watched(request("one")), watched(request("two")));
    let mut one = tokio_test::task::spawn(client.request(one));
    let mut two = tokio_test::task::spawn(client.request(two));
    assert_pending!(one.poll());
    assert_pending!(two.poll());
    settle().await;
    let waker = Waker::from(Arc::new(Loud));
    assert!(first.poll_sent(&mut Context::from_waker(&waker)).is_err());
    wire.accept(usize::MAX).await;
    assert_eq!((is_sent(&first), is_sent(&second)), (true, true));
    wire.send("{\"id\":1,\"result\":1}\n{\"id\":2,\"result\":1}").await;
    assert_ready_ok!(one.poll());
    assert_ready_ok!(two.poll());
}

#[tokio::test]
async fn what_a_transport_buffers_is_flushed() {
    let (ours, theirs) = tokio::io::duplex(1000);
    let client = Client::new(tokio::io::BufStream::new(ours));
    let call = client.request(request("one"));
    let mut theirs = tokio::io::BufStream::new(theirs);
    let mut line = String::new();
    tokio::io::AsyncBufReadExt::read_line(&mut theirs, &mut line).await.unwrap();
    assert_eq!(line, frame(1, "one"));
    drop(theirs);
    assert_eq!(call.await.unwrap_err().delivery(), Delivery::Ambiguous);
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many messages")]
async fn a_long_batch_is_worked_off_in_portions_and_in_order() {
    const MANY: u64 = 150_000;
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let mut one = start(&client, request("one")).await;
    let mut two = start(&client, request("two")).await;
    let mut three = start(&client, request("three")).await;
    let nothing = "1,".repeat(MANY as usize);
    // Its end and the end of the input are there at once.
    wire.set(|state| {
        let line = format!(r#"[{{"id":1,"result":1}},{nothing}{{"id":2,"result":2}}]"#);
        state.input = format!("{line}\n{{\"id\":3,\"result\":3}}").into_bytes();
        state.eof = true;
    });
    let (mut turns, mut most, mut before) = (0, 0, 0);
    while client.closure().is_none() {
        tokio::task::yield_now().await;
        turns += 1;
        most = most.max(client.ignored() - before);
        before = client.ignored();
        // Nothing behind it is read before it.
        assert!(client.ignored() >= MANY || !two.is_woken() && !three.is_woken());
    }
    // The runtime looks for others after so many turns of one task, if that has more to do. The batch is looked at as a
    // whole first.
    assert!(turns > 6 && most <= 64 * 512, "{turns} {most}");
    assert_eq!(client.ignored(), MANY);
    for (call, result) in [(&mut one, "1"), (&mut two, "2"), (&mut three, "3")] {
        assert_eq!(assert_ready_ok!(call.poll()).raw().get(), result);
    }

    // Half a batch is none, however long it is.
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let mut one = start(&client, request("one")).await;
    wire.set(|state| {
        state.input = format!("[{{\"id\":1,\"result\":1}},{nothing}\n").into_bytes();
        state.eof = true;
    });
    while client.closure().is_none() {
        tokio::task::yield_now().await;
    }
    assert_eq!((failed(&mut one).delivery(), client.ignored()), (Delivery::Ambiguous, 1));
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many messages")]
async fn a_peer_whose_batch_is_worked_off_is_not_silent_and_calls_end_in_time_meanwhile() {
    let wire = Wire::open();
    let client = judged(&wire);
    let mut slow = start(&client, request("slow").within(SECOND)).await;
    let line = format!("[{}1]", "1,".repeat(100_000));
    wire.set(|state| {
        state.input = format!("{line}\n").into_bytes();
        state.room = 0;
    });
    // It has begun, and is not at its end.
    while client.ignored() == 0 {
        tokio::task::yield_now().await;
    }
    assert!(client.ignored() < 100_000);
    advance(SECOND).await;
    assert_eq!(assert_ready_err!(slow.poll()).delivery(), Delivery::Ambiguous);
    advance(20 * SECOND).await;
    settle().await;
    assert_eq!((pings(&wire), client.closure().is_none()), (0, true));
}

// ----- notifications of ours

#[tokio::test(start_paused = true)]
async fn a_notification_resolves_with_its_last_byte() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder().exact_writes());
    let mut told = tokio_test::task::spawn(client.notify("told", ()));
    assert_pending!(told.poll());
    settle().await;
    let frame = "{\"jsonrpc\":\"2.0\",\"method\":\"told\"}\n";
    wire.accept(frame.len() - 1).await;
    assert_pending!(told.poll());
    wire.accept(1).await;
    assert!(told.is_woken());
    assert_ready_ok!(told.poll());
    assert_eq!(wire.written(), frame);

    // A buffer is not the peer.
    wire.set(|state| (state.room, state.holds_back) = (usize::MAX, true));
    let mut told = tokio_test::task::spawn(client.notify("told", ()));
    assert_pending!(told.poll());
    settle().await;
    assert_eq!(wire.written(), frame.repeat(2));
    assert_pending!(told.poll());
    wire.hold_back(false).await;
    assert_ready_ok!(told.poll());
    wire.hold_back(true).await;
    let mut told = tokio_test::task::spawn(client.notify("told", ()));
    assert_pending!(told.poll());
    settle().await;
    wire.eof().await;
    assert_eq!(client.closure().unwrap().in_flight(), 1);
    assert_eq!(assert_ready_err!(told.poll()).delivery(), Delivery::Ambiguous);

    for (accepted, delivery) in
        [(0, Delivery::NotSent), (5, Delivery::NotProcessed), (frame.len() - 1, Delivery::Ambiguous)]
    {
        let wire = Wire::new();
        let client = wire.connect(Client::builder().exact_writes());
        let mut told = tokio_test::task::spawn(client.notify("told", ()));
        assert_pending!(told.poll());
        settle().await;
        wire.accept(accepted).await;
        wire.eof().await;
        assert_eq!(assert_ready_err!(told.poll()).delivery(), delivery);
    }
}

// ----- the end

#[tokio::test(start_paused = true)]
async fn the_last_handle_closes_after_what_was_begun() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder());
    let call = start(&client, request("one")).await;
    wire.accept(5).await;
    drop(client.clone());
    drop(client);
    settle().await;
    assert!(!wire.is_closed());
    drop(call);
    settle().await;
    assert!(!wire.is_closed());
    wire.accept(usize::MAX / 2).await;
    assert!(wire.is_closed());
    assert!(wire.written().starts_with(&frame(1, "one")));
    assert!(wire.written().contains("cancelled"));

    // Not for ever, if the peer does not read.
    let wire = Wire::new();
    let client = wire.connect(Client::builder());
    drop(start(&client, request("one")).await);
    drop(client);
    settle().await;
    assert!(!wire.is_closed());
    advance(Duration::from_millis(51)).await;
    settle().await;
    assert!(wire.is_closed());
}

#[tokio::test(start_paused = true)]
async fn a_question_of_our_own_is_no_call_that_a_closure_took_down() {
    for room in [usize::MAX, 0] {
        let wire = Wire::new();
        wire.set(|state| state.room = room);
        let client = wire.connect(Client::builder().probe(request("ping"), Duration::from_secs(5)));
        let _call = start(&client, request("one")).await;
        let mut probe = tokio_test::task::spawn(Connection::probe(&client).unwrap().1);
        assert_pending!(probe.poll());
        settle().await;
        client.close();
        assert_eq!(client.closed().await.in_flight(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn close_ends_all_calls_at_once() {
    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let mut written = start(&client, request("one")).await;
    let mut closed = tokio_test::task::spawn(client.closed());
    assert_pending!(closed.poll());
    client.close();
    settle().await;
    assert_eq!(failed(&mut written).delivery(), Delivery::Ambiguous);
    assert!(closed.is_woken());
    assert_eq!(assert_ready!(closed.poll()).in_flight(), 1);
    assert!(wire.is_closed());
    let mut ready = client.clone();
    let mut task = tokio_test::task::spawn(());
    let error = assert_ready_err!(task.enter(|cx, _| tower::Service::poll_ready(&mut ready, cx)));
    assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Connection));
    Connection::close(&client).await;
}

#[test]
fn a_runtime_that_shuts_down_ends_the_calls() {
    let wire = Wire::open();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
    let (client, mut call) = runtime.block_on(async {
        let client = wire.connect(Client::builder());
        let call = start(&client, request("one")).await;
        (client, call)
    });
    drop(runtime);
    assert_eq!(failed(&mut call).delivery(), Delivery::Ambiguous);
    assert!(client.closure().is_some());
}

#[test]
fn outside_of_a_runtime_calls_are_refused() {
    let client = Wire::open().connect(Client::builder());
    let mut call = tokio_test::task::spawn(client.request(request("one")));
    let error = assert_ready_err!(call.poll());
    assert!(matches!(error.cause(), Cause::Refused(Refusal::Config(_))));
}

fn process(ends_effects: bool) -> (Process, oneshot::Sender<()>, watch::Sender<Option<Exit>>) {
    let (exit_now, exited) = oneshot::channel();
    let (group, exit) = watch::channel(None);
    let process = Process {
        exited: Box::pin(async move {
            let _ = exited.await;
        }),
        exit,
        ends_effects,
        stderr: Arc::new(|| vec!["last words".to_owned()]),
        overlapped: false,
    };
    (process, exit_now, group)
}

#[tokio::test(start_paused = true)]
async fn a_process_that_exits_closes_after_a_short_drain_though_its_pipe_stays_open() {
    let (process, exit_now, group) = process(true);
    let wire = Wire::open();
    let client = wire.connect(Client::builder().exact_writes().process(process));
    assert!(client.has_process() && !client.overlapped());
    assert_eq!(client.stderr(), ["last words"]);
    let mut answered = start(&client, request("one")).await;
    let mut lost = start(&client, request("two")).await;
    exit_now.send(()).unwrap();
    settle().await;
    // Nothing is written any more, not even to a grandchild that reads the pipe.
    let mut after = start(&client, request("three")).await;
    wire.send(r#"{"id":1,"result":1}"#).await;
    assert_ready_ok!(answered.poll());
    assert_pending!(lost.poll());
    advance(Duration::from_millis(51)).await;
    settle().await;
    let error = failed(&mut lost);
    let closure = error.closure().unwrap().clone();
    assert!(closure.exit_ends_effects() && closure.exit().is_none());
    assert_eq!(failed(&mut after).delivery(), Delivery::NotSent);
    assert!(!wire.written().contains("three"));

    let mut exited = tokio_test::task::spawn(closure.exited());
    assert_pending!(exited.poll());
    let mut closed = tokio_test::task::spawn(Connection::close(&client));
    assert_pending!(closed.poll());
    group.send(Some(Exit::new(None, true))).unwrap();
    assert!(assert_ready!(exited.poll()).unwrap().group_gone);
    assert_ready!(closed.poll());
}

#[tokio::test(start_paused = true)]
#[cfg_attr(miri, ignore = "too many lines")]
async fn an_answer_in_the_pipe_of_a_process_that_has_exited_is_read_however_long_that_takes() {
    // Behind as much as a process can leave there; without a newline; and behind more than that.
    for (junk, newline, is_read) in [(900 << 10, "\n", true), (900 << 10, "", true), (2 << 20, "\n", false)] {
        let (process, exit_now, _group) = process(true);
        let wire = Wire::open();
        let client = wire.connect(Client::builder().process(process));
        let mut call = start(&client, request("one")).await;
        exit_now.send(()).unwrap();
        settle().await;
        wire.set(|state| {
            state.input = b"y\n".repeat(junk / 2);
            state.input.extend_from_slice(br#"{"id":1,"result":1}"#);
            state.input.extend_from_slice(newline.as_bytes());
        });
        while client.closure().is_none() {
            // The turn of the others.
            advance(Duration::from_millis(100)).await;
        }
        let ended = assert_ready!(call.poll());
        assert_eq!(ended.is_ok(), is_read, "{junk} {newline:?}");
        let closure = client.closure().unwrap();
        assert_eq!(closure.to_string(), "the peer's process exited");
    }
}

#[tokio::test(start_paused = true)]
async fn a_group_that_nobody_watches_any_more_is_not_known_to_be_gone() {
    let (process, _exit_now, group) = process(true);
    let wire = Wire::open();
    let client = wire.connect(Client::builder().process(process));
    wire.eof().await;
    drop(group);
    assert!(!client.closure().unwrap().exited().await.unwrap().group_gone);
    Connection::close(&client).await;
}

// ----- silence

const SECOND: Duration = Duration::from_secs(1);

fn judged(wire: &Wire) -> Client {
    wire.connect(Client::builder().probe(request("ping"), 5 * SECOND))
}

/// Starts a call and lets its deadline pass.
async fn expire(client: &Client) -> Spawn<ResponseFuture> {
    let mut call = start(client, request("slow").within(SECOND)).await;
    advance(SECOND).await;
    let error = assert_ready_err!(call.poll());
    assert_eq!(error.delivery(), Delivery::Ambiguous);
    settle().await;
    call
}

fn pings(wire: &Wire) -> usize {
    wire.written().matches("\"ping\"").count()
}

#[tokio::test(start_paused = true)]
async fn a_silent_peer_that_does_not_answer_a_probe_is_gone() {
    let wire = Wire::open();
    let client = judged(&wire);
    let _one = expire(&client).await;
    let _two = expire(&client).await;
    assert_eq!(pings(&wire), 1);
    assert!(client.closure().is_none());
    advance(4 * SECOND).await;
    settle().await;
    assert!(client.closure().unwrap().to_string().contains("silent"));
    let mut call = tokio_test::task::spawn(client.request(request("next")));
    let mut error = assert_ready_err!(call.poll());
    assert_eq!(error.scope(), Scope::Connection);
    assert!(handed_back(&mut error));
}

#[tokio::test(start_paused = true)]
async fn anything_that_is_received_shows_life() {
    for life in [r#"{"id":2,"result":{}}"#, r#"{"id":2,"error":{"code":-32601,"message":""}}"#, "?", "{}"] {
        let wire = Wire::open();
        let client = judged(&wire);
        let _call = expire(&client).await;
        assert_eq!(pings(&wire), 1);
        wire.send(life).await;
        advance(60 * SECOND).await;
        settle().await;
        assert!(client.closure().is_none());
        assert_eq!(client.ignored() == 0, life.contains("id"));
        // And it can be suspected again.
        let _call = expire(&client).await;
        assert_eq!(pings(&wire), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_was_heard_since_the_call_is_not_suspected() {
    let wire = Wire::open();
    let client = judged(&wire);
    let mut call = start(&client, request("slow").within(SECOND)).await;
    wire.send(r#"{"method":"progress"}"#).await;
    advance(SECOND).await;
    assert_ready_err!(call.poll());
    settle().await;
    assert_eq!(pings(&wire), 0);

    let wire = Wire::open();
    let client = wire.connect(Client::builder());
    let _call = expire(&client).await;
    advance(600 * SECOND).await;
    settle().await;
    assert!(client.closure().is_none());
}

#[tokio::test(start_paused = true)]
async fn calls_with_time_left_postpone_the_end() {
    let wire = Wire::open();
    let client = judged(&wire);
    let mut patient = start(&client, request("patient").within(20 * SECOND)).await;
    let _call = expire(&client).await;
    advance(6 * SECOND).await;
    settle().await;
    assert!(client.closure().is_none());
    // Nothing more is sent to it meanwhile.
    let mut held = start(&client, request("held")).await;
    assert!(!wire.written().contains("held"));
    assert_pending!(patient.poll());
    advance(14 * SECOND).await;
    settle().await;
    assert!(client.closure().is_some());
    assert_eq!(failed(&mut held).delivery(), Delivery::NotSent);
}

#[tokio::test(start_paused = true)]
async fn a_postponed_end_comes_with_the_last_call_or_not_at_all() {
    let wire = Wire::open();
    let client = judged(&wire);
    let patient = start(&client, request("patient").within(20 * SECOND)).await;
    let _call = expire(&client).await;
    advance(6 * SECOND).await;
    settle().await;
    drop(patient);
    settle().await;
    assert!(client.closure().is_some());

    let wire = Wire::open();
    let client = judged(&wire);
    let mut patient = start(&client, request("patient").within(20 * SECOND)).await;
    let _call = expire(&client).await;
    advance(6 * SECOND).await;
    settle().await;
    let mut held = start(&client, request("held")).await;
    wire.send(r#"{"id":1,"result":1}"#).await;
    assert_ready_ok!(patient.poll());
    wire.send(r#"{"id":4,"result":1}"#).await;
    assert_ready_ok!(held.poll());
    assert!(client.closure().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_deadline_postpones_the_end_for_five_minutes() {
    let wire = Wire::open();
    let client = judged(&wire);
    let mut never = start(&client, request("never").deadline(Deadline::Never)).await;
    let _call = expire(&client).await;
    advance(5 * SECOND).await;
    settle().await;
    advance(299 * SECOND).await;
    settle().await;
    assert_pending!(never.poll());
    advance(2 * SECOND).await;
    settle().await;
    assert_eq!(failed(&mut never).delivery(), Delivery::Ambiguous);
}

#[tokio::test(start_paused = true)]
async fn a_call_that_lies_in_the_buffer_and_was_not_begun_does_not_postpone_the_end() {
    let wire = Wire::new();
    let client = wire.connect(Client::builder().exact_writes().probe(request("ping"), 5 * SECOND));
    let requests = [request("one").within(SECOND), request("two").within(20 * SECOND)];
    let ([mut one, mut two], marks) = in_one_buffer(&client, requests).await;
    advance(SECOND).await;
    assert_eq!(assert_ready_err!(one.poll()).delivery(), Delivery::NotSent);
    settle().await;
    advance(5 * SECOND).await;
    settle().await;
    let mut error = failed(&mut two);
    assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Connection));
    assert!(handed_back(&mut error) && marks[1].was_withdrawn());
    assert_eq!(client.closure().unwrap().in_flight(), 1);

    // Where another one postpones it, it is not sent meanwhile, and goes once the peer is there again.
    let wire = Wire::new();
    let client = wire.connect(Client::builder().exact_writes().probe(request("ping"), 5 * SECOND));
    let patient = ["one", "two", "six"].map(|name| request(name).within(20 * SECOND));
    let ([mut one, mut two, six], _) = in_one_buffer(&client, patient).await;
    wire.accept(frame(1, "one").len()).await;
    let mut late = start(&client, request("late").within(SECOND)).await;
    advance(SECOND).await;
    assert_eq!(assert_ready_err!(late.poll()).delivery(), Delivery::NotSent);
    settle().await;
    advance(5 * SECOND).await;
    settle().await;
    drop(six);
    wire.accept(usize::MAX / 2).await;
    assert_eq!(wire.written(), frame(1, "one") + &frame(4, "ping"));
    wire.send(r#"{"id":1,"result":1}"#).await;
    assert_ready_ok!(one.poll());
    assert_eq!(wire.written(), frame(1, "one") + &frame(4, "ping") + &frame(5, "two"));
    wire.send(r#"{"id":5,"result":2}"#).await;
    assert_ready_ok!(two.poll());
    assert_eq!((client.in_flight(), client.queue_len(), client.ignored()), (0, 0, 0));
}

#[tokio::test(start_paused = true)]
async fn a_peer_that_stopped_reading_is_suspected_by_calls_that_were_never_sent() {
    let wire = Wire::new();
    let client = judged(&wire);
    drop(start(&client, big(1000)).await);
    let mut call = start(&client, request("queued").within(SECOND)).await;
    advance(SECOND).await;
    assert_eq!(assert_ready_err!(call.poll()).delivery(), Delivery::NotSent);
    settle().await;
    advance(6 * SECOND).await;
    settle().await;
    assert!(client.closure().is_some());

    // Also where the connection's task finds first that a call's time is up.
    let wire = Wire::new();
    let client = wire.connect(Client::builder().exact_writes().probe(request("ping"), 5 * SECOND));
    let ([mut call], _) = in_one_buffer(&client, [request("late").within(SECOND)]).await;
    advance(SECOND).await;
    let mut other = start(&client, request("other")).await;
    assert_eq!(failed(&mut call).delivery(), Delivery::NotSent);
    advance(6 * SECOND).await;
    settle().await;
    let mut error = failed(&mut other);
    assert!(client.closure().unwrap().to_string().contains("silent"));
    assert!(error.delivery() == Delivery::NotSent && handed_back(&mut error));
    // But not if it was heard since, nor at the end of an attempt.
    for is_heard in [true, false] {
        let wire = Wire::new();
        let client = wire.connect(Client::builder().exact_writes().probe(request("ping"), 5 * SECOND));
        let mut timed = request("late");
        match is_heard {
            true => timed.context_mut().set_deadline(Deadline::At(Instant::now() + SECOND)),
            false => timed.context_mut().set_attempt_until(Some(Instant::now() + SECOND)),
        }
        let (_call, _) = in_one_buffer(&client, [timed]).await;
        if is_heard {
            wire.send(r#"{"method":"progress"}"#).await;
        }
        advance(SECOND).await;
        let mut other = start(&client, request("other")).await;
        wire.accept(usize::MAX / 2).await;
        assert_eq!(pings(&wire), 0);
        advance(6 * SECOND).await;
        assert_pending!(other.poll());
    }

    // Or whose buffer does not get rid of what it holds.
    let wire = Wire::open();
    wire.hold_back(true).await;
    let client = judged(&wire);
    let _one = start(&client, request("one")).await;
    let mut call = start(&client, request("queued").within(SECOND)).await;
    advance(SECOND).await;
    assert_eq!(assert_ready_err!(call.poll()).delivery(), Delivery::NotSent);
    settle().await;
    advance(6 * SECOND).await;
    settle().await;
    // The first call has all its time.
    assert!(client.closure().is_none());
    advance(301 * SECOND).await;
    settle().await;
    assert!(client.closure().is_some());
}

#[tokio::test(start_paused = true)]
async fn the_probe_can_be_asked_for_from_outside() {
    let wire = Wire::open();
    let client = judged(&wire);
    let (name, probe) = Connection::probe(&client).unwrap();
    assert_eq!(name, "ping");
    let mut probe = tokio_test::task::spawn(probe);
    assert_pending!(probe.poll());
    settle().await;
    wire.send(r#"{"id":1,"result":{}}"#).await;
    assert_ready_ok!(probe.poll());
    let mut probe = tokio_test::task::spawn(Connection::probe(&client).unwrap().1);
    assert_pending!(probe.poll());
    settle().await;
    advance(5 * SECOND).await;
    assert_eq!(assert_ready_err!(probe.poll()).delivery(), Delivery::Ambiguous);
}
