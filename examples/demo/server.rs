//! The server: MCP 2025-11-25 over standard input and output, one line a message, by hand. It knows nothing of
//! `goaround`, so that what it writes into its journal is a second opinion.
//!
//! It keeps invoices. Its journal is a file with one line for each thing that happened, appended and never
//! changed: `start PID`, `commit INVOICE`, `end PID`. A server that is killed writes no `end`.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::process::{CommandExt, parent_id},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The first argument that makes the demo a server; the second one is the folder.
pub(crate) const SERVE: &str = "--serve";
/// The first argument of a server that has closed its output and goes on working.
pub(crate) const GO_ON: &str = "--go-on";

/// What a call makes the server do, in its argument `fault`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Fault {
    /// Nothing: it answers.
    None,
    /// It answers, and then exits.
    Leave,
    /// It kills itself before it does anything: the first time, and not after its restart.
    Die,
    /// It kills itself each time.
    DieAlways,
    /// It waits until eight calls are there and kills itself, once.
    DieAtEight,
    /// It commits and kills itself before it answers, once.
    CommitThenDie,
    /// It closes its standard output and commits 300 ms later, once.
    GoOn,
    /// It answers when the next call is there, and before that one.
    HoldBack,
    /// It does nothing any more, and reads nothing.
    Hang,
    /// It answers with an error of its own.
    Quota,
}

struct Server {
    folder: PathBuf,
    /// How many calls wait for the eighth.
    waiting: usize,
    /// The call that is answered when the next one is there.
    held_back: Option<(Value, String)>,
}

/// Serves until the standard input ends.
pub(crate) fn serve(folder: &Path) -> io::Result<()> {
    let mut server = Server { folder: folder.to_owned(), waiting: 0, held_back: None };
    journal(folder, &format!("start {}", std::process::id()))?;
    for line in io::stdin().lines() {
        let message: Value = serde_json::from_str(&line?)?;
        // What has no id is a notification: nothing here depends on one.
        if let Some(id) = message.get("id") {
            server.request(id, &message)?;
        }
    }
    journal(folder, &format!("end {}", std::process::id()))
}

/// What is left to do after the standard output was closed: the commit. Then it ends as `serve` does.
pub(crate) fn go_on(folder: &Path, invoice: &str) -> io::Result<()> {
    thread::sleep(Duration::from_millis(300));
    journal(folder, &format!("commit {invoice}"))?;
    io::copy(&mut io::stdin(), &mut io::sink())?;
    journal(folder, &format!("end {}", std::process::id()))
}

impl Server {
    fn request(&mut self, id: &Value, message: &Value) -> io::Result<()> {
        let params = &message["params"];
        match message["method"].as_str() {
            Some("initialize") => answer(
                id,
                json!({
                    "protocolVersion": "2025-11-25",
                    "capabilities": { "tools": {} },
                    "serverInfo": { "name": "invoices", "version": "1.0.0" },
                }),
            ),
            Some("ping") => answer(id, json!({})),
            Some("tools/list") => answer(id, json!({ "tools": tools() })),
            Some("tools/call") => self.tool(id, params),
            _ => fail(id, json!({ "code": -32601, "message": "method not found" })),
        }
    }

