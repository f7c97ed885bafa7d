//! Who is woken by what: a caller that waits is woken when there is something for it, and by nothing else. Those who
//! wait for a connection are in `tests/reconnect.rs`, those whose deadline passes in `tests/deadline.rs`.

mod lab;

use std::{
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Wake, Waker},
};

use goaround::{
    Call, CallError, Cause, Delivery, Effect, Outcome, Refusal, RetryReadOnly, Tagged, WriteSafetyLayer,
    jsonrpc::{Client, Request, Response},
};
use lab::{Doubt, Lab, Req, SECOND, answer, fail, hang};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex},
    sync::oneshot,
    time::advance,
};
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service};

// ===== The JSON-RPC client =====

type Calling = task::Spawn<goaround::jsonrpc::ResponseFuture>;

/// A client on a pipe that holds so many bytes, and the pipe's other end.
fn client(pipe: usize) -> (Client, BufReader<DuplexStream>) {
    let (ours, theirs) = duplex(pipe);
    (Client::builder().connect(ours), BufReader::new(theirs))
}

/// A call in flight: given to the client and polled.
fn call(client: &Client) -> Calling {
    let mut call = task::spawn(client.request(Request::new("m", json!({})).unwrap()));
    assert_pending!(call.poll());
    call
}

/// Lets the connection's task do what it can.
async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

async fn next(peer: &mut BufReader<DuplexStream>) -> u64 {
    let mut line = String::new();
    peer.read_line(&mut line).await.unwrap();
    serde_json::from_str::<Value>(&line).unwrap()["id"].as_u64().unwrap()
}

async fn respond(peer: &mut BufReader<DuplexStream>, id: u64) {
    let line = format!("{}\n", json!({ "jsonrpc": "2.0", "id": id, "result": id }));
    peer.get_mut().write_all(line.as_bytes()).await.unwrap();
    settle().await;
}

fn number(response: &Response) -> u64 {
    response.parse().unwrap()
}

