//! Layers and stacks within others whose calls end at different times: in tasks of their own, as copies, while a ledger
//! is slow; and a single one beside them.

mod lab;

use std::{
    future::ready,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Effect, Outcome, ReconnectLayer, RetryReadOnly, Stack, Tagged,
    WriteSafetyLayer,
    write_safety::{
        KeyedWrites,
        ledger::{Entry, EntryId, Ledger, LedgerError, MemoryLedger, ServerProcess, State},
    },
};
use lab::*;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};

type Safety = WriteSafetyLayer<Req, Res>;

/// Counts the hand-overs, and panics at the hundredth rather than spin for ever.
fn counted<S>(
    below: S,
    calls: &Arc<AtomicU32>,
) -> impl Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static
where
    S: Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static,
{
    let (below, calls) = (BoxCloneService::new(below), Arc::clone(calls));
    service_fn(move |request: Req| -> Answer {
        let nth = calls.fetch_add(1, Relaxed);
        assert!(nth < 100, "handed over a hundred times within one poll");
        Box::pin(below.clone().oneshot(request))
    })
}

fn spawned<S>(
    below: S,
    before: Duration,
) -> impl Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static
where
    S: Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static,
{
    let below = BoxCloneService::new(below);
    service_fn(move |request: Req| -> Answer {
        let answer: Answer = Box::pin(below.clone().oneshot(request));
        let task = tokio::spawn(async move {
            if !before.is_zero() {
                tokio::time::sleep(before).await;
            }
            answer.await
        });
        Box::pin(async move { task.await.unwrap() })
    })
}

/// A service in between gives the first attempt up, and holds it back still on a task of its own.
#[tokio::test(start_paused = true)]
async fn what_was_given_up_in_between_and_is_held_back_there_does_not_go_beside_its_replay() {
    let lab = Lab::new();
    lab.write(answer(1)).write(answer(2));
    let below = ReconnectLayer::once().layer(lab.connector());
    let (held, below) = (spawned(below.clone(), 5 * SECOND), BoxCloneService::new(below));
    let calls = Arc::new(AtomicU32::new(0));
    let first_held = service_fn(move |request: Req| -> Answer {
        match calls.fetch_add(1, Relaxed) {
            0 => Box::pin(held.clone().oneshot(request)),
            _ => Box::pin(below.clone().oneshot(request)),
        }
    });
    let between = gives_up(BoxCloneService::new(first_held), SECOND);
    let safety = Safety::new(|doubt: Doubt| ready(Ok::<_, BoxError>(doubt.not_landed()))).quarantine(ms(100));
    let service = DeadlineLayer::new(60 * SECOND).layer(safety.layer(between));
    assert_eq!(service.oneshot(write()).await.unwrap(), 1);
    tokio::time::sleep(10 * SECOND).await;
    assert_eq!(lab.writes(), 1);
}

/// W1 goes on a task of its own, before W2 is called, and is answered only while W2 is in doubt.
#[tokio::test(start_paused = true)]
async fn a_write_that_went_on_a_task_of_its_own_counts_when_it_went() {
    for safety in [Safety::refuse(), Safety::refuse().conflict_key(|_| Some("k"))] {
        for is_nested in [false, true] {
            let lab = Lab::new();
            lab.write(later(ms(100), Ok(1))).write(later(ms(10), Err(CallError::ambiguous("reset"))));
            lab.write(answer(2));
            let between = spawned(ReconnectLayer::once().layer(lab.connector()), Duration::ZERO);
            let between = match is_nested {
                true => BoxCloneService::new(safety.clone().layer(between)),
                false => BoxCloneService::new(between),
            };
            let check = |doubt: Doubt| ready(Ok::<_, BoxError>(doubt.not_landed()));
            let safety = Safety::new(check).quarantine(ms(200)).conflict_key(|_| Some("k"));
            let service = DeadlineLayer::new(60 * SECOND).layer(safety.layer(between));
            let first = tokio::spawn(service.clone().oneshot(write()));
            tokio::time::sleep(ms(50)).await;
            let second = service.oneshot(write()).await;
            assert_eq!((first.await.unwrap().unwrap(), second.unwrap()), (1, 2), "nested {is_nested}");
        }
    }
}

// ----- a busy loop: the outer attempt is over, and the inner layer hands over again and again

