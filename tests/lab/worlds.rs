//! What the random worlds have in common: options of write safety that are drawn, a service in memory of which each of them
//! is true, connections whose frames can be withdrawn until they are taken, and what must be so of all that a caller is told.
//! It is included beside the lab itself, by a test that says how long a millisecond is there.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    collections::HashMap,
    error::Error,
    future::{Future, pending, poll_fn},
    ops::Range,
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::{Duration, SystemTime},
};

use goaround::{
    Activity, BoxError, Call, CallError, Effect, Event, Evidence, Exit, InDoubt, Outcome, ReconnectLayer,
    RetryReadOnly, Tagged, Verdict, WriteSafetyLayer,
    write_safety::{
        KeyedAnswer, KeyedWrites,
        ledger::{self, Entry, EntryId, Ledger, LedgerError, MemoryLedger},
    },
};
use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};

use crate::{lab::unavailable, ms};

/// A write of that number; or a read of what became of it.
#[derive(Clone, Debug)]
pub struct Put {
    pub token: u32,
    pub key: Option<String>,
}

pub type Req = Tagged<Put>;
pub type Told = Result<u32, CallError>;
pub type Answer = Pin<Box<dyn Future<Output = Told> + Send>>;
pub type Checked = Pin<Box<dyn Future<Output = Result<Verdict<u32>, BoxError>> + Send>>;
pub type Boxed = BoxCloneService<Req, u32, CallError>;
pub type Sender = oneshot::Sender<Told>;

pub fn request(token: u32, effect: Effect) -> Req {
    Tagged::new(Put { token, key: None }, effect).named(token.to_string())
}

// ===== What is declared, and true unless it says otherwise =====

#[derive(Clone, Debug)]
pub struct Options {
    pub quarantine: Option<u64>,
    pub attempt_timeout: Option<u64>,
    pub check: bool,
    pub look: bool,
    pub trust: Vec<Evidence>,
    pub keyed: bool,
    pub idempotent: bool,
    pub landed_with: bool,
    /// 0 none, 1 key, 2 independent.
    pub conflict: u32,
    pub keys: u32,
    pub max_checks: usize,
    pub deadline: u64,
    /// By when all are called.
    pub begin: u64,
    pub marks: bool,
    pub reconnect: bool,
    /// How many of a hundred connections are closed when they come.
    pub dead: u32,
    pub ends: bool,
    /// How many of a hundred callers go away.
    pub leaves: u32,
    /// It is not so: a write lands after its quarantine.
    pub late: bool,
    /// It is not so: a write lands after the end of its process, which was said to end its effects.
    pub outlives: bool,
}

impl Options {
    pub fn draw(rng: &mut fastrand::Rng) -> Self {
        let check = rng.u32(0..100) < 85;
        let mut trust = Vec::new();
        if rng.u32(0..3) == 0 {
            trust.push(Evidence::TooManyRequests);
        }
        if rng.u32(0..4) == 0 {
            trust.push(Evidence::Unavailable);
        }
        Self {
            quarantine: (rng.u32(0..100) < 70).then(|| rng.u64(200..6000)),
            attempt_timeout: (rng.u32(0..100) < 70).then(|| rng.u64(50..6000)),
            check,
            look: check && rng.bool(),
            trust,
            keyed: rng.u32(0..100) < 20,
            idempotent: rng.u32(0..100) < 12,
            landed_with: rng.bool(),
            conflict: rng.u32(0..3),
            keys: rng.u32(1..4),
            max_checks: rng.usize(1..3),
            deadline: rng.u64(200..20_000),
            begin: 3000,
            marks: rng.u32(0..100) < 60,
            reconnect: rng.bool(),
            dead: rng.u32(0..120).saturating_sub(80),
            ends: rng.bool(),
            leaves: if rng.bool() { 0 } else { rng.u32(0..60) },
            late: false,
            outlives: false,
        }
    }

    /// Whether two writes are to the same thing.
    pub fn touches(&self, one: u32, other: u32) -> bool {
        match self.conflict {
            0 => true,
            1 => one % self.keys == other % self.keys,
            _ => false,
        }
    }
}

/// What that server says of a write that was sent with its key again.
fn keyed_answer(answer: Result<&u32, &CallError>) -> Option<KeyedAnswer<u32>> {
    match answer.err()?.source()?.to_string().as_str() {
        "exists" => Some(KeyedAnswer::Landed(None)),
        "in flight" => Some(KeyedAnswer::InFlight { recheck_after: ms(500) }),
        _ => None,
    }
}

