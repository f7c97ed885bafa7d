//! How a doubt is settled: first a fence, then a check that started after it held.

use std::{
    borrow::Cow,
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::{Instant, sleep_until, timeout_at},
};

use super::{
    FirstSent, Lane,
    fence::{Fence, FenceBasis},
    verdict::{DynCheck, InDoubt, Probe, ProbeLog, Verdict},
};
use crate::{
    Activity, Attempt, BoxError, Call, CallError, CallId, Closure, Deadline, Refusal,
    call::{effect_of, replica},
    connection::{BoxFuture, discard},
    deadline::Until,
    error::safe_text,
    wakers::quietly,
};

/// Why no quarantine holds.
pub(super) const OUTLIVED: &str = "absent, but the old process is still there, so that no fence holds";
/// How long the layer waits at least before it asks a check again.
const LEAST_RECHECK: Duration = Duration::from_millis(10);
/// How long a first look lets a fence go before it.
const BEFORE_A_LOOK: Duration = Duration::from_millis(50);
/// How often a check that found a write applied in part is asked again at most, and when first.
const PARTIAL_RECHECKS: u32 = 4;
const FIRST_PARTIAL_RECHECK: Duration = Duration::from_millis(100);
/// How long a process's end, or a request's last byte, is waited for where no deadline says.
const REAPING: Duration = Duration::from_secs(60);

/// What is known of the attempt in doubt.
pub(super) struct Facts {
    pub(super) call: CallId,
    pub(super) attempts: Vec<Attempt>,
    pub(super) closure: Option<Closure>,
    pub(super) activity: Arc<Activity>,
    pub(super) first_sent: FirstSent,
    /// When the doubt arose: the attempt ended or timed out.
    pub(super) since: Instant,
    /// Until when the server asks to be left alone.
    pub(super) not_before: Option<Instant>,
    /// Whether it asks for a pause, by whatever means.
    pub(super) pause: bool,
    /// When its connection ended, if it has: none of its bytes was sent later. That the call ended is not enough:
    /// a layer in between may have given it up, and a frame that was begun is finished.
    pub(super) stopped_at: Option<Instant>,
    pub(super) until: Until,
    /// Set while a check runs, which goes by facts that can no longer change.
    pub(super) checking: Arc<AtomicBool>,
    /// Set once a check has found the write applied in part.
    pub(super) partial: Arc<AtomicBool>,
    /// Set once a check has found that the server has begun with it.
    pub(super) begun: Arc<AtomicBool>,
}

impl Facts {
    /// Keeps what a check says of the write that must not be forgotten, whatever it says later.
    fn note<Res>(&self, verdict: &Verdict<Res>) {
        if matches!(verdict, Verdict::Partial) {
            self.partial.store(true, Ordering::Relaxed);
        }
        if matches!(verdict, Verdict::Partial | Verdict::InFlight { .. }) {
            self.begun.store(true, Ordering::Relaxed);
        }
    }
}

/// Comes to a verdict about a write in doubt. A verdict of `NotLanded` has a fence that holds.
pub(super) async fn settle<S, Req, Res>(
    lane: Arc<Lane<S, Req, Res>>,
    request: Req,
    facts: Facts,
) -> Verdict<Res>
where
    Lane<S, Req, Res>: Probe<Req, Res> + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    let config = &lane.config;
    let Some(check) = &config.check else {
        return Verdict::Unknown("no effect check is configured".into());
    };
    let asking = Asking {
        check: Arc::clone(check),
        probe: Arc::<Lane<S, Req, Res>>::clone(&lane),
        checks: &lane.shared.checks,
        check_timeout: config.check_timeout,
        max_rechecks: config.max_rechecks,
    };
    let fence = find_fence(&facts, config.quarantine);
    // Who asks not to be asked is not asked early either.
    let held = if config.look_first && !facts.pause {
        match sooner(fence, asking.look(replica(&request), &facts)).await {
            Ok(held) => held,
            Err(landed) => return landed,
        }
    } else {
        fence.await
    };
    if let Some(not_before) = facts.not_before {
        let now = Instant::now();
        if !facts.until.allows(now, not_before.saturating_duration_since(now)) {
            return Verdict::Unknown("still being processed, and no time to ask".into());
        }
        sleep_until(not_before).await;
    }
    asking.verdict(request, &facts, held).await
}

