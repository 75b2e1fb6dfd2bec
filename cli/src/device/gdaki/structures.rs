//! A reader that walks what it is given as NCCL's device code does, by numbers of its own: offsets as NCCL's headers
//! have them (`gin_gdaki_device_host_common.h`, `doca_gpunetio_verbs_dev.h`), arithmetic as in `gin_gdaki.h` and DOCA's
//! device functions. It knows nobody's types.
//!
//! A pointer that leads nowhere and what lies where something else is do not end the walk: the first is kept
//! ([`Structures::verdict`]), and 0 is read from there on, so that nothing is followed that cannot be.

use super::queue_pair::{Addresses, QueueView, Ringing};
use std::cell::RefCell;
use std::collections::BTreeMap;

/// Offsets of one NCCL.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Numbers {
    /// NCCL's version.
    pub nccl: &'static str,
    /// What the device handle's `netDeviceVersion` has to be.
    pub device_version: i32,
    /// Bytes of a context.
    pub context: usize,
    /// Bytes of a queue pair.
    pub queue_pair: usize,
    /// Where a queue pair says how it is rung.
    pub nic_handler: usize,
    /// Segments that the second word of an entry is prepared for.
    pub segments: u32,
    /// `cq_type` is read, and free flow is known.
    pub has_cq_type: bool,
    /// Gets are noted by peer.
    pub has_gets: bool,
    /// A flag says whether a flush behind gets posts a dump; without one it always does.
    pub has_mcst: bool,
}

/// `cq_type`: a ring of entries.
const RING: u64 = 0;
/// `cq_type`: no entries, but a count.
const COUNTED: u64 = 3;

const V1: Numbers = Numbers {
    nccl: "2.29.7",
    device_version: 100,
    context: 72,
    queue_pair: 280,
    nic_handler: 272,
    segments: 4,
    has_cq_type: false,
    has_gets: false,
    has_mcst: false,
};
const V2: Numbers =
    Numbers { nccl: "2.30.4", device_version: 200, queue_pair: 296, nic_handler: 288, segments: 5, ..V1 };
const V3: Numbers = Numbers { nccl: "2.30.7", context: 88, has_gets: true, ..V2 };

/// By NCCL that the kernel was compiled with, oldest first.
pub const NCCLS: [Numbers; 5] = [
    V1,
    V2,
    V3,
    Numbers { nccl: "2.31.2", has_cq_type: true, ..V3 },
    Numbers { nccl: "2.32.3", has_cq_type: true, has_mcst: true, ..V3 },
];

impl Numbers {
    /// Of this NCCL.
    pub fn of(nccl: &str) -> Option<Self> {
        NCCLS.into_iter().find(|numbers| numbers.nccl == nccl)
    }

    /// The backendVersion by which GIN v14 is asked for this layout.
    pub fn backend_version(self) -> i32 {
        1 + i32::from(self.has_gets)
    }

    /// Device code has gets and flushes of them (2.30.4 and later).
    pub fn can_get(self) -> bool {
        self.device_version >= V2.device_version
    }

    /// The record is written before the doorbell (2.29.7); later the doorbell is rung, the record written, and the
    /// doorbell rung again.
    pub fn is_record_first(self) -> bool {
        self.segments == V1.segments
    }
}

/// What a kernel sees.
enum Memory<'a> {
    /// A copy of all that was written.
    Copy(&'a [u8]),
    /// What is there now; this process sees an address of device code's as this says.
    Live(Box<dyn Fn(u64) -> u64 + 'a>),
}

/// Memory at an address, read by a kernel's numbers, and what was found there.
pub struct Structures<'a> {
    /// The kernel's numbers.
    pub n: Numbers,
    /// What the device handle leads to.
    pub handle: u64,
    memory: Memory<'a>,
    /// What was found: where it begins, where it ends, what it is.
    found: RefCell<BTreeMap<u64, (u64, What)>>,
    fault: RefCell<Option<String>>,
}

/// What something is: its kind, or the offset of the field that leads to it, then the context and the peer.
type What = (u64, usize, usize);

/// A queue pair that device code has found.
pub struct Found<'a, 'b> {
    structures: &'b Structures<'a>,
    at: u64,
}

/// A table of counters or signals, likewise.
pub struct Table<'a, 'b> {
    structures: &'b Structures<'a>,
    field: u64,
    at: u64,
}

impl<'a> Structures<'a> {
    /// Of a copy of memory that begins at `handle`.
    pub fn copied(n: Numbers, handle: u64, memory: &'a [u8]) -> Self {
        Self { n, handle, memory: Memory::Copy(memory), found: RefCell::default(), fault: RefCell::default() }
    }

