//! Deadlines that move: the idle limit, which progress extends, and the pause while a user is asked.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::Instant;

use super::timer::{End, Timer};
use crate::{
    Deadline,
    places::{Place, Places},
    wakers::wake_all,
};

/// What moves a call's deadline: the progress that its server reports, and the time for which it stands still.
///
/// A call has one only if it asked for it, by [`Call::idle`](crate::Call::idle) or
/// [`Call::pause_while_asking`](crate::Call::pause_while_asking), and it is the same one over all attempts of
/// that call. A connection finds it in the call's context ([`CallContext::progress`]) and
///
/// - calls [`made`](Self::made) when it hands the request over, and for each message in which the server says,
///   of this very call, that it is at work. Only calls with an [idle limit](Self::idle) need to ask for such
///   messages;
/// - holds a [`pause`](Self::pause) of calls that [asked for it](Self::pauses_while_asking) while the user
///   answers a question of the server.
///
/// [`CallContext::progress`]: crate::CallContext::progress
///
/// ```
/// use std::time::Duration;
/// use goaround::{Call, Effect, Tagged};
///
/// let call = Tagged::new("index", Effect::Write).idle(Duration::from_secs(5)).within(Duration::from_secs(600));
/// let progress = call.context().progress().cloned();
/// // In a connection, when the server has said that it is at work:
/// if let Some(progress) = progress.filter(|progress| progress.idle().is_some()) {
///     progress.made();
/// }
/// ```
#[derive(Debug)]
pub struct Progress {
    idle: Option<Duration>,
    while_asking: bool,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// When the wait for progress began.
    since: Instant,
    /// How long the call had stood still by then.
    stood_before: Duration,
    /// How long the call has stood still, without the pause under way.
    stood: Duration,
    /// The pause under way: since when, and how many hold it.
    pause: Option<(Instant, usize)>,
    /// Somebody has seen the time to be up: what comes later does not give it back, so that all layers agree.
    over: bool,
    /// The timers that want to know of the end of the pause.
    standing: Places,
}

/// While one is held the deadline of its call stands still. [`Progress::pause`] makes it.
#[derive(Debug)]
#[must_use = "the pause ends when this is dropped"]
pub struct Pause(Arc<Progress>);

// ===== impl Progress =====

impl Progress {
    pub(crate) fn new(idle: Option<Duration>, while_asking: bool) -> Self {
        let state = State {
            since: Instant::now(),
            stood_before: Duration::ZERO,
            stood: Duration::ZERO,
            pause: None,
            over: false,
            standing: Places::default(),
        };
        Self { idle, while_asking, state: Mutex::new(state) }
    }

    /// The call has made progress, or an attempt of it begins: its idle limit counts from now.
    pub fn made(&self) {
        let now = Instant::now();
        self.lock().made(now);
    }

    /// How long the call may go without progress, if it has such a limit.
    pub const fn idle(&self) -> Option<Duration> {
        self.idle
    }

    /// Whether the call's deadline is to stand still while the user answers a question of the server.
    pub const fn pauses_while_asking(&self) -> bool {
        self.while_asking
    }

    /// Lets the call's deadline and its idle limit stand still until what is returned is dropped, and all
    /// others of the kind.
    pub fn pause(self: &Arc<Self>) -> Pause {
        let now = Instant::now();
        let mut state = self.lock();
        let (since, held) = state.pause.unwrap_or((now, 0));
        state.pause = Some((since, held + 1));
        drop(state);
        Pause(Arc::clone(self))
    }

    /// The layer that owns the timer has the call now.
    pub(crate) fn begin(&self, now: Instant) {
        self.lock().made(now);
    }

    fn at(&self, deadline: Deadline, now: Instant) -> Deadline {
        self.lock().at(deadline, self.idle, now)
    }

    #[cold]
    fn most(&self, deadline: Deadline, now: Instant) -> Deadline {
        self.lock().most(deadline, now)
    }

    fn is_past(&self, deadline: Deadline, now: Instant) -> bool {
        let mut state = self.lock();
        state.over = state.at(deadline, self.idle, now).is_past(now);
        state.over
    }

    /// What the call's timer has to know; a timer that stands still has a place in which its task is woken.
    fn end(&self, deadline: Deadline, place: &mut Option<Arc<Place>>, cx: &Context<'_>) -> End {
        let now = Instant::now();
        self.end_at(now, place, cx, |state| {
            let at = state.at(deadline, self.idle, now);
            state.over |= at.is_past(now);
            at
        })
    }

