//! What keeps writes in doubt apart: ledgers, conflict keys, idempotency keys, declared fences. Over a scripted
//! server, with tokio's clock paused.

mod lab;

use std::{
    collections::{HashMap, HashSet},
    future::{Future, pending, ready},
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::{Duration, SystemTime},
};

use goaround::{
    BoxError, Call, CallError, Cause, DeadlineLayer, Effect, InDoubt, Outcome, Refusal, Stack, Tagged,
    Verdict, VerdictKind, WriteSafetyLayer,
    jsonrpc::{Request, Response},
    write_safety::{
        KeyedAnswer, KeyedWrites, Resolve,
        ledger::{Entry, EntryId, Ledger, LedgerError, MemoryLedger, ServerProcess, State, servers_gone},
    },
};
use lab::*;
use serde_json::{Value, json};
use tokio::{sync::Semaphore, time::advance};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};

type Safety = WriteSafetyLayer<Req, Res>;

// ===== A store that several processes share =====

/// A database's table, as an implementer of [`Ledger`] would use it. One handle is one process.
#[derive(Clone)]
struct Store {
    table: Arc<Mutex<HashMap<EntryId, Entry>>>,
    /// In which they were entered.
    order: Arc<Mutex<Vec<EntryId>>>,
    log: Log,
    /// What fails, and what waits for a permit.
    fails: Arc<Mutex<Vec<&'static str>>>,
    gates: Arc<HashMap<&'static str, Semaphore>>,
    hints: Arc<Mutex<Vec<State>>>,
}

impl Store {
    fn new(log: &Log) -> Self {
        let gates = ["enter", "settle", "claim"].map(|step| (step, Semaphore::new(100)));
        Self {
            table: Arc::default(),
            order: Arc::default(),
            log: log.clone(),
            fails: Arc::default(),
            gates: Arc::new(gates.into()),
            hints: Arc::default(),
        }
    }

    fn fails(self, step: &'static str) -> Self {
        self.fails.lock().unwrap().push(step);
        self
    }

    /// Nothing gets past that step until it is opened.
    fn shut(self, step: &'static str) -> Self {
        self.gates[step].forget_permits(100);
        self
    }

    async fn step(&self, step: &'static str) -> Result<(), LedgerError> {
        drop(self.gates[step].acquire().await);
        self.log.note(step);
        match self.fails.lock().unwrap().contains(&step) {
            true => Err(LedgerError::Unavailable("no disk".into())),
            false => Ok(()),
        }
    }

    fn entries(&self) -> Vec<Entry> {
        self.table.lock().unwrap().values().cloned().collect()
    }

    fn state(&self) -> State {
        let entries = self.entries();
        assert_eq!(entries.len(), 1, "{entries:?}");
        entries[0].state.clone()
    }

    fn update(
        &self,
        id: EntryId,
        change: impl FnOnce(&mut Entry) -> Result<u64, LedgerError>,
    ) -> Result<u64, LedgerError> {
        change(self.table.lock().unwrap().get_mut(&id).ok_or(LedgerError::Conflict(id))?)
    }
}

impl Ledger for Store {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        self.step("enter").await?;
        let mut table = self.table.lock().unwrap();
        if table.contains_key(&entry.id) {
            return Err(LedgerError::Conflict(entry.id));
        }
        let held = table.values().find(|held| {
            held.key.is_some() && held.key == entry.key && matches!(held.state, State::InDoubt { .. })
        });
        if let Some(held) = held {
            return Err(LedgerError::KeyInDoubt { id: held.id, method: held.method.clone() });
        }
        let revision = entry.revision;
        self.order.lock().unwrap().push(entry.id);
        table.insert(entry.id, entry);
        Ok(revision)
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.step("settle").await?;
        self.update(id, |entry| entry.settle(revision, state, SystemTime::now()))
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.step("claim").await?;
        let mut table = self.table.lock().unwrap();
        let order = self.order.lock().unwrap();
        let later = order.iter().skip_while(|other| **other != id).skip(1);
        let entry = table.get(&id).ok_or(LedgerError::Conflict(id))?;
        if later.filter_map(|other| table.get(other)).any(|other| other.touches(entry)) {
            return Err(LedgerError::Overtaken(id));
        }
        table.get_mut(&id).ok_or(LedgerError::Conflict(id))?.claim(revision, SystemTime::now())
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        Ok(self.entries().into_iter().filter(|entry| !entry.state.is_closed()).collect())
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let state = State::Forgotten { by: by.to_owned() };
        self.update(id, |entry| entry.settle(entry.revision, state, SystemTime::now())).map(drop)
    }

    fn abandon(&self, id: EntryId, state: State) {
        self.hints.lock().unwrap().push(state.clone());
        let _ = self.update(id, |entry| match entry.state {
            State::Open => entry.settle(entry.revision, state, SystemTime::now()),
            _ => Err(LedgerError::Conflict(id)),
        });
    }

    async fn started(&self, _: ServerProcess) -> Result<(), LedgerError> {
        Ok(())
    }
}

/// A store that takes no hints, as a [`Ledger`] may.
#[derive(Clone)]
struct NoHints(Store);
impl Ledger for NoHints {
    handed_on!();
}

/// A store one of whose operations panics.
#[derive(Clone)]
struct PanicsAt(Store, &'static str);
impl Ledger for PanicsAt {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        assert_ne!(self.1, "enter");
        self.0.enter(entry).await
    }
    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        assert_ne!(self.1, "settle");
        self.0.settle(id, revision, state).await
    }
    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        assert_ne!(self.1, "claim");
        self.0.claim(id, revision).await
    }
    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        self.0.in_doubt().await
    }
    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        self.0.forget(id, by).await
    }
    fn abandon(&self, id: EntryId, state: State) {
        Ledger::abandon(&self.0, id, state);
        assert_ne!(self.1, "abandon");
    }
}

/// A ledger of this crate within one of the caller's.
#[derive(Clone)]
struct Wrapped<L>(L);
impl<L: Ledger> Ledger for Wrapped<L> {
    handed_on!();
    fn abandon(&self, id: EntryId, state: State) {
        self.0.abandon(id, state);
    }
}

/// Polls once; whether it is pending.
fn poll_once<F: Future>(call: &mut std::pin::Pin<Box<F>>) -> bool {
    call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending()
}

// ===== Services =====

fn service(
    lab: &Lab,
    layer: Safety,
) -> impl Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static {
    ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(layer)
        .service(lab.connection())
}

/// A check that says, after a second, that it did not land.
fn absent(lab: &Lab) -> Safety {
    let log = lab.log.clone();
    WriteSafetyLayer::new(move |doubt: Doubt| {
        log.note("check");
        async move {
            tokio::time::sleep(SECOND).await;
            Ok(doubt.not_landed_because("tested"))
        }
    })
}

fn refusal(error: &CallError) -> &Refusal {
    match error.cause() {
        Cause::Refused(refusal) => refusal,
        other => panic!("{other:?}"),
    }
}

// ===== The ledger's part =====

#[tokio::test(start_paused = true)]
async fn a_write_is_entered_before_its_first_byte_and_its_end_is_recorded() {
    let ends: [(Step, State); 4] = [
        (answer(1), State::Answered),
        (fail(CallError::answered("no")), State::Answered),
        (fail(closed()), State::InDoubt { reason: "no effect check".into() }),
        (
            fail(CallError::not_processed("busy")),
            State::NotLanded { why: "other".into(), basis: goaround::FenceBasis::Observed },
        ),
    ];
    for (step, state) in ends {
        let lab = Lab::new();
        lab.write(step);
        let store = Store::new(&lab.log);
        let layer = WriteSafetyLayer::refuse().ledger(store.clone());
        let _ = service(&lab, layer).oneshot(write()).await;
        assert_eq!(lab.log.all(), ["enter", "write", "settle"]);
        assert_eq!(store.state(), state);
        let entry = &store.entries()[0];
        assert_eq!((entry.method.as_str(), entry.effect, entry.attempts), ("pay", Effect::Write, 1));
        assert!(entry.id.is_own() && entry.arguments.is_none() && entry.key.is_none());
    }
}

#[tokio::test(start_paused = true)]
async fn reads_are_not_entered() {
    let lab = Lab::new();
    let layer = WriteSafetyLayer::refuse().ledger(Store::new(&lab.log));
    service(&lab, layer).oneshot(read()).await.unwrap();
    assert_eq!(lab.log.all(), ["read"]);
}

#[tokio::test(start_paused = true)]
async fn a_write_that_cannot_be_entered_is_refused() {
    let lab = Lab::new();
    let store = Store::new(&lab.log).fails("enter");
    let error = service(&lab, WriteSafetyLayer::refuse().ledger(store)).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 0));
    assert_eq!(*refusal(&error), Refusal::Ledger);
    assert!(matches!(error.downcast::<LedgerError>(), Ok(LedgerError::Unavailable(_))));
    assert_eq!(lab.events.all(), []);
}

#[tokio::test(start_paused = true)]
async fn a_ledger_that_never_answers_ends_with_the_deadline_and_nothing_is_sent() {
    for nested in [false, true] {
        let lab = Lab::new();
        let store = Store::new(&lab.log).shut("enter");
        let inner = Safety::refuse().ledger(store.clone()).layer(lab.connection());
        let service = match nested {
            true => BoxCloneService::new(Safety::refuse().layer(inner)),
            false => BoxCloneService::new(inner),
        };
        let service = DeadlineLayer::new(60 * SECOND).layer(service);
        let error = service.oneshot(write().within(SECOND)).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 0));
        assert_eq!(
            *store.hints.lock().unwrap(),
            [State::NotLanded { why: "deadline".into(), basis: goaround::FenceBasis::Observed }]
        );
    }
}

#[tokio::test(start_paused = true)]
async fn an_answer_reaches_the_caller_whether_or_not_the_ledger_can_record_it() {
    let lab = Lab::new();
    lab.write(answer(3));
    let store = Store::new(&lab.log).fails("settle");
    assert_eq!(
        service(&lab, WriteSafetyLayer::refuse().ledger(store.clone())).oneshot(write()).await.unwrap(),
        3
    );
    // It is told once more, without waiting; what it cannot take stays open.
    assert_eq!(*store.hints.lock().unwrap(), [State::Answered]);

    // One that hangs holds it up for 5 s, and not past the deadline.
    for (within, waits) in [(60, 5), (2, 2)] {
        let lab = Lab::new();
        lab.write(answer(4));
        let store = Store::new(&lab.log).shut("settle");
        let start = tokio::time::Instant::now();
        let layer = WriteSafetyLayer::refuse().ledger(store.clone());
        let call = service(&lab, layer).oneshot(write().within(within * SECOND));
        assert_eq!(call.await.unwrap(), 4);
        assert_eq!(start.elapsed(), waits * SECOND);
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_is_claimed_first_and_does_not_happen_without() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let store = Store::new(&lab.log);
    let layer = absent(&lab).ledger(store.clone());
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.all(), ["enter", "write", "check", "claim", "write", "settle"]);
    assert_eq!((store.state(), store.entries()[0].attempts), (State::Answered, 2));

    let lab = Lab::new();
    lab.write(fail(closed()));
    let store = Store::new(&lab.log).fails("claim");
    let error = service(&lab, absent(&lab).ledger(store.clone())).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 1));
    assert!(error.to_string().contains("could not claim"), "{error}");
    assert!(matches!(store.state(), State::NotLanded { .. }));
}

/// The ledger may take the claim all the same, and need not take hints.
#[tokio::test(start_paused = true)]
async fn a_write_whose_call_ends_while_its_replay_is_claimed_is_settled_in_the_ledger() {
    for is_overtaken in [true, false] {
        let lab = Lab::new();
        let (answers, answered) = tokio::sync::oneshot::channel::<()>();
        match is_overtaken {
            true => lab.write(fail(closed())),
            // It answers itself while it is claimed.
            false => lab.write(Box::new(|_| {
                Box::pin(async move {
                    let _ = answered.await;
                    Ok(1)
                })
            })),
        };
        let store = Store::new(&lab.log).shut("claim");
        let layer = absent(&lab).attempt_timeout(SECOND).ledger(NoHints(store.clone()));
        let service = service(&lab, layer);
        let mut first = Box::pin(service.clone().oneshot(write()));
        for _ in 0..10 {
            assert!(poll_once(&mut first));
            advance(SECOND / 2).await;
        }
        assert_eq!(lab.log.all(), ["enter", "write", "check"], "its replay is being claimed");
        if is_overtaken {
            lab.write(answer(2));
            assert_eq!(service.clone().oneshot(write()).await.unwrap(), 2);
        } else {
            answers.send(()).unwrap();
        }
        assert!(poll_once(&mut first), "it is told when it is recorded");
        store.gates["claim"].add_permits(1);
        let said = first.await;
        assert_eq!(said.as_ref().ok(), if is_overtaken { None } else { Some(&1) });
        let first = store.order.lock().unwrap()[0];
        let state = store.table.lock().unwrap()[&first].state.clone();
        match said {
            Ok(_) => assert_eq!(state, State::Answered),
            Err(error) => {
                assert_eq!(error.outcome(), Outcome::NotDone, "{error}");
                assert!(matches!(state, State::NotLanded { .. }), "{state:?}");
            }
        }
    }
}

/// Another process takes the write over, as the ledger allows if this one's lease has run out. Nothing of it was done here,
/// but it may be there.
#[tokio::test(start_paused = true)]
async fn a_write_that_somebody_else_claims_while_its_end_is_recorded_is_unknown() {
    for is_claimed in [false, true] {
        let lab = Lab::new();
        lab.write(fail(CallError::not_processed("busy")));
        let store = Store::new(&lab.log).shut("settle");
        let layer = Safety::refuse().ledger(store.clone());
        let mut call = Box::pin(service(&lab, layer).oneshot(write()));
        for _ in 0..5 {
            assert!(poll_once(&mut call));
        }
        let entry = store.entries().remove(0);
        if is_claimed {
            store.claim(entry.id, entry.revision).await.unwrap();
        }
        store.gates["settle"].add_permits(1);
        let error = call.await.unwrap_err();
        let expected = if is_claimed { Outcome::Unknown } else { Outcome::NotDone };
        assert_eq!(error.outcome(), expected, "{error}");
        assert_eq!(
            error.to_string().contains("somebody else has settled or claimed it"),
            is_claimed,
            "{error}"
        );
        assert_eq!(lab.events.doubts(), usize::from(is_claimed));
        if is_claimed {
            let report = &lab.events.raw()[0];
            assert_eq!(
                (&report["outcome"], report["attempts"].as_array().unwrap().len()),
                (&json!("unknown"), 2)
            );
            assert_eq!(store.state(), State::Open, "it is theirs");
        } else {
            assert!(matches!(store.state(), State::NotLanded { .. }));
        }
    }
}