    /// Of memory as it is: this process sees an address of device code's as `see` says.
    pub fn live(n: Numbers, handle: u64, see: impl Fn(u64) -> u64 + 'a) -> Self {
        let memory = Memory::Live(Box::new(see));
        Self { n, handle, memory, found: RefCell::default(), fault: RefCell::default() }
    }

    /// The first thing that is wrong with what was read so far.
    pub fn verdict(&self) -> Result<(), String> {
        self.fault.borrow().clone().map_or(Ok(()), Err)
    }

    fn wrong(&self, what: impl FnOnce() -> String) {
        self.fault.borrow_mut().get_or_insert_with(what);
    }

    /// A load, which has to be aligned and inside.
    fn load(&self, at: u64, bytes: u64) -> u64 {
        if at % bytes != 0 {
            self.wrong(|| format!("a load of {bytes} bytes at {at:#x} is misaligned"));
        }
        let mut word = [0; 8];
        word[..bytes as usize].copy_from_slice(&self.bytes(at, bytes));
        u64::from_le_bytes(word)
    }

    /// A load in the network's order.
    fn load_be32(&self, at: u64) -> u32 {
        (self.load(at, 4) as u32).swap_bytes()
    }

    /// Takes down that something of this size lies here.
    fn object(&self, at: u64, bytes: usize, what: What) -> u64 {
        let now = (at + bytes as u64, what);
        let before = self.found.borrow_mut().insert(at, now);
        if before.is_some_and(|before| before != now) {
            self.wrong(|| format!("{before:?} and {now:?} are both at {at:#x}"));
        }
        at
    }

    fn context(&self, context: usize) -> u64 {
        let at = self.handle + (context * self.n.context) as u64;
        self.object(at, self.n.context, (u64::MAX, context, 0))
    }

    fn array(&self, field: u64, context: usize, peer: usize) -> Option<Found<'a, '_>> {
        let array = self.load(self.context(context) + field, 8);
        let at = array.wrapping_add((peer * self.n.queue_pair) as u64);
        let of = (field, context, peer);
        (array != 0).then(|| Found { structures: self, at: self.object(at, self.n.queue_pair, of) })
    }

    /// The queue pair of a peer. `None`, which is wrong, without an array of them.
    pub fn main(&self, context: usize, peer: usize) -> Option<Found<'a, '_>> {
        let found = self.array(0, context, peer);
        if found.is_none() {
            self.wrong(|| format!("context {context} has no array of queue pairs"));
        }
        found
    }

    /// The companion of a peer. `None` without an array of them.
    pub fn companion(&self, context: usize, peer: usize) -> Option<Found<'a, '_>> {
        self.array(8, context, peer)
    }

    /// A context's counters.
    pub fn counters(&self, context: usize) -> Table<'a, '_> {
        Table { structures: self, field: 16, at: self.context(context) + 16 }
    }

    /// A context's signals.
    pub fn signals(&self, context: usize) -> Table<'a, '_> {
        Table { structures: self, field: 40, at: self.context(context) + 40 }
    }

    /// The key to what additions fetch, which nobody reads.
    pub fn sink_key(&self, context: usize) -> u32 {
        self.load_be32(self.context(context) + 64)
    }

    /// Whether a flush behind a get posts a dump.
    pub fn dumps(&self, context: usize) -> bool {
        !self.n.has_mcst || self.load(self.context(context) + 68, 1) != 0
    }

    /// Where the newest get issued to a peer is noted, and the newest visible.
    pub fn gets_at(&self, context: usize, peer: usize) -> Option<(u64, u64)> {
        let of = |field| {
            let at = self.load(self.context(context) + field, 8).wrapping_add(8 * peer as u64);
            // So that it is looked at once.
            self.load(at, 8);
            self.object(at, 8, (field, context, peer))
        };
        self.n.has_gets.then(|| (of(72), of(80)))
    }

    /// What is noted there.
    pub fn gets(&self, context: usize, peer: usize) -> Option<(u64, u64)> {
        self.gets_at(context, peer).map(|(issued, visible)| (self.load(issued, 8), self.load(visible, 8)))
    }

