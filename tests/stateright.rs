//! The rules for a write in doubt as a model that is explored exhaustively: a client that may crash or sleep,
//! another one that settles what it left, the ledger that they share, and a network that delivers late.
//!
//! With everything in place no write takes effect twice and nothing that the ledger says is untrue. With one
//! rule left out the checker finds the shortest way to harm; `-- --nocapture` prints it.

use stateright::{Checker, Model, Path, Property};

/// What is in place.
#[derive(Clone, Copy, Debug)]
struct Rules {
    /// A check counts only once nothing of the attempt can arrive any more.
    fence: bool,
    /// The check begins after that.
    fence_first: bool,
    /// A replay is claimed in the ledger, by compare-and-set, and so is a verdict.
    claim: bool,
    /// The write is entered before it is sent.
    enter: bool,
    /// Who settles for another knows that it is gone, and not only that its lease has run out: what a ledger granted
    /// it before that it may yet send.
    gone: bool,
    /// There is a check at all: without one a write in doubt is just sent again.
    check: bool,
}

const ALL: Rules =
    Rules { fence: true, fence_first: true, claim: true, enter: true, gone: true, check: true };

/// One copy of the write on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Copy {
    Unsent,
    /// It may take effect at any time.
    OnItsWay,
    Applied,
    Lost,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Phase {
    Start,
    /// Waits for the answer of its own attempt.
    Sent,
    InDoubt,
    /// The fence holds.
    Fenced,
    /// The check found it, or did not.
    Checked(bool),
    /// The check ran before the fence, as it must not.
    CheckedFirst(bool),
    /// The ledger has granted the replay.
    Claimed,
    /// Waits for the answer of the replay.
    Replayed,
    Done(Told),
    Crashed,
}

