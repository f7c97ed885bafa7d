//! The ledger on a disk that fails and loses power, and on files that were cut and changed.

use std::{
    collections::BTreeMap,
    io,
    pin::pin,
    sync::{Arc, Mutex, MutexGuard},
    task::{Context, Poll, Waker},
    time::Duration,
};

use super::{
    disk::ReplaceError,
    format::{FRAME_HEADER, HEADER},
    *,
};
use crate::{CallId, Effect};

// ===== the disk =====

/// A disk that knows which of its bytes outlast the loss of power.
#[derive(Clone, Debug, Default)]
struct Simulated(Arc<Mutex<Bytes>>);

#[derive(Debug, Default)]
struct Bytes {
    now: Vec<u8>,
    /// Of those how many are synced.
    synced: usize,
    syncs: u64,
    fault: Option<Fault>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Fault {
    /// No more than that many bytes fit.
    Full(usize),
    /// A sync fails, once. What it was for is lost, and yet the next one succeeds.
    Sync,
    /// A sync fails, once, and no new file can be written.
    SyncAndReplace,
    /// No new file can be written.
    Replace,
    /// The new file is there, but it is not sure that it stays.
    Uncertain,
}

impl Simulated {
    fn bytes(&self) -> MutexGuard<'_, Bytes> {
        self.0.lock().unwrap()
    }

    fn fault(&self, fault: impl Into<Option<Fault>>) {
        self.bytes().fault = fault.into();
    }

    fn now(&self) -> Vec<u8> {
        self.bytes().now.clone()
    }

    /// What is there after a loss of power: of what was not synced any sector may be missing, zero or there.
    fn after_power_cut(&self, random: &mut fastrand::Rng) -> Vec<u8> {
        let bytes = self.bytes();
        let mut after = bytes.now.clone();
        match random.u8(..4) {
            0 => after.truncate(random.usize(bytes.synced..=bytes.now.len())),
            1 => after.truncate(bytes.synced),
            _ => {
                for sector in bytes.synced / 512..=after.len() / 512 {
                    let end = after.len().min((sector + 1) * 512);
                    if random.bool() {
                        after[(sector * 512).max(bytes.synced)..end].fill(0);
                    }
                }
                let cut = [after.len(), after.len() / 512 * 512][random.usize(..2)];
                after.truncate(cut.max(bytes.synced));
            }
        }
        after
    }
}

impl Disk for Simulated {
    fn append(&mut self, new: &[u8]) -> io::Result<()> {
        let mut bytes = self.bytes();
        if let Some(Fault::Full(most)) = bytes.fault
            && bytes.now.len() + new.len() > most
        {
            let fits = most.saturating_sub(bytes.now.len());
            bytes.now.extend_from_slice(&new[..fits]);
            return Err(io::ErrorKind::StorageFull.into());
        }
        bytes.now.extend_from_slice(new);
        Ok(())
    }

    fn sync(&mut self) -> io::Result<()> {
        // Let others queue.
        std::thread::yield_now();
        let mut bytes = self.bytes();
        bytes.syncs += 1;
        if matches!(bytes.fault, Some(Fault::Sync | Fault::SyncAndReplace)) {
            let synced = bytes.synced;
            bytes.now[synced..].fill(0);
            bytes.synced = bytes.now.len();
            if bytes.fault == Some(Fault::Sync) {
                bytes.fault = None;
            }
            return Err(io::Error::other("the disk is broken"));
        }
        bytes.synced = bytes.now.len();
        Ok(())
    }

    fn cut(&mut self, length: u64) {
        let mut bytes = self.bytes();
        bytes.now.truncate(length as usize);
        bytes.synced = bytes.synced.min(bytes.now.len());
    }

    fn replace(&mut self, new: &[u8]) -> Result<(), ReplaceError> {
        let mut bytes = self.bytes();
        match bytes.fault {
            Some(Fault::Full(most)) if new.len() > most => {
                return Err(ReplaceError::Untouched(io::ErrorKind::StorageFull.into()));
            }
            Some(Fault::SyncAndReplace | Fault::Replace) => {
                return Err(ReplaceError::Untouched(io::Error::other("the disk is broken")));
            }
            _ => {}
        }
        bytes.now = new.to_vec();
        bytes.synced = new.len();
        match bytes.fault {
            Some(Fault::Uncertain) => Err(ReplaceError::Uncertain(io::Error::other("no directory"))),
            _ => Ok(()),
        }
    }
}

// ===== what is entered =====

const OWNER: u128 = 7;

