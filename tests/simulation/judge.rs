//! What must hold in every world, whatever happens in it.

use std::fmt;

use goaround::{CallError, Outcome};

use crate::world::{Branch, Reports, Seen, World};

/// What the caller was told; `None` if it went away.
pub type Told = Option<Result<(), CallError>>;

/// An invariant that does not hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wrong {
    /// A write took effect more than once.
    Duplicate { write: u32, effects: u32 },
    /// The caller was told that it is done, and it was not.
    Lost { write: u32 },
    /// Something else that the caller was told is not true.
    Lie { write: u32, told: String },
    /// What must be reported was not, or more than once.
    Report { write: u32, what: &'static str, reports: String },
    /// A call took longer than it may.
    Late { call: u32, by: String },
    /// A replay came on top of a write that had been acknowledged.
    Overwritten { by: u32, write: u32 },
    /// More hand-overs than there may be.
    Attempts { call: u32, arrived: usize },
    /// A connection was given up without a reason.
    Reconnect(String),
    /// More retries than the budget allowed.
    Budget { made: u32, allowed: u32 },
    /// Something never ended.
    Hang(String),
    /// Something was left behind.
    Leak(String),
    /// It does not work any more, though everything is well again.
    Latched(String),
}

impl Wrong {
    /// The name under which it is counted.
    pub fn kind(&self) -> &'static str {
        match self {
            Wrong::Duplicate { .. } => "duplicates",
            Wrong::Lost { .. } => "lost",
            Wrong::Report { .. } => "unreported",
            Wrong::Late { .. } | Wrong::Hang(_) => "late",
            Wrong::Lie { .. } => "lies",
            Wrong::Overwritten { .. } => "overwritten",
            Wrong::Attempts { .. } => "attempts",
            Wrong::Reconnect(_) => "reconnects",
            Wrong::Budget { .. } => "budget",
            Wrong::Leak(_) => "leaks",
            Wrong::Latched(_) => "latched",
        }
    }
}

/// What is said of the present must be true at once.
pub fn judge_now(world: &World, token: u32, told: &Told) {
    let landed = match told {
        Some(Ok(())) => true,
        Some(Err(error)) => error.outcome() == Outcome::DoneResultLost,
        None => false,
    };
    if landed && world.effects(token) == 0 {
        world.wrong(Wrong::Lost { write: token });
    }
}

/// What must hold at the end of time, when the last zombie has landed.
pub fn judge(world: &World) {
    let calls = std::mem::take(&mut world.lock().calls);
    for (token, seen) in calls.iter().filter(|(_, seen)| seen.started) {
        match seen.is_write {
            true => judge_write(world, *token, seen),
            false => judge_read(world, *token, seen),
        }
    }
    world.lock().calls = calls;
    world.find_overwritten();
    let (made, allowed) = {
        let state = world.lock();
        (state.retries_made, state.retries_allowed)
    };
    if made > allowed {
        world.wrong(Wrong::Budget { made, allowed });
    }
}

fn judge_read(world: &World, call: u32, seen: &Seen) {
    let Reports { calls, doubts, abandoned } = seen.reports;
    if calls > 1 || doubts + abandoned > 0 {
        world.wrong(Wrong::Report { write: call, what: "of a read", reports: format!("{:?}", seen.reports) });
    }
    let Some(Err(error)) = &seen.told else { return };
    let lie = match error.outcome() {
        Outcome::NoAnswer | Outcome::Answered => false,
        // Provably nobody looked at it.
        Outcome::NotDone => world.lock().read.contains(&call),
        _ => true,
    };
    if lie {
        world.wrong(Wrong::Lie { write: call, told: error.to_string() });
    }
}

fn judge_write(world: &World, write: u32, seen: &Seen) {
    let effects = world.effects(write);
    let Reports { calls, doubts, abandoned } = seen.reports;
    let wrong_report = |what| {
        world.wrong(Wrong::Report { write, what, reports: format!("{:?}, {effects} effects", seen.reports) });
    };
    let lie = |error: &dyn fmt::Display| {
        world.wrong(Wrong::Lie { write, told: format!("{error}, and {effects} effects") });
    };
    if effects > 1 {
        world.wrong(Wrong::Duplicate { write, effects });
    }
    let arrived = world.arrivals(write);
    if arrived > 1 + usize::from(seen.may_replay) {
        world.wrong(Wrong::Attempts { call: write, arrived });
    }
    if calls > 1 || doubts > 1 || abandoned > 1 {
        wrong_report("more than once");
    }
    if seen.told.is_some() && abandoned > 0 {
        wrong_report("abandoned, and it was not");
    }
    if seen.told.is_none() && abandoned == 0 && effects > 0 {
        wrong_report("not abandoned, and it was");
    }
    let kind = match &seen.told {
        None if abandoned > 0 => Branch::Abandoned,
        None => return,
        Some(Ok(())) if doubts > 0 && arrived > 1 => Branch::OkAfterReplay,
        Some(Ok(())) if doubts > 0 => Branch::OkAfterDoubt,
        Some(Ok(())) => return,
        Some(Err(error)) => {
            let outcome = error.outcome();
            let must = matches!(outcome, Outcome::Unknown | Outcome::DoneResultLost);
            if must && doubts == 0 {
                wrong_report("no doubt");
            }
            match outcome {
                Outcome::NotDone if effects > 0 => lie(error),
                Outcome::Answered if effects > 0 && !error.may_have_landed() => lie(error),
                Outcome::NoAnswer => lie(error),
                _ => {}
            }
            match outcome {
                Outcome::NotDone if doubts > 0 => Branch::NotDoneAfterDoubt,
                Outcome::Unknown => Branch::Unknown,
                Outcome::DoneResultLost => Branch::ResultLost,
                Outcome::Answered if error.may_have_landed() => Branch::AnsweredAfterDoubt,
                _ => return,
            }
        }
    };
    world.cover(kind);
}
