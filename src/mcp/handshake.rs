//! The beginning of a connection: which era the server is of, and the handshake of the older one.

use std::{
    fmt,
    future::{Future, poll_fn},
    pin::{Pin, pin},
    process::ExitStatus,
    task::Poll,
};

use serde_json::{Value, json};
use tokio::time::{sleep, timeout};

use super::{Era, ProtocolVersion, envelope::Envelope, settings::Settings};
use crate::{
    Call, CallError, Cause, Deadline, ServerError,
    connection::{Connection, UnderWay},
    event::{Implementation, Peer},
    jsonrpc::{Client, Request, Response, ResponseFuture},
};

/// The server speaks none of the versions that it was offered; in `data.supported` are those that it does.
const UNSUPPORTED_VERSION: i64 = -32022;

const DISCOVER: &str = "server/discover";
const INITIALIZE: &str = "initialize";

/// Why an MCP handshake failed.
///
/// The server's own words are in the fields and not in the text, since that stands in the errors of all calls that
/// wait for the connection, and a server that refuses a key may repeat it.
#[derive(thiserror::Error)]
#[non_exhaustive]
pub enum HandshakeError {
    /// The server answered with an error.
    #[error("the server refused `{method}` (code {}; its message is in the `HandshakeError`)", error.code)]
    #[non_exhaustive]
    Refused {
        /// What it answered: `initialize`, or `server/discover` where the era is pinned.
        method: &'static str,
        /// The error.
        error: ServerError,
    },
    /// The server speaks no version that is known here, or none of the era that was asked for; those that it
    /// speaks. In the text are those that look like versions of the protocol, and `?` for each other one.
    #[error("no common protocol version: the server speaks {:?}", dates(.0))]
    Version(Vec<String>),
    /// The answer is not what the protocol says.
    #[error("the server's answer to `{method}` is malformed: {what}")]
    #[non_exhaustive]
    Malformed {
        /// What it answered.
        method: &'static str,
        /// In what way.
        what: &'static str,
    },
    /// The connection closed, perhaps since the server's process ended.
    #[error("the connection closed during the handshake{}", ending(.exit.as_ref(), .stderr))]
    Closed {
        /// How the server's process ended, if it did.
        exit: Option<ExitStatus>,
        /// The last lines of its standard error. They may hold anything, and are not in this error's text.
        stderr: Vec<String>,
        /// How the connection did. Not this error's source: its text speaks of the handshake's call and is not to
        /// be taken for the call's that waited for the connection.
        error: CallError,
    },
    /// The call failed in another way.
    #[error("the handshake failed: {}", crate::error::safe_text(.0).unwrap_or_default())]
    Failed(CallError),
    /// The version to offer ([`Stdio::protocol_version`](super::Stdio::protocol_version)) has no handshake.
    #[error("wrong configuration: the protocol version {0} has no `initialize` handshake")]
    NoHandshake(ProtocolVersion),
}

/// How the process ended, and where its last words are.
fn ending(exit: Option<&ExitStatus>, stderr: &[String]) -> String {
    let words = (!stderr.is_empty()).then_some("its stderr is in the `HandshakeError`");
    match (exit, words) {
        (Some(status), Some(words)) => format!(" ({status}; {words})"),
        (Some(status), None) => format!(" ({status})"),
        (None, Some(words)) => format!(" ({words})"),
        (None, None) => String::new(),
    }
}

/// The versions that are dates, as those of the protocol are; what else a server says may be anything.
fn dates(versions: &[String]) -> Vec<&str> {
    let is_date = |version: &str| {
        let fits = |(at, byte): (usize, u8)| match at {
            4 | 7 => byte == b'-',
            _ => byte.is_ascii_digit(),
        };
        version.len() == 10 && version.bytes().enumerate().all(fits)
    };
    versions.iter().map(|version| if is_date(version) { version.as_str() } else { "?" }).collect()
}

impl fmt::Debug for HandshakeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HandshakeError({self})")
    }
}

impl HandshakeError {
    /// Whether the server said so itself, and not the end of the connection.
    pub(super) fn is_answer(&self) -> bool {
        matches!(self, Self::Refused { .. } | Self::Version(_) | Self::Malformed { .. })
    }

    pub(super) async fn of(method: &'static str, error: CallError, client: &Client) -> Self {
        match (error.cause(), error.closure()) {
            (Cause::Answered(answer), _) => Self::Refused { method, error: answer.clone() },
            (_, Some(closure)) => {
                // The process is about to end or has ended, within bounds: that says more than a closed pipe.
                let exit = closure.exited().await.and_then(|exit| exit.status);
                Self::Closed { exit, stderr: Connection::stderr(client), error }
            }
            _ => Self::Failed(error),
        }
    }
}

