//! Who a server process is, so that another process can tell later whether it is gone.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::{AnyLedger, Ledger, LedgerError};

/// Number, start and boot.
type Process = (u32, Option<u64>, Option<String>);

/// Enters the server processes that a stack's connector starts.
#[derive(Clone, Debug)]
pub(crate) struct Registrar {
    ledger: AnyLedger,
    stack: u64,
}

impl Registrar {
    pub(crate) fn new(ledger: AnyLedger, stack: u64) -> Self {
        Self { ledger, stack }
    }

    /// Enters one. Until this resolves no write may go to it.
    pub(crate) async fn started(&self, pid: u32, exit_ends_effects: bool) -> Result<(), LedgerError> {
        self.ledger.started(ServerProcess::of(pid, self.stack, exit_ends_effects)).await
    }
}

/// A server process of ours, as it can be told from every other: its number alone is given to others once it
/// is free.
///
/// Of its process group, since that is what makes the effects
/// ([`exit_ends_effects`](crate::stdio::Child::exit_ends_effects)).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ServerProcess {
    /// Its number, which is its group's too.
    pub pid: u32,
    /// When it started, in the kernel's ticks since boot; `None` where the system does not tell.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub started: Option<u64>,
    /// Which boot of the machine that was.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub boot: Option<String>,
    /// Which machine.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub machine: Option<String>,
    /// In which namespace the number counts, as in a container.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub namespace: Option<String>,
    /// For which stack of its owner it was started: the writes of others went elsewhere.
    pub stack: u64,
    /// Whether the caller declared that its effects end with it.
    pub exit_ends_effects: bool,
}

impl ServerProcess {
    /// The process of that number, which runs now and leads a process group of its own.
    pub(crate) fn of(pid: u32, stack: u64, exit_ends_effects: bool) -> Self {
        Self {
            pid,
            stack,
            exit_ends_effects,
            started: system::started(pid),
            boot: system::boot(),
            machine: system::machine(),
            namespace: system::namespace(),
        }
    }

    /// Whether it and its whole group are gone for certain. `false` where that cannot be told: from another
    /// machine, from another container, or on a system other than Linux.
    pub fn is_gone(&self) -> bool {
        self.gone_since().is_some()
    }

    /// Since when this process knows that it is gone.
    pub(in super::super) fn gone_since(&self) -> Option<Instant> {
        /// How many are remembered.
        const MOST: usize = 4096;
        static GONE: Mutex<BTreeMap<Process, Instant>> = Mutex::new(BTreeMap::new());
        let known = (self.pid, self.started, self.boot.clone());
        let mut gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(since) = gone.get(&known) {
            return Some(*since).filter(|_| self.is_gone_now());
        }
        let now = self.is_gone_now().then(Instant::now)?;
        if gone.len() < MOST {
            gone.insert(known, now);
        }
        Some(now)
    }

    fn is_gone_now(&self) -> bool {
        // A file that was carried to another machine tells nothing of the first.
        if self.machine.is_none() || self.machine != system::machine() {
            return false;
        }
        match (&self.boot, system::boot()) {
            // No process outlives its boot. Only a machine's own processes are known by its id: images of
            // containers share theirs, and may have been moved.
            (Some(then), Some(now)) if *then != now => {
                let own = |namespace: Option<&str>| namespace == Some(system::OUTERMOST);
                return own(self.namespace.as_deref()) && own(system::namespace().as_deref());
            }
            (Some(_), Some(_)) => {}
            _ => return false,
        }
        if self.namespace.is_none() || self.namespace != system::namespace() {
            return false;
        }
        match (self.started, system::started(self.pid)) {
            // Its number was given to somebody else, which happens only once no group has it.
            (Some(then), Some(now)) if then != now => true,
            (None, _) => false,
            (Some(_), _) => system::group_is_gone(self.pid),
        }
    }
}

#[cfg(target_os = "linux")]
mod system {
    use std::fs;

    /// The machine's own namespace of process ids, not a container's (`PROC_PID_INIT_INO`).
    pub(super) const OUTERMOST: &str = "pid:[4026531836]";

    pub(super) fn started(pid: u32) -> Option<u64> {
        let stat = fs::read(format!("/proc/{pid}/stat")).ok()?;
        // The second field, the name, may hold anything, also blanks and parentheses.
        let after_name = stat.iter().rposition(|&byte| byte == b')')? + 1;
        // The 22nd field of the line, the 20th after the name.
        std::str::from_utf8(&stat[after_name..]).ok()?.split_ascii_whitespace().nth(19)?.parse().ok()
    }

    pub(super) fn boot() -> Option<String> {
        read("/proc/sys/kernel/random/boot_id")
    }

    pub(super) fn machine() -> Option<String> {
        read("/etc/machine-id").or_else(|| read("/var/lib/dbus/machine-id"))
    }

    pub(super) fn namespace() -> Option<String> {
        Some(fs::read_link("/proc/self/ns/pid").ok()?.to_string_lossy().into_owned())
    }

    pub(super) fn group_is_gone(pid: u32) -> bool {
        crate::stdio::group_is_gone(pid)
    }

    fn read(path: &str) -> Option<String> {
        let text = fs::read_to_string(path).ok()?;
        Some(text.trim().to_owned()).filter(|text| !text.is_empty())
    }
}

#[cfg(not(target_os = "linux"))]
mod system {
    pub(super) const OUTERMOST: &str = "";

    pub(super) fn started(_: u32) -> Option<u64> {
        None
    }

    pub(super) fn boot() -> Option<String> {
        None
    }

    pub(super) fn machine() -> Option<String> {
        None
    }

    pub(super) fn namespace() -> Option<String> {
        None
    }

    pub(super) fn group_is_gone(_: u32) -> bool {
        false
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use std::{os::unix::process::CommandExt, process::Command};

    use super::*;

    fn sleeper() -> std::process::Child {
        Command::new("sleep").arg("1000").process_group(0).spawn().unwrap()
    }

    #[test]
    fn a_process_that_runs_is_not_gone_and_one_that_ended_is() {
        let mut child = sleeper();
        let process = ServerProcess::of(child.id(), 1, true);
        assert!(process.started.is_some() && process.boot.is_some() && process.namespace.is_some());
        assert!(!process.is_gone());
        child.kill().unwrap();
        child.wait().unwrap();
        // Some containers have no machine id.
        assert_eq!(process.is_gone(), process.machine.is_some());
    }

    #[test]
    fn what_cannot_be_told_is_not_gone() {
        let mut child = sleeper();
        let running = ServerProcess::of(child.id(), 1, true);
        child.kill().unwrap();
        child.wait().unwrap();
        let another = |change: fn(&mut ServerProcess)| {
            let mut process = running.clone();
            change(&mut process);
            process.is_gone()
        };
        assert!(!another(|process| process.machine = None));
        assert!(!another(|process| process.machine = Some("elsewhere".into())));
        assert!(!another(|process| process.namespace = Some("pid:[1]".into())));
        assert!(!another(|process| process.boot = None));
        assert!(!another(|process| process.started = None));
        let outermost = running.machine.is_some() && running.namespace.as_deref() == Some(system::OUTERMOST);
        assert_eq!(another(|process| process.boot = Some("an earlier one".into())), outermost);
    }

    #[test]
    fn a_number_that_was_given_to_another_process_is_not_that_process() {
        let mut child = sleeper();
        let mut process = ServerProcess::of(child.id(), 1, true);
        process.started = process.started.map(|started| started - 1);
        assert_eq!(process.is_gone(), process.machine.is_some());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
