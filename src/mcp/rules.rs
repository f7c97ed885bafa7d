//! What a call may do, by the protocol's own definition and by the caller's rules for tools.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::Arc,
};

use serde::{
    Deserializer,
    de::{IgnoredAny, MapAccess, Visitor},
};

use crate::{Basis, Call, CallContext, Effect, jsonrpc::Request};

/// What the caller says of a server's tools. What decides about a tool, in this order:
///
/// 1. a rule that names it: [`read_only`](Self::read_only), [`idempotent`](Self::idempotent),
///    [`write`](Self::write). A tool that two rules name has the stronger effect of the two: a contradiction
///    never turns a write into something that is repeated.
/// 2. the server's own annotation, if the caller trusts it: [`trust_annotations`](Self::trust_annotations),
///    [`trust_annotations_of`](Self::trust_annotations_of).
/// 3. nothing: it is a write.
///
/// ```
/// use goaround::{Effect, jsonrpc::Request, mcp::ToolRules};
/// use serde_json::json;
///
/// let rules = ToolRules::new().read_only(["get_invoice", "list_invoices"]).idempotent(["set_label"]);
///
/// let read = Request::tool("get_invoice", json!({ "id": 7 }));
/// assert_eq!(rules.classify(&read).unwrap().0, Effect::ReadOnly);
/// let other = Request::tool("create_invoice", json!({ "customer": 7 }));
/// assert!(rules.classify(&other).is_none()); // stays what it is: a write
/// ```
#[derive(Clone, Debug, Default)]
pub struct ToolRules {
    // Shared: a stack and its connector hold the same rules.
    by_name: Arc<HashMap<Box<str>, Effect>>,
    trust: Trust,
}

/// Whose annotations count.
#[derive(Clone, Debug, Default)]
enum Trust {
    #[default]
    None,
    Of(Arc<HashSet<Box<str>>>),
    All,
}

impl ToolRules {
    /// No rules: every tool is a write.
    pub fn new() -> Self {
        Self::default()
    }

    /// These tools change nothing at the server, or anywhere else: calls of them are repeated.
    #[must_use]
    pub fn read_only<I: IntoIterator<Item: Into<String>>>(self, tools: I) -> Self {
        self.rule(tools, Effect::ReadOnly)
    }

    /// A second call of these tools with the same arguments changes nothing more. That makes them writes still:
    /// between two copies of a call may lie somebody else's change.
    #[must_use]
    pub fn idempotent<I: IntoIterator<Item: Into<String>>>(self, tools: I) -> Self {
        self.rule(tools, Effect::Idempotent)
    }

    /// These tools are writes, as they are without a rule, whatever another rule says.
    #[must_use]
    pub fn write<I: IntoIterator<Item: Into<String>>>(self, tools: I) -> Self {
        self.rule(tools, Effect::Write)
    }

    /// Trusts what the server says of its tools, for those that no rule names.
    ///
    /// The protocol calls annotations hints, and says that they are not to be relied on unless they come from a
    /// trusted server: a server that says `readOnlyHint` of a tool that pays makes this crate pay twice.
    ///
    /// `readOnlyHint` makes a tool read-only, `idempotentHint` idempotent; everything else is a write, and so is
    /// a tool whose hints contradict each other (read-only and destructive), are no booleans, or differ between
    /// two entries of the same name. The tools are listed when a connection begins, before any call runs on it,
    /// and again when the server says that the list has changed; from that word on until the list is there all are
    /// writes, and so they are on a list that cannot be read.
    /// As long as nothing has been connected, nothing is known: the first call of all is a write, unless a rule
    /// names its tool.
    #[must_use]
    pub fn trust_annotations(mut self) -> Self {
        self.trust = Trust::All;
        self
    }

