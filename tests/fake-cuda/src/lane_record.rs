//! What the board says of a lane of the lane kernel, and which descriptors that lane takes.

use crate::lane_effect::Effect;
use crate::lane_entry::{self, EntryQueue};
use nccl_plugin_api::descriptor::{
    Descriptor, Form, OP_FLUSH, OP_GET, OP_INLINE, OP_PUT, OP_SIGNAL_ADD, OP_SIGNAL_INC, OP_VA_SIGNAL, WORDS,
};

/// Words of a record.
pub const RECORD_WORDS: usize = 32;
const WINDOWS: usize = 4;
const PUT_INLINE: u16 = OP_PUT | OP_INLINE;

/// What the queues of a launch hold.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    Descriptors,
    Entries(Rung),
}

/// By what device code says that entries are there, and how it is told that they are complete.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Rung {
    /// A word for each slot; completions are counted.
    BySlot,
    /// A doorbell; there is a completion queue.
    ByDoorbell,
}

impl Holds {
    /// `None`: no host may write that.
    pub fn parse(word: u64) -> Option<Self> {
        match word {
            0 => Some(Self::Descriptors),
            1 => Some(Self::Entries(Rung::BySlot)),
            2 => Some(Self::Entries(Rung::ByDoorbell)),
            _ => None,
        }
    }

    /// What the words of a slot are before device code writes it.
    pub fn blank(self) -> u64 {
        match self {
            Self::Descriptors => 0,
            Self::Entries(_) => u64::MAX,
        }
    }
}

/// One end of a window.
#[derive(Clone, Copy, Default)]
pub struct End {
    base: u64,
    bytes: u64,
}

impl End {
    /// The address at an offset, if so many bytes lie inside from there on.
    pub fn at(self, offset: u64, bytes: u64) -> Option<u64> {
        (offset <= self.bytes && bytes <= self.bytes - offset).then_some(self.base.wrapping_add(offset))
    }
}

#[derive(Clone, Copy, Default)]
pub struct Window {
    /// 0: there is none.
    handle: u64,
    pub here: End,
    pub at_peer: End,
    /// Nothing of it is written at the peer.
    is_read: bool,
}

impl Window {
    /// The peer's, for what writes there.
    pub fn written(&self) -> End {
        if self.is_read {
            End::default()
        } else {
            self.at_peer
        }
    }
}

/// A lane.
pub struct Record {
    /// Slot 0 of its queue.
    pub queue: u64,
    mask: u32,
    shift: u32,
    /// Index of the first descriptor or entry.
    pub first: u32,
    /// Where device code reads how far it is.
    index: u64,
    signals: u32,
    signals_at: u64,
    newest: u32,
    /// Nothing of it is taken: it is closed as soon as something begins to arrive.
    pub is_watched: bool,
    /// Of a copy; 32 times as many where nothing speaks against it ([`Record::longest`]).
    pub most_bytes: u32,
    windows: [Window; WINDOWS],
    /// If these are what the queue holds.
    pub entries: Option<EntryQueue>,
}

/// What a descriptor or an entry asks for.
pub struct Taken {
    pub data: Option<Data>,
    /// The word and what is added to it.
    pub signal: Option<(u64, u64)>,
}

pub enum Data {
    Copy { from: u64, to: u64, bytes: u64 },
    Value { to: u64, bytes: u32, value: u64 },
}

pub const fn low(word: u64) -> u32 {
    word as u32
}

pub const fn high(word: u64) -> u32 {
    (word >> 32) as u32
}

