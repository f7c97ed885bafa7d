//! Random worlds of several processes on one ledger, which is a database elsewhere with leases: each has its own stack,
//! its own connections and its own handle. Processes crash, are stopped, lose their network, and recover what others left
//! open: by `Resolve`, by hand, or by a claim and a replay of their own. The rest is as in `tests/worlds.rs`, whose promises
//! these are, and besides
//!
//! - what the ledger says of a write is so, also what was settled by another process;
//! - one that was told to somebody else by the ledger is not called "not done" by its owner;
//! - whoever comes last can settle all that is left, where a quarantine is declared.
//!
//! The ledger answers late or never, errs before or after it has done what it was asked, and does it also when nobody waits
//! for it any more. Connections mark what they have sent when they get round to it. In some worlds all calls of a process are
//! one task's, more of them than that may do in one turn, and their wakers are new at each turn.
//!
//! - `GOAROUND_WORLDS=n` flies n seeds, 400 by default; `GOAROUND_FROM=s` begins with that seed.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::{Future, pending, poll_fn},
    pin::Pin,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, SystemTime},
};

use goaround::{
    Activity, BoxError, Call, CallError, DeadlineLayer, Effect, Event, Evidence, Exit, InDoubt, Outcome,
    ReconnectLayer, Resolve, RetryReadOnly, Tagged, Verdict, WriteSafetyLayer,
    write_safety::{
        FenceBasis, KeyedAnswer, KeyedWrites,
        ledger::{self, Entry, EntryId, Ledger, LedgerError},
    },
};
use tokio::{
    sync::{Notify, oneshot},
    time::{Instant, sleep, sleep_until, timeout},
};
use tower::{Layer, Service, ServiceExt, util::BoxCloneService};

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// How long a process is stopped at most.
const LONGEST_STOP: u64 = 8_000;

#[derive(Clone, Debug)]
struct Put {
    token: u32,
    key: Option<String>,
}

type Req = Tagged<Put>;
type Checked = Pin<Box<dyn Future<Output = Result<Verdict<u32>, BoxError>> + Send>>;
type Answer = Pin<Box<dyn Future<Output = Result<u32, CallError>> + Send>>;
type Boxed = BoxCloneService<Req, u32, CallError>;

fn request(token: u32, effect: Effect) -> Req {
    Tagged::new(Put { token, key: None }, effect).named(token.to_string())
}

// ===== What a world is like =====

/// What is not so, to see whether that is noticed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// A write lands after its quarantine.
    Late,
    /// An owner is said to be gone, and is not.
    Gone,
    /// What was sent is marked before that.
    Early,
}

#[derive(Clone, Debug)]
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
    /// 0 none, 1 key, 2 independent.
    conflict: u32,
    keys: u32,
    marks: bool,
    /// How late what was sent is marked, at most.
    marks_late: u64,
    reconnect: bool,
    /// How many of a hundred connections are closed when they come.
    dead: u32,
    ends: bool,
    max_checks: usize,
    deadline: u64,
    processes: u32,
    /// Of each process.
    writes: u32,
    one_task: bool,
    store_fails: u32,
    store_late: u64,
    lease: u64,
    leaves: u32,
    /// How long a frame is in the queue, and again on its way to its last byte, at most.
    stall: u64,
    /// How long a process waits at most until it looks for what is left.
    looks: u64,
}

fn plan(rng: &mut fastrand::Rng, lie: Option<Lie>) -> Plan {
    // That shows only where somebody looks soon, and not at what is not sent yet.
    let gone = lie == Some(Lie::Gone);
    let check = rng.u32(0..100) < 85;
    let mut trust = Vec::new();
    if rng.u32(0..3) == 0 {
        trust.push(Evidence::TooManyRequests);
    }
    if rng.u32(0..4) == 0 {
        trust.push(Evidence::Unavailable);
    }
    let one_task = rng.u32(0..40) == 0;
    let writes = if one_task { rng.u32(140..260) } else { rng.u32(1..6) };
    Plan {
        lie,
        quarantine: (gone || rng.u32(0..100) < 75).then(|| rng.u64(200..if gone { 400 } else { 6000 })),
        attempt_timeout: (rng.u32(0..100) < 70).then(|| rng.u64(50..6000)),
        check,
        look: check && rng.bool(),
        trust,
        keyed: rng.u32(0..100) < 15,
        idempotent: rng.u32(0..100) < 10,
        landed_with: rng.bool(),
        conflict: rng.u32(0..3),
        keys: if one_task { rng.u32(2..200) } else { rng.u32(1..4) },
        marks: rng.u32(0..3) > 0,
        marks_late: if rng.bool() { 0 } else { rng.u64(0..3000) },
        reconnect: rng.bool(),
        dead: rng.u32(0..120).saturating_sub(80),
        ends: rng.bool(),
        max_checks: if one_task { rng.usize(1..40) } else { rng.usize(1..3) },
        deadline: rng.u64(200..20_000),
        processes: if one_task { 1 + rng.u32(0..2) } else { rng.u32(1..4) },
        writes,
        one_task,
        store_fails: if rng.bool() { 0 } else { rng.u32(0..30) },
        store_late: if rng.bool() { 100 } else { rng.u64(0..3000) },
        lease: rng.u64(500..10_000),
        leaves: if rng.bool() { 0 } else { rng.u32(0..40) },
        stall: if rng.bool() && !gone { 4_000 } else { rng.u64(0..30_000) },
        looks: rng.u64(300..if gone { 2_000 } else { 25_000 }),
    }
}

