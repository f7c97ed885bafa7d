//! What a layer hands back: only what was never attempted is handed over anew by whoever has it next, and what its ledger
//! says is another's by nobody. Who has told what of it.

mod lab;

use std::{
    collections::HashMap,
    future::{pending, ready},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering::Relaxed},
    },
    time::SystemTime,
};

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Evidence, Outcome, ReconnectLayer, Stack, WriteSafetyLayer,
    write_safety::{
        KeyedAnswer, KeyedWrites,
        ledger::{Entry, EntryId, Ledger, LedgerError, MemoryLedger, State},
    },
};
use lab::*;
use tokio::{sync::Semaphore, time::sleep};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};

type Safety = WriteSafetyLayer<Req, Res>;

// ===== A replay that is handed back =====

fn checked(lab: &Lab, ledger: &MemoryLedger) -> Safety {
    let log = lab.log.clone();
    let check = WriteSafetyLayer::new(move |doubt: Doubt| {
        log.note("check");
        async move { Ok(doubt.not_landed_because("tested")) }
    });
    check.ledger(ledger.clone()).conflict_key(|_: &Req| Some("account 7")).on_event(lab.events.sink())
}

/// Its connections are stacks that share a ledger and have one conflict key. On the first one W1 is attempted and lost, found
/// not to have landed, and its replay finds no connection. The next one takes five seconds.
fn gateway(lab: &Lab, layer: Safety) -> BoxCloneService<Req, Res, CallError> {
    over_layers(lab, layer, 5 * SECOND)
}

/// W2, over another stack with the same ledger and key, is done meanwhile.
#[tokio::test(start_paused = true)]
async fn a_replay_that_was_handed_back_does_not_go_over_a_later_write() {
    let (lab, ledger) = (Lab::new(), MemoryLedger::new());
    lab.write(fail(closed())).write(answer(1));
    let call = tokio::spawn(gateway(&lab, checked(&lab, &ledger)).oneshot(write()));
    sleep(2 * SECOND).await;
    assert_eq!(lab.writes(), 1, "W1's first attempt");
    let other = Lab::new();
    other.write(answer(2));
    let second = checked(&other, &ledger).layer(other.connection()).oneshot(write()).await;
    assert_eq!(second.map_err(|error| error.to_string()), Ok(2));
    lab.log.note("W2 is done");
    let result = call.await.unwrap().map_err(|error| error.to_string());
    assert_eq!(lab.writes(), 1, "replayed over W2: {result:?} {:?}", lab.log.timed());
}

/// "A write is replayed once in all, also where such layers are nested", and is told once.
#[tokio::test(start_paused = true)]
async fn a_replay_that_was_handed_back_is_made_once_in_all() {
    let (lab, ledger) = (Lab::new(), MemoryLedger::new());
    lab.write(fail(closed())).write(fail(CallError::ambiguous("reset"))).write(answer(3));
    let result =
        gateway(&lab, checked(&lab, &ledger)).oneshot(write()).await.map_err(|error| error.to_string());
    assert!(lab.writes() <= 2, "sent {} times: {result:?} {:?}", lab.writes(), lab.log.timed());
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_was_handed_back_is_told_once() {
    let (lab, ledger) = (Lab::new(), MemoryLedger::new());
    lab.write(fail(closed()))
        .write(fail(CallError::ambiguous("reset")))
        .write(fail(CallError::ambiguous("reset")));
    let result =
        gateway(&lab, checked(&lab, &ledger)).oneshot(write()).await.map_err(|error| error.to_string());
    assert_eq!(lab.events.doubts(), 1, "{result:?} {:#?}", lab.events.all());
}

/// The same under a layer that refuses replays and has an attempt timeout, and may keep the request all the same: all of it
/// on one key and one ledger.
#[tokio::test(start_paused = true)]
async fn a_layer_that_refuses_replays_does_not_make_one_over_a_later_write() {
    for keeps in [false, true] {
        let (lab, ledger) = (Lab::new(), MemoryLedger::new());
        lab.readiness(Readiness::Ready);
        for _ in 0..2 {
            lab.readiness(Readiness::Dead);
        }
        lab.connect(Connect::Ok).connect(Connect::After(3 * SECOND)).connect(Connect::After(3 * SECOND));
        lab.connect(Connect::After(3 * SECOND));
        lab.write(fail(closed())).write(answer(1));
        let key = |_: &Req| Some("account 7");
        let outer = Safety::refuse().attempt_timeout(2 * SECOND).ledger(ledger.clone()).conflict_key(key);
        let outer = match keeps {
            false => outer,
            // It reads answers to its key, and knows what to answer.
            true => outer
                .landed_with(|_: &Req| 7)
                .keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).answers(|_| None::<KeyedAnswer<Res>>)),
        };
        let service = ServiceBuilder::new()
            .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
            .layer(outer)
            .layer(checked(&lab, &ledger))
            .layer(ReconnectLayer::once())
            .service(lab.connector());
        let call = tokio::spawn(service.oneshot(write()));
        sleep(7 * SECOND).await;
        lab.log.note("now W2");
        let other = Lab::new();
        other.write(answer(2));
        let mut other_stack = checked(&other, &ledger).layer(other.connection());
        let second = other_stack.call(write()).await.map_err(|error| error.to_string());
        lab.log.note(format!("W2: {second:?}"));
        let result = call.await.unwrap().map_err(|error| error.to_string());
        assert!(lab.writes() == 1 || second.is_err(), "replayed over W2: {result:?} {:?}", lab.log.timed());
    }
}

