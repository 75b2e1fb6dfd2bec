//! The courier: a one-warp kernel of ours that carries small puts and signals while there are many.
//!
//! A copy and a signal by the stream cost the driver's calls and two or three rounds of the GPU's front end: 8 to 12 µs.
//! A kernel that runs already needs one read of host memory. But a kernel that always runs would block whoever waits for
//! the whole GPU, so this one is launched when operations come close together and ends by itself: after [`IDLE`] without
//! any, and in any case after [`LIFE`]. Commands go only to one that is known to run; what it has not done when it is
//! gone goes by the stream. Nothing depends on its ever getting a place on the GPU.
//!
//! Engine and courier never have operations up at the same time, which keeps everyone's order.

mod command;
mod ring;

pub use command::{command, is_light};
use ring::{Command, Ring, COMMANDS, CUT, STOP};

use super::op::Op;
use crate::fabric::soft::lane::Lane;
use oxygin_ffi::cuda::{Context, CudaError, Kernel, Pinned, Stream};
use std::collections::VecDeque;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time without a command after which it ends: several round trips of a ping-pong, and as long as the flights may take
/// that it waits for before it takes over.
const IDLE: Duration = Duration::from_micros(150);
/// Time after which it ends in any case: a bound on what cudaFree, cudaDeviceSynchronize or a kernel that needs the whole
/// GPU may have to wait for. A launch, some 10 µs, is little beside it.
const LIFE: Duration = Duration::from_millis(2);
/// Operations are close together if no more time than this lies between two of them.
pub const CLOSE: Duration = Duration::from_micros(100);
/// How long closing waits for it: on a GPU that others fill it may get its place late.
const GONE_WITHIN: Duration = Duration::from_secs(1);
/// A warp.
const THREADS: u32 = 32;
/// Commands that it does in one go, at most.
const BATCH: usize = 8;

/// Its code, ended by a zero.
const PTX: &CStr = match CStr::from_bytes_with_nul(concat!(include_str!("courier.ptx"), "\0").as_bytes()) {
    Ok(text) => text,
    Err(_) => panic!("the PTX holds a zero"),
};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// None runs.
    Off,
    /// Launched; it has not said that it runs.
    Launched,
    /// It takes commands.
    Up,
}

/// An operation that it was given.
struct Sent {
    op: Op,
    /// Its signal's address, 0 for none.
    signal: u64,
    /// It was told not to do it in one go with those before.
    is_cut: bool,
}

/// What it needs on the GPU.
struct Machine {
    kernel: Kernel,
    stream: Stream,
    pinned: Pinned,
}

/// One engine's courier. Used under the engine's lock.
pub struct Courier {
    context: Arc<Context>,
    machine: ManuallyDrop<Machine>,
    ring: Ring,
    phase: Phase,
    /// Number of the last launch.
    launches: u64,
    /// Commands written, of all launches.
    posted: u64,
    /// Those not known to be done, oldest first; the last one is number `posted - 1`.
    sent: VecDeque<Sent>,
    /// All operations that it carried.
    pub carried: u64,
}

impl Courier {
    /// Loads it and runs it once, briefly, so that the driver has done what it does at a first launch. Set-up only: it may
    /// wait for kernels.
    pub fn open(context: Arc<Context>) -> Result<Self, CudaError> {
        let machine = {
            let _current = context.enter()?;
            let kernel = Kernel::load(context.cuda(), PTX, c"oxygin_courier")?;
            // A launch that waits for a place on a full GPU must not hold up the engine's own streams.
            let stream = Stream::create_below(context.cuda(), 1)?;
            Machine { kernel, stream, pinned: Pinned::alloc(context.cuda(), ring::BYTES)? }
        };
        // SAFETY: as large, zeroed and page-aligned; kept as long as `self`, or for ever (`close`).
        let ring = unsafe { Ring::new(machine.pinned.host()) };
        let machine = ManuallyDrop::new(machine);
        let sent = VecDeque::with_capacity(COMMANDS as usize);
        let mut made = Self { context, machine, ring, phase: Phase::Off, launches: 0, posted: 0, sent, carried: 0 };
        made.launch_for(Duration::ZERO)?;
        Ok(made)
    }

    /// Starts one.
    pub fn launch(&mut self) -> Result<(), CudaError> {
        debug_assert!(self.is_off() && self.sent.is_empty());
        self.launch_for(LIFE)
    }