#[derive(Default)]
struct State {
    /// Of each write: how many copies have begun to take effect, and how many are done.
    begun: HashMap<u32, u32>,
    done: HashMap<u32, u32>,
    /// Copies that are at work, or will be.
    at_work: HashMap<u32, u32>,
    /// Frames that may still go.
    queued: HashMap<u32, u32>,
    keys: HashMap<String, u32>,
    log: Vec<String>,
    order: Vec<Passed>,
    /// When a success came to where it was still waited for.
    answered: HashMap<u32, Instant>,
    /// Replayed by another process.
    by_hand: HashSet<u32>,
    /// The ledger has told its owner that somebody else has it.
    said: HashMap<u32, Instant>,
    wrong: Vec<String>,
    doubts: HashMap<u32, u32>,
    abandoned: HashMap<u32, u32>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Passed {
    HandedOver(u32),
    /// To the server, to its last byte.
    Sent(u32),
    Claimed(u32),
    Called(u32),
    /// Its process was told that nobody knows what became of it.
    Doubtful(u32),
    /// The ledger has its end.
    Closed(u32),
}

#[derive(Clone)]
struct World {
    plan: Arc<Plan>,
    rng: Arc<Mutex<fastrand::Rng>>,
    state: Arc<Mutex<State>>,
    table: Arc<Mutex<Table>>,
    start: Instant,
    conns: Arc<AtomicU64>,
    /// Nothing fails any more.
    calm: Arc<AtomicBool>,
}

impl World {
    fn log(&self, what: impl Into<String>) {
        let at = self.start.elapsed().as_millis();
        self.state.lock().unwrap().log.push(format!("{at} {}", what.into()));
    }
    fn wrong(&self, what: String) {
        self.log(format!("WRONG: {what}"));
        self.state.lock().unwrap().wrong.push(what);
    }
    fn chance(&self, percent: u32) -> bool {
        self.rng.lock().unwrap().u32(0..100) < percent
    }
    fn fault(&self, percent: u32) -> bool {
        self.chance(percent) && !self.calm.load(Ordering::Relaxed)
    }
    fn pick(&self, n: u32) -> u32 {
        self.rng.lock().unwrap().u32(0..n)
    }
    fn wait(&self, most: u64) -> Duration {
        let mut rng = self.rng.lock().unwrap();
        if rng.u32(0..4) == 0 { Duration::ZERO } else { ms(rng.u64(0..=most)) }
    }
    /// In the table.
    fn settle(&self, entry: &mut Entry, revision: u64, to: ledger::State) -> Result<u64, LedgerError> {
        let closes = to.is_closed();
        let settled = entry.settle(revision, to, SystemTime::now())?;
        if closes {
            self.state.lock().unwrap().order.push(Passed::Closed(token(entry)));
        }
        Ok(settled)
    }
    fn same_process(&self, one: u32, other: u32) -> bool {
        one % self.plan.processes == other % self.plan.processes
    }
    fn touches(&self, one: u32, other: u32) -> bool {
        match self.plan.conflict {
            0 => true,
            1 => one % self.plan.keys == other % self.plan.keys,
            _ => false,
        }
    }
}

// ===== A process =====

struct Process {
    world: World,
    number: u32,
    owner: u128,
    now: Mutex<Now>,
    conns: Mutex<Vec<Arc<Conn>>>,
    tasks: Mutex<Vec<tokio::task::AbortHandle>>,
    was_stopped: AtomicBool,
}

#[derive(Default)]
struct Now {
    dead: bool,
    stopped: bool,
    /// Without a network, but for the ledger.
    cut: bool,
    wakers: Vec<Waker>,
}

impl Process {
    fn new(world: &World, number: u32) -> Arc<Self> {
        let owner = 1000 + u128::from(number);
        let lease = Instant::now() + ms(world.plan.lease);
        world.table.lock().unwrap().owners.insert(owner, Owner { lease, gone: None });
        Arc::new(Self {
            world: world.clone(),
            number,
            owner,
            now: Mutex::default(),
            conns: Mutex::default(),
            tasks: Mutex::default(),
            was_stopped: AtomicBool::new(false),
        })
    }

    fn is_dead(&self) -> bool {
        self.now.lock().unwrap().dead
    }

    /// Whether no byte of it reaches the server any more.
    fn is_cut(&self) -> bool {
        let now = self.now.lock().unwrap();
        now.dead || now.cut
    }

    /// A future of it has no turn while it is stopped, nor once it is dead.
    async fn run<F: Future>(self: Arc<Self>, future: F) -> F::Output {
        let mut future = std::pin::pin!(future);
        poll_fn(move |cx| {
            {
                let mut now = self.now.lock().unwrap();
                if now.dead {
                    return Poll::Pending;
                }
                if now.stopped {
                    now.wakers.push(cx.waker().clone());
                    return Poll::Pending;
                }
            }
            future.as_mut().poll(cx)
        })
        .await
    }

    fn spawn<F>(self: &Arc<Self>, future: F) -> tokio::task::JoinHandle<F::Output>
    where
        F: Future<Output: Send> + Send + 'static,
    {
        let task = tokio::spawn(self.clone().run(future));
        self.tasks.lock().unwrap().push(task.abort_handle());
        task
    }

    fn crash(&self) {
        if std::mem::replace(&mut self.now.lock().unwrap().dead, true) {
            return;
        }
        self.world.log(format!("process {} CRASHES", self.number));
        self.tasks.lock().unwrap().drain(..).for_each(|task| task.abort());
        self.hang_up();
    }

    fn cut_off(&self) {
        self.now.lock().unwrap().cut = true;
        self.world.log(format!("process {} is cut off", self.number));
        self.hang_up();
    }

    fn hang_up(&self) {
        let conns: Vec<_> = self.conns.lock().unwrap().drain(..).collect();
        conns.iter().for_each(|conn| self.world.close(conn));
    }

    async fn stop(&self, time: Duration) {
        self.was_stopped.store(true, Ordering::Relaxed);
        self.now.lock().unwrap().stopped = true;
        self.world.log(format!("process {} is stopped", self.number));
        sleep(time).await;
        self.world.log(format!("process {} goes on", self.number));
        let wakers = {
            let mut now = self.now.lock().unwrap();
            now.stopped = false;
            std::mem::take(&mut now.wakers)
        };
        wakers.into_iter().for_each(Waker::wake);
    }

    /// It is known to be gone, from now on.
    fn is_gone(&self) {
        self.world.log(format!("process {} is known to be gone", self.number));
        let mut table = self.world.table.lock().unwrap();
        if let Some(owner) = table.owners.get_mut(&self.owner) {
            owner.gone.get_or_insert_with(Instant::now);
        }
    }

    /// What others send by hand has no place in the order of its layer's writes.
    fn notes_sent(&self, token: u32) {
        if token % self.world.plan.processes == self.number {
            self.world.state.lock().unwrap().order.push(Passed::Sent(token));
        }
    }

    fn handle(self: &Arc<Self>) -> Handle {
        Handle(self.clone())
    }

    fn connection(self: &Arc<Self>) -> Connection {
        let number = self.world.conns.fetch_add(1, Ordering::Relaxed) + 1;
        let conn = Arc::new(Conn { number, ..Conn::default() });
        self.conns.lock().unwrap().push(conn.clone());
        Connection(self.clone(), conn)
    }

    /// What is below its write safety.
    fn below(self: &Arc<Self>) -> Boxed {
        match self.world.plan.reconnect {
            true => {
                let layer = ReconnectLayer::once();
                BoxCloneService::new(RetryReadOnly.layer(layer.layer(Connector(self.clone()))))
            }
            false => BoxCloneService::new(RetryReadOnly.layer(self.connection())),
        }
    }

