//! Twelve flights through a server that is killed, hangs and loses replies, on real processes and real pipes.
//!
//! `cargo run --example demo` starts an MCP server as a child process (this executable, in server mode: see
//! `server.rs`), flies twelve flights through it with `goaround` (`flights.rs`), on all but the first of which
//! something fails, and then compares what each caller was told with what the server wrote into its journal (`flight.rs`,
//! `report.rs`).
//!
//! `cargo run --example demo -- COMMAND ARGS…` does the same with the reads of any MCP server (`visit.rs`).

#[cfg(unix)]
mod flight;
#[cfg(unix)]
mod flights;
#[cfg(unix)]
mod report;
#[cfg(unix)]
mod server;
#[cfg(unix)]
mod visit;

const HELP: &str = "\
usage: demo [--json]
       demo COMMAND [ARGS…]

Without a command, flies twelve flights through a server of its own and prints what came out. The exit status
is 1 if a flight came out otherwise than it must, or a write landed twice, was lost, or is unknown and was not
reported.

With a command, starts that MCP server (stdio, any version of the protocol), lists what it offers, kills it while
a call is in flight, and lists again. Only reads are sent. What a server that does not start writes to its
standard error is printed.

  --json   print the counts as one JSON object in the last line
  --help   print this
";

#[cfg(unix)]
fn main() -> std::process::ExitCode {
    use std::process::ExitCode;

    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let words: Vec<_> = arguments.iter().map(|argument| argument.to_string_lossy()).collect();
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    let result = match words.as_slice() {
        // The two server modes are for the demo itself. No runtime is started for them.
        [server::SERVE, folder] => server::serve(folder.as_ref()).map(|()| true).map_err(Into::into),
        [server::GO_ON, folder, invoice] => {
            server::go_on(folder.as_ref(), invoice).map(|()| true).map_err(Into::into)
        }
        [] => run(flights::fly_all(false)),
        ["--json"] => run(flights::fly_all(true)),
        ["--help" | "-h"] => {
            print!("{HELP}");
            Ok(true)
        }
        ["--json", ..] => return misuse("--json is for the demo's own flights and stands alone"),
        [flag, ..] if flag.starts_with('-') => return misuse(&format!("unknown option {flag:?}")),
        [..] => run(visit::visit(&arguments)),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("demo: {error}");
            last_words(&*error).iter().for_each(|line| eprintln!("demo: its stderr: {line}"));
            ExitCode::FAILURE
        }
    }
}

#[cfg(unix)]
fn run(flights: impl Future<Output = Result<bool, goaround::BoxError>>) -> Result<bool, goaround::BoxError> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(flights)
}

/// What a server wrote to its standard error that ended in its handshake. Errors do not show it, since it may hold
/// secrets; but this is the user's own command, at his own terminal.
#[cfg(unix)]
fn last_words<'a>(error: &'a (dyn std::error::Error + Send + Sync + 'static)) -> &'a [String] {
    use goaround::{CallError, mcp::HandshakeError};

    match error.downcast_ref::<CallError>().and_then(CallError::get_ref) {
        Some(HandshakeError::Closed { stderr, .. }) => stderr,
        _ => &[],
    }
}

#[cfg(unix)]
fn misuse(what: &str) -> std::process::ExitCode {
    eprintln!("demo: {what}\n\n{HELP}");
    std::process::ExitCode::from(2)
}

#[cfg(not(unix))]
fn main() -> std::process::ExitCode {
    // Elsewhere there are no process groups, so that the end of a server is never a fence.
    eprintln!("demo: this demo kills its server by SIGKILL and needs Unix\n\n{HELP}");
    std::process::ExitCode::from(2)
}
