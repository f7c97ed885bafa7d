//! After a crash: settles what a dead process left open.

use std::{
    borrow::Cow,
    fmt,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use tokio::time::{Instant, sleep, timeout_at};
use tower::Service;

use super::{
    EffectCheck, FirstSent, VerdictKind, WallClock,
    account::PATIENCE,
    fence::Fence,
    ledger::{Entry, Ledger, LedgerError, ServerProcess, State},
    settle::{Asking, Checks, Facts, Held, probe_by},
    verdict::{Erased, Probe, ProbeLog, Verdict},
};
use crate::{
    Attempt, Basis, BoxError, Call, CallError, Deadline, Effect, Event, Outcome, Stack,
    call::effect_of,
    connection::BoxFuture,
    deadline::Until,
    event::{DoubtReport, Events},
};

/// Settles an entry that [`Ledger::in_doubt`] lists, mostly one that a dead process left open: waits for a fence,
/// asks the check over the new connection, and settles by its verdict. It never sends the write again; what is
/// [not landed](State::NotLanded) the caller may send as a new call.
///
/// The fence is that the server processes of the dead owner are gone, if the caller had declared on the
/// connector that their [exit ends their effects](crate::stdio::Child::exit_ends_effects) and the ledger knows
/// them ([`Entry::servers`]); or that it had started none ([`Entry::was_never_sent`]); or a
/// [`quarantine`](Resolve::quarantine), which counts from when the owner is known to be gone. Without one that can
/// hold in time the check can only find that the write landed. A key that the server keeps, and a compare-and-set,
/// are none here: they say that a second copy does no harm, and none is sent, so that the entry stays in doubt.
///
/// ```no_run
/// # use goaround::{BoxError, InDoubt, Verdict, jsonrpc::{Request, Response}, mcp};
/// use std::time::Duration;
/// use goaround::write_safety::{Resolve, ledger::{Ledger, servers_gone}};
///
/// # async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
/// #     Ok(doubt.unknown(""))
/// # }
/// # async fn run(ledger: impl Ledger, stack: mcp::Client) -> Result<(), BoxError> {
/// // At the start, before the first call:
/// let entries = ledger.in_doubt().await?;
/// servers_gone(&entries, Duration::from_secs(30)).await;
/// for entry in &entries {
///     // What `keep_arguments(|request| request.raw_params().map(|params| params.get().to_owned()))` kept.
///     let Some(arguments) = &entry.arguments else { continue };
///     let params: serde_json::Value = serde_json::from_str(arguments)?;
///     let request = Request::new(entry.method.clone(), params)?;
///     let resolved = Resolve::new(&ledger, entry, request).run(check, &stack).await?;
///     println!("{}: {:?}", entry.id, resolved.state);
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is resolved until it is run"]
pub struct Resolve<'a, L, Req> {
    ledger: &'a L,
    entry: &'a Entry,
    request: Req,
    quarantine: Option<Duration>,
    within: Duration,
    check_timeout: Option<Duration>,
    clock: WallClock,
    events: Events,
}

/// How an entry was resolved.
#[derive(Debug)]
#[non_exhaustive]
pub struct Resolved<Res> {
    /// What the ledger says of the write now.
    pub state: State,
    /// What the check said. Go by `state`: this may be `NotLanded` where no fence allows to say so.
    pub verdict: VerdictKind,
    /// The response of a write that landed, if the check found it.
    pub response: Option<Res>,
}

