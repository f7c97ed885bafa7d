//! One connection's session, what is remembered from one to the next, and how it is restored.

use std::{
    collections::{HashSet, VecDeque, hash_map::RandomState},
    future::poll_fn,
    hash::BuildHasher,
    mem,
    pin::{Pin, pin},
    sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak},
    task::Poll,
    time::Duration,
};

use serde::Deserialize;
use serde_json::{json, value::RawValue};
use tokio::{
    sync::Notify,
    time::{sleep, timeout},
};

use super::{
    ProtocolVersion, Stats,
    catalog::{Catalog, Listed},
    envelope::Envelope,
    handshake::{Agreed, HandshakeError, discover_request},
    rules::tool_of,
    settings::Settings,
    watch::{Calls, taken_back},
};
use crate::{
    Call, CallError, Closure, Deadline, ServerError,
    call::effect_of,
    connection::UnderWay,
    jsonrpc::{
        Client, Handler, Notification, Request, Response, ResponseFuture, ServerRequest, Upholds, WeakClient,
        own_id,
    },
};

/// How long the answer to a probe of a silent server may take.
const PING: Duration = Duration::from_secs(5);
/// How long the state of a session may take to restore, before the connection is used without the rest.
const RESTORE: Duration = Duration::from_secs(10);
/// How long a stream of notifications may take to be acknowledged.
const ACKNOWLEDGED: Duration = Duration::from_secs(10);
/// How long a restored stream waits for the caller that had asked for it.
const ORPHANED: Duration = Duration::from_secs(30);
/// How long after the server's word that its tools have changed they are listed again.
const DEBOUNCE: Duration = Duration::from_millis(100);
/// After how long a stream that the server ended is asked for again.
const LISTEN_AGAIN: Duration = Duration::from_secs(1);
const MAX_SUBSCRIPTIONS: usize = 4_096;
const MAX_STREAMS: usize = 64;
const MAX_CURSORS: usize = 4_096;
const MAX_ACKNOWLEDGED: usize = 256;

const ELICIT: &str = "elicitation/create";
pub(super) const LISTEN: &str = "subscriptions/listen";

/// The levels of the protocol's log messages.
const LEVELS: [&str; 8] = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"];

/// What outlives a connection: the connector's.
#[derive(Default)]
pub(super) struct Memory {
    state: Mutex<Remembered>,
    /// What the server says of its tools on the last connection that has listed them, for the classifier.
    tools: RwLock<Arc<Listed>>,
    pub(super) stats: Stats,
    /// The connect that is under way.
    pub(super) under_way: UnderWay,
}

#[derive(Default)]
struct Remembered {
    /// The version last agreed upon.
    version: Option<ProtocolVersion>,
    /// How many sessions there have been.
    sessions: u64,
    level: Option<String>,
    /// The resources subscribed to, in their order.
    subscriptions: Vec<String>,
    streams: Vec<Stream>,
    next_stream: u64,
}

/// A stream of notifications that somebody asked for.
#[derive(Clone)]
struct Stream {
    key: u64,
    params: Option<Arc<RawValue>>,
}

/// The session of one connection.
pub(super) struct Session {
    pub(super) version: ProtocolVersion,
    number: u64,
    settings: Arc<Settings>,
    pub(super) memory: Arc<Memory>,
    pub(super) wires: Arc<Wires>,
    /// What each request carries; `None` in the older era.
    envelope: Option<RwLock<Arc<Envelope>>>,
    /// One list at a time is read, so that the later one counts.
    listing: tokio::sync::Mutex<()>,
    cursors: Mutex<Cursors>,
    /// Streams that were restored, for the callers that come back.
    restored: Mutex<Vec<(Stream, ResponseFuture)>>,
    /// Our own stream, which tells of changed tools.
    own: Mutex<Option<ResponseFuture>>,
}

/// The cursors that a session has handed out, as hashes; the oldest are forgotten.
#[derive(Default)]
pub(crate) struct Cursors {
    hasher: RandomState,
    known: HashSet<u64>,
    order: VecDeque<u64>,
}

// ===== impl Memory =====

