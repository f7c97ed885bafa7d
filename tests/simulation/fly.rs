//! One seed: a stack, its callers and their world.

use std::{
    cell::RefCell,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, PanicHookInfo, catch_unwind},
    pin::pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use fastrand::Rng;
use goaround::{
    BoxError, Call, CallContext, CallError, Effect, Event, Evidence, InDoubt, Outcome, ReconnectLayer,
    Refusal, RetryReadOnly, Scope, Settled, Stack, Verdict, WriteSafetyLayer,
    retry::budget::{Budget, Throttle},
    write_safety::{
        KeyedWrites, Resolve,
        ledger::{Ledger, State},
    },
};
use tokio::{
    runtime::Runtime,
    time::{Instant, advance, sleep, timeout},
};
use tower::{Service, ServiceExt};

use crate::{
    judge::{Told, Wrong, is_in_doubt, judge, judge_memory, judge_now},
    late::Turns,
    ledger::Store,
    world::{Branch, CANARIES, Favours, Lies, Plan, Seen, Sort, World, ms, note},
};

/// What is sent over what.
pub trait Harness: 'static {
    type Req: Call + Send + 'static;
    type Res: Send + 'static;
    type Conn: Service<Self::Req, Response = Self::Res, Error = CallError, Future: Send + 'static>
        + Clone
        + Send
        + 'static;
    type Connector: Service<(), Response = Self::Conn, Error = BoxError, Future: Send + 'static>
        + Send
        + 'static;

    const SORT: Sort;
    /// Whether a connection sends only what is polled.
    const SENDS_WHAT_IS_POLLED: bool = false;

    fn connector(world: &World) -> Self::Connector;
    /// A write of that token.
    fn put(token: u32, effect: Effect) -> Self::Req;
    /// How keys are put into the writes, if they can be.
    fn keyed(world: &World) -> Option<KeyedWrites<Self::Req, Self::Res>>;
    /// A read of how often it took effect.
    fn get(token: u32) -> Self::Req;
    fn token(request: &Self::Req) -> u32;
    fn count(response: &Self::Res) -> u32;
    fn response(token: u32) -> Self::Res;
}

type Stacked<H> = Stack<<H as Harness>::Connector, <H as Harness>::Req, <H as Harness>::Res>;

/// What a seed came to.
#[derive(Debug)]
pub struct Flown {
    pub wrong: Vec<Wrong>,
    pub covered: u128,
    pub history: String,
}

/// Until nothing can land any more.
const LAST_ZOMBIE: u64 = 60_000;
/// What is said of a write whose key the server may have forgotten.
const KEY_IS_OVER: &str = "the time is over for which the server keeps the key";
/// The first token of those that call after a crash.
const AFTERWARDS: u32 = 101;
/// What no call takes.
const FOR_EVER: u64 = 3_600_000;

thread_local!(static PANIC: RefCell<Option<String>> = const { RefCell::new(None) });

/// Keeps what panicked on this thread first, for its seed: also in a task that nobody waits for. Checks that panic on
/// purpose do so without the hook.
pub fn panicked(panic: &PanicHookInfo<'_>) {
    PANIC.with_borrow_mut(|kept| _ = kept.get_or_insert_with(|| panic.to_string()));
}

pub fn run<H: Harness>(seed: u64, lies: Lies, record: bool) -> Flown {
    // The jitter's draws, too.
    fastrand::seed(seed);
    // This thread's source of names is drawn once, and must not be so in the middle of a seed: names have an order.
    CallContext::new().assign_id();
    let runtime = Rested::take();
    let world = runtime.enter(|| World::new(seed, lies, H::SORT, record));
    let mut rng = Rng::with_seed(seed ^ 0x5eed);
    let ends_early = (rng.u32(0..100) < 6).then(|| ms(rng.u64(100..20_000)));
    let flown = catch_unwind(AssertUnwindSafe(|| {
        runtime.runtime.block_on(async {
            let flight = fly::<H>(&world, rng);
            let Some(after) = ends_early else { return flight.await };
            if timeout(after, flight).await.is_err() {
                world.cover(Branch::RuntimeShutdown);
            }
        });
        let runtime = runtime.unless_busy();
        judge(&world);
        world.clear();
        let wakers = world.kept_wakers();
        if wakers > 0 {
            world.wrong(Wrong::Leak(format!("{wakers} wakers")));
        }
        if world.holders() > 1 {
            world.wrong(Wrong::Leak(format!("{} hold the world", world.holders() - 1)));
        }
        // What broke something may have left something in it.
        if let Some(runtime) = runtime.filter(|_| world.lock().wrong.is_empty()) {
            runtime.rest();
        }
    }));
    if let Some(panic) = PANIC.take().or_else(|| flown.err().map(|_| "without a word".to_owned())) {
        world.wrong(Wrong::Panicked(panic));
    }
    let history = world.history();
    let state = world.lock();
    Flown { wrong: state.wrong.clone(), covered: state.covered, history }
}

