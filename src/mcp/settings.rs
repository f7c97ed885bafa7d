//! What the user says of the connections to be made.

use std::{sync::Arc, time::Duration};

use serde_json::{Value, json};

use super::{HandshakeError, ProtocolVersion, ToolRules};
use crate::{event::Implementation, jsonrpc::AnyHandler};

/// How a connection begins: the protocol's two eras.
///
/// Up to 2025-11-25 a session begins with the handshake `initialize`. On 2026-07-28 there is neither: every
/// request says by itself what the handshake said, and `server/discover` asks what the server can do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Era {
    /// Finds out, as the specification says: `server/discover` first, and `initialize` if the answer to it is
    /// an error, or none comes within [`Stdio::probe_timeout`](super::Stdio::probe_timeout). What was found is
    /// remembered for the next connection.
    #[default]
    Auto,
    /// `initialize`, at once.
    Initialize,
    /// `server/discover`, and no `initialize` whatever the answer.
    Discover,
}

#[derive(Clone)]
pub(super) struct Settings {
    pub(super) client: Implementation,
    pub(super) capabilities: Value,
    pub(super) offer: ProtocolVersion,
    pub(super) era: Era,
    /// How long `server/discover` may be unanswered before `initialize` is tried.
    pub(super) probe: Duration,
    pub(super) tools: ToolRules,
    pub(super) handler: Arc<dyn AnyHandler>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            client: Implementation::new(env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION")),
            capabilities: json!({}),
            offer: ProtocolVersion::V2025_11_25,
            era: Era::Auto,
            probe: Duration::from_secs(3),
            tools: ToolRules::new(),
            handler: Arc::new(()),
        }
    }
}

impl Settings {
    pub(super) fn validate(&self) -> Result<(), HandshakeError> {
        if self.offer.has_handshake() { Ok(()) } else { Err(HandshakeError::NoHandshake(self.offer)) }
    }
}
