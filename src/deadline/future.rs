use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;
use tokio::time::{Sleep, sleep_until};

use super::Until;
use crate::{CallError, Cause, Delivery, Effect, event::Report};

/// Future of [`DeadlineService`](super::DeadlineService).
#[pin_project]
#[derive(Debug)]
pub struct ResponseFuture<F> {
    #[pin]
    state: State<F>,
    /// Made when the inner future is first pending.
    #[pin]
    timer: Option<Sleep>,
    until: Until,
    effect: Effect,
    /// Kept by the outermost layer of the call.
    report: Option<Report>,
}

#[pin_project(project = StateProj)]
#[derive(Debug)]
enum State<F> {
    /// The call was handed over.
    Called(#[pin] F),
    /// The deadline had passed before.
    Past(Option<CallError>),
    /// Nothing is left.
    Done,
}

// ===== impl ResponseFuture =====

impl<F> ResponseFuture<F> {
    pub(super) fn new(future: F, until: Until, effect: Effect, report: Option<Report>) -> Self {
        Self { state: State::Called(future), timer: None, until, effect, report }
    }

    pub(super) fn past(error: CallError, effect: Effect) -> Self {
        Self { state: State::Past(Some(error)), timer: None, until: Until::default(), effect, report: None }
    }
}

impl<F, Res> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Res, CallError>>,
{
    type Output = Result<Res, CallError>;

    #[inline]
    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let mut this = self.project();
        let future = match this.state.as_mut().project() {
            StateProj::Called(future) => future,
            StateProj::Past(error) => {
                return Poll::Ready(Err(error.take().expect("polled after completion")));
            }
            StateProj::Done => panic!("polled after completion"),
        };
        let error = match ready!(poll_until(future, this.timer.as_mut(), this.until, cx)) {
            Some(Ok(response)) => return Poll::Ready(Ok(response)),
            Some(Err(error)) => error,
            None => CallError::deadline(Delivery::Ambiguous),
        };
        // What is pending is given up now, not when somebody gets round to dropping this future.
        this.state.set(State::Done);
        this.timer.set(None);
        let mut error = error.of_call("", *this.effect).with_attempt(None);
        if matches!(error.cause(), Cause::Deadline)
            && let Some(note) = this.until.why_so_early()
            && !error.notes().any(|known| known == note)
        {
            error = error.note(note);
        }
        if let Some(report) = this.report {
            report.failed(&error);
        }
        Poll::Ready(Err(error))
    }
}

/// Polls `future` until the deadline, and once more then: `None` if it is pending even so.
fn poll_until<F: Future>(
    mut future: Pin<&mut F>,
    mut timer: Pin<&mut Option<Sleep>>,
    until: &Until,
    cx: &mut Context<'_>,
) -> Poll<Option<F::Output>> {
    // The timer first, so that the poll after it is the one more, and so that an inner future that always
    // uses up the task's budget cannot starve the timer.
    if let Some(timer) = timer.as_mut().as_pin_mut() {
        let fired = until.poll_timer(timer, cx).is_ready();
        if fired && off!(LastPoll) {
            return Poll::Ready(None);
        }
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        if fired {
            return Poll::Ready(None);
        }
        // Of nested layers with the same instant the outer one's timer may fire first, and its one more poll
        // must find this one ready too.
        if !until.is_over() {
            return Poll::Pending;
        }
    } else {
        if let Poll::Ready(output) = future.as_mut().poll(cx) {
            return Poll::Ready(Some(output));
        }
        let Some(at) = until.instant().filter(|_| !off!(Timer)) else { return Poll::Pending };
        timer.set(Some(sleep_until(at)));
        if timer.as_pin_mut().is_some_and(|timer| until.poll_timer(timer, cx).is_pending()) {
            return Poll::Pending;
        }
    }
    // The time ran out while the inner future was polled.
    Poll::Ready(match future.poll(cx) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    })
}
