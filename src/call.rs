//! What a layer must know of a request: [`Call`], the [`CallContext`] that travels with it, its
//! [`Deadline`] and its [`Effect`]; and [`Tagged`], which makes a `Call` of any request.

use std::{
    borrow::Cow,
    cell::Cell,
    fmt, mem,
    num::{NonZeroU64, NonZeroUsize},
    ptr,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Waker},
    time::Duration,
};

use serde::{Serialize, Serializer, ser::SerializeStruct};
use tokio::time::Instant;

use crate::{
    CallError, Delivery,
    deadline::{Progress, Until},
    error::Attempt,
    event::Events,
    wakers::wake,
    write_safety::{Fence, Place, ledger::EntryId},
};

/// A request that the layers of this crate can reason about.
///
/// Implement it for an own request type, or wrap a foreign one in [`Tagged`].
pub trait Call: Sized {
    /// The method's name, for errors and events. It must not hold arguments or secrets.
    fn method(&self) -> &str;

    /// The same, to be kept. Cheap where the name is static.
    fn name(&self) -> Cow<'static, str> {
        Cow::Owned(self.method().to_owned())
    }

    /// What the call may do at the server. What is not known to be read-only is [`Effect::Write`].
    ///
    /// A stamp in the [context](CallContext::effect) wins over this; the layers look there first. Without one they take
    /// this for the type's default, and say of a write in doubt that nobody said what it does: a type that knows better
    /// [stamps](CallContext::stamp) its contexts.
    fn effect(&self) -> Effect;

    /// What travels with the call.
    fn context(&self) -> &CallContext;

    /// What travels with the call.
    fn context_mut(&mut self) -> &mut CallContext;

    /// A copy for another attempt, or `None` for a request that can be sent only once: such a call is
    /// never replayed, whatever its effect.
    fn try_clone(&self) -> Option<Self>;

    /// A copy for another attempt of the same call, with all that the layers have noted. Requests of this crate
    /// make it in one go; there is nothing to implement.
    #[doc(hidden)]
    #[inline]
    fn replica(&self) -> Option<Self> {
        let mut copy = self.try_clone()?;
        *copy.context_mut() = self.context().for_attempt();
        Some(copy)
    }

    /// Gives this call `limit` from now, over all of its attempts; wins over a layer's default.
    ///
    /// A limit too large to be an instant counts as [`Deadline::Never`].
    #[must_use]
    fn within(mut self, limit: Duration) -> Self {
        self.context_mut().set_deadline(Deadline::within(limit));
        self
    }

    /// Sets the deadline of this call; wins over a layer's default.
    #[must_use]
    fn deadline(mut self, deadline: Deadline) -> Self {
        self.context_mut().set_deadline(deadline);
        self
    }

    /// Gives this call an idle limit: it ends, as at its deadline, once the server has said nothing of it for
    /// that long. Progress of this very call extends it again and again, up to the call's deadline or the
    /// layer's default, which is the maximum. See [`deadline`](crate::deadline#idle-limits).
    ///
    /// The [`DeadlineLayer`](crate::DeadlineLayer) sees to it, and refuses a call that has no such maximum.
    #[must_use]
    fn idle(mut self, limit: Duration) -> Self {
        self.context_mut().set_progress(Some(limit), None);
        self
    }

    /// Lets this call's deadline and its idle limit stand still while the user answers a question that the
    /// server asks (in MCP, an elicitation), over the connection that the call is on.
    #[must_use]
    fn pause_while_asking(mut self) -> Self {
        self.context_mut().set_progress(None, Some(true));
        self
    }

    /// Stamps the call with an effect, as the caller's own word.
    #[must_use]
    #[expect(clippy::wrong_self_convention, reason = "reads as what it says: this call as a read")]
    fn as_effect(mut self, effect: Effect) -> Self {
        self.context_mut().stamp(effect, Basis::Caller);
        self
    }

    /// Says that this call changes nothing at the server, so that it may be repeated.
    #[must_use]
    fn read_only(self) -> Self {
        self.as_effect(Effect::ReadOnly)
    }
}

/// What a call may do at the server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Effect {
    /// It changes nothing: a repetition does no harm.
    ReadOnly,
    /// A write that the server applies once, however often it arrives. Treated as a write: another
    /// writer's change may lie between two copies.
    Idempotent,
    /// Everything else, and everything that nobody classified.
    Write,
}

impl Effect {
    /// Whether the call may change something: everything but [`Effect::ReadOnly`].
    #[inline]
    pub const fn is_write(self) -> bool {
        !matches!(self, Effect::ReadOnly)
    }
}

/// Who said what effect a call has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Basis {
    /// Nobody has told a layer: it is what the request's type says of itself ([`Call::effect`]). A [`Tagged`],
    /// [`Call::read_only`], [`Call::as_effect`] and the layers' rules are [`Caller`].
    ///
    /// [`Caller`]: Basis::Caller
    #[default]
    Default,
    /// The protocol defines the method so.
    Protocol,
    /// The caller said so, per call or by a rule.
    Caller,
    /// The server's annotation, which the caller declared to be trusted.
    TrustedAnnotation,
}

/// Until when a call may take.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Deadline {
    /// The layer's default.
    #[default]
    Inherit,
    /// No limit.
    Never,
    /// This instant of tokio's clock, absolute, over all attempts.
    At(Instant),
}

/// What is further away than this is not waited for: ten years.
const NEVER: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);

impl Deadline {
    /// The deadline that lies `limit` from now; [`Deadline::Never`] where no instant is that far away.
    ///
    /// ```
    /// use std::time::Duration;
    /// use goaround::Deadline;
    ///
    /// assert!(matches!(Deadline::within(Duration::from_secs(1)), Deadline::At(_)));
    /// assert_eq!(Deadline::within(Duration::MAX), Deadline::Never);
    /// ```
    pub fn within(limit: Duration) -> Self {
        Self::after(Instant::now(), limit)
    }

    /// The deadline that lies `limit` after `start`.
    #[inline]
    pub(crate) fn after(start: Instant, limit: Duration) -> Self {
        // By std's own, which tokio's calls: neither is put in line here, and one call is less than two.
        start.into_std().checked_add(limit).map_or(Deadline::Never, |at| Deadline::At(Instant::from_std(at)))
    }

    /// The instant, where there is one.
    #[inline]
    pub const fn instant(self) -> Option<Instant> {
        match self {
            Deadline::At(at) => Some(at),
            Deadline::Inherit | Deadline::Never => None,
        }
    }

    /// Whether `now` is at or past the deadline.
    #[inline]
    pub(crate) fn is_past(self, now: Instant) -> bool {
        self.instant().is_some_and(|at| now >= at)
    }

    /// Whether a wait from `now` of length `wait` ends before the deadline. Where there is none, whether it ends at all:
    /// what is asked for by a peer may be longer than anybody lives.
    #[inline]
    pub(crate) fn allows(self, now: Instant, wait: Duration) -> bool {
        match self.instant() {
            Some(at) => now.checked_add(wait).is_some_and(|end| end < at),
            None => wait < NEVER,
        }
    }

    /// What is left at `now`; `None` where there is no limit.
    pub(crate) fn left(self, now: Instant) -> Option<Duration> {
        self.instant().map(|at| at.saturating_duration_since(now))
    }
}

