//! What a client does about its write: by hand, as one would write it, and by this crate's layers.

use std::{
    borrow::Cow,
    pin::Pin,
    sync::{Arc, Mutex},
    task::{Context, Poll},
    time::Duration,
};

use goaround::{
    BoxError, Call, CallContext, CallError, CallId, Effect, Event, Exit, InDoubt, Outcome, Stack, Verdict,
    WriteSafetyLayer, write_safety::KeyedWrites,
};
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tower::Service;

use crate::world::{Killed, LONGEST, PATIENCE, Server, Terms, World};

/// How far behind a stale replica lies.
const LAG: Duration = Duration::from_secs(2);
/// The deadline of a call through our layers: the time of the longest quarantine and more.
const DEADLINE: Duration = Duration::from_secs(30);
/// For how long a server keeps its keys: longer than any message takes, and not.
const WINDOW: Duration = Duration::from_secs(60);
const SHORT: Duration = Duration::from_secs(5);

/// A row of the table.
pub(crate) struct Row {
    pub(crate) policy: &'static str,
    /// Whether what the policy takes for granted, or was told, is true of the server.
    pub(crate) true_of_the_server: bool,
    pub(crate) server: Server,
    pub(crate) client: Client,
}

/// Who sends the write.
#[derive(Clone, Copy)]
pub(crate) enum Client {
    /// Sends it again if no answer comes.
    Blind,
    /// Waits for that long if no answer comes, looks, and sends it again if it is not there.
    Checks(Duration),
    /// This crate's layers.
    Ours { writes: fn() -> Writes, effect: Effect, deadline: Duration },
}

/// What the caller is told in the end.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Told {
    Done,
    NotDone,
    Unknown,
}

type Writes = WriteSafetyLayer<Pay, bool>;

/// A request of a client through our layers: the write, or a look whether it is there.
pub(crate) struct Pay {
    world: Arc<World>,
    effect: Effect,
    key: Option<String>,
    context: CallContext,
}

impl Pay {
    fn new(world: Arc<World>, effect: Effect) -> Self {
        Self { world, effect, key: None, context: CallContext::new() }
    }
}

impl Call for Pay {
    fn method(&self) -> &str {
        "pay"
    }

    fn name(&self) -> Cow<'static, str> {
        "pay".into()
    }

    fn effect(&self) -> Effect {
        self.effect
    }

    fn context(&self) -> &CallContext {
        &self.context
    }

    fn context_mut(&mut self) -> &mut CallContext {
        &mut self.context
    }

    fn try_clone(&self) -> Option<Self> {
        let Self { world, effect, key, context } = self;
        Some(Self { world: Arc::clone(world), effect: *effect, key: key.clone(), context: context.clone() })
    }
}

