//! Writes in doubt over a real JSON-RPC connection, whose marks write safety goes by. Time is paused.

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Effect, Event, InDoubt, Outcome, WriteSafety, WriteSafetyLayer,
    deadline::DeadlineService,
    jsonrpc::{Client, Request, Response},
    write_safety::KeyedWrites,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncWrite, AsyncWriteExt, BufReader, BufStream, DuplexStream},
    time::{Instant, sleep, timeout},
};
use tower::{ServiceBuilder, ServiceExt};

const SECOND: Duration = Duration::from_secs(1);

type Safety = WriteSafetyLayer<Request, Response>;
type Stack = DeadlineService<WriteSafety<Client, Request, Response>>;

#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn note(&self, what: impl Into<String>) {
        self.0.lock().unwrap().push(what.into());
    }

    fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().clone()
    }
}

/// A client over a pipe that holds so many bytes, and the server's end of it.
fn connect(bytes: usize, layer: Safety, log: &Log) -> (Stack, BufReader<DuplexStream>) {
    let (ours, theirs) = tokio::io::duplex(bytes);
    (over(ours, layer, log), BufReader::new(theirs))
}

fn over(io: impl AsyncRead + AsyncWrite + Send + 'static, layer: Safety, log: &Log) -> Stack {
    let log = log.clone();
    let sink = move |event: Event<'_>| {
        let event = serde_json::to_value(event).unwrap();
        let violated = if event["violated"].is_null() { "" } else { ", fence violated" };
        log.note(format!("{}{violated}", event["event"].as_str().unwrap()));
    };
    ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(sink))
        .layer(layer)
        .service(Client::new(io))
}

fn checks(log: &Log) -> Safety {
    let (log, start) = (log.clone(), Instant::now());
    WriteSafetyLayer::new(move |doubt: InDoubt<Request, Response>| {
        log.note(format!("check at {}", start.elapsed().as_secs()));
        async move { Ok::<_, BoxError>(doubt.not_landed()) }
    })
}

fn pay(padding: usize) -> Request {
    Request::new("pay", ["x".repeat(padding)]).unwrap().as_effect(Effect::Write)
}

async fn line(server: &mut BufReader<DuplexStream>) -> serde_json::Value {
    let mut line = String::new();
    server.read_line(&mut line).await.unwrap();
    serde_json::from_str(&line).unwrap()
}

