//! `DeadlineLayer` over mocks, with tokio's clock paused.

use std::{
    future::{Future, pending, poll_fn},
    pin::{Pin, pin},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Cause, Deadline, DeadlineLayer, DeadlineService, Delivery, Effect, Event,
    InDoubt, Outcome, Pause, Progress, ReconnectLayer, Refusal, RetryReadOnly, Tagged, WriteSafetyLayer,
};
use tokio::time::{Instant, advance};
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::MapErr};
use tower_test::mock::{self, Handle, Mock, Spawn};

type Req = Tagged<&'static str>;
type Inner = MapErr<Mock<Req, u8>, fn(BoxError) -> CallError>;

type Seen = Arc<Mutex<Vec<(usize, Option<Outcome>)>>>;

const SECOND: Duration = Duration::from_secs(1);

fn new_service(layer: DeadlineLayer) -> (Spawn<DeadlineService<Inner>>, Handle<Req, u8>) {
    mock::spawn_with(move |mock| {
        let map: fn(BoxError) -> CallError = CallError::from_boxed;
        ServiceBuilder::new().layer(layer.clone()).map_err(map).service(mock)
    })
}

fn read() -> Req {
    Tagged::new("read", Effect::ReadOnly)
}

fn write() -> Req {
    Tagged::new("write", Effect::Write)
}

/// What deadline arrives below `layers`, in the order of their wrapping, for that call.
async fn resolved(outer: &DeadlineLayer, inner: Option<&DeadlineLayer>, call: Req) -> Deadline {
    let sees = service_fn(|call: Req| async move { Ok::<_, CallError>(call.context().deadline()) });
    match inner {
        Some(inner) => outer.layer(inner.layer(sees)).oneshot(call).await.unwrap(),
        None => outer.layer(sees).oneshot(call).await.unwrap(),
    }
}

#[tokio::test(start_paused = true)]
async fn a_per_call_value_wins_over_the_default() {
    let now = Instant::now();
    let at = |seconds| Deadline::At(now + Duration::from_secs(seconds));
    let layer = DeadlineLayer::new(10 * SECOND);
    assert_eq!(resolved(&layer, None, read()).await, at(10));
    assert_eq!(resolved(&layer, None, read().within(2 * SECOND)).await, at(2));
    assert_eq!(resolved(&layer, None, read().within(20 * SECOND)).await, at(20));
    assert_eq!(resolved(&layer, None, read().deadline(Deadline::Never)).await, Deadline::Never);
    assert_eq!(resolved(&DeadlineLayer::never(), None, read()).await, Deadline::Never);
    assert_eq!(resolved(&DeadlineLayer::never(), None, read().within(SECOND)).await, at(1));
}

#[tokio::test(start_paused = true)]
async fn of_nested_layers_the_earlier_instant_wins() {
    let now = Instant::now();
    let at = |seconds| Deadline::At(now + Duration::from_secs(seconds));
    let [short, long, never] =
        [DeadlineLayer::new(SECOND), DeadlineLayer::new(5 * SECOND), DeadlineLayer::never()];
    for (outer, inner, expected) in [
        (&short, &long, at(1)),
        (&long, &short, at(1)),
        (&never, &long, at(5)),
        (&long, &never, at(5)),
        (&never, &never, Deadline::Never),
    ] {
        assert_eq!(resolved(outer, Some(inner), read()).await, expected);
        // Even so the caller's own value wins over both.
        assert_eq!(resolved(outer, Some(inner), read().within(9 * SECOND)).await, at(9));
        assert_eq!(resolved(outer, Some(inner), read().deadline(Deadline::Never)).await, Deadline::Never);
    }
}

#[tokio::test(start_paused = true)]
async fn zero_and_past_deadlines_do_not_call_the_inner_service() {
    advance(SECOND).await;
    let past = Deadline::At(Instant::now() - SECOND / 2);
    let now = Deadline::At(Instant::now());
    for call in [write().within(Duration::ZERO), write().deadline(past), write().deadline(now)] {
        let (mut service, mut handle) = new_service(DeadlineLayer::new(SECOND));
        assert_ready_ok!(service.poll_ready::<Req>());
        let error = assert_ready_err!(task::spawn(service.call(call)).poll());
        assert!(matches!(error.cause(), Cause::Deadline));
        assert_eq!((error.delivery(), error.outcome()), (Delivery::NotSent, Outcome::NotDone));
        assert_eq!((error.method(), error.attempts().len()), ("call", 0));
        assert!(handle.poll_request().is_pending());
    }
}

