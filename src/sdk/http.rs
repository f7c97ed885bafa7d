//! The HTTP client under the SDK's Streamable HTTP transport. Only here can be seen what a server really answered:
//! the transport above drops answers that it cannot match, and folds statuses into texts.

use std::{
    collections::HashMap,
    fmt, io,
    net::{IpAddr, SocketAddr, ToSocketAddrs},
    panic::AssertUnwindSafe,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use bytes::Bytes;
use futures_util::{
    FutureExt,
    stream::{BoxStream, StreamExt},
};
use http::{
    HeaderMap, HeaderName, HeaderValue, StatusCode,
    header::{ACCEPT, CONTENT_TYPE, RETRY_AFTER, WWW_AUTHENTICATE},
};
use http_body::{Body, Frame, SizeHint};
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use rmcp::{
    model::{
        ClientJsonRpcMessage, ClientNotification, ClientRequest, ErrorCode, ErrorData, RequestId,
        ServerJsonRpcMessage,
    },
    transport::streamable_http_client::{
        AuthRequiredError, HttpStatusError, InsufficientScopeError, SseError, StreamableHttpClient,
        StreamableHttpClientTransport, StreamableHttpClientTransportConfig, StreamableHttpError,
        StreamableHttpPostResponse, StreamableHttpResponseLimits,
    },
};
use sse_stream::Sse;
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};

use super::{
    connection::{CANCEL, Inner, SESSION_LOST},
    evidence::{HttpError, HttpErrorKind, Reason, Sight, of_status},
    exchange::Exchange,
    retry_after::retry_after,
    sse::{Event, Parser},
    transport::{Envelope, is_object, seen_elsewhere},
};
use crate::{
    BoxError, Effect,
    call::effect_of,
    connection::BoxFuture,
    jsonrpc::{Said, begins_an_answer},
    wakers::quietly,
};

const SESSION_ID: HeaderName = HeaderName::from_static("mcp-session-id");
const METHOD: HeaderName = HeaderName::from_static("mcp-method");
const LAST_EVENT_ID: HeaderName = HeaderName::from_static("last-event-id");
const JSON: &str = "application/json";
const EVENTS: &str = "text/event-stream";
const BOTH: &str = "application/json, text/event-stream";
/// How many requests may be on their way at once, unless the caller says so.
const MAX_POSTS: usize = 1024;
/// How long the caller's function may take to get other credentials: all that were refused wait for it.
const REFRESH: Duration = Duration::from_secs(120);
/// How long a session may take to answer whether it is there.
const EXAMINE: Duration = Duration::from_secs(5);
/// Up to how many bytes of that answer are read.
const EXAMINED: usize = 64 << 10;
/// After how long a response stream is resumed whose server does not say; then twice as long each time, up to that.
const RESUME: Duration = Duration::from_millis(500);
const RESUME_AT_MOST: Duration = Duration::from_secs(30);
/// The longest that a server may ask to wait before it.
const RESUME_AS_ASKED: Duration = Duration::from_secs(600);
/// Up to how many bytes a request is taken for one that any connection's buffers let through at once.
const SMALL: usize = 8 << 10;
/// How long the standalone stream waits at most before it is asked for again.
const LISTEN_AT_MOST: Duration = Duration::from_secs(60);

type Failure = StreamableHttpError<reqwest::Error>;
type Refresh = Arc<dyn Fn(Unauthorized) -> BoxFuture<Result<String, BoxError>> + Send + Sync>;

// ===== impl Http =====

/// Where an HTTP server is, and how to talk to it: an address, or the SDK's own configuration, by `into()`.
///
/// ```
/// use goaround::sdk::{Connector, Http};
/// use rmcp::transport::streamable_http_client::StreamableHttpClientTransportConfig;
///
/// let config = StreamableHttpClientTransportConfig::with_uri("http://localhost:8000/mcp").auth_header("token");
/// let _connector = Connector::http((), Http::from(config).resumptions(2));
/// let _connector = Connector::http((), "http://localhost:8000/mcp");
/// ```
#[derive(Clone)]
pub struct Http {
    config: StreamableHttpClientTransportConfig,
    client: Option<reqwest::Client>,
    resumptions: usize,
    credentials: Arc<Credentials>,
    refresh: Option<Refresh>,
}

impl Http {
    /// The server at that address.
    pub fn new(url: impl Into<Arc<str>>) -> Self {
        StreamableHttpClientTransportConfig::with_uri(url).into()
    }

    /// The HTTP client to use. Without one, connections are not kept for reuse, as in the SDK.
    ///
    /// Of such a client less is known of when a request's last byte has left it, which a
    /// [quarantine](crate::WriteSafetyLayer::quarantine) counts from: see [the module](crate::sdk#what-counts-as-sent).
    ///
    /// A client that retries by itself makes attempts that nobody counts, and one that follows redirects takes the
    /// session and the credentials along: switch both off (`reqwest::redirect::Policy::none()`). A timeout of the
    /// client's ends long calls; the stack's deadlines are the better place.
    #[must_use]
    pub fn client(mut self, client: reqwest::Client) -> Self {
        self.client = Some(client);
        self
    }

    /// How often one response stream may be resumed by `Last-Event-ID` (versions up to 2025-11-25): by default 8, 0
    /// for never. A resumption belongs to the attempt whose stream it is, and ends with it.
    #[must_use]
    pub fn resumptions(mut self, times: usize) -> Self {
        self.resumptions = times;
        self
    }

    pub(super) fn set_refresh(&mut self, refresh: Refresh) {
        self.refresh = Some(refresh);
    }

    pub(super) fn validate(&self) -> Result<(), BoxError> {
        match reqwest::Url::parse(&self.config.uri) {
            Ok(url) if matches!(url.scheme(), "http" | "https") && url.has_host() => self.has_its_tls(),
            _ => Err("the server's address is no http or https URL".into()),
        }
    }
}

impl Http {
    /// Whether the client of this module can speak to the server. Of a client of the caller's nobody knows.
    fn has_its_tls(&self) -> Result<(), BoxError> {
        match self.client.is_none() && is_https(&self.config.uri) && has_tls() == Some(false) {
            true => Err(HttpError::no_tls().into()),
            false => Ok(()),
        }
    }
}

impl From<StreamableHttpClientTransportConfig> for Http {
    fn from(config: StreamableHttpClientTransportConfig) -> Self {
        let credentials = Arc::new(Credentials::new(config.auth_header.clone()));
        Self { config, client: None, resumptions: 8, credentials, refresh: None }
    }
}

impl From<&str> for Http {
    fn from(url: &str) -> Self {
        Self::new(url)
    }
}

impl From<String> for Http {
    fn from(url: String) -> Self {
        Self::new(url)
    }
}

impl From<Arc<str>> for Http {
    fn from(url: Arc<str>) -> Self {
        Self::new(url)
    }
}

impl fmt::Debug for Http {
    // An address may hold secrets, and headers do.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Http").field("resumptions", &self.resumptions).finish_non_exhaustive()
    }
}