/// A layer whose connect takes ten seconds; what it hands over is counted.
fn connects_slowly(
    calls: &Arc<AtomicU32>,
) -> impl Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static {
    let lab = Lab::new();
    lab.connect(Connect::After(10 * SECOND)).write(answer(1));
    Safety::refuse().layer(counted(ReconnectLayer::once().layer(lab.connector()), calls))
}

/// The inner layer's connect outlasts the attempt of the layer around it.
#[tokio::test(start_paused = true)]
async fn an_inner_layer_does_not_spin_once_the_outer_attempt_is_over() {
    let calls = Arc::default();
    let inner = connects_slowly(&calls);
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(Safety::refuse().attempt_timeout(5 * SECOND))
        .service(inner);
    let result = service.oneshot(write()).await;
    assert!(calls.load(Relaxed) < 5, "{} hand-overs, {result:?}", calls.load(Relaxed));
}

/// The same without any option, where a gateway has a task of its own and its caller goes away.
#[tokio::test(start_paused = true)]
async fn an_inner_layer_in_a_task_does_not_spin_once_its_caller_is_gone() {
    let calls = Arc::default();
    let inner = connects_slowly(&calls);
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(Safety::refuse())
        .service(spawned(inner, Duration::ZERO));
    assert!(tokio::time::timeout(SECOND, service.oneshot(write())).await.is_err());
    tokio::time::sleep(30 * SECOND).await;
    assert!(calls.load(Relaxed) < 5, "{} hand-overs", calls.load(Relaxed));
}

/// Whole stacks, with the crate's own parts alone: the thread never comes back.
#[test]
fn a_stack_within_a_stack_does_not_hang_once_the_outer_attempt_is_over() {
    let (tell, told) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        let outcome = runtime.unwrap().block_on(async {
            let lab = Lab::new();
            lab.connect(Connect::After(10 * SECOND)).write(answer(1));
            let inner = Stack::builder(lab.connector()).build().unwrap();
            let connector = service_fn(move |()| ready(Ok::<_, BoxError>(inner.clone())));
            let writes = Safety::refuse().attempt_timeout(5 * SECOND);
            let outer = Stack::builder(connector).writes(writes).build().unwrap();
            outer.send(write()).await.map_err(|error| error.outcome())
        });
        let _ = tell.send(outcome);
    });
    let outcome = told.recv_timeout(Duration::from_secs(5));
    assert!(outcome.is_ok(), "the call hangs in one poll");
}

/// A replay of the inner layer, with evidence, that the outer layer's attempt timeout forbids.
#[tokio::test(start_paused = true)]
async fn an_inner_replay_by_a_key_is_not_left_unknown_by_an_outer_attempt_timeout() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).connect(Connect::Ok).connect(Connect::After(10 * SECOND));
    let keyed =
        Safety::refuse().keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(60 * SECOND));
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(Safety::refuse().attempt_timeout(5 * SECOND))
        .layer(keyed.attempt_timeout(30 * SECOND))
        .layer(ReconnectLayer::once())
        .service(lab.connector());
    assert_eq!(service.oneshot(write()).await.map_err(|error| error.to_string()), Ok(2));
}

// ----- retries outside, of what is a write inside, once the inner layer has ended its call

/// Retries outside take it for a read, and their attempts' time is up before it is answered.
async fn it_is_not_repeated<S>(lab: &Lab, below: S)
where
    S: Service<Req, Response = Res, Error = CallError> + Clone,
{
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(RetryReadOnly.attempt_timeout(SECOND))
        .service(below);
    let result = service.oneshot(read()).await;
    assert_eq!(lab.writes(), 1, "a write was replayed without evidence: {result:?}");
}

/// The write landed and was answered; the layer between takes its time with the answer.
#[tokio::test(start_paused = true)]
async fn retries_outside_do_not_repeat_a_write_whose_answer_is_held_up_between_the_layers() {
    let lab = Lab::new();
    lab.write(answer(1)).write(answer(2)).write(answer(3));
    let inside = Safety::refuse().classify(|_| Some(Effect::Write)).on_event(lab.events.sink());
    let between = inside.layer(lab.connection()).and_then(|response: Res| async move {
        tokio::time::sleep(3 * SECOND).await;
        Ok(response)
    });
    it_is_not_repeated(&lab, between).await;
}

