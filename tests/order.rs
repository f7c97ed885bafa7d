//! The order of writes that wait for a connection, calls that end while a write is settled, and panics between layers.

mod lab;

use std::{
    panic::AssertUnwindSafe,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Effect, Outcome, ReconnectLayer, Stack, Tagged,
    WriteSafetyLayer,
    write_safety::{
        WriteSafety,
        ledger::{Ledger, MemoryLedger},
    },
};
use lab::*;
use tokio_test::task;
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};

type Safety = WriteSafetyLayer<Req, Res>;
type Lab4 = Stack<Connector, Req, Res>;

fn named(name: &'static str) -> Req {
    Tagged::new(name, Effect::Write).named("pay")
}

/// A step that notes in the log what lands.
fn lands(lab: &Lab, response: Res) -> Step {
    let log = lab.log.clone();
    Box::new(move |request: Req| {
        log.note(format!("lands {}", *request));
        Box::pin(std::future::ready(Ok(response)))
    })
}

/// Dies with the first write, after that time. Its process is gone a while later, and its effects with it.
fn dies(lab: &Lab, after: std::time::Duration) -> Step {
    let log = lab.log.clone();
    Box::new(move |request: Req| {
        log.note(format!("dies with {}", *request));
        Box::pin(async move {
            tokio::time::sleep(after).await;
            Err(exits(ms(10), true))
        })
    })
}

fn stack(lab: &Lab, safety: Safety) -> Lab4 {
    Stack::builder(lab.connector())
        .deadline(30 * SECOND)
        .writes(safety)
        .on_event(lab.events.sink())
        .build()
        .unwrap()
}

/// The stack, in a layer further out if there is one.
fn within(outer: Option<Safety>, stack: &Lab4) -> BoxCloneService<Req, Res, CallError> {
    match outer {
        Some(outer) => {
            BoxCloneService::new(DeadlineLayer::new(30 * SECOND).layer(outer.layer(stack.clone())))
        }
        None => BoxCloneService::new(stack.clone()),
    }
}

fn absent() -> Safety {
    Safety::new(|doubt: Doubt| async move {
        doubt.probe(read()).await?;
        Ok::<_, BoxError>(doubt.not_landed())
    })
    .quarantine(ms(100))
}

/// W2 is called first and waits for a connection; W1 is called, gets the connection, and is lost. W2 goes ahead on the
/// next one and is answered. W1 must not be replayed on top of it.
async fn waits_for_a_connection(
    outer: Option<Safety>,
    safety: Safety,
    polled: bool,
) -> (Vec<String>, String, String) {
    let lab = Lab::new();
    lab.write(dies(&lab, ms(1))).write(lands(&lab, 2)).write(lands(&lab, 1));
    lab.connect(if polled { Connect::After(ms(5)) } else { Connect::Ok }).connect(Connect::After(ms(20)));
    let stack = stack(&lab, safety);
    let mut second = within(outer, &stack);
    let mut second = Box::pin(second.ready().await.unwrap().call(named("W2")));
    if polled {
        // It waits, and then its task does not get its turn for a while.
        assert!(futures_poll(second.as_mut()));
    }
    let first = tokio::spawn(stack.clone().oneshot(named("W1")));
    // W1 is lost, and its process is gone.
    while lab.log.count("dies with W1") == 0 {
        tokio::time::sleep(ms(1)).await;
    }
    tokio::time::sleep(ms(12)).await;
    let second = second.await;
    lab.log.note(format!("told W2 {:?}", second.as_ref().map_err(CallError::outcome)));
    let first = first.await.unwrap();
    let said = |result: Result<Res, CallError>| match result {
        Ok(answer) => format!("Ok({answer})"),
        Err(error) => format!("{:?}: {error}", error.outcome()),
    };
    (lab.log.timed(), said(first), said(second))
}

fn futures_poll<F: Future + ?Sized>(future: std::pin::Pin<&mut F>) -> bool {
    future.poll(&mut std::task::Context::from_waker(std::task::Waker::noop())).is_pending()
}

fn landed(log: &[String]) -> Vec<&str> {
    log.iter().filter_map(|line| line.split_once("lands ")).map(|(_, what)| what).collect()
}

#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_without_a_key_that_waited_for_a_connection_until_then() {
    let (log, first, second) = waits_for_a_connection(None, absent(), false).await;
    assert_eq!(second, "Ok(2)", "{log:#?}");
    assert_eq!(landed(&log), ["W2"], "W1 over W2: {first} {log:#?}");
}

