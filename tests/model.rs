//! A random server, random faults and random callers, with tokio's clock paused: whatever happens, a write
//! takes effect at most once as long as what was declared is true, and what the caller is told is true.

use std::{
    collections::HashMap,
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll},
    time::Duration,
};

use fastrand::Rng;
use goaround::{
    BoxError, Call, CallError, CallId, Effect, Event, Evidence, Exit, InDoubt, Outcome, RetryReadOnly, Stack,
    Tagged, WriteSafetyLayer,
};
use tokio::{
    sync::{oneshot, watch},
    time::{Instant, sleep, sleep_until, timeout},
};
use tower::Service;

/// Nothing takes effect later than this after its last byte: the truth about this server.
const LANDS_WITHIN: u64 = 4_000;
/// How many seeds a run has; `GOAROUND_SEEDS` changes that.
const SEEDS: u64 = 2_500;

/// A write or a read of that token.
type Req = Tagged<u32>;
type Answer = Pin<Box<dyn Future<Output = Result<u32, CallError>> + Send>>;

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

#[derive(Clone)]
struct World(Arc<Mutex<State>>);

struct State {
    rng: Rng,
    /// How often each token's write took effect.
    effects: HashMap<u32, u32>,
    reports: HashMap<CallId, Reports>,
    /// Whether connections mark what became of a request's bytes.
    marks: bool,
    /// Whether the effects of a process end with it.
    ends_effects: bool,
    /// Whether that is declared.
    declares_it: bool,
}

#[derive(Clone, Copy, Debug, Default)]
struct Reports {
    calls: u32,
    doubts: u32,
    abandoned: u32,
}

impl World {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap()
    }

    fn chance(&self, percent: u32) -> bool {
        self.lock().rng.u32(0..100) < percent
    }

    /// Often short, sometimes long.
    fn wait(&self, most: u64) -> Duration {
        let mut state = self.lock();
        let most = if state.rng.bool() { most } else { most / 50 + 1 };
        ms(state.rng.u64(0..=most))
    }

    fn effects(&self, token: u32) -> u32 {
        self.lock().effects.get(&token).copied().unwrap_or_default()
    }
}

/// A server's process.
#[derive(Clone)]
struct Process {
    world: World,
    life: Arc<watch::Sender<Life>>,
}

#[derive(Clone, Copy, PartialEq)]
enum Life {
    Open,
    Closed,
    /// Gone; with all of its group?
    Gone(bool),
}

impl Process {
    fn life(&self) -> Life {
        *self.life.borrow()
    }

    /// Closes the connection now, and ends the process some time later.
    fn close(&self) {
        let closed = self.life.send_if_modified(|life| {
            let open = *life == Life::Open;
            if open {
                *life = Life::Closed;
            }
            open
        });
        if closed {
            let (process, linger) = (self.clone(), self.world.wait(14_000));
            let group_gone = self.world.chance(85);
            tokio::spawn(async move {
                sleep(linger).await;
                process.life.send_replace(Life::Gone(group_gone));
            });
        }
    }

