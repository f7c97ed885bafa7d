//! What calls through the stack allocate, counted: nothing for a read, two things for a write. And what is kept for a
//! ledger that is out of reach, which has a bound.

use std::{
    future::{Future, Ready, ready},
    hint::black_box,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
    time::Duration,
};

use goaround::{
    BoxError, CallError, DeadlineLayer, Effect, InDoubt, ReconnectLayer, RetryReadOnly, Stack, Tagged,
    Verdict, WriteSafetyLayer,
    write_safety::ledger::{Entry, EntryId, Ledger, LedgerError, State},
};
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};

const CALLS: u64 = 1_000;

/// Answers a call with its number, after having been pending so many times.
#[derive(Clone, Copy)]
struct Echo {
    pending: u32,
}

struct Answer {
    answer: u64,
    pending: u32,
}

impl Future for Answer {
    type Output = Result<u64, CallError>;

    fn poll(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        match self.pending.checked_sub(1) {
            Some(less) => {
                self.pending = less;
                Poll::Pending
            }
            None => Poll::Ready(Ok(self.answer)),
        }
    }
}

impl Service<Tagged<u64>> for Echo {
    type Response = u64;
    type Error = CallError;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Tagged<u64>) -> Answer {
        Answer { answer: *request, pending: self.pending }
    }
}

/// How many allocations a call costs, once its connection is there.
#[track_caller]
fn per_call<S>(mut service: S, effect: Effect) -> f64
where
    S: Service<Tagged<u64>, Response = u64, Error = CallError>,
{
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let _in_runtime = runtime.enter();
    let mut cx = Context::from_waker(Waker::noop());
    let mut call = |n| {
        assert!(matches!(service.poll_ready(&mut cx), Poll::Ready(Ok(()))));
        let mut call = pin!(service.call(Tagged::new(n, effect)));
        loop {
            if let Poll::Ready(answer) = call.as_mut().poll(&mut cx) {
                assert_eq!(black_box(answer.unwrap()), n);
                return;
            }
        }
    };
    (0..10).for_each(&mut call);
    let info = allocation_counter::measure(|| (0..CALLS).for_each(&mut call));
    info.count_total as f64 / CALLS as f64
}

fn connector(
    pending: u32,
) -> impl Service<(), Response = Echo, Error = CallError, Future: Send> + Clone + Send {
    service_fn(move |()| -> Ready<Result<Echo, CallError>> { ready(Ok(Echo { pending })) })
}

macro_rules! stack {
    ($pending:expr) => {
        Stack::builder(connector($pending)).deadline(Duration::from_secs(30))
    };
}

#[test]
fn a_read_allocates_nothing() {
    let none = 0.0;
    assert_eq!(per_call(stack!(0).build().unwrap(), Effect::ReadOnly), none);
    // Nor does one that has to wait, for which the timer is armed.
    assert_eq!(per_call(stack!(3).build().unwrap(), Effect::ReadOnly), none);
    // Nor with somebody who wants to know what happens, while nothing does.
    assert_eq!(per_call(stack!(0).on_event(|_| {}).build().unwrap(), Effect::ReadOnly), none);
    // Nor with a rule that says that it is one.
    let stack = stack!(0).classify(|_| Some(Effect::ReadOnly)).build().unwrap();
    assert_eq!(per_call(stack, Effect::Write), none);
}

#[test]
fn a_read_without_an_attempt_timeout_allocates_nothing_in_any_layer() {
    let read = Effect::ReadOnly;
    let deadline = || ServiceBuilder::new().layer(DeadlineLayer::new(Duration::from_secs(30)));
    let echo = Echo { pending: 0 };
    assert_eq!(per_call(deadline().service(echo), read), 0.0);
    let writes = ServiceBuilder::new().layer(WriteSafetyLayer::refuse()).service(echo);
    assert_eq!(per_call(writes, read), 0.0);
    assert_eq!(per_call(ServiceBuilder::new().layer(RetryReadOnly).service(echo), read), 0.0);
    // One, by which a layer further in would say that it is a write.
    let attempts = RetryReadOnly.attempt_timeout(Duration::from_secs(1));
    assert_eq!(per_call(ServiceBuilder::new().layer(attempts).service(echo), read), 1.0);
    let reconnecting = ServiceBuilder::new().layer(ReconnectLayer::once()).service(connector(0));
    assert_eq!(per_call(reconnecting, read), 0.0);
    let all = deadline()
        .layer(WriteSafetyLayer::refuse())
        .layer(RetryReadOnly)
        .layer(ReconnectLayer::once())
        .service(connector(0));
    assert_eq!(per_call(all, read), 0.0);
}

#[test]
fn a_write_with_a_check_allocates_two_things_at_most() {
    let check =
        |doubt: InDoubt<Tagged<u64>, u64>| async move { Ok::<Verdict<u64>, BoxError>(doubt.unknown("")) };
    assert!(per_call(stack!(0).check(check).build().unwrap(), Effect::Write) <= 2.0);
    assert!(per_call(stack!(0).build().unwrap(), Effect::Write) <= 2.0);
}

/// A ledger that enters all and can record no end.
struct RecordsNothing;

impl Ledger for RecordsNothing {
    async fn enter(&self, entry: Entry) -> Result<u64, LedgerError> {
        Ok(entry.revision)
    }
    async fn settle(&self, _: EntryId, _: u64, _: State) -> Result<u64, LedgerError> {
        Err(LedgerError::Unavailable("no room".into()))
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

#[test]
fn doubts_that_the_ledger_does_not_record_are_kept_up_to_a_bound() {
    let layer = WriteSafetyLayer::<Tagged<u64>, u64>::refuse().ledger(RecordsNothing);
    let layer = layer.conflict_key(|request: &Tagged<u64>| Some(request.to_string()));
    let service =
        layer.layer(service_fn(|_: Tagged<u64>| async { Err::<u64, _>(CallError::ambiguous("reset")) }));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let write = |n| runtime.block_on(service.clone().oneshot(Tagged::new(n, Effect::Write))).unwrap_err();
    (0..11_000).for_each(|n| drop(write(n)));
    let info = allocation_counter::measure(|| (11_000..16_000).for_each(|n| drop(write(n))));
    assert!(info.bytes_current < 5_000, "{} bytes, after 11,000 writes", info.bytes_current);
}
