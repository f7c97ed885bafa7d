//! Servers that run as child processes and speak JSON-RPC over their standard input and output.
//!
//! [`child`] is the connector: a `Service<()>` whose response is a [`jsonrpc::Client`], which
//! [`ReconnectLayer`](crate::ReconnectLayer) and [`Stack`](crate::Stack) take. It starts the command, and
//! starts it again for each new connection. [`mcp::stdio`](crate::mcp::stdio) is the same for MCP servers.
//!
//! # How a child ends
//!
//! On Unix each child leads a process group of its own, and the whole group ends with it. When the child
//! exits, when it closes its standard output, when the connection is closed or nobody holds it any more, then
//! its standard input is closed, and what is left of the group after a short grace gets SIGTERM and, after
//! another, SIGKILL ([`Child::shutdown_grace`]). A group that is gone costs no waiting. When a runtime shuts
//! down, the groups of its children are killed at once. When this process itself is killed, its children see
//! their standard input end and nothing more; nor does a terminal's Ctrl-C reach them.
//!
//! The next child starts only when the last one's group is gone, because two live servers on the same files
//! lose writes. If it cannot be ended within the bounds, the next one starts all the same and the overlap is
//! reported. So one connector has one child at a time: where several are wanted, use several connectors. To
//! connect while the last connection is still in use waits those bounds in vain.
//!
//! A process that leaves the group (`setsid`, a daemon) is not seen any more, and not ended.
//!
//! Elsewhere than on Unix the child alone is ended and reaped, and its exit is never a fence.
//!
//! # Where to look when a child does not answer
//!
//! A call then ends at its deadline and says no more. If the child prints to its standard output what is no JSON-RPC, the
//! first such line of a connection is a warning in the log (`tracing`, target `goaround`), and
//! [`Client::ignored`](jsonrpc::Client::ignored) counts them all, of the client that a
//! [`handshake`](Child::handshake) is given. What it prints to its standard error is in the event of its end
//! ([`Incident::stderr`](crate::event::Incident::stderr)).

mod group;
mod lookup;
mod process;
mod tail;

use std::{
    borrow::Cow,
    fmt, io,
    process::Stdio,
    sync::{Arc, Mutex, MutexGuard, PoisonError, atomic::AtomicU64},
    task::{Context, Poll},
    time::Duration,
};

use tokio::process::Command;
use tower::Service;

use crate::{
    BoxError,
    connection::{BoxFuture, Reaper, UnderWay},
    jsonrpc::{self, Builder, Handler, Process, Request},
    write_safety::ledger::Registrar,
};
use process::{End, Grace, Pipes};

/// Whether the process group of that number is gone, which no child of ours need be.
#[cfg(target_os = "linux")]
pub(crate) fn group_is_gone(leader: u32) -> bool {
    group::Group::of(Some(leader)).is_gone()
}

/// A connector that starts `command` for each connection.
///
/// Its standard streams become pipes and, on Unix, it gets a process group of its own; what the command says
/// of these is overwritten. Arguments, environment and directory are the command's.
///
/// ```no_run
/// # async fn connect() -> Result<(), goaround::BoxError> {
/// use goaround::{jsonrpc::Request, stdio};
/// use tower::Service;
///
/// let mut connector = stdio::child(tokio::process::Command::new("doctool"));
/// let client = connector.call(()).await?;
/// let answer = client.request(Request::new("doc/list", ())?).await?;
/// # Ok(())
/// # }
/// ```
pub fn child(command: Command) -> Child {
    Child::new(command)
}

/// Why a child process could not be started. It names the program, never its arguments or environment.
#[derive(Debug, thiserror::Error)]
#[error("cannot start {program:?}: {}", why(.error))]
pub struct SpawnError {
    program: String,
    error: io::Error,
}

impl SpawnError {
    /// The program.
    pub fn program(&self) -> &str {
        &self.program
    }

    /// What the operating system says.
    pub fn kind(&self) -> io::ErrorKind {
        self.error.kind()
    }

    fn of(command: &Command, error: io::Error) -> Self {
        let program = command.as_std().get_program().to_string_lossy().into_owned();
        Self { program, error }
    }
}

/// What the operating system says, where it was asked; else only the search for the program has failed.
fn why(error: &io::Error) -> Cow<'static, str> {
    match (error.raw_os_error(), error.kind()) {
        (None, io::ErrorKind::NotFound) => "no such program in PATH".into(),
        (None, io::ErrorKind::PermissionDenied) => "it is no program that may be run".into(),
        _ => error.to_string().into(),
    }
}

