//! The durable ledger on real files and in real processes, which are killed.
#![cfg(unix)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, Write, stdout},
    os::unix::fs::{PermissionsExt, symlink},
    path::Path,
    process::{Child, Command, Stdio},
    sync::{Arc, Mutex, mpsc},
    time::{Duration, SystemTime},
};

use goaround::write_safety::ledger::{DurableLedger, Entry, EntryId, Ledger, LedgerError, State};
use serde_json::json;

/// The run that these entries claim to be of, another than this one.
const OWNER: &str = "0000000000000000000000000000002a";
/// Tells a test that it is the process that is to be killed.
const ROLE: &str = "GOAROUND_LEDGER_FILE";

/// A call's number has a source, and 20 bits within that.
fn id(n: u64) -> EntryId {
    format!("{OWNER}-{}-{}", 1 + (n >> 20), n & 0xf_ffff).parse().unwrap()
}

fn number(id: EntryId) -> u64 {
    let id = id.to_string();
    let mut numbers = id.rsplit('-').map(|number| number.parse::<u64>().unwrap());
    let (sequence, source) = (numbers.next().unwrap(), numbers.next().unwrap());
    ((source - 1) << 20) | sequence
}

fn entry(n: u64) -> Entry {
    let entry = json!({
        "id": id(n), "method": "pay", "effect": "write", "entered_ms": 1_000, "changed_ms": 1_000,
        "attempts": 1, "state": "open", "revision": 1, "stack": 1,
    });
    serde_json::from_value(entry).unwrap()
}

fn long(n: u64, length: usize) -> Entry {
    let mut entry = entry(n);
    entry.arguments = Some("x".repeat(length));
    entry
}

fn found(entries: &[Entry]) -> BTreeSet<u64> {
    entries.iter().map(|entry| number(entry.id)).collect()
}

/// This test again, as a process of its own on that ledger.
fn again(test: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", test, "--nocapture", "--test-threads=1"]);
    command.env(ROLE, path).stdout(Stdio::piped()).stderr(Stdio::null());
    command
}

/// The words that such a process said, each a line of two or more.
fn words(out: &str) -> impl Iterator<Item = (&str, u64)> {
    // Its last line may be cut, and the harness has lines of its own.
    let whole = out.rfind('\n').map_or("", |end| &out[..end]);
    whole.lines().filter_map(|line| {
        let (word, number) = line.split_once(' ')?;
        Some((word, number.parse().ok()?))
    })
}

fn say(word: &str, n: u64) {
    let mut out = stdout().lock();
    // On a line of its own: the harness leaves its own one unfinished.
    writeln!(out, "\n{word} {n}").unwrap();
    out.flush().unwrap();
}

