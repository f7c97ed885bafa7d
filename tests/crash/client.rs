//! The client's processes: one that writes until it is killed, and one that settles what that has left.

use std::{
    collections::BTreeMap,
    io::{self, Write},
    process::ExitCode,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Effect, InDoubt, Stack, Verdict, WriteSafetyLayer,
    jsonrpc::{Request, Response},
    stdio,
    write_safety::{
        Resolve,
        ledger::{DurableLedger, Entry, EntryId, Ledger, LedgerError, ServerProcess, State, servers_gone},
    },
};
use serde_json::{Value, json};
use tokio::process::Command;

use crate::Plan;

/// How many writes a client makes.
pub(crate) const WRITES: u32 = 500;
/// How many at once.
const AT_ONCE: usize = 16;
/// The exit status of one that finds the ledger in use.
pub(crate) const IN_USE: u8 = 3;

/// Tells whoever started this process; by one write, so that no line is told in part.
fn say(line: impl std::fmt::Display) {
    let mut output = io::stdout().lock();
    let _ = output.write_all(format!("{line}\n").as_bytes()).and_then(|()| output.flush());
}

// ===== A ledger that tells =====

/// A durable ledger that tells of each step. What it has not told when it is killed has not happened, or just so.
struct Witness(DurableLedger);

impl Ledger for Witness {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        let (id, token) = (entry.id, token_of(&entry));
        let revision = self.0.enter(entry).await?;
        say(format_args!("entered {id} {token}"));
        Ok(revision)
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        tell_of(id, &state);
        self.0.settle(id, revision, state).await
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let revision = self.0.claim(id, revision).await?;
        say(format_args!("claimed {id}"));
        Ok(revision)
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        self.0.in_doubt().await
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        self.0.forget(id, by).await
    }

    fn abandon(&self, id: EntryId, state: State) {
        tell_of(id, &state);
        self.0.abandon(id, state);
    }

    async fn started(&self, server: ServerProcess) -> Result<(), LedgerError> {
        self.0.started(server).await
    }
}

/// Before it is done: it may be done from here on.
fn tell_of(id: EntryId, state: &State) {
    say(format_args!("{} {id}", if state.is_closed() { "closing" } else { "doubting" }));
}

// ===== The stack =====

pub(crate) fn put(token: &str, account: Option<u32>) -> Result<Request, serde_json::Error> {
    Request::new("put", json!({ "token": token, "account": account }))
}

fn token_of(entry: &Entry) -> String {
    let params: Value = entry.arguments.as_deref().map_or(Ok(Value::Null), serde_json::from_str).unwrap();
    params["token"].as_str().expect("each write has a token").to_owned()
}

/// The request that an entry is about.
pub(crate) fn request_of(entry: &Entry) -> Result<Request, BoxError> {
    let params: Value = serde_json::from_str(entry.arguments.as_deref().ok_or("no arguments were kept")?)?;
    Ok(Request::new(entry.method.clone(), params)?)
}

/// The effect check: each write has a token of its own.
pub(crate) async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
    let params: Value = doubt.request().params()?;
    let found: Value =
        doubt.probe(Request::new("find", json!({ "token": params["token"] }))?).await?.parse()?;
    Ok(if found["found"].as_u64().ok_or("no count")? > 0 {
        doubt.landed_without_result()
    } else {
        doubt.not_landed()
    })
}

/// The server that this executable is.
pub(crate) fn command(plan: &Plan) -> Result<Command, BoxError> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg("--serve").arg(serde_json::to_string(plan)?);
    Ok(command)
}

pub(crate) fn writes(ledger: impl Ledger) -> WriteSafetyLayer<Request, Response> {
    WriteSafetyLayer::new(check)
        .ledger(ledger)
        .independent_writes()
        .conflict_key(|request: &Request| request.params::<Value>().ok()?["account"].as_u64())
        .keep_arguments(|request: &Request| Some(request.raw_params()?.get().to_owned()))
}

pub(crate) fn effect(request: &Request) -> Option<Effect> {
    (request.method() == "find").then_some(Effect::ReadOnly)
}

pub(crate) fn stack(plan: &Plan, ledger: impl Ledger) -> Result<stdio::Client, BoxError> {
    let mut child =
        stdio::child(command(plan)?).shutdown_grace(Duration::from_secs(5), Duration::from_secs(1));
    if plan.declared {
        child = child.exit_ends_effects();
    }
    let stack = Stack::builder(child).deadline(Duration::from_secs(30)).classify(effect);
    Ok(stack.writes(writes(ledger)).build()?)
}