    async fn closed(&self) -> CallError {
        let _ = self.life.subscribe().wait_for(|life| *life != Life::Open).await;
        let mut life = self.life.subscribe();
        let error = CallError::closed("closed").with_exit(async move {
            let life = life.wait_for(|life| matches!(life, Life::Gone(_))).await;
            Exit::new(None, life.is_ok_and(|life| *life == Life::Gone(true)))
        });
        if self.world.lock().declares_it { error.exit_ends_effects() } else { error }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Frame {
    Queued,
    Withdrawn,
    Taken,
}

/// Withdraws a frame that nobody waits for any more, if it is still queued.
struct Waits {
    frame: Arc<Mutex<Frame>>,
    activity: Option<Arc<goaround::Activity>>,
}

impl Waits {
    fn withdraw(&self) -> bool {
        let mut frame = self.frame.lock().unwrap();
        let withdrawn = *frame == Frame::Queued;
        if withdrawn {
            *frame = Frame::Withdrawn;
            if let Some(activity) = &self.activity {
                activity.withdrawn();
            }
        }
        withdrawn
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        self.withdraw();
    }
}

impl Service<Req> for Process {
    type Response = u32;
    type Error = CallError;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(match self.life() {
            Life::Open => Ok(()),
            _ => Err(CallError::closed("closed before")),
        })
    }

    fn call(&mut self, request: Req) -> Answer {
        let is_read = !request.context().effect().unwrap_or(request.effect()).is_write();
        if is_read { Box::pin(read(self.clone(), *request)) } else { Box::pin(write(self.clone(), request)) }
    }
}

async fn read(process: Process, token: u32) -> Result<u32, CallError> {
    let world = process.world.clone();
    let answer = async {
        sleep(world.wait(500)).await;
        let fate = world.lock().rng.u32(0..100);
        match fate {
            0..5 => Err(CallError::ambiguous("reset")),
            5..10 => Err(CallError::evidence(Evidence::Unavailable, "503")),
            10..13 => Err(CallError::answered("no")),
            13..16 => Ok(None),
            _ => Ok(Some(())),
        }
    };
    tokio::select! {
        biased;
        error = process.closed() => Err(error),
        answer = answer => match answer? {
            Some(()) => Ok(world.effects(token)),
            None => std::future::pending().await,
        },
    }
}

async fn write(process: Process, request: Req) -> Result<u32, CallError> {
    let (world, token) = (process.world.clone(), *request);
    let activity = request.context().activity().cloned();
    let until = request.context().attempt_until();
    let marks = world.lock().marks;
    // What a proxy in front says without asking the server, truthfully.
    if world.chance(6) {
        return Err(CallError::evidence(Evidence::TooManyRequests, "429").after(world.wait(5_000)));
    }
    let frame = Arc::new(Mutex::new(if marks { Frame::Queued } else { Frame::Taken }));
    let waits = Waits { frame: Arc::clone(&frame), activity: activity.clone().filter(|_| marks) };
    if let (true, Some(activity)) = (marks, &activity) {
        assert!(activity.adopt());
    }
    let (reply, replied) = oneshot::channel();
    tokio::spawn(wire(process.clone(), token, frame, activity.filter(|_| marks), reply));
    if world.chance(25) {
        let (process, when) = (process.clone(), world.wait(8_000));
        tokio::spawn(async move {
            sleep(when).await;
            process.close();
        });
    }
    let withdrawn = async {
        match until {
            Some(until) => sleep_until(until).await,
            None => std::future::pending().await,
        }
        if !waits.withdraw() {
            std::future::pending::<()>().await;
        }
    };
    tokio::select! {
        biased;
        Ok(reply) = replied => reply,
        error = process.closed() => {
            // Of a frame that was queued nothing is sent any more.
            if waits.withdraw() { Err(CallError::not_sent("queued").connection_lost()) } else { Err(error) }
        }
        () = withdrawn => Err(CallError::not_sent("queued")),
        else => std::future::pending().await,
    }
}

/// What becomes of a write's bytes, whoever still waits for it.
async fn wire(
    process: Process,
    token: u32,
    frame: Arc<Mutex<Frame>>,
    activity: Option<Arc<goaround::Activity>>,
    reply: oneshot::Sender<Result<u32, CallError>>,
) {
    let world = process.world.clone();
    if activity.is_some() {
        if world.chance(30) {
            sleep(world.wait(12_000)).await;
        }
        if *frame.lock().unwrap() == Frame::Withdrawn || process.life() != Life::Open {
            return;
        }
        *frame.lock().unwrap() = Frame::Taken;
        if world.chance(30) {
            // Stalled until the rest is written, or until the connection closes.
            let _ = timeout(world.wait(12_000), process.closed()).await;
        }
        // A frame that the closure cut may have been enough all the same.
        if let (Life::Open, Some(activity)) = (process.life(), &activity) {
            activity.sent();
        }
    }
    let lands_at = Instant::now() + world.wait(LANDS_WITHIN);
    let fate = world.lock().rng.u32(0..100);
    if fate < 70 {
        // Effects end with the process, where that was declared; else they need only its word.
        let ends = world.lock().ends_effects;
        let mut life = process.life.subscribe();
        tokio::select! {
            biased;
            _ = life.wait_for(|life| *life == Life::Gone(true)), if ends => return,
            () = sleep_until(lands_at) => {}
        }
        *world.lock().effects.entry(token).or_default() += 1;
    }
    sleep(world.wait(3_000)).await;
    if process.life() != Life::Open {
        return;
    }
    let _ = match fate {
        0..50 => reply.send(Ok(token)),
        // A gateway that gives up on a server that did it, or did not.
        50..55 | 70..75 => reply.send(Err(CallError::evidence(Evidence::Unavailable, "503"))),
        55..60 | 75..80 => reply.send(Err(CallError::ambiguous("reset"))),
        80..90 => reply.send(Err(CallError::answered("quota"))),
        // Lost. The call waits for it all the same.
        _ => {
            process.life.closed().await;
            Ok(())
        }
    };
}

#[derive(Clone)]
struct Connector(World);

impl Service<()> for Connector {
    type Response = Process;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Process, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let world = self.0.clone();
        Box::pin(async move {
            sleep(world.wait(2_000)).await;
            if world.chance(10) {
                return Err("refused".into());
            }
            Ok(Process { world, life: Arc::new(watch::Sender::new(Life::Open)) })
        })
    }
}

