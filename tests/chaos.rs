//! Real processes, servers and clients, that are killed, stopped and continued at random while they read and write,
//! with frames cut in half and pipes that are full: many worlds side by side. What landed is counted in a file that no
//! server is asked about, and what clients were told in one that they append to, so that it outlives them.
//!
//! In a quarter of the worlds the server is the demo's (`examples/demo/server.rs`), over MCP, and what landed is counted
//! in its journal. It dies, hangs, goes on after its output was closed and holds answers back when a call says so; it
//! does not cut what it writes.
//!
//! A client that was stopped keeps its deadlines by its own clock, which went on. Of the calls that a killed one had
//! in flight nobody was told: none of them lands twice all the same. What the next process makes of them is shown by
//! `tests/crash`, with the durable ledger.
//!
//! That it can fail is shown by rounds with servers whose exit ends nothing, though it is said to, and by some with the
//! demo's whose check finds nothing: duplicates must be found in them.
//!
//! `GOAROUND_CHAOS=n` says how many rounds there are (200 by default), `GOAROUND_SEED=s` where they begin.
#![allow(missing_docs)]

#[cfg(not(target_os = "linux"))]
fn main() {}

/// The demo's server, as it is.
#[cfg(target_os = "linux")]
#[path = "../examples/demo/server.rs"]
mod demo;

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    // The demo's server says by its arguments what it is, and becomes this program again to go on without its output.
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let words: Vec<&str> = arguments.iter().map(AsRef::as_ref).collect();
    let served = match words[..] {
        [demo::SERVE, folder] => Some(demo::serve(folder.as_ref())),
        [demo::GO_ON, folder, invoice] => Some(demo::go_on(folder.as_ref(), invoice)),
        _ => None,
    };
    if let Some(served) = served {
        return if served.is_ok() {
            std::process::ExitCode::SUCCESS
        } else {
            std::process::ExitCode::FAILURE
        };
    }
    let folder = |name: &str| std::env::var_os(name).map(std::path::PathBuf::from);
    // A client's servers have its variables, too.
    if let Some(folder) = folder("GOAROUND_CHAOS_LATE") {
        server::late(&folder);
    } else if let Some(folder) = folder("GOAROUND_CHAOS_SERVER") {
        server::run(&folder);
    } else if let Some(folder) = folder("GOAROUND_CHAOS_CLIENT") {
        client::run(&folder);
    } else {
        return rounds::run();
    }
    std::process::ExitCode::SUCCESS
}

/// Of a variable of the environment.
#[cfg(target_os = "linux")]
fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// Appends a line with one write, so that it is there whole or not at all.
#[cfg(target_os = "linux")]
fn append(file: &std::path::Path, line: &str) {
    use std::io::Write;

    let file = std::fs::OpenOptions::new().append(true).create(true).open(file);
    file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())).expect("a line in a file");
}

/// The server: it appends a line for each write that it applies, and misbehaves on its own.
#[cfg(target_os = "linux")]
mod server {
    use std::{
        io::{BufRead, Write},
        os::unix::process::CommandExt,
        path::Path,
        process::{Command, Stdio},
        thread::sleep,
        time::Duration,
    };

    use rustix::process::{Signal, getpid, kill_process};
    use serde_json::{Value, json};

    use super::{append, demo, number};

    /// How long after a server what it has handed on takes effect.
    pub(super) const LATE: Duration = Duration::from_millis(400);

    /// Lets a process that is in another group do it, later: the server's exit ends nothing.
    fn hand_on(folder: &Path, token: u64) {
        let mut late = Command::new(std::env::current_exe().expect("this program"));
        late.env("GOAROUND_CHAOS_LATE", folder).env("GOAROUND_CHAOS_TOKEN", token.to_string());
        late.stdin(Stdio::null()).stdout(Stdio::null());
        let mut late = late.process_group(0).spawn().expect("a process");
        // As long as this one lives; then somebody else reaps it.
        std::thread::spawn(move || late.wait());
    }

    pub(super) fn late(folder: &Path) {
        sleep(LATE);
        append(&folder.join("effects"), &number("GOAROUND_CHAOS_TOKEN").unwrap_or_default().to_string());
    }

