//! A deadline on every call: one absolute instant over all of its attempts.
//!
//! [`DeadlineLayer`] belongs outermost. It settles until when a call may take, writes that into the call's
//! [context](crate::CallContext), where every layer below can read it, and owns the only timer for it.
//!
//! # Which deadline holds
//!
//! A deadline that the caller gave the call ([`Call::within`],
//! [`Call::deadline`]) wins over the layer's default. Of the defaults of nested layers
//! the earlier instant wins, also where a call that one stack has handed back unsent goes to another one.
//! [`Deadline::Never`] is a value like any other.
//!
//! # Idle limits
//!
//! A call that may take long, but not in silence, gets an idle limit ([`Call::idle`]): it ends, as at its deadline,
//! once the server has reported no [`Progress`] of this very call for that long. Its deadline, or the layer's
//! default, is the maximum, which no progress moves; a call without one is refused
//! ([`Refusal::Config`]). The limit counts from here, and again from each hand-over to a
//! connection, so that a replay has the whole of it. It is the limit of everything else too: a backoff, a connect
//! or a check that takes longer than that does not fit in the time left.
//!
//! [`Call::pause_while_asking`] lets deadline and idle limit stand still while the user answers a question of the
//! server, and with them the time of an attempt
//! ([`attempt_timeout`](crate::RetryReadOnlyLayer::attempt_timeout)). That one is of its own: progress does not
//! extend it, and the half of the time left that a write with a check has by default is half of the time to its
//! deadline. A write whose server falls silent before that is unknown, and not checked.
//!
//! Both need a connection that knows of such things, as [`mcp`](crate::mcp)'s does; another one can
//! ([`Progress`]). Time that was seen to be up stays so, whatever progress comes then. A call with neither costs
//! nothing more.
//!
//! ```no_run
//! use std::time::Duration;
//! use goaround::{Call, jsonrpc::{Request, Response}, mcp};
//! use serde_json::json;
//!
//! # async fn index(client: mcp::Client) -> Result<Response, goaround::BoxError> {
//! let call = Request::new("tools/call", json!({ "name": "index_repository" }))?
//!     .idle(Duration::from_secs(30)) // without a word
//!     .within(Duration::from_secs(3600)) // whatever it says
//!     .pause_while_asking(); // but the user may take his time
//! Ok(client.send(call).await?)
//! # }
//! ```
//!
//! # Differences from `tower::timeout`
//!
//! When the time is up the inner future is polled *once more*: an answer that is there wins, and the layers
//! below can say what they know of the call instead of being dropped in silence. Only what is still pending
//! then is dropped. The error says so: a call that was past its deadline before it was handed over is
//! [`NotSent`](crate::Delivery::NotSent), one that was dropped is [`Ambiguous`](crate::Delivery::Ambiguous).
//! The timer is made when the inner future is first pending, so a call that is ready at once costs none.
//!
//! What is not handed over leaves the inner service ready, as tower's `Filter` does: a permit that it holds is kept
//! until this service is called again or dropped. A [`Stack`](crate::Stack) lets go of it.
//!
//! # Example
//!
//! ```
//! use std::time::Duration;
//! use goaround::{Call, CallError, DeadlineLayer, Effect, Outcome, Tagged};
//! use tower::{ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() {
//! let hangs = ServiceBuilder::new()
//!     .layer(DeadlineLayer::new(Duration::from_secs(30)))
//!     .service(service_fn(|_: Tagged<&str>| std::future::pending::<Result<(), CallError>>()));
//!
//! let call = Tagged::new("pay", Effect::Write).within(Duration::from_secs(1));
//! let error = hangs.oneshot(call).await.unwrap_err();
//! assert_eq!(error.outcome(), Outcome::Unknown);
//! # }
//! ```

mod future;
mod layer;
mod progress;
mod timer;

use std::{
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
};

use tokio::{task::unconstrained, time::Instant};
use tower::Service;

pub use self::{
    future::ResponseFuture,
    layer::DeadlineLayer,
    progress::{Pause, Progress},
};
pub(crate) use self::{progress::Until, timer::Timer};
use crate::{
    Call, CallError, Deadline, Delivery, Effect, Refusal,
    call::{CallContext, CallIds, effect_of},
    event::{self, Events, Report},
};

/// The instant that much later. One that the clock cannot count is far away, and not at once.
pub(crate) fn later(now: Instant, wait: Duration) -> Instant {
    /// Thirty years: what tokio's own timers take for never.
    const FAR: Duration = Duration::from_secs(30 * 365 * 24 * 60 * 60);
    now.checked_add(wait).unwrap_or_else(|| now + FAR)
}

/// Puts a deadline on every call; see the [module](self).
#[derive(Clone, Debug)]
pub struct DeadlineService<S> {
    inner: S,
    default: layer::Default,
    events: Events,
    ids: CallIds,
}

// ===== impl DeadlineService =====

impl<S> DeadlineService<S> {
    fn new(inner: S, default: layer::Default, events: Events) -> Self {
        Self { inner, default, events, ids: CallIds::default() }
    }

    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service.
    pub const fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// The inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }

    /// What that deadline is for a call that comes now, with the default where it has none of its own.
    pub(crate) fn resolve(&self, deadline: Deadline) -> Deadline {
        match deadline {
            Deadline::Inherit => self.default.from(Instant::now()),
            own => own,
        }
    }

    /// Names a call that comes now: whether the layer is its outermost one.
    #[inline(always)]
    pub(crate) fn enter(&mut self, context: &mut CallContext) -> bool {
        event::enter(context, &mut self.ids, &self.events)
    }

