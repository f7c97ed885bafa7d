//! The connection's task: it alone owns the transport, and the calls whose frames it took.

use std::{
    borrow::Cow,
    collections::{HashMap, VecDeque},
    fmt,
    future::Future,
    hash::{BuildHasherDefault, Hasher},
    io, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    pin::Pin,
    sync::{Arc, atomic::Ordering},
    task::{Context, Poll},
    time::Duration,
};

use bytes::{BufMut, BytesMut};
use serde_json::value::RawValue;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    task::{AbortHandle, JoinSet},
    time::{Instant, Sleep, sleep, sleep_until},
};
use tokio_util::{codec::Decoder, io::poll_read_buf};

use super::{
    Builder, Notification, Response, ServerRequest,
    builder::{Cancel, TakenBack, Upholds},
    client::{Note, Shared, named},
    codec::{Lines, Piece, Said},
    drain::Drain,
    exchange::{Exchange, Outcome},
    handler::{AnyHandler, internal, not_found},
    message::{Batch, Incoming, LISTEN, Odd, write_answer},
};
use crate::{
    Activity, Basis, Call, CallError, CallId, Cause, Closure, Delivery, Event, Evidence, Refusal, Scope,
    ServerError,
    connection::BoxFuture,
    event::{Events, LateAnswer},
};

/// How much is taken from the queue at once. Small, so that little of it lies behind a stalled pipe.
const BATCH: usize = 16 << 10;
/// How much is read at once.
const READ: usize = 16 << 10;
/// A buffer above this is let go when it is empty and nothing lately was as large.
const KEEP: usize = 1 << 20;
/// Over how many fillings "lately" reaches back, at least.
const LATELY: u32 = 64;
/// How often the task reads and writes before it lets others run.
const ROUNDS: usize = 16;
/// How long what is begun is written on when nobody is left.
const LEAVE: Duration = Duration::from_millis(50);
/// How many requests of the peer are answered at once.
const MAX_ASKED: usize = 64;
/// How many frames of our own (answers, cancellations) wait for a peer that does not read.
const MAX_OWN: usize = 1024;
/// How many calls that were given up are remembered, in case that their answers come.
const MAX_REMEMBERED: usize = 1024;
/// How long calls without a deadline keep a connection open whose peer is silent.
const PATIENCE: Duration = Duration::from_secs(300);

pub(super) trait Io: AsyncRead + AsyncWrite + Send {}

impl<T: AsyncRead + AsyncWrite + Send> Io for T {}

type Pending = HashMap<u64, Arc<Exchange>, BuildHasherDefault<OwnIds>>;

pub(super) struct Limits {
    pub(super) line: usize,
    pub(super) exact_writes: bool,
}

pub(super) struct Driver {
    shared: Arc<Shared>,
    /// `None` once the connection is closed.
    io: Option<Pin<Box<dyn Io>>>,
    limits: Limits,
    lines: Lines,
    input: BytesMut,
    /// How much of it was filled since it was empty.
    filled: usize,
    /// A batch that is worked off before anything else is read.
    incoming: Option<Batch>,
    /// Whether that, or the input, may hold more messages.
    unread: bool,
    /// How the input ended, which is told after what is still in it.
    ended: Option<Cow<'static, str>>,
    room: Room,
    out: Out,
    /// Frames of our own: answers, cancellations, probes.
    own: VecDeque<Own>,
    last_id: u64,
    /// Calls whose frames are written, or may be.
    pending: Pending,
    remembered: Remembered,
    cancel: Option<Cancel>,
    handler: Option<Arc<dyn AnyHandler>>,
    taken_back: Option<TakenBack>,
    upholds: Option<Arc<dyn Upholds>>,
    /// As of which change that was asked of what is being written.
    upheld_as_of: u64,
    answering: JoinSet<Result<Response, ServerError>>,
    /// The peer's requests that are being answered.
    asked: HashMap<tokio::task::Id, Asked>,
    /// Calls that have ended and do not know it yet, so that one lock serves many.
    done: Vec<(Arc<Exchange>, Outcome)>,
    notes: Vec<Note>,
    batch: Vec<Arc<Exchange>>,
    /// How often the peer has been heard.
    heard: u64,
    silence: Silence,
    exited: Option<BoxFuture<()>>,
    /// Nothing is written any more, for that reason; what is in the pipe is read.
    draining: Option<(Cow<'static, str>, Drain)>,
    /// Nobody is left; what is begun is written until then.
    leaving: Option<Pin<Box<Sleep>>>,
    end: Option<Cow<'static, str>>,
}

/// A frame that belongs to no call.
struct Own {
    frame: Vec<u8>,
    /// Whether it answers a request of the peer.
    answers: bool,
}

/// A request of the peer that its handler answers.
struct Asked {
    /// The peer's id of it.
    id: Box<str>,
    handling: AbortHandle,
}

/// What is being written.
#[derive(Default)]
struct Out {
    bytes: Vec<u8>,
    /// How many of them the transport has accepted.
    accepted: usize,
    /// How many of them it may have, as it holds a copy of what it was offered: with exact writes only those that it
    /// has accepted. While it is being offered some, all of those.
    shown: usize,
    /// The calls in it that are not accepted to their last byte.
    marks: VecDeque<Mark>,
    /// Calls that are, and may lie in the transport's own buffer as long as it is not flushed.
    unmarked: Vec<Arc<Exchange>>,
    unflushed: bool,
    /// Whether a flush is under way.
    flushing: bool,
    room: Room,
}

/// How large a buffer stays when it is empty: a message as large as the last ones should find it as it is, since
/// growing it costs as much as reading into it.
#[derive(Default)]
struct Room {
    /// The largest of the last [`LATELY`] fillings, and of those since.
    before: usize,
    largest: usize,
    fillings: u32,
}

/// Where in the bytes a call's frame is. From [`Out::shown`] on its frame is the caller's, to be withdrawn, except while
/// it is offered.
struct Mark {
    start: usize,
    end: usize,
    exchange: Arc<Exchange>,
    /// Whether somebody answers for what becomes of its bytes.
    watched: bool,
    /// Whether its answer is waited for, since the peer can have read a whole message; a notification's never is.
    entered: bool,
}

/// What is known of a peer that is not heard.
#[derive(Default)]
struct Silence {
    /// The probe's id, also after it has done its work.
    id: Option<u64>,
    probing: Option<Pin<Box<Sleep>>>,
    doomed: Option<Doomed>,
}

/// The peer counts as gone; these calls are still waited for, each until its instant.
struct Doomed {
    calls: Vec<(u64, Instant)>,
    timer: Pin<Box<Sleep>>,
}

// ===== impl Driver =====

impl Driver {
    pub(super) fn new(
        shared: Arc<Shared>,
        io: Pin<Box<dyn Io>>,
        limits: Limits,
        builder: Builder,
        exited: Option<BoxFuture<()>>,
    ) -> Self {
        let Builder { handler, cancel, taken_back, upholds, .. } = builder;
        Self {
            shared,
            io: Some(io),
            lines: Lines::new(limits.line),
            limits,
            input: BytesMut::new(),
            filled: 0,
            incoming: None,
            unread: false,
            ended: None,
            room: Room::default(),
            out: Out::default(),
            own: VecDeque::new(),
            last_id: 0,
            pending: Pending::default(),
            remembered: Remembered::default(),
            cancel,
            handler,
            taken_back,
            upholds,
            upheld_as_of: 0,
            answering: JoinSet::new(),
            asked: HashMap::new(),
            done: Vec::new(),
            notes: Vec::new(),
            batch: Vec::new(),
            heard: 0,
            silence: Silence::default(),
            exited,
            draining: None,
            leaving: None,
            end: None,
        }
    }

