//! MCP servers behind the client of the official Rust SDK, `rmcp`: the same stack, over stdio, Streamable HTTP and any
//! other transport of the SDK. Feature `rmcp`.
//!
//! The SDK's client has one error for a call that was never queued and one that was lost in flight, its typed methods
//! take no time limit, it drops answers that it cannot match (their callers wait for ever), and over HTTP it sends
//! requests a second time after a lost session, writes too. Here each call ends by its deadline with what is known of
//! it, a closed connection is made anew, and a write is sent again only on named evidence.
//!
//! # A tool loop, before and after
//!
//! On the SDK alone, a server that restarts ends the loop, and a call whose answer is lost ends it without a word of
//! what has become of it:
//!
//! ```no_run
//! # use rmcp::{ServiceExt, model::*, transport::StreamableHttpClientTransport};
//! # fn wanted() -> Option<CallToolRequestParams> { None }
//! # fn tell(_: CallToolResult) {}
//! # async fn run() -> Result<(), Box<dyn std::error::Error>> {
//! let server = ().serve(StreamableHttpClientTransport::from_uri("http://localhost:8000/mcp")).await?;
//! while let Some(call) = wanted() {
//!     // May wait for ever. May have been sent twice. An error here: was it done or not?
//!     tell(server.call_tool(call).await?);
//! }
//! # Ok(())
//! # }
//! ```
//!
//! With the stack in between, the same loop goes on over restarts. What the model is told begins with what is known,
//! "outcome UNKNOWN: …" where it must look before it repeats:
//!
//! ```no_run
//! # use std::time::Duration;
//! # use rmcp::model::*;
//! use goaround::{Stack, WriteSafetyLayer, mcp::{ToolRules, checks}, sdk::{self, Client, Connector}};
//! use serde_json::json;
//!
//! # fn wanted() -> Option<CallToolRequestParams> { None }
//! # fn tell(_: CallToolResult) {}
//! # async fn run() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let rules = ToolRules::new().read_only(["list_invoices"]); // every other tool is a write
//! let check = checks::read_back("create_invoice")
//!     .by_tool("list_invoices")
//!     .argument("/customer", "/customer")
//!     .some("/structuredContent/invoices", "/token", "/token")
//!     // In place of a reply that is lost, where the check finds that the write landed, and in its shape: `found` is all
//!     // that was read, of which the caller gets the one entry.
//!     .landed_with(|written, found| {
//!         let all = found["structuredContent"]["invoices"].as_array();
//!         let one = all.and_then(|all| all.iter().find(|one| one["token"] == written["token"]));
//!         json!({ "content": [], "structuredContent": one })
//!     });
//! let server: Client = Stack::builder(Connector::http((), "http://localhost:8000/mcp").tools(rules))
//!     .deadline(Duration::from_secs(120))
//!     .writes(WriteSafetyLayer::new(sdk::check(check)))
//!     .build()?;
//! while let Some(call) = wanted() {
//!     tell(sdk::tool_result(server.call_tool(call).await));
//! }
//! server.shutdown(Duration::from_secs(5)).await;
//! # Ok(())
//! # }
//! ```
//!
//! For a server that is a child process, `().serve(TokioChildProcess::new(command)?)` becomes
//! `Connector::stdio((), command)`. The example `agent_host` is such a loop as a whole program, against a command or a
//! URL.
//!
//! Where signatures have the SDK's error, `?` makes one of a [`CallError`](crate::CallError): the server's own error
//! as it is, unless an earlier attempt may have landed, and everything else inside a `ServiceError::TransportSend`.
//! The SDK puts "Transport send error: …" before its text; what is known follows that, and begins the text of the
//! `CallError` inside. For a model use [`tool_result`].
//!
//! # Versions
//!
//! `rmcp` 3.11 or a later 3.x, as a dependency of yours besides, since its types are in your code. Of its features
//! `client` is enough, and one for [TLS](#tls):
//!
//! ```toml
//! goaround = { path = "../goaround", features = ["rmcp"] }
//! rmcp = { version = "3.11", default-features = false, features = ["client"] }
//! ```
//!
//! A server that ends in its handshake fails the calls that waited for it as not done. Why, and what a child wrote
//! before, is in the [`InitializeError`], by [`CallError::get_ref`](crate::CallError::get_ref), and not in the text.
//! Over HTTP the text says what was wrong ("cannot connect to the server: connection refused", "HTTP 404"), and so does
//! the [`HttpError`], by the same. Of a child that does not answer, the error of a call that has waited in vain says how
//! many lines it has written to its standard output that are no JSON-RPC; see [`Connection::ignored`].
//!
//! # What the end of a call says
//!
//! Over the pipes of a child process all that [`crate::jsonrpc`] says holds here too, to the byte: a frame that was
//! still queued is withdrawn and was not sent, one that was cut was not processed, and of everything else a closure
//! makes a doubt. The closure is seen at the child's exit or the end of its output, and not when the SDK has waited
//! for the child. What is said of a call before the pipe has accepted all of it but its newline is no answer to
//! it, and passed over; so is, over HTTP, what another stream says of one whose POST has not left. What is an answer there
//! is one here, over both, but for an error's code that is none of the SDK's (`i32`), which is -32603 here.
//!
//! Over HTTP a call has a response of its own, and what is lost with that concerns this call alone:
//!
//! | what came of the POST | evidence | connection |
//! |---|---|---|
//! | no connection, or the request's body was never taken | not sent | goes on |
//! | 401, 403 | not processed; see [`Connector::on_unauthorized`] | goes on |
//! | 425, 429 | not processed; `Retry-After` is heeded, in seconds or as a date | goes on |
//! | 408, 503 | probably not processed: reads are attempted again, a write is in doubt | goes on |
//! | 404 to a request with our session's id, whatever its body | probably not processed | a new session |
//! | a result or an error with the request's id, by no redirect and no status above | the answer | goes on; after a 400 a `ping` decides |
//! | any other 400 to a request with our session's id, or such an error by 400 to a read, and a `ping` on that session after it gets 404, or 400 but by an error about the `ping` itself (-32020, -32601, -32602), too | as 404 | a new session |
//! | 202 or 204; an answer with another id or none; a cut body; a stream that ends, breaks or stops within an event; an event above the limit that is no answer; redirects, other statuses, other contents | none: the call is in doubt | goes on |
//!
//! They all end the call at once; [`HttpError`] says which it was. A response that never comes ends at the call's
//! deadline: if nothing at all was heard from the server since the call was sent, one bounded `ping` decides about the
//! session, and the next call has a new one. A stream that breaks is resumed by `Last-Event-ID` where the server gave
//! one, as part of the attempt: within its time, and at most [eight times](Http::resumptions).
//!
//! A call whose future is dropped, or that has expired, is cancelled as its era has it, over the connection that it
//! was sent on and no other.
//!
//! # What counts as sent
//!
//! A [quarantine](crate::WriteSafetyLayer::quarantine) counts from the last byte of a request, and no replay without a
//! check begins before it. Over pipes that is seen. Over HTTP the client that lies below has buffers of its own, where
//! a body may wait as long as the server does not read it:
//!
//! | the way to the server | the last byte counts as sent |
//! |---|---|
//! | `http`, by the client of this module, or by one of the caller's to the very address in the URL (an IP address or `localhost`) | when the system has taken it |
//! | `https`, HTTP/2, or a proxy that is spoken to over TLS, by the client of this module, up to 8 KiB with its headers | the same: it is the first request on its connection, whose buffers let so much through at once |
//! | small ones by a client of the caller's, over HTTP/1 | when the server answers |
//! | everything else | when the server answers with a status of success, that is, has received it |
//!
//! Where that has not come the call counts as still being sent, whatever ended it, and no declared fence holds: the
//! outcome is then unknown unless the check finds that the write landed.
//!
//! # What is logged
//!
//! What this crate logs holds no token, session id, argument or result. The SDK's own log (target `rmcp`) is another
//! matter: it has session ids and notifications at `info`, and whole messages at `debug`.
//!
//! # TLS
//!
//! This feature brings none. For `https` addresses turn on one of `rmcp`'s own features, `reqwest` (rustls) or
//! `reqwest-native-tls`. Without either, [`build`](crate::StackBuilder::build) refuses such an address.

mod checks;
mod client;
mod connection;
mod connector;
mod evidence;
mod exchange;
mod http;
mod questions;
mod request;
mod retry_after;
mod session;
mod sse;
#[cfg(test)]
mod tests;
mod transport;

pub(crate) use evidence::safe_text;
pub use {
    checks::{Check, check},
    client::tool_result,
    connection::{Connection, ResponseFuture},
    connector::{Connector, InitializeError},
    evidence::{HttpError, HttpErrorKind},
    http::{Http, Unauthorized},
    request::Request,
};

/// The stack around an MCP server behind the SDK's client. A struct can hold it, whatever the server is behind.
///
/// Besides [`send`](crate::Stack::send) it has the SDK's typed methods. They take no deadline of their own; give a
/// [`Request`] one by [`Call::within`](crate::Call::within) and `send` it where the stack's is not right.
pub type Client = crate::Stack<Connector, Request, rmcp::model::ServerResult>;
