//! Where every write is entered before its first byte, and what it says after a crash.
//!
//! A [`Ledger`] holds one [`Entry`] a write. It is [`Open`](State::Open) from before the first byte until its
//! outcome is known, so that whoever finds an open entry of a process that is gone must take it for in doubt:
//! nothing has to be written at the moment of the crash. [`in_doubt`](Ledger::in_doubt) lists those, and
//! [`Resolve`](super::Resolve) settles one by a fence and a check.
//!
//! ```text
//!                 ┌─> Answered                     the server's own answer arrived
//! Open ──────────>├─> Landed                       a check found it
//!   └─> InDoubt ─>├─> NotLanded                    nothing was sent, or a fence and a check
//!                 └─> Forgotten                    somebody gave it up, by hand
//! ```
//!
//! What the layer does when a ledger fails: a write that cannot be entered is refused
//! ([`Refusal::Ledger`](crate::Refusal::Ledger), nothing is sent); a replay that cannot be claimed does not
//! happen; if an outcome cannot be recorded the caller gets it all the same, and the entry stays open, which
//! errs on the safe side. A doubt that could not be recorded goes on turning away this process's writes with its
//! conflict key, and each later write with a key has the ledger try again. 10,000 of them are kept; from then on writes
//! with a key are refused ([`LedgerError::Full`]) until the ledger has recorded some.
//!
//! - [`MemoryLedger`], the default, forgets everything with the process. Its entries are those in doubt.
//! - `DurableLedger` (feature `ledger-durable`) survives a crash of the process and of the machine, for one
//!   process at a time.
//! - [`Ledger`] is a trait, so that several processes can share a database.
//!
//! # After a crash
//!
//! At its start, before its first call, a program settles what its last run has left: it waits for the old servers,
//! makes each request again from what was kept of its arguments, and resolves it over the new connection.
//!
//! ```no_run
//! # #[cfg(feature = "ledger-durable")]
//! # mod doc {
//! use std::time::Duration;
//!
//! use goaround::{
//!     BoxError, InDoubt, Resolve, Stack, Verdict, WriteSafetyLayer,
//!     jsonrpc::{Request, Response},
//!     mcp,
//!     write_safety::ledger::{DurableLedger, Ledger, State, servers_gone},
//! };
//! use tokio::process::Command;
//!
//! async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
//!     // … looks for the write by a token that it alone carries
//! #     Ok(doubt.unknown(""))
//! }
//!
//! async fn start() -> Result<mcp::Client, BoxError> {
//!     // `InUse` if the last run is still there: one that hangs is not dead.
//!     let ledger = DurableLedger::open("writes.ledger")?;
//!     let entries = ledger.in_doubt().await?;
//!     // No new server beside an old one, and no connection that is older than the fence.
//!     servers_gone(&entries, Duration::from_secs(30)).await;
//!
//!     let server = mcp::stdio(Command::new("invoice-server")).exit_ends_effects();
//!     let writes = WriteSafetyLayer::new(check)
//!         .ledger(ledger.clone())
//!         .keep_arguments(|request: &Request| Some(request.raw_params()?.get().to_owned()));
//!     let stack = Stack::builder(server).writes(writes).build()?;
//!     for entry in &entries {
//!         let Some(arguments) = &entry.arguments else {
//!             eprintln!("{}: for a person", entry.id); // nothing was kept, or the call had no parameters
//!             continue;
//!         };
//!         let params: serde_json::Value = serde_json::from_str(arguments)?;
//!         let request = Request::new(entry.method.clone(), params)?;
//!         match Resolve::new(&ledger, entry, request).run(check, &stack).await?.state {
//!             State::Landed { .. } => println!("{} is done", entry.id),
//!             State::NotLanded { why, .. } => println!("{} was not done ({why}): send it again?", entry.id),
//!             state => println!("{} is still in doubt: {state:?}", entry.id),
//!         }
//!     }
//!     Ok(stack)
//! }
//! # }
//! ```
//!
//! `examples/crash_recovery.rs` does that with clients that are killed at seven points.
//!
//! What must be known for it:
//!
//! - *What is declared.* An old server's end is a fence by
//!   [`exit_ends_effects`](crate::stdio::Child::exit_ends_effects), as it was declared when that server was started;
//!   it stands in the ledger with each server. If it is false, a write lands after it was found not to have. A
//!   [`quarantine`](super::Resolve::quarantine) counts from when the ledger was opened, not from when the write was sent:
//!   the dead process may have sent it to the last. It is no shorter than the time for which a server lives on when
//!   its client is gone.
//! - *Whose servers are known.* Those that a [`Stack`](crate::Stack) over [`stdio::child`](crate::stdio::child),
//!   [`mcp::stdio`](crate::mcp::stdio()) or `sdk::Connector::stdio` (feature `rmcp`) starts, before anything is sent to
//!   them; if one cannot be entered, nothing is. Bare layers, foreign connectors and servers behind HTTP enter none:
//!   for their writes a crash leaves only declared fences. A process that is started by hand, or has left its group,
//!   is not known either.
//! - *Within one run* an entry does not tell to which of its stack's servers the write went, so that the one in use
//!   must be gone too. What such a run leaves unknown can be settled by a declared fence, by hand, or by the next run.
//! - *By hand.* What no check can settle, a person does, by name:
//!   `ledger.settle(entry.id, entry.revision, State::Landed { by: "anna".into() })`, or
//!   `State::NotLanded { why: "asked the bank".into(), basis: FenceBasis::Declared }`. A
//!   [`Conflict`](LedgerError::Conflict) says that the entry has changed meanwhile: list it again.
//! - *Idempotency keys.* A write with our key ([`KeyedWrites`](super::KeyedWrites)) can be sent again with that same key as
//!   long as the server keeps it: put `entry.id.to_string()` in its place, [`forget`](Ledger::forget) the entry, which
//!   blocks its conflict key for this copy too, and send it. It is then a key of your own, for which nothing is declared.
//! - *Conflict keys.* A key stays blocked over the restart until its write is settled or forgotten.
//!   [`forget`](Ledger::forget) frees it though the write may land later.
//! - *To send it again* is a new decision, and a new write. Others that were in flight at the same time may have
//!   landed since, and it lands on top of them.
//! - *Containers.* A process is seen from the same boot and the same namespace of process ids only. A container that is
//!   started anew has another one: then nothing is known of the old servers, [`servers_gone`] and
//!   [`Resolve`](super::Resolve) do not wait for them, and what was not applied stays in doubt without a declared fence.
//!   With a namespace that outlives the client (an init process of its own, `--pid=host`) it is as on a machine.
//! - *A machine that was started anew* has no old process, which is known by the boot's id and the machine's
//!   (`/etc/machine-id`), except in containers, whose images may share that. Other systems than Linux tell none of
//!   this: there, too, only declared fences hold.
//! - *Files that are older than the world.* A ledger from a backup, or a virtual machine that was set back to a
//!   snapshot, knows nothing of what was written since. Neither does one on a disk that other machines have.
//! - *A laptop that was suspended* is no crash: the process goes on, and so does its hold on the ledger. Quarantines
//!   stand still while it sleeps, which errs on the safe side; keys' windows do not.
//! - *The wall clock.* After a restart it is the only one that still tells how old a write is, and so whether
//!   [a key is still kept](super::InDoubt::not_landed_deduplicated). One that was set back behind the write's time makes
//!   it unknown, and one that was set forward ends the window early. One that was set back by less than the time
//!   that has passed cannot be told: leave a reserve in what you declare, or use a clock that nobody sets
//!   ([`wall_clock`](super::Resolve::wall_clock)).

