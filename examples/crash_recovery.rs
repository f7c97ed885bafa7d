//! A client that is killed by SIGKILL between send and reply, and what the next run makes of that.
//!
//! `cargo run --example crash_recovery --features ledger-durable`
//!
//! This executable is all the processes: the parent, which kills and counts; the client, whose ledger is in a file;
//! the client's server, a child process that appends each invoice to a file; and the next run, which opens the ledger
//! again. Seven clients die, each at another point. Then one run settles what they left, sends again what did not
//! land, and the parent compares that with the server's file. The exit status is 1 if something is wrong.

#[cfg(unix)]
fn main() -> std::process::ExitCode {
    unix::main()
}

#[cfg(not(unix))]
fn main() {
    eprintln!("crash_recovery: it kills its client by SIGKILL and needs Unix");
}

#[cfg(unix)]
mod unix {
    use std::{
        env,
        fs::{self, OpenOptions},
        io::{self, Write},
        os::unix::process::{ExitStatusExt, parent_id},
        path::{Path, PathBuf},
        process::{self, ExitCode, Stdio},
        sync::{Arc, Mutex},
        thread,
        time::{Duration, Instant},
    };

    use goaround::{
        BoxError, Effect, Event, Fence, InDoubt, Stack, Verdict, VerdictKind, WriteSafetyLayer,
        jsonrpc::{Request, Response},
        stdio,
        write_safety::{
            Resolve,
            ledger::{
                DurableLedger, Entry, EntryId, Ledger, LedgerError, ServerProcess, State, servers_gone,
            },
        },
    };
    use rustix::process::{Pid, Signal, getpid, kill_process};
    use serde::{Deserialize, Serialize};
    use serde_json::{Value, json};

    // ===== When the client dies =====

    #[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
    enum Death {
        /// It is entered in the ledger; there is no server yet.
        BeforeTheServerStarts,
        /// It is entered in the ledger; not a byte of it has been sent.
        BeforeTheSend,
        BeforeTheCommit,
        AfterTheCommit,
        /// The answer is here, and the ledger has yet to be told.
        BeforeTheRecord,
        /// The server died of it; the check found nothing, and the one replay is claimed.
        BeforeTheReplay,
        /// The server goes on, and commits 300 ms later.
        WhileTheServerWorks,
    }

    use Death::*;

    /// The one whose server goes on is the last, so that the next run meets that server.
    const DEATHS: [(Death, &str, bool); 7] = [
        (BeforeTheServerStarts, "before the server was started", false),
        (BeforeTheSend, "before the send", false),
        (BeforeTheCommit, "before the server committed", false),
        (AfterTheCommit, "after it had committed, reply lost", true),
        (BeforeTheRecord, "reply received, not yet recorded", true),
        (BeforeTheReplay, "before the replay that was claimed", false),
        (WhileTheServerWorks, "before the commit; the server goes on", true),
    ];

    pub(super) fn main() -> ExitCode {
        let arguments: Vec<String> = env::args().skip(1).collect();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let done = match words.as_slice() {
            [] => parent(),
            ["--serve", folder] => serve(folder.as_ref()).map(|()| true).map_err(Into::into),
            ["--client", folder, death] => client(folder.as_ref(), death).map(|()| false),
            ["--next-run", folder] => next_run(folder.as_ref()).map(|()| true),
            _ => Err("it takes no arguments".into()),
        };
        match done {
            Ok(true) => ExitCode::SUCCESS,
            Ok(false) => ExitCode::FAILURE,
            Err(error) => {
                eprintln!("crash_recovery: {error}");
                ExitCode::FAILURE
            }
        }
    }

    #[tokio::main(flavor = "current_thread")]
    async fn client(folder: &Path, death: &str) -> Result<(), BoxError> {
        write_until_killed(folder, serde_json::from_str(death)?).await
    }

    #[tokio::main(flavor = "current_thread")]
    async fn next_run(folder: &Path) -> Result<(), BoxError> {
        settle_what_is_left(folder).await
    }

    fn die() {
        let _ = kill_process(getpid(), Signal::KILL);
    }

