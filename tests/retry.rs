//! `RetryReadOnly` over mocks, with tokio's clock paused.

use std::{
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use backon::ConstantBuilder;
use goaround::{
    BoxError, Call, CallError, Cause, Deadline, DeadlineLayer, Delivery, Effect, Event, Evidence, Outcome,
    Refusal, Retry, RetryReadOnly, RetryReadOnlyLayer, Tagged,
    retry::budget::{Budget, Throttle},
};
use tokio::time::{Instant, advance};
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::MapErr};
use tower_test::mock::{self, Handle, Mock, SendResponse, Spawn};

type Req = Tagged<&'static str>;
type Inner = MapErr<Mock<Req, u8>, fn(BoxError) -> CallError>;

const SECOND: Duration = Duration::from_secs(1);

fn new_service(layer: impl Into<RetryReadOnlyLayer>) -> (Spawn<Retry<Inner>>, Handle<Req, u8>) {
    let layer = layer.into();
    mock::spawn_with(move |mock| {
        let map: fn(BoxError) -> CallError = CallError::from_boxed;
        ServiceBuilder::new().layer(layer.clone()).map_err(map).service(mock)
    })
}

/// Waits of a second each, so that tests can tell when.
fn every_second() -> ConstantBuilder {
    ConstantBuilder::new().with_delay(SECOND).without_max_times()
}

fn read() -> Req {
    Tagged::new("read", Effect::ReadOnly).named("list")
}

fn write() -> Req {
    Tagged::new("write", Effect::Write)
}

fn ambiguous() -> CallError {
    CallError::ambiguous("reset")
}

fn request(handle: &mut Handle<Req, u8>) -> (Req, SendResponse<u8>) {
    assert_ready!(handle.poll_request()).unwrap()
}

fn notes(error: &CallError) -> Vec<String> {
    error.notes().map(str::to_owned).collect()
}

