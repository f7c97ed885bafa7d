//! What an end of a call says: taken apart by type, from what the transport saw and from the SDK's errors.

use std::{
    error::Error as StdError,
    fmt, io, iter,
    sync::Arc,
    time::{Duration, SystemTime},
};

use rmcp::{
    ServiceError,
    model::{ErrorCode, ErrorData},
    service::ClientInitializeError,
    transport::{DynamicTransportError, streamable_http_client::StreamableHttpError},
};

use super::{exchange::Exchange, http::Unresolved, retry_after::retry_after, transport::TransportError};
use crate::{BoxError, CallError, Cause, Closure, Delivery, Evidence, Refusal, Scope, ServerError};

/// What the transport saw of a call that did not end with the server's answer.
pub(super) enum Sight {
    /// Not one byte of it was or will be written.
    NotSent(HttpErrorKind, Option<Reason>),
    /// No connection could be made for the last of several attempts, maybe.
    Unconnected(Option<Reason>),
    /// Nor was it, or will be, since the server has taken back the annotation by which it was taken for harmless.
    EffectChanged,
    /// Nor was it, or will be, since its time was up before its turn came.
    Overdue(CallError),
    /// A refusal, and how long the server asks to wait.
    Evidence(Evidence, Option<Duration>, Option<u16>),
    /// 401, and the credentials are others now: worth a repetition, if the call may be repeated.
    Refreshed,
    /// The server answered, with more than that many bytes.
    TooLarge(usize),
    /// Something that says nothing of what became of the call.
    Odd(HttpErrorKind, Option<u16>),
    /// The session is gone, after it had accepted the call.
    SessionLost(Closure),
}

impl Sight {
    /// Whether what ended the call is likely to have ended others: a server or its connection that is gone,
    /// credentials that have run out.
    fn may_be_shared(&self) -> bool {
        match self {
            Sight::NotSent(kind, _) => *kind != HttpErrorKind::WrongId,
            Sight::Refreshed => true,
            Sight::Odd(kind, _) => matches!(
                kind,
                HttpErrorKind::NoResponse | HttpErrorKind::BodyLost | HttpErrorKind::StreamEnded
            ),
            _ => false,
        }
    }
}

impl Sight {
    /// The same as an error, if it is one of HTTP.
    pub(super) fn http(self) -> Option<HttpError> {
        Some(match self {
            Sight::NotSent(kind, reason) => {
                HttpError { reason, is_unsent: true, ..HttpError::new(kind, None) }
            }
            Sight::Unconnected(reason) => {
                HttpError { reason, ..HttpError::new(HttpErrorKind::Connect, None) }
            }
            Sight::Evidence(evidence, _, status) => {
                let kind = match evidence {
                    Evidence::SessionUnknown => HttpErrorKind::SessionUnknown,
                    Evidence::Unauthorized | Evidence::Forbidden => HttpErrorKind::Unauthorized,
                    _ => HttpErrorKind::Status,
                };
                HttpError::new(kind, status)
            }
            Sight::Refreshed => HttpError::new(HttpErrorKind::Unauthorized, Some(401)),
            Sight::Odd(kind, status) => HttpError::new(kind, status),
            Sight::SessionLost(_) => HttpError::new(HttpErrorKind::SessionUnknown, Some(404)),
            Sight::EffectChanged | Sight::Overdue(_) | Sight::TooLarge(_) => return None,
        })
    }
}

/// Why no connection could be made, or why it broke.
#[derive(Clone, Copy, Debug)]
pub(super) enum Reason {
    Unresolved,
    NoTls,
    Io(io::ErrorKind),
}

