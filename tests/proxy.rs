//! The official SDK under the stack, over Streamable HTTP, through a proxy that refuses, resets, cuts, delays, swallows
//! and delivers late: many callers in many worlds side by side. What landed is counted by the server.
//!
//! `GOAROUND_CHAOS=n` says how many rounds there are (200 by default), `GOAROUND_SEED=s` where they begin. A seed
//! decides what is called and what the proxy does, in the order in which it is asked; the sockets and their times are
//! real; `GOAROUND_WORLDS=w` says how many worlds there are side by side (32), for machines that have much else to do.
//! The last rounds are told lies and must find harm.
#![allow(missing_docs)]

#[path = "lab/http.rs"]
mod http;
#[path = "lab/sdk.rs"]
mod lab;
#[path = "lab/proxy.rs"]
mod proxy;

use std::{
    collections::{BTreeMap, HashMap},
    future::Future,
    process::ExitCode,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use fastrand::Rng;
use goaround::{
    Call, CallError, CallId, Event, Evidence, Outcome, ReconnectLayer, WriteSafetyLayer,
    sdk::{Client, Connector, Http, Request},
};
use http::{On, Reply, Server, appended};
use lab::{builder, check_without_a_word, lines, ms};
use proxy::{FATES, Fate, Faults, Proxy};
use rmcp::model::ServerResult;
use serde_json::json;
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

/// How many worlds there are side by side.
const WORLDS: usize = 32;
const CALLS: u64 = 16;
/// How often a caller does what was not done.
const TRIES: usize = 4;
/// How many rounds each lie has at most.
const LIES: u64 = 48;
/// How long the proxy holds requests back, in milliseconds, and when it delivers none any more.
const HOLD: std::ops::Range<u64> = 50..300;
const LATEST: Duration = Duration::from_millis(400);
/// Longer than that, by what a machine needs to take a request over a few times.
const QUARANTINE: Duration = Duration::from_millis(1_000);
/// On a machine that is busier than that a world's quarantine may not be true.
const MAX_STALL: Duration = Duration::from_millis(150);
/// No call takes so much longer than its deadline.
const HANGS: Duration = Duration::from_secs(30);

/// What is declared in a world.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// The truth.
    True,
    /// A quarantine that is shorter than the proxy holds requests back.
    ShortQuarantine,
    /// That a 503 means that nothing was processed. The proxy says it of what was.
    TrustedGateway,
}

