//! The world of one seed: servers that keep when each write was applied, what becomes of each message, and
//! what was seen. Everything that is left to chance is drawn from the seed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    future::poll_fn,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError, Weak,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    time::{Duration, SystemTime},
};

use fastrand::Rng;
use goaround::CallId;
use tokio::time::{Instant, sleep, sleep_until};

use crate::{
    judge::{Told, Wrong},
    late::Late,
    ledger::Book,
};

/// Nothing takes effect later than this after its last byte, in milliseconds: the truth about the servers.
pub const LANDS_WITHIN: u64 = 4_000;

/// How long a message takes at most from its hand-over, in milliseconds, also while the machine sleeps.
const LONGEST_WAY: u64 = 100_000;

/// Tokens of the calls that see whether everything works again.
pub const CANARIES: u32 = 1_000;

/// In how many of a thousand worlds with a database the ledger is in a file: they take several times as long as others.
const WITH_A_CRASH: u32 = 50;
const WITHOUT_ONE: u32 = 5;

pub fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

// ===== What a run is to be =====

/// What is changed about the truth, to see whether it is noticed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Lies {
    /// Not a lie: what the world has more of than others. Where it is nothing the seed decides.
    pub favours: Favours,
    /// The quarantine that is declared is shorter than what the servers need.
    pub short_quarantine: bool,
    /// Effects are declared to end with a process that leaves some behind.
    pub exit_ends_nothing: bool,
    /// The check says that it did not land, for a reason of its own, whenever it finds nothing.
    pub because: bool,
    /// Writes that touch each other are declared independent.
    pub independent: bool,
    /// A transport that keeps copies is declared exact.
    pub exact_writes: bool,
    /// The evidence that is trusted is sent after the fact.
    pub trusted_evidence: bool,
    /// What is read is older than what was written.
    pub lagging_reads: bool,
    /// What is declared to touch the same thing does not, and what touches it is not declared.
    pub wrong_key: bool,
    /// Writes that are not idempotent are declared to be.
    pub idempotent: bool,
    /// Servers keep keys for less than is declared.
    pub keys_forgotten: bool,
    /// The wall clock stands still while the machine sleeps.
    pub clock_stands: bool,
    /// A connection that holds requests up marks nothing.
    pub unmarked: bool,
    /// A connection says of all that it did not send that nothing was sent.
    pub says_not_sent: bool,
    /// After a crash the ledger's file is another one.
    pub forgets_doubts: bool,
    /// A crash takes from the ledger's file what was said to be stored for good.
    pub loses_synced: bool,
}

impl Lies {
    fn of_a_file(self) -> bool {
        self.forgets_doubts || self.loses_synced
    }
}

/// What a world has more of than others, for guards that little else needs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Favours {
    #[default]
    Nothing,
    /// Servers that know what was there when they started, beside others that are not gone yet.
    Overlap,
    /// Keys that servers keep as long as is declared and no longer, and machines that sleep.
    Windows,
    /// Connects that take longer than attempts.
    SlowConnects,
    /// Writes that touch each other and wait for connections, and callers that have their turns late.
    LateTurns,
}

/// What servers there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// Their errors say what became of a request.
    Meaning,
    /// Their errors mean nothing but that they refuse.
    Plain,
    /// The same, and their tools have annotations.
    Annotated,
}

/// What the seed says of its world.
#[derive(Debug)]
pub struct Plan {
    pub lies: Lies,
    /// Whether connections mark what became of a request's bytes.
    pub marks: bool,
    /// Whether a process's effects end with it.
    pub ends_effects: bool,
    pub declares_it: bool,
    /// Whether a process sees what was there when it started, and its own writes, and nothing else.
    pub cached: bool,
    pub quarantine: Option<u64>,
    /// Whether there is a check before the fence, too.
    pub looks_first: bool,
    pub favours: Favours,
    pub independent: bool,
    /// Whether there is no check.
    pub refuses: bool,
    pub trusts: bool,
    /// Whether the transport keeps copies of what it was offered.
    pub leaks: bool,
    pub silence_probe: bool,
    pub few_in_flight: bool,
    /// Whether writes of one key touch each other and no others.
    pub keys: bool,
    /// Whether writes that are idempotent are replayed without a check.
    pub replays_idempotent: bool,
    /// How long servers keep the keys of writes.
    pub keeps_keys: Option<u64>,
    /// Whether their answers to a key that they have are read.
    pub reads_answers: bool,
    /// Whether the ledger is a database.
    pub store: bool,
    /// Whether the ledger in a file is, too.
    pub on_file: bool,
    /// When the client's process crashes.
    pub crashes: Option<u64>,
    /// When the machine sleeps, and for how long.
    pub sleeps: Option<(u64, u64)>,
    /// When the wall clock is set, and by how much.
    pub clock_is_set: Option<(u64, i64)>,
    /// Whether the errors of servers mean nothing but that they refuse.
    pub plain: bool,
    /// Whether what a tool does is what its server's annotations say, which a restart may change.
    pub annotated: bool,
    /// Whether some of the callers have their turns late.
    pub late: Option<Late>,
    /// What happens how often, in percent.
    pub faults: Faults,
}

#[derive(Debug)]
pub struct Faults {
    /// Of one message, in the link.
    pub stall: u32,
    pub cut: u32,
    pub refuse_write: u32,
    /// Of one write, in the server; the rest goes well.
    pub fates: [u32; FATES],
    /// Of a connect.
    pub connect_fails: u32,
    pub connect_hangs: u32,
    /// A process ends by itself.
    pub dies: u32,
    /// A process says nothing any more.
    pub falls_silent: u32,
    pub check_fails: u32,
    /// Of one read.
    pub read_fails: u32,
    /// Of one step of the ledger.
    pub ledger_fails: u32,
}

