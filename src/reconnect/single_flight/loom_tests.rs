//! Connecting and losing a connection, in every order within bounds.
//!
//! The connector is a scripted one, time stands still, and a lost wake-up is a deadlock, which loom reports.

use std::{sync::Arc as StdArc, task::Wake};

use loom::{model::Builder, sync::Condvar, thread};
use tower::Service;

use super::*;
use crate::{CallError, retry::backoff::Schedule};

/// Wakes a thread.
#[derive(Default)]
struct Signal {
    rung: Mutex<bool>,
    told: Condvar,
}

impl Wake for Signal {
    fn wake(self: StdArc<Self>) {
        *self.rung.lock().unwrap() = true;
        self.told.notify_one();
    }
}

impl Signal {
    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.told.wait(rung).unwrap();
        }
        *rung = false;
    }
}

/// What connects do, and how many there were.
#[derive(Clone)]
struct Maker {
    plan: Plan,
    gate: StdArc<Gate>,
    made: StdArc<atomic::AtomicUsize>,
}

#[derive(Clone, Copy)]
enum Plan {
    /// There at once.
    AtOnce,
    /// There at the second poll, which it asks for.
    AfterAnotherPoll,
    /// There when the gate is open.
    AtTheGate,
    Fails,
}

#[derive(Default)]
struct Gate {
    state: Mutex<(bool, Option<Waker>)>,
}