/// Of layers around each other one tells it.
#[tokio::test(start_paused = true)]
async fn a_write_whose_caller_goes_away_while_it_is_recorded_that_it_was_found_is_told_once() {
    for nested in [false, true] {
        let lab = Lab::new();
        lab.write(fail(closed()));
        let store = Store::new(&lab.log).shut("settle");
        let found = WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.landed(7)) });
        let inner = found.ledger(store.clone()).layer(lab.connection());
        let deadline = DeadlineLayer::new(SECOND).on_event(lab.events.sink());
        let service = match nested {
            true => BoxCloneService::new(deadline.layer(Safety::refuse().layer(inner))),
            false => BoxCloneService::new(deadline.layer(inner)),
        };
        let mut call = Box::pin(service.oneshot(write()));
        for _ in 0..5 {
            assert!(poll_once(&mut call));
        }
        drop(call);
        assert_eq!((lab.events.doubts(), lab.events.abandoned()), (1, 0), "{:?}", lab.events.raw());
        assert!(matches!(store.state(), State::Landed { .. }), "by a hint");
    }
}

/// A store that two layers have. What is entered in it for the second time waits for its gate, and fails or is refused then.
#[derive(Clone)]
struct Second {
    of: Store,
    entered: Arc<AtomicU32>,
    fails: bool,
}
impl Ledger for Second {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        if self.entered.fetch_add(1, Ordering::Relaxed) > 0 {
            drop(self.of.gates["claim"].acquire().await);
            if self.fails {
                return Err(LedgerError::Unavailable("lost".into()));
            }
        }
        self.of.enter(entry).await
    }
    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.of.settle(id, revision, state).await
    }
    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        self.of.claim(id, revision).await
    }
    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        self.of.in_doubt().await
    }
    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        self.of.forget(id, by).await
    }
    fn abandon(&self, id: EntryId, state: State) {
        Ledger::abandon(&self.of, id, state);
    }
}

/// That the write has an entry already says nothing of who has it: it is the layer further out.
#[tokio::test(start_paused = true)]
async fn a_write_that_is_refused_its_second_entry_was_not_done() {
    for (at_its_end, fails) in [(true, false), (true, true), (false, false), (false, true)] {
        let lab = Lab::new();
        let store = Store::new(&lab.log).shut("claim");
        let layer = Safety::refuse().ledger(Second { of: store.clone(), entered: Arc::default(), fails });
        let stack = DeadlineLayer::new(SECOND)
            .on_event(lab.events.sink())
            .layer(layer.layer(layer.layer(lab.connection())));
        let mut call = Box::pin(stack.oneshot(write()));
        assert!(poll_once(&mut call));
        assert_eq!(lab.log.all(), ["enter"]);
        if at_its_end {
            advance(SECOND).await;
        }
        store.gates["claim"].add_permits(1);
        let error = call.await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes(), lab.events.doubts()), (Outcome::NotDone, 0, 0), "{error}");
        assert!(matches!(store.state(), State::NotLanded { .. }));
        assert!(store.hints.lock().unwrap().is_empty(), "a hint would be about the other one's entry");
    }
}

/// Two copies of a call, by a service that hedges. Of the entry that is there the one that has not entered it says nothing.
#[tokio::test(start_paused = true)]
async fn a_copy_that_is_dropped_before_it_was_entered_closes_no_entry_of_another_one() {
    for polled in [false, true] {
        let lab = Lab::new();
        lab.write(hang());
        let store = Store::new(&lab.log);
        let layer = Safety::refuse().ledger(store.clone()).on_event(lab.events.sink());
        let mut service = layer.layer(lab.connection());
        let mut request = write();
        request.context_mut().assign_id();
        let copy = request.try_clone().unwrap();
        let mut call = Box::pin(service.call(request));
        assert!(poll_once(&mut call));
        assert_eq!(lab.writes(), 1);

        let _store = store.clone().shut("enter");
        let mut copy = Box::pin(service.call(copy));
        if polled {
            assert!(poll_once(&mut copy));
        }
        drop(copy);
        assert_eq!((store.state(), store.hints.lock().unwrap().len()), (State::Open, 0), "polled: {polled}");
        drop(call);
        assert!(matches!(store.state(), State::InDoubt { .. }), "polled: {polled}");
        assert_eq!(lab.events.abandoned(), 1);
    }
}

/// What becomes of a claim that the call does not wait for any more.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Claimed {
    /// It is refused by a word that may also mean that somebody else has the write.
    Refused,
    Panics,
    /// Its future panics when it goes.
    PanicsInItsDestructor,
}

/// A store that takes no hints, and whose claims wait for their gate and end so.
#[derive(Clone)]
struct Claims(Store, Claimed);

struct Bomb(Claimed);

impl Drop for Bomb {
    fn drop(&mut self) {
        if self.0 == Claimed::PanicsInItsDestructor && !std::thread::panicking() {
            panic!("a foreign destructor");
        }
    }
}

impl Ledger for Claims {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        self.0.enter(entry).await
    }
    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.0.settle(id, revision, state).await
    }
    async fn claim(&self, id: EntryId, _: u64) -> Result<u64, LedgerError> {
        let _bomb = Bomb(self.1);
        drop(self.0.gates["claim"].acquire().await);
        assert_ne!(self.1, Claimed::Panics);
        Err(LedgerError::Conflict(id))
    }
    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        self.0.in_doubt().await
    }
    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        self.0.forget(id, by).await
    }
}

/// The answer that the caller has in hand stands, whatever the claim does.
#[tokio::test(start_paused = true)]
async fn an_answer_that_comes_while_a_replay_is_claimed_is_told_whatever_becomes_of_the_claim() {
    for claimed in [Claimed::Refused, Claimed::Panics] {
        let lab = Lab::new();
        lab.write(later(10 * SECOND, Ok(1)));
        let store = Store::new(&lab.log).shut("claim");
        let layer = absent(&lab).attempt_timeout(SECOND).ledger(Claims(store.clone(), claimed));
        let mut call = Box::pin(service(&lab, layer).oneshot(write()));
        for _ in 0..21 {
            assert!(poll_once(&mut call));
            advance(SECOND / 2).await;
        }
        assert!(poll_once(&mut call), "it is told when it is recorded");
        store.gates["claim"].add_permits(1);
        assert_eq!(call.await.unwrap(), 1, "{claimed:?}");
        let state = store.state();
        match claimed {
            // Nothing has changed, and its end is recorded as of the last revision.
            Claimed::Refused => assert_eq!(state, State::Answered),
            _ => assert_eq!(state, State::Open),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_claim_whose_future_panics_when_it_goes_takes_no_report_and_frees_no_key() {
    for claimed in [Claimed::Refused, Claimed::PanicsInItsDestructor] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2));
        let store = Store::new(&lab.log).shut("claim");
        let unsure = by_account(Safety::refuse().replay_idempotent());
        let service = service(&lab, unsure.ledger(Claims(store.clone(), claimed)));
        let request = || write().as_effect(Effect::Idempotent);
        let mut call = Box::pin(service.clone().oneshot(request()));
        for _ in 0..10 {
            assert!(poll_once(&mut call));
        }
        let _ = catch_unwind(AssertUnwindSafe(|| drop(call)));
        assert_eq!(lab.events.abandoned(), 1, "{claimed:?}");
        let error = service.oneshot(request()).await.unwrap_err();
        assert!(matches!(error.cause(), Cause::Refused(Refusal::KeyInDoubt(_))), "{claimed:?}: {error}");
        assert_eq!(lab.writes(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn h06_of_two_processes_that_find_a_write_absent_one_may_send_it_again() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let store = Store::new(&lab.log);
    let ours = tokio::spawn(service(&lab, absent(&lab).ledger(store.clone())).oneshot(write()));
    // Ours asks its check when another process takes it for dead, and settles what it left.
    tokio::time::sleep(SECOND / 2).await;
    let theirs = store.clone();
    let entry = theirs.in_doubt().await.unwrap().remove(0);
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed_because("theirs")) };
    let resolve = || Resolve::new(&theirs, &entry, write()).run_over(check, lab.connection());
    let resolved = resolve().await.unwrap();
    assert_eq!(resolved.verdict, VerdictKind::NotLanded);
    // Whoever comes second is told.
    assert!(matches!(resolve().await, Err(LedgerError::Conflict(id)) if id == entry.id));

    let error = ours.await.unwrap().unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1), "{error}");
    assert!(error.to_string().contains("somebody else"), "{error}");
    let State::NotLanded { why, .. } = store.state() else { panic!("{:?}", store.state()) };
    assert_eq!(why, "declared: theirs");
    assert_eq!(lab.events.doubts(), 1);
}

#[tokio::test(start_paused = true)]
async fn h06_of_two_processes_the_one_that_claims_first_keeps_the_other_from_settling() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(later(5 * SECOND, Ok(7)));
    let store = Store::new(&lab.log);
    let ours = tokio::spawn(service(&lab, absent(&lab).ledger(store.clone())).oneshot(write()));
    tokio::time::sleep(SECOND / 2).await;
    let entry = store.in_doubt().await.unwrap().remove(0);
    let check = |doubt: Doubt| async move {
        tokio::time::sleep(2 * SECOND).await;
        Ok::<_, BoxError>(doubt.not_landed_because("theirs"))
    };
    let resolved = Resolve::new(&store, &entry, write()).run_over(check, lab.connection()).await;
    assert!(matches!(resolved, Err(LedgerError::Conflict(_))));
    assert_eq!(ours.await.unwrap().unwrap(), 7);
    assert_eq!((store.state(), lab.writes()), (State::Answered, 2));
}

#[tokio::test]
async fn a_revision_at_the_end_of_its_range_does_not_panic() {
    let entry = json!({
        "id": "00000000000000000000000000000001-1-1", "method": "pay", "effect": "write", "entered_ms": 1,
        "changed_ms": 1, "attempts": 1, "state": "in_doubt", "reason": "lost", "revision": u64::MAX, "stack": 1,
    });
    let entry: Entry = serde_json::from_value(entry).unwrap();
    let ledger = MemoryLedger::new();
    let revision = ledger.enter(entry.clone()).await.unwrap();
    let revision = ledger.claim(entry.id, revision).await.unwrap();
    let revision =
        ledger.settle(entry.id, revision, State::InDoubt { reason: "still".into() }).await.unwrap();
    ledger.settle(entry.id, revision, State::Answered).await.unwrap();
    assert!(ledger.in_doubt().await.unwrap().is_empty());
}

// ===== Dropped futures =====

/// Drops a write after it was polled so many times, every 50 ms. What the ledger and the events say then.
fn dropped_after(polls: usize, store_is_shut: Option<&'static str>, in_runtime: bool) -> (Lab, Store, bool) {
    let lab = Lab::new();
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_all().start_paused(true).build().unwrap();
    let mut store = Store::new(&lab.log);
    if let Some(step) = store_is_shut {
        store = store.shut(step);
    }
    lab.write(later(SECOND / 10, Err(closed()))).write(later(SECOND / 10, Ok(1)));
    let log = lab.log.clone();
    let check = move |doubt: Doubt| {
        log.note("check");
        async move {
            doubt.probe(read()).await?;
            tokio::time::sleep(SECOND / 10).await;
            Ok::<_, BoxError>(doubt.not_landed_because("tested"))
        }
    };
    lab.read(later(SECOND / 10, Ok(0)));
    let call = {
        let _in = runtime.enter();
        let layer = WriteSafetyLayer::new(check).ledger(store.clone()).quarantine(SECOND / 10);
        Box::pin(service(&lab, layer).oneshot(write()))
    };
    let (mut call, mut resolved) = (Some(call), false);
    runtime.block_on(async {
        for _ in 0..polls {
            let done = match &mut call {
                Some(call) => call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_ready(),
                None => break,
            };
            if done {
                (call, resolved) = (None, true);
            }
            advance(SECOND / 20).await;
        }
        if in_runtime {
            call = None;
        }
    });
    drop(runtime);
    drop(call);
    (lab, store, resolved)
}

#[test]
fn h16_a_write_that_is_dropped_at_any_point_leaves_one_entry_in_doubt_and_one_event_or_none_of_both() {
    let (mut in_doubt, mut settled, mut before) = (0, 0, 0);
    for in_runtime in [true, false] {
        for shut in [None, Some("enter"), Some("claim"), Some("settle")] {
            for polls in 0..24 {
                let (lab, store, resolved) = dropped_after(polls, shut, in_runtime);
                let case = format!("{shut:?}, {polls} polls: {:?}, {:?}", lab.log.all(), store.entries());
                let open = store.entries().iter().filter(|entry| !entry.state.is_closed()).count();
                let abandoned = lab.events.abandoned();
                assert_eq!(open, abandoned, "{case}");
                match (lab.writes(), open) {
                    (0, 0) => before += 1,
                    (1.., 1) => in_doubt += 1,
                    (1.., 0) => settled += 1,
                    _ => panic!("{case}"),
                }
                // As long as no check has found anything it is in doubt.
                if !resolved && lab.writes() == 1 && lab.log.count("check") == 0 {
                    assert_eq!(open, 1, "{case}");
                }
                // One that nobody abandoned is reported by what ended it.
                assert!(abandoned + lab.events.doubts() <= 1, "{case}");
            }
        }
    }
    assert!(in_doubt > 20 && settled > 20 && before > 20, "{in_doubt} {settled} {before}");
}

