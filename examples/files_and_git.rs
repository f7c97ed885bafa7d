//! Real writes on real servers that are killed while they write.
//!
//! ```text
//! scripts/install-servers
//! cargo run --example files_and_git -- target/servers [NOTES]
//! ```
//!
//! Each note is written into a repository by server-filesystem (`write_file`), staged and committed by
//! mcp-server-git (`git_add`, `git_commit`). The server that is at work is killed with SIGKILL at a random moment
//! of most of these calls. In the end the table says of each write what the caller was told, and, by a reader that
//! asks no server, whether it is there.
//!
//! # What is declared here, and whether it is true
//!
//! Both stacks declare [`exit_ends_effects`](goaround::mcp::Stdio::exit_ends_effects): once the server's process
//! group is gone, nothing that was given to it can still land. That is what makes "absent" worth something, and
//! nobody but the user can know whether it is so. Here it is:
//!
//! - **server-filesystem** writes from threads of its own process, to a local disk. (On a network file system,
//!   what this machine sees is right at once too; what others see may come later.)
//! - **mcp-server-git** commits from its own process (GitPython) and runs `git` for the rest: its children are in
//!   its process group, and so are a repository's hooks. It would not be so for a hook that goes into the
//!   background in a session of its own, or for a tool that pushes: what a remote has received goes on without us.
//!
//! A kill leaves things half done all the same, and each check must know what that looks like:
//!
//! - `write_file` makes a new file first and fills it then, so that an empty file or half of one may be there. It
//!   is neither the content nor absent. Nobody else writes these paths and the replay writes over all of it, so
//!   that `absent_if_different` is right here. Where others write too, it is not, and that write stays unknown.
//! - `git_commit` writes tree and commit as objects, and then moves the branch. Before that the log does not show
//!   it: it is absent, and the objects are rubbish that `git gc` removes; the index is untouched, so that a replay
//!   commits the same. After that the log shows it. In between there is no half, but for the lock:
//! - a killed `git` leaves `index.lock`, a killed commit the branch's lock. The check finds, rightly, that nothing
//!   landed, and the replay is refused by git because of the lock. That is an answer, and the caller gets it. To
//!   remove the lock is for somebody who knows that no other `git` is at work: here, this program.
//! - `git_log` shows the current branch. Were somebody to switch branches between the write and the check, the
//!   commit would be taken for absent. A message proves a commit only if nobody else uses it: each has a number
//!   drawn at random.

#[cfg(unix)]
mod unix {
    use std::{
        collections::HashMap,
        fs,
        path::{Path, PathBuf},
        sync::{Arc, Mutex, PoisonError},
        time::Duration,
    };

    use goaround::{
        BoxError, Call, CallError, CallId, Event, Outcome, Stack, VerdictKind, WriteSafetyLayer,
        jsonrpc::{Request, Response},
        mcp::{
            self,
            checks::{self, ReadBacks},
        },
    };
    use serde_json::{Value, json};
    use tokio::process::Command;

    /// What server-filesystem is to write, found again.
    fn file_checks() -> ReadBacks {
        checks::read_back("write_file")
            .by_tool("read_text_file")
            .argument("/path", "/path")
            .same("/content/0/text", "/content")
            .absent_if_error_says("ENOENT")
            .absent_if_different()
            .landed_with(|_, _| json!({ "content": [{ "type": "text", "text": "found to be written" }] }))
            .into()
    }

    /// What mcp-server-git is to do, found again.
    fn git_checks() -> ReadBacks {
        // A new file that is staged shows in the difference between index and HEAD.
        let add = checks::read_back("git_add")
            .by_tool("git_diff_staged")
            .argument("/repo_path", "/repo_path")
            .line("+++ b/{}", "/files/0");
        // The newest 50 commits: a log that long may hide an older one.
        let commit = checks::read_back("git_commit")
            .by_tool("git_log")
            .argument("/repo_path", "/repo_path")
            .constant("/max_count", 50)
            .line("Message: {}", "/message")
            .limit(50)
            .landed_with(|written, found| {
                let log = found.pointer("/content/0/text").and_then(Value::as_str).unwrap_or_default();
                let hash = hash_of(log, written["message"].as_str().unwrap_or_default());
                json!({ "content": [{ "type": "text", "text": format!("found to be committed as {hash}") }] })
            });
        add.or(commit)
    }

