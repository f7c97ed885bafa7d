//! Tools that go on after their call was answered: the protocol's tasks.
//!
//! A `tools/call` may be answered with a task instead of a result. The tool then works on by itself, and what
//! came of it is *read*: [`run`] sends the call and, if it became a task, asks for its status (`tasks/get`) at
//! the server's pace, and for its result (`tasks/result`, where the status does not bring it along).
//!
//! ```no_run
//! # async fn render() -> Result<(), goaround::BoxError> {
//! use std::time::Duration;
//! use goaround::{Call, Stack, jsonrpc::Request, mcp::{self, tasks}};
//! use serde_json::json;
//!
//! // 2026-07-28: the server decides, and only for clients that say that they know tasks.
//! let server = mcp::stdio(tokio::process::Command::new("render-server"))
//!     .capabilities(json!({ "extensions": { tasks::EXTENSION: {} } }));
//! let stack = Stack::builder(server).build()?;
//!
//! // 2025-11-25: the call asks for it, here to be kept for an hour.
//! let call = Request::tool("render", json!({ "scene": 7 }));
//! let call = tasks::asked(call, Duration::from_secs(3600))?.within(Duration::from_secs(600));
//! match tasks::run(&stack, call).await {
//!     Ok(result) => println!("{}", result.raw()),
//!     Err(error) => match tasks::Unfinished::of(&error) {
//!         // Nothing is lost: to be kept, and to be gone on with by `tasks::resume`.
//!         Some(unfinished) if unfinished.goes_on() => println!("{}", unfinished.task().id()),
//!         _ => return Err(error.into()),
//!     },
//! }
//! # Ok(())
//! # }
//! ```
//!
//! # What happens to a write
//!
//! The call itself is what the stack takes it for, a write unless somebody says otherwise. Once the task's id is
//! known, all that follows is read-only: a connection that is lost is made anew and the task is asked for again,
//! and the tool is never called a second time.
//!
//! | what happens | what the caller gets |
//! |---|---|
//! | the connection is lost before the id is known | what every write gets: the effect check, else [`Outcome::Unknown`](crate::Outcome::Unknown) |
//! | it is lost afterwards | nothing: the task is read over the next connection |
//! | the tool fails, or says `isError` | that answer |
//! | the deadline passes, or the task cannot be read for long | unknown; the task [goes on](Unfinished::goes_on), and the error [has](Unfinished::of) its id |
//! | over another connection the server has another task by that id, or one that cannot be told from another | unknown ([`Reason::Replaced`]): the tool may have done its work |
//! | the server has no such task: it was started again and keeps none, or the task's time is over | unknown ([`Reason::Forgotten`]): the tool may have done its work |
//! | somebody cancels the task | unknown ([`Reason::Cancelled`]): the tool may have done a part of it |
//! | the task wants something of the user | [`Reason::InputRequired`] |
//!
//! A write that is unknown at the end of a wait is reported as an [`Event::InDoubt`] too, and one whose [`run`]
//! is dropped once there is a task as [`Event::Abandoned`]. For a tool that is read-only by the caller's rules
//! the outcome is [`NoAnswer`](crate::Outcome::NoAnswer) in place of unknown.
//!
//! # Deadline
//!
//! One deadline covers all of it: that of the request, or else the stack's default, counted from the call. Give a
//! long task a long one ([`Call::within`]). The status is asked for at the interval that the server wishes, within
//! 100 ms and 60 s, and by default each second; a wait that would outlast the deadline is shortened for one last
//! look. A status that cannot be read (the stack has retried it by then) is asked for again at growing
//! intervals, at most 5 times in a row.
//!
//! # Which task it is
//!
//! An id is unique among the tasks that a server has. One that was started again may give it to another call's task, so
//! that over another connection a task is known by its id and by when it was created (`createdAt`, which every status
//! has). One that the server keeps over its end is gone on with. One that was created at another time is another one:
//! its result is nobody's here, and it is not cancelled. Where a server leaves the time out, the id is enough over the
//! connection where the task was seen; over another one it cannot be told from another's, and counts as that. Two that
//! were created at the same time, as exactly as the server says it, are one.
//!
//! Whoever keeps a task's id beyond this process keeps [`Task::created_at`] with it.
//!
//! To know the id before the wait, so that it survives this process too, use [`start`] and [`resume`].

use std::{borrow::Cow, collections::BTreeMap, fmt, future::Future, sync::Arc, time::Duration};

use serde::{Deserialize, de::IgnoredAny};
use serde_json::{Value, json, value::RawValue};
use tokio::time::{Instant, sleep};
use tower::Service;

use super::rules::strength;
use crate::{
    Basis, BoxError, Call, CallContext, CallError, CallId, Cause, Deadline, Delivery, Effect, Evidence,
    Refusal, ServerError, Stack,
    event::{CallReport, DoubtReport, Event},
    jsonrpc::{Request, Response, Route},
};

