//! A scripted server behind a scripted connector, and a log with times of what happened in what order.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    collections::VecDeque,
    future::{Future, pending, ready},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Effect, Event, Evidence, Exit, InDoubt, Outcome,
    ReconnectLayer, Tagged, Verdict, VerdictKind, WriteSafetyLayer,
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, timeout},
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};

pub type Req = Tagged<&'static str>;
pub type Res = u32;
pub type Answer = Pin<Box<dyn Future<Output = Result<Res, CallError>> + Send>>;
pub type Step = Box<dyn FnOnce(Req) -> Answer + Send>;
pub type Doubt = InDoubt<Req, Res>;
pub type Checked = Result<Verdict<Res>, BoxError>;

pub const SECOND: Duration = Duration::from_secs(1);

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

pub fn write() -> Req {
    Tagged::new("w", Effect::Write).named("pay")
}

pub fn read() -> Req {
    Tagged::new("r", Effect::ReadOnly).named("list")
}

// ===== Steps: what the server does with one request =====

pub fn answer(response: Res) -> Step {
    Box::new(move |_| Box::pin(ready(Ok(response))))
}

pub fn fail(error: CallError) -> Step {
    Box::new(move |_| Box::pin(ready(Err(error))))
}

pub fn hang() -> Step {
    Box::new(|_| Box::pin(pending()))
}

/// The result, but only after that time.
pub fn later(wait: Duration, result: Result<Res, CallError>) -> Step {
    Box::new(move |_| {
        Box::pin(async move {
            sleep(wait).await;
            result
        })
    })
}

/// A result that the test sends when it wants to; pending for ever if it never does.
pub fn on(result: oneshot::Receiver<Result<Res, CallError>>) -> Step {
    Box::new(move |_| {
        Box::pin(async move {
            match result.await {
                Ok(result) => result,
                Err(_) => pending().await,
            }
        })
    })
}

/// What a connection of this crate does: it marks the last byte after `wait`, and the result comes at
/// `result_after`.
pub fn marked(wait: Duration, result_after: Duration, result: Result<Res, CallError>) -> Step {
    Box::new(move |request: Req| {
        let activity = request.context().activity().expect("a write has one").clone();
        let over = !activity.adopt();
        Box::pin(async move {
            if over {
                return Err(CallError::not_sent("its time is up"));
            }
            let start = Instant::now();
            if wait < result_after {
                sleep(wait).await;
                activity.sent();
            }
            tokio::time::sleep_until(start + result_after).await;
            result
        })
    })
}

pub fn closed() -> CallError {
    CallError::closed("closed")
}

/// A closure of a process whose effects end with it, whose group is gone after that time.
pub fn exits(wait: Duration, group_gone: bool) -> CallError {
    closed().with_exit(async move {
        sleep(wait).await;
        Exit::new(None, group_gone)
    })
}

pub fn unavailable() -> CallError {
    CallError::evidence(Evidence::Unavailable, "503")
}

// ===== The log =====

#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<(Duration, String)>>>, Arc<Mutex<Option<Instant>>>);

impl Log {
    pub fn note(&self, what: impl Into<String>) {
        let start = *self.1.lock().unwrap().get_or_insert_with(Instant::now);
        self.0.lock().unwrap().push((start.elapsed(), what.into()));
    }

    pub fn all(&self) -> Vec<String> {
        self.0.lock().unwrap().iter().map(|(_, what)| what.clone()).collect()
    }

    /// With the milliseconds since the first entry.
    pub fn timed(&self) -> Vec<String> {
        let log = self.0.lock().unwrap();
        log.iter().map(|(at, what)| format!("{} {what}", at.as_millis())).collect()
    }

    pub fn count(&self, what: &str) -> usize {
        self.all().iter().filter(|entry| *entry == what).count()
    }
}

// ===== Events, kept =====

#[derive(Clone, Debug, PartialEq)]
pub enum Seen {
    Call { attempts: usize, outcome: Option<Outcome> },
    InDoubt { verdict: Option<VerdictKind>, reason: Option<String>, replayed: bool, outcome: Option<Outcome> },
    Abandoned { attempts: usize },
}

