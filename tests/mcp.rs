//! MCP servers of a few lines of shell, on real processes over real pipes, through the whole stack.
#![cfg(unix)]

use std::{
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use goaround::{
    Basis, BoxError, CallError, Cause, ConnectError, Effect, Event, InDoubt, Outcome, ReconnectLayer,
    Refusal, Stack,
    jsonrpc::{Request, Response},
    mcp::{self, Era, HandshakeError, ProtocolVersion, ToolRules, tasks},
};
use serde_json::{Value, json};
use tokio::process::Command;
use tower::Service;

/// Runs `$before`, then answers by the method: in the older era after the handshake, in the newer one at once.
/// What it is asked goes into the file `$log`, a line for each method, and `start` for each process.
const SERVER: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
refuse() { printf '{"jsonrpc":"2.0","id":%s,"error":{"code":%s,"message":"no","data":%s}}\n' "$id" "$1" "${2:-null}"; }
initialize() { answer '{"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{"name":"sh","version":"1"}}'; }
discover() { refuse -32601; }
tools() { answer '{"tools":[]}'; }
call() { answer '{}'; }
other() { answer '{}'; }
say() { [ -z "$log" ] || echo "$1" >>"$log"; }
say start
eval "$before"
while read -r line; do
    method=${line#*'"method":"'}; method=${method%%'"'*}
    say "$method"
    case $line in *'"id":'*) ;; *) continue ;; esac
    id=${line#*'"id":'}; id=${id%%,*}
    case $method in
        initialize) initialize ;;
        server/discover) discover ;;
        tools/list) tools ;;
        tools/call) call ;;
        subscriptions/listen)
            printf '{"jsonrpc":"2.0","method":"notifications/subscriptions/acknowledged","params":{"_meta":{"io.modelcontextprotocol/subscriptionId":%s}}}\n' "$id" ;;
        exit) exit 3 ;;
        *) other ;;
    esac
done
"#;

/// What makes it a server of the newer era, which refuses the handshake.
const MODERN: &str = r#"
discover() { answer '{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{}}'; }
initialize() { refuse -32022 '{"supported":["2026-07-28"],"requested":"2025-11-25"}'; }
"#;

fn command(before: &str) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(SERVER).env("before", before).env("log", "");
    command
}

/// Longer than any machine is busy: no server here is taken for silent, unless a test wants that.
const PATIENCE: Duration = Duration::from_secs(60);

fn server(before: &str) -> mcp::Stdio {
    mcp::stdio(command(before)).probe_timeout(PATIENCE)
}

struct Log(tempfile::TempDir);

impl Log {
    fn new() -> Self {
        Self(tempfile::tempdir().unwrap())
    }

    fn server(&self, before: &str) -> mcp::Stdio {
        let mut command = command(before);
        command.env("log", self.0.path().join("log"));
        mcp::stdio(command).probe_timeout(PATIENCE)
    }

