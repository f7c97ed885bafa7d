//! What the server asks of this side: how much of it at once, and for how long the user is being asked.

use std::{
    collections::{HashMap, HashSet},
    fmt,
    sync::{Arc, Weak},
};

use rmcp::model::RequestId;

use super::connection::Inner;

/// How many questions may be open at once, those among them whose answers wait to be written: more come only from a
/// server that does not read its answers.
const MAX_OPEN: usize = 1024;

/// The open questions of a connection.
#[derive(Default)]
pub(super) struct Questions {
    last: u64,
    /// How many places are held.
    open: usize,
    known: HashMap<RequestId, Question>,
    /// Those that the user is answering.
    asking: HashSet<u64>,
}

struct Question {
    number: u64,
    /// Its place, from the handler's end until the SDK gives the answer to the transport.
    handled: Option<Place>,
}

/// The place of one question. It travels with the SDK's request, never on the wire, and is free when the last clone
/// is dropped: by whoever drops the question, or when its answer is written.
#[derive(Clone)]
pub(super) struct Place {
    /// Held, and not read.
    _held: Arc<Held>,
    number: u64,
}

struct Held {
    connection: Weak<Inner>,
    number: u64,
    id: RequestId,
}

/// A question in the hands of its handler.
pub(super) struct Handling {
    connection: Weak<Inner>,
    id: RequestId,
    place: Option<Place>,
}

// ===== impl Questions =====

impl Questions {
    /// A place for a question, or for an answer to none that is known; `None` if all are taken.
    pub(super) fn open(&mut self, id: &RequestId, connection: &Arc<Inner>) -> Option<Place> {
        if self.open >= MAX_OPEN {
            return None;
        }
        self.open += 1;
        self.last += 1;
        let number = self.last;
        let held = Held { connection: Arc::downgrade(connection), number, id: id.clone() };
        Some(Place { _held: Arc::new(held), number })
    }

    /// The server asks that. What it gives back is to be dropped outside of the connection's lock.
    #[must_use = "dropped outside of the lock"]
    pub(super) fn ask(&mut self, id: &RequestId, place: &Place) -> Option<Place> {
        let question = Question { number: place.number, handled: None };
        // Its own fault: two questions with one id.
        self.known.insert(id.clone(), question)?.handled
    }

    /// The handler of a question of the user's begins. `false` if the server has taken it back.
    fn begin(&mut self, id: &RequestId, number: u64) -> bool {
        let is_open = self.known.get(id).is_some_and(|known| known.number == number);
        is_open && self.asking.insert(number)
    }

    /// The handler has ended. What it gives back is to be dropped outside of the connection's lock.
    #[must_use = "dropped outside of the lock"]
    fn handled(&mut self, id: &RequestId, place: Place) -> Option<Place> {
        self.asking.remove(&place.number);
        match self.known.get_mut(id) {
            Some(known) if known.number == place.number => known.handled.replace(place),
            // The SDK drops the answer to what was taken back.
            _ => Some(place),
        }
    }

    /// The question is answered or taken back. What it gives back is to be dropped outside of the connection's lock.
    #[must_use = "dropped outside of the lock"]
    pub(super) fn end(&mut self, id: &RequestId) -> Option<Place> {
        let question = self.known.remove(id)?;
        self.asking.remove(&question.number);
        question.handled
    }

    fn free(&mut self, id: &RequestId, number: u64) {
        self.open -= 1;
        self.asking.remove(&number);
        if self.known.get(id).is_some_and(|known| known.number == number) {
            self.known.remove(id);
        }
    }

    /// Whether the user is being asked.
    pub(super) fn is_user_asked(&self) -> bool {
        !self.asking.is_empty()
    }

    #[cfg(test)]
    pub(super) fn counts(&self) -> (usize, usize, usize) {
        (self.open, self.known.len(), self.asking.len())
    }
}

// ===== impl Place =====