    fn tool(&mut self, id: &Value, params: &Value) -> io::Result<()> {
        if let Some((id, invoice)) = self.held_back.take() {
            self.commit(&invoice)?;
            answer(&id, text(&invoice))?;
        }
        let arguments = &params["arguments"];
        let invoice = arguments["invoice"].as_str().unwrap_or_default();
        let is_write = params["name"] == "create_invoice";
        let fault = Fault::deserialize(&arguments["fault"]).unwrap_or(Fault::None);
        match fault {
            Fault::DieAlways => die(),
            Fault::Die if self.first_time(fault) => die(),
            Fault::DieAtEight => {
                self.waiting += 1;
                if self.waiting == 8 && self.first_time(fault) {
                    die();
                }
                if !self.mark_of(fault).exists() {
                    return Ok(());
                }
            }
            Fault::CommitThenDie if self.first_time(fault) => {
                self.commit(invoice)?;
                die();
            }
            Fault::GoOn if self.first_time(fault) => return Err(self.close_output(invoice)),
            Fault::HoldBack => {
                self.held_back = Some((id.clone(), invoice.to_owned()));
                return Ok(());
            }
            Fault::Hang => hang(),
            Fault::Quota => {
                let data = json!({ "limit": 100, "resets": "tomorrow" });
                return fail(id, json!({ "code": -32000, "message": "quota", "data": data }));
            }
            _ => {}
        }

        if is_write {
            self.commit(invoice)?;
        }
        answer(id, if params["name"] == "list_invoices" { self.list()? } else { text(invoice) })?;
        if fault == Fault::Leave {
            journal(&self.folder, &format!("end {}", std::process::id()))?;
            std::process::exit(0);
        }
        Ok(())
    }

    fn commit(&self, invoice: &str) -> io::Result<()> {
        journal(&self.folder, &format!("commit {invoice}"))
    }

    fn list(&self) -> io::Result<Value> {
        let journal = std::fs::read_to_string(journal_of(&self.folder))?;
        let invoices: Vec<&str> = journal.lines().filter_map(|line| line.strip_prefix("commit ")).collect();
        Ok(json!({ "content": [], "structuredContent": { "invoices": invoices } }))
    }

    /// Whether a fault happens for the first time, also over restarts; each flight has a folder of its own.
    fn first_time(&self, fault: Fault) -> bool {
        File::create_new(self.mark_of(fault)).is_ok()
    }

    fn mark_of(&self, fault: Fault) -> PathBuf {
        self.folder.join(format!("{fault:?} happened"))
    }

    /// Closes the standard output and goes on. In safe Rust a process cannot close it, but it can become
    /// another program whose output is elsewhere.
    fn close_output(&self, invoice: &str) -> io::Error {
        match std::env::current_exe() {
            Ok(program) => {
                Command::new(program).arg(GO_ON).arg(&self.folder).arg(invoice).stdout(Stdio::null()).exec()
            }
            Err(error) => error,
        }
    }
}

pub(crate) fn journal_of(folder: &Path) -> PathBuf {
    folder.join("journal")
}

/// Appends a line, by one write.
fn journal(folder: &Path, line: &str) -> io::Result<()> {
    let mut file = OpenOptions::new().append(true).create(true).open(journal_of(folder))?;
    file.write_all(format!("{line}\n").as_bytes())
}

fn answer(id: &Value, result: Value) -> io::Result<()> {
    write(json!({ "jsonrpc": "2.0", "id": id, "result": result }))
}

fn fail(id: &Value, error: Value) -> io::Result<()> {
    write(json!({ "jsonrpc": "2.0", "id": id, "error": error }))
}

fn write(message: Value) -> io::Result<()> {
    let mut output = io::stdout().lock();
    writeln!(output, "{message}")?;
    output.flush()
}

/// A tool's result.
pub(crate) fn text(text: &str) -> Value {
    json!({ "content": [{ "type": "text", "text": text }] })
}

fn tools() -> Value {
    let tool = |name: &str, reads: bool| {
        json!({
            "name": name,
            "inputSchema": { "type": "object" },
            "annotations": { "readOnlyHint": reads },
        })
    };
    json!([tool("get_invoice", true), tool("list_invoices", true), tool("create_invoice", false)])
}

/// Dies as if by `kill -9`: nothing is flushed, nothing runs.
fn die() -> ! {
    let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
    unreachable!("SIGKILL cannot be ignored")
}

/// Does nothing until it is killed. It ends with its parent, so that a demo that is killed leaves nothing behind.
fn hang() -> ! {
    let parent = parent_id();
    while parent_id() == parent {
        thread::sleep(Duration::from_millis(20));
    }
    std::process::exit(1)
}