#[tokio::test(start_paused = true)]
async fn a_success_goes_through() {
    let (mut service, mut handle) = new_service(RetryReadOnly);
    for call in [read(), write()] {
        assert_ready_ok!(service.poll_ready::<Req>());
        let mut call = task::spawn(service.call(call));
        assert_pending!(call.poll());
        request(&mut handle).1.send_response(1);
        assert!(call.is_woken());
        assert_eq!(assert_ready_ok!(call.poll()), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_read_is_attempted_three_times_in_all_and_the_wait_wakes_it() {
    let (mut service, mut handle) = new_service(RetryReadOnly.backoff(every_second()));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read()));
    let mut ids = Vec::new();
    for attempt in 1..=3 {
        let polled = call.poll();
        assert_pending!(polled);
        let (request, respond) = request(&mut handle);
        ids.push(request.context().id().unwrap());
        respond.send_error(ambiguous());
        assert!(call.is_woken());
        if attempt < 3 {
            assert_pending!(call.poll());
            advance(SECOND - Duration::from_millis(1)).await;
            assert!(!call.is_woken());
            assert!(handle.poll_request().is_pending());
            advance(Duration::from_millis(1)).await;
            assert!(call.is_woken());
        }
    }
    let error = assert_ready_err!(call.poll());
    assert_eq!((error.outcome(), error.method()), (Outcome::NoAnswer, "list"));
    let waits: Vec<_> = error.attempts().iter().map(|attempt| attempt.waited).collect();
    assert_eq!(waits, [Duration::ZERO, SECOND, SECOND]);
    assert!(handle.poll_request().is_pending());
    assert_eq!((ids[0], ids[0]), (ids[1], ids[2]), "one call, one id");
    assert_eq!(
        error.to_string(),
        "no answer: list: the service failed, after 3 attempts (read-only, safe to repeat)"
    );
}

#[tokio::test(start_paused = true)]
async fn attempts_of_one_do_not_repeat() {
    let (mut service, mut handle) = new_service(RetryReadOnly.attempts(1));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read()));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(ambiguous());
    assert_eq!(assert_ready_err!(call.poll()).attempts().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_write_is_never_repeated_and_never_cloned() {
    #[derive(Debug)]
    struct Counted(Arc<AtomicU32>);
    impl Clone for Counted {
        fn clone(&self) -> Self {
            self.0.fetch_add(1, Ordering::Relaxed);
            Self(self.0.clone())
        }
    }
    for effect in [Effect::Write, Effect::Idempotent] {
        for (error, outcome) in [
            (ambiguous(), Outcome::Unknown),
            (CallError::not_sent("x"), Outcome::NotDone),
            (CallError::not_sent("x").connection_lost(), Outcome::NotDone),
            (CallError::not_processed("x"), Outcome::NotDone),
            (CallError::closed("x"), Outcome::Unknown),
            (CallError::answered("x"), Outcome::Answered),
            (CallError::evidence(Evidence::TooManyRequests, "x"), Outcome::NotDone),
            (CallError::evidence(Evidence::Unavailable, "x"), Outcome::Unknown),
        ] {
            let (clones, error) = (Arc::new(AtomicU32::new(0)), Arc::new(Mutex::new(Some(error))));
            let calls = Arc::new(AtomicU32::new(0));
            let counter = calls.clone();
            let service = RetryReadOnly.layer(service_fn(move |_: Tagged<Counted>| {
                counter.fetch_add(1, Ordering::Relaxed);
                std::future::ready(Err::<(), _>(error.lock().unwrap().take().unwrap()))
            }));
            let call = Tagged::new(Counted(clones.clone()), effect);
            let error = service.oneshot(call).await.unwrap_err();
            assert_eq!((error.outcome(), error.attempts().len()), (outcome, 1));
            assert_eq!((calls.load(Ordering::Relaxed), clones.load(Ordering::Relaxed)), (1, 0));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_cannot_be_cloned_is_sent_once() {
    let (mut service, mut handle) = new_service(RetryReadOnly);
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(Tagged::once("stream", |_| Effect::ReadOnly)));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(ambiguous());
    let error = assert_ready_err!(call.poll());
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NoAnswer, 1));
}

#[tokio::test(start_paused = true)]
async fn the_table_holds_for_reads() {
    for (error, calls) in [
        (ambiguous as fn() -> CallError, 3),
        (|| CallError::not_sent("x"), 3),
        (|| CallError::not_sent("x").connection_lost(), 3),
        (|| CallError::not_processed("x"), 3),
        (|| CallError::evidence(Evidence::Unavailable, "x"), 3),
        (|| CallError::evidence(Evidence::SessionUnknown, "x"), 3),
        (|| CallError::evidence(Evidence::TooManyRequests, "x"), 3),
        (|| CallError::evidence(Evidence::Unauthorized, "x"), 1),
        (|| CallError::evidence(Evidence::Forbidden, "x"), 1),
        (|| CallError::answered("x"), 1),
    ] {
        let count = Arc::new(AtomicU32::new(0));
        let counter = count.clone();
        let service = RetryReadOnly.layer(service_fn(move |_: Req| {
            counter.fetch_add(1, Ordering::Relaxed);
            std::future::ready(Err::<u8, _>(error()))
        }));
        let result = service.oneshot(read()).await.unwrap_err();
        assert_eq!(count.load(Ordering::Relaxed), calls, "{:?}", error());
        assert_eq!(result.attempts().len(), calls as usize);
    }
}

#[tokio::test(start_paused = true)]
async fn what_the_peer_asks_for_is_waited() {
    let (mut service, mut handle) = new_service(RetryReadOnly);
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read().within(10 * SECOND)));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(CallError::not_processed("busy").after(7 * SECOND));
    assert_pending!(call.poll());
    advance(7 * SECOND - Duration::from_millis(1)).await;
    assert!(!call.is_woken());
    advance(Duration::from_millis(1)).await;
    assert_pending!(call.poll());
    // The next one would end at the deadline: not started.
    request(&mut handle).1.send_error(CallError::not_processed("busy").after(3 * SECOND));
    let error = assert_ready_err!(call.poll());
    assert_eq!((error.outcome(), error.retry_after()), (Outcome::NotDone, Some(3 * SECOND)));
    assert_eq!(error.attempts()[1].waited, 7 * SECOND);
    assert_eq!(notes(&error), ["no time for another attempt before the deadline"]);
}