    /// The hash of the commit with that message, in the text that `git_log` gives.
    fn hash_of<'a>(log: &'a str, message: &str) -> &'a str {
        let mut hash = "";
        for line in log.lines() {
            if let Some(commit) = line.strip_prefix("Commit: ") {
                hash = commit;
            } else if line.strip_prefix("Message: ") == Some(message) {
                break;
            }
        }
        hash
    }

    /// A server under a stack.
    struct Server {
        stack: Stack<mcp::Stdio, Request, Response>,
        process: PathBuf,
        doubts: Arc<Mutex<HashMap<CallId, String>>>,
    }

    impl Server {
        fn new(
            name: &str,
            folder: &Path,
            command: &[PathBuf],
            read_only: &[&str],
            checks: ReadBacks,
        ) -> Result<Self, BoxError> {
            // The shell notes its process id and becomes the server, so that we know whom to kill.
            let process = folder.join(name).with_extension("pid");
            let mut sh = Command::new("sh");
            sh.args(["-c", "echo $$ > \"$0\"; exec \"$@\""]).arg(&process).args(command).envs(GIT_USER);
            let connector = mcp::stdio(sh)
                .client_info("files-and-git", "1.0.0")
                // By this the checks may call them.
                .tools(mcp::ToolRules::new().read_only(read_only.iter().copied()))
                .exit_ends_effects();
            let doubts = Arc::<Mutex<HashMap<CallId, String>>>::default();
            let sink = Arc::clone(&doubts);
            let stack = Stack::builder(connector)
                .deadline(Duration::from_secs(30))
                .writes(WriteSafetyLayer::new(checks))
                .on_event(move |event| {
                    if let Event::InDoubt(report) = event {
                        let told = match (report.verdict, report.replayed) {
                            (_, true) => "in doubt, absent, fenced, sent again".to_owned(),
                            (Some(VerdictKind::Landed), _) => "in doubt, found".to_owned(),
                            _ => format!("in doubt: {}", report.reason.as_deref().unwrap_or("no reason")),
                        };
                        sink.lock().unwrap_or_else(PoisonError::into_inner).insert(report.call, told);
                    }
                })
                .build()?;
            Ok(Self { stack, process, doubts })
        }

        /// Calls a tool; the server is killed so long after.
        async fn call(
            &self,
            tool: &str,
            arguments: Value,
            kill_after: Option<Duration>,
        ) -> Result<Row, BoxError> {
            // Connected, so that the kill meets somebody: the last one may have come when nobody was calling.
            self.stack.send(Request::new("tools/list", json!({}))?).await?;
            let mut request = Request::tool(tool, arguments);
            let call = request.context_mut().assign_id();
            let killing = async {
                match kill_after {
                    Some(wait) => {
                        tokio::time::sleep(wait).await;
                        self.kill()
                    }
                    None => Ok(()),
                }
            };
            let (result, killed) = tokio::join!(self.stack.send(request), killing);
            killed?;
            let doubt = self.doubts.lock().unwrap_or_else(PoisonError::into_inner).remove(&call);
            Ok(Row { tool: tool.to_owned(), kill_after, told: Told::of(result)?, doubt })
        }

        fn kill(&self) -> Result<(), BoxError> {
            let id = fs::read_to_string(&self.process)?;
            let group = rustix::process::Pid::from_raw(id.trim().parse()?).ok_or("no process id")?;
            match rustix::process::kill_process_group(group, rustix::process::Signal::KILL) {
                // It was killed before and nobody has called it since.
                Err(rustix::io::Errno::SRCH) => Ok(()),
                other => Ok(other?),
            }
        }
    }

    /// What the caller of a write was told.
    enum Told {
        Done(String),
        Refused(String),
        Error(Outcome, String),
    }

    impl Told {
        fn of(result: Result<Response, CallError>) -> Result<Self, BoxError> {
            let answer: Value = match result {
                Ok(answer) => answer.parse()?,
                Err(error) => return Ok(Told::Error(error.outcome(), error.to_string())),
            };
            let text = answer.pointer("/content/0/text").and_then(Value::as_str).unwrap_or_default();
            let first = text.lines().next().unwrap_or_default().to_owned();
            match answer.get("isError") {
                Some(Value::Bool(true)) => Ok(Told::Refused(first)),
                _ => Ok(Told::Done(first)),
            }
        }

        fn is_done(&self) -> bool {
            matches!(self, Told::Done(_) | Told::Error(Outcome::DoneResultLost, _))
        }

        /// Whether that agrees with how often it is there. `None` where nobody claimed anything.
        fn is_true(&self, there: usize) -> Option<bool> {
            match self {
                Told::Done(_) | Told::Error(Outcome::DoneResultLost, _) => Some(there == 1),
                Told::Refused(_) | Told::Error(Outcome::NotDone | Outcome::Answered, _) => Some(there == 0),
                Told::Error(..) => None,
            }
        }
    }

    /// A line of the table.
    struct Row {
        tool: String,
        kill_after: Option<Duration>,
        told: Told,
        doubt: Option<String>,
    }

    impl Row {
        fn print(&self, there: usize) {
            let killed = self
                .kill_after
                .map_or("-".to_owned(), |after| format!("{:.1} ms", after.as_secs_f64() * 1e3));
            let (kind, text) = match &self.told {
                Told::Done(text) => ("done", text),
                Told::Refused(text) => ("refused", text),
                Told::Error(Outcome::Unknown, text) => ("UNKNOWN", text),
                Told::Error(Outcome::DoneResultLost, text) => ("done", text),
                Told::Error(_, text) => ("not done", text),
            };
            let truth = match self.told.is_true(there) {
                Some(true) => "",
                Some(false) => "  <- NOT TRUE",
                None => "  (nobody claimed anything)",
            };
            let doubt = self.doubt.as_deref().unwrap_or("-");
            let text: String = text.chars().take(60).collect();
            println!("{:11} {killed:>8}  {doubt:37} {kind:8} {there}  {text}{truth}", self.tool);
        }
    }

    const GIT_USER: [(&str, &str); 4] = [
        ("GIT_AUTHOR_NAME", "A"),
        ("GIT_AUTHOR_EMAIL", "a@example.org"),
        ("GIT_COMMITTER_NAME", "A"),
        ("GIT_COMMITTER_EMAIL", "a@example.org"),
    ];

    /// The reader that asks no server.
    fn git(repository: &Path, arguments: &[&str]) -> Result<String, BoxError> {
        let output = std::process::Command::new("git")
            .arg("-C")
            .arg(repository)
            .args(arguments)
            .envs(GIT_USER)
            .output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
        }
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    fn count(text: &str, wanted: &str) -> usize {
        text.lines().filter(|line| *line == wanted).count()
    }

    /// Removes what a killed `git` left locked. Only while nothing is at work.
    fn remove_locks(folder: &Path) -> Result<(), BoxError> {
        for entry in fs::read_dir(folder)? {
            let path = entry?.path();
            if path.is_dir() {
                remove_locks(&path)?;
            } else if path.extension().is_some_and(|extension| extension == "lock") {
                println!("            (removed the lock {} of a killed git)", path.display());
                fs::remove_file(&path)?;
            }
        }
        Ok(())
    }

    /// Writes the notes and prints the table. `false` if somebody was told what is not true.
    pub(crate) async fn fly(servers: &Path, notes: usize) -> Result<bool, BoxError> {
        let script = servers.join("node/node_modules/@modelcontextprotocol/server-filesystem/dist/index.js");
        let python = servers.join("python2/bin/python");
        for file in [&script, &python] {
            if !file.exists() {
                let file = file.display();
                return Err(format!("{file} is not there: run scripts/install-servers first").into());
            }
        }
        let temporary = tempfile::tempdir()?;
        let folder = fs::canonicalize(temporary.path())?;
        let repository = folder.join("notes");
        fs::create_dir(&repository)?;
        git(&repository, &["init", "--quiet"])?;
        git(&repository, &["commit", "--quiet", "--allow-empty", "--message", "the first"])?;

        let command = ["node".into(), script, repository.clone()];
        let files = Server::new("files", &folder, &command, &["read_text_file"], file_checks())?;
        let command = ["-m", "mcp_server_git", "--repository"].map(PathBuf::from);
        let command = [&[python][..], &command[..], &[repository.clone()][..]].concat();
        let git_server =
            Server::new("git", &folder, &command, &["git_diff_staged", "git_log"], git_checks())?;

        println!("tool           killed  doubt                                 told  there");
        let (mut unknown, mut untrue, mut writes) = (0, 0, 0);
        let mut tell = |row: &Row, there: usize| {
            row.print(there);
            writes += 1;
            unknown += usize::from(row.told.is_true(there).is_none());
            untrue += usize::from(row.told.is_true(there) == Some(false) || there > 1);
        };
        let moment =
            |most: u64| (fastrand::u8(..) < 200).then(|| Duration::from_micros(fastrand::u64(0..most)));
        for number in 1..=notes {
            let name = format!("note-{number}.md");
            let path = repository.join(&name);
            let content = format!("Note {number}, {:016x}\n", fastrand::u64(..)).repeat(4000);
            let arguments = json!({ "path": path, "content": content });
            let row = files.call("write_file", arguments, moment(6_000)).await?;
            tell(&row, usize::from(fs::read_to_string(&path).is_ok_and(|text| text == content)));
            if !row.told.is_done() {
                continue;
            }

            remove_locks(&repository.join(".git"))?;
            let arguments = json!({ "repo_path": repository, "files": [name] });
            let row = git_server.call("git_add", arguments, moment(40_000)).await?;
            tell(&row, count(&git(&repository, &["diff", "--cached", "--name-only"])?, &name));
            if !row.told.is_done() {
                continue;
            }

            remove_locks(&repository.join(".git"))?;
            let message = format!("Note {number}, {:016x}", fastrand::u64(..));
            let arguments = json!({ "repo_path": repository, "message": message });
            let row = git_server.call("git_commit", arguments, moment(40_000)).await?;
            tell(&row, count(&git(&repository, &["log", "--format=%s"])?, &message));
        }
        println!("{writes} writes, {unknown} unknown, {untrue} told what is not true or done twice");
        files.stack.shutdown(Duration::from_secs(5)).await;
        git_server.stack.shutdown(Duration::from_secs(5)).await;
        Ok(untrue == 0)
    }
}

#[cfg(unix)]
#[tokio::main]
async fn main() -> std::process::ExitCode {
    use std::process::ExitCode;

    let mut arguments = std::env::args_os().skip(1);
    let servers = arguments.next().unwrap_or_else(|| "target/servers".into());
    let notes = arguments.next().map_or(Some(6), |notes| notes.to_str()?.parse().ok());
    let Some(notes) = notes else {
        eprintln!("usage: files_and_git [SERVERS [NOTES]]");
        return ExitCode::from(2);
    };
    // The servers start in this process's folder, and need their own paths in full.
    let result = match std::path::absolute(&servers) {
        Ok(servers) => unix::fly(&servers, notes).await,
        Err(error) => Err(error.into()),
    };
    match result {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("files_and_git: {error}");
            ExitCode::FAILURE
        }
    }
}

#[cfg(not(unix))]
fn main() {
    eprintln!("files_and_git: not here: it kills process groups, which are Unix's");
}
