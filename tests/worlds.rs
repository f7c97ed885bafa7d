//! Random options of write safety over a service in memory, in which every declaration is true: what callers, events and
//! the ledger say must be so, no write lands twice, and none is overwritten by a replay.
//!
//! The simulator (`tests/simulation`) has the real stack, processes and wires, and wants to be optimized. This has less
//! of a world and more of the layer, and runs with the other tests: nested layers, gateways whose connections are whole
//! stacks, several stacks with one ledger, a ledger elsewhere that fails, hangs, or has done what it failed at, checks that
//! panic, connections that mark nothing or are dead when they come, callers that leave after any poll.
//! What is declared falsely must be found out.
//!
//! - `GOAROUND_WORLDS=n` flies n seeds, 2,000 by default; `GOAROUND_FROM=s` begins with that seed.

use std::{
    collections::HashMap,
    future::{Future, pending},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use goaround::{
    Activity, BoxError, Call, CallError, DeadlineLayer, Effect, Event, Evidence, Exit, InDoubt, Outcome,
    ReconnectLayer, RetryReadOnly, Tagged, Verdict, WriteSafetyLayer,
    write_safety::{
        KeyedAnswer, KeyedWrites,
        ledger::{self, Entry, EntryId, Ledger, LedgerError, MemoryLedger},
    },
};
use tokio::{
    sync::Notify,
    time::{Instant, sleep, sleep_until},
};
use tower::{Layer, Service, ServiceExt, util::BoxCloneService};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[derive(Clone, Debug)]
struct Put {
    token: u32,
    key: Option<String>,
}

type Req = Tagged<Put>;
type Checked = Pin<Box<dyn Future<Output = Result<Verdict<u32>, BoxError>> + Send>>;
type Answer = Pin<Box<dyn Future<Output = Result<u32, CallError>> + Send>>;

/// What is not so, to see whether that is noticed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// A write lands after its quarantine.
    Late,
    /// A write lands after the end of its process, which was said to end its effects.
    Outlives,
    /// Two stacks write to the same things, and each has a ledger of its own.
    Apart,
}

#[derive(Clone, Debug, Default)]
struct Plan {
    lie: Option<Lie>,
    quarantine: Option<u64>,
    attempt_timeout: Option<u64>,
    check: bool,
    look: bool,
    trust: Vec<Evidence>,
    keyed: bool,
    idempotent: bool,
    landed_with: bool,
    conflict: u32, // 0 none, 1 key, 2 independent
    marks: bool,
    reconnect: bool,
    ends: bool,
    max_checks: usize,
    deadline: u64,
    writes: u32,
    store: bool,
    store_fails: u32,
    stacks: u32, // 2: the writes of one key go over two, which have one ledger
    nest: u32,   // 1: refuse() around it, 2: one with the same check around it, 3: retries around it
    /// What is around all that, from the inside out.
    around: Vec<Around>,
    /// How many of a hundred connections are closed when they come.
    dead: u32,
    leaves_after_polls: bool,
}

#[derive(Clone, Copy, Debug)]
enum Around {
    Refuses,
    RefusesInTime,
    Retries,
    /// Its connections are what is within.
    Gateway,
}

#[derive(Default)]
struct State {
    /// Of each write: how many copies have begun to take effect, and how many are done.
    begun: HashMap<u32, u32>,
    done: HashMap<u32, u32>,
    /// Copies that have arrived and are at work, or will be.
    at_work: HashMap<u32, u32>,
    keys: HashMap<String, u32>,
    log: Vec<String>,
    order: Vec<Passed>,
}

/// What became of a write, in the order in which it did.
#[derive(Clone, Copy, PartialEq)]
enum Passed {
    HandedOver(u32),
    /// To a server, to its last byte.
    Sent(u32),
}

impl State {
    /// Which other write a replay of that one was handed over on top of, among those that touch it.
    fn overwritten_by(&self, token: u32, touches: impl Fn(u32) -> bool) -> Option<u32> {
        let sent = self.order.iter().position(|passed| *passed == Passed::Sent(token))?;
        let replayed = self.order.iter().rposition(|passed| *passed == Passed::HandedOver(token))?;
        self.order.get(sent..replayed)?.iter().find_map(|passed| match *passed {
            Passed::HandedOver(other) if other != token && touches(other) => Some(other),
            _ => None,
        })
    }
}

#[derive(Clone)]
struct World {
    plan: Arc<Plan>,
    rng: Arc<Mutex<fastrand::Rng>>,
    state: Arc<Mutex<State>>,
    start: Instant,
    live: Arc<Mutex<Arc<Conn>>>,
    conns: Arc<AtomicU64>,
}