/// What the caller is told; `None` if it went away.
type Told = Option<Result<u32, CallError>>;

struct Flight {
    token: u32,
    id: CallId,
    told: Told,
}

/// What is wrong with a run.
#[derive(Debug, PartialEq)]
enum Wrong {
    Duplicate(u32),
    /// Something that the caller was told is not true.
    Lie(String),
    /// What must be reported was not, or more than once.
    Report(String),
    Late(Duration),
}

/// What the caller declares of the server.
#[derive(Clone, Copy)]
struct Declared {
    /// In milliseconds.
    quarantine: u64,
    /// Also where it is not true.
    exit_ends_effects: bool,
}

const TRUTH: Declared = Declared { quarantine: LANDS_WITHIN + 1, exit_ends_effects: false };

/// One run: some writes over some clones of one stack.
fn run(seed: u64, declared: Declared) -> (Vec<Wrong>, Vec<&'static str>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    runtime.unwrap().block_on(fly(seed, declared))
}

async fn fly(seed: u64, declared: Declared) -> (Vec<Wrong>, Vec<&'static str>) {
    let mut rng = Rng::with_seed(seed);
    let ends_effects = rng.bool();
    let state = State {
        effects: HashMap::new(),
        reports: HashMap::new(),
        marks: rng.bool(),
        ends_effects,
        declares_it: ends_effects || declared.exit_ends_effects,
        rng: rng.fork(),
    };
    let world = World(Arc::new(Mutex::new(state)));
    let mut layer = WriteSafetyLayer::new({
        let world = world.clone();
        move |doubt: InDoubt<Req, u32>| check(world.clone(), doubt)
    });
    if rng.u32(0..100) < 80 {
        layer = layer.quarantine(ms(declared.quarantine));
    }
    if rng.bool() {
        layer = layer.attempt_timeout(ms(rng.u64(1..8_000)));
    }
    if rng.bool() {
        layer = layer.independent_writes();
    }
    if rng.bool() {
        layer = layer.trust(Evidence::TooManyRequests);
    }
    layer = layer.max_checks(rng.usize(1..4));
    let sink = world.clone();
    let default = ms(rng.u64(1_000..60_000));
    let stack = Stack::builder(Connector(world.clone()))
        .deadline(default)
        .writes(layer)
        .retry(RetryReadOnly.attempt_timeout(ms(2_000)))
        .on_event(move |event| {
            let mut state = sink.lock();
            let of = |call| Option::<CallId>::expect(call, "a call has an id");
            match event {
                Event::Call(r) if r.effect == Effect::Write => {
                    state.reports.entry(of(r.call)).or_default().calls += 1;
                }
                Event::InDoubt(r) => state.reports.entry(r.call).or_default().doubts += 1,
                Event::Abandoned(r) => state.reports.entry(of(r.call)).or_default().abandoned += 1,
                _ => {}
            }
        })
        .build()
        .unwrap();

    let mut flights = Vec::new();
    for token in 1..=rng.u32(1..5) {
        let (stack, world) = (stack.clone(), world.clone());
        let limit = rng.bool().then(|| ms(rng.u64(10..30_000)));
        let gives_up = (rng.u32(0..100) < 15).then(|| ms(rng.u64(0..15_000)));
        let begins = ms(rng.u64(0..4_000));
        flights.push(tokio::spawn(async move {
            sleep(begins).await;
            let mut call = Tagged::new(token, Effect::Write).named("write");
            if let Some(limit) = limit {
                call = call.within(limit);
            }
            let id = call.context_mut().assign_id();
            let start = Instant::now();
            let told = match gives_up {
                Some(after) => timeout(after, stack.send(call)).await.ok(),
                None => Some(stack.send(call).await),
            };
            let mut wrong = None;
            let limit = limit.unwrap_or(default);
            if start.elapsed() > limit + ms(1) {
                wrong = Some(Wrong::Late(start.elapsed() - limit));
            }
            // What is said of the present must be true at once.
            let landed = match &told {
                Some(Ok(_)) => true,
                Some(Err(error)) => error.outcome() == Outcome::DoneResultLost,
                None => false,
            };
            if landed && world.effects(token) == 0 {
                wrong = Some(Wrong::Lie("done, and it was not".into()));
            }
            (Flight { token, id, told }, wrong)
        }));
    }
    let mut wrong = Vec::new();
    let mut done = Vec::new();
    for flight in flights {
        let (flight, found) = flight.await.unwrap();
        wrong.extend(found);
        done.push(flight);
    }
    // Until the last zombie has landed.
    sleep(ms(100_000)).await;
    let mut kinds = Vec::new();
    for flight in &done {
        let reports = world.lock().reports.get(&flight.id).copied().unwrap_or_default();
        kinds.push(judge(flight, world.effects(flight.token), reports, &mut wrong));
    }
    (wrong, kinds)
}