/// The name of the extension of 2026-07-28, for the client's
/// [`capabilities`](super::Stdio::capabilities): `{ "extensions": { EXTENSION: {} } }`. A server makes tasks for
/// nobody else.
pub const EXTENSION: &str = "io.modelcontextprotocol/tasks";

const GET: &str = "tasks/get";
const RESULT: &str = "tasks/result";
const CANCEL: &str = "tasks/cancel";

/// How often a status is asked for where the server does not say.
const INTERVAL: Duration = Duration::from_secs(1);
/// Within what the server's wish is honoured.
const MIN_INTERVAL: Duration = Duration::from_millis(100);
const MAX_INTERVAL: Duration = Duration::from_secs(60);
/// How many reads in a row may fail.
const MAX_FAILURES: u32 = 5;
/// How long a text may be that says when a task was created.
const MAX_CREATED: usize = 128;
/// How long before the deadline the last look is.
const LAST_LOOK: Duration = Duration::from_secs(1);

const METHOD_NOT_FOUND: i64 = -32601;
const INVALID_PARAMS: i64 = -32602;

/// How far a task is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Status {
    /// The tool works.
    Working,
    /// The tool waits for something that the user is to say.
    InputRequired,
    /// The tool has ended.
    Completed,
    /// The tool has failed, or could not be called.
    Failed,
    /// The task was cancelled. What the tool had done by then is done.
    Cancelled,
}

impl Status {
    fn parse(text: &str) -> Option<Self> {
        Some(match text {
            "working" => Status::Working,
            "input_required" => Status::InputRequired,
            "completed" => Status::Completed,
            "failed" => Status::Failed,
            "cancelled" => Status::Cancelled,
            _ => return None,
        })
    }

    /// Whether the task has ended, whichever way.
    pub const fn is_terminal(self) -> bool {
        matches!(self, Status::Completed | Status::Failed | Status::Cancelled)
    }
}

/// A task of the server, as it was when the server last said.
///
/// Its id is not in the text of any error or event: on many servers whoever knows it may read the result.
#[derive(Clone)]
pub struct Task {
    id: String,
    /// When the server says that it was created, in its own words.
    created: Option<String>,
    /// Whether it has been seen, and over which connection it was last.
    seen: bool,
    over: Option<u64>,
    status: Status,
    interval: Option<Duration>,
    /// What the call that became it was taken for.
    effect: Effect,
    basis: Basis,
    call: CallId,
}

impl Task {
    /// The task with that id, which somebody kept. It is taken for a write's.
    ///
    /// Without the time of its [creation](Self::created) it is the one that the server has by that id when it is first
    /// asked: that may be another one if the server was started again meanwhile.
    pub fn new(id: impl Into<String>) -> Self {
        let call = CallContext::new().assign_id();
        Self::of_call(id.into(), Effect::Write, Basis::Default, call)
    }

    fn of_call(id: String, effect: Effect, basis: Basis, call: CallId) -> Self {
        let (status, interval) = (Status::Working, None);
        Self { id, created: None, seen: false, over: None, status, interval, effect, basis, call }
    }

    /// Says when the task was created, as [`created_at`](Self::created_at) said it of the task whose id was kept: one
    /// of that id that was created at another time is another task.
    #[must_use]
    pub fn created(mut self, at: impl Into<String>) -> Self {
        self.created = Some(at.into());
        self
    }

    /// The id that the server gave it.
    pub fn id(&self) -> &str {
        &self.id
    }

    /// When it was created, in the words of the server, if it has said so.
    pub fn created_at(&self) -> Option<&str> {
        self.created.as_deref()
    }

    /// How far it was.
    pub fn status(&self) -> Status {
        self.status
    }

    /// How often the server wishes to be asked for it, if it has said.
    pub fn poll_interval(&self) -> Option<Duration> {
        self.interval
    }

    /// What the call that became this task may do.
    pub fn effect(&self) -> Effect {
        self.effect
    }

    /// What the server now says of it, over that connection, if that is a status of this task.
    fn see(&mut self, seen: &Seen, over: Option<u64>) -> Result<(), Unseen> {
        let status = seen.status.as_deref().and_then(Status::parse).ok_or(Unseen::Malformed)?;
        if !self.is_it(seen, over) {
            return Err(Unseen::Replaced);
        }
        self.meet(seen, over);
        self.interval = seen.interval().or(self.interval);
        self.status = status;
        Ok(())
    }

    /// Whether what the server speaks of is this task, and not another one that has its id by now.
    fn is_it(&self, seen: &Seen, over: Option<u64>) -> bool {
        match (self.created_at(), seen.created()) {
            (Some(known), Some(now)) => is_same_time(known, now),
            // Nothing is known of it but the id that somebody kept.
            (None, _) if !self.seen => true,
            // One process has one task by an id.
            _ => over.is_some() && over == self.over,
        }
    }