#[cfg(feature = "ledger-durable")]
mod durable;
mod memory;
mod order;
mod process;

use std::{
    borrow::Cow,
    fmt,
    future::Future,
    hash::{BuildHasher, RandomState},
    str::FromStr,
    sync::{Arc, OnceLock},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use serde::{Deserialize, Deserializer, Serialize, Serializer};
use tokio::time::Instant;

#[cfg(feature = "ledger-durable")]
pub use self::durable::{DurableLedger, DurableLedgerOptions, decode_durable};
pub(super) use self::memory::MOST as MOST_IN_DOUBT;
pub(crate) use self::process::Registrar;
#[cfg(feature = "ledger-durable")]
use self::process::servers_of;
pub use self::{
    memory::MemoryLedger,
    process::{ServerProcess, servers_gone},
};
use super::{
    conflicts::Keys,
    fence::{Fence, FenceBasis},
};
use crate::{BoxError, CallId, Effect, connection::BoxFuture};

/// Keeps the writes of one process, or of several that share a database.
///
/// Every operation is a compare-and-set on one entry, by its [revision](Entry::revision): it succeeds for one
/// of those that try, and fails with [`LedgerError::Conflict`] for the others. [`Entry::settle`] and
/// [`Entry::claim`] hold the rules; an implementation applies them to what it has stored, within one
/// transaction, and stores the entry that they leave.
///
/// # On a shared database
///
/// Two processes then see each other's writes, and must not both act on one. An implementation keeps a lease
/// for each [owner](EntryId::owner), a time until which it is taken to be alive, that the owner renews while it
/// runs, and
///
/// - lists another owner's open entry in [`in_doubt`](Ledger::in_doubt) only once that owner is *gone* (its own open
///   entries are calls under way, and never in doubt). That its lease has run out does not say so by itself: an
///   owner that was granted an entry or a claim, and was stopped right then, sends when it wakes. Its process must be
///   known to have ended, or its machine to be fenced off, or a bound must have passed after the lease for which a
///   process is stopped at most between a grant and its bytes, which the caller declares. Of an entry that another
///   process has [claimed](Entry::attempts) it is that one that must be gone: its replay may be on its way;
/// - says of each entry that it lists since when that owner is gone ([`orphaned`](Entry::orphaned)), if it is: one that was
///   said to be in doubt may be listed while its owner lives, and bytes of it may still be sent;
/// - refuses [`claim`](Ledger::claim), [`enter`](Ledger::enter) and [`started`](Ledger::started) to an owner
///   whose own lease has run out by the database's clock, in the transaction that would grant them. A process
///   that was stopped for longer than its lease then finds, when it wakes, that it may no longer replay;
/// - refuses a claim with [`LedgerError::Overtaken`] where an entry that [touches](Entry::touches) this one was
///   entered since, as the layer does for the writes of its own process;
/// - refuses [`enter`](Ledger::enter) with [`LedgerError::KeyInDoubt`] while an entry that touches the new one is open
///   and [claimed](Entry::attempts): its replay may be on its way, or wait for a connection, and is not asked again.
///
/// That keeps replays apart, and not what was sent already: a fence must hold besides. `tests/stateright.rs` explores
/// two such processes in every order, and shows what happens where a lease alone counts.
pub trait Ledger: Send + Sync + 'static {
    /// Enters a write, before its first byte, and returns its revision. The entry is stored for good when this
    /// resolves: a crash after that must find it.
    ///
    /// # Errors
    ///
    /// [`LedgerError::KeyInDoubt`] if an entry with its conflict key is in doubt, [`LedgerError::Conflict`] if
    /// there is an entry of that id already. On any error the write is refused.
    fn enter(&self, entry: Entry) -> impl Future<Output = Result<u64, LedgerError>> + Send;

    /// Moves an entry to that state. It need not be stored for good when this resolves: what a crash takes back
    /// is found open again. An implementation that asks its store again after a lost answer must know its own settlement
    /// from another's: by a [`Conflict`](LedgerError::Conflict) a write of which nothing was done here is unknown.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Conflict`] if the entry is at another revision, or closed.
    fn settle(
        &self,
        id: EntryId,
        revision: u64,
        state: State,
    ) -> impl Future<Output = Result<u64, LedgerError>> + Send;

    /// Claims the one replay of a write. Stored for good when this resolves; only then is the write handed over
    /// again.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Conflict`] if the entry is at another revision, or closed, or was claimed before;
    /// [`LedgerError::Overtaken`]. On any error it is not replayed.
    fn claim(&self, id: EntryId, revision: u64) -> impl Future<Output = Result<u64, LedgerError>> + Send;

    /// The entries in doubt, oldest first: those that were said to be, and the open ones whose process is gone.
    ///
    /// # Errors
    ///
    /// If they cannot be read.
    fn in_doubt(&self) -> impl Future<Output = Result<Vec<Entry>, LedgerError>> + Send;

    /// Gives an entry up, whatever its revision, and records by whom. Its conflict key is free then: later
    /// writes on it go out though nobody knows what became of this one.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Conflict`] if it is closed or not there.
    fn forget(&self, id: EntryId, by: &str) -> impl Future<Output = Result<(), LedgerError>> + Send;

    /// A hint from a destructor, which cannot wait: this write's call is over, and that is what is known of it.
    /// It must not block, must not need a runtime and does not fail. Without it the entry stays open: in doubt for whoever
    /// comes when this process is gone, and under way until then.
    /// Ignored for an entry that is not [`Open`](State::Open) or not there: what was said to be in doubt is not made
    /// undone by a hint, which may come from a copy of the call that was never sent. On a shared database ignored, too,
    /// for one that another process has claimed.
    fn abandon(&self, id: EntryId, state: State) {
        let _ = (id, state);
    }

    /// A server process was started, to which the writes of this process may go from now on. Stored for good
    /// when this resolves, before the first of them. After a crash an entry's
    /// [`servers`](Entry::servers) are those of its owner and its [`stack`](Entry::stack), of which those that are
    /// [gone](ServerProcess::is_gone) may be left out as long as one is left.
    ///
    /// # Errors
    ///
    /// If it cannot be stored: then nothing is sent to it.
    fn started(&self, server: ServerProcess) -> impl Future<Output = Result<(), LedgerError>> + Send {
        let _ = server;
        async { Ok(()) }
    }
}

