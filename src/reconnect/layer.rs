//! The layer's options, and the handle on the services that it makes.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError, Weak},
    time::Duration,
};

use backon::BackoffBuilder;
use tokio::time::{Instant, timeout};
use tower::{Layer, Service};

use super::{
    Config, Reconnect,
    single_flight::{Managed, REAPING, Shared},
};
use crate::{
    BoxError,
    census::drain,
    connection::{Hooks, reaper_of, under_way_of},
    event::{Event, Events},
    retry::backoff::Schedule,
};

/// Wraps a connector into a service that reconnects once per closure, as often as it closes.
///
/// ```
/// use goaround::ReconnectLayer;
/// use std::time::Duration;
///
/// let layer = ReconnectLayer::once()
///     .connect_timeout(Duration::from_secs(10))
///     .crash_loop(3, Duration::from_secs(60));
/// let handle = layer.handle();
/// assert_eq!(handle.generation(), None); // the first connect is lazy
/// ```
#[derive(Clone)]
pub struct ReconnectLayer {
    config: Config,
    events: Events,
    handle: ReconnectHandle,
}

impl ReconnectLayer {
    /// One reconnect per closure: connect timeout 60 s; between failed connects an exponential backoff with
    /// full jitter, 100 ms to 10 s; 5 connections in a row that closed without an answer turn calls away for
    /// 30 s; at most 131,072 calls wait for a connection.
    pub fn once() -> Self {
        Self {
            config: Config {
                connect_timeout: Duration::from_secs(60),
                crash_limit: 5,
                cool_down: Duration::from_secs(30),
                max_waiters: 131_072,
                backoff: Schedule::exponential(Duration::from_millis(100), Duration::from_secs(10)),
            },
            events: Events::default(),
            handle: ReconnectHandle::default(),
        }
    }

    /// How long one connect may take, the connector's readiness and any handshake included. A wait for the
    /// end of the last process, or a backoff, comes before it and does not count.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.config.connect_timeout = timeout;
        self
    }

    /// How many connections in a row may close without having answered anything before calls are refused
    /// ([`Refusal::CrashLoop`](crate::Refusal::CrashLoop)), and for how long. After that one connection is
    /// tried again.
    #[must_use]
    pub fn crash_loop(mut self, connections: u32, cool_down: Duration) -> Self {
        self.config.crash_limit = connections;
        self.config.cool_down = cool_down;
        self
    }

    /// The delays between connects that fail in a row. A schedule that ends goes on with its last delay. A
    /// connect that follows a closure is not delayed.
    #[must_use]
    pub fn backoff<B>(mut self, schedule: B) -> Self
    where
        B: BackoffBuilder<Backoff: 'static> + Clone + 'static,
    {
        self.config.backoff = Schedule::new(schedule);
        self
    }

    /// How many calls may wait for a connection; one more is refused
    /// ([`Refusal::Overloaded`](crate::Refusal::Overloaded)).
    #[must_use]
    pub fn max_waiters(mut self, waiters: usize) -> Self {
        self.config.max_waiters = waiters;
        self
    }

    /// Where this layer's [`Incident`](Event::Incident) and [`Recovery`](Event::Recovery) events go, and its
    /// [`Call`](Event::Call) reports if no layer of this crate lies above it.
    #[must_use]
    pub fn on_event(mut self, sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        self.events = Events::to(sink);
        self
    }

    pub(crate) fn with_events(mut self, events: Events) -> Self {
        self.events = events;
        self
    }

    /// What makes no sense in the options, if something does.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        let Config { connect_timeout, crash_limit, max_waiters, .. } = self.config;
        if connect_timeout.is_zero() {
            return Err("ReconnectLayer: connect_timeout must not be zero");
        }
        if crash_limit == 0 {
            return Err("ReconnectLayer: crash_loop needs at least 1 connection");
        }
        if max_waiters == 0 {
            return Err("ReconnectLayer: max_waiters must be at least 1");
        }
        Ok(())
    }

    /// A handle on the services that this layer value, or a clone of it, makes.
    pub fn handle(&self) -> ReconnectHandle {
        self.handle.clone()
    }
}