/// A runtime in which nothing goes on, for one seed after the other: to build one for each costs a twentieth of a lean
/// seed.
struct Rested {
    runtime: Runtime,
    built: Instant,
}

thread_local!(static RESTED: RefCell<Option<Rested>> = const { RefCell::new(None) });

/// Where seeds begin, in milliseconds: at a multiple of this, tokio's wheel sorts the timers of a seed as from nought on,
/// so that those of the same millisecond go off in the same order. No seed takes as long.
const ROUND: u64 = 1 << 30;

impl Rested {
    /// The last seed's of this thread, or a new one.
    fn take() -> Self {
        RESTED.take().unwrap_or_else(|| {
            let builder = &mut tokio::runtime::Builder::new_current_thread();
            let runtime = builder.enable_time().start_paused(true).build().unwrap();
            let built = {
                let _entered = runtime.enter();
                Instant::now()
            };
            Self { runtime, built }
        })
    }

    fn enter<T>(&self, then: impl FnOnce() -> T) -> T {
        let _entered = self.runtime.enter();
        then()
    }

    /// Shuts it down with the tasks that it has left, if it has any.
    fn unless_busy(self) -> Option<Self> {
        (self.runtime.metrics().num_alive_tasks() == 0).then_some(self)
    }

    /// Keeps it for the next seed.
    fn rest(self) {
        let passed = self.enter(|| self.built.elapsed()).as_millis() as u64;
        self.runtime.block_on(advance(ms(ROUND - passed % ROUND)));
        RESTED.set(Some(self));
    }
}

/// The throttle, counted.
struct Counted {
    throttle: Throttle,
    world: World,
}

impl Budget for Counted {
    fn deposit(&self) {
        self.throttle.deposit();
    }

    fn withdraw(&self) -> bool {
        let allowed = self.throttle.withdraw();
        if allowed {
            self.world.lock().retries_allowed += 1;
        } else {
            self.world.cover(Branch::RetrySuppressed);
        }
        allowed
    }
}

fn layer<H: Harness>(world: &World, rng: &mut Rng) -> WriteSafetyLayer<H::Req, H::Res> {
    let plan = world.plan();
    let mut layer = match plan.refuses {
        true => WriteSafetyLayer::refuse(),
        false => WriteSafetyLayer::new({
            let world = world.clone();
            move |doubt: InDoubt<H::Req, H::Res>| check::<H>(world.clone(), doubt)
        }),
    };
    if let Some(quarantine) = plan.quarantine
        && !plan.refuses
    {
        layer = layer.quarantine(ms(quarantine));
    }
    if plan.looks_first && !plan.refuses {
        layer = layer.look_first();
    }
    if rng.bool() {
        layer = layer.attempt_timeout(ms(rng.u64(5..8_000)));
    }
    if plan.favours == Favours::SlowConnects {
        layer = layer.attempt_timeout(ms(rng.u64(200..4_000)));
    }
    if rng.u32(0..100) < 20 && !plan.refuses {
        layer = layer.check_timeout(ms(rng.u64(50..8_000)));
    }
    if plan.independent {
        layer = layer.independent_writes();
    }
    if plan.trusts {
        layer = layer.trust(Evidence::TooManyRequests);
    }
    if rng.u32(0..100) < 30 {
        layer = layer.landed_with(|request| H::response(H::token(request)));
    }
    if plan.keys {
        let world = world.clone();
        layer = layer.conflict_key(move |request| world.declared_key(H::token(request)));
    }
    if plan.replays_idempotent {
        layer = layer.replay_idempotent();
    }
    if let Some(keyed) = H::keyed(world) {
        layer = layer.keyed(keyed);
    }
    if plan.store {
        let store = Store::new(world);
        layer = layer.ledger(store).keep_arguments(|request| Some(H::token(request).to_string()));
    }
    let clock = world.clone();
    layer.wall_clock(move || clock.wall_clock()).max_checks(rng.usize(1..4))
}

