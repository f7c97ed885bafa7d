//! Ready-made effect checks: they read back what a tool was to write.
//!
//! [`read_back`] calls a read-only tool, or reads a resource, with arguments taken from the write, and compares
//! what it finds with values of the write. All of that is said by JSON pointers ([RFC 6901]): those of the write
//! begin at the tool's `arguments`, those of what was read at the result (or at its [text](Reading::text)). A
//! pointer is empty or begins with `/`: [`build`](crate::StackBuilder::build) refuses any other, and so does a layer
//! put together by hand with each write.
//!
//! ```
//! use goaround::{WriteSafetyLayer, mcp::checks};
//! use serde_json::json;
//!
//! let check = checks::read_back("create_invoice")
//!     .by_tool("list_invoices")
//!     .argument("/customer", "/customer")
//!     .some("/structuredContent/invoices", "/token", "/token")
//!     // In place of the reply that is lost, and in its shape. `found` is the whole result of the read.
//!     .landed_with(|written, found| {
//!         let all = found["structuredContent"]["invoices"].as_array();
//!         let one = all.and_then(|all| all.iter().find(|one| one["token"] == written["token"]));
//!         json!({ "content": [], "structuredContent": one })
//!     });
//! let _layer = WriteSafetyLayer::new(check);
//! ```
//!
//! A stack takes the layer by [`writes`](crate::StackBuilder::writes); its [`check`](crate::StackBuilder::check) is for
//! functions alone. For the SDK's client the check is wrapped in `sdk::check(..)`.
//!
//! | what was read | verdict |
//! |---|---|
//! | the write's values | [`Landed`](Verdict::Landed), with the response that [`landed_with`](ReadBack::landed_with) makes; without that, the error "DONE, result lost" |
//! | of several things some, and not the others | [`Partial`](Verdict::Partial) |
//! | a list without them; or what was declared to mean absence | [`doubt.not_landed()`](InDoubt::not_landed): a replay if a fence holds, else unknown |
//! | an error, `isError`, another shape, another value, one page of several | [`Unknown`](Verdict::Unknown): a failed probe is never "absent" |
//!
//! The stack must know that the tool that is read is read-only
//! ([`ToolRules::read_only`](super::ToolRules::read_only)): a probe that it takes for a write is refused, and
//! the check says so. Where the connector's rules alone say what tools do, `build` refuses such a check. The checks of
//! several tools are combined by [`ReadBack::or`] or [`one_of`]; a write that
//! has none is unknown.
//!
//! # What a check is worth
//!
//! A check is as good as the value that it looks for and the place where it looks.
//!
//! - **Something similar is no proof.** That there is an invoice of the same customer and amount proves
//!   nothing: it may be last month's, or a colleague's. If it is taken for this one, this one is never written,
//!   and the caller is told that it was. Look for a value that only this write carries: a token that the caller
//!   drew at random and gave to this one call (the *correlation value*), in a field that the server keeps and
//!   gives back. Where a tool keeps no such field, a comment, a label or a line of the message will often do.
//! - **A search index lags.** What was written a moment ago is not in it yet, and the check finds "absent". So
//!   does a **replica**, a cache, a list that is consistent only eventually, or a result with a lifetime
//!   (`ttlMs`). Read from where the write goes to, by its key, not by a search. If there is no such read, no
//!   check is better than a wrong one: do not declare a fence, and absent stays unknown.
//! - **A first page is not the list.** A result with a `nextCursor` is never taken for complete here. A tool
//!   that cuts its list without a word must be named by [`limit`](ReadBack::limit), or be asked for a key.
//! - **What was there may be gone.** A message that was sent and archived, a row that was updated again and a
//!   file that somebody else has overwritten look like a write that never landed, and a replay undoes what came
//!   after it. Read something that only grows (a log, a history), or make the write conditional.
//! - **A fence is not a check, and a check is no fence.** A write that is absent now may still be in a pipe or in
//!   the server's queue. That is why absence alone never leads to a replay: see
//!   [`exit_ends_effects`](super::Stdio::exit_ends_effects) and
//!   [`quarantine`](crate::WriteSafetyLayer::quarantine).
//!
//! [RFC 6901]: https://www.rfc-editor.org/rfc/rfc6901

use std::{any::Any, borrow::Cow, fmt, marker::PhantomData, sync::Arc};

use serde_json::{Map, Value, json};

use crate::{
    BoxError, CallError, Cause, Refusal,
    jsonrpc::{Request, Response},
    write_safety::{EffectCheck, InDoubt, Verdict},
};

/// Begins a check of the writes of that tool. See the [module](self).
///
/// ```
/// use goaround::mcp::checks;
///
/// // server-filesystem: the file's text is the content that was to be written. Two declarations about this
/// // server and its use: it says ENOENT of a file that is not there, and nobody else writes to these paths.
/// let write = checks::read_back("write_file")
///     .by_tool("read_text_file")
///     .argument("/path", "/path")
///     .same("/content/0/text", "/content")
///     .absent_if_error_says("ENOENT")
///     .absent_if_different();
///
/// // mcp-server-git: a line of the log is the message. The log begins with the newest commit, and gives no
/// // more than the 50 that it is asked for.
/// let commit = checks::read_back("git_commit")
///     .by_tool("git_log")
///     .argument("/repo_path", "/repo_path")
///     .constant("/max_count", 50)
///     .line("Message: {}", "/message")
///     .limit(50);
///
/// let _layer = goaround::WriteSafetyLayer::new(write.or(commit));
/// ```
pub fn read_back(tool: impl Into<String>) -> Written {
    Written { tool: tool.into() }
}

/// Combines the checks of several tools into one. Of two for the same tool the first is used.
pub fn one_of(checks: impl IntoIterator<Item = ReadBack>) -> ReadBacks {
    ReadBacks { checks: checks.into_iter().map(Arc::new).collect() }
}

/// A check that knows which tool's writes it is for. Made by [`read_back`].
#[derive(Clone, Debug)]
pub struct Written {
    tool: String,
}

impl Written {
    /// The write is looked for by calling that tool, which must be read-only.
    pub fn by_tool(self, tool: impl Into<String>) -> Reading<ByTool> {
        let source = Source::Tool { name: tool.into(), arguments: Vec::new() };
        Reading { tool: self.tool, source, view: View::Result, by: PhantomData }
    }

    /// The write is looked for by reading that resource. What stands in braces is a JSON pointer into the
    /// write, and is replaced by the value there: `{/id}` with everything escaped that is not a letter, a digit
    /// or one of `-._~`, `{+/path}` as it is.
    ///
    /// ```
    /// # use goaround::mcp::checks;
    /// let _check = checks::read_back("add_note")
    ///     .by_resource("note://{/notebook}/all")
    ///     .json()
    ///     .some("/notes", "/token", "/token");
    /// ```
    pub fn by_resource(self, uri: impl Into<String>) -> Reading<ByResource> {
        Reading { tool: self.tool, source: Source::Resource(uri.into()), view: View::Result, by: PhantomData }
    }
}

/// A [`Reading`] of a tool's result.
#[derive(Clone, Copy, Debug)]
pub enum ByTool {}

/// A [`Reading`] of a resource.
#[derive(Clone, Copy, Debug)]
pub enum ByResource {}

/// A check that knows where to look, and not yet for what. Made by [`Written::by_tool`] and
/// [`Written::by_resource`].
#[derive(Clone)]
#[must_use = "say what to look for: same, some, every or line"]
pub struct Reading<By> {
    tool: String,
    source: Source,
    view: View,
    by: PhantomData<By>,
}

