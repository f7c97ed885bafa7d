//! The thread that writes: many changes share one sync.

use std::{
    collections::VecDeque,
    io, mem,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use tokio::sync::oneshot;

use super::{
    super::{Entry, EntryId, LedgerError},
    book::{Book, Copied},
    disk::{Disk, ReplaceError},
    format::{self, MOST_FRAME},
};
use crate::wakers::unharmed;

/// Within which time a change that nobody waits for is on the disk.
const SYNC_WITHIN: Duration = Duration::from_millis(100);
/// How long at most it is waited for those that the last sync woke, so that the next one is for all of them.
const GATHER: Duration = Duration::from_millis(1);
/// Less is no wait, but a switch of threads.
const GATHER_LEAST: Duration = Duration::from_micros(20);
/// How long the last clone's destructor waits for the last sync.
const CLOSE_WITHIN: Duration = Duration::from_secs(5);
/// Beyond that, also a change that needs no sync waits for one.
const MOST_QUEUED: usize = 8 << 20;

/// What the calls and the writer share.
#[derive(Debug, Default)]
pub(super) struct Shared {
    inner: Mutex<Inner>,
    work: Condvar,
    stopped: Condvar,
    limits: Limits,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    /// How long a ledger that failed refuses before it tries to write a new file.
    pub(super) repair_after: Duration,
    /// A file is not replaced by a shorter one before it is that long.
    pub(super) compact_above: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { repair_after: Duration::from_secs(1), compact_above: 4 << 20 }
    }
}

#[derive(Debug, Default)]
pub(super) struct Inner {
    /// What the ledger says. It runs ahead of the disk by what is queued and, after a failure, by more.
    pub(super) book: Book,
    queue: VecDeque<Queued>,
    queued_bytes: usize,
    /// How many wait for what is queued, and for how many of them the writer waits before it goes on.
    waiting: usize,
    wanted: usize,
    failed: Option<Failed>,
    /// A new file is being written after a failure, of the book as it was when that began.
    repairing: bool,
    closing: bool,
    stopped: bool,
}

#[derive(Debug)]
struct Queued {
    line: Vec<u8>,
    /// Who waits for it to be synced, and how it is taken back if it is not.
    waiter: Option<(Done, Undo)>,
}

type Done = oneshot::Sender<Result<(), Failure>>;

/// Takes a change back that was not stored, and of which the caller is told so.
#[derive(Debug)]
pub(super) enum Undo {
    /// The write is not handed over.
    Enter(EntryId),
    /// It is not handed over again. The entry as it was, and the claim's revision.
    Claim(Arc<Entry>, u64),
    /// It stays: the book is right, and the next file will say so.
    Nothing,
}

#[derive(Debug)]
struct Failed {
    error: Failure,
    failed_at: Instant,
}

/// An error that many callers get.
#[derive(Clone, Debug)]
pub(super) struct Failure {
    kind: io::ErrorKind,
    text: Arc<str>,
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        Self { kind: error.kind(), text: error.to_string().into() }
    }
}

impl From<Failure> for LedgerError {
    fn from(Failure { kind, text }: Failure) -> Self {
        Self::Unavailable(io::Error::new(kind, &*text).into())
    }
}

fn stopped() -> Failure {
    io::Error::new(io::ErrorKind::BrokenPipe, "the ledger's writer has stopped").into()
}

// ===== impl Shared =====