#[derive(Default)]
struct Conn {
    number: u64,
    closed: AtomicBool,
    gone: AtomicBool,
    told: Notify,
}

impl World {
    fn log(&self, what: String) {
        let at = self.start.elapsed().as_millis();
        self.state.lock().unwrap().log.push(format!("{at} {what}"));
    }
    fn chance(&self, percent: u32) -> bool {
        self.rng.lock().unwrap().u32(0..100) < percent
    }
    fn pick(&self, n: u32) -> u32 {
        self.rng.lock().unwrap().u32(0..n)
    }
    fn wait(&self, most: u64) -> Duration {
        let mut rng = self.rng.lock().unwrap();
        if rng.u32(0..4) == 0 { Duration::ZERO } else { ms(rng.u64(0..=most)) }
    }
    fn connection(&self) -> Connection {
        let number = self.conns.fetch_add(1, Ordering::Relaxed) + 1;
        let conn = Arc::new(Conn { number, ..Conn::default() });
        *self.live.lock().unwrap() = conn.clone();
        Connection(self.clone(), conn)
    }
    fn close(&self, conn: &Arc<Conn>) {
        if conn.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.log(format!("connection {} closes", conn.number));
        conn.told.notify_waiters();
        let (conn, world) = (conn.clone(), self.clone());
        let lives_on = self.wait(3000);
        tokio::spawn(async move {
            sleep(lives_on).await;
            if world.plan.ends {
                conn.gone.store(true, Ordering::SeqCst);
                world.log(format!("process {} is gone", conn.number));
                conn.told.notify_waiters();
            }
        });
    }
}

async fn until(flag: &AtomicBool, conn: &Conn) {
    loop {
        let told = conn.told.notified();
        if flag.load(Ordering::SeqCst) {
            return;
        }
        told.await;
    }
}

fn closed(world: &World, conn: &Arc<Conn>) -> CallError {
    let error = CallError::closed("closed");
    if !world.plan.ends {
        return error;
    }
    let conn = conn.clone();
    let error = error.with_exit(async move {
        until(&conn.gone, &conn).await;
        Exit::new(None, true)
    });
    error.exit_ends_effects()
}

#[derive(Clone)]
struct Connection(World, Arc<Conn>);

#[derive(Clone)]
struct Connector(World);

impl Service<()> for Connector {
    type Response = Connection;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Connection, BoxError>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, (): ()) -> Self::Future {
        let world = self.0.clone();
        Box::pin(async move {
            sleep(world.wait(1500)).await;
            if world.chance(8) {
                return Err("no".into());
            }
            let connection = world.connection();
            if world.chance(world.plan.dead) {
                world.close(&connection.1);
            }
            Ok(connection)
        })
    }
}

type Boxed = BoxCloneService<Req, u32, CallError>;

#[derive(Clone)]
struct Gateway(World, Arc<Mutex<Boxed>>);

impl Service<()> for Gateway {
    type Response = Boxed;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Boxed, BoxError>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, (): ()) -> Self::Future {
        let (world, within) = (self.0.clone(), self.1.lock().unwrap().clone());
        Box::pin(async move {
            sleep(world.wait(1500)).await;
            Ok(within)
        })
    }
}

/// Of a caller that leaves after so many polls.
struct Leaves<F>(Option<Pin<Box<F>>>, u32);

impl<F: Future> Future for Leaves<F> {
    type Output = Option<F::Output>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let left = self.1;
        self.1 = left.saturating_sub(1);
        let polled = self.0.as_mut().map(|call| call.as_mut().poll(cx));
        match polled {
            Some(Poll::Ready(result)) => Poll::Ready(Some(result)),
            Some(Poll::Pending) if left > 0 => Poll::Pending,
            _ => {
                self.0 = None;
                Poll::Ready(None)
            }
        }
    }
}

impl Service<Req> for Connection {
    type Response = u32;
    type Error = CallError;
    type Future = Answer;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        if self.1.closed.load(Ordering::SeqCst) && self.0.plan.reconnect {
            return Poll::Ready(Err(CallError::closed("closed before")));
        }
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, request: Req) -> Answer {
        let (world, conn) = (self.0.clone(), self.1.clone());
        match request.effect().is_write() {
            true => Box::pin(write(world, conn, request)),
            false => Box::pin(read(world, conn, request.token)),
        }
    }
}

