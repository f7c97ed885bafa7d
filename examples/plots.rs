//! Draws the figures of `docs/performance.md` from what the benchmarks said.
//!
//! `cargo run --example plots -- docs/figures` reads `overhead.json`, `pipe.json`, `failover.json` and `ledger.json` in
//! that directory, each the last line of the benchmark of that name with `-- --json`, and writes a picture beside each.
//! (`outage.svg` is drawn by the example of that name, from all the seconds of its runs.)

use std::{fs, path::Path};

use serde_json::Value;

#[path = "svg/mod.rs"]
mod svg;

fn read(directory: &Path, name: &str) -> Value {
    let text = fs::read_to_string(directory.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

/// What each of those rows costs beyond the bare service.
fn overheads(figures: &Value, rows: &[(&str, &str)]) -> Vec<(String, f64)> {
    let all = figures["rows"].as_array().expect("rows");
    rows.iter()
        .map(|(name, row)| {
            let row = all.iter().find(|known| known["name"] == *row).expect("a row of that name");
            (format!("{name}, {} allocations", row["allocations"]), number(&row["over_bare_ns"]))
        })
        .collect()
}

fn overhead(directory: &Path) {
    let figures = read(directory, "overhead.json");
    let mut picture = svg::Picture::new();
    picture.title("What a call costs beyond the bare service");
    let ready = [
        ("hand-written floor", "floor"),
        ("goaround, stack", "stack"),
        ("tower", "tower"),
        ("tower-resilience", "tower-resilience"),
    ];
    picture.bars("a read that is answered at once", "ns", &overheads(&figures, &ready));
    let pending = [
        ("hand-written floor", "pending: floor"),
        ("goaround, stack", "pending: stack"),
        ("tower", "pending: tower"),
        ("tower-resilience", "pending: tower-resilience"),
    ];
    picture.bars("a read that has to wait", "ns", &overheads(&figures, &pending));
    let writes = [("goaround, no check", "write: no check"), ("goaround, check", "write: check")];
    picture.bars("a write that is answered at once", "ns", &overheads(&figures, &writes));
    fs::write(directory.join("overhead.svg"), picture.finish()).expect("the picture can be written");
}

fn pipe(directory: &Path) {
    let figures = read(directory, "pipe.json");
    let mut picture = svg::Picture::new();
    picture.title("JSON-RPC: thousand calls a second");
    for (name, over, payload, in_flight) in [
        ("in memory, 100 bytes, one in flight", "memory", 100, 1),
        ("in memory, 100 bytes, 64 in flight", "memory", 100, 64),
        ("in memory, 10,000 bytes, 64 in flight", "memory", 10_000, 64),
        ("over a child process, 100 bytes, one in flight", "child", 100, 1),
        ("over a child process, 100 bytes, 64 in flight", "child", 100, 64),
    ] {
        let rows = figures["rows"].as_array().expect("rows").iter();
        let bars: Vec<(String, f64)> = rows
            .filter(|row| row["over"] == over && row["payload"] == payload && row["in_flight"] == in_flight)
            .map(|row| {
                let client = row["client"].as_str().expect("a name").to_owned();
                (client, number(&row["calls_per_second"]) / 1_000.0)
            })
            .collect();
        picture.bars(name, "", &bars);
    }
    fs::write(directory.join("pipe.svg"), picture.finish()).expect("the picture can be written");
}

fn failover(directory: &Path) {
    let figures = read(directory, "failover.json");
    let mut picture = svg::Picture::new();
    picture.title("Reads in flight at a closure, until the last is answered");
    for row in figures["rows"].as_array().expect("rows") {
        let bars = [
            ("goaround".to_owned(), number(&row["ms"])),
            ("connect + one batch".to_owned(), number(&row["connect_and_batch_ms"])),
        ];
        picture.bars(&format!("{} reads, {} connect", row["reads"], row["connects"]), "ms", &bars);
    }
    let restart = &figures["restart"];
    let bars = [
        ("goaround, from the death".to_owned(), number(&restart["closure_to_read_ms"])),
        ("a first start".to_owned(), number(&restart["first_start_ms"])),
    ];
    picture.bars("a real server dies at a read", "ms", &bars);
    fs::write(directory.join("failover.svg"), picture.finish()).expect("the picture can be written");
}

fn ledger(directory: &Path) {
    let figures = read(directory, "ledger.json");
    let mut picture = svg::Picture::new();
    picture.title("Durable writes a second");
    let each = ("one sync a write".to_owned(), number(&figures["sync_each_per_s"]));
    for in_flight in [1, 16, 64, 256] {
        let of = |what| number(&figures[format!("{what}_{in_flight}_per_s")]);
        let bars = [
            each.clone(),
            ("the ledger".to_owned(), of("durable")),
            ("through a stack".to_owned(), of("durable_stack")),
        ];
        picture.bars(&format!("{in_flight} in flight"), "", &bars);
    }
    fs::write(directory.join("ledger.svg"), picture.finish()).expect("the picture can be written");
}

fn main() {
    let directory = std::env::args().nth(1).expect("the directory of the figures");
    overhead(Path::new(&directory));
    pipe(Path::new(&directory));
    failover(Path::new(&directory));
    ledger(Path::new(&directory));
}