impl Shared {
    pub(super) fn new(book: Book, limits: Limits) -> Arc<Self> {
        let inner = Inner { book, ..Inner::default() };
        Arc::new(Self { inner: Mutex::new(inner), limits, ..Self::default() })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a change that counts only once it is synced, which the receiver tells.
    pub(super) fn synced(
        &self,
        line: Vec<u8>,
        change: impl FnOnce(&mut Book) -> Result<(u64, Undo), LedgerError>,
    ) -> Result<(u64, Pending), LedgerError> {
        let mut inner = self.lock();
        inner.may_try(self.limits.repair_after)?;
        let (revision, undo) = change(&mut inner.book)?;
        let (done, pending) = oneshot::channel();
        self.push(&mut inner, line, Some((done, undo)));
        Ok((revision, Pending(pending)))
    }

    /// Makes a change that counts at once, and is stored by and by. What it gives besides is waited for where
    /// more is queued than the disk can take.
    pub(super) fn queued(
        &self,
        line: impl FnOnce(u64) -> Result<Vec<u8>, LedgerError>,
        change: impl FnOnce(&mut Book) -> Result<(u64, u64), LedgerError>,
    ) -> Result<(u64, Option<Pending>), LedgerError> {
        let mut inner = self.lock();
        let (from, revision) = change(&mut inner.book)?;
        match &inner.failed {
            _ if inner.stopped => return Err(stopped().into()),
            // The next file will be of the book that has it already.
            Some(failed) if !inner.repairing => return Err(failed.error.clone().into()),
            _ => {}
        }
        let (waiter, pending) = match inner.queued_bytes > MOST_QUEUED {
            true => {
                let (done, pending) = oneshot::channel();
                (Some((done, Undo::Nothing)), Some(Pending(pending)))
            }
            false => (None, None),
        };
        self.push(&mut inner, line(from)?, waiter);
        Ok((revision, pending))
    }

    fn push(&self, inner: &mut Inner, line: Vec<u8>, waiter: Option<(Done, Undo)>) {
        inner.queued_bytes += line.len();
        inner.waiting += usize::from(waiter.is_some());
        inner.queue.push_back(Queued { line, waiter });
        if inner.waiting >= inner.wanted {
            self.work.notify_one();
        }
    }

    /// Lets the writer end, and waits for that a while.
    pub(super) fn close(&self, wait: bool) {
        let mut inner = self.lock();
        inner.closing = true;
        self.work.notify_one();
        if wait {
            drop(self.stopped.wait_timeout_while(inner, CLOSE_WITHIN, |inner| !inner.stopped));
        }
    }
}

/// Resolves once a change is synced.
#[derive(Debug)]
pub(super) struct Pending(oneshot::Receiver<Result<(), Failure>>);

impl Pending {
    pub(super) async fn wait(self) -> Result<(), LedgerError> {
        Ok(self.0.await.unwrap_or_else(|_| Err(stopped()))?)
    }
}

// ===== impl Inner =====

impl Inner {
    fn may_try(&self, repair_after: Duration) -> Result<(), LedgerError> {
        match &self.failed {
            _ if self.stopped => Err(stopped().into()),
            Some(failed) if failed.failed_at.elapsed() < repair_after => Err(failed.error.clone().into()),
            _ => Ok(()),
        }
    }

    /// As much of the queue as a frame can take.
    fn take(&mut self) -> Vec<Queued> {
        let mut bytes = 0;
        let fits = |queued: &&Queued| {
            bytes += queued.line.len();
            bytes <= MOST_FRAME
        };
        let count = self.queue.iter().take_while(fits).count();
        let batch: Vec<_> = self.queue.drain(..count).collect();
        self.queued_bytes -= batch.iter().map(|queued| queued.line.len()).sum::<usize>();
        self.waiting -= waiting(&batch);
        batch
    }

    fn take_all(&mut self) -> Vec<Queued> {
        (self.queued_bytes, self.waiting) = (0, 0);
        self.queue.drain(..).collect()
    }

    fn put_back(&mut self, batch: Vec<Queued>) {
        self.waiting += waiting(&batch);
        for queued in batch.into_iter().rev() {
            self.queued_bytes += queued.line.len();
            self.queue.push_front(queued);
        }
    }