#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_without_a_key_whose_task_had_its_turn_late() {
    let (log, first, second) = waits_for_a_connection(None, absent(), true).await;
    assert_eq!(second, "Ok(2)", "{log:#?}");
    assert_eq!(landed(&log), ["W2"], "W1 over W2: {first} {log:#?}");
}

#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_on_its_key_that_waited_for_a_connection_until_then() {
    let (log, first, second) = waits_for_a_connection(None, absent().conflict_key(|_| Some("k")), true).await;
    // W2 does not go while its key is in doubt.
    assert_eq!((first.as_str(), landed(&log)), ("Ok(2)", vec!["W1"]), "{second} {log:#?}");
    assert!(second.starts_with("NotDone"), "{second}");
}

/// W2 is called on a connection that sends what is polled, and is polled only when W1 was lost. W1 must not be replayed
/// on top of it.
async fn is_polled_late(outer: Option<Safety>, safety: Safety) -> (Vec<String>, Result<Res, CallError>) {
    let lab = Lab::new();
    let log = lab.log.clone();
    let when_polled: Step = Box::new(move |request: Req| {
        Box::pin(async move {
            log.note(format!("lands {}", *request));
            Ok(2)
        })
    });
    lab.write(when_polled).write(dies(&lab, ms(1))).write(lands(&lab, 1));
    let stack = stack(&lab, safety);
    assert_eq!(stack.clone().oneshot(read()).await.unwrap(), 0);
    let second = within(outer, &stack).ready().await.unwrap().call(named("W2"));
    let first = tokio::spawn(stack.clone().oneshot(named("W1")));
    while lab.log.count("dies with W1") == 0 {
        tokio::time::sleep(ms(1)).await;
    }
    assert_eq!(second.await.unwrap(), 2);
    (lab.log.timed(), first.await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_that_was_called_before_and_polled_only_later() {
    for safety in [absent(), absent().conflict_key(|_| Some("k"))] {
        let (log, first) = is_polled_late(None, safety).await;
        assert_eq!(landed(&log), ["W2"], "W1 over W2: {first:?} {log:#?}");
        assert_eq!(first.unwrap_err().outcome(), Outcome::NotDone);
    }
}

/// The mirror image: W2 was sent when it was called, and lost, and W1 is answered before W2 is polled.
#[tokio::test(start_paused = true)]
async fn no_replay_of_a_write_that_is_polled_only_later_lands_on_one_that_went_meanwhile() {
    for safety in [absent(), absent().conflict_key(|_| Some("k"))] {
        let lab = Lab::new();
        lab.write(dies(&lab, ms(1))).write(lands(&lab, 1)).write(lands(&lab, 2));
        let stack = stack(&lab, safety);
        assert_eq!(stack.clone().oneshot(read()).await.unwrap(), 0);
        let second = stack.clone().ready().await.unwrap().call(named("W2"));
        assert_eq!(stack.clone().oneshot(named("W1")).await.unwrap(), 1);
        let second = second.await;
        assert_eq!(landed(&lab.log.timed()), ["W1"], "W2 over W1: {second:?} {:#?}", lab.log.timed());
        assert_eq!(second.unwrap_err().outcome(), Outcome::NotDone);
    }
}

/// A closure takes down W1 and a read. Both are made again, and wait for the connection, which takes a second. W3 is
/// called meanwhile, gets its turn first, and is answered. Then the replay of W1 lands on top of it.
async fn waits_for_its_replay(
    safety: Safety,
    w1: Req,
) -> (Vec<String>, Result<Res, CallError>, Result<Res, CallError>) {
    let lab = Lab::new();
    lab.write(later(ms(10), Err(closed()))).write(lands(&lab, 3)).write(lands(&lab, 1));
    lab.read(answer(0)).read(later(ms(9), Err(closed())));
    lab.connect(Connect::Ok).connect(Connect::After(SECOND));
    let stack = stack(&lab, safety);
    assert_eq!(stack.clone().oneshot(read()).await.unwrap(), 0);
    let reading = tokio::spawn(stack.clone().oneshot(read()));
    tokio::task::yield_now().await;
    let first = stack.clone().oneshot(w1);
    let third = async {
        tokio::time::sleep(ms(500)).await;
        lab.log.note("calls W3");
        let result = stack.clone().oneshot(named("W3")).await;
        lab.log.note(format!("told W3 {:?}", result.as_ref().map_err(CallError::outcome)));
        result
    };
    let (third, first) = tokio::join!(biased; third, first);
    reading.await.unwrap().unwrap();
    (lab.log.timed(), first, third)
}

#[tokio::test(start_paused = true)]
async fn no_replay_of_an_idempotent_write_lands_on_one_that_was_called_while_it_waited_for_a_connection() {
    let put = Tagged::new("W1", Effect::Idempotent).named("put");
    let (log, first, third) = waits_for_its_replay(Safety::refuse().replay_idempotent(), put).await;
    assert_ne!(landed(&log), ["W3", "W1"], "{first:?} {third:?} {log:#?}");
}

/// With a key that says `None` for W3, which then touches all.
#[tokio::test(start_paused = true)]
async fn no_replay_of_a_write_with_a_key_lands_on_one_without_that_was_called_while_it_waited() {
    let safety = Safety::new(|doubt: Doubt| async move {
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    });
    let safety = safety.conflict_key(|request: &Req| (**request == "W1").then_some("k"));
    let (log, first, third) = waits_for_its_replay(safety, named("W1")).await;
    assert_ne!(landed(&log), ["W3", "W1"], "{first:?} {third:?} {log:#?}");
}

#[tokio::test(start_paused = true)]
async fn no_replay_after_a_check_lands_on_a_write_that_was_called_while_it_waited_for_a_connection() {
    let safety = Safety::new(|doubt: Doubt| async move {
        tokio::time::sleep(ms(10)).await;
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    });
    let (log, first, third) = waits_for_its_replay(safety, named("W1")).await;
    assert_ne!(landed(&log), ["W3", "W1"], "{first:?} {third:?} {log:#?}");
}

/// The same over real connections, without a script of who has its turn when. Returns in how many of the rounds the
/// replay came to the server after another write that was called later and, in the end, answered.
async fn rounds(rounds: u32) -> u32 {
    use goaround::jsonrpc::{Client, Request};
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    let mut over = 0;
    for _ in 0..rounds {
        let came = Arc::new(std::sync::Mutex::new(Vec::new()));
        let (log, first) = (Arc::clone(&came), Arc::new(AtomicBool::new(true)));
        let connector = service_fn(move |()| {
            let (log, dies) = (Arc::clone(&log), first.swap(false, Ordering::Relaxed));
            async move {
                if !dies {
                    tokio::time::sleep(ms(20)).await;
                }
                let (ours, theirs) = tokio::io::duplex(1 << 16);
                tokio::spawn(async move {
                    let (read, mut write) = tokio::io::split(theirs);
                    let mut lines = BufReader::new(read).lines();
                    while let Ok(Some(line)) = lines.next_line().await {
                        let message: serde_json::Value = serde_json::from_str(&line).unwrap();
                        if dies && message["method"] == "put/1" {
                            return;
                        }
                        log.lock().unwrap().push(message["method"].as_str().unwrap().to_owned());
                        let answer =
                            serde_json::json!({ "jsonrpc": "2.0", "id": message["id"], "result": 0 });
                        write.write_all(format!("{answer}\n").as_bytes()).await.unwrap();
                    }
                });
                Ok::<_, BoxError>(Client::builder().connect(ours))
            }
        });
        let stack = Stack::builder(connector)
            .deadline(30 * SECOND)
            .classify(|_: &Request| Some(Effect::Idempotent))
            .writes(WriteSafetyLayer::refuse().replay_idempotent())
            .build()
            .unwrap();
        let call = |name: &'static str| {
            let stack = stack.clone();
            tokio::spawn(async move { stack.send(Request::new(name, ()).unwrap()).await.is_ok() })
        };
        let one = call("put/1");
        tokio::time::sleep(ms(10)).await;
        let others: Vec<_> = (0..8).map(|_| call("put/2")).collect();
        let replayed = one.await.unwrap();
        for other in others {
            assert!(other.await.unwrap());
        }
        let came = came.lock().unwrap();
        let place = came.iter().position(|method| method == "put/1");
        assert_eq!(place.is_some(), replayed);
        over += u32::from(place.is_some_and(|place| place > 0));
    }
    over
}

#[tokio::test]
async fn no_replay_comes_to_the_server_after_a_write_that_was_called_while_it_waited_over_jsonrpc() {
    assert_eq!(rounds(20).await, 0);
}

/// The control: without reconnects inside, a write that is handed back is counted anew where it is handed over again.
#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_whose_attempt_was_withdrawn_and_that_was_handed_over_again_meanwhile() {
    let lab = Lab::new();
    let withdrawn: Step = Box::new(move |request: Req| {
        Box::pin(async move {
            tokio::time::sleep(ms(5)).await;
            Err(CallError::not_sent(format!("the time of {} is up", *request)))
        })
    });
    lab.write(withdrawn).write(dies(&lab, ms(1))).write(lands(&lab, 2)).write(lands(&lab, 1));
    let service = goaround::DeadlineLayer::new(30 * SECOND)
        .layer(absent().attempt_timeout(ms(5)).layer(lab.connection()));
    let (second, first) =
        tokio::join!(service.clone().oneshot(named("W2")), service.clone().oneshot(named("W1")));
    let log = lab.log.timed();
    assert_eq!(second.unwrap(), 2, "{log:#?}");
    assert_eq!(landed(&log), ["W2"], "W1 over W2: {first:?} {log:#?}");
}