/// How to begin a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    /// By `server/discover`, and by `initialize` if that says nothing.
    Probe,
    /// By `initialize`. `pinned`: and by nothing else.
    Initialize { pinned: bool },
    /// By `server/discover`, of which is known that the server answers it. `pinned`: and by nothing else.
    Discover { pinned: bool },
}

impl Plan {
    pub(super) fn of(era: Era, known: Option<ProtocolVersion>) -> Self {
        match (era, known.map(ProtocolVersion::has_handshake)) {
            (Era::Initialize, _) => Plan::Initialize { pinned: true },
            (Era::Discover, _) => Plan::Discover { pinned: true },
            (Era::Auto, None) => Plan::Probe,
            (Era::Auto, Some(true)) => Plan::Initialize { pinned: false },
            (Era::Auto, Some(false)) => Plan::Discover { pinned: false },
        }
    }
}

/// What client and server agreed upon.
#[derive(Debug)]
pub(super) struct Agreed {
    pub(super) version: ProtocolVersion,
    pub(super) peer: Peer,
    /// What the server says it can do.
    pub(super) capabilities: Value,
}

/// A beginning that failed, and how to begin with a fresh process instead, if that may help.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: HandshakeError,
    pub(super) instead: Option<Plan>,
}

impl From<HandshakeError> for Failure {
    fn from(error: HandshakeError) -> Self {
        Self { error, instead: None }
    }
}

/// Begins the connection. Without a time limit: the connect as a whole has one.
pub(super) async fn begin(
    client: &Client,
    settings: &Settings,
    plan: Plan,
    under_way: &UnderWay,
) -> Result<Agreed, Failure> {
    settings.validate()?;
    let handshake = Beginning { client, settings, under_way };
    match plan {
        Plan::Probe => handshake.probe().await,
        Plan::Initialize { pinned: true } => Ok(handshake.initialize(settings.offer).await?),
        Plan::Initialize { pinned: false } => match handshake.initialize(settings.offer).await {
            Err(error) if is_unsupported(&error) => handshake.discover_after_refusal(error, None).await,
            result => Ok(result?),
        },
        Plan::Discover { pinned } => {
            let found = handshake.found(handshake.discover(ProtocolVersion::V2026_07_28)?.await).await;
            let followed = handshake.follow(found, !pinned).await;
            // It is known to survive `server/discover`: if it closed, that has other reasons.
            followed.map_err(|failure| failure.error.into())
        }
    }
}

/// What `server/discover` has brought.
enum Found {
    /// The server is of the newer era.
    Modern(Agreed),
    /// It speaks but older versions, this one at best.
    Older(ProtocolVersion),
    /// An answer, and no sign of the newer era.
    NotModern(HandshakeError),
    /// It speaks this version of the newer era.
    Again(ProtocolVersion),
    /// No version is common.
    NoVersion(HandshakeError),
    /// The connection closed, or the like.
    Lost(HandshakeError),
}

struct Beginning<'a> {
    client: &'a Client,
    settings: &'a Settings,
    under_way: &'a UnderWay,
}