    fn meet(&mut self, seen: &Seen, over: Option<u64>) {
        self.created = self.created.take().or_else(|| seen.created().map(str::to_owned));
        (self.seen, self.over) = (true, over);
    }

    /// Whether it has to be looked for before anything is done about it, since its id may be another's.
    fn is_only_heard_of(&self) -> bool {
        !self.seen && self.created.is_some()
    }

    /// Over the connection alone where the task was last seen: on another one the id may be another task's.
    fn there(&self) -> Arc<Route> {
        Route::only(self.over)
    }

    fn wait(&self) -> Duration {
        self.interval.unwrap_or(INTERVAL).clamp(MIN_INTERVAL, MAX_INTERVAL)
    }

    /// Calls the server about this task; what it says, and over which connection. Its words if it refuses do not name
    /// the task.
    async fn ask(
        &self,
        stack: &impl Client,
        method: &'static str,
        route: Arc<Route>,
        deadline: Deadline,
    ) -> Result<(Response, Option<u64>), CallError> {
        let mut request = self.request(method, deadline)?;
        request.set_route(Arc::clone(&route));
        match stack.send(request).await {
            Ok(response) => Ok((response, route.connection())),
            Err(error) => Err(error.reword(|error| self.hide(error))),
        }
    }

    /// Takes this task's id out of the words of the server.
    fn hide(&self, error: &mut ServerError) {
        let quoted = Value::from(self.id()).to_string();
        let quoted = quoted.trim_matches('"');
        for id in [self.id(), quoted] {
            if !id.is_empty() && error.message.contains(id) {
                error.message = error.message.replace(id, "..");
            }
        }
    }

    /// A call about this task.
    fn request(&self, method: &'static str, deadline: Deadline) -> Result<Request, CallError> {
        let request = Request::new(method, json!({ "taskId": self.id })).map_err(CallError::not_sent)?;
        let mut request = request.deadline(deadline);
        // As the protocol says, also on a stack that has no rules for it.
        if let Some(effect) = super::effect(method) {
            request.context_mut().stamp(effect, Basis::Protocol);
        }
        Ok(request)
    }
}

impl fmt::Debug for Task {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Task")
            .field("status", &self.status)
            .field("interval", &self.interval)
            .field("effect", &self.effect)
            .finish_non_exhaustive()
    }
}

/// What a call was answered with. See [`start`].
#[derive(Debug)]
#[non_exhaustive]
pub enum Started {
    /// The tool's result, at once.
    Answered(Response),
    /// A task.
    Task(Task),
}

/// Why a task's result is not there: the source of the [`CallError`].
#[derive(Debug, thiserror::Error)]
#[error("{reason}")]
pub struct Unfinished {
    task: Task,
    reason: Reason,
    answer: Option<Response>,
    #[source]
    last: Option<CallError>,
}

/// Why a task's result is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Reason {
    /// The deadline of the wait passed. The task goes on.
    Deadline,
    /// The task waits for the user: see [`Unfinished::answer`].
    ///
    /// On 2026-07-28 the answer says for what, and it is to be given by `tasks/update`; then [`resume`]. On
    /// 2025-11-25 the server asks by itself, by requests to the
    /// [`handler`](super::Stdio::handler), while it is waited for by [`result`].
    InputRequired,
    /// The status or the result could not be read. The task may go on.
    Unread,
    /// The task was cancelled, by whomever. What the tool had done by then is done.
    Cancelled,
    /// The server has no such task: it was started again and keeps none, or the task's time to live is over.
    Forgotten,
    /// The server has a task by that id that was created at another time, or, over another connection than the one
    /// where this task was seen, one of which it does not say when: the id is another call's by now, or may be.
    Replaced,
    /// The task has ended, and the server has no result of it, or one that is too large.
    ResultLost,
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Reason::Deadline => "the task goes on at the server",
            Reason::InputRequired => "the task waits for input",
            Reason::Unread => "the task could not be read, and may go on",
            Reason::Cancelled => "the task was cancelled",
            Reason::Forgotten => "the server does not know the task any more",
            Reason::Replaced => "the server may have given the task's id to another one",
            Reason::ResultLost => "the task has ended, and its result cannot be had",
        })
    }
}

impl Unfinished {
    /// What an error of this module says of its task; `None` where there is none, or it has an answer.
    pub fn of(error: &CallError) -> Option<&Self> {
        error.get_ref()
    }

    /// The task, as it was last seen.
    pub fn task(&self) -> &Task {
        &self.task
    }

    /// Why its result is not there.
    pub fn reason(&self) -> Reason {
        self.reason
    }

    /// Whether the task may still end well, so that [`resume`] makes sense.
    pub fn goes_on(&self) -> bool {
        matches!(self.reason, Reason::Deadline | Reason::InputRequired | Reason::Unread)
    }

