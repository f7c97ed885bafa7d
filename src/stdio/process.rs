//! One child process, from its start to the end of its group.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    process::{Child, ChildStdin, ChildStdout, Command},
    sync::{oneshot, watch},
    task::JoinHandle,
    time::{sleep, timeout},
};

use super::{group::Group, tail::Tail};
use crate::{Exit, connection::BoxFuture, write_safety::ledger::ServerProcess};

/// How long a killed group may take to vanish.
const VANISH: Duration = Duration::from_secs(1);

/// How long the rest of the standard error is waited for, once nobody is left who writes to it (but for
/// processes that left the group).
const LAST_WORDS: Duration = Duration::from_millis(50);

/// How long a child is given to end by itself.
#[derive(Clone, Copy, Debug)]
pub(super) struct Grace {
    /// After its standard input was closed.
    pub(super) stdin_close: Duration,
    /// After SIGTERM.
    pub(super) term: Duration,
}

impl Grace {
    /// Until when a shutdown that has begun has ended, in any case.
    fn bound(self) -> Duration {
        let slack = VANISH + VANISH / 2;
        self.stdin_close.saturating_add(self.term).saturating_add(slack)
    }
}

/// A child that was started, and the task that sees to its end.
pub(super) struct Running {
    pub(super) pid: Option<u32>,
    /// When it started, as the system counts. Read before anybody can reap it.
    pub(super) born: Option<u64>,
    pub(super) pipes: Pipes,
    /// Resolves when the child itself has exited.
    pub(super) exited: BoxFuture<()>,
    pub(super) end: End,
    pub(super) stderr: Tail,
}

/// Starts the command with its pipes, in a group of its own.
pub(super) fn spawn(command: &mut Command, grace: Grace, stderr_lines: usize) -> io::Result<Running> {
    let mut child = command.spawn()?;
    let pid = child.id();
    let born = pid.and_then(ServerProcess::born);
    let group = Group::of(pid);
    // From here on the group dies with whatever is dropped.
    let guard = Guard { group, armed: true };
    let (Some(stdin), Some(stdout), Some(stderr)) =
        (child.stdin.take(), child.stdout.take(), child.stderr.take())
    else {
        return Err(io::Error::other("the child has no pipes"));
    };

    let tail = Tail::new(stderr_lines);
    let (tell_closed, closed) = oneshot::channel();
    let (tell_exited, exited) = oneshot::channel();
    let (tell_exit, exit) = watch::channel(None);
    let supervisor = Supervisor {
        guard,
        child,
        exited: Some(tell_exited),
        stderr: tokio::spawn(tail.clone().read(stderr)),
        grace,
    };
    tokio::spawn(supervisor.run(closed, tell_exit));

    Ok(Running {
        pid,
        born,
        pipes: Pipes { stdin: Some(stdin), stdout, _closed: tell_closed },
        exited: Box::pin(async {
            let _ = exited.await;
        }),
        end: End { exit, group, bound: grace.bound() },
        stderr: tail,
    })
}

/// How the last child ends.
#[derive(Clone)]
pub(super) struct End {
    pub(super) exit: watch::Receiver<Option<Exit>>,
    group: Group,
    bound: Duration,
}

impl End {
    /// Waits, within bounds, until the group is gone; `false` if it is still there.
    pub(super) async fn gone(&mut self) -> bool {
        let waited = timeout(self.bound, self.exit.wait_for(Option::is_some)).await;
        match waited.map(|exit| exit.map(|exit| exit.clone())) {
            Ok(Ok(Some(exit))) if exit.group_gone => true,
            // Where there are no groups, the child is all that counts.
            Ok(Ok(Some(exit))) if cfg!(not(unix)) => exit.status.is_some(),
            Ok(Ok(_)) => self.group.is_gone(),
            // Its runtime was shut down, and the group killed with it.
            Ok(Err(_)) => timeout(VANISH, vanished(self.group)).await.is_ok(),
            Err(_) => false,
        }
    }
}

async fn vanished(group: Group) {
    let mut pause = Duration::from_millis(1);
    while !group.is_gone() {
        sleep(pause).await;
        pause = (pause * 2).min(Duration::from_millis(20));
    }
}

// ===== impl Supervisor =====

/// Owns the child. However it ends, the group goes with it.
struct Supervisor {
    // Dropped first, before the child is reaped and its number free.
    guard: Guard,
    child: Child,
    exited: Option<oneshot::Sender<()>>,
    stderr: JoinHandle<()>,
    grace: Grace,
}

impl Supervisor {
    async fn run(mut self, closed: oneshot::Receiver<Never>, exit: watch::Sender<Option<Exit>>) {
        self.until_it_ends(closed).await;
        let gone = self.end_group().await;
        self.guard.armed = !gone;

        // Its last words belong into the report of its end.
        let _ = timeout(LAST_WORDS, &mut self.stderr).await;
        self.stderr.abort();
        let status = self.child.try_wait().ok().flatten();
        exit.send_replace(Some(Exit::new(status, gone && cfg!(unix))));
    }

