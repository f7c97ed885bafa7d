//! What the server says of its tools: the annotations of `tools/list`, all pages of it.

use std::{
    collections::HashMap,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};
use tokio::time::{Instant, timeout};

use super::rules::strength;
use crate::{
    Call, CallError, Effect,
    call::Word,
    jsonrpc::{Client, Request, Response},
};

/// How many pages a list may have.
const MAX_PAGES: usize = 1_000;
/// How many tools are kept.
const MAX_TOOLS: usize = 65_536;
/// How long a name may be: whoever has a longer one is not in the list, which makes it a write.
const MAX_NAME: usize = 1_024;
/// How long the answer to one page may take.
const PAGE: Duration = Duration::from_secs(10);
/// How long all pages together may take, since a connect waits for them.
const LIST: Duration = Duration::from_secs(20);

/// The effects of tools, as their annotations say; `None` of a tool without any.
#[derive(Debug, Default)]
pub(crate) struct Catalog {
    effects: HashMap<Box<str>, Option<Effect>>,
}

/// What the server of one connection says of its tools: nothing from when it says that they have changed until they
/// are listed anew.
#[derive(Debug, Default)]
pub(crate) struct Listed {
    list: Mutex<List>,
    /// How often another list, or none, has begun to count.
    lists: AtomicU64,
}

#[derive(Debug, Default)]
struct List {
    /// How often they have changed.
    changes: u64,
    catalog: Arc<Catalog>,
}

/// By the annotation of that tool a call was taken for one with that effect.
#[derive(Debug)]
struct Annotation {
    tools: Arc<Listed>,
    tool: Option<String>,
    taken_for: Effect,
}

impl Word for Annotation {
    fn holds(&self) -> bool {
        self.tools.upholds(self.tool.as_deref(), self.taken_for) || off!(Annotation)
    }
}

impl Listed {
    pub(crate) fn catalog(&self) -> Arc<Catalog> {
        Arc::clone(&self.lock().catalog)
    }

    /// Whether a call of that tool, which a trusted annotation made a call with that effect, may still do no more than
    /// that. To be asked when it is sent, and not only when it is made.
    pub(crate) fn upholds(&self, tool: Option<&str>, taken_for: Effect) -> bool {
        let now = tool.and_then(|tool| self.lock().catalog.get(tool)).unwrap_or(Effect::Write);
        strength(now) <= strength(taken_for)
    }

    /// That a call of that tool was taken for one with that effect, to be asked for as long as it may be repeated.
    pub(crate) fn word(self: &Arc<Self>, tool: Option<String>, taken_for: Effect) -> Arc<dyn Word> {
        Arc::new(Annotation { tools: Arc::clone(self), tool, taken_for })
    }

    /// How often that may have become another answer.
    pub(crate) fn lists(&self) -> u64 {
        self.lists.load(Ordering::Acquire)
    }

    /// The server says that they have changed.
    pub(crate) fn changed(&self) {
        let mut list = self.lock();
        list.changes += 1;
        self.replace(&mut list, Arc::default());
    }

    /// A list of them is about to be read. What it finds is [`read`](Self::read) as of now.
    pub(crate) fn as_of(&self) -> u64 {
        self.lock().changes
    }

    /// A list that was read from then on. If they have changed meanwhile it may be of before that.
    pub(crate) fn read(&self, as_of: u64, catalog: Catalog) {
        let mut list = self.lock();
        if list.changes == as_of {
            self.replace(&mut list, Arc::new(catalog));
        }
    }

