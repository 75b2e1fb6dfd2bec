//! Send entries of the software NIC, as the lane kernel takes them: what a board says of their queue, what their bytes
//! ask for, and whether bytes may be missing.
//!
//! Nothing here is the library's: what one of the two misreads the other one does not.

use crate::lane_record::{high, low, Data, Record, Rung, Taken, RECORD_WORDS};
use nccl_plugin_api::descriptor::WORDS;

/// Bytes of an entry.
const BYTES: usize = 8 * WORDS;
/// Bytes of each of its segments.
const SEGMENT: usize = 16;

// Where things are in an entry.
const OPCODE: usize = 3;
const NUMBER: usize = 4;
const SEGMENTS: usize = 7;
const FLAGS: usize = 11;
/// The flag that asks for a completion entry, and those of a fence.
const ASKS: u8 = 8;
const FENCE: u8 = 0xe0;
const REMOTE_OFFSET: usize = 16;
const REMOTE_KEY: usize = 24;
const LENGTH: usize = 32;
const KEY: usize = 36;
const OFFSET: usize = 40;
/// The bytes that stand in an entry, or what is added.
const VALUE: usize = 36;
const ADDEND: usize = 32;
/// Where what was in the word before goes: a length, a key, an offset.
const FETCHED: usize = 48;
/// The same of what a dump reads.
const DUMPED: usize = 16;

const NOTHING: u8 = 0x00;
const WRITE: u8 = 0x08;
const READ: u8 = 0x10;
const FETCH_ADD: u8 = 0x12;
const DUMP: u8 = 0x23;
/// In the first byte of a length: the bytes stand behind it.
const IS_INSIDE: u8 = 0x80;
/// Of what is fetched: 8 bytes to where nobody reads them.
const NOWHERE: [u8; SEGMENT] = [0, 0, 0, 8, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// The key of that place, as a board would have it.
const SINK: u64 = u32::from_ne_bytes([0, 0, 1, 0]) as u64;

/// What the board says of a queue of entries beyond what it says of all.
pub struct EntryQueue {
    /// The queue pair's number, as entries have it.
    number: [u8; 3],
    /// The first of the words that say which entry is there, or the doorbell.
    pub rings: u64,
    pub rung: Rung,
    /// The high half of all indices.
    high: u32,
}

impl EntryQueue {
    /// `Err`: no host may write that.
    pub fn parse(words: &[u64; RECORD_WORDS], rung: Rung) -> Result<Self, &'static str> {
        let [a, b, c, rest] = high(words[2]).to_ne_bytes();
        let (slots, count, rings) = (low(words[1]), words[3], words[4]);
        let handles = || (8..RECORD_WORDS).step_by(6).map(|at| words[at]);
        let is_wrong = [
            (high(words[1]) != 6, "slots of another size than an entry's"),
            (rest != 0, "more than 24 bits of a queue pair's number"),
            (low(words[2]).checked_add(slots).is_none(), "indices that wrap in a launch"),
            (words[6] & 2 == 0 && count == 0 || count % 8 != 0, "a count that is no aligned word of 8 bytes"),
            (rings == 0 || rings % 8 != 0, "words that ring and are not aligned"),
            (rung == Rung::ByDoorbell && slots >= 1 << 14, "more slots than a doorbell can tell apart"),
            (low(words[5]) != 0, "a descriptor's version"),
            (high(words[7]) != 0, "more than the high half of an index"),
            (handles().any(|handle| high(handle) != 0), "a key of more than 4 bytes"),
            (handles().any(|handle| handle == SINK), "a window with the key of what goes nowhere"),
        ];
        match is_wrong.iter().find(|w| w.0) {
            Some((_, what)) => Err(what),
            None => Ok(Self { number: [a, b, c], rings, rung, high: low(words[7]) }),
        }
    }

    /// All of an index.
    pub fn index(&self, index: u32) -> u64 {
        u64::from(self.high) << 32 | u64::from(index)
    }

    /// Bytes of what is rung, where there are so many slots.
    pub fn ring_bytes(&self, slots: u64) -> usize {
        match self.rung {
            Rung::BySlot => 8 * slots as usize,
            Rung::ByDoorbell => 8,
        }
    }

    /// How many entries a doorbell says have been rung beyond `next`; none if it is another queue pair's, or if that
    /// is more than there are slots.
    pub fn rung_beyond(&self, doorbell: u64, next: u32, slots: u64) -> u64 {
        let bytes = doorbell.to_ne_bytes();
        let n = u16::from_be_bytes([bytes[1], bytes[2]]).wrapping_sub(next as u16);
        match bytes[4..7] == self.number && u64::from(n) <= slots {
            true => n.into(),
            false => 0,
        }
    }

    /// The last 8 bytes of the completion entry of entry `index`, which was written, as words are in memory: the opcode
    /// (of which no device code knows whether it was this one), queue pair, index, and the lap.
    pub fn completion(&self, index: u32, slots: u64) -> u64 {
        let [a, b, c] = self.number;
        let [.., above, below] = index.to_be_bytes();
        let lap = u8::from(u64::from(index) & slots != 0);
        u64::from_ne_bytes([WRITE, a, b, c, above, below, 0, lap])
    }

    /// What entry `index` asks for. `None`: it is not for the lane kernel.
    pub fn take(&self, record: &Record, words: [u64; WORDS], index: u32) -> Option<Taken> {
        let e = Entry::of(words);
        let [.., above, below] = index.to_be_bytes();
        let is_own = e.0[..OPCODE] == [0, above, below] && e.0[NUMBER..SEGMENTS] == self.number;
        // Who counts completions in entries knows of none that asks for none.
        if !is_own || self.rung == Rung::ByDoorbell && e.0[FLAGS] & ASKS == 0 || e.0[FLAGS] & FENCE != 0 {
            return None;
        }
        let data = |data| Taken { data: Some(data), signal: None };
        match (e.0[OPCODE], e.segments(), e.is_inside()) {
            (WRITE, 3, false) => e.copy(record).map(data),
            (READ, 3, false) => e.read(record).map(data),
            (WRITE, 3 | 4, true) => e.value(record).map(data),
            (NOTHING, 1, _) => Some(Taken { data: None, signal: None }),
            (DUMP, 2, _) => e.dumps_nothing().then_some(Taken { data: None, signal: None }),
            (FETCH_ADD, 4, _) => e.addition(record).map(|signal| Taken { data: None, signal: Some(signal) }),
            _ => None,
        }
    }
}

