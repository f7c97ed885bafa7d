//! Which writes touch each other. A replay must not land on top of another write that was handed over after
//! the first attempt: the caller of that one was told that it is done.
//!
//! Writes without a conflict key are counted by each service. The keys are the ledger's: all stacks that share one see
//! each other's writes on a key, from the moment they begin.

use std::{
    collections::HashMap,
    mem,
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::{Context, Poll, Waker},
};

use super::{
    copies::Entered,
    ledger::{EntryId, State},
    settle,
    unrecorded::{Backlog, Unrecorded},
};
use crate::{
    Activity, Closure,
    call::{Gate, Standing, WriteOrder, address},
    wakers::wake_all,
};

/// The order of a service's writes, over all of its clones.
///
/// A write with a conflict key touches those with the same key and those without one; one without touches all.
#[derive(Debug)]
pub(super) struct Conflicts {
    /// How many hand-overs of writes there were.
    all: AtomicU64,
    /// Whether there are writes with a key here. If not, nobody asks for those without one alone.
    has_keys: bool,
    /// How many hand-overs were of writes without a key.
    keyless: AtomicU64,
    keys: Keys,
}

/// The conflict keys of calls under way, of all services that share a ledger. A clone is the same.
#[derive(Clone, Debug, Default)]
pub(super) struct Keys {
    held: Arc<Mutex<HashMap<Arc<str>, Key>>>,
    /// Whether replays wait for a doubt to end, or have waited.
    are_waited_for: Arc<AtomicBool>,
    backlog: Arc<Backlog>,
    entered: Arc<Entered>,
}

/// A conflict key that calls under way have.
#[derive(Debug, Default)]
struct Key {
    /// How many hand-overs there were, of which one call's that follow each other are one.
    writes: u64,
    /// The call that was handed over last.
    last: Option<EntryId>,
    calls: usize,
    /// How many holds there were; copies of a call have one each.
    holds: u64,
    /// The calls that are in doubt, and their methods; by which hold.
    doubts: Vec<(u64, (EntryId, String))>,
    /// How many calls ended in doubt since there were calls, and the last of them.
    left: u64,
    last_left: Option<(EntryId, String)>,
    /// The holds that wait until no other call is in doubt.
    waiting: Vec<(u64, Waker)>,
}

impl Key {
    /// The doubt of another call, if there is one.
    fn other_doubt(&self, id: EntryId) -> Option<&(EntryId, String)> {
        self.doubts.iter().map(|(_, doubt)| doubt).find(|(held, _)| *held != id)
    }

    /// What stands in the way of a call that began when so many had ended in doubt.
    fn in_the_way(&self, id: EntryId, left: u64) -> Option<&(EntryId, String)> {
        self.other_doubt(id).or(self.last_left.as_ref().filter(|_| self.was_left_since(left)))
    }

    /// Whether the doubt of another call keeps a replay of a call from going that began when so many had ended in doubt.
    /// Of those that do not touch each other only what has ended so counts.
    fn shuts_out(&self, id: EntryId, left: u64, independent: bool) -> bool {
        let is_in_doubt = !independent && self.other_doubt(id).is_some();
        (self.was_left_since(left) || is_in_doubt) && !off!(KeyInDoubt)
    }

    /// Whether a call has ended in doubt since so many had.
    fn was_left_since(&self, left: u64) -> bool {
        self.left != left
    }

    /// Counts a hand-over of that call.
    fn hand_over(&mut self, id: EntryId) -> u64 {
        if self.last.replace(id) != Some(id) {
            self.writes += 1;
        }
        self.writes
    }
}

impl Keys {
    /// Tells one ledger from another, as long as both are there.
    pub(super) fn number(&self) -> NonZeroUsize {
        address(&self.held)
    }

