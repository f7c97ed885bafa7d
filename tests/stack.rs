//! The four layers together, in every subset, and `Stack`.

use std::{
    fmt,
    future::{Future, pending, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    time::Duration,
};

use backon::ConstantBuilder;
use goaround::{
    BoxError, Call, CallError, Cause, ConnectError, DeadlineLayer, Delivery, Effect, Event, Evidence,
    InDoubt, Outcome, Reconnect, ReconnectLayer, Refusal, Retry, RetryReadOnly, Stack, Tagged, Verdict,
    WriteSafety, WriteSafetyLayer, jsonrpc, mcp, stdio,
};
use http_body_util::{BodyExt, Full};
use tokio::time::{Instant, advance, sleep};
use tokio_test::{assert_pending, assert_ready_err, task};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt, service_fn,
    util::{BoxCloneService, BoxCloneSyncService, MapErr},
};
use tower_test::mock::{self, Handle, Mock};

type Req = Tagged<u8>;

const SECOND: Duration = Duration::from_secs(1);

fn read() -> Req {
    Tagged::new(1, Effect::ReadOnly).named("list")
}

fn write() -> Req {
    Tagged::new(1, Effect::Write).named("pay")
}

fn good<S: Clone + Send + Sync + 'static>(service: S) -> S {
    service
}

// ----- the layers in every subset

/// A connection over a mock.
type Mocked = MapErr<Mock<Req, u8>, fn(BoxError) -> CallError>;

fn mocked() -> (Mocked, Handle<Req, u8>) {
    let (mock, handle) = mock::pair();
    let map: fn(BoxError) -> CallError = CallError::from_boxed;
    (MapErr::new(mock, map), handle)
}

async fn refuse_all(_: InDoubt<Req, u8>) -> Result<Verdict<u8>, BoxError> {
    Err("no check here".into())
}

/// Fails each call that comes first of its kind, and answers the others with the number of calls so far.
async fn serve(mut handle: Handle<Req, u8>, calls: Arc<AtomicU32>) {
    while let Some((_, respond)) = handle.next_request().await {
        match calls.fetch_add(1, Ordering::Relaxed) {
            0 => respond.send_error(CallError::ambiguous("reset")),
            n => respond.send_response(n as u8),
        }
    }
}

/// A read that fails once, and a write that fails once, through layers over `inner`.
async fn a_read_and_a_write_that_fail_once<S, F>(made: F, retries: bool)
where
    F: Fn(Mocked) -> S,
    S: Service<Req, Response = u8, Error = CallError> + Clone + Send + Sync + 'static,
    S::Future: Send + 'static,
{
    for request in [read(), write()] {
        let effect = Call::effect(&request);
        let (inner, handle) = mocked();
        let calls = Arc::new(AtomicU32::new(0));
        tokio::spawn(serve(handle, calls.clone()));
        let mut service = good(made(inner));
        let result = service.ready().await.unwrap().call(request).await;
        let attempts = calls.load(Ordering::Relaxed);
        match (effect, retries) {
            (Effect::ReadOnly, true) => assert_eq!((result.unwrap(), attempts), (1, 2)),
            (Effect::ReadOnly, false) => {
                let error = result.unwrap_err();
                assert_eq!((error.outcome(), attempts), (error_of_a_read(&error), 1));
            }
            _ => {
                let error = result.unwrap_err();
                assert_eq!((error.outcome(), attempts), (Outcome::Unknown, 1));
            }
        }
    }
}

/// Without any layer nobody has said that it was a read.
fn error_of_a_read(error: &CallError) -> Outcome {
    if error.method().is_empty() && error.attempts().is_empty() {
        Outcome::Unknown
    } else {
        Outcome::NoAnswer
    }
}

/// One test for each subset: which layers, and whether one of them retries.
macro_rules! subsets {
    ($($name:ident: [$($layer:expr),*], $reconnect:tt, $retries:literal;)*) => {$(
        #[tokio::test(start_paused = true)]
        async fn $name() {
            a_read_and_a_write_that_fail_once(
                |inner| ServiceBuilder::new()$(.layer($layer))*.service(subsets!(@inner inner, $reconnect)),
                $retries,
            )
            .await;
        }
    )*};
    (@inner $inner:ident, false) => { $inner };
    (@inner $inner:ident, true) => {
        ReconnectLayer::once().layer(service_fn(move |()| ready(Ok::<_, CallError>($inner.clone()))))
    };
}

fn deadline() -> DeadlineLayer {
    DeadlineLayer::new(60 * SECOND)
}

fn safety() -> WriteSafetyLayer<Req, u8> {
    WriteSafetyLayer::new(refuse_all)
}

subsets! {
    no_layer: [], false, false;
    deadline_alone: [deadline()], false, false;
    safety_alone: [safety()], false, false;
    retry_alone: [RetryReadOnly], false, true;
    reconnect_alone: [], true, false;
    deadline_safety: [deadline(), safety()], false, false;
    deadline_retry: [deadline(), RetryReadOnly], false, true;
    deadline_reconnect: [deadline()], true, false;
    safety_retry: [safety(), RetryReadOnly], false, true;
    safety_reconnect: [safety()], true, false;
    retry_reconnect: [RetryReadOnly], true, true;
    deadline_safety_retry: [deadline(), safety(), RetryReadOnly], false, true;
    deadline_safety_reconnect: [deadline(), safety()], true, false;
    deadline_retry_reconnect: [deadline(), RetryReadOnly], true, true;
    safety_retry_reconnect: [safety(), RetryReadOnly], true, true;
    all_four: [deadline(), safety(), RetryReadOnly], true, true;
}

