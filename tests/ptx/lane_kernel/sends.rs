//! Send entries of the software NIC: their bytes, and queues of them.

use super::queue::{Data, Entry, Queue, Signal, Window};
use super::reads::Written;
use super::*;

pub const NOP: u8 = 0x00;
pub const WRITE: u8 = 0x08;
pub const READ: u8 = 0x10;
pub const FETCH_ADD: u8 = 0x12;
pub const DUMP: u8 = 0x23;
/// Where old values go that nobody wants.
pub const SINK: u32 = 1 << 8;
/// Of a length: the bytes stand in the entry.
const INLINE: u32 = 1 << 31;
/// The flag that asks for a completion entry, and those that have an entry wait for reads before it.
pub const COMPLETES: u8 = 8;
pub const FENCE: u8 = 0xe0;

/// A queue pair, as far as it is more than a queue.
pub struct Pair {
    /// 24 bits.
    pub number: u32,
    /// The high half of the first index; no index has another.
    pub high: u64,
    /// A word at the peer to which many add: the number of its window, and the offset.
    shared: (usize, u64),
    /// A doorbell rings it, and there is a completion queue.
    pub has_bell: bool,
    /// The doorbell lags so much at first, or is another's and so much ahead.
    lag: u64,
    is_others: bool,
}

#[derive(Clone, Copy, PartialEq)]
pub enum Kind {
    Put,
    Value,
    Addition,
    /// Asks for nothing: device code writes one in front of the signal of a put without bytes.
    Nop,
    Read,
    /// Of the sink: device code writes one behind gets.
    Dump,
}

/// What a send entry is made of, each for itself.
#[derive(Clone, Copy)]
pub struct Send {
    pub kind: Kind,
    pub modifier: u8,
    pub opcode: u8,
    /// What its index differs in from the right one.
    pub index: u16,
    pub number: u32,
    pub segments: u8,
    pub flags: u8,
    pub rkey: u32,
    pub remote: u64,
    /// The range here; where the old value of an addition goes; of a value the length alone, without its top bit.
    pub len: u32,
    pub lkey: u32,
    pub local: u64,
    /// The value, or what is added.
    pub value: u64,
    /// What stands in control and address segments where nobody looks: device code does not set it.
    pub unread: u32,
    /// What lies where nothing need be written.
    pub fill: u64,
}

/// A key or a number as it stands in an entry.
pub fn swapped(key: u32) -> u32 {
    u32::from_ne_bytes(key.to_be_bytes())
}

fn data_segment(len: u32, key: u32, offset: u64) -> Vec<u8> {
    [len.to_be_bytes().as_slice(), &key.to_be_bytes(), &offset.to_be_bytes()].concat()
}

/// The bits of an index, which are 0 in a send entry that has not been posted.
pub fn index_bits(index: u64) -> u64 {
    u64::from((index as u16).swap_bytes()) << 8
}

impl Send {
    pub fn words(&self) -> [u64; 8] {
        let mut bytes = [self.fill.to_le_bytes(); 8].concat();
        let mut put = |at: usize, some: &[u8]| bytes[at..at + some.len()].copy_from_slice(some);
        put(0, &[self.modifier, (self.index >> 8) as u8, self.index as u8, self.opcode]);
        put(4, &(self.number << 8 | u32::from(self.segments)).to_be_bytes());
        put(8, &[0, 0, 0, self.flags]);
        put(12, &self.unread.to_le_bytes());
        if !matches!(self.kind, Kind::Nop | Kind::Dump) {
            put(16, &self.remote.to_be_bytes());
            put(24, &self.rkey.to_be_bytes());
            put(28, &self.unread.to_be_bytes());
        }
        let data = data_segment(self.len, self.lkey, self.local);
        match self.kind {
            Kind::Put | Kind::Read => {
                put(32, &data);
                // Should it be two ranges, the second is as good as the first.
                put(48, if self.segments == 4 { &data } else { &[] });
            }
            Kind::Value => {
                put(32, &(self.len | INLINE).to_be_bytes());
                put(36, &self.value.to_le_bytes()[..(self.len as usize).min(8)]);
            }
            Kind::Addition => {
                put(32, &self.value.to_be_bytes());
                put(48, &data);
            }
            Kind::Nop => {}
            Kind::Dump => put(16, &data),
        }
        std::array::from_fn(|i| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().expect("8 bytes")))
    }
}

