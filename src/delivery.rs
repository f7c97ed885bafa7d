//! What ended an attempt ([`Cause`], [`Scope`]), what is known about it ([`Delivery`], [`Evidence`]), and
//! the one function that says what follows from that: [`rule`].

use std::{fmt, sync::Arc};

use serde::Serialize;

use crate::{
    BoxError, Effect,
    error::{Closure, ServerError},
    write_safety::ledger::EntryId,
};

/// Whom the end of an attempt concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Scope {
    /// Only this request.
    Call,
    /// Every request on the connection: it is gone, and a reconnect is due.
    Connection,
}

/// What is known about one attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Delivery {
    /// Not one byte of the request reached the transport.
    NotSent,
    /// The peer or its library refused it before the application saw it.
    NotProcessed,
    /// It may or may not have been processed. What nobody classified is this.
    Ambiguous,
    /// The application answered, with a result or an error.
    Answered,
}

/// A peer's refusal, as an adapter recognized it by type.
///
/// Strong evidence says that the application never saw the request. Evidence that is only probable (a
/// gateway may have forwarded the request before it answered so) counts as [`Delivery::NotProcessed`] for
/// reads and as [`Delivery::Ambiguous`] for writes. A write is replayed on it only if
/// [`WriteSafetyLayer::trust`](crate::WriteSafetyLayer::trust) names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Evidence {
    /// HTTP/2 `REFUSED_STREAM` (RFC 9113, section 8.7).
    RefusedStream,
    /// HTTP/2 GOAWAY with a last stream id below this request's (RFC 9113, sections 6.8 and 8.7).
    GoAway,
    /// 425 Too Early (RFC 8470).
    TooEarly,
    /// 429 Too Many Requests (RFC 6585).
    TooManyRequests,
    /// The request was cut before its last JSON byte on a pipe that is closed for good, so that no peer can
    /// have read a whole message. A missing newline alone is not this: some servers run such a line.
    FrameCut,
    /// The server does not know our session (MCP: 404 to a request with our session id). Probable.
    SessionUnknown,
    /// 503 Service Unavailable. Probable.
    Unavailable,
    /// 408 Request Timeout. Probable.
    RequestTimeout,
    /// 401 Unauthorized. A repetition without new credentials cannot help.
    Unauthorized,
    /// 403 Forbidden. A repetition cannot help.
    Forbidden,
}

impl Evidence {
    /// What this says of a call with that effect.
    pub const fn delivery(self, effect: Effect) -> Delivery {
        match self {
            Evidence::SessionUnknown | Evidence::Unavailable | Evidence::RequestTimeout
                if effect.is_write() =>
            {
                Delivery::Ambiguous
            }
            _ => Delivery::NotProcessed,
        }
    }

    /// Whom it concerns: a session that is gone is gone for every request.
    pub const fn scope(self) -> Scope {
        match self {
            Evidence::SessionUnknown | Evidence::FrameCut => Scope::Connection,
            _ => Scope::Call,
        }
    }

    const fn is_final(self) -> bool {
        matches!(self, Evidence::Unauthorized | Evidence::Forbidden)
    }

    const fn text(self) -> &'static str {
        match self {
            Evidence::RefusedStream => "the stream was refused before processing",
            Evidence::GoAway => "the server was going away before it processed the request",
            Evidence::TooEarly => "too early (425)",
            Evidence::TooManyRequests => "too many requests (429)",
            Evidence::FrameCut => "the connection closed before the request was written to its end",
            Evidence::SessionUnknown => "the server does not know the session",
            Evidence::Unavailable => "service unavailable (503)",
            Evidence::RequestTimeout => "request timeout (408)",
            Evidence::Unauthorized => "unauthorized (401)",
            Evidence::Forbidden => "forbidden (403)",
        }
    }
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