/// What a client was told, or found out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Told {
    Applied,
    NotApplied,
    Unknown,
    /// Somebody else had settled it.
    Conflict,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Entry {
    None,
    Open,
    InDoubt,
    Applied,
    NotApplied,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    /// The attempt, its replay, and what the settler's caller sends again as a new call.
    copies: [Copy; 3],
    effects: u8,
    entry: Entry,
    revision: u8,
    /// The revision that each of the two goes by.
    known: [u8; 2],
    owner: Phase,
    /// Who settles what a dead owner left, once its lease has run out.
    settler: Phase,
    /// The owner does not run for longer than its lease, which it does not know.
    lease_is_over: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Who {
    Owner,
    Settler,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Step {
    Enter,
    Send,
    /// A copy takes effect, however late.
    Apply(usize),
    Lose(usize),
    Answer(usize),
    /// An attempt has taken too long, or its connection has closed.
    Doubt,
    Crash,
    LeaseRunsOut,
    Notice,
    Fence(Who),
    Check(Who),
    Claim,
    Replay,
    /// The verdict goes into the ledger.
    Settle(Who),
    SendAgain,
    GiveUp(Who),
}

struct Writes(Rules);

impl Writes {
    /// Whether nothing of the write can arrive any more, so that the fence holds: both copies, since the owner may
    /// have sent its replay.
    fn can_land(state: &World, who: Who) -> bool {
        let of_whom = if who == Who::Owner { 1 } else { 2 };
        state.copies[..of_whom].contains(&Copy::OnItsWay)
    }

    /// Whether the owner may yet send what the ledger has granted it.
    fn may_send(state: &World) -> bool {
        matches!(state.owner, Phase::Start | Phase::Claimed)
    }

    fn phase(state: &World, who: Who) -> Phase {
        match who {
            Who::Owner => state.owner,
            Who::Settler => state.settler,
        }
    }

    fn enter_phase(state: &mut World, who: Who, phase: Phase) {
        match who {
            Who::Owner => state.owner = phase,
            Who::Settler => state.settler = phase,
        }
    }

    /// A step in the ledger: by compare-and-set, if that rule is in place.
    fn write_entry(&self, state: &mut World, who: Who, entry: Entry) -> bool {
        let known = state.known[who as usize];
        let is_closed = matches!(state.entry, Entry::Applied | Entry::NotApplied);
        if self.0.claim && (state.revision != known || is_closed) {
            return false;
        }
        state.entry = entry;
        state.revision += 1;
        state.known[who as usize] = state.revision;
        true
    }
}

impl Model for Writes {
    type State = World;
    type Action = Step;

    fn init_states(&self) -> Vec<World> {
        vec![World {
            copies: [Copy::Unsent; 3],
            effects: 0,
            entry: Entry::None,
            revision: 0,
            known: [0; 2],
            owner: Phase::Start,
            settler: Phase::Start,
            lease_is_over: false,
        }]
    }

    fn actions(&self, state: &World, steps: &mut Vec<Step>) {
        let rules = self.0;
        for copy in 0..3 {
            if state.copies[copy] == Copy::OnItsWay {
                steps.extend([Step::Apply(copy), Step::Lose(copy)]);
            }
        }
        match state.owner {
            Phase::Start if rules.enter && state.entry == Entry::None => steps.push(Step::Enter),
            Phase::Start => steps.push(Step::Send),
            Phase::Sent => steps.push(Step::Doubt),
            Phase::Checked(false) if rules.claim => steps.push(Step::Claim),
            Phase::Checked(false) | Phase::Claimed => steps.push(Step::Replay),
            Phase::Checked(true) => steps.push(Step::Settle(Who::Owner)),
            Phase::InDoubt if !rules.check => steps.push(Step::Replay),
            Phase::Replayed => steps.push(Step::GiveUp(Who::Owner)),
            _ => {}
        }
        for (copy, phase) in [(0, Phase::Sent), (0, Phase::InDoubt), (0, Phase::Fenced), (1, Phase::Replayed)]
        {
            if state.owner == phase && state.copies[copy] == Copy::Applied {
                steps.push(Step::Answer(copy));
            }
        }
        if !matches!(state.owner, Phase::Done(_) | Phase::Crashed) {
            steps.push(Step::Crash);
            if !state.lease_is_over && state.entry != Entry::None {
                steps.push(Step::LeaseRunsOut);
            }
        }
        let listed = match state.entry {
            Entry::Open => state.owner == Phase::Crashed || state.lease_is_over,
            Entry::InDoubt => true,
            _ => false,
        };
        if state.settler == Phase::Start && listed {
            steps.push(Step::Notice);
        }
        match state.settler {
            Phase::Checked(_) => steps.push(Step::Settle(Who::Settler)),
            Phase::Claimed => steps.push(Step::SendAgain),
            _ => {}
        }
        for who in [Who::Owner, Who::Settler] {
            match Self::phase(state, who) {
                Phase::InDoubt => {
                    // Known to hold only once it does; without that rule it is just believed.
                    let is_gone = who == Who::Owner || !rules.gone || !Self::may_send(state);
                    if !rules.fence || (is_gone && !Self::can_land(state, who)) {
                        steps.push(Step::Fence(who));
                    }
                    if !rules.fence_first {
                        steps.push(Step::Check(who));
                    }
                    steps.push(Step::GiveUp(who));
                }
                Phase::CheckedFirst(_) if !Self::can_land(state, who) => steps.push(Step::Fence(who)),
                Phase::Fenced => steps.extend([Step::Check(who), Step::GiveUp(who)]),
                _ => {}
            }
        }
    }

    fn next_state(&self, last: &World, step: Step) -> Option<World> {
        let mut state = *last;
        match step {
            Step::Enter => {
                (state.entry, state.revision, state.known[0]) = (Entry::Open, 1, 1);
            }
            Step::Send => {
                state.copies[0] = Copy::OnItsWay;
                state.owner = Phase::Sent;
            }
            Step::Apply(copy) => {
                state.copies[copy] = Copy::Applied;
                state.effects += 1;
            }
            Step::Lose(copy) => state.copies[copy] = Copy::Lost,
            Step::Answer(_) => {
                let settled =
                    state.entry == Entry::None || self.write_entry(&mut state, Who::Owner, Entry::Applied);
                // The answer reaches the caller in any case.
                let _ = settled;
                state.owner = Phase::Done(Told::Applied);
            }
            Step::Doubt => state.owner = Phase::InDoubt,
            Step::Crash => state.owner = Phase::Crashed,
            Step::LeaseRunsOut => state.lease_is_over = true,
            Step::Notice => {
                state.known[1] = state.revision;
                state.settler = Phase::InDoubt;
            }
            Step::Fence(who) => {
                let next = match Self::phase(last, who) {
                    Phase::CheckedFirst(found) => Phase::Checked(found),
                    _ => Phase::Fenced,
                };
                Self::enter_phase(&mut state, who, next);
            }
            Step::Check(who) => {
                let found = last.effects > 0;
                let next = match Self::phase(last, who) {
                    Phase::InDoubt => Phase::CheckedFirst(found),
                    _ => Phase::Checked(found),
                };
                Self::enter_phase(&mut state, who, next);
            }
            Step::Claim => {
                state.owner = match self.write_entry(&mut state, Who::Owner, last.entry) {
                    true => Phase::Claimed,
                    false => Phase::Done(Told::Conflict),
                };
            }
            Step::Replay => {
                state.copies[1] = Copy::OnItsWay;
                state.owner = Phase::Replayed;
            }
            Step::Settle(who) => {
                let Phase::Checked(found) = Self::phase(last, who) else { return None };
                let entry = if found { Entry::Applied } else { Entry::NotApplied };
                let next = match (self.write_entry(&mut state, who, entry), found) {
                    (false, _) => Phase::Done(Told::Conflict),
                    (true, true) => Phase::Done(Told::Applied),
                    // What has not landed its caller may send as a new call.
                    (true, false) => Phase::Claimed,
                };
                Self::enter_phase(&mut state, who, next);
            }
            Step::SendAgain => {
                state.copies[2] = Copy::OnItsWay;
                state.settler = Phase::Done(Told::NotApplied);
            }
            Step::GiveUp(who) => {
                let _ = state.entry != Entry::None && self.write_entry(&mut state, who, Entry::InDoubt);
                Self::enter_phase(&mut state, who, Phase::Done(Told::Unknown));
            }
        }
        Some(state)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always("no second effect", |_, state: &World| state.effects <= 1),
            Property::always("what is done is done", |_, state: &World| {
                state.owner != Phase::Done(Told::Applied) || state.effects > 0
            }),
            Property::always("what the ledger says is so", |_, state: &World| match state.entry {
                Entry::Applied => state.effects > 0,
                // Neither copy has taken effect, and neither can.
                Entry::NotApplied => {
                    !state.copies[..2].iter().any(|copy| matches!(copy, Copy::Applied | Copy::OnItsWay))
                }
                _ => true,
            }),
            Property::always("every unknown is reported", |_, state: &World| {
                let unknown = match state.owner {
                    Phase::Done(Told::Unknown | Told::Conflict) => true,
                    Phase::Crashed => state.copies[0] != Copy::Unsent,
                    _ => false,
                };
                !unknown || state.entry != Entry::None
            }),
            Property::sometimes("a replay lands", |_, state: &World| {
                state.copies[1] == Copy::Applied && state.copies[0] == Copy::Lost
            }),
            Property::sometimes("a copy lands after its caller gave up", |_, state: &World| {
                state.owner == Phase::Done(Told::Unknown) && state.copies[0] == Copy::Applied
            }),
            Property::sometimes("what a crash left is settled and sent again", |_, state: &World| {
                state.owner == Phase::Crashed && state.copies[2] == Copy::Applied
            }),
            Property::sometimes("one of two loses the race for the entry", |_, state: &World| {
                state.owner == Phase::Done(Told::Conflict) || state.settler == Phase::Done(Told::Conflict)
            }),
        ]
    }
}

/// The shortest way to break that property with those rules.
fn counter_example(rules: Rules, property: &'static str) -> Option<Path<World, Step>> {
    // Deeper and deeper, since a search that goes on finds longer ways too.
    (1..=20).find_map(|depth| {
        let checker = Writes(rules).checker().target_max_depth(depth).spawn_bfs().join();
        checker.discovery(property)
    })
}

#[test]
fn with_all_rules_every_order_of_two_clients_and_a_late_network_is_harmless() {
    let checker = Writes(ALL).checker().spawn_bfs().join();
    println!(
        "states={} unique={} depth={}",
        checker.state_count(),
        checker.unique_state_count(),
        checker.max_depth()
    );
    checker.assert_properties();
    assert!(checker.is_done());
    assert!(checker.unique_state_count() > 300, "{}", checker.unique_state_count());
}

#[test]
fn without_any_one_of_the_rules_there_is_a_way_to_harm() {
    for (what, rules, property) in [
        ("the fence", Rules { fence: false, ..ALL }, "no second effect"),
        ("the fence before the check", Rules { fence_first: false, ..ALL }, "no second effect"),
        ("the claim", Rules { claim: false, ..ALL }, "no second effect"),
        ("knowing that the owner is gone", Rules { gone: false, ..ALL }, "no second effect"),
        ("the check", Rules { check: false, ..ALL }, "no second effect"),
        ("the entry before the first byte", Rules { enter: false, ..ALL }, "every unknown is reported"),
    ] {
        let path = counter_example(rules, property);
        let path = path.unwrap_or_else(|| panic!("without {what}: {property:?} holds"));
        println!("without {what}, \"{property}\" breaks:");
        for step in path.into_actions() {
            println!("    {step:?}");
        }
    }
}
