//! Who waits for a connect, and the waker that the connect is polled with.
//!
//! It wakes the driver alone, since most often that is enough. A driver can be alive and yet not be polled,
//! because its task awaits something else, perhaps another call that waits for this very connect, or because its
//! runtime does not run: a program may have one per thread, and block on one call at a time. So if the driver does
//! not poll the connect for a while after it was woken, everybody who waits is woken, and whoever comes first
//! drives on.
//!
//! A [`Watch`] sees to that, one on each runtime on which somebody waits: none of them depends on another one's
//! clock. On the driver's own runtime, whose timers the connect has, it is there only when the connect was woken;
//! on others also when the connect is due by its own clock.

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

use tokio::{
    runtime::{Handle, Id},
    sync::Notify,
    time::{Instant, sleep, timeout_at},
};

use crate::wakers::{wake, wake_all};

/// How long the driver has to poll the connect once it is woken, or due.
const GRACE: Duration = Duration::from_millis(20);

#[derive(Default)]
pub(super) struct Bell {
    state: Mutex<State>,
    /// Tells the watches that wait until the connect is due that it may be so before.
    rung: Notify,
}

#[derive(Default)]
struct State {
    waiters: BTreeMap<u64, Entered>,
    driver: Option<u64>,
    /// How often the connect has been polled.
    polls: u64,
    /// Whether it is due to be polled.
    rung: bool,
    /// When it is by its own clock, the one of the runtime that it was polled on last.
    due: Option<Instant>,
    polled_on: Option<Id>,
    /// Whether anybody may poll it.
    stalled: bool,
    /// Where somebody waits.
    places: Vec<Place>,
}

struct Entered {
    waker: Waker,
    on: Option<Id>,
}

/// A runtime.
struct Place {
    id: Id,
    runtime: Handle,
    waiters: usize,
    watched: bool,
}

/// What is to be dropped without any lock: a waker is foreign code, and a handle may be the last thing that keeps
/// somebody's waker.
pub(super) struct Left {
    _waker: Option<Waker>,
    _place: Option<Place>,
}

/// The runtime that this is polled on.
pub(super) fn here() -> Option<Handle> {
    if cfg!(goaround_loom) { None } else { Handle::try_current().ok() }
}

impl Bell {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn len(&self) -> usize {
        self.lock().waiters.len()
    }

    /// Enters a waiter; gives back what is to be dropped without any lock.
    pub(super) fn enter(&self, key: u64, waker: &Waker) -> Option<Left> {
        let mut state = self.lock();
        if state.waiters.get(&key).is_some_and(|entered| entered.waker.will_wake(waker)) {
            return None;
        }
        let runtime = here();
        let on = runtime.as_ref().map(Handle::id);
        // It comes before it goes, so that its runtime stays if it is the same.
        if let (Some(id), Some(runtime)) = (on, runtime) {
            match state.places.iter_mut().find(|place| place.id == id) {
                Some(place) => place.waiters += 1,
                None => state.places.push(Place { id, runtime, waiters: 1, watched: false }),
            }
        }
        let old = state.waiters.insert(key, Entered { waker: waker.clone(), on })?;
        Some(state.left(old))
    }

    pub(super) fn may_drive(&self, key: u64) -> bool {
        let state = self.lock();
        state.stalled || state.driver.is_none_or(|driver| driver == key)
    }

    /// That waiter is about to poll the connect.
    pub(super) fn drives(&self, key: u64) {
        let mut state = self.lock();
        state.driver = Some(key);
        state.polls += 1;
        state.polled_on = state.waiters.get(&key).and_then(|entered| entered.on);
        (state.rung, state.stalled) = (false, false);
    }

    /// The connect has been polled: by its own clock it is due then. Whoever was told meanwhile that anybody may poll it
    /// found that somebody did, and waits for the next time.
    pub(super) fn is_due_at(&self, due: Option<Instant>) {
        let mut state = self.lock();
        (state.due, state.stalled) = (due, false);
    }

    /// Sees to it that the connect is polled when it is due, by somebody. Not to be called with a lock held.
    pub(super) fn watch(self: &Arc<Self>) {
        if cfg!(goaround_loom) {
            return;
        }
        let unwatched = self.lock().unwatched();
        for (on, runtime) in unwatched {
            let watch = Watch { bell: Arc::clone(self), on, ended: false };
            drop(runtime.spawn(watch.run()));
        }
    }

