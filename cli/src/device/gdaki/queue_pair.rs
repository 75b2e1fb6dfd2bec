//! One queue pair, as device code uses it: slots are reserved, entries written, rung for, and completion entries
//! polled, in the steps of `doca_gpunetio_dev_verbs_qp.cuh` and `_cq.cuh`, with the counts where the plugin's
//! structures have them.

use super::entry::Raw;
use crate::device::{Pen, Waiting};
use std::sync::atomic::{fence, AtomicU32, AtomicU64, AtomicU8, Ordering};

/// What a completion entry says of an entry that failed.
const ERROR: u8 = 13;

/// Who brings the doorbell to the NIC, as NCCL's headers number it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ringing {
    /// NCCL's CPU thread would: a word with the producer's index.
    Proxy,
    /// Device code: doorbell and record, under a lock.
    Doorbell,
    /// From 2.31.2 on: a word for each slot, in any order.
    FreeFlow,
    /// Nobody: device code before 2.31.2 does nothing where it is told of free flow.
    Silent,
}

impl Ringing {
    /// The `nic_handler` whose doorbells have a record.
    pub const WITH_RECORD: u32 = 2;

    /// By `nic_handler`, for device code that knows free flow or does not.
    pub fn of(handler: u32, knows_free_flow: bool) -> Option<Self> {
        match handler {
            1 => Some(Self::Proxy),
            // 10 has no record to write, but a doorbell that every producer rings in its turn serves it, too.
            2 | 10 => Some(Self::Doorbell),
            17 if knows_free_flow => Some(Self::FreeFlow),
            17 => Some(Self::Silent),
            _ => None,
        }
    }
}

/// Where a queue pair is.
#[derive(Clone, Copy, Debug)]
pub struct QueueView {
    /// Its slots.
    pub slots: u64,
    /// How many; as many completion entries are looked at.
    pub size: u32,
    /// Its completion entries.
    pub completions: u64,
    /// They are not looked at: others count completions up, where device code counts those that it has seen otherwise.
    pub is_counted: bool,
    /// The doorbell record: 16 bits, big-endian.
    pub record: u64,
    /// The doorbell, or what is written in its place.
    pub bell: u64,
    /// How it is rung.
    pub handler: Ringing,
    /// Its number.
    pub number: u32,
    /// Its completion queue's, which a wait names.
    pub completion_number: u32,
    /// `nic_handler`, as the structures have it.
    pub nic_handler: u32,
}

/// Where device code counts, as addresses.
#[derive(Clone, Copy, Debug)]
pub struct Addresses {
    /// Slots reserved.
    pub reserved: u64,
    /// Entries written, in order.
    pub ready: u64,
    /// Entries rung for.
    pub producer: u64,
    /// Held while the doorbell is rung.
    pub lock: u64,
    /// Completion entries seen.
    pub polled: u64,
}

/// What device code was compiled for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Habits {
    /// Compute capability 9.0: only the owner bit of a completion entry is looked at.
    pub is_sm90: bool,
    /// 2.29.7 and before: the record is written before the doorbell.
    pub record_first: bool,
}

/// What became of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// It was carried out.
    Good,
    /// It was not.
    Failed {
        /// Why.
        syndrome: u8,
    },
}

/// One queue, as device code keeps it. Threads share it.
pub struct QueuePair {
    /// Where it is.
    pub view: QueueView,
    habits: Habits,
    counts: Addresses,
    /// The counts, where nothing has them.
    _own: Option<Box<[AtomicU64; 5]>>,
}

impl QueuePair {
    /// With the counts that structures have.
    pub fn new(view: QueueView, habits: Habits, counts: Addresses) -> Self {
        Self { view, habits, counts, _own: None }
    }

    /// With counts of its own.
    pub fn alone(view: QueueView, habits: Habits) -> Self {
        let own = Box::new([const { AtomicU64::new(0) }; 5]);
        let [reserved, ready, producer, lock, polled] = [0, 1, 2, 3, 4].map(|i: usize| own[i].as_ptr() as u64);
        Self { view, habits, counts: Addresses { reserved, ready, producer, lock, polled }, _own: Some(own) }
    }