/// What a send entry is stored in: offset, bytes and value of each store. Bytes that stand in the entry, and their
/// length, are stored by 4 or less, all else in words. What is not stored stays all ones.
pub fn stores(words: &[u64; 8]) -> Vec<(u64, u64, u64)> {
    let bytes = words.map(u64::to_le_bytes).concat();
    let is_inline = bytes[3] == WRITE && bytes[32] & 0x80 != 0;
    let mut sizes = vec![8; if is_inline { 4 } else { 8 }];
    if is_inline {
        let first: &[u64] = match bytes[35] {
            1 => &[1, 1, 2],
            2 => &[2, 2],
            _ => &[4],
        };
        sizes.push(4);
        sizes.extend(first);
        sizes.extend([4; 6]);
    }
    let (mut at, mut all) = (0, Vec::new());
    for size in sizes {
        let mut value = [0; 8];
        let some = &bytes[at as usize..(at + size) as usize];
        value[..some.len()].copy_from_slice(some);
        if some.iter().any(|&byte| byte != 0xff) {
            all.push((at, size, u64::from_le_bytes(value)));
        }
        at += size;
    }
    all
}

impl Pair {
    /// What of a queue's record is another for send entries, the first of which is number `next`.
    pub fn tell(&self, q: &Queue, next: usize, record: &mut [u64; 32]) {
        let index = q.index(next);
        record[2] = index & 0xffff_ffff | u64::from(swapped(self.number << 8)) << 32;
        record[3] = if self.has_bell { q.completions_at() } else { q.index_at() };
        record[4] = q.rings_at();
        record[5] = q.most << 32;
        record[7] = index >> 32;
    }
}

impl Queue {
    /// Holds send entries instead of descriptors.
    pub fn of_sends(mut self, has_bell: bool, random: &mut Random) -> Self {
        self.stride = 6;
        // 16 bits of an index are in its entry.
        let near = (u32::MAX - 4000, random.below(65_535) as u32 * 65_536 + 65_530);
        self.first = [0, 5, near.0, near.1, 65_530][random.below(5) as usize];
        for (i, w) in self.windows.iter_mut().enumerate() {
            let Some(w) = w else { continue };
            // Keys of the software NIC are small, and those of several windows alike.
            let small = (2 + self.number * 4 + i as u64) << 8 | random.below(4);
            w.handle = [small, w.handle & 0xffff_ffff | 1 << 16][random.below(2) as usize];
        }
        let at = self.windows.iter().position(Option::is_some).expect("a window");
        if let Some(turned) = self.windows.iter_mut().flatten().skip(1).last() {
            turned.is_turned = true;
        }
        let offset = self.windows[at].as_mut().and_then(|w| w.room(8, 8, random)).expect("room");
        let high = [0, 1, random.next() >> 33][random.below(3) as usize];
        let number = [random.next() as u32 & 0xff_ffff, 0xff_ffff, 1][random.below(3) as usize];
        let (lag, is_others) = (random.below(u64::from(self.slots) + 1), random.below(3) == 0);
        self.pair = Some(Pair { number, high, shared: (at, offset), has_bell, lag, is_others });
        self
    }

    /// Where the words are that say which send entries are there; as many as there are slots.
    pub fn rings_at(&self) -> u64 {
        RINGS + self.number * RING_BYTES
    }

    pub fn ring_at(&self, i: usize) -> u64 {
        self.rings_at() + 8 * (self.index(i) & u64::from(self.slots - 1))
    }