/// The server has refused the credentials.
#[derive(Clone)]
pub struct Unauthorized {
    challenge: Option<String>,
}

impl Unauthorized {
    /// What the server says of how to get others (`WWW-Authenticate`).
    pub fn challenge(&self) -> Option<&str> {
        self.challenge.as_deref()
    }
}

impl fmt::Debug for Unauthorized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Unauthorized").finish_non_exhaustive()
    }
}

/// The SDK's transport over our client.
pub(super) fn transport(
    http: &Http,
    inner: Arc<Inner>,
) -> Result<StreamableHttpClientTransport<Client>, BoxError> {
    http.has_its_tls()?;
    let client = match &http.client {
        Some(client) => client.clone(),
        // A redirect is an error that says so. Idle connections are not kept: the SDK found that to stall.
        None => reqwest::Client::builder()
            .pool_max_idle_per_host(0)
            .redirect(reqwest::redirect::Policy::none())
            .dns_resolver(Names)
            .build()?,
    };
    // What was sent by the SDK a second time nobody would count.
    let mut config = http.config.clone().reinit_on_expired_session(false);
    config.auth_header = None;
    config.retry_config = Arc::new(Listening);
    // Sixteen calls that take long would keep the seventeenth waiting, and with it the question whether the server
    // is there. Who limits them on purpose says another number.
    if config.max_concurrent_requests
        == StreamableHttpClientTransportConfig::default().max_concurrent_requests
    {
        config.max_concurrent_requests = MAX_POSTS;
    }
    let client = Client {
        client,
        shared: Arc::new(Shared {
            inner,
            resumptions: http.resumptions,
            credentials: Arc::clone(&http.credentials),
            refresh: http.refresh.clone(),
            wire: Wire::new(&http.config.uri, http.client.is_none()),
            pings: Pings::default(),
        }),
    };
    Ok(StreamableHttpClientTransport::with_client(client, config))
}

fn is_https(uri: &str) -> bool {
    uri.trim_start().get(..6).is_some_and(|scheme| scheme.eq_ignore_ascii_case("https:"))
}

/// Whether this build's HTTP library speaks TLS, which is a feature of that library; `None` if it does not tell. One
/// that does not turns an `https` address away before it looks for the host, so that no network is asked.
fn has_tls() -> Option<bool> {
    static KNOWN: OnceLock<Option<bool>> = OnceLock::new();
    *KNOWN.get_or_init(|| {
        let was_asked = Arc::new(AtomicBool::new(false));
        let names = Nobody(Arc::clone(&was_asked));
        let asking = || {
            let client = reqwest::Client::builder().no_proxy().dns_resolver(names).build().ok()?;
            client.get("https://goaround.invalid/").send().now_or_never()
        };
        // A TLS library that lacks a part of itself panics.
        let ended = std::panic::catch_unwind(AssertUnwindSafe(asking)).ok()?;
        match ended {
            _ if was_asked.load(Ordering::Relaxed) => Some(true),
            Some(Err(error)) if error.is_connect() => Some(false),
            _ => None,
        }
    })
}

/// Resolves no name, and tells that it was asked to.
struct Nobody(Arc<AtomicBool>);

impl Resolve for Nobody {
    fn resolve(&self, _: Name) -> Resolving {
        self.0.store(true, Ordering::Relaxed);
        Box::pin(std::future::ready(Err(Unresolved(io::ErrorKind::NotFound.into()).into())))
    }
}

/// Resolves names as the HTTP library would, with an error that is known when it comes back.
struct Names;

impl Resolve for Names {
    fn resolve(&self, name: Name) -> Resolving {
        let host = name.as_str().to_owned();
        Box::pin(async move {
            let found = tokio::task::spawn_blocking(move || (host.as_str(), 0).to_socket_addrs()).await?;
            Ok(Box::new(found.map_err(Unresolved)?) as Addrs)
        })
    }
}

