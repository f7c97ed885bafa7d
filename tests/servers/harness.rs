//! Real MCP servers, killed while they work; what they can do, what is done to them, and what must come of it. The
//! targets `servers` and `sdk_servers` put their own clients on top.
#![allow(dead_code, unreachable_pub)]

use std::{
    collections::HashMap,
    fmt, fs,
    net::{Ipv4Addr, TcpListener},
    path::{Path, PathBuf},
    pin::Pin,
    process::{Child, ExitCode, Stdio},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use goaround::{
    BoxError, CallError, CallId, Event, Outcome, VerdictKind,
    mcp::{
        ToolRules,
        checks::{self, ReadBacks},
    },
};
use serde_json::{Value, json};
use tokio::{net::TcpStream, process::Command};

/// What a server is asked.
#[derive(Clone)]
pub struct Asked {
    pub method: &'static str,
    pub params: Value,
}

/// A stack with a client of one kind or another below.
pub trait Client: Send + Sync {
    fn send(&self, asked: &Asked) -> (CallId, Answer<'_>);

    fn shutdown(&self, grace: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

pub type Answer<'a> = Pin<Box<dyn Future<Output = Result<Value, CallError>> + Send + 'a>>;

/// What a client is to be.
pub struct Plan {
    pub reach: Reach,
    /// Whether it speaks the newer era of the protocol, if the server does.
    pub modern: bool,
    pub rules: ToolRules,
    pub check: Option<ReadBacks>,
    /// Whether it is declared that nothing lands once the server is gone.
    pub fenced: bool,
    pub reports: Arc<Mutex<Reports>>,
}

pub enum Reach {
    Stdio(Command),
    Http(String),
}

impl Plan {
    pub fn sink(&self) -> impl Fn(Event<'_>) + Send + Sync + 'static {
        let reports = Arc::clone(&self.reports);
        move |event| reports.lock().unwrap_or_else(PoisonError::into_inner).add(event)
    }
}

pub type Connect = fn(Plan) -> Result<Box<dyn Client>, BoxError>;

/// How many reads are in flight all the time.
const READERS: usize = 4;

/// A server, and what is done with it.
pub struct Server {
    name: &'static str,
    /// What must be installed for it.
    files: &'static [&'static str],
    /// How it is started: with the servers' folder and its own of this round.
    command: fn(&Path, &Path) -> Vec<PathBuf>,
    /// Whether it is reached over HTTP: a port is then added to its command, and to its environment as `PORT`.
    http: bool,
    /// Whether the client speaks the newer era of the protocol.
    modern: bool,
    environment: &'static [(&'static str, &'static str)],
    read_only: &'static [&'static str],
    prepare: fn(&Path),
    reads: fn(&Path) -> Vec<Asked>,
    writes: Option<Writes>,
    /// Whether the check is wrong, so that writes must be found to land twice.
    wrong: bool,
}

impl Server {
    /// Whether so many kills may have been so many closures, each followed by a recovery. Without a session or a pipe
    /// a kill is none, unless a probe of a check that ran out of time made the silent server suspect.
    fn allows(&self, kills: usize, reports: &Reports) -> bool {
        let least = if self.http && self.modern { 0 } else { kills };
        (least..=kills).contains(&reports.incidents) && reports.recoveries == reports.incidents
    }
}

struct Writes {
    count: usize,
    /// Whether they are in flight at once; if not, one begins when the last has ended.
    at_once: bool,
    /// What is done before a write, by us.
    before: fn(&Path, &Token),
    write: fn(&Path, &Token) -> Asked,
    check: fn() -> ReadBacks,
    /// How often it is there.
    landed: fn(&Path, &Token) -> usize,
}

/// What only one write carries.
struct Token {
    number: usize,
    text: String,
}

fn tool(name: &str, arguments: Value) -> Asked {
    Asked { method: "tools/call", params: json!({ "name": name, "arguments": arguments }) }
}

fn node(servers: &Path, package: &str) -> Vec<PathBuf> {
    let script = format!("node/node_modules/@modelcontextprotocol/server-{package}/dist/index.js");
    vec!["node".into(), servers.join(script)]
}

fn python(servers: &Path, version: &str, arguments: &[&str]) -> Vec<PathBuf> {
    let mut command = vec![servers.join(version).join("bin/python")];
    command.extend(arguments.iter().map(PathBuf::from));
    command
}

const APPEND1: &[&str] = &["python1/bin/python", "append1.py"];
const APPEND2: &[&str] = &["python2/bin/python", "append2.py"];

fn append2(servers: &Path, work: &Path) -> Vec<PathBuf> {
    let mut command = python(servers, "python2", &[]);
    command.extend([servers.join("append2.py"), work.join("lines.txt")]);
    command
}

fn append1(servers: &Path, work: &Path) -> Vec<PathBuf> {
    let mut command = python(servers, "python1", &[]);
    command.extend([servers.join("append1.py"), work.join("lines.txt")]);
    command
}

fn nothing(_: &Path) {}

/// One that is right, and one that looks in a place where the write can never be.
fn checks_of_append() -> [fn() -> ReadBacks; 2] {
    let wrong: fn() -> ReadBacks = || {
        checks::read_back("append")
            .by_tool("lines")
            .same("/content/0/type", "/line")
            .absent_if_different()
            .into()
    };
    let right: fn() -> ReadBacks = || {
        let lines = checks::read_back("append").by_tool("lines");
        lines.some("/structuredContent/result", "", "/line").into()
    };
    [right, wrong]
}

fn append(
    name: &'static str,
    files: &'static [&'static str],
    command: fn(&Path, &Path) -> Vec<PathBuf>,
    check: fn() -> ReadBacks,
) -> Server {
    Server {
        name,
        files,
        command,
        environment: &[],
        read_only: &["lines"],
        prepare: nothing,
        reads: |_| vec![tool("lines", json!({}))],
        writes: Some(Writes {
            count: 24,
            at_once: true,
            before: |_, _| {},
            write: |_, token| tool("append", json!({ "line": token.text })),
            check,
            landed: |work, token| {
                lines(&work.join("lines.txt")).iter().filter(|line| **line == token.text).count()
            },
        }),
        http: false,
        modern: false,
        wrong: false,
    }
}

/// All of them, over the pipes of child processes.
pub fn over_stdio() -> Vec<Server> {
    let [right, wrong] = checks_of_append();
    let mut servers = by_others();
    servers.extend([
        append("python2", APPEND2, append2, right),
        append("python1", APPEND1, append1, right),
        Server { wrong: true, ..append("wrong", APPEND2, append2, wrong) },
    ]);
    servers
}

/// What only a client of both eras and both transports can reach.
pub fn newer_and_over_http() -> Vec<Server> {
    let [right, _] = checks_of_append();
    let everything = by_others().into_iter().find(|server| server.name == "everything");
    let everything = everything.expect("it is among them");
    vec![
        Server { modern: true, ..append("python2-newer", APPEND2, append2, right) },
        Server {
            name: "http-everything",
            http: true,
            command: |servers, _| {
                let mut command = node(servers, "everything");
                command.push("streamableHttp".into());
                command
            },
            ..everything
        },
        Server { http: true, ..append("http-python1", APPEND1, append1, right) },
        Server { http: true, ..append("http-python2", APPEND2, append2, right) },
        Server { http: true, modern: true, ..append("http-python2-newer", APPEND2, append2, right) },
    ]
}

fn by_others() -> Vec<Server> {
    vec![
        Server {
            name: "filesystem",
            files: &["node/node_modules/@modelcontextprotocol/server-filesystem/dist/index.js"],
            command: |servers, work| {
                let mut command = node(servers, "filesystem");
                command.push(work.into());
                command
            },
            environment: &[],
            read_only: &["list_directory", "read_text_file"],
            prepare: |work| {
                fs::write(work.join("read-me.txt"), "here\n").expect("the folder is ours");
            },
            reads: |work| {
                vec![
                    tool("list_directory", json!({ "path": work })),
                    tool("read_text_file", json!({ "path": work.join("read-me.txt") })),
                ]
            },
            writes: Some(FILES),
            http: false,
            modern: false,
            wrong: false,
        },
        Server {
            name: "memory",
            files: &["node/node_modules/@modelcontextprotocol/server-memory/dist/index.js"],
            command: |servers, work| {
                let mut command: Vec<PathBuf> = vec!["env".into()];
                command.push(format!("MEMORY_FILE_PATH={}", work.join("memory.jsonl").display()).into());
                command.extend(node(servers, "memory"));
                command
            },
            environment: &[],
            read_only: &["read_graph", "open_nodes"],
            prepare: |work| {
                let entity =
                    json!({ "type": "entity", "name": "log", "entityType": "log", "observations": [] });
                fs::write(work.join("memory.jsonl"), entity.to_string()).expect("the folder is ours");
            },
            reads: |_| vec![tool("read_graph", json!({})), tool("open_nodes", json!({ "names": ["log"] }))],
            writes: Some(Writes {
                count: 24,
                at_once: false,
                before: |_, _| {},
                write: |_, token| {
                    let observation = json!({ "entityName": "log", "contents": [token.text] });
                    tool("add_observations", json!({ "observations": [observation] }))
                },
                check: || {
                    checks::read_back("add_observations")
                        .by_tool("open_nodes")
                        .argument("/names/0", "/observations/0/entityName")
                        .every("/structuredContent/entities/0/observations", "", "/observations/0/contents")
                        .into()
                },
                landed: |work, token| {
                    let entity: Value = lines(&work.join("memory.jsonl"))
                        .first()
                        .and_then(|line| serde_json::from_str(line).ok())
                        .unwrap_or_default();
                    let observations = entity["observations"].as_array().map_or(&[][..], Vec::as_slice);
                    observations.iter().filter(|one| **one == *token.text).count()
                },
            }),
            http: false,
            modern: false,
            wrong: false,
        },
        Server {
            name: "everything",
            files: &["node/node_modules/@modelcontextprotocol/server-everything/dist/index.js"],
            command: |servers, _| node(servers, "everything"),
            environment: &[],
            read_only: &["echo", "get-sum", "trigger-long-running-operation"],
            prepare: nothing,
            reads: |_| {
                vec![
                    tool("echo", json!({ "message": "x" })),
                    tool("get-sum", json!({ "a": 1, "b": 2 })),
                    tool("trigger-long-running-operation", json!({ "duration": 0.5, "steps": 2 })),
                    Asked { method: "resources/list", params: json!({}) },
                ]
            },
            writes: None,
            http: false,
            modern: false,
            wrong: false,
        },
        Server {
            name: "git",
            files: &["python2/bin/mcp-server-git"],
            command: |servers, work| {
                let mut command = python(servers, "python2", &["-m", "mcp_server_git", "--repository"]);
                command.push(work.join("repository"));
                command
            },
            environment: GIT_USER,
            read_only: &["git_log", "git_status"],
            prepare: |work| {
                let repository = work.join("repository");
                fs::create_dir(&repository).expect("the folder is ours");
                fs::write(repository.join("read-me"), "here\n").expect("the folder is ours");
                git(&repository, &["init", "--quiet"]);
                git(&repository, &["add", "."]);
                git(&repository, &["commit", "--quiet", "--message", "the first"]);
            },
            reads: |work| {
                let repository = work.join("repository");
                vec![
                    tool("git_log", json!({ "repo_path": repository, "max_count": 5 })),
                    tool("git_status", json!({ "repo_path": repository })),
                ]
            },
            writes: Some(Writes {
                count: 10,
                at_once: false,
                before: |work, token| {
                    let repository = work.join("repository");
                    // What a killed server leaves behind, as an operator would do; no write is under way.
                    remove_locks(&repository.join(".git"));
                    fs::write(repository.join(&token.text), "x\n").expect("the folder is ours");
                    git(&repository, &["add", &token.text]);
                },
                write: |work, token| {
                    let arguments = json!({ "repo_path": work.join("repository"), "message": token.text });
                    tool("git_commit", arguments)
                },
                check: || {
                    checks::read_back("git_commit")
                        .by_tool("git_log")
                        .argument("/repo_path", "/repo_path")
                        .constant("/max_count", 100)
                        .line("Message: {}", "/message")
                        .limit(100)
                        .into()
                },
                landed: |work, token| {
                    let log = git(&work.join("repository"), &["log", "--all", "--format=%s"]);
                    log.lines().filter(|line| *line == token.text).count()
                },
            }),
            http: false,
            modern: false,
            wrong: false,
        },
        Server {
            name: "time",
            files: &["python2/bin/mcp-server-time"],
            command: |servers, _| python(servers, "python2", &["-m", "mcp_server_time"]),
            environment: &[],
            read_only: &["get_current_time", "convert_time"],
            prepare: nothing,
            reads: |_| vec![tool("get_current_time", json!({ "timezone": "UTC" }))],
            writes: None,
            http: false,
            modern: false,
            wrong: false,
        },
    ]
}

/// Half of the writes are `write_file`, which may be repeated without harm, and half `edit_file`, which may
/// not: it puts its token before a word, and a second time a second one.
const FILES: Writes = Writes {
    count: 32,
    at_once: true,
    before: |work, token| {
        if token.number % 2 == 1 {
            fs::write(file(work, token), "END\n").expect("the folder is ours");
        }
    },
    write: |work, token| {
        let path = file(work, token);
        match token.number % 2 {
            0 => tool("write_file", json!({ "path": path, "content": content(token) })),
            _ => {
                let edit = json!({ "oldText": "END", "newText": format!("{} END", token.text) });
                tool("edit_file", json!({ "path": path, "edits": [edit] }))
            }
        }
    },
    check: || {
        // Nobody else writes these files, so that other text is older text, or a part of this one.
        let write = checks::read_back("write_file")
            .by_tool("read_text_file")
            .argument("/path", "/path")
            .same("/content/0/text", "/content")
            .absent_if_error_says("ENOENT")
            .absent_if_different();
        let edit = checks::read_back("edit_file")
            .by_tool("read_text_file")
            .argument("/path", "/path")
            .line("{}", "/edits/0/newText");
        write.or(edit)
    },
    landed: |work, token| {
        let text = fs::read_to_string(file(work, token)).unwrap_or_default();
        match token.number % 2 {
            0 => usize::from(text == content(token)),
            _ => text.matches(&token.text).count(),
        }
    },
};

fn file(work: &Path, token: &Token) -> PathBuf {
    work.join(format!("{}.txt", token.number))
}

fn content(token: &Token) -> String {
    format!("{}\n", token.text).repeat(100)
}

const GIT_USER: &[(&str, &str)] = &[
    // `git status` refreshes the index, under a lock, if it can: no read may be in the way of a write.
    ("GIT_OPTIONAL_LOCKS", "0"),
    ("GIT_AUTHOR_NAME", "A"),
    ("GIT_AUTHOR_EMAIL", "a@example.org"),
    ("GIT_COMMITTER_NAME", "A"),
    ("GIT_COMMITTER_EMAIL", "a@example.org"),
];

fn git(repository: &Path, arguments: &[&str]) -> String {
    let output = std::process::Command::new("git")
        .arg("-C")
        .arg(repository)
        .args(arguments)
        .envs(GIT_USER.iter().copied())
        .output()
        .expect("git is installed");
    assert!(output.status.success(), "git {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn remove_locks(folder: &Path) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() {
            remove_locks(&path);
        } else if path.extension().is_some_and(|extension| extension == "lock") {
            fs::remove_file(path).expect("the folder is ours");
        }
    }
}

fn lines(path: &Path) -> Vec<String> {
    fs::read_to_string(path).unwrap_or_default().lines().map(str::to_owned).collect()
}

/// How a stack keeps its writes safe.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mode {
    /// With a check and a fence.
    Fenced,
    /// Without either.
    Refusing,
    /// With a check, without a fence.
    Checked,
}

