//! The JSON-RPC client over a pipe: calls a second with 1, 16 and 64 in flight, beside a bare ping-pong
//! client over the same pipe.
//!
//! `cargo bench --bench pipe` prints a table; with `-- --json` the last line is one object.

use std::time::{Duration, Instant};

use goaround::jsonrpc::{Client, Request};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, duplex, split},
    task::JoinSet,
};

const CALLS: u64 = 20_000;
const ROUNDS: usize = 5;

/// Answers every line at once with its own id, as little as a server can do.
async fn serve(io: DuplexStream) {
    let (read, mut write) = split(io);
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let Ok(request) = serde_json::from_str::<serde_json::Value>(&line) else { return };
        let Some(id) = request.get("id") else { continue };
        let answer = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":{{\"ok\":true}}}}\n");
        if write.write_all(answer.as_bytes()).await.is_err() {
            return;
        }
    }
}

/// One call after the other over the bare pipe.
async fn bare(calls: u64) -> Duration {
    let (ours, theirs) = duplex(64 << 10);
    tokio::spawn(serve(theirs));
    let (read, mut write) = split(ours);
    let mut lines = BufReader::new(read).lines();
    let start = Instant::now();
    for id in 0..calls {
        let call =
            format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"method\":\"echo\",\"params\":{{\"n\":{id}}}}}\n");
        write.write_all(call.as_bytes()).await.expect("the pipe is open");
        let line = lines.next_line().await.expect("the pipe is open").expect("an answer");
        let answer: serde_json::Value = serde_json::from_str(&line).expect("JSON");
        assert_eq!(answer["id"], id);
    }
    start.elapsed()
}

async fn client(calls: u64, in_flight: u64) -> Duration {
    let (ours, theirs) = duplex(64 << 10);
    tokio::spawn(serve(theirs));
    let client = Client::new(ours);
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..in_flight {
        let client = client.clone();
        tasks.spawn(async move {
            for n in 0..calls / in_flight {
                let request = Request::new("echo", serde_json::json!({ "n": task + n })).expect("JSON");
                client.request(request).await.expect("an answer");
            }
        });
    }
    tasks.join_all().await;
    start.elapsed()
}

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let (mut bares, mut ours) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
    for _ in 0..ROUNDS {
        bares.push(rate(runtime.block_on(bare(CALLS))));
        for (samples, in_flight) in ours.iter_mut().zip([1, 16, 64]) {
            samples.push(rate(runtime.block_on(client(CALLS, in_flight))));
        }
    }
    println!("{:<28} {:>14} {:>12}", "in memory", "calls a second", "us a call");
    let print = |name: &str, rate: f64| println!("{name:<28} {rate:>14.0} {:>12.2}", 1e6 / rate);
    print("bare client, 1 in flight", median(bares.clone()));
    for (samples, in_flight) in ours.iter().zip([1, 16, 64]) {
        print(&format!("goaround, {in_flight} in flight"), median(samples.clone()));
    }
    if json {
        let ratio = median(ours[0].iter().zip(&bares).map(|(ours, bare)| ours / bare).collect());
        println!(
            "{}",
            serde_json::json!({
                "memory_calls_1": median(ours[0].clone()),
                "memory_calls_64": median(ours[2].clone()),
                "ratios": { "memory_calls_vs_bare_1": ratio },
            })
        );
    }
}

fn rate(time: Duration) -> f64 {
    CALLS as f64 / time.as_secs_f64()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}