impl Reading<ByTool> {
    /// An argument of the read: `to` is where it belongs in the read's arguments, `from` where it stands in the
    /// write's. A step of `to` that is `0` makes a list of one: `/names/0`.
    pub fn argument(self, to: impl Into<String>, from: impl Into<String>) -> Self {
        self.with(to.into(), Operand::Written(from.into()))
    }

    /// An argument of the read that is always the same.
    pub fn constant(self, to: impl Into<String>, value: impl Into<Value>) -> Self {
        self.with(to.into(), Operand::Constant(value.into()))
    }

    fn with(mut self, to: String, operand: Operand) -> Self {
        if let Source::Tool { arguments, .. } = &mut self.source {
            arguments.push((to, operand));
        }
        self
    }
}

impl<By> Reading<By> {
    /// Looks at the text that was read, instead of the result around it: the pointer of the whole text is `""`.
    /// A result that has no text, or more than one, is unknown.
    pub fn text(mut self) -> Self {
        self.view = View::Text;
        self
    }

    /// Parses the text that was read as JSON, and begins the pointers there. Where a tool has
    /// `structuredContent` too, that is the better place to look.
    pub fn json(mut self) -> Self {
        self.view = View::Json;
        self
    }

    /// It landed if the value at `found`, in what was read, is that at `written`, in the write. Of several it
    /// landed if all are.
    ///
    /// Values are compared as JSON, and a text to its last character. The write's value in another form (`1.0` or
    /// `"1"` for `1`, an object with other members) is unknown, and so is a number too large to be compared.
    ///
    /// Another value is neither proof nor absence: somebody else may have changed it since. See
    /// [`absent_if_different`](ReadBack::absent_if_different).
    pub fn same(self, found: impl Into<String>, written: impl Into<String>) -> ReadBack {
        self.check().same(found, written)
    }

    /// It landed if some element of the list at `list` has, at `element` in itself, the value that stands at
    /// `written` in the write. An empty `element` is the element itself.
    ///
    /// In a list without such an element it is absent.
    pub fn some(
        self,
        list: impl Into<String>,
        element: impl Into<String>,
        written: impl Into<String>,
    ) -> ReadBack {
        self.check().some(list, element, written)
    }

    /// As [`some`](Self::some), for all values of the list at `written` in the write: it landed if each is
    /// there, and landed in part if only some are.
    pub fn every(
        self,
        list: impl Into<String>,
        element: impl Into<String>,
        written: impl Into<String>,
    ) -> ReadBack {
        self.check().every(list, element, written)
    }

    /// It landed if some line of the text that was read is `line` with `{}` replaced by the value at `written`
    /// in the write, from its first character to its last (blanks at the line's end aside). A part of a line is
    /// not enough: "fix 1" is in "fix 12".
    ///
    /// In a text without such a line it is absent.
    pub fn line(self, line: impl Into<String>, written: impl Into<String>) -> ReadBack {
        self.check().line(line, written)
    }

    fn check(self) -> ReadBack {
        ReadBack {
            tool: self.tool,
            source: self.source,
            view: self.view,
            same: Vec::new(),
            clauses: Vec::new(),
            absence: Absence::default(),
            limit: None,
            because: None,
            landed_with: None,
        }
    }
}

impl<By> fmt::Debug for Reading<By> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reading")
            .field("tool", &self.tool)
            .field("source", &self.source)
            .finish_non_exhaustive()
    }
}

type LandedWith = dyn Fn(&Value, &Value) -> Value + Send + Sync;

/// An [`EffectCheck`] that reads back what one tool was to write. Made by [`read_back`]; see the [module](self).
#[derive(Clone)]
#[must_use = "give it to WriteSafetyLayer::new"]
pub struct ReadBack {
    tool: String,
    source: Source,
    view: View,
    same: Vec<(String, String)>,
    clauses: Vec<Clause>,
    absence: Absence,
    limit: Option<usize>,
    because: Option<Cow<'static, str>>,
    landed_with: Option<Arc<LandedWith>>,
}

impl ReadBack {
    /// See [`Reading::same`].
    pub fn same(mut self, found: impl Into<String>, written: impl Into<String>) -> Self {
        self.same.push((found.into(), written.into()));
        self
    }

    /// See [`Reading::some`]. Of several, it landed if all hold, and in part if only some do.
    pub fn some(
        self,
        list: impl Into<String>,
        element: impl Into<String>,
        written: impl Into<String>,
    ) -> Self {
        self.list(list.into(), element.into(), written.into(), false)
    }

    /// See [`Reading::every`].
    pub fn every(
        self,
        list: impl Into<String>,
        element: impl Into<String>,
        written: impl Into<String>,
    ) -> Self {
        self.list(list.into(), element.into(), written.into(), true)
    }

    fn list(mut self, list: String, element: String, written: String, every: bool) -> Self {
        self.clauses.push(Clause::List { list, element, written, every });
        self
    }

    /// See [`Reading::line`].
    pub fn line(mut self, line: impl Into<String>, written: impl Into<String>) -> Self {
        self.clauses.push(Clause::Line { line: line.into(), written: written.into() });
        self
    }

    /// The read gives at most that many elements ([`line`](Self::line): lines that begin as the one looked for)
    /// and says nothing of the rest. What is absent from a list that long is unknown.
    pub fn limit(mut self, elements: usize) -> Self {
        self.limit = Some(elements);
        self
    }

    /// Declares that the tool that is read answers with `isError` for the one reason that what it looks for is
    /// not there, so that the write is absent.
    ///
    /// Many tools answer so for other reasons too: no permission, a lock, a limit, an argument that they do not
    /// know, on some SDKs even an unknown tool. Each of those would be taken for absence, and a write that
    /// landed would be replayed. [`absent_if_error_says`](Self::absent_if_error_says) is safer. An error of the
    /// protocol is never taken for absence by this.
    pub fn absent_if_error(mut self) -> Self {
        self.absence.error = true;
        self
    }

    /// Declares that an `isError` of the tool that is read means that what it looks for is not there, if its
    /// text contains that one (`ENOENT`, `does not exist`). It is as true as that text is unambiguous: it must
    /// not be one that the caller's own arguments can bring into another error.
    pub fn absent_if_error_says(mut self, text: impl Into<String>) -> Self {
        self.absence.error_says.push(text.into());
        self
    }

    /// Declares that the server answers with that error code of JSON-RPC if what is read is not there: -32002
    /// is the protocol's code for a resource that is not found. It must be an answer of the server with that
    /// code; no error of this crate, of the connection or of a gateway counts.
    pub fn absent_if_code(mut self, code: i64) -> Self {
        self.absence.codes.push(code);
        self
    }

    /// Declares that `null` or something empty at that place of what was read (a list, an object, a text) means
    /// that what is looked for is not there.
    pub fn absent_if_empty(mut self, found: impl Into<String>) -> Self {
        self.absence.empty.push(found.into());
        self
    }

    /// Declares that a value other than the write's, where [`same`](Self::same) looks, means that the write did
    /// not land: nobody else writes there, so that it is the value from before, and a value that was written in
    /// part may be written over.
    ///
    /// Without it such a write is unknown, since a replay would undo what somebody else wrote after it.
    pub fn absent_if_different(mut self) -> Self {
        self.absence.different = true;
        self
    }

    /// Declares why a write that is absent can no longer land, so that it needs no other fence. See
    /// [`InDoubt::not_landed_because`].
    pub fn not_landed_because(mut self, why: impl Into<Cow<'static, str>>) -> Self {
        self.because = Some(why.into());
        self
    }