    fn sink(self: &Arc<Self>) -> impl Fn(Event<'_>) + Send + Sync + Clone + 'static {
        let process = self.clone();
        move |event| {
            if process.is_dead() {
                return;
            }
            let mut state = process.world.state.lock().unwrap();
            let state = &mut *state;
            match event {
                Event::InDoubt(report) => {
                    let token = report.method.parse().unwrap();
                    *state.doubts.entry(token).or_default() += 1;
                    if report.outcome == Some(Outcome::Unknown) {
                        state.order.push(Passed::Doubtful(token));
                    }
                }
                Event::Abandoned(report) => {
                    let token = report.method.parse().unwrap();
                    *state.abandoned.entry(token).or_default() += 1;
                    if report.outcome == Some(Outcome::Unknown) {
                        state.order.push(Passed::Doubtful(token));
                    }
                }
                _ => {}
            }
        }
    }

    fn stack(self: &Arc<Self>) -> Boxed {
        let (world, plan) = (&self.world, &*self.world.plan);
        let mut layer = match plan.check {
            true => WriteSafetyLayer::new(check(world.clone())),
            false => WriteSafetyLayer::refuse(),
        };
        if let Some(quarantine) = plan.quarantine.filter(|_| plan.check) {
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
            layer = layer.keyed(keyed.honoured_for(ms(1_000_000)).answers(keyed_answer));
        }
        if plan.idempotent {
            layer = layer.replay_idempotent();
        }
        if plan.landed_with {
            layer = layer.landed_with(|request: &Req| request.token);
        }
        let keys = plan.keys;
        layer = match plan.conflict {
            0 => layer,
            1 => layer.conflict_key(move |request: &Req| Some(request.token % keys)),
            _ => layer.independent_writes(),
        };
        let layer = layer.max_checks(plan.max_checks).ledger(self.handle());
        let notes = world.clone();
        let below = self.below().map_request(move |request: Req| {
            if request.effect().is_write() {
                notes.state.lock().unwrap().order.push(Passed::HandedOver(request.token));
            }
            request
        });
        let deadline = DeadlineLayer::new(ms(plan.deadline)).on_event(self.sink());
        BoxCloneService::new(deadline.layer(layer.layer(below)))
    }
}

fn keyed_answer(answer: Result<&u32, &CallError>) -> Option<KeyedAnswer<u32>> {
    match std::error::Error::source(answer.err()?)?.to_string().as_str() {
        "exists" => Some(KeyedAnswer::Landed(None)),
        "in flight" => Some(KeyedAnswer::InFlight { recheck_after: ms(500) }),
        _ => None,
    }
}

// ===== The ledger =====

#[derive(Default)]
struct Table {
    rows: BTreeMap<u64, Row>,
    places: HashMap<EntryId, u64>,
    owners: HashMap<u128, Owner>,
}

struct Row {
    entry: Entry,
    claimed_by: Option<u128>,
}

struct Owner {
    lease: Instant,
    gone: Option<Instant>,
}

impl Table {
    fn row(&mut self, id: EntryId) -> Result<&mut Row, LedgerError> {
        let place = self.places.get(&id).ok_or(LedgerError::Conflict(id))?;
        self.rows.get_mut(place).ok_or(LedgerError::Conflict(id))
    }

    fn is_gone(&self, owner: u128) -> bool {
        self.owners.get(&owner).is_none_or(|owner| owner.gone.is_some())
    }

    /// Whether its lease is good.
    fn grants(&self, owner: u128) -> Result<(), LedgerError> {
        let lease = self.owners.get(&owner).filter(|owner| owner.gone.is_none()).map(|owner| owner.lease);
        match lease.is_some_and(|lease| Instant::now() < lease) {
            true => Ok(()),
            false => Err(LedgerError::Unavailable("its lease has run out".into())),
        }
    }

    fn enter(&mut self, owner: u128, entry: Entry, independent: bool) -> Result<u64, LedgerError> {
        self.grants(owner)?;
        if self.places.contains_key(&entry.id) {
            return Err(LedgerError::Conflict(entry.id));
        }
        let held = self.rows.values().find(|Row { entry: held, .. }| {
            let in_doubt = match held.state {
                ledger::State::InDoubt { .. } => true,
                ledger::State::Open => self.is_gone(held.id.owner()),
                _ => false,
            };
            let same = held.key.is_some() && held.key == entry.key;
            let claimed = held.state == ledger::State::Open && held.attempts > 1;
            (same && in_doubt) || (claimed && !independent && held.touches(&entry))
        });
        if let Some(Row { entry: held, .. }) = held {
            return Err(LedgerError::KeyInDoubt { id: held.id, method: held.method.clone() });
        }
        let (place, revision) = (self.rows.len() as u64, entry.revision);
        self.places.insert(entry.id, place);
        self.rows.insert(place, Row { entry, claimed_by: None });
        Ok(revision)
    }

    fn claim(
        &mut self,
        owner: u128,
        id: EntryId,
        revision: u64,
        independent: bool,
    ) -> Result<u64, LedgerError> {
        self.grants(owner)?;
        let place = *self.places.get(&id).ok_or(LedgerError::Conflict(id))?;
        let mut claimed = self.row(id)?.entry.clone();
        let revision = claimed.claim(revision, SystemTime::now())?;
        let overtaken = self.rows.range(place + 1..).any(|(_, Row { entry: later, .. })| {
            later.touches(&claimed) && !matches!(later.state, ledger::State::NotLanded { .. })
        });
        if overtaken && !independent {
            return Err(LedgerError::Overtaken(id));
        }
        *self.row(id)? = Row { entry: claimed, claimed_by: Some(owner) };
        Ok(revision)
    }