fn id(n: u64) -> EntryId {
    EntryId { owner: OWNER, call: CallId::from_parts(1, n).unwrap() }
}

fn entry(n: u64) -> Entry {
    Entry::new(id(n), "pay".into(), Effect::Write, 1, SystemTime::now())
}

fn keyed(n: u64, key: &str) -> Entry {
    Entry { key: Some(key.into()), ..entry(n) }
}

fn lost() -> State {
    State::InDoubt { reason: "lost".into() }
}

fn landed() -> State {
    State::Landed { by: "jane".into() }
}

fn options(repair_after: Duration) -> DurableLedgerOptions {
    let limits = Limits { repair_after, compact_above: 16 << 10 };
    DurableLedgerOptions { limits, ..DurableLedgerOptions::default() }
}

fn open(disk: &Simulated) -> DurableLedger {
    options(Duration::ZERO).start(disk.clone(), &disk.now()).unwrap()
}

fn number(entry: &Entry) -> u64 {
    entry.id.to_string().rsplit('-').next().unwrap().parse().unwrap()
}

/// The unsettled writes of a file, by their number.
fn unsettled(bytes: &[u8]) -> BTreeMap<u64, Entry> {
    let format::Contents { mut book, .. } = format::decode(bytes).unwrap();
    book.adopt(Instant::now());
    let (listed, _) = book.in_doubt(0, usize::MAX);
    listed.into_iter().map(Listed::into_entry).map(|entry| (number(&entry), entry)).collect()
}

// ===== what a crash leaves =====

#[tokio::test]
async fn a_power_cut_at_any_moment_leaves_every_write_that_was_entered_and_settles_none() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let disk = Simulated::default();
    let ledger = open(&disk);
    // What was confirmed before the power was cut, and what may be settled by then.
    let [entered, claimed, settling] = [(); 3].map(|()| Arc::new(Mutex::new(Vec::new())));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..16 {
        let ledger = ledger.clone();
        let [entered, claimed, settling] = [&entered, &claimed, &settling].map(Arc::clone);
        let mut random = random.fork();
        tasks.spawn(async move {
            for n in 0..25 {
                let n = task * 1000 + n;
                let mut entry = entry(n);
                entry.arguments = Some("x".repeat(random.usize(..700)));
                let mut revision = ledger.enter(entry).await.unwrap();
                entered.lock().unwrap().push(n);
                if random.bool() {
                    revision = ledger.claim(id(n), revision).await.unwrap();
                    claimed.lock().unwrap().push(n);
                }
                if random.bool() {
                    settling.lock().unwrap().push(n);
                    ledger.settle(id(n), revision, State::Answered).await.unwrap();
                }
            }
        });
    }
    let mut torn = 0;
    let mut check = || {
        let entered = entered.lock().unwrap().clone();
        let claimed = claimed.lock().unwrap().clone();
        let after = disk.after_power_cut(&mut random);
        torn += u32::from(format::decode(&after).unwrap().dropped > 0);
        let settling = settling.lock().unwrap();
        let found = unsettled(&after);
        for n in entered {
            assert!(found.contains_key(&n) || settling.contains(&n), "{n} was lost");
        }
        for n in claimed {
            assert!(found.get(&n).is_none_or(|entry| entry.attempts == 2), "the claim of {n} was lost");
        }
    };
    while !tasks.is_empty() {
        let _ = tokio::time::timeout(Duration::from_millis(1), tasks.join_next()).await;
        check();
    }
    drop(ledger);
    check();
    assert!(torn > 0, "nothing was torn");
    // All that was settled is, once it was closed.
    assert_eq!(unsettled(&disk.now()).len(), 16 * 25 - settling.lock().unwrap().len());
}

/// A file of a few frames, and where each begins.
async fn few() -> (Vec<u8>, Vec<usize>) {
    let disk = Simulated::default();
    let ledger = open(&disk);
    ledger.enter(keyed(1, "account 7")).await.unwrap();
    ledger.enter(entry(2)).await.unwrap();
    ledger.claim(id(2), 1).await.unwrap();
    ledger.settle(id(1), 1, landed()).await.unwrap();
    ledger.started(server(1)).await.unwrap();
    let bytes = disk.now();
    let frames: Vec<_> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"\xf5gol")).collect();
    assert!(frames.len() >= 4 && frames[0] == HEADER);
    (bytes, frames)
}

fn server(pid: u32) -> ServerProcess {
    ServerProcess {
        pid,
        started: None,
        boot: None,
        machine: None,
        namespace: None,
        stack: 1,
        exit_ends_effects: true,
    }
}