pub(crate) fn rows() -> Vec<Row> {
    let server = Server::default();
    let stale = Server { lag: LAG, ..server };
    let fenced = Server { keeps_deadlines: true, ..server };
    let deduplicates = Server { keeps_keys: Some(Duration::MAX), ..server };
    let by_hand =
        |policy, true_of_the_server, server, client| Row { policy, true_of_the_server, server, client };
    let ours = |policy, true_of_the_server, server, writes: fn() -> Writes| {
        let client = Client::Ours { writes, effect: Effect::Write, deadline: DEADLINE };
        Row { policy, true_of_the_server, server, client }
    };
    let idempotent = |policy, true_of_the_server, server, writes: fn() -> Writes| {
        let client = Client::Ours { writes, effect: Effect::Idempotent, deadline: DEADLINE };
        Row { policy, true_of_the_server, server, client }
    };
    let checks = |seconds| Client::Checks(Duration::from_secs(seconds));
    vec![
        by_hand("blind replay", false, server, Client::Blind),
        by_hand("check, replay if absent", false, server, checks(0)),
        by_hand("check on a stale replica (2 s)", false, stale, checks(0)),
        by_hand("quarantine 1 s, check", false, server, checks(1)),
        by_hand("quarantine 5 s, check", false, server, checks(5)),
        by_hand("quarantine 20 s, check", true, server, checks(20)),
        by_hand("quarantine 20 s, check on a stale replica", false, stale, checks(20)),
        by_hand("deadline fence, check", true, fenced, checks(0)),
        by_hand("deadline fence, check on a stale replica", false, Server { lag: LAG, ..fenced }, checks(0)),
        by_hand("idempotency token, no check", true, deduplicates, Client::Blind),
        Row {
            policy: "refuse(), deadline 100 ms",
            true_of_the_server: true,
            server,
            client: Client::Ours { writes: refuse, effect: Effect::Write, deadline: PATIENCE },
        },
        ours("refuse()", true, server, refuse),
        ours("new(check), no fence", true, server, checked),
        ours("quarantine(20 s)", true, server, || checked().quarantine(LONGEST)),
        ours("quarantine(20 s), look_first()", true, server, || checked().quarantine(LONGEST).look_first()),
        ours("quarantine(5 s)", false, server, || checked().quarantine(Duration::from_secs(5))),
        ours("quarantine(1 s)", false, server, || checked().quarantine(Duration::from_secs(1))),
        ours("quarantine(20 s), stale check", false, stale, || checked().quarantine(LONGEST)),
        ours("exit_ends_effects()", true, killed(Killed::EndsEffects), checked),
        ours("exit_ends_effects(), but they go on", false, killed(Killed::EndsNothing), checked),
        ours("not_landed_because(server deadline)", true, fenced, because),
        ours(
            "not_landed_because(server deadline), stale check",
            false,
            Server { lag: LAG, ..fenced },
            because,
        ),
        ours("not_landed_because(server deadline), old server", false, server, because),
        ours("not_landed_conditional()", true, Server { compares: true, ..server }, conditional),
        ours("not_landed_conditional(), nothing is compared", false, server, conditional),
        ours("keyed, honoured_for(60 s)", true, keeps(WINDOW), keyed),
        ours("keyed, honoured_for(60 s), kept for 5 s", false, keeps(SHORT), keyed),
        ours("keyed, honoured_for(60 s), old server", false, server, keyed),
        ours("not_landed_deduplicated(60 s)", true, keeps(WINDOW), deduplicated),
        ours("not_landed_deduplicated(60 s), kept for 5 s", false, keeps(SHORT), deduplicated),
        idempotent("replay_idempotent()", true, Server { sets: true, ..server }, replay_idempotent),
        idempotent("replay_idempotent(), it adds", false, server, replay_idempotent),
    ]
}

fn keeps(window: Duration) -> Server {
    Server { keeps_keys: Some(window), ..Server::default() }
}

fn killed(killed: Killed) -> Server {
    Server { killed: Some(killed), ..Server::default() }
}

// ===== By hand =====

/// One attempt, and whether an answer came in time.
async fn attempt(world: &World) -> bool {
    let terms = Terms { until: Some(Instant::now() + PATIENCE), key: true };
    timeout(PATIENCE, world.write(terms)).await.is_ok_and(|answer| answer.is_ok())
}

async fn replay(world: &World) -> Told {
    if attempt(world).await { Told::Done } else { Told::Unknown }
}

pub(crate) async fn blind(world: &World) -> Told {
    if attempt(world).await { Told::Done } else { replay(world).await }
}

pub(crate) async fn check_then_replay(world: &World, wait: Duration) -> Told {
    if attempt(world).await {
        return Told::Done;
    }
    if !wait.is_zero() {
        sleep(wait).await;
    }
    if world.seen() { Told::Done } else { replay(world).await }
}

// ===== By this crate's layers =====

fn refuse() -> Writes {
    WriteSafetyLayer::refuse()
}

fn checked() -> Writes {
    WriteSafetyLayer::new(look).attempt_timeout(PATIENCE)
}

/// Says by that what is not there.
fn absent_is(not_landed: fn(&InDoubt<Pay, bool>) -> Verdict<bool>) -> Writes {
    let check = move |doubt: InDoubt<Pay, bool>| async move {
        Ok(if is_there(&doubt).await? { doubt.landed(true) } else { not_landed(&doubt) })
    };
    WriteSafetyLayer::new(check).attempt_timeout(PATIENCE)
}

fn because() -> Writes {
    absent_is(|doubt| doubt.not_landed_because("the server ignores it after the attempt's time"))
}

fn conditional() -> Writes {
    absent_is(|doubt| doubt.not_landed_conditional())
}

