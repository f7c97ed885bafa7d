//! Writes a second through a ledger, entered and settled, with 1, 16, 64 and 256 in flight: in memory, in a file,
//! and beside them what one sync a write makes of the same disk. The ledgers alone, and under a whole stack whose
//! server answers at once.
//!
//! `cargo bench --bench ledger --features ledger-durable` prints a table; with `-- --json` the last line is one
//! object. The file is in the current directory's `target`, or where `GOAROUND_BENCH_DIR` says: in memory
//! (`/tmp` of some systems) the figures mean nothing.

use std::{
    fs::File,
    future::ready,
    io::Write,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use goaround::{
    BoxError, CallError, Effect, InDoubt, Stack, Tagged, Verdict, WriteSafetyLayer,
    write_safety::ledger::{DurableLedger, Entry, Ledger, MemoryLedger, State},
};
use serde_json::json;
use tokio::task::JoinSet;
use tower::service_fn;

const IN_FLIGHT: [u64; 4] = [1, 16, 64, 256];
const ROUNDS: usize = 5;
/// How long each sample takes.
const SAMPLE: Duration = Duration::from_millis(500);

fn entry(n: u64) -> Entry {
    let entry = json!({
        "id": format!("0000000000000000000000000000002a-1-{n}"), "method": "tools/call", "effect": "write",
        "key": format!("account {n}"), "entered_ms": 1_700_000_000_000_u64, "changed_ms": 1_700_000_000_000_u64,
        "attempts": 1, "state": "open", "revision": 1, "stack": 1,
    });
    serde_json::from_value(entry).expect("an entry")
}

/// Writes a second, each entered, then settled.
async fn through<L: Ledger + Clone>(ledger: &L, in_flight: u64) -> f64 {
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for task in 0..in_flight {
        let ledger = ledger.clone();
        let mut entry = entry(0);
        tasks.spawn(async move {
            let mut done = 0;
            for n in (task..).step_by(in_flight as usize) {
                // Only the id differs, which is parsed: as much work as to make one.
                entry.id = format!("0000000000000000000000000000002a-1-{n}").parse().expect("an id");
                let revision = ledger.enter(entry.clone()).await.expect("entered");
                ledger.settle(entry.id, revision, State::Answered).await.expect("settled");
                done += 1;
                // The ledger in memory never waits.
                if done % 64 == 0 {
                    tokio::task::yield_now().await;
                }
                if start.elapsed() >= SAMPLE {
                    break;
                }
            }
            done
        });
    }
    let done: u64 = tasks.join_all().await.into_iter().sum();
    done as f64 / start.elapsed().as_secs_f64()
}

/// Writes a second, each through a stack, with a check and that ledger.
async fn through_a_stack<L: Ledger + Clone>(ledger: &L, in_flight: u64) -> f64 {
    let connector = service_fn(|()| {
        ready(Ok::<_, CallError>(service_fn(|call: Tagged<u64>| ready(Ok::<_, CallError>(*call)))))
    });
    let check = |doubt: InDoubt<Tagged<u64>, u64>| ready(Ok::<Verdict<u64>, BoxError>(doubt.unknown("")));
    let writes = WriteSafetyLayer::new(check).ledger(ledger.clone());
    let stack = Stack::builder(connector).writes(writes).build().expect("a stack");
    let start = Instant::now();
    let mut tasks = JoinSet::new();
    for _ in 0..in_flight {
        let stack = stack.clone();
        tasks.spawn(async move {
            let mut done = 0;
            while start.elapsed() < SAMPLE {
                stack.send(Tagged::new(done, Effect::Write)).await.expect("an answer");
                done += 1;
                if done % 64 == 0 {
                    tokio::task::yield_now().await;
                }
            }
            done
        });
    }
    let done: u64 = tasks.join_all().await.into_iter().sum();
    done as f64 / start.elapsed().as_secs_f64()
}

/// Writes a second with one sync each, of a line as long as the ledger's.
fn sync_each(path: &Path) -> f64 {
    let mut file = File::create(path).expect("a file");
    let line = serde_json::to_vec(&entry(0)).expect("JSON");
    let (start, mut done) = (Instant::now(), 0);
    while start.elapsed() < SAMPLE {
        file.write_all(&line).expect("written");
        file.sync_data().expect("synced");
        // Its end, which needs no sync of its own.
        file.write_all(&line[..line.len() / 2]).expect("written");
        done += 1;
    }
    f64::from(done) / start.elapsed().as_secs_f64()
}

fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}