fn stack<H: Harness>(world: &World, rng: &mut Rng, default: Duration) -> Stacked<H> {
    let writes = layer::<H>(world, rng);
    let throttle = match rng.u32(0..4) {
        0 => Throttle::new(rng.u32(1..5), 50), // tight
        1 => Throttle::new(100, 1_000),        // loose
        _ => Throttle::default(),
    };
    let budget = Counted { throttle, world: world.clone() };
    let attempts = rng.u32(1..5);
    {
        // And one after a closure, whatever the attempts. After a crash there is another stack.
        let mut state = world.lock();
        state.most_reads = state.most_reads.max(attempts + 1);
    }
    let retry =
        RetryReadOnly.attempts(attempts).attempt_timeout(ms(rng.u64(500..6_000))).budget(Arc::new(budget));
    let reconnect = ReconnectLayer::once()
        .connect_timeout(ms(rng.u64(2_000..30_000)))
        .crash_loop(rng.u32(2..6), ms(rng.u64(1_000..20_000)));
    let sink = world.clone();
    let stack = Stack::builder(H::connector(world))
        .deadline(default)
        .writes(writes)
        .retry(retry)
        .reconnect(reconnect)
        .on_event(move |event| heed(&sink, event));
    stack.build().unwrap()
}

/// Keeps what an event says.
fn heed(world: &World, event: Event<'_>) {
    note!(world, "{}", in_short(event));
    let mut state = world.lock();
    let (call, what) = match event {
        Event::Call(r) => {
            if !r.effect.is_write() {
                // Those that the budget is asked for: not after a closure, and not where nothing was sent.
                let asked = r.attempts.windows(2).filter(|two| {
                    two[0].scope == Scope::Call && two[0].delivery != goaround::Delivery::NotSent
                });
                state.retries_made += asked.count() as u32;
            }
            (r.call, Branch::ReadRetried)
        }
        Event::InDoubt(r) => (Some(r.call), Branch::Unknown),
        Event::Abandoned(r) => (r.call, Branch::Abandoned),
        Event::Incident(r) => {
            state.covered |= u128::from(r.overlap) << Branch::Overlap as u64;
            return;
        }
        Event::LateAnswer(_) => {
            state.covered |= 1 << Branch::LateAnswer as u64;
            return;
        }
        _ => return,
    };
    let Some(token) = call.and_then(|call| state.tokens.get(&call).copied()) else { return };
    if let Event::InDoubt(r) = event
        && r.reason.as_ref().is_some_and(|reason| reason.contains("another write was handed over since"))
    {
        let branch = if r.replayed { Branch::Overtaken } else { Branch::OtherWriteSince };
        state.covered |= 1 << branch as u64;
    }
    if let Event::InDoubt(r) = event
        && let Some(reason) = &r.reason
    {
        let over = reason.contains(KEY_IS_OVER);
        state.covered |= u128::from(over) << Branch::WindowPassed as u64;
    }
    if let Event::InDoubt(r) = event
        && r.replayed
        && r.fence.as_ref().is_some_and(|fence| fence.to_string().contains("the server keeps the key"))
    {
        state.covered |= 1 << Branch::KeyedReplay as u64;
    }
    if let Event::Call(r) = event
        && !r.effect.is_write()
    {
        state.covered |= 1 << what as u64;
        if r.outcome.is_none() && r.attempts.iter().any(|attempt| attempt.scope == Scope::Connection) {
            state.covered |= 1 << Branch::ReadSurvivedClosure as u64;
        }
    }
    let reports = &mut state.calls.entry(token).or_default().reports;
    match event {
        Event::Call(_) => reports.calls += 1,
        Event::InDoubt(_) => reports.doubts += 1,
        Event::Abandoned(r) => {
            reports.abandoned += 1;
            reports.answered |= r.outcome == Some(Outcome::Answered);
        }
        _ => {}
    }
}

