//! A single stack under attack, with true declarations: fences that come late or not at all, trusted refusals, early looks,
//! panics of the caller's functions, ledgers that do what they say they could not, in any order of turns.
//!
//! `GOAROUND_TURNS=n` gives random turns to n worlds instead of 300, and `GOAROUND_TURN=s` begins with that one and prints
//! what happens. `GOAROUND_LIE=quarantine`, `key` or `exit` makes what is declared false: harm must then be found.

#[path = "lab/pipes.rs"]
mod pipes;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::Future,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Cause, Effect, Event, Evidence, Exit, InDoubt, Outcome, Pause, Progress,
    RetryReadOnly, Stack, WriteSafetyLayer,
    jsonrpc::{self, Client, Request, Response},
    write_safety::{
        KeyedWrites,
        ledger::{Entry, EntryId, Ledger, LedgerError, MemoryLedger, State},
    },
};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
    sync::watch,
    time::{Instant, advance},
};
use tokio_test::task;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, util::BoxCloneService};

use pipes::*;

type Safety = WriteSafetyLayer<Request, Response>;
type Doubt = InDoubt<Request, Response>;

const MS: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
/// Nothing lands later than this after its last byte, where that is declared.
const LATEST: Duration = Duration::from_millis(40);

/// For how long the server keeps an idempotency key.
const WINDOW: Duration = Duration::from_millis(150);

#[derive(Clone, Debug, PartialEq)]
enum Step {
    /// To a connection.
    Given(u64),
    Seen(u64),
    Lands(u64),
}

/// The server: its processes, and what they have done.
#[derive(Default)]
struct World {
    log: Vec<Step>,
    processes: Vec<Process>,
    trace: bool,
    /// The idempotency keys that it keeps, and until when.
    kept: HashMap<String, Instant>,
}

struct Process {
    io: Option<DuplexStream>,
    inbox: Vec<u8>,
    /// Lands then, and whether it is answered.
    due: Vec<(Instant, u64, Option<Value>)>,
    dead: bool,
    gone_at: Option<Instant>,
    gone: watch::Sender<bool>,
    stalled: bool,
}

#[derive(Clone)]
struct Net {
    world: Arc<Mutex<World>>,
    /// The processes of its stack.
    mine: Arc<Mutex<Vec<usize>>>,
    dice: Dice,
    exit_ends: bool,
    waits: bool,
    fails: bool,
}

#[derive(Clone)]
struct Adapter {
    client: Client,
    world: Arc<Mutex<World>>,
    gone: watch::Receiver<bool>,
    exit_ends: bool,
}

struct Adapted {
    future: jsonrpc::ResponseFuture,
    gone: watch::Receiver<bool>,
    exit_ends: bool,
}

fn adapt(gone: &watch::Receiver<bool>, exit_ends: bool, error: CallError) -> CallError {
    if let Cause::Closed(_) = error.cause() {
        let mut gone = gone.clone();
        let error = error.with_exit(async move {
            let _ = gone.wait_for(|gone| *gone).await;
            Exit::new(None, true)
        });
        return if exit_ends { error.exit_ends_effects() } else { error };
    }
    let Some(answer) = error.answer() else { return error };
    match answer.code {
        429 => {
            let wait = answer.data.as_ref().and_then(Value::as_u64).unwrap_or_default();
            CallError::evidence(Evidence::TooManyRequests, error).after(Duration::from_millis(wait))
        }
        500 => CallError::ambiguous(error),
        _ => error,
    }
}

impl Future for Adapted {
    type Output = Result<Response, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let answer = Pin::new(&mut self.future).poll(cx);
        answer.map_err(|error| adapt(&self.gone, self.exit_ends, error))
    }
}

impl Service<Request> for Adapter {
    type Response = Response;
    type Error = CallError;
    type Future = Adapted;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        let Self { gone, exit_ends, .. } = self.clone();
        self.client.poll_ready(cx).map_err(|error| adapt(&gone, exit_ends, error))
    }

    fn call(&mut self, request: Request) -> Adapted {
        let Self { client, gone, exit_ends, world } = self.clone();
        if request.method().starts_with("put/") {
            let number = number_of(&request);
            world.lock().unwrap().trace(|| format!("{number} is given"));
            world.lock().unwrap().log.push(Step::Given(number));
        }
        Adapted { future: client.request(request), gone, exit_ends }
    }
}

impl Service<()> for Net {
    type Response = Adapter;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Adapter, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let net = self.clone();
        Box::pin(async move {
            let last = net.mine.lock().unwrap().last().copied();
            let last = last.map(|at| net.lock().processes[at].gone.subscribe());
            if net.waits
                && let Some(mut last) = last
            {
                let _ = last.wait_for(|gone| *gone).await;
            }
            match net.dice.roll(6) {
                0 => tokio::time::sleep(net.dice.ms(20)).await,
                1 if net.fails => return Err("refused".into()),
                _ => {}
            }
            let (ours, theirs) = duplex(1 << 9);
            let gone = watch::Sender::new(false);
            let receiver = gone.subscribe();
            let mut world = net.lock();
            net.mine.lock().unwrap().push(world.processes.len());
            world.processes.push(Process {
                io: Some(theirs),
                inbox: Vec::new(),
                due: Vec::new(),
                dead: false,
                gone_at: None,
                gone,
                stalled: false,
            });
            drop(world);
            // A pipe in memory has what it accepted and nothing else: what is overdue in the buffer can be taken out.
            let client = Client::builder().exact_writes().connect(ours);
            Ok(Adapter { client, world: Arc::clone(&net.world), gone: receiver, exit_ends: net.exit_ends })
        })
    }
}

impl Net {
    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap()
    }
}

impl World {
    fn trace(&self, what: impl FnOnce() -> String) {
        if self.trace {
            static START: std::sync::OnceLock<Instant> = std::sync::OnceLock::new();
            println!("{:?}: {}", START.get_or_init(Instant::now).elapsed(), what());
        }
    }

    fn landed(&self, number: u64) -> bool {
        self.log.contains(&Step::Lands(number))
    }

    fn dies(&mut self, at: usize, after: Duration) {
        let process = &mut self.processes[at];
        if !process.dead {
            process.dead = true;
            process.io = None;
            process.inbox.clear();
            process.gone_at = Some(Instant::now() + after);
            self.trace(|| format!("{at} dies, gone after {after:?}"));
        }
    }

    /// What is due by now, in the order of time.
    fn catch_up(&mut self, exit_ends: bool, answers: &mut Vec<(usize, Value)>) -> Result<(), String> {
        let now = Instant::now();
        loop {
            let lands = self.processes.iter().enumerate().flat_map(|(at, process)| {
                process.due.iter().enumerate().map(move |(due, it)| (it.0, at, Some(due)))
            });
            let ends = self.processes.iter().enumerate().filter(|(_, process)| !*process.gone.borrow());
            let ends = ends.filter_map(|(at, process)| Some((process.gone_at?, at, None)));
            let Some((when, at, due)) = lands.chain(ends).min_by_key(|it| it.0) else { return Ok(()) };
            if when > now {
                return Ok(());
            }
            match due {
                Some(due) => {
                    let (_, number, answer) = self.processes[at].due.remove(due);
                    self.lands(number)?;
                    if let (Some(answer), false) = (answer, self.processes[at].dead) {
                        answers.push((at, answer));
                    }
                }
                None => {
                    let lie = std::env::var("GOAROUND_LIE").is_ok_and(|lie| lie == "exit");
                    if exit_ends && !lie {
                        self.processes[at].due.clear();
                    }
                    self.trace(|| format!("{at} is gone"));
                    self.processes[at].gone.send_replace(true);
                }
            }
        }
    }

    fn lands(&mut self, number: u64) -> Result<(), String> {
        self.trace(|| format!("{number} lands"));
        if self.landed(number) {
            return Err(format!("{number} lands twice"));
        }
        self.log.push(Step::Lands(number));
        Ok(())
    }
}

/// A ledger that takes its time, fails, and has done at times what it failed at.
struct Slow(MemoryLedger, Dice);

impl Slow {
    async fn wait(&self) -> Result<(), LedgerError> {
        tokio::time::sleep(self.1.ms(5)).await;
        if self.1.once_in(25) {
            return Err(LedgerError::Unavailable("as it happens".into()));
        }
        Ok(())
    }
}

impl Ledger for Slow {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        self.wait().await?;
        let (id, revision) = (entry.id, 0);
        let done = self.0.enter(entry).await;
        traced(|| format!("ledger: enter {id} {revision} {done:?}"));
        self.wait().await?;
        done
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.wait().await?;
        let what = format!("{state:?}");
        let done = self.0.settle(id, revision, state).await;
        traced(|| format!("ledger: settle {id} {revision} {what} {done:?}"));
        self.wait().await?;
        done
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.wait().await?;
        let done = self.0.claim(id, revision).await;
        traced(|| format!("ledger: claim {id} {revision} {done:?}"));
        self.wait().await?;
        done
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        self.0.in_doubt().await
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        self.0.forget(id, by).await
    }
}

fn traced(what: impl FnOnce() -> String) {
    if std::env::var_os("GOAROUND_TURN").is_some() {
        println!("{}", what());
    }
}

fn number_of(request: &Request) -> u64 {
    request.method().strip_prefix("put/").map_or(0, |number| number.parse().unwrap())
}

/// From a hundred on each write has one.
fn key_of(number: u64, keys: u64) -> Option<u64> {
    if keys >= 100 {
        return Some(number % (keys - 99));
    }
    (keys > 0 && number % (keys + 1) < keys).then(|| number % (keys + 1))
}

#[derive(Default, Clone, Copy)]
struct Counts {
    replays: u64,
    told: u64,
    unknown: u64,
    trusted: u64,
}