// ----- the end of a handle while a write is being settled

/// The connection goes away for good while W1 is in doubt: unknown, told once, listed once.
#[tokio::test(start_paused = true)]
async fn a_shutdown_while_a_write_is_settled_leaves_one_unknown_that_is_reported_once() {
    let lab = Lab::new();
    lab.write(fail(closed())).connect(Connect::Ok).connect(Connect::Hang);
    let safety = Safety::new(|doubt: Doubt| async move {
        doubt.probe(read()).await?;
        Ok::<_, BoxError>(doubt.not_landed())
    });
    let stack = stack(&lab, safety.quarantine(ms(100)));
    let ledger = stack.ledger();
    let first = tokio::spawn(stack.clone().oneshot(named("W1")));
    tokio::time::sleep(ms(200)).await;
    assert_eq!((stack.in_flight(), stack.shutdown(SECOND).await), (1, 1));
    let error = first.await.unwrap().unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
    let told = lab.events.doubts() + lab.events.abandoned();
    assert_eq!(
        (lab.writes(), told, ledger.in_doubt().await.unwrap().len()),
        (1, 1, 1),
        "{:?}",
        lab.events.all()
    );
    assert_eq!(stack.in_flight(), 0);
}

/// The place of a check whose call is dropped is free again.
#[tokio::test(start_paused = true)]
async fn the_place_of_a_check_is_free_when_its_call_is_dropped() {
    let lab = Lab::new();
    lab.write(fail(CallError::ambiguous("reset")))
        .write(fail(CallError::ambiguous("reset")))
        .write(lands(&lab, 2));
    let hangs = Arc::new(AtomicBool::new(true));
    let safety = Safety::new(move |doubt: Doubt| {
        let hangs = hangs.swap(false, Ordering::Relaxed);
        async move {
            if hangs {
                std::future::pending::<()>().await;
            }
            Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
        }
    });
    let stack = stack(&lab, safety.max_checks(1).look_first().quarantine(SECOND));
    let ledger = stack.ledger();
    let dropped = tokio::time::timeout(ms(500), stack.clone().oneshot(named("W1"))).await;
    assert!(dropped.is_err());
    assert_eq!((lab.events.abandoned(), ledger.in_doubt().await.unwrap().len()), (1, 1));
    assert_eq!(stack.oneshot(named("W2")).await.unwrap(), 2);
    assert_eq!((lab.writes(), lab.events.abandoned()), (3, 1));
}

