//! The messages: what we write, and what a line that we read says.

use std::{borrow::Cow, collections::BTreeMap, fmt, io::Write, str, sync::Arc};

use bytes::BytesMut;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, IgnoredAny},
    ser::Error as _,
};
use serde_json::{Map, Value, value::RawValue};

use super::route::Route;
use crate::{Call, CallContext, Deadline, Effect, ServerError};

/// MCP's stream of notifications, whose answer comes when it ends.
pub(super) const LISTEN: &str = "subscriptions/listen";

/// A JSON-RPC request: a method and its parameters as JSON text.
///
/// The text is shared, so that a clone costs two reference counts at most. A clone is a new call; the copy
/// that a layer makes for another attempt is not. The id that goes over the wire belongs to the connection
/// and is given when the request is written.
///
/// ```
/// use goaround::{Call, Effect, jsonrpc::Request};
///
/// let call = Request::new("orders/get", serde_json::json!({ "order": 7 }))?.read_only();
/// assert_eq!((call.method(), call.effect()), ("orders/get", Effect::ReadOnly));
/// # Ok::<_, serde_json::Error>(())
/// ```
pub struct Request {
    method: Cow<'static, str>,
    params: Option<Arc<RawValue>>,
    context: CallContext,
    route: Option<Arc<Route>>,
}

impl Clone for Request {
    fn clone(&self) -> Self {
        let (method, params, context) = (self.method.clone(), self.params.clone(), self.context.clone());
        Self { method, params, context, route: None }
    }
}

impl Request {
    /// A request of that method. Parameters must be a JSON object or array; those that serialize to `null`,
    /// such as `()`, are absent.
    ///
    /// MCP's `subscriptions/listen`, which is answered only when it ends, has no deadline unless it is given
    /// one.
    ///
    /// # Errors
    ///
    /// If the parameters cannot be serialized, or are of another kind.
    pub fn new(
        method: impl Into<Cow<'static, str>>,
        params: impl Serialize,
    ) -> Result<Self, serde_json::Error> {
        let params = one_line(serde_json::value::to_raw_value(&params)?)?;
        let params = match params.get().trim_start().as_bytes().first() {
            Some(b'{' | b'[') => Some(Arc::from(params)),
            Some(b'n') => None,
            _ => {
                return Err(serde_json::Error::custom(
                    "the parameters of a JSON-RPC request must be an object or an array",
                ));
            }
        };
        let method = method.into();
        let mut context = CallContext::new();
        if method == LISTEN {
            context.set_deadline(Deadline::Never);
        }
        Ok(Self { method, params, context, route: None })
    }

    /// MCP's `tools/call` of that tool. Arguments that are no object are none.
    ///
    /// ```
    /// use goaround::{Effect, jsonrpc::Request, mcp};
    /// use serde_json::json;
    ///
    /// let read = Request::tool("get_invoice", json!({ "id": 7 }));
    /// assert_eq!(read.method(), "tools/call");
    /// let rules = mcp::ToolRules::new().read_only(["get_invoice"]);
    /// assert_eq!(rules.classify(&read).unwrap().0, Effect::ReadOnly); // what no rule names is a write
    /// ```
    pub fn tool(name: impl Into<String>, arguments: Value) -> Self {
        let mut params = Map::new();
        params.insert("name".to_owned(), Value::String(name.into()));
        if arguments.is_object() {
            params.insert("arguments".to_owned(), arguments);
        }
        Self::new("tools/call", params).expect("a JSON object of JSON values")
    }

    /// The method.
    pub fn method(&self) -> &str {
        &self.method
    }

