//! The layer and its options.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, SystemTime},
};

use tower::Layer;

use super::{
    Config, KeyedWrites, WallClock, WriteSafety,
    ledger::{AnyLedger, Ledger, Registrar},
    verdict::{DynCheck, EffectCheck, Erased},
};
use crate::{
    Basis, Effect, Evidence,
    connection::Classifier,
    event::{Event, Events},
    mcp::{ToolRules, checks::ReadBack},
};

/// Write safety as a layer. One type, with a check and without, so that a struct can hold it.
///
/// ```
/// use std::time::Duration;
/// use goaround::{Call, WriteSafetyLayer, jsonrpc::{Request, Response}, write_safety::InDoubt};
///
/// // Every write without an answer is reported as unknown, and none is replayed:
/// let _none = WriteSafetyLayer::<Request, Response>::refuse();
///
/// // With a check, and the declaration that nothing lands more than 20 s after its last byte was sent:
/// let _some = WriteSafetyLayer::new(|doubt: InDoubt<Request, Response>| async move {
///     let seen = doubt.probe(Request::new("doc/list", ())?.read_only()).await?;
///     Ok(if seen.raw().get().contains("t1") { doubt.landed_without_result() } else { doubt.not_landed() })
/// })
/// .attempt_timeout(Duration::from_secs(5))
/// .quarantine(Duration::from_secs(20));
/// ```
pub struct WriteSafetyLayer<Req, Res> {
    config: Arc<Config<Req, Res>>,
    events: Events,
}

impl<Req, Res> WriteSafetyLayer<Req, Res> {
    /// No check: a write whose attempt ended without an answer is unknown, and is not replayed unless
    /// [`keyed`](Self::keyed), [`replay_idempotent`](Self::replay_idempotent) or [`trust`](Self::trust) says so.
    pub fn refuse() -> Self {
        Self::with(None)
    }

    /// A write in doubt is settled by that check. See the [module](super).
    pub fn new<C>(check: C) -> Self
    where
        C: EffectCheck<Req, Res> + Send + Sync + 'static,
        Req: Send + 'static,
        Res: Send + 'static,
    {
        let check = Erased(check);
        let is_wrong = check.ready_made().into_iter().any(|check| check.wrong().is_some());
        let wrong = is_wrong.then_some(
            "WriteSafetyLayer: the check has a JSON pointer that does not begin with `/`, or the like",
        );
        Self::with(Some(Arc::new(check))).set(wrong, |_| {})
    }

    fn with(check: Option<Arc<dyn DynCheck<Req, Res>>>) -> Self {
        let config = Config {
            check,
            attempt_timeout: None,
            check_timeout: None,
            quarantine: None,
            max_checks: 16,
            trust: Vec::new(),
            landed_with: None,
            independent_writes: false,
            replay_idempotent: false,
            conflict_key: None,
            keyed: None,
            arguments: None,
            ledger: None,
            max_rechecks: 32,
            look_first: false,
            clock: WallClock::default(),
            classify: None,
            wrong: None,
        };
        Self { config: Arc::new(config), events: Events::default() }
    }

    /// How long an attempt may take before it is in doubt. It is not dropped then, but kept and polled: its
    /// late answer ends the doubt. Default: half of the time left where there are a check and a deadline,
    /// else none.
    ///
    /// Progress does not extend it ([`Call::idle`](crate::Call::idle)); it stands still while the user is asked
    /// ([`Call::pause_while_asking`](crate::Call::pause_while_asking)).
    #[must_use]
    pub fn attempt_timeout(self, timeout: Duration) -> Self {
        let wrong = timeout.is_zero().then_some("WriteSafetyLayer: attempt_timeout must not be zero");
        self.set(wrong, |config| config.attempt_timeout = Some(timeout))
    }