/// Whether an entry is a read, which sees what was written before it and not what is written after it; `None`: that
/// makes no difference to it.
pub fn is_read(words: [u64; WORDS]) -> Option<bool> {
    match Entry::of(words).0[OPCODE] {
        NOTHING | DUMP => None,
        opcode => Some(opcode == READ),
    }
}

/// Whether some of what an entry's slot should have may not have been there yet when it was read. A slot is all ones
/// before it is written, so what is missing is, in whatever pieces device code writes.
pub fn may_lack_bytes(words: [u64; WORDS]) -> bool {
    let e = Entry::of(words);
    let segments = usize::from(e.segments()) * SEGMENT;
    // Behind a value nothing need be written.
    let until = match e.0[OPCODE] == WRITE && e.is_inside() {
        true => VALUE + e.inside() as usize,
        false => segments,
    };
    e.0[..until.min(BYTES)].contains(&0xff)
}

struct Entry([u8; BYTES]);

impl Entry {
    fn of(words: [u64; WORDS]) -> Self {
        let mut bytes = [0; BYTES];
        bytes.chunks_exact_mut(8).zip(words).for_each(|(to, word)| to.copy_from_slice(&word.to_ne_bytes()));
        Self(bytes)
    }

    fn be32(&self, at: usize) -> u32 {
        self.0[at..at + 4].iter().fold(0, |value, &byte| value << 8 | u32::from(byte))
    }

    fn be64(&self, at: usize) -> u64 {
        u64::from(self.be32(at)) << 32 | u64::from(self.be32(at + 4))
    }

    /// A key, as boards have it.
    fn key(&self, at: usize) -> u64 {
        u32::from_ne_bytes([self.0[at], self.0[at + 1], self.0[at + 2], self.0[at + 3]]).into()
    }

    fn segments(&self) -> u8 {
        self.0[SEGMENTS] & 0x3f
    }

    /// Of a write: whether its bytes stand in the entry.
    fn is_inside(&self) -> bool {
        self.0[LENGTH] & IS_INSIDE != 0
    }

    /// How many these are.
    fn inside(&self) -> u32 {
        self.be32(LENGTH) & !(u32::from(IS_INSIDE) << 24)
    }

    /// Where so many bytes go.
    fn to(&self, record: &Record, bytes: u64) -> Option<u64> {
        record.window(self.key(REMOTE_KEY))?.written().at(self.be64(REMOTE_OFFSET), bytes)
    }

    /// A range here of so many bytes, if that may be.
    fn range(&self, record: &Record) -> Option<(u64, u64)> {
        let bytes = self.be32(LENGTH).into();
        if bytes == 0 || bytes > record.longest() {
            return None;
        }
        Some((record.window(self.key(KEY))?.here.at(self.be64(OFFSET), bytes)?, bytes))
    }

    fn read(&self, record: &Record) -> Option<Data> {
        let (to, bytes) = self.range(record)?;
        let from = record.window(self.key(REMOTE_KEY))?.at_peer.at(self.be64(REMOTE_OFFSET), bytes)?;
        ((from | to | bytes) % 4 == 0).then_some(Data::Copy { from, to, bytes })
    }

    /// Whether a dump is one of where nobody reads.
    fn dumps_nothing(&self) -> bool {
        let (len, at) = (u64::from(self.be32(DUMPED)), self.be64(DUMPED + 8));
        self.key(DUMPED + 4) == SINK && (1..=8).contains(&len) && at <= 8 - len
    }

    fn copy(&self, record: &Record) -> Option<Data> {
        let (from, bytes) = self.range(record)?;
        let to = self.to(record, bytes)?;
        ((from | to | bytes) % 4 == 0).then_some(Data::Copy { from, to, bytes })
    }

    fn value(&self, record: &Record) -> Option<Data> {
        let bytes = self.inside();
        if ![1, 2, 4, 8].contains(&bytes) {
            return None;
        }
        let to = self.to(record, bytes.into())?;
        let mut value = [0; 8];
        value.copy_from_slice(&self.0[VALUE..VALUE + 8]);
        let value = u64::from_ne_bytes(value);
        (to % u64::from(bytes) == 0).then_some(Data::Value { to, bytes, value })
    }

    /// The word and what is added to it.
    fn addition(&self, record: &Record) -> Option<(u64, u64)> {
        let at = self.to(record, 8)?;
        (at % 8 == 0 && self.0[FETCHED..] == NOWHERE).then_some((at, self.be64(ADDEND)))
    }
}