    /// The writes that are entered in it.
    pub(super) fn entered(&self) -> &Arc<Entered> {
        &self.entered
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Key>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Those who wait for a doubt to end look again: a write was handed over that may touch them.
    fn wake(&self) {
        // In one order with the count of what was handed over: whoever waits says so first, and then looks at that.
        if self.are_waited_for.load(Ordering::SeqCst) {
            self.wake_all();
        }
    }

    #[cold]
    fn wake_all(&self) {
        let woken: Vec<_> = {
            let mut keys = self.lock();
            self.are_waited_for.store(false, Ordering::SeqCst);
            keys.values_mut().flat_map(|state| mem::take(&mut state.waiting)).collect()
        };
        wake_all(woken.into_iter().map(|(_, waker)| waker));
    }
}

impl Conflicts {
    /// Of a service whose ledger has these keys, and that may have writes with one.
    pub(super) fn new(keys: Keys, has_keys: bool) -> Arc<Self> {
        Arc::new(Self { all: AtomicU64::new(0), has_keys, keyless: AtomicU64::new(0), keys })
    }

    /// A write with that key begins; an error names the one in doubt that stands in its way.
    pub(super) fn enter(self: &Arc<Self>, key: Arc<str>, id: EntryId) -> Result<Hold, (EntryId, String)> {
        self.hold(key, id, |state| state.doubts.first().map(|(_, doubt)| doubt))
    }

    /// An attempt of a write with that key passes that another layer, further out, answers for, perhaps by the same key. It
    /// is turned away as any other would be.
    pub(super) fn pass(self: &Arc<Self>, key: Arc<str>, id: EntryId) -> Result<Hold, (EntryId, String)> {
        self.hold(key, id, |state| state.other_doubt(id))
    }

    fn hold(
        self: &Arc<Self>,
        key: Arc<str>,
        id: EntryId,
        in_its_way: impl FnOnce(&Key) -> Option<&(EntryId, String)>,
    ) -> Result<Hold, (EntryId, String)> {
        let mut keys = self.lock();
        let state = keys.entry(Arc::clone(&key)).or_default();
        if let Some(doubt) = in_its_way(state) {
            return Err(doubt.clone());
        }
        state.calls += 1;
        state.holds += 1;
        let (number, left) = (state.holds, state.left);
        drop(keys);
        Ok(Hold { of: Arc::clone(self), id, number, key, left, place: Place::default() })
    }

    /// Counts a write without a key that is handed over; its number among all.
    pub(super) fn hand_over(&self) -> u64 {
        if self.has_keys {
            self.hand_over_keyless();
        }
        self.all.fetch_add(1, Ordering::AcqRel) + 1
    }

    /// Counts it for those with a key.
    fn hand_over_keyless(&self) {
        self.keyless.fetch_add(1, Ordering::SeqCst);
        self.keys.wake();
    }

    /// Whether no other write was handed over after the one without a key that has that number.
    #[inline]
    pub(super) fn is_last(&self, number: u64) -> bool {
        self.all.load(Ordering::Acquire) == number
    }

    /// Claims the replay of the one without a key that has that number: `false` if another write was handed
    /// over since.
    pub(super) fn claim(&self, number: u64) -> bool {
        let next = number + 1;
        let claimed = self.all.compare_exchange(number, next, Ordering::AcqRel, Ordering::Acquire).is_ok();
        if claimed && self.has_keys {
            self.hand_over_keyless();
        }
        claimed
    }

    /// Counts one with a key; its place.
    fn hand_over_keyed(&self, state: &mut Key, id: EntryId) -> Place {
        let keyless = self.keyless.load(Ordering::Acquire);
        self.all.fetch_add(1, Ordering::AcqRel);
        Place { writes: state.hand_over(id), keyless }
    }

    /// Whether no write that touches the one with that place was handed over since.
    fn is_last_keyed(&self, state: &Key, place: Place) -> bool {
        state.writes == place.writes && self.keyless.load(Ordering::SeqCst) == place.keyless
    }

    /// Whether the replay of a call with that place may go, that began when so many had ended in doubt.
    fn lets_go(
        &self,
        state: &Key,
        (id, left, place): (EntryId, u64, Place),
        independent: bool,
    ) -> Result<(), ShutOut> {
        if !independent && !self.is_last_keyed(state, place) {
            return Err(ShutOut::Overtaken);
        }
        match state.shuts_out(id, left, independent) {
            true => Err(ShutOut::KeyInDoubt),
            false => Ok(()),
        }
    }