async fn read(world: World, conn: Arc<Conn>, token: u32) -> Result<u32, CallError> {
    if !world.plan.reconnect || !conn.closed.load(Ordering::SeqCst) {
        sleep(world.wait(400)).await;
        match world.pick(20) {
            0 => return Err(CallError::ambiguous("reset")),
            1 => pending::<()>().await,
            _ => {}
        }
        if world.plan.reconnect && conn.closed.load(Ordering::SeqCst) {
            return Err(closed(&world, &conn));
        }
        let state = world.state.lock().unwrap();
        let get = |map: &HashMap<u32, u32>| map.get(&token).copied().unwrap_or_default();
        let (begun, done, work) = (get(&state.begun), get(&state.done), get(&state.at_work));
        return Ok(if done > 0 {
            3
        } else if begun > 0 {
            2
        } else if work > 0 {
            1
        } else {
            0
        });
    }
    Err(closed(&world, &conn))
}

struct Frame {
    taken: Mutex<Option<bool>>, // Some(true) taken, Some(false) withdrawn
    activity: Option<Arc<Activity>>,
    queues: bool,
}

impl Frame {
    fn withdraw(&self) -> bool {
        let mut taken = self.taken.lock().unwrap();
        if !self.queues {
            return false;
        }
        if taken.is_none() {
            *taken = Some(false);
            if let Some(activity) = &self.activity {
                activity.withdrawn();
            }
        }
        *taken == Some(false)
    }
}