/// Names one logical call, the same over all of its attempts: the number of the clone (or thread) that
/// made it, and that one's own sequence, so that naming a call costs no shared counter.
///
/// A clone takes another number after each 2^20 calls. The numbers begin anew after 2^44.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CallId(
    // One word: it is copied by every layer right after it was written, and two words are then read back as
    // one wide one, for which the processor has to wait until both are out of its store buffer.
    NonZeroU64,
);

/// How many bits of a call's name are its clone's sequence.
const SEQUENCE_BITS: u32 = 20;

impl CallId {
    /// The id that such a text says; no call has a zero in it.
    pub(crate) fn from_parts(source: u64, sequence: u64) -> Option<Self> {
        let fits = source < 1 << (u64::BITS - SEQUENCE_BITS) && sequence < 1 << SEQUENCE_BITS;
        NonZeroU64::new(source << SEQUENCE_BITS | sequence).filter(|_| fits && source > 0).map(Self)
    }

    const fn source(self) -> u64 {
        self.0.get() >> SEQUENCE_BITS
    }

    const fn sequence(self) -> u64 {
        self.0.get() & ((1 << SEQUENCE_BITS) - 1)
    }
}

/// As it stands in texts.
impl fmt::Debug for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for CallId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-{}", self.source(), self.sequence())
    }
}

impl Serialize for CallId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut id = serializer.serialize_struct("CallId", 2)?;
        id.serialize_field("source", &self.source())?;
        id.serialize_field("sequence", &self.sequence())?;
        id.end()
    }
}

/// What travels down by value with a request: who it is, how long it may take, what it may do.
///
/// # Clones
///
/// A clone of a context is that of a new call: it keeps deadline (also an idle limit, which is its own) and effect,
/// and neither the id nor what the layers noted. A service between the layers that sends a request on as a new call
/// gets errors that are [not about the call](crate::CallError#errors-of-other-calls) that it was given, so that nothing
/// they say of what was sent counts. One that makes another request of the one it has, for the same call, moves the
/// context into it, by `mem::take` of [`context_mut`](Call::context_mut).
// In this order: what is zero in a new one is together, and no padding between it. Left to itself the compiler puts
// the padding of an instant next to it and copies both at once, for which the processor has to wait.
#[derive(Debug, Default)]
#[repr(C)]
pub struct CallContext {
    id: Option<CallId>,
    activity: Option<Arc<Activity>>,
    /// Where the call's events go, its trail, and what moves its deadline.
    pub(crate) events: Events,
    marks: Marks,
    deadline: Deadline,
    attempt_until: Option<Instant>,
}

/// The effect and its basis, and what the layers have noted: in one word, which is written and read as a whole. A
/// call's context is read just after it was written, and the processor waits where a read spans several writes.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
struct Marks(u64);

impl Marks {
    const EFFECT: u64 = 0b11;
    const BASIS: u64 = 0b1100;
    /// Whether a layer resolved the deadline from its default, so that a nested one may shorten it.
    const BY_DEFAULT: u64 = 1 << 4;
    /// Whether a layer of this crate has the call already: that one, the outermost, reports it.
    const ENTERED: u64 = 1 << 5;
    /// Whether a write-safety layer that may replay the call has it already: of nested ones only that one
    /// settles doubts.
    const GUARDED: u64 = 1 << 6;
    /// Whether the stack has asked the classifier, so that its write-safety layer need not.
    const JUDGED: u64 = 1 << 7;

    #[inline]
    const fn effect(self) -> Option<Effect> {
        // A table, which costs a load where a `match` becomes a jump that the processor has to guess.
        const EFFECTS: [Option<Effect>; 4] =
            [None, Some(Effect::ReadOnly), Some(Effect::Idempotent), Some(Effect::Write)];
        EFFECTS[(self.0 & Self::EFFECT) as usize]
    }

    #[inline]
    const fn basis(self) -> Basis {
        match (self.0 & Self::BASIS) >> 2 {
            0 => Basis::Default,
            1 => Basis::Protocol,
            2 => Basis::Caller,
            _ => Basis::TrustedAnnotation,
        }
    }

    #[inline]
    const fn stamped(self, effect: Effect, basis: Basis) -> Self {
        let effect = match effect {
            Effect::ReadOnly => 1,
            Effect::Idempotent => 2,
            Effect::Write => 3,
        };
        let basis = match basis {
            Basis::Default => 0,
            Basis::Protocol => 1,
            Basis::Caller => 2,
            Basis::TrustedAnnotation => 3,
        };
        Self(self.0 & !(Self::EFFECT | Self::BASIS) | effect | basis << 2)
    }

    /// The stamp alone.
    const fn stamp(self) -> Self {
        Self(self.0 & (Self::EFFECT | Self::BASIS))
    }

    #[inline]
    const fn has(self, mark: u64) -> bool {
        self.0 & mark != 0
    }

    #[inline]
    const fn set(&mut self, mark: u64, to: bool) {
        self.0 = if to { self.0 | mark } else { self.0 & !mark };
    }
}

impl fmt::Debug for Marks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Marks")
            .field("effect", &self.effect())
            .field("basis", &self.basis())
            .field("by_default", &self.has(Self::BY_DEFAULT))
            .field("entered", &self.has(Self::ENTERED))
            .field("guarded", &self.has(Self::GUARDED))
            .field("judged", &self.has(Self::JUDGED))
            .finish()
    }
}

impl CallContext {
    /// A context with nothing set.
    pub fn new() -> Self {
        Self::default()
    }

    /// The call's id, where it has one yet: the outermost layer gives it one, or [`CallContext::assign_id`].
    #[inline]
    pub const fn id(&self) -> Option<CallId> {
        self.id
    }

    /// The call's id, given now if it has none, so that it can be read before the call.
    pub fn assign_id(&mut self) -> CallId {
        thread_local!(static SOURCE: Cell<CallIds> = const { Cell::new(CallIds::new()) });
        *self.id.get_or_insert_with(|| {
            SOURCE.with(|source| {
                let mut ids = source.take();
                let id = ids.next();
                source.set(ids);
                id
            })
        })
    }

    /// Gives the call an id from a layer's own source, if it has none.
    #[inline]
    pub(crate) fn identify(&mut self, ids: &mut CallIds) -> CallId {
        *self.id.get_or_insert_with(|| ids.next())
    }

    /// The call's deadline.
    #[inline]
    pub const fn deadline(&self) -> Deadline {
        self.deadline
    }

    /// What moves the call's deadline, if the call asked for that: its idle limit, and pauses.
    #[inline]
    pub fn progress(&self) -> Option<&Arc<Progress>> {
        self.events.progress()
    }

    /// The call's deadline, and what moves it.
    #[inline]
    pub(crate) fn until(&self) -> Until {
        Until { deadline: self.deadline, progress: self.progress().cloned() }
    }

    /// What layers below the one that replays the call note of its attempts, once there is such a layer.
    #[inline]
    pub(crate) fn trail(&self) -> Option<&Arc<Trail>> {
        self.events.trail()
    }

    pub(crate) fn set_trail(&mut self, trail: Arc<Trail>) {
        self.events.set_trail(trail);
    }