/// Names a write over all processes that share a ledger: its owner, which is one run of one process, and the
/// call's own id in it.
///
/// Its text, such as `4f1c…-3-17`, is also the key of a [keyed write](super::KeyedWrites), and parses back.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct EntryId {
    owner: u128,
    call: CallId,
}

impl EntryId {
    pub(crate) fn of(call: CallId) -> Self {
        Self { owner: this_run(), call }
    }

    /// The run of a process that made the call: a random number.
    pub const fn owner(self) -> u128 {
        self.owner
    }

    /// The call, as that run's events and [errors](crate::CallError::call) name it.
    pub const fn call(self) -> CallId {
        self.call
    }

    /// Whether this very run of this process made the call.
    pub fn is_own(self) -> bool {
        self.owner == this_run()
    }
}

/// A random number that is this run's own.
fn this_run() -> u128 {
    static RUN: OnceLock<u128> = OnceLock::new();
    *RUN.get_or_init(|| {
        // The standard library seeds these from the operating system.
        let half = || u128::from(RandomState::new().hash_one(SystemTime::now()));
        half() << 64 | half()
    })
}

impl fmt::Display for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}-{}", self.owner, self.call)
    }
}

/// As it stands in texts.
impl fmt::Debug for EntryId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A text that names no entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not the id of a ledger's entry")]
pub struct ParseEntryIdError(());