#[tokio::test]
async fn a_file_cut_at_any_byte_is_read_up_to_its_last_whole_frame() {
    let (bytes, frames) = few().await;
    let books: Vec<_> = frames.iter().map(|&end| unsettled(&bytes[..end])).collect();
    for length in 0..=bytes.len() {
        let contents = format::decode(&bytes[..length]).unwrap();
        let whole = frames.iter().rposition(|&end| end <= length);
        match whole {
            None => assert_eq!((contents.book.len(), contents.dropped), (0, length)),
            Some(whole) if whole + 1 < frames.len() => {
                assert_eq!(contents.dropped, length - frames[whole]);
                assert_eq!(contents.book.len(), books[whole].len());
            }
            Some(_) => assert!(contents.dropped == 0 || length < bytes.len()),
        }
        // And opening goes on from there.
        let disk = Simulated::default();
        let ledger = options(Duration::ZERO).start(disk.clone(), &bytes[..length]).unwrap();
        assert_eq!(ledger.in_doubt().await.unwrap().len(), contents.book.len());
        ledger.enter(entry(99)).await.unwrap();
        drop(ledger);
        assert_eq!(unsettled(&disk.now()).len(), contents.book.len() + 1);
    }
}

#[tokio::test]
async fn no_bit_of_a_file_can_be_changed_without_a_word() {
    let (mut bytes, _) = few().await;
    for at in 0..bytes.len() {
        for bit in 0..8 {
            bytes[at] ^= 1 << bit;
            let found = format::decode(&bytes);
            assert!(
                matches!(&found, Err(LedgerError::Damaged(why)) if why.starts_with("at byte ")),
                "{at}.{bit}"
            );
            bytes[at] ^= 1 << bit;
        }
    }
    assert!(format::decode(&bytes).is_ok());
}

#[tokio::test]
async fn bytes_overwritten_by_zeros_or_others_are_damage_unless_a_power_cut_could_have_left_them() {
    let (bytes, frames) = few().await;
    let mut random = fastrand::Rng::with_seed(1);
    for start in HEADER..bytes.len() {
        for length in [1, 2, 7, 16, 64] {
            let end = (start + length).min(bytes.len());
            let mut changed = bytes.clone();
            changed[start..end].iter_mut().for_each(|byte| *byte = random.u8(1..=255));
            if changed != bytes {
                assert!(matches!(format::decode(&changed), Err(LedgerError::Damaged(_))), "{start}..{end}");
            }
            changed[start..end].fill(0);
            let to_border = (start % 512 == 0 || frames.contains(&start))
                && (end % 512 == 0 || end == bytes.len() || frames.contains(&end));
            if !to_border && !(start..end).any(|at| at % 512 == 0) && changed != bytes {
                assert!(matches!(format::decode(&changed), Err(LedgerError::Damaged(_))), "{start}..{end}");
            }
        }
    }
}