struct OnDrop(Arc<Frame>);
impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fate {
    NeverSeen,
    Lands,
    LandsInParts,
    Busy429,
    Busy503,
    Lying503,
    Error,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Reply {
    Given,
    Lost,
    Reset,
    Closes,
}

async fn write(world: World, conn: Arc<Conn>, request: Req) -> Result<u32, CallError> {
    let token = request.token;
    let plan = world.plan.clone();
    let activity = request.context().activity().cloned().filter(|_| plan.marks);
    if let Some(activity) = &activity
        && !activity.adopt()
    {
        return Err(CallError::not_sent("over"));
    }
    if conn.closed.load(Ordering::SeqCst) && plan.reconnect {
        return Err(CallError::not_sent("closed").connection_lost());
    }
    let (until_at, deadline) = (request.context().attempt_until(), request.context().deadline().instant());
    let frame = Arc::new(Frame { taken: Mutex::new(None), activity, queues: plan.marks });
    let _guard = OnDrop(frame.clone());
    world.log(format!("write {token} handed over to {}", conn.number));
    if !frame.queues {
        world.state.lock().unwrap().order.push(Passed::Sent(token));
    }
    let (reply, replied) = tokio::sync::oneshot::channel();
    tokio::spawn(wire(world.clone(), conn.clone(), token, request.key.clone(), frame.clone(), reply));
    let give_up = async {
        if let Some(at) = until_at {
            sleep_until(at).await;
            if frame.withdraw() {
                return;
            }
        }
        match deadline {
            Some(at) => {
                sleep_until(at).await;
                if !frame.withdraw() {
                    pending::<()>().await;
                }
            }
            None => pending().await,
        }
    };
    let gone = async {
        match plan.reconnect {
            true => until(&conn.closed, &conn).await,
            false => pending().await,
        }
    };
    tokio::select! {
        biased;
        Ok(reply) = replied => reply,
        () = gone => Err(match frame.withdraw() {
            true => CallError::not_sent("queued").connection_lost(),
            false => closed(&world, &conn),
        }),
        () = give_up => Err(CallError::not_sent("queued")),
        else => pending().await,
    }
}

async fn wire(
    world: World,
    conn: Arc<Conn>,
    token: u32,
    key: Option<String>,
    frame: Arc<Frame>,
    reply: tokio::sync::oneshot::Sender<Result<u32, CallError>>,
) {
    let plan = world.plan.clone();
    if frame.queues {
        if world.chance(25) {
            sleep(world.wait(4000)).await;
        }
        {
            let mut taken = frame.taken.lock().unwrap();
            if *taken == Some(false) || (conn.closed.load(Ordering::SeqCst) && plan.reconnect) {
                return;
            }
            *taken = Some(true);
        }
        if world.chance(15) {
            sleep(world.wait(4000)).await;
            if conn.closed.load(Ordering::SeqCst) && plan.reconnect {
                return; // cut
            }
        }
        world.state.lock().unwrap().order.push(Passed::Sent(token));
        frame.activity.as_ref().inspect(|activity| activity.sent());
    }
    let sent = Instant::now();
    let fate = match world.pick(12) {
        0 | 1 => Fate::NeverSeen,
        2..6 => Fate::Lands,
        6 => Fate::LandsInParts,
        7 => Fate::Busy429,
        8 => Fate::Busy503,
        9 if !plan.trust.contains(&Evidence::Unavailable) => Fate::Lying503,
        10 => Fate::Error,
        _ => Fate::Lands,
    };
    let answer = match world.pick(8) {
        0..4 => Reply::Given,
        4 => Reply::Lost,
        5 => Reply::Reset,
        _ => Reply::Closes,
    };
    // By the quarantine everything has landed; it counts from the last byte, or, unmarked, from the attempt's end.
    let most = plan.quarantine.map_or(6000, |quarantine| quarantine.saturating_sub(1));
    let most = if plan.lie == Some(Lie::Late) { most * 4 } else { most };
    let lands_at = sent + world.wait(most);
    world.log(format!("write {token}: {fate:?} at {:?}, {answer:?}", lands_at.duration_since(world.start)));
    let dies = || async {
        match plan.lie {
            Some(Lie::Outlives) => pending().await,
            _ => until(&conn.gone, &conn).await,
        }
    };
    let mut result: Result<u32, CallError> = Ok(token);
    let applies = matches!(fate, Fate::Lands | Fate::LandsInParts | Fate::Lying503);
    if applies {
        *world.state.lock().unwrap().at_work.entry(token).or_default() += 1;
        let work = async {
            let half = lands_at.duration_since(sent) / 2;
            if fate == Fate::LandsInParts {
                sleep(half).await;
            } else {
                sleep_until(lands_at).await;
            }
            {
                let mut state = world.state.lock().unwrap();
                if let Some(key) = &key {
                    let copies = state.keys.entry(key.clone()).or_default();
                    *copies += 1;
                    if *copies > 1 {
                        let done = state.done.get(&token).is_some_and(|done| *done > 0);
                        return Some(if done { "exists" } else { "in flight" });
                    }
                }
                *state.begun.entry(token).or_default() += 1;
            }
            world.log(format!("write {token} begins to land"));
            if fate == Fate::LandsInParts {
                sleep_until(lands_at).await;
                if world.chance(50) {
                    pending::<()>().await; // for ever in parts
                }
            }
            *world.state.lock().unwrap().done.entry(token).or_default() += 1;
            world.log(format!("write {token} has landed"));
            None
        };
        let early = async {
            if answer != Reply::Given && world.chance(50) {
                sleep(world.wait(2000)).await;
            } else {
                pending::<()>().await;
            }
        };
        let mut work = Box::pin(work);
        let mut reply = Some(reply);
        let said = tokio::select! {
            biased;
            () = dies() => { *world.state.lock().unwrap().at_work.entry(token).or_default() -= 1; return }
            said = &mut work => said,
            () = early => {
                // The reply is lost before it lands.
                lose(&world, &conn, answer, &mut reply);
                tokio::select! {
                    biased;
                    () = dies() => { *world.state.lock().unwrap().at_work.entry(token).or_default() -= 1; return }
                    said = &mut work => said,
                }
            }
        };
        *world.state.lock().unwrap().at_work.entry(token).or_default() -= 1;
        match said {
            Some(said) => result = Err(CallError::answered(said)),
            None if fate == Fate::Lying503 => result = Err(CallError::evidence(Evidence::Unavailable, "503")),
            None => {}
        }
        sleep(world.wait(1500)).await;
        let Some(reply) = reply else { return };
        let mut reply = Some(reply);
        match answer {
            Reply::Given => drop(reply.take().unwrap().send(result)),
            answer => lose(&world, &conn, answer, &mut reply),
        }
        if reply.is_some() || answer == Reply::Lost {
            pending::<()>().await;
        }
        return;
    }
    sleep(world.wait(1500)).await;
    let mut reply = Some(reply);
    let after = world.wait(2000);
    match fate {
        Fate::NeverSeen => {
            lose(&world, &conn, if answer == Reply::Given { Reply::Lost } else { answer }, &mut reply)
        }
        Fate::Busy429 => {
            let error = CallError::evidence(Evidence::TooManyRequests, "429").after(after);
            let _ = reply.take().unwrap().send(Err(error));
        }
        Fate::Busy503 => {
            let _ = reply
                .take()
                .unwrap()
                .send(Err(CallError::evidence(Evidence::Unavailable, "503").after(after)));
        }
        Fate::Error => {
            let _ = reply.take().unwrap().send(Err(CallError::answered("quota")));
        }
        _ => unreachable!(),
    }
    if reply.is_some() {
        pending::<()>().await;
    }
}

fn lose(
    world: &World,
    conn: &Arc<Conn>,
    how: Reply,
    reply: &mut Option<tokio::sync::oneshot::Sender<Result<u32, CallError>>>,
) {
    match how {
        Reply::Reset => {
            if let Some(reply) = reply.take() {
                let _ = reply.send(Err(CallError::ambiguous("reset")));
            }
        }
        Reply::Closes if world.plan.reconnect => world.close(conn),
        Reply::Closes => {
            if let Some(reply) = reply.take() {
                let _ = reply.send(Err(CallError::ambiguous("cut")));
            }
        }
        Reply::Given | Reply::Lost => {}
    }
}

const CHECK_PANICS: &str = "a check panics";

fn check(world: World) -> impl Fn(InDoubt<Req, u32>) -> Checked + Send + Sync {
    move |doubt| {
        let world = world.clone();
        Box::pin(async move {
            match world.pick(30) {
                0 => return Err("it fails".into()),
                1 => pending::<()>().await,
                2 => std::panic::panic_any(CHECK_PANICS),
                _ => {}
            }
            let token = doubt.request().token;
            let probe = Tagged::new(Put { token, key: None }, Effect::ReadOnly);
            let found = doubt.probe(probe).await?;
            world.log(format!("check of {token} finds {found}, fence {:?}", doubt.fence()));
            Ok(match found {
                3 if world.chance(50) => doubt.landed(token),
                3 => doubt.landed_without_result(),
                2 => doubt.partial(),
                1 if world.chance(30) => doubt.in_flight(ms(300)),
                _ if world.plan.keyed && world.chance(30) => doubt.not_landed_deduplicated(ms(1_000_000)),
                _ => doubt.not_landed(),
            })
        })
    }
}

/// A table elsewhere, which is slow and fails at times, also after it has done what it was asked.
#[derive(Clone)]
struct Store {
    world: World,
    table: Arc<Mutex<HashMap<EntryId, Entry>>>,
}

impl Store {
    async fn step<T>(&self, act: impl FnOnce() -> Result<T, LedgerError>) -> Result<T, LedgerError> {
        let fails = self.world.plan.store_fails;
        let lost = || LedgerError::Unavailable("lost".into());
        sleep(self.world.wait(300)).await;
        if self.world.chance(fails) {
            match self.world.pick(4) {
                0 => pending::<()>().await,
                _ => return Err(lost()),
            }
        }
        let done = act();
        sleep(self.world.wait(300)).await;
        if self.world.chance(fails) {
            match self.world.pick(4) {
                0 => pending::<()>().await,
                _ => return Err(lost()),
            }
        }
        done
    }

    fn change(
        &self,
        id: EntryId,
        act: impl FnOnce(&mut Entry) -> Result<u64, LedgerError>,
    ) -> Result<u64, LedgerError> {
        act(self.table.lock().unwrap().get_mut(&id).ok_or(LedgerError::Conflict(id))?)
    }
}

impl Ledger for Store {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        self.step(|| {
            let mut table = self.table.lock().unwrap();
            if table.contains_key(&entry.id) {
                return Err(LedgerError::Conflict(entry.id));
            }
            let held = table.values().find(|held| {
                held.key.is_some()
                    && held.key == entry.key
                    && matches!(held.state, ledger::State::InDoubt { .. })
            });
            if let Some(held) = held {
                return Err(LedgerError::KeyInDoubt { id: held.id, method: held.method.clone() });
            }
            let revision = entry.revision;
            table.insert(entry.id, entry.clone());
            Ok(revision)
        })
        .await
    }
    async fn settle(&self, id: EntryId, revision: u64, state: ledger::State) -> Result<u64, LedgerError> {
        self.step(|| self.change(id, |entry| entry.settle(revision, state, SystemTime::now()))).await
    }
    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.step(|| self.change(id, |entry| entry.claim(revision, SystemTime::now()))).await
    }
    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        Ok(self.table.lock().unwrap().values().filter(|entry| !entry.state.is_closed()).cloned().collect())
    }
    async fn forget(&self, _: EntryId, _: &str) -> Result<(), LedgerError> {
        Ok(())
    }
    fn abandon(&self, id: EntryId, state: ledger::State) {
        if !self.world.chance(self.world.plan.store_fails) {
            let _ = self.change(id, |entry| match entry.state {
                ledger::State::Open => entry.settle(entry.revision, state, SystemTime::now()),
                _ => Err(LedgerError::Conflict(id)),
            });
        }
    }
}