impl Memory {
    pub(super) fn version(&self) -> Option<ProtocolVersion> {
        self.lock().version
    }

    /// Forgets the era: the server refused to be spoken to in it.
    pub(super) fn forget_version(&self) {
        self.lock().version = None;
    }

    pub(super) fn catalog(&self) -> Arc<Catalog> {
        self.tools.read().unwrap_or_else(PoisonError::into_inner).catalog()
    }

    pub(super) fn level_set(&self, level: &str) {
        self.lock().level = Some(level.to_owned());
    }

    pub(super) fn subscribed(&self, uri: &str) {
        let mut state = self.lock();
        if state.subscriptions.iter().any(|known| known == uri) {
            return;
        }
        if state.subscriptions.len() >= MAX_SUBSCRIPTIONS {
            drop(state);
            tracing::warn!(target: "goaround", "too many subscriptions: one more is not restored at a reconnect");
            return;
        }
        state.subscriptions.push(uri.to_owned());
    }

    pub(super) fn unsubscribed(&self, uri: &str) {
        self.lock().subscriptions.retain(|known| known != uri);
    }

    /// Remembers a stream; its key.
    fn listened(&self, params: Option<Arc<RawValue>>) -> Option<u64> {
        let mut state = self.lock();
        if state.streams.len() >= MAX_STREAMS {
            drop(state);
            tracing::warn!(target: "goaround", "too many streams of notifications: one more is not restored at a reconnect");
            return None;
        }
        let key = state.next_stream;
        state.next_stream += 1;
        state.streams.push(Stream { key, params });
        Some(key)
    }

    fn listens_no_more(&self, key: u64) {
        self.lock().streams.retain(|stream| stream.key != key);
    }

    fn lock(&self) -> MutexGuard<'_, Remembered> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ===== impl Session =====

impl Session {
    /// The session that was agreed upon, restored to what the one before it was.
    pub(super) async fn begin(
        agreed: Agreed,
        client: &Client,
        settings: Arc<Settings>,
        memory: Arc<Memory>,
        wires: Arc<Wires>,
    ) -> Result<Arc<Self>, HandshakeError> {
        let Agreed { version, peer, capabilities } = agreed;
        let (number, level) = {
            let mut state = memory.lock();
            state.version = Some(version);
            state.sessions += 1;
            (state.sessions, state.level.clone())
        };
        memory.stats.session_begun();
        let envelope = (!version.has_handshake())
            .then(|| RwLock::new(Arc::new(Envelope::new(&settings, version, level.as_deref()))));
        let session = Arc::new(Self {
            version,
            number,
            settings,
            memory,
            wires,
            envelope,
            listing: tokio::sync::Mutex::default(),
            cursors: Mutex::default(),
            restored: Mutex::default(),
            own: Mutex::default(),
        });

        if timeout(RESTORE, session.restore(client, level)).await.is_err() {
            session.not_restored("in time", None);
            session.forget_what_is_not_restored();
        }
        if session.settings.tools.asks_the_server() {
            // First, so that no change is missed in between.
            let says_so = capabilities.pointer("/tools/listChanged") == Some(&json!(true));
            session.follow_tools(client, says_so);
            session.list_tools(client).await;
            // A connection that is about to be replaced must not overrule the one that replaced it.
            let state = session.memory.lock();
            if state.sessions == number {
                let mut tools = session.memory.tools.write().unwrap_or_else(PoisonError::into_inner);
                *tools = Arc::clone(&session.wires.tools);
            }
        }
        session.forget_orphans_later();
        if let Some(closure) = client.closure() {
            let error = CallError::of_closure(closure, crate::Delivery::NotSent);
            return Err(HandshakeError::of("initialize", error, client).await);
        }
        client.set_peer(peer);
        let probe = match version.has_handshake() {
            true => Request::new("ping", ()),
            false => discover_request(&session.settings, version, None),
        };
        if let Ok(probe) = probe {
            client.set_probe(probe, PING);
        }
        Ok(session)
    }

    /// Whether this is a session of the era without a handshake.
    pub(super) fn is_modern(&self) -> bool {
        self.envelope.is_some()
    }

