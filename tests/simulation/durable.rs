//! The real ledger in a real file, in some of the worlds with a database: what [`Store`](crate::ledger::Store) does
//! is done here too, and both must say the same.
//!
//! Each step is driven to its end while the simulated world stands still, so that the thread that writes and the disk
//! take none of its time. The entries are those of another process: in the file they have an owner that belongs to
//! one run of the client, so that what a crash left is read by those who did not make it. Two clients do not have one
//! file at once: the second could not open it.

use std::{
    fs::{self, File, OpenOptions},
    future::Future,
    io::{Read, Seek, SeekFrom},
    path::{Path, PathBuf},
    pin::pin,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant, SystemTime},
};

use fastrand::Rng;
use goaround::write_safety::ledger::{DurableLedger, Entry, EntryId, Ledger, LedgerError, State};
use tempfile::TempDir;

use crate::world::Lies;

/// How long is waited for the thread that writes.
const PATIENCE: Duration = Duration::from_secs(60);

/// Where the files of all worlds are.
static FOLDER: Mutex<Option<TempDir>> = Mutex::new(None);

/// The file of a world, and what is open of it.
pub struct OnFile {
    path: PathBuf,
    rng: Rng,
    lies: Lies,
    /// Whether the file is written anew again and again, rather than torn by crashes.
    compacts: bool,
    /// The owner in this process of all entries.
    owner: Option<u128>,
    open: Option<Open>,
}

/// What one run of the client has open.
struct Open {
    ledger: DurableLedger,
    run: u32,
    /// How long the file is with all that was said to be stored for good.
    synced: u64,
    /// And without what was last said to be.
    before: u64,
    /// How long it was with each later change, and the entry as it was before.
    tail: Vec<(u64, Entry)>,
}

impl OnFile {
    pub fn new(seed: u64, lies: Lies) -> Option<Self> {
        let mut rng = Rng::with_seed(seed ^ 0xd15c);
        let compacts = rng.u32(0..100) < 30 && !lies.loses_synced;
        Some(Self { path: new_path(), rng, lies, compacts, owner: None, open: None })
    }

    /// Opens it, if this run of the client has not; gives how many entries there are that are not settled.
    pub fn open(&mut self, run: u32) -> usize {
        if self.open.is_some() {
            return 0;
        }
        let mut options = DurableLedger::options().wall_clock(|| SystemTime::UNIX_EPOCH);
        if self.compacts {
            options = options.compact_above(1_000);
        }
        // It draws a number for its file, and the world's jitter is not to know.
        let drawn = fastrand::get_seed();
        let ledger = options.open(&self.path).expect("a ledger that can be opened");
        fastrand::seed(drawn);
        let synced = length(&self.path);
        let left = block_on(ledger.in_doubt()).expect("a ledger that can be read").len();
        self.open = Some(Open { ledger, run, synced, before: synced, tail: Vec::new() });
        left
    }

    /// The client's process, or its machine, is gone: what was not stored for good may be lost. Gives the entries as
    /// they were before that.
    pub fn crash(&mut self) -> Vec<Entry> {
        let Some(Open { ledger, synced, before, tail, .. }) = self.open.take() else { return Vec::new() };
        drop(ledger);
        if self.lies.forgets_doubts {
            fs::remove_file(&self.path).expect("a file that can be removed");
            return Vec::new();
        }
        if self.compacts {
            return Vec::new();
        }
        let file = OpenOptions::new().write(true).open(&self.path).expect("the ledger's file");
        let kept = self.rng.usize(0..=tail.len());
        let from = if kept == 0 { synced } else { tail[kept - 1].0 };
        let to = tail.get(kept).map_or(from, |(end, _)| *end);
        let fate = self.rng.u32(0..4);
        let cut = |length| file.set_len(length).expect("a file that can be cut");
        if self.lies.loses_synced {
            cut(before);
            return Vec::new();
        }
        match fate {
            // As it is when the process alone is gone, and had written everything.
            0 => return Vec::new(),
            1 => cut(from),
            // A frame that was not written to its end.
            2 => cut(from + (to - from) * self.rng.u64(0..100) / 100),
            // Sectors that were not written, of a file that had grown.
            _ => {
                cut(from);
                cut(from + self.rng.u64(0..3_000));
            }
        }
        tail.into_iter().skip(kept).map(|(_, was)| was).collect()
    }

    fn opened(&self) -> &Open {
        self.open.as_ref().expect("a ledger that is open")
    }

    /// What that entry of ours is called in the file.
    fn outside(&self, id: EntryId) -> EntryId {
        match Some(id.owner()) == self.owner {
            true => named(1 + u128::from(self.opened().run), id),
            false => id,
        }
    }

    /// What the one in the file is called in this run of the client: its own are its own.
    fn inside(&self, id: EntryId) -> EntryId {
        match (self.owner, id.owner() == 1 + u128::from(self.opened().run)) {
            (Some(owner), true) => named(owner, id),
            _ => id,
        }
    }

    fn told<T>(&self, told: Result<T, LedgerError>) -> Result<T, LedgerError> {
        told.map_err(|error| match error {
            LedgerError::Conflict(id) => LedgerError::Conflict(self.inside(id)),
            LedgerError::NotASettlement(id) => LedgerError::NotASettlement(self.inside(id)),
            LedgerError::Overtaken(id) => LedgerError::Overtaken(self.inside(id)),
            LedgerError::KeyInDoubt { id, method } => LedgerError::KeyInDoubt { id: self.inside(id), method },
            other => other,
        })
    }

    pub fn enter(&mut self, entry: &Entry) -> Result<u64, LedgerError> {
        self.owner = Some(entry.id.owner());
        let entry = renamed(entry.clone(), self.outside(entry.id));
        let told = block_on(self.opened().ledger.enter(entry));
        self.is_synced(&told);
        self.told(told)
    }