async fn run(seed: u64) -> Result<Counts, String> {
    let dice = Dice::new(seed);
    let fence = dice.roll(4); // 0 exit, 1 quarantine, 2 both, 3 none
    let (exit_ends, quarantined) = (fence == 0 || fence == 2, fence == 1 || fence == 2);
    let world = Arc::new(Mutex::new(World::default()));
    world.lock().unwrap().trace = std::env::var_os("GOAROUND_TURN").is_some();
    let mut keys = dice.roll(6);
    let two = keys > 0 && dice.once_in(2);
    if two {
        keys += 99;
    }
    let panics = dice.once_in(2);
    let refuses = dice.once_in(6);
    let keyed = dice.once_in(3);
    let eager = quarantined || keyed;
    let trusts = dice.once_in(2);
    let independent = dice.once_in(3) && (trusts || !refuses);
    let events = Arc::new(Mutex::new(HashMap::<String, (u64, u64)>::new()));
    let result_lost = Arc::new(Mutex::new(HashSet::<String>::new()));
    let mut stacks: Vec<Stack<Net, Request, Response>> = Vec::new();
    for _ in 0..1 + usize::from(two) {
        let net = Net {
            world: Arc::clone(&world),
            mine: Arc::default(),
            dice: dice.clone(),
            exit_ends,
            waits: dice.once_in(2),
            fails: dice.once_in(2),
        };
        let mine = Arc::clone(&net.mine);
        let mut safety = match refuses {
            true => Safety::refuse(),
            false => Safety::new({
                let (world, dice) = (Arc::clone(&world), dice.clone());
                move |doubt: Doubt| {
                    let (world, dice, mine) = (Arc::clone(&world), dice.clone(), Arc::clone(&mine));
                    let number = number_of(doubt.request());
                    assert!(!(panics && dice.once_in(20)), "the check");
                    async move {
                        if dice.once_in(2) {
                            tokio::time::sleep(dice.ms(30)).await;
                        }
                        if dice.once_in(3) {
                            doubt.probe(Request::new("list", ()).unwrap().read_only()).await?;
                        }
                        if dice.once_in(20) {
                            std::future::pending::<()>().await;
                        }
                        assert!(!(panics && dice.once_in(20)), "the check");
                        let landed = world.lock().unwrap().landed(number);
                        let gone = {
                            let world = world.lock().unwrap();
                            world.trace(|| format!("checks {number}: {landed} {:?}", doubt.fence()));
                            doubt
                                .attempts()
                                .iter()
                                .any(|attempt| attempt.delivery == goaround::Delivery::Ambiguous)
                                && doubt.attempts().iter().all(|attempt| {
                                    attempt.generation.is_none_or(|number| {
                                        let at = mine.lock().unwrap().get(number as usize - 1).copied();
                                        let process = at.and_then(|at| world.processes.get(at));
                                        process.is_some_and(|process| {
                                            *process.gone.borrow() && process.due.is_empty()
                                        })
                                    })
                                })
                        };
                        Ok::<_, BoxError>(match landed {
                            true if dice.once_in(2) => doubt.landed_without_result(),
                            true => doubt.landed(Response::new(0).unwrap()),
                            false if dice.once_in(8) => doubt.in_flight(dice.ms(20)),
                            false if dice.once_in(20) => doubt.partial(),
                            false if gone && dice.once_in(2) => {
                                doubt.not_landed_because("the server says so")
                            }
                            false => doubt.not_landed(),
                        })
                    }
                }
            }),
        };
        if quarantined && !refuses {
            let lie = std::env::var("GOAROUND_LIE").is_ok_and(|lie| lie == "quarantine");
            safety = safety.quarantine(if lie { MS } else { LATEST + 5 * MS });
        }
        if dice.once_in(2) && !refuses {
            safety = safety.look_first();
        }
        if dice.once_in(2) && !refuses {
            safety = safety.landed_with(move |_| Response::new(1).unwrap());
        }
        if dice.once_in(2) && !refuses {
            safety = safety.max_checks(1 + dice.roll(2) as usize);
        }
        if dice.once_in(2) && !refuses {
            safety = safety.check_timeout(10 * MS + dice.ms(60));
        }
        if keyed {
            safety =
                safety.keyed(KeyedWrites::param("/key").honoured_for(match std::env::var("GOAROUND_LIE") {
                    Ok(lie) if lie == "key" => 5 * WINDOW,
                    _ => WINDOW,
                }));
        }
        if trusts {
            safety = safety.trust(Evidence::TooManyRequests);
        }
        if independent {
            safety = safety.independent_writes();
        }
        safety = safety.conflict_key({
            let dice = dice.clone();
            move |request: &Request| {
                assert!(!(panics && dice.once_in(40)), "the key");
                key_of(number_of(request), keys)
            }
        });
        match stacks.first() {
            Some(first) => safety = safety.ledger(first.ledger()),
            None if dice.once_in(2) => safety = safety.ledger(Slow(MemoryLedger::new(), dice.clone())),
            None => {}
        }
        if dice.once_in(2) {
            safety = safety.attempt_timeout(10 * MS + dice.ms(100));
        }
        let mut retry = RetryReadOnly.attempts(1 + dice.roll(4) as u32);
        if dice.once_in(2) {
            retry = retry.attempt_timeout(10 * MS + dice.ms(60));
        }
        let sink = Arc::clone(&events);
        let sinks = dice.clone();
        let lost = Arc::clone(&result_lost);
        let stack = Stack::builder(net.clone())
            .deadline(SECOND)
            .reconnect(goaround::ReconnectLayer::once().crash_loop(u32::MAX, SECOND))
            .retry(retry)
            .writes(safety)
            .on_event(move |event| {
                match event {
                    goaround::Event::InDoubt(report) => {
                        let unknown =
                            matches!(report.outcome, Some(Outcome::Unknown | Outcome::DoneResultLost));
                        let mut events = sink.lock().unwrap();
                        let entry = events.entry(report.call.to_string()).or_default();
                        if unknown {
                            entry.0 += 1
                        } else {
                            entry.1 += 1
                        }
                        if report.outcome == Some(Outcome::DoneResultLost) {
                            lost.lock().unwrap().insert(report.call.to_string());
                        }
                    }
                    goaround::Event::Abandoned(report) => {
                        let mut events = sink.lock().unwrap();
                        let entry = events.entry(report.call.unwrap().to_string()).or_default();
                        if report.outcome == Some(Outcome::Unknown) { entry.0 += 1 } else { entry.1 += 1 }
                    }
                    _ => {}
                }
                assert!(!(panics && sinks.once_in(20)), "the sink");
            })
            .build()
            .unwrap();
        stacks.push(stack);
    }
    type Calling = task::Spawn<Pin<Box<dyn Future<Output = Result<Response, CallError>> + Send>>>;
    struct Under {
        number: u64,
        id: String,
        write: bool,
        until: Instant,
        call: Calling,
        asked: bool,
        pause: Option<Pause>,
        moves: Option<Arc<Progress>>,
    }
    let mut calls: Vec<Under> = Vec::new();
    let (mut next, mut counts) = (1, Counts::default());
    let mut ended: Vec<(u64, Option<Outcome>)> = Vec::new();
    let mut shutdown = None;
    let strict = dice.once_in(2);
    let busy = dice.once_in(4);
    let few = 1 + dice.roll(4) as usize;
    // The keys in doubt of calls that have ended, and the writes that were called since.
    let mut doubts: BTreeMap<u64, u64> = BTreeMap::new();
    let mut must_not: HashMap<u64, u64> = HashMap::new();
    let mut steps = 0;
    loop {
        steps += 1;
        let is_over = steps > 500;
        if is_over && calls.is_empty() {
            break;
        }
        if steps > 8000 {
            return Err(format!("{} hang", calls.len()));
        }
        let mut answers = Vec::new();
        world.lock().unwrap().catch_up(exit_ends, &mut answers)?;
        for (at, answer) in answers {
            write_line(&world, at, &answer);
        }
        // What is sent is there at once, but for a server that stalls.
        drain(&world, eager);
        let never = refuses && !trusts && !keyed;
        let processes = world.lock().unwrap().processes.len();
        for at in 0..if eager { processes } else { 0 } {
            serve(at, &world, &dice, keys, independent, never, is_over, &must_not, &mut counts, eager)?;
        }
        match dice.roll(12) {
            0 | 1 if !is_over && (busy || calls.len() < few) => {
                let write = !dice.once_in(4);
                let mut request = match write {
                    true => Request::new(format!("put/{next}"), json!({})).unwrap().as_effect(Effect::Write),
                    false if dice.once_in(2) => {
                        Request::new("large", json!({ "of": "x".repeat(3 << 10) })).unwrap().read_only()
                    }
                    false => Request::new("list", ()).unwrap().read_only(),
                };
                let limit = match dice.once_in(30) {
                    true => Duration::ZERO,
                    false => 20 * MS + dice.ms(600),
                };
                request = request.within(limit);
                if dice.once_in(5) {
                    request = request.pause_while_asking();
                }
                let moves = request.context().progress().cloned();
                let id = request.context_mut().assign_id().to_string();
                let mut service = stacks[dice.roll(stacks.len() as u64) as usize].clone();
                service.ready().await.unwrap();
                let number = next;
                next += 1;
                let Ok(call) = catch_unwind(AssertUnwindSafe(|| service.call(request))) else {
                    ended.push((number, Some(Outcome::NotDone)));
                    continue;
                };
                if let Some(key) = key_of(number, keys).filter(|_| write)
                    && let Some(by) = doubts.get(&key)
                {
                    must_not.insert(number, *by);
                }
                world.lock().unwrap().trace(|| format!("calls {number} write {write} {limit:?}"));
                calls.push(Under {
                    number,
                    id,
                    write,
                    until: Instant::now() + limit,
                    call: task::spawn(Box::pin(call)),
                    asked: false,
                    pause: None,
                    moves,
                });
                if dice.once_in(3) {
                    continue;
                }
                let last = calls.len() - 1;
                calls[last].asked = true;
                if let Poll::Ready(result) = calls[last].call.poll() {
                    let under = calls.remove(last);
                    end(&under.id, under.number, under.write, &result, &events, &mut ended, &mut counts)?;
                    note_doubt(under.number, under.write, &result, keys, &mut doubts);
                }
            }
            2..=5 if !calls.is_empty() => {
                let at = dice.roll(calls.len() as u64) as usize;
                let under = &mut calls[at];
                let now = Instant::now();
                if strict && !under.call.is_woken() && steps % 7 != 0 {
                    continue;
                }
                if let Some(moves) = &under.moves {
                    match dice.roll(6) {
                        0 if !is_over => under.pause = Some(moves.pause()),
                        1 | 2 => under.pause = None,
                        _ if is_over => under.pause = None,
                        _ => {}
                    }
                }
                let late = now >= under.until + MS && under.moves.is_none();
                if late && under.asked && !under.call.is_woken() {
                    settle().await;
                    if !under.call.is_woken() {
                        return Err(format!("{} was not woken at its deadline", under.number));
                    }
                }
                under.asked = true;
                let polled = catch_unwind(AssertUnwindSafe(|| under.call.poll()));
                let Ok(polled) = polled else {
                    return Err(format!("{} panics", under.number));
                };
                world.lock().unwrap().trace(|| format!("polls {}: {polled:?}", under.number));
                match polled {
                    Poll::Pending if late => {
                        let woken = under.call.is_woken();
                        return Err(format!("{} outlasts its deadline, woken {woken}", under.number));
                    }
                    Poll::Pending => {}
                    Poll::Ready(result) => {
                        let under = calls.remove(at);
                        end(&under.id, under.number, under.write, &result, &events, &mut ended, &mut counts)?;
                        note_doubt(under.number, under.write, &result, keys, &mut doubts);
                    }
                }
            }
            6 if !calls.is_empty() && dice.once_in(6) => {
                let at = dice.roll(calls.len() as u64) as usize;
                let Under { number, id, write, call, .. } = calls.remove(at);
                drop(call);
                world.lock().unwrap().trace(|| format!("drops {number}"));
                let (unknown, known) = events.lock().unwrap().remove(&id).unwrap_or_default();
                if unknown + known > 1 {
                    return Err(format!("{number} abandoned {unknown} {known} times"));
                }
                world.lock().unwrap().trace(|| format!("{number} is abandoned: {unknown} {known}"));
                if write && unknown + known == 0 {
                    ended.push((number, Some(Outcome::NotDone)));
                }
                if write
                    && unknown == 1
                    && !result_lost.lock().unwrap().contains(&id)
                    && let Some(key) = key_of(number, keys)
                {
                    doubts.insert(key, number);
                }
            }
            7 if dice.once_in(60) && shutdown.is_none() => {
                let (stack, grace) = (stacks[0].clone(), dice.ms(100));
                world.lock().unwrap().trace(|| "shutdown".to_owned());
                shutdown = Some(task::spawn(Box::pin(async move { stack.shutdown(grace).await })));
            }
            8 if dice.once_in(3) && shutdown.is_some() => {
                let done = shutdown.as_mut().is_some_and(|shutdown| shutdown.poll().is_ready());
                shutdown.take_if(|_| done);
            }
            7 | 8 => settle().await,
            9 => advance(dice.ms(15)).await,
            _ => {
                let alive: Vec<_> = {
                    let world = world.lock().unwrap();
                    (0..world.processes.len()).filter(|at| !world.processes[*at].dead).collect()
                };
                if !alive.is_empty() {
                    let at = alive[dice.roll(alive.len() as u64) as usize];
                    serve(
                        at,
                        &world,
                        &dice,
                        keys,
                        independent,
                        never,
                        is_over,
                        &must_not,
                        &mut counts,
                        eager,
                    )?;
                }
            }
        }
    }
    // What lands late.
    for _ in 0..40 {
        advance(10 * MS).await;
        world.lock().unwrap().catch_up(exit_ends, &mut Vec::new())?;
    }
    let world = world.lock().unwrap();
    for (number, outcome) in &ended {
        let landed = world.landed(*number);
        match outcome {
            None if !landed => return Err(format!("{number} lost")),
            Some(Outcome::NotDone) if landed => return Err(format!("{number} was done")),
            Some(Outcome::DoneResultLost) if !landed => return Err(format!("{number} was not done")),
            _ => {}
        }
    }
    if let Some((id, (unknown, _))) = events.lock().unwrap().iter().find(|(_, it)| it.0 > 0) {
        return Err(format!("{id} reported {unknown} more"));
    }
    Ok(counts)
}

