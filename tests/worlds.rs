//! Random options of write safety over a service in memory, in which every declaration is true: what callers, events and
//! the ledger say must be so, no write lands twice, and none is overwritten by a replay.
//!
//! The simulator (`tests/simulation`) has the real stack, processes and wires, and wants to be optimized. This has less
//! of a world and more of the layer, and runs with the other tests: nested layers, gateways whose connections are whole
//! stacks, services in between that hold calls back, give them up, go on with them on tasks and hand them over again, several stacks with one ledger, a ledger elsewhere that fails, hangs, or has done what it failed at, checks that
//! panic, connections that mark nothing or are dead when they come, callers that leave after any poll.
//! What is declared falsely must be found out.
//!
//! - `GOAROUND_WORLDS=n` flies n seeds, 2,000 by default; `GOAROUND_FROM=s` begins with that seed.

use std::{
    mem,
    sync::{Arc, Mutex},
    task::{Context, Poll},
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Delivery, Event, ReconnectLayer, RetryReadOnly,
    WriteSafetyLayer, write_safety::ledger::MemoryLedger,
};
use tokio::time::{sleep, timeout};
use tower::{Layer, Service, ServiceExt, service_fn, util::BoxCloneService};

mod lab;
#[path = "lab/worlds.rs"]
mod worlds;

use lab::ms;
use worlds::{
    Answer, Boxed, Client, Connection, Frame, Ledgers, Options, Passed, Req, Sender, World, brings, seeds,
    wrong_in,
};

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
    /// What is between write safety and its connections.
    between: Option<Between>,
}

/// A service that does with calls what it likes.
#[derive(Clone, Copy, Debug)]
struct Between {
    /// It holds some back for a while.
    holds: bool,
    /// It hands over once more what was not sent.
    again: bool,
    /// It waits for some on a task of its own.
    on_tasks: bool,
    /// It gives some up, and those on tasks go on.
    gives_up: bool,
}

impl Between {
    fn draw(rng: &mut fastrand::Rng) -> Self {
        Self { holds: rng.bool(), again: rng.bool(), on_tasks: rng.bool(), gives_up: rng.bool() }
    }
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
    let between = (rng.u32(0..3) == 0).then(|| Between::draw(rng));
    if between.is_some() {
        // Without either, what it hands over later counts as of when it was called.
        (options.reconnect, options.marks) = (true, true);
        // There shall be replays, and other writes meanwhile.
        (options.check, options.quarantine) = (true, Some(rng.u64(200..1_500)));
        (options.conflict, options.begin) = (rng.u32(0..2), rng.u64(200..3_000));
        options.deadline = rng.u64(5_000..20_000);
        options.attempt_timeout = (rng.u32(0..3) == 0).then(|| rng.u64(1_000..6_000));
    }
    Plan {
        between,
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
        self.state.lock().unwrap().order.push(Passed::Given(frame.put.token));
        brings(over, frame, reply);
    }
}

/// That service, and what is below it.
#[derive(Clone)]
struct Meddler {
    world: World,
    does: Between,
    below: Boxed,
}

impl Service<Req> for Meddler {
    type Response = u32;
    type Error = CallError;
    type Future = Answer;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        self.below.poll_ready(cx)
    }

    fn call(&mut self, request: Req) -> Answer {
        let Self { world, does, .. } = self.clone();
        let below = self.below.clone();
        let mut ready = mem::replace(&mut self.below, below.clone());
        let copy = request.try_clone().filter(|_| does.again);
        let now_and_then = |does: bool| does && world.chance(40);
        let answer: Answer = match now_and_then(does.holds) {
            false => Box::pin(ready.call(request)),
            true => {
                let held = world.wait(1_000);
                Box::pin(async move {
                    sleep(held).await;
                    ready.call(request).await
                })
            }
        };
        let pause = world.wait(500);
        let answer = async move {
            match (answer.await, copy) {
                (Err(error), Some(copy)) if error.delivery() == Delivery::NotSent => {
                    sleep(pause).await;
                    below.oneshot(copy).await
                }
                (result, _) => result,
            }
        };
        let answer: Answer = match now_and_then(does.on_tasks) {
            false => Box::pin(answer),
            true => {
                let answer = tokio::spawn(answer);
                Box::pin(async move { answer.await.expect("it does not panic") })
            }
        };
        match now_and_then(does.gives_up) {
            false => answer,
            true => {
                let after = world.wait(1_000);
                Box::pin(async move {
                    timeout(after, answer).await.unwrap_or_else(|_| Err(CallError::ambiguous("given up")))
                })
            }
        }
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
    let mut below = world.notes(world.below());
    if let Some(does) = plan.between {
        below = BoxCloneService::new(Meddler { world: world.clone(), does, below });
    }
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
        let touches = |other| options.touches(token, other);
        let over = match plan.between {
            // It may be handed over there, and not be let go.
            Some(_) => state.undone_by(token, touches),
            None => state.overwritten_by(token, touches),
        };
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
