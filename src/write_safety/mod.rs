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
//! Once a check has found the write in flight or in part, no word of its attempt that it was not sent or not processed
//! (a late 429) is believed any more, whatever the layer [trusts](WriteSafetyLayer::trust): it stays in doubt. The same
//! holds where a service between the layers sends more than one copy of an attempt, as far as one
//! [`ReconnectLayer`](crate::ReconnectLayer) sees both, or one layer like this turns one of them away: what the end of one
//! copy says is not known of the other.
//!
//! With an attempt timeout the doubt arises while there is time left to settle it. The attempt is not
//! dropped: its late answer is the best evidence there is, and ends the doubt.
//!
//! A write is replayed once in all, also where such layers are nested: the outermost that may replay has it,
//! those further in pass it through, and one further out that [refuses](WriteSafetyLayer::refuse) replays
//! leaves the report to it, as long as it has the write: what becomes doubtful after that layer has ended its call, or
//! on another way past it, the outer one reports, and what is unknown when its own call ends while that layer has the write
//! on a task of its own. Of a write that passes, a layer further in
//!
//! - counts each attempt as handed over, as it does its own writes: when it is called, when it is polled first and when it
//!   goes after it has waited for a connection. So none of its own replays lands on top of it. It is turned away where its
//!   [conflict key](WriteSafetyLayer::conflict_key) is in doubt;
//! - puts its [idempotency key](WriteSafetyLayer::keyed), the same into each attempt;
//! - checks, replays, times out and reports nothing, does not read [answers to its key](KeyedWrites::answers), and
//!   enters it in no ledger. So what ends in doubt blocks the keys of the outer layer alone. If one was
//!   [given](WriteSafetyLayer::ledger) to it, that must be the outer layer's, and its conflict key there the same, else
//!   the write is [refused](crate::Refusal::Config): take the ledger from the inner [`Stack`](crate::Stack::ledger).
//!
//! A layer whose write is also kept further out, by one that refuses replays, settles it and does not replay it if that one
//! has another conflict key for it, or the same in another ledger, or if its ledger is another one in which somebody may
//! claim it (any but a [`MemoryLedger`](ledger::MemoryLedger)): it would go past the writes that this key lets in, or beside
//! whoever has claimed it. The error says so. Give both the same ledger and the same conflict key, or the check to the outer
//! one.
//!
//! Replays of an outer layer land on writes that are made past it, directly on a service further in. One that leaves the
//! report to another shares no ledger with it but a [`MemoryLedger`](ledger::MemoryLedger): any other has its entry
//! already and refuses the second one.
//!
//! A write whose future is dropped after it was handed over is reported as
//! [`Event::Abandoned`](crate::Event::Abandoned).

mod account;
mod conflicts;
mod copies;
pub mod effect_check;
mod fence;
mod future;
pub(crate) mod keyed;
mod layer;
pub mod ledger;
mod resolve;
mod settle;
mod unrecorded;
mod verdict;

use std::{
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Mutex, PoisonError},
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use tokio::time::Instant;
use tower::Service;

pub(crate) use self::conflicts::Place;
use self::{
    account::Account,
    conflicts::{Conflicts, Hold, Order, Passage},
    future::{Above, Begun, Parts, Passed, Passing},
    ledger::{AnyLedger, EntryId, LedgerError},
    verdict::DynCheck,
};
pub use self::{
    fence::{Fence, FenceBasis},
    future::ResponseFuture,
    keyed::{KeyedAnswer, KeyedWrites, TakesKeys},
    layer::WriteSafetyLayer,
    resolve::{Resolve, Resolved},
    verdict::{EffectCheck, InDoubt, Verdict, VerdictKind},
};
use crate::{
    Activity, Basis, Call, CallError, CallId, Deadline, Delivery, Effect, Evidence, Refusal,
    call::{CallIds, Giver, Guard, effect_of, replica},
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
    replay_idempotent: bool,
    conflict_key: Option<Arc<TextOf<Req>>>,
    keyed: Option<KeyedWrites<Req, Res>>,
    arguments: Option<Arc<TextOf<Req>>>,
    ledger: Option<AnyLedger>,
    max_rechecks: u32,
    look_first: bool,
    clock: WallClock,
    classify: Option<Classifier<Req>>,
    wrong: Option<&'static str>,
}