    fn in_doubt(&mut self, owner: u128, bound: Duration) -> Vec<Entry> {
        let now = Instant::now();
        for (_, other) in self.owners.iter_mut().filter(|(id, _)| **id != owner) {
            if other.gone.is_none() && other.lease + bound < now {
                other.gone = Some(now);
            }
        }
        let gone = |who: u128| self.owners.get(&who).and_then(|owner| owner.gone);
        let listed = self.rows.values().filter_map(|Row { entry, claimed_by }| {
            // Whoever has claimed it may be about to replay it.
            let theirs = entry.id.owner();
            let gone = gone(theirs).and_then(|since| Some(since.max(gone(claimed_by.unwrap_or(theirs))?)));
            let listed = match entry.state {
                ledger::State::Open => gone.is_some() && theirs != owner,
                ledger::State::InDoubt { .. } => true,
                _ => false,
            };
            let mut entry = listed.then(|| entry.clone())?;
            entry.orphaned = gone;
            Some(entry)
        });
        listed.collect()
    }
}

/// A process's handle. There are many processes in this one: each is given ids of its own in the table.
#[derive(Clone)]
struct Handle(Arc<Process>);

fn this_run() -> &'static OnceLock<u128> {
    static RUN: OnceLock<u128> = OnceLock::new();
    &RUN
}

impl Handle {
    fn outside(&self, id: EntryId) -> EntryId {
        match this_run().get() {
            Some(run) if *run == id.owner() => of_owner(self.0.owner, id),
            _ => id,
        }
    }

    fn inside(&self, id: EntryId) -> EntryId {
        match this_run().get() {
            Some(run) if id.owner() == self.0.owner => of_owner(*run, id),
            _ => id,
        }
    }

    /// What the table does at some time, also when nobody waits for it, and what is heard of that.
    async fn step<T: Send + 'static>(
        &self,
        act: impl FnOnce(&mut Table) -> Result<T, LedgerError> + Send + 'static,
    ) -> Result<T, LedgerError> {
        let world = self.0.world.clone();
        let fails = world.plan.store_fails;
        let (before, after) = (world.wait(world.plan.store_late), world.wait(world.plan.store_late));
        let (lost, unheard, for_ever) = (world.fault(fails), world.fault(fails), world.pick(4) == 0);
        let table = world.table.clone();
        let (answer, answered) = oneshot::channel();
        tokio::spawn(async move {
            sleep(before).await;
            let done = match lost {
                false => act(&mut table.lock().unwrap()),
                true => Err(LedgerError::Unavailable("lost".into())),
            };
            sleep(after).await;
            let done = if unheard { Err(LedgerError::Unavailable("unheard".into())) } else { done };
            match done {
                Err(LedgerError::Unavailable(_)) if for_ever => pending().await,
                done => drop(answer.send(done)),
            }
        });
        answered.await.unwrap_or_else(|_| Err(LedgerError::Unavailable("no answer".into())))
    }

    /// What is heard of it, by our own names.
    fn heard(&self, error: LedgerError) -> LedgerError {
        match error {
            LedgerError::Conflict(id) => {
                let process = &self.0;
                let token = process.world.table.lock().unwrap().row(id).ok().map(|row| token(&row.entry));
                if id.owner() == process.owner
                    && let Some(token) = token
                {
                    let mut state = process.world.state.lock().unwrap();
                    state.said.entry(token).or_insert_with(Instant::now);
                }
                LedgerError::Conflict(self.inside(id))
            }
            LedgerError::Overtaken(id) => LedgerError::Overtaken(self.inside(id)),
            LedgerError::KeyInDoubt { id, method } => LedgerError::KeyInDoubt { id: self.inside(id), method },
            error => error,
        }
    }
}

fn of_owner(owner: u128, id: EntryId) -> EntryId {
    format!("{owner:032x}-{}", id.call()).parse().unwrap()
}

fn token(entry: &Entry) -> u32 {
    entry.method.parse().unwrap()
}

impl Ledger for Handle {
    async fn enter(&self, mut entry: Entry) -> Result<u64, LedgerError> {
        this_run().get_or_init(|| entry.id.owner());
        entry.id = self.outside(entry.id);
        let (owner, independent, token) = (self.0.owner, self.0.world.plan.conflict == 2, token(&entry));
        let entered = self.step(move |table| table.enter(owner, entry, independent)).await;
        self.0.world.log(format!("ledger: {token} entered: {entered:?}"));
        entered.map_err(|error| self.heard(error))
    }

    async fn settle(&self, id: EntryId, revision: u64, state: ledger::State) -> Result<u64, LedgerError> {
        let id = self.outside(id);
        let to = state.clone();
        let world = self.0.world.clone();
        let act = move |table: &mut Table| world.settle(&mut table.row(id)?.entry, revision, to);
        let settled = self.step(act).await;
        self.0.world.log(format!("ledger: process {} settles {id:?} {state:?}: {settled:?}", self.0.number));
        settled.map_err(|error| self.heard(error))
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let id = self.outside(id);
        let (owner, world) = (self.0.owner, self.0.world.clone());
        let act = move |table: &mut Table| {
            let claimed = table.claim(owner, id, revision, world.plan.conflict == 2)?;
            let token = token(&table.row(id)?.entry);
            world.state.lock().unwrap().order.push(Passed::Claimed(token));
            Ok(claimed)
        };
        let claimed = self.step(act).await;
        self.0.world.log(format!("ledger: process {} claims {id:?}: {claimed:?}", self.0.number));
        claimed.map_err(|error| self.heard(error))
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let (owner, plan) = (self.0.owner, &self.0.world.plan);
        let bound = ms(plan.deadline + LONGEST_STOP + 2 * plan.stall + plan.store_late * 2);
        let mut listed = self.step(move |table| Ok(table.in_doubt(owner, bound))).await?;
        listed.iter_mut().for_each(|entry| entry.id = self.inside(entry.id));
        Ok(listed)
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let (id, state) = (self.outside(id), ledger::State::Forgotten { by: by.to_owned() });
        let world = self.0.world.clone();
        let act = move |table: &mut Table| {
            let entry = &mut table.row(id)?.entry;
            let revision = entry.revision;
            world.settle(entry, revision, state).map(drop)
        };
        self.step(act).await.map_err(|error| self.heard(error))
    }

    fn abandon(&self, id: EntryId, state: ledger::State) {
        let (id, world, owner) = (self.outside(id), self.0.world.clone(), self.0.owner);
        if self.0.is_dead() || world.fault(world.plan.store_fails) {
            return;
        }
        world.log(format!("ledger: process {} hints {id:?} {state:?}", self.0.number));
        let notes = world.clone();
        let act = move |table: &mut Table| {
            let Ok(row) = table.row(id) else { return };
            if row.entry.state == ledger::State::Open && row.claimed_by.is_none_or(|by| by == owner) {
                let revision = row.entry.revision;
                let _ = notes.settle(&mut row.entry, revision, state);
            }
        };
        let late = world.wait(world.plan.store_late);
        match late.is_zero() {
            true => act(&mut world.table.lock().unwrap()),
            false => drop(tokio::spawn(async move {
                sleep(late).await;
                act(&mut world.table.lock().unwrap());
            })),
        }
    }
}