    /// The answer to `tasks/get` that says what is [required](Reason::InputRequired).
    pub fn answer(&self) -> Option<&Response> {
        self.answer.as_ref()
    }
}

mod sealed {
    use super::{Basis, CallError, Deadline, Effect, Event, Future, Request, Response};

    pub trait Sealed: Sync {
        fn send(&self, request: Request) -> impl Future<Output = Result<Response, CallError>> + Send;
        fn judge(&self, request: &Request) -> (Effect, Basis);
        fn resolve(&self, deadline: Deadline) -> Deadline;
        fn emit(&self, event: Event<'_>);
    }
}

/// A [`Stack`] whose calls are JSON-RPC: over [`mcp::stdio`](super::stdio()), or over any other connector of such
/// connections.
pub trait Client: sealed::Sealed {}

impl<S: sealed::Sealed> Client for S {}

impl<M> sealed::Sealed for Stack<M, Request, Response>
where
    M: Service<()> + Send + 'static,
    M::Error: Into<BoxError>,
    M::Future: Send + 'static,
    M::Response: Service<Request, Response = Response, Error = CallError> + Clone + Send + 'static,
    <M::Response as Service<Request>>::Future: Send + 'static,
{
    fn send(&self, request: Request) -> impl Future<Output = Result<Response, CallError>> + Send {
        Stack::send(self, request)
    }

    fn judge(&self, request: &Request) -> (Effect, Basis) {
        Stack::judge(self, request)
    }

    fn resolve(&self, deadline: Deadline) -> Deadline {
        Stack::resolve(self, deadline)
    }

    fn emit(&self, event: Event<'_>) {
        self.events().emit(event);
    }
}

/// The call with the wish that it becomes a task (2025-11-25), which the server keeps for `ttl` at most.
///
/// Only for a tool whose `execution.taskSupport` is `optional` or `required`, of a server whose capabilities have
/// `tasks.requests.tools.call`; others refuse it, and nothing is done. On 2026-07-28 the server decides, and this
/// is of no use: see [`EXTENSION`].
///
/// # Errors
///
/// If the parameters are no object.
pub fn asked(mut request: Request, ttl: Duration) -> Result<Request, serde_json::Error> {
    let ttl = u64::try_from(ttl.as_millis()).unwrap_or(u64::MAX);
    let task = serde_json::value::to_raw_value(&json!({ "ttl": ttl }))?;
    let text = request.shared_params();
    // The caller's own text stays as it is.
    let mut params: BTreeMap<Cow<'_, str>, &RawValue> = match &text {
        Some(text) => serde_json::from_str(text.get())?,
        None => BTreeMap::new(),
    };
    params.insert(Cow::Borrowed("task"), &task);
    let params = serde_json::value::to_raw_value(&params)?;
    request.replace_params(Some(params.into()));
    Ok(request)
}

/// Calls a tool and waits for its result, also if the call becomes a task. See the [module](self).
///
/// To drop the future does not end the task; see [`cancel`].
///
/// # Errors
///
/// Those of the call; and, once it is a task, those that [`Unfinished::of`] knows, or the tool's own.
pub fn run(
    stack: &impl Client,
    request: Request,
) -> impl Future<Output = Result<Response, CallError>> + Send {
    let deadline = stack.resolve(request.context().deadline());
    async move {
        match start(stack, request.deadline(deadline)).await? {
            Started::Answered(response) => Ok(response),
            Started::Task(task) => {
                let mut guard = Guard { stack, task: task.effect.is_write().then_some(&task) };
                let ended = wait(stack, task.clone(), deadline, false).await;
                guard.task = None;
                report(stack, &task, ended)
            }
        }
    }
}

/// Calls a tool, and does not wait if the call becomes a task, so that the caller can keep its id first.
/// [`resume`] waits.
///
/// An answer that is said to be a task's and names no id is handed on as it is.
///
/// # Errors
///
/// Those of the call.
pub fn start(
    stack: &impl Client,
    mut request: Request,
) -> impl Future<Output = Result<Started, CallError>> + Send {
    let call = request.context_mut().assign_id();
    let route = Route::any();
    request.set_route(Arc::clone(&route));
    async move {
        // What is known of the tool may change while the call waits to be sent: the stronger word counts.
        let asked = request.clone();
        let before = stack.judge(&asked);
        let response = stack.send(request).await?;
        Ok(match Created::of(&response) {
            None => Started::Answered(response),
            Some((id, seen)) => {
                let after = stack.judge(&asked);
                let (effect, basis) = if strength(after.0) > strength(before.0) { after } else { before };
                let mut task = Task::of_call(id, effect, basis, call);
                task.meet(&seen, route.connection());
                // A task without a status is one.
                let _ = task.see(&seen, route.connection());
                Started::Task(task)
            }
        })
    }
}

