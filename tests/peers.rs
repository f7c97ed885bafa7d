//! Peers that misbehave, stall and close, through the whole stack over this crate's own JSON-RPC client: what
//! the callers of reads and of writes are told, and how often a write took effect.

use std::{
    future::ready,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Cause, Effect, Event, InDoubt, Outcome, RetryReadOnly, Stack,
    WriteSafetyLayer,
    jsonrpc::{Client, Request, Response},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, ReadHalf, WriteHalf, split},
    time::{Instant, sleep},
};
use tower::{Service, retry::budget::Budget, service_fn};

const SECOND: Duration = Duration::from_secs(1);

/// A connector over pipes in memory that hold `room` bytes; `serve` plays the peer of the nth of them.
fn connector<F, Fut>(
    room: usize,
    max_line: usize,
    serve: F,
) -> impl Service<(), Response = Client, Error = BoxError, Future: Send> + Send + 'static
where
    F: Fn(u32, DuplexStream) -> Fut + Send + 'static,
    Fut: Future<Output = ()> + Send + 'static,
{
    let made = AtomicU32::new(0);
    service_fn(move |()| {
        let (ours, theirs) = tokio::io::duplex(room);
        tokio::spawn(serve(made.fetch_add(1, Ordering::Relaxed) + 1, theirs));
        ready(Ok(Client::builder().exact_writes().max_line(max_line).connect(ours)))
    })
}

struct Peer {
    read: BufReader<ReadHalf<DuplexStream>>,
    write: WriteHalf<DuplexStream>,
}

impl Peer {
    fn over(pipe: DuplexStream) -> Self {
        let (read, write) = split(pipe);
        Self { read: BufReader::new(read), write }
    }

    /// The next call: its id, method and parameters. `None` at the end.
    async fn next(&mut self) -> Option<(u64, String, Value)> {
        loop {
            let mut line = String::new();
            if self.read.read_line(&mut line).await.unwrap_or(0) == 0 {
                return None;
            }
            let message: Value = serde_json::from_str(&line).unwrap();
            if let Some(id) = message["id"].as_u64() {
                return Some((id, message["method"].as_str().unwrap().to_owned(), message["params"].clone()));
            }
        }
    }

    async fn answer(&mut self, id: u64, result: impl Into<Value>) {
        let line = json!({ "jsonrpc": "2.0", "id": id, "result": result.into() }).to_string() + "\n";
        let _ = self.write.write_all(line.as_bytes()).await;
    }
}

// ----- peers that misbehave

/// What the peer does when it has said what it says.
#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// Answers the other call.
    GoesOn,
    Exits,
    /// Closes its output and goes on reading.
    ClosesItsOutput,
}
use Then::{ClosesItsOutput, Exits, GoesOn};

/// What that is to the call.
#[derive(Clone, Copy, PartialEq)]
enum Is {
    AnAnswer,
    /// One that is too large.
    TooLarge,
    Nothing,
    TheEnd,
}
use Is::{AnAnswer, Nothing, TheEnd, TooLarge};

const LIMIT: usize = 300;