// ----- a panic of the caller's code further in, caught in between

/// As `tower_http`'s: a panic is an error.
#[derive(Clone)]
struct Catch<S>(S);

impl<S> Service<Req> for Catch<S>
where
    S: Service<Req, Response = Res, Error = CallError>,
    S::Future: Send + 'static,
{
    type Response = Res;
    type Error = CallError;
    type Future = Answer;

    fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), CallError>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Answer {
        match std::panic::catch_unwind(AssertUnwindSafe(|| self.0.call(request))) {
            Ok(answer) => Box::pin(answer),
            Err(_) => Box::pin(std::future::ready(Err(CallError::ambiguous("it panicked")))),
        }
    }
}

async fn it_is_reported<S>(lab: &Lab, outer: WriteSafety<S, Req, Res>)
where
    S: Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static,
{
    let ledger = outer.ledger();
    let error = outer.oneshot(write()).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(
        (lab.events.doubts(), ledger.in_doubt().await.unwrap().len()),
        (1, 1),
        "{:?}",
        lab.events.all()
    );
}

/// The control: a connection that panics is an unknown that the outer layer reports.
#[tokio::test(start_paused = true)]
async fn an_unknown_is_reported_where_the_connection_panics_and_that_is_caught_in_between() {
    let lab = Lab::new();
    lab.write(Box::new(|_| panic!("below")));
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(Catch(lab.connection()));
    it_is_reported(&lab, outer).await;
}