/// The same of a write that was refused by an evidence that is trusted, and without any check, ledger or key: the order of
/// writes is that of one stack, which the gateway's connections share.
#[tokio::test(start_paused = true)]
async fn a_trusted_replay_that_was_handed_back_does_not_go_over_a_later_write() {
    let lab = Lab::new();
    let busy = CallError::evidence(Evidence::TooManyRequests, "429").connection_lost();
    lab.write(fail(busy)).write(answer(1));
    let layer = Safety::refuse().trust(Evidence::TooManyRequests);
    let layer = layer.ledger(MemoryLedger::new()).conflict_key(|_: &Req| Some("account 7"));
    let other = Lab::new();
    let mut second = layer.layer(other.connection());
    let call = tokio::spawn(gateway(&lab, layer).oneshot(write()));
    sleep(2 * SECOND).await;
    assert_eq!(lab.writes(), 1, "W1's first attempt");
    other.write(answer(2));
    second.call(write()).await.unwrap();
    lab.log.note("W2 is done");
    let result = call.await.unwrap().map_err(|error| error.to_string());
    assert_eq!(lab.writes(), 1, "replayed over W2: {result:?} {:?}", lab.log.timed());
}

/// The same with whole stacks of the crate's own parts, with a quarantine for a fence.
#[tokio::test(start_paused = true)]
async fn a_stack_around_stacks_makes_no_replay_over_a_later_write() {
    let (lab, ledger) = (Lab::new(), MemoryLedger::new());
    lab.readiness(Readiness::Ready)
        .readiness(Readiness::Ready)
        .readiness(Readiness::Dead)
        .readiness(Readiness::Dead);
    lab.write(fail(CallError::closed("reset"))).write(answer(1));
    let writes = |lab: &Lab| {
        let log = lab.log.clone();
        let check = WriteSafetyLayer::new(move |doubt: Doubt| {
            log.note("check");
            async move { Ok(doubt.not_landed()) }
        });
        check.quarantine(SECOND).ledger(ledger.clone()).conflict_key(|_: &Req| Some("account 7"))
    };
    let lab2 = lab.clone();
    lab2.readiness.lock().unwrap().clear();
    lab2.readiness(Readiness::Ready).readiness(Readiness::Dead).readiness(Readiness::Dead);
    let inner = || Stack::builder(lab.connector()).writes(writes(&lab)).build().unwrap();
    let stacks = [inner(), inner()];
    let nth = AtomicU32::new(0);
    let connector = service_fn(move |()| {
        let nth = nth.fetch_add(1, Relaxed);
        let stack = stacks[nth.min(1) as usize].clone();
        async move {
            if nth > 0 {
                sleep(5 * SECOND).await;
            }
            Ok::<_, BoxError>(stack)
        }
    });
    let outer = Stack::builder(connector).deadline(60 * SECOND).build().unwrap();
    let first = outer.clone();
    let call = tokio::spawn(async move { first.send(write()).await });
    sleep(3 * SECOND).await;
    lab.log.note("now W2");
    let other = Lab::new();
    other.write(answer(2));
    let second = Stack::builder(other.connector()).writes(writes(&other)).build().unwrap();
    assert_eq!(second.send(write()).await.map_err(|error| error.to_string()), Ok(2));
    let result = call.await.unwrap().map_err(|error| error.to_string());
    assert_eq!(lab.writes(), 1, "replayed over W2: {result:?} {:?}", lab.log.timed());
}

