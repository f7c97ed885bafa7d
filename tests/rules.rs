//! The table of rules (DESIGN, section 2), cell by cell: as a function, and through all four layers.

mod lab;

use std::{sync::Arc, time::Duration};

use goaround::{
    Call, CallError, Cause, ConnectError, DeadlineLayer, Delivery, Effect, Evidence, Outcome, ReconnectLayer,
    Refusal, RetryReadOnly, Rule, Scope, ServerError, Stack, WriteSafetyLayer, rule,
};
use lab::*;
use tower::{ServiceBuilder, ServiceExt};

const STRONG: [Evidence; 5] = [
    Evidence::RefusedStream,
    Evidence::GoAway,
    Evidence::TooEarly,
    Evidence::TooManyRequests,
    Evidence::FrameCut,
];
const PROBABLE: [Evidence; 3] = [Evidence::SessionUnknown, Evidence::Unavailable, Evidence::RequestTimeout];
const FINAL: [Evidence; 2] = [Evidence::Unauthorized, Evidence::Forbidden];

// ===== The function =====

#[test]
fn every_cell_of_the_table() {
    use Delivery::{Ambiguous, Answered, NotProcessed, NotSent};
    use Scope::Connection;
    let closed = || closed().cause().clone();
    let refused = Cause::ConnectFailed(Arc::new(ConnectError::Panicked));
    let answer = Cause::Answered(ServerError::new(-32000, "quota"));
    let (call, conn) = (Scope::Call, Connection);
    // Cause, scope, delivery; what follows for a read, and for a write.
    let rows = [
        ("dead before it was given away", closed(), conn, NotSent, Rule::HandOver, Rule::HandOver),
        ("not ready, the connection gone", Cause::NotReady, conn, NotSent, Rule::HandOver, Rule::HandOver),
        ("not ready, otherwise", Cause::NotReady, call, NotSent, Rule::Retry, Rule::Return),
        ("not sent, foreign", Cause::Other, call, NotSent, Rule::Retry, Rule::Return),
        ("withdrawn", Cause::AttemptTimeout, call, NotSent, Rule::HandOver, Rule::HandOver),
        ("connect failed", refused, conn, NotSent, Rule::Retry, Rule::Return),
        ("refused, foreign", Cause::Other, call, NotProcessed, Rule::Retry, Rule::Return),
        ("closed in flight", closed(), conn, Ambiguous, Rule::Retry, Rule::Check),
        ("reset", closed(), call, Ambiguous, Rule::Retry, Rule::Check),
        ("attempt timed out", Cause::AttemptTimeout, call, Ambiguous, Rule::Retry, Rule::Check),
        ("unclassified", Cause::Other, call, Ambiguous, Rule::Retry, Rule::Check),
        ("unclassified, connection", Cause::Other, conn, Ambiguous, Rule::Retry, Rule::Check),
        ("the server's own error", answer, call, Answered, Rule::Return, Rule::Return),
        ("a foreign answer", Cause::Other, call, Answered, Rule::Return, Rule::Return),
        ("an answer and a closure", closed(), conn, Answered, Rule::Return, Rule::Return),
        ("unread", Cause::AnswerUnread, call, Answered, Rule::Return, Rule::Return),
        ("too large", Cause::AnswerTooLarge { limit: 1 }, call, Answered, Rule::Return, Rule::Return),
        ("deadline, not sent", Cause::Deadline, call, NotSent, Rule::Return, Rule::Return),
        ("deadline, ambiguous", Cause::Deadline, call, Ambiguous, Rule::Return, Rule::Return),
        ("configuration", Cause::Refused(Refusal::Config("x")), call, NotSent, Rule::Return, Rule::Return),
        ("shutdown", Cause::Refused(Refusal::Shutdown), call, NotSent, Rule::Return, Rule::Return),
        (
            "crash loop",
            Cause::Refused(Refusal::CrashLoop([].into())),
            conn,
            NotSent,
            Rule::Return,
            Rule::Return,
        ),
        ("overload", Cause::Refused(Refusal::Overloaded("x")), call, NotSent, Rule::Return, Rule::Return),
        ("no probe", Cause::Refused(Refusal::NotAProbe), call, NotSent, Rule::Return, Rule::Return),
    ];
    for (name, cause, scope, delivery, for_reads, for_writes) in rows {
        for trusted in [false, true] {
            // Only evidence can be trusted.
            let of = |effect| rule(effect, &cause, scope, delivery, trusted);
            assert_eq!(of(Effect::ReadOnly), for_reads, "{name}: read");
            assert_eq!(of(Effect::Write), for_writes, "{name}: write");
            assert_eq!(of(Effect::Idempotent), for_writes, "{name}: idempotent write");
        }
    }
    for (evidence, read, write, trusted) in
        (STRONG.map(|e| (e, Rule::Retry, Rule::Return, Rule::Retry)).into_iter())
            .chain(PROBABLE.map(|e| (e, Rule::Retry, Rule::Check, Rule::Retry)))
            .chain(FINAL.map(|e| (e, Rule::Return, Rule::Return, Rule::Return)))
    {
        let of = |effect, trusted| {
            rule(effect, &Cause::Evidence(evidence), evidence.scope(), evidence.delivery(effect), trusted)
        };
        assert_eq!(of(Effect::ReadOnly, false), read, "{evidence}");
        for effect in [Effect::Write, Effect::Idempotent] {
            assert_eq!((of(effect, false), of(effect, true)), (write, trusted), "{evidence}");
        }
    }
}

