//! The short way of a read: what the layers do to a call that is answered at its first attempt, in one future
//! instead of five, one in another.
//!
//! A read goes this way where each layer would only have passed it on: a connection is there, is ready and has
//! answered reads before, and attempts have no time of their own. When its attempt has ended in any other way
//! than with a success, the layers get the call in the state that it would have been in with them, the attempt's
//! error included, and what follows is theirs. So nothing is decided here but that a success is one.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, ready},
};

use pin_project::pin_project;
use tower::Service;

use super::{Layered, Shared};
use crate::{
    BoxError, Call, CallError, Delivery, Effect, Reconnect,
    census::{AnySeat, Seat},
    deadline::{self, Timer, once_more, poll_in_time},
    event::Report,
    reconnect::{self, Local},
    retry, write_safety,
};

/// What the direct calls of one clone of a stack hold, over one connection: one reference count for all layers.
pub(super) struct Lane<M: Service<()>> {
    pub(super) shared: Arc<Shared>,
    retries: Arc<retry::Handle<Reconnect<M>>>,
    local: Arc<Local<M>>,
    /// Of the connection.
    pub(super) number: u64,
    /// Whether the clone itself holds this, besides its calls.
    held: AtomicBool,
}

/// One call on the short way.
// In this order: what a call begins with is together, and is moved without the room for the timer, which comes last.
#[pin_project]
#[repr(C)]
pub(super) struct Direct<A, M: Service<()>, Req> {
    pub(super) lane: Arc<Lane<M>>,
    outermost: bool,
    #[pin]
    attempt: A,
    /// What another attempt is made from. Its context is also what the layers need to know of the call. Gone
    /// with the call.
    kept: Option<Req>,
    /// Made when the attempt is first pending.
    #[pin]
    timer: Option<Timer>,
}

// ===== impl Lane =====

impl<M> Lane<M>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send,
    M::Response: Send,
{
    #[cold]
    pub(super) fn new(
        shared: &Arc<Shared>,
        retries: Arc<retry::Handle<Reconnect<M>>>,
        local: &Arc<Local<M>>,
    ) -> Arc<Self> {
        let (shared, local, number) = (Arc::clone(shared), local.of_a_lane(), local.number());
        let lane = Arc::new(Self { shared, retries, local, number, held: AtomicBool::new(true) });
        let seat: Arc<AnySeat> = Arc::<Self>::clone(&lane);
        lane.local.count_also(&seat);
        lane.shared.census().enter(&seat);
        lane
    }
}

impl<M: Service<()>> Lane<M> {
    /// The clone lets go of it; its calls may still have it.
    pub(super) fn release(&self) {
        self.held.store(false, Ordering::Release);
    }

    /// Whether somebody waits for the end of calls.
    #[inline]
    pub(super) fn is_closing(&self) -> bool {
        self.shared.closing.load(Ordering::Acquire) || self.local.shared().is_closing()
    }

    /// Tells whoever waits that a call of this has ended.
    #[cold]
    pub(super) fn tell(self: Arc<Self>) {
        let (shared, reconnect) = (Arc::clone(&self.shared), Arc::clone(self.local.shared()));
        // The reference goes before the word does.
        drop(self);
        shared.ended.notify_waiters();
        reconnect.ended.notify_waiters();
    }
}

impl<M: Service<()>> Seat for Lane<M> {
    fn held(&self) -> &AtomicBool {
        &self.held
    }
}

// ===== impl Direct =====

impl<A, M: Service<()>, Req> Direct<A, M, Req> {
    #[inline(always)]
    pub(super) fn new(attempt: A, lane: Arc<Lane<M>>, kept: Req, outermost: bool) -> Self {
        Self { attempt, lane, kept: Some(kept), timer: None, outermost }
    }
}

