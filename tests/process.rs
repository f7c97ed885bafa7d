//! Children that end in every way, on real processes over real pipes.
#![cfg(unix)]

use std::{os::unix::process::ExitStatusExt, time::Duration};

use goaround::{
    Basis, BoxError, Call, CallError, Cause, Delivery, Effect, Event, Exit, InDoubt, Outcome, ReconnectLayer,
    RetryReadOnly, Stack, WriteSafetyLayer,
    jsonrpc::{Client, Request, Response},
    mcp,
    stdio::{self, Child, SpawnError},
};
use tokio::{process::Command, sync::mpsc};
use tower::{Layer, Service, ServiceExt};

/// Longer than any test may take: what is waited for comes, or the test fails.
const FOREVER: Duration = Duration::from_secs(3600);

/// A server in a few lines of shell: it runs `$before`, then does what each call's method says.
const SERVER: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
eval "$before"
# Where `$once` names a file, only the first that starts does what it is told; the next ones answer.
tame=
if [ -n "$once" ]; then if [ -e "$once" ]; then tame=tame; else : >"$once"; fi; fi
while read -r line; do
    case $line in *'"id":'*) ;; *) continue ;; esac
    id=${line#*'"id":'}; id=${id%%,*}
    method=${line#*'"method":"'}; method=${method%%'"'*}
    method=${tame:-$method}
    case $method in
        pid) answer $$ ;;
        exit) exit 3 ;;
        kill) kill -KILL $$ ;;
        stop) kill -STOP $$ ;;
        last) answer '"bye"'; exit 0 ;;
        cut) printf '{"jsonrpc":"2.0","id":%s,"result":"whole"}' "$id"; exit 0 ;;
        grandchild) sleep 1000 & answer $! ;;
        stubborn) (trap '' TERM; answer 1; while :; do sleep 1000; done) & ;;
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

