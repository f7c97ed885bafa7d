//! Real processes that are killed, stopped and continued at random while they read and write, with frames cut in
//! half and pipes that are full: many worlds side by side. What landed is counted in a file that no server is asked
//! about.
//!
//! `GOAROUND_CHAOS=n` says how many rounds there are (200 by default), `GOAROUND_CHAOS_SEED=s` where they begin.
#![allow(missing_docs)]

#[cfg(not(target_os = "linux"))]
fn main() {}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    match std::env::var_os("GOAROUND_CHAOS_SERVER") {
        Some(folder) => {
            server::run(std::path::Path::new(&folder));
            std::process::ExitCode::SUCCESS
        }
        None => rounds::run(),
    }
}

/// The server: it appends a line for each write that it applies, and misbehaves on its own.
#[cfg(target_os = "linux")]
mod server {
    use std::{
        fs::OpenOptions,
        io::{BufRead, Write},
        path::Path,
        thread::sleep,
        time::Duration,
    };

    use rustix::process::{Signal, getpid, kill_process};
    use serde_json::{Value, json};

    pub(super) fn run(folder: &Path) {
        let seed = std::env::var("GOAROUND_CHAOS_SEED").unwrap_or_default();
        let pid = getpid().as_raw_nonzero().get();
        let mut random = fastrand::Rng::with_seed(seed.parse::<u64>().unwrap_or_default() ^ pid as u64);
        append(&folder.join("pids"), &pid.to_string());
        let mut out = std::io::stdout();
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            let Ok(message) = serde_json::from_str::<Value>(&line) else { continue };
            let Some(id) = message["id"].as_u64() else { continue };
            let token = message["params"]["t"].as_u64().unwrap_or_default();
            if random.u32(0..100) < 20 {
                sleep(Duration::from_millis(random.u64(0..150)));
            }
            let result = match message["method"].as_str() {
                Some("put") => {
                    if random.u32(0..100) < 6 {
                        std::process::exit(3); // before the commit
                    }
                    append(&folder.join("effects"), &token.to_string());
                    match random.u32(0..100) {
                        0..6 => std::process::exit(4), // after it
                        6..9 => drop(kill_process(getpid(), Signal::STOP)),
                        _ => {}
                    }
                    token
                }
                _ => count(folder, token),
            };
            let answer = json!({ "jsonrpc": "2.0", "id": id, "result": result }).to_string();
            let (whole, cut) = (answer.as_bytes(), random.usize(0..answer.len()));
            let fate = random.u32(0..100);
            let _ = match fate {
                0..4 => out.write_all(&whole[..cut]),
                4..8 => out.write_all(whole),
                _ => out.write_all(whole).and_then(|()| out.write_all(b"\n")),
            };
            let _ = out.flush();
            if fate < 8 {
                std::process::exit(5);
            }
        }
    }

    /// With one write, so that a line is there whole or not at all.
    fn append(file: &Path, line: &str) {
        let file = OpenOptions::new().append(true).create(true).open(file);
        file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).expect("a line in a file");
    }

    pub(super) fn count(folder: &Path, token: u64) -> u64 {
        let effects = std::fs::read_to_string(folder.join("effects")).unwrap_or_default();
        effects.lines().filter(|line| **line == token.to_string()).count() as u64
    }
}

#[cfg(target_os = "linux")]
mod rounds {
    use std::{
        collections::HashMap,
        path::Path,
        process::ExitCode,
        sync::{Arc, Mutex},
        time::{Duration, Instant},
    };

    use fastrand::Rng;
    use goaround::{
        BoxError, Call, CallId, Event, InDoubt, Outcome, ReconnectLayer, Stack, WriteSafetyLayer,
        jsonrpc::{Request, Response},
        stdio::{self, Child},
    };
    use rustix::process::{Pid, Signal, kill_process};
    use serde_json::json;
    use tokio::{process::Command, task::JoinSet, time::sleep};

    use super::server::count;

    /// How many worlds there are side by side.
    const WORLDS: usize = 32;
    const CALLS: u64 = 12;

    #[derive(Default)]
    struct Tally {
        writes: u64,
        landed: u64,
        unknown: u64,
        replayed: u64,
        duplicates: u64,
        lost: u64,
        unreported: u64,
        lies: u64,
        late: u64,
        reads: u64,
    }

