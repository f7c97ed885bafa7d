//! The ready-made effect checks, for the SDK's requests.

use rmcp::model::{CallToolRequestParams, JsonObject, ReadResourceRequestParams, ServerResult};
use serde_json::Value;

use super::Request;
use crate::{
    BoxError,
    mcp::checks::{self, ReadBack, ReadBacks, Subject},
    write_safety::{EffectCheck, InDoubt, Verdict},
};

/// Makes the ready-made checks of [`mcp::checks`](crate::mcp::checks) checks of the SDK's requests. All that is said
/// there holds, of what the SDK's types have place for: a member that the protocol does not know beside a tool's
/// content, such as a `nextCursor`, is not seen. What is in the `structuredContent` is.
///
/// ```
/// use goaround::{Stack, WriteSafetyLayer, mcp::{ToolRules, checks}, sdk::{self, Client, Connector}};
///
/// # fn build() -> Result<Client, goaround::BoxError> {
/// let command = tokio::process::Command::new("mcp-server-filesystem");
/// let files = Connector::stdio((), command)
///     .tools(ToolRules::new().read_only(["read_text_file"]))
///     .exit_ends_effects();
/// let check = checks::read_back("write_file")
///     .by_tool("read_text_file")
///     .argument("/path", "/path")
///     .same("/content/0/text", "/content")
///     .absent_if_error_says("ENOENT");
/// Ok(Stack::builder(files).writes(WriteSafetyLayer::new(sdk::check(check))).build()?)
/// # }
/// ```
pub fn check(checks: impl Into<ReadBacks>) -> Check {
    Check(checks.into())
}

/// A ready-made check of the SDK's requests. Made by [`check`].
#[derive(Clone, Debug)]
#[must_use = "give it to WriteSafetyLayer::new"]
pub struct Check(ReadBacks);

impl Check {
    pub(crate) fn each(&self) -> impl Iterator<Item = &ReadBack> {
        self.0.each()
    }
}

impl EffectCheck<Request, ServerResult> for Check {
    async fn check(&self, doubt: InDoubt<Request, ServerResult>) -> Result<Verdict<ServerResult>, BoxError> {
        checks::check(self.each(), &doubt).await
    }
}

impl Subject for Request {
    type Response = ServerResult;

    fn tool_call(&self) -> Result<Option<Value>, BoxError> {
        let Some(name) = self.tool_name() else { return Ok(None) };
        let arguments = self.arguments().cloned().unwrap_or_default();
        let params = [("name".to_owned(), name.into()), ("arguments".to_owned(), Value::Object(arguments))];
        Ok(Some(Value::Object(params.into_iter().collect::<JsonObject>())))
    }

    fn reading(method: &'static str, params: Value) -> Result<Self, BoxError> {
        Ok(match method {
            "tools/call" => serde_json::from_value::<CallToolRequestParams>(params)?.into(),
            _ => serde_json::from_value::<ReadResourceRequestParams>(params)?.into(),
        })
    }

    fn read(response: ServerResult) -> Result<Value, BoxError> {
        Ok(serde_json::to_value(response)?)
    }

    fn written(result: Value) -> Result<ServerResult, BoxError> {
        Ok(ServerResult::CallToolResult(serde_json::from_value(result)?))
    }
}
