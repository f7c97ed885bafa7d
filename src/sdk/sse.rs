//! Server-sent events, as the HTML standard says them: bytes in, events out. Fields that nobody knows are skipped,
//! where the parser below the SDK ends the stream.

use std::{collections::VecDeque, mem};

/// Reads a stream of events, however it is cut into chunks.
#[derive(Debug)]
pub(super) struct Parser {
    limit: usize,
    /// The line under way.
    line: Vec<u8>,
    /// The last byte was a CR, so that an LF that follows ends no line of its own.
    after_cr: bool,
    /// A byte order mark may still come.
    at_start: bool,
    event: Event,
    has_data: bool,
    ready: VecDeque<Event>,
}

/// One event.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Event {
    pub(super) kind: String,
    pub(super) data: String,
    pub(super) id: Option<String>,
    pub(super) retry: Option<u64>,
}

/// An event is larger than the limit.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct TooLarge;

impl Event {
    /// Whether it carries a message.
    pub(super) fn is_message(&self) -> bool {
        matches!(self.kind.as_str(), "" | "message") && !self.data.trim().is_empty()
    }
}

impl Parser {
    /// With a limit for one event, in bytes.
    pub(super) fn new(limit: usize) -> Self {
        Self {
            limit,
            line: Vec::new(),
            after_cr: false,
            at_start: true,
            event: Event::default(),
            has_data: false,
            ready: VecDeque::new(),
        }
    }

    /// Reads a chunk.
    pub(super) fn read(&mut self, mut bytes: &[u8]) -> Result<(), TooLarge> {
        while !bytes.is_empty() {
            if mem::take(&mut self.after_cr) && bytes[0] == b'\n' {
                bytes = &bytes[1..];
                continue;
            }
            let end = memchr::memchr2(b'\n', b'\r', bytes);
            let piece = &bytes[..end.unwrap_or(bytes.len())];
            match self.line.first().or(piece.first()) {
                // Of a comment the first byte says enough.
                Some(b':') => {
                    self.line.clear();
                    self.line.push(b':');
                }
                _ => self.line.extend_from_slice(piece),
            }
            if self.line.len() + self.event.data.len() > self.limit {
                return Err(TooLarge);
            }
            let Some(end) = end else { break };
            self.after_cr = bytes[end] == b'\r';
            bytes = &bytes[end + 1..];
            let line = mem::take(&mut self.line);
            self.end_line(&line);
            // Its memory serves the next line.
            self.line = line;
            self.line.clear();
        }
        Ok(())
    }

    /// The next event that is there as a whole. What is there in part when the stream ends is none.
    pub(super) fn next(&mut self) -> Option<Event> {
        self.ready.pop_front()
    }

    /// The data of the event under way, as far as it has come.
    pub(super) fn data_so_far(&self) -> Vec<u8> {
        let mut data = self.event.data.as_bytes().to_vec();
        if let Some(more) = self.line.strip_prefix(b"data:") {
            data.push(b'\n');
            data.extend_from_slice(more);
        }
        data
    }

    fn end_line(&mut self, line: &[u8]) {
        let line = match mem::take(&mut self.at_start) {
            true => line.strip_prefix(b"\xef\xbb\xbf").unwrap_or(line),
            false => line,
        };
        if line.is_empty() {
            return self.dispatch();
        }
        let (name, value) = match memchr::memchr(b':', line) {
            Some(0) => return,
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (line, &b""[..]),
        };
        let value = String::from_utf8_lossy(value.strip_prefix(b" ").unwrap_or(value));
        match name {
            b"data" => {
                if mem::replace(&mut self.has_data, true) {
                    self.event.data.push('\n');
                }
                self.event.data.push_str(&value);
            }
            b"event" => self.event.kind = value.into_owned(),
            b"id" if !value.contains('\0') => self.event.id = Some(value.into_owned()),
            b"retry" if !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_digit()) => {
                self.event.retry = Some(value.parse().unwrap_or(u64::MAX));
            }
            _ => {}
        }
    }

    /// An event without data carries no message, but its id and its retry count.
    fn dispatch(&mut self) {
        self.has_data = false;
        let event = mem::take(&mut self.event);
        if event != Event::default() {
            self.ready.push_back(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events(parser: &mut Parser) -> Vec<Event> {
        std::iter::from_fn(|| parser.next()).collect()
    }

    fn data(data: &str) -> Event {
        Event { data: data.into(), ..Event::default() }
    }

    #[test]
    fn events_are_the_same_however_they_are_cut() {
        let stream = "\u{feff}: hi\r\nid: 7\r\nretry: 250\r\ndata\r\n\r\nevent: message\ndata: {\"a\":\ndata:1}\n\n\
                      x-unknown: field\nnofield\ndata: ü\r\rretry: soon\nid: a\0b\ndata: last\n\ndata: half";
        let expected = [
            Event { id: Some("7".into()), retry: Some(250), ..Event::default() },
            Event { kind: "message".into(), data: "{\"a\":\n1}".into(), ..Event::default() },
            data("ü"),
            data("last"),
        ];
        for size in 1..=stream.len() {
            let mut parser = Parser::new(1 << 10);
            let mut seen = Vec::new();
            for chunk in stream.as_bytes().chunks(size) {
                parser.read(chunk).unwrap();
                seen.extend(events(&mut parser));
            }
            assert_eq!(seen, expected, "in chunks of {size}");
        }
    }

    #[test]
    fn an_event_above_the_limit_is_an_error_and_a_comment_is_not() {
        let mut parser = Parser::new(16);
        parser.read(format!(": {}\n", "x".repeat(100)).as_bytes()).unwrap();
        parser.read(b"data: 0123456789\n\n").unwrap();
        assert_eq!(events(&mut parser), [data("0123456789")]);
        assert_eq!(parser.read(b"data: 01234567890"), Err(TooLarge));
        let mut parser = Parser::new(16);
        assert_eq!(parser.read(b"data: 01234\ndata: 01234\ndata: 01234\n"), Err(TooLarge));
        assert_eq!(parser.data_so_far(), b"01234\n01234\n 01234");
    }
}
