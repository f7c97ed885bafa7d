//! Real MCP servers under the official SDK and the stack, over pipes and over HTTP, killed with SIGKILL while calls
//! are in flight, and started again; what landed is counted by a reader that asks no server.
//!
//! ```text
//! scripts/install-servers
//! cargo test --features rmcp --test sdk_servers            all servers
//! cargo test --features rmcp --test sdk_servers -- http    those whose names contain that
//! ```
//!
//! What is done and what must hold is what `tests/servers.rs` says; so are the settings. Over HTTP the server is ours
//! to start, at the same port. Its client cannot know that it is gone: that nothing lands later than 300 ms after the
//! last byte of its request is declared (`quarantine`), and true, since the one whose connection ended is dead.

#[cfg(unix)]
#[path = "servers/harness.rs"]
mod harness;

#[cfg(unix)]
mod unix {
    use std::{pin::Pin, process::ExitCode, time::Duration};

    use backon::ConstantBuilder;
    use goaround::{
        BoxError, Call, CallId, RetryReadOnly, Stack, WriteSafetyLayer,
        sdk::{self, Connector, Request},
    };
    use rmcp::{
        model::{ClientConfig, ProtocolVersion},
        service::ClientLifecycleMode,
    };

    use crate::harness::{self, Answer, Asked, Client, Plan, Reach};

    struct Sdk(sdk::Client);

    fn request(asked: &Asked) -> Request {
        match asked.method {
            "tools/call" => {
                let name = asked.params["name"].as_str().expect("a tool has a name").to_owned();
                Request::tool(name, asked.params["arguments"].clone())
            }
            "tools/list" => Request::list_tools(None),
            "resources/list" => Request::list_resources(None),
            other => panic!("no server here is asked {other}"),
        }
    }

    impl Client for Sdk {
        fn send(&self, asked: &Asked) -> (CallId, Answer<'_>) {
            let mut request = request(asked);
            let call = request.context_mut().assign_id();
            let answer = async move {
                Ok(serde_json::to_value(self.0.send(request).await?).expect("a result is JSON"))
            };
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
        let mut safety = match plan.check.take() {
            Some(check) => WriteSafetyLayer::new(sdk::check(check)).independent_writes(),
            None => WriteSafetyLayer::refuse(),
        };
        let mut connector = match plan.reach {
            Reach::Stdio(command) => {
                let connector = Connector::stdio(ClientConfig::default(), command);
                if plan.fenced { connector.exit_ends_effects() } else { connector }
            }
            Reach::Http(url) => {
                if plan.fenced {
                    safety = safety.quarantine(Duration::from_millis(300));
                }
                Connector::http(ClientConfig::default(), url)
            }
        };
        if plan.modern {
            let preferred_versions = vec![ProtocolVersion::V_2026_07_28];
            connector = connector.lifecycle(ClientLifecycleMode::Discover { preferred_versions });
        }
        // While a server starts again it refuses connections, which is no failure of a call.
        let often = ConstantBuilder::new().with_delay(Duration::from_millis(100)).without_max_times();
        let retry = RetryReadOnly.attempts(600).backoff(often).without_budget();
        let builder = Stack::builder(connector.tools(plan.rules)).deadline(Duration::from_secs(60));
        Ok(Box::new(Sdk(builder.writes(safety).retry(retry).on_event(sink).build()?)))
    }

    pub(crate) fn main() -> ExitCode {
        let servers = harness::over_stdio().into_iter().chain(harness::newer_and_over_http()).collect();
        harness::main("sdk_servers", servers, connect)
    }
}

#[cfg(unix)]
fn main() -> std::process::ExitCode {
    unix::main()
}

#[cfg(not(unix))]
fn main() {
    eprintln!("sdk_servers: not here: it kills process groups, which are Unix's");
}