    /// Takes back what was not stored, the latest first, and gives those that wait for it.
    fn undo(&mut self, batch: Vec<Queued>) -> Vec<Done> {
        let waiters = batch.into_iter().rev().filter_map(|queued| queued.waiter);
        waiters
            .map(|(done, undo)| {
                match undo {
                    Undo::Enter(id) => self.book.remove(id),
                    Undo::Claim(entry, revision) => self.book.restore(revision, entry),
                    Undo::Nothing => {}
                }
                done
            })
            .collect()
    }
}

// ===== impl Writer =====

/// The writer's own side.
#[derive(Debug)]
pub(super) struct Writer<D> {
    shared: Arc<Shared>,
    disk: D,
    /// The file's own number.
    number: u64,
    length: u64,
    /// How much of it is on the disk for certain.
    synced: u64,
    compact_at: u64,
    /// Since when something is written and not synced.
    unsynced: Option<Instant>,
    /// How many the last sync was for, and how long it took.
    woken: usize,
    sync_took: Duration,
}

struct Job {
    batch: Vec<Queued>,
    /// The book, if a new file is to be written.
    book: Option<Copied>,
    sync: bool,
    last: bool,
}

impl<D: Disk> Writer<D> {
    /// Puts a new file of that book in place. The old one may have had a torn end, or pages that are in the
    /// cache alone since a sync failed; of this one every byte is synced.
    pub(super) fn start(shared: Arc<Shared>, mut disk: D) -> Result<Self, LedgerError> {
        let number = fastrand::u64(..);
        let book = shared.lock().book.copy();
        let file = format::file(number, &book.records())?;
        disk.replace(&file).map_err(|error| LedgerError::Unavailable(error.into_inner().into()))?;
        let length = file.len() as u64;
        let compact_at = compact_at(length, shared.limits);
        Ok(Self {
            shared,
            disk,
            number,
            length,
            synced: length,
            compact_at,
            unsynced: None,
            woken: 0,
            sync_took: Duration::ZERO,
        })
    }

    pub(super) fn run(mut self) {
        let stop = Stop(Arc::clone(&self.shared));
        loop {
            let Job { batch, book, sync, last } = self.next();
            match book {
                Some(book) => self.rewrite(batch, &book),
                None => self.append(batch, sync),
            }
            if last {
                break;
            }
        }
        // The file's lock goes before anybody is told.
        drop(self);
        drop(stop);
    }

