//! `ReconnectLayer` over a connector and connections that are controlled by hand, with tokio's clock paused.

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Wake, Waker},
    time::Duration,
};

use backon::ConstantBuilder;
use goaround::{
    BoxError, Call, CallError, Cause, ConnectError, Deadline, DeadlineLayer, Delivery, Effect, Event, Exit,
    Outcome, Reconnect, ReconnectLayer, Refusal, RetryReadOnly, Scope, Tagged, jsonrpc,
    retry::budget::Budget,
};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream},
    runtime::{Builder, Runtime},
    time::{Instant, advance},
};
use tokio_test::{assert_pending, assert_ready, assert_ready_err, assert_ready_ok, task};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::MapErr};
use tower_test::mock::{self, Handle, Mock, SendResponse};

type Req = Tagged<&'static str>;
type Connection = MapErr<Mock<Req, u8>, fn(BoxError) -> CallError>;
type Connector = Mock<(), Connection>;
type Client = Reconnect<Connector>;
type Calling = task::Spawn<<Client as Service<Req>>::Future>;

const SECOND: Duration = Duration::from_secs(1);
const MS: Duration = Duration::from_millis(1);

// ----- a connector and connections, by hand

fn client(layer: ReconnectLayer) -> (Client, Connects) {
    let (connector, handle) = mock::pair();
    (layer.layer(connector), Connects(handle))
}

/// The connector's side: each connect is answered by hand.
struct Connects(Handle<(), Connection>);

impl Connects {
    /// Whether a connect is waiting for its answer that was not looked at yet.
    fn has_next(&mut self) -> Option<SendResponse<Connection>> {
        match self.0.poll_request() {
            std::task::Poll::Ready(Some(((), respond))) => Some(respond),
            _ => None,
        }
    }

    #[track_caller]
    fn next(&mut self) -> SendResponse<Connection> {
        self.has_next().expect("a connect was begun")
    }

    #[track_caller]
    fn accept(&mut self) -> Server {
        accept(self.next())
    }

    #[track_caller]
    fn refuse(&mut self) {
        self.next().send_error(std::io::Error::from(std::io::ErrorKind::ConnectionRefused));
    }
}

fn accept(respond: SendResponse<Connection>) -> Server {
    let (mock, handle) = mock::pair();
    let map: fn(BoxError) -> CallError = CallError::from_boxed;
    respond.send_response(MapErr::new(mock, map));
    Server(handle)
}

/// The server's side of one connection. Dropped, it makes the connection's `poll_ready` fail.
struct Server(Handle<Req, u8>);

impl Server {
    #[track_caller]
    fn next(&mut self) -> (Req, SendResponse<u8>) {
        assert_ready!(self.0.poll_request()).expect("the connection is open")
    }

    #[track_caller]
    fn answer(&mut self) {
        self.next().1.send_response(1);
    }

    #[track_caller]
    fn close(&mut self) {
        self.next().1.send_error(CallError::closed("reset"));
    }

    fn is_idle(&mut self) -> bool {
        self.0.poll_request().is_pending()
    }
}

fn read() -> Req {
    Tagged::new("read", Effect::ReadOnly).named("list")
}

fn write() -> Req {
    Tagged::new("write", Effect::Write).named("pay")
}

#[track_caller]
fn call(client: &mut Client, request: Req) -> Calling {
    assert_ready_ok!(task::spawn(poll_fn(|cx| client.poll_ready(cx))).poll());
    task::spawn(client.call(request))
}

/// A call, polled once.
#[track_caller]
fn start(client: &mut Client, request: Req) -> Calling {
    let mut calling = call(client, request);
    assert_pending!(calling.poll());
    calling
}

/// The first connection, on which one read was answered.
#[track_caller]
fn connected(client: &mut Client, connects: &mut Connects) -> Server {
    let mut first = start(client, read());
    let mut server = connects.accept();
    assert!(first.is_woken());
    assert_pending!(first.poll());
    server.answer();
    assert_eq!(assert_ready_ok!(first.poll()), 1);
    server
}

fn connect_error(error: &CallError) -> Arc<ConnectError> {
    match error.cause() {
        Cause::ConnectFailed(error) => error.clone(),
        other => panic!("not a failed connect: {other:?}"),
    }
}

/// What was reported, in a line each.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    fn sink(&self) -> impl Fn(Event<'_>) + Send + Sync + 'static {
        let log = self.0.clone();
        move |event| {
            log.lock().unwrap().push(match event {
                Event::Incident(i) => format!(
                    "incident of {}: {:?} {:?}, {}, overlap {}",
                    i.generation, i.method, i.effect, i.error, i.overlap
                ),
                Event::Recovery(r) => {
                    format!("recovery on {} by {:?} after {:?}", r.generation, r.proved_by, r.took)
                }
                Event::Call(r) => {
                    let attempts: Vec<_> = r.attempts.iter().map(|at| (at.generation, at.cause)).collect();
                    format!("call {:?}: {attempts:?} {:?}", r.method, r.outcome)
                }
                other => format!("{other:?}"),
            })
        }
    }

    fn take(&self) -> Vec<String> {
        std::mem::take(&mut self.0.lock().unwrap())
    }
}

fn logged() -> (ReconnectLayer, Log) {
    let log = Log::default();
    (ReconnectLayer::once().on_event(log.sink()), log)
}

fn every_second() -> ConstantBuilder {
    ConstantBuilder::new().with_delay(SECOND).without_max_times()
}

// ----- single flight

#[tokio::test(start_paused = true)]
async fn the_first_connect_is_lazy_and_its_connection_is_used_again() {
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    assert_ready_ok!(task::spawn(poll_fn(|cx| client.poll_ready(cx))).poll());
    assert!(connects.has_next().is_none());
    assert_eq!(handle.generation(), None);
    let mut server = connected(&mut client, &mut connects);
    assert_eq!(handle.generation(), Some(1));
    for mut client in [client.clone(), client] {
        let mut calling = start(&mut client, write());
        server.answer();
        assert_ready_ok!(calling.poll());
    }
    assert!(connects.has_next().is_none());
}

#[tokio::test(start_paused = true)]
async fn eight_calls_on_a_closed_connection_share_one_connect() {
    let (mut client, mut connects) = client(ReconnectLayer::once());
    drop(connected(&mut client, &mut connects));
    let mut clients: Vec<_> = (0..8).map(|_| client.clone()).collect();
    let mut calls: Vec<_> = clients.iter_mut().map(|client| start(client, read())).collect();
    let mut server = connects.accept();
    assert!(connects.has_next().is_none());
    for calling in &mut calls {
        assert!(calling.is_woken());
        assert_pending!(calling.poll());
        server.answer();
        assert_ready_ok!(calling.poll());
    }
    assert!(connects.has_next().is_none());
}

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
async fn a_thousand_reads_at_a_closure_are_all_answered_by_one_connect_and_cost_the_budget_once() {
    // A foreign connection makes an error, and a closure, of its own for each call.
    for lost in [|| CallError::closed("reset"), || CallError::ambiguous("reset").connection_lost()] {
        // One poll of this test is many of the calls, more than tokio lets one task do at a time.
        tokio::task::unconstrained(a_thousand_reads(lost)).await;
    }
}