impl FromStr for EntryId {
    type Err = ParseEntryIdError;

    fn from_str(text: &str) -> Result<Self, ParseEntryIdError> {
        let parse = || {
            let (owner, call) = text.split_once('-')?;
            let (source, sequence) = call.split_once('-')?;
            let owner = (owner.len() == 32).then(|| u128::from_str_radix(owner, 16).ok())??;
            let call = CallId::from_parts(source.parse().ok()?, sequence.parse().ok()?)?;
            Some(Self { owner, call })
        };
        parse().ok_or(ParseEntryIdError(()))
    }
}

impl Serialize for EntryId {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for EntryId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// What is known of a write.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
#[non_exhaustive]
pub enum State {
    /// Handed over, or about to be, and not yet settled. In doubt once its process is gone.
    Open,
    /// Its call is over, and nobody knows whether it was applied.
    InDoubt {
        /// Why, in words.
        reason: String,
    },
    /// The server answered it, with a result or an error.
    Answered,
    /// It was applied.
    Landed {
        /// Who says so: `check`, or whoever settled it by hand.
        by: String,
    },
    /// It was not applied and never will be.
    NotLanded {
        /// Why: that nothing was sent, the fence, or the words of whoever settled it by hand.
        why: String,
        /// Whether that was observed or declared.
        basis: FenceBasis,
    },
    /// Somebody gave it up.
    Forgotten {
        /// Who.
        by: String,
    },
}

impl State {
    /// Whether nothing is left to be settled.
    pub const fn is_closed(&self) -> bool {
        !matches!(self, State::Open | State::InDoubt { .. })
    }

