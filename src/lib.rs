//! Tower middleware for client calls that must not land twice.
//!
//! # The problem
//!
//! A call can fail in three ways that look alike: its deadline expired, its connection closed, or the server
//! answered with an error. Only the last is an answer. After the other two nobody knows whether a write took
//! effect: to give up loses calls that a reconnect would have saved, to replay blindly makes two of one.
//!
//! This crate keeps apart what happened ([`Cause`]) and what is known ([`Delivery`] of an attempt,
//! [`Outcome`] of a call). It *never replays a write without named evidence, and reports every unknown*.
//! It does not promise that a write happens one time and one time only: nobody can, from the client's side.
//!
//! # The stack
//!
//! Four layers, each useful alone and in any subset. A call goes through them in this order, from the
//! outermost to the connection:
//!
//! 1. [`DeadlineLayer`] puts one absolute deadline on a call, over all of its attempts. It is the outermost,
//!    since every wait of the others must end by it; a layer below that is polled at the deadline says what it
//!    knows.
//! 2. [`WriteSafetyLayer`] settles writes in doubt: a [`Fence`], which says why the earlier attempt can no
//!    longer land, then the caller's [`EffectCheck`], then perhaps one replay. It lies above the retries, which
//!    let writes pass untouched, and above the reconnect, since its probes need a healed connection.
//! 3. [`RetryReadOnly`] attempts calls again that only read. It lies above the reconnect, so that its next
//!    attempt finds the new connection.
//! 4. [`ReconnectLayer`] makes the connection, and makes it again after a closure: one shared reconnect,
//!    however many calls wait for it. It is the innermost, since it alone knows of connections; a call of which
//!    provably nothing was sent it hands over again, be it a read or a write.
//!
//! [`Stack`] puts them in that order around a connector, any `Service<(), Response = connection>`. What a call
//! may do is its [`Effect`]; what nobody says to be read-only is a write.
//!
//! ```no_run
//! use std::time::Duration;
//!
//! use goaround::{BoxError, InDoubt, Outcome, Stack, Verdict, jsonrpc::{Request, Response}, mcp};
//! use serde_json::{Value, json};
//!
//! /// Was the invoice created? Asked after a write ended without an answer.
//! async fn check(doubt: InDoubt<Request, Response>) -> Result<Verdict<Response>, BoxError> {
//!     let call: Value = doubt.request().params()?;
//!     if call["name"] != "create_invoice" {
//!         return Ok(doubt.unknown("no check for this tool"));
//!     }
//!     let list: Value = doubt.probe(Request::tool("list_invoices", json!({}))).await?.parse()?;
//!     let invoices = list["structuredContent"]["invoices"].as_array().ok_or("no list of invoices")?;
//!     // Only this write has that number, since its caller drew it: something similar would prove nothing.
//!     Ok(if invoices.contains(&call["arguments"]["number"]) {
//!         doubt.landed_without_result()
//!     } else {
//!         doubt.not_landed()
//!     })
//! }
//!
//! # async fn run() -> Result<(), BoxError> {
//! let server = mcp::stdio(tokio::process::Command::new("invoice-server"))
//!     .tools(mcp::ToolRules::new().read_only(["list_invoices"]))
//!     .exit_ends_effects(); // its effects are its own and local: once it is gone, nothing more can land
//! let invoices = Stack::builder(server)
//!     .deadline(Duration::from_secs(30))
//!     .check(check) // a function; `.writes(WriteSafetyLayer::new(..))` takes ready-made ones too
//!     .build()?;
//!
//! let create = Request::tool("create_invoice", json!({ "number": "2026-17-5f0c2a" }));
//! match invoices.send(create).await {
//!     Ok(answer) => println!("{}", answer.raw()),
//!     Err(error) if error.outcome() == Outcome::DoneResultLost => eprintln!("go on: {error}"),
//!     Err(error) if error.is_safe_to_repeat() => eprintln!("try again: {error}"),
//!     Err(error) if error.may_have_landed() => eprintln!("look first: {error}"),
//!     Err(error) => return Err(error.into()),
//! }
//! invoices.shutdown(Duration::from_secs(5)).await;
//! # Ok(())
//! # }
//! ```
//!
//! How to write such a check, what a fence is, and what goes wrong with checks that look right:
//! [`write_safety::effect_check`]. What is in doubt is kept in a [ledger](write_safety::ledger), which may be a file;
//! [`Resolve`] settles what a process left open that has died.
//!
//! # Connections
//!
//! - [`mcp`]: MCP servers that are child processes, in both eras of the protocol, with the session restored after
//!   each reconnect. Ready-made effect checks are in [`mcp::checks`], tools that become tasks in [`mcp::tasks`].
//! - `sdk` (feature `rmcp`): MCP servers behind the client of the official Rust SDK, over stdio and Streamable
//!   HTTP.
//! - [`stdio`]: any JSON-RPC server that is a child process.
//! - [`jsonrpc`]: JSON-RPC over any byte stream.
//! - Everything else that is a Tower service: requests go in as [`Tagged`], errors by tower's `map_err` and the
//!   constructors of [`CallError`].
//!
//! # What is reported
//!
//! [`CallError`] says what happened and what is known, also in its text, which people and models act on. Error, event
//! and ledger name a call by the same [`CallId`].
//! [`Event`]s tell of calls that needed more than one attempt, of closures and recoveries, and of every write
//! in doubt. They go to [`tracing`] too.
//!
//! # Platforms
//!
//! The runtime is tokio. Process groups exist on Unix; elsewhere a child alone is ended and reaped, and its end
//! is never a fence.
//!
//! # Feature flags
//!
//! The default is none.
//!
//! - `ledger-durable`: [`DurableLedger`](write_safety::ledger), which keeps the writes in a file that survives a crash.
//!   Needs no further crates.
//! - `backoff`: schedules of the crate `backoff` for [`RetryReadOnly`]. That crate is unmaintained
//!   (RUSTSEC-2025-0012), so it is offered and never pulled in by itself.
//! - `rmcp`: the module `sdk`, the stack around the client of the official MCP SDK. It brings no TLS of its own:
//!   for `https` addresses turn on one of `rmcp`'s own features, `reqwest` (rustls) or `reqwest-native-tls`.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