    /// What a doorbell says once `end` entries of the queue have been rung, all in all: that many, and whose they are.
    pub fn bell(&self, end: u64) -> u64 {
        index_bits(end) | u64::from(swapped(self.pair().number << 8)) << 32
    }

    /// Where its completion queue is; each entry has the place of its slot.
    pub fn completions_at(&self) -> u64 {
        COMPLETIONS + self.number * COMPLETION_BYTES
    }

    pub fn completion_at(&self, i: usize) -> u64 {
        self.completions_at() + 64 * (self.index(i) & u64::from(self.slots - 1))
    }

    /// The last word of the completion entry of an entry that is complete.
    pub fn completion(&self, i: usize) -> u64 {
        let [.., a, b, c] = self.pair().number.to_be_bytes();
        let [above, below] = (self.index(i) as u16).to_be_bytes();
        let opcode = self.entries[i].words[0].to_le_bytes()[3];
        u64::from_le_bytes([opcode, a, b, c, above, below, 0, self.lap(i)])
    }

    fn lap(&self, i: usize) -> u8 {
        u8::from(self.index(i) & u64::from(self.slots) != 0)
    }

    /// Entries that are complete, as device code finds out that trusts the newest completion entry it sees: it may be a
    /// lap further than `told`, and what it finds then of the lap before is what lies there. `read` reads a word.
    pub fn completed(&self, read: impl Fn(u64) -> u64) -> usize {
        let is_seen = |&i: &usize| read(self.completion_at(i) + 56).to_le_bytes()[7] == self.lap(i);
        let end = self.entries.len().min(self.told + self.slots as usize);
        (self.told..end).rev().find(is_seen).map_or(self.told, |i| i + 1)
    }

    /// Words that say which entries are there.
    pub fn rings(&self) -> u64 {
        match &self.pair {
            None => 0,
            Some(pair) if pair.has_bell => 1,
            Some(_) => self.slots.into(),
        }
    }

    /// What the last word of a completion entry holds once what was taken is told: that of the newest entry of its
    /// slot; before the first one, of any that is of the lap before.
    pub fn completion_word(&self, slot: u64) -> u64 {
        let mask = u64::from(self.slots - 1);
        let newest = (0..self.told).rev().find(|&i| self.index(i) & mask == slot);
        let first = (0..).find(|&i| self.index(i) & mask == slot).expect("each slot has one");
        newest.map_or(u64::from(1 - self.lap(first)) << 56 | 0x1234, |i| self.completion(i))
    }

    /// What the word of a slot, or the doorbell, holds: the index of the newest entry that was rung there, and 1.
    pub fn ring_word(&self, slot: u64) -> u64 {
        if self.has_bell() {
            let (pair, rung) = (self.pair(), self.entries.iter().take_while(|e| e.is_rung).count() as u64);
            return match rung {
                0 if pair.is_others => self.bell(self.index(0) + pair.lag) ^ 1 << 48,
                0 => self.bell(self.index(0).wrapping_sub(pair.lag)),
                rung => self.bell(self.index(0) + rung),
            };
        }
        let mask = u64::from(self.slots - 1);
        let is_here = |i: &usize| self.entries[*i].is_rung && self.index(*i) & mask == slot;
        let newest = (0..self.entries.len()).rev().find(is_here);
        // Before the first one there were others, from index 0 on.
        let end = self.index(0);
        newest.map_or(end.saturating_sub(end.wrapping_sub(1).wrapping_sub(slot) & mask), |i| self.index(i) + 1)
    }

    fn pair(&self) -> &Pair {
        self.pair.as_ref().expect("a queue of send entries")
    }

