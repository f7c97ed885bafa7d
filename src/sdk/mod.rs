//! MCP servers behind the client of the official Rust SDK (`rmcp`). See [`Connector`].

mod checks;
mod client;
mod connection;
mod connector;
mod evidence;
mod exchange;
mod http;
mod request;
mod session;
mod sse;
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