#[tokio::test(start_paused = true)]
async fn no_peer_that_misbehaves_hangs_a_call_or_is_taken_for_another_calls_answer() {
    let long = "x".repeat(2 * LIMIT);
    let (large, large_first) = (
        format!(r#"{{"jsonrpc":"2.0","id":ID,"result":"{long}"}}"#),
        format!(r#"{{"result":"{long}","id":ID}}"#),
    );
    let twice = concat!(
        r#"{"jsonrpc":"2.0","id":ID,"result":"own"}"#,
        "\n",
        r#"{"jsonrpc":"2.0","id":ID,"result":"second"}"#,
        "\n"
    );
    // `ID` stands for the call's id on the wire.
    let cases: &[(&str, &[u8], Then, Is)] = &[
        ("not JSON", b"panic: nil pointer\n", GoesOn, Nothing),
        ("not UTF-8", b"\xff\xfe\n", GoesOn, Nothing),
        ("an answer, not UTF-8", b"{\"jsonrpc\":\"2.0\",\"id\":ID,\"result\":\"\xff\"}\n", GoesOn, Nothing),
        ("a line above the limit", &[long.as_bytes(), b"\n"].concat(), GoesOn, Nothing),
        ("an answer above the limit", &[large.as_bytes(), b"\n"].concat(), GoesOn, TooLarge),
        ("the same, its id last", &[large_first.as_bytes(), b"\n"].concat(), GoesOn, TooLarge),
        ("an answer above the limit, cut", &large.as_bytes()[..2 * LIMIT], Exits, TooLarge),
        ("half a line", br#"{"jsonrpc":"2.0","id":ID,"result":"ow"#, Exits, TheEnd),
        ("an answer without newline", br#"{"jsonrpc":"2.0","id":ID,"result":"own"}"#, Exits, AnAnswer),
        ("other lines without newline", br#"{"jsonrpc":"2.0","method":"told"}"#, Exits, TheEnd),
        ("an unknown id", b"{\"jsonrpc\":\"2.0\",\"id\":77,\"result\":\"another's\"}\n", GoesOn, Nothing),
        ("id as a string", b"{\"jsonrpc\":\"2.0\",\"id\":\"ID\",\"result\":\"own\"}\n", GoesOn, AnAnswer),
        ("the same reply twice", twice.as_bytes(), GoesOn, AnAnswer),
        ("a batch", b"[{\"id\":77,\"result\":1},{\"id\":ID,\"result\":\"own\"},7]\n", GoesOn, AnAnswer),
        ("a batch of nothing", b"[[],null,{\"id\":[ID]}]\n", GoesOn, Nothing),
        ("an error without id", b"{\"error\":{\"code\":-32700,\"message\":\"x\"}}\n", GoesOn, Nothing),
        ("its id null", b"{\"id\":null,\"error\":{\"code\":-32700,\"message\":\"x\"}}\n", GoesOn, Nothing),
        ("stdout closed while alive", b"", ClosesItsOutput, TheEnd),
        ("an answer, then an exit", b"{\"jsonrpc\":\"2.0\",\"id\":ID,\"result\":\"own\"}\n", Exits, AnAnswer),
        ("an exit", b"", Exits, TheEnd),
    ];
    for &(name, says, then, is) in cases {
        for effect in [Effect::ReadOnly, Effect::Write] {
            misbehave(name, says, then, is, effect).await;
        }
    }
}

async fn misbehave(name: &str, says: &[u8], then: Then, is: Is, effect: Effect) {
    let hand_overs = Arc::new(AtomicU32::new(0));
    let (count, says) = (Arc::clone(&hand_overs), says.to_vec());
    let connector = connector(64 << 10, LIMIT, move |nth, pipe| {
        let (count, says) = (Arc::clone(&count), says.clone());
        async move {
            let mut peer = Peer::over(pipe);
            if nth > 1 {
                while let Some((id, method, _)) = peer.next().await {
                    count.fetch_add(u32::from(method == "call"), Ordering::Relaxed);
                    peer.answer(id, "again").await;
                }
                return;
            }
            let (Some(call), Some(other)) = (peer.next().await, peer.next().await) else { return };
            assert_eq!((call.1.as_str(), other.1.as_str()), ("call", "other"));
            count.fetch_add(1, Ordering::Relaxed);
            peer.write.write_all(&with_id(&says, call.0)).await.unwrap();
            match then {
                GoesOn => peer.answer(other.0, "other").await,
                Exits => return,
                ClosesItsOutput => peer.write.shutdown().await.unwrap(),
            }
            // It lives, and reads what comes.
            while peer.next().await.is_some() {}
        }
    });
    let doubts = Arc::new(AtomicU32::new(0));
    let told = Arc::clone(&doubts);
    let stack = Stack::builder(connector)
        .deadline(5 * SECOND)
        .on_event(move |event| {
            told.fetch_add(u32::from(matches!(event, Event::InDoubt(_))), Ordering::Relaxed);
        })
        .build()
        .unwrap();
    let call = Request::new("call", ()).unwrap().as_effect(effect);
    let other = Request::new("other", ()).unwrap().read_only();
    let start = Instant::now();
    let (called, other) = tokio::join!(stack.send(call), stack.send(other));
    let took = start.elapsed();
    let text = |response: Response| response.parse::<String>().unwrap();

    let expected = if then == GoesOn { "other" } else { "again" };
    assert_eq!(text(other.unwrap()), expected, "{name}, {effect:?}: the other call");
    let called = called.map(text);
    let known = called.as_ref().map(String::as_str).map_err(CallError::outcome);
    let expected = match (is, effect) {
        (AnAnswer, _) => Ok("own"),
        (TooLarge, _) => Err(Outcome::Answered),
        (Nothing, Effect::ReadOnly) => Err(Outcome::NoAnswer),
        (TheEnd, Effect::ReadOnly) => Ok("again"),
        (Nothing | TheEnd, _) => Err(Outcome::Unknown),
    };
    assert_eq!(known, expected, "{name}, {effect:?}");
    // At its deadline if it got nothing, else at once.
    assert_eq!(took, if is == Nothing { 5 * SECOND } else { Duration::ZERO }, "{name}, {effect:?}");
    let retried = is == TheEnd && effect == Effect::ReadOnly;
    assert_eq!(hand_overs.load(Ordering::Relaxed), 1 + u32::from(retried), "{name}, {effect:?}");
    if let Err(error) = called {
        let may_have_landed = effect.is_write();
        assert_eq!(error.may_have_landed(), may_have_landed, "{name}: {error}");
        assert_eq!(
            error.is_safe_to_repeat(),
            effect == Effect::ReadOnly && is != TooLarge,
            "{name}: {error}"
        );
        assert_eq!(matches!(error.cause(), Cause::AnswerTooLarge { limit: LIMIT }), is == TooLarge);
        assert_eq!(error.to_string().contains("verify before repeating"), may_have_landed, "{error}");
        assert_eq!(doubts.load(Ordering::Relaxed), u32::from(may_have_landed), "{name}: reported once");
    }
}

fn with_id(says: &[u8], id: u64) -> Vec<u8> {
    let mut with = Vec::new();
    let mut rest = says;
    while let Some(at) = rest.windows(2).position(|window| window == b"ID") {
        with.extend_from_slice(&rest[..at]);
        with.extend_from_slice(id.to_string().as_bytes());
        rest = &rest[at + 2..];
    }
    with.extend_from_slice(rest);
    with
}

// ----- a peer that stops reading, and a write on its way to it

/// Where the write is when its attempt's time is up.
#[derive(Clone, Copy, Debug, PartialEq)]
enum At {
    Queued,
    HalfWritten,
}

/// What the server does with the first write that it reads.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Does {
    Commits,
    LosesTheReply,
    LosesTheWrite,
}

/// What the check says, if it does not find the write.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Check {
    /// After a look, by the fence that holds.
    Looks,
    /// Without one, by a reason of the caller's own.
    Claims,
}

#[derive(Clone, Copy, Debug)]
struct Stall {
    at: At,
    /// How long the peer reads nothing.
    stall: Duration,
    does: Does,
    /// How long after it read a write the server does it.
    lands_after: Duration,
    quarantine: Option<Duration>,
    check: Check,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Ledger {
    /// How many writes the server read to their end.
    read: u32,
    effects: u32,
}

/// A server that reads nothing for a while, and then all that comes.
async fn stalled(pipe: DuplexStream, flight: Stall, ledger: Arc<Mutex<Ledger>>) {
    sleep(flight.stall).await;
    let Peer { mut read, write } = Peer::over(pipe);
    let write = Arc::new(tokio::sync::Mutex::new(write));
    let mut line = String::new();
    while read.read_line(&mut line).await.unwrap_or(0) > 0 {
        let message: Value = serde_json::from_str(&line).unwrap();
        line.clear();
        let (Some(id), write, ledger) = (message["id"].as_u64(), Arc::clone(&write), Arc::clone(&ledger))
        else {
            continue;
        };
        let does = match message["method"] == "pay" {
            true => {
                let mut ledger = ledger.lock().unwrap();
                ledger.read += 1;
                Some(if ledger.read == 1 { flight.does } else { Does::Commits })
            }
            false => None,
        };
        tokio::spawn(async move {
            if does == Some(Does::LosesTheWrite) {
                return;
            }
            if does.is_some() {
                sleep(flight.lands_after).await;
                ledger.lock().unwrap().effects += 1;
            }
            let effects = ledger.lock().unwrap().effects;
            if does != Some(Does::LosesTheReply) {
                let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{effects}}}\n");
                let _ = write.lock().await.write_all(answer.as_bytes()).await;
            }
        });
    }
}

/// More than the pipe holds.
fn large(method: &'static str) -> Request {
    Request::new(method, ["x".repeat(40 << 10)]).unwrap()
}

/// What the caller was told, when, whether it was reported, and what the server has done in the end.
async fn fly(flight: Stall) -> (Result<u32, Outcome>, Duration, u32, Ledger) {
    let (ledger, doubts) = (Arc::<Mutex<Ledger>>::default(), Arc::new(AtomicU32::new(0)));
    let server = Arc::clone(&ledger);
    let connector = connector(8 << 10, 1 << 20, move |nth, pipe| {
        assert_eq!(nth, 1, "nothing closes here");
        stalled(pipe, flight, Arc::clone(&server))
    });
    let mut layer = WriteSafetyLayer::new(move |doubt: InDoubt<Request, Response>| async move {
        if flight.check == Check::Claims {
            return Ok(doubt.not_landed_because("claimed"));
        }
        let seen = doubt.probe(Request::new("list", ())?.read_only()).await?;
        Ok(if seen.parse::<u32>()? > 0 { doubt.landed(seen) } else { doubt.not_landed() })
    });
    layer = layer.attempt_timeout(2 * SECOND);
    if let Some(quarantine) = flight.quarantine {
        layer = layer.quarantine(quarantine);
    }
    let told = Arc::clone(&doubts);
    let stack = Stack::builder(connector)
        .deadline(100 * SECOND)
        .writes(layer)
        .on_event(move |event| {
            told.fetch_add(u32::from(matches!(event, Event::InDoubt(_))), Ordering::Relaxed);
        })
        .build()
        .unwrap();
    let stack = Arc::new(stack);
    let mut filler = None;
    let pay = match flight.at {
        At::HalfWritten => large("pay"),
        At::Queued => {
            let stack = Arc::clone(&stack);
            let call = large("fill").read_only().within(10_000 * SECOND);
            filler = Some(tokio::spawn(async move { stack.send(call).await.map(drop) }));
            tokio::task::yield_now().await;
            Request::new("pay", ()).unwrap()
        }
    };
    let start = Instant::now();
    let result = stack.send(pay).await;
    let took = start.elapsed();
    let result = match result {
        Ok(response) => Ok(response.parse().unwrap()),
        Err(error) => Err(error.outcome()),
    };
    // Until the stall is over, and the last of what was sent has landed.
    sleep(3_000 * SECOND).await;
    if let Some(filler) = filler {
        filler.await.unwrap().unwrap();
    }
    let ledger = *ledger.lock().unwrap();
    (result, took, doubts.load(Ordering::Relaxed), ledger)
}

const FOREVER: Duration = Duration::from_secs(1_000);

#[tokio::test(start_paused = true)]
async fn a_write_that_a_stall_holds_up_never_has_two_effects_whatever_the_quarantine() {
    let mut flown = 0;
    for at in [At::Queued, At::HalfWritten] {
        for stall in [5 * SECOND, 20 * SECOND, FOREVER] {
            for does in [Does::Commits, Does::LosesTheReply, Does::LosesTheWrite] {
                // Longer and shorter than the stall, and what lands is done within it, as is declared.
                for (quarantine, lands_after) in
                    [(10, Duration::ZERO), (10, 9 * SECOND), (1, Duration::ZERO), (1, SECOND / 2)]
                {
                    for check in [Check::Looks, Check::Claims] {
                        let quarantine = Some(quarantine * SECOND);
                        if check == Check::Claims && does != Does::Commits {
                            continue; // What it claims would not be true.
                        }
                        judge(Stall { at, stall, does, lands_after, quarantine, check }).await;
                        flown += 1;
                    }
                }
            }
            // No fence but what the check claims: it is not believed while bytes are unwritten.
            for check in [Check::Looks, Check::Claims] {
                let (does, lands_after, quarantine) = (Does::Commits, Duration::ZERO, None);
                judge(Stall { at, stall, does, lands_after, quarantine, check }).await;
                flown += 1;
            }
        }
    }
    assert_eq!(flown, 2 * 3 * (4 * 4 + 2));
}

async fn judge(flight: Stall) {
    let (result, took, doubts, ledger) = fly(flight).await;
    let seen = format!("{flight:?}: {result:?} after {took:?}, {ledger:?}");
    assert!(ledger.effects <= 1, "{seen}");
    assert!(took <= 100 * SECOND, "{seen}");
    let half = flight.at == At::HalfWritten;
    if flight.stall == FOREVER {
        // The deadline comes first. What was begun is finished afterwards, what was queued never sent.
        let outcome = if half { Outcome::Unknown } else { Outcome::NotDone };
        let read = u32::from(half);
        let effects = u32::from(half && flight.does != Does::LosesTheWrite);
        assert_eq!((result, took, ledger), (Err(outcome), 100 * SECOND, Ledger { read, effects }), "{seen}");
        assert_eq!(doubts, u32::from(half), "{seen}");
        return;
    }
    assert_eq!((result, ledger.effects), (Ok(1), 1), "{seen}");
    match (flight.does, flight.quarantine) {
        (Does::Commits, _) => {
            assert_eq!((took, ledger.read), (flight.stall + flight.lands_after, 1), "{seen}");
        }
        (Does::LosesTheReply, Some(quarantine)) => {
            assert_eq!(ledger.read, 1, "{seen}");
            assert!(took >= flight.stall + quarantine, "{seen}");
        }
        (_, quarantine) => {
            assert_eq!(ledger.read, 2, "{seen}");
            assert!(took >= flight.stall + quarantine.unwrap() + flight.lands_after, "{seen}");
        }
    }
}

// ----- a thousand calls at a closure

#[derive(Default)]
struct Charges(AtomicU32);

impl Budget for Charges {
    fn deposit(&self) {}

    fn withdraw(&self) -> bool {
        self.0.fetch_add(1, Ordering::Relaxed);
        true
    }
}

#[tokio::test(start_paused = true)]
async fn a_thousand_reads_in_flight_at_a_closure_share_one_connect_and_one_charge() {
    let connects = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&connects);
    let connector = connector(64 << 10, 1 << 20, move |nth, pipe| {
        counter.fetch_add(1, Ordering::Relaxed);
        async move {
            let mut peer = Peer::over(pipe);
            if nth == 1 {
                // Every one of them has been read when it goes.
                for _ in 0..1_000 {
                    peer.next().await.unwrap();
                }
                return;
            }
            while let Some((id, _, params)) = peer.next().await {
                peer.answer(id, params[0].clone()).await;
            }
        }
    });
    let (charges, incidents) = (Arc::new(Charges::default()), Arc::new(Mutex::new(Vec::new())));
    let seen = Arc::clone(&incidents);
    let stack = Stack::builder(connector)
        .deadline(30 * SECOND)
        .retry(RetryReadOnly.budget(charges.clone()))
        .on_event(move |event| {
            if let Event::Incident(incident) = event {
                seen.lock().unwrap().push(incident.in_flight);
            }
        })
        .build()
        .unwrap();
    let stack = Arc::new(stack);
    let calls: Vec<_> = (0..1_000_u32)
        .map(|n| {
            let stack = Arc::clone(&stack);
            tokio::spawn(async move { stack.send(Request::new("get", [n]).unwrap().read_only()).await })
        })
        .collect();
    for (n, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.unwrap().unwrap().parse::<usize>().unwrap(), n, "each its own answer");
    }
    assert_eq!(connects.load(Ordering::Relaxed), 2, "the first, and one reconnect");
    assert_eq!((charges.0.load(Ordering::Relaxed), stack.generation()), (1, Some(2)));
    assert_eq!(*incidents.lock().unwrap(), [1_000], "one closure, with all of them in flight");
    assert_eq!(stack.in_flight(), 0);
}