    /// The same for these tools only.
    #[must_use]
    pub fn trust_annotations_of<I: IntoIterator<Item: Into<String>>>(mut self, tools: I) -> Self {
        let tools = tools.into_iter().map(|tool| tool.into().into_boxed_str());
        match &mut self.trust {
            Trust::All => {}
            Trust::Of(trusted) => Arc::make_mut(trusted).extend(tools),
            Trust::None => self.trust = Trust::Of(Arc::new(tools.collect())),
        }
        self
    }

    /// Whether the server's list of tools is of any use.
    pub(crate) fn asks_the_server(&self) -> bool {
        !matches!(self.trust, Trust::None)
    }

    /// Whether that tool is a write whatever its server says.
    pub(crate) fn are_known_to_say_write(&self, tool: &str) -> bool {
        match self.by_name.get(tool) {
            Some(effect) => effect.is_write(),
            None => !self.trusts(tool),
        }
    }

    fn trusts(&self, tool: &str) -> bool {
        match &self.trust {
            Trust::None => false,
            Trust::Of(tools) => tools.contains(tool),
            Trust::All => true,
        }
    }

    fn rule<I: IntoIterator<Item: Into<String>>>(mut self, tools: I, effect: Effect) -> Self {
        let by_name = Arc::make_mut(&mut self.by_name);
        for tool in tools {
            let rule = by_name.entry(tool.into().into_boxed_str()).or_insert(effect);
            if strength(effect) > strength(*rule) {
                *rule = effect;
            }
        }
        self
    }

    /// What that request may do, and who says so; `None` where nobody does, so that its own effect holds
    /// (a write, if the caller did not stamp it).
    ///
    /// - What the caller stamped on the request itself holds.
    /// - A `tools/call` goes by these rules, every other method by the protocol ([`effect`](super::effect)).
    /// - A `tools/call`, `prompts/get` or `resources/read` that carries on an earlier one, with
    ///   `inputResponses` or `requestState` (2026-07-28), is a write in any case: its state may be good for
    ///   one use only, and what was asked of the user must not be answered twice.
    ///
    /// Annotations are not in the rules; the connector's own classifier, which the
    /// [`Stack`](crate::Stack) takes from it, knows them.
    pub fn classify(&self, request: &Request) -> Option<(Effect, Basis)> {
        self.classify_by(request, |_| None)
    }

    /// The same, with what the server's annotation makes of a tool.
    pub(super) fn classify_by(
        &self,
        request: &Request,
        annotated: impl FnOnce(&str) -> Option<Effect>,
    ) -> Option<(Effect, Basis)> {
        self.decide(request.context(), request.method(), || Params::of(request), annotated)
    }

    /// The same of any request, by what its context and its parameters say.
    pub(crate) fn decide(
        &self,
        context: &CallContext,
        method: &str,
        params: impl FnOnce() -> Params,
        annotated: impl FnOnce(&str) -> Option<Effect>,
    ) -> Option<(Effect, Basis)> {
        let stamp = context.effect().filter(|_| context.basis() == Basis::Caller);
        let is_tool = method == "tools/call";

        if stamp.is_some_and(|effect| effect == Effect::Write) || is_tool && self.decides_nothing(stamp) {
            return None;
        }
        let params = match method {
            "tools/call" | "prompts/get" | "resources/read" => params(),
            _ => Params::default(),
        };
        if params.carries_on {
            return Some((Effect::Write, Basis::Protocol));
        }
        match stamp {
            Some(_) => None,
            None if is_tool => {
                let tool = params.name.as_deref()?;
                if let Some(effect) = self.by_name.get(tool) {
                    return Some((*effect, Basis::Caller));
                }
                let effect = annotated(tool).filter(|_| self.trusts(tool))?;
                Some((effect, Basis::TrustedAnnotation))
            }
            None => super::effect(method).map(|effect| (effect, Basis::Protocol)),
        }
    }

    /// Whether a tool's parameters need not be looked at: without rules it is a write.
    fn decides_nothing(&self, stamp: Option<Effect>) -> bool {
        stamp.is_none() && self.by_name.is_empty() && !self.asks_the_server()
    }
}

