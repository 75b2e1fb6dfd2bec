//! A reader that walks what it is given as NCCL's device code does, by numbers of its own: offsets as
//! `plugin-api/tests/gdaki_layouts.txt` has them from NCCL's headers, arithmetic as in `gin_gdaki.h` and DOCA's device
//! functions. It knows nothing of the library's types.

use std::cell::RefCell;
use std::collections::BTreeMap;

/// Offsets of one NCCL.
#[derive(Clone, Copy, Debug)]
pub struct Numbers {
    pub context: usize,
    pub queue_pair: usize,
    pub nic_handler: usize,
    /// Segments that the second word of an entry is prepared for.
    pub segments: u32,
    /// `cq_type` is read.
    pub has_cq_type: bool,
    /// Gets are noted by peer.
    pub has_gets: bool,
    /// A flag says whether a flush behind gets posts a dump; without one it always does.
    pub has_mcst: bool,
}

const V1: Numbers = Numbers {
    context: 72,
    queue_pair: 280,
    nic_handler: 272,
    segments: 4,
    has_cq_type: false,
    has_gets: false,
    has_mcst: false,
};

/// By NCCL that the kernel was compiled with.
pub const NCCLS: [(&str, Numbers); 5] = [
    ("2.29.7", V1),
    ("2.30.4", Numbers { queue_pair: 296, nic_handler: 288, segments: 5, ..V1 }),
    ("2.30.7", Numbers { context: 88, has_gets: true, ..NEWER }),
    ("2.31.2", Numbers { context: 88, has_gets: true, has_cq_type: true, ..NEWER }),
    ("2.32.3", Numbers { context: 88, has_gets: true, has_cq_type: true, has_mcst: true, ..NEWER }),
];
const NEWER: Numbers = Numbers { queue_pair: 296, nic_handler: 288, segments: 5, ..V1 };

/// What a kernel sees.
enum Memory<'a> {
    /// A copy of all that was written.
    Copy(&'a [u8]),
    /// What is there now; this process sees an address of device code's as this says.
    Live(Box<dyn Fn(u64) -> u64 + Sync + 'a>),
}

/// A kernel: memory at an address, and what it has looked at.
pub struct Device<'a> {
    pub n: Numbers,
    pub handle: u64,
    memory: Memory<'a>,
    /// What was found: where it begins, where it ends, what it is.
    found: RefCell<BTreeMap<u64, (u64, What)>>,
}

/// What something is: its kind, or the offset of the field that leads to it, then the context and the peer.
type What = (u64, usize, usize);

/// A queue pair that device code has found.
pub struct Queue<'a, 'b> {
    device: &'b Device<'a>,
    at: u64,
}

/// A table of counters or signals, likewise.
pub struct Table<'a, 'b> {
    device: &'b Device<'a>,
    field: u64,
    at: u64,
}

impl<'a> Device<'a> {
    pub fn new(n: Numbers, handle: u64, memory: &'a [u8]) -> Self {
        Self { n, handle, memory: Memory::Copy(memory), found: RefCell::default() }
    }

    /// A kernel that knows a handle and nothing else.
    pub fn live(n: Numbers, handle: u64, see: impl Fn(u64) -> u64 + Sync + 'a) -> Self {
        Self { n, handle, memory: Memory::Live(Box::new(see)), found: RefCell::default() }
    }

    /// A load, which has to be aligned and inside.
    fn load(&self, at: u64, bytes: u64) -> u64 {
        assert_eq!(at % bytes, 0, "a misaligned load at {at:#x}");
        let mut word = [0; 8];
        word[..bytes as usize].copy_from_slice(&self.bytes(at, at + bytes));
        u64::from_le_bytes(word)
    }

    /// A load in the network's order.
    fn load_be32(&self, at: u64) -> u32 {
        (self.load(at, 4) as u32).swap_bytes()
    }

