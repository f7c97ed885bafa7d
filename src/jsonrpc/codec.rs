//! The framing: one message a line, and what can be learnt from a line that is too long to keep.

use std::io;

use bytes::{Buf, BytesMut};
use tokio_util::codec::Decoder;

use super::message::own_id;

/// What the framing finds.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Piece {
    /// A line that is not empty, without its end.
    Line(BytesMut),
    /// A line above the limit has ended, in which no answer was found.
    TooLong,
    /// A line above the limit is the answer to our request with that id; at once when that is known.
    TooLongAnswer(u64),
}

/// What an answer above the limit is, as far as it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Said {
    Result,
    Error,
    /// It has a `result` that may be `null`, as some peers write beside an error.
    Unknown,
}

/// Splits at newlines, incrementally: no byte is looked at twice.
#[derive(Debug)]
pub(crate) struct Lines {
    max: usize,
    /// How much of the buffer holds no newline.
    scanned: usize,
    /// What reads the rest of a line above the limit.
    skipping: Option<Scanner>,
}

impl Lines {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, scanned: 0, skipping: None }
    }

    /// What the answer above the limit is that was found last.
    pub(crate) fn said(&self) -> Said {
        self.skipping.as_ref().and_then(|scanner| scanner.said).unwrap_or(Said::Unknown)
    }

    /// Reads on in a line that is too long, up to its end, or up to an answer's id.
    fn skip(&mut self, mut scanner: Scanner, bytes: &mut BytesMut) -> Option<Piece> {
        let end = memchr::memchr(b'\n', bytes);
        let (used, id) = scanner.read(&bytes[..end.unwrap_or(bytes.len())]);
        match (id, end) {
            (Some(id), _) => {
                bytes.advance(used);
                self.skipping = Some(scanner);
                Some(Piece::TooLongAnswer(id))
            }
            (None, Some(end)) => {
                bytes.advance(end + 1);
                (!scanner.told).then_some(Piece::TooLong)
            }
            (None, None) => {
                bytes.clear();
                self.skipping = Some(scanner);
                None
            }
        }
    }
}

impl Decoder for Lines {
    type Item = Piece;
    type Error = io::Error;

    fn decode(&mut self, bytes: &mut BytesMut) -> io::Result<Option<Piece>> {
        loop {
            if let Some(scanner) = self.skipping.take() {
                if let Some(piece) = self.skip(scanner, bytes) {
                    return Ok(Some(piece));
                }
                if self.skipping.is_some() {
                    return Ok(None);
                }
            }
            let end = memchr::memchr(b'\n', &bytes[self.scanned..]).map(|at| self.scanned + at);
            if end.unwrap_or(bytes.len()) > self.max {
                self.scanned = 0;
                self.skipping = Some(Scanner::default());
                continue;
            }
            let Some(end) = end else {
                self.scanned = bytes.len();
                return Ok(None);
            };
            self.scanned = 0;
            let mut line = bytes.split_to(end + 1);
            line.truncate(end);
            if let Some(line) = filled(line) {
                return Ok(Some(line));
            }
        }
    }

    /// A line without its newline is one too.
    fn decode_eof(&mut self, bytes: &mut BytesMut) -> io::Result<Option<Piece>> {
        if let Some(piece) = self.decode(bytes)? {
            return Ok(Some(piece));
        }
        self.scanned = 0;
        match self.skipping.take() {
            Some(Scanner { id: Id::Own(id), key: Some(Key::Result | Key::Error), asks: false, .. }) => {
                Ok(Some(Piece::TooLongAnswer(id)))
            }
            Some(scanner) => Ok((!scanner.told).then_some(Piece::TooLong)),
            None => Ok(filled(bytes.split())),
        }
    }
}

fn filled(mut line: BytesMut) -> Option<Piece> {
    if line.last() == Some(&b'\r') {
        line.truncate(line.len() - 1);
    }
    if line.iter().all(u8::is_ascii_whitespace) { None } else { Some(Piece::Line(line)) }
}