const CHECK_PANICS: &str = "a check panics";

pub fn check(world: World) -> impl Fn(InDoubt<Req, u32>) -> Checked + Clone + Send + Sync {
    move |doubt| {
        let world = world.clone();
        Box::pin(async move {
            match world.pick(30) {
                0..3 if world.calm.load(Ordering::Relaxed) => {}
                0 => return Err("it fails".into()),
                1 => pending::<()>().await,
                2 => std::panic::panic_any(CHECK_PANICS),
                _ => {}
            }
            let token = doubt.request().token;
            let found = doubt.probe(request(token, Effect::ReadOnly)).await?;
            world.log(format!("check of {token} finds {found}, fence {:?}", doubt.fence()));
            Ok(match found {
                3 if world.chance(50) => doubt.landed(token),
                3 => doubt.landed_without_result(),
                2 => doubt.partial(),
                1 if world.chance(30) => doubt.in_flight(ms(300)),
                _ if world.options.keyed && world.fault(30) => doubt.not_landed_deduplicated(ms(1_000_000)),
                _ => doubt.not_landed(),
            })
        })
    }
}

// ===== A world =====

#[derive(Default)]
pub struct State {
    /// Of each write: how many copies have begun to take effect, and how many are done.
    pub begun: HashMap<u32, u32>,
    pub done: HashMap<u32, u32>,
    /// Copies that have arrived and are at work, or will be.
    pub at_work: HashMap<u32, u32>,
    keys: HashMap<String, u32>,
    pub log: Vec<String>,
    pub order: Vec<Passed>,
    /// How often each write was reported.
    pub doubts: HashMap<u32, u32>,
    pub abandoned: HashMap<u32, u32>,
}

/// What became of a write, in the order in which it did.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Passed {
    Called(u32),
    HandedOver(u32),
    /// Its connection has it.
    Given(u32),
    /// To the server, to its last byte.
    Sent(u32),
    Claimed(u32),
    Landed(u32),
    /// Its process was told that nobody knows what became of it.
    Doubtful(u32),
    /// The ledger has its end.
    Closed(u32),
    /// Its caller was told that it is done.
    ToldDone(u32),
}

/// How many there are of that write.
pub fn count(of: &HashMap<u32, u32>, token: u32) -> u32 {
    of.get(&token).copied().unwrap_or_default()
}

impl State {
    /// From when a write was sent until it was handed over once more, if it was.
    pub fn replay_of(&self, token: u32) -> Option<Range<usize>> {
        let sent = self.order.iter().position(|passed| *passed == Passed::Sent(token))?;
        let replayed = self.order.iter().rposition(|passed| *passed == Passed::HandedOver(token))?;
        (sent < replayed).then_some(sent..replayed)
    }

    /// Which other write a replay of that one was handed over on top of, among those that touch it.
    pub fn overwritten_by(&self, token: u32, touches: impl Fn(u32) -> bool) -> Option<u32> {
        self.order[self.replay_of(token)?].iter().find_map(|passed| match *passed {
            Passed::HandedOver(other) if other != token && touches(other) => Some(other),
            _ => None,
        })
    }

    /// Which other write, whose caller is told that it is done, a replay of that one goes over whatever threads do, among
    /// those that touch it: it was given to its connection after that one was sent, and had landed before the replay was
    /// handed over.
    pub fn undone_by(&self, token: u32, touches: impl Fn(u32) -> bool) -> Option<u32> {
        let sent = self.order.iter().position(|passed| *passed == Passed::Sent(token))?;
        let given = self.order.iter().rposition(|passed| *passed == Passed::Given(token))?;
        let replayed = self.order[..given].iter().rposition(|passed| *passed == Passed::HandedOver(token))?;
        let between = self.order.get(sent..replayed)?;
        between.iter().enumerate().find_map(|(at, passed)| match *passed {
            Passed::Landed(other) if other != token && touches(other) => {
                let given = between[..at].contains(&Passed::Given(other));
                (given && self.order.contains(&Passed::ToldDone(other))).then_some(other)
            }
            _ => None,
        })
    }

    pub fn hears(&mut self, event: Event<'_>) {
        let (reports, method, outcome) = match event {
            Event::InDoubt(report) => (&mut self.doubts, &report.method, report.outcome),
            Event::Abandoned(report) => (&mut self.abandoned, &report.method, report.outcome),
            _ => return,
        };
        let token = method.parse().unwrap();
        *reports.entry(token).or_default() += 1;
        if outcome == Some(Outcome::Unknown) {
            self.order.push(Passed::Doubtful(token));
        }
    }
}

