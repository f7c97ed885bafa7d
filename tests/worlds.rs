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

use std::{
    collections::HashMap,
    future::pending,
    sync::{Arc, Mutex},
    time::SystemTime,
};

use goaround::{
    BoxError, DeadlineLayer, Event, Outcome, ReconnectLayer, RetryReadOnly, WriteSafetyLayer,
    write_safety::ledger::{self, Entry, EntryId, Ledger, LedgerError, MemoryLedger},
};
use tokio::time::sleep;
use tower::{Layer, service_fn, util::BoxCloneService};

mod lab;
#[path = "lab/worlds.rs"]
mod worlds;

use lab::ms;
use worlds::{Boxed, Client, Connection, Frame, Options, Passed, Sender, World, count, seeds, wrong_in};

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
        if !frame.queues {
            self.state.lock().unwrap().order.push(Passed::Sent(frame.put.token));
        }
        tokio::spawn(wire(over, frame, reply));
    }
}

async fn wire(connection: Connection<World>, frame: Arc<Frame>, reply: Sender) {
    let Connection(world, conn) = &connection;
    if frame.queues {
        if world.chance(25) {
            sleep(world.wait(4000)).await;
        }
        if connection.is_closed() || !frame.take() {
            return;
        }
        if world.chance(15) {
            sleep(world.wait(4000)).await;
            if connection.is_closed() {
                return; // cut
            }
        }
        world.state.lock().unwrap().order.push(Passed::Sent(frame.put.token));
        frame.sent();
    }
    world.serves(conn, &frame.put, reply).await;
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

/// A table elsewhere, which is slow and fails at times, also after it has done what it was asked.
#[derive(Clone)]
struct Store {
    world: World,
    fails: u32,
    table: Arc<Mutex<HashMap<EntryId, Entry>>>,
}

impl Store {
    async fn step<T>(&self, act: impl FnOnce() -> Result<T, LedgerError>) -> Result<T, LedgerError> {
        let lost = || LedgerError::Unavailable("lost".into());
        sleep(self.world.wait(300)).await;
        if self.world.chance(self.fails) {
            match self.world.pick(4) {
                0 => pending::<()>().await,
                _ => return Err(lost()),
            }
        }
        let done = act();
        sleep(self.world.wait(300)).await;
        if self.world.chance(self.fails) {
            match self.world.pick(4) {
                0 => pending::<()>().await,
                _ => return Err(lost()),
            }
        }
        done
    }

    fn change(
        &self,
        id: EntryId,
        act: impl FnOnce(&mut Entry) -> Result<u64, LedgerError>,
    ) -> Result<u64, LedgerError> {
        act(self.table.lock().unwrap().get_mut(&id).ok_or(LedgerError::Conflict(id))?)
    }
}

impl Ledger for Store {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        self.step(|| {
            let mut table = self.table.lock().unwrap();
            if table.contains_key(&entry.id) {
                return Err(LedgerError::Conflict(entry.id));
            }
            let held = table.values().find(|held| {
                held.key.is_some()
                    && held.key == entry.key
                    && matches!(held.state, ledger::State::InDoubt { .. })
            });
            if let Some(held) = held {
                return Err(LedgerError::KeyInDoubt { id: held.id, method: held.method.clone() });
            }
            let revision = entry.revision;
            table.insert(entry.id, entry.clone());
            Ok(revision)
        })
        .await
    }
    async fn settle(&self, id: EntryId, revision: u64, state: ledger::State) -> Result<u64, LedgerError> {
        self.step(|| self.change(id, |entry| entry.settle(revision, state, SystemTime::now()))).await
    }
    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.step(|| self.change(id, |entry| entry.claim(revision, SystemTime::now()))).await
    }
    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        Ok(self.table.lock().unwrap().values().filter(|entry| !entry.state.is_closed()).cloned().collect())
    }
    async fn forget(&self, _: EntryId, _: &str) -> Result<(), LedgerError> {
        Ok(())
    }
    fn abandon(&self, id: EntryId, state: ledger::State) {
        if !self.world.chance(self.fails) {
            let _ = self.change(id, |entry| match entry.state {
                ledger::State::Open => entry.settle(entry.revision, state, SystemTime::now()),
                _ => Err(LedgerError::Conflict(id)),
            });
        }
    }
}

async fn fly(seed: u64, lie: Option<Lie>) -> Result<(), String> {
    let mut rng = fastrand::Rng::with_seed(seed);
    let plan = plan(&mut rng, lie);
    let options = &plan.options;
    // An unmarked connection counts its quarantine from the attempt timeout, which is no earlier than its bytes here.
    let world = World::new(options.clone(), rng);
    let heard = world.state.clone();
    let sink = move |event: Event<'_>| heard.lock().unwrap().hears(event);
    let ledger = MemoryLedger::new();
    let store = Store { world: world.clone(), fails: plan.store_fails, table: Arc::default() };
    let layer = match plan.store {
        true => world.layer().ledger(store.clone()),
        false => world.layer().ledger(ledger.clone()),
    };
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
                1 => BoxCloneService::new(WriteSafetyLayer::refuse().ledger(ledger.clone()).layer(inner)),
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
    let left = ledger.in_doubt().await.unwrap();
    let table = store.table.lock().unwrap().clone();
    let state = world.state.lock().unwrap();
    for called in &ends {
        let (token, told) = (called.token, &called.told);
        let name = token.to_string();
        let wrong = |what: String| {
            Err(format!("seed {seed} write {token}: {what}\n{plan:#?}\n{}", state.log.join("\n")))
        };
        let begun = count(&state.begun, token);
        let (doubts, abandoned) = (count(&state.doubts, token), count(&state.abandoned, token));
        let listed = left.iter().any(|entry| entry.method == name);
        if plan.store && plan.around.is_empty() {
            let entry = table.values().find(|entry| entry.method == name).map(|entry| entry.state.clone());
            let lie = match (&entry, told) {
                (Some(ledger::State::NotLanded { .. }), Some(Ok(_))) => true,
                (Some(ledger::State::NotLanded { .. }), _) if begun > 0 => true,
                (Some(ledger::State::Landed { .. }), _) if begun == 0 => true,
                (None, _) if begun > 0 => true,
                (Some(state), Some(Err(error))) if error.outcome() == Outcome::Unknown => state.is_closed(),
                _ => false,
            };
            if lie {
                return wrong(format!("the store says {entry:?}, and the caller was told {told:?}"));
            }
        }
        if let Some(other) = state.overwritten_by(token, |other| options.touches(token, other)) {
            return wrong(format!("replayed on top of {other}"));
        }
        if begun > 1 && !options.idempotent {
            return wrong(format!("{begun} copies"));
        }
        if doubts + abandoned > 1 {
            return wrong(format!("reported {doubts}+{abandoned} times"));
        }
        if let Some(what) = called.wrong(begun, doubts, abandoned).pop() {
            return wrong(what);
        }
        if !plan.around.is_empty() {
            continue;
        }
        match told {
            Some(Ok(_)) if listed => return wrong("Ok and in the ledger".into()),
            // With the store, that one lists at the most what is in doubt of a layer around it.
            _ if plan.store => {}
            None if (abandoned > 0) != listed && doubts == 0 => {
                return wrong("abandoned and not in the ledger, or the other way round".into());
            }
            Some(Err(error)) if called.in_doubt() != listed => {
                return wrong(format!("{error}: ledger says {listed}"));
            }
            _ => {}
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
