//! The one error type of the stack: [`CallError`] says apart from each other what happened and what is
//! known, over all [`Attempt`]s.

use std::{
    any::Any,
    borrow::Cow,
    error::Error as StdError,
    fmt,
    future::Future,
    io, iter,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::{Pin, pin},
    process::ExitStatus,
    sync::{Arc, Mutex, OnceLock, PoisonError},
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use serde::Serialize;

use crate::{
    Basis, BoxError, Call, CallId, Cause, Delivery, Effect, Evidence, Refusal, Scope,
    connection::discard,
    deadline::once_more,
    delivery::ConnectError,
    places::{Place, Places},
    wakers::wake_all,
    write_safety::{Fence, FenceBasis},
};

type BoxFuture<T> = Pin<Box<dyn Future<Output = T> + Send>>;

/// What is known about a failed call, over all attempts that no verdict has settled.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Outcome {
    /// Nothing was done, and nothing will be.
    NotDone,
    /// A read-only call without an answer. It is safe to repeat.
    NoAnswer,
    /// A write of which nobody knows whether it was done.
    Unknown,
    /// The write was done, and its result is lost.
    DoneResultLost,
    /// The server answered: with an error, or with what cannot be read.
    Answered,
}

/// How a call failed: [`cause`](CallError::cause) says what happened, [`outcome`](CallError::outcome) what
/// is known.
///
/// Its text begins with what is known ("outcome UNKNOWN: …", "DONE, result lost: …", "no answer: …", "not
/// done: …", "answered: …"), because people and models act on it. Of a server's own error the message is in
/// it, of an [`io::Error`] what the operating system says. Texts of other foreign errors are not, since they
/// may hold secrets; they are in [`source`](StdError::source). Of an unknown call of which nobody had said what it
/// does ([`Basis::Default`]) it says that too: a read that somebody forgot to declare looks like that.
///
/// A service that is not of this crate makes its errors known by tower's `map_err` and one of the
/// constructors; what none of them classified is [`CallError::ambiguous`].
///
/// # Errors of other calls
///
/// An error is about one [call](CallError::call). A service between or below the layers may make other calls, for a
/// receipt or a permit, and pass their errors on by `?`: that a permit was not asked for does not say that the write
/// was not sent. A layer that gets an error about another call than its own takes it for one of a foreign service:
/// ambiguous, with scope `Call`, and this call's effect (but never safe to repeat if the other may have landed). Its
/// outcome, attempts, closure and `retry_after` play no part; the error itself is the [source](StdError::source), to be
/// had by [`get_ref::<CallError>`](CallError::get_ref) or [`downcast`](CallError::downcast). A service that knows
/// better makes an error of its own.
///
/// - What belongs to a call is told by its [context](crate::CallContext), which a [clone](crate::CallContext#clones)
///   does not inherit: of a request that was sent on as a new call, an error is about another call. A service that
///   makes a request anew moves the context into it.
/// - An error that names no call is the word of the service that returns it: one of the constructors' here, and one of
///   this crate's connections where no layer is around them. Who calls such a connection for something else says
///   himself what its failure means.
/// - That a layer was not ready (an error of its `poll_ready`) says nothing of a call if it comes up as a call's end:
///   by then nobody knows for whom it was asked.
///
/// # Example
///
/// ```
/// use goaround::{CallError, Outcome};
///
/// let error = CallError::ambiguous(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
/// assert_eq!(error.outcome(), Outcome::Unknown); // a write, as long as nobody says otherwise
/// assert!(error.may_have_landed() && !error.is_safe_to_repeat());
/// assert!(error.get_ref::<std::io::Error>().is_some()); // what it was made of
/// ```
pub struct CallError(Box<Inner>);

struct Inner {
    call: Option<CallId>,
    /// Whether it says that a service was not ready, and of no call in particular.
    of_readiness: bool,
    cause: Cause,
    scope: Scope,
    /// `None`: by the cause's evidence and the effect.
    delivery: Option<Delivery>,
    effect: Option<Effect>,
    basis: Option<Basis>,
    method: Cow<'static, str>,
    attempts: Vec<Attempt>,
    retry_after: Option<Duration>,
    notes: Vec<Cow<'static, str>>,
    source: Option<BoxError>,
    /// How the connection ended, where the cause does not say.
    closure: Option<Closure>,
    /// What several calls have lost together, on a connection that lives on.
    loss: Option<Closure>,
    /// Whether the server has taken back the word by which the call was taken for a read.
    misjudged: bool,
    /// Whether a layer that answers for writes has reported what became of it.
    reported: bool,
    /// Whether a layer further in has attempted it more than once, or somebody else has: then nobody hands it over anew.
    repeated: bool,
    /// The request, where nothing of it was sent. Behind a lock for `Sync` alone.
    request: Mutex<Option<Box<dyn Any + Send>>>,
}

impl CallError {
    /// Provably not one byte of the request was given to the transport.
    pub fn not_sent(error: impl Into<BoxError>) -> Self {
        Self::foreign(Delivery::NotSent, error)
    }

    /// The peer or its library refused the request before the application saw it.
    pub fn not_processed(error: impl Into<BoxError>) -> Self {
        Self::foreign(Delivery::NotProcessed, error)
    }

    /// The request may or may not have been processed.
    pub fn ambiguous(error: impl Into<BoxError>) -> Self {
        Self::foreign(Delivery::Ambiguous, error)
    }

    /// The connection closed under the request: ambiguous, and the connection is gone for all.
    pub fn closed(error: impl Into<BoxError>) -> Self {
        let closure = Closure::new("the connection closed");
        Self::new(Cause::Closed(closure), Scope::Connection, Some(Delivery::Ambiguous)).caused_by(error)
    }

    /// The application answered with an error of its own.
    pub fn answered(error: impl Into<BoxError>) -> Self {
        Self::foreign(Delivery::Answered, error)
    }

    /// The peer refused the request, as far as that evidence goes.
    pub fn evidence(evidence: Evidence, error: impl Into<BoxError>) -> Self {
        Self::of_evidence(evidence).caused_by(error)
    }

