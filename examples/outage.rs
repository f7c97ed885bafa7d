//! An outage, simulated: calls come at a server whatever becomes of them, its capacity drops for ten seconds, and
//! what its clients do about their time-outs decides whether it comes back.
//!
//! `cargo run --release --example outage` prints a table; `-- --json` adds the same as one object on the last line,
//! `-- --svg FILE` draws it.
//!
//! The server works off its queue in order, also what nobody waits for any more. It can do 400 calls a second and is
//! asked for 200, at random; from second 10 to 20 it can do 40. A call gives up after a second, and then it depends:
//!
//! - *no retries*: that was it;
//! - *naive*: three more times, at once;
//! - *tower*: its `Retry` with its default backoff and its default budget, `TpsBudget`, three more times at most;
//! - *tower-resilience*: its `RetryLayer::exponential_backoff()`;
//! - *goaround*: the stack with its defaults and that attempt timeout.
//!
//! There are ten clients, each with a budget of its own. Time is tokio's paused clock, so that a minute and a half
//! takes a moment and a seed always says the same.

use std::{
    future::Future,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use goaround::{CallError, Effect, RetryReadOnly, Stack, Tagged};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until, timeout},
};
use tower::{
    BoxError, Service, ServiceBuilder, ServiceExt,
    retry::{
        Policy,
        backoff::{Backoff, ExponentialBackoff, ExponentialBackoffMaker, MakeBackoff},
        budget::{Budget, TpsBudget},
    },
    util::BoxCloneSyncService,
};

#[path = "svg/mod.rs"]
mod svg;

const SECONDS: usize = 90;
const OUTAGE: (f64, f64) = (10.0, 20.0);
const CALLS_PER_SECOND: f64 = 200.0;
const CLIENTS: usize = 10;
const SEEDS: u64 = 5;
const PATIENCE: Duration = Duration::from_secs(1);

// ===== The server =====

#[derive(Clone)]
struct Server(Arc<Mutex<State>>);

struct State {
    start: Instant,
    /// When it will have worked off what is in its queue, in seconds from the start.
    free_at: f64,
    random: fastrand::Rng,
    /// How many calls came in each second.
    came: Vec<f64>,
}

fn capacity(at: f64) -> f64 {
    if (OUTAGE.0..OUTAGE.1).contains(&at) { 40.0 } else { 400.0 }
}

/// When so much work that begins then is done.
fn done_at(mut at: f64, mut work: f64) -> f64 {
    loop {
        let change = [OUTAGE.0, OUTAGE.1].into_iter().find(|change| *change > at).unwrap_or(f64::INFINITY);
        let until_then = (change - at) * capacity(at);
        if work <= until_then {
            return at + work / capacity(at);
        }
        (at, work) = (change, work - until_then);
    }
}

impl Server {
    fn new(seed: u64) -> Self {
        let random = fastrand::Rng::with_seed(seed);
        let came = vec![0.0; SECONDS];
        Self(Arc::new(Mutex::new(State { start: Instant::now(), free_at: 0.0, random, came })))
    }

    /// Puts a call into the queue; the future is ready when it is done. That it is dropped changes nothing.
    fn answer(&self) -> impl Future<Output = Result<(), CallError>> + Send + use<> {
        let mut state = self.0.lock().expect("no panic");
        let now = state.start.elapsed().as_secs_f64();
        if let Some(second) = state.came.get_mut(now as usize) {
            *second += 1.0;
        }
        let work = -(1.0 - state.random.f64()).ln();
        state.free_at = done_at(state.free_at.max(now), work);
        let until = state.start + Duration::from_secs_f64(state.free_at);
        async move {
            sleep_until(until).await;
            Ok(())
        }
    }
}

macro_rules! service {
    ($request:ty) => {
        impl Service<$request> for Server {
            type Response = ();
            type Error = CallError;
            type Future = std::pin::Pin<Box<dyn Future<Output = Result<(), CallError>> + Send>>;

            fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
                Poll::Ready(Ok(()))
            }

            fn call(&mut self, _: $request) -> Self::Future {
                Box::pin(self.answer())
            }
        }
    };
}
service!(());
service!(Tagged<()>);

// ===== The clients =====

#[derive(Clone, Copy)]
enum Strategy {
    Goaround,
    Naive,
    None,
    Tower,
    TowerResilience,
}

const STRATEGIES: [Strategy; 5] =
    [Strategy::Goaround, Strategy::Naive, Strategy::None, Strategy::Tower, Strategy::TowerResilience];