// ===== Through the stack =====

/// Who calls, and what the check says if the call ends in doubt.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Caller {
    Reads,
    Refuses,
    Finds,
    FindsWithoutResult,
    /// Not landed, by a fence that the caller declares.
    FindsNothing,
    /// Not landed, and no fence.
    FindsNothingUnfenced,
    KnowsNothing,
}
use Caller::*;

const WRITERS: [Caller; 6] =
    [Refuses, Finds, FindsWithoutResult, FindsNothing, FindsNothingUnfenced, KnowsNothing];

#[derive(Debug, PartialEq)]
struct Went {
    hand_overs: usize,
    result: Result<u32, Failed>,
}

#[derive(Debug, PartialEq)]
struct Failed {
    outcome: Outcome,
    may_have_landed: bool,
    is_safe_to_repeat: bool,
    attempts: usize,
}

fn ok(hand_overs: usize, response: u32) -> Went {
    Went { hand_overs, result: Ok(response) }
}

fn failed(hand_overs: usize, outcome: Outcome, attempts: usize) -> Went {
    let may_have_landed = matches!(outcome, Outcome::Unknown | Outcome::DoneResultLost);
    let is_safe_to_repeat = matches!(outcome, Outcome::NotDone | Outcome::NoAnswer);
    Went { hand_overs, result: Err(Failed { outcome, may_have_landed, is_safe_to_repeat, attempts }) }
}

fn safety(caller: Caller) -> WriteSafetyLayer<Req, Res> {
    if matches!(caller, Refuses | Reads) {
        return WriteSafetyLayer::refuse();
    }
    WriteSafetyLayer::new(move |doubt: Doubt| async move {
        Ok(match caller {
            Finds => doubt.landed(77),
            FindsWithoutResult => doubt.landed_without_result(),
            FindsNothing => doubt.not_landed_because("tested"),
            FindsNothingUnfenced => doubt.not_landed(),
            _ => doubt.unknown("no idea"),
        })
    })
}

async fn fly(lab: &Lab, writes: WriteSafetyLayer<Req, Res>, request: Req) -> Went {
    let stack = Stack::builder(lab.connector())
        .deadline(60 * SECOND)
        .writes(writes)
        .retry(RetryReadOnly.attempt_timeout(3 * SECOND))
        .on_event(lab.events.sink())
        .build()
        .unwrap();
    let result = stack.send(request).await.map_err(|error| Failed {
        outcome: error.outcome(),
        may_have_landed: error.may_have_landed(),
        is_safe_to_repeat: error.is_safe_to_repeat(),
        attempts: error.attempts().len(),
    });
    let unknown = matches!(&result, Err(Failed { outcome: Outcome::Unknown | Outcome::DoneResultLost, .. }));
    if unknown {
        assert_eq!(lab.events.doubts(), 1, "every unknown is reported once");
    }
    assert!(lab.events.calls() <= 1, "{:?}", lab.events.all());
    assert_eq!(lab.events.abandoned(), 0);
    Went { hand_overs: lab.writes() + lab.reads(), result }
}

/// What becomes of a call whose first attempt goes as `first` says, while a second one would be answered
/// by 2.
async fn went(caller: Caller, effect: Effect, first: &dyn Fn(&Lab)) -> Went {
    let lab = Lab::new();
    first(&lab);
    lab.read(answer(2)).write(answer(2));
    let call = if caller == Reads { read() } else { write().as_effect(effect) };
    fly(&lab, safety(caller), call).await
}

/// Expects that of a read, and of a write whoever makes it.
async fn expect(name: &str, first: &dyn Fn(&Lab), for_reads: Went, for_writes: fn(Caller) -> Went) {
    assert_eq!(went(Reads, Effect::ReadOnly, first).await, for_reads, "{name}: read");
    for effect in [Effect::Write, Effect::Idempotent] {
        for caller in WRITERS {
            let went = went(caller, effect, first).await;
            assert_eq!(went, for_writes(caller), "{name}: {effect:?}, {caller:?}");
        }
    }
}