    /// A write without a key, with that number, waits for a connection.
    pub(super) fn in_line(self: &Arc<Self>, number: u64, replay: bool, independent: bool) -> InLine {
        let place = Place { writes: number, keyless: 0 };
        let line = InLine::new(Arc::clone(self), None, replay, place);
        InLine { independent, ..line }
    }

    /// The place of a write without a key that has that number.
    pub(super) fn standing(self: &Arc<Self>, number: u64) -> Standing {
        let place = Place { writes: number, keyless: 0 };
        Standing { order: Arc::<Self>::clone(self), id: None, place }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Arc<str>, Key>> {
        self.keys.lock()
    }
}

impl WriteOrder for Conflicts {
    fn goes(&self, key: Option<(&Arc<str>, EntryId)>, place: Place) {
        let Some((key, id)) = key else {
            if !self.is_last(place.writes) && !off!(WriteWait) {
                self.hand_over();
            }
            return;
        };
        if let Some(state) = self.lock().get_mut(key)
            && !self.is_last_keyed(state, place)
            && !off!(WriteWait)
        {
            self.hand_over_keyed(state, id);
        }
        self.keys.wake();
    }
}

/// A write's hold on its key, until its call is over.
#[derive(Debug)]
pub(super) struct Hold {
    of: Arc<Conflicts>,
    id: EntryId,
    /// Among those on its key.
    number: u64,
    key: Arc<str>,
    /// How many calls had ended in doubt when it began.
    left: u64,
    place: Place,
}

/// A write's place in the order, as of its last hand-over.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Place {
    /// Its number among those with its key; without one, among all.
    pub(super) writes: u64,
    keyless: u64,
}

/// A write that waits for a connection.
#[derive(Debug)]
pub(super) struct InLine {
    of: Arc<Conflicts>,
    key: Option<(Arc<str>, EntryId)>,
    /// How many calls had ended in doubt when it began.
    left: u64,
    replay: bool,
    /// Whether it does not matter what else was handed over.
    independent: bool,
    /// The end of the connection beside whose process it must not go.
    beside: Option<Closure>,
    seen: Mutex<Seen>,
}

#[derive(Clone, Copy, Debug)]
struct Seen {
    place: Place,
    shut_out: Option<ShutOut>,
    /// Whether it was let go, and has not looked at the order of writes since.
    went: bool,
}

/// Why a replay must not go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ShutOut {
    /// Another write that touches it was handed over since.
    Overtaken,
    /// Another one with its key is in doubt.
    KeyInDoubt,
    /// The old process is still there, so that the quarantine it goes by does not hold.
    Outlived,
}

impl Hold {
    pub(super) fn key(&self) -> &Arc<str> {
        &self.key
    }

    /// The doubts that the ledger has yet to record.
    pub(super) fn backlog(&self) -> &Arc<Backlog> {
        &self.of.keys.backlog
    }

    /// Its doubt stays, and the ledger could not record it, or nobody knows whether it did.
    pub(super) fn leave(&self, method: String, revision: u64, claiming: bool, doubt: State) {
        let doubt = Unrecorded { id: self.id, method, revision, claiming, state: doubt };
        self.backlog().keep(&self.key, doubt);
    }

    /// It is handed over.
    pub(super) fn hand_over(&mut self) {
        let mut keys = self.of.lock();
        let state = keys.entry(Arc::clone(&self.key)).or_default();
        self.place = self.of.hand_over_keyed(state, self.id);
    }

    /// Where it stands in the order of writes.
    pub(super) fn standing(&self) -> Standing {
        Standing { order: Arc::<Conflicts>::clone(&self.of), id: Some(self.id), place: self.place }
    }

    /// It waits for a connection, perhaps as a replay.
    pub(super) fn in_line(&self, replay: bool, independent: bool) -> InLine {
        let key = Some((Arc::clone(&self.key), self.id));
        let line = InLine::new(Arc::clone(&self.of), key, replay, self.place);
        InLine { left: self.left, independent, ..line }
    }

    /// It has gone since it stood in line.
    pub(super) fn take_place(&mut self, line: &InLine) {
        self.place = line.place();
    }

