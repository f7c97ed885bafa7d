//! The SDK's request, with the call's context beside it.

#![expect(deprecated, reason = "what versions up to 2025-11-25 have is served as long as servers have it")]

use std::{borrow::Cow, fmt, ops::Deref};

use rmcp::model::{
    CallToolRequest, CallToolRequestParams, ClientRequest, CompleteRequest, CompleteRequestParams, GetMeta,
    GetPromptRequest, GetPromptRequestParams, JsonObject, ListPromptsRequest, ListResourceTemplatesRequest,
    ListResourcesRequest, ListToolsRequest, PaginatedRequestParams, PingRequest, ReadResourceRequest,
    ReadResourceRequestParams, SubscribeRequest, SubscribeRequestParams, UnsubscribeRequest,
    UnsubscribeRequestParams,
};
use serde_json::Value;

use crate::{
    Call, CallContext, Effect,
    mcp::{self, LISTS, METHODS, Params},
    write_safety::{TakesKeys, keyed::sealed::Sealed},
};

/// A request of the SDK as a [`Call`]. It derefs to the [`ClientRequest`] that it holds, and is made of one, or of
/// the parameters of a request by `into()`.
///
/// A clone is a new call. The clone is a deep one, as the SDK's own.
///
/// ```
/// use goaround::{Call, Effect, sdk::Request};
/// use rmcp::model::{ClientRequest, ReadResourceRequestParams};
/// use serde_json::json;
///
/// let write = Request::tool("create_invoice", json!({ "number": "2026-17" }));
/// assert_eq!((write.method(), write.effect()), ("tools/call", Effect::Write));
/// assert_eq!(write.arguments().unwrap()["number"], "2026-17");
///
/// let read = Request::from(ReadResourceRequestParams::new("file:///a"));
/// assert_eq!(read.effect(), Effect::ReadOnly);
/// assert!(matches!(*read, ClientRequest::ReadResourceRequest(_)));
/// ```
#[derive(Clone)]
pub struct Request {
    request: ClientRequest,
    context: CallContext,
}

impl Request {
    /// That request of the SDK.
    pub fn new(request: impl Into<ClientRequest>) -> Self {
        Self { request: request.into(), context: CallContext::new() }
    }

    /// A call of that tool. Arguments that are no object are none.
    pub fn tool(name: impl Into<Cow<'static, str>>, arguments: Value) -> Self {
        let mut params = CallToolRequestParams::new(name);
        if let Value::Object(arguments) = arguments {
            params = params.with_arguments(arguments);
        }
        params.into()
    }

    /// A page of the server's tools; the first one without parameters.
    pub fn list_tools(params: Option<PaginatedRequestParams>) -> Self {
        Self::new(list::<ListToolsRequest>(params))
    }

    /// A page of the server's prompts.
    pub fn list_prompts(params: Option<PaginatedRequestParams>) -> Self {
        Self::new(list::<ListPromptsRequest>(params))
    }

    /// A page of the server's resources.
    pub fn list_resources(params: Option<PaginatedRequestParams>) -> Self {
        Self::new(list::<ListResourcesRequest>(params))
    }

    /// A page of the server's templates of resources.
    pub fn list_resource_templates(params: Option<PaginatedRequestParams>) -> Self {
        Self::new(list::<ListResourceTemplatesRequest>(params))
    }

    /// A `ping`, which versions up to 2025-11-25 have.
    pub fn ping() -> Self {
        Self::new(PingRequest::default())
    }

    /// The SDK's request.
    pub fn into_inner(self) -> ClientRequest {
        self.request
    }

    /// The tool that is called, also by a request that is written by hand; `None` for other methods.
    pub fn tool_name(&self) -> Option<&str> {
        match &self.request {
            ClientRequest::CallToolRequest(call) => Some(&call.params.name),
            _ => self.by_hand(&["tools/call"], "name")?.as_str(),
        }
    }

    /// The arguments for the tool; `None` without any, and for other methods.
    pub fn arguments(&self) -> Option<&JsonObject> {
        match &self.request {
            ClientRequest::CallToolRequest(call) => call.params.arguments.as_ref(),
            _ => self.by_hand(&["tools/call"], "arguments")?.as_object(),
        }
    }

