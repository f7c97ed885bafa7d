//! Reconnects once after a closure: one shared reconnect, however many calls wait for it.
//!
//! [`ReconnectLayer`] wraps a connector, any `Service<(), Response = connection>` as in
//! `tower::MakeService`, and gives a service of calls. The first connect is lazy. After a closure, which
//! is any error of [scope](crate::Scope) `Connection`, be it of a call or of the connection's `poll_ready`,
//! the next call connects again; those that come meanwhile wait for the same connect.
//!
//! - A call whose request provably never left ([`Delivery::NotSent`](crate::Delivery::NotSent)) is handed
//!   over again on the new connection, once, be it a read or a write. Its request comes back inside the
//!   error: no clone is kept. A connection that cannot hand it back gets no such second hand-over.
//! - A call that was in flight gets its error. Whether it may be repeated is for the layers above to decide.
//! - A connect that fails fails the calls that waited for it, and no others: the next call tries again,
//!   after a backoff. Each connect is bounded by [`connect_timeout`](ReconnectLayer::connect_timeout); a
//!   call's own deadline ends only its own wait.
//! - Calls on several Tokio runtimes may share a service. One whose runtime does not run holds up no other: whoever
//!   waits on a runtime that does drives the connect on, and ends it at its time. A connection of this crate lives on the
//!   runtime that connected: while that does not run, calls over it end at their deadlines. A call that needs a connection and is
//!   polled outside a runtime, or in one without a clock, panics as Tokio's timers do there, and harms no other.
//! - After [too many connections in a row](ReconnectLayer::crash_loop) that closed without having answered
//!   anything, calls are refused for a while.
//!
//! The service is always ready and waits inside the call, where the call's deadline counts.
//!
//! A foreign connection closes when its last clone is dropped; the clones of this service hold one each.

mod bell;
mod future;
mod generation;
mod layer;
mod single_flight;

