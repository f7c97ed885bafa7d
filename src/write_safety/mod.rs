//! Never replays a write without named evidence, and reports every write whose outcome is unknown.
//!
//! A write whose attempt ended without an answer is *in doubt*. [`WriteSafetyLayer::refuse`] returns it as
//! such. [`WriteSafetyLayer::new`] takes an [`EffectCheck`] and goes on, in this order:
//!
//! 1. **Fence**: it waits until the earlier attempt can no longer land. Either it *observes* that the
//!    server's process group is gone (and the caller declared, on the connector, that its effects end with
//!    it), or it waits out a [`quarantine`](WriteSafetyLayer::quarantine) that the caller *declared*. If none
//!    can hold in the time left, the check runs at once, and can then only find that the write landed.
//! 2. **Check**: the caller's function looks for the write, with probes that began after the fence held.
//! 3. **Verdict**: landed → its response, or an error that says that it is done; not landed, with a fence →
//!    one replay; anything else → [`Outcome::Unknown`](crate::Outcome::Unknown).
//!
//! A check alone is not enough: an attempt that is absent now may still sit in a pipe, a proxy or the
//! server's queue, and land after the replay. That is what the fence is for.
//!
//! With an attempt timeout the doubt arises while there is time left to settle it. The attempt is not
//! dropped: its late answer is the best evidence there is, and ends the doubt.
//!
//! A write is replayed once in all, also where such layers are nested: the outermost that may replay has it,
//! those further in pass it through, and one further out that [refuses](WriteSafetyLayer::refuse) replays
//! leaves the report to it. A write whose future is dropped after it was handed over is reported as
//! [`Event::Abandoned`](crate::Event::Abandoned).

mod fence;
mod future;
mod layer;
mod settle;
mod verdict;