/// The median of the rounds' ratios.
fn ratio(ours: &[f64], theirs: &[f64]) -> f64 {
    let ratios: Vec<_> = ours.iter().zip(theirs).map(|(ours, theirs)| ours / theirs).collect();
    (median(&ratios) * 100.0).round() / 100.0
}

fn main() {
    let json = std::env::args().any(|arg| arg == "--json");
    let directory = std::env::var_os("GOAROUND_BENCH_DIR").map_or_else(|| "target".into(), PathBuf::from);
    let directory = tempfile::tempdir_in(directory).expect("a directory");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let mut each = Vec::new();
    let [mut memory, mut durable, mut memory_stack, mut durable_stack] =
        [const { [const { Vec::new() }; 4] }; 4];
    for _ in 0..ROUNDS {
        each.push(sync_each(&directory.path().join("each")));
        for (place, in_flight) in IN_FLIGHT.into_iter().enumerate() {
            memory[place].push(runtime.block_on(through(&MemoryLedger::new(), in_flight)));
            let path = directory.path().join("ledger");
            let ledger = DurableLedger::open(&path).expect("opened");
            durable[place].push(runtime.block_on(through(&ledger, in_flight)));
            drop(ledger);
            std::fs::remove_file(&path).expect("removed");
            memory_stack[place].push(runtime.block_on(through_a_stack(&MemoryLedger::new(), in_flight)));
            let ledger = DurableLedger::open(&path).expect("opened");
            durable_stack[place].push(runtime.block_on(through_a_stack(&ledger, in_flight)));
            drop(ledger);
            std::fs::remove_file(&path).expect("removed");
        }
    }
    println!("{:<30} {:>14} {:>14}", "entered and settled", "writes a second", "x sync each");
    println!("{:<30} {:>14.0} {:>14}", "one sync each", median(&each), 1);
    let all = [
        ("durable", &durable),
        ("memory", &memory),
        ("durable, stack", &durable_stack),
        ("memory, stack", &memory_stack),
    ];
    for (name, samples) in all {
        for (samples, in_flight) in samples.iter().zip(IN_FLIGHT) {
            let name = format!("{name}, {in_flight} in flight");
            println!("{name:<30} {:>14.0} {:>14.1}", median(samples), ratio(samples, &each));
        }
    }
    if json {
        let mut out = json!({ "ratios": {}, "sync_each_per_s": median(&each).round() });
        for (place, in_flight) in IN_FLIGHT.into_iter().enumerate() {
            out["ratios"][format!("durable_{in_flight}_vs_sync_each")] = ratio(&durable[place], &each).into();
            out["ratios"][format!("memory_{in_flight}_vs_durable")] =
                ratio(&memory[place], &durable[place]).into();
            out["ratios"][format!("durable_stack_{in_flight}_vs_sync_each")] =
                ratio(&durable_stack[place], &each).into();
            out[format!("durable_stack_{in_flight}_per_s")] = median(&durable_stack[place]).round().into();
            out[format!("memory_stack_{in_flight}_per_s")] = median(&memory_stack[place]).round().into();
            out[format!("durable_{in_flight}_per_s")] = median(&durable[place]).round().into();
            out[format!("memory_{in_flight}_per_s")] = median(&memory[place]).round().into();
        }
        println!("{out}");
    }
}
