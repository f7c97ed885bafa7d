//! What the server says of its tools: the annotations of `tools/list`, all pages of it.

use std::{collections::HashMap, time::Duration};

use serde::Deserialize;
use serde_json::{Value, json};

use crate::{
    Call, CallError, Effect,
    jsonrpc::{Client, Request, Response},
};

/// How many pages a list may have.
const MAX_PAGES: usize = 1_000;
/// How many tools are kept.
const MAX_TOOLS: usize = 65_536;
/// How long the answer to one page may take.
const PAGE: Duration = Duration::from_secs(10);

/// The effects of tools, as their annotations say; `None` for a tool without any.
#[derive(Debug, Default)]
pub(super) struct Catalog {
    effects: HashMap<Box<str>, Option<Effect>>,
}

/// Why the list of tools could not be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum CatalogError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("{0}")]
    Odd(&'static str),
}

impl Catalog {
    pub(super) fn get(&self, tool: &str) -> Option<Effect> {
        self.effects.get(tool).copied().flatten()
    }

    /// Lists the tools, page by page. `dress` adds what every request of the session carries.
    pub(super) async fn read(
        client: &Client,
        dress: impl Fn(Request) -> Request,
    ) -> Result<Self, CatalogError> {
        let mut catalog = Self::default();
        let mut cursor: Option<String> = None;
        for _ in 0..MAX_PAGES {
            let params = match &cursor {
                Some(cursor) => json!({ "cursor": cursor }),
                None => json!({}),
            };
            let request = Request::new("tools/list", params).map_err(CallError::not_sent)?;
            let mut call = client.request(dress(request.read_only().within(PAGE)));
            // The timeout owns the timer; the deadline lets the call tell what it knows.
            let page = match tokio::time::timeout(PAGE, &mut call).await {
                Ok(page) => page?,
                Err(_) => call.await?,
            };
            let next = catalog.add(&page)?;
            if next.is_none() {
                return Ok(catalog);
            }
            if next == cursor {
                return Err(CatalogError::Odd("the list of tools does not end: a page leads to itself"));
            }
            cursor = next;
        }
        Err(CatalogError::Odd("the list of tools does not end"))
    }

    /// Adds a page; the cursor of the next one.
    fn add(&mut self, page: &Response) -> Result<Option<String>, CatalogError> {
        let page: Page = page.parse().map_err(|_| CatalogError::Odd("the list of tools is malformed"))?;
        for Tool { name, annotations } in page.tools {
            let effect = annotations.as_ref().and_then(effect_of);
            if self.effects.len() >= MAX_TOOLS {
                return Err(CatalogError::Odd("the server has too many tools"));
            }
            let known = self.effects.entry(name.into_boxed_str()).or_insert(effect);
            // Of two entries nobody knows which one is called.
            if *known != effect {
                *known = Some(Effect::Write);
            }
        }
        Ok(page.next_cursor)
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Page {
    tools: Vec<Tool>,
    #[serde(default)]
    next_cursor: Option<String>,
}

#[derive(Deserialize)]
struct Tool {
    name: String,
    #[serde(default)]
    annotations: Option<Value>,
}

/// What the hints make of a tool; `None` where there is no hint about it. `destructiveHint` and
/// `idempotentHint` mean something only for tools that are not read-only, so that `idempotentHint: false`
/// contradicts nothing.
fn effect_of(annotations: &Value) -> Option<Effect> {
    let hint = |key| match annotations.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(hint)) => Ok(Some(*hint)),
        Some(_) => Err(()),
    };
    let (Ok(read_only), Ok(destructive), Ok(idempotent)) =
        (hint("readOnlyHint"), hint("destructiveHint"), hint("idempotentHint"))
    else {
        return Some(Effect::Write);
    };
    match (read_only, destructive, idempotent) {
        (None, None, None) => None,
        (Some(true), Some(true), _) => Some(Effect::Write),
        (Some(true), ..) => Some(Effect::ReadOnly),
        (_, _, Some(true)) => Some(Effect::Idempotent),
        _ => Some(Effect::Write),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_make_effects_and_contradictions_writes() {
        for (hints, effect) in [
            (json!({}), None),
            (json!({ "title": "x" }), None),
            (json!({ "readOnlyHint": null }), None),
            (json!({ "readOnlyHint": true }), Some(Effect::ReadOnly)),
            (json!({ "readOnlyHint": true, "destructiveHint": false }), Some(Effect::ReadOnly)),
            (json!({ "readOnlyHint": true, "idempotentHint": false }), Some(Effect::ReadOnly)),
            (json!({ "readOnlyHint": true, "idempotentHint": true }), Some(Effect::ReadOnly)),
            (json!({ "readOnlyHint": true, "destructiveHint": true }), Some(Effect::Write)),
            (json!({ "readOnlyHint": "true" }), Some(Effect::Write)),
            (json!({ "readOnlyHint": true, "destructiveHint": 0 }), Some(Effect::Write)),
            (json!({ "readOnlyHint": false }), Some(Effect::Write)),
            (json!({ "idempotentHint": true }), Some(Effect::Idempotent)),
            (json!({ "idempotentHint": true, "destructiveHint": true }), Some(Effect::Idempotent)),
            (json!({ "idempotentHint": false }), Some(Effect::Write)),
            (json!({ "destructiveHint": false }), Some(Effect::Write)),
        ] {
            assert_eq!(effect_of(&hints), effect, "{hints}");
        }
    }

    #[test]
    fn two_entries_of_one_name_that_differ_make_a_write() {
        let (reads, sets, writes) = (
            json!({ "readOnlyHint": true }),
            json!({ "idempotentHint": true }),
            json!({ "readOnlyHint": false }),
        );
        for (first, second, effect) in [
            (&reads, &reads, Some(Effect::ReadOnly)),
            (&reads, &writes, Some(Effect::Write)),
            (&reads, &sets, Some(Effect::Write)),
            (&reads, &Value::Null, Some(Effect::Write)),
            (&sets, &json!({}), Some(Effect::Write)),
            (&Value::Null, &json!({}), None),
        ] {
            for [one, other] in [[first, second], [second, first]] {
                let mut catalog = Catalog::default();
                let tool = |hints: &Value| json!({ "name": "x", "annotations": hints });
                // On one page, or on two.
                let page = Response::new(json!({ "tools": [tool(one), tool(other)] })).unwrap();
                assert_eq!(catalog.add(&page).unwrap(), None);
                assert_eq!(catalog.get("x"), effect, "{one} {other}");
                let page = Response::new(json!({ "tools": [tool(one)] })).unwrap();
                catalog.add(&page).unwrap();
                assert_eq!(catalog.get("x"), effect, "{one} {other} {one}");
            }
        }
        assert!(Catalog::default().add(&Response::new(json!({ "tools": 1 })).unwrap()).is_err());
    }
}
