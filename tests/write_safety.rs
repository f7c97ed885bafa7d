//! Writes in doubt, over a scripted server, with tokio's clock paused.

mod lab;

use std::{
    future::{Future, pending, poll_fn, ready},
    pin::pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
    task::Poll,
    time::Duration,
};

use goaround::{
    Call, CallContext, CallError, Cause, Deadline, DeadlineLayer, DeadlineService, Delivery, Effect,
    Evidence, Exit, Fence, FenceBasis, Outcome, ReconnectLayer, Refusal, RetryReadOnly, Settled, Stack,
    Tagged, Verdict, VerdictKind, WriteSafety, WriteSafetyLayer, write_safety::ledger::Ledger,
};
use lab::*;
use tokio::{
    sync::oneshot,
    task::coop::consume_budget,
    time::{Instant, advance, sleep},
};
use tokio_test::{assert_pending, assert_ready_err, assert_ready_ok, task};
use tower::{
    Layer, Service, ServiceBuilder, ServiceExt, limit::GlobalConcurrencyLimitLayer, service_fn,
    util::BoxCloneService,
};

type Safety = WriteSafetyLayer<Req, Res>;

/// Deadline and write safety alone, over one connection.
fn service(lab: &Lab, layer: Safety) -> DeadlineService<WriteSafety<Connection, Req, Res>> {
    ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(layer)
        .service(lab.connection())
}

fn stack(lab: &Lab, layer: Safety) -> Stack<Connector, Req, Res> {
    let builder = Stack::builder(lab.connector()).deadline(60 * SECOND).writes(layer);
    builder.on_event(lab.events.sink()).build().unwrap()
}

/// A check that notes itself and says that.
fn says(lab: &Lab, verdict: impl Fn(&Doubt) -> Verdict<Res> + Send + Sync + 'static) -> Safety {
    let (log, verdict) = (lab.log.clone(), Arc::new(verdict));
    WriteSafetyLayer::new(move |doubt: Doubt| {
        log.note("check");
        let verdict = Arc::clone(&verdict);
        async move { Ok(verdict(&doubt)) }
    })
}

/// A check that probes first.
fn probes(lab: &Lab, verdict: impl Fn(&Doubt) -> Verdict<Res> + Send + Sync + 'static) -> Safety {
    let (log, verdict) = (lab.log.clone(), Arc::new(verdict));
    WriteSafetyLayer::new(move |doubt: Doubt| {
        log.note("check");
        let verdict = Arc::clone(&verdict);
        async move {
            doubt.probe(read()).await?;
            Ok(verdict(&doubt))
        }
    })
}

fn because(doubt: &Doubt) -> Verdict<Res> {
    doubt.not_landed_because("tested")
}

fn notes(error: &CallError) -> String {
    error.notes().collect::<Vec<_>>().join(" | ")
}

fn fences(error: &CallError) -> Vec<Option<FenceBasis>> {
    let of = |attempt: &goaround::Attempt| match &attempt.settled {
        Some(Settled::NotLanded(fence)) => Some(fence.basis()),
        _ => None,
    };
    error.attempts().iter().map(of).collect()
}

fn ambiguous() -> CallError {
    CallError::ambiguous("reset")
}

// ===== No check =====

#[tokio::test(start_paused = true)]
async fn without_a_check_a_write_in_doubt_is_unknown_with_the_evidence() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let error = stack(&lab, WriteSafetyLayer::refuse()).send(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
    assert_eq!((error.method(), error.effect(), error.attempts().len()), ("pay", Effect::Write, 1));
    assert_eq!(error.closure().unwrap().generation(), Some(1));
    assert_eq!((error.attempts()[0].generation, error.attempts()[0].cause), (Some(1), "closed"));
    assert_eq!(notes(&error), "no effect check");
    assert!(error.to_string().starts_with("outcome UNKNOWN: pay: "), "{error}");
    let reason = Some("no effect check".to_owned());
    let doubt = Seen::InDoubt { verdict: None, reason, replayed: false, outcome: Some(Outcome::Unknown) };
    assert_eq!(lab.events.all(), [doubt]);
}

#[tokio::test(start_paused = true)]
async fn without_a_check_a_slow_write_is_waited_for_until_the_deadline() {
    for layer in [WriteSafetyLayer::refuse(), WriteSafetyLayer::refuse().attempt_timeout(SECOND)] {
        let lab = Lab::new();
        lab.write(later(59 * SECOND, Ok(1)));
        assert_eq!(service(&lab, layer.clone()).oneshot(write()).await.unwrap(), 1);
        assert_eq!(lab.events.all(), []);

        let lab = Lab::new();
        lab.write(hang());
        let start = Instant::now();
        let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, 60 * SECOND));
        assert!(matches!(error.cause(), Cause::Deadline));
        assert_eq!((notes(&error).as_str(), lab.events.doubts()), ("no effect check", 1));
    }
}

#[tokio::test(start_paused = true)]
async fn a_plain_success_or_answer_is_not_an_event() {
    let lab = Lab::new();
    lab.write(answer(1)).write(fail(CallError::answered("quota"))).write(fail(CallError::not_sent("x")));
    let service = service(&lab, says(&lab, because));
    assert_eq!(service.clone().oneshot(write()).await.unwrap(), 1);
    assert_eq!(service.clone().oneshot(write()).await.unwrap_err().outcome(), Outcome::Answered);
    assert_eq!(service.oneshot(write()).await.unwrap_err().outcome(), Outcome::NotDone);
    assert_eq!(lab.events.all(), []);
}

// ===== Verdicts =====

#[tokio::test(start_paused = true)]
async fn landed_gives_the_response_of_the_check_or_of_landed_with_or_says_that_the_result_is_lost() {
    for pending in [false, true] {
        let first = || if pending { hang() } else { fail(closed()) };
        let with = |doubt: &Doubt| doubt.landed(7);
        let without = |doubt: &Doubt| doubt.landed_without_result();

        let lab = Lab::new();
        lab.write(first());
        let layer = says(&lab, with).landed_with(|_| 8);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 7);
        // One attempt: no call report, whatever the check found.
        assert_eq!((lab.events.doubts(), lab.events.calls()), (1, 0), "{:?}", lab.events.all());
        let raw = &lab.events.raw()[0];
        assert_eq!(raw["attempts"].as_array().unwrap().len(), 1, "{raw}");
        assert_eq!((&raw["attempts"][0]["settled"], &raw["verdict"]), (&"landed".into(), &"landed".into()));

        let lab = Lab::new();
        lab.write(first());
        let layer = says(&lab, without).landed_with(|request| u32::from(**request == "w") + 8);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 9);

        let lab = Lab::new();
        lab.write(first());
        let error = service(&lab, says(&lab, without)).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), error.attempts().len()), (Outcome::DoneResultLost, 1));
        assert_eq!(error.attempts()[0].settled, Some(Settled::Landed));
        assert!(error.to_string().starts_with("DONE, result lost: pay: "), "{error}");
        assert!(error.may_have_landed() && !error.is_safe_to_repeat());
        let outcome = Some(Outcome::DoneResultLost);
        let verdict = Some(VerdictKind::Landed);
        assert!(matches!(&lab.events.all()[..], [Seen::InDoubt { verdict: v, outcome: o, .. }]
            if (*v, *o) == (verdict, outcome)));
    }
}