    /// Takes what the callers left: notes, the wish to close, their absence.
    fn intake(&mut self, cx: &mut Context<'_>) {
        let waker = cx.waker().clone();
        let (closing, left, old) = {
            let mut state = self.shared.lock();
            state.heard = self.heard;
            mem::swap(&mut state.notes, &mut self.notes);
            (state.closing, state.handles == 0, state.waker.replace(waker))
        };
        drop(old);
        let mut notes = mem::take(&mut self.notes);
        for note in notes.drain(..) {
            match note {
                Note::Expired(exchange) => self.expired(&exchange),
                Note::Dropped(exchange) => self.dropped(&exchange),
            }
        }
        self.notes = notes;
        if closing {
            self.end.get_or_insert(Cow::Borrowed("the connection was closed by the client"));
        }
        if left && self.leaving.is_none() {
            self.leaving = Some(Box::pin(sleep(LEAVE)));
        }
    }

    /// A call ended at its deadline without an answer: it is remembered, and the peer's silence judged.
    fn expired(&mut self, exchange: &Arc<Exchange>) {
        self.withdraw(exchange);
        let was_written = self.forget(exchange);
        let stalled = !self.out.is_done() || self.out.flushing;
        if exchange.heard() == self.heard && (was_written || stalled) {
            self.suspect();
        }
    }

    /// Nobody holds a call's future any more: it is remembered, and the peer told.
    fn dropped(&mut self, exchange: &Arc<Exchange>) {
        self.withdraw(exchange);
        let unanswered = self.forget(exchange)
            || self.remembered.knows(exchange.id())
            // One that was entered is among those, unless it has been answered.
            || self.out.begun().any(|mark| !mark.entered && Arc::ptr_eq(&mark.exchange, exchange));
        if !unanswered || self.own.len() >= MAX_OWN || self.draining.is_some() {
            return;
        }
        let Some(cancel) = self.cancel.clone() else { return };
        let told = catch_unwind(AssertUnwindSafe(|| cancel(exchange.id(), exchange.request.method())));
        if let Ok(Some(notification)) = told {
            let mut frame = Vec::with_capacity(notification.size());
            notification.write(None, &mut frame);
            self.own.push_back(Own { frame, answers: false });
        }
    }

    /// Withdraws a call that was given up just while the transport was offered its frame and accepted none of it.
    fn withdraw(&self, exchange: &Exchange) {
        if exchange.frame.is_queued() && exchange.frame.withdraw() {
            self.shared.lock().withdrawn += 1;
            exchange.mark_withdrawn();
        }
    }

    /// Remembers a call instead of waiting for its answer; whether it was waited for.
    fn forget(&mut self, exchange: &Arc<Exchange>) -> bool {
        let id = exchange.id();
        if self.pending.get(&id).is_none_or(|pending| !Arc::ptr_eq(pending, exchange)) {
            return false;
        }
        self.pending.remove(&id);
        self.remembered.insert(id, Late::of(exchange));
        true
    }

    // ----- writing