/// What a server does with a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Applied and answered.
    Done,
    Lost,
    ReplyLost,
    /// Applied, and the process closes before the answer.
    ClosesAfter,
    /// The process closes its output first, and goes on.
    ClosesBefore,
    /// Applied, and the answer comes when the connection is closed.
    ReplyTooLate,
    /// Refused before it was looked at.
    RateLimit,
    /// A gateway gave up, on a server that does it.
    UnavailableDone,
    UnavailableNot,
    SessionUnknown,
    Error,
    ResetDone,
    ResetNot,
}

const ALL_FATES: [Fate; FATES] = [
    Fate::Lost,
    Fate::ReplyLost,
    Fate::ClosesAfter,
    Fate::ClosesBefore,
    Fate::ReplyTooLate,
    Fate::RateLimit,
    Fate::UnavailableDone,
    Fate::UnavailableNot,
    Fate::SessionUnknown,
    Fate::Error,
    Fate::ResetDone,
    Fate::ResetNot,
];
const FATES: usize = 12;

impl Fate {
    fn lands(self) -> bool {
        matches!(
            self,
            Fate::Done
                | Fate::ReplyLost
                | Fate::ClosesAfter
                | Fate::ClosesBefore
                | Fate::ReplyTooLate
                | Fate::UnavailableDone
                | Fate::ResetDone
        )
    }
}

impl Fate {
    /// What a server does instead whose errors are answers and nothing else.
    fn in_plain_words(self) -> Self {
        match self {
            Fate::UnavailableDone | Fate::ResetDone => Fate::ReplyLost,
            Fate::UnavailableNot | Fate::ResetNot | Fate::SessionUnknown | Fate::RateLimit => Fate::Error,
            other => other,
        }
    }
}

/// What a server says about a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reply {
    Done,
    Count(u32),
    RateLimit(Duration),
    Unavailable,
    SessionUnknown,
    Error,
    Reset,
    /// It was applied before.
    Exists,
    /// It is being processed.
    InFlight(Duration),
    /// Nothing at all.
    Silence,
}

/// Whether that seed's client crashes with its ledger in a file.
pub fn crashes_on_file(seed: u64) -> bool {
    let plan = Plan::drawn(seed, &mut Rng::with_seed(seed), Lies::default(), Sort::Meaning);
    plan.on_file && plan.crashes.is_some()
}

impl Plan {
    fn drawn(seed: u64, rng: &mut Rng, lies: Lies, sort: Sort) -> Self {
        let mut plan = Self::new(rng, lies, sort, Late::drawn(seed, lies));
        plan.on_file = plan.store && plan.is_on_file(seed);
        plan
    }

    fn new(rng: &mut Rng, lies: Lies, sort: Sort, late: Option<Late>) -> Self {
        let ends_effects = rng.bool();
        let mut percent = |most: u32| if rng.bool() { 0 } else { rng.u32(0..=most) };
        let mut fates = [0; FATES];
        fates.iter_mut().for_each(|fate| *fate = percent(14));
        let faults = Faults {
            stall: percent(60),
            cut: percent(25),
            refuse_write: percent(10),
            fates,
            connect_fails: percent(40),
            connect_hangs: percent(10),
            dies: percent(60),
            falls_silent: percent(10),
            check_fails: percent(40),
            read_fails: percent(40),
            ledger_fails: percent(25),
        };
        let quarantine = (rng.u32(0..100) < 65).then_some(LANDS_WITHIN + 1);
        let leaks = rng.u32(0..100) < 30;
        let independent = (rng.u32(0..100) < 40 || lies.independent) && !lies.wrong_key && !lies.of_a_file();
        let keeps_keys = match lies.keys_forgotten || lies.clock_stands {
            true => Some(30_000),
            false => (rng.u32(0..100) < 25).then(|| [8_000, 25_000, 120_000][rng.usize(0..3)]),
        };
        let store = rng.u32(0..100) < 40 || lies.of_a_file();
        let crashes = (store && rng.u32(0..100) < 20) || lies.of_a_file();
        let crashes = crashes.then(|| rng.u64(500..12_000));
        let sleeps = rng.u32(0..100) < 20 || lies.clock_stands;
        let sleeps = sleeps.then(|| (rng.u64(500..15_000), rng.u64(1_000..60_000)));
        let clock_is_set = rng.u32(0..100) < 20 && !lies.clock_stands;
        let clock_is_set = clock_is_set.then(|| (rng.u64(0..15_000), rng.i64(-100_000..100_000)));
        let mut plan = Self {
            favours: lies.favours,
            lies,
            marks: rng.bool() && !lies.unmarked,
            ends_effects: ends_effects && !lies.exit_ends_nothing,
            declares_it: (ends_effects && rng.u32(0..100) < 90) || lies.exit_ends_nothing,
            // What is read must not be older than the write: a quarantine alone does not see to that.
            cached: ends_effects && quarantine.is_none() && rng.bool(),
            quarantine: match lies.short_quarantine {
                true => Some(LANDS_WITHIN / 20),
                false => quarantine,
            },
            looks_first: rng.u32(0..100) < 40,
            independent,
            keys: (rng.u32(0..100) < 50 && !independent) || lies.wrong_key || lies.of_a_file(),
            replays_idempotent: rng.u32(0..100) < 20 || lies.idempotent,
            keeps_keys,
            reads_answers: rng.bool(),
            store,
            on_file: false,
            crashes,
            sleeps,
            clock_is_set,
            refuses: rng.u32(0..100) < 8,
            trusts: rng.bool() || lies.trusted_evidence,
            leaks: leaks || lies.exact_writes,
            silence_probe: rng.bool(),
            few_in_flight: rng.u32(0..100) < 5,
            plain: sort != Sort::Meaning,
            annotated: sort == Sort::Annotated,
            late,
            faults,
        };
        if lies == Lies::default() {
            plan.favours = match rng.u32(0..100) {
                0..4 => Favours::Overlap,
                4..10 => Favours::Windows,
                10..14 => Favours::SlowConnects,
                _ => Favours::Nothing,
            };
            if plan.favours == Favours::Nothing && plan.late.is_some_and(|late| late.favoured) {
                plan.favours = Favours::LateTurns;
            }
        }
        plan.favour(rng);
        plan
    }