impl Mode {
    const TURNS: [Mode; 3] = [Mode::Fenced, Mode::Refusing, Mode::Checked];
}

/// What the stack reported.
#[derive(Default)]
pub struct Reports {
    incidents: usize,
    overlaps: usize,
    recoveries: usize,
    /// What each doubt ended with.
    doubts: HashMap<CallId, Vec<Doubt>>,
    violated: usize,
}

#[derive(Clone, Copy, Debug)]
struct Doubt {
    outcome: Option<Outcome>,
    verdict: Option<VerdictKind>,
    replayed: bool,
}

impl Reports {
    fn add(&mut self, event: Event<'_>) {
        let (call, doubt) = match event {
            Event::Incident(report) => {
                self.incidents += 1;
                self.overlaps += usize::from(report.overlap);
                return;
            }
            Event::Recovery(_) => return self.recoveries += 1,
            Event::LateAnswer(report) => return self.violated += usize::from(report.violated.is_some()),
            Event::InDoubt(report) => {
                let doubt =
                    Doubt { outcome: report.outcome, verdict: report.verdict, replayed: report.replayed };
                (Some(report.call), doubt)
            }
            Event::Abandoned(report) => {
                (report.call, Doubt { outcome: report.outcome, verdict: None, replayed: false })
            }
            _ => return,
        };
        self.doubts.entry(call.expect("a call in doubt has an id")).or_default().push(doubt);
    }
}