    /// What decides about the call's effect in its parameters.
    pub(super) fn params(&self) -> Params {
        let carries_on = match &self.request {
            ClientRequest::CallToolRequest(r) => {
                r.params.input_responses.is_some() || r.params.request_state.is_some()
            }
            ClientRequest::GetPromptRequest(r) => {
                r.params.input_responses.is_some() || r.params.request_state.is_some()
            }
            ClientRequest::ReadResourceRequest(r) => {
                r.params.input_responses.is_some() || r.params.request_state.is_some()
            }
            // Written by hand: nobody knows what is in it.
            ClientRequest::CustomRequest(r) => match &r.params {
                None => false,
                Some(Value::Object(params)) => {
                    params.contains_key("inputResponses") || params.contains_key("requestState")
                }
                Some(_) => true,
            },
            _ => false,
        };
        Params { name: self.tool_name().map(str::to_owned), carries_on }
    }

    /// The page of a list that is asked for, if one is.
    pub(super) fn cursor(&self) -> Option<&str> {
        let params = match &self.request {
            ClientRequest::ListToolsRequest(r) => &r.params,
            ClientRequest::ListPromptsRequest(r) => &r.params,
            ClientRequest::ListResourcesRequest(r) => &r.params,
            ClientRequest::ListResourceTemplatesRequest(r) => &r.params,
            _ => return self.by_hand(&LISTS, "cursor")?.as_str(),
        };
        params.as_ref()?.cursor.as_deref()
    }

    /// The resource whose changes the server is to tell.
    pub(super) fn subscribes_to(&self) -> Option<&str> {
        match &self.request {
            ClientRequest::SubscribeRequest(r) => Some(&r.params.uri),
            _ => self.by_hand(&["resources/subscribe"], "uri")?.as_str(),
        }
    }

    /// The resource whose changes it is not to tell any more.
    pub(super) fn unsubscribes_from(&self) -> Option<&str> {
        match &self.request {
            ClientRequest::UnsubscribeRequest(r) => Some(&r.params.uri),
            _ => self.by_hand(&["resources/unsubscribe"], "uri")?.as_str(),
        }
    }

    /// That parameter of a request of one of these methods that is written by hand.
    fn by_hand(&self, methods: &[&str], name: &str) -> Option<&Value> {
        match &self.request {
            ClientRequest::CustomRequest(r) if methods.contains(&&*r.method) => r.params.as_ref()?.get(name),
            _ => None,
        }
    }

    /// The same request with another context.
    pub(super) fn with_context(&self, context: CallContext) -> Self {
        Self { request: self.request.clone(), context }
    }
}

/// A list's request with these parameters.
fn list<R: List>(params: Option<PaginatedRequestParams>) -> ClientRequest {
    R::page(params)
}

trait List {
    fn page(params: Option<PaginatedRequestParams>) -> ClientRequest;
}

macro_rules! lists {
    ($($request:ident)*) => { $(
        impl List for $request {
            fn page(params: Option<PaginatedRequestParams>) -> ClientRequest {
                let mut request = $request::default();
                request.params = params;
                request.into()
            }
        }
    )* };
}

lists!(ListToolsRequest ListPromptsRequest ListResourcesRequest ListResourceTemplatesRequest);

impl Call for Request {
    fn method(&self) -> &str {
        self.request.method()
    }

    fn name(&self) -> Cow<'static, str> {
        match METHODS.iter().find(|method| method.name == self.method()) {
            Some(method) => Cow::Borrowed(method.name),
            None => Cow::Owned(self.method().to_owned()),
        }
    }

    fn effect(&self) -> Effect {
        match mcp::effect(self.method()) {
            Some(effect) if !self.params().carries_on => effect,
            _ => Effect::Write,
        }
    }

    fn context(&self) -> &CallContext {
        &self.context
    }

    fn context_mut(&mut self) -> &mut CallContext {
        &mut self.context
    }

    fn try_clone(&self) -> Option<Self> {
        Some(self.clone())
    }
}

