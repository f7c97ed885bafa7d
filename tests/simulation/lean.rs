//! The lean harness: an in-memory service under the layers.

use std::{
    future::{Future, pending},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use goaround::{
    Activity, BoxError, Call, CallError, Effect, Evidence, Exit, Tagged, write_safety::KeyedWrites,
};
use tokio::{
    sync::oneshot,
    time::{sleep, sleep_until, timeout},
};
use tower::Service;

use crate::{
    fly::Harness,
    world::{Branch, Favours, Process, Reply, Sort, World, note},
};

pub enum Lean {}

impl Harness for Lean {
    type Req = Tagged<u32>;
    type Res = u32;
    type Conn = Connection;
    type Connector = Connector;
    const SORT: Sort = Sort::Meaning;

    fn connector(world: &World) -> Connector {
        Connector(world.clone())
    }

    fn put(token: u32, effect: Effect) -> Tagged<u32> {
        Tagged::new(token, effect).named("put")
    }

    fn keyed(_: &World) -> Option<KeyedWrites<Tagged<u32>, u32>> {
        None
    }

    fn get(token: u32) -> Tagged<u32> {
        Tagged::new(token, Effect::ReadOnly).named("get")
    }

    fn token(request: &Tagged<u32>) -> u32 {
        **request
    }

    fn count(response: &u32) -> u32 {
        *response
    }

    fn response(token: u32) -> u32 {
        token
    }
}

type Answer = Pin<Box<dyn Future<Output = Result<u32, CallError>> + Send>>;

#[derive(Clone)]
pub struct Connector(World);

impl Service<()> for Connector {
    type Response = Connection;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Connection, BoxError>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let world = self.0.clone();
        Box::pin(async move { Ok(Connection(connect(&world).await?)) })
    }
}

/// What comes before a connection is there, and its process. Some are there from the beginning, and say it only then:
/// what they saw when they started is as old as the connect.
pub async fn connect(world: &World) -> Result<Process, BoxError> {
    let _connecting = world.connecting();
    let early = world.chance(30).then(|| Starting(Some(world.start_process())));
    let most = match world.plan().favours {
        Favours::SlowConnects => 15_000,
        Favours::Windows | Favours::LateTurns => 6_000,
        _ => 2_000,
    };
    sleep(world.wait(most)).await;
    if world.fault(world.plan().faults.connect_hangs) {
        world.cover(Branch::ConnectHung);
        return pending().await;
    }
    if world.fault(world.plan().faults.connect_fails) {
        world.cover(Branch::ConnectFailed);
        note!(world, "the connect fails");
        return Err("refused".into());
    }
    let started = early.and_then(|mut starting| starting.0.take());
    Ok(started.unwrap_or_else(|| world.start_process()))
}

/// A process whose connect is under way, and that ends with it.
struct Starting(Option<Process>);

impl Drop for Starting {
    fn drop(&mut self) {
        if let Some(process) = self.0.take()
            && tokio::runtime::Handle::try_current().is_ok()
        {
            process.close();
        }
    }
}

/// The error of a closure, with what is known of the process.
pub fn with_exit(process: &Process, error: CallError) -> CallError {
    let gone = process.clone();
    let error = error.with_exit(async move {
        let group_gone = gone.gone().await;
        if !group_gone {
            gone.world.cover(Branch::GroupStayed);
        }
        Exit::new(None, group_gone)
    });
    if process.world.plan().declares_it { error.exit_ends_effects() } else { error }
}

#[derive(Clone)]
pub struct Connection(Process);

impl Service<Tagged<u32>> for Connection {
    type Response = u32;
    type Error = CallError;
    type Future = Answer;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), CallError>> {
        Poll::Ready(match self.0.is_open() {
            true => Ok(()),
            false => Err(CallError::closed("closed before")),
        })
    }

    fn call(&mut self, request: Tagged<u32>) -> Answer {
        let process = self.0.clone();
        match request.context().effect().unwrap_or(request.effect()).is_write() {
            true => Box::pin(write(process, request)),
            false => Box::pin(read(process, *request)),
        }
    }
}

async fn read(process: Process, token: u32) -> Result<u32, CallError> {
    let reply = async {
        match process.get(token).await {
            _ if process.is_silent() => pending().await,
            reply => said(&process, reply).await,
        }
    };
    tokio::select! {
        biased;
        () = process.closed() => Err(with_exit(&process, CallError::closed("closed"))),
        reply = reply => reply,
    }
}

async fn said(process: &Process, reply: Reply) -> Result<u32, CallError> {
    Err(match reply {
        Reply::Done => return Ok(0),
        Reply::Count(count) => return Ok(count),
        Reply::RateLimit(wait) => CallError::evidence(Evidence::TooManyRequests, "429").after(wait),
        Reply::Unavailable => CallError::evidence(Evidence::Unavailable, "503"),
        Reply::SessionUnknown => {
            process.give_up();
            CallError::evidence(Evidence::SessionUnknown, "404")
        }
        Reply::Error => CallError::answered("quota"),
        Reply::Reset => CallError::ambiguous("reset"),
        Reply::Exists | Reply::InFlight(_) | Reply::Silence => pending().await,
    })
}