#[derive(Clone, Default)]
pub struct Events(pub Arc<Mutex<Vec<Seen>>>, pub Arc<Mutex<Vec<serde_json::Value>>>);

impl Events {
    pub fn sink(&self) -> impl Fn(Event<'_>) + Send + Sync + 'static {
        let Self(seen, raw) = self.clone();
        move |event| {
            raw.lock().unwrap().push(serde_json::to_value(event).unwrap());
            let event = match event {
                Event::Call(r) => Seen::Call { attempts: r.attempts.len(), outcome: r.outcome },
                Event::InDoubt(r) => Seen::InDoubt {
                    verdict: r.verdict,
                    reason: r.reason.clone(),
                    replayed: r.replayed,
                    outcome: r.outcome,
                },
                Event::Abandoned(r) => Seen::Abandoned { attempts: r.attempts.len() },
                _ => return,
            };
            seen.lock().unwrap().push(event);
        }
    }

    pub fn all(&self) -> Vec<Seen> {
        self.0.lock().unwrap().clone()
    }

    pub fn raw(&self) -> Vec<serde_json::Value> {
        self.1.lock().unwrap().clone()
    }

    pub fn doubts(&self) -> usize {
        self.all().iter().filter(|seen| matches!(seen, Seen::InDoubt { .. })).count()
    }

    pub fn calls(&self) -> usize {
        self.all().iter().filter(|seen| matches!(seen, Seen::Call { .. })).count()
    }

    pub fn abandoned(&self) -> usize {
        self.all().iter().filter(|seen| matches!(seen, Seen::Abandoned { .. })).count()
    }
}

// ===== The server =====

#[derive(Clone, Default)]
pub struct Lab {
    pub log: Log,
    pub events: Events,
    pub writes: Arc<Mutex<VecDeque<Step>>>,
    pub reads: Arc<Mutex<VecDeque<Step>>>,
    /// What becomes of the next connects; success where nothing is scripted.
    pub connects: Arc<Mutex<VecDeque<Connect>>>,
    /// What the next connections say of their readiness.
    pub readiness: Arc<Mutex<VecDeque<Readiness>>>,
    gate: Arc<(Mutex<Vec<Waker>>, Mutex<bool>)>,
}

pub enum Connect {
    Ok,
    Fail,
    Hang,
    After(Duration),
}

#[derive(Clone, Copy)]
pub enum Readiness {
    Ready,
    Dead,
    Hang,
    /// As [`Lab::gate`] says.
    Gated,
}

impl Lab {
    pub fn new() -> Self {
        Self::default()
    }

    /// What the server does with the next write.
    pub fn write(&self, step: Step) -> &Self {
        self.writes.lock().unwrap().push_back(step);
        self
    }

    /// What the server does with the next read; where nothing is scripted, it answers 0.
    pub fn read(&self, step: Step) -> &Self {
        self.reads.lock().unwrap().push_back(step);
        self
    }

    pub fn connect(&self, connect: Connect) -> &Self {
        self.connects.lock().unwrap().push_back(connect);
        self
    }

    pub fn readiness(&self, readiness: Readiness) -> &Self {
        self.readiness.lock().unwrap().push_back(readiness);
        self
    }

    /// How many writes were handed over to a connection.
    pub fn writes(&self) -> usize {
        self.log.count("write")
    }

    pub fn reads(&self) -> usize {
        self.log.count("read")
    }

    pub fn connector(&self) -> Connector {
        Connector(self.clone())
    }

    /// Opens or shuts the gate of the connections that have one.
    pub fn gate(&self, open: bool) {
        *self.gate.1.lock().unwrap() = open;
        self.gate.0.lock().unwrap().drain(..).for_each(Waker::wake);
    }

    pub fn gated(&self) -> Connection {
        Connection { lab: self.clone(), readiness: Readiness::Gated }
    }