impl<M> Layer<M> for ReconnectLayer
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Send + 'static,
{
    type Service = Reconnect<M>;

    fn layer(&self, connector: M) -> Reconnect<M> {
        let wrong = self.check().err();
        let hooks = Hooks { reaper: reaper_of(&connector), under_way: under_way_of(&connector) };
        let service = Reconnect::new(connector, self.config.clone(), wrong, self.events.clone(), hooks);
        self.handle.add(&service);
        service
    }
}

impl fmt::Debug for ReconnectLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconnectLayer")
            .field("connect_timeout", &self.config.connect_timeout)
            .field("crash_limit", &self.config.crash_limit)
            .field("cool_down", &self.config.cool_down)
            .field("max_waiters", &self.config.max_waiters)
            .finish_non_exhaustive()
    }
}

/// A handle on the services of a [`ReconnectLayer`]: their generation, and their shutdown.
#[derive(Clone, Default)]
pub struct ReconnectHandle(Arc<Mutex<Vec<Weak<dyn Managed>>>>);

impl ReconnectHandle {
    /// A handle on that service alone.
    pub(crate) fn of<M>(service: &Reconnect<M>) -> Self
    where
        M: Service<()> + Send + 'static,
        M::Future: Send + 'static,
        M::Response: Send + 'static,
    {
        let handle = Self::default();
        handle.add(service);
        handle
    }

    fn add<M>(&self, service: &Reconnect<M>)
    where
        M: Service<()> + Send + 'static,
        M::Future: Send + 'static,
        M::Response: Send + 'static,
    {
        let managed: Arc<dyn Managed> = Arc::<Shared<M>>::clone(&service.shared);
        let mut members = self.lock();
        // A layer may make any number of services in its time.
        members.retain(|member| member.strong_count() > 0);
        members.push(Arc::downgrade(&managed));
    }

    /// The number of the connection in use; `None` where there is none. A number that has changed tells that
    /// state which the server kept for the connection may be gone.
    pub fn generation(&self) -> Option<u64> {
        self.members().iter().find_map(|managed| managed.generation())
    }

    /// How many calls are on a connection now.
    pub fn in_flight(&self) -> usize {
        self.members().iter().map(|managed| managed.in_flight()).sum()
    }

    /// Shuts down: new calls are refused as not sent
    /// ([`Refusal::Shutdown`](crate::Refusal::Shutdown)), calls in flight may finish within `grace`, then the
    /// connection closes and its process is reaped.
    ///
    /// Returns how many calls were still in flight when the grace was over. A connection of this crate closes
    /// under them; a foreign one when the last clone of the service and the last of its calls are dropped. One that does not
    /// close, since the runtime that it lives on does not run, is waited for 10 s; it closes when that goes on.
    pub async fn shutdown(&self, grace: Duration) -> usize {
        let members = self.members();
        for managed in &members {
            managed.begin_shutdown();
        }
        let end = Instant::now().checked_add(grace);
        let mut cut_off = 0;
        for managed in &members {
            cut_off += drain(|| managed.in_flight(), managed.ended(), end).await;
            if let Some(connection) = managed.take_connection() {
                // What it waits for may live on a runtime that does not run.
                let _ = timeout(REAPING, connection.close()).await;
            }
            // A connect that was under way has left a process, too.
            if let Some(reaper) = managed.reaper() {
                reaper().await;
            }
            managed.report_last();
        }
        cut_off
    }

    /// The connection in use, if it is one of this crate's.
    #[cfg(feature = "rmcp")]
    pub(crate) fn connection(&self) -> Option<Arc<dyn crate::connection::Connection>> {
        self.members().iter().find_map(|managed| managed.connection())
    }

    fn members(&self) -> Vec<Arc<dyn Managed>> {
        self.lock().iter().filter_map(Weak::upgrade).collect()
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Weak<dyn Managed>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ReconnectHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReconnectHandle").field("generation", &self.generation()).finish_non_exhaustive()
    }
}
