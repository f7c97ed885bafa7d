//! Random options of write safety over a service in memory, in which every declaration is true: what callers, events and
//! the ledger say must be so, no write lands twice, and none is overwritten by a replay.
//!
//! The simulator (`tests/simulation`) has the real stack, processes and wires, and wants to be optimized. This has less
//! of a world and more of the layer, and runs with the other tests: nested layers, gateways whose connections are whole
//! stacks, several stacks with one ledger, a ledger elsewhere that fails, hangs, or has done what it failed at, checks that
//! panic, connections that mark nothing or are dead when they come, callers that leave after any poll.
//! What is declared falsely must be found out.
//!
//! - `GOAROUND_WORLDS=n` flies n seeds, 2,000 by default; `GOAROUND_FROM=s` begins with that seed.

use std::sync::{Arc, Mutex};

use goaround::{
    BoxError, DeadlineLayer, Event, ReconnectLayer, RetryReadOnly, WriteSafetyLayer,
    write_safety::ledger::MemoryLedger,
};
use tokio::time::sleep;
use tower::{Layer, service_fn, util::BoxCloneService};

mod lab;
#[path = "lab/worlds.rs"]
mod worlds;

use lab::ms;
use worlds::{Boxed, Client, Connection, Frame, Ledgers, Options, Sender, World, brings, seeds, wrong_in};

/// What is not so, to see whether that is noticed.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Lie {
    /// A write lands after its quarantine.
    Late,
    /// A write lands after the end of its process, which was said to end its effects.
    Outlives,
    /// Two stacks write to the same things, and each has a ledger of its own.
    Apart,
}

#[derive(Debug)]
struct Plan {
    options: Options,
    writes: u32,
    store: bool,
    store_fails: u32,
    stacks: u32, // 2: the writes of one key go over two, which have one ledger
    nest: u32,   // 1: refuse() around it, 2: one with the same check around it, 3: retries around it
    /// What is around all that, from the inside out.
    around: Vec<Around>,
}

#[derive(Clone, Copy, Debug)]
enum Around {
    Refuses,
    RefusesInTime,
    Retries,
    /// Its connections are what is within.
    Gateway,
}

fn around(rng: &mut fastrand::Rng) -> Around {
    match rng.u32(0..4) {
        0 => Around::Refuses,
        1 => Around::RefusesInTime,
        2 => Around::Retries,
        _ => Around::Gateway,
    }
}

fn plan(rng: &mut fastrand::Rng, lie: Option<Lie>) -> Plan {
    let mut options = Options { keys: 2, ..Options::draw(rng) };
    (options.late, options.outlives) = (lie == Some(Lie::Late), lie == Some(Lie::Outlives));
    let around: Vec<_> = match rng.u32(0..3) {
        0 => (0..rng.u32(1..4)).map(|_| around(rng)).collect(),
        _ => Vec::new(),
    };
    // What a dead connection gives back, a gateway has next.
    if around.iter().any(|around| matches!(around, Around::Gateway)) {
        options.dead = rng.u32(0..90);
    }
    Plan {
        writes: rng.u32(1..6),
        store: rng.bool(),
        store_fails: if rng.bool() { 0 } else { rng.u32(0..30) },
        stacks: if options.conflict == 1 { rng.u32(1..3) } else { 1 },
        nest: if rng.bool() { rng.u32(0..4) } else { 0 },
        around,
        options,
    }
}

impl Client for World {
    fn world(&self) -> &World {
        self
    }

    fn send(&self, over: Connection<Self>, frame: Arc<Frame>, reply: Sender) {
        brings(over, frame, reply);
    }
}

/// A gateway, whose connections are what is within.
fn gateway(world: &World, within: Boxed) -> Boxed {
    let (world, within) = (world.clone(), Arc::new(Mutex::new(within)));
    let connector = service_fn(move |()| {
        let (world, within) = (world.clone(), within.lock().unwrap().clone());
        async move {
            sleep(world.wait(1500)).await;
            Ok::<_, BoxError>(within)
        }
    });
    BoxCloneService::new(ReconnectLayer::once().layer(connector))
}

