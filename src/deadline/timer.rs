//! A timer for an instant that may move.

use std::{
    future::Future,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use pin_project::pin_project;
use tokio::time::{Instant, Sleep, sleep_until};

use crate::places::Place;

/// Tells when a call's time, or an attempt's, is up.
///
/// While the call stands still there is nothing to tell: the timer then has a place with what moves the deadline instead,
/// which it gives up when it runs again, or goes. So there is one for each timer, however often and by whom that is
/// polled.
#[pin_project(project = TimerProj)]
#[derive(Debug)]
pub(crate) enum Timer {
    Runs(#[pin] Sleep),
    Stands(Arc<Place>),
}

/// When that is, as a timer sees it.
pub(super) enum End {
    Past,
    Later(Instant),
    /// Not while the call stands still; the task is woken at the end of that.
    Paused,
}

// ===== impl Timer =====

impl Timer {
    #[inline]
    pub(crate) fn at(at: Instant) -> Self {
        Self::Runs(sleep_until(at))
    }

    /// Ready at the instant that it was made for, whatever has moved since. One that stands still had run out.
    #[inline]
    pub(crate) fn poll_fixed(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        match self.project() {
            TimerProj::Runs(sleep) => sleep.poll(cx),
            TimerProj::Stands(_) => Poll::Ready(()),
        }
    }

    /// Ready once the time is up. Until it runs out nobody is asked when that is now.
    #[inline]
    pub(super) fn poll_moving(
        mut self: Pin<&mut Self>,
        end: impl Fn(&mut Option<Arc<Place>>, &Context<'_>) -> End,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        if let TimerProj::Runs(sleep) = self.as_mut().project() {
            ready!(sleep.poll(cx));
        }
        self.poll_run_out(end, cx)
    }

    #[cold]
    #[inline(never)]
    fn poll_run_out(
        mut self: Pin<&mut Self>,
        end: impl Fn(&mut Option<Arc<Place>>, &Context<'_>) -> End,
        cx: &mut Context<'_>,
    ) -> Poll<()> {
        loop {
            let mut place = match &*self {
                Self::Runs(_) => None,
                Self::Stands(place) => Some(Arc::clone(place)),
            };
            match (end(&mut place, cx), &*self, place) {
                (End::Past, ..) => return Poll::Ready(()),
                (End::Later(at), ..) => {
                    self.set(Self::at(at));
                    ready!(self.as_mut().poll_fixed(cx));
                }
                (End::Paused, Self::Runs(_), Some(place)) => {
                    self.set(Self::Stands(place));
                    return Poll::Pending;
                }
                (End::Paused, ..) => return Poll::Pending,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_takes_no_room_besides_the_timer() {
        assert_eq!(size_of::<Option<Timer>>(), size_of::<Option<Sleep>>());
    }
}
