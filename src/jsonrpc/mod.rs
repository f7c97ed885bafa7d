//! JSON-RPC 2.0 over any byte stream: [`Client`] multiplexes calls over one connection, in both directions.
//!
//! Messages are framed by newlines, as in MCP's stdio transport. Parameters and results stay the JSON text
//! that they are. The client knows of every call whether its bytes left: where not one did, it says so
//! ([`Delivery::NotSent`](crate::Delivery::NotSent)) and hands the request back inside the error; where the
//! pipe was closed for good within a frame, it says that
//! ([`Evidence::FrameCut`](crate::Evidence::FrameCut)); everything else is ambiguous. Of requests that were
//! begun when the connection closed it says so only over a transport with
//! [exact writes](Builder::exact_writes).
//!
//! ```
//! use goaround::{Call, jsonrpc::{Client, Request}};
//! use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
//! let (ours, theirs) = tokio::io::duplex(1024);
//! tokio::spawn(async move {
//!     let mut theirs = BufReader::new(theirs);
//!     let mut line = String::new();
//!     theirs.read_line(&mut line).await.unwrap();
//!     assert_eq!(line, "{\"jsonrpc\":\"2.0\",\"id\":1,\"method\":\"add\",\"params\":[1,2]}\n");
//!     theirs.write_all(b"{\"jsonrpc\":\"2.0\",\"id\":1,\"result\":3}\n").await.unwrap();
//! });
//! let client = Client::new(ours);
//! let response = client.request(Request::new("add", [1, 2])?.read_only()).await?;
//! assert_eq!(response.parse::<i32>()?, 3);
//! # Ok(())
//! # }
//! ```

mod builder;
mod client;
mod codec;
mod drain;
mod driver;
mod exchange;
mod frame;
mod handler;
mod message;
mod route;
#[cfg(test)]
mod tests;

pub use builder::Builder;
pub(crate) use builder::{Process, Upholds};
#[cfg(feature = "rmcp")]
pub(crate) use client::ProcessFacts;
pub(crate) use client::WeakClient;
pub use client::{Client, ResponseFuture};
#[cfg(feature = "rmcp")]
pub(crate) use codec::{Lines, Piece, Said, begins_an_answer};
#[cfg(feature = "rmcp")]
pub(crate) use drain::Drain;
#[cfg(feature = "rmcp")]
pub(crate) use driver::{Late, Remembered};
#[cfg(feature = "rmcp")]
pub(crate) use frame::Frame;
pub(crate) use handler::AnyHandler;
pub use handler::{Handler, Notification, ServerRequest};
pub(crate) use message::own_id;
#[cfg(feature = "rmcp")]
pub(crate) use message::{Batch, present, server_error};
pub use message::{Request, Response};
pub(crate) use route::Route;