fn main() -> ExitCode {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let rounds = number("GOAROUND_CHAOS").unwrap_or(200);
    let from = number("GOAROUND_SEED").unwrap_or_else(|| fastrand::u64(..));
    println!("proxy: {rounds} rounds from seed {from}");
    let start = Instant::now();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
    let side_by_side = number("GOAROUND_WORLDS").map_or(WORLDS, |worlds| worlds as usize);
    let seeds = (0..rounds).map(|round| from.wrapping_add(round));
    let (tally, met) = runtime.block_on(fly_all(Kind::True, seeds, side_by_side));
    let took = start.elapsed().as_secs_f64();

    println!("proxy: rounds={rounds} {tally} in {took:.1}s, seed {from}");
    let met: Vec<_> = met.iter().map(|(what, times)| format!("{what}={times}")).collect();
    println!("proxy: {}", met.join(" "));
    // That nothing went wrong proves something only if enough did.
    let Tally { writes, landed, unknown, replayed, abandoned, .. } = tally.clone();
    let happened = unknown > 0 && replayed > 0 && abandoned > 0 && landed > writes / 4 && met.len() > FATES;
    let mut is_well = tally.wrong() == 0 && (rounds < 100 || happened);
    for kind in [Kind::ShortQuarantine, Kind::TrustedGateway] {
        let (rounds, tally) = runtime.block_on(find_harm(kind, from));
        let is_found = tally.harm() > 0;
        println!(
            "proxy: {kind:?} rounds={rounds} {tally}; as it must {}",
            if is_found { "be" } else { "NOT be" }
        );
        // A lie costs what rests on it, and nothing else.
        is_well &= is_found && tally.wrong() == tally.harm();
    }
    if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

type Met = BTreeMap<&'static str, u64>;

/// Flies them, so many side by side.
async fn fly_all(kind: Kind, seeds: impl Iterator<Item = u64>, side_by_side: usize) -> (Tally, Met) {
    let (mut tally, mut met) = (Tally::default(), Met::new());
    let mut add = |flown: Option<Result<(Tally, Met), tokio::task::JoinError>>| {
        let Some(flown) = flown else { return };
        let (more, saw) = flown.expect("a round does not panic");
        tally.add(&more);
        saw.into_iter().for_each(|(what, times)| *met.entry(what).or_default() += times);
    };
    let mut worlds = JoinSet::new();
    for seed in seeds {
        if worlds.len() >= side_by_side {
            add(worlds.join_next().await);
        }
        // Not all at once.
        sleep(ms(20)).await;
        worlds.spawn(fly(kind, seed));
    }
    while !worlds.is_empty() {
        add(worlds.join_next().await);
    }
    (tally, met)
}

/// Flies a lie until it has done harm: how many rounds that took, and what happened in them.
async fn find_harm(kind: Kind, from: u64) -> (u64, Tally) {
    const BATCH: u64 = 8;
    let (mut rounds, mut all) = (0, Tally::default());
    while rounds < LIES && all.harm() == 0 {
        let seeds = (rounds..rounds + BATCH).map(|round| from.wrapping_add(round));
        let (tally, _) = fly_all(kind, seeds, BATCH as usize).await;
        all.add(&tally);
        rounds += BATCH;
    }
    (rounds, all)
}

/// By how much the clock of this program was late meanwhile.
async fn with_stall<F: Future>(future: F) -> (F::Output, Duration) {
    const TICK: Duration = Duration::from_millis(10);
    let stall = Arc::new(AtomicU64::new(0));
    let longest = Arc::clone(&stall);
    // In a task of its own, as all that it is to be compared with.
    let ticks = tokio::spawn(async move {
        loop {
            let start = Instant::now();
            sleep(TICK).await;
            let late = start.elapsed().saturating_sub(TICK).as_micros();
            longest.fetch_max(u64::try_from(late).unwrap_or(u64::MAX), Ordering::Relaxed);
        }
    });
    let output = future.await;
    // Once more, if it was held up as well.
    sleep(3 * TICK).await;
    ticks.abort();
    (output, Duration::from_micros(stall.load(Ordering::Relaxed)))
}

#[derive(Clone, Default)]
struct Tally {
    writes: u64,
    landed: u64,
    unknown: u64,
    replayed: u64,
    abandoned: u64,
    reads: u64,
    duplicates: u64,
    lost: u64,
    unreported: u64,
    lies: u64,
    stale: u64,
    late: u64,
    hung: u64,
    /// Worlds on too busy a machine, where nobody knows whether the declarations were true.
    excused: u64,
}

impl Tally {
    fn counts(&mut self) -> [(&'static str, &mut u64); 14] {
        [
            ("writes", &mut self.writes),
            ("landed", &mut self.landed),
            ("unknown", &mut self.unknown),
            ("replayed", &mut self.replayed),
            ("abandoned", &mut self.abandoned),
            ("reads", &mut self.reads),
            ("duplicates", &mut self.duplicates),
            ("lost", &mut self.lost),
            ("unreported", &mut self.unreported),
            ("lies", &mut self.lies),
            ("stale", &mut self.stale),
            ("late", &mut self.late),
            ("hung", &mut self.hung),
            ("excused", &mut self.excused),
        ]
    }

    fn add(&mut self, other: &Self) {
        for ((_, count), (_, more)) in self.counts().into_iter().zip(other.clone().counts()) {
            *count += *more;
        }
    }

    /// What comes of false declarations.
    fn harm(&self) -> u64 {
        self.duplicates + self.lies
    }

    fn wrong(&self) -> u64 {
        self.harm() + self.lost + self.unreported + self.stale + self.late + self.hung
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let counts = self.clone().counts().map(|(name, count)| format!("{name}={count}"));
        f.write_str(&counts.join(" "))
    }
}

// ===== One world =====

/// What the events said of a call.
#[derive(Clone, Copy, Default)]
struct Said {
    doubts: u64,
    abandoned: u64,
    replayed: bool,
}

/// What the callers of a world share.
struct World {
    seed: u64,
    stack: Client,
    /// All deadlines are long.
    is_patient: bool,
    said: Arc<Mutex<HashMap<CallId, Said>>>,
    /// The writes that are known to have been applied.
    acknowledged: Mutex<Vec<String>>,
}

/// What became of a call.
struct Flown {
    line: Option<String>,
    id: CallId,
    /// `None` if the caller gave up.
    told: Option<Result<ServerResult, CallError>>,
    /// By how much it was later than its deadline.
    late: Duration,
    hung: bool,
    is_stale: bool,
}

fn client(kind: Kind, proxy: &Proxy, random: &mut Rng, said: &Arc<Mutex<HashMap<CallId, Said>>>) -> Client {
    let mut http = Http::new(proxy.url());
    if random.u32(0..100) < 40 {
        // Connections that are used again, and may have gone meanwhile.
        let redirects = reqwest::redirect::Policy::none();
        http = http.client(reqwest::Client::builder().redirect(redirects).build().expect("a client"));
    }
    let connector = Connector::http((), http).probe_timeout(ms(random.u64(200..800)));
    let mut safety = match kind {
        Kind::True if random.u32(0..100) < 25 => WriteSafetyLayer::refuse(),
        Kind::True => WriteSafetyLayer::new(check_without_a_word).quarantine(QUARANTINE),
        Kind::ShortQuarantine => WriteSafetyLayer::new(check_without_a_word).quarantine(ms(20)),
        Kind::TrustedGateway => WriteSafetyLayer::refuse().trust(Evidence::Unavailable),
    };
    if kind != Kind::True || random.u32(0..100) < 85 {
        safety = safety.independent_writes();
    }
    let mut retry = lab::retry();
    if random.bool() {
        retry = retry.attempt_timeout(ms(random.u64(200..900)));
    }
    let sink = Arc::clone(said);
    let stack = builder(connector).writes(safety).retry(retry);
    let stack = stack.reconnect(
        ReconnectLayer::once()
            .connect_timeout(ms(random.u64(800..2_000)))
            .backoff(backon::ConstantBuilder::new().with_delay(ms(10)).without_max_times())
            .crash_loop(50, ms(100)),
    );
    let stack = stack.on_event(move |event| {
        let mut said = sink.lock().expect("the events");
        match event {
            Event::InDoubt(report) => {
                let said = said.entry(report.call).or_default();
                said.doubts += 1;
                said.replayed |= report.replayed;
            }
            Event::Abandoned(report) => {
                if let Some(call) = report.call {
                    said.entry(call).or_default().abandoned += 1;
                }
            }
            _ => {}
        }
    });
    stack.build().expect("a stack")
}

async fn fly(kind: Kind, seed: u64) -> (Tally, Met) {
    let mut random = Rng::with_seed(seed);
    let server = Server::start().await;
    let faults = match kind {
        Kind::True => Faults::new(HOLD, LATEST),
        Kind::ShortQuarantine => {
            let faults = Faults::new(200..500, ms(2_000));
            faults.more(Fate::CloseThenDeliver, 5).more(Fate::ResetThenDeliver, 5)
        }
        Kind::TrustedGateway => Faults::new(HOLD, LATEST).more(Fate::Gateway, 15),
    };
    let mut proxy = Proxy::start(server.address(), faults, random.fork()).await;
    let said = Arc::default();
    let stack = client(kind, &proxy, &mut random, &said);
    let is_patient = kind != Kind::True;
    let world = Arc::new(World { seed, stack, is_patient, said, acknowledged: Mutex::default() });

    let mut calls = JoinSet::new();
    for call in 1..=CALLS {
        calls.spawn(one_call(Arc::clone(&world), call, random.fork()));
    }
    let mischief = disturb(&server, random.fork(), kind == Kind::True && random.bool());
    let fly = async {
        tokio::select! {
            flown = calls.join_all() => flown,
            () = mischief => unreachable!("it has no end"),
        }
    };
    let (flown, stall) = with_stall(fly).await;
    let mut tally = Tally::default();
    if timeout(HANGS, world.stack.shutdown(ms(100))).await.is_err() {
        tally.hung += 1;
    }
    let (world, said) = match Arc::try_unwrap(world) {
        Ok(World { seed, stack, said, .. }) => {
            drop(stack);
            (seed, said)
        }
        Err(world) => (world.seed, Arc::clone(&world.said)),
    };
    // What is still under way lands now, or never.
    let met = proxy.finish().await;
    let effects = server.effects();
    let said = said.lock().expect("the events").clone();
    for flown in &flown {
        let said = said.get(&flown.id).copied().unwrap_or_default();
        let before = tally.wrong();
        tally.judge(flown, said, &effects, stall);
        if kind == Kind::True && tally.wrong() > before {
            let Flown { line, told, late, is_stale, hung, .. } = flown;
            let effects = effects.iter().filter(|effect| Some(*effect) == line.as_ref()).count();
            println!(
                "proxy: seed {world}: {line:?}: {effects} effects, doubts {}, abandoned {}, late {late:?}, stale {is_stale}, \
                 hung {hung}, stall {stall:?}, \
                 told {told:?}",
                said.doubts, said.abandoned
            );
        }
    }
    if kind == Kind::True && stall > MAX_STALL {
        (tally.excused, tally.duplicates, tally.lies) = (1, 0, 0);
    }
    (tally, met)
}

/// Sends one call, and perhaps gives it up.
async fn one_call(world: Arc<World>, call: u64, mut random: Rng) -> Flown {
    sleep(ms(random.u64(0..800))).await;
    let line = (random.u32(0..100) < 70).then(|| format!("w{call}"));
    let request = match &line {
        Some(line) => {
            // Some are longer than what a socket takes at once.
            let filling = if random.u32(0..100) < 5 { 100_000 } else { random.usize(0..100) };
            Request::tool("append", json!({ "line": line, "x": "x".repeat(filling) }))
        }
        None => lines(),
    };
    let patience = (random.u32(0..100) < 8).then(|| ms(random.u64(0..300)));
    let known = world.acknowledged.lock().expect("no panic under it").clone();
    let mut tries = TRIES;
    let (id, told, late, hung) = loop {
        let mut request = request.clone();
        let id = request.context_mut().assign_id();
        let is_hasty = !world.is_patient && random.u32(0..100) < 35;
        let limit = ms(random.u64(if is_hasty { 100..1_000 } else { 2_000..4_000 }));
        let start = Instant::now();
        let sent = timeout(patience.unwrap_or(limit + HANGS), world.stack.send(request.within(limit))).await;
        let late = start.elapsed().saturating_sub(limit);
        tries -= 1;
        // Who is told that it was not done may do it again.
        if let Ok(Err(error)) = &sent
            && error.outcome() == Outcome::NotDone
            && tries > 0
        {
            sleep(ms(random.u64(20..200))).await;
            continue;
        }
        let hung = sent.is_err() && patience.is_none();
        break (id, sent.ok(), late, hung);
    };
    let mut is_stale = false;
    match (&line, &told) {
        (Some(line), Some(Ok(_))) => {
            world.acknowledged.lock().expect("no panic under it").push(line.clone());
        }
        (None, Some(Ok(result))) => {
            // Another's answer, or one from before, is none.
            is_stale = lab::told(result).is_none_or(|seen| known.iter().any(|line| !seen.contains(line)));
        }
        _ => {}
    }
    Flown { line, id, told, late, hung, is_stale }
}

impl Tally {
    fn judge(&mut self, flown: &Flown, said: Said, effects: &[String], stall: Duration) {
        // Real clocks: as late as this program itself was, and a little.
        self.late += u64::from(flown.told.is_some() && flown.late > 2 * stall + ms(100));
        self.hung += u64::from(flown.hung);
        self.stale += u64::from(flown.is_stale);
        let Some(line) = &flown.line else {
            self.reads += 1;
            let lie = match &flown.told {
                None | Some(Ok(_)) => said.doubts + said.abandoned > 0,
                Some(Err(error)) => !matches!(error.outcome(), Outcome::NoAnswer | Outcome::NotDone),
            };
            self.lies += u64::from(lie);
            return;
        };
        let effects = effects.iter().filter(|effect| *effect == line).count();
        self.writes += 1;
        self.landed += u64::from(effects > 0);
        self.duplicates += u64::from(effects > 1);
        self.replayed += u64::from(said.replayed);
        let mut is_reported = said.doubts <= 1 && said.abandoned <= u64::from(flown.told.is_none());
        let outcome = |error| (CallError::outcome(error), CallError::may_have_landed(error));
        match flown.told.as_ref().map(|told| told.as_ref().map_err(outcome)) {
            // Given up.
            None => {
                self.abandoned += 1;
                is_reported &= effects == 0 || said.doubts + said.abandoned > 0;
            }
            Some(Ok(_)) => self.lost += u64::from(effects == 0),
            Some(Err((Outcome::DoneResultLost, _))) => {
                self.lost += u64::from(effects == 0);
                is_reported &= said.doubts == 1;
            }
            // An answer to an attempt that nothing is known of but this.
            Some(Err((Outcome::NotDone | Outcome::Answered, false))) => self.lies += u64::from(effects > 0),
            Some(Err((Outcome::Unknown | Outcome::Answered, true))) => {
                self.unknown += 1;
                is_reported &= said.doubts == 1;
            }
            Some(Err(_)) => self.lies += 1,
        }
        self.unreported += u64::from(!is_reported);
    }
}

/// What the server does besides: it answers by streams, forgets its sessions, dies and comes back.
async fn disturb(server: &Server, mut random: Rng, dies: bool) {
    loop {
        sleep(ms(random.u64(20..1_000))).await;
        match random.u32(0..100) {
            0..40 => drop(server.on(On::Tool("append"), Reply::sse_result(&appended()).after_the_effect())),
            40..60 => {
                let late = Reply::new().executes().wait(ms(random.u64(0..100)));
                server.on(On::Tool("append"), late.then_http("200 OK", &[http::JSON], RESULT));
            }
            60..70 => drop(server.on(On::Tool("append"), Reply::error(-32603, "no"))),
            _ if !dies => {}
            70..85 => server.forget_sessions(),
            _ => {
                server.stop();
                sleep(ms(random.u64(0..150))).await;
                server.start_again().await;
            }
        }
    }
}

const RESULT: &str = r#"{"jsonrpc":"2.0","id":$ID,"result":{"content":[{"type":"text","text":"appended"}]}}"#;