// ===== idempotency keys =====

impl TakesKeys for Request {}

impl Sealed for Request {
    fn put_key(&mut self, first: &str, rest: &[String], key: &str) -> bool {
        match &mut self.request {
            _ if first == "_meta" => self.put_key_into_meta(rest, key),
            ClientRequest::CallToolRequest(call) if first == "arguments" && !rest.is_empty() => {
                insert(call.params.arguments.get_or_insert_default(), rest, key)
            }
            ClientRequest::CustomRequest(custom) => {
                let params = custom.params.get_or_insert_default();
                if params.is_null() {
                    *params = Value::Object(JsonObject::new());
                }
                let path: Vec<_> = std::iter::once(first.to_owned()).chain(rest.iter().cloned()).collect();
                params.as_object_mut().is_some_and(|params| insert(params, &path, key))
            }
            _ => false,
        }
    }
}

impl Request {
    fn put_key_into_meta(&mut self, path: &[String], key: &str) -> bool {
        let Some(name) = path.first() else { return false };
        // These are written by the SDK, over whatever there is.
        if name == "progressToken" || name.starts_with("io.modelcontextprotocol/") {
            return false;
        }
        if let ClientRequest::CustomRequest(custom) = &self.request
            && !matches!(custom.params, None | Some(Value::Null | Value::Object(_)))
        {
            return false;
        }
        // It may be in the parameters and beside them, and the SDK makes one of the two.
        let Ok(mut whole) = serde_json::to_value(&self.request) else { return false };
        let mut meta = match whole.pointer_mut("/params/_meta").map(Value::take) {
            None | Some(Value::Null) => JsonObject::new(),
            Some(Value::Object(meta)) => meta,
            Some(_) => return false,
        };
        if !insert(&mut meta, path, key) {
            return false;
        }
        let value = meta.remove(name).unwrap_or_default();
        self.request.get_meta_mut().insert(name.clone(), value);
        true
    }
}

/// Puts the key there, unless there is a value already, or something else than an object on the way.
fn insert(object: &mut JsonObject, path: &[String], key: &str) -> bool {
    let Some((step, rest)) = path.split_first() else { return false };
    match object.get_mut(step) {
        None | Some(Value::Null) => {
            let nested = rest.iter().rev().fold(Value::from(key), |inner, step| {
                Value::Object(JsonObject::from_iter([(step.clone(), inner)]))
            });
            object.insert(step.clone(), nested);
            true
        }
        Some(Value::Object(inner)) => insert(inner, rest, key),
        Some(_) => false,
    }
}

impl Deref for Request {
    type Target = ClientRequest;

    fn deref(&self) -> &ClientRequest {
        &self.request
    }
}

impl From<ClientRequest> for Request {
    fn from(request: ClientRequest) -> Self {
        Self { request, context: CallContext::new() }
    }
}

impl From<Request> for ClientRequest {
    fn from(request: Request) -> Self {
        request.request
    }
}

macro_rules! of_params {
    ($($params:ident => $request:ident)*) => { $(
        impl From<$params> for Request {
            fn from(params: $params) -> Self {
                Self::new($request::new(params))
            }
        }
    )* };
}

of_params! {
    CallToolRequestParams => CallToolRequest
    ReadResourceRequestParams => ReadResourceRequest
    GetPromptRequestParams => GetPromptRequest
    CompleteRequestParams => CompleteRequest
    SubscribeRequestParams => SubscribeRequest
    UnsubscribeRequestParams => UnsubscribeRequest
}

/// The call of a tool, and the page of a list, as the SDK writes them.
impl From<CallToolRequest> for Request {
    fn from(request: CallToolRequest) -> Self {
        Self::new(request)
    }
}

impl fmt::Debug for Request {
    /// Without its parameters, which may hold secrets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Request").field("method", &self.method()).field("context", &self.context).finish()
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::{CustomRequest, RequestMetaObject};
    use serde_json::json;

    use super::*;