/// Opens the ledger, or says why it cannot be.
fn open(plan: &Plan) -> Result<DurableLedger, ExitCode> {
    DurableLedger::open(plan.file("ledger")).map_err(|error| {
        say(format_args!("cannot open: {error}"));
        match error {
            LedgerError::InUse => ExitCode::from(IN_USE),
            _ => ExitCode::FAILURE,
        }
    })
}

// ===== The processes =====

/// Writes, several at once, and tells of each; then waits to be killed.
pub(crate) async fn write_all(plan: Plan) -> Result<ExitCode, BoxError> {
    end_with_the_runner();
    let ledger = match open(&plan) {
        Ok(ledger) => ledger,
        Err(code) => return Ok(code),
    };
    let stack = stack(&plan, Witness(ledger))?;
    let next = Arc::<AtomicU32>::default();
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..AT_ONCE {
        let (stack, next) = (stack.clone(), Arc::clone(&next));
        tasks.spawn(async move {
            loop {
                let n = next.fetch_add(1, Ordering::SeqCst);
                if n >= WRITES {
                    return Ok::<_, BoxError>(());
                }
                let token = format!("w{n}");
                // A quarter of them on ten accounts.
                let account = (n % 4 == 0).then_some(n % 40);
                tell(&token, stack.send(put(&token, account)?).await);
            }
        });
    }
    while let Some(task) = tasks.join_next().await {
        task??;
    }
    say("finished");
    std::future::pending().await
}

fn tell(token: &str, result: Result<Response, CallError>) {
    match result {
        Ok(_) => say(format_args!("done {token}")),
        Err(error) => say(format_args!("{:?} {token} {error}", error.outcome())),
    }
}

/// One write on each of two stacks with one ledger; neither server answers before this process is gone.
pub(crate) async fn write_on_two(plans: [Plan; 2]) -> Result<ExitCode, BoxError> {
    end_with_the_runner();
    let ledger = DurableLedger::open(plans[0].file("ledger"))?;
    let stacks = [stack(&plans[0], ledger.clone())?, stack(&plans[1], ledger)?];
    let (first, second) = tokio::join!(
        stacks[0].send(put("first", Some(1))?.within(Duration::from_secs(600))),
        stacks[1].send(put("second", Some(2))?.within(Duration::from_secs(600)))
    );
    Err(format!("it was to be killed: {first:?}, {second:?}").into())
}

/// Settles what is in doubt.
pub(crate) async fn recover(plan: Plan) -> Result<ExitCode, BoxError> {
    end_with_the_runner();
    let ledger = match open(&plan) {
        Ok(ledger) => ledger,
        Err(code) => return Ok(code),
    };
    let entries = ledger.in_doubt().await?;
    let mut keys = BTreeMap::new();
    for entry in &entries {
        let servers: Vec<_> = entry.servers.iter().map(|server| server.pid.to_string()).collect();
        let (token, servers) = (token_of(entry), servers.join(","));
        say(format_args!("listed {token} {} [{servers}]", entry.attempts));
        keys.extend(entry.key.clone().map(|key| (key, token)));
    }
    servers_gone(&entries, Duration::from_secs(10)).await;

    let stack = stack(&plan, Witness(ledger.clone()))?;
    for entry in &entries {
        let token = token_of(entry);
        let told = token.clone();
        let telling = move |doubt: InDoubt<Request, Response>| {
            let token = told.clone();
            async move {
                let verdict = check(doubt).await?;
                say(format_args!("verdict {token} {:?}", verdict.kind()));
                Ok(verdict)
            }
        };
        let mut resolve = Resolve::new(&ledger, entry, request_of(entry)?).within(Duration::from_secs(20));
        if let Some(quarantine) = plan.quarantine {
            resolve = resolve.quarantine(quarantine);
        }
        let resolved = resolve.run(telling, &stack).await?;
        say(format_args!("resolved {token} {:?} {:?}", resolved.verdict, resolved.state));
    }
    // What was in doubt no longer is, so that its key is free.
    for key in keys.keys().filter(|_| plan.declared) {
        let token = format!("after-{key}-{}", std::process::id());
        tell(&token, stack.send(put(&token, Some(key.parse()?))?).await);
    }
    stack.shutdown(Duration::from_secs(5)).await;
    say(format_args!("left {}", ledger.in_doubt().await?.len()));
    Ok(ExitCode::SUCCESS)
}

/// Whoever started this process holds its standard input: nothing is left behind if that one is killed.
fn end_with_the_runner() {
    std::thread::spawn(|| {
        let _ = io::copy(&mut io::stdin(), &mut io::sink());
        std::process::exit(1);
    });
}
