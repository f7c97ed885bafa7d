//! The client scenarios of the official conformance suite, with the stack around the official SDK.
//!
//! ```text
//! scripts/conformance                  installs the suite, and runs this
//! scripts/conformance -- sse-retry     those scenarios only
//! ```
//!
//! The suite starts a server for each scenario and then this very program with the server's address as its last
//! argument: the client. `GOAROUND_CONFORMANCE` says where the suite is installed (by default `target/conformance`).

use std::{
    path::{Path, PathBuf},
    process::{Command, ExitCode},
    time::Duration,
};

use goaround::{
    BoxError, Stack,
    sdk::{Client, Connector, Request},
};
use rmcp::model::{ClientCapabilities, ClientConfig, Implementation, ProtocolVersion};
use serde_json::{Value, json};

/// The scenarios, with what each must have found to be right, by its id in the suite.
const SCENARIOS: [(&str, &[&str]); 3] = [
    ("initialize", &["mcp-client-initialization"]),
    ("tools_call", &["tool-add-numbers"]),
    // Its timing has a tolerance of its own, in milliseconds: late on a busy machine is a warning there.
    ("sse-retry", &["client-sse-graceful-reconnect", "client-sse-last-event-id"]),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let result = match arguments.last() {
        Some(url) if url.starts_with("http://") => client(url),
        _ => suite(&arguments),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("sdk_conformance: {error}");
            ExitCode::FAILURE
        }
    }
}

// ===== The client =====

#[tokio::main(flavor = "current_thread")]
async fn client(url: &str) -> Result<(), BoxError> {
    // By default the SDK offers 2026-07-28, which has no such handshake.
    let info = ClientConfig::new(ClientCapabilities::default(), Implementation::new("goaround", "1"))
        .with_protocol_version(ProtocolVersion::V_2025_11_25);
    let client: Client =
        Stack::builder(Connector::http(info, url)).deadline(Duration::from_secs(20)).build()?;
    let tools = client.list_all_tools().await?;
    for tool in tools {
        let arguments = match tool.name.as_ref() {
            "add_numbers" => json!({ "a": 5, "b": 3 }),
            _ => json!({}),
        };
        let result = client.send(Request::tool(tool.name.clone(), arguments)).await?;
        println!("{}: {}", tool.name, serde_json::to_string(&result)?);
    }
    client.shutdown(Duration::from_secs(2)).await;
    Ok(())
}

// ===== The suite =====

fn suite(arguments: &[String]) -> Result<(), BoxError> {
    let folder = std::env::var_os("GOAROUND_CONFORMANCE")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/conformance"), PathBuf::from);
    let names: Vec<&String> = arguments.iter().filter(|name| !name.starts_with('-')).collect();
    let mut wrong = Vec::new();
    for (scenario, checks) in SCENARIOS {
        if !names.is_empty() && !names.iter().any(|name| scenario.contains(name.as_str())) {
            continue;
        }
        match fly(&folder, scenario, checks) {
            Ok(passed) => println!("sdk_conformance: {scenario}: {passed} checks passed"),
            Err(error) => {
                println!("sdk_conformance: {scenario} FAILED: {error}");
                wrong.push(scenario);
            }
        }
    }
    if wrong.is_empty() { Ok(()) } else { Err(format!("failed: {}", wrong.join(", ")).into()) }
}

/// Runs a scenario, and returns how many of its checks passed.
fn fly(folder: &Path, scenario: &str, needed: &[&str]) -> Result<usize, BoxError> {
    let script = folder.join("node_modules/@modelcontextprotocol/conformance/dist/index.js");
    if !script.exists() {
        return Err("the suite is not installed: run scripts/conformance".into());
    }
    let own = folder.join("node_modules/node/bin/node");
    let node = if own.exists() { own } else { "node".into() };
    let this = std::env::current_exe()?;
    // The suite splits the command at spaces.
    if this.to_string_lossy().contains(' ') {
        return Err("the suite cannot start a program whose path has a space in it".into());
    }
    let results = folder.join("results").join(scenario);
    if results.exists() {
        std::fs::remove_dir_all(&results)?;
    }
    let output = Command::new(node)
        .arg(&script)
        .args(["client", "--command"])
        .arg(&this)
        .args(["--scenario", scenario, "--timeout", "60000", "--output-dir"])
        .arg(&results)
        .output()?;
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    if !output.status.success() {
        return Err(format!("{}\n{text}", output.status).into());
    }
    // Its own word is not enough: a scenario in which nothing was checked passes too.
    let file = find(&results, "checks.json").ok_or_else(|| format!("there are no results\n{text}"))?;
    let checks: Value = serde_json::from_str(&std::fs::read_to_string(file)?)?;
    let checks = checks.as_array().ok_or("the results are no list")?;
    let with = |status: &str| checks.iter().filter(|check| check["status"] == status).count();
    if with("FAILURE") > 0 {
        return Err(text.into());
    }
    for id in needed {
        if !checks.iter().any(|check| check["id"] == *id && check["status"] == "SUCCESS") {
            return Err(format!("{id} was not found to be right\n{}", json!(checks)).into());
        }
    }
    Ok(with("SUCCESS"))
}

fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    for entry in std::fs::read_dir(folder).ok()?.flatten() {
        let path = entry.path();
        if path.is_dir() {
            if let Some(found) = find(&path, name) {
                return Some(found);
            }
        } else if path.file_name().is_some_and(|file| file == name) {
            return Some(path);
        }
    }
    None
}