#[tokio::test(start_paused = true)]
async fn an_unknown_is_reported_where_the_key_function_of_a_layer_further_in_panics() {
    let lab = Lab::new();
    let inner = Safety::refuse().conflict_key(|_| -> Option<&str> { panic!("in the key") });
    let inner = inner.on_event(lab.events.sink()).layer(lab.connection());
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(Catch(inner));
    it_is_reported(&lab, outer).await;
}

/// A retry in between hands it over again after the panic, and that copy is sent and lost.
#[tokio::test(start_paused = true)]
async fn an_unknown_is_reported_where_a_copy_was_made_after_a_panic_further_in() {
    let lab = Lab::new();
    lab.write(fail(CallError::ambiguous("reset")));
    let first = Arc::new(AtomicBool::new(true));
    let inner = Safety::refuse().conflict_key(move |_: &Req| -> Option<&str> {
        assert!(!first.swap(false, Ordering::Relaxed), "in the key");
        Some("k")
    });
    let inner = Catch(inner.on_event(lab.events.sink()).layer(lab.connection()));
    let inner = tower::util::BoxCloneService::new(inner);
    let twice = service_fn(move |request: Req| -> Answer {
        let inner = inner.clone();
        // Lazy, both of them.
        let again: Answer = Box::pin(inner.clone().oneshot(request.try_clone().unwrap()));
        let first: Answer = Box::pin(inner.oneshot(request));
        Box::pin(async move {
            match first.await {
                Err(_) => again.await,
                done => done,
            }
        })
    });
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(twice);
    let error = outer.oneshot(write()).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert!(lab.events.doubts() >= 1, "{:?}", lab.events.all());
}

#[tokio::test(start_paused = true)]
async fn that_a_write_waits_for_a_connection_is_one_attempt_however_long_it_takes() {
    for comes in [true, false] {
        let lab = Lab::new();
        lab.write(lands(&lab, 1));
        lab.connect(Connect::After(if comes { 29 * SECOND } else { 60 * SECOND }));
        let result = stack(&lab, absent()).send(named("w1")).await;
        assert_eq!(lab.log.count("lands w1"), usize::from(comes));
        match result {
            Ok(answer) => assert_eq!((answer, comes), (1, true)),
            Err(error) => {
                assert_eq!((error.outcome(), error.attempts().len(), comes), (Outcome::NotDone, 1, false));
                assert!(error.to_string().contains("no connection yet"), "{error}");
            }
        }
        // One attempt is nothing to report, and there was nothing to doubt.
        assert_eq!((lab.events.calls(), lab.events.doubts()), (0, 0), "{comes}");
    }
}

// ----- layers within others

#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_of_a_layer_further_out_that_waited_or_was_polled_only_later() {
    let keyed = || absent().conflict_key(|_| Some("k"));
    let outer: [fn() -> Safety; 3] = [absent, || absent().conflict_key(|_| Some("k")), Safety::refuse];
    for outer in outer {
        for inner in [absent(), keyed()] {
            for polled in [false, true] {
                let (log, first, second) = waits_for_a_connection(Some(outer()), inner.clone(), polled).await;
                assert_ne!(landed(&log), ["W2", "W1"], "W1 over W2: {first} {second} {log:#?}");
                // Unless its key is in doubt when it would go.
                assert!(second == "Ok(2)" || second.contains("same conflict key"), "{second}");
            }
            let (log, first) = is_polled_late(Some(outer()), inner).await;
            assert_eq!(landed(&log), ["W2"], "W1 over W2: {first:?} {log:#?}");
        }
    }
}

