//! What an error tells its caller: which call it is the end of, and whether the service's own error may stand in for
//! it.

mod lab;

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, CallId, Deadline, DeadlineLayer, Effect, Event, Evidence, Exit, InDoubt,
    Outcome, ReconnectLayer, RetryReadOnly, Scope, Stack, Tagged, Verdict, WriteSafetyLayer, jsonrpc,
    write_safety::ledger::Ledger,
};
use lab::{Answer, Lab, Readiness, SECOND, closed, fail, ms, unavailable};
use tokio::time::{Instant, sleep};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};

type Req = Tagged<&'static str>;
type Doubt = InDoubt<Req, u8>;

#[derive(Clone, Copy, Debug, PartialEq, thiserror::Error)]
#[error("own error")]
enum Own {
    Connect,
    Reset,
    AlreadyExists,
}

fn classify(own: Own) -> CallError {
    match own {
        Own::Connect => CallError::not_sent(own),
        Own::Reset => CallError::ambiguous(own),
        Own::AlreadyExists => CallError::answered(own),
    }
}

/// A server that ends its calls in these ways, one after the other, and then goes on with the last.
fn server<const N: usize>(
    ways: [Own; N],
) -> impl Service<Req, Response = u8, Error = CallError, Future: Send> + Clone + Send + 'static {
    let ways = Arc::new(Mutex::new(VecDeque::from(ways)));
    service_fn(move |_: Req| {
        let mut ways = ways.lock().unwrap();
        let way = if ways.len() > 1 { ways.pop_front() } else { ways.front().copied() };
        std::future::ready(Err(classify(way.unwrap())))
    })
}

fn connector<S>(
    connection: S,
) -> impl Service<(), Response = S, Error = CallError, Future: Send> + Clone + Send
where
    S: Clone + Send + 'static,
{
    service_fn(move |()| std::future::ready(Ok::<_, CallError>(connection.clone())))
}

/// The calls that were reported, with what they were reported for.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Report>>>);

/// What was reported, and of which call.
type Report = (&'static str, Option<CallId>);

impl Told {
    fn sink(&self) -> impl Fn(Event<'_>) + Send + Sync + use<> {
        let told = Arc::clone(&self.0);
        move |event| match event {
            Event::InDoubt(report) => told.lock().unwrap().push(("in doubt", Some(report.call))),
            Event::Call(report) => told.lock().unwrap().push(("call", report.call)),
            _ => {}
        }
    }

    fn take(&self) -> Vec<Report> {
        std::mem::take(&mut *self.0.lock().unwrap())
    }
}

fn write() -> Req {
    Tagged::new("pay", Effect::Write)
}

fn read() -> Req {
    Tagged::new("list", Effect::ReadOnly)
}

// ===== Which call it was =====

#[tokio::test(start_paused = true)]
async fn error_event_and_ledger_name_an_unknown_write_alike_in_a_stack() {
    let told = Told::default();
    let stack = Stack::builder(connector(server([Own::Reset]))).on_event(told.sink()).build().unwrap();
    let mut calls = Vec::new();
    for _ in 0..2 {
        let error = stack.send(write()).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown);
        let call = error.call().unwrap();
        assert_eq!(told.take(), [("in doubt", Some(call))]);
        assert!(!error.to_string().contains(&call.to_string()), "{error}");
        assert!(format!("{error:?}").contains(&format!("call: Some({call})")), "{error:?}");
        calls.push(call);
    }
    assert_ne!(calls[0], calls[1]);
    let entries = stack.ledger().in_doubt().await.unwrap();
    assert_eq!(entries.iter().map(|entry| entry.id.call()).collect::<Vec<_>>(), calls);
}