    fn poll_write(&mut self, cx: &mut Context<'_>) -> bool {
        if self.draining.is_some() {
            return false;
        }
        // A flush that is under way is ended before more is written, so that it is one of all that was accepted.
        if self.out.flushing && !self.poll_flush(cx) {
            return self.draining.is_some();
        }
        if !self.out.is_done() {
            let changed = self.has_changed();
            self.take_again(changed);
        }
        let progress = self.offer(cx);
        self.out.put_back(self.limits.exact_writes);
        self.enter_what_was_shown();
        if self.draining.is_none() {
            self.poll_flush(cx);
        }
        progress || self.draining.is_some()
    }

    /// Offers to the transport what there is, as long as it accepts it; whether it has accepted some.
    fn offer(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progress = false;
        for _ in 0..ROUNDS {
            if self.out.is_done() && !self.gather() {
                break;
            }
            let Some(io) = self.io.as_mut() else { return progress };
            let offered = self.out.next(self.limits.exact_writes);
            let error = match io.as_mut().poll_write(cx, offered) {
                Poll::Pending => break,
                Poll::Ready(Ok(0)) => io::ErrorKind::WriteZero.into(),
                Poll::Ready(Ok(accepted)) => {
                    self.out.accepted += accepted.min(offered.len());
                    self.out.unflushed = true;
                    self.written();
                    progress = true;
                    continue;
                }
                Poll::Ready(Err(error)) => error,
            };
            self.write_failed(&error);
            break;
        }
        progress
    }

    /// Has the transport send on what it has accepted, and marks the calls to which that makes a difference;
    /// `false` while it has not.
    fn poll_flush(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(io) = self.io.as_mut().filter(|_| self.out.unflushed) else { return true };
        match io.as_mut().poll_flush(cx) {
            Poll::Pending => {
                self.out.flushing = true;
                return false;
            }
            Poll::Ready(Ok(())) => {}
            Poll::Ready(Err(error)) => {
                self.write_failed(&error);
                return false;
            }
        }
        (self.out.unflushed, self.out.flushing) = (false, false);
        for exchange in self.out.unmarked.drain(..) {
            exchange.set_heard(self.heard);
            exchange.mark_sent();
            if !exchange.answered {
                self.done.push((exchange, Ok(Response::null())));
            }
        }
        true
    }

    fn write_failed(&mut self, error: &io::Error) {
        let text = crate::error::safe_text(error).unwrap_or_default();
        self.drain(Cow::Owned(format!("writing to the peer failed: {text}")));
    }

    fn drain(&mut self, reason: Cow<'static, str>) {
        if self.draining.is_none() {
            self.draining = Some((reason, Drain::begin()));
        }
    }

    /// Fills the empty buffer; whether there is something to write.
    fn gather(&mut self) -> bool {
        self.out.reset();
        while self.out.bytes.len() < BATCH
            && let Some(own) = self.own.pop_front()
        {
            self.out.bytes.extend_from_slice(&own.frame);
        }
        // What is sent to a peer that counts as gone would be in doubt for nothing.
        if self.silence.doomed.is_some() {
            return !self.out.is_done();
        }
        loop {
            let mut room = BATCH.saturating_sub(self.out.bytes.len());
            let mut batch = mem::take(&mut self.batch);
            {
                let mut state = self.shared.lock();
                while let Some(next) = state.queue.front() {
                    let size = next.request.size();
                    let first = batch.is_empty() && self.out.bytes.is_empty();
                    if size > room && !first {
                        break;
                    }
                    room = room.saturating_sub(size);
                    batch.extend(state.queue.pop_front());
                }
            }
            let more = !batch.is_empty();
            for exchange in batch.drain(..) {
                self.take(exchange);
            }
            self.batch = batch;
            if !self.out.bytes.is_empty() || !more {
                return !self.out.is_done();
            }
        }
    }

    fn take(&mut self, exchange: Arc<Exchange>) {
        if !exchange.frame.take() {
            let mut state = self.shared.lock();
            state.withdrawn = state.withdrawn.saturating_sub(1);
            return;
        }
        if let Some(error) = self.forbidden(&exchange) {
            return self.refuse(exchange, error);
        }
        let start = self.out.bytes.len();
        let id = exchange.answered.then(|| self.next_id());
        exchange.set_id(id.unwrap_or(0));
        if let Some(route) = exchange.request.route() {
            route.taken_by(self.shared.number);
        }
        exchange.request.write(id, &mut self.out.bytes);
        let (end, watched) = (self.out.bytes.len(), exchange.is_watched());
        self.out.marks.push_back(Mark { start, end, exchange, watched, entered: false });
    }

    /// Whether what the call was taken for still holds: a tool may have changed while it was queued.
    fn is_upheld(&self, exchange: &Exchange) -> bool {
        let request = &exchange.request;
        match &self.upholds {
            Some(upholds) if request.context().basis() == Basis::TrustedAnnotation => {
                upholds.upholds(request) || off!(Annotation)
            }
            _ => true,
        }
    }

    /// Whether calls may be taken for something else than when that was asked last.
    fn has_changed(&mut self) -> bool {
        let Some(changes) = self.upholds.as_ref().map(|upholds| upholds.changes()) else { return false };
        mem::replace(&mut self.upheld_as_of, changes) != changes
    }

    /// Why it must not be begun with, if it must not.
    fn forbidden(&self, exchange: &Exchange) -> Option<CallError> {
        match self.is_upheld(exchange) {
            true => exchange.overdue(),
            false => Some(CallError::refused(Refusal::EffectChanged)),
        }
    }

