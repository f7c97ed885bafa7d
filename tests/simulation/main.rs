//! The simulator: random worlds on one thread each, with tokio's clock paused, in which one seed decides
//! everything. Whatever happens in them, no write takes effect twice as long as what was declared is true,
//! what callers are told is true, and every unknown is reported.
//!
//! Two harnesses share the world: `full` has the real stack over the real JSON-RPC client on an in-memory
//! pipe, in some worlds with MCP on it, `lean` an in-memory service under the same layers. In a quarter of the worlds
//! some callers have their turns late: see `late`. In some worlds the ledger is the one in a file, too: see `durable`, and
//! without the feature `ledger-durable` only its model. What is declared falsely, and a guard that is off, must be found
//! out: see `controls`.
//!
//! - `GOAROUND_SEEDS=n` flies n full seeds and five times as many lean ones (20,000 and 100,000 by default).
//! - `GOAROUND_SEED=full/7` (or `lean/7`, or `7` for both) replays one and prints its history.
//! - `GOAROUND_FROM=s` begins with that seed, and `GOAROUND_ONLY=full` (or `lean`) flies one harness only.
#![allow(missing_docs, unreachable_pub)]

mod controls;
#[cfg(feature = "ledger-durable")]
mod durable;
mod fly;
mod full;
mod judge;
mod late;
mod lean;
mod ledger;
mod world;

use std::{
    collections::BTreeMap,
    process::ExitCode,
    sync::{
        Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use self::{
    controls::Control,
    fly::Flown,
    world::{Branch, Lies},
};

/// A seed is some thousand allocations, most of them of tasks and calls.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// How many full seeds a run has; five times as many are lean.
const SEEDS: u64 = 20_000;
/// How many seeds a thread takes at once.
const CHUNK: u64 = 50;
/// How many broken seeds are shown.
const SHOWN: usize = 4;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Full,
    Lean,
}

impl Kind {
    const ALL: [Self; 2] = [Kind::Full, Kind::Lean];

    fn name(self) -> &'static str {
        match self {
            Kind::Full => "full",
            Kind::Lean => "lean",
        }
    }

    pub fn run(self, seed: u64, lies: Lies, record: bool) -> Flown {
        match self {
            Kind::Full if seed % 8 == 1 => fly::run::<full::Annotated>(seed, lies, record),
            Kind::Full if seed % 4 == 3 => fly::run::<full::Plain>(seed, lies, record),
            Kind::Full => fly::run::<full::Wrapped>(seed, lies, record),
            Kind::Lean => fly::run::<lean::Lean>(seed, lies, record),
        }
    }
}

/// What many seeds came to.
#[derive(Default)]
struct Tally {
    seeds: u64,
    wrong: BTreeMap<&'static str, u64>,
    /// With what was wrong first.
    broken: Vec<(Kind, u64, &'static str)>,
    covered: BTreeMap<&'static str, u64>,
    /// On how many threads, and how long.
    busy: Duration,
}

impl Tally {
    fn add(&mut self, kind: Kind, seed: u64, flown: &Flown) {
        self.seeds += 1;
        for (branch, name) in Branch::ALL {
            if flown.covered & 1 << *branch as u64 != 0 {
                *self.covered.entry(*name).or_default() += 1;
            }
        }
        for wrong in &flown.wrong {
            *self.wrong.entry(wrong.kind()).or_default() += 1;
        }
        if let Some(first) = flown.wrong.first() {
            self.broken.push((kind, seed, first.kind()));
        }
    }

    fn merge(&mut self, other: Tally) {
        self.seeds += other.seeds;
        self.busy += other.busy;
        self.broken.extend(other.broken);
        other.wrong.into_iter().for_each(|(kind, count)| *self.wrong.entry(kind).or_default() += count);
        other.covered.into_iter().for_each(|(name, count)| *self.covered.entry(name).or_default() += count);
    }

