//! A single stack under attack, with true declarations: writes that are handed back and over again, whoever has his
//! turn when; what is kept of calls that have ended; and the places of calls in flight.
//!
//! `GOAROUND_TURNS=n` gives random turns to n worlds instead of 300, and `GOAROUND_TURN=s` begins with that one and prints
//! what happens.

#[path = "lab/pipes.rs"]
mod pipes;

use std::{
    future::{Future, ready},
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Delivery, Effect, InDoubt, Outcome, Stack, WriteSafetyLayer,
    jsonrpc::{Client, Request, Response},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex},
    time::advance,
};
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{Service, ServiceExt};

use pipes::*;

type Safety = WriteSafetyLayer<Request, Response>;
type Doubt = InDoubt<Request, Response>;

const SECOND: Duration = Duration::from_secs(1);

// ===== A server whose connections are there at once =====

/// The server's end of one connection.
struct Peer(BufReader<DuplexStream>);

impl Peer {
    fn of(net: &Pipes, at: usize) -> Self {
        Self(BufReader::new(net.take(at)))
    }

    /// The next request.
    async fn next(&mut self) -> Value {
        let mut line = String::new();
        self.0.read_line(&mut line).await.unwrap();
        serde_json::from_str(&line).unwrap()
    }

    async fn answer(&mut self, request: &Value) {
        let line = format!("{}\n", json!({ "jsonrpc": "2.0", "id": request["id"], "result": 0 }));
        self.0.get_mut().write_all(line.as_bytes()).await.unwrap();
        settle().await;
    }

    /// The methods of all requests that are there, which it answers.
    async fn serve(&mut self) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            let mut line = String::new();
            let mut reading = Box::pin(self.0.read_line(&mut line));
            let mut read = None;
            for _ in 0..20 {
                settle().await;
                read = poll_once(reading.as_mut());
                if read.is_some() {
                    break;
                }
            }
            drop(reading);
            if read.is_none_or(|read| read.unwrap() == 0) {
                return seen;
            }
            let request: Value = serde_json::from_str(&line).unwrap();
            seen.push(request["method"].as_str().unwrap().to_owned());
            if request.get("id").is_some() {
                self.answer(&request).await;
            }
        }
    }
}

/// Polls a task as long as it is woken, at least once.
fn turn<F: Future>(task: &mut task::Spawn<F>) -> Poll<F::Output> {
    for _ in 0..3 {
        let polled = task.poll();
        if polled.is_ready() || !task.is_woken() {
            return polled;
        }
    }
    Poll::Pending
}

fn put(name: &'static str) -> Request {
    Request::new(name, json!({})).unwrap().as_effect(Effect::Write)
}

/// A read that is larger than the pipe: what is queued behind it stays queued.
fn large_read() -> Request {
    Request::new("large", json!({ "of": "x".repeat(8 << 10) })).unwrap().read_only()
}

/// The server has told by other means that what it had not answered did not land.
fn absent_after(wait: Duration) -> Safety {
    Safety::new(move |doubt: Doubt| async move {
        tokio::time::sleep(wait).await;
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    })
}

fn stack(net: &Pipes, safety: Safety) -> Stack<Pipes, Request, Response> {
    Stack::builder(net.clone()).deadline(30 * SECOND).writes(safety).build().unwrap()
}

// ===== Handed back and handed over again in one poll =====

/// W1 is lost, and its replay is in the queue of a connection that stalls; W2 is called, is in the queue behind it, and
/// the connection closes: nothing of either was sent, and both are handed back. W2's task has its turn first. The
/// replay has been overtaken, and must not go after it.
#[tokio::test(start_paused = true)]
async fn no_replay_that_was_handed_back_lands_on_a_write_that_was_handed_over_meanwhile() {
    let net = Pipes::default();
    let stack = stack(&net, absent_after(SECOND));
    let mut first = task::spawn(stack.clone().oneshot(put("put/1")));
    assert_pending!(first.poll());
    settle().await;
    let mut peer = Peer::of(&net, 0);
    assert_eq!(peer.next().await["method"], "put/1");
    drop(peer);
    settle().await;
    assert_pending!(first.poll()); // It is checked.
    let mut reading = task::spawn(stack.clone().oneshot(large_read()));
    assert_pending!(reading.poll());
    settle().await;
    advance(SECOND).await;
    assert_pending!(first.poll()); // The replay is in the queue.
    let mut second = task::spawn(stack.clone().oneshot(put("put/2")));
    assert_pending!(second.poll());
    settle().await;
    drop(Peer::of(&net, 1));
    settle().await;
    assert!(first.is_woken() && second.is_woken());
    // Whose turn comes first is nobody's choice.
    assert_pending!(turn(&mut second));
    let replayed = turn(&mut first);
    settle().await;
    let seen = Peer::of(&net, 2).serve().await;
    let said = match replayed {
        Poll::Pending => first.poll(),
        ready => ready,
    };
    assert_ready_ok!(second.poll());
    assert_eq!(seen, ["put/2"], "W1 over W2, and W1 is told {said:?}");
}

