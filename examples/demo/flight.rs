//! One flight: a server of its own in a folder of its own, the stack that calls it, and, after landing, the
//! comparison of what the callers were told with what the server's journal says.

use std::{
    collections::HashMap,
    fs, io,
    path::Path,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use goaround::{
    Attempt, BoxError, Call, CallError, CallId, Delivery, Event, InDoubt, Outcome, RetryReadOnly, Stack,
    StackBuilder, Verdict,
    event::{CallReport, DoubtReport, Incident, Recovery},
    jsonrpc::{Request, Response},
    mcp,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::{process::Command, time::sleep};

use crate::{
    report::Row,
    server::{self, Fault},
};

/// Longer than anything takes that is not stuck: no flight but those that are about time depends on it.
const DEADLINE: Duration = Duration::from_secs(60);

/// How long a server may take to end by itself.
pub(crate) const PATIENCE: Duration = Duration::from_millis(500);

type Builder = StackBuilder<mcp::Stdio, Request, Response>;

/// A flight under way.
pub(crate) struct Flight {
    stack: mcp::Client,
    folder: TempDir,
    seen: Arc<Seen>,
    writes: Mutex<Vec<Write>>,
}

/// The events of a flight.
#[derive(Default)]
pub(crate) struct Seen {
    calls: Mutex<Vec<CallReport>>,
    doubts: Mutex<Vec<DoubtReport>>,
    incidents: Mutex<Vec<Incident>>,
    recoveries: Mutex<Vec<Recovery>>,
}

/// What the client believes of a write.
pub(crate) struct Write {
    invoice: String,
    /// `None` if it was answered as done.
    outcome: Option<Outcome>,
    /// Whether an event said that its outcome is unknown.
    reported: bool,
}

/// How one call went.
pub(crate) struct Flown {
    effect: &'static str,
    /// The invoice that it should create, if it is a write.
    invoice: Option<String>,
    pub(crate) result: Result<Response, CallError>,
    pub(crate) attempts: Vec<Attempt>,
    /// The report about it, if it was in doubt.
    pub(crate) doubt: Option<DoubtReport>,
}

// ===== impl Flight =====

impl Flight {
    /// Prepares a flight whose writes have no check.
    pub(crate) fn new() -> Result<Self, BoxError> {
        Self::prepare(PATIENCE, |stack| stack)
    }

    /// Prepares a flight whose writes in doubt are settled by looking for their invoice.
    pub(crate) fn with_check() -> Result<Self, BoxError> {
        Self::prepare(PATIENCE, |stack| stack.check(look_for_invoice))
    }

    /// This is all that a program has to say: how to start the server, which tools only read, and how writes in
    /// doubt are settled.
    pub(crate) fn prepare(
        patience: Duration,
        writes: impl FnOnce(Builder) -> Builder,
    ) -> Result<Self, BoxError> {
        let folder = tempfile::Builder::new().prefix("goaround-demo-").tempdir()?;
        let mut command = Command::new(std::env::current_exe()?);
        command.arg(server::SERVE).arg(folder.path());
        let server = mcp::stdio(command)
            .tools(mcp::ToolRules::new().read_only(["get_invoice", "list_invoices"]))
            // True of this server: it writes its file itself, so that once it is gone nothing more can land.
            .exit_ends_effects()
            // How long it may go on working when its input ends. After that it gets SIGTERM.
            .shutdown_grace(patience, Duration::from_secs(5));
        let seen = Arc::<Seen>::default();
        let sink = Arc::clone(&seen);
        let stack = Stack::builder(server)
            .deadline(DEADLINE)
            .retry(RetryReadOnly)
            .on_event(move |event| sink.note(event));
        Ok(Self { stack: writes(stack).build()?, folder, seen, writes: Mutex::default() })
    }

    /// A call of a tool that only reads.
    pub(crate) async fn read(&self, fault: Fault) -> Result<Flown, BoxError> {
        self.send(Request::tool("get_invoice", json!({ "invoice": "any", "fault": fault })), None).await
    }

    /// A call of a tool that writes: it creates an invoice with a number of its own.
    pub(crate) async fn write(&self, fault: Fault) -> Result<Flown, BoxError> {
        let (invoice, request) = create_invoice(fault)?;
        self.send(request, Some(invoice)).await
    }

    pub(crate) async fn send(
        &self,
        mut request: Request,
        invoice: Option<String>,
    ) -> Result<Flown, BoxError> {
        let id = request.context_mut().assign_id();
        let result = self.stack.send(request).await;
        let attempts = match &result {
            Ok(_) => self.seen.attempts(id),
            Err(error) => error.attempts().to_vec(),
        };
        let doubt = lock(&self.seen.doubts).iter().find(|doubt| doubt.call == id).cloned();
        if let Some(invoice) = &invoice {
            let outcome = result.as_ref().err().map(CallError::outcome);
            let reported = doubt.as_ref().is_some_and(|doubt| doubt.outcome == Some(Outcome::Unknown));
            lock(&self.writes).push(Write { invoice: invoice.clone(), outcome, reported });
        }
        let effect = if invoice.is_some() { "write" } else { "read" };
        Ok(Flown { effect, invoice, result, attempts, doubt })
    }

    /// Waits until the server that runs now, or ran last, has exited and was reaped.
    pub(crate) async fn server_gone(&self) -> Result<(), BoxError> {
        let journal = Journal::read(self.folder.path())?;
        let pid = journal.pids("start").last().copied().and_then(rustix::process::Pid::from_raw);
        let pid = pid.ok_or("no server was started")?;
        while rustix::process::test_kill_process(pid).is_ok() {
            sleep(Duration::from_millis(1)).await;
        }
        Ok(())
    }

    /// Ends the flight: the server is shut down, so that its journal is complete, and the journal is read.
    pub(crate) async fn land(self) -> Result<Landed, BoxError> {
        self.stack.shutdown(Duration::ZERO).await;
        let journal = Journal::read(self.folder.path())?;
        let writes = self.writes.into_inner().unwrap_or_else(PoisonError::into_inner);
        Ok(Landed {
            journal,
            seen: self.seen,
            writes,
            rows: Vec::new(),
            errors: Vec::new(),
            wrong: Vec::new(),
        })
    }
}

/// A write with a number of its own, by which it can be told from every other.
pub(crate) fn create_invoice(fault: Fault) -> Result<(String, Request), serde_json::Error> {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let invoice = format!("invoice-{}", NEXT.fetch_add(1, Ordering::Relaxed));
    let request = Request::tool("create_invoice", json!({ "invoice": invoice, "fault": fault }));
    Ok((invoice, request))
}

/// The effect check: is the invoice of the write in doubt among those that the server has?
pub(crate) async fn look_for_invoice(
    doubt: InDoubt<Request, Response>,
) -> Result<Verdict<Response>, BoxError> {
    let call: Value = doubt.request().params()?;
    let invoice = &call["arguments"]["invoice"];
    let list: Value = doubt.probe(Request::tool("list_invoices", json!({}))).await?.parse()?;
    let invoices = list["structuredContent"]["invoices"].as_array().ok_or("no list of invoices")?;
    if invoices.contains(invoice) {
        let result = server::text(invoice.as_str().unwrap_or_default());
        return Ok(doubt.landed(Response::new(result)?));
    }
    // Never "not landed" by itself: the invoice could still be on its way. It takes the fence that holds.
    Ok(doubt.not_landed())
}

// ===== impl Seen =====

impl Seen {
    fn note(&self, event: Event<'_>) {
        match event {
            Event::Call(report) => lock(&self.calls).push(report.clone()),
            Event::InDoubt(report) => lock(&self.doubts).push(report.clone()),
            Event::Incident(report) => lock(&self.incidents).push(report.clone()),
            Event::Recovery(report) => lock(&self.recoveries).push(report.clone()),
            _ => {}
        }
    }

    /// The attempts of a call that succeeded. Nothing is reported of one that needed only one.
    fn attempts(&self, call: CallId) -> Vec<Attempt> {
        let calls = lock(&self.calls);
        let report = calls.iter().find(|report| report.call == Some(call));
        report.map(|report| report.attempts.clone()).unwrap_or_default()
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

// ===== impl Flown =====

impl Flown {
    pub(crate) fn error(&self) -> Option<&CallError> {
        self.result.as_ref().err()
    }

    /// How often the call was handed over.
    pub(crate) fn attempts(&self) -> usize {
        self.attempts.len().max(1)
    }

    /// How often it may have reached the server.
    fn reached(&self) -> usize {
        let not_sent = self.attempts.iter().filter(|attempt| attempt.delivery == Delivery::NotSent).count();
        self.attempts() - not_sent
    }

    fn outcome(&self) -> Option<Outcome> {
        self.error().map(CallError::outcome)
    }
}

// ===== Landed =====

/// A flight that is over: what was seen of it on both sides, and what is wrong with that.
pub(crate) struct Landed {
    pub(crate) journal: Journal,
    pub(crate) writes: Vec<Write>,
    pub(crate) rows: Vec<Row>,
    /// The texts of the errors, as their callers see them.
    pub(crate) errors: Vec<String>,
    pub(crate) wrong: Vec<String>,
    seen: Arc<Seen>,
}

/// What must come out of a call.
pub(crate) struct Expected {
    /// `None` for a success.
    pub(crate) outcome: Option<Outcome>,
    /// How often it reached the server.
    pub(crate) attempts: usize,
    /// How often it took effect there.
    pub(crate) effects: usize,
}

impl Landed {
    /// Notes how a call went, and compares it with what must have come out.
    pub(crate) fn call(&mut self, call: &Flown, happened: &str, expected: Expected) {
        let Expected { outcome, attempts, effects } = expected;
        let at_server = call.invoice.as_deref().map(|invoice| self.journal.effects(invoice));
        self.expect(call.outcome() == outcome, format!("outcome {outcome:?}, and not {:?}", call.outcome()));
        self.expect(
            call.reached() == attempts,
            format!("{attempts} attempts that reach the server, and not {}", call.reached()),
        );
        let found = at_server.unwrap_or(0);
        self.expect(found == effects, format!("{effects} effects at the server, and not {found}"));
        self.errors.extend(call.error().map(|error| error.to_string()));
        self.rows.push(Row::of(call.effect, happened, call.attempts(), call.outcome(), at_server));
    }

    /// Expects that so many connections closed and were followed by another: in the events and in the journal.
    pub(crate) fn reconnects(&mut self, expected: usize) {
        let told = lock(&self.seen.incidents).iter().filter(|incident| incident.process_restarted).count();
        let started = self.journal.reconnects();
        self.expect(told == expected, format!("{expected} restarts told, and not {told}"));
        self.expect(started == expected, format!("{expected} servers started again, and not {started}"));
    }

    /// Expects that so many recoveries were told.
    pub(crate) fn recoveries(&mut self, expected: usize) {
        let told = lock(&self.seen.recoveries).len();
        self.expect(told == expected, format!("{expected} recoveries told, and not {told}"));
    }

    pub(crate) fn expect(&mut self, holds: bool, what: impl Into<String>) {
        if !holds {
            self.wrong.push(format!("expected {}", what.into()));
        }
    }
}

// ===== Counts =====

/// What the demo is about, counted from the server's journals.
#[derive(Default, serde::Serialize)]
pub(crate) struct Counts {
    pub(crate) flights: usize,
    pub(crate) reconnects: usize,
    /// Effects beyond the first one of a write.
    pub(crate) duplicates: usize,
    /// Writes that were reported as done and are not there.
    pub(crate) lost: usize,
    /// Writes whose outcome the caller was told to be unknown.
    pub(crate) unknown: usize,
    /// Those among them of which an event said so.
    pub(crate) unknown_reported: usize,
}

impl Counts {
    pub(crate) fn add(&mut self, flight: &Landed) {
        self.flights += 1;
        self.reconnects += flight.journal.reconnects();
        self.duplicates += flight.journal.duplicates();
        for write in &flight.writes {
            let is_done = matches!(write.outcome, None | Some(Outcome::DoneResultLost));
            let is_unknown = write.outcome == Some(Outcome::Unknown);
            self.lost += usize::from(is_done && flight.journal.effects(&write.invoice) == 0);
            self.unknown += usize::from(is_unknown);
            self.unknown_reported += usize::from(is_unknown && write.reported);
        }
    }

    pub(crate) fn are_good(&self) -> bool {
        self.duplicates == 0 && self.lost == 0 && self.unknown == self.unknown_reported
    }
}

// ===== Journal =====

/// What the server wrote down, line by line.
pub(crate) struct Journal(Vec<String>);

impl Journal {
    fn read(folder: &Path) -> io::Result<Self> {
        let journal = fs::read_to_string(server::journal_of(folder))?;
        Ok(Self(journal.lines().map(str::to_owned).collect()))
    }

    fn pids(&self, what: &str) -> Vec<i32> {
        self.words().filter(|words| words.0 == what).filter_map(|words| words.1.parse().ok()).collect()
    }

    /// The first word of each line: what happened, in its order.
    pub(crate) fn order(&self) -> Vec<&str> {
        self.words().map(|words| words.0).collect()
    }

    pub(crate) fn reconnects(&self) -> usize {
        self.pids("start").len().saturating_sub(1)
    }

    pub(crate) fn effects(&self, invoice: &str) -> usize {
        self.words().filter(|words| *words == ("commit", invoice)).count()
    }

    fn duplicates(&self) -> usize {
        let mut effects = HashMap::<&str, usize>::new();
        for (_, invoice) in self.words().filter(|words| words.0 == "commit") {
            *effects.entry(invoice).or_default() += 1;
        }
        effects.values().map(|effects| effects - 1).sum()
    }

    fn words(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().filter_map(|line| line.split_once(' '))
    }
}