    /// Takes down that something of this size lies here.
    fn object(&self, at: u64, bytes: usize, what: What) -> u64 {
        let before = self.found.borrow_mut().insert(at, (at + bytes as u64, what));
        assert!(before.is_none_or(|before| before == (at + bytes as u64, what)), "two things at {at:#x}");
        at
    }

    fn context(&self, context: usize) -> u64 {
        let at = self.handle + (context * self.n.context) as u64;
        self.object(at, self.n.context, (u64::MAX, context, 0))
    }

    fn array(&self, field: u64, context: usize, peer: usize) -> Option<Queue<'a, '_>> {
        let array = self.load(self.context(context) + field, 8);
        let at = array.checked_add((peer * self.n.queue_pair) as u64).expect("an address");
        let of = (field, context, peer);
        (array != 0).then(|| Queue { device: self, at: self.object(at, self.n.queue_pair, of) })
    }

    pub fn main(&self, context: usize, peer: usize) -> Queue<'a, '_> {
        self.array(0, context, peer).expect("an array of queue pairs")
    }

    pub fn companion(&self, context: usize, peer: usize) -> Option<Queue<'a, '_>> {
        self.array(8, context, peer)
    }

    pub fn counters(&self, context: usize) -> Table<'a, '_> {
        Table { device: self, field: 16, at: self.context(context) + 16 }
    }

    pub fn signals(&self, context: usize) -> Table<'a, '_> {
        Table { device: self, field: 40, at: self.context(context) + 40 }
    }

    pub fn sink_key(&self, context: usize) -> u32 {
        self.load_be32(self.context(context) + 64)
    }

    /// Whether a flush behind a get posts a dump.
    pub fn dumps(&self, context: usize) -> bool {
        !self.n.has_mcst || self.load(self.context(context) + 68, 1) != 0
    }

    /// The newest get issued to a peer, and the newest visible.
    pub fn gets(&self, context: usize, peer: usize) -> Option<(u64, u64)> {
        let of = |field| {
            let at = self.load(self.context(context) + field, 8) + 8 * peer as u64;
            self.load(self.object(at, 8, (field, context, peer)), 8)
        };
        self.n.has_gets.then(|| (of(72), of(80)))
    }

    /// Asserts that what was found is apart from each other, and that the rest is zero.
    pub fn assert_nothing_else(&self) {
        let mut end = self.handle;
        for (from, (to, what)) in self.found.borrow().iter() {
            assert!(*from >= end, "{what:?} begins at {from:#x}, before {end:#x}");
            assert!(self.bytes(end, *from).iter().all(|b| *b == 0), "something before {from:#x}");
            end = *to;
        }
        let Memory::Copy(memory) = self.memory else { panic!("what is live has no end") };
        assert!(self.bytes(end, self.handle + memory.len() as u64).iter().all(|b| *b == 0));
    }

    fn bytes(&self, from: u64, to: u64) -> Vec<u8> {
        assert!(from >= self.handle || matches!(self.memory, Memory::Live(_)), "{from:#x} is not inside");
        match &self.memory {
            Memory::Copy(memory) => memory[(from - self.handle) as usize..(to - self.handle) as usize].to_vec(),
            // SAFETY: what the library has given to device code, which nobody writes meanwhile.
            Memory::Live(see) => unsafe {
                std::slice::from_raw_parts(see(from) as *const u8, (to - from) as usize).to_vec()
            },
        }
    }

    /// The key to a window at a rank, by its `ginHandle`.
    pub fn window_key(&self, gin_handle: u64, peer: usize) -> u32 {
        self.load_be32(self.load(gin_handle, 8) + 4 * peer as u64)
    }

    /// The key to a window here.
    pub fn own_window_key(&self, gin_handle: u64) -> u32 {
        self.load_be32(gin_handle + 8)
    }
}

impl Queue<'_, '_> {
    /// Nobody made it: no slot was ever reserved, and nothing else is there.
    pub fn is_absent(&self) -> bool {
        self.device.bytes(self.at, self.at + self.device.n.queue_pair as u64).iter().all(|b| *b == 0)
    }