type LandedWith<Req, Res> = dyn Fn(&Req) -> Res + Send + Sync;

type TextOf<Req> = dyn Fn(&Req) -> Option<String> + Send + Sync;

impl<Req, Res> Config<Req, Res> {
    /// Whether the request may be needed once it was given away: for a replay, a check, or a response made from it.
    fn may_need_request(&self) -> bool {
        let read = || self.keyed.as_ref().is_some_and(|keyed| keyed.answers.is_some());
        self.may_replay() || (self.landed_with.is_some() && read())
    }

    /// Whether some end of an attempt may lead to a replay.
    fn may_replay(&self) -> bool {
        self.may_settle() || !self.trust.is_empty()
    }

    /// Whether a doubt may be settled, so that it should arise while there is time left for that.
    fn may_settle(&self) -> bool {
        self.check.is_some() || self.replay_idempotent || self.key_window().is_some()
    }

    /// How long the server keeps the keys that this layer puts.
    fn key_window(&self) -> Option<Duration> {
        self.keyed.as_ref().and_then(|keyed| keyed.window)
    }
}

/// The one source of wall time.
#[derive(Clone, Default)]
struct WallClock(Option<Arc<dyn Fn() -> SystemTime + Send + Sync>>);

impl WallClock {
    fn new(clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(clock)))
    }

    fn now(&self) -> SystemTime {
        self.0.as_ref().map_or_else(SystemTime::now, |clock| clock())
    }

    /// A time that is no later than that, by at most a tick of the system's own clock, which costs a fifth. What counts
    /// from it is over the earlier.
    fn recent(&self) -> SystemTime {
        match &self.0 {
            #[cfg(target_os = "linux")]
            None => {
                let time = rustix::time::clock_gettime(rustix::time::ClockId::RealtimeCoarse);
                let of_day =
                    Duration::try_from(time).ok().and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since));
                of_day.unwrap_or_else(SystemTime::now)
            }
            _ => self.now(),
        }
    }

    /// The time, or the system's if the caller's clock panics.
    fn now_or_system(&self) -> SystemTime {
        catch_unwind(AssertUnwindSafe(|| self.now())).unwrap_or_else(|_| SystemTime::now())
    }
}

/// When a write was handed over first, by both clocks: the monotonic one may stand still while the machine
/// sleeps, and the wall's may be set.
#[derive(Clone)]
struct FirstSent {
    at: Instant,
    /// Read then only where something depends on how far the clocks move apart.
    wall: Option<SystemTime>,
    clock: WallClock,
}

impl FirstSent {
    /// `by_both` where a key has a window, or the ledger says it to others.
    fn at(at: Instant, clock: &WallClock, by_both: bool) -> Self {
        Self { at, wall: by_both.then(|| clock.recent()), clock: clock.clone() }
    }

    /// By the wall clock: if it was not read then, by how long ago that is.
    fn wall(&self) -> SystemTime {
        self.wall.unwrap_or_else(|| {
            let now = self.clock.now_or_system();
            now.checked_sub(self.at.elapsed()).unwrap_or(now)
        })
    }

    /// When a key that the server keeps for so long is gone, if it is not already, or may be.
    fn window_end(&self, window: Duration) -> Result<Option<Instant>, &'static str> {
        const OVER: &str = "not replayed: the time is over for which the server keeps the key";
        let now = Instant::now();
        let by_wall = self.clock.now().duration_since(self.wall());
        let by_wall = if off!(WallClock) { Ok(Duration::ZERO) } else { by_wall };
        let by_wall =
            by_wall.map_err(|_| "not replayed: the wall clock was set back, so that no key's time counts")?;
        let passed = by_wall.max(now.saturating_duration_since(self.at));
        let passed = if off!(Window) { Duration::ZERO } else { passed };
        match window.checked_sub(passed) {
            Some(left) if !left.is_zero() => Ok(now.checked_add(left)),
            _ => Err(OVER),
        }
    }
}

