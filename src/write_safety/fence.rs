//! Why an earlier attempt can no longer land.

use std::{borrow::Cow, fmt, time::Duration};

use serde::Serialize;

use crate::CallId;

/// The named reason why the earlier attempt of a write can no longer land.
///
/// There is no replay without one, and no way to make one but by name: the layer makes those that it
/// observed or waited out ([`InDoubt::fence`](super::InDoubt::fence)), the caller's check those that he
/// declares: [`not_landed_deduplicated`](super::InDoubt::not_landed_deduplicated),
/// [`not_landed_conditional`](super::InDoubt::not_landed_conditional),
/// [`not_landed_terminal_task`](super::InDoubt::not_landed_terminal_task) and, for what has no name here,
/// [`not_landed_because`](super::InDoubt::not_landed_because). A fence holds for the call that it was made for
/// and for no other. When each is true is in the guide, [`effect_check`](super::effect_check).
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
    /// end with it; or the process that was to send the write is gone, and had started no server.
    Observed,
    /// The caller declared it. It is as true as what was declared.
    Declared,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "fence", rename_all = "snake_case")]
enum Kind {
    ProcessGone,
    NeverSent,
    Quarantine { waited: Duration },
    Deduplicated { window: Duration },
    Conditional,
    TerminalTask,
    Because { why: Cow<'static, str> },
}

impl Fence {
    /// The process group that ran the attempt is gone.
    pub(crate) fn process_gone(call: CallId) -> Self {
        Self { kind: Kind::ProcessGone, basis: FenceBasis::Observed, call: Some(call) }
    }

    /// The process that was to send it is gone, and had started no server.
    pub(super) fn never_sent(call: CallId) -> Self {
        Self { kind: Kind::NeverSent, basis: FenceBasis::Observed, call: Some(call) }
    }

    /// The declared maximum time in flight has passed since the attempt's last byte.
    pub(crate) fn quarantined(call: CallId, waited: Duration) -> Self {
        Self::declared(Kind::Quarantine { waited }, call)
    }

    /// The server keeps the write's key for that long, and applies no second copy meanwhile.
    pub(super) fn deduplicated(call: CallId, window: Duration) -> Self {
        Self::declared(Kind::Deduplicated { window }, call)
    }

    /// The write is a compare-and-set.
    pub(super) fn conditional(call: CallId) -> Self {
        Self::declared(Kind::Conditional, call)
    }

    /// The task that ran the write is over.
    pub(super) fn terminal_task(call: CallId) -> Self {
        Self::declared(Kind::TerminalTask, call)
    }

    /// The caller's own reason.
    pub(crate) fn because(call: CallId, why: impl Into<Cow<'static, str>>) -> Self {
        Self::declared(Kind::Because { why: why.into() }, call)
    }

    fn declared(kind: Kind, call: CallId) -> Self {
        Self { kind, basis: FenceBasis::Declared, call: Some(call) }
    }

    /// Whether this crate observed it or the caller declared it.
    pub const fn basis(&self) -> FenceBasis {
        self.basis
    }

    /// For how long the server keeps the key, if that is the fence.
    pub(super) const fn window(&self) -> Option<Duration> {
        match self.kind {
            Kind::Deduplicated { window } => Some(window),
            _ => None,
        }
    }

    /// Whether the attempt itself can no longer land, rather than that a second copy of it does no harm. Without
    /// that copy such a fence says nothing of the attempt.
    pub(super) const fn stops_the_attempt(&self) -> bool {
        !matches!(self.kind, Kind::Deduplicated { .. } | Kind::Conditional)
    }

    /// Whether the caller's check named it, so that it need not have held before the check began.
    pub(super) const fn is_of_the_check(&self) -> bool {
        !matches!(self.kind, Kind::ProcessGone | Kind::NeverSent | Kind::Quarantine { .. })
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
            Kind::NeverSent => f.write_str("observed: nothing was sent, no server had been started"),
            Kind::Quarantine { waited } => write!(f, "declared: quarantine of {waited:?}"),
            Kind::Deduplicated { window } => write!(f, "declared: the server keeps the key for {window:?}"),
            Kind::Conditional => f.write_str("declared: a compare-and-set, which applies no second copy"),
            Kind::TerminalTask => f.write_str("declared: the task that ran it is over"),
            Kind::Because { why } => write!(f, "declared: {why}"),
        }
    }
}