    /// The error in the box: a `CallError` is found and kept, also one further down the chain of sources;
    /// anything else is ambiguous. It stays an error of [its call](CallError#errors-of-other-calls).
    pub fn from_boxed(error: BoxError) -> Self {
        let error = match error.downcast::<CallError>() {
            Ok(own) => return *own,
            Err(error) => error,
        };
        let mut next: Option<&(dyn StdError + 'static)> = error.source();
        while let Some(source) = next {
            if let Some(own) = source.downcast_ref::<CallError>() {
                return own.facts().caused_by(error);
            }
            next = source.source();
        }
        Self::ambiguous(error)
    }

    /// Says that the connection is gone for all requests, not only for this one.
    #[must_use]
    pub fn connection_lost(mut self) -> Self {
        self.0.scope = Scope::Connection;
        self
    }

    /// Says how long the peer asks to wait before a repetition (`Retry-After`, RFC 9110 section 10.2.3). A pause that
    /// outlasts the call's deadline, or ten years where it has none, is not waited for.
    #[must_use]
    pub fn after(mut self, wait: Duration) -> Self {
        self.0.retry_after = Some(wait);
        self
    }

    /// Adds to a [`closed`](CallError::closed) error a future that resolves when the server's process has
    /// ended; see [`Closure::exited`]. One that panics says nothing. No effect on other errors.
    ///
    /// It is the end of the process that this call's attempt went to. A connection gives it to the error of each call
    /// that it takes down: it may have several processes, so that the exit that comes with one call's error is no
    /// fence for another call.
    #[must_use]
    pub fn with_exit(mut self, exit: impl Future<Output = Exit> + Send + 'static) -> Self {
        if let Cause::Closed(closure) = &self.0.cause {
            let Closure(of) = closure;
            let exit: BoxFuture<Exit> = Box::pin(exit);
            let own = Closure::with(of.reason.clone(), of.in_flight, of.ends_effects, Some(exit));
            self.0.cause = Cause::Closed(own);
        }
        self
    }

    /// Adds to a [`closed`](CallError::closed) error the declaration that the effects of the server's process
    /// end with it, so that its [exit](CallError::with_exit) is a fence. No effect on other errors.
    #[must_use]
    pub fn exit_ends_effects(mut self) -> Self {
        if let Cause::Closed(closure) = &mut self.0.cause
            && let Some(closure) = Arc::get_mut(&mut closure.0)
        {
            closure.ends_effects = true;
        }
        self
    }

    /// What happened: the end of the last attempt, or why there was none.
    pub fn cause(&self) -> &Cause {
        &self.0.cause
    }

    /// Whom the last attempt's end concerned.
    pub fn scope(&self) -> Scope {
        self.0.scope
    }

    /// What is known about the last attempt alone. See [`CallError::outcome`] for the whole call.
    pub fn delivery(&self) -> Delivery {
        match (self.0.delivery, &self.0.cause) {
            (Some(delivery), _) => delivery,
            (None, Cause::Evidence(evidence)) => evidence.delivery(self.effect()),
            (None, _) => Delivery::Ambiguous,
        }
    }

    /// What the call may have done at the server; [`Effect::Write`] while no layer has said otherwise.
    pub fn effect(&self) -> Effect {
        self.0.effect.unwrap_or(Effect::Write)
    }

    /// Who said so; [`Basis::Default`] while no layer has said otherwise.
    pub fn basis(&self) -> Basis {
        self.0.basis.unwrap_or_default()
    }

    /// What is known about the call, over all attempts that no verdict has settled: if one attempt of a
    /// write is ambiguous, it is [`Outcome::Unknown`], also when a later attempt failed harmlessly.
    pub fn outcome(&self) -> Outcome {
        if self.0.attempts.iter().any(|attempt| attempt.settled == Some(Settled::Landed)) {
            return Outcome::DoneResultLost;
        }
        if self.delivery() == Delivery::Answered {
            return Outcome::Answered;
        }
        if off!(Precedence) && self.delivery() != Delivery::Ambiguous {
            return Outcome::NotDone;
        }
        match (self.is_in_doubt(), self.may_be_a_write()) {
            (false, _) => Outcome::NotDone,
            (true, false) => Outcome::NoAnswer,
            (true, true) => Outcome::Unknown,
        }
    }

    /// Whether the call was a write that may have been done, though this is an error. Also true of a server's
    /// own error if an earlier attempt may be the reason for it ("already exists"), even one that a declared
    /// fence had settled, and of an answer that was too large or of another kind, so that nobody has read it.
    pub fn may_have_landed(&self) -> bool {
        self.may_be_a_write()
            && match self.outcome() {
                Outcome::Unknown | Outcome::DoneResultLost => true,
                Outcome::Answered => {
                    self.is_unread() || self.0.attempts.iter().any(Attempt::may_show_in_an_answer)
                }
                Outcome::NotDone | Outcome::NoAnswer => false,
            }
    }

    /// Whether the call is a write, or was taken for a read by a word that the server has taken back.
    fn may_be_a_write(&self) -> bool {
        self.effect().is_write() || self.is_of_changed_effect()
    }

    /// Whether it was taken for a write since a layer had asked, and nobody had said what it is.
    fn is_write_by_default(&self) -> bool {
        self.0.basis == Some(Basis::Default)
            && self.effect().is_write()
            && !self.0.misjudged
            && !self.is_of_changed_effect()
    }

    /// Whether the server answered and nobody knows what.
    fn is_unread(&self) -> bool {
        matches!(self.0.cause, Cause::AnswerTooLarge { .. } | Cause::AnswerUnread)
    }

    /// Whether repeating the call cannot do harm: nothing was done, or it is read-only and has no answer.
    pub fn is_safe_to_repeat(&self) -> bool {
        matches!(self.outcome(), Outcome::NotDone | Outcome::NoAnswer)
    }

    /// The attempts, in their order.
    pub fn attempts(&self) -> &[Attempt] {
        &self.0.attempts
    }

    /// How long the peer, or the backoff between connects, asks to wait before a repetition.
    pub fn retry_after(&self) -> Option<Duration> {
        self.0.retry_after
    }

    /// The server's own error, unchanged.
    pub fn answer(&self) -> Option<&ServerError> {
        match &self.0.cause {
            Cause::Answered(error) => Some(error),
            _ => None,
        }
    }

    /// How the connection ended, if that is what ended the last attempt.
    pub fn closure(&self) -> Option<&Closure> {
        match &self.0.cause {
            Cause::Closed(closure) => Some(closure),
            _ => self.0.closure.as_ref(),
        }
    }

    /// Which call this is the end of, as its [events](crate::Event) and its entry in the
    /// [ledger](crate::write_safety::ledger::EntryId::call) name it; not in the text. The outermost layer of this
    /// crate that the call passed names it, unless the caller has ([`CallContext::assign_id`]). `None` where neither
    /// did: a connection without layers, a service that was not ready.
    ///
    /// [`CallContext::assign_id`]: crate::CallContext::assign_id
    pub fn call(&self) -> Option<CallId> {
        self.0.call
    }

    /// The method that was called; empty where nobody has said. Those that say it keep it anyway: the
    /// connections of this crate, [`ReconnectLayer`](crate::ReconnectLayer),
    /// [`WriteSafetyLayer`](crate::WriteSafetyLayer) for writes and
    /// [`RetryReadOnly`](crate::RetryReadOnly) for reads.
    pub fn method(&self) -> &str {
        &self.0.method
    }

    /// What the layers noted: why a retry was suppressed, why a doubt could not be settled.
    pub fn notes(&self) -> impl Iterator<Item = &str> {
        self.0.notes.iter().map(AsRef::as_ref)
    }

    /// The foreign error, by reference: the one that was given, or the connector's where no connection could
    /// be made, such as an [`mcp::HandshakeError`](crate::mcp::HandshakeError), or one of that one's sources.
    pub fn get_ref<E: StdError + 'static>(&self) -> Option<&E> {
        match (self.0.source.as_deref(), &self.0.cause) {
            (Some(source), _) => source.downcast_ref(),
            (None, Cause::ConnectFailed(error)) => match &**error {
                ConnectError::Connector(error) => {
                    let first: &(dyn StdError + 'static) = &**error;
                    iter::successors(Some(first), |&error| error.source())
                        .find_map(|error| error.downcast_ref())
                }
                _ => None,
            },
            (None, _) => None,
        }
    }

    /// The foreign error, if it is the server's answer and all there is to say: then it may stand in for this one.
    /// That is so where the [outcome](CallError::outcome) is [`Answered`](Outcome::Answered) and nothing
    /// [may have landed](CallError::may_have_landed). A JSON-RPC server's own error is not foreign; it is
    /// [`answer`](CallError::answer).
    ///
    /// ```
    /// use std::io;
    /// use goaround::{CallError, Outcome};
    ///
    /// let error = CallError::answered(io::Error::from(io::ErrorKind::PermissionDenied));
    /// assert_eq!(error.into_answer::<io::Error>().unwrap().kind(), io::ErrorKind::PermissionDenied);
    ///
    /// // A write that may have been applied is no answer, whatever its last attempt ended with.
    /// let error = CallError::ambiguous(io::Error::from(io::ErrorKind::ConnectionReset));
    /// let error = error.into_answer::<io::Error>().unwrap_err();
    /// assert_eq!(error.outcome(), Outcome::Unknown);
    /// assert!(error.get_ref::<io::Error>().is_some()); // it is still there
    /// ```
    ///
    /// # Errors
    ///
    /// This error itself, as it was, in every other case.
    pub fn into_answer<E: StdError + 'static>(self) -> Result<E, Self> {
        if self.outcome() != Outcome::Answered || self.may_have_landed() {
            return Err(self);
        }
        self.downcast()
    }