/// Waits for a line of a process that begins so, and gives its number.
fn wait_for(child: &mut Child, word: &str) -> u64 {
    let out = child.stdout.as_mut().unwrap();
    for line in BufReader::new(out).lines() {
        let line = line.unwrap() + "\n";
        if let Some((_, n)) = words(&line).find(|(said, _)| *said == word) {
            return n;
        }
    }
    panic!("it ended without a word");
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

// ===== killed =====

/// Enters, claims and settles until it is killed, and says so.
fn write_until_killed(path: &Path) {
    runtime().block_on(async {
        // It is written anew all the time.
        let ledger = DurableLedger::options().compact_above(30_000).open(path).unwrap();
        let start = SystemTime::UNIX_EPOCH.elapsed().unwrap().as_micros() as u64;
        say("start", start);
        let tasks: Vec<_> = (0..64)
            .map(|task| {
                let ledger = ledger.clone();
                tokio::spawn(async move {
                    for n in (start + task..).step_by(64) {
                        let mut revision = ledger.enter(long(n, 200)).await.unwrap();
                        say("entered", n);
                        if n / 64 % 8 == 1 {
                            revision = ledger.claim(id(n), revision).await.unwrap();
                            say("claimed", n);
                        }
                        if n / 64 % 16 != 0 {
                            say("settling", n);
                            ledger.settle(id(n), revision, State::Answered).await.unwrap();
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.unwrap();
        }
    });
}

#[test]
fn a_process_killed_while_it_writes_leaves_every_write_that_it_entered_and_settled_none_by_that() {
    if let Some(path) = std::env::var_os(ROLE) {
        return write_until_killed(path.as_ref());
    }
    let rounds = std::env::var("GOAROUND_ROUNDS").map_or(5, |rounds| rounds.parse().unwrap());
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let test = "a_process_killed_while_it_writes_leaves_every_write_that_it_entered_and_settled_none_by_that";
    let (mut entered, mut left) = (0, 0);
    for round in 0..rounds {
        let mut child = again(test, &path).spawn().unwrap();
        let mut out = BufReader::new(child.stdout.take().unwrap());
        let enough = 1 + random_below(500);
        let (tell, told) = mpsc::channel();
        let reader = std::thread::spawn(move || {
            let (mut said, mut entered, mut end) = (String::new(), 0, 0);
            while out.read_line(&mut said).unwrap() > 0 {
                entered += u64::from(said[end..].starts_with("entered "));
                end = said.len();
                if entered == enough {
                    let _ = tell.send(());
                }
            }
            said
        });
        if round % 5 == 4 {
            // Perhaps while it opens it.
            std::thread::sleep(Duration::from_micros(random_below(30_000)));
        } else {
            told.recv().unwrap();
        }
        child.kill().unwrap();
        child.wait().unwrap();
        let said = reader.join().unwrap();
        let mut by_word = BTreeMap::<_, BTreeSet<u64>>::new();
        for (word, n) in words(&said) {
            by_word.entry(word).or_default().insert(n);
        }
        let of = |word| by_word.get(word).cloned().unwrap_or_default();

        let ledger = DurableLedger::open(&path).unwrap();
        let runtime = runtime();
        let doubts = runtime.block_on(ledger.in_doubt()).unwrap();
        let listed = found(&doubts);
        let missing: Vec<_> = of("entered").into_iter().filter(|n| !listed.contains(n)).collect();
        assert!(missing.iter().all(|n| of("settling").contains(n)), "round {round}: writes were lost");
        for doubt in &doubts {
            let n = number(doubt.id);
            assert!(n >= *of("start").first().unwrap(), "round {round}: an earlier one is back");
            assert!(doubt.orphaned.is_some() && doubt.state == State::Open);
            assert!(doubt.attempts == 2 || !of("claimed").contains(&n), "round {round}: a claim was lost");
            runtime.block_on(ledger.settle(doubt.id, doubt.revision, State::Answered)).unwrap();
        }
        assert!(runtime.block_on(ledger.in_doubt()).unwrap().is_empty());
        entered += of("entered").len();
        left += doubts.len();
    }
    println!("{entered} writes entered, {left} left in doubt");
    assert!(entered > 0 && left > 0);
}

/// A number below that, from the system's own seed.
fn random_below(most: u64) -> u64 {
    use std::hash::BuildHasher;
    std::hash::RandomState::new().hash_one(()) % most
}

#[test]
fn a_second_process_is_turned_away_until_the_first_is_killed_and_its_children_do_not_keep_the_ledger() {
    if let Some(path) = std::env::var_os(ROLE) {
        let _ledger = DurableLedger::open(path).unwrap();
        let mut child = Command::new("sleep").arg("1000").spawn().unwrap();
        say("child", child.id().into());
        child.wait().unwrap();
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let link = directory.path().join("link");
    symlink(&path, &link).unwrap();
    let test =
        "a_second_process_is_turned_away_until_the_first_is_killed_and_its_children_do_not_keep_the_ledger";
    let mut first = again(test, &path).spawn().unwrap();
    let grandchild = wait_for(&mut first, "child");
    let before = fs::read(&path).unwrap();
    for name in [&path, &link] {
        let Err(error) = DurableLedger::open(name) else { panic!("opened twice") };
        assert!(matches!(error, LedgerError::InUse));
        assert_eq!(error.to_string(), "the ledger is open already, in this process or another");
    }
    assert_eq!(fs::read(&path).unwrap(), before);
    first.kill().unwrap();
    first.wait().unwrap();
    let opened = DurableLedger::open(&path);
    // It lives on.
    let killed = Command::new("kill").args(["-KILL", &grandchild.to_string()]).status().unwrap();
    assert!(killed.success());
    let ledger = opened.unwrap();
    // And not twice in one process.
    assert!(matches!(DurableLedger::open(&link), Err(LedgerError::InUse)));
    drop(ledger.clone());
    assert!(matches!(DurableLedger::open(&path), Err(LedgerError::InUse)));
    drop(ledger);
    DurableLedger::open(&path).unwrap();
}

#[test]
fn a_file_that_may_not_grow_refuses_writes_and_keeps_those_that_it_has() {
    if let Some(path) = std::env::var_os(ROLE) {
        return runtime().block_on(async {
            let ledger = DurableLedger::open(path).unwrap();
            let mut n = 0;
            while ledger.enter(long(n, 2_000)).await.is_ok() {
                say("entered", n);
                n += 1;
            }
            let refused = ledger.enter(long(n + 1, 2_000)).await;
            assert!(matches!(refused, Err(LedgerError::Unavailable(_))));
            say("refused", n);
        });
    }
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let test = again("a_file_that_may_not_grow_refuses_writes_and_keeps_those_that_it_has", &path);
    // A real file that is too large: the kernel writes what fits and then says so.
    let out = Command::new("sh")
        .args(["-c", "trap '' XFSZ; ulimit -f 100; exec \"$@\"", "sh"])
        .arg(test.get_program())
        .args(test.get_args())
        .env(ROLE, &path)
        .output()
        .unwrap();
    let said = String::from_utf8(out.stdout).unwrap();
    let entered: BTreeSet<_> = words(&said).filter(|said| said.0 == "entered").map(|said| said.1).collect();
    assert!(out.status.success() && entered.len() > 10, "{said}");
    assert_eq!(words(&said).find(|said| said.0 == "refused").map(|said| said.1), Some(entered.len() as u64));
    let ledger = DurableLedger::open(&path).unwrap();
    assert_eq!(found(&runtime().block_on(ledger.in_doubt()).unwrap()), entered);
}

#[test]
fn a_ledger_that_was_closed_can_be_opened_at_once_while_children_are_being_started() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let (stop, stopped) = mpsc::channel::<()>();
    let spawning = std::thread::spawn(move || {
        let mut spawned = 0;
        while stopped.try_recv() == Err(mpsc::TryRecvError::Empty) {
            Command::new("true").status().unwrap();
            spawned += 1;
        }
        spawned
    });
    for _ in 0..100 {
        drop(DurableLedger::open(&path).unwrap());
    }
    drop(stop);
    assert!(spawning.join().unwrap() > 0);
}

// ===== files =====

fn kind(error: LedgerError) -> std::io::ErrorKind {
    let LedgerError::Unavailable(error) = error else { panic!("{error}") };
    error.downcast::<std::io::Error>().unwrap().kind()
}

#[tokio::test]
async fn what_is_no_ledger_is_said_to_be_none_and_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    assert_eq!(kind(DurableLedger::open(path("none/ledger")).unwrap_err()), std::io::ErrorKind::NotFound);
    assert!(!path("none").exists());
    for no_file in [directory.path(), Path::new("/dev/full")] {
        assert_eq!(kind(DurableLedger::open(no_file).unwrap_err()), std::io::ErrorKind::InvalidInput);
    }
    fs::write(path("locked"), "").unwrap();
    fs::set_permissions(path("locked"), fs::Permissions::from_mode(0o400)).unwrap();
    assert_eq!(kind(DurableLedger::open(path("locked")).unwrap_err()), std::io::ErrorKind::PermissionDenied);
    fs::write(path("notes"), "These are notes, and no ledger at all.").unwrap();
    assert!(matches!(DurableLedger::open(path("notes")), Err(LedgerError::Damaged(_))));
    assert_eq!(fs::read_to_string(path("notes")).unwrap(), "These are notes, and no ledger at all.");
    let names: BTreeSet<_> =
        fs::read_dir(directory.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(names, ["locked".into(), "notes".into()].into());
}

#[tokio::test]
async fn a_new_ledger_is_its_owners_alone_and_an_old_one_keeps_its_mode_and_its_links() {
    let directory = tempfile::tempdir().unwrap();
    let path = |name: &str| directory.path().join(name);
    let mode = |name: &str| fs::metadata(path(name)).unwrap().permissions().mode() & 0o777;
    DurableLedger::open(path("new")).unwrap();
    assert_eq!(mode("new"), 0o600);

    // One that is empty is new too.
    fs::write(path("old"), "").unwrap();
    fs::set_permissions(path("old"), fs::Permissions::from_mode(0o640)).unwrap();
    symlink("old", path("link")).unwrap();
    // What a crash left beside it.
    fs::write(path("old.new"), "half a fi").unwrap();
    let ledger = DurableLedger::open(path("link")).unwrap();
    ledger.enter(entry(1)).await.unwrap();
    drop(ledger);
    assert!(fs::symlink_metadata(path("link")).unwrap().is_symlink() && !path("old.new").exists());
    assert_eq!(mode("old"), 0o640);
    let ledger = DurableLedger::open(path("old")).unwrap();
    assert_eq!(found(&ledger.in_doubt().await.unwrap()), [1].into());
}

#[tokio::test]
async fn a_file_that_was_taken_away_takes_no_more_writes() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let ledger = DurableLedger::open(&path).unwrap();
    ledger.enter(entry(1)).await.unwrap();
    fs::rename(&path, directory.path().join("elsewhere")).unwrap();
    assert_eq!(kind(ledger.enter(entry(2)).await.unwrap_err()), std::io::ErrorKind::NotFound);
    // Whoever opens one there has another, and this one does not write over it.
    let other = DurableLedger::open(&path).unwrap();
    other.enter(entry(3)).await.unwrap();
    drop(ledger);
    drop(other);
    let other = DurableLedger::open(&path).unwrap();
    assert_eq!(found(&other.in_doubt().await.unwrap()), [3].into());
    let elsewhere = DurableLedger::open(directory.path().join("elsewhere")).unwrap();
    assert_eq!(found(&elsewhere.in_doubt().await.unwrap()), [1].into());
}

#[tokio::test]
async fn a_damaged_ledger_says_where_and_is_left_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let ledger = DurableLedger::open(&path).unwrap();
    for n in 0..3 {
        ledger.enter(entry(n)).await.unwrap();
    }
    drop(ledger);
    let mut bytes = fs::read(&path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let Err(LedgerError::Damaged(why)) = DurableLedger::open(&path) else { panic!() };
    assert!(why.starts_with("at byte ") && !why.contains("pay"), "{why}");
    assert_eq!(fs::read(&path).unwrap(), bytes);
    bytes[middle] ^= 1;
    fs::write(&path, &bytes).unwrap();
    let ledger = DurableLedger::open(&path).unwrap();
    assert_eq!(found(&ledger.in_doubt().await.unwrap()), [0, 1, 2].into());
}

// ===== calls =====

#[tokio::test]
async fn entries_outlive_the_ledger_with_all_that_is_known_of_them() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let now = Arc::new(Mutex::new(SystemTime::UNIX_EPOCH + Duration::from_millis(5_000)));
    let clock = Arc::clone(&now);
    let options = || {
        DurableLedger::options().wall_clock({
            let clock = Arc::clone(&clock);
            move || *clock.lock().unwrap()
        })
    };
    let ledger = options().open(&path).unwrap();
    let mut write = long(1, 10);
    write.key = Some("account 7".into());
    let revision = ledger.enter(write.clone()).await.unwrap();
    let revision = ledger.claim(id(1), revision).await.unwrap();
    // A wall clock may go back.
    *now.lock().unwrap() -= Duration::from_millis(2_000);
    let revision = ledger.settle(id(1), revision, State::InDoubt { reason: "lost".into() }).await.unwrap();
    drop(ledger);
    let ledger = options().open(&path).unwrap();
    let entry = ledger.in_doubt().await.unwrap().remove(0);
    assert!(entry.orphaned.is_some());
    write.orphaned = entry.orphaned;
    (write.attempts, write.revision) = (2, revision);
    write.state = State::InDoubt { reason: "lost".into() };
    write.changed = SystemTime::UNIX_EPOCH + Duration::from_millis(3_000);
    assert_eq!(entry, write);
}

#[test]
fn a_hint_without_a_runtime_is_stored() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("ledger");
    let ledger = DurableLedger::open(&path).unwrap();
    runtime().block_on(ledger.enter(entry(1))).unwrap();
    let hint = ledger.clone();
    std::thread::spawn(move || hint.abandon(id(1), State::InDoubt { reason: "dropped".into() }))
        .join()
        .unwrap();
    ledger.abandon(id(2), State::Answered);
    drop(ledger);
    let ledger = DurableLedger::open(&path).unwrap();
    let entry = runtime().block_on(ledger.in_doubt()).unwrap().remove(0);
    assert_eq!(entry.state, State::InDoubt { reason: "dropped".into() });
}

/// It may come from a copy of the call that was never handed over.
#[tokio::test]
async fn a_hint_settles_no_doubt() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = DurableLedger::open(directory.path().join("ledger")).unwrap();
    let revision = ledger.enter(entry(1)).await.unwrap();
    let doubt = State::InDoubt { reason: "reset".into() };
    ledger.settle(id(1), revision, doubt.clone()).await.unwrap();
    ledger.abandon(id(1), State::Answered);
    assert_eq!(ledger.in_doubt().await.unwrap().remove(0).state, doubt);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_many_claims_succeeds() {
    let directory = tempfile::tempdir().unwrap();
    let ledger = DurableLedger::open(directory.path().join("ledger")).unwrap();
    let revision = ledger.enter(entry(1)).await.unwrap();
    let claims: Vec<_> = (0..50)
        .map(|_| {
            let ledger = ledger.clone();
            tokio::spawn(async move { ledger.claim(id(1), revision).await })
        })
        .collect();
    let mut granted = 0;
    for claim in claims {
        match claim.await.unwrap() {
            Ok(2) => granted += 1,
            other => assert!(matches!(other, Err(LedgerError::Conflict(held)) if held == id(1))),
        }
    }
    assert_eq!(granted, 1);
}