#[derive(Clone)]
pub struct World {
    pub options: Arc<Options>,
    rng: Arc<Mutex<fastrand::Rng>>,
    pub state: Arc<Mutex<State>>,
    start: Instant,
    conns: Arc<AtomicU64>,
    /// Nothing fails any more.
    pub calm: Arc<AtomicBool>,
}

impl World {
    pub fn new(options: Options, rng: fastrand::Rng) -> Self {
        Self {
            options: Arc::new(options),
            rng: Arc::new(Mutex::new(rng)),
            state: Arc::default(),
            start: Instant::now(),
            conns: Arc::default(),
            calm: Arc::default(),
        }
    }

    pub fn log(&self, what: impl Into<String>) {
        let at = self.start.elapsed().as_millis();
        self.state.lock().unwrap().log.push(format!("{at} {}", what.into()));
    }

    pub fn chance(&self, percent: u32) -> bool {
        self.rng.lock().unwrap().u32(0..100) < percent
    }

    pub fn fault(&self, percent: u32) -> bool {
        self.chance(percent) && !self.calm.load(Ordering::Relaxed)
    }

    pub fn pick(&self, n: u32) -> u32 {
        self.rng.lock().unwrap().u32(0..n)
    }

    pub fn wait(&self, most: u64) -> Duration {
        let mut rng = self.rng.lock().unwrap();
        if rng.u32(0..4) == 0 { Duration::ZERO } else { ms(rng.u64(0..=most)) }
    }

    /// As declared, but for its ledger.
    pub fn layer(&self) -> WriteSafetyLayer<Req, u32> {
        let options = &*self.options;
        let mut layer = match options.check {
            true => WriteSafetyLayer::new(check(self.clone())),
            false => WriteSafetyLayer::refuse(),
        };
        if let Some(quarantine) = options.quarantine.filter(|_| options.check) {
            layer = layer.quarantine(ms(quarantine));
        }
        if let Some(timeout) = options.attempt_timeout {
            layer = layer.attempt_timeout(ms(timeout));
        }
        if options.look {
            layer = layer.look_first();
        }
        for &evidence in &options.trust {
            layer = layer.trust(evidence);
        }
        if options.keyed {
            let keyed = KeyedWrites::new(|request: &mut Req, key: &str| {
                request.get_mut().key = Some(key.to_owned());
                true
            });
            layer = layer.keyed(keyed.honoured_for(ms(1_000_000)).answers(keyed_answer));
        }
        if options.idempotent {
            layer = layer.replay_idempotent();
        }
        if options.landed_with {
            layer = layer.landed_with(|request: &Req| request.token);
        }
        let keys = options.keys;
        let layer = match options.conflict {
            0 => layer,
            1 => layer.conflict_key(move |request: &Req| Some(request.token % keys)),
            _ => layer.independent_writes(),
        };
        layer.max_checks(options.max_checks)
    }

    /// What notes the order in which writes are handed over to what is below.
    pub fn notes(&self, below: Boxed) -> Boxed {
        let state = self.state.clone();
        BoxCloneService::new(below.map_request(move |request: Req| {
            if request.effect().is_write() {
                state.lock().unwrap().order.push(Passed::HandedOver(request.token));
            }
            request
        }))
    }
}

// ===== Connections =====

#[derive(Default)]
pub struct Conn {
    pub number: u64,
    closed: AtomicBool,
    gone: AtomicBool,
    told: Notify,
}

impl Conn {
    async fn until(&self, flag: &AtomicBool) {
        loop {
            let told = self.told.notified();
            if flag.load(Ordering::SeqCst) {
                return;
            }
            told.await;
        }
    }
}

impl World {
    pub fn close(&self, conn: &Arc<Conn>) {
        if conn.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        self.log(format!("connection {} closes", conn.number));
        conn.told.notify_waiters();
        let (conn, world) = (conn.clone(), self.clone());
        let lives_on = self.wait(3000);
        tokio::spawn(async move {
            sleep(lives_on).await;
            if world.options.ends {
                {
                    // Whatever begins to land looks at that.
                    let _state = world.state.lock().unwrap();
                    conn.gone.store(true, Ordering::SeqCst);
                }
                world.log(format!("server {} is gone", conn.number));
                conn.told.notify_waiters();
            }
        });
    }