    /// Asks for what moves the deadline, on top of what was asked for.
    fn set_progress(&mut self, idle: Option<Duration>, while_asking: Option<bool>) {
        let known = self.progress();
        let idle = idle.or_else(|| known?.idle());
        let while_asking = while_asking.or_else(|| Some(known?.pauses_while_asking())).unwrap_or_default();
        self.events.set_progress(Arc::new(Progress::new(idle, while_asking)));
    }

    /// Sets the call's deadline.
    #[inline]
    pub fn set_deadline(&mut self, deadline: Deadline) {
        self.deadline = deadline;
        self.marks.set(Marks::BY_DEFAULT, false);
    }

    /// Sets a deadline that comes from a layer's default.
    #[inline]
    pub(crate) fn set_default_deadline(&mut self, deadline: impl FnOnce() -> Deadline) {
        // Before the deadline is asked for, which takes a while: as the last thing before the context is copied, the
        // mark would be written as a byte of a word, for which a reader of the word has to wait.
        self.marks.set(Marks::BY_DEFAULT, true);
        self.deadline = deadline();
    }

    /// The effect that somebody stamped on the call.
    #[inline]
    pub fn effect(&self) -> Option<Effect> {
        self.marks.effect()
    }

    /// Who stamped it.
    #[inline]
    pub fn basis(&self) -> Basis {
        self.marks.basis()
    }

    /// Stamps the call: what it may do, and who said so.
    #[inline]
    pub fn stamp(&mut self, effect: Effect, basis: Basis) {
        self.marks = self.marks.stamped(effect, basis);
    }

    /// Whether a layer resolved the deadline from its default.
    #[inline]
    pub(crate) const fn is_by_default(&self) -> bool {
        self.marks.has(Marks::BY_DEFAULT)
    }

    /// Whether a layer of this crate has the call already.
    #[inline]
    pub(crate) const fn is_entered(&self) -> bool {
        self.marks.has(Marks::ENTERED)
    }

    #[inline]
    pub(crate) const fn set_entered(&mut self, entered: bool) {
        self.marks.set(Marks::ENTERED, entered);
    }

    /// Whether a write-safety layer that may replay the call has it already.
    #[inline]
    pub(crate) const fn is_guarded(&self) -> bool {
        self.marks.has(Marks::GUARDED)
    }

    #[inline]
    pub(crate) const fn set_guarded(&mut self, guarded: bool) {
        self.marks.set(Marks::GUARDED, guarded);
    }

    #[inline]
    pub(crate) const fn set_judged(&mut self, judged: bool) {
        self.marks.set(Marks::JUDGED, judged);
    }

    /// Whether the stack has asked the classifier; said once.
    #[inline]
    pub(crate) const fn take_judged(&mut self) -> bool {
        let judged = self.marks.has(Marks::JUDGED);
        self.marks.set(Marks::JUDGED, false);
        judged
    }

    /// Until when the current attempt is waited for, where that is earlier than the deadline.
    ///
    /// A connection that is polled at or past it withdraws a request of which nothing was sent (and
    /// answers [`Delivery::NotSent`](crate::Delivery::NotSent)), and goes on waiting for one that was.
    #[inline]
    pub const fn attempt_until(&self) -> Option<Instant> {
        self.attempt_until
    }

    /// Sets until when the current attempt is waited for.
    #[inline]
    pub fn set_attempt_until(&mut self, until: Option<Instant>) {
        self.attempt_until = until;
    }

    /// Where a connection marks what became of the attempt's bytes, if a layer above wants to know.
    #[inline]
    pub fn activity(&self) -> Option<&Arc<Activity>> {
        self.activity.as_ref()
    }

    /// Sets where the connection marks what became of the attempt's bytes.
    #[inline]
    pub(crate) fn set_activity(&mut self, activity: Option<Arc<Activity>>) {
        self.activity = activity;
    }

    /// That the call's time is up before anything of it was sent, or a replay's, as a connection asks when its turn comes,
    /// where somebody answers for what becomes of it. Whoever waits for it withdraws it then, but may have his turn late;
    /// and a server may have forgotten the key by which a write could be repeated until then. A first attempt loses
    /// nothing by going late, and would never go if its time were shorter than a turn takes. A replay's gate is asked once
    /// more: it may have lain behind a stalled pipe for long. Reads the clock for nothing else.
    pub(crate) fn overdue(&self) -> Option<CallError> {
        let activity = self.activity.as_ref()?;
        let is_asked = activity.is_asked_again();
        let (deadline, until) = (self.until(), self.attempt_until.filter(|_| is_asked));
        let mut is_over = false;
        if (deadline.has_end() || until.is_some()) && !off!(AttemptTime) {
            let now = Instant::now();
            if deadline.is_past(now) {
                return Some(CallError::deadline(Delivery::NotSent));
            }
            is_over = until.is_some_and(|at| now >= at);
        }
        (is_over || (is_asked && !activity.still_goes()))
            .then(|| CallError::attempt_timeout(Delivery::NotSent))
    }

    /// The marks of the layer further out, which are not this one's.
    #[inline]
    pub(crate) fn take_activity(&mut self) -> Option<Arc<Activity>> {
        self.activity.take()
    }

    /// The context as somebody may see it who is not to send the call: nothing of an attempt is in it.
    pub(crate) fn to_be_seen(&self) -> Self {
        // What a layer stamped for the way down says nothing of what somebody makes of the request.
        let stamp = if self.basis() == Basis::Default { Marks::default() } else { self.marks.stamp() };
        Self { id: self.id, marks: stamp, ..self.clone() }
    }

    /// The context of another attempt of the same call.
    #[inline(always)]
    pub(crate) fn for_attempt(&self) -> Self {
        Self {
            id: self.id,
            deadline: self.deadline,
            attempt_until: self.attempt_until,
            activity: self.activity.clone(),
            events: self.events.share(),
            marks: self.marks,
        }
    }
}

impl Clone for CallContext {
    fn clone(&self) -> Self {
        // What moves the deadline is the other call's own.
        let progress = self.progress().map(|progress| Arc::new(Progress::clone(progress)));
        let events = progress.map(Events::with_progress).unwrap_or_default();
        Self { deadline: self.deadline, events, marks: self.marks.stamp(), ..Self::default() }
    }
}

/// The effect that the layers go by: the stamp, else the request's own.
#[inline]
pub(crate) fn effect_of<R: Call>(request: &R) -> Effect {
    request.context().effect().unwrap_or_else(|| request.effect())
}

/// A copy of the request for another attempt of the same call.
#[inline(always)]
pub(crate) fn replica<R: Call>(request: &R) -> Option<R> {
    request.replica()
}

/// Where a layer takes the ids of calls from. A clone is a source of its own.
#[derive(Debug, Default)]
pub(crate) struct CallIds {
    /// Nothing is left of a source, or none was drawn yet, where its sequence is zero.
    next: u64,
}

impl CallIds {
    const fn new() -> Self {
        Self { next: 0 }
    }

    #[inline]
    fn next(&mut self) -> CallId {
        let id = if self.next & ((1 << SEQUENCE_BITS) - 1) == 0 { new_source() } else { self.next };
        self.next = id.wrapping_add(1);
        CallId(NonZeroU64::new(id).unwrap_or(NonZeroU64::MIN))
    }
}

/// The first name of another source.
#[cold]
fn new_source() -> u64 {
    static SOURCES: AtomicU64 = AtomicU64::new(1);
    (SOURCES.fetch_add(1, Ordering::Relaxed) << SEQUENCE_BITS) | 1
}