/// A host's name could not be resolved.
#[derive(Debug, thiserror::Error)]
#[error("the host's name cannot be resolved")]
pub(super) struct Unresolved(#[source] io::Error);

/// When the standalone stream of a session is asked for again. Response streams do not come here.
#[derive(Debug)]
struct Listening;

impl rmcp::transport::common::client_side_sse::SseRetryPolicy for Listening {
    fn retry(&self, times: usize) -> Option<Duration> {
        Some(backoff(Duration::from_secs(1), times, LISTEN_AT_MOST))
    }
}

fn backoff(first: Duration, times: usize, at_most: Duration) -> Duration {
    let factor = u32::try_from(times).ok().and_then(|times| 2_u32.checked_pow(times)).unwrap_or(u32::MAX);
    first.saturating_mul(factor).min(at_most)
}

// ===== impl Credentials =====

/// The bearer token, refreshed once for all calls that it failed.
struct Credentials {
    state: Mutex<Bearer>,
}

struct Bearer {
    token: Token,
    /// The refresh that is under way, and what came of it: whether there is another token.
    refreshing: Option<watch::Receiver<Option<bool>>>,
}

#[derive(Clone)]
struct Token {
    value: Option<String>,
    number: u64,
    /// It came from a refresh and has not been accepted yet.
    is_unproved: bool,
}

impl Credentials {
    fn new(value: Option<String>) -> Self {
        let token = Token { value, number: 0, is_unproved: false };
        Self { state: Mutex::new(Bearer { token, refreshing: None }) }
    }

    fn current(&self) -> Token {
        self.lock().token.clone()
    }

    /// The token of that number was accepted.
    fn accepted(&self, number: u64) {
        let token = &mut self.lock().token;
        if token.number == number {
            token.is_unproved = false;
        }
    }

    /// The token was refused: gets another one, once for all that wait, whoever of them gives up meanwhile. `false`:
    /// there is no way, or the one that was got last has been refused in turn.
    async fn refresh(
        self: &Arc<Self>,
        refused: &Token,
        refresh: &Refresh,
        challenge: Option<String>,
    ) -> bool {
        let mut refreshing = {
            let mut state = self.lock();
            if state.token.number != refused.number {
                return true;
            }
            // One whose runtime has ended meanwhile never says what came of it.
            let under_way = state.refreshing.clone().filter(|refreshing| refreshing.has_changed().is_ok());
            match under_way {
                Some(refreshing) => refreshing,
                None if std::mem::take(&mut state.token.is_unproved) => return false,
                None => {
                    let (tell, told) = watch::channel(None);
                    state.refreshing = Some(told.clone());
                    tokio::spawn(Arc::clone(self).renew(Arc::clone(refresh), challenge, tell));
                    told
                }
            }
        };
        quietly(refreshing.wait_for(Option::is_some)).await.is_ok_and(|told| *told == Some(true))
    }

    /// Asks for another token. A task of its own: what is begun may be good for one use, and must not end with the
    /// deadline of a call.
    async fn renew(
        self: Arc<Self>,
        refresh: Refresh,
        challenge: Option<String>,
        tell: watch::Sender<Option<bool>>,
    ) {
        let asked = async { refresh(Unauthorized { challenge }).await };
        let fresh = match AssertUnwindSafe(timeout(REFRESH, asked)).catch_unwind().await {
            Ok(Ok(Ok(fresh))) => Some(fresh),
            _ => None,
        };
        let are_others = fresh.is_some();
        {
            let mut state = self.lock();
            state.refreshing = None;
            if let Some(fresh) = fresh {
                let number = state.token.number + 1;
                state.token = Token { value: Some(fresh), number, is_unproved: true };
            }
        }
        tell.send_replace(Some(are_others));
    }

    fn lock(&self) -> MutexGuard<'_, Bearer> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// ===== impl Client =====

/// The HTTP client of one connection.
#[derive(Clone)]
pub(super) struct Client {
    client: reqwest::Client,
    shared: Arc<Shared>,
}

struct Shared {
    inner: Arc<Inner>,
    resumptions: usize,
    credentials: Arc<Credentials>,
    refresh: Option<Refresh>,
    wire: Wire,
    pings: Pings,
}

/// The questions whether the session is there, one at a time: how many have begun, and the number of the last one that
/// came to its end, with whether the session was gone.
#[derive(Default)]
struct Pings {
    begun: AtomicU64,
    last: tokio::sync::Mutex<(u64, bool)>,
}

/// What all requests of one exchange with the server have in common.
#[derive(Clone)]
struct Line {
    uri: Arc<str>,
    session: Option<Arc<str>>,
    headers: HashMap<HeaderName, HeaderValue>,
    limits: StreamableHttpResponseLimits,
}

impl Line {
    /// The head of a `ping` in place of the request's: without what that says of its own method, tool and arguments.
    fn of_a_ping(&self) -> Self {
        let mut line = self.clone();
        line.headers
            .retain(|name, _| !["mcp-name", "mcp-param-"].iter().any(|of| name.as_str().starts_with(of)));
        if let Some(method) = line.headers.get_mut(&METHOD) {
            *method = HeaderValue::from_static("ping");
        }
        line
    }

    /// About how many bytes the head of a request has.
    fn size(&self, token: &Token) -> usize {
        const REST: usize = 512;
        let headers = self.headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4);
        let session = self.session.as_ref().map_or(0, |session| session.len());
        let token = token.value.as_ref().map_or(0, String::len);
        REST + self.uri.len() + session + token + headers.sum::<usize>()
    }
}

/// What is posted.
struct Letter {
    body: Bytes,
    exchange: Option<Arc<Exchange>>,
    /// The request's id; `None` for what no answer is expected to.
    id: Option<RequestId>,
    /// The handshake's own, which the SDK examines itself.
    is_handshake: bool,
    is_discover: bool,
    /// The connection, which is told what was seen of a letter that is no call.
    inner: Arc<Inner>,
}

impl Letter {
    fn of(message: &ClientJsonRpcMessage, inner: &Arc<Inner>) -> Result<Self, Failure> {
        let body = serde_json::to_vec(message)?.into();
        let (id, is_handshake, is_discover) = match message {
            ClientJsonRpcMessage::Request(request) => {
                let is_discover = matches!(request.request, ClientRequest::DiscoverRequest(_));
                let is_initialize = matches!(request.request, ClientRequest::InitializeRequest(_));
                (Some(request.id.clone()), is_discover || is_initialize, is_discover)
            }
            _ => (None, false, false),
        };
        let (exchange, inner) = (Exchange::of(message), Arc::clone(inner));
        Ok(Self { body, exchange, id, is_handshake, is_discover, inner })
    }

    /// The server has answered in a way that the SDK cannot read.
    fn was_answered(&self, said: Said) {
        was_answered(&self.inner, self.id.as_ref(), said);
    }

    fn is_read(&self) -> bool {
        self.exchange.as_ref().is_some_and(|exchange| effect_of(&exchange.request) == Effect::ReadOnly)
    }

    /// Notes what was seen of the call, or of what goes beside the calls.
    fn saw(&self, sight: Sight) {
        match &self.exchange {
            Some(exchange) => exchange.saw(sight),
            None => self.inner.saw_beside(sight),
        }
    }
}

impl Client {
    fn request(&self, method: http::Method, line: &Line, token: &Token) -> reqwest::RequestBuilder {
        let mut headers: HeaderMap = line.headers.clone().into_iter().collect();
        headers.insert(ACCEPT, HeaderValue::from_static(BOTH));
        let mut request = self.client.request(method, &*line.uri).headers(headers);
        if let Some(session) = &line.session {
            request = request.header(SESSION_ID, &**session);
        }
        match &token.value {
            Some(token) => request.bearer_auth(token),
            None => request,
        }
    }

    async fn post(&self, line: Line, letter: Letter) -> Result<StreamableHttpPostResponse, Failure> {
        if let Some(exchange) = &letter.exchange {
            exchange.set_begun();
        }
        let mut is_repeated = false;
        loop {
            let token = self.shared.credentials.current();
            let size = line.size(&token) + letter.body.len();
            let call = letter.exchange.as_ref().map(|exchange| Posted {
                exchange: Arc::clone(exchange),
                inner: Arc::clone(&self.shared.inner),
                is_through: self.shared.wire.is_through(size),
            });
            let body = Letterbody { bytes: Some(letter.body.clone()), call };
            let request = self
                .request(http::Method::POST, &line, &token)
                .header(CONTENT_TYPE, HeaderValue::from_static(JSON))
                .body(reqwest::Body::wrap(body));
            let response = match request.send().await {
                Ok(response) => {
                    self.shared.wire.observe(&response, &line.uri);
                    response
                }
                Err(error) => {
                    let no_tls =
                        || (is_https(&line.uri) && has_tls() == Some(false)).then_some(Reason::NoTls);
                    let (kind, reason) = match error.is_connect() {
                        true => (HttpErrorKind::Connect, Reason::of(&error).or_else(no_tls)),
                        false => (HttpErrorKind::NoResponse, Reason::of(&error)),
                    };
                    match &letter.exchange {
                        // The HTTP library may still have the body.
                        Some(exchange) => exchange.failed_to_send(kind, reason),
                        None if kind == HttpErrorKind::Connect => letter.saw(Sight::NotSent(kind, reason)),
                        None => letter.saw(Sight::Odd(kind, None)),
                    }
                    return Err(lost(error));
                }
            };
            self.shared.inner.heard();
            let status = response.status();
            if letter.exchange.is_some() && !status.is_success() && is_elsewhere(&response, &line.uri) {
                // A refusal of what the client asked there; the call itself was answered with a redirect.
                letter.saw(Sight::Odd(HttpErrorKind::Redirect, Some(status.as_u16())));
                return Err(failed(status, None));
            }
            // A refusal may come before the server has read the request to its end, unless what it has read of it was
            // written with all the rest: as one piece, and as one record over TLS.
            let is_one_piece = size <= SMALL && response.version() <= http::Version::HTTP_11;
            if let Some(exchange) = &letter.exchange
                && (status.is_success() || is_one_piece)
                && !is_elsewhere(&response, &line.uri)
            {
                exchange.taken_up();
            }
            if status != StatusCode::UNAUTHORIZED {
                self.shared.credentials.accepted(token.number);
                return self.posted(line, letter, response).await;
            }
            let are_others = self.refresh(&token, response.headers()).await;
            // What is not a call of anybody's is sent again here.
            if are_others && letter.exchange.is_none() && !std::mem::replace(&mut is_repeated, true) {
                continue;
            }
            letter.saw(if are_others { Sight::Refreshed } else { of_status(401, None) });
            return Err(auth_required());
        }
    }

    /// Whether there are other credentials now than those that were refused.
    async fn refresh(&self, refused: &Token, headers: &HeaderMap) -> bool {
        let Some(refresh) = &self.shared.refresh else { return false };
        let challenge = header(headers, &WWW_AUTHENTICATE);
        self.shared.credentials.refresh(refused, refresh, challenge).await
    }

    /// What the response to a post says.
    async fn posted(
        &self,
        line: Line,
        letter: Letter,
        response: reqwest::Response,
    ) -> Result<StreamableHttpPostResponse, Failure> {
        let status = response.status();
        let wait = header(response.headers(), &RETRY_AFTER);
        // By the protocol this says one thing, whatever its body: that may be an error with the request's id, too.
        if status == StatusCode::NOT_FOUND && line.session.is_some() {
            self.lose_session();
            letter.saw(session_unknown(404));
            return Err(StreamableHttpError::SessionExpired);
        }
        let Some(id) = letter.id.clone() else {
            return match status.is_success() {
                true => Ok(StreamableHttpPostResponse::Accepted),
                false => {
                    letter.saw(of_status(status.as_u16(), None));
                    Err(failed(status, wait))
                }
            };
        };
        if matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT) {
            letter.saw(Sight::Odd(HttpErrorKind::NoAnswer, Some(status.as_u16())));
            return Err(StreamableHttpError::UnexpectedServerResponse("accepted, and not answered".into()));
        }
        let kind = content_type(response.headers());
        let session = header(response.headers(), &SESSION_ID);
        if status.is_success() && kind == ContentType::Events {
            let stream = self.answer_stream(line, &letter, response);
            return Ok(StreamableHttpPostResponse::Sse(stream, session));
        }
        // These say by their status alone that the request was refused; their body is a gateway's as often as not.
        if matches!(status.as_u16(), 300..=399 | 403 | 408 | 425 | 429 | 503) {
            let parsed = wait.as_deref().and_then(|wait| retry_after(wait, SystemTime::now()));
            letter.saw(of_status(status.as_u16(), parsed));
            return Err(match status {
                StatusCode::FORBIDDEN => forbidden(),
                _ => failed(status, wait),
            });
        }
        if kind != ContentType::Json {
            if let Some(instead) = instead_of_discover(&letter, &line, status, None) {
                return Ok(instead);
            }
            if !status.is_success() {
                if status == StatusCode::BAD_REQUEST && self.examine(&line).await {
                    letter.saw(session_unknown(400));
                    return Err(StreamableHttpError::SessionExpired);
                }
                letter.saw(of_status(status.as_u16(), None));
                return Err(failed(status, wait));
            }
            letter.saw(Sight::Odd(HttpErrorKind::ContentType, None));
            return Err(StreamableHttpError::UnexpectedContentType(None));
        }

        let limit = line.limits.max_json_response_size;
        let body = match read_body(response, limit, &self.shared.inner).await {
            Ok(body) => body,
            Err(ReadError::TooLarge) => {
                if status.is_success() {
                    letter.was_answered(Said::Unknown);
                }
                letter.saw(match status.is_success() {
                    true => Sight::TooLarge(limit),
                    false => of_status(status.as_u16(), None),
                });
                return Err(StreamableHttpError::ResponseBodyTooLarge { max_size: limit });
            }
            Err(ReadError::Lost(error)) => {
                letter.saw(match status.is_success() {
                    true => Sight::Odd(HttpErrorKind::BodyLost, None),
                    false => of_status(status.as_u16(), None),
                });
                return Err(lost(error));
            }
        };
        let envelope = Envelope::of(&body).filter(Envelope::is_answer);
        // Servers that do not know a session often say so, and not by 404. Only the session itself can tell.
        // Some say it by an error with the request's id, which a read may take for that: it does no harm twice.
        if status == StatusCode::BAD_REQUEST && !letter.is_handshake {
            let answer = envelope.as_ref().filter(|envelope| envelope.answers(&id));
            if answer.is_some_and(|answer| !answer.is_error() || !letter.is_read()) {
                // Whatever becomes of the session, this is the answer, and does not wait for that.
                let (client, line) = (self.clone(), line.clone());
                tokio::spawn(async move { client.examine(&line).await });
            } else if self.examine(&line).await {
                letter.saw(session_unknown(400));
                return Err(StreamableHttpError::SessionExpired);
            }
        }
        if let Some(envelope) = &envelope
            && (envelope.answers(&id) || letter.is_handshake)
        {
            if letter.is_discover && envelope.is_error() {
                let error = envelope.read(&body).and_then(error_of);
                if let Some(instead) = instead_of_discover(&letter, &line, status, error) {
                    return Ok(instead);
                }
            }
            if let Some(message) = envelope.read(&body)
                && has_left(letter.exchange.as_deref())
            {
                return Ok(StreamableHttpPostResponse::Json(message, session));
            }
        }
        if let Some(instead) = instead_of_discover(&letter, &line, status, None) {
            return Ok(instead);
        }
        let odd = match &envelope {
            Some(envelope) if !envelope.answers(&id) => HttpErrorKind::WrongId,
            _ if !status.is_success() => HttpErrorKind::Status,
            answer => {
                if let Some(answer) = answer {
                    letter.was_answered(answer.said());
                }
                HttpErrorKind::NotJsonRpc
            }
        };
        letter.saw(Sight::Odd(odd, (!status.is_success()).then_some(status.as_u16())));
        Err(match status.is_success() {
            true => StreamableHttpError::UnexpectedServerResponse("no answer to the request".into()),
            false => failed(status, wait),
        })
    }

    /// The session is gone: no call is given to this connection any more.
    fn lose_session(&self) -> crate::Closure {
        self.shared.inner.retire(SESSION_LOST)
    }

    /// Whether the session is gone: a `ping` on it that begins from now on is answered with 400 or 404. What was seen of
    /// it before says nothing of what has just come; those that wait meanwhile share one.
    async fn examine(&self, line: &Line) -> bool {
        const PING: &[u8] = br#"{"jsonrpc":"2.0","id":"goaround-probe","method":"ping"}"#;
        if line.session.is_none() {
            return false;
        }
        let Pings { begun, last } = &self.shared.pings;
        let before = begun.load(Ordering::Relaxed);
        let mut last = last.lock().await;
        if last.0 > before {
            return last.1;
        }
        let number = begun.fetch_add(1, Ordering::Relaxed) + 1;
        let token = self.shared.credentials.current();
        let request = self
            .request(http::Method::POST, &line.of_a_ping(), &token)
            .header(CONTENT_TYPE, HeaderValue::from_static(JSON))
            .body(PING);
        let asked = async {
            let Ok(response) = request.send().await else { return false };
            match response.status().as_u16() {
                404 => true,
                400 => {
                    let said = read_body(response, EXAMINED, &self.shared.inner).await;
                    !said.is_ok_and(|said| refuses_the_ping_alone(&said))
                }
                _ => false,
            }
        };
        let gone = timeout(EXAMINE, asked).await.unwrap_or(false);
        *last = (number, gone);
        if gone {
            self.lose_session();
        }
        gone
    }

    /// Asks for a stream of events; once more with other credentials, and not for as long as there are others.
    async fn get(&self, line: &Line, last_event_id: Option<&str>) -> Result<reqwest::Response, Failure> {
        let mut is_repeated = false;
        let response = loop {
            let token = self.shared.credentials.current();
            let mut request = self.request(http::Method::GET, line, &token);
            if let Some(id) = last_event_id {
                request = request.header(LAST_EVENT_ID, id);
            }
            let response = request.send().await.map_err(lost)?;
            self.shared.inner.heard();
            if response.status() != StatusCode::UNAUTHORIZED
                || std::mem::replace(&mut is_repeated, true)
                || !self.refresh(&token, response.headers()).await
            {
                break response;
            }
        };
        let wait = header(response.headers(), &RETRY_AFTER);
        match response.status() {
            StatusCode::METHOD_NOT_ALLOWED => Err(StreamableHttpError::ServerDoesNotSupportSse),
            StatusCode::UNAUTHORIZED => Err(auth_required()),
            StatusCode::FORBIDDEN => Err(forbidden()),
            StatusCode::NOT_FOUND if line.session.is_some() => Err(StreamableHttpError::SessionExpired),
            status if !status.is_success() => Err(failed(status, wait)),
            _ if content_type(response.headers()) != ContentType::Events => {
                Err(StreamableHttpError::UnexpectedContentType(None))
            }
            _ => Ok(response),
        }
    }

    /// The stream of a response, resumed where it breaks, as one stream without ids.
    fn answer_stream(
        &self,
        line: Line,
        letter: &Letter,
        response: reqwest::Response,
    ) -> BoxStream<'static, Result<Sse, SseError>> {
        let answer = Answering {
            client: self.clone(),
            parser: Parser::new(line.limits.max_sse_event_size),
            line,
            exchange: letter.exchange.clone(),
            id: letter.id.clone(),
            is_handshake: letter.is_handshake,
            response: Some(response),
            last_event_id: None,
            retry: None,
            resumed: 0,
            over: false,
        };
        futures_util::stream::unfold(answer, |mut answer| async move {
            let event = answer.next().await?;
            Some((Ok(event), answer))
        })
        .boxed()
    }
}

