use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;

use super::{Timer, Until, once_more, poll_in_time};
use crate::{Call, CallError, Cause, Delivery, Effect, call::effect_of, event::Report};

/// Future of [`DeadlineService`](super::DeadlineService).
#[pin_project]
#[derive(Debug)]
pub struct ResponseFuture<F> {
    #[pin]
    state: State<F>,
    /// Made when the inner future is first pending. In a box, since the future is moved before that.
    timer: Option<Pin<Box<Timer>>>,
    until: Until,
    effect: Effect,
    /// `None` of a call that was not handed over.
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
    #[inline]
    pub(crate) fn new(future: F, until: Until, effect: Effect, report: Option<Report>) -> Self {
        Self { state: State::Called(future), timer: None, until, effect, report }
    }

    /// Of a call that was not handed over.
    pub(crate) fn past<Req: Call>(error: CallError, request: &Req) -> Self {
        let effect = effect_of(request);
        let error = error.of_request(request, effect);
        Self { state: State::Past(Some(error)), timer: None, until: Until::default(), effect, report: None }
    }

    /// The call has failed; by `None` it is still pending at its deadline.
    #[cold]
    #[inline(never)]
    fn failed(self: Pin<&mut Self>, error: Option<CallError>) -> CallError {
        let mut this = self.project();
        let error = error.unwrap_or_else(|| CallError::deadline(Delivery::Ambiguous));
        // What is pending is given up now, not when somebody gets round to dropping this future.
        this.state.set(State::Done);
        *this.timer = None;
        let error = match this.report {
            Some(report) => report.ended(error, "", *this.effect),
            None => error.of_call("", *this.effect),
        };
        let mut error = error.with_attempt(None);
        if matches!(error.cause(), Cause::Deadline)
            && let Some(note) = this.until.why_so_early()
            && !error.notes().any(|known| known == note)
        {
            error = error.note(note);
        }
        match this.report {
            Some(report) => report.failed(error),
            None => error,
        }
    }
}

impl<F, Res> Future for ResponseFuture<F>
where
    F: Future<Output = Result<Res, CallError>>,
{
    type Output = Result<Res, CallError>;

    #[inline]
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.as_mut().project();
        let future = match this.state.project() {
            StateProj::Called(future) => future,
            StateProj::Past(error) => {
                return Poll::Ready(Err(error.take().expect("polled after completion")));
            }
            StateProj::Done => panic!("polled after completion"),
        };
        let ended = match this.timer {
            None => match future.poll(cx) {
                Poll::Ready(result) => Some(result),
                Poll::Pending => ready!(self.as_mut().first_pending(cx)),
            },
            Some(timer) => ready!(poll_until(future, timer.as_mut(), this.until, cx)),
        };
        match ended {
            Some(Ok(response)) => Poll::Ready(Ok(response)),
            Some(Err(error)) => Poll::Ready(Err(self.failed(Some(error)))),
            None => Poll::Ready(Err(self.failed(None))),
        }
    }
}

impl<F: Future> ResponseFuture<F> {
    /// The inner future was pending for the first time: the timer is made now.
    #[inline(never)]
    fn first_pending(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<F::Output>> {
        let this = self.project();
        let Some(at) = this.until.instant().filter(|_| !off!(Timer)) else { return Poll::Pending };
        let timer = this.timer.insert(Box::pin(Timer::at(at)));
        if this.until.poll_timer(timer.as_mut(), cx).is_pending() {
            return Poll::Pending;
        }
        let StateProj::Called(future) = this.state.project() else { return Poll::Ready(None) };
        Poll::Ready(once_more(future, cx))
    }
}

/// Polls `future` until the deadline, and once more then: `None` if it is pending even so.
fn poll_until<F: Future>(
    future: Pin<&mut F>,
    timer: Pin<&mut Timer>,
    until: &Until,
    cx: &mut Context<'_>,
) -> Poll<Option<F::Output>> {
    // The timer first, so that the poll after it is the one more, and so that an inner future that always
    // uses up the task's budget cannot starve the timer.
    let fired = until.poll_timer(timer, cx).is_ready();
    if fired && off!(LastPoll) {
        return Poll::Ready(None);
    }
    if fired {
        return Poll::Ready(once_more(future, cx));
    }
    // Of nested layers with the same instant the outer one's timer may fire first, and its one more poll
    // must find this one ready too.
    poll_in_time(future, || until.is_over(), cx)
}
