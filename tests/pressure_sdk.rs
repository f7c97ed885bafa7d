//! Many threads on one stack around the official SDK over HTTP, whose server misbehaves at random.
#![cfg(all(unix, feature = "rmcp"))]

#[path = "lab/ended.rs"]
mod ended;
#[path = "lab/http.rs"]
mod http;
#[path = "lab/sdk.rs"]
mod lab;

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use ended::Ended;
use fastrand::Rng;
use goaround::{
    Call, CallId, Event, ReconnectLayer, WriteSafetyLayer,
    sdk::{Connector, Http},
    write_safety::ledger::{Ledger, MemoryLedger},
};
use http::{Era, JSON, On, Reply, Server, appended, session_not_found};
use lab::{append, builder, check, lines, ms};
use tokio::task::JoinSet;

fn misbehaviour(random: &mut Rng) -> Reply {
    let cut = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 200\r\n\r\n{\"jsonrpc\":\"2.0\",\"id\":$ID,\"res";
    let done = || if random.bool() { Reply::new().executes() } else { Reply::new() };
    let begun = {
        let mut done = done;
        done()
    };
    match random.u32(0..14) {
        0 => begun.bytes(&cut[..]).close(),
        1 => begun.wait(ms(2)).reset(),
        2 => begun.close(),
        3 => Reply::sse_result(&appended()).after_the_effect(),
        4 => begun
            .bytes("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n: hi\n\n")
            .close(),
        5 => session_not_found().forgets(),
        6 => Reply::http("503 Service Unavailable", &[("Retry-After", "0")], ""),
        7 => Reply::http("429 Too Many Requests", &[("Retry-After", "0")], ""),
        8 => begun.then_http("500 Internal Server Error", &[], "oops"),
        9 => begun.then_http("202 Accepted", &[], ""),
        10 => begun.then_http("200 OK", &[JSON], r#"{"jsonrpc":"2.0","id":99999,"result":{"content":[]}}"#),
        11 => begun.stall(),
        12 => begun
            .bytes("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            .chunk("id: 7\nretry: 1\ndata:\n\n")
            .end_of_chunks(),
        _ => begun
            .bytes("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
            .chunk("data: {\"jsonrpc\":\"2.0\",\"id\":$ID,\"result\":{\"content\":[]}}\n")
            .close(),
    }
}

async fn press(seed: u64, era: Era, pooled: bool) {
    let server = Arc::new(Server::of(era).await);
    let said: Arc<Mutex<HashMap<CallId, (u64, u64)>>> = Arc::default();
    let log = Arc::clone(&said);
    let ledger = MemoryLedger::new();
    let mut config = Http::new(server.url());
    if pooled {
        let client = reqwest::Client::builder().redirect(reqwest::redirect::Policy::none()).build().unwrap();
        config = config.client(client);
    }
    let mut connector = Connector::http((), config);
    if era == Era::Modern {
        connector = connector.lifecycle(rmcp::service::ClientLifecycleMode::Auto {
            preferred_versions: vec![rmcp::model::ProtocolVersion::V_2026_07_28],
            legacy_version: None,
        });
    }
    let stack = builder(connector)
        .writes(WriteSafetyLayer::new(check).independent_writes().ledger(ledger.clone()))
        .reconnect(ReconnectLayer::once().crash_loop(10_000, ms(100)))
        .on_event(move |event| {
            let mut said = log.lock().unwrap();
            match event {
                Event::InDoubt(report) => said.entry(report.call).or_default().0 += 1,
                Event::Abandoned(report) => said.entry(report.call.unwrap()).or_default().1 += 1,
                _ => {}
            }
        })
        .build()
        .unwrap();
    stack.send(lines()).await.unwrap();
    let ended: Arc<Mutex<HashMap<CallId, (String, Ended)>>> = Arc::default();
    let mut running = JoinSet::new();
    for task in 0..16_u64 {
        let (stack, ended, server) = (stack.clone(), Arc::clone(&ended), Arc::clone(&server));
        running.spawn(async move {
            let mut random = Rng::with_seed(seed ^ task << 20);
            for call in 0..25 {
                let within = ms(random.u64(400..1500));
                let start = Instant::now();
                if random.u32(0..3) == 0 {
                    let _ = stack.send(lines().within(within)).await;
                } else {
                    if random.u32(0..3) == 0 {
                        server.on(On::Tool("append"), misbehaviour(&mut random));
                    }
                    if random.u32(0..20) == 0 {
                        server.on(On::Tool("lines"), misbehaviour(&mut random));
                    }
                    let line = format!("l{task}-{call}");
                    let mut write = append(&line).within(within);
                    let id = write.context_mut().assign_id();
                    let writing = stack.send(write);
                    let result = match random.u32(0..8) {
                        0 => tokio::time::timeout(Duration::from_micros(random.u64(0..20_000)), writing)
                            .await
                            .ok(),
                        _ => Some(writing.await),
                    };
                    let how = match result {
                        None => Ended::Dropped,
                        Some(Ok(_)) => Ended::Ok,
                        Some(Err(error)) => Ended::Error(error.outcome()),
                    };
                    ended.lock().unwrap().insert(id, (line, how));
                }
                let took = start.elapsed();
                assert!(took < within + ms(2000), "{took:?} of {within:?}");
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
    assert_eq!(stack.shutdown(Duration::from_secs(10)).await, 0);
    drop(stack);
    tokio::time::sleep(ms(300)).await;
    let effects = server.effects();
    let listed: HashSet<CallId> =
        ledger.in_doubt().await.unwrap().iter().map(|entry| entry.id.call()).collect();
    let said = said.lock().unwrap();
    for (id, (line, how)) in &*ended.lock().unwrap() {
        let landed = effects.iter().filter(|effect| *effect == line).count() as u64;
        how.judge(line, landed, said.get(id).copied().unwrap_or_default(), listed.contains(id));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_threads_over_http() {
    for (seed, era) in [(0, Era::Sessions), (1, Era::Modern), (2, Era::NoSessions)] {
        press(seed, era, seed == 0).await;
    }
}