    /// The foreign error, as it was given. A connector's error is shared by all calls that waited for the
    /// connection, so that it comes out by reference alone ([`get_ref`](CallError::get_ref)).
    ///
    /// **What is known of the call is lost with this error.** The foreign one says how the last attempt ended, and
    /// not that the write is [`Unknown`](Outcome::Unknown), or that a check found it
    /// [done](Outcome::DoneResultLost): who sees "reset" repeats it. Look at the [outcome](CallError::outcome) first,
    /// or use [`into_answer`](CallError::into_answer), which does.
    ///
    /// # Errors
    ///
    /// This error itself, if it has no source of that type: also where no error was given, since the deadline
    /// passed or a layer turned the call away.
    pub fn downcast<E: StdError + 'static>(mut self) -> Result<E, Self> {
        match self.0.source.take().map(|source| source.downcast::<E>()) {
            Some(Ok(error)) => Ok(*error),
            Some(Err(source)) => {
                self.0.source = Some(source);
                Err(self)
            }
            None => Err(self),
        }
    }
}

// What the layers and the connections of this crate use.
impl CallError {
    pub(crate) fn new(cause: Cause, scope: Scope, delivery: Option<Delivery>) -> Self {
        Self(Box::new(Inner {
            call: None,
            of_readiness: false,
            cause,
            scope,
            delivery,
            effect: None,
            basis: None,
            method: Cow::Borrowed(""),
            attempts: Vec::new(),
            retry_after: None,
            notes: Vec::new(),
            source: None,
            closure: None,
            loss: None,
            misjudged: false,
            reported: false,
            repeated: false,
            request: Mutex::new(None),
        }))
    }

    fn foreign(delivery: Delivery, error: impl Into<BoxError>) -> Self {
        Self::new(Cause::Other, Scope::Call, Some(delivery)).caused_by(error)
    }

    pub(crate) fn of_evidence(evidence: Evidence) -> Self {
        Self::new(Cause::Evidence(evidence), evidence.scope(), None)
    }

    /// The deadline passed, with that known of the attempt under way.
    pub(crate) fn deadline(delivery: Delivery) -> Self {
        Self::new(Cause::Deadline, Scope::Call, Some(delivery))
    }

    pub(crate) fn attempt_timeout(delivery: Delivery) -> Self {
        Self::new(Cause::AttemptTimeout, Scope::Call, Some(delivery))
    }

    /// The server is still working on the call.
    pub(crate) fn in_progress() -> Self {
        Self::new(Cause::InProgress, Scope::Call, Some(Delivery::Ambiguous))
    }

    pub(crate) fn refused(refusal: Refusal) -> Self {
        Self::new(Cause::Refused(refusal), Scope::Call, Some(Delivery::NotSent))
    }

    pub(crate) fn of_closure(closure: Closure, delivery: Delivery) -> Self {
        Self::new(Cause::Closed(closure), Scope::Connection, Some(delivery))
    }

    pub(crate) fn connect_failed(error: Arc<ConnectError>) -> Self {
        Self::new(Cause::ConnectFailed(error), Scope::Connection, Some(Delivery::NotSent))
    }

    /// An inner service's `poll_ready` failed before the call was given to it: not sent, whatever it says.
    pub(crate) fn not_ready(error: CallError) -> Self {
        let scope = error.scope();
        match error.0.cause {
            Cause::Other => {
                let mut own = Self::new(Cause::NotReady, scope, Some(Delivery::NotSent));
                own.0.source = error.0.source;
                own
            }
            cause => {
                let mut own = Self::new(cause, scope, Some(Delivery::NotSent));
                own.0.source = error.0.source;
                own.0.retry_after = error.0.retry_after;
                own
            }
        }
    }

    /// The same, for whoever asks whether a layer is ready. The layer knows of no call then, so that a service which
    /// returns this as the end of a call may have asked for another call's sake.
    pub(crate) fn unready(error: CallError) -> Self {
        let mut own = Self::not_ready(error);
        own.0.of_readiness = true;
        own
    }

    pub(crate) fn server(error: ServerError) -> Self {
        Self::new(Cause::Answered(error), Scope::Call, Some(Delivery::Answered))
    }

    /// Changes the message of the server's own error, if it is one.
    pub(crate) fn reword(mut self, reword: impl FnOnce(&mut ServerError)) -> Self {
        if let Cause::Answered(error) = &mut self.0.cause {
            reword(error);
        }
        self
    }

    pub(crate) fn caused_by(mut self, error: impl Into<BoxError>) -> Self {
        self.0.source = Some(error.into());
        self
    }

    /// Puts the closure that all calls of the connection share in place of this call's own, if that does not know of a
    /// process. For connections of this crate, which have one process at most.
    pub(crate) fn at_closure(mut self, shared: &Closure) -> Self {
        match &mut self.0.cause {
            Cause::Closed(own) if own.has_exit() => own.goes_with(shared),
            Cause::Closed(own) => own.clone_from(shared),
            _ => self.0.closure = Some(shared.clone()),
        }
        self
    }

    /// Says that a foreign connection ended, of which another call's error has said it first. Nobody knows whether they
    /// were with the same process.
    pub(crate) fn beside_closure(mut self, first: &Closure) -> Self {
        match &mut self.0.cause {
            Cause::Closed(own) if own.has_exit() || first.has_exit() => own.goes_with(first),
            Cause::Closed(own) => own.clone_from(first),
            _ => match &self.0.closure {
                Some(own) => own.goes_with(first),
                None if first.has_exit() => {
                    let own = Closure::with(first.0.reason.clone(), first.0.in_flight, false, None);
                    own.goes_with(first);
                    self.0.closure = Some(own);
                }
                None => self.0.closure = Some(first.clone()),
            },
        }
        self
    }

    /// Says that other calls were lost by the same event, though the connection lives on: a retry budget is charged
    /// once for all of them.
    #[cfg(feature = "rmcp")]
    pub(crate) fn lost_with(mut self, loss: Closure) -> Self {
        self.0.loss = Some(loss);
        self
    }

    /// See [`CallError::lost_with`].
    pub(crate) fn loss(&self) -> Option<&Closure> {
        self.0.loss.as_ref()
    }