    /// Ends a call whose frame was taken and of which not one byte was or will be written.
    fn refuse(&mut self, exchange: Arc<Exchange>, error: CallError) {
        exchange.mark_withdrawn();
        let error = named(error, &exchange.request);
        self.done.push((exchange, Err(error)));
    }

    /// Takes the frames in the buffer again of which the transport has nothing, and those out of it that were withdrawn
    /// meanwhile or must not be begun with any more.
    fn take_again(&mut self, changed: bool) {
        let (mut at, mut gone, mut withdrawn) = (self.out.begun().count(), 0, 0);
        while let Some(mark) = self.out.marks.get(at) {
            // One that was given up just while it was offered goes no more than one that was withdrawn.
            let is_given_up = mark.exchange.is_given_up() && mark.exchange.frame.withdraw();
            if is_given_up {
                mark.exchange.mark_withdrawn();
            }
            let taken = !is_given_up && mark.exchange.frame.take();
            let forbidden = match taken {
                true if changed => self.forbidden(&mark.exchange),
                true => mark.exchange.overdue(),
                false => None,
            };
            if taken && forbidden.is_none() {
                self.out.move_up(at, gone);
                at += 1;
                continue;
            }
            let Some(mark) = self.out.marks.remove(at) else { break };
            gone += mark.end - mark.start;
            let Some(error) = forbidden else {
                withdrawn += usize::from(!is_given_up);
                continue;
            };
            // As its caller would have had it, if its turn had come first.
            if matches!(error.cause(), Cause::Deadline) && mark.exchange.heard() == self.heard {
                self.suspect();
            }
            self.refuse(mark.exchange, error);
        }
        self.out.bytes.truncate(self.out.bytes.len() - gone);
        if withdrawn > 0 {
            let mut state = self.shared.lock();
            state.withdrawn = state.withdrawn.saturating_sub(withdrawn);
        }
    }

    /// Has what is not begun wait in the queue again.
    fn return_to_queue(&mut self) {
        let begun = self.out.begun().count();
        let mut state = self.shared.lock();
        while self.out.marks.len() > begun
            && let Some(mark) = self.out.marks.pop_back()
        {
            self.out.bytes.truncate(mark.start);
            mark.exchange.set_id(0);
            state.queue.push_front(mark.exchange);
        }
    }

    fn next_id(&mut self) -> u64 {
        self.last_id += 1;
        self.last_id
    }

    /// The transport accepted more bytes: enters the calls to which that makes a difference. It may have sent
    /// them, and may have buffered them.
    fn written(&mut self) {
        let accepted = self.out.accepted;
        while let Some(mark) = self.out.marks.front_mut() {
            // Servers answer a message that lacks but its newline.
            let enters = mark.exchange.answered && !mark.entered && accepted + 1 >= mark.end;
            mark.entered |= enters;
            let is_accepted = accepted >= mark.end;
            if enters {
                let exchange = mark.exchange.clone();
                self.enter(exchange);
            }
            if !is_accepted {
                return;
            }
            if let Some(mark) = self.out.marks.pop_front() {
                self.out.unmarked.push(mark.exchange);
            }
        }
    }

    /// The transport may have sent what it was offered, and say later that it has accepted it: an answer to that counts.
    fn enter_what_was_shown(&mut self) {
        let Out { accepted, shown, .. } = self.out;
        if shown <= accepted {
            return;
        }
        for at in 0..self.out.begun().count() {
            let mark = &mut self.out.marks[at];
            if mark.exchange.answered && !mem::replace(&mut mark.entered, true) {
                let exchange = mark.exchange.clone();
                self.enter(exchange);
            }
        }
    }

    fn enter(&mut self, exchange: Arc<Exchange>) {
        if exchange.is_given_up() {
            self.remembered.insert(exchange.id(), Late::of(&exchange));
        } else {
            self.pending.insert(exchange.id(), exchange);
        }
    }

    // ----- reading

    fn poll_read(&mut self, cx: &mut Context<'_>) -> bool {
        if !self.unread && !self.poll_input(cx) {
            return false;
        }
        if self.ended.is_none() {
            self.heard += 1;
            self.silence.probing = None;
            self.silence.doomed = None;
        }
        self.work_off();
        if !self.unread && self.ended.is_some() {
            // What was noticed first says more.
            let noticed = self.draining.take().map(|(reason, _)| reason);
            self.end = noticed.or(self.ended.take());
        }
        true
    }

    /// Fills the input; whether there is something new in it, or it has ended.
    fn poll_input(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(io) = self.io.as_mut() else { return false };
        if self.input.is_empty() && !self.room.keeps(mem::take(&mut self.filled), self.input.capacity()) {
            self.input = BytesMut::new();
        }
        if self.input.capacity() - self.input.len() < READ / 4 {
            self.input.reserve(READ);
        }
        // No more at once, however large the buffer is: a read that fills what it was given says that there may be
        // more, where one that does not has to wait for the next event. So a peer writes on while it is read.
        let input = &mut self.input;
        let mut read = |cx: &mut Context<'_>| poll_read_buf(io.as_mut(), cx, &mut (&mut *input).limit(READ));
        let read = match &mut self.draining {
            None => read(cx),
            Some((_, drain)) => drain.poll_read(cx, read),
        };
        self.ended = match read {
            Poll::Pending => return false,
            Poll::Ready(Ok(0)) => Some(Cow::Borrowed("the peer closed its end")),
            Poll::Ready(Ok(_)) => None,
            Poll::Ready(Err(error)) => {
                let text = crate::error::safe_text(&error).unwrap_or_default();
                Some(Cow::Owned(format!("reading from the peer failed: {text}")))
            }
        };
        self.filled = self.filled.max(self.input.len());
        true
    }

