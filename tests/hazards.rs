//! What can go wrong when a write in doubt is settled: the hazards H1 to H22 of `docs/effect-check.md`, each
//! with its number. Where the layer guards against one, the test shows the guard; where only the caller can, it
//! shows what the wrong check costs next to the right one.
//!
//! H14 and H15 are in `tests/mcp.rs`. The server is a mock whose writes land when the test says, with tokio's
//! clock paused.

mod lab;

use std::{
    collections::{HashMap, VecDeque},
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, SystemTime},
};

use goaround::{
    BoxError, Call, CallContext, CallError, Cause, DeadlineLayer, Effect, Evidence, InDoubt, Outcome,
    Refusal, RetryReadOnly, Settled, Tagged, Verdict, WriteSafetyLayer, jsonrpc,
    write_safety::{
        KeyedAnswer, KeyedWrites,
        ledger::{Entry, EntryId, Ledger, LedgerError, MemoryLedger, State},
    },
};
use lab::{Events, SECOND, ms};
use tokio::{
    io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader},
    time::{Instant, sleep},
};
use tower::{Layer, ServiceBuilder, ServiceExt, util::BoxCloneService};
use tower_test::mock::{self, Handle, Mock, SendResponse};

/// A write or a read of that token; a read is answered with how often it is there.
type Req = Tagged<&'static str>;
type Client = BoxCloneService<Req, usize, CallError>;
type Safety = WriteSafetyLayer<Req, usize>;
type Doubt = InDoubt<Req, usize>;
type Checked = Result<Verdict<usize>, BoxError>;

/// What the server does with a write: when it lands, if ever, and what the client hears of it.
struct Step {
    lands: Option<Duration>,
    then: Then,
}

enum Then {
    Answers,
    Hangs,
    Fails(CallError),
}

const AT_ONCE: Option<Duration> = Some(Duration::ZERO);
const NEVER: Option<Duration> = None;

fn after(seconds: u32) -> Option<Duration> {
    Some(seconds * SECOND)
}

fn step(lands: Option<Duration>, then: Then) -> Step {
    Step { lands, then }
}

/// The connection breaks.
fn breaks() -> Then {
    Then::Fails(CallError::ambiguous("reset"))
}

/// A shop behind a mock, its books, and what the layers reported.
#[derive(Clone, Default)]
struct Shop {
    /// What has taken effect, and when. It only grows.
    history: Arc<Mutex<Vec<(Instant, &'static str)>>>,
    /// What of it is still to be seen.
    shelf: Arc<Mutex<Vec<&'static str>>>,
    /// The deadlines of the writes that were handed over.
    writes: Arc<Mutex<Vec<Option<Instant>>>>,
    reads: Arc<AtomicUsize>,
    events: Events,
}

impl Shop {
    fn lands(&self, token: &'static str) {
        self.history.lock().unwrap().push((Instant::now(), token));
        self.shelf.lock().unwrap().push(token);
    }

    /// How often that token has taken effect, by now or by some earlier time.
    fn times(&self, token: &str, ago: Duration) -> usize {
        let then = Instant::now() - ago;
        self.history.lock().unwrap().iter().filter(|(at, of)| *at <= then && *of == token).count()
    }

    /// The same, once everything that may still land has.
    async fn in_the_end(&self, token: &str) -> usize {
        sleep(1_000 * SECOND).await;
        self.times(token, Duration::ZERO)
    }

    fn handed_over(&self) -> usize {
        self.writes.lock().unwrap().len()
    }

    /// A client of the shop, which does that with the writes that it gets.
    fn client(&self, layer: Safety, steps: impl IntoIterator<Item = Step>) -> Client {
        let (mock, handle) = mock::pair();
        tokio::spawn(self.clone().serve(handle, steps.into_iter().collect()));
        let of: fn(BoxError) -> CallError = CallError::from_boxed;
        let client = ServiceBuilder::new()
            .layer(DeadlineLayer::new(60 * SECOND).on_event(self.events.sink()))
            .layer(layer)
            .layer(RetryReadOnly)
            .map_err(of)
            .service::<Mock<Req, usize>>(mock);
        BoxCloneService::new(client)
    }

    async fn serve(self, mut handle: Handle<Req, usize>, mut steps: VecDeque<Step>) {
        while let Some((request, reply)) = handle.next_request().await {
            if request.context().effect() == Some(Effect::ReadOnly) || !request.effect().is_write() {
                self.reads.fetch_add(1, Ordering::Relaxed);
                match request.into_inner() {
                    "what breaks" => reply.send_error(CallError::ambiguous("reset")),
                    token => reply.send_response(self.times(token, Duration::ZERO)),
                }
                continue;
            }
            self.writes.lock().unwrap().push(request.context().deadline().instant());
            let step = steps.pop_front().expect("a write that nobody expected");
            tokio::spawn(self.clone().process(*request, step, reply));
        }
    }

