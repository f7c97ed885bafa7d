//! What the stack costs, side by side with its peers in one run.
//!
//! `cargo bench --bench overhead` prints tables; with `-- --json` the last line is one object. Each figure is the
//! median of rounds in which all rows take turns, so that a machine that slows down slows all of them down, and
//! counts the processor's time, so that what else runs on the machine does not count. Ratios are medians of
//! those of the rounds, of what comes on top of the bare service.
//!
//! `-- --only stack` repeats one row, for a profiler.
//!
//! - The *floor* is what a hand-written future costs that has to do the same: an instant as the deadline, the
//!   request retained for another attempt, one reference count, a look at the connection's number and at the
//!   budget, a timer once it is pending.
//! - Peers get the request that they would have without this crate, a bare `u64`; tower's also the one that the
//!   stack gets.

use std::{
    future::{Future, Ready, ready},
    hint::black_box,
    pin::{Pin, pin},
    sync::{
        Arc, Barrier,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Effect, InDoubt, ReconnectLayer, RetryReadOnly, Stack, Tagged,
    Verdict, WriteSafetyLayer,
};
use pin_project::pin_project;
use tokio::{
    runtime::{Builder, Runtime},
    time::{Instant, Sleep, sleep_until},
};
use tower::{
    Service, ServiceBuilder, ServiceExt,
    retry::budget::{Budget, TpsBudget},
};
use tower_resilience_reconnect::ReconnectLayer as TheirReconnectLayer;
use tower_resilience_retry::RetryLayer;
use tower_resilience_timelimiter::TimeLimiterLayer;

const LIMIT: Duration = Duration::from_secs(30);

/// The processor time that this thread has used.
fn busy() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// The processor time that this process has used.
fn all_busy() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

// ===== The services =====

/// Answers a request with itself, at once or after having been pending once.
#[derive(Clone, Copy)]
struct Echo {
    pending: bool,
}

#[derive(Clone)]
struct Answer<R> {
    answer: Option<R>,
    pending: bool,
}

impl<R: Unpin> Future for Answer<R> {
    type Output = Result<R, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        if std::mem::take(&mut self.pending) {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(Ok(self.answer.take().expect("polled after completion")))
    }
}

impl<R: Unpin> Service<Tagged<R>> for Echo {
    type Response = R;
    type Error = CallError;
    type Future = Answer<R>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Tagged<R>) -> Answer<R> {
        Answer { answer: Some(request.into_inner()), pending: self.pending }
    }
}

impl Service<u64> for Echo {
    type Response = u64;
    type Error = CallError;
    type Future = Answer<u64>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: u64) -> Answer<u64> {
        Answer { answer: Some(request), pending: self.pending }
    }
}

// ===== The floor =====

struct Kept {
    /// As a budget that fails no call while it is full.
    tokens: AtomicU64,
    /// The number of the connection in use.
    current: AtomicU64,
}

struct Floor<S> {
    inner: S,
    kept: Arc<Kept>,
}

#[pin_project]
struct FloorFuture<F, R> {
    #[pin]
    attempt: F,
    kept: Arc<Kept>,
    request: Option<R>,
    deadline: Instant,
    #[pin]
    timer: Option<Sleep>,
}

impl<S> Floor<S> {
    fn new(inner: S) -> Self {
        Self { inner, kept: Arc::new(Kept { tokens: AtomicU64::new(10), current: AtomicU64::new(1) }) }
    }
}

impl<S, R> Service<Tagged<R>> for Floor<S>
where
    S: Service<Tagged<R>, Error = CallError>,
{
    type Response = S::Response;
    type Error = CallError;
    type Future = FloorFuture<S::Future, Tagged<R>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Tagged<R>) -> Self::Future {
        let deadline = Instant::now() + LIMIT;
        let copy = match request.effect() {
            Effect::ReadOnly => request.try_clone(),
            _ => None,
        };
        assert_eq!(self.kept.current.load(Ordering::Acquire), 1);
        let kept = Arc::clone(&self.kept);
        FloorFuture { attempt: self.inner.call(request), kept, request: copy, deadline, timer: None }
    }
}