#[tokio::test]
async fn a_sector_of_zeros_is_a_torn_end_only_where_nothing_says_that_it_was_synced() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    for n in 1..=3 {
        ledger.enter(Entry { arguments: Some("x".repeat(2000)), ..entry(n) }).await.unwrap();
    }
    let bytes = disk.now();
    let starts: Vec<_> = (0..bytes.len()).filter(|&at| bytes[at..].starts_with(b"\xf5gol")).collect();
    let (mut torn, mut damaged) = (0, 0);
    for sector in 1..bytes.len() / 512 {
        let mut changed = bytes.clone();
        changed[sector * 512..(sector + 1) * 512].fill(0);
        let in_last = sector * 512 >= starts[2];
        let touches_last = (sector + 1) * 512 > starts[2];
        match format::decode(&changed) {
            Ok(contents) => {
                // With the last frame's header goes its word that the one before was synced.
                assert!(touches_last && contents.dropped > 0, "{sector}");
                assert_eq!(contents.book.len(), if in_last { 2 } else { 1 });
                torn += 1;
            }
            Err(LedgerError::Damaged(_)) => {
                assert!(!in_last, "{sector}");
                damaged += 1;
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert!(torn >= 3 && damaged >= 6, "{torn} {damaged}");
}

#[test]
fn an_unknown_version_is_said_to_be_one() {
    let mut bytes = format::header(5).to_vec();
    assert!(format::decode(&bytes).is_ok());
    bytes[16] = 2;
    assert!(matches!(format::decode(&bytes), Err(LedgerError::Damaged(_))));
    let of_version_2 = format::header_of(2, 5);
    let Err(LedgerError::Unavailable(why)) = format::decode(&of_version_2) else { panic!() };
    assert!(why.to_string().contains("version 2"), "{why}");
    for foreign in [&b"{}"[..], &[7; 100], b"goaround-ledgers, and how to keep them: a page of text"] {
        assert!(matches!(format::decode(foreign), Err(LedgerError::Damaged(_))));
    }
}

#[test]
fn no_bytes_at_all_make_the_decoder_panic() {
    let mut random = fastrand::Rng::with_seed(2);
    let lines: Vec<Vec<u8>> = (0..6)
        .map(|n| match n {
            0 | 1 => Record::Entry(Cow::Owned(entry(n))),
            2 => Record::Settle { id: id(0), revision: 1, at_ms: u64::MAX, to: Cow::Owned(State::Answered) },
            3 => Record::Claim { id: id(1), revision: u64::MAX, at_ms: 0 },
            4 => Record::Server { owner: Owner(1), server: Cow::Owned(server(1)) },
            _ => Record::Closed(Cow::Owned(Entry { state: landed(), ..entry(9) })),
        })
        .map(|record| record.line().unwrap())
        .collect();
    let (mut good, mut bad) = (0, 0);
    for _ in 0..8_000 {
        let mut file = format::header(3).to_vec();
        for _ in 0..random.usize(..4) {
            let mut payload = Vec::new();
            for _ in 0..random.usize(..4) {
                payload.extend_from_slice(&lines[random.usize(..lines.len())]);
            }
            if random.u8(..4) == 0 && !payload.is_empty() {
                let at = random.usize(..payload.len());
                payload[at] = random.u8(..);
            }
            let (at, synced) = (file.len() as u64, random.u64(..1000));
            format::frame(&mut file, 3, at, synced, payload);
        }
        match format::decode(&file) {
            Ok(_) => good += 1,
            Err(_) => bad += 1,
        }
        let noise: Vec<u8> = (0..random.usize(..200)).map(|_| random.u8(..)).collect();
        file.extend_from_slice(&noise);
        let _ = format::decode(&file);
        let _ = format::decode(&noise);
    }
    assert!(good > 100 && bad > 100, "{good} {bad}");
}

// ===== disks that fail =====

fn refused<T: std::fmt::Debug>(result: Result<T, LedgerError>) {
    assert!(matches!(result, Err(LedgerError::Unavailable(_))), "{result:?}");
}

#[tokio::test]
async fn a_full_disk_refuses_writes_until_there_is_room_and_keeps_what_it_has() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    for n in 1..=3 {
        ledger.enter(keyed(n, &n.to_string())).await.unwrap();
    }
    let length = disk.now().len();
    disk.fault(Fault::Full(length + FRAME_HEADER + 10));
    refused(ledger.enter(entry(4)).await);
    // What was begun is cut off again.
    assert_eq!(disk.now().len(), length);
    disk.fault(Fault::Full(0));
    refused(ledger.enter(entry(5)).await);
    refused(ledger.claim(id(1), 1).await);
    // It counts here, and is said not to be stored.
    refused(ledger.settle(id(2), 1, lost()).await);
    refused(ledger.settle(id(3), 1, State::Answered).await);
    assert_eq!(ledger.in_doubt().await.unwrap().len(), 1);
    assert!(matches!(ledger.enter(keyed(6, "2")).await, Err(LedgerError::KeyInDoubt { .. })));
    assert_eq!(unsettled(&disk.now()).keys().copied().collect::<Vec<_>>(), [1, 2, 3]);

    disk.fault(None);
    // Those that were refused are not there, and the claim was not made.
    ledger.enter(entry(5)).await.unwrap();
    let claimed = ledger.claim(id(1), 1).await.unwrap();
    assert_eq!(claimed, 2);
    drop(ledger);
    let found = unsettled(&disk.now());
    assert_eq!(found.keys().copied().collect::<Vec<_>>(), [1, 2, 5]);
    assert_eq!((found[&1].attempts, &found[&2].state), (2, &lost()));
}

#[tokio::test]
async fn a_sync_that_failed_is_not_repeated_but_all_is_written_anew() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    ledger.enter(entry(1)).await.unwrap();
    disk.fault(Fault::Sync);
    refused(ledger.enter(entry(2)).await);
    assert_eq!(unsettled(&disk.now()).len(), 1);
    let syncs = disk.bytes().syncs;
    ledger.enter(entry(3)).await.unwrap();
    // Not by a sync, but by a new file.
    assert_eq!(disk.bytes().syncs, syncs);
    assert_eq!(unsettled(&disk.now()).keys().copied().collect::<Vec<_>>(), [1, 3]);
}

