//! The rounds: a client is killed at a random moment of its 500 writes, what it left is settled by the next process,
//! and then what each of them said is compared with the server's file.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt,
    io::{BufRead, BufReader},
    os::unix::process::ExitStatusExt,
    process::{Child, ChildStdin, Command, ExitStatus, Stdio},
    sync::mpsc::{self, Receiver, RecvTimeoutError},
    thread,
    time::{Duration, Instant},
};

use goaround::BoxError;
use rustix::process::{Pid, Signal, kill_process_group};

use crate::{
    Plan,
    client::{IN_USE, WRITES},
    server::Ending,
};

/// Longer than anything takes that does not hang.
const PATIENCE: Duration = Duration::from_secs(120);

/// How a round goes.
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    ending: Ending,
    /// How many servers die before.
    deaths: u32,
    /// Whether the server is killed together with its client.
    with_server: bool,
    /// Whether the process that settles is killed too.
    again: bool,
    /// Whether another one tries to open the ledger before.
    second: bool,
    declared: bool,
    /// Whether the declaration is false, so that the harness must find what follows.
    wrong: bool,
}

const PLAIN: Kind = Kind {
    name: "the_client_is_killed",
    ending: Ending::AtOnce,
    deaths: 2,
    with_server: false,
    again: false,
    second: false,
    declared: true,
    wrong: false,
};

pub(crate) const KINDS: &[Kind] = &[
    PLAIN,
    Kind { name: "the_server_is_killed_with_its_client", with_server: true, ..PLAIN },
    Kind { name: "the_server_lives_on_and_commits_later", ending: Ending::LivesOn, deaths: 1, ..PLAIN },
    Kind { name: "the_next_client_is_killed_too", ending: Ending::LivesOn, again: true, ..PLAIN },
    Kind { name: "a_second_process_opens_the_ledger", second: true, ..PLAIN },
    Kind { name: "nobody_declares_that_the_exit_ends_the_effects", declared: false, ..PLAIN },
    Kind {
        name: "somebody_declares_it_and_it_is_false",
        ending: Ending::HandsOn,
        deaths: 0,
        wrong: true,
        ..PLAIN
    },
];

/// What happened in all rounds of a kind.
#[derive(Default)]
pub(crate) struct Count {
    rounds: u64,
    entered: usize,
    done: usize,
    claimed: usize,
    listed: usize,
    landed: usize,
    not_landed: usize,
    unknown: usize,
    never_sent: usize,
    wrong: usize,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rounds, entered, done, claimed, listed, landed, not_landed, unknown, never_sent, wrong } =
            self;
        write!(
            f,
            "rounds={rounds} entered={entered} done={done} claimed={claimed} listed={listed} landed={landed} \
             not_landed={not_landed} (never_sent={never_sent}) unknown={unknown} wrong={wrong}"
        )
    }
}

pub(crate) fn run(kind: &Kind, rounds: u64, seed: u64) -> Result<Count, BoxError> {
    let mut count = Count::default();
    for round in 0..rounds {
        let seed = seed.wrapping_add(round);
        let wrong = fly(kind, seed, &mut count).map_err(|error| format!("seed {seed}: {error}"))?;
        count.rounds += 1;
        count.wrong += wrong.len();
        if !kind.wrong && !wrong.is_empty() {
            return Err(format!("seed {seed}, {count}:\n  {}", wrong.join("\n  ")).into());
        }
    }
    if rounds > 0 && count.listed == 0 {
        return Err(format!("nothing was in doubt, so that nothing was tested: {count}").into());
    }
    if kind.wrong && rounds > 0 && count.wrong == 0 {
        return Err(format!("the declaration was false, and nothing was found: {count}").into());
    }
    Ok(count)
}