    async fn process(self, token: &'static str, step: Step, reply: SendResponse<usize>) {
        let land = async |lands: Option<Duration>| {
            if let Some(after) = lands {
                sleep(after).await;
                self.lands(token);
            }
        };
        match step.then {
            Then::Answers => {
                land(step.lands).await;
                reply.send_response(self.times(token, Duration::ZERO));
            }
            Then::Fails(error) => {
                reply.send_error(error);
                land(step.lands).await;
            }
            Then::Hangs => {
                land(step.lands).await;
                pending::<()>().await;
            }
        }
    }
}

fn write(token: &'static str) -> Req {
    Tagged::new(token, Effect::Write).named("buy")
}

fn read(token: &'static str) -> Req {
    Tagged::new(token, Effect::ReadOnly).named("look")
}

/// The check as it should be: looks for this very write, where it was made.
async fn look(doubt: Doubt) -> Checked {
    let found = doubt.probe(read(**doubt.request())).await?;
    Ok(if found > 0 { doubt.landed(found) } else { doubt.not_landed() })
}

fn outcome(result: Result<usize, CallError>) -> Result<usize, Outcome> {
    result.map_err(|error| error.outcome())
}

fn notes(error: &CallError) -> String {
    error.notes().collect::<Vec<_>>().join(" | ")
}

#[tokio::test(start_paused = true)]
async fn h01_a_write_that_lands_after_the_check_is_replayed_only_by_a_fence_that_is_not_true() {
    // It lands at 9 s. In doubt it is at 1 s.
    let checked = || WriteSafetyLayer::new(look).attempt_timeout(SECOND);
    let because = WriteSafetyLayer::new(|doubt: Doubt| async move {
        let found = doubt.probe(read("w")).await?;
        Ok(if found > 0 { doubt.landed(found) } else { doubt.not_landed_because("surely it is lost") })
    });
    for (layer, told, effects, when) in [
        (checked(), Err(Outcome::Unknown), 1, 60),
        (checked().quarantine(9 * SECOND), Ok(1), 1, 10),
        (checked().quarantine(3 * SECOND), Ok(1), 2, 4),
        (because.attempt_timeout(SECOND), Ok(1), 2, 1),
    ] {
        let shop = Shop::default();
        let client = shop.client(layer, [step(after(9), Then::Hangs), step(AT_ONCE, Then::Answers)]);
        let start = Instant::now();
        assert_eq!(outcome(client.oneshot(write("w")).await), told);
        assert_eq!(start.elapsed(), when * SECOND);
        assert_eq!(shop.in_the_end("w").await, effects);
    }
}

#[tokio::test(start_paused = true)]
async fn h02_a_check_that_reads_what_was_makes_two_of_one_even_under_a_true_fence() {
    for (lag, effects) in [(0, 1), (4, 2)] {
        let shop = Shop::default();
        let replica = shop.clone();
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            let found = replica.times(**doubt.request(), lag * SECOND);
            async move { Ok(if found > 0 { doubt.landed(found) } else { doubt.not_landed() }) }
        });
        // Nothing lands later than 5 s: true. The check looks at 6 s, and sees what was at 2 s.
        let layer = layer.attempt_timeout(SECOND).quarantine(5 * SECOND);
        let client = shop.client(layer, [step(after(4), Then::Hangs), step(AT_ONCE, Then::Answers)]);
        assert!(client.oneshot(write("w")).await.is_ok());
        assert_eq!(shop.in_the_end("w").await, effects);
    }
}

#[tokio::test(start_paused = true)]
async fn h03_a_check_that_takes_anothers_effect_for_its_own_loses_the_write() {
    for (looks_for_its_own, effects) in [(false, 0), (true, 1)] {
        let shop = Shop::default();
        shop.lands("somebody else's");
        let shelf = Arc::clone(&shop.shelf);
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            let shelf = shelf.lock().unwrap();
            let found =
                if looks_for_its_own { shelf.contains(doubt.request().get_ref()) } else { !shelf.is_empty() };
            async move { Ok(if found { doubt.landed(1) } else { doubt.not_landed() }) }
        });
        let layer = layer.quarantine(SECOND);
        let client = shop.client(layer, [step(NEVER, breaks()), step(AT_ONCE, Then::Answers)]);
        // Told that it is done in either case: it is the check that says so.
        assert_eq!(client.oneshot(write("w")).await.unwrap(), 1);
        assert_eq!(shop.in_the_end("w").await, effects);
    }
}

#[tokio::test(start_paused = true)]
async fn h04_what_was_made_and_taken_away_again_is_found_in_a_history_only() {
    for (reads_the_history, effects) in [(false, 2), (true, 1)] {
        let shop = Shop::default();
        let books = shop.clone();
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            let found = match reads_the_history {
                true => books.times(**doubt.request(), Duration::ZERO) > 0,
                false => books.shelf.lock().unwrap().contains(doubt.request().get_ref()),
            };
            async move { Ok(if found { doubt.landed(1) } else { doubt.not_landed() }) }
        });
        let steps = [step(AT_ONCE, breaks()), step(AT_ONCE, Then::Answers)];
        let client = shop.client(layer.quarantine(9 * SECOND), steps);
        let (told, ()) = tokio::join!(client.oneshot(write("w")), async {
            // A colleague takes it off the shelf before the check looks.
            sleep(3 * SECOND).await;
            shop.shelf.lock().unwrap().clear();
        });
        assert!(told.is_ok());
        assert_eq!(shop.in_the_end("w").await, effects);
    }
}

