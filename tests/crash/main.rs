//! Clients that are killed by SIGKILL in the middle of 500 writes, on real processes: what their ledger says
//! afterwards, and what becomes of it. And the cases that lead there, one by one.
//!
//! This executable is all the processes: the runner, the client, the one that settles what the client has left, and
//! the server. Settings, by environment: `GOAROUND_ROUNDS`, how many rounds of each kind (5); `GOAROUND_SEED`, to
//! draw the same plans and moments again. Arguments are parts of names, as with other tests.

#[cfg(target_os = "linux")]
mod cases;
#[cfg(target_os = "linux")]
mod client;
#[cfg(target_os = "linux")]
mod rounds;
#[cfg(target_os = "linux")]
mod server;

#[cfg(target_os = "linux")]
pub(crate) use linux::Plan;

#[cfg(target_os = "linux")]
mod linux {
    use std::{
        path::PathBuf,
        process::ExitCode,
        time::{Duration, Instant},
    };

    use goaround::BoxError;
    use serde::{Deserialize, Serialize};

    use crate::{cases, client, rounds, server, server::Ending};

    /// What the processes of one round have in common.
    #[derive(Clone, Debug, Serialize, Deserialize)]
    pub(crate) struct Plan {
        pub(crate) folder: PathBuf,
        /// Where the ledger is, if elsewhere.
        pub(crate) ledger: Option<PathBuf>,
        pub(crate) seed: u64,
        pub(crate) ending: Ending,
        /// Whether the connector is told that the server's exit ends its effects.
        pub(crate) declared: bool,
        pub(crate) quarantine: Option<Duration>,
        /// How many servers die while their client lives.
        pub(crate) deaths: u32,
        /// Whether the server works on nothing while its client lives.
        pub(crate) hold: bool,
    }

    impl Plan {
        pub(crate) fn new(folder: impl Into<PathBuf>, seed: u64, ending: Ending) -> Self {
            Self {
                folder: folder.into(),
                ledger: None,
                seed,
                ending,
                declared: true,
                quarantine: None,
                deaths: 0,
                hold: false,
            }
        }

        pub(crate) fn file(&self, name: &str) -> PathBuf {
            match &self.ledger {
                Some(ledger) if name == "ledger" => ledger.clone(),
                _ => self.folder.join(name),
            }
        }

        /// The lines of a file that the servers write.
        pub(crate) fn lines(&self, name: &str) -> Vec<String> {
            let text = std::fs::read_to_string(self.file(name)).unwrap_or_default();
            text.lines().map(str::to_owned).collect()
        }
    }

    pub(crate) fn main() -> ExitCode {
        let arguments: Vec<String> = std::env::args().skip(1).collect();
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let done = match words.as_slice() {
            ["--serve", plan] => {
                read(plan).and_then(|plan| Ok(server::serve(plan)?)).map(|()| ExitCode::SUCCESS)
            }
            ["--late", effects, token] => {
                server::late(effects.as_ref(), token).map(|()| ExitCode::SUCCESS).map_err(Into::into)
            }
            ["--write", plan] => read(plan).and_then(|plan| block_on(client::write_all(plan))),
            ["--write-on-two", one, two] => {
                read(one).and_then(|one| block_on(client::write_on_two([one, read(two)?])))
            }
            ["--recover", plan] => read(plan).and_then(|plan| block_on(client::recover(plan))),
            words => Ok(run(words)),
        };
        done.unwrap_or_else(|error| {
            eprintln!("crash: {error}");
            ExitCode::FAILURE
        })
    }

    fn read(plan: &str) -> Result<Plan, BoxError> {
        Ok(serde_json::from_str(plan)?)
    }

    pub(crate) fn block_on<T>(future: impl Future<Output = Result<T, BoxError>>) -> Result<T, BoxError> {
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?.block_on(future)
    }

    fn number(variable: &str) -> Option<u64> {
        let value = std::env::var(variable).ok()?;
        Some(value.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {value:?}")))
    }

    /// The tests.
    fn run(words: &[&str]) -> ExitCode {
        let names: Vec<&str> = words.iter().copied().filter(|word| !word.starts_with('-')).collect();
        let wanted = |name: &str| names.is_empty() || names.iter().any(|part| name.contains(part));
        if words.contains(&"--list") {
            let all =
                cases::CASES.iter().map(|case| case.0).chain(rounds::KINDS.iter().map(|kind| kind.name));
            all.for_each(|name| println!("{name}: test"));
            return ExitCode::SUCCESS;
        }
        let rounds = number("GOAROUND_ROUNDS").unwrap_or(5);
        let seed = number("GOAROUND_SEED").unwrap_or_else(|| fastrand::u64(..));
        println!("crash: {rounds} rounds, GOAROUND_SEED={seed}");
        let (mut passed, mut failed) = (0, 0);
        let mut note = |name: &str, began: Instant, result: Result<String, BoxError>| match result {
            Ok(text) => {
                passed += 1;
                println!("crash: {name} ... ok in {:.1?}{text}", began.elapsed());
            }
            Err(error) => {
                failed += 1;
                println!("crash: {name} ... FAILED: {error}");
            }
        };
        for (name, case) in cases::CASES {
            if wanted(name) {
                let began = Instant::now();
                let result = std::panic::catch_unwind(case).unwrap_or_else(|_| Err("it panicked".into()));
                note(name, began, result.map(|()| String::new()));
            }
        }
        for kind in rounds::KINDS {
            if wanted(kind.name) {
                let began = Instant::now();
                note(kind.name, began, rounds::run(kind, rounds, seed).map(|count| format!(": {count}")));
            }
        }
        println!("{passed} passed, {failed} failed");
        if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}

#[cfg(target_os = "linux")]
fn main() -> std::process::ExitCode {
    linux::main()
}

#[cfg(not(target_os = "linux"))]
fn main() {
    eprintln!("crash: not here: elsewhere nobody can tell whether the server of a dead process is gone");
}