    fn closed(&self, conn: &Arc<Conn>) -> CallError {
        let error = crate::lab::closed();
        if !self.options.ends {
            return error;
        }
        let conn = conn.clone();
        let error = error.with_exit(async move {
            conn.until(&conn.gone).await;
            Exit::new(None, true)
        });
        error.exit_ends_effects()
    }
}

/// Whose connections these are.
pub trait Client: Clone + Send + Sync + 'static {
    fn world(&self) -> &World;

    /// Whether no byte of it reaches the server any more.
    fn is_cut(&self) -> bool {
        false
    }

    /// It is told of each connection that it has.
    fn has(&self, _: &Arc<Conn>) {}

    /// Brings the frame to the server, when it likes, or does not.
    fn send(&self, over: Connection<Self>, frame: Arc<Frame>, reply: Sender);

    fn connection(&self) -> Connection<Self> {
        let number = self.world().conns.fetch_add(1, Ordering::Relaxed) + 1;
        let conn = Arc::new(Conn { number, ..Conn::default() });
        self.has(&conn);
        Connection(self.clone(), conn)
    }

    /// What is below its write safety.
    fn below(&self) -> Boxed {
        let client = self.clone();
        match self.world().options.reconnect {
            true => {
                let connector = service_fn(move |()| connect(client.clone()));
                BoxCloneService::new(RetryReadOnly.layer(ReconnectLayer::once().layer(connector)))
            }
            false => BoxCloneService::new(RetryReadOnly.layer(self.connection())),
        }
    }
}

async fn connect<C: Client>(client: C) -> Result<Connection<C>, BoxError> {
    let world = client.world();
    sleep(world.wait(1500)).await;
    if client.is_cut() || world.fault(8) {
        return Err("no".into());
    }
    let connection = client.connection();
    if world.fault(world.options.dead) {
        world.close(&connection.1);
    }
    Ok(connection)
}

#[derive(Clone)]
pub struct Connection<C>(pub C, pub Arc<Conn>);

impl<C: Client> Connection<C> {
    pub fn is_closed(&self) -> bool {
        self.1.closed.load(Ordering::SeqCst) && self.0.world().options.reconnect
    }
}

impl<C: Client> Service<Req> for Connection<C> {
    type Response = u32;
    type Error = CallError;
    type Future = Answer;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        match self.is_closed() {
            true => Poll::Ready(Err(CallError::closed("closed before"))),
            false => Poll::Ready(Ok(())),
        }
    }
    fn call(&mut self, request: Req) -> Answer {
        match request.effect().is_write() {
            true => Box::pin(write(self.clone(), request)),
            false => Box::pin(read(self.clone(), request.token)),
        }
    }
}

async fn read<C: Client>(connection: Connection<C>, token: u32) -> Told {
    let Connection(client, conn) = &connection;
    let world = client.world();
    if connection.is_closed() {
        return Err(world.closed(conn));
    }
    sleep(world.wait(300)).await;
    if client.is_cut() || world.fault(5) {
        pending::<()>().await;
    }
    if world.fault(5) {
        return Err(CallError::ambiguous("reset"));
    }
    let found = {
        let state = world.state.lock().unwrap();
        match (count(&state.done, token), count(&state.begun, token), count(&state.at_work, token)) {
            (1.., ..) => 3,
            (_, 1.., _) => 2,
            (.., 1..) => 1,
            _ => 0,
        }
    };
    // An answer is some time on its way.
    sleep(world.wait(300)).await;
    match connection.is_closed() {
        true => Err(world.closed(conn)),
        false => Ok(found),
    }
}

pub struct Frame {
    pub put: Put,
    /// `true` taken, `false` withdrawn.
    taken: Mutex<Option<bool>>,
    pub activity: Option<Arc<Activity>>,
    /// Otherwise it is on its way at once, and nobody marks what becomes of it.
    pub queues: bool,
}

impl Frame {
    /// Whether it is withdrawn, since it was not on its way yet.
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

    /// Whether it is on its way now, since it was not withdrawn before.
    pub fn take(&self) -> bool {
        *self.taken.lock().unwrap().get_or_insert(true)
    }

    /// Of one that queues.
    pub fn sent(&self) {
        self.activity.as_ref().inspect(|activity| activity.sent());
    }
}

