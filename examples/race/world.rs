//! The world of the race: one write, the messages that carry it, and a server that may get them late.
//!
//! Nothing here runs. When a message is sent, the seed decides when it arrives, if ever; what the server has
//! done by some instant, and what it will have done in the end, is computed from the messages.

use std::{
    future::pending,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};

use fastrand::Rng;
use tokio::time::{Instant, sleep_until};

/// How long a client waits for an answer before it does something about it.
pub(crate) const PATIENCE: Duration = Duration::from_millis(100);
/// No message takes longer than this. It is the truth that a quarantine of the same length declares.
pub(crate) const LONGEST: Duration = Duration::from_secs(20);
/// How many messages of 100 take anything up to that; the others take 1 to 40 ms.
const SLOW: u32 = 5;
/// How many requests of 100 are lost, and how many replies.
const REQUESTS_LOST: u32 = 2;
const REPLIES_LOST: u32 = 5;

/// What the server does that not every server does.
#[derive(Clone, Copy, Default)]
pub(crate) struct Server {
    /// How far behind the truth lies what a check reads there.
    pub(crate) lag: Duration,
    /// It ignores a request that arrives after the time that the request names.
    pub(crate) keeps_deadlines: bool,
    /// For how long it remembers a key, and answers a request with the same one from memory.
    pub(crate) keeps_keys: Option<Duration>,
    /// It is a child process, killed by its client where an answer takes too long.
    pub(crate) killed: Option<Killed>,
}

/// What ends with a process that is killed.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Killed {
    /// Everything: it made its effects itself.
    EndsEffects,
    /// The process alone: what it had passed on goes on.
    EndsNothing,
}

/// One seed's world.
pub(crate) struct World {
    server: Server,
    state: Mutex<State>,
}

struct State {
    rng: Rng,
    /// In the order of their arrival.
    arrivals: Vec<Arrival>,
    sent: u32,
    /// When the first request was sent, and when the reply to it arrives.
    first: Option<(Instant, Option<Instant>)>,
}

/// A request that arrives.
struct Arrival {
    number: u32,
    at: Instant,
    /// Until when the request says that it may be processed.
    until: Option<Instant>,
    /// When the process that it was sent to is gone.
    gone: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Applied,
    /// Answered from memory.
    Remembered,
    /// It never was processed, and nobody says so.
    Ignored,
}

impl World {
    pub(crate) fn new(seed: u64, server: Server) -> Arc<Self> {
        let state =
            State { rng: Rng::with_seed(seed), arrivals: Vec::with_capacity(2), sent: 0, first: None };
        Arc::new(Self { server, state: Mutex::new(state) })
    }

    /// Sends the write, which says that it may be processed until then. Resolves when the reply is there.
    pub(crate) async fn write(&self, until: Option<Instant>) {
        let (number, reply) = self.send(until);
        if let Some(at) = reply {
            sleep_until(at).await;
            let fate = self.lock().fates(self.server, Instant::now()).find(|fate| fate.0 == number);
            if fate.is_some_and(|(_, fate)| fate != Fate::Ignored) {
                return;
            }
        }
        pending().await
    }

    fn send(&self, until: Option<Instant>) -> (u32, Option<Instant>) {
        let mut state = self.lock();
        let number = state.sent;
        state.sent += 1;
        // Both are drawn in any case, so that the same seed sends the same first messages under each policy.
        let (there, back) = (travel(&mut state.rng, REQUESTS_LOST), travel(&mut state.rng, REPLIES_LOST));
        let now = Instant::now();
        let reply = there.zip(back).map(|(there, back)| now + there + back);
        state.first.get_or_insert((now, reply));
        if let Some(there) = there {
            let at = now + there;
            let place = state.arrivals.partition_point(|earlier| earlier.at <= at);
            state.arrivals.insert(place, Arrival { number, at, until, gone: None });
        }
        (number, reply)
    }

    /// Whether the first request had no answer within the client's patience.
    pub(crate) fn was_in_doubt(&self) -> bool {
        let first = self.lock().first;
        first.is_some_and(|(sent, reply)| reply.is_none_or(|reply| reply > sent + PATIENCE))
    }

    /// The server is killed: says when its process will be gone.
    pub(crate) fn kill(&self) -> Instant {
        let mut state = self.lock();
        let gone = Instant::now() + Duration::from_millis(state.rng.u64(1..50));
        for arrival in &mut state.arrivals {
            arrival.gone.get_or_insert(gone);
        }
        gone
    }

    pub(crate) fn server(&self) -> Server {
        self.server
    }

    /// Whether a check that reads now sees the write.
    pub(crate) fn seen(&self) -> bool {
        let now = Instant::now();
        self.effects_by(now.checked_sub(self.server.lag).unwrap_or(now)) > 0
    }

    /// How often the write has taken effect by then.
    pub(crate) fn effects_by(&self, then: Instant) -> usize {
        self.lock().fates(self.server, then).filter(|(_, fate)| *fate == Fate::Applied).count()
    }

    /// How often it will have taken effect when the last message has arrived.
    pub(crate) fn effects(&self) -> usize {
        self.effects_by(Instant::now() + LONGEST)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }
}

impl State {
    /// What became of the requests that have arrived by then.
    fn fates(&self, server: Server, then: Instant) -> impl Iterator<Item = (u32, Fate)> {
        let mut known_since = None;
        self.arrivals.iter().take_while(move |arrival| arrival.at <= then).map(move |arrival| {
            let at = arrival.at;
            let late = server.keeps_deadlines && arrival.until.is_some_and(|until| at > until);
            let dead =
                server.killed == Some(Killed::EndsEffects) && arrival.gone.is_some_and(|gone| at > gone);
            let known = match (server.keeps_keys, known_since) {
                (Some(keeps), Some(since)) => at.duration_since(since) < keeps,
                _ => false,
            };
            if late || dead {
                return (arrival.number, Fate::Ignored);
            }
            if known {
                return (arrival.number, Fate::Remembered);
            }
            known_since = Some(at);
            (arrival.number, Fate::Applied)
        })
    }
}

/// How long a message takes; `None` if it is lost.
fn travel(rng: &mut Rng, lost: u32) -> Option<Duration> {
    let lost = rng.u32(0..100) < lost;
    let micros = match rng.u32(0..100) < SLOW {
        true => rng.u64(40_000..LONGEST.as_micros() as u64),
        false => rng.u64(1_000..40_000),
    };
    (!lost).then(|| Duration::from_micros(micros))
}