#[derive(Default, Debug, Clone)]
struct Reports {
    doubts: HashMap<String, u32>,
    abandoned: HashMap<String, u32>,
}

fn around(rng: &mut fastrand::Rng) -> Around {
    match rng.u32(0..4) {
        0 => Around::Refuses,
        1 => Around::RefusesInTime,
        2 => Around::Retries,
        _ => Around::Gateway,
    }
}

fn plan(rng: &mut fastrand::Rng, lie: Option<Lie>) -> Plan {
    let check = rng.u32(0..100) < 75;
    let quarantine = (check && rng.u32(0..100) < 55).then(|| rng.u64(200..6000));
    let mut trust = Vec::new();
    if rng.u32(0..3) == 0 {
        trust.push(Evidence::TooManyRequests);
    }
    if rng.u32(0..4) == 0 {
        trust.push(Evidence::Unavailable);
    }
    let marks = rng.bool();
    let conflict = rng.u32(0..3);
    let around: Vec<_> = match rng.u32(0..3) {
        0 => (0..rng.u32(1..4)).map(|_| around(rng)).collect(),
        _ => Vec::new(),
    };
    // What a dead connection gives back, a gateway has next.
    let dead = match around.iter().any(|around| matches!(around, Around::Gateway)) {
        true => rng.u32(0..90),
        false => rng.u32(0..120).saturating_sub(80),
    };
    Plan {
        lie,
        quarantine,
        attempt_timeout: (rng.u32(0..100) < 70).then(|| rng.u64(50..6000)),
        check,
        look: check && rng.bool(),
        trust,
        keyed: rng.u32(0..100) < 25,
        idempotent: rng.u32(0..100) < 15,
        landed_with: rng.bool(),
        conflict,
        marks,
        reconnect: rng.bool(),
        ends: rng.bool(),
        max_checks: rng.usize(1..3),
        deadline: rng.u64(200..20_000),
        writes: rng.u32(1..6),
        store: rng.bool(),
        store_fails: if rng.bool() { 0 } else { rng.u32(0..30) },
        stacks: if conflict == 1 { rng.u32(1..3) } else { 1 },
        nest: if rng.bool() { rng.u32(0..4) } else { 0 },
        around,
        dead,
        leaves_after_polls: rng.u32(0..4) == 0,
    }
}

