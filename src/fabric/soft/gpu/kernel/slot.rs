//! A place where the copy kernel can be launched: a ring of its own, and a stream while it has a launch.
//!
//! The driver gives a context's streams with work a few hardware queues. Where the application has work queued behind a
//! kernel that spins, that queue stands still, and a launch of ours in a stream that shares it waits for as long as the
//! kernel spins; one for another launch slot, in another stream, may get another queue. A kernel that runs already is
//! never held up.

use super::ring::{Command, Ring, STOP};
use super::{IDLE, IDLE_WITH_WORKERS, LIFE, THREADS, WARP};
use crate::fabric::soft::gpu::plan::LaunchSize;
use crate::fabric::soft::gpu::resident::{Launch, Slot, SlotMemory};
use std::time::Duration;

/// One of them: its ring, as the engine sees it. The stream is the machine's.
pub struct LaunchSlot {
    ring: Ring,
    /// Where the copy kernel finds it.
    at: u64,
    /// Its number among the launch slots.
    index: usize,
    /// Number of the last launch here, and its size.
    launches: u64,
    size: LaunchSize,
    /// Commands written, of all launches, and when the last one was launched.
    posted: u64,
    first: u64,
}

impl LaunchSlot {
    /// One whose first launch, [`first_launch`], has been asked for.
    ///
    /// # Safety
    /// As for [`Ring::new`].
    pub unsafe fn new(memory: SlotMemory, index: usize) -> Self {
        // SAFETY: the caller's promise.
        let ring = unsafe { Ring::new(memory.host) };
        Self { ring, at: memory.device, index, launches: 1, size: LaunchSize::Warp, posted: 0, first: 0 }
    }

    /// Counts one more launch of this size, of which worker blocks are so many. The one before is gone.
    pub fn next_launch(&mut self, size: LaunchSize, workers: u32) -> Launch {
        debug_assert!(self.is_gone());
        (self.launches, self.size, self.first) = (self.launches + 1, size, self.posted);
        let idle = if size == LaunchSize::WorkerBlocks { IDLE_WITH_WORKERS } else { IDLE };
        Launch {
            slot: self.index,
            blocks: if size == LaunchSize::WorkerBlocks { workers } else { 1 },
            threads: if size == LaunchSize::Warp { WARP } else { THREADS },
            arguments: arguments(self.at, self.posted, self.launches, [idle, LIFE], self.index),
        }
    }

    /// The size of the last launch.
    #[inline]
    pub fn size(&self) -> LaunchSize {
        self.size
    }

    /// The last launch has not begun to run.
    pub fn is_waiting(&self) -> bool {
        !self.is_up()
    }

    /// The last launch never had a command: it touches its ring and nothing else.
    pub fn is_harmless(&self) -> bool {
        self.posted == self.first
    }

    /// How many commands were written, of all launches.
    #[inline]
    pub fn posted(&self) -> u64 {
        self.posted
    }

    /// How many of them are done.
    #[inline]
    pub fn done(&self) -> u64 {
        self.ring.done()
    }

    /// Writes a command. There is room in the ring.
    pub fn post(&mut self, command: &Command) {
        self.ring.write(self.posted, command);
        self.posted += 1;
    }
}

impl Slot for LaunchSlot {
    #[inline]
    fn is_up(&self) -> bool {
        self.ring.up() == self.launches
    }

    /// `done` read after it is final.
    #[inline]
    fn is_gone(&self) -> bool {
        self.ring.gone() == self.launches
    }

    fn take_back(&mut self) {
        self.launches -= 1;
    }

    fn stop(&self) {
        if !self.is_gone() {
            self.ring.write(self.posted, &Command { flags: STOP, ..Command::default() });
        }
    }
}

/// What `copy.ptx` is told: the ring, the words behind it, how many commands were written there, the launch's number,
/// the time without a command after which it ends and that after which it ends in any case, the launch slot.
fn arguments(ring: u64, posted: u64, number: u64, [idle, life]: [Duration; 2], slot: usize) -> Vec<u64> {
    vec![ring, Ring::words(ring), posted, number, idle.as_nanos() as u64, life.as_nanos() as u64, slot as u64]
}

/// The first launch in a launch slot: it ends at once.
pub fn first_launch(slot: usize, memory: SlotMemory) -> Launch {
    Launch { slot, blocks: 1, threads: WARP, arguments: arguments(memory.device, 0, 1, [IDLE, Duration::ZERO], slot) }
}
