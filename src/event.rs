//! What the layers report: every call that needed more than one attempt, every closure, every recovery,
//! every write in doubt.
//!
//! An event holds no token, header value, session id, argument or result. All of them serialize, and go to
//! [`tracing`] (target `goaround`) too, whether or not somebody asked for them by `on_event`. Two fields hold
//! what others wrote: [`Incident::stderr`], where a server may say anything, and [`DoubtReport::reason`] with
//! the words of the caller's check. They have no time of their own: an event is emitted when it happens,
//! except for an [`Incident`].

use std::{
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
    time::Duration,
};

use serde::Serialize;

use crate::{
    Attempt, Basis, CallContext, CallError, CallId, Effect, Outcome, Progress,
    call::{CallIds, Trail},
    write_safety::{Fence, VerdictKind},
};

/// Something that an operator may want to know. By reference: keep what you need.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(tag = "event", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Event<'a> {
    /// A call with more than one attempt has ended, with a success or not. A connection that was found dead
    /// before anything was sent counts as an attempt; that a call waited for a connection does not. Emitted
    /// once, for the outermost layer of this crate that the call passed. A call that failed at its only attempt
    /// says so to its caller alone.
    Call(&'a CallReport),
    /// A connection closed. Emitted when the connect that followed it has ended, so that it can say what was
    /// there before and after: with the next call, or at the shutdown. It may so come after the
    /// [`InDoubt`](Event::InDoubt) of a write that the same closure put in doubt, and after the write's error. A first
    /// connect that fails is not an incident but the error of the calls that waited for it.
    Incident(&'a Incident),
    /// A read succeeded on the connection that followed a closure.
    Recovery(&'a Recovery),
    /// A write that was in doubt has been settled or given up. Emitted once per write, when its ledger has
    /// recorded that; where that takes longer than the call's deadline or 5 seconds, without it.
    InDoubt(&'a DoubtReport),
    /// A write was given up by its caller after it was handed over: its future was dropped, by choice, by a
    /// panic or by a shutdown. Nobody but this event says so. Its outcome is unknown, or what the server had
    /// answered, where the caller went away only while a ledger recorded that.
    Abandoned(&'a CallReport),
    /// The answer to an attempt that somebody had given up arrived.
    LateAnswer(&'a LateAnswer),
}

/// How a call went.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct CallReport {
    /// The call.
    pub call: Option<CallId>,
    /// Its method.
    pub method: String,
    /// What it may do.
    pub effect: Effect,
    /// Who said so.
    pub basis: Basis,
    /// Its attempts, in their order.
    pub attempts: Vec<Attempt>,
    /// What is known of a call that failed; `None` for a success, since an [`Outcome`] is what an error knows. As
    /// JSON that is `null`.
    pub outcome: Option<Outcome>,
    /// What the layers noted, such as why a retry was suppressed.
    pub notes: Vec<String>,
}

/// How a connection ended.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Incident {
    /// The method of the call that learnt of it; empty where the connection itself did, or, of calls after the
    /// first, where its errors do not name them.
    pub method: String,
    /// What that call may have done.
    pub effect: Option<Effect>,
    /// The error that came with it.
    pub error: String,
    /// The number of the connection that closed.
    pub generation: u64,
    /// How many calls were in flight, where the connection counts them.
    pub in_flight: usize,
    /// Who was there before.
    pub before: Option<Peer>,
    /// Who is there now; `None` if no connection could be made.
    pub after: Option<Peer>,
    /// Whether the server's process was started again.
    pub process_restarted: bool,
    /// Whether the old process was still there when the next one was started, so that no fence holds.
    pub overlap: bool,
    /// How the process ended, in the words of the operating system.
    pub exit: Option<String>,
    /// The last lines that the process wrote to its standard error.
    pub stderr: Vec<String>,
}

/// What a server says of itself, and we of us, in the handshake.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Peer {
    /// The server's name and version.
    pub server: Option<Implementation>,
    /// The client's name and version.
    pub client: Option<Implementation>,
    /// The protocol version agreed upon.
    pub protocol: Option<String>,
}

/// A program's name and version.
#[derive(Clone, Debug, PartialEq, Eq, serde::Deserialize, Serialize)]
#[non_exhaustive]
pub struct Implementation {
    /// The name.
    pub name: String,
    /// The version.
    pub version: String,
}

impl Implementation {
    /// That name and version.
    pub fn new(name: impl Into<String>, version: impl Into<String>) -> Self {
        Self { name: name.into(), version: version.into() }
    }
}

/// A connection works again.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Recovery {
    /// The number of the new connection.
    pub generation: u64,
    /// How long it took from the closure's discovery to the new connection.
    pub reconnect: Duration,
    /// How long it took from the closure's discovery to the read that proved the recovery.
    pub took: Duration,
    /// The read that proved it; `ping` where an MCP connection's own was quicker.
    pub proved_by: String,
}

/// How the doubt about a write went.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct DoubtReport {
    /// The call.
    pub call: CallId,
    /// Its method.
    pub method: String,
    /// What it may do.
    pub effect: Effect,
    /// Who said so.
    pub basis: Basis,
    /// Its attempts, in their order.
    pub attempts: Vec<Attempt>,
    /// What ended the doubt; `None` where no check came to a verdict.
    pub verdict: Option<VerdictKind>,
    /// Why, in words.
    pub reason: Option<String>,
    /// By what fence the earlier attempt cannot land any more.
    pub fence: Option<Fence>,
    /// Whether the call was handed over a second time.
    pub replayed: bool,
    /// What is known of a write that got no answer, or an error; `None` for a success: it was answered late, its replay
    /// was, or the check or [`landed_with`](crate::WriteSafetyLayer::landed_with) gave its response. As JSON that is
    /// `null`.
    pub outcome: Option<Outcome>,
}