    /// It may go only now, and may have gone when it was handed over.
    pub(super) fn goes_later(&self) {
        if let Some(state) = self.of.lock().get_mut(&self.key) {
            self.of.hand_over_keyed(state, self.id);
        }
        self.of.keys.wake();
    }

    /// Whether no write that touches it was handed over since.
    pub(super) fn is_last(&self) -> bool {
        self.of.lock().get(&self.key).is_some_and(|state| self.of.is_last_keyed(state, self.place))
    }

    /// Claims its replay, unless another write forbids it.
    pub(super) fn claim(&mut self, independent: bool) -> Result<(), ShutOut> {
        let mut keys = self.of.lock();
        let Some(state) = keys.get_mut(&self.key) else { return Err(ShutOut::Overtaken) };
        self.of.lets_go(state, (self.id, self.left, self.place), independent)?;
        self.place = self.of.hand_over_keyed(state, self.id);
        Ok(())
    }

    /// Another call with its key that is in doubt, or has ended so since this one began: its ledger may have been
    /// asked before that.
    pub(super) fn in_its_way(&self) -> Option<(EntryId, String)> {
        self.of.lock().get(&self.key)?.in_the_way(self.id, self.left).cloned()
    }

    /// Whether its replay may go: not over another write that was handed over since, nor over one with its key that is in
    /// doubt, or has ended so since it began, which may still land.
    pub(super) fn lets_go(&self, independent: bool) -> Result<(), ShutOut> {
        let keys = self.of.lock();
        let state = keys.get(&self.key).ok_or(ShutOut::Overtaken)?;
        self.of.lets_go(state, (self.id, self.left, self.place), independent)
    }

    /// Waits until the doubt of every other call with its key has ended, one way or another; but not if its replay must not
    /// go anyhow. So of two that are in doubt only the one waits that was handed over last.
    pub(super) fn poll_others(&self, cx: &mut Context<'_>) -> Poll<()> {
        // Wakers are foreign code: cloned and dropped without the lock.
        let waker = cx.waker().clone();
        let mut keys = self.of.lock();
        self.of.keys.are_waited_for.store(true, Ordering::SeqCst);
        let Some(state) = keys.get_mut(&self.key) else { return Poll::Ready(()) };
        let lets_go = self.of.lets_go(state, (self.id, self.left, self.place), false);
        if lets_go != Err(ShutOut::KeyInDoubt) || state.was_left_since(self.left) {
            return Poll::Ready(());
        }
        let old = match state.waiting.iter_mut().find(|(hold, _)| *hold == self.number) {
            Some((_, old)) => Some(mem::replace(old, waker)),
            None => {
                state.waiting.push((self.number, waker));
                None
            }
        };
        drop(keys);
        drop(old);
        Poll::Pending
    }

    /// Its call ends in doubt. The key is kept until the hold goes, and by the ledger from then on.
    pub(super) fn end_in_doubt(&self, method: &str) {
        self.doubt(method);
        let woken = self.of.lock().get_mut(&self.key).map(|state| {
            state.left += 1;
            state.last_left = Some((self.id, method.to_owned()));
            mem::take(&mut state.waiting)
        });
        wake_all(woken.into_iter().flatten().map(|(_, waker)| waker));
    }

    /// It is in doubt: until that ends, later writes with its key are refused.
    pub(super) fn doubt(&self, method: &str) {
        if let Some(state) = self.of.lock().get_mut(&self.key)
            && !state.doubts.iter().any(|(hold, _)| *hold == self.number)
        {
            state.doubts.push((self.number, (self.id, method.to_owned())));
        }
    }

    /// What was in doubt has turned out not to be.
    pub(super) fn no_doubt(&self) {
        let woken = self.of.lock().get_mut(&self.key).and_then(|state| {
            let before = state.doubts.len();
            state.doubts.retain(|(hold, _)| *hold != self.number);
            (state.doubts.len() < before).then(|| mem::take(&mut state.waiting))
        });
        wake_all(woken.into_iter().flatten().map(|(_, waker)| waker));
    }
}

