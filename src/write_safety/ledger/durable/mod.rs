//! The ledger in a file, for one process at a time.
//!
//! # Why a log, and not an embedded store
//!
//! What is to be kept is small, the writes that are not settled, and is read once, when it is opened. A store
//! such as redb keeps a tree of pages that it copies on every commit, several of 4 KiB for a change of 300
//! bytes, behind one writer whose commits this ledger would have to bundle all the same. An append-only log
//!
//! - has one way to be incomplete, its end: a crash at any byte leaves the records before it, each with its
//!   checksum, and one rule (below) tells a torn end from damage;
//! - commits many writes with one sync: whatever was queued while the disk was busy goes into the next frame;
//! - brings no dependency.
//!
//! What it costs is that the file grows until it is written anew, which it is when it is twice as long as after
//! the last time (and longer than 4 MiB).
//!
//! # The file
//!
//! A header (`goaround-ledger`, version, a random number, checksum), then frames. A frame is a header of 24
//! bytes and some records, each a line of JSON. The header holds the payload's length and CRC-32, how many
//! bytes of the file were synced when it was written, and a CRC-32 of itself, of the file's number and of where
//! it stands. So a length is never believed that was not written, and what an older file left on the same
//! sectors is no frame.
//!
//! The end of the file counts as torn, and is dropped, where
//!
//! - it ends before the frame does: nobody was told that this frame is stored;
//! - or a part of the frame between the borders of sectors of 512 bytes is zero: so it is where a power cut came
//!   after the file grew and before the data was written. A frame that is stored has no such zeros, and by
//!   empty lines at its end it is seen to that such a part has at least 8 bytes;
//!
//! and no later frame says that this one was synced before. Everything else that is not what was written is
//! [`LedgerError::Damaged`], also in the last frame, and leaves the file as it is. That is also said of a torn
//! end that is neither missing nor zero, such as other files' old data on a file system that shows it after a
//! power cut (ext4 mounted with `data=writeback`): an error too many, but nothing is lost without a word. What
//! no file can tell is that a disk lost a whole sector at the very end which it had said to have stored, or
//! that somebody cut the file off.
//!
//! # When the disk fails
//!
//! After a failed write or sync nobody can know what of the unsynced bytes is on the disk: the kernel may have
//! dropped the pages, and a second sync would succeed without them. So it is never repeated. All that was not
//! synced has failed, the file is cut back to what was, and entering fails with
//! [`LedgerError::Unavailable`] for a second; the next write after that makes the ledger write a whole new file
//! of what it knows, sync it and put it in place. Only once that has succeeded does it go on. Opening a ledger
//! begins with such a new file too, since the old one may be in the cache alone.

mod book;
mod disk;
mod format;
#[cfg(test)]
mod simulated;
mod writer;

use std::{
    borrow::Cow,
    fmt,
    path::Path,
    sync::Arc,
    thread::{self, ThreadId},
    time::SystemTime,
};

use tokio::time::Instant;

use self::{
    book::Listed,
    disk::{Disk, FileDisk},
    format::{MOST_ENTRY, Owner, Record, millis},
    writer::{Limits, Shared, Undo, Writer},
};
use super::{
    super::conflicts::Keys, Entry, EntryId, Ledger, LedgerError, ServerProcess, State, servers_of, this_run,
};

/// How many entries are listed at a time: nobody waits for a whole listing.
const PORTION: usize = 256;
/// How long the words of a state may be.
const MOST_WORDS: usize = 1024;