/// A late success.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct LateAnswer {
    /// The call.
    pub call: Option<CallId>,
    /// Its method.
    pub method: String,
    /// The fence that had said that this attempt cannot land. It does not hold: whatever it rests on is not
    /// true, and the write may have been applied twice. If it [`may_be_error`](Self::may_be_error), only perhaps.
    pub violated: Option<Fence>,
    /// Whether it may be an error all the same: of an answer above the limit of a line only the start was read, and its
    /// `result` may be the `null` that some servers write beside an error. An error that is known to be one is no late
    /// success, whatever its size.
    pub may_be_error: bool,
}

type Sink = dyn Fn(Event<'_>) + Send + Sync;

/// Where a layer's events go: to the caller's function, if there is one, and to `tracing`. In a call's context it
/// also holds what else few calls have, so that all the others carry one empty pointer.
///
/// A clone has a reference count of its own, so that calls over clones do not contend for one, but for those of an
/// [inner](Self::inner) layer; `share` is for what belongs to one call.
#[derive(Default)]
pub(crate) struct Events(Option<Arc<Carried>>);

#[derive(Clone, Default)]
struct Carried {
    sink: Option<Arc<Sink>>,
    trail: Option<Arc<Trail>>,
    progress: Option<Arc<Progress>>,
    /// Whether clones are one and the same.
    inner: bool,
}

impl Events {
    pub(crate) fn to(sink: impl Fn(Event<'_>) + Send + Sync + 'static) -> Self {
        Self(Some(Arc::new(Carried { sink: Some(Arc::new(sink)), ..Carried::default() })))
    }

    /// No sink, and that progress.
    pub(crate) fn with_progress(progress: Arc<Progress>) -> Self {
        Self(Some(Arc::new(Carried { progress: Some(progress), ..Carried::default() })))
    }

    /// The same for a layer inside of another that has these: its calls come with that one's, and do not count its
    /// own, so that a clone need not allocate.
    pub(crate) fn inner(&self) -> Self {
        let sink = self.0.as_ref().and_then(|carried| carried.sink.clone());
        Self(sink.map(|sink| Arc::new(Carried { sink: Some(sink), inner: true, ..Carried::default() })))
    }

    #[inline]
    pub(crate) fn share(&self) -> Self {
        Self(self.0.clone())
    }

    #[inline]
    pub(crate) fn is_set(&self) -> bool {
        self.0.as_ref().is_some_and(|carried| carried.sink.is_some())
    }

    #[inline]
    pub(crate) fn trail(&self) -> Option<&Arc<Trail>> {
        self.0.as_ref()?.trail.as_ref()
    }

    #[inline]
    pub(crate) fn progress(&self) -> Option<&Arc<Progress>> {
        self.0.as_ref()?.progress.as_ref()
    }

    /// Takes over another's sink.
    #[inline]
    fn go_to(&mut self, other: &Self) {
        match &self.0 {
            None => *self = other.share(),
            Some(_) => self.change(|carried| carried.sink = other.0.as_ref().and_then(|it| it.sink.clone())),
        }
    }

    pub(crate) fn set_trail(&mut self, trail: Arc<Trail>) {
        self.change(|carried| carried.trail = Some(trail));
    }

    pub(crate) fn set_progress(&mut self, progress: Arc<Progress>) {
        self.change(|carried| carried.progress = Some(progress));
    }

    #[cold]
    fn change(&mut self, change: impl FnOnce(&mut Carried)) {
        let mut carried = self.0.as_deref().cloned().unwrap_or_default();
        change(&mut carried);
        self.0 = Some(Arc::new(carried));
    }

    /// A sink that panics harms nobody: events are also emitted from destructors, where a second panic
    /// would abort, and while others wait to be woken.
    pub(crate) fn emit(&self, event: Event<'_>) {
        let _ = catch_unwind(AssertUnwindSafe(|| trace(event)));
        if let Some(sink) = self.0.as_ref().and_then(|carried| carried.sink.as_ref()) {
            let _ = catch_unwind(AssertUnwindSafe(|| sink(event)));
        }
    }

    /// Reports a failed call, if there is something to report: more than one attempt, or that a call may have done
    /// something which was taken for a read by its server's word.
    pub(crate) fn failed(&self, basis: Basis, error: &CallError) {
        if let (true, Some(call)) = (error.is_unreported(), error.call()) {
            self.emit(Event::InDoubt(&DoubtReport {
                call,
                method: error.method().to_owned(),
                effect: error.effect(),
                basis: error.basis(),
                attempts: error.attempts().to_vec(),
                verdict: None,
                reason: Some("its server no longer says that it only reads".to_owned()),
                fence: None,
                replayed: false,
                outcome: Some(error.outcome()),
            }));
        }
        if error.attempts().len() < 2 {
            return;
        }
        self.emit(Event::Call(&CallReport {
            call: error.call(),
            method: error.method().to_owned(),
            effect: error.effect(),
            // The layer that reports may be outside of the one that judged the call.
            basis: match error.basis() {
                Basis::Default => basis,
                judged => judged,
            },
            attempts: error.attempts().to_vec(),
            outcome: Some(error.outcome()),
            notes: error.notes().map(str::to_owned).collect(),
        }));
    }
}

/// Notes in a call's context that a layer has it: says whether that layer is the outermost, which names the
/// call, whose `on_event` the layers below use too, and which reports a failure.
#[inline(always)]
pub(crate) fn enter(context: &mut CallContext, ids: &mut CallIds, events: &Events) -> bool {
    if context.is_entered() {
        return false;
    }
    context.set_entered(true);
    context.identify(ids);
    if events.is_set() {
        context.events.go_to(events);
    }
    true
}

/// What a layer keeps of a call that it gives away, to name its failure and, if it is the outermost, report it.
#[derive(Debug)]
pub(crate) struct Report {
    call: Option<CallId>,
    basis: Basis,
    outermost: bool,
    events: Events,
}

impl Report {
    #[inline]
    pub(crate) fn of(context: &CallContext, outermost: bool) -> Self {
        let events = if outermost { context.events.share() } else { Events::default() };
        Self { call: context.id(), basis: context.basis(), outermost, events }
    }

    /// What its attempt's error says of the call.
    pub(crate) fn ended(&self, error: CallError, method: &str, effect: Effect) -> CallError {
        error.of_attempt(self.call, method, effect)
    }

    /// Reports the failure where that is due.
    pub(crate) fn failed(&self, error: CallError) -> CallError {
        if self.outermost {
            self.events.failed(self.basis, &error);
        }
        error
    }
}

impl Clone for Events {
    fn clone(&self) -> Self {
        if self.0.as_ref().is_some_and(|carried| carried.inner) {
            return self.share();
        }
        let sink = self.0.as_ref().and_then(|carried| carried.sink.clone());
        Self(sink.map(|sink| Arc::new(Carried { sink: Some(sink), ..Carried::default() })))
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "Events(..)" } else { "Events(tracing)" })
    }
}