impl Place {
    /// The question's handler begins; calls that want it stand still while it asks the user.
    pub(super) fn handle(self, id: RequestId, asks_user: bool) -> Handling {
        let connection = self._held.connection.clone();
        if asks_user && let Some(inner) = connection.upgrade() {
            inner.user_is_asked(|questions| questions.begin(&id, self.number));
        }
        Handling { connection, id, place: Some(self) }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(inner) = self.connection.upgrade() {
            inner.with_questions(|questions| questions.free(&self.id, self.number));
        }
    }
}

impl fmt::Debug for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Place").finish_non_exhaustive()
    }
}

// ===== impl Handling =====

impl Handling {
    /// The handler has ended, and its answer is on its way.
    pub(super) fn end(mut self) {
        if let (Some(place), Some(inner)) = (self.place.take(), self.connection.upgrade()) {
            drop(inner.with_questions(|questions| questions.handled(&self.id, place)));
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{
        mcp::ToolRules,
        sdk::{connection::Kind, session::Memory},
    };

    fn connection() -> Arc<Inner> {
        let memory = Arc::new(Memory::new(ToolRules::new()));
        Inner::new(Kind::Foreign, memory, Duration::from_secs(5), None, 1).0
    }

    fn ask(inner: &Arc<Inner>, id: &str) -> Option<Place> {
        let id = RequestId::String(id.into());
        let place = inner.with_questions(|questions| questions.open(&id, inner))?;
        drop(inner.with_questions(|questions| questions.ask(&id, &place)));
        Some(place)
    }

    /// How many places are held, questions known, and users asked.
    fn counts(inner: &Inner) -> (usize, usize, usize) {
        inner.with_questions(|questions| questions.counts())
    }

    #[tokio::test]
    async fn a_questions_place_is_free_however_it_ends() {
        let inner = connection();
        let id = || RequestId::String("q".into());
        let take_back = || drop(inner.with_questions(|questions| questions.end(&id())));

        // Dropped by the SDK; answered; its handler dropped.
        drop(ask(&inner, "q"));
        assert_eq!(counts(&inner), (0, 0, 0));
        let handling = ask(&inner, "q").unwrap().handle(id(), true);
        assert_eq!(counts(&inner), (1, 1, 1));
        handling.end();
        assert_eq!(counts(&inner), (1, 1, 0), "its answer is on its way");
        let writing = inner.answers(&id());
        assert_eq!(counts(&inner), (1, 0, 0));
        drop(writing);
        drop(ask(&inner, "q").unwrap().handle(id(), true));
        assert_eq!(counts(&inner), (0, 0, 0));

        // Taken back before, while, and after it is handled.
        let place = ask(&inner, "q").unwrap();
        take_back();
        let handling = place.handle(id(), true);
        assert_eq!(counts(&inner), (1, 0, 0), "nobody is asked");
        handling.end();
        let handling = ask(&inner, "q").unwrap().handle(id(), true);
        take_back();
        assert_eq!(counts(&inner), (1, 0, 0));
        handling.end();
        ask(&inner, "q").unwrap().handle(id(), true).end();
        take_back();
        assert_eq!(counts(&inner), (0, 0, 0));

        // Two with one id, and an answer to none.
        let handlings = [(); 2].map(|()| ask(&inner, "q").unwrap().handle(id(), true));
        assert_eq!(counts(&inner), (2, 1, 2));
        handlings.into_iter().for_each(Handling::end);
        drop(inner.answers(&id()));
        assert_eq!(counts(&inner), (0, 0, 0));
        let rejecting = inner.answers(&id());
        assert_eq!(counts(&inner), (1, 0, 0));
        drop(rejecting);
        assert_eq!(counts(&inner), (0, 0, 0));
    }

    #[tokio::test]
    async fn no_more_questions_are_open_than_there_are_places() {
        let inner = connection();
        let mut places: Vec<_> = (0..MAX_OPEN).map(|nth| ask(&inner, &nth.to_string()).unwrap()).collect();
        assert!(ask(&inner, "one more").is_none());
        places.pop();
        assert!(ask(&inner, "one more").is_some());
        drop(places);
        assert_eq!(counts(&inner), (0, 0, 0));
    }
}
