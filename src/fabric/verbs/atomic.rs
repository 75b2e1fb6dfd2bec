//! Atomic operations that no work request of libibverbs carries out: masked ones, and those on 4 bytes. libibverbs of
//! rdma-core has plain 8-byte ones alone (`IBV_WR_ATOMIC_FETCH_AND_ADD`, `IBV_WR_ATOMIC_CMP_AND_SWP`); what mlx5
//! devices can do beyond them takes queues of one's own.
//!
//! Here they are a loop: a compare-and-swap of the 8 bytes around the word, from what they are believed to hold to what
//! they are to hold; if they held something else, that is believed the next time. Whoever disturbs it has made progress
//! itself. The lane waits meanwhile, so what follows takes effect after it. With respect to signals and other such
//! operations this is atomic where the device's own are.

use super::lane::Op;
use crate::memory::registry::Registry;
use crate::rma::atomic::{Atomic, Atomicity, Atomics, Change, Width};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};

/// What contexts carry out on devices with remote atomics, wherever the word lies.
pub const ATOMICS: Atomics = Atomics { host: Atomicity::Fabric, gpu: Atomicity::Fabric, by_words: true };

/// Whether a device carries it out by itself.
pub fn is_plain(atomic: &Atomic) -> bool {
    atomic.width == Width::Eight && matches!(atomic.change, Change::FetchAdd { boundary: 0, .. })
}

/// An operation that waits in a lane, beside its entry there.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// It.
    pub atomic: Atomic,
    /// The remote key of the window that the fetched value goes to, where that is device memory.
    pub device: Option<u32>,
}

/// What is to be posted next for an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LoopStep {
    /// A compare-and-swap of the 8 bytes around the word.
    Swap {
        /// What they are believed to hold.
        expected: u64,
        /// What they are to hold then.
        swap: u64,
    },
    /// A write of the fetched value, which lies in the slot, to this rank's device memory.
    Deliver,
    /// Nothing: it is done.
    Done,
}

/// An operation under way.
#[derive(Clone, Copy, Debug)]
pub struct Loop {
    wanted: Wanted,
    /// Its entry: the slot is its local end.
    pub entry: Op,
    /// What is, or is to be, with the device.
    pub step: LoopStep,
    /// The device has it.
    pub is_up: bool,
}

impl Loop {
    /// Begins one.
    pub fn begin(wanted: Wanted, entry: Op) -> Self {
        let mut looped = Self { wanted, entry, step: LoopStep::Done, is_up: false };
        // What it compares with is what it most likely finds.
        let guess = match wanted.atomic.change {
            Change::CompareSwap { compare, compare_mask, .. } => (compare & compare_mask) << looped.shift(),
            Change::FetchAdd { .. } => 0,
        };
        looped.expect(guess);
        looped
    }

    /// Address of the 8 bytes around the word.
    pub fn around(&self) -> u64 {
        self.wanted.atomic.remote & !7
    }

    fn shift(&self) -> u32 {
        (self.wanted.atomic.remote & 7) as u32 * 8
    }

    /// What the word is if the 8 bytes around it are `all`.
    fn word(&self, all: u64) -> u64 {
        all >> self.shift() & self.wanted.atomic.width.mask()
    }

    fn expect(&mut self, all: u64) {
        let Atomic { change, width, .. } = self.wanted.atomic;
        let mask = width.mask() << self.shift();
        // Where the comparison fails this only finds out whether the belief is right.
        let swap = change.of(self.word(all), width).map_or(all, |new| all & !mask | new << self.shift());
        self.step = LoopStep::Swap { expected: all, swap };
    }

    fn slot(&self) -> &AtomicU64 {
        // SAFETY: the entry's local end is a slot of the context's bounce area: 8 aligned bytes, which outlive the
        // queues.
        unsafe { AtomicU64::from_ptr(self.entry.local as *mut u64) }
    }

    /// Where the fetched value goes on this rank's device: address and remote key.
    pub fn device(&self) -> Option<(u64, u32)> {
        Some((self.wanted.atomic.fetched?.local, self.wanted.device?))
    }

    /// Bytes of the word.
    pub fn bytes(&self) -> u32 {
        self.wanted.atomic.width.bytes() as u32
    }