impl<F, R, Res> Future for FloorFuture<F, R>
where
    F: Future<Output = Result<Res, CallError>>,
{
    type Output = F::Output;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        if let Some(timer) = this.timer.as_mut().as_pin_mut()
            && timer.poll(cx).is_ready()
        {
            return Poll::Ready(Err(CallError::ambiguous("late")));
        }
        match this.attempt.poll(cx) {
            Poll::Ready(Ok(answer)) => {
                if this.kept.tokens.load(Ordering::Relaxed) < 10 {
                    this.kept.tokens.fetch_add(1, Ordering::Relaxed);
                }
                Poll::Ready(Ok(answer))
            }
            Poll::Ready(Err(error)) => {
                // Another attempt would be made from it here.
                *this.request = None;
                Poll::Ready(Err(error))
            }
            Poll::Pending => {
                if this.timer.is_none() {
                    this.timer.set(Some(sleep_until(*this.deadline)));
                    if let Some(timer) = this.timer.as_pin_mut() {
                        ready!(timer.poll(cx));
                        return Poll::Ready(Err(CallError::ambiguous("late")));
                    }
                }
                Poll::Pending
            }
        }
    }
}

// ===== The stacks =====

fn connector(
    echo: Echo,
) -> impl Service<(), Response = Echo, Error = CallError, Future: Send> + Clone + Send {
    tower::service_fn(move |()| ready(Ok::<_, CallError>(echo)))
}

macro_rules! stack {
    ($echo:expr) => {
        Stack::builder(connector($echo)).deadline(LIMIT)
    };
}

/// Retries nothing that succeeds, as a user of tower's `Retry` would write it.
#[derive(Clone)]
struct Reads(Arc<TpsBudget>);

trait Copied: Sized {
    fn copied(&self) -> Option<Self>;
}

impl Copied for u64 {
    fn copied(&self) -> Option<Self> {
        Some(*self)
    }
}

impl<R> Copied for Tagged<R> {
    fn copied(&self) -> Option<Self> {
        self.try_clone()
    }
}

impl<R: Copied, Res, E> tower::retry::Policy<R, Res, E> for Reads {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut R, result: &mut Result<Res, E>) -> Option<Ready<()>> {
        match result {
            Ok(_) => {
                self.0.deposit();
                None
            }
            Err(_) => self.0.withdraw().then(|| ready(())),
        }
    }

    fn clone_request(&mut self, request: &R) -> Option<R> {
        request.copied()
    }
}

macro_rules! towers {
    ($echo:expr) => {
        ServiceBuilder::new()
            .timeout(LIMIT)
            .retry(Reads(Arc::new(TpsBudget::default())))
            .timeout(LIMIT / 3)
            .service($echo)
    };
}

macro_rules! resiliences {
    ($echo:expr) => {{
        let echo = $echo;
        ServiceBuilder::new()
            .layer(TimeLimiterLayer::slow().build())
            .layer(RetryLayer::exponential_backoff().build())
            .layer(TheirReconnectLayer::with_defaults())
            .service(tower::service_fn(move |()| ready(Ok::<_, CallError>(echo))))
    }};
}

// ===== Rows =====

struct Row {
    name: &'static str,
    /// The row of the bare service.
    bare: &'static str,
    calls: u32,
    samples: Vec<f64>,
    allocations: f64,
    run: Box<dyn FnMut(u32)>,
}

/// Calls one after the other, polled by hand: what the runtime costs is in no row.
fn row<S, R>(
    name: &'static str,
    bare: &'static str,
    runtime: &Runtime,
    make: impl Fn(u64) -> R + 'static,
    mut service: S,
) -> Row
where
    S: Service<R, Error: std::fmt::Debug> + 'static,
    R: 'static,
{
    // Connected.
    runtime.block_on(async {
        for n in 0..2 {
            std::future::poll_fn(|cx| service.poll_ready(cx)).await.expect("ready");
            service.call(make(n)).await.expect("an answer");
        }
    });
    let run = move |calls: u32| {
        let mut cx = Context::from_waker(Waker::noop());
        for n in 0..calls {
            assert!(matches!(service.poll_ready(&mut cx), Poll::Ready(Ok(()))));
            let mut call = pin!(service.call(make(u64::from(n))));
            loop {
                match call.as_mut().poll(&mut cx) {
                    Poll::Ready(Ok(answer)) => break drop(black_box(answer)),
                    Poll::Ready(Err(error)) => panic!("{error:?}"),
                    Poll::Pending => {}
                }
            }
        }
    };
    Row { name, bare, calls: 20_000, samples: Vec::new(), allocations: 0.0, run: Box::new(run) }
}

fn read(n: u64) -> Tagged<u64> {
    Tagged::new(n, Effect::ReadOnly)
}

fn write(n: u64) -> Tagged<u64> {
    Tagged::new(n, Effect::Write)
}

