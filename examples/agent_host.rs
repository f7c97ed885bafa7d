//! An agent's tool loop on the official SDK, with the stack between the loop and the server.
//!
//! The model is played by standard input: a line for each call that it wants, and what it would be told of it on
//! standard output. The server is a command, or a URL:
//!
//! ```console
//! $ cargo run --example agent_host --features rmcp -- npx -y @modelcontextprotocol/server-filesystem /srv/notes
//! {"name":"write_file","arguments":{"path":"/srv/notes/a.txt","content":"hello"}}
//! ```

use std::time::Duration;

use goaround::{
    BoxError, Call, Event, RetryReadOnly, Stack, WriteSafetyLayer,
    mcp::{ToolRules, checks},
    sdk::{self, Client, Connector, Request},
};
use rmcp::model::{CallToolRequestParams, CallToolResult, ContentBlock, ServerResult};
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};

/// One type, whatever the server is behind.
fn connect(mut server: impl Iterator<Item = String>) -> Result<Client, BoxError> {
    let target = server.next().ok_or("usage: agent_host COMMAND [ARGUMENT]... | URL")?;
    let connector = if target.starts_with("http://") || target.starts_with("https://") {
        Connector::http((), target)
    } else {
        let mut command = tokio::process::Command::new(target);
        command.args(server);
        Connector::stdio((), command)
    };
    // Which tools only read is the host's word. All others are writes, which are never sent twice without evidence.
    let rules = ToolRules::new().read_only(["read_text_file", "list_directory", "get_file_info"]);
    // A write in doubt is looked for: is the file's text what was to be written?
    let check = checks::read_back("write_file")
        .by_tool("read_text_file")
        .argument("/path", "/path")
        .same("/content/0/text", "/content")
        .landed_with(|_written, _found| {
            json!({ "content": [{ "type": "text", "text": "done: the reply was lost, and the file is as it was to be" }] })
        });
    Ok(Stack::builder(connector.tools(rules))
        .deadline(Duration::from_secs(120))
        .writes(WriteSafetyLayer::new(sdk::check(check)))
        .retry(RetryReadOnly.attempts(4))
        .on_event(|event| match event {
            Event::Incident(_) | Event::Recovery(_) | Event::InDoubt(_) => eprintln!("{event:?}"),
            _ => {}
        })
        .build()?)
}

/// What the model is told of a call. An outcome that is not known is named as such, in the first words.
async fn call(server: &Client, call: CallToolRequestParams) -> CallToolResult {
    let limited = Request::from(call).within(Duration::from_secs(60));
    sdk::tool_result(server.send(limited).await.map(|answer| match answer {
        ServerResult::CallToolResult(result) => result,
        // A task, or a question to the user: to say nothing of it would read as a success.
        _ => {
            CallToolResult::error(vec![ContentBlock::text("outcome UNKNOWN: the answer is no tool's result")])
        }
    }))
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let server = connect(std::env::args().skip(1))?;
    for tool in server.list_all_tools().await? {
        eprintln!("tool: {}", tool.name);
    }
    let mut model = BufReader::new(tokio::io::stdin()).lines();
    while let Some(line) = model.next_line().await? {
        let told = match serde_json::from_str(&line) {
            Ok(wanted) => call(&server, wanted).await,
            Err(error) => {
                CallToolResult::error(vec![ContentBlock::text(format!("this is no call: {error}"))])
            }
        };
        println!("{}", serde_json::to_string(&told)?);
    }
    server.shutdown(Duration::from_secs(5)).await;
    Ok(())
}