/// The same by spawned tasks on two threads, without a script of who has its turn when.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_replay_that_was_handed_back_comes_to_the_server_after_others_by_tasks_on_two_threads() {
    let mut over = 0;
    for _ in 0..20 {
        let net = Pipes::default();
        let stack = stack(&net, absent_after(Duration::from_millis(5)));
        let call = |request: Request| {
            let stack = stack.clone();
            tokio::spawn(async move { stack.oneshot(request).await })
        };
        let wait = || tokio::time::sleep(Duration::from_millis(2));
        let first = call(put("put/1"));
        while net.connects() < 1 {
            tokio::task::yield_now().await;
        }
        let mut peer = Peer::of(&net, 0);
        assert_eq!(peer.next().await["method"], "put/1");
        drop(peer);
        wait().await;
        let reading = call(large_read());
        // The replay is in the queue by then.
        tokio::time::sleep(Duration::from_millis(12)).await;
        let others: Vec<_> = (0..8).map(|_| call(put("put/2"))).collect();
        wait().await;
        if net.connects() != 2 {
            continue;
        }
        drop(Peer::of(&net, 1));
        while net.connects() < 3 {
            tokio::task::yield_now().await;
        }
        let mut peer = Peer::of(&net, 2);
        let mut came = Vec::new();
        while let Ok(request) = tokio::time::timeout(Duration::from_millis(20), peer.next()).await {
            came.push(request["method"].as_str().unwrap().to_owned());
            let line = format!("{}\n", json!({ "jsonrpc": "2.0", "id": request["id"], "result": 0 }));
            peer.0.get_mut().write_all(line.as_bytes()).await.unwrap();
        }
        let place = |method: &str| came.iter().position(|came| came == method);
        over += u32::from(place("put/1").is_some() && place("put/1") > place("put/2"));
        for task in others.into_iter().chain([first, reading]) {
            task.abort();
        }
    }
    assert_eq!(over, 0, "rounds of 20 in which W1 was replayed over another write");
}

/// The same of a write that was called before W1, and has its turn late: W1's replay must not land on it.
#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_that_was_handed_back_and_over_again_in_one_poll() {
    let net = Pipes::default();
    let stack = stack(&net, absent_after(SECOND));
    let mut reading = task::spawn(stack.clone().oneshot(large_read()));
    assert_pending!(reading.poll());
    settle().await;
    let mut second = task::spawn(stack.clone().oneshot(put("put/2")));
    assert_pending!(second.poll());
    drop(Peer::of(&net, 0));
    settle().await;
    assert!(second.is_woken());
    let mut first = task::spawn(stack.clone().oneshot(put("put/1")));
    assert_pending!(first.poll());
    settle().await;
    let mut peer = Peer::of(&net, 1);
    assert_eq!(peer.next().await["method"], "put/1");
    drop(peer);
    settle().await;
    assert_pending!(first.poll()); // It is checked.
    // The connection is there: whoever reads has made it.
    let mut probing = task::spawn(stack.clone().oneshot(Request::new("list", ()).unwrap().read_only()));
    assert_pending!(probing.poll());
    assert_eq!(net.connects(), 3);
    // W2 goes now, and is answered.
    assert_pending!(turn(&mut second));
    let mut peer = Peer::of(&net, 2);
    let mut seen = peer.serve().await;
    assert_ready_ok!(second.poll());
    advance(SECOND).await;
    let said = turn(&mut first);
    seen.extend(peer.serve().await);
    let said = if said.is_pending() { turn(&mut first) } else { said };
    assert_eq!(seen, ["list", "put/2"], "W1 over W2, which was acknowledged; W1 is told {said:?}");
}

