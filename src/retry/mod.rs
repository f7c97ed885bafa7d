//! Retries of read-only calls.
//!
//! [`RetryReadOnly`] attempts a call again if its [effect](crate::Effect) is
//! [`ReadOnly`](crate::Effect::ReadOnly) and the way in which the last attempt ended allows it (see
//! [`rule`](crate::rule)). Everything else goes through once, untouched and uncloned: what may happen to a
//! write is the business of [`write_safety`](crate::write_safety).
//!
//! # When there is another attempt
//!
//! * The attempts are not used up: three in all by default.
//! * The [budget] allows it. A suppressed retry shows in the error's
//!   [notes](CallError::notes).
//! * The wait before it ends before the call's deadline. It is as long as the peer asked for
//!   ([`CallError::after`]), else as the [backoff] says, and known
//!   beforehand: a wait that cannot end in time is not started, and what is known is returned at once.
//!
//! A closed connection is a case of its own. It gives each read that it took down one replay, at once and
//! whatever `attempts` says, and costs the budget once, however many calls it took down. The budget can deny it, to all
//! of them: the default one does from the fifth closure on if no read succeeds in between. A read that was in
//! flight at two closures is not tried a third time: it may be what closes them.
//!
//! # Differences from `tower::retry`
//!
//! A service is cloned for a replay only, not for each call. Readiness is polled before every attempt, on a
//! clone that no other call uses. All attempts are in the error and in the
//! [event](crate::event::Event::Call), also those that layers further down made.
//!
//! # Example
//!
//! ```
//! use std::{io, sync::atomic::{AtomicU32, Ordering}};
//! use goaround::{CallError, Effect, RetryReadOnly, Tagged};
//! use tower::{Service, ServiceBuilder, ServiceExt, service_fn};
//!
//! # #[tokio::main(flavor = "current_thread", start_paused = true)]
//! # async fn main() -> Result<(), CallError> {
//! static CALLS: AtomicU32 = AtomicU32::new(0);
//! let mut service = ServiceBuilder::new().layer(RetryReadOnly).service(service_fn(
//!     |_: Tagged<&str>| async {
//!         match CALLS.fetch_add(1, Ordering::Relaxed) {
//!             0 => Err(CallError::ambiguous(io::Error::from(io::ErrorKind::ConnectionReset))),
//!             n => Ok(n),
//!         }
//!     },
//! ));
//! // A read fails once and is repeated.
//! assert_eq!(service.ready().await?.call(Tagged::new("list", Effect::ReadOnly)).await?, 1);
//! # Ok(())
//! # }
//! ```

pub mod backoff;
pub mod budget;
mod future;
mod layer;

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;
use tower::Service;

use self::layer::Options;
pub use self::{
    future::ResponseFuture,
    layer::{RetryReadOnly, RetryReadOnlyLayer},
};
use crate::{
    Call, CallContext, CallError, Refusal,
    call::{CallIds, effect_of, replica},
    event::{self, Report},
};

/// Retries read-only calls; see the [module](self).
pub struct Retry<S> {
    inner: S,
    options: Options,
    /// What is wrong with the options: refuses each call.
    wrong: Option<&'static str>,
    /// Made at this clone's first read.
    handle: Option<Arc<Handle<S>>>,
    ids: CallIds,
}

/// What the reads in flight over one clone of the service share. Each clone has one of its own, so that
/// clones on several threads do not contend for its count.
pub(crate) struct Handle<S> {
    options: Options,
    /// Cloned for each replay, and never called itself.
    spare: Mutex<S>,
}

// ===== impl Retry =====

impl<S> Retry<S> {
    fn new(inner: S, options: Options, wrong: Option<&'static str>) -> Self {
        Self { inner, options, wrong, handle: None, ids: CallIds::default() }
    }

    /// The inner service.
    pub const fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service. Replays of the reads that follow run on a clone of what it is then.
    pub fn get_mut(&mut self) -> &mut S {
        self.handle = None;
        &mut self.inner
    }