    /// The request with what each one of the session carries, and the parameters that it had.
    pub(super) fn dress(&self, mut request: Request) -> (Request, Option<Arc<RawValue>>) {
        let Some(envelope) = &self.envelope else { return (request, None) };
        let envelope = envelope.read().unwrap_or_else(PoisonError::into_inner).clone();
        let original = request.shared_params();
        request.replace_params(envelope.around(original.as_ref()));
        (request, original)
    }

    /// In the newer era there is no request to set the log level: every request carries it. `false` if that is
    /// no level.
    pub(super) fn set_level(&self, level: &str) -> bool {
        let Some(envelope) = self.envelope.as_ref().filter(|_| LEVELS.contains(&level)) else { return false };
        self.memory.level_set(level);
        let new = Arc::new(Envelope::new(&self.settings, self.version, Some(level)));
        *envelope.write().unwrap_or_else(PoisonError::into_inner) = new;
        true
    }

    /// Whether a call that was stamped by a trusted annotation still may do no more than that on this
    /// connection.
    pub(super) fn upholds(&self, request: &Request) -> bool {
        self.wires.upholds(request)
    }

    // ----- cursors

    /// Whether a list's page may be asked for here: a cursor is good for the session that handed it out.
    ///
    /// The first session lets everything pass, since it cannot know better than the server; a later one only
    /// what it has handed out itself. The newer era has no sessions.
    pub(super) fn takes_cursor(&self, request: &Request) -> bool {
        if self.is_modern() || self.number == 1 {
            return true;
        }
        #[derive(Deserialize)]
        struct Params {
            cursor: Option<String>,
        }
        match request.raw_params().map(|params| serde_json::from_str::<Params>(params.get())) {
            Some(Ok(Params { cursor: Some(cursor) })) => lock(&self.cursors).knows(&cursor),
            // The server will say what it thinks of it.
            _ => true,
        }
    }

    pub(super) fn handed_out(&self, page: &Response) {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Page {
            next_cursor: Option<String>,
        }
        if let Ok(Page { next_cursor: Some(cursor) }) = page.parse() {
            lock(&self.cursors).insert(&cursor);
        }
    }

    // ----- restoring

    /// What the session before this one was, in the order in which it matters.
    async fn restore(&self, client: &Client, level: Option<String>) {
        let (subscriptions, streams) = {
            let state = self.memory.lock();
            (state.subscriptions.clone(), state.streams.clone())
        };
        if !self.is_modern() {
            if let Some(level) = level {
                self.ask(client, "logging/setLevel", json!({ "level": level })).await;
            }
            for uri in subscriptions {
                self.ask(client, "resources/subscribe", json!({ "uri": uri })).await;
            }
            return;
        }
        for stream in streams {
            self.listen_again(client, stream).await;
        }
    }

    async fn ask(&self, client: &Client, method: &'static str, params: serde_json::Value) {
        let Ok(request) = Request::new(method, params) else { return };
        let (request, _) = self.dress(request.deadline(Deadline::Never));
        if let Err(error) = client.request(request).await {
            self.not_restored(method, Some(&error));
        }
    }

    async fn listen_again(&self, client: &Client, stream: Stream) {
        let Ok(mut request) = Request::new(LISTEN, ()) else { return };
        request.replace_params(stream.params.clone());
        let mut call = client.request(self.dress(request.read_only()).0);
        match acknowledged(&mut call, &self.wires).await {
            Ok(()) => lock(&self.restored).push((stream, call)),
            Err(Unacknowledged::Ended(Err(error))) if error.closure().is_some() => {}
            Err(Unacknowledged::Ended(ended)) => {
                self.memory.listens_no_more(stream.key);
                self.not_restored(LISTEN, ended.err().as_ref());
            }
            Err(Unacknowledged::Silent) => {
                self.memory.listens_no_more(stream.key);
                self.not_restored(LISTEN, None);
            }
        }
    }