/// A server under a stack, in a folder of its own.
struct Flight {
    client: Box<dyn Client>,
    work: tempfile::TempDir,
    reports: Arc<Mutex<Reports>>,
    /// A server that we start, since its client does not.
    http: Option<Http>,
}

impl Flight {
    async fn new(server: &Server, servers: &Path, mode: Mode, connect: Connect) -> Result<Self, BoxError> {
        let work = tempfile::tempdir()?;
        // Real paths, since some servers compare them.
        let folder = fs::canonicalize(work.path())?;
        (server.prepare)(&folder);
        let mut arguments = (server.command)(servers, &folder);
        let (reach, http) = match server.http {
            true => {
                let http = Http::new(arguments, server.environment)?;
                http.start().await?;
                (Reach::Http(format!("http://127.0.0.1:{}/mcp", http.port)), Some(http))
            }
            false => {
                // The shell notes the process and becomes the server, so that we know whom to kill.
                let mut command = Command::new("sh");
                command.args(["-c", "echo $$ > \"$0\"; exec \"$@\""]).arg(work.path().with_extension("pid"));
                command.args(arguments.drain(..)).envs(server.environment.iter().copied());
                (Reach::Stdio(command), None)
            }
        };
        let reports = Arc::<Mutex<Reports>>::default();
        let client = connect(Plan {
            reach,
            modern: server.modern,
            rules: ToolRules::new().read_only(server.read_only.iter().copied()),
            check: server.writes.as_ref().filter(|_| mode != Mode::Refusing).map(|writes| (writes.check)()),
            fenced: mode == Mode::Fenced,
            reports: Arc::clone(&reports),
        })?;
        Ok(Self { client, work, reports, http })
    }