/// Waits for the result of a task that there is already: of [`start`], of an [`Unfinished`] wait, or one whose id
/// was kept ([`Task::new`]). [`Deadline::Inherit`] is the stack's default, counted from now.
///
/// # Errors
///
/// As [`run`].
pub fn resume(
    stack: &impl Client,
    task: &Task,
    deadline: Deadline,
) -> impl Future<Output = Result<Response, CallError>> + Send {
    let deadline = stack.resolve(deadline);
    async move {
        let ended = wait(stack, task.clone(), deadline, true).await;
        report(stack, task, ended)
    }
}

/// Waits in `tasks/result`, which is answered when the task has ended. Only 2025-11-25 has it.
///
/// [`run`] and [`resume`] ask for it by themselves once the task has ended; this is for one that
/// [waits for input](Reason::InputRequired), since a server may put its questions to the
/// [`handler`](super::Stdio::handler) only while it is being waited for here.
///
/// # Errors
///
/// As [`run`].
pub fn result(
    stack: &impl Client,
    task: &Task,
    deadline: Deadline,
) -> impl Future<Output = Result<Response, CallError>> + Send {
    let deadline = stack.resolve(deadline);
    async move {
        let ended = match fetch(stack, &mut task.clone(), deadline).await {
            Ok(response) => Ok(response),
            Err(Failed::Ended(ended)) => Err(*ended),
            Err(Failed::Again(error)) => Err(given_up(task.clone(), error)),
        };
        report(stack, task, ended)
    }
}

/// Reads how far a task is.
///
/// # Errors
///
/// Those of the call `tasks/get`; and, with [`Reason::Replaced`], that the server has another task by that id.
pub fn get(
    stack: &impl Client,
    task: &Task,
    deadline: Deadline,
) -> impl Future<Output = Result<Task, CallError>> + Send {
    let mut task = task.clone();
    async move {
        match look(stack, &mut task, deadline).await {
            Ok(_) => Ok(task),
            Err(unseen) => Err(unseen.error(task)),
        }
    }
}

/// Asks the server to cancel a task, and reads how far it is afterwards: a task may have ended before, or go on,
/// if the tool does not heed it. A cancelled task is no proof that nothing was done.
///
/// The call is [`Effect::Idempotent`], and nothing here repeats it. Where the server answers that the task cannot be
/// cancelled, as it must if it has ended (be it by an earlier copy of this call), and where the connection is
/// lost, the task is read: if it has ended, that is the answer, else the call's own error.
///
/// It goes over the connection on which the task was last seen. If that is gone the task is read over the next one
/// first, so that another one that has its id by now is not cancelled in its place.
///
/// # Errors
///
/// Those of the call; and, as not done, that the server has another task by that id ([`Reason::Replaced`]).
pub fn cancel(
    stack: &impl Client,
    task: &Task,
    deadline: Deadline,
) -> impl Future<Output = Result<Task, CallError>> + Send {
    let deadline = stack.resolve(deadline);
    let mut task = task.clone();
    async move {
        let mut looks = 0;
        let mut is_known = !task.is_only_heard_of();
        let error = loop {
            if !std::mem::replace(&mut is_known, true) {
                match look(stack, &mut task, deadline).await {
                    Ok(_) if task.status.is_terminal() => return Ok(task),
                    Ok(_) => {}
                    Err(unseen) => {
                        let error = CallError::not_sent(unseen.source(task));
                        return Err(error.of_call(CANCEL, Effect::Idempotent).with_attempt(None));
                    }
                }
            }
            match task.ask(stack, CANCEL, task.there(), deadline).await {
                Ok((response, over)) => {
                    let unseen = match Seen::of(&response) {
                        Some(seen) => task.see(&seen, over),
                        None => Err(Unseen::Malformed),
                    };
                    return match unseen {
                        Ok(()) => Ok(task),
                        // 2026-07-28: nothing but "understood".
                        Err(Unseen::Malformed) => get(stack, &task, deadline).await,
                        Err(unseen) => Err(unseen.error(task)),
                    };
                }
                Err(error) if is_elsewhere(&error) && !error.may_have_landed() && looks < MAX_FAILURES => {
                    (looks, is_known) = (looks + 1, false);
                }
                Err(error) => break error,
            }
        };
        if code(&error) == Some(INVALID_PARAMS) || error.may_have_landed() {
            match get(stack, &task, deadline).await {
                Ok(task) if task.status.is_terminal() => return Ok(task),
                _ => {}
            }
        }
        Err(error)
    }
}

// ----- the wait

/// How a read of the task went wrong.
enum Failed {
    /// For good.
    Ended(Box<Ended>),
    /// Perhaps not the next time; without an error if the answer made no sense.
    Again(Option<CallError>),
}

/// Why a task's status is not known.
enum Unseen {
    Failed(CallError),
    Malformed,
    Replaced,
}