fn note_doubt(
    number: u64,
    write: bool,
    result: &Result<Response, CallError>,
    keys: u64,
    doubts: &mut BTreeMap<u64, u64>,
) {
    if let (true, Err(error)) = (write, result)
        && error.outcome() == Outcome::Unknown
        && let Some(key) = key_of(number, keys)
    {
        doubts.insert(key, number);
    }
}

fn end(
    id: &str,
    number: u64,
    write: bool,
    result: &Result<Response, CallError>,
    events: &Mutex<HashMap<String, (u64, u64)>>,
    ended: &mut Vec<(u64, Option<Outcome>)>,
    counts: &mut Counts,
) -> Result<(), String> {
    let outcome = result.as_ref().err().map(CallError::outcome);
    let (unknown, known) = events.lock().unwrap().remove(id).unwrap_or_default();
    if !write {
        return match outcome {
            None | Some(Outcome::NoAnswer | Outcome::NotDone) if unknown + known == 0 => Ok(()),
            _ => Err(format!("a read {outcome:?}, reported {unknown} {known}")),
        };
    }
    let expected = u64::from(matches!(outcome, Some(Outcome::Unknown | Outcome::DoneResultLost)));
    if unknown != expected || known > 1 {
        return Err(format!("{outcome:?} reported {unknown} times, {known}"));
    }
    counts.told += u64::from(outcome.is_none());
    counts.unknown += expected;
    ended.push((number, outcome));
    Ok(())
}

fn drain(world: &Mutex<World>, quarantined: bool) {
    let mut world = world.lock().unwrap();
    for process in &mut world.processes {
        if process.stalled && !quarantined {
            continue;
        }
        let Some(io) = &mut process.io else { continue };
        let mut buffer = [0; 256];
        while let Some(Ok(read @ 1..)) = poll_once(Box::pin(io.read(&mut buffer)).as_mut()) {
            process.inbox.extend(&buffer[..read]);
            if process.inbox.len() > 1 << 10 && !quarantined {
                break;
            }
        }
    }
}

fn write_line(world: &Mutex<World>, at: usize, answer: &Value) {
    let line = format!("{answer}\n");
    if let Some(io) = &mut world.lock().unwrap().processes[at].io {
        let _ = poll_once(Box::pin(io.write_all(line.as_bytes())).as_mut());
    }
}

#[expect(clippy::too_many_arguments, reason = "a test")]
fn serve(
    at: usize,
    world: &Mutex<World>,
    dice: &Dice,
    keys: u64,
    independent: bool,
    never: bool,
    is_over: bool,
    must_not: &HashMap<u64, u64>,
    counts: &mut Counts,
    quarantined: bool,
) -> Result<(), String> {
    let mut locked = world.lock().unwrap();
    if locked.processes[at].dead {
        return Ok(());
    }
    if dice.once_in(if quarantined { 40 } else { 12 }) && !is_over {
        locked.dies(at, dice.ms(60));
        return Ok(());
    }
    if dice.once_in(10) {
        locked.processes[at].stalled ^= true;
    }
    if is_over {
        locked.processes[at].stalled = false;
    }
    // All that is there is read at once where a time counts from its last byte.
    loop {
        let process = &mut locked.processes[at];
        let Some(end) = process.inbox.iter().position(|byte| *byte == b'\n') else { return Ok(()) };
        let line: Vec<u8> = process.inbox.drain(..=end).collect();
        let request: Value = serde_json::from_slice(&line).unwrap();
        let method = request["method"].as_str().unwrap().to_owned();
        if request.get("id").is_none() {
            continue;
        }
        locked.trace(|| format!("{at} reads {method}"));
        let mut answer = Some(json!({ "jsonrpc": "2.0", "id": request["id"], "result": 0 }));
        let error = |code: i64, data: u64| {
            json!({ "jsonrpc": "2.0", "id": request["id"],
                    "error": { "code": code, "message": "no", "data": data } })
        };
        if dice.once_in(6) && !is_over {
            answer = None;
        }
        if let Some(number) = method.strip_prefix("put/") {
            let number: u64 = number.parse().unwrap();
            let seen = locked.log.iter().filter(|step| **step == Step::Seen(number)).count();
            if seen > 2 || (never && seen > 0) {
                return Err(format!("{number} comes {} times", seen + 1));
            }
            if let Some(by) = must_not.get(&number) {
                return Err(format!("{number} comes while its key is in doubt by {by}"));
            }
            let key = request["params"]["key"].as_str().map(str::to_owned);
            let now = Instant::now();
            let is_known =
                key.as_ref().and_then(|key| locked.kept.get(key)).is_some_and(|until| now < *until);
            if seen > 0 {
                counts.replays += 1;
            }
            let given = |number: u64| {
                let log = &locked.log;
                let first = log.iter().position(|step| *step == Step::Given(number)).unwrap();
                let last = log.iter().rposition(|step| *step == Step::Given(number)).unwrap();
                (first, last)
            };
            if seen > 0 && !independent && !is_known {
                // What was handed back before the server saw any of it was not sent.
                let seen = locked.log.iter().position(|step| *step == Step::Seen(number)).unwrap();
                let first = locked.log[..seen].iter().rposition(|step| *step == Step::Given(number)).unwrap();
                let last = given(number).1;
                for step in &locked.log[first..last] {
                    if let Step::Given(other) = step
                        && *other != number
                        && given(*other).0 > first
                        && locked.landed(*other)
                        && (key_of(*other, keys) == key_of(number, keys)
                            || key_of(*other, keys).is_none()
                            || key_of(number, keys).is_none())
                    {
                        return Err(format!("{number} is replayed over {other}"));
                    }
                }
            }
            locked.log.push(Step::Seen(number));
            let fate = dice.roll(12);
            if fate != 0
                && let Some(key) = key
            {
                locked.kept.entry(key).or_insert(now + WINDOW);
            }
            match fate {
                _ if is_known => {
                    locked.trace(|| format!("{number} is known by its key"));
                    // It is under way, or done: answered when it is.
                    if !locked.landed(number) {
                        answer = Some(error(500, 0));
                    }
                }
                0 if !is_over => {
                    locked.trace(|| format!("{number} refused"));
                    counts.trusted += 1;
                    answer = answer.map(|_| error(429, dice.roll(30)));
                }
                1 if !is_over => {
                    locked.dies(at, dice.ms(60));
                    return Ok(());
                }
                2 | 3 if !is_over => {
                    let when = Instant::now() + dice.ms(LATEST.as_millis() as u64);
                    let reply = if dice.once_in(3) { Some(error(500, 0)) } else { answer.take() };
                    if dice.once_in(2) {
                        locked.processes[at].due.push((when, number, reply));
                        answer = None;
                    } else {
                        // Lands after its error was told.
                        locked.processes[at].due.push((when, number, None));
                        answer = Some(error(500, 0));
                    }
                }
                4 if !is_over => {
                    locked.lands(number)?;
                    answer = answer.map(|_| error(500, 0));
                }
                5 if !is_over => {
                    locked.lands(number)?;
                    locked.dies(at, dice.ms(60));
                    return Ok(());
                }
                _ => locked.lands(number)?,
            }
        } else if dice.once_in(12) && !is_over {
            answer = Some(error(500, 0));
        }
        if let Some(answer) = answer {
            drop(locked);
            write_line(world, at, &answer);
            locked = world.lock().unwrap();
        }
        if !quarantined && dice.once_in(2) {
            return Ok(());
        }
    }
}