/// Waits until a process has stopped itself, and for what is then written to fill its pipe.
async fn has_stopped(process: i32) {
    let stat = || std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
    while cfg!(target_os = "linux") && !stat().contains(") T ") {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(100)).await;
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
async fn a_grandchild_that_keeps_stdout_open_and_heeds_no_sigterm_holds_up_no_call_either() {
    let client = connect(&mut server().shutdown_grace(FOREVER, FOREVER)).await;
    let group = rustix::process::Pid::from_raw(number(&client, "pid").await).unwrap();
    assert_eq!(number(&client, "stubborn").await, 1);
    // The call ends, though the group is still there and stays there.
    let error = tokio::time::timeout(Duration::from_secs(30), lost(&client, "kill")).await.unwrap();
    assert!(error.closure().unwrap().exit().is_none());
    rustix::process::kill_process_group(group, rustix::process::Signal::KILL).unwrap();
    assert!(exit(&error).await.group_gone);
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
        has_stopped(child).await;
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
async fn a_layer_alone_over_an_unknown_command_names_it_in_each_calls_error() {
    let mut command = Command::new("goaround-no-such-program");
    command.arg("--token=secret");
    let service = ReconnectLayer::once().layer(stdio::child(command));
    for effect in [Effect::ReadOnly, Effect::Write] {
        let call = Request::new("echo", ()).unwrap().as_effect(effect);
        let error = service.clone().oneshot(call).await.unwrap_err();
        assert!(matches!(error.cause(), Cause::ConnectFailed(_)), "{error:?}");
        assert_eq!(error.outcome(), Outcome::NotDone);
        assert!(error.to_string().contains("goaround-no-such-program"), "{error}");
        assert!(!format!("{error}{error:?}").contains("secret"));
    }
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
    let dir = tempfile::tempdir().unwrap();
    // It serves when the one that heeds no SIGTERM is at that.
    let before = "(trap '' TERM; : >\"$ready\"; while :; do sleep 1000; done) & \
        while ! [ -e \"$ready\" ]; do sleep 0.01; done; rm \"$ready\"";
    let mut slow = command(before, "");
    slow.env("ready", dir.path().join("ready"));
    let grace = Duration::from_secs(1);
    let mut connector = stdio::child(slow).shutdown_grace(grace, grace);
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

// ----- through the whole stack, as the answer to a read and to a write

/// A server that misbehaves in its first life only, behind a stack without a check.
struct Once {
    stack: stdio::Client,
    _folder: tempfile::TempDir,
}

const DEADLINE: Duration = Duration::from_secs(30);

impl Once {
    fn new() -> Self {
        Self::with(|builder| builder)
    }

    fn with(
        change: impl FnOnce(
            goaround::StackBuilder<Child, Request, Response>,
        ) -> goaround::StackBuilder<Child, Request, Response>,
    ) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let mut command = command("", "");
        command.env("once", folder.path().join("once"));
        let child = stdio::child(command).shutdown_grace(Duration::ZERO, FOREVER).exit_ends_effects();
        let builder = Stack::builder(child).deadline(DEADLINE);
        Self { stack: change(builder).build().unwrap(), _folder: folder }
    }

    /// What a call comes to, in less than its deadline.
    async fn send(&self, method: &'static str, effect: Effect) -> Result<String, CallError> {
        self.send_within(method, effect, DEADLINE).await
    }

    async fn send_within(
        &self,
        method: &'static str,
        effect: Effect,
        limit: Duration,
    ) -> Result<String, CallError> {
        let start = std::time::Instant::now();
        let call = Request::new(method, ()).unwrap().as_effect(effect).within(limit);
        let answer = self.stack.send(call).await;
        // No call hangs beyond its deadline; the slack is for a busy machine.
        assert!(start.elapsed() < limit + Duration::from_secs(5), "{method}, {effect:?}");
        Ok(answer?.raw().get().trim_matches('"').to_owned())
    }

    /// The next call is answered, by the server's next life.
    async fn is_well(&self) {
        assert_eq!(self.send("echo", Effect::Write).await.unwrap(), "tame");
        assert_eq!(self.stack.generation(), Some(2));
        self.stack.shutdown(Duration::ZERO).await;
    }
}

#[tokio::test]
async fn a_child_that_ends_in_a_call_is_replaced_for_a_read_and_leaves_a_write_in_doubt() {
    for method in ["exit", "kill", "close_stdout"] {
        for effect in [Effect::ReadOnly, Effect::Write] {
            let once = Once::new();
            match once.send(method, effect).await {
                Ok(answer) => assert_eq!((answer.as_str(), effect), ("tame", Effect::ReadOnly), "{method}"),
                Err(error) => {
                    assert_eq!((error.outcome(), effect), (Outcome::Unknown, Effect::Write), "{error}");
                    assert_eq!(error.attempts().len(), 1, "{method}: not replayed");
                    assert!(exit(&error).await.group_gone, "{method}");
                }
            }
            once.is_well().await;
        }
    }
}

#[tokio::test]
async fn a_child_that_answers_and_exits_has_answered_and_the_next_call_starts_another() {
    for (method, answer) in [("last", "bye"), ("cut", "whole")] {
        for effect in [Effect::ReadOnly, Effect::Write] {
            let once = Once::new();
            assert_eq!(once.send(method, effect).await.unwrap(), answer);
            // A pipe may still take what nobody reads any more: a read is asked again then.
            assert_eq!(once.send("echo", Effect::ReadOnly).await.unwrap(), "tame");
            once.is_well().await;
        }
    }
}

#[tokio::test]
async fn a_grandchild_that_keeps_stdout_open_holds_up_neither_reads_nor_writes() {
    for effect in [Effect::ReadOnly, Effect::Write] {
        let once = Once::new();
        let grandchild = once.send("grandchild", effect).await.unwrap().parse().unwrap();
        assert!(is_alive(grandchild));
        match once.send("kill", effect).await {
            Ok(answer) => assert_eq!((answer.as_str(), effect), ("tame", Effect::ReadOnly)),
            Err(error) => {
                assert_eq!((error.outcome(), effect), (Outcome::Unknown, Effect::Write));
                assert!(exit(&error).await.group_gone);
            }
        }
        assert!(!is_alive(grandchild));
        once.is_well().await;
    }
}

#[tokio::test]
async fn the_end_of_the_whole_group_is_the_fence_of_a_write_and_its_replay_comes_after_it() {
    let (tell, mut told) = mpsc::unbounded_channel();
    let once = Once::with(|builder| {
        builder.check(move |doubt: InDoubt<Request, Response>| {
            let _ = tell.send(doubt.fence().map(ToString::to_string));
            async move {
                doubt.probe(Request::new("echo", ())?.read_only()).await?;
                Ok(doubt.not_landed())
            }
        })
    });
    let grandchild = once.send("grandchild", Effect::Write).await.unwrap().parse().unwrap();
    assert_eq!(once.send("kill", Effect::Write).await.unwrap(), "tame");
    assert!(!is_alive(grandchild));
    let fence = told.recv().await.unwrap();
    assert_eq!(fence.as_deref(), Some("observed: the server's process group is gone"));
    once.is_well().await;
}

#[tokio::test]
async fn stderr_that_fills_its_pipe_stops_neither_a_read_nor_a_write() {
    for effect in [Effect::ReadOnly, Effect::Write] {
        let once = Once::new();
        assert_eq!(once.send("noise", effect).await.unwrap(), "200");
        assert_eq!(once.stack.generation(), Some(1));
    }
}

#[tokio::test]
async fn a_child_that_closes_its_stdin_hangs_no_call_beyond_its_deadline() {
    for effect in [Effect::ReadOnly, Effect::Write] {
        let once = Once::new();
        assert_eq!(once.send("close_stdin", effect).await.unwrap(), "0");
        // Either the pipe is broken, and nothing was sent; or it took the call before the shell closed it.
        match once.send_within("echo", effect, Duration::from_secs(2)).await {
            Ok(answer) => assert_eq!(answer, "tame"),
            Err(error) => {
                let unheard = if effect.is_write() { Outcome::Unknown } else { Outcome::NoAnswer };
                assert_eq!(error.outcome(), unheard, "{error}");
            }
        }
        once.is_well().await;
    }
}

#[tokio::test]
async fn a_long_request_that_is_cut_by_a_kill_is_not_done_if_a_write_and_asked_again_if_a_read() {
    for effect in [Effect::ReadOnly, Effect::Write] {
        let once = Once::new();
        let child = once.send("pid", Effect::ReadOnly).await.unwrap().parse().unwrap();
        let long = Request::new("pay", [&"x".repeat(1 << 20)]).unwrap().as_effect(effect);
        let kill = async {
            has_stopped(child).await;
            let child = rustix::process::Pid::from_raw(child).unwrap();
            rustix::process::kill_process(child, rustix::process::Signal::KILL).unwrap();
        };
        let (stop, long, ()) = tokio::join!(once.send("stop", Effect::ReadOnly), once.stack.send(long), kill);
        assert_eq!(stop.unwrap(), "tame", "a read that was in flight too");
        match long {
            Ok(answer) => {
                assert_eq!((answer.parse::<String>().unwrap().as_str(), effect), ("tame", Effect::ReadOnly));
            }
            Err(error) => {
                assert_eq!((error.outcome(), effect), (Outcome::NotDone, Effect::Write), "{error}");
                assert_eq!((error.delivery(), error.attempts().len()), (Delivery::NotProcessed, 1));
            }
        }
        once.is_well().await;
    }
}

#[tokio::test]
async fn a_thousand_reads_in_flight_at_the_end_of_a_child_are_answered_by_the_next() {
    // The first reads them all and answers none.
    let hoard = "if ! [ -e \"$once\" ]; then : >\"$once\"; n=0; \
        while [ $n -lt 1000 ]; do read -r line; n=$((n+1)); done; kill -KILL $$; fi";
    let folder = tempfile::tempdir().unwrap();
    let mut command = command(hoard, "");
    command.env("once", folder.path().join("once"));
    let stack = Stack::builder(stdio::child(command)).deadline(Duration::from_secs(120)).build().unwrap();
    let stack = std::sync::Arc::new(stack);
    let calls: Vec<_> = (0..1_000)
        .map(|_| {
            let stack = stack.clone();
            tokio::spawn(async move { stack.send(Request::new("get", ()).unwrap().read_only()).await })
        })
        .collect();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap().parse::<String>().unwrap(), "tame");
    }
    assert_eq!(stack.generation(), Some(2), "one reconnect");
}