#[tokio::test(start_paused = true)]
async fn a_dropped_write_is_in_the_ledger_in_memory_too() {
    let lab = Lab::new();
    lab.write(hang());
    let ledger = MemoryLedger::new();
    let layer = WriteSafetyLayer::refuse().ledger(ledger.clone());
    let mut call = Box::pin(service(&lab, layer).oneshot(write()));
    assert!(call.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    assert!(ledger.in_doubt().await.unwrap().is_empty(), "it is under way");
    drop(call);
    let entries = ledger.in_doubt().await.unwrap();
    assert_eq!((entries.len(), entries[0].method.as_str()), (1, "pay"));
    assert_eq!(entries[0].state, State::InDoubt { reason: "abandoned by its caller".into() });
    assert_eq!(lab.events.all(), [Seen::Abandoned { attempts: 1 }]);
    ledger.settle(entries[0].id, entries[0].revision, State::Landed { by: "jane".into() }).await.unwrap();
    assert!(ledger.in_doubt().await.unwrap().is_empty());
}

#[test]
fn a_panic_of_the_service_leaves_the_write_in_doubt() {
    for memory in [true, false] {
        let lab = Lab::new();
        let (ledger, store) = (MemoryLedger::new(), Store::new(&lab.log));
        let layer = Safety::refuse().on_event(lab.events.sink());
        let layer = if memory { layer.ledger(ledger.clone()) } else { layer.ledger(store.clone()) };
        let panics = service_fn(|_: Req| -> std::future::Ready<Result<Res, CallError>> { panic!("no") });
        let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
            let call = Box::pin(layer.layer(panics).oneshot(write()));
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(call)
        }));
        assert!(panicked.is_err());
        assert_eq!(lab.events.all(), [Seen::Abandoned { attempts: 1 }]);
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let in_doubt = if memory { ledger.in_doubt() } else { return assert!(!store.state().is_closed()) };
        assert_eq!(runtime.block_on(in_doubt).unwrap().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_caller_goes_away_while_its_end_is_recorded_is_reported_once() {
    type Ends = (fn() -> Step, (usize, usize));
    let ends: [Ends; 4] = [
        // The server has answered, and nobody was told.
        (|| answer(1), (1, 0)),
        (|| fail(CallError::answered("no")), (1, 0)),
        (|| fail(closed()), (0, 1)),
        // Nothing was done.
        (|| fail(CallError::not_processed("busy")), (0, 0)),
    ];
    for (step, reported) in ends {
        let lab = Lab::new();
        lab.write(step());
        let store = Store::new(&lab.log).shut("settle");
        let layer = WriteSafetyLayer::refuse().ledger(store.clone());
        let mut call = Box::pin(service(&lab, layer).oneshot(write()));
        assert!(poll_once(&mut call));
        assert_eq!(lab.writes(), 1);
        assert_eq!(lab.events.all(), [], "it is told when it is recorded");
        drop(call);
        assert_eq!((lab.events.abandoned(), lab.events.doubts()), reported, "{:?}", lab.events.all());
        if let (1, 0) = reported {
            assert_eq!(lab.events.raw()[0]["outcome"], "answered");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_was_replayed_and_whose_caller_goes_away_while_its_answer_is_recorded_is_no_success() {
    let lab = Lab::new();
    lab.write(fail(unavailable())).write(answer(1));
    let trusting = Safety::refuse().trust(goaround::Evidence::Unavailable);
    let layer = trusting.ledger(Store::new(&lab.log).shut("settle"));
    let mut call = Box::pin(service(&lab, layer).oneshot(write()));
    for _ in 0..10 {
        assert!(poll_once(&mut call));
    }
    assert_eq!((lab.writes(), lab.events.all()), (2, vec![]));
    drop(call);
    assert_eq!(lab.events.all(), [Seen::Abandoned { attempts: 2 }]);
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_caller_was_told_before_its_end_was_recorded_is_not_reported_besides() {
    let lab = Lab::new();
    lab.write(answer(1));
    let layer = WriteSafetyLayer::refuse().ledger(Store::new(&lab.log).shut("settle"));
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 1);
    assert_eq!(lab.events.all(), []);
}

// ===== Destructors and futures that panic =====

/// The answer of a connection, and a panic when the future goes.
struct Explosive(Answer);

impl Future for Explosive {
    type Output = Result<Res, CallError>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        self.0.as_mut().poll(cx)
    }
}

impl Drop for Explosive {
    fn drop(&mut self) {
        panic!("a foreign destructor");
    }
}

fn explosive(step: Step) -> Step {
    Box::new(move |request| Box::pin(Explosive(step(request))))
}

#[tokio::test(start_paused = true)]
async fn an_attempt_whose_destructor_panics_ends_as_what_is_known_of_it() {
    let landed = |doubt: Doubt| async move { Ok(doubt.landed(7)) };
    let absent = |doubt: Doubt| async move { Ok(doubt.not_landed_because("tested")) };
    let in_doubt = |reason: &str| State::InDoubt { reason: reason.to_owned() };
    let by_check = State::Landed { by: "check".into() };
    let refuse = WriteSafetyLayer::refuse;
    let cases: [(Step, Safety, Option<Res>, State, usize); 6] = [
        (answer(1), refuse(), Some(1), State::Answered, 0),
        (fail(CallError::ambiguous("lost")), refuse(), None, in_doubt("no effect check"), 1),
        // Given up at the deadline.
        (hang(), refuse(), None, in_doubt("no effect check"), 1),
        (fail(closed()), Safety::new(landed), Some(7), by_check.clone(), 1),
        (hang(), Safety::new(landed).attempt_timeout(SECOND), Some(7), by_check, 1),
        // Gives way to its replay.
        (hang(), Safety::new(absent).attempt_timeout(SECOND), Some(2), State::Answered, 1),
    ];
    for (nth, (step, layer, response, state, doubts)) in cases.into_iter().enumerate() {
        let lab = Lab::new();
        lab.write(explosive(step)).write(explosive(answer(2)));
        let store = Store::new(&lab.log);
        let result = service(&lab, layer.ledger(store.clone())).oneshot(write()).await;
        assert_eq!(result.as_ref().ok(), response.as_ref(), "{nth}: {result:?}");
        assert!(result.is_ok() || result.unwrap_err().outcome() == Outcome::Unknown);
        assert_eq!((store.state(), lab.events.doubts()), (state, doubts), "{nth}");
        assert_eq!(lab.events.abandoned(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_whose_destructor_panics_when_its_caller_goes_away_is_reported() {
    let lab = Lab::new();
    lab.write(explosive(hang()));
    let safety = WriteSafetyLayer::refuse().on_event(lab.events.sink()).layer(lab.connection());
    let ledger = safety.ledger();
    let mut call = Box::pin(safety.oneshot(write()));
    assert!(poll_once(&mut call));
    drop(call);
    assert_eq!((lab.events.abandoned(), ledger.in_doubt().await.unwrap().len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_check_whose_destructor_panics_is_no_verdict() {
    for ends in [false, true] {
        let lab = Lab::new();
        lab.write(fail(closed()));
        let check = move |doubt: Doubt| async move {
            let _explosive = Explosive(Box::pin(ready(Ok(1))));
            if !ends {
                pending::<()>().await;
            }
            Ok(doubt.not_landed_because("tested"))
        };
        let error = service(&lab, Safety::new(check)).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), lab.events.doubts(), lab.writes()), (Outcome::Unknown, 1, 1), "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_that_is_given_up_harms_nobody_by_its_destructor() {
    // The attempt's own answer comes first.
    let lab = Lab::new();
    lab.write(later(3 * SECOND, Ok(1)));
    let check = |_: Doubt| async {
        let _explosive = Explosive(Box::pin(ready(Ok(1))));
        pending::<Checked>().await
    };
    let layer = Safety::new(check).attempt_timeout(SECOND);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 1);
    assert_eq!((lab.events.doubts(), lab.events.abandoned()), (1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_future_of_a_processes_end_that_panics_is_no_fence_and_no_panic() {
    let exits = || closed().with_exit(async { panic!("the connector's own") }).exit_ends_effects();
    let check = |doubt: Doubt| async move { Ok(doubt.not_landed()) };
    let checked = Safety::new(check);
    let unchecked = Safety::new(check).replay_idempotent().quarantine(SECOND);
    let cases = [
        (checked, Effect::Write, (Outcome::Unknown, 1)),
        // By what the caller declared of the server's time.
        (unchecked, Effect::Idempotent, (Outcome::NotDone, 2)),
    ];
    for (layer, effect, ends) in cases {
        let lab = Lab::new();
        for _ in 0..2 {
            lab.write(Box::new(move |_| Box::pin(ready(Err(exits())))));
        }
        let call = Tagged::new("pay", effect);
        let error = service(&lab, layer).oneshot(call).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), ends, "{error}");
    }
    // A check can find it all the same.
    let lab = Lab::new();
    lab.write(Box::new(move |_| Box::pin(ready(Err(exits())))));
    let layer = Safety::new(|doubt: Doubt| async move { Ok(doubt.landed(7)) });
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 7);
}

// ===== Conflict keys =====

fn to(account: &'static str) -> Req {
    Tagged::new(account, Effect::Write).named("pay")
}

fn by_account(layer: Safety) -> Safety {
    layer.conflict_key(|request: &Req| Some(**request).filter(|account| *account != "any"))
}

/// W1 to the first account is lost; while its check runs, W2 to the second one lands.
async fn overtaken(
    layer: impl FnOnce(&Lab) -> Safety,
    w1: &'static str,
    w2: &'static str,
) -> (Lab, Result<Res, CallError>) {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).write(answer(1));
    let service = service(&lab, layer(&lab));
    let first = tokio::spawn(service.clone().oneshot(to(w1)));
    tokio::time::sleep(SECOND / 2).await;
    let second = service.clone().oneshot(to(w2)).await;
    if w1 == w2 && second.is_err() {
        assert_eq!(lab.writes(), 1);
    } else {
        assert_eq!(second.unwrap(), 2);
    }
    (lab, first.await.unwrap())
}

#[tokio::test(start_paused = true)]
async fn h21_a_lost_write_is_not_replayed_over_a_later_one() {
    // Without keys: over none.
    let (lab, first) = overtaken(absent, "a", "b").await;
    assert_eq!((first.unwrap_err().outcome(), lab.writes()), (Outcome::NotDone, 2));
    let (lab, first) = overtaken(|lab| absent(lab).independent_writes(), "a", "b").await;
    assert_eq!((first.unwrap(), lab.writes()), (1, 3));

    // With keys: over none that touches it.
    let keyed = |lab: &Lab| by_account(absent(lab));
    let (lab, first) = overtaken(keyed, "a", "b").await;
    assert_eq!((first.unwrap(), lab.writes()), (1, 3));
    for (w1, w2) in [("a", "any"), ("any", "a"), ("any", "any")] {
        let (lab, first) = overtaken(keyed, w1, w2).await;
        let error = first.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 2), "{w1} {w2}");
        assert!(error.to_string().contains("another write was handed over"), "{error}");
    }
    // The same key is in doubt meanwhile, so that the later one is not even sent.
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(1));
    let service = service(&lab, keyed(&lab));
    let first = tokio::spawn(service.clone().oneshot(to("a")));
    tokio::time::sleep(SECOND / 2).await;
    let error = service.clone().oneshot(to("a")).await.unwrap_err();
    assert!(matches!(refusal(&error), Refusal::KeyInDoubt(_)));
    assert_eq!((error.outcome(), first.await.unwrap().unwrap(), lab.writes()), (Outcome::NotDone, 1, 2));
}

#[tokio::test(start_paused = true)]
async fn h21_two_writes_with_one_key_at_once_and_the_lost_one_is_not_replayed_over_the_other() {
    let lab = Lab::new();
    lab.write(later(SECOND, Err(closed()))).write(later(2 * SECOND, Ok(2)));
    let service = service(&lab, by_account(absent(&lab)));
    let first = tokio::spawn(service.clone().oneshot(to("a")));
    tokio::time::sleep(SECOND / 2).await;
    let second = tokio::spawn(service.clone().oneshot(to("a")));
    let error = first.await.unwrap().unwrap_err();
    assert_eq!((error.outcome(), second.await.unwrap().unwrap(), lab.writes()), (Outcome::NotDone, 2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_key_in_doubt_turns_later_writes_away_with_that_doubt_until_it_is_settled() {
    for shared in [false, true] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2)).write(answer(3));
        let (memory, store) = (MemoryLedger::new(), Store::new(&lab.log));
        let layer = by_account(WriteSafetyLayer::refuse());
        let layer = if shared { layer.ledger(store.clone()) } else { layer.ledger(memory.clone()) };
        let service = service(&lab, layer);
        let lost = service.clone().oneshot(to("a")).await.unwrap_err();
        assert_eq!(lost.outcome(), Outcome::Unknown);
        let entry = match shared {
            true => store.in_doubt().await.unwrap().remove(0),
            false => memory.in_doubt().await.unwrap().remove(0),
        };
        assert_eq!(entry.key.as_deref(), Some("a"));

        let error = service.clone().oneshot(to("a")).await.unwrap_err();
        assert_eq!(
            (error.outcome(), refusal(&error).clone()),
            (Outcome::NotDone, Refusal::KeyInDoubt(entry.id))
        );
        assert!(matches!(
            error.get_ref::<LedgerError>(),
            Some(LedgerError::KeyInDoubt { id, method }) if *id == entry.id && method == "pay"
        ));
        assert_eq!(service.clone().oneshot(to("b")).await.unwrap(), 2);
        match shared {
            true => store.forget(entry.id, "jane").await.unwrap(),
            false => memory.forget(entry.id, "jane").await.unwrap(),
        }
        assert_eq!(service.clone().oneshot(to("a")).await.unwrap(), 3);
    }
}

// ===== Idempotent writes =====

#[tokio::test(start_paused = true)]
async fn an_idempotent_write_is_replayed_once_without_a_check_if_that_is_declared() {
    let idempotent = || Tagged::new("w", Effect::Idempotent).named("put");
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let layer = WriteSafetyLayer::refuse().replay_idempotent();
    assert_eq!(service(&lab, layer.clone()).oneshot(idempotent()).await.unwrap(), 2);
    let doubt = Seen::InDoubt { verdict: None, reason: None, replayed: true, outcome: None };
    assert_eq!(lab.events.all(), [doubt, Seen::Call { attempts: 2, outcome: None }]);

    // Once, and not one that may do more than the same again.
    for (request, writes) in [(idempotent(), 2), (write(), 1)] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(fail(closed()));
        let error = service(&lab, layer.clone()).oneshot(request).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, writes));
    }
    let lab = Lab::new();
    lab.write(fail(closed()));
    let error = service(&lab, WriteSafetyLayer::refuse()).oneshot(idempotent()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));

    // A slow one, once its bytes are out.
    let lab = Lab::new();
    lab.write(marked(3 * SECOND, 3600 * SECOND, Ok(1))).write(answer(2));
    assert_eq!(service(&lab, layer.clone().attempt_timeout(SECOND)).oneshot(idempotent()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "3000 write"]);

    // Not one whose call ended alone while bytes of it are still to be sent.
    let lab = Lab::new();
    lab.write(marked(3 * SECOND, SECOND, Err(CallError::ambiguous("reset")))).write(answer(2));
    let error = service(&lab, layer.clone()).oneshot(idempotent()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));

    // Not over another write.
    let lab = Lab::new();
    lab.write(hang()).write(answer(2));
    let service = service(&lab, layer.attempt_timeout(SECOND));
    let first = tokio::spawn(service.clone().oneshot(idempotent()));
    tokio::time::sleep(SECOND / 2).await;
    assert_eq!(service.clone().oneshot(idempotent()).await.unwrap(), 2);
    let error = first.await.unwrap().unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 2));
}

// ===== Idempotency keys =====

/// A server that keeps keys: what it does with the n-th request, and the keys it saw.
#[derive(Clone, Default)]
struct Keeper {
    keys: Arc<Mutex<Vec<Value>>>,
    answers: Arc<Mutex<Vec<Result<Value, CallError>>>>,
}

impl Keeper {
    fn new(answers: impl IntoIterator<Item = Result<Value, CallError>>) -> Self {
        let mut answers: Vec<_> = answers.into_iter().collect();
        answers.reverse();
        Self { keys: Arc::default(), answers: Arc::new(Mutex::new(answers)) }
    }

    fn service(
        &self,
        layer: WriteSafetyLayer<Request, Response>,
    ) -> impl Service<Request, Response = Response, Error = CallError, Future: Send> + Clone + Send + 'static
    {
        let keeper = self.clone();
        let server = service_fn(move |request: Request| {
            let params: Value = request.params().unwrap();
            keeper.keys.lock().unwrap().push(params["arguments"]["key"].clone());
            let answer = keeper.answers.lock().unwrap().pop().expect("a request that nobody expected");
            async move { answer.map(|answer| Response::new(answer).unwrap()) }
        });
        ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(server)
    }

