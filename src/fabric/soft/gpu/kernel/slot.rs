//! A place where the copy kernel can be launched: a stream and a ring of its own.
//!
//! The driver maps a context's streams onto a few hardware queues. Where the application has work queued behind a
//! kernel that spins, that queue stands still, and a launch of ours in a stream that shares it waits for as long as the
//! kernel spins. Streams made one after the other land in different queues, so a launch in another launch slot may run
//! at once. A kernel that runs already is never held up.

use super::launcher::Parameters;
use super::ring::{Command, Ring, STOP};
use super::{IDLE, IDLE_WITH_WORKERS, LIFE, THREADS, WARP};
use crate::fabric::soft::gpu::plan::LaunchSize;
use std::time::{Duration, Instant};

/// How many there are: half of the eight queues that a context has by default (`CUDA_DEVICE_MAX_CONNECTIONS`).
/// `copy.ptx` has boards for so many.
pub const LAUNCH_SLOTS: usize = 4;
/// First pause once as many launches in a row were late as there are launch slots; it doubles with each more late
/// launch.
const PAUSE: Duration = Duration::from_millis(1);
/// The pause doubles at most so often.
const DOUBLED: u32 = 6;
/// The same of launches that the driver refuses: each is a call for nothing. About a second then.
const REFUSED_DOUBLED: u32 = 10;

/// One of them: its ring, as the engine sees it. The stream is the machine's.
pub struct LaunchSlot {
    ring: Ring,
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
    /// One whose first launch has been asked for.
    pub fn new(ring: Ring, index: usize) -> Self {
        Self { ring, index, launches: 1, size: LaunchSize::Warp, posted: 0, first: 0 }
    }

    /// Counts one more launch of this size, of which worker blocks are so many. The one before is gone.
    pub fn next_launch(&mut self, size: LaunchSize, workers: u32) -> Parameters {
        debug_assert!(self.is_gone());
        (self.launches, self.size, self.first) = (self.launches + 1, size, self.posted);
        Parameters {
            slot: self.index,
            blocks: if size == LaunchSize::WorkerBlocks { workers } else { 1 },
            threads: if size == LaunchSize::Warp { WARP } else { THREADS },
            posted: self.posted,
            number: self.launches,
            idle: if size == LaunchSize::WorkerBlocks { IDLE_WITH_WORKERS } else { IDLE },
            life: LIFE,
        }
    }

    /// That launch never was.
    pub fn take_back(&mut self) {
        self.launches -= 1;
    }

    /// The size of the last launch.
    #[inline]
    pub fn size(&self) -> LaunchSize {
        self.size
    }

    /// The last launch has begun to run.
    #[inline]
    pub fn is_up(&self) -> bool {
        self.ring.up() == self.launches
    }

    /// The last launch has come and gone, or there was none. `done` read after it is final.
    #[inline]
    pub fn is_gone(&self) -> bool {
        self.ring.gone() == self.launches
    }

    /// The last launch runs, as far as it has said.
    pub fn runs(&self) -> bool {
        self.is_up() && !self.is_gone()
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

    /// Tells the last launch to end once it has done its commands. Nothing is launched here any more.
    pub fn stop(&self) {
        if !self.is_gone() {
            self.ring.write(self.posted, &Command { flags: STOP, ..Command::default() });
        }
    }
}

/// The first that is free, from `last` on: where the last launch came up at once the next one probably does.
pub fn choose(last: usize, count: usize, is_free: impl Fn(usize) -> bool) -> Option<usize> {
    (last..last + count).map(|i| i % count).find(|&i| is_free(i))
}

/// Whether one more launch makes sense after others were late. As long as one launch slot is good there is no pause;
/// where all are late, on a GPU that is full or has its turn with another process, launches become rare.
#[derive(Debug, Default)]
pub struct Backoff {
    /// Late launches since one was in time.
    late: u32,
    /// Those that the driver has refused since then.
    refused: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// A launch was in time.
    pub fn in_time(&mut self) {
        *self = Self::default();
    }

    /// A launch is late.
    pub fn late(&mut self, now: Instant) {
        self.late = self.late.saturating_add(1);
        if let Some(more) = self.late.checked_sub(LAUNCH_SLOTS as u32) {
            self.until = self.until.max(Some(now + PAUSE * (1 << more.min(DOUBLED))));
        }
    }

    /// The driver has refused a launch, for something that may pass.
    pub fn refused(&mut self, now: Instant) {
        let until = now + PAUSE * (1 << self.refused.min(REFUSED_DOUBLED));
        self.refused = self.refused.saturating_add(1);
        self.until = self.until.max(Some(until));
    }

    /// Whether one may be launched.
    pub fn allows(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_slot_is_taken_again_as_long_as_it_is_free() {
        assert_eq!(choose(2, 4, |_| true), Some(2));
        assert_eq!(choose(2, 4, |i| i != 2), Some(3));
        assert_eq!(choose(2, 4, |i| i < 2), Some(0));
        assert_eq!(choose(2, 4, |i| i == 1), Some(1));
        assert_eq!(choose(2, 4, |_| false), None);
    }

    #[test]
    fn pauses_begin_when_all_were_late_and_grow_up_to_a_limit() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        for _ in 1..LAUNCH_SLOTS {
            backoff.late(now);
            assert!(backoff.allows(now));
        }
        for factor in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            backoff.late(now);
            let end = now + PAUSE * factor;
            assert!(!backoff.allows(end - Duration::from_nanos(1)), "{factor}");
            assert!(backoff.allows(end), "{factor}");
        }
        backoff.in_time();
        assert!(backoff.allows(now));
        backoff.late(now);
        assert!(backoff.allows(now), "one that is late says nothing of the others");
    }

    #[test]
    fn each_refusal_doubles_the_pause_up_to_a_second() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        for factor in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
            backoff.refused(now);
            // One that was refused is not up in time either.
            backoff.late(now);
            let end = now + PAUSE * factor;
            let late = now + PAUSE * 64;
            assert!(!backoff.allows(end - Duration::from_nanos(1)), "{factor}");
            assert!(backoff.allows(end.max(late)), "{factor}");
        }
        backoff.in_time();
        assert!(backoff.allows(now));
    }
}
