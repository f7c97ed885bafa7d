//! Children that end in every way, on real processes over real pipes.
#![cfg(unix)]

use std::{os::unix::process::ExitStatusExt, time::Duration};

use goaround::{
    Basis, BoxError, Call, CallError, Cause, Effect, Event, Exit, Outcome, RetryReadOnly, Stack,
    WriteSafetyLayer,
    jsonrpc::{Client, Request},
    mcp,
    stdio::{self, Child, SpawnError},
};
use tokio::{process::Command, sync::mpsc};
use tower::Service;

/// Longer than any test may take: what is waited for comes, or the test fails.
const FOREVER: Duration = Duration::from_secs(3600);

/// A server in a few lines of shell: it runs `$before`, then does what each call's method says.
const SERVER: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
eval "$before"
while read -r line; do
    case $line in *'"id":'*) ;; *) continue ;; esac
    id=${line#*'"id":'}; id=${id%%,*}
    method=${line#*'"method":"'}; method=${method%%'"'*}
    case $method in
        pid) answer $$ ;;
        exit) exit 3 ;;
        kill) kill -KILL $$ ;;
        stop) kill -STOP $$ ;;
        last) answer '"bye"'; exit 0 ;;
        cut) printf '{"jsonrpc":"2.0","id":%s,"result":"whole"}' "$id"; exit 0 ;;
        grandchild) sleep 1000 & answer $! ;;
        close_stdout) exec >&-; while :; do sleep 1000; done ;;
        close_stdin) answer 0; exec <&-; while :; do sleep 1000; done ;;
        noise) i=0
            while [ $i -lt 200 ]; do printf '%01000d\n' $i >&2; i=$((i+1)); done
            answer $i ;;
        *) answer "\"$method\"" ;;
    esac
done
eval "$after"
"#;

fn command(before: &str, after: &str) -> Command {
    let mut command = Command::new("sh");
    command.arg("-c").arg(SERVER).env("before", before).env("after", after);
    command
}

fn server() -> Child {
    stdio::child(command("", ""))
}

async fn connect<S>(connector: &mut S) -> Client
where
    S: Service<(), Response = Client, Error = BoxError>,
{
    connector.call(()).await.unwrap()
}

async fn number(client: &Client, method: &'static str) -> i32 {
    client.request(Request::new(method, ()).unwrap()).await.unwrap().parse().unwrap()
}

async fn text(client: &Client, method: &'static str) -> Result<String, CallError> {
    Ok(client.request(Request::new(method, ()).unwrap()).await?.parse().unwrap())
}

async fn lost(client: &Client, method: &'static str) -> CallError {
    let error = client.request(Request::new(method, ()).unwrap()).await.unwrap_err();
    assert!(matches!(error.cause(), Cause::Closed(_)), "{error:?}");
    error
}

async fn exit(error: &CallError) -> Exit {
    error.closure().unwrap().exited().await.unwrap()
}

fn is_alive(process: i32) -> bool {
    let process = rustix::process::Pid::from_raw(process).unwrap();
    match std::fs::read_to_string(format!("/proc/{process}/stat")) {
        Ok(stat) => !stat.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X']),
        Err(_) => cfg!(not(target_os = "linux")) && rustix::process::test_kill_process(process).is_ok(),
    }
}

#[tokio::test]
async fn a_child_that_exits_ends_its_calls_and_its_exit_is_known() {
    let client = connect(&mut server().shutdown_grace(FOREVER, FOREVER)).await;
    assert_eq!(text(&client, "echo").await.unwrap(), "echo");
    let error = lost(&client, "exit").await;
    let exit = exit(&error).await;
    assert_eq!((exit.status.unwrap().code(), exit.group_gone), (Some(3), true));
    // The next call finds the connection closed.
    let next = client.request(Request::new("echo", ()).unwrap()).await.unwrap_err();
    assert_eq!(next.delivery(), goaround::Delivery::NotSent);
}

#[tokio::test]
async fn a_child_that_is_killed_costs_no_grace() {
    let client = connect(&mut server().shutdown_grace(FOREVER, FOREVER).exit_ends_effects()).await;
    let error = lost(&client, "kill").await;
    assert!(error.closure().unwrap().exit_ends_effects());
    let exit = exit(&error).await;
    assert_eq!((exit.status.unwrap().signal(), exit.group_gone), (Some(9), true));
}