    /// Whether its ledger is in a file, too. Drawn apart from everything else, so that other worlds are what they were.
    fn is_on_file(&self, seed: u64) -> bool {
        let often = if self.crashes.is_some() { WITH_A_CRASH } else { WITHOUT_ONE };
        Rng::with_seed(seed ^ 0x00f1_1e00).u32(0..1_000) < often || self.lies.of_a_file()
    }

    fn favour(&mut self, rng: &mut Rng) {
        match self.favours {
            Favours::Nothing => {}
            Favours::Overlap => {
                (self.cached, self.ends_effects, self.declares_it, self.refuses) = (true, true, true, false);
                (self.quarantine, self.keeps_keys, self.independent, self.keys) = (None, None, true, false);
                (self.faults.connect_hangs, self.faults.stall) = (0, 0);
                self.faults.fates[3] = 40; // ClosesBefore
                self.faults.read_fails = 20;
            }
            Favours::Windows => {
                let asleep = rng.u64(5_000..40_000);
                (self.keeps_keys, self.sleeps) =
                    (Some(rng.u64(3_000..20_000)), Some((rng.u64(500..8_000), asleep)));
                (self.independent, self.keys, self.quarantine, self.clock_is_set) = (true, false, None, None);
                if self.lies == (Lies { favours: self.lies.favours, ..Lies::default() })
                    && rng.u32(0..100) < 30
                {
                    // Not both: a clock that is set back by as much as the machine slept shows nothing.
                    (self.clock_is_set, self.sleeps) =
                        (Some((rng.u64(500..8_000), rng.i64(-100_000..0))), None);
                }
                // What is handed over arrives at once.
                (self.faults.stall, self.faults.cut, self.faults.refuse_write) = (0, 0, 0);
                self.faults.fates = [0, 40, rng.u32(0..10), rng.u32(0..10), 0, 5, 0, 0, 0, 5, 5, 5];
            }
            Favours::SlowConnects => {
                (self.marks, self.cached, self.independent, self.keys) = (false, false, true, false);
                (self.quarantine, self.refuses) = (Some(LANDS_WITHIN + 1), false);
                (self.faults.connect_hangs, self.faults.connect_fails, self.faults.check_fails) = (0, 0, 0);
            }
            Favours::LateTurns => {
                (self.cached, self.independent, self.refuses) = (false, false, false);
                self.quarantine = Some(LANDS_WITHIN + 1);
                (self.faults.connect_hangs, self.faults.connect_fails, self.faults.check_fails) = (0, 0, 0);
            }
        }
    }
}

// ===== What is there, and what was seen =====

#[derive(Clone)]
pub struct World(Arc<Inner>);

struct Inner {
    plan: Plan,
    start: Instant,
    state: Mutex<State>,
}

pub struct State {
    pub rng: Rng,
    applied: Vec<Applied>,
    /// What reached a server, in its order.
    arrived: Vec<Arrived>,
    /// The hand-overs of writes to connections, in their order, where they are seen.
    handed: Vec<(u32, u64)>,
    /// Counts what happens, so that there is an order where the time is the same.
    now: u64,
    pub calls: BTreeMap<u32, Seen>,
    pub tokens: BTreeMap<CallId, u32>,
    /// What was asked for and found out.
    pub read: BTreeSet<u32>,
    /// The writes that a server answered to which they were reads.
    pub answered_as_read: BTreeSet<u32>,
    /// What was asked for, once for each message.
    asked: Vec<u32>,
    /// How many messages there may be of one read.
    pub most_reads: u32,
    /// The writes of which a check found nothing.
    pub found_absent: BTreeSet<u32>,
    /// The write whose answer is lost, though everything else goes well.
    pub loses: Option<u32>,
    pub book: Book,
    /// Which run of the client entered a write.
    pub runs: BTreeMap<CallId, u32>,
    pub claimed: BTreeSet<CallId>,
    /// The keys that servers got, when they got each first, and whether its write was applied.
    keys: BTreeMap<String, (Duration, bool)>,
    processes: Vec<Process>,
    /// How many connects are under way.
    connects: u32,
    /// Those of the calls.
    wakers: Vec<Weak<Woken>>,
    pub wrong: Vec<Wrong>,
    pub covered: u128,
    history: Option<String>,
    /// Nothing goes wrong any more.
    calm: bool,
    pub retries_allowed: u32,
    pub retries_made: u32,
}

#[derive(Clone, Copy)]
struct Applied {
    token: u32,
    process: usize,
    at: Instant,
}

#[derive(Clone, Copy)]
struct Arrived {
    token: u32,
    /// When it was handed to the connection, at the latest.
    handed: u64,
    /// And at the earliest.
    queued: u64,
}

/// What is known of a call.
#[derive(Default)]
pub struct Seen {
    pub is_write: bool,
    pub is_idempotent: bool,
    /// When its call was over, and nobody knew.
    pub in_doubt: Option<u64>,
    /// Whether it was sent again, as another call, after it was found not to have landed.
    pub again: bool,
    /// Whether its caller crashed.
    pub crashed: bool,
    /// When it was made, by the count of what happens.
    pub begun: u64,
    /// Whether it may go later than it was given to a connection.
    pub goes_when_polled: bool,
    /// When its caller was told that it is done.
    pub acknowledged: Option<u64>,
    pub reports: Reports,
    pub told: Told,
    pub started: bool,
    pub may_replay: bool,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Reports {
    pub calls: u32,
    pub doubts: u32,
    pub abandoned: u32,
    /// Whether what was abandoned was answered before, so that its key is free.
    pub answered: bool,
}

/// Adds to the history, if there is one.
macro_rules! note {
    ($world:expr, $($what:tt)*) => { $world.note(|| format!($($what)*)) };
}
pub(crate) use note;

impl World {
    pub fn new(seed: u64, lies: Lies, sort: Sort, record: bool) -> Self {
        let mut rng = Rng::with_seed(seed);
        let plan = Plan::drawn(seed, &mut rng, lies, sort);
        let state = State {
            rng: rng.fork(),
            applied: Vec::new(),
            arrived: Vec::new(),
            handed: Vec::new(),
            now: 0,
            calls: BTreeMap::new(),
            tokens: BTreeMap::new(),
            read: BTreeSet::new(),
            answered_as_read: BTreeSet::new(),
            asked: Vec::new(),
            most_reads: 0,
            found_absent: BTreeSet::new(),
            loses: None,
            book: if plan.on_file { Book::on_file(seed, lies) } else { Book::default() },
            runs: BTreeMap::new(),
            claimed: BTreeSet::new(),
            keys: BTreeMap::new(),
            processes: Vec::new(),
            connects: 0,
            wakers: Vec::new(),
            wrong: Vec::new(),
            covered: 0,
            history: record.then(String::new),
            calm: false,
            retries_allowed: 0,
            retries_made: 0,
        };
        let world = Self(Arc::new(Inner { plan, start: Instant::now(), state: Mutex::new(state) }));
        note!(world, "{:?}", world.plan());
        world
    }