    /// Reads a portion of the messages that are there.
    fn work_off(&mut self) {
        self.unread = true;
        let mut input = mem::take(&mut self.input);
        let mut portion = Batch::PORTION;
        while portion > 0 {
            if let Some(mut batch) = self.incoming.take() {
                if !batch.read(&mut portion, |incoming| self.take_in(incoming)) {
                    self.incoming = Some(batch);
                }
                continue;
            }
            let piece = match &self.ended {
                None => self.lines.decode(&mut input),
                Some(_) => self.lines.decode_eof(&mut input),
            };
            // The framing has no errors of its own.
            let Ok(Some(piece)) = piece else {
                self.unread = false;
                break;
            };
            portion -= 1;
            self.read(piece);
        }
        self.input = input;
    }

    fn take_in(&mut self, incoming: Result<Incoming<'_>, Odd>) {
        match incoming {
            Ok(Incoming::Answer { id, answer }) => self.answer(id, answer),
            Ok(Incoming::Request { id, method, params }) => self.request(id, method, params),
            Ok(Incoming::Notification { method, params }) => {
                self.notification(Notification::new(method, params.map(RawValue::to_owned)));
            }
            Err(odd) => self.ignore_odd(odd),
        }
    }

    fn read(&mut self, piece: Piece) {
        match piece {
            Piece::Line(line) if Batch::is_one(&line) => match Batch::new(line) {
                Ok(batch) => self.incoming = Some(batch),
                Err(odd) => self.ignore_odd(odd),
            },
            Piece::Line(line) => self.take_in(Incoming::of_line(&line)),
            Piece::TooLong => self.ignore(&"a line above the limit"),
            Piece::TooLongAnswer(id) => {
                let said = self.lines.said();
                if let Some(exchange) = self.pending.remove(&id) {
                    let _ = exchange.said.set(said);
                    let cause = Cause::AnswerTooLarge { limit: self.limits.line };
                    let error = CallError::new(cause, Scope::Call, Some(Delivery::Answered));
                    let error = named(error, &exchange.request);
                    self.done.push((exchange, Err(error)));
                } else if let Some(late) = self.remembered.remove(id) {
                    late.report_as(said);
                } else {
                    self.ignore(&"a line above the limit, an answer to no call");
                }
            }
        }
    }

    fn answer(&mut self, id: u64, answer: Result<Response, ServerError>) {
        if let Some(exchange) = self.pending.remove(&id) {
            let outcome = answer.map_err(|error| named(CallError::server(error), &exchange.request));
            self.done.push((exchange, outcome));
        } else if let Some(late) = self.remembered.remove(id) {
            if answer.is_ok() {
                late.emit();
            }
        } else if self.silence.id == Some(id) {
            self.silence.id = None;
        } else {
            self.ignore(&"an answer to no call");
        }
    }

    fn notification(&mut self, notification: Notification) {
        if let Some(id) = self.taken_back.and_then(|id| id(&notification)) {
            // Nobody waits for the answer, and its place is another's.
            self.asked.retain(|_, asked| {
                let is_wanted = asked.id != id;
                if !is_wanted {
                    asked.handling.abort();
                }
                is_wanted
            });
        }
        if let Some(handler) = &self.handler
            && !handler.notification(notification)
        {
            tracing::warn!(target: "goaround", "the handler of a notification panicked");
        }
    }

    fn request(&mut self, id: &str, method: String, params: Option<&RawValue>) {
        if self.asked.len() + self.own.len() >= MAX_OWN {
            return self.ignore(&"a request of a peer that does not read its answers");
        }
        let Some(handler) = &self.handler else {
            return self.respond(id, &Err(not_found()));
        };
        if self.asked.len() >= MAX_ASKED {
            return self.respond(id, &Err(internal("too many requests at once")));
        }
        let request = ServerRequest::new(method, params.map(RawValue::to_owned), id);
        let handling = self.answering.spawn(handler.clone().request(request));
        self.asked.insert(handling.id(), Asked { id: id.into(), handling });
    }

    fn respond(&mut self, id: &str, answer: &Result<Response, ServerError>) {
        let mut frame = Vec::new();
        write_answer(id, answer, &mut frame);
        self.own.push_back(Own { frame, answers: true });
    }

    fn poll_answering(&mut self, cx: &mut Context<'_>) -> bool {
        let mut progress = false;
        while let Poll::Ready(Some(ended)) = self.answering.poll_join_next_with_id(cx) {
            let (task, answer) = match ended {
                Ok((task, answer)) => (task, answer),
                Err(panic) => (panic.id(), Err(internal("the request's handler failed"))),
            };
            if let Some(asked) = self.asked.remove(&task) {
                self.respond(&asked.id, &answer);
            }
            progress = true;
        }
        progress
    }

