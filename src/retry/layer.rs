use std::{fmt, sync::Arc, time::Duration};

use backon::BackoffBuilder;
use tower::{Layer, retry::budget::Budget};

use super::{Retry, backoff::Schedule, budget::Throttle};
use crate::event::{Event, Events};

type SharedBudget = Arc<dyn Budget + Send + Sync>;

/// Retries read-only calls, with the defaults: three attempts in all, no attempt timeout, exponential backoff
/// with full jitter, a failure-aware budget. See the [module](super).
///
/// It is a layer as it stands, and its methods make a [`RetryReadOnlyLayer`] of it.
///
/// ```
/// use std::time::Duration;
/// use goaround::{CallError, RetryReadOnly, Tagged};
/// use tower::{ServiceBuilder, service_fn};
///
/// let inner = service_fn(|call: Tagged<u8>| async move { Ok::<u8, CallError>(*call) });
/// let _ = ServiceBuilder::new().layer(RetryReadOnly).service(inner);
/// let _ = ServiceBuilder::new()
///     .layer(RetryReadOnly.attempts(4).attempt_timeout(Duration::from_secs(2)))
///     .service(inner);
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct RetryReadOnly;

/// Retries read-only calls; made by the methods of [`RetryReadOnly`]. See the [module](super).
#[derive(Clone, Debug)]
pub struct RetryReadOnlyLayer {
    options: Options,
    budget: BudgetOption,
}

/// What a service and its clones share.
#[derive(Clone)]
pub(super) struct Options {
    pub(super) attempts: u32,
    pub(super) attempt_timeout: Option<Duration>,
    pub(super) schedule: Schedule,
    pub(super) budget: Option<AnyBudget>,
    pub(super) events: Events,
}

/// The budget of one service. The default one, which every success pays back, is called without a table of functions.
#[derive(Clone)]
pub(super) enum AnyBudget {
    Default(Arc<Throttle>),
    Other(SharedBudget),
}

#[derive(Clone, Default)]
enum BudgetOption {
    /// A fresh [`Throttle`] for each service that the layer makes, shared by its clones.
    #[default]
    Fresh,
    Shared(SharedBudget),
    Without,
}

// ===== impl RetryReadOnly =====

impl RetryReadOnly {
    /// See [`RetryReadOnlyLayer::attempts`].
    #[must_use]
    pub fn attempts(self, attempts: u32) -> RetryReadOnlyLayer {
        RetryReadOnlyLayer::from(self).attempts(attempts)
    }

    /// See [`RetryReadOnlyLayer::attempt_timeout`].
    #[must_use]
    pub fn attempt_timeout(self, timeout: Duration) -> RetryReadOnlyLayer {
        RetryReadOnlyLayer::from(self).attempt_timeout(timeout)
    }

    /// See [`RetryReadOnlyLayer::backoff`].
    #[must_use]
    pub fn backoff<B>(self, schedule: B) -> RetryReadOnlyLayer
    where
        B: BackoffBuilder<Backoff: 'static> + Clone + 'static,
    {
        RetryReadOnlyLayer::from(self).backoff(schedule)
    }

    /// See [`RetryReadOnlyLayer::budget`].
    #[must_use]
    pub fn budget(self, budget: Arc<dyn Budget + Send + Sync>) -> RetryReadOnlyLayer {
        RetryReadOnlyLayer::from(self).budget(budget)
    }

    /// See [`RetryReadOnlyLayer::without_budget`].
    #[must_use]
    pub fn without_budget(self) -> RetryReadOnlyLayer {
        RetryReadOnlyLayer::from(self).without_budget()
    }

    /// See [`RetryReadOnlyLayer::on_event`].
    #[must_use]
    pub fn on_event(self, sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> RetryReadOnlyLayer {
        RetryReadOnlyLayer::from(self).on_event(sink)
    }
}

impl<S> Layer<S> for RetryReadOnly {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Retry<S> {
        RetryReadOnlyLayer::from(*self).layer(inner)
    }
}

impl From<RetryReadOnly> for RetryReadOnlyLayer {
    fn from(RetryReadOnly: RetryReadOnly) -> Self {
        Self {
            options: Options {
                attempts: 3,
                attempt_timeout: None,
                schedule: Schedule::default(),
                budget: None,
                events: Events::default(),
            },
            budget: BudgetOption::default(),
        }
    }
}

// ===== impl RetryReadOnlyLayer =====

impl RetryReadOnlyLayer {
    /// How many attempts a call gets in all, the first one included; three by default. Zero is wrong: each
    /// call is then refused.
    ///
    /// The one replay that a closed connection gives to each read that it took down is not bounded by this.
    #[must_use]
    pub fn attempts(mut self, attempts: u32) -> Self {
        self.options.attempts = attempts;
        self
    }

