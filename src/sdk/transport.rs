//! What lies between the SDK's client and the wire: a witness around any transport, and the transport for child
//! processes, which counts bytes.

use std::{
    collections::VecDeque,
    fmt,
    future::poll_fn,
    io,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, ready},
    time::SystemTime,
};

use bytes::BytesMut;
use rmcp::{
    RoleClient,
    model::{ClientJsonRpcMessage, ClientRequest, RequestId, ServerJsonRpcMessage},
    transport::{Transport, streamable_http_client::StreamableHttpError},
};
use serde_json::value::RawValue;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadHalf, WriteHalf},
    sync::Notify,
};
use tokio_util::{codec::Decoder, io::poll_read_buf};

use super::{
    connection::{Inner, token_of},
    evidence::{HttpErrorKind, Sight, error_data},
    exchange::Exchange,
    retry_after::retry_after,
};
use crate::{
    BoxError,
    connection::BoxFuture,
    deadline::once_more,
    jsonrpc::{Batch, Drain, Lines, Piece, Said, present, server_error},
    wakers::quietly,
};

/// How much is read at once.
const READ: usize = 16 << 10;
/// How many messages that are no calls (answers, cancellations, the user's notifications) wait for the pipe at most.
/// More are not sent.
const MAX_WAITING: usize = 2_048;
/// The size limit of one message, in bytes.
const MAX_LINE: usize = 64 << 20;

/// Why a transport did not send.
#[derive(Debug)]
pub(super) struct TransportError {
    /// The call was withdrawn before its first byte.
    pub(super) withdrawn: bool,
    pub(super) source: Option<BoxError>,
}

impl TransportError {
    fn of(source: impl Into<BoxError>) -> Self {
        let mut source = source.into();
        without_headers(&mut source);
        Self { withdrawn: false, source: Some(source) }
    }

    fn withdrawn() -> Self {
        Self { withdrawn: true, source: None }
    }
}

impl fmt::Display for TransportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.withdrawn { "withdrawn before it was sent" } else { "the transport failed" })
    }
}

impl std::error::Error for TransportError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.source.as_deref().map(|source| source as _)
    }
}

/// The SDK's error of an HTTP transport, without what stood in the response's headers: its texts have it, and a
/// challenge may hold a token.
fn without_headers(error: &mut BoxError) {
    let Some(error) = error.downcast_mut::<StreamableHttpError<reqwest::Error>>() else { return };
    match error {
        StreamableHttpError::AuthRequired(of) => of.www_authenticate_header.clear(),
        StreamableHttpError::InsufficientScope(of) => {
            of.www_authenticate_header.clear();
            of.required_scope = None;
        }
        StreamableHttpError::HttpStatus(of) => {
            let wait = of.retry_after.as_deref().and_then(|wait| retry_after(wait, SystemTime::now()));
            of.retry_after = wait.map(|wait| wait.as_secs().to_string());
        }
        StreamableHttpError::UnexpectedContentType(of) => *of = None,
        _ => {}
    }
}

type Receiving<'a> = Pin<Box<dyn Future<Output = Option<ServerJsonRpcMessage>> + Send + 'a>>;

/// Any transport of the SDK, erased.
pub(super) trait AnyTransport: Send {
    fn send(&mut self, message: ClientJsonRpcMessage) -> BoxFuture<Result<(), TransportError>>;
    fn receive(&mut self) -> Receiving<'_>;
    fn close(&mut self) -> Pin<Box<dyn Future<Output = Result<(), TransportError>> + Send + '_>>;
}

/// A transport of the SDK's or the user's.
pub(super) struct Foreign<T>(pub(super) T);

impl<T> AnyTransport for Foreign<T>
where
    T: Transport<RoleClient> + 'static,
{
    fn send(&mut self, message: ClientJsonRpcMessage) -> BoxFuture<Result<(), TransportError>> {
        let sending = self.0.send(message);
        Box::pin(async move { sending.await.map_err(TransportError::of) })
    }

    fn receive(&mut self) -> Receiving<'_> {
        Box::pin(self.0.receive())
    }

    fn close(&mut self) -> Pin<Box<dyn Future<Output = Result<(), TransportError>> + Send + '_>> {
        Box::pin(async move { self.0.close().await.map_err(TransportError::of) })
    }
}

// ===== impl Witness =====

/// Stands between the SDK's client and the transport, and sees what is really handed over and what comes.
pub(super) struct Witness {
    transport: Box<dyn AnyTransport>,
    inner: Arc<Inner>,
    /// Whether the transport takes the frames of calls itself, later and with more knowledge.
    takes: bool,
}

