//! Reads in flight when their connection closes: how many connects there are, and how long it takes until the last
//! one is answered, against a connect and one batch of answers.
//!
//! `cargo bench --bench failover` prints a table; with `-- --json` the last line is one object. Times are the
//! processor's, so that what else runs on the machine does not count: the connect, or what was done until it had
//! ended if that is longer, and what was done from then on. `wall` is what the clock says. Beside it
//! `tower-resilience`'s retries over its reconnect, which get ten seconds.
//!
//! Then, by the clock, a real MCP server, which is this same executable: how long it takes from a read at which its
//! process dies until that read is answered by the next one, against a first start: spawn, handshake, the log level
//! that a session restores, and the same read.

use std::{
    future::{Future, poll_fn},
    io::{BufRead, Write},
    path::Path,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, Instant},
};

use goaround::{
    CallError, Effect, Stack, Tagged,
    jsonrpc::Request,
    mcp::{self, Era, ToolRules},
};
use serde_json::{Value, json};
use tokio::{
    process::Command,
    runtime::{Builder, Runtime},
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::{Service, ServiceBuilder};

const CONNECT: Duration = Duration::from_millis(20);
const PATIENCE: Duration = Duration::from_secs(10);

/// The processor time that this process has used.
fn busy() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

#[derive(Clone, Copy, PartialEq)]
enum Gate {
    Holds,
    Answers,
    Closed,
}

/// A connection that keeps its calls waiting until it answers all of them or closes.
#[derive(Clone)]
struct Connection(watch::Receiver<Gate>);

impl Connection {
    fn answer<R: Send + 'static>(
        &self,
        answer: R,
    ) -> impl Future<Output = Result<R, CallError>> + Send + use<R> {
        let mut gate = self.0.clone();
        async move {
            let gate = gate.wait_for(|gate| *gate != Gate::Holds).await.map(|gate| *gate);
            match gate {
                Ok(Gate::Answers) => Ok(answer),
                _ => Err(CallError::closed("closed")),
            }
        }
    }
}

impl Service<Tagged<u64>> for Connection {
    type Response = u64;
    type Error = CallError;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<u64, CallError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        match *self.0.borrow() {
            Gate::Closed => Poll::Ready(Err(CallError::not_sent("closed").connection_lost())),
            _ => Poll::Ready(Ok(())),
        }
    }

    fn call(&mut self, request: Tagged<u64>) -> Self::Future {
        Box::pin(self.answer(*request))
    }
}

impl Service<u64> for Connection {
    type Response = u64;
    type Error = CallError;
    type Future = std::pin::Pin<Box<dyn Future<Output = Result<u64, CallError>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Service::<Tagged<u64>>::poll_ready(self, cx)
    }

    fn call(&mut self, request: u64) -> Self::Future {
        Box::pin(self.answer(request))
    }
}

/// A server: connections to it, the first of which holds its calls.
struct Server {
    connects: Arc<AtomicUsize>,
    /// How much processor time was used by the end of the last connect.
    connected: Arc<Mutex<Duration>>,
    first: watch::Sender<Gate>,
}

impl Server {
    fn new() -> Self {
        Self { connects: Arc::default(), connected: Arc::default(), first: watch::channel(Gate::Holds).0 }
    }

    fn connector(
        &self,
    ) -> impl Service<(), Response = Connection, Error = CallError, Future: Send> + Clone + Send + Sync + use<>
    {
        let (connects, first) = (self.connects.clone(), self.first.subscribe());
        let connected = self.connected.clone();
        let answers = watch::channel(Gate::Answers).1;
        tower::service_fn(move |()| {
            let count = connects.fetch_add(1, Ordering::Relaxed);
            let gate = if count == 0 { first.clone() } else { answers.clone() };
            let connected = connected.clone();
            async move {
                sleep(CONNECT).await;
                *connected.lock().unwrap() = busy();
                Ok::<_, CallError>(Connection(gate))
            }
        })
    }
}

struct Outcome {
    took: Duration,
    wall: Duration,
    /// All of the processor's time.
    used: Duration,
    answered: usize,
    connects: usize,
    peak: u64,
}