#[tokio::test(start_paused = true)]
async fn the_stack_is_built_as_the_documentation_writes_it() {
    let (inner, handle) = mocked();
    let calls = Arc::new(AtomicU32::new(0));
    tokio::spawn(serve(handle, calls));
    let connector = service_fn(move |()| ready(Ok::<_, CallError>(inner.clone())));
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(Duration::from_secs(30)))
        .layer(WriteSafetyLayer::new(refuse_all))
        .layer(RetryReadOnly)
        .layer(ReconnectLayer::once())
        .service(connector);
    assert_eq!(good(service).oneshot(read()).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_layers_work_in_boxes() {
    let made = || {
        let connector = service_fn(|()| ready(Ok::<_, CallError>(service_fn(|call: Req| ready(Ok(*call))))));
        Stack::builder(connector).build().unwrap()
    };
    let mut sync = BoxCloneSyncService::new(made());
    let mut sent = BoxCloneService::new(made());
    assert_eq!(good(sync.clone()).ready().await.unwrap().call(read()).await.unwrap(), 1);
    assert_eq!(sync.ready().await.unwrap().call(write()).await.unwrap(), 1);
    assert_eq!(sent.ready().await.unwrap().call(write()).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn what_cannot_be_cloned_is_sent_once() {
    struct Body;
    for effect in [Effect::ReadOnly, Effect::Write] {
        let calls = Arc::new(AtomicU32::new(0));
        let counter = calls.clone();
        let connector = service_fn(move |()| {
            let counter = counter.clone();
            ready(Ok::<_, CallError>(service_fn(move |_: Tagged<Body>| {
                counter.fetch_add(1, Ordering::Relaxed);
                ready(Err::<(), _>(CallError::closed("reset")))
            })))
        });
        let stack =
            Stack::builder(connector).check(|doubt| async move { Ok(doubt.landed_without_result()) }).build();
        let error = stack.unwrap().send(Tagged::once(Body, |_| effect)).await.unwrap_err();
        let outcome = if effect.is_write() { Outcome::Unknown } else { Outcome::NoAnswer };
        assert_eq!((calls.load(Ordering::Relaxed), error.outcome()), (1, outcome));
    }
}

// ----- Stack

/// A server in memory: what it does with a call, by the call's number; every connect counts.
struct Server {
    connects: AtomicU32,
    calls: AtomicU32,
}

impl Server {
    fn new() -> Arc<Self> {
        Arc::new(Self { connects: AtomicU32::new(0), calls: AtomicU32::new(0) })
    }
}

#[derive(Clone)]
struct Connector<F>(Arc<Server>, F);

impl<F: Clone> Service<()> for Connector<F> {
    type Response = Connection<F>;
    type Error = CallError;
    type Future = std::future::Ready<Result<Connection<F>, CallError>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), CallError>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        self.0.connects.fetch_add(1, Ordering::Relaxed);
        ready(Ok(Connection(self.clone())))
    }
}

#[derive(Clone)]
struct Connection<F>(Connector<F>);

impl<F, Fut> Service<Req> for Connection<F>
where
    F: Fn(u32, Req) -> Fut,
    Fut: Future<Output = Result<u8, CallError>>,
{
    type Response = u8;
    type Error = CallError;
    type Future = Fut;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), CallError>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Req) -> Fut {
        let Self(Connector(server, serve)) = self;
        serve(server.calls.fetch_add(1, Ordering::Relaxed), request)
    }
}

type Serve = fn(u32, Req) -> std::pin::Pin<Box<dyn Future<Output = Result<u8, CallError>> + Send>>;

type ByHand = WriteSafety<Retry<Reconnect<Connector<Serve>>>, Req, u8>;

/// A stack fits in a struct, with its type written out.
struct Holder {
    stack: Stack<Connector<Serve>, Req, u8>,
    #[expect(dead_code, reason = "only its type matters")]
    child: Option<stdio::Client>,
    #[expect(dead_code, reason = "only its type matters")]
    mcp: Option<mcp::Client>,
    #[expect(dead_code, reason = "only its type matters")]
    by_hand: Option<ByHand>,
}

#[tokio::test(start_paused = true)]
async fn a_stack_fits_in_a_struct_and_is_used_by_reference_from_many_tasks() {
    let server = Server::new();
    let serve: Serve = |n, request| {
        Box::pin(async move {
            sleep(SECOND).await;
            if n == 3 { Err(CallError::closed("reset")) } else { Ok(*request) }
        })
    };
    let holder = Arc::new(Holder {
        stack: Stack::builder(Connector(server.clone(), serve)).build().unwrap(),
        child: None,
        mcp: None,
        by_hand: None,
    });
    let start = Instant::now();
    let tasks: Vec<_> = (0..8)
        .map(|n| {
            let holder = holder.clone();
            tokio::spawn(async move { holder.stack.send(Tagged::new(n, Effect::ReadOnly)).await })
        })
        .collect();
    for (n, task) in tasks.into_iter().enumerate() {
        assert_eq!(task.await.unwrap().unwrap(), n as u8);
    }
    // They overlap: one second for all but the one that is repeated.
    assert_eq!(start.elapsed(), 2 * SECOND);
    assert_eq!((server.connects.load(Ordering::Relaxed), holder.stack.generation()), (2, Some(2)));
    assert_eq!(holder.stack.in_flight(), 0);
}

#[test]
fn the_services_are_clone_send_sync_and_static() {
    fn is<S: Clone + Send + Sync + 'static>() {}
    fn sent<F: Send>(_: &F) {}
    is::<Stack<Connector<Serve>, Req, u8>>();
    is::<stdio::Client>();
    is::<mcp::Client>();
    is::<ByHand>();
    is::<Mocked>();
    let stack =
        Stack::builder(Connector(Server::new(), (|_, _| Box::pin(pending())) as Serve)).build().unwrap();
    sent(&stack.send(read()));
    sent(&stack.shutdown(SECOND));
    sent(&stack.clone().call(read()));
}