    /// The parameters, parsed; those that are absent as JSON's `null`.
    ///
    /// # Errors
    ///
    /// If they do not fit the type.
    pub fn params<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        parse_params(self.raw_params())
    }

    /// The parameters as JSON text, if there are any.
    pub fn raw_params(&self) -> Option<&RawValue> {
        self.params.as_deref()
    }

    /// The same request for another attempt of the same call.
    pub(crate) fn for_attempt(&self) -> Self {
        let (method, params, context) =
            (self.method.clone(), self.params.clone(), self.context.for_attempt());
        Self { method, params, context, route: self.route.clone() }
    }

    /// Sends the call's attempts that way, and notes there where they went.
    pub(crate) fn set_route(&mut self, route: Arc<Route>) {
        self.route = Some(route);
    }

    pub(super) fn route(&self) -> Option<&Route> {
        self.route.as_deref()
    }

    /// The parameters, to be kept.
    pub(crate) fn shared_params(&self) -> Option<Arc<RawValue>> {
        self.params.clone()
    }

    /// Puts other parameters, which must be one line of JSON, in place of its own.
    pub(crate) fn replace_params(&mut self, params: Option<Arc<RawValue>>) {
        self.params = params;
    }

    /// Puts a text into the parameters, at that path below `first`; objects that are missing are made. `false`
    /// if there is a value already or no place for one: then nothing has changed.
    pub(crate) fn insert_param(&mut self, first: &str, rest: &[String], value: &str) -> bool {
        let path: Vec<&str> = std::iter::once(first).chain(rest.iter().map(String::as_str)).collect();
        match insert(self.raw_params(), &path, value) {
            Some(params) => {
                self.params = Some(Arc::from(params));
                true
            }
            None => false,
        }
    }

    /// About how long its frame is.
    pub(super) fn size(&self) -> usize {
        48 + self.method.len() + self.raw_params().map_or(0, |params| params.get().len())
    }

    /// Writes the frame of the request, or, without an id, of the notification.
    pub(super) fn write(&self, id: Option<u64>, out: &mut Vec<u8>) {
        out.extend_from_slice(br#"{"jsonrpc":"2.0","#);
        if let Some(id) = id {
            // Writing to a `Vec` does not fail.
            let _ = write!(out, r#""id":{id},"#);
        }
        out.extend_from_slice(br#""method":"#);
        let _ = serde_json::to_writer(&mut *out, &self.method);
        if let Some(params) = &self.params {
            out.extend_from_slice(br#","params":"#);
            out.extend_from_slice(params.get().as_bytes());
        }
        out.extend_from_slice(b"}\n");
    }
}

impl Call for Request {
    fn method(&self) -> &str {
        &self.method
    }

    fn name(&self) -> Cow<'static, str> {
        self.method.clone()
    }

    fn effect(&self) -> Effect {
        self.context.effect().unwrap_or(Effect::Write)
    }

    fn context(&self) -> &CallContext {
        &self.context
    }

    fn context_mut(&mut self) -> &mut CallContext {
        &mut self.context
    }

    fn try_clone(&self) -> Option<Self> {
        Some(self.for_attempt())
    }

    fn replica(&self) -> Option<Self> {
        Some(self.for_attempt())
    }
}

impl fmt::Debug for Request {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the parameters: they do not belong in a log.
        f.debug_struct("Request")
            .field("method", &self.method)
            .field("context", &self.context)
            .finish_non_exhaustive()
    }
}

/// The result of a request, as JSON text.
#[derive(Clone)]
pub struct Response(Box<RawValue>);

impl Response {
    /// A result.
    ///
    /// # Errors
    ///
    /// If it cannot be serialized.
    pub fn new(result: impl Serialize) -> Result<Self, serde_json::Error> {
        Ok(Self(one_line(serde_json::value::to_raw_value(&result)?)?))
    }

    pub(super) fn null() -> Self {
        Self(RawValue::NULL.to_owned())
    }

    /// The result, parsed.
    ///
    /// # Errors
    ///
    /// If it does not fit the type.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(self.0.get())
    }

    /// The result as JSON text.
    pub fn raw(&self) -> &RawValue {
        &self.0
    }
}