    fn path(steps: &[&str]) -> Vec<String> {
        steps.iter().map(|step| (*step).to_owned()).collect()
    }

    /// The parameters as they are sent, with a key there; `None` where none was put, which changes nothing.
    fn put(mut request: Request, first: &str, rest: &[&str]) -> Option<Value> {
        let before = serde_json::to_value(&*request).unwrap();
        let put = request.put_key(first, &path(rest), "k1");
        let after = serde_json::to_value(&*request).unwrap();
        if !put {
            assert_eq!(before, after);
        }
        put.then(|| after["params"].clone())
    }

    fn custom(params: Option<Value>) -> Request {
        Request::new(CustomRequest::new("acme/pay", params))
    }

    #[test]
    fn a_key_goes_where_it_is_said_and_nothing_else_changes() {
        let tool = |arguments| Request::tool("pay", arguments);
        assert_eq!(
            put(tool(json!({ "amount": 7 })), "arguments", &["key"]),
            Some(json!({ "name": "pay", "arguments": { "amount": 7, "key": "k1" } }))
        );
        assert_eq!(
            put(tool(json!({ "a": { "x": 1 } })), "arguments", &["a", "b", "key"]),
            Some(json!({ "name": "pay", "arguments": { "a": { "x": 1, "b": { "key": "k1" } } } }))
        );
        assert_eq!(
            put(tool(json!(null)), "arguments", &["key"]),
            Some(json!({ "name": "pay", "arguments": { "key": "k1" } }))
        );
        assert_eq!(put(custom(None), "key", &[]), Some(json!({ "key": "k1" })));
        assert_eq!(
            put(custom(Some(json!({ "a": 1 }))), "b", &["key"]),
            Some(json!({ "a": 1, "b": { "key": "k1" } }))
        );

        let in_meta = |request| put(request, "_meta", &["example.org/key"]);
        assert_eq!(
            in_meta(tool(json!({ "amount": 7 }))),
            Some(json!({
                "name": "pay", "arguments": { "amount": 7 }, "_meta": { "example.org/key": "k1" },
            }))
        );
        let mut params = CallToolRequestParams::new("pay");
        let mut meta = RequestMetaObject::new();
        meta.insert("trace".into(), json!(1));
        params.meta = Some(meta);
        assert_eq!(
            in_meta(params.into()),
            Some(json!({ "name": "pay", "_meta": { "trace": 1, "example.org/key": "k1" } }))
        );
        assert_eq!(in_meta(custom(None)), Some(json!({ "_meta": { "example.org/key": "k1" } })));
        assert_eq!(in_meta(Request::ping()), Some(json!({ "_meta": { "example.org/key": "k1" } })));
    }

    #[test]
    fn a_key_is_not_put_where_there_is_one_or_no_place_for_it() {
        let tool = |arguments| Request::tool("pay", arguments);
        assert_eq!(put(tool(json!({ "key": "mine" })), "arguments", &["key"]), None);
        assert_eq!(put(tool(json!({ "a": [1] })), "arguments", &["a", "key"]), None);
        assert_eq!(put(tool(json!({})), "arguments", &[]), None);
        assert_eq!(put(tool(json!({})), "key", &[]), None);
        assert_eq!(put(GetPromptRequestParams::new("a").into(), "arguments", &["key"]), None);
        assert_eq!(put(custom(Some(json!({ "key": 1 }))), "key", &[]), None);
        assert_eq!(put(custom(Some(json!([1]))), "key", &[]), None);
        assert_eq!(put(custom(Some(json!([1]))), "_meta", &["key"]), None);
        let mut params = CallToolRequestParams::new("pay");
        let mut meta = RequestMetaObject::new();
        meta.insert("key".into(), json!("mine"));
        params.meta = Some(meta);
        assert_eq!(put(params.into(), "_meta", &["key"]), None);
        for name in ["progressToken", "io.modelcontextprotocol/clientInfo"] {
            assert_eq!(put(tool(json!({})), "_meta", &[name]), None, "the SDK writes it");
        }
        assert_eq!(put(tool(json!({})), "_meta", &[]), None);
    }
}