#[tokio::test(start_paused = true)]
async fn a_process_that_is_gone_is_an_observed_fence_and_gives_one_replay() {
    let lab = Lab::new();
    lab.write(fail(exits(2 * SECOND, true).exit_ends_effects())).write(later(SECOND, Ok(2)));
    let layer = probes(&lab, |doubt| {
        assert_eq!(doubt.fence().unwrap().basis(), FenceBasis::Observed);
        assert_eq!(doubt.closure().unwrap().generation(), Some(1));
        assert_eq!((doubt.attempts().len(), **doubt.request()), (1, "w"));
        doubt.not_landed()
    });
    assert_eq!(stack(&lab, layer).send(write()).await.unwrap(), 2);
    // The old process is gone before the next one starts, and the check begins after that.
    let order = ["0 connect", "0 write", "2000 check", "2000 connect", "2000 read", "2000 write"];
    assert_eq!(lab.log.timed(), order);
    let verdict = Some(VerdictKind::NotLanded);
    assert_eq!(
        lab.events.all(),
        [
            Seen::InDoubt { verdict, reason: None, replayed: true, outcome: None },
            Seen::Call { attempts: 2, outcome: None },
        ]
    );
    let raw = lab.events.raw().into_iter().find(|event| event["event"] == "in_doubt").unwrap();
    assert_eq!(
        (&raw["fence"]["fence"], &raw["fence"]["basis"]),
        (&"process_gone".into(), &"observed".into())
    );
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_is_a_declared_fence_and_gives_one_replay() {
    let lab = Lab::new();
    lab.write(fail(ambiguous())).write(fail(ambiguous()));
    let layer = says(&lab, |doubt| {
        assert_eq!(doubt.fence().unwrap().basis(), FenceBasis::Declared);
        doubt.not_landed()
    });
    let error = service(&lab, layer.quarantine(5 * SECOND)).oneshot(write()).await.unwrap_err();
    // The replay is in doubt in its turn: waited out anew, checked for the report, not replayed.
    assert_eq!(lab.log.timed(), ["0 write", "5000 check", "5000 write", "10000 check"]);
    assert_eq!((error.outcome(), error.attempts().len()), (Outcome::NotDone, 2));
    assert_eq!(fences(&error), [Some(FenceBasis::Declared); 2]);
    assert_eq!(notes(&error), "not replayed a second time");
    assert_eq!((lab.events.doubts(), lab.events.calls()), (1, 1));
}

#[cfg(unix)]
#[tokio::test(start_paused = true)]
async fn no_quarantine_holds_while_the_old_process_cannot_be_killed() {
    // Known before the quarantine is over, and only by the probe's connect, which waits for it.
    for exit in [SECOND, 8 * SECOND] {
        for ends_effects in [false, true] {
            let lab = Lab::new();
            let closed = exits(exit, false);
            lab.write(fail(if ends_effects { closed.exit_ends_effects() } else { closed }));
            let layer = probes(&lab, |doubt| doubt.not_landed()).quarantine(5 * SECOND);
            let error = stack(&lab, layer).send(write()).await.unwrap_err();
            assert_eq!(error.outcome(), Outcome::Unknown);
            assert_eq!(notes(&error), "absent, but the old process is still there, so that no fence holds");
            assert_eq!(lab.log.timed().iter().filter(|line| line.ends_with("write")).count(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_reason_of_the_callers_own_is_a_declared_fence_and_is_named() {
    let lab = Lab::new();
    lab.write(fail(ambiguous())).write(fail(CallError::not_processed("x")));
    let layer = says(&lab, |doubt| doubt.not_landed_because("compare-and-set on revision 7"));
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 2));
    assert_eq!(fences(&error), [Some(FenceBasis::Declared), None]);
    let Some(Settled::NotLanded(fence)) = &error.attempts()[0].settled else { panic!() };
    assert_eq!(fence.to_string(), "declared: compare-and-set on revision 7");
    let raw = &lab.events.raw()[0];
    assert_eq!(raw["fence"]["why"], "compare-and-set on revision 7");
}

#[tokio::test(start_paused = true)]
async fn an_ambiguous_replay_is_checked_for_the_report_only() {
    type Says = fn(&Doubt) -> Verdict<Res>;
    let second: [(Says, Result<u32, Outcome>); 5] = [
        (|doubt| doubt.landed(7), Ok(7)),
        (|doubt| doubt.landed_without_result(), Err(Outcome::DoneResultLost)),
        (because, Err(Outcome::NotDone)),
        (|doubt| doubt.not_landed(), Err(Outcome::Unknown)),
        (|doubt| doubt.unknown("who knows"), Err(Outcome::Unknown)),
    ];
    for (second, expected) in second {
        for replay in [ambiguous as fn() -> CallError, closed] {
            let lab = Lab::new();
            lab.write(fail(ambiguous())).write(fail(replay()));
            let checks = AtomicU32::new(0);
            let layer = says(&lab, move |doubt| match checks.fetch_add(1, Ordering::Relaxed) {
                0 => because(doubt),
                1 => second(doubt),
                _ => panic!("a third check"),
            });
            let result = service(&lab, layer.independent_writes()).oneshot(write()).await;
            assert_eq!(result.map_err(|error| error.outcome()), expected);
            assert_eq!(lab.log.all(), ["write", "check", "write", "check"]);
            assert_eq!(lab.events.doubts(), 1);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_fails_harmlessly_or_is_answered_is_returned() {
    for (error, outcome, may) in [
        (CallError::not_sent("x"), Outcome::NotDone, false),
        (CallError::not_processed("x"), Outcome::NotDone, false),
        (CallError::evidence(Evidence::TooManyRequests, "x"), Outcome::NotDone, false),
        (CallError::answered("exists"), Outcome::Answered, true),
    ] {
        let lab = Lab::new();
        lab.write(fail(ambiguous())).write(fail(error));
        let error = service(&lab, says(&lab, because)).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), error.may_have_landed()), (outcome, may));
        assert_eq!((error.attempts().len(), lab.writes(), lab.log.count("check")), (2, 2, 1));
        assert_eq!(lab.events.doubts(), 1);
    }
}

// ===== Fences =====

#[tokio::test(start_paused = true)]
async fn not_landed_without_a_fence_is_unknown_and_names_the_options() {
    let never = || exits(Duration::MAX, true).exit_ends_effects();
    for (error, quarantine, named) in [
        (ambiguous(), None, &["quarantine(..)", "not_landed_because(..)"][..]),
        (closed(), None, &["exit_ends_effects()", "quarantine(..)", "not_landed_because(..)"]),
        (exits(SECOND, true), None, &["exit_ends_effects()", "quarantine(..)"]),
        (exits(SECOND, false).exit_ends_effects(), None, &["not known to be gone", "quarantine(..)"]),
        (never(), None, &["not known to be gone"]),
        (ambiguous(), Some(59 * SECOND), &["the quarantine does not fit"]),
        (never(), Some(Duration::MAX), &["the quarantine does not fit"]),
    ] {
        let lab = Lab::new();
        lab.write(fail(error));
        let mut layer = says(&lab, |doubt| {
            assert_eq!(doubt.fence(), None);
            doubt.not_landed()
        });
        if let Some(quarantine) = quarantine {
            layer = layer.quarantine(quarantine);
        }
        let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
        let notes = notes(&error);
        assert!(named.iter().all(|named| notes.contains(named)), "{notes}");
        let Seen::InDoubt { verdict, reason, .. } = &lab.events.all()[0] else { panic!() };
        assert_eq!((*verdict, reason.as_deref()), (Some(VerdictKind::Unknown), Some(notes.as_str())));
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_on_a_connection_that_is_older_than_the_process_end_proves_nothing() {
    // The process takes longer to end than the reconnect waits for it: the next one is started meanwhile.
    let lab = Lab::new();
    lab.write(fail(exits(15 * SECOND, true).exit_ends_effects()));
    let stack = stack(&lab, probes(&lab, |doubt| doubt.not_landed()));
    let other = stack.clone();
    let (error, _) = tokio::join!(stack.send(write()), async {
        sleep(SECOND).await;
        other.send(read()).await.unwrap();
    });
    let error = error.unwrap_err();
    let order = ["0 connect", "0 write", "11000 connect", "11000 read", "15000 check", "15000 read"];
    assert_eq!(lab.log.timed(), order);
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(notes(&error), "a probe ran on a connection that is older than the fence");

    // Its age counts from the beginning of its connect, since what the new server saw may be as old as that: here the
    // old process ends just after it began, and just before it is done.
    for gone_at in [11_001, 15_999] {
        let lab = Lab::new();
        lab.connect(Connect::Ok).connect(Connect::After(5 * SECOND));
        lab.write(fail(exits(Duration::from_millis(gone_at), true).exit_ends_effects()));
        let stack = self::stack(&lab, probes(&lab, |doubt| doubt.not_landed()));
        let other = stack.clone();
        let (error, read) = tokio::join!(stack.send(write()), async {
            sleep(SECOND).await;
            other.send(read()).await
        });
        read.unwrap();
        let error = error.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1), "{gone_at}");
        assert_eq!(notes(&error), "a probe ran on a connection that is older than the fence");
    }

    // And so does one on a connection of which nobody knows how old it is.
    let lab = Lab::new();
    lab.write(fail(exits(SECOND, true).exit_ends_effects()));
    let layer = probes(&lab, |doubt| doubt.not_landed());
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));

    // What it finds, it finds all the same.
    let lab = Lab::new();
    lab.write(fail(exits(SECOND, true).exit_ends_effects()));
    let layer = probes(&lab, |doubt| doubt.landed(1));
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_fence_holds_for_its_own_call_and_its_own_attempt_only() {
    // Another call's.
    let lab = Lab::new();
    lab.write(fail(ambiguous())).write(answer(1)).write(fail(ambiguous()));
    let kept: Arc<Mutex<Option<Fence>>> = Arc::default();
    let layer = says(&lab, move |doubt| {
        let mut kept = kept.lock().unwrap();
        if let Some(fence) = &*kept {
            return Verdict::NotLanded(fence.clone());
        }
        let Verdict::NotLanded(fence) = because(doubt) else { panic!() };
        Verdict::NotLanded(kept.insert(fence).clone())
    });
    let service_ = service(&lab, layer);
    assert_eq!(service_.clone().oneshot(write()).await.unwrap(), 1);
    let error = service_.oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 3));
    assert_eq!(notes(&error), "the check named a fence of another call");

    // The first attempt's, of which the replay knows nothing.
    let lab = Lab::new();
    lab.write(fail(exits(SECOND, true).exit_ends_effects())).write(fail(ambiguous()));
    let kept: Arc<Mutex<Option<Fence>>> = Arc::default();
    let layer = says(&lab, move |doubt| {
        let mut kept = kept.lock().unwrap();
        Verdict::NotLanded(kept.get_or_insert_with(|| doubt.fence().unwrap().clone()).clone())
    });
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 2));
    assert_eq!(notes(&error), "the check named a fence that did not hold when it began");
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_counts_from_the_last_byte_that_a_connection_marks() {
    for (what, step, check_at) in [
        // Marked at 1 s, timed out at 4 s, or closed at 3 s.
        ("marked, timed out", marked(SECOND, 40 * SECOND, Ok(9)), 11_000),
        ("marked, ended", marked(SECOND, 3 * SECOND, Err(closed())), 11_000),
        ("marked long before its end", marked(SECOND, 3 * SECOND, Err(closed())), 11_000),
        // Marks nothing: from the attempt timeout, or from the end where that came first.
        ("unmarked, timed out", hang(), 14_000),
        ("unmarked, timed out and then ended", later(6 * SECOND, Err(closed())), 14_000),
        ("unmarked, ended", later(3 * SECOND, Err(closed())), 13_000),
        // Adopted and never sent to its end: from its end.
        ("half written, ended", marked(40 * SECOND, 3 * SECOND, Err(closed())), 13_000),
        ("half written, timed out, ended", marked(40 * SECOND, 7 * SECOND, Err(closed())), 17_000),
    ] {
        let lab = Lab::new();
        lab.write(step).write(answer(2));
        let layer = says(&lab, |doubt| doubt.not_landed());
        let layer = layer.quarantine(10 * SECOND).attempt_timeout(4 * SECOND);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        let order = ["0 write".into(), format!("{check_at} check"), format!("{check_at} write")];
        assert_eq!(lab.log.timed(), order, "{what}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_that_is_over_when_the_doubt_arises_holds_at_once() {
    let lab = Lab::new();
    lab.write(marked(Duration::ZERO, 30 * SECOND, Err(closed()))).write(answer(2));
    let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(10 * SECOND).attempt_timeout(50 * SECOND);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "30000 check", "30000 write"]);
}

#[tokio::test(start_paused = true)]
async fn a_quarantine_that_does_not_fit_is_not_waited_for() {
    for (verdict, expected) in [
        ((|doubt: &Doubt| doubt.landed(7)) as fn(&Doubt) -> Verdict<Res>, Ok(7)),
        (|doubt| doubt.not_landed(), Err(Outcome::Unknown)),
    ] {
        let lab = Lab::new();
        lab.write(fail(closed()));
        let layer = says(&lab, verdict).quarantine(61 * SECOND);
        let result = service(&lab, layer).oneshot(write()).await;
        assert_eq!(result.map_err(|error| error.outcome()), expected);
        assert_eq!(lab.log.timed(), ["0 write", "0 check"]);
    }
    // One that fits is, under any deadline, and also under none.
    for (deadline, quarantine) in [(60, 50), (1_000, 800)] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2));
        let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(quarantine * SECOND);
        let call = write().within(Duration::from_secs(deadline));
        assert_eq!(service(&lab, layer).oneshot(call).await.unwrap(), 2);
        assert_eq!(lab.log.timed()[1], format!("{}000 check", quarantine));
    }
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(900 * SECOND);
    assert_eq!(service(&lab, layer).oneshot(write().deadline(Deadline::Never)).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "900000 check", "900000 write"]);
}

#[tokio::test(start_paused = true)]
async fn the_process_end_is_waited_for_beside_a_quarantine_and_whichever_holds_first_counts() {
    for (exit, quarantine, check_at) in [(3, 8, 3), (8, 3, 3), (8, 100, 8), (100, 3, 3)] {
        let lab = Lab::new();
        lab.write(fail(exits(exit * SECOND, true).exit_ends_effects())).write(answer(2));
        let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(quarantine * SECOND);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        assert_eq!(lab.log.timed()[1], format!("{check_at}000 check"));
    }
}

#[tokio::test(start_paused = true)]
async fn the_end_of_another_process_of_the_same_connection_is_no_fence_for_a_write_that_has_its_own() {
    // Two processes behind one connection. "a" ends at once with its process; "b" loses its pipe, while its process
    // goes on, lands the write at 20 s and ends at 30 s. Each error says the truth of its own process.
    let lab = Lab::new();
    let landed = Arc::new(AtomicU32::new(0));
    let server = Arc::clone(&landed);
    let connection = service_fn(move |call: Req| -> Answer {
        let server = server.clone();
        Box::pin(async move {
            match *call {
                "a" => {
                    sleep(SECOND).await;
                    Err(exits(Duration::ZERO, true).exit_ends_effects())
                }
                "b" => {
                    tokio::spawn(async move {
                        sleep(20 * SECOND).await;
                        server.fetch_add(1, Ordering::SeqCst);
                    });
                    sleep(2 * SECOND).await;
                    Err(exits(28 * SECOND, true).exit_ends_effects())
                }
                _ => Ok(server.load(Ordering::SeqCst)),
            }
        })
    });
    let connector = service_fn(move |()| ready(Ok::<_, CallError>(connection.clone())));
    let check = |doubt: Doubt| async move {
        if **doubt.request() == "a" {
            return Ok(doubt.unknown("not this one"));
        }
        Ok(match doubt.probe(read()).await? {
            0 => doubt.not_landed(),
            _ => doubt.landed(7),
        })
    };
    let writes = Safety::new(check).independent_writes();
    let stack =
        Stack::builder(connector).deadline(120 * SECOND).writes(writes).on_event(lab.events.sink()).build();
    let stack = Arc::new(stack.unwrap());
    let [a, b] = ["a", "b"].map(|which| {
        let stack = stack.clone();
        tokio::spawn(async move { stack.send(Tagged::new(which, Effect::Write)).await })
    });
    let (_, b) = (a.await.unwrap(), b.await.unwrap());
    sleep(120 * SECOND).await;
    assert_eq!(landed.load(Ordering::SeqCst), 1, "landed twice: {b:?}; {:?}", lab.events.raw());
}

#[tokio::test(start_paused = true)]
async fn the_exit_that_comes_with_one_calls_error_is_no_fence_for_another_call_but_may_keep_one_from_holding()
{
    // Both calls lose the connection; only the first one's error tells of a process, which is gone, or not.
    for (second, gone) in [(closed(), true), (ambiguous().connection_lost(), true), (closed(), false)] {
        let lab = Lab::new();
        lab.write(later(SECOND, Err(exits(Duration::ZERO, gone).exit_ends_effects())));
        lab.write(later(2 * SECOND, Err(second)));
        let layer = says(&lab, |doubt| match **doubt.request() {
            "first" => doubt.unknown("not this one"),
            _ => doubt.not_landed(),
        });
        let layer = layer.independent_writes();
        let layer = if gone { layer } else { layer.quarantine(SECOND) };
        let stack = Arc::new(stack(&lab, layer));
        let [first, second] = ["first", "second"].map(|which| {
            let stack = Arc::clone(&stack);
            tokio::spawn(async move { stack.send(Tagged::new(which, Effect::Write)).await })
        });
        let (_, second) = (first.await.unwrap(), second.await.unwrap());
        assert_eq!((second.unwrap_err().outcome(), lab.writes()), (Outcome::Unknown, 2));
    }
}

// ===== A first look =====

/// A check that answers its first question so, and the later ones so.
fn looks(lab: &Lab, first: fn(&Doubt) -> Verdict<Res>, later: fn(&Doubt) -> Verdict<Res>) -> Safety {
    let asked = AtomicU32::new(0);
    says(lab, move |doubt| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => first(doubt),
        _ => later(doubt),
    })
    .look_first()
}

#[tokio::test(start_paused = true)]
async fn a_first_look_finds_at_once_that_a_write_landed() {
    for pending in [false, true] {
        let lab = Lab::new();
        lab.write(if pending { hang() } else { fail(closed()) });
        let layer = looks(&lab, |doubt| doubt.landed(7), because);
        let layer = layer.attempt_timeout(SECOND).quarantine(15 * SECOND);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 7);
        let at = if pending { 1_050 } else { 50 };
        assert_eq!(lab.log.timed(), ["0 write".into(), format!("{at} check")]);
        assert_eq!(lab.events.doubts(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_first_look_that_finds_nothing_leads_to_nothing() {
    for first in [
        (|doubt: &Doubt| doubt.not_landed()) as fn(&Doubt) -> Verdict<Res>,
        // Nor one that has a fence of its own, nor one that breaks.
        because,
        |doubt| doubt.not_landed_conditional(),
        |doubt| doubt.unknown("what"),
        |doubt| doubt.in_flight(Duration::ZERO),
        |_| panic!("a check"),
    ] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2));
        let layer = looks(&lab, first, |doubt| doubt.not_landed()).quarantine(15 * SECOND);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        assert_eq!(lab.log.timed(), ["0 write", "50 check", "15000 check", "15000 write"]);
    }
    // And what it finds absent is no reason for a replay where there is no fence at all.
    let lab = Lab::new();
    lab.write(fail(closed()));
    let layer = looks(&lab, |doubt| doubt.not_landed(), |doubt| doubt.not_landed());
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
}