impl Beginning<'_> {
    /// `server/discover`, then `initialize`.
    async fn probe(&self) -> Result<Agreed, Failure> {
        let mut probe = pin!(self.discover(ProtocolVersion::V2026_07_28)?);
        match timeout(self.settings.probe, &mut probe).await {
            Ok(answer) => {
                let found = self.found(answer).await;
                self.follow(found, true).await
            }
            Err(_) => self.probe_unanswered(probe).await,
        }
    }

    /// The server may be of the older era and ignore what it does not know. It may also be slow to start; then
    /// both requests are in its pipe, and what it says to the later one counts.
    async fn probe_unanswered(&self, mut probe: Pin<&mut ResponseFuture>) -> Result<Agreed, Failure> {
        let mut early = None;
        let mut patience = None;
        let initialized = {
            let mut initialize = pin!(self.initialize(self.settings.offer));
            let both = poll_fn(|cx| {
                if early.is_none()
                    && let Poll::Ready(answer) = probe.as_mut().poll(cx)
                {
                    patience = answer.is_ok().then(|| Box::pin(sleep(self.settings.probe)));
                    early = Some(answer);
                }
                if let Poll::Ready(initialized) = initialize.as_mut().poll(cx) {
                    return Poll::Ready(Some(initialized));
                }
                match patience.as_mut().map(|patience| patience.as_mut().poll(cx)) {
                    Some(Poll::Ready(())) => Poll::Ready(None),
                    _ => Poll::Pending,
                }
            });
            match both.await {
                Some(initialized) => initialized,
                // A server of the newer era that ignores what it does not know has said what there is to say.
                None => {
                    if let Some(answer) = early.take()
                        && let Found::Modern(agreed) = self.found(answer).await
                    {
                        return Ok(agreed);
                    }
                    initialize.await
                }
            }
        };
        let error = match initialized {
            Ok(agreed) => return Ok(agreed),
            Err(error) => error,
        };
        match (&error, early) {
            (HandshakeError::Closed { .. }, _) => {
                // Some servers end at a request that they do not know.
                let instead = Some(Plan::Initialize { pinned: false });
                Err(Failure { error, instead })
            }
            (_, Some(Ok(answer))) => match self.found(Ok(answer)).await {
                Found::Modern(agreed) => Ok(agreed),
                _ => Err(error.into()),
            },
            (_, None) if is_unsupported(&error) => self.discover_after_refusal(error, Some(probe)).await,
            _ => Err(error.into()),
        }
    }

    /// What follows from what `server/discover` has brought.
    async fn follow(&self, mut found: Found, may_initialize: bool) -> Result<Agreed, Failure> {
        if let Found::Again(version) = found {
            found = self.found(self.discover(version)?.await).await;
        }
        match found {
            Found::Modern(agreed) => Ok(agreed),
            Found::Older(version) if may_initialize => Ok(self.initialize(version).await?),
            Found::NotModern(_) if may_initialize => self.initialize_after_discover().await,
            Found::Lost(error @ HandshakeError::Closed { .. }) if may_initialize => {
                Err(Failure { error, instead: Some(Plan::Initialize { pinned: false }) })
            }
            Found::Older(version) | Found::Again(version) => {
                Err(HandshakeError::Version(vec![version.as_str().to_owned()]).into())
            }
            Found::NotModern(error) | Found::NoVersion(error) | Found::Lost(error) => Err(error.into()),
        }
    }

    /// The server answered `server/discover` with an error, as one of the older era does.
    async fn initialize_after_discover(&self) -> Result<Agreed, Failure> {
        match self.initialize(self.settings.offer).await {
            Ok(agreed) => Ok(agreed),
            Err(error @ HandshakeError::Closed { .. }) => {
                Err(Failure { error, instead: Some(Plan::Initialize { pinned: false }) })
            }
            Err(error) if is_unsupported(&error) => self.discover_after_refusal(error, None).await,
            Err(error) => Err(error.into()),
        }
    }

    /// The server refused `initialize` since it is of the newer era. It has to answer `server/discover` on the
    /// same process, if not on a fresh one.
    async fn discover_after_refusal(
        &self,
        error: HandshakeError,
        asked: Option<Pin<&mut ResponseFuture>>,
    ) -> Result<Agreed, Failure> {
        let patience = self.settings.probe;
        if let Some(asked) = asked
            && let Ok(answer) = timeout(patience, asked).await
            && let Found::Modern(agreed) = self.found(answer).await
        {
            return Ok(agreed);
        }
        let again = self.discover(ProtocolVersion::V2026_07_28)?;
        if let Ok(answer) = timeout(patience, again).await
            && let Found::Modern(agreed) = self.found(answer).await
        {
            return Ok(agreed);
        }
        Err(Failure { error, instead: Some(Plan::Discover { pinned: false }) })
    }

    fn discover(&self, version: ProtocolVersion) -> Result<ResponseFuture, HandshakeError> {
        let request = discover_request(self.settings, version, None).map_err(failed)?;
        self.under_way.asks(DISCOVER);
        Ok(self.client.request(request.deadline(Deadline::Never)))
    }

    async fn found(&self, answer: Result<Response, CallError>) -> Found {
        let answer = match answer {
            Ok(answer) => answer,
            Err(error) => return self.found_error(HandshakeError::of(DISCOVER, error, self.client).await),
        };
        let malformed = |what| Found::NotModern(HandshakeError::Malformed { method: DISCOVER, what });
        let Ok(mut answer) = answer.parse::<Value>() else { return malformed("it is not JSON") };
        let Some(versions) = strings(answer.get("supportedVersions")) else {
            return malformed("it names no protocol versions");
        };
        match newest(&versions) {
            Some(version) if !version.has_handshake() => {
                let info =
                    answer.get("_meta").and_then(|meta| meta.get("io.modelcontextprotocol/serverInfo"));
                let server = implementation(info.or(answer.get("serverInfo")));
                let peer = self.peer(server, version);
                let capabilities = answer.get_mut("capabilities").map(Value::take).unwrap_or_default();
                Found::Modern(Agreed { version, peer, capabilities })
            }
            Some(older) => Found::Older(older),
            None => no_version(&versions),
        }
    }

    fn found_error(&self, error: HandshakeError) -> Found {
        let HandshakeError::Refused { error: answer, .. } = &error else { return Found::Lost(error) };
        if answer.code != UNSUPPORTED_VERSION {
            return Found::NotModern(error);
        }
        let Some(versions) = strings(answer.data.as_ref().and_then(|data| data.get("supported"))) else {
            return Found::NotModern(error);
        };
        match newest(&versions) {
            Some(version) if version.has_handshake() => Found::Older(version),
            Some(version) => Found::Again(version),
            None => no_version(&versions),
        }
    }

    async fn initialize(&self, version: ProtocolVersion) -> Result<Agreed, HandshakeError> {
        let params = json!({
            "protocolVersion": version.as_str(),
            "capabilities": self.settings.capabilities,
            "clientInfo": self.settings.client,
        });
        let request = Request::new(INITIALIZE, params).map_err(failed)?.deadline(Deadline::Never);
        self.under_way.asks(INITIALIZE);
        let answer = match self.client.request(request).await {
            Ok(answer) => answer,
            Err(error) => return Err(HandshakeError::of(INITIALIZE, error, self.client).await),
        };
        let agreed = self.initialized(&answer)?;
        if let Err(error) = self.client.notify("notifications/initialized", ()).await {
            return Err(HandshakeError::of(INITIALIZE, error, self.client).await);
        }
        Ok(agreed)
    }

    fn initialized(&self, answer: &Response) -> Result<Agreed, HandshakeError> {
        let malformed = |what| HandshakeError::Malformed { method: INITIALIZE, what };
        let mut answer: Value = answer.parse().map_err(|_| malformed("it is not JSON"))?;
        let version = answer.get("protocolVersion").and_then(Value::as_str);
        let version = version.ok_or(malformed("it names no protocol version"))?;
        let version = match ProtocolVersion::parse(version) {
            Some(known) if known.has_handshake() => known,
            _ => return Err(HandshakeError::Version(vec![cut(version, 40)])),
        };
        let peer = self.peer(implementation(answer.get("serverInfo")), version);
        let capabilities = answer.get_mut("capabilities").map(Value::take).unwrap_or_default();
        Ok(Agreed { version, peer, capabilities })
    }

    fn peer(&self, server: Option<Implementation>, version: ProtocolVersion) -> Peer {
        let protocol = Some(version.as_str().to_owned());
        Peer { server, client: Some(self.settings.client.clone()), protocol }
    }
}

