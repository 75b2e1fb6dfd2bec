//! This process rings for kernels, where a GPU cannot write the device's registers: kernels write how far they are into
//! host memory, and a thread of the communicator's engine does what they would do.

use super::doorbell::DoorbellPage;
use super::memory::QueueUmem;
use super::queue_pair::Mlx5QueuePair;
use crate::proxy::drain::{Pass, Work};
use crate::proxy::idle::Rest;
use crate::proxy::memory::{Block, Memory};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Who rings the queues of a communicator's sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ringer {
    /// Kernels, at the device's register.
    Kernels,
    /// This process, for kernels.
    Process,
}

/// Bytes of the word into which kernels write the index behind the last entry of a queue.
pub const WORD_BYTES: usize = 8;

/// A queue that this process rings.
pub struct RungQueue {
    /// The word; in the set's memory.
    word: *const AtomicU64,
    /// The send queue's doorbell record; in host memory of the set.
    record: *const AtomicU32,
    /// Of the queue pair.
    number: u32,
    page: Arc<DoorbellPage>,
    /// Up to where it has been rung.
    rung: u64,
}

// SAFETY: both places are used as atomics alone, by whoever has them.
unsafe impl Send for RungQueue {}

impl RungQueue {
    /// That of a queue pair.
    ///
    /// # Safety
    /// The word, and the record in host memory, live as long as the bell.
    pub unsafe fn new(word: Block, record: u64, pair: &Mlx5QueuePair, page: &Arc<DoorbellPage>) -> Self {
        let (word, record) = (word.cpu.as_ptr().cast_const().cast(), record as *const AtomicU32);
        Self { word, record, number: pair.number(), page: page.clone(), rung: 0 }
    }

    /// Rings for what is new; whether anything is.
    #[inline]
    fn ring(&mut self) -> bool {
        // SAFETY: the word lives (`new`). Behind it the entries are there for the device.
        let index = unsafe { &*self.word }.load(Ordering::Acquire);
        // It only grows: the device must never be rung for less.
        if index <= self.rung {
            return false;
        }
        self.rung = index;
        // SAFETY: the record lives (`new`); the device alone reads it.
        unsafe { &*self.record }.store(u32::from(index as u16).to_be(), Ordering::Release);
        self.page.ring_sends(u64::from(index as u16) << 40 | u64::from(self.number) << 8);
        true
    }
}

/// Some queues of a set, for a thread.
pub struct RingWork {
    bells: Vec<RungQueue>,
    /// In which words and records are.
    _memory: (Arc<Memory>, Arc<QueueUmem>),
    /// Set if nobody rings any more.
    failed: Arc<AtomicBool>,
}

impl RingWork {
    /// The work of ringing these, which lie in this memory.
    pub fn new(bells: Vec<RungQueue>, memory: (Arc<Memory>, Arc<QueueUmem>), failed: Arc<AtomicBool>) -> Self {
        Self { bells, _memory: memory, failed }
    }
}

impl Work for RingWork {
    fn pass(&mut self, _rest: Rest) -> Pass {
        let moved = self.bells.iter_mut().map(|bell| u32::from(bell.ring())).sum();
        Pass { moved, ..Pass::default() }
    }

    fn watch(&mut self, _now: Instant, _limit: Duration) {
        // What a device does not execute is its own affair: it tells of errors.
    }

    fn fail(&mut self) {
        self.failed.store(true, Ordering::Release);
    }

    fn name(&self) -> String {
        format!("{} doorbells", self.bells.len())
    }

    fn unfinished(&self) -> String {
        "some that were not rung".into()
    }
}