/// One round; what is wrong.
fn fly(kind: &Kind, seed: u64, count: &mut Count) -> Result<Vec<String>, BoxError> {
    // Other moments for each kind.
    let mut rng = fastrand::Rng::with_seed(
        kind.name.bytes().fold(seed, |seed, byte| seed.wrapping_mul(31).wrapping_add(u64::from(byte))),
    );
    let folder = tempfile::Builder::new().prefix("goaround-crash-").tempdir()?;
    let mut plan = Plan::new(folder.path(), seed, kind.ending);
    (plan.declared, plan.deaths) = (kind.declared, kind.deaths);

    // Each write is told of three times. The first are entered while there is no server yet.
    let (moment, pause) = match rng.u8(..5) {
        0 => (rng.usize(..16), 0),
        _ => (rng.usize(..WRITES as usize * 3), rng.u64(..2000)),
    };
    // Who shall find the ledger in use must not come before whoever has it, which the first line tells.
    let moment = if kind.second { moment.max(1) } else { moment };
    let mut client = Process::start("--write", &[&plan])?;
    client.read(|lines| lines.len() >= moment || lines.last().is_some_and(|line| line == "finished"))?;
    if kind.second {
        let (lines, status) = Process::start("--recover", &[&plan])?.end()?;
        if status.code() != Some(i32::from(IN_USE)) || !lines[0].contains("the ledger is open already") {
            return Err(format!("a second process got {status}: {lines:?}").into());
        }
    }
    thread::sleep(Duration::from_micros(pause));
    let server_first = kind.with_server && rng.bool();
    if server_first {
        kill_server(&plan);
    }
    let (written, status) = client.kill()?;
    if kind.with_server && !server_first {
        kill_server(&plan);
    }
    if status.signal() != Some(9) {
        return Err(
            format!("the client was to be killed, and ended with {status}: {:?}", written.last()).into()
        );
    }

    let mut settled = Vec::new();
    for _ in 0..if kind.again { 2 } else { 0 } {
        let moment = rng.usize(..60);
        let mut next = Process::start("--recover", &[&plan])?;
        next.read(|lines| lines.len() >= moment)?;
        thread::sleep(Duration::from_micros(rng.u64(..1000)));
        settled.extend(next.kill()?.0);
    }
    settled.extend(recover(&plan)?);
    if !kind.declared {
        let left = settled.last().cloned().unwrap_or_default();
        let unknown = settled.iter().filter(|line| line.starts_with("resolved") && line.contains("Unknown"));
        let unknown: Vec<_> = unknown.collect();
        let why = "exit_ends_effects() was not declared on the connector when its server was started";
        if left != format!("left {}", unknown.len()) || !unknown.iter().all(|line| line.contains(why)) {
            return Err(format!("without a declaration there was {left:?} and {unknown:?}").into());
        }
        count.unknown += unknown.len();
        settled.retain(|line| !line.contains("Unknown"));
        plan.quarantine = Some(Duration::from_secs(1));
        settled.extend(recover(&plan)?);
    }
    all_are_gone(&plan)?;
    Ok(judge(&plan, &written, &settled, count))
}

fn recover(plan: &Plan) -> Result<Vec<String>, BoxError> {
    let (lines, status) = Process::start("--recover", &[plan])?.end()?;
    match status.success() {
        true => Ok(lines),
        false => Err(format!("what settles ended with {status}: {lines:?}").into()),
    }
}

/// What the processes said, against what the server's file says.
fn judge(plan: &Plan, written: &[String], settled: &[String], count: &mut Count) -> Vec<String> {
    let mut wrong = Vec::new();
    let effects = plan.lines("effects");
    let mut times = BTreeMap::<&str, usize>::new();
    for token in &effects {
        *times.entry(token).or_default() += 1;
    }
    let applied = |token: &str| times.get(token).copied().unwrap_or(0);
    for (token, times) in &times {
        if *times > 1 {
            wrong.push(format!("{token} was applied {times} times"));
        }
    }

    // What was said of a token, or of an entry, by its first word.
    let of = |lines: &'_ [String], what: &str| -> Vec<Vec<String>> {
        let lines = lines.iter().filter_map(|line| line.strip_prefix(what)?.strip_prefix(' '));
        lines.map(|rest| rest.split(' ').map(str::to_owned).collect()).collect()
    };
    let tokens = |lines: &[String], what: &str| -> BTreeSet<String> {
        of(lines, what).into_iter().map(|mut words| words.swap_remove(0)).collect()
    };
    let all: Vec<String> = written.iter().chain(settled).cloned().collect();
    let entered: BTreeMap<String, String> =
        of(&all, "entered").into_iter().map(|words| (words[1].clone(), words[0].clone())).collect();
    let closing = tokens(&all, "closing");
    let is_closing = |token: &str| entered.get(token).is_some_and(|id| closing.contains(id));
    let listed = tokens(settled, "listed");
    let done = tokens(&all, "done");
    let lost = tokens(&all, "DoneResultLost");
    let mut resolved = BTreeMap::new();
    for words in of(settled, "resolved") {
        resolved.insert(words[0].clone(), words[1..].join(" "));
    }

    for token in done.iter().chain(&lost) {
        if applied(token) == 0 {
            wrong.push(format!("{token} was reported as done and is not there"));
        }
    }
    for token in tokens(&all, "NotDone") {
        if applied(&token) > 0 {
            wrong.push(format!("{token} was reported as not done and is there"));
        }
    }
    for token in tokens(&all, "Unknown") {
        if !listed.contains(&token) {
            wrong.push(format!("{token} was reported as unknown and is not listed"));
        }
    }
    for token in entered.keys() {
        if !is_closing(token) && !listed.contains(token) {
            wrong.push(format!("{token} was entered, was not settled, and is not listed"));
        }
    }
    for token in times.keys() {
        let known = done.contains(*token) || lost.contains(*token) || listed.contains(*token);
        if !known && !is_closing(token) {
            wrong.push(format!("{token} is there, and nobody was told"));
        }
    }
    let servers = plan.lines("pids");
    for words in of(settled, "listed") {
        let pids = words[2].trim_matches(['[', ']']);
        if let Some(stranger) =
            pids.split(',').find(|pid| !pid.is_empty() && !servers.iter().any(|own| own == pid))
        {
            wrong
                .push(format!("{} is said to have gone to {stranger}, which is no server of ours", words[0]));
        }
    }
    for token in &listed {
        match resolved.get(token).map(String::as_str) {
            Some(said) if said.starts_with("Landed") && applied(token) == 0 => {
                wrong.push(format!("{token} is said to have landed and is not there"));
            }
            Some(said) if said.starts_with("NotLanded") && applied(token) > 0 => {
                wrong.push(format!("{token} is said not to have landed and is there: {said}"));
            }
            Some(said) if said.starts_with("Landed") => count.landed += 1,
            Some(said) if said.starts_with("NotLanded") => {
                count.not_landed += 1;
                count.never_sent += usize::from(said.contains("no server had been started"));
            }
            Some(said) => wrong.push(format!("{token} is not settled: {said}")),
            // Settled right before the one that settles was killed.
            None if tokens(settled, "verdict").contains(token) => {}
            None => wrong.push(format!("{token} was listed and never settled")),
        }
    }
    if settled.last().map(String::as_str) != Some("left 0") {
        wrong.push(format!("something is left: {:?}", settled.last()));
    }

    count.entered += entered.len();
    count.done += done.len();
    count.claimed += of(&all, "claimed").len();
    count.listed += listed.len();
    wrong
}

