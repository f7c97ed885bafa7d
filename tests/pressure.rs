//! Many threads on one stack, in real time: reads and writes, with and without keys, over connections that close at
//! random, with futures that are dropped, and a shutdown in the middle of it.
#![cfg(feature = "ledger-durable")]

#[path = "lab/ended.rs"]
mod ended;

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use ended::Ended;
use fastrand::Rng;
use goaround::{
    BoxError, Call, CallId, Event, InDoubt, Outcome, ReconnectLayer, Stack, Verdict, WriteSafetyLayer,
    jsonrpc::{Client, Request, Response},
    write_safety::ledger::{DurableLedger, Ledger, MemoryLedger},
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream},
    task::JoinSet,
    time::sleep,
};
use tower::service_fn;

/// What the server has done, over all of its connections.
#[derive(Default)]
struct World {
    applied: Mutex<HashMap<u64, u64>>,
    /// Connections up to that number apply nothing any more.
    fenced: AtomicU64,
    connections: AtomicU64,
    calm: AtomicBool,
}

/// How much of a thousand calls goes wrong in each way.
const OFTEN: u32 = 8;

/// One write in that many is answered by nobody, and no look at it either: it is unknown for certain, however the
/// threads run.
const SILENT: u64 = 193;

async fn serve(io: DuplexStream, world: Arc<World>, number: u64) {
    let mut random = Rng::with_seed(number);
    let (read, mut write) = tokio::io::split(io);
    let mut lines = BufReader::new(read).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        let message: Value = serde_json::from_str(&line).unwrap();
        let Some(id) = message["id"].as_u64() else { continue };
        let token = message["params"]["t"].as_u64().unwrap_or_default();
        let calm = world.calm.load(Ordering::Relaxed);
        if random.u32(0..1000) < 5 {
            sleep(Duration::from_millis(random.u64(0..30))).await;
        }
        let silent = token.is_multiple_of(SILENT);
        let result = match message["method"].as_str() {
            Some("put") => {
                if !calm && random.u32(0..1000) < OFTEN {
                    return;
                }
                {
                    let mut applied = world.applied.lock().unwrap();
                    if world.fenced.load(Ordering::Acquire) >= number {
                        return;
                    }
                    *applied.entry(token).or_default() += 1;
                }
                match random.u32(0..1000) {
                    n if !calm && n < OFTEN => return,
                    995..1000 => continue,
                    _ if silent => continue,
                    _ => token,
                }
            }
            Some("look") if silent => continue,
            Some("look") => {
                let applied = world.applied.lock().unwrap();
                world.fenced.fetch_max(number - 1, Ordering::AcqRel);
                applied.get(&token).copied().unwrap_or_default()
            }
            _ => 7,
        };
        let answer = json!({ "jsonrpc": "2.0", "id": id, "result": result }).to_string() + "\n";
        let whole = if !calm && random.u32(0..1000) < 2 { answer.len() / 2 } else { answer.len() };
        if write.write_all(&answer.as_bytes()[..whole]).await.is_err() || whole < answer.len() {
            return;
        }
    }
}

async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
    let params: Value = doubt.request().params()?;
    let on_it = doubt.closure().is_some();
    let found: u64 = doubt.probe(Request::new("look", params)?.read_only()).await?.parse()?;
    Ok(match found {
        // The server turns older connections away from the moment of the look, and this one is newer.
        0 if on_it => doubt.not_landed_because("older connections are fenced off"),
        0 => doubt.not_landed(),
        _ => doubt.landed_without_result(),
    })
}

#[derive(Default)]
struct Said {
    doubts: HashMap<CallId, u64>,
    abandoned: HashMap<CallId, u64>,
}