impl Clone for CallIds {
    fn clone(&self) -> Self {
        Self::new()
    }
}

// ===== impl Activity =====

/// What a connection knows about the bytes of one attempt, marked while it happens.
///
/// A connection that marks says so with [`Activity::adopt`] before the request can be sent. What it then
/// leaves unmarked has not happened. One that never marks is treated as if all bytes were sent at the
/// moment that the attempt timed out. One whose call ends alone, without its connection
/// ([`Scope::Call`](crate::Scope::Call)), before its last byte was marked counts as still being sent.
// Small, and with what few attempts need in a box: one is made for each attempt of a write.
#[derive(Debug, Default)]
pub struct Activity {
    state: Mutex<ActivityState>,
    /// Where the write is entered; zero of what is no attempt of a write.
    ledger: AtomicUsize,
    /// Whether it waits for a connection, or is held back by it.
    waiting: AtomicBool,
    /// How many times it was given to a connection.
    goings: AtomicU32,
}

#[derive(Debug, Default)]
struct ActivityState {
    adopted: bool,
    withdrawn: bool,
    /// Which reconnect layers, one in another, have given the attempt to a connection and have not got it back.
    given: [Option<Giver>; 2],
    /// Which write-safety layers have let a copy pass that has not come back unsent.
    passed: Vec<Giver>,
    /// Whether there is more than one copy of the attempt, so that the end of one does not say that nothing was sent.
    copied: bool,
    /// Whether the attempt's time is up, and whether its call is over or has given it up.
    over: bool,
    ended: bool,
    /// How many copies another write-safety layer, further in, has, and reports what becomes of them.
    taken_over: u32,
    /// Whether one has told that it is in doubt, or begun to.
    told: bool,
    /// One has told what has become of it, to nobody who waits: whether it has landed, rather than that it was answered.
    resolved: Option<bool>,
    /// Whether the layer whose attempt it is has, while one further in had it still: that one is silent then.
    told_outside: bool,
    /// Whether one had it and its call ended otherwise than as not done.
    gone: bool,
    /// The attempt of a layer further out of which this one is a part.
    above: Option<Arc<Activity>>,
    /// The write's conflict key where it is entered.
    key: Option<Arc<str>>,
    /// Whether others may claim it there.
    claims: bool,
    sent_at: Option<Instant>,
    generation: Option<(u64, Instant)>,
    replaced: Option<Box<Fence>>,
    waker: Option<Waker>,
    /// Where its layer counts it when it goes, as long as that has no gate.
    order: Option<Standing>,
    /// Of each layer that keeps an order of writes in which it has a place.
    gates: Vec<Arc<dyn Gate>>,
    word: Option<Arc<dyn Word>>,
}

/// What a connection's server said of a call before it was sent, which made it a read or an idempotent one.
pub(crate) trait Word: fmt::Debug + Send + Sync {
    /// Whether the server still says so there. If not, it may have done more by then.
    fn holds(&self) -> bool;
}

/// What is asked of an attempt that has waited for a connection, and of each replay, at the moment in which it goes.
pub(crate) trait Gate: fmt::Debug + Send + Sync {
    /// Whether it may still go. If so, it counts as handed over now.
    fn opens(&self) -> bool;

    /// Whether it is asked again when its frame's turn comes.
    fn is_asked_again(&self) -> bool {
        true
    }

    /// The same when it has gone to a connection and the turn of its frame comes. A first attempt has its place by then:
    /// what that connection was given later is behind it. A replay is asked as before, since a write on another connection
    /// may have overtaken it.
    fn stays_open(&self) -> bool;
}

/// The order of a layer's writes.
pub(crate) trait WriteOrder: fmt::Debug + Send + Sync {
    /// A write with that place, and a key or none, goes now: later than it was counted, or once more. It counts anew, but
    /// keeps its place.
    fn goes(&self, key: Option<(&Arc<str>, EntryId)>, place: Place);
}

/// A write's place in the order of its layer.
#[derive(Clone, Debug)]
pub(crate) struct Standing {
    pub(crate) order: Arc<dyn WriteOrder>,
    /// With a key.
    pub(crate) id: Option<EntryId>,
    pub(crate) place: Place,
}

/// What a write-safety layer says of itself to those further in.
#[derive(Debug)]
pub(crate) struct Guard {
    /// Which ledger it has.
    pub(crate) ledger: NonZeroUsize,
    /// The write's conflict key there.
    pub(crate) key: Option<Arc<str>>,
    /// Whether others may claim the write there.
    pub(crate) claims: bool,
}

impl Activity {
    /// Of an attempt of a write, with what its layer says of itself.
    #[inline]
    pub(crate) fn guarded(guard: Guard) -> Arc<Self> {
        // Made in its place; what is not zero is told it there.
        let activity = Arc::<Self>::default();
        activity.ledger.store(guard.ledger.get(), Ordering::Relaxed);
        if guard.key.is_some() || guard.claims {
            let mut state = activity.lock();
            (state.key, state.claims) = (guard.key, guard.claims);
        }
        activity
    }

    /// Whether the layer whose attempt it is enters the write in that ledger, and has which key for it there.
    pub(crate) fn entered_in(&self, ledger: NonZeroUsize) -> Option<Option<Arc<str>>> {
        let entered = self.ledger.load(Ordering::Relaxed) == ledger.get();
        entered.then(|| self.lock().key.clone())
    }

    /// Whether the layer whose attempt it is, or one further out, has a conflict key for the write that is not this one in
    /// that ledger, or enters it in another where it may be claimed.
    pub(crate) fn is_kept_apart_from(&self, ledger: NonZeroUsize, key: Option<&str>) -> bool {
        let same = self.ledger.load(Ordering::Relaxed) == ledger.get();
        let state = self.lock();
        let apart = match &state.key {
            Some(own) => !same || key != Some(own),
            None => state.claims && !same,
        };
        apart || state.above.as_deref().is_some_and(|above| above.is_kept_apart_from(ledger, key))
    }

    /// Says that the connection marks this attempt. What another connection withdrew before, and handed
    /// back, this one has anew.
    ///
    /// `false`: the attempt is over. It was held up on its way here and its time has passed meanwhile, so
    /// that whoever made it no longer counts on it: it must not be sent, and is
    /// [`NotSent`](crate::Delivery::NotSent).
    #[must_use = "an attempt that is over must not be sent"]
    pub fn adopt(&self) -> bool {
        let mut state = self.asked();
        // A connection that has it already, and has not withdrawn it.
        state.copied |= state.adopted && !state.withdrawn;
        if !state.may_begin() {
            return false;
        }
        self.count_going(&state);
        state.adopted = true;
        // Without a reconnect layer.
        self.waiting.store(false, Ordering::Relaxed);
        // What was withdrawn from one connection may be handed over to the next: only the last time counts.
        state.withdrawn = false;
        true
    }

    /// Whoever made the attempt no longer counts on it: no connection that marks may begin to send it. One
    /// that has it already keeps it.
    pub(crate) fn close(&self) {
        self.lock().over = true;
    }

    /// The same once nobody waits for it any more: no part of it may begin either, as a replay that a layer further in
    /// makes.
    pub(crate) fn end(&self) {
        let mut state = self.lock();
        (state.over, state.ended) = (true, true);
    }