impl StreamableHttpClient for Client {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, Failure> {
        let limits = StreamableHttpResponseLimits::default();
        self.post_message_with_response_limits(uri, message, session_id, auth_header, custom_headers, limits)
            .await
    }

    async fn post_message_with_response_limits(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session: Option<Arc<str>>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        limits: StreamableHttpResponseLimits,
    ) -> Result<StreamableHttpPostResponse, Failure> {
        let letter = Letter::of(&message, &self.shared.inner)?;
        let line = Line { uri, session, headers, limits };
        let is_cancellation = match &message {
            ClientJsonRpcMessage::Response(_) | ClientJsonRpcMessage::Error(_) => false,
            ClientJsonRpcMessage::Notification(of)
                if matches!(of.notification, ClientNotification::CancelledNotification(_)) =>
            {
                true
            }
            _ => return self.post(line, letter).await,
        };
        // The SDK posts these one after the other, and until the cancellation is out it keeps the stream of a call that
        // nobody waits for: one that hangs would hold up all that come after it.
        match self.shared.inner.post_beside() {
            Some(beside) => {
                let client = self.clone();
                tokio::spawn(async move {
                    let _beside = beside;
                    let _ = timeout(CANCEL, client.post(line, letter)).await;
                });
                Ok(StreamableHttpPostResponse::Accepted)
            }
            // The server has enough to do.
            None if is_cancellation => Ok(StreamableHttpPostResponse::Accepted),
            None => self.post(line, letter).await,
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session: Arc<str>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), Failure> {
        if self.shared.inner.has_lost_session() {
            // There is nothing to end.
            return Ok(());
        }
        let limits = StreamableHttpResponseLimits::default();
        let line = Line { uri, session: Some(session), headers, limits };
        let token = self.shared.credentials.current();
        let request = self.request(http::Method::DELETE, &line, &token);
        match request.send().await.map_err(lost)?.status() {
            status if status.is_success() => Ok(()),
            // Gone already, or kept by a server that does not let it go.
            StatusCode::METHOD_NOT_ALLOWED | StatusCode::NOT_FOUND => Ok(()),
            status => Err(failed(status, None)),
        }
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        custom_headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Failure> {
        let limit = StreamableHttpResponseLimits::default().max_sse_event_size;
        self.get_stream_with_max_sse_event_size(
            uri,
            session_id,
            last_event_id,
            auth_header,
            custom_headers,
            limit,
        )
        .await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session: Option<Arc<str>>,
        last_event_id: Option<String>,
        _: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        limit: usize,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, Failure> {
        let limits = StreamableHttpResponseLimits::default();
        let line = Line { uri, session, headers, limits };
        if self.shared.inner.has_lost_session() {
            // Not to be asked for again.
            return Err(StreamableHttpError::ServerDoesNotSupportSse);
        }
        let response = self.get(&line, last_event_id.as_deref()).await?;
        let inner = Arc::clone(&self.shared.inner);
        let stream = (response, Parser::new(limit), inner, false);
        let stream =
            futures_util::stream::unfold(stream, |(mut response, mut parser, inner, over)| async move {
                if over {
                    return None;
                }
                loop {
                    if let Some(event) = parser.next() {
                        let mut event = sse(event);
                        // Else the SDK would not wait for the real one any more.
                        event.data = event.data.filter(|data| !is_unasked(&inner, data.as_bytes()));
                        return Some((Ok(event), (response, parser, inner, false)));
                    }
                    let error: BoxError = match response.chunk().await {
                        Ok(Some(chunk)) => {
                            inner.heard();
                            match parser.read(&chunk) {
                                Ok(()) => continue,
                                Err(_) => io::Error::from(io::ErrorKind::InvalidData).into(),
                            }
                        }
                        Ok(None) => return None,
                        Err(error) => error.without_url().into(),
                    };
                    return Some((Err(SseError::Body(error)), (response, parser, inner, true)));
                }
            });
        Ok(stream.boxed())
    }
}

fn sse(event: Event) -> Sse {
    Sse {
        event: Some(event.kind).filter(|kind| !kind.is_empty()),
        // The SDK would read whatever it is, however long that takes.
        data: Some(event.data).filter(|data| is_object(data.as_bytes())),
        id: event.id,
        retry: event.retry,
    }
}

/// Whether an answer can be one: what is no call has left.
fn has_left(exchange: Option<&Exchange>) -> bool {
    exchange.is_none_or(Exchange::has_left)
}

/// Whether it is an answer that can be none.
fn is_unasked(inner: &Inner, message: &[u8]) -> bool {
    let answer = Envelope::of(message).filter(Envelope::is_answer);
    answer.and_then(|answer| answer.number()).is_some_and(|id| inner.is_unasked(id))
}

/// An answer came that the SDK cannot read. Where nobody waits for it any more it may be a late success.
fn was_answered(inner: &Inner, id: Option<&RequestId>, said: Said) {
    if let Some(RequestId::Number(id)) = id {
        inner.answered_oddly(*id, said);
    }
}

// ===== impl Answering =====

/// The stream that answers a post, and its resumptions.
struct Answering {
    client: Client,
    line: Line,
    exchange: Option<Arc<Exchange>>,
    id: Option<RequestId>,
    is_handshake: bool,
    response: Option<reqwest::Response>,
    parser: Parser,
    last_event_id: Option<String>,
    retry: Option<Duration>,
    resumed: usize,
    over: bool,
}

impl Answering {
    /// The next message for the SDK. After the answer there is none.
    async fn next(&mut self) -> Option<Sse> {
        while !self.over {
            while let Some(event) = self.parser.next() {
                let event = self.read(event);
                if event.is_some() || self.over {
                    return event;
                }
            }
            let Some(response) = &mut self.response else {
                self.resume().await;
                continue;
            };
            match response.chunk().await {
                Ok(Some(chunk)) => {
                    self.client.shared.inner.heard();
                    if self.parser.read(&chunk).is_err() {
                        let (sight, said) = self.too_large();
                        return self.end_oddly(sight, said);
                    }
                }
                // What is there of an event is none.
                Ok(None) | Err(_) => {
                    self.response = None;
                    self.parser = Parser::new(self.line.limits.max_sse_event_size);
                }
            }
        }
        None
    }

    /// What an event is for the SDK, if anything.
    fn read(&mut self, mut event: Event) -> Option<Sse> {
        if let Some(retry) = event.retry {
            self.retry = Some(Duration::from_millis(retry).min(RESUME_AS_ASKED));
        }
        if let Some(id) = &event.id {
            self.last_event_id = Some(id.clone()).filter(|id| !id.is_empty());
        }
        if !event.is_message() {
            return None;
        }
        let envelope = Envelope::of(event.data.as_bytes())?;
        if envelope.is_answer() {
            let answers = self.id.as_ref().is_some_and(|id| envelope.answers(id));
            if !answers && !self.is_handshake {
                return self.end_oddly(Sight::Odd(HttpErrorKind::WrongId, None), None);
            }
            if serde_json::from_str::<ServerJsonRpcMessage>(&event.data).is_err() {
                let said = envelope.said();
                let amended = envelope.amended().and_then(|message| serde_json::to_string(&message).ok());
                let Some(amended) = amended else {
                    return self.end_oddly(Sight::Odd(HttpErrorKind::NotJsonRpc, None), Some(said));
                };
                event.data = amended;
            }
            self.end();
            // Of what has not left the stream's end tells the SDK.
            if !has_left(self.exchange.as_deref()) {
                return None;
            }
        }
        Some(Sse { data: Some(event.data), ..Sse::default() })
    }

    /// What an event above the limit says: only an answer is one.
    fn too_large(&self) -> (Sight, Option<Said>) {
        let id = match self.id {
            Some(RequestId::Number(id)) => u64::try_from(id).ok(),
            _ => None,
        };
        let mut data = self.parser.data_so_far();
        // A line's end within JSON is white space.
        data.iter_mut().filter(|byte| **byte == b'\n').for_each(|byte| *byte = b' ');
        match id.is_some_and(|id| begins_an_answer(&data, id)) {
            true => (Sight::TooLarge(self.line.limits.max_sse_event_size), Some(Said::Unknown)),
            false => (Sight::Odd(HttpErrorKind::EventTooLarge, None), None),
        }
    }

    fn end(&mut self) {
        self.over = true;
        self.response = None;
    }

    /// Ends the call with what was seen, and what the server has said if that was an answer. The SDK is told in words that
    /// it knows.
    fn end_oddly(&mut self, sight: Sight, said: Option<Said>) -> Option<Sse> {
        if let Some(said) = said {
            was_answered(&self.client.shared.inner, self.id.as_ref(), said);
        }
        self.end();
        if !has_left(self.exchange.as_deref()) {
            return None;
        }
        self.saw(sight);
        let id = self.id.clone()?;
        let data = serde_json::to_string(&seen_elsewhere(id)).ok()?;
        Some(Sse { data: Some(data), ..Sse::default() })
    }

    fn saw(&self, sight: Sight) {
        if let Some(exchange) = &self.exchange {
            exchange.saw(sight);
        }
    }

    /// The stream has broken: asks for what is left of it, or ends it.
    async fn resume(&mut self) {
        let abandoned = self.exchange.as_ref().is_some_and(|exchange| exchange.is_given_up());
        // From 2026-07-28 on a stream that has broken is gone.
        let may = self.resumed < self.client.shared.resumptions
            && !abandoned
            && !self.client.shared.inner.is_modern();
        let Some(last) = self.last_event_id.clone().filter(|_| may) else {
            self.saw(Sight::Odd(HttpErrorKind::StreamEnded, None));
            return self.end();
        };
        let wait = self.retry.unwrap_or_else(|| backoff(RESUME, self.resumed, RESUME_AT_MOST));
        self.resumed += 1;
        sleep(wait).await;
        match self.client.get(&self.line, Some(&last)).await {
            Ok(response) => self.response = Some(response),
            Err(StreamableHttpError::SessionExpired) => {
                let closure = self.client.lose_session();
                self.saw(Sight::SessionLost(closure));
                self.end();
            }
            Err(
                StreamableHttpError::ServerDoesNotSupportSse
                | StreamableHttpError::AuthRequired(_)
                | StreamableHttpError::InsufficientScope(_),
            ) => {
                self.saw(Sight::Odd(HttpErrorKind::StreamEnded, None));
                self.end();
            }
            // Again, as long as there are resumptions left.
            Err(_) => {}
        }
    }
}

// ===== impl Letterbody =====

/// A request's body: whoever takes it takes the call's frame.
struct Letterbody {
    bytes: Option<Bytes>,
    call: Option<Posted>,
}

/// A call whose body is posted.
struct Posted {
    exchange: Arc<Exchange>,
    inner: Arc<Inner>,
    /// Whether the system has what the HTTP client lets go of.
    is_through: bool,
}

/// A call's bytes in the hands of the HTTP client, until it lets go of them: written, copied, or given up.
struct Held {
    bytes: Bytes,
    exchange: Arc<Exchange>,
    is_through: bool,
}

impl AsRef<[u8]> for Held {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        match self.is_through {
            true => self.exchange.mark_sent(),
            false => self.exchange.let_go(),
        }
    }
}

impl Body for Letterbody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, io::Error>>> {
        let Some(bytes) = self.bytes.take() else { return Poll::Ready(None) };
        let Some(Posted { exchange, inner, is_through }) = self.call.take() else {
            return Poll::Ready(Some(Ok(Frame::data(bytes))));
        };
        if !inner.lets_go_out(&exchange) || !exchange.frame.take() {
            return Poll::Ready(Some(Err(io::Error::other("withdrawn"))));
        }
        // Taken is not sent: a large body stays with the client as long as the server does not read.
        let held = Held { bytes, exchange, is_through };
        Poll::Ready(Some(Ok(Frame::data(Bytes::from_owner(held)))))
    }

    fn is_end_stream(&self) -> bool {
        self.bytes.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.bytes.as_ref().map_or(0, |bytes| bytes.len() as u64))
    }
}

