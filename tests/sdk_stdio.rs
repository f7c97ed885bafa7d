//! The official SDK under the stack, over the pipes of real child processes that end, stop and babble in every
//! way: what the callers of reads and writes are told, and which process saw which call.
#![cfg(unix)]

#[path = "lab/sdk.rs"]
mod lab;

use std::{
    fs,
    future::Future,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use goaround::{
    Call, Cause, Outcome, Refusal, Stack, WriteSafetyLayer,
    mcp::ToolRules,
    sdk::{Client, Connector, Request},
    write_safety::{
        KeyedWrites,
        ledger::{Entry, EntryId, Ledger, LedgerError, MemoryLedger, ServerProcess, State},
    },
};
use lab::{Events, append, builder, check, check_without_a_word, lines, ms, word};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream},
    process::Command,
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tokio_test::task;
use tower::ServiceExt;

const BOUND: Duration = Duration::from_secs(30);

/// Waits by looking again and again.
async fn until(mut holds: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !holds() {
        assert!(begin.elapsed() < BOUND, "it takes too long");
        sleep(ms(2)).await;
    }
}

async fn bounded<F: Future>(what: &str, future: F) -> F::Output {
    match timeout(BOUND, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what}: hangs"),
    }
}

/// A server in shell. It notes each start and each call of a tool, with the number of its process, in `$log`, and
/// the effects of `append` in `$effects`. The first call of `$tool` meets `$fault` in place of an answer, after
/// its effect where `$lands` says so.
const SERVER: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
text() { answer '{"content":[]}'; }
effect() { echo "$line" >>"$effects"; }
lines() {
    all=
    while read -r one; do all="$all${all:+,}\"$one\""; done <"$effects"
    answer "{\"content\":[],\"structuredContent\":{\"result\":[$all]}}"
}
echo start >>"$log"
process=$(grep -c start "$log")
echo $$ >"$log.$process"
while read -r message; do
    echo "p$process" >>"$log.received"
    case $message in *'"id":'*) ;; *) continue ;; esac
    id=${message#*'"id":'}; id=${id%%,*}; id=${id%%\}*}
    method=${message#*'"method":"'}; method=${method%%'"'*}
    case $method in
        initialize) answer '{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}'; continue ;;
        tools/call) ;;
        ping) answer '{}'; continue ;;
        tools/list) answer '{"tools":[{"name":"append","inputSchema":{"type":"object"}},{"name":"lines","inputSchema":{"type":"object"}}]}'; continue ;;
        *) printf '{"jsonrpc":"2.0","id":%s,"error":{"code":-32601,"message":"no"}}\n' "$id"; continue ;;
    esac
    case $message in *'"name":"append"'*) name=append ;; *) name=lines ;; esac
    line=${message#*'"line":"'}; line=${line%%'"'*}
    echo "$name p$process" >>"$log"
    if [ "$name" = "$tool" ] && [ ! -e "$log.once" ]; then
        : >"$log.once"
        [ -z "$lands" ] || effect
        eval "$fault"
    elif [ $name = append ]; then effect; text
    else lines; fi
done
"#;

struct Peer {
    folder: tempfile::TempDir,
}

impl Peer {
    fn new() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("effects"), "").unwrap();
        Self { folder }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What becomes of the first call of a tool.
    fn command(&self, tool: &str, fault: &str, lands: bool) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(SERVER);
        command.env("log", self.path("log")).env("effects", self.path("effects"));
        command.env("tool", tool).env("fault", fault).env("lands", if lands { "yes" } else { "" });
        command
    }

    fn connector(&self, tool: &str, fault: &str, lands: bool) -> Connector {
        Connector::stdio((), self.command(tool, fault, lands)).shutdown_grace(ms(100), ms(100))
    }

    fn effects(&self) -> Vec<String> {
        fs::read_to_string(self.path("effects")).unwrap().lines().map(str::to_owned).collect()
    }

    /// The calls that its processes saw.
    fn calls(&self) -> Vec<String> {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().filter(|line| *line != "start").map(str::to_owned).collect()
    }

    /// How many messages its processes have received.
    fn received(&self) -> usize {
        fs::read_to_string(self.path("log.received")).map_or(0, |log| log.lines().count())
    }

    fn processes(&self) -> usize {
        let log = fs::read_to_string(self.path("log")).unwrap_or_default();
        log.lines().filter(|line| *line == "start").count()
    }

    fn process(&self, nth: usize) -> rustix::process::Pid {
        let id = fs::read_to_string(self.path(&format!("log.{nth}"))).unwrap();
        rustix::process::Pid::from_raw(id.trim().parse().unwrap()).unwrap()
    }

    /// Waits until that process is gone, or waits to be reaped.
    async fn has_gone(&self, nth: usize) {
        let stat = format!("/proc/{}/stat", self.process(nth));
        let alive = || match fs::read_to_string(&stat) {
            Ok(stat) => !stat.rsplit(')').next().unwrap_or_default().trim_start().starts_with(['Z', 'X']),
            Err(_) => {
                cfg!(not(target_os = "linux"))
                    && rustix::process::test_kill_process(self.process(nth)).is_ok()
            }
        };
        let begin = Instant::now();
        while alive() {
            assert!(begin.elapsed() < BOUND, "process {nth} lives on");
            sleep(ms(2)).await;
        }
        // And for what is in the pipe to be read.
        sleep(ms(100)).await;
    }
}