    /// Makes the result of a write that landed, from the write's arguments and what was read. Without it such
    /// a write is an error that says that it is done
    /// ([`DoneResultLost`](crate::Outcome::DoneResultLost)), unless the layer has a
    /// [`landed_with`](crate::WriteSafetyLayer::landed_with) of its own.
    pub fn landed_with(mut self, result: impl Fn(&Value, &Value) -> Value + Send + Sync + 'static) -> Self {
        self.landed_with = Some(Arc::new(result));
        self
    }

    /// This check for its tool, and that one for another.
    pub fn or(self, other: ReadBack) -> ReadBacks {
        one_of([self, other])
    }

    /// What makes no sense in it, whatever it is asked about.
    pub(crate) fn wrong(&self) -> Option<String> {
        let mut pointers: Vec<&str> = Vec::new();
        match &self.source {
            Source::Tool { name, arguments } => {
                for (to, operand) in arguments {
                    if to.is_empty() {
                        return Some(format!(
                            "the check by `{name}` puts a value in the place of all arguments"
                        ));
                    }
                    pointers.push(to);
                    if let Operand::Written(from) = operand {
                        pointers.push(from);
                    }
                }
            }
            Source::Resource(template) => match pointers_in(template) {
                Some(found) => pointers.extend(found),
                None => return Some(UNCLOSED.to_owned()),
            },
        }
        pointers.extend(self.same.iter().flat_map(|(found, written)| [found.as_str(), written]));
        pointers.extend(self.absence.empty.iter().map(String::as_str));
        for clause in &self.clauses {
            match clause {
                Clause::List { list, element, written, .. } => {
                    pointers.extend([list.as_str(), element, written]);
                }
                Clause::Line { line, written } => {
                    if !line.contains("{}") {
                        return Some(format!("the line {line:?} has no place `{{}}` for the value"));
                    }
                    pointers.push(written);
                }
            }
        }
        let odd = pointers.into_iter().find(|pointer| !pointer.is_empty() && !pointer.starts_with('/'))?;
        Some(format!("{odd:?} is no JSON pointer: it must begin with `/` (RFC 6901)"))
    }

    /// The tool that it reads by, if it is a tool.
    pub(crate) fn reads_by(&self) -> Option<&str> {
        match &self.source {
            Source::Tool { name, .. } => Some(name),
            Source::Resource(_) => None,
        }
    }

    async fn run<R: Subject>(
        &self,
        doubt: &InDoubt<R, R::Response>,
        arguments: &Value,
    ) -> Result<Found, BoxError> {
        let (method, params) = match self.source.request(arguments) {
            Ok(request) => request,
            Err(odd) => return Ok(Found::odd(odd)),
        };
        match doubt.probe(R::reading(method, params)?).await {
            Ok(response) => Ok(self.examine(arguments, R::read(response)?)),
            Err(error) => self.examine_error(error),
        }
    }

    fn examine_error(&self, error: CallError) -> Result<Found, BoxError> {
        match error.cause() {
            Cause::Answered(answer) if self.absence.codes.contains(&answer.code) => {
                Ok(Found::of(State::Absent))
            }
            // The text of a refusal says what it is, and not what to do.
            Cause::Refused(Refusal::NotAProbe) => Ok(Found::odd(format!(
                "the stack does not know that {} is read-only; ToolRules::read_only would say so",
                self.source
            ))),
            _ => Err(error.into()),
        }
    }

    /// What the result of the read says. Reasons name pointers and tools, and nothing that was read.
    fn examine(&self, arguments: &Value, result: Value) -> Found {
        let source = &self.source;
        if result.get("isError").is_some_and(|is_error| !matches!(is_error, Value::Bool(false) | Value::Null))
        {
            return match self.absence.is_in_error(&result) {
                true => Found::of(State::Absent),
                false => Found::odd(format!("{source} answered with an error")),
            };
        }
        if result.get("resultType").is_some_and(|kind| *kind != "complete") {
            return Found::odd(format!("{source} gave no complete result"));
        }
        let text = text_of(&result);
        let seen = match self.view {
            View::Result => result.clone(),
            View::Text | View::Json => match text {
                Err(why) => return Found::odd(format!("{source} {why}")),
                Ok(text) if self.view == View::Text => Value::from(text),
                Ok(text) => match serde_json::from_str(text) {
                    Ok(json) => json,
                    Err(_) => return Found::odd(format!("{source} gave a text that is not JSON")),
                },
            },
        };
        let more = result.get("nextCursor").is_some_and(|cursor| !cursor.is_null())
            || result.get("structuredContent").is_some_and(has_more)
            || has_more(&seen);
        for pointer in &self.absence.empty {
            match seen.pointer(pointer) {
                Some(value) if is_empty(value) && more => return Found::odd(self.incomplete()),
                Some(value) if is_empty(value) => return Found { state: State::Absent, seen },
                Some(_) => {}
                None => return Found::odd(format!("{source} gave nothing at `{pointer}`")),
            }
        }

        let mut states = Vec::with_capacity(self.clauses.len() + 1);
        if !self.same.is_empty() {
            states.push(self.compare(arguments, &seen));
        }
        for clause in &self.clauses {
            states.push(match clause {
                Clause::List { list, element, written, every } => {
                    self.look_in_list(arguments, &seen, list, element, (written, *every), more)
                }
                Clause::Line { line, written } => match text {
                    Ok(text) => self.look_for_line(arguments, text, line, written, more),
                    Err(why) => State::Odd(format!("{source} {why}").into()),
                },
            });
        }
        Found { state: State::all(states), seen }
    }

    fn compare(&self, arguments: &Value, seen: &Value) -> State {
        let mut state = State::Landed;
        for (found, written) in &self.same {
            let wanted = match value_of(arguments, written) {
                Ok(wanted) => wanted,
                Err(odd) => return State::Odd(odd),
            };
            let Some(value) = seen.pointer(found) else {
                return State::Odd(format!("{} gave nothing at `{found}`", self.source).into());
            };
            match likeness(value, wanted) {
                Likeness::Same => {}
                Likeness::AnotherForm => return self.another_form(found),
                // The rest may still say nothing.
                Likeness::Other if self.absence.different => state = State::Absent,
                Likeness::Other => {
                    let why = format!("{} gave another value than the write's at `{found}`", self.source);
                    return State::Odd(why.into());
                }
            }
        }
        state
    }

    fn look_in_list(
        &self,
        arguments: &Value,
        seen: &Value,
        list: &str,
        element: &str,
        (written, every): (&str, bool),
        more: bool,
    ) -> State {
        let Some(Value::Array(elements)) = seen.pointer(list) else {
            return State::Odd(format!("{} gave no list at `{list}`", self.source).into());
        };
        let wanted = match value_of(arguments, written) {
            Ok(wanted) => wanted,
            Err(odd) => return State::Odd(odd),
        };
        let wanted = match (every, wanted) {
            (false, wanted) => std::slice::from_ref(wanted),
            (true, Value::Array(wanted)) if wanted.iter().all(|value| !value.is_null()) => wanted,
            (true, _) => return State::Odd(format!("the write has no list of values at `{written}`").into()),
        };
        // An element of another shape may be the one looked for, in a form that is not known here.
        let (mut odd, mut in_another_form) = (false, false);
        let mut there = |wanted: &Value| {
            elements.iter().any(|one| {
                let Some(value) = one.pointer(element) else {
                    odd = true;
                    return false;
                };
                let likeness = likeness(value, wanted);
                in_another_form |= likeness == Likeness::AnotherForm;
                likeness == Likeness::Same
            })
        };
        let states: Vec<_> =
            wanted.iter().map(|wanted| if there(wanted) { State::Landed } else { State::Absent }).collect();
        match State::all(states) {
            State::Landed => State::Landed,
            _ if odd => State::Odd(format!("{} gave elements without `{element}`", self.source).into()),
            _ if in_another_form => self.another_form(element),
            state => self.if_complete(state, elements.len(), more),
        }
    }

