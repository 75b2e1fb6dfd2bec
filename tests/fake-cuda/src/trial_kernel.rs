//! The kernel by which the library tries an mlx5 device (`src/gdaki/mlx5/trial/trial.ptx` in the oxygin package): two
//! send entries for a queue pair and its companion each, their doorbells, a look at the completion entries and at what
//! was written.

use crate::kernel::{rest, Launch, Reach};
use crate::registers::fake_register;
use crate::stream::ILLEGAL_ADDRESS;
use oxygin_ffi::cuda::*;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

// Offsets on the board: of a queue's part those from its beginning.
const LIMIT: u64 = 0;
const LANDED: u64 = 8;
const STATE: u64 = 16;
const QUEUES: [u64; 2] = [32, 240];
const RING: u64 = 0;
const RECORD: u64 = 8;
const BELL: u64 = 24;
const COMPLETIONS: u64 = 40;
const ENTRIES: u64 = 48;
const TOLD: u64 = 176;
const FOUND: u64 = 448;

/// A run of it.
pub struct TrialKernel {
    board: u64,
    reach: Reach,
}

impl TrialKernel {
    pub const NAME: &'static str = "oxygin_trial";
    pub const PARAMETERS: usize = 1;

    pub fn new(launch: &Launch, reach: Reach) -> Self {
        Self { board: launch.parameters[0], reach }
    }

    pub fn run(&self) -> CUresult {
        self.steps().map_or_else(|code| code, |()| CUDA_SUCCESS)
    }

    fn load(&self, at: u64) -> Result<u64, CUresult> {
        Ok(self.reach.word(at)?.load(Ordering::Acquire))
    }

    fn field(&self, offset: u64) -> Result<u64, CUresult> {
        self.load(self.board + offset)
    }

    fn half(&self, at: u64) -> Result<&'static AtomicU32, CUresult> {
        let place = self.reach.at(at, 4)?;
        // SAFETY: mapped memory, which is never unmapped; the library aligns what it names.
        Ok(unsafe { AtomicU32::from_ptr(place.cast()) })
    }

    /// A register of another device, or the word by which the process is asked to ring.
    fn bell(&self, at: u64) -> Result<&'static AtomicU64, CUresult> {
        match fake_register(at) {
            0 => self.reach.word(at),
            // SAFETY: a mapped page, as long as it is registered.
            host if host % 8 == 0 => Ok(unsafe { AtomicU64::from_ptr(host as *mut u64) }),
            _ => Err(ILLEGAL_ADDRESS),
        }
    }

    /// What a queue's part of the board says.
    fn of_queue(&self, queue: u64, offset: u64) -> Result<u64, CUresult> {
        self.field(queue + offset)
    }

    fn write_and_ring(&self, queue: u64) -> Result<(), CUresult> {
        let ring = self.of_queue(queue, RING)?;
        for at in (0..128).step_by(8) {
            self.reach.word(ring + at)?.store(self.of_queue(queue, ENTRIES + at)?, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        let record = self.of_queue(queue, RECORD)?;
        if record != 0 {
            self.half(record)?.store(self.of_queue(queue, RECORD + 8)? as u32, Ordering::Release);
        }
        self.bell(self.of_queue(queue, BELL)?)?.store(self.of_queue(queue, BELL + 8)?, Ordering::Release);
        Ok(())
    }

    /// Whether the last completion entry comes in time.
    fn completes(&self, queue: u64) -> Result<bool, CUresult> {
        let (last, began, mut vain) = (self.of_queue(queue, COMPLETIONS)? + 120, Instant::now(), 0);
        let limit = Duration::from_nanos(self.field(LIMIT)?);
        while self.load(last)? >> 56 == 0xf1 {
            if began.elapsed() > limit {
                return Ok(false);
            }
            rest(&mut vain);
        }
        Ok(true)
    }

    fn tell(&self, queue: u64) -> Result<(), CUresult> {
        let completions = self.of_queue(queue, COMPLETIONS)?;
        for (i, at) in (0..).zip([48, 56, 112, 120]).filter(|_| completions != 0) {
            self.reach.answer(self.board + queue + TOLD + 8 * i, self.load(completions + at)?)?;
        }
        Ok(())
    }

    fn steps(&self) -> Result<(), CUresult> {
        let mut state = 1;
        for queue in QUEUES {
            if self.of_queue(queue, RING)? != 0 && state == 1 {
                self.write_and_ring(queue)?;
                state = if self.completes(queue)? { 1 } else { 2 };
            }
        }
        QUEUES.iter().try_for_each(|queue| self.tell(*queue))?;
        let landed = self.field(LANDED)?;
        for at in (0..80).step_by(8) {
            self.reach.answer(self.board + FOUND + at, self.load(landed + at)?)?;
        }
        self.reach.answer(self.board + STATE, state)
    }
}