#[test]
fn whoever_has_his_turn_when_no_claim_is_broken_with_late_effects_and_panics() {
    let hook = std::panic::take_hook();
    if std::env::var_os("GOAROUND_TURN").is_none() {
        std::panic::set_hook(Box::new(|_| {}));
    }
    let runs = std::env::var("GOAROUND_TURNS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(300);
    let first = std::env::var("GOAROUND_TURN")
        .or_else(|_| std::env::var("GOAROUND_FIRST"))
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or(500);
    let mut wrong = BTreeMap::<String, Vec<u64>>::new();
    let mut sum = Counts::default();
    for seed in first..first + runs {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
        match catch_unwind(AssertUnwindSafe(|| runtime.block_on(run(seed)))) {
            Ok(Ok(Counts { replays, told, unknown, trusted })) => {
                sum.replays += replays;
                sum.told += told;
                sum.unknown += unknown;
                sum.trusted += trusted;
            }
            Ok(Err(what)) => {
                let kind = what.chars().filter(|c| !c.is_ascii_digit()).collect();
                wrong.entry(kind).or_default().push(seed);
            }
            Err(_) => wrong.entry("panics".into()).or_default().push(seed),
        }
    }
    std::panic::set_hook(hook);
    println!("{} replays, {} told, {} unknown, {} refused", sum.replays, sum.told, sum.unknown, sum.trusted);
    let counts: Vec<_> =
        wrong.iter().map(|(what, seeds)| (what, seeds.len(), &seeds[..seeds.len().min(5)])).collect();
    assert!(wrong.is_empty(), "{counts:#?}");
}

// ===== A replay while its key is in doubt =====

/// A connection that answers a call when the test says so, in the order of hand-overs.
#[derive(Clone, Default)]
struct Told(Arc<Mutex<Vec<Given>>>);

type Given = (u64, Option<Tell>);

type Tell = tokio::sync::oneshot::Sender<Result<u64, CallError>>;

impl Service<Tag> for Told {
    type Response = u64;
    type Error = CallError;
    type Future = Said;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Tag) -> Said {
        let (tell, told) = tokio::sync::oneshot::channel();
        self.0.lock().unwrap().push((*request.get_ref(), Some(tell)));
        Box::pin(async move { told.await.unwrap_or_else(|_| Err(CallError::ambiguous("dropped"))) })
    }
}

impl Told {
    fn seen(&self) -> Vec<u64> {
        self.0.lock().unwrap().iter().map(|it| it.0).collect()
    }

    fn tell(&self, at: usize, result: Result<u64, CallError>) {
        let tell = self.0.lock().unwrap()[at].1.take().unwrap();
        let _ = tell.send(result);
    }

    fn connector(&self) -> impl Service<(), Response = Self, Error = BoxError, Future: Send> + Send + use<> {
        let told = self.clone();
        tower::service_fn(move |()| std::future::ready(Ok::<_, BoxError>(told.clone())))
    }
}

type Log = Arc<Mutex<Vec<Value>>>;

fn sink(log: &Log) -> impl Fn(Event<'_>) + Send + Sync + use<> {
    let log = Arc::clone(log);
    move |event| log.lock().unwrap().push(serde_json::to_value(event).unwrap())
}

fn of_kind(log: &Log, kind: &str) -> Vec<Value> {
    log.lock().unwrap().iter().filter(|event| event["event"] == kind).cloned().collect()
}

fn pay(number: u64) -> Tag {
    goaround::Tagged::new(number, Effect::Write).named("pay")
}

/// W2 and W1 are under way on one key. W2 ends unknown: its caller is told, later writes on the key are refused with that
/// doubt. W1, which the server has refused (and that is trusted), is sent again all the same; a late W2 then lands on it,
/// though W1, the later one, was acknowledged.
#[tokio::test(start_paused = true)]
async fn a_trusted_replay_does_not_go_while_its_key_is_in_doubt_by_another_write() {
    let server = Told::default();
    let safety = Tags::refuse().trust(Evidence::TooManyRequests).conflict_key(|_: &Tag| Some("k"));
    let stack = Stack::builder(server.connector()).deadline(30 * SECOND).writes(safety).build().unwrap();
    let mut second = task::spawn(stack.clone().oneshot(pay(2)));
    assert!(second.poll().is_pending());
    let mut first = task::spawn(stack.clone().oneshot(pay(1)));
    assert!(first.poll().is_pending());
    server.tell(1, Err(CallError::evidence(Evidence::TooManyRequests, "429").after(SECOND)));
    assert!(first.poll().is_pending());
    server.tell(0, Err(CallError::ambiguous("reset")));
    let Poll::Ready(Err(error)) = second.poll() else { panic!() };
    assert_eq!(error.outcome(), Outcome::Unknown);
    // The control: a new one is refused.
    let Poll::Ready(Err(error)) = task::spawn(stack.clone().oneshot(pay(3))).poll() else { panic!() };
    assert_eq!(error.outcome(), Outcome::NotDone);
    advance(2 * SECOND).await;
    let said = first.poll();
    assert_eq!(server.seen(), [2, 1], "W1 again while W2 is in doubt: {said:?}");
}

/// The same by a check: a closure takes both down, W2's check cannot tell, W1's finds that it is absent.
#[tokio::test(start_paused = true)]
async fn a_checked_replay_does_not_go_while_its_key_is_in_doubt_by_another_write() {
    let server = Told::default();
    let safety = Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        Ok::<_, BoxError>(match doubt.request().get_ref() {
            1 => {
                tokio::time::sleep(SECOND).await;
                doubt.not_landed_because("the server says so")
            }
            _ => doubt.unknown("nobody knows"),
        })
    })
    .conflict_key(|_: &Tag| Some("k"));
    let stack = Stack::builder(server.connector()).deadline(30 * SECOND).writes(safety).build().unwrap();
    let mut second = task::spawn(stack.clone().oneshot(pay(2)));
    assert!(second.poll().is_pending());
    let mut first = task::spawn(stack.clone().oneshot(pay(1)));
    assert!(first.poll().is_pending());
    for at in 0..2 {
        server.tell(at, Err(CallError::ambiguous("reset")));
    }
    let Poll::Ready(Err(error)) = second.poll() else { panic!() };
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert!(first.poll().is_pending());
    advance(2 * SECOND).await;
    let said = first.poll();
    assert_eq!(server.seen(), [2, 1], "W1 again while W2 is in doubt: {said:?}");
}

/// The same where W2's check takes longer than W1's: until it has said something, W2 may be found to have landed, and W1
/// waits for it. `landed`: what it says.
#[tokio::test(start_paused = true)]
async fn a_replay_waits_for_another_write_on_its_key_that_is_still_looked_for() {
    for not_landed in [false, true] {
        let (server, log) = (Told::default(), Log::default());
        let safety = Tags::new(move |doubt: InDoubt<Tag, u64>| async move {
            Ok::<_, BoxError>(match doubt.request().get_ref() {
                1 => {
                    tokio::time::sleep(SECOND).await;
                    doubt.not_landed_because("the server says so")
                }
                _ => {
                    tokio::time::sleep(3 * SECOND).await;
                    match not_landed {
                        true => doubt.not_landed_because("the server says so"),
                        false => doubt.unknown("nobody knows"),
                    }
                }
            })
        })
        .conflict_key(|_: &Tag| Some("k"));
        let stack = Stack::builder(server.connector())
            .deadline(30 * SECOND)
            .writes(safety)
            .on_event(sink(&log))
            .build()
            .unwrap();
        let mut second = task::spawn(stack.clone().oneshot(pay(2)));
        assert!(second.poll().is_pending());
        let mut first = task::spawn(stack.clone().oneshot(pay(1)));
        assert!(first.poll().is_pending());
        for at in 0..2 {
            server.tell(at, Err(CallError::ambiguous("reset")));
        }
        assert!(second.poll().is_pending());
        assert!(first.poll().is_pending());
        advance(2 * SECOND).await;
        assert!(first.is_woken() && first.poll().is_pending());
        assert_eq!(server.seen(), [2, 1]);
        advance(2 * SECOND).await;
        assert!(!first.is_woken());
        let Poll::Ready(Err(error)) = second.poll() else { panic!() };
        assert_eq!(error.outcome(), if not_landed { Outcome::NotDone } else { Outcome::Unknown });
        assert!(first.is_woken(), "it waits for W2, whose call is over");
        if not_landed {
            assert!(first.poll().is_pending());
            server.tell(2, Ok(1));
            assert!(matches!(first.poll(), Poll::Ready(Ok(1))));
        } else {
            let Poll::Ready(Err(error)) = first.poll() else { panic!("W1 over W2, of which nobody knows") };
            assert_eq!(error.outcome(), Outcome::NotDone);
            assert!(error.notes().any(|note| note.contains("conflict key has come into doubt")), "{error}");
            assert_eq!(server.seen(), [2, 1]);
        }
        assert_eq!(of_kind(&log, "in_doubt").len(), 2);
    }
}

/// A replay that waits for a doubt holds no place below that the other one's check may need, and ends at its deadline.
#[tokio::test(start_paused = true)]
async fn a_replay_that_waits_for_another_write_on_its_key_ends_at_its_deadline() {
    let server = Told::default();
    let safety = Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        if *doubt.request().get_ref() == 2 {
            std::future::pending::<()>().await;
        }
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    })
    .conflict_key(|_: &Tag| Some("k"));
    let stack = Stack::builder(server.connector()).deadline(30 * SECOND).writes(safety).build().unwrap();
    let second = tokio::spawn(stack.clone().oneshot(pay(2)));
    tokio::task::yield_now().await;
    let first = tokio::spawn(stack.clone().oneshot(pay(1).within(5 * SECOND)));
    tokio::task::yield_now().await;
    for at in 0..2 {
        server.tell(at, Err(CallError::ambiguous("reset")));
    }
    let began = tokio::time::Instant::now();
    let error = first.await.unwrap().unwrap_err();
    assert_eq!((error.outcome(), began.elapsed().as_secs()), (Outcome::NotDone, 5), "{error}");
    assert_eq!(second.await.unwrap().unwrap_err().outcome(), Outcome::Unknown);
    assert_eq!(server.seen(), [2, 1]);
}