    /// What was said up to the `times`th such line, without probes; a server writes its line before it
    /// answers, but nobody answers notifications.
    async fn lines(&self, last: &str, times: usize) -> Vec<String> {
        let until = Instant::now() + Duration::from_secs(30);
        loop {
            let text = std::fs::read_to_string(self.0.path().join("log")).unwrap_or_default();
            let lines: Vec<_> = text.lines().filter(|line| *line != "ping").map(str::to_owned).collect();
            let ends = lines.iter().enumerate().filter(|(_, line)| *line == last).nth(times - 1);
            if let Some((end, _)) = ends {
                return lines[..=end].to_vec();
            }
            assert!(Instant::now() < until, "{lines:?}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

fn request(method: &'static str, params: Value) -> Request {
    Request::new(method, params).unwrap()
}

fn list() -> Request {
    request("tools/list", json!({}))
}

fn tool(name: &str) -> Request {
    request("tools/call", json!({ "name": name, "arguments": {} }))
}

async fn handshake_error(mut server: mcp::Stdio) -> HandshakeError {
    *server.call(()).await.unwrap_err().downcast::<HandshakeError>().unwrap()
}

fn stack(server: mcp::Stdio) -> Stack<mcp::Stdio, Request, Response> {
    Stack::builder(server).build().unwrap()
}

async fn lose(stack: &Stack<mcp::Stdio, Request, Response>) {
    let error = stack.send(request("exit", json!({}))).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
}

#[tokio::test]
async fn the_era_is_found_and_remembered_for_the_next_process() {
    let log = Log::new();
    let older = stack(log.server(""));
    older.send(list()).await.unwrap();
    lose(&older).await;
    older.send(list()).await.unwrap();
    assert_eq!(older.generation(), Some(2));
    assert_eq!(
        log.lines("tools/list", 2).await.join(" "),
        "start server/discover initialize notifications/initialized tools/list exit \
         start initialize notifications/initialized tools/list"
    );

    let log = Log::new();
    let newer = stack(log.server(MODERN));
    newer.send(list()).await.unwrap();
    lose(&newer).await;
    newer.send(list()).await.unwrap();
    assert_eq!(
        log.lines("tools/list", 2).await.join(" "),
        "start server/discover tools/list exit start server/discover tools/list"
    );
}

#[tokio::test]
async fn the_era_can_be_pinned() {
    let log = Log::new();
    stack(log.server("").era(Era::Initialize)).send(list()).await.unwrap();
    assert!(!log.lines("tools/list", 1).await.contains(&"server/discover".to_owned()));
    let error = handshake_error(server("").era(Era::Discover)).await;
    assert_eq!(
        error.to_string(),
        "the server refused `server/discover` (code -32601; its message is in the `HandshakeError`)"
    );
    let error = handshake_error(server(MODERN).era(Era::Initialize)).await;
    assert_eq!(
        error.to_string(),
        "the server refused `initialize` (code -32022; its message is in the `HandshakeError`)"
    );
}

#[tokio::test]
async fn a_server_that_is_slow_to_start_is_understood_in_both_eras() {
    for (before, version) in [("", ProtocolVersion::V2025_06_18), (MODERN, ProtocolVersion::V2026_07_28)] {
        let slow = format!("{before}\nsleep 0.5");
        let log = Log::new();
        let mut server = log.server(&slow).probe_timeout(Duration::from_millis(50));
        let connection = server.call(()).await.unwrap();
        assert_eq!(connection.version(), version);
        assert_eq!(log.lines(log_end(version), 1).await.iter().filter(|line| *line == "start").count(), 1);
    }
}

fn log_end(version: ProtocolVersion) -> &'static str {
    if version.has_handshake() { "notifications/initialized" } else { "initialize" }
}

#[tokio::test]
async fn a_server_that_ignores_what_it_does_not_know_is_shaken_hands_with() {
    let mut server = server("discover() { :; }").probe_timeout(Duration::from_millis(50));
    assert_eq!(server.call(()).await.unwrap().version(), ProtocolVersion::V2025_06_18);
}

#[tokio::test]
async fn a_server_that_ends_at_what_it_does_not_know_is_started_once_more() {
    let log = Log::new();
    let stack = stack(log.server("discover() { exit 1; }"));
    stack.send(list()).await.unwrap();
    lose(&stack).await;
    stack.send(list()).await.unwrap();
    assert_eq!(
        log.lines("tools/list", 2).await.join(" "),
        "start server/discover start initialize notifications/initialized tools/list exit \
         start initialize notifications/initialized tools/list"
    );
}

#[tokio::test]
async fn a_banner_on_stdout_is_ignored() {
    for before in ["", MODERN] {
        let banner = format!("{before}\necho 'Welcome to the server!'; echo; echo '{{'");
        let mut server = server(&banner);
        let connection = server.call(()).await.unwrap();
        assert_eq!(connection.ignored(), 2);
        connection.request(list()).await.unwrap();
    }
}

#[tokio::test]
async fn a_server_behind_a_shell_works_and_is_ended() {
    for before in ["", MODERN] {
        let mut command = Command::new("sh");
        command.arg("-c").arg(r#"sh -c "$server"; true"#);
        command.env("server", SERVER).env("before", before).env("log", "");
        let stack = stack(mcp::stdio(command).probe_timeout(PATIENCE));
        stack.send(list()).await.unwrap();
        lose(&stack).await;
        stack.send(list()).await.unwrap();
        assert_eq!(stack.shutdown(Duration::from_secs(5)).await, 0);
    }
}

#[tokio::test]
async fn a_grandchild_that_is_left_behind_holds_up_no_reconnect() {
    for before in ["", MODERN] {
        let leaves = format!("{before}\n(trap '' TERM HUP; while :; do sleep 1000; done) &");
        let grace = Duration::from_millis(100);
        let stack = stack(server(&leaves).shutdown_grace(grace, grace));
        stack.send(list()).await.unwrap();
        lose(&stack).await;
        let began = Instant::now();
        stack.send(list()).await.unwrap();
        assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
        assert_eq!(stack.generation(), Some(2));
    }
}

/// The shell is killed while the server in it writes: the server is no less ended before the write is replayed.
#[tokio::test]
async fn a_server_whose_shell_is_killed_lands_its_write_once() {
    for before in ["", MODERN] {
        let log = Log::new();
        let path = log.0.path().join("log");
        let writes = format!("{before}\ncall() {{ sleep 1; say lands; answer '{{}}'; }}");
        let mut command = Command::new("sh");
        command.arg("-c").arg(r#"echo $$ >"$log.shell"; sh -c "$server"; true"#);
        command.env("server", SERVER).env("before", writes).env("log", &path);
        let landed = {
            let path = path.clone();
            move || std::fs::read_to_string(&path).unwrap().lines().filter(|line| *line == "lands").count()
        };
        let check = {
            let landed = landed.clone();
            move |doubt: InDoubt<Request, Response>| {
                let verdict = if landed() > 0 { doubt.landed_without_result() } else { doubt.not_landed() };
                async { Ok::<_, BoxError>(verdict) }
            }
        };
        let server = mcp::stdio(command).probe_timeout(PATIENCE).exit_ends_effects();
        let stack = Stack::builder(server).check(check).build().unwrap();
        stack.send(list()).await.unwrap();
        let kill = async {
            log.lines("tools/call", 1).await;
            let shell = std::fs::read_to_string(path.with_extension("shell")).unwrap();
            let shell = rustix::process::Pid::from_raw(shell.trim().parse().unwrap()).unwrap();
            rustix::process::kill_process(shell, rustix::process::Signal::KILL).unwrap();
        };
        let (written, ()) = tokio::join!(stack.send(tool("pay")), kill);
        if let Err(error) = written {
            assert_eq!(error.outcome(), Outcome::DoneResultLost, "{error}");
        }
        assert_eq!(stack.generation(), Some(2));
        stack.shutdown(Duration::from_secs(5)).await;
        assert_eq!(landed(), 1);
    }
}

#[tokio::test]
async fn a_handshake_that_is_answered_with_an_error_is_one_and_does_not_latch() {
    let error = handshake_error(server("initialize() { refuse -32602; }")).await;
    assert_eq!(
        error.to_string(),
        "the server refused `initialize` (code -32602; its message is in the `HandshakeError`)"
    );
    let error = handshake_error(server(r#"initialize() { answer '"x"'; }"#)).await;
    assert_eq!(
        error.to_string(),
        "the server's answer to `initialize` is malformed: it names no protocol version"
    );
    let odd = r#"discover() { answer '{"supportedVersions":["2031-01-01"]}'; }"#;
    let error = handshake_error(server(odd)).await;
    assert_eq!(error.to_string(), r#"no common protocol version: the server speaks ["2031-01-01"]"#);

    // At first it refuses, and from the second process on it does not.
    let dir = tempfile::tempdir().unwrap();
    let once = format!(
        "there='{}'; [ -e \"$there\" ] || initialize() {{ refuse -32000; }}; : >\"$there\"",
        dir.path().join("there").display()
    );
    let stack = stack(server(&once));
    stack.send(list()).await.unwrap();
}

#[tokio::test]
async fn a_handshake_that_is_never_answered_is_bounded_by_the_connect_timeout() {
    let silent = "initialize() { :; }; discover() { :; }";
    for era in [Era::Auto, Era::Initialize, Era::Discover] {
        let server = server(silent).era(era).probe_timeout(Duration::from_millis(50));
        let stack = Stack::<_, _, Response>::builder(server)
            .reconnect(ReconnectLayer::once().connect_timeout(Duration::from_millis(300)))
            .retry(goaround::RetryReadOnly.attempts(1))
            .build()
            .unwrap();
        let began = Instant::now();
        let error = stack.send(list()).await.unwrap_err();
        let Cause::ConnectFailed(cause) = error.cause() else { panic!("{error}") };
        assert!(matches!(**cause, ConnectError::TimedOut(_)), "{cause}");
        assert!(began.elapsed() < Duration::from_secs(10));
        assert_eq!(error.outcome(), Outcome::NotDone);
    }
}

#[tokio::test]
async fn a_server_that_dies_in_the_handshake_is_said_to_with_its_status_and_last_words() {
    for era in [Era::Auto, Era::Initialize, Era::Discover] {
        let error = handshake_error(server("echo no config >&2; exit 42").era(era)).await;
        let ending = "exit status: 42; its stderr is in the `HandshakeError`";
        assert_eq!(error.to_string(), format!("the connection closed during the handshake ({ending})"));
        let HandshakeError::Closed { stderr, .. } = error else { panic!("{error:?}") };
        assert_eq!(stderr, ["no config"]);
    }
}

#[tokio::test]
async fn the_session_is_restored_before_the_call_that_is_replayed() {
    let log = Log::new();
    let stack = stack(log.server(""));
    stack.send(request("logging/setLevel", json!({ "level": "debug" }))).await.unwrap();
    stack.send(request("resources/subscribe", json!({ "uri": "a:1" }))).await.unwrap();
    lose(&stack).await;
    stack.send(list()).await.unwrap();
    let lines = log.lines("tools/list", 1).await;
    assert!(
        lines.ends_with(
            &["notifications/initialized", "logging/setLevel", "resources/subscribe", "tools/list"]
                .map(str::to_owned)
        ),
        "{lines:?}"
    );
}

#[tokio::test]
async fn a_stream_goes_on_over_a_reconnect_and_is_asked_for_once_on_each_connection() {
    let log = Log::new();
    let stack = stack(log.server(MODERN));
    let other = stack.clone();
    let params = json!({ "notifications": { "toolsListChanged": true } });
    let stream = tokio::spawn(async move { other.send(request("subscriptions/listen", params)).await });
    log.lines("subscriptions/listen", 1).await;
    stack.send(list()).await.unwrap();
    lose(&stack).await;
    log.lines("subscriptions/listen", 2).await;
    stack.send(list()).await.unwrap();
    let lines = log.lines("tools/list", 2).await;
    assert_eq!(lines.iter().filter(|line| *line == "subscriptions/listen").count(), 2, "{lines:?}");
    assert!(!stream.is_finished());
    assert_eq!(stack.shutdown(Duration::ZERO).await, 1);
    let error = stream.await.unwrap().unwrap_err();
    assert_eq!((error.effect(), error.basis()), (Effect::ReadOnly, Basis::Protocol));
}

#[tokio::test]
async fn h15_a_page_is_not_replayed_onto_a_new_session() {
    let pages = r#"tools() { case $line in
        *cursor*) exit 1 ;;
        *) answer '{"tools":[],"nextCursor":"2"}' ;;
    esac; }"#;
    let stack = stack(server(pages));
    stack.send(list()).await.unwrap();
    let error = stack.send(request("tools/list", json!({ "cursor": "2" }))).await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::CursorOfAnotherSession)), "{error}");
    assert_eq!(error.outcome(), Outcome::NoAnswer);
    assert!(error.to_string().contains("begin again with the first page"), "{error}");
}

type Seen = Arc<Mutex<Vec<(String, Effect, Basis, Option<Outcome>)>>>;

fn watched(server: mcp::Stdio) -> (Stack<mcp::Stdio, Request, Response>, Seen) {
    let seen = Seen::default();
    let sink = Arc::clone(&seen);
    let stack = Stack::builder(server)
        .on_event(move |event| {
            let report = match event {
                Event::Call(report) => (report.method.clone(), report.effect, report.basis, report.outcome),
                Event::InDoubt(report) => {
                    (report.method.clone(), report.effect, report.basis, report.outcome)
                }
                _ => return,
            };
            sink.lock().unwrap().push(report);
        })
        .build()
        .unwrap();
    (stack, seen)
}

/// A server with a tool that, as it says, reads, and that takes its process down the first time. From then on
/// `then` holds.
fn dies_once(dir: &tempfile::TempDir, then: &str) -> mcp::Stdio {
    server(&format!(
        r#"there='{}'
        initialize() {{ answer '{{"protocolVersion":"2025-11-25","capabilities":{{"tools":{{}}}}}}'; }}
        hint=true; [ ! -e "$there" ] || {{ {then}; }}
        tools() {{ answer '{{"tools":[{{"name":"get","annotations":{{"readOnlyHint":'$hint'}}}}]}}'; }}
        call() {{ [ -e "$there" ] || {{ : >"$there"; exit 1; }}; answer '{{}}'; }}"#,
        dir.path().join("there").display()
    ))
}

#[tokio::test]
async fn a_tool_of_a_trusted_server_is_replayed_as_the_read_that_it_is_said_to_be() {
    let dir = tempfile::tempdir().unwrap();
    let server = dies_once(&dir, ":").tools(ToolRules::new().trust_annotations());
    let (stack, seen) = watched(server);
    stack.send(list()).await.unwrap();
    stack.send(tool("get")).await.unwrap();
    assert_eq!(stack.generation(), Some(2));
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen, [("tools/call".to_owned(), Effect::ReadOnly, Basis::TrustedAnnotation, None)]);
}

#[tokio::test]
async fn without_trust_it_is_a_write_in_doubt() {
    let dir = tempfile::tempdir().unwrap();
    let (stack, seen) = watched(dies_once(&dir, ":"));
    stack.send(list()).await.unwrap();
    let error = stack.send(tool("get")).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
    let seen = seen.lock().unwrap().clone();
    assert_eq!(seen[0], ("tools/call".to_owned(), Effect::Write, Basis::Default, Some(Outcome::Unknown)));
}

#[tokio::test]
async fn h14_a_replay_whose_trusted_effect_no_longer_holds_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let server = dies_once(&dir, "hint=false").tools(ToolRules::new().trust_annotations());
    let (stack, seen) = watched(server);
    stack.send(list()).await.unwrap();
    let error = stack.send(tool("get")).await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Refused(Refusal::EffectChanged)), "{error}");
    // The first attempt was sent as a read, and the server says now that it is none.
    assert_eq!((error.outcome(), error.is_safe_to_repeat()), (Outcome::Unknown, false), "{error}");
    assert!(error.may_have_landed());
    let seen = seen.lock().unwrap().clone();
    let reported =
        ("tools/call".to_owned(), Effect::ReadOnly, Basis::TrustedAnnotation, Some(Outcome::Unknown));
    assert_eq!(seen, [reported.clone(), reported], "as in doubt, and as a call of two attempts");
    // A new call is judged anew: it is a write now.
    stack.send(tool("get")).await.unwrap();
}

