//! The same with send entries of the software NIC: the test's device code writes an entry and rings its slot's word.

use super::*;

/// Word of the board that says what queues hold, and what it says where these are entries.
pub const HOLDS: usize = 3;
pub const HOLDS_ENTRIES: u64 = 1;
/// Keys of the windows `SOURCE` and `TARGET`.
pub const SOURCE_KEY: u32 = 0x0102_0304;
pub const TARGET_KEY: u32 = 0x0506_0708;
/// … and of one with the destination here, and the sources at the peer, which are only read.
pub const READ_KEY: u32 = 0x090a_0b0c;
/// The high half of all indices, and the number of the first lane's queue pair: no byte is like another.
const HIGH: u64 = 0x0a0b_0c0d;
const FIRST_NUMBER: u32 = 0x0031_3233;

const NOTHING: u8 = 0x00;
pub const WRITE: u8 = 0x08;
pub const READ: u8 = 0x10;
const DUMP: u8 = 0x23;
pub const FETCH_ADD: u8 = 0x12;
const BYTES: usize = 64;
/// What is fetched: 8 bytes to offset 0 of the key that nobody reads.
const NOWHERE: [u8; 16] = [0, 0, 0, 8, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// A send entry without its index and its queue pair's number. Where device code writes nothing it is all ones.
#[derive(Clone, Copy)]
pub struct Entry {
    bytes: [u8; BYTES],
    /// Bits that are other than they should be, and the byte that has them, once all is written.
    flipped: (usize, u8),
}

impl Entry {
    fn new(opcode: u8, segments: u8) -> Self {
        let control = [0, 0, 0, opcode, 0, 0, 0, segments, 0, 0, 0, 8, 0, 0, 0, 0];
        Self { bytes: [0xff; BYTES], flipped: (0, 0) }.with(0, &control)
    }

    /// Bytes of it that are others.
    pub fn with(mut self, at: usize, bytes: &[u8]) -> Self {
        self.bytes[at..at + bytes.len()].copy_from_slice(bytes);
        self
    }

    /// Bits of one byte that are others, also where they are the index or the number.
    pub fn flip(self, at: usize, bits: u8) -> Self {
        Self { flipped: (at, bits), ..self }
    }

    /// Asks for nothing.
    pub fn nothing() -> Self {
        Self::new(NOTHING, 1)
    }

    fn to(self, key: u32, offset: u64) -> Self {
        self.with(16, &offset.to_be_bytes()).with(24, &key.to_be_bytes()).with(28, &[0; 4])
    }

    /// Bytes of the sources to the destination.
    pub fn copy(from: u64, to: u64, bytes: u32) -> Self {
        let entry = Self::new(WRITE, 3).to(TARGET_KEY, to).with(32, &bytes.to_be_bytes());
        entry.with(36, &SOURCE_KEY.to_be_bytes()).with(40, &from.to_be_bytes())
    }

    /// The same by a read.
    pub fn read(from: u64, to: u64, bytes: u32) -> Self {
        let entry = Self::new(READ, 3).to(READ_KEY, from).with(32, &bytes.to_be_bytes());
        entry.with(36, &READ_KEY.to_be_bytes()).with(40, &to.to_be_bytes())
    }

    /// Of so many bytes at an offset of a key.
    pub fn dump(bytes: u32, key: u32, at: u64) -> Self {
        let entry = Self::new(DUMP, 2).with(16, &bytes.to_be_bytes()).with(20, &key.to_be_bytes());
        entry.with(24, &at.to_be_bytes())
    }

    /// These bytes to the destination, in an entry of so many segments.
    pub fn value(bytes: &[u8], to: u64, segments: u8) -> Self {
        let length = 1 << 31 | bytes.len() as u32;
        Self::new(WRITE, segments).to(TARGET_KEY, to).with(32, &length.to_be_bytes()).with(36, bytes)
    }

    /// An addition to a word of the window `SOURCE` at the peer, where signals are.
    pub fn addition(at: u64, by: u64) -> Self {
        let entry = Self::new(FETCH_ADD, 4).to(SOURCE_KEY, at).with(32, &by.to_be_bytes());
        entry.with(40, &[0; 8]).with(48, &NOWHERE)
    }

    /// What device code writes of it as entry `index` of a queue pair.
    fn words(&self, index: u32, number: u32) -> [u64; WORDS] {
        let mut bytes = self.with(1, &(index as u16).to_be_bytes()).with(4, &number.to_be_bytes()[1..]).bytes;
        bytes[self.flipped.0] ^= self.flipped.1;
        std::array::from_fn(|w| u64::from_ne_bytes(std::array::from_fn(|i| bytes[8 * w + i])))
    }
}

/// What a lane of entries has that one of descriptors has not.
struct Counted {
    /// One for each slot.
    rings: *mut u64,
    count: *mut u64,
}

/// The host of one lane kernel that takes entries.
pub struct EntryBoard<'a> {
    pub host: Board<'a>,
    counted: Vec<Counted>,
}

impl<'a> EntryBoard<'a> {
    /// As [`Board::new`]; the entries before `first` have been there.
    pub fn new(fake: &'a Fake, lanes: usize, slots: u32, first: u32) -> Self {
        let host = Board::new(fake, lanes, Form::Bytes64, slots, first);
        host.set(HOLDS, HOLDS_ENTRIES);
        let counted = |_| Counted { rings: pin(fake, 8 * slots as usize).cast(), count: pin(fake, 8).cast() };
        let all = Self { host, counted: (0..lanes).map(counted).collect() };
        for i in 0..lanes {
            (1..=slots).for_each(|n| all.ring(i, first.wrapping_sub(n)));
            (0..slots).for_each(|slot| all.blank(i, slot));
            all.set_count(i, first);
        }
        all
    }