/// The fence, or, if one comes before it, a verdict that the write landed.
async fn sooner<Res>(
    fence: impl Future<Output = Held>,
    look: impl Future<Output = Option<Verdict<Res>>>,
) -> Result<Held, Verdict<Res>> {
    let (mut fence, mut look) = (pin!(fence), pin!(look));
    let mut looked = false;
    poll_fn(|cx| {
        // The fence first: where it holds there is nothing to hurry for.
        if let Poll::Ready(held) = fence.as_mut().poll(cx) {
            return Poll::Ready(Ok(held));
        }
        if !looked && let Poll::Ready(landed) = look.as_mut().poll(cx) {
            looked = true;
            if let Some(landed) = landed {
                return Poll::Ready(Err(landed));
            }
        }
        Poll::Pending
    })
    .await
}

/// The fence that holds and, of a process, since when; or why none does.
pub(super) type Held = Result<(Fence, Option<Instant>), Cow<'static, str>>;

/// How many checks are asked at once: an outage puts every write in doubt at the same time.
pub(super) struct Checks {
    places: Semaphore,
    /// A check has found no place, and those that only look give theirs up.
    wanted: Notify,
}

impl Checks {
    pub(super) fn new(at_once: usize) -> Self {
        Self { places: Semaphore::new(at_once.clamp(1, Semaphore::MAX_PERMITS)), wanted: Notify::new() }
    }

    /// A place for a check; nobody closes the semaphore.
    async fn place(&self) -> Option<SemaphorePermit<'_>> {
        if let Ok(place) = self.places.try_acquire() {
            return Some(place);
        }
        self.wanted.notify_waiters();
        quietly(self.places.acquire()).await.ok()
    }
}

/// What asks a check.
pub(super) struct Asking<'a, Req, Res> {
    pub(super) check: Arc<dyn DynCheck<Req, Res>>,
    pub(super) probe: Arc<dyn Probe<Req, Res>>,
    pub(super) checks: &'a Checks,
    pub(super) check_timeout: Option<Duration>,
    pub(super) max_rechecks: u32,
}