fn in_short(event: Event<'_>) -> String {
    let attempts = |attempts: &[goaround::Attempt]| {
        let each = attempts.iter().map(|it| {
            let settled = match &it.settled {
                None => String::new(),
                Some(Settled::Landed) => " landed".into(),
                Some(Settled::NotLanded(fence)) => format!(" not landed ({fence})"),
                Some(_) => " settled".into(),
            };
            format!("{}:{:?}/{}{settled}", it.generation.unwrap_or_default(), it.delivery, it.cause)
        });
        each.collect::<Vec<_>>().join(", ")
    };
    match event {
        Event::Call(r) => {
            format!("event: {} [{}] {:?} {:?}", r.method, attempts(&r.attempts), r.outcome, r.notes)
        }
        Event::Abandoned(r) => format!("event: abandoned {} [{}]", r.method, attempts(&r.attempts)),
        Event::InDoubt(r) => format!(
            "event: in doubt {} [{}] verdict {:?} ({:?}), replayed {}, {:?}",
            r.method,
            attempts(&r.attempts),
            r.verdict,
            r.reason,
            r.replayed,
            r.outcome
        ),
        Event::LateAnswer(r) => {
            format!("event: late answer, violates {:?}", r.violated.as_ref().map(|it| it.to_string()))
        }
        other => format!("event: {other:?}"),
    }
}

/// How a caller treats its call.
struct Caller {
    token: u32,
    is_write: bool,
    is_idempotent: bool,
    begins: Duration,
    limit: Option<Duration>,
    leaves_after: Option<Duration>,
    /// Drops the future when it has been polled so often.
    leaves_at_poll: Option<u32>,
    default: Duration,
}

impl Caller {
    fn new(token: u32, rng: &mut Rng, default: Duration, is_storm: bool, plan: &Plan) -> Self {
        let idempotent = if plan.annotated { 50 } else { 20 };
        Self {
            token,
            is_write: rng.u32(0..100) < if is_storm { 20 } else { 70 },
            is_idempotent: rng.u32(0..100) < idempotent || plan.lies.idempotent,
            begins: ms(rng.u64(0..5_000)),
            limit: match rng.u32(0..10) {
                0..3 => Some(ms(rng.u64(1..2_000))),
                3..6 => Some(ms(rng.u64(10..30_000))),
                6 => Some(Duration::MAX),
                _ => None,
            },
            leaves_after: (rng.u32(0..100) < 8).then(|| ms(rng.u64(0..15_000))),
            leaves_at_poll: (rng.u32(0..100) < 8).then(|| rng.u32(1..8)),
            default,
        }
    }