    /// Per second and core.
    fn speed(&self) -> u64 {
        (self.seeds as f64 / self.busy.as_secs_f64().max(1e-9)) as u64
    }
}

/// Flies those seeds on all cores.
fn fly_all(kind: Kind, from: u64, seeds: u64, lies: Lies) -> Tally {
    let next = AtomicU64::new(from);
    let all = Mutex::new(Tally::default());
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                let (mut tally, start) = (Tally::default(), busy());
                loop {
                    let first = next.fetch_add(CHUNK, Ordering::Relaxed);
                    let last = (first + CHUNK).min(from + seeds);
                    if first >= last {
                        break;
                    }
                    (first..last).for_each(|seed| tally.add(kind, seed, &kind.run(seed, lies, false)));
                }
                tally.busy = busy().saturating_sub(start);
                all.lock().unwrap().merge(tally);
            });
        }
    });
    all.into_inner().unwrap()
}

/// How long this thread has run, where the system says so: other builds on the machine do not count.
fn busy() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    let ran = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let ran = ran.and_then(|ran| ran.split(' ').next()?.parse().ok());
    ran.map_or_else(|| START.get_or_init(Instant::now).elapsed(), Duration::from_nanos)
}

/// Flies seeds until one finds out what is wrong on purpose: which one does.
fn find_out(control: &Control, seeds: u64) -> Option<u64> {
    let next = AtomicU64::new(0);
    let found = AtomicU64::new(u64::MAX);
    let threads = thread::available_parallelism().map_or(1, |cores| cores.get());
    thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                control.begin();
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= seeds || found.load(Ordering::Relaxed) < seed {
                        break;
                    }
                    let flown = control.kind.run(seed, control.lies, false);
                    if flown.wrong.iter().any(|wrong| control.shows_as.contains(&wrong.kind())) {
                        found.fetch_min(seed, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    Some(found.into_inner()).filter(|seed| *seed < seeds)
}

/// Whether everything that is wrong on purpose is found out.
fn controls() -> bool {
    let all = controls::all();
    let mut found = 0;
    for control in all {
        let (name, shows_as) = (control.name, control.shows_as.join(" or "));
        match find_out(control, SEEDS) {
            Some(seed) => {
                found += 1;
                println!("control: {name}: {shows_as}, found out by {}/{seed}", control.kind.name());
            }
            None => println!("control: {name}: no {shows_as} in {SEEDS} {} seeds", control.kind.name()),
        }
    }
    println!("controls={} found={found}", all.len());
    found == all.len()
}

/// Seeds that once broke something.
const REGRESSIONS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/simulation/regressions.txt");

/// Flies the seeds that once broke something.
fn regressions() -> bool {
    let known = std::fs::read_to_string(REGRESSIONS).unwrap_or_default();
    let seeds = known.lines().filter_map(|line| seed_of(line.split('#').next()?));
    let broken = seeds.filter(|(kind, seed)| !kind.run(*seed, Lies::default(), false).wrong.is_empty());
    let broken: Vec<_> = broken.collect();
    for (kind, seed) in &broken {
        println!("FAILED again: {}/{seed}", kind.name());
    }
    broken.is_empty()
}

/// Adds seeds to those that are flown first from now on.
fn remember(broken: &[(Kind, u64)]) {
    let mut known = std::fs::read_to_string(REGRESSIONS).unwrap_or_default();
    for (kind, seed) in broken {
        let line = format!("{}/{seed}", kind.name());
        if !known.lines().any(|known| known.split('#').next().map(str::trim) == Some(&line)) {
            known += &line;
            known.push('\n');
        }
    }
    if !broken.is_empty()
        && let Err(error) = std::fs::write(REGRESSIONS, known)
    {
        println!("{REGRESSIONS}: {error}");
    }
}

/// Whether a seed decides everything: the same one gives the same history, also with a ledger's file.
fn is_decided_by_its_seed() -> bool {
    let is_decided = |kind: Kind, seed| {
        let [one, two] = [1, 2].map(|_| kind.run(seed, Lies::default(), true).history);
        if one != two {
            println!("FAILED: {}/{seed} is not the same the second time", kind.name());
            println!("{one}\n----\n{two}");
        }
        one == two
    };
    let on_file: Vec<u64> = (0..).filter(|seed| world::crashes_on_file(*seed)).take(30).collect();
    Kind::ALL.into_iter().all(|kind| (0..50).chain(on_file.clone()).all(|seed| is_decided(kind, seed)))
}

fn number(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name} must be a number")))
}

/// Flies one seed again, with its history.
fn replay(kind: Kind, seed: u64) -> bool {
    let flown = kind.run(seed, Lies::default(), true);
    println!("{}", flown.history);
    for wrong in &flown.wrong {
        println!("{}/{seed}: {wrong:?}", kind.name());
    }
    let features = if cfg!(feature = "ledger-durable") { " --features ledger-durable" } else { "" };
    println!("GOAROUND_SEED={}/{seed} cargo test{features} --test simulation", kind.name());
    flown.wrong.is_empty()
}

fn seed_of(text: &str) -> Option<(Kind, u64)> {
    let (kind, seed) = text.trim().split_once('/')?;
    let kind = Kind::ALL.into_iter().find(|known| known.name() == kind)?;
    Some((kind, seed.parse().ok()?))
}

fn main() -> ExitCode {
    let shown = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        fly::panicked(panic);
        if thread::current().name() == Some("main") {
            shown(panic);
        }
    }));
    let code = fly();
    #[cfg(feature = "ledger-durable")]
    durable::clean_up();
    code
}

