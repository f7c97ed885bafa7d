//! Connections of the JSON-RPC client over pipes in memory, which are there at once, and dice for tests that draw their
//! worlds.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    future::{Future, Ready, ready},
    pin::Pin,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use goaround::{BoxError, CallError, Tagged, WriteSafetyLayer, jsonrpc::Client};
use tokio::io::{AsyncReadExt, DuplexStream, duplex};
use tower::Service;

pub type Tag = Tagged<u64>;
pub type Tags = WriteSafetyLayer<Tag, u64>;
pub type Said = Pin<Box<dyn Future<Output = Result<u64, CallError>> + Send>>;

/// The other ends of the connections, in the order in which they were made.
#[derive(Clone)]
pub struct Pipes {
    pub ends: Arc<Mutex<Vec<Option<DuplexStream>>>>,
    /// How many bytes a pipe holds.
    room: usize,
    /// Whether the clients have exact writes, as those of child processes.
    exact: bool,
}

impl Default for Pipes {
    fn default() -> Self {
        Self::new(1 << 10, false)
    }
}

impl Pipes {
    pub fn new(room: usize, exact: bool) -> Self {
        Self { ends: Arc::default(), room, exact }
    }

    /// The server's end of one of them. Whoever drops it closes the connection.
    pub fn take(&self, at: usize) -> DuplexStream {
        self.ends.lock().unwrap()[at].take().expect("a connection")
    }

    pub async fn kill(&self, at: usize) {
        drop(self.take(at));
        settle().await;
    }

    pub fn connects(&self) -> usize {
        self.ends.lock().unwrap().len()
    }

    /// Forgets all, which closes those that nobody has taken: the next one is the first again.
    pub fn clear(&self) {
        self.ends.lock().unwrap().clear();
    }
}

impl Service<()> for Pipes {
    type Response = Client;
    type Error = BoxError;
    type Future = Ready<Result<Client, BoxError>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, (): ()) -> Self::Future {
        let (ours, theirs) = duplex(self.room);
        self.ends.lock().unwrap().push(Some(theirs));
        let builder = Client::builder();
        let builder = if self.exact { builder.exact_writes() } else { builder };
        ready(Ok(builder.connect(ours)))
    }
}

/// Lets the connections' tasks do what they can.
pub async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

/// What the server reads now, as much as the connection's task has to send.
pub async fn read_all(peer: &mut DuplexStream) -> String {
    let mut seen = Vec::new();
    for _ in 0..100 {
        let mut buffer = [0; 1024];
        if let Some(Ok(read)) = poll_once(Box::pin(peer.read(&mut buffer)).as_mut()) {
            seen.extend(&buffer[..read]);
        }
        settle().await;
    }
    String::from_utf8(seen).unwrap()
}

pub fn poll_once<F: Future + ?Sized>(future: Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(output) => Some(output),
        Poll::Pending => None,
    }
}

/// The same draws for the same seed, from wherever they are asked for.
#[derive(Clone)]
pub struct Dice(Arc<AtomicU64>);

impl Dice {
    pub fn new(seed: u64) -> Self {
        let dice = Self(Arc::new(AtomicU64::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)));
        for _ in 0..10 {
            dice.roll(2);
        }
        dice
    }

    pub fn roll(&self, sides: u64) -> u64 {
        let mut x = self.0.load(Ordering::Relaxed);
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.0.store(x, Ordering::Relaxed);
        (x >> 11) % sides
    }

    pub fn once_in(&self, sides: u64) -> bool {
        self.roll(sides) == 0
    }

    pub fn ms(&self, most: u64) -> Duration {
        Duration::from_millis(self.roll(most))
    }
}