impl fmt::Debug for Response {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the result: it does not belong in a log.
        f.debug_struct("Response").field("bytes", &self.0.get().len()).finish_non_exhaustive()
    }
}

pub(super) fn parse_params<T: DeserializeOwned>(params: Option<&RawValue>) -> Result<T, serde_json::Error> {
    serde_json::from_str(params.map_or("null", RawValue::get))
}

/// The same object with a text at that path, all else as it is written.
fn insert(object: Option<&RawValue>, path: &[&str], value: &str) -> Option<Box<RawValue>> {
    let object = object.map_or("null", RawValue::get);
    let Some((step, rest)) = path.split_first() else {
        return if object == "null" { serde_json::value::to_raw_value(value).ok() } else { None };
    };
    let members: Option<BTreeMap<Cow<'_, str>, &RawValue>> = serde_json::from_str(object).ok()?;
    let mut members = members.unwrap_or_default();
    let inner = insert(members.get(*step).copied(), rest, value)?;
    members.insert(Cow::Borrowed(step), &inner);
    serde_json::value::to_raw_value(&members).ok()
}

/// JSON text without line breaks, since those end a frame. In JSON they are insignificant: within a string
/// they are escaped.
fn one_line(json: Box<RawValue>) -> Result<Box<RawValue>, serde_json::Error> {
    if memchr::memchr2(b'\n', b'\r', json.get().as_bytes()).is_none() {
        return Ok(json);
    }
    RawValue::from_string(json.get().replace(['\n', '\r'], " "))
}

/// Writes the answer to a request of the peer; `id` is the peer's own, as JSON.
pub(super) fn write_answer(id: &str, answer: &Result<Response, ServerError>, out: &mut Vec<u8>) {
    // Writing to a `Vec` does not fail, and neither does serializing an error.
    let _ = write!(out, r#"{{"jsonrpc":"2.0","id":{id},"#);
    match answer {
        Ok(response) => {
            out.extend_from_slice(br#""result":"#);
            out.extend_from_slice(response.raw().get().as_bytes());
        }
        Err(error) => {
            out.extend_from_slice(br#""error":"#);
            let _ = serde_json::to_writer(&mut *out, error);
        }
    }
    out.extend_from_slice(b"}\n");
}

/// What a message from the peer says.
pub(super) enum Incoming<'a> {
    /// An answer to the request of ours with that id.
    Answer {
        id: u64,
        answer: Result<Response, ServerError>,
    },
    /// A request of the peer; the id is its own, as JSON.
    Request {
        id: &'a str,
        method: String,
        params: Option<&'a RawValue>,
    },
    Notification {
        method: String,
        params: Option<&'a RawValue>,
    },
}

/// Why a message says nothing to us. Without anything that the peer wrote.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Odd {
    NotUtf8,
    NotJson,
    EmptyBatch,
    /// Neither a request nor an answer, or both.
    Shape,
    /// An answer whose id cannot be one of ours, such as `null`.
    ForeignId,
}

#[derive(Deserialize)]
struct Wire<'a> {
    #[serde(borrow, default, deserialize_with = "present")]
    id: Option<&'a RawValue>,
    #[serde(default, deserialize_with = "present")]
    method: Option<String>,
    #[serde(borrow, default, deserialize_with = "present")]
    params: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    result: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "present")]
    error: Option<&'a RawValue>,
}

/// Keeps `null` apart from absence, as an `Option` by itself does not.
pub(crate) fn present<'de, D: Deserializer<'de>, T: Deserialize<'de>>(
    deserializer: D,
) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// The longest id of a peer's request that we keep.
const MAX_PEER_ID: usize = 1024;

impl<'a> Incoming<'a> {
    /// Reads a line that is one message.
    pub(super) fn of_line(line: &'a [u8]) -> Result<Self, Odd> {
        Self::parse(str::from_utf8(line).map_err(|_| Odd::NotUtf8)?)
    }

