//! Random worlds as in `tests/worlds.rs`, many at once in real time over four threads: several callers on clones of one
//! stack, whose connections close at any moment, with keys in conflict or none, and a ledger in memory or elsewhere. What
//! must be so whatever the threads do: no write lands twice, what callers are told and the ledger says is so, every unknown
//! is reported once, no replay goes over a later write that was told done before it, nothing hangs.
//!
//! A seed decides what a world is like, and not in which order threads have their turns.
//!
//! - `GOAROUND_WORLDS=n` flies n seeds, 3,000 by default; `GOAROUND_FROM=s` begins with that seed.

use std::{sync::Arc, thread, time::Duration};

use goaround::{DeadlineLayer, Event};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tower::{Layer, util::BoxCloneService};

mod lab;
#[path = "lab/worlds.rs"]
mod worlds;

use worlds::{
    Client, Connection, Frame, Ledgers, Options, Passed, Sender, World, brings, seeds, without_their_panics,
};

const THREADS: usize = 4;
const WORLDS_AT_ONCE: usize = 1_500;
/// Of one call, whose deadline is two seconds at the most.
const HANGS: Duration = Duration::from_secs(60);

/// Time is ten times as fast here.
fn ms(millis: u64) -> Duration {
    Duration::from_micros(millis * 100)
}

#[derive(Debug)]
struct Plan {
    options: Options,
    writes: u32,
    /// How many of a hundred steps of a table elsewhere fail, if it is there.
    store_fails: Option<u32>,
}

fn plan(rng: &mut fastrand::Rng) -> Plan {
    let drawn = Options::draw(rng);
    Plan {
        options: Options {
            conflict: rng.u32(0..2),
            keys: 2,
            // The order of writes is asked for when a replay is given to a connection.
            reconnect: true,
            begin: rng.u64(0..2_000),
            ..drawn
        },
        writes: rng.u32(2..9),
        store_fails: rng.bool().then(|| if rng.bool() { 0 } else { rng.u32(0..30) }),
    }
}

impl Client for World {
    fn world(&self) -> &World {
        self
    }

    fn send(&self, over: Connection<Self>, frame: Arc<Frame>, reply: Sender) {
        let token = frame.put.token;
        let is_first = !self.state.lock().unwrap().order.contains(&Passed::Given(token));
        if is_first && self.chance(50) {
            // Others go between its being let go and its being sent.
            thread::sleep(ms(3));
        }
        self.state.lock().unwrap().order.push(Passed::Given(token));
        brings(over, frame, reply);
    }
}

async fn fly(seed: u64) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let plan = plan(&mut rng);
    let options = &plan.options;
    let world = World::new(options.clone(), rng);
    let ledgers = Ledgers::new(&world, plan.store_fails);
    let heard = world.state.clone();
    let sink = move |event: Event<'_>| heard.lock().unwrap().hears(event);
    let deadline = DeadlineLayer::new(ms(options.deadline)).on_event(sink);
    let stack = deadline.layer(ledgers.of(world.layer()).layer(world.notes(world.below())));
    let stack = BoxCloneService::new(stack);
    let calls: Vec<_> = (0..plan.writes)
        .map(|token| tokio::spawn(timeout(HANGS, world.clone().call(stack.clone(), token))))
        .collect();
    let mut ends = Vec::new();
    for (token, call) in calls.into_iter().enumerate() {
        let called = call.await.map_err(|error| format!("seed {seed} write {token}: a panic: {error}"))?;
        ends.push(called.map_err(|_| format!("seed {seed} write {token}: it hangs\n{plan:#?}"))?);
    }
    // What was sent last has landed by then.
    sleep(ms(15_000)).await;
    let said = ledgers.say().await;
    let state = world.state.lock().unwrap();
    for called in &mut ends {
        called.late = false;
        let token = called.token;
        let undone = state.undone_by(token, |other| options.touches(token, other));
        let undone = undone.map(|other| format!("replayed on top of {other}, which was told done"));
        if let Some(what) = undone.or_else(|| state.wrong(options, called, Some(&said))) {
            return Err(format!("seed {seed} write {token}: {what}\n{plan:#?}\n{}", state.log.join("\n")));
        }
    }
    Ok(())
}

#[test]
fn whatever_threads_do_nothing_lands_twice_and_no_replay_undoes_what_was_told_done() {
    without_their_panics();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(THREADS).enable_all().build();
    let found: Vec<_> = runtime.unwrap().block_on(async {
        let (mut flights, mut found) = (JoinSet::new(), Vec::new());
        for seed in seeds(3_000) {
            if flights.len() == WORLDS_AT_ONCE {
                found.extend(flights.join_next().await);
            }
            flights.spawn(fly(seed));
        }
        found.extend(flights.join_all().await.into_iter().map(Ok));
        found.into_iter().filter_map(|flown| flown.unwrap().err()).take(3).collect()
    });
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}