/// Brings it, unless it is withdrawn or cut.
pub fn brings<C: Client>(over: Connection<C>, frame: Arc<Frame>, reply: Sender) {
    let mut sent = Instant::now();
    if !frame.queues {
        over.0.world().state.lock().unwrap().order.push(Passed::Sent(frame.put.token));
    }
    tokio::spawn(async move {
        let Connection(client, conn) = &over;
        let world = client.world();
        if frame.queues {
            if world.chance(25) {
                sleep(world.wait(4000)).await;
            }
            if over.is_closed() || !frame.take() {
                return;
            }
            if world.chance(15) {
                sleep(world.wait(4000)).await;
                if over.is_closed() {
                    return; // cut
                }
            }
            world.state.lock().unwrap().order.push(Passed::Sent(frame.put.token));
            sent = Instant::now();
            frame.sent();
        }
        world.serves(conn, &frame.put, sent, reply).await;
    });
}

struct OnDrop(Arc<Frame>);

impl Drop for OnDrop {
    fn drop(&mut self) {
        self.0.withdraw();
    }
}

async fn write<C: Client>(connection: Connection<C>, request: Req) -> Told {
    let Connection(client, conn) = &connection;
    let world = client.world();
    let options = &*world.options;
    let activity = request.context().activity().cloned().filter(|_| options.marks);
    if let Some(activity) = &activity
        && !activity.adopt()
    {
        return Err(CallError::not_sent("over"));
    }
    if connection.is_closed() {
        return Err(CallError::not_sent("closed").connection_lost());
    }
    let (until_at, deadline) = (request.context().attempt_until(), request.context().deadline().instant());
    let put = request.get_ref().clone();
    world.log(format!("write {} handed over to {}", put.token, conn.number));
    let frame = Arc::new(Frame { put, taken: Mutex::new(None), activity, queues: options.marks });
    let _guard = OnDrop(frame.clone());
    let (reply, replied) = oneshot::channel();
    client.send(connection.clone(), frame.clone(), reply);
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
        match options.reconnect {
            true => conn.until(&conn.closed).await,
            false => pending().await,
        }
    };
    tokio::select! {
        biased;
        Ok(reply) = replied => reply,
        () = gone => Err(match frame.withdraw() {
            true => CallError::not_sent("queued").connection_lost(),
            false => world.closed(conn),
        }),
        () = give_up => Err(CallError::not_sent("queued")),
        else => pending().await,
    }
}

// ===== The server =====

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

impl World {
    fn fate(&self) -> Fate {
        match self.pick(12) {
            0 | 1 => Fate::NeverSeen,
            6 => Fate::LandsInParts,
            7 => Fate::Busy429,
            8 => Fate::Busy503,
            9 if !self.options.trust.contains(&Evidence::Unavailable) => Fate::Lying503,
            10 => Fate::Error,
            _ => Fate::Lands,
        }
    }

    fn reply(&self) -> Reply {
        match self.pick(8) {
            0..4 => Reply::Given,
            4 => Reply::Lost,
            5 => Reply::Reset,
            _ => Reply::Closes,
        }
    }