    /// Whether what was found is apart from each other, and, of a copy, the rest is zero.
    pub fn is_all(&self) -> Result<(), String> {
        let mut end = self.handle;
        for (from, (to, what)) in self.found.borrow().iter() {
            if matches!(self.memory, Memory::Live(_)) {
                end = end.max(*from);
            }
            if *from < end {
                return Err(format!("{what:?} begins at {from:#x}, before {end:#x}"));
            }
            if let Memory::Copy(_) = self.memory {
                if self.bytes(end, from - end).iter().any(|b| *b != 0) {
                    return Err(format!("there is something before {from:#x}"));
                }
            }
            end = *to;
        }
        let Memory::Copy(memory) = self.memory else { return self.verdict() };
        match self.bytes(end, self.handle + memory.len() as u64 - end).iter().all(|b| *b == 0) {
            true => self.verdict(),
            false => Err(format!("there is something behind {end:#x}")),
        }
    }

    fn bytes(&self, from: u64, bytes: u64) -> Vec<u8> {
        let inside = match &self.memory {
            Memory::Copy(memory) => {
                let at = from.wrapping_sub(self.handle) as usize;
                memory.get(at..at.saturating_add(bytes as usize)).map(<[u8]>::to_vec)
            }
            // The first page is nobody's, and device code's addresses have 48 bits of a process's.
            Memory::Live(_) if from < 4096 || from >> 57 != 0 || self.fault.borrow().is_some() => None,
            Memory::Live(see) => {
                // SAFETY: what the plugin has given to device code, which nobody writes meanwhile.
                Some(unsafe { std::slice::from_raw_parts(see(from) as *const u8, bytes as usize).to_vec() })
            }
        };
        inside.unwrap_or_else(|| {
            self.wrong(|| format!("a pointer leads to {from:#x}"));
            vec![0; bytes as usize]
        })
    }

    /// The key to a window at a rank, by its `ginHandle`.
    pub fn window_key(&self, gin_handle: u64, peer: usize) -> u32 {
        self.load_be32(self.load(gin_handle, 8).wrapping_add(4 * peer as u64))
    }

    /// The key to a window here.
    pub fn own_window_key(&self, gin_handle: u64) -> u32 {
        self.load_be32(gin_handle.wrapping_add(8))
    }
}

impl Found<'_, '_> {
    /// Nobody made it: no slot was ever reserved, and nothing else is there.
    pub fn is_absent(&self) -> bool {
        self.structures.bytes(self.at, self.structures.n.queue_pair as u64).iter().all(|b| *b == 0)
    }

    /// Where device code counts.
    pub fn counts(&self) -> Addresses {
        let lock = if self.structures.n.queue_pair == 280 { 52 } else { 56 };
        Addresses {
            reserved: self.at,
            ready: self.at + 8,
            producer: self.at + 16,
            lock: self.at + lock,
            polled: self.at + self.cq(24),
        }
    }

    /// What device code counts up begins at zero: slots reserved, ready, rung for; the lock; completions seen, and
    /// those reserved before the first.
    pub fn is_fresh(&self) -> bool {
        let (s, Addresses { reserved, ready, producer, lock, polled }) = (self.structures, self.counts());
        let counts = [reserved, ready, producer, polled, self.at + self.cq(40)].map(|at| s.load(at, 8));
        counts == [0; 5] && s.load(lock, 4) == 0
    }

    /// The second word of an entry with so many segments: what the NIC reads.
    ///
    /// # Panics
    /// If no such word is prepared: more segments than [`Numbers::segments`].
    pub fn word(&self, segments: u32) -> u32 {
        assert!(segments <= self.structures.n.segments, "prepared for no such entry");
        self.structures.load_be32(self.at + 32 + 4 * u64::from(segments))
    }

    /// Where entry `index` is written.
    pub fn slot(&self, index: u64) -> u64 {
        let (s, slots) = (self.structures, self.slots_at());
        let mask = s.load(self.at + slots + 2, 2);
        s.load(self.at + 64, 8) + 64 * (index & mask & 0xffff)
    }

    /// Entries before the first that waits for one.
    pub fn slots(&self) -> u64 {
        self.structures.load(self.at + self.slots_at(), 2)
    }

    fn slots_at(&self) -> u64 {
        if self.structures.n.queue_pair == 280 {
            56
        } else {
            60
        }
    }

    fn cq(&self, field: u64) -> u64 {
        160 + field
    }

    /// Where completion `index` is waited for, and with which owner bit.
    pub fn completion(&self, index: u64) -> (u64, bool) {
        let s = self.structures;
        if s.n.has_cq_type && !matches!(s.load(self.at + self.cq(37), 1), RING | COUNTED) {
            s.wrong(|| format!("the completion queue at {:#x} is no ring of entries", self.at + self.cq(0)));
        }
        // 2.29.7 leaves out what was reserved before the first.
        let before = if s.n.queue_pair == 280 { 0 } else { s.load(self.at + self.cq(40), 8) };
        let count = s.load(self.at + self.cq(12), 4);
        let index = index + before;
        (s.load(self.at + self.cq(0), 8) + 64 * (index & count.wrapping_sub(1)), index & count != 0)
    }

