//! What outlives a connection, what is learnt from how its calls end, and how the next one is brought there.

#![expect(deprecated, reason = "what versions up to 2025-11-25 have is served as long as servers have it")]

use std::{
    collections::HashSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use rmcp::{
    ServiceError,
    model::{ClientRequest, PaginatedRequestParams, ServerResult, SubscribeRequest, SubscribeRequestParams},
    service::PeerRequestOptions,
};
use tokio::time::{Instant, timeout};

use super::{
    Request,
    connection::{Inner, Kind},
    evidence::of_one_http_request,
};
use crate::{
    Basis, Call, CallError, Effect,
    mcp::{Catalog, Listed, ToolRules},
};

/// How long the state of a session may take to restore, before the connection is used without the rest.
const RESTORE: Duration = Duration::from_secs(10);
/// How long all pages of the list of tools may take, since a connect waits for them.
const LIST: Duration = Duration::from_secs(20);
/// How many pages it may have.
const MAX_PAGES: usize = 1_000;
const MAX_SUBSCRIPTIONS: usize = 4_096;

/// What a connector remembers of its server.
pub(super) struct Memory {
    tools: ToolRules,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// How many connections there have been.
    sessions: u64,
    /// Whether the server was found to speak only versions with a handshake.
    is_legacy: bool,
    /// The request that set the log level last.
    level: Option<ClientRequest>,
    subscriptions: Vec<String>,
    known: HashSet<String>,
    /// What the server says of its tools on the last connection that has listed them, for the classifier; and which
    /// one that is.
    tools: Arc<Listed>,
    listed_by: u64,
}

impl Memory {
    pub(super) fn new(tools: ToolRules) -> Self {
        Self { tools, state: Mutex::default() }
    }

    /// The number of the session that begins, from 1.
    pub(super) fn begin_session(&self) -> u64 {
        let mut state = self.lock();
        state.sessions += 1;
        state.sessions
    }

    pub(super) fn is_legacy(&self) -> bool {
        self.lock().is_legacy
    }

    pub(super) fn set_legacy(&self, is_legacy: bool) {
        self.lock().is_legacy = is_legacy;
    }

    pub(super) fn rules(&self) -> &ToolRules {
        &self.tools
    }

    /// Whether the server's list of tools is of any use.
    pub(super) fn wants_tools(&self) -> bool {
        self.tools.asks_the_server()
    }

    /// The session of that number has listed its tools. One that is replaced does not overrule the next one.
    fn listed(&self, number: u64, tools: &Arc<Listed>) {
        let mut state = self.lock();
        if number > state.listed_by {
            state.listed_by = number;
            state.tools = Arc::clone(tools);
        }
    }

    /// What a request may do, and who says so.
    pub(super) fn classify(&self, request: &Request) -> Option<(Effect, Basis)> {
        let annotated = |tool: &str| {
            let tools = Arc::clone(&self.lock().tools);
            tools.catalog().get(tool)
        };
        self.tools.decide(request.context(), request.method(), || request.params(), annotated)
    }

    fn subscribed(&self, uri: &str) {
        let mut state = self.lock();
        if state.subscriptions.len() < MAX_SUBSCRIPTIONS && state.known.insert(uri.to_owned()) {
            state.subscriptions.push(uri.to_owned());
        }
    }

    fn unsubscribed(&self, uri: &str) {
        let mut state = self.lock();
        if state.known.remove(uri) {
            state.subscriptions.retain(|known| known != uri);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// What is learnt from how a call ends.
pub(super) struct Lesson;

impl Lesson {
    pub(super) fn learn(inner: &Inner, request: &Request, outcome: &mut Result<ServerResult, CallError>) {
        let memory = &inner.memory;
        match outcome {
            Ok(_) if request.method() == "logging/setLevel" => {
                memory.lock().level = Some((**request).clone());
            }
            Ok(result) => {
                if let Some(uri) = request.subscribes_to() {
                    memory.subscribed(uri);
                } else if let Some(cursor) = next_cursor(result) {
                    inner.hands_out(&cursor);
                }
            }
            Err(error) => inner.judge_effect(request, error),
        }
        // Whatever came of it, nobody wants the subscription back on the next connection.
        if let Some(uri) = request.unsubscribes_from() {
            memory.unsubscribed(uri);
        }
    }
}

fn next_cursor(result: &ServerResult) -> Option<String> {
    match result {
        ServerResult::ListToolsResult(page) => page.next_cursor.clone(),
        ServerResult::ListPromptsResult(page) => page.next_cursor.clone(),
        ServerResult::ListResourcesResult(page) => page.next_cursor.clone(),
        ServerResult::ListResourceTemplatesResult(page) => page.next_cursor.clone(),
        // One that the SDK has no type for.
        ServerResult::CustomResult(page) => page.0.get("nextCursor")?.as_str().map(str::to_owned),
        _ => None,
    }
}

/// Restores the session on a new connection, before any call runs on it: the log level, the subscriptions, and
/// what the server says of its tools. What the server refuses, by an error or by an HTTP status, or does not answer
/// in time, stays undone.
///
/// # Errors
///
/// The transport's, where the connection is then of no use: it has closed, its session is gone, or nobody is there.
pub(super) async fn restore(inner: &Arc<Inner>) -> Result<(), ServiceError> {
    if !inner.is_modern() {
        let (level, subscriptions) = {
            let state = inner.memory.lock();
            (state.level.clone(), state.subscriptions.clone())
        };
        let subscriptions = subscriptions
            .into_iter()
            .map(|uri| SubscribeRequest::new(SubscribeRequestParams::new(uri)).into());
        let end = Instant::now() + RESTORE;
        for request in level.into_iter().chain(subscriptions) {
            let left = end.saturating_duration_since(Instant::now());
            match timeout(left, ask(inner, request)).await {
                Ok(Ok(_)) => {}
                Ok(Err(error)) if inner.closure().is_some() || ends_the_connection(inner.kind, &error) => {
                    return Err(error);
                }
                Ok(Err(_)) | Err(_) => {
                    tracing::warn!(target: "goaround", "a part of the session could not be restored");
                }
            }
        }
    }
    if inner.memory.wants_tools() {
        read_tools(inner).await;
        inner.memory.listed(inner.number, &inner.tools);
    }
    match inner.closure() {
        Some(_) => Err(ServiceError::TransportClosed),
        None => Ok(()),
    }
}

/// Whether nothing else can be had from a connection on which a request failed so. Over HTTP each request stands for
/// itself, and only where nobody is there is it the same for all.
fn ends_the_connection(kind: Kind, error: &ServiceError) -> bool {
    let of_one_request = match error {
        ServiceError::TransportSend(error) => of_one_http_request(error),
        ServiceError::TransportClosed => kind == Kind::Http,
        _ => true,
    };
    !of_one_request
}

/// Reads the list of tools. On a list that cannot be read all tools are writes.
pub(super) async fn read_tools(inner: &Arc<Inner>) {
    let as_of = inner.tools.as_of();
    let catalog = timeout(LIST, list_tools(inner)).await.ok().flatten();
    if catalog.is_none() {
        tracing::warn!(target: "goaround", "the list of tools could not be read: all of them are writes");
    }
    inner.tools.read(as_of, catalog.unwrap_or_default());
}

async fn list_tools(inner: &Arc<Inner>) -> Option<Catalog> {
    let mut catalog = Catalog::default();
    let mut cursor: Option<String> = None;
    for _ in 0..MAX_PAGES {
        let params = cursor.clone().map(|cursor| PaginatedRequestParams::default().with_cursor(Some(cursor)));
        let result = ask(inner, Request::list_tools(params).into_inner()).await.ok()?;
        let ServerResult::ListToolsResult(page) = result else { return None };
        let next = catalog.add_json(&serde_json::to_string(&page).ok()?).ok()?;
        if next.is_none() {
            return Some(catalog);
        }
        if next == cursor {
            return None;
        }
        cursor = next;
    }
    None
}

async fn ask(inner: &Arc<Inner>, request: ClientRequest) -> Result<ServerResult, ServiceError> {
    let peer = inner.peer().ok_or(ServiceError::TransportClosed)?;
    let handle = peer.send_request_with_option(request, PeerRequestOptions::no_options()).await?;
    handle.await_response().await
}