/// A ledger in a file that survives a crash of the process and of the machine, for one process at a time. A
/// clone is the same ledger.
///
/// - [`enter`](Ledger::enter), [`claim`](Ledger::claim) and [`started`](Ledger::started) resolve once the
///   change is synced; all that come while the disk is busy share the next sync.
///   [`settle`](Ledger::settle), [`forget`](Ledger::forget) and [`abandon`](Ledger::abandon) count at once, are
///   written at once and are synced with the next of the others, or within 100 ms.
/// - Whatever the file holds when it is opened is from calls that are over, so [`in_doubt`](Ledger::in_doubt)
///   lists all that is not settled, with the server processes of its run, and such an entry blocks its
///   conflict key. [`orphaned`](Entry::orphaned) is when it was opened, except for entries of this very
///   process, whose connections may live on. Of the writes entered since, it lists those in doubt.
/// - A write whose caller stops waiting for `enter` is settled as not landed: it was not handed over.
/// - It holds 10,000 writes that are not settled, of 64 KiB each and 64 MiB together, and then refuses
///   ([`LedgerError::Full`], [`LedgerError::TooLong`]). What was settled by somebody's word is kept, the last
///   1,000 of it ([`settled_by_hand`](Self::settled_by_hand)). Words of a state beyond 1,024 bytes are cut.
/// - A write that could not be stored is refused, and so is every one after it until a new file has been
///   written, which is tried at most once a second. What is settled meanwhile counts in this process and is in
///   that file; `settle` and `forget` say [`LedgerError::Unavailable`] all the same.
/// - The last clone's destructor waits for the last sync, for at most 5 seconds.
///
/// The file holds conflict keys as they are, and arguments if the caller keeps them; a new one can be read by
/// its owner alone. It belongs on a local disk, and it is replaced from time to time by a new one that was
/// written beside it as `….new`. The operating system holds its lock (on Unix `flock`), which
/// ends with the process, however that ends; a child shares it only until it runs its program. On systems other
/// than Unix and Windows it cannot be opened.
///
/// ```
/// use goaround::{WriteSafetyLayer, jsonrpc::{Request, Response}, write_safety::ledger::{DurableLedger, Ledger}};
///
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), goaround::BoxError> {
/// # let directory = tempfile::tempdir()?;
/// # let path = directory.path().join("writes.ledger");
/// let ledger = DurableLedger::open(&path)?;
/// // What an earlier run left, before the first call.
/// for entry in ledger.in_doubt().await? {
///     println!("{} {}", entry.id, entry.method);
/// }
/// let _layer = WriteSafetyLayer::<Request, Response>::refuse().ledger(ledger.clone());
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct DurableLedger(Arc<Handle>);

/// Ends with the last clone, and the writer with it.
struct Handle {
    shared: Arc<Shared>,
    writer: ThreadId,
    clock: Clock,
    keys: Keys,
}

type Clock = Arc<dyn Fn() -> SystemTime + Send + Sync>;

/// How a [`DurableLedger`] is opened.
#[derive(Clone)]
pub struct DurableLedgerOptions {
    clock: Clock,
    limits: Limits,
}

// ===== impl DurableLedgerOptions =====

impl DurableLedgerOptions {
    /// Where the times of entries come from, by default the system's clock.
    pub fn wall_clock(mut self, clock: impl Fn() -> SystemTime + Send + Sync + 'static) -> Self {
        self.clock = Arc::new(clock);
        self
    }

    /// Before the file is that long it is not written anew. For tests.
    #[doc(hidden)]
    pub fn compact_above(mut self, bytes: u64) -> Self {
        self.limits.compact_above = bytes;
        self
    }

    /// Opens it, as [`DurableLedger::open`] does.
    ///
    /// # Errors
    ///
    /// See there.
    pub fn open(self, path: impl AsRef<Path>) -> Result<DurableLedger, LedgerError> {
        let (disk, bytes) = FileDisk::open(path.as_ref())?;
        self.start(disk, &bytes)
    }

    fn start<D: Disk>(self, disk: D, bytes: &[u8]) -> Result<DurableLedger, LedgerError> {
        let format::Contents { mut book, dropped } = format::decode(bytes)?;
        if dropped > 0 {
            tracing::warn!(target: "goaround", bytes = dropped, "the ledger's end was torn, and is dropped");
        }
        book.adopt(Instant::now());
        let shared = Shared::new(book, self.limits);
        let writer = Writer::start(Arc::clone(&shared), disk)?;
        let thread = thread::Builder::new().name("goaround-ledger".into());
        let thread = thread.spawn(|| writer.run()).map_err(|error| LedgerError::Unavailable(error.into()))?;
        let writer = thread.thread().id();
        Ok(DurableLedger(Arc::new(Handle { shared, writer, clock: self.clock, keys: Keys::default() })))
    }
}

impl Default for DurableLedgerOptions {
    fn default() -> Self {
        Self { clock: Arc::new(SystemTime::now), limits: Limits::default() }
    }
}

impl fmt::Debug for DurableLedgerOptions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DurableLedgerOptions").finish_non_exhaustive()
    }
}