#[tokio::test]
async fn a_handshake_of_a_child_that_never_answers_ends_at_the_connect_timeout() {
    let silent = server().handshake(|client| async move {
        client.request(Request::new("stop", ())?).await?;
        Ok(())
    });
    let stack = Stack::builder(silent)
        .deadline(DEADLINE)
        .reconnect(ReconnectLayer::once().connect_timeout(Duration::from_millis(200)))
        .build()
        .unwrap();
    let start = std::time::Instant::now();
    let error = stack.send(Request::new("pay", ()).unwrap()).await.unwrap_err();
    assert!(matches!(error.cause(), Cause::ConnectFailed(_)), "{error}");
    assert_eq!(error.outcome(), Outcome::NotDone);
    assert!(
        error.to_string().ends_with("; the server was started and has not ended the handshake"),
        "{error}"
    );
    assert!(start.elapsed() < DEADLINE / 2, "{:?}", start.elapsed());
}

#[tokio::test]
async fn a_stack_names_the_handshakes_error_and_its_reader_finds_the_servers_last_words() {
    let command = command("read -r line; echo 'no license' >&2; exit 4", "");
    let stack = Stack::builder(mcp::stdio(command)).retry(RetryReadOnly.attempts(1)).build().unwrap();
    let error = stack.send(Request::new("tools/list", ()).unwrap()).await.unwrap_err();
    let text = "cannot connect: the connection closed during the handshake";
    let ending = "exit status: 4; its stderr is in the `HandshakeError`";
    assert_eq!(error.to_string(), format!("not done: tools/list: {text} ({ending})"));
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
    let text = error.to_string();
    let rest = text.strip_prefix("not done: tools/list: the deadline passed; no connection yet").unwrap();
    // On a busy machine it is not started yet.
    assert!(matches!(rest, "" | "; the server was started and has not answered `server/discover`"), "{text}");
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