    /// Settles the call's deadline, and says when, where the clock was read; `Err` if it has passed already, or
    /// nothing bounds an idle limit.
    #[inline(always)]
    pub(crate) fn settle(&self, context: &mut CallContext) -> Result<Option<Instant>, CallError> {
        if context.deadline() != Deadline::Inherit || context.progress().is_some() {
            return self.settle_own(context);
        }
        let mut now = None;
        context.set_default_deadline(|| self.default.from(*now.insert(Instant::now())));
        match self.default.is_over_at_once() {
            true => Err(default_is_zero()),
            false => Ok(now),
        }
    }

    /// The same for a call that comes with a deadline, or with what moves one.
    fn settle_own(&self, context: &mut CallContext) -> Result<Option<Instant>, CallError> {
        let own = context.deadline();
        let by_default = context.is_by_default();
        if own == Deadline::Never && !by_default {
            return bounded(context).map(|()| None);
        }
        let now = Instant::now();
        let deadline = match own {
            Deadline::Inherit => self.default.from(now),
            outer if by_default => earlier(outer, self.default.from(now)),
            own => own,
        };
        if own == Deadline::Inherit || by_default {
            context.set_default_deadline(|| deadline);
        }
        if self.default.is_over_at_once() && (own == Deadline::Inherit || by_default) {
            return Err(default_is_zero());
        }
        if context.progress().is_some() {
            return settle_moving(context, now).map(|()| Some(now));
        }
        match deadline.is_past(now) {
            true => Err(CallError::deadline(Delivery::NotSent)),
            false => Ok(Some(now)),
        }
    }
}

#[cold]
fn default_is_zero() -> CallError {
    CallError::refused(Refusal::Config("DeadlineLayer: the default must not be zero"))
}

#[cold]
fn settle_moving(context: &CallContext, now: Instant) -> Result<(), CallError> {
    if let Some(progress) = context.progress() {
        progress.begin(now);
    }
    bounded(context)?;
    match context.until().is_past(now) {
        true => Err(CallError::deadline(Delivery::NotSent)),
        false => Ok(()),
    }
}

impl<S, Req> Service<Req> for DeadlineService<S>
where
    S: Service<Req, Error = CallError>,
    Req: Call,
{
    type Response = S::Response;
    type Error = CallError;
    type Future = ResponseFuture<S::Future>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.inner.poll_ready(cx).map_err(CallError::unready)
    }

    #[inline]
    fn call(&mut self, mut request: Req) -> Self::Future {
        match self.let_in(&mut request) {
            Ok(entered) => entered.with(self.inner.call(request)),
            Err(error) => ResponseFuture::past(error, &request),
        }
    }
}

impl<S> DeadlineService<S> {
    /// What this layer does to a call before the inner service gets it, and what it keeps; `Err` if that is not to get it.
    #[inline(always)]
    pub(crate) fn let_in<Req: Call>(&mut self, request: &mut Req) -> Result<Entered, CallError> {
        let effect = effect_of(request);
        let context = request.context_mut();
        let outermost = self.enter(context);
        let report = Report::of(context, outermost);
        let now = self.settle(context)?;
        Ok(Entered { now, until: context.until(), effect, report })
    }
}

/// What the layer keeps of a call that the inner service is to get.
pub(crate) struct Entered {
    /// When that was, if the clock was read.
    pub(crate) now: Option<Instant>,
    until: Until,
    effect: Effect,
    report: Report,
}

impl Entered {
    /// The call, which the inner service has got.
    #[inline(always)]
    pub(crate) fn with<F>(self, future: F) -> ResponseFuture<F> {
        ResponseFuture::new(future, self.until, self.effect, Some(self.report))
    }
}

/// Polls a future whatever is left of the task's turn, as for the last time: what is there wins. Tokio gives a task 128 polls
/// of its channels and timers, and lets them say after that that nothing is there.
pub(crate) fn once_more<F: Future + ?Sized>(future: Pin<&mut F>, cx: &mut Context<'_>) -> Option<F::Output> {
    match pin!(unconstrained(future)).poll(cx) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// Polls a future whose time may be over: `None` if it is pending even once more.
pub(crate) fn poll_in_time<F: Future + ?Sized>(
    mut future: Pin<&mut F>,
    is_over: impl FnOnce() -> bool,
    cx: &mut Context<'_>,
) -> Poll<Option<F::Output>> {
    match future.as_mut().poll(cx) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if is_over() => Poll::Ready(once_more(future, cx)),
        Poll::Pending => Poll::Pending,
    }
}

/// Polls a future; for the `last` time, if its time is up.
pub(crate) fn poll_or_last<F: Future>(
    future: Pin<&mut F>,
    last: bool,
    cx: &mut Context<'_>,
) -> Poll<F::Output> {
    match last {
        true => once_more(future, cx).map_or(Poll::Pending, Poll::Ready),
        false => future.poll(cx),
    }
}

/// The limits of the call, which must not be an idle limit alone: a server that goes on reporting progress would
/// hold the call for ever.
fn bounded(context: &CallContext) -> Result<(), CallError> {
    match context.progress() {
        Some(progress) if progress.idle().is_some() && context.deadline().instant().is_none() => {
            Err(CallError::refused(Refusal::Config(
                "an idle limit needs a maximum: give the call a deadline, or the layer a default",
            )))
        }
        _ => Ok(()),
    }
}

fn earlier(a: Deadline, b: Deadline) -> Deadline {
    match (a.instant(), b.instant()) {
        (Some(a), Some(b)) => Deadline::At(a.min(b)),
        (Some(at), None) | (None, Some(at)) => Deadline::At(at),
        (None, None) => Deadline::Never,
    }
}
