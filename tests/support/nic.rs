//! Device code of NCCL's GDAKI backend, played by CPU threads: it reserves slots, writes entries, rings, and polls
//! completion entries, in the steps in which the device headers do. Nothing of `oxygin::gdaki` that reads or writes
//! entries is used here.

use super::common::Rank;
pub use super::device::wait;
use oxygin::comm::coll::Coll;
use oxygin::comm::contexts::Contexts;
use oxygin::comm::nic::NicSpec;
use oxygin::fabric::ContextSpec;
use oxygin::gdaki::soft::doorbell::Ringing;
use oxygin::gdaki::soft::{QueueView, SetView};
use oxygin::sys::handles;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicU8, Ordering};
use std::sync::{Arc, Mutex};

pub const NOP: u8 = 0x00;
pub const WRITE: u8 = 0x08;
pub const WAIT: u8 = 0x0f;
pub const READ: u8 = 0x10;
pub const FETCH_ADD: u8 = 0x12;
pub const MASKED_SWAP: u8 = 0x14;
pub const MASKED_ADD: u8 = 0x15;
pub const DUMP: u8 = 0x23;

/// What is asked of a set.
#[derive(Clone, Copy)]
pub struct Ask {
    pub contexts: u32,
    pub signals: u32,
    pub counters: u32,
    pub depth: i32,
    pub stride: u32,
    pub handler: Ringing,
    /// Compute capability 9.0: only the owner bit of a completion entry is looked at.
    pub is_sm90: bool,
    /// 2.29.7 and before: the record is written before the doorbell.
    pub record_first: bool,
}

impl Default for Ask {
    fn default() -> Self {
        Self {
            contexts: 1,
            signals: 8,
            counters: 8,
            depth: 0,
            stride: 1,
            handler: Ringing::Doorbell,
            is_sm90: true,
            record_first: false,
        }
    }
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    Good,
    Failed { syndrome: u8 },
}
/// The bytes of an entry, segment by segment.
#[derive(Clone)]
pub struct Raw {
    pub bytes: [u8; 64],
    segments: usize,
}

impl Raw {
    /// A control segment: signalled, no fence.
    pub fn new(opcode: u8, modifier: u8) -> Self {
        let mut raw = Self { bytes: [0; 64], segments: 1 };
        raw.bytes[0] = modifier;
        raw.bytes[3] = opcode;
        raw.bytes[11] = 2 << 2;
        raw
    }

    /// With a further segment.
    pub fn with(mut self, segment: [u8; 16]) -> Self {
        let at = 16 * self.segments;
        self.bytes[at..at + 16].copy_from_slice(&segment);
        self.segments += 1;
        self
    }

    pub fn remote(self, key: u32, address: u64) -> Self {
        let mut segment = [0; 16];
        segment[..8].copy_from_slice(&address.to_be_bytes());
        segment[8..12].copy_from_slice(&key.to_be_bytes());
        self.with(segment)
    }

    pub fn data(self, key: u32, address: u64, len: u32) -> Self {
        let mut segment = [0; 16];
        segment[..4].copy_from_slice(&len.to_be_bytes());
        segment[4..8].copy_from_slice(&key.to_be_bytes());
        segment[8..].copy_from_slice(&address.to_be_bytes());
        self.with(segment)
    }

    pub fn two(self, a: u64, b: u64) -> Self {
        self.with([a.to_be_bytes(), b.to_be_bytes()].concat().try_into().unwrap())
    }

    pub fn four(self, words: [u32; 4]) -> Self {
        self.with(words.map(u32::to_be_bytes).concat().try_into().unwrap())
    }

    pub fn inline(mut self, value: &[u8]) -> Self {
        let n = value.len();
        self.bytes[32..36].copy_from_slice(&(n as u32 | 1 << 31).to_be_bytes());
        self.bytes[36..36 + n].copy_from_slice(value);
        self.segments = if n > 12 { 4 } else { 3 };
        self
    }

    pub fn fenced(mut self) -> Self {
        self.bytes[11] |= 2 << 5;
        self
    }

    fn addressed(&self, index: u64, queue: u32) -> Self {
        let mut raw = self.clone();
        raw.bytes[1..3].copy_from_slice(&(index as u16).to_be_bytes());
        raw.bytes[4..8].copy_from_slice(&(queue << 8 | self.segments as u32).to_be_bytes());
        raw
    }
}

/// A place in a window: its key, and bytes from its start.
pub type Place = (u32, u64);

pub fn write(to: Place, from: Place, len: u32) -> Raw {
    Raw::new(WRITE, 0).remote(to.0, to.1).data(from.0, from.1, len)
}

pub fn value(to: Place, bytes: &[u8]) -> Raw {
    Raw::new(WRITE, 0).remote(to.0, to.1).inline(bytes)
}

pub fn read(from: Place, to: Place, len: u32) -> Raw {
    Raw::new(READ, 0).remote(from.0, from.1).data(to.0, to.1, len)
}

pub fn add(to: Place, n: u64, fetched: Place) -> Raw {
    Raw::new(FETCH_ADD, 0).remote(to.0, to.1).two(n, n).data(fetched.0, fetched.1, 8)
}