/// So many calls in flight; then the first connection goes over to that. The time until the last answer.
fn run<S, R>(
    runtime: &Runtime,
    server: &Server,
    mut service: S,
    make: fn(u64) -> R,
    calls: usize,
    then: Gate,
    counted: bool,
) -> Outcome
where
    S: Service<R, Response = u64, Error: Send + std::fmt::Debug, Future: Send + 'static>,
{
    let mut outcome = Outcome {
        took: Duration::ZERO,
        wall: Duration::ZERO,
        used: Duration::ZERO,
        answered: 0,
        connects: 0,
        peak: 0,
    };
    let mut work = || {
        runtime.block_on(async {
            let mut tasks = JoinSet::new();
            for n in 0..calls as u64 {
                poll_fn(|cx| service.poll_ready(cx)).await.expect("ready");
                let call = service.call(make(n));
                tasks.spawn(async move { call.await.is_ok() });
                // The first one connects.
                if n == 0 {
                    sleep(2 * CONNECT).await;
                }
            }
            // All of them are with the connection.
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            let (start, used) = (Instant::now(), busy());
            server.first.send_replace(then);
            let _ = timeout(PATIENCE, async {
                while let Some(answered) = tasks.join_next().await {
                    outcome.answered += usize::from(answered.expect("no panic"));
                }
            })
            .await;
            outcome.wall = start.elapsed();
            let (connected, end) = (*server.connected.lock().unwrap(), busy());
            outcome.used = end - used;
            outcome.took = match then {
                Gate::Closed => connected.saturating_sub(used).max(CONNECT) + (end - connected.max(used)),
                _ => end - used,
            };
        });
    };
    // Counting takes time, so what is counted is not timed.
    let peak = match counted {
        true => allocation_counter::measure(work).bytes_max,
        false => {
            work();
            0
        }
    };
    outcome.connects = server.connects.load(Ordering::Relaxed);
    outcome.peak = peak;
    outcome
}

fn ours(runtime: &Runtime, calls: usize, then: Gate, counted: bool) -> Outcome {
    let server = Server::new();
    let stack =
        Stack::builder(server.connector()).deadline(Duration::from_secs(60)).build().expect("a stack");
    run(runtime, &server, stack, |n| Tagged::new(n, Effect::ReadOnly), calls, then, counted)
}

fn theirs(runtime: &Runtime, calls: usize) -> Outcome {
    let server = Server::new();
    let service = ServiceBuilder::new()
        .layer(tower_resilience_retry::RetryLayer::exponential_backoff().build())
        .layer(tower_resilience_reconnect::ReconnectLayer::with_defaults())
        .service(server.connector());
    run(runtime, &server, service, |n| n, calls, Gate::Closed, false)
}

// ===== A real server =====

/// An MCP server with one tool, a read. It dies at it if the file that it names is not there, which is there then.
fn serve() {
    for line in std::io::stdin().lock().lines() {
        let Ok(message) =
            line.map_err(drop).and_then(|line| serde_json::from_str::<Value>(&line).map_err(drop))
        else {
            return;
        };
        let Some(id) = message.get("id") else { continue };
        let result = match message["method"].as_str() {
            Some("initialize") => json!({
                "protocolVersion": message["params"]["protocolVersion"],
                "capabilities": { "tools": {}, "logging": {} },
                "serverInfo": { "name": "bench", "version": "1" },
            }),
            Some("tools/call") => {
                if let Some(file) = message["params"]["arguments"]["dies_unless"].as_str()
                    && !Path::new(file).exists()
                {
                    std::fs::write(file, "").expect("a file");
                    std::process::exit(1);
                }
                json!({ "content": [] })
            }
            _ => json!({}),
        };
        println!("{}", json!({ "jsonrpc": "2.0", "id": id, "result": result }));
        std::io::stdout().flush().expect("a pipe");
    }
}

/// A client of that server, not connected.
fn client() -> mcp::Client {
    let mut command = Command::new(std::env::current_exe().expect("this program"));
    command.arg("--serve");
    let server = mcp::stdio(command).era(Era::Initialize).tools(ToolRules::new().read_only(["get"]));
    Stack::builder(server).deadline(Duration::from_secs(60)).build().expect("a stack")
}

async fn set_level(client: &mcp::Client) {
    let level = Request::new("logging/setLevel", json!({ "level": "error" })).expect("JSON");
    client.send(level).await.expect("an answer");
}

async fn get(client: &mcp::Client, dies_unless: &Path) {
    let params = json!({ "name": "get", "arguments": { "dies_unless": dies_unless } });
    client.send(Request::new("tools/call", params).expect("JSON")).await.expect("an answer");
}