// ===== impl Wire =====

/// What is known of the way from the HTTP client to the system. Over plain HTTP/1 on a socket the client keeps the
/// bytes that it was given until the system has them. Over TLS and HTTP/2 it copies them, into buffers that nobody
/// sees into.
struct Wire {
    /// The client is this crate's: each request has a connection of its own.
    is_own: bool,
    /// It is plain HTTP/1 on a socket.
    is_plain: AtomicBool,
}

impl Wire {
    fn new(uri: &str, is_own: bool) -> Self {
        let is_http = reqwest::Url::parse(uri).is_ok_and(|url| url.scheme() == "http");
        // On Windows the proxy may also be set where it is not seen here.
        let is_plain = is_own && is_http && !cfg!(windows) && !has_tls_proxy(|name| std::env::var(name).ok());
        Self { is_own, is_plain: AtomicBool::new(is_plain) }
    }

    /// Looks at what a client of the caller's, of which nothing is known, has done: only where it is connected to
    /// the very address is there no proxy, to which it may speak TLS.
    fn observe(&self, response: &reqwest::Response, uri: &str) {
        if !self.is_own {
            let is_plain = response.version() <= http::Version::HTTP_11
                && response.remote_addr().is_some_and(|address| is_address_of(address, uri));
            self.is_plain.store(is_plain, Ordering::Relaxed);
        }
    }