    /// Marks that the request was withdrawn before its first byte.
    pub fn withdrawn(&self) {
        self.lock().withdrawn = true;
    }

    /// Notes that this copy of the request was not sent. If another was, by a service in between that repeats calls,
    /// that says nothing of the attempt.
    pub(crate) fn not_sent(&self, by: Giver) {
        let mut state = self.lock();
        state.copied |= state.given.contains(&Some(by));
    }

    /// The same of one that was dropped before it was given to a connection.
    pub(crate) fn never_given(&self, by: Giver) {
        self.not_sent(by);
        self.lock().withdrawn = true;
    }

    /// Marks that a write-safety layer lets a copy pass.
    pub(crate) fn passes(&self, by: Giver) {
        self.lock().passed.push(by);
    }

    /// Marks that one has turned a copy away. If another one has passed it or is with a layer further in, that says
    /// nothing of the attempt.
    pub(crate) fn turned_away(&self, by: Giver) {
        let mut state = self.lock();
        state.copied |= state.passed.contains(&by) || state.is_inside_or_gone();
        state.withdrawn = true;
    }

    /// Marks that it waits for a connection, and is handed over only when there is one; or that its connection, or a service
    /// on the way to one, holds it back. So does what it is a part of.
    pub(crate) fn waits(&self) {
        self.waiting.store(true, Ordering::Relaxed);
        let above = self.lock().above.clone();
        if let Some(above) = above {
            above.waits();
        }
    }

    pub(crate) fn is_waiting(&self) -> bool {
        self.waiting.load(Ordering::Relaxed)
    }

    /// Whether a connection or a layer further in has had it.
    pub(crate) fn is_with_somebody(&self) -> bool {
        let state = self.lock();
        state.adopted || state.generation.is_some() || state.is_inside_or_gone()
    }

    /// Has it counted there when it goes, be its layer polled by then or not. How many times it went before that.
    pub(crate) fn set_order(&self, order: Standing) -> u32 {
        let mut state = self.lock();
        state.order = Some(order);
        self.goings()
    }

    /// Has that asked when it goes, in place of its order.
    pub(crate) fn set_own_gate(&self, gate: Arc<dyn Gate>) {
        let mut state = self.lock();
        state.gates.push(gate);
        let order = state.order.take();
        drop(state);
        drop(order);
    }

    /// Has that asked, too.
    pub(crate) fn set_gate(&self, gate: Arc<dyn Gate>) {
        self.lock().gates.push(gate);
    }

    /// Has that asked no more.
    pub(crate) fn remove_gate<G: Gate>(&self, gate: &Arc<G>) {
        let own = Arc::as_ptr(gate);
        let mut state = self.lock();
        let at = state.gates.iter().position(|gate| ptr::addr_eq(Arc::as_ptr(gate), own));
        let removed = at.map(|at| state.gates.swap_remove(at));
        drop(state);
        drop(removed);
    }

    /// Notes by what word the connection takes the attempt for what it is.
    pub(crate) fn taken_by(&self, word: Arc<dyn Word>) {
        self.lock().word = Some(word);
    }

    /// That word. It is to be asked for as long as the call may be repeated.
    pub(crate) fn word(&self) -> Option<Arc<dyn Word>> {
        self.lock().word.clone()
    }

    /// Whether somebody is to be asked when its frame's turn comes: of each replay, and of what has waited for a connection.
    pub(crate) fn is_asked_again(&self) -> bool {
        self.lock().gates.iter().any(|gate| gate.is_asked_again())
    }

    /// What has waited goes now, if it may; else it is over. What it is a part of goes with it, and if that may not, no part
    /// of it begins.
    #[cold]
    pub(crate) fn ask_the_gates(&self) {
        let (gates, order, above) = {
            let state = self.lock();
            (
                state.gates.clone(),
                state.order.clone().map(|order| (order, state.key.clone())),
                state.above.clone(),
            )
        };
        if !gates.iter().all(|gate| gate.opens()) {
            return self.end();
        }
        if let Some((Standing { order, id, place }, key)) = order {
            order.goes(key.as_ref().zip(id), place);
        }
        if let Some(above) = above {
            above.ask_the_gates();
        }
    }

    /// The same when its frame's turn comes.
    #[cold]
    fn ask_the_gates_again(&self) {
        let (gates, above) = {
            let state = self.lock();
            (state.gates.clone(), state.above.clone())
        };
        if !gates.iter().all(|gate| gate.stays_open()) {
            self.end();
        } else if let Some(above) = above {
            above.ask_the_gates_again();
        }
    }

    /// Whether one with a gate may still go, now that its connection's turn has come to begin with it.
    fn still_goes(&self) -> bool {
        self.ask_the_gates_again();
        let state = self.lock();
        !state.over && !state.is_within_what_ended()
    }

    /// Marks that the request was not sent, or not processed, on the connection that it was given to.
    pub(crate) fn given_back(&self, by: Giver) {
        let mut state = self.lock();
        for given in state.given.iter_mut().filter(|given| **given == Some(by)) {
            *given = None;
        }
        if let Some(at) = state.passed.iter().position(|passed| *passed == by) {
            state.passed.swap_remove(at);
        }
    }

    /// Whether a service in between has made more than one copy of the attempt of which something may have been sent:
    /// then what the end of one says does not hold for them all.
    pub(crate) fn was_copied(&self) -> bool {
        self.lock().copied
    }

