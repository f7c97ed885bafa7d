//! How a [`Client`] is set up.

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, atomic::AtomicU64},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite},
    sync::watch,
};

use super::{
    Client, Handler, Notification, Request,
    client::Shared,
    driver::{Driver, Limits},
    handler::AnyHandler,
};
use crate::{Closure, Exit, connection::BoxFuture};

/// Makes the notification that tells the peer that nobody waits for an answer any more.
pub(super) type Cancel = Arc<dyn Fn(u64, &str) -> Option<Request> + Send + Sync>;

/// Who knows whether what a call was taken for by a trusted annotation still holds.
pub(crate) trait Upholds: Send + Sync {
    fn upholds(&self, request: &Request) -> bool;

    /// How often that may have become another answer.
    fn changes(&self) -> u64;
}

/// Which of its requests the peer takes back by that notification: the id as it stood on the wire.
pub(super) type TakenBack = fn(&Notification) -> Option<Box<str>>;

/// Sets up a [`Client`]; made by [`Client::builder`].
///
/// A value that makes no sense, such as a limit of zero, is not an error here: the client refuses each call
/// and names it ([`Refusal::Config`](crate::Refusal::Config)).
#[must_use]
pub struct Builder {
    pub(super) max_line: usize,
    pub(super) max_in_flight: usize,
    pub(super) exact_writes: bool,
    pub(super) handler: Option<Arc<dyn AnyHandler>>,
    pub(super) probe: Option<(Request, Duration)>,
    pub(super) cancel: Option<Cancel>,
    pub(super) taken_back: Option<TakenBack>,
    pub(super) upholds: Option<Arc<dyn Upholds>>,
    pub(super) process: Option<Process>,
    pub(super) dropped_answers: Option<Arc<AtomicU64>>,
    pub(super) ignored: Option<Arc<AtomicU64>>,
    pub(super) unread: Arc<AtomicU64>,
}

/// The process at the other end, as its connector knows it.
pub(crate) struct Process {
    /// The child's own exit. What is in the pipe is then read, and a short time later the connection closes.
    pub(crate) exited: BoxFuture<()>,
    /// The end of the whole process group, for [`Closure::exited`](crate::Closure::exited).
    pub(crate) exit: watch::Receiver<Option<Exit>>,
    /// Whether its effects end with it, as the user declared.
    pub(crate) ends_effects: bool,
    /// The last lines of its standard error.
    pub(crate) stderr: Arc<dyn Fn() -> Vec<String> + Send + Sync>,
    /// Whether the process before it was still there when it was started.
    pub(crate) overlapped: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            max_line: 64 << 20,
            max_in_flight: 65_536,
            exact_writes: false,
            handler: None,
            probe: None,
            cancel: Some(Arc::new(cancelled)),
            taken_back: None,
            upholds: None,
            process: None,
            dropped_answers: None,
            ignored: None,
            unread: Arc::default(),
        }
    }
}

impl Builder {
    /// The longest message that is kept, in bytes; 64 MiB as it stands.
    ///
    /// A longer answer ends its call with [`Cause::AnswerTooLarge`](crate::Cause::AnswerTooLarge) as soon as
    /// its id has been read, without being kept: a write was done and its result is lost. Other messages of
    /// that length are ignored. The connection lives on.
    pub fn max_line(mut self, bytes: usize) -> Self {
        self.max_line = bytes;
        self
    }

    /// How many calls may be queued or wait for an answer at once; 65,536 as it stands. One more is refused
    /// at once ([`Refusal::Overloaded`](crate::Refusal::Overloaded)): nothing of it is sent.
    pub fn max_in_flight(mut self, calls: usize) -> Self {
        self.max_in_flight = calls;
        self
    }

    /// Declares that the transport has written what a write accepted and nothing else, also where a write
    /// fails or has to wait: true of pipes and sockets, not of TLS and other layers that buffer, nor of the
    /// pipes of child processes on Windows.
    ///
    /// Without it, a request is begun once the transport was offered a byte of it, of which that may have kept a copy, and
    /// sent it: an answer to it counts from then on, and at a closure, or at its deadline, it is ambiguous. With it, one is
    /// begun once the transport has accepted a byte of it, and one that was cut at a closure is provably not processed: it
    /// may be handed over again, also if it is a write. What is not begun is provably not sent: it can be withdrawn, and
    /// does not go after its time, though it lies in this client's buffer. A false declaration repeats writes.
    ///
    /// Requests that are made at the same time go in one write. Without the declaration each write that a
    /// [`WriteSafetyLayer`](crate::WriteSafetyLayer) watches over begins one of its own, so that it is not offered while
    /// it lies behind others: on a bare socket that makes many small ones, which `TCP_NODELAY` keeps from waiting for
    /// each other.
    ///
    /// When a request counts as sent, for quarantines, does not depend on it: once the transport has been flushed.
    pub fn exact_writes(mut self) -> Self {
        self.exact_writes = true;
        self
    }

    /// Who answers the peer's requests and takes its notifications. As it stands, requests are answered with
    /// method not found and notifications are ignored.
    pub fn handler(mut self, handler: impl Handler) -> Self {
        self.handler = Some(Arc::new(handler));
        self
    }