    /// The facts of an error that cannot be moved out of its box.
    fn facts(&self) -> Self {
        let mut facts = Self::new(self.0.cause.clone(), self.0.scope, self.0.delivery);
        facts.0.call = self.0.call;
        facts.0.of_readiness = self.0.of_readiness;
        facts.0.effect = self.0.effect;
        facts.0.basis = self.0.basis;
        facts.0.method = self.0.method.clone();
        facts.0.attempts = self.0.attempts.clone();
        facts.0.retry_after = self.0.retry_after;
        facts.0.notes = self.0.notes.clone();
        facts.0.closure = self.0.closure.clone();
        facts.0.misjudged = self.0.misjudged;
        facts.0.reported = self.0.reported;
        facts.0.repeated = self.0.repeated;
        facts
    }

    /// Gives the request back, since nothing of it was sent.
    pub(crate) fn with_request<R: Send + 'static>(mut self, request: R) -> Self {
        self.give_request(request);
        self
    }

    /// Puts back the request that was taken.
    pub(crate) fn give_request<R: Send + 'static>(&mut self, request: R) {
        self.0.request = Mutex::new(Some(Box::new(request)));
    }

    /// Takes the request that was handed back, if it is one of that type.
    pub(crate) fn take_request<R: 'static>(&mut self) -> Option<R> {
        let slot = self.0.request.get_mut().unwrap_or_else(PoisonError::into_inner);
        match slot.take()?.downcast::<R>() {
            Ok(request) => Some(*request),
            Err(other) => {
                *slot = Some(other);
                None
            }
        }
    }

    /// Takes the request that was handed back, if it is that call's.
    pub(crate) fn take_request_of<R: Call + 'static>(&mut self, call: Option<CallId>) -> Option<R> {
        self.take_request::<R>().filter(|request| request.context().id() == call)
    }

    /// Says which call it is, of an error that is this crate's own word about it. What comes up from a service is
    /// [`of_attempt`](CallError::of_attempt).
    pub(crate) fn with_id(mut self, call: Option<CallId>) -> Self {
        if call.is_some() {
            self.0.call = call;
        }
        self
    }

    /// What a service's error says of the call that the service was given: the one place where a layer finds out
    /// whether it is about that call at all. An error that names no call is the service's own word; one that a layer
    /// further down has named is taken as it is if that was this call, and as a foreign service's if it was another.
    #[cold]
    pub(crate) fn of_attempt(mut self, call: Option<CallId>, method: &str, effect: Effect) -> Self {
        let of_another = match (self.0.call, call) {
            (Some(named), Some(call)) => named != call,
            (None, _) => self.0.of_readiness,
            (Some(_), None) => false,
        };
        if of_another {
            self = self.of_another(effect);
        } else if self.0.call.is_none() && effect.is_write() {
            // A connection without layers, which went by what its own request says.
            self.0.effect = self.0.effect.filter(|effect| effect.is_write());
        }
        self.with_id(call).of_call(method, effect)
    }

    /// What another call's error says of this one: that its service failed. Nothing else of it is said of this call,
    /// neither what was sent, refused, answered or done, nor what connection or process is gone.
    fn of_another(self, effect: Effect) -> Self {
        let mut own = Self::ambiguous(self);
        // A read on whose behalf something may have been written is not one that is safe to repeat.
        let has_written = |own: &Self| own.get_ref::<Self>().is_some_and(Self::may_have_landed);
        own.0.effect = Some(if !effect.is_write() && has_written(&own) { Effect::Write } else { effect });
        own
    }

    /// Says that the call was a write after all, as a layer further in takes it.
    pub(crate) fn of_a_write(mut self) -> Self {
        self.0.effect = Some(Effect::Write);
        self
    }

    /// Says which call it is, and what that is.
    pub(crate) fn of_request(self, request: &impl Call, effect: Effect) -> Self {
        self.of_call(request.method(), effect).with_id(request.context().id())
    }

    /// Says what call it is, if no layer further down has.
    pub(crate) fn of_call(mut self, method: &str, effect: Effect) -> Self {
        if self.0.effect.is_none() {
            self.0.effect = Some(effect);
        }
        if self.0.method.is_empty() && !method.is_empty() {
            self.0.method = Cow::Owned(method.to_owned());
        }
        self
    }

    /// Takes back what the call was taken for: it may have been any write.
    pub(crate) fn misjudge(&mut self) {
        (self.0.effect, self.0.basis) = (Some(Effect::Write), Some(Basis::Default));
        self.0.misjudged = true;
    }

    /// Whether that was done.
    pub(crate) fn is_misjudged(&self) -> bool {
        self.0.misjudged
    }

    /// Whether it was refused since its server does not say any more what it was taken for.
    pub(crate) fn is_of_changed_effect(&self) -> bool {
        matches!(self.0.cause, Cause::Refused(Refusal::EffectChanged))
    }

    /// Whether the last attempt would be in doubt if it was one of a write.
    pub(crate) fn is_ambiguous_as_a_write(&self) -> bool {
        let delivery = match (self.0.delivery, &self.0.cause) {
            (None, Cause::Evidence(evidence)) => evidence.delivery(Effect::Write),
            _ => self.delivery(),
        };
        delivery == Delivery::Ambiguous
    }

    /// Says that it is not to be handed over anew though its last attempt was not sent: whoever would do that asks neither
    /// for the order of writes nor for what came of the attempts before it.
    pub(crate) fn set_repeated(&mut self) {
        self.0.repeated = true;
        self.0.request = Mutex::new(None);
    }

    /// Whether that was said.
    pub(crate) fn is_repeated(&self) -> bool {
        self.0.repeated
    }

    pub(crate) fn set_reported(&mut self) {
        self.0.reported = true;
    }

    /// Whether a call may have done something that no layer took for a write, and that is to be reported.
    pub(crate) fn is_unreported(&self) -> bool {
        let taken_back = self.0.misjudged || self.is_of_changed_effect();
        taken_back && !self.0.reported && self.may_have_landed()
    }

    /// Says who judged the call, if no layer further down has.
    pub(crate) fn judged_by(mut self, basis: Basis) -> Self {
        self.0.basis.get_or_insert(basis);
        self
    }

    /// Enters the attempt that this error ended, if no layer further down has entered any.
    pub(crate) fn with_attempt(mut self, generation: Option<u64>) -> Self {
        if self.0.attempts.is_empty() {
            self.0.attempts.push(Attempt::of(&self, generation));
        }
        self
    }

    /// Puts the attempts that came before in front of this error's own.
    pub(crate) fn after_attempts(mut self, mut earlier: Vec<Attempt>) -> Self {
        earlier.append(&mut self.0.attempts);
        self.0.attempts = earlier;
        self
    }

    /// Says that the caller trusts the evidence: the last attempt was not processed, also where the evidence
    /// is only probable.
    pub(crate) fn trusted(&mut self) {
        self.0.delivery = Some(Delivery::NotProcessed);
        if let Some(attempt) = self.0.attempts.last_mut() {
            attempt.delivery = Delivery::NotProcessed;
        }
    }

    /// Says that there is better evidence than this error's own that the last attempt was not without effect: that it
    /// was not sent, or not processed, is not known any more.
    pub(crate) fn contradicted(&mut self) {
        if matches!(self.delivery(), Delivery::NotSent | Delivery::NotProcessed) {
            self.0.delivery = Some(Delivery::Ambiguous);
            if let Some(attempt) = self.0.attempts.last_mut() {
                attempt.delivery = Delivery::Ambiguous;
            }
        }
    }

    pub(crate) fn take_attempts(&mut self) -> Vec<Attempt> {
        std::mem::take(&mut self.0.attempts)
    }

    pub(crate) fn attempts_mut(&mut self) -> &mut Vec<Attempt> {
        &mut self.0.attempts
    }

    pub(crate) fn note(mut self, note: impl Into<Cow<'static, str>>) -> Self {
        self.0.notes.push(note.into());
        self
    }

    /// The server answered with a success that nobody can read.
    #[cfg(feature = "rmcp")]
    pub(crate) fn unread(error: impl Into<BoxError>) -> Self {
        Self::new(Cause::AnswerUnread, Scope::Call, Some(Delivery::Answered)).caused_by(error)
    }

    /// What follows from this end of an attempt.
    pub(crate) fn rule(&self, effect: Effect, trusted: bool) -> crate::Rule {
        // What its last attempt ended with says nothing of one before it that is in doubt.
        let is_final = self.delivery() == Delivery::Answered || matches!(self.0.cause, Cause::Deadline);
        let writes = effect.is_write() || self.0.effect.is_some_and(Effect::is_write);
        if writes && !is_final && self.is_doubtful_before_its_end() {
            return crate::Rule::Check;
        }
        let rule = crate::rule(effect, &self.0.cause, self.0.scope, self.delivery(), trusted);
        if writes && self.0.repeated { crate::Rule::Return } else { rule }
    }

    /// Whether another attempt than the one that ended so is in doubt: a layer further in has made more than one, or
    /// somebody else has.
    fn is_doubtful_before_its_end(&self) -> bool {
        self.0.attempts.split_last().is_some_and(|(last, earlier)| {
            let of_another = last.is_in_doubt() && self.delivery() != Delivery::Ambiguous;
            of_another || earlier.iter().any(Attempt::is_in_doubt)
        })
    }

    /// Whether all attempts have come back without having been processed.
    pub(crate) fn is_given_back(&self) -> bool {
        matches!(self.delivery(), Delivery::NotSent | Delivery::NotProcessed) && !self.is_in_doubt()
    }

    /// Whether an attempt that no verdict settled is ambiguous.
    fn is_in_doubt(&self) -> bool {
        if self.0.attempts.is_empty() {
            return self.delivery() == Delivery::Ambiguous;
        }
        self.0.attempts.iter().any(Attempt::is_in_doubt)
    }
}