/// Two copies, of which one is refused at once and the other is with the server.
#[tokio::test(start_paused = true)]
async fn retries_outside_do_not_repeat_a_write_of_which_another_copy_was_refused() {
    let (down, lab) = (Lab::new(), Lab::new());
    for _ in 0..3 {
        down.write(later(ms(500), Err(CallError::not_sent("down"))));
        lab.write(later(3 * SECOND, Ok(1)));
    }
    let inside = || Safety::refuse().classify(|_| Some(Effect::Write)).on_event(lab.events.sink());
    let a = inside().layer(down.connection());
    let b = inside().layer(lab.connection());
    let hedged = service_fn(move |call: Req| -> Answer {
        let again = call.try_clone().unwrap();
        let first: Answer = Box::pin(a.clone().oneshot(call));
        let second: Answer = Box::pin(b.clone().oneshot(again));
        Box::pin(async move {
            let (first, second) = tokio::join!(first, second);
            first.or(second)
        })
    });
    it_is_not_repeated(&lab, hedged).await;
}

/// One copy is refused, which ends the call of the layer around; the other one is lost later, in a task of its own.
#[tokio::test(start_paused = true)]
async fn a_write_of_which_one_copy_was_refused_and_another_is_lost_is_reported_once() {
    let (down, lab) = (Lab::new(), Lab::new());
    down.write(later(ms(500), Err(CallError::not_sent("down"))));
    lab.write(later(3 * SECOND, Err(CallError::ambiguous("reset"))));
    let inside = || Safety::refuse().on_event(lab.events.sink());
    let a = inside().layer(down.connection());
    let b = spawned(inside().layer(lab.connection()), Duration::ZERO);
    let hedged = service_fn(move |call: Req| -> Answer {
        let again = call.try_clone().unwrap();
        let first: Answer = Box::pin(a.clone().oneshot(call));
        let second: Answer = Box::pin(b.clone().oneshot(again));
        Box::pin(async move {
            tokio::select! { result = first => result, result = second => result }
        })
    });
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(Safety::refuse())
        .service(hedged);
    let error = service.oneshot(write()).await.unwrap_err();
    tokio::time::sleep(10 * SECOND).await;
    assert_eq!((lab.writes(), error.outcome()), (1, Outcome::Unknown));
    assert_eq!(lab.events.doubts() + lab.events.abandoned(), 1, "{:?}", lab.events.all());
}

/// A gateway's connections are stacks that share a durable ledger. One gives a write back, of which nothing was sent.
#[cfg(feature = "ledger-durable")]
#[tokio::test]
async fn a_write_that_was_handed_back_goes_over_the_next_connection_that_has_the_same_durable_ledger() {
    use goaround::write_safety::ledger::DurableLedger;
    let directory = tempfile::tempdir().unwrap();
    let ledger = DurableLedger::options().open(directory.path().join("ledger")).unwrap();
    for check in [true, false] {
        let lab = Lab::new();
        lab.readiness(Readiness::Dead).readiness(Readiness::Dead).write(answer(1));
        let (inner, given) = (lab.clone(), ledger.clone());
        let connector = service_fn(move |()| {
            let layer = match check {
                true => Safety::new(|doubt: Doubt| async move { Ok(doubt.unknown("tested")) }),
                false => Safety::refuse(),
            };
            let layer = layer.ledger(given.clone());
            ready(Ok::<_, BoxError>(layer.layer(ReconnectLayer::once().layer(inner.connector()))))
        });
        let service = ServiceBuilder::new()
            .layer(DeadlineLayer::new(60 * SECOND))
            .layer(ReconnectLayer::once())
            .service(connector);
        let result = service.oneshot(write()).await.map_err(|error| error.to_string());
        assert!(result == Ok(1) || !check, "check: {check}: {result:?}");
    }
}

// ----- the inner layer waits until its ledger has recorded the end

/// Takes long to record an end.
#[derive(Clone)]
struct Slow(MemoryLedger);

impl Ledger for Slow {
    handed_on!(but settle);
    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        tokio::time::sleep(3 * SECOND).await;
        self.0.settle(id, revision, state).await
    }
    fn abandon(&self, id: EntryId, state: State) {
        self.0.abandon(id, state);
    }
    async fn started(&self, _: ServerProcess) -> Result<(), LedgerError> {
        Ok(())
    }
}

