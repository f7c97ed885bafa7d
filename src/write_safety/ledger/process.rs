//! Who a server process is, so that another process can tell later whether it is gone.

use std::{
    collections::{BTreeMap, HashSet},
    sync::{Mutex, PoisonError},
    time::Duration,
};

use serde::{Deserialize, Serialize};
use tokio::time::{Instant, sleep};

use super::{AnyLedger, Entry, Ledger, LedgerError};

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
    pub(crate) async fn started(
        &self,
        pid: u32,
        born: Option<u64>,
        exit_ends_effects: bool,
    ) -> Result<(), LedgerError> {
        self.ledger.started(ServerProcess::new(pid, born, self.stack, exit_ends_effects)).await
    }
}

/// A server process of ours, as it can be told from every other: its number alone is given to others once it
/// is free.
///
/// Of its process group, since that is what makes the effects
/// ([`exit_ends_effects`](crate::stdio::Child::exit_ends_effects)).
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
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
    /// The process of that number, which was started then and leads a process group of its own.
    fn new(pid: u32, started: Option<u64>, stack: u64, exit_ends_effects: bool) -> Self {
        Self {
            pid,
            stack,
            exit_ends_effects,
            started,
            boot: system::boot(),
            machine: system::machine(),
            namespace: system::namespace(),
        }
    }

    /// When the child of that number was started. To be asked before it is reaped.
    pub(crate) fn born(pid: u32) -> Option<u64> {
        system::started(pid)
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
        let is_gone = || self.look() == Seen::Gone;
        let mut gone = GONE.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(since) = gone.get(&known) {
            return Some(*since).filter(|_| is_gone());
        }
        let now = is_gone().then(Instant::now)?;
        if gone.len() < MOST {
            gone.insert(known, now);
        }
        Some(now)
    }

    /// Whether its end can be seen from here at all.
    pub(in super::super) fn can_be_seen(&self) -> bool {
        self.look() != Seen::Nothing
    }

    fn look(&self) -> Seen {
        match (&self.boot, system::boot()) {
            (Some(then), Some(now)) if *then == now => {}
            // No process outlives its boot. But only a machine's own processes are known by its id: images of
            // containers share theirs, and may have been moved. A file that was carried to another machine
            // tells nothing of the first.
            (Some(_), Some(_)) => {
                let own = |namespace: Option<&str>| namespace == Some(system::OUTERMOST);
                let here = self.machine.is_some()
                    && self.machine == system::machine()
                    && own(self.namespace.as_deref())
                    && own(system::namespace().as_deref());
                return if here { Seen::Gone } else { Seen::Nothing };
            }
            _ => return Seen::Nothing,
        }
        // The id of a boot is random, so that this is the same kernel, whatever the containers' images say.
        if self.namespace.is_none() || self.namespace != system::namespace() {
            return Seen::Nothing;
        }
        match (self.started, system::started(self.pid)) {
            // Its number was given to somebody else, which happens only once no group has it.
            (Some(then), Some(now)) if then != now => Seen::Gone,
            (None, _) => Seen::Nothing,
            (Some(_), _) if system::group_is_gone(self.pid) => Seen::Gone,
            (Some(_), _) => Seen::Running,
        }
    }
}

/// What can be seen of a process from here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Running,
    Gone,
    /// Another machine or container, or a system that does not tell.
    Nothing,
}

/// The server processes of all those entries, each once: the entries of one run share theirs.
pub(super) fn servers_of(entries: &[Entry]) -> HashSet<&ServerProcess> {
    entries.iter().flat_map(|entry| &entry.servers).collect()
}

/// Waits until the server processes of all those entries are gone, as far as their end can be seen from here, but
/// no longer than that. `true` if all are gone, or there are none.
///
/// Before the first connection of a new run, so that no old server works beside the new one, and so that each
/// probe of [`Resolve`](crate::Resolve) runs on a connection that was made after they were gone.
pub async fn servers_gone(entries: &[Entry], within: Duration) -> bool {
    const LONGEST_PAUSE: Duration = Duration::from_millis(100);
    let mut servers = servers_of(entries);
    let start = Instant::now();
    let mut pause = Duration::from_millis(5);
    loop {
        // It is remembered since when each is known to be gone.
        servers.retain(|server| !server.is_gone());
        let left = within.saturating_sub(start.elapsed());
        if left.is_zero() || !servers.iter().any(|server| server.can_be_seen()) {
            return servers.is_empty();
        }
        sleep(pause.min(left)).await;
        pause = (pause * 2).min(LONGEST_PAUSE);
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
        let process = ServerProcess::new(child.id(), ServerProcess::born(child.id()), 1, true);
        assert!(process.started.is_some() && process.boot.is_some() && process.namespace.is_some());
        assert!(!process.is_gone());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(process.is_gone());
    }

    #[test]
    fn what_cannot_be_told_is_not_gone() {
        let mut child = sleeper();
        let running = ServerProcess::new(child.id(), ServerProcess::born(child.id()), 1, true);
        child.kill().unwrap();
        child.wait().unwrap();
        let another = |change: fn(&mut ServerProcess)| {
            let mut process = running.clone();
            change(&mut process);
            process.is_gone()
        };
        // Some containers have no machine id. Within one boot it is not asked for.
        assert!(another(|process| process.machine = None));
        assert!(!another(|process| process.namespace = Some("pid:[1]".into())));
        assert!(!another(|process| process.boot = None));
        assert!(!another(|process| process.started = None));
        let outermost = running.machine.is_some() && running.namespace.as_deref() == Some(system::OUTERMOST);
        assert_eq!(another(|process| process.boot = Some("an earlier one".into())), outermost);
        for machine in [None, Some("elsewhere".to_owned())] {
            let mut process = running.clone();
            (process.boot, process.machine) = (Some("an earlier one".into()), machine);
            assert!(!process.is_gone());
        }
    }

    #[test]
    fn a_number_that_was_given_to_another_process_is_not_that_process() {
        let mut child = sleeper();
        let mut process = ServerProcess::new(child.id(), ServerProcess::born(child.id()), 1, true);
        process.started = process.started.map(|started| started - 1);
        assert!(process.is_gone());
        child.kill().unwrap();
        child.wait().unwrap();
    }
}