    fn keys(&self) -> Vec<Value> {
        self.keys.lock().unwrap().clone()
    }
}

fn payment() -> Request {
    Request::new("tools/call", json!({ "name": "pay", "arguments": { "amount": 7 } })).unwrap()
}

fn with_key() -> KeyedWrites<Request, Response> {
    KeyedWrites::argument("/key").honoured_for(3600 * SECOND)
}

fn refuse() -> WriteSafetyLayer<Request, Response> {
    WriteSafetyLayer::refuse()
}

fn server_error(code: i64) -> CallError {
    let error: goaround::ServerError =
        serde_json::from_value(json!({ "code": code, "message": "m" })).unwrap();
    CallError::answered(error)
}

#[tokio::test(start_paused = true)]
async fn h18_a_key_is_the_same_over_the_attempts_of_a_call_and_another_for_each_call() {
    let keeper = Keeper::new([Err(closed()), Ok(json!("done")), Ok(json!("done"))]);
    let service = keeper.service(refuse().keyed(with_key()));
    for _ in 0..2 {
        let answer: String = service.clone().oneshot(payment()).await.unwrap().parse().unwrap();
        assert_eq!(answer, "done");
    }
    let keys = keeper.keys();
    assert_eq!(keys.len(), 3);
    assert_eq!(keys[0], keys[1]);
    assert_ne!(keys[1], keys[2]);
    let id: EntryId = keys[0].as_str().unwrap().parse().unwrap();
    assert!(id.is_own());
}

#[tokio::test(start_paused = true)]
async fn h19_a_key_is_no_reason_for_a_replay_where_nobody_declared_that_it_is_kept() {
    let own = Request::new("tools/call", json!({ "arguments": { "key": "mine" } })).unwrap();
    for (layer, request) in [
        (refuse().keyed(KeyedWrites::argument("/key")), payment()),
        (refuse().keyed(with_key()), own),
        (refuse().keyed(with_key()), Request::new("doc/put", json!({})).unwrap()),
        (refuse(), payment()),
    ] {
        let keeper = Keeper::new([Err(closed())]);
        let error = keeper.service(layer).oneshot(request).await.unwrap_err();
        assert_eq!((error.outcome(), keeper.keys().len()), (Outcome::Unknown, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn h09_a_key_whose_time_is_over_by_either_clock_is_no_reason_for_a_replay() {
    /// How far each clock goes while the server holds the call, and whether it is replayed.
    const CASES: [(u64, i64, bool); 6] = [
        (10, 10, true),
        (20, 20, false),
        // The machine slept: the monotonic clock stood still.
        (1, 20, false),
        // The wall clock was set forward, or back.
        (1, 3600, false),
        (1, -1, false),
        // It was set back by less than what had passed: the other clock counts.
        (20, 1, false),
    ];
    for (monotonic, wall, replayed) in CASES {
        let clock = Arc::new(AtomicU64::new(1_000_000));
        let now = Arc::clone(&clock);
        let layer = refuse()
            .keyed(KeyedWrites::argument("/key").honoured_for(20 * SECOND))
            .wall_clock(move || SystemTime::UNIX_EPOCH + Duration::from_secs(now.load(Ordering::Relaxed)));
        let attempts = Arc::new(AtomicU32::new(0));
        let server = service_fn({
            let (attempts, clock) = (Arc::clone(&attempts), Arc::clone(&clock));
            move |_: Request| {
                let first = attempts.fetch_add(1, Ordering::Relaxed) == 0;
                let clock = Arc::clone(&clock);
                async move {
                    if !first {
                        return Ok(Response::new(1).unwrap());
                    }
                    tokio::time::sleep(Duration::from_secs(monotonic)).await;
                    clock.fetch_add(wall as u64, Ordering::Relaxed);
                    Err(closed())
                }
            }
        });
        let result = layer.layer(server).oneshot(payment()).await;
        assert_eq!(result.is_ok(), replayed, "{monotonic} {wall}");
        assert_eq!(attempts.load(Ordering::Relaxed), 1 + u32::from(replayed), "{monotonic} {wall}");
    }
}

#[tokio::test(start_paused = true)]
async fn h10_an_answer_to_our_own_key_is_read_by_the_callers_mapping() {
    let mapped = || {
        with_key().answers(|answer: Result<&Response, &CallError>| {
            let error: &goaround::ServerError = answer.err()?.get_ref()?;
            match error.code {
                409 => Some(KeyedAnswer::Landed(None)),
                410 => Some(KeyedAnswer::Landed(Some(Response::new("its result").unwrap()))),
                425 => Some(KeyedAnswer::InFlight { recheck_after: 5 * SECOND }),
                _ => None,
            }
        })
    };
    // "Already exists": it landed, and its result is lost, or is in the answer.
    let keeper = Keeper::new([Err(closed()), Err(server_error(409))]);
    let error = keeper.service(refuse().keyed(mapped())).oneshot(payment()).await.unwrap_err();
    assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::DoneResultLost, true));
    let keeper = Keeper::new([Err(closed()), Err(server_error(410))]);
    let answer = keeper.service(refuse().keyed(mapped())).oneshot(payment()).await.unwrap();
    assert_eq!(answer.raw().get(), r#""its result""#);

    // "In progress": the check is asked later; without one it is unknown, and not sent a third time.
    let keeper = Keeper::new([Err(closed()), Err(server_error(425))]);
    let error = keeper.service(refuse().keyed(mapped())).oneshot(payment()).await.unwrap_err();
    assert_eq!((error.outcome(), keeper.keys().len()), (Outcome::Unknown, 2));
    let start = tokio::time::Instant::now();
    let keeper = Keeper::new([Err(closed()), Err(server_error(425))]);
    let found = |doubt: InDoubt<Request, Response>| async move {
        Ok::<_, BoxError>(doubt.landed(Response::new("found").unwrap()))
    };
    let layer = WriteSafetyLayer::new(found).keyed(mapped());
    let answer = keeper.service(layer).oneshot(payment()).await.unwrap();
    assert_eq!((answer.raw().get(), start.elapsed()), (r#""found""#, 5 * SECOND));

    // Without a mapping the answer stands, and says that our own first attempt may be the reason.
    let keeper = Keeper::new([Err(closed()), Err(server_error(409))]);
    let error = keeper.service(refuse().keyed(with_key())).oneshot(payment()).await.unwrap_err();
    assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Answered, true));
    assert!(!error.is_safe_to_repeat());
}

#[tokio::test(start_paused = true)]
async fn landed_with_makes_the_response_of_a_write_that_its_key_says_has_landed() {
    let lab = Lab::new();
    lab.write(fail(CallError::answered("already exists")));
    // No window, so that nothing is ever replayed.
    let keyed = KeyedWrites::new(|_: &mut Req, _: &str| true)
        .answers(|_: Result<&Res, &CallError>| Some(KeyedAnswer::Landed(None)));
    let layer = Safety::refuse().keyed(keyed).landed_with(|_: &Req| 7);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 7);
    assert_eq!(lab.writes(), 1);
}

// ===== Declared fences =====

#[tokio::test(start_paused = true)]
async fn each_fence_says_in_the_event_what_it_is_and_who_says_so() {
    type Says = fn(&Doubt) -> Verdict<Res>;
    let fences: [(Says, Value); 4] = [
        (
            |doubt| doubt.not_landed_deduplicated(SECOND),
            json!({ "fence": "deduplicated", "window": { "secs": 1, "nanos": 0 }, "basis": "declared" }),
        ),
        (|doubt| doubt.not_landed_conditional(), json!({ "fence": "conditional", "basis": "declared" })),
        (|doubt| doubt.not_landed_terminal_task(), json!({ "fence": "terminal_task", "basis": "declared" })),
        (
            |doubt| doubt.not_landed_because("why"),
            json!({ "fence": "because", "why": "why", "basis": "declared" }),
        ),
    ];
    for (says, expected) in fences {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2));
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| async move { Ok(says(&doubt)) });
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        let doubt = &lab.events.raw()[0];
        assert_eq!(doubt["fence"], expected);
        assert_eq!(doubt["attempts"][0]["settled"], json!({ "not_landed": expected }));
    }
}

#[tokio::test(start_paused = true)]
async fn h09_a_check_cannot_name_a_key_whose_time_is_over() {
    let lab = Lab::new();
    lab.write(later(SECOND, Err(closed())));
    let layer =
        WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.not_landed_deduplicated(SECOND)) });
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
    assert!(error.to_string().contains("the time is over"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn h05_what_was_found_in_part_is_asked_for_again_and_never_replayed() {
    type Says = fn(&Doubt, u32) -> Verdict<Res>;
    let ends: [(Says, Outcome, usize); 3] = [
        (|doubt, _| doubt.partial(), Outcome::Unknown, 5),
        // It was undone, perhaps by somebody else: not for us to do again.
        (
            |doubt, n| if n == 0 { doubt.partial() } else { doubt.not_landed_because("gone") },
            Outcome::Unknown,
            2,
        ),
        (
            |doubt, n| if n == 0 { doubt.partial() } else { doubt.landed_without_result() },
            Outcome::DoneResultLost,
            2,
        ),
    ];
    for (says, outcome, checks) in ends {
        let lab = Lab::new();
        lab.write(fail(closed()));
        let (log, asked) = (lab.log.clone(), Arc::new(AtomicU32::new(0)));
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            log.note("check");
            let asked = asked.fetch_add(1, Ordering::Relaxed);
            async move { Ok(says(&doubt, asked)) }
        });
        let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes(), lab.log.count("check")), (outcome, 1, checks));
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_that_always_says_in_flight_is_asked_so_often_and_no_more() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let log = lab.log.clone();
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        log.note("check");
        async move { Ok(doubt.in_flight(SECOND)) }
    });
    let error = service(&lab, layer.max_rechecks(3)).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.log.count("check")), (Outcome::Unknown, 4));
    assert!(error.to_string().contains("after 4 checks"), "{error}");
}