    fn parse(json: &'a str) -> Result<Self, Odd> {
        // A derived struct would also be read from an array.
        if !json.trim_start().starts_with('{') {
            return Err(Odd::NotJson);
        }
        let Wire { id, method, params, result, error } =
            serde_json::from_str(json).map_err(|_| Odd::NotJson)?;
        // Peers of the JSON-RPC 1.0 school write the absent one of the two as `null`.
        let error = error.filter(|error| error.get() != "null");
        let result = result.filter(|result| error.is_none() || result.get() != "null");
        let answer = match (method, result, error) {
            (Some(method), None, None) => {
                let Some(id) = id.map(RawValue::get) else {
                    return Ok(Incoming::Notification { method, params });
                };
                if id.len() > MAX_PEER_ID
                    || !id.starts_with(|c: char| c == '"' || c == '-' || c.is_ascii_digit())
                {
                    return Err(Odd::Shape);
                }
                return Ok(Incoming::Request { id, method, params });
            }
            (None, Some(result), None) => Ok(Response(result.to_owned())),
            (None, None, Some(error)) => Err(server_error(error)),
            _ => return Err(Odd::Shape),
        };
        let id = id.and_then(|id| own_id(id.get())).ok_or(Odd::ForeignId)?;
        Ok(Incoming::Answer { id, answer })
    }
}

/// The id of ours that this JSON is: a number as we write it, or that number as a string, since some peers
/// make strings of all ids.
pub(crate) fn own_id(json: &str) -> Option<u64> {
    let digits = json.strip_prefix('"').map_or(Some(json), |json| json.strip_suffix('"'))?;
    let canonical = match digits.as_bytes() {
        [b'0'] => true,
        [first, ..] => *first != b'0' && digits.bytes().all(|byte| byte.is_ascii_digit()),
        [] => false,
    };
    if canonical { digits.parse().ok() } else { None }
}

/// The server's error. One that is not as it should be is an answer all the same.
pub(crate) fn server_error(json: &RawValue) -> ServerError {
    let Ok(value) = serde_json::from_str::<serde_json::Value>(json.get()) else {
        return ServerError::new(0, "");
    };
    let serde_json::Value::Object(mut object) = value else {
        return ServerError::new(0, "").with_data(value);
    };
    let code = object.get("code").and_then(serde_json::Value::as_i64).unwrap_or(0);
    let message = match object.remove("message") {
        Some(serde_json::Value::String(message)) => message,
        _ => String::new(),
    };
    let error = ServerError::new(code, message);
    match object.remove("data") {
        Some(data) => error.with_data(data),
        None => error,
    }
}

/// A line that is an array: a batch of messages. It may be long, so that it is worked off in portions.
pub(crate) struct Batch {
    text: String,
    /// Where its first element begins, and the next one.
    begin: usize,
    at: usize,
    /// Whether all of it was looked at: half a batch is none.
    is_whole: bool,
}

impl Batch {
    /// How many messages are looked at before others have their turn: a line may hold millions.
    pub(crate) const PORTION: usize = 512;

    pub(crate) fn is_one(line: &[u8]) -> bool {
        line.iter().find(|byte| !is_blank(**byte)) == Some(&b'[')
    }

    /// That line, as far as it begins as one.
    pub(crate) fn new(line: BytesMut) -> Result<Self, Odd> {
        let text = String::from_utf8(line.into()).map_err(|_| Odd::NotUtf8)?;
        let Some(begin) = text.find('[').map(|at| at + 1) else { return Err(Odd::NotJson) };
        match text[begin..].trim_start_matches(BLANKS).strip_prefix(']') {
            Some(rest) if rest.trim_start_matches(BLANKS).is_empty() => Err(Odd::EmptyBatch),
            Some(_) => Err(Odd::NotJson),
            None => Ok(Self { text, begin, at: begin, is_whole: false }),
        }
    }