    pub(super) fn run() -> ExitCode {
        let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
        let rounds = number("GOAROUND_CHAOS").unwrap_or(200);
        let from = number("GOAROUND_CHAOS_SEED").unwrap_or_else(|| fastrand::u64(..));
        println!("chaos: {rounds} rounds from seed {from}");
        let start = Instant::now();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        let tally = runtime.block_on(async {
            let mut tally = Tally::default();
            let mut worlds = JoinSet::new();
            for round in 0..rounds {
                if worlds.len() >= WORLDS {
                    tally.add(worlds.join_next().await);
                }
                worlds.spawn(fly(from.wrapping_add(round)));
            }
            while !worlds.is_empty() {
                tally.add(worlds.join_next().await);
            }
            tally
        });
        let Tally { writes, landed, unknown, replayed, duplicates, lost, unreported, lies, late, reads } =
            tally;
        println!(
            "chaos: rounds={rounds} writes={writes} landed={landed} unknown={unknown} replayed={replayed} \
             reads={reads} duplicates={duplicates} lost={lost} unreported={unreported} lies={lies} late={late} in {:.1}s",
            start.elapsed().as_secs_f64()
        );
        let is_well = duplicates + lost + unreported + lies + late == 0;
        // That nothing went wrong proves something only if enough did.
        let happened = rounds < 100 || (unknown > 0 && replayed > 0 && landed > writes / 4);
        if is_well && happened { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    impl Tally {
        fn add(&mut self, round: Option<Result<Tally, tokio::task::JoinError>>) {
            let Some(round) = round else { return };
            let round = round.expect("a round does not panic");
            self.writes += round.writes;
            self.landed += round.landed;
            self.unknown += round.unknown;
            self.replayed += round.replayed;
            self.duplicates += round.duplicates;
            self.lost += round.lost;
            self.unreported += round.unreported;
            self.lies += round.lies;
            self.late += round.late;
            self.reads += round.reads;
        }
    }

    /// What the events said of a call.
    #[derive(Clone, Copy, Default)]
    struct Said {
        doubts: u64,
        replayed: bool,
    }

    async fn check(doubt: InDoubt<Request, Response>) -> Result<goaround::Verdict<Response>, BoxError> {
        let params: serde_json::Value = doubt.request().params()?;
        let found: u64 = doubt.probe(Request::new("get", params)?.read_only()).await?.parse()?;
        Ok(if found > 0 { doubt.landed_without_result() } else { doubt.not_landed() })
    }

    fn child(folder: &Path, seed: u64) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.env("GOAROUND_CHAOS_SERVER", folder).env("GOAROUND_CHAOS_SEED", seed.to_string());
        // Its effects are its own and end with it.
        stdio::child(command)
            .exit_ends_effects()
            .shutdown_grace(Duration::from_millis(50), Duration::from_millis(50))
    }

    async fn fly(seed: u64) -> Tally {
        let folder = tempfile::tempdir().expect("a folder");
        let mut random = Rng::with_seed(seed);
        let said: Arc<Mutex<HashMap<CallId, Said>>> = Arc::default();
        let sink = Arc::clone(&said);
        let stack = Stack::builder(child(folder.path(), seed))
            .writes(WriteSafetyLayer::new(check).independent_writes())
            .reconnect(ReconnectLayer::once().crash_loop(50, Duration::from_millis(100)))
            .on_event(move |event| {
                if let Event::InDoubt(report) = event {
                    let mut said = sink.lock().expect("the events");
                    let said = said.entry(report.call).or_default();
                    said.doubts += 1;
                    said.replayed |= report.replayed;
                }
            })
            .build()
            .expect("a stack");
        let mischief = tokio::spawn(disturb(folder.path().to_owned(), random.fork()));
        let mut calls = JoinSet::new();
        for token in 1..=CALLS {
            let (stack, mut random) = (stack.clone(), random.fork());
            calls.spawn(async move {
                sleep(Duration::from_millis(random.u64(0..800))).await;
                let is_write = random.u32(0..100) < 75;
                // Some are longer than a pipe.
                let filling =
                    "x".repeat(if random.u32(0..100) < 15 { 200_000 } else { random.usize(0..200) });
                let method = if is_write { "put" } else { "get" };
                let mut request =
                    Request::new(method, json!({ "t": token, "x": filling })).expect("a request");
                if !is_write {
                    request = request.read_only();
                }
                let id = request.context_mut().assign_id();
                let limit = Duration::from_millis(random.u64(300..6_000));
                let start = Instant::now();
                let told = stack.send(request.within(limit)).await;
                // Real clocks and a busy machine: what is not bound at all is found all the same.
                let late = start.elapsed() > limit + Duration::from_secs(20);
                (token, is_write, id, told, late)
            });
        }
        let told = calls.join_all().await;
        mischief.abort();
        // The group is gone when this returns: nothing lands any more.
        stack.shutdown(Duration::ZERO).await;
        let said = said.lock().expect("the events").clone();
        let mut tally = Tally::default();
        for (token, is_write, id, told, late) in told {
            tally.late += u64::from(late);
            if !is_write {
                tally.reads += 1;
                continue;
            }
            let effects = count(folder.path(), token);
            let said = said.get(&id).copied().unwrap_or_default();
            tally.writes += 1;
            tally.landed += u64::from(effects > 0);
            tally.duplicates += u64::from(effects > 1);
            tally.replayed += u64::from(said.replayed);
            let outcome = told.as_ref().err().map(goaround::CallError::outcome);
            tally.unknown += u64::from(outcome == Some(Outcome::Unknown));
            match outcome {
                None | Some(Outcome::DoneResultLost) => tally.lost += u64::from(effects == 0),
                Some(Outcome::NotDone) => tally.lies += u64::from(effects > 0),
                Some(Outcome::Unknown) => {}
                _ => tally.lies += 1,
            }
            if matches!(outcome, Some(Outcome::Unknown | Outcome::DoneResultLost)) {
                tally.unreported += u64::from(said.doubts != 1);
            }
            if effects > 1 || (outcome == Some(Outcome::NotDone) && effects > 0) {
                println!("chaos: seed {seed}, write {token}: {effects} effects, told {told:?}");
            }
        }
        tally
    }

    /// Kills, stops and continues the server that runs.
    async fn disturb(folder: std::path::PathBuf, mut random: Rng) {
        loop {
            sleep(Duration::from_millis(random.u64(20..700))).await;
            let pids = std::fs::read_to_string(folder.join("pids")).unwrap_or_default();
            let last = pids.lines().last().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
            // Not whoever has its number now.
            let is_ours = |pid: &Pid| {
                std::fs::read_link(format!("/proc/{pid}/exe")).ok() == std::env::current_exe().ok()
            };
            let Some(pid) = last.filter(is_ours) else { continue };
            match random.u32(0..100) {
                0..35 => drop(kill_process(pid, Signal::KILL)),
                35..40 => drop(kill_process(pid, Signal::TERM)),
                _ => {
                    let _ = kill_process(pid, Signal::STOP);
                    sleep(Duration::from_millis(random.u64(0..900))).await;
                    let _ = kill_process(pid, Signal::CONT);
                }
            }
        }
    }
}