/// W2, on another stack with the same ledger and key, is called before W1, and gets its connection only after it was.
#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_that_waited_in_a_layer_that_knows_nothing_of_its_key() {
    for between in [Safety::refuse(), absent(), Safety::refuse().conflict_key(|_| Some("k"))] {
        let (lab, ledger) = (Lab::new(), MemoryLedger::new());
        lab.connect(Connect::After(ms(50)));
        lab.write(dies(&lab, ms(100))).write(lands(&lab, 2)).write(lands(&lab, 1));
        let keyed = |safety: Safety| safety.ledger(ledger.clone()).conflict_key(|_| Some("k"));
        let below = between.layer(ReconnectLayer::once().layer(lab.connector()));
        let deadline = DeadlineLayer::new(30 * SECOND);
        let second = tokio::spawn(deadline.layer(keyed(Safety::refuse()).layer(below)).oneshot(named("W2")));
        tokio::time::sleep(ms(10)).await;
        let first = deadline.layer(keyed(absent()).layer(lab.connection())).oneshot(named("W1")).await;
        assert_eq!(second.await.unwrap().unwrap(), 2);
        assert_eq!(landed(&lab.log.timed()), ["W2"], "W1 over W2: {first:?} {:#?}", lab.log.timed());
    }
}

/// W2, on another stack with the same ledger and key, is called before W1, and goes only once that was: its layer further
/// in hands it over again, as its first attempt was withdrawn.
#[tokio::test(start_paused = true)]
async fn what_a_layer_further_in_hands_over_again_counts_anew_further_out_and_waits_for_its_key() {
    for is_in_doubt in [false, true] {
        let (lab, other, ledger) = (Lab::new(), Lab::new(), MemoryLedger::new());
        let key = |_: &Req| Some("k");
        other.write(later(ms(5), Err(CallError::not_sent("its time is up")))).write(lands(&lab, 2));
        lab.write(dies(&lab, if is_in_doubt { ms(1) } else { ms(10) })).write(lands(&lab, 1));
        let below = absent().attempt_timeout(ms(5)).layer(other.connection());
        let second = DeadlineLayer::new(30 * SECOND)
            .layer(Safety::refuse().ledger(ledger.clone()).conflict_key(key).layer(below));
        let second = tokio::spawn(second.oneshot(named("W2")));
        tokio::time::sleep(ms(2)).await;
        let first = DeadlineLayer::new(30 * SECOND)
            .layer(absent().ledger(ledger).conflict_key(key).layer(lab.connection()))
            .oneshot(named("W1"))
            .await;
        let (second, log) = (second.await.unwrap(), lab.log.timed());
        assert_eq!(landed(&log), [if is_in_doubt { "W1" } else { "W2" }], "{first:?} {second:?} {log:#?}");
        let not_done = if is_in_doubt { second } else { first };
        assert_eq!(not_done.unwrap_err().outcome(), Outcome::NotDone);
    }
}

/// W2 is let go on another thread after W1 was, and is sent before it: here, while W1 is given to the connection, which it
/// has waited for, or gets again since nothing of it was sent the first time.
#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_that_was_let_go_before_it_and_sent_after_it() {
    for case in 0..8 {
        let [is_keyed, is_nested, is_again] = [case & 1 > 0, case & 2 > 0, case & 4 > 0];
        let lab = Lab::new();
        match is_again {
            true => lab.write(later(ms(5), Err(CallError::not_sent("its time is up")))),
            false => lab.connect(Connect::After(SECOND)),
        };
        let between: Arc<Mutex<Option<Answer>>> = Arc::default();
        let (other, log) = (Arc::clone(&between), lab.log.clone());
        lab.write(Box::new(move |request: Req| {
            let mut second = other.lock().unwrap().take().unwrap();
            assert!(futures_poll(second.as_mut()));
            *other.lock().unwrap() = Some(second);
            log.note(format!("lands {}", *request));
            Box::pin(std::future::ready(Ok(1)))
        }));
        lab.write(dies(&lab, ms(1))).write(lands(&lab, 2));
        let safety = if is_keyed { absent().conflict_key(|_| Some("k")) } else { absent() };
        let safety = safety.attempt_timeout(if is_again { ms(5) } else { 10 * SECOND });
        let stack = stack(&lab, safety.clone());
        let first = within(is_nested.then_some(safety), &stack).oneshot(named("W1"));
        let mut first = task::spawn(first);
        let mut second: Answer = Box::pin(stack.oneshot(named("W2")));
        assert!(first.poll().is_pending() && (is_again || futures_poll(second.as_mut())));
        *between.lock().unwrap() = Some(second);
        tokio::time::sleep(2 * SECOND).await;
        assert_eq!(first.await.unwrap(), 1);
        let second = between.lock().unwrap().take().unwrap();
        let second = second.await;
        let log = lab.log.timed();
        assert_eq!(second.unwrap_err().outcome(), Outcome::NotDone, "{log:#?}");
        assert_eq!((landed(&log), lab.log.count("dies with W2")), (vec!["W1"], 1), "{log:#?}");
    }
}