impl<Req, Res> Asking<'_, Req, Res>
where
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    /// Asks the check before there is a fence, once, after a moment in which a process's end would be one: all that
    /// counts is that the write landed. Gives way to checks that have a fence, or that find none.
    async fn look(&self, request: Option<Req>, facts: &Facts) -> Option<Verdict<Res>> {
        let request = request?;
        tokio::time::sleep(BEFORE_A_LOOK).await;
        let mut wanted = pin!(self.checks.wanted.notified());
        // Before it has a place, so that it hears of each check that finds none.
        wanted.as_mut().enable();
        let mut wanted = pin!(quietly(wanted));
        let mut asked = pin!(async {
            let _place = quietly(self.checks.places.acquire()).await.ok()?;
            let early = Held::Err("absent, but no fence holds yet".into());
            Some(self.ask(request, facts, &early).await)
        });
        let (verdict, _) = poll_fn(|cx| match wanted.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(None),
            Poll::Pending => asked.as_mut().poll(cx),
        })
        .await?;
        facts.note(&verdict);
        Some(verdict).filter(|verdict| matches!(verdict, Verdict::Landed(_)))
    }

    /// Asks the check once; with whether bytes of the attempt were still to be sent when it began.
    async fn ask(&self, mut request: Req, facts: &Facts, held: &Held) -> (Verdict<Res>, bool) {
        let (fence, gone_at, without_fence) = match held {
            Ok((fence, gone_at)) => (Some(fence), *gone_at, Cow::Borrowed("")),
            Err(why) => (None, None, why.clone()),
        };
        // What such a check finds absent may leave while it looks.
        let unsent = !off!(Unsent) && facts.stopped_at.is_none() && is_unsent(&facts.activity).await;
        let now = Instant::now();
        let until = check_until(self.check_timeout, facts.until.at(now), now);
        let log = Arc::new(ProbeLog { until, gone_at, ..ProbeLog::default() });
        let context = request.context().to_be_seen();
        *request.context_mut() = context;
        let doubt = InDoubt {
            request,
            call: facts.call,
            attempts: facts.attempts.clone(),
            closure: facts.closure.clone(),
            first_sent: facts.first_sent.clone(),
            fence: fence.cloned(),
            without_fence,
            probe: Arc::clone(&self.probe),
            log: Arc::clone(&log),
        };
        let check = Arc::clone(&self.check);
        // The call that makes the future is foreign code too.
        let verdict = within(until, Unwinding::new(async move { check.run(doubt).await })).await;
        (examine(verdict, facts.call, fence, &log), unsent)
    }

    /// Asks the check, and asks again where it says so.
    pub(super) async fn verdict(self, request: Req, facts: &Facts, held: Held) -> Verdict<Res> {
        let mut asked = 0;
        loop {
            let place = self.checks.place().await;
            facts.checking.store(true, Ordering::Relaxed);
            let Some(copy) = replica(&request) else {
                return Verdict::Unknown("the request cannot be cloned".into());
            };
            let (verdict, unsent) = self.ask(copy, facts, &held).await;
            drop(place);
            asked += 1;
            let again = match &verdict {
                Verdict::InFlight { recheck_after } if asked <= self.max_rechecks => Some(*recheck_after),
                Verdict::Partial if asked <= self.max_rechecks.min(PARTIAL_RECHECKS) => {
                    Some(FIRST_PARTIAL_RECHECK * 2_u32.pow(asked - 1))
                }
                _ => None,
            };
            facts.note(&verdict);
            let partial = facts.partial.load(Ordering::Relaxed);
            if let Some(after) = again.filter(|after| facts.until.allows(Instant::now(), *after)) {
                // Others may check meanwhile, and what becomes of the attempt counts again.
                facts.checking.store(false, Ordering::Relaxed);
                // Never in a busy loop, whatever the check asks for.
                tokio::time::sleep(after.max(LEAST_RECHECK)).await;
                continue;
            }
            return match verdict {
                // What was there in part and is not there now may come again, or was undone by somebody.
                Verdict::NotLanded(_) | Verdict::InFlight { .. } if partial => Verdict::Partial,
                Verdict::NotLanded(fence)
                    if !fence.is_of_the_check() && is_still_there(facts.closure.as_ref()) =>
                {
                    Verdict::Unknown(OUTLIVED.into())
                }
                Verdict::NotLanded(fence) if unsent && fence.basis() == FenceBasis::Declared => {
                    Verdict::Unknown(
                        "absent, but the request was not sent to its end when the check began, so that no \
                         declared fence holds"
                            .into(),
                    )
                }
                Verdict::InFlight { .. } if asked > self.max_rechecks => {
                    Verdict::Unknown(format!("still being processed after {asked} checks").into())
                }
                Verdict::InFlight { .. } => {
                    Verdict::Unknown("still being processed, and no time to ask again".into())
                }
                verdict => verdict,
            };
        }
    }
}

/// Why no declared fence holds.
#[derive(Clone, Copy)]
enum Undeclared {
    NoQuarantine,
    /// Bytes of the request are still to be sent, and nothing bounds when they are.
    Unsent,
    DoesNotFit,
}

/// Waits for a fence that can hold in the time there is: for the end of a process (or for the last byte) no
/// longer than two thirds of the time left, so that a check can still find that the write landed; for a
/// quarantine, whose length is known, only if it leaves a tenth.
async fn find_fence(facts: &Facts, quarantine: Option<Duration>) -> Held {
    if off!(FenceFirst) && quarantine.is_some() {
        return Ok((Fence::quarantined(facts.call, Duration::ZERO), None));
    }
    let start = Instant::now();
    let left = facts.until.left(start);
    let patience = start.checked_add(left.map_or(REAPING, |left| left / 3 * 2));
    let latest = left.and_then(|left| start.checked_add(left / 10 * 9));

    let observed = async {
        let closure = facts.closure.as_ref().filter(|closure| closure.exit_ends_effects())?;
        let exit = within(patience, closure.exited()).await.flatten()?;
        (exit.group_gone || off!(Group)).then(|| (Fence::process_gone(facts.call), Some(exit.at)))
    };
    let declared = async {
        let quarantine = quarantine.ok_or(Undeclared::NoQuarantine)?;
        let sent = within(patience, last_byte(facts)).await.ok_or(Undeclared::Unsent)?;
        let holds = sent.checked_add(quarantine).ok_or(Undeclared::DoesNotFit)?;
        if latest.is_some_and(|latest| holds > latest) && holds > start {
            return Err(Undeclared::DoesNotFit);
        }
        sleep_until(holds).await;
        Ok((Fence::quarantined(facts.call, quarantine), None))
    };
    let mut observed = pin!(observed);
    let mut declared = pin!(declared);
    let (mut no_process, mut undeclared) = (false, None);
    let either = poll_fn(|cx| {
        if !no_process {
            match observed.as_mut().poll(cx) {
                Poll::Ready(Some(fence)) => return Poll::Ready(Ok(fence)),
                Poll::Ready(None) => no_process = true,
                Poll::Pending => {}
            }
        }
        if undeclared.is_none() {
            match declared.as_mut().poll(cx) {
                Poll::Ready(Ok(fence)) => return Poll::Ready(Ok(fence)),
                Poll::Ready(Err(why)) => undeclared = Some(why),
                Poll::Pending => {}
            }
        }
        match undeclared {
            Some(why) if no_process => Poll::Ready(Err(why)),
            _ => Poll::Pending,
        }
    });
    either.await.map_err(|why| without_fence(facts.closure.as_ref(), why))
}