    /// Declares that no attempt lands later than this after its last byte was sent: the server's maximum
    /// time, with all that lies before it (proxies, queues). The layer waits it out before the check. If it
    /// does not fit in the time left, of which it must leave a tenth for check and replay, the check runs at
    /// once and can only find that the write landed.
    ///
    /// The deadline that counts is the call's own, so that a quarantine longer than the stack's default is no error:
    /// writes that go by that default end as unknown at their check, and only those with a longer one of their own
    /// ([`Call::within`](crate::Call::within)) can be replayed.
    ///
    /// A connection that marks nothing in the call's [`Activity`](crate::Activity) does not tell when the
    /// last byte was sent: then it counts from the attempt timeout, or from the attempt's end before that.
    #[must_use]
    pub fn quarantine(self, quarantine: Duration) -> Self {
        let wrong = quarantine.is_zero().then_some("WriteSafetyLayer: quarantine must not be zero");
        let idle = "WriteSafetyLayer: without a check a quarantine leads to nothing; begin with new(check)";
        let wrong = wrong.or(self.needs_check(idle));
        self.set(wrong, |config| config.quarantine = Some(quarantine))
    }

    /// How long a check may take, its probes included; after that it is unknown. Default: a third of the
    /// time left, at most 10 s. One that says [in flight](super::InDoubt::in_flight) is asked again, with this
    /// much time anew.
    #[must_use]
    pub fn check_timeout(self, timeout: Duration) -> Self {
        let wrong = timeout.is_zero().then_some("WriteSafetyLayer: check_timeout must not be zero");
        let idle = "WriteSafetyLayer: check_timeout is set and there is no check; begin with new(check)";
        let wrong = wrong.or(self.needs_check(idle));
        self.set(wrong, |config| config.check_timeout = Some(timeout))
    }

    /// How many checks run at once, over all clones; 16 by default. Others wait, within their deadline. A call whose
    /// future is kept and not polled while its check runs keeps its place.
    #[must_use]
    pub fn max_checks(self, checks: usize) -> Self {
        let wrong = (checks == 0).then_some("WriteSafetyLayer: max_checks must be at least 1");
        let checks = checks.min(tokio::sync::Semaphore::MAX_PERMITS);
        self.set(wrong, |config| config.max_checks = checks)
    }

    /// Trusts that a write refused with that evidence was not processed, so that it is replayed, once,
    /// without a check. Proxies are known to send some of these after the fact.
    #[must_use]
    pub fn trust(self, evidence: Evidence) -> Self {
        self.set(None, |config| config.trust.push(evidence))
    }

    /// Makes the response of a write that landed and whose response is lost. Without it such a write is an
    /// error of outcome [`DoneResultLost`](crate::Outcome::DoneResultLost).
    #[must_use]
    pub fn landed_with(self, response: impl Fn(&Req) -> Res + Send + Sync + 'static) -> Self {
        self.set(None, |config| config.landed_with = Some(Arc::new(response)))
    }

    /// Declares that the writes of this stack do not touch each other. Without it a replay is refused if any
    /// other write was handed over since the first attempt, since it would then land on top of that one. See
    /// [`conflict_key`](Self::conflict_key) for writes that do.
    #[must_use]
    pub fn independent_writes(self) -> Self {
        self.set(None, |config| config.independent_writes = true)
    }

