//! What requests carry in `params._meta`: in the protocol without a handshake every one of them version, client
//! and log level, and in each version those that want to know of progress a token.

use std::{collections::BTreeMap, sync::Arc};

use serde_json::{Value, json, value::RawValue};

use super::{ProtocolVersion, settings::Settings};

const VERSION: &str = "io.modelcontextprotocol/protocolVersion";
const CLIENT: &str = "io.modelcontextprotocol/clientInfo";
const CAPABILITIES: &str = "io.modelcontextprotocol/clientCapabilities";
const LOG_LEVEL: &str = "io.modelcontextprotocol/logLevel";

/// The members of `_meta`, as JSON.
#[derive(Debug)]
pub(super) struct Envelope {
    members: Vec<(&'static str, Box<RawValue>)>,
    /// The same as one text, without the braces.
    text: String,
}

impl Envelope {
    pub(super) fn new(settings: &Settings, version: ProtocolVersion, level: Option<&str>) -> Self {
        let mut members = vec![
            (VERSION, json!(version.as_str())),
            (CLIENT, json!(settings.client)),
            (CAPABILITIES, settings.capabilities.clone()),
        ];
        if let Some(level) = level {
            members.push((LOG_LEVEL, json!(level)));
        }
        Self::of(members)
    }

    /// Only a token for progress.
    pub(super) fn of_token(token: &str) -> Self {
        Self::of(vec![("progressToken", json!(token))])
    }

    fn of(members: Vec<(&'static str, Value)>) -> Self {
        let text = members.iter().map(|(key, value)| format!("{}:{value}", Value::from(*key)));
        let text = text.collect::<Vec<_>>().join(",");
        let members = members
            .into_iter()
            // A value is valid JSON.
            .filter_map(|(key, value)| Some((key, serde_json::value::to_raw_value(&value).ok()?)))
            .collect();
        Self { members, text }
    }

    /// The parameters with what is missing in their `_meta`. The caller's own members stay as they are, and
    /// parameters that have no place for it are left alone.
    pub(super) fn around(&self, params: Option<&Arc<RawValue>>) -> Option<Arc<RawValue>> {
        let text = params.map_or("{}", |params| params.get());
        self.put_in_front(text).or_else(|| self.merge(text)).map(Arc::from).or_else(|| params.cloned())
    }

    /// For parameters that plainly have no `_meta`, which is nearly all of them: no need to parse.
    fn put_in_front(&self, text: &str) -> Option<Box<RawValue>> {
        // A key can be written with escapes.
        let may_be_there = |needle: &str| memchr::memmem::find(text.as_bytes(), needle.as_bytes()).is_some();
        if may_be_there("_meta") || may_be_there("\\u") {
            return None;
        }
        let rest = text.trim_start().strip_prefix('{')?;
        let comma = if rest.trim_start().starts_with('}') { "" } else { "," };
        RawValue::from_string(format!(r#"{{"_meta":{{{}}}{comma}{rest}"#, self.text)).ok()
    }

    fn merge(&self, text: &str) -> Option<Box<RawValue>> {
        let mut params: BTreeMap<String, &RawValue> = serde_json::from_str(text).ok()?;
        let own = params.get("_meta").map_or("{}", |meta| meta.get());
        let mut meta: BTreeMap<String, &RawValue> = match own {
            "null" => BTreeMap::new(),
            own => serde_json::from_str(own).ok()?,
        };
        for (key, value) in &self.members {
            meta.entry((*key).to_owned()).or_insert(value);
        }
        let meta = serde_json::value::to_raw_value(&meta).ok()?;
        params.insert("_meta".to_owned(), &meta);
        serde_json::value::to_raw_value(&params).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn around(params: Option<&str>) -> Value {
        let envelope = Envelope::new(&Settings::default(), ProtocolVersion::V2026_07_28, Some("info"));
        let params = params.map(|text| Arc::from(RawValue::from_string(text.to_owned()).unwrap()));
        serde_json::from_str(envelope.around(params.as_ref()).unwrap().get()).unwrap()
    }

    fn full() -> Value {
        json!({
            VERSION: "2026-07-28",
            CLIENT: { "name": "goaround", "version": env!("CARGO_PKG_VERSION") },
            CAPABILITIES: {},
            LOG_LEVEL: "info",
        })
    }

    #[test]
    fn every_kind_of_parameters_gets_it() {
        assert_eq!(around(None), json!({ "_meta": full() }));
        assert_eq!(around(Some("{}")), json!({ "_meta": full() }));
        assert_eq!(around(Some(" { } ")), json!({ "_meta": full() }));
        assert_eq!(around(Some(r#"{"a":1}"#)), json!({ "_meta": full(), "a": 1 }));
        assert_eq!(around(Some(r#"{"a":"_meta"}"#)), json!({ "_meta": full(), "a": "_meta" }));
        assert_eq!(around(Some(r#"{"a":"\u00e4"}"#)), json!({ "_meta": full(), "a": "ä" }));
        assert_eq!(around(Some(r#"{"_meta":null,"a":1}"#)), json!({ "_meta": full(), "a": 1 }));
    }

    #[test]
    fn the_callers_own_members_stay() {
        let mut mine = full();
        mine["progressToken"] = json!(7);
        mine[LOG_LEVEL] = json!("debug");
        for key in ["_meta", "\\u005fmeta"] {
            let text = format!(r#"{{"b":[2],"{key}":{{"progressToken":7,"{LOG_LEVEL}":"debug"}}}}"#);
            assert_eq!(around(Some(&text)), json!({ "_meta": mine, "b": [2] }));
        }
    }

    #[test]
    fn what_has_no_place_for_it_is_left_alone() {
        assert_eq!(around(Some("[1]")), json!([1]));
        assert_eq!(around(Some(r#"{"_meta":7}"#)), json!({ "_meta": 7 }));
    }
}