    /// A connection, for layers without a connector.
    pub fn connection(&self) -> Connection {
        Connection { lab: self.clone(), readiness: Readiness::Ready }
    }
}

#[derive(Clone)]
pub struct Connector(Lab);

impl Service<()> for Connector {
    type Response = Connection;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Connection, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let lab = self.0.clone();
        lab.log.note("connect");
        let connect = lab.connects.lock().unwrap().pop_front().unwrap_or(Connect::Ok);
        let readiness = lab.readiness.lock().unwrap().pop_front().unwrap_or(Readiness::Ready);
        Box::pin(async move {
            match connect {
                Connect::Ok => Ok(Connection { lab, readiness }),
                Connect::Fail => Err("refused".into()),
                Connect::Hang => pending().await,
                Connect::After(wait) => {
                    sleep(wait).await;
                    Ok(Connection { lab, readiness })
                }
            }
        })
    }
}

#[derive(Clone)]
pub struct Connection {
    lab: Lab,
    readiness: Readiness,
}

impl Service<Req> for Connection {
    type Response = Res;
    type Error = CallError;
    type Future = Answer;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        match self.readiness {
            Readiness::Ready => Poll::Ready(Ok(())),
            Readiness::Dead => Poll::Ready(Err(closed())),
            Readiness::Hang => Poll::Pending,
            Readiness::Gated if *self.lab.gate.1.lock().unwrap() => Poll::Ready(Ok(())),
            Readiness::Gated => {
                self.lab.gate.0.lock().unwrap().push(cx.waker().clone());
                Poll::Pending
            }
        }
    }

    fn call(&mut self, request: Req) -> Answer {
        let effect = request.context().effect().unwrap_or_else(|| request.effect());
        let (what, steps) = match effect.is_write() {
            true => ("write", &self.lab.writes),
            false => ("read", &self.lab.reads),
        };
        self.lab.log.note(what);
        let step = steps.lock().unwrap().pop_front();
        match (step, effect.is_write()) {
            (Some(step), _) => step(request),
            (None, false) => Box::pin(ready(Ok(0))),
            (None, true) => panic!("a write that nobody expected"),
        }
    }
}

// ===== A ledger within another one =====

/// What a ledger within another one is given as it is: all but hints; or all but those and one's end.
#[allow(unused_macros, reason = "few tests have such a ledger")]
macro_rules! handed_on {
    () => {
        handed_on!(but settle);
        async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
            self.0.settle(id, revision, state).await
        }
    };
    (but settle) => {
        handed_on!(but settle, claim);
        async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
            self.0.claim(id, revision).await
        }
    };
    (but settle, claim) => {
        async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
            self.0.enter(entry).await
        }
        async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
            self.0.in_doubt().await
        }
        async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
            self.0.forget(id, by).await
        }
    };
}
#[allow(unused_imports, reason = "few tests have such a ledger")]
pub(crate) use handed_on;

/// A gateway: a reconnect layer around connections that have that layer. On the first of them a write is attempted, and finds
/// no connection after that; the next one takes that long.
pub fn over_layers(
    lab: &Lab,
    layer: WriteSafetyLayer<Req, Res>,
    wait: Duration,
) -> BoxCloneService<Req, Res, CallError> {
    let (inner, connects) = (lab.clone(), AtomicU32::new(0));
    lab.readiness(Readiness::Ready).readiness(Readiness::Dead).readiness(Readiness::Dead);
    let layer = layer.on_event(lab.events.sink());
    let connector = service_fn(move |()| {
        let service = layer.layer(ReconnectLayer::once().layer(inner.connector()));
        let first = connects.fetch_add(1, Ordering::Relaxed) == 0;
        async move {
            if !first {
                sleep(wait).await;
            }
            Ok::<_, BoxError>(service)
        }
    });
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(ReconnectLayer::once())
        .service(connector);
    BoxCloneService::new(service)
}

/// A service in between that gives each answer up after that time.
pub fn gives_up(
    below: BoxCloneService<Req, Res, CallError>,
    after: Duration,
) -> BoxCloneService<Req, Res, CallError> {
    BoxCloneService::new(service_fn(move |request: Req| -> Answer {
        let answer: Answer = Box::pin(below.clone().oneshot(request));
        Box::pin(async move {
            let answer = timeout(after, answer).await;
            answer.unwrap_or_else(|_| Err(CallError::ambiguous("elapsed")))
        })
    }))
}