#[tokio::test]
async fn a_ledger_that_failed_refuses_for_a_while_without_asking_the_disk() {
    let disk = Simulated::default();
    let ledger = options(Duration::from_secs(3600)).start(disk.clone(), &[]).unwrap();
    disk.fault(Fault::Sync);
    refused(ledger.enter(entry(1)).await);
    assert_eq!(disk.bytes().fault, None);
    let before = disk.now();
    refused(ledger.enter(entry(2)).await);
    refused(ledger.started(server(1)).await);
    assert_eq!(disk.now(), before);
}

#[tokio::test]
async fn a_new_file_that_may_not_be_there_after_a_crash_is_not_gone_on_with() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    ledger.enter(entry(1)).await.unwrap();
    disk.fault(Fault::Sync);
    refused(ledger.enter(entry(2)).await);
    disk.fault(Fault::Uncertain);
    refused(ledger.enter(entry(3)).await);
    refused(ledger.enter(entry(4)).await);
    disk.fault(None);
    ledger.enter(entry(5)).await.unwrap();
    drop(ledger);
    let found = unsettled(&disk.now());
    assert!(found.contains_key(&1) && found.contains_key(&5) && !found.contains_key(&2));
}

#[tokio::test]
async fn a_file_that_cannot_be_made_shorter_is_gone_on_with() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    disk.fault(Fault::Replace);
    let long = |n| Entry { arguments: Some("x".repeat(1_000)), ..entry(n) };
    for n in 0..60 {
        let revision = ledger.enter(long(n)).await.unwrap();
        ledger.settle(id(n), revision, State::Answered).await.unwrap();
    }
    let length = disk.now().len();
    assert!(length > 60_000 && unsettled(&disk.now()).len() <= 1);
    disk.fault(None);
    for n in 100..170 {
        ledger.enter(long(n)).await.unwrap();
        ledger.forget(id(n), "jane").await.unwrap();
    }
    assert!(disk.now().len() < length);
    assert!(matches!(
        ledger.enter(Entry { arguments: Some("x".repeat(70_000)), ..entry(200) }).await,
        Err(LedgerError::TooLong { .. })
    ));
    let server = ServerProcess { machine: Some("x".repeat(2 << 20)), ..server(1) };
    assert!(matches!(ledger.started(server).await, Err(LedgerError::TooLong { .. })));
}

#[tokio::test]
async fn settlements_while_it_fails_are_in_the_file_that_its_end_writes() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    let revision = ledger.enter(entry(1)).await.unwrap();
    ledger.enter(entry(2)).await.unwrap();
    disk.fault(Fault::SyncAndReplace);
    refused(ledger.enter(entry(3)).await);
    refused(ledger.settle(id(1), revision, State::Answered).await);
    refused(ledger.forget(id(2), "jane").await);
    disk.fault(None);
    drop(ledger);
    let ledger = open(&disk);
    assert!(ledger.in_doubt().await.unwrap().is_empty());
    assert_eq!(ledger.settled_by_hand()[0].state, State::Forgotten { by: "jane".into() });
}