    fn launch_for(&mut self, life: Duration) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        let (ring, number) = (self.machine.pinned.device(), self.launches + 1);
        let [idle, life] = [IDLE, life].map(|d| d.as_nanos() as u64);
        let parameters = [ring, Ring::words(ring), self.posted, number, idle, life];
        // SAFETY: what courier.ptx says of its parameters; the memory stays until the kernel is gone.
        unsafe { self.machine.kernel.launch(&self.machine.stream, THREADS, parameters) }?;
        (self.launches, self.phase) = (number, Phase::Launched);
        Ok(())
    }

    /// Its state, in words.
    pub fn describe(&self) -> String {
        let phase = match self.phase {
            Phase::Off => "off",
            Phase::Launched => "launched, not yet running",
            Phase::Up => "running",
        };
        format!("{phase}, {} of its commands are not done", self.sent.len())
    }

    /// How often it was started, the first time aside.
    pub fn launches(&self) -> u64 {
        self.launches - 1
    }

    /// None was launched, or the last one is gone.
    pub fn is_off(&self) -> bool {
        self.phase == Phase::Off
    }

    /// It takes commands.
    pub fn is_up(&self) -> bool {
        self.phase == Phase::Up
    }

    /// Operations that it was given are not done.
    pub fn is_busy(&self) -> bool {
        !self.sent.is_empty()
    }

    /// How many.
    pub fn busy_with(&self) -> usize {
        self.sent.len()
    }

    /// Whether one more command can be written.
    pub fn has_room(&self) -> bool {
        (self.sent.len() as u64) < COMMANDS
    }

    /// Hands it an operation. It is up and has room.
    pub fn post(&mut self, op: Op, mut command: Command) {
        debug_assert!(self.is_up() && self.has_room());
        let is_cut = command.signal != 0 && self.would_overtake(&op.owner.lane, command.signal);
        if is_cut {
            command.flags |= CUT;
        }
        self.ring.write(self.posted, &command);
        self.posted += 1;
        self.carried += 1;
        self.sent.push_back(Sent { op, signal: command.signal, is_cut });
    }

    /// Whether a signal of the same lane at another address may be in the same go: signals of one go have no order.
    fn would_overtake(&self, lane: &Arc<Lane>, signal: u64) -> bool {
        for before in self.sent.iter().rev().take(BATCH - 1) {
            if before.signal != 0 && before.signal != signal && Arc::ptr_eq(&before.op.owner.lane, lane) {
                return true;
            }
            if before.is_cut {
                return false;
            }
        }
        false
    }

    /// The oldest operation, if it is done. Notices that the courier has begun to run, or is gone.
    #[inline]
    pub fn land(&mut self) -> Option<Op> {
        match self.phase {
            Phase::Off => return None,
            Phase::Launched if self.ring.up() == self.launches => self.phase = Phase::Up,
            Phase::Launched => return None,
            Phase::Up => {}
        }
        let first = self.posted - self.sent.len() as u64;
        // First whether it is gone: then the count is final.
        let gone = self.ring.gone() == self.launches;
        if first < self.ring.done() {
            return self.sent.pop_front().map(|s| s.op);
        }
        if gone {
            self.phase = Phase::Off;
        }
        None
    }

    /// What a courier that is gone has left undone. Nobody does it any more: the next one begins behind it.
    pub fn leftovers(&mut self) -> impl Iterator<Item = Op> + '_ {
        debug_assert!(self.is_off());
        self.sent.drain(..).map(|s| s.op)
    }

    /// All that it was given and has not done; the GPU has failed.
    pub fn give_up(&mut self) -> impl Iterator<Item = Op> + '_ {
        self.phase = Phase::Off;
        self.sent.drain(..).map(|s| s.op)
    }

    /// An error that the GPU hit.
    pub fn check(&self) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        self.machine.stream.is_done().map(drop)
    }

    /// Whether none runs, or the context is broken.
    pub fn is_idle(&self) -> bool {
        let Ok(_current) = self.context.enter() else { return true };
        self.machine.stream.is_done().unwrap_or(true)
    }

    /// Ends it. It has nothing to do any more, or the GPU has failed. `false`: it may still run; its memory is left to the
    /// process.
    pub fn close(mut self, healthy: bool) -> bool {
        if !healthy {
            return false;
        }
        let end = Instant::now() + GONE_WITHIN;
        let mut stopped = false;
        while self.phase != Phase::Off {
            if self.land().is_some() {
                continue;
            }
            if self.is_up() && !stopped {
                self.ring.write(self.posted, &Command { flags: STOP, ..Command::default() });
                stopped = true;
            }
            if Instant::now() > end {
                return false;
            }
            std::thread::yield_now();
        }
        while !self.is_idle() {
            if Instant::now() > end {
                return false;
            }
            std::thread::yield_now();
        }
        // A context that is gone has taken all of it.
        let Ok(_current) = self.context.enter() else { return true };
        // SAFETY: dropped once: `self` is consumed and has no drop of its own.
        unsafe { ManuallyDrop::drop(&mut self.machine) };
        true
    }
}
