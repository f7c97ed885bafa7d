//! Idempotency keys: a server that keeps them tells a second copy of a write from another write.

use std::{fmt, sync::Arc, time::Duration};

use crate::{Call, CallError, jsonrpc};

/// Puts an idempotency key into each write.
///
/// The key is made once per logical call and is the same over all of its attempts: it is the text of the call's
/// [`EntryId`](super::ledger::EntryId), so that after a crash it can be had again from the ledger. A request
/// that has a value in that place already keeps it; its key is then the caller's own, and nothing here is
/// declared of it.
///
/// A key proves nothing by itself, since servers ignore what they do not know.
/// [`honoured_for`](KeyedWrites::honoured_for) declares that this server keeps it.
///
/// ```
/// use std::time::Duration;
/// use goaround::{CallError, WriteSafetyLayer, jsonrpc::{Request, Response}};
/// use goaround::write_safety::{KeyedAnswer, KeyedWrites};
///
/// // The tool has an argument for it, and its server keeps each key for a day:
/// let keyed = KeyedWrites::argument("/idempotency_key")
///     .honoured_for(Duration::from_secs(24 * 3600))
///     .answers(|answer: Result<&Response, &CallError>| {
///         let code = answer.err()?.answer()?.code;
///         (code == -32009).then_some(KeyedAnswer::Landed(None)) // "already exists"
///     });
/// let _layer = WriteSafetyLayer::<Request, Response>::refuse().keyed(keyed);
/// ```
pub struct KeyedWrites<Req, Res> {
    pub(super) put: Arc<PutKey<Req>>,
    pub(super) window: Option<Duration>,
    /// What is wrong with it.
    pub(super) wrong: Option<&'static str>,
    pub(super) answers: Option<Arc<ReadAnswer<Res>>>,
}

pub(super) type PutKey<Req> = dyn Fn(&mut Req, &str) -> bool + Send + Sync;
pub(super) type ReadAnswer<Res> = dyn Fn(Result<&Res, &CallError>) -> Option<KeyedAnswer<Res>> + Send + Sync;

/// What an answer to a write with our key says of that write.
#[derive(Debug)]
#[non_exhaustive]
pub enum KeyedAnswer<Res> {
    /// It was applied, by an earlier attempt ("already exists", "precondition failed"); with its response, if the
    /// answer holds it.
    Landed(Option<Res>),
    /// An earlier attempt is still being processed. After that time the write is replayed, if the server
    /// [keeps](KeyedWrites::honoured_for) its key, once; else the effect check is asked, if there is one.
    InFlight {
        /// When to ask.
        recheck_after: Duration,
    },
}

impl<Req, Res> KeyedWrites<Req, Res> {
    /// Puts keys by that function. It is called with each write, before its first attempt, and says whether it
    /// put the key: `false` where there is no place for it, or a key already. Such a write goes out as it is,
    /// and without a key's promises.
    pub fn new(put: impl Fn(&mut Req, &str) -> bool + Send + Sync + 'static) -> Self {
        Self { put: Arc::new(put), window: None, wrong: None, answers: None }
    }

    /// Declares that the server keeps each key for so long after it got it first, and applies a write whose key
    /// it keeps no second time, whether the first is applied or under way. A write in doubt is then replayed
    /// once without a check, by the fence `deduplicated`, as long as that time has not passed since it was first
    /// handed over; after that only a check can settle it. The time is over when either clock says so, the
    /// monotonic one, which stops while a laptop sleeps, or the wall's; a wall clock that was set back ends it
    /// too. (One that was set back by as much as the machine has slept meanwhile shows nothing.) It goes on while the
    /// call's deadline [stands still](Call::pause_while_asking); a copy that is still queued then is withdrawn. As with
    /// every replay,
    /// another write that was handed over since forbids it, unless
    /// [`conflict_key`](super::WriteSafetyLayer::conflict_key) or
    /// [`independent_writes`](super::WriteSafetyLayer::independent_writes) says that the two do not touch each other.
    ///
    /// Give less than the server's own time by as much as a message may take to it at most: a copy that was
    /// handed over in time and is held up on its way must still find the key.
    #[must_use]
    pub fn honoured_for(mut self, window: Duration) -> Self {
        self.window = Some(window);
        self
    }

    /// What an answer to our own key says. It is asked about each answer to a write with our key, a result or an
    /// error; `None` takes the answer as it is, and after an attempt in doubt it then keeps
    /// [`may_have_landed`](CallError::may_have_landed): "already exists" may be the answer to our own first
    /// attempt.
    #[must_use]
    pub fn answers(
        mut self,
        answers: impl Fn(Result<&Res, &CallError>) -> Option<KeyedAnswer<Res>> + Send + Sync + 'static,
    ) -> Self {
        self.answers = Some(Arc::new(answers));
        self
    }
}

impl<Req: TakesKeys, Res> KeyedWrites<Req, Res> {
    /// Puts the key into an argument of MCP's `tools/call`, by JSON pointer (RFC 6901) from `arguments`:
    /// `/idempotency_key`, `/options/key`. Objects on the way that are missing are made. Other methods get none,
    /// nor do calls that have a value there other than `null`.
    pub fn argument(pointer: impl Into<String>) -> Self {
        let path = parse_pointer(&pointer.into());
        let wrong = path.is_none().then_some(NO_POINTER);
        let keyed = Self::new(move |request: &mut Req, key| {
            request.method() == "tools/call"
                && path.as_ref().is_some_and(|path| request.put_key("arguments", path, key))
        });
        Self { wrong, ..keyed }
    }

