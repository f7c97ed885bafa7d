//! One write against a server whose answers may come late or never: what each policy makes of it.
//!
//! `cargo run --release --example race`
//!
//! For every seed one client sends one write through a world (`world.rs`) in which each message, request and
//! reply alike, takes 1 to 40 ms, and one in twenty anything up to 20 s; two requests and five replies in a
//! hundred are lost. The client waits 100 ms for an answer. What it does then is its policy (`policies.rs`):
//! first some that are written by hand, then those of this crate's layers, the whole stack of them. A write is
//! replayed once at most. A check reads the truth, without a loss of time, or what a replica 2 s behind holds.
//!
//! - *duplicates*: seeds in which the write has taken effect twice when the last message has arrived.
//! - *lost acks*: those in which the caller was told "done" and it was not, or "not done" and it was, later too.
//! - *unknown*: those in which the caller is told that nobody knows. *reported*: of them, those of which an
//!   event tells too; policies by hand have none.
//! - *recovery*: the median time to an answer, of the seeds in which none came within 100 ms and one came at all.
//!
//! Every policy takes something for granted. Where that is not true of the server the row says so, and shows
//! what it costs. Where it is, a row of this crate must show no duplicate, no lost ack and no unknown without
//! a report: the exit status says whether that holds.
//!
//! Time is tokio's, paused: it jumps from one event to the next.

mod policies;
mod world;

use std::{process::ExitCode, thread, time::Duration};

use policies::{Client, Ours, Row, Told};
use serde::Serialize;
use tokio::time::Instant;
use world::World;

const HELP: &str = "\
usage: race [--seeds N] [--json]

Sends one write for each of N seeds (100000) under each policy through a simulated server, and prints how many
landed twice, were lost, or are unknown. The exit status is 1 if a policy of this crate that was told the truth
shows a duplicate, a lost ack, or an unknown without a report.

  --seeds N  how many seeds
  --json     print the rows as one JSON object in the last line
  --help     print this
";

/// What came of some seeds under one policy.
#[derive(Default)]
struct Tally {
    duplicates: u64,
    lost_acks: u64,
    unknown: u64,
    unknown_reported: u64,
    recoveries: Vec<Duration>,
}

#[derive(Serialize)]
struct Summary {
    policy: &'static str,
    ours: bool,
    /// Whether what the policy takes for granted is true of the server.
    declared_true: bool,
    duplicates: u64,
    lost_acks: u64,
    unknown: u64,
    unknown_reported: u64,
    median_recovery_ms: Option<f64>,
}

#[derive(Serialize)]
struct Line<'a> {
    rows: &'a [Summary],
}

fn main() -> ExitCode {
    let (mut seeds, mut json) = (100_000, false);
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = true,
            "--help" | "-h" => {
                print!("{HELP}");
                return ExitCode::SUCCESS;
            }
            "--seeds" => match arguments.next().and_then(|number| number.parse().ok()) {
                Some(number) => seeds = number,
                None => return misuse("--seeds needs a number"),
            },
            other => return misuse(&format!("unknown option {other:?}")),
        }
    }

    let rows = policies::rows();
    let began = std::time::Instant::now();
    let summaries = race(&rows, seeds);
    print_table(&summaries);
    let took = began.elapsed();
    println!("{seeds} seeds a row, {} rows, in {:.1} s", rows.len(), took.as_secs_f64());
    let mut holds = true;
    for row in summaries.iter().filter(|row| row.is_wrong()) {
        println!("WRONG: {}", row.policy);
        holds = false;
    }
    if json {
        let line = serde_json::to_string(&Line { rows: &summaries }).expect("numbers and names");
        println!("{line}");
    }
    if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn misuse(what: &str) -> ExitCode {
    eprintln!("race: {what}\n\n{HELP}");
    ExitCode::from(2)
}

/// All seeds under all policies, on all cores.
fn race(rows: &[Row], seeds: u64) -> Vec<Summary> {
    let cores = thread::available_parallelism().map_or(1, |cores| cores.get() as u64);
    let mut tallies: Vec<Tally> = rows.iter().map(|_| Tally::default()).collect();
    thread::scope(|scope| {
        let lanes: Vec<_> = (0..cores)
            .map(|lane| scope.spawn(move || fly(rows, seeds * lane / cores..seeds * (lane + 1) / cores)))
            .collect();
        for lane in lanes {
            let tallied = lane.join().expect("a lane flew its seeds");
            tallies.iter_mut().zip(tallied).for_each(|(sum, part)| sum.add(part));
        }
    });
    rows.iter().zip(tallies).map(|(row, tally)| Summary::of(row, tally)).collect()
}