#[tokio::test]
async fn nothing_of_a_server_is_in_the_text_of_an_error() {
    let secret = r#"echo token=hunter2 >&2; echo token=hunter2; exit 1"#;
    let error: CallError = stack(server(secret)).send(list()).await.unwrap_err();
    assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
}

/// A server that keeps its tasks in the directory `$tasks`, and ends once while one is asked for. `keep` runs when a
/// process starts.
fn tasks_server(log: &Log, dir: &tempfile::TempDir, modern: bool, keep: &str) -> mcp::Stdio {
    let (created, done) = match modern {
        true => (
            r#"{"resultType":"task","taskId":"7","status":"working","ttlMs":null,"pollIntervalMs":100,"createdAt":"2026-11-30T00:00:00Z"}"#,
            r#"{"resultType":"complete","taskId":"7","status":"completed","createdAt":"2026-11-30T00:00:00Z","result":{"content":[],"n":1}}"#,
        ),
        false => (
            r#"{"task":{"taskId":"7","status":"working","ttl":60000,"pollInterval":100,"createdAt":"2026-11-30T00:00:00Z"}}"#,
            r#"{"taskId":"7","status":"completed","ttl":60000,"createdAt":"2026-11-30T00:00:00Z"}"#,
        ),
    };
    let before = if modern { MODERN } else { "" };
    log.server(&format!(
        r#"{before}
        dir='{}'; {keep}
        call() {{ : >"$dir/task"; answer '{created}'; }}
        get() {{
            [ -e "$dir/died" ] || {{ : >"$dir/died"; exit 1; }}
            [ -e "$dir/task" ] || {{ refuse -32602; return; }}
            answer '{done}'
        }}
        other() {{ case $method in
            tasks/get) get ;;
            tasks/result) answer '{{"content":[],"n":1}}' ;;
            *) answer '{{}}' ;;
        esac; }}"#,
        dir.path().display()
    ))
}