async fn fly(seed: u64, lie: Option<Lie>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let plan = plan(&mut rng, lie);
    // An unmarked connection counts its quarantine from the attempt timeout, which is no earlier than its bytes here.
    let world = World {
        plan: Arc::new(plan.clone()),
        rng: Arc::new(Mutex::new(rng)),
        state: Arc::default(),
        start: Instant::now(),
        live: Arc::new(Mutex::new(Arc::default())),
        conns: Arc::default(),
    };
    let reports: Arc<Mutex<Reports>> = Arc::default();
    let seen = reports.clone();
    let sink = move |event: Event<'_>| {
        let mut seen = seen.lock().unwrap();
        match event {
            Event::InDoubt(report) => *seen.doubts.entry(report.method.clone()).or_default() += 1,
            Event::Abandoned(report) => *seen.abandoned.entry(report.method.clone()).or_default() += 1,
            _ => {}
        }
    };
    let mut layer = match plan.check {
        true => WriteSafetyLayer::new(check(world.clone())),
        false => WriteSafetyLayer::refuse(),
    };
    if let Some(quarantine) = plan.quarantine {
        layer = layer.quarantine(ms(quarantine));
    }
    if let Some(timeout) = plan.attempt_timeout {
        layer = layer.attempt_timeout(ms(timeout));
    }
    if plan.look {
        layer = layer.look_first();
    }
    for &evidence in &plan.trust {
        layer = layer.trust(evidence);
    }
    if plan.keyed {
        let keyed = KeyedWrites::new(|request: &mut Req, key: &str| {
            request.get_mut().key = Some(key.to_owned());
            true
        });
        let keyed = keyed.honoured_for(ms(1_000_000)).answers(|answer: Result<&u32, &CallError>| {
            let said = std::error::Error::source(answer.err()?)?.to_string();
            match said.as_str() {
                "exists" => Some(KeyedAnswer::Landed(None)),
                "in flight" => Some(KeyedAnswer::InFlight { recheck_after: ms(500) }),
                _ => None,
            }
        });
        layer = layer.keyed(keyed);
    }
    if plan.idempotent {
        layer = layer.replay_idempotent();
    }
    if plan.landed_with {
        layer = layer.landed_with(|request: &Req| request.token);
    }
    layer = match plan.conflict {
        0 => layer,
        1 => layer.conflict_key(|request: &Req| Some(request.token % 2)),
        _ => layer.independent_writes(),
    };
    let ledger = MemoryLedger::new();
    let layer = layer.max_checks(plan.max_checks);
    let store = Store { world: world.clone(), table: Arc::default() };
    let layer = if plan.store { layer.ledger(store.clone()) } else { layer.ledger(ledger.clone()) };
    let below: Boxed = match plan.reconnect {
        true => {
            BoxCloneService::new(RetryReadOnly.layer(ReconnectLayer::once().layer(Connector(world.clone()))))
        }
        false => BoxCloneService::new(RetryReadOnly.layer(world.connection())),
    };
    let notes = world.clone();
    let below = below.map_request(move |request: Req| {
        if request.effect().is_write() {
            notes.state.lock().unwrap().order.push(Passed::HandedOver(request.token));
        }
        request
    });
    let stacks: Vec<_> = (0..plan.stacks)
        .map(|number| {
            let layer = match lie {
                Some(Lie::Apart) if number > 0 => layer.clone().ledger(MemoryLedger::new()),
                _ => layer.clone(),
            };
            let inner = layer.layer(below.clone());
            let inner: Boxed = match plan.nest {
                0 => BoxCloneService::new(inner),
                1 => BoxCloneService::new(WriteSafetyLayer::refuse().ledger(ledger.clone()).layer(inner)),
                2 => BoxCloneService::new(layer.layer(RetryReadOnly.layer(inner))),
                _ => BoxCloneService::new(RetryReadOnly.attempt_timeout(ms(700)).layer(inner)),
            };
            let inner = plan.around.iter().fold(inner, |within, around| match around {
                Around::Refuses => BoxCloneService::new(WriteSafetyLayer::refuse().layer(within)),
                Around::RefusesInTime => {
                    let layer = WriteSafetyLayer::refuse().attempt_timeout(world.wait(3000) + ms(1));
                    BoxCloneService::new(layer.layer(within))
                }
                Around::Retries => BoxCloneService::new(RetryReadOnly.attempt_timeout(ms(700)).layer(within)),
                Around::Gateway => {
                    let gateway = Gateway(world.clone(), Arc::new(Mutex::new(within)));
                    BoxCloneService::new(ReconnectLayer::once().layer(gateway))
                }
            });
            let deadline = DeadlineLayer::new(ms(plan.deadline)).on_event(sink.clone());
            BoxCloneService::new(deadline.layer(inner))
        })
        .collect();
    let mut calls = Vec::new();
    for token in 0..plan.writes {
        let effect = if plan.idempotent { Effect::Idempotent } else { Effect::Write };
        let request = Tagged::new(Put { token, key: None }, effect).named(format!("{token}"));
        let (service, world) = (stacks[(token / 2 % plan.stacks) as usize].clone(), world.clone());
        let (begin, drop_at) = (world.wait(3000), world.chance(15).then(|| world.wait(plan.deadline)));
        let limit = plan.deadline;
        let leaves = (plan.leaves_after_polls && world.chance(40)).then(|| world.pick(12));
        calls.push(tokio::spawn(async move {
            sleep(begin).await;
            let start = Instant::now();
            let call = service.oneshot(request);
            let told = match (leaves, drop_at) {
                (Some(polls), _) => Leaves(Some(Box::pin(call)), polls).await,
                (None, Some(at)) => tokio::time::timeout(at, call).await.ok(),
                (None, None) => Some(call.await),
            };
            world.log(format!(
                "write {token} told {:?}",
                told.as_ref().map(|told| told.as_ref().map_err(|e| e.to_string()))
            ));
            let late = start.elapsed() > ms(limit + 1);
            let now = world.state.lock().unwrap().done.get(&token).copied().unwrap_or_default();
            (told, late, now)
        }));
    }
    let mut ends = Vec::new();
    for call in calls {
        ends.push(call.await.map_err(|error| format!("a panic: {error}"))?);
    }
    sleep(ms(100_000)).await;
    let left = ledger.in_doubt().await.unwrap();
    let table = store.table.lock().unwrap().clone();
    let state = world.state.lock().unwrap();
    let wrong = |token: u32, what: String| {
        Err(format!("seed {seed} write {token}: {what}\n{plan:#?}\n{}", state.log.join("\n")))
    };
    let reports = reports.lock().unwrap().clone();
    for (token, (told, late, then)) in ends.iter().enumerate() {
        let token = token as u32;
        let begun = state.begun.get(&token).copied().unwrap_or_default();
        let name = token.to_string();
        let doubts = reports.doubts.get(&name).copied().unwrap_or_default();
        let abandoned = reports.abandoned.get(&name).copied().unwrap_or_default();
        let listed = left.iter().any(|entry| entry.method == name);
        if plan.store && plan.around.is_empty() {
            let entry = table.values().find(|entry| entry.method == name).map(|entry| entry.state.clone());
            let lie = match (&entry, told) {
                (Some(ledger::State::NotLanded { .. }), Some(Ok(_))) => true,
                (Some(ledger::State::NotLanded { .. }), _) if begun > 0 => true,
                (Some(ledger::State::Landed { .. }), _) if begun == 0 => true,
                (None, _) if begun > 0 => true,
                (Some(state), Some(Err(error))) if error.outcome() == Outcome::Unknown => state.is_closed(),
                _ => false,
            };
            if lie {
                return wrong(token, format!("the store says {entry:?}, and the caller was told {told:?}"));
            }
        }
        if *late {
            return wrong(token, "late".into());
        }
        let touches = |other: u32| match plan.conflict {
            0 => true,
            1 => token % 2 == other % 2,
            _ => false,
        };
        if let Some(other) = state.overwritten_by(token, touches) {
            return wrong(token, format!("replayed on top of {other}"));
        }
        if begun > 1 && !plan.idempotent {
            return wrong(token, format!("{begun} copies"));
        }
        if doubts + abandoned > 1 {
            return wrong(token, format!("reported {doubts}+{abandoned} times"));
        }
        match told {
            None => {
                if begun > 0 && doubts + abandoned == 0 {
                    return wrong(token, "dropped, landed and not reported".into());
                }
                if (abandoned > 0) != listed && doubts == 0 && !plan.store && plan.around.is_empty() {
                    return wrong(token, "abandoned and not in the ledger, or the other way round".into());
                }
            }
            Some(Ok(_)) if *then == 0 => return wrong(token, "Ok and not there".into()),
            Some(Ok(_)) if listed && plan.around.is_empty() => {
                return wrong(token, "Ok and in the ledger".into());
            }
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                let outcome = error.outcome();
                match outcome {
                    Outcome::NotDone if begun > 0 => return wrong(token, format!("{error}: not so")),
                    Outcome::DoneResultLost if *then == 0 => return wrong(token, format!("{error}: not so")),
                    Outcome::NoAnswer => return wrong(token, format!("{error}: of a write")),
                    _ => {}
                }
                let unknown =
                    outcome == Outcome::Unknown || (outcome == Outcome::Answered && error.may_have_landed());
                if unknown && doubts != 1 {
                    return wrong(token, format!("{error}: not reported"));
                }
                if unknown != listed && !plan.store && plan.around.is_empty() {
                    return wrong(token, format!("{error}: ledger says {listed}"));
                }
                if outcome == Outcome::Answered && !error.may_have_landed() && begun > 0 {
                    return wrong(token, format!("{error}: and it has landed"));
                }
            }
        }
    }
    Ok(())
}