impl InLine {
    fn new(of: Arc<Conflicts>, key: Option<(Arc<str>, EntryId)>, replay: bool, place: Place) -> Self {
        let seen = Mutex::new(Seen { place, shut_out: None, went: false });
        Self { of, key, left: 0, replay, independent: false, beside: None, seen }
    }

    /// Of a replay by a quarantine, that must not go beside the process of that connection.
    pub(super) fn not_beside(self, closure: Option<Closure>) -> Self {
        Self { beside: closure, ..self }
    }

    /// As of its last hand-over.
    pub(super) fn place(&self) -> Place {
        self.lock().place
    }

    /// Whether it was let go since that was asked last: another thread may have sent something between that and its
    /// connection.
    pub(super) fn went(&self) -> bool {
        mem::take(&mut self.lock().went)
    }

    /// Why it was not let go, if it is a replay that was not.
    pub(super) fn shut_out(&self) -> Option<ShutOut> {
        self.lock().shut_out
    }

    fn lock(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it may go, counted as of now.
    fn goes(&self) -> bool {
        if self.replay {
            return self.lets_replay_go();
        }
        let place = self.place();
        let Some((key, id)) = &self.key else {
            if !self.independent && !self.of.is_last(place.writes) && !off!(WriteWait) {
                let writes = self.of.hand_over();
                self.lock().place.writes = writes;
            }
            return true;
        };
        let mut keys = self.of.lock();
        let Some(state) = keys.get_mut(key) else { return false };
        if state.in_the_way(*id, self.left).is_some() && !off!(KeyWait) {
            return false;
        }
        if !self.of.is_last_keyed(state, place) && !off!(WriteWait) {
            self.lock().place = self.of.hand_over_keyed(state, *id);
        }
        true
    }

    /// Whether the replay may go; if not, it is noted why.
    fn lets_replay_go(&self) -> bool {
        let shut_out = self.lets_go(self.place()).err();
        self.lock().shut_out = shut_out;
        shut_out.is_none()
    }

    /// Whether the replay may go, and if not, why.
    fn lets_go(&self, place: Place) -> Result<(), ShutOut> {
        if self.beside.is_some() && settle::has_outlived(self.beside.as_ref()) {
            return Err(ShutOut::Outlived);
        }
        let Some((key, id)) = &self.key else {
            let goes = self.independent || self.of.is_last(place.writes) || off!(ReplayWait);
            return if goes { Ok(()) } else { Err(ShutOut::Overtaken) };
        };
        let keys = self.of.lock();
        // Without it its call is over.
        let state = keys.get(key).ok_or(ShutOut::Overtaken)?;
        self.of.lets_go(state, (*id, self.left, place), self.independent || off!(ReplayWait))
    }
}

/// A replay must not go over a write that was handed over while it waited. Any other write goes later than it was
/// counted: it counts when it goes, so that no replay lands on it, and does not go while its key is in doubt.
impl Gate for InLine {
    fn opens(&self) -> bool {
        let opens = self.goes();
        self.lock().went |= opens;
        opens
    }

    fn stays_open(&self) -> bool {
        match self.replay {
            true => self.lets_replay_go(),
            false => !off!(QueuePlace) || self.opens(),
        }
    }
}

/// What passes a layer and may go, or go once more, on a task of its own.
#[derive(Debug)]
struct Counted {
    standing: Standing,
    key: Option<Arc<str>>,
}

impl Gate for Counted {
    fn opens(&self) -> bool {
        let Standing { order, id, place } = &self.standing;
        order.goes(self.key.as_ref().zip(*id), *place);
        true
    }

    fn stays_open(&self) -> bool {
        true
    }