fn trace(event: Event<'_>) {
    match event {
        Event::Call(r) if r.outcome.is_none() => {
            tracing::info!(target: "goaround", method = %r.method, attempts = r.attempts.len(), "call answered");
        }
        Event::Call(r) => {
            tracing::warn!(target: "goaround", method = %r.method, attempts = r.attempts.len(), outcome = ?r.outcome, "call failed");
        }
        Event::Incident(r) => {
            tracing::warn!(target: "goaround", generation = r.generation, error = %r.error, in_flight = r.in_flight, exit = r.exit, "connection closed");
        }
        Event::Recovery(r) => {
            tracing::info!(target: "goaround", generation = r.generation, took = ?r.took, proved_by = %r.proved_by, "recovered");
        }
        Event::InDoubt(r) => {
            tracing::warn!(target: "goaround", call = %r.call, method = %r.method, verdict = ?r.verdict, replayed = r.replayed, outcome = ?r.outcome, "write in doubt");
        }
        Event::Abandoned(r) => {
            tracing::warn!(target: "goaround", method = %r.method, "write abandoned by its caller after it was handed over");
        }
        Event::LateAnswer(r) => match &r.violated {
            Some(fence) if r.may_be_error => {
                tracing::error!(target: "goaround", method = %r.method, %fence, "fence perhaps violated: a replaced attempt was answered, and its answer cannot be read");
            }
            Some(fence) => {
                tracing::error!(target: "goaround", method = %r.method, %fence, "fence violated: a replaced attempt succeeded");
            }
            None => tracing::info!(target: "goaround", method = %r.method, "late answer"),
        },
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    fn are_one(one: &Events, other: &Events) -> bool {
        one.0.as_ref().zip(other.0.as_ref()).is_some_and(|(one, other)| Arc::ptr_eq(one, other))
    }

    #[test]
    fn clones_count_for_themselves_but_for_those_of_an_inner_layer() {
        let seen = Arc::new(AtomicU32::new(0));
        let events = Events::to({
            let seen = Arc::clone(&seen);
            move |_| _ = seen.fetch_add(1, Ordering::Relaxed)
        });
        let inner = events.inner();
        assert!(!are_one(&events, &events.clone()));
        assert!(!are_one(&events, &inner));
        assert!(are_one(&inner, &inner.clone()));
        let late = LateAnswer { call: None, method: "put".into(), violated: None, may_be_error: false };
        for events in [events.clone(), inner.clone(), inner] {
            events.emit(Event::LateAnswer(&late));
        }
        assert_eq!(seen.load(Ordering::Relaxed), 3);
        assert!(Events::default().inner().0.is_none());
    }
}
