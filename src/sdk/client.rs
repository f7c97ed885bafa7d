//! The typed methods of a stack around the SDK's client.

#![expect(deprecated, reason = "what versions up to 2025-11-25 have is served as long as servers have it")]

use std::{any::Any, sync::Arc};

use rmcp::{
    Peer, RoleClient, ServiceError,
    model::{
        CallToolRequestParams, CallToolResult, ClientNotification, CompleteRequestParams, CompleteResult,
        ContentBlock, CustomResult, GetPromptRequestParams, GetPromptResult, ListPromptsResult,
        ListResourceTemplatesResult, ListResourcesResult, ListToolsResult, PaginatedRequestParams, Prompt,
        ReadResourceRequestParams, ReadResourceResult, Resource, ResourceTemplate, ServerPeerInfo,
        ServerResult, SetLevelRequest, SetLevelRequestParams, SubscribeRequestParams, Tool,
        UnsubscribeRequestParams,
    },
};

use serde_json::Value;

use super::{Connection, Connector, Request};
use crate::{Basis, Call, CallError, Cause, Effect, Refusal, Stack};

/// How many pages a list may have.
const MAX_PAGES: usize = 1_000;
/// How often a list is begun again whose session was lost between two of its pages.
const MAX_RESTARTS: usize = 2;

/// What a model is told of a tool's call: the tool's result, or the error's text as a tool's error. That text begins
/// with what is known, so that the model does not repeat what may have been done ("outcome UNKNOWN: …").
pub fn tool_result(result: Result<CallToolResult, CallError>) -> CallToolResult {
    result.unwrap_or_else(|error| CallToolResult::error(vec![ContentBlock::text(error.to_string())]))
}