impl Witness {
    pub(super) fn new(transport: Box<dyn AnyTransport>, inner: Arc<Inner>, takes: bool) -> Self {
        Self { transport, inner, takes }
    }
}

impl Transport<RoleClient> for Witness {
    type Error = TransportError;

    fn send(
        &mut self,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), TransportError>> + Send + 'static {
        let exchange = Exchange::of(&message);
        let mut place = None;
        match &message {
            ClientJsonRpcMessage::Request(request) => {
                if matches!(request.request, ClientRequest::InitializeRequest(_)) {
                    self.inner.shakes_hands();
                }
                if let RequestId::Number(id) = request.id {
                    self.inner.numbered(id);
                    if let Some(exchange) = &exchange {
                        exchange.set_id(id);
                        self.inner.sending(exchange, id, token_of(&request.request));
                    }
                }
            }
            ClientJsonRpcMessage::Response(answer) => place = self.inner.answers(&answer.id),
            ClientJsonRpcMessage::Error(answer) => {
                place = answer.id.as_ref().and_then(|id| self.inner.answers(id));
            }
            _ => {}
        }
        let own = exchange.filter(|_| !self.takes);
        let goes = |exchange: &Arc<Exchange>| self.inner.lets_go_out(exchange) && exchange.frame.take();
        let withdrawn = own.as_ref().is_some_and(|exchange| !goes(exchange));
        let sending = (!withdrawn).then(|| self.transport.send(message));
        async move {
            let _until_written = place;
            let Some(sending) = sending else { return Err(TransportError::withdrawn()) };
            sending.await?;
            if let Some(exchange) = own {
                exchange.mark_sent();
            }
            Ok(())
        }
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        loop {
            let mut message = self.transport.receive().await;
            let is_for_the_sdk = match &mut message {
                Some(message) => self.inner.received(message),
                None => {
                    self.inner.close("the server closed the connection");
                    true
                }
            };
            if is_for_the_sdk {
                return message;
            }
        }
    }

    async fn close(&mut self) -> Result<(), TransportError> {
        self.inner.close("the connection was closed by the client");
        self.transport.close().await
    }
}

impl Drop for Witness {
    fn drop(&mut self) {
        // The SDK's task has ended, however it did.
        self.inner.close("the connection's task ended");
    }
}

// ===== impl Pipe =====

pub(super) trait Io: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

type Writer = Arc<tokio::sync::Mutex<Option<WriteHalf<Box<dyn Io>>>>>;

/// Whether a write has failed: what the child has answered before that is read, and then the connection closes.
#[derive(Default)]
struct WriteFailed {
    has: AtomicBool,
    told: Notify,
}

/// An answer that the SDK cannot read.
struct OddAnswer {
    id: Option<i64>,
    said: Said,
    sight: Sight,
}

/// One message a line over the pipes of a child process.
pub(super) struct Pipe {
    inner: Arc<Inner>,
    reader: Option<ReadHalf<Box<dyn Io>>>,
    writer: Writer,
    /// How many messages that are no calls wait for the writer.
    waiting: Arc<AtomicUsize>,
    lines: Lines,
    input: BytesMut,
    /// A batch that is worked off before anything else is read.
    batch: Option<Batch>,
    /// Whether there may be something in the input that was not looked at.
    unread: bool,
    /// How much is looked at before others have their turn.
    portion: usize,
    /// What was read, in the order of the pipe.
    ready: VecDeque<Result<ServerJsonRpcMessage, OddAnswer>>,
    /// The child's own exit: a grandchild may keep its output open for ever. Or that it takes nothing any more.
    exited: Option<BoxFuture<()>>,
    write_failed: Arc<WriteFailed>,
    draining: Option<Drain>,
    ended: bool,
}

impl Pipe {
    pub(super) fn new(inner: Arc<Inner>, pipes: impl Io + 'static, exited: BoxFuture<()>) -> Self {
        let pipes: Box<dyn Io> = Box::new(pipes);
        let (reader, writer) = tokio::io::split(pipes);
        let write_failed = Arc::<WriteFailed>::default();
        let failed = Arc::clone(&write_failed);
        let exited = async move {
            tokio::select! {
                () = exited => {}
                () = quietly(failed.told.notified()) => {}
            }
        };
        Self {
            inner,
            reader: Some(reader),
            writer: Arc::new(tokio::sync::Mutex::new(Some(writer))),
            waiting: Arc::default(),
            lines: Lines::new(MAX_LINE),
            input: BytesMut::new(),
            batch: None,
            unread: false,
            portion: Batch::PORTION,
            ready: VecDeque::new(),
            exited: Some(Box::pin(exited)),
            write_failed,
            draining: None,
            ended: false,
        }
    }