    fn is_asked_again(&self) -> bool {
        false
    }
}

/// The place among a layer's writes of one that passes it, as long as its attempt is under way.
#[derive(Debug)]
pub(super) struct Passage {
    order: Order,
    /// The attempt's, of the layer that answers for it.
    activity: Option<Arc<Activity>>,
    line: Option<Arc<InLine>>,
    counted: Option<Arc<Counted>>,
    polled: bool,
    /// Whether it is polled for the first time.
    begins: bool,
    /// How many times it has gone, as far as it was looked at.
    goings: u32,
}

#[derive(Debug)]
pub(super) enum Order {
    Keyed(Hold),
    /// With its number among all.
    Keyless(Arc<Conflicts>, u64),
}

impl Passage {
    pub(super) fn new(order: Order, activity: Option<Arc<Activity>>) -> Self {
        Self { order, activity, line: None, counted: None, polled: false, begins: false, goings: 0 }
    }

    /// Before its attempt is polled: as any other write it counts anew where it may go only now, and stands in line once it
    /// waits.
    pub(super) fn look(&mut self) {
        self.begins = !mem::replace(&mut self.polled, true);
        if self.begins {
            self.count_anew();
        }
        if let Some(activity) = self.activity.as_deref().filter(|_| !self.begins) {
            // What went meanwhile, on a task of its own, was counted at that moment.
            let goings = activity.goings();
            if mem::replace(&mut self.goings, goings) != goings
                && let Some(line) = &self.line
            {
                line.went();
            }
        }
        let Some(activity) = self.activity.as_ref().filter(|it| self.line.is_none() && it.is_waiting())
        else {
            return;
        };
        let line = Arc::new(match &self.order {
            Order::Keyed(hold) => hold.in_line(false, false),
            Order::Keyless(of, number) => of.in_line(*number, false, false),
        });
        activity.set_gate(Arc::<InLine>::clone(&line));
        self.line = Some(line);
        self.uncount();
    }

    /// After that.
    pub(super) fn look_again(&mut self) {
        let begins = mem::take(&mut self.begins);
        if let Some(activity) = self.activity.as_ref().filter(|_| begins && self.line.is_none()) {
            let counted = Arc::new(match &self.order {
                Order::Keyed(hold) => Counted { standing: hold.standing(), key: Some(Arc::clone(&hold.key)) },
                Order::Keyless(of, number) => Counted { standing: of.standing(*number), key: None },
            });
            activity.set_gate(Arc::<Counted>::clone(&counted));
            self.counted = Some(counted);
        }
        let goings = self.activity.as_deref().map_or(0, Activity::goings);
        if begins
            || mem::replace(&mut self.goings, goings) != goings
            || self.line.as_ref().is_some_and(|line| line.went() && !off!(WriteWait))
        {
            self.count_anew();
        }
    }

    fn uncount(&mut self) {
        if let (Some(activity), Some(counted)) = (&self.activity, self.counted.take()) {
            activity.remove_gate(&counted);
        }
    }

    fn count_anew(&mut self) {
        match &mut self.order {
            _ if off!(FirstPoll) => {}
            Order::Keyed(hold) if !hold.is_last() => hold.goes_later(),
            Order::Keyless(of, number) if !of.is_last(*number) => *number = of.hand_over(),
            _ => {}
        }
    }
}

/// Another connection, to which it may be handed over, need not be this layer's.
impl Drop for Passage {
    fn drop(&mut self) {
        self.uncount();
        if let (Some(activity), Some(line)) = (&self.activity, &self.line) {
            activity.remove_gate(line);
        }
    }
}

/// What is left of a doubt is in the ledger by then, or in the backlog.
impl Drop for Hold {
    fn drop(&mut self) {
        self.no_doubt();
        let mut keys = self.of.lock();
        let Some(state) = keys.get_mut(&self.key) else { return };
        let own = state.waiting.iter().position(|(hold, _)| *hold == self.number);
        let own = own.map(|at| state.waiting.swap_remove(at));
        state.calls -= 1;
        if state.calls == 0 {
            keys.remove(&self.key);
        }
        drop(keys);
        drop(own);
    }
}

#[cfg(test)]
mod tests {
    use tokio_test::task;

    use super::*;
    use crate::CallId;

    fn id(n: u64) -> EntryId {
        EntryId::of(CallId::from_parts(1, n).unwrap())
    }

    fn handed_over(conflicts: &Arc<Conflicts>, key: &str, n: u64) -> Hold {
        let mut hold = conflicts.enter(key.into(), id(n)).unwrap();
        hold.hand_over();
        hold
    }