/// The write was answered: who goes away meanwhile is told of it by one event.
#[tokio::test(start_paused = true)]
async fn a_write_that_is_dropped_while_the_inner_ledger_records_its_answer_is_reported_once() {
    let lab = Lab::new();
    lab.write(answer(1));
    let inner = Safety::refuse().ledger(Slow(MemoryLedger::new())).on_event(lab.events.sink());
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(inner.layer(lab.connection()));
    let ledger = outer.ledger();
    assert!(tokio::time::timeout(SECOND, outer.oneshot(write())).await.is_err());
    assert_eq!(lab.writes(), 1);
    assert_eq!(lab.events.doubts() + lab.events.abandoned(), 1, "{:?}", lab.events.all());
    assert!(ledger.in_doubt().await.unwrap().is_empty());
}

/// Nothing was sent, since no connection could be made: who goes away meanwhile leaves no doubt.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_not_sent_is_in_no_doubt_if_it_is_dropped_while_the_inner_ledger_records_that() {
    for nested in [false, true] {
        let lab = Lab::new();
        lab.connect(Connect::Fail);
        let inner = Safety::refuse().ledger(Slow(MemoryLedger::new())).on_event(lab.events.sink());
        let inner = inner.layer(ReconnectLayer::once().layer(lab.connector()));
        let service = match nested {
            true => BoxCloneService::new(Safety::refuse().on_event(lab.events.sink()).layer(inner)),
            false => BoxCloneService::new(inner),
        };
        assert!(tokio::time::timeout(SECOND, service.oneshot(write())).await.is_err());
        assert_eq!(lab.writes(), 0);
        let reports = lab.events.doubts() + lab.events.abandoned();
        assert_eq!(reports, 0, "nested: {nested}: {:?}", lab.events.all());
    }
}

// ----- a single stack, with a queue in it

/// What the queue handed over too late was refused, and the caller goes away before it reads that.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_refused_too_late_is_in_no_doubt_if_it_is_dropped_before_that_is_read() {
    let lab = Lab::new();
    let layer = WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.unknown("tested")) })
        .attempt_timeout(SECOND)
        .on_event(lab.events.sink());
    let reconnect = ReconnectLayer::once().layer(lab.connector());
    // Connected already, so that it is refused and not on its way.
    reconnect.clone().oneshot(read()).await.unwrap();
    let service = layer.layer(spawned(reconnect, 2 * SECOND));
    let mut call = tokio_test::task::spawn(service.oneshot(write()));
    assert!(call.poll().is_pending());
    tokio::time::sleep(ms(1500)).await;
    assert!(call.poll().is_pending());
    tokio::time::sleep(SECOND).await;
    drop(call);
    assert_eq!(lab.writes(), 0);
    assert_eq!(lab.events.abandoned(), 0, "{:?}", lab.events.all());
}

/// The same of a JSON-RPC connection that has no place for it.
#[tokio::test(start_paused = true)]
async fn a_write_for_which_a_connection_has_no_place_is_in_no_doubt_if_it_is_dropped_before_that_is_read() {
    use goaround::jsonrpc::{Client, Request};
    let abandoned = Arc::new(AtomicU32::new(0));
    let (io, _peer) = tokio::io::duplex(1 << 16);
    let client = Client::builder().max_in_flight(1).connect(io);
    let _first = client.request(Request::new("first", ()).unwrap());
    let eager = client.clone();
    // As a queue does: it calls on in a task of its own, and gives the future out.
    let queue = service_fn(move |request: Request| {
        let mut client = eager.clone();
        let (give, given) = tokio::sync::oneshot::channel();
        tokio::spawn(async move {
            tokio::time::sleep(SECOND).await;
            let _ = give.send(client.call(request));
        });
        async move { given.await.map_err(CallError::ambiguous)?.await }
    });
    let counter = Arc::clone(&abandoned);
    let layer = WriteSafetyLayer::refuse().on_event(move |event| {
        if let goaround::Event::Abandoned(_) = event {
            counter.fetch_add(1, Relaxed);
        }
    });
    let mut call = tokio_test::task::spawn(layer.layer(queue).oneshot(Request::new("second", ()).unwrap()));
    assert!(call.poll().is_pending());
    tokio::time::sleep(2 * SECOND).await;
    drop(call);
    assert_eq!(abandoned.load(Relaxed), 0);
}