    fn folder(&self) -> PathBuf {
        fs::canonicalize(self.work.path()).expect("the folder is ours")
    }

    async fn send(&self, asked: &Asked) -> Result<Value, CallError> {
        self.client.send(asked).1.await
    }

    /// Kills all processes of the server. Where its client does not start the next one, we do.
    async fn kill(&self) -> Result<(), BoxError> {
        match &self.http {
            Some(http) => {
                http.kill();
                http.start().await
            }
            None => {
                let id = fs::read_to_string(self.work.path().with_extension("pid"))?;
                let group = rustix::process::Pid::from_raw(id.trim().parse()?).ok_or("no process id")?;
                Ok(rustix::process::kill_process_group(group, rustix::process::Signal::KILL)?)
            }
        }
    }

    async fn list_tools(&self) -> Result<Value, BoxError> {
        Ok(self.send(&Asked { method: "tools/list", params: json!({}) }).await?)
    }

    async fn end(&self) {
        self.client.shutdown(Duration::from_secs(10)).await;
        if let Some(http) = &self.http {
            http.kill();
        }
        let _ = fs::remove_file(self.work.path().with_extension("pid"));
    }

    fn reports(&self) -> MutexGuard<'_, Reports> {
        self.reports.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A server that is a process of ours, always at the same port.
struct Http {
    arguments: Vec<PathBuf>,
    environment: &'static [(&'static str, &'static str)],
    port: u16,
    child: Mutex<Option<Child>>,
}

impl Http {
    fn new(
        mut arguments: Vec<PathBuf>,
        environment: &'static [(&'static str, &'static str)],
    ) -> Result<Self, BoxError> {
        let port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?.local_addr()?.port();
        arguments.push(port.to_string().into());
        Ok(Self { arguments, environment, port, child: Mutex::new(None) })
    }

