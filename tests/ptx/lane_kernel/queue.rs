//! A queue of device code, what was posted to it, and what each descriptor or send entry is to do.

use super::reads::Written;
use super::sends::Pair;
use super::*;
use nccl_plugin_api::descriptor::{Descriptor, Form};
use nccl_plugin_api::descriptor::{OP_INLINE, OP_PUT, OP_SIGNAL_ADD, OP_SIGNAL_INC, OP_VA_SIGNAL};

/// Bytes of the sources of a queue, and as many of its destinations; each of its windows has a fourth.
pub const ROOM: u64 = 72 << 10;
const WINDOW: u64 = ROOM / 4;
/// Signals of a context, at most. The first is for many descriptors, the others for one each.
const SIGNALS_EACH: u64 = 512;

#[derive(Clone, Copy, Debug)]
pub struct Window {
    pub handle: u64,
    pub here: u64,
    pub here_bytes: u64,
    pub peer: u64,
    pub peer_bytes: u64,
    /// What was used of it at the peer.
    used: u64,
    /// For reads alone: what is here for others is at the peer, and what is there is here.
    pub is_turned: bool,
}

/// What arrives where.
#[derive(Clone, Copy, Debug)]
pub enum Data {
    Copy { from: u64, to: u64, bytes: u64 },
    Value { value: u64, to: u64, bytes: u64 },
}

#[derive(Clone, Copy, Debug)]
pub struct Signal {
    pub at: u64,
    pub increment: u64,
    /// Others add to it, too.
    pub is_shared: bool,
    /// So many before it in its queue add as much to it; 0 if it is shared.
    pub nth: u64,
}

/// What the slots of a launch's queues hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Slots {
    Descriptors,
    /// Send entries that are rung by a word for each slot.
    Sends,
    /// Send entries that a doorbell rings.
    Bells,
}

#[derive(Clone, Copy, Debug)]
pub struct Entry {
    pub words: [u64; 8],
    pub data: Option<Data>,
    pub signal: Option<Signal>,
    /// The word of its slot, or the doorbell, says that it is there; of descriptors their own words say so.
    pub is_rung: bool,
    /// All of it is written, and nothing but entries before it keeps the doorbell from being rung for it.
    pub is_ready: bool,
}

pub struct Queue {
    /// Which one: where all of it lies follows from that.
    pub number: u64,
    pub slots: u32,
    pub stride: u32,
    pub first: u32,
    pub form: Form,
    pub newest: u32,
    pub most: u64,
    pub signals: u32,
    /// Of send entries.
    pub pair: Option<Pair>,
    /// Its peer is on another GPU.
    pub is_far: bool,
    /// Nothing of it is to be taken.
    pub is_watched: bool,
    /// Descriptors are gets and flushes, too.
    pub has_gets: bool,
    pub windows: [Option<Window>; 4],
    pub next_signal: u64,
    /// What was sent last, for a read of it.
    pub written: Option<Written>,
    /// What entries were like of late, and how many had each signal.
    pub models: Vec<super::alike::Model>,
    pub runs: std::collections::HashMap<u32, u64>,
    /// All that was posted; index `first + i`.
    pub entries: Vec<Entry>,
    /// Entries before were taken, are known to be done, and have their bytes there.
    pub told: usize,
    pub done: usize,
    pub arrived: usize,
    /// The entry that is refused, if it was.
    pub refused: Option<usize>,
}

/// What a source holds at an address; never 0.
pub fn pattern(at: u64) -> u8 {
    ((at * 31 + at / 256 * 7) % 255 + 1) as u8
}

impl Window {
    /// One of those of a queue, by its number.
    pub fn new(queue: u64, i: u64, random: &mut Random) -> Self {
        Self {
            handle: 1 + random.next() % ((1 << 63) - 1),
            // Bases are not always multiples of 16.
            here: SOURCES + queue * ROOM + i * WINDOW + 4 * random.below(2) * random.below(4),
            here_bytes: WINDOW - 16 - random.below(100) - [0, WINDOW / 2][random.below(2) as usize],
            peer: TARGETS + queue * ROOM + i * WINDOW + 4 * random.below(2) * random.below(4),
            peer_bytes: WINDOW - 16 - random.below(100) - [0, WINDOW / 4][random.below(2) as usize],
            used: 0,
            is_turned: false,
        }
    }

    /// Base and bytes here, base and bytes at the peer, and whether that is read alone, as the kernel is told.
    fn told(&self) -> [u64; 5] {
        let (here, peer) = ((self.here, self.here_bytes), (self.peer, self.peer_bytes));
        let ((here, here_bytes), (peer, peer_bytes)) = if self.is_turned { (peer, here) } else { (here, peer) };
        [here, here_bytes, peer, peer_bytes, self.is_turned.into()]
    }