// ----- controls of single stacks

#[tokio::test(start_paused = true)]
async fn a_single_layer_whose_connect_outlasts_its_attempt_timeout_sends_the_write_once() {
    let lab = Lab::new();
    lab.connect(Connect::After(10 * SECOND)).write(answer(1));
    let calls = Arc::default();
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(Safety::refuse().attempt_timeout(3 * SECOND))
        .service(counted(ReconnectLayer::once().layer(lab.connector()), &calls));
    assert_eq!(service.oneshot(write()).await.unwrap(), 1);
    assert_eq!((lab.writes(), calls.load(Relaxed)), (1, 4));
}

#[tokio::test(start_paused = true)]
async fn a_single_stack_reports_a_write_that_is_dropped_in_flight_and_none_that_waits_for_a_connection() {
    for (connect, reports) in [(Connect::Ok, 1), (Connect::Hang, 0)] {
        let lab = Lab::new();
        lab.connect(connect).write(hang());
        let stack = Stack::builder(lab.connector()).on_event(lab.events.sink()).build().unwrap();
        assert!(tokio::time::timeout(SECOND, stack.send(write())).await.is_err());
        let entries = stack.ledger().in_doubt().await.unwrap().len();
        assert_eq!((lab.events.abandoned(), entries), (reports, reports));
    }
}

/// Handed back once, over again, and dropped while the second connection is not ready.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_handed_back_and_waits_again_is_in_no_doubt_when_it_is_dropped() {
    let lab = Lab::new();
    lab.readiness(Readiness::Dead).readiness(Readiness::Hang);
    let stack = Stack::builder(lab.connector()).on_event(lab.events.sink()).build().unwrap();
    assert!(tokio::time::timeout(SECOND, stack.send(write())).await.is_err());
    assert_eq!((lab.writes(), lab.events.abandoned()), (0, 0));
    assert!(stack.ledger().in_doubt().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_single_stack_without_an_answer_is_unknown_and_reported_once() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let stack = Stack::builder(lab.connector()).on_event(lab.events.sink()).build().unwrap();
    let error = stack.send(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes(), lab.events.doubts()), (Outcome::Unknown, 1, 1));
}

/// A single layer around a connection of the SDK. The write is still queued when the connection closes, and its caller
/// goes away before it is polled again: `Exchange::close` has withdrawn the frame, and the future's destructor does not
/// say so once more.
#[cfg(all(unix, feature = "rmcp"))]
#[tokio::test]
async fn a_write_that_the_sdks_connection_had_not_sent_when_it_closed_is_in_no_doubt_if_it_is_dropped() {
    use goaround::sdk::{Connector, Request};
    use rmcp::model::{CallToolRequestParams, ServerResult};
    use serde_json::{Value, json};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};

    let asked = Arc::new(AtomicU32::new(0));
    let seen = Arc::clone(&asked);
    let mut connector = Connector::new((), move || {
        let (ours, theirs) = tokio::io::duplex(1 << 16);
        let seen = Arc::clone(&seen);
        tokio::spawn(async move {
            let (read, mut write) = tokio::io::split(theirs);
            let mut lines = BufReader::new(read).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let message: Value = serde_json::from_str(&line).unwrap();
                let result = match message["method"].as_str() {
                    Some("initialize") => json!({
                        "protocolVersion": "2025-06-18", "capabilities": {},
                        "serverInfo": { "name": "mem", "version": "1" },
                    }),
                    Some("tools/call") => {
                        seen.fetch_add(1, Relaxed);
                        json!({ "content": [] })
                    }
                    _ if message.get("id").is_none() => continue,
                    _ => json!({}),
                };
                let answer = json!({ "jsonrpc": "2.0", "id": message["id"], "result": result });
                write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
            }
        });
        Ok::<_, std::io::Error>(ours)
    });
    let connection = tower::Service::call(&mut connector, ()).await.unwrap();
    let events = Events::default();
    let service =
        WriteSafetyLayer::<Request, ServerResult>::refuse().on_event(events.sink()).layer(connection.clone());
    let ledger = service.ledger();
    let mut call = tokio_test::task::spawn(service.oneshot(Request::from(CallToolRequestParams::new("pay"))));
    assert!(call.poll().is_pending());
    // No other task runs meanwhile.
    connection.close();
    drop(call);
    tokio::time::sleep(ms(100)).await;
    assert_eq!(asked.load(Relaxed), 0);
    assert_eq!((events.abandoned(), ledger.in_doubt().await.unwrap().len()), (0, 0), "{:?}", events.all());
}