/// W1's replay waits for the next connection. Meanwhile something forbids it: W2 on its key ends unknown, or comes into doubt
/// and is still looked for; or, without keys, W3 is handed over. Its caller learns why, as where that is seen before: it is
/// no attempt, and there was no replay.
#[tokio::test(start_paused = true)]
async fn a_replay_that_is_turned_away_when_it_would_go_says_why_and_was_none() {
    for (with_key, looks_for) in [(true, 1), (true, 10), (false, 1)] {
        let (server, log) = (Told::default(), Log::default());
        let slowly = {
            let (server, made) = (server.clone(), AtomicU64::new(0));
            tower::service_fn(move |()| {
                let (server, wait) = (server.clone(), made.fetch_add(1, Ordering::Relaxed) > 0);
                async move {
                    if wait {
                        tokio::time::sleep(2 * SECOND).await;
                    }
                    Ok::<_, BoxError>(server)
                }
            })
        };
        let safety = Tags::new(move |doubt: InDoubt<Tag, u64>| async move {
            Ok::<_, BoxError>(match doubt.request().get_ref() {
                1 => doubt.not_landed_because("the server says so"),
                _ => {
                    tokio::time::sleep(looks_for * SECOND).await;
                    doubt.unknown("nobody knows")
                }
            })
        });
        let safety = if with_key { safety.conflict_key(|_: &Tag| Some("k")) } else { safety };
        let stack =
            Stack::builder(slowly).deadline(30 * SECOND).writes(safety).on_event(sink(&log)).build().unwrap();
        let mut second = task::spawn(stack.clone().oneshot(pay(2)));
        assert!(second.poll().is_pending());
        let mut first = task::spawn(stack.clone().oneshot(pay(1)));
        assert!(first.poll().is_pending());
        server.tell(1, Err(CallError::closed("gone")));
        assert!(first.poll().is_pending());
        let mut third = task::spawn(stack.clone().oneshot(pay(3)));
        // The control: with a key a new one is refused.
        assert_eq!(third.poll().is_ready(), with_key);
        server.tell(0, Err(CallError::closed("gone")));
        assert!(second.poll().is_pending());
        advance(SECOND + MS).await;
        assert_eq!(second.poll().is_ready(), looks_for == 1);
        advance(SECOND).await;
        assert!(first.is_woken());
        let Poll::Ready(Err(error)) = first.poll() else { panic!("over another") };
        assert_eq!(error.outcome(), Outcome::NotDone);
        assert!(matches!(error.cause(), goaround::Cause::Closed(_)), "{error}");
        let why = if with_key { "has come into doubt since" } else { "another write was handed over since" };
        assert!(error.notes().any(|note| note.contains(why)), "{error}");
        assert_eq!(error.attempts().len(), 1, "{error}");
        let reports = of_kind(&log, "in_doubt");
        let report = reports.iter().find(|report| report["outcome"] == "not_done").unwrap();
        assert_eq!(report["replayed"], false, "{report:#}");
        assert_eq!(report["attempts"].as_array().unwrap().len(), 1, "{report:#}");
        assert_eq!(server.seen()[..2], [2, 1]);
        if !with_key {
            assert!(third.poll().is_pending());
        }
        assert_eq!(server.seen()[2..], if with_key { vec![] } else { vec![3] });
    }
}

// ===== A replay that waits for a doubt, and places below =====

fn read(number: u64) -> Tag {
    goaround::Tagged::new(number, Effect::ReadOnly).named("read")
}

/// Two places below. W1's attempt is lost, and a read that lasts takes its place. W2, which was handed over after it, hangs,
/// and its check finds that it is absent. W1's replay may not go any more, since W2 was handed over, and says so before it
/// asks for a place: W2's attempt has that, and W2's replay, which gives it back, would wait for W1's doubt.
#[tokio::test(start_paused = true)]
async fn a_write_that_is_overtaken_and_one_that_waits_for_its_doubt_do_not_wait_for_each_other() {
    // The control: a place more.
    for places in [3, 2] {
        overtaken_and_waiting(places).await;
    }
}

async fn overtaken_and_waiting(places: usize) {
    let server = Told::default();
    let safety = Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    })
    .attempt_timeout(SECOND)
    .conflict_key(|_: &Tag| Some("k"));
    let service = ServiceBuilder::new().layer(safety).concurrency_limit(places).service(server.clone());
    let begin = |tag: Tag| service.clone().oneshot(tag);
    let mut first = task::spawn(begin(pay(1)));
    assert!(first.poll().is_pending());
    let mut second = task::spawn(begin(pay(2)));
    assert!(second.poll().is_pending());
    let mut lasts = task::spawn(begin(read(3)));
    assert!(lasts.poll().is_pending());
    server.tell(0, Err(CallError::ambiguous("reset")));
    let Poll::Ready(Err(error)) = first.poll() else { panic!() };
    assert!(error.notes().any(|note| note.contains("handed over since")), "{error}");
    assert!(lasts.poll().is_pending());
    advance(SECOND + MS).await;
    assert!(second.is_woken() && second.poll().is_pending());
    settle().await;
    assert!(second.poll().is_pending());
    // Its own attempt has a place until it goes again.
    server.tell(2, Ok(3));
    assert!(matches!(lasts.poll(), Poll::Ready(Ok(3))));
    assert!(second.poll().is_pending());
    assert_eq!(server.seen(), [1, 2, 3, 2]);
    server.tell(3, Ok(2));
    assert!(matches!(second.poll(), Poll::Ready(Ok(2))));
}

/// Two places below, and the check asks by way of them. W1's attempt is lost while a read that lasts has the other place:
/// its replay stands in line for one. Then W2, which was called before it, is lost, and its place is W1's, whose replay
/// waits for W2's doubt; W2's check stands in line behind it.
#[tokio::test(start_paused = true)]
async fn a_replay_that_waits_for_a_doubt_holds_no_place_that_its_check_needs() {
    for places in [3, 2] {
        waiting_and_asking(places).await;
    }
}

async fn waiting_and_asking(places: usize) {
    let server = Told::default();
    let safety = Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        if *doubt.request().get_ref() == 1 {
            return Ok::<_, BoxError>(doubt.not_landed_because("the server says so"));
        }
        Ok(match doubt.probe(read(20)).await {
            Ok(found) => doubt.landed(found),
            Err(_) => doubt.unknown("not asked"),
        })
    })
    .conflict_key(|_: &Tag| Some("k"));
    let service = ServiceBuilder::new().layer(safety).concurrency_limit(places).service(server.clone());
    let begin = |tag: Tag| service.clone().oneshot(tag);
    let mut second = task::spawn(begin(pay(2)));
    assert!(second.poll().is_pending());
    let mut first = task::spawn(begin(pay(1)));
    assert!(first.poll().is_pending());
    let mut lasts = task::spawn(begin(read(3)));
    assert!(lasts.poll().is_pending());
    server.tell(1, Err(CallError::ambiguous("reset")));
    // The read has its place before its replay asks for it.
    assert!(first.poll().is_pending());
    assert!(lasts.poll().is_pending());
    if places == 3 {
        // The control: the replay goes before there is a doubt of W2, and its check has a place.
        assert_eq!(server.seen(), [2, 1, 3, 1]);
        server.tell(3, Ok(1));
        assert!(first.poll().is_ready());
    } else {
        assert_eq!(server.seen(), [2, 1, 3]);
        assert!(first.poll().is_pending());
    }
    server.tell(0, Err(CallError::ambiguous("reset")));
    for _ in 0..3 {
        assert!(second.poll().is_pending());
        assert!(places == 3 || first.poll().is_pending());
    }
    assert_eq!(
        server.seen().last(),
        Some(&20),
        "{places} places: the check has no place: the replay that waits for it has it"
    );
}

/// W1 waits for W2's doubt, and a write without a key is handed over, which touches all: W1's replay must not go any more,
/// whatever becomes of W2, and its caller need not wait to be told.
#[tokio::test(start_paused = true)]
async fn a_replay_that_waits_for_a_doubt_ends_once_another_write_forbids_it() {
    let server = Told::default();
    let safety = Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        if *doubt.request().get_ref() == 2 {
            tokio::time::sleep(100 * SECOND).await;
        }
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    })
    .check_timeout(200 * SECOND)
    .conflict_key(|request: &Tag| (*request.get_ref() != 9).then_some("k"));
    let service = safety.layer(server.clone());
    let begin = |tag: Tag| service.clone().oneshot(tag);
    let (mut second, mut first) = (task::spawn(begin(pay(2))), task::spawn(begin(pay(1))));
    assert!(second.poll().is_pending() && first.poll().is_pending());
    server.tell(0, Err(CallError::ambiguous("reset")));
    assert!(second.poll().is_pending());
    server.tell(1, Err(CallError::ambiguous("reset")));
    assert!(first.poll().is_pending());
    advance(SECOND).await;
    settle().await;
    assert!(first.poll().is_pending(), "it waits");
    let mut keyless = task::spawn(begin(pay(9)));
    assert!(keyless.poll().is_pending());
    settle().await;
    assert!(first.is_woken(), "nobody tells it");
    let Poll::Ready(Err(error)) = first.poll() else { panic!() };
    assert!(error.notes().any(|note| note.contains("handed over since")), "{error}");
}

/// docs of `conflict_key`: the replay of a write that was called before "waits until that one is settled, and is not made if
/// it ends in doubt". Here it has a place below, or is about to be claimed, when the doubt arises, and is refused at once
/// though W2 is found not to have landed.
#[tokio::test(start_paused = true)]
async fn a_replay_waits_for_a_doubt_that_arises_while_it_waits_for_its_service() {
    let server = Told::default();
    let safety = Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        if *doubt.request().get_ref() == 2 {
            tokio::time::sleep(SECOND).await;
        }
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    })
    .conflict_key(|_: &Tag| Some("k"));
    let slow = Unready { inner: server.clone(), readies: Arc::default(), waker: Arc::default() };
    let (readies, waker) = (slow.readies.clone(), slow.waker.clone());
    let service = safety.layer(slow);
    let begin = |tag: Tag| {
        let mut service = service.clone();
        async move { service.call(tag).await }
    };
    let (mut second, mut first) = (task::spawn(begin(pay(2))), task::spawn(begin(pay(1))));
    assert!(second.poll().is_pending() && first.poll().is_pending());
    server.tell(1, Err(CallError::ambiguous("reset")));
    assert!(first.poll().is_pending());
    // W1's replay waits for its service when W2's doubt arises; both happen before its task has its turn.
    server.tell(0, Err(CallError::ambiguous("reset")));
    readies.store(true, Ordering::Relaxed);
    waker.lock().unwrap().take().into_iter().for_each(Waker::wake);
    assert!(second.poll().is_pending());
    let said = first.poll();
    assert!(said.is_pending(), "W2 is still looked for: {said:?}");
    advance(2 * SECOND).await;
    assert!(second.poll().is_ready());
    assert!(first.poll().is_pending());
    assert_eq!(server.seen(), [2, 1, 1]);
}