    fn look_for_line(&self, arguments: &Value, text: &str, line: &str, written: &str, more: bool) -> State {
        let Some((begin, _)) = line.split_once("{}") else {
            return State::Odd(
                format!("the line looked for by {} has no place for the value", self.source).into(),
            );
        };
        let wanted = match value_of(arguments, written).map(plain) {
            Ok(wanted) if wanted.trim().is_empty() || wanted.contains(['\n', '\r']) => {
                return State::Odd(format!("the write's value at `{written}` is not one line").into());
            }
            Ok(wanted) => line.replace("{}", &wanted),
            Err(odd) => return State::Odd(odd),
        };
        if text.lines().any(|one| one.trim_end() == wanted.trim_end()) {
            return State::Landed;
        }
        let alike = text.lines().filter(|one| one.starts_with(begin)).count();
        self.if_complete(State::Absent, alike, more)
    }

    /// That state, unless there may be more elements than were seen.
    fn if_complete(&self, state: State, elements: usize, more: bool) -> State {
        if more || self.limit.is_some_and(|limit| elements >= limit) {
            return State::Odd(self.incomplete().into());
        }
        state
    }

    fn incomplete(&self) -> String {
        format!("not in what {} gave, which is not all there is", self.source)
    }

    fn another_form(&self, pointer: &str) -> State {
        State::Odd(
            format!("{} gave a value in another form than the write's at `{pointer}`", self.source).into(),
        )
    }

    fn verdict<R: Subject>(
        &self,
        doubt: &InDoubt<R, R::Response>,
        arguments: &Value,
        found: Found,
    ) -> Verdict<R::Response> {
        match (found.state, &self.because) {
            (State::Landed, _) => {
                let made = self.landed_with.as_ref().map(|result| result(arguments, &found.seen));
                match made.map(R::written) {
                    Some(Ok(response)) => doubt.landed(response),
                    // That it landed is known all the same.
                    Some(Err(_)) | None => doubt.landed_without_result(),
                }
            }
            (State::Absent, Some(why)) => doubt.not_landed_because(why.clone()),
            (State::Absent, None) => doubt.not_landed(),
            (State::Partial, _) => doubt.partial(),
            (State::Odd(why), _) => doubt.unknown(why),
        }
    }
}

impl EffectCheck<Request, Response> for ReadBack {
    async fn check(&self, doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
        check([self], &doubt).await
    }
}

impl fmt::Debug for ReadBack {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReadBack")
            .field("tool", &self.tool)
            .field("source", &self.source)
            .field("same", &self.same)
            .field("clauses", &self.clauses)
            .field("absence", &self.absence)
            .finish_non_exhaustive()
    }
}

/// The checks of several tools as one. Made by [`ReadBack::or`] and [`one_of`].
///
/// A write of a tool that none of them is for is [`Unknown`](Verdict::Unknown).
#[derive(Clone, Debug)]
#[must_use = "give it to WriteSafetyLayer::new"]
pub struct ReadBacks {
    checks: Vec<Arc<ReadBack>>,
}

impl ReadBacks {
    pub(crate) fn each(&self) -> impl Iterator<Item = &ReadBack> {
        self.checks.iter().map(|check| &**check)
    }

    /// These checks, and that one for another tool.
    pub fn or(mut self, other: ReadBack) -> Self {
        self.checks.push(Arc::new(other));
        self
    }
}

impl From<ReadBack> for ReadBacks {
    fn from(check: ReadBack) -> Self {
        one_of([check])
    }
}

impl EffectCheck<Request, Response> for ReadBacks {
    async fn check(&self, doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
        check(self.each(), &doubt).await
    }
}

/// The ready-made checks in a check, if it is made of them.
pub(crate) fn ready_made(check: &dyn Any) -> Vec<&ReadBack> {
    if let Some(check) = check.downcast_ref::<ReadBack>() {
        return vec![check];
    }
    #[cfg(feature = "rmcp")]
    if let Some(check) = check.downcast_ref::<crate::sdk::Check>() {
        return check.each().collect();
    }
    check.downcast_ref::<ReadBacks>().map(|checks| checks.each().collect()).unwrap_or_default()
}

/// Runs the check that is for the tool that the write calls.
pub(crate) async fn check<R: Subject>(
    checks: impl IntoIterator<Item = &ReadBack>,
    doubt: &InDoubt<R, R::Response>,
) -> Result<Verdict<R::Response>, BoxError> {
    let Some(mut params) = doubt.request().tool_call()? else {
        return Ok(doubt.unknown("no check for this method"));
    };
    let arguments = params.get_mut("arguments").map_or_else(|| json!({}), Value::take);
    let of = |check: &&ReadBack| params.get("name").is_some_and(|name| *name == *check.tool);
    let Some(check) = checks.into_iter().find(of) else {
        return Ok(doubt.unknown("no check for this tool"));
    };
    let found = check.run(doubt, &arguments).await?;
    Ok(check.verdict(doubt, &arguments, found))
}

/// What a check must be able to do with a kind of requests: this crate's own, or those of an SDK.
pub(crate) trait Subject: Sized {
    type Response;

    /// The parameters of a `tools/call`; `None` of another method.
    fn tool_call(&self) -> Result<Option<Value>, BoxError>;

    /// A `tools/call` or `resources/read` with these parameters.
    fn reading(method: &'static str, params: Value) -> Result<Self, BoxError>;

    /// The result that was read.
    fn read(response: Self::Response) -> Result<Value, BoxError>;

    /// That result as the response to a write.
    fn written(result: Value) -> Result<Self::Response, BoxError>;
}

impl Subject for Request {
    type Response = Response;

    fn tool_call(&self) -> Result<Option<Value>, BoxError> {
        if self.method() != "tools/call" {
            return Ok(None);
        }
        Ok(Some(self.params()?))
    }

    fn reading(method: &'static str, params: Value) -> Result<Self, BoxError> {
        Ok(Request::new(method, params)?)
    }

    fn read(response: Response) -> Result<Value, BoxError> {
        Ok(response.parse()?)
    }

    fn written(result: Value) -> Result<Response, BoxError> {
        Ok(Response::new(result)?)
    }
}

/// Where a write is looked for.
#[derive(Clone, Debug)]
enum Source {
    Tool { name: String, arguments: Vec<(String, Operand)> },
    Resource(String),
}

#[derive(Clone, Debug)]
enum Operand {
    Written(String),
    Constant(Value),
}

impl Source {
    /// The request that reads; an error says why it cannot be made of this write.
    fn request(&self, written: &Value) -> Result<(&'static str, Value), Cow<'static, str>> {
        match self {
            Source::Tool { name, arguments } => {
                let mut read = Value::Object(Map::new());
                for (to, operand) in arguments {
                    let value = match operand {
                        Operand::Written(from) => value_of(written, from)?.clone(),
                        Operand::Constant(value) => value.clone(),
                    };
                    put(&mut read, to, value)
                        .ok_or_else(|| format!("no argument can be put at `{to}` of {self}"))?;
                }
                Ok(("tools/call", json!({ "name": name, "arguments": read })))
            }
            Source::Resource(template) => {
                Ok(("resources/read", json!({ "uri": expand(template, written)? })))
            }
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Source::Tool { name, .. } => write!(f, "`{name}`"),
            Source::Resource(_) => f.write_str("the resource"),
        }
    }
}

/// What pointers begin at.
#[derive(Clone, Copy, Debug, PartialEq)]
enum View {
    Result,
    Text,
    Json,
}

/// What is looked for.
#[derive(Clone, Debug)]
enum Clause {
    List { list: String, element: String, written: String, every: bool },
    Line { line: String, written: String },
}

/// What was declared to mean absence.
#[derive(Clone, Debug, Default)]
struct Absence {
    error: bool,
    error_says: Vec<String>,
    codes: Vec<i64>,
    empty: Vec<String>,
    different: bool,
}

impl Absence {
    fn is_in_error(&self, result: &Value) -> bool {
        // Only what the protocol calls an error of the tool: `true`, and not what merely looks like it.
        if result.get("isError") != Some(&Value::Bool(true)) {
            return false;
        }
        self.error
            || self.error_says.iter().any(|says| texts(result).any(|text| text.contains(says.as_str())))
    }
}

/// What a read found, and what it saw.
struct Found {
    state: State,
    seen: Value,
}

impl Found {
    fn of(state: State) -> Self {
        Self { state, seen: Value::Null }
    }