    /// A waiter is gone. If it was the driver, the one that waits longest is, from now on: it passes the
    /// baton on in its turn if it is dropped before it is polled.
    pub(super) fn leave(self: &Arc<Self>, key: u64) {
        let (own, inherits) = {
            let mut state = self.lock();
            let own = state.waiters.remove(&key).map(|own| state.left(own));
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
        (state.due, state.polled_on) = (None, None);
        let (waiters, old) = (mem::take(&mut state.waiters), mem::take(&mut state.places));
        drop(state);
        drop(old);
        // The watches end.
        self.rung.notify_waiters();
        waiters.into_iter().map(|(key, entered)| (key, entered.waker)).collect()
    }
}

impl State {
    /// A waiter has gone, or waits elsewhere.
    fn left(&mut self, old: Entered) -> Left {
        let mut gone = None;
        if let Some(at) = self.places.iter().position(|place| Some(place.id) == old.on) {
            self.places[at].waiters -= 1;
            if self.places[at].waiters == 0 {
                gone = Some(self.places.swap_remove(at));
            }
        }
        Left { _waker: Some(old.waker), _place: gone }
    }

    /// Where a watch is needed and none is; taken to be there from now on.
    fn unwatched(&mut self) -> Vec<(Id, Handle)> {
        let Self { rung, due, polled_on, stalled, places, .. } = self;
        if *stalled {
            return Vec::new(); // Everybody was woken, and whoever comes may poll it.
        }
        let needed = |id: Id| *rung || (due.is_some() && *polled_on != Some(id));
        let unwatched = places.iter_mut().filter(|place| !place.watched && needed(place.id));
        unwatched
            .map(|place| {
                place.watched = true;
                (place.id, place.runtime.clone())
            })
            .collect()
    }
}

/// Sees to it that the connect is polled; over when it is dropped, also by a runtime that is shut down.
struct Watch {
    bell: Arc<Bell>,
    on: Id,
    ended: bool,
}

/// What a watch waits for.
enum Look {
    /// Whether the driver comes, who was woken.
    Driver,
    /// Until the connect is due.
    Due(Instant),
}

impl Watch {
    async fn run(mut self) {
        let bell = Arc::clone(&self.bell);
        loop {
            // Before the look, so that no ring after it is missed.
            let rung = bell.rung.notified();
            let Some((polls, look)) = self.look() else { return };
            match look {
                Look::Driver => sleep(GRACE).await,
                Look::Due(due) => {
                    if timeout_at(due + GRACE, rung).await.is_ok() {
                        continue;
                    }
                }
            }
            if let Some(all) = self.stalled(polls) {
                return wake_all(all);
            }
        }
    }

    /// How often the connect has been polled, and what is to be waited for; `None` if nothing is.
    fn look(&mut self) -> Option<(u64, Look)> {
        let mut state = self.bell.lock();
        let look = match state.due {
            _ if state.rung => Some(Look::Driver),
            // One that is due and was looked at already gets its grace once more.
            Some(due) if state.polled_on != Some(self.on) => Some(Look::Due(due.max(Instant::now()))),
            _ => None,
        };
        let polls = state.polls;
        match state.places.iter_mut().find(|place| place.id == self.on) {
            Some(place) if look.is_none() => place.watched = false,
            Some(_) => return Some((polls, look?)),
            None => {}
        }
        drop(state);
        self.ended = true;
        None
    }

    /// Everybody who waits, if the connect is due, and has been polled no more than so often.
    fn stalled(&mut self, polls: u64) -> Option<Vec<Waker>> {
        let mut state = self.bell.lock();
        let due = state.rung || state.due.is_some_and(|due| Instant::now() >= due);
        if !due || state.polls != polls {
            return None;
        }
        state.stalled = true;
        let all = state.waiters.values().map(|entered| entered.waker.clone()).collect();
        state.unwatch(self.on);
        drop(state);
        self.ended = true;
        Some(all)
    }
}

impl State {
    fn unwatch(&mut self, on: Id) {
        if let Some(place) = self.places.iter_mut().find(|place| place.id == on) {
            place.watched = false;
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.ended {
            self.bell.lock().unwatch(self.on);
        }
    }
}

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        let driver = {
            let mut state = self.lock();
            state.rung = true;
            state.driver.and_then(|driver| state.waiters.get(&driver).map(|entered| entered.waker.clone()))
        };
        if let Some(driver) = driver {
            wake(driver);
        }
        self.rung.notify_waiters();
        self.watch();
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