/// Finds the top-level `id` of answers in JSON that flows by, in bounded memory: servers may put it last.
///
/// An answer has a `result`, or an `error` that is not `null`, and no `method`. A key that is written with escapes is not
/// seen, which can only lose an answer, never make one: both keys are needed. As in a short line, what is in no JSON is
/// no answer: a line that begins or goes on with anything else, such as one of a log, is one to its end.
#[derive(Debug, Default)]
struct Scanner {
    /// It is no JSON: nothing in the rest of it is looked at.
    alien: bool,
    depth: usize,
    /// Depth of an answer's keys: 1, or 2 within a batch; 0 before the first bracket.
    base: usize,
    in_string: bool,
    escaped: bool,
    /// Whether the next string at that depth is a key.
    key_next: bool,
    /// The token under way at that depth, cut off where it is too long for any that we look for.
    token: Token,
    key: Option<Key>,
    /// Between the elements of a batch: whether one may begin.
    element_next: bool,
    id: Id,
    /// That it is an answer, from the first byte on of what it says.
    said: Option<Said>,
    asks: bool,
    /// Whether any answer has been found in this line.
    told: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Key {
    Id,
    Method,
    Result,
    Error,
    Other,
}

#[derive(Debug, Default, PartialEq, Eq)]
enum Id {
    #[default]
    None,
    Own(u64),
    /// Not one of ours, or more than one.
    Foreign,
    /// Told already.
    Told,
}

/// Whether what begins so is an answer: to that request of ours, or to one that is named only later.
#[cfg(feature = "rmcp")]
pub(crate) fn begins_an_answer(bytes: &[u8], to: u64) -> bool {
    let mut scanner = Scanner::default();
    match scanner.read(bytes) {
        (_, Some(id)) => id == to,
        (_, None) => {
            let answers = scanner.said.is_some() || matches!(scanner.key, Some(Key::Result | Key::Error));
            answers && !scanner.asks && (scanner.id == Id::None || scanner.id == Id::Own(to))
        }
    }
}

#[derive(Debug, Default)]
struct Token {
    bytes: [u8; 24],
    len: usize,
}

impl Token {
    fn push(&mut self, byte: u8) {
        if let Some(slot) = self.bytes.get_mut(self.len) {
            *slot = byte;
        }
        self.len = self.len.saturating_add(1);
    }

    fn take(&mut self) -> Option<&[u8]> {
        let len = std::mem::take(&mut self.len);
        self.bytes.get(..len)
    }
}

impl Scanner {
    /// Reads on, until an answer's id is known or the bytes are used up.
    fn read(&mut self, bytes: &[u8]) -> (usize, Option<u64>) {
        let mut at = 0;
        while at < bytes.len() {
            if self.alien {
                return (bytes.len(), None);
            }
            if self.in_string && self.depth != self.base && !self.escaped {
                // Most of a large answer is the inside of strings.
                match memchr::memchr2(b'"', b'\\', &bytes[at..]) {
                    Some(skip) => at += skip,
                    None => return (bytes.len(), None),
                }
            }
            self.step(bytes[at]);
            at += 1;
            if let Id::Own(id) = self.id
                && self.said.is_some()
                && !self.asks
            {
                (self.id, self.told) = (Id::Told, true);
                return (at, Some(id));
            }
        }
        (at, None)
    }

    fn step(&mut self, byte: u8) {
        let here = self.depth == self.base && self.base > 0;
        if !self.in_string && self.depth < self.base.max(1) && !self.step_outside(byte) {
            self.alien = true;
            return;
        }
        if self.in_string {
            if here {
                self.token.push(byte);
            }
            match byte {
                _ if self.escaped => self.escaped = false,
                b'\\' => self.escaped = true,
                b'"' => {
                    self.in_string = false;
                    if here && self.key_next {
                        self.end_key();
                    }
                }
                _ => {}
            }
            return;
        }
        if here && self.token.len == 0 {
            self.begin_value(byte);
        }
        match byte {
            b'"' => {
                self.in_string = true;
                if here {
                    self.token.push(byte);
                }
            }
            b'{' | b'[' => self.open(byte),
            b'}' | b']' => {
                if here {
                    self.end_value();
                    // The next element of a batch is another message.
                    self.key = None;
                }
                self.depth = self.depth.saturating_sub(1);
            }
            b':' if here => {
                self.key_next = false;
                self.token.len = 0;
            }
            b',' if here => {
                self.end_value();
                self.key_next = true;
            }
            b' ' | b'\t' | b'\r' if self.token.len == 0 => {}
            _ if here => self.token.push(byte),
            _ => {}
        }
    }