/// The tool that a `tools/call` names.
pub(super) fn tool_of(request: &Request) -> Option<String> {
    Params::of(request).name
}

/// How much a repetition may do; of two words the stronger counts.
pub(super) const fn strength(effect: Effect) -> u8 {
    match effect {
        Effect::ReadOnly => 0,
        Effect::Idempotent => 1,
        Effect::Write => 2,
    }
}

/// What decides in the parameters of a request. The rest is skipped and not built.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct Params {
    pub(crate) name: Option<String>,
    pub(crate) carries_on: bool,
}

impl Params {
    fn of(request: &Request) -> Self {
        let Some(json) = request.raw_params() else { return Self::default() };
        Self::parse(json.get())
    }

    /// Parameters that cannot be read name no tool, and may carry on anything.
    fn parse(json: &str) -> Self {
        let mut deserializer = serde_json::Deserializer::from_str(json);
        let parsed = deserializer.deserialize_map(ParamsVisitor);
        parsed.unwrap_or(Self { name: None, carries_on: true })
    }
}

struct ParamsVisitor;

impl<'de> Visitor<'de> for ParamsVisitor {
    type Value = Params;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Params, A::Error> {
        let mut params = Params::default();
        let mut named = false;
        while let Some(key) = map.next_key::<Key>()? {
            match key {
                // Of two names nobody knows which one the server takes.
                Key::Name if named => return Err(serde::de::Error::duplicate_field("name")),
                Key::Name => {
                    params.name = Some(map.next_value()?);
                    named = true;
                }
                Key::CarriesOn => {
                    map.next_value::<IgnoredAny>()?;
                    params.carries_on = true;
                }
                Key::Other => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(params)
    }
}

enum Key {
    Name,
    CarriesOn,
    Other,
}

impl<'de> serde::Deserialize<'de> for Key {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct KeyVisitor;

        impl Visitor<'_> for KeyVisitor {
            type Value = Key;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a name")
            }

            fn visit_str<E>(self, key: &str) -> Result<Key, E> {
                Ok(match key {
                    "name" => Key::Name,
                    "inputResponses" | "requestState" => Key::CarriesOn,
                    _ => Key::Other,
                })
            }
        }