/// What becomes of a write in doubt.
fn in_doubt(caller: Caller) -> Went {
    match caller {
        Reads | Refuses | KnowsNothing | FindsNothingUnfenced => failed(1, Outcome::Unknown, 1),
        Finds => ok(1, 77),
        FindsWithoutResult => failed(1, Outcome::DoneResultLost, 1),
        FindsNothing => ok(2, 2),
    }
}

fn both(lab: &Lab, error: impl Fn() -> CallError) {
    lab.read(fail(error())).write(fail(error()));
}

#[tokio::test(start_paused = true)]
async fn a_success_is_a_success() {
    expect("success", &|_| {}, ok(1, 2), |_| ok(1, 2)).await;
}

#[tokio::test(start_paused = true)]
async fn a_connection_that_was_dead_before_is_replaced_for_reads_and_writes_alike() {
    let dead = |lab: &Lab| {
        lab.readiness(Readiness::Dead);
    };
    expect("dead", &dead, ok(1, 2), |_| ok(1, 2)).await;

    // Once per call: the second time it is told.
    let twice = |lab: &Lab| {
        lab.readiness(Readiness::Dead).readiness(Readiness::Dead);
    };
    expect("dead twice", &twice, ok(1, 2), |_| failed(0, Outcome::NotDone, 2)).await;
}

#[tokio::test(start_paused = true)]
async fn a_failed_connect_is_retried_for_reads_and_returned_for_writes() {
    let refused = |lab: &Lab| {
        lab.connect(Connect::Fail);
    };
    expect("refused", &refused, ok(1, 2), |_| failed(0, Outcome::NotDone, 1)).await;
}

#[tokio::test(start_paused = true)]
async fn what_was_provably_not_sent_or_not_processed_is_returned_as_not_done() {
    let not_sent = |lab: &Lab| both(lab, || CallError::not_sent("x"));
    expect("not sent", &not_sent, ok(2, 2), |_| failed(1, Outcome::NotDone, 1)).await;
    let not_processed = |lab: &Lab| both(lab, || CallError::not_processed("x"));
    expect("not processed", &not_processed, ok(2, 2), |_| failed(1, Outcome::NotDone, 1)).await;
}

#[tokio::test(start_paused = true)]
async fn whatever_is_ambiguous_is_retried_for_reads_and_checked_for_writes() {
    for (name, error) in [
        ("closed in flight", closed as fn() -> CallError),
        ("unclassified", || CallError::ambiguous("x")),
        ("unclassified in a box", || CallError::from_boxed("x".into())),
        ("unclassified, connection", || CallError::ambiguous("x").connection_lost()),
        ("gateway error", || CallError::ambiguous(std::io::Error::other("502"))),
    ] {
        expect(name, &|lab| both(lab, error), ok(2, 2), in_doubt).await;
    }
    let slow = |lab: &Lab| {
        lab.read(hang()).write(hang());
    };
    expect("attempt timeout", &slow, ok(2, 2), in_doubt).await;
}