    /// Whether the byte, which is in no message, may stand there in JSON.
    fn step_outside(&mut self, byte: u8) -> bool {
        match (self.depth, byte) {
            (_, b' ' | b'\t' | b'\r' | b'\n') => true,
            // Before the first bracket, and after the last one.
            (0, b'{' | b'[') => self.base == 0,
            (0, _) => false,
            // Between the elements of a batch. Those that are no objects are of no use, but leave it one.
            (_, b',') => !std::mem::replace(&mut self.element_next, true) && self.ends_scalar(),
            (_, b']') => self.ends_scalar(),
            (_, b'{' | b'[' | b'"') => std::mem::take(&mut self.element_next),
            (_, b'0'..=b'9' | b'a'..=b'z' | b'E' | b'+' | b'-' | b'.') => {
                self.token.push(byte);
                std::mem::take(&mut self.element_next) || self.token.len > 1
            }
            _ => false,
        }
    }

    /// Whether the element that ends is a number or a literal, or was none of these.
    fn ends_scalar(&mut self) -> bool {
        let is_long_number = self.token.len > self.token.bytes.len();
        match self.token.take() {
            Some([] | b"true" | b"false" | b"null" | [b'0'..=b'9' | b'-', ..]) => true,
            Some(_) => false,
            None => is_long_number && matches!(self.token.bytes[0], b'0'..=b'9' | b'-'),
        }
    }

    fn open(&mut self, byte: u8) {
        if self.base == 0 {
            self.base = if byte == b'{' { 1 } else { 2 };
            self.element_next = true;
        } else if self.depth == self.base && self.key == Some(Key::Id) {
            self.id = Id::Foreign;
        }
        self.depth = self.depth.saturating_add(1);
        if self.depth == self.base {
            // An element that is an array is no message, whatever it holds.
            self.id = if byte == b'{' { Id::None } else { Id::Foreign };
            (self.said, self.asks) = (None, false);
            (self.key, self.key_next) = (None, true);
            self.token.len = 0;
        }
    }