#[tokio::test(start_paused = true)]
async fn classify_on_the_stack_wins_over_the_tag() {
    let server = Server::new();
    let serve: Serve = |n, _| Box::pin(ready(if n == 0 { Err(CallError::ambiguous("x")) } else { Ok(1) }));
    let stack = Stack::builder(Connector(server.clone(), serve))
        .classify(|call| (call.method() == "pay").then_some(Effect::ReadOnly))
        .build()
        .unwrap();
    assert_eq!(stack.send(write()).await.unwrap(), 1);
    assert_eq!(server.calls.load(Ordering::Relaxed), 2);
}

#[tokio::test(start_paused = true)]
async fn classify_on_the_layer_counts_where_the_stacks_own_does_not_say() {
    for (own, calls) in [(None, 2), (Some(Effect::Write), 1)] {
        let server = Server::new();
        let serve: Serve =
            |n, _| Box::pin(ready(if n == 0 { Err(CallError::ambiguous("x")) } else { Ok(1) }));
        let stack = Stack::builder(Connector(server.clone(), serve))
            .classify(move |_| own)
            .writes(WriteSafetyLayer::refuse().classify(|_| Some(Effect::ReadOnly)))
            .build()
            .unwrap();
        let _ = stack.send(write()).await;
        assert_eq!(server.calls.load(Ordering::Relaxed), calls);
    }
}

#[tokio::test(start_paused = true)]
async fn every_event_comes_once() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = events.clone();
    let serve: Serve =
        |n, _| Box::pin(ready(if n % 2 == 0 { Err(CallError::closed("reset")) } else { Ok(1) }));
    let stack = Stack::builder(Connector(Server::new(), serve))
        .on_event(move |event| {
            seen.lock()
                .unwrap()
                .push(serde_json::to_value(event).unwrap()["event"].as_str().unwrap().to_owned());
        })
        .build()
        .unwrap();
    stack.send(read()).await.unwrap();
    assert_eq!(*events.lock().unwrap(), ["incident", "recovery", "call"]);
    events.lock().unwrap().clear();
    assert_eq!(stack.send(write()).await.unwrap_err().outcome(), Outcome::Unknown);
    assert_eq!(*events.lock().unwrap(), ["in_doubt"]);
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_drains_and_then_refuses() {
    let dropped = Arc::new(AtomicBool::new(false));
    struct Tell(Arc<AtomicBool>);
    impl Drop for Tell {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }
    let tell = dropped.clone();
    let connector = service_fn(move |()| {
        let open = Arc::new(Tell(tell.clone()));
        ready(Ok::<_, CallError>(service_fn(move |call: Req| {
            let open = open.clone();
            async move {
                sleep(SECOND).await;
                drop(open);
                Ok::<_, CallError>(*call)
            }
        })))
    });
    let stack = Stack::builder(connector).build().unwrap();
    let mut other = stack.clone();
    other.ready().await.unwrap();
    let mut calls = [task::spawn(stack.send(read())), task::spawn(stack.send(write()))];
    calls.iter_mut().for_each(|calling| assert_pending!(calling.poll()));
    assert_eq!(stack.in_flight(), 2);

    let mut shutdown = task::spawn(stack.shutdown(60 * SECOND));
    assert_pending!(shutdown.poll());
    for calling in [stack.send(write()), other.send(write())] {
        let error = assert_ready_err!(task::spawn(calling).poll());
        assert!(matches!(error.cause(), Cause::Refused(Refusal::Shutdown)));
        assert_eq!((error.outcome(), error.delivery()), (Outcome::NotDone, Delivery::NotSent));
    }
    let error = other.call(read()).await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::Shutdown)), "ready before the shutdown");

    advance(SECOND).await;
    for mut calling in calls {
        assert!(calling.is_woken());
        assert_eq!(tokio_test::assert_ready_ok!(calling.poll()), 1);
    }
    assert!(shutdown.is_woken());
    assert_eq!(shutdown.await, 0);
    assert_eq!(stack.generation(), None);
    assert_eq!(stack.shutdown(SECOND).await, 0);
    // A foreign connection closes with the last clone that used it.
    drop((stack, other));
    assert!(dropped.load(Ordering::Relaxed));
}

#[tokio::test(start_paused = true)]
async fn a_shutdown_ends_with_its_grace_and_reports_the_writes_that_it_cuts_off() {
    let events = Arc::new(Mutex::new(Vec::new()));
    let seen = events.clone();
    let (pipe, peer) = tokio::io::duplex(1 << 10);
    let pipe = Mutex::new(Some(pipe));
    let connector = service_fn(move |()| {
        let pipe = pipe.lock().unwrap().take();
        ready(pipe.map(jsonrpc::Client::new).ok_or("only one connection"))
    });
    let stack = Stack::builder(connector)
        .without_deadline()
        .on_event(move |event| {
            if let Event::InDoubt(report) = event {
                seen.lock().unwrap().push((report.method.clone(), report.outcome));
            }
        })
        .build()
        .unwrap();
    let stack = Arc::new(stack);
    let sender = stack.clone();
    let calling = tokio::spawn(async move { sender.send(jsonrpc::Request::new("pay", ()).unwrap()).await });
    tokio::task::yield_now().await;
    let start = Instant::now();
    assert_eq!(stack.shutdown(SECOND).await, 1);
    assert_eq!(start.elapsed(), SECOND);
    let error = calling.await.unwrap().unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(*events.lock().unwrap(), [("pay".to_owned(), Some(Outcome::Unknown))]);
    drop(peer);
}