    /// The connection works, though something of the last session is missing. Without the server's own words.
    fn not_restored(&self, what: &'static str, error: Option<&CallError>) {
        self.memory.stats.state_not_restored();
        let code = error.and_then(CallError::answer).map(|answer| answer.code);
        tracing::warn!(target: "goaround", what, code, "the state of the last session was not restored");
    }

    // ----- streams

    /// The restored stream of a caller that comes back, if it is one: it asks for the same once more.
    fn adopt(&self, params: Option<&Arc<RawValue>>) -> Option<(u64, ResponseFuture)> {
        let mut restored = lock(&self.restored);
        let same = |of: &Option<Arc<RawValue>>| of.as_ref().map(|of| of.get()) == params.map(|of| of.get());
        let at = restored.iter().position(|(stream, _)| same(&stream.params))?;
        let (stream, call) = restored.swap_remove(at);
        Some((stream.key, call))
    }

    /// The server leaves streams unanswered: the next connect does not wait for them again. Whoever listened is
    /// told by the end of the last connection, and asks for them anew.
    fn forget_what_is_not_restored(&self) {
        if self.is_modern() {
            let restored: HashSet<u64> = lock(&self.restored).iter().map(|(stream, _)| stream.key).collect();
            self.memory.lock().streams.retain(|stream| restored.contains(&stream.key));
        }
    }

    /// Nobody came back for these streams.
    fn forget_orphans_later(self: &Arc<Self>) {
        if lock(&self.restored).is_empty() {
            return;
        }
        let session = Arc::downgrade(self);
        tokio::spawn(async move {
            sleep(ORPHANED).await;
            let Some(session) = session.upgrade() else { return };
            let orphans = mem::take(&mut *lock(&session.restored));
            for (stream, _) in &orphans {
                session.memory.listens_no_more(stream.key);
            }
        });
    }

    /// Asks for a stream of notifications, or takes over the one that was restored.
    pub(super) fn listen(self: &Arc<Self>, client: &Client, request: Request) -> Listening {
        let original = request.shared_params();
        let limit = request.context().deadline();
        let (call, key) = match self.adopt(original.as_ref()) {
            Some((key, call)) => (call, Some(key)),
            None => (client.request(self.dress(request).0), None),
        };
        Listening {
            session: self.clone(),
            client: client.downgrade(),
            call: Some(call),
            original,
            key,
            limit,
        }
    }

    // ----- tools

    async fn list_tools(&self, client: &Client) {
        let _listing = self.listing.lock().await;
        let as_of = self.wires.tools.as_of();
        let catalog = match Catalog::read(client, |request| self.dress(request).0).await {
            Ok(catalog) => catalog,
            Err(error) => {
                // Without the server's own words.
                let code = error.code();
                let why = code.is_none().then(|| error.to_string());
                tracing::warn!(target: "goaround", code, why, "the tools cannot be listed: no annotation is trusted");
                Catalog::default()
            }
        };
        self.wires.tools.read(as_of, catalog);
    }

    /// Lists the tools again whenever the server says that they have changed, whether or not it `says_so`
    /// beforehand. Only in the newer era it has to be asked for that.
    fn follow_tools(self: &Arc<Self>, client: &Client, says_so: bool) {
        if self.is_modern() && says_so {
            self.listen_for_tools(client);
        }
        let (session, wires) = (Arc::downgrade(self), self.wires.clone());
        let (client, closed) = (client.downgrade(), client.closed());
        tokio::spawn(follow(session, client, wires, closed));
    }