// ===== impl DurableLedger =====

impl DurableLedger {
    /// Opens the ledger at that path, and makes it if there is none. It reads and writes files, and so blocks
    /// for some milliseconds, and for a tenth of a second if it is in use.
    ///
    /// # Errors
    ///
    /// - [`LedgerError::InUse`] if another process has it open, or this one.
    /// - [`LedgerError::Damaged`] if it is no ledger, or not as it was written. It is left as it is: move it
    ///   away, and look at the servers for what its writes became of.
    /// - [`LedgerError::Unavailable`] if it cannot be read, if the directory is not there, if a new file cannot
    ///   be written in it, or if a later version has written it.
    pub fn open(path: impl AsRef<Path>) -> Result<Self, LedgerError> {
        Self::options().open(path)
    }

    /// Options to open one with.
    pub fn options() -> DurableLedgerOptions {
        DurableLedgerOptions::default()
    }

    /// The last 1,000 writes that were settled by somebody's word: forgotten, settled by hand, or not landed by
    /// a fence that was declared. Oldest first, without their arguments.
    pub fn settled_by_hand(&self) -> Vec<Entry> {
        let closed = self.0.shared.lock().book.closed();
        closed.into_iter().map(Arc::unwrap_or_clone).collect()
    }

    /// The conflict keys of calls under way, of all stacks.
    pub(in super::super) fn keys(&self) -> &Keys {
        &self.0.keys
    }

    fn now(&self) -> SystemTime {
        (self.0.clock)()
    }

    /// Moves an entry to that state, from that revision or from any.
    fn change(
        &self,
        id: EntryId,
        from: impl FnOnce(&Entry) -> Option<u64>,
        state: State,
    ) -> Result<(u64, Option<writer::Pending>), LedgerError> {
        let (state, now) = (clipped(state), self.now());
        let to = state.clone();
        let line =
            |revision| Record::Settle { id, revision, at_ms: millis(now), to: Cow::Borrowed(&to) }.line();
        self.0.shared.queued(line, |book| {
            let from = from(book.get(id)?).ok_or(LedgerError::Conflict(id))?;
            Ok((from, book.settle(id, from, state, now)?))
        })
    }
}

impl Ledger for DurableLedger {
    async fn enter(&self, mut entry: Entry) -> Result<u64, LedgerError> {
        entry.state = clipped(entry.state);
        entry.orphaned = None;
        let line = bounded(Record::Entry(Cow::Borrowed(&entry)).line()?)?;
        let (id, bytes) = (entry.id, line.len());
        let (revision, pending) = self.0.shared.synced(line, |book| {
            book.admit(&entry, bytes)?;
            let revision = entry.revision;
            book.insert(entry, bytes);
            Ok((revision, Undo::Enter(id)))
        })?;
        let unsent = Unsent { ledger: self, id: Some(id) };
        pending.wait().await?;
        unsent.defuse();
        Ok(revision)
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        let (revision, pending) = self.change(id, |_| Some(revision), state)?;
        if let Some(pending) = pending {
            pending.wait().await?;
        }
        Ok(revision)
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let now = self.now();
        let line = Record::Claim { id, revision, at_ms: millis(now) }.line()?;
        let (revision, pending) = self.0.shared.synced(line, |book| {
            book.may_claim(id)?;
            let was = Arc::clone(book.get(id)?);
            let revision = book.claim(id, revision, now)?;
            Ok((revision, Undo::Claim(was, revision)))
        })?;
        pending.wait().await?;
        Ok(revision)
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let mut entries = Vec::new();
        let mut from = Some(0);
        while let Some(place) = from {
            let listed;
            (listed, from) = self.0.shared.lock().book.in_doubt(place, PORTION);
            entries.extend(listed.into_iter().map(Listed::into_entry));
        }
        for server in servers_of(&entries) {
            // It is remembered since when.
            server.is_gone();
        }
        Ok(entries)
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let (_, pending) =
            self.change(id, |entry| Some(entry.revision), State::Forgotten { by: by.to_owned() })?;
        tracing::info!(target: "goaround", entry = %id, by, "write in doubt forgotten");
        if let Some(pending) = pending {
            pending.wait().await?;
        }
        Ok(())
    }