    pub fn lock(&self) -> MutexGuard<'_, State> {
        // What panicked is reported with what was seen until then.
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn plan(&self) -> &Plan {
        &self.0.plan
    }

    /// How many hold this world.
    pub fn holders(&self) -> usize {
        Arc::strong_count(&self.0)
    }

    pub fn note(&self, what: impl FnOnce() -> String) {
        let mut state = self.lock();
        if let Some(history) = &mut state.history {
            let _ = writeln!(history, "{:>9.3} {}", self.0.start.elapsed().as_secs_f64(), what());
        }
    }

    pub fn history(&self) -> String {
        self.lock().history.clone().unwrap_or_default()
    }

    pub fn chance(&self, percent: u32) -> bool {
        let mut state = self.lock();
        state.rng.u32(0..100) < percent
    }

    /// Whether something goes wrong that goes wrong so often.
    pub fn fault(&self, percent: u32) -> bool {
        let mut state = self.lock();
        percent > 0 && state.rng.u32(0..100) < percent && !state.calm
    }

    /// Often short, sometimes long.
    pub fn wait(&self, most: u64) -> Duration {
        let mut state = self.lock();
        let most = if state.calm { 1 } else { most };
        let most = if state.rng.bool() { most } else { most / 50 + 1 };
        ms(state.rng.u64(0..=most))
    }

    pub fn cover(&self, branch: Branch) {
        self.lock().covered |= 1 << branch as u64;
    }

    pub fn wrong(&self, wrong: Wrong) {
        note!(self, "WRONG: {wrong:?}");
        self.lock().wrong.push(wrong);
    }

    /// How often that write took effect.
    pub fn effects(&self, token: u32) -> u32 {
        self.lock().applied.iter().filter(|applied| applied.token == token).count() as u32
    }

    /// How many messages of that call reached a server.
    pub fn arrivals(&self, token: u32) -> usize {
        self.lock().arrived.iter().filter(|arrived| arrived.token == token).count()
    }

    /// How many messages of that read reached a server.
    pub fn asked(&self, token: u32) -> u32 {
        self.lock().asked.iter().filter(|asked| **asked == token).count() as u32
    }

    fn is_calm(&self) -> bool {
        self.lock().calm
    }

    /// From now on everything goes well.
    pub fn calm_down(&self) {
        let silent: Vec<_> = {
            let mut state = self.lock();
            state.calm = true;
            state.processes.iter().filter(|process| process.is_silent()).cloned().collect()
        };
        silent.iter().for_each(Process::close);
    }

    /// Ends all processes.
    pub fn end(&self) {
        let processes = self.lock().processes.clone();
        processes.iter().for_each(Process::close);
    }

    /// The client has no more use for any of them.
    pub fn give_all_up(&self) {
        self.lock().processes.iter().for_each(Process::give_up);
    }

    /// Lets go of all that holds the world itself.
    pub fn clear(&self) {
        let mut state = self.lock();
        let (processes, calls) = (std::mem::take(&mut state.processes), std::mem::take(&mut state.calls));
        drop(state);
        for process in &processes {
            *process.on_close.lock().unwrap() = None;
        }
        drop((processes, calls));
    }

    fn fate(&self, token: u32) -> Fate {
        let mut state = self.lock();
        if state.calm {
            return if state.loses == Some(token) { Fate::ReplyLost } else { Fate::Done };
        }
        let mut draw = state.rng.u32(0..170);
        for (fate, percent) in ALL_FATES.into_iter().zip(self.plan().faults.fates) {
            match draw.checked_sub(percent) {
                Some(rest) => draw = rest,
                None if self.plan().plain => return fate.in_plain_words(),
                None => return fate,
            }
        }
        Fate::Done
    }

    /// Begins a connect, which ends when what it returns is dropped.
    pub fn connecting(&self) -> Connecting {
        let (open, connects) = {
            let mut state = self.lock();
            state.connects += 1;
            let open =
                state.processes.iter().find(|process| process.is_in_use()).map(|process| process.number);
            (open, state.connects)
        };
        note!(self, "connect");
        if connects > 1 {
            self.wrong(Wrong::Reconnect(format!("{connects} connects at once")));
        }
        if let Some(open) = open {
            self.wrong(Wrong::Reconnect(format!("a connect, and process {open} has not closed")));
        }
        Connecting(self.clone())
    }

    /// A waker that wakes this one, and of which it is known whether somebody keeps it.
    pub fn waker(&self, waker: &Waker) -> Waker {
        let woken = Arc::new(Woken(waker.clone()));
        self.lock().wakers.push(Arc::downgrade(&woken));
        woken.into()
    }

    /// How many of them somebody keeps.
    pub fn kept_wakers(&self) -> usize {
        self.lock().wakers.iter().filter(|waker| waker.strong_count() > 0).count()
    }