async fn fly(seed: u64, lie: Option<Lie>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let plan = plan(&mut rng, lie);
    let options = &plan.options;
    // An unmarked connection counts its quarantine from the attempt timeout, which is no earlier than its bytes here.
    let world = World::new(options.clone(), rng);
    let heard = world.state.clone();
    let sink = move |event: Event<'_>| heard.lock().unwrap().hears(event);
    let ledgers = Ledgers::new(&world, plan.store.then_some(plan.store_fails));
    let layer = ledgers.of(world.layer());
    let below = world.notes(world.below());
    let stacks: Vec<_> = (0..plan.stacks)
        .map(|number| {
            let layer = match lie {
                Some(Lie::Apart) if number > 0 => layer.clone().ledger(MemoryLedger::new()),
                _ => layer.clone(),
            };
            let inner = layer.layer(below.clone());
            let inner: Boxed = match plan.nest {
                0 => BoxCloneService::new(inner),
                1 => BoxCloneService::new(
                    WriteSafetyLayer::refuse().ledger(ledgers.memory.clone()).layer(inner),
                ),
                2 => BoxCloneService::new(layer.layer(RetryReadOnly.layer(inner))),
                _ => BoxCloneService::new(RetryReadOnly.attempt_timeout(ms(700)).layer(inner)),
            };
            let inner = plan.around.iter().fold(inner, |within, around| match around {
                Around::Refuses => BoxCloneService::new(WriteSafetyLayer::refuse().layer(within)),
                Around::RefusesInTime => {
                    let layer = WriteSafetyLayer::refuse().attempt_timeout(world.wait(3000) + ms(1));
                    BoxCloneService::new(layer.layer(within))
                }
                Around::Retries => BoxCloneService::new(RetryReadOnly.attempt_timeout(ms(700)).layer(within)),
                Around::Gateway => gateway(&world, within),
            });
            let deadline = DeadlineLayer::new(ms(options.deadline)).on_event(sink.clone());
            BoxCloneService::new(deadline.layer(inner))
        })
        .collect();
    let calls: Vec<_> = (0..plan.writes)
        .map(|token| {
            let stack = stacks[(token / 2 % plan.stacks) as usize].clone();
            tokio::spawn(world.clone().call(stack, token))
        })
        .collect();
    let mut ends = Vec::new();
    for call in calls {
        ends.push(call.await.map_err(|error| format!("a panic: {error}"))?);
    }
    sleep(ms(100_000)).await;
    let said = ledgers.say().await;
    let said = plan.around.is_empty().then_some(&said);
    let state = world.state.lock().unwrap();
    for called in &ends {
        let token = called.token;
        let over = state.overwritten_by(token, |other| options.touches(token, other));
        let over = over.map(|other| format!("replayed on top of {other}"));
        if let Some(what) = over.or_else(|| state.wrong(options, called, said)) {
            return Err(format!("seed {seed} write {token}: {what}\n{plan:#?}\n{}", state.log.join("\n")));
        }
    }
    Ok(())
}

#[test]
fn whatever_the_options_are_nothing_lands_twice_and_what_is_said_is_so() {
    let found: Vec<_> = wrong_in(seeds(2_000), |seed| fly(seed, None)).take(3).collect();
    assert!(found.is_empty(), "{}", found.join("\n\n"));
}

#[test]
fn what_is_declared_falsely_is_found_out() {
    for (lie, words) in [(Lie::Late, "copies"), (Lie::Outlives, "copies"), (Lie::Apart, "replayed on top of")]
    {
        let found: Vec<_> = wrong_in(0..2_000, |seed| fly(seed, Some(lie))).take(20).collect();
        assert!(found.iter().any(|what| what.contains(words)), "{lie:?}: {found:?}");
    }
}
