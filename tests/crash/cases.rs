//! One by one: what is entered of a server, and what that is good for.

use std::{
    path::Path,
    sync::{Arc, Mutex},
    thread,
    time::{Duration, Instant},
};

use goaround::{
    BoxError, Call, CallError, Cause, Outcome, ReconnectLayer, Refusal, Stack, VerdictKind,
    jsonrpc::{Request, Response},
    mcp, stdio,
    write_safety::{
        Resolve,
        ledger::{DurableLedger, Entry, EntryId, Ledger, LedgerError, ServerProcess, State, servers_gone},
    },
};
use serde_json::json;
use tower::Service;

use crate::{
    Plan, client,
    linux::block_on,
    rounds::{Process, all_are_gone, is_alive},
    server::Ending,
};

/// Longer than anything takes that does not hang.
const PATIENCE: Duration = Duration::from_secs(60);

type Case = fn() -> Result<(), BoxError>;

pub(crate) const CASES: &[(&str, Case)] = &[
    ("a_server_is_entered_before_anything_is_sent_to_it", entered_before),
    ("a_server_that_cannot_be_entered_gets_nothing_and_the_error_says_why", cannot_be_entered),
    ("a_ledger_that_never_answers_holds_up_no_call_and_no_shutdown", never_answers),
    ("a_server_that_ends_at_once_is_known_to_be_gone", ends_at_once),
    ("two_stacks_on_one_ledger_do_not_mix_up_their_servers", two_stacks),
];

// ===== A ledger that looks at the server =====

#[derive(Clone, Copy, PartialEq)]
enum Then {
    /// It passes, and is not looked at.
    IsNoted,
    Passes,
    Fails,
    Hangs,
}

/// Looks, when a server is entered, at what that has received so far.
#[derive(Clone)]
struct Gate {
    ledger: DurableLedger,
    plan: Plan,
    then: Then,
    /// Of each server, its entry and how many lines it had received.
    seen: Arc<Mutex<Vec<(ServerProcess, usize)>>>,
}

impl Gate {
    fn new(folder: &Path, then: Then) -> Result<Self, BoxError> {
        let plan = Plan::new(folder, 1, Ending::AtOnce);
        Ok(Self { ledger: DurableLedger::open(plan.file("ledger"))?, plan, then, seen: Arc::default() })
    }

    fn seen(&self) -> Vec<(ServerProcess, usize)> {
        self.seen.lock().unwrap().clone()
    }
}

impl Ledger for Gate {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        self.ledger.enter(entry).await
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.ledger.settle(id, revision, state).await
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.ledger.claim(id, revision).await
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        self.ledger.in_doubt().await
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        self.ledger.forget(id, by).await
    }

    fn abandon(&self, id: EntryId, state: State) {
        self.ledger.abandon(id, state);
    }

    async fn started(&self, server: ServerProcess) -> Result<(), LedgerError> {
        if self.then == Then::IsNoted {
            self.seen.lock().unwrap().push((server.clone(), 0));
            return self.ledger.started(server).await;
        }
        // It reads, and what was sent to it would be there soon.
        while !self.plan.lines("pids").contains(&server.pid.to_string()) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
        let received = self.plan.lines("received").len();
        self.seen.lock().unwrap().push((server.clone(), received));
        match self.then {
            Then::IsNoted | Then::Passes => self.ledger.started(server).await,
            Then::Fails => Err(LedgerError::Unavailable("no disk".into())),
            Then::Hangs => std::future::pending().await,
        }
    }
}

// ===== Stacks over both connectors =====

fn over_child(gate: &Gate, ends: bool, reconnect: ReconnectLayer) -> Result<stdio::Client, BoxError> {
    let mut child = stdio::child(client::command(&gate.plan)?).handshake(|peer| async move {
        peer.request(Request::new("hello", ())?).await?;
        Ok(())
    });
    if ends {
        child = child.exit_ends_effects();
    }
    Ok(Stack::builder(child).writes(client::writes(gate.clone())).reconnect(reconnect).build()?)
}

fn over_mcp(gate: &Gate, ends: bool, reconnect: ReconnectLayer) -> Result<mcp::Client, BoxError> {
    let mut server = mcp::stdio(client::command(&gate.plan)?);
    if ends {
        server = server.exit_ends_effects();
    }
    Ok(Stack::builder(server).writes(client::writes(gate.clone())).reconnect(reconnect).build()?)
}

fn put_by_tool(token: &str) -> Result<Request, serde_json::Error> {
    Request::new("tools/call", json!({ "name": "put", "arguments": { "token": token } }))
}

/// What a stack's connector is.
trait Connector:
    Service<
        (),
        Error: Into<BoxError>,
        Future: Send + 'static,
        Response: Service<Request, Response = Response, Error = CallError, Future: Send + 'static>
                      + Clone
                      + Send
                      + 'static,
    > + Send
    + 'static
{
}

