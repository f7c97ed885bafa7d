//! The process group of a child: signals to it, and whether it is gone.

#[cfg(unix)]
pub(super) use unix::Group;

#[cfg(not(unix))]
pub(super) use elsewhere::Group;

#[cfg(unix)]
mod unix {
    use rustix::{
        io::Errno,
        process::{Pid, Signal, kill_process_group, test_kill_process_group},
    };

    /// A group of processes that [`tokio::process::Command::process_group`] made.
    #[derive(Clone, Copy, Debug)]
    pub(in super::super) struct Group(Option<Pid>);

    impl Group {
        /// The group that the child of that id leads.
        pub(in super::super) fn of(child: Option<u32>) -> Self {
            Self(child.and_then(|id| i32::try_from(id).ok()).and_then(Pid::from_raw))
        }

        /// Asks all of its processes to end. Call it only when the group was just seen to be there: a number
        /// that is free may be given to others.
        pub(in super::super) fn terminate(self) {
            self.signal(Signal::TERM);
        }

        /// Ends all of its processes. See [`Group::terminate`].
        pub(in super::super) fn kill(self) {
            self.signal(Signal::KILL);
        }

        fn signal(self, signal: Signal) {
            if let Some(group) = self.0 {
                let _ = kill_process_group(group, signal);
            }
        }

        /// Whether none of its processes can do anything any more. Ask only once the child is reaped.
        pub(in super::super) fn is_gone(self) -> bool {
            let Some(group) = self.0 else { return false };
            if test_kill_process_group(group) == Err(Errno::SRCH) {
                return true;
            }
            // Only the dead are left, perhaps: nobody reaps orphans in many containers. One that is being
            // forked while we look can be missed, so that the second look follows a signal that no fork of
            // the group survives.
            if !only_zombies(group) {
                return false;
            }
            self.kill();
            test_kill_process_group(group) == Err(Errno::SRCH) || only_zombies(group)
        }
    }

    /// Whether the group has processes and all of them are dead. `false` where that cannot be seen.
    #[cfg(target_os = "linux")]
    fn only_zombies(group: Pid) -> bool {
        let Ok(processes) = std::fs::read_dir("/proc") else { return false };
        let group = group.as_raw_nonzero().get();
        let mut zombies = false;
        for process in processes {
            let Ok(process) = process else { return false };
            if !process.file_name().as_encoded_bytes().first().is_some_and(u8::is_ascii_digit) {
                continue;
            }
            // One that cannot be read has just gone, or is not ours.
            let Ok(stat) = std::fs::read(process.path().join("stat")) else { continue };
            match Stat::parse(&stat) {
                Some(stat) if stat.group == group && stat.dead => zombies = true,
                Some(stat) if stat.group == group => return false,
                _ => {}
            }
        }
        zombies
    }

    #[cfg(not(target_os = "linux"))]
    fn only_zombies(_: Pid) -> bool {
        false
    }

    /// What we need of `/proc/PID/stat`.
    #[cfg(target_os = "linux")]
    #[derive(Debug, PartialEq)]
    struct Stat {
        group: i32,
        dead: bool,
    }

    #[cfg(target_os = "linux")]
    impl Stat {
        fn parse(stat: &[u8]) -> Option<Self> {
            // The second field, the name, may hold anything, also blanks and parentheses.
            let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
            let fields = std::str::from_utf8(&stat[after_name..]).ok()?;
            let mut fields = fields.split_ascii_whitespace();
            let state = fields.next()?;
            let group = fields.nth(1)?.parse().ok()?;
            // A process whose first thread has ended shows as a zombie while others run.
            let threads: i64 = fields.nth(14)?.parse().ok()?;
            Some(Self { group, dead: matches!(state, "Z" | "X" | "x") && threads <= 1 })
        }
    }

    #[cfg(all(test, target_os = "linux"))]
    mod tests {
        use super::*;

        #[test]
        fn a_stat_line_is_read_whatever_the_name_is() {
            let line = |state: &str, threads: u32| {
                format!(
                    "77 (a ) (b) {state} 1 42 42 0 -1 4194304 99 0 0 0 0 0 0 0 20 0 {threads} 0 149380 0\n"
                )
            };
            let parse = |line: String| Stat::parse(line.as_bytes()).unwrap();
            assert_eq!(parse(line("S", 1)), Stat { group: 42, dead: false });
            assert_eq!(parse(line("Z", 1)), Stat { group: 42, dead: true });
            assert_eq!(parse(line("Z", 3)), Stat { group: 42, dead: false });
            assert_eq!(Stat::parse(b"77 (cat"), None);
            assert_eq!(Stat::parse(b""), None);
        }

        #[test]
        fn our_own_stat_is_alive_and_of_our_group() {
            let own = Stat::parse(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
            assert_eq!(own.group, rustix::process::getpgrp().as_raw_nonzero().get());
            assert!(!own.dead);
        }

        #[test]
        fn a_group_without_a_number_is_never_known_to_be_gone() {
            assert!(!Group::of(None).is_gone());
            assert!(!Group::of(Some(u32::MAX)).is_gone());
            assert!(!Group::of(Some(0)).is_gone());
        }
    }
}

#[cfg(not(unix))]
mod elsewhere {
    /// There are no process groups here: the child alone is reaped, and its end is no fence.
    #[derive(Clone, Copy, Debug)]
    pub(in super::super) struct Group;

    impl Group {
        pub(in super::super) fn of(_: Option<u32>) -> Self {
            Self
        }

        pub(in super::super) fn terminate(self) {}

        pub(in super::super) fn kill(self) {}

        /// The child is all there is, and it is reaped when this is asked.
        pub(in super::super) fn is_gone(self) -> bool {
            true
        }
    }
}