/// W2 is called before W1, and a service in between passes it on only once W1 was lost, as one that awaits a token.
#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_that_a_service_in_between_held_back_until_then() {
    for safety in [absent(), absent().conflict_key(|_| Some("k"))] {
        let lab = Lab::new();
        lab.write(later(ms(5), Err(CallError::ambiguous("reset"))))
            .write(lands(&lab, 2))
            .write(lands(&lab, 1));
        let below = BoxCloneService::new(ReconnectLayer::once().layer(lab.connector()));
        let between = service_fn(move |request: Req| -> Answer {
            let held = if *request == "W2" { ms(50) } else { ms(0) };
            let passed_on: Answer = Box::pin(below.clone().oneshot(request));
            Box::pin(async move {
                tokio::time::sleep(held).await;
                passed_on.await
            })
        });
        let service = DeadlineLayer::new(30 * SECOND).layer(safety.layer(between));
        assert_eq!(service.clone().oneshot(read()).await.unwrap(), 0);
        let mut second = task::spawn(service.clone().oneshot(named("W2")));
        assert!(second.poll().is_pending());
        let (second, first) = tokio::join!(second, service.oneshot(named("W1")));
        let log = lab.log.timed();
        // On its key it does not go over a doubt.
        let landed = landed(&log);
        assert_eq!(landed.len(), 1, "{first:?} {second:?} {log:#?}");
        let (done, not_done) = if landed == ["W2"] { (second, first) } else { (first, second) };
        assert!(done.is_ok() && not_done.unwrap_err().outcome() == Outcome::NotDone, "{log:#?}");
    }
}

/// A connection has W1, and sends it only once W2 was lost.
#[tokio::test(start_paused = true)]
async fn no_replay_lands_on_a_write_that_its_connection_held_back_until_then() {
    for safety in [absent(), absent().conflict_key(|_| Some("k"))] {
        let lab = Lab::new();
        let log = lab.log.clone();
        lab.write(Box::new(move |request: Req| {
            Box::pin(async move {
                tokio::time::sleep(ms(50)).await;
                assert!(request.context().activity().unwrap().adopt());
                log.note("lands W1");
                Ok(1)
            })
        }));
        lab.write(later(ms(5), Err(CallError::ambiguous("reset")))).write(lands(&lab, 2));
        let stack = stack(&lab, safety.check_timeout(SECOND));
        assert_eq!(stack.clone().oneshot(read()).await.unwrap(), 0);
        let mut first = task::spawn(stack.clone().oneshot(named("W1")));
        assert!(first.poll().is_pending());
        let (first, second) = tokio::join!(first, stack.oneshot(named("W2")));
        assert_eq!(first.unwrap(), 1);
        let log = lab.log.timed();
        assert_eq!(landed(&log), ["W1"], "W2 over W1: {second:?} {log:#?}");
        assert_eq!(second.unwrap_err().outcome(), Outcome::NotDone);
    }
}

/// A service in between that hands what was not sent over once more, after 50 ms.
fn hands_over_again(
    at_once: bool,
    below: BoxCloneService<Req, Res, CallError>,
) -> BoxCloneService<Req, Res, CallError> {
    BoxCloneService::new(service_fn(move |request: Req| -> Answer {
        let again: Answer = Box::pin(below.clone().oneshot(request.try_clone().unwrap()));
        let passed_on: Answer = match at_once {
            // Its connection is always ready.
            true => below.clone().call(request),
            false => Box::pin(below.clone().oneshot(request)),
        };
        Box::pin(async move {
            match passed_on.await {
                Err(error) if error.outcome() == Outcome::NotDone => {
                    tokio::time::sleep(ms(50)).await;
                    again.await
                }
                result => result,
            }
        })
    }))
}