    /// Says what a write touches: the account, the file, the row. Two writes with the same key touch each other,
    /// and one for which this says `None` touches every other.
    ///
    /// A replay is refused if a write that touches it was handed over since the first attempt. While a write is
    /// in doubt, also after its call has ended as unknown or abandoned, later writes with its key fail at once
    /// with [`Refusal::KeyInDoubt`](crate::Refusal::KeyInDoubt), and nothing of them is sent, until it is settled
    /// or forgotten in the [ledger](Self::ledger): the lost write might still land on top of them. A write that was called
    /// before that goes on, unless it has yet to get a connection. Its replay does not go over one that is in doubt: it
    /// waits until that one is settled, and is not made if it ends in doubt; nor if the doubt arises only when it is being
    /// claimed in its ledger, or has been handed over and waits for a connection, or in that one's queue.
    ///
    /// All stacks of a process that were given one [`MemoryLedger`](super::ledger::MemoryLedger), one `DurableLedger` or
    /// one [`AnyLedger`](super::ledger::AnyLedger) see each other's writes with a key, so that the same holds over all of
    /// them; a write without one touches those of its own stack. Stacks with ledgers of their own, which is the
    /// default, cannot see each other: where they write to the same things, give them one. Other ledgers keep
    /// processes, and layers that were made apart, from each other as far as they [say](super::ledger::Ledger).
    ///
    /// Where layers are nested, give them the same key and one ledger: beside the key of a layer further out that refuses
    /// replays the one with the check settles and does not replay. See the [module](super).
    ///
    /// The key stands in the ledger as it is made here. It is compared as text.
    ///
    /// ```
    /// use goaround::{WriteSafetyLayer, jsonrpc::{Request, Response}, write_safety::ledger::MemoryLedger};
    ///
    /// let ledger = MemoryLedger::new(); // to settle what blocks a key
    /// let _layer = WriteSafetyLayer::<Request, Response>::refuse().ledger(ledger.clone()).conflict_key(
    ///     |request: &Request| {
    ///         let params: serde_json::Value = request.params().ok()?;
    ///         params["arguments"]["account"].as_str().map(str::to_owned)
    ///     },
    /// );
    /// ```
    #[must_use]
    pub fn conflict_key<K: fmt::Display>(
        self,
        key: impl Fn(&Req) -> Option<K> + Send + Sync + 'static,
    ) -> Self {
        let key = move |request: &Req| key(request).map(|key| key.to_string());
        self.set(None, |config| config.conflict_key = Some(Arc::new(key)))
    }

    /// Replays writes in doubt that are [`Effect::Idempotent`] once without a check. It declares that an earlier
    /// copy that lands later does no harm either; another write that was handed over since the first attempt
    /// still forbids the replay.
    #[must_use]
    pub fn replay_idempotent(self) -> Self {
        self.set(None, |config| config.replay_idempotent = true)
    }

    /// Puts idempotency keys into the writes. See [`KeyedWrites`].
    #[must_use]
    pub fn keyed(self, keyed: KeyedWrites<Req, Res>) -> Self {
        let zero = keyed.window.is_some_and(|window| window.is_zero());
        let wrong = zero.then_some("WriteSafetyLayer: honoured_for must not be zero").or(keyed.wrong);
        self.set(wrong, |config| config.keyed = Some(keyed))
    }

    /// Where each write is entered before its first byte: a [`MemoryLedger`](super::ledger::MemoryLedger) of the
    /// service's own by default. Keep a clone of what you give, to list and settle what is in doubt, or ask
    /// [`Stack::ledger`](crate::Stack::ledger). Nested layers have rules for it: see the [module](super).
    #[must_use]
    pub fn ledger(self, ledger: impl Ledger) -> Self {
        self.set(None, |config| config.ledger = Some(AnyLedger::new(ledger)))
    }

    /// Keeps of each write's arguments in the ledger what that function says, so that the request can be made
    /// again and a check can run after a restart. Nothing by default: arguments may hold secrets. Then, and without
    /// a [`conflict_key`](Self::conflict_key), an entry of an MCP tool's call tells neither which tool nor with what.
    ///
    /// ```
    /// use goaround::{WriteSafetyLayer, jsonrpc::{Request, Response}};
    ///
    /// let _layer = WriteSafetyLayer::<Request, Response>::refuse()
    ///     .keep_arguments(|request: &Request| Some(request.raw_params()?.get().to_owned()));
    /// ```
    #[must_use]
    pub fn keep_arguments(self, arguments: impl Fn(&Req) -> Option<String> + Send + Sync + 'static) -> Self {
        self.set(None, |config| config.arguments = Some(Arc::new(arguments)))
    }

    /// How often a check that says [in flight](super::InDoubt::in_flight) is asked again, within the deadline;
    /// 32 times by default. One that says [partial](super::InDoubt::partial) is asked again too, after 100 ms,
    /// 200 ms and so on, at most 4 times: what has begun may yet be done to its end, and is never replayed.
    #[must_use]
    pub fn max_rechecks(self, rechecks: u32) -> Self {
        self.set(None, |config| config.max_rechecks = rechecks)
    }