    /// Marks that the transport accepted the request's last byte and sent it on. One that lies in a buffer of this
    /// process is not sent: whoever writes through one marks after a flush.
    pub fn sent(&self) {
        let waker = {
            let mut state = self.lock();
            state.sent_at.get_or_insert_with(Instant::now);
            state.waker.take()
        };
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    /// Says that a layer further in reports what becomes of the attempt. `false` as for [`Activity::adopt`].
    pub(crate) fn take_over(&self) -> bool {
        let mut state = self.lock();
        // Another copy, which is there still or was sent.
        state.copied |= state.is_inside_or_gone();
        if !state.may_begin() {
            return false;
        }
        state.taken_over += 1;
        true
    }

    /// It is over there, and so it ended: that layer has told that it is in doubt, or leaves what comes after it to
    /// this one.
    pub(crate) fn give_the_report_back(&self, told: bool, not_done: bool) {
        let mut state = self.lock();
        state.taken_over = state.taken_over.saturating_sub(1);
        state.told |= told;
        state.gone |= !not_done;
    }

    /// A layer further in tells what has become of it, and its caller has gone away.
    pub(crate) fn resolve(&self, landed: bool) {
        self.lock().resolved = Some(landed);
    }

    /// What that is, if one did: of a caller who has gone away further out, too, there is nothing more to tell.
    pub(crate) fn resolved(&self) -> Option<bool> {
        self.lock().resolved
    }

    /// Whether a layer further in had a copy of the attempt of which something may have been sent.
    pub(crate) fn has_gone(&self) -> bool {
        self.lock().gone
    }

    /// Says of which attempt of a layer further out this one is a part: it is over when that one's call is.
    pub(crate) fn is_within(&self, above: &Arc<Self>) {
        self.lock().above = Some(Arc::clone(above));
    }

    /// Whether nobody waits for it any more.
    pub(crate) fn has_ended(&self) -> bool {
        let state = self.lock();
        state.ended || state.is_within_what_ended()
    }

    /// Whether a layer further in has told that it is in doubt.
    pub(crate) fn was_told(&self) -> bool {
        self.lock().told
    }

    /// The layer whose attempt it is, which has put it down, tells that it is in doubt, unless one further in has. One that
    /// has it still lives on elsewhere, and does not tell that a second time.
    pub(crate) fn tells(&self) -> bool {
        let mut state = self.lock();
        state.told_outside |= !state.told;
        !state.told
    }

    /// A layer further in tells that it is in doubt, unless another one has, further out or of another copy.
    pub(crate) fn lets_tell(&self) -> bool {
        let mut state = self.lock();
        if mem::replace(&mut state.told, true) || state.told_outside {
            return false;
        }
        // Under the lock, and in that order all the way out: no two of them begin at once.
        state.above.as_deref().is_none_or(Activity::lets_tell)
    }

    /// Whether a layer further in takes the call for a write, and it has not come back from there as not done.
    pub(crate) fn is_a_write_inside(&self) -> bool {
        self.lock().is_inside_or_gone()
    }

    /// The fence by which a later attempt replaced this one, if one did.
    ///
    /// A connection that receives this attempt's success all the same reports it: the fence does not hold.
    pub fn replaced_by_fence(&self) -> Option<Fence> {
        self.lock().replaced.as_deref().cloned()
    }

    /// Whether nothing of the attempt was sent, since it was withdrawn.
    pub(crate) fn was_withdrawn(&self) -> bool {
        let state = self.lock();
        state.withdrawn && !state.copied && !state.is_inside_or_gone()
    }

    /// When the last byte was sent: `Err` while a marking connection still has bytes to send, `Ok(None)`
    /// for one that marks nothing. Registers for a wake-up while it is `Err`.
    pub(crate) fn poll_sent(&self, cx: &mut Context<'_>) -> Result<Option<Instant>, StillSending> {
        // Wakers are foreign code: cloned and dropped without the lock.
        let waker = cx.waker().clone();
        let mut state = self.lock();
        let old = match (state.adopted, state.sent_at) {
            (false, _) => return Ok(None),
            (true, Some(at)) => return Ok(Some(at)),
            (true, None) if off!(LastByte) => return Ok(None),
            (true, None) => state.waker.replace(waker),
        };
        drop(state);
        drop(old);
        Err(StillSending)
    }

    pub(crate) fn set_replaced(&self, fence: Fence) {
        self.lock().replaced = Some(Box::new(fence));
    }

    /// Notes on which generation the attempt runs, and when the connect to it began.
    ///
    /// What another connection marked before, which has handed the request back, says nothing of this one.
    /// `false` as for [`Activity::adopt`].
    pub(crate) fn on_generation(&self, generation: u64, connect_began: Instant, by: Giver) -> bool {
        let mut state = self.asked();
        // Another one, which has not come back.
        state.copied |= state.given.contains(&Some(by));
        if !state.may_begin() {
            return false;
        }
        self.count_going(&state);
        self.waiting.store(false, Ordering::Relaxed);
        state.generation = Some((generation, connect_began));
        (state.adopted, state.withdrawn, state.sent_at) = (false, false, None);
        match state.given.iter_mut().find(|given| given.is_none_or(|given| given == by)) {
            Some(given) => *given = Some(by),
            // Nested deeper than is kept track of.
            None => state.copied = true,
        }
        true
    }

    /// Asks whoever is to be asked before it goes to a connection, perhaps later than its service was called, or once more.
    #[inline(always)]
    fn asked(&self) -> MutexGuard<'_, ActivityState> {
        let state = self.lock();
        match self.is_waiting() || state.is_counted() || state.above.is_some() {
            true => self.asked_anew(state),
            false => state,
        }
    }

    #[cold]
    fn asked_anew<'a>(&'a self, state: MutexGuard<'a, ActivityState>) -> MutexGuard<'a, ActivityState> {
        if !self.is_waiting() && (!state.has_order() || off!(HandedBack)) {
            return state;
        }
        drop(state);
        self.ask_the_gates();
        self.lock()
    }

    /// It was let go; and what it is a part of goes with it.
    #[inline(always)]
    fn count_going(&self, state: &ActivityState) {
        match () {
            () if off!(WriteWait) => return,
            () if off!(HandedBack) => return,
            () => {}
        }
        // Under the lock.
        self.goings.store(self.goings().wrapping_add(1), Ordering::Relaxed);
        if let Some(above) = &state.above {
            above.count_going_inside();
        }
    }

    #[cold]
    fn count_going_inside(&self) {
        self.count_going(&self.lock());
    }

    /// How many times it went: after each one that its layer sees in a poll it looks whether it is the last still.
    pub(crate) fn goings(&self) -> u32 {
        self.goings.load(Ordering::Relaxed)
    }

    /// It goes on after its connection has held it back, if it still may. `false` as for [`Activity::adopt`].
    #[cfg(feature = "rmcp")]
    pub(crate) fn goes_on(&self) -> bool {
        if !self.is_waiting() {
            return true;
        }
        self.ask_the_gates();
        let mut state = self.lock();
        let goes_on = state.may_begin();
        if goes_on {
            self.count_going(&state);
        }
        self.waiting.store(!goes_on, Ordering::Relaxed);
        goes_on
    }

    /// The number of that generation.
    pub(crate) fn generation_number(&self) -> Option<u64> {
        self.generation().map(|(number, _)| number)
    }

    pub(crate) fn generation(&self) -> Option<(u64, Instant)> {
        self.lock().generation
    }

    fn lock(&self) -> MutexGuard<'_, ActivityState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ActivityState {
    /// Whether somebody may still begin with it; one that is over is withdrawn.
    fn may_begin(&mut self) -> bool {
        let over = (self.over || self.is_within_what_ended()) && !off!(AttemptTime);
        self.withdrawn |= over;
        !over
    }

    /// Whether a layer counts it when it goes, or is asked.
    #[inline]
    fn is_counted(&self) -> bool {
        self.order.is_some() || !self.gates.is_empty()
    }

    /// The same, or one counts what it is a part of.
    fn has_order(&self) -> bool {
        self.is_counted() || self.above.as_deref().is_some_and(|above| above.lock().has_order())
    }

    /// Whether a copy is with a layer further in, or has come back from there and may have been sent.
    fn is_inside_or_gone(&self) -> bool {
        self.taken_over > 0 || self.gone
    }

    #[inline]
    fn is_within_what_ended(&self) -> bool {
        self.above.as_deref().is_some_and(Activity::has_ended)
    }
}

/// A reconnect layer, or one that lets writes pass, by its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Giver(NonZeroUsize);

impl Giver {
    pub(crate) fn of<T>(shared: &Arc<T>) -> Self {
        Self(address(shared))
    }
}

/// Tells one from another, as long as both are there.
pub(crate) fn address<T>(shared: &Arc<T>) -> NonZeroUsize {
    Arc::as_ptr(shared).cast::<()>().addr().try_into().unwrap_or(NonZeroUsize::MIN)
}

/// A marking connection has not had the request's last byte accepted yet.
#[derive(Debug)]
pub(crate) struct StillSending;

/// The attempts of a call that layers below the one that replays it noted, for the report of a success
/// (a failure carries its own). Made only once a call needs a second attempt.
#[derive(Debug, Default)]
pub(crate) struct Trail(Mutex<TrailState>);