    /// Puts the key into the parameters of every write, by JSON pointer (RFC 6901): `/key`.
    ///
    /// The SDK's typed requests have place for it in a tool's `/arguments` and in `/_meta` only; those that are
    /// written by hand have it everywhere.
    pub fn param(pointer: impl Into<String>) -> Self {
        let path = parse_pointer(&pointer.into());
        let wrong = path.is_none().then_some(NO_POINTER);
        let keyed = Self::new(move |request: &mut Req, key| match path.as_deref() {
            Some([first, rest @ ..]) => request.put_key(first, rest, key),
            _ => false,
        });
        Self { wrong, ..keyed }
    }

    /// Puts the key into `_meta` of every write's parameters, under that name, such as
    /// `example.org/idempotency-key` (MCP, "General fields: `_meta`"). Servers ignore names there that they do
    /// not know.
    pub fn meta(name: impl Into<String>) -> Self {
        let path = [name.into()];
        Self::new(move |request: &mut Req, key| request.put_key("_meta", &path, key))
    }
}

/// Requests that [`KeyedWrites`] knows places for keys in: [`jsonrpc::Request`], and `sdk::Request` with the feature
/// `rmcp`. For others there is [`KeyedWrites::new`].
pub trait TakesKeys: Call + sealed::Sealed {}

pub(crate) mod sealed {
    pub trait Sealed {
        /// Puts the key into the parameters, where the steps lead to, and says whether it did: there may be a value
        /// already, or something else than an object on the way. Then nothing is changed.
        fn put_key(&mut self, first: &str, rest: &[String], key: &str) -> bool;
    }
}

impl TakesKeys for jsonrpc::Request {}

impl sealed::Sealed for jsonrpc::Request {
    fn put_key(&mut self, first: &str, rest: &[String], key: &str) -> bool {
        self.insert_param(first, rest, key)
    }
}

const NO_POINTER: &str = "KeyedWrites: a JSON pointer begins with a slash, as in \"/idempotency_key\"";

/// The steps of a JSON pointer; `None` where it is not one, or names the whole.
fn parse_pointer(pointer: &str) -> Option<Vec<String>> {
    let steps = pointer.strip_prefix('/')?.split('/');
    Some(steps.map(|step| step.replace("~1", "/").replace("~0", "~")).collect())
}

impl<Req, Res> Clone for KeyedWrites<Req, Res> {
    fn clone(&self) -> Self {
        Self {
            put: Arc::clone(&self.put),
            window: self.window,
            wrong: self.wrong,
            answers: self.answers.clone(),
        }
    }
}

impl<Req, Res> fmt::Debug for KeyedWrites<Req, Res> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KeyedWrites")
            .field("honoured_for", &self.window)
            .field("answers", &self.answers.is_some())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json, value::RawValue};

    use super::*;
    use crate::jsonrpc::Request;

    fn put(
        keyed: &KeyedWrites<Request, jsonrpc::Response>,
        method: &'static str,
        params: Value,
    ) -> Option<Value> {
        let mut request = Request::new(method, params).unwrap();
        (keyed.put)(&mut request, "k1").then(|| request.params().unwrap())
    }

    #[test]
    fn a_key_goes_where_it_is_said_and_nothing_else_changes() {
        let argument = KeyedWrites::argument("/a~1b/key");
        // A number is not rounded, nor written another way.
        let call = r#"{"name":"pay","arguments":{"amount":1.10e400,"a/b":{"x":1}}}"#;
        let mut request =
            Request::new("tools/call", RawValue::from_string(call.to_owned()).unwrap()).unwrap();
        assert!((argument.put)(&mut request, "k1"));
        let expected = r#"{"arguments":{"a/b":{"key":"k1","x":1},"amount":1.10e400},"name":"pay"}"#;
        assert_eq!(request.raw_params().unwrap().get(), expected);
        let made = put(&argument, "tools/call", json!({ "name": "pay" })).unwrap();
        assert_eq!(made, json!({ "name": "pay", "arguments": { "a/b": { "key": "k1" } } }));
        assert_eq!(put(&argument, "prompts/get", json!({ "name": "pay" })), None);

        let meta = KeyedWrites::meta("example.org/key");
        let meta_of =
            |params| put(&meta, "doc/put", params).map(|params| params["_meta"]["example.org/key"].clone());
        assert_eq!(meta_of(json!({ "_meta": { "progressToken": 1 } })), Some(json!("k1")));
        assert_eq!(meta_of(json!(null)), Some(json!("k1")));
        assert_eq!(put(&KeyedWrites::param("/key"), "doc/put", json!({})), Some(json!({ "key": "k1" })));
    }

    #[test]
    fn a_key_is_not_put_where_there_is_one_or_no_place_for_it() {
        let argument = KeyedWrites::argument("/key");
        for arguments in [json!({ "key": "mine" }), json!([1]), json!("text")] {
            assert_eq!(put(&argument, "tools/call", json!({ "arguments": arguments })), None);
        }
        let null = put(&argument, "tools/call", json!({ "arguments": { "key": null } })).unwrap();
        assert_eq!(null["arguments"]["key"], "k1");
        assert_eq!(put(&KeyedWrites::meta("key"), "doc/put", json!([1])), None);
        for pointer in ["", "key"] {
            assert_eq!(put(&KeyedWrites::argument(pointer), "tools/call", json!({})), None);
        }
    }
}