impl<'a, L: Ledger, Req> Resolve<'a, L, Req>
where
    Req: Call + Send + 'static,
{
    /// To settle that entry of that ledger; `request` is what the check will be asked about.
    pub fn new(ledger: &'a L, entry: &'a Entry, request: Req) -> Self {
        Self {
            ledger,
            entry,
            request,
            quarantine: None,
            within: Duration::from_secs(60),
            check_timeout: None,
            clock: WallClock::default(),
            events: Events::default(),
        }
    }

    /// Declares that nothing of a dead owner lands later than this after its end: see
    /// [`WriteSafetyLayer::quarantine`](super::WriteSafetyLayer::quarantine). None by default. It says nothing of an
    /// entry of [this very run](super::ledger::EntryId::is_own), nor of one whose owner the ledger does not know to be
    /// [gone](super::ledger::Entry::orphaned): its connection may live on with bytes of the write still to be sent.
    pub fn quarantine(mut self, quarantine: Duration) -> Self {
        self.quarantine = Some(quarantine);
        self
    }

    /// How long it may take in all, 60 s by default. Of that, two thirds are waited for a fence at most. The ledger
    /// has 5 s in any case to record what was found.
    pub fn within(mut self, within: Duration) -> Self {
        self.within = within;
        self
    }

    /// How long the check may take: see
    /// [`WriteSafetyLayer::check_timeout`](super::WriteSafetyLayer::check_timeout).
    pub fn check_timeout(mut self, timeout: Duration) -> Self {
        self.check_timeout = Some(timeout);
        self
    }

    /// The wall clock: see [`WriteSafetyLayer::wall_clock`](super::WriteSafetyLayer::wall_clock).
    pub fn wall_clock(mut self, clock: impl Fn() -> std::time::SystemTime + Send + Sync + 'static) -> Self {
        self.clock = WallClock::new(clock);
        self
    }

    /// Where the [`InDoubt`](Event::InDoubt) event goes that says how it ended.
    pub fn on_event(mut self, sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        self.events = Events::to(sink);
        self
    }

    /// Resolves it; probes go over that stack, by its own classification.
    ///
    /// A probe must run on a connection that was made after the old process was gone, or the fence does not count:
    /// so list and resolve what is in doubt before the first call, and wait for the servers of all entries
    /// ([`servers_gone`](super::ledger::servers_gone)) before the first of them.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Conflict`] if somebody else has settled the entry meanwhile, and whatever else the ledger
    /// says; [`LedgerError::Unavailable`] if it says nothing in time.
    pub async fn run<C, M, Res>(
        self,
        check: C,
        stack: &Stack<M, Req, Res>,
    ) -> Result<Resolved<Res>, LedgerError>
    where
        C: EffectCheck<Req, Res> + Send + Sync + 'static,
        M: Service<()> + Send + 'static,
        M::Error: Into<BoxError>,
        M::Future: Send + 'static,
        M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
        <M::Response as Service<Req>>::Future: Send + 'static,
        Res: Send + 'static,
    {
        let judge = stack.clone();
        let classify = move |request: &Req| judge.judge(request).0;
        self.resolve(check, Over { service: Mutex::new(stack.clone()), classify }).await
    }

    /// Resolves it; probes go over that service, and are read-only if they say so themselves
    /// ([`Call::read_only`]).
    ///
    /// # Errors
    ///
    /// As for [`run`](Resolve::run).
    pub async fn run_over<C, S>(self, check: C, service: S) -> Result<Resolved<S::Response>, LedgerError>
    where
        C: EffectCheck<Req, S::Response> + Send + Sync + 'static,
        S: Service<Req, Error = CallError> + Clone + Send + 'static,
        S::Future: Send + 'static,
        S::Response: Send + 'static,
    {
        self.resolve(check, Over { service: Mutex::new(service), classify: effect_of::<Req> }).await
    }

    async fn resolve<C, P, Res>(self, check: C, probe: P) -> Result<Resolved<Res>, LedgerError>
    where
        C: EffectCheck<Req, Res> + Send + Sync + 'static,
        P: Probe<Req, Res> + 'static,
        Res: Send + 'static,
    {
        let Self { ledger, entry, request, quarantine, within, check_timeout, clock, events } = self;
        let start = Instant::now();
        let call = entry.id.call();
        let held = find_fence(entry, quarantine, start, within).await;
        let fence = held.as_ref().ok().map(|(fence, _)| fence.clone());
        let now = Instant::now();
        let attempt = Attempt::unanswered("process_ended");
        let facts = Facts {
            call,
            attempts: vec![attempt.clone()],
            closure: None,
            activity: Arc::default(),
            first_sent: FirstSent { at: now, wall: Some(entry.entered), clock },
            since: now,
            not_before: None,
            pause: false,
            stopped_at: Some(now),
            until: Until { deadline: Deadline::after(start, within), progress: None },
            checking: Arc::default(),
            partial: Arc::default(),
            begun: Arc::default(),
        };
        let one = Checks::new(1);
        let asking = Asking {
            check: Arc::new(Erased(check)),
            probe: Arc::new(probe),
            checks: &one,
            check_timeout,
            max_rechecks: 32,
        };
        let verdict = asking.verdict(request, &facts, held).await;

        let kind = verdict.kind();
        let in_doubt = |why: Cow<'static, str>| State::InDoubt { reason: why.into_owned() };
        let (state, response) = match verdict {
            Verdict::Landed(response) => (State::Landed { by: "check".to_owned() }, response),
            Verdict::NotLanded(fence) if fence.stops_the_attempt() => (State::by_fence(&fence), None),
            // Nothing is sent here that would take its place.
            Verdict::NotLanded(fence) => {
                (in_doubt(format!("absent, and may yet land; {fence}").into()), None)
            }
            Verdict::InFlight { .. } => (in_doubt("still being processed".into()), None),
            Verdict::Partial => (in_doubt("applied in part".into()), None),
            Verdict::Unknown(why) => (in_doubt(why), None),
        };
        let until = start.checked_add(within).unwrap_or(now).max(Instant::now() + PATIENCE);
        let settled = timeout_at(until, ledger.settle(entry.id, entry.revision, state.clone())).await;
        settled.unwrap_or_else(|_| Err(LedgerError::Unavailable("it did not answer in time".into())))?;
        let (outcome, reason) = match &state {
            State::InDoubt { reason } => (Outcome::Unknown, Some(reason.clone())),
            State::NotLanded { .. } => (Outcome::NotDone, None),
            _ => (Outcome::DoneResultLost, None),
        };
        events.emit(Event::InDoubt(&DoubtReport {
            call,
            method: entry.method.clone(),
            effect: entry.effect,
            basis: Basis::Default,
            attempts: vec![attempt],
            verdict: Some(kind),
            reason,
            fence,
            replayed: entry.attempts > 1,
            outcome: Some(outcome),
        }));
        Ok(Resolved { state, verdict: kind, response })
    }
}