#[tokio::test(start_paused = true)]
async fn there_is_no_first_look_where_a_fence_holds_soon() {
    let soon = || fail(exits(ms(20), true).exit_ends_effects());
    for (first, at) in [(soon(), 20), (fail(closed()), 30)] {
        let lab = Lab::new();
        lab.write(first).write(answer(2));
        let layer = looks(&lab, |doubt| doubt.not_landed(), because).quarantine(ms(30));
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        assert_eq!(lab.log.timed(), ["0 write".into(), format!("{at} check"), format!("{at} write")]);
    }
}

#[tokio::test(start_paused = true)]
async fn there_is_no_first_look_where_the_servers_answer_asked_for_a_pause() {
    for (pause, looks_at) in [(4 * SECOND, None), (Duration::ZERO, Some("50 check"))] {
        let lab = Lab::new();
        lab.write(fail(ambiguous().after(pause))).write(answer(2));
        let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(5 * SECOND).look_first();
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        let order = [Some("0 write"), looks_at, Some("5000 check"), Some("5000 write")];
        assert_eq!(lab.log.timed(), order.into_iter().flatten().collect::<Vec<_>>());
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_first_look_finds_in_part_is_not_replayed() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let layer = looks(&lab, |doubt| doubt.partial(), |doubt| doubt.not_landed()).quarantine(15 * SECOND);
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
}

#[tokio::test(start_paused = true)]
async fn a_first_look_that_hangs_holds_nothing_up() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let (log, asked) = (lab.log.clone(), Arc::new(AtomicU32::new(0)));
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        let first = asked.fetch_add(1, Ordering::Relaxed) == 0;
        log.note("check");
        async move {
            if first {
                std::future::pending::<()>().await;
            }
            Ok(doubt.not_landed())
        }
    });
    let layer = layer.check_timeout(10 * SECOND).max_checks(1).quarantine(5 * SECOND).look_first();
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "50 check", "5000 check", "5000 write"]);
}

#[tokio::test(start_paused = true)]
async fn a_first_look_gives_way_to_the_check_of_another_write() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(fail(closed())).write(answer(2)).write(answer(3));
    let log = lab.log.clone();
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        let looks = doubt.fence().is_none();
        log.note(if looks { "look" } else { "check" });
        async move {
            if looks {
                std::future::pending::<()>().await;
            }
            Ok(doubt.not_landed())
        }
    });
    let layer = layer.check_timeout(10 * SECOND).max_checks(1).independent_writes();
    let service = service(&lab, layer.quarantine(5 * SECOND).look_first());
    let first = tokio::spawn(service.clone().oneshot(write()));
    sleep(4 * SECOND).await;
    assert_eq!(service.oneshot(write()).await.unwrap(), 3);
    assert_eq!(first.await.unwrap().unwrap(), 2);
    let order = ["0 write", "50 look", "4000 write", "5000 check", "5000 write", "9000 check", "9000 write"];
    assert_eq!(lab.log.timed(), order);
}

#[tokio::test(start_paused = true)]
async fn a_first_look_that_waits_for_the_next_process_leaves_the_check_after_it_as_good() {
    let lab = Lab::new();
    lab.write(fail(exits(2 * SECOND, true).exit_ends_effects())).write(answer(2));
    let layer = probes(&lab, |doubt| doubt.not_landed()).look_first();
    assert_eq!(stack(&lab, layer).send(write()).await.unwrap(), 2);
    let order = ["0 connect", "0 write", "50 check", "2000 check", "2000 connect", "2000 read", "2000 write"];
    assert_eq!(lab.log.timed(), order);
}

#[tokio::test(start_paused = true)]
async fn a_first_look_that_panics_when_it_is_dropped_harms_nobody() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            panic!("a check");
        }
    }
    for pending in [false, true] {
        let lab = Lab::new();
        lab.write(if pending { hang() } else { fail(closed()) });
        let layer = WriteSafetyLayer::new(|doubt: Doubt| {
            let bomb = Bomb;
            async move {
                let _bomb = bomb;
                std::future::pending::<()>().await;
                Ok(doubt.not_landed())
            }
        });
        let layer = layer.attempt_timeout(SECOND).quarantine(5 * SECOND).look_first();
        let service = service(&lab, layer);
        let ledger = service.get_ref().ledger();
        let error = service.oneshot(write()).await.unwrap_err();
        assert_eq!(error.outcome(), Outcome::Unknown);
        assert_eq!((lab.events.doubts(), lab.events.abandoned(), lab.writes()), (1, 0, 1));
        assert_eq!(ledger.in_doubt().await.unwrap().len(), 1);
    }
}

// ===== The attempt timeout =====

/// A write whose answer the test sends.
fn held(lab: &Lab) -> oneshot::Sender<Result<Res, CallError>> {
    let (send, receive) = oneshot::channel();
    lab.write(on(receive));
    send
}

#[tokio::test(start_paused = true)]
async fn a_late_answer_wins_in_each_phase_and_no_replay_starts() {
    for answer in [Ok(9), Err(Outcome::Answered)] {
        for phase in ["attempt", "fence", "permit", "check", "recheck", "way", "inconclusive", "unsent"] {
            let lab = Lab::new();
            let late = held(&lab);
            let log = lab.log.clone();
            let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
                log.note("check");
                async move {
                    match phase {
                        "permit" | "check" => pending().await,
                        "recheck" => Ok(doubt.in_flight(20 * SECOND)),
                        "inconclusive" => Ok(doubt.not_landed()),
                        _ => Ok(because(&doubt)),
                    }
                }
            });
            let layer = layer.attempt_timeout(SECOND).check_timeout(40 * SECOND).max_checks(1);
            let layer = if phase == "fence" { layer.quarantine(20 * SECOND) } else { layer };
            let mut service = ServiceBuilder::new()
                .layer(DeadlineLayer::new(60 * SECOND))
                .layer(layer.on_event(lab.events.sink()))
                .service(lab.gated());
            lab.gate(true);
            let mut other = None;
            if phase == "permit" {
                lab.writes.lock().unwrap().push_front(fail(ambiguous()));
                let mut call = task::spawn(service.ready().await.unwrap().call(write()));
                assert_pending!(call.poll());
                other = Some(call);
            }
            let mut call = task::spawn(service.ready().await.unwrap().call(write()));
            assert_pending!(call.poll());
            lab.gate(false);
            if phase != "attempt" {
                advance(SECOND).await;
                assert!(call.is_woken());
                assert_pending!(call.poll());
            }
            let checks = lab.log.count("check");
            assert_eq!(checks, usize::from(!matches!(phase, "attempt" | "fence")), "{phase}");

            let sent = match answer {
                Ok(response) => Ok(response),
                Err(_) => Err(CallError::answered("quota")),
            };
            late.send(sent).unwrap();
            assert!(call.is_woken(), "{phase}");
            lab.gate(true); // As late as it can be: the way is free too.
            let std::task::Poll::Ready(result) = call.poll() else { panic!("{phase}") };
            if let Err(error) = &result {
                assert_eq!((error.attempts().len(), error.may_have_landed()), (1, false), "{phase}");
            }
            assert_eq!(result.map_err(|error| error.outcome()), answer, "{phase}");
            assert_eq!(lab.writes(), 1 + usize::from(phase == "permit"), "{phase}");
            drop(other);
            if phase == "attempt" {
                assert_eq!(lab.events.all(), []);
            } else {
                // The doubt that was there is reported once, as ended.
                let reason = "the attempt's own answer arrived";
                assert_eq!(lab.events.doubts(), 1, "{phase}");
                assert!(lab.events.raw().iter().any(|event| event["reason"] == reason), "{phase}");
                assert_eq!(lab.events.calls(), 0);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_late_refusal_before_processing_ends_the_doubt_too() {
    let lab = Lab::new();
    let refusal = CallError::evidence(Evidence::TooManyRequests, "x").after(5 * SECOND);
    lab.write(later(3 * SECOND, Err(refusal)));
    let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(30 * SECOND).attempt_timeout(SECOND);
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), error.retry_after()), (Outcome::NotDone, Some(5 * SECOND)));
    assert_eq!(lab.log.timed(), ["0 write"]);
}

#[tokio::test(start_paused = true)]
async fn after_an_inconclusive_verdict_the_attempt_is_waited_for_until_the_deadline() {
    type Says = fn(&Doubt) -> Verdict<Res>;
    let verdicts: [Says; 3] =
        [|doubt| doubt.not_landed(), |doubt| doubt.partial(), |doubt| doubt.unknown("who knows")];
    for verdict in verdicts {
        let lab = Lab::new();
        lab.write(later(59 * SECOND, Ok(5)));
        let layer = says(&lab, verdict).attempt_timeout(SECOND);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 5);

        let lab = Lab::new();
        lab.write(hang());
        let start = Instant::now();
        let layer = says(&lab, verdict).attempt_timeout(SECOND);
        let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, 60 * SECOND));
        let partial = notes(&error).contains("in part");
        let rechecks = ["1100 check", "1300 check", "1700 check", "2500 check"];
        let rechecks = if partial { &rechecks[..] } else { &[] };
        assert_eq!(lab.log.timed(), [&["0 write", "1000 check"], rechecks].concat());
        assert_eq!(error.attempts().len(), 1);
        // Why the doubt was not settled is in the error and in the event.
        let Seen::InDoubt { reason, .. } = &lab.events.all()[0] else { panic!() };
        assert_eq!(Some(notes(&error)), *reason);
        assert_eq!(lab.events.all().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn by_default_an_attempt_gets_half_of_the_time_left_where_there_are_check_and_deadline() {
    let lab = Lab::new();
    lab.write(hang()).write(answer(2));
    assert_eq!(service(&lab, says(&lab, because)).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "30000 check", "30000 write"]);

    // Under `Never` it gets all the time there is.
    let lab = Lab::new();
    lab.write(later(1_000_000 * SECOND, Ok(1)));
    let call = write().deadline(Deadline::Never);
    assert_eq!(service(&lab, says(&lab, because)).oneshot(call).await.unwrap(), 1);
    assert_eq!(lab.events.all(), []);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_is_withdrawn_at_the_attempt_timeout_is_handed_over_again_and_that_is_no_replay() {
    // By a connection that is not of this crate, which says "not sent" when its time is up.
    let lab = Lab::new();
    lab.write(later(4 * SECOND, Err(CallError::not_sent("queued"))))
        .write(later(4 * SECOND, Err(CallError::not_sent("queued"))))
        .write(fail(ambiguous()))
        .write(answer(4));
    let layer = says(&lab, because).attempt_timeout(4 * SECOND);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 4);
    let order = ["0 write", "4000 write", "8000 write", "8000 check", "8000 write"];
    assert_eq!(lab.log.timed(), order);
    let call = Seen::Call { attempts: 4, outcome: None };
    assert_eq!((lab.events.doubts(), lab.events.all().last()), (1, Some(&call)));

    // By the reconnect layer, while a connect takes its time. Nothing is in doubt, so nobody is asked.
    let lab = Lab::new();
    lab.connect(Connect::After(10 * SECOND)).write(answer(1));
    let layer = says(&lab, because).attempt_timeout(3 * SECOND);
    assert_eq!(stack(&lab, layer).send(write()).await.unwrap(), 1);
    assert_eq!(lab.log.timed(), ["0 connect", "10000 write"]);
    assert_eq!(lab.events.all(), []);

    // As long as there is time, and not longer; without a check too.
    for layer in [says(&lab, because), WriteSafetyLayer::refuse()] {
        let lab = Lab::new();
        lab.connect(Connect::Hang);
        let layer = layer.attempt_timeout(7 * SECOND);
        let start = Instant::now();
        let error = stack(&lab, layer).send(write()).await.unwrap_err();
        assert_eq!((error.outcome(), start.elapsed()), (Outcome::NotDone, 60 * SECOND));
        assert_eq!((lab.writes(), lab.events.doubts()), (0, 0));
    }
}

