//! Over which connection a request goes, for whoever must know or must keep to one.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

/// Shared by the copies of one call for its attempts.
#[derive(Debug)]
pub(crate) struct Route {
    /// The number of the connection that took the request last, or that alone may take it; 0 is none.
    connection: AtomicU64,
    is_only_one: bool,
}

impl Route {
    /// Any connection may take it.
    pub(crate) fn any() -> Arc<Self> {
        Arc::new(Self { connection: AtomicU64::new(0), is_only_one: false })
    }

    /// Only that connection may take it, or, if it is none, only the one that does so first.
    pub(crate) fn only(connection: Option<u64>) -> Arc<Self> {
        Arc::new(Self { connection: AtomicU64::new(connection.unwrap_or(0)), is_only_one: true })
    }

    /// The connection that took the request last, from when it began to write it; `None` too of a connection that
    /// is not a [`Client`](super::Client).
    pub(crate) fn connection(&self) -> Option<u64> {
        Some(self.connection.load(Ordering::Relaxed)).filter(|connection| *connection != 0)
    }

    pub(super) fn permits(&self, connection: u64) -> bool {
        !self.is_only_one || self.connection().is_none_or(|only| only == connection)
    }

    pub(super) fn taken_by(&self, connection: u64) {
        self.connection.store(connection, Ordering::Relaxed);
    }
}