    /// What becomes of a write that had come to its last byte by then, and what is heard of it: `true` if its success came
    /// to where it was still waited for.
    pub async fn serves(&self, conn: &Arc<Conn>, put: &Put, sent: Instant, reply: Sender) -> bool {
        let token = put.token;
        let (fate, how) = (self.fate(), self.reply());
        // By the quarantine everything has landed; it counts from the last byte, or, unmarked, from the attempt's end.
        let most = self.options.quarantine.map_or(6000, |quarantine| quarantine.saturating_sub(1));
        let lands_at = sent + self.wait(if self.options.late { most * 4 } else { most });
        self.log(format!("write {token}: {fate:?} at {:?}, {how:?}", lands_at.duration_since(self.start)));
        let mut reply = Some(reply);
        let result = match fate {
            Fate::Lands | Fate::LandsInParts | Fate::Lying503 => {
                *self.state.lock().unwrap().at_work.entry(token).or_default() += 1;
                let early = async {
                    match how != Reply::Given && self.chance(50) {
                        true => sleep(self.wait(2000)).await,
                        false => pending().await,
                    }
                };
                let dies = async {
                    match self.options.outlives {
                        true => pending().await,
                        false => conn.until(&conn.gone).await,
                    }
                };
                let mut work = Box::pin(async {
                    tokio::select! {
                        biased;
                        () = dies => None,
                        said = self.lands(conn, put, fate, (sent, lands_at)) => Some(said),
                    }
                });
                let said = tokio::select! {
                    biased;
                    said = &mut work => said,
                    () = early => {
                        // The reply is lost before it lands.
                        self.lose(conn, how, &mut reply);
                        work.await
                    }
                };
                *self.state.lock().unwrap().at_work.entry(token).or_default() -= 1;
                match said {
                    None => return false,
                    Some(Some(said)) => Err(CallError::answered(said)),
                    Some(None) if fate == Fate::Lying503 => Err(unavailable()),
                    Some(None) => Ok(token),
                }
            }
            fate => {
                let after = self.wait(2000);
                Err(match fate {
                    Fate::Busy429 => CallError::evidence(Evidence::TooManyRequests, "429").after(after),
                    Fate::Busy503 => unavailable().after(after),
                    _ => CallError::answered("quota"),
                })
            }
        };
        sleep(self.wait(1500)).await;
        let how = match (fate, how) {
            (Fate::NeverSeen, Reply::Given) => Reply::Lost,
            (Fate::Busy429 | Fate::Busy503 | Fate::Error, _) => Reply::Given,
            (_, how) => how,
        };
        match reply.take() {
            Some(reply) if how == Reply::Given => {
                let success = result.is_ok();
                reply.send(result).is_ok() && success
            }
            kept => {
                reply = kept;
                self.lose(conn, how, &mut reply);
                if reply.is_some() {
                    pending::<()>().await;
                }
                false
            }
        }
    }

    /// The server does it; or says what its key says.
    async fn lands(
        &self,
        conn: &Conn,
        put: &Put,
        fate: Fate,
        (sent, lands_at): (Instant, Instant),
    ) -> Option<&'static str> {
        let token = put.token;
        match fate {
            Fate::LandsInParts => sleep(lands_at.duration_since(sent) / 2).await,
            _ => sleep_until(lands_at).await,
        }
        let is_in_time = {
            let mut state = self.state.lock().unwrap();
            let is_in_time = self.is_in_time(conn, sent);
            if let Some(key) = put.key.as_ref().filter(|_| is_in_time) {
                let copies = state.keys.entry(key.clone()).or_default();
                *copies += 1;
                if *copies > 1 {
                    return Some(if count(&state.done, token) > 0 { "exists" } else { "in flight" });
                }
            }
            *state.begun.entry(token).or_default() += u32::from(is_in_time);
            is_in_time
        };
        if !is_in_time {
            pending::<()>().await;
        }
        self.log(format!("write {token} begins to land"));
        if fate == Fate::LandsInParts {
            sleep_until(lands_at).await;
            if self.chance(50) {
                pending::<()>().await; // for ever in parts
            }
        }
        {
            let mut state = self.state.lock().unwrap();
            *state.done.entry(token).or_default() += 1;
            state.order.push(Passed::Landed(token));
        }
        self.log(format!("write {token} has landed"));
        None
    }

    /// Whether what was sent then may begin to land. On several threads its turn may have come late, and what is declared
    /// is true all the same.
    fn is_in_time(&self, conn: &Conn, sent: Instant) -> bool {
        let options = &*self.options;
        let late = options.quarantine.is_some_and(|quarantine| sent.elapsed() >= ms(quarantine));
        (options.late || !late) && (options.outlives || !conn.gone.load(Ordering::SeqCst))
    }

    fn lose(&self, conn: &Arc<Conn>, how: Reply, reply: &mut Option<Sender>) {
        let error = match how {
            Reply::Reset => CallError::ambiguous("reset"),
            Reply::Closes if self.options.reconnect => return self.close(conn),
            Reply::Closes => CallError::ambiguous("cut"),
            Reply::Given | Reply::Lost => return,
        };
        if let Some(reply) = reply.take() {
            let _ = reply.send(Err(error));
        }
    }
}

// ===== Ledgers =====

/// The ledger of a world: the one in memory, or a table elsewhere if there is one.
pub struct Ledgers {
    pub memory: MemoryLedger,
    store: Option<Store>,
}

/// What ledgers say in the end: what is in doubt in memory, and all that the table has.
pub struct Said {
    left: Vec<Entry>,
    table: Option<Vec<Entry>>,
}

impl Ledgers {
    /// With a table elsewhere if it is said how many of a hundred of its steps fail.
    pub fn new(world: &World, store_fails: Option<u32>) -> Self {
        let store = |fails| Store { world: world.clone(), fails, table: Arc::default() };
        Self { memory: MemoryLedger::new(), store: store_fails.map(store) }
    }