#[tokio::test(start_paused = true)]
async fn a_wait_that_never_ends_is_not_started() {
    let (mut service, mut handle) = new_service(RetryReadOnly);
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read().deadline(Deadline::Never)));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(CallError::not_processed("busy").after(Duration::MAX));
    assert_eq!(assert_ready_err!(call.poll()).attempts().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_backoff_that_would_outlast_the_deadline_is_not_started() {
    let start = Instant::now();
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(SECOND))
        .layer(RetryReadOnly.backoff(every_second()))
        .service(service_fn(|_: Req| std::future::ready(Err::<u8, _>(ambiguous()))));
    let error = service.oneshot(read()).await.unwrap_err();
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(error.outcome(), Outcome::NoAnswer);
    assert!(matches!(error.cause(), Cause::Other), "what is known, not that the time is up");
}

#[tokio::test(start_paused = true)]
async fn a_schedule_that_ends_ends_the_retries() {
    let schedule = ConstantBuilder::new().with_delay(SECOND).with_max_times(2);
    let service = RetryReadOnly
        .attempts(10)
        .backoff(schedule)
        .layer(service_fn(|_: Req| std::future::ready(Err::<u8, _>(ambiguous()))));
    let error = service.oneshot(read()).await.unwrap_err();
    assert_eq!(error.attempts().len(), 3);
    assert_eq!(notes(&error), ["no further attempt: the backoff schedule has ended"]);
}

#[tokio::test(start_paused = true)]
async fn the_budget_suppresses_retries_of_all_clones_and_says_so() {
    let count = Arc::new(AtomicU32::new(0));
    let counter = count.clone();
    let service = RetryReadOnly.layer(service_fn(move |_: Req| {
        counter.fetch_add(1, Ordering::Relaxed);
        std::future::ready(Err::<u8, _>(ambiguous()))
    }));
    let mut suppressed = 0;
    for _ in 0..100 {
        let error = service.clone().oneshot(read()).await.unwrap_err();
        suppressed += u32::from(notes(&error) == ["retry suppressed by the budget"]);
    }
    // Four retries in all: the load of an outage stays near the calls themselves.
    assert_eq!((count.load(Ordering::Relaxed), suppressed), (104, 98));
}

#[tokio::test(start_paused = true)]
async fn the_budget_is_paid_back_by_successes_and_can_be_left_out_or_shared() {
    let down = |_: Req| std::future::ready(Err::<u8, _>(ambiguous()));
    let budget = Arc::new(Throttle::default());
    let layer = RetryReadOnly.budget(budget.clone());
    let (one, other) = (layer.layer(service_fn(down)), layer.layer(service_fn(down)));
    assert_eq!(one.clone().oneshot(read()).await.unwrap_err().attempts().len(), 3);
    assert_eq!(other.clone().oneshot(read()).await.unwrap_err().attempts().len(), 3);
    assert_eq!(one.clone().oneshot(read()).await.unwrap_err().attempts().len(), 1);
    let up = layer.layer(service_fn(|_: Req| std::future::ready(Ok::<_, CallError>(1))));
    for _ in 0..21 {
        up.clone().oneshot(read()).await.unwrap();
    }
    assert_eq!(other.oneshot(read()).await.unwrap_err().attempts().len(), 3);

    let without = RetryReadOnly.without_budget().layer(service_fn(down));
    for _ in 0..20 {
        assert_eq!(without.clone().oneshot(read()).await.unwrap_err().attempts().len(), 3);
    }
}

#[derive(Default)]
struct Counting {
    withdrawn: AtomicU32,
    deposited: AtomicU32,
}

impl Budget for Counting {
    fn deposit(&self) {
        self.deposited.fetch_add(1, Ordering::Relaxed);
    }

    fn withdraw(&self) -> bool {
        self.withdrawn.fetch_add(1, Ordering::Relaxed);
        true
    }
}

#[tokio::test(start_paused = true)]
async fn the_budget_is_asked_at_the_decision_and_not_when_attempts_are_used_up() {
    let budget = Arc::new(Counting::default());
    let service = RetryReadOnly
        .budget(budget.clone())
        .layer(service_fn(|_: Req| std::future::ready(Err::<u8, _>(ambiguous()))));
    service.clone().oneshot(read()).await.unwrap_err();
    assert_eq!(budget.withdrawn.load(Ordering::Relaxed), 2);
    service.oneshot(write()).await.unwrap_err();
    assert_eq!(budget.withdrawn.load(Ordering::Relaxed), 2);
    assert_eq!(budget.deposited.load(Ordering::Relaxed), 0);
}