/// Why no fence holds, and what would give one.
fn without_fence(closure: Option<&Closure>, why: Undeclared) -> Cow<'static, str> {
    match (why, closure) {
        (Undeclared::Unsent, _) => {
            "absent, but the request is not sent to its end, so that no declared fence holds"
        }
        (Undeclared::DoesNotFit, _) => {
            "absent, but no fence holds: the quarantine does not fit in the time left; a longer deadline or \
             not_landed_because(..) would give one"
        }
        (Undeclared::NoQuarantine, Some(closure)) if closure.exit_ends_effects() => {
            "absent, but no fence holds: the old process is not known to be gone; quarantine(..) on the layer \
             or not_landed_because(..) would give one"
        }
        (Undeclared::NoQuarantine, Some(_)) => {
            "absent, but no fence holds; exit_ends_effects() on the connector, quarantine(..) on the layer or \
             not_landed_because(..) would give one"
        }
        (Undeclared::NoQuarantine, None) => {
            "absent, but no fence holds while the server may still work on it; quarantine(..) on the layer or \
             not_landed_because(..) would give one"
        }
    }
    .into()
}

/// Whether the process that had the attempt is known to have outlived all signals. Whatever was declared of a
/// server's times was not said of one that cannot be killed.
pub(super) fn is_still_there(closure: Option<&Closure>) -> bool {
    closure.and_then(Closure::exit).is_some_and(|exit| match cfg!(unix) {
        true => !exit.group_gone && !off!(Group),
        // Elsewhere nothing is known of a group.
        false => exit.status.is_none(),
    })
}

/// Whether that connection's process is found to have outlived all signals.
pub(super) fn has_outlived(closure: Option<&Closure>) -> bool {
    if let Some(closure) = closure {
        closure.learn_exit();
    }
    is_still_there(closure)
}

/// Whether that connection's process is known to be gone, and its effects with it.
pub(super) fn is_gone(closure: &Closure) -> bool {
    closure.exit_ends_effects() && closure.exit().is_some_and(|exit| exit.group_gone)
}

/// When the attempt's last byte was sent, at the latest. Pending while bytes are unwritten: nothing
/// bounds when they arrive.
async fn last_byte(facts: &Facts) -> Instant {
    poll_fn(|cx| match (facts.activity.poll_sent(cx), facts.stopped_at) {
        (Ok(Some(at)), _) => Poll::Ready(at),
        // The connection marks nothing.
        (Ok(None), _) => Poll::Ready(facts.since),
        (Err(_), Some(stopped)) => Poll::Ready(stopped),
        (Err(_), None) if off!(Unsent) => Poll::Ready(facts.since),
        (Err(_), None) => Poll::Pending,
    })
    .await
}

/// Whether bytes of the attempt are still to be sent, as far as its connection tells.
async fn is_unsent(activity: &Activity) -> bool {
    poll_fn(|cx| Poll::Ready(activity.poll_sent(cx).is_err())).await
}

/// Until when a check may take: by default a third of the time left, and at most 10 s.
fn check_until(timeout: Option<Duration>, deadline: Deadline, now: Instant) -> Option<Instant> {
    const MOST: Duration = Duration::from_secs(10);
    let left = deadline.left(now);
    let timeout = timeout.unwrap_or_else(|| left.map_or(MOST, |left| (left / 3).min(MOST)));
    let until = now.checked_add(timeout);
    match (until, deadline.instant()) {
        (Some(until), Some(deadline)) => Some(until.min(deadline)),
        (until, deadline) => until.or(deadline),
    }
}