/// `server/discover` with what every request of that version carries.
pub(super) fn discover_request(
    settings: &Settings,
    version: ProtocolVersion,
    level: Option<&str>,
) -> Result<Request, serde_json::Error> {
    let mut request = Request::new(DISCOVER, ())?;
    request.replace_params(Envelope::new(settings, version, level).around(None));
    Ok(request)
}

fn failed(error: serde_json::Error) -> HandshakeError {
    HandshakeError::Failed(CallError::not_sent(error))
}

fn is_unsupported(error: &HandshakeError) -> bool {
    matches!(error, HandshakeError::Refused { error, .. } if error.code == UNSUPPORTED_VERSION)
}

fn strings(value: Option<&Value>) -> Option<Vec<&str>> {
    value?.as_array()?.iter().map(Value::as_str).collect()
}

/// The newest of them that is known here.
fn newest(versions: &[&str]) -> Option<ProtocolVersion> {
    versions.iter().filter_map(|version| ProtocolVersion::parse(version)).max()
}

fn no_version(versions: &[&str]) -> Found {
    let server = versions.iter().take(16).map(|version| cut(version, 40)).collect();
    Found::NoVersion(HandshakeError::Version(server))
}

/// Who the server is. Not worth a refusal, if it leaves that out.
fn implementation(info: Option<&Value>) -> Option<Implementation> {
    let text = |key| Some(cut(info?.get(key)?.as_str()?, 128));
    Some(Implementation::new(text("name")?, text("version").unwrap_or_default()))
}

/// A server can send what it likes, and this goes into logs.
fn cut(text: &str, chars: usize) -> String {
    text.chars().take(chars).collect()
}