/// tower's retries, as its documentation writes them.
#[derive(Clone)]
struct Retries {
    budget: Arc<TpsBudget>,
    backoff: ExponentialBackoff,
    left: u32,
}

impl Policy<(), (), BoxError> for Retries {
    type Future = <ExponentialBackoff as Backoff>::Future;

    fn retry(&mut self, _: &mut (), result: &mut Result<(), BoxError>) -> Option<Self::Future> {
        if result.is_ok() {
            self.budget.deposit();
            return None;
        }
        self.left = self.left.checked_sub(1)?;
        self.budget.withdraw().then(|| self.backoff.next_backoff())
    }

    fn clone_request(&mut self, _: &()) -> Option<()> {
        Some(())
    }
}

type Client = BoxCloneSyncService<(), (), BoxError>;

impl Strategy {
    const fn name(self) -> &'static str {
        match self {
            Strategy::Goaround => "goaround",
            Strategy::Naive => "naive",
            Strategy::None => "no retries",
            Strategy::Tower => "tower",
            Strategy::TowerResilience => "tower-resilience",
        }
    }

    fn client(self, server: Server) -> Client {
        let impatient = |server: Server| {
            tower::service_fn(move |()| {
                let answer = server.answer();
                async move { Ok::<(), BoxError>(timeout(PATIENCE, answer).await??) }
            })
        };
        match self {
            Strategy::None => BoxCloneSyncService::new(impatient(server)),
            Strategy::Naive => BoxCloneSyncService::new(tower::service_fn(move |()| {
                let service = impatient(server.clone());
                async move {
                    for _ in 0..3 {
                        if service.clone().oneshot(()).await.is_ok() {
                            return Ok(());
                        }
                    }
                    service.oneshot(()).await
                }
            })),
            Strategy::Tower => {
                let backoff = ExponentialBackoffMaker::default().make_backoff();
                let retries = Retries { budget: Arc::new(TpsBudget::default()), backoff, left: 3 };
                BoxCloneSyncService::new(
                    ServiceBuilder::new().retry(retries).timeout(PATIENCE).service(server),
                )
            }
            Strategy::TowerResilience => {
                let retries = tower_resilience_retry::RetryLayer::exponential_backoff().build();
                let limit = tower_resilience_timelimiter::TimeLimiterLayer::builder();
                let limit = limit.timeout_duration(PATIENCE).build();
                let service = ServiceBuilder::new().layer(retries).layer(limit).service(server);
                BoxCloneSyncService::new(service.map_err(BoxError::from))
            }
            Strategy::Goaround => {
                let connector =
                    tower::service_fn(move |()| std::future::ready(Ok::<_, CallError>(server.clone())));
                let stack = Stack::builder(connector)
                    .retry(RetryReadOnly.attempt_timeout(PATIENCE))
                    .build()
                    .expect("a stack");
                let service = ServiceBuilder::new()
                    .map_request(|()| Tagged::new((), Effect::ReadOnly))
                    .map_err(BoxError::from)
                    .service(stack);
                BoxCloneSyncService::new(service)
            }
        }
    }
}

// ===== Runs =====

struct Run {
    /// Calls that came at the server in each second, retries included.
    came: Vec<f64>,
    /// Calls that were made in each second, and those of them that were answered in the end.
    made: Vec<f64>,
    answered: Vec<f64>,
}

fn run(strategy: Strategy, seed: u64) -> Run {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    // What draws its jitter from the thread's generator draws the same each time.
    fastrand::seed(seed);
    let mut random = fastrand::Rng::with_seed(seed);
    runtime.block_on(async {
        let server = Server::new(seed);
        let start = server.0.lock().expect("no panic").start;
        let clients: Vec<Client> = (0..CLIENTS).map(|_| strategy.client(server.clone())).collect();
        let (mut made, mut answered) = (vec![0.0; SECONDS], vec![0.0; SECONDS]);
        let mut tasks = JoinSet::new();
        let mut at = 0.0;
        loop {
            at += -(1.0 - random.f64()).ln() / CALLS_PER_SECOND;
            if at >= SECONDS as f64 {
                break;
            }
            sleep_until(start + Duration::from_secs_f64(at)).await;
            made[at as usize] += 1.0;
            let client = clients[random.usize(..CLIENTS)].clone();
            tasks.spawn(async move { (at as usize, client.oneshot(()).await.is_ok()) });
        }
        while let Some(ended) = tasks.join_next().await {
            let (second, good) = ended.expect("no panic");
            answered[second] += f64::from(u8::from(good));
        }
        let came = server.0.lock().expect("no panic").came.clone();
        Run { came, made, answered }
    })
}