/// Renews its lease, as long as it runs.
async fn renew(process: Arc<Process>) {
    let (lease, owner, handle) = (ms(process.world.plan.lease), process.owner, process.handle());
    loop {
        let renewed = handle.step(move |table| {
            if let Some(owner) = table.owners.get_mut(&owner).filter(|owner| owner.gone.is_none()) {
                owner.lease = Instant::now() + lease;
            }
            Ok(())
        });
        let _ = timeout(lease / 3, renewed).await;
        sleep(lease / 4).await;
    }
}

// ===== Connections =====

#[derive(Default)]
struct Conn {
    number: u64,
    closed: AtomicBool,
    gone: AtomicBool,
    told: Notify,
}

impl World {
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
                world.log(format!("server {} is gone", conn.number));
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
struct Connector(Arc<Process>);

impl Service<()> for Connector {
    type Response = Connection;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Connection, BoxError>> + Send>>;
    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }
    fn call(&mut self, (): ()) -> Self::Future {
        let process = self.0.clone();
        Box::pin(async move {
            let world = process.world.clone();
            sleep(world.wait(1500)).await;
            if process.is_cut() || world.fault(8) {
                return Err("no".into());
            }
            let connection = process.connection();
            if world.fault(world.plan.dead) {
                world.close(&connection.1);
            }
            Ok(connection)
        })
    }
}

#[derive(Clone)]
struct Connection(Arc<Process>, Arc<Conn>);

impl Connection {
    fn is_closed(&self) -> bool {
        self.1.closed.load(Ordering::SeqCst) && self.0.world.plan.reconnect
    }
}

impl Service<Req> for Connection {
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

async fn read(connection: Connection, token: u32) -> Result<u32, CallError> {
    let Connection(process, conn) = &connection;
    let world = &process.world;
    if connection.is_closed() {
        return Err(closed(world, conn));
    }
    sleep(world.wait(300)).await;
    if process.is_cut() || world.fault(5) {
        pending::<()>().await;
    }
    if world.fault(5) {
        return Err(CallError::ambiguous("reset"));
    }
    let found = {
        let state = world.state.lock().unwrap();
        let get = |map: &HashMap<u32, u32>| map.get(&token).copied().unwrap_or_default();
        match (get(&state.done), get(&state.begun), get(&state.at_work)) {
            (1.., ..) => 3,
            (_, 1.., _) => 2,
            (.., 1..) => 1,
            _ => 0,
        }
    };
    // An answer is some time on its way.
    sleep(world.wait(300)).await;
    match connection.is_closed() {
        true => Err(closed(world, conn)),
        false => Ok(found),
    }
}

struct Frame {
    token: u32,
    /// `true` taken, `false` withdrawn.
    taken: Mutex<Option<bool>>,
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

type Replies = Option<oneshot::Sender<Result<u32, CallError>>>;

async fn write(connection: Connection, request: Req) -> Result<u32, CallError> {
    let Connection(process, conn) = connection.clone();
    let world = process.world.clone();
    let plan = world.plan.clone();
    let token = request.token;
    let activity = request.context().activity().cloned().filter(|_| plan.marks);
    if let Some(activity) = &activity
        && !activity.adopt()
    {
        return Err(CallError::not_sent("over"));
    }
    if connection.is_closed() {
        return Err(CallError::not_sent("closed").connection_lost());
    }
    let (until_at, deadline) = (request.context().attempt_until(), request.context().deadline().instant());
    let frame = Arc::new(Frame { token, taken: Mutex::new(None), activity, queues: plan.marks });
    let _guard = OnDrop(frame.clone());
    world.log(format!("write {token} handed over to {}", conn.number));
    let (reply, replied) = oneshot::channel();
    if !process.is_cut() {
        *world.state.lock().unwrap().queued.entry(token).or_default() += 1;
        if !frame.queues {
            process.notes_sent(token);
        }
        tokio::spawn(wire(connection.clone(), request.key.clone(), frame.clone(), reply));
    }
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

/// A frame's way to the server, as far as its process has to do with it; `false` if it does not arrive.
async fn goes_out(connection: Connection, frame: Arc<Frame>) -> bool {
    let Connection(process, conn) = &connection;
    let world = &process.world;
    if !frame.queues {
        return true;
    }
    if world.chance(25) {
        sleep(world.wait(world.plan.stall)).await;
    }
    {
        let mut taken = frame.taken.lock().unwrap();
        if *taken == Some(false) || connection.is_closed() || process.is_cut() {
            return false;
        }
        *taken = Some(true);
    }
    let marks = |late: Duration| {
        let Some(activity) = frame.activity.clone() else { return };
        drop(process.spawn(async move {
            sleep(late).await;
            activity.sent();
        }));
    };
    if world.plan.lie == Some(Lie::Early) {
        marks(Duration::ZERO);
    }
    if world.chance(15) {
        sleep(world.wait(world.plan.stall)).await;
        if connection.is_closed() || process.is_cut() {
            return false;
        }
    }
    world.log(format!("write {} is sent to {}", frame.token, conn.number));
    process.notes_sent(frame.token);
    match world.wait(world.plan.marks_late) {
        late if late.is_zero() => frame.activity.as_ref().iter().for_each(|activity| activity.sent()),
        late => marks(late),
    }
    true
}

async fn wire(
    connection: Connection,
    key: Option<String>,
    frame: Arc<Frame>,
    reply: oneshot::Sender<Result<u32, CallError>>,
) {
    let Connection(process, conn) = connection.clone();
    let (world, token) = (process.world.clone(), frame.token);
    let went = match process.is_dead() {
        true => Ok(false),
        false => process.spawn(goes_out(connection, frame)).await,
    };
    let went = went.unwrap_or(false);
    {
        let mut state = world.state.lock().unwrap();
        *state.queued.entry(token).or_default() -= 1;
        if went {
            *state.at_work.entry(token).or_default() += 1;
        }
    }
    if !went {
        return;
    }
    let plan = world.plan.clone();
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
    let mut reply = Some(reply);
    let result = match fate {
        Fate::Lands | Fate::LandsInParts | Fate::Lying503 => {
            let early = async {
                match answer != Reply::Given && world.chance(50) {
                    true => sleep(world.wait(2000)).await,
                    false => pending().await,
                }
            };
            let mut work = Box::pin(async {
                tokio::select! {
                    biased;
                    () = until(&conn.gone, &conn) => None,
                    said = lands(&world, token, key, fate, sent, lands_at) => Some(said),
                }
            });
            let said = tokio::select! {
                biased;
                said = &mut work => said,
                () = early => {
                    // The reply is lost before it lands.
                    lose(&world, &conn, answer, &mut reply);
                    work.await
                }
            };
            *world.state.lock().unwrap().at_work.entry(token).or_default() -= 1;
            match said {
                None => return,
                Some(Some(said)) => Err(CallError::answered(said)),
                Some(None) if fate == Fate::Lying503 => {
                    Err(CallError::evidence(Evidence::Unavailable, "503"))
                }
                Some(None) => Ok(token),
            }
        }
        fate => {
            *world.state.lock().unwrap().at_work.entry(token).or_default() -= 1;
            let after = world.wait(2000);
            Err(match fate {
                Fate::Busy429 => CallError::evidence(Evidence::TooManyRequests, "429").after(after),
                Fate::Busy503 => CallError::evidence(Evidence::Unavailable, "503").after(after),
                _ => CallError::answered("quota"),
            })
        }
    };
    sleep(world.wait(1500)).await;
    let how = match (fate, answer) {
        (Fate::NeverSeen, Reply::Given) => Reply::Lost,
        (Fate::Busy429 | Fate::Busy503 | Fate::Error, _) => Reply::Given,
        (_, answer) => answer,
    };
    match (how, reply.take()) {
        (Reply::Given, Some(reply)) => {
            let is_answer = result.is_ok();
            if reply.send(result).is_ok() && is_answer && process.number == token % plan.processes {
                world.state.lock().unwrap().answered.insert(token, Instant::now());
            }
        }
        (how, kept) => {
            reply = kept;
            lose(&world, &conn, how, &mut reply);
            if reply.is_some() {
                pending::<()>().await;
            }
        }
    }
}

/// The server does it; or says what its key says.
async fn lands(
    world: &World,
    token: u32,
    key: Option<String>,
    fate: Fate,
    sent: Instant,
    lands_at: Instant,
) -> Option<&'static str> {
    match fate {
        Fate::LandsInParts => sleep(lands_at.duration_since(sent) / 2).await,
        _ => sleep_until(lands_at).await,
    }
    {
        let mut state = world.state.lock().unwrap();
        if let Some(key) = key {
            let copies = state.keys.entry(key).or_default();
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
}

fn lose(world: &World, conn: &Arc<Conn>, how: Reply, reply: &mut Replies) {
    let error = match how {
        Reply::Reset => CallError::ambiguous("reset"),
        Reply::Closes if world.plan.reconnect => return world.close(conn),
        Reply::Closes => CallError::ambiguous("cut"),
        Reply::Given | Reply::Lost => return,
    };
    if let Some(reply) = reply.take() {
        let _ = reply.send(Err(error));
    }
}

// ===== Checks, and those who recover =====

const CHECK_PANICS: &str = "a check panics";

fn check(world: World) -> impl Fn(InDoubt<Req, u32>) -> Checked + Clone + Send + Sync {
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
                _ if world.plan.keyed && world.fault(30) => doubt.not_landed_deduplicated(ms(1_000_000)),
                _ => doubt.not_landed(),
            })
        })
    }
}