/// Why this crate itself turned a call away. Final: no layer repeats such a call.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refusal {
    /// A layer was given a value that makes no sense; named here.
    Config(&'static str),
    /// The stack is shutting down or was shut down.
    Shutdown,
    /// Too many connections in a row closed without an answer; what the last ones ended with.
    CrashLoop(Arc<[String]>),
    /// A bound was reached: calls in flight, waiters. Named here.
    Overloaded(&'static str),
    /// A probe of an effect check that is not read-only.
    NotAProbe,
    /// An earlier write with the same conflict key is in doubt, the one that is named here and in the source, a
    /// [`LedgerError::KeyInDoubt`](crate::write_safety::ledger::LedgerError::KeyInDoubt). While its call is under
    /// way, wait for that; after it, settle or forget it in the ledger. Until then a repetition is turned away too.
    KeyInDoubt(EntryId),
    /// The ledger could not enter the write; the source says why, a
    /// [`LedgerError`](crate::write_safety::ledger::LedgerError).
    Ledger,
    /// The call asks for a page of a list by a cursor that another session handed out. Begin again with the
    /// first page.
    CursorOfAnotherSession,
    /// The call is about something that only one connection has, such as a task as [`mcp::tasks`](crate::mcp::tasks)
    /// saw it there, and that connection is gone. This attempt was not sent.
    AnotherConnection,
    /// The call was taken for harmless by a trusted annotation of the server, and on this connection the
    /// server says otherwise. This attempt was not sent; if an earlier one was, the outcome is
    /// [`Unknown`](crate::Outcome::Unknown). A new call is judged anew.
    EffectChanged,
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Refusal::Config(what) => write!(f, "wrong configuration: {what}"),
            Refusal::Shutdown => f.write_str("the stack is shut down"),
            Refusal::CrashLoop(evidence) => {
                write!(f, "the last {} connections closed without an answer", evidence.len())?;
                evidence.last().map_or(Ok(()), |last| write!(f, "; the last one: {last}"))
            }
            Refusal::Overloaded(what) => write!(f, "too many at once: {what}"),
            Refusal::NotAProbe => {
                f.write_str("a probe must be read-only, and the stack classifies this call as a write")
            }
            Refusal::KeyInDoubt(id) => {
                write!(
                    f,
                    "not sent, since an earlier write with the same conflict key ({id}) may have been applied; find \
                     out about that one before you repeat this one, and settle or forget it in the ledger"
                )
            }
            Refusal::Ledger => f.write_str("the ledger cannot enter the write"),
            Refusal::AnotherConnection => f.write_str("it is for a connection that is gone"),
            Refusal::CursorOfAnotherSession => {
                f.write_str("the cursor is of another session; begin again with the first page")
            }
            Refusal::EffectChanged => f.write_str(
                "the server's annotation, by which the call was taken for harmless, no longer says so",
            ),
        }
    }
}

/// What ended an attempt.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Cause {
    /// The call's deadline passed.
    Deadline,
    /// The attempt took longer than the attempt timeout of a layer.
    AttemptTimeout,
    /// The connection closed.
    Closed(Closure),
    /// No connection could be made; the connector's error, shared by all calls that waited for it.
    ConnectFailed(Arc<ConnectError>),
    /// The service was not ready: its `poll_ready` failed.
    NotReady,
    /// This crate turned the call away.
    Refused(Refusal),
    /// The peer refused it before processing, as far as that evidence goes.
    Evidence(Evidence),
    /// The server's own error.
    Answered(ServerError),
    /// The server answered that an earlier attempt with the same key is still being processed
    /// ([`KeyedAnswer::InFlight`](crate::write_safety::KeyedAnswer::InFlight)).
    InProgress,
    /// The server answered, with more than the size limit, in bytes, allows. The answer is lost.
    AnswerTooLarge {
        /// The limit.
        limit: usize,
    },
    /// The server answered with a success, and its result cannot be read: it is of another kind than what was asked
    /// for.
    AnswerUnread,
    /// A foreign error, in [`CallError::source`](std::error::Error::source).
    Other,
}

impl Cause {
    /// A name for reports, without anything that the peer or the caller supplied.
    pub const fn name(&self) -> &'static str {
        match self {
            Cause::Deadline => "deadline",
            Cause::AttemptTimeout => "attempt_timeout",
            Cause::Closed(_) => "closed",
            Cause::ConnectFailed(_) => "connect_failed",
            Cause::NotReady => "not_ready",
            Cause::Refused(_) => "refused",
            Cause::Evidence(_) => "evidence",
            Cause::Answered(_) => "answered",
            Cause::InProgress => "in_progress",
            Cause::AnswerTooLarge { .. } => "answer_too_large",
            Cause::AnswerUnread => "answer_unread",
            Cause::Other => "other",
        }
    }
}