impl Run {
    /// How many calls came at the server for each that was made, from the outage on.
    fn load(&self) -> f64 {
        let from = OUTAGE.0 as usize;
        self.came[from..].iter().sum::<f64>() / self.made[from..].iter().sum::<f64>()
    }

    /// In the worst second, against what was made on average.
    fn peak(&self) -> f64 {
        self.came.iter().copied().fold(0.0, f64::max) / CALLS_PER_SECOND
    }

    /// The part of all calls that was answered.
    fn goodput(&self) -> f64 {
        self.answered.iter().sum::<f64>() / self.made.iter().sum::<f64>()
    }

    /// How many seconds after the outage calls are answered again, all but one in twenty, and stay so for five
    /// seconds; as many as there are if never.
    fn recovery(&self) -> f64 {
        let end = OUTAGE.1 as usize;
        let good = |second: usize| self.answered[second] >= 0.95 * self.made[second];
        let found = (end..SECONDS - 5).find(|second| (*second..second + 5).all(good));
        (found.unwrap_or(SECONDS) - end) as f64
    }
}

/// Median, least and most over the seeds.
fn spread(runs: &[Run], of: impl Fn(&Run) -> f64) -> [f64; 3] {
    let mut values: Vec<f64> = runs.iter().map(of).collect();
    values.sort_by(f64::total_cmp);
    [values[values.len() / 2], values[0], values[values.len() - 1]]
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let runs: Vec<Vec<Run>> = STRATEGIES
        .into_iter()
        .map(|strategy| (1..=SEEDS).map(|seed| run(strategy, seed)).collect())
        .collect();

    println!(
        "{:<18} {:>22} {:>22} {:>22} {:>22}",
        "median (least-most)", "load, x the calls", "peak second, x", "recovery, s", "goodput, %"
    );
    let mut rows = Vec::new();
    for (strategy, runs) in STRATEGIES.iter().zip(&runs) {
        let never = |seconds: f64| match seconds >= SECONDS as f64 - OUTAGE.1 {
            true => "never".to_owned(),
            false => format!("{seconds:.0}"),
        };
        let show = |[median, least, most]: [f64; 3], digits: usize| {
            format!("{median:.digits$} ({least:.digits$}-{most:.digits$})")
        };
        let [load, peak] = [spread(runs, Run::load), spread(runs, Run::peak)];
        let [recovery, goodput] = [spread(runs, Run::recovery), spread(runs, Run::goodput)];
        println!(
            "{:<18} {:>22} {:>22} {:>22} {:>22}",
            strategy.name(),
            show(load, 2),
            show(peak, 2),
            format!("{} ({}-{})", never(recovery[0]), never(recovery[1]), never(recovery[2])),
            show(goodput.map(|part| 100.0 * part), 1),
        );
        rows.push(serde_json::json!({
            "strategy": strategy.name(),
            "load": load,
            "peak": peak,
            "recovery_seconds": recovery.map(|seconds| (seconds < SECONDS as f64 - OUTAGE.1).then_some(seconds)),
            "goodput": goodput,
        }));
    }
    if let Some(file) = args.iter().position(|arg| arg == "--svg").and_then(|at| args.get(at + 1)) {
        let mean = |of: fn(&Run) -> &[f64]| -> Vec<svg::Line> {
            let line = |runs: &Vec<Run>| {
                (0..SECONDS).map(|n| runs.iter().map(|run| of(run)[n]).sum::<f64>() / SEEDS as f64).collect()
            };
            STRATEGIES.iter().zip(&runs).map(|(strategy, runs)| (strategy.name(), line(runs))).collect()
        };
        let mut picture = svg::Picture::new();
        picture.title("A server whose capacity drops to a tenth for ten seconds");
        picture.lines("calls that come at it, a second", &mean(|run| &run.came), OUTAGE, 1_000.0);
        picture.lines(
            "calls made in that second that are answered",
            &mean(|run| &run.answered),
            OUTAGE,
            240.0,
        );
        std::fs::write(file, picture.finish()).expect("the file can be written");
    }
    if args.iter().any(|arg| arg == "--json") {
        let first = |n: usize, of: fn(&Run) -> f64| spread(&runs[n], of)[0];
        println!(
            "{}",
            serde_json::json!({
                "ratios": {
                    "load_vs_calls": first(0, Run::load),
                    "recovery_vs_no_retries": (1.0 + first(0, Run::recovery)) / (1.0 + first(2, Run::recovery)),
                },
                "seeds": SEEDS,
                "rows": rows,
            })
        );
    }
}