async fn a_thousand_reads(lost: fn() -> CallError) {
    let budget = Arc::new(Charges::default());
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (connector, connects) = mock::pair::<(), Connection>();
    let mut connects = Connects(connects);
    let service =
        ServiceBuilder::new().layer(RetryReadOnly.budget(budget.clone())).layer(layer).service(connector);
    let mut calls: Vec<_> = (0..1_000).map(|_| task::spawn(service.clone().oneshot(read()))).collect();
    for calling in &mut calls {
        assert_pending!(calling.poll());
    }
    let mut server = connects.accept();
    for calling in &mut calls {
        assert!(calling.is_woken());
        assert_pending!(calling.poll());
    }
    assert_eq!(handle.in_flight(), 1_000);
    (0..1_000).for_each(|_| server.next().1.send_error(lost()));
    for calling in &mut calls {
        assert_pending!(calling.poll());
    }
    let mut server = connects.accept();
    for calling in &mut calls {
        assert!(calling.is_woken());
        assert_pending!(calling.poll());
        server.answer();
        assert_ready_ok!(calling.poll());
    }
    assert!(connects.has_next().is_none());
    assert_eq!((budget.0.load(Ordering::Relaxed), handle.generation()), (1, Some(2)));
    assert_eq!(handle.in_flight(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_is_dropped_hands_the_connect_on() {
    let (client, mut connects) = client(ReconnectLayer::once());
    let mut calls: Vec<_> = (0..4).map(|_| start(&mut client.clone(), read())).collect();
    let respond = connects.next();
    // One that only waits leaves without a sound.
    drop(calls.pop());
    assert!(calls.iter().all(|calling| !calling.is_woken()));
    let [first, second, mut third] = <[_; 3]>::try_from(calls).ok().unwrap();
    drop(first);
    assert!(second.is_woken() && !third.is_woken());
    // Promoted, and dropped before it was polled.
    drop(second);
    assert!(third.is_woken());
    assert_pending!(third.poll());
    let mut server = accept(respond);
    assert!(third.is_woken());
    assert_pending!(third.poll());
    server.answer();
    assert_ready_ok!(third.poll());
    assert!(connects.has_next().is_none());
}

#[tokio::test(start_paused = true)]
async fn a_driver_that_is_woken_and_not_polled_holds_up_nobody() {
    // Its task awaits something else, such as another call that waits for the same connect. Before the
    // connect made progress or after, and however many others are not polled either.
    for late in [false, true] {
        for handed_on in [false, true] {
            let (client, mut connects) = client(ReconnectLayer::once());
            let mut idle: Vec<_> = (0..4).map(|_| start(&mut client.clone(), read())).collect();
            if handed_on {
                drop(idle.remove(0));
            }
            let mut polled = (!late).then(|| start(&mut client.clone(), read()));
            let mut server = accept(connects.next());
            tokio::time::sleep(MS).await;
            assert!(idle[0].is_woken() && !idle[1].is_woken());
            let mut polled = polled.take().unwrap_or_else(|| start(&mut client.clone(), read()));
            tokio::time::sleep(100 * MS).await;
            assert!(polled.is_woken());
            assert_pending!(polled.poll());
            server.answer();
            assert_ready_ok!(polled.poll());
            // The others find the connection whenever they are polled.
            for calling in &mut idle {
                assert_pending!(calling.poll());
                server.answer();
                assert_ready_ok!(calling.poll());
            }
            assert!(connects.has_next().is_none());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_awaits_another_one_of_its_own_task_is_answered() {
    let connector = service_fn(|()| async {
        tokio::time::sleep(SECOND).await;
        Ok::<_, BoxError>(service_fn(|_: Req| async { Ok::<_, CallError>(1) }))
    });
    let client = ReconnectLayer::once().layer(connector);
    let first = client.clone().oneshot(read());
    tokio::pin!(first);
    tokio::select! {
        biased;
        _ = &mut first => unreachable!("it connects"),
        () = std::future::ready(()) => {}
    }
    let second = tokio::time::timeout(10 * SECOND, client.oneshot(read())).await;
    assert_eq!(second.unwrap().unwrap(), 1);
    assert_eq!(first.await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_connect_that_ended_while_the_baton_was_handed_on_is_found() {
    let (client, mut connects) = client(ReconnectLayer::once());
    let first = start(&mut client.clone(), read());
    let mut second = start(&mut client.clone(), read());
    let mut server = accept(connects.next());
    assert!(first.is_woken() && !second.is_woken());
    drop(first);
    assert!(second.is_woken());
    assert_pending!(second.poll());
    server.answer();
    assert_ready_ok!(second.poll());
}

#[tokio::test(start_paused = true)]
async fn a_connect_that_all_have_left_is_picked_up_by_the_next_call() {
    let (client, mut connects) = client(ReconnectLayer::once());
    drop((start(&mut client.clone(), read()), start(&mut client.clone(), read())));
    let respond = connects.next();
    advance(SECOND).await;
    let mut calling = start(&mut client.clone(), read());
    assert!(connects.has_next().is_none());
    let mut server = accept(respond);
    assert!(calling.is_woken());
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
}

#[tokio::test(start_paused = true)]
async fn a_connect_that_all_have_left_is_replaced_when_its_time_is_up() {
    let (client, mut connects) = client(ReconnectLayer::once().connect_timeout(SECOND));
    drop(start(&mut client.clone(), read()));
    let _hangs = connects.next();
    advance(SECOND).await;
    let mut calling = start(&mut client.clone(), read());
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
}

#[tokio::test(start_paused = true)]
async fn a_stale_failure_changes_nothing() {
    let (layer, log) = logged();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    let mut old = connected(&mut client, &mut connects);
    let mut late: Vec<_> = (0..3).map(|_| start(&mut client.clone(), write())).collect();
    let mut responses: Vec<_> = late
        .iter_mut()
        .map(|calling| {
            assert_pending!(calling.poll());
            old.next().1
        })
        .collect();
    // The first to fail makes the reconnect due.
    responses.pop().unwrap().send_error(CallError::closed("reset"));
    assert_ready_err!(late.pop().unwrap().poll());
    assert_eq!(handle.generation(), None);
    let mut waits = start(&mut client.clone(), read());
    let respond = connects.next();

    // While the new connection is being made.
    responses.pop().unwrap().send_error(CallError::closed("reset"));
    let error = assert_ready_err!(late.pop().unwrap().poll());
    assert_eq!((error.outcome(), error.closure().unwrap().generation()), (Outcome::Unknown, Some(1)));
    assert!(!waits.is_woken());
    let mut server = accept(respond);
    assert_pending!(waits.poll());

    // When it has been made.
    responses.pop().unwrap().send_error(CallError::closed("reset"));
    assert_ready_err!(late.pop().unwrap().poll());
    assert_eq!(handle.generation(), Some(2));
    server.answer();
    assert_ready_ok!(waits.poll());
    let mut calling = start(&mut client, read());
    server.answer();
    assert_ready_ok!(calling.poll());
    assert!(connects.has_next().is_none());
    assert_eq!(log.take().iter().filter(|line| line.starts_with("incident")).count(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stale_clone_whose_readiness_fails_joins_the_connect_under_way() {
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    let mut old = connected(&mut client, &mut connects);
    let mut in_flight = start(&mut client.clone(), read());
    assert_pending!(in_flight.poll());
    let lost = old.next().1;
    old.0.allow(0);
    let mut unready: Vec<_> = (0..2).map(|_| start(&mut client.clone(), read())).collect();
    lost.send_error(CallError::closed("reset"));
    assert_ready_err!(in_flight.poll());

    let mut waits = start(&mut client.clone(), read());
    let respond = connects.next();
    drop(old);
    // One while the new connection is being made, one when it has been made.
    assert!(unready[0].is_woken());
    assert_pending!(unready[0].poll());
    assert!(connects.has_next().is_none() && handle.generation().is_none());
    let mut server = accept(respond);
    assert_pending!(waits.poll());
    for calling in &mut unready {
        assert!(calling.is_woken());
        assert_pending!(calling.poll());
    }
    assert_eq!(handle.generation(), Some(2));
    for mut calling in unready.into_iter().chain([waits]) {
        server.answer();
        assert_pending_or_ok(&mut calling);
    }
    assert!(connects.has_next().is_none());
}

/// Requests reach a mock in the order in which their calls were polled, which is not that of the answers here.
fn assert_pending_or_ok(calling: &mut Calling) {
    if let std::task::Poll::Ready(result) = calling.poll() {
        result.unwrap();
    }
}

// ----- failed connects

#[tokio::test(start_paused = true)]
async fn a_connect_that_fails_fails_those_who_wait_and_the_third_call_is_served() {
    let (client, mut connects) = client(ReconnectLayer::once());
    for _ in 0..2 {
        let mut calls: Vec<_> = [read(), write()].map(|request| start(&mut client.clone(), request)).into();
        advance(10 * SECOND).await; // the backoff
        calls
            .iter_mut()
            .filter(|calling| calling.is_woken())
            .for_each(|calling| assert_pending!(calling.poll()));
        connects.refuse();
        let errors: Vec<_> = calls
            .iter_mut()
            .map(|calling| {
                assert!(calling.is_woken());
                assert_ready_err!(calling.poll())
            })
            .collect();
        assert!(Arc::ptr_eq(&connect_error(&errors[0]), &connect_error(&errors[1])), "one error for all");
        for error in errors {
            assert_eq!((error.outcome(), error.delivery()), (Outcome::NotDone, Delivery::NotSent));
            assert_eq!(error.scope(), Scope::Connection);
            assert!(error.to_string().contains("cannot connect: connection refused"), "{error}");
        }
    }
    let mut calling = start(&mut client.clone(), read());
    advance(10 * SECOND).await;
    assert_pending!(calling.poll());
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
}

#[tokio::test(start_paused = true)]
async fn a_backoff_between_connects_is_waited_for_if_it_fits_the_deadline() {
    let (client, mut connects) = client(ReconnectLayer::once().backoff(every_second()));
    let mut first = start(&mut client.clone(), read());
    connects.refuse();
    let failed = connect_error(&assert_ready_err!(first.poll()));

    // It does not fit, neither for the first that comes nor for one that comes while another waits.
    let mut hasty = call(&mut client.clone(), read().within(SECOND));
    let error = assert_ready_err!(hasty.poll());
    assert_eq!(error.retry_after(), Some(SECOND));
    assert!(Arc::ptr_eq(&connect_error(&error), &failed));
    let mut patient = start(&mut client.clone(), read().within(SECOND + MS));
    advance(500 * MS).await;
    let mut hasty = call(&mut client.clone(), read().within(500 * MS));
    assert_eq!(assert_ready_err!(hasty.poll()).retry_after(), Some(500 * MS));

    advance(499 * MS).await;
    assert!(!patient.is_woken() && connects.has_next().is_none());
    advance(MS).await;
    assert!(patient.is_woken());
    assert_pending!(patient.poll());
    let mut server = connects.accept();
    assert_pending!(patient.poll());
    server.answer();
    assert_ready_ok!(patient.poll());
}

#[tokio::test(start_paused = true)]
async fn a_backoff_schedule_that_ends_goes_on_with_its_last_delay_and_a_success_starts_it_anew() {
    let schedule = backon::ExponentialBuilder::new()
        .with_factor(2.0)
        .with_min_delay(SECOND)
        .with_max_delay(10 * SECOND)
        .with_max_times(2);
    let (client, mut connects) = client(ReconnectLayer::once().backoff(schedule));
    let hasty = || read().within(MS);
    let refused_and_then_after = |connects: &mut Connects| {
        let mut calling = call(&mut client.clone(), read());
        let _ = calling.poll();
        connects.refuse();
        assert_ready_err!(calling.poll());
        assert_ready_err!(call(&mut client.clone(), hasty()).poll()).retry_after().unwrap()
    };
    for delay in [1, 2, 2, 2] {
        let wait = refused_and_then_after(&mut connects);
        assert_eq!(wait.as_millis(), delay * 1_000);
        advance(wait).await;
    }
    let mut calling = call(&mut client.clone(), read());
    assert_pending!(calling.poll());
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    server.close();
    assert_ready_err!(calling.poll());
    assert_eq!(refused_and_then_after(&mut connects).as_millis(), 1_000);
}

#[tokio::test(start_paused = true)]
async fn a_handshake_that_never_answers_ends_at_the_connect_timeout_and_each_caller_at_its_own_deadline() {
    let (connector, connects) = mock::pair::<(), Connection>();
    let mut connects = Connects(connects);
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(ReconnectLayer::once().connect_timeout(10 * SECOND))
        .service(connector);
    let mut hasty = task::spawn(service.clone().oneshot(write().within(3 * SECOND)));
    let mut patient = task::spawn(service.clone().oneshot(read()));
    assert_pending!(hasty.poll());
    assert_pending!(patient.poll());
    let _hangs = connects.next();

    advance(3 * SECOND).await;
    assert!(hasty.is_woken());
    let error = assert_ready_err!(hasty.poll());
    assert!(matches!(error.cause(), Cause::Deadline));
    assert_eq!((error.outcome(), error.method()), (Outcome::NotDone, "pay"));
    drop(hasty);

    assert!(patient.is_woken(), "it drives the connect now");
    assert_pending!(patient.poll());
    advance(7 * SECOND).await;
    assert!(patient.is_woken());
    let error = assert_ready_err!(patient.poll());
    assert!(matches!(*connect_error(&error), ConnectError::TimedOut(limit) if limit == 10 * SECOND));
    assert_eq!(error.outcome(), Outcome::NotDone);

    // And the next call connects again.
    let mut next = task::spawn(service.oneshot(read()));
    assert_pending!(next.poll());
    advance(SECOND).await;
    assert_pending!(next.poll());
    let mut server = connects.accept();
    assert_pending!(next.poll());
    server.answer();
    assert_ready_ok!(next.poll());
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_passes_while_connecting_leaves_the_connect_to_the_others() {
    let (client, mut connects) = client(ReconnectLayer::once());
    let mut hasty = start(&mut client.clone(), read().within(SECOND));
    let mut patient = start(&mut client.clone(), read());
    let respond = connects.next();
    advance(SECOND).await;
    // Polled at its deadline, by the layer that owns it, it resolves with what it knows.
    let error = assert_ready_err!(hasty.poll());
    assert!(matches!(error.cause(), Cause::Deadline));
    assert_eq!(error.delivery(), Delivery::NotSent);
    assert!(patient.is_woken());
    assert_pending!(patient.poll());
    accept(respond).0.allow(1);
    assert!(patient.is_woken());
}

#[tokio::test(start_paused = true)]
async fn the_connectors_readiness_is_waited_for_within_the_connect_timeout() {
    let (client, mut connects) =
        client(ReconnectLayer::once().connect_timeout(SECOND).backoff(every_second()));
    connects.0.allow(0);
    let mut calling = start(&mut client.clone(), read());
    advance(SECOND).await;
    assert!(calling.is_woken());
    let error = assert_ready_err!(calling.poll());
    assert!(matches!(*connect_error(&error), ConnectError::TimedOut(_)));

    let mut calling = start(&mut client.clone(), read());
    advance(SECOND).await;
    assert_pending!(calling.poll());
    connects.0.allow(1);
    assert!(calling.is_woken());
    assert_pending!(calling.poll());
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
}

#[tokio::test(start_paused = true)]
async fn a_connectors_readiness_that_fails_is_a_failed_connect_and_latches_nothing() {
    let (client, mut connects) = client(ReconnectLayer::once().backoff(every_second()));
    connects.0.send_error(std::io::Error::from(std::io::ErrorKind::PermissionDenied));
    let mut calling = call(&mut client.clone(), read());
    let error = assert_ready_err!(calling.poll());
    assert!(
        matches!(&*connect_error(&error), ConnectError::Connector(error) if error.is::<std::io::Error>())
    );
    let mut calling = start(&mut client.clone(), read());
    advance(SECOND).await;
    assert_pending!(calling.poll());
    connects.accept();
}

#[tokio::test(start_paused = true)]
async fn a_connector_that_panics_is_an_error_and_the_next_call_connects() {
    struct Panics(u32);
    impl Service<()> for Panics {
        type Response = Connection;
        type Error = BoxError;
        type Future = Pin<Box<dyn Future<Output = Result<Connection, BoxError>> + Send>>;

        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), BoxError>> {
            self.0 += 1;
            assert!(self.0 != 1, "readiness");
            std::task::Poll::Ready(Ok(()))
        }

        fn call(&mut self, (): ()) -> Self::Future {
            assert!(self.0 != 2, "call");
            let panics = self.0 == 3;
            Box::pin(async move {
                assert!(!panics, "future");
                let (mock, handle) = mock::pair::<Req, u8>();
                std::mem::forget(handle);
                let map: fn(BoxError) -> CallError = CallError::from_boxed;
                Ok(MapErr::new(mock, map))
            })
        }
    }
    let layer = ReconnectLayer::once().backoff(ConstantBuilder::new().with_delay(Duration::ZERO));
    let handle = layer.handle();
    let service = layer.layer(Panics(0));
    for _ in 0..3 {
        let error = service.clone().oneshot(write()).await.unwrap_err();
        assert!(matches!(*connect_error(&error), ConnectError::Panicked));
        assert_eq!(error.outcome(), Outcome::NotDone);
    }
    let mut calling = task::spawn(service.clone().oneshot(read()));
    assert_pending!(calling.poll());
    assert_eq!(handle.generation(), Some(1));
}

#[tokio::test(start_paused = true)]
async fn a_sink_that_panics_harms_nobody() {
    let layer = ReconnectLayer::once().on_event(|event| {
        assert!(!matches!(event, Event::Incident(_)), "the sink");
    });
    let (mut client, mut connects) = client(layer);
    drop(connected(&mut client, &mut connects));
    let mut driver = start(&mut client.clone(), read());
    let mut other = start(&mut client.clone(), read());
    let mut server = connects.accept();
    assert_pending!(driver.poll());
    assert!(other.is_woken());
    assert_pending!(other.poll());
    server.answer();
    assert_ready_ok!(driver.poll());
    server.answer();
    assert_ready_ok!(other.poll());
}

/// A task whose waker panics, as one does whose executor is gone.
struct Loud;

impl Wake for Loud {
    fn wake(self: Arc<Self>) {
        panic!("as tested");
    }
}

/// A call that was polled once, by a task whose waker panics.
fn start_loud(client: &mut Client, request: Req) -> Pin<Box<<Client as Service<Req>>::Future>> {
    assert_ready_ok!(task::spawn(poll_fn(|cx| client.poll_ready(cx))).poll());
    let mut calling = Box::pin(client.call(request));
    let waker = Waker::from(Arc::new(Loud));
    assert_pending!(calling.as_mut().poll(&mut Context::from_waker(&waker)));
    calling
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_connect_reaches_all_who_wait_though_the_waker_of_one_panics() {
    for end in ["connected", "failed", "shut down"] {
        let layer = ReconnectLayer::once();
        let handle = layer.handle();
        let (mut client, mut connects) = client(layer);
        let mut driver = start(&mut client.clone(), read().deadline(Deadline::Never));
        let _loud = start_loud(&mut client.clone(), read().deadline(Deadline::Never));
        let mut other = start(&mut client, read().deadline(Deadline::Never));
        let server = match end {
            "connected" => Some(connects.accept()),
            "failed" => {
                connects.refuse();
                None
            }
            _ => {
                assert_eq!(handle.shutdown(SECOND).await, 0);
                None
            }
        };
        // What is not its own affair does not reach the driver either.
        assert_eq!(driver.poll().is_pending(), server.is_some(), "{end}");
        assert!(other.is_woken(), "{end}");
        match server {
            Some(mut server) => {
                assert_pending!(other.poll());
                server.answer();
                server.answer();
                assert_ready_ok!(other.poll());
            }
            None => drop(assert_ready_err!(other.poll())),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_connect_whose_drivers_waker_panics_is_driven_by_another_one() {
    let (mut client, mut connects) = client(ReconnectLayer::once());
    let _loud = start_loud(&mut client.clone(), read().deadline(Deadline::Never));
    let _louder = start_loud(&mut client.clone(), read().deadline(Deadline::Never));
    let mut other = start(&mut client, read().deadline(Deadline::Never));
    let mut server = connects.accept();
    assert!(!other.is_woken(), "the driver has its time");
    let_tasks_run().await;
    advance(SECOND).await;
    let_tasks_run().await;
    assert!(other.is_woken());
    assert_pending!(other.poll());
    server.answer();
    assert_ready_ok!(other.poll());
}

// ----- a connection's readiness, and the second hand-over

#[tokio::test(start_paused = true)]
async fn a_connection_found_dead_before_the_call_costs_a_write_nothing() {
    for effect in [Effect::ReadOnly, Effect::Write] {
        let (layer, log) = logged();
        let (mut client, mut connects) = client(layer);
        drop(connected(&mut client, &mut connects));
        let mut calling = start(&mut client, write().as_effect(effect));
        let mut server = connects.accept();
        assert_pending!(calling.poll());
        assert_eq!(*server.next().0, "write");
        drop(calling);
        let mut calling = start(&mut client, write());
        server.answer();
        assert_ready_ok!(calling.poll());
        assert_eq!(log.take(), ["incident of 1: \"\" None, the service was not ready, overlap false"]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_found_its_connection_dead_reports_both_attempts() {
    let (layer, log) = logged();
    let (mut client, mut connects) = client(layer);
    drop(connected(&mut client, &mut connects));
    let mut calling = start(&mut client, write());
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
    assert_eq!(
        log.take().last().unwrap(),
        "call \"pay\": [(Some(1), \"not_ready\"), (Some(2), \"answered\")] None"
    );
}

#[tokio::test(start_paused = true)]
async fn a_connections_readiness_that_fails_leads_to_one_reconnect_a_call() {
    let (client, mut connects) = client(ReconnectLayer::once());
    let mut calling = start(&mut client.clone(), write());
    drop(connects.accept());
    assert_pending!(calling.poll());
    drop(connects.accept());
    let error = assert_ready_err!(calling.poll());
    assert!(connects.has_next().is_none());
    assert!(matches!(error.cause(), Cause::NotReady));
    assert_eq!((error.outcome(), error.scope()), (Outcome::NotDone, Scope::Connection));
    let generations: Vec<_> = error.attempts().iter().map(|attempt| attempt.generation).collect();
    assert_eq!(generations, [Some(1), Some(2)]);
}

#[tokio::test(start_paused = true)]
async fn a_connections_readiness_that_hangs_ends_at_the_deadline_as_not_sent() {
    let (connector, connects) = mock::pair::<(), Connection>();
    let mut connects = Connects(connects);
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(SECOND))
        .layer(ReconnectLayer::once())
        .service(connector);
    let mut calling = task::spawn(service.clone().oneshot(write()));
    assert_pending!(calling.poll());
    let mut server = connects.accept();
    server.0.allow(0);
    assert_pending!(calling.poll());
    advance(SECOND).await;
    assert!(calling.is_woken());
    let error = assert_ready_err!(calling.poll());
    assert!(matches!(error.cause(), Cause::Deadline));
    assert_eq!(error.outcome(), Outcome::NotDone);
    assert!(server.is_idle());

    // Nobody else is harmed.
    let mut calling = task::spawn(service.clone().oneshot(write()));
    assert_pending!(calling.poll());
    server.0.allow(1);
    assert!(calling.is_woken());
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
    assert!(connects.has_next().is_none());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_handed_over_at_or_past_the_deadline_or_the_end_of_the_attempt() {
    for (deadline, until) in [(Some(SECOND), None), (None, Some(SECOND)), (Some(3 * SECOND), Some(SECOND))] {
        let request = || {
            let mut request = write();
            if let Some(deadline) = deadline {
                request = request.within(deadline);
            }
            request.context_mut().set_attempt_until(until.map(|until| Instant::now() + until));
            request
        };
        let (mut client, mut connects) = client(ReconnectLayer::once());
        let mut server = connected(&mut client, &mut connects);
        // On the connection that is there: its readiness came too late.
        let mut late = client.clone();
        assert_ready_ok!(task::spawn(poll_fn(|cx| late.poll_ready(cx))).poll());
        let request_in_time = request();
        advance(SECOND).await;
        let error = assert_ready_err!(task::spawn(late.call(request_in_time)).poll());
        assert_eq!(error.delivery(), Delivery::NotSent);
        assert!(server.is_idle());

        // While it waits for the connection's readiness.
        server.0.allow(0);
        let mut calling = start(&mut client.clone(), request());
        advance(SECOND).await;
        server.0.allow(1);
        let error = assert_ready_err!(calling.poll());
        let timed_out = matches!(error.cause(), Cause::AttemptTimeout);
        assert_eq!(timed_out, until.is_some(), "{error:?}");
        assert_eq!(error.outcome(), Outcome::NotDone);
        assert!(server.is_idle());

        // While it waits for a new connection.
        drop(server);
        let mut calling = start(&mut client, request());
        let respond = connects.next();
        advance(SECOND).await;
        let mut server = accept(respond);
        let error = assert_ready_err!(calling.poll());
        assert_eq!(error.outcome(), Outcome::NotDone);
        assert!(server.is_idle());
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_in_flight_at_the_deadline_is_ambiguous() {
    let (mut client, mut connects) = client(ReconnectLayer::once());
    let mut server = connected(&mut client, &mut connects);
    let mut calling = start(&mut client, write().within(SECOND));
    let _taken = server.next();
    advance(SECOND).await;
    let error = assert_ready_err!(calling.poll());
    assert!(matches!(error.cause(), Cause::Deadline));
    assert_eq!((error.outcome(), error.attempts()[0].generation), (Outcome::Unknown, Some(1)));
}

#[tokio::test(start_paused = true)]
async fn not_sent_without_the_request_is_not_handed_over_again() {
    let (layer, _) = logged();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    let mut server = connected(&mut client, &mut connects);
    let mut calling = start(&mut client, read());
    server.next().1.send_error(CallError::not_sent("gone").connection_lost());
    let error = assert_ready_err!(calling.poll());
    assert_eq!((error.delivery(), error.scope()), (Delivery::NotSent, Scope::Connection));
    assert!(connects.has_next().is_none());
    assert_eq!(handle.generation(), None);
}

#[tokio::test(start_paused = true)]
async fn an_error_of_the_call_alone_leaves_the_connection_be() {
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    let mut server = connected(&mut client, &mut connects);
    for error in [
        CallError::ambiguous("x"),
        CallError::not_sent("x"),
        CallError::not_processed("x"),
        CallError::answered("x"),
    ] {
        let mut calling = start(&mut client, read());
        server.next().1.send_error(error);
        assert_ready_err!(calling.poll());
        assert_eq!(handle.generation(), Some(1));
    }
    // An answer that is the connection's last word.
    let mut calling = start(&mut client, read());
    server.next().1.send_error(CallError::answered("bye").connection_lost());
    assert_eq!(assert_ready_err!(calling.poll()).outcome(), Outcome::Answered);
    assert_eq!(handle.generation(), None);
}

// ----- the second hand-over, over this crate's own connection

/// Connections over pipes in memory; the test has the other ends.
#[derive(Clone, Default)]
struct Pipes(Arc<Mutex<Vec<DuplexStream>>>);

type OverPipes = jsonrpc::Client;

impl Pipes {
    fn connector(
        &self,
    ) -> impl Service<(), Response = OverPipes, Error = BoxError, Future: Send> + Send + Sync + use<> {
        let pipes = self.0.clone();
        service_fn(move |()| {
            let (ours, theirs) = tokio::io::duplex(1 << 16);
            pipes.lock().unwrap().push(theirs);
            let client = jsonrpc::Client::new(ours);
            async move { Ok::<_, BoxError>(client) }
        })
    }

    fn made(&self) -> usize {
        self.0.lock().unwrap().len()
    }

    fn take(&self) -> DuplexStream {
        self.0.lock().unwrap().pop().unwrap()
    }
}

/// Answers every line, and counts those that are calls.
fn serve(pipe: DuplexStream) -> Arc<AtomicU32> {
    let calls = Arc::new(AtomicU32::new(0));
    let counter = calls.clone();
    tokio::spawn(async move {
        let (reader, mut writer) = tokio::io::split(pipe);
        let mut lines = BufReader::new(reader).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            let Some(id) = serde_json::from_str::<serde_json::Value>(&line).unwrap()["id"].as_u64() else {
                continue;
            };
            counter.fetch_add(1, Ordering::Relaxed);
            let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":1}}\n");
            writer.write_all(answer.as_bytes()).await.unwrap();
        }
    });
    calls
}

async fn let_tasks_run() {
    for _ in 0..20 {
        tokio::task::yield_now().await;
    }
}

fn request(effect: Effect) -> jsonrpc::Request {
    jsonrpc::Request::new("work", ()).unwrap().as_effect(effect)
}

#[tokio::test(start_paused = true)]
async fn a_request_that_provably_never_left_is_handed_over_once_more_be_it_a_read_or_a_write() {
    for effect in [Effect::ReadOnly, Effect::Idempotent, Effect::Write] {
        let (pipes, log) = (Pipes::default(), Log::default());
        let mut service = ReconnectLayer::once().on_event(log.sink()).layer(pipes.connector());
        // Connects, and then the peer goes away unseen between the readiness and the call.
        let mut warm = tokio::spawn(service.clone().oneshot(request(Effect::ReadOnly)));
        let_tasks_run().await;
        let first = pipes.take();
        drop(first);
        assert!((&mut warm).await.unwrap().is_err());
        let mut warm = tokio::spawn(service.clone().oneshot(request(Effect::ReadOnly)));
        let_tasks_run().await;
        let peer = pipes.take();
        let (reader, mut writer) = tokio::io::split(peer);
        let mut lines = BufReader::new(reader).lines();
        lines.next_line().await.unwrap();
        writer.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":1}\n").await.unwrap();
        (&mut warm).await.unwrap().unwrap();
        log.take();

        service.ready().await.unwrap();
        drop((lines, writer));
        let_tasks_run().await;
        let mut calling = task::spawn(service.call(request(effect)));
        assert_pending!(calling.poll());
        let_tasks_run().await;
        assert_eq!(pipes.made(), 1);
        let calls = serve(pipes.take());
        assert_eq!(calling.await.unwrap().parse::<u32>().unwrap(), 1);
        assert_eq!(calls.load(Ordering::Relaxed), 1);
        let last = log.take().pop().unwrap();
        assert_eq!(last, "call \"work\": [(Some(2), \"closed\"), (Some(3), \"answered\")] None");
    }
}

#[tokio::test(start_paused = true)]
async fn a_second_not_sent_is_returned() {
    let pipes = Pipes::default();
    let peers = pipes.clone();
    // Every connection is dead on arrival: its closure is known before the call.
    let inner = pipes.connector();
    let connects = Arc::new(AtomicU32::new(0));
    let counter = connects.clone();
    let inner = Arc::new(tokio::sync::Mutex::new(inner));
    let connector = service_fn(move |()| {
        let (inner, peers) = (inner.clone(), peers.clone());
        counter.fetch_add(1, Ordering::Relaxed);
        async move {
            let client = inner.lock().await.call(()).await?;
            drop(peers.take());
            client.closed().await;
            Ok::<_, BoxError>(client)
        }
    });
    let service = ReconnectLayer::once().layer(connector);
    for effect in [Effect::ReadOnly, Effect::Write] {
        connects.store(0, Ordering::Relaxed);
        let error = service.clone().oneshot(request(effect)).await.unwrap_err();
        assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NotDone, 2));
        assert!(error.closure().is_some());
        assert_eq!(connects.load(Ordering::Relaxed), 2);
    }
}

// ----- crash loop

/// A call whose connection closes under it, having answered nothing.
fn barren(client: &Client, connects: &mut Connects) -> CallError {
    let mut calling = start(&mut client.clone(), read());
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    server.close();
    assert_ready_err!(calling.poll())
}

#[tokio::test(start_paused = true)]
async fn connections_that_close_without_an_answer_turn_calls_away_for_a_while() {
    let log = Log::default();
    let layer = ReconnectLayer::once().crash_loop(3, 30 * SECOND).on_event(log.sink());
    let (client, mut connects) = client(layer);
    for _ in 0..3 {
        assert!(matches!(barren(&client, &mut connects).cause(), Cause::Closed(_)));
    }
    assert_eq!(log.take().len(), 2, "the third closure has not been followed yet");
    for _ in 0..2 {
        let error = assert_ready_err!(call(&mut client.clone(), write()).poll());
        assert_eq!((error.outcome(), error.retry_after()), (Outcome::NotDone, Some(30 * SECOND)));
        let Cause::Refused(Refusal::CrashLoop(evidence)) = error.cause() else { panic!("{error:?}") };
        assert_eq!(evidence.to_vec(), ["the connection closed"; 3]);
        assert_eq!(
            error.to_string(),
            "not done: pay: the last 3 connections closed without an answer; the last one: the connection closed; \
             calls are turned away for another 30s"
        );
    }
    assert_eq!(log.take().len(), 1, "reported once, since no connect will follow for a while");
    assert!(connects.has_next().is_none());

    // One trial.
    advance(30 * SECOND).await;
    barren(&client, &mut connects);
    let error = assert_ready_err!(call(&mut client.clone(), read()).poll());
    assert!(matches!(error.cause(), Cause::Refused(Refusal::CrashLoop(evidence)) if evidence.len() == 4));

    // A trial that is answered ends it, and the count starts anew.
    advance(30 * SECOND).await;
    let mut server = connected(&mut client.clone(), &mut connects);
    let mut calling = start(&mut client.clone(), read());
    assert_pending!(calling.poll());
    server.close();
    assert_ready_err!(calling.poll());
    (0..3).for_each(|_| drop(barren(&client, &mut connects)));
    let error = assert_ready_err!(call(&mut client.clone(), read()).poll());
    assert!(matches!(error.cause(), Cause::Refused(Refusal::CrashLoop(evidence)) if evidence.len() == 3));
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_answered_an_error_or_a_write_is_not_barren() {
    let (client, mut connects) = client(ReconnectLayer::once().crash_loop(2, 30 * SECOND));
    for n in 0..6 {
        let mut client = client.clone();
        let mut calling = start(&mut client, write());
        let mut server = connects.accept();
        assert_pending!(calling.poll());
        match n % 2 {
            0 => server.answer(),
            _ => server.next().1.send_error(CallError::answered("no")),
        }
        assert_ready!(calling.poll()).ok();
        let mut calling = start(&mut client, write());
        server.close();
        assert_ready_err!(calling.poll());
    }
}

#[tokio::test(start_paused = true)]
async fn connects_that_fail_are_no_crash_loop() {
    let layer = ReconnectLayer::once().crash_loop(1, 30 * SECOND);
    let (client, mut connects) = client(layer.backoff(ConstantBuilder::new().with_delay(Duration::ZERO)));
    for _ in 0..3 {
        let mut calling = start(&mut client.clone(), read());
        connects.refuse();
        connect_error(&assert_ready_err!(calling.poll()));
    }
}

// ----- events

#[tokio::test(start_paused = true)]
async fn a_closure_is_one_incident_and_the_first_read_that_succeeds_proves_the_recovery() {
    let (layer, log) = logged();
    let (mut client, mut connects) = client(layer);
    let mut server = connected(&mut client, &mut connects);
    assert!(log.take().is_empty(), "a first connection is no recovery");
    let mut calls = [start(&mut client.clone(), read()), start(&mut client.clone(), write())];
    for calling in &mut calls {
        assert_pending!(calling.poll());
    }
    server.close();
    server.close();
    for mut calling in calls {
        assert_ready_err!(calling.poll());
    }
    assert!(log.take().is_empty(), "what comes after it is not known yet");

    advance(SECOND).await;
    let mut calling = start(&mut client, write());
    advance(SECOND).await;
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    let incidents = log.take();
    assert_eq!(incidents.len(), 1);
    assert!(incidents[0].contains("Some(ReadOnly), the connection closed, overlap false"), "{incidents:?}");
    // Neither an error nor a write says that reads work.
    let mut asked = start(&mut client, read());
    let (_, written) = server.next();
    server.next().1.send_error(CallError::answered("no"));
    assert_ready_err!(asked.poll());
    written.send_response(1);
    assert_ready_ok!(calling.poll());
    assert!(log.take().is_empty());

    advance(SECOND).await;
    for _ in 0..2 {
        let mut calling = start(&mut client, read());
        server.answer();
        assert_ready_ok!(calling.poll());
    }
    assert_eq!(log.take(), ["recovery on 2 by \"list\" after 3s"]);
}

#[tokio::test(start_paused = true)]
async fn an_incident_that_no_connection_followed_is_reported_when_the_connect_failed() {
    let log = Log::default();
    let layer = ReconnectLayer::once().backoff(every_second()).on_event(log.sink());
    let (mut client, mut connects) = client(layer);
    drop(connected(&mut client, &mut connects));
    let mut calling = start(&mut client, read());
    connects.refuse();
    assert_ready_err!(calling.poll());
    let incidents = |log: &Log| log.take().iter().filter(|line| line.starts_with("incident")).count();
    assert_eq!(incidents(&log), 1);
    let mut calling = start(&mut client, read());
    advance(SECOND).await;
    assert_pending!(calling.poll());
    let mut server = connects.accept();
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
    assert_eq!(log.take(), ["recovery on 2 by \"list\" after 1s"]);
}

// ----- the end of the last process

#[tokio::test(start_paused = true)]
async fn the_next_connect_begins_when_the_process_is_known_to_be_gone() {
    let (layer, log) = logged();
    let (mut client, mut connects) = client(layer);
    let mut server = connected(&mut client, &mut connects);
    let mut calling = start(&mut client, write());
    let (tell, told) = tokio::sync::oneshot::channel();
    let exit = async { told.await.unwrap_or_else(|_| Exit::new(None, false)) };
    server.next().1.send_error(CallError::closed("eof").with_exit(exit));
    let error = assert_ready_err!(calling.poll());
    let mut calling = start(&mut client, read());
    advance(9 * SECOND).await;
    assert!(!calling.is_woken() && connects.has_next().is_none());
    tell.send(Exit::new(None, true)).unwrap();
    assert!(calling.is_woken());
    assert_pending!(calling.poll());
    connects.accept();
    assert_pending!(calling.poll());
    assert!(error.closure().unwrap().exit().is_some_and(|exit| exit.at <= Instant::now() && exit.group_gone));
    assert!(log.take()[0].ends_with("overlap false"));
}

#[tokio::test(start_paused = true)]
async fn a_process_that_does_not_end_holds_the_connects_up_for_ten_seconds_in_all() {
    let log = Log::default();
    let (mut client, mut connects) =
        client(ReconnectLayer::once().backoff(every_second()).on_event(log.sink()));
    let mut server = connected(&mut client, &mut connects);
    let mut calling = start(&mut client, write());
    server.next().1.send_error(CallError::closed("eof").with_exit(std::future::pending()));
    assert_ready_err!(calling.poll());
    let mut calling = start(&mut client, read());
    advance(10 * SECOND).await;
    assert!(calling.is_woken());
    assert_pending!(calling.poll());
    connects.refuse();
    assert_ready_err!(calling.poll());
    assert_eq!(log.take(), ["incident of 1: \"\" Some(Write), the connection closed, overlap true"]);
    // The connect after it does not wait for that again.
    let mut calling = start(&mut client, read());
    advance(SECOND).await;
    assert_pending!(calling.poll());
    connects.accept();
}

#[tokio::test(start_paused = true)]
async fn a_group_that_is_not_gone_is_an_overlap() {
    let (layer, log) = logged();
    let (mut client, mut connects) = client(layer);
    let mut server = connected(&mut client, &mut connects);
    let mut calling = start(&mut client, write());
    let exit = std::future::ready(Exit::new(None, false));
    server.next().1.send_error(CallError::closed("eof").with_exit(exit));
    assert_ready_err!(calling.poll());
    let mut calling = start(&mut client, read());
    connects.accept();
    assert_pending!(calling.poll());
    assert!(log.take()[0].ends_with("overlap true"));
}

// ----- bounds and configuration

#[tokio::test(start_paused = true)]
async fn more_than_so_many_do_not_wait() {
    let (client, mut connects) = client(ReconnectLayer::once().max_waiters(2));
    let mut waits = [start(&mut client.clone(), read()), start(&mut client.clone(), read())];
    let error = assert_ready_err!(call(&mut client.clone(), write()).poll());
    assert!(matches!(error.cause(), Cause::Refused(Refusal::Overloaded(_))));
    assert_eq!(error.outcome(), Outcome::NotDone);
    let mut server = connects.accept();
    for calling in &mut waits {
        assert_pending!(calling.poll());
        server.answer();
        assert_ready_ok!(calling.poll());
    }
}

#[tokio::test(start_paused = true)]
async fn a_wrong_value_refuses_each_call_naming_it_until_it_is_put_right() {
    let once = ReconnectLayer::once;
    for (layer, name) in [
        (once().connect_timeout(Duration::ZERO), "connect_timeout"),
        (once().crash_loop(0, SECOND), "crash_loop"),
        (once().max_waiters(0), "max_waiters"),
    ] {
        let (client, mut connects) = client(layer);
        for request in [read(), write()] {
            let error = assert_ready_err!(call(&mut client.clone(), request).poll());
            assert!(matches!(error.cause(), Cause::Refused(Refusal::Config(what)) if what.contains(name)));
            assert!(error.to_string().contains(name), "{error}");
            assert_eq!(error.outcome(), Outcome::NotDone);
        }
        assert!(connects.has_next().is_none());
    }
    let (client, mut connects) = client(once().connect_timeout(Duration::ZERO).connect_timeout(SECOND));
    let _calling = start(&mut client.clone(), read());
    connects.accept();
}

#[tokio::test(start_paused = true)]
async fn a_cool_down_or_a_backoff_without_an_end_is_not_none() {
    let (client, mut connects) = client(ReconnectLayer::once().crash_loop(2, Duration::MAX));
    for _ in 0..2 {
        barren(&client, &mut connects);
    }
    let error = assert_ready_err!(call(&mut client.clone(), read()).poll());
    assert!(matches!(error.cause(), Cause::Refused(Refusal::CrashLoop(_))), "{error:?}");
    assert!(connects.has_next().is_none());

    let schedule = ConstantBuilder::new().with_delay(Duration::MAX);
    let (client, mut connects) = self::client(ReconnectLayer::once().backoff(schedule));
    let mut calling = start(&mut client.clone(), read());
    connects.refuse();
    connect_error(&assert_ready_err!(calling.poll()));
    let error = assert_ready_err!(call(&mut client.clone(), read().within(3600 * SECOND)).poll());
    assert_eq!(error.delivery(), Delivery::NotSent, "{error:?}");
    assert!(connects.has_next().is_none());
}

#[tokio::test(start_paused = true)]
async fn enormous_times_are_no_trouble() {
    let layer = ReconnectLayer::once()
        .connect_timeout(Duration::MAX)
        .crash_loop(1, Duration::MAX)
        .backoff(ConstantBuilder::new().with_delay(Duration::MAX));
    let handle = layer.handle();
    let (client, mut connects) = client(layer);
    let mut calling = start(&mut client.clone(), read().within(Duration::MAX));
    connects.refuse();
    assert_ready_err!(calling.poll());
    let mut calling = call(&mut client.clone(), read().within(SECOND));
    let _ = calling.poll();
    assert_eq!(handle.shutdown(Duration::MAX).await, 0);
}

// ----- shutdown

#[tokio::test(start_paused = true)]
async fn a_shutdown_lets_calls_in_flight_finish_and_refuses_new_ones() {
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    let mut server = connected(&mut client, &mut connects);
    let mut ready = client.clone();
    assert_ready_ok!(task::spawn(poll_fn(|cx| ready.poll_ready(cx))).poll());
    let mut calls = [start(&mut client.clone(), read()), start(&mut client.clone(), write())];
    calls.iter_mut().for_each(|calling| assert_pending!(calling.poll()));

    let mut shutdown = task::spawn(handle.shutdown(60 * SECOND));
    assert_pending!(shutdown.poll());
    for mut calling in [task::spawn(ready.call(write())), call(&mut client, write())] {
        let error = assert_ready_err!(calling.poll());
        assert!(matches!(error.cause(), Cause::Refused(Refusal::Shutdown)));
        assert_eq!((error.outcome(), error.delivery()), (Outcome::NotDone, Delivery::NotSent));
    }
    for calling in &mut calls {
        assert_eq!(handle.generation(), Some(1), "still in use");
        server.answer();
        assert_ready_ok!(calling.poll());
        assert!(shutdown.is_woken());
    }
    assert_eq!(assert_ready!(shutdown.poll()), 0);
    assert_eq!(handle.generation(), None);
    assert!(server.is_idle());
    assert_eq!(handle.shutdown(SECOND).await, 0, "once more does no harm");
    assert_ready_err!(call(&mut client, read()).poll());
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_with_its_grace_and_says_how_many_calls_it_cut_off() {
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    let _server = connected(&mut client, &mut connects);
    let mut calls: Vec<_> = (0..3).map(|_| start(&mut client, read())).collect();
    let begin = Instant::now();
    let mut shutdown = task::spawn(handle.shutdown(SECOND));
    assert_pending!(shutdown.poll());
    // One whose caller gives up is no longer in flight.
    drop(calls.pop());
    assert!(shutdown.is_woken());
    assert_eq!(shutdown.await, 2);
    assert_eq!(begin.elapsed(), SECOND);
    assert_eq!(handle.shutdown(Duration::ZERO).await, 2);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_wakes_those_who_wait_for_a_connection() {
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (client, mut connects) = client(layer);
    let mut calls: Vec<_> = (0..3).map(|_| start(&mut client.clone(), write())).collect();
    let respond = connects.next();
    assert_eq!(handle.shutdown(SECOND).await, 0);
    for calling in &mut calls {
        assert!(calling.is_woken());
        let error = assert_ready_err!(calling.poll());
        assert!(matches!(error.cause(), Cause::Refused(Refusal::Shutdown)));
        assert_eq!(error.outcome(), Outcome::NotDone);
    }
    // What was being made is given up.
    accept(respond);
    assert!(connects.has_next().is_none());
    assert_eq!(handle.generation(), None);
}

#[tokio::test(start_paused = true)]
async fn a_closure_that_no_connect_follows_any_more_is_reported_by_the_shutdown() {
    let (layer, log) = logged();
    let handle = layer.handle();
    let (mut client, mut connects) = client(layer);
    let mut server = connected(&mut client, &mut connects);
    let mut calling = start(&mut client, read());
    server.close();
    assert_ready_err!(calling.poll());
    handle.shutdown(SECOND).await;
    handle.shutdown(SECOND).await;
    assert_eq!(log.take().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_closes_a_connection_of_this_crate_under_the_calls_that_it_cuts_off() {
    let pipes = Pipes::default();
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let service = layer.layer(pipes.connector());
    let calling = tokio::spawn(service.clone().oneshot(request(Effect::Write)));
    let_tasks_run().await;
    let mut peer = BufReader::new(pipes.take());
    let mut line = String::new();
    peer.read_line(&mut line).await.unwrap();
    assert_eq!(handle.shutdown(SECOND).await, 1);
    let error = calling.await.unwrap().unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    line.clear();
    assert_eq!(peer.read_line(&mut line).await.unwrap(), 0, "closed");
}

#[tokio::test(start_paused = true)]
async fn a_handle_looks_after_every_service_that_the_layer_made() {
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let (mut one, mut connects) = client(layer.clone());
    let (two, _) = client(layer);
    let _server = connected(&mut one, &mut connects);
    let _calling = start(&mut one, read());
    assert_eq!((handle.generation(), handle.in_flight()), (Some(1), 1));
    assert_eq!(handle.shutdown(SECOND).await, 1);
    for mut client in [one, two] {
        assert_ready_err!(call(&mut client, read()).poll());
    }
}

// ----- several threads

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_calls_over_connections_that_keep_closing_all_end() {
    // Every connection answers a hundred calls and then closes.
    let made = Arc::new(AtomicU32::new(0));
    let counter = made.clone();
    let connector = service_fn(move |()| {
        counter.fetch_add(1, Ordering::Relaxed);
        let left = Arc::new(AtomicU32::new(100));
        async move {
            tokio::task::yield_now().await;
            Ok::<_, CallError>(service_fn(move |_: Tagged<u8>| {
                let left = left.clone();
                async move {
                    tokio::task::yield_now().await;
                    let taken = left.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |n| n.checked_sub(1));
                    taken.map_err(|_| CallError::closed("used up"))
                }
            }))
        }
    });
    let layer = ReconnectLayer::once();
    let handle = layer.handle();
    let service = layer.layer(connector);
    let tasks: Vec<_> = (0..16)
        .map(|n| {
            let mut service = service.clone();
            tokio::spawn(async move {
                for m in 0..500 {
                    let calling = service.ready().await.unwrap().call(Tagged::new(0, Effect::ReadOnly));
                    // Some give up on the way, drivers among them.
                    if (n + m) % 7 == 0 {
                        let _ = tokio::time::timeout(Duration::from_micros(1), calling).await;
                    } else {
                        let _ = calling.await;
                    }
                }
            })
        })
        .collect();
    for task in tasks {
        tokio::time::timeout(60 * SECOND, task).await.expect("nobody hangs").unwrap();
    }
    assert_eq!(handle.in_flight(), 0);
    assert_eq!(handle.shutdown(60 * SECOND).await, 0);
    let made = made.load(Ordering::Relaxed);
    assert!((40..=81).contains(&made), "{made}");
}

#[test]
fn the_service_is_clone_send_sync_and_static() {
    fn good<S: Clone + Send + Sync + 'static>(_: &S) {}
    fn sent<F: Send + 'static>(_: &F) {}
    let (mut client, _) = client(ReconnectLayer::once());
    good(&client);
    sent(&client.call(read()));
}

// ----- several runtimes, or none

fn runtime() -> Runtime {
    Builder::new_current_thread().enable_all().start_paused(true).build().unwrap()
}

/// A poll that panics.
#[track_caller]
fn panics(mut calling: Calling) {
    let polled = catch_unwind(AssertUnwindSafe(|| drop(calling.poll())));
    assert!(polled.is_err(), "without a clock nothing bounds the connect");
}

#[test]
fn a_call_that_is_polled_without_a_clock_takes_no_connector_with_it() {
    for no_clock in [None, Some(Builder::new_current_thread().build().unwrap())] {
        let (mut client, mut connects) = client(ReconnectLayer::once());
        {
            let _in = no_clock.as_ref().map(Runtime::enter);
            panics(call(&mut client, read().deadline(Deadline::Never)));
            panics(call(&mut client, write().deadline(Deadline::Never)));
        }
        assert!(connects.has_next().is_none());
        let runtime = runtime();
        let _in = runtime.enter();
        drop(connected(&mut client, &mut connects));
        // Also after a closure, when there is a process or a backoff to wait for.
        {
            let _in = no_clock.as_ref().map(Runtime::enter);
            let never = read().deadline(Deadline::Never);
            match no_clock.is_some() {
                true => panics(call(&mut client, never)),
                false => std::thread::scope(|scope| {
                    let calling = call(&mut client, never);
                    scope.spawn(|| panics(calling)).join().unwrap();
                }),
            }
        }
        connected(&mut client, &mut connects);
    }
}

#[test]
fn a_call_that_is_polled_without_a_clock_does_not_end_the_connect_of_others() {
    let (mut client, mut connects) = client(ReconnectLayer::once());
    let runtime = runtime();
    let driver = {
        let _in = runtime.enter();
        start(&mut client, read())
    };
    let begun = connects.next();
    // It waits as long as somebody else drives ...
    let outside = start(&mut client.clone(), read().deadline(Deadline::Never));
    drop(driver);
    // ... and then the baton is its own.
    assert!(outside.is_woken());
    panics(outside);
    let _in = runtime.enter();
    let mut calling = start(&mut client, read());
    let mut server = accept(begun);
    assert!(calling.is_woken());
    assert_pending!(calling.poll());
    server.answer();
    assert_ready_ok!(calling.poll());
    assert!(connects.has_next().is_none());
}

#[test]
fn a_shutdown_ends_though_the_runtime_of_the_connection_does_not_run_any_more() {
    let (first, second) = (runtime(), runtime());
    let (layer, log) = logged();
    let (handle, pipes) = (layer.handle(), Pipes::default());
    let service = layer.layer(pipes.connector());
    let call = || service.clone().oneshot(request(Effect::Write));
    first.block_on(async { assert!(tokio::time::timeout(SECOND, call()).await.is_err()) });
    let peer = pipes.take();
    let ended = second.block_on(async { tokio::time::timeout(11 * SECOND, handle.shutdown(SECOND)).await });
    assert_eq!(ended, Ok(0), "it waits for ever");
    assert_eq!(log.take().len(), 0, "nothing has closed yet");
    drop(peer);
    let error = second.block_on(call()).unwrap_err();
    assert_eq!(error.delivery(), Delivery::NotSent);
}

#[test]
fn a_connect_whose_runtime_does_not_run_any_more_ends_at_the_connect_timeout() {
    let (first, second) = (runtime(), runtime());
    let (client, mut connects) = client(ReconnectLayer::once().connect_timeout(SECOND));
    // As a program does that has one runtime per thread, and blocks on one call at a time.
    first.block_on(async {
        let call = client.clone().oneshot(read());
        assert!(tokio::time::timeout(SECOND / 2, call).await.is_err());
    });
    let _hangs = connects.next();
    let ended = second.block_on(async {
        let call = client.clone().oneshot(read().deadline(Deadline::Never));
        tokio::time::timeout(3 * SECOND, call).await
    });
    let error = ended.expect("it waits for ever").unwrap_err();
    assert!(matches!(*connect_error(&error), ConnectError::TimedOut(SECOND)));
}

#[test]
fn a_connect_whose_driver_is_kept_on_a_runtime_that_does_not_run_any_more_is_driven_by_others() {
    let (first, second) = (runtime(), runtime());
    let (client, mut connects) = client(ReconnectLayer::once());
    let kept = first.spawn(client.clone().oneshot(read().deadline(Deadline::Never)));
    first.block_on(async { tokio::time::sleep(MS).await });
    second.block_on(async {
        let mut call = task::spawn(client.clone().oneshot(read().deadline(Deadline::Never)));
        assert_pending!(call.poll());
        let mut server = connects.accept();
        tokio::time::sleep(SECOND / 10).await;
        assert!(call.is_woken());
        assert_pending!(call.poll());
        server.answer();
        assert_ready_ok!(call.poll());
    });
    drop(kept);
}

#[test]
fn a_connect_that_hangs_ends_in_time_though_its_driver_is_kept_on_a_runtime_that_does_not_run_any_more() {
    let (first, second, polls) = (runtime(), runtime(), Arc::new(AtomicU32::new(0)));
    let count = polls.clone();
    let connector = service_fn(move |()| {
        let count = count.clone();
        poll_fn(move |_| {
            count.fetch_add(1, Ordering::Relaxed);
            std::task::Poll::<Result<Connection, CallError>>::Pending
        })
    });
    let client = ReconnectLayer::once().layer(connector);
    let kept = first.spawn(client.clone().oneshot(read().deadline(Deadline::Never)));
    first.block_on(async { tokio::time::sleep(MS).await });
    let (ended, took) = second.block_on(async {
        let begun = Instant::now();
        let calls = [(); 3].map(|()| tokio::spawn(client.clone().oneshot(read().deadline(Deadline::Never))));
        let mut ended = Vec::new();
        for call in calls {
            ended.push(tokio::time::timeout(120 * SECOND, call).await.expect("it waits for ever").unwrap());
        }
        (ended, begun.elapsed())
    });
    for ended in ended {
        let error = ended.unwrap_err();
        assert!(matches!(*connect_error(&error), ConnectError::TimedOut(_)), "{error}");
    }
    assert!(took < 61 * SECOND, "{took:?}");
    assert!(polls.load(Ordering::Relaxed) <= 3, "busy");
    // The one that was kept is told, too.
    let error = first.block_on(kept).unwrap().unwrap_err();
    assert!(matches!(*connect_error(&error), ConnectError::TimedOut(_)), "{error}");
}

#[test]
fn a_call_that_comes_after_the_time_of_a_connect_that_nobody_polls_gets_a_connect_of_its_own() {
    let (first, second) = (runtime(), runtime());
    let (client, mut connects) = client(ReconnectLayer::once());
    let kept = first.spawn(client.clone().oneshot(read().deadline(Deadline::Never)));
    first.block_on(async { tokio::time::sleep(MS).await });
    let _hangs = connects.next();
    second.block_on(async {
        tokio::time::sleep(90 * SECOND).await;
        let call = tokio::spawn(client.clone().oneshot(read()));
        tokio::time::sleep(SECOND).await;
        let mut server = connects.accept();
        tokio::time::sleep(SECOND).await;
        server.answer();
        assert_eq!(call.await.unwrap().unwrap(), 1);
    });
    let error = first.block_on(kept).unwrap().unwrap_err();
    assert!(matches!(*connect_error(&error), ConnectError::TimedOut(_)), "{error}");
}
