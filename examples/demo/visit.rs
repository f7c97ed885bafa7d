//! The read flights against any MCP server: what a user wants to see of a server of his own before he trusts a
//! library with it. Nothing but reads is sent.

use std::{
    ffi::OsString,
    fs,
    path::{Path, PathBuf},
    sync::{Arc, Mutex},
    time::Duration,
};

use goaround::{
    BoxError, CallError, Event, Stack,
    event::{Incident, Recovery},
    jsonrpc::{Request, Response},
    mcp,
};
use rustix::process::{Pid, Signal, kill_process_group, test_kill_process, test_kill_process_group};
use serde_json::Value;
use tokio::{process::Command, time::sleep};

use crate::flight::lock;

/// Some servers take their time to start.
const DEADLINE: Duration = Duration::from_secs(60);

/// What a server may offer to list, and what every server answers.
const READS: [&str; 4] = ["tools/list", "resources/list", "prompts/list", "ping"];

struct Visit {
    stack: Arc<mcp::Client>,
    /// The process that runs now, as the shell that became it wrote down.
    pid_file: PathBuf,
    seen: Arc<Seen>,
    /// The first of `READS` that the server answers.
    method: &'static str,
}

#[derive(Default)]
struct Seen {
    incidents: Mutex<Vec<Incident>>,
    recoveries: Mutex<Vec<Recovery>>,
}

/// `true` if all went as it must.
pub(crate) async fn visit(command: &[OsString]) -> Result<bool, BoxError> {
    let [program, ..] = command else { return Ok(true) };
    // Only to say so at once if there is no such program: the shell below would be found in any case.
    Stack::builder(mcp::stdio(Command::new(program))).build()?;

    let folder = tempfile::Builder::new().prefix("goaround-demo-").tempdir()?;
    let pid_file = folder.path().join("pid");
    let seen = Arc::<Seen>::default();
    let sink = Arc::clone(&seen);
    let stack = Stack::builder(mcp::stdio(that_leaves_its_pid(command, &pid_file)))
        .deadline(DEADLINE)
        .on_event(move |event| match event {
            Event::Incident(incident) => lock(&sink.incidents).push(incident.clone()),
            Event::Recovery(recovery) => lock(&sink.recoveries).push(recovery.clone()),
            _ => {}
        })
        .build()?;
    let mut visit = Visit { stack: Arc::new(stack), pid_file, seen, method: READS[0] };
    let result = visit.fly().await;
    visit.stack.shutdown(Duration::ZERO).await;
    result
}

/// The command, started by a shell that writes its process id into the file and becomes it.
fn that_leaves_its_pid(command: &[OsString], pid_file: &Path) -> Command {
    let mut shell = Command::new("sh");
    shell.arg("-c").arg(r#"echo $$ >"$0"; exec "$@""#).arg(pid_file).args(command);
    shell
}

impl Visit {
    async fn fly(&mut self) -> Result<bool, BoxError> {
        let before = self.first_list().await?;
        println!("1  handshake and {}: {}", self.method, summary(&before));

        // Stopped first, so that the call is surely in flight when the server is killed.
        self.signal(Signal::STOP)?;
        let read = tokio::spawn(self.read());
        sleep(Duration::from_millis(200)).await;
        self.signal(Signal::KILL)?;
        let after = read.await??;
        let same = summary(&after) == summary(&before);
        println!("2  killed mid-call, {} again: {}", self.method, summary(&after));

        self.signal(Signal::STOP)?;
        let reads: Vec<_> = (0..8).map(|_| tokio::spawn(self.read())).collect();
        sleep(Duration::from_millis(200)).await;
        self.signal(Signal::KILL)?;
        for read in reads {
            read.await??;
        }
        println!("3  killed with eight calls in flight: eight answers");

        self.kill_while_idle().await?;
        let last = self.read().await?;
        println!("4  killed while idle, {} again: {}", self.method, summary(&last));

        Ok(self.report(same))
    }

    /// Finds out what the server offers to list, beginning with its tools.
    async fn first_list(&mut self) -> Result<Response, BoxError> {
        for method in READS {
            self.method = method;
            match self.read().await {
                Ok(response) => return Ok(response),
                // It does not have that.
                Err(error) if error.answer().is_some() => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err("the server answers no read, not even a ping".into())
    }

    fn read(&self) -> impl Future<Output = Result<Response, CallError>> + Send + 'static + use<> {
        let stack = Arc::clone(&self.stack);
        let method = self.method;
        async move {
            let request = Request::new(method, ()).map_err(CallError::not_sent)?;
            stack.send(request).await
        }
    }

    fn pid(&self) -> Result<Pid, BoxError> {
        let pid = fs::read_to_string(&self.pid_file)?.trim().parse()?;
        Pid::from_raw(pid).ok_or_else(|| "the server has no process id".into())
    }

    /// Signals the server with all that it has started: its connector has put it in a group of its own.
    fn signal(&self, signal: Signal) -> Result<(), BoxError> {
        Ok(kill_process_group(self.pid()?, signal)?)
    }

    async fn kill_while_idle(&self) -> Result<(), BoxError> {
        let pid = self.pid()?;
        self.signal(Signal::KILL)?;
        while test_kill_process(pid).is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
        // What it had started dies with it, but not necessarily as soon; and somebody else has to reap that.
        for _ in 0..200 {
            if test_kill_process_group(pid).is_err() {
                break;
            }
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    fn report(&self, same: bool) -> bool {
        let incidents = lock(&self.seen.incidents);
        let recoveries = lock(&self.seen.recoveries);
        println!();
        if let Some(peer) = incidents.first().and_then(|incident| incident.before.as_ref()) {
            let server = peer.server.as_ref().map(|server| format!("{} {}", server.name, server.version));
            let server = server.unwrap_or_else(|| "without a name".to_owned());
            println!("server: {}, protocol {}", server.trim(), peer.protocol.as_deref().unwrap_or("unknown"));
        }
        for incident in incidents.iter() {
            println!(
                "connection {} closed with {} in flight ({}){}",
                incident.generation,
                incident.in_flight,
                incident.exit.as_deref().unwrap_or("the end of its process is not known"),
                match recoveries.iter().find(|recovery| recovery.generation > incident.generation) {
                    Some(next) =>
                        format!("; connection {} answered {:.2?} later", next.generation, next.took),
                    None => String::new(),
                },
            );
        }
        if !same {
            println!("FAILED: the list after the restart is another one than before");
        }
        if incidents.len() != 3 {
            println!("FAILED: the server was started again {} times, and not 3 times", incidents.len());
        }
        same && incidents.len() == 3
    }
}

/// How many things are in a list, and the first of them.
fn summary(response: &Response) -> String {
    let Ok(Value::Object(result)) = response.parse() else { return "an answer".to_owned() };
    let Some(Value::Array(items)) = result.values().find(|value| value.is_array()) else {
        return "an answer".to_owned();
    };
    let names: Vec<_> = items.iter().filter_map(|item| item["name"].as_str()).take(3).collect();
    let more = if items.len() > names.len() { ", …" } else { "" };
    format!("{} ({}{more})", items.len(), names.join(", "))
}
