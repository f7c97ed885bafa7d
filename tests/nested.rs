//! Layers and stacks within others: over gateways, beside retries, around queues. Of each write one layer answers at any
//! moment, and whoever has it next is told so.

mod lab;

use std::future::ready;

use goaround::{
    BoxError, Call, CallError, DeadlineLayer, Effect, Evidence, Outcome, ReconnectLayer, RetryReadOnly,
    Stack, Tagged, WriteSafetyLayer,
    write_safety::{
        KeyedAnswer, KeyedWrites,
        ledger::{AnyLedger, Ledger, MemoryLedger},
    },
};
use lab::*;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn, util::BoxCloneService};

type Safety = WriteSafetyLayer<Req, Res>;

fn ambiguous() -> CallError {
    CallError::ambiguous("reset")
}

fn keyed(window: std::time::Duration) -> Safety {
    Safety::refuse().keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).honoured_for(window))
}

// ----- an error whose last attempt was not sent, of a write that is unknown

/// A replay by a key is withdrawn when the key's time is over. A layer around it that never replays hands it over again.
#[tokio::test(start_paused = true)]
async fn a_layer_that_refuses_replays_hands_no_write_over_again_that_is_unknown() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).connect(Connect::Ok).connect(Connect::After(15 * SECOND));
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(Safety::refuse())
        .layer(keyed(10 * SECOND))
        .layer(ReconnectLayer::once())
        .service(lab.connector());
    let result = service.oneshot(write()).await;
    assert_eq!(lab.writes(), 1, "sent again after the key's time");
    assert_eq!(result.unwrap_err().outcome(), Outcome::Unknown);
}

/// The control: without the outer layer nothing of it is sent again.
#[tokio::test(start_paused = true)]
async fn without_an_outer_layer_a_key_whose_time_is_over_leaves_the_write_unknown() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).connect(Connect::Ok).connect(Connect::After(15 * SECOND));
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(keyed(10 * SECOND))
        .layer(ReconnectLayer::once())
        .service(lab.connector());
    let result = service.oneshot(write()).await;
    assert_eq!(lab.writes(), 1);
    assert_eq!(result.unwrap_err().outcome(), Outcome::Unknown);
}

// ----- a request that is handed back

/// The connections of a gateway are whole stacks. One gives a write back of which nothing was sent; the next one takes
/// it for one that a layer further out answers for.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_handed_back_is_checked_and_reported_on_the_next_connection() {
    for outer_layer in [true, false] {
        let lab = Lab::new();
        lab.readiness(Readiness::Dead).readiness(Readiness::Dead);
        lab.write(fail(ambiguous()));
        let inner = lab.clone();
        let connector = service_fn(move |()| {
            let log = inner.log.clone();
            let check = WriteSafetyLayer::new(move |doubt: Doubt| {
                log.note("check");
                async move { Ok(doubt.landed(7)) }
            });
            ready(Ok::<_, BoxError>(check.layer(ReconnectLayer::once().layer(inner.connector()))))
        });
        let deadline = DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink());
        let result = match outer_layer {
            true => {
                let service = ServiceBuilder::new().layer(deadline).layer(Safety::refuse());
                service.layer(ReconnectLayer::once()).service(connector).oneshot(write()).await
            }
            false => {
                let service = ServiceBuilder::new().layer(deadline).layer(ReconnectLayer::once());
                service.service(connector).oneshot(write()).await
            }
        };
        assert_eq!(lab.writes(), 1);
        assert_eq!(lab.events.doubts(), 1, "nobody reports it, outer layer: {outer_layer}");
        assert_eq!(result.unwrap(), 7);
    }
}