/// The stack around a child process. Not the connection to it, which is a [`jsonrpc::Client`].
pub type Client = crate::Stack<Child, Request, jsonrpc::Response>;

type Configure = Arc<dyn Fn(Builder) -> Builder + Send + Sync>;

/// What is run on each new connection before any call.
type Handshake = Arc<dyn Fn(jsonrpc::Client) -> BoxFuture<Result<(), BoxError>> + Send + Sync>;

/// The connector for child processes. [`child`] makes one.
///
/// As a `Service<()>` it is always ready, and each call starts a child, connects to it and runs the
/// handshake. To drop such a call's future ends the child. Its error is a [`SpawnError`] or the handshake's.
pub struct Child {
    // Shared with the connects under way, for which it has to be mutable.
    command: Arc<Mutex<Command>>,
    /// The child that was started last; held by whoever waits for its end, so that one child starts at a time.
    last: Arc<tokio::sync::Mutex<Option<End>>>,
    exit_ends_effects: bool,
    grace: Grace,
    stderr_lines: usize,
    configure: Vec<Configure>,
    handshake: Option<Handshake>,
    registrar: Option<Registrar>,
    under_way: UnderWay,
}

impl Child {
    fn new(mut command: Command) -> Self {
        prepare(&mut command);
        Self {
            command: Arc::new(Mutex::new(command)),
            last: Arc::default(),
            exit_ends_effects: false,
            grace: Grace { stdin_close: Duration::from_millis(500), term: Duration::from_millis(500) },
            stderr_lines: 20,
            configure: Vec::new(),
            handshake: None,
            registrar: None,
            under_way: UnderWay::default(),
        }
    }

    /// Declares that the process tree makes its effects itself and locally: once the process group is gone, no
    /// write that was given to it can still land. Only with this is the child's end a
    /// [`Fence`](crate::write_safety::Fence).
    ///
    /// It is not so for `docker run`, `ssh`, bridges to HTTP servers and clients of remote APIs: what they
    /// handed on goes on without them. Nor is it for servers that leave work to a process outside their group.
    /// Ignored elsewhere than on Unix.
    #[must_use]
    pub fn exit_ends_effects(mut self) -> Self {
        self.exit_ends_effects = cfg!(unix);
        self
    }