    /// All of an index.
    pub fn index(low: u32) -> u64 {
        HIGH << 32 | u64::from(low)
    }

    /// Writes a lane's record, for a launch that begins with the entry of that index.
    pub fn record(&self, i: usize, next: u32) {
        let (host, lane, counted) = (&self.host, &self.host.lanes[i], &self.counted[i]);
        // As the three bytes of an entry have it.
        let number = u64::from((self.number(i) << 8).to_be());
        let head = [
            lane.queue as u64,
            u64::from(lane.slots - 1) | 6 << 32,
            u64::from(next) | number << 32,
            counted.count as u64,
            counted.rings as u64,
            MOST << 32,
            0,
            HIGH,
        ];
        let room = host.lanes.len() as u64 * ROOM;
        let windows = [
            [SOURCE_KEY.to_be().into(), host.source, SOURCE_BYTES, lane.signals, SIGNALS * 8, 0],
            [TARGET_KEY.to_be().into(), 0, 0, host.target, room, 0],
            [READ_KEY.to_be().into(), host.target, room, host.source, SOURCE_BYTES, 1],
        ];
        head.iter().enumerate().for_each(|(word, &value)| host.set_record(i, word, value));
        for (w, fields) in windows.iter().enumerate() {
            fields.iter().enumerate().for_each(|(word, &value)| host.set_record(i, 8 + 6 * w + word, value));
        }
        host.set(POSITIONS + i, next.into());
    }

    fn number(&self, i: usize) -> u32 {
        FIRST_NUMBER + i as u32
    }

    /// Where device code reads the count of completions.
    pub fn count(&self, i: usize) -> u64 {
        // SAFETY: pinned memory.
        unsafe { word(self.counted[i].count) }.load(Ordering::Acquire)
    }

    fn set_count(&self, i: usize, next: u32) {
        // SAFETY: pinned memory.
        unsafe { word(self.counted[i].count) }.store(Self::index(next), Ordering::Release);
    }

    /// How many of a lane's entries have completed.
    pub fn done(&self, i: usize) -> usize {
        (self.count(i) - Self::index(self.host.lanes[i].first)) as usize
    }

    /// Whether all that was posted has.
    pub fn are_done(&self, i: usize) -> bool {
        self.count(i) == Self::index(self.host.lanes[i].posted)
    }

    fn ring_word(&self, i: usize, index: u32) -> &AtomicU64 {
        let place = index & (self.host.lanes[i].slots - 1);
        // SAFETY: one of a lane's words.
        unsafe { word(self.counted[i].rings.add(place as usize)) }
    }

    /// Device code says that an entry is there: behind all that it wrote.
    pub fn ring(&self, i: usize, index: u32) {
        self.ring_by(i, index, Self::index(index) + 1);
    }

    /// Its word says this.
    pub fn ring_by(&self, i: usize, index: u32, value: u64) {
        self.ring_word(i, index).store(value, Ordering::Release);
    }

    /// Whether its word still says what device code wrote.
    pub fn is_rung(&self, i: usize, index: u32) -> bool {
        self.ring_word(i, index).load(Ordering::Acquire) == Self::index(index) + 1
    }

    fn blank(&self, i: usize, index: u32) {
        (0..WORDS).for_each(|w| self.host.slot(i, index, w).store(u64::MAX, Ordering::Release));
    }

    /// Whether nothing is in a slot: all ones.
    pub fn is_blank(&self, i: usize, index: u32) -> bool {
        (0..WORDS).all(|w| self.host.slot(i, index, w).load(Ordering::Acquire) == u64::MAX)
    }

    /// The host does the rest of what is in a lane's queue. Returns the index of the next entry.
    pub fn renew(&self, i: usize) -> u32 {
        let (slots, posted) = (self.host.lanes[i].slots, self.host.lanes[i].posted);
        (0..slots).for_each(|slot| self.blank(i, slot));
        self.set_count(i, posted);
        posted
    }

    /// Device code posts the next entry, its words in an order that `random` says; there is room.
    pub fn post(&mut self, i: usize, e: &Entry, random: u64) {
        let index = self.write(i, e, random);
        self.ring(i, index);
    }

    /// Writes the next one and does not ring. Returns its index.
    pub fn write(&mut self, i: usize, e: &Entry, random: u64) -> u32 {
        let index = self.host.lanes[i].posted;
        self.host.lanes[i].posted = index + 1;
        self.write_at(i, index, e, random);
        index
    }

    /// Two threads post the next two, and the later one is faster.
    pub fn post_swapped(&mut self, i: usize, [first, second]: [&Entry; 2], random: u64) {
        let index = self.host.lanes[i].posted;
        self.host.lanes[i].posted = index + 2;
        self.write_at(i, index + 1, second, random);
        self.ring(i, index + 1);
        std::thread::sleep(Duration::from_micros(20));
        self.write_at(i, index, first, random);
        self.ring(i, index);
    }

    /// By words or halves of words, some time after one another.
    fn write_at(&self, i: usize, index: u32, e: &Entry, random: u64) {
        assert!(self.is_blank(i, index), "lane {i}: slot of {index}");
        let words = e.words(index, self.number(i));
        let half = [0, 0xffff_ffff, 0xffff_ffff << 32][random as usize % 3];
        for n in 0..WORDS {
            let w = (n * 3 + random as usize) % WORDS;
            let slot = self.host.slot(i, index, w);
            if half != 0 {
                slot.store(words[w] | half, Ordering::Release);
                std::thread::yield_now();
            }
            slot.store(words[w], Ordering::Release);
        }
    }
}
