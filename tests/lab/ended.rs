//! How a write ended under pressure, and what must be true of it when all is over.
#![allow(missing_docs, unreachable_pub)]

use goaround::Outcome;

pub enum Ended {
    Ok,
    Error(Outcome),
    Dropped,
}

impl Ended {
    /// Of a write that `landed` so often, that so many reports of a doubt and of an abandoned write name, and that
    /// is `listed` in the ledger or not.
    #[track_caller]
    pub fn judge(&self, write: &str, landed: u64, (doubts, abandoned): (u64, u64), listed: bool) {
        assert!(landed <= 1, "{write}: applied {landed} times");
        assert!(doubts + abandoned <= 1, "{write}: reported {doubts} + {abandoned}");
        match self {
            Self::Ok => assert_eq!((landed, abandoned, listed), (1, 0, false), "{write}"),
            Self::Error(Outcome::NotDone) => {
                assert_eq!((landed, abandoned, listed), (0, 0, false), "{write}");
            }
            Self::Error(Outcome::Unknown) => {
                assert_eq!((doubts, abandoned, listed), (1, 0, true), "{write}");
            }
            Self::Error(Outcome::DoneResultLost) => {
                assert_eq!((landed, doubts, listed), (1, 1, false), "{write}");
            }
            Self::Error(other) => panic!("{write}: {other:?}"),
            Self::Dropped => {
                assert_eq!(listed, abandoned == 1, "{write} {landed}: {doubts} {abandoned}");
                assert!(landed == 0 || abandoned == 1, "{write} landed unreported");
            }
        }
    }
}