    fn replace(&self, list: &mut List, catalog: Arc<Catalog>) {
        list.catalog = catalog;
        self.lists.fetch_add(1, Ordering::Release);
    }

    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Why the list of tools could not be read.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CatalogError {
    #[error(transparent)]
    Call(#[from] CallError),
    #[error("{0}")]
    Odd(&'static str),
}

impl CatalogError {
    /// The server's, if it answered with an error.
    pub(super) fn code(&self) -> Option<i64> {
        match self {
            Self::Call(error) => error.answer().map(|answer| answer.code),
            Self::Odd(_) => None,
        }
    }
}

impl Catalog {
    pub(crate) fn get(&self, tool: &str) -> Option<Effect> {
        self.effects.get(tool).copied().flatten()
    }

    /// Lists the tools, page by page. `dress` adds what every request of the session carries.
    pub(super) async fn read(
        client: &Client,
        dress: impl Fn(Request) -> Request,
    ) -> Result<Self, CatalogError> {
        let mut catalog = Self::default();
        let mut cursor: Option<String> = None;
        let end = Instant::now() + LIST;
        for _ in 0..MAX_PAGES {
            let params = match &cursor {
                Some(cursor) => json!({ "cursor": cursor }),
                None => json!({}),
            };
            let limit = end.saturating_duration_since(Instant::now()).min(PAGE);
            if limit.is_zero() {
                return Err(CatalogError::Odd("the list of tools does not end in time"));
            }
            let request = Request::new("tools/list", params).map_err(CallError::not_sent)?;
            let mut call = client.request(dress(request.read_only().within(limit)));
            // The timeout owns the timer; the deadline lets the call tell what it knows.
            let page = match timeout(limit, &mut call).await {
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
        self.add_json(page.raw().get())
    }

    /// Adds a page as its JSON text; the cursor of the next one.
    pub(crate) fn add_json(&mut self, page: &str) -> Result<Option<String>, CatalogError> {
        let page: Page<'_> =
            serde_json::from_str(page).map_err(|_| CatalogError::Odd("the list of tools is malformed"))?;
        for Tool { name, annotations } in page.tools {
            if name.len() > MAX_NAME {
                continue;
            }
            if self.effects.len() >= MAX_TOOLS {
                return Err(CatalogError::Odd("the server has too many tools"));
            }
            let effect = annotations.and_then(effect_of);
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
struct Page<'a> {
    #[serde(borrow)]
    tools: Vec<Tool<'a>>,
    #[serde(default)]
    next_cursor: Option<String>,
}

#[derive(Deserialize)]
struct Tool<'a> {
    name: String,
    #[serde(default, borrow)]
    annotations: Option<&'a RawValue>,
}

/// A hint that is there twice is an error.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Hints {
    read_only_hint: Option<Value>,
    destructive_hint: Option<Value>,
    idempotent_hint: Option<Value>,
}

/// What the hints make of a tool; `None` where there is no hint about it. `destructiveHint` and
/// `idempotentHint` mean something only for tools that are not read-only, so that `idempotentHint: false`
/// contradicts nothing.
fn effect_of(annotations: &RawValue) -> Option<Effect> {
    let Ok(hints) = serde_json::from_str::<Hints>(annotations.get()) else { return Some(Effect::Write) };
    let hint = |hint| match hint {
        None | Some(Value::Null) => Ok(None),
        Some(Value::Bool(hint)) => Ok(Some(hint)),
        Some(_) => Err(()),
    };
    let (Ok(read_only), Ok(destructive), Ok(idempotent)) =
        (hint(hints.read_only_hint), hint(hints.destructive_hint), hint(hints.idempotent_hint))
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
            let raw = serde_json::value::to_raw_value(&hints).unwrap();
            assert_eq!(effect_of(&raw), effect, "{hints}");
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

    #[test]
    fn a_second_entry_without_hints_and_a_hint_that_is_said_twice_make_no_read() {
        let reads = r#"{"name":"x","annotations":{"readOnlyHint":true}}"#;
        let bare = r#"{"name":"x"}"#;
        let page = |tools: &str| {
            let json = serde_json::value::RawValue::from_string(format!(r#"{{"tools":[{tools}]}}"#)).unwrap();
            let mut catalog = Catalog::default();
            catalog.add(&Response::new(json).unwrap()).unwrap();
            catalog.get("x")
        };
        assert_eq!(page(reads), Some(Effect::ReadOnly));
        assert_eq!(page(bare), None);
        assert_eq!(page(&format!("{reads},{bare}")), Some(Effect::Write));
        assert_eq!(page(&format!("{bare},{reads}")), Some(Effect::Write));
        let twice = r#"{"name":"x","annotations":{"readOnlyHint":false,"readOnlyHint":true}}"#;
        assert_eq!(page(twice), Some(Effect::Write));
        let twice = r#"{"name":"x","annotations":{"readOnlyHint":false,"read\u004fnlyHint":true}}"#;
        assert_eq!(page(twice), Some(Effect::Write));
    }

    #[test]
    #[cfg_attr(miri, ignore = "too many names")]
    fn the_names_that_are_kept_are_bounded() {
        let mut catalog = Catalog::default();
        let name = "x".repeat(1 << 20);
        let tool = json!({ "name": name, "annotations": { "readOnlyHint": true } });
        catalog.add(&Response::new(json!({ "tools": [tool] })).unwrap()).unwrap();
        assert_eq!(catalog.get(&name), None);
        assert!(catalog.effects.is_empty());
    }
}