    /// The same of a message that is odd in itself. Of the first one that is no JSON-RPC more is said: whoever writes
    /// to the output of a server that speaks over it must learn of it.
    fn ignore_odd(&self, odd: Odd) {
        if odd != Odd::ForeignId && self.shared.unread.fetch_add(1, Ordering::Relaxed) == 0 {
            tracing::warn!(
                target: "goaround",
                "what the peer writes is not all JSON-RPC, and the rest is ignored: a server's standard output must \
                 carry nothing else"
            );
        }
        self.ignore(&odd);
    }

    /// Counts a message that is of no use. What it holds is the peer's and in no log.
    fn ignore(&self, what: &dyn fmt::Debug) {
        let count = self.shared.ignored.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(in_all) = &self.shared.ignored_in_all {
            in_all.fetch_add(1, Ordering::Relaxed);
        }
        tracing::debug!(target: "goaround", ?what, count, "a message of the peer was ignored");
    }

    /// Lets the calls that have ended know it.
    fn settle(&mut self) {
        let Ok(ended @ 1..) = isize::try_from(self.done.len()) else { return };
        // Their places are free before they can know it.
        self.shared.lock().in_flight -= ended;
        let mut given_up = 0;
        for (exchange, outcome) in self.done.drain(..) {
            let Err(outcome) = exchange.complete(outcome) else { continue };
            given_up += 1;
            Late::not_taken(&exchange, &outcome);
        }
        if given_up > 0 {
            self.shared.lock().in_flight += given_up;
        }
    }

    // ----- silence

    /// Nothing was heard since a call was sent whose deadline has passed: one probe decides.
    fn suspect(&mut self) {
        if self.silence.probing.is_some() || self.silence.doomed.is_some() || self.draining.is_some() {
            return;
        }
        let Some((probe, timeout)) = self.shared.probe() else { return };
        let id = self.next_id();
        let mut frame = Vec::with_capacity(probe.size());
        probe.write(Some(id), &mut frame);
        self.own.push_back(Own { frame, answers: false });
        self.silence.id = Some(id);
        self.silence.probing = Some(Box::pin(sleep(timeout)));
    }

    /// The probe failed: calls that are still pending may use up their time.
    fn doom(&mut self) {
        self.return_to_queue();
        let now = Instant::now();
        let patience = now + PATIENCE;
        let written = self.pending.values();
        let begun = self.out.marks.iter().filter(|mark| !mark.entered).map(|mark| &mark.exchange);
        let calls: Vec<_> = written
            .chain(begun)
            .filter(|exchange| exchange.answered && !exchange.is_given_up())
            // A stream that waits for ever is no reason to wait.
            .filter(|exchange| exchange.request.method() != LISTEN)
            .map(|exchange| (exchange.id(), exchange.request.context().until().instant().unwrap_or(patience)))
            .collect();
        self.silence.doomed = Some(Doomed { calls, timer: Box::pin(sleep_until(now)) });
    }

    fn poll_silence(&mut self, cx: &mut Context<'_>) {
        if let Some(timer) = &mut self.silence.probing
            && timer.as_mut().poll(cx).is_ready()
        {
            self.silence.probing = None;
            self.doom();
        }
        let Some(doomed) = &mut self.silence.doomed else { return };
        let now = Instant::now();
        let (pending, marks) = (&self.pending, &self.out.marks);
        doomed.calls.retain(|(id, until)| {
            // What is cut, and given up, ends nothing later; nor does what has been answered before it was accepted.
            let is_cut =
                |mark: &Mark| !mark.entered && mark.exchange.id() == *id && !mark.exchange.is_given_up();
            *until > now && (pending.contains_key(id) || marks.iter().any(is_cut))
        });
        let Some(last) = doomed.calls.iter().map(|(_, until)| *until).max() else {
            self.end.get_or_insert(Cow::Borrowed("the peer is silent and did not answer a probe"));
            return;
        };
        if doomed.timer.deadline() != last {
            doomed.timer.as_mut().reset(last);
        }
        if doomed.timer.as_mut().poll(cx).is_ready() {
            cx.waker().wake_by_ref();
        }
    }

    // ----- the end

    /// Whether the process was seen to have exited: what is in its pipe is to be read.
    fn poll_exit(&mut self, cx: &mut Context<'_>) -> bool {
        let Some(exited) = &mut self.exited else { return false };
        if exited.as_mut().poll(cx).is_pending() {
            return false;
        }
        self.exited = None;
        self.drain(Cow::Borrowed("the peer's process exited"));
        true
    }

    fn poll_timers(&mut self, cx: &mut Context<'_>) {
        if let Some(timer) = &mut self.leaving {
            let is_over = timer.as_mut().poll(cx).is_ready();
            if is_over || (self.out.is_done() && self.own.is_empty() && !self.out.unflushed) {
                self.end.get_or_insert(Cow::Borrowed("the last handle of the connection was dropped"));
            }
        }
        self.poll_silence(cx);
    }