    /// Looks at no more elements than that, and hands on what they say; whether those were all.
    pub(super) fn read(
        &mut self,
        portion: &mut usize,
        mut each: impl FnMut(Result<Incoming<'_>, Odd>),
    ) -> bool {
        self.texts(portion, |text| each(text.and_then(Incoming::parse)))
    }

    /// The same, with the elements as they are written.
    pub(crate) fn texts(&mut self, portion: &mut usize, mut each: impl FnMut(Result<&str, Odd>)) -> bool {
        while *portion > 0 {
            *portion -= 1;
            let next = match self.is_whole {
                false => element::<IgnoredAny>(&self.text, self.at).map(|(_, next)| next),
                true => element::<&RawValue>(&self.text, self.at).map(|(message, next)| {
                    each(Ok(message.get()));
                    next
                }),
            };
            match next {
                Ok(Some(next)) => self.at = next,
                Ok(None) if self.is_whole => return true,
                Ok(None) => (self.at, self.is_whole) = (self.begin, true),
                Err(odd) => {
                    each(Err(odd));
                    return true;
                }
            }
        }
        false
    }
}

/// The element of an array that begins there, and where the next one does; `None` after the last.
fn element<'a, T: Deserialize<'a>>(text: &'a str, at: usize) -> Result<(T, Option<usize>), Odd> {
    let mut values = serde_json::Deserializer::from_str(&text[at..]).into_iter();
    let Some(Ok(value)) = values.next() else { return Err(Odd::NotJson) };
    let rest = text[at + values.byte_offset()..].trim_start_matches(BLANKS);
    if let Some(rest) = rest.strip_prefix(',') {
        return Ok((value, Some(text.len() - rest.len())));
    }
    match rest.strip_prefix(']') {
        Some(rest) if rest.trim_start_matches(BLANKS).is_empty() => Ok((value, None)),
        _ => Err(Odd::NotJson),
    }
}

/// What JSON allows between its tokens.
const BLANKS: [char; 4] = [' ', '\t', '\r', '\n'];

fn is_blank(byte: u8) -> bool {
    BLANKS.contains(&char::from(byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads a line as the connection does, in portions of that many messages.
    fn read_line(line: &[u8], portion: usize, mut each: impl FnMut(Result<Incoming<'_>, Odd>)) {
        if !Batch::is_one(line) {
            return each(Incoming::of_line(line));
        }
        match Batch::new(BytesMut::from(line)) {
            Ok(mut batch) => while !batch.read(&mut portion.clone(), &mut each) {},
            Err(odd) => each(Err(odd)),
        }
    }

    /// What a line says, in short.
    fn read(line: &str) -> Vec<String> {
        let said = [1, 2, usize::MAX].map(|portion| read_in_portions(line, portion));
        assert!(said.iter().all(|one| *one == said[0]), "{said:?}");
        let [said, ..] = said;
        said
    }

    fn read_in_portions(line: &str, portion: usize) -> Vec<String> {
        let mut said = Vec::new();
        read_line(line.as_bytes(), portion, |incoming| {
            said.push(match incoming {
                Ok(Incoming::Answer { id, answer: Ok(response) }) => format!("{id}={}", response.raw()),
                Ok(Incoming::Answer { id, answer: Err(error) }) => {
                    format!("{id}!{} {:?} {:?}", error.code, error.message, error.data)
                }
                Ok(Incoming::Request { id, method, .. }) => format!("{method}?{id}"),
                Ok(Incoming::Notification { method, .. }) => method,
                Err(odd) => format!("{odd:?}"),
            });
        });
        said
    }

    #[test]
    fn messages_are_what_their_keys_make_them() {
        for (line, said) in [
            (r#"{"id":7,"result":null}"#, "7=null"),
            (r#" {"id" : 7, "result" : {"id": 8} }"#, r#"7={"id": 8}"#),
            (r#"{"result":1,"id":"7"}"#, "7=1"),
            (r#"{"id":7,"result":1,"error":null}"#, "7=1"),
            (r#"{"id":7,"result":null,"error":null}"#, "7=null"),
            (r#"{"id":7,"error":{"code":-32000,"message":"m","data":null}}"#, r#"7!-32000 "m" Some(Null)"#),
            (r#"{"id":7,"result":null,"error":{"code":1,"message":"m"}}"#, r#"7!1 "m" None"#),
            (r#"{"id":7,"error":"boom"}"#, r#"7!0 "" Some(String("boom"))"#),
            (r#"{"id":"a","method":"m"}"#, r#"m?"a""#),
            (r#"{"id":1.5,"method":"m","params":{}}"#, "m?1.5"),
            (r#"{"method":"m"}"#, "m"),
        ] {
            assert_eq!(read(line), [said], "{line}");
        }
    }

    #[test]
    fn what_is_not_one_of_ours_is_odd() {
        for (line, odd) in [
            ("garbage", "NotJson"),
            ("7", "NotJson"),
            ("{}", "Shape"),
            (r#"{"id":7}"#, "Shape"),
            (r#"{"id":7,"error":null}"#, "Shape"),
            (r#"{"id":7,"result":1,"error":{"code":1,"message":""}}"#, "Shape"),
            (r#"{"id":7,"method":"m","result":1}"#, "Shape"),
            (r#"{"id":null,"method":"m"}"#, "Shape"),
            (r#"{"id":[7],"method":"m"}"#, "Shape"),
            (r#"{"method":null}"#, "NotJson"),
            (r#"{"id":7,"id":7,"result":1}"#, "NotJson"),
            (r#"{"id":7,"result":1,"result":2}"#, "NotJson"),
            (r#"{"id":7,"result":1}}"#, "NotJson"),
            (r#"{"result":1}"#, "ForeignId"),
            (r#"{"id":null,"error":{"code":1,"message":""}}"#, "ForeignId"),
            (r#"{"id":7.0,"result":1}"#, "ForeignId"),
            (r#"{"id":-7,"result":1}"#, "ForeignId"),
            (r#"{"id":7e0,"result":1}"#, "ForeignId"),
            (r#"{"id":"07","result":1}"#, "ForeignId"),
            (r#"{"id":" 7","result":1}"#, "ForeignId"),
            (r#"{"id":"+7","result":1}"#, "ForeignId"),
            (r#"{"id":"","result":1}"#, "ForeignId"),
            (r#"{"id":18446744073709551616,"result":1}"#, "ForeignId"),
            (r#"{"id":{"id":7},"result":1}"#, "ForeignId"),
            ("[]", "EmptyBatch"),
            ("[1,", "NotJson"),
            ("[1", "NotJson"),
            ("[1,]", "NotJson"),
            ("[,1]", "NotJson"),
            ("[1 1]", "NotJson"),
            ("[1}", "NotJson"),
            ("[1]]", "NotJson"),
            ("[] 1", "NotJson"),
            (" [ ] ", "EmptyBatch"),
            ("\u{feff}[1]", "NotJson"),
            ("\u{a0}[1]", "NotJson"),
            (r#"[{"id":7,"result":1}"#, "NotJson"),
            (r#"[{"id":7,"result":1}] {"id":8,"result":1}"#, "NotJson"),
            (r#"[{"id":7,"result":1}, garbage]"#, "NotJson"),
        ] {
            assert_eq!(read(line), [odd], "{line}");
        }
        for line in [&b"{\"id\":7,\"result\":\"\xff\"}"[..], b"[\"\xff\"]"] {
            let mut odd = None;
            read_line(line, 1, |incoming| odd = incoming.err());
            assert_eq!(odd, Some(Odd::NotUtf8));
        }
        let depth = if cfg!(miri) { 1_000 } else { 100_000 };
        let deep = "[".repeat(depth);
        assert_eq!(read(&deep), ["NotJson"]);
        let deep = format!(r#"{{"id":7,"error":{}{}}}"#, "[".repeat(depth), "]".repeat(depth));
        assert_eq!(read(&deep), [r#"7!0 "" None"#]);
        let long = format!(r#"{{"id":"{}","method":"m"}}"#, "x".repeat(2000));
        assert_eq!(read(&long), ["Shape"]);
    }

    #[test]
    fn a_batch_is_read_element_by_element() {
        let line = r#"[{"id":1,"result":[1]},[7,"m",null,null,null],{"method":"m"},3]"#;
        assert_eq!(read(line), ["1=[1]", "NotJson", "m", "NotJson"]);
        let line = " [ 1e3 ,\t{\"id\":1,\"result\":\"ä\"},true,\"]\" , {\"id\":2,\"result\":2} ] ";
        assert_eq!(read(line), ["NotJson", "1=\"ä\"", "NotJson", "NotJson", "2=2"]);
    }

    #[test]
    fn line_breaks_leave_parameters_and_results_and_strings_keep_theirs() {
        let raw: Box<RawValue> = serde_json::from_str("{\n\"a\":\r\n \"b\\nc\"}").unwrap();
        let request = Request::new("m", &raw).unwrap();
        let mut frame = Vec::new();
        request.write(Some(3), &mut frame);
        assert_eq!(
            String::from_utf8(frame).unwrap(),
            "{\"jsonrpc\":\"2.0\",\"id\":3,\"method\":\"m\",\"params\":{ \"a\":   \"b\\nc\"}}\n"
        );
        let mut frame = Vec::new();
        write_answer("\"x\"", &Ok(Response::new(&raw).unwrap()), &mut frame);
        assert_eq!(frame.iter().filter(|byte| **byte == b'\n').count(), 1);
    }

    #[test]
    fn parameters_are_structured_or_absent() {
        for absent in [serde_json::json!(null), serde_json::to_value(None::<u8>).unwrap()] {
            assert!(Request::new("m", absent).unwrap().raw_params().is_none());
        }
        assert!(Request::new("m", ()).unwrap().params::<()>().is_ok());
        for wrong in [serde_json::json!(1), serde_json::json!("x"), serde_json::json!(true)] {
            let error = Request::new("m", wrong).unwrap_err();
            assert!(error.to_string().contains("object or an array"));
        }
        let request = Request::new("m\n\"", [1]).unwrap();
        let mut frame = Vec::new();
        request.write(None, &mut frame);
        assert_eq!(frame, b"{\"jsonrpc\":\"2.0\",\"method\":\"m\\n\\\"\",\"params\":[1]}\n");
    }

    #[test]
    fn nothing_of_the_contents_is_in_a_debug_text() {
        let request = Request::new("m", ["secret"]).unwrap();
        let response = Response::new("secret").unwrap();
        assert!(!format!("{request:?}{response:?}").contains("secret"));
    }

    #[test]
    fn a_tools_call_has_its_arguments_if_they_are_an_object() {
        let name = "get_invoice".to_owned();
        let frame = |arguments| {
            let mut out = Vec::new();
            Request::tool(&*name, arguments).write(Some(1), &mut out);
            out
        };
        let out = frame(serde_json::json!({ "text": "a\nb" }));
        assert!(out.ends_with(b"\n") && memchr::memchr_iter(b'\n', &out).count() == 1);
        let sent: Value = serde_json::from_slice(&out).unwrap();
        let params = serde_json::json!({ "name": "get_invoice", "arguments": { "text": "a\nb" } });
        assert_eq!((&sent["method"], &sent["params"]), (&Value::from("tools/call"), &params));
        for none in [Value::Null, Value::from(1), serde_json::json!([1])] {
            let sent: Value = serde_json::from_slice(&frame(none)).unwrap();
            assert_eq!(sent["params"], serde_json::json!({ "name": "get_invoice" }));
        }
    }
}
