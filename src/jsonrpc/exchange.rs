//! One call, shared by its future and the connection's task.

use std::{
    mem,
    sync::{
        Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Waker},
};

use super::{Request, Response, codec::Said, frame::Frame};
use crate::{Call, CallError, wakers::wake};

pub(super) type Outcome = Result<Response, CallError>;

/// On whose behalf something is sent.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Call,
    Notification,
    /// The connection's own question, whether the peer is there.
    Probe,
}

/// One request on its way, and what became of it.
pub(super) struct Exchange {
    pub(super) frame: Frame,
    pub(super) request: Request,
    /// Whether an answer is expected, or the last byte is all there is to wait for.
    pub(super) answered: bool,
    /// Whether it is a question of our own, in which no caller takes part.
    pub(super) own: bool,
    /// The id on the wire, from when the frame is taken; the connection's task alone uses it.
    id: AtomicU64,
    /// How often the peer had been heard when the request was queued, then when it was written.
    heard: AtomicU64,
    /// What its answer was, if that was too long, which the outcome does not tell.
    pub(super) said: OnceLock<Said>,
    slot: Mutex<Slot>,
}

enum Slot {
    Waiting(Option<Waker>),
    Done(Outcome),
    /// Nobody waits any more.
    Gone,
}

impl Exchange {
    pub(super) fn new(request: Request, kind: Kind) -> Self {
        Self {
            frame: Frame::new(),
            request,
            answered: kind != Kind::Notification,
            own: kind == Kind::Probe,
            id: AtomicU64::new(0),
            heard: AtomicU64::new(0),
            said: OnceLock::new(),
            slot: Mutex::new(Slot::Waiting(None)),
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id.load(Ordering::Relaxed)
    }

    pub(super) fn set_id(&self, id: u64) {
        self.id.store(id, Ordering::Relaxed);
    }

    pub(super) fn heard(&self) -> u64 {
        self.heard.load(Ordering::Relaxed)
    }

    pub(super) fn set_heard(&self, heard: u64) {
        self.heard.store(heard, Ordering::Relaxed);
    }

    /// Marks that the transport has accepted the last byte, and flushed it.
    pub(super) fn mark_sent(&self) {
        if let Some(activity) = self.request.context().activity() {
            activity.sent();
        }
    }

    /// Marks that nothing was sent and nothing will be.
    pub(super) fn mark_withdrawn(&self) {
        if let Some(activity) = self.request.context().activity() {
            activity.withdrawn();
        }
    }

    /// Whether somebody answers for what becomes of its bytes.
    pub(super) fn is_watched(&self) -> bool {
        self.request.context().activity().is_some()
    }

    /// That its time was up before its turn came.
    pub(super) fn overdue(&self) -> Option<CallError> {
        let error = self.request.context().overdue()?;
        Some(error.with_request(self.request.for_attempt()))
    }

    /// Ends the call, or gives the outcome back if nobody waits for it any more.
    pub(super) fn complete(&self, outcome: Outcome) -> Result<(), Outcome> {
        let mut slot = self.slot();
        let Slot::Waiting(waker) = &mut *slot else {
            return Err(outcome);
        };
        let waker = waker.take();
        *slot = Slot::Done(outcome);
        drop(slot);
        if let Some(waker) = waker {
            wake(waker);
        }
        Ok(())
    }

    /// The outcome, if there is one; else registers for a wake-up.
    pub(super) fn poll(&self, cx: &mut Context<'_>) -> Option<Outcome> {
        let slot = self.slot();
        match &*slot {
            Slot::Waiting(Some(waker)) if waker.will_wake(cx.waker()) => return None,
            Slot::Waiting(_) => drop(slot),
            Slot::Done(_) | Slot::Gone => {
                drop(slot);
                return self.give_up();
            }
        }
        // Wakers are foreign code: cloned and dropped without the lock.
        let new = cx.waker().clone();
        let mut slot = self.slot();
        match &mut *slot {
            Slot::Waiting(waker) => {
                let old = waker.replace(new);
                drop(slot);
                drop(old);
                None
            }
            Slot::Done(_) | Slot::Gone => {
                drop(slot);
                self.give_up()
            }
        }
    }

    /// Stops waiting; the outcome, if it was there.
    pub(super) fn give_up(&self) -> Option<Outcome> {
        let slot = mem::replace(&mut *self.slot(), Slot::Gone);
        match slot {
            Slot::Done(outcome) => Some(outcome),
            Slot::Waiting(_) | Slot::Gone => None,
        }
    }

    pub(super) fn is_given_up(&self) -> bool {
        matches!(*self.slot(), Slot::Gone)
    }

    fn slot(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