/// The layers in the order of [`LAYERS`]: all four by `ServiceBuilder`, and each alone.
fn layers(runtime: &Runtime, names: [&'static str; 5], bare: &'static str, echo: Echo) -> [Row; 5] {
    let deadline = || ServiceBuilder::new().layer(DeadlineLayer::new(LIMIT));
    let writes = || ServiceBuilder::new().layer(WriteSafetyLayer::refuse());
    let reconnecting = || ServiceBuilder::new().layer(ReconnectLayer::once());
    let all = deadline()
        .layer(WriteSafetyLayer::refuse())
        .layer(RetryReadOnly)
        .layer(ReconnectLayer::once())
        .service(connector(echo));
    [
        row(names[0], bare, runtime, read, all),
        row(names[1], bare, runtime, read, deadline().service(echo)),
        row(names[2], bare, runtime, read, writes().service(echo)),
        row(names[3], bare, runtime, read, ServiceBuilder::new().layer(RetryReadOnly).service(echo)),
        row(names[4], bare, runtime, read, reconnecting().service(connector(echo))),
    ]
}

const LAYERS: [&str; 5] = [
    "four layers by ServiceBuilder",
    "deadline alone",
    "write safety alone",
    "retry alone",
    "reconnect alone",
];
const PENDING_LAYERS: [&str; 5] = [
    "pending: four layers by ServiceBuilder",
    "pending: deadline alone",
    "pending: write safety alone",
    "pending: retry alone",
    "pending: reconnect alone",
];

fn rows(runtime: &Runtime) -> Vec<Row> {
    let check =
        |doubt: InDoubt<Tagged<u64>, u64>| async move { Ok::<Verdict<u64>, BoxError>(doubt.unknown("")) };
    let (now, later) = (Echo { pending: false }, Echo { pending: true });
    let text: Arc<str> = Arc::from("tools/call");
    let arc = move |_| Tagged::new(Arc::clone(&text), Effect::ReadOnly);
    let mut rows = vec![
        row("bare", "bare", runtime, read, now),
        row("floor", "bare", runtime, read, Floor::new(now)),
        row("stack", "bare", runtime, read, stack!(now).build().expect("a stack")),
        row(
            "stack, on_event",
            "bare",
            runtime,
            read,
            stack!(now).on_event(|event| _ = black_box(event)).build().expect("a stack"),
        ),
        row("tower, same request", "bare", runtime, read, towers!(now)),
        row("bare u64", "bare u64", runtime, |n| n, now),
        row("tower", "bare u64", runtime, |n| n, towers!(now)),
        row("tower-resilience", "bare u64", runtime, |n| n, resiliences!(now)),
        row("bare, Arc", "bare, Arc", runtime, arc.clone(), now),
        row("floor, Arc", "bare, Arc", runtime, arc.clone(), Floor::new(now)),
        row("stack, Arc", "bare, Arc", runtime, arc.clone(), stack!(now).build().expect("a stack")),
        row("tower, Arc", "bare, Arc", runtime, arc, towers!(now)),
        row("write: floor", "bare", runtime, write, Floor::new(now)),
        row("write: no check", "bare", runtime, write, stack!(now).build().expect("a stack")),
        row("write: check", "bare", runtime, write, stack!(now).check(check).build().expect("a stack")),
        row("pending: bare", "pending: bare", runtime, read, later),
        row("pending: floor", "pending: bare", runtime, read, Floor::new(later)),
        row("pending: stack", "pending: bare", runtime, read, stack!(later).build().expect("a stack")),
        row(
            "pending: write, no check",
            "pending: bare",
            runtime,
            write,
            stack!(later).build().expect("a stack"),
        ),
        row(
            "pending: write, check",
            "pending: bare",
            runtime,
            write,
            stack!(later).check(check).build().expect("a stack"),
        ),
        row("pending: tower, same request", "pending: bare", runtime, read, towers!(later)),
        row("pending: bare u64", "pending: bare u64", runtime, |n| n, later),
        row("pending: tower", "pending: bare u64", runtime, |n| n, towers!(later)),
        row("pending: tower-resilience", "pending: bare u64", runtime, |n| n, resiliences!(later)),
    ];
    rows.extend(layers(runtime, LAYERS, "bare", now));
    rows.extend(layers(runtime, PENDING_LAYERS, "pending: bare", later));
    rows
}

// ===== Clones =====

/// Ready calls over clones on so many threads at once: processor time of a call.
fn on_threads<S>(stack: &S, make: fn(u64) -> Tagged<u64>, threads: usize) -> f64
where
    S: Service<Tagged<u64>, Response = u64, Error = CallError> + Clone + Send,
{
    const CALLS: u64 = 200_000;
    let barrier = Barrier::new(threads);
    let work = |mut stack: S| {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let _in_runtime = runtime.enter();
        let mut cx = Context::from_waker(Waker::noop());
        let mut call = |n| {
            assert!(matches!(stack.poll_ready(&mut cx), Poll::Ready(Ok(()))));
            let Poll::Ready(Ok(answer)) = pin!(stack.call(make(n))).poll(&mut cx) else { panic!("ready") };
            black_box(answer);
        };
        (0..1_000).for_each(&mut call);
        barrier.wait();
        let start = busy();
        (0..CALLS).for_each(&mut call);
        (busy() - start).as_nanos() as f64 / CALLS as f64
    };
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..threads)
            .map(|_| {
                let stack = stack.clone();
                scope.spawn(|| work(stack))
            })
            .collect();
        all.into_iter().map(|thread| thread.join().expect("no panic")).sum::<f64>() / threads as f64
    })
}

