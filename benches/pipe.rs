//! The JSON-RPC client beside the official SDK's (`rmcp`) and a bare ping-pong client: over the same in-memory pipe
//! and over a child process, with the same trivial server.
//!
//! `cargo bench --bench pipe` prints tables; with `-- --json` the last line is one object. A call is a tool call
//! whose argument, a text of so many bytes, comes back in the result, which is parsed. Each figure is the median
//! of rounds in which the clients take turns.
//!
//! In memory one thread does all the work, the server's too, so that calls a second are those of a second of its
//! processor time: what else runs on the machine does not count. Over a child process they are by the clock; with
//! one in flight, by the median of the calls' times.
//!
//! `-- --only goaround,memory,1000000,1` repeats one row, for a profiler.

use std::{
    future::Future,
    io::{Read, Write},
    process::Stdio,
    sync::{Arc, Mutex},
    task::Poll,
    time::{Duration, Instant},
};

use goaround::jsonrpc::{Client, Request};
use rmcp::{
    RoleClient,
    model::{CallToolRequestParams, ContentBlock},
    service::{Peer, RunningService, serve_directly},
};
use serde::{Deserialize, Serialize};
use tokio::{
    io::{AsyncBufReadExt, AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, BufReader, duplex, split},
    process::{Child, Command},
    runtime::{Builder, Runtime},
    task::JoinSet,
};

const PIPE: usize = 64 << 10;

// ===== The server =====

/// Answers each whole line in `input` with its id and its text, as little as a server can do; what is left over
/// stays, and is not looked through again: `seen` of it were.
fn serve(input: &mut Vec<u8>, seen: &mut usize, output: &mut Vec<u8>) {
    let mut rest = &input[..];
    while let Some(end) = memchr::memchr(b'\n', &rest[*seen..]).map(|at| *seen + at) {
        let (line, next) = (&rest[..end], &rest[end + 1..]);
        (rest, *seen) = (next, 0);
        let (Some(id), Some(text)) = (after(line, b"\"id\":"), after(line, b"\"text\":\"")) else { continue };
        let id = &id[..id.iter().position(|byte| !byte.is_ascii_digit()).unwrap_or(id.len())];
        let text = &text[..memchr::memchr(b'"', text).unwrap_or(text.len())];
        for part in [
            b"{\"jsonrpc\":\"2.0\",\"id\":".as_slice(),
            id,
            b",\"result\":{\"content\":[{\"type\":\"text\",\"text\":\"",
            text,
            b"\"}]}}\n",
        ] {
            output.extend_from_slice(part);
        }
    }
    *seen = rest.len();
    let used = input.len() - rest.len();
    input.drain(..used);
}

fn after<'a>(line: &'a [u8], mark: &[u8]) -> Option<&'a [u8]> {
    memchr::memmem::find(line, mark).map(|at| &line[at + mark.len()..])
}

async fn serve_in_memory(io: impl AsyncRead + AsyncWrite) {
    let (mut read, mut write) = split(io);
    let (mut input, mut seen, mut output) = (Vec::new(), 0, Vec::new());
    while read.read_buf(&mut input).await.is_ok_and(|count| count > 0) {
        serve(&mut input, &mut seen, &mut output);
        if write.write_all(&output).await.is_err() {
            return;
        }
        output.clear();
    }
}

fn serve_as_child() {
    let (mut stdin, mut stdout) = (std::io::stdin().lock(), std::io::stdout().lock());
    let (mut input, mut seen, mut output) = (Vec::new(), 0, Vec::new());
    let mut chunk = vec![0; PIPE];
    while let Ok(count @ 1..) = stdin.read(&mut chunk) {
        input.extend_from_slice(&chunk[..count]);
        serve(&mut input, &mut seen, &mut output);
        if stdout.write_all(&output).and_then(|()| stdout.flush()).is_err() {
            return;
        }
        output.clear();
    }
}

fn child() -> Child {
    let program = std::env::current_exe().expect("this program");
    let mut command = Command::new(program);
    command.arg("--serve").stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    command.spawn().expect("a child")
}