// ===== The fault table =====

struct Row {
    fault: &'static str,
    script: &'static str,
    /// Nothing shows it before the attempt's time is over.
    silent: bool,
    read: &'static str,
    write: &'static str,
    /// With a check, an effect that has come, and a process whose end ends its effects.
    landed: &'static str,
    absent: &'static str,
}

/// The process is gone.
fn lost(fault: &'static str, script: &'static str) -> Row {
    Row {
        fault,
        script,
        silent: false,
        read: "ok: lines p1, lines p2",
        write: "unknown: append p1",
        landed: "done: append p1, lines p2",
        absent: "ok: append p1, lines p2, append p2",
    }
}

/// An answer, whatever else there is.
fn fine(fault: &'static str, script: &'static str) -> Row {
    Row {
        fault,
        script,
        silent: false,
        read: "ok: lines p1",
        write: "ok: append p1",
        landed: "ok: append p1",
        absent: "ok: append p1",
    }
}

/// Table 2.3 of the reference, and what belongs beside it.
fn table() -> Vec<Row> {
    vec![
        lost("exits before the answer", "exit 3"),
        lost("is killed before the answer", "kill -KILL $$"),
        lost("half a JSON line, exits", r#"printf '{"jsonrpc":"2.0","id":%s,"resu' "$id"; exit 0"#),
        lost("closes stdout, stays alive", "exec >&-; exec sleep 1000"),
        Row {
            silent: true,
            // The check's own probe finds out. What it does not see counts once the process is gone, and is looked for
            // again.
            absent: "ok: append p1, lines p2, lines p2, append p2",
            ..lost("closes stdin, stays alive", "exec <&-; exec sleep 1000")
        },
        lost("closes stdout and stdin, stays alive", "exec >&- <&-; exec sleep 1000"),
        lost("exits, and a grandchild keeps its stdout", "sleep 1000 & exit 3"),
        fine("answers, then exits", "text; exit 0"),
        fine(
            "answers without a newline, then exits",
            r#"printf '{"jsonrpc":"2.0","id":%s,"result":{"content":[]}}' "$id"; exit 0"#,
        ),
        fine("a line of no JSON before the answer", "echo 'Listening on stdio'; text"),
        fine("an empty line before the answer", "echo; text"),
        fine("bytes of no text before the answer", r"printf '\377\376\n'; text"),
        fine("another's answer before it", r#"echo '{"jsonrpc":"2.0","id":4711,"result":{}}'; text"#),
        fine(
            "an error without an id before it",
            r#"echo '{"jsonrpc":"2.0","id":null,"error":{"code":-32700,"message":"no"}}'; text"#,
        ),
        fine("the id as a string", r#"id="\"$id\""; text"#),
        fine("the answer twice", "text; text"),
        fine("CRLF", r#"printf '{"jsonrpc":"2.0","id":%s,"result":{"content":[]}}\r\n' "$id""#),
    ]
}

#[derive(Clone, Copy, Debug)]
enum Column {
    Read,
    WriteLanded,
    WriteAbsent,
    CheckedLanded,
    CheckedAbsent,
    /// Nobody declared that its effects end with it.
    Fenceless,
}

async fn fly(row: &Row, column: Column) -> Result<(), String> {
    let expected = match column {
        Column::Read => row.read.to_owned(),
        Column::WriteLanded | Column::WriteAbsent => row.write.to_owned(),
        Column::CheckedLanded => row.landed.to_owned(),
        Column::CheckedAbsent => row.absent.to_owned(),
        // As with the fence, but for the replay.
        Column::Fenceless => match row.absent.strip_suffix(", append p2") {
            Some(calls) => calls.replace("ok: ", "unknown: "),
            None => row.absent.to_owned(),
        },
    };
    let peer = Peer::new();
    let lands = matches!(column, Column::WriteLanded | Column::CheckedLanded);
    let (tool, request) = match column {
        Column::Read => ("lines", lines()),
        _ => ("append", append("x")),
    };
    let mut connector = peer.connector(tool, row.script, lands);
    let mut retry = lab::retry();
    let mut safety = match column {
        Column::CheckedLanded | Column::CheckedAbsent => {
            connector = connector.exit_ends_effects();
            WriteSafetyLayer::new(check_without_a_word)
        }
        Column::Fenceless => WriteSafetyLayer::new(check_without_a_word),
        _ => WriteSafetyLayer::refuse(),
    };
    if row.silent {
        retry = retry.attempt_timeout(ms(500));
        if matches!(column, Column::CheckedLanded | Column::CheckedAbsent | Column::Fenceless) {
            safety = safety.attempt_timeout(ms(500));
        }
    }
    let events = Events::default();
    let stack = builder(connector).deadline(ms(if row.silent { 4_000 } else { 10_000 }));
    let client = stack.writes(safety).retry(retry).on_event(events.sink()).build();
    let client = client.map_err(|error| error.to_string())?;
    if client.send(Request::ping()).await.is_err() {
        return Err("it does not start".to_owned());
    }
    let begin = Instant::now();
    let result = client.send(request).await;
    let took = begin.elapsed();

    let found = format!("{}: {}", word(&result), peer.calls().join(", "));
    let mut wrong = Vec::new();
    if found != expected {
        wrong.push(format!("{found:?} instead of {expected:?}; {result:?}"));
    }
    if took > ms(if row.silent { 5_000 } else { 2_500 }) {
        wrong.push(format!("it took {took:?}"));
    }
    let unknown = events.of("in_doubt").iter().filter(|report| report["outcome"] == "unknown").count();
    if unknown != usize::from(word(&result) == "unknown") {
        wrong.push(format!("reported as unknown {unknown} times: {:?}", events.all()));
    }
    if row.script.ends_with("exit 0") {
        // Noticed before the next call: provably nothing of it is sent to the old one.
        peer.has_gone(1).await;
    }
    let next = [client.send(append("next")).await, client.send(lines()).await];
    if next.each_ref().map(word) != ["ok", "ok"] {
        wrong.push(format!("and the next calls: {next:?}"));
    }
    let effects = peer.effects();
    let count = |line: &str| effects.iter().filter(|effect| *effect == line).count();
    let come = match column {
        Column::CheckedAbsent if expected.ends_with("append p2") => 1,
        _ => usize::from(lands),
    };
    if (count("x"), count("next")) != (come, 1) {
        wrong.push(format!("{effects:?} instead of {come} effects"));
    }
    client.shutdown(ms(1_000)).await;
    match wrong.is_empty() {
        true => Ok(()),
        false => Err(format!("{} ({column:?}): {}", row.fault, wrong.join("; "))),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_end_of_a_child_ends_its_calls_as_the_table_says_and_no_write_runs_twice() {
    use Column::{CheckedAbsent, CheckedLanded, Fenceless, Read, WriteAbsent, WriteLanded};
    let at_once = Arc::new(Semaphore::new(4));
    let mut flights = JoinSet::new();
    for row in table() {
        let row = Arc::new(row);
        for column in [Read, WriteLanded, WriteAbsent, CheckedLanded, CheckedAbsent, Fenceless] {
            let (row, at_once) = (Arc::clone(&row), Arc::clone(&at_once));
            flights.spawn(async move {
                let _permit = at_once.acquire().await.expect("it is never closed");
                match timeout(BOUND, fly(&row, column)).await {
                    Ok(result) => result,
                    Err(_) => Err(format!("{} ({column:?}): hangs", row.fault)),
                }
            });
        }
    }
    let mut wrong: Vec<String> = flights.join_all().await.into_iter().filter_map(Result::err).collect();
    wrong.sort();
    assert!(wrong.is_empty(), "{} flights went wrong:\n{}", wrong.len(), wrong.join("\n"));
}

#[tokio::test]
async fn a_child_that_no_longer_reads_is_replaced_and_nothing_was_sent() {
    // It answers and closes its input.
    let peer = Peer::new();
    let client = builder(peer.connector("lines", "text; exec <&-; exec sleep 1000", false)).build().unwrap();
    assert_eq!(word(&bounded("the last", client.send(lines())).await), "ok");
    sleep(ms(200)).await;
    let write = bounded("a broken pipe", client.send(append("x"))).await;
    assert_eq!(word(&write), "ok", "{write:?}");
    assert_eq!(peer.calls(), ["lines p1", "append p2"]);
    assert_eq!((peer.effects(), client.generation()), (vec!["x".to_owned()], Some(2)));
}

#[tokio::test]
async fn a_child_that_stops_is_replaced_once_it_has_failed_the_probe() {
    let peer = Peer::new();
    let connector = peer.connector("append", "kill -STOP $$", false).probe_timeout(ms(200));
    let client = builder(connector).build().unwrap();
    assert_eq!(word(&client.send(lines()).await), "ok");
    let write = bounded("it stopped", client.send(append("x").within(ms(400)))).await;
    assert_eq!(word(&write), "unknown", "{write:?}");
    sleep(ms(500)).await;
    let next = bounded("the next", client.send(append("y"))).await;
    assert_eq!(word(&next), "ok", "{next:?}");
    assert_eq!(peer.calls(), ["lines p1", "append p1", "append p2"]);
    assert_eq!((peer.effects(), client.generation()), (vec!["y".to_owned()], Some(2)));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_calls_at_a_closure_share_one_new_process_and_each_is_judged_alone() {
    for checked in [false, true] {
        let peer = Peer::new();
        // Dies at the first write, after its effect; the others are in its pipe.
        let mut connector = peer.connector("append", "sleep 0.3; kill -KILL $$", true);
        let safety = match checked {
            true => {
                connector = connector.exit_ends_effects();
                WriteSafetyLayer::new(check_without_a_word).independent_writes()
            }
            false => WriteSafetyLayer::refuse(),
        };
        let client = Arc::new(builder(connector).deadline(BOUND).writes(safety).build().unwrap());
        assert_eq!(word(&client.send(lines()).await), "ok");
        let first = lab::spawn(&client, append("w0"));
        while peer.calls().len() < 2 {
            sleep(ms(2)).await;
        }
        let mut reads = Vec::new();
        let mut writes = vec![first];
        for nth in 1..=8 {
            reads.push(lab::spawn(&client, lines()));
            if nth < 8 {
                writes.push(lab::spawn(&client, append(&format!("w{nth}"))));
            }
        }
        assert_eq!(reads.len() + writes.len(), 16);
        for read in reads {
            let read = bounded("a read", read).await.unwrap();
            assert_eq!(word(&read), "ok", "{read:?}");
        }
        for (nth, write) in writes.into_iter().enumerate() {
            let write = bounded("a write", write).await.unwrap();
            let expected = match (checked, nth) {
                (false, _) => "unknown",
                (true, 0) => "done",
                (true, _) => "ok",
            };
            assert_eq!(word(&write), expected, "w{nth}: {write:?}");
        }
        let mut effects = peer.effects();
        effects.sort();
        let all: Vec<_> = (0..8).map(|nth| format!("w{nth}")).collect();
        assert_eq!(effects, if checked { &all[..] } else { &all[..1] });
        assert_eq!((peer.processes(), client.generation()), (2, Some(2)));
    }
}

#[tokio::test]
async fn a_write_that_its_pipe_never_took_whole_is_not_done_and_one_that_it_took_is_unknown() {
    for (bytes, expected) in [(1 << 20, "not done"), (1 << 10, "unknown")] {
        let peer = Peer::new();
        // It stops reading, and is killed while more than the pipe holds is on its way.
        let connector = peer.connector("lines", "text; kill -STOP $$", false).probe_timeout(BOUND);
        let events = Events::default();
        let client = Arc::new(builder(connector).deadline(BOUND).on_event(events.sink()).build().unwrap());
        assert_eq!(word(&bounded("the last", client.send(lines())).await), "ok");
        let write = lab::spawn(&client, append(&"x".repeat(bytes)));
        // Long enough for what the pipe holds to be written.
        sleep(ms(300)).await;
        rustix::process::kill_process(peer.process(1), rustix::process::Signal::KILL).unwrap();
        let write = bounded("killed", write).await.unwrap();
        assert_eq!(word(&write), expected, "{bytes}: {write:?}");
        assert_eq!(events.of("in_doubt").len(), usize::from(expected == "unknown"));
        assert_eq!(word(&bounded("the next", client.send(append("y"))).await), "ok");
        assert_eq!(peer.effects(), ["y"]);
    }
}

// ===== Its processes in the ledger =====

/// A ledger that takes its time with a server, and sees what that has received meanwhile.
#[derive(Clone)]
struct Looking {
    ledger: MemoryLedger,
    peer: Arc<Peer>,
    fails: bool,
    /// Of each server, its entry and how many messages all of them had received.
    seen: Arc<Mutex<Vec<(ServerProcess, usize)>>>,
}

impl Looking {
    fn new(fails: bool) -> Self {
        Self { ledger: MemoryLedger::default(), peer: Arc::new(Peer::new()), fails, seen: Arc::default() }
    }
}

impl Ledger for Looking {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        self.ledger.enter(entry).await
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.ledger.settle(id, revision, state).await
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.ledger.claim(id, revision).await
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        Ledger::in_doubt(&self.ledger).await
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        Ledger::forget(&self.ledger, id, by).await
    }

    async fn started(&self, server: ServerProcess) -> Result<(), LedgerError> {
        // It reads, and what was sent to it would be there soon.
        let nth = self.seen.lock().unwrap().len() + 1;
        let begin = Instant::now();
        while fs::read_to_string(self.peer.path(&format!("log.{nth}"))).map_or(true, |pid| pid.is_empty()) {
            assert!(begin.elapsed() < BOUND, "it does not start");
            sleep(ms(2)).await;
        }
        sleep(ms(100)).await;
        self.seen.lock().unwrap().push((server, self.peer.received()));
        match self.fails {
            false => Ok(()),
            true => Err(LedgerError::Unavailable("no disk".into())),
        }
    }
}

#[tokio::test]
async fn a_server_process_is_entered_in_the_ledger_before_anything_is_sent_to_it() {
    for ends in [true, false] {
        let ledger = Looking::new(false);
        let peer = Arc::clone(&ledger.peer);
        let mut connector = peer.connector("append", "kill -KILL $$", false);
        if ends {
            connector = connector.exit_ends_effects();
        }
        let safety = WriteSafetyLayer::refuse().ledger(ledger.clone());
        let client = builder(connector).deadline(BOUND).writes(safety).build().unwrap();
        let lost = bounded("killed", client.send(append("x"))).await;
        assert_eq!(word(&lost), "unknown", "{lost:?}");
        let before = peer.received();
        // The next one is entered too.
        assert_eq!(word(&bounded("the next", client.send(append("y"))).await), "ok");
        client.shutdown(ms(1_000)).await;

        let seen = ledger.seen.lock().unwrap().clone();
        let pids: Vec<_> = seen.iter().map(|(server, _)| i64::from(server.pid)).collect();
        let own = [1, 2].map(|nth| i64::from(peer.process(nth).as_raw_nonzero().get()));
        assert_eq!((pids.as_slice(), peer.processes()), (&own[..], 2));
        assert_eq!([seen[0].1, seen[1].1], [0, before], "something was sent before");
        assert!(seen.iter().all(|(server, _)| server.exit_ends_effects == ends), "{seen:?}");
        let doubts = Ledger::in_doubt(&ledger).await.unwrap();
        assert_eq!(doubts.iter().map(|entry| entry.method.as_str()).collect::<Vec<_>>(), ["tools/call"]);
        assert_eq!(
            (peer.calls(), peer.effects()),
            (vec!["append p1".into(), "append p2".into()], vec!["y".into()])
        );
    }
}

#[tokio::test]
async fn a_server_process_that_cannot_be_entered_is_sent_nothing() {
    let ledger = Looking::new(true);
    let peer = Arc::clone(&ledger.peer);
    let connector = peer.connector("", "", false).exit_ends_effects();
    let safety = WriteSafetyLayer::refuse().ledger(ledger.clone());
    let client = builder(connector).deadline(ms(2_000)).writes(safety).build().unwrap();
    let refused = bounded("no ledger", client.send(append("x"))).await;
    assert_eq!(word(&refused), "not done", "{refused:?}");
    client.shutdown(ms(1_000)).await;
    assert!(peer.processes() >= 1);
    assert_eq!((peer.received(), peer.effects().len()), (0, 0));
    assert!(Ledger::in_doubt(&ledger).await.unwrap().is_empty(), "it is not in doubt");
}

// ===== A transport of the caller's own =====

/// An MCP server over a pipe in memory; the nth connection answers calls of tools with `$ID` filled in.
async fn serve(pipe: DuplexStream, answer: &'static str, handshakes: Arc<std::sync::atomic::AtomicUsize>) {
    let mut pipe = BufReader::new(pipe);
    loop {
        let mut line = String::new();
        if pipe.read_line(&mut line).await.unwrap_or(0) == 0 {
            return;
        }
        let message: Value = serde_json::from_str(&line).unwrap();
        let (id, method) = (message["id"].to_string(), message["method"].as_str().unwrap_or_default());
        let own = r#"{"jsonrpc":"2.0","id":$ID,"result":{"content":[]}}"#;
        let answer = match method {
            _ if message["id"].is_null() => continue,
            "initialize" => {
                handshakes.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                let result = json!({
                    "protocolVersion": "2025-06-18", "capabilities": {},
                    "serverInfo": { "name": "pipe", "version": "1" },
                });
                format!(r#"{{"jsonrpc":"2.0","id":{id},"result":{result}}}"#)
            }
            "tools/call" if answer.is_empty() => own.replace("$ID", &id),
            "tools/call" => answer.replace("$ID", &id),
            // A server that hangs does so for the probe too.
            _ => continue,
        };
        let _ = pipe.write_all(format!("{answer}\n").as_bytes()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_the_sdk_drops_ends_at_the_deadline_and_the_next_call_has_a_new_connection() {
    for answer in [
        r#"{"jsonrpc":"2.0","id":null,"error":{"code":-32000,"message":"no"}}"#,
        r#"{"jsonrpc":"2.0","error":{"code":-32000,"message":"no"}}"#,
        r#"{"jsonrpc":"2.0","id":"server-error","error":{"code":-32600,"message":"no"}}"#,
        r#"{"jsonrpc":"2.0","id":4711,"result":{"content":[]}}"#,
        "{}",
    ] {
        let handshakes = Arc::new(std::sync::atomic::AtomicUsize::new(0));
        let (count, made) = (Arc::clone(&handshakes), std::sync::atomic::AtomicUsize::new(0));
        let connector = Connector::new((), move || {
            let (ours, theirs) = tokio::io::duplex(1 << 16);
            let first = made.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
            tokio::spawn(serve(theirs, if first { answer } else { "" }, Arc::clone(&count)));
            Ok(ours)
        });
        let client: Client = builder(connector.probe_timeout(ms(500))).check(check).build().unwrap();
        let begin = Instant::now();
        let read = bounded(answer, client.send(lines().within(ms(2_000)))).await;
        assert_eq!(word(&read), "no answer", "{answer}: {read:?}");
        assert_eq!(begin.elapsed(), ms(2_000), "{answer}");
        sleep(ms(1_000)).await;
        let next = bounded(answer, client.send(append("x"))).await;
        assert_eq!(word(&next), "ok", "{answer}: {next:?}");
        assert_eq!(handshakes.load(std::sync::atomic::Ordering::Relaxed), 2, "{answer}");
        assert_eq!(client.generation(), Some(2), "{answer}");
    }
}

/// Reads nothing, from its first answer to a call on, until `$log.on` is there, and says before that, once `$log.go`
/// is, that its tools have changed.
const HELD_UP: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
next() { read -r message || exit; id=${message#*'"id":'}; id=${id%%,*}; id=${id%%\}*}; }
tools() { answer '{"tools":[{"name":"look","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":true}},{"name":"odd","inputSchema":{"type":"object"},"annotations":{"readOnlyHint":'$1'}}]}'; }
next; answer '{"protocolVersion":"2025-06-18","capabilities":{"tools":{"listChanged":true}},"serverInfo":{"name":"sh","version":"1"}}'
next
next; tools true
next; answer '{"content":[]}'
until [ -e "$log.go" ]; do sleep 0.02; done
echo '{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}'
until [ -e "$log.on" ]; do sleep 0.02; done
while next; do
    case $message in
        *'"name":"odd"'*) echo odd >>"$log"; answer '{"content":[]}' ;;
        *'"method":"tools/list"'*) tools false ;;
        *'"method":"ping"'*) answer '{}' ;;
        *'"method":"tools/call"'*) echo look >>"$log"; answer '{"content":[]}' ;;
    esac
done
"#;

#[tokio::test]
async fn a_call_whose_annotation_is_taken_back_while_it_waits_for_the_pipe_is_not_sent() {
    let folder = tempfile::tempdir().unwrap();
    let log = folder.path().join("log");
    let mut command = Command::new("sh");
    command.arg("-c").arg(HELD_UP).env("log", &log);
    let connector = Connector::stdio((), command).tools(ToolRules::new().trust_annotations());
    let client = Arc::new(Stack::builder(connector).deadline(BOUND).build().unwrap());
    let call = |name: &'static str, padding: usize| Request::tool(name, json!({ "x": "x".repeat(padding) }));
    assert_eq!(word(&bounded("connect", client.send(call("look", 1))).await), "ok");

    let large = lab::spawn(&client, call("look", 200_000));
    sleep(ms(200)).await;
    let odd = lab::spawn(&client, call("odd", 1));
    sleep(ms(200)).await;
    fs::write(log.with_extension("go"), "").unwrap();
    sleep(ms(500)).await;
    fs::write(log.with_extension("on"), "").unwrap();
    assert_eq!(word(&bounded("large", large).await.unwrap()), "ok");
    let error = bounded("odd", odd).await.unwrap().unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error:?}");
    assert_eq!(error.outcome(), Outcome::NotDone);
    assert_eq!(word(&bounded("again", client.send(call("odd", 1))).await), "ok", "judged anew");
    assert_eq!(fs::read_to_string(&log).unwrap(), "look\nodd\n");
}

/// What a server asks that does not read its answers must not be kept without a bound.
#[tokio::test]
async fn a_flood_of_questions_from_a_server_that_reads_nothing_is_bounded() {
    const FLOOD: &str = r#"
read -r message; id=${message#*'"id":'}; id=${id%%,*}; id=${id%%\}*}
echo '{"jsonrpc":"2.0","id":'$id',"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}}'
read -r message
seq 1 100000 | sed 's/.*/{"jsonrpc":"2.0","id":&,"method":"ping"}/'
exec sleep 1000
"#;
    let mut command = Command::new("sh");
    command.arg("-c").arg(FLOOD);
    let client = Arc::new(builder(Connector::stdio((), command)).deadline(BOUND).build().unwrap());
    let call = lab::spawn(&client, lines());
    let (metrics, begin) = (tokio::runtime::Handle::current().metrics(), Instant::now());
    let mut most = 0;
    while begin.elapsed() < Duration::from_secs(8) && most < 5_000 {
        most = most.max(metrics.num_alive_tasks());
        sleep(ms(20)).await;
    }
    call.abort();
    assert!(most < 5_000, "{most} tasks wait to write an answer that nobody reads");
}

/// Answers one call, then reads nothing any more, and talks on.
const TALKS: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
next() { read -r message || exit; id=${message#*'"id":'}; id=${id%%,*}; id=${id%%\}*}; }
next; answer '{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}'
next
next; answer '{"content":[]}'
while echo '{"jsonrpc":"2.0","method":"notifications/message","params":{"level":"info","data":1}}'; do sleep 0.02; done
"#;

#[tokio::test]
async fn calls_that_wait_for_a_pipe_that_nobody_reads_leave_nothing_behind() {
    let mut command = Command::new("sh");
    command.arg("-c").arg(TALKS);
    let client = Arc::new(builder(Connector::stdio((), command)).deadline(BOUND).build().unwrap());
    assert_eq!(word(&bounded("connect", client.send(lines())).await), "ok");
    // It fills the pipe.
    let large = lab::spawn(&client, append(&"x".repeat(200_000)));
    sleep(ms(200)).await;
    let metrics = tokio::runtime::Handle::current().metrics();
    let before = metrics.num_alive_tasks();
    for _ in 0..4 {
        let calls: Vec<_> = (0..100).map(|_| lab::spawn(&client, append("x").within(ms(100)))).collect();
        for call in calls {
            assert_eq!(word(&bounded("withdrawn", call).await.unwrap()), "not done");
        }
    }
    assert_eq!(client.generation(), Some(1));
    sleep(ms(100)).await;
    let after = metrics.num_alive_tasks();
    assert!(after < before + 20, "{before} tasks before, {after} after");
    large.abort();
}

/// Says in `$log` what tools it is asked for. The first process dies of `pay`, and `hold` reads nothing for three seconds.
const FORGETS: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
first=; [ -e "$log.once" ] || { first=first; : >"$log.once"; }
while read -r line; do
    method=${line#*'"method":"'}; method=${method%%'"'*}
    name=${line##*'"name":"'}; name=${name%%'"'*}
    case $line in *'"id":'*) ;; *) continue ;; esac
    id=${line#*'"id":'}; id=${id%%,*}; id=${id%%\}*}
    case $method in
        initialize) answer '{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}' ;;
        tools/call)
            echo "$name" >>"$log"
            [ "$name$first" = payfirst ] && kill -KILL $$
            [ "$name" = hold ] && sleep 3
            answer '{"content":[]}' ;;
        *) answer '{}' ;;
    esac
done
"#;

/// A write is lost with its server, and its replay by its key comes to a pipe that is full to the last byte. When the
/// next server reads, it has forgotten the key, whether the caller's task has had its turn by then or not.
#[tokio::test]
#[cfg(target_os = "linux")]
async fn a_replay_of_which_the_pipe_accepted_nothing_is_not_sent_after_its_keys_time() {
    for is_polled in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let mut command = Command::new("sh");
        command.arg("-c").arg(FORGETS).env("log", &log);
        let asked = |name: &str| {
            let asked = fs::read_to_string(&log).unwrap_or_default();
            asked.lines().filter(|asked| *asked == name).count()
        };
        let connector = Connector::stdio((), command).tools(ToolRules::new().read_only(["ok", "hold"]));
        let keyed = KeyedWrites::argument("/key").honoured_for(ms(1_500));
        let safety = WriteSafetyLayer::refuse().keyed(keyed);
        let client: Client = Stack::builder(connector).deadline(BOUND).writes(safety).build().unwrap();
        assert_eq!(word(&client.send(Request::tool("ok", json!({}))).await), "ok");

        let call = |name, of: Value| task::spawn(client.clone().oneshot(Request::tool(name, of)));
        let mut pay = call("pay", json!({}));
        assert!(pay.poll().is_pending());
        until(|| asked("pay") == 1).await;
        // Others find the connection dead, and fill the pipe to the next server.
        sleep(ms(20)).await;
        let mut others = vec![call("hold", json!({}))];
        until(|| others[0].poll().is_pending() && asked("hold") == 1).await;
        // Fifteen of about a page each, beside a small message of the SDK's own: a pipe has sixteen places of a page,
        // and takes of a message below a page all or nothing.
        for _ in 0..15 {
            let mut filler = call("ok", json!({ "of": "x".repeat(3_900) }));
            for _ in 0..3 {
                assert!(filler.poll().is_pending());
                sleep(ms(2)).await;
            }
            others.push(filler);
        }
        let said = match is_polled {
            true => bounded("pay", pay).await,
            false => {
                for _ in 0..3 {
                    assert!(pay.poll().is_pending());
                    sleep(ms(20)).await;
                }
                until(|| asked("ok") == 16).await;
                bounded("pay", pay).await
            }
        };
        for other in others {
            assert_eq!(word(&bounded("another", other).await), "ok");
        }
        assert_eq!(word(&client.send(Request::tool("ok", json!({}))).await), "ok");
        assert_eq!((asked("pay"), word(&said)), (1, "unknown"), "{is_polled}: {said:?}");
        assert_eq!(client.generation(), Some(2), "{is_polled}");
        client.shutdown(ms(1_000)).await;
    }
}