#[tokio::test(start_paused = true)]
async fn error_event_and_ledger_name_an_unknown_write_alike_whatever_layer_is_the_outermost() {
    for (deadline, retry) in [(true, true), (true, false), (false, true), (false, false)] {
        let told = Told::default();
        let safety = WriteSafetyLayer::refuse().on_event(told.sink()).layer(
            ServiceBuilder::new()
                .layer(RetryReadOnly)
                .layer(ReconnectLayer::once())
                .service(connector(server([Own::Reset]))),
        );
        let ledger = safety.ledger();
        let outer = ServiceBuilder::new()
            .option_layer(deadline.then(|| DeadlineLayer::new(Duration::from_secs(9)).on_event(told.sink())))
            .service(safety);
        let service = match retry {
            true => BoxCloneService::new(RetryReadOnly.on_event(told.sink()).layer(outer)),
            false => BoxCloneService::new(outer),
        };
        let error = service.oneshot(write()).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown);
        let call = error.call().unwrap();
        assert_eq!(told.take(), [("in doubt", Some(call))], "{deadline} {retry}");
        let entries = ledger.in_doubt().await.unwrap();
        assert_eq!(entries.iter().map(|entry| entry.id.call()).collect::<Vec<_>>(), [call]);
    }
}

#[tokio::test(start_paused = true)]
async fn error_and_event_name_a_failed_read_alike() {
    let told = Told::default();
    let answers = Arc::new(AtomicBool::new(true));
    let answered = Arc::clone(&answers);
    let connection = service_fn(move |_: Req| {
        let answers = answered.load(Ordering::Relaxed);
        std::future::ready(if answers { Ok(1) } else { Err(classify(Own::Reset)) })
    });
    let stack = Stack::builder(connector(connection)).on_event(told.sink()).build().unwrap();
    // The second one is what sends later reads the short way.
    for _ in 0..2 {
        stack.send(read()).await.unwrap();
    }
    answers.store(false, Ordering::Relaxed);
    let first = stack.send(read()).await.unwrap_err();
    assert_eq!(told.take(), [("call", Some(first.call().unwrap()))]);
    let second = stack.send(read()).await.unwrap_err();
    assert_eq!(told.take(), [("call", Some(second.call().unwrap()))]);
    assert_ne!(first.call(), second.call());

    let layers = RetryReadOnly.on_event(told.sink()).layer(server([Own::Reset]));
    let error = layers.oneshot(read()).await.unwrap_err();
    assert_eq!((error.attempts().len(), told.take()), (3, vec![("call", Some(error.call().unwrap()))]));
}

#[tokio::test(start_paused = true)]
async fn each_layer_alone_names_the_call_in_its_error_as_the_caller_has() {
    let alone: [BoxCloneService<Req, u8, CallError>; 4] = [
        BoxCloneService::new(DeadlineLayer::new(Duration::from_secs(9)).layer(server([Own::Reset]))),
        BoxCloneService::new(WriteSafetyLayer::refuse().layer(server([Own::Reset]))),
        BoxCloneService::new(RetryReadOnly.layer(server([Own::Reset]))),
        BoxCloneService::new(ReconnectLayer::once().layer(connector(server([Own::Reset])))),
    ];
    for service in alone {
        for call in [write, read] {
            let error = service.clone().oneshot(call()).await.unwrap_err();
            assert!(error.call().is_some(), "{error:?}");
            let mut named = call();
            let id = named.context_mut().assign_id();
            assert_eq!(service.clone().oneshot(named).await.unwrap_err().call(), Some(id));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_turned_away_is_named_too() {
    let named = |mut call: Req| {
        let id = call.context_mut().assign_id();
        (call, Some(id))
    };
    let past = || Deadline::At(Instant::now());
    let refusing: [BoxCloneService<Req, u8, CallError>; 4] = [
        BoxCloneService::new(DeadlineLayer::new(Duration::from_secs(9)).layer(server([Own::Reset]))),
        BoxCloneService::new(
            WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.unknown("")) })
                .quarantine(Duration::ZERO)
                .layer(server([Own::Reset])),
        ),
        BoxCloneService::new(RetryReadOnly.attempts(0).layer(server([Own::Reset]))),
        BoxCloneService::new(Stack::builder(connector(server([Own::Reset]))).build().unwrap()),
    ];
    for service in refusing {
        let (call, id) = named(write().deadline(past()));
        let error = service.oneshot(call).await.unwrap_err();
        assert_eq!((error.outcome(), error.call()), (Outcome::NotDone, id));
    }

    // Of a stack, at the first call and on the short way; and after its end.
    let connection = service_fn(|_: Req| std::future::ready(Ok::<u8, CallError>(1)));
    let stack = Stack::builder(connector(connection)).build().unwrap();
    for _ in 0..2 {
        let error = stack.send(read().deadline(past())).await.unwrap_err();
        assert!(error.call().is_some());
        stack.send(read()).await.unwrap();
    }
    stack.shutdown(Duration::ZERO).await;
    for call in [write(), read()] {
        let (call, id) = named(call);
        assert_eq!(stack.send(call).await.unwrap_err().call(), id);
    }

    // A key in doubt: each is named as itself.
    let layer = WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.unknown("")) })
        .conflict_key(|_: &Req| Some("account 7".to_owned()));
    let service = layer.layer(server([Own::Reset]));
    let first = service.clone().oneshot(write()).await.unwrap_err();
    let second = service.oneshot(write()).await.unwrap_err();
    assert_eq!((first.outcome(), second.outcome()), (Outcome::Unknown, Outcome::NotDone));
    assert!(first.call().is_some() && second.call().is_some() && first.call() != second.call());
}