    async fn call<H: Harness>(self, stack: Stacked<H>, world: World) {
        sleep(self.begins).await;
        let token = self.token;
        let effect = if self.is_idempotent { Effect::Idempotent } else { Effect::Write };
        let mut request = if self.is_write { H::put(token, effect) } else { H::get(token) };
        if let Some(limit) = self.limit {
            request = request.within(limit);
        }
        let id = request.context_mut().assign_id();
        let (start, limit) = (Instant::now(), self.limit.unwrap_or(self.default));
        let late = world.plan().late.as_ref();
        let mut turns = late.and_then(|late| late.turns(token, start.checked_add(limit)));
        let calls_first = turns.as_ref().is_some_and(|turns| turns.calls_first);
        {
            let mut state = world.lock();
            let begun = state.tick();
            state.tokens.insert(id, token);
            let plan = world.plan();
            let may_replay = !plan.refuses
                || plan.trusts
                || plan.keeps_keys.is_some()
                || (plan.replays_idempotent && self.is_idempotent);
            let seen = Seen {
                is_write: self.is_write,
                is_idempotent: self.is_idempotent,
                begun,
                goes_when_polled: calls_first && H::SENDS_WHAT_IS_POLLED,
                started: true,
                may_replay,
                ..Seen::default()
            };
            state.calls.insert(token, seen);
        }
        let what = if self.is_write { "write" } else { "read" };
        note!(world, "{what} {token}, within {:?}", self.limit.unwrap_or(self.default));
        let told = match calls_first {
            true => self.wait(call_first::<H>(stack.clone(), request), &mut turns, &world).await,
            false => self.wait(stack.send(request), &mut turns, &world).await,
        };
        let took = start.elapsed();
        // Of the time since the deadline, that in which it was woken and the world did not let it have its turn is the
        // world's own: without that it is as late as any other may be.
        let beyond = turns.map_or(Duration::ZERO, |turns| turns.beyond());
        if took > limit.saturating_add(ms(1)).saturating_add(beyond) {
            world.wrong(Wrong::Late { call: token, by: format!("{took:?}") });
        }
        note!(world, "{what} {token} after {took:?}: {}", said(&told));
        let told: Told = told.map(|told| {
            let count = told.map(|response| H::count(&response));
            count.map(|count| debug_assert!(!self.is_write || count == token || world.plan().annotated))
        });
        if self.is_write {
            judge_now(&world, token, &told);
        }
        if let Some(Err(error)) = &told {
            match error.cause() {
                goaround::Cause::Refused(Refusal::CrashLoop(_)) => world.cover(Branch::CrashLoop),
                goaround::Cause::Refused(Refusal::KeyInDoubt(_)) => {
                    world.cover(match error.attempts().len() {
                        0 | 1 => Branch::KeyRefused,
                        _ => Branch::KeyRefusedLater,
                    })
                }
                goaround::Cause::Deadline => world.cover(Branch::DeadlinePassed),
                goaround::Cause::Refused(Refusal::EffectChanged) => world.cover(match error.outcome() {
                    _ if error.effect().is_write() => Branch::EffectGrown,
                    Outcome::NotDone => Branch::EffectChanged,
                    _ => Branch::EffectChangedInDoubt,
                }),
                _ => {}
            }
        }
        // A server to which it is a read has written nothing that could be overwritten.
        let landed = world.effects(token) > 0;
        let mut state = world.lock();
        let now = state.tick();
        let Some(seen) = state.calls.get_mut(&token) else { return };
        let in_doubt = match &told {
            Some(Ok(())) => false,
            Some(Err(error)) => is_in_doubt(error),
            None => seen.reports.abandoned > 0 && !seen.reports.answered,
        };
        seen.in_doubt = (in_doubt && self.is_write).then_some(now);
        seen.acknowledged = (matches!(told, Some(Ok(()))) && landed).then_some(now);
        seen.told = told;
    }

    async fn wait<T>(
        &self,
        sending: impl Future<Output = Result<T, CallError>>,
        turns: &mut Option<Turns>,
        world: &World,
    ) -> Option<Result<T, CallError>> {
        let mut polls = 0;
        let mut sending = pin!(sending);
        let mut waker = None;
        let sending = poll_fn(|cx| {
            // Of its own, so that it is seen if somebody keeps it for ever.
            let waker = &*waker.get_or_insert_with(|| world.waker(cx.waker()));
            if self.leaves_at_poll.is_some_and(|most| polls >= most) {
                world.cover(Branch::AbandonedAtPoll);
                return Poll::Ready(None);
            }
            if let Some(turns) = turns {
                ready!(turns.poll(cx));
            }
            polls += 1;
            sending.as_mut().poll(&mut Context::from_waker(waker)).map(Some)
        });
        match self.leaves_after {
            Some(after) => timeout(after, sending).await.ok().flatten(),
            None => sending.await,
        }
    }
}

/// As a task does that calls and then has something else to do before it waits for the answer.
async fn call_first<H: Harness>(mut stack: Stacked<H>, request: H::Req) -> Result<H::Res, CallError> {
    let sending = stack.ready().await?.call(request);
    let mut is_polled = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut is_polled, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
    sending.await
}

fn said<T>(told: &Option<Result<T, CallError>>) -> String {
    match told {
        None => "gave up".into(),
        Some(Ok(_)) => "ok".into(),
        // Without its owner, which is random.
        Some(Err(error)) => match error.cause() {
            goaround::Cause::Refused(Refusal::KeyInDoubt(_)) => {
                "not done: another in doubt has its key".into()
            }
            _ => error.to_string(),
        },
    }
}