impl Reason {
    /// The reason of an HTTP library's error, by the types of its sources.
    pub(super) fn of(error: &(dyn StdError + 'static)) -> Option<Self> {
        iter::successors(Some(error), |&error| error.source()).find_map(|error| {
            if error.is::<Unresolved>() {
                return Some(Reason::Unresolved);
            }
            error.downcast_ref::<io::Error>().and_then(Self::of_io)
        })
    }

    /// Of an error of the network. Others are wrapped in such errors too, and their kinds say nothing here.
    fn of_io(error: &io::Error) -> Option<Self> {
        use io::ErrorKind::*;
        let kind = error.kind();
        let is_told = matches!(
            kind,
            ConnectionRefused
                | ConnectionReset
                | ConnectionAborted
                | BrokenPipe
                | HostUnreachable
                | NetworkUnreachable
                | NetworkDown
                | AddrNotAvailable
                | PermissionDenied
                | TimedOut
        );
        is_told.then_some(Reason::Io(kind))
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Reason::Unresolved => f.write_str("its host's name cannot be resolved"),
            Reason::NoTls => f.write_str(
                "this build has no TLS, which `https` needs: the features `reqwest` (rustls) and `reqwest-native-tls` of \
                 rmcp give it",
            ),
            Reason::Io(kind) => kind.fmt(f),
        }
    }
}

/// What was wrong with how an HTTP server answered a call or a handshake, or with the way to it. It is among the
/// [sources](std::error::Error::source) of the [`CallError`], found by [`get_ref`](CallError::get_ref), and its own
/// source is the SDK's error. Its text says nothing that the server or the caller supplied.
pub struct HttpError {
    kind: HttpErrorKind,
    status: Option<u16>,
    reason: Option<Reason>,
    /// Whether nothing of the request was sent.
    is_unsent: bool,
    source: Option<Sdks>,
}

/// The SDK's error.
enum Sdks {
    OfCall(Box<ServiceError>),
    OfHandshake(Arc<ClientInitializeError>),
}

/// See [`HttpError::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum HttpErrorKind {
    /// No connection to the server could be made.
    Connect,
    /// The request could not be sent, or no response came.
    NoResponse,
    /// The response's body was cut or could not be read.
    BodyLost,
    /// The response's stream ended without an answer, and could not be resumed.
    StreamEnded,
    /// A status that says that the call failed.
    Status,
    /// A redirect: it is not followed, since it would take the session and the credentials somewhere else. Also what
    /// came of one that a client of the caller's has followed.
    Redirect,
    /// The server accepted the request and will not answer it (202 or 204).
    NoAnswer,
    /// What looks like the answer has another id, or none.
    WrongId,
    /// The response is no JSON-RPC message.
    NotJsonRpc,
    /// An event of the response's stream is above the limit, and is not known to be the answer.
    EventTooLarge,
    /// The response is neither JSON nor a stream of events.
    ContentType,
    /// The credentials were refused.
    Unauthorized,
    /// The server does not know the session.
    SessionUnknown,
}

impl HttpErrorKind {
    const fn text(self) -> &'static str {
        match self {
            Self::Connect => "cannot connect to the server",
            Self::NoResponse => "the connection broke before a response came",
            Self::BodyLost => "the response's body was cut",
            Self::StreamEnded => "the response's stream ended without an answer",
            Self::Status => "the server answered with an error status",
            Self::Redirect => "the server redirects; use the address that it names",
            Self::NoAnswer => "the server accepted the request without answering it",
            Self::WrongId => "the server answered with an id that is not the request's",
            Self::NotJsonRpc => "the response is no JSON-RPC message",
            Self::EventTooLarge => "an event of the response's stream is above the limit, and no answer",
            Self::ContentType => "the response is neither JSON nor a stream of events",
            Self::Unauthorized => "the credentials were refused",
            Self::SessionUnknown => "the server does not know the session",
        }
    }
}

impl HttpError {
    pub(super) fn new(kind: HttpErrorKind, status: Option<u16>) -> Self {
        Self { kind, status, reason: None, is_unsent: false, source: None }
    }

    /// There is no TLS in this build.
    pub(super) fn no_tls() -> Self {
        Self { reason: Some(Reason::NoTls), ..Self::new(HttpErrorKind::Connect, None) }
    }

    pub(super) fn caused_by(mut self, source: Option<ServiceError>) -> Self {
        self.source = source.map(|source| Sdks::OfCall(Box::new(source)));
        self
    }

    pub(super) fn of_handshake(mut self, source: Arc<ClientInitializeError>) -> Self {
        self.source = Some(Sdks::OfHandshake(source));
        self
    }