fn fly() -> ExitCode {
    if let Ok(seed) = std::env::var("GOAROUND_SEED") {
        let both = || Some(Kind::ALL.map(|kind| (kind, seed.trim().parse().ok())).to_vec());
        let seeds = seed_of(&seed).map(|(kind, seed)| vec![(kind, Some(seed))]).or_else(both);
        let mut is_well = true;
        for (kind, seed) in seeds.into_iter().flatten() {
            let Some(seed) = seed else {
                eprintln!("GOAROUND_SEED must be like lean/7, full/7, or 7 for both");
                return ExitCode::FAILURE;
            };
            is_well &= replay(kind, seed);
        }
        return if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    let mut is_well = controls();
    if cfg!(goaround_controls) {
        return if is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE };
    }
    is_well &= regressions() && is_decided_by_its_seed();
    let seeds = number("GOAROUND_SEEDS").unwrap_or(SEEDS);
    let from = number("GOAROUND_FROM").unwrap_or(0);
    let mut all = Tally::default();
    let mut speeds = String::new();
    let only = std::env::var("GOAROUND_ONLY").ok();
    for kind in Kind::ALL {
        if only.as_ref().is_some_and(|only| only != kind.name()) {
            continue;
        }
        let seeds = if kind == Kind::Lean { seeds * 5 } else { seeds };
        let tally = fly_all(kind, from, seeds, Lies::default());
        speeds += &format!(" {}={} ({}/s and core)", kind.name(), tally.seeds, tally.speed());
        all.merge(tally);
    }
    // That nothing went wrong proves something only if everything happened.
    for (_, name) in Branch::ALL.iter().filter(|(branch, _)| branch.is_reachable()) {
        let reached = all.covered.get(name).copied().unwrap_or_default();
        println!("{reached:>8} {name}");
        if reached == 0 && seeds >= SEEDS && only.is_none() {
            println!("FAILED: no seed reached this: {name}");
            is_well = false;
        }
    }
    all.broken.sort_by_key(|(_, seed, _)| *seed);
    // One of each sort.
    let sorts: BTreeMap<_, _> =
        all.broken.iter().rev().map(|(kind, seed, sort)| (*sort, (*kind, *seed))).collect();
    let shown: Vec<_> = sorts.into_values().take(SHOWN).collect();
    for (kind, seed) in &shown {
        replay(*kind, *seed);
    }
    remember(&shown);
    let on_file = Branch::ALL.iter().find(|(branch, _)| *branch == Branch::OnFile);
    let on_file = on_file.and_then(|(_, name)| all.covered.get(name)).copied().unwrap_or_default();
    let of = |kind: &str| all.wrong.get(kind).copied().unwrap_or_default();
    for (kind, count) in &all.wrong {
        println!("{kind}: {count}");
    }
    match cfg!(feature = "ledger-durable") {
        true => println!("with the ledger in a file: {on_file} worlds"),
        false => println!("with the ledger in a file: none, for want of the feature ledger-durable"),
    }
    println!(
        "seeds={} duplicates={} lost={} unreported={} late={}{speeds}",
        all.seeds,
        of("duplicates"),
        of("lost"),
        of("unreported"),
        of("late"),
    );
    if all.broken.is_empty() && is_well { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
