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
    ops::Deref,
    pin::Pin,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, SystemTime},
};

use goaround::{
    DeadlineLayer, Effect, Event, Outcome, Resolve,
    write_safety::{
        FenceBasis,
        ledger::{self, Entry, EntryId, Ledger, LedgerError},
    },
};
use tokio::{
    sync::oneshot,
    time::{Instant, sleep, sleep_until, timeout},
};
use tower::{Layer, Service, util::BoxCloneService};

mod lab;
#[path = "lab/worlds.rs"]
mod worlds;

use lab::ms;
use worlds::{
    Boxed, Called, Client, Conn, Connection, Frame, Options, Passed, Sender, State, check, count, request,
    seeds, wrong_in,
};

/// How long a process is stopped at most.
const LONGEST_STOP: u64 = 8_000;

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

#[derive(Debug)]
struct Plan {
    lie: Option<Lie>,
    options: Options,
    /// How late what was sent is marked, at most.
    marks_late: u64,
    processes: u32,
    /// Of each process.
    writes: u32,
    one_task: bool,
    store_fails: u32,
    store_late: u64,
    lease: u64,
    /// How long a frame is in the queue, and again on its way to its last byte, at most.
    stall: u64,
    /// How long a process waits at most until it looks for what is left.
    looks: u64,
}

fn plan(rng: &mut fastrand::Rng, lie: Option<Lie>) -> Plan {
    // That shows only where somebody looks soon, and not at what is not sent yet.
    let gone = lie == Some(Lie::Gone);
    let one_task = rng.u32(0..40) == 0;
    let mut options = Options { late: lie == Some(Lie::Late), ..Options::draw(rng) };
    if gone {
        options.quarantine = Some(rng.u64(200..400));
    }
    if one_task {
        (options.keys, options.max_checks) = (rng.u32(2..200), rng.usize(1..40));
    }
    Plan {
        lie,
        options,
        marks_late: if rng.bool() { 0 } else { rng.u64(0..3000) },
        processes: if one_task { 1 + rng.u32(0..2) } else { rng.u32(1..4) },
        writes: if one_task { rng.u32(140..260) } else { rng.u32(1..6) },
        one_task,
        store_fails: if rng.bool() { 0 } else { rng.u32(0..30) },
        store_late: if rng.bool() { 100 } else { rng.u64(0..3000) },
        lease: rng.u64(500..10_000),
        stall: if rng.bool() && !gone { 4_000 } else { rng.u64(0..30_000) },
        looks: rng.u64(300..if gone { 2_000 } else { 25_000 }),
    }
}

/// What is known of writes besides what the server and the layers say.
#[derive(Default)]
struct Notes {
    /// Frames that may still go.
    queued: HashMap<u32, u32>,
    /// When a success came to where it was still waited for.
    answered: HashMap<u32, Instant>,
    /// Replayed by another process.
    by_hand: HashSet<u32>,
    /// The ledger has told its owner that somebody else has it.
    said: HashMap<u32, Instant>,
    wrong: Vec<String>,
}

/// One as in `tests/worlds.rs`, and what it has besides.
#[derive(Clone)]
struct World {
    common: worlds::World,
    plan: Arc<Plan>,
    notes: Arc<Mutex<Notes>>,
    table: Arc<Mutex<Table>>,
}

impl Deref for World {
    type Target = worlds::World;
    fn deref(&self) -> &worlds::World {
        &self.common
    }
}

