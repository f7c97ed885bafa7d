//! What a JSON-RPC connection has in its queue or its buffer and has not begun with is its caller's still: it can be
//! withdrawn, and whether it may go is asked again when its turn comes. In random worlds, on real threads, and case by case.
//!
//! `GOAROUND_BUFFERS=n` flies n worlds instead of 300, and `GOAROUND_BUFFER=s` begins with that one and prints
//! what happens.

#[path = "lab/pipes.rs"]
mod pipes;

use std::{
    collections::{BTreeMap, BTreeSet},
    future::Future,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Cause, Deadline, Delivery, Effect, Evidence, InDoubt, Outcome, Refusal, Stack,
    WriteSafetyLayer,
    jsonrpc::{Client, Request, Response},
    write_safety::{KeyedWrites, ledger::MemoryLedger},
};
use serde_json::Value;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::{Instant, advance},
};
use tokio_test::task::{self, Spawn};
use tower::{Layer, Service, ServiceExt};

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);

// ----- the scripted transport

#[derive(Clone, Default)]
struct Wire(Arc<Mutex<WireState>>);

#[derive(Default)]
struct WireState {
    room: usize,
    /// Whether it keeps a copy of what it was offered and could not accept, and writes that out whatever happens.
    keeps_copies: bool,
    copy: Vec<u8>,
    holds_back: bool,
    write_error: bool,
    write_panics: bool,
    /// How much of what is offered is written all the same where it fails.
    leaks: usize,
    written: Vec<u8>,
    input: Vec<u8>,
    eof: bool,
    closed: bool,
    wakers: Vec<Waker>,
    broken: Option<String>,
}

impl Wire {
    fn lock(&self) -> MutexGuard<'_, WireState> {
        self.0.lock().unwrap_or_else(|it| it.into_inner())
    }

    fn set(&self, set: impl FnOnce(&mut WireState)) {
        let wakers = {
            let mut state = self.lock();
            set(&mut state);
            std::mem::take(&mut state.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    async fn accept(&self, bytes: usize) {
        self.set(|state| state.room = state.room.saturating_add(bytes));
        settle().await;
    }

    fn written(&self) -> String {
        String::from_utf8(self.lock().written.clone()).unwrap()
    }
}

struct Io(Wire);

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        if !state.input.is_empty() {
            let count = state.input.len().min(buf.remaining());
            buf.put_slice(&state.input[..count]);
            state.input.drain(..count);
            return Poll::Ready(Ok(()));
        }
        if state.eof {
            return Poll::Ready(Ok(()));
        }
        state.wakers.push(cx.waker().clone());
        Poll::Pending
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut state = self.0.lock();
        let copied = state.copy.len();
        if !bytes.starts_with(&state.copy) {
            state.broken = Some("what it was offered before is not offered again as it was".to_owned());
        }
        if state.write_error || state.write_panics {
            if state.keeps_copies || state.write_panics {
                let leaks = state.leaks.max(copied).min(bytes.len());
                state.written.extend_from_slice(&bytes[..leaks]);
                state.copy.clear();
            }
            if state.write_panics {
                drop(state);
                panic!("as tested");
            }
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let count = bytes.len().min(state.room);
        if count == 0 {
            if state.keeps_copies {
                state.copy = bytes.to_vec();
            }
            state.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        state.room -= count;
        state.copy.drain(..count.min(copied));
        state.written.extend_from_slice(&bytes[..count]);
        Poll::Ready(Ok(count))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.0.lock();
        if state.holds_back {
            state.wakers.push(cx.waker().clone());
            return Poll::Pending;
        }
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

impl Drop for Io {
    fn drop(&mut self) {
        let mut state = self.0.lock();
        state.closed = true;
        let copy = std::mem::take(&mut state.copy);
        state.written.extend_from_slice(&copy);
    }
}

async fn settle() {
    for _ in 0..30 {
        tokio::task::yield_now().await;
    }
}

fn request(method: impl Into<String>) -> Request {
    Request::new(method.into(), ()).unwrap()
}

fn big(method: &str, bytes: usize) -> Request {
    Request::new(method.to_owned(), ["x".repeat(bytes)]).unwrap()
}

type Said = Pin<Box<dyn Future<Output = Result<Response, CallError>> + Send>>;

// ----- a connection that stays dead

/// A call whose frame is cut by a pipe that is full is given up after the peer was found to be gone. Nobody waits for it,
/// and it must not put off the end, as one that was written whole does not.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_given_up_while_its_frame_is_cut_does_not_put_off_the_end_of_a_dead_connection() {
    for exact in [true, false] {
        let wire = Wire::default();
        let builder = Client::builder().probe(request("ping").read_only(), 5 * SECOND);
        let builder = if exact { builder.exact_writes() } else { builder };
        let client = builder.connect(Io(wire.clone()));
        let mut large = task::spawn(client.request(big("large", 1_000).within(3_600 * SECOND)));
        assert!(large.poll().is_pending());
        wire.accept(100).await;
        let mut small = task::spawn(client.request(request("small").within(SECOND)));
        assert!(small.poll().is_pending());
        advance(SECOND).await;
        assert!(small.poll().is_ready());
        settle().await;
        advance(6 * SECOND).await;
        settle().await;
        assert!(client.closure().is_none(), "one waits for it");
        // Its caller goes away.
        drop(large);
        settle().await;
        assert!(client.closure().is_some(), "exact {exact}: nobody waits, and the connection is still dead");
    }
}

// ----- random worlds of the connection's buffer

#[derive(Clone)]
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 11
    }

    fn below(&mut self, n: usize) -> usize {
        (self.next() % n as u64) as usize
    }

    fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }
}