#[tokio::test]
async fn a_task_is_read_from_the_next_process_and_its_tool_runs_once() {
    for modern in [false, true] {
        let (log, dir) = (Log::new(), tempfile::tempdir().unwrap());
        let stack = stack(tasks_server(&log, &dir, modern, ":"));
        let call = tasks::asked(tool("render"), Duration::from_secs(60)).unwrap();
        let result: Value = tasks::run(&stack, call).await.unwrap().parse().unwrap();
        assert_eq!(result, json!({ "content": [], "n": 1 }));
        assert_eq!(stack.generation(), Some(2));
        let lines =
            log.lines(if modern { "tasks/get" } else { "tasks/result" }, if modern { 2 } else { 1 }).await;
        assert_eq!(lines.iter().filter(|line| *line == "tools/call").count(), 1, "{lines:?}");
    }
}

#[tokio::test]
async fn a_task_that_the_next_process_has_forgotten_is_unknown_and_its_tool_runs_once() {
    for modern in [false, true] {
        let (log, dir) = (Log::new(), tempfile::tempdir().unwrap());
        let stack = stack(tasks_server(&log, &dir, modern, r#"rm -f "$dir/task""#));
        let error = tasks::run(&stack, tool("render")).await.unwrap_err();
        let unfinished = tasks::Unfinished::of(&error).unwrap();
        assert_eq!((unfinished.reason(), unfinished.task().id()), (tasks::Reason::Forgotten, "7"));
        assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
        let lines = log.lines("tasks/get", 2).await;
        assert_eq!(lines.iter().filter(|line| *line == "tools/call").count(), 1, "{lines:?}");
    }
}