#[tokio::test(start_paused = true)]
async fn a_closure_gives_one_replay_at_once_whatever_attempts_says() {
    let (mut service, mut handle) = new_service(RetryReadOnly.attempts(1).backoff(every_second()));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read()));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(CallError::closed("gone"));
    assert_pending!(call.poll());
    request(&mut handle).1.send_response(9);
    assert_eq!(assert_ready_ok!(call.poll()), 9);
}

#[tokio::test(start_paused = true)]
async fn a_read_in_flight_at_two_closures_is_not_tried_a_third_time() {
    let (mut service, mut handle) = new_service(RetryReadOnly.attempts(9).backoff(every_second()));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read()));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(CallError::closed("gone"));
    assert_pending!(call.poll());
    // Another failure in between changes nothing.
    request(&mut handle).1.send_error(ambiguous());
    assert_pending!(call.poll());
    advance(SECOND).await;
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(CallError::closed("gone again"));
    let error = assert_ready_err!(call.poll());
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NoAnswer, 3));
    assert_eq!(notes(&error), ["given up after the second closure"]);
}

#[tokio::test(start_paused = true)]
async fn concurrent_calls_draw_their_own_jitter() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let service = RetryReadOnly
        .attempts(2)
        .without_budget()
        .on_event(move |event| {
            if let Event::Call(report) = event {
                sink.lock().unwrap().push(report.attempts[1].waited);
            }
        })
        .layer(service_fn(|_: Req| std::future::ready(Err::<u8, _>(ambiguous()))));
    let calls: Vec<_> = (0..32).map(|_| tokio::spawn(service.clone().oneshot(read()))).collect();
    for call in calls {
        call.await.unwrap().unwrap_err();
    }
    let mut waits = seen.lock().unwrap().clone();
    waits.sort_unstable();
    waits.dedup();
    assert!(waits.len() > 30, "{waits:?}");
    assert!(*waits.last().unwrap() <= Duration::from_millis(51));
}

#[tokio::test(start_paused = true)]
async fn readiness_is_polled_before_each_attempt_and_waited_for() {
    let (mut service, mut handle) = new_service(RetryReadOnly.backoff(every_second()));
    handle.allow(1);
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read()));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(ambiguous());
    assert_pending!(call.poll());
    advance(SECOND).await;
    assert_pending!(call.poll());
    assert!(handle.poll_request().is_pending(), "not before the service is ready");
    handle.allow(1);
    assert!(call.is_woken());
    assert_pending!(call.poll());
    request(&mut handle).1.send_response(3);
    assert_eq!(assert_ready_ok!(call.poll()), 3);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_readiness_before_a_replay_is_not_sent() {
    let (mut service, mut handle) = new_service(RetryReadOnly.backoff(every_second()));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read()));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(ambiguous());
    assert_pending!(call.poll());
    handle.send_error(ambiguous());
    advance(SECOND).await;
    // It counts as an attempt; the next one finds the service ready.
    assert_pending!(call.poll());
    advance(SECOND).await;
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(CallError::answered("no"));
    let error = assert_ready_err!(call.poll());
    let deliveries: Vec<_> = error.attempts().iter().map(|attempt| attempt.delivery).collect();
    assert_eq!(deliveries, [Delivery::Ambiguous, Delivery::NotSent, Delivery::Answered]);

    // Before the first attempt it is the caller's, as it polls.
    handle.send_error(ambiguous());
    assert_eq!(assert_ready_err!(service.poll_ready::<Req>()).outcome(), Outcome::NotDone);
}

