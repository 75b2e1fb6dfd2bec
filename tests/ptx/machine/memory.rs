//! Memory as lanes may see it: besides what lies there now, what lay there before.
//!
//! Every word of 8 bytes keeps its values of late, each with the time at which it became visible. A load may find any
//! of them that is not older than what its lane must see. What a lane must see grows when it takes up what somebody has
//! published.

use super::pending::Far;
use super::Random;
use rustc_hash::FxHashMap;

/// Addresses below are nobody's.
const LOWEST: u64 = 4096;
/// Turns after which everybody sees what has taken a value's place.
pub const STALE: u64 = 5000;

/// Who stored a value.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum By {
    Host,
    /// Device code of this GPU.
    Device,
    Warp(usize),
}

/// A value that a word had.
#[derive(Clone, Copy)]
struct Value {
    bytes: [u8; 8],
    /// Since when, in time and in turns.
    since: u64,
    turn: u64,
    by: By,
    /// Who takes it up sees what was visible then.
    publishes: u64,
}

/// What a load finds.
pub struct Found {
    pub value: u64,
    pub since: u64,
    pub publishes: u64,
    pub by: By,
}

/// What a lane must see.
pub struct MustSee {
    /// What was visible at that time.
    pub since: u64,
    /// What its warp stored.
    pub warp: usize,
    /// What the warps of its block stored, as far as it was visible when they last met.
    pub block: std::ops::Range<usize>,
    pub met: u64,
}

impl MustSee {
    fn has_by(&self, v: &Value) -> bool {
        match v.by {
            By::Warp(w) => w == self.warp || v.since <= self.met && self.block.contains(&w),
            By::Host | By::Device => false,
        }
    }
}

/// All memory, by address.
pub struct Memory {
    bytes: Vec<u8>,
    /// Values by the addresses of their words, oldest first; those of words that have not changed are not there.
    values: FxHashMap<u64, Vec<Value>>,
    /// The time: one more with each store that becomes visible.
    now: u64,
    pub turn: u64,
    /// As it is for the host and other GPUs, where they see less.
    pub far: Option<Far>,
}

impl Memory {
    /// Zeros, up to an address.
    pub fn new(end: u64) -> Self {
        let bytes = vec![0; end.next_multiple_of(8) as usize];
        Self { bytes, values: FxHashMap::default(), now: 0, turn: 0, far: None }
    }

    /// From now on the host and other GPUs see what this GPU stores later than it does.
    pub fn part(&mut self) {
        self.far = Some(Far::new(self.bytes.clone()));
    }

    /// What lies there for the host and other GPUs.
    pub fn far_bytes(&self, at: u64, bytes: u64) -> &[u8] {
        &self.far.as_ref().map_or(&self.bytes, |far| &far.bytes)[self.range(at, bytes)]
    }

    /// The same, as an aligned word of at most 8 bytes.
    pub fn far_read(&self, at: u64, bytes: u64) -> u64 {
        part(self.far_bytes(at & !7, 8), at, bytes)
    }

    fn range(&self, at: u64, bytes: u64) -> std::ops::Range<usize> {
        assert!(at >= LOWEST && at + bytes <= self.bytes.len() as u64, "{bytes} bytes at {at:#x} are nobody's");
        at as usize..(at + bytes) as usize
    }

    /// What lies there now.
    pub fn bytes(&self, at: u64, bytes: u64) -> &[u8] {
        &self.bytes[self.range(at, bytes)]
    }

    /// To fill it before a launch: what is written here everybody sees.
    pub fn bytes_mut(&mut self, at: u64, bytes: u64) -> &mut [u8] {
        let range = self.range(at, bytes);
        &mut self.bytes[range]
    }

    /// What an aligned word of at most 8 bytes is now.
    pub fn read(&self, at: u64, bytes: u64) -> u64 {
        assert!(at % bytes == 0, "{bytes} bytes at {at:#x}: not aligned");
        part(&self.word(at), at, bytes)
    }

    /// The 8 bytes around an address.
    fn word(&self, at: u64) -> [u8; 8] {
        self.bytes(at & !7, 8).try_into().expect("8 bytes")
    }

    /// A store of the host, relaxed.
    pub fn write(&mut self, at: u64, bytes: u64, value: u64) {
        self.store(at, bytes, value, By::Host, 0);
    }

    /// A store of the host with release.
    pub fn release(&mut self, at: u64, bytes: u64, value: u64) {
        self.store(at, bytes, value, By::Host, self.now);
    }

    /// The same by device code of this GPU.
    pub fn post(&mut self, at: u64, bytes: u64, value: u64) {
        self.store(at, bytes, value, By::Device, self.now);
    }

    /// An aligned store of at most 8 bytes becomes visible. `publishes`: all that was visible at this time.
    pub fn store(&mut self, at: u64, bytes: u64, value: u64, by: By, publishes: u64) {
        assert!(at % bytes == 0, "{bytes} bytes at {at:#x}: not aligned");
        let before = self.word(at);
        let new = &value.to_le_bytes()[..bytes as usize];
        self.bytes_mut(at, bytes).copy_from_slice(new);
        if let (By::Host | By::Device, Some(far)) = (by, &mut self.far) {
            far.put(at, new);
        }
        let (after, turn) = (self.word(at), self.turn);
        self.now += 1;
        let first = || vec![Value { bytes: before, since: 0, turn: 0, by: By::Host, publishes: 0 }];
        let values = self.values.entry(at & !7).or_insert_with(first);
        let old = values.iter().skip(1).take_while(|v| v.turn + STALE < turn).count();
        values.drain(..old);
        values.push(Value { bytes: after, since: self.now, turn, by, publishes });
    }

    /// An addition becomes visible; who takes up the sum takes up what was published with what was there before, too.
    pub fn add(&mut self, at: u64, bytes: u64, value: u64, by: By, publishes: u64) {
        let before = self.values.get(&(at & !7)).and_then(|v| v.last()).map_or(0, |v| v.publishes);
        self.store(at, bytes, self.read(at, bytes).wrapping_add(value), by, publishes.max(before));
    }

    /// An aligned load of at most 8 bytes by a lane.
    pub fn load(&self, at: u64, bytes: u64, must: &MustSee, random: &mut Random) -> Found {
        assert!(at % bytes == 0, "{bytes} bytes at {at:#x}: not aligned");
        let Some(values) = self.values.get(&(at & !7)) else {
            return Found { value: self.read(at, bytes), since: 0, publishes: 0, by: By::Host };
        };
        let is_seen = |v: &Value| v.since <= must.since || must.has_by(v) || v.turn + STALE < self.turn;
        let oldest = values.iter().rposition(is_seen).unwrap_or(0);
        let last = values.len() - 1;
        let found =
            if random.below(2) == 0 { last } else { oldest + random.below((last - oldest + 1) as u64) as usize };
        let v = &values[found];
        Found { value: part(&v.bytes, at, bytes), since: v.since, publishes: v.publishes, by: v.by }
    }

    /// A launch begins: it sees everything. Returns the time.
    pub fn settle(&mut self) -> u64 {
        self.values.clear();
        if let Some(far) = &mut self.far {
            far.settle();
        }
        self.now
    }

    pub fn now(&self) -> u64 {
        self.now
    }
}

/// Of the word around an address what lies there.
fn part(word: &[u8], at: u64, bytes: u64) -> u64 {
    let (from, mut value) = ((at % 8) as usize, [0; 8]);
    value[..bytes as usize].copy_from_slice(&word[from..from + bytes as usize]);
    u64::from_le_bytes(value)
}