    pub fn of(&self, layer: WriteSafetyLayer<Req, u32>) -> WriteSafetyLayer<Req, u32> {
        match &self.store {
            Some(store) => layer.ledger(store.clone()),
            None => layer.ledger(self.memory.clone()),
        }
    }

    pub async fn say(&self) -> Said {
        let table = self.store.as_ref().map(|store| store.table.lock().unwrap().values().cloned().collect());
        Said { left: self.memory.in_doubt().await.unwrap(), table }
    }
}

impl Said {
    /// What is not so of what the table says of that call, of which so many copies have begun to land.
    fn wrong_in_table(&self, called: &Called, begun: u32) -> Option<String> {
        let name = called.token.to_string();
        let mut entries = self.table.as_ref()?.iter().filter(|entry| entry.method == name);
        let (entry, told) = (entries.next().map(|entry| &entry.state), &called.told);
        let lie = match (entry, told) {
            (Some(ledger::State::NotLanded { .. }), Some(Ok(_))) => true,
            (Some(ledger::State::NotLanded { .. }), _) if begun > 0 => true,
            (Some(ledger::State::Landed { .. }), _) if begun == 0 => true,
            (None, _) if begun > 0 => true,
            (Some(state), Some(Err(error))) if error.outcome() == Outcome::Unknown => state.is_closed(),
            _ => false,
        };
        (lie || entries.next().is_some())
            .then(|| format!("the store says {entry:?}, and the caller was told {told:?}"))
    }

    /// The same of the one in memory, where there are so many reports of its doubt, and of its being abandoned.
    fn wrong_in_memory(&self, called: &Called, doubts: u32, abandoned: u32) -> Option<String> {
        let name = called.token.to_string();
        let listed = self.left.iter().filter(|entry| entry.method == name).count();
        match &called.told {
            _ if listed > 1 => Some(format!("{listed} entries in the ledger")),
            Some(Ok(_)) if listed > 0 => Some("Ok and in the ledger".into()),
            // With the store, that one lists at the most what is in doubt of a layer around it.
            _ if self.table.is_some() => None,
            None if (abandoned > 0) != (listed > 0) && doubts == 0 => {
                Some("abandoned and not in the ledger, or the other way round".into())
            }
            Some(Err(error)) if called.in_doubt() != (listed > 0) => {
                Some(format!("{error}: ledger says {listed}"))
            }
            _ => None,
        }
    }
}

/// A table elsewhere, which is slow and fails at times, also after it has done what it was asked.
#[derive(Clone)]
pub struct Store {
    pub world: World,
    pub fails: u32,
    pub table: Arc<Mutex<HashMap<EntryId, Entry>>>,
}

impl Store {
    async fn step<T>(&self, act: impl FnOnce() -> Result<T, LedgerError>) -> Result<T, LedgerError> {
        let lost = || LedgerError::Unavailable("lost".into());
        sleep(self.world.wait(300)).await;
        if self.world.chance(self.fails) {
            match self.world.pick(4) {
                0 => pending::<()>().await,
                _ => return Err(lost()),
            }
        }
        let done = act();
        sleep(self.world.wait(300)).await;
        if self.world.chance(self.fails) {
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
        if !self.world.chance(self.fails) {
            let _ = self.change(id, |entry| match entry.state {
                ledger::State::Open => entry.settle(entry.revision, state, SystemTime::now()),
                _ => Err(LedgerError::Conflict(id)),
            });
        }
    }
}

// ===== Calls =====

/// What became of a call.
#[derive(Debug)]
pub struct Called {
    pub token: u32,
    /// `None` if its caller went away.
    pub told: Option<Told>,
    pub late: bool,
    pub at: Instant,
    /// How many copies had been done then.
    pub then: u32,
}

impl World {
    pub async fn call(self, stack: Boxed, token: u32) -> Called {
        let options = self.options.clone();
        let leaves = self
            .chance(options.leaves)
            .then(|| (self.chance(50), self.pick(12), self.wait(options.deadline)));
        sleep(self.wait(options.begin)).await;
        let start = Instant::now();
        let effect = if options.idempotent { Effect::Idempotent } else { Effect::Write };
        self.state.lock().unwrap().order.push(Passed::Called(token));
        let call = stack.oneshot(request(token, effect));
        let told = match leaves {
            Some((true, polls, _)) => leave_after(call, polls).await,
            Some((false, _, at)) => timeout(at, call).await.ok(),
            None => Some(call.await),
        };
        if let Some(Ok(_)) = told {
            self.state.lock().unwrap().order.push(Passed::ToldDone(token));
        }
        let words = told.as_ref().map(|told| told.as_ref().map_err(ToString::to_string));
        self.log(format!("write {token} told {words:?}"));
        let late = start.elapsed() > ms(options.deadline + 1);
        let then = count(&self.state.lock().unwrap().done, token);
        Called { token, told, late, at: Instant::now(), then }
    }
}

/// For a caller that leaves after so many polls.
async fn leave_after<F: Future>(call: F, polls: u32) -> Option<F::Output> {
    let (mut call, mut left) = (Box::pin(call), polls);
    poll_fn(|cx| match call.as_mut().poll(cx) {
        Poll::Ready(result) => Poll::Ready(Some(result)),
        Poll::Pending if left == 0 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            Poll::Pending
        }
    })
    .await
}