impl fmt::Display for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let outcome = self.outcome();
        f.write_str(match outcome {
            Outcome::NotDone => "not done: ",
            Outcome::NoAnswer => "no answer: ",
            Outcome::Unknown => "outcome UNKNOWN: ",
            Outcome::DoneResultLost => "DONE, result lost: ",
            Outcome::Answered => "answered: ",
        })?;
        Happened(self).fmt(f)?;
        if outcome == Outcome::Unknown && self.is_write_by_default() {
            f.write_str("; taken for a write, since nobody said what it does")?;
        }
        match outcome {
            Outcome::Unknown => f.write_str("; the write may have been applied; verify before repeating"),
            Outcome::NoAnswer => f.write_str(" (read-only, safe to repeat)"),
            Outcome::Answered if self.is_unread() && self.may_have_landed() => {
                f.write_str("; the write may have been applied; verify before repeating")
            }
            Outcome::Answered if self.may_have_landed() => {
                f.write_str("; an earlier attempt may have been applied; verify before repeating")
            }
            _ => Ok(()),
        }
    }
}

/// What happened, without what is known of it: what an error says of one call must not be read as said of
/// another, in whose error it stands.
struct Happened<'a>(&'a CallError);

impl fmt::Display for Happened<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { cause, method, attempts, notes, source, retry_after, .. } = &*self.0.0;
        if !method.is_empty() {
            write!(f, "{method}: ")?;
        }
        match cause {
            Cause::Other if self.0.outcome() == Outcome::Answered => f.write_str("an error of its own")?,
            cause => cause.fmt(f)?,
        }
        if let (Cause::Refused(Refusal::CrashLoop(_)), Some(wait)) = (cause, retry_after) {
            write!(f, "; calls are turned away for another {wait:.0?}")?;
        }
        if matches!(
            cause,
            Cause::Other
                | Cause::NotReady
                | Cause::Closed(_)
                | Cause::Evidence(_)
                | Cause::Refused(Refusal::Ledger)
        ) && let Some(text) = source.as_deref().and_then(|source| safe_text(source))
        {
            write!(f, " ({text})")?;
        }
        if attempts.len() > 1 {
            write!(f, ", after {} attempts", attempts.len())?;
        }
        for note in notes {
            write!(f, "; {note}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for CallError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CallError")
            .field("outcome", &self.outcome())
            .field("call", &self.0.call)
            .field("cause", &self.0.cause)
            .field("scope", &self.0.scope)
            .field("delivery", &self.delivery())
            .field("method", &self.0.method)
            .field("effect", &self.0.effect)
            .field("attempts", &self.0.attempts)
            .field("retry_after", &self.0.retry_after)
            .field("notes", &self.0.notes)
            .finish_non_exhaustive()
    }
}

impl StdError for CallError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        if let Some(source) = self.0.source.as_deref() {
            return Some(source);
        }
        match &self.0.cause {
            Cause::ConnectFailed(error) => Some(&**error),
            _ => None,
        }
    }
}

/// The text of an error that is known to hold no secret, to stand in another error's: this crate's own and
/// the operating system's.
pub(crate) fn safe_text(error: &(dyn StdError + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<CallError>() {
        return Some(Happened(error).to_string());
    }
    if let Some(error) = error.downcast_ref::<crate::stdio::SpawnError>() {
        return Some(error.to_string());
    }
    if let Some(error) = error.downcast_ref::<crate::mcp::HandshakeError>() {
        return Some(error.to_string());
    }
    #[cfg(feature = "rmcp")]
    if let Some(text) = crate::sdk::safe_text(error) {
        return Some(text);
    }
    if let Some(error) = error.downcast_ref::<crate::mcp::tasks::Unfinished>() {
        return Some(error.to_string());
    }
    if let Some(error) = error.downcast_ref::<crate::write_safety::ledger::LedgerError>() {
        return Some(error.to_string());
    }
    let error = error.downcast_ref::<io::Error>()?;
    Some(match error.raw_os_error() {
        Some(code) => io::Error::from_raw_os_error(code).to_string(),
        None => error.kind().to_string(),
    })
}

// ===== impl Attempt =====

/// One hand-over of a call to the inner service, and how it ended.
#[derive(Clone, Debug, Serialize)]
#[non_exhaustive]
pub struct Attempt {
    /// The generation of the connection, where a [`ReconnectLayer`](crate::ReconnectLayer) made it.
    pub generation: Option<u64>,
    /// What is known about it.
    pub delivery: Delivery,
    /// What ended it: [`Cause::name`], or `answered` for a success.
    pub cause: &'static str,
    /// Whom that concerned.
    pub scope: Scope,
    /// How long was waited before it: backoff, or what the peer asked for.
    pub waited: Duration,
    /// What a verdict of the effect check says of it.
    pub settled: Option<Settled>,
}

/// What a verdict says of an attempt.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Settled {
    /// It was applied.
    Landed,
    /// It was not applied and, by that fence, never will be.
    NotLanded(Fence),
}