    /// Waits until the child has exited or its connection has let go of the pipes, since it is closed or nobody
    /// holds it any more.
    async fn until_it_ends(&mut self, mut closed: oneshot::Receiver<Never>) {
        let mut exited = pin!(self.child_exited());
        poll_fn(|cx| match exited.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(()),
            Poll::Pending => Pin::new(&mut closed).poll(cx).map(drop),
        })
        .await;
    }

    /// Waits for the child's own exit, and tells of it.
    async fn child_exited(&mut self) {
        // An error means that somebody else has reaped it.
        let _ = self.child.wait().await;
        if let Some(exited) = self.exited.take() {
            let _ = exited.send(());
        }
    }

    /// Ends what is left of the group: by the closed standard input, SIGTERM, SIGKILL. `false` if it is still
    /// there after all that.
    async fn end_group(&mut self) -> bool {
        let Grace { stdin_close, term } = self.grace;
        if timeout(stdin_close, self.child_exited()).await.is_ok() && self.guard.group.is_gone() {
            return true;
        }
        self.guard.group.terminate();
        if timeout(term, self.group_gone()).await.is_ok() {
            return true;
        }
        self.guard.group.kill();
        // Where there are no groups, this is the one that counts.
        let _ = self.child.start_kill();
        timeout(VANISH, self.group_gone()).await.is_ok()
    }

    async fn group_gone(&mut self) {
        self.child_exited().await;
        vanished(self.guard.group).await;
    }
}

/// Kills the group when it is dropped, since a runtime that shuts down drops tasks where they stand.
struct Guard {
    group: Group,
    armed: bool,
}

impl Drop for Guard {
    fn drop(&mut self) {
        if self.armed {
            self.group.kill();
        }
    }
}

// ===== impl Pipes =====

enum Never {}

/// The child's standard input and output as one transport. Dropping it tells the supervisor.
pub(crate) struct Pipes {
    stdin: Option<ChildStdin>,
    stdout: ChildStdout,
    _closed: oneshot::Sender<Never>,
}

impl Pipes {
    fn poll_stdin<T>(
        &mut self,
        poll: impl FnOnce(Pin<&mut ChildStdin>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        match &mut self.stdin {
            Some(stdin) => poll(Pin::new(stdin)),
            None => Poll::Ready(Err(io::ErrorKind::BrokenPipe.into())),
        }
    }
}

impl AsyncRead for Pipes {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stdout).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Pipes {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_stdin(|stdin| stdin.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_stdin(|stdin| stdin.poll_write_vectored(cx, bytes))
    }

    fn is_write_vectored(&self) -> bool {
        self.stdin.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_stdin(|stdin| stdin.poll_flush(cx))
    }

    /// Closes the child's standard input.
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.stdin.is_some() {
            ready!(self.poll_stdin(|stdin| stdin.poll_flush(cx)))?;
            self.stdin = None;
        }
        Poll::Ready(Ok(()))
    }
}

#[cfg(all(test, unix))]
mod tests {
    use std::os::unix::process::ExitStatusExt;