/// Calls that are pending once, by so many tasks with clones of their own: processor time of a call, the
/// runtime's included.
fn by_tasks<S, R>(runtime: &Runtime, service: &S, make: fn(u64) -> R, tasks: u32) -> f64
where
    S: Service<R, Response = u64, Error: std::fmt::Debug + Send, Future: Send> + Clone + Send + 'static,
    R: Send + 'static,
{
    const CALLS: u32 = 25_600;
    let start = all_busy();
    runtime.block_on(async {
        let mut all = tokio::task::JoinSet::new();
        for _ in 0..tasks {
            let mut service = service.clone();
            all.spawn(async move {
                for n in 0..CALLS / tasks {
                    let call = service.ready().await.expect("ready").call(make(u64::from(n)));
                    black_box(call.await.expect("an answer"));
                }
            });
        }
        all.join_all().await;
    });
    (all_busy() - start).as_nanos() as f64 / f64::from(CALLS)
}

// ===== Figures =====

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Figures(Vec<Row>);

impl Figures {
    fn row(&self, name: &str) -> &Row {
        self.0.iter().find(|row| row.name == name).expect("a row")
    }

    /// What each round's sample has on top of its bare service's.
    fn overheads(&self, name: &str) -> Vec<f64> {
        let row = self.row(name);
        row.samples.iter().zip(&self.row(row.bare).samples).map(|(all, bare)| all - bare).collect()
    }

    fn over(&self, name: &str) -> f64 {
        median(self.overheads(name))
    }

