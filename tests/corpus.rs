//! What the fuzzer has kept, by the normal tests: see `fuzz/`.
#![allow(missing_docs, unreachable_pub)]

mod targets;

use std::path::Path;

/// Feeds a target everything in its corpus.
fn feed(target: &str, feed: fn(&[u8])) {
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/corpus").join(target);
    let mut fed = 0;
    for entry in std::fs::read_dir(&corpus).unwrap() {
        let path = entry.unwrap().path();
        println!("{}", path.display());
        feed(&std::fs::read(path).unwrap());
        fed += 1;
    }
    assert!(fed > 5, "{fed} inputs in {}", corpus.display());
}

#[test]
fn the_client_takes_whatever_its_peer_says() {
    feed("client", targets::client);
}

#[test]
fn bytes_say_the_same_in_whatever_pieces_they_come() {
    feed("frames", targets::frames);
}

#[test]
fn a_wait_is_the_same_in_whatever_form_it_is_asked_for() {
    feed("retry_after", targets::waits);
}

#[cfg(feature = "ledger-durable")]
#[test]
fn a_ledgers_file_may_hold_anything() {
    feed("ledger", targets::ledger);
}
