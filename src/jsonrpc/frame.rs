//! Who has a request's frame: the caller, who may still withdraw it, or the writer, who has begun it.

#[cfg(goaround_loom)]
use loom::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(goaround_loom))]
use std::sync::atomic::{AtomicU8, Ordering};

const QUEUED: u8 = 0;
const WITHDRAWN: u8 = 1;
const TAKEN: u8 = 2;

/// The state of one frame. It leaves *queued* once, to *withdrawn* or to *taken*; whoever made that step
/// alone may say what follows from it: "not sent", or bytes.
#[derive(Debug)]
pub(crate) struct Frame(AtomicU8);

impl Frame {
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(QUEUED))
    }

    /// Withdraws the frame. `true` to the one who did: not one byte was or will be written.
    pub(crate) fn withdraw(&self) -> bool {
        self.leave_queue(WITHDRAWN) || off!(Withdrawal)
    }

    /// Takes the frame for writing. `true` to the one who did: it is to be finished.
    pub(crate) fn take(&self) -> bool {
        self.leave_queue(TAKEN)
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.0.load(Ordering::Acquire) == QUEUED
    }

    fn leave_queue(&self, to: u8) -> bool {
        self.0.compare_exchange(QUEUED, to, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }
}

#[cfg(all(test, goaround_loom))]
mod loom_tests {
    use loom::{
        sync::{
            Arc, Mutex,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    use super::Frame;

    /// What the wire and the caller have seen of one frame.
    struct Call {
        frame: Frame,
        written: AtomicUsize,
        not_sent: AtomicUsize,
    }

    impl Call {
        fn new() -> Arc<Self> {
            Arc::new(Self {
                frame: Frame::new(),
                written: AtomicUsize::new(0),
                not_sent: AtomicUsize::new(0),
            })
        }

        fn write(&self) {
            if self.frame.take() {
                self.written.fetch_add(1, Ordering::Relaxed);
            }
        }

        /// What the caller does at its deadline, and the connection at its closure.
        fn withdraw(&self) {
            if self.frame.withdraw() {
                self.not_sent.fetch_add(1, Ordering::Relaxed);
            }
        }

        fn seen(&self) -> (usize, usize) {
            (self.written.load(Ordering::Relaxed), self.not_sent.load(Ordering::Relaxed))
        }
    }

    #[test]
    fn loom_a_frame_is_either_written_or_not_sent_in_every_order() {
        loom::model(|| {
            let call = Call::new();
            let caller = thread::spawn({
                let call = call.clone();
                move || call.withdraw()
            });
            call.write();
            caller.join().unwrap();
            let (written, not_sent) = call.seen();
            assert_eq!(written + not_sent, 1);
            assert!(!call.frame.is_queued());
        });
    }

    #[test]
    fn loom_a_closure_and_a_deadline_at_once_say_not_sent_once() {
        loom::model(|| {
            let call = Call::new();
            let caller = thread::spawn({
                let call = call.clone();
                move || call.withdraw()
            });
            // The connection's task: it writes what it can get, then closes.
            let task = thread::spawn({
                let call = call.clone();
                move || {
                    call.write();
                    call.withdraw();
                }
            });
            caller.join().unwrap();
            task.join().unwrap();
            let (written, not_sent) = call.seen();
            assert_eq!(written + not_sent, 1);
        });
    }

    #[test]
    fn loom_a_frame_that_is_queued_during_a_withdrawal_is_not_written() {
        loom::model(|| {
            let call = Call::new();
            let queue = Arc::new(Mutex::new(Vec::new()));
            let writer = thread::spawn({
                let queue = queue.clone();
                move || {
                    let next: Option<Arc<Call>> = queue.lock().unwrap().pop();
                    if let Some(next) = next {
                        next.write();
                    }
                }
            });
            queue.lock().unwrap().push(call.clone());
            call.withdraw();
            writer.join().unwrap();
            let (written, not_sent) = call.seen();
            assert_eq!(written + not_sent, 1);
        });
    }
}