    /// Whether the system has what the client lets go of, of a request with so many bytes in all. What is small
    /// passes any buffer at once where it is the first on its connection.
    fn is_through(&self, bytes: usize) -> bool {
        self.is_plain.load(Ordering::Relaxed) || (self.is_own && bytes <= SMALL)
    }
}

/// Whether a proxy of the environment's may be spoken to over TLS.
fn has_tls_proxy(variable: impl Fn(&str) -> Option<String>) -> bool {
    let names = ["HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"];
    let is_tls =
        |proxy: String| proxy.trim().get(..6).is_some_and(|head| head.eq_ignore_ascii_case("https:"));
    names.into_iter().filter_map(variable).any(is_tls)
}

/// Whether that is the address of a plain URL, as far as the URL says it by itself.
fn is_address_of(address: SocketAddr, uri: &str) -> bool {
    let Ok(url) = reqwest::Url::parse(uri) else { return false };
    let Some(host) = url.host_str() else { return false };
    let is_host = match host.trim_matches(['[', ']']).parse::<IpAddr>() {
        Ok(ip) => ip == address.ip(),
        Err(_) => host == "localhost" && address.ip().is_loopback(),
    };
    url.scheme() == "http" && is_host && url.port_or_known_default() == Some(address.port())
}

// ===== responses =====

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ContentType {
    Json,
    Events,
    Other,
}