    fn listen_for_tools(&self, client: &Client) {
        let params = json!({ "notifications": { "toolsListChanged": true } });
        if let Ok(request) = Request::new(LISTEN, params) {
            let call = client.request(self.dress(request.read_only()).0);
            *lock(&self.own) = Some(call);
        }
    }
}

/// What the task that follows a server's tools wakes up for.
enum News {
    Changed,
    /// Our stream has ended: by the server's wish, or since it has none.
    StreamEnded {
        refused: bool,
    },
    Closed,
}

/// Holds neither the session nor the connection while it waits.
async fn follow(
    session: Weak<Session>,
    client: WeakClient,
    wires: Arc<Wires>,
    closed: impl Future<Output = Closure> + Send,
) {
    let mut closed = pin!(closed);
    loop {
        let news = {
            let mut changed = pin!(wires.tools_changed.notified());
            poll_fn(|cx| {
                if closed.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(News::Closed);
                }
                if changed.as_mut().poll(cx).is_ready() {
                    return Poll::Ready(News::Changed);
                }
                let Some(session) = session.upgrade() else { return Poll::Ready(News::Closed) };
                let mut own = lock(&session.own);
                let Some(call) = own.as_mut() else { return Poll::Pending };
                let Poll::Ready(ended) = Pin::new(call).poll(cx) else { return Poll::Pending };
                *own = None;
                Poll::Ready(News::StreamEnded { refused: ended.is_err() })
            })
            .await
        };
        match news {
            News::Closed => return,
            News::StreamEnded { refused: true } => {
                tracing::debug!(target: "goaround", "the server does not tell of changed tools");
                continue;
            }
            News::StreamEnded { refused: false } => sleep(LISTEN_AGAIN).await,
            News::Changed => {
                sleep(DEBOUNCE).await;
                // What was said meanwhile is in the list that is read now.
                pin!(wires.tools_changed.notified()).enable();
            }
        }
        let (Some(session), Some(client)) = (session.upgrade(), client.upgrade()) else { return };
        if let News::StreamEnded { .. } = news {
            session.listen_for_tools(&client);
        }
        session.list_tools(&client).await;
    }
}

impl Cursors {
    pub(crate) fn knows(&self, cursor: &str) -> bool {
        self.known.contains(&self.hasher.hash_one(cursor))
    }

    pub(crate) fn insert(&mut self, cursor: &str) {
        let hash = self.hasher.hash_one(cursor);
        if self.known.insert(hash) {
            self.order.push_back(hash);
        }
        if self.order.len() > MAX_CURSORS
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
    }
}

// ===== impl Listening =====

/// A caller that listens to a stream of notifications.
pub(super) struct Listening {
    session: Arc<Session>,
    client: WeakClient,
    call: Option<ResponseFuture>,
    /// The parameters as the caller gave them.
    original: Option<Arc<RawValue>>,
    /// The stream in the memory, once it is acknowledged.
    key: Option<u64>,
    limit: Deadline,
}

impl Listening {
    /// Ends when the stream does. A stream that was begun is remembered, and restored after a closure.
    pub(super) async fn run(mut self) -> Result<Response, CallError> {
        let Some(mut call) = self.call.take() else { return Err(CallError::not_sent("no call")) };
        if self.key.is_none() {
            match acknowledged(&mut call, &self.session.wires).await {
                Ok(()) => self.key = self.session.memory.listened(self.original.clone()),
                Err(Unacknowledged::Ended(ended)) => return ended.map_err(|error| self.undress(error)),
                Err(Unacknowledged::Silent) => {
                    let error = CallError::ambiguous("the server did not acknowledge the stream in time");
                    return Err(error.of_call(LISTEN, crate::Effect::ReadOnly));
                }
            }
        }
        let ended =
            match self.limit.instant() {
                None => call.await,
                // The stream that was taken over knows nothing of this call's deadline.
                Some(at) => match tokio::time::timeout_at(at, &mut call).await {
                    Ok(ended) => ended,
                    Err(_) => Err(CallError::deadline(crate::Delivery::Ambiguous)
                        .of_call(LISTEN, crate::Effect::ReadOnly)),
                },
            };
        match ended {
            Err(error) if error.closure().is_some() => {
                // Restored with the next session.
                self.key = None;
                Err(error)
            }
            ended => ended,
        }
    }

    fn undress(&self, error: CallError) -> CallError {
        super::connection::undress(error, self.original.as_ref())
    }
}

impl Drop for Listening {
    // Nobody listens any more, unless the connection has gone: then whoever listened may come back.
    fn drop(&mut self) {
        if let Some(key) = self.key
            && self.client.upgrade().is_some_and(|client| client.closure().is_none())
        {
            self.session.memory.listens_no_more(key);
        }
    }
}

