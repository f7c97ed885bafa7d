//! The short way of a read: what the layers do to a call that is answered at its first attempt, in one future
//! instead of five, one in another.
//!
//! A read goes this way where each layer would only have passed it on: a connection is there, is ready and has
//! answered reads before, and attempts have no time of their own. When its attempt has ended in any other way
//! than with a success, the layers get the call in the state that it would have been in with them, the attempt's
//! error included, and what follows is theirs. So nothing is decided here but that a success is one.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use pin_project::pin_project;
use tokio::time::{Sleep, sleep_until};
use tower::Service;

use super::{Layered, Shared};
use crate::{
    BoxError, Call, CallError, Delivery, Effect, Reconnect,
    census::{AnySeat, Seat},
    deadline,
    event::Report,
    reconnect::{self, Local},
    retry, write_safety,
};

/// What the direct calls of one clone of a stack hold, over one connection: one reference count for all layers.
pub(super) struct Lane<M: Service<()>> {
    pub(super) shared: Arc<Shared>,
    retries: Arc<retry::Handle<Reconnect<M>>>,
    local: Arc<Local<M>>,
    /// Whether the clone itself holds this, besides its calls.
    held: AtomicBool,
}

/// One call on the short way.
#[pin_project]
pub(super) struct Direct<A, M: Service<()>, Req> {
    #[pin]
    attempt: A,
    pub(super) lane: Arc<Lane<M>>,
    /// What another attempt is made from. Its context is also what the layers need to know of the call. Gone
    /// with the call.
    kept: Option<Req>,
    /// Made when the attempt is first pending.
    timer: Option<Pin<Box<Sleep>>>,
    outermost: bool,
}

// ===== impl Lane =====

impl<M> Lane<M>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send,
    M::Response: Send,
{
    #[cold]
    pub(super) fn new(
        shared: &Arc<Shared>,
        retries: Arc<retry::Handle<Reconnect<M>>>,
        local: &Arc<Local<M>>,
    ) -> Arc<Self> {
        let (shared, local, held) = (Arc::clone(shared), local.of_a_lane(), AtomicBool::new(true));
        let lane = Arc::new(Self { shared, retries, local, held });
        let seat: Arc<AnySeat> = Arc::<Self>::clone(&lane);
        lane.local.count_also(&seat);
        lane.shared.census().enter(&seat);
        lane
    }
}

impl<M: Service<()>> Lane<M> {
    #[inline]
    pub(super) fn is_on(&self, local: &Local<M>) -> bool {
        self.local.is_on_that_of(local)
    }

    /// The clone lets go of it; its calls may still have it.
    pub(super) fn release(&self) {
        self.held.store(false, Ordering::Release);
    }

    /// Whether somebody waits for the end of calls.
    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.shared.closing.load(Ordering::Acquire) || self.local.shared().is_closing()
    }

    /// Tells whoever waits that a call of this has ended.
    #[cold]
    pub(super) fn tell(self: Arc<Self>) {
        let (shared, reconnect) = (Arc::clone(&self.shared), Arc::clone(self.local.shared()));
        // The reference goes before the word does.
        drop(self);
        shared.ended.notify_waiters();
        reconnect.ended.notify_waiters();
    }
}

impl<M: Service<()>> Seat for Lane<M> {
    fn held(&self) -> &AtomicBool {
        &self.held
    }
}

// ===== impl Direct =====

impl<A, M: Service<()>, Req> Direct<A, M, Req> {
    #[inline(always)]
    pub(super) fn new(attempt: A, lane: Arc<Lane<M>>, kept: Req, outermost: bool) -> Self {
        Self { attempt, lane, kept: Some(kept), timer: None, outermost }
    }
}

impl<A, M, Req, Res> Direct<A, M, Req>
where
    A: Future<Output = Result<Res, CallError>>,
    M: Service<()>,
    Req: Call,
{
    /// The answer, or how the attempt has ended otherwise.
    #[inline]
    pub(super) fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<A::Output> {
        let mut this = self.project();
        if let Some(timer) = this.timer {
            // The timer first, as in the deadline layer, so that the poll after it is the one more.
            let until = this.kept.as_ref().map(|kept| kept.context().until()).unwrap_or_default();
            let fired = until.poll_timer(timer.as_mut(), cx).is_ready();
            if let Poll::Ready(result) = this.attempt.poll(cx) {
                return Poll::Ready(this.lane.ended(result));
            }
            return match fired || until.is_over() {
                true => Poll::Ready(Err(CallError::deadline(Delivery::Ambiguous))),
                false => Poll::Pending,
            };
        }
        if let Poll::Ready(result) = this.attempt.as_mut().poll(cx) {
            return Poll::Ready(this.lane.ended(result));
        }
        let until = this.kept.as_ref().map(|kept| kept.context().until()).unwrap_or_default();
        let Some(at) = until.instant() else { return Poll::Pending };
        let timer = this.timer.insert(Box::pin(sleep_until(at)));
        if until.poll_timer(timer.as_mut(), cx).is_pending() {
            return Poll::Pending;
        }
        // The time ran out while the attempt was polled: once more.
        Poll::Ready(match this.attempt.poll(cx) {
            Poll::Ready(result) => this.lane.ended(result),
            Poll::Pending => Err(CallError::deadline(Delivery::Ambiguous)),
        })
    }
}

impl<M: Service<()>> Lane<M> {
    #[inline]
    fn ended<Res>(&self, result: Result<Res, CallError>) -> Result<Res, CallError> {
        if result.is_ok() {
            self.retries.deposit();
        }
        result
    }
}

impl<M, Req, Res> Direct<<M::Response as Service<Req>>::Future, M, Req>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    /// The call as the layers would have it now, its attempt having ended with that error. `None` if it has been
    /// asked for before.
    pub(super) fn layered(self: Pin<&mut Self>, error: CallError) -> Option<Layered<M, Req>> {
        let this = self.project();
        let kept = this.kept.take()?;
        let context = kept.context();
        let (call, basis, until) = (context.id()?, context.basis(), context.until());
        let report = this.outermost.then(|| Report::of(context));
        let attempt = reconnect::ResponseFuture::failed(&kept, Arc::clone(&this.lane.local), error);
        let retries = Arc::clone(&this.lane.retries);
        let retrying = retry::ResponseFuture::read(attempt, retries, kept, None, false);
        let passing = write_safety::ResponseFuture::passing(retrying, None, call, basis, Effect::ReadOnly);
        let timer = this.timer.take();
        Some(deadline::ResponseFuture::resumed(passing, timer, until, Effect::ReadOnly, report))
    }
}
