//! One call, shared by its future and by what carries it: who has its bytes, and what the transport saw of it.

use std::{
    mem,
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering},
    },
    task::{Context, Waker},
};

use rmcp::model::{ClientJsonRpcMessage, ClientRequest, GetExtensions};
use tokio::sync::Notify;

use super::{
    HttpErrorKind, Request,
    evidence::{Reason, Sight},
};
use crate::{
    Call, CallError, Closure, Delivery, Evidence,
    call::effect_of,
    jsonrpc::{Frame, Said},
    wakers::wake,
};

/// What has become of one call on its way.
pub(super) struct Exchange {
    pub(super) frame: Frame,
    pub(super) request: Request,
    /// Its key in the connection's register.
    pub(super) key: u64,
    /// The id that the SDK gave it; -1 as long as it has none.
    id: AtomicI64,
    /// How often the peer had been heard when the request was given away.
    heard: AtomicU64,
    begun: AtomicBool,
    /// What the server has answered, as far as that is known.
    said: OnceLock<Said>,
    /// The frame was withdrawn.
    gone: Notify,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    waker: Option<Waker>,
    /// What the connection's end makes of it.
    end: Option<CallError>,
    /// What the transport saw, in place of what the SDK makes of that.
    sight: Option<Sight>,
    /// Nobody waits any more.
    given_up: bool,
    /// No byte may be written any more.
    sealed: bool,
    /// How many bytes the transport has accepted, and of how many; `None` where that is not seen.
    accepted: Option<(usize, usize)>,
    /// An HTTP client has let go of the bytes, which may lie in a buffer of its own; the server has accepted the
    /// request. Both together say that the last byte was sent.
    let_go: bool,
    taken_up: bool,
    /// It was marked as withdrawn.
    withdrawn: bool,
}

/// The exchange, as it travels with the SDK's request: never on the wire.
#[derive(Clone)]
pub(super) struct Ticket(pub(super) Arc<Exchange>);

impl Exchange {
    pub(super) fn new(request: Request, key: u64, heard: u64) -> Self {
        Self {
            frame: Frame::new(),
            request,
            key,
            id: AtomicI64::new(-1),
            heard: AtomicU64::new(heard),
            begun: AtomicBool::new(false),
            said: OnceLock::new(),
            gone: Notify::new(),
            state: Mutex::default(),
        }
    }

    /// The exchange of a message that is on its way, if it is the request of a call.
    pub(super) fn of(message: &ClientJsonRpcMessage) -> Option<Arc<Self>> {
        let ClientJsonRpcMessage::Request(request) = message else { return None };
        request.request.extensions().get::<Ticket>().map(|ticket| Arc::clone(&ticket.0))
    }

    /// What is given to the SDK.
    pub(super) fn ticketed(self: &Arc<Self>) -> ClientRequest {
        let mut request = (*self.request).clone();
        request.extensions_mut().insert(Ticket(Arc::clone(self)));
        request
    }

    pub(super) fn id(&self) -> Option<i64> {
        Some(self.id.load(Ordering::Relaxed)).filter(|id| *id >= 0)
    }

    pub(super) fn set_id(&self, id: i64) {
        self.id.store(id, Ordering::Relaxed);
    }

    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    pub(super) fn set_heard(&self, heard: u64) {
        self.heard.store(heard, Ordering::Relaxed);
    }

