//! The demo as a newcomer runs it: what it prints last, its exit status, and what it leaves behind when it is
//! killed.
#![cfg(unix)]

use std::{
    path::PathBuf,
    process::{Command, Output},
};

/// The demo, which `cargo test` builds next to the tests.
fn demo() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    let demo = test.parent().unwrap().parent().unwrap().join("examples").join("demo");
    assert!(demo.exists(), "{} is missing: `cargo build --example demo` makes it", demo.display());
    demo
}

fn run<S: AsRef<std::ffi::OsStr>>(arguments: &[S]) -> (Output, String) {
    let output = Command::new(demo()).args(arguments).output().unwrap();
    let text = String::from_utf8(output.stdout.clone()).unwrap();
    (output, text)
}

#[test]
fn all_flights_come_out_as_they_must_and_the_last_line_counts_them() {
    let (output, text) = run(&["--json"]);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(!text.contains("FAILED"), "{text}");
    let counts = text.lines().last().unwrap();
    assert_eq!(
        counts,
        r#"{"flights":12,"reconnects":10,"duplicates":0,"lost":0,"unknown":3,"unknown_reported":3}"#
    );
    // The README shows this table, and nobody has embellished it.
    let start = text.find("    call  ").unwrap();
    let table = &text[start..start + text[start..].find("\n\n").unwrap()];
    assert!(include_str!("../README.md").contains(table), "the README's table is another one than\n{table}");
}

#[test]
fn the_reads_of_any_server_come_out_too() {
    let folder = tempfile::tempdir().unwrap();
    // The demo's own server stands in for any.
    let server = [demo().as_os_str(), "--serve".as_ref(), folder.path().as_os_str()].map(ToOwned::to_owned);
    let (output, text) = run(&server);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("server: invoices 1.0.0, protocol 2025-11-25"), "{text}");
    assert!(
        text.contains("handshake and tools/list: 3 (get_invoice, list_invoices, create_invoice)"),
        "{text}"
    );

    // One of the newer era.
    let modern = r#"
        while read -r line; do
            id=${line#*'"id":'}; id=${id%%,*}
            case $line in
                *'"server/discover"'*) result='{"resultType":"complete","supportedVersions":["2026-07-28"],"capabilities":{}}' ;;
                *'"tools/list"'*) result='{"resultType":"complete","tools":[{"name":"one","inputSchema":{"type":"object"}}]}' ;;
                *) continue ;;
            esac
            printf '{"jsonrpc":"2.0","id":%s,"result":%s}\n' "$id" "$result"
        done"#;
    let (output, text) = run(&["sh", "-c", modern]);
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(text.contains("protocol 2026-07-28") && text.contains("tools/list: 1 (one)"), "{text}");

    // One that does not start: its words are printed where the user reads them.
    let (output, _) = run(&["sh", "-c", "echo oops >&2; echo 'no config' >&2; exit 3"]);
    assert_eq!(output.status.code(), Some(1));
    let stderr = String::from_utf8(output.stderr).unwrap();
    assert!(stderr.ends_with("demo: its stderr: oops\ndemo: its stderr: no config\n"), "{stderr}");

    let (output, _) = run(&["goaround-no-such-program"]);
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("goaround-no-such-program"));
}

#[test]
fn options_are_explained_and_unknown_ones_are_errors() {
    let (output, text) = run(&["--help"]);
    assert!(output.status.success() && text.starts_with("usage: demo"), "{text}");
    for wrong in [&["--no-such-option"][..], &["--json", "server"]] {
        let (output, text) = run(wrong);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(String::from_utf8_lossy(&output.stderr).contains("usage: demo"));
    }
}

/// In the flight in which the server hangs and does not even see that its input has ended.
#[cfg(target_os = "linux")]
#[test]
fn a_demo_that_is_killed_leaves_no_server_behind() {
    use std::{io::Read, process::Stdio, thread::sleep, time::Duration};

    // The servers have their folder among their arguments, and it lies in this one.
    let folder = tempfile::tempdir().unwrap();
    let mut demo = Command::new(demo()).env("TMPDIR", folder.path()).stdout(Stdio::piped()).spawn().unwrap();
    let mut output = demo.stdout.take().unwrap();
    let (mut seen, mut byte) = (Vec::new(), [0]);
    while !seen.ends_with(b": hang ... ") {
        output.read_exact(&mut byte).unwrap();
        seen.push(byte[0]);
    }
    while !is_running(folder.path()) {
        sleep(Duration::from_millis(1));
    }
    // Time for it to begin to hang; the deadlines of that flight are longer.
    sleep(Duration::from_millis(300));
    demo.kill().unwrap();
    demo.wait().unwrap();
    let mut waited = 0;
    while is_running(folder.path()) {
        assert!(waited < 20_000, "the server is still there");
        sleep(Duration::from_millis(10));
        waited += 10;
    }
}

/// Whether a process runs that has a path below that folder among its arguments.
#[cfg(target_os = "linux")]
fn is_running(folder: &std::path::Path) -> bool {
    let folder = folder.as_os_str().as_encoded_bytes();
    let processes = std::fs::read_dir("/proc").unwrap();
    processes
        .filter_map(|process| std::fs::read(process.ok()?.path().join("cmdline")).ok())
        .any(|arguments| arguments.windows(folder.len()).any(|window| window == folder))
}