/// One queue, as device code keeps it.
pub struct Qp {
    pub view: QueueView,
    ask: Ask,
    reserved: AtomicU64,
    ready: AtomicU64,
    producer: AtomicU64,
    lock: Mutex<()>,
    polled: AtomicU64,
}

impl Qp {
    pub fn new(view: QueueView, ask: Ask) -> Self {
        let zero = || AtomicU64::new(0);
        let (reserved, ready, producer, polled) = (zero(), zero(), zero(), zero());
        Self { view, ask, reserved, ready, producer, lock: Mutex::new(()), polled }
    }

    fn u64_at(&self, base: u64, word: u64) -> &AtomicU64 {
        // SAFETY: memory of the set, which lives as long as the test uses it.
        unsafe { &*((base + 8 * word) as *const AtomicU64) }
    }

    /// Looks at completion entry `index`; `None`: busy.
    pub fn poll(&self, index: u64) -> Option<Status> {
        let n = u64::from(self.view.size);
        let seen = self.polled.load(Ordering::Relaxed);
        if index < seen {
            return Some(Status::Good);
        }
        if index >= seen + n {
            return None;
        }
        let entry = self.view.completions + 64 * (index % n);
        // SAFETY: a completion entry of the set.
        let (op_own, counter) = unsafe {
            match self.ask.is_sm90 {
                true => ((*((entry + 63) as *const AtomicU8)).load(Ordering::Acquire), index as u16),
                false => {
                    let last = u32::from_be((*((entry + 60) as *const AtomicU32)).load(Ordering::Acquire));
                    (last as u8, (last >> 16) as u16)
                }
            }
        };
        if (op_own & 1 != 0) != (index & n != 0) || counter != index as u16 {
            return None;
        }
        if op_own >> 4 == 13 {
            // SAFETY: as above.
            return Some(Status::Failed { syndrome: unsafe { *((entry + 55) as *const u8) } });
        }
        self.polled.fetch_max(index + 1, Ordering::Relaxed);
        Some(Status::Good)
    }

    pub fn wait(&self, index: u64) -> Status {
        wait(|| format!("completion entry {index} of queue pair {}", self.view.number), || self.poll(index).is_some());
        self.poll(index).unwrap()
    }

    /// Reserves slots and waits until they are free. As device code does, it goes on also where an entry before has
    /// failed: then completion entries of later laps are seen, not counted.
    pub fn reserve(&self, n: u64) -> u64 {
        let first = self.reserved.fetch_add(n, Ordering::Relaxed);
        if let Some(before) = (first + n - 1).checked_sub(self.view.size.into()) {
            self.wait(before);
        }
        first
    }

    pub fn put_entry(&self, index: u64, raw: &Raw) {
        self.put_bytes(index, raw.addressed(index, self.view.number));
    }

    pub fn put_bytes(&self, index: u64, raw: Raw) {
        let slot = self.view.slots + 64 * (index % u64::from(self.view.size));
        for word in 0..2 * raw.segments {
            let value = u64::from_ne_bytes(raw.bytes[8 * word..8 * word + 8].try_into().unwrap());
            self.u64_at(slot, word as u64).store(value, Ordering::Relaxed);
        }
    }

    /// Says that entries `first` to `last` are written.
    pub fn ready(&self, first: u64, last: u64) {
        if self.ask.handler == Ringing::FreeFlow {
            for index in first..=last {
                self.u64_at(self.view.bell, index % u64::from(self.view.size)).store(index + 1, Ordering::Release);
            }
            return;
        }
        wait(|| format!("entry {first} to be the next"), || self.ready.load(Ordering::Acquire) == first);
        self.ready.store(last + 1, Ordering::Release);
    }

    pub fn submit(&self, producer: u64) {
        match self.ask.handler {
            Ringing::FreeFlow => {}
            Ringing::Proxy => {
                self.u64_at(self.view.bell, 0).fetch_max(producer, Ordering::Release);
            }
            Ringing::Doorbell => {
                let _held = self.lock.lock().unwrap();
                if self.producer.fetch_max(producer, Ordering::AcqRel) < producer {
                    if self.ask.record_first {
                        self.record(producer);
                        self.doorbell(producer);
                        return;
                    }
                    self.doorbell(producer);
                    self.record(producer);
                    self.doorbell(producer);
                }
            }
        }
    }

    pub fn doorbell(&self, producer: u64) {
        let [index, queue] = [(producer as u32) << 8, self.view.number << 8].map(u32::to_be_bytes);
        let word = u64::from_ne_bytes([index, queue].concat().try_into().unwrap());
        self.u64_at(self.view.bell, 0).store(word, Ordering::Release);
    }

    pub fn record(&self, producer: u64) {
        // SAFETY: the queue's doorbell record.
        let record = unsafe { &*(self.view.record as *const AtomicU32) };
        record.store((producer as u32 & 0xffff).to_be(), Ordering::Release);
    }