    pub fn start_process(&self) -> Process {
        let mut state = self.lock();
        let number = state.processes.len();
        let annotated = self.plan().annotated;
        let mut hint = |others: &[Hint]| match annotated {
            true if state.rng.bool() => Hint::ReadOnly,
            true => others[state.rng.usize(0..others.len())],
            false => Hint::None,
        };
        let hints = [
            hint(&[Hint::None, Hint::Destructive]),
            hint(&[Hint::None, Hint::Destructive, Hint::Idempotent, Hint::Idempotent]),
        ];
        let process = Process(Arc::new(ProcessInner {
            world: self.clone(),
            number,
            hints,
            // A handshake comes first, and may fail.
            begun: AtomicBool::new(!annotated),
            seen: state.applied.len(),
            life: Mutex::new((Life::Open, Vec::new())),
            silent: AtomicBool::new(false),
            given_up: AtomicBool::new(false),
            on_close: Mutex::new(None),
        }));
        state.processes.push(process.clone());
        drop(state);
        note!(self, "process {number} starts");
        let faults = &self.plan().faults;
        if self.fault(faults.dies) {
            process.closes_in(self.wait(20_000));
        }
        if self.fault(faults.falls_silent) {
            let (process, when) = (process.clone(), self.wait(4_000));
            tokio::spawn(async move {
                sleep(when).await;
                if process.world.is_calm() {
                    return;
                }
                note!(process.world, "process {} falls silent", process.number);
                process.silent.store(true, Ordering::Relaxed);
            });
        }
        process
    }

    /// How long it has been, machines that sleep included.
    fn now(&self) -> Duration {
        let elapsed = self.0.start.elapsed();
        match self.plan().sleeps {
            Some((at, long)) if elapsed >= ms(at) => elapsed + ms(long),
            _ => elapsed,
        }
    }

    /// What the wall clock of the client says.
    pub fn wall_clock(&self) -> SystemTime {
        let elapsed = self.0.start.elapsed();
        let now = if self.plan().lies.clock_stands { elapsed } else { self.now() };
        if now > elapsed {
            self.cover(Branch::Slept);
        }
        if self.plan().clock_is_set.is_some_and(|(at, by)| elapsed >= ms(at) && by < 0) {
            self.cover(Branch::ClockSetBack);
        }
        let set = self.plan().clock_is_set.filter(|(at, _)| elapsed >= ms(*at)).map_or(0, |(_, by)| by);
        let millis = 1_000_000_000_u64.saturating_add_signed(set) + now.as_millis() as u64;
        SystemTime::UNIX_EPOCH + ms(millis)
    }

    /// A write with that key has come; whether it is a copy of one that came before.
    fn knows_key(&self, key: &str) -> bool {
        let Some(keeps) = self.plan().keeps_keys else { return false };
        // What is declared leaves room for the longest way that a replay may take.
        let keeps = match self.plan().lies {
            Lies { keys_forgotten: true, .. } => ms(keeps / 20),
            Lies { clock_stands: true, .. } => ms(keeps),
            _ if self.plan().favours == Favours::Windows => ms(keeps),
            _ => ms(keeps + LONGEST_WAY),
        };
        let now = self.now();
        let mut state = self.lock();
        match state.keys.get(key) {
            Some((first, _)) if now < *first + keeps => true,
            _ => {
                state.keys.insert(key.to_owned(), (now, false));
                false
            }
        }
    }

    /// What a server says at once to a copy.
    fn answer_to_key(&self, key: &str) -> Option<Reply> {
        let applied = self.lock().keys.get(key)?.1;
        let at_once = self.chance(70);
        match applied {
            true if !self.plan().reads_answers => Some(Reply::Done),
            true => Some(if at_once { Reply::Exists } else { Reply::Done }),
            false => (at_once && self.plan().reads_answers).then(|| Reply::InFlight(self.wait(1_000))),
        }
    }

    /// What the caller says that a write touches.
    pub fn declared_key(&self, token: u32) -> Option<u32> {
        match self.plan().lies.wrong_key {
            true => Some(token),
            false => self.key(token),
        }
    }

    /// What it touches.
    fn key(&self, token: u32) -> Option<u32> {
        match token {
            CANARIES.. => Some(token),
            _ => (!token.is_multiple_of(5)).then_some(token % 2),
        }
    }

    /// Whether two writes touch each other.
    fn touch(&self, one: u32, other: u32) -> bool {
        match (self.key(one), self.key(other)) {
            (Some(one), Some(other)) if self.plan().keys => one == other,
            _ => true,
        }
    }

    /// No write is overwritten by a replay: none that touches it was handed over between the first attempt and the replay,
    /// whenever it was called. That is all that is promised, so that it is all that is asked, whatever came of the write.
    pub fn find_overwritten(&self) {
        if self.plan().independent && !self.plan().lies.independent {
            return;
        }
        let mut found = Vec::new();
        let state = self.lock();
        for (token, _) in state.calls.iter().filter(|(_, calls)| calls.is_write && !calls.again) {
            let mut arrived = state.arrived.iter().filter(|arrived| arrived.token == *token);
            let (Some(first), Some(replay)) = (arrived.next(), arrived.next()) else { continue };
            for (other, _) in state.calls.iter().filter(|(_, seen)| seen.is_write) {
                if other != token
                    && self.touch(*token, *other)
                    && state.was_handed_over(*other, first.handed, replay.queued)
                {
                    found.push(Wrong::Overwritten { by: *token, write: *other });
                }
            }
        }
        drop(state);
        found.into_iter().for_each(|wrong| self.wrong(wrong));
    }
}

impl World {
    /// What must hold when a write arrives: it was entered and, if it comes again, claimed; and no other one that
    /// has its key is in doubt.
    fn judge_arrival(&self, token: u32, first: bool) {
        let state = self.lock();
        let Some(seen) = state.calls.get(&token) else { return };
        let mut found = Vec::new();
        if self.plan().store && !seen.again {
            let id = state.tokens.iter().find(|(_, known)| **known == token).map(|(call, _)| *call);
            let entered = id.filter(|call| state.runs.contains_key(call));
            match entered {
                None => found.push(Wrong::Ledger { write: token, what: "it was not entered" }),
                Some(call) if !first && !state.claimed.contains(&call) => {
                    found.push(Wrong::Ledger { write: token, what: "its replay was not claimed" });
                }
                Some(_) => {}
            }
        }
        if self.plan().keys && !self.plan().lies.wrong_key && self.key(token).is_some() && first {
            // Nor does one go that was called before and waits; but what was given to a connection is with that one,
            // also if it sends only what is polled. One that is handed over again may be a replay, and one that is sent
            // again after a crash goes when the doubts are settled.
            let may_wait = !seen.goes_when_polled && !seen.again;
            let went = state.went(token).filter(|_| may_wait).unwrap_or(seen.begun);
            for (other, held) in &state.calls {
                if *other != token
                    && self.key(*other) == self.key(token)
                    && held.in_doubt.is_some_and(|at| at < went)
                {
                    found.push(Wrong::KeyInDoubt { write: token, held: *other });
                }
            }
        }
        drop(state);
        found.into_iter().for_each(|wrong| self.wrong(wrong));
    }
}

/// A connect that is under way.
pub struct Connecting(World);

impl Drop for Connecting {
    fn drop(&mut self) {
        self.0.lock().connects -= 1;
    }
}

/// A call's waker.
struct Woken(Waker);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.0.wake_by_ref();
    }
}