    #[test]
    fn a_write_without_a_key_touches_all_and_one_with_a_key_its_own_and_those_without() {
        let conflicts = Conflicts::new(Keys::default(), true);
        let keyless = conflicts.hand_over();
        assert!(conflicts.is_last(keyless));
        let mut first = handed_over(&conflicts, "a", 1);
        assert!(!conflicts.is_last(keyless) && !conflicts.claim(keyless));
        let other = handed_over(&conflicts, "b", 2);
        assert!(first.is_last() && other.is_last());

        let mut second = handed_over(&conflicts, "a", 3);
        assert!(!first.is_last());
        assert_eq!(first.claim(false), Err(ShutOut::Overtaken));
        assert_eq!(second.claim(false), Ok(()));
        assert_eq!(second.claim(false), Ok(()), "it claims against others, not against itself");
        conflicts.hand_over();
        assert!(!second.is_last() && !other.is_last());
        assert_eq!(second.claim(false), Err(ShutOut::Overtaken));
        assert_eq!(second.claim(true), Ok(()));
    }

    #[test]
    fn a_replay_waits_for_the_doubt_of_another_write_on_its_key_and_does_not_go_over_one_that_stays() {
        for stays in [false, true] {
            let conflicts = Conflicts::new(Keys::default(), true);
            let other = handed_over(&conflicts, "a", 1);
            let mut last = handed_over(&conflicts, "a", 2);
            last.doubt("pay");
            assert!(last.poll_others(&mut Context::from_waker(Waker::noop())).is_ready());
            other.doubt("refund");
            assert_eq!(last.claim(false), Err(ShutOut::KeyInDoubt));
            let mut waiting = task::spawn(std::future::poll_fn(|cx| last.poll_others(cx)));
            assert!(waiting.poll().is_pending() && waiting.poll().is_pending());
            if stays {
                other.end_in_doubt("refund");
                assert!(waiting.is_woken());
            } else {
                drop(other);
                assert!(waiting.is_woken());
            }
            assert!(waiting.poll().is_ready());
            drop(waiting);
            assert_eq!(last.claim(false), if stays { Err(ShutOut::KeyInDoubt) } else { Ok(()) });
        }
    }

    #[test]
    fn a_key_in_doubt_lets_no_other_write_in_until_the_doubt_ends() {
        let conflicts = Conflicts::new(Keys::default(), true);
        let first = handed_over(&conflicts, "a", 1);
        let second = handed_over(&conflicts, "a", 2);
        first.doubt("pay");
        second.doubt("refund");
        assert_eq!(conflicts.enter("a".into(), id(3)).unwrap_err(), (id(1), "pay".to_owned()));
        // Whichever ends first.
        first.no_doubt();
        assert_eq!(conflicts.enter("a".into(), id(3)).unwrap_err(), (id(2), "refund".to_owned()));
        first.doubt("pay");
        second.no_doubt();
        assert!(conflicts.enter("a".into(), id(3)).is_err());
        drop(first);
        drop(conflicts.enter("a".into(), id(3)).unwrap());
        drop(second);
        assert!(conflicts.lock().is_empty());
    }

    #[test]
    fn the_end_of_a_copy_frees_no_key_that_another_one_has_in_doubt_and_takes_no_waker_of_it() {
        let conflicts = Conflicts::new(Keys::default(), true);
        let other = handed_over(&conflicts, "a", 1);
        let [copy, early, late] = [(); 3].map(|()| handed_over(&conflicts, "a", 2));
        other.doubt("refund");
        let mut waits = task::spawn(std::future::poll_fn(|cx| copy.poll_others(cx)));
        assert!(
            waits.poll().is_pending()
                && early.poll_others(&mut Context::from_waker(Waker::noop())).is_pending()
        );
        drop(early);
        other.no_doubt();
        assert!(waits.is_woken() && waits.poll().is_ready());
        drop(waits);

        copy.doubt("pay");
        late.no_doubt();
        drop(late);
        assert_eq!(conflicts.enter("a".into(), id(3)).unwrap_err(), (id(2), "pay".to_owned()));
    }
}