#[tokio::test(start_paused = true)]
async fn a_call_within_a_call_does_not_lend_it_its_name() {
    let inner = Stack::builder(connector(server([Own::Reset]))).build().unwrap();
    let outer = service_fn(move |_: Req| inner.clone().oneshot(write()));
    let mut call = write();
    let id = call.context_mut().assign_id();
    let told = Told::default();
    let error = WriteSafetyLayer::refuse().on_event(told.sink()).layer(outer).oneshot(call).await;
    assert_eq!((error.unwrap_err().call(), told.take()), (Some(id), vec![("in doubt", Some(id))]));

    // And an error in a box keeps it.
    #[derive(Debug, thiserror::Error)]
    #[error("wrapped")]
    struct Wrapped(#[source] CallError);
    let error = RetryReadOnly.layer(server([Own::Reset])).oneshot(write()).await.unwrap_err();
    let call = error.call();
    assert!(call.is_some());
    assert_eq!(CallError::from_boxed(Wrapped(error).into()).call(), call);
}

#[test]
fn an_error_that_no_layer_has_seen_names_no_call() {
    assert_eq!(classify(Own::Reset).call(), None);
}

// ===== Errors of other calls =====

type Layered = WriteSafetyLayer<Req, u32>;

fn deadline(lab: &Lab) -> DeadlineLayer {
    DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink())
}

/// A server whose writes are counted as they land.
#[derive(Clone, Default)]
struct Landed(Arc<AtomicU32>);

impl Landed {
    fn one(&self) -> u32 {
        self.0.fetch_add(1, Ordering::SeqCst) + 1
    }

    fn count(&self) -> u32 {
        self.0.load(Ordering::SeqCst)
    }
}

/// A connection that makes the write, and then asks another service of this crate for the receipt. What that says
/// goes up by `?`.
fn with_receipt(
    landed: &Landed,
    receipt: fn() -> CallError,
) -> impl Service<Req, Response = u32, Error = CallError, Future: Send> + Clone + Send + 'static {
    let (landed, lab) = (landed.clone(), Lab::new());
    lab.read(fail(receipt()));
    let receipts = RetryReadOnly.attempts(1).layer(lab.connection());
    service_fn(move |_: Req| -> Answer {
        let (landed, receipts) = (landed.clone(), receipts.clone());
        let receipt: Answer = Box::pin(receipts.oneshot(read()));
        Box::pin(async move {
            landed.one();
            let receipt = receipt.await?;
            Ok(receipt)
        })
    })
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_connection_passes_the_error_of_a_read_on_is_not_said_to_be_safe_to_repeat() {
    let (lab, landed) = (Lab::new(), Landed::default());
    let service = ServiceBuilder::new()
        .layer(deadline(&lab))
        .layer(Layered::refuse())
        .service(with_receipt(&landed, || CallError::ambiguous("reset")));
    let error = service.oneshot(write()).await.unwrap_err();
    assert_eq!(landed.count(), 1);
    assert!(!error.is_safe_to_repeat(), "{error}");
    assert_eq!((error.outcome(), lab.events.doubts()), (Outcome::Unknown, 1));
}