/// What all clones of a service share.
struct Shared {
    checks: settle::Checks,
    conflicts: Arc<Conflicts>,
    ledger: AnyLedger,
    /// This service's number, which tells its writes in the ledger from those of others.
    stack: u64,
    /// Whether the ledger is told of each server process before anything is sent to it.
    servers_entered: bool,
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
    fn new(
        inner: S,
        config: Arc<Config<Req, Res>>,
        events: Events,
        stack: u64,
        servers_entered: bool,
    ) -> Self {
        let ledger = config.ledger.clone().unwrap_or_default();
        let shared = Arc::new(Shared {
            checks: settle::Checks::new(config.max_checks),
            conflicts: Conflicts::new(ledger.keys().clone(), config.conflict_key.is_some()),
            ledger,
            stack,
            servers_entered,
        });
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

    /// Where the writes are entered.
    pub fn ledger(&self) -> AnyLedger {
        self.shared.ledger.clone()
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

    #[inline]
    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.inner.poll_ready(cx).map_err(CallError::unready)
    }

    fn call(&mut self, request: Req) -> Self::Future {
        self.call_at(request, None)
    }
}

impl<S, Req> WriteSafety<S, Req, S::Response>
where
    Req: Call + Send + 'static,
    S: Service<Req, Error = CallError> + Clone + Send + 'static,
    S::Future: Send + 'static,
    S::Response: Send + 'static,
{
    /// `now` is the time, if the clock was read just before.
    ///
    /// All that a write needs is in this one function: each move of the request or of the write from one into another
    /// costs as much as reading a clock.
    pub(crate) fn call_at(&mut self, mut request: Req, now: Option<Instant>) -> ResponseFuture<S, Req> {
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
            let error = CallError::refused(Refusal::Config(what)).of_request(&request, effect);
            return self.refuse(error);
        }
        if !effect.is_write() {
            let reporter = outermost.then(|| self.events.share());
            return ResponseFuture::passing(self.inner.call(request), reporter, call, basis, effect);
        }

        if context.is_guarded() {
            return self.pass_on(request, call, effect, basis, outermost);
        }
        let attempt_until = context.attempt_until();
        let above = context.take_activity().map(|activity| Box::new(Above { activity, attempt_until }));
        context.set_guarded(self.config.may_replay());

        let id = EntryId::of(call);
        let keyed = self.put_key(&mut request, id);
        let key = self.config.conflict_key.as_ref().and_then(|key| key(&request));
        let hold = match key {
            Some(key) => match self.admit(&request, effect, id, key) {
                Ok(hold) => Some(hold),
                Err(error) => {
                    if let Some(above) = above {
                        above.activity.turned_away(Giver::of(&self.shared));
                    }
                    return self.refuse(error);
                }
            },
            None => None,
        };
        let lane = Arc::clone(self.lane.get_or_insert_with(|| {
            Arc::new(Lane {
                config: Arc::clone(&self.config),
                shared: Arc::clone(&self.shared),
                spare: Mutex::new(self.inner.clone()),
            })
        }));
        let context = request.context();
        let events = match context.events.is_set() {
            true => context.events.share(),
            false => self.events.share(),
        };
        let until = context.until().clone();
        let arguments = self.config.arguments.as_ref().and_then(|arguments| arguments(&request));
        // Once the caller's own functions, which may panic, have had their say.
        if let Some(Above { activity, .. }) = above.as_deref()
            && !activity.take_over()
        {
            return self.too_late(request, Arc::clone(activity), effect);
        }
        // A check may say how long the server keeps a key of the caller's own.
        let by_both = keyed || self.config.check.is_some() || self.shared.ledger.memory().is_none();
        let first_sent = FirstSent::at(now.unwrap_or_else(Instant::now), &self.config.clock, by_both);
        let guard = guard(&self.shared, hold.as_deref());
        let current =
            Attempted::prepare(&self.config, &mut request, until.most(first_sent.at), first_sent.at, guard);
        if let Some(above) = &above {
            current.activity.is_within(&above.activity);
        }
        let apart = above.as_deref().is_some_and(|above| {
            let key = hold.as_deref().map(|hold| &**hold.key());
            above.activity.is_kept_apart_from(self.shared.ledger.keys().number(), key)
        });
        let name = request.name();
        let mut begun = Begun::new(|| Parts {
            lane,
            kept: if self.config.may_need_request() { replica(&request) } else { None },
            name,
            effect,
            basis,
            call,
            until,
            current,
            hold,
            keyed,
            account: Account::new(id, arguments, first_sent, &self.shared),
            events,
            outermost,
            above,
            apart,
        });
        if self.shared.ledger.memory().is_some() && begun.hand_over() {
            return begun.handed_over(self.inner.call(request));
        }
        begun.enter(request, || {
            // The service that is ready stays so until the ledger has answered.
            let spare = self.inner.clone();
            mem::replace(&mut self.inner, spare)
        })
    }