/// A boxed error, as tower's.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[macro_use]
mod controls;

mod call;
mod census;
mod connection;
pub mod deadline;
mod delivery;
mod error;
pub mod event;
pub mod jsonrpc;
pub mod mcp;
mod places;
pub mod reconnect;
pub mod retry;
pub mod stack;
pub mod stdio;
mod wakers;
pub mod write_safety;

// After the stack, so that its own methods come first in the documentation.
#[cfg(feature = "rmcp")]
pub mod sdk;

pub use call::{Activity, Basis, Call, CallContext, CallId, Deadline, Effect, Tagged};
pub use deadline::{DeadlineLayer, DeadlineService, Pause, Progress};
pub use delivery::{Cause, ConnectError, Delivery, Evidence, Refusal, Rule, Scope, rule};
pub use error::{Attempt, CallError, Closure, Exit, Outcome, ServerError, Settled};
pub use event::Event;
pub use reconnect::{Reconnect, ReconnectHandle, ReconnectLayer};
pub use retry::{Retry, RetryReadOnly, RetryReadOnlyLayer};
pub use stack::{ConfigError, Stack, StackBuilder};
pub use write_safety::{
    EffectCheck, Fence, FenceBasis, InDoubt, KeyedAnswer, KeyedWrites, Resolve, Resolved, Verdict,
    VerdictKind, WriteSafety, WriteSafetyLayer,
};

#[cfg(goaround_controls)]
#[doc(hidden)]
pub use controls::{Guard, switch_off};

/// The examples of the README, which are tests too.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