    fn word(&self, at: u64) -> &AtomicU64 {
        // SAFETY: a word of the queue pair's, aligned, which lives as long as its set; all access is atomic.
        unsafe { AtomicU64::from_ptr(at as *mut u64) }
    }

    fn half(&self, at: u64) -> &AtomicU32 {
        // SAFETY: as for `word`.
        unsafe { AtomicU32::from_ptr(at as *mut u32) }
    }

    fn byte(&self, at: u64) -> &AtomicU8 {
        // SAFETY: as for `word`.
        unsafe { AtomicU8::from_ptr(at as *mut u8) }
    }

    /// Slots reserved so far.
    pub fn reserved(&self) -> u64 {
        self.word(self.counts.reserved).load(Ordering::Relaxed)
    }

    /// Looks at completion entry `index`; `None`: busy. An entry that failed is seen, not counted, so that those a lap
    /// later are busy for ever: device code does not look at a queue pair that has failed.
    pub fn poll(&self, index: u64) -> Option<Status> {
        let (n, polled) = (u64::from(self.view.size), self.word(self.counts.polled));
        let seen = polled.load(Ordering::Relaxed);
        if index < seen {
            fence(Ordering::Acquire);
            return Some(Status::Good);
        }
        if self.view.is_counted || index >= seen + n {
            return None;
        }
        let entry = self.view.completions + 64 * (index % n);
        let (op_own, counter) = match self.habits.is_sm90 {
            true => (self.byte(entry + 63).load(Ordering::Acquire), index as u16),
            false => {
                let last = u32::from_be(self.half(entry + 60).load(Ordering::Acquire));
                (last as u8, (last >> 16) as u16)
            }
        };
        if (op_own & 1 != 0) != (index & n != 0) || counter != index as u16 {
            return None;
        }
        if op_own >> 4 == ERROR {
            return Some(Status::Failed { syndrome: self.byte(entry + 55).load(Ordering::Relaxed) });
        }
        polled.fetch_max(index + 1, Ordering::Relaxed);
        Some(Status::Good)
    }

    /// Waits for completion entry `index`.
    pub fn wait(&self, index: u64, waiting: &dyn Waiting) -> Result<Status, String> {
        let mut status = self.poll(index);
        if status.is_none() {
            waiting.until(&|| self.standing(index), &mut || {
                status = self.poll(index);
                status.is_some()
            })?;
        }
        status.ok_or_else(|| self.standing(index))
    }

    /// Says where it stands, of an entry that is not complete.
    pub fn standing(&self, index: u64) -> String {
        let Addresses { reserved, producer, polled, .. } = self.counts;
        let [reserved, producer, polled] = [reserved, producer, polled].map(|at| self.word(at).load(Ordering::Relaxed));
        format!(
            "completion entry {index} of queue pair {}: {reserved} entries are reserved, {producer} rung for, {polled} \
             seen",
            self.view.number
        )
    }

    /// Reserves slots and waits until they are free. As device code does, it goes on also where an entry before has
    /// failed: then completion entries of later laps are seen, not counted.
    pub fn reserve(&self, n: u64, waiting: &dyn Waiting) -> Result<u64, String> {
        let first = self.word(self.counts.reserved).fetch_add(n, Ordering::Relaxed);
        if let Some(before) = (first + n - 1).checked_sub(self.view.size.into()) {
            self.wait(before, waiting)?;
        }
        Ok(first)
    }

    /// Writes an entry into its slot.
    pub fn put_entry(&self, index: u64, raw: &Raw, pen: &mut Pen) {
        self.put_bytes(index, &raw.addressed(index, self.view.number), pen);
    }