    pub(super) fn run(folder: &Path) {
        let is_wrong = number("GOAROUND_CHAOS_WRONG").is_some();
        let seed = number("GOAROUND_SEED").unwrap_or_default();
        let pid = getpid().as_raw_nonzero().get();
        let mut random = fastrand::Rng::with_seed(seed ^ pid as u64);
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
                    match is_wrong {
                        true => hand_on(folder, token),
                        false => append(&folder.join("effects"), &token.to_string()),
                    }
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

    pub(super) fn count(folder: &Path, token: u64) -> u64 {
        let effects = std::fs::read_to_string(folder.join("effects")).unwrap_or_default();
        let own = effects.lines().filter(|line| **line == token.to_string()).count();
        let journal = std::fs::read_to_string(demo::journal_of(folder)).unwrap_or_default();
        let committed = |line: &&str| line.strip_prefix("commit ") == Some(&token.to_string());
        (own + journal.lines().filter(committed).count()) as u64
    }
}

/// The client: it reads and writes at random times, says what it is told, and ends.
#[cfg(target_os = "linux")]
mod client {
    use std::{
        collections::HashMap,
        io::Read,
        path::{Path, PathBuf},
        sync::{
            Arc, Mutex,
            atomic::{AtomicU64, Ordering},
        },
        time::{Duration, Instant},
    };

    use fastrand::Rng;
    use goaround::{
        BoxError, Call, CallError, CallId, Event, InDoubt, Outcome, ReconnectLayer, Stack, Verdict,
        WriteSafetyLayer,
        jsonrpc::{Request, Response},
        mcp,
        stdio::{self, Child},
    };
    use serde_json::{Value, json};
    use tokio::{process::Command, task::JoinSet, time::sleep};

    use super::{
        append,
        demo::{self, Fault},
        number,
    };

    pub(super) const CALLS: u64 = 12;

    pub(super) fn run(folder: &Path) {
        // It ends when whoever started it does.
        std::thread::spawn(|| {
            let _ = std::io::stdin().read_to_end(&mut Vec::new());
            std::process::exit(1);
        });
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
        runtime.block_on(calls(folder));
    }

    async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
        let params: serde_json::Value = doubt.request().params()?;
        let found: u64 = doubt.probe(Request::new("get", params)?.read_only()).await?.parse()?;
        Ok(if found > 0 { doubt.landed_without_result() } else { doubt.not_landed() })
    }

    fn child(folder: &Path) -> Child {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.env("GOAROUND_CHAOS_SERVER", folder);
        // Its effects are its own and end with it.
        stdio::child(command)
            .exit_ends_effects()
            .shutdown_grace(Duration::from_millis(50), Duration::from_millis(50))
    }

    /// The same of the demo's server, unless it is to be wrong.
    async fn check_demo(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
        let params: Value = doubt.request().params()?;
        let list: Value = doubt.probe(Request::tool("list_invoices", json!({}))).await?.parse()?;
        let invoices = list["structuredContent"]["invoices"].as_array().ok_or("no list of invoices")?;
        let is_wrong = number("GOAROUND_CHAOS_WRONG").is_some();
        let found = invoices.contains(&params["arguments"]["invoice"]) && !is_wrong;
        Ok(if found { doubt.landed_without_result() } else { doubt.not_landed() })
    }

    fn demo_server(folder: &Path) -> mcp::Stdio {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command.arg(demo::SERVE).arg(folder).env("GOAROUND_CHAOS_SERVER", folder);
        mcp::stdio(command)
            .tools(mcp::ToolRules::new().read_only(["get_invoice", "list_invoices"]))
            .exit_ends_effects()
            .shutdown_grace(Duration::from_millis(50), Duration::from_millis(50))
    }

    /// A stack over either server.
    #[derive(Clone)]
    enum Client {
        Own(stdio::Client),
        Demo(mcp::Client),
    }

    impl Client {
        async fn send(&self, request: Request) -> Result<Response, CallError> {
            match self {
                Client::Own(stack) => stack.send(request).await,
                Client::Demo(stack) => stack.send(request).await,
            }
        }

        async fn shutdown(&self) {
            match self {
                Client::Own(stack) => stack.shutdown(Duration::ZERO).await,
                Client::Demo(stack) => stack.shutdown(Duration::ZERO).await,
            };
        }
    }