    /// The transport has begun with it, though its frame may still be withdrawn.
    pub(super) fn set_begun(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_begun(&self) -> bool {
        self.begun.load(Ordering::Relaxed)
    }

    /// The server has answered; the first word counts.
    pub(super) fn answered(&self, said: Said) {
        let _ = self.said.set(said);
    }

    pub(super) fn said(&self) -> Option<Said> {
        self.said.get().copied()
    }

    /// Marks that the transport accepted the last byte.
    pub(super) fn mark_sent(&self) {
        if let Some(activity) = self.request.context().activity() {
            activity.sent();
        }
    }

    /// An HTTP client has let go of the bytes, and may have them in a buffer of its own.
    pub(super) fn let_go(&self) {
        let is_sent = {
            let mut state = self.state();
            state.let_go = true;
            state.taken_up
        };
        if is_sent {
            self.mark_sent();
        }
    }

    /// The server has received and accepted the request, as its response's status says.
    pub(super) fn taken_up(&self) {
        let is_sent = {
            let mut state = self.state();
            state.taken_up = true;
            state.let_go
        };
        if is_sent {
            self.mark_sent();
        }
    }

    /// Marks that nothing was sent and nothing will be: once, since another connection may have the request after that.
    pub(super) fn mark_withdrawn(&self) {
        if let Some(activity) = self.request.context().activity() {
            let mut state = self.state();
            if !mem::replace(&mut state.withdrawn, true) {
                activity.withdrawn();
            }
        }
    }

    /// Withdraws the frame. `true`: not one byte of it was or will be written.
    pub(super) fn withdraw(&self) -> bool {
        if self.withdraw_unwritten() {
            // Kept for a transport that has yet to look.
            self.gone.notify_one();
            return true;
        }
        matches!(self.state().sight, Some(Sight::NotSent(..) | Sight::EffectChanged | Sight::Overdue(_)))
    }

    /// The same, by the transport. What it has taken is withdrawn too as long as the pipe has accepted nothing of it.
    fn withdraw_unwritten(&self) -> bool {
        if self.frame.withdraw() {
            return true;
        }
        let mut state = self.state();
        let is_unwritten = state.is_unwritten();
        state.sealed |= is_unwritten;
        is_unwritten
    }

    /// Whether it is there to be written, and not one byte of it was so far.
    pub(super) fn is_unwritten(&self) -> bool {
        self.frame.is_queued() || self.state().is_unwritten()
    }

    /// Whether the server may have read it: before that nothing it says is an answer. Servers answer a message that
    /// lacks but its newline.
    pub(super) fn is_out(&self) -> bool {
        let is_taken = !self.frame.is_queued() && !self.frame.is_withdrawn();
        is_taken && self.state().accepted.is_none_or(|(accepted, len)| accepted + 1 >= len)
    }

    /// The response of its own HTTP request is there: whether the request has left. If not, it does not any more, since
    /// nobody would read another response.
    pub(super) fn has_left(&self) -> bool {
        if self.frame.is_queued() {
            self.refuse(Sight::NotSent(HttpErrorKind::WrongId, None));
        }
        !self.frame.is_withdrawn()
    }

    /// Resolves when the frame was withdrawn by whoever waits for the call.
    pub(super) async fn was_withdrawn(&self) {
        self.gone.notified().await;
    }

    /// It does not go out, for that reason.
    pub(super) fn refuse(&self, why: Sight) {
        if self.withdraw_unwritten() {
            self.mark_withdrawn();
            self.saw(why);
        }
    }

    /// The transport gave up before it asked for the first byte, or says so: from here on it gets none.
    pub(super) fn failed_to_send(&self, kind: HttpErrorKind, reason: Option<Reason>) {
        if self.frame.withdraw() {
            self.mark_withdrawn();
            self.saw(Sight::NotSent(kind, reason));
        } else {
            self.saw(Sight::Odd(HttpErrorKind::NoResponse, None));
        }
    }

    /// Takes the frame for a transport that counts its bytes, of which there are `len`. `false`: it was withdrawn.
    pub(super) fn begin(&self, len: usize) -> bool {
        let mut state = self.state();
        let taken = !state.sealed && self.frame.take();
        if taken {
            state.accepted = Some((0, len));
        }
        taken
    }

    /// Writes some of the call's bytes, if they may still be written. `write` does not wait.
    pub(super) fn write<T>(
        &self,
        write: impl FnOnce() -> T,
        accepted: impl FnOnce(&T) -> usize,
    ) -> Option<T> {
        let mut state = self.state();
        if state.sealed {
            return None;
        }
        let written = write();
        if let Some((so_far, _)) = &mut state.accepted {
            *so_far += accepted(&written);
        }
        Some(written)
    }

    /// Notes what the transport saw; the first word counts.
    pub(super) fn saw(&self, sight: Sight) {
        self.state().sight.get_or_insert(sight);
    }

    pub(super) fn take_sight(&self) -> Option<Sight> {
        self.state().sight.take()
    }

    /// What the connection's end has made of the call, if it has ended; else registers for a wake-up.
    pub(super) fn poll_end(&self, cx: &mut Context<'_>) -> Option<CallError> {
        let new = cx.waker().clone();
        let (end, old) = {
            let mut state = self.state();
            match state.end.take() {
                Some(end) => (Some(end), None),
                None => (None, state.waker.replace(new)),
            }
        };
        drop(old);
        end
    }

    /// Nobody waits any more.
    pub(super) fn give_up(&self) {
        let old = {
            let mut state = self.state();
            state.given_up = true;
            state.waker.take()
        };
        drop(old);
    }

    pub(super) fn is_given_up(&self) -> bool {
        self.state().given_up
    }

    /// The connection has ended, and this call with what is known of its bytes. Not one is written from here on.
    pub(super) fn close(&self, closure: &Closure) {
        let error = self.closed(closure);
        let waker = {
            let mut state = self.state();
            state.end.get_or_insert(error);
            state.waker.take()
        };
        if let Some(waker) = waker {
            wake(waker);
        }
    }

    fn closed(&self, closure: &Closure) -> CallError {
        if self.withdraw() {
            return self.not_sent(closure);
        }
        let accepted = {
            let mut state = self.state();
            state.sealed = true;
            state.accepted
        };
        match accepted {
            // Servers run a message that lacks but its newline. Elsewhere than on Unix tokio buffers what is
            // written to a child, and may write it out later.
            Some((accepted, len)) if cfg!(unix) && accepted + 1 < len => {
                self.named(CallError::of_evidence(Evidence::FrameCut))
            }
            _ => self.named(CallError::of_closure(closure.clone(), Delivery::Ambiguous)),
        }
    }

    /// Not one byte was written, and none will be: the request is handed back.
    pub(super) fn not_sent(&self, closure: &Closure) -> CallError {
        self.hand_back(CallError::of_closure(closure.clone(), Delivery::NotSent))
    }

    /// The error, with the request in it.
    pub(super) fn hand_back(&self, error: CallError) -> CallError {
        self.mark_withdrawn();
        self.named(error).with_request(self.request.with_context(self.request.context().for_attempt()))
    }

    /// The error, with the call's name and effect.
    pub(super) fn named(&self, error: CallError) -> CallError {
        error.of_request(&self.request, effect_of(&self.request))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Whether a transport that counts bytes has the frame, and has accepted nothing of it.
    fn is_unwritten(&self) -> bool {
        matches!(self.accepted, Some((0, _)))
    }
}