/// What the ledger says of it meanwhile: the first layer has closed its entry as not landed, and the next one makes none.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_handed_back_is_in_the_ledger_when_it_is_sent_over_the_next_connection() {
    let lab = Lab::new();
    lab.readiness(Readiness::Dead).readiness(Readiness::Dead);
    lab.write(fail(ambiguous()));
    let ledger = MemoryLedger::new();
    let (inner, given) = (lab.clone(), ledger.clone());
    let connector = service_fn(move |()| {
        let check = WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.unknown("tested")) });
        let check = check.ledger(given.clone());
        ready(Ok::<_, BoxError>(check.layer(ReconnectLayer::once().layer(inner.connector()))))
    });
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(ReconnectLayer::once());
    let error = service.service(connector).oneshot(write()).await.unwrap_err();
    assert_eq!((lab.writes(), error.outcome()), (1, Outcome::Unknown));
    assert_eq!((lab.events.doubts(), ledger.in_doubt().await.unwrap().len()), (1, 1));
}

/// And whose caller goes away.
#[tokio::test(start_paused = true)]
async fn a_write_that_was_handed_back_and_is_dropped_on_the_next_connection_is_reported() {
    let lab = Lab::new();
    lab.readiness(Readiness::Dead).readiness(Readiness::Dead);
    lab.write(hang());
    let inner = lab.clone();
    let connector = service_fn(move |()| {
        let check = WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.unknown("tested")) });
        ready(Ok::<_, BoxError>(check.layer(ReconnectLayer::once().layer(inner.connector()))))
    });
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(ReconnectLayer::once());
    let call = service.service(connector).oneshot(write());
    assert!(tokio::time::timeout(ms(100), call).await.is_err());
    assert_eq!((lab.writes(), lab.events.abandoned()), (1, 1));
}

// ----- a layer further in has taken the report over, and has nothing to report

async fn reports(lab: &Lab, ledgers: impl IntoIterator<Item = AnyLedger>) -> (usize, usize) {
    let mut entries = 0;
    for ledger in ledgers {
        entries += ledger.in_doubt().await.unwrap().len();
    }
    (lab.events.doubts() + lab.events.abandoned(), entries)
}

