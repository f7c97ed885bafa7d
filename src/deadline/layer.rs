use std::time::Duration;

use tokio::time::Instant;
use tower::Layer;

use super::DeadlineService;
use crate::{Deadline, event::Event, event::Events};

/// Puts a deadline on every call; see the [module](super).
///
/// ```
/// use std::time::Duration;
/// use goaround::DeadlineLayer;
///
/// let layer = DeadlineLayer::new(Duration::from_secs(30));
/// ```
#[derive(Clone, Debug)]
pub struct DeadlineLayer {
    default: Default,
    events: Events,
}

/// How long a call may take that says nothing itself; `None` is for ever.
#[derive(Clone, Copy, Debug)]
pub(super) struct Default(Option<Duration>);

// ===== impl DeadlineLayer =====

impl DeadlineLayer {
    /// Gives `default` to each call that has no deadline of its own. Too large to be an instant, it counts as
    /// [`Deadline::Never`]. Zero is no limit for any call: each one that would have it is refused as not done, by
    /// [`Refusal::Config`](crate::Refusal::Config).
    pub fn new(default: Duration) -> Self {
        Self { default: Default(Some(default)), events: Events::default() }
    }

    /// Has no default: only calls that have a deadline of their own end at it.
    pub fn never() -> Self {
        Self { default: Default(None), events: Events::default() }
    }

    /// Reports by `sink` the calls that enter the stack here, and what the layers below have to report of
    /// them.
    #[must_use]
    pub fn on_event(mut self, sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        self.events = Events::to(sink);
        self
    }

    pub(crate) fn with_events(mut self, events: Events) -> Self {
        self.events = events;
        self
    }
}

impl<S> Layer<S> for DeadlineLayer {
    type Service = DeadlineService<S>;

    fn layer(&self, inner: S) -> Self::Service {
        DeadlineService::new(inner, self.default, self.events.clone())
    }
}

// ===== impl Default =====

impl Default {
    #[inline]
    pub(super) fn from(self, now: Instant) -> Deadline {
        self.0.map_or(Deadline::Never, |limit| Deadline::after(now, limit))
    }

    #[inline]
    pub(super) const fn is_over_at_once(self) -> bool {
        matches!(self.0, Some(Duration::ZERO))
    }
}