// ===== What an inner layer has told =====

#[tokio::test(start_paused = true)]
async fn a_write_that_was_not_done_by_a_stack_that_told_so_and_is_lost_on_another_way_is_reported() {
    for (dropped, keyed) in [(false, false), (true, false), (false, true)] {
        let (first, plain) = (Lab::new(), Lab::new());
        for _ in 0..2 {
            first.write(fail(CallError::ambiguous("reset")));
        }
        plain.write(if dropped { hang() } else { fail(CallError::ambiguous("reset")) });
        let check = |doubt: Doubt| async move { Ok(doubt.not_landed_because("tested")) };
        let stack = WriteSafetyLayer::new(check).on_event(first.events.sink()).layer(first.connection());
        let way = plain.connection();
        // Safe to repeat, it says.
        let either = service_fn(move |call: Req| -> Answer {
            let (again, mut way) = (call.try_clone().unwrap(), way.clone());
            let first: Answer = Box::pin(stack.clone().oneshot(call));
            Box::pin(async move {
                match first.await {
                    Err(error) if error.is_safe_to_repeat() => way.call(again).await,
                    result => result,
                }
            })
        });
        let outer = Safety::refuse().on_event(plain.events.sink());
        let outer = if keyed { outer.conflict_key(|_: &Req| Some("account 7")) } else { outer };
        let outer = outer.layer(either);
        let ledger = outer.ledger();
        let deadline = DeadlineLayer::new(60 * SECOND).on_event(plain.events.sink());
        let call = tokio::time::timeout(SECOND, deadline.layer(outer).oneshot(write())).await;
        // It is not replayed beside a key of which the stack knows nothing.
        assert_eq!((first.writes(), plain.writes()), (if keyed { 1 } else { 2 }, 1));
        if let Ok(result) = call {
            assert_eq!(result.unwrap_err().outcome(), Outcome::Unknown);
        }
        let unknown = |events: &Events| {
            events
                .raw()
                .iter()
                .filter(|event| event["outcome"] == "unknown" && event["event"] != "call")
                .count()
        };
        let reports = unknown(&first.events) + unknown(&plain.events);
        let listed = ledger.in_doubt().await.unwrap().len();
        assert_eq!(
            (reports, listed),
            (1, 1),
            "dropped {dropped} keyed {keyed}: {:?} {:?}",
            first.events.all(),
            plain.events.all()
        );
    }
}

/// A dropped `Closing` of a write that was in doubt and was not done: a timeout in between has dropped it, and its caller is
/// told that it is unknown.
#[tokio::test(start_paused = true)]
async fn what_a_timeout_in_between_makes_unknown_is_reported_as_unknown() {
    #[derive(Clone)]
    struct Slow(MemoryLedger);
    impl Ledger for Slow {
        handed_on!(but settle);
        async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
            sleep(3 * SECOND).await;
            self.0.settle(id, revision, state).await
        }
    }
    let lab = Lab::new();
    for _ in 0..2 {
        lab.write(fail(CallError::ambiguous("reset")));
    }
    let check = |doubt: Doubt| async move { Ok(doubt.not_landed_because("tested")) };
    let inner = WriteSafetyLayer::new(check).ledger(Slow(MemoryLedger::new())).layer(lab.connection());
    let between = gives_up(BoxCloneService::new(inner), SECOND);
    let outer = Safety::refuse().layer(between);
    let ledger = outer.ledger();
    let deadline = DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink());
    let error = deadline.layer(outer).oneshot(write()).await.unwrap_err();
    assert_eq!((lab.writes(), error.outcome()), (2, Outcome::Unknown));
    let unknown = lab
        .events
        .raw()
        .iter()
        .filter(|event| event["outcome"] == "unknown" && event["event"] != "call")
        .count();
    let listed = ledger.in_doubt().await.unwrap().len();
    assert_eq!((unknown, listed), (1, 1), "{:?}", lab.events.all());
}