// ===== The clients =====

#[derive(Serialize)]
struct Params<'a> {
    name: &'static str,
    arguments: Arguments<'a>,
}

#[derive(Serialize)]
struct Arguments<'a> {
    text: &'a str,
}

#[derive(Deserialize)]
struct Answer {
    content: Vec<Text>,
}

#[derive(Deserialize)]
struct Text {
    text: String,
}

fn params(text: &str) -> Params<'_> {
    Params { name: "echo", arguments: Arguments { text } }
}

/// A client that is connected.
trait Caller: Clone + Send + 'static {
    fn echo(&self, text: Arc<str>) -> impl Future<Output = usize> + Send;
}

impl Caller for Client {
    async fn echo(&self, text: Arc<str>) -> usize {
        let request = Request::new("tools/call", params(&text)).expect("JSON");
        let answer = self.request(request).await.expect("an answer");
        let answer: Answer = answer.parse().expect("JSON");
        answer.content[0].text.len()
    }
}

impl Caller for Peer<RoleClient> {
    async fn echo(&self, text: Arc<str>) -> usize {
        let mut arguments = serde_json::Map::new();
        arguments.insert("text".to_owned(), serde_json::Value::from(&*text));
        let call = CallToolRequestParams::new("echo").with_arguments(arguments);
        let answer = self.call_tool(call).await.expect("an answer");
        match &answer.content[0] {
            ContentBlock::Text(text) => text.text.len(),
            other => panic!("{other:?}"),
        }
    }
}

/// One call after the other, with nothing around them.
struct Bare<R, W> {
    read: BufReader<R>,
    write: W,
    line: Vec<u8>,
    id: u64,
}

#[derive(Serialize)]
struct Frame<'a> {
    jsonrpc: &'static str,
    id: u64,
    method: &'static str,
    params: Params<'a>,
}

#[derive(Deserialize)]
struct Envelope {
    id: u64,
    result: Answer,
}

impl<R: AsyncRead + Unpin, W: AsyncWrite + Unpin> Bare<R, W> {
    fn new(read: R, write: W) -> Self {
        Self { read: BufReader::with_capacity(16 << 10, read), write, line: Vec::new(), id: 0 }
    }

    async fn echo(&mut self, text: &str) -> usize {
        self.id += 1;
        let frame = Frame { jsonrpc: "2.0", id: self.id, method: "tools/call", params: params(text) };
        let mut frame = serde_json::to_vec(&frame).expect("JSON");
        frame.push(b'\n');
        self.write.write_all(&frame).await.expect("the pipe is open");
        self.write.flush().await.expect("the pipe is open");
        self.line.clear();
        self.read.read_until(b'\n', &mut self.line).await.expect("the pipe is open");
        let answer: Envelope = serde_json::from_slice(&self.line).expect("JSON");
        assert_eq!(answer.id, self.id);
        answer.result.content[0].text.len()
    }
}

fn rmcp_over<R, W>(read: R, write: W) -> RunningService<RoleClient, ()>
where
    R: AsyncRead + Send + Unpin + 'static,
    W: AsyncWrite + Send + Unpin + 'static,
{
    serve_directly::<RoleClient, _, _, std::io::Error, _>((), (read, write), None)
}

// ===== Runs =====

/// What a run of calls came to.
#[derive(Clone, Copy, Debug)]
struct Sample {
    per_second: f64,
    median_us: f64,
    p99_us: f64,
    /// Processor time of this process for each call; in memory the server's too.
    cpu_us: f64,
}

fn busy() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

struct Watch {
    start: Instant,
    busy: Duration,
}

impl Watch {
    fn start() -> Self {
        Self { start: Instant::now(), busy: busy() }
    }

