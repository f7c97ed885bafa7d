//! What can go wrong when a write in doubt is settled: the hazards H1 to H22 of `docs/effect-check.md`, each
//! with its number. Where the layer guards against one, the test shows the guard; where only the caller can, it
//! shows what the wrong check costs next to the right one.
//!
//! H14 and H15 are in `tests/mcp.rs`. The server is a mock whose writes land when the test says, with tokio's
//! clock paused.

mod lab;

use std::{
    collections::VecDeque,
    future::pending,
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use goaround::{
    BoxError, Call, CallError, Cause, DeadlineLayer, Effect, Evidence, InDoubt, Outcome, Refusal,
    RetryReadOnly, Tagged, Verdict, WriteSafetyLayer, jsonrpc,
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
async fn h16_a_caller_that_goes_away_leaves_an_event() {
    for layer in [WriteSafetyLayer::refuse(), WriteSafetyLayer::new(look).attempt_timeout(SECOND)] {
        for goes_after in [ms(1), 3 * SECOND] {
            let shop = Shop::default();
            let client = shop.client(layer.clone(), [step(after(9), Then::Hangs)]);
            let gave_up = tokio::time::timeout(goes_after, client.oneshot(write("w"))).await;
            assert!(gave_up.is_err());
            assert_eq!((shop.events.abandoned(), shop.events.doubts()), (1, 0));
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