impl Gate {
    fn open(&self) {
        let waker = {
            let mut state = self.state.lock().unwrap();
            state.0 = true;
            state.1.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

struct Making {
    plan: Plan,
    gate: StdArc<Gate>,
    polled: bool,
}

impl Future for Making {
    type Output = Result<u8, BoxError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let plan = self.plan;
        match plan {
            Plan::AtOnce => Poll::Ready(Ok(7)),
            Plan::Fails => Poll::Ready(Err("refused".into())),
            Plan::AfterAnotherPoll if mem::replace(&mut self.polled, true) => Poll::Ready(Ok(7)),
            Plan::AfterAnotherPoll => {
                cx.waker().wake_by_ref();
                Poll::Pending
            }
            Plan::AtTheGate => {
                let mut state = self.gate.state.lock().unwrap();
                if state.0 {
                    return Poll::Ready(Ok(7));
                }
                state.1 = Some(cx.waker().clone());
                Poll::Pending
            }
        }
    }
}

impl Service<()> for Maker {
    type Response = u8;
    type Error = BoxError;
    type Future = Making;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Making {
        self.made.fetch_add(1, Ordering::Relaxed);
        Making { plan: self.plan, gate: StdArc::clone(&self.gate), polled: false }
    }
}

/// A shared connection, and what counts its connects.
#[derive(Clone)]
struct World {
    shared: StdArc<Shared<Maker>>,
    maker: Maker,
}

impl World {
    fn new(plan: Plan) -> Self {
        let maker = Maker { plan, gate: StdArc::default(), made: StdArc::default() };
        let config = Config {
            connect_timeout: Duration::from_secs(60),
            crash_limit: 5,
            cool_down: Duration::from_secs(60),
            max_waiters: 10,
            backoff: Schedule::new(
                backon::ConstantBuilder::new().with_delay(Duration::ZERO).without_max_times(),
            ),
        };
        let shared = StdArc::new(Shared::new(
            maker.clone(),
            config,
            Events::default(),
            crate::connection::Hooks::default(),
        ));
        Self { shared, maker }
    }

    /// One that has its first connection.
    fn connected() -> (Self, StdArc<Generation>) {
        let world = Self::new(Plan::AtOnce);
        let first = join(spawn({
            let world = world.clone();
            move || world.connect().unwrap()
        }));
        (world, first)
    }

    fn made(&self) -> usize {
        self.maker.made.load(Ordering::Relaxed)
    }

    fn poll(&self, waiter: &mut Waiter<Maker>, signal: &StdArc<Signal>) -> Poll<Connected<Maker>> {
        let waker = Waker::from(StdArc::clone(signal));
        self.shared.poll_connected(waiter, Deadline::Never, &mut Context::from_waker(&waker))
    }

    /// What a call does until it has a connection: the generation that it got.
    fn connect(&self) -> Result<StdArc<Generation>, CallError> {
        let (mut waiter, signal) = (Waiter::new(StdArc::clone(&self.shared)), StdArc::default());
        loop {
            match self.poll(&mut waiter, &signal) {
                Poll::Ready(connected) => {
                    return connected.map(|(local, _)| StdArc::clone(&local.generation));
                }
                Poll::Pending => signal.wait(),
            }
        }
    }

    /// What a call does that is dropped after its first poll.
    fn try_to_connect(&self) {
        let (mut waiter, signal) = (Waiter::new(StdArc::clone(&self.shared)), StdArc::default());
        let _ = self.poll(&mut waiter, &signal);
    }

    fn lose(&self, generation: &Generation) {
        self.shared.lost(generation, &CallError::closed("gone"), None);
    }
}

/// Explores what happens in threads of that kind.
fn explore(scenario: impl Fn() + Send + Sync + 'static) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().unwrap();
    // For the timers, which never fire. Loom has all its threads on this one.
    let _entered = runtime.enter();
    let mut builder = Builder::new();
    builder.preemption_bound = Some(3);
    builder.check(scenario);
}

fn spawn<T: Send + 'static>(run: impl FnOnce() -> T + Send + 'static) -> thread::JoinHandle<T> {
    thread::Builder::new().stack_size(64 * 1024).spawn(run).unwrap()
}

fn join<T>(thread: thread::JoinHandle<T>) -> T {
    thread.join().unwrap()
}

#[test]
fn loom_two_calls_share_one_connect() {
    for plan in [Plan::AtOnce, Plan::AfterAnotherPoll] {
        explore(move || {
            let world = World::new(plan);
            let other = spawn({
                let world = world.clone();
                move || world.connect().unwrap().number
            });
            let own = spawn({
                let world = world.clone();
                move || world.connect().unwrap().number
            });
            assert_eq!((join(own), join(other), world.made()), (1, 1, 1));
        });
    }
}

#[test]
fn loom_a_connect_whose_driver_goes_is_driven_on_by_who_waits() {
    explore(|| {
        let world = World::new(Plan::AtTheGate);
        let goes = spawn({
            let world = world.clone();
            move || world.try_to_connect()
        });
        let waits = spawn({
            let world = world.clone();
            move || world.connect().unwrap().number
        });
        world.maker.gate.open();
        join(goes);
        assert_eq!((join(waits), world.made()), (1, 1));
    });
}

#[test]
fn loom_a_connect_that_fails_ends_all_who_waited_for_it() {
    explore(|| {
        let world = World::new(Plan::Fails);
        let other = spawn({
            let world = world.clone();
            move || world.connect().map(|_| ()).unwrap_err()
        });
        let own = spawn({
            let world = world.clone();
            move || world.connect().map(|_| ()).unwrap_err()
        });
        for error in [join(own), join(other)] {
            assert!(matches!(error.cause(), crate::Cause::ConnectFailed(_)), "{error}");
        }
        // One that came too late for the first makes one of its own, and nothing latches.
        assert!((1..=2).contains(&world.made()));
    });
}

#[test]
fn loom_a_closure_that_two_calls_find_is_followed_by_one_connect() {
    explore(|| {
        let (world, first) = World::connected();
        let calls = [(), ()].map(|()| {
            let (world, first) = (world.clone(), StdArc::clone(&first));
            spawn(move || {
                world.lose(&first);
                world.connect().unwrap().number
            })
        });
        // The second one's news is stale, and ends no connection that was made since.
        assert_eq!((calls.map(join), world.made()), ([2, 2], 2));
    });
}

#[test]
fn loom_a_call_that_comes_while_the_connection_is_lost_gets_the_old_one_or_the_next() {
    explore(|| {
        let (world, first) = World::connected();
        let loses = spawn({
            let (world, first) = (world.clone(), StdArc::clone(&first));
            move || world.lose(&first)
        });
        let comes = spawn({
            let world = world.clone();
            move || match world.shared.connected() {
                // What a service holds on to.
                Some((local, _)) => local.generation.number,
                None => world.connect().unwrap().number,
            }
        });
        let got = join(comes);
        join(loses);
        assert!(got == 1 || got == 2, "{got}");
        assert_eq!(world.made() as u64, got);
        assert_eq!(
            world.shared.connected().map(|(local, _)| local.generation.number),
            (got == 2).then_some(2)
        );
    });
}

#[test]
fn loom_a_shutdown_ends_whoever_waits_for_a_connect() {
    explore(|| {
        let world = World::new(Plan::AtTheGate);
        let calls = [(), ()].map(|()| {
            let world = world.clone();
            spawn(move || world.connect().map(|_| ()).unwrap_err())
        });
        world.shared.begin_shutdown();
        for error in calls.map(join) {
            assert!(matches!(error.cause(), crate::Cause::Refused(Refusal::Shutdown)), "{error}");
        }
    });
}
