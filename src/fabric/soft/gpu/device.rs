//! One rank's streams and pinned memory on its GPU.

use super::tuning::Tuning;
use super::DRAIN_WITHIN;
use oxygin_ffi::cuda::{Context, Copies, CudaError, MemOp, Pinned, Stream};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of pinned memory for data that comes from or goes to memory which is not pinned.
pub const STAGING_BYTES: u64 = 4 << 20;
/// The first bytes of the pinned memory: for each way, on a line of its own, the number of its last flight that is done …
const FLAG_AT: [usize; 2] = [0, 64];
/// … on a line of its own, where a signal's present value is read to …
const SCRATCH_AT: usize = 128;
/// … and what the warm-up moves about. Nothing else lies there: nobody waits for the warm-up, so it may come after what
/// the CPU has put into the staging memory, or after another stream's work.
const WARM_UP_AT: u64 = 256;
const STAGING_AT: usize = 4096;

/// Which stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Everything but:
    Small = 0,
    /// Copies that others shall not wait for.
    Bulk = 1,
}

/// Streams of our own in the rank's context, and pinned memory beside it.
pub struct Device {
    context: Arc<Context>,
    /// By way; the second one only where large copies have a stream of their own.
    streams: ManuallyDrop<Vec<Stream>>,
    pinned: ManuallyDrop<Pinned>,
    /// Streams can add to memory there.
    pub can_add: bool,
}

impl Device {
    /// Makes both. Set-up only: allocations may wait for kernels.
    pub fn open(context: Arc<Context>, tuning: &Tuning) -> Result<Self, CudaError> {
        let ways = if tuning.bulk > 0 { 2 } else { 1 };
        Self::open_with(context, ways, STAGING_BYTES)
    }

    /// The same with so many streams, and so many bytes of staging memory, at least 256.
    pub fn open_with(context: Arc<Context>, ways: usize, staging_bytes: u64) -> Result<Self, CudaError> {
        let (streams, pinned) = {
            let _current = context.enter()?;
            let streams = (0..ways).map(|_| Stream::create(context.cuda())).collect::<Result<_, _>>()?;
            let pinned = Pinned::alloc(context.cuda(), STAGING_AT + staging_bytes as usize)?;
            (ManuallyDrop::new(streams), ManuallyDrop::new(pinned))
        };
        let can_add = context.has_stream_add();
        let device = Self { context, streams, pinned, can_add };
        device.warm_up()?;
        Ok(device)
    }

    /// Has the driver load whatever copies and memory operations need before a kernel can be in the way.
    fn warm_up(&self) -> Result<(), CudaError> {
        for &way in &[Way::Small, Way::Bulk][..self.streams.len()] {
            let mut copies = Copies::default();
            let at = |line: u64| self.pinned.device() + WARM_UP_AT + line * 64;
            copies.push(at(0), at(1), 8);
            copies.push(at(2), at(3), 8);
            // SAFETY: inside the pinned memory, which outlives the streams' work (Device::close).
            unsafe { self.launch(way, &copies, &mut [MemOp::write64(at(4), 0)]) }?;
        }
        Ok(())
    }

    /// Where its calls are made.
    pub fn context(&self) -> Arc<Context> {
        self.context.clone()
    }

    /// The device's number.
    pub fn ordinal(&self) -> i32 {
        self.context.device()
    }

    /// Starts copies, then memory operations.
    ///
    /// # Safety
    /// All addresses stay valid until a later flight has raised the flag.
    pub unsafe fn launch(&self, way: Way, copies: &Copies, ops: &mut [MemOp]) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        // SAFETY: passed on.
        unsafe {
            self.streams[way as usize].copy(copies)?;
            self.streams[way as usize].mem_ops(ops)
        }
    }

    /// An error that the GPU hit after a launch.
    pub fn check(&self) -> Result<(), CudaError> {
        let _current = self.context.enter()?;
        self.streams.iter().try_for_each(|s| s.is_done().map(drop))
    }

    /// Whether nothing that was started can still touch memory: all of it is done, or the context is broken.
    pub fn is_idle(&self) -> bool {
        let Ok(_current) = self.context.enter() else { return true };
        self.streams.iter().all(|s| s.is_done().unwrap_or(true))
    }

    /// The number of the last flight that is done.
    #[inline]
    pub fn flag(&self, way: Way) -> u64 {
        // SAFETY: an aligned word of the pinned memory that the GPU writes whole.
        unsafe { AtomicU64::from_ptr(self.pinned.host().add(FLAG_AT[way as usize]).cast()) }.load(Ordering::Acquire)
    }

    /// Where the GPU raises the flag.
    pub fn flag_at(&self, way: Way) -> u64 {
        self.pinned.device() + FLAG_AT[way as usize] as u64
    }

    /// What was read to [`Device::scratch`].
    pub fn scratch_value(&self) -> u64 {
        // SAFETY: as `flag`.
        unsafe { AtomicU64::from_ptr(self.pinned.host().add(SCRATCH_AT).cast()) }.load(Ordering::Acquire)
    }

    /// Where the GPU reads a signal's present value to.
    pub fn scratch(&self) -> u64 {
        self.pinned.device() + SCRATCH_AT as u64
    }

    /// The GPU's address of a byte of the staging memory.
    pub fn staging(&self, offset: u64) -> u64 {
        self.pinned.device() + STAGING_AT as u64 + offset
    }

    /// The CPU's address of it; `offset` is below the size of the staging memory.
    pub fn staging_host(&self, offset: u64) -> *mut u8 {
        debug_assert!((offset as usize) < self.pinned.bytes() - STAGING_AT);
        // SAFETY: inside the pinned memory.
        unsafe { self.pinned.host().add(STAGING_AT + offset as usize) }
    }

    /// Ends it. `idle`: all flights are done; otherwise streams and memory are left to the process, because the GPU may
    /// still write. Waits for the warm-up of a stream that was never used.
    pub fn close(mut self, idle: bool) {
        let end = Instant::now() + DRAIN_WITHIN;
        while idle && !self.is_idle() && Instant::now() < end {
            std::thread::yield_now();
        }
        if !idle || !self.is_idle() {
            return;
        }
        // A context that is gone has taken stream and memory with it.
        if let Ok(_current) = self.context.enter() {
            // SAFETY: dropped once: `self` is consumed and has no drop of its own.
            unsafe {
                ManuallyDrop::drop(&mut self.streams);
                ManuallyDrop::drop(&mut self.pinned);
            }
        }
    }
}