#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn under_many_threads_a_disk_that_fails_now_and_then_tells_nobody_more_than_it_has_stored() {
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let disk = Simulated::default();
    let ledger = options(Duration::from_micros(200)).start(disk.clone(), &[]).unwrap();
    /// What a write must be in the end: `None` for nothing, else its attempts and whether it is in doubt.
    type End = Option<(u32, bool)>;
    let expected = Arc::new(Mutex::new(BTreeMap::<u64, End>::new()));
    let [entered, settling] = [(); 2].map(|()| Arc::new(Mutex::new(Vec::new())));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..12_u64 {
        let (ledger, expected) = (ledger.clone(), Arc::clone(&expected));
        let [entered, settling] = [&entered, &settling].map(Arc::clone);
        let mut random = random.fork();
        tasks.spawn(async move {
            for n in 0..150 {
                let n = task * 1000 + n;
                let end = |end: End| {
                    expected.lock().unwrap().insert(n, end);
                };
                if random.u8(..10) == 0 {
                    let mut gone = Box::pin(ledger.enter(entry(n)));
                    // The writer may be as fast as that.
                    let polled = gone.as_mut().poll(&mut Context::from_waker(Waker::noop()));
                    drop(gone);
                    match polled {
                        Poll::Ready(Ok(_)) => {
                            entered.lock().unwrap().push(n);
                            end(Some((1, false)));
                        }
                        _ => end(None),
                    }
                    continue;
                }
                let Ok(revision) = ledger.enter(entry(n)).await else {
                    end(None);
                    continue;
                };
                entered.lock().unwrap().push(n);
                match random.u8(..4) {
                    0 => end(Some((1, false))),
                    1 => match ledger.claim(id(n), revision).await {
                        Ok(_) => end(Some((2, false))),
                        Err(_) => end(Some((1, false))),
                    },
                    2 => {
                        let _ = ledger.settle(id(n), revision, lost()).await;
                        end(Some((1, true)));
                    }
                    _ => {
                        settling.lock().unwrap().push(n);
                        let _ = ledger.settle(id(n), revision, State::Answered).await;
                        end(None);
                    }
                }
                if random.u8(..8) == 0 {
                    tokio::task::yield_now().await;
                }
            }
        });
    }
    let mut cuts = 0;
    while !tasks.is_empty() {
        let fault = match random.u8(..8) {
            0 => Some(Fault::Sync),
            1 => Some(Fault::SyncAndReplace),
            2 => Some(Fault::Replace),
            3 => Some(Fault::Uncertain),
            4 => Some(Fault::Full(disk.now().len() + random.usize(..600))),
            _ => None,
        };
        disk.fault(fault);
        tokio::time::sleep(Duration::from_micros(random.u64(50..2_000))).await;
        let stored = entered.lock().unwrap().clone();
        let after = unsettled(&disk.after_power_cut(&mut random));
        let settled = settling.lock().unwrap().clone();
        for n in stored.iter().filter(|n| !settled.contains(n)) {
            assert!(after.contains_key(n), "the write {n} is lost");
        }
        cuts += 1;
        while let Some(task) = tasks.try_join_next() {
            task.unwrap();
        }
    }
    disk.fault(None);
    tokio::time::sleep(Duration::from_millis(2)).await;
    ledger.enter(entry(900_000)).await.unwrap();
    drop(ledger);
    let found = unsettled(&disk.now());
    let (mut there, mut gone) = (0, 0);
    for (n, expected) in &*expected.lock().unwrap() {
        let found = found.get(n).map(|entry| (entry.attempts, entry.state == lost()));
        assert_eq!(found, *expected, "{n}");
        *if found.is_some() { &mut there } else { &mut gone } += 1;
    }
    assert!(there > 20 && gone > 20 && cuts > 5, "{there} {gone} {cuts}");
}

// ===== what an earlier run left =====

fn own(n: u64) -> EntryId {
    EntryId { owner: this_run(), ..id(n) }
}