#[tokio::test(start_paused = true)]
async fn a_half_written_request_is_never_replayed_by_a_declared_fence() {
    // It is never written to its end. With a quarantine shorter than that, and with a reason of the
    // caller's own.
    for (quarantine, verdict) in [
        (Some(2 * SECOND), (|doubt: &Doubt| doubt.not_landed()) as fn(&Doubt) -> Verdict<Res>),
        (None, because),
        (Some(2 * SECOND), because),
    ] {
        let lab = Lab::new();
        lab.write(marked(Duration::MAX, 1_000 * SECOND, Ok(1)));
        let mut layer = says(&lab, verdict).attempt_timeout(3 * SECOND);
        if let Some(quarantine) = quarantine {
            layer = layer.quarantine(quarantine);
        }
        let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
        assert!(notes(&error).contains("not sent to its end"), "{error}");
    }
    // The stall ends: from there the quarantine counts, be it longer or shorter than the stall.
    for quarantine in [2, 20] {
        let lab = Lab::new();
        lab.write(marked(10 * SECOND, 1_000 * SECOND, Ok(1))).write(answer(2));
        let layer = says(&lab, |doubt| doubt.not_landed());
        let layer = layer.attempt_timeout(3 * SECOND).quarantine(quarantine * SECOND);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        let at = 10_000 + 1_000 * u64::from(quarantine);
        assert_eq!(lab.log.timed(), ["0 write".to_owned(), format!("{at} check"), format!("{at} write")]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_declared_fence_does_not_hold_if_the_request_was_not_sent_when_its_check_began() {
    // The check looks at 3 s, the last byte leaves at 5 s, the verdict comes at 6 s.
    let lab = Lab::new();
    lab.write(marked(5 * SECOND, 1_000 * SECOND, Ok(1)));
    let layer = WriteSafetyLayer::new(|doubt: Doubt| async move {
        sleep(3 * SECOND).await;
        Ok(because(&doubt))
    });
    let error = service(&lab, layer.attempt_timeout(3 * SECOND)).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
    assert!(notes(&error).contains("not sent to its end"), "{error}");
}

/// A layer that holds the first request up for so many seconds.
fn held_up_by(
    seconds: u32,
    inner: BoxCloneService<Req, Res, CallError>,
) -> BoxCloneService<Req, Res, CallError> {
    let first = Arc::new(AtomicU32::new(seconds));
    BoxCloneService::new(service_fn(move |request: Req| -> Answer {
        let wait = first.swap(0, Ordering::Relaxed);
        let answer: Answer = Box::pin(inner.clone().oneshot(request));
        Box::pin(async move {
            if wait > 0 {
                sleep(wait * SECOND).await;
            }
            answer.await
        })
    }))
}

#[tokio::test(start_paused = true)]
async fn what_is_held_up_above_the_connection_is_not_sent_after_its_time() {
    // A layer between holds the first attempt up beyond its time: whether it lets go of it before the
    // quarantine, which is longer than the server's longest time, is over, or while the check runs, or keeps
    // it, there is one effect. And so over a connection alone and under a layer that reconnects.
    for held_up in [15, 17, 1_000] {
        for reconnects in [false, true] {
            let lab = Lab::new();
            let begun = Arc::new(AtomicU32::new(0));
            for _ in 0..2 {
                let begun = Arc::clone(&begun);
                lab.write(Box::new(move |request: Req| {
                    let activity = request.context().activity().unwrap().clone();
                    if !activity.adopt() {
                        return Box::pin(ready(Err(CallError::not_sent("its time is up"))));
                    }
                    begun.fetch_add(1, Ordering::Relaxed);
                    activity.sent();
                    Box::pin(later(5 * SECOND, Ok(1))(request))
                }));
            }
            let check = |doubt: Doubt| async move {
                sleep(2 * SECOND).await;
                Ok(doubt.not_landed())
            };
            let layer = WriteSafetyLayer::new(check).attempt_timeout(10 * SECOND).quarantine(6 * SECOND);
            let below = match reconnects {
                false => BoxCloneService::new(lab.connection()),
                true => BoxCloneService::new(ReconnectLayer::once().layer(lab.connector())),
            };
            let service = layer.layer(held_up_by(held_up, below));
            let service = DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()).layer(service);
            let answer: Answer = Box::pin(service.oneshot(write()));
            assert!(answer.await.is_ok());
            sleep(2_000 * SECOND).await;
            assert_eq!(begun.load(Ordering::Relaxed), 1, "{:?}", lab.log.timed());
        }
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_task_below_holds_up_is_not_sent_once_its_call_is_over() {
    // By its deadline, or since its caller went away; the attempt has no time of its own.
    for leaves in [false, true] {
        let lab = Lab::new();
        let begun = Arc::new(AtomicU32::new(0));
        let count = Arc::clone(&begun);
        lab.write(Box::new(move |request: Req| {
            count.fetch_add(u32::from(request.context().activity().unwrap().adopt()), Ordering::Relaxed);
            Box::pin(ready(Ok(1)))
        }));
        let connection = lab.connection();
        let below = service_fn(move |request: Req| {
            let answer: Answer = Box::pin(connection.clone().oneshot(request));
            let held_up = tokio::spawn(async move {
                sleep(20 * SECOND).await;
                answer.await
            });
            async move { held_up.await.unwrap() }
        });
        let layer = ServiceBuilder::new().layer(DeadlineLayer::new(15 * SECOND).on_event(lab.events.sink()));
        let service = layer.layer(WriteSafetyLayer::refuse()).service(below);
        let patience = if leaves { 10 } else { 60 } * SECOND;
        match tokio::time::timeout(patience, service.oneshot(write())).await {
            Ok(told) => assert_eq!((told.unwrap_err().outcome(), leaves), (Outcome::Unknown, false)),
            Err(_) => assert_eq!((lab.events.abandoned(), leaves), (1, true)),
        }
        sleep(20 * SECOND).await;
        // It came to the connection, which did not begin it.
        assert_eq!((lab.writes(), begun.load(Ordering::Relaxed)), (1, 0), "leaves: {leaves}");
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_ends_during_a_check_gets_another_with_the_new_fence() {
    let lab = Lab::new();
    lab.write(later(2 * SECOND, Err(exits(Duration::ZERO, true).exit_ends_effects()))).write(answer(2));
    let log = lab.log.clone();
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        log.note(if doubt.fence().is_some() { "fenced check" } else { "check" });
        async move {
            sleep(4 * SECOND).await;
            Ok(doubt.not_landed())
        }
    });
    assert_eq!(service(&lab, layer.attempt_timeout(SECOND)).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "1000 check", "5000 fenced check", "9000 write"]);
    assert_eq!(lab.events.doubts(), 1);

    // Also if the first check had ended before the attempt did, or was only to be asked again.
    for verdict in
        [(|doubt: &Doubt| doubt.not_landed()) as fn(&Doubt) -> Verdict<Res>, |doubt| match doubt.fence() {
            Some(_) => doubt.not_landed(),
            None => doubt.in_flight(50 * SECOND),
        }]
    {
        let lab = Lab::new();
        lab.write(later(7 * SECOND, Err(exits(SECOND, true).exit_ends_effects()))).write(answer(2));
        let layer = says(&lab, verdict).attempt_timeout(SECOND);
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
        assert_eq!(lab.log.timed(), ["0 write", "1000 check", "8000 check", "8000 write"]);
        // Why the first check was inconclusive is no longer of interest.
        assert!(matches!(lab.events.all()[0], Seen::InDoubt { reason: None, .. }));
    }
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_ends_ambiguously_while_its_replay_is_on_its_way_does_not_stop_it() {
    let lab = Lab::new();
    let late = held(&lab);
    lab.write(answer(2));
    let layer = says(&lab, because).attempt_timeout(SECOND).on_event(lab.events.sink());
    let mut service =
        ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(lab.gated());
    lab.gate(true);
    let mut call = task::spawn(service.ready().await.unwrap().call(write()));
    assert_pending!(call.poll());
    lab.gate(false);
    advance(SECOND).await;
    assert_pending!(call.poll());
    late.send(Err(closed())).unwrap();
    assert_pending!(call.poll());
    lab.gate(true);
    assert!(call.is_woken());
    assert_eq!(assert_ready_ok!(call.poll()), 2);
    assert_eq!((lab.writes(), lab.log.count("check")), (2, 1));
    assert_eq!(lab.events.all().last(), Some(&Seen::Call { attempts: 2, outcome: None }));
}

#[tokio::test(start_paused = true)]
async fn what_a_check_found_in_part_is_not_said_to_be_not_done_by_a_late_refusal() {
    late_refusal(|doubt| doubt.partial()).await;
}

#[tokio::test(start_paused = true)]
async fn what_a_check_found_in_flight_is_not_said_to_be_not_done_by_a_late_refusal() {
    late_refusal(|doubt| doubt.in_flight(ms(10))).await;
}

async fn late_refusal(verdict: fn(&Doubt) -> Verdict<Res>) {
    for look in [false, true] {
        let lab = Lab::new();
        lab.write(later(20 * SECOND, Err(CallError::evidence(Evidence::TooManyRequests, "429"))));
        let layer =
            Safety::new(move |doubt: Doubt| async move { Ok(verdict(&doubt)) }).attempt_timeout(SECOND);
        let layer = if look { layer.quarantine(40 * SECOND).look_first() } else { layer };
        let layer = layer.conflict_key(|_: &Req| Some(7));
        let safety = layer.layer(lab.connection());
        let ledger = safety.ledger();
        let service = DeadlineLayer::new(60 * SECOND).layer(safety);
        let error = service.oneshot(write()).await.unwrap_err();
        assert_eq!(lab.writes(), 1);
        assert!(!error.is_safe_to_repeat(), "{error}; {:?}", lab.events.all());
        assert_eq!(ledger.in_doubt().await.unwrap().len(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn what_a_check_found_in_flight_is_not_replayed_on_a_late_refusal_though_that_is_trusted() {
    for verdict in [|doubt: &Doubt| doubt.in_flight(ms(10)), |doubt: &Doubt| doubt.partial()] {
        let lab = Lab::new();
        lab.write(later(20 * SECOND, Err(CallError::evidence(Evidence::TooManyRequests, "429"))));
        let layer = says(&lab, verdict).attempt_timeout(SECOND).trust(Evidence::TooManyRequests);
        let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_in_flight_before_its_replay_does_not_speak_against_the_replays_own_end() {
    let lab = Lab::new();
    lab.write(fail(ambiguous())).write(fail(CallError::evidence(Evidence::TooManyRequests, "429")));
    let asked = AtomicU32::new(0);
    let layer = says(&lab, move |doubt| match asked.fetch_add(1, Ordering::Relaxed) {
        0 => doubt.in_flight(ms(10)),
        _ => because(doubt),
    });
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 2));
}

// ===== Checks that go wrong =====

#[tokio::test(start_paused = true)]
async fn a_check_that_errs_hangs_or_panics_is_unknown_and_leads_to_no_replay() {
    type Check = fn(Doubt) -> std::pin::Pin<Box<dyn Future<Output = Checked> + Send>>;
    let checks: [(Check, &str); 6] = [
        (|_| Box::pin(async { Err("token=hunter2".into()) }), "the check failed"),
        (
            |_| Box::pin(async { Err(CallError::not_sent("x").into()) }),
            "the check failed: the service failed",
        ),
        (|_| Box::pin(pending()), "the check took too long"),
        (|_| panic!("in the function"), "the check panicked"),
        (|_| Box::pin(async { panic!("in its future") }), "the check panicked"),
        (
            |doubt| {
                Box::pin(async move {
                    sleep(SECOND).await;
                    drop(doubt);
                    panic!("later")
                })
            },
            "the check panicked",
        ),
    ];
    for (check, reason) in checks {
        for pending in [false, true] {
            let lab = Lab::new();
            lab.write(if pending { hang() } else { fail(closed()) });
            let error = service(&lab, WriteSafetyLayer::new(check)).oneshot(write()).await.unwrap_err();
            assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
            assert!(notes(&error).starts_with(reason), "{error}");
            assert!(!error.to_string().contains("hunter2"), "foreign text does not belong in ours");
            assert_eq!((lab.events.doubts(), lab.events.calls()), (1, 0));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_check_gets_a_third_of_the_time_left_and_at_most_ten_seconds() {
    for (deadline, timeout, expected) in [
        (Some(3 * SECOND), None, Some(SECOND)),
        (Some(30 * SECOND), None, Some(10 * SECOND)),
        (Some(900 * SECOND), None, Some(10 * SECOND)),
        (None, None, Some(10 * SECOND)),
        (Some(30 * SECOND), Some(25 * SECOND), Some(25 * SECOND)),
        (Some(30 * SECOND), Some(99 * SECOND), Some(30 * SECOND)),
        (Some(30 * SECOND), Some(Duration::MAX), Some(30 * SECOND)),
        (None, Some(Duration::MAX), None),
    ] {
        let lab = Lab::new();
        lab.write(fail(closed()));
        let left: Arc<Mutex<Vec<_>>> = Arc::default();
        let (probed, seen) = (Arc::clone(&left), Arc::clone(&left));
        lab.read(Box::new(move |request: Req| {
            let deadline = request.context().deadline().instant();
            probed.lock().unwrap().push(deadline.map(|at| at.saturating_duration_since(Instant::now())));
            Box::pin(async { Ok(0) })
        }));
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            seen.lock().unwrap().push(doubt.time_left());
            async move {
                doubt.probe(read()).await?;
                Ok(doubt.unknown("x"))
            }
        });
        let layer = match timeout {
            Some(timeout) => layer.check_timeout(timeout),
            None => layer,
        };
        let call = match deadline {
            Some(deadline) => write().within(deadline),
            None => write().deadline(Deadline::Never),
        };
        service(&lab, layer).oneshot(call).await.unwrap_err();
        // The check's own view, and what its probe was stamped with.
        assert_eq!(*left.lock().unwrap(), [expected, expected]);
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_may_have_a_shorter_deadline_of_its_own_but_no_longer_one() {
    for (own, expected) in [(SECOND, SECOND), (99 * SECOND, 10 * SECOND)] {
        let lab = Lab::new();
        lab.write(fail(closed())).read(Box::new(move |request: Req| {
            let deadline = request.context().deadline().instant().unwrap();
            assert_eq!(deadline - Instant::now(), expected);
            assert_eq!(request.context().attempt_until(), None);
            Box::pin(async { Ok(0) })
        }));
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| async move {
            doubt.probe(read().within(own)).await?;
            Ok(doubt.landed(1))
        });
        assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 1);
    }
}

#[tokio::test(start_paused = true)]
async fn a_probe_refuses_whatever_the_stack_takes_for_a_write() {
    type Make = fn() -> Req;
    let cases: [(Make, bool); 6] = [
        (|| Tagged::new("x", Effect::Write), false),
        (|| Tagged::new("x", Effect::Idempotent), false),
        (|| Tagged::new("x", Effect::ReadOnly).as_effect(Effect::Write), false),
        (|| Tagged::new("x", Effect::ReadOnly), true),
        (|| Tagged::new("x", Effect::Write).read_only(), true),
        // The stack's classification has the last word.
        (|| Tagged::new("rm", Effect::ReadOnly).read_only(), false),
    ];
    for (make, accepted) in cases {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(0));
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| async move {
            Ok(match doubt.probe(make()).await {
                Ok(_) => doubt.landed(1),
                Err(error) => {
                    assert!(matches!(error.cause(), Cause::Refused(Refusal::NotAProbe)));
                    assert!(error.to_string().contains("read-only"), "{error}");
                    assert!(doubt.probe(make()).await.is_err(), "nor the second time");
                    doubt.landed(0)
                }
            })
        });
        let layer = layer.classify(|request: &Req| (**request == "rm").then_some(Effect::Write));
        let response = service(&lab, layer).oneshot(write()).await.unwrap();
        assert_eq!((response, lab.reads(), lab.writes()), (accepted.into(), usize::from(accepted), 1));
    }
}

#[tokio::test(start_paused = true)]
async fn no_more_than_so_many_checks_run_at_once_over_all_clones() {
    let lab = Lab::new();
    let (now, most) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
    let counts = (Arc::clone(&now), Arc::clone(&most));
    let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
        let (now, most) = (Arc::clone(&counts.0), Arc::clone(&counts.1));
        async move {
            most.fetch_max(now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            sleep(SECOND).await;
            now.fetch_sub(1, Ordering::Relaxed);
            Ok(doubt.landed(1))
        }
    });
    let service = service(&lab, layer.max_checks(3));
    let calls: Vec<_> = (0..12)
        .map(|_| {
            lab.write(fail(closed()));
            tokio::spawn(service.clone().oneshot(write()))
        })
        .collect();
    let start = Instant::now();
    for call in calls {
        assert_eq!(call.await.unwrap().unwrap(), 1);
    }
    assert_eq!((most.load(Ordering::Relaxed), start.elapsed()), (3, 4 * SECOND));
}

#[tokio::test(start_paused = true)]
async fn what_is_in_flight_is_asked_for_again_within_the_deadline() {
    let lab = Lab::new();
    lab.write(fail(closed()));
    let checks = AtomicU32::new(0);
    let layer = says(&lab, move |doubt| match checks.fetch_add(1, Ordering::Relaxed) {
        0..20 => doubt.in_flight(2 * SECOND),
        _ => doubt.landed(1),
    });
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 1);
    assert_eq!(lab.log.timed().last().unwrap(), "40000 check");
    assert_eq!(lab.log.count("check"), 21);

    // A time that does not fit is not waited for.
    let lab = Lab::new();
    lab.write(fail(closed()));
    let layer = says(&lab, |doubt| doubt.in_flight(25 * SECOND));
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!(lab.log.timed(), ["0 write", "0 check", "25000 check", "50000 check"]);
    assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
    assert_eq!(notes(&error), "still being processed, and no time to ask again");

    // Nor is one that is no time at all a busy loop, and nobody else waits for it.
    for recheck_after in [Duration::ZERO, ms(900)] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(fail(closed()));
        let first = Arc::new(Mutex::new(None));
        let layer = says(&lab, move |doubt| {
            if *first.lock().unwrap().get_or_insert(doubt.call()) == doubt.call() {
                doubt.in_flight(recheck_after)
            } else {
                doubt.landed(1)
            }
        });
        let service = service(&lab, layer.max_checks(1));
        let start = Instant::now();
        let (busy, other) = tokio::join!(service.clone().oneshot(write().within(SECOND)), async {
            let other = service.clone().oneshot(write().within(SECOND)).await;
            assert!(start.elapsed() <= ms(10), "{:?}", start.elapsed());
            other
        });
        assert_eq!((busy.unwrap_err().outcome(), other.unwrap()), (Outcome::Unknown, 1));
        assert!(lab.log.count("check") < 110, "{}", lab.log.count("check"));
    }
}

#[tokio::test(start_paused = true)]
async fn what_was_applied_in_part_is_never_replayed() {
    for first in [
        (|| fail(closed())) as fn() -> Step,
        hang,
        // The attempt ends during the check, or after it, with what would be a fence.
        || later(3 * SECOND, Err(exits(Duration::ZERO, true).exit_ends_effects())),
        || later(9 * SECOND, Err(exits(Duration::ZERO, true).exit_ends_effects())),
    ] {
        let lab = Lab::new();
        lab.write(first());
        let checks = Arc::new(AtomicU32::new(0));
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            let nth = checks.fetch_add(1, Ordering::Relaxed);
            async move {
                sleep(4 * SECOND).await;
                // A second opinion does not undo the first.
                Ok(if nth == 0 { doubt.partial() } else { because(&doubt) })
            }
        });
        let error = service(&lab, layer.attempt_timeout(SECOND)).oneshot(write()).await.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::Unknown, 1));
        assert_eq!(notes(&error), "applied in part");
        assert!(matches!(lab.events.all()[..], [Seen::InDoubt { verdict: Some(VerdictKind::Partial), .. }]));
    }
}

