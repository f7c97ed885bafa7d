//! The last lines of a child's standard error, bounded, and read to its end: a pipe that nobody empties
//! stops the server.

use std::{
    collections::VecDeque,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use tokio::io::{AsyncRead, AsyncReadExt};

/// What is kept of a line.
const LINE: usize = 512;

/// What is kept in all, whatever number of lines was asked for.
const TOTAL: usize = 64 * 1024;

#[derive(Clone, Debug)]
pub(super) struct Tail(Arc<Mutex<State>>);

#[derive(Debug)]
struct State {
    keep: usize,
    lines: VecDeque<String>,
    /// The beginning of the line that is not at its end yet.
    open: Vec<u8>,
}

impl Tail {
    pub(super) fn new(lines: usize) -> Self {
        let keep = lines.min(TOTAL / LINE);
        Self(Arc::new(Mutex::new(State { keep, lines: VecDeque::new(), open: Vec::new() })))
    }

    /// The lines so far, also one without an end.
    pub(super) fn lines(&self) -> Vec<String> {
        let state = self.lock();
        let mut lines: Vec<String> = state.lines.iter().cloned().collect();
        if !state.open.is_empty() && state.keep > 0 {
            lines.push(text(&state.open));
            if lines.len() > state.keep {
                lines.remove(0);
            }
        }
        lines
    }

    /// Reads to the end, whatever comes.
    pub(super) async fn read(self, mut from: impl AsyncRead + Unpin) {
        let mut buffer = [0; 4096];
        loop {
            match from.read(&mut buffer).await {
                Ok(0) => return,
                Ok(length) => self.lock().push(&buffer[..length]),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(_) => return,
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn push(&mut self, bytes: &[u8]) {
        let mut pieces = bytes.split(|&byte| byte == b'\n').peekable();
        while let Some(piece) = pieces.next() {
            let room = LINE - self.open.len();
            self.open.extend_from_slice(&piece[..piece.len().min(room)]);
            if pieces.peek().is_some() {
                self.end_line();
            }
        }
    }

    fn end_line(&mut self) {
        if self.keep > 0 && !self.open.is_empty() {
            if self.lines.len() == self.keep {
                self.lines.pop_front();
            }
            self.lines.push_back(text(&self.open));
        }
        self.open.clear();
    }
}

fn text(line: &[u8]) -> String {
    String::from_utf8_lossy(line).trim_end().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn tail(lines: usize, text: &[u8]) -> Vec<String> {
        let tail = Tail::new(lines);
        tail.clone().read(text).await;
        tail.lines()
    }

    #[tokio::test]
    async fn the_last_lines_are_kept_also_one_without_an_end() {
        assert_eq!(tail(2, b"a\r\nb\n\nc").await, ["b", "c"]);
        assert_eq!(tail(2, b"a\nb\n").await, ["a", "b"]);
        assert_eq!(tail(5, b"\xff!\n").await, ["\u{fffd}!"]);
        assert!(tail(0, b"a\nb").await.is_empty());
        assert!(tail(3, b"").await.is_empty());
    }

    #[tokio::test]
    async fn one_endless_line_and_any_number_of_lines_stay_within_bounds() {
        let endless = tail(3, &vec![b'x'; 100_000]).await;
        assert_eq!(endless, ["x".repeat(LINE)]);
        let many = "y\n".repeat(100_000);
        assert_eq!(tail(usize::MAX, many.as_bytes()).await.len(), TOTAL / LINE);
    }
}