impl<A, M, Req, Res> Direct<A, M, Req>
where
    A: Future<Output = Result<Res, CallError>>,
    M: Service<()>,
    Req: Call,
{
    /// The answer, or how the attempt has ended otherwise.
    #[inline(always)]
    pub(super) fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<A::Output> {
        let mut this = self.as_mut().project();
        if this.timer.is_some() {
            return self.poll_timed(cx);
        }
        match this.attempt.as_mut().poll(cx) {
            Poll::Ready(result) => Poll::Ready(this.lane.ended(result)),
            Poll::Pending => self.arm(cx),
        }
    }

    /// The timer first, as in the deadline layer, so that the poll after it is the one more.
    #[inline(never)]
    fn poll_timed(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<A::Output> {
        let this = self.project();
        let until = this.kept.as_ref().map(|kept| kept.context().until()).unwrap_or_default();
        let fired = this.timer.as_pin_mut().is_some_and(|timer| until.poll_timer(timer, cx).is_ready());
        let ended = match fired {
            true => once_more(this.attempt, cx),
            false => ready!(poll_in_time(this.attempt, || until.is_over(), cx)),
        };
        Poll::Ready(this.lane.ended_in_time(ended))
    }

    /// The attempt is pending for the first time.
    #[inline(never)]
    fn arm(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<A::Output> {
        let mut this = self.project();
        let until = this.kept.as_ref().map(|kept| kept.context().until()).unwrap_or_default();
        let Some(at) = until.instant() else { return Poll::Pending };
        this.timer.set(Some(Timer::at(at)));
        if this.timer.as_pin_mut().is_some_and(|timer| until.poll_timer(timer, cx).is_pending()) {
            return Poll::Pending;
        }
        // The time ran out while the attempt was polled.
        Poll::Ready(this.lane.ended_in_time(once_more(this.attempt, cx)))
    }
}

impl<M: Service<()>> Lane<M> {
    #[inline]
    fn ended<Res>(&self, result: Result<Res, CallError>) -> Result<Res, CallError> {
        if result.is_ok() {
            self.retries.deposit();
        }
        result
    }

    /// By `None` its time is up.
    fn ended_in_time<Res>(&self, ended: Option<Result<Res, CallError>>) -> Result<Res, CallError> {
        match ended {
            Some(result) => self.ended(result),
            None => Err(CallError::deadline(Delivery::Ambiguous)),
        }
    }
}

impl<M, Req, Res> Direct<<M::Response as Service<Req>>::Future, M, Req>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Req, Response = Res, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Req>>::Future: Send + 'static,
    Req: Call + Send + 'static,
    Res: Send + 'static,
{
    /// The call as the layers would have it now, its attempt having ended with that error. `None` if it has been
    /// asked for before.
    pub(super) fn layered(self: Pin<&mut Self>, error: CallError) -> Option<Layered<M, Req>> {
        let this = self.project();
        let kept = this.kept.take()?;
        let context = kept.context();
        let (call, basis, until) = (context.id()?, context.basis(), context.until());
        let report = Some(Report::of(context, *this.outermost));
        let attempt = reconnect::ResponseFuture::failed(&kept, Arc::clone(&this.lane.local), error);
        let retries = Arc::clone(&this.lane.retries);
        let retrying = retry::ResponseFuture::read(attempt, retries, kept, None, false);
        let passing = write_safety::ResponseFuture::passing(retrying, None, call, basis, Effect::ReadOnly);
        // Should there be more to wait for, the layer makes a timer of its own: this one cannot be moved.
        Some(deadline::ResponseFuture::new(passing, until, Effect::ReadOnly, report))
    }
}

#[cfg(test)]
mod tests {
    use std::{
        collections::VecDeque,
        future::{pending, ready},
        sync::Mutex,
        time::Duration,
    };

    use tokio_test::task::spawn;
    use tower::{Layer, ServiceBuilder, ServiceExt, service_fn};

    use super::*;
    use crate::{
        Activity, Closure, DeadlineLayer, ReconnectLayer, RetryReadOnly, RetryReadOnlyLayer, Stack, Tagged,
        WriteSafetyLayer, connection::BoxFuture, event::Event,
    };

    /// How an attempt ends.
    #[derive(Clone, Copy, Debug)]
    enum Way {
        Answer,
        Hangs,
        AnswersLate,
        Refused,
        Fails,
        Closes,
        ClosesUnsent,
        ServerError,
    }

    const WAYS: [Way; 8] = [
        Way::Answer,
        Way::Hangs,
        Way::AnswersLate,
        Way::Refused,
        Way::Fails,
        Way::Closes,
        Way::ClosesUnsent,
        Way::ServerError,
    ];

    type Script = Arc<Mutex<VecDeque<Way>>>;
    type Log = Arc<Mutex<Vec<serde_json::Value>>>;
    type Answer = BoxFuture<Result<u8, CallError>>;

    #[derive(Clone)]
    struct Scripted(Script);

    impl Service<Tagged<u8>> for Scripted {
        type Response = u8;
        type Error = CallError;
        type Future = Answer;

        fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
            Poll::Ready(Ok(()))
        }

        fn call(&mut self, request: Tagged<u8>) -> Answer {
            let way = self.0.lock().unwrap().pop_front().unwrap_or(Way::Answer);
            Box::pin(async move {
                match way {
                    Way::Answer => Ok(*request),
                    Way::Hangs => pending().await,
                    Way::AnswersLate => {
                        tokio::time::sleep(Duration::from_millis(10)).await;
                        Ok(*request)
                    }
                    Way::Refused => Err(CallError::not_processed("busy").after(Duration::from_millis(5))),
                    Way::Fails => Err(CallError::ambiguous("reset")),
                    Way::Closes => Err(CallError::ambiguous("closed")
                        .at_closure(&Closure::new("closed"))
                        .connection_lost()),
                    Way::ClosesUnsent => {
                        Err(CallError::not_sent("dead").connection_lost().with_request(request))
                    }
                    Way::ServerError => Err(CallError::answered("no such row")),
                }
            })
        }
    }

    fn connector(
        script: &Script,
    ) -> impl Service<(), Response = Scripted, Error = CallError, Future: Send> + Send + use<> {
        let script = Arc::clone(script);
        service_fn(move |()| ready(Ok(Scripted(Arc::clone(&script)))))
    }

    fn retries() -> RetryReadOnlyLayer {
        let waits = backon::ConstantBuilder::new().with_delay(Duration::from_millis(7)).without_max_times();
        RetryReadOnly.attempts(3).backoff(waits)
    }

    fn sink(log: &Log) -> impl Fn(Event<'_>) + Send + Sync + use<> {
        let log = Arc::clone(log);
        move |event| log.lock().unwrap().push(serde_json::to_value(event).unwrap())
    }

    /// Makes the calls of a script, after a first one that is answered; what came of each, and what was reported.
    async fn run(
        mut service: impl Service<Tagged<u8>, Response = u8, Error = CallError>,
        script: &Script,
        log: &Log,
        ways: &[Way],
    ) -> (Vec<String>, Vec<serde_json::Value>) {
        let mut seen = Vec::new();
        for call in 0..3 {
            let request = Tagged::new(call, Effect::ReadOnly).within(Duration::from_millis(100));
            let start = tokio::time::Instant::now();
            let result = service.ready().await.unwrap().call(request).await;
            let said = match result {
                Ok(answer) => format!("{answer}"),
                Err(error) => format!("{error} {:?} {:?}", error.outcome(), error.attempts()),
            };
            seen.push(format!("{said} after {:?}", start.elapsed()));
            if call == 0 {
                script.lock().unwrap().extend(ways);
            }
        }
        script.lock().unwrap().clear();
        let mut events = std::mem::take(&mut *log.lock().unwrap());
        for event in &mut events {
            event.as_object_mut().unwrap().remove("call");
        }
        (seen, events)
    }

    #[tokio::test(start_paused = true)]
    #[cfg_attr(miri, ignore = "too many calls")]
    async fn the_short_way_and_the_layers_say_the_same_of_every_call() {
        for first in WAYS {
            for second in WAYS {
                for third in WAYS {
                    let ways = [first, second, third];
                    let (script, log) = (Script::default(), Log::default());
                    let stack = Stack::builder(connector(&script))
                        .retry(retries())
                        .on_event(sink(&log))
                        .deadline(Duration::from_secs(30))
                        .build()
                        .unwrap();
                    let short = run(stack, &script, &log, &ways).await;

                    let (script, log) = (Script::default(), Log::default());
                    let layers = ServiceBuilder::new()
                        .layer(DeadlineLayer::new(Duration::from_secs(30)).on_event(sink(&log)))
                        .layer(WriteSafetyLayer::refuse().on_event(sink(&log)))
                        .layer(retries().on_event(sink(&log)))
                        .layer(ReconnectLayer::once().on_event(sink(&log)))
                        .service(connector(&script));
                    let long = run(layers, &script, &log, &ways).await;
                    assert_eq!(short, long, "{ways:?}");
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_on_the_short_way_is_in_flight_until_it_ends() {
        let (script, layer) = (Script::default(), ReconnectLayer::once());
        let handle = layer.handle();
        let mut stack = Stack::builder(connector(&script)).reconnect(layer).build().unwrap();
        let read = || Tagged::new(1, Effect::ReadOnly).within(Duration::from_millis(50));
        stack.ready().await.unwrap().call(read()).await.unwrap();

        script.lock().unwrap().extend([Way::Hangs, Way::Fails, Way::Hangs, Way::Hangs]);
        let mut hangs = spawn(stack.ready().await.unwrap().call(read()));
        assert!(hangs.poll().is_pending());
        assert!(stack.lock().lane.is_some());
        assert_eq!((stack.in_flight(), handle.in_flight()), (1, 1));
        // One that has failed and is tried again is one, too.
        let mut again = spawn(stack.ready().await.unwrap().call(read()));
        assert!(again.poll().is_pending());
        assert_eq!(stack.in_flight(), 2);
        // Of another clone, which is gone.
        let mut clone = stack.clone();
        let mut third = spawn(clone.ready().await.unwrap().call(read()));
        assert!(third.poll().is_pending());
        drop(clone);
        assert_eq!(stack.in_flight(), 3);
        drop(third);
        assert_eq!(stack.in_flight(), 2);
        drop(again);
        assert_eq!((stack.in_flight(), handle.in_flight()), (1, 1));

        let mut shutdown = spawn(stack.shutdown(Duration::from_secs(1)));
        assert!(shutdown.poll().is_pending());
        drop(hangs);
        assert!(shutdown.is_woken());
        assert!(matches!(shutdown.poll(), Poll::Ready(0)));
        drop(shutdown);
        let refused = stack.ready().await.unwrap().call(read()).await.unwrap_err();
        assert_eq!(refused.delivery(), Delivery::NotSent);
    }

    #[tokio::test]
    async fn a_read_that_can_be_sent_only_once_goes_the_long_way_once() {
        let script = Script::default();
        let log = Log::default();
        let mut stack =
            Stack::builder(connector(&script)).on_event(sink(&log)).retry(retries()).build().unwrap();
        stack.ready().await.unwrap().call(Tagged::new(1, Effect::ReadOnly)).await.unwrap();
        script.lock().unwrap().push_back(Way::Fails);
        let once = Tagged::once(2, |_| Effect::ReadOnly);
        let error = stack.ready().await.unwrap().call(once).await.unwrap_err();
        assert_eq!(error.attempts().len(), 1);
        assert!(log.lock().unwrap().is_empty());
        assert_eq!(stack.in_flight(), 0);
    }

    #[tokio::test]
    async fn a_read_of_which_somebody_wants_to_know_the_connection_tells_it() {
        let script = Script::default();
        let mut stack = Stack::builder(connector(&script)).build().unwrap();
        for n in 0..3 {
            let activity = Arc::new(Activity::default());
            let mut read = Tagged::new(n, Effect::ReadOnly);
            read.context_mut().set_activity(Some(Arc::clone(&activity)));
            stack.ready().await.unwrap().call(read).await.unwrap();
            assert_eq!(activity.generation_number(), Some(1));
        }
        // And it goes the short way where nobody does.
        stack.ready().await.unwrap().call(Tagged::new(3, Effect::ReadOnly)).await.unwrap();
        assert!(stack.lock().lane.is_some());
    }

    #[tokio::test(start_paused = true)]
    async fn a_read_that_a_layer_around_the_stack_attempts_again_tells_it_its_connection() {
        let (script, log) = (Script::default(), Log::default());
        let stack = Stack::builder(connector(&script)).retry(RetryReadOnly.attempts(1)).build().unwrap();
        let mut around = retries().on_event(sink(&log)).layer(stack);
        around.ready().await.unwrap().call(Tagged::new(0, Effect::ReadOnly)).await.unwrap();
        script.lock().unwrap().push_back(Way::Fails);
        let answer = around.ready().await.unwrap().call(Tagged::new(1, Effect::ReadOnly)).await;
        assert_eq!(answer.unwrap(), 1);
        let log = log.lock().unwrap();
        let on: Vec<_> = log[0]["attempts"].as_array().unwrap().iter().map(|it| &it["generation"]).collect();
        assert_eq!((log.len(), on), (1, vec![&serde_json::json!(1); 2]));
    }
}