impl Called {
    /// Whether it was told that its write may have landed, and no more.
    pub fn in_doubt(&self) -> bool {
        self.told.as_ref().and_then(|told| told.as_ref().err()).is_some_and(|error| match error.outcome() {
            Outcome::Unknown => true,
            Outcome::Answered => error.may_have_landed(),
            _ => false,
        })
    }

    /// What is not so of what it was told, where that many copies have begun to land, and there are so many reports of its
    /// doubt, and of its being abandoned.
    pub fn wrong(&self, begun: u32, doubts: u32, abandoned: u32) -> Vec<String> {
        let mut wrong = Vec::new();
        if self.late {
            wrong.push("late".into());
        }
        match &self.told {
            None if begun > 0 && doubts + abandoned == 0 => {
                wrong.push("dropped, landed and not reported".into());
            }
            Some(Ok(_)) if self.then == 0 => wrong.push("Ok and not there".into()),
            None | Some(Ok(_)) => {}
            Some(Err(error)) => {
                match error.outcome() {
                    Outcome::NotDone if begun > 0 => wrong.push(format!("{error}: not so")),
                    Outcome::DoneResultLost if self.then == 0 => wrong.push(format!("{error}: not so")),
                    Outcome::NoAnswer => wrong.push(format!("{error}: of a write")),
                    Outcome::Answered if !self.in_doubt() && begun > 0 => {
                        wrong.push(format!("{error}: and it has landed"));
                    }
                    _ => {}
                }
                if self.in_doubt() && doubts != 1 {
                    wrong.push(format!("{error}: reported {doubts} times"));
                }
            }
        }
        wrong
    }
}

impl State {
    /// What is not so of what was done, told and reported of that call, and of what the ledgers say, if they are asked.
    pub fn wrong(&self, options: &Options, called: &Called, said: Option<&Said>) -> Option<String> {
        let token = called.token;
        let begun = count(&self.begun, token);
        let (doubts, abandoned) = (count(&self.doubts, token), count(&self.abandoned, token));
        if let Some(what) = said.and_then(|said| said.wrong_in_table(called, begun)) {
            return Some(what);
        }
        if begun > 1 && !options.idempotent {
            return Some(format!("{begun} copies"));
        }
        if doubts + abandoned > 1 {
            return Some(format!("reported {doubts}+{abandoned} times"));
        }
        let wrong = called.wrong(begun, doubts, abandoned).pop();
        wrong.or_else(|| said?.wrong_in_memory(called, doubts, abandoned))
    }
}

// ===== Seeds =====

/// Those that the environment names, or so many.
pub fn seeds(most: u64) -> Range<u64> {
    let number = |name: &str| std::env::var(name).ok().map(|n| n.parse::<u64>().expect("a number"));
    let first = number("GOAROUND_FROM").unwrap_or(0);
    first..first + number("GOAROUND_WORLDS").unwrap_or(most)
}

/// What is wrong in the worlds of those seeds, where anything is.
pub fn wrong_in<F>(seeds: Range<u64>, fly: impl Fn(u64) -> F) -> impl Iterator<Item = String>
where
    F: Future<Output = Result<(), String>>,
{
    without_their_panics();
    seeds.filter_map(move |seed| {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build();
        runtime.unwrap().block_on(fly(seed)).err()
    })
}

/// Checks of these worlds panic now and then, which is no news.
pub fn without_their_panics() {
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