    /// Asks the check once more, before a fence holds, while that is waited for. Off by default.
    ///
    /// Such a look can only find that the write landed, which is true whatever else is on its way: the call ends
    /// then, instead of after a [quarantine](Self::quarantine) or a process's end. That the write is not there
    /// yet says nothing, and leads to nothing. That it is there [in part](super::InDoubt::partial) counts as in
    /// any check. It begins 50 ms after the doubt, if no fence holds by then, and not at all where the server's
    /// answer asked for a pause; it is given up where a check of another write finds all of
    /// [`max_checks`](Self::max_checks) under way. It costs one check more for each doubt, on a server that may have
    /// trouble.
    ///
    /// ```
    /// # use std::{sync::atomic::{AtomicU32, Ordering}, time::Duration};
    /// # use goaround::{CallError, BoxError, Effect, InDoubt, Tagged, WriteSafetyLayer};
    /// # use tower::{ServiceBuilder, ServiceExt, service_fn};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), BoxError> {
    /// let writes = WriteSafetyLayer::new(|doubt: InDoubt<Tagged<u32>, u32>| async move {
    ///     Ok::<_, BoxError>(doubt.landed(7)) // A real one reads it back.
    /// });
    /// let writes = writes.quarantine(Duration::from_secs(15)).look_first();
    /// // The write lands, and its answer is lost.
    /// let lossy = service_fn(|_: Tagged<u32>| async { Err::<u32, _>(CallError::ambiguous("lost")) });
    /// let start = tokio::time::Instant::now();
    /// let answer = ServiceBuilder::new().layer(writes).service(lossy).oneshot(Tagged::new(1, Effect::Write));
    /// assert_eq!(answer.await?, 7);
    /// assert!(start.elapsed() < Duration::from_millis(100));
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn look_first(self) -> Self {
        let wrong =
            self.needs_check("WriteSafetyLayer: look_first has no check to ask; begin with new(check)");
        self.set(wrong, |config| config.look_first = true)
    }

    /// The wall clock, by which keys' windows end and the ledger's times are written; the system's by default.
    #[must_use]
    pub fn wall_clock(self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.set(None, |config| config.clock = WallClock::new(clock))
    }

    /// Says what effect a request has; `None` keeps the request's own. What it says is stamped on the call,
    /// so that the layers below go by it, and so do probes. It stays on the call: another stack that a gateway gives it to,
    /// once this one has handed it back unsent, takes it for the same, unless its own rules say otherwise.
    #[must_use]
    pub fn classify(self, classify: impl Fn(&Req) -> Option<Effect> + Send + Sync + 'static) -> Self {
        self.classify_by(Arc::new(move |request| classify(request).map(|effect| (effect, Basis::Caller))))
    }

    fn classify_by(self, classify: Classifier<Req>) -> Self {
        self.set(None, |config| config.classify = Some(classify))
    }

    /// What the layer's own classifier does not know, the next one does: `before` goes before it and `after`
    /// after it.
    pub(crate) fn classify_between(
        self,
        before: Option<Classifier<Req>>,
        after: Option<Classifier<Req>>,
    ) -> Self
    where
        Req: 'static,
    {
        let all = [before, self.config.classify.clone(), after];
        let chain = all.into_iter().flatten().reduce(|first, next| {
            Arc::new(move |request: &Req| first(request).or_else(|| next(request))) as Classifier<Req>
        });
        match chain {
            Some(chain) => self.classify_by(chain),
            None => self,
        }
    }

    /// Where this layer's [`InDoubt`](Event::InDoubt) and [`Abandoned`](Event::Abandoned) events go if no
    /// layer above has said, and its [`Call`](Event::Call) reports if it is the outermost.
    #[must_use]
    pub fn on_event(self, sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        self.with_events(Events::to(sink))
    }

    pub(crate) fn with_events(mut self, events: Events) -> Self {
        self.events = events;
        self
    }

    /// A number for another service, by which its writes are told from those of others in the ledger.
    pub(crate) fn number(&self) -> u64 {
        static SERVICES: AtomicU64 = AtomicU64::new(1);
        SERVICES.fetch_add(1, Ordering::Relaxed)
    }

    /// What enters the server processes of that service; none where the ledger does not outlive them.
    pub(crate) fn registrar(&self, number: u64) -> Option<Registrar> {
        let ledger = self.config.ledger.clone().filter(|ledger| ledger.memory().is_none());
        ledger.map(|ledger| Registrar::new(ledger, number))
    }