    fn ratio(&self, name: &str, other: &str) -> f64 {
        median(self.overheads(name).iter().zip(self.overheads(other)).map(|(a, b)| a / b).collect())
    }
}

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _in_runtime = runtime.enter();
    let mut rows = rows(&runtime);
    if let Some(only) = std::env::args().skip_while(|arg| arg != "--only").nth(1) {
        let row = rows.iter_mut().find(|row| row.name == only).expect("the name of a row");
        return (row.run)(30_000_000);
    }
    for row in &mut rows {
        (row.run)(1_000);
        let info = allocation_counter::measure(|| (row.run)(1_000));
        row.allocations = info.count_total as f64 / 1_000.0;
    }
    let mut threads = [const { Vec::new() }; 4];
    let check =
        |doubt: InDoubt<Tagged<u64>, u64>| async move { Ok::<Verdict<u64>, BoxError>(doubt.unknown("")) };
    let shared = stack!(Echo { pending: false }).check(check).build().expect("a stack");
    runtime.block_on(shared.send(read(0))).expect("an answer");
    // As in a program that runs, a timer is due before those of the calls: to arm one of these wakes nobody, which
    // would be a system call for each.
    let mut earlier = Box::pin(tokio::time::sleep(LIMIT / 2));
    let wait = tokio::time::timeout(Duration::from_millis(1), &mut earlier);
    runtime.block_on(wait).expect_err("it takes longer");
    for _ in 0..31 {
        for row in &mut rows {
            let start = busy();
            (row.run)(row.calls);
            row.samples.push((busy() - start).as_nanos() as f64 / f64::from(row.calls));
        }
    }
    for _ in 0..9 {
        let [one, two, one_write, two_writes] = &mut threads;
        for (samples, count) in [(one, 1), (two, 2)] {
            samples.push(on_threads(&shared, read, count));
        }
        for (samples, count) in [(one_write, 1), (two_writes, 2)] {
            samples.push(on_threads(&shared, write, count));
        }
    }
    drop(_in_runtime);

    let figures = Figures(rows);
    println!("{:<38} {:>9} {:>11} {:>12}", "one call", "ns", "over bare", "allocations");
    for row in &figures.0 {
        let (ns, over) = (median(row.samples.clone()), figures.over(row.name));
        println!("{:<38} {ns:>9.1} {over:>11.1} {:>12.2}", row.name, row.allocations);
    }

    let mut tasks = Vec::new();
    let later = Echo { pending: true };
    let stack = stack!(later).check(check).build().expect("a stack");
    let (tower, resilience) = (towers!(later), resiliences!(later));
    let multi = Builder::new_multi_thread().worker_threads(2).enable_all().build().expect("a runtime");
    println!(
        "\n{:<32} {:>9} {:>9} {:>9} {:>9} {:>17}",
        "pending once, in a runtime, ns", "bare", "read", "write", "tower", "tower-resilience"
    );
    for (kind, runtime) in [("current-thread", &runtime), ("multi-thread", &multi)] {
        for count in [1, 2, 64] {
            let mut samples = [const { Vec::new() }; 5];
            for _ in 0..7 {
                samples[0].push(by_tasks(runtime, &later, read, count));
                samples[1].push(by_tasks(runtime, &stack, read, count));
                samples[2].push(by_tasks(runtime, &stack, write, count));
                samples[3].push(by_tasks(runtime, &tower, read, count));
                samples[4].push(by_tasks(runtime, &resilience, |n| n, count));
            }
            let [bare, stack, writes, tower, resilience] = samples.map(median);
            println!(
                "{:<32} {bare:>9.0} {stack:>9.0} {writes:>9.0} {tower:>9.0} {resilience:>17.0}",
                format!("{kind}, {count} tasks")
            );
            tasks.push(serde_json::json!({
                "runtime": kind, "tasks": count, "bare_ns": bare, "stack_ns": stack, "write_ns": writes,
                "tower_ns": tower, "tower_resilience_ns": resilience,
            }));
        }
    }
    let [one, two, one_write, two_writes] = &threads;
    let two_vs_one =
        |two: &[f64], one: &[f64]| median(two.iter().zip(one).map(|(two, one)| two / one).collect());
    let (two_vs_one, two_writes_vs_one) = (two_vs_one(two, one), two_vs_one(two_writes, one_write));
    let [one, two, one_write, two_writes] =
        [one, two, one_write, two_writes].map(|samples| median(samples.clone()));
    println!("\nclones on threads, ns a read: {one:.1} on one, {two:.1} on each of two");
    println!("a write with a check: {one_write:.1} on one, {two_writes:.1} on each of two");

    let names = [
        ("ready_read_vs_floor", "stack", "floor"),
        ("ready_read_vs_tower", "stack", "tower"),
        ("ready_read_vs_tower_same_request", "stack", "tower, same request"),
        ("ready_read_vs_tower_resilience", "stack", "tower-resilience"),
        ("ready_read_arc_vs_floor", "stack, Arc", "floor, Arc"),
        ("ready_read_arc_vs_tower", "stack, Arc", "tower, Arc"),
        ("four_layers_vs_tower", "four layers by ServiceBuilder", "tower"),
        ("pending_read_vs_floor", "pending: stack", "pending: floor"),
        ("pending_read_vs_tower", "pending: stack", "pending: tower"),
        ("pending_read_vs_tower_resilience", "pending: stack", "pending: tower-resilience"),
    ];
    let mut ratios = serde_json::Map::new();
    ratios.insert("two_threads_vs_one".into(), two_vs_one.into());
    ratios.insert("two_threads_vs_one_write".into(), two_writes_vs_one.into());
    for (key, name, other) in names {
        ratios.insert(key.into(), figures.ratio(name, other).into());
    }
    println!();
    for (key, value) in &ratios {
        println!("{key:<40} {:.2}", value.as_f64().unwrap_or_default());
    }
    if json {
        let rows: Vec<_> = figures
            .0
            .iter()
            .map(|row| {
                serde_json::json!({
                    "name": row.name,
                    "ns": median(row.samples.clone()),
                    "over_bare_ns": figures.over(row.name),
                    "allocations": row.allocations,
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({
                "ready_read_ns": figures.over("stack"),
                "ready_read_allocations": figures.row("stack").allocations,
                "write_check_ns": figures.over("write: check"),
                "write_check_allocations": figures.row("write: check").allocations,
                "pending_read_ns": figures.over("pending: stack"),
                "ratios": ratios,
                "rows": rows,
                "tasks": tasks,
                "threads_ns": [one, two],
                "threads_write_ns": [one_write, two_writes],
            })
        );
    }
}