// ===== Other writes =====

#[tokio::test(start_paused = true)]
async fn a_replay_on_top_of_another_write_needs_a_declaration() {
    for independent in [false, true] {
        let lab = Lab::new();
        lab.write(fail(ambiguous())).write(answer(1));
        let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(5 * SECOND);
        let layer = if independent { layer.independent_writes() } else { layer };
        let service = service(&lab, layer);
        let clone = service.clone();
        let (first, second) = tokio::join!(service.oneshot(write()), async {
            sleep(SECOND).await;
            let second = clone.oneshot(write()).await;
            lab.write(answer(2));
            second
        });
        assert_eq!(second.unwrap(), 1);
        if independent {
            assert_eq!((first.unwrap(), lab.writes()), (2, 3));
            continue;
        }
        let error = first.unwrap_err();
        assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 2));
        assert!(notes(&error).contains("independent_writes()"), "{error}");
        assert_eq!((error.attempts().len(), lab.events.doubts()), (1, 1));
    }
    // A read is no write, and neither is one that came before.
    let lab = Lab::new();
    lab.write(answer(0)).write(fail(ambiguous())).write(answer(2));
    let service = service(&lab, probes(&lab, because));
    assert_eq!(service.clone().oneshot(write()).await.unwrap(), 0);
    assert_eq!(service.oneshot(write()).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn of_two_writes_in_doubt_on_two_clones_only_the_last_is_replayed() {
    for independent in [false, true] {
        let lab = Lab::new();
        lab.write(fail(ambiguous())).write(fail(ambiguous())).write(answer(3)).write(answer(4));
        let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(5 * SECOND);
        let layer = if independent { layer.independent_writes() } else { layer };
        let service = service(&lab, layer);
        let (first, second) =
            tokio::join!(service.clone().oneshot(write()), service.clone().oneshot(write()));
        let outcomes = (first.map_err(|error| error.outcome()), second.map_err(|error| error.outcome()));
        match independent {
            true => assert!(matches!(outcomes, (Ok(3), Ok(4)) | (Ok(4), Ok(3)))),
            false => assert_eq!(outcomes, (Err(Outcome::NotDone), Ok(3))),
        }
        assert_eq!(lab.events.doubts(), 2);
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_is_handed_over_again_counts_as_one_that_was_handed_over_since() {
    let lab = Lab::new();
    // The first is withdrawn at 4 s and handed over again, after the second one's attempt.
    lab.write(later(4 * SECOND, Err(CallError::not_sent("queued"))))
        .write(fail(ambiguous()))
        .write(answer(1));
    let layer = says(&lab, |doubt| doubt.not_landed());
    let service = service(&lab, layer.quarantine(9 * SECOND).attempt_timeout(4 * SECOND));
    let (first, second) = tokio::join!(service.clone().oneshot(write()), async {
        sleep(SECOND).await;
        service.clone().oneshot(write()).await
    });
    assert_eq!((first.unwrap(), second.unwrap_err().outcome()), (1, Outcome::NotDone));

    // And its own replay is judged by that hand-over, not by the one of which nothing was sent.
    let lab = Lab::new();
    lab.write(later(4 * SECOND, Err(CallError::not_sent("queued")))).write(answer(1));
    lab.write(fail(ambiguous())).write(answer(2));
    let layer = says(&lab, because).attempt_timeout(4 * SECOND);
    let service = self::service(&lab, layer);
    let (first, second) = tokio::join!(service.clone().oneshot(write()), async {
        sleep(SECOND).await;
        service.clone().oneshot(write()).await
    });
    assert_eq!((first.unwrap(), second.unwrap()), (2, 1));
}

// ===== Trust =====

#[tokio::test(start_paused = true)]
async fn a_trusted_refusal_is_replayed_once_and_after_the_time_that_the_peer_asked_for() {
    for (evidence, is_trusted) in [
        (Evidence::TooManyRequests, true),
        (Evidence::TooManyRequests, false),
        (Evidence::Unavailable, true),
        (Evidence::Unavailable, false),
    ] {
        for wait in [5 * SECOND, 60 * SECOND, Duration::MAX] {
            let lab = Lab::new();
            lab.write(fail(CallError::evidence(evidence, "x").after(wait))).write(answer(2));
            let layer = says(&lab, |doubt| doubt.not_landed());
            let layer = if is_trusted { layer.trust(evidence) } else { layer };
            let start = Instant::now();
            let result = service(&lab, layer).oneshot(write()).await;
            if is_trusted && wait < 60 * SECOND {
                assert_eq!(result.unwrap(), 2);
                assert_eq!(lab.log.timed(), ["0 write", "5000 write"]);
                assert_eq!(lab.events.all(), [Seen::Call { attempts: 2, outcome: None }]);
                assert_eq!(lab.events.raw()[0]["attempts"][1]["waited"]["secs"], 5);
                continue;
            }
            // A wait that does not fit is not begun.
            let error = result.unwrap_err();
            assert_eq!((start.elapsed(), error.retry_after()), (Duration::ZERO, Some(wait)));
            let probable = evidence == Evidence::Unavailable;
            let outcome = if probable && !is_trusted { Outcome::Unknown } else { Outcome::NotDone };
            assert_eq!((error.outcome(), lab.writes()), (outcome, 1));
            assert_eq!(lab.log.count("check"), usize::from(outcome == Outcome::Unknown));
            if is_trusted {
                assert_eq!(error.delivery(), Delivery::NotProcessed);
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_trusted_refusal_that_comes_late_ends_the_doubt_and_the_check() {
    for phase in ["fence", "check", "way"] {
        let lab = Lab::new();
        let late = held(&lab);
        lab.write(later(9 * SECOND, Ok(2)));
        let log = lab.log.clone();
        let layer = WriteSafetyLayer::new(move |doubt: Doubt| {
            log.note("check");
            async move {
                if phase == "check" {
                    sleep(4 * SECOND).await;
                    return Ok(doubt.landed(9));
                }
                Ok(because(&doubt))
            }
        });
        let layer = layer.attempt_timeout(SECOND).trust(Evidence::Unavailable).on_event(lab.events.sink());
        let layer = if phase == "fence" { layer.quarantine(20 * SECOND) } else { layer };
        let mut service =
            ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(lab.gated());
        lab.gate(true);
        let mut call = task::spawn(service.ready().await.unwrap().call(write()));
        assert_pending!(call.poll());
        lab.gate(false);
        advance(SECOND).await;
        assert_pending!(call.poll());
        late.send(Err(unavailable())).unwrap();
        lab.gate(true);
        assert!(call.is_woken());
        // The old check says nothing of the replay.
        assert_eq!(call.await.unwrap(), 2, "{phase}");
        assert_eq!((lab.writes(), lab.events.calls()), (2, 1), "{phase}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_trusted_replay_in_doubt_is_checked_for_the_report_only() {
    let lab = Lab::new();
    lab.write(fail(unavailable())).write(fail(ambiguous()));
    let layer = says(&lab, because).trust(Evidence::Unavailable);
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 2));
    assert_eq!(lab.log.all(), ["write", "write", "check"]);

    // A replay that is slow is not taken for one that timed out.
    let lab = Lab::new();
    lab.write(fail(unavailable())).write(later(50 * SECOND, Ok(3)));
    let layer = says(&lab, because).trust(Evidence::Unavailable).attempt_timeout(SECOND);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 3);
    assert_eq!(lab.log.all(), ["write", "write"]);
}

#[tokio::test(start_paused = true)]
async fn a_fenced_replay_waits_for_what_the_peer_asked_too() {
    let lab = Lab::new();
    lab.write(fail(unavailable().after(9 * SECOND))).write(answer(2));
    let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(5 * SECOND);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "5000 check", "9000 write"]);

    let lab = Lab::new();
    lab.write(fail(unavailable().after(90 * SECOND)));
    let error = service(&lab, says(&lab, because)).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), error.retry_after()), (Outcome::NotDone, Some(90 * SECOND)));
    assert_eq!(lab.log.timed(), ["0 write", "0 check"]);
}

#[tokio::test(start_paused = true)]
async fn a_pause_without_an_end_that_a_peer_asks_for_does_not_hold_a_write_for_ever() {
    let lab = Lab::new();
    let busy = || CallError::evidence(Evidence::TooManyRequests, "429").after(Duration::MAX);
    lab.write(fail(busy())).read(fail(busy()));
    let service = ServiceBuilder::new()
        .layer(Safety::refuse().trust(Evidence::TooManyRequests))
        .layer(RetryReadOnly)
        .service(lab.connection());
    // A read is returned at once.
    let read = service.clone().oneshot(read().deadline(Deadline::Never));
    assert!(tokio::time::timeout(SECOND, read).await.unwrap().is_err());
    let write = service.oneshot(write().deadline(Deadline::Never));
    let ended = tokio::time::timeout(SECOND, write).await;
    assert!(ended.is_ok(), "a write that was refused waits");
}

#[tokio::test(start_paused = true)]
async fn no_pause_without_an_end_is_waited_for_whoever_asks_for_it() {
    for pause in [Duration::MAX, Duration::from_secs(1 << 40)] {
        // Before a replay that a fence allows, and between two questions to a check.
        let lab = Lab::new();
        lab.write(fail(ambiguous().after(pause))).write(fail(ambiguous()));
        let fenced = says(&lab, because);
        let asks_again = says(&lab, move |doubt| doubt.in_flight(pause));
        for layer in [fenced, asks_again] {
            let call = service(&lab, layer).oneshot(write().deadline(Deadline::Never));
            let ended = tokio::time::timeout(SECOND, call).await.expect("it waits");
            assert_eq!(lab.events.doubts(), if ended.is_err() { lab.writes() } else { 0 });
        }
        assert_eq!(lab.writes(), 2);
    }
}

// ===== Requests that cannot be cloned =====

#[tokio::test(start_paused = true)]
async fn a_write_that_cannot_be_cloned_is_sent_once_and_says_why() {
    for step in [fail(closed()), hang()] {
        let lab = Lab::new();
        lab.write(step);
        let call = Tagged::once("w", |_| Effect::Write);
        let error = service(&lab, says(&lab, because)).oneshot(call).await.unwrap_err();
        assert_eq!((error.outcome(), lab.log.all()), (Outcome::Unknown, vec!["write".to_owned()]));
        assert!(notes(&error).contains("cannot be cloned"), "{error}");
        assert_eq!(lab.events.doubts(), 1);
    }
    let lab = Lab::new();
    lab.write(fail(unavailable()));
    let layer = WriteSafetyLayer::refuse().trust(Evidence::Unavailable);
    let call = Tagged::once("w", |_| Effect::Write);
    let error = service(&lab, layer).oneshot(call).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes()), (Outcome::NotDone, 1));
}