/// What counts of a check's result: one that failed, hung or panicked is unknown, and so is one whose fence
/// is another call's or whose probes are older than the fence.
fn examine<Res>(
    result: Option<Option<Result<Verdict<Res>, BoxError>>>,
    call: CallId,
    held: Option<&Fence>,
    log: &ProbeLog,
) -> Verdict<Res> {
    match result {
        None => Verdict::Unknown("the check took too long".into()),
        Some(None) => Verdict::Unknown("the check panicked".into()),
        Some(Some(Err(error))) => Verdict::Unknown(match safe_text(error.as_ref()) {
            Some(text) => format!("the check failed: {text}").into(),
            None => "the check failed, with an error that may hold secrets and is not shown".into(),
        }),
        Some(Some(Ok(Verdict::NotLanded(fence)))) => {
            if !fence.is_for(call) {
                Verdict::Unknown("the check named a fence of another call".into())
            } else if !fence.is_of_the_check() && held != Some(&fence) {
                Verdict::Unknown("the check named a fence that did not hold when it began".into())
            } else if fence.basis() == FenceBasis::Observed && log.is_stale() && !off!(ProbeAge) {
                Verdict::Unknown("a probe ran on a connection that is older than the fence".into())
            } else {
                Verdict::NotLanded(fence)
            }
        }
        Some(Some(Ok(verdict))) => verdict,
    }
}

async fn within<T>(until: Option<Instant>, future: impl Future<Output = T>) -> Option<T> {
    match until {
        Some(until) => timeout_at(until, future).await.ok(),
        None => Some(future.await),
    }
}

/// A foreign future's result, or `None` if it panics; a destructor that does harms nobody.
pub(super) struct Unwinding<T>(Option<BoxFuture<T>>);

impl<T> Unwinding<T> {
    pub(super) fn new(future: impl Future<Output = T> + Send + 'static) -> Self {
        Self(Some(Box::pin(future)))
    }
}

impl<T> Future for Unwinding<T> {
    type Output = Option<T>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        let Some(future) = &mut self.0 else { return Poll::Pending };
        match catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(cx))) {
            Ok(poll) => poll.map(Some),
            Err(_) => Poll::Ready(None),
        }
    }
}

impl<T> Drop for Unwinding<T> {
    fn drop(&mut self) {
        discard(self.0.take());
    }
}

// ===== impl Probe =====

impl<S, Req, Res> Probe<Req, Res> for Lane<S, Req, Res>
where
    S: tower::Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    S::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    fn probe(&self, mut request: Req, log: &Arc<ProbeLog>) -> BoxFuture<Result<Res, CallError>> {
        if let Some(classify) = &self.config.classify
            && let Some((effect, basis)) = classify(&request)
        {
            request.context_mut().stamp(effect, basis);
        }
        probe_by(self.spare(), request, log)
    }
}

/// Calls the service, if the request is read-only.
pub(super) fn probe_by<S, Req, Res>(
    mut service: S,
    mut request: Req,
    log: &Arc<ProbeLog>,
) -> BoxFuture<Result<Res, CallError>>
where
    S: tower::Service<Req, Response = Res, Error = CallError> + Send + 'static,
    S::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    let effect = effect_of(&request);
    if effect.is_write() {
        let refused = CallError::refused(Refusal::NotAProbe).of_call(request.method(), effect);
        return Box::pin(async move { Err(refused) });
    }
    let activity = Arc::new(Activity::default());
    let context = request.context_mut();
    // A probe is a call of its own, in the check's time.
    let mut own = context.clone();
    let asked = own.deadline().instant();
    own.set_deadline(match (asked, log.until) {
        (Some(asked), Some(until)) => Deadline::At(asked.min(until)),
        (Some(at), None) | (None, Some(at)) => Deadline::At(at),
        (None, None) => Deadline::Never,
    });
    own.set_activity(Some(Arc::clone(&activity)));
    *context = own;
    let log = Arc::clone(log);
    Box::pin(async move {
        poll_fn(|cx| service.poll_ready(cx)).await.map_err(CallError::not_ready)?;
        let result = service.call(request).await;
        if let Some(gone_at) = log.gone_at
            && activity.generation().is_none_or(|(_, began)| began < gone_at)
        {
            log.mark_stale();
        }
        result
    })
}