#[derive(Clone)]
struct Unready {
    inner: Told,
    readies: Arc<AtomicBool>,
    waker: Arc<Mutex<Option<Waker>>>,
}

impl Service<Tag> for Unready {
    type Response = u64;
    type Error = CallError;
    type Future = <Told as Service<Tag>>::Future;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        if self.readies.load(Ordering::Relaxed) {
            return Poll::Ready(Ok(()));
        }
        *self.waker.lock().unwrap() = Some(cx.waker().clone());
        Poll::Pending
    }

    fn call(&mut self, request: Tag) -> Self::Future {
        self.inner.call(request)
    }
}

// ===== Shutdown while the first connect hangs =====

#[tokio::test(start_paused = true)]
async fn a_write_that_waits_for_a_connect_that_hangs_ends_as_not_done_at_a_shutdown() {
    let connector = tower::service_fn(|()| std::future::pending::<Result<Told, BoxError>>());
    let stack = Stack::builder(connector).without_deadline().writes(Tags::refuse()).build().unwrap();
    let mut calls: Vec<_> = (0..3).map(|n| task::spawn(stack.clone().oneshot(pay(n)))).collect();
    for call in &mut calls {
        assert!(call.poll().is_pending());
    }
    let never_polled = task::spawn(stack.clone().oneshot(pay(9)));
    assert_eq!(stack.shutdown(SECOND).await, 3);
    drop(never_polled);
    for call in &mut calls {
        assert!(call.is_woken());
        let Poll::Ready(Err(error)) = call.poll() else { panic!("hangs") };
        assert_eq!(error.outcome(), Outcome::NotDone);
    }
    assert_eq!(stack.in_flight(), 0);
}

// ===== What a call that was refused leaves behind =====

/// A connection of which the n-th is found dead by its readiness, or hands back by its errors.
#[derive(Clone)]
struct Numbered(u64, Arc<AtomicU64>);

impl Service<Tag> for Numbered {
    type Response = u64;
    type Error = CallError;
    type Future = Said;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(match self.0 < self.1.load(Ordering::Relaxed) {
            true => Err(CallError::closed("found dead")),
            false => Ok(()),
        })
    }

    fn call(&mut self, _: Tag) -> Said {
        Box::pin(std::future::ready(Ok(self.0)))
    }
}

/// A's clone finds the connection dead, and A is refused, since its deadline has passed. B, the next call on that clone, has
/// nothing to do with that: it is one attempt, and has its own second hand-over left.
#[tokio::test(start_paused = true)]
async fn a_call_does_not_inherit_the_dead_connection_of_one_that_was_refused_before_it() {
    let dead_below = Arc::new(AtomicU64::new(0));
    let (made, below) = (Arc::new(AtomicU64::new(0)), Arc::clone(&dead_below));
    let connector = tower::service_fn(move |()| {
        let number = made.fetch_add(1, Ordering::Relaxed) + 1;
        std::future::ready(Ok::<_, BoxError>(Numbered(number, Arc::clone(&below))))
    });
    let reports = Arc::new(Mutex::new(Vec::new()));
    let sink = Arc::clone(&reports);
    let mut stack = Stack::builder(connector)
        .writes(Tags::refuse())
        .on_event(move |event| {
            if let goaround::Event::Call(report) = event {
                sink.lock().unwrap().push(format!("{:?}", report.attempts));
            }
        })
        .build()
        .unwrap();
    assert_eq!(stack.ready().await.unwrap().call(pay(1)).await.unwrap(), 1);
    dead_below.store(2, Ordering::Relaxed);
    let refused = stack.ready().await.unwrap().call(pay(2).within(Duration::ZERO)).await.unwrap_err();
    assert_eq!(refused.outcome(), Outcome::NotDone);
    reports.lock().unwrap().clear();
    assert_eq!(stack.ready().await.unwrap().call(pay(3)).await.unwrap(), 2);
    assert_eq!(
        *reports.lock().unwrap(),
        [""; 0],
        "a call that was handed over once, to a connection that answered"
    );
}

/// The same by what it costs: B is handed back once, and fails as not done, since its second hand-over is said to be spent.
/// Here A is refused because its key is in doubt.
#[tokio::test(start_paused = true)]
async fn a_call_has_its_own_second_hand_over_after_one_that_was_refused_before_it() {
    for is_refused_before in [false, true] {
        let net = Pipes::default();
        let key = |request: &Request| request.method().strip_prefix("put/").map(str::to_owned);
        let safety = Safety::refuse().conflict_key(key);
        let mut stack = Stack::builder(net.clone()).deadline(30 * SECOND).writes(safety).build().unwrap();
        let put = |name: &'static str| Request::new(name, ()).unwrap().as_effect(Effect::Write);
        // W1 leaves its key in doubt, and the connection is dead.
        let mut first = task::spawn(stack.ready().await.unwrap().call(put("put/k")));
        assert!(first.poll().is_pending());
        settle().await;
        net.kill(0).await;
        let Poll::Ready(Err(error)) = first.poll() else { panic!() };
        assert_eq!(error.outcome(), Outcome::Unknown);
        drop(first);
        // A second connection, on which a read is answered.
        let mut read = task::spawn(stack.clone().oneshot(Request::new("list", ()).unwrap().read_only()));
        assert!(read.poll().is_pending());
        stack.ready().await.unwrap();
        net.kill(1).await;
        drop(read);
        if is_refused_before {
            let refused = stack.ready().await.unwrap().call(put("put/k")).await.unwrap_err();
            assert!(matches!(refused.cause(), Cause::Refused(_)), "{refused:?}");
        }
        // B's connection dies before it has sent a byte of it. The control is a clone that has refused nothing.
        stack.ready().await.unwrap();
        let mut stack = if is_refused_before { stack } else { stack.clone() };
        stack.ready().await.unwrap();
        let mut call = task::spawn(Service::call(&mut stack, put("put/other")));
        let large = Request::new("large", json!({ "of": "x".repeat(8 << 10) })).unwrap().read_only();
        let mut other = task::spawn(stack.clone().oneshot(large));
        assert!(other.poll().is_pending());
        settle().await;
        assert!(call.poll().is_pending());
        settle().await;
        let at = net.connects() - 1;
        net.kill(at).await;
        let mut polled = call.poll();
        if polled.is_pending() {
            settle().await;
            polled = call.poll();
        }
        assert!(polled.is_pending(), "after a refusal: {is_refused_before}: {polled:?}");
    }
}

// ===== A queued frame whose time is up =====

type Sent = Pin<Box<dyn Future<Output = Result<Response, CallError>> + Send>>;

/// A write with a key that the server keeps for a while, whose connection is gone.
async fn lost_with_its_connection(net: &Pipes) -> (Stack<Pipes, Request, Response>, task::Spawn<Sent>) {
    let safety = Safety::refuse().keyed(KeyedWrites::param("/key").honoured_for(WINDOW));
    let stack = Stack::builder(net.clone()).deadline(30 * SECOND).writes(safety).build().unwrap();
    let put = Request::new("put/1", json!({})).unwrap().as_effect(Effect::Write);
    let call: Sent = Box::pin(stack.clone().oneshot(put));
    let mut call = task::spawn(call);
    assert!(call.poll().is_pending());
    settle().await;
    net.kill(0).await;
    (stack, call)
}

/// The replay by W1's idempotency key waits in the queue of a connection that stalls. The key's time ends, and W1's task,
/// which is woken, has its turn a little later. The connection's task, which has its turn at once, sends it all the same:
/// the server has forgotten the key.
#[tokio::test(start_paused = true)]
async fn a_replay_that_is_queued_is_not_sent_after_its_keys_time_though_its_task_has_its_turn_late() {
    let net = Pipes::default();
    let (stack, mut first) = lost_with_its_connection(&net).await;
    let large = Request::new("large", json!({ "of": "x".repeat(8 << 10) })).unwrap().read_only();
    let mut other = task::spawn(stack.clone().oneshot(large));
    // It finds the connection dead, and is on the next one, which stalls.
    for _ in 0..3 {
        assert!(other.poll().is_pending());
        settle().await;
    }
    for _ in 0..3 {
        assert!(first.poll().is_pending());
        settle().await;
    }
    assert_eq!(net.connects(), 2);
    advance(WINDOW + 10 * MS).await;
    let seen = read_all(&mut net.take(1)).await;
    assert!(seen.contains("large"));
    assert!(!seen.contains("put/1"), "sent 10 ms after its key's time");
}

/// The same of a replay that comes into the connection's buffer together with a large read, or with several small ones, where
/// W1's task has all its turns in time. The client has its defaults: its transport might keep a copy of all that it is
/// offered.
#[tokio::test(start_paused = true)]
async fn a_replay_that_lies_behind_other_frames_is_not_sent_after_its_keys_time() {
    for (others, size) in [(1, 8 << 10), (10, 1_200)] {
        let net = Pipes::default();
        let (stack, mut first) = lost_with_its_connection(&net).await;
        let mut probing = task::spawn(stack.clone().oneshot(Request::new("list", ()).unwrap().read_only()));
        for _ in 0..3 {
            assert!(probing.poll().is_pending());
            settle().await;
        }
        let large = || Request::new("large", json!({ "of": "x".repeat(size) })).unwrap().read_only();
        let mut others: Vec<_> = (0..others).map(|_| task::spawn(stack.clone().oneshot(large()))).collect();
        for other in &mut others {
            assert!(other.poll().is_pending());
        }
        assert!(first.poll().is_pending());
        settle().await;
        advance(100 * MS).await;
        assert!(first.poll().is_pending());
        settle().await;
        advance(100 * MS).await;
        // Of the first attempt nothing is known, and the key is of no more use.
        let Poll::Ready(Err(error)) = first.poll() else { panic!() };
        assert_eq!(error.outcome(), Outcome::Unknown);
        settle().await;
        let seen = read_all(&mut net.take(1)).await;
        assert_eq!(seen.matches("large").count(), others.len());
        assert!(!seen.contains("put/1"), "sent 50 ms after its key's time");
    }
}