#[tokio::test]
async fn a_grandchild_that_keeps_stdout_open_holds_up_nothing_and_is_ended() {
    let client = connect(&mut server().shutdown_grace(FOREVER, FOREVER)).await;
    let grandchild = number(&client, "grandchild").await;
    assert!(is_alive(grandchild));
    let error = lost(&client, "kill").await;
    assert!(exit(&error).await.group_gone);
    assert!(!is_alive(grandchild));
}

#[tokio::test]
async fn a_child_that_closes_its_stdout_is_ended() {
    let client = connect(&mut server().shutdown_grace(Duration::ZERO, FOREVER)).await;
    let child = number(&client, "pid").await;
    let error = lost(&client, "close_stdout").await;
    let exit = exit(&error).await;
    assert_eq!((exit.status.unwrap().signal(), exit.group_gone), (Some(15), true));
    assert!(!is_alive(child));
}

#[tokio::test]
async fn a_child_that_ignores_its_closed_input_and_sigterm_is_killed() {
    let grace = Duration::from_millis(50);
    let stubborn = command("trap '' TERM", "while :; do sleep 1000; done");
    let client = connect(&mut stdio::child(stubborn).shutdown_grace(grace, grace)).await;
    let child = number(&client, "pid").await;
    client.close();
    let exit = client.closed().await.exited().await.unwrap();
    assert!(!is_alive(child));
    assert_eq!((exit.status.unwrap().signal(), exit.group_gone), (Some(9), true));
}

#[tokio::test]
async fn a_child_ends_with_the_last_handle_of_its_connection() {
    let mut connector = server().shutdown_grace(FOREVER, FOREVER);
    let client = connect(&mut connector).await;
    let other = client.clone();
    let child = number(&client, "pid").await;
    drop(client);
    assert_eq!(number(&other, "pid").await, child);
    drop(other);
    // The next one starts when it is gone.
    let next = connect(&mut connector).await;
    assert!(!is_alive(child) && is_alive(number(&next, "pid").await));
}

#[tokio::test]
async fn a_child_that_closes_its_stdin_fails_the_next_call_and_no_call_hangs() {
    let client = connect(&mut server().shutdown_grace(Duration::ZERO, Duration::ZERO)).await;
    number(&client, "close_stdin").await;
    // The pipe may take what is sent before the shell closes its end.
    let hangs = client.request(Request::new("echo", ()).unwrap());
    let _ = tokio::time::timeout(Duration::from_millis(500), hangs).await;
    let next = client.request(Request::new("echo", ()).unwrap());
    let error = tokio::time::timeout(Duration::from_secs(30), next).await.unwrap().unwrap_err();
    assert!(error.scope() == goaround::Scope::Connection, "{error:?}");
}

#[tokio::test]
async fn an_answer_and_then_the_exit_is_an_answer() {
    let mut connector = server();
    for (method, answer) in [("last", "bye"), ("cut", "whole")] {
        let client = connect(&mut connector).await;
        assert_eq!(text(&client, method).await.unwrap(), answer);
        let exit = client.closed().await.exited().await.unwrap();
        assert_eq!((exit.status.unwrap().code(), exit.group_gone), (Some(0), true));
    }
}

#[tokio::test]
async fn a_long_request_that_a_stopped_server_has_half_in_its_pipe_is_not_done() {
    let client = connect(&mut server().shutdown_grace(FOREVER, FOREVER)).await;
    let child = number(&client, "pid").await;
    let stop = client.request(Request::new("stop", ()).unwrap());
    let long = client.request(Request::new("pay", [&"x".repeat(1 << 20)]).unwrap());
    let kill = async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let child = rustix::process::Pid::from_raw(child).unwrap();
        rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
    };
    let (stop, long, ()) = tokio::join!(stop, long, kill);
    assert_eq!(stop.unwrap_err().outcome(), Outcome::Unknown);
    let long = long.unwrap_err();
    assert_eq!(long.outcome(), Outcome::NotDone, "{long:?}");
    assert!(client.closed().await.exited().await.unwrap().group_gone);
}

#[tokio::test]
async fn stderr_that_fills_its_pipe_stops_no_call() {
    let client = connect(&mut server()).await;
    assert_eq!(number(&client, "noise").await, 200);
}