    /// Ends the connection, and every call with what is known of its bytes.
    fn finish(&mut self, reason: Cow<'static, str>, cx: Option<&mut Context<'_>>) {
        let Some(mut io) = self.io.take() else { return };
        self.settle();
        let (closure, queue, notes) = {
            let mut state = self.shared.lock();
            let buffered = self.out.marks.iter().filter(|mark| !mark.entered).map(|mark| &mark.exchange);
            let buffered = buffered.filter(|exchange| !exchange.frame.is_withdrawn());
            let told = self.out.unmarked.iter().filter(|exchange| !exchange.answered);
            let queued = state.queue.iter().filter(|exchange| exchange.frame.is_queued());
            let taken = self.pending.values().chain(buffered).chain(told);
            let in_flight = taken.chain(queued).filter(|exchange| !exchange.own).count();
            let closure = self.shared.new_closure(reason, in_flight);
            state.closure = Some(closure.clone());
            (closure, mem::take(&mut state.queue), mem::take(&mut state.notes))
        };
        drop(notes);
        // Politely where that takes no time. From here on not one byte is written. A transport that panics must not cost
        // its calls what is known of them, nor others the closure.
        let shut = catch_unwind(AssertUnwindSafe(|| cx.map(|cx| io.as_mut().poll_shutdown(cx)).is_some()));
        let dropped = catch_unwind(AssertUnwindSafe(|| drop(io)));
        if shut.is_err() || dropped.is_err() {
            tracing::warn!(target: "goaround", "a transport panicked when it was closed");
        }
        self.shared.publish(closure.clone());

        for exchange in queue {
            if exchange.frame.withdraw() {
                exchange.mark_withdrawn();
                end(&exchange, not_sent(&exchange, &closure));
            }
        }
        let (accepted, shown) = (self.out.accepted, self.out.shown);
        for Mark { start, end: frame_end, exchange, entered, .. } in mem::take(&mut self.out.marks) {
            if start >= shown {
                // It was taken if foreign code panicked before it was offered.
                exchange.frame.put_back();
                if exchange.frame.withdraw() {
                    exchange.mark_withdrawn();
                    end(&exchange, not_sent(&exchange, &closure));
                }
            } else if shown > accepted || accepted + 1 >= frame_end {
                // The transport may hold a copy of what it was offered: OpenSSL does, and writes it out later, even
                // where it says `Pending`. An entered call is pending too, and ends there.
                if !entered {
                    end(&exchange, ambiguous(&exchange, &closure));
                }
            } else {
                end(&exchange, named(CallError::of_evidence(Evidence::FrameCut), &exchange.request));
            }
        }
        // Calls are pending too.
        for exchange in mem::take(&mut self.out.unmarked).iter().filter(|exchange| !exchange.answered) {
            end(exchange, ambiguous(exchange, &closure));
        }
        for (_, exchange) in mem::take(&mut self.pending) {
            end(&exchange, ambiguous(&exchange, &closure));
        }
        self.answering.abort_all();
        self.count_dropped_answers();
    }

    /// What was not answered is answered nowhere else: the peer that asked is gone.
    fn count_dropped_answers(&self) {
        let unwritten = self.own.iter().filter(|own| own.answers).count();
        let dropped = (self.asked.len() + unwritten) as u64;
        self.shared.dropped_answers.fetch_add(dropped, Ordering::Relaxed);
        if let Some(in_all) = &self.shared.dropped_in_all {
            in_all.fetch_add(dropped, Ordering::Relaxed);
        }
    }
}

fn end(exchange: &Exchange, error: CallError) {
    // Whoever gave the call up has been told what was known then.
    drop(exchange.complete(Err(error)));
}

fn not_sent(exchange: &Exchange, closure: &Closure) -> CallError {
    let error = CallError::of_closure(closure.clone(), Delivery::NotSent);
    named(error, &exchange.request).with_request(exchange.request.for_attempt())
}

fn ambiguous(exchange: &Exchange, closure: &Closure) -> CallError {
    named(CallError::of_closure(closure.clone(), Delivery::Ambiguous), &exchange.request)
}

impl Future for Driver {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = self.get_mut();
        if this.io.is_none() {
            return Poll::Ready(());
        }
        this.intake(cx);
        for _ in 0..ROUNDS {
            let mut progress = false;
            if this.end.is_none() {
                progress |= this.poll_write(cx);
                this.settle();
                progress |= this.poll_read(cx);
                this.settle();
                progress |= this.poll_answering(cx);
                progress |= this.poll_exit(cx);
                this.poll_timers(cx);
            }
            if let Some(reason) = this.end.take() {
                this.finish(reason, Some(cx));
                return Poll::Ready(());
            }
            if !progress {
                return Poll::Pending;
            }
            if this.unread {
                break;
            }
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    }
}

impl Drop for Driver {
    fn drop(&mut self) {
        // The runtime is shut down, or foreign code panicked.
        self.finish(Cow::Borrowed("the connection's task was dropped"), None);
    }
}

// ===== impl Out =====

impl Out {
    fn is_done(&self) -> bool {
        self.accepted >= self.bytes.len()
    }

    /// The calls in it of which the transport may have bytes, which are the first ones.
    fn begun(&self) -> impl Iterator<Item = &Mark> {
        self.marks.iter().take_while(|mark| mark.start < self.shown)
    }

    /// What the transport is to be offered next, and may have from here on. Where it may keep a copy of what it does
    /// not accept, nothing for which somebody answers lies behind something else in that. What it was offered before
    /// it is offered as it was, as some insist on.
    fn next(&mut self, exact: bool) -> &[u8] {
        if exact {
            self.shown = self.bytes.len();
        } else if self.shown <= self.accepted {
            let apart = self.marks.iter().find(|mark| mark.watched && mark.start > self.accepted);
            self.shown = apart.map_or(self.bytes.len(), |mark| mark.start);
        }
        &self.bytes[self.accepted..self.shown]
    }