#[tokio::test(start_paused = true)]
async fn at_the_deadline_each_part_resolves_with_what_is_known() {
    for (first, outcome) in
        [(ambiguous(), Outcome::NoAnswer), (CallError::not_processed("busy"), Outcome::NotDone)]
    {
        // Readiness hangs.
        let (mut service, mut handle) = new_service(RetryReadOnly.backoff(every_second()));
        handle.allow(1);
        assert_ready_ok!(service.poll_ready::<Req>());
        let mut call = task::spawn(service.call(read().within(5 * SECOND)));
        assert_pending!(call.poll());
        request(&mut handle).1.send_error(first);
        assert_pending!(call.poll());
        advance(SECOND).await;
        assert_pending!(call.poll());
        advance(4 * SECOND).await;
        let error = assert_ready_err!(call.poll());
        assert!(matches!(error.cause(), Cause::Deadline));
        assert_eq!((error.outcome(), error.delivery()), (outcome, Delivery::NotSent));
        assert_eq!(error.attempts().len(), 1, "what was not handed over is no attempt");
    }

    // The second attempt hangs.
    let (mut service, mut handle) = new_service(RetryReadOnly.backoff(every_second()));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read().within(5 * SECOND)));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(CallError::not_processed("busy"));
    assert_pending!(call.poll());
    advance(SECOND).await;
    assert_pending!(call.poll());
    let _kept = request(&mut handle);
    advance(4 * SECOND).await;
    let error = assert_ready_err!(call.poll());
    assert!(matches!(error.cause(), Cause::Deadline));
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NoAnswer, 2));
    assert_eq!(error.attempts()[1].waited, SECOND);

    // A wait that was to end before the deadline, polled too late: no attempt after the deadline.
    let (mut service, mut handle) = new_service(RetryReadOnly.backoff(every_second()));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read().within(5 * SECOND)));
    assert_pending!(call.poll());
    request(&mut handle).1.send_error(ambiguous());
    assert_pending!(call.poll());
    advance(6 * SECOND).await;
    assert_eq!(assert_ready_err!(call.poll()).attempts().len(), 1);
    assert!(handle.poll_request().is_pending());
}

#[tokio::test(start_paused = true)]
async fn a_deadline_layer_outside_gets_all_attempts() {
    let count = Arc::new(AtomicU32::new(0));
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(5 * SECOND))
        .layer(RetryReadOnly.backoff(every_second()))
        .service(service_fn(move |_: Req| {
            let nth = count.fetch_add(1, Ordering::Relaxed);
            async move { if nth == 0 { Err::<u8, _>(ambiguous()) } else { pending().await } }
        }));
    let start = Instant::now();
    let error = service.oneshot(read()).await.unwrap_err();
    assert_eq!(start.elapsed(), 5 * SECOND);
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NoAnswer, 2));
    assert_eq!(error.attempts()[1].cause, "deadline");
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_takes_too_long_is_given_up_and_repeated() {
    let layer = RetryReadOnly.attempt_timeout(2 * SECOND).backoff(every_second());
    let (mut service, mut handle) = new_service(layer);
    assert_ready_ok!(service.poll_ready::<Req>());
    let start = Instant::now();
    let mut call = task::spawn(service.call(read()));
    assert_pending!(call.poll());
    let (first, _first) = request(&mut handle);
    assert_eq!(first.context().attempt_until(), Some(start + 2 * SECOND));
    advance(2 * SECOND).await;
    assert!(call.is_woken());
    assert_pending!(call.poll());
    advance(SECOND).await;
    assert!(call.is_woken());
    assert_pending!(call.poll());
    let (second, respond) = request(&mut handle);
    assert_eq!(second.context().attempt_until(), Some(start + 5 * SECOND));
    // An answer at the very end of the attempt wins.
    advance(2 * SECOND).await;
    assert!(call.is_woken());
    respond.send_response(4);
    assert_eq!(assert_ready_ok!(call.poll()), 4);

    // Three that hang: the error says so.
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read()));
    let mut hanging = Vec::new();
    for attempt in 1..=3 {
        assert_pending!(call.poll());
        hanging.push(request(&mut handle));
        advance(2 * SECOND).await;
        if attempt < 3 {
            assert_pending!(call.poll());
            advance(SECOND).await;
        }
    }
    let error = assert_ready_err!(call.poll());
    assert!(matches!(error.cause(), Cause::AttemptTimeout));
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NoAnswer, 3));
}

#[tokio::test(start_paused = true)]
async fn an_attempt_timeout_behind_the_deadline_and_an_enormous_one_bound_nothing() {
    for (timeout, call) in [(2 * SECOND, read().within(SECOND)), (Duration::MAX, read())] {
        let (mut service, mut handle) = new_service(RetryReadOnly.attempt_timeout(timeout));
        assert_ready_ok!(service.poll_ready::<Req>());
        let mut call = task::spawn(service.call(call));
        assert_pending!(call.poll());
        assert_eq!(request(&mut handle).0.context().attempt_until(), None);
    }
}

