//! The bytes of the file: a header, then frames of records, and what of them can be believed.

use std::{borrow::Cow, mem, time::SystemTime};

use serde::{Deserialize, Serialize};

use super::{
    super::{Entry, EntryId, LedgerError, ServerProcess, State},
    book::Book,
};

const MAGIC: &[u8; 16] = b"goaround-ledger\n";
const VERSION: u32 = 1;
/// Magic, version (4), the file's number (8), checksum (4).
pub(super) const HEADER: usize = 32;

/// Begins with a byte that no JSON text holds, so that it is not found within one.
const FRAME: &[u8; 4] = b"\xf5gol";
/// Magic, length of the payload (4), how much was synced (8), checksum of the payload (4) and of all this (4).
pub(super) const FRAME_HEADER: usize = 24;
/// The longest payload of a frame.
pub(super) const MOST_FRAME: usize = 1 << 20;
/// The longest record of a write that is entered, with its key and the arguments that the caller keeps.
pub(super) const MOST_ENTRY: usize = 64 << 10;
/// A larger file is not read into memory.
pub(super) const MOST_FILE: u64 = 1 << 30;

/// What disks write as a whole.
const SECTOR: usize = 512;
/// So many bytes of a frame must be zero, from border to border of its sectors, to be taken for bytes that were
/// never written.
const BLANK: usize = 8;

/// One change, as one line of JSON.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Record<'a> {
    /// A write as it was entered or, in a new file, as it is.
    Entry(Cow<'a, Entry>),
    /// A change of that entry at that revision.
    Settle { id: EntryId, revision: u64, at_ms: u64, to: Cow<'a, State> },
    /// The claim of its replay at that revision.
    Claim { id: EntryId, revision: u64, at_ms: u64 },
    /// A server process of that run.
    Server { owner: Owner, server: Cow<'a, ServerProcess> },
    /// In a new file: a write that somebody settled by hand.
    Closed(Cow<'a, Entry>),
}

impl Record<'_> {
    pub(super) fn line(&self) -> Result<Vec<u8>, LedgerError> {
        let mut line = serde_json::to_vec(self).map_err(|error| LedgerError::Unavailable(error.into()))?;
        line.push(b'\n');
        Ok(line)
    }
}

/// One run of a process, in the form that [`EntryId`] has for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Owner(pub(super) u128);

impl Serialize for Owner {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&format_args!("{:032x}", self.0))
    }
}

impl<'de> Deserialize<'de> for Owner {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<str>::deserialize(deserializer)?;
        let number = u128::from_str_radix(&text, 16).map_err(serde::de::Error::custom)?;
        Ok(Self(number))
    }
}

/// A wall clock's time in the file's milliseconds; what lies before 1970 counts as 0.
pub(super) fn millis(time: SystemTime) -> u64 {
    let since = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// The header of the file of that number.
pub(super) fn header(number: u64) -> [u8; HEADER] {
    header_of(VERSION, number)
}

pub(super) fn header_of(version: u32, number: u64) -> [u8; HEADER] {
    let mut header = [0; HEADER];
    header[..16].copy_from_slice(MAGIC);
    header[16..20].copy_from_slice(&version.to_le_bytes());
    header[20..28].copy_from_slice(&number.to_le_bytes());
    let sum = crc32(&[&header[..28]]);
    header[28..].copy_from_slice(&sum.to_le_bytes());
    header
}

/// Adds a frame, at the byte `at` of the file of that number, of which `synced` bytes are on the disk for
/// certain. It gets empty lines, so that no part of it or of the next one between the borders of sectors is
/// shorter than what is taken for blank.
pub(super) fn frame(out: &mut Vec<u8>, number: u64, at: u64, synced: u64, mut payload: Vec<u8>) {
    debug_assert!(payload.len() <= MOST_FRAME);
    let over = (at as usize % SECTOR + FRAME_HEADER + payload.len()) % SECTOR;
    match over {
        0 => {}
        1..BLANK => payload.resize(payload.len() + BLANK - over, b'\n'),
        _ if SECTOR - over < BLANK => payload.resize(payload.len() + SECTOR - over, b'\n'),
        _ => {}
    }
    let start = out.len();
    out.extend_from_slice(FRAME);
    // Bounded by `MOST_FRAME` and `BLANK`.
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&synced.to_le_bytes());
    out.extend_from_slice(&crc32(&[&payload]).to_le_bytes());
    let sum = frame_sum(&out[start..], number, at);
    out.extend_from_slice(&sum.to_le_bytes());
    out.extend_from_slice(&payload);
}