    // ===== The stack: what a program has to say =====

    fn ledger_of(folder: &Path) -> PathBuf {
        folder.join("writes.ledger")
    }

    fn stack(folder: &Path, ledger: impl Ledger) -> Result<stdio::Client, BoxError> {
        let mut command = tokio::process::Command::new(env::current_exe()?);
        command.arg("--serve").arg(folder);
        // True of this server: it writes its file itself, so that once it is gone nothing more can land.
        let server = stdio::child(command)
            .exit_ends_effects()
            .shutdown_grace(Duration::from_secs(2), Duration::from_secs(2));
        let writes = WriteSafetyLayer::new(check)
            .ledger(ledger)
            // So that the next run can make the request again and ask the check. Arguments may hold secrets.
            .keep_arguments(|request: &Request| Some(request.raw_params()?.get().to_owned()));
        Ok(Stack::builder(server).classify(effect).writes(writes).build()?)
    }

    fn effect(request: &Request) -> Option<Effect> {
        (request.method() == "invoice/list").then_some(Effect::ReadOnly)
    }

    /// The token is drawn by the caller, and carried by this one write.
    async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
        if doubt.request().method() != "invoice/create" {
            return Ok(doubt.unknown("no check for this method"));
        }
        let wanted: Value = doubt.request().params()?;
        let invoices: Vec<String> = doubt.probe(Request::new("invoice/list", ())?).await?.parse()?;
        Ok(if invoices.iter().any(|token| wanted["token"] == **token) {
            doubt.landed_without_result()
        } else {
            doubt.not_landed() // by the fence that holds; without one this is "unknown"
        })
    }

    // ===== The next run: this is what belongs at the start of a program with a durable ledger =====

    /// What the next run tells the parent: a line of JSON for each entry.
    #[derive(Serialize, Deserialize)]
    struct Found {
        token: String,
        attempts: u32,
        settled: String,
        fence: String,
        landed: Option<bool>,
        sent_again: bool,
        after: Duration,
    }

    async fn settle_what_is_left(folder: &Path) -> Result<(), BoxError> {
        let start = Instant::now();
        // A second process gets an error here.
        let ledger = DurableLedger::open(ledger_of(folder))?;
        let entries = ledger.in_doubt().await?;
        // No new server beside an old one.
        servers_gone(&entries, Duration::from_secs(30)).await;
        let invoices = stack(folder, ledger.clone())?;
        for entry in &entries {
            let params: Value = serde_json::from_str(entry.arguments.as_deref().ok_or("nothing was kept")?)?;
            let request = Request::new(entry.method.clone(), params.clone())?;
            let fence = Arc::<Mutex<String>>::default();
            let told = Arc::clone(&fence);
            let resolved = Resolve::new(&ledger, entry, request.clone())
                // True of this server too, and all that there is where the system does not tell of processes.
                .quarantine(Duration::from_secs(5))
                .on_event(move |event| {
                    if let (Event::InDoubt(report), Ok(mut told)) = (event, told.lock()) {
                        *told = report.fence.as_ref().map(name_of).unwrap_or_default();
                    }
                })
                .run(check, &invoices)
                .await?;
            // What is not landed, and never will be, is free to be sent again, as a new write.
            let sent_again = matches!(resolved.state, State::NotLanded { .. });
            if sent_again {
                invoices.send(request).await?;
            }
            let found = Found {
                token: params["token"].as_str().unwrap_or_default().to_owned(),
                attempts: entry.attempts,
                settled: match &resolved.state {
                    State::Landed { .. } => "landed".to_owned(),
                    State::NotLanded { .. } => "not landed".to_owned(),
                    state => format!("{state:?}"),
                },
                fence: fence.lock().map(|fence| fence.clone()).unwrap_or_default(),
                landed: match resolved.verdict {
                    VerdictKind::Landed => Some(true),
                    VerdictKind::NotLanded => Some(false),
                    _ => None,
                },
                sent_again,
                after: start.elapsed(),
            };
            println!("{}", serde_json::to_string(&found)?);
        }
        invoices.shutdown(Duration::from_secs(5)).await;
        Ok(())
    }

    /// As it stands in reports.
    fn name_of(fence: &Fence) -> String {
        let fence = serde_json::to_value(fence).unwrap_or_default();
        let word = |of: &str| fence[of].as_str().unwrap_or_default().to_owned();
        format!("{} ({})", word("fence"), word("basis"))
    }

    // ===== The parent =====

    fn parent() -> Result<bool, BoxError> {
        let folder = tempfile::Builder::new().prefix("goaround-crash-").tempdir()?;
        let mut wrong = Vec::new();
        for (death, ..) in DEATHS {
            let death = serde_json::to_string(&death)?;
            let client = start(&["--client".as_ref(), folder.path(), death.as_ref()])?;
            if client.status.signal() != Some(9) {
                wrong.push(format!("the client was to be killed, and ended with {}", client.status));
            }
            // It was told that this one is done.
            if String::from_utf8(client.stdout)?.trim() != format!("done: {}", first_of(&death)) {
                wrong.push(format!("{death}: the write before is not done"));
            }
        }
        let next = start(&["--next-run".as_ref(), folder.path()])?;
        if !next.status.success() {
            wrong.push(format!("the next run ended with {}", next.status));
        }
        let found = String::from_utf8(next.stdout)?;
        let found: Vec<Found> = found.lines().map(serde_json::from_str).collect::<Result<_, _>>()?;
        wrong.extend(compare(folder.path(), &found)?);
        for what in &wrong {
            println!("WRONG: {what}");
        }
        Ok(wrong.is_empty())
    }

    fn start(arguments: &[&Path]) -> Result<process::Output, BoxError> {
        let mut command = process::Command::new(env::current_exe()?);
        // The output ends with the client: its server has pipes of its own.
        Ok(command.args(arguments).stdin(Stdio::null()).stderr(Stdio::inherit()).output()?)
    }

    /// Prints what was found, and says what of it is wrong.
    fn compare(folder: &Path, found: &[Found]) -> Result<Vec<String>, BoxError> {
        let mut wrong = Vec::new();
        let invoices = invoices(folder)?;
        let times = |token: &str| invoices.iter().filter(|invoice| *invoice == token).count();
        println!(
            "{:38}  attempts  {:10}  {:7}  {:23}  {:10}  in the file",
            "the client was killed …", "settled as", "after", "fence", "sent again"
        );
        for (death, when, landed) in DEATHS {
            let death = serde_json::to_string(&death)?;
            let token = second_of(&death);
            let Some(found) = found.iter().find(|found| found.token == token) else {
                wrong.push(format!("{death} was not in doubt"));
                continue;
            };
            println!(
                "{when:38}  {:>8}  {:10}  {:>4} ms  {:23}  {:10}  {} time",
                found.attempts,
                found.settled,
                found.after.as_millis(),
                found.fence,
                if found.sent_again { "yes" } else { "no" },
                times(&token)
            );
            if found.landed != Some(landed) {
                wrong.push(format!("{death} is settled as {}", found.settled));
            }
            for token in [token, first_of(&death)] {
                if times(&token) != 1 {
                    wrong.push(format!("{token} is {} times in the file", times(&token)));
                }
            }
        }
        if found.len() != DEATHS.len() {
            wrong.push(format!("{} entries in doubt, and not {}", found.len(), DEATHS.len()));
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let left = runtime.block_on(DurableLedger::open(ledger_of(folder))?.in_doubt())?.len();
        if left > 0 {
            wrong.push(format!("{left} entries are still in doubt"));
        }
        println!("{} writes, {} of them in doubt, {left} left", invoices.len(), found.len());
        Ok(wrong)
    }

    // ===== The client that dies =====

    fn first_of(death: &str) -> String {
        format!("{}-1", death.trim_matches('"'))
    }

    fn second_of(death: &str) -> String {
        format!("{}-2", death.trim_matches('"'))
    }

    async fn write_until_killed(folder: &Path, death: Death) -> Result<(), BoxError> {
        let name = serde_json::to_string(&death)?;
        let ledger = DurableLedger::open(ledger_of(folder))?;
        let create = |token: String, fault: Option<Death>| {
            Request::new("invoice/create", json!({ "token": token, "fault": fault }))
        };
        // One that is answered, and so not in doubt. The next one goes over a stack of its own.
        let first = stack(folder, ledger.clone())?;
        first.send(create(first_of(&name), None)?).await?;
        println!("done: {}", first_of(&name));
        first.shutdown(Duration::from_secs(5)).await;

        let invoices = stack(folder, Deadly { ledger, death })?;
        if death != BeforeTheServerStarts {
            invoices.send(Request::new("invoice/list", ())?).await?; // it is connected
        }
        let sent = invoices.send(create(second_of(&name), Some(death))?).await;
        Err(format!("the client should be dead: {sent:?}").into())
    }

    /// A ledger at some of whose steps the process is killed.
    struct Deadly {
        ledger: DurableLedger,
        death: Death,
    }

    impl Ledger for Deadly {
        async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
            let revision = self.ledger.enter(entry).await?;
            if matches!(self.death, BeforeTheServerStarts | BeforeTheSend) {
                die();
            }
            Ok(revision)
        }

        async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
            if self.death == BeforeTheRecord {
                die();
            }
            self.ledger.settle(id, revision, state).await
        }

        async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
            let revision = self.ledger.claim(id, revision).await?;
            if self.death == BeforeTheReplay {
                die();
            }
            Ok(revision)
        }

        async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
            self.ledger.in_doubt().await
        }

        async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
            self.ledger.forget(id, by).await
        }

        fn abandon(&self, id: EntryId, state: State) {
            self.ledger.abandon(id, state);
        }

        async fn started(&self, server: ServerProcess) -> Result<(), LedgerError> {
            self.ledger.started(server).await
        }
    }

    // ===== The server =====

    /// Serves until the standard input ends. It kills its client, its parent, where a request says so.
    fn serve(folder: &Path) -> io::Result<()> {
        for line in io::stdin().lines() {
            let message: Value = serde_json::from_str(&line?)?;
            let Some(id) = message.get("id") else { continue };
            let params = &message["params"];
            let result = match message["method"].as_str() {
                Some("invoice/list") => json!(invoices(folder)?),
                Some("invoice/create") => {
                    let fault = Option::<Death>::deserialize(&params["fault"]).ok().flatten();
                    create(folder, params["token"].as_str().unwrap_or_default(), fault)?;
                    json!(null)
                }
                _ => json!("what?"),
            };
            let mut output = io::stdout();
            writeln!(output, "{}", json!({ "jsonrpc": "2.0", "id": id, "result": result }))?;
            output.flush()?;
        }
        Ok(())
    }

    fn create(folder: &Path, token: &str, fault: Option<Death>) -> io::Result<()> {
        let first_time = fs::File::create_new(folder.join(format!("{token} came"))).is_ok();
        let fault = fault.filter(|_| first_time);
        match fault {
            Some(BeforeTheReplay) => process::exit(3),
            Some(BeforeTheCommit | WhileTheServerWorks) => kill_client(),
            _ => {}
        }
        if fault == Some(BeforeTheCommit) {
            process::exit(0);
        }
        if fault == Some(WhileTheServerWorks) {
            thread::sleep(Duration::from_millis(300));
        }
        let mut file = OpenOptions::new().append(true).create(true).open(folder.join("invoices"))?;
        file.write_all(format!("{token}\n").as_bytes())?;
        if fault == Some(AfterTheCommit) {
            kill_client();
            process::exit(0);
        }
        Ok(())
    }

    fn invoices(folder: &Path) -> io::Result<Vec<String>> {
        match fs::read_to_string(folder.join("invoices")) {
            Ok(text) => Ok(text.lines().map(str::to_owned).collect()),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    }

    /// Kills the client, and sees it die.
    fn kill_client() {
        let client = parent_id();
        if let Some(pid) = i32::try_from(client).ok().and_then(Pid::from_raw) {
            let _ = kill_process(pid, Signal::KILL);
        }
        while parent_id() == client {
            thread::sleep(Duration::from_millis(1));
        }
    }
}