/// W2 on W1's key was not sent when the connection closed, and W1 is in doubt since. W2 must not go, as it does not
/// where it has to wait for the next connection.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_handed_back_does_not_go_while_its_key_is_in_doubt() {
    let net = Pipes::default();
    let safety = Safety::refuse().conflict_key(|_: &Request| Some("k"));
    let stack = stack(&net, safety);
    let mut first = task::spawn(stack.clone().oneshot(put("put/1")));
    assert_pending!(first.poll());
    settle().await;
    let mut peer = Peer::of(&net, 0);
    assert_eq!(peer.next().await["method"], "put/1");
    let mut reading = task::spawn(stack.clone().oneshot(large_read()));
    assert_pending!(reading.poll());
    settle().await;
    let mut second = task::spawn(stack.clone().oneshot(put("put/2")));
    assert_pending!(second.poll());
    drop(peer);
    settle().await;
    let error = assert_ready_err!(first.poll());
    assert_eq!(error.outcome(), Outcome::Unknown);
    // The control: a new one is refused.
    let refused = assert_ready_err!(task::spawn(stack.clone().oneshot(put("put/3"))).poll());
    assert_eq!(refused.outcome(), Outcome::NotDone);
    let said = turn(&mut second);
    settle().await;
    let seen = if net.connects() > 1 { Peer::of(&net, 1).serve().await } else { Vec::new() };
    assert_eq!(seen, [""; 0], "W2 while W1 is in doubt: {said:?}");
}

// ===== What grows =====

/// A connection that does with its calls, and their copies, what it is told.
#[derive(Clone)]
struct Does(fn(Tag) -> Said);

impl Service<Tag> for Does {
    type Response = u64;
    type Error = CallError;
    type Future = Said;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Tag) -> Said {
        (self.0)(request)
    }
}

fn said(result: Result<u64, CallError>) -> Said {
    Box::pin(ready(result))
}

/// How many bytes are kept for each of many calls, after a number of them: `call` makes one, by its number.
fn bytes_per_call<F: Future>(warm: u64, many: u64, mut call: impl FnMut(u64) -> F) -> f64 {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let mut run = |from: u64, to: u64| {
        runtime.block_on(async {
            for number in from..to {
                call(number).await;
            }
        });
    };
    run(0, warm);
    let kept = allocation_counter::measure(|| run(warm, warm + many));
    kept.bytes_current as f64 / many as f64
}

fn tagged(number: u64) -> Tag {
    goaround::Tagged::new(number, Effect::Write).named("pay")
}

fn on(does: fn(Tag) -> Said) -> impl Service<(), Response = Does, Error = BoxError, Future: Send> + Send {
    tower::service_fn(move |()| ready(Ok::<_, BoxError>(Does(does))))
}

fn keyed(safety: Tags) -> Tags {
    safety.conflict_key(|request: &Tag| Some(request.get_ref().to_string()))
}

fn declared() -> Tags {
    Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    })
}

#[test]
fn nothing_grows_over_writes_that_end_in_whatever_way() {
    use goaround::write_safety::ledger::Ledger;
    let ways: [(&str, Does); 7] = [
        ("answered", Does(|_| said(Ok(1)))),
        ("server error", Does(|_| said(Err(CallError::answered("no"))))),
        ("reset", Does(|_| said(Err(CallError::ambiguous("reset"))))),
        ("closed", Does(|_| said(Err(CallError::closed("closed"))))),
        ("not sent", Does(|_| said(Err(CallError::not_sent("busy"))))),
        ("dead", Does(|_| said(Err(CallError::not_sent("dead").connection_lost())))),
        ("hangs", Does(|_| Box::pin(std::future::pending()))),
    ];
    for (name, Does(does)) in ways {
        for (options, safety) in [
            ("refuse", Tags::refuse()),
            ("refuse, key", keyed(Tags::refuse())),
            ("check", declared()),
            ("check, key", keyed(declared())),
            (
                "unknown",
                Tags::new(|doubt: InDoubt<Tag, u64>| async move { Ok::<_, BoxError>(doubt.unknown("?")) })
                    .quarantine(SECOND),
            ),
            (
                "landed",
                keyed(Tags::new(
                    |doubt: InDoubt<Tag, u64>| async move { Ok::<_, BoxError>(doubt.landed(1)) },
                )),
            ),
        ] {
            for drops in [false, true] {
                let stack =
                    Stack::builder(on(does)).deadline(5 * SECOND).writes(safety.clone()).build().unwrap();
                let ledger = stack.ledger();
                let kept = bytes_per_call(150, 300, |number| {
                    let (stack, ledger) = (stack.clone(), ledger.clone());
                    async move {
                        if drops {
                            let _ =
                                tokio::time::timeout(Duration::from_millis(1), stack.oneshot(tagged(number)))
                                    .await;
                        } else {
                            let _ = stack.oneshot(tagged(number)).await;
                        }
                        for entry in ledger.in_doubt().await.unwrap() {
                            ledger.forget(entry.id, "me").await.unwrap();
                        }
                    }
                });
                assert!(kept < 2.0, "{name}, {options}, drops {drops}: {kept} bytes a call");
            }
        }
    }
}