    /// What device code counts up begins at zero: slots reserved, ready, rung for; the lock; completions seen.
    pub fn is_fresh(&self) -> bool {
        let lock = if self.device.n.queue_pair == 280 { 52 } else { 56 };
        let d = self.device;
        let counts = [0, 8, 16, self.cq(24), self.cq(40)].map(|field| d.load(self.at + field, 8));
        counts == [0; 5] && d.load(self.at + lock, 4) == 0
    }

    /// The second word of an entry with so many segments: what the NIC reads.
    pub fn word(&self, segments: u32) -> u32 {
        assert!(segments <= self.device.n.segments, "prepared for no such entry");
        self.device.load_be32(self.at + 32 + 4 * u64::from(segments))
    }

    /// Where entry `index` is written.
    pub fn slot(&self, index: u64) -> u64 {
        let (d, slots) = (self.device, self.slots_at());
        let mask = d.load(self.at + slots + 2, 2);
        d.load(self.at + 64, 8) + 64 * (index & mask & 0xffff)
    }

    /// Entries before the first that waits for one.
    pub fn slots(&self) -> u64 {
        self.device.load(self.at + self.slots_at(), 2)
    }

    fn slots_at(&self) -> u64 {
        if self.device.n.queue_pair == 280 {
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
        let d = self.device;
        if d.n.has_cq_type {
            assert_eq!(d.load(self.at + self.cq(37), 1), 0, "a ring of entries");
        }
        // 2.29.7 leaves out what was reserved before the first.
        let before = if d.n.queue_pair == 280 { 0 } else { d.load(self.at + self.cq(40), 8) };
        let count = d.load(self.at + self.cq(12), 4);
        let index = index + before;
        (d.load(self.at + self.cq(0), 8) + 64 * (index & (count - 1)), index & count != 0)
    }

    /// What a wait entry of the companion names.
    pub fn completion_number(&self) -> u32 {
        self.device.load(self.at + self.cq(8), 4) as u32
    }

    /// The queue's number, as the doorbell has it: its second word, which the NIC reads.
    pub fn rung_number(&self) -> u32 {
        self.device.load(self.at + 28, 4) as u32
    }

    /// How it is rung: the handler, the doorbell, the record.
    pub fn ring(&self) -> (u32, u64, u64) {
        let d = self.device;
        let handler = d.load(self.at + d.n.nic_handler as u64, 4) as u32;
        (handler, d.load(self.at + 80, 8), d.load(self.at + 72, 8))
    }

    /// Of both halves, as debug builds assert.
    pub fn memory_types(&self) -> [u64; 2] {
        let d = self.device;
        [d.n.nic_handler as u64 + 4, self.cq(48)].map(|field| d.load(self.at + field, 4))
    }

    /// Size and mask of a completion entry, and its record: for DOCA's own functions.
    pub fn completion_rest(&self) -> (u64, u64, u64) {
        let d = self.device;
        (d.load(self.at + self.cq(36), 1), d.load(self.at + self.cq(32), 4), d.load(self.at + self.cq(16), 8))
    }
}

impl Table<'_, '_> {
    pub fn is_absent(&self) -> bool {
        self.device.bytes(self.at, self.at + 24).iter().all(|b| *b == 0)
    }

    /// Where this rank's own word is.
    pub fn own(&self, id: u64) -> u64 {
        self.device.load(self.at, 8) + 8 * id
    }

    /// A peer's word: key and address.
    pub fn remote(&self, id: u64, peer: usize, ranks: usize) -> (u32, u64) {
        let d = self.device;
        let keys = d.load(self.at + 8, 8);
        d.object(keys, 4 * ranks, (self.field, 0, 0));
        let offset = d.load(self.at + 20, 4);
        (d.load_be32(keys + 4 * peer as u64), 8 * (id + offset))
    }

    /// The key to this rank's own region.
    pub fn own_key(&self) -> u32 {
        self.device.load_be32(self.at + 16)
    }
}