    /// The next message; `None` at the end.
    fn poll_receive(&mut self, cx: &mut Context<'_>) -> Poll<Option<ServerJsonRpcMessage>> {
        loop {
            if let Some(read) = self.ready.pop_front() {
                match read.or_else(|odd| self.end_oddly(odd)) {
                    Ok(message) => return Poll::Ready(Some(message)),
                    Err(()) => continue,
                }
            }
            if self.portion == 0 {
                self.portion = Batch::PORTION;
                // What never runs empty hides the child's exit no more than what others have to do.
                self.poll_exit(cx);
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if self.unread {
                self.work_off();
                continue;
            }
            let Some(reader) = self.reader.as_mut().filter(|_| !self.ended) else {
                if self.write_failed.has.load(Ordering::Acquire) {
                    self.inner.close("writing to the server failed");
                }
                return Poll::Ready(None);
            };
            let mut reader = Pin::new(reader);
            if self.input.capacity() - self.input.len() < READ / 4 {
                self.input.reserve(READ);
            }
            let mut read = |cx: &mut Context<'_>| poll_read_buf(reader.as_mut(), cx, &mut self.input);
            let read = match &mut self.draining {
                None => read(cx),
                Some(drain) => drain.poll_read(cx, read),
            };
            let Poll::Ready(read) = read else {
                self.portion = Batch::PORTION;
                if self.poll_exit(cx) {
                    continue;
                }
                return Poll::Pending;
            };
            self.portion -= 1;
            let at_end = !matches!(read, Ok(read) if read > 0);
            if at_end {
                self.let_go();
            }
            self.work_off();
            // A part of a message, a batch or what is none; whole ones speak for themselves.
            if !at_end && self.ready.is_empty() {
                self.inner.heard();
            }
        }
    }

    /// Reads what is there, as far as the portion goes.
    fn work_off(&mut self) {
        self.unread = true;
        let mut input = std::mem::take(&mut self.input);
        while self.portion > 0 {
            if let Some(mut batch) = self.batch.take() {
                let mut portion = self.portion;
                let is_over = batch.texts(&mut portion, |message| match message {
                    Ok(message) => self.read_message(message.as_bytes()),
                    Err(_) => self.ignore(false),
                });
                self.portion = portion;
                if !is_over {
                    self.batch = Some(batch);
                }
                continue;
            }
            let piece = match self.ended {
                false => self.lines.decode(&mut input),
                true => self.lines.decode_eof(&mut input),
            };
            let Ok(Some(piece)) = piece else {
                self.unread = false;
                break;
            };
            self.portion -= 1;
            self.read(piece);
        }
        self.input = input;
    }

    /// Whether the child was seen to have exited, also where reading has used up the task's turn: what is in its pipe
    /// is to be read.
    fn poll_exit(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(exited) = &mut self.exited else { return false };
        if once_more(exited.as_mut(), cx).is_none() {
            return false;
        }
        self.exited = None;
        self.draining = Some(Drain::begin());
        true
    }

    fn read(&mut self, piece: Piece) {
        match piece {
            Piece::Line(line) if Batch::is_one(&line) => match Batch::new(line) {
                Ok(batch) => self.batch = Some(batch),
                Err(_) => self.ignore(false),
            },
            Piece::Line(line) => self.read_message(&line),
            Piece::TooLong => {
                self.inner.ignore(true);
                tracing::debug!(target: "goaround", "a line above the limit was ignored");
            }
            Piece::TooLongAnswer(id) => {
                let (id, sight) = (i64::try_from(id).ok(), Sight::TooLarge(MAX_LINE));
                self.ready.push_back(Err(OddAnswer { id, said: self.lines.said(), sight }));
            }
        }
    }

    fn read_message(&mut self, message: &[u8]) {
        if !is_object(message) {
            return self.ignore(false);
        }
        match serde_json::from_slice(message) {
            Ok(message) => self.ready.push_back(Ok(message)),
            Err(_) => self.odd_answer(message),
        }
    }

    /// A message that the SDK cannot read: if it is known to be an answer, its call ends by it. What is no JSON, or has
    /// a member twice, is no message at all, and leaves the call to its deadline.
    fn odd_answer(&mut self, message: &[u8]) {
        match Envelope::of(message) {
            Some(envelope) if envelope.is_answer() => {
                let (id, said) = (envelope.number(), envelope.said());
                let sight = Sight::Odd(HttpErrorKind::NotJsonRpc, None);
                self.ready.push_back(envelope.amended().ok_or(OddAnswer { id, said, sight }));
            }
            envelope => self.ignore(envelope.is_some_and(|envelope| envelope.is_message())),
        }
    }

    fn ignore(&self, is_json_rpc: bool) {
        self.inner.ignore(is_json_rpc);
        tracing::debug!(target: "goaround", "what is no message was ignored");
    }

    /// Ends the request of that id, with what was seen if it is a call's. The SDK is told in words that it knows.
    fn end_oddly(&self, OddAnswer { id, said, sight }: OddAnswer) -> Result<ServerJsonRpcMessage, ()> {
        let told = id.and_then(|id| Some((id, self.inner.answered_oddly(id, said)?)));
        let Some((id, exchange)) = told else {
            self.inner.heard();
            return Err(());
        };
        if let Some(exchange) = exchange {
            exchange.saw(sight);
        }
        Ok(seen_elsewhere(RequestId::Number(id)))
    }

    /// Whoever supervises the child sees that nobody holds the pipes any more. A write that a server which does not
    /// read holds up has its own hold, and lets go when the SDK's task ends.
    fn let_go(&mut self) {
        self.ended = true;
        self.unread = true;
        self.reader = None;
        if let Ok(mut writer) = self.writer.try_lock() {
            *writer = None;
        }
    }
}

/// An answer for the SDK alone, to a request of which the transport has seen the end.
pub(super) fn seen_elsewhere(id: RequestId) -> ServerJsonRpcMessage {
    let error = rmcp::model::ErrorData::internal_error("no answer that can be read", None);
    ServerJsonRpcMessage::error(error, Some(id))
}

impl AnyTransport for Pipe {
    fn send(&mut self, message: ClientJsonRpcMessage) -> BoxFuture<Result<(), TransportError>> {
        let writer = Arc::clone(&self.writer);
        let inner = Arc::clone(&self.inner);
        let waiting = Arc::clone(&self.waiting);
        let write_failed = Arc::clone(&self.write_failed);
        let exchange = Exchange::of(&message);
        let frame = serde_json::to_vec(&message).map(|mut frame| {
            frame.push(b'\n');
            frame
        });
        Box::pin(async move {
            let frame = frame.map_err(TransportError::of)?;
            let mut writer = match &exchange {
                // What waits for its turn is not kept after its call.
                Some(exchange) => tokio::select! {
                    biased;
                    writer = writer.lock() => writer,
                    () = exchange.was_withdrawn() => return Err(TransportError::withdrawn()),
                },
                None => {
                    let _waiting = Waiting::begin(waiting).ok_or_else(TransportError::withdrawn)?;
                    writer.lock().await
                }
            };
            let Some(writer) = writer.as_mut() else {
                return Err(TransportError::of(io::Error::from(io::ErrorKind::NotConnected)));
            };
            match exchange {
                Some(exchange) => {
                    if !exchange.begin(frame.len()) {
                        return Err(TransportError::withdrawn());
                    }
                    let writing =
                        Writing { inner: &inner, exchange: &exchange, writer, frame: &frame, at: 0 };
                    let written = tokio::select! {
                        biased;
                        // The pipe has accepted nothing of it, and others may go on.
                        () = exchange.was_withdrawn() => None,
                        written = writing => written,
                    };
                    match written {
                        None => return Err(TransportError::withdrawn()),
                        Some(Ok(())) => {
                            exchange.set_heard(inner.times_heard());
                            exchange.mark_sent();
                            inner.written(&exchange);
                        }
                        Some(Err(error)) => {
                            write_failed.has.store(true, Ordering::Release);
                            write_failed.told.notify_one();
                            // What was written of it is known there.
                            inner.until_closed().await;
                            return Err(TransportError::of(error));
                        }
                    }
                }
                None => {
                    use tokio::io::AsyncWriteExt;
                    writer.write_all(&frame).await.map_err(TransportError::of)?;
                }
            }
            Ok(())
        })
    }