    /// Writes entries and rings. Returns the last one's index.
    pub fn post(&self, entries: &[Raw]) -> u64 {
        let first = self.reserve(entries.len() as u64);
        let last = first + entries.len() as u64 - 1;
        for (index, raw) in (first..).zip(entries) {
            self.put_entry(index, raw);
        }
        self.ready(first, last);
        self.submit(last + 1);
        last
    }

    /// Waits until all that was posted is complete. Returns what became of the last entry.
    pub fn flush(&self) -> Status {
        match self.reserved.load(Ordering::Relaxed) {
            0 => Status::Good,
            n => self.wait(n - 1),
        }
    }
}

/// A set of contexts, as device code has it.
pub struct Nic {
    pub set: Arc<Contexts>,
    pub coll: Arc<Coll>,
    pub view: SetView,
    qps: Vec<Option<(Qp, Option<Qp>)>>,
    nranks: usize,
}

impl Nic {
    pub fn new(r: &Rank, ask: Ask) -> Self {
        let coll = handles::clone::<Coll>(r.coll).expect("a communicator");
        let spec = NicSpec {
            contexts: ContextSpec { contexts: ask.contexts, queue_depth: 0, traffic_class: None },
            depth: ask.depth,
            signals: ask.signals,
            counters: ask.counters,
            rank_stride: ask.stride,
            handler: ask.handler,
            layout: None,
        };
        let (set, _place, view) = coll.create_nic_contexts(|| Ok(spec)).expect("a set");
        let qp = |view| Qp::new(view, ask);
        let qps = view.pairs.iter().map(|p| p.map(|p| (qp(p.main), p.companion.map(qp)))).collect();
        Self { set, coll, view, qps, nranks: r.job.nranks }
    }

    pub fn key(&self, window: *mut c_void) -> u32 {
        self.coll.key_of(window).expect("a key")
    }

    pub fn has(&self, context: usize, peer: usize) -> bool {
        self.qps[context * self.nranks + peer].is_some()
    }

    pub fn qp(&self, context: usize, peer: usize) -> &Qp {
        &self.qps[context * self.nranks + peer].as_ref().expect("a queue pair").0
    }

    pub fn companion(&self, context: usize, peer: usize) -> &Qp {
        self.qps[context * self.nranks + peer].as_ref().and_then(|p| p.1.as_ref()).expect("a companion")
    }

    /// The place of a signal at a peer.
    pub fn signal_place(&self, context: usize, id: u32) -> Place {
        let table = &self.view.signals;
        (table.key, 8 * (context as u64 * u64::from(table.each) + u64::from(id)))
    }

    pub fn add_signal(&self, context: usize, id: u32, n: u64) -> Raw {
        add(self.signal_place(context, id), n, (self.view.sink, 0))
    }

    pub fn signal(&self, context: usize, id: u32) -> u64 {
        let at = self.view.signals.words + self.signal_place(context, id).1;
        // SAFETY: a word of the set's.
        unsafe { (*(at as *const AtomicU64)).load(Ordering::Acquire) }
    }

    pub fn wait_signal(&self, context: usize, id: u32, least: u64) {
        wait(
            || format!("signal {id} of context {context} >= {least} (it is {})", self.signal(context, id)),
            || self.signal(context, id) >= least,
        );
    }

    /// Entries on a queue pair, and on its companion a counter that goes up when they are complete.
    pub fn post_counted(&self, context: usize, peer: usize, entries: &[Raw], counter: u32) -> u64 {
        let (main, companion) = (self.qp(context, peer), self.companion(context, peer));
        let first = main.reserve(entries.len() as u64);
        let last = first + entries.len() as u64 - 1;
        (first..).zip(entries).for_each(|(index, raw)| main.put_entry(index, raw));
        main.ready(first, last);
        let at = companion.reserve(2);
        let mut waits = [0; 16];
        waits[8..12].copy_from_slice(&(last as u32).to_be_bytes());
        waits[12..].copy_from_slice(&main.view.number.to_be_bytes());
        companion.put_entry(at, &Raw::new(WAIT, 0).with(waits));
        let table = &self.view.counters;
        let place = (table.key, 8 * (context as u64 * u64::from(table.each) + u64::from(counter)));
        companion.put_entry(at + 1, &add(place, 1, (self.view.sink, 0)));
        companion.ready(at, at + 1);
        main.submit(last + 1);
        companion.submit(at + 2);
        last
    }

    pub fn counter(&self, context: usize, id: u32) -> u64 {
        let table = &self.view.counters;
        let at = table.words + 8 * (context as u64 * u64::from(table.each) + u64::from(id));
        // SAFETY: a word of the set's.
        unsafe { (*(at as *const AtomicU64)).load(Ordering::Acquire) }
    }

    pub fn wait_counter(&self, context: usize, id: u32, least: u64) {
        wait(
            || format!("counter {id} of context {context} >= {least} (it is {})", self.counter(context, id)),
            || self.counter(context, id) >= least,
        );
    }

    pub fn has_error(&self) -> bool {
        self.set.has_error()
    }

    pub fn destroy(self) {
        self.set.destroy();
    }
}
