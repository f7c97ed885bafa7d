//! A proxy on loopback between HTTP/1.1 clients and a server, which does to each request what its random numbers
//! say: it refuses connections, resets them before or after the request was passed on, cuts requests and responses,
//! half-closes, delays, throttles, swallows responses, and holds requests back to deliver them when their client has
//! given up. Nothing is delivered twice, and nothing later than [`Faults::latest`] after it has come.
#![allow(dead_code, missing_docs, unreachable_pub)]

use std::{
    collections::BTreeMap,
    net::{Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::{Duration, Instant},
};

use fastrand::Rng;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::Notify,
    task::{JoinHandle, JoinSet},
    time::{sleep, timeout},
};

/// The longest that a client is kept without a response, and that one is waited for.
const PATIENCE: Duration = Duration::from_secs(5);
/// Into how many pieces a message is throttled at most.
const PIECES: usize = 80;

/// What becomes of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Fate {
    /// Passed on, and the response back.
    Pass,
    /// Both a little later.
    Delay,
    /// Both a few bytes at a time.
    Throttle,
    /// Passed on later, and the response back.
    Hold,
    /// The client's connection is reset; passed on later.
    ResetThenDeliver,
    /// The client's connection is closed; passed on later.
    CloseThenDeliver,
    /// The client's connection is reset before anything is read.
    ResetAtOnce,
    /// The client's connection is reset, and nothing is passed on.
    ResetBefore,
    /// Passed on; then the client's connection is reset.
    ResetAfter,
    /// A part of it is read and passed on; then both connections are closed or reset.
    CutRequest,
    /// A part of the response comes back; then the connection is closed or reset.
    CutResponse,
    /// A part of the response comes back, and then nothing.
    StallResponse,
    /// Passed on, and the response is kept.
    Swallow,
    /// Passed on, and the sending half of the connection to the server is closed.
    HalfCloseToServer,
    /// Passed on, and the sending half of the connection to the client is closed before the response.
    HalfCloseToClient,
    /// Passed on, and answered with a status of the proxy's own.
    Gateway,
}

use Fate::*;

/// How often each fate is drawn by default.
const WEIGHTS: [(Fate, u32); 16] = [
    (Pass, 160),
    (Delay, 8),
    (Throttle, 5),
    (Hold, 5),
    (ResetThenDeliver, 3),
    (CloseThenDeliver, 3),
    (ResetAtOnce, 3),
    (ResetBefore, 3),
    (ResetAfter, 3),
    (CutRequest, 3),
    (CutResponse, 4),
    (StallResponse, 2),
    (Swallow, 2),
    (HalfCloseToServer, 2),
    (HalfCloseToClient, 2),
    (Gateway, 3),
];

/// How many fates there are, the outage not counted.
pub const FATES: usize = WEIGHTS.len();

/// What a proxy does.
#[derive(Clone, Debug)]
pub struct Faults {
    weights: Vec<(Fate, u32)>,
    /// How long requests are held back, in milliseconds.
    pub hold: std::ops::Range<u64>,
    /// What has not been passed on by then is never.
    pub latest: Duration,
    /// Whether now and then nobody listens for a while.
    pub outages: bool,
}

impl Faults {
    /// Requests are held back for so long.
    pub fn new(hold: std::ops::Range<u64>, latest: Duration) -> Self {
        Self { weights: WEIGHTS.to_vec(), hold, latest, outages: true }
    }

    /// That fate so many times as often.
    #[must_use]
    pub fn more(mut self, of: Fate, times: u32) -> Self {
        self.weights.iter_mut().filter(|(fate, _)| *fate == of).for_each(|(_, weight)| *weight *= times);
        self
    }

    fn draw(&self, random: &mut Rng) -> Fate {
        let mut left = random.u32(0..self.weights.iter().map(|(_, weight)| weight).sum());
        for (fate, weight) in &self.weights {
            match left.checked_sub(*weight) {
                Some(rest) => left = rest,
                None => return *fate,
            }
        }
        Pass
    }
}

struct Shared {
    server: SocketAddr,
    faults: Faults,
    random: Mutex<Rng>,
    finish: Notify,
    met: Mutex<BTreeMap<&'static str, u64>>,
}

pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    /// The listener's task, which owns those of its connections.
    listener: JoinHandle<()>,
}

impl Proxy {
    pub async fn start(server: SocketAddr, faults: Faults, mut random: Rng) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.expect("a free port");
        let address = listener.local_addr().expect("it is bound");
        let own = random.fork();
        let (finish, met) = (Notify::new(), Mutex::default());
        let shared = Arc::new(Shared { server, faults, random: random.into(), finish, met });
        let listener = tokio::spawn(listen(listener, address, Arc::clone(&shared), own));
        Self { address, shared, listener }
    }

    pub fn url(&self) -> String {
        format!("http://{}/mcp", self.address)
    }

    /// Takes no more connections, delivers whatever it will deliver, and says how often it has done what. Its clients
    /// should be gone.
    pub async fn finish(&mut self) -> BTreeMap<&'static str, u64> {
        self.shared.finish.notify_one();
        timeout(4 * PATIENCE, &mut self.listener).await.expect("it ends").expect("it does not panic");
        self.shared.met.lock().expect("no panic under it").clone()
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.listener.abort();
    }
}

