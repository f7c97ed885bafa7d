//! Connections over narrow pipes, which hold up what they are given: in which order writes go, and what is told of them, in
//! random worlds of one or two stacks with one ledger.
//!
//! `GOAROUND_NARROW=n` flies n worlds instead of 300, and `GOAROUND_SEED=s` begins with that one and prints what happens.

#[path = "lab/pipes.rs"]
mod pipes;

use std::{
    collections::BTreeMap,
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Mutex},
    task::Poll,
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Effect, Evidence, InDoubt, Outcome, ReconnectLayer, Stack, WriteSafetyLayer,
    jsonrpc::{Request, Response},
    write_safety::{KeyedWrites, ledger::MemoryLedger},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::{Instant, advance},
};
use tokio_test::task;
use tower::ServiceExt;

use pipes::{Dice, Pipes, settle};

const SECOND: Duration = Duration::from_secs(1);

fn put(method: &'static str) -> Request {
    Request::new(method, serde_json::json!({})).unwrap().as_effect(Effect::Write)
}

/// W1 has waited for its connection and is in that one's queue. W2 is called then, and comes behind it. W1's frame has its
/// turn, and keeps its place before W2, which goes after it. W2 is done and acknowledged, W1 is lost, and truly did not land.
/// Its replay must not go over W2.
async fn waited_and_overtaken(key: fn(&Request) -> Option<&'static str>) {
    let net = Pipes::default();
    let safety = WriteSafetyLayer::new(|doubt: InDoubt<Request, Response>| async move {
        Ok::<_, BoxError>(doubt.not_landed_because("the server's journal does not have it, and it has ended"))
    })
    .conflict_key(key);
    let stack = Stack::builder(net.clone()).deadline(30 * SECOND).writes(safety).build().unwrap();
    // Makes the connection, and is in its queue within this poll.
    let mut first = task::spawn(stack.clone().oneshot(put("put/1")));
    assert!(first.poll().is_pending());
    assert_eq!(net.connects(), 1);
    // The connection's task has not had its turn. It is there, so that this one waits for nothing.
    let mut second = task::spawn(stack.clone().oneshot(put("put/2")));
    assert!(second.poll().is_pending());
    let mut peer = net.take(0);
    let seen = pipes::read_all(&mut peer).await;
    assert!(seen.find("put/1").unwrap() < seen.find("put/2").unwrap(), "W1 goes first: {seen}");
    peer.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":2,\"result\":2}\n").await.unwrap();
    settle().await;
    assert!(matches!(second.poll(), Poll::Ready(Ok(_))), "W2 is acknowledged");
    drop(peer);
    settle().await;
    let mut said = Poll::Pending;
    for _ in 0..10 {
        said = first.poll();
        if said.is_ready() {
            break;
        }
        settle().await;
    }
    if net.connects() > 1 {
        let seen = pipes::read_all(&mut net.take(1)).await;
        assert!(!seen.contains("put/1"), "W1 is replayed over W2, which was handed over later and is done");
    }
    println!("{said:?}");
    let Poll::Ready(Err(error)) = said else { panic!("{said:?}") };
    assert!(matches!(error.outcome(), Outcome::Unknown | Outcome::NotDone), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_write_that_has_waited_is_not_replayed_over_one_that_went_after_it() {
    waited_and_overtaken(|_| None).await;
}

#[tokio::test(start_paused = true)]
async fn nor_with_a_conflict_key() {
    waited_and_overtaken(|_| Some("k")).await;
}

#[tokio::test(start_paused = true)]
async fn nor_with_a_conflict_key_over_one_without() {
    waited_and_overtaken(|request| (request.method() == "put/1").then_some("k")).await;
}

// ----- random worlds of narrow pipes

#[derive(Default)]
struct Server {
    /// Each connection's unread part and whether it is alive.
    partial: BTreeMap<usize, Vec<u8>>,
    /// Writes as they arrived: number, connection.
    arrived: Vec<(u64, usize)>,
    /// How much each connection has brought in whole lines, and where each arrival began.
    consumed: BTreeMap<usize, usize>,
    began: Vec<usize>,
    /// Writes that were acknowledged, with how much of each living connection was begun by then.
    acknowledged: Vec<(u64, BTreeMap<usize, usize>)>,
    applied: Vec<u64>,
    unapplied: Vec<(u64, usize, u64)>,
    unanswered: Vec<(usize, u64)>,
}

#[derive(Clone, Copy, Debug)]
struct Write {
    key: Option<u64>,
    called: usize,
    stack: usize,
    /// How many had arrived when it was called.
    arrived: usize,
}

type Calling = Pin<Box<dyn Future<Output = Result<Response, CallError>> + Send>>;

fn touch(a: Option<u64>, b: Option<u64>) -> bool {
    a.is_none() || b.is_none() || a == b
}

#[derive(Default, Debug)]
struct Sum {
    writes: usize,
    replayed: usize,
    ok: usize,
    unknown: usize,
    not_done: usize,
    overtaken: usize,
    why: BTreeMap<String, usize>,
}

async fn narrow(seed: u64, trace: bool, sum: &mut Sum) -> Result<(), String> {
    let dice = Dice::new(seed);
    let exact = dice.once_in(2);
    let room = [40, 200, 1 << 10][dice.roll(3) as usize];
    let nets: [Pipes; 2] = std::array::from_fn(|_| Pipes::new(room, exact));
    let ledger = MemoryLedger::new();
    let two = dice.once_in(2);
    let server: Arc<Mutex<Server>> = Arc::default();
    let writes: Arc<Mutex<BTreeMap<u64, Write>>> = Arc::default();
    let mode = dice.roll(4);
    let keys = dice.roll(4);
    let truth = server.clone();
    let slow = dice.once_in(3);
    let check_dice = dice.clone();
    let check = move |doubt: InDoubt<Request, Response>| {
        let (truth, dice) = (truth.clone(), check_dice.clone());
        async move {
            if slow {
                tokio::time::sleep(dice.ms(3_000)).await;
            }
            let n: u64 = doubt.request().method().split('/').nth(1).unwrap().parse().unwrap();
            if truth.lock().unwrap().applied.contains(&n) {
                return Ok::<_, BoxError>(doubt.landed_without_result());
            }
            Ok(match doubt.closure() {
                Some(_) => doubt.not_landed_because("its connection is dead, and the server too"),
                None => doubt.unknown("it lives"),
            })
        }
    };
    let safety = match mode {
        0 => WriteSafetyLayer::new(check),
        1 => WriteSafetyLayer::new(check).trust(Evidence::FrameCut),
        2 => WriteSafetyLayer::refuse().keyed(KeyedWrites::param("/key").honoured_for(3_600 * SECOND)),
        _ => WriteSafetyLayer::refuse().trust(Evidence::FrameCut),
    };
    let safety = safety.conflict_key(move |request: &Request| {
        let n: u64 = request.method().split('/').nth(2)?.parse().ok()?;
        Some(n.to_string())
    });
    let safety = if mode < 2 && dice.once_in(2) { safety.attempt_timeout(SECOND) } else { safety };
    let reports: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
    let safety = safety.ledger(ledger);
    let stacks = nets.each_ref().map(|net| {
        let sink = reports.clone();
        Stack::builder(net.clone())
            .deadline(20 * SECOND)
            .writes(safety.clone())
            .reconnect(ReconnectLayer::once().crash_loop(u32::MAX, SECOND))
            .on_event(move |event| {
                let event = serde_json::to_value(event).unwrap();
                if event["event"] == "in_doubt" || event["event"] == "abandoned" {
                    let method = event["method"].as_str().unwrap().to_owned();
                    if event["outcome"] == "unknown" || event["event"] == "abandoned" {
                        *sink.lock().unwrap().entry(method).or_default() += 1;
                    }
                }
            })
            .build()
            .unwrap()
    });
    let mut running: Vec<(u64, String, Instant, task::Spawn<Calling>)> = Vec::new();
    let mut ended: BTreeMap<u64, Result<(), (Outcome, String)>> = BTreeMap::new();
    let mut dropped: Vec<u64> = Vec::new();
    let mut count = 0;
    let wrong =
        |what: String| format!("seed {seed} exact {exact} room {room} mode {mode} keys {keys}: {what}");
    let steps = 100 + dice.roll(200);
    for step in 0..=steps {
        let last = step == steps;
        match if last { 99 } else { dice.roll(20) } {
            0..=1 if running.len() < 5 => {
                for _ in 0..=dice.roll(2) {
                    count += 1;
                    let key = match keys {
                        0 => None,
                        // Each for a while: one that is left in doubt is so for good.
                        1 => Some(count / 3),
                        2 => Some(count / 6 * 2 + dice.roll(2)),
                        _ => (!dice.once_in(6)).then(|| count / 4 * 2 + dice.roll(2)),
                    };
                    let is_read = dice.once_in(4);
                    let at = if two { dice.roll(2) as usize } else { 0 };
                    let pad = "x".repeat([0, 10, 300, 2_000][dice.roll(4) as usize]);
                    let name = match (is_read, key) {
                        (true, _) => "get".to_owned(),
                        (false, Some(key)) => format!("put/{count}/{key}"),
                        (false, None) => format!("put/{count}"),
                    };
                    let request = Request::new(name.clone(), serde_json::json!({ "pad": pad })).unwrap();
                    let effect = if is_read { Effect::ReadOnly } else { Effect::Write };
                    if !is_read {
                        let arrived = server.lock().unwrap().arrived.len();
                        let write = Write { key, called: count as usize, stack: at, arrived };
                        writes.lock().unwrap().insert(count, write);
                    }
                    let limit = Duration::from_secs(2 + dice.roll(18));
                    let call: Calling =
                        Box::pin(stacks[at].clone().oneshot(request.as_effect(effect).within(limit)));
                    if trace {
                        println!("{step}: call {name}");
                    }
                    running.push((
                        if is_read { 0 } else { count },
                        name,
                        Instant::now() + limit,
                        task::spawn(call),
                    ));
                    if !dice.once_in(4) {
                        let at = running.len() - 1;
                        poll(&mut running, at, &mut ended, trace, &nets, &server);
                    }
                }
            }
            2..=7 => {
                for _ in 0..dice.roll(6) {
                    tokio::task::yield_now().await;
                }
            }
            8..=10 => {
                // Who is woken, in any order.
                for _ in 0..=running.len() {
                    let woken: Vec<_> = (0..running.len())
                        .filter(|at| running[*at].3.is_woken() || dice.once_in(10))
                        .collect();
                    if woken.is_empty() {
                        break;
                    }
                    let at = woken[dice.roll(woken.len() as u64) as usize];
                    poll(&mut running, at, &mut ended, trace, &nets, &server);
                }
            }
            11..=13 => {
                let net = if two { dice.roll(2) as usize } else { 0 };
                let at = nets[net].ends.lock().unwrap().len();
                if at > 0 {
                    let most = [30, 200, 5_000][dice.roll(3) as usize];
                    serve(&nets, &server, net * 1000 + at - 1, most, &dice, trace).map_err(&wrong)?;
                    replays(&server, &writes, mode).map_err(&wrong)?;
                }
            }
            14..=15 => answer(&nets, &server, &dice),
            16..=17 => {
                let net = if two { dice.roll(2) as usize } else { 0 };
                let at = nets[net].ends.lock().unwrap().len();
                let on = (net * 1000 + at).wrapping_sub(1);
                if at > 0 && dice.once_in(4) && server.lock().unwrap().arrived.iter().any(|it| it.1 == on) {
                    if trace {
                        println!("{step}: kill {on}");
                    }
                    drop(nets[net].ends.lock().unwrap()[at - 1].take());
                    let mut state = server.lock().unwrap();
                    state.unapplied.retain(|it| it.1 != on);
                    state.unanswered.retain(|it| it.0 != on);
                    state.partial.remove(&on);
                }
            }
            18 => {
                advance(dice.ms(1_500)).await;
            }
            19 if !running.is_empty() && dice.once_in(3) => {
                let at = dice.roll(running.len() as u64) as usize;
                let gone = running.swap_remove(at);
                if gone.0 > 0 {
                    dropped.push(gone.0);
                }
                drop(gone);
            }
            99 => {
                for round in 0..200 {
                    for at in (0..running.len()).rev() {
                        if round == 0 || running[at].3.is_woken() {
                            poll(&mut running, at, &mut ended, trace, &nets, &server);
                        }
                    }
                    for _ in 0..5 {
                        tokio::task::yield_now().await;
                    }
                    for (net, of) in nets.iter().enumerate() {
                        let at = of.ends.lock().unwrap().len();
                        if at > 0 {
                            serve(&nets, &server, net * 1000 + at - 1, 5_000, &dice, trace)
                                .map_err(&wrong)?;
                            replays(&server, &writes, mode).map_err(&wrong)?;
                            answer(&nets, &server, &dice);
                        }
                    }
                    advance(Duration::from_millis(250)).await;
                }
            }
            _ => {}
        }
    }
    if let Some((_, name, at, _)) = running.first() {
        return Err(wrong(format!("{name} hangs, {:?} past its time", Instant::now() - *at)));
    }
    drop(running);
    settle().await;
    let state = server.lock().unwrap();
    let reports = reports.lock().unwrap();
    for (n, write) in writes.lock().unwrap().iter() {
        sum.writes += 1;
        let applied = state.applied.iter().filter(|it| *it == n).count();
        sum.replayed += usize::from(state.arrived.iter().filter(|it| it.0 == *n).count() > 1);
        let name = match write.key {
            Some(key) => format!("put/{n}/{key}"),
            None => format!("put/{n}"),
        };
        let told = reports.get(&name).copied().unwrap_or_default();
        if applied > 1 {
            return Err(wrong(format!("{name} twice")));
        }
        let is_there = |what: &str| Err(wrong(format!("{name} {what}, applied {applied}, told {told}")));
        match ended.get(n) {
            Some(Ok(())) => {
                sum.ok += 1;
                if applied != 1 || told > 0 {
                    return is_there("ok");
                }
            }
            Some(Err((Outcome::NotDone, note))) => {
                sum.not_done += 1;
                sum.overtaken += usize::from(note.contains("handed over since"));
                *sum.why.entry(note.chars().take(60).collect()).or_default() += 1;
                if applied > 0 || told > 0 {
                    return is_there("not done");
                }
            }
            Some(Err((Outcome::Unknown, note))) => {
                sum.unknown += 1;
                sum.overtaken += usize::from(note.contains("handed over since"));
                if told != 1 {
                    return is_there("unknown");
                }
            }
            Some(Err((Outcome::DoneResultLost, _))) => {
                if applied != 1 {
                    return is_there("done");
                }
            }
            Some(Err(_)) => {}
            None if dropped.contains(n) => {
                if applied > 0 && told != 1 {
                    return is_there("dropped");
                }
            }
            None => return is_there("no end"),
        }
    }
    Ok(())
}

fn poll(
    running: &mut Vec<(u64, String, Instant, task::Spawn<Calling>)>,
    at: usize,
    ended: &mut BTreeMap<u64, Result<(), (Outcome, String)>>,
    trace: bool,
    nets: &[Pipes; 2],
    server: &Mutex<Server>,
) {
    if let Poll::Ready(said) = running[at].3.poll() {
        let (n, name, ..) = running.swap_remove(at);
        if said.is_ok() && n > 0 {
            let mut stamps = BTreeMap::new();
            for (net, of) in nets.iter().enumerate() {
                let count = of.ends.lock().unwrap().len();
                for on in net * 1000..net * 1000 + count {
                    if let Some(begun) = take_in(nets, server, on, 10_000) {
                        stamps.insert(on, begun);
                    }
                }
            }
            server.lock().unwrap().acknowledged.push((n, stamps));
        }
        if trace {
            println!("   {name} ends {:?}", said.as_ref().map(drop).map_err(|error| error.to_string()));
        }
        let said = said.map(drop).map_err(|error| {
            (
                error.outcome(),
                std::iter::once(error.cause().to_string())
                    .chain(error.notes().map(str::to_owned))
                    .collect::<Vec<_>>()
                    .join("; "),
            )
        });
        ended.insert(n, said);
    }
}

/// Takes in what is in that connection's pipe; how much has come over it.
fn take_in(nets: &[Pipes; 2], server: &Mutex<Server>, on: usize, most: usize) -> Option<usize> {
    let mut ends = nets[on / 1000].ends.lock().unwrap();
    let end = ends[on % 1000].as_mut()?;
    let mut state = server.lock().unwrap();
    let mut buffer = vec![0; most];
    if let Some(Ok(read)) = pipes::poll_once(Box::pin(end.read(&mut buffer)).as_mut()) {
        state.partial.entry(on).or_default().extend(&buffer[..read]);
    }
    let consumed = state.consumed.get(&on).copied().unwrap_or_default();
    Some(consumed + state.partial.get(&on).map_or(0, Vec::len))
}

fn serve(
    nets: &[Pipes; 2],
    server: &Mutex<Server>,
    on: usize,
    most: usize,
    dice: &Dice,
    trace: bool,
) -> Result<(), String> {
    if take_in(nets, server, on, most).is_none() {
        return Ok(());
    }
    let mut state = server.lock().unwrap();
    let mut input = state.partial.remove(&on).unwrap_or_default();
    while let Some(at) = input.iter().position(|byte| *byte == b'\n') {
        let line: Vec<u8> = input.drain(..=at).collect();
        let began = *state.consumed.entry(on).or_default();
        *state.consumed.entry(on).or_default() += line.len();
        let line: serde_json::Value =
            serde_json::from_slice(&line).map_err(|error| format!("a line that is none: {error}"))?;
        let (method, id) = (line["method"].as_str().unwrap_or_default().to_owned(), line["id"].as_u64());
        if trace {
            println!("   {on} reads {method}");
        }
        if let Some(n) = method.strip_prefix("put/") {
            let n: u64 = n.split('/').next().unwrap().parse().unwrap();
            state.arrived.push((n, on));
            state.began.push(began);
            state.unapplied.push((n, on, id.unwrap()));
        } else if let Some(id) = id {
            state.unanswered.push((on, id));
        }
    }
    state.partial.insert(on, input);
    // In order; some not at all before the server dies.
    while !state.unapplied.is_empty() && !dice.once_in(3) {
        let at = if dice.once_in(3) { dice.roll(state.unapplied.len() as u64) as usize } else { 0 };
        let (n, on, id) = state.unapplied.remove(at);
        let keyed = !state.applied.contains(&n);
        if keyed {
            state.applied.push(n);
        }
        if !dice.once_in(3) {
            state.unanswered.push((on, id));
        }
    }
    Ok(())
}

fn answer(nets: &[Pipes; 2], server: &Mutex<Server>, dice: &Dice) {
    let mut state = server.lock().unwrap();
    for _ in 0..=dice.roll(4) {
        if state.unanswered.is_empty() {
            return;
        }
        let at = dice.roll(state.unanswered.len() as u64) as usize;
        let (on, id) = state.unanswered.remove(at);
        let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":1}}\n");
        if let Some(end) = nets[on / 1000].ends.lock().unwrap()[on % 1000].as_mut() {
            let _ = pipes::poll_once(Box::pin(end.write_all(line.as_bytes())).as_mut());
        }
    }
}

