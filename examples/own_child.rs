//! An own JSON-RPC server as a child process, with methods of all effects: reads, idempotent writes, writes.
//!
//! `cargo run --example own_child`
//!
//! The server is this same executable in another mode: a real process with real pipes. It keeps its documents
//! in a file, and dies at two of the writes, once before and once after it has done them.

use std::{
    env,
    fs::{self, OpenOptions},
    io::{self, BufRead, Write},
    path::{Path, PathBuf},
    process,
    time::Duration,
};

use goaround::{
    BoxError, Call, Effect, Event, InDoubt, Outcome, RetryReadOnly, Stack, Verdict, WriteSafetyLayer,
    jsonrpc::{Request, Response},
    stdio,
};
use serde_json::{Value, json};
use tokio::process::Command;

#[derive(serde::Deserialize)]
struct Doc {
    id: String,
    token: String,
}

/// What is not named here is a write.
fn effect(request: &Request) -> Option<Effect> {
    Some(match request.method() {
        "doc/get" | "doc/list" => Effect::ReadOnly,
        "doc/put" => Effect::Idempotent,
        _ => return None,
    })
}

/// Looks whether a write in doubt is there: every write carries a token of its own.
async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
    let wanted: Doc = doubt.request().params()?;
    let docs: Vec<Doc> = doubt.probe(Request::new("doc/list", json!({}))?).await?.parse()?;
    let found = docs.iter().any(|doc| doc.token == wanted.token);
    println!(
        "      check: {} documents, {} is {}there",
        docs.len(),
        wanted.id,
        if found { "" } else { "not " }
    );
    Ok(if found { doubt.landed_without_result() } else { doubt.not_landed() })
}

fn report(event: Event<'_>) {
    match event {
        Event::Incident(incident) => println!(
            "      event: {} at {:?}, {}",
            incident.error,
            incident.method,
            incident.exit.as_deref().unwrap_or("exit unknown")
        ),
        Event::Recovery(recovery) => println!("      event: recovered, by {:?}", recovery.proved_by),
        Event::InDoubt(doubt) => {
            println!("      event: {} was in doubt, replayed: {}", doubt.method, doubt.replayed);
        }
        _ => {}
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    if let Some(file) = env::args_os().nth(1) {
        return Ok(serve(Path::new(&file))?);
    }
    let folder = tempfile::tempdir()?;
    let mut command = Command::new(env::current_exe()?);
    command.arg(folder.path().join("docs"));

    let child = stdio::child(command).exit_ends_effects().handshake(|peer| async move {
        let hello = peer.request(Request::new("hello", json!({"client": "own_child"}))?).await?;
        println!("      handshake: {}", hello.raw());
        Ok(())
    });
    let docs: stdio::Client = Stack::builder(child)
        .deadline(Duration::from_secs(30))
        .classify(effect)
        .writes(
            WriteSafetyLayer::new(check)
                .attempt_timeout(Duration::from_secs(5))
                .quarantine(Duration::from_secs(2)),
        )
        .retry(RetryReadOnly)
        .on_event(report)
        .build()?;

    for (id, what) in [
        ("plain", "the server answers"),
        ("dies-after", "it writes the document, then dies"),
        ("dies-before", "it dies first"),
    ] {
        println!("doc/create {id}: {what}");
        let params = json!({"id": id, "token": format!("token-of-{id}")});
        let call = Request::new("doc/create", params)?.within(Duration::from_secs(60));
        match docs.send(call).await {
            Ok(answer) => println!("   => {}", answer.raw()),
            Err(error) if error.outcome() == Outcome::DoneResultLost => println!("   => {error}"),
            Err(error) if error.is_safe_to_repeat() => println!("   => try again: {error}"),
            Err(error) if error.may_have_landed() => println!("   => look first: {error}"),
            Err(error) => return Err(error.into()),
        }
    }

    println!("doc/get, from another task");
    let other = docs.clone();
    let got = tokio::spawn(async move {
        let answer = other.send(Request::new("doc/get", json!({"id": "dies-before"}))?).await?;
        Ok::<_, BoxError>(answer.raw().to_string())
    });
    println!("   => {}", got.await??);
    println!("doc/rename: an error of the server's own");
    if let Err(error) = docs.send(Request::new("doc/rename", json!({}))?).await {
        println!("   => {error}");
    }
    let listed = docs.send(Request::new("doc/list", json!({}))?).await?;
    println!("doc/list\n   => {}", listed.raw());
    println!("shut down, {} calls cut off", docs.shutdown(Duration::from_secs(5)).await);
    Ok(())
}

// ----- the server

fn serve(file: &Path) -> io::Result<()> {
    for line in io::stdin().lock().lines() {
        let message: Value = serde_json::from_str(&line?)?;
        let Some(id) = message.get("id") else { continue };
        let answer = match answer(file, message["method"].as_str().unwrap_or_default(), &message["params"])? {
            Ok(result) => json!({"jsonrpc": "2.0", "id": id, "result": result}),
            Err(error) => json!({"jsonrpc": "2.0", "id": id, "error": error}),
        };
        writeln!(io::stdout(), "{answer}")?;
    }
    Ok(())
}

fn answer(file: &Path, method: &str, params: &Value) -> io::Result<Result<Value, Value>> {
    let docs = || -> io::Result<Vec<Value>> {
        match fs::read_to_string(file) {
            Ok(text) => text.lines().map(|line| Ok(serde_json::from_str(line)?)).collect(),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
            Err(error) => Err(error),
        }
    };
    Ok(Ok(match method {
        "hello" => json!({"server": "doctool", "pid": process::id()}),
        "doc/list" => docs()?.into(),
        "doc/get" => docs()?.into_iter().find(|doc| doc["id"] == params["id"]).unwrap_or_default(),
        "doc/create" => {
            let is_first = |what: &str| {
                let marker: PathBuf = file.with_extension(what);
                OpenOptions::new().write(true).create_new(true).open(marker).is_ok()
            };
            if params["id"] == "dies-before" && is_first("before") {
                process::exit(3);
            }
            writeln!(OpenOptions::new().append(true).create(true).open(file)?, "{params}")?;
            if params["id"] == "dies-after" && is_first("after") {
                process::exit(4);
            }
            json!({"created": params["id"]})
        }
        _ => return Ok(Err(json!({"code": -32601, "message": "method not found"}))),
    }))
}
