//! The server: JSON-RPC and MCP 2025-11-25 over standard input and output, by hand. It knows nothing of
//! `goaround`. It appends each write to a file, by its token.

use std::{
    fs::OpenOptions,
    io::{self, Write},
    os::unix::process::CommandExt,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
        mpsc::{self, Receiver},
    },
    thread,
    time::Duration,
};

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::Plan;

/// How long a server goes on after its client.
pub(crate) const LIVES_ON: Duration = Duration::from_millis(300);

/// How a server ends, once its input has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Ending {
    /// At once, whatever it has read and not done.
    AtOnce,
    /// It waits, and then does all that it has read.
    LivesOn,
    /// It works on nothing, and does not end.
    Never,
    /// It hands all that it has read to a process outside its group, which does it later: its exit does not end
    /// its effects, whatever anybody declares.
    HandsOn,
}

struct Server {
    plan: Plan,
    rng: fastrand::Rng,
    ended: Arc<AtomicBool>,
    /// Whether it has waited already.
    waited: bool,
}

/// Serves until the standard input ends, and then as it is told.
pub(crate) fn serve(plan: Plan) -> io::Result<()> {
    append(&plan.file("pids"), &std::process::id().to_string())?;
    let ended = Arc::<AtomicBool>::default();
    let requests = read(plan.clone(), Arc::clone(&ended));
    let seed = plan.seed ^ u64::from(std::process::id());
    let mut server = Server { plan, rng: fastrand::Rng::with_seed(seed), ended, waited: false };
    for line in requests {
        let message: Value = serde_json::from_str(&line)?;
        // What has no id is a notification.
        if let Some(id) = message.get("id") {
            server.request(id, &message)?;
        }
    }
    Ok(())
}

/// Reads all that comes, so that the pipe's end is seen while a request is being worked on.
fn read(plan: Plan, ended: Arc<AtomicBool>) -> Receiver<String> {
    let (send, receive) = mpsc::channel();
    thread::spawn(move || {
        for line in io::stdin().lines() {
            // A line that was cut when the client died is no request.
            let Ok(line) = line else { break };
            if serde_json::from_str::<Value>(&line).is_err() {
                break;
            }
            append(&plan.file("received"), &line).expect("it can note what it has received");
            if send.send(line).is_err() {
                return;
            }
        }
        if plan.ending == Ending::AtOnce {
            std::process::exit(0);
        }
        ended.store(true, Ordering::SeqCst);
    });
    receive
}

impl Server {
    fn request(&mut self, id: &Value, message: &Value) -> io::Result<()> {
        let params = &message["params"];
        let method = message["method"].as_str().unwrap_or_default();
        let result = match method {
            "initialize" => json!({
                "protocolVersion": "2025-11-25",
                "capabilities": { "tools": {} },
                "serverInfo": { "name": "crash", "version": "1" },
            }),
            "ping" | "hello" => json!({}),
            "tools/list" => json!({ "tools": [] }),
            "tools/call" => {
                let result = self.work(params["name"].as_str().unwrap_or_default(), &params["arguments"])?;
                json!({ "content": [], "structuredContent": result })
            }
            "put" | "find" => self.work(method, params)?,
            _ => {
                answer(json!({ "jsonrpc": "2.0", "id": id, "error": { "code": -32601, "message": "no" } }));
                return Ok(());
            }
        };
        answer(json!({ "jsonrpc": "2.0", "id": id, "result": result }));
        Ok(())
    }

    fn work(&mut self, method: &str, params: &Value) -> io::Result<Value> {
        let token = params["token"].as_str().unwrap_or_default();
        if method == "find" {
            let effects = std::fs::read_to_string(self.plan.file("effects")).unwrap_or_default();
            return Ok(json!({ "found": effects.lines().filter(|line| *line == token).count() }));
        }
        if self.plan.hold && !self.ended.load(Ordering::SeqCst) {
            while !self.ended.load(Ordering::SeqCst) || self.plan.ending == Ending::Never {
                thread::sleep(Duration::from_millis(1));
                if !self.plan.folder.exists() {
                    // Its test has failed: nothing is left behind.
                    std::process::exit(1);
                }
            }
        }
        self.pause();
        self.die_now_and_then();
        self.commit(token)?;
        self.die_now_and_then();
        self.pause();
        Ok(json!({ "token": token }))
    }

    fn commit(&mut self, token: &str) -> io::Result<()> {
        if self.ended.load(Ordering::SeqCst) {
            if self.plan.ending == Ending::HandsOn {
                return hand_on(&self.plan, token);
            }
            if self.plan.ending == Ending::LivesOn && !self.waited {
                self.waited = true;
                thread::sleep(LIVES_ON);
            }
        }
        append(&self.plan.file("effects"), token)
    }

    fn pause(&mut self) {
        thread::sleep(Duration::from_micros(self.rng.u64(..300)));
    }

    /// A server may die too while its client lives: then a write is checked and perhaps replayed, and the client
    /// may be killed in that.
    fn die_now_and_then(&mut self) {
        if self.plan.deaths > 0 && self.rng.u32(..300) == 0 {
            let first = |n| std::fs::File::create_new(self.plan.file(&format!("death {n}"))).is_ok();
            if (0..self.plan.deaths).any(first) {
                let _ =
                    rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            }
        }
    }
}

/// Lets a process that is in another group do it, later.
fn hand_on(plan: &Plan, token: &str) -> io::Result<()> {
    let mut late = Command::new(std::env::current_exe()?);
    late.arg("--late").arg(plan.file("effects")).arg(token);
    late.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    append(&plan.file("pids"), &late.process_group(0).spawn()?.id().to_string())
}

pub(crate) fn late(effects: &Path, token: &str) -> io::Result<()> {
    thread::sleep(LIVES_ON * 2);
    append(effects, token)
}

/// Appends a line, by one write.
fn append(file: &Path, line: &str) -> io::Result<()> {
    OpenOptions::new().append(true).create(true).open(file)?.write_all(format!("{line}\n").as_bytes())
}

/// Nobody may be there any more.
fn answer(message: Value) {
    let mut output = io::stdout().lock();
    let _ = writeln!(output, "{message}").and_then(|()| output.flush());
}