    pub fn claim(&mut self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let told = block_on(self.opened().ledger.claim(self.outside(id), revision));
        self.is_synced(&told);
        self.told(told)
    }

    /// `was` is the entry before it, if it was there.
    pub fn settle(
        &mut self,
        id: EntryId,
        revision: u64,
        to: State,
        was: Option<&Entry>,
    ) -> Result<u64, LedgerError> {
        let told = block_on(self.opened().ledger.settle(self.outside(id), revision, to));
        self.is_written(&told, was);
        self.told(told)
    }

    pub fn forget(&mut self, id: EntryId, by: &str, was: Option<&Entry>) -> Result<u64, LedgerError> {
        let told = block_on(self.opened().ledger.forget(self.outside(id), by)).map(|()| next(was));
        self.is_written(&told, was);
        self.told(told)
    }

    /// It says nothing of what came of it. What must come of it is said instead.
    pub fn abandon(&mut self, id: EntryId, to: State, was: Option<&Entry>) -> Result<u64, LedgerError> {
        self.opened().ledger.abandon(self.outside(id), to);
        let told = match was.is_some_and(|was| was.state == State::Open) {
            true => Ok(next(was)),
            false => Err(LedgerError::Conflict(id)),
        };
        self.is_written(&told, was);
        told
    }

    /// What it lists, with the names that this run of the client has for it.
    pub fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let listed = self.told(block_on(self.opened().ledger.in_doubt()))?;
        let inside = |entry: Entry| {
            let id = self.inside(entry.id);
            renamed(entry, id)
        };
        Ok(listed.into_iter().map(inside).collect())
    }

    /// Closes it and opens it again, if it does: all that is not settled.
    pub fn left(&mut self) -> Option<Vec<Entry>> {
        let run = self.open.as_ref()?.run;
        if self.rng.bool() {
            return None;
        }
        self.open = None;
        self.open(run + 1);
        Some(self.in_doubt().expect("a ledger that can be read"))
    }

    /// What is stored for good ends where the file does: nothing is queued.
    fn is_synced(&mut self, told: &Result<u64, LedgerError>) {
        let end = length(&self.path);
        if let (Some(open), Ok(_)) = (&mut self.open, told) {
            open.before = open.end();
            open.synced = end;
            open.tail.clear();
        }
    }

    /// Waits until a change that nobody waits for is in the file, so that each has a frame of its own.
    fn is_written(&mut self, told: &Result<u64, LedgerError>, was: Option<&Entry>) {
        let (Some(open), Some(was), Ok(_), false) = (&mut self.open, was, told, self.compacts) else {
            return;
        };
        let (before, start) = (open.end(), Instant::now());
        loop {
            if let Some(end) = end_of_frame(&self.path, before) {
                return open.tail.push((end, was.clone()));
            }
            assert!(start.elapsed() < PATIENCE, "a change is not written");
            thread::yield_now();
        }
    }
}

/// Where the frame ends that begins at that byte, if all of it is in the file: a file that grows over the border of a
/// page is seen with a part of it.
fn end_of_frame(path: &Path, at: u64) -> Option<u64> {
    /// Of which the second four bytes say how long the payload is.
    const HEADER: u64 = 24;
    let long = length(path);
    if long < at + HEADER {
        return None;
    }
    let mut length = [0; 4];
    let mut file = File::open(path).expect("the ledger's file");
    file.seek(SeekFrom::Start(at + 4)).expect("a place in a file");
    file.read_exact(&mut length).expect("a frame's header");
    let end = at + HEADER + u64::from(u32::from_le_bytes(length));
    (end <= long).then_some(end)
}

impl Open {
    /// How long the file is.
    fn end(&self) -> u64 {
        self.tail.last().map_or(self.synced, |(end, _)| *end)
    }
}

/// The revision of an entry that was that and has changed.
fn next(was: Option<&Entry>) -> u64 {
    was.map_or(0, |was| was.revision + 1)
}

impl Drop for OnFile {
    fn drop(&mut self) {
        self.open = None;
        let _ = fs::remove_file(&self.path);
    }
}

/// A name in a folder that lies in memory where the system has that.
fn new_path() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let mut folder = FOLDER.lock().unwrap_or_else(PoisonError::into_inner);
    let folder = folder.get_or_insert_with(|| {
        let mut builder = tempfile::Builder::new();
        let builder = builder.prefix("goaround-simulation-");
        let in_memory = builder.tempdir_in("/dev/shm");
        in_memory.or_else(|_| builder.tempdir()).expect("a folder")
    });
    folder.path().join(NEXT.fetch_add(1, Ordering::Relaxed).to_string())
}

/// Removes all files, also those of worlds that something has kept.
pub fn clean_up() {
    drop(FOLDER.lock().unwrap_or_else(PoisonError::into_inner).take());
}

fn length(path: &Path) -> u64 {
    fs::metadata(path).expect("the ledger's file").len()
}

fn renamed(mut entry: Entry, id: EntryId) -> Entry {
    entry.id = id;
    entry
}

/// The same call of another owner.
fn named(owner: u128, id: EntryId) -> EntryId {
    format!("{owner:032x}-{}", id.call()).parse().expect("the id of an entry")
}

/// Waits on this thread, and nothing else goes on.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Parked(Thread);

    impl Wake for Parked {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }

    let waker = Waker::from(Arc::new(Parked(thread::current())));
    // A task that has had its share of polls would wait for others, which do not go on.
    let mut future = pin!(tokio::task::unconstrained(future));
    loop {
        if let Poll::Ready(told) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return told;
        }
        thread::park();
    }
}