    fn child(&self) -> MutexGuard<'_, Option<Child>> {
        self.child.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts it, and waits until it listens.
    async fn start(&self) -> Result<(), BoxError> {
        use std::os::unix::process::CommandExt;
        let child = std::process::Command::new(&self.arguments[0])
            .args(&self.arguments[1..])
            .envs(self.environment.iter().copied())
            .env("PORT", self.port.to_string())
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        *self.child() = Some(child);
        let begin = Instant::now();
        while TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).await.is_err() {
            if begin.elapsed() > Duration::from_secs(60) {
                return Err("the server does not listen".into());
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        Ok(())
    }

    fn kill(&self) {
        let Some(mut child) = self.child().take() else { return };
        if let Some(group) = i32::try_from(child.id()).ok().and_then(rustix::process::Pid::from_raw) {
            let _ = rustix::process::kill_process_group(group, rustix::process::Signal::KILL);
        }
        let _ = child.wait();
    }
}

impl Drop for Http {
    fn drop(&mut self) {
        self.kill();
    }
}

/// An answer of a tool, unless it is an error.
fn good(answer: Result<Value, CallError>) -> Result<Value, BoxError> {
    let result = answer?;
    match result.get("isError") {
        Some(Value::Bool(true)) => Err(format!("the tool failed: {result}").into()),
        _ => Ok(result),
    }
}

/// The demo's read flight.
async fn read_flight(
    server: &Server,
    servers: &Path,
    random: &mut fastrand::Rng,
    connect: Connect,
) -> Result<(), BoxError> {
    let flight = Flight::new(server, servers, Mode::Refusing, connect).await?;
    let tools = flight.list_tools().await?;
    for name in server.read_only {
        let known =
            tools["tools"].as_array().is_some_and(|tools| tools.iter().any(|tool| tool["name"] == *name));
        if !known {
            return Err(format!("the server has no tool {name}").into());
        }
    }
    let reads = (server.reads)(&flight.folder());
    let reading = (0..8).map(|at| flight.send(&reads[at % reads.len()]));
    let wait = Duration::from_micros(random.u64(0..5_000));
    let killing = async {
        tokio::time::sleep(wait).await;
        flight.kill().await
    };
    let (answers, killed) = tokio::join!(join_all(reading), killing);
    killed?;
    for answer in answers {
        good(answer)?;
    }
    flight.list_tools().await?;
    // And once more while nothing is in flight.
    flight.kill().await?;
    flight.list_tools().await?;
    flight.end().await;
    let reports = flight.reports();
    if !server.allows(2, &reports) || reports.overlaps > 0 {
        return Err(format!(
            "{} incidents, {} recoveries, {} overlaps after two kills",
            reports.incidents, reports.recoveries, reports.overlaps
        )
        .into());
    }
    Ok(())
}

/// All of their results, in their order.
async fn join_all<F: Future>(futures: impl IntoIterator<Item = F>) -> Vec<F::Output> {
    let mut futures: Vec<_> = futures.into_iter().map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|cx| {
        let mut pending = false;
        for (future, result) in &mut futures {
            if result.is_none() {
                match future.as_mut().poll(cx) {
                    std::task::Poll::Ready(done) => *result = Some(done),
                    std::task::Poll::Pending => pending = true,
                }
            }
        }
        if pending { std::task::Poll::Pending } else { std::task::Poll::Ready(()) }
    })
    .await;
    futures.into_iter().filter_map(|(_, result)| result).collect()
}

/// What came out of a batch of writes, counted.
#[derive(Default)]
struct Count {
    rounds: usize,
    reads: usize,
    writes: usize,
    landed: usize,
    unknown: usize,
    duplicates: usize,
    lost: usize,
    /// Answered by the server with an error.
    refused: usize,
    not_done: usize,
    /// Unknown in spite of a check and a fence.
    unsettled: usize,
    /// Found to have landed by a check.
    found: usize,
    replayed: usize,
}

impl fmt::Display for Count {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "rounds={} writes={} landed={} unknown={} duplicates={} lost={} \
             (unsettled={} found={} replayed={} refused={} not_done={} reads={})",
            self.rounds,
            self.writes,
            self.landed,
            self.unknown,
            self.duplicates,
            self.lost,
            self.unsettled,
            self.found,
            self.replayed,
            self.refused,
            self.not_done,
            self.reads
        )
    }
}