use std::{
    fmt,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{sync::Semaphore, time::Instant};
use tower::Service;

use self::verdict::DynCheck;
pub use self::{
    fence::{Fence, FenceBasis},
    future::ResponseFuture,
    layer::WriteSafetyLayer,
    verdict::{EffectCheck, InDoubt, Verdict, VerdictKind},
};
use crate::{
    Activity, Basis, Call, CallError, Deadline, Effect, Evidence, Refusal,
    call::{CallIds, effect_of, replica},
    connection::Classifier,
    event::{self, Events},
};

/// What the layer is set to.
struct Config<Req, Res> {
    check: Option<Arc<dyn DynCheck<Req, Res>>>,
    attempt_timeout: Option<Duration>,
    check_timeout: Option<Duration>,
    quarantine: Option<Duration>,
    max_checks: usize,
    trust: Vec<Evidence>,
    landed_with: Option<Arc<LandedWith<Req, Res>>>,
    independent_writes: bool,
    classify: Option<Classifier<Req>>,
    wrong: Option<&'static str>,
}

type LandedWith<Req, Res> = dyn Fn(&Req) -> Res + Send + Sync;

impl<Req, Res> Config<Req, Res> {
    /// Whether some end of an attempt may lead to a replay, so that the request is worth keeping.
    fn may_replay(&self) -> bool {
        self.check.is_some() || !self.trust.is_empty()
    }
}

/// What all clones of a service share.
struct Shared {
    checks: Semaphore,
    /// How many hand-overs of writes there were. Counted only where somebody may ask.
    writes: AtomicU64,
}

/// What one clone of a service and its calls share: a reference count of their own.
struct Lane<S, Req, Res> {
    config: Arc<Config<Req, Res>>,
    shared: Arc<Shared>,
    /// Where probes and replays get their service from. A lock, so that the service need not be `Sync`.
    spare: Mutex<S>,
}

impl<S: Clone, Req, Res> Lane<S, Req, Res> {
    fn spare(&self) -> S {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Write safety around an inner service. See the [module](self).
pub struct WriteSafety<S, Req, Res> {
    inner: S,
    config: Arc<Config<Req, Res>>,
    shared: Arc<Shared>,
    /// Made at this clone's first write.
    lane: Option<Arc<Lane<S, Req, Res>>>,
    events: Events,
    ids: CallIds,
}

impl<S, Req, Res> WriteSafety<S, Req, Res> {
    fn new(inner: S, config: Arc<Config<Req, Res>>, events: Events) -> Self {
        let shared =
            Arc::new(Shared { checks: Semaphore::new(config.max_checks.max(1)), writes: AtomicU64::new(0) });
        Self { inner, config, shared, lane: None, events, ids: CallIds::default() }
    }

    /// The inner service.
    pub fn get_ref(&self) -> &S {
        &self.inner
    }

    /// The inner service.
    pub fn into_inner(self) -> S {
        self.inner
    }
}

impl<S, Req: Call, Res> WriteSafety<S, Req, Res> {
    /// What says what a call is taken for.
    pub(crate) fn classifier(&self) -> Option<&Classifier<Req>> {
        self.config.classify.as_ref()
    }

    /// The inner service.
    pub(crate) fn get_mut(&mut self) -> &mut S {
        &mut self.inner
    }

    /// What that call is taken for, and who says so.
    pub(crate) fn judge(&self, request: &Req) -> (Effect, Basis) {
        let judged = self.config.classify.as_ref().and_then(|classify| classify(request));
        judged.unwrap_or_else(|| (effect_of(request), request.context().basis()))
    }
}

impl<S, Req> Service<Req> for WriteSafety<S, Req, S::Response>
where
    Req: Call + Send + 'static,
    S: Service<Req, Error = CallError> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
{
    type Response = S::Response;
    type Error = CallError;
    type Future = ResponseFuture<S, Req>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.inner.poll_ready(cx).map_err(CallError::not_ready)
    }

    fn call(&mut self, mut request: Req) -> Self::Future {
        if !request.context_mut().take_judged()
            && let Some(classify) = &self.config.classify
            && let Some((effect, basis)) = classify(&request)
        {
            request.context_mut().stamp(effect, basis);
        }
        let effect = effect_of(&request);
        let context = request.context_mut();
        if context.effect().is_none() {
            // Settled once: no layer below, and no copy, may take the call for something else.
            context.stamp(effect, Basis::Default);
        }
        let outermost = event::enter(context, &mut self.ids, &self.events);
        let call = context.identify(&mut self.ids);
        let basis = context.basis();
        if let Some(what) = self.config.wrong {
            let error = CallError::refused(Refusal::Config(what)).of_call(request.method(), effect);
            return ResponseFuture::refused(error);
        }
        if !effect.is_write() || context.is_guarded() {
            let reporter = outermost.then(|| self.events.share());
            return ResponseFuture::passing(self.inner.call(request), reporter, call, basis, effect);
        }

        if let Some(outer) = context.activity() {
            outer.take_over();
        }
        context.set_guarded(self.config.may_replay());

        let lane = Arc::clone(self.lane.get_or_insert_with(|| {
            Arc::new(Lane {
                config: Arc::clone(&self.config),
                shared: Arc::clone(&self.shared),
                spare: Mutex::new(self.inner.clone()),
            })
        }));
        let events = match request.context().events.is_set() {
            true => request.context().events.share(),
            false => self.events.share(),
        };
        let name = request.name();
        let until = request.context().until().clone();
        let attempt = Attempted::prepare(&self.config, &mut request, until.deadline);
        let kept = if self.config.may_replay() { replica(&request) } else { None };
        let sequence = lane.hand_over();
        let future = self.inner.call(request);
        ResponseFuture::write(
            future, lane, kept, name, effect, basis, call, until, attempt, sequence, events, outermost,
        )
    }
}

impl<S, Req, Res> Lane<S, Req, Res> {
    /// Counts a write that is handed over; its number in the stack.
    fn hand_over(&self) -> u64 {
        match self.config.may_replay() && !self.config.independent_writes {
            true => self.shared.writes.fetch_add(1, Ordering::AcqRel) + 1,
            false => 0,
        }
    }

    /// Claims the replay of the write with that number: `false` if another write was handed over since.
    fn claim_replay(&self, sequence: u64) -> bool {
        let writes = &self.shared.writes;
        self.config.independent_writes
            || writes.compare_exchange(sequence, sequence + 1, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

/// An attempt's own time and marks. Each hand-over gets its own.
struct Attempted {
    until: Option<Instant>,
    /// How long the call had stood still when it began.
    stood: Duration,
    /// Tells when the last byte was sent, from which quarantines count, and, if the caller goes away, whether
    /// the request was still withdrawn.
    activity: Arc<Activity>,
}

impl Attempted {
    /// Gives the request what its attempt needs: by default, with a check, half of the time left.
    fn prepare<Req: Call, Res>(config: &Config<Req, Res>, request: &mut Req, deadline: Deadline) -> Self {
        let until = match (config.attempt_timeout, &config.check, deadline.instant()) {
            (Some(timeout), _, _) => Instant::now().checked_add(timeout),
            (None, Some(_), Some(at)) => {
                let now = Instant::now();
                now.checked_add(at.saturating_duration_since(now) / 2)
            }
            (None, _, _) => None,
        };
        Self::bounded(request, until.filter(|until| !deadline.is_past(*until)))
    }

    /// Gives the request until then, or until the deadline.
    fn bounded<Req: Call>(request: &mut Req, until: Option<Instant>) -> Self {
        let activity = Arc::<Activity>::default();
        let context = request.context_mut();
        context.set_attempt_until(until);
        context.set_activity(Some(Arc::clone(&activity)));
        let stood = if until.is_some() { context.until().stood() } else { Duration::ZERO };
        Self { until, stood, activity }
    }
}

impl<S: Clone, Req, Res> Clone for WriteSafety<S, Req, Res> {
    fn clone(&self) -> Self {
        Self {
            inner: self.inner.clone(),
            config: Arc::clone(&self.config),
            shared: Arc::clone(&self.shared),
            lane: None,
            events: self.events.clone(),
            ids: CallIds::default(),
        }
    }
}

impl<S: fmt::Debug, Req, Res> fmt::Debug for WriteSafety<S, Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteSafety").field("inner", &self.inner).finish_non_exhaustive()
    }
}