/// A write lies behind a large read in the connection's buffer. Its deadline passes, and its task has its turn in time, or
/// late: not one byte of it has left, nor ever does. Its key is free.
#[tokio::test(start_paused = true)]
async fn a_write_of_which_not_a_byte_left_the_buffer_by_its_deadline_is_not_done() {
    for exact in [false, true] {
        for is_late in [false, true] {
            let (ours, mut theirs) = duplex(1 << 10);
            let builder = if exact { Client::builder().exact_writes() } else { Client::builder() };
            let client = builder.connect(ours);
            let connector =
                tower::service_fn(move |()| std::future::ready(Ok::<_, BoxError>(client.clone())));
            let safety = Safety::refuse().conflict_key(|_: &Request| Some("k"));
            let stack = Stack::builder(connector).deadline(30 * SECOND).writes(safety).build().unwrap();
            let large = Request::new("large", json!({ "of": "x".repeat(8 << 10) })).unwrap().read_only();
            let mut other = task::spawn(stack.clone().oneshot(large));
            let put = |name: &'static str| Request::new(name, json!({})).unwrap().as_effect(Effect::Write);
            let mut first = task::spawn(stack.clone().oneshot(put("put/1").within(SECOND)));
            assert!(other.poll().is_pending());
            assert!(first.poll().is_pending());
            settle().await;
            advance(SECOND + MS).await;
            let told = if is_late { Poll::Pending } else { first.poll() };
            settle().await;
            let reading = tokio::spawn(async move { read_all(&mut theirs).await });
            settle().await;
            let told = if is_late { first.poll() } else { told };
            let Poll::Ready(Err(error)) = told else { panic!("{told:?}") };
            assert_eq!(error.outcome(), Outcome::NotDone, "of what was never sent: {error}");
            let mut second = task::spawn(stack.clone().oneshot(put("put/2")));
            assert!(second.poll().is_pending());
            let seen = reading.await.unwrap();
            assert!(seen.contains("large") && seen.contains("put/2") && !seen.contains("put/1"));
        }
    }
}

// ===== Between the look at the key and the going =====

/// W2 has looked whether its key is in doubt, and then the caller's own function runs that keeps its arguments, which takes
/// a while. Meanwhile W1 on that key ends unknown, on another thread, and its caller is told. W2 goes all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_does_not_go_when_its_key_came_in_doubt_while_the_callers_function_ran() {
    use std::sync::mpsc::channel;
    let server = Told::default();
    let (tell, told) = channel::<()>();
    let (done, is_done) = channel::<()>();
    let is_done = Mutex::new(is_done);
    let safety = Tags::refuse().conflict_key(|_: &Tag| Some("k")).keep_arguments(move |request: &Tag| {
        if *request.get_ref() == 2 {
            tell.send(()).unwrap();
            let _ = is_done.lock().unwrap().recv_timeout(SECOND);
        }
        None
    });
    let stack = Stack::builder(server.connector()).deadline(30 * SECOND).writes(safety).build().unwrap();
    let mut first = task::spawn(stack.clone().oneshot(pay(1)));
    assert!(first.poll().is_pending());
    let other = stack.clone();
    let second = tokio::spawn(other.oneshot(pay(2)));
    tokio::task::block_in_place(|| told.recv().unwrap());
    server.tell(0, Err(CallError::ambiguous("reset")));
    let Poll::Ready(Err(error)) = first.poll() else { panic!() };
    assert_eq!(error.outcome(), Outcome::Unknown);
    drop(first);
    done.send(()).unwrap();
    let second = tokio::time::timeout(50 * MS, second).await;
    assert_eq!(server.seen(), [1], "W2 while W1 is in doubt: {second:?}");
}

// ===== Between the claim and the going =====

/// W1's first attempt has timed out and is kept. Its replay is claimed, and only then is the kept attempt dropped, which is
/// the connection's own code and takes a while. Another thread hands over W2 meanwhile, which is answered. The replay
/// goes all the same: it looks at the order of writes before that, and not when it is given to the connection.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_replay_lands_on_a_write_that_another_thread_hands_over_while_the_kept_attempt_is_dropped() {
    hand_over_while_the_kept_attempt_is_dropped(true).await;
}

/// The same where write safety lies right on a service, as over HTTP, and nobody asks again when it goes.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nor_without_a_reconnect_layer() {
    hand_over_while_the_kept_attempt_is_dropped(false).await;
}

async fn hand_over_while_the_kept_attempt_is_dropped(with_reconnect: bool) {
    use std::sync::mpsc::{Receiver, Sender, channel};
    struct Kept(Sender<()>, Arc<Mutex<Receiver<()>>>);
    impl Drop for Kept {
        fn drop(&mut self) {
            let _ = self.0.send(());
            let _ = self.1.lock().unwrap().recv_timeout(SECOND);
        }
    }
    let (tell, told) = channel::<()>();
    let (done, is_done) = channel::<()>();
    let is_done = Arc::new(Mutex::new(is_done));
    let log = Arc::new(Mutex::new(Vec::new()));
    let landed = Arc::clone(&log);
    let first = Arc::new(AtomicU64::new(0));
    let connection = tower::service_fn(move |request: Tag| {
        let landed = Arc::clone(&landed);
        let kept =
            (first.fetch_add(1, Ordering::Relaxed) == 0).then(|| Kept(tell.clone(), Arc::clone(&is_done)));
        async move {
            if let Some(_kept) = kept {
                std::future::pending::<()>().await;
            }
            landed.lock().unwrap().push(*request.get_ref());
            Ok::<_, CallError>(1_u64)
        }
    });
    let safety = Tags::new(|doubt: InDoubt<Tag, u64>| async move {
        Ok::<_, BoxError>(doubt.not_landed_because("the server says so"))
    })
    .attempt_timeout(20 * MS);
    let runtime = tokio::runtime::Handle::current();
    let hand_over_then = move |other: BoxCloneService<Tag, u64, CallError>| {
        std::thread::spawn(move || {
            told.recv().unwrap();
            let result = runtime.block_on(other.oneshot(pay(2)));
            done.send(()).unwrap();
            result
        })
    };
    let (first, second) = if with_reconnect {
        let connector =
            tower::service_fn(move |()| std::future::ready(Ok::<_, BoxError>(connection.clone())));
        let stack = Stack::builder(connector).deadline(30 * SECOND).writes(safety).build().unwrap();
        (BoxCloneService::new(stack.clone()), hand_over_then(BoxCloneService::new(stack)))
    } else {
        let service = safety.layer(connection);
        (BoxCloneService::new(service.clone()), hand_over_then(BoxCloneService::new(service)))
    };
    let first = tokio::spawn(first.oneshot(pay(1).within(30 * SECOND))).await.unwrap();
    assert_eq!(second.join().unwrap().unwrap(), 1);
    assert_eq!(*log.lock().unwrap(), [2], "W1 over W2, which was acknowledged: {first:?}");
}

// ===== Deadlines that stand still =====

/// A server that never answers, and pauses at any moment: each call ends when its own time, without the pauses, is up.
#[tokio::test(start_paused = true)]
async fn a_call_that_stands_still_at_any_moment_ends_at_its_deadline_and_no_later() {
    for seed in 0..600 {
        let dice = Dice::new(seed);
        let connection = tower::service_fn({
            let dice = dice.clone();
            move |request: Tag| {
                let wait = dice.ms(80);
                let ends = *request.get_ref() != 0 && !dice.once_in(3);
                async move {
                    if ends {
                        tokio::time::sleep(wait).await;
                        return Err(CallError::ambiguous("reset"));
                    }
                    std::future::pending::<Result<u64, CallError>>().await
                }
            }
        });
        let delays = dice.clone();
        let connector = tower::service_fn(move |()| {
            let (connection, wait) = (connection.clone(), delays.ms(50));
            async move {
                tokio::time::sleep(wait).await;
                Ok::<_, BoxError>(connection)
            }
        });
        let mut safety = match dice.roll(3) {
            0 => Tags::refuse(),
            1 => Tags::refuse().replay_idempotent(),
            _ => {
                let dice = dice.clone();
                let safety = Tags::new(move |doubt: InDoubt<Tag, u64>| {
                    let wait = dice.ms(60);
                    async move {
                        tokio::time::sleep(wait).await;
                        Ok::<_, BoxError>(doubt.not_landed())
                    }
                });
                if seed % 2 == 0 { safety.quarantine(30 * MS) } else { safety }
            }
        };
        if dice.once_in(2) {
            safety = safety.attempt_timeout(10 * MS + dice.ms(60));
        }
        let mut retry = RetryReadOnly.attempts(1 + dice.roll(4) as u32);
        if dice.once_in(2) {
            retry = retry.attempt_timeout(10 * MS + dice.ms(60));
        }
        let stack = Stack::builder(connector).deadline(SECOND).retry(retry).writes(safety).build().unwrap();
        let effect = [Effect::ReadOnly, Effect::Idempotent, Effect::Write][dice.roll(3) as usize];
        let limit = 20 * MS + dice.ms(300);
        let request = goaround::Tagged::new(1 - dice.roll(2), effect).within(limit).pause_while_asking();
        let moves = request.context().progress().cloned().unwrap();
        let start = Instant::now();
        let calling = tokio::spawn(stack.clone().oneshot(request));
        let pausing = tokio::spawn({
            let dice = dice.clone();
            async move {
                // How long it has run, and stood.
                let (mut ran, mut stood) = (Duration::ZERO, Duration::ZERO);
                loop {
                    let runs = dice.ms(120);
                    tokio::time::sleep(runs).await;
                    ran += runs;
                    if ran >= limit {
                        return stood;
                    }
                    let pause = moves.pause();
                    let second = dice.once_in(2).then(|| moves.pause());
                    let stands = dice.ms(400);
                    tokio::time::sleep(stands).await;
                    drop((pause, second));
                    stood += stands;
                }
            }
        });
        let result = calling.await.unwrap();
        let took = start.elapsed();
        assert!(result.is_err());
        let stood = pausing.await.unwrap();
        assert!(took <= limit + stood + MS, "{seed}: {took:?} of {limit:?} and {stood:?}: {result:?}");
    }
}

// ===== Clones on threads =====

mod threads {
    use std::sync::atomic::AtomicBool;

    use super::*;

    /// What the server has done, by real time.
    #[derive(Default)]
    struct Server {
        /// Hand-overs and landings, in their order.
        log: Mutex<Vec<Step>>,
        connection: AtomicU64,
        dice: AtomicU64,
    }

    impl Server {
        fn roll(&self, sides: u64) -> u64 {
            let x = self.dice.fetch_add(0x9e37_79b9_7f4a_7c15, Ordering::Relaxed);
            let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            (x ^ (x >> 31)) % sides
        }

        fn landed(&self, number: u64) -> bool {
            self.log.lock().unwrap().contains(&Step::Lands(number))
        }
    }

    #[derive(Clone)]
    struct Conn(Arc<Server>, Arc<AtomicBool>, watch::Sender<bool>);