    /// For how long this process was held up since it began: stopped, or on a busy machine.
    fn watch() -> Arc<AtomicU64> {
        const TICK: Duration = Duration::from_millis(10);
        let held = Arc::new(AtomicU64::new(0));
        let count = Arc::clone(&held);
        tokio::spawn(async move {
            loop {
                let before = Instant::now();
                sleep(TICK).await;
                count.fetch_add((before.elapsed() - TICK).as_millis() as u64, Ordering::Relaxed);
            }
        });
        held
    }

    async fn calls(folder: &Path) {
        let first = number("GOAROUND_CHAOS_FIRST").unwrap_or_default();
        let mut random = Rng::with_seed(number("GOAROUND_SEED").unwrap_or_default() ^ first);
        let tokens: Arc<Mutex<HashMap<CallId, u64>>> = Arc::default();
        let (known, told) = (Arc::clone(&tokens), folder.join("told"));
        let sink = move |event: Event<'_>| {
            if let Event::InDoubt(report) = event
                && let Some(token) = known.lock().expect("the calls").get(&report.call)
            {
                append(&told, &format!("doubt {token} {}", report.replayed));
            }
        };
        let reconnect = ReconnectLayer::once().crash_loop(50, Duration::from_millis(100));
        let is_demo = number("GOAROUND_CHAOS_DEMO").is_some();
        let stack = if is_demo {
            let writes = WriteSafetyLayer::new(check_demo).independent_writes();
            let stack = Stack::builder(demo_server(folder)).writes(writes);
            Client::Demo(stack.reconnect(reconnect).on_event(sink).build().expect("a stack"))
        } else {
            let writes = WriteSafetyLayer::new(check).independent_writes();
            let stack = Stack::builder(child(folder)).writes(writes);
            Client::Own(stack.reconnect(reconnect).on_event(sink).build().expect("a stack"))
        };
        let held = watch();
        let mut calls = JoinSet::new();
        for token in first..first + CALLS {
            let (stack, tokens, held) = (stack.clone(), Arc::clone(&tokens), Arc::clone(&held));
            let (told, random) = (folder.join("told"), random.fork());
            calls.spawn(async move { call(token, stack, &tokens, &held, told, random).await });
        }
        calls.join_all().await;
        // The group is gone when this returns: nothing lands any more.
        stack.shutdown().await;
    }

    /// A read or a write of that token, which is as long as that.
    fn request(token: u64, is_write: bool, filling: &str) -> Request {
        let method = if is_write { "put" } else { "get" };
        let request = Request::new(method, json!({ "t": token, "x": filling })).expect("a request");
        if is_write { request } else { request.read_only() }
    }

    /// The same for the demo's server, of which some ask for a fault.
    fn request_of_demo(token: u64, is_write: bool, filling: &str, random: &mut Rng) -> Request {
        let fault = match random.u32(0..100) {
            // Once in a folder, which is what a check that is wrong needs.
            0..60 if is_write && number("GOAROUND_CHAOS_WRONG").is_some() => Fault::CommitThenDie,
            0..8 if is_write => Fault::CommitThenDie,
            8..16 if is_write => Fault::GoOn,
            16..22 => Fault::Die,
            22..26 => Fault::Leave,
            26..28 => Fault::DieAlways,
            28..30 if is_write => Fault::HoldBack,
            30..32 => Fault::Hang,
            _ => Fault::None,
        };
        let tool = match is_write {
            true => "create_invoice",
            false if random.bool() => "get_invoice",
            false => "list_invoices",
        };
        Request::tool(tool, json!({ "invoice": token.to_string(), "fault": fault, "x": filling }))
    }

    async fn call(
        token: u64,
        stack: Client,
        tokens: &Mutex<HashMap<CallId, u64>>,
        held: &AtomicU64,
        told: PathBuf,
        mut random: Rng,
    ) {
        sleep(Duration::from_millis(random.u64(0..800))).await;
        let is_write = random.u32(0..100) < 75;
        // Some are longer than a pipe.
        let filling = "x".repeat(if random.u32(0..100) < 15 { 200_000 } else { random.usize(0..200) });
        let mut request = match stack {
            Client::Own(_) => request(token, is_write, &filling),
            Client::Demo(_) => request_of_demo(token, is_write, &filling, &mut random),
        };
        let method = if is_write { "put" } else { "get" };
        let id = request.context_mut().assign_id();
        tokens.lock().expect("the calls").insert(id, token);
        let limit = Duration::from_millis(random.u64(300..6_000));
        append(&told, &format!("begun {token} {method}"));
        let held_before = held.load(Ordering::Relaxed);
        let start = Instant::now();
        let result = stack.send(request.within(limit)).await;
        let took = start.elapsed();
        let held = Duration::from_millis(held.load(Ordering::Relaxed) - held_before);
        // By its own clock; what held the whole process up held up this look at it, too.
        let is_late = took > limit + held + Duration::from_secs(3);
        let outcome = match result.as_ref().map_err(goaround::CallError::outcome) {
            Ok(_) => "ok",
            Err(Outcome::NotDone) => "not_done",
            Err(Outcome::NoAnswer) => "no_answer",
            Err(Outcome::DoneResultLost) => "result_lost",
            Err(Outcome::Unknown) => "unknown",
            Err(_) => "other",
        };
        append(&told, &format!("told {token} {outcome} {is_late}"));
    }
}