// ===== What another process has claimed =====

/// A database's table. As the ledgers of the crate do, it keeps no row of what is closed.
#[derive(Clone)]
struct Shared {
    table: Arc<Mutex<HashMap<EntryId, Entry>>>,
    gate: Arc<Semaphore>,
}

impl Shared {
    fn new() -> Self {
        Self { table: Arc::default(), gate: Arc::new(Semaphore::new(100)) }
    }
    fn shut(self) -> Self {
        self.gate.forget_permits(100);
        self
    }
    fn open(&self) {
        self.gate.add_permits(100);
    }
    fn only(&self) -> Entry {
        let table = self.table.lock().unwrap();
        assert_eq!(table.len(), 1);
        table.values().next().unwrap().clone()
    }
    fn set(&self, id: EntryId, revision: Option<u64>, state: State) -> Result<u64, LedgerError> {
        let mut table = self.table.lock().unwrap();
        let entry = table.get_mut(&id).ok_or(LedgerError::Conflict(id))?;
        let revision = entry.settle(revision.unwrap_or(entry.revision), state, SystemTime::now())?;
        if entry.state.is_closed() {
            table.remove(&id);
        }
        Ok(revision)
    }
    /// Another process that has taken the write over: it claims it, does it, and says so.
    fn another_process_does_it(&self) {
        let entry = self.only();
        let revision = {
            let mut table = self.table.lock().unwrap();
            table.get_mut(&entry.id).unwrap().claim(entry.revision, SystemTime::now()).unwrap()
        };
        self.set(entry.id, Some(revision), State::Answered).unwrap();
    }
}

impl Ledger for Shared {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        let mut table = self.table.lock().unwrap();
        if table.contains_key(&entry.id) {
            return Err(LedgerError::Conflict(entry.id));
        }
        let revision = entry.revision;
        table.insert(entry.id, entry);
        Ok(revision)
    }
    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        drop(self.gate.acquire().await);
        self.set(id, Some(revision), state)
    }
    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let mut table = self.table.lock().unwrap();
        table.get_mut(&id).ok_or(LedgerError::Conflict(id))?.claim(revision, SystemTime::now())
    }
    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        Ok(self.table.lock().unwrap().values().cloned().collect())
    }
    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        self.set(id, None, State::Forgotten { by: by.to_owned() }).map(drop)
    }
}