impl State {
    /// Whether that write was handed over after the one and before the other; where hand-overs are not seen, whether it
    /// certainly was.
    fn was_handed_over(&self, token: u32, after: u64, before: u64) -> bool {
        if self.handed.is_empty() {
            let mut arrived = self.arrived.iter().filter(|arrived| arrived.token == token);
            return arrived.any(|arrived| arrived.queued > after && arrived.handed < before);
        }
        self.handed.iter().any(|(handed, at)| *handed == token && (after + 1..before).contains(at))
    }

    /// When a write that was handed over once was: it did not go before that.
    fn went(&self, token: u32) -> Option<u64> {
        let mut handed = self.handed.iter().filter(|(handed, _)| *handed == token);
        handed.next().filter(|_| handed.next().is_none()).map(|(_, at)| *at)
    }

    pub fn tick(&mut self) -> u64 {
        self.now += 1;
        self.now
    }
}

// ===== A server's process =====

#[derive(Clone)]
pub struct Process(Arc<ProcessInner>);

pub struct ProcessInner {
    pub world: World,
    pub number: usize,
    /// What it says of its two tools, and what they do.
    hints: [Hint; 2],
    /// Whether a call has come.
    begun: AtomicBool,
    /// How many writes had been applied when it started.
    seen: usize,
    /// And who waits for the next one. Not a channel of tokio's, which wakes in a random order.
    life: Mutex<(Life, Vec<Waker>)>,
    silent: AtomicBool,
    /// Whether the client was told that this connection is of no use.
    given_up: AtomicBool,
    on_close: Mutex<Option<Box<dyn FnOnce() + Send>>>,
}

impl std::ops::Deref for Process {
    type Target = ProcessInner;

    fn deref(&self) -> &ProcessInner {
        &self.0
    }
}

/// What a server says of a tool that writes with some others, and what it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hint {
    None,
    ReadOnly,
    Destructive,
    /// Said only where it is true.
    Idempotent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Life {
    Open,
    /// Its output has ended.
    Closed,
    /// Gone; with all of its group?
    Gone(bool),
}

impl Process {
    pub fn life(&self) -> Life {
        self.life.lock().unwrap().0
    }

    /// Goes on from one life to the next, if that is the one that it is in.
    fn enter(&self, from: Life, to: Life) -> bool {
        let wakers = {
            let mut life = self.life.lock().unwrap();
            if life.0 != from {
                return false;
            }
            life.0 = to;
            std::mem::take(&mut life.1)
        };
        wakers.into_iter().for_each(Waker::wake);
        true
    }

    fn poll_life(&self, until: impl Fn(Life) -> bool, cx: &mut Context<'_>) -> Poll<Life> {
        let mut life = self.life.lock().unwrap();
        if until(life.0) {
            return Poll::Ready(life.0);
        }
        if !life.1.iter().any(|waker| waker.will_wake(cx.waker())) {
            life.1.push(cx.waker().clone());
        }
        Poll::Pending
    }

    pub fn is_open(&self) -> bool {
        self.life() == Life::Open
    }

    pub fn is_silent(&self) -> bool {
        self.silent.load(Ordering::Relaxed)
    }

    fn is_in_use(&self) -> bool {
        self.is_open() && self.begun.load(Ordering::Relaxed) && !self.given_up.load(Ordering::Relaxed)
    }

    /// A call has come, so that the connection is one that is used.
    pub fn begin(&self) {
        self.begun.store(true, Ordering::Relaxed);
    }

    /// What it says of the tool that writes, or of the one that does so idempotently.
    pub fn hint(&self, idempotent: bool) -> Hint {
        self.hints[usize::from(idempotent)]
    }

    /// The client has reason not to use it any more.
    pub fn give_up(&self) {
        self.given_up.store(true, Ordering::Relaxed);
    }

    pub fn on_close(&self, then: impl FnOnce() + Send + 'static) {
        *self.on_close.lock().unwrap() = Some(Box::new(then));
    }

    /// Closes the connection now, and ends the process some time later.
    pub fn close(&self) {
        let closed = self.enter(Life::Open, Life::Closed);
        if !closed {
            return;
        }
        let world = &self.world;
        let (linger, group_gone) = match world.plan().favours {
            Favours::Overlap => (world.wait(20_000), true),
            _ => (world.wait(14_000), world.chance(85)),
        };
        note!(world, "process {} closes, gone in {linger:?}, its group too: {group_gone}", self.number);
        let then = self.on_close.lock().unwrap().take();
        if let Some(then) = then {
            then();
        }
        let process = self.clone();
        tokio::spawn(async move {
            sleep(linger).await;
            note!(process.world, "process {} is gone", process.number);
            process.enter(Life::Closed, Life::Gone(group_gone));
        });
    }