impl Attempt {
    pub(crate) fn of(error: &CallError, generation: Option<u64>) -> Self {
        Self {
            generation,
            delivery: error.delivery(),
            cause: error.cause().name(),
            scope: error.scope(),
            waited: Duration::ZERO,
            settled: None,
        }
    }

    /// An attempt that succeeded.
    pub(crate) fn answered(generation: Option<u64>) -> Self {
        Self {
            generation,
            delivery: Delivery::Answered,
            cause: "answered",
            scope: Scope::Call,
            waited: Duration::ZERO,
            settled: None,
        }
    }

    /// One that nobody answered, and that no error of its own ended.
    pub(crate) fn unanswered(cause: &'static str) -> Self {
        Self { delivery: Delivery::Ambiguous, cause, ..Self::answered(None) }
    }

    pub(crate) fn is_in_doubt(&self) -> bool {
        self.delivery == Delivery::Ambiguous && self.settled.is_none()
    }

    /// Whether a later answer may be the consequence of this attempt.
    fn may_show_in_an_answer(&self) -> bool {
        match &self.settled {
            None => self.delivery == Delivery::Ambiguous,
            Some(Settled::Landed) => true,
            Some(Settled::NotLanded(fence)) => fence.basis() == FenceBasis::Declared,
        }
    }
}

// ===== impl ServerError =====

/// The server's own error object, unchanged.
#[derive(Clone, PartialEq, serde::Deserialize, Serialize, thiserror::Error)]
#[error("{message} (code {code})")]
#[non_exhaustive]
pub struct ServerError {
    /// The code. It identifies no failure by itself: servers and SDKs use the same ones differently.
    pub code: i64,
    /// The message.
    pub message: String,
    /// What else the server says.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<serde_json::Value>,
}

impl fmt::Debug for ServerError {
    /// Without the contents of `data`: servers put arguments there.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ServerError")
            .field("code", &self.code)
            .field("message", &self.message)
            .field("data", &self.data.as_ref().map(|_| format_args!("..")))
            .finish()
    }
}

impl ServerError {
    /// An error with that code and message.
    pub fn new(code: i64, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), data: None }
    }

    /// Adds what else there is to say.
    #[must_use]
    pub fn with_data(mut self, data: serde_json::Value) -> Self {
        self.data = Some(data);
        self
    }
}

// ===== impl Closure =====

/// How a connection ended. Shared by all calls that it took down.
#[derive(Clone)]
pub struct Closure(Arc<ClosureInner>);

struct ClosureInner {
    reason: Cow<'static, str>,
    generation: OnceLock<u64>,
    in_flight: usize,
    ends_effects: bool,
    exit: Mutex<Option<BoxFuture<Exit>>>,
    /// Whom the exit's future wakes.
    waiting: Arc<Waiting>,
    exited: OnceLock<Option<Exit>>,
    /// Whether the retry budget granted the replays that it makes due.
    charged: OnceLock<bool>,
    /// What another call's error said of the same connection's end, and said first.
    first: OnceLock<Closure>,
}

impl Closure {
    /// A closure of a connection without a process.
    pub(crate) fn new(reason: impl Into<Cow<'static, str>>) -> Self {
        Self::with(reason.into(), 0, false, None)
    }

    /// A closure of a connection to a process that is about to end. `ends_effects` is the caller's
    /// declaration that its effects end with it; `in_flight` counts the calls that it took down.
    pub(crate) fn of_process(
        reason: impl Into<Cow<'static, str>>,
        in_flight: usize,
        ends_effects: bool,
        exit: Option<BoxFuture<Exit>>,
    ) -> Self {
        Self::with(reason.into(), in_flight, ends_effects, exit)
    }

    fn with(
        reason: Cow<'static, str>,
        in_flight: usize,
        ends_effects: bool,
        exit: Option<BoxFuture<Exit>>,
    ) -> Self {
        let exited = OnceLock::new();
        if exit.is_none() {
            let _ = exited.set(None);
        }
        Self(Arc::new(ClosureInner {
            reason,
            generation: OnceLock::new(),
            in_flight,
            ends_effects,
            exit: Mutex::new(exit),
            waiting: Arc::default(),
            exited,
            charged: OnceLock::new(),
            first: OnceLock::new(),
        }))
    }

    /// Says that another call's error has said first that the connection ended.
    fn goes_with(&self, first: &Closure) {
        if !Arc::ptr_eq(&self.0, &first.0) {
            let _ = self.0.first.set(first.clone());
        }
    }

    /// The closure whose process is waited for: where this one knows of none, the one that came first. It may be
    /// another process, so that its end proves nothing; but that it has outlived all signals does.
    fn waited_for(&self) -> &Self {
        match self.0.first.get() {
            Some(first) if !self.has_exit() => first,
            _ => self,
        }
    }

    /// The number of the connection, where a [`ReconnectLayer`](crate::ReconnectLayer) made it.
    pub fn generation(&self) -> Option<u64> {
        self.0.generation.get().copied()
    }

    /// Whether there is, or was, a process whose end can be waited for.
    fn has_exit(&self) -> bool {
        !matches!(self.0.exited.get(), Some(None))
    }

    pub(crate) fn set_generation(&self, generation: u64) {
        let _ = self.0.generation.set(generation);
    }

    /// How many calls were in flight, where the connection counts them.
    pub fn in_flight(&self) -> usize {
        self.0.in_flight
    }

    /// Whether the caller declared that the effects of the server's process end with it, so that its end is
    /// a fence.
    pub fn exit_ends_effects(&self) -> bool {
        self.0.ends_effects && Arc::ptr_eq(&self.waited_for().0, &self.0)
    }

    /// Waits until it is known how the server's process ended: at once with `None` where there is none, and where
    /// that cannot be known.
    pub async fn exited(&self) -> Option<Exit> {
        let mut place = None;
        std::future::poll_fn(|cx| self.poll_exited(&mut place, cx)).await
    }

    /// Each waiter can drive the future, which wakes them all: one that is not polled any more, but not
    /// dropped either, holds nobody up.
    fn poll_exited(&self, waits: &mut Option<Arc<Place>>, cx: &mut Context<'_>) -> Poll<Option<Exit>> {
        let Self(inner) = self.waited_for();
        if let Some(exit) = inner.exited.get() {
            return Poll::Ready(exit.clone());
        }
        inner.waiting.register(waits, cx.waker());
        let mut place = inner.exit.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(exit) = inner.exited.get() {
            return Poll::Ready(exit.clone());
        }
        // It may be the caller's own: of one that panics nothing is known, and nobody else panics.
        let polled = place.as_mut().map(|future| {
            let waker = Waker::from(Arc::clone(&inner.waiting));
            let mut cx = Context::from_waker(&waker);
            catch_unwind(AssertUnwindSafe(|| future.as_mut().poll(&mut cx)))
        });
        let exit = match polled {
            Some(Ok(Poll::Pending)) => return Poll::Pending,
            Some(Ok(Poll::Ready(exit))) => Some(exit),
            Some(Err(_)) | None => None,
        };
        discard(place.take());
        drop(place);
        let exit = inner.exited.get_or_init(|| exit).clone();
        Arc::clone(&inner.waiting).wake();
        Poll::Ready(exit)
    }

