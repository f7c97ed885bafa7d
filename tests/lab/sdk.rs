//! Stacks around the SDK for tests, their events, and what came out of a call in a few words.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use goaround::{
    BoxError, CallError, Event, InDoubt, Outcome, RetryReadOnly, Stack, StackBuilder, Verdict,
    mcp::ToolRules,
    sdk::{Client, Connector, Request},
};
use rmcp::model::ServerResult;
use serde_json::{Value, json};

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub fn append(line: &str) -> Request {
    Request::tool("append", json!({ "line": line }))
}

pub fn lines() -> Request {
    Request::tool("lines", json!({}))
}

/// `lines` reads; nobody says what `append` does.
pub fn rules() -> ToolRules {
    ToolRules::new().read_only(["lines"])
}

/// With a backoff that costs no time.
pub fn builder(connector: Connector) -> StackBuilder<Connector, Request, ServerResult> {
    Stack::builder(connector.tools(rules())).deadline(ms(5_000)).retry(retry())
}

pub fn retry() -> goaround::RetryReadOnlyLayer {
    RetryReadOnly.backoff(backon::ConstantBuilder::new().with_delay(ms(10)).without_max_times())
}

pub type Doubt = InDoubt<Request, ServerResult>;
pub type Checked = Result<Verdict<ServerResult>, BoxError>;

/// The lines that a server tells of.
pub fn told(result: &ServerResult) -> Option<Vec<String>> {
    let ServerResult::CallToolResult(result) = result else { return None };
    let lines = result.structured_content.as_ref()?.get("result")?.as_array()?;
    lines.iter().map(|line| line.as_str().map(str::to_owned)).collect()
}

/// Whether the line is there, by a probe; `None` for a tool that is not `append`.
pub async fn is_there(doubt: &Doubt) -> Result<bool, BoxError> {
    let arguments = doubt.request().arguments().ok_or("no arguments")?;
    let line = arguments.get("line").and_then(Value::as_str).ok_or("no line")?.to_owned();
    let seen = doubt.probe(lines()).await?;
    Ok(told(&seen).ok_or("no lines")?.contains(&line))
}

/// A check that takes what is absent for never to come: the server of a test does nothing late, unless the test
/// says so.
pub async fn check(doubt: Doubt) -> Checked {
    Ok(match is_there(&doubt).await? {
        true => doubt.landed_without_result(),
        false => doubt.not_landed_because("this server does nothing late"),
    })
}

/// A check that leaves it to the fences of the stack.
pub async fn check_without_a_word(doubt: Doubt) -> Checked {
    Ok(match is_there(&doubt).await? {
        true => doubt.landed_without_result(),
        false => doubt.not_landed(),
    })
}

/// What came out of a call, in a word or two.
pub fn word(result: &Result<ServerResult, CallError>) -> &'static str {
    match result {
        Ok(ServerResult::CallToolResult(result)) if result.is_error == Some(true) => "tool error",
        Ok(_) => "ok",
        Err(error) => match error.outcome() {
            Outcome::NotDone => "not done",
            Outcome::NoAnswer => "no answer",
            Outcome::Unknown => "unknown",
            Outcome::DoneResultLost => "done",
            Outcome::Answered => "error",
            _ => "new outcome",
        },
    }
}

/// The events of a stack, in their serialized form.
#[derive(Clone, Default)]
pub struct Events(Arc<Mutex<Vec<Value>>>);

impl Events {
    pub fn sink(&self) -> impl Fn(Event<'_>) + Send + Sync + 'static {
        let events = Arc::clone(&self.0);
        move |event| {
            let event = serde_json::to_value(event).expect("it serializes");
            events.lock().expect("no panic under it").push(event);
        }
    }

    pub fn all(&self) -> Vec<Value> {
        self.0.lock().expect("no panic under it").clone()
    }

    pub fn of(&self, kind: &str) -> Vec<Value> {
        self.all().into_iter().filter(|event| event["event"] == kind).collect()
    }
}

/// Sends in a task of its own.
pub fn spawn(
    client: &Arc<Client>,
    request: Request,
) -> tokio::task::JoinHandle<Result<ServerResult, CallError>> {
    let client = Arc::clone(client);
    tokio::spawn(async move { client.send(request).await })
}