    fn stop(self, in_memory: bool, in_flight: usize, mut latencies: Vec<Duration>) -> Sample {
        let (took, used) = (self.start.elapsed(), busy() - self.busy);
        let calls = latencies.len();
        latencies.sort_unstable();
        let us = |time: Duration| time.as_nanos() as f64 / 1_000.0;
        let (median_us, cpu_us) = (us(latencies[calls / 2]), us(used) / calls as f64);
        let per_second = match (in_memory, in_flight) {
            (true, _) => 1e6 / cpu_us,
            (false, 1) => 1e6 / median_us,
            (false, _) => calls as f64 / took.as_secs_f64(),
        };
        Sample { per_second, median_us, p99_us: us(latencies[calls * 99 / 100]), cpu_us }
    }
}

async fn drive(
    client: impl Caller,
    in_memory: bool,
    text: &Arc<str>,
    calls: usize,
    in_flight: usize,
) -> Sample {
    // Connected, and its buffers grown.
    client.echo(text.clone()).await;
    let latencies = Arc::new(Mutex::new(Vec::with_capacity(calls)));
    let watch = Watch::start();
    let mut tasks = JoinSet::new();
    for _ in 0..in_flight {
        let (client, text, latencies) = (client.clone(), text.clone(), latencies.clone());
        tasks.spawn(async move {
            let mut own = Vec::with_capacity(calls / in_flight);
            for _ in 0..calls / in_flight {
                let start = Instant::now();
                assert_eq!(client.echo(text.clone()).await, text.len());
                own.push(start.elapsed());
            }
            latencies.lock().unwrap().extend(own);
        });
    }
    tasks.join_all().await;
    let latencies = std::mem::take(&mut *latencies.lock().unwrap());
    watch.stop(in_memory, in_flight, latencies)
}

async fn drive_bare<R: AsyncRead + Unpin, W: AsyncWrite + Unpin>(
    mut client: Bare<R, W>,
    in_memory: bool,
    text: &str,
    calls: usize,
) -> Sample {
    client.echo(text).await;
    let mut latencies = Vec::with_capacity(calls);
    let watch = Watch::start();
    for _ in 0..calls {
        let start = Instant::now();
        assert_eq!(client.echo(text).await, text.len());
        latencies.push(start.elapsed());
    }
    watch.stop(in_memory, 1, latencies)
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Who {
    Goaround,
    Rmcp,
    Bare,
}

/// One run of a client, over a fresh pipe or child.
async fn run(who: Who, in_memory: bool, text: &Arc<str>, calls: usize, in_flight: usize) -> Sample {
    if in_memory {
        let (ours, theirs) = duplex(PIPE);
        tokio::spawn(serve_in_memory(theirs));
        return match who {
            Who::Goaround => drive(Client::new(ours), in_memory, text, calls, in_flight).await,
            Who::Rmcp => {
                let (read, write) = split(ours);
                let service = rmcp_over(read, write);
                drive(service.peer().clone(), in_memory, text, calls, in_flight).await
            }
            Who::Bare => {
                let (read, write) = split(ours);
                drive_bare(Bare::new(read, write), in_memory, text, calls).await
            }
        };
    }
    let mut child = child();
    let (read, write) = (child.stdout.take().expect("piped"), child.stdin.take().expect("piped"));
    match who {
        Who::Goaround => {
            drive(Client::new(tokio::io::join(read, write)), in_memory, text, calls, in_flight).await
        }
        Who::Rmcp => {
            let service = rmcp_over(read, write);
            drive(service.peer().clone(), in_memory, text, calls, in_flight).await
        }
        Who::Bare => drive_bare(Bare::new(read, write), in_memory, text, calls).await,
    }
}

/// Bytes on the heap for each of so many calls that wait for an answer, its future included, beyond the payload.
fn memory(who: Who, runtime: &Runtime) -> f64 {
    let text: Arc<str> = "x".repeat(100).into();
    let ours = runtime.block_on(async {
        let (ours, theirs) = duplex(1 << 20);
        // Reads and never answers.
        tokio::spawn(async move {
            let (mut read, _write) = split(theirs);
            let mut sink = vec![0; PIPE];
            while read.read(&mut sink).await.is_ok_and(|count| count > 0) {}
        });
        ours
    });
    match who {
        Who::Rmcp => {
            let (read, write) = split(ours);
            let service = runtime.block_on(async { rmcp_over(read, write) });
            held(service.peer(), &text, runtime)
        }
        _ => held(&runtime.block_on(async { Client::new(ours) }), &text, runtime),
    }
}

fn held(client: &impl Caller, text: &Arc<str>, runtime: &Runtime) -> f64 {
    const CALLS: usize = 1_024;
    let mut waiting = Vec::with_capacity(2 * CALLS);
    let mut start = |count| {
        runtime.block_on(async {
            for _ in 0..count {
                let (client, text) = (client.clone(), text.clone());
                let mut call = Box::pin(async move { client.echo(text).await });
                // Polled until the request is with the connection's task.
                for _ in 0..100 {
                    let polled = std::future::poll_fn(|cx| Poll::Ready(call.as_mut().poll(cx))).await;
                    assert!(polled.is_pending());
                    tokio::task::yield_now().await;
                }
                waiting.push(call);
            }
        });
    };
    // So many first that what grows by doubling has its room.
    start(16);
    let bytes = allocation_counter::measure(|| start(CALLS)).bytes_current;
    bytes as f64 / CALLS as f64 - text.len() as f64
}

// ===== Figures =====

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Row {
    who: Who,
    in_memory: bool,
    payload: usize,
    in_flight: usize,
    calls: usize,
    samples: Vec<Sample>,
}

impl Row {
    fn of(&self, value: impl Fn(&Sample) -> f64) -> f64 {
        median(self.samples.iter().map(value).collect())
    }
}

impl Who {
    const fn name(self) -> &'static str {
        match self {
            Who::Goaround => "goaround",
            Who::Rmcp => "rmcp",
            Who::Bare => "bare",
        }
    }
}