#[tokio::test(start_paused = true)]
async fn a_doubt_is_settled_within_the_grace() {
    let server = Server::new();
    let serve: Serve = |n, call| {
        Box::pin(async move {
            sleep(SECOND).await;
            if n == 0 { Err(CallError::closed("reset")) } else { Ok(*call) }
        })
    };
    let stack = Stack::builder(Connector(server.clone(), serve))
        .check(|doubt: InDoubt<Req, u8>| async move {
            let seen = doubt.probe(read()).await?;
            Ok(doubt.landed(seen + 10))
        })
        .build()
        .unwrap();
    let mut calling = task::spawn(stack.send(write()));
    assert_pending!(calling.poll());
    let (cut_off, result) = tokio::join!(stack.shutdown(10 * SECOND), calling);
    assert_eq!((cut_off, result.unwrap()), (0, 11));
    assert_eq!(server.connects.load(Ordering::Relaxed), 2, "reconnected while it drained");
}

#[tokio::test(start_paused = true)]
async fn two_stacks_of_one_reconnect_layer_are_shut_down_apart() {
    let layer = ReconnectLayer::once();
    let serve: Serve = |_, call| Box::pin(ready(Ok(*call)));
    let make = || Stack::builder(Connector(Server::new(), serve)).reconnect(layer.clone()).build().unwrap();
    let (one, two) = (make(), make());
    one.send(read()).await.unwrap();
    assert_eq!((one.generation(), two.generation()), (Some(1), None));
    one.shutdown(SECOND).await;
    assert!(one.send(read()).await.is_err());
    two.send(read()).await.unwrap();
}

#[test]
fn a_wrong_value_is_an_error_of_build_that_names_it() {
    let serve: Serve = |_, call| Box::pin(ready(Ok(*call)));
    let builder = || Stack::builder(Connector(Server::new(), serve));
    let check = |_: InDoubt<Req, u8>| async { Err("no".into()) };
    let safety = || WriteSafetyLayer::new(check);
    let zero = Duration::ZERO;
    for (builder, name) in [
        (builder().deadline(zero), "deadline"),
        (builder().retry(RetryReadOnly.attempts(0)), "attempts"),
        (builder().retry(RetryReadOnly.attempt_timeout(zero)), "attempt_timeout"),
        (builder().writes(safety().attempt_timeout(zero)), "attempt_timeout"),
        (builder().writes(safety().quarantine(zero)), "quarantine"),
        (builder().writes(safety().check_timeout(zero)), "check_timeout"),
        (builder().writes(safety().max_checks(0)), "max_checks"),
        (builder().check(check).writes(safety()), "more than once"),
        (builder().reconnect(ReconnectLayer::once().connect_timeout(zero)), "connect_timeout"),
        (builder().reconnect(ReconnectLayer::once().crash_loop(0, SECOND)), "crash_loop"),
        (builder().reconnect(ReconnectLayer::once().max_waiters(0)), "max_waiters"),
    ] {
        let error = builder.build().unwrap_err().to_string();
        assert!(error.starts_with("wrong configuration: ") && error.contains(name), "{name}: {error}");
    }
    let unknown = || tokio::process::Command::new("goaround-no-such-program");
    let error = Stack::builder(stdio::child(unknown())).build().unwrap_err();
    assert!(error.to_string().contains("goaround-no-such-program"), "{error}");
    let error = Stack::builder(mcp::stdio(unknown())).build().unwrap_err();
    assert!(error.to_string().contains("goaround-no-such-program"), "{error}");
    builder().deadline(SECOND).without_deadline().build().unwrap();
}

#[test]
fn a_ready_made_check_that_cannot_work_is_an_error_of_build() {
    use mcp::{ToolRules, checks};

    type Layer = WriteSafetyLayer<jsonrpc::Request, jsonrpc::Response>;
    let stdio = |rules: ToolRules| {
        mcp::stdio(tokio::process::Command::new(std::env::current_exe().unwrap())).tools(rules)
    };
    let reads = || ToolRules::new().read_only(["find"]);
    let built = |rules: ToolRules, layer: Layer| {
        Stack::builder(stdio(rules)).writes(layer).build().map(drop).map_err(|error| error.to_string())
    };
    let read = || checks::read_back("add").by_tool("find");
    let some = |list, element, written| read().some(list, element, written);
    let resource = |uri| checks::read_back("add").by_resource(uri).same("/text", "/text");

    // RFC 6901: a pointer is empty, or begins with `/`.
    built(reads(), Layer::new(some("/notes", "", "/token"))).unwrap();
    built(reads(), Layer::new(resource("note://{/id}/{+/path}"))).unwrap();
    let odd = "no JSON pointer: it must begin with `/`";
    for (check, named) in [
        (some("structuredContent/notes", "/token", "/token"), "\"structuredContent/notes\""),
        (some("/notes", "token", "/token"), "\"token\""),
        (some("/notes", "/token", "token"), "\"token\""),
        (read().every("notes", "", "/tokens"), "\"notes\""),
        (read().same("found", "/text"), "\"found\""),
        (read().same("/found", "text"), "\"text\""),
        (read().line("{}", "text"), "\"text\""),
        (read().argument("id", "/id").same("", "/text"), "\"id\""),
        (read().argument("/id", "id").same("", "/text"), "\"id\""),
        (read().constant("max", 1).same("", "/text"), "\"max\""),
        (read().same("", "/text").absent_if_empty("notes"), "\"notes\""),
        (resource("note://{id}"), "\"id\""),
        (resource("note://{+path}"), "\"path\""),
    ] {
        let error = built(reads(), Layer::new(check)).unwrap_err();
        assert!(error.starts_with("wrong configuration: "), "{error}");
        assert!(error.contains(odd) && error.contains(named), "{named}: {error}");
    }
    for (check, named) in [
        (read().argument("", "/id").same("", "/text"), "in the place of all arguments"),
        (read().line("Message", "/text"), "has no place `{}` for the value"),
        (resource("note://{/id"), "a brace that is not closed"),
    ] {
        let error = built(reads(), Layer::new(check)).unwrap_err();
        assert!(error.contains(named), "{error}");
    }
    // One among several is enough.
    let several = read().same("", "/text").or(checks::read_back("set").by_tool("find").same("a", "/a"));
    assert!(built(reads(), Layer::new(several)).unwrap_err().contains("\"a\""));

    // What it reads by must be known to read, where nobody but the connector's rules can say so.
    let check = || Layer::new(read().same("", "/text"));
    let undeclared = "ToolRules::read_only([\"find\"])";
    for rules in [
        ToolRules::new(),
        ToolRules::new().idempotent(["find"]),
        reads().write(["find"]),
        ToolRules::new().trust_annotations_of(["get"]),
        ToolRules::new().trust_annotations().write(["find"]),
    ] {
        let error = built(rules, check()).unwrap_err();
        assert!(error.contains(undeclared), "{error}");
    }
    built(ToolRules::new().trust_annotations(), check()).unwrap();
    built(ToolRules::new().trust_annotations_of(["find"]), check()).unwrap();
    built(ToolRules::new(), check().classify(|_| None)).unwrap();
    Stack::builder(stdio(ToolRules::new())).writes(check()).classify(|_| None).build().unwrap();
}