/// One write, and what came out of it.
struct Write {
    token: Token,
    call: CallId,
    result: Result<Value, CallError>,
}

/// A batch of writes, with reads all the while. Returns what went wrong, and how long the batch took.
async fn round(
    server: &Server,
    writes: &Writes,
    servers: &Path,
    mode: Mode,
    (seed, kill_after): (u64, Option<Duration>),
    count: &mut Count,
    connect: Connect,
) -> Result<(Vec<String>, Duration), BoxError> {
    let flight = Flight::new(server, servers, mode, connect).await?;
    let folder = flight.folder();
    let reads = (server.reads)(&folder);
    // Connected, so that the kill meets somebody.
    good(flight.send(&reads[0]).await)?;

    let begin = Instant::now();
    let token = |number| Token { number, text: format!("t-{seed:016x}-{number}") };
    let write = async |token: Token| {
        let (call, answer) = flight.client.send(&(writes.write)(&folder, &token));
        Write { token, call, result: answer.await }
    };
    let writing = async {
        let mut done = Vec::new();
        if writes.at_once {
            let tokens: Vec<_> = (0..writes.count).map(token).collect();
            tokens.iter().for_each(|token| (writes.before)(&folder, token));
            done = join_all(tokens.into_iter().map(&write)).await;
        } else {
            for number in 0..writes.count {
                let token = token(number);
                (writes.before)(&folder, &token);
                done.push(write(token).await);
            }
        }
        (done, begin.elapsed())
    };
    let killing = async {
        match kill_after {
            Some(wait) => {
                tokio::time::sleep(wait).await;
                flight.kill().await
            }
            None => Ok(()),
        }
    };
    let ended = std::cell::Cell::new(false);
    let read_on = async |reader: usize| {
        let mut answers = Vec::new();
        // One more at the end, after the kill.
        while !ended.get() || answers.is_empty() {
            answers.push(good(flight.send(&reads[reader % reads.len()]).await));
        }
        answers
    };
    let acting = async {
        let ((done, took), killed) = tokio::join!(writing, killing);
        ended.set(true);
        killed.map(|()| (done, took))
    };
    let (acted, answers) = tokio::join!(acting, join_all((0..READERS).map(read_on)));
    let (done, took) = acted?;
    let last = good(flight.send(&reads[0]).await);
    flight.end().await;

    let mut wrong = Vec::new();
    for answer in answers.into_iter().flatten().chain([last]) {
        count.reads += 1;
        if let Err(error) = answer {
            wrong.push(format!("a read was not answered: {error}"));
        }
    }
    let reports = flight.reports();
    let seen = (reports.incidents, reports.recoveries, reports.overlaps, reports.violated);
    let kills = usize::from(kill_after.is_some());
    if !server.allows(kills, &reports) || (seen.2, seen.3) != (0, 0) {
        wrong.push(format!("incidents, recoveries, overlaps, violated fences: {seen:?}"));
    }
    let unknown = count.unknown;
    for one in &done {
        if let Err(what) = judge(writes, &folder, one, &reports, count) {
            wrong.push(format!("write {} ({:?}): {what}", one.token.number, one.result));
        }
    }
    if mode == Mode::Fenced {
        count.unsettled += count.unknown - unknown;
    }
    if kill_after.is_none() && done.iter().any(|one| one.result.is_err()) {
        wrong.push("a write failed without a kill".to_owned());
    }
    count.rounds += usize::from(kill_after.is_some());
    Ok((wrong, took))
}