/// What the ledger says, if it says it soon.
async fn soon<T>(step: impl Future<Output = Result<T, LedgerError>>) -> Option<T> {
    timeout(ms(5000), step).await.ok()?.ok()
}

/// A process looks now and then for what is left to be settled.
async fn recovers(process: Arc<Process>) {
    let world = process.world.clone();
    for _ in 0..=world.pick(5) {
        sleep(world.wait(world.plan.looks)).await;
        let Some(entries) = soon(process.handle().in_doubt()).await else { continue };
        let left_out = if entries.len() < 10 { 30 } else { 90 };
        for entry in entries {
            if world.chance(left_out) {
                continue;
            }
            if world.chance(20) {
                sleep(world.wait(5_000)).await;
            }
            match world.pick(12) {
                0 => drop(soon(process.handle().forget(entry.id, "anna")).await),
                1 | 2 => settle_by_hand(&process, &entry).await,
                3..8 => replay_by_hand(&process, &entry).await,
                _ => drop(resolve(&process, &entry, world.wait(40_000) + ms(500)).await),
            }
        }
    }
}

async fn resolve(
    process: &Arc<Process>,
    entry: &Entry,
    within: Duration,
) -> Result<ledger::State, LedgerError> {
    let (world, token) = (process.world.clone(), token(entry));
    let reported = Arc::new(AtomicU64::new(0));
    let seen = reported.clone();
    let handle = process.handle();
    let mut resolve =
        Resolve::new(&handle, entry, request(token, Effect::Write)).within(within).on_event(move |event| {
            _ = matches!(event, Event::InDoubt(_)).then(|| seen.fetch_add(1, Ordering::Relaxed))
        });
    if let Some(quarantine) = world.plan.quarantine {
        resolve = resolve.quarantine(ms(quarantine));
    }
    let begun = Instant::now();
    let resolved = resolve.run_over(check(world.clone()), process.below()).await;
    world.log(format!("process {} resolves {token}: {resolved:?}", process.number));
    let late = begun.elapsed() > within + ms(5_001) && !process.was_stopped.load(Ordering::Relaxed);
    if late || reported.load(Ordering::Relaxed) != u64::from(resolved.is_ok()) {
        world.wrong(format!("write {token}: resolved in {:?}, {reported:?} reports", begun.elapsed()));
    }
    resolved.map(|resolved| resolved.state)
}

/// By somebody who knows.
async fn settle_by_hand(process: &Arc<Process>, entry: &Entry) {
    let token = token(entry);
    let state = {
        let state = process.world.state.lock().unwrap();
        let none = |map: &HashMap<u32, u32>| map.get(&token).is_none_or(|n| *n == 0);
        match (none(&state.begun), none(&state.at_work) && none(&state.queued)) {
            (false, _) => ledger::State::Landed { by: "anna".into() },
            (true, true) => {
                ledger::State::NotLanded { why: "she looked".into(), basis: FenceBasis::Declared }
            }
            (true, false) => return,
        }
    };
    soon(process.handle().settle(entry.id, entry.revision, state)).await;
}