    pub fn closes_in(&self, wait: Duration) {
        let process = self.clone();
        tokio::spawn(async move {
            sleep(wait).await;
            process.close();
        });
    }

    /// Resolves when the connection has closed.
    pub async fn closed(&self) {
        poll_fn(|cx| self.poll_life(|life| life != Life::Open, cx)).await;
    }

    /// Resolves when the process is gone: with all of its group?
    pub async fn gone(&self) -> bool {
        poll_fn(|cx| self.poll_life(|life| matches!(life, Life::Gone(_)), cx)).await == Life::Gone(true)
    }

    /// Resolves when the process is gone with all of its group.
    async fn group_gone(&self) {
        poll_fn(|cx| self.poll_life(|life| life == Life::Gone(true), cx)).await;
    }

    /// A write is handed to the connection.
    pub fn handed(&self, token: u32) {
        let mut state = self.world.lock();
        let state = &mut *state;
        let at = state.tick();
        let begun = state.calls.get(&token).map_or(at, |seen| seen.begun);
        let done = |seen: &Seen| seen.is_write && seen.begun > begun && seen.acknowledged.is_some();
        if state.handed.iter().all(|(handed, _)| *handed != token) && state.calls.values().any(done) {
            state.covered |= 1 << Branch::WentLater as u64;
        }
        state.handed.push((token, at));
    }

    /// A message of that call has arrived to its last byte; whether it is the first of it. `queued` says since when
    /// it may have waited, for worlds in which hand-overs are not seen.
    pub fn arrives(&self, token: u32, queued: Option<u64>) -> bool {
        let first = self.arrives_unjudged(token, queued);
        self.world.judge_arrival(token, first);
        first
    }

    fn arrives_unjudged(&self, token: u32, queued: Option<u64>) -> bool {
        let mut state = self.world.lock();
        let (handed, queued) = match state.handed.iter().rfind(|(handed, _)| *handed == token) {
            Some((_, handed)) => (*handed, *handed),
            None => {
                let now = state.tick();
                (now, queued.unwrap_or(now))
            }
        };
        let first = state.arrived.iter().all(|arrived| arrived.token != token);
        state.arrived.push(Arrived { token, handed, queued });
        drop(state);
        note!(self.world, "process {}: {token} arrives, first: {first}", self.number);
        first
    }

    /// What the server makes of a write, whoever still waits for it. `cancelled` is looked at when it is to
    /// take effect.
    pub async fn put(&self, token: u32, key: Option<String>, first: bool, cancelled: &AtomicBool) -> Reply {
        let world = &self.world;
        let fate = world.fate(token);
        // What is lost on its way tells the server nothing.
        let key = key.filter(|_| fate != Fate::Lost);
        let is_copy = key.as_ref().is_some_and(|key| world.knows_key(key));
        if is_copy && let Some(reply) = key.as_ref().and_then(|key| world.answer_to_key(key)) {
            note!(world, "process {}: {token} has a known key: {reply:?}", self.number);
            return reply;
        }
        let lands_at = Instant::now() + world.wait(LANDS_WITHIN);
        note!(world, "process {}: {token} will be {fate:?}", self.number);
        match fate {
            Fate::RateLimit if world.plan().lies.trusted_evidence && world.chance(50) => {
                world.apply(self, token, key.as_deref(), first);
                return Reply::RateLimit(world.wait(5_000));
            }
            Fate::RateLimit => {
                world.cover(Branch::RateLimited);
                return Reply::RateLimit(world.wait(5_000));
            }
            Fate::ClosesBefore => {
                let before = lands_at.saturating_duration_since(Instant::now());
                self.closes_in(before.mul_f64(world.lock().rng.f64()));
            }
            Fate::SessionUnknown => {
                sleep(world.wait(500)).await;
                world.cover(Branch::SessionForgotten);
                return Reply::SessionUnknown;
            }
            _ => {}
        }
        if fate.lands() {
            let was_open = self.is_open();
            // Effects end with the process, where that is so; else they need only its word.
            tokio::select! {
                biased;
                () = self.group_gone(), if world.plan().ends_effects => {
                    world.cover(Branch::ExitBeforeCommit);
                    return Reply::Silence;
                }
                () = sleep_until(lands_at) => {}
            }
            if cancelled.load(Ordering::Relaxed) {
                world.cover(Branch::CancelledBefore);
                return Reply::Silence;
            }
            if was_open && !self.is_open() {
                world.cover(Branch::CommitAfterClose);
            }
            world.apply(self, token, key.as_deref(), first);
        }
        match fate {
            Fate::ClosesAfter => {
                world.cover(Branch::AppliedAndClosed);
                self.close();
                return Reply::Silence;
            }
            Fate::Lost => return Reply::Silence,
            Fate::ReplyLost => {
                world.cover(Branch::ReplyLost);
                return Reply::Silence;
            }
            Fate::ReplyTooLate => {
                self.closes_in(world.wait(1_000));
                self.closed().await;
                world.cover(Branch::ReplyAfterClose);
            }
            _ => sleep(world.wait(3_000)).await,
        }
        match fate {
            Fate::UnavailableDone | Fate::UnavailableNot => Reply::Unavailable,
            Fate::ResetDone | Fate::ResetNot => Reply::Reset,
            Fate::Error => Reply::Error,
            _ => Reply::Done,
        }
    }

    /// What the server answers to the question how often a write took effect.
    pub async fn get(&self, token: u32) -> Reply {
        let world = &self.world;
        world.lock().asked.push(token);
        sleep(world.wait(500)).await;
        if world.fault(world.plan().faults.read_fails) {
            let fault = world.lock().rng.u32(0..6);
            return match fault {
                0 => Reply::Silence,
                _ if world.plan().plain => Reply::Error,
                1 => Reply::Reset,
                2 => Reply::Unavailable,
                3 => Reply::SessionUnknown,
                4 => Reply::RateLimit(world.wait(3_000)),
                _ => Reply::Error,
            };
        }
        world.lock().read.insert(token);
        let cached = world.plan().cached;
        let state = world.lock();
        let visible = state.applied.iter().enumerate().filter(|(index, applied)| {
            let lags = world.plan().lies.lagging_reads && applied.at.elapsed() < ms(2 * LANDS_WITHIN);
            applied.token == token
                && !lags
                && (!cached || *index < self.seen || applied.process == self.number)
        });
        Reply::Count(visible.count() as u32)
    }
}