#[tokio::test(start_paused = true)]
async fn strong_evidence_is_returned_for_writes_and_probable_evidence_checked() {
    for evidence in STRONG {
        let first = |lab: &Lab| both(lab, || CallError::evidence(evidence, "x"));
        expect(&evidence.to_string(), &first, ok(2, 2), |_| failed(1, Outcome::NotDone, 1)).await;
    }
    for evidence in PROBABLE {
        let first = |lab: &Lab| both(lab, || CallError::evidence(evidence, "x"));
        expect(&evidence.to_string(), &first, ok(2, 2), in_doubt).await;
    }
    for evidence in FINAL {
        let first = |lab: &Lab| both(lab, || CallError::evidence(evidence, "x"));
        let returned = failed(1, Outcome::NotDone, 1);
        expect(&evidence.to_string(), &first, returned, |_| failed(1, Outcome::NotDone, 1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn trusted_evidence_is_replayed_once_and_without_a_check() {
    for evidence in STRONG.into_iter().chain(PROBABLE) {
        for caller in WRITERS {
            let lab = Lab::new();
            lab.write(fail(CallError::evidence(evidence, "x"))).write(answer(2));
            let went = fly(&lab, safety(caller).trust(evidence), write()).await;
            assert_eq!(went, ok(2, 2), "{evidence} {caller:?}");
            assert_eq!(lab.events.doubts(), 0);

            // One replay in all: the second refusal is told.
            let lab = Lab::new();
            let refusal = || fail(CallError::evidence(evidence, "x"));
            lab.write(refusal()).write(refusal());
            let went = fly(&lab, safety(caller).trust(evidence), write()).await;
            assert_eq!(went, failed(2, Outcome::NotDone, 2), "{evidence} {caller:?}");

            // To trust other evidence changes nothing.
            let other = if evidence == STRONG[0] { STRONG[1] } else { STRONG[0] };
            let lab = Lab::new();
            lab.write(fail(CallError::evidence(evidence, "x"))).write(answer(2));
            let went = fly(&lab, safety(caller).trust(other), write()).await;
            let strong = STRONG.contains(&evidence);
            let expected = if strong { failed(1, Outcome::NotDone, 1) } else { in_doubt(caller) };
            assert_eq!(went, expected, "{evidence} {caller:?}");
        }
    }
    for evidence in FINAL {
        let lab = Lab::new();
        lab.write(fail(CallError::evidence(evidence, "x")));
        let went = fly(&lab, safety(FindsNothing).trust(evidence), write()).await;
        assert_eq!(went, failed(1, Outcome::NotDone, 1), "no trust makes {evidence} worth a repetition");
    }
}

#[tokio::test(start_paused = true)]
async fn the_servers_answer_is_returned_unchanged() {
    let first = |lab: &Lab| both(lab, || CallError::answered("quota"));
    let answered = failed(1, Outcome::Answered, 1);
    expect("answered", &first, answered, |_| failed(1, Outcome::Answered, 1)).await;
}

#[tokio::test(start_paused = true)]
async fn what_the_stack_refuses_is_final_and_not_done() {
    for caller in [Reads].into_iter().chain(WRITERS) {
        let call = || if caller == Reads { read() } else { write() };
        let lab = Lab::new();
        let stack = Stack::builder(lab.connector()).writes(safety(caller)).build().unwrap();
        stack.shutdown(Duration::ZERO).await;
        let error = stack.send(call()).await.unwrap_err();
        assert!(matches!(error.cause(), Cause::Refused(Refusal::Shutdown)));
        assert_eq!((error.outcome(), error.is_safe_to_repeat()), (Outcome::NotDone, true));

        // A wrong configuration of a bare layer, and a deadline that is over.
        let past = call().within(Duration::ZERO);
        let service = ServiceBuilder::new()
            .layer(DeadlineLayer::new(SECOND))
            .layer(safety(caller).max_checks(0))
            .layer(RetryReadOnly)
            .layer(ReconnectLayer::once())
            .service(lab.connector());
        let error = service.clone().oneshot(call()).await.unwrap_err();
        assert!(error.to_string().contains("max_checks"), "{error}");
        assert_eq!(error.outcome(), Outcome::NotDone);
        let error = service.oneshot(past).await.unwrap_err();
        assert!(matches!(error.cause(), Cause::Deadline));
        assert_eq!(error.outcome(), Outcome::NotDone);
        assert_eq!(lab.log.all(), [""; 0], "nothing was connected, let alone sent");
    }
}

#[tokio::test(start_paused = true)]
async fn ambiguous_and_then_refused_is_still_unknown() {
    // The check's own probe finds no connection, so that nothing is known of the first attempt.
    let lab = Lab::new();
    lab.connect(Connect::Ok).write(fail(closed()));
    for _ in 0..50 {
        lab.connect(Connect::Fail);
    }
    let layer = WriteSafetyLayer::new(|doubt: Doubt| async move {
        doubt.probe(read()).await?;
        Ok(doubt.not_landed_because("tested"))
    });
    assert_eq!(fly(&lab, layer, write()).await, failed(1, Outcome::Unknown, 1));

    // And without a check.
    let lab = Lab::new();
    lab.connect(Connect::Ok).connect(Connect::Fail).write(fail(closed()));
    assert_eq!(fly(&lab, safety(Refuses), write()).await, failed(1, Outcome::Unknown, 1));
}

#[tokio::test(start_paused = true)]
async fn not_landed_by_verdict_and_then_refused_is_not_done() {
    let lab = Lab::new();
    lab.connect(Connect::Ok).connect(Connect::Fail).write(fail(closed()));
    assert_eq!(fly(&lab, safety(FindsNothing), write()).await, failed(1, Outcome::NotDone, 2));
}

#[tokio::test(start_paused = true)]
async fn an_answered_error_after_a_declared_fence_may_be_the_first_attempts_work() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(fail(CallError::answered("already exists")));
    let went = fly(&lab, safety(FindsNothing), write()).await;
    let failed = went.result.unwrap_err();
    assert_eq!((failed.outcome, failed.may_have_landed), (Outcome::Answered, true));
    assert_eq!((failed.is_safe_to_repeat, failed.attempts), (false, 2));
    assert_eq!(lab.events.doubts(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_request_that_cannot_be_cloned_is_sent_once() {
    for (effect, outcome) in [(Effect::ReadOnly, Outcome::NoAnswer), (Effect::Write, Outcome::Unknown)] {
        let lab = Lab::new();
        both(&lab, closed);
        let call = goaround::Tagged::once("once", |_| effect);
        assert_eq!(fly(&lab, safety(FindsNothing), call).await, failed(1, outcome, 1));
    }
}