// ===== Contexts =====

#[tokio::test(start_paused = true)]
async fn each_attempt_has_its_own_time_and_marks_and_the_same_id_and_deadline() {
    let lab = Lab::new();
    let seen: Arc<Mutex<Vec<_>>> = Arc::default();
    for nth in 0..3 {
        let seen = Arc::clone(&seen);
        lab.write(Box::new(move |request: Req| {
            let context = request.context();
            let activity = context.activity().unwrap().clone();
            seen.lock().unwrap().push((
                context.id(),
                context.deadline(),
                context.attempt_until().map(|until| until - Instant::now()),
                activity,
            ));
            Box::pin(async move {
                match nth {
                    0 => {
                        sleep(4 * SECOND).await;
                        Err(CallError::not_sent("queued"))
                    }
                    1 => pending().await,
                    _ => Ok(1),
                }
            })
        }));
    }
    let layer = says(&lab, |doubt| {
        let context = doubt.request().context();
        assert_eq!(context.id(), Some(doubt.call()));
        assert!(context.attempt_until().is_none() && context.activity().is_none());
        because(doubt)
    });
    let layer = layer.attempt_timeout(4 * SECOND);
    assert_eq!(service(&lab, layer).oneshot(write()).await.unwrap(), 1);
    let seen = seen.lock().unwrap();
    let until: Vec<_> = seen.iter().map(|seen| seen.2).collect();
    assert_eq!(until, [Some(4 * SECOND), Some(4 * SECOND), None]);
    assert!(seen.iter().all(|one| (one.0, one.1) == (seen[0].0, seen[0].1)));
    assert!(!Arc::ptr_eq(&seen[0].3, &seen[1].3) && !Arc::ptr_eq(&seen[1].3, &seen[2].3));
    // The connection of the replaced attempt can tell why it was, and that of its replay cannot.
    let why = |nth: usize| seen[nth].3.replaced_by_fence().map(|fence| fence.to_string());
    assert_eq!((why(0), why(1), why(2)), (None, Some("declared: tested".to_owned()), None));
}