    /// Not landed, by that fence.
    pub(crate) fn by_fence(fence: &Fence) -> Self {
        State::NotLanded { why: fence.to_string(), basis: fence.basis() }
    }

    /// Not landed: not one byte was sent, or the peer refused it before processing.
    pub(crate) fn not_done(why: &str) -> Self {
        State::NotLanded { why: why.to_owned(), basis: FenceBasis::Observed }
    }
}

/// A write in a ledger. It serializes, so that an implementation of [`Ledger`] can store it as JSON.
///
/// It holds no argument of the call unless the caller asked for that
/// ([`keep_arguments`](super::WriteSafetyLayer::keep_arguments)), and the conflict key as the caller made it. Its
/// `Debug` says of both only how long they are.
#[derive(Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Entry {
    /// The write.
    pub id: EntryId,
    /// Its method.
    pub method: String,
    /// What it may do.
    pub effect: Effect,
    /// The conflict key, where the caller gave one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key: Option<String>,
    /// What the caller keeps of its arguments, so that a check can run after a restart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub arguments: Option<String>,
    /// When it was entered, by the wall clock, in milliseconds since 1970.
    #[serde(rename = "entered_ms", with = "millis")]
    pub entered: SystemTime,
    /// When it last changed, by the wall clock.
    #[serde(rename = "changed_ms", with = "millis")]
    pub changed: SystemTime,
    /// How often it was handed over by claim: 1, and 2 once its replay was claimed.
    pub attempts: u32,
    /// What is known of it.
    #[serde(flatten)]
    pub state: State,
    /// How often it has changed. Each operation names the revision that it goes by.
    pub revision: u64,
    /// Which of its owner's stacks it was called on.
    pub stack: u64,
    /// The server processes that its owner had started for that stack until it was gone, where they are known:
    /// it went to one of them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub servers: Vec<ServerProcess>,
    /// Whether each server process that it may have gone to is entered before anything is sent to it: a
    /// [`Stack`](crate::Stack) over a connector of this crate does that. Then nothing was sent of it while there
    /// are none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub servers_entered: bool,
    /// Since when its owner is known to be gone, by this process's own clock. A declared bound counts from
    /// here: until then bytes of it may have been sent. `None` where that is not known: then none counts. Of an entry that
    /// another process has claimed, that one is its owner here.
    #[serde(skip)]
    pub orphaned: Option<Instant>,
}

impl fmt::Debug for Entry {
    /// Without the arguments and the key, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { id, method, effect, key, arguments, entered, changed, attempts, state, .. } = self;
        let Self { revision, stack, servers, servers_entered, orphaned, .. } = self;
        f.debug_struct("Entry")
            .field("id", id)
            .field("method", method)
            .field("effect", effect)
            .field("key", &key.as_deref().map(Hidden))
            .field("arguments", &arguments.as_deref().map(Hidden))
            .field("entered", entered)
            .field("changed", changed)
            .field("attempts", attempts)
            .field("state", state)
            .field("revision", revision)
            .field("stack", stack)
            .field("servers", servers)
            .field("servers_entered", servers_entered)
            .field("orphaned", orphaned)
            .finish()
    }
}

/// A text of which only the length is shown.
struct Hidden<'a>(&'a str);

impl fmt::Debug for Hidden<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

impl Entry {
    pub(crate) fn new(id: EntryId, method: String, effect: Effect, stack: u64, now: SystemTime) -> Self {
        Self {
            id,
            method,
            effect,
            key: None,
            arguments: None,
            entered: now,
            changed: now,
            attempts: 1,
            state: State::Open,
            revision: 1,
            stack,
            servers: Vec::new(),
            servers_entered: false,
            orphaned: None,
        }
    }

    /// Moves it to that state, if it is at that revision and not closed.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Conflict`], and [`LedgerError::NotASettlement`] for [`State::Open`]; the entry is as it was.
    pub fn settle(&mut self, revision: u64, state: State, now: SystemTime) -> Result<u64, LedgerError> {
        if self.revision != revision || self.state.is_closed() {
            return Err(LedgerError::Conflict(self.id));
        }
        if state == State::Open {
            return Err(LedgerError::NotASettlement(self.id));
        }
        self.state = state;
        Ok(self.touch(now))
    }