/// No write comes a second time after another one that touches it came for the first time after it, unless the server
/// takes it for what it has.
fn replays(server: &Mutex<Server>, writes: &Mutex<BTreeMap<u64, Write>>, mode: u64) -> Result<(), String> {
    let state = server.lock().unwrap();
    let writes = writes.lock().unwrap();
    let Some((last, _)) = state.arrived.last() else { return Ok(()) };
    let _ = last;
    for (at, (n, _)) in state.arrived.iter().enumerate() {
        let Some(first) = state.arrived[..at].iter().position(|it| it.0 == *n) else { continue };
        if mode == 2 && state.applied.contains(n) {
            continue;
        }
        let between = &state.arrived[first + 1..at];
        if let Some((other, _)) = between.iter().find(|it| {
            let (other, this) = (writes[&it.0], writes[n]);
            it.0 != *n && other.stack == this.stack && touch(other.key, this.key)
        }) {
            return Err(format!(
                "{n} comes again over {other}: {:?}, called {} and {}",
                state.arrived, writes[n].called, writes[other].called
            ));
        }
        let over = state.acknowledged.iter().find(|(other, stamps)| {
            let (of, this) = (writes[other], writes[n]);
            let touches = of.stack != this.stack && of.key.is_some() && of.key == this.key;
            let begun_before = stamps.get(&state.arrived[at].1).is_some_and(|begun| state.began[at] < *begun);
            touches && of.arrived > first && !begun_before
        });
        if let Some((other, _)) = over {
            return Err(format!("{n} comes again over {other} of the other stack: {:?}", state.arrived));
        }
    }
    Ok(())
}

#[test]
fn whatever_a_narrow_pipe_holds_up_no_claim_is_broken() {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
    let (first, worlds) = (number("GOAROUND_SEED"), number("GOAROUND_NARROW").unwrap_or(300));
    let (trace, first) = (first.is_some(), first.unwrap_or(1));
    let (mut wrong, mut sum) = (Vec::new(), Sum::default());
    for seed in first..first + worlds {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        let flown = AssertUnwindSafe(|| runtime.block_on(narrow(seed, trace, &mut sum)));
        match catch_unwind(flown) {
            Ok(Ok(())) => {}
            Ok(Err(what)) => wrong.push(what),
            Err(_) => wrong.push(format!("seed {seed} panics")),
        }
    }
    println!("{sum:?}");
    assert!(wrong.is_empty(), "{} of {worlds}: {:#?}", wrong.len(), &wrong[..wrong.len().min(8)]);
    assert!(sum.replayed > 0 || worlds < 100, "no world has a replay: {sum:?}");
}
