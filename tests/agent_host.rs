//! An agent host as its author would like to write it: servers over stdio and HTTP in one map of one type, with the
//! glob imports of both crates side by side.
#![cfg(all(unix, feature = "rmcp"))]

use std::{
    collections::HashMap,
    io::Write,
    process::{Command, Stdio},
    time::Duration,
};

/// That the names of both crates stand beside each other.
mod globs {
    #![allow(unused_imports)]
    use goaround::*;
    use rmcp::model::*;

    pub(super) fn said(error: CallError) -> CallToolResult {
        CallToolResult::error(vec![ContentBlock::text(error.to_string())])
    }

    pub(super) fn is_a_read(call: &sdk::Request) -> bool {
        call.effect() == Effect::ReadOnly
    }
}

use goaround::{
    BoxError, Call, Event, InDoubt, RetryReadOnly, Stack,
    mcp::ToolRules,
    sdk::{Client, Connector, Request},
};
use rmcp::model::{CallToolResult, ClientRequest, ContentBlock, ServerResult};
use serde_json::json;

struct Host {
    servers: HashMap<String, Client>,
}

/// A server of three tools that keeps files, and dies after the first write.
const FILES: &str = r#"
answer() { printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$1"; }
while read -r line; do
    id=${line#*'"id":'}; id=${id%%[,\}]*}
    path=${line#*'"path":"'}; path=$dir/${path%%'"'*}
    case $line in
        *'"initialize"'*) answer '{"protocolVersion":"2025-06-18","capabilities":{},"serverInfo":{"name":"f","version":"1"}}' ;;
        *'"tools/list"'*) answer '{"tools":[{"name":"write_file","inputSchema":{"type":"object"}}]}' ;;
        *'"name":"write_file"'*)
            content=${line#*'"content":"'}; content=${content%%'"'*}
            printf '%s' "$content" >"$path"
            [ -e "$dir/died" ] || { : >"$dir/died"; kill -KILL $$; }
            answer '{"content":[{"type":"text","text":"ok"}]}' ;;
        *'"name":"read_text_file"'*) answer '{"content":[{"type":"text","text":"'"$(cat "$path")"'"}]}' ;;
        *'"id":'*) answer '{}' ;;
    esac
done
"#;

fn files(dir: &std::path::Path) -> Result<Client, BoxError> {
    let mut command = tokio::process::Command::new("sh");
    command.arg("-c").arg(FILES).env("dir", dir);
    let connector = Connector::stdio((), command)
        .exit_ends_effects()
        .tools(ToolRules::new().read_only(["read_text_file", "list_directory"]));
    Ok(Stack::builder(connector)
        .deadline(Duration::from_secs(120))
        .check(|doubt: InDoubt<Request, ServerResult>| async move {
            let ClientRequest::CallToolRequest(call) = &**doubt.request() else {
                return Ok(doubt.unknown("no check for this method"));
            };
            let args = call.params.arguments.as_ref().ok_or("no arguments")?;
            let seen = doubt.probe(Request::tool("read_text_file", json!({ "path": args["path"] }))).await?;
            let ServerResult::CallToolResult(seen) = seen else {
                return Ok(doubt.unknown("no tool result"));
            };
            let text = seen.content.first().and_then(|content| content.as_text());
            let same = text.is_some_and(|text| Some(text.text.as_str()) == args["content"].as_str());
            Ok(if same {
                let written = CallToolResult::success(vec![ContentBlock::text("written")]);
                doubt.landed(ServerResult::CallToolResult(written))
            } else {
                doubt.not_landed()
            })
        })
        .retry(RetryReadOnly.attempts(4))
        .on_event(|event| {
            if let Event::Abandoned(report) = event {
                eprintln!("write in doubt: {report:?}");
            }
        })
        .build()?)
}

fn http(url: &str) -> Result<Client, BoxError> {
    Ok(Stack::builder(Connector::http((), url)).deadline(Duration::from_secs(120)).build()?)
}

impl Host {
    async fn call_tool(&self, server: &str, request: Request) -> CallToolResult {
        match self.servers[server].send(request.within(Duration::from_secs(300))).await {
            Ok(ServerResult::CallToolResult(result)) => result,
            Ok(_) => CallToolResult::error(vec![ContentBlock::text("unexpected kind of result")]),
            Err(error) => globs::said(error),
        }
    }
}

#[tokio::test]
async fn a_host_holds_servers_of_all_kinds_in_one_map_of_one_type() {
    let dir = tempfile::tempdir().unwrap();
    let host = Host {
        servers: HashMap::from([
            ("fs".into(), files(dir.path()).unwrap()),
            // Nobody listens there.
            ("gh".into(), http("http://127.0.0.1:1/mcp").unwrap()),
        ]),
    };
    let write = Request::tool("write_file", json!({ "path": "a", "content": "b" }));
    assert!(!globs::is_a_read(&write));
    let result = host.call_tool("fs", write.clone()).await;
    assert_eq!(result.content[0].as_text().unwrap().text, "written");
    assert_eq!(host.servers["fs"].generation(), Some(2));
    let refused = host.call_tool("gh", write).await;
    let text = &refused.content[0].as_text().unwrap().text;
    assert!(text.starts_with("not done: tools/call: cannot connect: "), "{text}");
    assert_eq!(refused.is_error, Some(true));
    for server in host.servers.values() {
        server.shutdown(Duration::from_secs(5)).await;
    }
}

#[test]
fn the_example_tells_the_model_what_is_known() {
    let test = std::env::current_exe().unwrap();
    let example = test.parent().unwrap().parent().unwrap().join("examples").join("agent_host");
    assert!(
        example.exists(),
        "{} is missing: `cargo build --example agent_host` makes it",
        example.display()
    );
    let dir = tempfile::tempdir().unwrap();
    let mut host = Command::new(example)
        .args(["sh", "-c", FILES])
        .env("dir", dir.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mut model = host.stdin.take().unwrap();
    // The first one kills the server; what was written is found.
    writeln!(model, r#"{{"name":"write_file","arguments":{{"path":"a","content":"b"}}}}"#).unwrap();
    writeln!(model, r#"{{"name":"read_text_file","arguments":{{"path":"a"}}}}"#).unwrap();
    drop(model);
    let output = host.wait_with_output().unwrap();
    assert!(output.status.success());
    let told = String::from_utf8(output.stdout).unwrap();
    let told: Vec<serde_json::Value> = told.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(told.len(), 2, "{told:?}");
    assert_ne!(told[0]["isError"], true);
    let text = told[0]["content"][0]["text"].as_str().unwrap();
    assert!(text.starts_with("done: the reply was lost"), "{text}");
    assert_eq!(told[1]["content"][0]["text"], "b");
}