#[test]
fn nothing_grows_over_json_rpc_calls_that_end_in_whatever_way() {
    for way in ["answered", "dropped", "expired", "withdrawn", "closed", "late"] {
        let net = Pipes::default();
        let stack = Stack::builder(net.clone())
            .deadline(SECOND)
            .reconnect(goaround::ReconnectLayer::once().crash_loop(u32::MAX, SECOND))
            .writes(Safety::refuse())
            .build()
            .unwrap();
        use goaround::write_safety::ledger::Ledger;
        let ledger = stack.ledger();
        let peer: Arc<tokio::sync::Mutex<Option<Peer>>> = Arc::default();
        // Of calls that nobody waits for any more a bounded number is remembered, for late answers.
        let warm = if matches!(way, "dropped" | "expired" | "late") { 2_500 } else { 300 };
        let kept = bytes_per_call(warm, 600, |_| {
            let (stack, ledger, net, peer) = (stack.clone(), ledger.clone(), net.clone(), Arc::clone(&peer));
            async move {
                let mut call = task::spawn(stack.oneshot(put("put/1")));
                if way == "withdrawn" {
                    assert_pending!(call.poll());
                    drop(call);
                    settle().await;
                } else {
                    assert_pending!(call.poll());
                    settle().await;
                    let mut peer = peer.lock().await;
                    let old = peer.take();
                    let mut here = old.unwrap_or_else(|| Peer::of(&net, net.connects() - 1));
                    let request = loop {
                        let request = here.next().await;
                        if request.get("id").is_some() {
                            break request;
                        }
                    };
                    match way {
                        "answered" => here.answer(&request).await,
                        "dropped" => {
                            drop(call);
                            settle().await;
                            *peer = Some(here);
                            return forget(&ledger).await;
                        }
                        "expired" | "late" => {
                            advance(2 * SECOND).await;
                            assert_ready_err!(call.poll());
                            if way == "late" {
                                here.answer(&request).await;
                            }
                            drop(call);
                            settle().await;
                            *peer = Some(here);
                            return forget(&ledger).await;
                        }
                        _ => {
                            drop(here);
                            net.clear();
                            settle().await;
                            assert_ready_err!(call.poll());
                            return forget(&ledger).await;
                        }
                    }
                    assert_ready_ok!(call.poll());
                    *peer = Some(here);
                }
                async fn forget(ledger: &impl Ledger) {
                    for entry in ledger.in_doubt().await.unwrap() {
                        ledger.forget(entry.id, "me").await.unwrap();
                    }
                }
                forget(&ledger).await;
            }
        });
        assert!(kept < 2.0, "{way}: {kept} bytes a call");
    }
}

// ===== Places of calls in flight, by real threads =====

