//! Who waits for a connect, and the waker that the connect is polled with.
//!
//! It wakes the driver alone, since most often that is enough. A driver can be alive and yet not be polled,
//! because its task awaits something else, perhaps another call that waits for this very connect. So if the
//! driver does not poll the connect for a while after it was woken, everybody who waits is woken, and whoever
//! comes first drives on.

#[cfg(not(goaround_loom))]
use std::sync::{Mutex, MutexGuard};
use std::{
    collections::BTreeMap,
    mem,
    sync::{Arc, PoisonError},
    task::{Wake, Waker},
    time::Duration,
};

#[cfg(goaround_loom)]
use loom::sync::{Mutex, MutexGuard};

use tokio::{runtime::Handle, time::sleep};

/// How long the driver has to poll the connect once it is woken.
const GRACE: Duration = Duration::from_millis(20);

#[derive(Default)]
pub(super) struct Bell(Mutex<State>);

#[derive(Default)]
struct State {
    waiters: BTreeMap<u64, Waker>,
    driver: Option<u64>,
    /// How often the connect has been polled.
    polls: u64,
    /// Whether it is due to be polled.
    rung: bool,
    /// Whether anybody may poll it.
    stalled: bool,
    watched: bool,
    runtime: Option<Handle>,
}

impl Bell {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.lock().waiters.len()
    }

    /// Enters a waiter; gives back what is to be dropped without any lock.
    pub(super) fn enter(&self, key: u64, waker: &Waker) -> Option<Waker> {
        let mut state = self.lock();
        match state.waiters.get(&key) {
            Some(entered) if entered.will_wake(waker) => None,
            _ => state.waiters.insert(key, waker.clone()),
        }
    }

    pub(super) fn may_drive(&self, key: u64) -> bool {
        let state = self.lock();
        state.stalled || state.driver.is_none_or(|driver| driver == key)
    }

    /// That waiter is about to poll the connect.
    pub(super) fn drives(&self, key: u64) {
        // The watch needs a clock that goes.
        let runtime = if cfg!(goaround_loom) { None } else { Handle::try_current().ok() };
        let mut state = self.lock();
        state.driver = Some(key);
        state.polls += 1;
        (state.rung, state.stalled) = (false, false);
        let old = mem::replace(&mut state.runtime, runtime);
        // Without the lock: a handle may be the last thing that keeps somebody's waker.
        drop(state);
        drop(old);
    }

    /// A waiter is gone. If it was the driver, the one that waits longest is, from now on: it passes the
    /// baton on in its turn if it is dropped before it is polled.
    pub(super) fn leave(self: &Arc<Self>, key: u64) {
        let (own, inherits) = {
            let mut state = self.lock();
            let own = state.waiters.remove(&key);
            let was_driver = state.driver == Some(key);
            if was_driver {
                state.driver = state.waiters.keys().next().copied();
            }
            (own, was_driver && state.driver.is_some())
        };
        drop(own);
        if inherits {
            self.wake_by_ref();
        }
    }

    /// The connect has ended: gives out who is to be woken.
    pub(super) fn clear(&self) -> BTreeMap<u64, Waker> {
        let mut state = self.lock();
        (state.driver, state.rung, state.stalled) = (None, false, false);
        let (waiters, old) = (mem::take(&mut state.waiters), state.runtime.take());
        drop(state);
        drop(old);
        waiters
    }
}

/// Sees to it that the connect is polled; over when it is dropped, also by a runtime that is shut down.
struct Watch(Arc<Bell>);

impl Watch {
    async fn run(self) {
        let mut polls = self.0.lock().polls;
        loop {
            sleep(GRACE).await;
            let mut state = self.0.lock();
            if !state.rung || state.polls == polls {
                state.watched = false;
                state.stalled = state.rung;
                let all = match state.stalled {
                    true => state.waiters.values().cloned().collect(),
                    false => Vec::new(),
                };
                drop(state);
                return all.into_iter().for_each(Waker::wake);
            }
            polls = state.polls;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.0.lock().watched = false;
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let (driver, watch) = {
            let mut state = self.lock();
            state.rung = true;
            let driver = state.driver.and_then(|driver| state.waiters.get(&driver).cloned());
            let watch = if state.watched { None } else { state.runtime.clone() };
            state.watched |= watch.is_some();
            (driver, watch)
        };
        if let Some(driver) = driver {
            driver.wake();
        }
        if let Some(runtime) = watch {
            drop(runtime.spawn(Watch(Arc::clone(self)).run()));
        }
    }
}

#[cfg(all(test, goaround_loom))]
mod loom_tests {
    use loom::{
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    use super::*;

    /// Counts how often a waiter was woken.
    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    struct Queue {
        bell: std::sync::Arc<Bell>,
        woken: [std::sync::Arc<Woken>; 3],
        driven: [AtomicUsize; 3],
    }

    impl Queue {
        fn new() -> Arc<Self> {
            Arc::new(Self { bell: Default::default(), woken: Default::default(), driven: Default::default() })
        }

        /// What a waiter does each time that it is polled.
        fn poll(&self, key: usize) {
            drop(self.bell.enter(key as u64, &Waker::from(self.woken[key].clone())));
            if self.bell.may_drive(key as u64) {
                self.bell.drives(key as u64);
                self.driven[key].fetch_add(1, Ordering::Relaxed);
            }
        }

        fn driven(&self, key: usize) -> usize {
            self.driven[key].load(Ordering::Relaxed)
        }

        fn woken(&self, key: usize) -> usize {
            self.woken[key].0.load(Ordering::Relaxed)
        }
    }

    #[test]
    fn loom_a_driver_that_goes_hands_the_baton_to_whoever_waits() {
        loom::model(|| {
            let queue = Queue::new();
            queue.poll(0);
            let goes = thread::spawn({
                let queue = queue.clone();
                move || queue.bell.leave(0)
            });
            queue.poll(1);
            goes.join().unwrap();
            // Either it drives already, or it was told that it is to.
            assert!(queue.driven(1) > 0 || queue.woken(1) > 0);
        });
    }

    #[test]
    fn loom_a_connect_that_is_due_while_its_driver_goes_is_driven() {
        loom::model(|| {
            let queue = Queue::new();
            queue.poll(0);
            queue.poll(1);
            let goes = thread::spawn({
                let queue = queue.clone();
                move || queue.bell.leave(0)
            });
            let due = thread::spawn({
                let queue = queue.clone();
                move || queue.bell.wake_by_ref()
            });
            goes.join().unwrap();
            due.join().unwrap();
            assert!(queue.woken(1) > 0);
            queue.poll(1);
            assert_eq!(queue.driven(1), 1);
        });
    }

    #[test]
    fn loom_the_end_of_a_connect_wakes_all_that_wait_and_none_that_has_gone() {
        loom::model(|| {
            let queue = Queue::new();
            queue.poll(0);
            queue.poll(1);
            let goes = thread::spawn({
                let queue = queue.clone();
                move || queue.bell.leave(1)
            });
            queue.bell.clear().into_values().for_each(Waker::wake);
            goes.join().unwrap();
            assert_eq!(queue.woken(0), 1);
            assert_eq!(queue.bell.len(), 0);
        });
    }
}