#[tokio::test]
async fn an_unknown_command_is_an_error_that_names_it_and_no_argument() {
    let mut command = Command::new("goaround-no-such-program");
    command.arg("--token=secret").env("TOKEN", "secret");
    let mut connector = stdio::child(command);
    let error = connector.call(()).await.unwrap_err().downcast::<SpawnError>().unwrap();
    assert_eq!(error.kind(), std::io::ErrorKind::NotFound);
    assert!(error.to_string().starts_with("cannot start \"goaround-no-such-program\": "), "{error}");
    assert!(!format!("{error}{error:?}{connector:?}").contains("secret"));
    // It does not latch: here it is simply still not there.
    connector.call(()).await.unwrap_err();
}

#[tokio::test]
async fn the_next_child_starts_only_when_the_last_ones_group_is_gone() {
    let dir = tempfile::tempdir().unwrap();
    let log = dir.path().join("log");
    let before = format!(
        "log='{}'; echo start >>\"$log\"; \
         (trap 'sleep 0.2; echo end >>\"$log\"; exit' TERM; : >\"$log.ready\"; \
          while :; do sleep 0.01; done) & while ! [ -e \"$log.ready\" ]; do sleep 0.01; done; rm \"$log.ready\"",
        log.display()
    );
    let mut connector = stdio::child(command(&before, "")).shutdown_grace(FOREVER, FOREVER);
    for _ in 0..2 {
        let client = connect(&mut connector).await;
        lost(&client, "kill").await;
    }
    let client = connect(&mut connector).await;
    // It is at its calls, so that it has written its line.
    text(&client, "echo").await.unwrap();
    assert_eq!(std::fs::read_to_string(&log).unwrap(), "start\nend\nstart\nend\nstart\n");
}

#[tokio::test]
async fn a_connect_that_is_dropped_in_its_handshake_ends_the_child() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut connector = server().shutdown_grace(FOREVER, FOREVER).handshake(move |client| {
        let tell = tell.clone();
        async move {
            let _ = tell.send((number(&client, "pid").await, client.clone()));
            std::future::pending().await
        }
    });
    let first = {
        let connect = connector.call(());
        tokio::pin!(connect);
        tokio::select! {
            _ = &mut connect => unreachable!(),
            told = told.recv() => told.unwrap(),
        }
    };
    // The clone that the handshake leaked keeps nothing alive, and the next child has waited for the end.
    let connect = connector.call(());
    tokio::pin!(connect);
    let second = tokio::select! {
        _ = &mut connect => unreachable!(),
        told = told.recv() => told.unwrap(),
    };
    assert!(!is_alive(first.0) && is_alive(second.0));
}

#[tokio::test]
async fn a_handshake_that_fails_ends_the_child_and_the_next_connect_starts_anew() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let mut connector = server().shutdown_grace(FOREVER, FOREVER).handshake(move |client| {
        let tell = tell.clone();
        async move {
            let pid = number(&client, "pid").await;
            let _ = tell.send(pid);
            Err("not today".into())
        }
    });
    for _ in 0..2 {
        let error = connector.call(()).await.unwrap_err();
        assert_eq!(error.to_string(), "not today");
    }
    let (first, second) = (told.recv().await.unwrap(), told.recv().await.unwrap());
    assert!(first != second && !is_alive(first));
}

#[tokio::test]
async fn a_connect_that_is_dropped_while_it_waits_for_the_last_group_loses_nothing() {
    let before = "(trap '' TERM; while :; do sleep 1000; done) & slow=$!";
    let grace = Duration::from_millis(400);
    let mut connector = stdio::child(command(before, "")).shutdown_grace(grace, grace);
    let client = connect(&mut connector).await;
    let first = number(&client, "pid").await;
    lost(&client, "kill").await;
    drop({
        let mut waiting = tokio_test::task::spawn(connector.call(()));
        assert!(waiting.poll().is_pending());
        waiting
    });
    let client = connect(&mut connector).await;
    assert!(!is_alive(first) && is_alive(number(&client, "pid").await));
}

#[tokio::test]
async fn an_mcp_server_is_shaken_hands_with_again_after_each_start() {
    // The shell's answer to `initialize` is a text, which is no handshake.
    let mut connector = mcp::stdio(command("", ""));
    let error = connector.call(()).await.unwrap_err();
    assert!(error.to_string().contains("malformed"), "{error}");

    let initialize = r#"answer() { case $method in
        initialize) set -- '{"protocolVersion":"2025-06-18","capabilities":{},
            "serverInfo":{"name":"shell","version":"1"}}' ;; esac
        printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$(echo "$1" | tr -d '\n')"; }"#;
    let mut connector = mcp::stdio(command(initialize, "")).exit_ends_effects();
    for _ in 0..2 {
        let client = connect(&mut connector).await;
        assert_eq!(text(&client, "tools/list").await.unwrap(), "tools/list");
        lost(&client, "kill").await;
    }
}