// ----- what is a read outside and a write inside, handed back over an unknown attempt

/// W1 is idempotent and lost, and its replay finds no connection: it is not handed over again, before W2 or on top of it.
#[tokio::test(start_paused = true)]
async fn a_reconnect_layer_hands_no_write_over_again_that_is_unknown() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).write(answer(1));
    let service = over_layers(&lab, Safety::refuse().replay_idempotent(), 5 * SECOND);
    let idempotent = || Tagged::new("w", Effect::Idempotent).named("put");
    let error = service.clone().oneshot(idempotent()).await.unwrap_err();
    assert_eq!((lab.writes(), error.outcome()), (1, Outcome::Unknown));
    assert_eq!(service.oneshot(idempotent()).await.unwrap(), 2);
    assert_eq!(lab.writes(), 2, "W1, W2, and W1 again over it");
}

/// With a rule of the layer further in that says more than the request does: the reconnect layer around takes it for a
/// read.
async fn unknown_further_in(safety: fn() -> Safety) -> (usize, Result<Res, Outcome>, Vec<String>) {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(1));
    let service = over_layers(&lab, safety(), 15 * SECOND);
    let result = service.oneshot(read()).await.map_err(|error| error.outcome());
    (lab.writes(), result, lab.log.timed())
}

#[tokio::test(start_paused = true)]
async fn a_reconnect_layer_hands_nothing_over_again_that_is_an_unknown_idempotent_write_further_in() {
    let (writes, result, log) =
        unknown_further_in(|| Safety::refuse().replay_idempotent().classify(|_| Some(Effect::Idempotent)))
            .await;
    assert_eq!((writes, result), (1, Err(Outcome::Unknown)), "{log:?}");
}

/// Sent again five seconds after the server may have forgotten its key.
#[tokio::test(start_paused = true)]
async fn a_reconnect_layer_hands_nothing_over_again_that_is_an_unknown_write_with_a_key_further_in() {
    let (writes, result, log) = unknown_further_in(|| {
        Safety::refuse()
            .keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(10 * SECOND))
            .classify(|_| Some(Effect::Write))
    })
    .await;
    assert_eq!((writes, result), (1, Err(Outcome::Unknown)), "{log:?}");
}

#[tokio::test(start_paused = true)]
async fn a_write_in_doubt_that_is_dropped_while_the_inner_ledger_records_that_is_reported_once() {
    let lab = Lab::new();
    lab.write(fail(CallError::ambiguous("reset")));
    let inner = Safety::refuse().ledger(Slow(MemoryLedger::new())).on_event(lab.events.sink());
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(inner.layer(lab.connection()));
    let ledger = outer.ledger();
    assert!(tokio::time::timeout(SECOND, outer.oneshot(write())).await.is_err());
    assert_eq!(lab.events.doubts() + lab.events.abandoned(), 1, "{:?}", lab.events.all());
    assert!(ledger.in_doubt().await.unwrap().is_empty());
}

// ----- places in flight