    /// What to do on each new connection before any call: log in, agree on a version. It is given the bare
    /// connection, a [`jsonrpc::Client`]. If it fails, or the connect is given up while it runs, the child is
    /// ended, and the calls that waited for the connection fail with
    /// [`Cause::ConnectFailed`](crate::Cause::ConnectFailed): they were not sent, so that a write is not done.
    ///
    /// It has no time limit of its own; the connect timeout of the
    /// [`ReconnectLayer`](crate::ReconnectLayer) covers it.
    ///
    /// ```
    /// use goaround::{jsonrpc::{self, Request}, stdio};
    ///
    /// let doctool = stdio::child(tokio::process::Command::new("doctool")).handshake(
    ///     |connection: jsonrpc::Client| async move {
    ///         connection.request(Request::new("hello", [1])?).await?;
    ///         Ok(())
    ///     },
    /// );
    /// ```
    #[must_use]
    pub fn handshake<F, Fut>(mut self, handshake: F) -> Self
    where
        F: Fn(jsonrpc::Client) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), BoxError>> + Send + 'static,
    {
        self.handshake = Some(Arc::new(move |client| Box::pin(handshake(client))));
        self
    }

    /// How long a child may take to end by itself: `stdin_close` after its standard input was closed, then
    /// `term` after SIGTERM; then it is killed. By default 500 ms each. A group that a kill does not end
    /// within one second more is left alone.
    #[must_use]
    pub fn shutdown_grace(mut self, stdin_close: Duration, term: Duration) -> Self {
        self.grace = Grace { stdin_close, term };
        self
    }

    /// How many of the last lines of the child's standard error are kept for reports: by default 20, at most
    /// 128, and 512 bytes of each. It is read to its end in any case.
    #[must_use]
    pub fn stderr_lines(mut self, lines: usize) -> Self {
        self.stderr_lines = lines;
        self
    }

    /// A read-only request that shows whether a silent server is still there, and how long its answer may take.
    /// See [`Builder::probe`].
    #[must_use]
    pub fn probe(self, request: Request, timeout: Duration) -> Self {
        self.configure(move |builder| builder.probe(request.clone(), timeout))
    }

    /// Who answers the server's own requests and gets its notifications, on every connection. Without one,
    /// requests are answered with "method not found".
    #[must_use]
    pub fn handler(self, handler: impl Handler) -> Self {
        let handler = Arc::new(handler);
        self.configure(move |builder| builder.handler(handler.clone()))
    }

    /// What to tell the server when nobody waits for an answer any more. See [`Builder::cancel_with`]: as it stands
    /// that is MCP's `notifications/cancelled`.
    #[must_use]
    pub fn cancel_with(self, cancel: impl Fn(u64, &str) -> Option<Request> + Send + Sync + 'static) -> Self {
        let cancel = Arc::new(cancel);
        self.configure(move |builder| {
            let cancel = Arc::clone(&cancel);
            builder.cancel_with(move |id, method| cancel(id, method))
        })
    }

    /// Never tells the server that nobody waits for an answer any more: for servers that take no notification that
    /// they do not know.
    #[must_use]
    pub fn without_cancel(self) -> Self {
        self.configure(Builder::without_cancel)
    }

    /// The size limit of one message from the server, in bytes. See [`Builder::max_line`].
    #[must_use]
    pub fn max_line(self, bytes: usize) -> Self {
        self.configure(move |builder| builder.max_line(bytes))
    }

    /// How many calls may be in flight at once. See [`Builder::max_in_flight`].
    #[must_use]
    pub fn max_in_flight(self, calls: usize) -> Self {
        self.configure(move |builder| builder.max_in_flight(calls))
    }

    fn configure(mut self, configure: impl Fn(Builder) -> Builder + Send + Sync + 'static) -> Self {
        self.configure.push(Arc::new(configure));
        self
    }

    /// Whether the options make sense, and the program is there, as far as that can be seen without starting
    /// it.
    pub(crate) fn validate(&self) -> Result<(), BoxError> {
        if let Some(wrong) = self.builder().wrong() {
            return Err(wrong.into());
        }
        let command = lock(&self.command);
        Ok(lookup::find(&command).map_err(|error| SpawnError::of(&command, error))?)
    }

    /// Enters each child, before anything is sent to it.
    pub(crate) fn register_with(&mut self, registrar: Registrar) {
        self.registrar = Some(registrar);
    }

    /// Waits, within bounds, until the child that was started last is gone.
    pub(crate) fn reaper(&self) -> Reaper {
        let last = Arc::clone(&self.last);
        Arc::new(move || {
            let last = Arc::clone(&last);
            Box::pin(async move {
                if let Some(last) = last.lock().await.as_mut() {
                    last.gone().await;
                }
            })
        })
    }

    fn builder(&self) -> Builder {
        let builder = jsonrpc::Client::builder();
        // Elsewhere tokio buffers what is written to a child.
        #[cfg(unix)]
        let builder = builder.exact_writes();
        self.configure.iter().fold(builder, |builder, next| next(builder))
    }

    /// The same connector once more: both start one child at a time between them.
    pub(crate) fn share(&self) -> Self {
        Self {
            command: self.command.clone(),
            last: self.last.clone(),
            exit_ends_effects: self.exit_ends_effects,
            grace: self.grace,
            stderr_lines: self.stderr_lines,
            configure: self.configure.clone(),
            handshake: self.handshake.clone(),
            registrar: self.registrar.clone(),
            under_way: self.under_way.clone(),
        }
    }

    /// What is known of the connect that is under way.
    pub(crate) fn under_way(&self) -> UnderWay {
        self.under_way.clone()
    }

    /// Starts a child and connects to it, without a handshake. `with` is the last word on the connection.
    pub(crate) fn open(&self, with: impl FnOnce(Builder) -> Builder) -> BoxFuture<Result<Opened, BoxError>> {
        let builder = with(self.builder());
        let starting = self.start();
        Box::pin(async move {
            let (pipes, process) = starting.await?;
            Ok(Opened::new(builder.process(process).connect(pipes)))
        })
    }

    /// Starts a child, once the last one is gone.
    pub(crate) fn start(&self) -> BoxFuture<Result<(Pipes, Process), BoxError>> {
        let command = self.command.clone();
        let last = self.last.clone();
        let (grace, stderr_lines, ends_effects) = (self.grace, self.stderr_lines, self.exit_ends_effects);
        let registrar = self.registrar.clone();
        Box::pin(async move {
            let mut last = last.lock().await;
            let overlapped = match last.as_mut() {
                Some(last) => !last.gone().await,
                None => false,
            };
            let started = {
                let mut command = lock(&command);
                process::spawn(&mut command, grace, stderr_lines)
                    .map_err(|error| SpawnError::of(&command, error))?
            };
            let process = Process {
                exited: started.exited,
                exit: started.end.exit.clone(),
                ends_effects,
                stderr: Arc::new(move || started.stderr.lines()),
                overlapped,
            };
            *last = Some(started.end);
            // Before anything can be sent to it. If that fails it is ended, as its pipes are dropped.
            if let (Some(registrar), Some(pid)) = (registrar, started.pid) {
                registrar.started(pid, started.born, ends_effects).await?;
            }
            Ok((started.pipes, process))
        })
    }
}