    /// The same for an attempt's time, which began when the call had stood still for so long. Progress does not
    /// move it.
    fn end_of_attempt(
        &self,
        (until, stood): (Instant, Duration),
        place: &mut Option<Arc<Place>>,
        cx: &Context<'_>,
    ) -> End {
        let now = Instant::now();
        self.end_at(now, place, cx, |state| {
            let at = until.checked_add(state.stood(now).saturating_sub(stood));
            at.map_or(Deadline::Never, Deadline::At)
        })
    }

    fn end_at(
        &self,
        now: Instant,
        place: &mut Option<Arc<Place>>,
        cx: &Context<'_>,
        at: impl FnOnce(&mut State) -> Deadline,
    ) -> End {
        // Wakers are foreign code: cloned and dropped without the lock.
        let waker = cx.waker().clone();
        let mut state = self.lock();
        let end = match at(&mut state) {
            at if at.is_past(now) => End::Past,
            Deadline::At(at) if state.pause.is_none() => End::Later(at),
            _ => {
                let known = place.get_or_insert_with(|| state.standing.enter()).set(Some(waker));
                drop(state);
                drop(known);
                return End::Paused;
            }
        };
        drop(state);
        end
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A copy is another call's.
impl Clone for Progress {
    fn clone(&self) -> Self {
        Self::new(self.idle, self.while_asking)
    }
}

impl State {
    fn made(&mut self, now: Instant) {
        (self.since, self.stood_before) = (now, self.stood(now));
    }

    /// How long the call has stood still.
    fn stood(&self, now: Instant) -> Duration {
        let pause = self.pause.map_or(Duration::ZERO, |(since, _)| now.saturating_duration_since(since));
        self.stood.saturating_add(pause)
    }

    /// The deadline as it is now.
    fn at(&self, deadline: Deadline, idle: Option<Duration>, now: Instant) -> Deadline {
        if self.over {
            return Deadline::At(now);
        }
        let stood = self.stood(now);
        let most = self.most(deadline, now).instant();
        let since_progress = stood.saturating_sub(self.stood_before);
        let idle = idle.and_then(|idle| self.since.checked_add(idle)?.checked_add(since_progress));
        match (most, idle) {
            (Some(most), Some(idle)) => Deadline::At(most.min(idle)),
            (Some(at), None) | (None, Some(at)) => Deadline::At(at),
            (None, None) => deadline_without_end(deadline),
        }
    }

    /// The same without the idle limit.
    fn most(&self, deadline: Deadline, now: Instant) -> Deadline {
        let at = deadline.instant().and_then(|at| at.checked_add(self.stood(now)));
        at.map_or(deadline_without_end(deadline), Deadline::At)
    }
}

/// What has no instant, be it since it moved too far.
const fn deadline_without_end(deadline: Deadline) -> Deadline {
    match deadline {
        Deadline::At(_) => Deadline::Never,
        other => other,
    }
}

impl Drop for Pause {
    fn drop(&mut self) {
        let now = Instant::now();
        let mut state = self.0.lock();
        let Some((since, held)) = state.pause else { return };
        if held > 1 {
            state.pause = Some((since, held - 1));
            return;
        }
        state.stood = state.stood(now);
        state.pause = None;
        let wakers = state.standing.wakers();
        drop(state);
        wake_all(wakers);
    }
}

// ===== impl Until =====

/// Until when a call may take: its deadline, and what moves it if something does.
#[derive(Clone, Debug, Default)]
pub(crate) struct Until {
    pub(crate) deadline: Deadline,
    pub(crate) progress: Option<Arc<Progress>>,
}

impl Until {
    /// Whether there is a limit at all.
    #[inline]
    pub(crate) fn has_end(&self) -> bool {
        self.deadline.instant().is_some()
            || self.progress.as_ref().is_some_and(|progress| progress.idle.is_some())
    }

    /// The deadline as it is now.
    #[inline]
    pub(crate) fn at(&self, now: Instant) -> Deadline {
        match &self.progress {
            None => self.deadline,
            Some(progress) => progress.at(self.deadline, now),
        }
    }

    /// The deadline as it is now, however long the server says nothing: what the attempts share. Their time stands still
    /// with the call, but progress does not extend it, and an idle limit does not shorten it.
    #[inline]
    pub(crate) fn most(&self, now: Instant) -> Deadline {
        match &self.progress {
            None => self.deadline,
            Some(progress) => progress.most(self.deadline, now),
        }
    }

    /// Whether it will have passed at that instant, whatever moves it meanwhile.
    pub(crate) fn ends_before(&self, at: Instant) -> bool {
        self.progress.is_none() && self.deadline.is_past(at)
    }

    /// The instant as it is now. Reads the clock only where something moves it.
    #[inline]
    pub(crate) fn instant(&self) -> Option<Instant> {
        match &self.progress {
            None => self.deadline.instant(),
            Some(_) => self.at(Instant::now()).instant(),
        }
    }

    /// Whether `now` is at or past it. Once it is, it stays so.
    #[inline]
    pub(crate) fn is_past(&self, now: Instant) -> bool {
        match &self.progress {
            None => self.deadline.is_past(now),
            Some(progress) => progress.is_past(self.deadline, now),
        }
    }

    /// The same, now. Reads the clock only where there is a limit.
    #[inline]
    pub(crate) fn is_over(&self) -> bool {
        self.has_end() && self.is_past(Instant::now())
    }

    /// Whether a wait from `now` of length `wait` ends before it.
    pub(crate) fn allows(&self, now: Instant, wait: Duration) -> bool {
        self.at(now).allows(now, wait)
    }

    /// What is left at `now`; `None` where there is no limit.
    pub(crate) fn left(&self, now: Instant) -> Option<Duration> {
        self.at(now).left(now)
    }

    /// Why the call has ended before its deadline, if it has.
    pub(crate) fn why_so_early(&self) -> Option<String> {
        let progress = self.progress.as_ref()?;
        let idle = progress.idle?;
        let stood = progress.lock().stood(Instant::now());
        let most = self.deadline.instant()?.checked_add(stood)?;
        (Instant::now() < most).then(|| format!("the server said nothing of it for {idle:?}"))
    }

    /// Ready once the time is up. Where it has moved meanwhile the timer fires early and is set anew, so that
    /// progress itself costs no timer.
    #[inline]
    pub(crate) fn poll_timer(&self, timer: Pin<&mut Timer>, cx: &mut Context<'_>) -> Poll<()> {
        let end = |place: &mut _, cx: &Context<'_>| match &self.progress {
            None => End::Past,
            Some(progress) => progress.end(self.deadline, place, cx),
        };
        timer.poll_moving(end, cx)
    }

    /// How long the call has stood still so far.
    #[inline]
    pub(crate) fn stood(&self) -> Duration {
        self.progress.as_ref().map_or(Duration::ZERO, |progress| progress.lock().stood(Instant::now()))
    }

    /// Ready once the time of an attempt is up, which began when the call had [stood](Self::stood) still for so
    /// long.
    pub(crate) fn poll_attempt(
        &self,
        timer: Pin<&mut Timer>,
        until: Instant,
        stood: Duration,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        let end = |place: &mut _, cx: &Context<'_>| match &self.progress {
            None => End::Past,
            Some(progress) => progress.end_of_attempt((until, stood), place, cx),
        };
        timer.poll_moving(end, cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn what_one_layer_saw_to_be_past_stays_so_for_all() {
        let progress = Arc::new(Progress::new(Some(SECOND), true));
        let deadline = Deadline::within(10 * SECOND);
        let until = Until { deadline, progress: Some(progress.clone()) };
        advance(SECOND).await;
        // Nobody has looked yet.
        progress.made();
        assert!(!until.is_over());
        assert_eq!(until.left(Instant::now()), Some(SECOND));
        advance(SECOND).await;
        assert!(until.clone().is_over());
        progress.made();
        let _pause = progress.pause();
        assert!(until.is_over());
        assert!(!until.allows(Instant::now(), Duration::ZERO));
        assert_eq!(until.left(Instant::now()), Some(Duration::ZERO));
    }

    #[tokio::test(start_paused = true)]
    async fn enormous_limits_do_not_overflow() {
        let progress = Arc::new(Progress::new(Some(Duration::MAX), false));
        let until = Until { deadline: Deadline::Never, progress: Some(progress.clone()) };
        assert_eq!((until.instant(), until.is_over()), (None, false));
        assert!(until.allows(Instant::now(), 1_000_000 * SECOND));
        assert!(!until.allows(Instant::now(), Duration::MAX));
        let until = Until { deadline: Deadline::within(SECOND), ..until };
        let _pause = progress.pause();
        advance(1_000_000 * SECOND).await;
        assert_eq!(until.left(Instant::now()), Some(SECOND));
    }
}
