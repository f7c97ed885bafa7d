//! The caller's hook and its answer about a write in doubt.

use std::{
    borrow::Cow,
    fmt,
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use serde::Serialize;
use tokio::time::Instant;

use super::{FirstSent, fence::Fence};
use crate::{
    Attempt, BoxError, CallError, CallId, Closure,
    connection::BoxFuture,
    mcp::checks::{ReadBack, ready_made},
};

/// What the caller's check found out about a write in doubt.
///
/// Built by the methods of [`InDoubt`]: `doubt.landed(response)`, `doubt.not_landed()`,
/// `doubt.not_landed_because("…")`, `doubt.unknown("…")` and so on.
#[derive(Debug)]
#[non_exhaustive]
pub enum Verdict<Res> {
    /// It was applied; with its response, if the check could find or rebuild it.
    Landed(Option<Res>),
    /// It was not applied and, by that fence, never will be: it may be replayed.
    NotLanded(Fence),
    /// It is still being processed: ask again after that time.
    InFlight {
        /// When to ask again.
        recheck_after: Duration,
    },
    /// It was applied in part. It is never replayed.
    Partial,
    /// Nobody knows, and why.
    Unknown(Cow<'static, str>),
}

/// What a [`Verdict`] says, without what it brings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum VerdictKind {
    /// It was applied.
    Landed,
    /// It was not applied and, by a fence, never will be.
    NotLanded,
    /// It is still being processed.
    InFlight,
    /// It was applied in part.
    Partial,
    /// Nobody knows.
    Unknown,
}

impl<Res> Verdict<Res> {
    /// What it says, without what it brings.
    pub const fn kind(&self) -> VerdictKind {
        match self {
            Verdict::Landed(_) => VerdictKind::Landed,
            Verdict::NotLanded(_) => VerdictKind::NotLanded,
            Verdict::InFlight { .. } => VerdictKind::InFlight,
            Verdict::Partial => VerdictKind::Partial,
            Verdict::Unknown(_) => VerdictKind::Unknown,
        }
    }
}

/// The caller's hook: finds out whether the earlier attempt of a write landed.
///
/// Implemented for closures and functions that take an [`InDoubt`] and return a future. An error, a panic or
/// a check that takes too long is [`Verdict::Unknown`]: it never leads to a replay.
///
/// A check must look for *this* write, by a value that only it carries. That something similar exists proves
/// nothing, and that it is absent from a cache, a search index or a replica proves nothing either.
///
/// One check is asked about all writes of the service. Of those that it does not know how to find it must say
/// [`unknown`](InDoubt::unknown): not to find what it never looked for would be a replay. Its probes must be
/// read-only, by [`Call::read_only`](crate::Call::read_only) or by what classifies the stack's calls.
///
/// ```
/// use goaround::{BoxError, Call, jsonrpc::{Request, Response}, write_safety::{InDoubt, Verdict}};
///
/// async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
///     if doubt.request().method() != "doc/put" {
///         return Ok(doubt.unknown("no check for this method"));
///     }
///     let wanted: serde_json::Value = doubt.request().params()?;
///     let list = Request::new("doc/list", ())?.read_only();
///     let docs: Vec<serde_json::Value> = doubt.probe(list).await?.parse()?;
///     Ok(if docs.iter().any(|doc| doc["token"] == wanted["token"]) {
///         doubt.landed_without_result()
///     } else {
///         doubt.not_landed() // with the fence that holds; without one this is unknown
///     })
/// }
/// let _layer = goaround::WriteSafetyLayer::new(check);
/// ```
pub trait EffectCheck<Req, Res> {
    /// Finds out about the write in doubt.
    fn check(&self, doubt: InDoubt<Req, Res>) -> impl Future<Output = Result<Verdict<Res>, BoxError>> + Send;
}

impl<F, Fut, Req, Res> EffectCheck<Req, Res> for F
where
    F: Fn(InDoubt<Req, Res>) -> Fut,
    Fut: Future<Output = Result<Verdict<Res>, BoxError>> + Send,
{
    fn check(&self, doubt: InDoubt<Req, Res>) -> impl Future<Output = Result<Verdict<Res>, BoxError>> + Send {
        self(doubt)
    }
}

/// An [`EffectCheck`] with its type erased.
pub(super) trait DynCheck<Req, Res>: Send + Sync {
    fn run(self: Arc<Self>, doubt: InDoubt<Req, Res>) -> BoxFuture<Result<Verdict<Res>, BoxError>>;

    /// The ready-made checks that it is made of.
    fn ready_made(&self) -> Vec<&ReadBack>;
}

/// Makes a [`DynCheck`] of a check.
pub(super) struct Erased<C>(pub(super) C);

impl<C, Req, Res> DynCheck<Req, Res> for Erased<C>
where
    C: EffectCheck<Req, Res> + Send + Sync + 'static,
    Req: Send + 'static,
    Res: Send + 'static,
{
    fn run(self: Arc<Self>, doubt: InDoubt<Req, Res>) -> BoxFuture<Result<Verdict<Res>, BoxError>> {
        Box::pin(async move { self.0.check(doubt).await })
    }

    fn ready_made(&self) -> Vec<&ReadBack> {
        ready_made(&self.0)
    }
}

/// A call on the healed stack below, for read-only requests.
pub(super) trait Probe<Req, Res>: Send + Sync {
    fn probe(&self, request: Req, log: &Arc<ProbeLog>) -> BoxFuture<Result<Res, CallError>>;
}

/// What the layer must know of a check and its probes.
#[derive(Debug, Default)]
pub(super) struct ProbeLog {
    /// Until when probes may take.
    pub(super) until: Option<Instant>,
    /// When the process was gone, if that is the fence.
    pub(super) gone_at: Option<Instant>,
    /// Whether a probe ran on a connection that was made before that.
    pub(super) stale: AtomicBool,
}

impl ProbeLog {
    pub(super) fn mark_stale(&self) {
        self.stale.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_stale(&self) -> bool {
        self.stale.load(Ordering::Relaxed)
    }
}

/// A write in doubt, as its check sees it.
pub struct InDoubt<Req, Res> {
    pub(super) request: Req,
    pub(super) call: CallId,
    pub(super) attempts: Vec<Attempt>,
    pub(super) closure: Option<Closure>,
    pub(super) first_sent: FirstSent,
    pub(super) fence: Option<Fence>,
    pub(super) without_fence: Cow<'static, str>,
    pub(super) probe: Arc<dyn Probe<Req, Res>>,
    pub(super) log: Arc<ProbeLog>,
}

impl<Req, Res> InDoubt<Req, Res> {
    /// The request in doubt.
    pub fn request(&self) -> &Req {
        &self.request
    }

    /// The call.
    pub fn call(&self) -> CallId {
        self.call
    }

    /// The attempts that have ended so far. One that timed out and may still answer is not among them.
    pub fn attempts(&self) -> &[Attempt] {
        &self.attempts
    }

    /// How the connection ended, if that is why there is a doubt.
    pub fn closure(&self) -> Option<&Closure> {
        self.closure.as_ref()
    }

    /// The fence that held before this check began, if one does. None while the server is alive and silent:
    /// that its exit ends its effects is a fence only once it has exited, and a quarantine is one once it is
    /// over.
    pub fn fence(&self) -> Option<&Fence> {
        self.fence.as_ref()
    }

    /// How much time this check has left; `None` for no limit.
    pub fn time_left(&self) -> Option<Duration> {
        self.log.until.map(|until| until.saturating_duration_since(Instant::now()))
    }

    /// Calls the healed stack below. It accepts read-only calls only, by the same classification as the
    /// stack's own calls, and gives them no more than this check's time.
    ///
    /// # Errors
    ///
    /// That of the call; [`Refusal::NotAProbe`](crate::Refusal::NotAProbe) for a write.
    pub fn probe(&self, request: Req) -> impl Future<Output = Result<Res, CallError>> + Send + use<Req, Res> {
        self.probe.probe(request, &self.log)
    }

    /// It was applied, and this is its response.
    pub fn landed(&self, response: Res) -> Verdict<Res> {
        Verdict::Landed(Some(response))
    }

    /// It was applied, and its response is lost.
    pub fn landed_without_result(&self) -> Verdict<Res> {
        Verdict::Landed(None)
    }

    /// It was not applied, and by the fence that holds it never will be. Without a fence this is
    /// [`Verdict::Unknown`], and its reason names the options that would give one.
    pub fn not_landed(&self) -> Verdict<Res> {
        match &self.fence {
            Some(fence) => Verdict::NotLanded(fence.clone()),
            None if off!(Fence) => Verdict::NotLanded(Fence::because(self.call, "none")),
            None => Verdict::Unknown(self.without_fence.clone()),
        }
    }

    /// It was not applied, and the server, which keeps the key that the request carries for so long, will apply
    /// no second copy: whichever arrives first is the only one. After that time, counted by both clocks from the
    /// first hand-over, this is [`Verdict::Unknown`]: the server may have forgotten the key. For keys that
    /// this crate puts, [`KeyedWrites::honoured_for`](super::KeyedWrites::honoured_for) needs no check. It allows
    /// a replay and says nothing else: if none is answered the write is unknown, since the first copy may land.
    pub fn not_landed_deduplicated(&self, window: Duration) -> Verdict<Res> {
        match self.first_sent.window_end(window) {
            Ok(_) => Verdict::NotLanded(Fence::deduplicated(self.call, window)),
            Err(why) => Verdict::Unknown(why.into()),
        }
    }

    /// It was not applied, and it is a compare-and-set: it names the state that it applies to (`If-Match`, a
    /// generation, a name that must not exist yet), so that of two copies the second fails. It allows a replay and
    /// says nothing else: if none is answered the write is unknown, since the first copy may land.
    pub fn not_landed_conditional(&self) -> Verdict<Res> {
        Verdict::NotLanded(Fence::conditional(self.call))
    }

    /// It was not applied, and the task that ran it has ended: the server says that it is cancelled, failed or
    /// completed. That a cancellation was accepted is not enough.
    pub fn not_landed_terminal_task(&self) -> Verdict<Res> {
        Verdict::NotLanded(Fence::terminal_task(self.call))
    }

    /// It was not applied and never will be, for a reason that the caller declares. The replay is as safe as
    /// that reason is true; it is named in the report.
    pub fn not_landed_because(&self, why: impl Into<Cow<'static, str>>) -> Verdict<Res> {
        Verdict::NotLanded(Fence::because(self.call, why))
    }

    /// It is still being processed: ask again after that time.
    pub fn in_flight(&self, recheck_after: Duration) -> Verdict<Res> {
        Verdict::InFlight { recheck_after }
    }

    /// It was applied in part.
    pub fn partial(&self) -> Verdict<Res> {
        Verdict::Partial
    }

    /// Nobody knows, and why.
    pub fn unknown(&self, why: impl Into<Cow<'static, str>>) -> Verdict<Res> {
        Verdict::Unknown(why.into())
    }
}

impl<Req, Res> fmt::Debug for InDoubt<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("InDoubt")
            .field("call", &self.call)
            .field("attempts", &self.attempts)
            .field("closure", &self.closure)
            .field("fence", &self.fence)
            .finish_non_exhaustive()
    }
}