fn opened(records: &[Record<'_>]) -> DurableLedger {
    options(Duration::ZERO).start(Simulated::default(), &format::file(1, records).unwrap()).unwrap()
}

#[tokio::test]
async fn open_writes_of_an_earlier_run_are_in_doubt_with_their_servers_and_those_of_this_run_are_not() {
    let before = Instant::now();
    let other_stack = ServerProcess { stack: 2, ..server(3) };
    let of = |owner, server: &ServerProcess| Record::Server {
        owner: Owner(owner),
        server: Cow::Owned(server.clone()),
    };
    let ledger = opened(&[
        of(OWNER, &server(1)),
        of(OWNER, &server(2)),
        of(OWNER, &other_stack),
        of(OWNER + 1, &server(4)),
        Record::Entry(Cow::Owned(keyed(1, "account 7"))),
        Record::Entry(Cow::Owned(Entry { state: lost(), ..entry(2) })),
        Record::Settle {
            id: id(2),
            revision: 1,
            at_ms: 5,
            to: Cow::Owned(State::InDoubt { reason: "since".into() }),
        },
    ]);
    let found = ledger.in_doubt().await.unwrap();
    assert_eq!(found.iter().map(number).collect::<Vec<_>>(), [1, 2]);
    assert_eq!((&found[0].state, found[0].revision), (&State::Open, 1));
    assert_eq!((&found[1].state, found[1].revision), (&State::InDoubt { reason: "since".into() }, 2));
    for entry in &found {
        assert_eq!(entry.servers, [server(1), server(2)]);
        assert!(entry.orphaned.is_some_and(|since| since >= before && since <= Instant::now()));
    }
    // Nothing has to be written for its key to be in doubt.
    let refused = ledger.enter(keyed(3, "account 7")).await;
    assert!(matches!(refused, Err(LedgerError::KeyInDoubt { id: held, .. }) if held == id(1)));

    // This run's own calls are under way, until they are said to be over.
    let mine = Entry { id: own(1), ..keyed(1, "account 8") };
    ledger.enter(mine.clone()).await.unwrap();
    ledger.enter(Entry { id: own(2), ..keyed(2, "account 8") }).await.unwrap();
    assert_eq!(ledger.in_doubt().await.unwrap().len(), 2);
    ledger.abandon(own(1), lost());
    let found = ledger.in_doubt().await.unwrap();
    assert_eq!((found.len(), found[2].id, found[2].orphaned), (3, own(1), None));
    let refused = ledger.enter(Entry { id: own(3), ..keyed(3, "account 8") }).await;
    assert!(matches!(refused, Err(LedgerError::KeyInDoubt { id, .. }) if id == own(1)));

    // Settled, claimed and given up like every other, by the revision that was listed.
    assert_eq!(ledger.claim(id(1), 1).await.unwrap(), 2);
    assert!(matches!(ledger.claim(id(1), 2).await, Err(LedgerError::Conflict(_))));
    assert!(matches!(ledger.settle(id(1), 1, landed()).await, Err(LedgerError::Conflict(_))));
    ledger.settle(id(1), 2, landed()).await.unwrap();
    ledger.forget(id(2), "jane").await.unwrap();
    assert!(matches!(ledger.forget(id(2), "jane").await, Err(LedgerError::Conflict(_))));
    assert!(matches!(ledger.enter(mine).await, Err(LedgerError::Conflict(_))));
    ledger.enter(keyed(4, "account 7")).await.unwrap();
    assert_eq!(ledger.settled_by_hand().iter().map(number).collect::<Vec<_>>(), [1, 2]);
}

#[tokio::test]
async fn what_this_very_run_left_in_it_is_in_doubt_but_not_orphaned() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    ledger.started(server(1)).await.unwrap();
    ledger.enter(Entry { id: own(1), ..entry(1) }).await.unwrap();
    drop(ledger);
    let ledger = open(&disk);
    let found = ledger.in_doubt().await.unwrap();
    assert_eq!((found.len(), &found[0].state, found[0].orphaned), (1, &State::Open, None));
    assert_eq!(found[0].servers, [server(1)]);
    // Its servers are still known once nothing is left, since more may be sent to them.
    ledger.settle(own(1), 1, State::Answered).await.unwrap();
    drop(ledger);
    let ledger = open(&disk);
    ledger.enter(Entry { id: own(2), ..entry(2) }).await.unwrap();
    ledger.abandon(own(2), lost());
    assert_eq!(ledger.in_doubt().await.unwrap()[0].servers, [server(1)]);
}

#[test]
fn servers_of_an_earlier_run_are_forgotten_with_its_last_write() {
    let disk = Simulated::default();
    let record = Record::Server { owner: Owner(OWNER), server: Cow::Owned(server(1)) };
    let bytes = format::file(1, &[record]).unwrap();
    drop(options(Duration::ZERO).start(disk.clone(), &bytes).unwrap());
    assert_eq!(disk.now().len(), HEADER);
}

#[tokio::test]
async fn a_ledger_dropped_by_the_task_that_its_own_writer_wakes_ends_all_the_same() {
    struct Last(Mutex<Option<DurableLedger>>, Mutex<Option<std::sync::mpsc::Sender<ThreadId>>>);
    impl std::task::Wake for Last {
        fn wake(self: Arc<Self>) {
            drop(self.0.lock().unwrap().take());
            let done = self.1.lock().unwrap().take().unwrap();
            done.send(thread::current().id()).unwrap();
        }
    }
    let disk = Simulated::default();
    let ledger = open(&disk);
    let writer = ledger.0.writer;
    let (done, dropped) = std::sync::mpsc::channel();
    let last = Arc::new(Last(Mutex::new(None), Mutex::new(Some(done))));
    let pending = {
        let line = Record::Entry(Cow::Owned(entry(1))).line().unwrap();
        let insert = |book: &mut book::Book| {
            book.insert(entry(1), 100);
            Ok((1, Undo::Nothing))
        };
        let held = disk.bytes();
        let (_, pending) = ledger.0.shared.synced(line, insert).unwrap();
        let mut pending = Box::pin(pending.wait());
        let waker = Arc::clone(&last).into();
        assert!(pending.as_mut().poll(&mut Context::from_waker(&waker)).is_pending());
        *last.0.lock().unwrap() = Some(ledger);
        drop(held);
        pending
    };
    assert_eq!(dropped.recv().unwrap(), writer);
    pending.await.unwrap();
    assert_eq!(unsettled(&disk.now()).len(), 1);
}