impl Unseen {
    /// The error of the call that read it.
    fn error(self, task: Task) -> CallError {
        match self {
            Unseen::Failed(error) => error,
            unseen => {
                let error = CallError::answered(unseen.source(task)).of_call(GET, Effect::ReadOnly);
                // Of a call that is over, whoever passes it on out of a call of their own.
                error.with_id(Some(CallContext::new().assign_id())).with_attempt(None)
            }
        }
    }

    fn source(self, task: Task) -> BoxError {
        match self {
            Unseen::Failed(error) => error.into(),
            Unseen::Malformed => Malformed.into(),
            Unseen::Replaced => {
                Unfinished { task, reason: Reason::Replaced, answer: None, last: None }.into()
            }
        }
    }
}

/// How a task ended without a result.
enum Ended {
    Unfinished(Unfinished),
    /// The tool's own error.
    Answered(ServerError),
}

impl Ended {
    fn new(task: Task, reason: Reason, last: Option<CallError>) -> Self {
        Ended::Unfinished(Unfinished { task, reason, answer: None, last })
    }
}

impl Failed {
    fn ended(task: &Task, reason: Reason, last: Option<CallError>) -> Self {
        Failed::Ended(Box::new(Ended::new(task.clone(), reason, last)))
    }

    fn unseen(task: &Task, unseen: Unseen) -> Self {
        match unseen {
            Unseen::Failed(error) => Failed::of(task, error),
            Unseen::Malformed => Failed::Again(None),
            Unseen::Replaced => Failed::ended(task, Reason::Replaced, None),
        }
    }

    /// What follows from the failed read of a task.
    fn of(task: &Task, error: CallError) -> Self {
        let reason = match (error.cause(), code(&error)) {
            // A server that does not even know the method has been replaced by another.
            (_, Some(INVALID_PARAMS | METHOD_NOT_FOUND)) => Reason::Forgotten,
            (Cause::Deadline, _) => Reason::Deadline,
            (
                Cause::Refused(_)
                | Cause::AnswerTooLarge { .. }
                | Cause::Evidence(Evidence::Unauthorized | Evidence::Forbidden),
                _,
            ) => Reason::Unread,
            _ => return Failed::Again(Some(error)),
        };
        Failed::ended(task, reason, Some(error))
    }
}

/// The last of several failed reads.
fn given_up(task: Task, error: Option<CallError>) -> Ended {
    Ended::new(task, Reason::Unread, error)
}

/// Whether the connection is gone over which alone it was to be asked.
fn is_elsewhere(error: &CallError) -> bool {
    matches!(error.cause(), Cause::Refused(Refusal::AnotherConnection))
}

fn code(error: &CallError) -> Option<i64> {
    error.answer().map(|answer| answer.code)
}

async fn wait(
    stack: &impl Client,
    mut task: Task,
    deadline: Deadline,
    at_once: bool,
) -> Result<Response, Ended> {
    let mut pause = (!at_once && !task.status.is_terminal()).then(|| task.wait());
    let mut failures = 0;
    let mut last_look = false;
    loop {
        if let Some(mut pause) = pause
            && let Some(at) = deadline.instant()
        {
            let left = at.saturating_duration_since(Instant::now());
            if last_look || left.is_zero() {
                return Err(Ended::new(task, Reason::Deadline, None));
            }
            if pause >= left {
                pause = left.saturating_sub(LAST_LOOK.min(left / 2));
                last_look = true;
            }
            sleep(pause).await;
        } else if let Some(pause) = pause {
            sleep(pause).await;
        }
        match read(stack, &mut task, deadline).await {
            Ok(Some(response)) => return Ok(response),
            Ok(None) => {
                failures = 0;
                pause = Some(task.wait());
            }
            Err(Failed::Ended(ended)) => return Err(*ended),
            Err(Failed::Again(error)) => {
                failures += 1;
                if failures >= MAX_FAILURES {
                    return Err(given_up(task, error));
                }
                let wished = error.and_then(|error| error.retry_after()).unwrap_or_default();
                pause = Some((task.wait() * (1 << failures)).min(MAX_INTERVAL).max(wished));
            }
        }
    }
}

/// Looks how far the task is, and fetches the result if it is there; `None` if the tool works on.
async fn read(stack: &impl Client, task: &mut Task, deadline: Deadline) -> Result<Option<Response>, Failed> {
    let looked = look(stack, task, deadline).await;
    let (seen, answer) = looked.map_err(|unseen| Failed::unseen(task, unseen))?;
    match task.status {
        Status::Working => Ok(None),
        Status::InputRequired => Err(Failed::Ended(Box::new(Ended::Unfinished(Unfinished {
            task: task.clone(),
            reason: Reason::InputRequired,
            answer: Some(answer),
            last: None,
        })))),
        Status::Cancelled => Err(Failed::ended(task, Reason::Cancelled, None)),
        Status::Completed | Status::Failed => match (seen.result, seen.error) {
            (Some(result), _) => match Response::new(result) {
                Ok(response) => Ok(Some(response)),
                Err(_) => Err(Failed::ended(task, Reason::ResultLost, None)),
            },
            (None, Some(error)) => {
                let mut error = own_error(&error);
                task.hide(&mut error);
                Err(Failed::Ended(Box::new(Ended::Answered(error))))
            }
            (None, None) => fetch(stack, task, deadline).await.map(Some),
        },
    }
}