    /// So many bytes of it here, at a multiple of `unit`: the address.
    pub fn some(&self, bytes: u64, unit: u64, random: &mut Random) -> u64 {
        let first = self.here.next_multiple_of(unit);
        // Some end where the window does.
        let units = (self.here + self.here_bytes - bytes - first) / unit;
        first + unit * [random.below(units + 1), units][random.below(2) as usize]
    }

    /// By which send entries name it, here and at the peer.
    pub fn key(&self) -> u32 {
        self.handle as u32
    }

    /// The first half is used up.
    pub fn use_half(&mut self) {
        self.used = WINDOW / 2;
    }

    /// Room at the peer for so many bytes, at a multiple of `unit`: the offset.
    pub fn room(&mut self, bytes: u64, unit: u64, random: &mut Random) -> Option<u64> {
        let at = (self.peer + self.used).next_multiple_of(unit) + unit * random.below(2);
        // Some end where the window does.
        let last = (self.peer + self.peer_bytes - bytes) / unit * unit;
        let at = if self.used > self.peer_bytes / 2 && random.below(16) == 0 { last.max(at) } else { at };
        (at <= last).then(|| {
            self.used = at + bytes - self.peer;
            at - self.peer
        })
    }
}

impl Entry {
    /// One that has not been posted.
    pub fn new(words: [u64; 8], data: Option<Data>, signal: Option<Signal>) -> Self {
        Self { words, data, signal, is_rung: false, is_ready: false }
    }

    /// How many bytes of data it has.
    pub fn bytes(&self) -> u64 {
        self.data.map_or(0, |(Data::Copy { bytes, .. } | Data::Value { bytes, .. })| bytes)
    }
}

impl Queue {
    pub fn new(number: u64, random: &mut Random) -> Self {
        let form = [Form::Bytes64, Form::Bytes128][random.below(2) as usize];
        let newest = if form == Form::Bytes64 { 0 } else { 1 + random.below(2) as u32 };
        let one = random.below(4) as usize;
        let windows =
            std::array::from_fn(|i| (i == one || random.below(2) == 0).then(|| Window::new(number, i as u64, random)));
        Self {
            number,
            slots: [4, 8, 16, 32, 64][random.below(5) as usize],
            // The 64-byte form in slots of 128 bytes and the other way round do not occur.
            stride: if form == Form::Bytes64 { 6 } else { 7 },
            first: [0, 5, u32::MAX - 9, 1 << 31][random.below(4) as usize],
            form,
            newest,
            most: [4096, 2500, 4096, 8720][random.below(4) as usize],
            signals: (SIGNALS_EACH - random.below(100)) as u32,
            pair: None,
            is_far: random.below(2) == 0,
            is_watched: false,
            has_gets: false,
            windows,
            next_signal: 1,
            written: None,
            models: Vec::new(),
            runs: std::collections::HashMap::new(),
            entries: Vec::new(),
            told: 0,
            done: 0,
            arrived: 0,
            refused: None,
        }
    }

    /// The index of a send entry.
    pub fn index(&self, i: usize) -> u64 {
        let high = self.pair.as_ref().map_or(0, |pair| pair.high);
        (high << 32 | u64::from(self.first)) + i as u64
    }

    pub fn slot_at(&self, i: usize) -> u64 {
        let index = self.first.wrapping_add(i as u32) & (self.slots - 1);
        QUEUES + self.number * QUEUE_BYTES + (u64::from(index) << self.stride)
    }

    /// What the words of an empty slot hold.
    pub fn blank(&self) -> u64 {
        if self.pair.is_some() {
            u64::MAX
        } else {
            0
        }
    }

    /// Where the consumer index is: 4 bytes, and not always a multiple of 8. Of send entries their count: 8 bytes.
    pub fn index_at(&self) -> u64 {
        INDICES + self.number * 64 + self.index_bytes() * (self.number % 2)
    }

    /// Whether a doorbell rings it.
    pub fn has_bell(&self) -> bool {
        self.pair.as_ref().is_some_and(|pair| pair.has_bell)
    }

    pub fn index_bytes(&self) -> u64 {
        if self.pair.is_some() {
            8
        } else {
            4
        }
    }

    /// Entries taken, by what device code is told, which `read` reads.
    pub fn taken(&self, read: impl Fn(u64, u64) -> u64) -> usize {
        if self.has_bell() {
            return self.completed(|at| read(at, 8));
        }
        let index = read(self.index_at(), self.index_bytes());
        match self.pair {
            Some(_) => index.wrapping_sub(self.index(0)) as usize,
            None => (index as u32).wrapping_sub(self.first) as usize,
        }
    }