#[derive(Clone, Debug)]
struct Told {
    delivery: Delivery,
    outcome: Outcome,
    cut: bool,
}

type Ends = Arc<Mutex<BTreeMap<String, Vec<Result<(), Told>>>>>;

/// Notes how each attempt of a write has ended.
#[derive(Clone)]
struct Recorder {
    client: Client,
    ends: Ends,
}

impl Service<Request> for Recorder {
    type Response = Response;
    type Error = CallError;
    type Future = Said;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request) -> Said {
        let name = request.method().to_owned();
        let (ends, call) = (self.ends.clone(), self.client.request(request));
        Box::pin(async move {
            let result = call.await;
            let end = result.as_ref().map(drop).map_err(told);
            ends.lock().unwrap().entry(name).or_default().push(end);
            result
        })
    }
}

fn told(error: &CallError) -> Told {
    Told {
        delivery: error.delivery(),
        outcome: error.outcome(),
        cut: matches!(error.cause(), Cause::Evidence(Evidence::FrameCut)),
    }
}

struct Running {
    name: String,
    call: Spawn<Said>,
    deadline: Option<Instant>,
}

const CAPACITY: usize = 24;

/// One world; what is wrong in it, if something is.
async fn world(seed: u64, trace: bool) -> Result<(), String> {
    let mut rng = Rng(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    for _ in 0..4 {
        rng.next();
    }
    let exact = rng.one_in(2);
    let probes = rng.one_in(3);
    let fails = rng.one_in(3);
    let wire = Wire::default();
    wire.lock().keeps_copies = !exact;
    let builder = Client::builder().max_in_flight(CAPACITY);
    let builder = if exact { builder.exact_writes() } else { builder };
    let builder = if probes { builder.probe(request("ping").read_only(), 20 * MS) } else { builder };
    let mut client = Some(builder.connect(Io(wire.clone())));
    let observer = client.as_ref().unwrap().closed();
    let mut observer = task::spawn(observer);
    let ends = Ends::default();
    let reports: Arc<Mutex<BTreeMap<String, usize>>> = Arc::default();
    let sink = reports.clone();
    let layer = WriteSafetyLayer::<Request, Response>::refuse().independent_writes().on_event(move |event| {
        let event = serde_json::to_value(event).unwrap();
        if event["event"] == "in_doubt" || event["event"] == "abandoned" {
            *sink.lock().unwrap().entry(event["method"].as_str().unwrap().to_owned()).or_default() += 1;
        }
    });
    let recorder = |client: &Client| Recorder { client: client.clone(), ends: ends.clone() };
    let mut safe = client.as_ref().map(|client| layer.layer(recorder(client)));
    let mut bare = client.as_ref().map(recorder);

    let mut running: Vec<Running> = Vec::new();
    let mut writes: BTreeSet<String> = BTreeSet::new();
    // What the callers were told at the end.
    let mut finals: BTreeMap<String, Result<(), Told>> = BTreeMap::new();
    let mut dropped: BTreeMap<String, usize> = BTreeMap::new();
    let mut expiries: BTreeMap<String, Instant> = BTreeMap::new();
    let mut seen_to = 0;
    let mut ids: BTreeMap<u64, String> = BTreeMap::new();
    let mut names: BTreeSet<String> = BTreeSet::new();
    let mut cancelled: BTreeSet<u64> = BTreeSet::new();
    let mut unanswered: Vec<(u64, String)> = Vec::new();
    let mut count = 0;
    let wrong = |what: String| -> Result<(), String> {
        Err(format!("seed {seed} exact {exact} probes {probes}: {what}"))
    };

    let steps = 20 + rng.below(80);
    for step in 0..=steps {
        let last = step == steps;
        if last {
            wire.set(|state| (state.room, state.holds_back) = (usize::MAX / 2, false));
            settle().await;
        }
        let doing = if last { 99 } else { rng.below(20) };
        match doing {
            0..=6 => {
                for _ in 0..=rng.below(4) {
                    let (Some(safe), Some(bare)) = (&mut safe, &mut bare) else { break };
                    count += 1;
                    let name = format!("m{count:04}");
                    let size = match rng.below(12) {
                        0 => 17 << 10,
                        1 => 9 << 10,
                        2 => 3 << 10,
                        _ => rng.below(40),
                    };
                    let limit = (!rng.one_in(4)).then(|| MS * (1 + rng.below(60) as u32));
                    let mut call = big(&name, size);
                    call = match limit {
                        Some(limit) => call.within(limit),
                        None => call.deadline(Deadline::Never),
                    };
                    let is_write = !rng.one_in(3);
                    let future: Said = match is_write {
                        true => {
                            writes.insert(name.clone());
                            Box::pin(safe.call(call))
                        }
                        false => bare.call(call.read_only()),
                    };
                    let mut call = task::spawn(future);
                    let deadline = limit.map(|limit| Instant::now() + limit);
                    if trace {
                        println!("{step}: call {name} size {size} write {is_write} limit {limit:?}");
                    }
                    match call.poll() {
                        Poll::Ready(result) => {
                            finals.insert(name, result.map(drop).map_err(|error| told(&error)));
                        }
                        Poll::Pending => running.push(Running { name, call, deadline }),
                    }
                }
                if !rng.one_in(3) {
                    settle().await;
                }
            }
            7..=10 => {
                let room = match rng.below(6) {
                    0 => 1,
                    1 => 20_000,
                    2 => 1_000,
                    _ => rng.below(300),
                };
                if trace {
                    println!("{step}: accept {room}");
                }
                wire.accept(room).await;
            }
            11..=12 => {
                let by = MS * rng.below(25) as u32;
                if trace {
                    println!("{step}: advance {by:?}");
                }
                advance(by).await;
                if rng.one_in(2) {
                    settle().await;
                }
            }
            13..=14 if !running.is_empty() => {
                let at = rng.below(running.len());
                let gone = running.swap_remove(at);
                if trace {
                    println!("{step}: drop {}", gone.name);
                }
                dropped.insert(gone.name.clone(), wire.lock().written.len());
                drop(gone);
                if rng.one_in(2) {
                    settle().await;
                }
            }
            15..=16 => {
                let holds = rng.one_in(2);
                wire.set(|state| state.holds_back = holds);
                settle().await;
            }
            17 => {
                wire.set(|state| {
                    state
                        .input
                        .extend_from_slice(b"{\"jsonrpc\":\"2.0\",\"id\":\"q\",\"method\":\"roots\"}\n");
                });
                settle().await;
            }
            18 if !unanswered.is_empty() => {
                let (id, name) = unanswered.swap_remove(rng.below(unanswered.len()));
                let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":\"{name}\"}}\n");
                wire.set(|state| state.input.extend_from_slice(line.as_bytes()));
                settle().await;
            }
            19 if fails && rng.one_in(6) => {
                let leaks = rng.below(400);
                let what = rng.below(5);
                if trace {
                    println!("{step}: fails {what}");
                }
                wire.set(|state| {
                    state.leaks = leaks;
                    match what {
                        0 => state.eof = true,
                        1 => state.write_error = true,
                        2 => state.write_panics = true,
                        _ => {}
                    }
                });
                match what {
                    3 => client.as_ref().into_iter().for_each(Client::close),
                    4 => (client, safe, bare) = (None, None, None),
                    _ => {}
                }
                if rng.one_in(2) {
                    settle().await;
                }
            }
            _ => {}
        }
        // The callers look.
        let now = Instant::now();
        let mut at = 0;
        while at < running.len() {
            let is_over = running[at].deadline.is_some_and(|deadline| now >= deadline);
            let looks = is_over || running[at].call.is_woken();
            if !looks {
                at += 1;
                continue;
            }
            match running[at].call.poll() {
                Poll::Ready(result) => {
                    let one = running.swap_remove(at);
                    if trace {
                        println!(
                            "{step}: {} ends {:?}",
                            one.name,
                            result.as_ref().map(drop).map_err(|e| e.to_string())
                        );
                    }
                    if let Ok(response) = &result {
                        let text = response.raw().get().trim_matches('"');
                        if text != one.name {
                            return wrong(format!("{} was answered {text}", one.name));
                        }
                    }
                    if is_over {
                        expiries.insert(one.name.clone(), now);
                    }
                    finals.insert(one.name, result.map(drop).map_err(|error| told(&error)));
                }
                Poll::Pending if is_over => {
                    return wrong(format!("{} outlasts its deadline", running[at].name));
                }
                Poll::Pending => at += 1,
            }
        }
        // The server reads.
        let (text, broken) = {
            let state = wire.lock();
            (state.written[seen_to..].to_vec(), state.broken.clone())
        };
        if let Some(broken) = broken {
            return wrong(broken);
        }
        let whole = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        seen_to += whole;
        for line in text[..whole].split(|byte| *byte == b'\n').filter(|line| !line.is_empty()) {
            let Ok(message) = serde_json::from_slice::<Value>(line) else {
                return wrong(format!("no JSON on the wire: {}", String::from_utf8_lossy(line)));
            };
            match (message["id"].as_u64(), message["method"].as_str()) {
                (Some(id), Some(name)) => {
                    if ids.insert(id, name.to_owned()).is_some() {
                        return wrong(format!("the id {id} is on the wire twice"));
                    }
                    if name == "ping" {
                        if rng.one_in(2) || last {
                            let line = format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":1}}\n");
                            wire.set(|state| state.input.extend_from_slice(line.as_bytes()));
                        }
                        continue;
                    }
                    if !names.insert(name.to_owned()) {
                        return wrong(format!("{name} is on the wire twice"));
                    }
                    if names.last().is_some_and(|last| last != name) {
                        return wrong(format!("{name} goes after later ones"));
                    }
                    unanswered.push((id, name.to_owned()));
                }
                (None, Some("notifications/cancelled")) => {
                    let id = message["params"]["requestId"].as_u64().unwrap();
                    if !cancelled.insert(id) {
                        return wrong(format!("{id} is cancelled twice"));
                    }
                    if !ids.contains_key(&id) {
                        return wrong(format!("{id} is cancelled and was never sent"));
                    }
                }
                _ => {}
            }
        }
        // What was told of what is on the wire.
        if step % 8 != 0 && !last {
            continue;
        }
        if last {
            settle().await;
        }
        let all = String::from_utf8(wire.lock().written.clone()).unwrap();
        let ends = ends.lock().unwrap().clone();
        for (name, end) in &finals {
            let place = all.find(&format!("\"{name}\""));
            let began = place.is_some();
            let whole = names.contains(name);
            if let Err(told) = end {
                if told.delivery == Delivery::NotSent && began {
                    return wrong(format!("{name} was told not to be sent and is on the wire: {told:?}"));
                }
                if told.cut && whole {
                    return wrong(format!("{name} was told to be cut and is on the wire: {told:?}"));
                }
                if told.outcome == Outcome::NotDone && whole {
                    return wrong(format!("{name} was told not to be done and is on the wire: {told:?}"));
                }
                // Of the last one there may be too little to tell whose it is; a transport that panics has said nothing.
                let is_cut = !all.ends_with('\n') && !all.is_empty();
                let panics = wire.lock().write_panics;
                if exact && told.delivery == Delivery::Ambiguous && !began && !is_cut && !panics {
                    return wrong(format!(
                        "{name} was told to be ambiguous and nothing of it is sent: {told:?}"
                    ));
                }
            }
        }
        for (name, ends) in &ends {
            if ends.len() != 1 {
                return wrong(format!("{name} ended {} times", ends.len()));
            }
        }
        let reports = reports.lock().unwrap().clone();
        for (name, many) in &reports {
            if *many != 1 {
                return wrong(format!("{name} was reported {many} times"));
            }
        }
        for name in &writes {
            let unknown = match (finals.get(name), dropped.get(name)) {
                (Some(Err(told)), _) => told.outcome == Outcome::Unknown,
                (None, Some(_)) => names.contains(name),
                _ => false,
            };
            if unknown && !reports.contains_key(name) {
                return wrong(format!("{name} is unknown and was not reported"));
            }
            if exact
                && reports.contains_key(name)
                && !all.contains(&format!("\"{name}\""))
                && dropped.contains_key(name)
                && (all.is_empty() || all.ends_with('\n'))
                && !wire.lock().write_panics
            {
                return wrong(format!("{name} was given up, was never sent and is reported"));
            }
        }
    }
    // The places are all free again.
    let closed = wire.lock().closed;
    drop(running);
    settle().await;
    if let Some(client) = client.as_ref().filter(|_| !closed) {
        advance(60 * MS).await;
        settle().await;
        if client.closure().is_none() && !probes {
            let mut calls: Vec<_> =
                (0..CAPACITY).map(|at| task::spawn(client.request(request(format!("z{at}"))))).collect();
            for call in &mut calls {
                if let Poll::Ready(result) = call.poll() {
                    return wrong(format!("a place is lost: {result:?}"));
                }
            }
            settle().await;
            let written = wire.written();
            for at in 0..CAPACITY {
                if !written.contains(&format!("\"z{at}\"")) {
                    return wrong(format!("z{at} is not sent"));
                }
            }
            let mut more = task::spawn(client.request(request("more")));
            if more.poll().is_pending() {
                return wrong("there is a place too many".to_owned());
            }
        }
    }
    drop((client, safe, bare));
    advance(SECOND).await;
    settle().await;
    if observer.poll().is_pending() {
        return wrong("it is not closed".to_owned());
    }
    Ok(())
}

