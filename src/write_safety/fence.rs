//! Why an earlier attempt can no longer land.

use std::{borrow::Cow, fmt, time::Duration};

use serde::Serialize;

use crate::CallId;

/// The named reason why the earlier attempt of a write can no longer land.
///
/// There is no replay without one, and no way to make one but by name: the layer makes those that it
/// observed or waited out ([`InDoubt::fence`](super::InDoubt::fence)), the caller those that he declares
/// ([`InDoubt::not_landed_because`](super::InDoubt::not_landed_because)). A fence holds for the call that it
/// was made for and for no other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fence {
    #[serde(flatten)]
    kind: Kind,
    basis: FenceBasis,
    #[serde(skip)]
    call: Option<CallId>,
}

/// Whether a fence was seen to hold or said to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FenceBasis {
    /// This crate observed it: the server's process group is gone, and the caller declared that its effects
    /// end with it.
    Observed,
    /// The caller declared it. It is as true as what was declared.
    Declared,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "fence", rename_all = "snake_case")]
enum Kind {
    ProcessGone,
    Quarantine { waited: Duration },
    Because { why: Cow<'static, str> },
}

impl Fence {
    /// The process group that ran the attempt is gone.
    pub(crate) fn process_gone(call: CallId) -> Self {
        Self { kind: Kind::ProcessGone, basis: FenceBasis::Observed, call: Some(call) }
    }

    /// The declared maximum time in flight has passed since the attempt's last byte.
    pub(crate) fn quarantined(call: CallId, waited: Duration) -> Self {
        Self { kind: Kind::Quarantine { waited }, basis: FenceBasis::Declared, call: Some(call) }
    }

    /// The caller's own reason.
    pub(crate) fn because(call: CallId, why: impl Into<Cow<'static, str>>) -> Self {
        Self { kind: Kind::Because { why: why.into() }, basis: FenceBasis::Declared, call: Some(call) }
    }

    /// Whether this crate observed it or the caller declared it.
    pub const fn basis(&self) -> FenceBasis {
        self.basis
    }

    /// Whether it is a reason that the caller gave.
    pub(super) const fn is_because(&self) -> bool {
        matches!(self.kind, Kind::Because { .. })
    }

    /// Whether it was made for that call.
    pub(crate) fn is_for(&self, call: CallId) -> bool {
        self.call == Some(call)
    }
}

impl fmt::Display for Fence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.kind {
            Kind::ProcessGone => f.write_str("observed: the server's process group is gone"),
            Kind::Quarantine { waited } => write!(f, "declared: quarantine of {waited:?}"),
            Kind::Because { why } => write!(f, "declared: {why}"),
        }
    }
}