    use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};

    use super::*;

    const GRACE: Grace = Grace { stdin_close: Duration::from_millis(200), term: Duration::from_millis(200) };

    /// Longer than any test may take: what is waited for comes, or the test fails.
    const FOREVER: Duration = Duration::from_secs(3600);

    fn sh(script: &str) -> Running {
        sh_with(script, GRACE)
    }

    fn sh_with(script: &str, grace: Grace) -> Running {
        let mut command = Command::new("sh");
        command.arg("-c").arg(script);
        super::super::prepare(&mut command);
        spawn(&mut command, grace, 5).unwrap()
    }

    async fn exit(end: &mut End) -> Exit {
        let exit = end.exit.wait_for(Option::is_some).await.unwrap();
        exit.clone().unwrap()
    }

    async fn first_line(pipes: Pipes) -> (String, BufReader<Pipes>) {
        let mut pipes = BufReader::new(pipes);
        let mut line = String::new();
        pipes.read_line(&mut line).await.unwrap();
        (line.trim_end().to_owned(), pipes)
    }

    #[tokio::test]
    async fn a_killed_child_ends_with_its_signal_and_without_any_grace() {
        let mut running = sh_with("kill -KILL $$", Grace { stdin_close: FOREVER, term: FOREVER });
        running.exited.await;
        let exit = exit(&mut running.end).await;
        assert_eq!(exit.status.unwrap().signal(), Some(9));
        assert!(exit.group_gone && running.end.gone().await);
    }

    #[tokio::test]
    async fn a_child_that_ends_with_its_input_is_sent_no_signal() {
        let mut running = sh_with(
            "trap 'exit 7' TERM; read line; echo \"$line\"; read end; echo bye >&2; exit 3",
            Grace { stdin_close: FOREVER, term: FOREVER },
        );
        running.pipes.write_all(b"hello\n").await.unwrap();
        let (line, mut pipes) = first_line(running.pipes).await;
        assert_eq!(line, "hello");
        pipes.shutdown().await.unwrap();
        let mut rest = String::new();
        pipes.read_to_string(&mut rest).await.unwrap();
        assert!(pipes.write_all(b"x").await.is_err());
        let exit = exit(&mut running.end).await;
        assert_eq!((exit.status.unwrap().code(), exit.group_gone), (Some(3), true));
        assert_eq!(running.stderr.lines(), ["bye"]);
    }

    #[tokio::test]
    async fn a_child_that_ignores_everything_is_killed() {
        let running = sh("trap '' TERM; echo ready; while :; do sleep 1000; done");
        let (line, pipes) = first_line(running.pipes).await;
        assert_eq!(line, "ready");
        drop(pipes);
        let mut end = running.end;
        let exit = exit(&mut end).await;
        assert_eq!((exit.status.unwrap().signal(), exit.group_gone), (Some(9), true));
    }

    #[tokio::test]
    async fn a_child_that_heeds_sigterm_is_not_killed() {
        let grace = Grace { stdin_close: Duration::ZERO, term: FOREVER };
        let running = sh_with("trap 'exit 5' TERM; echo ready; while :; do sleep 0.01; done", grace);
        let (_, pipes) = first_line(running.pipes).await;
        drop(pipes);
        let mut end = running.end;
        assert_eq!(exit(&mut end).await.status.unwrap().code(), Some(5));
    }

    #[tokio::test]
    async fn a_grandchild_that_outlives_the_child_is_ended_and_only_then_the_exit_known() {
        let running = sh_with(
            "(trap '' TERM; while :; do sleep 1000; done) & echo $!; read line",
            Grace { stdin_close: FOREVER, term: Duration::from_millis(50) },
        );
        let (grandchild, mut pipes) = first_line(running.pipes).await;
        pipes.write_all(b"end\n").await.unwrap();
        running.exited.await;
        let mut end = running.end;
        let exit = exit(&mut end).await;
        assert_eq!((exit.status.unwrap().code(), exit.group_gone), (Some(0), true));
        assert!(!is_alive(&grandchild));
    }

    #[cfg(target_os = "linux")]
    #[tokio::test]
    async fn the_dead_that_nobody_reaps_do_not_count() {
        use std::os::unix::process::CommandExt;

        let running = sh_with("echo $$; read line; exit 0", Grace { stdin_close: FOREVER, term: FOREVER });
        let (leader, pipes) = first_line(running.pipes).await;
        // A process of the group whose parent, this test, does not reap it.
        let mut zombie =
            std::process::Command::new("true").process_group(leader.parse().unwrap()).spawn().unwrap();
        drop(pipes);
        let mut end = running.end;
        assert!(exit(&mut end).await.group_gone);
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", zombie.id())).unwrap();
        assert!(stat.contains(") Z "), "{stat}");
        zombie.wait().unwrap();
    }

    #[tokio::test]
    async fn stderr_that_fills_its_pipe_stops_nobody() {
        let script = "i=0; while [ $i -lt 3000 ]; do \
             echo 0123456789012345678901234567890123456789012345678901234567890123456789 >&2; \
             i=$((i+1)); done; echo last >&2; echo done; read line";
        let running = sh(script);
        let (line, pipes) = first_line(running.pipes).await;
        assert_eq!(line, "done");
        drop(pipes);
        let mut end = running.end;
        exit(&mut end).await;
        let lines = running.stderr.lines();
        assert_eq!((lines.len(), lines[4].as_str()), (5, "last"));
    }

    #[test]
    fn a_runtime_that_shuts_down_kills_the_group() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let (child, mut end) = runtime.block_on(async {
            let running = sh("trap '' TERM; sleep 1000 & echo $!; while :; do sleep 1000; done");
            let (line, pipes) = first_line(running.pipes).await;
            // The pipes outlive the runtime, so that only its end can be the reason.
            std::mem::forget(pipes);
            (line, running.end)
        });
        drop(runtime);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        assert!(runtime.block_on(end.gone()));
        assert!(!is_alive(&child));
    }

    fn is_alive(process: &str) -> bool {
        let process = rustix::process::Pid::from_raw(process.parse().unwrap()).unwrap();
        match std::fs::read_to_string(format!("/proc/{process}/stat")) {
            Ok(stat) => !stat.rsplit(')').next().unwrap().trim_start().starts_with(['Z', 'X']),
            Err(_) => cfg!(not(target_os = "linux")) && rustix::process::test_kill_process(process).is_ok(),
        }
    }
}