impl World {
    fn apply(&self, process: &Process, token: u32, key: Option<&str>, first: bool) {
        let mut state = self.lock();
        if let Some((_, applied)) = key.and_then(|key| state.keys.get_mut(key))
            && std::mem::replace(applied, true)
        {
            drop(state);
            note!(self, "process {}: {token} is a copy", process.number);
            return self.cover(Branch::Deduplicated);
        }
        drop(state);
        note!(self, "process {}: {token} TAKES EFFECT", process.number);
        let mut state = self.lock();
        state.applied.push(Applied { token, process: process.number, at: Instant::now() });
        if state.found_absent.contains(&token) {
            state.covered |= 1 << Branch::ZombieAfterCheck as u64;
        }
        drop(state);
        if !first {
            self.cover(Branch::ReplayLanded);
        }
    }
}

// ===== What must have happened in some seed =====

macro_rules! branches {
    ($($name:ident: $text:literal,)*) => {
        /// Something rare that some seed must have reached, since else its absence would prove nothing.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Branch { $($name,)* }

        impl Branch {
            pub const ALL: &[(Self, &str)] = &[$((Branch::$name, $text),)*];

            /// Whether it can be reached in this build.
            pub const fn is_reachable(self) -> bool {
                cfg!(feature = "ledger-durable")
                    || !matches!(
                        self,
                        Branch::OnFile
                            | Branch::FileHadDoubts
                            | Branch::FileTorn
                            | Branch::FileResolved
                            | Branch::FileRefusedKey
                    )
            }
        }
    };
}

branches! {
    RateLimited: "a write was refused by a rate limit",
    SessionForgotten: "the server forgot the session",
    ExitBeforeCommit: "a process was gone before its write took effect",
    CommitAfterClose: "a write took effect after its connection had closed",
    ReplyAfterClose: "a write was answered when its connection had closed",
    ZombieAfterCheck: "a write took effect after a check had found nothing of it",
    EffectChanged: "a call that was taken for a read met a server to which it is a write",
    EffectChangedInDoubt: "the same, after a server had got it as a read",
    EffectGrown: "a write that was taken for idempotent met a server to which it is not",
    AnsweredAsRead: "a write was answered by a server to which it is a read",
    NoAnnotations: "a list of tools could not be read",
    WindowPassed: "a key's time was over before its replay was sent",
    ClockSetBack: "a wall clock was read that had been set back",
    Slept: "a wall clock was read after the machine had slept",
    AppliedAndClosed: "applied, and the connection closed before the answer",
    ReplyLost: "applied, and the answer was lost",
    CancelledBefore: "a cancellation came before the write took effect and was heeded",
    CancelledAfter: "a cancellation came after the write took effect",
    ReplayLanded: "a replay took effect",
    Stalled: "a request was stalled in its queue",
    Cut: "a request was cut",
    CutButForItsNewline: "a request was cut before its newline, and the server ran it all the same",
    Leaked: "a transport sent a copy of what it had not accepted",
    TooLong: "an answer was longer than the client keeps",
    RefusedWrite: "a pipe broke before a request's first byte",
    Withdrawn: "a request was withdrawn from its queue",
    ConnectFailed: "a connect failed",
    ConnectHung: "a connect hung",
    Overlap: "a process was started while the last one was still there",
    GroupStayed: "a process was gone and its group was not",
    SilentEnded: "a silent process was found out by a probe",
    Deduplicated: "a server knew the key of a replay",
    KeyedReplay: "a write was replayed by its key",
    KeyRefused: "a write was refused because of another in doubt with its key",
    LedgerCannotEnter: "the ledger could not enter a write",
    LedgerCannotSettle: "the ledger could not record an end",
    LedgerCannotClaim: "the ledger could not claim a replay",
    Crash: "the client's process crashed",
    Resolved: "what a crash left open was settled",
    OnFile: "the ledger was in a file, too",
    FileHadDoubts: "a ledger's file was opened after a crash and had writes in doubt",
    FileTorn: "a crash took from a ledger's file what was not stored for good",
    FileResolved: "what a ledger's file had from before a crash was settled in it",
    FileRefusedKey: "a write was refused because of one in doubt in a ledger's file from before a crash",
    CheckFailed: "a check failed",
    CheckPanicked: "a check panicked",
    CheckHung: "a check hung",
    CheckInFlight: "a check said that it is still in flight",
    LookFirst: "a check before the fence found that the write landed",
    CheckStale: "a check read from a process that did not know the write",
    OkAfterDoubt: "a doubt ended well",
    OkAfterReplay: "a replay ended well",
    NotDoneAfterDoubt: "not done, after a doubt",
    Unknown: "the outcome was unknown",
    ResultLost: "done, and the result was lost",
    AnsweredAfterDoubt: "an answered error that may come from an earlier attempt",
    Abandoned: "a write was abandoned",
    AbandonedAtPoll: "a future was dropped at its n-th poll",
    RuntimeShutdown: "the runtime was shut down with calls in flight",
    StackShutdown: "the stack was shut down with calls in flight",
    LateAnswer: "the answer to an attempt that was given up arrived",
    ReadRetried: "a read was retried",
    ReadSurvivedClosure: "a read was answered after a closure",
    RetrySuppressed: "the budget suppressed a retry",
    CrashLoop: "too many connections in a row closed without an answer",
    OtherWriteSince: "a replay was refused because of another write",
    Overtaken: "a replay was not sent because of another write that went ahead while it waited",
    WentLater: "a write went to a connection when one that was called later was done",
    KeyRefusedLater: "a write that had waited did not go because its key was in doubt",
    DeadlinePassed: "a deadline passed",
}