#[tokio::test(start_paused = true)]
async fn h05_what_was_applied_in_part_is_unknown_and_never_replayed() {
    let shop = Shop::default();
    let layer = WriteSafetyLayer::new(|doubt: Doubt| async move {
        let (first, second) = (doubt.probe(read("part 1")).await?, doubt.probe(read("part 2")).await?);
        Ok(match (first, second) {
            (0, 0) => doubt.not_landed(),
            (0, _) | (_, 0) => doubt.partial(),
            _ => doubt.landed_without_result(),
        })
    });
    shop.lands("part 1");
    let client = shop.client(layer.quarantine(SECOND), [step(NEVER, breaks())]);
    let error = client.oneshot(write("both")).await.unwrap_err();
    assert_eq!((error.outcome(), notes(&error).as_str()), (Outcome::Unknown, "applied in part"));
    assert_eq!((shop.handed_over(), shop.events.doubts()), (1, 1));
}

/// A ledger that several processes share, as they would a database: slow, and with compare-and-set.
#[derive(Clone, Default)]
struct Database(Arc<Mutex<HashMap<EntryId, Entry>>>, Duration);

impl Database {
    async fn change<T>(
        &self,
        id: EntryId,
        change: impl FnOnce(&mut Entry) -> Result<T, LedgerError>,
    ) -> Result<T, LedgerError> {
        sleep(ms(5)).await;
        change(self.0.lock().unwrap().get_mut(&id).ok_or(LedgerError::Conflict(id))?)
    }

    fn only(&self) -> Entry {
        let entries = self.0.lock().unwrap();
        assert_eq!(entries.len(), 1);
        entries.values().next().unwrap().clone()
    }
}

impl Ledger for Database {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        sleep(ms(5)).await;
        let revision = entry.revision;
        self.0.lock().unwrap().insert(entry.id, entry);
        Ok(revision)
    }

    async fn settle(&self, id: EntryId, revision: u64, state: State) -> Result<u64, LedgerError> {
        self.change(id, |entry| entry.settle(revision, state, SystemTime::now())).await
    }

    async fn claim(&self, id: EntryId, revision: u64) -> Result<u64, LedgerError> {
        sleep(self.1).await;
        self.change(id, |entry| entry.claim(revision, SystemTime::now())).await
    }

    async fn in_doubt(&self) -> Result<Vec<Entry>, LedgerError> {
        let entries = self.0.lock().unwrap();
        Ok(entries.values().filter(|entry| !entry.state.is_closed()).cloned().collect())
    }

    async fn forget(&self, id: EntryId, by: &str) -> Result<(), LedgerError> {
        let by = by.to_owned();
        let forgotten = |entry: &mut Entry| {
            entry.settle(entry.revision, State::Forgotten { by }, SystemTime::now()).map(drop)
        };
        self.change(id, forgotten).await
    }
}