    fn receive(&mut self) -> Receiving<'_> {
        Box::pin(poll_fn(|cx| self.poll_receive(cx)))
    }

    fn close(&mut self) -> Pin<Box<dyn Future<Output = Result<(), TransportError>> + Send + '_>> {
        self.let_go();
        Box::pin(std::future::ready(Ok(())))
    }
}

/// One of the messages that wait for the writer.
struct Waiting(Arc<AtomicUsize>);

impl Waiting {
    /// `None`: there are too many, as of a server that does not read.
    fn begin(waiting: Arc<AtomicUsize>) -> Option<Self> {
        let begins = waiting.fetch_add(1, Ordering::Relaxed) < MAX_WAITING;
        let waits = Self(waiting);
        begins.then_some(waits)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Writes a call's frame, as long as the call's bytes may be written. `None`: not one was, and none will be.
struct Writing<'a> {
    inner: &'a Inner,
    exchange: &'a Exchange,
    writer: &'a mut WriteHalf<Box<dyn Io>>,
    frame: &'a [u8],
    at: usize,
}

impl Future for Writing<'_> {
    type Output = Option<io::Result<()>>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        // What held for it may not hold any more when a pipe that was full takes the first of it.
        if this.at == 0 && !this.inner.lets_go_out(this.exchange) {
            return Poll::Ready(None);
        }
        while this.at < this.frame.len() {
            let rest = &this.frame[this.at..];
            let write = || Pin::new(&mut *this.writer).poll_write(cx, rest);
            let accepted = |written: &Poll<io::Result<usize>>| match written {
                Poll::Ready(Ok(accepted)) => *accepted,
                _ => 0,
            };
            let Some(written) = this.exchange.write(write, accepted) else {
                let closed = || Err(io::ErrorKind::NotConnected.into());
                return Poll::Ready((this.at > 0).then(closed));
            };
            match ready!(written) {
                Ok(0) => return Poll::Ready(Some(Err(io::ErrorKind::WriteZero.into()))),
                Ok(accepted) => this.at += accepted,
                Err(error) => return Poll::Ready(Some(Err(error))),
            }
        }
        Pin::new(&mut *this.writer).poll_flush(cx).map(Some)
    }
}