impl fmt::Display for Cause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Cause::Deadline => f.write_str("the deadline passed"),
            Cause::AttemptTimeout => f.write_str("the attempt timed out"),
            Cause::Closed(closure) => closure.fmt(f),
            Cause::ConnectFailed(error) => write!(f, "cannot connect: {error}"),
            Cause::NotReady => f.write_str("the service was not ready"),
            Cause::Refused(refusal) => refusal.fmt(f),
            Cause::Evidence(evidence) => evidence.fmt(f),
            Cause::Answered(error) => error.fmt(f),
            Cause::InProgress => f.write_str("the server is still processing it"),
            Cause::AnswerTooLarge { limit } => write!(f, "the answer is larger than {limit} bytes"),
            Cause::AnswerUnread => f.write_str("a result that cannot be read"),
            Cause::Other => f.write_str("the service failed"),
        }
    }
}

/// Why no connection could be made.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// The connector failed.
    #[error("{}", crate::error::safe_text(.0.as_ref()).unwrap_or_else(|| "the connector failed".into()))]
    Connector(#[source] BoxError),
    /// It took longer than the connect timeout.
    #[error("no connection within the connect timeout of {0:?}")]
    TimedOut(std::time::Duration),
    /// The connector panicked.
    #[error("the connector panicked")]
    Panicked,
}

impl fmt::Debug for ConnectError {
    /// Without the connector's own error, which may hold secrets; it is the
    /// [`source`](std::error::Error::source).
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectError({:?})", self.to_string())
    }
}

/// What follows from the end of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rule {
    /// Return it to the caller.
    Return,
    /// Provably nothing was sent: hand the call over again, once, after a reconnect where the connection is
    /// gone. Holds for a write too, without a check.
    HandOver,
    /// Attempt it again, if attempts, budget and deadline allow.
    Retry,
    /// A write in doubt: fence, effect check, and only then perhaps a replay.
    Check,
}

/// The table of rules: what follows from an attempt's end.
///
/// `trusted` says whether the caller named the [`Evidence`] that ended a write's attempt in
/// [`WriteSafetyLayer::trust`](crate::WriteSafetyLayer::trust).
///
/// ```
/// use goaround::{Cause, Delivery, Effect, Evidence, Rule, Scope, rule};
///
/// let lost = |effect, delivery| rule(effect, &Cause::Other, Scope::Call, delivery, false);
/// assert_eq!(lost(Effect::ReadOnly, Delivery::Ambiguous), Rule::Retry);
/// assert_eq!(lost(Effect::Write, Delivery::Ambiguous), Rule::Check);
/// assert_eq!(lost(Effect::Write, Delivery::Answered), Rule::Return);
///
/// // 429: a read is retried, a write only if the caller trusts that it was not processed.
/// let cause = Cause::Evidence(Evidence::TooManyRequests);
/// let busy = |effect, trusted| rule(effect, &cause, Scope::Call, Delivery::NotProcessed, trusted);
/// assert_eq!(busy(Effect::ReadOnly, false), Rule::Retry);
/// assert_eq!(busy(Effect::Write, false), Rule::Return);
/// assert_eq!(busy(Effect::Write, true), Rule::Retry);
/// ```
pub fn rule(effect: Effect, cause: &Cause, scope: Scope, delivery: Delivery, trusted: bool) -> Rule {
    match (cause, delivery) {
        // An answer is an answer; time that is up and what this crate refused are final.
        (_, Delivery::Answered) | (Cause::Deadline | Cause::Refused(_), _) => Rule::Return,
        (Cause::Evidence(evidence), _) if evidence.is_final() => Rule::Return,
        (Cause::Evidence(_), Delivery::NotProcessed | Delivery::Ambiguous) if trusted => Rule::Retry,

        (Cause::ConnectFailed(_), _) if effect.is_write() => Rule::Return,
        (Cause::ConnectFailed(_), _) => Rule::Retry,

        // Withdrawn at the attempt timeout, or the connection was gone before the first byte.
        (Cause::AttemptTimeout, Delivery::NotSent) => Rule::HandOver,
        (_, Delivery::NotSent) if scope == Scope::Connection => Rule::HandOver,

        (_, Delivery::NotSent | Delivery::NotProcessed) if effect.is_write() => Rule::Return,
        (_, Delivery::Ambiguous) if effect.is_write() => Rule::Check,
        (_, Delivery::NotSent | Delivery::NotProcessed | Delivery::Ambiguous) => Rule::Retry,
    }
}