/// The connections of a gateway have a ledger that is shared with another process. One gives a write back, of which
/// nothing was sent; while that is recorded the other process takes the write over and does it.
#[tokio::test(start_paused = true)]
async fn a_reconnect_layer_sends_no_write_again_that_another_process_has_claimed() {
    let mut wrong = Vec::new();
    for (outer_layer, plain) in [(false, false), (true, false), (false, true), (true, true)] {
        let lab = Lab::new();
        lab.readiness(Readiness::Dead).readiness(Readiness::Dead).write(answer(1));
        let shared = Shared::new().shut();
        let (inner, given, connects) = (lab.clone(), shared.clone(), AtomicU32::new(0));
        let connector = service_fn(move |()| {
            let first = connects.fetch_add(1, Relaxed) == 0;
            let layer = Safety::refuse().ledger(given.clone());
            let with = layer.layer(ReconnectLayer::once().layer(inner.connector()));
            ready(Ok::<_, BoxError>(match first || !plain {
                true => BoxCloneService::new(with),
                false => BoxCloneService::new(inner.connection()),
            }))
        });
        let below = ReconnectLayer::once().layer(connector);
        let deadline = DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink());
        let service = match outer_layer {
            true => BoxCloneService::new(deadline.layer(Safety::refuse().layer(below))),
            false => BoxCloneService::new(deadline.layer(below)),
        };
        let call = tokio::spawn(service.oneshot(write()));
        sleep(ms(100)).await;
        assert_eq!(lab.writes(), 0);
        shared.another_process_does_it();
        shared.open();
        let result = call.await.unwrap().map_err(|error| (error.outcome(), error.to_string()));
        if lab.writes() > 0 || result.map_err(|(outcome, _)| outcome) != Err(Outcome::Unknown) {
            wrong.push(format!("outer {outer_layer} plain {plain}: done a second time"));
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// The same where a layer that refuses replays, with an attempt timeout, is around it.
#[tokio::test(start_paused = true)]
async fn a_layer_that_refuses_replays_sends_no_write_again_that_another_process_has_claimed() {
    let lab = Lab::new();
    for _ in 0..2 {
        lab.connect(Connect::After(3 * SECOND)).readiness(Readiness::Dead);
    }
    lab.write(answer(1));
    let shared = Shared::new().shut();
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(Safety::refuse().attempt_timeout(5 * SECOND))
        .layer(Safety::refuse().ledger(shared.clone()))
        .layer(ReconnectLayer::once())
        .service(lab.connector());
    let call = tokio::spawn(service.oneshot(write()));
    sleep(7 * SECOND).await;
    assert_eq!(lab.writes(), 0);
    shared.another_process_does_it();
    shared.open();
    let result = call.await.unwrap().map_err(|error| (error.outcome(), error.to_string()));
    assert_eq!(lab.writes(), 0, "done a second time: {result:?}");
    assert_eq!(result.unwrap_err().0, Outcome::Unknown);
}

/// The same of a write that is lost, where a layer further in has the check, and another ledger.
#[tokio::test(start_paused = true)]
async fn a_layer_further_in_replays_no_write_that_another_process_has_claimed_in_the_ledger_further_out() {
    let lab = Lab::new();
    lab.write(fail(CallError::ambiguous("reset"))).write(answer(1));
    let shared = Shared::new();
    let check = WriteSafetyLayer::new(|doubt: Doubt| async move {
        sleep(SECOND).await;
        Ok(doubt.not_landed_because("tested"))
    });
    let service = Safety::refuse().ledger(shared.clone()).layer(check.layer(lab.connection()));
    let call = tokio::spawn(DeadlineLayer::new(60 * SECOND).layer(service).oneshot(write()));
    sleep(ms(500)).await;
    shared.another_process_does_it();
    let error = call.await.unwrap().unwrap_err();
    assert_eq!((lab.writes(), error.outcome()), (1, Outcome::Unknown), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_refused_after_the_call_says_that_it_is_unknown_also_if_its_end_cannot_be_recorded() {
    for hangs in [false, true] {
        let lab = Lab::new();
        lab.write(later(2 * SECOND, Err(CallError::not_processed("busy"))));
        let shared = Shared::new();
        let ledger = ClaimsSlowly(shared.clone(), hangs);
        let keyed = KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(600 * SECOND);
        let layer = Safety::refuse().keyed(keyed).attempt_timeout(SECOND).ledger(ledger);
        let deadline = DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink());
        let call = tokio::spawn(deadline.layer(layer.layer(lab.connection())).oneshot(write()));
        sleep(ms(500)).await;
        // The other process has it from here on, and goes on with it.
        let entry = shared.only();
        let revision =
            shared.table.lock().unwrap().get_mut(&entry.id).unwrap().claim(1, SystemTime::now()).unwrap();
        let error = call.await.unwrap().unwrap_err();
        let settled = shared.set(entry.id, Some(revision), State::Answered);
        eprintln!("hangs {hangs}: {error}; theirs: {settled:?}; {:?}", lab.events.all());
        assert!(settled.is_ok(), "hangs {hangs}: the other one's entry was closed by a hint ({error})");
        assert_eq!(error.outcome(), Outcome::Unknown, "hangs {hangs}: {error}");
    }
}

/// A claim takes three seconds, and a settlement fails or hangs.
#[derive(Clone)]
struct ClaimsSlowly(Shared, bool);
impl Ledger for ClaimsSlowly {
    handed_on!(but settle, claim);
    async fn settle(&self, _: EntryId, _: u64, _: State) -> Result<u64, LedgerError> {
        match self.1 {
            true => pending().await,
            false => Err(LedgerError::Unavailable("lost".into())),
        }
    }
    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        let result = self.0.claim(id, revision).await;
        sleep(3 * SECOND).await;
        result
    }
}