fn content_type(headers: &HeaderMap) -> ContentType {
    let Some(value) = headers.get(CONTENT_TYPE).and_then(|value| value.to_str().ok()) else {
        return ContentType::Other;
    };
    let kind = value.split(';').next().unwrap_or_default().trim();
    if kind.eq_ignore_ascii_case(JSON) {
        ContentType::Json
    } else if kind.eq_ignore_ascii_case(EVENTS) {
        ContentType::Events
    } else {
        ContentType::Other
    }
}

fn header(headers: &HeaderMap, name: &HeaderName) -> Option<String> {
    headers.get(name).and_then(|value| value.to_str().ok()).map(str::to_owned)
}

/// Whether the caller's own client has followed a redirect to this response.
fn is_elsewhere(response: &reqwest::Response, asked: &str) -> bool {
    let Ok(mut asked) = reqwest::Url::parse(asked) else { return false };
    let mut is = response.url().clone();
    for url in [&mut asked, &mut is] {
        // Credentials in an address are taken out of it when it is asked.
        let _ = (url.set_username(""), url.set_password(None));
        url.set_fragment(None);
    }
    asked != is
}

fn session_unknown(status: u16) -> Sight {
    Sight::Evidence(crate::Evidence::SessionUnknown, None, Some(status))
}

/// Addresses may hold secrets.
fn lost(error: reqwest::Error) -> Failure {
    StreamableHttpError::Client(error.without_url())
}

fn failed(status: StatusCode, wait: Option<String>) -> Failure {
    StreamableHttpError::HttpStatus(HttpStatusError::new(status.as_u16(), wait))
}

/// Without the challenge, which may hold a token: [`Unauthorized`] has it.
fn auth_required() -> Failure {
    StreamableHttpError::AuthRequired(AuthRequiredError::new(String::new()))
}

fn forbidden() -> Failure {
    StreamableHttpError::InsufficientScope(InsufficientScopeError::new(String::new(), None))
}

/// In the mode `Auto` the SDK begins with `server/discover`, and goes on with the handshake where the server's
/// refusal is an error with the request's own id. Many refuse it otherwise.
fn instead_of_discover(
    letter: &Letter,
    line: &Line,
    status: StatusCode,
    error: Option<ErrorData>,
) -> Option<StreamableHttpPostResponse> {
    if !letter.is_discover || line.session.is_some() || !status.is_client_error() {
        return None;
    }
    let error = error.unwrap_or_else(|| ErrorData::invalid_request("server/discover was refused", None));
    let message = ServerJsonRpcMessage::error(error, letter.id.clone());
    Some(StreamableHttpPostResponse::Json(message, None))
}

fn error_of(message: ServerJsonRpcMessage) -> Option<ErrorData> {
    match message {
        ServerJsonRpcMessage::Error(error) => Some(error.error),
        _ => None,
    }
}

enum ReadError {
    TooLarge,
    Lost(reqwest::Error),
}