/// Waits until the old server processes are gone, or the declared time has passed, if either can be in time.
async fn find_fence(entry: &Entry, quarantine: Option<Duration>, start: Instant, within: Duration) -> Held {
    const LONGEST_PAUSE: Duration = Duration::from_millis(200);
    let call = entry.id.call();
    if entry.was_never_sent() {
        return Ok((Fence::never_sent(call), None));
    }
    let declared_end = entry.servers.iter().all(|server| server.exit_ends_effects);
    let in_sight = entry.servers.iter().all(ServerProcess::can_be_seen) && !entry.servers.is_empty();
    let observable = declared_end && in_sight;
    // As long as its owner may live, a connection of it may, and hold bytes that are not written yet.
    let holds = entry.orphaned.and_then(|orphaned| orphaned.checked_add(quarantine?));
    let patience = start.checked_add(within / 3 * 2);
    // It must leave a tenth of the time for the check.
    let latest = start.checked_add(within / 10 * 9);
    let declared = holds.filter(|holds| latest.is_none_or(|latest| *holds <= latest) || *holds <= start);
    let mut pause = Duration::from_millis(5);
    loop {
        let now = Instant::now();
        if observable && let Some(gone) = entry.gone_since() {
            return Ok((Fence::process_gone(call), Some(gone)));
        }
        if let (Some(holds), Some(quarantine)) = (declared, quarantine)
            && now >= holds
        {
            return Ok((Fence::quarantined(call, quarantine), None));
        }
        let over = patience.is_some_and(|patience| now >= patience);
        let next = match (declared, observable && !over) {
            (Some(holds), true) => holds.min(now + pause),
            (Some(holds), false) => holds,
            (None, true) => now + pause,
            (None, false) => return Err(without_fence(entry, quarantine, declared_end, in_sight)),
        };
        sleep(next.saturating_duration_since(now)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
    }
}

/// Why no fence holds, and what would give one.
fn without_fence(
    entry: &Entry,
    quarantine: Option<Duration>,
    declared_end: bool,
    in_sight: bool,
) -> Cow<'static, str> {
    let why = match (quarantine, declared_end, in_sight) {
        (Some(_), ..) if entry.id.is_own() => {
            "this process made the call itself, and bytes of it may still be to be sent"
        }
        (Some(_), ..) if entry.orphaned.is_none() => {
            "the ledger does not know its owner to be gone (`Entry::orphaned`), and bytes of it may still be to be sent"
        }
        (Some(_), ..) => "the quarantine does not fit in the time given",
        (None, true, true) => "the old server process is not known to be gone",
        (None, ..) if entry.servers.is_empty() => "the ledger knows no server process of it",
        (None, true, false) => {
            "the old server process cannot be seen from here, from another machine or container"
        }
        (None, false, _) => {
            "exit_ends_effects() was not declared on the connector when its server was started (to declare it now \
             counts for later writes only)"
        }
    };
    let what = match quarantine {
        // It is given already, or says nothing of a connection that may live on.
        _ if entry.id.is_own() || (quarantine.is_some() && entry.orphaned.is_none()) => {
            "not_landed_because(..)"
        }
        Some(_) => "more time (`Resolve::within`) or not_landed_because(..)",
        None => "`Resolve::quarantine(..)` or not_landed_because(..)",
    };
    format!("absent, but no fence holds: {why}; {what} would give one").into()
}