#[test]
fn no_frame_is_told_to_be_what_it_is_not_whatever_the_transport_accepts() {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
    let (first, worlds) = (number("GOAROUND_BUFFER"), number("GOAROUND_BUFFERS").unwrap_or(300));
    let (trace, first) = (first.is_some(), first.unwrap_or(1));
    let mut found = Vec::new();
    for seed in first..first + worlds {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
        match catch_unwind(AssertUnwindSafe(|| runtime.block_on(world(seed, trace)))) {
            Ok(Ok(())) => {}
            Ok(Err(what)) => found.push(what),
            Err(panic) => found.push(format!("seed {seed} panicked: {:?}", panic.downcast_ref::<String>())),
        }
        if found.len() > 8 {
            break;
        }
    }
    assert!(found.is_empty(), "{found:#?}");
}

// ----- a call that was told to be unknown goes later

/// A transport during whose first write something happens on another thread, and that accepts everything from the second
/// on. It has something to read, so that the connection's task goes round once more before it hears of what happened.
struct Meanwhile {
    happens: Option<Box<dyn FnOnce() + Send>>,
    input: Option<&'static [u8]>,
    written: Arc<Mutex<Vec<u8>>>,
}

impl AsyncRead for Meanwhile {
    fn poll_read(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        match self.input.take() {
            Some(input) => Poll::Ready({
                buf.put_slice(input);
                Ok(())
            }),
            None => Poll::Pending,
        }
    }
}