const TWICE: &str = "landed more than once";

/// Whether what the caller was told of a write is true.
fn judge(
    writes: &Writes,
    folder: &Path,
    write: &Write,
    reports: &Reports,
    count: &mut Count,
) -> Result<(), String> {
    let landed = (writes.landed)(folder, &write.token);
    let doubts = reports.doubts.get(&write.call).map_or(&[][..], Vec::as_slice);
    count.writes += 1;
    count.landed += usize::from(landed > 0);
    count.duplicates += landed.saturating_sub(1);
    count.replayed += doubts.iter().filter(|doubt| doubt.replayed).count();
    count.found += doubts.iter().filter(|doubt| doubt.verdict == Some(VerdictKind::Landed)).count();
    if landed > 1 {
        return Err(TWICE.to_owned());
    }
    if doubts.len() > 1 {
        return Err(format!("reported more than once: {doubts:?}"));
    }
    let outcome = match &write.result {
        Ok(result) => {
            let refused = result.get("isError") == Some(&Value::Bool(true));
            count.refused += usize::from(refused);
            count.lost += usize::from(!refused && landed == 0);
            return match (refused, landed) {
                (false, 0) => Err("acknowledged, and not there".to_owned()),
                (true, 1) => Err(format!("refused, and there: {result}")),
                _ => Ok(()),
            };
        }
        Err(error) => error.outcome(),
    };
    match (outcome, landed) {
        (Outcome::DoneResultLost, 1) => Ok(()),
        (Outcome::DoneResultLost, _) => {
            count.lost += 1;
            Err("said to be done, and not there".to_owned())
        }
        (Outcome::NotDone | Outcome::Answered, 0) => {
            count.not_done += 1;
            Ok(())
        }
        (Outcome::NotDone | Outcome::Answered, _) => Err("said not to be done, and there".to_owned()),
        (Outcome::Unknown, _) => {
            count.unknown += 1;
            match doubts {
                [doubt] if doubt.outcome == Some(Outcome::Unknown) => Ok(()),
                _ => Err(format!("unknown, and reported as {doubts:?}")),
            }
        }
        (outcome, _) => Err(format!("a write has the outcome {outcome:?}")),
    }
}

