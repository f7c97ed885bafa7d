//! What is done with arbitrary bytes: by the fuzzer (`fuzz/`), and by `tests/corpus.rs` with what it has kept.

use std::{
    pin::{Pin, pin},
    task::{Context, Poll},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use goaround::{
    Call, CallError, Delivery,
    jsonrpc::{Client, Request, Response},
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A peer that says that, in pieces of so many bytes, and takes everything.
struct Peer {
    says: Vec<u8>,
    said: usize,
    piece: usize,
    /// Whether the next read is to wait, so that a piece is looked at before the next one is there.
    pause: bool,
    ends: bool,
}

impl AsyncRead for Peer {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        self.pause = !self.pause;
        let left = self.says.len() - self.said;
        if left == 0 && !self.ends {
            return Poll::Pending;
        }
        if self.pause {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let piece = self.piece.min(left).min(buf.remaining());
        buf.put_slice(&self.says[self.said..self.said + piece]);
        self.said += piece;
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for Peer {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }
}

/// How one call ended, without its words.
#[derive(Clone, Debug, PartialEq)]
enum End {
    Result(String),
    Server(i64),
    TooLarge,
    /// In doubt.
    Open,
}

fn end_of(told: Result<Response, CallError>) -> End {
    match told {
        Ok(response) => End::Result(response.raw().get().to_owned()),
        Err(error) => match (error.answer(), error.delivery()) {
            (Some(answer), _) => End::Server(answer.code),
            (None, Delivery::Answered) => End::TooLarge,
            // The peer took every byte.
            (None, delivery) => {
                assert_eq!(delivery, Delivery::Ambiguous, "{error:?}");
                End::Open
            }
        },
    }
}

/// Three calls to a peer that says that; how they end, and how much of it was of no use.
fn talk(says: &[u8], piece: usize, max_line: usize, says_all: bool) -> (Vec<End>, u64) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(async {
        let peer = Peer { says: says.to_vec(), said: 0, piece: piece.max(1), pause: false, ends: says_all };
        let client = Client::builder().max_line(max_line.max(1)).connect(peer);
        let limit = Duration::from_secs(5);
        let calls = ["one", "two", "three"].map(|method| {
            let request = Request::new(method, ()).expect("a request");
            client.request(request.within(limit))
        });
        let mut ends = Vec::new();
        for call in calls {
            let mut call = pin!(call);
            let told = match tokio::time::timeout(limit, &mut call).await {
                Ok(told) => told,
                // Past its deadline it must tell what it knows.
                Err(_) => tokio::time::timeout(Duration::ZERO, call).await.expect("it tells what it knows"),
            };
            ends.push(end_of(told));
        }
        if says_all {
            // What comes after the last answer counts too.
            client.closed().await;
        }
        (ends, client.ignored())
    })
}

/// The client against arbitrary bytes of its peer.
pub fn client(bytes: &[u8]) {
    let [shape, says @ ..] = bytes else { return };
    let max_line = if shape & 1 == 0 { 64 } else { 1 << 20 };
    let piece = usize::from(shape >> 2).max(1);
    talk(says, piece, max_line, shape & 2 == 0);
}

/// The framing: in whatever pieces the bytes come, they say the same.
pub fn frames(bytes: &[u8]) {
    let [shape, says @ ..] = bytes else { return };
    let max_line = usize::from(*shape);
    let whole = talk(says, usize::MAX, max_line, true);
    for piece in [1, 2, 7] {
        assert_eq!(talk(says, piece, max_line, true), whole, "in pieces of {piece}");
    }
}

/// The file of a ledger.
#[cfg(feature = "ledger-durable")]
pub fn ledger(bytes: &[u8]) {
    let _ = goaround::write_safety::ledger::decode_durable(bytes);
}

// Files of the crate that need nothing of it, so that the fuzzer need not build what they are used by.
#[path = "../../src/sdk/retry_after.rs"]
mod retry_after;
#[allow(dead_code, reason = "not all of it is fed")]
#[path = "../../src/sdk/sse.rs"]
mod sse;

/// The waits that a server asks for: `Retry-After` in each of its forms, and a stream's `retry`.
pub fn waits(bytes: &[u8]) {
    let [shape, says @ ..] = bytes else { return };
    // From 1994 on, up to the year 3000.
    let now = UNIX_EPOCH + Duration::from_secs(784_111_777 + u64::from(*shape) * 124_000_000);
    let read = |value: &str| retry_after::retry_after(value, now);
    let wait = std::str::from_utf8(says).ok().and_then(read);
    // Whatever it asks for, in whatever form, is the same wait in all the others.
    if let Some(at) = wait.and_then(|wait| now.checked_add(wait)) {
        let date = Date::of(at);
        let seconds = wait.unwrap_or_default().as_secs();
        assert_eq!(read(&seconds.to_string()), wait);
        if date.year <= 9999 {
            assert_eq!(read(&date.imf_fixdate()), wait, "{}", date.imf_fixdate());
            assert_eq!(read(&date.asctime()), wait, "{}", date.asctime());
        }
        if date.year < Date::of(now).year + 50 {
            assert_eq!(read(&date.rfc850()), wait, "{}", date.rfc850());
        }
    }
    let whole = events(says, usize::MAX);
    for piece in [1, 2, 7] {
        assert_eq!(events(says, piece), whole, "in pieces of {piece}");
    }
}

/// The events of a stream that comes in such pieces, and whether one was too large.
fn events(says: &[u8], piece: usize) -> (Vec<sse::Event>, bool) {
    let mut parser = sse::Parser::new(256);
    let mut events = Vec::new();
    for chunk in says.chunks(piece) {
        let read = parser.read(chunk);
        events.extend(std::iter::from_fn(|| parser.next()));
        if read.is_err() {
            return (events, true);
        }
    }
    (events, false)
}

/// A date, to be written as RFC 9110 has it (section 5.6.7).
struct Date {
    days: u64,
    year: u64,
    month: usize,
    day: u64,
    time: String,
}

impl Date {
    fn of(at: SystemTime) -> Self {
        let seconds = at.duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let (days, time) = (seconds / 86_400, seconds % 86_400);
        // The calendar is the same again after 400 years.
        let (mut year, mut left) = (1970 + days / 146_097 * 400, days % 146_097);
        let is_leap =
            |year: u64| year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400));
        while left >= 365 + u64::from(is_leap(year)) {
            left -= 365 + u64::from(is_leap(year));
            year += 1;
        }
        let mut month = 0;
        for length in [31, 28 + u64::from(is_leap(year)), 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
            if left < length {
                break;
            }
            left -= length;
            month += 1;
        }
        let time = format!("{:02}:{:02}:{:02}", time / 3600, time / 60 % 60, time % 60);
        Self { days, year, month, day: left + 1, time }
    }

    fn month(&self) -> &str {
        ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"][self.month]
    }

    fn day_name(&self) -> &str {
        let names = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
        names[(self.days % 7) as usize]
    }

    fn imf_fixdate(&self) -> String {
        let Self { day, year, time, .. } = self;
        format!("{}, {day:02} {} {year:04} {time} GMT", &self.day_name()[..3], self.month())
    }

    fn rfc850(&self) -> String {
        let Self { day, year, time, .. } = self;
        format!("{}, {day:02}-{}-{:02} {time} GMT", self.day_name(), self.month(), year % 100)
    }

    fn asctime(&self) -> String {
        let Self { day, year, time, .. } = self;
        format!("{} {} {day:>2} {time} {year:04}", &self.day_name()[..3], self.month())
    }
}