    fn abandon(&self, id: EntryId, state: State) {
        let open = |entry: &Entry| (entry.state == State::Open).then_some(entry.revision);
        let _ = self.change(id, open, state);
    }

    async fn started(&self, server: ServerProcess) -> Result<(), LedgerError> {
        let owner = Owner(this_run());
        let line = bounded(Record::Server { owner, server: Cow::Borrowed(&server) }.line()?)?;
        let servers = self.0.shared.lock().book.servers(owner);
        let gone: Vec<_> = servers.iter().filter(|server| server.is_gone()).cloned().collect();
        let (_, pending) = self.0.shared.synced(line, |book| {
            book.started(owner, server);
            book.prune(owner, &gone);
            Ok((0, Undo::Nothing))
        })?;
        pending.wait().await
    }
}

impl fmt::Debug for DurableLedger {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unsettled = self.0.shared.lock().book.len();
        f.debug_struct("DurableLedger").field("unsettled", &unsettled).finish_non_exhaustive()
    }
}

// ===== impl Handle =====

impl Drop for Handle {
    fn drop(&mut self) {
        // The writer may be the one that drops it, when it wakes a task that was the last to have it.
        self.shared.close(thread::current().id() != self.writer);
    }
}

/// Settles a write whose caller stopped waiting before it was entered: it was never handed over.
struct Unsent<'a> {
    ledger: &'a DurableLedger,
    id: Option<EntryId>,
}

impl Unsent<'_> {
    fn defuse(mut self) {
        self.id = None;
    }
}

impl Drop for Unsent<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.ledger.abandon(id, State::not_done("its caller left before it was entered"));
        }
    }
}

/// That line, if it is no longer than one may be.
fn bounded(line: Vec<u8>) -> Result<Vec<u8>, LedgerError> {
    match line.len() {
        bytes if bytes > MOST_ENTRY => Err(LedgerError::TooLong { bytes, most: MOST_ENTRY }),
        _ => Ok(line),
    }
}

/// That state, its words cut to what a record can take.
fn clipped(mut state: State) -> State {
    let words = match &mut state {
        State::InDoubt { reason: words }
        | State::Landed { by: words }
        | State::NotLanded { why: words, .. }
        | State::Forgotten { by: words } => words,
        State::Open | State::Answered => return state,
    };
    if words.len() > MOST_WORDS {
        // No character is longer than 4 bytes.
        let cut = (MOST_WORDS - 3..=MOST_WORDS).rev().find(|&cut| words.is_char_boundary(cut));
        words.truncate(cut.unwrap_or(0));
    }
    state
}

/// Reads the bytes of a ledger's file as opening it does, and gives how many writes in it are not settled. For
/// fuzzing.
///
/// # Errors
///
/// [`LedgerError::Damaged`], and [`LedgerError::Unavailable`] for an unknown version.
#[doc(hidden)]
pub fn decode_durable(bytes: &[u8]) -> Result<usize, LedgerError> {
    Ok(format::decode(bytes)?.book.len())
}