/// A whole file, of which not one byte counts until all are synced.
pub(super) fn file(number: u64, records: &[Record<'_>]) -> Result<Vec<u8>, LedgerError> {
    let mut out = header(number).to_vec();
    let mut payload = Vec::new();
    for record in records {
        let line = record.line()?;
        if payload.len() + line.len() > MOST_FRAME {
            let at = out.len() as u64;
            frame(&mut out, number, at, 0, mem::take(&mut payload));
        }
        payload.extend_from_slice(&line);
    }
    if !payload.is_empty() {
        let at = out.len() as u64;
        frame(&mut out, number, at, 0, payload);
    }
    Ok(out)
}

/// Of the first 20 bytes of a frame's header, and of where it stands: what was left on the disk by another
/// file, or at another place, is no frame.
fn frame_sum(head: &[u8], number: u64, at: u64) -> u32 {
    crc32(&[&head[..20], &number.to_le_bytes(), &at.to_le_bytes()])
}

/// What a file says.
#[derive(Debug, Default)]
pub(super) struct Contents {
    pub(super) book: Book,
    /// How many bytes at the end were no whole frame.
    pub(super) dropped: usize,
}

/// Reads a file. It changes nothing, and does not panic whatever the bytes are.
pub(super) fn decode(bytes: &[u8]) -> Result<Contents, LedgerError> {
    let mut contents = Contents::default();
    let Some(number) = file_number(bytes)? else {
        contents.dropped = bytes.len();
        return Ok(contents);
    };
    let mut at = HEADER;
    while at < bytes.len() {
        match frame_at(bytes, number, at) {
            Ok(payload) => {
                records(&mut contents.book, payload, at)?;
                at += FRAME_HEADER + payload.len();
            }
            Err(Bad::Torn) if !was_synced(bytes, number, at) => {
                contents.dropped = bytes.len() - at;
                break;
            }
            Err(Bad::Torn) => return Err(damaged(at, "a frame is missing that later ones stand on")),
            Err(Bad::Wrong(why)) => return Err(damaged(at, why)),
        }
    }
    Ok(contents)
}

/// The number of the file, or `None` for one of which not even the header was written.
fn file_number(bytes: &[u8]) -> Result<Option<u64>, LedgerError> {
    let Some((head, _)) = bytes.split_at_checked(HEADER) else {
        let begun = MAGIC.starts_with(&bytes[..bytes.len().min(16)]) || blank(bytes);
        return if begun { Ok(None) } else { Err(damaged(0, "this is no ledger")) };
    };
    if blank(bytes) {
        return Ok(None);
    }
    if head[..16] != *MAGIC {
        return Err(damaged(0, "this is no ledger"));
    }
    if crc32(&[&head[..28]]) != u32_at(head, 28) {
        return Err(damaged(0, "the header's checksum is wrong"));
    }
    match u32_at(head, 16) {
        VERSION => Ok(Some(u64_at(head, 20))),
        version => Err(LedgerError::Unavailable(
            format!("its format is version {version}, and this release reads version {VERSION}").into(),
        )),
    }
}

enum Bad {
    /// It was not written to the end, so that nobody was told that it was.
    Torn,
    /// It was, and is not what was written.
    Wrong(&'static str),
}

/// The payload of the frame at that byte.
fn frame_at(bytes: &[u8], number: u64, at: usize) -> Result<&[u8], Bad> {
    let rest = &bytes[at..];
    if blank(rest) {
        return Err(Bad::Torn);
    }
    let Some((head, after)) = rest.split_at_checked(FRAME_HEADER) else {
        // The beginning of a header, or of one of which the first bytes alone were written.
        let magic = &rest[..rest.len().min(4)];
        let begun = FRAME.starts_with(magic) || has_blank(bytes, at, bytes.len());
        return Err(if begun { Bad::Torn } else { Bad::Wrong("what follows is no frame") });
    };
    if head[..4] != *FRAME || u32_at(head, 20) != frame_sum(head, number, at as u64) {
        let blank = has_blank(bytes, at, at + FRAME_HEADER);
        return Err(if blank { Bad::Torn } else { Bad::Wrong("a frame's header is wrong") });
    }
    let length = u32_at(head, 4) as usize;
    if length > MOST_FRAME + BLANK {
        return Err(Bad::Wrong("a frame is too long"));
    }
    let Some(payload) = after.get(..length) else { return Err(Bad::Torn) };
    if crc32(&[payload]) != u32_at(head, 16) {
        let blank = has_blank(bytes, at, at + FRAME_HEADER + length);
        return Err(if blank { Bad::Torn } else { Bad::Wrong("a frame's checksum is wrong") });
    }
    Ok(payload)
}

/// Whether a later frame was written when what is at that byte was on the disk already.
fn was_synced(bytes: &[u8], number: u64, at: usize) -> bool {
    memchr::memchr_iter(FRAME[0], &bytes[at + 1..]).map(|found| at + 1 + found).any(|later| {
        let Some(head) = bytes.get(later..later + FRAME_HEADER) else { return false };
        head[..4] == *FRAME
            && u32_at(head, 20) == frame_sum(head, number, later as u64)
            && u64_at(head, 8) > at as u64
    })
}

/// Whether a part of the frame between these bytes, from border to border of the disk's sectors, is zero, as
/// it is where the file grew and the sector was never written. No frame has that many zeros.
fn has_blank(bytes: &[u8], from: usize, to: usize) -> bool {
    let mut start = from;
    while start < to {
        let end = (start / SECTOR + 1) * SECTOR;
        let part = &bytes[start..end.min(bytes.len())];
        if part.len() >= BLANK && blank(part) {
            return true;
        }
        start = end;
    }
    false
}

fn blank(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

/// Applies the records of a frame.
fn records(book: &mut Book, payload: &[u8], at: usize) -> Result<(), LedgerError> {
    let mut start = 0;
    while start < payload.len() {
        let length = memchr::memchr(b'\n', &payload[start..]);
        let here = at + FRAME_HEADER + start;
        let length = length.ok_or_else(|| damaged(here, "a record has no end"))?;
        let line = &payload[start..start + length];
        start += length + 1;
        if line.is_empty() {
            continue;
        }
        // The parser's own words could quote the record.
        let record = serde_json::from_slice(line).map_err(|_| damaged(here, "a record makes no sense"))?;
        book.apply(record, length).ok_or_else(|| damaged(here, "a record contradicts those before it"))?;
    }
    Ok(())
}

fn damaged(at: usize, why: &str) -> LedgerError {
    LedgerError::Damaged(format!("at byte {at}: {why}"))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..at + 4].iter().rev().fold(0, |number, &byte| number << 8 | u32::from(byte))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from(u32_at(bytes, at + 4)) << 32 | u64::from(u32_at(bytes, at))
}

/// The checksum of zip and Ethernet (CRC-32/ISO-HDLC), over these parts as one.
fn crc32(parts: &[&[u8]]) -> u32 {
    /// For each byte what it makes of the sum, and what that is 1 to 7 bytes later: so 8 are taken at once.
    static TABLES: [[u32; 256]; 8] = {
        let mut tables = [[0; 256]; 8];
        let mut n = 0;
        while n < 256 {
            let mut value = n as u32;
            let mut bit = 0;
            while bit < 8 {
                value = if value & 1 == 1 { value >> 1 ^ 0xedb8_8320 } else { value >> 1 };
                bit += 1;
            }
            tables[0][n] = value;
            n += 1;
        }
        let mut later = 1;
        while later < 8 {
            n = 0;
            while n < 256 {
                let before: u32 = tables[later - 1][n];
                tables[later][n] = before >> 8 ^ tables[0][(before & 0xff) as usize];
                n += 1;
            }
            later += 1;
        }
        tables
    };
    let mut sum = !0_u32;
    for part in parts {
        let (eights, rest) = part.as_chunks::<8>();
        for eight in eights {
            let low = sum.to_le_bytes();
            sum = 0;
            for place in 0..8 {
                let byte = if place < 4 { eight[place] ^ low[place] } else { eight[place] };
                sum ^= TABLES[7 - place][usize::from(byte)];
            }
        }
        for &byte in rest {
            sum = TABLES[0][usize::from(sum as u8 ^ byte)] ^ sum >> 8;
        }
    }
    !sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_checksum_is_the_common_one() {
        assert_eq!(crc32(&[b"123456789"]), 0xcbf4_3926);
        assert_eq!(crc32(&[b"1234", b"", b"56789"]), 0xcbf4_3926);
        let text = b"The quick brown fox jumps over the lazy dog";
        assert_eq!(crc32(&[text]), 0x414f_a339);
        for cut in 0..text.len() {
            assert_eq!(crc32(&[&text[..cut], &text[cut..]]), 0x414f_a339);
        }
    }
}