/// Probes over any service.
struct Over<S, F> {
    service: Mutex<S>,
    classify: F,
}

impl<S, F, Req, Res> Probe<Req, Res> for Over<S, F>
where
    S: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    S::Future: Send + 'static,
    F: Fn(&Req) -> Effect + Send + Sync,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    fn probe(&self, mut request: Req, log: &Arc<ProbeLog>) -> BoxFuture<Result<Res, CallError>> {
        let effect = (self.classify)(&request);
        let basis = request.context().basis();
        request.context_mut().stamp(effect, basis);
        let service = self.service.lock().unwrap_or_else(PoisonError::into_inner).clone();
        probe_by(service, request, log)
    }
}

impl<L, Req> fmt::Debug for Resolve<'_, L, Req> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Resolve")
            .field("entry", &self.entry.id)
            .field("quarantine", &self.quarantine)
            .field("within", &self.within)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    /// An entry of another run of a process, with a server for each of these declarations.
    fn entry(servers: &[bool]) -> Entry {
        let server = |ends: &bool| json!({ "pid": 1, "stack": 1, "exit_ends_effects": ends });
        let servers: Vec<_> = servers.iter().map(server).collect();
        serde_json::from_value(json!({
            "id": format!("{:032x}-1-1", 1), "method": "pay", "effect": "write", "entered_ms": 1, "changed_ms": 1,
            "attempts": 1, "state": "open", "revision": 1, "stack": 1, "servers": servers,
        }))
        .unwrap()
    }

    #[test]
    fn why_no_fence_holds_names_only_what_would_give_one() {
        const QUARANTINE: Option<Duration> = Some(Duration::from_secs(1));
        let both = "; `Resolve::quarantine(..)` or not_landed_because(..) would give one";
        for (servers, quarantine, in_sight, why, what) in [
            (&[true, false][..], None, true, "exit_ends_effects() was not declared", both),
            (&[false], None, false, "to declare it now counts for later writes only", both),
            (&[], None, false, "the ledger knows no server process of it", both),
            (&[true], None, true, "is not known to be gone", both),
            (&[true], None, false, "from another machine or container", both),
            (
                &[true],
                QUARANTINE,
                true,
                "does not fit",
                "; more time (`Resolve::within`) or not_landed_because(..)",
            ),
        ] {
            let declared_end = servers.iter().all(|ends| *ends);
            let entry = Entry { orphaned: Some(Instant::now()), ..entry(servers) };
            let text = without_fence(&entry, quarantine, declared_end, in_sight);
            assert!(text.starts_with("absent, but no fence holds: ") && text.contains(why), "{text}");
            assert!(text.contains(what) && !text.contains("exit_ends_effects() on"), "{text}");
        }
        // A quarantine says nothing as long as the owner may live, and of a call of this very run.
        let text = without_fence(&entry(&[]), QUARANTINE, true, false);
        assert!(text.contains("does not know its owner to be gone"), "{text}");
        assert!(text.ends_with("; not_landed_because(..) would give one"), "{text}");
        let id =
            super::super::ledger::EntryId::of(crate::CallContext::new().identify(&mut Default::default()));
        let own = Entry { id, ..entry(&[]) };
        for quarantine in [None, QUARANTINE] {
            let text = without_fence(&own, quarantine, true, false);
            assert!(text.ends_with("; not_landed_because(..) would give one"), "{text}");
        }
    }
}