/// A write that is silent and whose connection closes at 8 s; its process outlives its signals, which shows so much
/// later. The check begins at 6 s, when the quarantine is over.
async fn beside_the_old_process(shows_after: Duration, check_takes: Duration, probes: bool) {
    let lab = Lab::new();
    lab.write(later(8 * SECOND, Err(exits(shows_after, false).exit_ends_effects()))).write(answer(1));
    let check = move |doubt: Doubt| async move {
        tokio::time::sleep(check_takes).await;
        if probes {
            doubt.probe(read()).await?;
        }
        Ok(doubt.not_landed())
    };
    let layer = Safety::new(check).attempt_timeout(SECOND).quarantine(5 * SECOND).check_timeout(30 * SECOND);
    let stack = Stack::builder(lab.connector()).writes(layer).on_event(lab.events.sink()).build().unwrap();
    let ledger = stack.ledger();
    let error = stack.send(write()).await.unwrap_err();
    assert_eq!(lab.writes(), 1, "replayed beside it: {:?}", lab.log.timed());
    assert_eq!((error.outcome(), lab.events.doubts()), (Outcome::Unknown, 1), "{error}");
    assert_eq!(ledger.in_doubt().await.unwrap().len(), 1);
    assert!(error.to_string().contains("still there"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn no_quarantine_holds_if_the_old_process_is_found_to_be_there_while_the_check_runs() {
    beside_the_old_process(Duration::ZERO, 5 * SECOND, true).await;
    beside_the_old_process(Duration::ZERO, 5 * SECOND, false).await;
}

#[tokio::test(start_paused = true)]
async fn no_replay_goes_out_if_the_old_process_is_found_to_be_there_while_it_waits_for_its_connection() {
    beside_the_old_process(3 * SECOND, 5 * SECOND / 2, false).await;
    // While the check and its verdict came before the closure.
    beside_the_old_process(SECOND, 2 * SECOND, false).await;
}

#[tokio::test(start_paused = true)]
async fn what_is_known_of_the_old_process_while_the_ledger_grants_the_replay_keeps_the_write_unknown() {
    let lab = Lab::new();
    let store = Store::new(&lab.log).shut("claim");
    // The check has said "absent" at 8.5 s, and at 11 s it shows that the process is still there.
    lab.write(later(8 * SECOND, Err(exits(3 * SECOND, false).exit_ends_effects()))).write(answer(1));
    let check = |doubt: Doubt| async move {
        tokio::time::sleep(5 * SECOND / 2).await;
        Ok(doubt.not_landed())
    };
    let layer = Safety::new(check).attempt_timeout(SECOND).quarantine(5 * SECOND).check_timeout(30 * SECOND);
    let stack = Stack::builder(lab.connector())
        .writes(layer.ledger(store.clone()))
        .on_event(lab.events.sink())
        .build()
        .unwrap();
    let opens = async {
        tokio::time::sleep(12 * SECOND).await;
        store.gates["claim"].add_permits(100);
    };
    let (result, ()) = tokio::join!(stack.send(write()), opens);
    let error = result.unwrap_err();
    assert_eq!(lab.writes(), 1, "replayed beside it: {:?}", lab.log.timed());
    assert_eq!((error.outcome(), lab.events.doubts()), (Outcome::Unknown, 1), "{error}");
    assert!(!error.is_safe_to_repeat() && error.to_string().contains("still there"), "{error}");
    assert!(matches!(store.state(), State::InDoubt { .. }));
}

// ===== Resolving =====

fn lost(store: &Store, entered: SystemTime) -> Entry {
    let mut entry: Entry = serde_json::from_value(json!({
        "id": format!("{:032x}-3-4", 7), "method": "pay", "effect": "write", "entered_ms": 0,
        "changed_ms": 0, "attempts": 1, "state": "open", "revision": 1, "stack": 1,
    }))
    .unwrap();
    entry.entered = entered;
    store.table.lock().unwrap().insert(entry.id, entry.clone());
    entry
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_process_left_is_settled_by_fence_and_check() {
    let says = |verdict: fn(&Doubt) -> Verdict<Res>| {
        move |doubt: Doubt| async move {
            doubt.probe(read()).await?;
            Ok::<_, BoxError>(verdict(&doubt))
        }
    };
    let lab = Lab::new();
    let store = Store::new(&lab.log);
    let entry = lost(&store, SystemTime::now());
    // Without a fence it can only have landed.
    let resolve = || Resolve::new(&store, &entry, write()).on_event(lab.events.sink());
    let resolved = resolve().run_over(says(|doubt| doubt.not_landed()), lab.connection()).await.unwrap();
    let State::InDoubt { reason } = &resolved.state else { panic!("{resolved:?}") };
    assert!(reason.contains("quarantine(..)"), "{reason}");
    assert_eq!(store.in_doubt().await.unwrap().len(), 1);
    // A stale one does not count.
    let stale = resolve().run_over(says(|doubt| doubt.not_landed()), lab.connection()).await;
    assert!(matches!(stale, Err(LedgerError::Conflict(_))));

    let mut entry = store.in_doubt().await.unwrap().remove(0);
    let start = tokio::time::Instant::now();
    entry.orphaned = Some(start);
    let resolve = Resolve::new(&store, &entry, write()).quarantine(20 * SECOND).on_event(lab.events.sink());
    let resolved = resolve.run_over(says(|doubt| doubt.not_landed()), lab.connection()).await.unwrap();
    assert_eq!((resolved.verdict, start.elapsed()), (VerdictKind::NotLanded, 20 * SECOND));
    assert_eq!(
        store.state(),
        State::NotLanded { why: "declared: quarantine of 20s".into(), basis: goaround::FenceBasis::Declared }
    );
    assert_eq!((lab.events.doubts(), lab.writes()), (2, 0));
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_counts_from_when_the_owner_was_known_to_be_gone() {
    let lab = Lab::new();
    let store = Store::new(&lab.log);
    let mut entry = lost(&store, SystemTime::now());
    entry.orphaned = Some(tokio::time::Instant::now());
    tokio::time::sleep(15 * SECOND).await;
    let start = tokio::time::Instant::now();
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed()) };
    let resolve = Resolve::new(&store, &entry, write()).quarantine(20 * SECOND);
    let resolved = resolve.run_over(check, lab.connection()).await.unwrap();
    assert_eq!((resolved.verdict, start.elapsed()), (VerdictKind::NotLanded, 5 * SECOND));

    // Of this one it is not known, as where the owner itself has said that it is in doubt.
    let store = Store::new(&lab.log);
    let entry = lost(&store, SystemTime::now());
    let resolve = Resolve::new(&store, &entry, write()).quarantine(20 * SECOND);
    let resolved = resolve.run_over(check, lab.connection()).await.unwrap();
    assert_eq!(resolved.verdict, VerdictKind::Unknown);
}

#[tokio::test(start_paused = true)]
async fn what_a_dead_process_entered_before_it_had_started_any_server_was_not_sent() {
    let lab = Lab::new();
    let check = |doubt: Doubt| async move {
        doubt.probe(read()).await?;
        Ok::<_, BoxError>(doubt.not_landed())
    };
    let gone = Some(tokio::time::Instant::now());
    for (orphaned, servers_entered, verdict) in [
        (gone, true, VerdictKind::NotLanded),
        // Its owner may be about to start one; the connector is one that nobody enters servers for.
        (None, true, VerdictKind::Unknown),
        (gone, false, VerdictKind::Unknown),
    ] {
        let store = Store::new(&lab.log);
        let mut entry = lost(&store, SystemTime::now());
        (entry.orphaned, entry.servers_entered) = (orphaned, servers_entered);
        assert_eq!(entry.was_never_sent(), verdict == VerdictKind::NotLanded);
        let resolved = Resolve::new(&store, &entry, write()).run_over(check, lab.connection()).await.unwrap();
        assert_eq!(resolved.verdict, verdict);
        if let State::NotLanded { why, basis } = resolved.state {
            assert_eq!(why, "observed: nothing was sent, no server had been started");
            assert_eq!(basis, goaround::FenceBasis::Observed);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_server_that_cannot_be_seen_from_here_is_not_waited_for() {
    let lab = Lab::new();
    let store = Store::new(&lab.log);
    let mut entry = lost(&store, SystemTime::now());
    // Of a boot that nothing is known of.
    let server = json!({ "pid": 1, "started": 1, "stack": 1, "exit_ends_effects": true });
    entry.servers = vec![serde_json::from_value(server).unwrap()];
    let start = tokio::time::Instant::now();
    assert!(!servers_gone(std::slice::from_ref(&entry), 60 * SECOND).await);
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed()) };
    let resolved = Resolve::new(&store, &entry, write()).run_over(check, lab.connection()).await.unwrap();
    let State::InDoubt { reason } = &resolved.state else { panic!("{resolved:?}") };
    assert!(reason.contains("cannot be seen from here"), "{reason}");
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert!(servers_gone(&[], 60 * SECOND).await);
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_only_the_wall_clock_counts_and_one_that_was_set_back_is_unknown() {
    let lab = Lab::new();
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed_deduplicated(60 * SECOND)) };
    for (passed, verdict) in
        [(30, VerdictKind::NotLanded), (60, VerdictKind::Unknown), (-5_i64, VerdictKind::Unknown)]
    {
        let store = Store::new(&lab.log);
        let entered = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
        let entry = lost(&store, entered);
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs((1_000_000 + passed) as u64);
        let resolve = Resolve::new(&store, &entry, write()).wall_clock(move || now);
        let resolved = resolve.run_over(check, lab.connection()).await.unwrap();
        assert_eq!(resolved.verdict, verdict, "{passed}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_of_what_was_left_open_may_only_read_and_a_stack_says_what_that_is() {
    let lab = Lab::new();
    let store = Store::new(&lab.log);
    let entry = lost(&store, SystemTime::now());
    let stack = Stack::builder(lab.connector())
        .classify(|request: &Req| (**request == "look").then_some(Effect::ReadOnly))
        .build()
        .unwrap();
    let check = |doubt: Doubt| async move {
        let refused = doubt.probe(write()).await.unwrap_err();
        assert_eq!(*refusal(&refused), Refusal::NotAProbe);
        // Tagged as a write, and to this stack a read.
        let found = doubt.probe(Tagged::new("look", Effect::Write)).await?;
        Ok::<_, BoxError>(doubt.landed(found + 1))
    };
    let resolved = Resolve::new(&store, &entry, write()).run(check, &stack).await.unwrap();
    assert_eq!((resolved.response, lab.reads(), lab.writes()), (Some(1), 1, 0));
    assert_eq!(store.state(), State::Landed { by: "check".into() });
}

#[tokio::test(start_paused = true)]
async fn a_stack_gives_its_ledger_away() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let stack = Stack::builder(lab.connector()).build().unwrap();
    stack.send(write()).await.unwrap_err();
    let entries = stack.ledger().in_doubt().await.unwrap();
    assert_eq!(entries.len(), 1);
    stack.ledger().forget(entries[0].id, "jane").await.unwrap();
    assert!(stack.clone().ledger().in_doubt().await.unwrap().is_empty());
}

#[tokio::test(start_paused = true)]
async fn arguments_are_in_the_ledger_only_if_the_caller_keeps_them() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let ledger = MemoryLedger::new();
    let layer = WriteSafetyLayer::refuse().ledger(ledger.clone());
    let layer = layer.keep_arguments(|request: &Req| Some(format!("to {}", **request)));
    service(&lab, layer).oneshot(to("a")).await.unwrap_err();
    assert_eq!(ledger.in_doubt().await.unwrap()[0].arguments.as_deref(), Some("to a"));
}

#[tokio::test(start_paused = true)]
async fn an_entry_in_a_log_shows_neither_its_arguments_nor_its_key() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let ledger = MemoryLedger::new();
    let layer = WriteSafetyLayer::refuse().ledger(ledger.clone());
    let layer = layer.keep_arguments(|_: &Req| Some("token=hunter2".into()));
    let layer = layer.conflict_key(|request: &Req| Some(format!("secret {}", **request)));
    service(&lab, layer).oneshot(to("a")).await.unwrap_err();
    let entry = &ledger.in_doubt().await.unwrap()[0];
    let log = format!("{entry:?}");
    assert!(log.contains("key: Some(8 bytes), arguments: Some(13 bytes)"), "{log}");
    assert!(!log.contains("hunter2") && !log.contains("secret"), "{log}");
    // What is stored has them.
    let stored = serde_json::to_string(entry).unwrap();
    assert!(stored.contains("token=hunter2") && stored.contains("secret a"), "{stored}");
}

#[tokio::test(start_paused = true)]
async fn a_doubt_that_the_ledger_could_not_record_keeps_its_key_all_the_same() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let store = Store::new(&lab.log).fails("settle");
    let service = service(&lab, by_account(WriteSafetyLayer::refuse()).ledger(store.clone()));
    assert_eq!(service.clone().oneshot(to("a")).await.unwrap_err().outcome(), Outcome::Unknown);
    // The hint has reached the store, which takes it back, as one does that was out of reach.
    let id = store.entries()[0].id;
    store.table.lock().unwrap().get_mut(&id).unwrap().state = State::Open;
    store.table.lock().unwrap().get_mut(&id).unwrap().revision = 1;
    let error = service.clone().oneshot(to("a")).await.unwrap_err();
    assert_eq!((refusal(&error).clone(), lab.writes()), (Refusal::KeyInDoubt(id), 1));
    // Once it works again it is told first, and says the same.
    store.fails.lock().unwrap().clear();
    let error = service.clone().oneshot(to("a")).await.unwrap_err();
    assert_eq!((refusal(&error).clone(), lab.writes()), (Refusal::KeyInDoubt(id), 1));
    assert!(matches!(store.state(), State::InDoubt { .. }));
    store.forget(id, "jane").await.unwrap();
    assert_eq!(service.clone().oneshot(to("a")).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn doubts_that_the_ledger_could_not_record_are_so_by_later_writes_with_whatever_key() {
    let lab = Lab::new();
    let store = Store::new(&lab.log).fails("settle");
    let service = service(&lab, by_account(WriteSafetyLayer::refuse()).ledger(NoHints(store.clone())));
    for account in ["a", "b", "c"] {
        lab.write(fail(closed()));
        assert_eq!(service.clone().oneshot(to(account)).await.unwrap_err().outcome(), Outcome::Unknown);
    }
    let recorded = || store.entries().iter().filter(|entry| entry.state != State::Open).count();
    // As long as it does not work nobody else is held up by that, nor if it hangs.
    lab.write(answer(1)).write(answer(2));
    assert_eq!(service.clone().oneshot(to("d")).await.unwrap(), 1);
    store.fails.lock().unwrap().clear();
    let shut = store.clone().shut("settle");
    let start = tokio::time::Instant::now();
    assert_eq!(service.clone().oneshot(to("e")).await.unwrap(), 2);
    assert_eq!((recorded(), start.elapsed()), (0, 5 * SECOND), "its own end is waited for");
    shut.gates["settle"].add_permits(100);
    // One for each, besides its own.
    for so_far in 1..=3 {
        lab.write(answer(3));
        assert_eq!(service.clone().oneshot(to("f")).await.unwrap(), 3);
        assert_eq!(recorded(), 2 * so_far);
    }
    lab.write(answer(4));
    let before = lab.log.count("settle");
    assert_eq!(service.clone().oneshot(to("f")).await.unwrap(), 4);
    assert_eq!(lab.log.count("settle") - before, 1, "nothing is left");
    for account in ["a", "b", "c"] {
        let error = service.clone().oneshot(to(account)).await.unwrap_err();
        assert!(matches!(refusal(&error), Refusal::KeyInDoubt(_)), "{error}");
    }
}

/// A ledger that enters all, and is out of reach whenever an end is to be recorded, until it is not.
#[derive(Clone, Default)]
struct OutOfReach {
    is_back: Arc<AtomicBool>,
    recorded: Arc<Mutex<HashSet<EntryId>>>,
}

impl Ledger for OutOfReach {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        Ok(entry.revision)
    }
    async fn settle(&self, id: EntryId, revision: u64, _: State) -> Result<u64, LedgerError> {
        if !self.is_back.load(Ordering::Relaxed) {
            return Err(LedgerError::Unavailable("out of reach".into()));
        }
        self.recorded.lock().unwrap().insert(id);
        Ok(revision + 1)
    }
    async fn claim(&self, id: EntryId, _: u64) -> Result<u64, LedgerError> {
        Err(LedgerError::Conflict(id))
    }
    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        Ok(Vec::new())
    }
    async fn forget(&self, id: EntryId, _: &str) -> Result<(), LedgerError> {
        Err(LedgerError::Conflict(id))
    }
}

#[tokio::test(start_paused = true)]
async fn with_as_many_doubts_as_are_kept_for_a_ledger_out_of_reach_writes_with_a_key_are_refused() {
    const MOST: usize = 10_000;
    type Numbered = Tagged<usize>;
    let handed_over = Arc::new(AtomicUsize::new(0));
    let connection = service_fn({
        let handed_over = Arc::clone(&handed_over);
        move |_: Numbered| {
            handed_over.fetch_add(1, Ordering::Relaxed);
            async { Err::<Res, _>(closed()) }
        }
    });
    let ledger = OutOfReach::default();
    let layer = WriteSafetyLayer::<Numbered, Res>::refuse();
    let layer = layer.conflict_key(|to: &Numbered| Some(to.to_string()).filter(|_| **to != usize::MAX));
    let service = layer.ledger(ledger.clone()).layer(connection);
    let write = |account: usize| service.clone().oneshot(Tagged::new(account, Effect::Write).named("pay"));
    for account in 0..MOST {
        assert_eq!(write(account).await.unwrap_err().outcome(), Outcome::Unknown);
    }
    for account in [MOST, MOST + 1, MOST] {
        let error = write(account).await.unwrap_err();
        assert_eq!((refusal(&error), error.outcome()), (&Refusal::Ledger, Outcome::NotDone));
        let source = std::error::Error::source(&error).unwrap();
        assert!(matches!(source.downcast_ref(), Some(LedgerError::Full(MOST))), "{source}");
    }
    // None of them was forgotten for that.
    for account in [0, MOST / 2, MOST - 1] {
        assert!(matches!(refusal(&write(account).await.unwrap_err()), Refusal::KeyInDoubt(_)));
    }
    assert_eq!(handed_over.load(Ordering::Relaxed), MOST);
    // One without a key has no part in it.
    assert_eq!(write(usize::MAX).await.unwrap_err().outcome(), Outcome::Unknown);
    // Once it is back a write makes room for itself, and records what it finds.
    ledger.is_back.store(true, Ordering::Relaxed);
    assert_eq!(write(MOST).await.unwrap_err().outcome(), Outcome::Unknown);
    for account in 0..MOST {
        let _ = write(MOST + 1 + account).await;
    }
    assert_eq!(handed_over.load(Ordering::Relaxed), 2 * MOST + 2);
    // Those that were kept, and all that came since.
    assert_eq!(ledger.recorded.lock().unwrap().len(), 2 * MOST + 1);
}

#[tokio::test(start_paused = true)]
async fn h05_a_part_that_was_seen_is_not_forgotten_when_the_attempt_ends_between_two_checks() {
    let lab = Lab::new();
    // It ends while the check waits to look again.
    lab.write(later(SECOND + ms(150), Err(closed())));
    let asked = Arc::new(AtomicU32::new(0));
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        let asked = asked.fetch_add(1, Ordering::Relaxed);
        async move { Ok(if asked == 0 { doubt.partial() } else { doubt.not_landed_because("gone") }) }
    });
    let error = service(&lab, layer.attempt_timeout(SECOND)).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
    assert!(error.to_string().contains("applied in part"), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_fence_that_makes_a_second_copy_harmless_says_nothing_of_the_first_where_none_is_answered() {
    type Says = fn(&Doubt) -> Verdict<Res>;
    let says: [Says; 2] =
        [|doubt| doubt.not_landed_deduplicated(3600 * SECOND), |doubt| doubt.not_landed_conditional()];
    for says in says {
        // Another write came in between.
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2));
        let check = move |doubt: Doubt| async move {
            tokio::time::sleep(SECOND).await;
            Ok::<_, BoxError>(says(&doubt))
        };
        let ledger = MemoryLedger::new();
        let service = service(&lab, WriteSafetyLayer::new(check).ledger(ledger.clone()));
        let first = tokio::spawn(service.clone().oneshot(write()));
        tokio::time::sleep(SECOND / 2).await;
        service.clone().oneshot(write()).await.unwrap();
        let error = first.await.unwrap().unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown, "{error}");
        assert_eq!(ledger.in_doubt().await.unwrap().len(), 1);

        // The replay is not sent.
        let lab = Lab::new();
        lab.write(fail(closed())).write(fail(CallError::not_sent("x")));
        let service = self::service(&lab, WriteSafetyLayer::new(check));
        let error = service.oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 2), "{error}");

        // Dropped on its way to the replay.
        let lab = Lab::new();
        lab.write(fail(closed().after(20 * SECOND)));
        let service = self::service(&lab, WriteSafetyLayer::new(check));
        let call = tokio::spawn(service.oneshot(write()));
        tokio::time::sleep(3 * SECOND).await;
        call.abort();
        let _ = call.await;
        assert_eq!(lab.events.abandoned(), 1);

        // After a restart.
        let lab = Lab::new();
        let store = Store::new(&lab.log);
        let entry = lost(&store, SystemTime::now());
        let resolved = Resolve::new(&store, &entry, write()).run_over(check, lab.connection()).await.unwrap();
        assert!(matches!(resolved.state, State::InDoubt { .. }), "{resolved:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_a_layer_in_between_gave_up_while_bytes_were_unsent_is_not_replayed_before_they_are_out()
{
    let lab = Lab::new();
    let log = lab.log.clone();
    lab.write(Box::new(move |request: Req| {
        let activity = request.context().activity().unwrap().clone();
        assert!(activity.adopt());
        // The frame is begun, and finished whatever becomes of its call.
        tokio::spawn(async move {
            tokio::time::sleep(10 * SECOND).await;
            activity.sent();
            log.note("sent");
        });
        Box::pin(std::future::pending())
    }));
    lab.write(answer(2));
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed()) };
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(WriteSafetyLayer::new(check).quarantine(SECOND))
        .map_err(|error: BoxError| CallError::from_boxed(error))
        .layer(tower::timeout::TimeoutLayer::new(SECOND))
        .service(lab.connection());
    assert_eq!(service.oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "10000 sent", "11000 write"]);
}