    /// Whether the two writes may touch each other: they have the same conflict key, or one of them has none.
    pub fn touches(&self, other: &Entry) -> bool {
        self.key == other.key || self.key.is_none() || other.key.is_none()
    }

    /// Claims its one replay, if it is at that revision, not closed, and was not replayed before.
    ///
    /// # Errors
    ///
    /// [`LedgerError::Conflict`]; the entry is as it was.
    pub fn claim(&mut self, revision: u64, now: SystemTime) -> Result<u64, LedgerError> {
        if self.revision != revision || self.state.is_closed() || self.attempts > 1 {
            return Err(LedgerError::Conflict(self.id));
        }
        self.attempts += 1;
        Ok(self.touch(now))
    }

    fn touch(&mut self, now: SystemTime) -> u64 {
        self.changed = now;
        // It may have come from somebody else's file.
        self.revision = self.revision.saturating_add(1);
        self.revision
    }

    /// Whether nothing was sent of it and nothing will be: its owner is gone, and had started no server.
    pub fn was_never_sent(&self) -> bool {
        self.orphaned.is_some() && self.servers_entered && self.servers.is_empty()
    }

    /// Whether all server processes that may have got it are gone, and their effects with them, as the caller
    /// declared; `false` where that cannot be seen, and where none is known.
    ///
    /// An implementation of [`Ledger::in_doubt`] asks this of what it lists, or of each server whether it
    /// [is gone](ServerProcess::is_gone): a probe of a check counts only on a
    /// connection that was made after they were seen to be gone.
    pub fn servers_are_gone(&self) -> bool {
        self.gone_since().is_some()
    }

    /// Since when that is known.
    pub(super) fn gone_since(&self) -> Option<Instant> {
        if self.servers.is_empty() {
            return None;
        }
        let gone = |server: &ServerProcess| server.gone_since().filter(|_| server.exit_ends_effects);
        // All of them, even if one is not: each is seen as early as can be.
        let gone: Vec<_> = self.servers.iter().map(gone).collect();
        gone.into_iter().collect::<Option<Vec<_>>>()?.into_iter().max()
    }
}

/// Times as whole milliseconds since 1970; what lies before counts as 0.
mod millis {
    use super::*;