    /// A request that changes nothing and that a living peer answers soon, such as MCP's `ping`, by which
    /// the connection judges silence.
    ///
    /// If a call's deadline passes and nothing at all was received since the call was sent, it is sent once.
    /// If still nothing is received within `timeout`, the peer counts as gone and the connection closes: all
    /// calls on it end. Calls with time left postpone that until their deadline, those without a deadline
    /// for at most five minutes; meanwhile no other call is sent. Without a probe, a silent peer is waited
    /// for by each call up to its own deadline, for ever.
    pub fn probe(mut self, request: Request, timeout: Duration) -> Self {
        self.probe = Some((request, timeout));
        self
    }

    /// What to tell the peer when nobody waits for an answer any more: the notification that `cancel` makes
    /// of the call's id on the wire and its method; `None` says nothing.
    ///
    /// As it stands this is MCP's `notifications/cancelled` for everything but `initialize`. It never
    /// reaches another connection than the call's own, and it proves nothing: a call that was cancelled
    /// stays in doubt. `cancel` runs within the connection's task and must return at once.
    pub fn cancel_with(
        mut self,
        cancel: impl Fn(u64, &str) -> Option<Request> + Send + Sync + 'static,
    ) -> Self {
        self.cancel = Some(Arc::new(cancel));
        self
    }

    /// Never tells the peer that nobody waits for an answer any more.
    pub fn without_cancel(mut self) -> Self {
        self.cancel = None;
        self
    }

    /// By which notifications the peer takes a request of its own back: its handler is dropped then, and it gets no
    /// answer.
    pub(crate) fn taken_back_by(mut self, id: TakenBack) -> Self {
        self.taken_back = Some(id);
        self
    }

    /// Who is asked, when a call's turn to be written has come, whether the trusted annotation that it was judged by
    /// still holds, and again after each change as long as it is not begun. One that does not hold is withdrawn
    /// ([`Refusal::EffectChanged`](crate::Refusal::EffectChanged)). Calls that were judged by anything else are not asked
    /// about.
    pub(crate) fn upheld_by(mut self, upholds: Arc<dyn Upholds>) -> Self {
        self.upholds = Some(upholds);
        self
    }

    pub(crate) fn process(mut self, process: Process) -> Self {
        self.process = Some(process);
        self
    }

    /// Where the answers to the peer's requests are counted that are lost with this connection.
    pub(crate) fn count_dropped_answers(mut self, count: Arc<AtomicU64>) -> Self {
        self.dropped_answers = Some(count);
        self
    }

    /// Where the messages of the peer are counted that cannot be used, over all connections of a connector.
    pub(crate) fn count_ignored(mut self, count: Arc<AtomicU64>) -> Self {
        self.ignored = Some(count);
        self
    }

    /// Where those among them are counted that are no JSON-RPC, on this connection.
    pub(crate) fn count_unread(mut self, count: Arc<AtomicU64>) -> Self {
        self.unread = count;
        self
    }

    /// Connects over that transport, by a task on the current tokio runtime.
    ///
    /// Outside of a runtime the client refuses each call.
    pub fn connect<T>(mut self, io: T) -> Client
    where
        T: AsyncRead + AsyncWrite + Send + 'static,
    {
        let runtime = tokio::runtime::Handle::try_current();
        let wrong = self.wrong().or(match runtime {
            Ok(_) => None,
            Err(_) => Some("a JSON-RPC client needs a tokio runtime"),
        });
        let process = self.process.take();
        let shared = Arc::new(Shared::new(wrong, &self, process.as_ref()));
        let client = Client::of(shared.clone());
        if let Some(wrong) = wrong {
            shared.publish(Closure::new(wrong));
        } else if let Ok(runtime) = runtime {
            let limits = Limits { line: self.max_line, exact_writes: self.exact_writes };
            let process = process.map(|process| process.exited);
            let driver = Driver::new(shared, Box::pin(io), limits, self, process);
            runtime.spawn(driver);
        }
        client
    }

    pub(crate) fn wrong(&self) -> Option<&'static str> {
        if self.max_line == 0 {
            return Some("max_line is zero bytes");
        }
        if self.max_in_flight == 0 {
            return Some("max_in_flight is zero calls");
        }
        match &self.probe {
            Some((_, Duration::ZERO)) => Some("the timeout of the probe is zero"),
            _ => None,
        }
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("max_line", &self.max_line)
            .field("max_in_flight", &self.max_in_flight)
            .field("exact_writes", &self.exact_writes)
            .field("handler", &self.handler.is_some())
            .field("probe", &self.probe)
            .field("cancel", &self.cancel.is_some())
            .finish_non_exhaustive()
    }
}

/// MCP's notification, which forbids it for `initialize`.
fn cancelled(id: u64, method: &str) -> Option<Request> {
    if method == "initialize" {
        return None;
    }
    let params = serde_json::json!({ "requestId": id, "reason": "nobody waits for the answer any more" });
    Request::new(Cow::Borrowed("notifications/cancelled"), params).ok()
}