#[tokio::test(start_paused = true)]
async fn a_503_to_a_read_below_does_not_say_that_the_write_was_not_done() {
    let (lab, landed) = (Lab::new(), Landed::default());
    let service = ServiceBuilder::new()
        .layer(deadline(&lab))
        .layer(Layered::refuse())
        .service(with_receipt(&landed, unavailable));
    let error = service.oneshot(write()).await.unwrap_err();
    assert_eq!(landed.count(), 1);
    // By the table a 503 is ambiguous for a write.
    assert_eq!((error.outcome(), lab.events.doubts()), (Outcome::Unknown, 1), "{error}");
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_process_that_another_call_went_to_is_no_fence_for_this_write() {
    // The write goes to a server that lands it later; the receipt is made by a helper process, which dies. That
    // its effects end with it is true.
    let (lab, landed) = (Lab::new(), Landed::default());
    let helpers = Lab::new();
    for _ in 0..2 {
        helpers.read(fail(closed().with_exit(async { Exit::new(None, true) }).exit_ends_effects()));
    }
    let helper = RetryReadOnly.attempts(1).layer(helpers.connection());
    let server = landed.clone();
    let connection = service_fn(move |call: Req| -> Answer {
        let (server, helper) = (server.clone(), helper.clone());
        let receipt: Answer = Box::pin(helper.oneshot(read()));
        Box::pin(async move {
            if !call.effect().is_write() {
                return Ok(server.count()); // the probe
            }
            tokio::spawn(async move {
                sleep(5 * SECOND).await;
                server.one();
            });
            sleep(ms(10)).await;
            receipt.await
        })
    });
    let check = |doubt: InDoubt<Req, u32>| async move {
        Ok(match doubt.probe(read()).await? {
            0 => doubt.not_landed(),
            _ => doubt.landed_without_result(),
        })
    };
    let stack =
        Stack::builder(connector(connection)).check(check).on_event(lab.events.sink()).build().unwrap();
    let result = stack.send(write()).await;
    sleep(60 * SECOND).await;
    assert_eq!(landed.count(), 1, "landed twice: {result:?}; {:?}", lab.events.raw());
}

#[tokio::test(start_paused = true)]
async fn a_request_that_another_call_got_back_is_not_handed_over_in_place_of_the_write() {
    // Before it sends a write, the connection asks another service for a permit. That service cannot send its own
    // request, and says so; nothing of the write was sent either.
    let (lab, permits, landed) = (Lab::new(), Lab::new(), Landed::default());
    permits.readiness(Readiness::Dead).readiness(Readiness::Dead);
    let permit = ReconnectLayer::once().layer(permits.connector());
    let server = landed.clone();
    let connection = service_fn(move |call: Req| -> Answer {
        let (server, permit) = (server.clone(), permit.clone());
        let asked: Answer = Box::pin(permit.oneshot(read()));
        Box::pin(async move {
            if call.effect().is_write() {
                asked.await?;
                server.one();
            }
            Ok(99)
        })
    });
    let stack = Stack::builder(connector(connection)).on_event(lab.events.sink()).build().unwrap();
    let told = stack.send(write()).await;
    assert!(told.is_err() || landed.count() == 1, "{told:?}, and it landed {} times", landed.count());
}

#[tokio::test(start_paused = true)]
async fn a_write_that_another_call_got_back_is_not_sent_in_place_of_a_read() {
    // To answer a read, the connection makes a write of its own elsewhere, which is not done, and nobody but its own
    // maker may send it again.
    let (elsewhere, landed) = (Lab::new(), Landed::default());
    elsewhere.readiness(Readiness::Dead).readiness(Readiness::Dead);
    let nested = Layered::refuse().layer(ReconnectLayer::once().layer(elsewhere.connector()));
    let server = landed.clone();
    let connection = service_fn(move |call: Req| -> Answer {
        let (server, nested) = (server.clone(), nested.clone());
        let noted: Answer = Box::pin(nested.oneshot(write()));
        Box::pin(async move {
            if call.effect().is_write() {
                return Ok(server.one());
            }
            noted.await?;
            Ok(99)
        })
    });
    let stack = Stack::builder(connector(connection)).retry(RetryReadOnly.attempts(1)).build().unwrap();
    let told = stack.send(read()).await;
    assert_eq!(landed.count(), 0, "a read has sent a write: {told:?}");
}

#[tokio::test(start_paused = true)]
async fn that_another_write_is_done_does_not_say_that_this_one_is() {
    // Before it sends the write, the connection makes a reservation elsewhere, whose result is lost.
    let (lab, elsewhere, landed) = (Lab::new(), Lab::new(), Landed::default());
    elsewhere.write(fail(CallError::ambiguous("lost")));
    let found = |doubt: InDoubt<Req, u32>| async move { Ok(doubt.landed_without_result()) };
    let reserve = Layered::new(found).layer(elsewhere.connection());
    let server = landed.clone();
    let connection = service_fn(move |_: Req| -> Answer {
        let (server, reserve) = (server.clone(), reserve.clone());
        let reserved: Answer = Box::pin(reserve.oneshot(write()));
        Box::pin(async move {
            reserved.await?;
            Ok(server.one())
        })
    });
    let service = deadline(&lab).layer(Layered::refuse().layer(connection));
    let error = service.oneshot(write()).await.unwrap_err();
    assert_eq!(landed.count(), 0);
    assert_ne!(error.outcome(), Outcome::DoneResultLost, "{error}");
}

/// What a service makes of the request that it is given.
type Inner = fn(Req) -> Answer;

/// A call whose service passes on how another one ended, through each of the layers alone.
async fn each_layer_over(inner: Inner, call: fn() -> Req) -> Vec<(CallError, CallId)> {
    let connection = service_fn(inner);
    let layers = [
        BoxCloneService::new(DeadlineLayer::new(60 * SECOND).layer(connection)),
        BoxCloneService::new(Layered::refuse().layer(connection)),
        BoxCloneService::new(RetryReadOnly.attempts(1).layer(connection)),
        BoxCloneService::new(ReconnectLayer::once().layer(connector(connection))),
    ];
    let mut ended = Vec::new();
    for layer in layers {
        let mut call = call();
        let id = call.context_mut().assign_id();
        ended.push((layer.oneshot(call).await.unwrap_err(), id));
    }
    ended
}

/// Another call, which a layer has dealt with.
fn another(how: fn() -> CallError, call: Req) -> Answer {
    let failing = service_fn(move |_: Req| std::future::ready(Err::<u32, _>(how())));
    Box::pin(RetryReadOnly.attempts(1).layer(failing).oneshot(call))
}

#[tokio::test(start_paused = true)]
async fn no_layer_takes_what_is_said_of_another_call_for_its_own() {
    let others: [Inner; 7] = [
        |_| another(|| CallError::not_sent("x"), read()),
        |_| another(|| CallError::not_processed("x").after(SECOND), read()),
        |_| another(|| CallError::answered("x"), read()),
        |_| another(|| CallError::not_sent("x").connection_lost(), read()),
        |_| another(|| closed().with_exit(async { Exit::new(None, true) }), read()),
        |_| another(|| CallError::evidence(Evidence::TooManyRequests, "429"), write()),
        // Boxed, within a foreign error.
        |_| {
            #[derive(Debug, thiserror::Error)]
            #[error("wrapped")]
            struct Wrapped(#[source] CallError);
            let other = another(|| CallError::answered("x"), write());
            Box::pin(async { other.await.map_err(|error| CallError::from_boxed(Wrapped(error).into())) })
        },
    ];
    for other in others {
        for (error, id) in each_layer_over(other, write).await {
            assert_eq!((error.outcome(), error.scope()), (Outcome::Unknown, Scope::Call), "{error:?}");
            assert_eq!((error.call(), error.effect()), (Some(id), Effect::Write));
            assert!(error.closure().is_none() && error.retry_after().is_none());
            assert_eq!(error.attempts().len(), 1);
            // What happened is still there.
            let of_another = error.downcast::<CallError>().unwrap();
            assert!(of_another.call().is_some_and(|other| other != id));
        }
        for (error, id) in each_layer_over(other, read).await {
            assert_eq!((error.outcome(), error.call()), (Outcome::NoAnswer, Some(id)), "{error:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_on_whose_behalf_a_write_is_in_doubt_is_not_repeated() {
    let made = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&made);
    let connection = service_fn(move |_: Req| {
        count.fetch_add(1, Ordering::SeqCst);
        another(|| CallError::ambiguous("reset"), write())
    });
    let error = RetryReadOnly.layer(connection).oneshot(read()).await.unwrap_err();
    assert_eq!((error.outcome(), made.load(Ordering::SeqCst)), (Outcome::Unknown, 1), "{error}");
}

#[tokio::test(start_paused = true)]
async fn that_another_service_was_not_ready_or_is_shut_down_does_not_say_that_a_write_was_not_sent() {
    let dead: Inner = |_| {
        let lab = Lab::new();
        lab.readiness(Readiness::Dead);
        Box::pin(async move {
            let connection = lab.connector().oneshot(()).await.unwrap();
            let asked: Answer = Box::pin(RetryReadOnly.attempts(1).layer(connection).oneshot(read()));
            asked.await
        })
    };
    let shut_down: Inner = |_| {
        Box::pin(async {
            let stack = Stack::builder(Lab::new().connector()).build().unwrap();
            stack.shutdown(SECOND).await;
            let refused: Answer = Box::pin(stack.oneshot(read()));
            refused.await
        })
    };
    for other in [dead, shut_down] {
        for (error, _) in each_layer_over(other, write).await {
            assert_eq!(error.outcome(), Outcome::Unknown, "{error:?}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_nested_layers_and_stacks_say_of_the_same_call_is_kept() {
    // Not sent, by a stack within a service that passes the call on, or a copy that is the same call.
    let passes: Inner = |call| {
        Box::pin(async move {
            let lab = Lab::new();
            lab.readiness(Readiness::Dead).readiness(Readiness::Dead);
            let stack = Stack::builder(lab.connector()).build().unwrap();
            let passed: Answer = Box::pin(stack.oneshot(call.try_clone().unwrap()));
            passed.await
        })
    };
    // Made anew, with the context of the one that there was.
    let moves: Inner = |mut call| {
        let mut anew = Tagged::new("anew", Effect::Write);
        *anew.context_mut() = std::mem::take(call.context_mut());
        another(|| CallError::not_sent("x"), anew)
    };
    // Without a call, from a foreign service.
    let own: Inner = |_| Box::pin(std::future::ready(Err(CallError::not_sent("x"))));
    for inner in [passes, moves, own] {
        for (error, id) in each_layer_over(inner, write).await {
            assert_eq!((error.outcome(), error.call()), (Outcome::NotDone, Some(id)), "{error:?}");
        }
    }
    // As a new call, nobody can tell it from another one.
    let clones: Inner = |call| {
        let mut anew = Tagged::new("anew", Effect::Write);
        *anew.context_mut() = call.context().clone();
        another(|| CallError::not_sent("x"), anew)
    };
    for (error, _) in each_layer_over(clones, write).await {
        assert_eq!(error.outcome(), Outcome::Unknown);
    }
}

// ===== Whether the service's own error may stand in for it =====

/// What the caller gets who takes answers alone; and the box is whole where it is no answer.
fn taken(error: CallError) -> Result<Own, Outcome> {
    let (text, call) = (error.to_string(), error.call());
    error.into_answer().map_err(|error| {
        assert_eq!((error.to_string(), error.call()), (text, call));
        assert!(error.get_ref::<Own>().is_some(), "{error:?}");
        error.outcome()
    })
}

fn checked(
    verdict: fn(&Doubt) -> Verdict<u8>,
    server: impl Service<Req, Response = u8, Error = CallError, Future: Send> + Clone + Send + 'static,
) -> impl Service<Req, Response = u8, Error = CallError, Future: Send> {
    WriteSafetyLayer::new(move |doubt: Doubt| async move { Ok::<_, BoxError>(verdict(&doubt)) }).layer(server)
}

#[tokio::test(start_paused = true)]
async fn an_answer_is_taken_out_and_nothing_else_is() {
    let answered = WriteSafetyLayer::refuse().layer(server([Own::AlreadyExists])).oneshot(write()).await;
    assert_eq!(taken(answered.unwrap_err()), Ok(Own::AlreadyExists));
    let read_answered = RetryReadOnly.layer(server([Own::Reset, Own::AlreadyExists])).oneshot(read()).await;
    assert_eq!(taken(read_answered.unwrap_err()), Ok(Own::AlreadyExists));

    let unknown = WriteSafetyLayer::refuse().layer(server([Own::Reset])).oneshot(write()).await;
    assert_eq!(taken(unknown.unwrap_err()), Err(Outcome::Unknown));
    let done = checked(|doubt| doubt.landed_without_result(), server([Own::Reset])).oneshot(write()).await;
    assert_eq!(taken(done.unwrap_err()), Err(Outcome::DoneResultLost));
    let not_done = WriteSafetyLayer::refuse().layer(server([Own::Connect])).oneshot(write()).await;
    assert_eq!(taken(not_done.unwrap_err()), Err(Outcome::NotDone));
    let no_answer = RetryReadOnly.layer(server([Own::Reset])).oneshot(read()).await;
    assert_eq!(taken(no_answer.unwrap_err()), Err(Outcome::NoAnswer));
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_an_earlier_attempt_may_be_the_reason_of_is_not_taken_out() {
    let replayed = checked(
        |doubt| doubt.not_landed_because("declared, and perhaps not true"),
        server([Own::Reset, Own::AlreadyExists]),
    );
    let error = replayed.oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Answered, true));
    assert_eq!(taken(error), Err(Outcome::Answered));
}

#[test]
fn an_answer_of_another_type_stays_where_it_is() {
    let error = CallError::answered(Own::AlreadyExists).into_answer::<io::Error>().unwrap_err();
    assert_eq!(error.into_answer::<Own>().unwrap(), Own::AlreadyExists);
    assert_eq!(
        CallError::not_sent(Own::Connect).into_answer::<Own>().unwrap_err().outcome(),
        Outcome::NotDone
    );
}

#[tokio::test(start_paused = true)]
async fn only_of_a_write_that_nobody_has_judged_the_text_says_so() {
    async fn lost<R: Call + Send + 'static>(request: R) -> String {
        let lost = service_fn(|_: R| async { Err::<u8, _>(CallError::ambiguous("reset")) });
        WriteSafetyLayer::refuse().layer(lost).oneshot(request).await.unwrap_err().to_string()
    }
    let plain = || jsonrpc::Request::new("pay", ()).unwrap();
    let note = "; taken for a write, since nobody said what it does; ";
    assert!(lost(plain()).await.contains(note));
    assert!(!lost(plain().as_effect(Effect::Write)).await.contains(note));
    assert!(!lost(Tagged::new(1, Effect::Write)).await.contains(note));
    assert!(!lost(Tagged::by(1, |_| Effect::Write)).await.contains(note));
    assert!(!lost(Tagged::once(1, |_| Effect::Idempotent)).await.contains(note));
}