/// Milliseconds: from a read at which the server dies until it is answered; and of a first start, with that read.
async fn restart(folder: &Path) -> (f64, f64) {
    let file = folder.join("there");
    std::fs::write(&file, "").expect("a file");
    let first = client();
    let start = Instant::now();
    set_level(&first).await;
    get(&first, &file).await;
    let fresh = start.elapsed();

    std::fs::remove_file(&file).expect("a file");
    let start = Instant::now();
    get(&first, &file).await;
    let closure = start.elapsed();
    assert_eq!(first.generation(), Some(2));
    first.shutdown(Duration::from_secs(1)).await;
    (closure.as_secs_f64() * 1e3, fresh.as_secs_f64() * 1e3)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn main() {
    if std::env::args().any(|arg| arg == "--serve") {
        return serve();
    }
    let json = std::env::args().any(|arg| arg == "--json");
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    println!(
        "{:>8} {:>9} {:>9} {:>10} {:>16} {:>7} {:>9} {:>11}  tower-resilience",
        "reads", "connects", "answered", "ms", "connect + batch", "ratio", "wall ms", "bytes/read"
    );
    let (mut rows, mut ratios) = (Vec::new(), serde_json::Map::new());
    let mut per_read = Vec::new();
    for calls in [1, 100, 10_000, 100_000] {
        let rounds = if calls > 10_000 { 3 } else { 7 };
        let (mut took, mut walls, mut used) = (Vec::new(), Vec::new(), Vec::new());
        let (mut batches, mut pairs) = (Vec::new(), Vec::new());
        let mut last = None;
        for _ in 0..rounds {
            let batch = ours(&runtime, calls, Gate::Answers, false);
            assert_eq!((batch.answered, batch.connects), (calls, 1));
            let outcome = ours(&runtime, calls, Gate::Closed, false);
            let ms = |time: Duration| time.as_secs_f64() * 1_000.0;
            let all = ms(outcome.took);
            let least = ms(CONNECT + batch.took);
            took.push(all);
            walls.push(ms(outcome.wall));
            used.push(ms(outcome.used));
            batches.push(least);
            pairs.push(all / least);
            last = Some(outcome);
        }
        let outcome = last.expect("rounds");
        let peer = (calls <= 10_000).then(|| theirs(&runtime, calls));
        let said = peer.as_ref().map_or("not run".to_owned(), |peer| {
            format!("{} of {calls} in {PATIENCE:?}, {} connects", peer.answered, peer.connects)
        });
        let (took, batch, ratio, wall) = (median(took), median(batches), median(pairs), median(walls));
        let bytes = ours(&runtime, calls, Gate::Closed, true).peak as f64 / calls as f64;
        println!(
            "{calls:>8} {:>9} {:>9} {took:>10.1} {batch:>16.1} {ratio:>7.2} {wall:>9.1} {bytes:>11.0}  {said}",
            outcome.connects - 1,
            outcome.answered,
        );
        ratios.insert(format!("failover_vs_connect_and_batch_{calls}"), ratio.into());
        let used = median(used);
        per_read.push(used / calls as f64);
        rows.push(json!({
            "reads": calls,
            "connects": outcome.connects - 1,
            "answered": outcome.answered,
            "ms": took,
            "wall_ms": wall,
            "processor_ms": used,
            "connect_and_batch_ms": batch,
            "peak_bytes_per_read": bytes,
            "tower_resilience_answered": peer.as_ref().map(|peer| peer.answered),
            "tower_resilience_connects": peer.as_ref().map(|peer| peer.connects),
        }));
    }
    let growth = per_read[3] / per_read[2];
    ratios.insert("per_read_100000_vs_10000".into(), growth.into());
    println!("a read of 100,000 takes {growth:.2} times the processor time of one of 10,000");

    let folder = std::env::temp_dir().join(format!("goaround-failover-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let all: Vec<_> = (0..41).map(|_| runtime.block_on(restart(&folder))).collect();
    std::fs::remove_dir_all(&folder).expect("a folder");
    let closure = median(all.iter().map(|(closure, _)| *closure).collect());
    let fresh = median(all.iter().map(|(_, fresh)| *fresh).collect());
    let extra = median(all.iter().map(|(closure, fresh)| closure - fresh).collect());
    println!(
        "a real server dies at a read: answered after {closure:.2} ms; a first start with that read {fresh:.2} ms; \
         more by {extra:.2} ms"
    );
    if json {
        ratios.insert("closure_vs_first_start".into(), (closure / fresh).into());
        let restart = json!({ "closure_to_read_ms": closure, "first_start_ms": fresh, "more_ms": extra });
        println!("{}", json!({ "ratios": ratios, "rows": rows, "restart": restart }));
    }
}