    /// The inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S> Retry<S> {
    /// Whether attempts have no time of their own. Of a layer that is configured rightly.
    #[inline]
    pub(crate) fn is_plain(&self) -> bool {
        self.options.attempt_timeout.is_none()
    }

    /// The inner service, without a change to it.
    #[inline]
    pub(crate) fn inner_mut(&mut self) -> &mut S {
        &mut self.inner
    }
}

impl<S: Clone> Retry<S> {
    #[inline]
    pub(crate) fn handle(&mut self) -> Arc<Handle<S>> {
        match &self.handle {
            Some(handle) => Arc::clone(handle),
            None => self.new_handle(),
        }
    }

    #[cold]
    fn new_handle(&mut self) -> Arc<Handle<S>> {
        let handle = Handle { options: self.options.clone(), spare: Mutex::new(self.inner.clone()) };
        Arc::clone(self.handle.insert(Arc::new(handle)))
    }
}

impl<S, Req> Service<Req> for Retry<S>
where
    S: Service<Req, Error = CallError> + Clone,
    Req: Call,
{
    type Response = S::Response;
    type Error = CallError;
    type Future = ResponseFuture<S, Req>;

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.inner.poll_ready(cx).map_err(CallError::unready)
    }

    #[inline(always)]
    fn call(&mut self, mut request: Req) -> Self::Future {
        let outermost = event::enter(request.context_mut(), &mut self.ids, &self.options.events);
        let effect = effect_of(&request);
        if let Some(wrong) = self.wrong {
            // What is ready and not called would keep others from their turn: a clone is not ready.
            self.inner = self.inner.clone();
            let refusal = CallError::refused(Refusal::Config(wrong));
            return ResponseFuture::refused(refusal.of_request(&request, effect));
        }
        let asks = !effect.is_write() && self.options.attempt_timeout.is_some();
        let owns_marks = asks && Self::ask_what_it_is(request.context_mut());
        let kept = if effect.is_write() { None } else { replica(&request) };
        let Some(kept) = kept else {
            let report = Report::of(request.context(), outermost);
            return ResponseFuture::once(self.inner.call(request), effect, report);
        };
        let handle = self.handle();
        let until = handle.options.attempt_timeout.and_then(|limit| bound(request.context_mut(), limit));
        ResponseFuture::read(self.inner.call(request), handle, kept, until, outermost).with_marks(owns_marks)
    }
}

impl<S> Retry<S> {
    /// A write-safety layer further in may take the call for a write. Where an attempt may end here before that layer
    /// has said anything, it says so by this. Whether it does not by what somebody further out has given the call.
    #[inline(never)]
    fn ask_what_it_is(context: &mut CallContext) -> bool {
        let none = context.activity().is_none();
        if none {
            context.set_activity(Some(Arc::default()));
        }
        none
    }
}

/// Bounds the attempt that starts now, where that ends before the deadline: says until when.
fn bound(context: &mut CallContext, limit: Duration) -> Option<Instant> {
    let now = Instant::now();
    let until = now.checked_add(limit)?;
    if context.until().most(now).is_past(until) {
        return None;
    }
    if context.attempt_until().is_none_or(|outer| until < outer) {
        context.set_attempt_until(Some(until));
    }
    Some(until)
}

impl<S: Clone> Clone for Retry<S> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            options: self.options.clone(),
            wrong: self.wrong,
            handle: None,
            ids: self.ids.clone(),
        }
    }
}

impl<S: fmt::Debug> fmt::Debug for Retry<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Retry")
            .field("inner", &self.inner)
            .field("options", &self.options)
            .finish_non_exhaustive()
    }
}

// ===== impl Handle =====

impl<S> Handle<S> {
    /// Pays the budget back: a call has succeeded.
    #[inline]
    pub(crate) fn deposit(&self) {
        if let Some(budget) = &self.options.budget {
            budget.deposit();
        }
    }
}

impl<S: Clone> Handle<S> {
    fn service(&self) -> S {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}