/// Looks how far the task is.
async fn look(stack: &impl Client, task: &mut Task, deadline: Deadline) -> Result<(Seen, Response), Unseen> {
    let (response, over) = task.ask(stack, GET, Route::any(), deadline).await.map_err(Unseen::Failed)?;
    let seen = Seen::of(&response).ok_or(Unseen::Malformed)?;
    task.see(&seen, over)?;
    Ok((seen, response))
}

/// Asks for the result.
///
/// It is answered with exactly what the call would have been, and that includes an error. Whether one is the
/// tool's own, or says that there is no such task, shows in the status.
///
/// It does not say whose result it is, so that it is asked for only where the task was last seen.
async fn fetch(stack: &impl Client, task: &mut Task, deadline: Deadline) -> Result<Response, Failed> {
    let mut looks = 0;
    let mut is_known = !task.is_only_heard_of();
    let error = loop {
        if !is_known {
            look(stack, task, deadline).await.map_err(|unseen| Failed::unseen(task, unseen))?;
        }
        match task.ask(stack, RESULT, task.there(), deadline).await {
            Ok((response, _)) => return Ok(response),
            Err(error) if is_elsewhere(&error) && looks == MAX_FAILURES => {
                return Err(Failed::Again(Some(error)));
            }
            Err(error) if is_elsewhere(&error) => (looks, is_known) = (looks + 1, false),
            Err(error) => break error,
        }
    };
    let Some(answer) = error.answer() else {
        return Err(match error.cause() {
            Cause::AnswerTooLarge { .. } => Failed::ended(task, Reason::ResultLost, Some(error)),
            _ => Failed::of(task, error),
        });
    };
    if answer.code == METHOD_NOT_FOUND {
        return Err(Failed::ended(task, Reason::ResultLost, Some(error)));
    }
    look(stack, task, deadline).await.map_err(|unseen| Failed::unseen(task, unseen))?;
    Err(match task.status {
        Status::Failed => Failed::Ended(Box::new(Ended::Answered(answer.clone()))),
        Status::Cancelled => Failed::ended(task, Reason::Cancelled, Some(error)),
        Status::Completed => Failed::ended(task, Reason::ResultLost, Some(error)),
        Status::Working | Status::InputRequired => Failed::Again(Some(error)),
    })
}

// ----- what is said of it

/// Makes the call's error of the end of its task, and reports it where a write is unknown.
fn report(stack: &impl Client, task: &Task, ended: Result<Response, Ended>) -> Result<Response, CallError> {
    let ended = match ended {
        Ok(response) => return Ok(response),
        Err(ended) => ended,
    };
    let (error, reason) = match ended {
        Ended::Answered(error) => (CallError::server(error), None),
        Ended::Unfinished(unfinished) => {
            let reason = unfinished.reason;
            let error = match reason {
                Reason::Deadline => {
                    CallError::deadline(Delivery::Ambiguous).caused_by(unfinished).note(reason.to_string())
                }
                _ => CallError::ambiguous(unfinished),
            };
            (error, Some(reason))
        }
    };
    let error = error.with_id(Some(task.call)).of_call("tools/call", task.effect);
    let error = error.judged_by(task.basis).with_attempt(None);
    if let Some(reason) = reason.filter(|reason| *reason != Reason::InputRequired)
        && task.effect.is_write()
    {
        stack.emit(Event::InDoubt(&DoubtReport {
            call: task.call,
            method: error.method().to_owned(),
            effect: task.effect,
            basis: task.basis,
            attempts: error.attempts().to_vec(),
            verdict: None,
            reason: Some(reason.to_string()),
            fence: None,
            replayed: false,
            outcome: Some(error.outcome()),
        }));
    }
    Err(error)
}

/// Reports a write whose caller goes away while its task is waited for.
struct Guard<'a, S: Client> {
    stack: &'a S,
    task: Option<&'a Task>,
}

impl<S: Client> Drop for Guard<'_, S> {
    fn drop(&mut self) {
        let Some(task) = self.task else { return };
        self.stack.emit(Event::Abandoned(&CallReport {
            call: Some(task.call),
            method: "tools/call".to_owned(),
            effect: task.effect,
            basis: task.basis,
            attempts: Vec::new(),
            outcome: Some(crate::Outcome::Unknown),
            notes: vec![Reason::Deadline.to_string()],
        }));
    }
}

// ----- what the server says

#[derive(Debug, thiserror::Error)]
#[error("the server's answer is no task")]
struct Malformed;