    /// It was held up on its way here, and a layer further out no longer counts on it.
    #[cold]
    fn too_late(
        &mut self,
        mut request: Req,
        activity: Arc<Activity>,
        effect: Effect,
    ) -> ResponseFuture<S, Req> {
        request.context_mut().set_activity(Some(activity));
        let error = CallError::attempt_timeout(Delivery::NotSent).of_request(&request, effect);
        self.refuse(error.with_attempt(None).with_request(request))
    }

    /// The service that is ready is not called, and would keep others from their turn until it is: a clone is not ready.
    #[cold]
    fn refuse(&mut self, error: CallError) -> ResponseFuture<S, Req> {
        self.inner = self.inner.clone();
        ResponseFuture::refused(error)
    }

    /// Hands a write over for which a layer further out answers.
    #[cold]
    fn pass_on(
        &mut self,
        mut request: Req,
        call: CallId,
        effect: Effect,
        basis: Basis,
        outermost: bool,
    ) -> ResponseFuture<S, Req> {
        let order = match self.let_pass(&mut request, EntryId::of(call)) {
            Ok(order) => order,
            Err(refused) => {
                if let Some(outer) = request.context().activity() {
                    outer.turned_away(Giver::of(&self.shared));
                }
                return self.refuse(refused.of_request(&request, effect).with_attempt(None));
            }
        };
        let reporter = outermost.then(|| self.events.share());
        let activity = request.context().activity().cloned();
        let passage = order.map(|order| Passage::new(order, activity.clone()));
        let marks = activity.map(|outer| (outer, Giver::of(&self.shared)));
        if let Some((outer, by)) = &marks {
            outer.passes(*by);
        }
        let passing = Passing { reporter, call, basis, effect };
        ResponseFuture::passed(self.inner.call(request), Passed { passing, marks, passage })
    }

    /// What this layer does with each attempt of a write that another one may replay; with its place among those of this
    /// one, if it has any. It keeps no entry of it: of its end nobody would tell.
    fn let_pass(&self, request: &mut Req, id: EntryId) -> Result<Option<Order>, CallError> {
        let wrong = |what| CallError::refused(Refusal::Config(what));
        let (config, ledger) = (&self.config, &self.shared.ledger);
        let entered = request.context().activity().and_then(|outer| outer.entered_in(ledger.keys().number()));
        if config.ledger.is_some() && entered.is_none() {
            return Err(wrong(
                "WriteSafetyLayer: a layer further out may replay this write, so that the ledger of this one would \
                 not have it; give that one the same ledger, or this one none",
            ));
        }
        self.put_key(request, id);
        let Some(key) = config.conflict_key.as_ref().and_then(|key| key(request)) else {
            let counts = config.may_replay() && !config.independent_writes;
            let conflicts = &self.shared.conflicts;
            return Ok(counts.then(|| Order::Keyless(Arc::clone(conflicts), conflicts.hand_over())));
        };
        // A ledger that cannot be asked at once was asked for the other layer's key.
        if ledger.memory().is_none() && entered.flatten().as_deref() != Some(&*key) {
            return Err(wrong(
                "WriteSafetyLayer: a layer further out may replay this write, and has the same ledger and another \
                 conflict_key; give both the same",
            ));
        }
        // In that order: a doubt that ends its call is in the ledger before its hold goes.
        let hold = self.shared.conflicts.pass(key.into(), id);
        let mut hold = hold.map_err(|(id, method)| refused(LedgerError::KeyInDoubt { id, method }))?;
        if let Some(memory) = ledger.memory().filter(|_| !off!(KeyInDoubt)) {
            memory.admit(hold.key()).map_err(refused)?;
        }
        hold.hand_over();
        Ok(Some(Order::Keyed(hold)))
    }