    pub(super) fn serialize<S: Serializer>(time: &SystemTime, serializer: S) -> Result<S::Ok, S::Error> {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        serializer.serialize_u64(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SystemTime, D::Error> {
        let millis = u64::deserialize(deserializer)?;
        let time = UNIX_EPOCH.checked_add(Duration::from_millis(millis));
        time.ok_or_else(|| serde::de::Error::custom("a time beyond the clock's range"))
    }
}

/// Why a ledger did not do what it was asked.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum LedgerError {
    /// Somebody else has settled or claimed that entry meanwhile, or it is not there.
    #[error("the ledger's entry {0} was changed by somebody else, or is closed")]
    Conflict(EntryId),
    /// A write that was handed over is not made open again.
    #[error("the write {0} cannot be settled as open")]
    NotASettlement(EntryId),
    /// Another write that touches it was entered since, by another process or another stack: it is not replayed over
    /// that one. The entry is as it was. The ledgers of this crate say so of writes with its conflict key, unless they
    /// did not land.
    #[error("another write that touches the write {0} was entered since")]
    Overtaken(EntryId),
    /// An earlier write with the same conflict key is in doubt. While its call is under way, wait for that; after
    /// it, settle or forget it here.
    #[error("the write {id} ({method}) with the same conflict key is in doubt")]
    KeyInDoubt {
        /// That write.
        id: EntryId,
        /// Its method.
        method: String,
    },
    /// It holds as many entries as it may; or as many ended in doubt with a conflict key that it could not record.
    #[error("the ledger is full: {0} entries in doubt")]
    Full(usize),
    /// The entry of a write, with its conflict key and the arguments that are kept, is longer than one may be.
    #[error("the write's entry in the ledger has {bytes} bytes, of at most {most}")]
    TooLong {
        /// How long it is.
        bytes: usize,
        /// How long one may be.
        most: usize,
    },
    /// Another process has it, or this one has it twice.
    #[error("the ledger is open already, in this process or another")]
    InUse,
    /// What is stored makes no sense. Nothing of it was changed.
    #[error("the ledger is damaged: {0}")]
    Damaged(String),
    /// It could not be read or written.
    #[error("the ledger cannot be used{}", crate::error::safe_text(.0.as_ref()).map_or(String::new(), |text| format!(": {text}")))]
    Unavailable(#[source] BoxError),
}

/// A ledger with its type erased, as a layer or a stack gives it away. A clone is the same ledger.
#[derive(Clone)]
pub struct AnyLedger(Kind);

#[derive(Clone)]
enum Kind {
    /// Apart, since it is asked without waiting.
    Memory(MemoryLedger),
    /// With the conflict keys of the calls under way on it, of all layers that have it.
    Other(Arc<dyn DynLedger>, Keys),
}

impl AnyLedger {
    pub(super) fn new<L: Ledger>(ledger: L) -> Self {
        let ledger: Box<dyn std::any::Any> = Box::new(ledger);
        let ledger = match ledger.downcast::<MemoryLedger>() {
            Ok(memory) => return Self(Kind::Memory(*memory)),
            Err(ledger) => ledger,
        };
        match ledger.downcast::<AnyLedger>() {
            Ok(any) => *any,
            Err(ledger) => match ledger.downcast::<L>() {
                Ok(ledger) => {
                    let keys = keys_of(&*ledger);
                    Self(Kind::Other(Arc::from(ledger as Box<dyn DynLedger>), keys))
                }
                Err(_) => unreachable!("it was made of that type"),
            },
        }
    }

    /// The conflict keys of the calls under way, of all services that share it.
    pub(super) fn keys(&self) -> &Keys {
        match &self.0 {
            Kind::Memory(memory) => memory.keys(),
            Kind::Other(_, keys) => keys,
        }
    }

    /// The ledger in memory, if it is that: what it is asked needs no waiting.
    pub(super) fn memory(&self) -> Option<&MemoryLedger> {
        match &self.0 {
            Kind::Memory(memory) => Some(memory),
            Kind::Other(..) => None,
        }
    }

    /// The other one, to be asked from a future of its own.
    pub(super) fn other(&self) -> Option<Arc<dyn DynLedger>> {
        match &self.0 {
            Kind::Memory(_) => None,
            Kind::Other(ledger, _) => Some(Arc::clone(ledger)),
        }
    }
}

/// Those of a ledger of this crate, or new ones: another ledger is known by its layer alone.
fn keys_of(ledger: &dyn std::any::Any) -> Keys {
    let memory = ledger.downcast_ref().map(|ledger: &Arc<MemoryLedger>| ledger.keys().clone());
    #[cfg(feature = "ledger-durable")]
    let memory = memory
        .or_else(|| ledger.downcast_ref().map(|ledger: &DurableLedger| ledger.keys().clone()))
        .or_else(|| ledger.downcast_ref().map(|ledger: &Arc<DurableLedger>| ledger.keys().clone()));
    let any = || ledger.downcast_ref().map(|ledger: &Arc<AnyLedger>| ledger.keys().clone());
    memory.or_else(any).unwrap_or_default()
}

impl Default for AnyLedger {
    fn default() -> Self {
        Self(Kind::Memory(MemoryLedger::default()))
    }
}

impl Ledger for AnyLedger {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        match &self.0 {
            Kind::Memory(memory) => memory.enter(entry).await,
            Kind::Other(other, _) => Arc::clone(other).enter(entry).await,
        }
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        match &self.0 {
            Kind::Memory(memory) => memory.settle(id, revision, state).await,
            Kind::Other(other, _) => Arc::clone(other).settle(id, revision, state).await,
        }
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        match &self.0 {
            Kind::Memory(memory) => memory.claim(id, revision).await,
            Kind::Other(other, _) => Arc::clone(other).claim(id, revision).await,
        }
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        match &self.0 {
            Kind::Memory(memory) => memory.in_doubt().await,
            Kind::Other(other, _) => Arc::clone(other).in_doubt().await,
        }
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        match &self.0 {
            Kind::Memory(memory) => memory.forget(id, by).await,
            Kind::Other(other, _) => Arc::clone(other).forget(id, by.to_owned()).await,
        }
    }

    fn abandon(&self, id: EntryId, state: State) {
        match &self.0 {
            Kind::Memory(memory) => Ledger::abandon(memory, id, state),
            Kind::Other(other, _) => other.abandon(id, state),
        }
    }

    async fn started(&self, server: ServerProcess) -> Result<(), LedgerError> {
        match &self.0 {
            Kind::Memory(memory) => memory.started(server).await,
            Kind::Other(other, _) => Arc::clone(other).started(server).await,
        }
    }
}

impl fmt::Debug for AnyLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            Kind::Memory(_) => "AnyLedger(in memory)",
            Kind::Other(..) => "AnyLedger(..)",
        })
    }
}