    /// What was wrong.
    pub fn kind(&self) -> HttpErrorKind {
        self.kind
    }

    /// The response's status, where there was one and it is the reason.
    pub fn status(&self) -> Option<u16> {
        self.status
    }

    /// The SDK's error of the call, where the SDK had one.
    pub fn into_service_error(self) -> Option<ServiceError> {
        match self.source {
            Some(Sdks::OfCall(source)) => Some(*source),
            _ => None,
        }
    }
}

impl fmt::Debug for HttpError {
    /// Without the SDK's error, which may hold what the server said.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HttpError")
            .field("kind", &self.kind)
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl fmt::Display for HttpError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.kind {
            HttpErrorKind::NoResponse if self.is_unsent => "the connection broke before the request was sent",
            HttpErrorKind::WrongId if self.is_unsent => "the server answered before the request was sent",
            kind => kind.text(),
        })?;
        if let Some(reason) = &self.reason {
            write!(f, ": {reason}")?;
        }
        self.status.map_or(Ok(()), |status| write!(f, " (HTTP {status})"))
    }
}

impl StdError for HttpError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        Some(match self.source.as_ref()? {
            Sdks::OfCall(source) => &**source,
            Sdks::OfHandshake(source) => &**source,
        })
    }
}

/// The text of this module's errors, which hold no secret.
pub(crate) fn safe_text(error: &(dyn StdError + 'static)) -> Option<String> {
    if let Some(error) = error.downcast_ref::<HttpError>() {
        return Some(error.to_string());
    }
    Some(error.downcast_ref::<super::InitializeError>()?.to_string())
}

/// What a call's end by the SDK's error says, after what the transport saw of it.
///
/// `bytes` says that the connection is one stream of bytes, which an error of the transport ends for all. Says too
/// whether the call was lost by something that others may have been lost by.
pub(super) fn judge(error: ServiceError, exchange: &Exchange, bytes: bool) -> (CallError, bool) {
    let mut is_lost = false;
    let judged = match exchange.take_sight() {
        Some(Sight::Overdue(overdue)) => exchange.hand_back(overdue),
        Some(sight) => {
            is_lost = sight.may_be_shared();
            seen(sight, Some(error))
        }
        None => match error {
            ServiceError::McpError(data) if is_lost_with_its_session(&data) => {
                CallError::ambiguous(ServiceError::McpError(data))
            }
            ServiceError::McpError(data) => CallError::server(server_error(data)),
            ServiceError::TransportSend(error) => return (unsent(error, exchange, bytes), false),
            // The response's stream has ended. A connection that has ended says so by dropping the call.
            ServiceError::TransportClosed => {
                let source = HttpError::new(HttpErrorKind::StreamEnded, None);
                CallError::ambiguous(source.caused_by(Some(ServiceError::TransportClosed)))
            }
            other => CallError::ambiguous(other),
        },
    };
    (exchange.named(judged), is_lost)
}

/// What the transport's own word says.
pub(super) fn seen(sight: Sight, error: Option<ServiceError>) -> CallError {
    match sight {
        Sight::EffectChanged => CallError::refused(Refusal::EffectChanged),
        Sight::Overdue(overdue) => overdue,
        Sight::Evidence(evidence, wait, status) => {
            let judged = match Sight::Evidence(evidence, wait, status).http() {
                Some(source) => CallError::evidence(evidence, source.caused_by(error)),
                None => CallError::of_evidence(evidence),
            };
            match wait {
                Some(wait) => judged.after(wait),
                None => judged,
            }
        }
        Sight::Refreshed => {
            let source = HttpError::new(HttpErrorKind::Unauthorized, Some(401)).caused_by(error);
            CallError::not_processed(source).note("the credentials were refreshed")
        }
        Sight::TooLarge(limit) => {
            CallError::new(Cause::AnswerTooLarge { limit }, Scope::Call, Some(Delivery::Answered))
        }
        sight @ (Sight::NotSent(..) | Sight::Unconnected(_) | Sight::Odd(..)) => {
            let is_unsent = matches!(sight, Sight::NotSent(..));
            let source = sight.http().map(|source| source.caused_by(error));
            let source: BoxError = source.map_or_else(|| "the transport failed".into(), Into::into);
            if is_unsent { CallError::not_sent(source) } else { CallError::ambiguous(source) }
        }
        Sight::SessionLost(closure) => CallError::of_closure(closure, Delivery::Ambiguous)
            .caused_by(HttpError::new(HttpErrorKind::SessionUnknown, Some(404)).caused_by(error)),
    }
}

/// The SDK's HTTP transport, when it makes a session anew by itself, tells the calls that this cost in the words
/// of a server, and marks them by nothing else. A server that really answers so is believed to have lost the call,
/// which does no harm. Our own HTTP transport never does that, but [`Connector::new`](super::Connector::new) may
/// be given one that does.
fn is_lost_with_its_session(error: &ErrorData) -> bool {
    error.code == ErrorCode::INTERNAL_ERROR
        && error.data.is_none()
        && error.message == "streamable HTTP session was re-initialized before the response arrived"
}

fn server_error(data: ErrorData) -> ServerError {
    let error = ServerError::new(i64::from(data.code.0), data.message);
    match data.data {
        Some(data) => error.with_data(data),
        None => error,
    }
}

/// The same for the SDK, whose codes are smaller.
pub(super) fn error_data(error: &ServerError) -> ErrorData {
    let code = i32::try_from(error.code).unwrap_or(ErrorCode::INTERNAL_ERROR.0);
    ErrorData::new(ErrorCode(code), error.message.clone(), error.data.clone())
}

/// A transport that is not ours failed to send.
fn unsent(error: DynamicTransportError, exchange: &Exchange, bytes: bool) -> CallError {
    let Some(of) = error.error.downcast_ref::<TransportError>() else {
        return exchange.named(CallError::ambiguous(ServiceError::TransportSend(error)));
    };
    if of.withdrawn {
        return exchange.hand_back(CallError::attempt_timeout(Delivery::NotSent));
    }
    let source = of.source.as_deref();
    if let Some(sight) = source.and_then(foreign_http) {
        return exchange.named(seen(sight, Some(ServiceError::TransportSend(error))));
    }
    let io = source.and_then(|source| source.downcast_ref::<std::io::Error>());
    // Others than our own pipe have the frame from the beginning, and say so too of one that was lost half-way.
    let never_sent =
        io.is_some_and(|io| io.kind() == std::io::ErrorKind::NotConnected) && exchange.frame.withdraw();
    // What is no error of a stream of bytes may be one of this call's alone, as over HTTP.
    let judged = match (never_sent, bytes && io.is_some()) {
        // The writer was gone before.
        (true, _) => {
            let judged = CallError::not_sent(ServiceError::TransportSend(error)).connection_lost();
            return exchange.hand_back(judged);
        }
        (false, true) => CallError::closed(ServiceError::TransportSend(error)),
        (false, false) => CallError::ambiguous(ServiceError::TransportSend(error)),
    };
    exchange.named(judged)
}

/// Whether what a transport failed by is of one HTTP request alone. Where nobody is there it is not.
pub(super) fn of_one_http_request(error: &DynamicTransportError) -> bool {
    let of = error.error.downcast_ref::<TransportError>();
    let source = of.and_then(|of| of.source.as_deref());
    let http = source.and_then(|source| source.downcast_ref::<StreamableHttpError<reqwest::Error>>());
    match http {
        Some(StreamableHttpError::Client(error)) => !error.is_connect(),
        Some(StreamableHttpError::TransportChannelClosed | StreamableHttpError::SessionExpired) | None => {
            false
        }
        Some(_) => true,
    }
}

/// What was wrong with the HTTP that a handshake or the like went over, as far as the SDK's error tells.
pub(super) fn http_error(error: &DynamicTransportError) -> Option<HttpError> {
    let of = error.error.downcast_ref::<TransportError>()?;
    foreign_http(of.source.as_deref()?)?.http()
}

/// What the SDK's own HTTP transport says, where the user brings it.
fn foreign_http(error: &(dyn StdError + Send + Sync + 'static)) -> Option<Sight> {
    let error = error.downcast_ref::<StreamableHttpError<reqwest::Error>>()?;
    Some(match error {
        // The last of several attempts, maybe: it follows redirects, and sends again what met a lost session.
        StreamableHttpError::Client(error) if error.is_connect() => Sight::Unconnected(Reason::of(error)),
        StreamableHttpError::Client(error) if error.is_decode() || error.is_body() => {
            Sight::Odd(HttpErrorKind::BodyLost, None)
        }
        StreamableHttpError::Client(_) | StreamableHttpError::SessionRecoveryTimeout => {
            Sight::Odd(HttpErrorKind::NoResponse, None)
        }
        StreamableHttpError::HttpStatus(status) => {
            let wait = status.retry_after.as_deref().and_then(|value| retry_after(value, SystemTime::now()));
            of_status(status.status, wait)
        }
        StreamableHttpError::SessionExpired => Sight::Evidence(Evidence::SessionUnknown, None, Some(404)),
        StreamableHttpError::AuthRequired(_) => Sight::Evidence(Evidence::Unauthorized, None, Some(401)),
        StreamableHttpError::InsufficientScope(_) => Sight::Evidence(Evidence::Forbidden, None, Some(403)),
        StreamableHttpError::ResponseBodyTooLarge { max_size } => Sight::TooLarge(*max_size),
        StreamableHttpError::UnexpectedContentType(_) => Sight::Odd(HttpErrorKind::ContentType, None),
        StreamableHttpError::UnexpectedServerResponse(_) => Sight::Odd(HttpErrorKind::NotJsonRpc, None),
        _ => return None,
    })
}

/// What a status says that no answer came with.
pub(super) fn of_status(status: u16, wait: Option<Duration>) -> Sight {
    let evidence = match status {
        401 => Evidence::Unauthorized,
        403 => Evidence::Forbidden,
        408 => Evidence::RequestTimeout,
        425 => Evidence::TooEarly,
        429 => Evidence::TooManyRequests,
        503 => Evidence::Unavailable,
        300..=399 => return Sight::Odd(HttpErrorKind::Redirect, Some(status)),
        _ => return Sight::Odd(HttpErrorKind::Status, Some(status)),
    };
    Sight::Evidence(evidence, wait, Some(status))
}

/// Keeps signatures that have the SDK's error: an answer is what it is there, unless an earlier attempt
/// [may have landed](CallError::may_have_landed). That and everything else is a
/// [`TransportSend`](ServiceError::TransportSend) with the `CallError` inside. The SDK's text comes first there
/// ("Transport send error: …"); what is known follows it, and begins the text of the `CallError`.
impl From<CallError> for ServiceError {
    fn from(error: CallError) -> Self {
        // What is known of the rest must survive: the SDK's own errors cannot say it.
        let error = match error.into_answer::<ServiceError>() {
            Ok(own) => return own,
            Err(error) => error,
        };
        if let Some(answer) = error.answer().filter(|_| !error.may_have_landed()) {
            return ServiceError::McpError(error_data(answer));
        }
        ServiceError::TransportSend(DynamicTransportError::from_parts(
            "goaround",
            std::any::TypeId::of::<CallError>(),
            Box::new(error),
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Attempt, Effect};

    #[test]
    fn an_answer_that_an_earlier_attempt_may_be_the_reason_of_keeps_that_in_the_sdks_error() {
        let own = || CallError::server(ServerError::new(-32000, "exists"));
        let sdks = || CallError::answered(ServiceError::UnexpectedResponse);
        let of_write = |error: CallError| error.of_call("tools/call", Effect::Write).with_attempt(None);
        assert!(matches!(of_write(own()).into(), ServiceError::McpError(_)));
        assert!(matches!(of_write(sdks()).into(), ServiceError::UnexpectedResponse));
        for error in [own(), sdks()] {
            let error = of_write(error).after_attempts(vec![Attempt::unanswered("closed")]);
            let ServiceError::TransportSend(error) = ServiceError::from(error) else { panic!() };
            assert!(error.error.downcast::<CallError>().unwrap().may_have_landed());
        }
    }
}