#[tokio::test(start_paused = true)]
async fn a_dropped_call_leaves_nothing() {
    let token = Arc::new(());
    let held = token.clone();
    let service = RetryReadOnly.backoff(every_second()).layer(service_fn(move |_: Req| {
        let _held = &held;
        std::future::ready(Err::<u8, _>(ambiguous()))
    }));
    let mut call = task::spawn(service.oneshot(read()));
    assert_pending!(call.poll());
    assert!(Arc::strong_count(&token) > 1);
    drop(call);
    assert_eq!(Arc::strong_count(&token), 1);
}

#[tokio::test(start_paused = true)]
async fn a_success_that_took_more_than_one_attempt_is_reported_once() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = || {
        let seen = seen.clone();
        move |event: Event<'_>| {
            let Event::Call(report) = event else { return };
            let causes: Vec<_> = report.attempts.iter().map(|attempt| attempt.cause).collect();
            assert_eq!((report.method.as_str(), report.outcome), ("list", None));
            assert_eq!(report.attempts[1].waited, SECOND);
            assert!(report.call.is_some());
            seen.lock().unwrap().push(causes);
        }
    };
    let flaky = || {
        let count = Arc::new(AtomicU32::new(0));
        service_fn(move |_: Req| {
            let nth = count.fetch_add(1, Ordering::Relaxed);
            std::future::ready(if nth == 0 { Err(ambiguous()) } else { Ok(1_u8) })
        })
    };
    let retry = || RetryReadOnly.backoff(every_second());
    // Alone; below a deadline whose sink wins; below one without a sink; below another retry layer.
    let alone = retry().on_event(sink()).layer(flaky());
    alone.oneshot(read()).await.unwrap();
    let below =
        DeadlineLayer::new(9 * SECOND).on_event(sink()).layer(retry().on_event(sink()).layer(flaky()));
    below.oneshot(read()).await.unwrap();
    let silent = DeadlineLayer::new(9 * SECOND).layer(retry().on_event(sink()).layer(flaky()));
    silent.oneshot(read()).await.unwrap();
    let nested = retry().on_event(sink()).layer(retry().layer(flaky()));
    nested.oneshot(read()).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [["other", "answered"]; 4]);
}

#[tokio::test(start_paused = true)]
async fn nested_retries_report_all_attempts_in_their_order_once() {
    let seen = Arc::new(Mutex::new(Vec::new()));
    let sink = seen.clone();
    let count = Arc::new(AtomicU32::new(0));
    let service = RetryReadOnly
        .backoff(every_second())
        .on_event(move |event| {
            if let Event::Call(report) = event {
                sink.lock()
                    .unwrap()
                    .push(report.attempts.iter().map(|attempt| attempt.cause).collect::<Vec<_>>());
            }
        })
        .layer(RetryReadOnly.attempts(2).backoff(every_second()).layer(service_fn(move |_: Req| {
            std::future::ready(match count.fetch_add(1, Ordering::Relaxed) {
                0 | 1 => Err(ambiguous()),
                2 => Err(CallError::evidence(Evidence::TooEarly, "x")),
                _ => Ok(1_u8),
            })
        })));
    service.oneshot(read()).await.unwrap();
    assert_eq!(*seen.lock().unwrap(), [["other", "other", "evidence", "answered"]]);
}

#[tokio::test(start_paused = true)]
async fn wrong_options_refuse_each_call_and_name_themselves() {
    for (layer, named) in [
        (RetryReadOnly.attempts(0), "attempts must be at least 1"),
        (RetryReadOnly.attempt_timeout(Duration::ZERO), "attempt_timeout must not be zero"),
    ] {
        let (mut service, mut handle) = new_service(layer);
        for call in [read(), write()] {
            assert_ready_ok!(service.poll_ready::<Req>());
            let error = assert_ready_err!(task::spawn(service.call(call)).poll());
            assert!(matches!(error.cause(), Cause::Refused(Refusal::Config(what)) if what.contains(named)));
            assert_eq!(error.outcome(), Outcome::NotDone);
            assert!(handle.poll_request().is_pending());
        }
    }
}

#[test]
fn a_read_that_is_ready_at_once_needs_no_runtime() {
    let mut service = RetryReadOnly.layer(service_fn(|_: Req| std::future::ready(Ok::<_, CallError>(1))));
    assert_eq!(assert_ready_ok!(task::spawn(service.call(read())).poll()), 1);
}