impl Record {
    /// `None`: no lane has this place. `Err`: no host may write that.
    pub fn parse(words: &[u64; RECORD_WORDS], holds: Holds) -> Result<Option<Self>, &'static str> {
        if words[0] == 0 {
            return Ok(None);
        }
        let windows: [Window; WINDOWS] = std::array::from_fn(|i| {
            let w = &words[8 + 6 * i..];
            let [here, at_peer] = [1, 3].map(|at| End { base: w[at], bytes: w[at + 1] });
            Window { handle: w[0], here, at_peer, is_read: w[5] != 0 }
        });
        let entries = match holds {
            Holds::Descriptors => None,
            Holds::Entries(rung) => Some(EntryQueue::parse(words, rung)?),
        };
        let record = Self {
            queue: words[0],
            mask: low(words[1]),
            shift: high(words[1]),
            first: low(words[2]),
            signals: high(words[2]),
            index: words[3],
            signals_at: words[4],
            newest: low(words[5]),
            is_watched: words[6] & 2 != 0,
            most_bytes: high(words[5]),
            windows,
            entries,
        };
        record.check(words)?;
        if record.entries.is_none() {
            record.check_descriptors(words)?;
        }
        Ok(Some(record))
    }

    fn check(&self, words: &[u64; RECORD_WORDS]) -> Result<(), &'static str> {
        let known: Vec<&Window> = self.windows.iter().filter(|w| w.handle != 0).collect();
        let is_twice = |i: usize| known[..i].iter().any(|w| w.handle == known[i].handle);
        let wraps = |end: End| end.base.checked_add(end.bytes).is_none();
        let is_wrong = [
            (!self.slots().is_power_of_two(), "a mask that is no power of two less 1"),
            (self.queue % 16 != 0, "slots that cannot be loaded by 16 bytes"),
            ((0..known.len()).any(is_twice), "two windows with one handle"),
            (known.iter().any(|w| wraps(w.here) || wraps(w.at_peer)), "a window that does not end"),
            (words[6] > 3, "a peer that is neither near nor far, or a lane neither served nor watched"),
            ((0..WINDOWS).any(|i| words[13 + 6 * i] > 1), "a window that is neither read alone nor written"),
        ];
        is_wrong.iter().find(|w| w.0).map_or(Ok(()), |w| Err(w.1))
    }

    fn check_descriptors(&self, words: &[u64; RECORD_WORDS]) -> Result<(), &'static str> {
        let is_wrong = [
            (!matches!(self.shift, 6 | 7), "slots of neither 64 nor 128 bytes"),
            ((self.newest == 0) != (self.shift == 6), "slots of the other form's bytes"),
            (self.newest > 15, "a version that no descriptor can have"),
            (!self.is_watched && self.index == 0 || self.index % 4 != 0, "an index that is no aligned word of 4 bytes"),
            (self.signals > 0 && self.signals_at % 8 != 0, "signals that are no aligned words"),
            (words[7] != 0, "something in a word that has no meaning"),
        ];
        is_wrong.iter().find(|w| w.0).map_or(Ok(()), |w| Err(w.1))
    }

    /// What no other lane may have: its slots, and of entries what rings and where they are counted.
    pub fn owned(&self) -> Vec<u64> {
        match &self.entries {
            // Who watches it tells device code nothing.
            Some(entries) if self.is_watched => vec![self.queue, entries.rings],
            Some(entries) => vec![self.queue, entries.rings, self.index],
            None => vec![self.queue],
        }
    }

    /// Device code is told of all from `first` to before `next`, of which there is one at least. What comes first, each
    /// seen by all before the next one, and what comes then.
    pub fn progress(&self, first: u32, next: u32) -> (Vec<Effect>, Effect) {
        match &self.entries {
            Some(entries) if entries.rung == Rung::ByDoorbell => {
                let last = next.wrapping_sub(1);
                let of = |index: u32| Effect::Count {
                    at: self.index + 64 * self.place(index) as u64 + 56,
                    value: entries.completion(index, self.slots()),
                };
                ((0..last.wrapping_sub(first)).map(|n| of(first.wrapping_add(n))).collect(), of(last))
            }
            Some(entries) => (Vec::new(), Effect::Count { at: self.index, value: entries.index(next) }),
            None => (Vec::new(), Effect::Index { at: self.index, value: next }),
        }
    }

    pub fn slots(&self) -> u64 {
        u64::from(self.mask) + 1
    }

    /// Bytes of the queue.
    pub fn queue_bytes(&self) -> usize {
        (self.slots() as usize) << self.shift
    }

    /// Which slot a descriptor or an entry has.
    pub fn place(&self, index: u32) -> usize {
        (index & self.mask) as usize
    }

    /// Where in the queue that is.
    pub fn slot(&self, index: u32) -> usize {
        self.place(index) << self.shift
    }

    pub fn window(&self, handle: u64) -> Option<&Window> {
        self.windows.iter().find(|w| w.handle != 0 && w.handle == handle)
    }

    /// What is in the slot of `index`. `None`: it is not for the lane kernel.
    pub fn take(&self, words: [u64; WORDS], index: u32) -> Option<Taken> {
        match &self.entries {
            Some(entries) => entries.take(self, words, index),
            None => self.take_descriptor(words),
        }
    }

    /// Whether what is in a slot reads, and sees what was written before it and not what is written after it; `None`:
    /// that makes no difference to it.
    pub fn is_read(&self, words: [u64; WORDS]) -> Option<bool> {
        match (&self.entries, self.descriptor(words).op()) {
            (Some(_), _) => lane_entry::is_read(words),
            (None, OP_FLUSH) => None,
            (None, op) => Some(op == OP_GET),
        }
    }

    fn descriptor(&self, words: [u64; WORDS]) -> Descriptor {
        Descriptor { words, form: if self.newest == 0 { Form::Bytes64 } else { Form::Bytes128 } }
    }

    fn take_descriptor(&self, words: [u64; WORDS]) -> Option<Taken> {
        let d = self.descriptor(words);
        if d.form == Form::Bytes128 && !(1..=self.newest).contains(&d.version().into()) {
            return None;
        }
        match d.op() {
            OP_GET => return Some(Taken { data: Some(self.get(&d)?), signal: None }),
            OP_FLUSH => return Some(Taken { data: None, signal: None }),
            _ => {}
        }
        let by = match d.op() & (OP_SIGNAL_INC | OP_SIGNAL_ADD) {
            0 => None,
            OP_SIGNAL_INC => Some(1),
            OP_SIGNAL_ADD => Some(d.signal_value()),
            _ => return None,
        };
        let op = d.op() & !(OP_SIGNAL_INC | OP_SIGNAL_ADD);
        if op == OP_VA_SIGNAL {
            let at = self.window(d.first_handle())?.written().at(d.first_offset(), 8)?;
            return (at % 8 == 0).then_some(Taken { data: None, signal: Some((at, by?)) });
        }
        let signal = match by {
            Some(_) if d.signal() >= self.signals => return None,
            Some(by) => Some((self.signals_at.wrapping_add(8 * u64::from(d.signal())), by)),
            None => None,
        };
        let data = match op {
            OP_PUT if d.size() == 0 => {
                signal?;
                None
            }
            OP_PUT => Some(self.copy(&d)?),
            PUT_INLINE => Some(self.value(&d)?),
            _ => return None,
        };
        Some(Taken { data, signal })
    }

    /// The bytes of a copy that is ever taken.
    pub fn longest(&self) -> u64 {
        32 * u64::from(self.most_bytes)
    }

    fn get(&self, d: &Descriptor) -> Option<Data> {
        let bytes = d.size();
        if bytes == 0 || bytes > self.longest() {
            return None;
        }
        let from = self.window(d.first_handle())?.at_peer.at(d.first_offset(), bytes)?;
        let to = self.window(d.second_handle())?.here.at(d.second_offset(), bytes)?;
        ((from | to | bytes) % 4 == 0).then_some(Data::Copy { from, to, bytes })
    }

    fn copy(&self, d: &Descriptor) -> Option<Data> {
        let bytes = d.size();
        if bytes > self.longest() {
            return None;
        }
        let from = self.window(d.first_handle())?.here.at(d.first_offset(), bytes)?;
        let to = self.window(d.second_handle())?.written().at(d.second_offset(), bytes)?;
        ((from | to | bytes) % 4 == 0).then_some(Data::Copy { from, to, bytes })
    }

    fn value(&self, d: &Descriptor) -> Option<Data> {
        let bytes = d.size();
        if ![1, 2, 4, 8].contains(&bytes) {
            return None;
        }
        let to = self.window(d.second_handle())?.written().at(d.second_offset(), bytes)?;
        (to % bytes == 0).then_some(Data::Value { to, bytes: bytes as u32, value: d.inline_value() })
    }
}