fn prepare(command: &mut Command) {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true);
    #[cfg(unix)]
    command.process_group(0);
}

/// A new connection whose handshake is not done: it closes when this is dropped, whoever holds clones of it.
pub(crate) struct Opened(Option<jsonrpc::Client>);

impl Opened {
    pub(crate) fn new(client: jsonrpc::Client) -> Self {
        Self(Some(client))
    }

    pub(crate) fn client(&self) -> &jsonrpc::Client {
        self.0.as_ref().expect("it is there until it is kept")
    }

    /// The handshake is done.
    pub(crate) fn keep(mut self) -> jsonrpc::Client {
        self.0.take().expect("it is kept once")
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        if let Some(client) = &self.0 {
            client.close();
        }
    }
}

fn lock(command: &Mutex<Command>) -> MutexGuard<'_, Command> {
    command.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Service<()> for Child {
    type Response = jsonrpc::Client;
    type Error = BoxError;
    type Future = BoxFuture<Result<jsonrpc::Client, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let unread = Arc::new(AtomicU64::new(0));
        let counted = Arc::clone(&unread);
        let opening = self.open(|builder| builder.count_unread(counted));
        let (handshake, under_way) = (self.handshake.clone(), self.under_way());
        Box::pin(async move {
            let opened = opening.await?;
            if let Some(handshake) = handshake {
                let _until_done = under_way.begin(true, unread);
                handshake(opened.client().clone()).await?;
            }
            Ok(opened.keep())
        })
    }
}

impl fmt::Debug for Child {
    // The command's arguments and environment may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Child")
            .field("program", &lock(&self.command).as_std().get_program())
            .field("exit_ends_effects", &self.exit_ends_effects)
            .field("grace", &self.grace)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    #[cfg(unix)]
    use crate::connection::Connection;

    fn is_send_and_sync<T: Send + Sync + 'static>(_: &T) {}

    #[test]
    fn an_unknown_command_is_seen_before_it_is_started() {
        let known = child(Command::new(std::env::current_exe().unwrap()));
        is_send_and_sync(&known);
        known.validate().unwrap();
        if cfg!(unix) {
            let mut command = Command::new("goaround-no-such-program");
            command.arg("secret");
            let error = child(command).validate().unwrap_err();
            let error = error.downcast_ref::<SpawnError>().unwrap();
            assert_eq!(error.program(), "goaround-no-such-program");
            let text = "cannot start \"goaround-no-such-program\": no such program in PATH";
            assert_eq!((error.to_string().as_str(), error.kind()), (text, io::ErrorKind::NotFound));
            let error = child(Command::new("/tmp")).validate().unwrap_err();
            assert!(error.to_string().ends_with("it is no program that may be run"), "{error}");
            let error = child(Command::new("/no/such/program")).validate().unwrap_err();
            assert!(error.to_string().contains("os error"), "{error}");
        }
    }

    #[test]
    fn an_option_that_makes_no_sense_is_seen_before_it_is_started() {
        let command = Command::new(std::env::current_exe().unwrap());
        let error = child(command).max_in_flight(0).validate().unwrap_err();
        assert!(error.to_string().contains("max_in_flight"), "{error}");
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn a_child_that_is_still_there_after_the_bounds_is_an_overlap() {
        let mut command = Command::new("sh");
        command.arg("-c").arg("read line");
        let mut connector = child(command).shutdown_grace(Duration::ZERO, Duration::ZERO);
        let first = connector.call(()).await.unwrap();
        assert!(!Connection::overlapped(&first) && Connection::has_process(&first));
        // It is in use, so that nobody ends it.
        let second = connector.call(()).await.unwrap();
        assert!(Connection::overlapped(&second));
        Connection::close(&first).await;
        Connection::close(&second).await;
        assert!(!Connection::overlapped(&connector.call(()).await.unwrap()));
    }

    #[cfg(unix)]
    #[tokio::test]
    async fn the_last_lines_of_stderr_are_there_when_the_exit_is_known() {
        let mut command = Command::new("sh");
        command.arg("-c").arg("echo one >&2; echo two >&2; echo three >&2; exit 1");
        let client = child(command).stderr_lines(2).call(()).await.unwrap();
        client.closed().await.exited().await.unwrap();
        assert_eq!(Connection::stderr(&client), ["two", "three"]);
    }
}