    fn odd(why: impl Into<Cow<'static, str>>) -> Self {
        Self::of(State::Odd(why.into()))
    }
}

#[derive(Debug, PartialEq)]
enum State {
    Landed,
    Absent,
    Partial,
    /// Says nothing, and why.
    Odd(Cow<'static, str>),
}

impl State {
    /// What all of these say together.
    fn all(states: Vec<State>) -> State {
        let mut all = None;
        for state in states {
            all = match (all, state) {
                (_, odd @ State::Odd(_)) => return odd,
                (None, state) => Some(state),
                (Some(all), state) if all == state => Some(all),
                (Some(_), _) => Some(State::Partial),
            };
        }
        // An empty list of values was to be written: nothing can be found of it.
        all.unwrap_or(State::Odd("the write has no value to look for".into()))
    }
}

/// A value of the write. One that is absent or `null` identifies nothing.
fn value_of<'a>(written: &'a Value, pointer: &str) -> Result<&'a Value, Cow<'static, str>> {
    let value = written.pointer(pointer).filter(|value| !value.is_null());
    value.ok_or_else(|| format!("the write has no value at `{pointer}`").into())
}

/// A value as text: a string without its quotes.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        value => value.to_string(),
    }
}

/// How what was read is like what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Likeness {
    Same,
    /// It may be the same, written in a way that is not known here.
    AnotherForm,
    Other,
}

fn likeness(found: &Value, wanted: &Value) -> Likeness {
    /// From here on not every whole number is a number of floating point.
    const EXACT: f64 = 9_007_199_254_740_992.0;
    let least = Likeness::Same;
    match (found, wanted) {
        (Value::Number(one), Value::Number(other)) => {
            let floats = one.is_f64() || other.is_f64();
            let (Some(a), Some(b)) = (one.as_f64(), other.as_f64()) else { return Likeness::AnotherForm };
            match one == other {
                true if floats && a.abs() >= EXACT => Likeness::AnotherForm,
                true => Likeness::Same,
                // Such numbers lose their last digits when they are written and read.
                false if floats && (a - b).abs() <= a.abs() * 1e-14 => Likeness::AnotherForm,
                false => Likeness::Other,
            }
        }
        (Value::Array(one), Value::Array(other)) if one.len() == other.len() => {
            one.iter().zip(other).map(|(one, other)| likeness(one, other)).fold(least, Likeness::max)
        }
        (Value::Object(one), Value::Object(other)) => {
            let all = other.iter().map(|(key, wanted)| match one.get(key) {
                Some(found) => likeness(found, wanted),
                None => Likeness::AnotherForm,
            });
            let least = if one.len() > other.len() { Likeness::AnotherForm } else { least };
            all.fold(least, Likeness::max)
        }
        _ if found == wanted => Likeness::Same,
        // Where there is nothing there is nothing.
        (Value::Null, _) | (_, Value::Null) => Likeness::Other,
        _ if std::mem::discriminant(found) == std::mem::discriminant(wanted) => Likeness::Other,
        _ => Likeness::AnotherForm,
    }
}

/// Whether a tool says in its own result that there is more.
fn has_more(result: &Value) -> bool {
    let next = result.get("nextCursor");
    next.is_some_and(|cursor| !matches!(cursor, Value::Null | Value::Bool(false)) && cursor != "")
}

fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        Value::String(text) => text.is_empty(),
        Value::Bool(_) | Value::Number(_) => false,
    }
}

/// The texts of a result, of a tool or of a resource.
fn texts(result: &Value) -> impl Iterator<Item = &str> {
    let list = result.get("content").or_else(|| result.get("contents")).and_then(Value::as_array);
    list.into_iter().flatten().filter_map(|content| content.get("text")?.as_str())
}

fn text_of(result: &Value) -> Result<&str, &'static str> {
    let mut texts = texts(result);
    match (texts.next(), texts.next()) {
        (Some(text), None) => Ok(text),
        (None, _) => Err("gave no text"),
        (Some(_), Some(_)) => Err("gave more than one text"),
    }
}

/// Puts a value at that place of an object, and makes what leads there.
fn put(into: &mut Value, pointer: &str, value: Value) -> Option<()> {
    let mut at = into;
    for step in pointer.strip_prefix('/')?.split('/') {
        let step = step.replace("~1", "/").replace("~0", "~");
        if at.is_null() {
            *at = if step == "0" { json!([]) } else { json!({}) };
        }
        at = match at {
            Value::Object(object) => object.entry(step).or_insert(Value::Null),
            Value::Array(list) => {
                let index: usize = step.parse().ok()?;
                if index == list.len() {
                    list.push(Value::Null);
                }
                list.get_mut(index)?
            }
            _ => return None,
        };
    }
    *at = value;
    Some(())
}

const UNCLOSED: &str = "the resource's URI has a brace that is not closed";

/// The pointers in the braces of a resource's URI; `None` if one is not closed.
fn pointers_in(template: &str) -> Option<Vec<&str>> {
    let mut parts = template.split('{');
    parts.next();
    parts
        .map(|part| part.split_once('}').map(|(pointer, _)| pointer.strip_prefix('+').unwrap_or(pointer)))
        .collect()
}