    fn end_key(&mut self) {
        let key = match self.token.take() {
            Some(br#""id""#) => Key::Id,
            Some(br#""method""#) => Key::Method,
            Some(br#""result""#) => Key::Result,
            Some(br#""error""#) => Key::Error,
            _ => Key::Other,
        };
        self.asks |= key == Key::Method;
        self.key = Some(key);
    }

    /// A value begins with that byte, if it is none between two.
    fn begin_value(&mut self, byte: u8) {
        let said = match (self.key, byte) {
            (Some(Key::Result), b'n') => self.said.unwrap_or(Said::Unknown),
            (Some(Key::Result), b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f') => Said::Result,
            (Some(Key::Error), b'{' | b'[' | b'"' | b'-' | b'0'..=b'9' | b't' | b'f') => Said::Error,
            _ => return,
        };
        self.said = Some(said);
    }

    fn end_value(&mut self) {
        if self.key.take() == Some(Key::Id) {
            let own = self.token.take().and_then(|token| own_id(std::str::from_utf8(token).ok()?.trim_end()));
            self.id = match (&self.id, own) {
                (Id::None, Some(id)) => Id::Own(id),
                _ => Id::Foreign,
            };
        }
        self.token.len = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pieces(lines: &mut Lines, bytes: &mut BytesMut) -> Vec<Piece> {
        std::iter::from_fn(|| lines.decode(bytes).unwrap()).collect()
    }

    /// Decodes in chunks of that size.
    fn decode(max: usize, chunk: usize, input: &[u8]) -> Vec<Piece> {
        let mut lines = Lines::new(max);
        let mut bytes = BytesMut::new();
        let mut found = Vec::new();
        for part in input.chunks(chunk) {
            bytes.extend_from_slice(part);
            found.extend(pieces(&mut lines, &mut bytes));
        }
        while let Some(piece) = lines.decode_eof(&mut bytes).unwrap() {
            found.push(piece);
        }
        found
    }

    fn line(text: &str) -> Piece {
        Piece::Line(BytesMut::from(text))
    }

    #[test]
    fn lines_end_with_a_newline_of_either_kind_or_with_the_input() {
        for chunk in 1..12 {
            let found = decode(100, chunk, b"one\n\r\n \n\ntwo\r\nthree");
            assert_eq!(found, [line("one"), line("two"), line("three")], "chunks of {chunk}");
        }
    }

    #[test]
    fn a_line_of_the_limit_passes_and_one_above_does_not() {
        for chunk in 1..8 {
            let found = decode(5, chunk, b"12345\n123456\n1234567890123\nab\n");
            assert_eq!(found, [line("12345"), Piece::TooLong, Piece::TooLong, line("ab")]);
        }
    }

    #[test]
    fn the_id_of_a_long_answer_is_found_wherever_it_is() {
        let pad = "x".repeat(50);
        for text in [
            format!(r#"{{"jsonrpc":"2.0","id":7,"result":{{"id":8,"a":["{pad}"]}}}}"#),
            format!(r#"{{"result":{{"id":8,"a":["{pad}\\\"}}{{",1]}},"jsonrpc":"2.0","id":7}}"#),
            format!(r#"{{ "error" : {{"message":"{pad}", "method":1}} , "id" : "7" }}"#),
            format!(r#"{{"result":"{pad}","id":7}}"#),
            format!(r#"{{"result":{}1.5e3,"id":7}}"#, pad.replace('x', " ")),
        ] {
            // Miri is slow.
            for chunk in (1..text.len()).step_by(if cfg!(miri) { 9 } else { 1 }) {
                let found = decode(20, chunk, format!("{text}\nab\n").as_bytes());
                assert_eq!(found, [Piece::TooLongAnswer(7), line("ab")], "{text}");
            }
        }
    }

    #[test]
    fn what_a_long_answer_is_is_known_unless_its_result_may_be_the_null_beside_an_error() {
        let pad = "x".repeat(50);
        for (text, said) in [
            (format!(r#"{{"id":7,"result":"{pad}"}}"#), Said::Result),
            (format!(r#"{{"result":["{pad}"],"id":7}}"#), Said::Result),
            (format!(r#"{{"error":null,"id":7,"result" : "{pad}"}}"#), Said::Result),
            (format!(r#"{{"id":7,"error":{{"message":"{pad}"}}}}"#), Said::Error),
            (format!(r#"{{"error":"{pad}","result":null,"id":7}}"#), Said::Error),
            (format!(r#"{{"result":null,"error":"{pad}","id":7}}"#), Said::Error),
            (format!(r#"{{"id":7,"result":null,"error":"{pad}"}}"#), Said::Unknown),
            (format!(r#"{{"result":null,"id":7,"pad":"{pad}"}}"#), Said::Unknown),
        ] {
            let mut lines = Lines::new(20);
            let mut bytes = BytesMut::from(&*text);
            assert_eq!(lines.decode(&mut bytes).unwrap(), Some(Piece::TooLongAnswer(7)), "{text}");
            assert_eq!(lines.said(), said, "{text}");
        }
    }

    #[test]
    fn the_id_is_told_before_the_line_ends() {
        let mut lines = Lines::new(20);
        let mut bytes = BytesMut::from(&br#"{"id":7,"result":"aaaaaaaaaaaaaaaaaaaaaaaaa"#[..]);
        assert_eq!(pieces(&mut lines, &mut bytes), [Piece::TooLongAnswer(7)]);
        assert!(bytes.is_empty());
        bytes.extend_from_slice(&[b'a'; 1000]);
        assert_eq!(pieces(&mut lines, &mut bytes), []);
        assert!(bytes.is_empty());
        bytes.extend_from_slice(b"\",\"id\":7}\n1\n");
        assert_eq!(pieces(&mut lines, &mut bytes), [line("1")]);
    }

    #[test]
    fn what_is_no_answer_of_ours_is_not_taken_for_one() {
        let pad = "x".repeat(50);
        for text in [
            format!(r#"{{"id":7,"method":"m","result":"{pad}"}}"#),
            format!(r#"{{"method":"m","params":{{"result":1}},"id":7,"pad":"{pad}"}}"#),
            format!(r#"{{"id":7,"pad":"{pad}"}}"#),
            format!(r#"{{"id":7,"error":null,"pad":"{pad}"}}"#),
            format!(r#"{{"id":7,"id":8,"result":"{pad}"}}"#),
            format!(r#"{{"id":null,"result":"{pad}"}}"#),
            format!(r#"{{"id":7.0,"result":"{pad}"}}"#),
            format!(r#"{{"id":-7,"result":"{pad}"}}"#),
            format!(r#"{{"id":[7],"result":"{pad}"}}"#),
            format!(r#"{{"id":{{"id":7}},"result":"{pad}"}}"#),
            format!(r#"{{"id":"{pad}","result":1}}"#),
            format!(r#"{{"a":{{"id":7,"result":"{pad}"}}}}"#),
            format!(r#"["id",7,"result",{{"x":"{pad}"}}]"#),
            format!(r#"]]]}}}}{pad}"id":7"result":"#),
            format!(r#"[{{"id":7}},["{pad}","result",1]]"#),
        ] {
            for chunk in [1, 7, 1000] {
                let found = decode(20, chunk, format!("{text}\nab\n").as_bytes());
                assert_eq!(found, [Piece::TooLong, line("ab")], "{text}");
            }
        }
    }

    #[test]
    fn a_long_line_that_is_no_json_holds_no_answer() {
        let answer = format!(r#"{{"id":7,"result":"{}"}}"#, "x".repeat(50));
        for text in [
            format!("DEBUG about to answer {answer} to m"),
            format!("\u{feff}{answer}"),
            format!("\"{answer}"),
            format!("7{answer}"),
            format!("}}{answer}"),
            format!("{{}} {answer}"),
            format!(r#"{{"a":"b"}}{answer}"#),
            format!("[INFO] {answer}"),
            format!("[INFO] [{answer}]"),
            format!("[INFO {answer}]"),
            format!("[info, {answer}]"),
            format!("[12:00:01, {answer}]"),
            format!("[1 {answer}]"),
            format!("[,{answer}]"),
            format!("[{{}}{answer}]"),
            format!("[{{}},,{answer}]"),
            format!("[] {answer}"),
        ] {
            for chunk in [1, 7, 1000] {
                let found = decode(20, chunk, format!("{text}\nab\n").as_bytes());
                assert_eq!(found, [Piece::TooLong, line("ab")], "{text}");
            }
        }
        // What is JSON is read whatever stands between.
        for text in [format!(" \t{answer}"), format!(r#"[ 1.5e+3, true,"a]",null, [{{}}] ,{{}} , {answer}]"#)]
        {
            for chunk in [1, 7, 1000] {
                let found = decode(20, chunk, format!("{text}\nab\n").as_bytes());
                assert_eq!(found, [Piece::TooLongAnswer(7), line("ab")], "{text}");
            }
        }
    }

    #[test]
    fn a_long_line_may_end_with_the_input() {
        assert_eq!(decode(5, 3, b"1234567"), [Piece::TooLong]);
        assert_eq!(decode(5, 3, br#"{"id":1,"result":"#), [Piece::TooLongAnswer(1)]);
    }

    #[test]
    fn each_answer_of_a_long_batch_is_found() {
        let text =
            br#"[{"id":1,"result":{"id":9}},{"method":"m","id":4},{"result":[],"id":2},{"id":3,"error":0}]"#;
        for chunk in [1, 7, 1000] {
            let found = decode(20, chunk, text);
            let answers = [1, 2, 3].map(Piece::TooLongAnswer);
            assert_eq!(found, answers);
        }
    }
}