    /// What all have in common.
    pub fn send(&self, kind: Kind, (remote, rkey): (u64, u32), random: &mut Random) -> Send {
        Send {
            kind,
            modifier: 0,
            opcode: [WRITE, WRITE, FETCH_ADD, NOP, READ, DUMP][kind as usize],
            index: 0,
            number: self.pair().number,
            segments: [3, 3 + random.below(2) as u8, 4, 1, 3, 2][kind as usize],
            // No other flag but fences makes a difference, nor that one where completions are counted.
            flags: [0, COMPLETES, random.next() as u8 & !FENCE][random.below(3) as usize] | self.asked(),
            rkey,
            remote,
            len: 0,
            lkey: 0,
            local: 0,
            value: 0,
            unread: [0, u32::MAX, random.next() as u32][random.below(3) as usize],
            // Behind bytes that stand in the entry nothing is.
            fill: if kind == Kind::Value { u64::MAX } else { [u64::MAX, 0, random.next()][random.below(3) as usize] },
        }
    }

    /// What all entries ask for, where completions are entries of their own.
    fn asked(&self) -> u8 {
        if self.has_bell() {
            COMPLETES
        } else {
            0
        }
    }

    /// A send entry of any kind that is taken.
    pub fn any_send(&mut self, random: &mut Random) -> Entry {
        match random.below(14) {
            9 => self.dump(random),
            10.. => self.read_send(random),
            0 | 1 => self.value_send(random),
            2 => self.addition(true, random),
            3 => self.addition(false, random),
            8 => self.nop(random),
            other => {
                let bytes = self.any_bytes([3, 4, 5, 3 + random.below(5)][other as usize - 4], random);
                self.put_send(bytes, random)
            }
        }
    }

    /// A put; an addition where there is no room.
    pub fn put_send(&mut self, bytes: u64, random: &mut Random) -> Entry {
        let unit = [16, 8, 4][random.below(3) as usize];
        let Some((remote, to)) = self.target(bytes, unit, random) else { return self.addition(true, random) };
        let (w, from) = self.source(bytes, unit, random);
        let send = self.send(Kind::Put, (remote, to.key()), random);
        let send = Send { len: bytes as u32, lkey: w.key(), local: from - w.here, ..send };
        let data = Data::Copy { from, to: to.peer + remote, bytes };
        self.written = Some(Written { data, handle: to.handle, at: remote });
        Entry::new(send.words(), Some(data), None)
    }

    fn value_send(&mut self, random: &mut Random) -> Entry {
        let bytes = 1 << random.below(4);
        let Some((remote, w)) = self.target(bytes, bytes, random) else { return self.addition(true, random) };
        // No byte of it is 0; all may be as in an empty slot.
        let value = [random.next() | 0x0101_0101_0101_0101, u64::MAX][usize::from(random.below(4) == 0)];
        let send = Send { len: bytes as u32, value, ..self.send(Kind::Value, (remote, w.key()), random) };
        let data = Data::Value { value, to: w.peer + remote, bytes };
        self.written = Some(Written { data, handle: w.handle, at: remote });
        Entry::new(send.words(), Some(data), None)
    }

    /// Nothing.
    fn nop(&mut self, random: &mut Random) -> Entry {
        Entry::new(self.send(Kind::Nop, (0, 0), random).words(), None, None)
    }

    /// To the word for many, or to one of its own.
    pub fn addition(&mut self, is_shared: bool, random: &mut Random) -> Entry {
        let own = if is_shared { None } else { self.target(8, 8, random) };
        let at = |(i, offset): (usize, u64)| (offset, self.windows[i].expect("a window"));
        let (remote, w): (u64, Window) = own.unwrap_or_else(|| at(self.pair().shared));
        let increment = [1, u64::MAX, 1 + random.next() % (u64::MAX - 1)][random.below(3) as usize];
        let send = self.send(Kind::Addition, (remote, w.key()), random);
        let send = Send { value: increment, len: 8, lkey: SINK, ..send };
        let signal = Signal { at: w.peer + remote, increment, is_shared: own.is_none(), nth: 0 };
        if own.is_some() {
            self.written = Some(Written::added(&signal, w.handle, remote));
        }
        Entry::new(send.words(), None, Some(signal))
    }
}
