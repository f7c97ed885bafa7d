//! Properties of what is pure: schedules, the budget, the table of rules.

use std::time::Duration;

use backon::{BackoffBuilder, ConstantBuilder, ExponentialBuilder};
use goaround::{
    Cause, Delivery, Effect, Evidence, Rule, Scope, ServerError,
    retry::{
        backoff::FullJitter,
        budget::{Budget, Throttle},
    },
    rule,
};
use proptest::prelude::*;

fn evidence() -> impl Strategy<Value = Evidence> {
    proptest::sample::select(vec![
        Evidence::RefusedStream,
        Evidence::GoAway,
        Evidence::TooEarly,
        Evidence::TooManyRequests,
        Evidence::FrameCut,
        Evidence::SessionUnknown,
        Evidence::Unavailable,
        Evidence::RequestTimeout,
        Evidence::Unauthorized,
        Evidence::Forbidden,
    ])
}

fn cause() -> impl Strategy<Value = Cause> {
    prop_oneof![
        Just(Cause::Deadline),
        Just(Cause::AttemptTimeout),
        Just(Cause::NotReady),
        Just(Cause::Other),
        Just(Cause::AnswerUnread),
        any::<i64>().prop_map(|code| Cause::Answered(ServerError::new(code, "no"))),
        any::<usize>().prop_map(|limit| Cause::AnswerTooLarge { limit }),
        evidence().prop_map(Cause::Evidence),
    ]
}

fn delivery() -> impl Strategy<Value = Delivery> {
    proptest::sample::select(vec![
        Delivery::NotSent,
        Delivery::NotProcessed,
        Delivery::Ambiguous,
        Delivery::Answered,
    ])
}

fn effect() -> impl Strategy<Value = Effect> {
    proptest::sample::select(vec![Effect::ReadOnly, Effect::Idempotent, Effect::Write])
}

fn scope() -> impl Strategy<Value = Scope> {
    proptest::sample::select(vec![Scope::Call, Scope::Connection])
}

proptest! {
    #[test]
    fn a_write_is_repeated_only_where_nothing_was_sent_or_its_evidence_is_trusted(
        effect in effect(), cause in cause(), scope in scope(), delivery in delivery(), trusted in any::<bool>(),
    ) {
        let rule = rule(effect, &cause, scope, delivery, trusted);
        let is_evidence = matches!(cause, Cause::Evidence(_));
        if effect.is_write() {
            match rule {
                Rule::HandOver => prop_assert_eq!(delivery, Delivery::NotSent),
                Rule::Retry => prop_assert!(trusted && is_evidence, "{:?} {:?}", cause, delivery),
                Rule::Check => prop_assert_eq!(delivery, Delivery::Ambiguous),
                _ => {}
            }
        } else {
            prop_assert_ne!(rule, Rule::Check);
        }
        if delivery == Delivery::Answered || matches!(cause, Cause::Deadline) {
            prop_assert_eq!(rule, Rule::Return);
        }
        if let Cause::Evidence(Evidence::Unauthorized | Evidence::Forbidden) = cause {
            prop_assert_eq!(rule, Rule::Return);
        }
        // A write in doubt is never just returned as if it were settled, but where its time was up.
        if effect.is_write() && delivery == Delivery::Ambiguous && !is_evidence && !matches!(cause, Cause::Deadline) {
            prop_assert_eq!(rule, Rule::Check);
        }
    }

    #[test]
    fn jitter_draws_no_more_than_the_schedule_and_as_many(
        delay in 0_u64..100_000, times in 0_usize..20, seed in any::<u64>(),
    ) {
        fastrand::seed(seed);
        let constant = ConstantBuilder::new().with_delay(Duration::from_millis(delay)).with_max_times(times);
        let waits: Vec<_> = FullJitter(constant).build().collect();
        prop_assert_eq!(waits.len(), times);
        prop_assert!(waits.iter().all(|wait| *wait <= Duration::from_millis(delay)));
    }

    #[test]
    fn each_wait_stays_below_its_own_step_of_the_schedule(
        min in 1_u64..1_000, factor in 1.0_f32..4.0, times in 1_usize..12, seed in any::<u64>(),
    ) {
        fastrand::seed(seed);
        let schedule = ExponentialBuilder::new()
            .with_min_delay(Duration::from_millis(min))
            .with_max_delay(Duration::from_secs(30))
            .with_factor(factor)
            .with_max_times(times);
        let plain: Vec<_> = schedule.build().collect();
        let drawn: Vec<_> = FullJitter(schedule).build().collect();
        prop_assert_eq!(plain.len(), drawn.len());
        prop_assert!(plain.iter().zip(&drawn).all(|(most, wait)| wait <= most));
    }

    #[test]
    fn a_throttle_never_allows_more_than_what_is_above_half_and_what_was_paid_back(
        tokens in 1_u32..100, paid in 0_u32..1_000, steps in proptest::collection::vec(any::<bool>(), 0..500),
    ) {
        let throttle = Throttle::new(tokens, paid);
        let (mut allowed, mut successes) = (0_u64, 0_u64);
        for withdraws in steps {
            if withdraws {
                allowed += u64::from(throttle.withdraw());
            } else {
                throttle.deposit();
                successes += 1;
            }
            prop_assert!(allowed * 2_000 <= u64::from(tokens) * 1_000 + successes * u64::from(paid) * 2);
        }
    }
}
