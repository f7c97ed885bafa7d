//! One connect for all who wait: baton passing.
//!
//! At any time at most one waiter, the driver, polls the connect; the others have left their wakers. When
//! the connect ends, all are woken and find its result. When the driver is dropped, it names another waiter
//! the driver and wakes it, and that one, dropped in its turn before it was polled, does the same. A driver
//! that is woken and not polled loses the baton to whoever is (see [`Bell`]), also to one on another runtime, on
//! which the connect then gets its timers anew: its driver's runtime may not run any more.
//!
//! Invariant: while a connect is under way and somebody waits, the driver is one of those who wait.
//!
//! Two things make a stale failure harmless: every connection has a number, and only the failure of the
//! *current* one makes the next connect due; and a connect's result lives in the [`Ticket`] of that connect,
//! so that a waiter that is late finds the result of the one it waited for and of no other.

#[cfg(not(goaround_loom))]
use std::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64},
};
use std::{
    collections::{BTreeMap, VecDeque},
    future::Future,
    mem,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, OnceLock, PoisonError, Weak,
        atomic::{self, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

#[cfg(goaround_loom)]
use loom::sync::{
    Mutex, MutexGuard,
    atomic::{AtomicBool, AtomicU64},
};
use tokio::{
    runtime::Id,
    sync::Notify,
    time::{Instant, Sleep, sleep_until},
};
use tower::Service;

use super::{
    Config,
    bell::{Bell, here},
    generation::Generation,
};
use crate::{
    BoxError, CallError, Closure, Deadline, Effect, Refusal,
    census::{AnySeat, Census, Seat, holding},
    connection::{BoxFuture, Connection, Hooks, Reaper, discard, known},
    deadline::later,
    delivery::ConnectError,
    event::{Event, Events, Incident},
    retry::backoff::Waits,
    wakers::wake_all,
};

/// How many ends of connections are kept as the evidence of a crash loop.
const EVIDENCE_KEPT: usize = 8;
/// How long the end of the last process is waited for before the next connect begins all the same, or a shutdown goes on.
/// The connector that made the process has bounds of its own.
pub(super) const REAPING: Duration = Duration::from_secs(10);

/// What all clones of a service share.
pub(crate) struct Shared<M: Service<()>> {
    state: Mutex<State<M>>,
    /// Who waits for the connect. Where both are needed it is locked after the state.
    bell: Arc<Bell>,
    /// The number of the connection in use; 0 where there is none.
    current: AtomicU64,
    closing: AtomicBool,
    /// Told, while closing, whenever a call has ended.
    pub(crate) ended: Notify,
    config: Config,
    events: Events,
    hooks: Hooks,
}

struct State<M: Service<()>> {
    phase: Phase<M>,
    /// The connector; with the connect while one is under way.
    maker: Option<M>,
    next_waiter: u64,
    /// The number of the last connection made.
    made: u64,
    /// Connects that failed since the last one that did not.
    failures: Option<Waits>,
    last_delay: Option<Duration>,
    not_before: Option<(Instant, Arc<Failure>)>,
    /// The closure that the next connect follows.
    lost: Option<Lost>,
    /// Connections in a row that closed without an answer, and how they ended.
    barren: u32,
    evidence: VecDeque<String>,
    cool_until: Option<Instant>,
    /// What the clones and their calls hold, for counting.
    locals: Census<Local<M>>,
    /// What calls hold that have waited for their connection: one for all of them, since there may be many.
    waited: Weak<Local<M>>,
}

enum Phase<M: Service<()>> {
    Idle,
    /// `work` is away while its driver polls it.
    Connecting {
        ticket: Arc<Ticket>,
        work: Option<Box<Connect<M>>>,
    },
    Connected {
        generation: Arc<Generation>,
        connection: M::Response,
    },
}

/// One connect, and its failure once it has failed.
struct Ticket {
    failure: OnceLock<Arc<Failure>>,
}

/// Why a connect failed.
struct Failure {
    error: Arc<ConnectError>,
    /// How far it had come, where its time was up.
    so_far: Option<String>,
}

impl Failure {
    /// It as the end of a call that waited for the connect.
    fn of_call(&self) -> CallError {
        let error = CallError::connect_failed(Arc::clone(&self.error));
        match &self.so_far {
            Some(so_far) => error.note(so_far.clone()),
            None => error,
        }
    }
}

/// A connection for a call, and the handle that goes with it.
type Connected<M> = Result<(Arc<Local<M>>, <M as Service<()>>::Response), CallError>;

/// What the holder of a place in the queue does next, without the lock.
enum Step<M: Service<()>> {
    Ready(Box<Connected<M>>),
    Pending,
    Drive(Box<Connect<M>>),
    DropStage(Stage<M::Future>),
    /// A connect whose time is up, and which nobody has polled since.
    Expire(Box<Connect<M>>),
    Report(Box<Incident>),
}

impl<M: Service<()>> Step<M> {
    fn error(error: CallError) -> Self {
        Step::Ready(Box::new(Err(error)))
    }
}

/// What is remembered of a closure until the connect that follows it has ended.
struct Lost {
    at: Instant,
    method: String,
    effect: Option<Effect>,
    error: String,
    generation: u64,
    closure: Option<Closure>,
    known: Option<Arc<dyn Connection>>,
    /// Until when connects wait for the end of the process; set by the first that does.
    reaped_by: Option<Instant>,
    reported: bool,
}

/// What a service's clone and its calls hold of a connection: reference counts of their own.
pub(crate) struct Local<M: Service<()>> {
    pub(super) shared: Arc<Shared<M>>,
    pub(super) generation: Arc<Generation>,
    /// Whether the service itself, and not only its calls, holds this.
    held: atomic::AtomicBool,
    /// What calls hold that are on this connection and do not hold this.
    lane: OnceLock<Weak<AnySeat>>,
}

/// A place in the queue for a connection.
pub(super) struct Waiter<M: Service<()>> {
    shared: Arc<Shared<M>>,
    key: Option<u64>,
    ticket: Option<Arc<Ticket>>,
}

impl<M: Service<()>> Shared<M>
where
    M::Error: Into<BoxError>,
{
    pub(super) fn new(maker: M, config: Config, events: Events, hooks: Hooks) -> Self {
        Self {
            state: Mutex::new(State {
                phase: Phase::Idle,
                maker: Some(maker),
                next_waiter: 0,
                made: 0,
                failures: None,
                last_delay: None,
                not_before: None,
                lost: None,
                barren: 0,
                evidence: VecDeque::new(),
                cool_until: None,
                locals: Census::new(),
                waited: Weak::new(),
            }),
            bell: Arc::default(),
            current: AtomicU64::new(0),
            closing: AtomicBool::new(false),
            ended: Notify::new(),
            config,
            events,
            hooks,
        }
    }

    /// The connection that is there, without waiting, for a service to hold on to.
    pub(super) fn connected(self: &Arc<Self>) -> Option<(Arc<Local<M>>, M::Response)>
    where
        M::Response: Clone,
    {
        if self.current.load(Ordering::Acquire) == 0 {
            return None;
        }
        let mut state = self.lock();
        let (generation, connection) = match &state.phase {
            Phase::Connected { generation, connection } => (Arc::clone(generation), connection.clone()),
            _ => return None,
        };
        Some((self.local(&mut state, generation, true), connection))
    }

    /// Waits for a connection, makes one if there is none, and drives the connect if nobody else does.
    pub(super) fn poll_connected(
        self: &Arc<Self>,
        waiter: &mut Waiter<M>,
        deadline: Deadline,
        cx: &mut Context<'_>,
    ) -> Poll<Connected<M>>
    where
        M::Response: Clone + 'static,
    {
        loop {
            // What is dropped or polled here is foreign code, so the lock is not held.
            match self.step(waiter, deadline, cx) {
                Step::Ready(result) => return Poll::Ready(*result),
                Step::Pending => {
                    self.bell.watch();
                    return Poll::Pending;
                }
                Step::DropStage(stage) => discard(stage),
                Step::Expire(work) => {
                    let timeout = work.timeout;
                    self.finish(*work, Err(ConnectError::TimedOut(timeout)));
                }
                Step::Report(incident) => self.events.emit(Event::Incident(&incident)),
                Step::Drive(mut work) => {
                    let bell = Waker::from(Arc::clone(&self.bell));
                    let mut cx = Context::from_waker(&bell);
                    let polled = catch_unwind(AssertUnwindSafe(|| work.poll(&mut cx)))
                        .unwrap_or(Poll::Ready(Err(ConnectError::Panicked)));
                    match polled {
                        Poll::Pending => {
                            let due = work.due();
                            let mut state = self.lock();
                            if let Phase::Connecting { work: place, .. } = &mut state.phase {
                                *place = Some(work);
                                self.bell.is_due_at(due);
                            }
                            drop(state);
                            self.bell.watch();
                            // A shutdown that came meanwhile has woken nobody who drives.
                            if !self.closing.load(Ordering::Acquire) {
                                return Poll::Pending;
                            }
                        }
                        Poll::Ready(result) => self.finish(*work, result),
                    }
                }
            }
        }
    }

    fn step(self: &Arc<Self>, waiter: &mut Waiter<M>, deadline: Deadline, cx: &mut Context<'_>) -> Step<M>
    where
        M::Response: Clone,
    {
        // Dropped after the lock is: a waker is foreign code.
        let _old;
        let mut guard = self.lock();
        let state = &mut *guard;
        if self.closing.load(Ordering::Acquire) {
            return Step::error(CallError::refused(Refusal::Shutdown));
        }
        if let Some(failure) = waiter.ticket.as_ref().and_then(|ticket| ticket.failure.get()) {
            return Step::error(failure.of_call());
        }
        if let Phase::Connected { generation, connection } = &state.phase {
            let (generation, connection) = (Arc::clone(generation), connection.clone());
            let waited = state.waited.upgrade();
            let local = match waited.filter(|local| Arc::ptr_eq(&local.generation, &generation)) {
                Some(local) => local,
                None => {
                    let local = self.local(state, generation, false);
                    state.waited = Arc::downgrade(&local);
                    local
                }
            };
            return Step::Ready(Box::new(Ok((local, connection))));
        }
        let now = Instant::now();
        if let Phase::Idle = state.phase {
            if let Err(error) = state.may_connect(&self.config, now) {
                // No connect follows this closure for a while.
                return match state.incident(None, false) {
                    Some(incident) => Step::Report(Box::new(incident)),
                    None => Step::error(error),
                };
            }
            if let Err(error) = state.fits(deadline, now) {
                return Step::error(error);
            }
            needs_a_clock();
            let ticket = Arc::new(Ticket { failure: OnceLock::new() });
            let maker = state.maker.take().expect("the connector is here while no connect is under way");
            let not_before = state.not_before.as_ref().map(|(at, _)| *at).filter(|at| *at > now);
            let reap = state.lost.as_mut().and_then(|lost| {
                let by = *lost.reaped_by.get_or_insert_with(|| now + REAPING);
                Some((lost.closure.clone()?, by))
            });
            let work = Some(Box::new(Connect::new(maker, reap, not_before, self.config.connect_timeout)));
            state.phase = Phase::Connecting { ticket, work };
        }
        let waiting = self.bell.len();
        let others_wait = waiting > 0;
        let too_many = waiter.key.is_none() && waiting >= self.config.max_waiters;
        let fits = state.fits(deadline, now);
        let Phase::Connecting { ticket, work } = &mut state.phase else {
            unreachable!("the other phases have returned")
        };
        if waiter.ticket.as_ref().is_none_or(|joined| !Arc::ptr_eq(joined, ticket)) {
            if let Err(error) = fits {
                return Step::error(error);
            }
            if too_many {
                return Step::error(CallError::refused(Refusal::Overloaded(
                    "calls that wait for a connection",
                )));
            }
            // Nobody drove it, and its time is up: this call is owed a connect of its own.
            if let Some(expired) = work.take_if(|work| work.has_expired(now)) {
                if others_wait {
                    return Step::Expire(expired);
                }
                let Connect { maker, stage, .. } = *expired;
                state.phase = Phase::Idle;
                state.maker = Some(maker);
                return Step::DropStage(stage);
            }
            waiter.ticket = Some(Arc::clone(ticket));
        }
        let key = *waiter.key.get_or_insert_with(|| {
            state.next_waiter += 1;
            state.next_waiter
        });
        _old = self.bell.enter(key, cx.waker());
        if work.is_none() || !self.bell.may_drive(key) {
            return Step::Pending;
        }
        needs_a_clock();
        self.bell.drives(key);
        work.take().map_or(Step::Pending, Step::Drive)
    }

    /// A connect has ended: everybody who waits learns of it.
    fn finish(self: &Arc<Self>, work: Connect<M>, result: Result<M::Response, ConnectError>)
    where
        M::Response: 'static,
    {
        let Connect { maker, stage, began, overlapped, .. } = work;
        let is_late = matches!(result, Err(ConnectError::TimedOut(_)));
        let so_far = is_late.then(|| self.so_far()).flatten();
        // The spent future first: the connector may hold something in it that the next connect needs.
        discard(stage);
        // Woken even if something panics here, or the event's sink does; when the lock is free.
        let mut waiters = WakeAll::default();
        let mut guard = self.lock();
        let state = &mut *guard;
        let Phase::Connecting { ticket, .. } = mem::replace(&mut state.phase, Phase::Idle) else {
            return; // A shutdown came first; what was made is dropped.
        };
        state.maker = Some(maker);
        waiters.0 = self.bell.clear();
        let incident;
        let mut probe = None;
        match result {
            Ok(connection) => {
                state.made += 1;
                let known = known(&connection);
                incident = state.incident(known.as_deref(), overlapped);
                let lost = state.lost.take();
                let generation = Arc::new(Generation::new(
                    state.made,
                    if off!(ConnectAge) { Instant::now() } else { began },
                    lost.map(|lost| lost.at),
                    known,
                    self.events.clone(),
                ));
                if state.made > 1 {
                    probe = Some(Arc::clone(&generation));
                }
                state.failures = None;
                state.not_before = None;
                state.phase = Phase::Connected { generation, connection };
                self.current.store(state.made, Ordering::Release);
            }
            Err(error) => {
                let error = Arc::new(Failure { error: Arc::new(error), so_far });
                let config = &self.config;
                let failures = &mut state.failures;
                // The schedule may be the caller's own.
                let next = || failures.get_or_insert_with(|| config.backoff.start()).next();
                let delay = catch_unwind(AssertUnwindSafe(next)).unwrap_or(None);
                // A schedule that has ended goes on with its last delay.
                let delay = delay.or(state.last_delay).unwrap_or_default();
                state.last_delay = Some(delay);
                state.not_before = Some((later(Instant::now(), delay), Arc::clone(&error)));
                incident = state.incident(None, overlapped);
                let _ = ticket.failure.set(error);
            }
        }
        drop(guard);
        if let Some(incident) = incident {
            self.events.emit(Event::Incident(&incident));
        }
        if let Some(generation) = probe {
            run_probe(generation);
        }
    }

    /// The connection with that number is gone, says an error. A stale number changes nothing.
    /// `effect` is that of the call which has the error, if it was a call.
    pub(super) fn lost(&self, generation: &Generation, error: &CallError, effect: Option<Effect>) {
        if !self.is_current(generation) && !off!(Generation) {
            return;
        }
        let mut guard = self.lock();
        let state = &mut *guard;
        // Again, under the lock: whoever finds that there is no connection must find why, too.
        let ignored = off!(Generation) && matches!(state.phase, Phase::Connected { .. });
        if !(self.is_current(generation) || ignored) {
            return;
        }
        self.current.store(0, Ordering::Release);
        let dead = mem::replace(&mut state.phase, Phase::Idle);
        let now = Instant::now();
        if generation.has_answered() {
            state.barren = 0;
            state.evidence.clear();
        } else {
            state.barren = state.barren.saturating_add(1);
            if state.evidence.len() == EVIDENCE_KEPT {
                state.evidence.pop_front();
            }
            state.evidence.push_back(error.cause().to_string());
        }
        if state.barren >= self.config.crash_limit {
            state.cool_until = Some(later(now, self.config.cool_down));
        }
        state.lost = Some(Lost {
            at: now,
            method: error.method().to_owned(),
            effect,
            error: error.cause().to_string(),
            generation: generation.number,
            closure: error.closure().cloned(),
            known: generation.known.clone(),
            reaped_by: None,
            reported: false,
        });
        drop(guard);
        // Foreign code, so without the lock. Its calls in flight keep what they need of it.
        drop(dead);
    }

    fn local(
        self: &Arc<Self>,
        state: &mut State<M>,
        generation: Arc<Generation>,
        held: bool,
    ) -> Arc<Local<M>> {
        let (shared, held) = (Arc::clone(self), atomic::AtomicBool::new(held));
        let local = Arc::new(Local { shared, generation, held, lane: OnceLock::new() });
        state.locals.enter(&local);
        local
    }
}

impl<M: Service<()>> Shared<M> {
    /// A call has given up waiting for a connection with that error: how far the connect under way has come.
    #[cold]
    pub(super) fn unconnected(&self, error: CallError) -> CallError {
        let error = error.note("no connection yet");
        match self.so_far() {
            Some(so_far) => error.note(so_far),
            None => error,
        }
    }

    fn so_far(&self) -> Option<String> {
        self.hooks.under_way.as_ref()?.so_far()
    }

    #[inline]
    pub(super) fn is_current(&self, generation: &Generation) -> bool {
        self.is_number(generation.number)
    }

    /// Whether the connection in use has that number.
    #[inline]
    pub(super) fn is_number(&self, number: u64) -> bool {
        number == self.current.load(Ordering::Acquire)
    }

    fn lock(&self) -> MutexGuard<'_, State<M>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    pub(crate) fn is_closing(&self) -> bool {
        self.closing.load(Ordering::Relaxed)
    }

    /// Refuses what comes from now on and wakes who waits.
    fn begin_shutdown(&self) {
        self.closing.store(true, Ordering::Release);
        let waiters = {
            let _state = self.lock();
            self.bell.clear()
        };
        wake_all(waiters.into_values());
    }

    /// How many calls are on a connection.
    fn in_flight(&self) -> usize {
        self.lock().locals.in_flight()
    }

    /// Gives the connection up, and hands it, or else the last one, out if it is one of this crate's.
    fn take_connection(&self) -> Option<Arc<dyn Connection>> {
        let (phase, last) = {
            let mut state = self.lock();
            self.current.store(0, Ordering::Release);
            let last = state.lost.as_ref().and_then(|lost| lost.known.clone());
            (mem::replace(&mut state.phase, Phase::Idle), last)
        };
        match &phase {
            Phase::Connected { generation, .. } => generation.known.clone(),
            Phase::Idle | Phase::Connecting { .. } => last,
        }
    }

    /// Reports a closure that no connect will follow any more.
    fn report_last(&self) {
        // The process has been reaped by now, but nobody may have asked how it ended. Foreign code, so not
        // under the lock.
        let closure = self.lock().lost.as_ref().and_then(|lost| lost.closure.clone());
        if let Some(closure) = closure {
            closure.learn_exit();
        }
        let incident = self.lock().incident(None, false);
        if let Some(incident) = incident {
            self.events.emit(Event::Incident(&incident));
        }
    }
}

impl<M: Service<()>> Seat for Local<M> {
    fn held(&self) -> &atomic::AtomicBool {
        &self.held
    }

    fn besides(&self) -> usize {
        self.lane.get().and_then(Weak::upgrade).map_or(0, |lane| holding(&lane))
    }
}

impl<M: Service<()>> Local<M> {
    /// The service lets go of it; its calls may still have it.
    pub(super) fn release(&self) {
        self.held.store(false, Ordering::Release);
    }

    #[inline]
    pub(crate) fn shared(&self) -> &Arc<Shared<M>> {
        &self.shared
    }

    /// The number of the connection.
    pub(crate) fn number(&self) -> u64 {
        self.generation.number
    }

    /// Counts the calls that hold that as calls on this connection.
    pub(crate) fn count_also(&self, lane: &Arc<AnySeat>) {
        let _ = self.lane.set(Arc::downgrade(lane));
    }
}

impl<M: Service<()>> Local<M>
where
    M::Error: Into<BoxError>,
{
    /// Another handle on the same connection, for calls that hold something else in its place.
    pub(crate) fn of_a_lane(&self) -> Arc<Self> {
        self.shared.local(&mut self.shared.lock(), Arc::clone(&self.generation), true)
    }
}

// ===== impl State =====

impl<M: Service<()>> State<M> {
    /// Whether a connect may begin at all: not while too many connections in a row were good for nothing.
    fn may_connect(&self, config: &Config, now: Instant) -> Result<(), CallError> {
        match self.cool_until {
            Some(until) if self.barren >= config.crash_limit && now < until => {
                let evidence = self.evidence.iter().cloned().collect();
                Err(CallError::refused(Refusal::CrashLoop(evidence)).after(until - now))
            }
            _ => Ok(()),
        }
    }

    /// The report of the closure that no connect has followed yet, once.
    fn incident(&mut self, after: Option<&dyn Connection>, overlap: bool) -> Option<Incident> {
        let lost = self.lost.as_mut().filter(|lost| !lost.reported)?;
        lost.reported = true;
        Some(lost.incident(after, overlap))
    }

    /// Whether the backoff between connects ends before the deadline.
    fn fits(&self, deadline: Deadline, now: Instant) -> Result<(), CallError> {
        match &self.not_before {
            Some((at, error)) if *at > now && !deadline.allows(now, *at - now) => {
                Err(error.of_call().after(*at - now))
            }
            _ => Ok(()),
        }
    }
}

// ===== impl Waiter =====

impl<M: Service<()>> Waiter<M> {
    pub(super) fn new(shared: Arc<Shared<M>>) -> Self {
        Self { shared, key: None, ticket: None }
    }

    pub(super) fn shared(&self) -> &Arc<Shared<M>> {
        &self.shared
    }
}

impl<M: Service<()>> Drop for Waiter<M> {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.shared.bell.leave(key);
        }
    }
}

