//! What the stack costs around a service that is ready at once, side by side in one run.
//!
//! `cargo bench --bench overhead` prints a table; with `-- --json` the last line is one object. Each figure
//! is the median of rounds taken in turn, so that a machine that slows down slows all of them down.

use std::{
    future::{Ready, ready},
    hint::black_box,
    task::{Context, Poll, Waker},
    time::{Duration, Instant},
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Effect, InDoubt, ReconnectLayer, RetryReadOnly, Stack, Tagged,
    Verdict, WriteSafetyLayer,
};
use tower::{Service, ServiceBuilder, ServiceExt, retry::budget::TpsBudget};

const ROUNDS: usize = 15;
const CALLS: u32 = 100_000;

/// Answers at once.
#[derive(Clone)]
struct Echo;

impl Service<Tagged<u64>> for Echo {
    type Response = u64;
    type Error = CallError;
    type Future = Ready<Result<u64, CallError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Tagged<u64>) -> Self::Future {
        ready(Ok(*request))
    }
}

/// Retries nothing that succeeds, as a user of tower's `Retry` would write it.
#[derive(Clone)]
struct Reads(std::sync::Arc<TpsBudget>);

impl<E> tower::retry::Policy<Tagged<u64>, u64, E> for Reads {
    type Future = Ready<()>;

    fn retry(&mut self, _: &mut Tagged<u64>, result: &mut Result<u64, E>) -> Option<Ready<()>> {
        use tower::retry::budget::Budget;
        match result {
            Ok(_) => {
                self.0.deposit();
                None
            }
            Err(_) => self.0.withdraw().then(|| ready(())),
        }
    }

    fn clone_request(&mut self, request: &Tagged<u64>) -> Option<Tagged<u64>> {
        request.try_clone()
    }
}

struct Row {
    name: &'static str,
    samples: Vec<f64>,
    allocations: f64,
    run: Box<dyn FnMut(u32)>,
}

fn row<S>(name: &'static str, effect: Effect, mut service: S) -> Row
where
    S: Service<Tagged<u64>, Response = u64> + 'static,
{
    let run = move |calls: u32| {
        let mut cx = Context::from_waker(Waker::noop());
        for n in 0..calls {
            assert!(matches!(service.poll_ready(&mut cx), Poll::Ready(Ok(()))));
            let call = std::pin::pin!(service.call(Tagged::new(u64::from(n), effect)));
            let Poll::Ready(Ok(answer)) = call.poll(&mut cx) else { panic!("it is ready at once") };
            black_box(answer);
        }
    };
    Row { name, samples: Vec::new(), allocations: 0.0, run: Box::new(run) }
}

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let _in_runtime = runtime.enter();

    let connector = || tower::service_fn(|()| ready(Ok::<_, CallError>(Echo)));
    let check =
        |doubt: InDoubt<Tagged<u64>, u64>| async move { Ok::<Verdict<u64>, BoxError>(doubt.unknown("")) };
    let stack = || Stack::builder(connector()).deadline(Duration::from_secs(30));
    let tower = ServiceBuilder::new()
        .timeout(Duration::from_secs(30))
        .retry(Reads(std::sync::Arc::new(TpsBudget::default())))
        .timeout(Duration::from_secs(10))
        .service(Echo);
    let read = Effect::ReadOnly;
    let mut rows = [
        row("bare", read, Echo),
        row(
            "deadline",
            read,
            ServiceBuilder::new().layer(DeadlineLayer::new(Duration::from_secs(30))).service(Echo),
        ),
        row("write safety", read, ServiceBuilder::new().layer(WriteSafetyLayer::refuse()).service(Echo)),
        row("retry", read, ServiceBuilder::new().layer(RetryReadOnly).service(Echo)),
        row("reconnect", read, ServiceBuilder::new().layer(ReconnectLayer::once()).service(connector())),
        row("stack, read", read, stack().build().expect("a stack")),
        row("stack, write refused", Effect::Write, stack().build().expect("a stack")),
        row("stack, write with check", Effect::Write, stack().check(check).build().expect("a stack")),
        row("tower's Timeout<Retry<Timeout>>", read, tower.map_err(|error| error)),
    ];
    for row in &mut rows {
        (row.run)(1_000); // the first connect, and warm caches
        let info = allocation_counter::measure(|| (row.run)(1_000));
        row.allocations = info.count_total as f64 / 1_000.0;
    }
    for _ in 0..ROUNDS {
        for row in &mut rows {
            let start = Instant::now();
            (row.run)(CALLS);
            row.samples.push(start.elapsed().as_nanos() as f64 / f64::from(CALLS));
        }
    }
    let medians: Vec<f64> = rows.iter().map(|row| median(row.samples.clone())).collect();
    let over = |samples: &[f64], bare: &[f64]| median(samples.iter().zip(bare).map(|(a, b)| a - b).collect());
    println!("{:<34} {:>9} {:>11} {:>12}", "service", "ns a call", "over bare", "allocations");
    for (row, ns) in rows.iter().zip(&medians) {
        let over = over(&row.samples, &rows[0].samples);
        println!("{:<34} {ns:>9.1} {over:>11.1} {:>12.2}", row.name, row.allocations);
    }
    let (stack, tower) = (&rows[5], &rows[8]);
    let pairs = stack.samples.iter().zip(&tower.samples).zip(&rows[0].samples);
    let ratio = median(pairs.map(|((ours, theirs), bare)| (ours - bare) / (theirs - bare)).collect());
    println!("a read through the stack costs {ratio:.2} times what it costs through tower's");
    if json {
        println!(
            "{}",
            serde_json::json!({
                "ready_read_ns": over(&stack.samples, &rows[0].samples),
                "ready_read_allocations": stack.allocations,
                "ratios": { "ready_read_vs_tower": ratio },
            })
        );
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
