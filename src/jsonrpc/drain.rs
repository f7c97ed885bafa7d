//! The end of a pipe of which nobody says any more that it ends.

use std::{
    future::{Future, poll_fn},
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    task::unconstrained,
    time::{Sleep, sleep},
};

/// How long a pipe is read on that nobody writes to any more.
const TIME: Duration = Duration::from_millis(50);
/// How much is read of it however long that takes, as long as it is there. What a process has left in its pipe when it
/// exits is all within the next so many bytes: on Linux a pipe holds 64 KiB, and 1 MiB where that was asked for.
const ROOM: usize = 1 << 20;

/// Reads a pipe on whose peer has ended, or takes nothing any more, and makes an end of it: a grandchild may keep it
/// open, and even write to it, for ever. It ends when its time is over and there is nothing in it, or so much was read
/// of it that the peer itself had not more in it.
pub(crate) struct Drain {
    timer: Pin<Box<Sleep>>,
    room: usize,
}

impl Drain {
    pub(crate) fn begin() -> Self {
        Self { timer: Box::pin(sleep(TIME)), room: ROOM }
    }

    /// Does that read, which says `Ok(0)` at the pipe's end. A task's turn that is used up makes no pipe look empty.
    pub(crate) fn poll_read(
        &mut self,
        cx: &mut Context<'_>,
        mut read: impl FnMut(&mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        let read = poll_fn(|cx| {
            let is_over = self.timer.as_mut().poll(cx).is_ready();
            if is_over && self.room == 0 {
                return Poll::Ready(Ok(0));
            }
            match read(cx) {
                Poll::Pending if is_over => Poll::Ready(Ok(0)),
                read => {
                    if let Poll::Ready(Ok(count)) = read {
                        self.room = self.room.saturating_sub(count);
                    }
                    read
                }
            }
        });
        Pin::new(&mut unconstrained(read)).poll(cx)
    }
}