#[cfg(target_os = "linux")]
mod rounds {
    use std::{
        collections::BTreeMap,
        path::{Path, PathBuf},
        process::{ExitCode, Stdio},
        time::{Duration, Instant},
    };

    use fastrand::Rng;
    use rustix::process::{Pid, Signal, kill_process};
    use tokio::{
        process::Command,
        task::JoinSet,
        time::{sleep, timeout},
    };

    use super::{
        client::CALLS,
        demo, number,
        server::{LATE, count},
    };

    /// How many worlds there are side by side.
    const WORLDS: usize = 32;
    /// How many rounds there are whose servers are not what they are said to be, and how many with a check that is wrong:
    /// the latter needs fewer to be found out.
    const WRONG: [u64; 2] = [32, 8];
    /// How often as many more, while nothing is found: on a busy machine effects come late, and so do replays.
    const AGAIN: u64 = 4;
    /// How many clients a world has at most, one after the other.
    const CLIENTS: u64 = 3;
    /// Longer than anything takes that does not hang.
    const PATIENCE: Duration = Duration::from_secs(60);
    /// One world in so many has the demo's server.
    const DEMO: u64 = 4;

    /// Which server a world has.
    #[derive(Clone, Copy)]
    struct Server {
        is_demo: bool,
        /// The exit of our own ends nothing, and the check of the demo's finds nothing.
        is_wrong: bool,
    }

    macro_rules! tally {
        ($($name:ident),*) => {
            #[derive(Default)]
            struct Tally { $($name: u64,)* }

            impl Tally {
                fn add(&mut self, other: &Tally) {
                    $(self.$name += other.$name;)*
                }

                fn line(&self) -> String {
                    [$(format!("{}={}", stringify!($name), self.$name),)*].join(" ")
                }
            }
        };
    }

    tally!(
        clients,
        killed,
        stopped,
        writes,
        landed,
        unknown,
        replayed,
        cut_off,
        reads,
        duplicates,
        lost,
        unreported,
        lies,
        late,
        demo,
        demo_writes,
        demo_replayed
    );