#[tokio::test(start_paused = true)]
async fn an_answer_that_the_outer_layer_reads_as_in_progress_is_reported() {
    let lab = Lab::new();
    lab.write(fail(CallError::answered("in progress")));
    let answers = |answer: Result<&Res, &CallError>| {
        answer.err().map(|_| KeyedAnswer::InFlight { recheck_after: SECOND })
    };
    let outer = Safety::refuse().keyed(KeyedWrites::new(|_: &mut Req, _: &str| true).answers(answers));
    let inner = Safety::refuse().on_event(lab.events.sink()).layer(lab.connection());
    let inner_ledger = inner.ledger();
    let outer = outer.on_event(lab.events.sink()).layer(inner);
    let ledgers = [outer.ledger(), inner_ledger];
    let error = outer.oneshot(write()).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(reports(&lab, ledgers).await, (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_write_that_fails_between_the_layers_once_it_was_answered_is_reported() {
    let lab = Lab::new();
    lab.write(answer(1));
    let inner = Safety::refuse().on_event(lab.events.sink()).layer(lab.connection());
    let inner_ledger = inner.ledger();
    let between = inner.and_then(|_: Res| ready(Err::<Res, _>(CallError::ambiguous("cannot be decoded"))));
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(between);
    let ledgers = [outer.ledger(), inner_ledger];
    let error = outer.oneshot(write()).await.unwrap_err();
    assert_eq!(error.outcome(), Outcome::Unknown);
    assert_eq!(reports(&lab, ledgers).await, (1, 1));
}

#[tokio::test(start_paused = true)]
async fn a_write_that_is_dropped_between_the_layers_once_it_was_answered_is_reported() {
    let lab = Lab::new();
    lab.write(answer(1));
    let inner = Safety::refuse().on_event(lab.events.sink()).layer(lab.connection());
    let inner_ledger = inner.ledger();
    let between = inner.and_then(|response: Res| async move {
        // It keeps the answer somewhere, which takes a while.
        tokio::time::sleep(SECOND).await;
        Ok(response)
    });
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(between);
    let ledgers = [outer.ledger(), inner_ledger];
    assert!(tokio::time::timeout(ms(100), outer.oneshot(write())).await.is_err());
    assert_eq!(lab.writes(), 1);
    assert_eq!(reports(&lab, ledgers).await, (1, 1));
}

/// The control of all three: without the inner layer.
#[tokio::test(start_paused = true)]
async fn without_an_inner_layer_the_outer_one_reports_a_write_that_is_dropped() {
    let lab = Lab::new();
    lab.write(answer(1));
    let between = lab.connection().and_then(|response: Res| async move {
        tokio::time::sleep(SECOND).await;
        Ok(response)
    });
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(between);
    let ledgers = [outer.ledger(), outer.ledger()];
    assert!(tokio::time::timeout(ms(100), outer.oneshot(write())).await.is_err());
    assert_eq!(reports(&lab, ledgers).await, (1, 2));
}

/// A stack that is down, and a plain connection in its place.
#[tokio::test(start_paused = true)]
async fn a_write_that_a_stack_refuses_and_another_connection_loses_is_reported() {
    let (down, lab) = (Lab::new(), Lab::new());
    down.connect(Connect::Fail);
    lab.write(fail(ambiguous()));
    let stack = Safety::refuse().on_event(lab.events.sink());
    let stack = stack.layer(ReconnectLayer::once().layer(down.connector()));
    let inner_ledger = stack.ledger();
    let plain = lab.connection();
    let either = service_fn(move |call: Req| -> Answer {
        let (again, mut plain) = (call.try_clone().unwrap(), plain.clone());
        let first: Answer = Box::pin(stack.clone().oneshot(call));
        Box::pin(async move {
            match first.await {
                Err(error) if error.outcome() == Outcome::NotDone => plain.call(again).await,
                result => result,
            }
        })
    });
    let outer = Safety::refuse().on_event(lab.events.sink()).layer(either);
    let ledgers = [outer.ledger(), inner_ledger];
    let error = outer.oneshot(write()).await.unwrap_err();
    assert_eq!((lab.writes(), error.outcome()), (1, Outcome::Unknown));
    assert_eq!(reports(&lab, ledgers).await, (1, 1));
}

// ----- copies that go through a layer further in

/// `that_another_copy_was_not_sent_does_not_say_that_the_write_was_not`, with a layer that refuses replays further in.
#[tokio::test(start_paused = true)]
async fn that_another_copy_was_not_sent_does_not_say_that_the_write_was_not_over_a_stack_either() {
    for nested in [false, true] {
        let lab = Lab::new();
        lab.write(fail(closed())).connect(Connect::Ok).connect(Connect::Fail);
        let reconnect = ReconnectLayer::once().layer(lab.connector());
        let below = match nested {
            true => BoxCloneService::new(Safety::refuse().on_event(lab.events.sink()).layer(reconnect)),
            false => BoxCloneService::new(reconnect),
        };
        let twice = service_fn(move |call: Req| -> Answer {
            let again = call.try_clone().unwrap();
            let first: Answer = Box::pin(below.clone().oneshot(call));
            let second: Answer = Box::pin(below.clone().oneshot(again));
            Box::pin(async move {
                let _ = first.await;
                second.await
            })
        });
        let service =
            DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()).layer(Safety::refuse().layer(twice));
        let error = service.oneshot(write()).await.unwrap_err();
        assert_eq!((lab.writes(), error.outcome()), (1, Outcome::Unknown), "nested: {nested}: {error}");
    }
}

/// Of two copies one is lost, and a layer that lets them pass turns the other one away, since its key is in doubt by then.
#[tokio::test(start_paused = true)]
async fn that_another_copy_was_turned_away_does_not_say_that_the_write_was_not_sent() {
    for (passes, leaves) in [(true, true), (true, false), (false, true), (false, false)] {
        let lab = Lab::new();
        lab.write(fail(closed())).write(fail(ambiguous()));
        let inner = Safety::refuse().conflict_key(|_: &Req| Some("k"));
        let inner = inner.layer(ReconnectLayer::once().layer(lab.connector()));
        let inner_ledger = inner.ledger();
        let twice = service_fn(move |call: Req| -> Answer {
            let again = call.try_clone().unwrap();
            let [first, other, second] =
                [call, write(), again].map(|request| -> Answer { Box::pin(inner.clone().oneshot(request)) });
            Box::pin(async move {
                let _ = (first.await, other.await);
                let turned_away = second.await;
                tokio::time::sleep(SECOND).await;
                turned_away
            })
        });
        let outer = match passes {
            true => WriteSafetyLayer::new(|doubt: Doubt| async move { Ok(doubt.unknown("tested")) }),
            false => Safety::refuse(),
        };
        let outer = outer.attempt_timeout(30 * SECOND).on_event(lab.events.sink()).layer(twice);
        let ledger = if passes { outer.ledger() } else { inner_ledger };
        let wait = if leaves { ms(100) } else { 60 * SECOND };
        let result = tokio::time::timeout(wait, outer.oneshot(write())).await;
        assert_eq!(lab.writes(), 1 + usize::from(passes));
        let outcome = result.ok().map(|result| result.unwrap_err().outcome());
        assert_eq!(outcome, (!leaves).then_some(Outcome::Unknown), "passes: {passes}");
        assert_eq!(reports(&lab, [ledger]).await, (1, 1), "passes: {passes}, its caller leaves: {leaves}");
    }
}

// ----- what is held up above a layer further in

/// A queue with a task of its own, which holds each request up for so long and then calls on, whoever waits; and holds up
/// its answer too.
fn held_up<S>(
    below: S,
    wait: std::time::Duration,
    answer_waits: std::time::Duration,
) -> impl Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static
where
    S: Service<Req, Response = Res, Error = CallError, Future: Send> + Clone + Send + 'static,
{
    let below = BoxCloneService::new(below);
    service_fn(move |request: Req| -> Answer {
        let answer: Answer = Box::pin(below.clone().oneshot(request));
        let held_up = tokio::spawn(async move {
            tokio::time::sleep(wait).await;
            let answer = answer.await;
            tokio::time::sleep(answer_waits).await;
            answer
        });
        Box::pin(async move { held_up.await.unwrap() })
    })
}

/// Its caller leaves, or a service in between gives it up. Further in it lives on, and may have told of it already where what
/// is in between holds that up.
#[tokio::test(start_paused = true)]
async fn a_write_that_lives_on_further_in_when_its_call_is_over_is_reported_once() {
    let steps: [fn() -> Step; 4] = [
        hang,
        || later(5 * SECOND, Ok(1)),
        || later(5 * SECOND, Err(ambiguous())),
        || later(SECOND, Err(ambiguous())),
    ];
    for (case, step) in steps.iter().enumerate() {
        for (layers, leaves) in [(1, true), (1, false), (2, true), (2, false)] {
            let lab = Lab::new();
            lab.write(step());
            let inner = Safety::refuse().on_event(lab.events.sink()).layer(lab.connection());
            let mut ledgers = vec![inner.ledger()];
            let mut below = BoxCloneService::new(held_up(inner, ms(0), 3 * SECOND));
            if layers == 2 {
                let middle = Safety::refuse().on_event(lab.events.sink()).layer(below);
                ledgers.push(middle.ledger());
                below = BoxCloneService::new(held_up(middle, ms(0), 3 * SECOND));
            }
            let between = gives_up(below, if leaves { 100 * SECOND } else { 2 * SECOND });
            let outer = Safety::refuse().on_event(lab.events.sink()).layer(between);
            ledgers.push(outer.ledger());
            let result = tokio::time::timeout(2 * SECOND + ms(100), outer.oneshot(write())).await;
            assert_eq!(result.is_err(), leaves);
            tokio::time::sleep(30 * SECOND).await;
            assert_eq!(lab.writes(), 1);
            let case = format!("{case}, {layers} further in, its caller leaves: {leaves}");
            assert_eq!(reports(&lab, ledgers).await, (1, 1), "{case}: {:?}", lab.events.all());
        }
    }
}

/// `what_a_task_below_holds_up_is_not_sent_once_its_call_is_over`, with a layer that refuses replays further in.
#[tokio::test(start_paused = true)]
async fn what_is_held_up_above_a_stack_is_not_sent_once_its_call_is_over() {
    for nested in [false, true] {
        let lab = Lab::new();
        lab.write(marked(ms(0), ms(10), Ok(1)));
        let reconnect = ReconnectLayer::once().layer(lab.connector());
        let below = match nested {
            true => BoxCloneService::new(Safety::refuse().on_event(lab.events.sink()).layer(reconnect)),
            false => BoxCloneService::new(reconnect),
        };
        let service = ServiceBuilder::new()
            .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
            .layer(Safety::refuse())
            .service(held_up(below, 20 * SECOND, ms(0)));
        assert!(tokio::time::timeout(10 * SECOND, service.oneshot(write())).await.is_err());
        assert_eq!(lab.events.abandoned(), 1);
        tokio::time::sleep(30 * SECOND).await;
        assert_eq!(lab.writes(), 0, "nested: {nested}");
    }
}

/// A service in between has given it up, and its caller was told that it is unknown.
#[tokio::test(start_paused = true)]
async fn of_a_write_whose_call_is_over_nothing_is_begun_or_replayed_further_in() {
    for is_replay in [false, true] {
        let lab = Lab::new();
        match is_replay {
            true => lab.write(fail(ambiguous())),
            false => lab.connect(Connect::After(10 * SECOND)),
        };
        lab.write(answer(2));
        let check = Safety::new(|doubt: Doubt| async move { Ok::<_, BoxError>(doubt.not_landed()) });
        let inner = check.quarantine(6 * SECOND).layer(ReconnectLayer::once().layer(lab.connector()));
        let below = BoxCloneService::new(held_up(inner, ms(0), ms(0)));
        let outer = Safety::refuse().on_event(lab.events.sink()).layer(gives_up(below, 2 * SECOND));
        assert_eq!(outer.oneshot(write()).await.unwrap_err().outcome(), Outcome::Unknown);
        tokio::time::sleep(60 * SECOND).await;
        let unknown = |seen: &&Seen| matches!(seen, Seen::InDoubt { outcome: Some(Outcome::Unknown), .. });
        let told = lab.events.all().iter().filter(unknown).count();
        assert_eq!((lab.writes(), told), (usize::from(is_replay), 1), "{:?}", lab.events.all());
    }
}

/// Of retries outside of a layer that takes the call for a write: an attempt whose time was up before that layer got it.
#[tokio::test(start_paused = true)]
async fn retries_outside_do_not_send_twice_what_is_a_write_inside() {
    let lab = Lab::new();
    lab.write(later(10 * SECOND, Ok(1))).write(later(10 * SECOND, Ok(2)));
    let inside = Safety::refuse().classify(|_| Some(Effect::Write)).on_event(lab.events.sink());
    let inside = inside.layer(ReconnectLayer::once().layer(lab.connector()));
    let service = ServiceBuilder::new()
        .layer(DeadlineLayer::new(60 * SECOND).on_event(lab.events.sink()))
        .layer(RetryReadOnly.attempt_timeout(SECOND))
        .service(held_up(inside, 2 * SECOND, ms(0)));
    let error = service.oneshot(read()).await.unwrap_err();
    tokio::time::sleep(30 * SECOND).await;
    assert_eq!((lab.writes(), error.outcome()), (0, Outcome::NoAnswer), "{:?}", lab.log.timed());
}

/// With whole stacks, of which the outer one has the defaults.
#[tokio::test(start_paused = true)]
async fn a_stack_around_another_one_hands_no_write_over_again_that_is_unknown() {
    let lab = Lab::new();
    lab.write(fail(closed())).write(answer(2)).connect(Connect::Ok).connect(Connect::After(15 * SECOND));
    let inner = lab.clone();
    let connector = service_fn(move |()| {
        let stack = Stack::builder(inner.connector()).writes(keyed(10 * SECOND));
        ready(stack.on_event(inner.events.sink()).build().map_err(BoxError::from))
    });
    let outer = Stack::builder(connector).on_event(lab.events.sink()).build().unwrap();
    let result = outer.send(write()).await;
    assert_eq!(lab.writes(), 1, "sent again after the key's time: {:?}", lab.log.timed());
    assert_eq!(result.unwrap_err().outcome(), Outcome::Unknown);
}

/// With whole stacks: the outer one's connection does something with the answer before it gives it out.
#[tokio::test(start_paused = true)]
async fn a_write_that_is_dropped_between_stacks_once_it_was_answered_is_reported() {
    let lab = Lab::new();
    lab.write(answer(1));
    let stack = Stack::builder(lab.connector()).on_event(lab.events.sink()).build().unwrap();
    let inner_ledger = stack.ledger();
    let gateway = service_fn(move |request: Req| -> Answer {
        let answer: Answer = Box::pin(stack.clone().oneshot(request));
        Box::pin(async move {
            let answer = answer.await?;
            tokio::time::sleep(SECOND).await;
            Ok(answer)
        })
    });
    let connector = service_fn(move |()| ready(Ok::<_, BoxError>(gateway.clone())));
    let outer = Stack::builder(connector).on_event(lab.events.sink()).build().unwrap();
    let ledgers = [outer.ledger(), inner_ledger];
    assert!(tokio::time::timeout(ms(100), outer.send(write())).await.is_err());
    assert_eq!(lab.writes(), 1);
    assert_eq!(reports(&lab, ledgers).await, (1, 1));
}

// ----- a layer further out that does not replay has a key or a ledger that is not that of the one with the check

fn slow_check() -> Safety {
    Safety::new(|doubt: Doubt| async move {
        tokio::time::sleep(SECOND).await;
        Ok::<_, BoxError>(doubt.not_landed_because("tested"))
    })
}

/// W1 is lost, and while that is checked further in, W3 is done on another stack with the ledger and the key further out.
#[tokio::test(start_paused = true)]
async fn a_layer_further_in_replays_no_write_over_one_that_the_key_of_another_layer_let_in() {
    for (inner_key, inner_ledger) in
        [(None, false), (Some("k"), false), (None, true), (Some("other"), true), (Some("k"), true)]
    {
        let (lab, other, ledger) = (Lab::new(), Lab::new(), MemoryLedger::new());
        lab.write(fail(ambiguous())).write(answer(1));
        other.write(answer(3));
        let kept = |safety: Safety| safety.ledger(ledger.clone()).conflict_key(|_| Some("k"));
        let check = slow_check().conflict_key(move |_| inner_key);
        let check = if inner_ledger { check.ledger(ledger.clone()) } else { check };
        let deadline = DeadlineLayer::new(60 * SECOND);
        let first = deadline.layer(kept(Safety::refuse()).layer(check.layer(lab.connection())));
        let first = tokio::spawn(first.oneshot(write()));
        tokio::time::sleep(ms(500)).await;
        let third = deadline.layer(kept(slow_check()).layer(other.connection())).oneshot(write()).await;
        let first = first.await.unwrap();
        let same = inner_ledger && inner_key == Some("k");
        assert_eq!((third.is_ok(), first.is_ok()), (!same, same), "{inner_key:?} {first:?} {third:?}");
        if let Err(error) = first {
            assert_eq!((lab.writes(), error.outcome()), (1, Outcome::NotDone));
            assert!(error.to_string().contains("give both the same"), "{error}");
        }
    }
}

/// Nor by an idempotency key, as idempotent, or by evidence that it trusts.
#[tokio::test(start_paused = true)]
async fn a_layer_further_in_replays_nothing_without_a_check_either_beside_the_key_of_another_layer() {
    let put = || Tagged::new("put", Effect::Idempotent).named("put");
    let busy = CallError::evidence(Evidence::TooManyRequests, "429");
    let trusts = Safety::refuse().trust(Evidence::TooManyRequests);
    let cases: [(Safety, Req, CallError, Outcome); 3] = [
        (keyed(60 * SECOND), write(), ambiguous(), Outcome::Unknown),
        (Safety::refuse().replay_idempotent(), put(), ambiguous(), Outcome::Unknown),
        (trusts, write(), busy, Outcome::NotDone),
    ];
    for (inner, request, lost, outcome) in cases {
        let lab = Lab::new();
        lab.write(fail(lost)).write(answer(1));
        let outer = Safety::refuse().conflict_key(|_| Some("k"));
        let error = outer.layer(inner.layer(lab.connection())).oneshot(request).await.unwrap_err();
        assert_eq!((lab.writes(), error.outcome()), (1, outcome));
        assert!(error.to_string().contains("give both the same"), "{error}");
    }
}