#[tokio::test(start_paused = true)]
async fn a_default_of_zero_is_a_wrong_configuration_for_every_call_that_would_have_it() {
    for call in [write(), read(), read().idle(SECOND), write().pause_while_asking()] {
        let (mut service, mut handle) = new_service(DeadlineLayer::new(Duration::ZERO));
        assert_ready_ok!(service.poll_ready::<Req>());
        let error = assert_ready_err!(task::spawn(service.call(call)).poll());
        let text = "not done: call: wrong configuration: DeadlineLayer: the default must not be zero";
        assert_eq!(error.to_string(), text);
        assert!(matches!(error.cause(), Cause::Refused(Refusal::Config(_))));
        assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NotDone, 0));
        assert!(handle.poll_request().is_pending());
    }
    // It shortens the default of an outer layer, and no deadline of the call's own.
    let layers = |call| {
        let inner = DeadlineLayer::new(Duration::ZERO)
            .layer(service_fn(|_: Req| std::future::ready(Ok::<_, CallError>(1))));
        DeadlineLayer::new(SECOND).layer(inner).oneshot(call)
    };
    assert!(matches!(layers(read()).await.unwrap_err().cause(), Cause::Refused(Refusal::Config(_))));
    assert_eq!(layers(read().within(SECOND)).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn enormous_deadlines_neither_overflow_nor_end() {
    for (default, call) in [
        (Duration::MAX, read()),
        (SECOND, read().within(Duration::MAX)),
        (Duration::from_secs(u64::MAX / 4), read()),
        (SECOND, read().within(Duration::from_secs(1 << 40))),
    ] {
        let (mut service, mut handle) = new_service(DeadlineLayer::new(default));
        assert_ready_ok!(service.poll_ready::<Req>());
        let mut call = task::spawn(service.call(call));
        assert_pending!(call.poll());
        advance(Duration::from_secs(3600 * 24 * 365)).await;
        assert_pending!(call.poll());
        assert_ready!(handle.poll_request()).unwrap().1.send_response(1);
        assert_eq!(assert_ready_ok!(call.poll()), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn the_timer_wakes_the_call_and_what_is_still_pending_is_ambiguous() {
    for (call, outcome) in [(write(), Outcome::Unknown), (read(), Outcome::NoAnswer)] {
        let (mut service, mut handle) = new_service(DeadlineLayer::new(SECOND));
        assert_ready_ok!(service.poll_ready::<Req>());
        let mut call = task::spawn(service.call(call));
        assert_pending!(call.poll());
        let _kept = assert_ready!(handle.poll_request());
        advance(SECOND - Duration::from_millis(1)).await;
        assert!(!call.is_woken());
        advance(Duration::from_millis(1)).await;
        assert!(call.is_woken());
        let error = assert_ready_err!(call.poll());
        assert!(matches!(error.cause(), Cause::Deadline));
        assert_eq!((error.delivery(), error.outcome()), (Delivery::Ambiguous, outcome));
        assert_eq!(error.attempts().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_is_there_at_the_deadline_wins() {
    let (mut service, mut handle) = new_service(DeadlineLayer::new(SECOND));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(write()));
    assert_pending!(call.poll());
    advance(SECOND).await;
    assert!(call.is_woken());
    assert_ready!(handle.poll_request()).unwrap().1.send_response(7);
    assert_eq!(assert_ready_ok!(call.poll()), 7);

    // And so does an error of this crate, which knows more.
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(write()));
    assert_pending!(call.poll());
    advance(SECOND).await;
    assert_ready!(handle.poll_request()).unwrap().1.send_error(CallError::not_sent("still queued"));
    assert_eq!(assert_ready_err!(call.poll()).outcome(), Outcome::NotDone);
}

/// Sets its flag when it is dropped.
struct Flag(Arc<AtomicBool>);

impl Drop for Flag {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[tokio::test(start_paused = true)]
async fn the_inner_future_is_polled_once_more_and_then_dropped() {
    let (polls, dropped) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
    let counts = (polls.clone(), dropped.clone());
    let mut service = DeadlineLayer::new(SECOND).layer(service_fn(move |_: Req| {
        let (polls, flag) = (counts.0.clone(), Flag(counts.1.clone()));
        async move {
            let _flag = flag;
            poll_fn(|_| {
                polls.fetch_add(1, Ordering::Relaxed);
                Poll::<Result<u8, CallError>>::Pending
            })
            .await
        }
    }));
    let mut call = task::spawn(service.ready().await.unwrap().call(write()));
    assert_pending!(call.poll());
    assert_pending!(call.poll());
    assert_eq!(polls.load(Ordering::Relaxed), 2);
    advance(SECOND).await;
    assert!(!dropped.load(Ordering::Relaxed));
    assert_ready_err!(call.poll());
    assert_eq!(polls.load(Ordering::Relaxed), 3);
    assert!(dropped.load(Ordering::Relaxed), "dropped when the time is up, not with the future");
}

#[tokio::test(start_paused = true)]
async fn nested_layers_with_the_same_instant_poll_the_inner_future_once_more_together() {
    let polls = Arc::new(AtomicU32::new(0));
    let counts = polls.clone();
    let layer = DeadlineLayer::new(SECOND);
    let mut service = layer.layer(layer.layer(service_fn(move |_: Req| {
        let polls = counts.clone();
        poll_fn(move |_| {
            polls.fetch_add(1, Ordering::Relaxed);
            Poll::<Result<u8, CallError>>::Pending
        })
    })));
    let mut call = task::spawn(service.ready().await.unwrap().call(write()));
    assert_pending!(call.poll());
    advance(SECOND).await;
    let error = assert_ready_err!(call.poll());
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::Unknown, 1));
    assert_eq!(polls.load(Ordering::Relaxed), 2);
}

#[test]
fn a_call_that_is_ready_at_once_arms_no_timer() {
    // Without a runtime a timer cannot even be made.
    let mut service =
        DeadlineLayer::new(SECOND).layer(service_fn(|_: Req| std::future::ready(Ok::<_, CallError>(1))));
    assert_eq!(assert_ready_ok!(task::spawn(service.call(read())).poll()), 1);
}

#[tokio::test(start_paused = true)]
async fn never_arms_no_timer_and_waits() {
    let (mut service, mut handle) = new_service(DeadlineLayer::new(SECOND));
    assert_ready_ok!(service.poll_ready::<Req>());
    let mut call = task::spawn(service.call(read().deadline(Deadline::Never)));
    assert_pending!(call.poll());
    advance(1_000_000 * SECOND).await;
    assert!(!call.is_woken());
    assert_ready!(handle.poll_request()).unwrap().1.send_response(1);
    assert!(call.is_woken());
    assert_eq!(assert_ready_ok!(call.poll()), 1);
}

#[tokio::test(start_paused = true)]
async fn a_time_that_runs_out_while_the_inner_future_is_polled_counts() {
    // The inner future takes longer in its first poll than the call has.
    let mut service = DeadlineLayer::new(SECOND).layer(service_fn(|_: Req| async {
        advance(2 * SECOND).await;
        pending::<Result<u8, CallError>>().await
    }));
    let mut call = task::spawn(service.ready().await.unwrap().call(write()));
    let mut polls = 0;
    let error = loop {
        polls += 1;
        match call.poll() {
            Poll::Ready(result) => break result.unwrap_err(),
            Poll::Pending => tokio::task::yield_now().await,
        }
        assert!(polls < 10);
    };
    assert_eq!(error.outcome(), Outcome::Unknown);
}

#[tokio::test(start_paused = true)]
async fn a_timer_that_says_nothing_at_the_deadline_does_not_hide_it() {
    // A task that has used up its share gets no answer from a timer, as an inner layer may get none when an
    // outer one's timer of the same instant fires first.
    let mut service =
        DeadlineLayer::new(SECOND).layer(service_fn(|_: Req| pending::<Result<u8, CallError>>()));
    let mut call = Box::pin(service.call(write()));
    let polled = tokio::spawn(async move {
        assert!(poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await.is_pending());
        advance(SECOND).await;
        poll_fn(|cx| {
            while pin!(tokio::task::consume_budget()).poll(cx).is_ready() {}
            Poll::Ready(call.as_mut().poll(cx))
        })
        .await
    });
    assert_eq!(assert_ready_err!(polled.await.unwrap()).outcome(), Outcome::Unknown);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_readiness_is_passed_on_as_not_sent() {
    let (mut service, mut handle) = new_service(DeadlineLayer::new(SECOND));
    handle.allow(0);
    assert_pending!(service.poll_ready::<Req>());
    handle.send_error(CallError::ambiguous("gone"));
    assert!(service.is_woken());
    let error = assert_ready_err!(service.poll_ready::<Req>());
    assert!(matches!(error.cause(), Cause::NotReady));
    assert_eq!((error.delivery(), error.outcome()), (Delivery::NotSent, Outcome::NotDone));
}

#[tokio::test(start_paused = true)]
async fn the_outermost_layer_reports_and_only_once() {
    let [outer_seen, inner_seen] = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
    let sink = |seen: &Seen| {
        let seen = seen.clone();
        move |event: Event<'_>| {
            let Event::Call(report) = event else { return };
            assert!(report.call.is_some());
            seen.lock().unwrap().push((report.attempts.len(), report.outcome));
        }
    };
    let down = service_fn(|_: Req| async { Err::<u8, _>(CallError::not_processed("busy")) });
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(sink(&outer_seen)))
        .layer(DeadlineLayer::new(60 * SECOND).on_event(sink(&inner_seen)))
        .layer(RetryReadOnly.on_event(sink(&inner_seen)))
        .service(down);
    let error = service.clone().oneshot(read()).await.unwrap_err();
    assert_eq!(error.attempts().len(), 3);
    assert_eq!(*outer_seen.lock().unwrap(), [(3, Some(Outcome::NotDone))]);
    // One attempt is no event.
    service.oneshot(write()).await.unwrap_err();
    assert_eq!(outer_seen.lock().unwrap().len(), 1);
    assert!(inner_seen.lock().unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_call_has_one_id_and_every_call_another() {
    let ids = service_fn(|call: Req| async move { Ok::<_, CallError>(call.context().id().unwrap()) });
    let layer = DeadlineLayer::new(SECOND);
    let service = layer.layer(layer.layer(ids));
    let mut call = read();
    let id = call.context_mut().assign_id();
    assert_eq!(service.clone().oneshot(call).await.unwrap(), id);
    let first = service.clone().oneshot(read()).await.unwrap();
    assert_ne!(first, service.oneshot(read()).await.unwrap());
    assert_ne!(first, id);
}

#[test]
fn services_and_futures_are_what_their_inner_ones_are() {
    fn shared<T: Clone + Send + Sync + 'static>(_: &T) {}
    fn sent<T: Future + Send>(_: &T) {}
    let mut service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(SECOND))
        .layer(RetryReadOnly)
        .service(service_fn(|_: Req| std::future::ready(Ok::<_, CallError>(1))));
    shared(&service);
    sent(&service.call(read()));
    let _ = tower::util::BoxCloneSyncService::new(service);
}

// ----- idle limits and pauses

fn progress_of(call: &Req) -> Arc<Progress> {
    call.context().progress().unwrap().clone()
}

#[tokio::test(start_paused = true)]
async fn a_call_without_progress_ends_after_its_idle_limit() {
    for (call, outcome) in [(write(), Outcome::Unknown), (read(), Outcome::NoAnswer)] {
        let (mut service, mut handle) = new_service(DeadlineLayer::new(60 * SECOND));
        assert_ready_ok!(service.poll_ready::<Req>());
        let call = call.idle(2 * SECOND);
        // What passes before the call is no part of it.
        advance(5 * SECOND).await;
        let mut call = task::spawn(service.call(call));
        assert_pending!(call.poll());
        let _kept = assert_ready!(handle.poll_request());
        advance(2 * SECOND - Duration::from_millis(1)).await;
        assert!(!call.is_woken());
        advance(Duration::from_millis(1)).await;
        assert!(call.is_woken());
        let error = assert_ready_err!(call.poll());
        assert!(matches!(error.cause(), Cause::Deadline));
        assert_eq!(error.outcome(), outcome);
        assert_eq!(error.notes().collect::<Vec<_>>(), ["the server said nothing of it for 2s"]);
    }
}

#[tokio::test(start_paused = true)]
async fn progress_extends_the_idle_limit_again_and_again_up_to_the_deadline() {
    let (mut service, _handle) = new_service(DeadlineLayer::new(10 * SECOND));
    assert_ready_ok!(service.poll_ready::<Req>());
    let call = read().idle(2 * SECOND);
    let progress = progress_of(&call);
    let mut call = task::spawn(service.call(call));
    assert_pending!(call.poll());
    let mut woken = 0;
    for _ in 0..99 {
        advance(SECOND / 10).await;
        woken += usize::from(call.is_woken());
        progress.made();
        assert_pending!(call.poll());
    }
    // The timer alone, when it fires early: not each message.
    assert!(woken <= 7, "{woken}");
    advance(SECOND / 10).await;
    assert!(call.is_woken());
    let error = assert_ready_err!(call.poll());
    assert_eq!((error.outcome(), error.notes().count()), (Outcome::NoAnswer, 0));
}

#[tokio::test(start_paused = true)]
async fn an_idle_limit_without_a_maximum_is_refused_and_zero_is_past() {
    let idle = || write().idle(SECOND);
    for (layer, call) in [
        (DeadlineLayer::never(), idle()),
        (DeadlineLayer::new(SECOND), idle().deadline(Deadline::Never)),
        (DeadlineLayer::new(SECOND), idle().within(Duration::MAX)),
        (DeadlineLayer::new(Duration::MAX), idle()),
    ] {
        let (mut service, mut handle) = new_service(layer);
        assert_ready_ok!(service.poll_ready::<Req>());
        let error = assert_ready_err!(task::spawn(service.call(call)).poll());
        assert!(matches!(error.cause(), Cause::Refused(Refusal::Config(_))), "{error:?}");
        assert!(error.to_string().contains("an idle limit needs a maximum"), "{error}");
        assert!(handle.poll_request().is_pending());
    }
    let (mut service, _handle) = new_service(DeadlineLayer::new(SECOND));
    assert_ready_ok!(service.poll_ready::<Req>());
    let error = assert_ready_err!(task::spawn(service.call(write().idle(Duration::ZERO))).poll());
    assert_eq!(error.outcome(), Outcome::NotDone);
}

#[tokio::test(start_paused = true)]
async fn while_it_is_paused_a_call_stands_still() {
    for (idle, left) in [(None, 9), (Some(3 * SECOND), 2)] {
        let (mut service, _handle) = new_service(DeadlineLayer::new(10 * SECOND));
        assert_ready_ok!(service.poll_ready::<Req>());
        let mut call = write().pause_while_asking();
        if let Some(idle) = idle {
            call = call.idle(idle);
        }
        let progress = progress_of(&call);
        let mut call = task::spawn(service.call(call));
        assert_pending!(call.poll());
        advance(SECOND).await;
        let (first, second) = (progress.pause(), progress.pause());
        advance(100 * SECOND).await;
        assert_pending!(call.poll());
        assert!(!call.is_woken(), "not while it stands still");
        drop(first);
        advance(100 * SECOND).await;
        assert_pending!(call.poll());
        // A panic ends it too.
        let panics = std::panic::AssertUnwindSafe(move || {
            let _held = second;
            panic!("the handler");
        });
        std::panic::catch_unwind(panics).unwrap_err();
        assert!(call.is_woken());
        assert_pending!(call.poll());
        advance(left * SECOND - Duration::from_millis(1)).await;
        assert_pending!(call.poll());
        advance(Duration::from_millis(1)).await;
        assert!(call.is_woken());
        assert_eq!(assert_ready_err!(call.poll()).outcome(), Outcome::Unknown);
    }
}

#[tokio::test(start_paused = true)]
async fn progress_during_a_pause_gives_the_whole_limit_after_it() {
    let (mut service, _handle) = new_service(DeadlineLayer::new(60 * SECOND));
    assert_ready_ok!(service.poll_ready::<Req>());
    let call = read().idle(3 * SECOND).pause_while_asking();
    let progress = progress_of(&call);
    let mut call = task::spawn(service.call(call));
    assert_pending!(call.poll());
    advance(2 * SECOND).await;
    let pause = progress.pause();
    advance(7 * SECOND).await;
    progress.made();
    advance(7 * SECOND).await;
    drop(pause);
    advance(3 * SECOND - Duration::from_millis(1)).await;
    assert_pending!(call.poll());
    advance(Duration::from_millis(1)).await;
    assert_ready_err!(call.poll());
}

/// Counts how often it is woken.
#[derive(Default)]
struct Woken(AtomicU32);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// A call whose deadline and whose attempt's time stand still and are over but for that.
async fn standing_still() -> (Pin<Box<dyn Future<Output = Result<u8, CallError>>>>, Arc<Progress>, Pause) {
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(2 * SECOND))
        .layer(WriteSafetyLayer::refuse().attempt_timeout(SECOND))
        .service(service_fn(|_: Req| pending::<Result<u8, CallError>>()));
    let call = write().pause_while_asking();
    let progress = progress_of(&call);
    let mut call = Box::pin(service.oneshot(call));
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let pause = progress.pause();
    advance(5 * SECOND).await;
    (call, progress, pause)
}

#[test]
fn a_call_that_stands_still_does_not_keep_every_waker_that_it_was_ever_polled_with() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    runtime.block_on(async {
        let (mut call, _, _pause) = standing_still().await;
        let mut poll = || {
            let waker = Waker::from(Arc::<Woken>::default());
            assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        };
        (0..100).for_each(|_| poll());
        let kept = allocation_counter::measure(|| (0..10_000).for_each(|_| poll()));
        assert_eq!(kept.bytes_current, 0);
    });
}

#[tokio::test(start_paused = true)]
async fn of_a_call_that_stood_still_the_tasks_that_polled_it_last_are_woken() {
    let (mut call, progress, pause) = standing_still().await;
    let tasks: [Arc<Woken>; 3] = Default::default();
    let count = || tasks.each_ref().map(|task| task.0.load(Ordering::Relaxed));
    let mut poll = |task: usize| {
        let waker = Waker::from(tasks[task].clone());
        assert!(call.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
    };
    poll(0);
    poll(1);
    drop(pause);
    // The one that has it now, for both of its timers.
    assert_eq!(count(), [0, 2, 0]);
    // Another pause, before that has had its turn.
    let pause = progress.pause();
    poll(1);
    poll(2);
    drop(pause);
    assert_eq!(count(), [0, 2, 2]);
    // It runs on; another task has it when it stands still once more.
    poll(2);
    advance(SECOND).await;
    assert_eq!(count(), [0, 2, 3], "the attempt's time is over");
    poll(2);
    let pause = progress.pause();
    advance(5 * SECOND).await;
    poll(0);
    drop(pause);
    assert_eq!(count()[0], 1);
}

#[tokio::test(start_paused = true)]
async fn layers_that_are_polled_by_tasks_of_their_own_are_all_woken_when_a_call_goes_on() {
    let (within, without) = (Arc::<Woken>::default(), Arc::<Woken>::default());
    let layer = DeadlineLayer::new(SECOND);
    let inner = layer.layer(service_fn(|_: Req| pending::<Result<u8, CallError>>()));
    let own = Waker::from(within.clone());
    let mut service = layer.layer(service_fn(move |call: Req| {
        let (mut inner, own) = (Box::pin(inner.clone().call(call)), own.clone());
        poll_fn(move |_| inner.as_mut().poll(&mut Context::from_waker(&own)))
    }));
    let call = write().pause_while_asking();
    let progress = progress_of(&call);
    let mut call = Box::pin(service.call(call));
    let waker = Waker::from(without.clone());
    let mut poll = || call.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(poll().is_pending());
    let pause = progress.pause();
    advance(5 * SECOND).await;
    assert!(poll().is_pending());
    let before = [&within, &without].map(|task| task.0.load(Ordering::Relaxed));
    drop(pause);
    let woken = [&within, &without].map(|task| task.0.load(Ordering::Relaxed));
    assert_eq!(woken, before.map(|before| before + 1));
    assert!(poll().is_pending());
    advance(SECOND).await;
    assert!(without.0.load(Ordering::Relaxed) > woken[1]);
    assert!(matches!(poll(), Poll::Ready(Err(error)) if error.outcome() == Outcome::Unknown));
}

#[test]
fn a_pause_alone_needs_no_timer() {
    // Without a runtime a timer cannot even be made.
    let mut service = DeadlineLayer::never().layer(service_fn(|_: Req| pending::<Result<u8, CallError>>()));
    assert_pending!(task::spawn(service.call(read().pause_while_asking())).poll());
}

#[test]
fn where_idle_limits_and_pauses_are_off_a_call_allocates_nothing_for_them() {
    let measured = |call: Req| {
        let answers = service_fn(|_: Req| std::future::ready(Ok::<_, CallError>(1)));
        let mut service = DeadlineLayer::new(SECOND).layer(answers);
        allocation_counter::measure(move || {
            let mut ended = pin!(service.call(call));
            let mut cx = std::task::Context::from_waker(std::task::Waker::noop());
            assert!(matches!(ended.as_mut().poll(&mut cx), Poll::Ready(Ok(1))));
        })
        .count_total
    };
    assert_eq!((measured(read()), measured(write())), (0, 0));
    // What is measured is measured: a limit is kept on the heap.
    assert_ne!(allocation_counter::measure(|| drop(read().idle(SECOND))).count_total, 0);
}

#[tokio::test(start_paused = true)]
async fn an_attempts_time_stands_still_and_is_not_extended_by_progress() {
    for is_read in [true, false] {
        let (attempts, checks) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let (made, checked) = (attempts.clone(), checks.clone());
        let service = ServiceBuilder::new()
            .layer(DeadlineLayer::new(60 * SECOND))
            .layer(RetryReadOnly.attempt_timeout(4 * SECOND))
            .layer(
                WriteSafetyLayer::new(move |doubt: InDoubt<Req, u8>| {
                    checked.fetch_add(1, Ordering::Relaxed);
                    async move { Ok::<_, BoxError>(doubt.landed(7)) }
                })
                .attempt_timeout(4 * SECOND),
            )
            .service(service_fn(move |_: Req| {
                made.fetch_add(1, Ordering::Relaxed);
                pending::<Result<u8, CallError>>()
            }));
        let call = if is_read { read() } else { write() };
        let call = call.idle(3 * SECOND).pause_while_asking();
        let progress = progress_of(&call);
        let mut call = task::spawn(service.oneshot(call));
        assert_pending!(call.poll());
        advance(SECOND).await;
        let pause = progress.pause();
        advance(50 * SECOND).await;
        assert_pending!(call.poll());
        assert_eq!((attempts.load(Ordering::Relaxed), checks.load(Ordering::Relaxed)), (1, 0));
        drop(pause);
        progress.made();
        assert_pending!(call.poll());
        advance(2 * SECOND).await;
        progress.made();
        assert_pending!(call.poll());
        assert_eq!((attempts.load(Ordering::Relaxed), checks.load(Ordering::Relaxed)), (1, 0));
        advance(SECOND).await;
        assert!(call.is_woken());
        match is_read {
            true => {
                // Another attempt follows after the backoff.
                assert_pending!(call.poll());
                advance(SECOND).await;
                assert_pending!(call.poll());
                assert_eq!(attempts.load(Ordering::Relaxed), 2);
            }
            false => assert_eq!(assert_ready_ok!(call.poll()), 7),
        }
    }
}

/// The server asks the user for longer than the call has, and then gives it back.
async fn asks_and_gives_back(call: &Req) -> CallError {
    let pause = progress_of(call).pause();
    tokio::time::sleep(100 * SECOND).await;
    drop(pause);
    CallError::not_sent("given back")
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_begins_after_a_long_pause_has_its_share_of_what_is_left() {
    let found =
        || WriteSafetyLayer::new(|doubt: InDoubt<Req, u8>| async move { Ok::<_, BoxError>(doubt.landed(7)) });
    let silent = || service_fn(|_: Req| pending::<Result<u8, CallError>>());
    // By default half of what is left, or its own time; the check follows at once. Progress does not matter.
    for (layer, after) in [(found(), 5), (found().attempt_timeout(3 * SECOND), 3)] {
        for idle in [None, Some(9 * SECOND)] {
            let write = || {
                let call = write().pause_while_asking();
                match idle {
                    Some(idle) => call.idle(idle),
                    None => call,
                }
            };
            // It is held up on its way to the layer.
            let inner = layer.layer(silent());
            let held_up = service_fn(move |call: Req| {
                let mut inner = inner.clone();
                async move {
                    asks_and_gives_back(&call).await;
                    inner.call(call).await
                }
            });
            let began = Instant::now();
            let told = DeadlineLayer::new(10 * SECOND).layer(held_up).oneshot(write()).await;
            assert_eq!((told.unwrap(), began.elapsed()), (7, (100 + after) * SECOND));

            // It was not sent, and is handed over again.
            let first = Arc::new(AtomicBool::new(true));
            let gives_back = service_fn(move |call: Req| {
                let first = first.swap(false, Ordering::Relaxed);
                async move {
                    match first {
                        true => Err::<u8, _>(asks_and_gives_back(&call).await),
                        false => pending().await,
                    }
                }
            });
            let service = ServiceBuilder::new()
                .layer(DeadlineLayer::new(10 * SECOND))
                .layer(layer.clone())
                .service(gives_back);
            let began = Instant::now();
            let told = service.oneshot(write()).await;
            assert_eq!((told.unwrap(), began.elapsed()), (7, (100 + after) * SECOND));
        }
    }

    // A read's attempts: the one after the pause is given up in time for another one.
    let attempts = Arc::new(AtomicU32::new(0));
    let made = attempts.clone();
    let server = service_fn(move |call: Req| {
        let number = made.fetch_add(1, Ordering::Relaxed);
        async move {
            match number {
                0 => Err(asks_and_gives_back(&call).await),
                1 => pending().await,
                _ => Ok(7_u8),
            }
        }
    });
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(10 * SECOND))
        .layer(RetryReadOnly.attempt_timeout(3 * SECOND))
        .service(server);
    assert_eq!(service.oneshot(read().pause_while_asking()).await.unwrap(), 7);
    assert_eq!(attempts.load(Ordering::Relaxed), 3);
}

#[tokio::test(start_paused = true)]
async fn every_layer_goes_by_the_idle_limit() {
    // A connect that hangs: the reconnect layer knows that nothing was sent.
    let connector = service_fn(|()| pending::<Result<Inner, BoxError>>());
    let client = DeadlineLayer::new(60 * SECOND).layer(ReconnectLayer::once().layer(connector));
    let began = Instant::now();
    let error = client.oneshot(write().idle(2 * SECOND)).await.unwrap_err();
    assert_eq!((began.elapsed(), error.outcome()), (2 * SECOND, Outcome::NotDone));

    // A wait that does not fit is not begun.
    let busy =
        service_fn(|_: Req| async { Err::<u8, _>(CallError::not_processed("busy").after(5 * SECOND)) });
    let client =
        ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(RetryReadOnly).service(busy);
    let began = Instant::now();
    let error = client.clone().oneshot(read().idle(2 * SECOND)).await.unwrap_err();
    assert_eq!((began.elapsed(), error.attempts().len()), (Duration::ZERO, 1));
    let error = client.oneshot(read().idle(30 * SECOND)).await.unwrap_err();
    assert_eq!(error.attempts().len(), 3);

    // The write is with a server that says nothing: the layer that has it says what it knows.
    let layer =
        WriteSafetyLayer::new(|doubt: InDoubt<Req, u8>| async move { Ok::<_, BoxError>(doubt.landed(7)) });
    let silent = service_fn(|_: Req| pending::<Result<u8, CallError>>());
    let client = ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(silent);
    let began = Instant::now();
    let error = client.oneshot(write().idle(2 * SECOND)).await.unwrap_err();
    assert_eq!((began.elapsed(), error.outcome()), (2 * SECOND, Outcome::Unknown));
    assert_eq!(error.notes().collect::<Vec<_>>(), ["the server said nothing of it for 2s"]);
}
