//! What is done with arbitrary bytes: by the fuzzer (`fuzz/`), and by `tests/corpus.rs` with what it has kept.

use std::{
    pin::{Pin, pin},
    task::{Context, Poll},
    time::Duration,
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
fn talk(says: &[u8], piece: usize, max_line: usize, ends: bool) -> (Vec<End>, u64) {
    let mut runtime = tokio::runtime::Builder::new_current_thread();
    let runtime = runtime.enable_time().start_paused(true).build().expect("a runtime");
    runtime.block_on(async {
        let peer = Peer { says: says.to_vec(), said: 0, piece: piece.max(1), pause: false, ends };
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