    /// Puts an idempotency key into the write, if it shall have one. What travels with the call stays as it is, also
    /// where the request is made anew.
    fn put_key(&self, request: &mut Req, id: EntryId) -> bool {
        let Some(keyed) = &self.config.keyed else { return false };
        let context = request.context().for_attempt();
        let put = (keyed.put)(request, &id.to_string());
        *request.context_mut() = context;
        put
    }

    /// Whether a write with that conflict key may be handed over.
    fn admit(&self, request: &Req, effect: Effect, id: EntryId, key: String) -> Result<Box<Hold>, CallError> {
        let refuse = |error| refused(error).of_request(request, effect).with_attempt(None);
        let hold = self.shared.conflicts.enter(key.into(), id);
        let hold = hold.map_err(|(id, method)| refuse(LedgerError::KeyInDoubt { id, method }))?;
        // In that order: a doubt that ends its call is in the ledger before its hold goes.
        if let Some(memory) = self.shared.ledger.memory().filter(|_| !off!(KeyInDoubt)) {
            memory.admit(hold.key()).map_err(refuse)?;
        }
        Ok(Box::new(hold))
    }
}

/// What the layers further in are told of this one.
fn guard(shared: &Shared, hold: Option<&Hold>) -> Guard {
    let key = hold.map(|hold| Arc::clone(hold.key()));
    Guard { ledger: shared.ledger.keys().number(), key, claims: shared.ledger.memory().is_none() }
}

/// The refusal of a write that cannot be entered.
fn refused(error: LedgerError) -> CallError {
    let refusal = match &error {
        LedgerError::KeyInDoubt { id, .. } => Refusal::KeyInDoubt(*id),
        _ => Refusal::Ledger,
    };
    CallError::refused(refusal).caused_by(error)
}

/// An attempt's own time and marks. Each hand-over gets its own.
struct Attempted {
    until: Option<Instant>,
    /// How long the call had stood still when it began; `None` if its time is the server's and goes on meanwhile.
    stood: Option<Duration>,
    /// Tells when the last byte was sent, from which quarantines count, and, if the caller goes away, whether
    /// the request was still withdrawn.
    activity: Arc<Activity>,
}

impl Attempted {
    /// Gives the request what its attempt needs: by default half of the time left, where a doubt may be settled
    /// in the other half.
    fn prepare<Req: Call, Res>(
        config: &Config<Req, Res>,
        request: &mut Req,
        deadline: Deadline,
        now: Instant,
        guard: Guard,
    ) -> Self {
        let until = match (config.attempt_timeout, config.may_settle(), deadline.instant()) {
            (Some(timeout), _, _) => now.checked_add(timeout),
            (None, true, Some(at)) => now.checked_add(at.saturating_duration_since(now) / 2),
            (None, _, _) => None,
        };
        let mut attempted = Self::bounded(request, until.filter(|until| !deadline.is_past(*until)), guard);
        if attempted.until.is_some() {
            attempted.stood = Some(request.context().until().stood());
        }
        attempted
    }

    /// Gives the request until then by the clock, or until the deadline.
    fn bounded<Req: Call>(request: &mut Req, until: Option<Instant>, guard: Guard) -> Self {
        let activity = Activity::guarded(guard);
        let context = request.context_mut();
        context.set_attempt_until(until);
        context.set_activity(Some(Arc::clone(&activity)));
        Self { until, stood: None, activity }
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
