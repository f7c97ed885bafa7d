//! What an error tells its caller: which call it is the end of, and whether the service's own error may stand in for
//! it.

use std::{
    collections::VecDeque,
    io,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, CallId, Deadline, DeadlineLayer, Effect, Event, InDoubt, Outcome,
    ReconnectLayer, RetryReadOnly, Stack, Tagged, Verdict, WriteSafetyLayer, write_safety::ledger::Ledger,
};
use tokio::time::Instant;
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