#[derive(Debug, Default)]
struct TrailState {
    attempts: Vec<Attempt>,
    answered_on: Option<u64>,
}

impl Trail {
    pub(crate) fn extend(&self, attempts: impl IntoIterator<Item = Attempt>) {
        self.lock().attempts.extend(attempts);
    }

    pub(crate) fn take(&self) -> Vec<Attempt> {
        mem::take(&mut self.lock().attempts)
    }

    /// Notes the generation on which the call was answered.
    pub(crate) fn answered_on(&self, generation: u64) {
        self.lock().answered_on = Some(generation);
    }

    /// The attempt that was answered.
    pub(crate) fn answer(&self) -> Attempt {
        Attempt::answered(self.lock().answered_on)
    }

    fn lock(&self) -> MutexGuard<'_, TrailState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// ===== impl Tagged =====

/// A foreign request with what the layers must know of it.
///
/// ```
/// use goaround::{Call, Effect, Tagged};
///
/// #[derive(Clone)]
/// struct Get(&'static str);
///
/// let call = Tagged::new(Get("/orders"), Effect::ReadOnly).named("GET /orders");
/// assert_eq!((call.method(), call.effect()), ("GET /orders", Effect::ReadOnly));
/// assert_eq!(call.into_inner().0, "/orders");
/// ```
pub struct Tagged<R> {
    request: R,
    clone: fn(&R) -> Option<R>,
    effect: Effect,
    method: Cow<'static, str>,
    context: CallContext,
}

impl<R: Clone> Tagged<R> {
    /// Tags a request with its effect.
    pub fn new(request: R, effect: Effect) -> Self {
        Self::with_clone(request, effect, |request| Some(request.clone()))
    }

    /// Tags a request with the effect that `effect` finds in it.
    pub fn by(request: R, effect: impl FnOnce(&R) -> Effect) -> Self {
        let effect = effect(&request);
        Self::new(request, effect)
    }
}

impl<R> Tagged<R> {
    /// Tags a request that can be sent only once, such as one with a streaming body. It is never replayed.
    pub fn once(request: R, effect: impl FnOnce(&R) -> Effect) -> Self {
        let effect = effect(&request);
        Self::with_clone(request, effect, |_| None)
    }

    fn with_clone(request: R, effect: Effect, clone: fn(&R) -> Option<R>) -> Self {
        // Whoever tags a request has said what it does.
        let context =
            CallContext { marks: Marks::default().stamped(effect, Basis::Caller), ..Default::default() };
        Self { request, clone, effect, method: Cow::Borrowed("call"), context }
    }

    /// Gives the call a name for errors and events, in place of `call`. It must not hold secrets.
    #[must_use]
    pub fn named(mut self, method: impl Into<Cow<'static, str>>) -> Self {
        self.method = method.into();
        self
    }

    /// The request.
    pub const fn get_ref(&self) -> &R {
        &self.request
    }

    /// The request, to be changed before it is sent: by
    /// [`KeyedWrites`](crate::write_safety::KeyedWrites), for one.
    pub const fn get_mut(&mut self) -> &mut R {
        &mut self.request
    }

    /// The request, and nothing of what was said of it.
    pub fn into_inner(self) -> R {
        self.request
    }
}

impl<R> Call for Tagged<R> {
    fn method(&self) -> &str {
        &self.method
    }

    fn name(&self) -> Cow<'static, str> {
        self.method.clone()
    }

    fn effect(&self) -> Effect {
        self.context.effect().unwrap_or(self.effect)
    }

    fn context(&self) -> &CallContext {
        &self.context
    }

    fn context_mut(&mut self) -> &mut CallContext {
        &mut self.context
    }

    #[inline(always)]
    fn try_clone(&self) -> Option<Self> {
        // First, since it is a call: the rest is read and written in one go.
        let request = (self.clone)(&self.request)?;
        let method = match &self.method {
            Cow::Borrowed(method) => Cow::Borrowed(*method),
            Cow::Owned(method) => Cow::Owned(method.clone()),
        };
        Some(Self {
            request,
            clone: self.clone,
            effect: self.effect,
            method,
            context: self.context.for_attempt(),
        })
    }

    #[inline(always)]
    fn replica(&self) -> Option<Self> {
        self.try_clone()
    }
}

impl<R> std::ops::Deref for Tagged<R> {
    type Target = R;

    fn deref(&self) -> &R {
        &self.request
    }
}