    pub(super) fn run() -> ExitCode {
        let rounds = number("GOAROUND_CHAOS").unwrap_or(200);
        let from = number("GOAROUND_SEED").unwrap_or_else(|| fastrand::u64(..));
        println!("chaos: {rounds} rounds from seed {from}");
        let start = Instant::now();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().expect("a runtime");
        let wrong = [(false, "servers whose exit ends nothing"), (true, "a check that finds nothing")];
        let mut are_found = true;
        for ((is_demo, what), rounds) in wrong.into_iter().zip(WRONG) {
            let (mut tally, mut flown) = (Tally::default(), 0);
            while tally.duplicates == 0 && flown < AGAIN * rounds {
                let more = fly_all(from.wrapping_add(flown), rounds, |_| Server { is_demo, is_wrong: true });
                tally.add(&runtime.block_on(more));
                flown += rounds;
            }
            println!(
                "chaos: rounds={flown} {}; wrong on purpose, so that there must be duplicates: {what}",
                tally.line()
            );
            are_found &= tally.duplicates > 0;
        }
        let server = |seed: u64| Server { is_demo: seed.is_multiple_of(DEMO), is_wrong: false };
        let tally = runtime.block_on(fly_all(from, rounds, server));
        println!("chaos: rounds={rounds} {} in {:.1}s", tally.line(), start.elapsed().as_secs_f64());
        let is_well = tally.duplicates + tally.lost + tally.unreported + tally.lies + tally.late == 0;
        // That nothing went wrong proves something only if enough did.
        let happened = rounds < 100
            || (tally.unknown > 0
                && tally.replayed > 0
                && tally.landed > tally.writes / 4
                && tally.killed > 0
                && tally.stopped > 0
                && tally.cut_off > 0
                && tally.demo > 0
                && tally.demo_replayed > 0);
        if is_well && happened && are_found { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }

    async fn fly_all(from: u64, rounds: u64, server: impl Fn(u64) -> Server) -> Tally {
        let mut tally = Tally::default();
        let mut worlds = JoinSet::new();
        for round in 0..rounds {
            if worlds.len() >= WORLDS
                && let Some(flown) = worlds.join_next().await
            {
                tally.add(&flown.expect("a round does not panic"));
            }
            let seed = from.wrapping_add(round);
            worlds.spawn(fly(seed, server(seed)));
        }
        while let Some(flown) = worlds.join_next().await {
            tally.add(&flown.expect("a round does not panic"));
        }
        tally
    }

    async fn fly(seed: u64, server: Server) -> Tally {
        let folder = tempfile::tempdir().expect("a folder");
        let mut random = Rng::with_seed(seed);
        let mischief = tokio::spawn(disturb(folder.path().to_owned(), random.fork()));
        let mut tally = Tally { demo: u64::from(server.is_demo), ..Tally::default() };
        for client in 0..CLIENTS {
            let killed = tally.killed;
            // Each has calls of its own.
            live(folder.path(), seed, 1 + client * CALLS, server, &mut random, &mut tally).await;
            if tally.killed == killed {
                break;
            }
        }
        mischief.abort();
        let _ = mischief.await;
        end_servers(folder.path()).await;
        if server.is_wrong {
            sleep(2 * LATE).await;
        }
        judge(folder.path(), seed, server.is_wrong, &mut tally);
        if server.is_demo {
            (tally.demo_writes, tally.demo_replayed) = (tally.writes, tally.replayed);
        }
        tally
    }

    /// A client's life: it is stopped now and then, and perhaps killed.
    async fn live(folder: &Path, seed: u64, first: u64, server: Server, random: &mut Rng, tally: &mut Tally) {
        let mut command = Command::new(std::env::current_exe().expect("this program"));
        command
            .env("GOAROUND_CHAOS_CLIENT", folder)
            .env("GOAROUND_SEED", seed.to_string())
            .env("GOAROUND_CHAOS_FIRST", first.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .kill_on_drop(true);
        if server.is_demo {
            command.env("GOAROUND_CHAOS_DEMO", "1");
        }
        if server.is_wrong {
            command.env("GOAROUND_CHAOS_WRONG", "1");
        }
        let mut client = command.spawn().expect("a client");
        let pid = client.id().and_then(|pid| Pid::from_raw(pid as i32)).expect("a process");
        // `wait` would close it, and the client end.
        let stdin = client.stdin.take();
        tally.clients += 1;
        let start = Instant::now();
        let dies_after = (random.u32(0..100) < 40).then(|| Duration::from_millis(random.u64(30..1_500)));
        let is_due = || dies_after.is_some_and(|after| start.elapsed() >= after);
        loop {
            if let Ok(ended) = timeout(Duration::from_millis(random.u64(10..300)), client.wait()).await {
                let status = ended.expect("a client that can be waited for");
                assert!(status.success(), "chaos: seed {seed}, the client from {first} ended with {status}");
                break;
            }
            if !is_due() && random.u32(0..100) < 40 {
                tally.stopped += u64::from(kill_process(pid, Signal::STOP).is_ok());
                sleep(Duration::from_millis(random.u64(0..600))).await;
                // Some are killed while they stand still.
                if !is_due() {
                    let _ = kill_process(pid, Signal::CONT);
                }
            }
            let hangs = start.elapsed() > PATIENCE;
            if is_due() || hangs {
                client.kill().await.expect("a client that can be killed");
                tally.killed += u64::from(!hangs);
                tally.late += u64::from(hangs);
                break;
            }
        }
        drop(stdin);
    }

    /// What clients were told, against what is there.
    fn judge(folder: &Path, seed: u64, is_wrong: bool, tally: &mut Tally) {
        #[derive(Default)]
        struct Call<'a> {
            is_write: bool,
            doubts: u64,
            replayed: bool,
            outcome: Option<&'a str>,
            is_late: bool,
        }
        let said = std::fs::read_to_string(folder.join("told")).unwrap_or_default();
        let mut calls = BTreeMap::<u64, Call<'_>>::new();
        for line in said.lines() {
            let words: Vec<&str> = line.split(' ').collect();
            let call = calls.entry(words[1].parse().expect("a token")).or_default();
            match words[..] {
                ["begun", _, method] => call.is_write = method == "put",
                ["doubt", _, replayed] => {
                    call.doubts += 1;
                    call.replayed |= replayed == "true";
                }
                ["told", _, outcome, late] => (call.outcome, call.is_late) = (Some(outcome), late == "true"),
                _ => panic!("{line}"),
            }
        }
        for (token, call) in calls {
            tally.late += u64::from(call.is_late);
            tally.cut_off += u64::from(call.outcome.is_none());
            if !call.is_write {
                tally.reads += 1;
                tally.lies +=
                    u64::from(!matches!(call.outcome, None | Some("ok" | "no_answer" | "not_done")));
                continue;
            }
            let effects = count(folder, token);
            tally.writes += 1;
            tally.landed += u64::from(effects > 0);
            tally.duplicates += u64::from(effects > 1);
            tally.replayed += u64::from(call.replayed);
            tally.unknown += u64::from(call.outcome == Some("unknown"));
            match call.outcome {
                Some("ok" | "result_lost") => tally.lost += u64::from(effects == 0),
                Some("not_done") => tally.lies += u64::from(effects > 0),
                None | Some("unknown") => {}
                Some(_) => tally.lies += 1,
            }
            let must = matches!(call.outcome, Some("unknown" | "result_lost"));
            tally.unreported += u64::from(call.doubts > 1 || (must && call.doubts == 0));
            if !is_wrong && (effects > 1 || (call.outcome == Some("not_done") && effects > 0)) {
                println!("chaos: seed {seed}, write {token}: {effects} effects, told {:?}", call.outcome);
            }
        }
    }

    // ===== Servers =====

    fn servers(folder: &Path) -> Vec<Pid> {
        let pids = std::fs::read_to_string(folder.join("pids")).unwrap_or_default();
        let journal = std::fs::read_to_string(demo::journal_of(folder)).unwrap_or_default();
        let of_demo = journal.lines().filter_map(|line| line.strip_prefix("start "));
        let pids = pids.lines().chain(of_demo).filter_map(|pid| Pid::from_raw(pid.parse().ok()?));
        // Not whoever has its number now.
        let exe = std::env::current_exe().ok();
        let is_ours = |pid: &Pid| {
            let has = |variable: &str| {
                let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
                environment.split(|byte| *byte == 0).any(|set| {
                    set.strip_prefix(variable.as_bytes()) == Some(folder.as_os_str().as_encoded_bytes())
                })
            };
            std::fs::read_link(format!("/proc/{pid}/exe")).ok() == exe && has("GOAROUND_CHAOS_SERVER=")
        };
        pids.filter(is_ours).collect()
    }

    /// Waits until nobody is left who could write: a killed client's server ends when its input does, but not as long
    /// as it is stopped.
    async fn end_servers(folder: &Path) {
        let start = Instant::now();
        // One that has just been started has not said yet that it is there.
        sleep(Duration::from_millis(50)).await;
        loop {
            let left = servers(folder);
            if left.is_empty() {
                return;
            }
            let signal = if start.elapsed() < PATIENCE { Signal::CONT } else { Signal::KILL };
            for pid in left {
                let _ = kill_process(pid, signal);
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Kills, stops and continues the server that runs.
    async fn disturb(folder: PathBuf, mut random: Rng) {
        loop {
            sleep(Duration::from_millis(random.u64(20..700))).await;
            let Some(pid) = servers(&folder).pop() else { continue };
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