    fn next(&mut self) -> Job {
        let mut inner = self.shared.lock();
        let due = || self.unsynced.is_some_and(|since| since.elapsed() >= SYNC_WITHIN);
        while !inner.closing && inner.queue.is_empty() && !due() {
            let work = &self.shared.work;
            inner = match self.unsynced {
                None => work.wait(inner).unwrap_or_else(PoisonError::into_inner),
                Some(since) => {
                    let left = SYNC_WITHIN.saturating_sub(since.elapsed());
                    work.wait_timeout(inner, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        let gather = (self.sync_took / 8).min(GATHER);
        inner.wanted = mem::take(&mut self.woken);
        if gather >= GATHER_LEAST {
            let fewer = |inner: &mut Inner| inner.waiting < inner.wanted && !inner.closing;
            let gathered = self.shared.work.wait_timeout_while(inner, gather, fewer);
            inner = gathered.unwrap_or_else(PoisonError::into_inner).0;
        }
        inner.wanted = 0;
        let anew = inner.failed.is_some() || (self.length > self.compact_at && !inner.closing);
        let batch = if anew { inner.take_all() } else { inner.take() };
        inner.repairing = inner.failed.is_some();
        let sync = inner.closing || due() || waiting(&batch) > 0;
        let last = inner.closing && inner.queue.is_empty();
        Job { batch, book: anew.then(|| inner.book.copy()), sync, last }
    }

    fn append(&mut self, batch: Vec<Queued>, sync: bool) {
        match self.try_append(&batch, sync) {
            Ok(()) => confirm(batch),
            Err(error) => {
                // Of what was not synced nobody knows what is on the disk, and no second sync would tell.
                self.disk.cut(self.synced);
                self.fail(batch, error);
            }
        }
    }

    fn try_append(&mut self, batch: &[Queued], sync: bool) -> io::Result<()> {
        if !batch.is_empty() {
            let mut payload = Vec::new();
            for queued in batch {
                payload.extend_from_slice(&queued.line);
            }
            let mut frame = Vec::with_capacity(format::FRAME_HEADER + payload.len());
            format::frame(&mut frame, self.number, self.length, self.synced, payload);
            self.disk.append(&frame)?;
            self.length += frame.len() as u64;
            self.unsynced.get_or_insert_with(Instant::now);
        }
        if sync && self.unsynced.is_some() {
            let start = Instant::now();
            self.disk.sync()?;
            self.sync_took = start.elapsed();
            self.woken = waiting(batch);
            self.synced = self.length;
            self.unsynced = None;
        }
        Ok(())
    }

    /// Writes a new file of that book, which has what is in the batch.
    fn rewrite(&mut self, batch: Vec<Queued>, book: &Copied) {
        let number = fastrand::u64(..);
        let file = match format::file(number, &book.records()) {
            Ok(file) => file,
            Err(error) => return self.fail(batch, io::Error::other(error)),
        };
        match self.disk.replace(&file) {
            Ok(()) => {
                self.number = number;
                self.length = file.len() as u64;
                self.synced = self.length;
                self.compact_at = compact_at(self.length, self.shared.limits);
                self.unsynced = None;
                let mut inner = self.shared.lock();
                inner.repairing = false;
                let failed = inner.failed.take();
                drop(inner);
                if failed.is_some() {
                    tracing::info!(target: "goaround", "the ledger is written again");
                }
                confirm(batch);
            }
            Err(ReplaceError::Untouched(error)) if !self.shared.lock().repairing => {
                tracing::warn!(target: "goaround", kind = ?error.kind(), "the ledger cannot be made shorter");
                self.compact_at = self.length.saturating_mul(2);
                self.shared.lock().put_back(batch);
            }
            Err(error) => self.fail(batch, error.into_inner()),
        }
    }

    /// From here on nothing is entered until a new file is written.
    fn fail(&mut self, batch: Vec<Queued>, error: io::Error) {
        self.unsynced = None;
        tracing::error!(target: "goaround", kind = ?error.kind(), "the ledger cannot be written");
        let error = Failure::from(error);
        let mut inner = self.shared.lock();
        let failed_at = Instant::now();
        inner.failed = Some(Failed { error: error.clone(), failed_at });
        inner.repairing = false;
        let mut lost = batch;
        lost.extend(inner.take_all());
        let waiting = inner.undo(lost);
        drop(inner);
        for done in waiting {
            tell(done, Err(error.clone()));
        }
    }
}

/// Lets one that waits know. Its waker may panic, and must not end the thread that writes.
fn tell(done: Done, result: Result<(), Failure>) {
    unharmed(|| drop(done.send(result)));
}

/// How many wait for these.
fn waiting(batch: &[Queued]) -> usize {
    batch.iter().filter(|queued| queued.waiter.is_some()).count()
}

/// Tells those that wait. Without the lock: whoever is woken may do anything, also drop the ledger.
fn confirm(batch: Vec<Queued>) {
    for (done, _) in batch.into_iter().filter_map(|queued| queued.waiter) {
        tell(done, Ok(()));
    }
}

/// How long the file may become that is now that long.
fn compact_at(length: u64, limits: Limits) -> u64 {
    length.saturating_mul(2).max(limits.compact_above)
}

/// However the writer ends, nobody waits for it any more.
struct Stop(Arc<Shared>);

impl Drop for Stop {
    fn drop(&mut self) {
        let mut inner = self.0.lock();
        inner.stopped = true;
        let lost = inner.take_all();
        let waiting = inner.undo(lost);
        drop(inner);
        self.0.stopped.notify_all();
        for done in waiting {
            tell(done, Err(stopped()));
        }
    }
}