async fn listen(mut listener: TcpListener, address: SocketAddr, shared: Arc<Shared>, mut random: Rng) {
    let mut connections = JoinSet::new();
    let next = |random: &mut Rng| Box::pin(sleep(Duration::from_millis(random.u64(500..4_000))));
    let mut outage = next(&mut random);
    loop {
        tokio::select! {
            accepted = listener.accept() => {
                let Ok((stream, _)) = accepted else { continue };
                connections.spawn(serve(stream, Arc::clone(&shared)));
            }
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            () = &mut outage, if shared.faults.outages => {
                drop(listener);
                shared.note("Outage");
                sleep(Duration::from_millis(random.u64(5..120))).await;
                listener = loop {
                    match TcpListener::bind(address).await {
                        Ok(listener) => break listener,
                        // Somebody's own end of a connection, for a while.
                        Err(_) => sleep(Duration::from_millis(2)).await,
                    }
                };
                outage = next(&mut random);
            }
            () = shared.finish.notified() => break,
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

// ===== One connection =====

impl Shared {
    fn note(&self, what: &'static str) {
        *self.met.lock().expect("no panic under it").entry(what).or_default() += 1;
    }

    /// What becomes of the next request, and the random numbers for it.
    fn fate(&self) -> (Fate, Rng) {
        let mut random = self.random.lock().expect("no panic under it");
        (self.faults.draw(&mut random), random.fork())
    }

    fn hold(&self, random: &mut Rng) -> Duration {
        Duration::from_millis(random.u64(self.faults.hold.clone()))
    }
}

impl Fate {
    pub fn name(self) -> &'static str {
        match self {
            Pass => "Pass",
            Delay => "Delay",
            Throttle => "Throttle",
            Hold => "Hold",
            ResetThenDeliver => "ResetThenDeliver",
            CloseThenDeliver => "CloseThenDeliver",
            ResetAtOnce => "ResetAtOnce",
            ResetBefore => "ResetBefore",
            ResetAfter => "ResetAfter",
            CutRequest => "CutRequest",
            CutResponse => "CutResponse",
            StallResponse => "StallResponse",
            Swallow => "Swallow",
            HalfCloseToServer => "HalfCloseToServer",
            HalfCloseToClient => "HalfCloseToClient",
            Gateway => "Gateway",
        }
    }
}

fn reset(client: TcpStream) {
    let _ = client.set_zero_linger();
}

async fn close(mut client: TcpStream) {
    let _ = client.shutdown().await;
}

/// Ends it in one of the two ways.
async fn end(client: TcpStream, random: &mut Rng) {
    match random.bool() {
        true => reset(client),
        false => close(client).await,
    }
}

async fn serve(mut client: TcpStream, shared: Arc<Shared>) {
    let _ = client.set_nodelay(true);
    let mut buffer = Vec::new();
    let mut is_first = true;
    loop {
        let (mut fate, mut random) = shared.fate();
        match fate {
            ResetAtOnce if is_first => {
                shared.note(fate.name());
                return reset(client);
            }
            // Between two requests there is nothing to say it to.
            ResetAtOnce => fate = ResetBefore,
            _ => {}
        }
        let Some(whole) = read_head(&mut client, &mut buffer).await else { return close(client).await };
        // A handshake that fails costs all the calls that wait for it, so that few do.
        if !has_session(&buffer) && random.u32(0..100) < 90 {
            fate = Pass;
        }
        shared.note(fate.name());
        match relay(client, &mut buffer, whole, fate, random, &shared).await {
            Some(open) => client = open,
            None => return,
        }
        is_first = false;
    }
}

/// One request of that length, whose head has been read, and its response. `None`: the client's connection is over.
async fn relay(
    mut client: TcpStream,
    buffer: &mut Vec<u8>,
    whole: usize,
    fate: Fate,
    mut random: Rng,
    shared: &Shared,
) -> Option<TcpStream> {
    let latest = Instant::now() + shared.faults.latest;
    let wanted = if fate == CutRequest { random.usize(0..whole) } else { whole };
    read_until(&mut client, buffer, wanted).await?;
    let request: Vec<u8> = buffer.drain(..wanted).collect();
    let pace = if fate == Throttle { random.usize(1..40) } else { usize::MAX };
    let mut client = Some(client);
    match fate {
        ResetBefore => {
            reset(client?);
            return None;
        }
        ResetThenDeliver => reset(client.take()?),
        CloseThenDeliver => close(client.take()?).await,
        HalfCloseToClient => drop(client.as_mut()?.shutdown().await),
        Delay => sleep(Duration::from_millis(random.u64(0..60))).await,
        _ => {}
    }
    if matches!(fate, Hold | ResetThenDeliver | CloseThenDeliver) {
        sleep(shared.hold(&mut random)).await;
    }
    // Nothing goes to the server that would come too late.
    let left = latest.saturating_duration_since(Instant::now());
    let server = timeout(left, deliver(shared.server, &request, pace)).await;
    let Ok(Some(mut server)) = server else {
        shared.note("Undelivered");
        end(client?, &mut random).await;
        return None;
    };
    match fate {
        ResetAfter => reset(client.take()?),
        HalfCloseToServer => server.shutdown().await.ok()?,
        CutRequest => {
            end(server, &mut random).await;
            end(client?, &mut random).await;
            return None;
        }
        _ => {}
    }
    // Also where nobody waits for it any more: then the server has done what it does.
    let response = timeout(PATIENCE, read_response(&mut server)).await;
    let mut client = client?;
    let Ok(Some(response)) = response else {
        end(client, &mut random).await;
        return None;
    };
    let cut = random.usize(0..response.len());
    let written = match fate {
        HalfCloseToClient => return None,
        Swallow | StallResponse => {
            if fate == StallResponse {
                let _ = client.write_all(&response[..cut]).await;
            }
            // Until the client has given up.
            let _ = timeout(PATIENCE, client.read(&mut [0])).await;
            return None;
        }
        CutResponse => {
            let _ = client.write_all(&response[..cut]).await;
            // So that some of it is read before a reset takes it away.
            sleep(Duration::from_millis(random.u64(0..5))).await;
            end(client, &mut random).await;
            return None;
        }
        Gateway => {
            let status = ["502 Bad Gateway", "503 Service Unavailable", "504 Gateway Timeout"];
            let status = status[random.usize(0..3)];
            client.write_all(format!("HTTP/1.1 {status}\r\nContent-Length: 0\r\n\r\n").as_bytes()).await
        }
        Delay => {
            sleep(Duration::from_millis(random.u64(0..60))).await;
            client.write_all(&response).await
        }
        _ => trickle(&mut client, &response, pace).await,
    };
    written.is_ok().then_some(client)
}

/// Passes a request on, over a connection of its own.
async fn deliver(server: SocketAddr, request: &[u8], pace: usize) -> Option<TcpStream> {
    let mut server = TcpStream::connect(server).await.ok()?;
    let _ = server.set_nodelay(true);
    trickle(&mut server, request, pace).await.ok()?;
    Some(server)
}

/// Writes so many bytes at a time.
async fn trickle(to: &mut TcpStream, bytes: &[u8], pace: usize) -> std::io::Result<()> {
    if pace == usize::MAX {
        return to.write_all(bytes).await;
    }
    for piece in bytes.chunks(pace.max(bytes.len().div_ceil(PIECES)).max(1)) {
        to.write_all(piece).await?;
        sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

// ===== HTTP =====

async fn read_more(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<()> {
    match stream.read_buf(buffer).await {
        Ok(1..) => Some(()),
        _ => None,
    }
}

async fn read_until(stream: &mut TcpStream, buffer: &mut Vec<u8>, length: usize) -> Option<()> {
    while buffer.len() < length {
        read_more(stream, buffer).await?;
    }
    Some(())
}

/// Reads the head of a message: how long the message is as a whole, as far as its head says so.
async fn read_head(stream: &mut TcpStream, buffer: &mut Vec<u8>) -> Option<usize> {
    let end = loop {
        if let Some(at) = buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
            break at + 4;
        }
        read_more(stream, buffer).await?;
    };
    let head = std::str::from_utf8(&buffer[..end]).ok()?;
    let length = head.lines().filter_map(|line| line.split_once(':')).find_map(|(name, value)| {
        name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
    });
    Some(end + length.unwrap_or(0))
}

fn has_session(head: &[u8]) -> bool {
    head[..head.len().min(1024)].windows(15).any(|bytes| bytes.eq_ignore_ascii_case(b"mcp-session-id:"))
}

/// A whole response; `None` if it ends before that.
async fn read_response(server: &mut TcpStream) -> Option<Vec<u8>> {
    let mut response = Vec::new();
    let whole = read_head(server, &mut response).await?;
    read_until(server, &mut response, whole).await?;
    let is_chunked =
        response[..response.len().min(512)].windows(26).any(|bytes| bytes == b"Transfer-Encoding: chunked");
    while is_chunked && !response.ends_with(b"\r\n0\r\n\r\n") {
        read_more(server, &mut response).await?;
    }
    Some(response)
}