/// Replaces what stands in braces by values of the write.
fn expand(template: &str, written: &Value) -> Result<String, Cow<'static, str>> {
    let mut uri = String::with_capacity(template.len());
    let mut rest = template;
    while let Some((before, from)) = rest.split_once('{') {
        let (pointer, after) = from.split_once('}').ok_or(UNCLOSED)?;
        let (pointer, as_it_is) = match pointer.strip_prefix('+') {
            Some(pointer) => (pointer, true),
            None => (pointer, false),
        };
        uri.push_str(before);
        for byte in plain(value_of(written, pointer)?).bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => uri.push(byte.into()),
                _ if as_it_is && byte.is_ascii_graphic() => uri.push(byte.into()),
                _ => uri.push_str(&format!("%{byte:02X}")),
            }
        }
        rest = after;
    }
    uri.push_str(rest);
    Ok(uri)
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, PoisonError},
        time::Duration,
    };

    use tower::service_fn;

    use super::*;
    use crate::{Call, Event, Outcome, ServerError, Stack, VerdictKind, WriteSafetyLayer, mcp::ToolRules};

    type Answer = Result<Value, ServerError>;

    /// What came out of a write whose first attempt was lost.
    #[derive(Debug, Default)]
    struct Settled {
        /// The parameters of the reads.
        reads: Vec<Value>,
        /// How often the write was handed over.
        writes: u32,
        verdict: Option<VerdictKind>,
        reason: String,
        /// The result, or what is known.
        result: Option<Result<Value, Outcome>>,
    }

    fn tool(name: &str, arguments: Value) -> Request {
        Request::new("tools/call", json!({ "name": name, "arguments": arguments })).unwrap()
    }

    /// Sends a write whose first answer is lost through a stack with that check; reads are answered so. A
    /// quarantine is the fence.
    async fn settle<C>(check: C, write: Request, answer: Answer) -> Settled
    where
        C: EffectCheck<Request, Response> + Send + Sync + 'static,
    {
        settle_with(check, write, answer, true, ToolRules::new().read_only(["find"])).await
    }

    async fn settle_with<C>(
        check: C,
        write: Request,
        answer: Answer,
        fence: bool,
        rules: ToolRules,
    ) -> Settled
    where
        C: EffectCheck<Request, Response> + Send + Sync + 'static,
    {
        let settled = Arc::new(Mutex::new(Settled::default()));
        let (server, reports) = (Arc::clone(&settled), Arc::clone(&settled));
        let connection = service_fn(move |request: Request| {
            let mut seen = server.lock().unwrap_or_else(PoisonError::into_inner);
            let answer = if !request.effect().is_write() {
                seen.reads.push(request.params().unwrap());
                match answer.clone() {
                    Ok(result) => Ok(Response::new(result).unwrap()),
                    Err(error) => Err(CallError::server(error)),
                }
            } else {
                seen.writes += 1;
                match seen.writes {
                    1 => Err(CallError::ambiguous("lost")),
                    _ => Ok(Response::new("replayed").unwrap()),
                }
            };
            std::future::ready(answer)
        });
        let connector = service_fn(move |()| std::future::ready(Ok::<_, CallError>(connection.clone())));
        let writes = WriteSafetyLayer::new(check);
        let stack = Stack::builder(connector)
            .classify(move |request| rules.classify(request).map(|(effect, _)| effect))
            .writes(if fence { writes.quarantine(Duration::from_secs(1)) } else { writes })
            .on_event(move |event| {
                if let Event::InDoubt(report) = event {
                    let mut settled = reports.lock().unwrap_or_else(PoisonError::into_inner);
                    settled.verdict = report.verdict;
                    settled.reason = report.reason.clone().unwrap_or_default();
                }
            })
            .build()
            .unwrap();
        let result = stack.send(write).await;
        let mut settled = std::mem::take(&mut *settled.lock().unwrap());
        settled.result = Some(match result {
            Ok(response) => Ok(response.parse().unwrap()),
            Err(error) => Err(error.outcome()),
        });
        settled
    }

    impl Settled {
        #[track_caller]
        fn is_landed(&self) {
            assert_eq!((self.verdict, self.writes), (Some(VerdictKind::Landed), 1), "{self:?}");
            assert_eq!(self.result, Some(Err(Outcome::DoneResultLost)));
        }

        /// Absent: replayed, since the fence holds.
        #[track_caller]
        fn is_replayed(&self) {
            assert_eq!((self.verdict, self.writes), (Some(VerdictKind::NotLanded), 2), "{self:?}");
            assert_eq!(self.result, Some(Ok(json!("replayed"))));
        }

        #[track_caller]
        fn is_unknown(&self, why: &str) {
            assert_eq!((self.verdict, self.writes), (Some(VerdictKind::Unknown), 1), "{self:?}");
            assert_eq!(self.result, Some(Err(Outcome::Unknown)));
            assert!(self.reason.contains(why), "{:?} does not say {why:?}", self.reason);
        }

        #[track_caller]
        fn is_partial(&self) {
            assert_eq!((self.verdict, self.writes), (Some(VerdictKind::Partial), 1), "{self:?}");
        }
    }

    fn text(text: &str) -> Answer {
        Ok(json!({ "content": [{ "type": "text", "text": text }] }))
    }

    fn failed(text: &str) -> Answer {
        Ok(json!({ "content": [{ "type": "text", "text": text }], "isError": true }))
    }

    fn structured(value: Value) -> Answer {
        Ok(json!({ "content": [], "structuredContent": value }))
    }

    fn file() -> (ReadBack, Request) {
        let check = read_back("write_file")
            .by_tool("find")
            .argument("/path", "/path")
            .same("/content/0/text", "/content");
        (check, tool("write_file", json!({ "path": "/a", "content": "one\n" })))
    }

    fn add() -> (ReadBack, Request) {
        let check = read_back("add").by_tool("find").argument("/of/0/name", "/items/0/of").some(
            "/structuredContent/items",
            "/token",
            "/items/0/token",
        );
        (check, tool("add", json!({ "items": [{ "of": "x", "token": "t-1" }] })))
    }

    #[tokio::test(start_paused = true)]
    async fn the_same_value_has_landed_and_another_says_nothing() {
        let (check, write) = file();
        let settled = settle(check.clone(), write.clone(), text("one\n")).await;
        settled.is_landed();
        assert_eq!(settled.reads, [json!({ "name": "find", "arguments": { "path": "/a" } })]);

        settle(check.clone(), write.clone(), text("one")).await.is_unknown("another value than the write's");
        settle(check.clone().absent_if_different(), write.clone(), text("one")).await.is_replayed();
        let empty = Ok(json!({ "content": [] }));
        settle(check.absent_if_different(), write, empty).await.is_unknown("nothing at `/content/0/text`");
    }

    #[tokio::test(start_paused = true)]
    async fn a_record_is_the_same_if_all_of_its_values_are() {
        let check = read_back("set")
            .by_tool("find")
            .argument("/id", "/id")
            .same("/structuredContent/token", "/token")
            .same("/structuredContent/n", "/n");
        let write = tool("set", json!({ "id": 7, "token": "t", "n": 1 }));
        settle(check.clone(), write.clone(), structured(json!({ "token": "t", "n": 1 }))).await.is_landed();
        let other = structured(json!({ "token": "t", "n": 2 }));
        settle(check.clone(), write.clone(), other.clone()).await.is_unknown("`/structuredContent/n`");
        settle(check, write, other).await.is_unknown("another value");
    }

    #[tokio::test(start_paused = true)]
    async fn an_element_of_a_list_is_there_or_absent() {
        let (check, write) = add();
        let items = |items| structured(json!({ "items": items }));
        let there = items(json!([{ "token": "t-0" }, { "token": "t-1" }]));
        let settled = settle(check.clone(), write.clone(), there).await;
        settled.is_landed();
        assert_eq!(settled.reads[0]["arguments"], json!({ "of": [{ "name": "x" }] }));

        settle(check.clone(), write.clone(), items(json!([]))).await.is_replayed();
        // What only looks like it is not it.
        settle(check.clone(), write.clone(), items(json!([{ "token": "t-10" }]))).await.is_replayed();
        settle(check.clone(), write.clone(), items(json!({}))).await.is_unknown("no list at");
        settle(check, write, items(json!([{ "token": "t-0" }, { "name": 1 }])))
            .await
            .is_unknown("without `/token`");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_absent_from_a_part_of_a_list_is_unknown() {
        let (check, write) = add();
        let items = json!({ "items": [{ "token": "a" }, { "token": "b" }] });
        let page = Ok(json!({ "structuredContent": items, "nextCursor": "2" }));
        settle(check.clone(), write.clone(), page).await.is_unknown("not all there is");
        let limited = check.clone().limit(2);
        settle(limited, write.clone(), structured(items.clone())).await.is_unknown("not all there is");
        settle(check.clone().limit(3), write.clone(), structured(items)).await.is_replayed();
        // On a page it is as much there as anywhere.
        let page = Ok(json!({ "structuredContent": { "items": [{ "token": "t-1" }] }, "nextCursor": "2" }));
        settle(check.limit(1), write, page).await.is_landed();
    }

    #[tokio::test(start_paused = true)]
    async fn of_several_values_some_are_a_part() {
        let check = read_back("add").by_tool("find").every("/structuredContent", "", "/contents");
        let write = |contents| tool("add", json!({ "contents": contents }));
        let two = write(json!(["a", "b"]));
        settle(check.clone(), two.clone(), structured(json!(["b", "x", "a"]))).await.is_landed();
        settle(check.clone(), two.clone(), structured(json!(["b", "x"]))).await.is_partial();
        settle(check.clone(), two, structured(json!(["x"]))).await.is_replayed();
        for nothing in [json!([]), json!(["a", null]), json!("a"), json!(null)] {
            settle(check.clone(), write(nothing), structured(json!(["x"])))
                .await
                .is_unknown("the write has no");
        }
        let both = read_back("add").by_tool("find").some("/structuredContent", "", "/a").some(
            "/structuredContent",
            "",
            "/b",
        );
        let write = tool("add", json!({ "a": 1, "b": 2 }));
        settle(both.clone(), write.clone(), structured(json!([1, 2]))).await.is_landed();
        settle(both.clone(), write.clone(), structured(json!([2]))).await.is_partial();
        settle(both, write, structured(json!([]))).await.is_replayed();
    }

    #[tokio::test(start_paused = true)]
    async fn a_line_of_a_text_is_looked_for_as_a_whole() {
        let check =
            read_back("commit").by_tool("find").constant("/max", 3).line("Message: {}", "/message").limit(3);
        let write = |message: &str| tool("commit", json!({ "message": message }));
        let log = text("History:\nMessage: fix 12\n\nMessage: fix 2  \r\n");
        let settled = settle(check.clone(), write("fix 2"), log.clone()).await;
        settled.is_landed();
        assert_eq!(settled.reads[0]["arguments"], json!({ "max": 3 }));
        settle(check.clone(), write("fix 1"), log.clone()).await.is_replayed();
        let full = text("Message: a\nMessage: b\nMessage: c\n");
        settle(check.clone(), write("d"), full).await.is_unknown("not all there is");
        for message in ["", " ", "a\nb"] {
            settle(check.clone(), write(message), log.clone()).await.is_unknown("not one line");
        }
        settle(check.clone(), write("a"), Ok(json!({ "content": [] }))).await.is_unknown("gave no text");
        let two = Ok(json!({ "content": [{ "text": "a" }, { "text": "b" }] }));
        settle(check, write("a"), two).await.is_unknown("more than one text");
    }

    #[tokio::test(start_paused = true)]
    async fn the_text_can_be_looked_at_as_text_and_as_json() {
        let write = tool("put", json!({ "body": "b", "token": "t" }));
        let whole = read_back("put").by_tool("find").text().same("", "/body");
        settle(whole.clone(), write.clone(), text("b")).await.is_landed();
        settle(whole, write.clone(), text("bb")).await.is_unknown("another value");
        let json = read_back("put").by_tool("find").json().some("/all", "/token", "/token");
        settle(json.clone(), write.clone(), text(r#"{"all":[{"token":"t"}]}"#)).await.is_landed();
        settle(json.clone(), write.clone(), text(r#"{"all":[]}"#)).await.is_replayed();
        settle(json, write, text("no JSON")).await.is_unknown("not JSON");
    }

    #[tokio::test(start_paused = true)]
    async fn a_failed_read_is_never_absent_but_where_that_is_declared() {
        let (check, write) = file();
        settle(check.clone(), write.clone(), failed("ENOENT: a"))
            .await
            .is_unknown("`find` answered with an error");
        let error = || Err(ServerError::new(-32602, "ENOENT"));
        settle(check.clone().absent_if_error(), write.clone(), error()).await.is_unknown("the check failed");

        settle(check.clone().absent_if_error(), write.clone(), failed("EACCES")).await.is_replayed();
        let says = check.clone().absent_if_error_says("ENOENT");
        settle(says.clone(), write.clone(), failed("ENOENT: a")).await.is_replayed();
        settle(says.clone(), write.clone(), failed("EACCES")).await.is_unknown("answered with an error");
        // A result that is none is not one that failed.
        settle(says, write.clone(), text("ENOENT")).await.is_unknown("another value");
        let odd = Ok(json!({ "content": [], "isError": "yes" }));
        settle(check.clone().absent_if_error(), write.clone(), odd)
            .await
            .is_unknown("answered with an error");

        let code = check.clone().absent_if_code(-32002);
        settle(code.clone(), write.clone(), error()).await.is_unknown("the check failed");
        let answer = Err(ServerError::new(-32002, "not found"));
        settle(check.clone(), write.clone(), answer.clone()).await.is_unknown("the check failed");
        let task = Ok(json!({ "resultType": "task", "content": [{ "type": "text", "text": "one\n" }] }));
        settle(check, write, task).await.is_unknown("no complete result");
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_declared_to_be_empty_where_it_is_absent_is_absent() {
        let check = read_back("put")
            .by_tool("find")
            .same("/structuredContent/item/token", "/token")
            .absent_if_empty("/structuredContent/item");
        let write = tool("put", json!({ "token": "t" }));
        settle(check.clone(), write.clone(), structured(json!({ "item": { "token": "t" } })))
            .await
            .is_landed();
        for empty in [json!(null), json!({}), json!([]), json!("")] {
            settle(check.clone(), write.clone(), structured(json!({ "item": empty }))).await.is_replayed();
        }
        settle(check.clone(), write.clone(), structured(json!({}))).await.is_unknown("nothing at");
        settle(check, write, structured(json!({ "item": 0 }))).await.is_unknown("nothing at");
    }

    #[tokio::test(start_paused = true)]
    async fn a_value_in_another_form_is_not_another_value() {
        let (check, _) = add();
        let write = |token: Value| tool("add", json!({ "items": [{ "of": "x", "token": token }] }));
        let listed = |token: &str| {
            let items = format!(r#"{{"items":[{{"token":"other"}},{{"token":{token}}}]}}"#);
            structured(serde_json::from_str(&items).unwrap())
        };
        for (written, found) in [
            (json!(1), "1.0"),
            (json!(1.0), "1"),
            (json!(7), r#""7""#),
            (json!("7"), "7"),
            (json!("t-1"), r#"{"value":"t-1"}"#),
            (json!("t-1"), r#"["t-1"]"#),
            // Read as a number of floating point, these are the same.
            (serde_json::from_str("123456789012345678901").unwrap(), "123456789012345678902"),
            (json!(9_007_199_254_740_993_u64), "9007199254740993.0"),
            (json!(0.3), "0.30000000000000004"),
        ] {
            let settled = settle(check.clone(), write(written.clone()), listed(found)).await;
            settled.is_unknown("in another form");
            let same = read_back("set").by_tool("find").same("/structuredContent/n", "/n");
            let found = serde_json::from_str(&format!(r#"{{"n":{found}}}"#)).unwrap();
            let settled =
                settle(same.absent_if_different(), tool("set", json!({ "n": written })), structured(found));
            settled.await.is_unknown("in another form");
        }
        // Where there is none, there is none; and another value of the same form is another.
        for (written, found) in [(json!("t-1"), "null"), (json!("t-1"), r#""t-2""#), (json!(1), "2")] {
            let listed =
                structured(json!({ "items": [{ "token": serde_json::from_str::<Value>(found).unwrap() }] }));
            settle(check.clone(), write(written), listed).await.is_replayed();
        }
        settle(check, write(json!(1)), structured(json!({ "items": [{ "token": 1 }] }))).await.is_landed();
    }

    #[tokio::test(start_paused = true)]
    async fn an_empty_page_of_several_is_not_absence() {
        let (check, write) = add();
        let check = check.absent_if_empty("/structuredContent/items");
        let page = |outside: Value, inside: Value| {
            Ok(json!({
                "content": [], "nextCursor": outside,
                "structuredContent": { "items": [], "nextCursor": inside },
            }))
        };
        settle(check.clone(), write.clone(), page(json!(null), json!(null))).await.is_replayed();
        settle(check.clone(), write.clone(), page(json!("2"), json!(null)))
            .await
            .is_unknown("not all there is");
        settle(check, write, page(json!(null), json!("2"))).await.is_unknown("not all there is");
        let check = read_back("note").by_tool("find").json().some("/all", "", "/token");
        let write = tool("note", json!({ "token": "t" }));
        settle(check.clone(), write.clone(), text(r#"{"all":[],"nextCursor":"2"}"#))
            .await
            .is_unknown("not all");
        settle(check, write, text(r#"{"all":[],"nextCursor":null}"#)).await.is_replayed();
    }

    #[tokio::test(start_paused = true)]
    async fn a_different_value_is_not_absence_where_another_is_missing() {
        let check = read_back("set")
            .by_tool("find")
            .same("/structuredContent/a", "/a")
            .same("/structuredContent/b", "/b")
            .absent_if_different();
        let write = tool("set", json!({ "a": 1, "b": 2 }));
        for found in [json!({ "a": 3 }), json!({ "b": 3 })] {
            settle(check.clone(), write.clone(), structured(found)).await.is_unknown("nothing at");
        }
        settle(check, write, structured(json!({ "a": 3, "b": 2 }))).await.is_replayed();
    }

    #[tokio::test(start_paused = true)]
    async fn absence_needs_a_fence() {
        let rules = || ToolRules::new().read_only(["find"]);
        let (check, write) = add();
        let none = structured(json!({ "items": [] }));
        let settled = settle_with(check.clone(), write.clone(), none.clone(), false, rules()).await;
        settled.is_unknown("no fence holds");
        let declared = check.not_landed_because("the server writes only what it is asked for by version");
        settle_with(declared, write, none, false, rules()).await.is_replayed();
    }

    #[tokio::test(start_paused = true)]
    async fn a_tool_that_is_not_known_to_be_read_only_is_not_called() {
        let (check, write) = file();
        let settled = settle_with(check, write, text("one\n"), true, ToolRules::new()).await;
        settled.is_unknown("does not know that `find` is read-only; ToolRules::read_only would say so");
        assert!(settled.reads.is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn a_write_without_its_values_identifies_nothing() {
        let (check, _) = file();
        let write = |arguments| tool("write_file", arguments);
        settle(check.clone(), write(json!({ "path": "/a" })), text("null"))
            .await
            .is_unknown("no value at `/content`");
        let null = write(json!({ "path": "/a", "content": null }));
        settle(check.clone(), null, Ok(json!({ "content": [{ "text": null }] })))
            .await
            .is_unknown("no value at");
        let settled = settle(check.clone(), write(json!({ "content": "x" })), text("x")).await;
        settled.is_unknown("no value at `/path`");
        assert!(settled.reads.is_empty());
        let bare = Request::new("tools/call", json!({ "name": "write_file" })).unwrap();
        settle(check, bare, text("x")).await.is_unknown("no value at `/path`");
    }

    #[tokio::test(start_paused = true)]
    async fn checks_of_several_tools_are_one_check() {
        let ((file, write_file), (add, write_add)) = (file(), add());
        let checks = file.or(add);
        settle(checks.clone(), write_file, text("one\n")).await.is_landed();
        settle(checks.clone(), write_add, structured(json!({ "items": [] }))).await.is_replayed();
        let settled = settle(checks.clone(), tool("pay", json!({})), text("")).await;
        settled.is_unknown("no check for this tool");
        assert!(settled.reads.is_empty());
        let other = Request::new("acme/pay", json!({ "name": "write_file" })).unwrap();
        settle(checks, other, text("")).await.is_unknown("no check for this method");
        settle(ReadBacks::from(self::file().0), tool("add", json!({})), text(""))
            .await
            .is_unknown("for this tool");
    }

    #[tokio::test(start_paused = true)]
    async fn the_result_of_what_landed_is_made_of_what_was_read() {
        let (check, write) = add();
        let check = check.landed_with(|written, found| {
            json!({ "token": written["items"][0]["token"], "id": found["structuredContent"]["items"][0]["id"] })
        });
        let found = structured(json!({ "items": [{ "token": "t-1", "id": 9 }] }));
        let settled = settle(check, write, found).await;
        assert_eq!(settled.result, Some(Ok(json!({ "token": "t-1", "id": 9 }))));
        assert_eq!((settled.verdict, settled.writes), (Some(VerdictKind::Landed), 1));
    }

    #[tokio::test(start_paused = true)]
    async fn a_resource_is_read_by_its_uri() {
        let check =
            read_back("note").by_resource("note://{/book}/{+/path}").json().some("/all", "", "/token");
        let write = tool("note", json!({ "book": "a/b ä", "path": "x/y z", "token": 5 }));
        let contents = |text: &str| Ok(json!({ "contents": [{ "uri": "note://", "text": text }] }));
        let settled = settle(check.clone(), write.clone(), contents(r#"{"all":[5]}"#)).await;
        settled.is_landed();
        assert_eq!(settled.reads, [json!({ "uri": "note://a%2Fb%20%C3%A4/x/y%20z" })]);
        settle(check.clone(), write.clone(), contents(r#"{"all":[]}"#)).await.is_replayed();
        let missing = Err(ServerError::new(-32002, "Resource not found"));
        settle(check.clone(), write.clone(), missing.clone()).await.is_unknown("the check failed");
        settle(check.absent_if_code(-32002), write, missing).await.is_replayed();
    }

    #[test]
    fn arguments_are_put_where_their_pointer_says() {
        let put_all = |puts: &[(&str, Value)]| {
            let mut value = json!({});
            puts.iter().try_for_each(|(to, what)| put(&mut value, to, what.clone())).map(|()| value)
        };
        let made = put_all(&[("/a/b", json!(1)), ("/a/c/0", json!(2)), ("/a/c/1/d~1e", json!(3))]);
        assert_eq!(made, Some(json!({ "a": { "b": 1, "c": [2, { "d/e": 3 }] } })));
        assert_eq!(put_all(&[("a", json!(1))]), None);
        assert_eq!(put_all(&[("", json!(1))]), None);
        assert_eq!(put_all(&[("/a", json!(1)), ("/a/b", json!(2))]), None);
        assert_eq!(put_all(&[("/a/0", json!(1)), ("/a/2", json!(2))]), None);
    }

    #[test]
    fn checks_say_what_they_are_and_are_shared_between_threads() {
        fn is_send_and_sync<T: Send + Sync + Clone + 'static>(_: &T) {}
        let (check, _) = add();
        is_send_and_sync(&check);
        is_send_and_sync(&check.clone().or(check.clone()));
        assert!(format!("{check:?}").contains("find"));
        let reading = read_back("a").by_tool("b");
        is_send_and_sync(&reading);
        assert!(format!("{reading:?}").contains('b'));
    }
}