    /// Writes bytes into a slot, whatever they name.
    pub fn put_bytes(&self, index: u64, raw: &Raw, pen: &mut Pen) {
        let slot = self.view.slots + 64 * (index % u64::from(self.view.size));
        let (words, unused, count) = raw.words();
        // SAFETY: the slot is inside the queue, and ours: it was reserved and is free.
        unsafe { pen.words(slot as *mut u64, &words[..count], unused) };
    }

    /// Says that entries `first` to `last` are written.
    pub fn ready(&self, first: u64, last: u64, waiting: &dyn Waiting) -> Result<(), String> {
        if self.view.handler == Ringing::FreeFlow {
            for index in first..=last {
                let word = self.word(self.view.bell + 8 * (index % u64::from(self.view.size)));
                word.store(index + 1, Ordering::Release);
            }
            return Ok(());
        }
        let ready = self.word(self.counts.ready);
        let what = || format!("entry {first} of queue pair {} to be the next", self.view.number);
        // Everything before has to be written, by whomever.
        let mut is_next = || ready.compare_exchange(first, last + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok();
        match is_next() {
            true => Ok(()),
            false => waiting.until(&what, &mut is_next),
        }
    }

    /// Rings for all entries before `producer`.
    pub fn submit(&self, producer: u64, waiting: &dyn Waiting) -> Result<(), String> {
        match self.view.handler {
            Ringing::FreeFlow | Ringing::Silent => Ok(()),
            Ringing::Proxy => {
                self.word(self.view.bell).fetch_max(producer, Ordering::Release);
                Ok(())
            }
            Ringing::Doorbell => {
                let lock = self.half(self.counts.lock);
                let what = || format!("the doorbell's lock of queue pair {}", self.view.number);
                let mut take = || lock.compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed).is_ok();
                if !take() {
                    waiting.until(&what, &mut take)?;
                }
                if self.word(self.counts.producer).fetch_max(producer, Ordering::AcqRel) < producer {
                    match self.habits.record_first {
                        true => self.record(producer),
                        false => {
                            self.doorbell(producer);
                            self.record(producer);
                        }
                    }
                    self.doorbell(producer);
                }
                lock.store(0, Ordering::Release);
                Ok(())
            }
        }
    }

    /// Writes the doorbell.
    pub fn doorbell(&self, producer: u64) {
        let [index, queue] = [(producer as u32) << 8, self.view.number << 8].map(u32::to_be);
        fence(Ordering::Release);
        // The first word comes first in memory.
        let word = u64::from(index) | u64::from(queue) << 32;
        self.word(self.view.bell).store(word.to_le(), Ordering::Release);
    }

    /// Writes the doorbell record, if there is one.
    pub fn record(&self, producer: u64) {
        if self.view.record == 0 {
            return;
        }
        self.half(self.view.record).store((producer as u32 & 0xffff).to_be(), Ordering::Release);
    }

    /// Writes entries and says that they are, without a doorbell. Returns the last one's index.
    pub fn stage(&self, entries: &[Raw], pen: &mut Pen, waiting: &dyn Waiting) -> Result<u64, String> {
        let first = self.reserve(entries.len() as u64, waiting)?;
        let last = first + entries.len() as u64 - 1;
        for (index, raw) in (first..).zip(entries) {
            self.put_entry(index, raw, pen);
        }
        self.ready(first, last, waiting)?;
        Ok(last)
    }

    /// Writes entries and rings. Returns the last one's index.
    pub fn post(&self, entries: &[Raw], pen: &mut Pen, waiting: &dyn Waiting) -> Result<u64, String> {
        let last = self.stage(entries, pen, waiting)?;
        self.submit(last + 1, waiting)?;
        Ok(last)
    }

    /// Waits until all that was posted is complete. Returns what became of the last entry.
    pub fn flush(&self, waiting: &dyn Waiting) -> Result<Status, String> {
        match self.reserved() {
            0 => Ok(Status::Good),
            n => self.wait(n - 1, waiting),
        }
    }
}