async fn press<L: Ledger + Clone>(ledger: L, seed: u64, tasks: u64, calls: u64, keyed: bool) {
    let world = Arc::new(World::default());
    let said: Arc<Mutex<Said>> = Arc::default();
    let (of, log) = (Arc::clone(&world), Arc::clone(&said));
    let connector = service_fn(move |()| {
        let world = Arc::clone(&of);
        async move {
            let number = world.connections.fetch_add(1, Ordering::AcqRel) + 1;
            let (ours, theirs) = tokio::io::duplex(if number % 2 == 0 { 256 } else { 64 << 10 });
            tokio::spawn(serve(theirs, world, number));
            Ok::<_, BoxError>(Client::builder().exact_writes().connect(ours))
        }
    });
    let mut writes = WriteSafetyLayer::new(check).ledger(ledger.clone());
    writes = match keyed {
        true => writes.conflict_key(|request: &Request| {
            let params: Value = request.params().ok()?;
            (params["t"].as_u64()? % 3 > 0).then(|| (params["t"].as_u64().unwrap() % 64).to_string())
        }),
        false => writes.independent_writes(),
    };
    let backoff = backon::ConstantBuilder::new().with_delay(Duration::from_micros(100)).without_max_times();
    let stack = Stack::builder(connector)
        .deadline(Duration::from_secs(20))
        .writes(writes)
        .reconnect(ReconnectLayer::once().backoff(backoff).crash_loop(100_000, Duration::from_secs(1)))
        .on_event(move |event| {
            let mut said = log.lock().unwrap();
            match event {
                Event::InDoubt(report) => *said.doubts.entry(report.call).or_default() += 1,
                Event::Abandoned(report) => {
                    *said.abandoned.entry(report.call.unwrap()).or_default() += 1;
                }
                _ => {}
            }
        })
        .build()
        .unwrap();

    let ended: Arc<Mutex<HashMap<CallId, (u64, Ended)>>> = Arc::default();
    let mut running = JoinSet::new();
    for task in 0..tasks {
        let (stack, ended) = (stack.clone(), Arc::clone(&ended));
        running.spawn(async move {
            let mut random = Rng::with_seed(seed ^ task << 20);
            for call in 0..calls {
                let token = task << 32 | call;
                let within = Duration::from_millis(random.u64(30..400));
                let start = Instant::now();
                if random.bool() {
                    let read =
                        Request::new("look_at", json!({ "t": token })).unwrap().read_only().within(within);
                    let reading = stack.send(read);
                    if random.u32(0..20) == 0 {
                        let _ =
                            tokio::time::timeout(Duration::from_micros(random.u64(0..3000)), reading).await;
                    } else if let Ok(answer) = reading.await {
                        assert_eq!(answer.parse::<u64>().unwrap(), 7);
                    }
                } else {
                    let mut write = Request::new("put", json!({ "t": token })).unwrap().within(within);
                    let id = write.context_mut().assign_id();
                    let writing = stack.send(write);
                    let result = if random.u32(0..20) == 0 {
                        let patience = Duration::from_micros(random.u64(0..3000));
                        tokio::time::timeout(patience, writing).await.ok()
                    } else {
                        Some(writing.await)
                    };
                    let how = match result {
                        None => Ended::Dropped,
                        Some(Ok(answer)) => {
                            assert_eq!(answer.parse::<u64>().unwrap(), token);
                            Ended::Ok
                        }
                        Some(Err(error)) => Ended::Error(error.outcome()),
                    };
                    ended.lock().unwrap().insert(id, (token, how));
                }
                let took = start.elapsed();
                assert!(took < within + Duration::from_secs(8), "{took:?} of {within:?}");
            }
        });
    }
    let hangs = tokio::time::timeout(Duration::from_secs(240), async {
        while let Some(task) = running.join_next().await {
            task.unwrap();
        }
    });
    hangs.await.expect("nothing hangs");
    assert_eq!(stack.in_flight(), 0);
    world.calm.store(true, Ordering::Relaxed);
    assert_eq!(stack.shutdown(Duration::from_secs(5)).await, 0);
    drop(stack);
    sleep(Duration::from_millis(300)).await;

    let listed = ledger.in_doubt().await.unwrap();
    let applied = world.applied.lock().unwrap();
    let ended = ended.lock().unwrap();
    let said = said.lock().unwrap();
    let in_ledger: HashSet<CallId> = listed.iter().map(|entry| entry.id.call()).collect();
    assert_eq!(in_ledger.len(), listed.len());
    for (id, (token, how)) in &*ended {
        let landed = applied.get(token).copied().unwrap_or_default();
        let (doubts, abandoned) =
            (said.doubts.get(id).copied().unwrap_or(0), said.abandoned.get(id).copied().unwrap_or(0));
        how.judge(&id.to_string(), landed, (doubts, abandoned), in_ledger.contains(id));
    }
    let unknown = ended.values().filter(|(_, how)| matches!(how, Ended::Error(Outcome::Unknown))).count();
    assert!(
        unknown > 0 && world.connections.load(Ordering::Relaxed) > 5,
        "enough went wrong to prove something"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_threads_in_memory() {
    for seed in 0..2 {
        press(MemoryLedger::new(), seed, 64, 120, seed % 2 == 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_threads_on_disk() {
    for seed in 10..12 {
        let directory = tempfile::tempdir().unwrap();
        let ledger =
            DurableLedger::options().compact_above(64 << 10).open(directory.path().join("l")).unwrap();
        press(ledger, seed, 64, 60, seed % 2 == 1).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_shutdown_amid_calls_waits_for_them_and_no_longer() {
    for round in 0..50 {
        let world = Arc::new(World::default());
        world.calm.store(true, Ordering::Relaxed);
        let of = Arc::clone(&world);
        let connector = service_fn(move |()| {
            let world = Arc::clone(&of);
            async move {
                let number = world.connections.fetch_add(1, Ordering::AcqRel) + 1;
                let (ours, theirs) = tokio::io::duplex(64 << 10);
                tokio::spawn(serve(theirs, world, 1_000_000 + number));
                Ok::<_, BoxError>(Client::builder().exact_writes().connect(ours))
            }
        });
        let layer = ReconnectLayer::once();
        let handle = layer.handle();
        let stack = Stack::builder(connector)
            .reconnect(layer)
            .writes(WriteSafetyLayer::new(check).independent_writes())
            .deadline(Duration::from_secs(2))
            .build()
            .unwrap();
        let mut running = JoinSet::new();
        for task in 0..8_u64 {
            let stack = stack.clone();
            running.spawn(async move {
                let mut random = Rng::with_seed(round << 8 | task);
                let mut done = 0;
                loop {
                    let token = task << 32 | done;
                    let request =
                        Request::new(if random.bool() { "put" } else { "get" }, json!({ "t": token }));
                    let request = request.unwrap();
                    let request = if request.method() == "get" { request.read_only() } else { request };
                    let clone = (random.u32(0..4) == 0).then(|| stack.clone());
                    let sending =
                        clone.as_ref().unwrap_or(&stack).send(request.within(Duration::from_millis(50)));
                    let result = match random.u32(0..10) {
                        0 => match tokio::time::timeout(Duration::from_micros(random.u64(0..300)), sending)
                            .await
                        {
                            Ok(result) => result,
                            Err(_) => continue,
                        },
                        _ => sending.await,
                    };
                    if let Err(error) = result
                        && error.to_string().contains("shut")
                    {
                        return done;
                    }
                    done += 1;
                }
            });
        }
        tokio::time::sleep(Duration::from_micros(Rng::with_seed(round).u64(100..8000))).await;
        let start = Instant::now();
        let left = match round % 2 {
            0 => stack.shutdown(Duration::from_secs(10)).await,
            _ => handle.shutdown(Duration::from_secs(10)).await,
        };
        let took = start.elapsed();
        assert_eq!(left, 0);
        assert!(took < Duration::from_secs(2), "round {round}: {took:?}");
        if round % 2 == 1 {
            stack.shutdown(Duration::from_secs(10)).await;
        }
        let ends = tokio::time::timeout(Duration::from_secs(20), async {
            while let Some(done) = running.join_next().await {
                done.unwrap();
            }
        });
        ends.await.expect("nothing hangs");
        assert_eq!(stack.in_flight(), 0);
    }
}