#[tokio::test(start_paused = true)]
async fn a_key_is_free_only_when_the_last_of_two_writes_in_doubt_is_settled() {
    let lab = Lab::new();
    lab.write(later(2 * SECOND, Ok(1))).write(hang()).write(answer(3));
    let layer = WriteSafetyLayer::new(|_: Doubt| std::future::pending::<Checked>());
    let service = service(&lab, by_account(layer.attempt_timeout(SECOND).check_timeout(50 * SECOND)));
    let first = tokio::spawn(service.clone().oneshot(to("a")));
    let _second = tokio::spawn(service.clone().oneshot(to("a")));
    first.await.unwrap().unwrap();
    let third = service.clone().oneshot(to("a")).await;
    assert!(third.is_err(), "sent while the second is in doubt");
}

#[test]
fn a_key_is_never_free_between_a_doubt_and_its_entry_in_the_ledger() {
    use AtomicBool;

    for round in 0..20 {
        let (sent, checking) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicBool::new(false)));
        let server = service_fn({
            let sent = sent.clone();
            move |_: Req| {
                sent.fetch_add(1, Ordering::SeqCst);
                std::future::ready(Err::<Res, _>(closed()))
            }
        });
        let check = {
            let checking = checking.clone();
            move |doubt: Doubt| {
                checking.store(true, Ordering::SeqCst);
                async move {
                    (0..3).for_each(|_| std::thread::yield_now());
                    Ok::<_, BoxError>(doubt.unknown("x"))
                }
            }
        };
        let service = by_account(WriteSafetyLayer::new(check)).layer(server);
        let first = service.clone();
        let over = Arc::new(AtomicBool::new(false));
        let done = over.clone();
        let one = std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            let _ = runtime.block_on(first.oneshot(to("a")));
            done.store(true, Ordering::SeqCst);
        });
        let mut other = service.clone();
        while !checking.load(Ordering::SeqCst) {}
        while !over.load(Ordering::SeqCst) {
            drop(other.call(to("a")));
        }
        drop(other.call(to("a")));
        one.join().unwrap();
        assert_eq!(sent.load(Ordering::SeqCst), 1, "round {round}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_waits_for_its_ledger_while_its_key_falls_in_doubt_is_not_sent() {
    let lab = Lab::new();
    lab.write(later(SECOND, Err(closed()))).write(answer(3));
    let store = Store::new(&lab.log);
    let layer = WriteSafetyLayer::new(|_: Doubt| std::future::pending::<Checked>());
    let service = service(
        &lab,
        by_account(layer.attempt_timeout(30 * SECOND).check_timeout(50 * SECOND)).ledger(store.clone()),
    );
    let _first = tokio::spawn(service.clone().oneshot(to("a")));
    tokio::time::sleep(SECOND / 2).await;
    let gate = store.gates["enter"].acquire_many(100).await.unwrap();
    let second = tokio::spawn(service.clone().oneshot(to("a")));
    tokio::time::sleep(SECOND).await;
    drop(gate);
    let second = second.await.unwrap();
    assert!(second.is_err(), "sent while the first is in doubt");
    assert!(matches!(refusal(&second.unwrap_err()), Refusal::KeyInDoubt(_)));
    assert!(store.entries().iter().any(|entry| matches!(entry.state, State::NotLanded { .. })));
}

#[tokio::test(start_paused = true)]
async fn a_claim_that_is_under_way_when_it_turns_out_that_nothing_was_sent_is_used_for_the_later_replay() {
    let lab = Lab::new();
    lab.write(later(3 * SECOND, Err(CallError::not_sent("late")))).write(fail(closed())).write(answer(7));
    let store = Store::new(&lab.log).shut("claim");
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed_because("tested")) };
    let layer = WriteSafetyLayer::new(check).attempt_timeout(SECOND).ledger(store.clone());
    let call = tokio::spawn(service(&lab, layer).oneshot(write()));
    tokio::time::sleep(4 * SECOND).await;
    store.gates["claim"].add_permits(100);
    let result = call.await.unwrap();
    assert_eq!(store.state(), State::Answered, "{result:?} {:?}", lab.log.all());
    assert_eq!(result.unwrap(), 7);
}

