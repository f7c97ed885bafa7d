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
    /// A write sets a value: a second one with the same value changes nothing.
    pub(crate) sets: bool,
    /// A request names the state that it expects, and is refused where a write has landed before it.
    pub(crate) compares: bool,
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

/// What a request says besides.
#[derive(Clone, Copy)]
pub(crate) struct Terms {
    /// Until when it may be processed.
    pub(crate) until: Option<Instant>,
    /// Whether it has the write's key.
    pub(crate) key: bool,
}

/// The state is not the one that the request expects.
#[derive(Debug, thiserror::Error)]
#[error("conflict")]
pub(crate) struct Conflict;

/// A request that arrives.
struct Arrival {
    number: u32,
    at: Instant,
    terms: Terms,
    /// When the process that it was sent to is gone.
    gone: Option<Instant>,
}

#[derive(Clone, Copy, PartialEq)]
enum Fate {
    Applied,
    /// Answered as the first was, without an effect.
    Remembered,
    /// Answered with an error.
    Refused,
    /// It never was processed, and nobody says so.
    Ignored,
}

impl World {
    pub(crate) fn new(seed: u64, server: Server) -> Arc<Self> {
        let state =
            State { rng: Rng::with_seed(seed), arrivals: Vec::with_capacity(2), sent: 0, first: None };
        Arc::new(Self { server, state: Mutex::new(state) })
    }

    /// Sends the write, on those terms. Resolves when the reply is there.
    pub(crate) async fn write(&self, terms: Terms) -> Result<(), Conflict> {
        let (number, reply) = self.send(terms);
        if let Some(at) = reply {
            sleep_until(at).await;
            match self.lock().fates(self.server, Instant::now()).find(|(of, _)| *of == number) {
                Some((_, Fate::Applied | Fate::Remembered)) => return Ok(()),
                Some((_, Fate::Refused)) => return Err(Conflict),
                Some((_, Fate::Ignored)) | None => {}
            }
        }
        pending().await
    }

    fn send(&self, terms: Terms) -> (u32, Option<Instant>) {
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
            state.arrivals.insert(place, Arrival { number, at, terms, gone: None });
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
        let (mut known_since, mut applied) = (None, false);
        self.arrivals.iter().take_while(move |arrival| arrival.at <= then).map(move |arrival| {
            let Arrival { number, at, terms, gone } = *arrival;
            let late = server.keeps_deadlines && terms.until.is_some_and(|until| at > until);
            let dead = server.killed == Some(Killed::EndsEffects) && gone.is_some_and(|gone| at > gone);
            let keeps = server.keeps_keys.filter(|_| terms.key);
            let known = keeps.zip(known_since).is_some_and(|(keeps, since)| at - since < keeps);
            let known = known || server.sets && applied;
            let fate = match (late || dead, known, server.compares && applied) {
                (true, _, _) => Fate::Ignored,
                (false, true, _) => Fate::Remembered,
                (false, false, true) => Fate::Refused,
                (false, false, false) => Fate::Applied,
            };
            if fate == Fate::Applied {
                (known_since, applied) = (Some(at), true);
            }
            (number, fate)
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