#[derive(Default)]
struct WakeAll(BTreeMap<u64, Waker>);

impl Drop for WakeAll {
    fn drop(&mut self) {
        wake_all(mem::take(&mut self.0).into_values());
    }
}

// ===== impl Connect =====

/// A connect under way: the end of the last process, the backoff, the connector's readiness, the connect.
struct Connect<M: Service<()>> {
    maker: M,
    stage: Stage<M::Future>,
    not_before: Option<Instant>,
    timeout: Duration,
    /// Armed when the connector is first asked.
    timer: Option<Timer>,
    began: Instant,
    overlapped: bool,
}

enum Stage<F> {
    Reaping { exit: BoxFuture<bool>, bound: Timer },
    Backoff(Timer),
    Readying,
    Making(Pin<Box<F>>),
}

/// A timer of the runtime that it is polled on: that of one which does not run any more would never fire. Where it is
/// made there need be none.
struct Timer {
    at: Instant,
    sleep: Option<(Option<Id>, Pin<Box<Sleep>>)>,
}

/// Panics, as tokio does, where no runtime with a clock is: before anything was taken that others need. What the
/// connector itself does there, its connect ends with.
fn needs_a_clock() {
    drop(tokio::time::sleep(Duration::ZERO));
}

impl<M: Service<()>> Connect<M>
where
    M::Error: Into<BoxError>,
{
    fn new(
        maker: M,
        reap: Option<(Closure, Instant)>,
        not_before: Option<Instant>,
        timeout: Duration,
    ) -> Self {
        let stage = match reap {
            Some((closure, by)) => Stage::Reaping {
                exit: Box::pin(async move { closure.exited().await.is_none_or(|exit| exit.group_gone) }),
                bound: Timer::new(by),
            },
            None => Stage::after_reaping(not_before),
        };
        let began = Instant::now();
        Self { maker, stage, not_before, timeout, timer: None, began, overlapped: false }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<M::Response, ConnectError>> {
        loop {
            let pending = match &mut self.stage {
                Stage::Reaping { exit, bound } => {
                    let gone = match exit.as_mut().poll(cx) {
                        Poll::Ready(gone) => gone,
                        Poll::Pending if bound.poll(cx).is_ready() => false,
                        Poll::Pending => return Poll::Pending,
                    };
                    self.overlapped = !gone;
                    self.stage = Stage::after_reaping(self.not_before);
                    continue;
                }
                Stage::Backoff(sleep) => {
                    if sleep.poll(cx).is_pending() {
                        return Poll::Pending;
                    }
                    self.stage = Stage::Readying;
                    continue;
                }
                Stage::Readying => {
                    if self.timer.is_none() {
                        self.began = Instant::now();
                        self.timer = Some(Timer::new(later(self.began, self.timeout)));
                    }
                    match self.maker.poll_ready(cx) {
                        Poll::Ready(Ok(())) => {
                            self.stage = Stage::Making(Box::pin(self.maker.call(())));
                            continue;
                        }
                        Poll::Ready(Err(error)) => Poll::Ready(Err(ConnectError::Connector(error.into()))),
                        Poll::Pending => Poll::Pending,
                    }
                }
                Stage::Making(future) => {
                    future.as_mut().poll(cx).map_err(|error| ConnectError::Connector(error.into()))
                }
            };
            if pending.is_pending()
                && let Some(timer) = &mut self.timer
                && timer.poll(cx).is_ready()
            {
                return Poll::Ready(Err(ConnectError::TimedOut(self.timeout)));
            }
            return pending;
        }
    }
}

impl<M: Service<()>> Connect<M> {
    fn has_expired(&self, now: Instant) -> bool {
        self.timer.as_ref().is_some_and(|timer| now >= timer.at)
    }

    /// When it is to be polled, whatever wakes it before.
    fn due(&self) -> Option<Instant> {
        match &self.stage {
            Stage::Reaping { bound: timer, .. } | Stage::Backoff(timer) => Some(timer.at),
            Stage::Readying | Stage::Making(_) => self.timer.as_ref().map(|timer| timer.at),
        }
    }
}

impl<F> Stage<F> {
    fn after_reaping(not_before: Option<Instant>) -> Self {
        match not_before {
            Some(at) => Stage::Backoff(Timer::new(at)),
            None => Stage::Readying,
        }
    }
}

// ===== impl Timer =====

impl Timer {
    fn new(at: Instant) -> Self {
        Self { at, sleep: None }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let on = here().map(|runtime| runtime.id());
        let (_, sleep) = match self.sleep.take() {
            Some(of_here) if of_here.0 == on => self.sleep.insert(of_here),
            _ => self.sleep.insert((on, Box::pin(sleep_until(self.at)))),
        };
        sleep.as_mut().poll(cx)
    }
}

// ===== impl Lost =====

impl Lost {
    fn incident(&self, after: Option<&dyn Connection>, overlap: bool) -> Incident {
        let exit = self.closure.as_ref().and_then(|closure| closure.exit().cloned());
        Incident {
            method: self.method.clone(),
            effect: self.effect,
            error: self.error.clone(),
            generation: self.generation,
            in_flight: self.closure.as_ref().map_or(0, Closure::in_flight),
            before: self.known.as_ref().and_then(|known| known.peer()),
            after: after.and_then(|known| known.peer()),
            process_restarted: after.is_some_and(|known| known.has_process()),
            overlap: overlap || after.is_some_and(|known| known.overlapped()),
            exit: exit.and_then(|exit| exit.status).map(|status| status.to_string()),
            stderr: self.known.as_ref().map(|known| known.stderr()).unwrap_or_default(),
        }
    }
}

/// Lets the connection's own probe prove the recovery, unless a call's read is quicker. Holds nobody back.
fn run_probe(generation: Arc<Generation>) {
    let Some((method, probe)) = generation.known.as_ref().and_then(|known| known.probe()) else { return };
    if let Ok(runtime) = tokio::runtime::Handle::try_current() {
        drop(runtime.spawn(async move {
            if probe.await.is_ok() {
                generation.note_probe(&method);
            }
        }));
    }
}

// ===== impl Managed =====

/// A service's shared state, seen by a [`ReconnectHandle`](super::ReconnectHandle).
pub(super) trait Managed: Send + Sync {
    fn generation(&self) -> Option<u64>;
    fn begin_shutdown(&self);
    fn in_flight(&self) -> usize;
    fn ended(&self) -> &Notify;
    fn take_connection(&self) -> Option<Arc<dyn Connection>>;
    #[cfg(feature = "rmcp")]
    fn connection(&self) -> Option<Arc<dyn Connection>>;
    fn reaper(&self) -> Option<Reaper>;
    fn report_last(&self);
}

impl<M> Managed for Shared<M>
where
    M: Service<()> + Send,
    M::Future: Send,
    M::Response: Send,
{
    fn generation(&self) -> Option<u64> {
        Some(self.current.load(Ordering::Acquire)).filter(|number| *number > 0)
    }

    fn begin_shutdown(&self) {
        self.begin_shutdown();
    }

    fn in_flight(&self) -> usize {
        self.in_flight()
    }

    fn ended(&self) -> &Notify {
        &self.ended
    }

    fn take_connection(&self) -> Option<Arc<dyn Connection>> {
        self.take_connection()
    }

    #[cfg(feature = "rmcp")]
    fn connection(&self) -> Option<Arc<dyn Connection>> {
        match &self.lock().phase {
            Phase::Connected { generation, .. } => generation.known.clone(),
            Phase::Idle | Phase::Connecting { .. } => None,
        }
    }

    fn reaper(&self) -> Option<Reaper> {
        self.hooks.reaper.clone()
    }

    fn report_last(&self) {
        self.report_last();
    }
}

#[cfg(all(test, goaround_loom))]
mod loom_tests;