/// Calls that are answered, dropped, timed out and refused on two threads: each place is given back once, and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_places_of_calls_in_flight_are_as_many_after_a_storm_as_before_it() {
    const PLACES: usize = 5;
    let (ours, theirs) = duplex(1 << 9);
    let client = Client::builder().max_in_flight(PLACES).cancel_with(|_, _| None).connect(ours);
    let silent = Arc::new(std::sync::atomic::AtomicBool::new(false));
    let quiet = Arc::clone(&silent);
    tokio::spawn(async move {
        let (read, mut write) = tokio::io::split(theirs);
        let mut lines = BufReader::new(read).lines();
        while let Some(line) = lines.next_line().await.unwrap() {
            let request: Value = serde_json::from_str(&line).unwrap();
            if quiet.load(std::sync::atomic::Ordering::Relaxed) || request["method"] == "mute" {
                continue;
            }
            let line = format!("{}\n", json!({ "jsonrpc": "2.0", "id": request["id"], "result": 0 }));
            write.write_all(line.as_bytes()).await.unwrap();
        }
    });
    let tasks: Vec<_> = (0..6_u64)
        .map(|task| {
            let client = client.clone();
            tokio::spawn(async move {
                for n in 0..6_000_u64 {
                    let way = (n * 7 + task * 3 + n / 11) % 6;
                    let method = if way == 3 { "mute" } else { "echo" };
                    let request = Request::new(method, ()).unwrap().within(Duration::from_micros(way * 20));
                    let mut call = Box::pin(client.request(request));
                    match way {
                        0 => drop(call),
                        1 => {
                            let _ = poll_once(call.as_mut());
                            tokio::task::yield_now().await;
                            drop(call);
                        }
                        2 | 3 => {
                            while poll_once(call.as_mut()).is_none() {
                                tokio::task::yield_now().await;
                            }
                        }
                        _ => drop(tokio::time::timeout(Duration::from_micros(way * 5), call).await),
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    silent.store(true, std::sync::atomic::Ordering::Relaxed);
    tokio::time::sleep(Duration::from_millis(100)).await;
    assert!(client.closure().is_none());
    let mut calls: Vec<_> = (0..PLACES + 1).map(|_| Box::pin(client.request(put("last")))).collect();
    let refused = calls.iter_mut().map(|call| poll_once(call.as_mut()).is_some()).collect::<Vec<_>>();
    assert_eq!(refused, [false, false, false, false, false, true]);
}

// ===== Between the look and the going, on two threads =====

/// A sink of events that takes a while is told of the closure once the next connection is there, in the very poll in
/// which the replay has looked at the order of writes and goes. Another thread uses that connection meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_replay_lands_on_a_write_that_another_thread_hands_over_while_a_sink_is_told_of_the_closure() {
    use std::sync::mpsc::channel;
    let log = Arc::new(Mutex::new(Vec::new()));
    let landed = Arc::clone(&log);
    let connections = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let connector = tower::service_fn(move |()| {
        let landed = Arc::clone(&landed);
        let first = connections.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
        async move {
            if !first {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
            Ok::<_, BoxError>(tower::service_fn(move |request: Tag| {
                let landed = Arc::clone(&landed);
                async move {
                    if first {
                        return Err(CallError::closed("closed"));
                    }
                    landed.lock().unwrap().push(*request.get_ref());
                    Ok::<_, CallError>(1_u64)
                }
            }))
        }
    });
    let (tell, told) = channel::<()>();
    let (done, is_done) = channel::<()>();
    let is_done = Mutex::new(is_done);
    let stack = Stack::builder(connector)
        .deadline(30 * SECOND)
        .writes(declared())
        .on_event(move |event| {
            if let goaround::Event::Incident(_) = event {
                tell.send(()).unwrap();
                let _ = is_done.lock().unwrap().recv_timeout(SECOND);
            }
        })
        .build()
        .unwrap();
    let other = stack.clone();
    let runtime = tokio::runtime::Handle::current();
    let second = std::thread::spawn(move || {
        told.recv().unwrap();
        let result = runtime.block_on(other.oneshot(tagged(2)));
        done.send(()).unwrap();
        result
    });
    let first = tokio::spawn(stack.oneshot(tagged(1))).await.unwrap();
    let second = second.join().unwrap();
    assert_eq!(second.unwrap(), 1);
    assert_eq!(*log.lock().unwrap(), [2], "W1 over W2, which was acknowledged: {first:?}");
}

// ===== Any order of turns =====

mod turns {
    use std::collections::{BTreeMap, HashMap};

    use goaround::write_safety::ledger::{Entry, EntryId, Ledger, LedgerError, MemoryLedger, State};
    use tokio::time::Instant;

    use super::*;

    /// What happened at the server, and to whom it said so.
    #[derive(Default)]
    struct World {
        log: Vec<Step>,
        dead: Vec<bool>,
        trace: bool,
    }

    impl World {
        fn dies(&mut self, at: usize) {
            self.dead[at] = true;
            self.trace(|| format!("{} dies", at + 1));
        }

        fn trace(&self, what: impl FnOnce() -> String) {
            if self.trace {
                println!("{}", what());
            }
        }
    }

    #[derive(Clone, Debug, PartialEq)]
    enum Step {
        /// The server has read it.
        Seen(u64),
        Checks(u64),
        Lands(u64),
        Told(u64),
    }

    struct Slow(MemoryLedger, Dice);

    impl Slow {
        async fn wait(&self) -> Result<(), LedgerError> {
            tokio::time::sleep(Duration::from_millis(self.1.roll(4))).await;
            if self.1.once_in(20) {
                return Err(LedgerError::Unavailable("as it happens".into()));
            }
            Ok(())
        }
    }

    impl Ledger for Slow {
        async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
            self.wait().await?;
            self.0.enter(entry).await
        }

        async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
            self.wait().await?;
            self.0.settle(id, revision, state).await
        }

        async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
            self.wait().await?;
            self.0.claim(id, revision).await
        }

        async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
            self.0.in_doubt().await
        }

        async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
            self.0.forget(id, by).await
        }
    }

    fn key_of(request: &Request, keys: u64) -> Option<String> {
        let number = number_of(request);
        (keys > 0 && number % (keys + 1) < keys).then(|| (number % (keys + 1)).to_string())
    }

    fn number_of(request: &Request) -> u64 {
        request.method().strip_prefix("put/").map_or(0, |number| number.parse().unwrap())
    }

    #[derive(Clone)]
    struct Dials(Pipes, Dice, bool);

    impl Service<()> for Dials {
        type Response = Client;
        type Error = BoxError;
        type Future = Pin<Box<dyn Future<Output = Result<Client, BoxError>> + Send>>;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, (): ()) -> Self::Future {
            let Self(mut net, dice, fails) = self.clone();
            Box::pin(async move {
                match dice.roll(6) {
                    0 => tokio::time::sleep(Duration::from_millis(dice.roll(20))).await,
                    1 if fails => return Err("refused".into()),
                    _ => {}
                }
                net.call(()).await
            })
        }
    }

    /// One run; what was wrong in it.
    async fn run(seed: u64) -> Result<(u64, u64), String> {
        let dice = Dice::new(seed);
        let net = Pipes::default();
        let world = Arc::new(Mutex::new(World::default()));
        world.lock().unwrap().trace = std::env::var_os("GOAROUND_TURN").is_some();
        let keys = dice.roll(3);
        let mut safety = Safety::new({
            let (world, dice) = (Arc::clone(&world), dice.clone());
            move |doubt: Doubt| {
                let (world, dice) = (Arc::clone(&world), dice.clone());
                let number = number_of(doubt.request());
                let checks = || {
                    let mut world = world.lock().unwrap();
                    world.trace(|| format!("checks {number} {:?}", doubt.attempts()));
                    let landed = world.log.contains(&Step::Lands(number));
                    // One that may still answer is not among them.
                    let dead = doubt.attempts().iter().all(|attempt| {
                        attempt
                            .generation
                            .is_none_or(|number| world.dead.get(number as usize - 1) == Some(&true))
                    });
                    let ended =
                        doubt.attempts().iter().any(|attempt| attempt.delivery == Delivery::Ambiguous);
                    if ended && dead {
                        world.log.push(Step::Checks(number));
                    }
                    (landed, dead && ended)
                };
                let found = checks();
                async move {
                    if dice.once_in(2) {
                        tokio::time::sleep(Duration::from_millis(dice.roll(30))).await;
                    }
                    if dice.once_in(3) {
                        doubt.probe(Request::new("list", ()).unwrap().read_only()).await?;
                    }
                    Ok::<_, BoxError>(match found {
                        (true, _) => doubt.landed(Response::new(0).unwrap()),
                        (false, true) => doubt.not_landed_because("its connection is gone"),
                        _ => doubt.unknown("it may come"),
                    })
                }
            }
        });
        let mode = dice.roll(4);
        match mode {
            1 => {
                let keyed = goaround::write_safety::KeyedWrites::param("/key").honoured_for(1000 * SECOND);
                safety = Safety::refuse().keyed(keyed);
            }
            2 => safety = Safety::refuse().replay_idempotent(),
            _ => {}
        }
        let effect = if mode == 2 { Effect::Idempotent } else { Effect::Write };
        safety = safety.conflict_key(move |request: &Request| key_of(request, keys));
        if dice.once_in(2) {
            safety = safety.ledger(Slow(MemoryLedger::new(), dice.clone()));
        }
        if dice.once_in(2) {
            safety = safety.attempt_timeout(Duration::from_millis(10 + dice.roll(100)));
        }
        let events = Arc::new(Mutex::new(HashMap::<String, u64>::new()));
        let sink = Arc::clone(&events);
        let stack = Stack::builder(Dials(net.clone(), dice.clone(), dice.once_in(2)))
            .deadline(SECOND)
            .reconnect(goaround::ReconnectLayer::once().crash_loop(u32::MAX, SECOND))
            .writes(safety)
            .on_event(move |event| match event {
                goaround::Event::InDoubt(report) => {
                    let unknown = matches!(report.outcome, Some(Outcome::Unknown | Outcome::DoneResultLost));
                    let more = if unknown { 1 } else { 100 };
                    *sink.lock().unwrap().entry(report.call.to_string()).or_default() += more;
                }
                goaround::Event::Abandoned(report) => {
                    *sink.lock().unwrap().entry(report.call.unwrap().to_string()).or_default() += 1;
                }
                _ => {}
            })
            .build()
            .unwrap();
        let mut peers: BTreeMap<usize, (BufReader<DuplexStream>, Vec<u8>)> = BTreeMap::new();
        let mut met = 0;
        type Calling = task::Spawn<Pin<Box<dyn Future<Output = Result<Response, CallError>> + Send>>>;
        let mut calls: Vec<(u64, String, bool, Instant, Calling)> = Vec::new();
        let (mut next, mut replays, mut told) = (1, 0, 0);
        let mut ended: Vec<(u64, String, Option<Outcome>)> = Vec::new();
        let mut asked = std::collections::HashSet::new();
        let mut shutdown = None;
        let strict = dice.once_in(2);
        let busy = dice.once_in(3);
        let mut steps = 0;
        loop {
            steps += 1;
            let is_over = steps > 150;
            if is_over && calls.is_empty() {
                break;
            }
            if steps > 3000 {
                return Err(format!("{} hang", calls.len()));
            }
            match dice.roll(12) {
                0 | 1 if !is_over && (busy || calls.len() < 4) => {
                    let write = !dice.once_in(4);
                    let mut request = match write {
                        true => Request::new(format!("put/{next}"), ()).unwrap().as_effect(effect),
                        false if dice.once_in(2) => large_read(),
                        false => Request::new("list", ()).unwrap().read_only(),
                    };
                    let limit = Duration::from_millis(20 + dice.roll(400));
                    request = request.within(limit);
                    let id = request.context_mut().assign_id().to_string();
                    let mut service = stack.clone();
                    let call = service.ready().await.unwrap().call(request);
                    let mut call: Calling = task::spawn(Box::pin(call));
                    world.lock().unwrap().trace(|| format!("calls {next} write {write}"));
                    let until = Instant::now() + limit;
                    let first_turn = !dice.once_in(3);
                    if first_turn && let Poll::Ready(result) = call.poll() {
                        let error = result.expect_err("nobody answers that fast");
                        if error.outcome() != Outcome::NotDone {
                            return Err(format!("ready at once: {error}"));
                        }
                        ended.push((next, id, Some(Outcome::NotDone)));
                        next += 1;
                        continue;
                    }
                    if first_turn {
                        asked.insert(next);
                    }
                    calls.push((next, id, write, until, call));
                    next += 1;
                }
                2..=5 if !calls.is_empty() => {
                    let at = dice.roll(calls.len() as u64) as usize;
                    let (number, id, write, until, call) = &mut calls[at];
                    let now = Instant::now();
                    if strict && !call.is_woken() && steps % 7 != 0 {
                        continue;
                    }
                    let late = now >= *until + Duration::from_millis(1);
                    let polled_before = call.is_woken();
                    if late && asked.contains(number) && !call.is_woken() {
                        settle().await;
                        if !call.is_woken() {
                            return Err(format!("{number} was not woken at its deadline"));
                        }
                    }
                    asked.insert(*number);
                    let polled = call.poll();
                    world.lock().unwrap().trace(|| format!("polls {number}: {polled:?}"));
                    match polled {
                        Poll::Pending if late => {
                            // The first poll of one that was never polled.
                            if call.poll().is_pending() {
                                return Err(format!("{number} outlasts its deadline, woken {polled_before}"));
                            }
                            return Err("lost".into());
                        }
                        Poll::Pending => {}
                        Poll::Ready(result) => {
                            if *write {
                                if result.is_ok() {
                                    world.lock().unwrap().log.push(Step::Told(*number));
                                    told += 1;
                                }
                                let outcome = result.as_ref().err().map(CallError::outcome);
                                let mut events = events.lock().unwrap();
                                let reports = events.remove(id).unwrap_or_default() % 100;
                                let expected = u64::from(matches!(
                                    outcome,
                                    Some(Outcome::Unknown | Outcome::DoneResultLost)
                                ));
                                if reports != expected {
                                    return Err(format!("{number} {outcome:?} reported {reports} times"));
                                }
                                ended.push((*number, id.clone(), outcome));
                            }
                            drop(calls.remove(at));
                        }
                    }
                }
                6 if !calls.is_empty() && dice.once_in(6) => {
                    let at = dice.roll(calls.len() as u64) as usize;
                    let (number, id, write, _, call) = calls.remove(at);
                    drop(call);
                    let reports = events.lock().unwrap().remove(&id).unwrap_or_default();
                    if reports > 1 && reports != 100 {
                        return Err(format!("{number} abandoned {reports} times"));
                    }
                    if write && reports == 0 {
                        // Not done, or so it is said.
                        ended.push((number, id, Some(Outcome::NotDone)));
                    }
                }
                7 if dice.once_in(40) && shutdown.is_none() => {
                    let stack = stack.clone();
                    let grace = Duration::from_millis(dice.roll(100));
                    shutdown = Some(task::spawn(Box::pin(async move { stack.shutdown(grace).await })));
                }
                8 if dice.once_in(3) && shutdown.is_some() => {
                    let done = shutdown.as_mut().is_some_and(|shutdown| shutdown.poll().is_ready());
                    shutdown.take_if(|_| done);
                }
                7 | 8 => settle().await,
                9 => advance(Duration::from_millis(dice.roll(15))).await,
                _ => {
                    while met < net.connects() {
                        peers.insert(met, (BufReader::new(net.take(met)), Vec::new()));
                        world.lock().unwrap().dead.push(false);
                        met += 1;
                    }
                    let Some((&at, (peer, line))) = peers.iter_mut().next_back() else { continue };
                    if dice.once_in(12) && !is_over {
                        peers.remove(&at);
                        world.lock().unwrap().dies(at);
                        continue;
                    }
                    let mut reading = Box::pin(peer.read_until(b'\n', line));
                    let read = poll_once(reading.as_mut());
                    drop(reading);
                    match read {
                        None => continue,
                        Some(Ok(0)) | Some(Err(_)) => {
                            peers.remove(&at);
                            world.lock().unwrap().dies(at);
                            continue;
                        }
                        // Cut.
                        Some(Ok(_)) if !line.ends_with(b"\n") => continue,
                        Some(Ok(_)) => {}
                    }
                    world
                        .lock()
                        .unwrap()
                        .trace(|| format!("reads {}", String::from_utf8_lossy(&line[..line.len().min(60)])));
                    let request: Value = serde_json::from_slice(&std::mem::take(line)).unwrap();
                    let method = request["method"].as_str().unwrap().to_owned();
                    if request.get("id").is_none() {
                        continue;
                    }
                    if let Some(number) = method.strip_prefix("put/") {
                        let number: u64 = number.parse().unwrap();
                        if dice.once_in(5) && !is_over {
                            // Dies with it.
                            world.lock().unwrap().log.push(Step::Seen(number));
                            peers.remove(&at);
                            world.lock().unwrap().dies(at);
                            continue;
                        }
                        let mut world = world.lock().unwrap();
                        let again = world.log.contains(&Step::Lands(number));
                        if again && mode != 1 && mode != 2 {
                            return Err(format!("{number} lands twice"));
                        }
                        let seen = world.log.iter().position(|step| *step == Step::Seen(number));
                        let ended = world.log.iter().position(|step| *step == Step::Checks(number));
                        replays += u64::from(seen.is_some() || ended.is_some());
                        let first = seen.unwrap_or(usize::MAX).min(ended.unwrap_or(usize::MAX));
                        if first < world.log.len() && !(again && mode == 1) {
                            let key = |number: u64| {
                                (keys > 0 && number % (keys + 1) < keys).then(|| number % (keys + 1))
                            };
                            for step in &world.log[first..] {
                                if let Step::Lands(other) = step
                                    && *other != number
                                    && (key(*other) == key(number)
                                        || key(*other).is_none()
                                        || key(number).is_none())
                                {
                                    return Err(format!("{number} is replayed over {other}, mode of {mode}"));
                                }
                            }
                        }
                        world.log.push(Step::Seen(number));
                        if !(again && mode == 1) {
                            world.log.push(Step::Lands(number));
                        }
                        drop(world);
                    }
                    if !dice.once_in(6) || is_over {
                        let line =
                            format!("{}\n", json!({ "jsonrpc": "2.0", "id": request["id"], "result": 0 }));
                        let _ = poll_once(Box::pin(peer.get_mut().write_all(line.as_bytes())).as_mut());
                    }
                }
            }
        }
        let log = &world.lock().unwrap().log;
        for (number, _, outcome) in &ended {
            let landed = log.contains(&Step::Lands(*number));
            match outcome {
                None if !landed => return Err(format!("{number} lost")),
                Some(Outcome::NotDone) if landed => return Err(format!("{number} was done")),
                _ => {}
            }
        }
        if let Some((id, _)) = events.lock().unwrap().iter().next() {
            return Err(format!("{id} reported again"));
        }
        Ok((replays, told))
    }

    #[test]
    fn whoever_has_his_turn_when_no_claim_is_broken() {
        let runs = std::env::var("GOAROUND_TURNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(300);
        let first = std::env::var("GOAROUND_TURN").ok().and_then(|seed| seed.parse().ok()).unwrap_or(500);
        let (mut wrong, mut replays, mut told) = (BTreeMap::<String, Vec<u64>>::new(), 0, 0);
        for seed in first..first + runs {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .start_paused(true)
                .build()
                .unwrap();
            match runtime.block_on(run(seed)) {
                Ok((more, also)) => (replays, told) = (replays + more, told + also),
                Err(what) => {
                    let kind = what.chars().filter(|c| !c.is_ascii_digit()).collect();
                    wrong.entry(kind).or_default().push(seed);
                }
            }
        }
        println!("{replays} replays, {told} told");
        let counts: Vec<_> =
            wrong.iter().map(|(what, seeds)| (what, seeds.len(), &seeds[..seeds.len().min(5)])).collect();
        assert!(wrong.is_empty(), "{counts:#?}");
    }
}
