//! The examples besides the demo, as they are run: what each call comes to.
#![cfg(unix)]

use std::process::Command;

/// Runs an example, which `cargo test` builds next to the tests; what it prints.
fn run(name: &str) -> String {
    let test = std::env::current_exe().unwrap();
    let example = test.parent().unwrap().parent().unwrap().join("examples").join(name);
    assert!(example.exists(), "{} is missing: `cargo build --example {name}` makes it", example.display());
    let output = Command::new(example).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    text
}

/// That each of these is in the text, in that order.
#[track_caller]
fn expect(text: &str, lines: &[&str]) {
    let mut rest = text;
    for line in lines {
        let at = rest.find(line).unwrap_or_else(|| panic!("no {line:?}, at that place, in\n{text}"));
        rest = &rest[at + line.len()..];
    }
}

#[test]
fn own_child_settles_its_writes_in_doubt() {
    let text = run("own_child");
    expect(
        &text,
        &[
            "=> {\"created\":\"plain\"}",
            "check: 2 documents, dies-after is there",
            "doc/create was in doubt, replayed: false",
            "=> look first: DONE, result lost: doc/create",
            "check: 2 documents, dies-before is not there",
            "doc/create was in doubt, replayed: true",
            "=> {\"created\":\"dies-before\"}",
            "=> {\"id\":\"dies-before\",\"token\":\"token-of-dies-before\"}",
            "=> answered: doc/rename: method not found (code -32601)",
            "shut down, 0 calls cut off",
        ],
    );
    let listed = text.split("doc/list\n").last().unwrap().lines().next().unwrap();
    for id in ["plain", "dies-after", "dies-before"] {
        assert_eq!(listed.matches(&format!("\"id\":\"{id}\"")).count(), 1, "{listed}");
    }
}

#[test]
fn plain_tower_retries_what_reads_and_gives_the_own_error_back() {
    expect(
        &run("plain_tower"),
        &[
            "/orders  called 1 times: answer",
            "/flaky   called 3 times: answer",
            "/busy    called 2 times: answer",
            "/missing called 1 times: own error, code 404",
            "/down    called 3 times: not done: ",
            "own error: Connect",
            "/hang    called 1 times: no answer: ",
            "/pay     called 1 times: outcome UNKNOWN: ",
            "own error: Reset",
            "buffered: answer \"/buffered\"",
        ],
    );
}