    /// Finds out how the process ended, as far as that needs no waiting.
    pub(crate) fn learn_exit(&self) {
        let _ = once_more(pin!(self.exited()), &mut Context::from_waker(Waker::noop()));
    }

    /// How the process ended, if that is known already.
    pub fn exit(&self) -> Option<&Exit> {
        self.waited_for().0.exited.get()?.as_ref()
    }

    /// Charges something for this closure once, however many calls it took down; all get the same answer.
    pub(crate) fn charge_once(&self, charge: impl FnOnce() -> bool) -> bool {
        let Self(of) = self.0.first.get().unwrap_or(self);
        *of.charged.get_or_init(charge)
    }
}

/// Those who wait for the end of a process.
#[derive(Default)]
struct Waiting(Mutex<Places>);

impl Waiting {
    fn register(&self, waits: &mut Option<Arc<Place>>, waker: &Waker) {
        // Wakers are foreign code: cloned and dropped without the lock.
        let waker = waker.clone();
        let mut places = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let known = waits.get_or_insert_with(|| places.enter()).set(Some(waker));
        drop(places);
        drop(known);
    }
}

impl Wake for Waiting {
    fn wake(self: Arc<Self>) {
        let wakers = self.0.lock().unwrap_or_else(PoisonError::into_inner).wakers();
        wake_all(wakers);
    }
}

impl fmt::Display for Closure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.reason)?;
        match self.0.in_flight {
            0 | 1 => Ok(()),
            n => write!(f, " with {n} calls in flight"),
        }
    }
}

impl fmt::Debug for Closure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Closure")
            .field("reason", &self.0.reason)
            .field("generation", &self.generation())
            .field("in_flight", &self.0.in_flight)
            .field("exit", &self.exit())
            .finish_non_exhaustive()
    }
}

/// How a server's process ended.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Exit {
    /// The status of the process, where it could be reaped.
    pub status: Option<ExitStatus>,
    /// Whether its whole process group is gone: no process of it can do anything any more.
    pub group_gone: bool,
    /// When this was known.
    pub at: tokio::time::Instant,
}

