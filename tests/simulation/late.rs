//! Tasks that have their turn late: one that is woken is polled only when others have had theirs, or some time later,
//! as on a machine that is busy. Drawn apart from everything else, so that other worlds are what they were.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use fastrand::Rng;
use tokio::time::{Instant, Sleep, sleep};

use crate::world::{Favours, Lies, ms};

/// In how many worlds some task is late, in percent.
const WORLDS: u32 = 25;

/// The lateness of a world.
#[derive(Clone, Copy, Debug)]
pub struct Late {
    seed: u64,
    /// How many of its callers are late, in percent.
    callers: u32,
    /// Whether the world has more of what late turns matter for.
    pub favoured: bool,
}

/// The turns of a caller that is late.
pub struct Turns {
    rng: Rng,
    /// How many of them come late, in percent.
    often: u32,
    /// By how many milliseconds at most; 0 if others go ahead and no time passes.
    most: u64,
    /// Whether it calls, and first polls what it called some turns later.
    pub calls_first: bool,
    begun: bool,
    waits: Option<Wait>,
    /// The call's deadline.
    until: Option<Instant>,
    /// How long turns that it waited for lasted beyond that.
    beyond: Duration,
}

enum Wait {
    /// So many other turns.
    Others(u32),
    Time {
        since: Instant,
        sleep: Pin<Box<Sleep>>,
    },
}

impl Late {
    pub fn drawn(seed: u64, lies: Lies) -> Option<Self> {
        let mut rng = Rng::with_seed(seed ^ 0x001a_7e00);
        let callers = [30, 60, 100][rng.usize(0..3)];
        let late = match lies.favours {
            Favours::LateTurns => true,
            _ => rng.u32(0..100) < WORLDS && lies == Lies::default(),
        };
        late.then(|| Self { seed: rng.u64(..), callers, favoured: rng.bool() })
    }

    /// The turns of that caller, if it is late.
    pub fn turns(&self, token: u32, until: Option<Instant>) -> Option<Turns> {
        let mut rng = Rng::with_seed(self.seed ^ u64::from(token));
        (rng.u32(0..100) < self.callers).then(|| Turns {
            often: [15, 40, 80][rng.usize(0..3)],
            most: [0, 20, 400, 5_000][rng.usize(0..4)],
            calls_first: rng.bool(),
            begun: false,
            waits: None,
            until,
            beyond: Duration::ZERO,
            rng,
        })
    }
}

impl Turns {
    /// It was woken: is it its turn?
    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        // Its call begins when it begins.
        if !std::mem::replace(&mut self.begun, true) {
            return Poll::Ready(());
        }
        if self.waits.is_none() && self.rng.u32(0..100) < self.often {
            self.waits = Some(match self.most {
                0 => Wait::Others(self.rng.u32(1..20)),
                most => {
                    let sleep = Box::pin(sleep(ms(self.rng.u64(0..=most))));
                    Wait::Time { since: Instant::now(), sleep }
                }
            });
        }
        match &mut self.waits {
            None => return Poll::Ready(()),
            Some(Wait::Others(0)) => {}
            Some(Wait::Others(left)) => {
                *left -= 1;
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            Some(Wait::Time { sleep, .. }) => ready!(sleep.as_mut().poll(cx)),
        }
        self.beyond = self.beyond();
        self.waits = None;
        Poll::Ready(())
    }

    /// How much of the time since the call's deadline was not its own: it was to have its turn, and had none.
    pub fn beyond(&self) -> Duration {
        let now = match (&self.waits, self.until) {
            (Some(Wait::Time { since, .. }), Some(until)) => (*since).max(until).elapsed(),
            _ => Duration::ZERO,
        };
        self.beyond + now
    }
}