impl AsyncWrite for Meanwhile {
    fn poll_write(mut self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(happens) = self.happens.take() {
            happens();
            return Poll::Pending;
        }
        self.written.lock().unwrap().extend_from_slice(bytes);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// docs/limits.md: with exact writes, a call of which no byte was accepted is unknown where another thread's turn comes
/// during a system call that offers it once more and is refused; it does not go after that.
#[tokio::test(start_paused = true)]
async fn a_call_that_is_given_up_while_it_is_offered_does_not_go_though_the_task_goes_round_once_more() {
    type Slot = Arc<Mutex<Option<(Spawn<Said>, Option<Poll<Result<Response, CallError>>>)>>>;
    for is_dropped in [false, true] {
        let (slot, written) = (Slot::default(), Arc::<Mutex<Vec<u8>>>::default());
        let happens = {
            let slot = slot.clone();
            Box::new(move || {
                let mut slot = slot.lock().unwrap();
                if is_dropped {
                    *slot = None;
                } else if let Some((call, said)) = &mut *slot {
                    *said = Some(call.poll());
                }
            })
        };
        let io = Meanwhile {
            happens: Some(happens),
            input: Some(b"{\"method\":\"progress\"}\n"),
            written: written.clone(),
        };
        let client = Client::builder().exact_writes().without_cancel().connect(io);
        let mut call: Spawn<Said> = task::spawn(Box::pin(client.request(request("one").within(SECOND))));
        assert!(call.poll().is_pending());
        *slot.lock().unwrap() = Some((call, None));
        advance(SECOND).await;
        settle().await;
        if let Some((_, said)) = &*slot.lock().unwrap() {
            let Some(Poll::Ready(Err(error))) = said else { panic!("{said:?}") };
            assert_eq!(error.delivery(), Delivery::Ambiguous);
        }
        assert_eq!(String::from_utf8_lossy(&written.lock().unwrap()), "", "dropped: {is_dropped}");
    }
}

// ----- with real threads

/// Callers whose time is up and a pipe that is narrow, on several threads: what was told not to be sent is not read by the
/// server, and no place is lost.
#[test]
fn nothing_that_was_told_not_to_be_sent_is_read_with_several_threads() {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    for exact in [true, false] {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
        runtime.block_on(async {
            let (ours, theirs) = tokio::io::duplex(96);
            let builder = Client::builder().max_in_flight(64);
            let client = if exact { builder.exact_writes() } else { builder }.connect(ours);
            let read = Arc::new(Mutex::new(BTreeSet::<String>::new()));
            let server = tokio::spawn({
                let read = read.clone();
                async move {
                    let (reader, mut writer) = tokio::io::split(theirs);
                    let mut lines = BufReader::new(reader).lines();
                    let mut rng = Rng(77);
                    while let Ok(Some(line)) = lines.next_line().await {
                        let message: Value = serde_json::from_str(&line).unwrap();
                        if let (Some(id), Some(name)) = (message["id"].as_u64(), message["method"].as_str()) {
                            assert!(read.lock().unwrap().insert(name.to_owned()), "{name} twice");
                            if !rng.one_in(3) {
                                let answer =
                                    format!("{{\"jsonrpc\":\"2.0\",\"id\":{id},\"result\":\"{name}\"}}\n");
                                if writer.write_all(answer.as_bytes()).await.is_err() {
                                    return;
                                }
                            }
                        }
                        if rng.one_in(20) {
                            tokio::time::sleep(Duration::from_micros(1500)).await;
                        }
                    }
                }
            });
            let until = std::time::Instant::now() + Duration::from_millis(800);
            let layer = WriteSafetyLayer::<Request, Response>::refuse().independent_writes();
            let callers: Vec<_> = (0..24_u64)
                .map(|caller| {
                    let (client, layer) = (client.clone(), layer.clone());
                    tokio::spawn(async move {
                        let mut rng = Rng(caller * 7919 + 13);
                        let mut service = layer.layer(client);
                        let (mut not_sent, mut at, mut unknown, mut done) = (Vec::new(), 0, 0, 0);
                        while std::time::Instant::now() < until {
                            at += 1;
                            let name = format!("c{caller}x{at}");
                            let limit = Duration::from_micros(rng.below(3_000) as u64);
                            let call = service.call(big(&name, rng.below(60)).within(limit));
                            tokio::pin!(call);
                            let gives_up = rng.one_in(5);
                            let said = tokio::select! {
                                biased;
                                said = &mut call => Some(said),
                                () = tokio::time::sleep(limit) => match gives_up {
                                    true => None,
                                    false => {
                                        let mut said = None;
                                        for _ in 0..20 {
                                            tokio::select! {
                                                biased;
                                                it = &mut call => { said = Some(it); break; }
                                                () = tokio::time::sleep(MS) => {}
                                            }
                                        }
                                        assert!(said.is_some(), "outlasts its deadline");
                                        said
                                    }
                                },
                            };
                            match said {
                                Some(Err(error)) if error.delivery() == Delivery::NotSent => {
                                    not_sent.push(name)
                                }
                                Some(Err(error)) => unknown += u32::from(error.outcome() == Outcome::Unknown),
                                Some(Ok(answer)) => {
                                    assert_eq!(answer.raw().get().trim_matches('"'), name);
                                    done += 1;
                                }
                                None => {}
                            }
                        }
                        (not_sent, unknown, done)
                    })
                })
                .collect();
            let mut all = Vec::new();
            let (mut unknown, mut done) = (0, 0);
            for caller in callers {
                let (not_sent, more, too) = caller.await.unwrap();
                all.extend(not_sent);
                (unknown, done) = (unknown + more, done + too);
            }
            tokio::time::sleep(50 * MS).await;
            assert!(client.closure().is_none());
            let places: Vec<_> =
                (0..64).map(|at| task::spawn(client.request(request(format!("z{at}"))))).collect();
            for mut place in places {
                if let Poll::Ready(Err(error)) = place.poll() {
                    panic!("a place is lost: {error}");
                }
            }
            tokio::time::sleep(50 * MS).await;
            let read = read.lock().unwrap();
            println!(
                "exact {exact}: {} not sent, {unknown} unknown, {done} done, {} read",
                all.len(),
                read.len()
            );
            for name in &all {
                assert!(!read.contains(name), "{name} was told not to be sent and was read");
            }
            drop(server);
        });
    }
}

// ----- a replay in its connection's queue, and its key's doubt

/// A read that is too large for the next connection's pipe, and then the replay of that write, which lies behind it.
async fn stalls_before(
    stack: &Stack<pipes::Pipes, Request, Response>,
    write: &mut Spawn<impl Future<Output = Result<Response, CallError>>>,
) -> Spawn<Said> {
    let large: Said = Box::pin(stack.clone().oneshot(big("large", 8 << 10).read_only()));
    let mut large = task::spawn(large);
    for _ in 0..3 {
        assert!(large.poll().is_pending());
        settle().await;
    }
    for _ in 0..3 {
        assert!(write.poll().is_pending());
        settle().await;
    }
    large
}

/// docs/limits.md: "A doubt about a key stops what is called later, what waits for a connection and every replay." W1's replay
/// is the caller's still, in the queue (or the buffer, with exact writes) of a connection that stalls, when W2, which another
/// stack with the same ledger was called for before it, ends unknown: its caller is told, and writes that are called now are
/// refused. W1's replay goes all the same, and W2 may land on it when it is acknowledged.
#[tokio::test(start_paused = true)]
async fn a_replay_that_its_connection_has_yet_to_begin_does_not_go_once_its_key_is_in_doubt() {
    let (ours, theirs) = (pipes::Pipes::default(), pipes::Pipes::default());
    let ledger = MemoryLedger::new();
    let safety = WriteSafetyLayer::<Request, Response>::refuse()
        .keyed(KeyedWrites::param("/key").honoured_for(3_600 * SECOND))
        .conflict_key(|request: &Request| request.method().strip_prefix("put/").map(str::to_owned))
        .ledger(ledger.clone());
    let refuses = WriteSafetyLayer::<Request, Response>::refuse()
        .conflict_key(|request: &Request| request.method().strip_prefix("put/").map(str::to_owned))
        .ledger(ledger.clone());
    let stack = Stack::builder(ours.clone()).deadline(30 * SECOND).writes(safety).build().unwrap();
    let other_stack = Stack::builder(theirs.clone()).deadline(30 * SECOND).writes(refuses).build().unwrap();
    let put = || Request::new("put/k", serde_json::json!({})).unwrap().as_effect(Effect::Write);

    let mut second = task::spawn(other_stack.clone().oneshot(put()));
    assert!(second.poll().is_pending());
    let mut first = task::spawn(stack.clone().oneshot(put()));
    assert!(first.poll().is_pending());
    settle().await;
    ours.kill(0).await;
    let mut large = stalls_before(&stack, &mut first).await;
    assert_eq!(ours.connects(), 2);
    // W2 ends unknown.
    theirs.kill(0).await;
    let Poll::Ready(Err(error)) = second.poll() else { panic!() };
    assert_eq!(error.outcome(), Outcome::Unknown);
    let Poll::Ready(Err(error)) = task::spawn(stack.clone().oneshot(put())).poll() else { panic!() };
    assert!(matches!(error.cause(), Cause::Refused(Refusal::KeyInDoubt(_))), "the control: {error}");
    // All tasks have their turns.
    let _ = (first.poll(), large.poll());
    settle().await;
    let seen = pipes::read_all(&mut ours.take(1)).await;
    assert!(seen.contains("large"));
    assert!(!seen.contains("put/k"), "W1 goes again over W2, which is in doubt");
}

/// W1's frame is cut by the end of its process's pipe, which is trusted: it may be sent again, and is not in doubt. Its
/// replay is the caller's still, in the queue of the next connection, which stalls. W3, on the same key and called later at
/// another stack with the same ledger, is done and acknowledged. Then the pipe takes more, and W1 goes over W3.
#[tokio::test(start_paused = true)]
async fn a_replay_that_its_connection_has_yet_to_begin_does_not_go_over_a_write_that_was_acknowledged_since()
{
    use tokio::io::AsyncWriteExt;
    let (ours, theirs) = (pipes::Pipes::new(1 << 10, true), pipes::Pipes::new(1 << 10, true));
    let ledger = MemoryLedger::new();
    let safety = || {
        WriteSafetyLayer::<Request, Response>::refuse()
            .trust(Evidence::FrameCut)
            .conflict_key(|_: &Request| Some("k"))
            .ledger(ledger.clone())
    };
    let stack = |net: &pipes::Pipes| {
        Stack::builder(net.clone()).deadline(30 * SECOND).writes(safety()).build().unwrap()
    };
    let (stack, other_stack) = (stack(&ours), stack(&theirs));

    let mut first = task::spawn(stack.clone().oneshot(big("put/1", 4_000).as_effect(Effect::Write)));
    assert!(first.poll().is_pending());
    settle().await;
    ours.kill(0).await;
    let mut large = stalls_before(&stack, &mut first).await;
    assert_eq!(ours.connects(), 2);
    // W3 is done.
    let mut third = task::spawn(other_stack.clone().oneshot(request("put/3").as_effect(Effect::Write)));
    assert!(third.poll().is_pending());
    settle().await;
    let mut peer = theirs.take(0);
    assert!(pipes::read_all(&mut peer).await.contains("put/3"));
    peer.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":3}\n").await.unwrap();
    settle().await;
    assert!(matches!(third.poll(), Poll::Ready(Ok(_))));
    // All tasks have their turns before the pipe takes more.
    let _ = (first.poll(), large.poll());
    settle().await;
    let mut peer = ours.take(1);
    let seen = pipes::read_all(&mut peer).await;
    assert!(seen.contains("large"));
    assert!(!seen.contains("put/1"), "W1 is replayed over W3, which is done");
}

/// A connection to a process whose end is known later.
#[derive(Clone)]
struct Supervised {
    client: Client,
    exit: tokio::sync::watch::Receiver<bool>,
}

impl Service<Request> for Supervised {
    type Response = Response;
    type Error = CallError;
    type Future = Said;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Service::poll_ready(&mut self.client, cx)
    }

