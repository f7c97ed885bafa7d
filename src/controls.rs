//! Guards that can be switched off, one at a time, so that a test can show that somebody would notice.
//!
//! Only a build with `--cfg goaround_controls` has any of this. In all others the macro is `false`.

/// Whether that guard is switched off on this thread.
#[cfg(not(goaround_controls))]
macro_rules! off {
    ($guard:ident) => {
        false
    };
}

/// Whether that guard is switched off on this thread.
#[cfg(goaround_controls)]
macro_rules! off {
    ($guard:ident) => {
        $crate::controls::is_off($crate::controls::Guard::$guard)
    };
}

#[cfg(goaround_controls)]
pub(crate) use switches::is_off;
#[cfg(goaround_controls)]
pub use switches::{Guard, switch_off};

#[cfg(goaround_controls)]
mod switches {
    use std::cell::Cell;

    /// What keeps a claim of this crate true.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Guard {
        /// Nothing below hands a call over after its attempt's time.
        AttemptTime,
        /// The last byte of a request, as far as its connection marks it, is what a quarantine counts from.
        LastByte,
        /// One attempt in doubt leaves the call in doubt, whatever the later ones say.
        Precedence,
        /// Only the failure of the current connection ends it.
        Generation,
        /// Only one of caller and writer leaves the queue with a frame.
        Withdrawal,
        /// A retry needs the budget's word.
        Budget,
        /// At its deadline a call is polled once more, to tell what it knows.
        LastPoll,
        /// A deadline has a timer.
        Timer,
        /// There is no verdict of not landed without a fence.
        Fence,
        /// A check begins after the fence holds.
        FenceFirst,
        /// A probe counts only on a connection that is younger than the process's end.
        ProbeAge,
        /// A connection is as old as the beginning of its connect.
        ConnectAge,
        /// A process is gone with all of its group.
        Group,
        /// While bytes are unwritten no declared fence holds.
        Unsent,
        /// No replay lands on another write.
        OtherWrites,
        /// Nor does one that waits for its connection while the other goes ahead.
        ReplayWait,
        /// A write that waits for its connection counts as handed over when it goes.
        WriteWait,
        /// One that a connection hands back is looked at before it goes to the next one, which may be there already.
        HandedBack,
        /// One that is called and polled later counts as handed over when it is polled first.
        FirstPoll,
        /// One that has waited keeps its place in the queue of the connection that it was given to.
        QueuePlace,
        /// A write is replayed once.
        Once,
        /// A write whose future is dropped is reported.
        DropGuard,
        /// No write goes out while another with its key is in doubt.
        KeyInDoubt,
        /// Nor does one that waits for its connection.
        KeyWait,
        /// A write is entered before it is handed over.
        Enter,
        /// A replay is claimed before it is handed over.
        Claim,
        /// A key counts only while the server keeps it.
        Window,
        /// A key's time passes by the wall clock too.
        WallClock,
        /// A replay that waits for its connection is not sent any more once its key's time is over.
        WindowWait,
        /// A call that a trusted annotation made harmless goes to no server that says otherwise.
        Annotation,
    }

    thread_local!(static OFF: Cell<Option<Guard>> = const { Cell::new(None) });

    /// Switches that guard off on this thread, and all others on.
    pub fn switch_off(guard: Option<Guard>) {
        OFF.set(guard);
    }

    /// Whether that guard is switched off on this thread.
    pub(crate) fn is_off(guard: Guard) -> bool {
        OFF.get() == Some(guard)
    }
}
