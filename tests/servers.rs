//! Real MCP servers, killed with SIGKILL while calls are in flight; what landed is counted by a reader that asks
//! no server: the file system, `git log`, the memory file.
//!
//! ```text
//! scripts/install-servers
//! cargo test --test servers            all servers
//! cargo test --test servers -- git     those whose names contain that
//! ```
//!
//! A server that is not installed is a failure. Settings, by environment: `GOAROUND_SERVERS`, where the servers
//! are (by default `target/servers`); `GOAROUND_ROUNDS`, how many rounds for each (5); `GOAROUND_SEED`, to see
//! the same kills again, as far as a machine's timing allows.
//!
//! First comes the demo's read flight: handshake, list, a kill in the middle of reads, list again, a kill while nothing
//! is in flight, list again. Then a batch of writes without a kill, which tells how long one takes. Then the rounds. In
//! each a fresh server gets many reads and writes, and is killed at a random moment of them; the rounds take turns with
//! three stacks: with a check and the declaration that the server's exit ends its effects, without a check, with a
//! check alone.
//!
//! - Every read is answered, and the recovery is reported.
//! - No write landed twice. What was answered with a success is there, and so is what is said to be done; what was
//!   answered with an error, or is said not to be done, is not there.
//! - What is unknown was reported so, by one event.
//!
//! The servers differ in what they bear, whoever calls them. server-memory reads its file, adds, and writes it
//! again without a lock, so that of two writes at once it loses one by itself: its writes go one after the other
//! here (of 20 at once, all of them acknowledged, 1 was there). So do those of `git_commit`, which takes whatever
//! is staged.
//!
//! The last server is called "wrong": its check looks in a place where the write can never be, and so finds every
//! write absent. With it the same harness must find writes that landed twice; if it does not, it proves nothing.

#[cfg(unix)]
#[path = "servers/harness.rs"]
mod harness;

#[cfg(unix)]
mod unix {
    use std::{pin::Pin, process::ExitCode, time::Duration};

    use goaround::{
        BoxError, Call, CallId, Stack, WriteSafetyLayer,
        jsonrpc::{Request, Response},
        mcp,
    };

    use crate::harness::{self, Answer, Asked, Client, Plan, Reach};

    struct Own(Stack<mcp::Stdio, Request, Response>);

    impl Client for Own {
        fn send(&self, asked: &Asked) -> (CallId, Answer<'_>) {
            let mut request = Request::new(asked.method, &asked.params).expect("it serializes");
            let call = request.context_mut().assign_id();
            let answer = async move { Ok(self.0.send(request).await?.parse().expect("a result is JSON")) };
            (call, Box::pin(answer))
        }

        fn shutdown(&self, grace: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
            Box::pin(async move {
                self.0.shutdown(grace).await;
            })
        }
    }

    fn connect(mut plan: Plan) -> Result<Box<dyn Client>, BoxError> {
        let sink = plan.sink();
        let Reach::Stdio(command) = plan.reach else { return Err("over pipes only".into()) };
        let mut connector = mcp::stdio(command).client_info("goaround-servers", "1").tools(plan.rules);
        if plan.fenced {
            connector = connector.exit_ends_effects();
        }
        let safety = match plan.check.take() {
            Some(check) => WriteSafetyLayer::new(check).independent_writes(),
            None => WriteSafetyLayer::refuse(),
        };
        let builder = Stack::builder(connector).deadline(Duration::from_secs(60)).writes(safety);
        Ok(Box::new(Own(builder.on_event(sink).build()?)))
    }

    pub(crate) fn main() -> ExitCode {
        harness::main("servers", harness::over_stdio(), connect)
    }
}

#[cfg(unix)]
fn main() -> std::process::ExitCode {
    unix::main()
}

#[cfg(not(unix))]
fn main() {
    eprintln!("servers: not here: it kills process groups, which are Unix's");
}