impl Connector for stdio::Child {}
impl Connector for mcp::Stdio {}

fn wait_until(what: &str, holds: impl Fn() -> bool) -> Result<(), BoxError> {
    let start = Instant::now();
    while !holds() {
        if start.elapsed() > PATIENCE {
            return Err(format!("waited in vain: {what}").into());
        }
        thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

// ===== Cases =====

fn entered_before() -> Result<(), BoxError> {
    async fn with<M: Connector>(
        gate: &Gate,
        stack: Stack<M, Request, Response>,
        call: impl Fn(&str) -> Result<Request, serde_json::Error>,
        ends: bool,
    ) -> Result<(), BoxError> {
        stack.send(call("one")?).await?;
        // The next one is entered too.
        let first = gate.seen()[0].0.clone();
        let pid = rustix::process::Pid::from_raw(first.pid.try_into()?).ok_or("no pid")?;
        rustix::process::kill_process_group(pid, rustix::process::Signal::KILL)?;
        wait_until("the end of the first server", || !is_alive(&first.pid.to_string()))?;
        stack.send(call("two")?).await?;
        stack.shutdown(PATIENCE).await;

        let seen = gate.seen();
        let pids: Vec<_> = seen.iter().map(|(server, _)| server.pid.to_string()).collect();
        assert_eq!(pids, gate.plan.lines("pids"));
        assert_eq!((pids.len(), seen[0].1), (2, 0), "something was sent before");
        assert!(seen.iter().all(|(server, _)| server.exit_ends_effects == ends && server.is_gone()));
        assert_eq!(gate.plan.lines("effects"), ["one", "two"]);
        assert!(gate.in_doubt().await?.is_empty());
        Ok(())
    }
    for ends in [true, false] {
        let folder = tempfile::tempdir()?;
        let gate = Gate::new(folder.path(), Then::Passes)?;
        let put = |token: &str| client::put(token, None);
        block_on(async { with(&gate, over_child(&gate, ends, ReconnectLayer::once())?, put, ends).await })?;
        let folder = tempfile::tempdir()?;
        let gate = Gate::new(folder.path(), Then::Passes)?;
        block_on(async {
            with(&gate, over_mcp(&gate, ends, ReconnectLayer::once())?, put_by_tool, ends).await
        })?;
    }
    Ok(())
}

/// That this call came to nothing, and that its server got nothing of it.
async fn expect_nothing<M: Connector>(
    gate: &Gate,
    stack: Stack<M, Request, Response>,
    call: Request,
) -> Result<CallError, BoxError> {
    let error = match stack.send(call).await {
        Ok(answer) => return Err(format!("it was answered: {answer:?}").into()),
        Err(error) => error,
    };
    tokio::time::timeout(PATIENCE, stack.shutdown(Duration::ZERO)).await?;
    assert_eq!(error.outcome(), Outcome::NotDone, "{error}");
    assert!(!gate.seen().is_empty());
    all_are_gone(&gate.plan)?;
    assert_eq!(gate.plan.lines("received"), Vec::<String>::new());
    assert!(gate.in_doubt().await?.is_empty(), "it is not in doubt");
    Ok(error)
}

fn cannot_be_entered() -> Result<(), BoxError> {
    let check = |error: CallError| {
        assert!(matches!(error.cause(), Cause::ConnectFailed(_)), "{error:?}");
        let text = error.to_string();
        assert!(text.starts_with("not done: ") && text.contains("the ledger cannot be used"), "{text}");
    };
    let folder = tempfile::tempdir()?;
    let gate = Gate::new(folder.path(), Then::Fails)?;
    block_on(async {
        let stack = over_child(&gate, true, ReconnectLayer::once())?;
        check(expect_nothing(&gate, stack, client::put("one", None)?).await?);
        Ok(())
    })?;
    let folder = tempfile::tempdir()?;
    let gate = Gate::new(folder.path(), Then::Fails)?;
    block_on(async {
        let stack = over_mcp(&gate, true, ReconnectLayer::once())?;
        check(expect_nothing(&gate, stack, put_by_tool("one")?).await?);
        Ok(())
    })
}

fn never_answers() -> Result<(), BoxError> {
    let soon = Duration::from_millis(400);
    for connect_timeout in [true, false] {
        let folder = tempfile::tempdir()?;
        let gate = Gate::new(folder.path(), Then::Hangs)?;
        block_on(async {
            let reconnect = ReconnectLayer::once();
            let reconnect = if connect_timeout { reconnect.connect_timeout(soon) } else { reconnect };
            let stack = over_child(&gate, true, reconnect)?;
            // The one that is not ended by the connect's time ends with its own.
            let call = client::put("one", None)?.within(if connect_timeout { PATIENCE } else { 2 * soon });
            expect_nothing(&gate, stack, call).await?;
            Ok(())
        })?;
    }
    Ok(())
}

/// Another thread may have reaped it by the time it is entered. One that could not be told from others would
/// leave all writes of its stack without a fence.
fn ends_at_once() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let gate = Gate::new(folder.path(), Then::IsNoted)?;
    const TIMES: usize = 40;
    block_on(async {
        for _ in 0..TIMES {
            let child = stdio::child(tokio::process::Command::new("true")).exit_ends_effects();
            let stack = Stack::builder(child).writes(client::writes(gate.clone())).build()?;
            let _ = stack.send(client::put("one", None)?).await;
            stack.shutdown(PATIENCE).await;
        }
        Ok(())
    })?;
    let seen = gate.seen();
    assert!(seen.len() >= TIMES);
    for (server, _) in seen {
        assert!(server.started.is_some() && server.is_gone(), "{server:?}");
    }
    Ok(())
}

fn resolve<'a>(
    ledger: &'a DurableLedger,
    entry: &'a Entry,
) -> Result<Resolve<'a, DurableLedger, Request>, BoxError> {
    Ok(Resolve::new(ledger, entry, client::request_of(entry)?).within(Duration::from_secs(2)))
}