/// A [`Ledger`] as an object.
pub(super) trait DynLedger: Send + Sync {
    fn enter(self: Arc<Self>, entry: Entry) -> BoxFuture<Result<u64, LedgerError>>;
    fn settle(
        self: Arc<Self>,
        id: EntryId,
        revision: u64,
        state: State,
    ) -> BoxFuture<Result<u64, LedgerError>>;
    fn claim(self: Arc<Self>, id: EntryId, revision: u64) -> BoxFuture<Result<u64, LedgerError>>;
    fn in_doubt(self: Arc<Self>) -> BoxFuture<Result<Vec<Entry>, LedgerError>>;
    fn forget(self: Arc<Self>, id: EntryId, by: String) -> BoxFuture<Result<(), LedgerError>>;
    fn abandon(&self, id: EntryId, state: State);
    fn started(self: Arc<Self>, server: ServerProcess) -> BoxFuture<Result<(), LedgerError>>;
}

impl<L: Ledger> DynLedger for L {
    fn enter(self: Arc<Self>, entry: Entry) -> BoxFuture<Result<u64, LedgerError>> {
        Box::pin(async move { Ledger::enter(&*self, entry).await })
    }

    fn settle(
        self: Arc<Self>,
        id: EntryId,
        revision: u64,
        state: State,
    ) -> BoxFuture<Result<u64, LedgerError>> {
        Box::pin(async move { Ledger::settle(&*self, id, revision, state).await })
    }

    fn claim(self: Arc<Self>, id: EntryId, revision: u64) -> BoxFuture<Result<u64, LedgerError>> {
        Box::pin(async move { Ledger::claim(&*self, id, revision).await })
    }

    fn in_doubt(self: Arc<Self>) -> BoxFuture<Result<Vec<Entry>, LedgerError>> {
        Box::pin(async move { Ledger::in_doubt(&*self).await })
    }

    fn forget(self: Arc<Self>, id: EntryId, by: String) -> BoxFuture<Result<(), LedgerError>> {
        Box::pin(async move { Ledger::forget(&*self, id, &by).await })
    }

    fn abandon(&self, id: EntryId, state: State) {
        Ledger::abandon(self, id, state);
    }

    fn started(self: Arc<Self>, server: ServerProcess) -> BoxFuture<Result<(), LedgerError>> {
        Box::pin(async move { Ledger::started(&*self, server).await })
    }
}

impl<L: Ledger> Ledger for Arc<L> {
    fn enter(&self, entry: Entry) -> impl Future<Output = Result<u64, LedgerError>> + Send {
        (**self).enter(entry)
    }

    fn settle(
        &self,
        id: EntryId,
        revision: u64,
        state: State,
    ) -> impl Future<Output = Result<u64, LedgerError>> + Send {
        (**self).settle(id, revision, state)
    }

    fn claim(&self, id: EntryId, revision: u64) -> impl Future<Output = Result<u64, LedgerError>> + Send {
        (**self).claim(id, revision)
    }

    fn in_doubt(&self) -> impl Future<Output = Result<Vec<Entry>, LedgerError>> + Send {
        (**self).in_doubt()
    }

    fn forget(&self, id: EntryId, by: &str) -> impl Future<Output = Result<(), LedgerError>> + Send {
        (**self).forget(id, by)
    }

    fn abandon(&self, id: EntryId, state: State) {
        (**self).abandon(id, state);
    }

    fn started(&self, server: ServerProcess) -> impl Future<Output = Result<(), LedgerError>> + Send {
        (**self).started(server)
    }
}
