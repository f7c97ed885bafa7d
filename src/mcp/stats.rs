//! What is counted over all connections of a connector.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
};

/// What is counted over all connections of a connector; [`Stdio::stats`](super::Stdio::stats) gives it.
#[derive(Clone, Default)]
pub struct Stats(Arc<Counters>);

#[derive(Default)]
struct Counters {
    sessions: AtomicU64,
    not_restored: AtomicU64,
    dropped_answers: Arc<AtomicU64>,
    ignored: Arc<AtomicU64>,
}

impl Stats {
    /// How many sessions were begun: on how many connections client and server agreed on a version.
    pub fn sessions(&self) -> u64 {
        self.0.sessions.load(Ordering::Relaxed)
    }

    /// How many pieces of a session's state (log level, subscriptions, streams of notifications) a later
    /// session refused to take over.
    pub fn not_restored(&self) -> u64 {
        self.0.not_restored.load(Ordering::Relaxed)
    }

    /// How many answers to the server's own requests (roots, sampling, elicitation) were lost, since the
    /// connection that they belonged to was gone. They are never sent over another one.
    pub fn dropped_answers(&self) -> u64 {
        self.0.dropped_answers.load(Ordering::Relaxed)
    }

    /// How many messages of the server could not be used ([`Connection::ignored`](super::Connection::ignored)), those
    /// of handshakes that failed included: of a server that prints something else to its standard output, each such
    /// line.
    pub fn ignored(&self) -> u64 {
        self.0.ignored.load(Ordering::Relaxed)
    }

    pub(super) fn session_begun(&self) {
        self.0.sessions.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn state_not_restored(&self) {
        self.0.not_restored.fetch_add(1, Ordering::Relaxed);
    }

    pub(super) fn count_of_dropped_answers(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.0.dropped_answers)
    }

    pub(super) fn count_of_ignored(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.0.ignored)
    }
}

impl fmt::Debug for Stats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Stats")
            .field("sessions", &self.sessions())
            .field("not_restored", &self.not_restored())
            .field("dropped_answers", &self.dropped_answers())
            .field("ignored", &self.ignored())
            .finish()
    }
}