impl World {
    fn wrong(&self, what: String) {
        self.log(format!("WRONG: {what}"));
        self.notes.lock().unwrap().wrong.push(what);
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

    fn stack(self: &Arc<Self>) -> Boxed {
        let process = self.clone();
        let sink = move |event: Event<'_>| {
            if !process.is_dead() {
                process.world.state.lock().unwrap().hears(event);
            }
        };
        let layer = self.world.layer().ledger(self.handle());
        let deadline = DeadlineLayer::new(ms(self.world.options.deadline)).on_event(sink);
        BoxCloneService::new(deadline.layer(layer.layer(self.world.notes(self.below()))))
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
                    let mut notes = process.world.notes.lock().unwrap();
                    notes.said.entry(token).or_insert_with(Instant::now);
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
        let (owner, independent, token) = (self.0.owner, self.0.world.options.conflict == 2, token(&entry));
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
            let claimed = table.claim(owner, id, revision, world.options.conflict == 2)?;
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
        let bound = ms(plan.options.deadline + LONGEST_STOP + 2 * plan.stall + plan.store_late * 2);
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

impl Client for Arc<Process> {
    fn world(&self) -> &worlds::World {
        &self.world
    }

    fn is_cut(&self) -> bool {
        let now = self.now.lock().unwrap();
        now.dead || now.cut
    }

    fn has(&self, conn: &Arc<Conn>) {
        self.conns.lock().unwrap().push(conn.clone());
    }

    fn send(&self, over: Connection<Self>, frame: Arc<Frame>, reply: Sender) {
        if self.is_cut() {
            return;
        }
        let token = frame.put.token;
        *self.world.notes.lock().unwrap().queued.entry(token).or_default() += 1;
        if !frame.queues {
            self.notes_sent(token);
        }
        tokio::spawn(wire(over, frame, reply));
    }
}

/// A frame's way to the server, as far as its process has to do with it; `false` if it does not arrive.
async fn goes_out(connection: Connection<Arc<Process>>, frame: Arc<Frame>) -> bool {
    let Connection(process, conn) = &connection;
    let world = &process.world;
    if !frame.queues {
        return true;
    }
    if world.chance(25) {
        sleep(world.wait(world.plan.stall)).await;
    }
    if connection.is_closed() || process.is_cut() || !frame.take() {
        return false;
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
    world.log(format!("write {} is sent to {}", frame.put.token, conn.number));
    process.notes_sent(frame.put.token);
    match world.wait(world.plan.marks_late) {
        late if late.is_zero() => frame.sent(),
        late => marks(late),
    }
    true
}

async fn wire(connection: Connection<Arc<Process>>, frame: Arc<Frame>, reply: Sender) {
    let Connection(process, conn) = connection.clone();
    let (world, token) = (&process.world, frame.put.token);
    let went = match process.is_dead() {
        true => false,
        false => process.spawn(goes_out(connection, frame.clone())).await.unwrap_or(false),
    };
    *world.notes.lock().unwrap().queued.entry(token).or_default() -= 1;
    if went
        && world.serves(&conn, &frame.put, Instant::now(), reply).await
        && process.number == token % world.plan.processes
    {
        world.notes.lock().unwrap().answered.insert(token, Instant::now());
    }
}

// ===== Those who recover =====

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
    if let Some(quarantine) = world.options.quarantine {
        resolve = resolve.quarantine(ms(quarantine));
    }
    let begun = Instant::now();
    let resolved = resolve.run_over(check(world.common.clone()), process.below()).await;
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
        let (state, notes) = (process.world.state.lock().unwrap(), process.world.notes.lock().unwrap());
        let none = |of| count(of, token) == 0;
        match (none(&state.begun), none(&state.at_work) && none(&notes.queued)) {
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
    let (Some(orphaned), Some(quarantine)) = (entry.orphaned, world.options.quarantine) else { return };
    let Some(revision) = soon(process.handle().claim(entry.id, entry.revision)).await else { return };
    sleep_until(orphaned + ms(quarantine)).await;
    let mut connection = process.connection();
    let found = timeout(ms(5000), connection.call(request(token, Effect::ReadOnly))).await;
    let state = match found {
        Ok(Ok(3)) => ledger::State::Landed { by: "bert".into() },
        Ok(Ok(0)) => {
            world.notes.lock().unwrap().by_hand.insert(token);
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

async fn calls(process: Arc<Process>, stack: Boxed, token: u32) -> Called {
    let mut called = process.world.common.clone().call(stack, token).await;
    called.late &= !process.was_stopped.load(Ordering::Relaxed);
    called
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
    let common = worlds::World::new(plan.options.clone(), rng);
    let world = World { common, plan: plan.clone(), notes: Arc::default(), table: Arc::default() };
    let called: Arc<Mutex<Vec<Called>>> = Arc::default();
    let processes: Vec<_> = (0..plan.processes).map(|number| Process::new(&world, number)).collect();
    let mut waited_for = Vec::new();
    for process in &processes {
        process.spawn(renew(process.clone()));
        let stack = process.stack();
        let mut together = Vec::new();
        for n in 0..plan.writes {
            let token = n * plan.processes + process.number;
            let (called, call) = (called.clone(), calls(process.clone(), stack.clone(), token));
            let call = async move {
                let it = call.await;
                called.lock().unwrap().push(it);
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
    let found = judge(&world, &called.lock().unwrap(), &before);
    let (state, notes) = (world.state.lock().unwrap(), world.notes.lock().unwrap());
    match found.iter().chain(&notes.wrong).next() {
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

fn judge(world: &World, called: &[Called], before: &[Entry]) -> Vec<String> {
    let (plan, options) = (&world.plan, &world.options);
    let mut wrong = Vec::new();
    let table = world.table.lock().unwrap();
    let (state, notes) = (world.state.lock().unwrap(), world.notes.lock().unwrap());
    let entries: HashMap<u32, &Entry> =
        table.rows.values().map(|row| (token(&row.entry), &row.entry)).collect();
    let called: HashMap<u32, &Called> = called.iter().map(|called| (called.token, called)).collect();
    for token in 0..plan.writes * plan.processes {
        let mut say = |what: String| wrong.push(format!("write {token}: {what}"));
        let (begun, by_hand) = (count(&state.begun, token), notes.by_hand.contains(&token));
        let entry = entries.get(&token).map(|entry| entry.state.clone());
        if begun > 1 && (by_hand || !options.idempotent) {
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
                if options.quarantine.is_some() && (begun == 0 || count(&state.done, token) > 0) =>
            {
                say(format!("the ledger says {entry:?} at the end of time"));
            }
            _ => {}
        }
        if let Some(what) = out_of_order(world, &state, token) {
            say(what);
        }
        if let Some(other) = over_a_doubt(world, &state.order, token) {
            say(format!("handed over while {other} with its key was in doubt"));
        }
        let (doubts, abandoned) = (count(&state.doubts, token), count(&state.abandoned, token));
        if doubts + abandoned > 1 {
            say(format!("reported {doubts}+{abandoned} times"));
        }
        // Of a process that has crashed nobody hears.
        let Some(called) = called.get(&token) else { continue };
        // A copy of somebody else's is not its affair, but for one of which the ledger had told it.
        called.wrong(if by_hand { 0 } else { begun }, doubts, abandoned).into_iter().for_each(&mut say);
        let Some(Err(error)) = &called.told else { continue };
        let said = by_hand && notes.said.get(&token).is_some_and(|said| *said <= called.at);
        if error.outcome() == Outcome::NotDone && begun > 0 && said {
            say(format!("{error}: not so"));
        }
        // What is there when the call has its turn wins over any deadline; but that many of one task's see it.
        if notes.answered.get(&token).is_some_and(|answered| *answered < called.at) {
            say(format!("{error}: and its answer had come"));
        }
        if called.in_doubt() && !before.iter().any(|entry| entry.method == token.to_string()) {
            say(format!("{error}: and the ledger says nothing"));
        }
    }
    wrong
}

/// What is wrong with the order in which a write was handed over.
fn out_of_order(world: &World, state: &State, token: u32) -> Option<String> {
    let replay = state.replay_of(token)?;
    if !state.order[..replay.end].contains(&Passed::Claimed(token)) {
        return Some("replayed without a claim".into());
    }
    // The order of writes of two processes is the ledger's affair.
    let touches = |other| world.same_process(token, other) && world.options.touches(token, other);
    state.overwritten_by(token, touches).map(|other| format!("replayed on top of {other}"))
}

/// Which write of its process with its key was in doubt when that one was called, and still when it was handed over.
fn over_a_doubt(world: &World, order: &[Passed], token: u32) -> Option<u32> {
    let at = |what| order.iter().position(|passed| *passed == what);
    let called = at(Passed::Called(token)).filter(|_| world.options.conflict == 1)?;
    let handed_over = at(Passed::HandedOver(token))?;
    order[..called].iter().find_map(|passed| match *passed {
        Passed::Doubtful(other)
            if world.same_process(token, other) && world.options.touches(token, other) =>
        {
            at(Passed::Closed(other)).is_none_or(|closed| closed > handed_over).then_some(other)
        }
        _ => None,
    })
}

#[test]
fn whatever_befalls_processes_with_one_ledger_nothing_lands_twice_and_what_is_said_is_so() {
    let found: Vec<_> = wrong_in(seeds(400), |seed| fly(seed, None)).take(3).collect();
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}

#[test]
fn what_is_declared_falsely_of_them_is_found_out() {
    for lie in [Lie::Late, Lie::Gone, Lie::Early] {
        let harm = ["copies", "the ledger says Some(NotLanded"];
        let finds =
            |what: &String| harm.iter().any(|harm| what.lines().next().unwrap_or_default().contains(harm));
        let found = wrong_in(0..2_000, |seed| fly(seed, Some(lie))).find(finds);
        assert!(found.is_some(), "{lie:?}");
    }
}