    /// The service of that number, whose server processes are entered or not.
    pub(crate) fn layer_as<S>(
        &self,
        number: u64,
        servers_entered: bool,
        inner: S,
    ) -> WriteSafety<S, Req, Res> {
        WriteSafety::new(inner, Arc::clone(&self.config), self.events.clone(), number, servers_entered)
    }

    /// What makes no sense in a ready-made check: a place that cannot be one, or a tool to read by that is a write by
    /// those rules. They are the whole truth only where nobody else says what calls do.
    pub(crate) fn wrong_check(&self, rules: Option<&ToolRules>) -> Option<String> {
        let checks = self.config.check.as_ref().map(|check| check.ready_made()).unwrap_or_default();
        let rules = rules.filter(|_| self.config.classify.is_none());
        let of = |check: &&ReadBack| {
            let writes = |tool: &&str| rules.is_some_and(|rules| rules.are_known_to_say_write(tool));
            let by = || {
                let tool = check.reads_by().filter(writes)?;
                Some(format!(
                    "the check reads by {tool:?}, which is a write as long as nobody says otherwise: \
                     ToolRules::read_only([{tool:?}]) on the connector would"
                ))
            };
            check.wrong().or_else(by)
        };
        checks.iter().find_map(of)
    }

    /// What makes no sense in the options, if something does.
    pub(crate) fn check(&self) -> Result<(), &'static str> {
        self.config.wrong.map_or(Ok(()), Err)
    }

    /// What is wrong with an option that is for a check, where there is none.
    fn needs_check(&self, wrong: &'static str) -> Option<&'static str> {
        self.config.check.is_none().then_some(wrong)
    }

    fn set(mut self, wrong: Option<&'static str>, set: impl FnOnce(&mut Config<Req, Res>)) -> Self {
        if Arc::get_mut(&mut self.config).is_none() {
            // A clone of this layer is about: it keeps what it had.
            self.config = Arc::new(self.config.duplicate());
        }
        if let Some(config) = Arc::get_mut(&mut self.config) {
            config.wrong = config.wrong.or(wrong);
            set(config);
        }
        self
    }
}

impl<Req, Res> Config<Req, Res> {
    fn duplicate(&self) -> Self {
        Self {
            check: self.check.clone(),
            attempt_timeout: self.attempt_timeout,
            check_timeout: self.check_timeout,
            quarantine: self.quarantine,
            max_checks: self.max_checks,
            trust: self.trust.clone(),
            landed_with: self.landed_with.clone(),
            independent_writes: self.independent_writes,
            replay_idempotent: self.replay_idempotent,
            conflict_key: self.conflict_key.clone(),
            keyed: self.keyed.clone(),
            arguments: self.arguments.clone(),
            ledger: self.ledger.clone(),
            max_rechecks: self.max_rechecks,
            look_first: self.look_first,
            clock: self.clock.clone(),
            classify: self.classify.clone(),
            wrong: self.wrong,
        }
    }
}

impl<Req, Res> Clone for WriteSafetyLayer<Req, Res> {
    fn clone(&self) -> Self {
        Self { config: Arc::clone(&self.config), events: self.events.clone() }
    }
}

impl<S, Req, Res> Layer<S> for WriteSafetyLayer<Req, Res> {
    type Service = WriteSafety<S, Req, Res>;

    fn layer(&self, inner: S) -> WriteSafety<S, Req, Res> {
        self.layer_as(self.number(), false, inner)
    }
}

impl<Req, Res> fmt::Debug for WriteSafetyLayer<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WriteSafetyLayer")
            .field("check", &self.config.check.is_some())
            .field("attempt_timeout", &self.config.attempt_timeout)
            .field("check_timeout", &self.config.check_timeout)
            .field("quarantine", &self.config.quarantine)
            .field("trust", &self.config.trust)
            .field("independent_writes", &self.config.independent_writes)
            .field("conflict_key", &self.config.conflict_key.is_some())
            .field("replay_idempotent", &self.config.replay_idempotent)
            .field("keyed", &self.config.keyed)
            .field("ledger", &self.config.ledger)
            .finish_non_exhaustive()
    }
}
