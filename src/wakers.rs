//! Wakers, which are foreign code.
//!
//! One that panics is a mistake of its executor, and its own task's loss. The panic ends here, with a line to
//! `tracing`: whoever wakes is some other call, a connection's task or a destructor, which has nothing to do with it,
//! and has others to wake and something to bring to its end. It is not resumed after that either, since it would only
//! unwind through them later.
//!
//! Lists of waiters that are not this crate's, those of tokio's channels, lose everybody behind a waker that panics:
//! whose waker may be foreign waits in them by [`quietly`].

use std::{
    future::{Future, poll_fn},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::pin,
    sync::Arc,
    task::{Context, Wake, Waker},
};

use crate::connection::discard;

/// Wakes a task.
#[inline]
pub(crate) fn wake(waker: Waker) {
    unharmed(|| waker.wake());
}

/// Wakes each of those tasks.
pub(crate) fn wake_all(wakers: impl IntoIterator<Item = Waker>) {
    wakers.into_iter().for_each(wake);
}

/// Does what wakes others by other means, such as the send of a channel.
#[inline]
pub(crate) fn unharmed(wakes: impl FnOnce()) {
    if let Err(panic) = catch_unwind(AssertUnwindSafe(wakes)) {
        discard(panic);
        report();
    }
}

/// What listens to `tracing` is foreign too.
#[cold]
fn report() {
    let _ = catch_unwind(|| tracing::warn!(target: "goaround", "a task's waker panicked"));
}

/// Polls the future with a waker that does not panic.
pub(crate) async fn quietly<F: Future>(future: F) -> F::Output {
    let mut future = pin!(future);
    let mut known: Option<(Waker, Waker)> = None;
    poll_fn(|cx| {
        // The same one for the same task: whoever has it already does not want it again.
        let (_, quiet) = match known.take().filter(|(loud, _)| loud.will_wake(cx.waker())) {
            Some(both) => known.insert(both),
            None => known.insert((cx.waker().clone(), Arc::new(Quiet(cx.waker().clone())).into())),
        };
        future.as_mut().poll(&mut Context::from_waker(quiet))
    })
    .await
}

struct Quiet(Waker);

impl Wake for Quiet {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        unharmed(|| self.0.wake_by_ref());
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;
    use tokio_test::{assert_pending, assert_ready_ok, task};

    use super::*;

    struct Loud;

    impl Wake for Loud {
        fn wake(self: Arc<Self>) {
            panic!("as tested");
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "too many panics")]
    fn who_stands_behind_a_waker_that_panics_in_a_list_of_another_crate_is_woken() {
        let (tell, told) = watch::channel(0);
        let waiting = || {
            let mut told = told.clone();
            quietly(async move { told.changed().await })
        };
        let loud = Waker::from(Arc::new(Loud));
        // More than tokio wakes at a time, in each of the lists that it has.
        let mut before: Vec<_> = (0..1_000).map(|_| Box::pin(waiting())).collect();
        for waiting in &mut before {
            assert!(waiting.as_mut().poll(&mut Context::from_waker(&loud)).is_pending());
        }
        let mut last = task::spawn(waiting());
        assert_pending!(last.poll());
        assert_pending!(last.poll());
        tell.send_replace(1);
        assert!(last.is_woken());
        assert_ready_ok!(last.poll());
    }

    #[test]
    fn a_waker_that_panics_keeps_no_other_from_being_woken() {
        let mut tasks = [(); 2].map(|()| task::spawn(()));
        let wakers = tasks.each_mut().map(|task| task.enter(|cx, _| cx.waker().clone()));
        let [first, last] = wakers;
        wake_all([first, Arc::new(Loud).into(), last]);
        assert!(tasks.iter().all(|task| task.is_woken()));
    }
}