    /// Lets the callers have the frames again of which the transport has nothing.
    fn put_back(&mut self, exact: bool) {
        if exact {
            self.shown = self.accepted;
        }
        for mark in self.marks.iter().rev().take_while(|mark| mark.start >= self.shown) {
            mark.exchange.frame.put_back();
        }
    }

    /// Moves a frame to the front by so many bytes, which belong to nobody any more.
    fn move_up(&mut self, at: usize, by: usize) {
        let Some(mark) = self.marks.get_mut(at).filter(|_| by > 0) else { return };
        self.bytes.copy_within(mark.start..mark.end, mark.start - by);
        (mark.start, mark.end) = (mark.start - by, mark.end - by);
    }

    fn reset(&mut self) {
        (self.accepted, self.shown) = (0, 0);
        if !self.room.keeps(self.bytes.len(), self.bytes.capacity()) {
            self.bytes = Vec::new();
        }
        self.bytes.clear();
    }
}

// ===== impl Room =====

impl Room {
    /// A buffer of that capacity is empty, again after it held so much, or still.
    fn keeps(&mut self, held: usize, capacity: usize) -> bool {
        self.largest = self.largest.max(held);
        self.fillings += u32::from(held > 0);
        if self.fillings >= LATELY {
            (self.before, self.largest, self.fillings) = (self.largest, 0, 0);
        }
        // Buffers grow by doubling, and what is read may begin in the middle of one.
        capacity <= KEEP || capacity / 4 <= self.before.max(self.largest)
    }
}

// ===== impl Remembered =====

/// Calls that were given up, by id; the oldest are forgotten.
#[derive(Default)]
pub(crate) struct Remembered {
    calls: HashMap<u64, Late, BuildHasherDefault<OwnIds>>,
    order: VecDeque<u64>,
}

impl Remembered {
    pub(crate) fn insert(&mut self, id: u64, late: Late) {
        self.calls.insert(id, late);
        self.order.push_back(id);
        if self.order.len() > MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.calls.remove(&oldest);
        }
    }

    fn knows(&self, id: u64) -> bool {
        self.calls.contains_key(&id)
    }

    pub(crate) fn remove(&mut self, id: u64) -> Option<Late> {
        self.calls.remove(&id)
    }
}

/// What is kept of a call that was given up, for the case that it succeeds all the same.
pub(crate) struct Late {
    call: Option<CallId>,
    method: Cow<'static, str>,
    activity: Option<Arc<Activity>>,
    events: Events,
}

impl Late {
    pub(super) fn of(exchange: &Exchange) -> Self {
        Self::of_call(&exchange.request)
    }

    pub(crate) fn of_call(request: &impl Call) -> Self {
        let context = request.context();
        Self {
            call: context.id(),
            method: request.name(),
            activity: context.activity().cloned(),
            events: context.events.share(),
        }
    }

    /// Reports the success.
    pub(crate) fn emit(self) {
        self.report(false);
    }

    /// Reports an answer as far as it is known what it is.
    pub(crate) fn report_as(self, said: Said) {
        match said {
            Said::Result => self.emit(),
            Said::Error => {}
            Said::Unknown => self.report(true),
        }
    }

    /// Reports the outcome of a call that nobody took, if it is a success, or may be one.
    pub(super) fn not_taken(exchange: &Exchange, outcome: &Outcome) {
        match (outcome, exchange.said.get()) {
            (Ok(_), _) if exchange.answered => Self::of(exchange).emit(),
            (Err(_), Some(said)) => Self::of(exchange).report_as(*said),
            _ => {}
        }
    }

    /// Whoever listens is foreign code: its panic must not cost other calls their answers.
    fn report(self, may_be_error: bool) {
        let late = LateAnswer {
            call: self.call,
            method: self.method.into_owned(),
            violated: self.activity.and_then(|activity| activity.replaced_by_fence()),
            may_be_error,
        };
        let events = self.events;
        let emitted = catch_unwind(AssertUnwindSafe(|| events.emit(Event::LateAnswer(&late))));
        if emitted.is_err() {
            tracing::warn!(target: "goaround", "a listener for events panicked");
        }
    }
}

/// Spreads ids that we count ourselves: nobody else can choose them.
#[derive(Default)]
struct OwnIds(u64);

impl Hasher for OwnIds {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, id: u64) {
        self.0 = (self.0 ^ id).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_buffer_stays_as_long_as_large_messages_come_and_goes_soon_after() {
        const LARGE: usize = 2 << 20;
        let mut room = Room::default();
        for _ in 0..1_000 {
            assert!(room.keeps(LARGE, 2 * LARGE));
        }
        let stays = (0..1_000).take_while(|_| room.keeps(100, 2 * LARGE)).count();
        assert!((LATELY as usize..2 * LATELY as usize).contains(&stays), "{stays}");
        // Now and then is often enough; one that is much too large goes at once; a small one stays.
        let mut room = Room::default();
        assert!((0..10 * LATELY).all(|n| room.keeps(if n % LATELY == 0 { LARGE } else { 100 }, 2 * LARGE)));
        assert!(!room.keeps(LARGE, 8 * LARGE));
        // It is looked at far more often than it is filled.
        let mut room = Room::default();
        assert!(room.keeps(LARGE, 2 * LARGE));
        assert!((0..10 * LATELY).all(|_| room.keeps(0, 2 * LARGE)) && room.keeps(100, 2 * LARGE));
        assert!((0..1_000).all(|_| Room::default().keeps(0, KEEP)));
    }
}