    /// How long one attempt may take before it is given up and the next one is due; no bound by default. Zero
    /// is wrong: each call is then refused.
    ///
    /// A call that a write-safety layer further in takes for a write (the wrong order) is not given up: its time is
    /// that layer's business. A read with such a bound costs an allocation, by which that layer says so.
    ///
    /// Progress does not extend it ([`Call::idle`](crate::Call::idle)); it stands still while the user is asked
    /// ([`Call::pause_while_asking`](crate::Call::pause_while_asking)).
    #[must_use]
    pub fn attempt_timeout(mut self, timeout: Duration) -> Self {
        self.options.attempt_timeout = Some(timeout);
        self
    }

    /// How long to wait before each further attempt, unless the peer asks for something else. When the
    /// schedule ends, so do the retries: [backon]'s own end after three waits unless told otherwise, and have
    /// no jitter ([`FullJitter`](super::backoff::FullJitter) adds it).
    ///
    /// ```
    /// use std::time::Duration;
    /// use backon::ExponentialBuilder;
    /// use goaround::{RetryReadOnly, retry::backoff::FullJitter};
    ///
    /// let schedule = ExponentialBuilder::new().with_min_delay(Duration::from_millis(5)).without_max_times();
    /// let layer = RetryReadOnly.attempts(5).backoff(FullJitter(schedule));
    /// ```
    #[must_use]
    pub fn backoff<B>(mut self, schedule: B) -> Self
    where
        B: BackoffBuilder<Backoff: 'static> + Clone + 'static,
    {
        self.options.schedule = Schedule::new(schedule);
        self
    }

    /// A budget in place of the default one, which is a [`Throttle`] for each service that the layer makes.
    /// It can be shared by several layers.
    #[must_use]
    pub fn budget(mut self, budget: Arc<dyn Budget + Send + Sync>) -> Self {
        self.budget = BudgetOption::Shared(budget);
        self
    }

    /// No budget: the attempts of each call are the only bound.
    #[must_use]
    pub fn without_budget(mut self) -> Self {
        self.budget = BudgetOption::Without;
        self
    }

    /// Reports by `sink` the calls that needed more than one attempt, where no layer further out has a sink.
    #[must_use]
    pub fn on_event(mut self, sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        self.options.events = Events::to(sink);
        self
    }

    pub(crate) fn with_events(mut self, events: Events) -> Self {
        self.options.events = events;
        self
    }

    /// What is wrong with the options, if something is.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        if self.options.attempts == 0 {
            return Err("RetryReadOnly: attempts must be at least 1");
        }
        if self.options.attempt_timeout == Some(Duration::ZERO) {
            return Err("RetryReadOnly: attempt_timeout must not be zero");
        }
        Ok(())
    }
}

impl<S> Layer<S> for RetryReadOnlyLayer {
    type Service = Retry<S>;

    fn layer(&self, inner: S) -> Retry<S> {
        let budget = match &self.budget {
            BudgetOption::Fresh => Some(AnyBudget::Default(Arc::default())),
            BudgetOption::Shared(budget) => Some(AnyBudget::Other(Arc::clone(budget))),
            BudgetOption::Without => None,
        };
        Retry::new(inner, Options { budget, ..self.options.clone() }, self.check().err())
    }
}

impl AnyBudget {
    #[inline]
    pub(super) fn deposit(&self) {
        match self {
            AnyBudget::Default(budget) => budget.deposit(),
            AnyBudget::Other(budget) => budget.deposit(),
        }
    }

    pub(super) fn withdraw(&self) -> bool {
        match self {
            AnyBudget::Default(budget) => budget.withdraw(),
            AnyBudget::Other(budget) => budget.withdraw(),
        }
    }
}

impl fmt::Debug for Options {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Options")
            .field("attempts", &self.attempts)
            .field("attempt_timeout", &self.attempt_timeout)
            .field("schedule", &self.schedule)
            .field("events", &self.events)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for BudgetOption {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            BudgetOption::Fresh => "Throttle",
            BudgetOption::Shared(_) => "Shared(..)",
            BudgetOption::Without => "Without",
        })
    }
}