async fn fly<H: Harness>(world: &World, mut rng: Rng) {
    let default = ms(rng.u64(1_000..60_000));
    let first = stack::<H>(world, &mut rng, default);
    let clones = rng.usize(1..4);
    let stacks: Vec<_> = (0..clones).map(|_| first.clone()).collect();
    let mut flights = Vec::new();
    // Many at once, for the bounds that only many reach.
    let is_storm = rng.u32(0..100) < 3;
    let calls = if is_storm { rng.u32(20..60) } else { rng.u32(1..7) };
    for token in 1..=calls {
        let stack = stacks[rng.usize(0..clones)].clone();
        let caller = Caller::new(token, &mut rng, default, is_storm, world.plan());
        // Boxed: it is large, and would be moved about.
        flights.push(tokio::spawn(Box::pin(caller.call::<H>(stack, world.clone()))));
    }
    drop(stacks);
    let shuts_down = (rng.u32(0..100) < 8).then(|| (ms(rng.u64(0..10_000)), ms(rng.u64(0..5_000))));
    if let Some((after, grace)) = shuts_down {
        sleep(after).await;
        note!(world, "shutdown within {grace:?}");
        if first.in_flight() > 0 {
            world.cover(Branch::StackShutdown);
        }
        if timeout(grace + ms(30_000), first.shutdown(grace)).await.is_err() {
            world.wrong(Wrong::Hang("the shutdown".into()));
        }
    }
    let mut first = first;
    if let Some(at) = world.plan().crashes {
        sleep(ms(at)).await;
        world.crash();
        flights.iter().for_each(tokio::task::JoinHandle::abort);
        for flight in flights.drain(..) {
            let _ = flight.await;
        }
        world.are_crashed();
        drop(first);
        sleep(ms(100) + world.wait(6_000)).await;
        first = stack::<H>(world, &mut rng, default);
        if world.plan().on_file {
            // Others call meanwhile, and may want to touch what is in doubt. Drawn apart, so that other worlds are what
            // they were.
            let mut rng = Rng::with_seed(rng.clone().u64(..) ^ 0xaf7e);
            for token in AFTERWARDS..AFTERWARDS + rng.u32(1..5) {
                let caller = Caller::new(token, &mut rng, default, false, world.plan());
                flights.push(tokio::spawn(Box::pin(caller.call::<H>(first.clone(), world.clone()))));
            }
        }
        resolve::<H>(world, &first).await;
    }
    // Calls without a deadline wait as long as their connection is there.
    let ending = tokio::spawn({
        let world = world.clone();
        async move {
            sleep(ms(100_000)).await;
            world.calm_down();
            world.end();
        }
    });
    for flight in flights {
        match timeout(ms(FOR_EVER), flight).await {
            Ok(ended) => ended.unwrap(),
            Err(_) => return world.wrong(Wrong::Hang("a call".into())),
        }
    }
    ending.abort();
    world.calm_down();
    sleep(ms(LAST_ZOMBIE)).await;
    if shuts_down.is_none() && rng.u32(0..100) < 40 {
        canary::<H>(world, &first).await;
    }
    if !world.plan().store
        && let Ok(listed) = first.ledger().in_doubt().await
    {
        judge_memory(world, &listed);
    }
    drop(first);
    world.end();
    sleep(ms(LAST_ZOMBIE)).await;
    let tasks = tokio::runtime::Handle::current().metrics().num_alive_tasks();
    if tasks > 0 {
        world.wrong(Wrong::Leak(format!("{tasks} tasks")));
    }
}