    impl Service<Tag> for Conn {
        type Response = u64;
        type Error = CallError;
        type Future = Said;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
            Poll::Ready(match self.1.load(Ordering::Acquire) {
                true => Err(CallError::closed("closed before")),
                false => Ok(()),
            })
        }

        fn call(&mut self, request: Tag) -> Said {
            let Self(server, dead, gone) = self.clone();
            let number = *request.get_ref();
            let write = number != 0;
            let taken = {
                let mut log = server.log.lock().unwrap();
                let taken = !dead.load(Ordering::Acquire);
                if taken && write {
                    log.push(Step::Seen(number));
                }
                taken
            };
            if !taken {
                let error = CallError::not_sent("dead").connection_lost();
                return Box::pin(std::future::ready(Err(error)));
            }
            Box::pin(async move {
                let closed = |gone: &watch::Sender<bool>| {
                    let mut gone = gone.subscribe();
                    CallError::closed("closed")
                        .with_exit(async move {
                            let _ = gone.wait_for(|gone| *gone).await;
                            Exit::new(None, true)
                        })
                        .exit_ends_effects()
                };
                let jitter = server.roll(400);
                match server.roll(4) {
                    0 => tokio::task::yield_now().await,
                    _ => tokio::time::sleep(Duration::from_micros(jitter)).await,
                }
                let lands = || {
                    let mut log = server.log.lock().unwrap();
                    if *gone.borrow() {
                        return false;
                    }
                    if write {
                        log.push(Step::Lands(number));
                    }
                    true
                };
                match server.roll(20) {
                    0 => {
                        dead.store(true, Ordering::Release);
                        if server.roll(2) == 0 {
                            lands();
                        }
                        let ends = gone.clone();
                        let log = Arc::clone(&server);
                        tokio::spawn(async move {
                            tokio::time::sleep(Duration::from_micros(300)).await;
                            let _log = log.log.lock().unwrap();
                            ends.send_replace(true);
                        });
                        Err(closed(&gone))
                    }
                    1 => Err(CallError::evidence(Evidence::TooManyRequests, "429")
                        .after(Duration::from_micros(server.roll(1500)))),
                    _ if dead.load(Ordering::Acquire) => {
                        if server.roll(2) == 0 {
                            lands();
                        }
                        Err(closed(&gone))
                    }
                    _ if lands() => Ok(number),
                    _ => Err(closed(&gone)),
                }
            })
        }
    }

    async fn storm(seed: u64, keys: u64) -> Result<(usize, usize), String> {
        let server = Arc::new(Server::default());
        server.dice.store(seed.wrapping_mul(0x1234_5678_9abc_def1), Ordering::Relaxed);
        let at_connect = Arc::clone(&server);
        let last: Arc<Mutex<Option<watch::Sender<bool>>>> = Arc::default();
        let connector = tower::service_fn(move |()| {
            let server = Arc::clone(&at_connect);
            let last = Arc::clone(&last);
            async move {
                let before = last.lock().unwrap().clone();
                if let Some(before) = before {
                    let mut before = before.subscribe();
                    let _ = tokio::time::timeout(2 * SECOND, before.wait_for(|gone| *gone)).await;
                }
                server.connection.fetch_add(1, Ordering::Relaxed);
                let gone = watch::Sender::new(false);
                *last.lock().unwrap() = Some(gone.clone());
                Ok::<_, BoxError>(Conn(Arc::clone(&server), Arc::default(), gone))
            }
        });
        let look = Arc::clone(&server);
        let mut safety = Tags::new(move |doubt: InDoubt<Tag, u64>| {
            let server = Arc::clone(&look);
            async move {
                if server.roll(3) == 0 {
                    doubt.probe(goaround::Tagged::new(0, Effect::ReadOnly)).await?;
                }
                assert!(server.roll(40) != 0, "the check");
                let number = *doubt.request().get_ref();
                Ok::<_, BoxError>(match server.landed(number) {
                    true => doubt.landed(number),
                    false => doubt.not_landed(),
                })
            }
        })
        .trust(Evidence::TooManyRequests)
        .max_checks(2)
        .conflict_key(move |request: &Tag| key_of(*request.get_ref(), keys));
        if seed.is_multiple_of(2) {
            safety = safety.look_first();
        }
        let events = Arc::new(Mutex::new(HashMap::<String, u64>::new()));
        let sink = Arc::clone(&events);
        let stack = Stack::builder(connector)
            .deadline(SECOND)
            .reconnect(goaround::ReconnectLayer::once().crash_loop(u32::MAX, SECOND))
            .writes(safety)
            .on_event(move |event| match event {
                goaround::Event::InDoubt(report)
                    if matches!(report.outcome, Some(Outcome::Unknown | Outcome::DoneResultLost)) =>
                {
                    *sink.lock().unwrap().entry(report.call.to_string()).or_default() += 1;
                }
                goaround::Event::Abandoned(report) => {
                    *sink.lock().unwrap().entry(report.call.unwrap().to_string()).or_default() += 1;
                }
                _ => {}
            })
            .build()
            .unwrap();
        let tasks: Vec<_> = (0..4_u64)
            .map(|task| {
                let stack = stack.clone();
                let server = Arc::clone(&server);
                tokio::spawn(async move {
                    let mut ended = Vec::new();
                    for n in 0..25_u64 {
                        let number = 1 + task + 4 * n;
                        let mut request = pay(number);
                        let id = request.context_mut().assign_id().to_string();
                        if server.roll(4) == 0 {
                            let _ = stack.send(goaround::Tagged::new(0, Effect::ReadOnly)).await;
                        }
                        let result = stack.send(request).await;
                        ended.push((number, id, result.err().map(|error| error.outcome())));
                    }
                    ended
                })
            })
            .collect();
        let mut ended = Vec::new();
        for task in tasks {
            ended.extend(task.await.map_err(|_| "panics".to_owned())?);
        }
        tokio::time::sleep(2 * MS).await;
        let log = server.log.lock().unwrap();
        let mut events = events.lock().unwrap();
        let mut replays = 0;
        for (number, id, outcome) in &ended {
            let lands = log.iter().filter(|step| **step == Step::Lands(*number)).count();
            let reports = events.remove(id).unwrap_or_default();
            let expected = u64::from(matches!(outcome, Some(Outcome::Unknown | Outcome::DoneResultLost)));
            match outcome {
                _ if lands > 1 => return Err(format!("{number} lands twice")),
                _ if reports != expected => return Err(format!("{outcome:?} reported {reports} times")),
                None if lands == 0 => return Err(format!("{number} lost")),
                Some(Outcome::NotDone) if lands > 0 => return Err(format!("{number} was done")),
                _ => {}
            }
            let seen: Vec<_> = log
                .iter()
                .enumerate()
                .filter(|(_, step)| **step == Step::Seen(*number))
                .map(|it| it.0)
                .collect();
            if seen.len() > 2 {
                return Err(format!("{number} comes {} times", seen.len()));
            }
            if let [first, second] = seen[..] {
                replays += 1;
                for step in &log[first..second] {
                    if let Step::Seen(other) = step
                        && other != number
                        && !log[..first].contains(step)
                        && (key_of(*other, keys) == key_of(*number, keys)
                            || key_of(*other, keys).is_none()
                            || key_of(*number, keys).is_none())
                    {
                        if std::env::var_os("GOAROUND_SHOW").is_some() {
                            println!("{number} over {other}, keys {keys}: {:?}", &log[first..=second]);
                        }
                        // One that another thread hands over between the look and the going may come before it.
                        if log[..second].contains(&Step::Lands(*other)) {
                            return Err(format!("{number} is replayed over {other}, which had landed"));
                        }
                    }
                }
            }
        }
        match events.is_empty() {
            true => Ok((replays, ended.len())),
            false => Err("more reports".into()),
        }
    }

    #[test]
    fn clones_on_threads_break_no_claim() {
        let hook = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| {}));
        let runs = std::env::var("GOAROUND_STORMS").ok().and_then(|runs| runs.parse().ok()).unwrap_or(20);
        let (mut wrong, mut replays, mut calls) = (BTreeMap::<String, Vec<u64>>::new(), 0, 0);
        for seed in 1..=runs {
            let runtime =
                tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
            let keys = seed % 9;
            let run = async { tokio::time::timeout(20 * SECOND, tokio::spawn(storm(seed, keys))).await };
            match runtime.block_on(run) {
                Ok(Ok(Ok((more, all)))) => (replays, calls) = (replays + more, calls + all),
                Ok(Ok(Err(what))) => {
                    let kind = what.chars().filter(|c| !c.is_ascii_digit()).collect();
                    wrong.entry(kind).or_default().push(seed);
                }
                Ok(Err(_)) => wrong.entry("panics".into()).or_default().push(seed),
                Err(_) => wrong.entry("hangs".into()).or_default().push(seed),
            }
        }
        std::panic::set_hook(hook);
        println!("{replays} replays, {calls} calls");
        assert!(wrong.is_empty(), "{wrong:#?}");
    }
}

// ===== Attempts shorter than a turn =====

/// An attempt's time that is shorter than it takes the connection's task to have its turn: the frame must not
/// be refused as overdue and handed over again, and so on, without an end where there is no deadline.
#[tokio::test]
async fn a_write_whose_attempts_have_less_time_than_a_task_takes_to_have_its_turn_is_sent_all_the_same() {
    use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
    let (ours, theirs) = duplex(1 << 16);
    let client = Client::builder().exact_writes().connect(ours);
    tokio::spawn(async move {
        let mut peer = BufReader::new(theirs);
        let mut line = String::new();
        while peer.read_line(&mut line).await.unwrap_or(0) > 0 {
            let request: serde_json::Value = serde_json::from_str(&line).unwrap();
            let answer = format!("{}\n", json!({ "jsonrpc": "2.0", "id": request["id"], "result": 0 }));
            peer.get_mut().write_all(answer.as_bytes()).await.unwrap();
            line.clear();
        }
    });
    let connector = tower::service_fn(move |()| std::future::ready(Ok::<_, BoxError>(client.clone())));
    let safety = Safety::refuse().attempt_timeout(Duration::from_micros(1));
    let stack = Stack::builder(connector).without_deadline().writes(safety).build().unwrap();
    stack.send(Request::new("list", ()).unwrap().read_only()).await.unwrap();
    let put = Request::new("put/1", json!({})).unwrap().as_effect(Effect::Write);
    let said = tokio::time::timeout(3 * SECOND, stack.send(put)).await;
    assert!(said.is_ok(), "not sent in 3 s");
}