impl Exit {
    /// The process ended with that status, now; `group_gone` says whether all others of its group have too.
    pub fn new(status: Option<ExitStatus>, group_gone: bool) -> Self {
        Self { status, group_gone, at: tokio::time::Instant::now() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(error: CallError) -> CallError {
        error.of_call("pay", Effect::Write).with_attempt(None)
    }

    #[test]
    fn an_ambiguous_attempt_is_not_masked_by_a_later_harmless_one() {
        let mut first = write(CallError::ambiguous("reset"));
        let refused = Arc::new(ConnectError::Panicked);
        let second = write(CallError::connect_failed(refused.clone())).after_attempts(first.take_attempts());
        assert_eq!(second.outcome(), Outcome::Unknown);
        assert!(second.may_have_landed() && !second.is_safe_to_repeat());

        let mut first = write(CallError::ambiguous("reset"));
        let mut attempts = first.take_attempts();
        let mut ids = crate::call::CallIds::default();
        let id = crate::CallContext::new().identify(&mut ids);
        attempts[0].settled = Some(Settled::NotLanded(Fence::because(id, "tested")));
        let second = write(CallError::connect_failed(refused)).after_attempts(attempts);
        assert_eq!(second.outcome(), Outcome::NotDone);
        assert!(!second.may_have_landed() && second.is_safe_to_repeat());
    }

    #[test]
    fn what_somebody_else_may_have_done_is_checked_whatever_became_of_the_attempts_here() {
        for here in [CallError::not_sent("refused"), CallError::not_processed("busy")] {
            let mut error = write(here);
            assert_ne!(error.rule(Effect::Write, false), crate::Rule::Check);
            assert!(error.is_given_back());
            error.attempts_mut().push(Attempt::unanswered("claimed_by_another"));
            assert_eq!(error.rule(Effect::Write, false), crate::Rule::Check);
            assert!(!error.is_given_back() && !error.is_safe_to_repeat());
            assert_eq!(error.outcome(), Outcome::Unknown);
        }
    }

    #[test]
    fn an_answer_after_a_declared_fence_keeps_the_doubt_and_after_an_observed_one_does_not() {
        let mut ids = crate::call::CallIds::default();
        let id = crate::CallContext::new().identify(&mut ids);
        for (fence, doubt) in [(Fence::because(id, "tested"), true), (Fence::process_gone(id), false)] {
            let mut attempts = write(CallError::ambiguous("reset")).take_attempts();
            attempts[0].settled = Some(Settled::NotLanded(fence));
            let answer = write(CallError::server(ServerError::new(1, "exists"))).after_attempts(attempts);
            assert_eq!((answer.outcome(), answer.may_have_landed()), (Outcome::Answered, doubt));
        }
    }

    #[test]
    fn the_text_begins_with_what_is_known_and_holds_no_foreign_text() {
        let secret = || std::io::Error::other("token=hunter2");
        let unknown = write(CallError::ambiguous(secret()));
        assert_eq!(
            unknown.to_string(),
            "outcome UNKNOWN: pay: the service failed (other error); \
             the write may have been applied; verify before repeating"
        );
        let read = CallError::ambiguous("token").of_call("list", Effect::ReadOnly).with_attempt(None);
        assert_eq!(read.to_string(), "no answer: list: the service failed (read-only, safe to repeat)");
        let refused = write(CallError::refused(Refusal::Shutdown));
        assert_eq!(refused.to_string(), "not done: pay: the stack is shut down");
        let answer = write(CallError::server(ServerError::new(-32000, "quota")));
        assert_eq!(answer.to_string(), "answered: pay: quota (code -32000)");
        let answer = write(CallError::answered(secret()));
        assert_eq!(answer.to_string(), "answered: pay: an error of its own (other error)");
        assert!(!format!("{unknown:?}{read:?}").contains("token"));
        let connector = Arc::new(ConnectError::Connector("token=hunter2".into()));
        let connect = write(CallError::connect_failed(connector));
        assert_eq!(connect.to_string(), "not done: pay: cannot connect: the connector failed");
        let data = ServerError::new(1, "no").with_data(serde_json::json!({ "echo": "token=hunter2" }));
        let answer = write(CallError::server(data));
        assert!(!format!("{connect:?}{answer:?}{answer}").contains("token"));
    }

    #[test]
    fn an_unknown_call_that_nobody_said_to_be_a_read_or_a_write_says_so() {
        let error = || CallError::ambiguous("reset");
        let note = "; taken for a write, since nobody said what it does; the write may have been";
        let default = write(error()).judged_by(Basis::Default);
        assert!(default.to_string().contains(note), "{default}");
        for basis in [Basis::Caller, Basis::Protocol, Basis::TrustedAnnotation] {
            let judged = write(error()).judged_by(basis);
            assert!(!judged.to_string().contains("taken for"), "{judged}");
        }
        // Nobody was asked; or it was harmless; or its outcome is known; or the server had said that it reads.
        assert!(!write(error()).to_string().contains("taken for"));
        let read = error().of_call("list", Effect::ReadOnly).judged_by(Basis::Default).with_attempt(None);
        let unsent = write(CallError::not_sent("refused")).judged_by(Basis::Default);
        let mut taken_back = write(error()).judged_by(Basis::TrustedAnnotation);
        taken_back.misjudge();
        assert_eq!((taken_back.outcome(), taken_back.basis()), (Outcome::Unknown, Basis::Default));
        for error in [read, unsent, taken_back] {
            assert!(!error.to_string().contains("taken for"), "{error}");
        }
    }

    #[test]
    fn within_another_errors_text_it_says_what_happened_and_nothing_that_could_be_taken_for_that_calls() {
        let unknown = write(CallError::of_closure(Closure::new("gone"), Delivery::Ambiguous));
        let read = CallError::deadline(Delivery::Ambiguous).of_call("list", Effect::ReadOnly);
        for (inner, text) in [(unknown, "pay: gone"), (read, "list: the deadline passed")] {
            assert_eq!(safe_text(&inner).unwrap(), text);
            let outer = CallError::connect_failed(Arc::new(ConnectError::Connector(Box::new(inner))));
            assert_eq!(write(outer).to_string(), format!("not done: pay: cannot connect: {text}"));
        }
    }

    #[test]
    fn what_a_connection_without_layers_takes_for_a_read_is_no_read_if_the_layer_says_otherwise() {
        let bare = || CallError::ambiguous("reset").of_call("list", Effect::ReadOnly);
        let call = crate::CallContext::new().identify(&mut crate::call::CallIds::default());
        let write = bare().of_attempt(Some(call), "pay", Effect::Write);
        assert_eq!((write.outcome(), write.call()), (Outcome::Unknown, Some(call)));
        // What a layer has said of the same call stands, and so does the stronger word.
        let layered = bare().with_id(Some(call)).of_attempt(Some(call), "pay", Effect::Write);
        assert_eq!(layered.outcome(), Outcome::NoAnswer);
        let read = CallError::ambiguous("reset").of_call("pay", Effect::Write);
        assert_eq!(read.of_attempt(Some(call), "list", Effect::ReadOnly).outcome(), Outcome::Unknown);
    }

    #[test]
    fn probable_evidence_is_weaker_for_writes() {
        let write = CallError::evidence(Evidence::Unavailable, "503").of_call("w", Effect::Write);
        assert_eq!(write.with_attempt(None).outcome(), Outcome::Unknown);
        let read = CallError::evidence(Evidence::Unavailable, "503").of_call("r", Effect::ReadOnly);
        assert_eq!(read.with_attempt(None).outcome(), Outcome::NotDone);
        // Nor is a read that its server no longer takes for one.
        let mut taken_back = CallError::evidence(Evidence::Unavailable, "503").of_call("r", Effect::ReadOnly);
        assert!(taken_back.is_ambiguous_as_a_write());
        taken_back.misjudge();
        assert_eq!(taken_back.with_attempt(None).outcome(), Outcome::Unknown);
    }

    #[test]
    fn a_call_error_in_a_box_is_found_and_kept() {
        let boxed: BoxError = Box::new(CallError::not_sent("x").connection_lost());
        assert_eq!(CallError::from_boxed(boxed).delivery(), Delivery::NotSent);

        #[derive(Debug, thiserror::Error)]
        #[error("wrapped")]
        struct Wrapped(#[source] CallError);
        let error = CallError::from_boxed(Box::new(Wrapped(CallError::not_processed("x"))));
        assert_eq!(error.delivery(), Delivery::NotProcessed);
        assert!(error.downcast::<Wrapped>().is_ok());
        assert_eq!(CallError::from_boxed("x".into()).delivery(), Delivery::Ambiguous);
    }

    #[test]
    fn the_request_is_handed_back_to_those_who_know_its_type() {
        let mut error = CallError::not_sent("x").with_request(7_u8);
        assert_eq!(error.take_request::<u16>(), None);
        assert_eq!(error.take_request::<u8>(), Some(7));
        assert_eq!(error.take_request::<u8>(), None);
    }

    #[test]
    fn a_closure_is_charged_once() {
        let closure = Closure::new("closed");
        assert!(!closure.charge_once(|| false));
        assert!(!closure.charge_once(|| true));
    }

    #[tokio::test]
    async fn an_exit_whose_future_panics_is_not_known() {
        let exit = Box::pin(async { panic!("in the exit") });
        let closure = Closure::of_process("closed", 0, true, Some(exit));
        assert!(closure.exited().await.is_none());
        assert!(closure.exited().await.is_none());
    }

    #[tokio::test]
    async fn the_exit_is_known_to_all_though_the_waker_of_one_panics() {
        struct Loud;
        impl Wake for Loud {
            fn wake(self: Arc<Self>) {
                panic!("as tested");
            }
        }
        let (tell, told) = tokio::sync::oneshot::channel();
        let exit = Box::pin(async { told.await.unwrap() });
        let closure = Closure::of_process("closed", 0, true, Some(exit));
        let mut loud = pin!(closure.exited());
        assert!(loud.as_mut().poll(&mut Context::from_waker(&Arc::new(Loud).into())).is_pending());
        let mut other = tokio_test::task::spawn(closure.exited());
        assert!(other.poll().is_pending());
        tell.send(Exit::new(None, true)).unwrap();
        assert!(other.is_woken());
        assert!(matches!(other.poll(), Poll::Ready(Some(_))));
    }

    #[tokio::test]
    async fn the_exit_is_known_to_all_and_a_waiter_that_is_dropped_or_not_polled_holds_nobody_up() {
        assert!(Closure::new("closed").exited().await.is_none());
        let (tell, told) = tokio::sync::oneshot::channel();
        let exit = Box::pin(async { told.await.unwrap() });
        let closure = Closure::of_process("closed", 0, true, Some(exit));
        let mut first = tokio_test::task::spawn(closure.exited());
        let mut second = tokio_test::task::spawn(closure.exited());
        assert!(first.poll().is_pending() && second.poll().is_pending());
        let mut third = tokio_test::task::spawn(closure.exited());
        assert!(third.poll().is_pending());
        drop(third);
        tell.send(Exit::new(None, true)).unwrap();
        assert!(first.is_woken() && second.is_woken());
        // The first one, which came first, is not polled.
        assert!(matches!(second.poll(), Poll::Ready(Some(exit)) if exit.group_gone));
        drop(first);
        assert!(closure.exited().await.unwrap().group_gone);
        assert!(closure.exit().unwrap().group_gone);
    }

    #[test]
    fn of_those_who_wait_for_an_exit_only_the_last_waker_is_kept_and_of_those_who_are_gone_none() {
        struct Nobody;
        impl Wake for Nobody {
            fn wake(self: Arc<Self>) {}
        }
        let closure = Closure::of_process("closed", 0, true, Some(Box::pin(std::future::pending())));
        let mut waits = pin!(closure.exited());
        let tasks = [(); 3].map(|()| Arc::new(Nobody));
        for (task, kept) in tasks.iter().zip(1..) {
            assert!(waits.as_mut().poll(&mut Context::from_waker(&task.clone().into())).is_pending());
            let goes = pin!(closure.exited()).poll(&mut Context::from_waker(&task.clone().into()));
            assert!(goes.is_pending());
            let held: Vec<_> = tasks.iter().take(kept).map(|task| Arc::strong_count(task) - 1).collect();
            assert_eq!(held.iter().sum::<usize>(), 1, "{held:?}");
            assert_eq!(held.last(), Some(&1));
        }
    }
}