/// As many callers as there are places, each with one call at a time, which it gives up at any moment.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn places_are_neither_lost_nor_given_twice_whoever_gives_up_when() {
    use goaround::jsonrpc::{Client, Request};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    const PLACES: usize = 4;
    let (ours, theirs) = tokio::io::duplex(1 << 12);
    tokio::spawn(async move {
        let (read, mut write) = tokio::io::split(theirs);
        let mut lines = BufReader::new(read).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let message: serde_json::Value = serde_json::from_str(&line).unwrap();
            if message["method"] == "never" || message.get("id").is_none() {
                continue;
            }
            let answer = serde_json::json!({ "jsonrpc": "2.0", "id": message["id"], "result": 0 });
            write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
        }
    });
    let client = Client::builder().max_in_flight(PLACES).connect(ours);
    let refused = Arc::new(AtomicU32::new(0));
    let answered = Arc::new(AtomicU32::new(0));
    let tasks: Vec<_> = (0..PLACES as u64)
        .map(|task| {
            let (client, refused, answered) = (client.clone(), Arc::clone(&refused), Arc::clone(&answered));
            tokio::spawn(async move {
                let mut random = task + 1;
                for _ in 0..20_000 {
                    random ^= random << 13;
                    random ^= random >> 7;
                    random ^= random << 17;
                    let request = Request::new("now", ()).unwrap();
                    let request = match random % 7 {
                        0 => request.within(Duration::ZERO),
                        _ => request,
                    };
                    let call = client.request(request);
                    let result = match random % 5 {
                        0 => Some(call.await),
                        n => {
                            let patience = async {
                                for _ in 0..(random >> 8) % (n * 8) {
                                    tokio::task::yield_now().await;
                                }
                            };
                            tokio::select! { biased; result = call => Some(result), () = patience => None }
                        }
                    };
                    match result {
                        Some(Err(error)) if matches!(error.cause(), goaround::Cause::Refused(_)) => {
                            refused.fetch_add(1, Relaxed);
                        }
                        Some(Ok(_)) => {
                            answered.fetch_add(1, Relaxed);
                        }
                        _ => {}
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.unwrap();
    }
    assert!(answered.load(Relaxed) > 1000);
    assert_eq!(refused.load(Relaxed), 0, "a place was lost");
    for _ in 0..3 {
        let mut held: Vec<_> = (0..PLACES)
            .map(|_| tokio_test::task::spawn(client.request(Request::new("never", ()).unwrap())))
            .collect();
        assert!(held.iter_mut().all(|call| call.poll().is_pending()), "a place was lost");
        let mut more = tokio_test::task::spawn(client.request(Request::new("never", ()).unwrap()));
        assert!(more.poll().is_ready(), "a place was given twice");
    }
}

// ----- a foreign timeout between retries and what is a write further in

/// The layer further in has told that the write is in doubt, by the marks of the layer that retries.
#[tokio::test(start_paused = true)]
async fn retries_outside_do_not_repeat_a_write_that_a_timeout_in_between_has_dropped() {
    let lab = Lab::new();
    lab.write(hang()).write(hang()).write(hang());
    let inside = Safety::refuse().classify(|_| Some(Effect::Write)).on_event(lab.events.sink());
    let timed = tower::timeout::Timeout::new(inside.layer(lab.connection()), SECOND);
    let timed = timed.map_err(CallError::from_boxed);
    // With an attempt timeout of its own the layer is told; without one it is in the wrong order.
    let retry = RetryReadOnly.attempt_timeout(10 * SECOND);
    let service = DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()).layer(retry.layer(timed));
    let error = service.oneshot(read()).await.unwrap_err();
    assert_eq!((lab.writes(), error.outcome()), (1, Outcome::Unknown), "{error}");
}

// ----- several threads

/// Nested layers on four threads, with calls that are dropped at any moment: no two locks wait for each other.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn nested_layers_on_four_threads_come_to_an_end() {
    let below = service_fn(|request: Req| -> Answer {
        let activity = request.context().activity().map(Arc::clone);
        Box::pin(async move {
            if activity.as_ref().is_some_and(|activity| !activity.adopt()) {
                return Err(CallError::not_sent("over"));
            }
            tokio::task::yield_now().await;
            activity.iter().for_each(|activity| activity.sent());
            tokio::task::yield_now().await;
            Ok(1)
        })
    });
    let reconnect = ReconnectLayer::once().layer(service_fn(move |()| ready(Ok::<_, BoxError>(below))));
    let inner = spawned(Safety::refuse().layer(reconnect), Duration::ZERO);
    let middle = Safety::refuse().layer(inner);
    let outer =
        DeadlineLayer::new(60 * SECOND).layer(Safety::refuse().layer(spawned(middle, Duration::ZERO)));
    let outer = BoxCloneService::new(outer);
    let work = async {
        let tasks: Vec<_> = (0..8_u64)
            .map(|task| {
                let outer = outer.clone();
                tokio::spawn(async move {
                    for n in 0..2_000 {
                        let call: Answer = Box::pin(outer.clone().oneshot(write()));
                        let patience = async {
                            for _ in 0..(n * 7 + task) % 13 {
                                tokio::task::yield_now().await;
                            }
                        };
                        tokio::select! { biased; _ = call => {}, () = patience => {} }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    };
    tokio::time::timeout(30 * SECOND, work).await.unwrap();
}