async fn run(
    server: &Server,
    servers: &Path,
    rounds: u64,
    seed: u64,
    connect: Connect,
) -> Result<Count, BoxError> {
    let mut random = fastrand::Rng::with_seed(seed);
    let mut count = Count::default();
    for _ in 0..rounds {
        count.rounds += usize::from(server.writes.is_none());
        read_flight(server, servers, &mut random, connect)
            .await
            .map_err(|error| format!("read flight: {error}"))?;
        if server.writes.is_some() {
            break;
        }
    }
    let Some(writes) = &server.writes else { return Ok(count) };
    let mut unkilled = Count::default();
    let seed_of = |round: u64| seed ^ round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let (mut wrong, took) =
        round(server, writes, servers, Mode::Fenced, (seed_of(u64::MAX), None), &mut unkilled, connect)
            .await?;
    if unkilled.landed != writes.count {
        wrong.push(format!("without a kill: {unkilled}"));
    }
    for at in 0..rounds {
        let mode = if server.wrong { Mode::Fenced } else { Mode::TURNS[usize::try_from(at % 3)?] };
        // A little beyond the end, where the kill meets nothing but reads.
        let kill_after = took.mul_f64(random.f64() * 1.1);
        let one = (seed_of(at), Some(kill_after));
        let (also, _) = round(server, writes, servers, mode, one, &mut count, connect)
            .await
            .map_err(|error| format!("round {at} ({mode:?}, killed after {kill_after:?}): {error}"))?;
        let at = format!("round {at} ({mode:?}, killed after {kill_after:?})");
        wrong.extend(also.into_iter().map(|what| format!("{at}: {what}")));
    }
    if server.wrong {
        return match wrong.iter().all(|what| what.ends_with(TWICE)) && count.duplicates > 0 {
            true => Ok(count),
            false => Err(format!("not only duplicates were found\n{}\n{count}", wrong.join("\n")).into()),
        };
    }
    match wrong.is_empty() {
        true => Ok(count),
        false => Err(format!("{}\n{count}", wrong.join("\n")).into()),
    }
}

fn number(variable: &str) -> Option<u64> {
    let value = std::env::var(variable).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{variable} is not a number: {value:?}")))
}

/// Flies them all, or those whose names contain an argument of the program.
pub fn main(title: &str, servers: Vec<Server>, connect: Connect) -> ExitCode {
    let folder = std::env::var_os("GOAROUND_SERVERS")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("target/servers"), PathBuf::from);
    let folder = fs::canonicalize(&folder).unwrap_or(folder);
    let rounds = number("GOAROUND_ROUNDS").unwrap_or(5);
    let seed = number("GOAROUND_SEED").unwrap_or_else(|| fastrand::u64(..));
    let names: Vec<String> = std::env::args().skip(1).filter(|name| !name.starts_with('-')).collect();
    println!("{title}: in {}, {rounds} rounds each, GOAROUND_SEED={seed}", folder.display());
    let runtime = tokio::runtime::Runtime::new().expect("a runtime");

    let (mut passed, mut failed) = (0, 0);
    for server in servers {
        if !names.is_empty() && !names.iter().any(|name| server.name.contains(name.as_str())) {
            continue;
        }
        let missing = server.files.iter().find(|file| !folder.join(file).exists());
        let began = Instant::now();
        let result = match missing {
            Some(file) => Err(format!("{file} is not installed: run scripts/install-servers").into()),
            None => runtime.block_on(run(&server, &folder, rounds, seed, connect)),
        };
        match result {
            Ok(count) => {
                passed += 1;
                let note = if server.wrong { "; as it must be" } else { "" };
                println!("{title}: {} {count} in {:.1?}{note}", server.name, began.elapsed());
            }
            Err(error) => {
                failed += 1;
                println!("{title}: {} FAILED: {error}", server.name);
            }
        }
    }
    println!("{passed} passed, {failed} failed");
    if failed == 0 && passed > 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