#[tokio::test(start_paused = true)]
async fn a_call_is_woken_by_its_own_answer_and_not_by_another_one() {
    let (client, mut peer) = client(1 << 10);
    let mut calls = [(); 3].map(|()| call(&client));
    let mut ids = [0; 3];
    for id in &mut ids {
        *id = next(&mut peer).await;
    }
    settle().await;
    assert!(calls.iter().all(|call| !call.is_woken()), "that it was sent is nothing that a call waits for");
    for nth in [1, 2, 0] {
        respond(&mut peer, ids[nth]).await;
        let woken: Vec<_> = calls.iter().map(|call| call.is_woken()).collect();
        assert_eq!(woken, [0, 1, 2].map(|other| other == nth));
        assert_eq!(number(&assert_ready_ok!(calls[nth].poll())), ids[nth]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_closure_wakes_each_call_be_it_sent_or_in_the_queue() {
    // The first one fills the pipe and does no more than begin to be written.
    let (ours, peer) = duplex(8);
    let client = Client::builder().exact_writes().connect(ours);
    let mut calls = [(); 4].map(|()| call(&client));
    settle().await;
    assert!(calls.iter().all(|call| !call.is_woken()));
    drop(peer);
    settle().await;
    for (nth, call) in calls.iter_mut().enumerate() {
        assert!(call.is_woken(), "{nth}");
        let error = assert_ready_err!(call.poll());
        if nth > 0 {
            assert_eq!((error.delivery(), error.outcome()), (Delivery::NotSent, Outcome::NotDone), "{nth}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn closing_the_client_wakes_its_calls_and_who_asks_whether_it_is_ready() {
    let (mut client, _peer) = client(1 << 10);
    let mut ready = task::spawn(client.clone());
    assert_ready_ok!(ready.enter(|cx, mut client| Service::<Request>::poll_ready(&mut *client, cx)));
    let mut calls = [(); 2].map(|()| call(&client));
    settle().await;
    client.close();
    settle().await;
    for call in &mut calls {
        assert!(call.is_woken());
        assert_ready_err!(call.poll());
    }
    // It never waits: it is ready, or it is closed.
    let mut context = Context::from_waker(Waker::noop());
    let error = assert_ready_err!(Service::<Request>::poll_ready(&mut client, &mut context));
    assert_eq!(error.delivery(), Delivery::NotSent);
}

#[tokio::test(start_paused = true)]
async fn a_call_above_the_limit_waits_for_nothing_and_a_place_is_free_once_a_call_has_gone() {
    let (ours, theirs) = duplex(1 << 10);
    let client = Client::builder().max_in_flight(1).without_cancel().connect(ours);
    let mut peer = BufReader::new(theirs);
    let first = call(&client);
    let mut refused = task::spawn(client.request(Request::new("m", json!({})).unwrap()));
    let error = assert_ready_err!(refused.poll());
    assert!(matches!(error.cause(), Cause::Refused(Refusal::Overloaded(_))), "{error}");
    next(&mut peer).await;
    drop(first);
    settle().await;
    let mut second = call(&client);
    let id = next(&mut peer).await;
    respond(&mut peer, id).await;
    assert!(second.is_woken());
    assert_ready_ok!(second.poll());
}

/// Counts how often a task was woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_polled_by_another_task_wakes_that_one() {
    let (client, mut peer) = client(1 << 10);
    let mut call = Box::pin(client.request(Request::new("m", json!({})).unwrap()));
    let tasks = [Arc::<Woken>::default(), Arc::default()];
    for task in &tasks {
        let waker = Waker::from(Arc::clone(task));
        assert_pending!(call.as_mut().poll(&mut Context::from_waker(&waker)));
    }
    let id = next(&mut peer).await;
    respond(&mut peer, id).await;
    assert_eq!(tasks.each_ref().map(|task| task.0.load(Ordering::Relaxed)), [0, 1]);
    let waker = Waker::noop();
    assert_ready_ok!(call.as_mut().poll(&mut Context::from_waker(waker)));
}

/// A task whose waker panics, as one does whose executor is gone.
struct Loud;

impl Wake for Loud {
    fn wake(self: Arc<Self>) {
        panic!("as tested");
    }
}

/// Polls it once, by a task whose waker panics.
fn poll_loudly<F: Future>(future: Pin<&mut F>) {
    let waker = Waker::from(Arc::new(Loud));
    assert!(future.poll(&mut Context::from_waker(&waker)).is_pending());
}

#[tokio::test(start_paused = true)]
async fn an_answer_reaches_its_call_though_the_waker_of_another_one_panics() {
    let (client, mut peer) = client(1 << 10);
    let mut loud = Box::pin(client.request(Request::new("m", json!({})).unwrap()));
    poll_loudly(loud.as_mut());
    let mut other = call(&client);
    let (one, two) = (next(&mut peer).await, next(&mut peer).await);
    // In one read.
    let line = |id| format!("{}\n", json!({ "jsonrpc": "2.0", "id": id, "result": id }));
    peer.get_mut().write_all((line(one) + &line(two)).as_bytes()).await.unwrap();
    settle().await;
    assert!(other.is_woken());
    assert_eq!(number(&assert_ready_ok!(other.poll())), two);
    // Nor has the connection ended; and its answer is there for whoever asks.
    assert!(client.closure().is_none());
    assert_eq!(number(&loud.await.unwrap()), one);
}

#[tokio::test(start_paused = true)]
async fn a_closure_reaches_all_though_the_wakers_of_some_panic() {
    // The first one fills the pipe and does no more than begin to be written.
    let (ours, peer) = duplex(8);
    let client = Client::builder().exact_writes().connect(ours);
    let request = || Request::new("m", json!({})).unwrap();
    let (mut loud, mut calls) = (Vec::new(), Vec::new());
    for _ in 0..3 {
        loud.push(Box::pin(client.request(request())));
        poll_loudly(loud.last_mut().unwrap().as_mut());
        calls.push(call(&client));
    }
    // Those who wait for the end are in lists of tokio's, of which there are some.
    let mut loud_ends: Vec<_> = (0..100).map(|_| Box::pin(client.closed())).collect();
    loud_ends.iter_mut().for_each(|end| poll_loudly(end.as_mut()));
    let mut ends: Vec<_> = (0..20).map(|_| task::spawn(client.closed())).collect();
    ends.iter_mut().for_each(|end| assert_pending!(end.poll()));
    settle().await;
    drop(peer);
    settle().await;
    for call in &mut calls {
        assert!(call.is_woken());
        assert_eq!(assert_ready_err!(call.poll()).delivery(), Delivery::NotSent);
    }
    for end in &mut ends {
        assert!(end.is_woken());
        assert_ready!(end.poll());
    }
}

// ===== Writes in doubt =====

/// How the first of two checks ends, of which one may run at once.
#[derive(Clone, Copy, Debug)]
enum End {
    Verdict,
    Failure,
    Dropped,
    TimedOut,
}

#[tokio::test(start_paused = true)]
async fn a_check_that_waits_for_its_turn_is_woken_however_the_one_before_it_ends() {
    for end in [End::Verdict, End::Failure, End::Dropped, End::TimedOut] {
        let lab = Lab::new();
        lab.write(fail(ambiguous())).write(fail(ambiguous()));
        let (say, heard) = oneshot::channel::<bool>();
        let heard = Arc::new(Mutex::new(Some(heard)));
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            let heard = heard.lock().unwrap().take();
            async move {
                // The first one.
                if let Some(heard) = heard
                    && !heard.await?
                {
                    return Err("no".into());
                }
                Ok(doubt.landed(7))
            }
        });
        let mut service = layer.max_checks(1).check_timeout(SECOND).layer(lab.connection());
        let mut first = task::spawn(service.call(lab::write()));
        assert_pending!(first.poll());
        let mut second = task::spawn(service.call(lab::write()));
        assert_pending!(second.poll());
        assert!(!second.is_woken(), "{end:?}");
        match end {
            End::Verdict => say.send(true).unwrap(),
            End::Failure => say.send(false).unwrap(),
            End::TimedOut => advance(SECOND).await,
            End::Dropped => {}
        }
        if let End::Dropped = end {
            drop(first);
        } else {
            assert!(first.is_woken(), "{end:?}");
            assert!(first.poll().is_ready(), "{end:?}");
        }
        assert!(second.is_woken(), "{end:?}");
        assert_eq!(assert_ready_ok!(second.poll()), 7, "{end:?}");
    }
}

fn ambiguous() -> CallError {
    CallError::ambiguous("lost")
}

fn to(account: &'static str) -> Req {
    Tagged::new(account, Effect::Write).named("pay")
}

#[tokio::test(start_paused = true)]
async fn a_write_on_a_key_in_doubt_waits_for_nothing_and_the_doubts_end_frees_the_key() {
    let lab = Lab::new();
    lab.write(fail(ambiguous())).write(answer(2)).write(answer(3));
    let (say, heard) = oneshot::channel::<()>();
    let heard = Arc::new(Mutex::new(Some(heard)));
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        let heard = heard.lock().unwrap().take().expect("one check");
        async move {
            heard.await?;
            Ok(doubt.landed(1))
        }
    });
    let layer = layer.conflict_key(|request: &Req| Some(**request));
    let mut service = layer.layer(lab.connection());
    let mut first = task::spawn(service.call(to("a")));
    assert_pending!(first.poll());
    let error = assert_ready_err!(task::spawn(service.call(to("a"))).poll());
    assert!(matches!(error.cause(), Cause::Refused(Refusal::KeyInDoubt(_))), "{error}");
    assert_eq!(assert_ready_ok!(task::spawn(service.call(to("b"))).poll()), 2);
    assert!(!first.is_woken());
    say.send(()).unwrap();
    assert!(first.is_woken());
    assert_eq!(assert_ready_ok!(first.poll()), 1);
    assert_eq!(assert_ready_ok!(task::spawn(service.call(to("a"))).poll()), 3);
}

// ===== The budget =====

/// What allows nothing.
struct Empty;

impl tower::retry::budget::Budget for Empty {
    fn deposit(&self) {}

    fn withdraw(&self) -> bool {
        false
    }
}

#[tokio::test(start_paused = true)]
async fn a_retry_that_the_budget_refuses_waits_for_nothing_and_one_that_it_allows_for_its_backoff_alone() {
    let second = backon::ConstantBuilder::new().with_delay(SECOND).without_max_times();
    let lab = Lab::new();
    lab.read(fail(ambiguous()));
    let mut service = RetryReadOnly.backoff(second).budget(Arc::new(Empty)).layer(lab.connection());
    let error: CallError = assert_ready_err!(task::spawn(service.call(lab::read())).poll());
    assert_eq!((error.outcome(), lab.reads()), (Outcome::NoAnswer, 1));

    let lab = Lab::new();
    lab.read(fail(ambiguous())).read(hang());
    let mut service = RetryReadOnly.backoff(second).layer(lab.connection());
    let mut call = task::spawn(service.call(lab::read().within(60 * SECOND)));
    assert_pending!(call.poll());
    advance(SECOND - lab::ms(1)).await;
    assert!(!call.is_woken() && lab.reads() == 1);
    advance(lab::ms(1)).await;
    assert!(call.is_woken());
    assert_pending!(call.poll());
    assert_eq!(lab.reads(), 2);
}