/// Whether a server that knows the session has read the `ping`, and does not take it as it is.
fn refuses_the_ping_alone(body: &[u8]) -> bool {
    const OF_THE_MESSAGE: [ErrorCode; 3] =
        [ErrorCode::HEADER_MISMATCH, ErrorCode::INVALID_PARAMS, ErrorCode::METHOD_NOT_FOUND];
    let error = serde_json::from_slice(body).ok().and_then(error_of);
    error.is_some_and(|error| OF_THE_MESSAGE.contains(&error.code))
}

async fn read_body(
    mut response: reqwest::Response,
    limit: usize,
    inner: &Inner,
) -> Result<Vec<u8>, ReadError> {
    if response.content_length().is_some_and(|length| length > limit as u64) {
        return Err(ReadError::TooLarge);
    }
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(ReadError::Lost)? {
        inner.heard();
        if body.len() + chunk.len() > limit {
            return Err(ReadError::TooLarge);
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicU32, Ordering},
        task::Waker,
    };

    use super::*;
    use crate::{
        Activity, Call, Delivery,
        mcp::ToolRules,
        sdk::{Request, connection::Kind, evidence::seen, session::Memory},
    };

    /// The first frame of that body, if it gives one.
    fn first_frame(body: &mut Letterbody) -> Option<Bytes> {
        match Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(Some(Ok(frame))) => frame.into_data().ok(),
            _ => None,
        }
    }

    /// A write, what is marked of it, and its body.
    fn posted(is_through: bool) -> (Arc<Exchange>, Arc<Activity>, Letterbody) {
        let (inner, _) =
            Inner::new(Kind::Http, Arc::new(Memory::new(ToolRules::new())), Duration::from_secs(5), None, 1);
        let mut request = Request::ping();
        let activity = Arc::new(Activity::default());
        request.context_mut().set_activity(Some(Arc::clone(&activity)));
        assert!(activity.adopt());
        let exchange = Arc::new(Exchange::new(request, 1, 0));
        let call = Some(Posted { exchange: Arc::clone(&exchange), inner, is_through });
        (exchange, activity, Letterbody { bytes: Some(Bytes::from_static(b"{}")), call })
    }

    fn is_sent(activity: &Activity) -> bool {
        activity.poll_sent(&mut Context::from_waker(Waker::noop())).is_ok()
    }

    #[tokio::test]
    async fn a_body_that_was_said_not_to_be_sent_is_not_sent_later_and_one_that_was_begun_is_in_doubt() {
        for begun in [false, true] {
            let (exchange, _, mut body) = posted(true);
            assert!(!begun || first_frame(&mut body).is_some());
            // As where a client's own timeout ends the request, and the connection still has its body.
            exchange.failed_to_send(HttpErrorKind::NoResponse, None);
            let said = seen(exchange.take_sight().unwrap(), None);
            let (delivery, text) = match begun {
                true => (Delivery::Ambiguous, "the connection broke before a response came"),
                false => (Delivery::NotSent, "the connection broke before the request was sent"),
            };
            assert_eq!(said.delivery(), delivery);
            assert_eq!(said.get_ref::<HttpError>().unwrap().to_string(), text);
            assert_eq!(first_frame(&mut body), None);
        }
    }

    #[tokio::test]
    async fn a_body_is_sent_once_the_client_has_let_go_of_it_and_where_that_is_a_copy_once_it_was_taken_up() {
        let (_, activity, mut body) = posted(true);
        let data = first_frame(&mut body).unwrap();
        let part = data.slice(1..);
        drop((body, data));
        assert!(!is_sent(&activity), "the client has a part of it");
        drop(part);
        assert!(is_sent(&activity));

        for taken_up_first in [false, true] {
            let (exchange, activity, mut body) = posted(false);
            let data = first_frame(&mut body).unwrap();
            if taken_up_first {
                exchange.taken_up();
                assert!(!is_sent(&activity));
                drop(data);
            } else {
                drop(data);
                assert!(!is_sent(&activity));
                exchange.taken_up();
            }
            assert!(is_sent(&activity));
        }
    }

    #[test]
    fn a_wire_is_plain_only_where_that_is_known() {
        let (own, theirs) = ("http://a.example/mcp", "https://a.example/mcp");
        let large = SMALL + 1;
        let through = |uri, is_own, bytes| Wire::new(uri, is_own).is_through(bytes);
        if !has_tls_proxy(|name| std::env::var(name).ok()) && !cfg!(windows) {
            assert!(through(own, true, large));
        }
        assert!(through(theirs, true, SMALL) && !through(theirs, true, large));
        assert!(!through(own, false, 1) && !through(theirs, false, 1));

        for (name, value, is) in [
            ("HTTP_PROXY", "https://proxy.example", true),
            ("all_proxy", " HTTPS://proxy.example", true),
            ("http_proxy", "http://proxy.example", false),
            ("ALL_PROXY", "socks5://proxy.example", false),
            ("HTTPS_PROXY", "https://proxy.example", false),
            ("HTTP_PROXY", "", false),
        ] {
            assert_eq!(
                has_tls_proxy(|asked| (asked == name).then(|| value.to_owned())),
                is,
                "{name}={value}"
            );
        }
        for (address, uri, is) in [
            ("127.0.0.1:80", "http://127.0.0.1/mcp", true),
            ("127.0.0.1:8000", "http://localhost:8000/", true),
            ("[::1]:80", "http://[::1]/", true),
            ("127.0.0.1:8001", "http://localhost:8000/", false),
            ("10.0.0.1:80", "http://localhost/", false),
            ("10.0.0.1:80", "http://10.0.0.2/", false),
            ("10.0.0.1:80", "http://a.example/", false),
            ("10.0.0.1:443", "https://10.0.0.1/", false),
            ("10.0.0.1:80", "nonsense", false),
        ] {
            assert_eq!(is_address_of(address.parse().unwrap(), uri), is, "{address} {uri}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_refresh_that_never_ends_or_panics_fails_all_that_wait_and_the_next_call_asks_again() {
        for panics in [false, true] {
            let (credentials, asked) = (Arc::new(Credentials::new(None)), Arc::new(AtomicU32::new(0)));
            let count = Arc::clone(&asked);
            let refresh: Refresh = Arc::new(move |_| match count.fetch_add(1, Ordering::Relaxed) {
                0 if panics => panic!("the caller's own"),
                0 => Box::pin(std::future::pending()),
                _ => Box::pin(async { Ok("fresh".to_owned()) }),
            });
            let refused = credentials.current();
            let began = tokio::time::Instant::now();
            let both = tokio::join!(
                credentials.refresh(&refused, &refresh, None),
                credentials.refresh(&refused, &refresh, None),
            );
            let took = if panics { Duration::ZERO } else { REFRESH };
            assert_eq!((both, began.elapsed()), ((false, false), took));
            assert_eq!(asked.load(Ordering::Relaxed), 1);
            assert!(credentials.refresh(&refused, &refresh, None).await);
            assert_eq!(credentials.current().value.as_deref(), Some("fresh"));
            assert_eq!(asked.load(Ordering::Relaxed), 2);
        }
    }
}