async fn reply(server: &mut BufReader<DuplexStream>, id: &serde_json::Value) {
    let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{id}}}\n");
    server.write_all(line.as_bytes()).await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_replaced_attempt_is_cancelled_and_its_late_success_is_a_fence_violated() {
    let log = Log::default();
    let layer = checks(&log).attempt_timeout(SECOND).quarantine(3 * SECOND);
    let (service, mut server) = connect(4096, layer, &log);
    let call = tokio::spawn(service.oneshot(pay(1)));
    let first = line(&mut server).await;
    let second = loop {
        let next = line(&mut server).await;
        match next["method"].as_str().unwrap() {
            "notifications/cancelled" => {
                assert_eq!(next["params"]["requestId"], first["id"]);
                log.note("cancelled");
            }
            _ => break next,
        }
    };
    assert_ne!(first["id"], second["id"], "a new id for the replay");
    assert_eq!((&first["method"], &first["params"]), (&second["method"], &second["params"]));
    reply(&mut server, &first["id"]).await;
    sleep(SECOND).await;
    reply(&mut server, &second["id"]).await;
    assert_eq!(call.await.unwrap().unwrap().raw().get(), second["id"].to_string());
    let mut log = log.all();
    log.sort();
    assert_eq!(log, ["call", "cancelled", "check at 3", "in_doubt", "late_answer, fence violated"]);
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_is_the_answer() {
    let log = Log::default();
    let layer = checks(&log).attempt_timeout(SECOND).quarantine(30 * SECOND);
    let (service, mut server) = connect(4096, layer, &log);
    let call = tokio::spawn(service.oneshot(pay(1)));
    let first = line(&mut server).await;
    sleep(9 * SECOND).await;
    reply(&mut server, &first["id"]).await;
    assert_eq!(call.await.unwrap().unwrap().raw().get(), first["id"].to_string());
    assert_eq!(log.all(), ["in_doubt"]);
}

#[tokio::test(start_paused = true)]
async fn behind_a_stalled_pipe_the_half_written_is_not_replayed_and_the_queued_is_not_in_doubt() {
    for quarantine in [2, 25] {
        let log = Log::default();
        let layer = checks(&log).attempt_timeout(SECOND).quarantine(quarantine * SECOND).independent_writes();
        let (service, mut server) = connect(64, layer, &log);
        let half = tokio::spawn(service.clone().oneshot(pay(200_000)));
        sleep(Duration::from_millis(100)).await;
        let queued: Vec<_> =
            (1..4).map(|nth| tokio::spawn(service.clone().oneshot(pay(nth).within(5 * SECOND)))).collect();
        for queued in queued {
            let error: CallError = queued.await.unwrap().unwrap_err();
            assert_eq!(error.outcome(), Outcome::NotDone);
        }
        assert_eq!(log.all().iter().filter(|entry| *entry == "in_doubt").count(), 0);
        // The stall ends: the quarantine counts from there.
        sleep(5 * SECOND).await;
        let first = line(&mut server).await;
        let mut seen = vec![];
        let replay = loop {
            let next = line(&mut server).await;
            if next["method"] == "pay" {
                break next;
            }
            seen.push(next);
        };
        assert_eq!(first["params"], replay["params"], "none of the withdrawn ones was written: {seen:?}");
        let checks: Vec<_> = log.all().into_iter().filter(|entry| entry.starts_with("check")).collect();
        assert_eq!(checks, [format!("check at {}", 10 + quarantine)]);
        reply(&mut server, &replay["id"]).await;
        assert_eq!(half.await.unwrap().unwrap().raw().get(), replay["id"].to_string());
    }
}

/// The bytes wait in a buffer of our own process, in front of a pipe that is full. The server does its work the moment
/// that it has read a request.
#[tokio::test(start_paused = true)]
async fn a_quarantine_does_not_count_while_a_request_lies_in_the_transports_own_buffer() {
    let (log, (ours, theirs)) = (Log::default(), tokio::io::duplex(16));
    let layer = checks(&log).attempt_timeout(SECOND).quarantine(5 * SECOND);
    let (service, mut server) = (over(BufStream::new(ours), layer, &log), BufReader::new(theirs));
    let call = tokio::spawn(service.oneshot(pay(1)));
    // It is held up, and so says the check, which is the truth: there is no effect yet.
    sleep(20 * SECOND).await;
    let (mut effects, mut text) = (0, String::new());
    while let Ok(Ok(1..)) = timeout(10 * SECOND, server.read_line(&mut text)).await {
        let message: serde_json::Value = serde_json::from_str(&text).unwrap();
        if message["method"] == "pay" {
            effects += 1;
            reply(&mut server, &message["id"]).await;
        }
        text.clear();
    }
    assert_eq!(effects, 1, "{:?}", log.all());
    assert!(call.await.unwrap().is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_while_its_request_is_queued_leaves_no_doubt() {
    for layer in [WriteSafetyLayer::refuse(), checks(&Log::default())] {
        let log = Log::default();
        let (service, _server) = connect(64, layer, &log);
        let half = tokio::spawn(service.clone().oneshot(pay(200_000)));
        sleep(SECOND).await;
        let queued = tokio::spawn(service.clone().oneshot(pay(1)));
        sleep(SECOND).await;
        queued.abort();
        assert!(queued.await.unwrap_err().is_cancelled());
        assert_eq!(log.all(), [""; 0]);
        half.abort();
        assert!(half.await.unwrap_err().is_cancelled());
        assert_eq!(log.all(), ["abandoned"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_by_key_that_is_still_queued_is_withdrawn_when_the_keys_time_is_over_though_the_call_stands_still()
 {
    const WINDOW: Duration = Duration::from_secs(20);
    let by_layer: fn() -> Safety =
        || Safety::refuse().keyed(KeyedWrites::new(|_, _| true).honoured_for(WINDOW));
    let by_check: fn() -> Safety = || {
        Safety::new(|doubt: InDoubt<Request, Response>| async move {
            Ok::<_, BoxError>(doubt.not_landed_deduplicated(WINDOW))
        })
        .keyed(KeyedWrites::new(|_, _| true))
    };
    let plain: fn(Request) -> Request = |call| call.within(60 * SECOND);
    let pauses: fn(Request) -> Request = |call| call.within(10 * SECOND).pause_while_asking();
    let idles: fn(Request) -> Request = |call| call.within(10 * SECOND).pause_while_asking().idle(9 * SECOND);
    for (layer, of_whom) in [(by_layer, "layer"), (by_check, "check")] {
        for (call, how) in [(plain, "plain"), (pauses, "pauses"), (idles, "idles")] {
            // The server reads on then, and whether it gets the replay.
            for (reads_at, sent) in [(19, true), (21, false), (50, false)] {
                let case = format!("{of_whom} {how} {reads_at}");
                let log = Log::default();
                let (stack, mut server) = connect(1 << 10, layer().attempt_timeout(SECOND), &log);
                let write = call(pay(1));
                let progress = write.context().progress().cloned();
                let begun = Instant::now();
                let writing = tokio::spawn(stack.clone().oneshot(write));
                assert_eq!(line(&mut server).await["method"], "pay", "{case}");
                // What is queued behind it stays queued.
                let large = Request::new("large", ["x".repeat(8 << 10)]).unwrap().read_only();
                let reading = tokio::spawn(stack.clone().oneshot(large.within(100 * SECOND)));
                sleep(2 * SECOND).await;
                let pause = progress.as_ref().map(|progress| progress.pause());
                tokio::time::sleep_until(begun + reads_at * SECOND).await;
                let mut seen = Vec::new();
                while let Ok(message) = timeout(SECOND, line(&mut server)).await {
                    seen.push(message["method"].as_str().unwrap().to_owned());
                    if !message["id"].is_null() {
                        reply(&mut server, &message["id"]).await;
                    }
                }
                seen.retain(|method| method == "pay" || method == "large");
                assert_eq!(seen, ["large", "pay"][..1 + usize::from(sent)], "{case}");
                reading.await.unwrap().unwrap();
                let ended = writing.await.unwrap();
                assert_eq!(
                    ended.map(drop).map_err(|error| error.outcome()),
                    match sent {
                        true => Ok(()),
                        false => Err(Outcome::Unknown),
                    },
                    "{case}"
                );
                drop(pause);
            }
        }
    }
}
