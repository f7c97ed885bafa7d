//! One connection of a [`Reconnect`](super::Reconnect) service: its number, what it followed, and what it
//! has shown to work.

#[cfg(not(goaround_loom))]
use std::sync::atomic::{AtomicU8, Ordering};
use std::{
    sync::{Arc, OnceLock},
    time::Duration,
};

#[cfg(goaround_loom)]
use loom::sync::atomic::{AtomicU8, Ordering};

use tokio::time::Instant;

use crate::{
    CallError, Closure, Effect,
    connection::Connection,
    event::{Event, Events, Recovery},
};

/// It has answered a call.
const ANSWERED: u8 = 1;
/// It has answered a read, so that a recovery is proved.
const PROVED: u8 = 2;

pub(super) struct Generation {
    pub(super) number: u64,
    /// When its connect began, after the last process was gone.
    pub(super) began: Instant,
    connected: Instant,
    /// When it was found that the connection before it had closed.
    followed_closure_at: Option<Instant>,
    shown: AtomicU8,
    /// How it ended: one closure for all calls that it took down.
    closure: OnceLock<Closure>,
    /// The connection as one of this crate's.
    pub(super) known: Option<Arc<dyn Connection>>,
    events: Events,
}

impl Generation {
    pub(super) fn new(
        number: u64,
        began: Instant,
        followed_closure_at: Option<Instant>,
        known: Option<Arc<dyn Connection>>,
        events: Events,
    ) -> Self {
        let connected = Instant::now();
        let (shown, closure) = (AtomicU8::new(0), OnceLock::new());
        Self { number, began, connected, followed_closure_at, shown, closure, known, events }
    }

    /// How it ended, by the first error that says so.
    pub(super) fn closure(&self, error: &CallError) -> &Closure {
        let closure = self.closure.get_or_init(|| match error.closure() {
            Some(closure) => closure.clone(),
            None => Closure::new("the connection was lost"),
        });
        closure.set_generation(self.number);
        closure
    }

    /// A call with that effect succeeded.
    #[inline]
    pub(super) fn note_answer(&self, effect: Effect, method: &str) {
        // One relaxed load is all that a call pays once the connection has shown what it can.
        if !self.has_shown(effect) {
            self.note(shown_by(effect), method);
        }
    }

    /// A call was answered with an error: the connection works, but no read has succeeded.
    pub(super) fn note_error(&self, method: &str) {
        if !self.has_answered() {
            self.note(ANSWERED, method);
        }
    }

    /// Whether a success of a call with that effect would show nothing new.
    #[inline]
    pub(super) fn has_shown(&self, effect: Effect) -> bool {
        let shows = shown_by(effect);
        self.shown.load(Ordering::Relaxed) & shows == shows
    }

    /// The connector's own probe succeeded: a recovery is proved, but no call was answered.
    pub(super) fn note_probe(&self, method: &str) {
        self.note(PROVED, method);
    }

    #[cold]
    fn note(&self, shows: u8, method: &str) {
        let before = self.shown.fetch_or(shows, Ordering::Relaxed);
        if let Some(closed_at) = self.followed_closure_at
            && shows & PROVED != 0
            && before & PROVED == 0
        {
            self.events.emit(Event::Recovery(&Recovery {
                generation: self.number,
                reconnect: since(closed_at, self.connected),
                took: since(closed_at, Instant::now()),
                proved_by: method.to_owned(),
            }));
        }
    }

    pub(super) fn has_answered(&self) -> bool {
        self.shown.load(Ordering::Relaxed) & ANSWERED != 0
    }
}

#[inline]
fn shown_by(effect: Effect) -> u8 {
    if effect.is_write() { ANSWERED } else { ANSWERED | PROVED }
}

fn since(start: Instant, end: Instant) -> Duration {
    end.saturating_duration_since(start)
}

#[cfg(all(test, goaround_loom))]
mod loom_tests {
    use loom::{
        sync::atomic::{AtomicUsize, Ordering},
        thread,
    };

    use super::*;

    #[test]
    fn loom_a_recovery_is_reported_once_however_many_reads_prove_it() {
        loom::model(|| {
            let reported = Arc::new(AtomicUsize::new(0));
            let counted = Arc::clone(&reported);
            let events = Events::to(move |_| {
                counted.fetch_add(1, Ordering::Relaxed);
            });
            let now = Instant::now();
            let generation = Arc::new(Generation::new(2, now, Some(now), None, events));
            let read = thread::spawn({
                let generation = Arc::clone(&generation);
                move || generation.note_answer(Effect::ReadOnly, "get")
            });
            generation.note_answer(Effect::Write, "put");
            generation.note_probe("ping");
            read.join().unwrap();
            assert_eq!(reported.load(Ordering::Relaxed), 1);
            assert!(generation.has_answered() && generation.has_shown(Effect::ReadOnly));
        });
    }
}