    /// Whether completions are counted for device code, which knows that.
    pub fn is_counted(&self) -> bool {
        let s = self.structures;
        s.n.has_cq_type && s.load(self.at + self.cq(37), 1) == COUNTED
    }

    /// What a wait entry of the companion names.
    pub fn completion_number(&self) -> u32 {
        self.structures.load(self.at + self.cq(8), 4) as u32
    }

    /// The queue's number, as the doorbell has it: its second word, which the NIC reads.
    pub fn rung_number(&self) -> u32 {
        self.structures.load(self.at + 28, 4) as u32
    }

    /// How it is rung: the handler, the doorbell, the record.
    pub fn ring(&self) -> (u32, u64, u64) {
        let s = self.structures;
        let handler = s.load(self.at + s.n.nic_handler as u64, 4) as u32;
        (handler, s.load(self.at + 80, 8), s.load(self.at + 72, 8))
    }

    /// Of both halves, as debug builds assert.
    pub fn memory_types(&self) -> [u64; 2] {
        let s = self.structures;
        [s.n.nic_handler as u64 + 4, self.cq(48)].map(|field| s.load(self.at + field, 4))
    }

    /// Size and mask of a completion entry, and its record: for DOCA's own functions.
    pub fn completion_rest(&self) -> (u64, u64, u64) {
        let s = self.structures;
        (s.load(self.at + self.cq(36), 1), s.load(self.at + self.cq(32), 4), s.load(self.at + self.cq(16), 8))
    }

    /// All that device code needs to use it, or what is wrong with it at first.
    pub fn view(&self) -> Result<QueueView, String> {
        let (handler, bell, record) = self.ring();
        let number = self.rung_number() >> 8;
        let size = self.slots();
        let nic_handler = handler;
        let handler = Ringing::of(handler, self.structures.n.has_cq_type);
        let handler = handler.ok_or_else(|| format!("nobody rings by nic_handler {nic_handler}"))?;
        let view = QueueView {
            slots: self.slot(0),
            size: size as u32,
            completions: self.completion(0).0,
            is_counted: self.is_counted(),
            record,
            bell,
            handler,
            number,
            completion_number: self.completion_number(),
            nic_handler,
        };
        self.structures.verdict()?;
        let completions = self.structures.load(self.at + self.cq(12), 4);
        let wrong = match () {
            () if !self.is_fresh() => "what device code counts does not begin at zero".into(),
            () if !size.is_power_of_two() || self.slot(size - 1) != view.slots + 64 * (size - 1) => {
                format!("{size} slots: no power of two, or not the mask's")
            }
            () if !completions.is_power_of_two() || completions < size => {
                format!("{completions} completion entries for {size} slots: no power of two, or too few")
            }
            () if view.slots % 64 != 0 || view.completions % 64 != 0 => "its rings are not aligned to 64 bytes".into(),
            () if bell % 8 != 0 || record % 4 != 0 || view.slots == 0 || view.completions == 0 || bell == 0 => {
                format!("doorbell {bell:#x}, record {record:#x}: NULL, or not aligned")
            }
            () if nic_handler == Ringing::WITH_RECORD && record == 0 => "it has no doorbell record".into(),
            () if (0..=self.structures.n.segments).any(|n| self.word(n) != number << 8 | n) => {
                format!("the prepared words of entries are not those of queue pair {number}")
            }
            () => return self.structures.verdict().map(|()| view),
        };
        Err(wrong)
    }
}

impl Table<'_, '_> {
    /// There are no such words.
    pub fn is_absent(&self) -> bool {
        self.structures.bytes(self.at, 24).iter().all(|b| *b == 0)
    }

    /// Where this rank's own word is.
    pub fn own(&self, id: u64) -> u64 {
        self.structures.load(self.at, 8) + 8 * id
    }

    /// A peer's word: key and address.
    pub fn remote(&self, id: u64, peer: usize, ranks: usize) -> (u32, u64) {
        let s = self.structures;
        let keys = s.load(self.at + 8, 8);
        // Nobody writes them: whoever has the same for both may keep them once.
        if let Memory::Copy(_) = s.memory {
            s.object(keys, 4 * ranks, (self.field, 0, 0));
        }
        let offset = s.load(self.at + 20, 4);
        (s.load_be32(keys.wrapping_add(4 * peer as u64)), 8 * (id + offset))
    }

    /// The key to this rank's own region.
    pub fn own_key(&self) -> u32 {
        self.structures.load_be32(self.at + 16)
    }
}