#[tokio::test(start_paused = true)]
async fn an_attempt_that_may_take_all_the_time_has_no_time_of_its_own() {
    let own = |limit: Duration| move |layer: Safety| layer.attempt_timeout(limit);
    type Sets = Box<dyn Fn(Safety) -> Safety>;
    let cases: [(Sets, Deadline); 4] = [
        (Box::new(own(60 * SECOND)), Deadline::Inherit),
        (Box::new(own(Duration::MAX)), Deadline::Inherit),
        (Box::new(own(Duration::MAX)), Deadline::Never),
        (Box::new(|layer| layer), Deadline::Never),
    ];
    for (sets, deadline) in cases {
        let lab = Lab::new();
        lab.write(Box::new(|request: Req| {
            let until = request.context().attempt_until();
            Box::pin(async move { Ok(u32::from(until.is_some())) })
        }));
        let service = service(&lab, sets(says(&lab, because)));
        assert_eq!(service.oneshot(write().deadline(deadline)).await.unwrap(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_replaced_attempt_ends_before_its_replay_begins() {
    struct Guard(Log);
    impl Drop for Guard {
        fn drop(&mut self) {
            self.0.note("dropped");
        }
    }
    let lab = Lab::new();
    let guard = Guard(lab.log.clone());
    lab.write(Box::new(|_| {
        Box::pin(async move {
            let _guard = guard;
            pending().await
        })
    }));
    lab.write(answer(2));
    assert_eq!(service(&lab, says(&lab, because)).oneshot(write()).await.unwrap(), 2);
    assert_eq!(lab.log.all(), ["write", "check", "dropped", "write"]);
}

// ===== Callers that go away =====

/// A write in that phase; says whether something is then in doubt.
fn in_phase(lab: &Lab, phase: &str) -> (Safety, bool) {
    let hangs = |lab: &Lab| {
        let log = lab.log.clone();
        WriteSafetyLayer::new(move |_: Doubt| {
            log.note("check");
            pending::<Checked>()
        })
    };
    match phase {
        "attempt" => {
            lab.write(hang());
            (WriteSafetyLayer::refuse(), true)
        }
        "fence" => {
            lab.write(fail(closed()));
            (says(lab, because).quarantine(20 * SECOND), true)
        }
        "fence, kept" => {
            lab.write(hang());
            (says(lab, because).quarantine(20 * SECOND).attempt_timeout(SECOND), true)
        }
        "check" => {
            lab.write(fail(closed()));
            (hangs(lab), true)
        }
        "check, kept" => {
            lab.write(hang());
            (hangs(lab).attempt_timeout(SECOND), true)
        }
        "recheck" => {
            lab.write(fail(closed()));
            (says(lab, |doubt| doubt.in_flight(9 * SECOND)), true)
        }
        "inconclusive" => {
            lab.write(hang());
            (says(lab, |doubt| doubt.unknown("x")).attempt_timeout(SECOND), true)
        }
        // A verdict has settled the attempt, so that there is nothing to tell.
        "way" => {
            lab.write(fail(closed()));
            (says(lab, because), false)
        }
        "way, kept" => {
            lab.write(hang());
            (says(lab, because).attempt_timeout(SECOND), false)
        }
        "trusted wait" => {
            lab.write(fail(unavailable().after(9 * SECOND)));
            (WriteSafetyLayer::refuse().trust(Evidence::Unavailable), false)
        }
        "withdrawn" => {
            lab.write(fail(CallError::not_sent("x").connection_lost()));
            (WriteSafetyLayer::refuse(), false)
        }
        "replay" => {
            lab.write(fail(closed())).write(hang());
            (says(lab, because), true)
        }
        "replay, after kept" => {
            lab.write(hang()).write(hang());
            (says(lab, because).attempt_timeout(SECOND), true)
        }
        "replay's check" => {
            lab.write(fail(closed())).write(fail(closed()));
            let checks = AtomicU32::new(0);
            let layer = says(lab, move |doubt| match checks.fetch_add(1, Ordering::Relaxed) {
                0 => because(doubt),
                _ => doubt.in_flight(9 * SECOND),
            });
            (layer, true)
        }
        _ => unreachable!(),
    }
}

const PHASES: [&str; 14] = [
    "attempt",
    "fence",
    "fence, kept",
    "check",
    "check, kept",
    "recheck",
    "inconclusive",
    "way",
    "way, kept",
    "trusted wait",
    "withdrawn",
    "replay",
    "replay, after kept",
    "replay's check",
];

#[tokio::test(start_paused = true)]
async fn a_caller_that_goes_away_is_told_of_once_if_something_is_in_doubt() {
    for phase in PHASES {
        for sink_panics in [false, true] {
            let lab = Lab::new();
            let (layer, in_doubt) = in_phase(&lab, phase);
            let sink = lab.events.sink();
            let layer = layer.on_event(move |event| {
                sink(event);
                assert!(!sink_panics, "a sink that panics");
            });
            let mut service = ServiceBuilder::new()
                .layer(DeadlineLayer::new(60 * SECOND))
                .layer(layer)
                .service(lab.gated());
            lab.gate(true);
            let mut call = task::spawn(service.ready().await.unwrap().call(write()));
            lab.gate(!phase.starts_with("way"));
            if phase == "withdrawn" {
                assert_ready_err!(call.poll());
            } else {
                assert_pending!(call.poll());
                advance(SECOND).await;
                assert_pending!(call.poll());
            }
            assert_eq!(lab.events.all(), [], "{phase}");
            drop(call);
            assert_eq!(lab.events.abandoned(), usize::from(in_doubt), "{phase}: {:?}", lab.events.all());
            assert_eq!(lab.events.all().len(), usize::from(in_doubt), "{phase}");
            if in_doubt {
                let raw = &lab.events.raw()[0];
                assert_eq!((&raw["method"], &raw["outcome"]), (&"pay".into(), &"unknown".into()));
                let replayed = phase.starts_with("replay");
                assert_eq!(raw["attempts"].as_array().unwrap().len(), 1 + usize::from(replayed), "{phase}");
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_a_caller_that_goes_away_and_a_panicking_sink_does_not_abort() {
    let lab = Lab::new();
    let sink = lab.events.sink();
    lab.write(Box::new(|_| Box::pin(async { panic!("in the attempt") })));
    lab.write(fail(ambiguous())).write(Box::new(|_| panic!("in the hand-over")));
    let layer = says(&lab, because).on_event(move |event| {
        sink(event);
        panic!("a sink that panics")
    });
    let service = layer.layer(lab.connection());
    for told in 1..=2 {
        assert!(tokio::spawn(service.clone().oneshot(write())).await.unwrap_err().is_panic());
        assert_eq!(lab.events.abandoned(), told, "{:?}", lab.events.all());
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_that_never_reached_a_connection_or_was_withdrawn_is_not_abandoned() {
    // Dropped while a connect is under way, and while the connection is not ready.
    for (connect, readiness) in [(Connect::Hang, Readiness::Ready), (Connect::Ok, Readiness::Hang)] {
        let lab = Lab::new();
        lab.connect(connect).readiness(readiness);
        let mut stack = stack(&lab, WriteSafetyLayer::refuse());
        let mut call = task::spawn(stack.ready().await.unwrap().call(write()));
        assert_pending!(call.poll());
        drop(call);
        assert_eq!((lab.writes(), lab.events.all()), (0, vec![]));
    }
    // Withdrawn by the connection when it was dropped.
    struct Withdraw(Arc<goaround::Activity>);
    impl Drop for Withdraw {
        fn drop(&mut self) {
            self.0.withdrawn();
        }
    }
    let lab = Lab::new();
    lab.write(Box::new(|request: Req| {
        let activity = request.context().activity().unwrap().clone();
        assert!(activity.adopt());
        let guard = Withdraw(activity);
        Box::pin(async move {
            let _guard = guard;
            pending().await
        })
    }));
    let mut service = service(&lab, WriteSafetyLayer::refuse());
    let mut call = task::spawn(service.ready().await.unwrap().call(write()));
    assert_pending!(call.poll());
    drop(call);
    assert_eq!((lab.writes(), lab.events.all()), (1, vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_future_that_has_resolved_is_not_abandoned() {
    let lab = Lab::new();
    lab.write(answer(1)).write(fail(closed())).write(fail(closed()));
    for layer in [WriteSafetyLayer::refuse(), says(&lab, |doubt| doubt.landed(1))] {
        let mut service = service(&lab, layer);
        let mut call = task::spawn(service.ready().await.unwrap().call(write()));
        assert!(call.poll().is_ready());
        drop(call);
        assert_eq!(lab.events.abandoned(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_write_of_which_one_copy_was_sent_is_reported_though_another_copy_still_waits_when_it_is_dropped() {
    let lab = Lab::new();
    lab.write(fail(closed())).connect(Connect::Ok).connect(Connect::Hang);
    let reconnect = ReconnectLayer::once().layer(lab.connector());
    // As a retrying HTTP client or a hedging layer does.
    let twice = service_fn(move |call: Req| -> Answer {
        let again = call.try_clone().unwrap();
        let (first, second) = (reconnect.clone(), reconnect.clone());
        let first: Answer = Box::pin(first.oneshot(call));
        let second: Answer = Box::pin(second.oneshot(again));
        Box::pin(async move {
            let _ = first.await;
            second.await
        })
    });
    let safety = Safety::refuse().layer(twice);
    let ledger = safety.ledger();
    let mut call =
        Box::pin(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()).layer(safety).oneshot(write()));
    assert!(tokio::time::timeout(SECOND, call.as_mut()).await.is_err());
    drop(call);
    assert_eq!(lab.writes(), 1);
    assert_eq!((lab.events.abandoned(), ledger.in_doubt().await.unwrap().len()), (1, 1));
}

#[tokio::test(start_paused = true)]
async fn that_another_copy_was_not_sent_does_not_say_that_the_write_was_not() {
    let lab = Lab::new();
    lab.write(fail(closed())).connect(Connect::Ok).connect(Connect::Fail);
    let reconnect = ReconnectLayer::once().layer(lab.connector());
    let twice = service_fn(move |call: Req| -> Answer {
        let again = call.try_clone().unwrap();
        let (first, second) = (reconnect.clone(), reconnect.clone());
        let first: Answer = Box::pin(first.oneshot(call));
        Box::pin(async move {
            let _ = first.await;
            // By the end of its time this one is not sent.
            let second: Answer = Box::pin(second.oneshot(again.within(SECOND)));
            second.await
        })
    });
    let service =
        DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()).layer(Safety::refuse().layer(twice));
    let error = service.oneshot(write()).await.unwrap_err();
    assert_eq!((lab.writes(), error.outcome(), lab.events.doubts()), (1, Outcome::Unknown, 1), "{error}");
}

// ===== Deadlines =====

#[tokio::test(start_paused = true)]
async fn no_part_that_hangs_outlasts_the_deadline_and_the_error_says_what_was_known() {
    let forever = || exits(Duration::MAX, true).exit_ends_effects();
    type Setup<'a> = &'a dyn Fn(&Lab) -> Safety;
    let cases: [(&str, Setup<'_>, Outcome, &str, usize); 12] = [
        (
            "connect",
            &|lab| {
                lab.connect(Connect::Hang);
                says(lab, because)
            },
            Outcome::NotDone,
            "",
            0,
        ),
        (
            "readiness",
            &|lab| {
                lab.readiness(Readiness::Hang);
                says(lab, because)
            },
            Outcome::NotDone,
            "",
            0,
        ),
        (
            "attempt, no check",
            &|lab| {
                lab.write(hang());
                WriteSafetyLayer::refuse()
            },
            Outcome::Unknown,
            "no effect check",
            1,
        ),
        (
            "attempt, inconclusive check",
            &|lab| {
                lab.write(hang());
                says(lab, |doubt| doubt.unknown("who knows"))
            },
            Outcome::Unknown,
            "who knows",
            1,
        ),
        (
            "reaping",
            &|lab| {
                lab.write(fail(forever()));
                probes(lab, |doubt| doubt.not_landed()).check_timeout(60 * SECOND)
            },
            Outcome::Unknown,
            "not known to be gone",
            1,
        ),
        (
            "last byte",
            &|lab| {
                lab.write(marked(Duration::MAX, 999 * SECOND, Ok(1)));
                says(lab, |doubt| doubt.not_landed()).quarantine(SECOND)
            },
            Outcome::Unknown,
            "not sent to its end",
            1,
        ),
        (
            "check",
            &|lab| {
                lab.write(fail(closed()));
                WriteSafetyLayer::new(|_: Doubt| pending::<Checked>()).check_timeout(99 * SECOND)
            },
            Outcome::Unknown,
            "",
            1,
        ),
        (
            "probe",
            &|lab| {
                lab.write(fail(closed())).read(hang());
                probes(lab, because).check_timeout(99 * SECOND)
            },
            Outcome::Unknown,
            "",
            1,
        ),
        (
            "reconnect under the probe",
            &|lab| {
                lab.connect(Connect::Ok).connect(Connect::Hang).write(fail(closed()));
                probes(lab, because).check_timeout(99 * SECOND)
            },
            Outcome::Unknown,
            "",
            1,
        ),
        (
            "reconnect for the replay",
            &|lab| {
                lab.connect(Connect::Ok).connect(Connect::Hang).write(fail(closed()));
                says(lab, because)
            },
            Outcome::NotDone,
            "",
            1,
        ),
        (
            "readiness for the replay",
            &|lab| {
                lab.readiness(Readiness::Ready).readiness(Readiness::Hang).write(fail(closed()));
                says(lab, because)
            },
            Outcome::NotDone,
            "",
            1,
        ),
        (
            "replay",
            &|lab| {
                lab.write(fail(closed())).write(hang());
                says(lab, because)
            },
            Outcome::Unknown,
            "",
            2,
        ),
    ];
    for (part, setup, outcome, note, hand_overs) in cases {
        let lab = Lab::new();
        let layer = setup(&lab);
        let start = Instant::now();
        let error = stack(&lab, layer).send(write()).await.unwrap_err();
        assert!(start.elapsed() <= 60 * SECOND, "{part}: {:?}", start.elapsed());
        assert_eq!((error.outcome(), lab.writes()), (outcome, hand_overs), "{part}: {error}");
        assert!(notes(&error).contains(note), "{part}: {error}");
        assert_eq!(lab.events.abandoned(), 0, "{part}");
        assert_eq!(lab.events.doubts(), usize::from(hand_overs > 0), "{part}");
        assert!(lab.events.calls() <= 1, "{part}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_permit_that_never_comes_and_a_gate_that_never_opens_end_at_the_deadline() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(fail(closed()));
    let layer = WriteSafetyLayer::new(|_: Doubt| pending::<Checked>());
    let service = service(&lab, layer.max_checks(1).check_timeout(Duration::MAX));
    let mut blocks = task::spawn(service.clone().oneshot(write().deadline(Deadline::Never)));
    assert_pending!(blocks.poll());
    let start = Instant::now();
    let error = service.oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, 60 * SECOND));
    assert!(notes(&error).contains("deadline passed"), "{error}");

    let lab = Lab::new();
    lab.write(hang());
    let layer = says(&lab, because).attempt_timeout(SECOND).on_event(lab.events.sink());
    let mut service =
        ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(lab.gated());
    lab.gate(true);
    let call = service.ready().await.unwrap().call(write());
    lab.gate(false);
    let start = Instant::now();
    let error = call.await.unwrap_err();
    assert_eq!((error.outcome(), start.elapsed()), (Outcome::NotDone, 60 * SECOND));
    assert_eq!((error.attempts().len(), lab.events.doubts()), (1, 1));
    assert_eq!(fences(&error), [Some(FenceBasis::Declared)]);
}

#[tokio::test(start_paused = true)]
async fn a_service_that_is_ready_again_at_the_deadline_is_not_called() {
    let lab = Lab::new();
    lab.write(hang());
    let layer = says(&lab, because).attempt_timeout(SECOND);
    let mut service =
        ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND)).layer(layer).service(lab.gated());
    lab.gate(true);
    let mut call = task::spawn(service.ready().await.unwrap().call(write()));
    assert_pending!(call.poll());
    lab.gate(false);
    advance(SECOND).await;
    assert_pending!(call.poll());
    advance(59 * SECOND).await;
    lab.gate(true);
    assert_eq!(assert_ready_err!(call.poll()).outcome(), Outcome::NotDone);
    assert_eq!(lab.writes(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_doubt_that_arises_at_the_deadline_starts_no_check() {
    let lab = Lab::new();
    let late = held(&lab);
    let layer = says(&lab, because).attempt_timeout(99 * SECOND);
    let mut service = service(&lab, layer);
    let mut call = task::spawn(service.ready().await.unwrap().call(write()));
    assert_pending!(call.poll());
    advance(60 * SECOND).await;
    late.send(Err(closed())).unwrap();
    let error = assert_ready_err!(call.poll());
    assert_eq!((error.outcome(), lab.log.count("check")), (Outcome::Unknown, 0));
    assert_eq!(lab.events.doubts(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_verdict_and_a_deadline_at_once_hand_nothing_over() {
    for pending in [false, true] {
        let lab = Lab::new();
        lab.write(if pending { hang() } else { fail(closed()) });
        let layer = WriteSafetyLayer::new(|doubt: Doubt| async move {
            sleep(10 * SECOND).await;
            Ok(because(&doubt))
        });
        let layer = layer.attempt_timeout(SECOND).check_timeout(60 * SECOND);
        let wait = if pending { 11 * SECOND } else { 10 * SECOND };
        let error = service(&lab, layer).oneshot(write().within(wait)).await.unwrap_err();
        // Whether the verdict came in time is a matter of taste; that nothing was sent after it is not.
        assert_eq!((lab.writes(), error.attempts().len()), (1, 1));
        assert!(matches!(error.outcome(), Outcome::NotDone | Outcome::Unknown));
        assert_eq!(error.outcome() == Outcome::NotDone, fences(&error)[0].is_some());
    }
}

#[tokio::test(start_paused = true)]
async fn without_a_deadline_a_doubt_is_settled_all_the_same() {
    let never = || write().deadline(Deadline::Never);
    let lab = Lab::new();
    lab.write(fail(exits(30 * SECOND, true).exit_ends_effects())).write(answer(2));
    assert_eq!(service(&lab, says(&lab, |doubt| doubt.not_landed())).oneshot(never()).await.unwrap(), 2);
    assert_eq!(lab.log.timed(), ["0 write", "30000 check", "30000 write"]);

    // A process's end is not waited for without end, and a check is bounded.
    let lab = Lab::new();
    lab.write(fail(exits(Duration::MAX, true).exit_ends_effects()));
    let layer = WriteSafetyLayer::new(|_: Doubt| pending::<Checked>());
    let start = Instant::now();
    let error = service(&lab, layer).oneshot(never()).await.unwrap_err();
    assert_eq!((error.outcome(), start.elapsed()), (Outcome::Unknown, 70 * SECOND));

    // An attempt timeout works too.
    let lab = Lab::new();
    lab.write(hang()).write(answer(2));
    let layer = says(&lab, because).attempt_timeout(5 * SECOND);
    assert_eq!(service(&lab, layer).oneshot(never()).await.unwrap(), 2);
}

#[tokio::test(start_paused = true)]
async fn huge_durations_and_deadlines_neither_overflow_nor_panic() {
    for deadline in [Duration::MAX, Duration::from_secs(u64::MAX / 4), Duration::from_secs(1 << 40)] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(answer(2));
        let layer = says(&lab, because)
            .attempt_timeout(Duration::MAX)
            .check_timeout(Duration::MAX)
            .quarantine(Duration::MAX)
            .max_checks(usize::MAX);
        let service = service(&lab, layer);
        assert_eq!(service.oneshot(write().within(deadline)).await.unwrap(), 2);
    }
    for deadline in [Duration::from_nanos(1), ms(1), ms(2)] {
        let lab = Lab::new();
        lab.write(hang()).write(hang()).write(hang());
        let error = service(&lab, says(&lab, because)).oneshot(write().within(deadline)).await.unwrap_err();
        assert!(lab.writes() <= 2, "{error}");
        assert_eq!(error.outcome(), Outcome::Unknown);
    }
}

#[tokio::test(start_paused = true)]
async fn a_wrong_value_refuses_each_call_and_is_named() {
    let refuse = WriteSafetyLayer::<Req, Res>::refuse;
    for (layer, named) in [
        (refuse().attempt_timeout(Duration::ZERO), "attempt_timeout"),
        (refuse().check_timeout(Duration::ZERO), "check_timeout"),
        (refuse().quarantine(Duration::ZERO), "quarantine"),
        (refuse().max_checks(0), "max_checks"),
        // What only a check makes use of.
        (refuse().quarantine(SECOND), "quarantine"),
        (refuse().check_timeout(SECOND), "check_timeout"),
        (refuse().look_first(), "look_first"),
    ] {
        let lab = Lab::new();
        for call in [read(), write(), read()] {
            let error = service(&lab, layer.clone()).oneshot(call).await.unwrap_err();
            assert!(error.to_string().contains(named), "{error}");
            assert!(matches!(error.cause(), Cause::Refused(Refusal::Config(_))));
            assert_eq!(error.outcome(), Outcome::NotDone);
        }
        assert_eq!(lab.log.all(), [""; 0]);
        let built = Stack::builder(lab.connector()).writes(layer).build();
        assert!(built.unwrap_err().to_string().contains(named));
    }
}

// ===== The layer as a layer =====

#[tokio::test(start_paused = true)]
async fn works_without_any_other_layer() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).read(answer(3));
    let mut service = says(&lab, because).on_event(lab.events.sink()).layer(lab.connection());
    assert_eq!(service.ready().await.unwrap().call(write()).await.unwrap(), 2);
    assert_eq!(service.ready().await.unwrap().call(read()).await.unwrap(), 3);
    assert_eq!((lab.events.doubts(), lab.events.calls()), (1, 1));
    // As the outermost layer it reports failures itself.
    lab.write(fail(ambiguous())).write(fail(CallError::not_processed("x")));
    service.ready().await.unwrap().call(write()).await.unwrap_err();
    assert_eq!((lab.events.doubts(), lab.events.calls()), (2, 2));
}

#[tokio::test(start_paused = true)]
async fn a_deadline_without_a_deadline_layer_ends_the_call_when_it_is_polled() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(fail(closed()));
    let call = |check: Safety| check.layer(lab.connection()).oneshot(write().within(SECOND));
    let mut first = task::spawn(call(WriteSafetyLayer::new(|_: Doubt| pending::<Checked>())));
    let mut at_once = task::spawn(call(says(&lab, because)));
    assert_pending!(first.poll());
    advance(SECOND).await;
    assert_eq!(assert_ready_err!(first.poll()).outcome(), Outcome::Unknown);
    // Polled for the first time when the time is up.
    assert!(at_once.poll().is_ready());
}

#[tokio::test(start_paused = true)]
async fn an_error_of_readiness_is_not_sent() {
    #[derive(Clone, Debug)]
    struct Broken;
    impl Service<Req> for Broken {
        type Response = Res;
        type Error = CallError;
        type Future = Answer;
        fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), CallError>> {
            std::task::Poll::Ready(Err(CallError::ambiguous("x")))
        }
        fn call(&mut self, _: Req) -> Answer {
            unreachable!()
        }
    }
    let mut service = WriteSafetyLayer::refuse().layer(Broken);
    let error = service.ready().await.unwrap_err();
    assert_eq!((error.delivery(), error.outcome()), (Delivery::NotSent, Outcome::NotDone));
}

#[tokio::test(start_paused = true)]
async fn a_layer_that_retries_reads_outside_does_not_repeat_what_is_a_write_inside() {
    // The wrong order, and a rule of the inner layer that says more than the request does.
    let lab = Lab::new();
    lab.write(fail(ambiguous()));
    let layer = WriteSafetyLayer::refuse().classify(|_| Some(Effect::Write));
    let service = ServiceBuilder::new().layer(RetryReadOnly).layer(layer).service(lab.connection());
    let error = service.oneshot(read()).await.unwrap_err();
    assert_eq!((error.outcome(), error.effect(), lab.writes()), (Outcome::Unknown, Effect::Write, 1));
}

#[tokio::test(start_paused = true)]
async fn retries_outside_with_an_attempt_timeout_do_not_repeat_what_is_a_write_inside() {
    let lab = Lab::new();
    lab.write(later(5 * SECOND, Ok(1))).write(answer(2));
    let layer = Safety::refuse().classify(|_| Some(Effect::Write)).on_event(lab.events.sink());
    let service = ServiceBuilder::new()
        .layer(RetryReadOnly.attempt_timeout(SECOND))
        .layer(layer)
        .service(lab.connection());
    // As of any other write, its time is its own layer's business.
    assert_eq!(service.oneshot(read()).await.unwrap(), 1);
    assert_eq!((lab.writes(), lab.events.all()), (1, vec![]));
}

#[tokio::test(start_paused = true)]
async fn a_write_inside_that_outlasts_retries_outside_is_unknown_at_its_deadline() {
    let lab = Lab::new();
    lab.write(hang());
    let layer = Safety::refuse().classify(|_| Some(Effect::Write)).on_event(lab.events.sink());
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(10 * SECOND))
        .layer(RetryReadOnly.attempt_timeout(SECOND))
        .layer(layer)
        .service(lab.connection());
    let error = service.oneshot(read()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.writes(), lab.events.doubts()), (Outcome::Unknown, 1, 1));
}

#[tokio::test(start_paused = true)]
async fn of_nested_layers_one_has_the_write() {
    // Either would replay; the inner one while the outer one's check is under way.
    let lab = Lab::new();
    lab.write(later(5 * SECOND, Err(ambiguous()))).write(later(20 * SECOND, Ok(1)));
    let inner = says(&lab, |doubt| doubt.not_landed()).quarantine(6 * SECOND).attempt_timeout(20 * SECOND);
    let outer = WriteSafetyLayer::new(|doubt: Doubt| async move {
        sleep(3 * SECOND).await;
        Ok(doubt.not_landed())
    });
    let outer = outer.quarantine(6 * SECOND).attempt_timeout(4 * SECOND);
    assert_eq!(service(&lab, outer.clone()).oneshot(write()).await.unwrap(), 1);
    assert_eq!((lab.writes(), lab.events.doubts()), (2, 1));

    let lab = Lab::new();
    lab.write(later(5 * SECOND, Err(ambiguous()))).write(later(20 * SECOND, Ok(1)));
    let layers = ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()));
    let nested = layers.layer(outer).layer(inner).service(lab.connection());
    assert_eq!(nested.oneshot(write()).await.unwrap(), 1);
    assert_eq!((lab.writes(), lab.events.doubts(), lab.log.count("check")), (2, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn nested_layers_report_a_write_once() {
    let check = |lab: &Lab| says(lab, |doubt| doubt.unknown("tested"));
    for (outer_checks, inner_checks) in [(false, false), (false, true), (true, false), (true, true)] {
        for abandoned in [false, true] {
            let lab = Lab::new();
            lab.write(if abandoned { hang() } else { fail(ambiguous()) });
            let [outer, inner] = [outer_checks, inner_checks].map(|checks| match checks {
                true => check(&lab),
                false => WriteSafetyLayer::refuse(),
            });
            let layers =
                ServiceBuilder::new().layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()));
            let nested = layers.layer(outer).layer(inner).service(lab.connection());
            let mut call = task::spawn(nested.oneshot(write()));
            if abandoned {
                assert_pending!(call.poll());
                drop(call);
            } else {
                let error = call.await.unwrap_err();
                assert_eq!(error.outcome(), Outcome::Unknown);
            }
            let reports = (lab.events.doubts(), lab.events.abandoned());
            assert_eq!(reports, if abandoned { (0, 1) } else { (1, 0) });
            let checks = usize::from(!abandoned && (outer_checks || inner_checks));
            assert_eq!(lab.log.count("check"), checks);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_response_that_cannot_be_made_is_lost_and_the_report_is_not() {
    let lab = Lab::new();
    lab.write(fail(ambiguous()));
    let layer = says(&lab, |doubt| doubt.landed_without_result()).landed_with(|_| panic!("tested"));
    let error = service(&lab, layer).oneshot(write()).await.unwrap_err();
    assert_eq!((error.outcome(), lab.events.doubts()), (Outcome::DoneResultLost, 1));
}

/// A request that says to be a write when it is first asked, and a read from then on.
struct Fickle(CallContext, Arc<AtomicU32>);

impl Call for Fickle {
    fn method(&self) -> &str {
        "fickle"
    }

    fn effect(&self) -> Effect {
        match self.1.fetch_add(1, Ordering::Relaxed) {
            0 => Effect::Write,
            _ => Effect::ReadOnly,
        }
    }

    fn context(&self) -> &CallContext {
        &self.0
    }

    fn context_mut(&mut self) -> &mut CallContext {
        &mut self.0
    }

    fn try_clone(&self) -> Option<Self> {
        Some(Self(self.0.clone(), Arc::clone(&self.1)))
    }
}

#[tokio::test(start_paused = true)]
async fn a_request_that_changes_its_mind_stays_what_it_was_taken_for() {
    let sent = Arc::new(AtomicU32::new(0));
    let counter = Arc::clone(&sent);
    let lost = service_fn(move |_: Fickle| {
        counter.fetch_add(1, Ordering::Relaxed);
        ready(Err::<u8, _>(ambiguous()))
    });
    let layers = ServiceBuilder::new().layer(WriteSafetyLayer::refuse()).layer(RetryReadOnly);
    let request = Fickle(CallContext::new(), Arc::default());
    let error = layers.service(lost).oneshot(request).await.unwrap_err();
    assert_eq!((error.outcome(), sent.load(Ordering::Relaxed)), (Outcome::Unknown, 1));
}

#[tokio::test(start_paused = true)]
async fn a_layer_that_is_cloned_and_changed_leaves_the_first_as_it_was() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2));
    let first = says(&lab, |doubt| doubt.not_landed());
    let second = first.clone().quarantine(SECOND);
    let error = service(&lab, first).oneshot(write());
    let _ = second;
    assert_eq!(error.await.unwrap_err().outcome(), Outcome::Unknown);
}

// ===== Many calls in one task, of which tokio polls 128 channels a turn =====

const MANY: usize = 400;

/// All of them, each polled whenever one of them is woken.
async fn in_one_task<F: Future>(calls: Vec<F>) -> Vec<F::Output> {
    let mut calls: Vec<_> = calls.into_iter().map(|call| (Box::pin(call), None)).collect();
    poll_fn(|cx| {
        for (call, output) in calls.iter_mut().filter(|(_, output)| output.is_none()) {
            if let Poll::Ready(ended) = call.as_mut().poll(cx) {
                *output = Some(ended);
            }
        }
        match calls.iter().all(|(_, output)| output.is_some()) {
            true => Poll::Ready(()),
            false => Poll::Pending,
        }
    })
    .await;
    calls.into_iter().filter_map(|(_, output)| output).collect()
}

#[tokio::test(start_paused = true)]
async fn answers_that_are_there_win_however_many_calls_one_task_waits_for() {
    for request in [write, read] {
        for has_stack in [false, true] {
            let lab = Lab::new();
            let (tells, answers): (Vec<_>, Vec<_>) = (0..MANY).map(|_| oneshot::channel()).unzip();
            for answer in answers {
                match request().effect() {
                    Effect::ReadOnly => lab.read(on(answer)),
                    _ => lab.write(on(answer)),
                };
            }
            let layer = says(&lab, |doubt| doubt.unknown("as tested"));
            let service = match has_stack {
                true => BoxCloneService::new(stack(&lab, layer)),
                false => BoxCloneService::new(service(&lab, layer)),
            };
            let calls = (0..MANY).map(|_| service.clone().oneshot(request())).collect();
            let calls = tokio::spawn(in_one_task(calls));
            sleep(ms(100)).await;
            tells.into_iter().for_each(|tell| tell.send(Ok(1)).unwrap());
            advance(61 * SECOND).await;
            let ended = calls.await.unwrap();
            let lost = ended.iter().filter(|ended| ended.is_err()).count();
            assert_eq!((lost, lab.events.doubts()), (0, 0), "{:?}, {has_stack}", request().effect());
        }
    }
}

#[cfg(unix)]
#[tokio::test(start_paused = true)]
async fn a_process_that_is_known_to_live_is_known_however_little_is_left_of_the_tasks_turn() {
    for left in 1..8 {
        let lab = Lab::new();
        let (tell, told) = oneshot::channel();
        lab.write(fail(closed().with_exit(async move { told.await.unwrap() }))).write(answer(2));
        let layer = says(&lab, |doubt| doubt.not_landed()).quarantine(SECOND);
        let mut call = Box::pin(service(&lab, layer).oneshot(write()));
        let call = tokio::spawn(poll_fn(move |cx| {
            for _ in left..128 {
                assert!(pin!(consume_budget()).poll(cx).is_ready());
            }
            call.as_mut().poll(cx)
        }));
        sleep(ms(100)).await;
        tell.send(Exit::new(None, false)).unwrap();
        assert_eq!(call.await.unwrap().unwrap_err().outcome(), Outcome::Unknown);
        assert_eq!(lab.writes(), 1, "{left}");
    }
}

/// What is ready and not called holds what a limit below has given it.
#[tokio::test(start_paused = true)]
async fn a_write_that_is_refused_keeps_no_other_clone_from_its_turn() {
    let lab = Lab::new();
    lab.write(fail(ambiguous()));
    let limited = GlobalConcurrencyLimitLayer::new(1).layer(lab.connection());
    let mut service = Safety::refuse().conflict_key(|_: &Req| Some("k")).layer(limited);
    let mut other = task::spawn(service.clone());
    assert_eq!(service.ready().await.unwrap().call(write()).await.unwrap_err().outcome(), Outcome::Unknown);
    assert!(matches!(
        service.ready().await.unwrap().call(write()).await.unwrap_err().cause(),
        Cause::Refused(Refusal::KeyInDoubt(_))
    ));
    assert_ready_ok!(other.enter(|cx, mut other| other.poll_ready(cx)));
}