/// It is claimed, looked for when nothing of its owner can land any more, and sent again.
async fn replay_by_hand(process: &Arc<Process>, entry: &Entry) {
    let (world, token) = (&process.world, token(entry));
    let (Some(orphaned), Some(quarantine)) = (entry.orphaned, world.plan.quarantine) else { return };
    let Some(revision) = soon(process.handle().claim(entry.id, entry.revision)).await else { return };
    sleep_until(orphaned + ms(quarantine)).await;
    let mut connection = process.connection();
    let found = timeout(ms(5000), connection.call(request(token, Effect::ReadOnly))).await;
    let state = match found {
        Ok(Ok(3)) => ledger::State::Landed { by: "bert".into() },
        Ok(Ok(0)) => {
            {
                let mut state = world.state.lock().unwrap();
                state.by_hand.insert(token);
            }
            let sent = connection.call(request(token, Effect::Write));
            match timeout(ms(5000), sent).await {
                Ok(Ok(_)) => ledger::State::Answered,
                _ => ledger::State::InDoubt { reason: "sent again".into() },
            }
        }
        _ => ledger::State::InDoubt { reason: "not found".into() },
    };
    soon(process.handle().settle(entry.id, revision, state)).await;
}

// ===== Calls =====

/// What became of a call.
#[derive(Debug)]
struct Told {
    token: u32,
    /// `None` if its caller went away.
    result: Option<Result<u32, CallError>>,
    late: bool,
    at: Instant,
    /// How many copies had been done then.
    then: u32,
}

async fn calls(process: Arc<Process>, stack: Boxed, token: u32) -> Told {
    let world = process.world.clone();
    let plan = world.plan.clone();
    let leaves = (world.pick(100) < plan.leaves)
        .then(|| (world.chance(50), world.pick(12), world.wait(plan.deadline)));
    sleep(world.wait(3000)).await;
    let start = Instant::now();
    let effect = if plan.idempotent { Effect::Idempotent } else { Effect::Write };
    world.state.lock().unwrap().order.push(Passed::Called(token));
    let call = stack.oneshot(request(token, effect));
    let result = match leaves {
        Some((true, polls, _)) => leave_after(call, polls).await,
        Some((false, _, at)) => timeout(at, call).await.ok(),
        None => Some(call.await),
    };
    let told = result.as_ref().map(|told| told.as_ref().map_err(ToString::to_string));
    world.log(format!("write {token} told {told:?}"));
    let late = start.elapsed() > ms(plan.deadline + 1) && !process.was_stopped.load(Ordering::Relaxed);
    let then = world.state.lock().unwrap().done.get(&token).copied().unwrap_or_default();
    Told { token, result, late, at: Instant::now(), then }
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

/// Many futures of one task. Each is polled when its own waker says so, which is a new one each time: an older one's word
/// does not count.
struct Together(Vec<(Option<Alone>, Arc<Woken>)>);

type Alone = Pin<Box<dyn Future<Output = ()> + Send>>;

struct Woken(AtomicBool, Arc<Mutex<Option<Waker>>>);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::SeqCst);
        let task = self.1.lock().unwrap().take();
        if let Some(task) = task {
            task.wake();
        }
    }
}

impl Future for Together {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let task = Arc::new(Mutex::new(Some(cx.waker().clone())));
        let mut left = false;
        for (future, woken) in &mut self.0 {
            let Some(going) = future else { continue };
            *woken.1.lock().unwrap() = Some(cx.waker().clone());
            if woken.0.swap(false, Ordering::SeqCst) {
                *woken = Arc::new(Woken(AtomicBool::new(false), task.clone()));
                let waker = Waker::from(woken.clone());
                if going.as_mut().poll(&mut Context::from_waker(&waker)).is_ready() {
                    *future = None;
                    continue;
                }
            }
            left = true;
        }
        if left { Poll::Pending } else { Poll::Ready(()) }
    }
}

// ===== A world =====

async fn fly(seed: u64, lie: Option<Lie>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let plan = Arc::new(plan(&mut rng, lie));
    let world = World {
        plan: plan.clone(),
        rng: Arc::new(Mutex::new(rng)),
        state: Arc::default(),
        table: Arc::default(),
        start: Instant::now(),
        conns: Arc::default(),
        calm: Arc::default(),
    };
    let told: Arc<Mutex<Vec<Told>>> = Arc::default();
    let processes: Vec<_> = (0..plan.processes).map(|number| Process::new(&world, number)).collect();
    let mut waited_for = Vec::new();
    for process in &processes {
        process.spawn(renew(process.clone()));
        let stack = process.stack();
        let mut together = Vec::new();
        for n in 0..plan.writes {
            let token = n * plan.processes + process.number;
            let (told, call) = (told.clone(), calls(process.clone(), stack.clone(), token));
            let call = async move {
                let it = call.await;
                told.lock().unwrap().push(it);
            };
            match plan.one_task {
                true => together.push(call),
                false => waited_for.push(process.spawn(call)),
            }
        }
        if plan.one_task {
            let one = |call| {
                let call: Alone = Box::pin(call);
                (Some(call), Arc::new(Woken(AtomicBool::new(true), Arc::default())))
            };
            waited_for.push(process.spawn(Together(together.into_iter().map(one).collect())));
        }
        waited_for.push(process.spawn(recovers(process.clone())));
        tokio::spawn(befalls(process.clone()));
    }
    for task in waited_for {
        match timeout(ms(2_000_000), task).await {
            Ok(Err(error)) if error.is_panic() => world.wrong(format!("a panic: {error}")),
            Ok(_) => {}
            Err(_) => world.wrong("a task hangs".into()),
        }
    }
    // The world comes to its end, and somebody settles what is left.
    sleep(ms(100_000)).await;
    let before: Vec<_> = {
        let table = world.table.lock().unwrap();
        table.rows.values().map(|row| row.entry.clone()).collect()
    };
    world.calm.store(true, Ordering::Relaxed);
    for process in &processes {
        process.crash();
        process.is_gone();
    }
    let last = Process::new(&world, plan.processes);
    let entries = last.handle().in_doubt().await.map_err(|error| error.to_string())?;
    for entry in entries {
        if let Err(error) = resolve(&last, &entry, ms(60_000)).await {
            world.wrong(format!("{}: {error}, and nobody else is there", entry.method));
        }
    }
    sleep(ms(30_000)).await;
    let found = judge(&world, &told.lock().unwrap(), &before);
    let state = world.state.lock().unwrap();
    match found.into_iter().chain(state.wrong.iter().cloned()).next() {
        None => Ok(()),
        Some(what) => Err(format!("seed {seed} {what}\n{plan:#?}\n{}", state.log.join("\n"))),
    }
}