const fn place(in_memory: bool) -> &'static str {
    if in_memory { "memory" } else { "child" }
}

fn rows() -> Vec<Row> {
    let mut rows = Vec::new();
    for in_memory in [true, false] {
        for (payload, calls) in [(100, 6_400), (10_000, 1_600), (1_000_000, 32)] {
            for in_flight in [1, 16, 64, 1_024] {
                // Gigabytes.
                if payload == 1_000_000 && in_flight > 64 {
                    continue;
                }
                // At one in flight a child takes as long as the scheduler does.
                let calls = calls.max(in_flight);
                for who in [Who::Goaround, Who::Rmcp, Who::Bare] {
                    if who != Who::Bare || in_flight == 1 {
                        rows.push(Row { who, in_memory, payload, in_flight, calls, samples: Vec::new() });
                    }
                }
            }
        }
    }
    rows
}

fn main() {
    if std::env::args().any(|arg| arg == "--serve") {
        return serve_as_child();
    }
    let json = std::env::args().any(|arg| arg == "--json");
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut rows = rows();
    if let Some(only) = std::env::args().skip_while(|arg| arg != "--only").nth(1) {
        rows.retain(|row| {
            let Row { who, in_memory, payload, in_flight, .. } = row;
            only == format!("{},{},{payload},{in_flight}", who.name(), place(*in_memory))
        });
        for row in &rows {
            let text: Arc<str> = "x".repeat(row.payload).into();
            let sample = runtime.block_on(run(row.who, row.in_memory, &text, 20 * row.calls, row.in_flight));
            println!("{sample:?}");
        }
        return;
    }
    for round in 0..9 {
        for row in &mut rows {
            // The large ones say the same sooner.
            if round < 5 || row.payload < 1_000_000 {
                let text: Arc<str> = "x".repeat(row.payload).into();
                let sample = runtime.block_on(run(row.who, row.in_memory, &text, row.calls, row.in_flight));
                row.samples.push(sample);
            }
        }
    }
    println!(
        "{:<10} {:>9} {:>9}  {:<9} {:>12} {:>10} {:>10} {:>10}",
        "over", "payload", "in flight", "client", "calls/s", "median us", "p99 us", "cpu us"
    );
    for row in &rows {
        println!(
            "{:<10} {:>9} {:>9}  {:<9} {:>12.0} {:>10.1} {:>10.1} {:>10.2}",
            place(row.in_memory),
            row.payload,
            row.in_flight,
            row.who.name(),
            row.of(|sample| sample.per_second),
            row.of(|sample| sample.median_us),
            row.of(|sample| sample.p99_us),
            row.of(|sample| sample.cpu_us),
        );
    }
    let [ours, theirs] = [Who::Goaround, Who::Rmcp].map(|who| memory(who, &runtime));
    println!("\nbytes for a call in flight, beyond its payload: goaround {ours:.0}, rmcp {theirs:.0}");

    let find = |who, in_memory, payload, in_flight| {
        let is = |row: &&Row| {
            (row.who, row.in_memory, row.payload, row.in_flight) == (who, in_memory, payload, in_flight)
        };
        rows.iter().find(is).expect("a row")
    };
    let mut ratios = serde_json::Map::new();
    let mut between = |key: &str, in_memory, payload, in_flight, ours, theirs| {
        let (ours, theirs) =
            (find(ours, in_memory, payload, in_flight), find(theirs, in_memory, payload, in_flight));
        let pairs = ours.samples.iter().zip(&theirs.samples);
        let value = median(pairs.map(|(ours, theirs)| ours.per_second / theirs.per_second).collect());
        ratios.insert(key.to_owned(), value.into());
    };
    // What is left to a client on this pipe and with this server.
    between("memory_bare_vs_rmcp_1mb_1", true, 1_000_000, 1, Who::Bare, Who::Rmcp);
    let mut ratio = |key: &str, in_memory, payload, in_flight, theirs| {
        between(key, in_memory, payload, in_flight, Who::Goaround, theirs);
    };
    ratio("memory_calls_vs_rmcp_1", true, 100, 1, Who::Rmcp);
    ratio("memory_calls_vs_rmcp_16", true, 100, 16, Who::Rmcp);
    ratio("memory_calls_vs_rmcp_64", true, 100, 64, Who::Rmcp);
    ratio("memory_calls_vs_rmcp_1024", true, 100, 1_024, Who::Rmcp);
    ratio("memory_calls_vs_rmcp_10kb_1", true, 10_000, 1, Who::Rmcp);
    ratio("memory_calls_vs_rmcp_10kb_64", true, 10_000, 64, Who::Rmcp);
    ratio("memory_calls_vs_rmcp_1mb_1", true, 1_000_000, 1, Who::Rmcp);
    ratio("memory_calls_vs_rmcp_1mb_16", true, 1_000_000, 16, Who::Rmcp);
    ratio("memory_calls_vs_bare_1", true, 100, 1, Who::Bare);
    ratio("child_calls_vs_rmcp_1", false, 100, 1, Who::Rmcp);
    ratio("child_calls_vs_rmcp_64", false, 100, 64, Who::Rmcp);
    ratio("child_calls_vs_rmcp_1024", false, 100, 1_024, Who::Rmcp);
    ratio("child_calls_vs_rmcp_1mb_1", false, 1_000_000, 1, Who::Rmcp);
    ratio("child_calls_vs_bare_1", false, 100, 1, Who::Bare);
    println!();
    for (key, value) in &ratios {
        println!("{key:<32} {:.2}", value.as_f64().unwrap_or_default());
    }
    if json {
        let all: Vec<_> = rows
            .iter()
            .map(|row| {
                serde_json::json!({
                    "client": row.who.name(),
                    "over": place(row.in_memory),
                    "payload": row.payload,
                    "in_flight": row.in_flight,
                    "calls_per_second": row.of(|sample| sample.per_second),
                    "median_us": row.of(|sample| sample.median_us),
                    "p99_us": row.of(|sample| sample.p99_us),
                    "cpu_us": row.of(|sample| sample.cpu_us),
                })
            })
            .collect();
        println!(
            "{}",
            serde_json::json!({
                "bytes_in_flight": { "goaround": ours, "rmcp": theirs },
                "ratios": ratios,
                "rows": all,
            })
        );
    }
}