macro_rules! lists {
    ($(
        $(#[$doc:meta])* $page:ident, $(#[$all_doc:meta])* $all:ident: $variant:ident($result:ident).$field:ident
            -> $item:ty
    )*) => { $(
        $(#[$doc])*
        ///
        /// # Errors
        ///
        /// As [`Stack::send`].
        pub async fn $page(&self, params: Option<PaginatedRequestParams>) -> Result<$result, CallError> {
            self.read(Request::$page(params), |result| match result {
                ServerResult::$variant(page) => Some(page),
                _ => None,
            })
            .await
        }

        $(#[$all_doc])*
        ///
        /// A list whose session is lost between two of its pages is begun again.
        ///
        /// # Errors
        ///
        /// As [`Stack::send`] of one of its pages, each of which has the stack's deadline; or a list that does not
        /// end.
        pub async fn $all(&self) -> Result<Vec<$item>, CallError> {
            let mut restarts = 0;
            'list: loop {
                let mut all = Vec::new();
                let mut cursor: Option<String> = None;
                for _ in 0..MAX_PAGES {
                    let params = cursor.clone().map(|cursor| {
                        PaginatedRequestParams::default().with_cursor(Some(cursor))
                    });
                    let page = match self.$page(params).await {
                        Err(error) if is_of_another_session(&error) && restarts < MAX_RESTARTS => {
                            restarts += 1;
                            continue 'list;
                        }
                        page => page?,
                    };
                    all.extend(page.$field);
                    match page.next_cursor {
                        None => return Ok(all),
                        next if next == cursor => break,
                        next => cursor = next,
                    }
                }
                let request = Request::$page(None);
                return Err(unread(request.method(), self.judge(&request)));
            }
        }
    )* };
}

/// Of [`sdk::Client`](super::Client) only, with feature `rmcp`: the methods of the SDK's client.
impl Stack<Connector, Request, ServerResult> {
    /// Calls a tool. Unless somebody says otherwise ([`ToolRules`](crate::mcp::ToolRules)) that is a write.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`]. A server that asks for input, or that makes a task of the call, has answered with
    /// something else than a result ([`Cause::AnswerUnread`]); use [`Stack::send`] where it may.
    pub async fn call_tool(&self, params: CallToolRequestParams) -> Result<CallToolResult, CallError> {
        self.read(params.into(), tool_result_of).await
    }

    lists! {
        /// A page of the server's tools.
        list_tools, /// All of the server's tools.
        list_all_tools: ListToolsResult(ListToolsResult).tools -> Tool
        /// A page of the server's prompts.
        list_prompts, /// All of the server's prompts.
        list_all_prompts: ListPromptsResult(ListPromptsResult).prompts -> Prompt
        /// A page of the server's resources.
        list_resources, /// All of the server's resources.
        list_all_resources: ListResourcesResult(ListResourcesResult).resources -> Resource
        /// A page of the server's templates of resources.
        list_resource_templates, /// All of the server's templates of resources.
        list_all_resource_templates:
            ListResourceTemplatesResult(ListResourceTemplatesResult).resource_templates -> ResourceTemplate
    }

    /// Reads a resource.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`].
    pub async fn read_resource(
        &self,
        params: ReadResourceRequestParams,
    ) -> Result<ReadResourceResult, CallError> {
        self.read(params.into(), |result| match result {
            ServerResult::ReadResourceResult(result) => Some(result),
            _ => None,
        })
        .await
    }

    /// Gets a prompt.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`].
    pub async fn get_prompt(&self, params: GetPromptRequestParams) -> Result<GetPromptResult, CallError> {
        self.read(params.into(), |result| match result {
            ServerResult::GetPromptResult(result) => Some(result),
            _ => None,
        })
        .await
    }

    /// Asks for completions of an argument.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`].
    pub async fn complete(&self, params: CompleteRequestParams) -> Result<CompleteResult, CallError> {
        self.read(params.into(), |result| match result {
            ServerResult::CompleteResult(result) => Some(result),
            _ => None,
        })
        .await
    }

    /// Sets the level of the server's log messages; set again on each later connection.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`].
    pub async fn set_level(&self, params: SetLevelRequestParams) -> Result<(), CallError> {
        self.send(Request::new(SetLevelRequest::new(params))).await.map(drop)
    }

    /// Subscribes to a resource; again on each later connection.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`].
    pub async fn subscribe(&self, params: SubscribeRequestParams) -> Result<(), CallError> {
        self.send(params.into()).await.map(drop)
    }

    /// Ends a subscription.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`].
    pub async fn unsubscribe(&self, params: UnsubscribeRequestParams) -> Result<(), CallError> {
        self.send(params.into()).await.map(drop)
    }

    /// Asks whether the server is there; for versions up to 2025-11-25.
    ///
    /// # Errors
    ///
    /// As [`Stack::send`].
    pub async fn ping(&self) -> Result<(), CallError> {
        self.send(Request::ping()).await.map(drop)
    }

    /// Sends a notification over the connection in use, once: it is never sent again, and no connection is made for
    /// it.
    ///
    /// # Errors
    ///
    /// Not sent, if there is no connection; ambiguous, if the transport failed.
    pub async fn notify(&self, notification: impl Into<ClientNotification>) -> Result<(), CallError> {
        match self.sdk_connection() {
            Some(connection) => connection.notify(notification).await,
            None => Err(CallError::not_sent(ServiceError::TransportClosed)),
        }
    }

    /// The SDK's handle on the connection in use. It is that of one [generation](Stack::generation): what is sent by
    /// it has none of the stack's layers, and fails when that connection closes.
    pub fn peer(&self) -> Option<Peer<RoleClient>> {
        self.sdk_connection()?.peer()
    }

    /// What the server said of itself when the connection in use began.
    pub fn server_info(&self) -> Option<Arc<ServerPeerInfo>> {
        self.peer()?.peer_info()
    }

    /// Sends a call, and takes its result for what was asked for. What is something else was an answer all the same.
    async fn read<T>(
        &self,
        request: Request,
        read: impl FnOnce(ServerResult) -> Option<T>,
    ) -> Result<T, CallError> {
        let (method, judged) = (request.method().to_owned(), self.judge(&request));
        read(self.send(request).await?).ok_or_else(|| unread(&method, judged))
    }

    fn sdk_connection(&self) -> Option<Connection> {
        let connection = self.connection()?;
        let connection: &dyn Any = &*connection;
        connection.downcast_ref::<Connection>().cloned()
    }
}

/// The server answered with a success, of another kind than what was asked for.
fn unread(method: &str, (effect, basis): (Effect, Basis)) -> CallError {
    let error = CallError::unread(ServiceError::UnexpectedResponse).note("the answer is of another kind");
    error.of_call(method, effect).judged_by(basis)
}

/// The result of a tool, if it is one. Without content it reads as one of the others.
fn tool_result_of(result: ServerResult) -> Option<CallToolResult> {
    let (result_type, meta) = match result {
        ServerResult::CallToolResult(result) => return Some(result),
        ServerResult::EmptyResult(_) => (None, None),
        ServerResult::TaskAckResult(ack) => (Some(ack.result_type), ack.meta),
        ServerResult::CustomResult(CustomResult(Value::Object(mut custom)))
            if custom.len() == 1 && custom.contains_key("_meta") =>
        {
            let meta = custom.remove("_meta").map(serde_json::from_value);
            (None, meta.transpose().ok()?)
        }
        _ => return None,
    };
    let mut result = CallToolResult::default();
    (result.result_type, result.meta) = (result_type, meta);
    Some(result)
}

fn is_of_another_session(error: &CallError) -> bool {
    matches!(error.cause(), Cause::Refused(Refusal::CursorOfAnotherSession))
}