/// What becomes of a process.
async fn befalls(process: Arc<Process>) {
    let world = process.world.clone();
    if world.plan.lie == Some(Lie::Gone) {
        sleep(world.wait(3_000)).await;
        return process.is_gone();
    }
    sleep(world.wait(if world.chance(50) { 4_000 } else { 20_000 })).await;
    match world.pick(7) {
        0 | 1 => {
            process.crash();
            sleep(world.wait(3000)).await;
            process.is_gone();
        }
        2 | 3 => {
            process.cut_off();
            sleep(world.wait(1000)).await;
            process.is_gone();
        }
        4 | 5 => process.stop(world.wait(LONGEST_STOP)).await,
        _ => {}
    }
}

fn judge(world: &World, told: &[Told], before: &[Entry]) -> Vec<String> {
    let plan = &world.plan;
    let mut wrong = Vec::new();
    let table = world.table.lock().unwrap();
    let state = world.state.lock().unwrap();
    let get = |map: &HashMap<u32, u32>, token: u32| map.get(&token).copied().unwrap_or_default();
    let entries: HashMap<u32, &Entry> =
        table.rows.values().map(|row| (token(&row.entry), &row.entry)).collect();
    let told: HashMap<u32, &Told> = told.iter().map(|told| (told.token, told)).collect();
    for token in 0..plan.writes * plan.processes {
        let mut say = |what: String| wrong.push(format!("write {token}: {what}"));
        let (begun, by_hand) = (get(&state.begun, token), state.by_hand.contains(&token));
        let entry = entries.get(&token).map(|entry| entry.state.clone());
        if begun > 1 && (by_hand || !plan.idempotent) {
            say(format!("{begun} copies"));
        }
        match &entry {
            None if begun > 0 => say("it was not entered".into()),
            Some(ledger::State::NotLanded { .. }) if begun > 0 => {
                say(format!("the ledger says {entry:?}"));
            }
            Some(ledger::State::Landed { .. }) if begun == 0 => say(format!("the ledger says {entry:?}")),
            Some(ledger::State::Open) => say("it was left open".into()),
            // What was applied in part stays.
            Some(ledger::State::InDoubt { .. })
                if plan.quarantine.is_some() && (begun == 0 || get(&state.done, token) > 0) =>
            {
                say(format!("the ledger says {entry:?} at the end of time"));
            }
            _ => {}
        }
        if let Some(what) = out_of_order(world, &state.order, token) {
            say(what);
        }
        if let Some(other) = over_a_doubt(world, &state.order, token) {
            say(format!("handed over while {other} with its key was in doubt"));
        }
        let (doubts, abandoned) = (get(&state.doubts, token), get(&state.abandoned, token));
        if doubts + abandoned > 1 {
            say(format!("reported {doubts}+{abandoned} times"));
        }
        // Of a process that has crashed nobody hears.
        let Some(Told { result, late, at, then, .. }) = told.get(&token) else { continue };
        let was = before.iter().find(|entry| entry.method == token.to_string()).map(|entry| &entry.state);
        if *late {
            say("late".into());
        }
        match result {
            None if begun > 0 && !by_hand && doubts + abandoned == 0 => {
                say("dropped, landed and not reported".into());
            }
            None => {}
            Some(Ok(_)) if *then == 0 => say("Ok and not there".into()),
            Some(Ok(_)) => {}
            Some(Err(error)) => {
                let outcome = error.outcome();
                let unknown =
                    outcome == Outcome::Unknown || (outcome == Outcome::Answered && error.may_have_landed());
                match outcome {
                    Outcome::NotDone
                        if begun > 0
                            && (!by_hand || state.said.get(&token).is_some_and(|said| said <= at)) =>
                    {
                        say(format!("{error}: not so"));
                    }
                    Outcome::DoneResultLost if *then == 0 => say(format!("{error}: not so")),
                    Outcome::NoAnswer => say(format!("{error}: of a write")),
                    Outcome::Answered if !unknown && begun > 0 && !by_hand => {
                        say(format!("{error}: and it has landed"));
                    }
                    _ => {}
                }
                // What is there when the call has its turn wins over any deadline; but that many of one task's see it.
                if state.answered.get(&token).is_some_and(|answered| answered < at) {
                    say(format!("{error}: and its answer had come"));
                }
                if unknown && doubts != 1 {
                    say(format!("{error}: reported {doubts} times"));
                }
                if unknown && was.is_none() {
                    say(format!("{error}: and the ledger says nothing"));
                }
            }
        }
    }
    wrong
}

/// What is wrong with the order in which a write was handed over.
fn out_of_order(world: &World, order: &[Passed], token: u32) -> Option<String> {
    let sent = order.iter().position(|passed| *passed == Passed::Sent(token))?;
    let replayed = order.iter().rposition(|passed| *passed == Passed::HandedOver(token))?;
    let between = order.get(sent..replayed)?;
    if !order[..replayed].contains(&Passed::Claimed(token)) {
        return Some("replayed without a claim".into());
    }
    // The order of writes of two processes is the ledger's affair.
    let same = |other| world.same_process(token, other);
    between.iter().find_map(|passed| match *passed {
        Passed::HandedOver(other) if other != token && same(other) && world.touches(token, other) => {
            Some(format!("replayed on top of {other}"))
        }
        _ => None,
    })
}

/// Which write of its process with its key was in doubt when that one was called, and still when it was handed over.
fn over_a_doubt(world: &World, order: &[Passed], token: u32) -> Option<u32> {
    let at = |what| order.iter().position(|passed| *passed == what);
    let called = at(Passed::Called(token)).filter(|_| world.plan.conflict == 1)?;
    let handed_over = at(Passed::HandedOver(token))?;
    order[..called].iter().find_map(|passed| match *passed {
        Passed::Doubtful(other) if world.same_process(token, other) && world.touches(token, other) => {
            at(Passed::Closed(other)).is_none_or(|closed| closed > handed_over).then_some(other)
        }
        _ => None,
    })
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
fn whatever_befalls_processes_with_one_ledger_nothing_lands_twice_and_what_is_said_is_so() {
    without_their_panics();
    let first = number("GOAROUND_FROM", 0);
    let found = fly_all(first..first + number("GOAROUND_WORLDS", 400), None, 3);
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}

#[test]
fn what_is_declared_falsely_of_them_is_found_out() {
    without_their_panics();
    for lie in [Lie::Late, Lie::Gone, Lie::Early] {
        let harm = ["copies", "the ledger says Some(NotLanded"];
        let finds =
            |what: &String| harm.iter().any(|harm| what.lines().next().unwrap_or_default().contains(harm));
        let found = (0..2_000).find(|seed| fly_all(*seed..seed + 1, Some(lie), 1).iter().any(finds));
        assert!(found.is_some(), "{lie:?}");
    }
}