#[tokio::test(start_paused = true)]
async fn an_abandoned_write_keeps_its_key_though_its_ledger_takes_no_hints() {
    let lab = Lab::new();
    lab.write(hang()).write(answer(2));
    let store = Store::new(&lab.log);
    let service = service(&lab, by_account(Safety::refuse()).ledger(NoHints(store.clone())));
    let mut call = Box::pin(service.clone().oneshot(to("a")));
    for _ in 0..5 {
        assert!(poll_once(&mut call));
        tokio::task::yield_now().await;
    }
    assert_eq!(lab.writes(), 1);
    drop(call);
    assert_eq!(lab.events.abandoned(), 1);
    let result = service.clone().oneshot(to("a")).await;
    assert!(result.is_err(), "sent though the first is in doubt");
    assert_eq!(lab.writes(), 1);
    store.forget(store.entries()[0].id, "jane").await.unwrap();
    assert_eq!(service.clone().oneshot(to("a")).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_claim_hung_until_its_deadline_keeps_its_key_whether_or_not_the_claim_was_taken() {
    for taken in [false, true] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2));
        let store = Store::new(&lab.log).shut("claim");
        let layer = by_account(Safety::refuse())
            .keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(3600 * SECOND));
        let service = service(&lab, layer.ledger(NoHints(store.clone())));
        let error = service.clone().oneshot(to("a")).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown);
        if taken {
            let entry = store.entries().remove(0);
            store.gates["claim"].add_permits(100);
            store.claim(entry.id, entry.revision).await.unwrap();
        }
        assert!(service.clone().oneshot(to("a")).await.is_err(), "sent though the first is in doubt {taken}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_ledger_that_panics_when_it_settles_leaves_the_write_in_doubt() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let store = Store::new(&lab.log);
    let layer = Safety::refuse().ledger(PanicsAt(store.clone(), "settle"));
    let call = tokio::spawn(service(&lab, layer).oneshot(write()));
    assert!(call.await.is_err());
    assert!(!store.state().is_closed(), "{:?}", store.state());
    assert_eq!(lab.events.doubts() + lab.events.abandoned(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_ledger_that_panics_at_a_hint_loses_no_report() {
    let lab = Lab::new();
    lab.write(hang());
    let store = Store::new(&lab.log);
    let layer = Safety::refuse().ledger(PanicsAt(store.clone(), "abandon"));
    let mut call = Box::pin(service(&lab, layer).oneshot(write()));
    assert!(poll_once(&mut call));
    drop(call);
    assert_eq!(lab.events.abandoned(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_wall_clock_that_panics_loses_no_report() {
    for panics_at in 0..6 {
        for keyed in [false, true] {
            if keyed && panics_at == 0 {
                // Read before anything is handed over: the caller's panic is all there is.
                continue;
            }
            let lab = Lab::new();
            lab.write(fail(closed()));
            lab.write(fail(closed()));
            let ledger = MemoryLedger::new();
            let calls = AtomicU32::new(0);
            let mut layer = Safety::refuse().ledger(ledger.clone()).wall_clock(move || {
                assert!(calls.fetch_add(1, Ordering::Relaxed) != panics_at);
                SystemTime::now()
            });
            if keyed {
                layer =
                    layer.keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(3600 * SECOND));
            }
            let call = tokio::spawn(service(&lab, layer).oneshot(write()));
            let _ = call.await;
            let reports = lab.events.doubts() + lab.events.abandoned();
            assert_eq!((reports, ledger.in_doubt().await.unwrap().len()), (1, 1), "{panics_at} {keyed}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_entry_says_when_the_write_was_begun_also_where_the_wall_clock_is_first_read_at_its_end() {
    let lab = Lab::new();
    lab.write(later(3 * SECOND, Err(closed())));
    let start = SystemTime::UNIX_EPOCH + 1_000 * SECOND;
    let (begun, reads) = (tokio::time::Instant::now(), Arc::new(AtomicU32::new(0)));
    let count = Arc::clone(&reads);
    let ledger = MemoryLedger::new();
    let layer = Safety::refuse().ledger(ledger.clone()).wall_clock(move || {
        count.fetch_add(1, Ordering::Relaxed);
        start + begun.elapsed()
    });
    let mut call = Box::pin(service(&lab, layer).oneshot(write()));
    assert!(poll_once(&mut call));
    assert_eq!(reads.load(Ordering::Relaxed), 0);
    assert_eq!(call.await.unwrap_err().outcome(), Outcome::Unknown);
    let entries = ledger.in_doubt().await.unwrap();
    let [entry] = &entries[..] else { panic!("{entries:?}") };
    assert_eq!((entry.entered, entry.changed), (start, start + 3 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn a_write_whose_deadline_has_passed_when_its_ledger_is_first_asked_ends_without_a_deadline_layer() {
    let lab = Lab::new();
    let store = Store::new(&lab.log);
    let layer = Safety::refuse().ledger(store.clone());
    let call = layer.layer(lab.connection()).oneshot(write().within(Duration::ZERO));
    let call = tokio::spawn(call);
    tokio::time::sleep(SECOND).await;
    assert!(call.is_finished(), "hangs");
    assert_eq!(call.await.unwrap().unwrap_err().outcome(), Outcome::NotDone);
}

#[tokio::test(start_paused = true)]
async fn the_time_that_the_ledger_takes_to_enter_a_write_is_not_its_attempts() {
    let lab = Lab::new();
    lab.write(later(SECOND / 10, Ok(1)));
    let store = Store::new(&lab.log).shut("enter");
    let layer = absent(&lab).attempt_timeout(SECOND).ledger(store.clone());
    let call = tokio::spawn(service(&lab, layer).oneshot(write()));
    tokio::time::sleep(2 * SECOND).await;
    store.gates["enter"].add_permits(100);
    assert_eq!(call.await.unwrap().unwrap(), 1);
    assert_eq!((lab.log.count("check"), lab.events.doubts()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn no_quarantine_counts_for_an_entry_of_this_very_run() {
    let lab = Lab::new();
    lab.write(marked(1000 * SECOND, 2000 * SECOND, Ok(1)));
    let ledger = MemoryLedger::new();
    let service = service(&lab, Safety::refuse().ledger(ledger.clone()));
    service.oneshot(write().within(SECOND)).await.unwrap_err();
    let entry = ledger.in_doubt().await.unwrap().remove(0);
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed()) };
    let resolved = Resolve::new(&ledger, &entry, write())
        .quarantine(SECOND)
        .run_over(check, lab.connection())
        .await
        .unwrap();
    assert_eq!(resolved.verdict, VerdictKind::Unknown);
}

#[tokio::test(start_paused = true)]
async fn h05_what_was_found_in_part_is_not_replayed_by_trust() {
    let lab = Lab::new();
    lab.write(later(20 * SECOND, Err(unavailable()))).write(answer(2));
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.partial()) };
    let layer = WriteSafetyLayer::new(check).attempt_timeout(SECOND).trust(goaround::Evidence::Unavailable);
    let result = service(&lab, layer).oneshot(write()).await;
    assert_eq!(lab.writes(), 1, "{result:?}");
}

#[tokio::test(start_paused = true)]
async fn a_check_that_is_under_way_when_a_key_counts_again_does_not_end_the_replay() {
    let lab = Lab::new();
    lab.write(later(3 * SECOND, Err(closed()))).write(later(20 * SECOND, Ok(7)));
    let log = lab.log.clone();
    let check = move |doubt: Doubt| {
        log.note("check");
        async move {
            tokio::time::sleep(5 * SECOND).await;
            Ok::<_, BoxError>(doubt.not_landed_because("tested"))
        }
    };
    let clock = Arc::new(AtomicU64::new(1000));
    let now = clock.clone();
    let layer = WriteSafetyLayer::new(check)
        .attempt_timeout(SECOND)
        .keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(3600 * SECOND))
        .wall_clock(move || SystemTime::UNIX_EPOCH + Duration::from_secs(now.load(Ordering::Relaxed)));
    let call = tokio::spawn(service(&lab, layer).oneshot(write()));
    tokio::time::sleep(SECOND / 2).await;
    clock.store(900, Ordering::Relaxed);
    tokio::time::sleep(SECOND).await;
    clock.store(1002, Ordering::Relaxed);
    let result = call.await.unwrap();
    assert_eq!(result.unwrap(), 7, "{:?}", lab.log.timed());
}

#[tokio::test(start_paused = true)]
async fn the_end_of_a_replays_process_says_nothing_of_the_first_attempts_process() {
    let lab = Lab::new();
    lab.write(fail(exits(SECOND, false).exit_ends_effects()))
        .write(fail(exits(Duration::ZERO, true).exit_ends_effects()));
    let check = |doubt: Doubt| async move {
        doubt.probe(read()).await?;
        Ok::<_, BoxError>(doubt.not_landed())
    };
    let layer = WriteSafetyLayer::new(check).replay_idempotent();
    let stack = Stack::builder(lab.connector()).writes(layer).deadline(60 * SECOND).build().unwrap();
    let error = stack.send(Tagged::new("w", Effect::Idempotent)).await.unwrap_err();
    assert_eq!(lab.writes(), 2, "{error}");
    assert_eq!(error.outcome(), Outcome::Unknown, "{error:?}");
}

#[tokio::test(start_paused = true)]
async fn a_memory_ledger_that_somebody_wraps_blocks_no_key_of_a_write_under_way() {
    let lab = Lab::new();
    lab.write(later(SECOND, Ok(1))).write(later(SECOND, Ok(2)));
    let service = service(&lab, by_account(Safety::refuse()).ledger(Arc::new(MemoryLedger::new())));
    let first = tokio::spawn(service.clone().oneshot(to("a")));
    let second = tokio::spawn(service.clone().oneshot(to("a")));
    first.await.unwrap().unwrap();
    second.await.unwrap().unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_memory_ledger_that_somebody_wraps_blocks_the_key_of_a_write_in_doubt() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let ledger = Arc::new(MemoryLedger::new());
    let service = service(&lab, by_account(Safety::refuse()).ledger(ledger.clone()));
    service.clone().oneshot(to("a")).await.unwrap_err();
    let entry = ledger.in_doubt().await.unwrap().remove(0);
    let error = service.clone().oneshot(to("a")).await.unwrap_err();
    assert_eq!(*refusal(&error), Refusal::KeyInDoubt(entry.id));
    ledger.settle(entry.id, entry.revision, State::Landed { by: "jane".into() }).await.unwrap();
    assert_eq!(service.clone().oneshot(to("a")).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn h06_a_refused_write_whose_replay_somebody_else_has_claimed_is_unknown() {
    let lab = Lab::new();
    lab.write(fail(unavailable().after(2 * SECOND)));
    let store = Store::new(&lab.log);
    let layer = Safety::refuse().trust(goaround::Evidence::Unavailable).ledger(store.clone());
    let call = tokio::spawn(service(&lab, layer).oneshot(write()));
    tokio::time::sleep(SECOND).await;
    let entry = store.entries().remove(0);
    store.claim(entry.id, entry.revision).await.unwrap();
    let error = call.await.unwrap().unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1), "{error}");
}

#[tokio::test(start_paused = true)]
async fn a_conflict_key_of_an_outer_layer_is_kept_though_an_inner_one_reports_the_doubt() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let inner = WriteSafetyLayer::new(|doubt: Doubt| async move { Ok::<_, BoxError>(doubt.unknown("x")) });
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(by_account(Safety::refuse()))
        .layer(inner)
        .service(lab.connection());
    service.clone().oneshot(to("a")).await.unwrap_err();
    assert_eq!(lab.events.doubts(), 1);
    assert!(service.clone().oneshot(to("a")).await.is_err(), "sent though in doubt");
}

#[tokio::test(start_paused = true)]
async fn a_wait_for_what_is_in_progress_that_outlasts_the_deadline_is_not_begun() {
    let lab = Lab::new();
    lab.write(answer(1));
    let keyed = KeyedWrites::new(|_: &mut Req, _: &str| true)
        .answers(|_: Result<&Res, &CallError>| Some(KeyedAnswer::InFlight { recheck_after: 3600 * SECOND }));
    let start = tokio::time::Instant::now();
    let layer = absent(&lab).keyed(keyed);
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert!(start.elapsed() < SECOND, "{:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn a_write_in_progress_for_longer_than_can_be_counted_is_not_replayed_at_once() {
    let lab = Lab::new();
    lab.write(answer(1)).write(answer(2));
    let keyed = KeyedWrites::new(|_: &mut Req, _: &str| true)
        .honoured_for(Duration::MAX)
        .answers(|_: Result<&Res, &CallError>| Some(KeyedAnswer::InFlight { recheck_after: Duration::MAX }));
    let error = service(&lab, Safety::refuse().keyed(keyed)).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.log.timed().len()), (Outcome::Unknown, 1));
}

#[tokio::test(start_paused = true)]
async fn a_write_in_progress_is_given_its_time_before_its_replay_by_key() {
    let lab = Lab::new();
    lab.write(answer(1)).write(answer(2));
    let keyed = KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(3600 * SECOND).answers(
        |answer: Result<&Res, &CallError>| {
            (answer.ok() == Some(&1)).then_some(KeyedAnswer::InFlight { recheck_after: 5 * SECOND })
        },
    );
    let layer = Safety::refuse().keyed(keyed);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "5000 write"]);
}

#[tokio::test(start_paused = true)]
async fn resolve_ends_in_its_time_though_the_ledger_hangs() {
    let lab = Lab::new();
    let store = Store::new(&lab.log).shut("settle");
    let entry = lost(&store, SystemTime::now());
    let check = |doubt: Doubt| async move { Ok::<_, BoxError>(doubt.unknown("x")) };
    let resolve = Resolve::new(&store, &entry, write()).within(10 * SECOND).run_over(check, lab.connection());
    assert!(tokio::time::timeout(100 * SECOND, resolve).await.is_ok());
}

#[tokio::test(start_paused = true)]
async fn a_write_is_not_sent_on_a_key_whose_doubt_the_ledger_is_still_recording_or_recorded_after_it_was_asked()
 {
    for began_before in [true, false] {
        let lab = Lab::new();
        lab.write(later(SECOND, Err(closed()))).write(answer(2));
        let store = Store::new(&lab.log);
        let service = service(&lab, by_account(Safety::refuse()).ledger(store.clone()));
        let first = tokio::spawn(service.clone().oneshot(to("a")));
        tokio::time::sleep(SECOND / 2).await;
        let settling = store.gates["settle"].acquire_many(100).await.unwrap();
        let gate = store.gates["enter"].acquire_many(100).await.unwrap();
        let mut second = None;
        if began_before {
            // The first is under way still; the word of its being entered is late.
            second = Some(tokio::spawn(service.clone().oneshot(to("a"))));
        }
        tokio::time::sleep(SECOND).await;
        if began_before {
            drop(settling);
            assert_eq!(first.await.unwrap().unwrap_err().outcome(), Outcome::Unknown);
            // Settled by hand: what the ledger says of it now is not what it was asked.
            store.forget(store.entries()[0].id, "jane").await.unwrap();
            drop(gate);
        } else {
            drop(gate);
            let error = service.clone().oneshot(to("a")).await.unwrap_err();
            assert!(matches!(refusal(&error), Refusal::KeyInDoubt(_)), "{error}");
            drop(settling);
            assert_eq!(first.await.unwrap().unwrap_err().outcome(), Outcome::Unknown);
        }
        if let Some(second) = second {
            assert!(matches!(refusal(&second.await.unwrap().unwrap_err()), Refusal::KeyInDoubt(_)));
        }
        assert_eq!(lab.writes(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn h09_a_replay_that_is_held_up_below_while_the_machine_sleeps_is_not_sent_after_its_keys_time() {
    for (slept, sent) in [(0, true), (60, false)] {
        let clock = Arc::new(AtomicU64::new(1_000_000));
        let now = Arc::clone(&clock);
        let layer = refuse()
            .keyed(KeyedWrites::argument("/key").honoured_for(20 * SECOND))
            .wall_clock(move || SystemTime::UNIX_EPOCH + Duration::from_secs(now.load(Ordering::Relaxed)));
        let bytes = Arc::new(AtomicU32::new(0));
        let server = service_fn({
            let (bytes, clock) = (Arc::clone(&bytes), Arc::clone(&clock));
            move |request: Request| {
                let activity = request.context().activity().unwrap().clone();
                let first = bytes.load(Ordering::Relaxed) == 0;
                let (bytes, clock) = (Arc::clone(&bytes), Arc::clone(&clock));
                async move {
                    if !first {
                        // It waits for a connection, and the machine sleeps.
                        tokio::time::sleep(SECOND).await;
                        clock.fetch_add(slept, Ordering::Relaxed);
                        tokio::time::sleep(SECOND).await;
                    }
                    if !activity.adopt() {
                        return Err(CallError::not_sent("its time is up"));
                    }
                    bytes.fetch_add(1, Ordering::Relaxed);
                    activity.sent();
                    if first { Err(closed()) } else { Ok(Response::new(1).unwrap()) }
                }
            }
        });
        let service =
            ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(server);
        let result = service.oneshot(payment()).await;
        assert_eq!(bytes.load(Ordering::Relaxed), 1 + u32::from(sent), "{slept}");
        match result {
            Ok(_) => assert!(sent),
            Err(error) => assert_eq!((error.outcome(), sent), (Outcome::Unknown, false)),
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h21_a_lost_write_of_one_process_is_not_replayed_over_a_later_one_of_another() {
    // With one key, with two, and without.
    for (w1, w2, replayed) in [("a", "a", false), ("a", "b", true), ("any", "b", false), ("a", "any", false)]
    {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2)).write(answer(1));
        let store = Store::new(&lab.log);
        // Two layers that know nothing of each other but by the store.
        let ours = service(&lab, by_account(absent(&lab)).ledger(store.clone()));
        let theirs = service(&lab, by_account(absent(&lab)).ledger(store.clone()));
        let first = tokio::spawn(ours.oneshot(to(w1)));
        tokio::time::sleep(SECOND / 2).await;
        assert_eq!(theirs.oneshot(to(w2)).await.unwrap(), 2);
        let first = first.await.unwrap();
        assert_eq!((first.is_ok(), lab.writes()), (replayed, 2 + usize::from(replayed)), "{w1} {w2}");
        if let Err(error) = first {
            assert_eq!(error.outcome(), Outcome::NotDone);
            assert!(error.to_string().contains("entered by another process"), "{error}");
            assert!(store.entries().iter().all(|entry| entry.state.is_closed()), "{:?}", store.entries());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_in_doubt_is_not_settled_as_open() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let ledger = MemoryLedger::new();
    service(&lab, WriteSafetyLayer::refuse().ledger(ledger.clone())).oneshot(write()).await.unwrap_err();
    let entry = ledger.in_doubt().await.unwrap().remove(0);
    let refused = ledger.settle(entry.id, entry.revision, State::Open).await;
    assert!(matches!(refused, Err(LedgerError::NotASettlement(id)) if id == entry.id));
    assert_eq!(ledger.in_doubt().await.unwrap(), [entry]);
}

#[tokio::test]
async fn a_key_that_has_no_place_is_a_wrong_configuration() {
    for keyed in [KeyedWrites::argument("key"), KeyedWrites::param("")] {
        let keeper = Keeper::new([]);
        let error = keeper.service(refuse().keyed(keyed)).oneshot(payment()).await.unwrap_err();
        assert!(matches!(refusal(&error), Refusal::Config(what) if what.contains("JSON pointer")), "{error}");
        assert!(keeper.keys().is_empty());
    }
}

// ===== Several stacks with one ledger =====

/// Goes on while another thread writes a file: the clock, which is paused, stands still meanwhile.
async fn without_time<F: Future>(what: F) -> F::Output {
    let spin = async {
        loop {
            tokio::task::yield_now().await;
        }
    };
    tokio::select! {
        biased;
        done = what => done,
        () = spin => unreachable!(),
    }
}

async fn wait_until(what: impl Fn() -> bool) {
    while !what() {
        tokio::task::yield_now().await;
    }
}

/// The first stack's write is lost after the second stack's, on that key, was answered.
async fn overtaken_by_another_stack(
    ours: Safety,
    theirs: Safety,
    lab: &Lab,
    key: &'static str,
    replayed: bool,
) {
    let lost = Arc::new(tokio::sync::Notify::new());
    let loses = Arc::clone(&lost);
    lab.write(Box::new(move |_: Req| {
        Box::pin(async move {
            loses.notified().await;
            Err(closed())
        })
    }));
    lab.write(answer(2)).write(answer(1));
    let (ours, theirs) = (ours.layer(lab.connection()), theirs.layer(lab.connection()));
    let first = tokio::spawn(ours.oneshot(to("a")));
    wait_until(|| lab.writes() == 1).await;
    assert_eq!(without_time(theirs.oneshot(to(key))).await.unwrap(), 2);
    lost.notify_one();
    let first = first.await.unwrap();
    assert_eq!((first.is_ok(), lab.writes()), (replayed, 2 + usize::from(replayed)), "{first:?}");
    if let Err(error) = first {
        assert_eq!(error.outcome(), Outcome::NotDone, "{error}");
    }
}

#[tokio::test(start_paused = true)]
async fn h21_a_lost_write_of_one_stack_is_not_replayed_over_a_later_one_of_another_on_the_same_ledger() {
    async fn on(ledger: impl Ledger + Clone) {
        for (key, replayed) in [("a", false), ("b", true)] {
            let lab = Lab::new();
            let layer = || by_account(absent(&lab)).ledger(ledger.clone());
            overtaken_by_another_stack(layer(), layer(), &lab, key, replayed).await;
        }
    }
    on(MemoryLedger::new()).await;
    on(Arc::new(MemoryLedger::new())).await;
    // What stands in the ledger is enough.
    on(Wrapped(MemoryLedger::new())).await;
    #[cfg(feature = "ledger-durable")]
    {
        use goaround::write_safety::ledger::DurableLedger;
        let directory = tempfile::tempdir().unwrap();
        let open = |name: &str| DurableLedger::open(directory.path().join(name)).unwrap();
        on(open("plain")).await;
        on(Arc::new(open("shared"))).await;
        on(Wrapped(open("wrapped"))).await;
    }
    // The ledger that a layer, or a service, gives away is the same.
    let lab = Lab::new();
    let layer = by_account(absent(&lab)).ledger(Wrapped(NoHints(Store::new(&lab.log))));
    let ledger = layer.layer(lab.connection()).ledger();
    overtaken_by_another_stack(layer.clone(), layer, &lab, "a", false).await;
    let lab = Lab::new();
    let layer = || by_account(absent(&lab)).ledger(ledger.clone());
    overtaken_by_another_stack(layer(), layer(), &lab, "a", false).await;
}

#[tokio::test(start_paused = true)]
async fn a_key_in_doubt_turns_writes_of_other_stacks_with_its_ledger_away_while_its_check_runs() {
    async fn on(ledger: impl Ledger + Clone) {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(1)).write(answer(2)).write(answer(3));
        let stack = || by_account(absent(&lab)).ledger(ledger.clone()).layer(lab.connection());
        let (ours, theirs) = (stack(), stack());
        let first = tokio::spawn(ours.oneshot(to("a")));
        wait_until(|| lab.log.all().iter().any(|line| line.contains("check"))).await;
        let error = without_time(theirs.clone().oneshot(to("a"))).await.unwrap_err();
        assert!(matches!(refusal(&error), Refusal::KeyInDoubt(_)), "{error}");
        assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 1));
        assert_eq!(first.await.unwrap().unwrap(), 1);
        assert_eq!(without_time(theirs.clone().oneshot(to("a"))).await.unwrap(), 2);
        // Another ledger knows nothing of it.
        let apart = by_account(WriteSafetyLayer::refuse()).ledger(MemoryLedger::new());
        assert_eq!(apart.layer(lab.connection()).oneshot(to("a")).await.unwrap(), 3);
    }
    on(MemoryLedger::new()).await;
    #[cfg(feature = "ledger-durable")]
    {
        let directory = tempfile::tempdir().unwrap();
        on(goaround::write_safety::ledger::DurableLedger::open(directory.path().join("ledger")).unwrap())
            .await;
    }
}

// ===== Nested layers =====

/// Both may replay; the inner one is used by itself too.
fn nested(lab: &Lab, outer: Safety, inner: Safety) -> (impl Clone + PlainService, impl Clone + PlainService) {
    let inner = inner.on_event(lab.events.sink()).layer(lab.connection());
    (outer.on_event(lab.events.sink()).layer(inner.clone()), inner)
}

trait PlainService: Service<Req, Response = Res, Error = CallError, Future: Send> + Send + 'static {}
impl<S> PlainService for S where
    S: Service<Req, Response = Res, Error = CallError, Future: Send> + Send + 'static
{
}

#[tokio::test(start_paused = true)]
async fn h21_no_replay_of_an_inner_layer_lands_on_a_write_that_an_outer_one_answers_for() {
    for (key, other, replayed) in
        [(None, None, false), (Some("a"), Some("a"), false), (Some("a"), Some("b"), true)]
    {
        let lab = Lab::new();
        lab.write(later(SECOND, Err(closed()))).write(answer(2)).write(answer(1));
        let layer = || match key {
            None => absent(&lab),
            Some(_) => by_account(absent(&lab)),
        };
        let (outer, inner) = nested(&lab, layer(), layer());
        let first = tokio::spawn(inner.oneshot(to(key.unwrap_or("any"))));
        tokio::time::sleep(SECOND / 2).await;
        assert_eq!(outer.oneshot(to(other.unwrap_or("any"))).await.unwrap(), 2);
        let first = first.await.unwrap();
        assert_eq!((first.is_ok(), lab.writes()), (replayed, 2 + usize::from(replayed)), "{first:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_key_in_doubt_turns_a_write_away_also_where_a_layer_further_out_answers_for_it() {
    let lab = Lab::new();
    lab.write(later(SECOND, Err(closed()))).write(answer(3)).write(answer(2));
    let trusting = WriteSafetyLayer::refuse().trust(goaround::Evidence::TooEarly);
    let (outer, inner) = nested(&lab, trusting, by_account(WriteSafetyLayer::refuse()));
    assert_eq!(inner.clone().oneshot(to("a")).await.unwrap_err().outcome(), Outcome::Unknown);
    let refused = outer.clone().oneshot(to("a")).await.unwrap_err();
    assert!(matches!(refusal(&refused), Refusal::KeyInDoubt(_)), "{refused}");
    assert_eq!((refused.outcome(), lab.writes(), lab.events.doubts()), (Outcome::NotDone, 1, 1));
    assert_eq!(outer.oneshot(to("b")).await.unwrap(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_replay_of_an_outer_layer_is_not_held_up_by_its_own_doubt_in_the_ledger_that_both_have() {
    let store = |lab: &Lab| Store::new(&lab.log);
    for shared in [false, true] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(1));
        let layer = by_account(absent(&lab));
        let layer = if shared { layer.ledger(store(&lab)) } else { layer.ledger(MemoryLedger::new()) };
        let (outer, inner) = nested(&lab, layer.clone(), layer);
        let first = tokio::spawn(outer.oneshot(to("a")));
        tokio::time::sleep(SECOND / 2).await;
        // While it is in doubt there, others are turned away from the inner one.
        assert!(matches!(refusal(&inner.oneshot(to("a")).await.unwrap_err()), Refusal::KeyInDoubt(_)));
        assert_eq!((first.await.unwrap().unwrap(), lab.writes(), lab.events.doubts()), (1, 2, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_ledger_of_an_inner_layer_that_would_not_have_a_write_is_a_wrong_configuration() {
    let lab = Lab::new();
    lab.write(answer(1)).write(answer(2)).write(answer(3));
    let ours = || Safety::refuse().trust(goaround::Evidence::TooEarly);
    let wrong = |error: CallError, what: &str| {
        assert!(matches!(refusal(&error), Refusal::Config(text) if text.contains(what)), "{error}");
        assert_eq!(error.outcome(), Outcome::NotDone);
    };
    // The outer one has none, or another.
    let store = Store::new(&lab.log);
    for outer in [ours(), ours().ledger(MemoryLedger::new())] {
        let (outer, _) = nested(&lab, outer, Safety::refuse().ledger(store.clone()));
        wrong(outer.oneshot(to("a")).await.unwrap_err(), "same ledger");
    }
    // It has it, and not the key that would block.
    let inner = by_account(Safety::refuse()).ledger(store.clone());
    let ledger = inner.layer(lab.connection()).ledger();
    let (outer, _) = nested(&lab, ours().ledger(ledger.clone()), inner.clone());
    wrong(outer.oneshot(to("a")).await.unwrap_err(), "conflict_key");
    assert!(lab.writes() == 0 && store.entries().iter().all(|entry| entry.state.is_closed()));
    // With both it is entered, once. So it is under a layer that cannot replay, which leaves it to the inner one.
    let entered = store.entries().len();
    let (outer, _) = nested(&lab, by_account(ours()).ledger(ledger), inner.clone());
    assert_eq!(outer.oneshot(to("a")).await.unwrap(), 1);
    let (outer, _) = nested(&lab, Safety::refuse(), inner);
    assert_eq!((outer.oneshot(to("a")).await.unwrap(), store.entries().len()), (2, entered + 2));
    assert_eq!(lab.events.all(), []);
}

#[tokio::test(start_paused = true)]
async fn an_inner_layer_puts_its_key_into_each_attempt_of_a_write_that_an_outer_one_replays() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(1));
    let keys = Arc::new(Mutex::new(Vec::new()));
    let puts = Arc::clone(&keys);
    let keyed = KeyedWrites::new(move |_: &mut Req, key: &str| {
        puts.lock().unwrap().push(key.to_owned());
        true
    });
    let (outer, _) = nested(&lab, absent(&lab), Safety::refuse().keyed(keyed.honoured_for(60 * SECOND)));
    assert_eq!(outer.oneshot(to("a")).await.unwrap(), 1);
    let keys = keys.lock().unwrap();
    assert!(keys.len() == 2 && keys[0] == keys[1], "{keys:?}");
}

#[tokio::test(start_paused = true)]
async fn nested_layers_that_share_a_ledger_in_memory_block_the_keys_of_both() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).write(answer(3));
    let ledger = MemoryLedger::new();
    let outer = Safety::refuse().conflict_key(|_: &Req| Some("tenant 1")).ledger(ledger.clone());
    let (outer, inner) = nested(&lab, outer, by_account(Safety::refuse()).ledger(ledger.clone()));
    assert_eq!(outer.clone().oneshot(to("a")).await.unwrap_err().outcome(), Outcome::Unknown);
    let [entry] = &ledger.in_doubt().await.unwrap()[..] else { panic!() };
    assert_eq!(entry.key.as_deref(), Some("tenant 1"));
    for refused in [inner.clone().oneshot(to("a")).await, outer.clone().oneshot(to("b")).await] {
        assert_eq!(*refusal(&refused.unwrap_err()), Refusal::KeyInDoubt(entry.id));
    }
    // Both are free with it.
    ledger.forget(entry.id, "jane").await.unwrap();
    assert_eq!(inner.oneshot(to("a")).await.unwrap(), 2);
    assert_eq!(outer.oneshot(to("a")).await.unwrap(), 3);
}

#[tokio::test(start_paused = true)]
async fn a_write_that_is_dropped_before_anything_of_it_was_sent_blocks_no_key_of_an_outer_layer() {
    struct Withdraws(Arc<goaround::Activity>);
    impl Drop for Withdraws {
        fn drop(&mut self) {
            self.0.withdrawn();
        }
    }
    // Of an inner layer that has it in its queue, one that waits for its ledger, and one that turned it away.
    for held_by in ["connection", "ledger", "key"] {
        let lab = Lab::new();
        let ledger = MemoryLedger::new();
        let inner = match held_by {
            "ledger" => by_account(Safety::refuse()).ledger(Store::new(&lab.log).shut("enter")),
            _ => by_account(Safety::refuse()),
        };
        let outer = by_account(Safety::refuse()).ledger(ledger.clone());
        let (outer, inner) = nested(&lab, outer, inner);
        if held_by == "key" {
            lab.write(fail(closed()));
            inner.oneshot(to("a")).await.unwrap_err();
        }
        lab.write(Box::new(|request: Req| {
            let activity = request.context().activity().unwrap().clone();
            assert!(activity.adopt());
            let queued = Withdraws(activity);
            Box::pin(async move {
                let _queued = queued;
                std::future::pending().await
            })
        }));
        let reports = lab.events.all().len();
        if held_by == "key" {
            let mut outer = outer;
            drop(outer.call(to("a")));
        } else {
            let mut call = Box::pin(outer.oneshot(to("a")));
            assert!(poll_once(&mut call));
            drop(call);
        }
        // Nobody reports it, since nothing was sent; so nothing may be blocked.
        assert_eq!(
            (lab.events.all().len(), ledger.in_doubt().await.unwrap()),
            (reports, vec![]),
            "{held_by}"
        );
    }
}

// ===== Reports =====

#[tokio::test(start_paused = true)]
async fn whoever_is_told_of_a_doubt_finds_it_in_the_ledger_if_that_answers_in_time() {
    for (gate, caller_stays) in
        [("open", true), ("open", false), ("slow", true), ("shut", true), ("shut", false)]
    {
        let lab = Lab::new();
        lab.write(fail(closed()));
        let store = Store::new(&lab.log);
        let store = if gate == "open" { store } else { store.shut("settle") };
        let (asked, told) = (store.clone(), Arc::new(Mutex::new(Vec::new())));
        let tells = Arc::clone(&told);
        let layer = Safety::refuse().ledger(NoHints(store.clone())).on_event(move |event| {
            if let goaround::Event::InDoubt(_) = event {
                let found = matches!(asked.entries()[0].state, State::InDoubt { .. });
                tells.lock().unwrap().push(found);
            }
        });
        let start = tokio::time::Instant::now();
        let service = DeadlineLayer::new(60 * SECOND).layer(layer.layer(lab.connection()));
        let call = service.oneshot(to("a").within(3 * SECOND));
        if gate == "slow" {
            let store = store.clone();
            tokio::spawn(async move {
                tokio::time::sleep(SECOND).await;
                store.gates["settle"].add_permits(100);
            });
        }
        if caller_stays {
            assert_eq!(call.await.unwrap_err().outcome(), Outcome::Unknown);
            let most = if gate == "shut" { 3 * SECOND } else { SECOND };
            assert!(start.elapsed() <= most + ms(1), "{gate}: {:?}", start.elapsed());
        } else {
            let mut call = Box::pin(call);
            let _ = poll_once(&mut call);
            drop(call);
        }
        // Once in any case.
        assert_eq!(*told.lock().unwrap(), [gate != "shut"], "{gate} {caller_stays}");
    }
}

#[cfg(feature = "ledger-durable")]
#[tokio::test]
async fn whoever_is_told_of_a_doubt_finds_it_in_the_durable_ledger() {
    let directory = tempfile::tempdir().unwrap();
    let ledger =
        goaround::write_safety::ledger::DurableLedger::open(directory.path().join("ledger")).unwrap();
    let lab = Lab::new();
    lab.write(fail(closed()));
    let (asked, told) = (ledger.clone(), Arc::new(Mutex::new(Vec::new())));
    let tells = Arc::clone(&told);
    let layer = Safety::refuse().ledger(ledger).on_event(move |event| {
        if let goaround::Event::InDoubt(_) = event {
            let listed = Box::pin(asked.in_doubt()).as_mut().poll(&mut Context::from_waker(Waker::noop()));
            let std::task::Poll::Ready(Ok(entries)) = listed else { panic!("it waits") };
            tells.lock().unwrap().push(entries.len());
        }
    });
    layer.layer(lab.connection()).oneshot(to("a")).await.unwrap_err();
    assert_eq!(*told.lock().unwrap(), [1]);
}

#[tokio::test(start_paused = true)]
async fn a_key_that_is_put_by_making_the_request_anew_loses_no_report_and_no_time() {
    let lab = Lab::new();
    lab.write(hang());
    let keyed = KeyedWrites::new(|request: &mut Req, _: &str| {
        *request = Tagged::new("with key", Effect::Write).named("pay");
        true
    });
    let mut write = to("a").within(SECOND);
    let id = write.context_mut().assign_id();
    let error = service(&lab, Safety::refuse().keyed(keyed)).oneshot(write).await.unwrap_err();
    assert_eq!((error.outcome(), error.call()), (Outcome::Unknown, Some(id)));
    assert_eq!(lab.events.doubts(), 1, "{:?}", lab.events.all());
}

/// A layer further in knows what has become of it, and is dropped while its ledger records that: by what is in between, or
/// since the caller goes away.
#[tokio::test(start_paused = true)]
async fn an_unknown_is_reported_though_a_layer_further_in_was_about_to_tell_what_it_knew() {
    let verdicts: [fn(&Doubt) -> Verdict<Res>; 2] =
        [|doubt| doubt.landed(7), |doubt| doubt.landed_without_result()];
    for (verdict, leaves) in verdicts.into_iter().flat_map(|verdict| [(verdict, false), (verdict, true)]) {
        let lab = Lab::new();
        lab.write(fail(CallError::ambiguous("reset")));
        let store = Store::new(&lab.log).shut("settle");
        let check = Safety::new(move |doubt: Doubt| async move { Ok::<_, BoxError>(verdict(&doubt)) });
        let inner = check.ledger(store).on_event(lab.events.sink()).layer(lab.connection());
        let between = gives_up(BoxCloneService::new(inner), 2 * SECOND);
        let outer = Safety::refuse().conflict_key(|_| Some("k")).on_event(lab.events.sink()).layer(between);
        let ledger = outer.ledger();
        let left = if leaves { SECOND } else { 10 * SECOND };
        let told = tokio::time::timeout(left, outer.oneshot(write())).await.ok();
        let told = told.map(|told| told.unwrap_err().outcome());
        assert_eq!(told, (!leaves).then_some(Outcome::Unknown));
        let unknown = |seen: &&Seen| {
            matches!(seen, Seen::InDoubt { outcome: Some(Outcome::Unknown), .. } | Seen::Abandoned { .. })
        };
        let (all, unknowns) = (lab.events.all(), usize::from(!leaves));
        assert_eq!(all.iter().filter(unknown).count(), unknowns, "{all:?}");
        assert_eq!((ledger.in_doubt().await.unwrap().len(), lab.events.doubts()), (unknowns, 1 + unknowns));
    }
}