/// After a crash: settles what the ledger lists, and sends again, as a new call, what has not landed.
async fn resolve<H: Harness>(world: &World, stack: &Stacked<H>) {
    let store = Store::new(world);
    for entry in store.in_doubt().await.unwrap() {
        let token: u32 = entry.arguments.as_ref().unwrap().parse().unwrap();
        let checks = world.clone();
        let mut resolve = Resolve::new(&store, &entry, H::put(token, Effect::Write)).within(ms(60_000));
        if let Some(quarantine) = world.plan().quarantine {
            resolve = resolve.quarantine(ms(quarantine));
        }
        if let Some(seen) = world.lock().calls.get_mut(&token) {
            seen.again = true;
        }
        let resolved = resolve.run(move |doubt| check::<H>(checks.clone(), doubt), stack).await;
        note!(world, "resolved {token}: {:?}", resolved.as_ref().map(|resolved| &resolved.state));
        let Ok(resolved) = resolved else { continue };
        let effects = world.effects(token);
        match resolved.state {
            State::Landed { .. } if effects == 0 => {
                world.wrong(Wrong::Ledger { write: token, what: "resolved as landed" });
            }
            State::Landed { .. } => world.cover(Branch::Resolved),
            State::NotLanded { .. } if effects > 0 => {
                world.wrong(Wrong::Ledger { write: token, what: "resolved as not landed" });
            }
            State::NotLanded { .. } => {
                let again = stack.send(H::put(token, Effect::Write).within(ms(20_000))).await;
                note!(world, "{token} again: {}", said(&Some(again)));
            }
            _ => {}
        }
    }
}

/// Whether the stack works, now that everything else does: nothing has latched, no permit is lost.
async fn canary<H: Harness>(world: &World, stack: &Stacked<H>) {
    for request in [|| H::get(0), || H::put(CANARIES, Effect::Write)] {
        let mut sent = stack.send(request().within(ms(30_000))).await;
        if let Err(error) = &sent
            && let goaround::Cause::Refused(Refusal::CrashLoop(_)) = error.cause()
        {
            // That the last connection had closed, too, may be known only now.
            sleep(error.retry_after().unwrap_or_default()).await;
            sent = stack.send(request().within(ms(30_000))).await;
        }
        if let Err(error) = sent {
            world.wrong(Wrong::Latched(error.to_string()));
        }
    }
    // And a doubt is settled.
    world.lock().loses = Some(CANARIES + 1);
    let sent = stack.send(H::put(CANARIES + 1, Effect::Write).within(ms(30_000))).await;
    // Unless its key's time ends between the decision to replay it and the replay.
    let is_over = |error: &CallError| error.notes().any(|note| note.contains(KEY_IS_OVER));
    if let Err(error) = sent
        && (error.outcome() != Outcome::DoneResultLost && !world.plan().refuses && !is_over(&error))
    {
        world.wrong(Wrong::Latched(error.to_string()));
    }
}

/// Tells the truth as far as it can see it, when it does not fail.
async fn check<H: Harness>(
    world: World,
    doubt: InDoubt<H::Req, H::Res>,
) -> Result<Verdict<H::Res>, BoxError> {
    let token = H::token(doubt.request());
    let lies = world.plan().lies;
    note!(world, "check of {token}, fence: {:?}", doubt.fence().map(ToString::to_string));
    if world.fault(world.plan().faults.check_fails) {
        let fate = world.lock().rng.u32(0..5);
        match fate {
            0 => {
                world.cover(Branch::CheckFailed);
                return Err("failed".into());
            }
            1 => return Ok(doubt.unknown("no idea")),
            2 => {
                world.cover(Branch::CheckInFlight);
                return Ok(doubt.in_flight(ms(300)));
            }
            3 => {
                world.cover(Branch::CheckHung);
                std::future::pending().await
            }
            _ => {
                world.cover(Branch::CheckPanicked);
                // Without the words of the panic hook.
                std::panic::resume_unwind(Box::new("a check"));
            }
        }
    }
    let found = H::count(&doubt.probe(H::get(token)).await?);
    note!(world, "check of {token} finds {found}");
    if found > 0 {
        if world.plan().looks_first && world.plan().quarantine.is_some() && doubt.fence().is_none() {
            world.cover(Branch::LookFirst);
        }
        let with_result = world.chance(50);
        return Ok(if with_result {
            doubt.landed(H::response(token))
        } else {
            doubt.landed_without_result()
        });
    }
    if world.effects(token) > 0 {
        world.cover(Branch::CheckStale);
    } else {
        world.lock().found_absent.insert(token);
    }
    Ok(match lies.because {
        true => doubt.not_landed_because("it is not there"),
        false => doubt.not_landed(),
    })
}