fn two_stacks() -> Result<(), BoxError> {
    let folder = tempfile::tempdir()?;
    let [one, two] = [("one", Ending::AtOnce), ("two", Ending::Never)].map(|(name, ending)| {
        let mut plan = Plan::new(folder.path().join(name), 1, ending);
        (plan.ledger, plan.hold) = (Some(folder.path().join("ledger")), true);
        plan
    });
    for plan in [&one, &two] {
        std::fs::create_dir(plan.file(""))?;
    }
    let process = Process::start("--write-on-two", &[&one, &two])?;
    wait_until("both writes", || {
        [&one, &two].iter().all(|plan| plan.lines("received").iter().any(|line| line.contains("\"put\"")))
    })?;
    process.kill()?;

    let next = |plan: &Plan| Plan { hold: false, ending: Ending::AtOnce, ..plan.clone() };
    block_on(async {
        let ledger = DurableLedger::open(one.file("ledger"))?;
        let entries = ledger.in_doubt().await?;
        let entry_of = |key: &str| entries.iter().find(|entry| entry.key.as_deref() == Some(key)).cloned();
        let (first, second) = (entry_of("1").ok_or("no first")?, entry_of("2").ok_or("no second")?);
        for (entry, plan) in [(&first, &one), (&second, &two)] {
            let pids: Vec<_> = entry.servers.iter().map(|server| server.pid.to_string()).collect();
            assert_eq!(pids, plan.lines("pids"));
            assert!(entry.servers_entered && !entry.id.is_own() && entry.orphaned.is_some());
        }
        assert!(servers_gone(std::slice::from_ref(&first), PATIENCE).await);
        assert!(!servers_gone(&entries, Duration::from_millis(20)).await);

        // A restart does not free the account.
        let stack = client::stack(&next(&one), ledger.clone())?;
        let error = stack.send(client::put("third", Some(1))?).await.unwrap_err();
        assert!(
            matches!(error.cause(), Cause::Refused(Refusal::KeyInDoubt(id)) if *id == first.id),
            "{error}"
        );
        let resolved = resolve(&ledger, &first)?.run(client::check, &stack).await?;
        assert_eq!(resolved.verdict, VerdictKind::NotLanded, "{resolved:?}");
        stack.send(client::put("third", Some(1))?).await?;
        stack.shutdown(PATIENCE).await;
        assert_eq!(one.lines("effects"), ["third"]);

        // The other's server is still there.
        let stack = client::stack(&next(&two), ledger.clone())?;
        let resolved = resolve(&ledger, &second)?.run(client::check, &stack).await?;
        assert_eq!(resolved.verdict, VerdictKind::Unknown, "{resolved:?}");
        let State::InDoubt { reason } = &resolved.state else { panic!("{resolved:?}") };
        assert!(reason.contains("not known to be gone"), "{reason}");

        // Once it is gone, a connection that is older does not count.
        let pid = rustix::process::Pid::from_raw(second.servers[0].pid.try_into()?).ok_or("no pid")?;
        rustix::process::kill_process_group(pid, rustix::process::Signal::KILL)?;
        for (stack, verdict) in [
            (stack, VerdictKind::Unknown),
            (client::stack(&next(&two), ledger.clone())?, VerdictKind::NotLanded),
        ] {
            let entries = ledger.in_doubt().await?;
            assert!(servers_gone(&entries, PATIENCE).await);
            let resolved = resolve(&ledger, &entries[0])?.run(client::check, &stack).await?;
            assert_eq!(resolved.verdict, verdict, "{resolved:?}");
            if let State::InDoubt { reason } = resolved.state {
                assert!(reason.contains("older than the fence"), "{reason}");
            }
            stack.shutdown(PATIENCE).await;
        }
        assert_eq!(two.lines("effects"), Vec::<String>::new());
        assert!(ledger.in_doubt().await?.is_empty());
        Ok(())
    })
}