/// Why a stream was not begun.
enum Unacknowledged {
    Ended(Result<Response, CallError>),
    Silent,
}

/// Waits, within bounds, until the server has acknowledged the stream.
async fn acknowledged(call: &mut ResponseFuture, wires: &Wires) -> Result<(), Unacknowledged> {
    let mut bound = pin!(sleep(ACKNOWLEDGED));
    loop {
        let mut heard = pin!(wires.heard.notified());
        // Registered before the look, so that nothing is missed in between.
        heard.as_mut().enable();
        if call.wire_id().is_some_and(|id| wires.is_acknowledged(id)) {
            return Ok(());
        }
        poll_fn(|cx| {
            if let Poll::Ready(ended) = Pin::new(&mut *call).poll(cx) {
                return Poll::Ready(Err(Unacknowledged::Ended(ended)));
            }
            // What was heard wins over time that is up.
            if heard.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            bound.as_mut().poll(cx).map(|()| Err(Unacknowledged::Silent))
        })
        .await?;
    }
}

// ===== impl Wires =====

/// What a connection's handler tells its session.
#[derive(Default)]
pub(super) struct Wires {
    /// The ids of streams that were acknowledged; the oldest are forgotten.
    acknowledged: Mutex<VecDeque<u64>>,
    heard: Notify,
    pub(super) tools: Arc<Listed>,
    tools_changed: Notify,
    pub(super) calls: Arc<Calls>,
}

impl Upholds for Wires {
    /// Whether a call that was stamped by a trusted annotation still may do no more than that.
    fn upholds(&self, request: &Request) -> bool {
        self.tools.upholds(tool_of(request).as_deref(), effect_of(request))
    }

    fn changes(&self) -> u64 {
        self.tools.lists()
    }
}

impl Wires {
    fn is_acknowledged(&self, id: u64) -> bool {
        lock(&self.acknowledged).contains(&id)
    }

    fn acknowledge(&self, notification: &Notification) {
        #[derive(Deserialize)]
        struct Params<'a> {
            #[serde(borrow, rename = "_meta")]
            meta: Meta<'a>,
        }
        #[derive(Deserialize)]
        struct Meta<'a> {
            #[serde(borrow, rename = "io.modelcontextprotocol/subscriptionId")]
            id: &'a RawValue,
        }
        let params = notification.raw_params().and_then(|params| serde_json::from_str(params.get()).ok());
        let Some(id) = params.and_then(|Params { meta }| own_id(meta.id.get())) else { return };
        let mut acknowledged = lock(&self.acknowledged);
        acknowledged.push_back(id);
        if acknowledged.len() > MAX_ACKNOWLEDGED {
            acknowledged.pop_front();
        }
        drop(acknowledged);
        self.heard.notify_waiters();
    }
}

/// The handler of a connection: the caller's own, and what the session must know.
pub(super) struct Inbox {
    pub(super) settings: Arc<Settings>,
    pub(super) wires: Arc<Wires>,
}

impl Handler for Inbox {
    async fn request(&self, request: ServerRequest) -> Result<Response, ServerError> {
        if request.method() == "ping" {
            return Response::new(json!({})).map_err(|_| ServerError::new(-32603, "internal error"));
        }
        // Ends with this future, be it that it panics, or that the connection is gone or the question taken back.
        let _question = (request.method() == ELICIT).then(|| self.wires.calls.ask(request.id.clone()));
        self.settings.handler.clone().request(request).await
    }

    fn notification(&self, notification: Notification) {
        match notification.method() {
            "notifications/subscriptions/acknowledged" => self.wires.acknowledge(&notification),
            "notifications/cancelled" => {
                if let Some(question) = taken_back(&notification) {
                    self.wires.calls.taken_back(&question);
                }
            }
            "notifications/progress" => self.wires.calls.progress(&notification),
            "notifications/tools/list_changed" => {
                self.wires.tools.changed();
                self.wires.tools_changed.notify_one();
            }
            _ => {}
        }
        if !self.settings.handler.notification(notification) {
            tracing::warn!(target: "goaround", "the handler of a notification panicked");
        }
    }
}