// ===== Processes =====

/// A process of ours, and what it has said.
pub(crate) struct Process {
    child: Child,
    /// It ends when this does.
    _stdin: ChildStdin,
    lines: Vec<String>,
    incoming: Receiver<String>,
}

impl Process {
    pub(crate) fn start(mode: &str, plans: &[&Plan]) -> Result<Self, BoxError> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(mode);
        for plan in plans {
            command.arg(serde_json::to_string(plan)?);
        }
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        let (stdin, stdout) = (child.stdin.take(), child.stdout.take());
        let (send, incoming) = mpsc::channel();
        let stdout = BufReader::new(stdout.ok_or("no standard output")?);
        thread::spawn(move || {
            for line in stdout.lines().map_while(Result::ok) {
                let _ = send.send(line);
            }
        });
        let stdin = stdin.ok_or("no standard input")?;
        Ok(Self { child, _stdin: stdin, lines: Vec::new(), incoming })
    }

    /// Reads what it says until that holds, or it ends.
    fn read(&mut self, until: impl Fn(&[String]) -> bool) -> Result<(), BoxError> {
        while !until(&self.lines) {
            match self.incoming.recv_timeout(PATIENCE) {
                Ok(line) => self.lines.push(line),
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    self.child.kill()?;
                    return Err(format!("it hangs after {:?}", self.lines.last()).into());
                }
            }
        }
        Ok(())
    }

    /// Kills it, and gives what it said before.
    pub(crate) fn kill(mut self) -> Result<(Vec<String>, ExitStatus), BoxError> {
        self.child.kill()?;
        self.end()
    }

    pub(crate) fn end(mut self) -> Result<(Vec<String>, ExitStatus), BoxError> {
        self.read(|_| false)?;
        Ok((self.lines, self.child.wait()?))
    }
}

/// Kills the server that runs now, with its group.
fn kill_server(plan: &Plan) {
    let last = plan.lines("pids").last().and_then(|pid| Pid::from_raw(pid.parse().ok()?));
    if let Some(last) = last {
        let _ = kill_process_group(last, Signal::KILL);
    }
}

/// Waits until nobody is left who could write.
pub(crate) fn all_are_gone(plan: &Plan) -> Result<(), BoxError> {
    let start = Instant::now();
    while plan.lines("pids").iter().any(|pid| is_alive(pid)) {
        if start.elapsed() > PATIENCE {
            return Err("a server does not end".into());
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

pub(crate) fn is_alive(pid: &str) -> bool {
    let Ok(stat) = std::fs::read_to_string(format!("/proc/{pid}/stat")) else { return false };
    let fields: Vec<_> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
    // A process whose first thread has ended shows as a zombie while others run, with its pipes open.
    !(matches!(fields[0], "Z" | "X") && fields[17].parse::<u32>().is_ok_and(|threads| threads <= 1))
}