#[tokio::test]
async fn a_waker_that_panics_does_not_end_the_writer() {
    struct Loud;
    impl std::task::Wake for Loud {
        fn wake(self: Arc<Self>) {
            panic!("as tested");
        }
    }
    let disk = Simulated::default();
    let ledger = open(&disk);
    let held = disk.bytes();
    let mut loud = Box::pin(ledger.enter(entry(1)));
    assert!(loud.as_mut().poll(&mut Context::from_waker(&Arc::new(Loud).into())).is_pending());
    let mut other = Box::pin(ledger.enter(entry(2)));
    assert!(other.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    drop(held);
    other.await.unwrap();
    loud.await.unwrap();
    ledger.enter(entry(3)).await.unwrap();
    assert_eq!(unsettled(&disk.now()).len(), 3);
}

// ===== many and long =====

#[tokio::test]
async fn many_writes_share_a_sync() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    let before = disk.bytes().syncs;
    let held = disk.bytes();
    let mut waiting: Vec<_> = (0..500).map(|n| Box::pin(ledger.enter(entry(n)))).collect();
    let mut context = Context::from_waker(Waker::noop());
    for write in &mut waiting {
        assert!(write.as_mut().poll(&mut context).is_pending());
    }
    drop(held);
    for write in waiting {
        write.await.unwrap();
    }
    assert!(disk.bytes().syncs - before <= 2);
}

#[tokio::test]
async fn a_write_that_nobody_waits_for_any_more_is_not_in_doubt() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    {
        let _held = disk.bytes();
        let mut write = pin!(ledger.enter(entry(1)));
        assert!(matches!(write.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Pending));
    }
    drop(ledger);
    assert!(unsettled(&disk.now()).is_empty());
}

#[tokio::test]
async fn a_long_life_leaves_a_short_file_and_the_last_words_of_those_who_settled_by_hand() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    let arguments = "x".repeat(1_000);
    ledger.enter(Entry { arguments: Some(arguments.clone()), ..entry(0) }).await.unwrap();
    let most = book::MOST_CLOSED as u64;
    let (mut longest, mut written) = (0, 0);
    for n in 1..=most + 100 {
        let checked = Entry { arguments: Some(arguments.clone()), ..entry(n) };
        let revision = ledger.enter(checked).await.unwrap();
        ledger.settle(id(n), revision, State::Landed { by: "check".into() }).await.unwrap();
        let given_up = Entry { arguments: Some(arguments.clone()), ..entry(10_000 + n) };
        ledger.enter(given_up.clone()).await.unwrap();
        ledger.forget(given_up.id, &format!("jane {n}")).await.unwrap();
        longest = longest.max(disk.bytes().now.len());
        written += 2 * arguments.len();
    }
    drop(ledger);
    let ledger = open(&disk);
    let needed = disk.now().len();
    assert!(longest > needed && longest < 2 * needed + (8 << 10), "{longest} {needed}");
    assert!(written > 4 * longest);
    let closed = ledger.settled_by_hand();
    assert_eq!(closed.len() as u64, most);
    assert_eq!(closed.last().unwrap().state, State::Forgotten { by: format!("jane {}", most + 100) });
    assert_eq!(closed[0].state, State::Forgotten { by: "jane 101".into() });
    assert_eq!(ledger.in_doubt().await.unwrap()[0].arguments.as_deref(), Some(&*arguments));
}

#[tokio::test]
async fn a_ledger_takes_so_many_writes_and_so_long_ones_and_says_so() {
    let disk = Simulated::default();
    let ledger = open(&disk);
    let long = Entry { arguments: Some("x".repeat(70_000)), ..entry(0) };
    assert!(
        matches!(ledger.enter(long).await, Err(LedgerError::TooLong { bytes, most: 65_536 }) if bytes > 70_000)
    );
    let writes: Vec<_> = (0..book::MOST as u64)
        .map(|n| {
            let ledger = ledger.clone();
            tokio::spawn(async move { ledger.enter(entry(n)).await.unwrap() })
        })
        .collect();
    for write in writes {
        write.await.unwrap();
    }
    assert!(matches!(ledger.enter(entry(20_000)).await, Err(LedgerError::Full(10_000))));
    // Words are cut instead, at a character.
    let words = format!("x{}", "ü".repeat(2000));
    ledger.settle(id(1), 1, State::InDoubt { reason: words }).await.unwrap();
    let doubts = ledger.in_doubt().await.unwrap();
    assert!(matches!(&doubts[0].state, State::InDoubt { reason } if reason.len() == 1023));
    drop(ledger);
    assert_eq!(open(&disk).in_doubt().await.unwrap().len(), book::MOST);
}