/// Whether it begins as a message does. What is read into structs would also be read from an array.
pub(super) fn is_object(message: &[u8]) -> bool {
    message.trim_ascii_start().starts_with(b"{")
}

/// What a message is, whatever else is in it.
#[derive(Default, serde::Deserialize)]
pub(super) struct Envelope<'a> {
    #[serde(default, borrow)]
    id: Option<&'a RawValue>,
    #[serde(default, borrow)]
    method: Option<&'a RawValue>,
    /// `null` is one, unless there is an error.
    #[serde(default, borrow, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    /// `null` is none.
    #[serde(default, borrow)]
    error: Option<&'a RawValue>,
}

impl<'a> Envelope<'a> {
    pub(super) fn of(message: &'a [u8]) -> Option<Self> {
        is_object(message).then(|| serde_json::from_slice(message).ok())?
    }

    pub(super) fn is_answer(&self) -> bool {
        self.method.is_none() && (self.result.is_some() || self.error.is_some())
    }

    /// Whether it is a message of JSON-RPC at all.
    fn is_message(&self) -> bool {
        self.method.is_some() || self.is_answer()
    }

    pub(super) fn is_error(&self) -> bool {
        self.is_answer() && self.error.is_some()
    }

    /// Of an answer, what it is.
    pub(super) fn said(&self) -> Said {
        if self.is_error() { Said::Error } else { Said::Result }
    }

    /// That answer, for the SDK.
    pub(super) fn read(&self, message: &[u8]) -> Option<ServerJsonRpcMessage> {
        serde_json::from_slice(message).ok().or_else(|| self.amended())
    }

    /// An answer that the SDK cannot read, as [`crate::jsonrpc`] reads it: with the absent one of result and error written
    /// as `null`, an error that is not as it should be, or without a version.
    pub(super) fn amended(&self) -> Option<ServerJsonRpcMessage> {
        let id = serde_json::from_str(self.id?.get()).ok()?;
        let result = self.result.filter(|result| self.error.is_none() || result.get() != "null");
        match (self.method, result, self.error) {
            (None, Some(result), None) => {
                Some(ServerJsonRpcMessage::response(serde_json::from_str(result.get()).ok()?, id))
            }
            (None, None, Some(error)) => {
                Some(ServerJsonRpcMessage::error(error_data(&server_error(error)), Some(id)))
            }
            _ => None,
        }
    }

    /// The id as a number, as the SDK reads it: also where it was made a text.
    pub(super) fn number(&self) -> Option<i64> {
        match serde_json::from_str(self.id?.get()).ok()? {
            RequestId::Number(id) => Some(id),
            RequestId::String(id) => id.parse().ok(),
        }
    }
}

impl Envelope<'_> {
    /// Whether it is the answer to that request.
    pub(super) fn answers(&self, id: &RequestId) -> bool {
        match id {
            RequestId::Number(id) => self.number() == Some(*id),
            id => {
                self.id.and_then(|own| serde_json::from_str::<RequestId>(own.get()).ok()).as_ref() == Some(id)
            }
        }
    }
}