    /// Entries that are there, with none before them that is not.
    pub fn rung(&self) -> usize {
        let rest = &self.entries[self.done..];
        self.done + rest.iter().position(|e| !e.is_rung).unwrap_or(rest.len())
    }

    pub fn signal_at(&self, id: u64) -> u64 {
        SIGNALS + 8 * (self.number * SIGNALS_EACH + id)
    }

    /// The record that a launch reads whose first entry is number `next`; the windows in any order.
    pub fn record(&self, next: usize, random: &mut Random) -> [u64; 32] {
        let mut words = [0; 32];
        words[0] = self.slot_at(0) - (u64::from(self.first & (self.slots - 1)) << self.stride);
        words[1] = u64::from(self.slots - 1) | u64::from(self.stride) << 32;
        words[2] = u64::from(self.first.wrapping_add(next as u32)) | u64::from(self.signals) << 32;
        words[3] = self.index_at();
        words[4] = self.signal_at(0);
        words[5] = u64::from(self.newest) | self.most << 32;
        words[6] = u64::from(self.is_far) | u64::from(self.is_watched) << 1;
        if let Some(pair) = &self.pair {
            pair.tell(self, next, &mut words);
        }
        let turned = random.below(4) as usize;
        for (i, window) in self.windows.iter().enumerate() {
            let at = 8 + 6 * ((i + turned) % 4);
            // What is no window may have anything but a handle.
            words[at + 1..at + 6].copy_from_slice(&[SOURCES, u64::MAX, TARGETS, u64::MAX, random.below(2)]);
            if let Some(w) = window {
                words[at] = if self.pair.is_some() { sends::swapped(w.key()).into() } else { w.handle };
                words[at + 1..at + 6].copy_from_slice(&w.told());
            }
        }
        words
    }

    /// Any of its windows that is not for reads alone.
    pub fn window(&mut self, random: &mut Random) -> &mut Window {
        let all: Vec<&mut Window> = self.windows.iter_mut().flatten().filter(|w| !w.is_turned).collect();
        let n = random.below(all.len() as u64) as usize;
        all.into_iter().nth(n).expect("it has one")
    }

    /// Room at the peer for so many bytes, at a multiple of `unit`: an offset in a window, and the address.
    pub fn target(&mut self, bytes: u64, unit: u64, random: &mut Random) -> Option<(u64, Window)> {
        let w = self.window(random);
        Some((w.room(bytes, unit, random)?, *w))
    }

    /// So many bytes of a window here, at a multiple of `unit`: the window, and the address.
    pub fn source(&mut self, bytes: u64, unit: u64, random: &mut Random) -> (Window, u64) {
        let w = *self.window(random);
        (w, w.some(bytes, unit, random))
    }

    /// A signal that none has had.
    pub fn own_signal(&mut self) -> Option<u32> {
        let id = self.next_signal;
        (id < self.signals.into()).then(|| {
            self.next_signal += 1;
            id as u32
        })
    }

    /// A signal by its number, or none: its bits of the operation, and its number and value.
    fn any_signal(&mut self, random: &mut Random) -> Option<(u16, u32, u64, Signal)> {
        let id = match random.below(4) {
            0 => return None,
            1 => 0,
            _ => self.own_signal().unwrap_or(0),
        };
        let (op, value, increment) = any_increment(random);
        let signal = Signal { at: self.signal_at(id.into()), increment, is_shared: id == 0, nth: 0 };
        Some((op, id, value, signal))
    }

    /// A descriptor of any kind that is taken, to a place of its own.
    pub fn any_entry(&mut self, random: &mut Random) -> Entry {
        if self.pair.is_some() {
            return self.any_send(random);
        }
        let size = match random.below(if self.has_gets { 11 } else { 8 }) {
            0 => return self.value_entry(random),
            1 => return self.va_entry(random),
            2 => 0,
            8 | 9 => return self.get_entry(random),
            10 => return self.flush_entry(random),
            other => self.any_bytes(other, random),
        };
        let unit = [16, 8, 4][random.below(3) as usize];
        self.put_of(size, unit, random)
    }

    /// A put of so many bytes, to any place that has room; of none, and where there is none, a signal alone.
    pub fn put_of(&mut self, size: u64, unit: u64, random: &mut Random) -> Entry {
        let place = if size > 0 { self.target(size, unit, random) } else { None };
        self.put_entry(place.map(|(offset, to)| (offset, to, size)), unit, random)
    }