impl<R> fmt::Debug for Tagged<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the request: its arguments do not belong in a log.
        f.debug_struct("Tagged")
            .field("method", &self.method)
            .field("effect", &Call::effect(self))
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clone_of_a_context_is_a_new_call_and_a_replica_the_same_one() {
        let mut call = Tagged::new(1, Effect::Write).within(Duration::from_secs(1));
        let id = call.context_mut().assign_id();
        assert_eq!(call.context_mut().assign_id(), id);
        assert_eq!(call.context().clone().id(), None);
        assert_eq!(call.context().clone().deadline(), call.context().deadline());
        assert_eq!(replica(&call).unwrap().context().id(), Some(id));
        let mut other = Tagged::new(1, Effect::Write);
        assert_ne!(other.context_mut().assign_id(), id);
    }

    #[test]
    fn an_idle_limit_is_one_for_all_attempts_of_a_call_and_another_calls_own() {
        let call = Tagged::new(1, Effect::Write).idle(Duration::from_secs(1)).pause_while_asking();
        let progress = call.context().progress().unwrap();
        assert!(Arc::ptr_eq(progress, replica(&call).unwrap().context().progress().unwrap()));
        let other = call.context().clone();
        let other = other.progress().unwrap();
        assert!(!Arc::ptr_eq(progress, other));
        for progress in [progress, other] {
            assert_eq!(progress.idle(), Some(Duration::from_secs(1)));
            assert!(progress.pauses_while_asking());
        }
        assert!(Tagged::new(1, Effect::Write).context().progress().is_none());
        assert_eq!(size_of::<Until>(), size_of::<Deadline>() + 8);
    }

    #[test]
    fn what_can_be_sent_only_once_has_no_replica() {
        assert!(replica(&Tagged::once(1, |_| Effect::ReadOnly)).is_none());
    }

    #[test]
    fn what_one_connection_marked_says_nothing_of_the_next_hand_over() {
        // By a connection that marks, and by one that a reconnect layer knows and that marks nothing.
        let giver = Giver::of(&Arc::new(0));
        let given: &dyn Fn(&Activity) -> bool = &|activity| activity.on_generation(2, Instant::now(), giver);
        for next in [&Activity::adopt, given] {
            let activity = Activity::default();
            assert!(activity.adopt());
            activity.withdrawn();
            assert!(activity.was_withdrawn());
            assert!(next(&activity));
            assert!(!activity.was_withdrawn());

            // It comes back.
            activity.withdrawn();
            activity.given_back(giver);
            activity.close();
            assert!(!next(&activity));
            assert!(activity.was_withdrawn());
        }
    }

    #[test]
    fn a_copy_that_was_not_sent_says_nothing_of_one_that_has_not_come_back() {
        let layers = [Arc::new(0), Arc::new(0)];
        let [outer, inner] = layers.each_ref().map(Giver::of);
        let given = |activity: &Activity, by| assert!(activity.on_generation(1, Instant::now(), by));
        // Of nested layers each gives the one copy that there is.
        let activity = Activity::default();
        given(&activity, outer);
        activity.never_given(inner);
        assert!(activity.was_withdrawn() && !activity.was_copied());

        type Second<'a> = &'a dyn Fn(&Activity);
        let seconds: [Second<'_>; 3] =
            [&|activity| given(activity, outer), &|activity| activity.not_sent(outer), &|activity| {
                activity.never_given(outer)
            }];
        for second in seconds {
            let activity = Activity::default();
            given(&activity, outer);
            second(&activity);
            activity.withdrawn();
            assert!(activity.was_copied() && !activity.was_withdrawn());
        }

        let activity = Activity::default();
        assert!(activity.adopt() && activity.adopt());
        activity.withdrawn();
        assert!(activity.was_copied() && !activity.was_withdrawn());
    }

    #[test]
    fn a_part_of_an_attempt_is_over_with_it_and_nobody_begins_with_one() {
        let (outer, middle, inner) =
            (Arc::new(Activity::default()), Arc::new(Activity::default()), Activity::default());
        middle.is_within(&outer);
        inner.is_within(&middle);
        let layer = Arc::new(0);
        assert!(inner.adopt() && inner.on_generation(1, Instant::now(), Giver::of(&layer)));
        inner.given_back(Giver::of(&layer));
        // Its time is up, and it is still waited for: what is begun inside may go on.
        outer.close();
        assert!(inner.on_generation(2, Instant::now(), Giver::of(&layer)) && middle.take_over());
        inner.given_back(Giver::of(&layer));
        middle.give_the_report_back(false, true);
        assert!(!outer.take_over());
        outer.end();
        assert!(!inner.on_generation(2, Instant::now(), Giver::of(&layer)) && inner.was_withdrawn());
        assert!(!middle.take_over() && middle.was_withdrawn());
        assert!(!inner.adopt());
    }

    #[derive(Debug)]
    struct Door(AtomicBool);

    impl Gate for Door {
        fn opens(&self) -> bool {
            self.0.load(Ordering::Relaxed)
        }

        fn stays_open(&self) -> bool {
            self.opens()
        }
    }

    #[test]
    fn what_waits_goes_if_the_gates_of_all_layers_open() {
        for shut in [None, Some(0), Some(1), Some(2)] {
            let (outer, inner) = (Arc::new(Activity::default()), Activity::default());
            inner.is_within(&outer);
            inner.waits();
            assert!(inner.is_waiting() && outer.is_waiting());
            let doors = [0, 1, 2].map(|n| Arc::new(Door(AtomicBool::new(Some(n) != shut))));
            outer.set_gate(Arc::<Door>::clone(&doors[0]));
            inner.set_gate(Arc::<Door>::clone(&doors[1]));
            inner.set_gate(Arc::<Door>::clone(&doors[2]));
            let layer = Arc::new(0);
            assert_eq!(inner.on_generation(1, Instant::now(), Giver::of(&layer)), shut.is_none());
            assert_eq!((inner.has_ended(), outer.has_ended()), (shut.is_some(), shut == Some(0)));
        }
        let activity = Activity::default();
        let doors = [true, false].map(|opens| Arc::new(Door(AtomicBool::new(opens))));
        doors.iter().for_each(|door| activity.set_gate(Arc::<Door>::clone(door)));
        activity.remove_gate(&doors[1]);
        activity.waits();
        assert!(
            activity.on_generation(1, Instant::now(), Giver::of(&Arc::new(0))) && activity.is_asked_again()
        );
    }

    #[test]
    fn a_copy_that_a_layer_further_in_had_and_did_not_give_back_unsent_was_sent() {
        let activity = Activity::default();
        // Handed back, and over again: there is one of it.
        for _ in 0..2 {
            assert!(activity.take_over());
            activity.give_the_report_back(false, true);
            activity.withdrawn();
            assert!(activity.was_withdrawn() && !activity.was_copied() && !activity.was_told());
        }
        assert!(activity.take_over());
        activity.give_the_report_back(true, false);
        assert!(activity.has_gone() && !activity.was_withdrawn());
        // Once it was told that it is in doubt, nobody tells that again.
        assert!(!activity.tells());
        assert!(activity.take_over() && activity.was_copied());
        let two = Activity::default();
        assert!(two.take_over() && two.take_over() && two.was_copied());
    }

    #[test]
    fn a_copy_that_was_turned_away_says_nothing_of_one_that_was_let_through_and_has_not_come_back() {
        let layers = [Arc::new(0), Arc::new(0)];
        let [outer, inner] = layers.each_ref().map(Giver::of);
        let activity = Activity::default();
        activity.passes(outer);
        activity.passes(inner);
        activity.given_back(inner);
        // Let through by the one further out, which is the same copy.
        activity.turned_away(inner);
        assert!(activity.was_withdrawn() && !activity.was_copied());
        activity.turned_away(outer);
        assert!(activity.was_copied() && !activity.was_withdrawn());

        let activity = Activity::default();
        assert!(activity.take_over());
        activity.turned_away(inner);
        assert!(activity.was_copied() && !activity.was_withdrawn());
    }

    #[test]
    fn of_layers_within_each_other_one_tells_of_a_doubt() {
        let nested = || {
            let (outer, inner) = (Activity::guarded(guard()), Activity::guarded(guard()));
            inner.is_within(&outer);
            (outer, inner)
        };
        // The innermost, of which the others learn at once; or the outermost, and what lives on further in is silent.
        let (outer, inner) = nested();
        assert!(inner.lets_tell() && !inner.tells() && !outer.tells() && !outer.lets_tell());
        let (outer, inner) = nested();
        assert!(outer.tells() && !inner.lets_tell() && !inner.tells());
        let (outer, inner) = nested();
        assert!(inner.tells() && outer.lets_tell() && !inner.lets_tell() && !outer.tells());
    }

    fn guard() -> Guard {
        Guard { ledger: NonZeroUsize::MIN, key: None, claims: false }
    }

    #[test]
    fn a_wait_that_ends_at_the_deadline_does_not_fit() {
        let now = Instant::now();
        let deadline = Deadline::after(now, Duration::from_secs(1));
        assert!(deadline.allows(now, Duration::from_millis(999)));
        assert!(!deadline.allows(now, Duration::from_secs(1)));
        assert!(!deadline.allows(now, Duration::MAX));
        assert!(Deadline::Never.allows(now, Duration::from_secs(1 << 20)));
        // It would not end.
        assert!(!Deadline::Never.allows(now, Duration::MAX));
        assert!(!Deadline::Never.allows(now, crate::deadline::later(now, Duration::MAX) - now));
    }

    #[test]
    fn a_stamp_wins_over_the_tag() {
        let call = Tagged::new(1, Effect::Write).read_only();
        assert_eq!((effect_of(&call), call.context().basis()), (Effect::ReadOnly, Basis::Caller));
    }

    #[test]
    fn what_a_request_is_tagged_with_is_the_callers_word() {
        let made = [
            Tagged::new(1, Effect::Idempotent),
            Tagged::by(1, |_| Effect::Idempotent),
            Tagged::once(1, |_| Effect::Idempotent),
        ];
        for call in made {
            assert_eq!((effect_of(&call), call.context().basis()), (Effect::Idempotent, Basis::Caller));
        }
    }
}