    fn call(&mut self, request: Request) -> Said {
        let (call, exit) = (self.client.request(request), self.exit.clone());
        Box::pin(async move {
            call.await.map_err(|error| {
                if !matches!(error.cause(), Cause::Closed(_)) {
                    return error;
                }
                let mut exit = exit.clone();
                error.with_exit(async move {
                    let _ = exit.wait_for(|known| *known).await;
                    // It has outlived all signals.
                    goaround::Exit::new(None, false)
                })
            })
        })
    }
}

/// W1's process has closed its pipe, a quarantine has passed and W1 is absent: its replay is with the next connection, which
/// stalls, and is the caller's still. Now it shows that the old process has outlived all signals, which voids the quarantine
/// (docs/effect-check.md): it may yet do W1. The replay goes all the same once the pipe takes more.
#[tokio::test(start_paused = true)]
async fn a_replay_that_its_connection_has_yet_to_begin_does_not_go_once_the_old_process_has_outlived_its_signals()
 {
    for exits_before in [true, false] {
        let net = pipes::Pipes::new(1 << 10, true);
        let (tell, exit) = tokio::sync::watch::channel(false);
        let connector = {
            let net = net.clone();
            tower::service_fn(move |()| {
                let (client, exit) = (Service::call(&mut net.clone(), ()), exit.clone());
                async move { Ok::<_, BoxError>(Supervised { client: client.await?, exit }) }
            })
        };
        let safety = WriteSafetyLayer::new(|doubt: InDoubt<Request, Response>| async move {
            Ok::<_, BoxError>(doubt.not_landed())
        })
        .quarantine(SECOND);
        let stack = Stack::builder(connector).deadline(600 * SECOND).writes(safety).build().unwrap();
        let mut first = task::spawn(stack.clone().oneshot(request("put/1").as_effect(Effect::Write)));
        assert!(first.poll().is_pending());
        settle().await;
        let mut peer = net.take(0);
        assert!(pipes::read_all(&mut peer).await.contains("put/1"));
        drop(peer);
        settle().await;
        assert!(first.poll().is_pending());
        let mut large = task::spawn(stack.clone().oneshot(big("large", 8 << 10).read_only()));
        assert!(large.poll().is_pending());
        if exits_before {
            tell.send_replace(true);
        }
        // The next process is waited for until the last one is gone, within bounds.
        let mut said = Poll::Pending;
        for _ in 0..120 {
            assert!(large.poll().is_pending());
            settle().await;
            if said.is_pending() {
                said = first.poll();
            }
            settle().await;
            advance(SECOND / 2).await;
        }
        assert_eq!(net.connects(), 2);
        if exits_before {
            // The control: where it shows before, there is no replay.
            let Poll::Ready(Err(error)) = said else { panic!("{said:?}") };
            assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
        } else {
            assert!(said.is_pending(), "{said:?}");
            tell.send_replace(true);
            for _ in 0..3 {
                settle().await;
                if let Poll::Ready(said) = first.poll() {
                    println!("{said:?}");
                    break;
                }
            }
        }
        let mut peer = net.take(1);
        let seen = pipes::read_all(&mut peer).await;
        assert!(seen.contains("large"));
        assert!(
            !seen.contains("put/1"),
            "sent again beside the old process; it showed before: {exits_before}"
        );
    }
}
