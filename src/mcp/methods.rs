//! The requests that a client sends to a server, in all versions of the protocol.

use std::fmt;

use crate::Effect;

/// A version of the protocol, in the order of their dates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ProtocolVersion {
    /// 2024-11-05, the first.
    V2024_11_05,
    /// 2025-03-26.
    V2025_03_26,
    /// 2025-06-18.
    V2025_06_18,
    /// 2025-11-25, the last with the `initialize` handshake.
    V2025_11_25,
    /// 2026-07-28, without handshake and sessions.
    V2026_07_28,
}

use ProtocolVersion::{V2024_11_05, V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28};

impl ProtocolVersion {
    /// All of them, the oldest first.
    pub const ALL: [Self; 5] = [V2024_11_05, V2025_03_26, V2025_06_18, V2025_11_25, V2026_07_28];

    /// As it is written on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            V2024_11_05 => "2024-11-05",
            V2025_03_26 => "2025-03-26",
            V2025_06_18 => "2025-06-18",
            V2025_11_25 => "2025-11-25",
            V2026_07_28 => "2026-07-28",
        }
    }

    /// The version that is written so, if it is known.
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|version| version.as_str() == text)
    }

    /// Whether a connection of this version begins with `initialize`.
    pub const fn has_handshake(self) -> bool {
        !matches!(self, V2026_07_28)
    }
}

impl fmt::Display for ProtocolVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A method of the protocol that a client calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Method {
    /// Its name on the wire.
    pub name: &'static str,
    /// What a call of it may do, by the protocol's definition.
    pub effect: Effect,
    /// The first version that has it.
    pub since: ProtocolVersion,
    /// The last version that has it; the newest one where it was not removed.
    pub until: ProtocolVersion,
}

impl Method {
    /// Whether that version has it, in its core or in an official extension.
    pub fn is_in(&self, version: ProtocolVersion) -> bool {
        (self.since..=self.until).contains(&version)
    }
}

const fn method(
    name: &'static str,
    effect: Effect,
    since: ProtocolVersion,
    until: ProtocolVersion,
) -> Method {
    Method { name, effect, since, until }
}

/// All methods of all versions, with those of the official tasks extension.
///
/// `tools/call` is a write, since nobody but the tool's author knows what it does; see
/// [`ToolRules`](super::ToolRules). `initialize` is one because it belongs to the reconnect and is never
/// replayed. `tasks/result` is read-only, though it waits for the task's end, and so is
/// `subscriptions/listen`, though its answer goes on and on.
pub const METHODS: &[Method] = &[
    method("tools/call", Effect::Write, V2024_11_05, V2026_07_28),
    method("tools/list", Effect::ReadOnly, V2024_11_05, V2026_07_28),
    method("resources/read", Effect::ReadOnly, V2024_11_05, V2026_07_28),
    method("resources/list", Effect::ReadOnly, V2024_11_05, V2026_07_28),
    method("resources/templates/list", Effect::ReadOnly, V2024_11_05, V2026_07_28),
    method("prompts/get", Effect::ReadOnly, V2024_11_05, V2026_07_28),
    method("prompts/list", Effect::ReadOnly, V2024_11_05, V2026_07_28),
    method("completion/complete", Effect::ReadOnly, V2024_11_05, V2026_07_28),
    method("ping", Effect::ReadOnly, V2024_11_05, V2025_11_25),
    method("initialize", Effect::Write, V2024_11_05, V2025_11_25),
    method("server/discover", Effect::ReadOnly, V2026_07_28, V2026_07_28),
    method("logging/setLevel", Effect::Idempotent, V2024_11_05, V2025_11_25),
    method("resources/subscribe", Effect::Idempotent, V2024_11_05, V2025_11_25),
    method("resources/unsubscribe", Effect::Idempotent, V2024_11_05, V2025_11_25),
    method("subscriptions/listen", Effect::ReadOnly, V2026_07_28, V2026_07_28),
    method("tasks/get", Effect::ReadOnly, V2025_11_25, V2026_07_28),
    method("tasks/list", Effect::ReadOnly, V2025_11_25, V2025_11_25),
    method("tasks/result", Effect::ReadOnly, V2025_11_25, V2025_11_25),
    method("tasks/cancel", Effect::Idempotent, V2025_11_25, V2026_07_28),
    method("tasks/update", Effect::Write, V2026_07_28, V2026_07_28),
];

/// The lists that have pages.
pub(crate) const LISTS: [&str; 5] =
    ["tools/list", "prompts/list", "resources/list", "resources/templates/list", "tasks/list"];

/// What a call of that method may do, by the protocol's definition; `None` for a method that no version has,
/// which is a write as long as nobody says otherwise.
///
/// ```
/// use goaround::{Effect, mcp};
///
/// assert_eq!(mcp::effect("resources/read"), Some(Effect::ReadOnly));
/// assert_eq!(mcp::effect("tools/call"), Some(Effect::Write));
/// assert_eq!(mcp::effect("acme/charge"), None);
/// ```
pub fn effect(method: &str) -> Option<Effect> {
    METHODS.iter().find(|known| known.name == method).map(|known| known.effect)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_parsed_as_they_are_written() {
        for version in ProtocolVersion::ALL {
            assert_eq!(ProtocolVersion::parse(version.as_str()), Some(version));
        }
        assert_eq!(ProtocolVersion::parse("2025-11-26"), None);
        assert!(ProtocolVersion::ALL.is_sorted());
    }

    #[test]
    fn the_table_has_each_method_once_and_in_its_versions() {
        for (at, method) in METHODS.iter().enumerate() {
            assert!(method.since <= method.until, "{}", method.name);
            assert!(METHODS[at + 1..].iter().all(|other| other.name != method.name), "{}", method.name);
        }
        let count = |version| METHODS.iter().filter(|method| method.is_in(version)).count();
        let counts = ProtocolVersion::ALL.map(count);
        // The core has 13 requests up to 2025-06-18; the tasks came with 2025-11-25.
        assert_eq!(counts, [13, 13, 13, 17, 13]);
    }

    #[test]
    fn only_what_the_protocol_defines_as_a_read_is_one() {
        let of = |effect| METHODS.iter().filter(move |m| m.effect == effect).map(|m| m.name);
        assert_eq!(of(Effect::Write).collect::<Vec<_>>(), ["tools/call", "initialize", "tasks/update"]);
        assert_eq!(
            of(Effect::Idempotent).collect::<Vec<_>>(),
            ["logging/setLevel", "resources/subscribe", "resources/unsubscribe", "tasks/cancel"]
        );
    }
}
