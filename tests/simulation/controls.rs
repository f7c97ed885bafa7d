//! That the simulator can fail: declarations that are not true, connections that lie, and, in a build with
//! `--cfg goaround_controls`, guards of the crate that are switched off. Each must be found out.

use crate::{
    Kind,
    world::{Favours, Lies},
};

/// Something that is wrong on purpose.
pub struct Control {
    pub name: &'static str,
    pub kind: Kind,
    pub lies: Lies,
    #[cfg(goaround_controls)]
    pub guard: Option<goaround::Guard>,
    /// One of these must be found.
    pub shows_as: &'static [&'static str],
}

const TRUE: Lies = Lies {
    favours: Favours::Nothing,
    short_quarantine: false,
    exit_ends_nothing: false,
    because: false,
    independent: false,
    exact_writes: false,
    trusted_evidence: false,
    lagging_reads: false,
    wrong_key: false,
    idempotent: false,
    keys_forgotten: false,
    clock_stands: false,
    unmarked: false,
    says_not_sent: false,
    forgets_doubts: false,
    loses_synced: false,
};

#[cfg(not(goaround_controls))]
const fn lie(name: &'static str, kind: Kind, lies: Lies, shows_as: &'static [&'static str]) -> Control {
    Control {
        name,
        kind,
        lies,
        #[cfg(goaround_controls)]
        guard: None,
        shows_as,
    }
}

/// What can be wrong outside of the crate.
#[cfg(not(goaround_controls))]
pub const LIES: &[Control] = &[
    lie(
        "a quarantine that is too short",
        Kind::Lean,
        Lies { short_quarantine: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "a quarantine that is too short",
        Kind::Full,
        Lies { short_quarantine: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "an exit that does not end the effects",
        Kind::Lean,
        Lies { exit_ends_nothing: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "an exit that does not end the effects",
        Kind::Full,
        Lies { exit_ends_nothing: true, ..TRUE },
        &["duplicates"],
    ),
    lie("a reason that is none", Kind::Lean, Lies { because: true, ..TRUE }, &["duplicates"]),
    lie("a reason that is none", Kind::Full, Lies { because: true, ..TRUE }, &["duplicates"]),
    lie(
        "writes that touch each other, declared independent",
        Kind::Full,
        Lies { independent: true, ..TRUE },
        &["overwritten"],
    ),
    lie(
        "a transport that keeps copies, declared exact",
        Kind::Full,
        Lies { exact_writes: true, ..TRUE },
        &["duplicates", "lies"],
    ),
    lie(
        "a rate limit after the fact, trusted",
        Kind::Full,
        Lies { trusted_evidence: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "a check that reads what is older than the write",
        Kind::Full,
        Lies { lagging_reads: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "a conflict key that is not that of what is touched",
        Kind::Full,
        Lies { wrong_key: true, ..TRUE },
        &["overwritten"],
    ),
    lie(
        "writes that are not idempotent, declared so",
        Kind::Full,
        Lies { idempotent: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "a server that forgets keys sooner than declared",
        Kind::Full,
        Lies { keys_forgotten: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "a wall clock that stands still while the machine sleeps",
        Kind::Full,
        Lies { clock_stands: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "a connection that holds up requests and marks nothing",
        Kind::Lean,
        Lies { unmarked: true, ..TRUE },
        &["duplicates"],
    ),
    lie(
        "a connection that says of everything that it was not sent",
        Kind::Lean,
        Lies { says_not_sent: true, ..TRUE },
        &["duplicates", "lies"],
    ),
    #[cfg(feature = "ledger-durable")]
    lie(
        "a ledger's file that is another one after a crash",
        Kind::Full,
        Lies { forgets_doubts: true, ..TRUE },
        &["keys"],
    ),
    #[cfg(feature = "ledger-durable")]
    lie(
        "a disk that loses what it said to have stored",
        Kind::Full,
        Lies { loses_synced: true, ..TRUE },
        &["unreported"],
    ),
];

#[cfg(goaround_controls)]
const fn guard(
    name: &'static str,
    kind: Kind,
    guard: goaround::Guard,
    shows_as: &'static [&'static str],
) -> Control {
    Control { name, kind, lies: TRUE, guard: Some(guard), shows_as }
}

/// The same, in worlds that have more of what needs that guard.
#[cfg(goaround_controls)]
const fn in_worlds_with(favours: Favours, control: Control) -> Control {
    Control { lies: Lies { favours, ..TRUE }, ..control }
}

/// What can be switched off in the crate.
#[cfg(goaround_controls)]
pub const GUARDS: &[Control] = {
    use goaround::Guard;
    &[
        in_worlds_with(
            Favours::SlowConnects,
            guard(
                "what is held up is sent after its attempt's time",
                Kind::Lean,
                Guard::AttemptTime,
                &["duplicates"],
            ),
        ),
        guard("the last byte ignored", Kind::Full, Guard::LastByte, &["duplicates"]),
        guard("precedence dropped", Kind::Full, Guard::Precedence, &["lies"]),
        guard("the generation ignored", Kind::Full, Guard::Generation, &["reconnects"]),
        guard("withdrawal without compare-and-set", Kind::Full, Guard::Withdrawal, &["duplicates", "lies"]),
        guard("the budget off", Kind::Full, Guard::Budget, &["budget"]),
        guard("the last poll off", Kind::Full, Guard::LastPoll, &["unreported"]),
        guard("the deadline's timer off", Kind::Full, Guard::Timer, &["late"]),
        guard("no fence needed", Kind::Full, Guard::Fence, &["duplicates"]),
        guard("the check before the fence", Kind::Full, Guard::FenceFirst, &["duplicates"]),
        in_worlds_with(
            Favours::Overlap,
            guard("a probe older than the fence", Kind::Full, Guard::ProbeAge, &["duplicates"]),
        ),
        in_worlds_with(
            Favours::Overlap,
            guard(
                "a connection as old as the end of its connect",
                Kind::Full,
                Guard::ConnectAge,
                &["duplicates"],
            ),
        ),
        guard("a process gone without its group", Kind::Full, Guard::Group, &["duplicates"]),
        guard("a fence over unwritten bytes", Kind::Full, Guard::Unsent, &["duplicates"]),
        guard("other writes since ignored", Kind::Full, Guard::OtherWrites, &["overwritten"]),
        in_worlds_with(
            Favours::LateTurns,
            guard(
                "a replay that waits while another write goes ahead",
                Kind::Full,
                Guard::ReplayWait,
                &["overwritten"],
            ),
        ),
        in_worlds_with(
            Favours::LateTurns,
            guard(
                "a write that waits not counted when it goes",
                Kind::Full,
                Guard::WriteWait,
                &["overwritten"],
            ),
        ),
        in_worlds_with(
            Favours::LateTurns,
            guard(
                "a write that is handed back not counted when it goes again",
                Kind::Full,
                Guard::HandedBack,
                &["overwritten", "keys"],
            ),
        ),
        in_worlds_with(
            Favours::LateTurns,
            guard(
                "a write that is polled late not counted when it is",
                Kind::Lean,
                Guard::FirstPoll,
                &["overwritten"],
            ),
        ),
        guard("a place in the queue lost", Kind::Full, Guard::QueuePlace, &["overwritten"]),
        guard("a second replay", Kind::Full, Guard::Once, &["attempts"]),
        guard("the drop guard off", Kind::Full, Guard::DropGuard, &["unreported"]),
        guard("a key in doubt ignored", Kind::Full, Guard::KeyInDoubt, &["keys"]),
        in_worlds_with(
            Favours::LateTurns,
            guard("a key in doubt ignored by a write that waits", Kind::Full, Guard::KeyWait, &["keys"]),
        ),
        guard("handed over before it is entered", Kind::Full, Guard::Enter, &["ledger"]),
        guard("replayed without a claim", Kind::Full, Guard::Claim, &["ledger"]),
        in_worlds_with(
            Favours::Windows,
            guard("a key's window ignored", Kind::Full, Guard::Window, &["duplicates"]),
        ),
        in_worlds_with(
            Favours::Windows,
            guard("the wall clock ignored", Kind::Full, Guard::WallClock, &["duplicates"]),
        ),
        in_worlds_with(
            Favours::Windows,
            guard(
                "a key's window ignored by a replay that waits",
                Kind::Full,
                Guard::WindowWait,
                &["duplicates"],
            ),
        ),
        guard("an annotation that is taken back ignored", Kind::Full, Guard::Annotation, &["duplicates"]),
    ]
};

/// What this build can have wrong.
pub const fn all() -> &'static [Control] {
    #[cfg(goaround_controls)]
    return GUARDS;
    #[cfg(not(goaround_controls))]
    LIES
}

impl Control {
    /// Switches its guard off on this thread.
    pub fn begin(&self) {
        #[cfg(goaround_controls)]
        goaround::switch_off(self.guard);
    }
}