#[tokio::test]
async fn without_a_stack_each_write_is_refused_whose_ready_made_check_cannot_work() {
    let check = mcp::checks::read_back("add").by_tool("find").some("notes", "", "/token");
    let answers =
        service_fn(|_: jsonrpc::Request| ready(jsonrpc::Response::new(1).map_err(CallError::not_sent)));
    let service = WriteSafetyLayer::new(check).layer(answers);
    let write = jsonrpc::Request::tool("add", serde_json::json!({ "token": "t" }));
    let error = service.oneshot(write).await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::Config(_))), "{error}");
    assert!(error.to_string().contains("JSON pointer"), "{error}");
}

/// A child that answers each call with its process id.
#[cfg(target_os = "linux")]
fn tells_its_pid(then: &str) -> tokio::process::Command {
    let mut command = tokio::process::Command::new("sh");
    let script = "read line; echo '{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":'$$'}'; ";
    command.arg("-c").arg(format!("{script}{then}"));
    command
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn after_a_shutdown_the_process_is_gone_whether_it_was_in_use_or_just_ending() {
    // The second closes its output and lives on until it is told to end.
    for then in ["read line", "exec 1>&-; exec sleep 60"] {
        let stack = Stack::builder(stdio::child(tells_its_pid(then))).build().unwrap();
        let answer = stack.send(jsonrpc::Request::new("pid", ()).unwrap().read_only()).await.unwrap();
        let process = std::path::PathBuf::from(format!("/proc/{}", answer.parse::<u32>().unwrap()));
        assert!(process.exists());
        if then != "read line" {
            // Its closure is noticed by the next that asks for readiness.
            sleep(Duration::from_millis(50)).await;
            let mut stack = stack.clone();
            stack.ready().await.unwrap();
            assert_eq!(stack.generation(), None);
        }
        assert_eq!(stack.shutdown(SECOND).await, 0);
        assert!(!process.exists(), "{then}");
    }
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn after_a_shutdown_during_a_connect_the_process_is_gone() {
    // The handshake is never answered, and the child heeds neither its closed input nor SIGTERM. The call
    // that connects waits, or has been given up.
    for given_up in [false, true] {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("pid");
        let mut command = tokio::process::Command::new("sh");
        let script = "trap '' TERM; echo $$ > \"$0\"; while :; do sleep 0.05; done";
        command.arg("-c").arg(script).arg(&file);
        let grace = Duration::from_millis(50);
        let connector = goaround::mcp::stdio(command).shutdown_grace(grace, grace);
        let stack = Stack::builder(connector).build().unwrap();
        let other = stack.clone();
        let call = tokio::spawn(async move {
            other.send(jsonrpc::Request::new("tools/list", ()).unwrap().read_only()).await
        });
        let process = loop {
            match std::fs::read_to_string(&file) {
                Ok(pid) if pid.ends_with('\n') => break format!("/proc/{}", pid.trim()),
                _ => sleep(Duration::from_millis(5)).await,
            }
        };
        if given_up {
            call.abort();
            assert!(call.await.is_err());
            stack.shutdown(SECOND).await;
        } else {
            stack.shutdown(Duration::ZERO).await;
            assert_eq!(call.await.unwrap().unwrap_err().outcome(), Outcome::NotDone);
        }
        assert!(!std::path::Path::new(&process).exists());
    }
}

// ----- the deadline covers everything

#[tokio::test(start_paused = true)]
async fn no_part_that_hangs_outlasts_the_deadline_and_the_error_says_what_was_known() {
    struct Hangs(&'static str, u32);
    impl Service<()> for Hangs {
        type Response = Mocked;
        type Error = BoxError;
        type Future = std::pin::Pin<Box<dyn Future<Output = Result<Mocked, BoxError>> + Send>>;

        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), BoxError>> {
            if self.0 == "connector readiness" {
                std::task::Poll::Pending
            } else {
                std::task::Poll::Ready(Ok(()))
            }
        }

        fn call(&mut self, (): ()) -> Self::Future {
            self.1 += 1;
            let (connection, mut handle) = mocked();
            match (self.0, self.1) {
                ("connect", _) | ("reconnect", 2..) => return Box::pin(pending()),
                ("backoff", 2..) | ("first backoff", _) => return Box::pin(ready(Err("refused".into()))),
                ("readiness", _) => handle.allow(0),
                _ => {}
            }
            let what = self.0;
            tokio::spawn(async move {
                let mut kept = Vec::new();
                while let Some((_, respond)) = handle.next_request().await {
                    match what {
                        "reaping" => respond.send_error(CallError::closed("eof").with_exit(pending())),
                        "reconnect" | "backoff" => respond.send_error(CallError::closed("eof")),
                        _ => kept.push(respond),
                    }
                }
            });
            Box::pin(ready(Ok(connection)))
        }
    }

    let at = 3 * SECOND;
    // What hangs, what is then known of a read and of a write, and when the call ends.
    for (what, of_read, of_write, ends) in [
        ("connector readiness", Outcome::NotDone, Outcome::NotDone, at),
        ("connect", Outcome::NotDone, Outcome::NotDone, at),
        ("readiness", Outcome::NotDone, Outcome::NotDone, at),
        ("attempt", Outcome::NoAnswer, Outcome::Unknown, at),
        ("reaping", Outcome::NoAnswer, Outcome::Unknown, at),
        ("reconnect", Outcome::NoAnswer, Outcome::Unknown, at),
        // A wait of known length that does not fit is not started.
        ("backoff", Outcome::NoAnswer, Outcome::Unknown, Duration::ZERO),
        ("first backoff", Outcome::NotDone, Outcome::NotDone, Duration::ZERO),
    ] {
        for (request, expected) in [(read(), of_read), (write(), of_write)] {
            let effect = Call::effect(&request);
            let backoff = ConstantBuilder::new().with_delay(10 * SECOND).without_max_times();
            let stack = Stack::builder(Hangs(what, 0))
                .deadline(at)
                .reconnect(ReconnectLayer::once().backoff(backoff))
                .check(|doubt: InDoubt<Req, u8>| async move {
                    doubt.probe(read()).await?;
                    Ok(doubt.not_landed_because("tested"))
                })
                .build()
                .unwrap();
            let start = Instant::now();
            let error = stack.send(request).await.unwrap_err();
            let took = start.elapsed();
            assert_eq!(error.outcome(), expected, "{what}, {effect:?}: {error}");
            assert!(took <= at, "{what}, {effect:?}: {took:?}");
            if effect == Effect::ReadOnly {
                // Apart from the waits between attempts.
                assert!(took >= ends && took < ends + SECOND, "{what}: {took:?}, {error}");
            }
            if what == "first backoff" {
                let error = stack.send(write()).await.unwrap_err();
                assert!(error.retry_after().is_some_and(|wait| wait > 9 * SECOND && wait <= 10 * SECOND));
                assert_eq!(error.outcome(), Outcome::NotDone);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_connect_timeout_within_the_deadline_is_a_connect_error() {
    let connector = service_fn(|()| pending::<Result<Mocked, CallError>>());
    let stack = Stack::builder(connector)
        .reconnect(ReconnectLayer::once().connect_timeout(SECOND))
        .retry(RetryReadOnly.attempts(1))
        .build()
        .unwrap();
    let error = stack.send(read()).await.unwrap_err();
    assert!(
        matches!(error.cause(), Cause::ConnectFailed(error) if matches!(**error, ConnectError::TimedOut(_)))
    );
}

// ----- foreign clients and errors

/// An own error type, with what only it knows.
#[derive(Debug)]
enum OwnError {
    Http(hyper::Error),
    Status(u16, String),
}

impl fmt::Display for OwnError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("own error")
    }
}

impl std::error::Error for OwnError {}

type HttpRequest = hyper::Request<Full<bytes::Bytes>>;

/// One HTTP/1 connection.
#[derive(Clone)]
struct Http(Arc<tokio::sync::Mutex<hyper::client::conn::http1::SendRequest<Full<bytes::Bytes>>>>);

impl Service<HttpRequest> for Http {
    type Response = String;
    type Error = OwnError;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<String, OwnError>> + Send>>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), OwnError>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: HttpRequest) -> Self::Future {
        let sender = self.0.clone();
        Box::pin(async move {
            let mut sender = sender.lock().await;
            sender.ready().await.map_err(OwnError::Http)?;
            let response = sender.send_request(request).await.map_err(OwnError::Http)?;
            let status = response.status();
            let body = response.into_body().collect().await.map_err(OwnError::Http)?.to_bytes();
            let text = String::from_utf8_lossy(&body).into_owned();
            if status.is_success() { Ok(text) } else { Err(OwnError::Status(status.as_u16(), text)) }
        })
    }
}

fn classify(error: OwnError) -> CallError {
    match &error {
        OwnError::Status(429, _) => CallError::not_processed(error),
        OwnError::Status(..) => CallError::answered(error),
        // Not one byte of it was sent.
        OwnError::Http(http) if http.is_canceled() => CallError::not_sent(error).connection_lost(),
        OwnError::Http(_) => CallError::closed(error),
    }
}

fn by_method(request: &HttpRequest) -> Effect {
    if request.method().is_safe() { Effect::ReadOnly } else { Effect::Write }
}

fn http(method: &str, path: &str) -> Tagged<HttpRequest> {
    let request = hyper::Request::builder().method(method).uri(path).header("host", "test");
    Tagged::by(request.body(Full::default()).unwrap(), by_method).named(format!("{method} {path}"))
}

#[tokio::test]
async fn a_hyper_client_and_an_own_error_go_in_and_the_own_error_comes_out() {
    let (served, connects) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let (server, counter) = (served.clone(), connects.clone());
    let connector = service_fn(move |()| {
        counter.fetch_add(1, Ordering::Relaxed);
        let server = server.clone();
        async move {
            let (ours, theirs) = tokio::io::duplex(1 << 14);
            let answers =
                hyper::service::service_fn(move |request: hyper::Request<hyper::body::Incoming>| {
                    let n = server.fetch_add(1, Ordering::Relaxed);
                    async move {
                        let status = match request.uri().path() {
                            // Ends the connection without an answer.
                            "/dies" if n == 0 => return Err("killed"),
                            "/pay" => return Err("killed"),
                            "/missing" => 404,
                            _ => 200,
                        };
                        let body = Full::new(bytes::Bytes::from(request.uri().path().to_owned()));
                        Ok(hyper::Response::builder().status(status).body(body).unwrap())
                    }
                });
            let theirs = hyper_util::rt::TokioIo::new(theirs);
            tokio::spawn(hyper::server::conn::http1::Builder::new().serve_connection(theirs, answers));
            let ours = hyper_util::rt::TokioIo::new(ours);
            let (sender, connection) = hyper::client::conn::http1::handshake(ours).await?;
            tokio::spawn(connection);
            let http = Http(Arc::new(tokio::sync::Mutex::new(sender)));
            let service = ServiceBuilder::new()
                .map_request(Tagged::into_inner)
                .map_err(classify as fn(OwnError) -> CallError)
                .service(http);
            Ok::<_, hyper::Error>(service)
        }
    });
    let stack = Stack::builder(connector).deadline(10 * SECOND).build().unwrap();
    assert_eq!(stack.send(http("GET", "/dies")).await.unwrap(), "/dies");
    assert_eq!((served.load(Ordering::Relaxed), connects.load(Ordering::Relaxed)), (2, 2));

    let error = stack.send(http("GET", "/missing")).await.unwrap_err();
    assert_eq!((error.outcome(), error.method()), (Outcome::Answered, "GET /missing"));
    assert!(error.get_ref::<OwnError>().is_some());
    let Ok(OwnError::Status(404, body)) = error.downcast::<OwnError>() else { panic!("the own error") };
    assert_eq!(body, "/missing");

    let error = stack.send(http("POST", "/pay")).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert!(matches!(error.downcast::<OwnError>(), Ok(OwnError::Http(_))));
    assert_eq!(stack.send(http("GET", "/ok")).await.unwrap(), "/ok");
    assert_eq!(connects.load(Ordering::Relaxed), 3);
}

// ----- connections that are not always ready

/// A stack over connections to a server that takes a second for each call and has room for one at a time.
macro_rules! room_for_one {
    () => {{
        let connector = service_fn(|()| {
            let slow = service_fn(|request: Req| async move {
                sleep(SECOND).await;
                Ok::<_, CallError>(*request)
            });
            ready(Ok::<_, CallError>(tower::limit::ConcurrencyLimit::new(slow, 1)))
        });
        let stack = Stack::builder(connector).writes(safety()).build().unwrap();
        stack.send(read()).await.unwrap();
        stack
    }};
}

#[tokio::test(start_paused = true)]
async fn calls_that_wait_for_room_on_their_connection_get_it_in_their_turn() {
    for call in [read, write] {
        let stack = Arc::new(room_for_one!());
        let start = Instant::now();
        let calls = [(); 5].map(|()| {
            let stack = Arc::clone(&stack);
            tokio::spawn(async move { stack.send(call()).await })
        });
        for call in calls {
            call.await.unwrap().unwrap();
        }
        assert_eq!(start.elapsed(), 5 * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn a_call_that_is_refused_keeps_no_room_on_the_connection() {
    for call in [read, write] {
        let stack = room_for_one!();
        let other = stack.clone();
        let refused = other.send(call().within(Duration::ZERO)).await.unwrap_err();
        assert_eq!(refused.delivery(), Delivery::NotSent);
        let start = Instant::now();
        stack.send(call()).await.unwrap();
        assert_eq!(start.elapsed(), SECOND);
    }
}

// ----- copies of the request

/// Counts the copies that are made of it.
#[derive(Default)]
struct Counted {
    made: Arc<AtomicU32>,
    /// As many as there are copies, and one.
    there: Arc<()>,
}

impl Clone for Counted {
    fn clone(&self) -> Self {
        self.made.fetch_add(1, Ordering::Relaxed);
        Self { made: Arc::clone(&self.made), there: Arc::clone(&self.there) }
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_is_copied_only_where_a_replay_may_follow_and_the_copy_goes_with_the_call() {
    type Writes = WriteSafetyLayer<Tagged<Counted>, ()>;
    let check = || Writes::new(|doubt: InDoubt<_, _>| async move { Ok::<_, BoxError>(doubt.not_landed()) });
    for (effect, writes, copies) in [
        (Effect::ReadOnly, Writes::refuse(), 1),
        (Effect::Write, Writes::refuse(), 0),
        (Effect::Idempotent, Writes::refuse(), 0),
        (Effect::Write, check(), 1),
        (Effect::Idempotent, Writes::refuse().replay_idempotent(), 1),
        (Effect::Write, Writes::refuse().trust(Evidence::TooManyRequests), 1),
    ] {
        let connector = service_fn(|()| async {
            Ok::<_, CallError>(service_fn(|_: Tagged<Counted>| async { Ok::<_, CallError>(()) }))
        });
        let stack = Stack::builder(connector).writes(writes).build().unwrap();
        // The first call connects, and the second finds a connection.
        for _ in 0..2 {
            let counted = Counted::default();
            let (made, there) = (Arc::clone(&counted.made), Arc::clone(&counted.there));
            let mut call = task::spawn(stack.send(Tagged::new(counted, effect)));
            while call.poll().is_pending() {
                tokio::task::yield_now().await;
            }
            assert_eq!(made.load(Ordering::Relaxed), copies, "{effect:?}");
            drop(call);
            assert_eq!(Arc::strong_count(&there), 1, "{effect:?}");
        }
    }
}

// ----- room on a connection

#[tokio::test(start_paused = true)]
async fn a_call_whose_time_is_up_before_it_reaches_the_connection_keeps_no_room_on_it() {
    let connector = service_fn(|()| {
        let slow = service_fn(|request: Req| async move {
            sleep(SECOND).await;
            Ok::<_, CallError>(*request)
        });
        ready(Ok::<_, CallError>(tower::limit::ConcurrencyLimit::new(slow, 1)))
    });
    let below = ReconnectLayer::once().layer(connector);
    // One handle on the connection stays with a worker, which lets a call through every ten seconds.
    let held_up = ServiceBuilder::new().buffer(4).rate_limit(1, 10 * SECOND).service(below.clone());
    let map: fn(BoxError) -> CallError = CallError::from_boxed;
    let writes = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(safety().attempt_timeout(SECOND * 2))
        .map_err(map)
        .service(held_up);
    writes.clone().oneshot(write()).await.unwrap();
    let late = tokio::spawn(writes.oneshot(write()));
    sleep(15 * SECOND).await;
    let start = Instant::now();
    below.oneshot(read().within(30 * SECOND)).await.unwrap();
    assert_eq!(start.elapsed(), SECOND);
    late.abort();
}

// ----- callbacks that ask the stack

type Asks = Arc<OnceLock<Box<dyn Fn() + Send + Sync>>>;

fn ask(asks: &Asks) {
    if let Some(ask) = asks.get() {
        ask();
    }
}

/// Calls over a stack whose callbacks all ask it something, and whose connection panics at a write.
fn calls_and_asks() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let asks = Asks::default();
    let [sink, classifier, key, connection] = [(); 4].map(|()| Arc::clone(&asks));
    let connection = service_fn(move |call: Req| {
        ask(&connection);
        assert!(!call.context().effect().unwrap().is_write(), "the connection's own panic");
        ready(Ok::<u8, CallError>(0))
    });
    let connector = service_fn(move |()| ready(Ok::<_, CallError>(connection.clone())));
    let writes = WriteSafetyLayer::refuse().conflict_key(move |_: &Req| {
        ask(&key);
        Some(7)
    });
    let builder = Stack::builder(connector).writes(writes).classify(move |_| {
        ask(&classifier);
        None
    });
    let events = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&events);
    let stack = builder.on_event(move |_| {
        count.fetch_add(1, Ordering::Relaxed);
        ask(&sink);
    });
    let stack = Arc::new(stack.build().unwrap());
    let weak = Arc::downgrade(&stack);
    let asking = AtomicBool::new(false);
    let _ = asks.set(Box::new(move || {
        // Once at a time: what it asks asks, too.
        if let (Some(stack), false) = (weak.upgrade(), asking.swap(true, Ordering::Relaxed)) {
            drop(stack.ledger());
            drop(Stack::clone(&stack));
            let _ = (stack.generation(), stack.in_flight(), format!("{stack:?}"));
            let mut sends = task::spawn(stack.send(read()));
            let _ = sends.poll();
            asking.store(false, Ordering::Relaxed);
        }
    }));
    for _ in 0..3 {
        runtime.block_on(stack.send(read())).unwrap();
        let panicked = catch_unwind(AssertUnwindSafe(|| runtime.block_on(stack.send(write()))));
        // The key is in doubt once it was.
        assert!(panicked.is_err() || panicked.unwrap().unwrap_err().outcome() == Outcome::NotDone);
    }
    assert_eq!(events.load(Ordering::Relaxed), 1);
    assert_eq!(stack.in_flight(), 0);
}

#[test]
fn callbacks_that_ask_the_stack_do_not_lock_it_up_also_when_a_connection_panics() {
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        calls_and_asks();
        done.send(()).unwrap();
    });
    // Much longer than it takes.
    assert_eq!(ended.recv_timeout(30 * SECOND), Ok(()), "the thread is locked up");
}

#[tokio::test(start_paused = true)]
async fn calls_by_reference_at_the_same_time_wait_for_their_own_connection_each() {
    // The first is not ready for a while; nobody else waits for that.
    let lab_is_open = Arc::new(AtomicBool::new(false));
    let handed_over = Arc::new(AtomicU32::new(0));
    let count = Arc::clone(&handed_over);
    let connection = service_fn(move |_: Req| {
        count.fetch_add(1, Ordering::Relaxed);
        let open = Arc::clone(&lab_is_open);
        async move {
            if !open.swap(true, Ordering::Relaxed) {
                pending::<()>().await;
            }
            Ok::<u8, CallError>(1)
        }
    });
    let stack = Stack::builder(service_fn(move |()| ready(Ok::<_, CallError>(connection.clone()))));
    let stack = stack.build().unwrap();
    let mut hangs = task::spawn(stack.send(read()));
    assert_pending!(hangs.poll());
    for _ in 0..3 {
        assert_eq!(stack.send(read()).await.unwrap(), 1);
    }
    assert_eq!((stack.in_flight(), handed_over.load(Ordering::Relaxed)), (1, 4));
    drop(hangs);
    assert_eq!(stack.in_flight(), 0);
    assert_eq!(stack.shutdown(SECOND).await, 0);
    assert_eq!(stack.send(read()).await.unwrap_err().outcome(), Outcome::NotDone);
}