fn with_keys() -> KeyedWrites<Pay, bool> {
    KeyedWrites::new(|pay: &mut Pay, key| {
        pay.key = Some(key.to_owned());
        true
    })
}

fn keyed() -> Writes {
    refuse().keyed(with_keys().honoured_for(WINDOW)).attempt_timeout(PATIENCE)
}

fn deduplicated() -> Writes {
    absent_is(|doubt| doubt.not_landed_deduplicated(WINDOW)).keyed(with_keys())
}

fn replay_idempotent() -> Writes {
    refuse().replay_idempotent().attempt_timeout(PATIENCE)
}

async fn look(doubt: InDoubt<Pay, bool>) -> Result<Verdict<bool>, BoxError> {
    Ok(if is_there(&doubt).await? { doubt.landed(true) } else { doubt.not_landed() })
}

async fn is_there(doubt: &InDoubt<Pay, bool>) -> Result<bool, CallError> {
    doubt.probe(Pay::new(Arc::clone(&doubt.request().world), Effect::ReadOnly)).await
}

/// The whole stack over the world, and which writes it reports as unknown.
pub(crate) struct Ours {
    stack: Stack<Connector, Pay, bool>,
    effect: Effect,
    reported: Arc<Mutex<Vec<CallId>>>,
}

impl Ours {
    pub(crate) fn new(writes: Writes, effect: Effect, deadline: Duration) -> Self {
        let reported = Arc::<Mutex<Vec<CallId>>>::default();
        let sink = Arc::clone(&reported);
        let stack = Stack::builder(Connector).deadline(deadline).writes(writes).on_event(move |event| {
            let unknown = match event {
                Event::InDoubt(report) if !is_known(report.outcome) => Some(report.call),
                Event::Abandoned(report) => report.call,
                _ => None,
            };
            sink.lock().unwrap().extend(unknown);
        });
        Self { stack: stack.build().unwrap(), effect, reported }
    }

    /// Sends the write: what the caller is told, and how often it was reported as unknown.
    pub(crate) async fn send(&self, world: &Arc<World>) -> (Told, u32) {
        let mut write = Pay::new(Arc::clone(world), self.effect);
        let id = write.context_mut().assign_id();
        let told = match self.stack.send(write).await {
            Ok(_) => Told::Done,
            Err(error) if error.outcome() == Outcome::DoneResultLost => Told::Done,
            Err(error) if error.may_have_landed() => Told::Unknown,
            Err(_) => Told::NotDone,
        };
        let reported = std::mem::take(&mut *self.reported.lock().unwrap());
        // A report of any other call counts too, so that the sums differ.
        let strays = reported.iter().filter(|other| **other != id).count() as u32;
        (told, reported.len() as u32 + strays)
    }
}

fn is_known(outcome: Option<Outcome>) -> bool {
    matches!(outcome, None | Some(Outcome::DoneResultLost | Outcome::NotDone))
}

#[derive(Clone)]
pub(crate) struct Connector;

impl Service<()> for Connector {
    type Response = Connection;
    type Error = BoxError;
    type Future = std::future::Ready<Result<Connection, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        std::future::ready(Ok(Connection))
    }
}

#[derive(Clone)]
pub(crate) struct Connection;

impl Service<Pay> for Connection {
    type Response = bool;
    type Error = CallError;
    type Future = Pin<Box<dyn Future<Output = Result<bool, CallError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Pay) -> Self::Future {
        let Pay { world, effect, key, context } = request;
        if effect == Effect::ReadOnly {
            return Box::pin(std::future::ready(Ok(world.seen())));
        }
        let until = context.attempt_until().or(context.deadline().instant());
        Box::pin(async move {
            let write = world.write(Terms { until, key: key.is_some() });
            if world.server().killed.is_none() {
                return write.await.map(|()| true).map_err(CallError::answered);
            }
            match timeout(PATIENCE, write).await {
                Ok(answer) => answer.map(|()| true).map_err(CallError::answered),
                // Somebody watches over it, and kills it where it seems to hang.
                Err(_) => {
                    let gone = world.kill();
                    let exit = async move {
                        sleep_until(gone).await;
                        Exit::new(None, true)
                    };
                    Err(CallError::closed("killed").with_exit(exit).exit_ends_effects())
                }
            }
        })
    }
}