#[tokio::test]
async fn an_mcp_server_that_dies_in_the_handshake_is_said_to_with_its_status() {
    let mut connector = mcp::stdio(command("echo no config >&2; exit 42", ""));
    let error = connector.call(()).await.unwrap_err().downcast::<mcp::HandshakeError>().unwrap();
    assert_eq!(error.to_string(), "the connection closed during the handshake (exit status: 42)");
    let mcp::HandshakeError::Closed { stderr, .. } = *error else { panic!("{error:?}") };
    assert_eq!(stderr, ["no config"]);
}

#[tokio::test]
async fn a_stack_names_the_handshakes_error_and_its_reader_finds_the_servers_last_words() {
    let command = command("read -r line; echo 'no license' >&2; exit 4", "");
    let stack = Stack::builder(mcp::stdio(command)).retry(RetryReadOnly.attempts(1)).build().unwrap();
    let error = stack.send(Request::new("tools/list", ()).unwrap()).await.unwrap_err();
    let text = "cannot connect: the connection closed during the handshake (exit status: 4)";
    assert_eq!(error.to_string(), format!("not done: tools/list: {text}"));
    let handshake = error.get_ref::<mcp::HandshakeError>();
    let Some(mcp::HandshakeError::Closed { stderr, .. }) = handshake else { panic!("{handshake:?}") };
    assert_eq!(stderr, &["no license"]);
    // Nothing in the chain of sources speaks of the outcome of another call than this one.
    let mut next = std::error::Error::source(&error);
    while let Some(source) = next {
        assert!(!source.to_string().contains("UNKNOWN"), "{source}");
        next = source.source();
    }
}

#[tokio::test]
async fn a_call_that_waits_for_a_handshake_in_vain_is_told_that_there_is_no_connection() {
    let stack = Stack::builder(mcp::stdio(command("cat >/dev/null", ""))).build().unwrap();
    let list = Request::new("tools/list", ()).unwrap().within(Duration::from_millis(50));
    let error = stack.send(list).await.unwrap_err();
    assert_eq!(error.to_string(), "not done: tools/list: the deadline passed; no connection yet");
    stack.shutdown(Duration::ZERO).await;
}

#[tokio::test]
async fn an_incident_that_no_connect_follows_says_how_the_process_ended() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let stack = Stack::builder(server())
        .on_event(move |event| {
            if let Event::Incident(incident) = event {
                let _ = tell.send(incident.exit.clone());
            }
        })
        .build()
        .unwrap();
    let error = stack.send(Request::new("exit", ()).unwrap()).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    stack.shutdown(FOREVER).await;
    assert_eq!(told.recv().await.unwrap().as_deref(), Some("exit status: 3"));
}

#[tokio::test]
async fn a_failed_call_is_reported_with_the_basis_of_its_effect() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let stack = Stack::builder(mcp::stdio(command("exit 4", "")))
        .on_event(move |event| {
            if let Event::Call(report) = event {
                let _ = tell.send((report.effect, report.basis));
            }
        })
        .build()
        .unwrap();
    stack.send(Request::new("tools/list", ()).unwrap()).await.unwrap_err();
    assert_eq!(told.recv().await.unwrap(), (Effect::ReadOnly, Basis::Protocol));
}

#[tokio::test]
async fn the_rules_of_a_server_and_of_the_layer_for_writes_count_both() {
    let rules = mcp::ToolRules::new().read_only(["get", "charge"]);
    let stack = Stack::builder(mcp::stdio(command("exit 4", "")).tools(rules))
        .writes(WriteSafetyLayer::refuse().classify(|request: &Request| {
            let call: serde_json::Value = request.params().ok()?;
            (call["name"] == "charge").then_some(Effect::Write)
        }))
        .build()
        .unwrap();
    for (tool, effect) in [("get", Effect::ReadOnly), ("charge", Effect::Write)] {
        let call = Request::new("tools/call", serde_json::json!({ "name": tool })).unwrap();
        assert_eq!(stack.send(call).await.unwrap_err().effect(), effect);
    }
}