fn judge(flight: &Flight, effects: u32, reports: Reports, wrong: &mut Vec<Wrong>) -> &'static str {
    if effects > 1 {
        wrong.push(Wrong::Duplicate(effects));
    }
    let lie = |what: &dyn fmt::Display| Wrong::Lie(format!("{what}, and {effects} effects"));
    let report = |what: &str| Wrong::Report(format!("{what}: {reports:?}"));
    if reports.calls > 1 || reports.doubts > 1 || reports.abandoned > 1 {
        wrong.push(report("more than once"));
    }
    let abandoned = reports.abandoned == 1;
    if flight.told.is_some() == abandoned && (abandoned || effects > 0) {
        wrong.push(report("abandoned or not"));
    }
    match &flight.told {
        None => "gave up",
        Some(Ok(_)) if reports.doubts > 0 => "ok after a doubt",
        Some(Ok(_)) => "ok",
        Some(Err(error)) => {
            let must = matches!(error.outcome(), Outcome::Unknown | Outcome::DoneResultLost);
            if must && reports.doubts == 0 {
                wrong.push(report("a doubt"));
            }
            match error.outcome() {
                Outcome::NotDone if effects > 0 => wrong.push(lie(error)),
                Outcome::Answered if effects > 0 && !error.may_have_landed() => wrong.push(lie(error)),
                Outcome::NoAnswer => wrong.push(lie(error)),
                _ => {}
            }
            match error.outcome() {
                Outcome::NotDone if reports.doubts > 0 => "not done after a doubt",
                Outcome::NotDone => "not done",
                Outcome::Unknown => "unknown",
                Outcome::DoneResultLost => "result lost",
                _ => "answered",
            }
        }
    }
}

/// Tells the truth as far as it can see it, when it does not fail.
async fn check(world: World, doubt: InDoubt<Req, u32>) -> Result<goaround::Verdict<u32>, BoxError> {
    let token = **doubt.request();
    let fate = world.lock().rng.u32(0..100);
    match fate {
        0..3 => return Err("failed".into()),
        3..6 => return Ok(doubt.unknown("no idea")),
        6..9 => return Ok(doubt.in_flight(ms(300))),
        9..11 => std::future::pending().await,
        _ => {}
    }
    if doubt.probe(Tagged::new(token, Effect::ReadOnly)).await? > 0 {
        return Ok(if world.chance(50) { doubt.landed(token) } else { doubt.landed_without_result() });
    }
    Ok(doubt.not_landed())
}

fn seeds() -> u64 {
    let Ok(seeds) = std::env::var("GOAROUND_SEEDS") else { return SEEDS };
    seeds.parse::<u64>().expect("GOAROUND_SEEDS is a number").max(SEEDS)
}

#[test]
fn what_is_declared_is_true_and_so_is_what_callers_are_told() {
    let mut kinds: HashMap<&str, u32> = HashMap::new();
    for seed in 0..seeds() {
        let (wrong, told) = run(seed, TRUTH);
        assert!(wrong.is_empty(), "seed {seed}: {wrong:?}");
        told.into_iter().for_each(|kind| *kinds.entry(kind).or_default() += 1);
    }
    // That nothing went wrong proves something only if everything happened.
    println!("seeds={} wrong=0 {kinds:?}", seeds());
    for kind in
        ["ok", "ok after a doubt", "not done", "not done after a doubt", "unknown", "result lost", "gave up"]
    {
        assert!(kinds.get(kind).is_some_and(|count| *count > 50), "{kind}: {kinds:?}");
    }
}

#[test]
fn what_is_declared_and_not_true_is_found_out() {
    for declared in
        [Declared { quarantine: LANDS_WITHIN / 20, ..TRUTH }, Declared { exit_ends_effects: true, ..TRUTH }]
    {
        let wrong: Vec<_> = (0..SEEDS).flat_map(|seed| run(seed, declared).0).collect();
        println!("{} wrong", wrong.len());
        assert!(wrong.iter().any(|wrong| matches!(wrong, Wrong::Duplicate(_))), "{wrong:?}");
        assert!(wrong.iter().any(|wrong| matches!(wrong, Wrong::Lie(_))), "{wrong:?}");
    }
}