#[derive(Clone, Copy, PartialEq)]
enum Frame {
    Queued,
    Withdrawn,
    Taken,
}

/// Withdraws a frame that nobody waits for any more, if it is still queued.
struct Waits {
    frame: Arc<Mutex<Frame>>,
    activity: Option<Arc<Activity>>,
    world: World,
    cancelled: Arc<AtomicBool>,
}

impl Waits {
    fn withdraw(&self) -> bool {
        let mut frame = self.frame.lock().unwrap();
        let withdrawn = *frame == Frame::Queued || self.world.plan().lies.says_not_sent;
        if *frame == Frame::Queued {
            *frame = Frame::Withdrawn;
            self.world.cover(Branch::Withdrawn);
            if let Some(activity) = &self.activity {
                activity.withdrawn();
            }
        }
        withdrawn
    }
}

impl Drop for Waits {
    fn drop(&mut self) {
        // The server is told that nobody waits any more, and may heed it.
        if !self.withdraw() && self.world.chance(30) {
            self.cancelled.store(true, Ordering::Relaxed);
        }
    }
}

async fn write(process: Process, request: Tagged<u32>) -> Result<u32, CallError> {
    let (world, token) = (process.world.clone(), *request);
    // As many services do it begins when it is polled first.
    process.handed(token);
    let activity = request.context().activity().cloned().filter(|_| world.plan().marks);
    let (until, deadline) = (request.context().attempt_until(), request.context().deadline().instant());
    let queues = world.plan().marks || world.plan().lies.unmarked;
    let frame = Arc::new(Mutex::new(if queues { Frame::Queued } else { Frame::Taken }));
    let cancelled = Arc::new(AtomicBool::new(false));
    if let Some(activity) = &activity
        && !activity.adopt()
    {
        return Err(CallError::not_sent("its time is up"));
    }
    let waits = Waits {
        frame: Arc::clone(&frame),
        activity: activity.clone(),
        world: world.clone(),
        cancelled: Arc::clone(&cancelled),
    };
    let (reply, replied) = oneshot::channel();
    tokio::spawn(wire(process.clone(), token, frame, activity, cancelled, reply));
    let withdrawn = async {
        // At the attempt's end only what is still queued ends; at the deadline everything does.
        if let Some(until) = until {
            sleep_until(until).await;
            if waits.withdraw() {
                return;
            }
        }
        match deadline {
            Some(deadline) if queues => {
                sleep_until(deadline).await;
                if !waits.withdraw() {
                    pending::<()>().await;
                }
            }
            _ => pending().await,
        }
    };
    tokio::select! {
        biased;
        Ok(reply) = replied => match said(&process, reply).await {
            Ok(_) => Ok(token),
            Err(error) => Err(error),
        },
        () = process.closed() => {
            // Of a frame that was queued nothing is sent any more.
            Err(match waits.withdraw() {
                true => CallError::not_sent("queued").connection_lost(),
                false => with_exit(&process, CallError::closed("closed")),
            })
        }
        () = withdrawn => Err(CallError::not_sent("queued")),
        else => pending().await,
    }
}

/// What becomes of a write's bytes, whoever still waits for it.
async fn wire(
    process: Process,
    token: u32,
    frame: Arc<Mutex<Frame>>,
    activity: Option<Arc<Activity>>,
    cancelled: Arc<AtomicBool>,
    reply: oneshot::Sender<Reply>,
) {
    let world = process.world.clone();
    let faults = &world.plan().faults;
    let run = world.lock().book.run;
    if *frame.lock().unwrap() != Frame::Taken {
        if world.fault(faults.stall) {
            world.cover(Branch::Stalled);
            sleep(world.wait(12_000)).await;
        }
        if *frame.lock().unwrap() == Frame::Withdrawn || !process.is_open() {
            return;
        }
        *frame.lock().unwrap() = Frame::Taken;
        if world.fault(faults.stall) {
            // Stalled until the rest is written, or until the connection closes.
            let _ = timeout(world.wait(12_000), process.closed()).await;
        }
        if world.lock().book.run != run {
            return; // What a client had not written when it crashed is never written.
        }
        if !process.is_open() && world.chance(50) {
            world.cover(Branch::Cut);
            return;
        }
        // A frame that the closure cut may have been enough all the same.
        if let (true, Some(activity)) = (process.is_open(), &activity) {
            activity.sent();
        }
    }
    let first = process.arrives(token, None);
    let said = process.put(token, None, first, &cancelled).await;
    if cancelled.load(Ordering::Relaxed) && world.effects(token) > 0 {
        world.cover(Branch::CancelledAfter);
    }
    if !process.is_open() || process.is_silent() || said == Reply::Silence {
        // The call waits for it all the same, until the connection closes.
        return process.closed().await;
    }
    let _ = reply.send(said);
}
