//! The calls in flight whose deadline moves: by progress that the server reports with their token, and while the
//! user answers a question of the server.

use std::{
    collections::HashMap,
    mem,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
};

use serde::Deserialize;
use serde_json::{Value, value::RawValue};

use super::envelope::Envelope;
use crate::{
    Call, Pause, Progress,
    jsonrpc::{Notification, Request},
};

/// Those of one connection.
#[derive(Default)]
pub(super) struct Calls(Mutex<State>);

#[derive(Default)]
struct State {
    pending: HashMap<u64, Pending>,
    /// The questions that the user is answering, and their ids at the server.
    questions: HashMap<u64, Box<str>>,
}

struct Pending {
    progress: Arc<Progress>,
    token: Option<Value>,
    pause: Option<Pause>,
}

/// While it is held its call is watched.
pub(super) struct Watch {
    calls: Arc<Calls>,
    key: u64,
}

/// While it is held the user answers a question.
pub(super) struct Question {
    calls: Arc<Calls>,
    key: u64,
}

impl Calls {
    /// Watches a call that wants to be, before it is sent. One with an idle limit gets a token, unless the caller
    /// gave it one.
    pub(super) fn watch(self: &Arc<Self>, request: &mut Request) -> Option<Watch> {
        let progress = request.context().progress()?.clone();
        let key = next_key();
        let token = progress.idle().and_then(|_| {
            let envelope = Envelope::of_token(&format!("goaround-{key}"));
            request.replace_params(envelope.around(request.shared_params().as_ref()));
            token_of(request.raw_params()?)
        });
        let mut state = self.lock();
        let pause = (!state.questions.is_empty() && progress.pauses_while_asking()).then(|| progress.pause());
        state.pending.insert(key, Pending { progress, token, pause });
        drop(state);
        Some(Watch { calls: Arc::clone(self), key })
    }

    /// The server has said that it is at work on something.
    pub(super) fn progress(&self, notification: &Notification) {
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Params {
            progress_token: Value,
        }
        if self.lock().pending.is_empty() {
            return;
        }
        let Ok(Params { progress_token }) = notification.params() else { return };
        let state = self.lock();
        for call in state.pending.values().filter(|call| call.token.as_ref() == Some(&progress_token)) {
            call.progress.made();
        }
    }

    /// The user begins to answer the question of that id.
    pub(super) fn ask(self: &Arc<Self>, id: Box<str>) -> Question {
        let key = next_key();
        let mut state = self.lock();
        state.questions.insert(key, id);
        if state.questions.len() == 1 {
            for call in state.pending.values_mut().filter(|call| call.progress.pauses_while_asking()) {
                call.pause = Some(call.progress.pause());
            }
        }
        drop(state);
        Question { calls: Arc::clone(self), key }
    }

    /// The server does not wait for an answer to that question any more: it holds up no call, whatever its handler
    /// does.
    pub(super) fn taken_back(&self, question: &str) {
        self.answered(|_, id| id == question);
    }

    /// Forgets those questions, and ends the pause with the last one.
    fn answered(&self, which: impl Fn(u64, &str) -> bool) {
        let mut state = self.lock();
        let before = state.questions.len();
        state.questions.retain(|key, id| !which(*key, id));
        if before == 0 || !state.questions.is_empty() {
            return;
        }
        let over: Vec<_> = state.pending.values_mut().map(|call| mem::take(&mut call.pause)).collect();
        // The end of a pause wakes tasks, which is foreign code: without the lock.
        drop(state);
        drop(over);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The server does not wait for the answer to that request any more; its id, as it stood on the wire.
pub(super) fn taken_back(notification: &Notification) -> Option<Box<str>> {
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Params<'a> {
        #[serde(borrow)]
        request_id: &'a RawValue,
    }
    let params = notification.raw_params().filter(|_| notification.method() == "notifications/cancelled")?;
    let Params { request_id } = serde_json::from_str(params.get()).ok()?;
    Some(request_id.get().into())
}

/// Over all connections: no token of a replay is that of another attempt.
fn next_key() -> u64 {
    static KEYS: AtomicU64 = AtomicU64::new(1);
    KEYS.fetch_add(1, Ordering::Relaxed)
}

/// The token that a request carries: a string or a number.
fn token_of(params: &RawValue) -> Option<Value> {
    #[derive(Deserialize)]
    struct Params {
        #[serde(rename = "_meta")]
        meta: Meta,
    }
    #[derive(Deserialize)]
    #[serde(rename_all = "camelCase")]
    struct Meta {
        progress_token: Value,
    }
    let Params { meta } = serde_json::from_str(params.get()).ok()?;
    Some(meta.progress_token).filter(|token| token.is_string() || token.is_number())
}

impl Drop for Watch {
    fn drop(&mut self) {
        // The end of a pause wakes tasks, which is foreign code: without the lock.
        let gone = self.calls.lock().pending.remove(&self.key);
        drop(gone);
    }
}

impl Drop for Question {
    fn drop(&mut self) {
        self.calls.answered(|key, _| key == self.key);
    }
}