/// What an answer says of a task.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Seen {
    status: Option<String>,
    /// A text, if the server means well.
    created_at: Option<Value>,
    /// Numbers, if the server means well.
    poll_interval: Option<Value>,
    poll_interval_ms: Option<Value>,
    /// 2026-07-28: what the call would have been answered with.
    result: Option<Box<RawValue>>,
    error: Option<Box<RawValue>>,
}

impl Seen {
    fn of(response: &Response) -> Option<Self> {
        response.parse().ok()
    }

    fn created(&self) -> Option<&str> {
        self.created_at.as_ref()?.as_str().filter(|at| at.len() <= MAX_CREATED)
    }

    fn interval(&self) -> Option<Duration> {
        let millis = self.poll_interval_ms.as_ref().or(self.poll_interval.as_ref())?.as_f64()?;
        // A negative one is no wish, and a longer one is bounded anyway.
        (millis >= 0.0).then(|| Duration::from_secs_f64((millis / 1e3).min(MAX_INTERVAL.as_secs_f64())))
    }
}

/// Whether two texts name one point in time. Servers write it in different ways: with `Z` or an offset, and cut off to
/// milliseconds where they have stored it.
pub(super) fn is_same_time(one: &str, other: &str) -> bool {
    let (Some((one_seconds, one_rest)), Some((other_seconds, other_rest))) = (instant(one), instant(other))
    else {
        return one == other;
    };
    let (one, other) = (one_rest, other_rest);
    let is_equal = one.trim_end_matches('0') == other.trim_end_matches('0');
    let is_cut_off = |short: &str, long: &str| short.len() >= 3 && long.starts_with(short);
    one_seconds == other_seconds && (is_equal || is_cut_off(one, other) || is_cut_off(other, one))
}

/// The seconds of a time as RFC 3339 has it, from some beginning on, and the digits of their fraction.
fn instant(text: &str) -> Option<(i64, &str)> {
    let number = |text: &str| {
        let digits = text.bytes().all(|byte| byte.is_ascii_digit());
        if digits { text.parse::<i64>().ok() } else { None }
    };
    let (date, rest) = (text.get(..19)?, text.get(19..)?);
    let shape = |(at, byte): (usize, u8)| match at {
        4 | 7 => byte == b'-',
        10 => matches!(byte, b'T' | b't' | b' '),
        13 | 16 => byte == b':',
        _ => byte.is_ascii_digit(),
    };
    if !date.bytes().enumerate().all(shape) {
        return None;
    }
    let (fraction, zone) = match rest.strip_prefix('.') {
        Some(rest) => rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?),
        None => ("", rest),
    };
    let minutes_ahead = match zone.as_bytes() {
        [b'Z' | b'z'] => 0,
        [sign @ (b'+' | b'-'), _, _, b':', _, _] => {
            let minutes = number(zone.get(1..3)?)? * 60 + number(zone.get(4..)?)?;
            if *sign == b'-' { -minutes } else { minutes }
        }
        _ => return None,
    };
    let [year, month, day] = [date.get(..4)?, date.get(5..7)?, date.get(8..10)?].map(number);
    let [hour, minute, second] = [date.get(11..13)?, date.get(14..16)?, date.get(17..)?].map(number);
    // Months are counted from March on, so that the day that comes and goes is the last of a year.
    let (year, month) = match month? {
        month @ 3.. => (year?, month - 3),
        month => (year? - 1, month + 9),
    };
    let days = 365 * year + year.div_euclid(4) - year.div_euclid(100) + year.div_euclid(400);
    let days = days + (153 * month + 2) / 5 + day?;
    Some((((days * 24 + hour?) * 60 + minute? - minutes_ahead) * 60 + second?, fraction))
}

/// What a call is answered with if it becomes a task.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Created {
    /// 2026-07-28.
    result_type: Option<String>,
    task_id: Option<String>,
    /// 2025-11-25.
    task: Option<Box<RawValue>>,
    /// Every result of a tool has it.
    content: Option<IgnoredAny>,
}

impl Created {
    fn of(response: &Response) -> Option<(String, Seen)> {
        let created: Self = response.parse().ok()?;
        match created {
            Created { result_type: Some(kind), task_id: Some(id), .. } if kind == "task" => {
                Some((id, Seen::of(response)?))
            }
            Created { task: Some(task), content: None, .. } => {
                #[derive(Deserialize)]
                #[serde(rename_all = "camelCase")]
                struct Named {
                    task_id: String,
                }
                let Named { task_id } = serde_json::from_str(task.get()).ok()?;
                Some((task_id, serde_json::from_str(task.get()).ok()?))
            }
            _ => None,
        }
    }
}

/// The tool's error, in a status.
fn own_error(json: &RawValue) -> ServerError {
    // One that is not as it should be is an error all the same.
    serde_json::from_str(json.get()).unwrap_or_else(|_| ServerError::new(0, ""))
}