        deserializer.deserialize_identifier(KeyVisitor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn rules() -> ToolRules {
        ToolRules::new().read_only(["get", "both"]).idempotent(["set"]).write(["both", "pay"])
    }

    fn call(method: &'static str, params: Value) -> Request {
        Request::new(method, params).unwrap()
    }

    fn tool(name: &str) -> Request {
        call("tools/call", json!({ "arguments": { "name": "x" }, "name": name }))
    }

    #[test]
    fn methods_go_by_the_protocol_and_tools_by_the_rules() {
        let rules = rules();
        let classify = |request| rules.classify(&request);
        let own = |effect| Some((effect, Basis::Protocol));
        assert_eq!(classify(call("tools/list", json!({}))), own(Effect::ReadOnly));
        assert_eq!(classify(call("prompts/get", json!({ "name": "get" }))), own(Effect::ReadOnly));
        assert_eq!(classify(call("tasks/cancel", json!({}))), own(Effect::Idempotent));
        assert_eq!(classify(call("initialize", json!({}))), own(Effect::Write));
        assert_eq!(classify(call("acme/pay", json!({}))), None);

        let said = |effect| Some((effect, Basis::Caller));
        assert_eq!(classify(tool("get")), said(Effect::ReadOnly));
        assert_eq!(classify(tool("set")), said(Effect::Idempotent));
        assert_eq!(classify(tool("pay")), said(Effect::Write));
        assert_eq!(classify(tool("both")), said(Effect::Write), "a contradiction fails closed");
        assert_eq!(classify(tool("unknown")), None);
        assert_eq!(ToolRules::new().classify(&tool("get")), None);
    }

    #[test]
    fn a_rule_wins_over_an_annotation_and_an_annotation_counts_where_it_is_trusted() {
        let annotated = |tool: &str| match tool {
            "get" | "pay" | "list" => Some(Effect::ReadOnly),
            "label" => Some(Effect::Idempotent),
            "drop" => Some(Effect::Write),
            _ => None,
        };
        let classify = |rules: &ToolRules, name| rules.classify_by(&tool(name), annotated);
        let trusted = |effect| Some((effect, Basis::TrustedAnnotation));
        let all = rules().trust_annotations().trust_annotations_of(["list"]);
        assert_eq!(classify(&all, "pay"), Some((Effect::Write, Basis::Caller)));
        assert_eq!(classify(&all, "get"), Some((Effect::ReadOnly, Basis::Caller)));
        assert_eq!(classify(&all, "list"), trusted(Effect::ReadOnly));
        assert_eq!(classify(&all, "label"), trusted(Effect::Idempotent));
        assert_eq!(classify(&all, "drop"), trusted(Effect::Write));
        assert_eq!(classify(&all, "unknown"), None);
        let some = ToolRules::new().trust_annotations_of(["list"]).trust_annotations_of(["label"]);
        assert_eq!(classify(&some, "list"), trusted(Effect::ReadOnly));
        assert_eq!(classify(&some, "label"), trusted(Effect::Idempotent));
        assert_eq!(classify(&some, "get"), None);
        assert_eq!(classify(&rules(), "list"), None);
        assert_eq!(all.classify_by(&tool("list").as_effect(Effect::Write), annotated), None);
        let carries_on = call("tools/call", json!({ "name": "list", "requestState": "x" }));
        assert_eq!(all.classify_by(&carries_on, annotated), Some((Effect::Write, Basis::Protocol)));
    }

    #[test]
    fn the_order_of_rules_does_not_matter() {
        let other = ToolRules::new().write(["both"]).read_only(["both"]);
        assert_eq!(other.classify(&tool("both")), Some((Effect::Write, Basis::Caller)));
    }

    #[test]
    fn what_the_caller_stamped_on_the_request_holds() {
        let rules = rules();
        assert_eq!(rules.classify(&tool("get").as_effect(Effect::Write)), None);
        assert_eq!(rules.classify(&tool("pay").read_only()), None);
        assert_eq!(rules.classify(&call("resources/read", json!({})).as_effect(Effect::Write)), None);
    }

    #[test]
    fn a_call_that_carries_on_is_a_write() {
        let write = Some((Effect::Write, Basis::Protocol));
        for key in ["inputResponses", "requestState", "request\\u0053tate"] {
            for method in ["tools/call", "prompts/get", "resources/read"] {
                let json = format!(r#"{{"name":"get","{key}":null}}"#);
                let raw = serde_json::value::RawValue::from_string(json).unwrap();
                let request = Request::new(method, raw).unwrap();
                assert_eq!(rules().classify(&request), write, "{method} {key}");
                assert_eq!(ToolRules::new().classify(&request.read_only()), write, "{method} {key}");
            }
        }
        let nested = json!({ "name": "get", "arguments": { "requestState": 1 } });
        assert_eq!(rules().classify(&call("tools/call", nested)), Some((Effect::ReadOnly, Basis::Caller)));
    }

    #[test]
    fn odd_parameters_are_never_taken_for_a_read() {
        for json in [r#"["get"]"#, "7", r#"{"name":7}"#, r#"{"name":"get","name":"pay"}"#, r#"{"name":null}"#]
        {
            assert_eq!(Params::parse(json), Params { name: None, carries_on: true }, "{json}");
        }
        assert_eq!(Params::parse("{}"), Params::default());
        assert_eq!(Params::parse(r#"{"n\u0061me":"get"}"#).name.as_deref(), Some("get"));
    }
}