/// A service in between hands W1, of which nothing was sent, over once more: its first attempt, or its replay.
#[tokio::test(start_paused = true)]
async fn what_a_service_in_between_hands_over_again_counts_anew() {
    for (case, safety) in
        [absent(), absent().conflict_key(|_| Some("k"))].into_iter().cycle().take(3).enumerate()
    {
        // On its key W2 would be turned away while W1 is in doubt.
        let is_replay = case == 2;
        let lab = Lab::new();
        let lost = || later(ms(5), Err(CallError::ambiguous("reset")));
        let full = || fail(CallError::not_sent("the queue is full"));
        match is_replay {
            true => lab.write(lost()).write(full()).write(lands(&lab, 2)),
            false => lab.write(full()).write(lost()),
        };
        lab.write(lands(&lab, 1)).write(lands(&lab, 2));
        let below = BoxCloneService::new(ReconnectLayer::once().layer(lab.connector()));
        let service = DeadlineLayer::new(30 * SECOND).layer(safety.layer(hands_over_again(false, below)));
        let first = tokio::spawn(service.clone().oneshot(named("W1")));
        tokio::time::sleep(if is_replay { ms(130) } else { ms(10) }).await;
        let second = service.oneshot(named("W2")).await;
        let (first, log) = (first.await.unwrap(), lab.log.timed());
        let [done, not_done, expected] =
            if is_replay { [second, first, Ok(2)] } else { [first, second, Ok(1)] };
        assert_eq!((done.ok(), landed(&log).len()), (expected.ok(), 1), "{not_done:?} {log:#?}");
        assert_eq!(not_done.unwrap_err().outcome(), Outcome::NotDone);
    }
}

/// Waits for an answer on a task of its own.
fn on_a_task(answer: Answer) -> Answer {
    let answer = tokio::spawn(answer);
    Box::pin(async move { answer.await.unwrap() })
}

/// W1 is with a connection, which holds it back or hands it back, and goes once W2 was lost. It is waited for on a task, so
/// that its layer is not polled between the two.
#[tokio::test(start_paused = true)]
async fn what_goes_later_on_a_task_of_a_service_in_between_counts_when_it_goes() {
    fn goes(request: &Req) {
        assert!(request.context().activity().unwrap().adopt());
    }
    let keyed = || absent().conflict_key(|_| Some("k"));
    for (is_held, safety) in [true, false].into_iter().flat_map(|it| [(it, absent()), (it, keyed())]) {
        // Another layer answers for W1, or none does.
        for outer in [None, Some(absent())] {
            let (lab, passes) = (Lab::new(), outer.is_some());
            let log = lab.log.clone();
            let lands_later: Step = Box::new(move |request: Req| {
                goes(&request);
                Box::pin(async move {
                    if is_held {
                        tokio::time::sleep(ms(50)).await;
                        goes(&request);
                    }
                    log.note("lands W1");
                    tokio::time::sleep(ms(200)).await;
                    Ok(1)
                })
            });
            let handed_back: Step = Box::new(|request: Req| {
                goes(&request);
                request.context().activity().unwrap().withdrawn();
                fail(CallError::not_sent("the queue is full"))(request)
            });
            let lost = later(ms(5), Err(CallError::ambiguous("reset")));
            match is_held {
                true => lab.write(lands_later).write(lost),
                false => lab.write(handed_back).write(lost).write(lands_later),
            };
            lab.write(lands(&lab, 2));
            let below = BoxCloneService::new(lab.connection());
            let service = safety.clone().layer(hands_over_again(true, below).map_future(on_a_task));
            let deadline = DeadlineLayer::new(30 * SECOND);
            let around = match outer {
                Some(outer) => BoxCloneService::new(deadline.layer(outer.layer(service.clone()))),
                None => BoxCloneService::new(deadline.layer(service.clone())),
            };
            let mut first = task::spawn(around.oneshot(named("W1")));
            assert!(first.poll().is_pending());
            let first = tokio::spawn(first);
            let second = deadline.layer(service).oneshot(named("W2")).await;
            let (first, log) = (first.await.unwrap(), lab.log.timed());
            assert_eq!(first.unwrap(), 1, "{log:#?}");
            assert_eq!(landed(&log), ["W1"], "{is_held}, {passes}: W2 over W1: {second:?} {log:#?}");
            assert_eq!(second.unwrap_err().outcome(), Outcome::NotDone);
        }
    }
}