fn fly(rows: &[Row], seeds: std::ops::Range<u64>) -> Vec<Tally> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime");
    rows.iter().map(|row| runtime.block_on(fly_row(row, seeds.clone()))).collect()
}

async fn fly_row(row: &Row, seeds: std::ops::Range<u64>) -> Tally {
    let mut tally = Tally::default();
    let ours = match row.client {
        Client::Ours { writes, effect, deadline } => Some(Ours::new(writes(), effect, deadline)),
        Client::Blind | Client::Checks(_) => None,
    };
    for seed in seeds {
        let world = World::new(seed, row.server);
        let start = Instant::now();
        let (told, reported) = match (row.client, &ours) {
            (Client::Checks(wait), _) => (policies::check_then_replay(&world, wait).await, 0),
            (_, Some(ours)) => ours.send(&world).await,
            (_, None) => (policies::blind(&world).await, 0),
        };
        tally.judge(&world, told, reported, start.elapsed());
    }
    tally
}

// ===== impl Tally =====

impl Tally {
    fn judge(&mut self, world: &World, told: Told, reported: u32, took: Duration) {
        let effects = world.effects();
        self.duplicates += u64::from(effects > 1);
        self.unknown_reported += u64::from(reported);
        match told {
            // What is said to be done must be done already.
            Told::Done => self.lost_acks += u64::from(world.effects_by(Instant::now()) == 0),
            Told::NotDone => self.lost_acks += u64::from(effects > 0),
            Told::Unknown => self.unknown += 1,
        }
        if told != Told::Unknown && world.was_in_doubt() {
            self.recoveries.push(took);
        }
    }

    fn add(&mut self, other: Self) {
        self.duplicates += other.duplicates;
        self.lost_acks += other.lost_acks;
        self.unknown += other.unknown;
        self.unknown_reported += other.unknown_reported;
        self.recoveries.extend(other.recoveries);
    }
}

// ===== impl Summary =====

impl Summary {
    fn of(row: &Row, mut tally: Tally) -> Self {
        let middle = tally.recoveries.len() / 2;
        let median = match tally.recoveries.is_empty() {
            true => None,
            false => Some(tally.recoveries.select_nth_unstable(middle).1.as_secs_f64() * 1e3),
        };
        Self {
            policy: row.policy,
            ours: matches!(row.client, Client::Ours { .. }),
            declared_true: row.true_of_the_server,
            duplicates: tally.duplicates,
            lost_acks: tally.lost_acks,
            unknown: tally.unknown,
            unknown_reported: tally.unknown_reported,
            median_recovery_ms: median.map(f64::round),
        }
    }

    /// Whether a policy of this crate broke its word.
    fn is_wrong(&self) -> bool {
        self.ours
            && (self.unknown != self.unknown_reported
                || self.declared_true && (self.duplicates > 0 || self.lost_acks > 0))
    }
}

fn print_table(rows: &[Summary]) {
    let line = |policy: &str, [told, twice, lost, unknown, reported, recovery]: [&str; 6]| {
        println!("{policy:<48} {told:>8} {twice:>11} {lost:>9} {unknown:>8} {reported:>8} {recovery:>9}");
    };
    let head = ["it holds", "duplicates", "lost acks", "unknown", "reported", "recovery"];
    for (ours, title) in [(false, "by hand"), (true, "goaround")] {
        line(title, head);
        for row in rows.iter().filter(|row| row.ours == ours) {
            let told = if row.declared_true { "true" } else { "FALSE" };
            let reported = if ours { row.unknown_reported.to_string() } else { "-".to_owned() };
            let recovery = row.median_recovery_ms.map_or("-".to_owned(), |ms| match ms < 1e3 {
                true => format!("{ms} ms"),
                false => format!("{:.1} s", ms / 1e3),
            });
            line(
                row.policy,
                [
                    told,
                    &row.duplicates.to_string(),
                    &row.lost_acks.to_string(),
                    &row.unknown.to_string(),
                    &reported,
                    &recovery,
                ],
            );
        }
        println!();
    }
}