use std::{
    fmt,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;
use tower::Service;

pub(crate) use self::single_flight::Local;
use self::single_flight::Shared;
pub use self::{
    future::ResponseFuture,
    layer::{ReconnectHandle, ReconnectLayer},
};
use crate::{
    Attempt, BoxError, Call, CallContext, CallError, Effect, Refusal,
    call::{CallIds, effect_of},
    connection::Hooks,
    event::{self, Events},
    retry::backoff::Schedule,
};

/// What the layer is set to.
#[derive(Clone)]
struct Config {
    connect_timeout: Duration,
    crash_limit: u32,
    cool_down: Duration,
    max_waiters: usize,
    backoff: Schedule,
}

/// Calls over a connection that is made, and made again, on demand. See the [module](self).
pub struct Reconnect<M: Service<()>> {
    shared: Arc<Shared<M>>,
    link: Option<Link<M>>,
    /// The connection was found dead before the next call was given to it: that call's first attempt.
    found_dead: Option<Box<Attempt>>,
    wrong: Option<&'static str>,
    events: Events,
    ids: CallIds,
}

/// This clone's own handle on the connection in use.
struct Link<M: Service<()>> {
    local: Arc<Local<M>>,
    connection: M::Response,
    /// Whether the connection said that it is ready, for the next call.
    ready: bool,
}

impl<M: Service<()>> Link<M> {
    /// Lets go of what the connection keeps for the next call: room for one, or a place in the queue for that. Nobody
    /// who does not call gives it back, and whoever waits behind it would wait for ever.
    #[cold]
    fn release(&mut self)
    where
        M::Response: Clone,
    {
        self.ready = false;
        self.connection = self.connection.clone();
    }
}

impl<M: Service<()>> Reconnect<M>
where
    M::Error: Into<BoxError>,
{
    fn new(connector: M, config: Config, wrong: Option<&'static str>, events: Events, hooks: Hooks) -> Self {
        let shared = Arc::new(Shared::new(connector, config, events.clone(), hooks));
        Self { shared, link: None, found_dead: None, wrong, events, ids: CallIds::default() }
    }

    /// The link to the connection in use, if one is there.
    #[inline]
    fn link(&mut self) -> Option<&mut Link<M>>
    where
        M::Response: Clone,
    {
        if self.link.as_ref().is_none_or(|link| !self.shared.is_current(&link.local.generation)) {
            self.relink();
        }
        self.link.as_mut()
    }

    #[cold]
    fn relink(&mut self)
    where
        M::Response: Clone,
    {
        self.link = None;
        let connected = self.shared.connected();
        self.link = connected.map(|(local, connection)| Link { local, connection, ready: false });
    }

    /// The connection turned out to be dead when it was asked whether it is ready.
    #[cold]
    fn lose(&mut self, error: CallError) {
        let Some(link) = &self.link else { return };
        let generation = Arc::clone(&link.local.generation);
        let error = CallError::not_ready(error).connection_lost();
        let closure = generation.closure(&error);
        let error = error.at_closure(closure);
        self.link = None;
        self.shared.lost(&generation, &error, None);
        self.found_dead = Some(Box::new(Attempt::of(&error, Some(generation.number))));
    }
}

impl<M: Service<()>> Reconnect<M> {
    /// The handle on the connection, if a read can be given to it now and would show nothing new. Of a layer that is
    /// configured rightly.
    pub(crate) fn ready_for_read(&self) -> Option<&Arc<Local<M>>> {
        let link = self.link.as_ref()?;
        let generation = &link.local.generation;
        (generation.has_shown(Effect::ReadOnly) && self.is_ready_on(generation.number)).then_some(&link.local)
    }

    /// Whether a call can be given now to the connection of that number, which this has had as its own before. So there
    /// is no need to ask which one is ready: numbers do not come again, and it was the one in use when it was readied.
    #[inline]
    pub(crate) fn is_ready_on(&self, number: u64) -> bool {
        self.link.as_ref().is_some_and(|link| link.ready)
            && self.shared.is_number(number)
            && !self.shared.is_closing()
    }

    /// The call that was to come was refused by a layer above, if the connection is still ready for it: what the
    /// connection keeps for it is let go.
    #[inline]
    pub(crate) fn release_unused(&mut self)
    where
        M::Response: Clone,
    {
        if let Some(link) = self.link.as_mut().filter(|link| link.ready) {
            link.release();
        }
    }

    #[cold]
    fn forget_dead(&mut self) {
        self.found_dead = None;
    }

    /// That connection, and whether it is ready for one call: not any more after that.
    #[inline]
    pub(crate) fn readied(&mut self) -> Option<(&mut M::Response, &mut bool)> {
        let link = self.link.as_mut()?;
        Some((&mut link.connection, &mut link.ready))
    }
}

impl<M, Req> Service<Req> for Reconnect<M>
where
    M: Service<()>,
    M::Error: Into<BoxError>,
    M::Response: Service<Req, Error = CallError> + Clone + 'static,
    Req: Call + Send + 'static,
{
    type Response = <M::Response as Service<Req>>::Response;
    type Error = CallError;
    type Future = ResponseFuture<M, Req>;

    /// Always ready: a call waits for its connection where its deadline counts.
    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        if self.found_dead.is_some() {
            // By a call that was refused since.
            self.forget_dead();
        }
        if let Some(link) = self.link() {
            match link.connection.poll_ready(cx) {
                Poll::Ready(Ok(())) => link.ready = true,
                Poll::Ready(Err(error)) => self.lose(error),
                Poll::Pending => link.release(),
            }
        }
        Poll::Ready(Ok(()))
    }

    #[inline(always)]
    fn call(&mut self, mut request: Req) -> Self::Future {
        let effect = effect_of(&request);
        let outermost = event::enter(request.context_mut(), &mut self.ids, &self.events);
        if let Some(what) = self.wrong {
            return ResponseFuture::refused(&request, effect, CallError::refused(Refusal::Config(what)));
        }
        if let Some(link) = &mut self.link
            && std::mem::take(&mut link.ready)
        {
            if self.shared.is_current(&link.local.generation)
                && !self.shared.is_closing()
                // Where a layer lies above, it has seen to that.
                && !(outermost && is_over(request.context()))
            {
                return ResponseFuture::sent(request, effect, outermost, link);
            }
            link.release();
        }
        let found_dead = self.found_dead.take().map(|attempt| *attempt);
        ResponseFuture::waiting(request, effect, outermost, Arc::clone(&self.shared), found_dead)
    }
}

/// Whether nothing of the call may be handed over any more. Reads no clock for a call without a limit.
fn is_over(context: &CallContext) -> bool {
    let attempt_until = context.attempt_until().filter(|_| !off!(AttemptTime));
    let now = match (context.until().has_end(), attempt_until) {
        (false, None) => return false,
        _ => Instant::now(),
    };
    context.until().is_past(now) || attempt_until.is_some_and(|until| now >= until)
}

impl<M: Service<()>> Clone for Reconnect<M> {
    fn clone(&self) -> Self {
        // A clone inherits neither the readiness nor the handle: it makes a handle of its own.
        Self {
            shared: Arc::clone(&self.shared),
            link: None,
            found_dead: None,
            wrong: self.wrong,
            events: self.events.clone(),
            ids: CallIds::default(),
        }
    }
}

impl<M: Service<()>> Drop for Link<M> {
    fn drop(&mut self) {
        self.local.release();
    }
}

impl<M: Service<()>> fmt::Debug for Reconnect<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reconnect")
            .field("generation", &self.link.as_ref().map(|link| link.local.generation.number))
            .finish_non_exhaustive()
    }
}
