//! What must hold in every world, whatever happens in it.

use std::fmt;

use goaround::{
    CallError, Outcome,
    write_safety::ledger::{Entry, State},
};

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
    /// A replay came on top of a write that was handed over after the first attempt.
    Overwritten { by: u32, write: u32 },
    /// More hand-overs than there may be.
    Attempts { call: u32, arrived: usize },
    /// A write went out that touches one in doubt.
    KeyInDoubt { write: u32, held: u32 },
    /// The ledger says what is not so, or not what is so.
    Ledger { write: u32, what: &'static str },
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
    /// Something of the crate panicked, in a call or in a task that nobody waits for.
    Panicked(String),
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
            Wrong::KeyInDoubt { .. } => "keys",
            Wrong::Ledger { .. } => "ledger",
            Wrong::Reconnect(_) => "reconnects",
            Wrong::Budget { .. } => "budget",
            Wrong::Leak(_) => "leaks",
            Wrong::Latched(_) => "latched",
            Wrong::Panicked(_) => "panics",
        }
    }
}

/// Whether nobody knows whether the write was applied.
pub fn is_in_doubt(error: &CallError) -> bool {
    match error.outcome() {
        // What was taken for a read is none, whatever the next server says of it.
        Outcome::Unknown => error.effect().is_write(),
        Outcome::Answered => error.may_have_landed(),
        _ => false,
    }
}

/// What is said of the present must be true at once.
pub fn judge_now(world: &World, token: u32, told: &Told) {
    let landed = match told {
        Some(Ok(())) => true,
        Some(Err(error)) => error.outcome() == Outcome::DoneResultLost,
        None => false,
    };
    if landed && world.effects(token) == 0 && !world.lock().answered_as_read.contains(&token) {
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
    if world.plan().store {
        judge_ledger(world);
    }
    let (made, allowed) = {
        let state = world.lock();
        (state.retries_made, state.retries_allowed)
    };
    if made > allowed {
        world.wrong(Wrong::Budget { made, allowed });
    }
}

fn judge_read(world: &World, call: u32, seen: &Seen) {
    let Reports { calls, doubts, abandoned, .. } = seen.reports;
    if calls > 1 || doubts + abandoned > 0 {
        world.wrong(Wrong::Report { write: call, what: "of a read", reports: format!("{:?}", seen.reports) });
    }
    let (asked, most) = (world.asked(call), world.lock().most_reads);
    if asked > most && !seen.crashed {
        world.wrong(Wrong::Attempts { call, arrived: asked as usize });
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
    let Reports { calls, doubts, abandoned, .. } = seen.reports;
    let wrong_report = |what| {
        world.wrong(Wrong::Report { write, what, reports: format!("{:?}, {effects} effects", seen.reports) });
    };
    let lie = |error: &dyn fmt::Display| {
        world.wrong(Wrong::Lie { write, told: format!("{error}, and {effects} effects") });
    };
    let harmless = seen.is_idempotent && world.plan().replays_idempotent && !world.plan().lies.idempotent;
    if effects > 1 && !harmless {
        world.wrong(Wrong::Duplicate { write, effects });
    }
    // Whoever went away while the answer was being recorded finds it in the ledger.
    let is_closed = world.is_closed(write);
    let arrived = world.arrivals(write);
    if arrived > 1 + usize::from(seen.may_replay) && !seen.again {
        world.wrong(Wrong::Attempts { call: write, arrived });
    }
    if calls > 1 || doubts > 1 || abandoned > 1 {
        wrong_report("more than once");
    }
    if seen.told.is_some() && abandoned > 0 {
        wrong_report("abandoned, and it was not");
    }
    if seen.told.is_none() && doubts + abandoned == 0 && effects > 0 && !seen.crashed && !is_closed {
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
            // Also of one that was taken for a read, by a word that its server, or the next one, has taken back.
            if must && doubts == 0 {
                wrong_report("no doubt");
            }
            if !error.effect().is_write() && !error.may_have_landed() && doubts + abandoned > 0 {
                wrong_report("of a read");
            }
            match outcome {
                Outcome::NotDone if effects > 0 && !seen.again => lie(error),
                Outcome::Answered if effects > 0 && !error.may_have_landed() && !seen.again => lie(error),
                Outcome::NoAnswer if effects > 0 || !world.plan().annotated => lie(error),
                _ => {}
            }
            match outcome {
                Outcome::NotDone if doubts > 0 => Branch::NotDoneAfterDoubt,
                Outcome::Unknown if doubts > 0 => Branch::Unknown,
                Outcome::DoneResultLost => Branch::ResultLost,
                Outcome::Answered if error.may_have_landed() => Branch::AnsweredAfterDoubt,
                _ => return,
            }
        }
    };
    world.cover(kind);
}

/// What the ledger says at the end of time must be so.
fn judge_ledger(world: &World) {
    world.judge_what_is_left();
    for entry in world.book() {
        let (token, excused) = {
            let state = world.lock();
            let Some(token) = state.tokens.get(&entry.id.call()).copied() else { continue };
            (token, state.book.unsettled.contains(&entry.id.call()))
        };
        let effects = world.effects(token);
        let (told, again, cut_off) = {
            let state = world.lock();
            let Some(seen) = state.calls.get(&token) else { continue };
            let told = match &seen.told {
                None => None,
                Some(Ok(())) => Some(true),
                Some(Err(error)) => Some(!is_in_doubt(error)),
            };
            (told, seen.again, seen.crashed || state.covered & 1 << Branch::RuntimeShutdown as u64 != 0)
        };
        let wrong = match &entry.state {
            State::Landed { .. } if effects == 0 => "it has landed",
            State::NotLanded { .. } if effects > 0 && !again => "it has not landed",
            State::Open if !excused && !cut_off => "it is open, and its call is over",
            State::InDoubt { .. } if told == Some(true) && !cut_off && !excused => {
                "it is in doubt, and its caller knows"
            }
            State::Answered | State::Landed { .. } | State::NotLanded { .. }
                if told == Some(false) && !cut_off && !again =>
            {
                "it is closed, and its caller does not know"
            }
            _ => continue,
        };
        world.wrong(Wrong::Ledger { write: token, what: wrong });
    }
}

/// What the ledger in memory lists is what nobody knows of.
pub fn judge_memory(world: &World, listed: &[Entry]) {
    let mut found = Vec::new();
    let state = world.lock();
    for (call, token) in &state.tokens {
        let Some(seen) = state.calls.get(token).filter(|seen| seen.is_write && !seen.again) else { continue };
        let times = listed.iter().filter(|entry| entry.id.call() == *call).count();
        let is_listed = times > 0;
        if times > 1 {
            found.push(Wrong::Ledger { write: *token, what: "it is listed twice" });
        }
        let expected = match &seen.told {
            Some(Ok(())) => false,
            Some(Err(error)) => is_in_doubt(error),
            None => seen.reports.abandoned > 0,
        };
        if is_listed != expected {
            let what = if is_listed {
                "it is in doubt, and it is not"
            } else {
                "it is not listed, and it is in doubt"
            };
            found.push(Wrong::Ledger { write: *token, what });
        }
    }
    drop(state);
    found.into_iter().for_each(|wrong| world.wrong(wrong));
}