    /// The device has done its step; what the 8 bytes held is in the slot. A window that is gone gets nothing: the
    /// answer may come long after it.
    pub fn advance(&mut self, registry: &Registry) {
        self.is_up = false;
        let LoopStep::Swap { expected, .. } = self.step else {
            self.step = LoopStep::Done;
            return;
        };
        let found = self.slot().load(Ordering::Acquire);
        let Atomic { change, width, fetched, .. } = self.wanted.atomic;
        let old = self.word(found);
        if found != expected && change.of(old, width).is_some() {
            return self.expect(found);
        }
        self.step = match (fetched, self.device()) {
            (None, _) => LoopStep::Done,
            (Some(_), Some(_)) => {
                self.slot().store(old, Ordering::Release);
                LoopStep::Deliver
            }
            (Some(to), None) => {
                let held = registry.hold();
                if held.covers(to.local, width.bytes()) {
                    let (from, to) = ((&raw const old).cast(), to.local as *mut u8);
                    // SAFETY: in a window, which is held; x86 has the low bytes first.
                    unsafe { std::ptr::copy_nonoverlapping(from, to, width.bytes() as usize) };
                }
                LoopStep::Done
            }
        };
    }
}

/// The loops of a lane: those that wait, by their entries in its backlog, and the one under way.
#[derive(Default)]
pub struct Loops {
    /// Oldest first.
    pub waiting: VecDeque<Wanted>,
    /// Behind it nothing of the lane starts.
    pub current: Option<Loop>,
}

#[cfg(test)]
mod tests {
    use super::super::lane::EntryKind;
    use super::*;
    use crate::memory::registry::Extent;
    use crate::rma::atomic::Fetched;
    use proptest::prelude::*;

    /// Runs a loop on 8 bytes that others change `noise` before each of its steps, with the fetched word in a window or
    /// where one was.
    fn run(atomic: Atomic, all: &mut u64, noise: &[u64], has_window: bool) -> usize {
        let registry = Registry::default();
        if let Some(to) = atomic.fetched.filter(|_| has_window) {
            registry.insert(3, Extent { base: to.local, len: 8 });
        }
        let slot = AtomicU64::new(0);
        let local = slot.as_ptr() as u64;
        let entry = Op { kind: EntryKind::Loop, local, lkey: 1, rkey: 2, remote: 0, len: 0, signal: None };
        let mut looped = Loop::begin(Wanted { atomic, device: None }, entry);
        for steps in 0.. {
            let LoopStep::Swap { expected, swap } = looped.step else { return steps };
            *all ^= noise.get(steps).copied().unwrap_or(0);
            slot.store(*all, Ordering::Release);
            if *all == expected {
                *all = swap;
            }
            looped.advance(&registry);
        }
        unreachable!()
    }

    proptest! {
        #[test]
        fn a_loop_does_what_one_operation_does(
            operands: [u64; 4], swaps: bool, wide: bool, high: bool, start: u64,
            noise in proptest::collection::vec(any::<u64>(), 0..4),
        ) {
            let width = if wide { Width::Eight } else { Width::Four };
            let [a, b, c, d] = operands.map(|x| x & width.mask());
            let change = match swaps {
                true => Change::CompareSwap { compare: a, compare_mask: b & 0x11, swap: c, swap_mask: d },
                false => Change::FetchAdd { add: a, boundary: b },
            };
            let shift: u32 = if wide || !high { 0 } else { 32 };
            let old = AtomicU64::new(0);
            let fetched = Some(Fetched { local: old.as_ptr() as u64, lkey: 3 });
            let remote = 64 + u64::from(shift) / 8;
            let atomic = Atomic { change, width, remote, rkey: 2, fetched, more: false };
            let mut all = start;
            let mut other = start;
            run(atomic, &mut other, &noise, false);
            prop_assert_eq!(old.load(Ordering::Relaxed), 0, "written where no window is");
            let steps = run(atomic, &mut all, &noise, true);
            prop_assert_eq!(all, other);
            prop_assert!(steps <= noise.len() + 2);
            // What was there when it took effect: the last noise that it met.
            let met = noise.iter().take(steps).fold(start, |all, n| all ^ n);
            let word = met >> shift & width.mask();
            prop_assert_eq!(old.load(Ordering::Relaxed), word);
            let mask = width.mask() << shift;
            let new = change.of(word, width).map_or(met, |new| met & !mask | new << shift);
            prop_assert_eq!(all, new);
        }
    }
}
