//! Who has a request's frame: the caller, who may still withdraw it, or the writer, who has begun it.

#[cfg(goaround_loom)]
use loom::sync::atomic::{AtomicU8, Ordering};
#[cfg(not(goaround_loom))]
use std::sync::atomic::{AtomicU8, Ordering};

const QUEUED: u8 = 0;
const WITHDRAWN: u8 = 1;
const TAKEN: u8 = 2;

/// The state of one frame. It leaves *queued* to *withdrawn*, for good, or to *taken*; whoever made that step
/// alone may say what follows from it: "not sent", or bytes. The writer may put back what it took, as long as the
/// transport may have nothing of it.
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

    /// Takes the frame for writing. `true` to the one who did: it is to be finished, or put back.
    pub(crate) fn take(&self) -> bool {
        self.leave_queue(TAKEN)
    }

    /// Lets the caller have it again, who may withdraw it: the one who took it has written nothing of it.
    pub(super) fn put_back(&self) {
        let _ = self.0.compare_exchange(TAKEN, QUEUED, Ordering::AcqRel, Ordering::Relaxed);
    }

    pub(crate) fn is_queued(&self) -> bool {
        self.0.load(Ordering::Acquire) == QUEUED
    }

    pub(crate) fn is_withdrawn(&self) -> bool {
        self.0.load(Ordering::Acquire) == WITHDRAWN
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

        /// As over a pipe that is full: it is offered, and not a byte accepted.
        fn offer(&self) {
            if self.frame.take() {
                self.frame.put_back();
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
    fn loom_a_frame_that_is_put_back_is_either_written_or_not_sent_in_every_order() {
        loom::model(|| {
            let call = Call::new();
            let caller = thread::spawn({
                let call = call.clone();
                move || call.withdraw()
            });
            call.offer();
            assert!(call.frame.is_queued() || call.frame.is_withdrawn());
            call.offer();
            call.write();
            caller.join().unwrap();
            let (written, not_sent) = call.seen();
            assert_eq!(written + not_sent, 1);
            assert_eq!(call.frame.is_withdrawn(), not_sent == 1);
        });
    }

    #[test]
    fn loom_a_closure_says_not_sent_once_of_a_frame_that_was_put_back() {
        loom::model(|| {
            let call = Call::new();
            // Twice, as at an attempt's end and at the deadline.
            let caller = thread::spawn({
                let call = call.clone();
                move || {
                    call.withdraw();
                    call.withdraw();
                }
            });
            call.offer();
            call.offer();
            call.withdraw();
            caller.join().unwrap();
            assert_eq!(call.seen(), (0, 1));
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