/// Flies those seeds, until so many are wrong.
fn fly_all(seeds: std::ops::Range<u64>, lie: Option<Lie>, most: usize) -> Vec<String> {
    let wrong = seeds.filter_map(|seed| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(fly(seed, lie)).err()
    });
    wrong.take(most).collect()
}

/// Checks of these worlds panic now and then, which is no news.
fn without_their_panics() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    ONCE.call_once(|| {
        let others = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            if panic.payload().downcast_ref::<&str>() != Some(&CHECK_PANICS) {
                others(panic);
            }
        }));
    });
}

fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |value| value.parse().unwrap())
}

#[test]
fn whatever_the_options_are_nothing_lands_twice_and_what_is_said_is_so() {
    without_their_panics();
    let first = number("GOAROUND_FROM", 0);
    let found = fly_all(first..first + number("GOAROUND_WORLDS", 2_000), None, 3);
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}

#[test]
fn what_is_declared_falsely_is_found_out() {
    without_their_panics();
    for (lie, words) in [(Lie::Late, "copies"), (Lie::Outlives, "copies"), (Lie::Apart, "replayed on top of")]
    {
        let found = fly_all(0..2_000, Some(lie), 20);
        assert!(found.iter().any(|what| what.contains(words)), "{lie:?}: {found:?}");
    }
}