    /// A length of one of the kinds 3 to 7.
    pub fn any_bytes(&self, kind: u64, random: &mut Random) -> u64 {
        match kind {
            3 => 4 * (1 + random.below(16)),
            4 => 16 * (1 + random.below(64)),
            5 => 4 + 8 * random.below((self.most - 4) / 8 + 1),
            6 => 16 * (65 + random.below(self.most / 16 - 64)),
            _ => [4, 8, 16, 64, 68, 1024, 1028, 1040, self.most][random.below(9) as usize],
        }
    }

    /// One of a kind; what is passed over uses up nothing.
    pub fn entry_of(&mut self, random: &mut Random, is_wanted: impl Fn(&Entry) -> bool) -> Entry {
        self.entry_where(random, |_, entry| is_wanted(entry))
    }

    /// The same of one of which the queue knows more.
    pub fn entry_where(&mut self, random: &mut Random, is_wanted: impl Fn(&Self, &Entry) -> bool) -> Entry {
        let used = (self.windows, self.next_signal, self.written);
        loop {
            let entry = self.any_entry(random);
            if is_wanted(self, &entry) {
                return entry;
            }
            (self.windows, self.next_signal, self.written) = used;
        }
    }

    /// Bytes to a place of a window, or a signal alone.
    pub fn put_entry(&mut self, place: Option<(u64, Window, u64)>, unit: u64, random: &mut Random) -> Entry {
        let signal = self.any_signal(random);
        let size = place.map_or(0, |(.., size)| size);
        if size == 0 && signal.is_none() {
            return self.put_entry(None, unit, random);
        }
        let (op, id, value) = signal.map_or((0, 0, 0), |(op, id, value, _)| (op, id, value));
        let mut d = Descriptor::new(self.form, self.version(random), OP_PUT | op, size);
        d = d.with_signal(id, value, random.below(2) == 0);
        let mut data = None;
        if let Some((offset, to, bytes)) = place {
            let (w, from) = self.source(bytes, unit, random);
            let copy = Data::Copy { from, to: to.peer + offset, bytes };
            data = Some(copy);
            self.written = Some(Written { data: copy, handle: to.handle, at: offset });
            d = d.first(from - w.here, w.handle).second(offset, to.handle);
        }
        let signal = signal.map(|(.., signal)| signal);
        Entry::new(d.words, data, signal)
    }

    fn value_entry(&mut self, random: &mut Random) -> Entry {
        let bytes = 1 << random.below(4);
        let Some((offset, w)) = self.target(bytes, bytes, random) else {
            return self.put_entry(None, 4, random);
        };
        let signal = self.any_signal(random);
        let (op, id, increment) = signal.map_or((0, 0, 0), |(op, id, value, _)| (op, id, value));
        // No byte of it is 0.
        let value = random.next() | 0x0101_0101_0101_0101;
        let d = Descriptor::new(self.form, self.version(random), OP_PUT | OP_INLINE | op, bytes);
        let d = d.value(value).second(offset, w.handle).with_signal(id, increment, true);
        let data = Data::Value { value, to: w.peer + offset, bytes };
        self.written = Some(Written { data, handle: w.handle, at: offset });
        Entry::new(d.words, Some(data), signal.map(|(.., signal)| signal))
    }

    /// A signal by window; nothing but that is looked at.
    fn va_entry(&mut self, random: &mut Random) -> Entry {
        let Some((offset, w)) = self.target(8, 8, random) else {
            return self.put_entry(None, 4, random);
        };
        let (op, value, increment) = any_increment(random);
        let d = Descriptor::new(self.form, self.version(random), OP_VA_SIGNAL | op, random.next() >> 7);
        let d = d.first(offset, w.handle).second(random.next() >> 1, random.next() >> 1);
        let d = d.with_signal(0xff_ffff, value, true);
        let signal = Signal { at: w.peer + offset, increment, is_shared: false, nth: 0 };
        self.written = Some(Written::added(&signal, w.handle, offset));
        Entry::new(d.words, None, Some(signal))
    }

    pub fn version(&self, random: &mut Random) -> u8 {
        match self.newest {
            0 => 0,
            newest => 1 + random.below(newest.into()) as u8,
        }
    }
}

/// Adds one, or anything: the bits of the operation, the value, and what is added.
pub fn any_increment(random: &mut Random) -> (u16, u64, u64) {
    let value = 1 + random.next() % (u64::MAX - 1);
    match random.below(2) {
        0 => (OP_SIGNAL_INC, value, 1),
        _ => (OP_SIGNAL_ADD, value, value),
    }
}