#[tokio::test(start_paused = true)]
async fn h06_of_two_processes_that_would_replay_a_write_one_does() {
    // The other one takes it before our check has ended, or comes after our replay has begun.
    for (theirs_at, hand_overs) in [(2, 1), (8, 2)] {
        let (shop, database) = (Shop::default(), Database::default());
        let layer = WriteSafetyLayer::new(look).quarantine(5 * SECOND).ledger(database.clone());
        let client = shop.client(layer, [step(NEVER, breaks()), step(after(9), Then::Answers)]);
        let (told, claimed) = tokio::join!(client.oneshot(write("w")), async {
            sleep(theirs_at * SECOND).await;
            let entry = database.only();
            database.claim(entry.id, entry.revision).await
        });
        assert_eq!((shop.handed_over(), claimed.is_ok()), (hand_overs, hand_overs == 1));
        match told {
            Ok(_) => assert_eq!(database.only().state, State::Answered),
            Err(error) => {
                assert_eq!(error.outcome(), Outcome::Unknown);
                assert!(notes(&error).contains("somebody else"), "{error}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h06_whoever_repeats_a_write_in_doubt_is_told_so_at_once_where_it_has_a_conflict_key() {
    let shop = Shop::default();
    let layer = WriteSafetyLayer::new(look).conflict_key(|request: &Req| Some(**request));
    let client = shop.client(layer.quarantine(5 * SECOND), [step(after(2), breaks())]);
    let (first, second) = tokio::join!(client.clone().oneshot(write("w")), async {
        sleep(SECOND).await;
        client.oneshot(write("w")).await
    });
    let second = second.unwrap_err();
    assert!(matches!(second.cause(), Cause::Refused(Refusal::KeyInDoubt(_))), "{second}");
    assert_eq!((second.outcome(), first.unwrap()), (Outcome::NotDone, 1));
    assert_eq!((shop.handed_over(), shop.in_the_end("w").await), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn h07_a_write_is_not_replayed_on_top_of_one_that_went_ahead_meanwhile() {
    for (independent, hand_overs) in [(false, 2), (true, 3)] {
        let shop = Shop::default();
        let layer = WriteSafetyLayer::new(look).quarantine(5 * SECOND);
        let layer = if independent { layer.independent_writes() } else { layer };
        let answers = || step(AT_ONCE, Then::Answers);
        let client = shop.client(layer, [step(NEVER, breaks()), answers(), answers()]);
        let (first, second) = tokio::join!(client.clone().oneshot(write("append a")), async {
            sleep(SECOND).await;
            client.oneshot(write("append b")).await
        });
        assert_eq!(second.unwrap(), 1);
        assert_eq!(outcome(first), if independent { Ok(1) } else { Err(Outcome::NotDone) });
        assert_eq!(shop.handed_over(), hand_overs);
    }
}

#[tokio::test(start_paused = true)]
async fn h08_a_check_that_fails_hangs_panics_or_would_write_leads_to_no_replay() {
    for way in ["fails", "hangs", "panics", "writes", "probes what fails"] {
        let shop = Shop::default();
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| async move {
            match way {
                "fails" => return Err("no idea".into()),
                "hangs" => pending().await,
                "panics" => panic!("tested"),
                "writes" => {
                    let error = doubt.probe(write("w")).await.unwrap_err();
                    assert!(matches!(error.cause(), Cause::Refused(Refusal::NotAProbe)));
                    return Err(error.into());
                }
                _ => doubt.probe(read("what breaks")).await?,
            };
            Ok(doubt.not_landed())
        });
        let client = shop.client(layer.quarantine(SECOND), [step(NEVER, breaks())]);
        let start = Instant::now();
        let error = client.oneshot(write("w")).await.unwrap_err();
        assert_eq!((error.outcome(), shop.handed_over()), (Outcome::Unknown, 1), "{way}");
        assert!(start.elapsed() < 60 * SECOND, "{way}: {:?}", start.elapsed());
        assert_eq!((shop.events.doubts(), shop.in_the_end("w").await), (1, 0), "{way}");
    }
}

/// A request with a place for a key.
struct Keyed {
    token: &'static str,
    key: Option<String>,
    effect: Effect,
    context: CallContext,
}

fn keyed(token: &'static str) -> Keyed {
    Keyed { token, key: None, effect: Effect::Write, context: CallContext::new() }
}

impl Call for Keyed {
    fn method(&self) -> &str {
        "buy"
    }

    fn effect(&self) -> Effect {
        self.effect
    }

    fn context(&self) -> &CallContext {
        &self.context
    }

    fn context_mut(&mut self) -> &mut CallContext {
        &mut self.context
    }

    fn try_clone(&self) -> Option<Self> {
        let Self { token, key, effect, context } = self;
        Some(Self { token, key: key.clone(), effect: *effect, context: context.clone() })
    }
}

/// Puts the key where there is place for it.
fn put() -> KeyedWrites<Keyed, usize> {
    KeyedWrites::new(|request: &mut Keyed, key| request.key.replace(key.to_owned()).is_none())
}

type Told = Result<usize, CallError>;

/// Sends a write with a key to a server that does that with each; the keys that it got.
async fn send_keyed(
    layer: WriteSafetyLayer<Keyed, usize>,
    steps: impl IntoIterator<Item = (Duration, Told)>,
) -> (Told, Vec<Option<String>>) {
    let keys = Arc::new(Mutex::new(Vec::new()));
    let (seen, steps) = (Arc::clone(&keys), Mutex::new(steps.into_iter().collect::<VecDeque<_>>()));
    let steps = Arc::new(steps);
    let server = tower::service_fn(move |request: Keyed| {
        seen.lock().unwrap().push(request.key);
        let (after, answer) = steps.lock().unwrap().pop_front().expect("a write that nobody expected");
        async move {
            sleep(after).await;
            answer
        }
    });
    let client = ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(server);
    let told = client.oneshot(keyed("w")).await;
    let keys = keys.lock().unwrap().clone();
    (told, keys)
}

fn reset() -> (Duration, Told) {
    (Duration::ZERO, Err(CallError::ambiguous("reset")))
}

fn answers(after: u32, answer: Told) -> (Duration, Told) {
    (after * SECOND, answer)
}

#[tokio::test(start_paused = true)]
async fn h09_a_key_that_the_server_may_have_forgotten_is_no_fence() {
    type Layer = WriteSafetyLayer<Keyed, usize>;
    let absent = |doubt: InDoubt<Keyed, usize>| async move { Ok(doubt.not_landed_deduplicated(10 * SECOND)) };
    let by_layer: fn() -> Layer = || WriteSafetyLayer::refuse().keyed(put().honoured_for(10 * SECOND));
    let by_check = || WriteSafetyLayer::new(absent).keyed(put());
    let layers: [Box<dyn Fn() -> Layer>; 2] = [Box::new(by_layer), Box::new(by_check)];
    for layer in layers {
        for (doubt_at, asks_for, replays) in [(9, 0, true), (10, 0, false), (3, 6, true), (3, 30, false)] {
            // The connection breaks then, or a gateway gives up and asks to be left alone for so long.
            let unavailable = CallError::evidence(Evidence::Unavailable, "503");
            let first =
                if asks_for > 0 { unavailable.after(asks_for * SECOND) } else { reset().1.unwrap_err() };
            let (told, keys) = send_keyed(layer(), [answers(doubt_at, Err(first)), answers(0, Ok(1))]).await;
            let outcome = if replays { Ok(1) } else { Err(Outcome::Unknown) };
            assert_eq!(told.map_err(|error| error.outcome()), outcome, "{doubt_at} {asks_for}");
            assert_eq!(keys.len(), 1 + usize::from(replays), "{doubt_at} {asks_for}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h09_a_key_that_is_forgotten_while_the_ledger_grants_the_replay_is_no_fence() {
    for (claim_takes, replays) in [(8, true), (12, false)] {
        let database = Database(Arc::default(), claim_takes * SECOND);
        let layer = WriteSafetyLayer::refuse().keyed(put().honoured_for(10 * SECOND));
        let (told, keys) = send_keyed(layer.ledger(database.clone()), [reset(), answers(0, Ok(1))]).await;
        assert_eq!((told.is_ok(), keys.len()), (replays, 1 + usize::from(replays)));
        assert_eq!(database.only().state.is_closed(), replays);
    }
}

#[tokio::test(start_paused = true)]
async fn h09_a_keys_time_is_over_when_either_clock_says_so() {
    // What the wall clock has gone on by while the monotonic one counted a second: a laptop that slept, and one
    // whose clock was set back.
    for (wall, replays) in [(1, true), (9, true), (11, false), (86_400, false), (-1, false)] {
        let start = Instant::now();
        let layer = WriteSafetyLayer::refuse().keyed(put().honoured_for(10 * SECOND)).wall_clock(move || {
            let then = SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000);
            match (start.elapsed().is_zero(), wall) {
                (true, _) => then,
                (false, 0..) => then + Duration::from_secs(wall as u64),
                (false, ..0) => then - SECOND,
            }
        });
        let steps = [answers(1, Err(CallError::ambiguous("reset"))), answers(0, Ok(1))];
        let (told, keys) = send_keyed(layer, steps).await;
        assert_eq!((told.is_ok(), keys.len()), (replays, 1 + usize::from(replays)), "{wall}");
    }
}

#[tokio::test(start_paused = true)]
async fn h10_already_exists_in_answer_to_a_replay_is_no_plain_failure() {
    // A fence that is not true: the first attempt lands after the check, and the replay meets it.
    let shop = Shop::default();
    let layer = WriteSafetyLayer::new(look).quarantine(SECOND);
    let exists = Then::Fails(CallError::answered("already exists"));
    let client = shop.client(layer, [step(after(2), breaks()), step(NEVER, exists)]);
    let error = client.oneshot(write("w")).await.unwrap_err();
    assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Answered, true));
    assert!(!error.is_safe_to_repeat());
    assert_eq!((shop.events.doubts(), shop.in_the_end("w").await), (1, 1));

    // In answer to the only attempt it is the server's word and nothing else.
    let shop = Shop::default();
    let exists = Then::Fails(CallError::answered("already exists"));
    let client = shop.client(WriteSafetyLayer::new(look), [step(NEVER, exists)]);
    assert!(!client.oneshot(write("w")).await.unwrap_err().may_have_landed());
}

/// What this server's answers to a key say.
fn conflicts(answer: Result<&usize, &CallError>) -> Option<KeyedAnswer<usize>> {
    let text = answer.err()?.get_ref::<ServerSays>()?.0;
    match text {
        "already exists" => Some(KeyedAnswer::Landed(None)),
        "in progress" => Some(KeyedAnswer::InFlight { recheck_after: 5 * SECOND }),
        _ => None,
    }
}

#[derive(Debug, thiserror::Error)]
#[error("{0}")]
struct ServerSays(&'static str);

fn says(text: &'static str) -> (Duration, Told) {
    (Duration::ZERO, Err(CallError::answered(ServerSays(text))))
}

#[tokio::test(start_paused = true)]
async fn h10_a_conflict_with_our_own_key_is_what_the_mapping_says() {
    let layer = || {
        WriteSafetyLayer::<Keyed, usize>::refuse().keyed(put().honoured_for(60 * SECOND).answers(conflicts))
    };
    let (told, keys) = send_keyed(layer(), [reset(), says("already exists")]).await;
    let error = told.unwrap_err();
    assert_eq!((error.outcome(), keys.len()), (Outcome::DoneResultLost, 2));
    assert!(error.attempts().iter().all(|attempt| attempt.settled == Some(Settled::Landed)), "{error:?}");
    let (told, _) = send_keyed(layer().landed_with(|_| 7), [reset(), says("already exists")]).await;
    assert_eq!(told.unwrap(), 7);

    // Of what is still under way nobody knows without a check, and a check is asked when its time has come.
    let (told, keys) = send_keyed(layer(), [reset(), says("in progress")]).await;
    let error = told.unwrap_err();
    assert_eq!((error.outcome(), keys.len()), (Outcome::Unknown, 2));
    assert!(matches!(error.cause(), Cause::InProgress), "{error}");
    let start = Instant::now();
    let check = move |doubt: InDoubt<Keyed, usize>| async move {
        assert_eq!(start.elapsed(), 5 * SECOND);
        Ok(doubt.landed(8))
    };
    let checked = WriteSafetyLayer::new(check).keyed(put().honoured_for(60 * SECOND).answers(conflicts));
    // Not earlier, also where there is a look before the fence.
    let (told, _) = send_keyed(checked.look_first(), [reset(), says("in progress")]).await;
    assert_eq!(told.unwrap(), 8);

    // What the mapping does not know stays the server's word, and the first attempt may have landed.
    let (told, _) = send_keyed(layer(), [reset(), says("quota")]).await;
    let error = told.unwrap_err();
    assert_eq!((error.outcome(), error.may_have_landed()), (Outcome::Answered, true));
}

// ===== Over a pipe, whose bytes are counted =====

fn pay() -> jsonrpc::Request {
    jsonrpc::Request::new("pay", ["x".repeat(1_000)]).unwrap().as_effect(Effect::Write)
}

#[tokio::test(start_paused = true)]
async fn h11_not_sent_is_said_only_of_what_the_peer_cannot_have_got() {
    let frame = jsonrpc_frame().await;
    // How many bytes the server gets, and what is known of the write then: in general, and over a pipe that is
    // declared to give the peer what it accepted and nothing else.
    for (reads, in_general, exact) in [
        // Gone before it was begun.
        (0, Outcome::NotDone, Outcome::NotDone),
        (10, Outcome::Unknown, Outcome::NotDone),
        (frame - 2, Outcome::Unknown, Outcome::NotDone),
        // The last byte of the JSON is there: some servers run a line without its end.
        (frame - 1, Outcome::Unknown, Outcome::Unknown),
    ] {
        for (client, outcome) in
            [(jsonrpc::Client::builder(), in_general), (jsonrpc::Client::builder().exact_writes(), exact)]
        {
            // The pipe holds one byte, so that the server gets what was accepted.
            let (ours, mut theirs) = tokio::io::duplex(1);
            let client = WriteSafetyLayer::refuse().layer(client.connect(ours));
            let call = tokio::spawn(client.oneshot(pay()));
            let mut got = vec![0; reads];
            theirs.read_exact(&mut got).await.unwrap();
            drop(theirs);
            let error = call.await.unwrap().unwrap_err();
            assert_eq!(error.outcome(), outcome, "{reads} of {frame} bytes: {error}");
        }
    }
    // Of what still waits behind another one nothing was sent, over any stream.
    let (ours, theirs) = tokio::io::duplex(1);
    let client = WriteSafetyLayer::refuse().layer(jsonrpc::Client::new(ours));
    let first = tokio::spawn(client.clone().oneshot(pay()));
    sleep(SECOND).await;
    let second = tokio::spawn(client.oneshot(pay()));
    sleep(SECOND).await;
    drop(theirs);
    let outcomes = [first.await, second.await].map(|told| told.unwrap().unwrap_err().outcome());
    assert_eq!(outcomes, [Outcome::Unknown, Outcome::NotDone]);
}

/// How many bytes the request takes, its newline included.
async fn jsonrpc_frame() -> usize {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let call = tokio::spawn(jsonrpc::Client::new(ours).oneshot(pay()));
    let mut line = String::new();
    BufReader::new(theirs).read_line(&mut line).await.unwrap();
    call.abort();
    line.len()
}

#[tokio::test(start_paused = true)]
async fn h12_a_cancelled_attempt_can_still_land_and_is_unknown() {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let check = |doubt: InDoubt<jsonrpc::Request, jsonrpc::Response>| async move { Ok(doubt.not_landed()) };
    let client = ServiceBuilder::new()
        .layer(DeadlineLayer::new(10 * SECOND))
        .layer(WriteSafetyLayer::new(check).attempt_timeout(SECOND))
        .service(jsonrpc::Client::new(ours));
    let (read, mut write) = tokio::io::split(theirs);
    let (start, mut server) = (Instant::now(), BufReader::new(read).lines());
    let call = tokio::spawn(client.clone().oneshot(pay()));
    let request: serde_json::Value =
        serde_json::from_str(&server.next_line().await.unwrap().unwrap()).unwrap();

    // The attempt timed out at 1 s and the check found nothing; all the same it is neither cancelled then nor
    // sent again, but waited for.
    let cancel: serde_json::Value =
        serde_json::from_str(&server.next_line().await.unwrap().unwrap()).unwrap();
    assert_eq!(cancel["method"], "notifications/cancelled");
    assert_eq!(cancel["params"]["requestId"], request["id"]);
    assert_eq!(start.elapsed(), 10 * SECOND);
    let error = call.await.unwrap().unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    // A server that has done it meanwhile answers, to nobody: whoever was told "unknown" was told the truth.
    let reply = format!("{{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":1}}\n", request["id"]);
    write.write_all(reply.as_bytes()).await.unwrap();
    drop(client);
}

// ===== Attempts and time =====

#[tokio::test(start_paused = true)]
async fn h13_each_hand_over_to_the_service_below_is_an_attempt_in_the_report() {
    let ends: [fn() -> Then; 5] = [
        breaks,
        || Then::Fails(CallError::closed("closed")),
        || Then::Fails(CallError::not_processed("refused")),
        || Then::Fails(CallError::evidence(Evidence::TooManyRequests, "429")),
        || Then::Fails(CallError::answered("no")),
    ];
    for first in ends {
        for second in ends {
            let shop = Shop::default();
            let layer = WriteSafetyLayer::new(look).quarantine(SECOND).trust(Evidence::TooManyRequests);
            let client = shop.client(layer, [step(NEVER, first()), step(NEVER, second())]);
            let error = client.oneshot(write("w")).await.unwrap_err();
            assert_eq!(error.attempts().len(), shop.handed_over(), "{error}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h16_a_caller_that_goes_away_leaves_an_event_and_an_entry_in_doubt() {
    for layer in [WriteSafetyLayer::refuse(), WriteSafetyLayer::new(look).attempt_timeout(SECOND)] {
        for goes_after in [ms(1), 3 * SECOND] {
            let (shop, ledger) = (Shop::default(), MemoryLedger::new());
            let layer = layer.clone().ledger(ledger.clone());
            let client = shop.client(layer, [step(after(9), Then::Hangs)]);
            let mut call = write("w");
            let id = call.context_mut().assign_id();
            let gave_up = tokio::time::timeout(goes_after, client.oneshot(call)).await;
            assert!(gave_up.is_err());
            assert_eq!((shop.events.abandoned(), shop.events.doubts()), (1, 0));
            let [entry] = &ledger.in_doubt().await.unwrap()[..] else { panic!("not one entry") };
            assert_eq!((entry.id.call(), entry.method.as_str(), entry.attempts), (id, "buy", 1));
            assert_eq!(shop.in_the_end("w").await, 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h17_fence_check_and_replay_have_one_deadline_together() {
    for quarantine in [1, 20, 40, 58, 1_000] {
        let shop = Shop::default();
        let layer = WriteSafetyLayer::new(|doubt: Doubt| async move {
            sleep(8 * SECOND).await;
            Ok(doubt.not_landed())
        });
        let layer = layer.attempt_timeout(10 * SECOND).quarantine(quarantine * SECOND);
        let client = shop.client(layer, [step(NEVER, Then::Hangs), step(NEVER, Then::Hangs)]);
        let start = Instant::now();
        let error = client.oneshot(write("w")).await.unwrap_err();
        assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, 60 * SECOND));
        // What does not fit is not begun, and what is begun gets no more than what is left.
        let fits = quarantine <= 20;
        let deadlines = shop.writes.lock().unwrap().clone();
        assert_eq!(deadlines, vec![Some(start + 60 * SECOND); 1 + usize::from(fits)], "{quarantine}");
    }
}

#[tokio::test(start_paused = true)]
async fn h18_a_replay_is_the_same_call_with_the_same_key_in_another_message() {
    let (ours, theirs) = tokio::io::duplex(1 << 16);
    let keyed = KeyedWrites::meta("example.org/key").honoured_for(60 * SECOND);
    let client = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND))
        .layer(WriteSafetyLayer::<_, jsonrpc::Response>::refuse().keyed(keyed).attempt_timeout(SECOND))
        .service(jsonrpc::Client::new(ours));
    let (read, mut write) = tokio::io::split(theirs);
    let mut server = BufReader::new(read).lines();
    let pay = |amount: u32| {
        let request = jsonrpc::Request::new("pay", serde_json::json!({ "amount": amount })).unwrap();
        request.as_effect(Effect::Write)
    };
    let mut keys = Vec::new();
    for amount in [1, 2] {
        let call = tokio::spawn(client.clone().oneshot(pay(amount)));
        let mut messages: Vec<serde_json::Value> = Vec::new();
        while messages.len() < 2 {
            let message: serde_json::Value =
                serde_json::from_str(&server.next_line().await.unwrap().unwrap()).unwrap();
            messages.extend(Some(message).filter(|message| message["method"] == "pay"));
        }
        assert_eq!(messages[0]["params"], messages[1]["params"]);
        assert_ne!(messages[0]["id"], messages[1]["id"]);
        keys.push(messages[0]["params"]["_meta"]["example.org/key"].as_str().unwrap().to_owned());
        let reply = format!("{{\"jsonrpc\":\"2.0\",\"id\":{},\"result\":1}}\n", messages[1]["id"]);
        write.write_all(reply.as_bytes()).await.unwrap();
        assert!(call.await.unwrap().is_ok());
    }
    assert_ne!(keys[0], keys[1], "another call has another key");
}

#[tokio::test(start_paused = true)]
async fn h19_a_key_that_nobody_declared_to_be_honoured_allows_nothing() {
    let (told, keys) = send_keyed(WriteSafetyLayer::refuse().keyed(put()), [reset()]).await;
    assert_eq!(told.unwrap_err().outcome(), Outcome::Unknown);
    assert!(matches!(&keys[..], [Some(_)]));

    // Nor does one that there was no place for, though others would be honoured.
    let nowhere = KeyedWrites::new(|_: &mut Keyed, _| false).honoured_for(60 * SECOND);
    let (told, keys) = send_keyed(WriteSafetyLayer::refuse().keyed(nowhere), [reset()]).await;
    assert_eq!((told.unwrap_err().outcome(), keys), (Outcome::Unknown, vec![None]));

    // Declared, it is the same in both, and each copy is sent once.
    let keyed = put().honoured_for(60 * SECOND);
    let (told, keys) =
        send_keyed(WriteSafetyLayer::refuse().keyed(keyed), [reset(), answers(0, Ok(1))]).await;
    assert_eq!(told.unwrap(), 1);
    assert!(matches!(&keys[..], [Some(first), Some(second)] if first == second), "{keys:?}");
}

#[tokio::test(start_paused = true)]
async fn h20_an_answer_that_comes_while_the_doubt_is_settled_ends_it() {
    // It answers at 6 s: during the quarantine, and during a check that has found nothing.
    for quarantine in [20, 3] {
        let shop = Shop::default();
        let layer = WriteSafetyLayer::new(|doubt: Doubt| async move {
            let verdict = look(doubt).await;
            sleep(10 * SECOND).await;
            verdict
        });
        let layer = layer.attempt_timeout(SECOND).quarantine(quarantine * SECOND).check_timeout(20 * SECOND);
        let client = shop.client(layer, [step(after(6), Then::Answers)]);
        let start = Instant::now();
        assert_eq!(client.oneshot(write("w")).await.unwrap(), 1);
        assert_eq!((start.elapsed(), shop.handed_over()), (6 * SECOND, 1));
        let reason = "the attempt's own answer arrived";
        assert!(shop.events.raw().iter().any(|event| event["reason"] == reason));
    }
}

#[tokio::test(start_paused = true)]
async fn h21_a_write_is_not_replayed_over_a_later_one_and_a_later_one_not_sent_over_a_doubt() {
    for keyed in [false, true] {
        // W1 is lost. W2 goes out before anybody knows.
        let (shop, ledger) = (Shop::default(), MemoryLedger::new());
        let layer = WriteSafetyLayer::new(look).attempt_timeout(2 * SECOND).quarantine(5 * SECOND);
        let layer = layer.ledger(ledger.clone());
        let layer = if keyed { layer.conflict_key(|_: &Req| Some("account 7")) } else { layer };
        let steps = [step(NEVER, Then::Hangs), step(AT_ONCE, Then::Answers), step(AT_ONCE, Then::Answers)];
        let client = shop.client(layer, steps);
        let (first, (second, third)) = tokio::join!(client.clone().oneshot(write("W1")), async {
            sleep(SECOND).await;
            let second = client.clone().oneshot(write("W2")).await;
            sleep(2 * SECOND).await;
            (second, client.clone().oneshot(write("W3")).await)
        });
        assert_eq!(second.unwrap(), 1);
        let error = first.unwrap_err();
        assert!(notes(&error).contains("another write was handed over since"), "{error}");
        assert_eq!(shop.in_the_end("W1").await, 0);
        // By then W1 was in doubt: what touches it waits for that to be settled.
        match (keyed, third) {
            (false, third) => assert_eq!(third.unwrap(), 1),
            (true, third) => {
                let error = third.unwrap_err();
                assert!(matches!(error.cause(), Cause::Refused(Refusal::KeyInDoubt(_))), "{error}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn h21_a_key_stays_taken_after_the_call_until_the_doubt_is_settled() {
    let (shop, ledger) = (Shop::default(), MemoryLedger::new());
    let layer = WriteSafetyLayer::refuse().ledger(ledger.clone()).conflict_key(|_: &Req| Some("account 7"));
    let client = shop.client(layer, [step(after(9), breaks()), step(AT_ONCE, Then::Answers)]);
    let error = client.clone().oneshot(write("W1")).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    let error = client.clone().oneshot(write("W2")).await.unwrap_err();
    let [entry] = &ledger.in_doubt().await.unwrap()[..] else { panic!("not one entry") };
    assert!(matches!(error.cause(), Cause::Refused(Refusal::KeyInDoubt(id)) if *id == entry.id), "{error}");
    assert_eq!((error.outcome(), shop.handed_over()), (Outcome::NotDone, 1));

    ledger
        .settle(entry.id, entry.revision, State::Landed { by: "the bank's statement".into() })
        .await
        .unwrap();
    assert_eq!(client.oneshot(write("W2")).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn h22_an_outage_that_puts_many_writes_in_doubt_is_no_storm_of_probes() {
    const WRITES: usize = 300;
    let shop = Shop::default();
    let (now, most) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let counts = (Arc::clone(&now), Arc::clone(&most));
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        let (now, most) = (Arc::clone(&counts.0), Arc::clone(&counts.1));
        async move {
            most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            let found = doubt.probe(read("w")).await;
            sleep(SECOND).await;
            now.fetch_sub(1, Ordering::Relaxed);
            Ok(doubt.landed(found?))
        }
    });
    let client = shop.client(layer, (0..WRITES).map(|_| step(AT_ONCE, breaks())));
    let calls: Vec<_> = (0..WRITES).map(|_| tokio::spawn(client.clone().oneshot(write("w")))).collect();
    for call in calls {
        assert!(call.await.unwrap().is_ok());
    }
    assert_eq!((most.load(Ordering::Relaxed), shop.reads.load(Ordering::Relaxed)), (16, WRITES));
}
