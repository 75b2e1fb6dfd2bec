//! One rank's streams and pinned memory on its GPU.

use super::app::AppThread;
use super::near::{NearGroups, NearStream};
use super::private_context::{forget, private_context, PRIVATE_CONTEXT_MIB};
use super::windows::READ_AT_ONCE;
use super::DRAIN_WITHIN;
use crate::config::GpuIssue;
use crate::sys::wait::{until, Wait};
use oxygin_ffi::cuda::{Context, Copies, CudaError, MemOp, Pinned, Stream, Words, CUDA_ERROR_NOT_READY};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// Bytes of pinned memory for data that comes from or goes to memory which is not pinned: two submissions of five
/// pieces each.
pub const STAGING_BYTES: u64 = 12 << 20;
/// The first bytes of the pinned memory: for each way, on a line of its own, which submission is done.
const FLAG_AT: [usize; 2] = [0, 64];
/// What the warm-up copies. Nothing else lies there: nobody waits for the warm-up, so it may come after what
/// the CPU has put into the staging memory, or after another stream's work.
const WARM_UP_AT: u64 = 256;
/// Where a signal's present value is read to, and those of others around it: [`READ_AT_ONCE`] bytes.
const SCRATCH_AT: usize = 4096;
const STAGING_AT: usize = SCRATCH_AT + READ_AT_ONCE as usize;
/// Words of GPU memory, each its own number, from which submissions' flags are copied. More than submissions can be in
/// flight at once.
const NUMBERS: u64 = 1024;

/// Which stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyWay {
    /// The one for everything but bulk copies.
    Small = 0,
    /// The bulk stream: copies that others shall not wait for.
    Bulk = 1,
}

/// Which streams a rank has.
pub struct Streams {
    /// One for each of the first so many of [`CopyWay`].
    pub ways: usize,
    /// One more for copies within the GPU, in a private context.
    pub near: bool,
}

/// What a submission does, in this order.
pub struct Load<'a> {
    /// Copies from GPU memory, to other GPU memory or to pinned memory.
    pub copies: &'a Copies,
    /// Copies within the GPU by a stream of their own and this one.
    pub near: Option<&'a NearGroups>,
    /// Copies from pinned memory to GPU memory.
    pub into: &'a Copies,
    /// Stores and additions.
    pub ops: &'a mut [MemOp],
}

/// What lives in the context where the streams are.
struct Machine {
    /// By way; the second one only where bulk copies have a stream of their own.
    streams: Vec<Stream>,
    /// In a private context, for those that copy within the GPU.
    near: Option<NearStream>,
    pinned: Pinned,
    numbers: Words,
}

impl Machine {
    /// All streams.
    fn all(&self) -> impl Iterator<Item = &Stream> {
        self.streams.iter().chain(self.near.iter().map(NearStream::stream))
    }
}

/// Streams for one rank, and pinned memory beside it.
///
/// The streams are in a private context, and everything but additions, single bytes and large copies within the GPU is
/// done by copy engines there, so that no kernel of the application can hold it up.
pub struct Device {
    /// Who makes calls in the application's context, and knows of its faults.
    app: Arc<AppThread>,
    /// Where the streams are; the application's only if there could be no other.
    home: ManuallyDrop<Arc<Context>>,
    machine: ManuallyDrop<Machine>,
    /// Number of the last submission of each way.
    started: [AtomicU64; 2],
    /// Streams can add to memory there.
    pub can_add: bool,
}

impl Device {
    /// Makes all of it. Set-up only: allocations may wait for kernels.
    pub fn open(app: &Arc<AppThread>, tuning: &GpuIssue) -> Result<Self, CudaError> {
        let ways = if tuning.bulk > 0 { 2 } else { 1 };
        Self::open_with(app, tuning.own, Streams { ways, near: true }, STAGING_BYTES)
    }

    /// The same with such streams, and so many bytes of staging memory, at least those of the table of numbers; `own`:
    /// in a private context, if the driver makes one.
    pub fn open_with(app: &Arc<AppThread>, own: bool, has: Streams, staging_bytes: u64) -> Result<Self, CudaError> {
        let context = app.context();
        let cuda = context.cuda().clone();
        let home = match own.then(|| private_context(&cuda, context.device())) {
            Some(Ok(home)) => home,
            Some(Err(e)) => {
                log::warn!(
                    "GPU {}: no private context ({e}); if the application has more queued behind a kernel that waits \
                     for a transfer, neither may come to an end: free {} MiB of the GPU's memory, or set \
                     CUDA_DEVICE_MAX_CONNECTIONS=32",
                    context.device(),
                    PRIVATE_CONTEXT_MIB
                );
                context.clone()
            }
            None => context.clone(),
        };
        let machine = {
            let _current = home.enter()?;
            let streams = (0..has.ways).map(|_| Stream::create(&cuda)).collect::<Result<_, _>>()?;
            let near = (has.near && is_private(app, &home)).then(|| NearStream::create(&cuda)).transpose()?;
            let pinned = Pinned::alloc(&cuda, STAGING_AT + staging_bytes as usize)?;
            Machine { streams, near, pinned, numbers: Words::alloc(&cuda, NUMBERS as usize * 8)? }
        };
        let can_add = context.has_stream_add();
        let device = Self {
            app: app.clone(),
            home: ManuallyDrop::new(home),
            machine: ManuallyDrop::new(machine),
            started: Default::default(),
            can_add,
        };
        device.fill_numbers()?;
        device.warm_up()?;
        Ok(device)
    }

    /// Whether its streams are in a private context.
    pub fn has_private_context(&self) -> bool {
        is_private(&self.app, &self.home)
    }

    /// Writes the table of numbers. Set-up only: waits for it.
    fn fill_numbers(&self) -> Result<(), CudaError> {
        for i in 0..NUMBERS {
            // SAFETY: inside the staging memory, which nobody else uses yet.
            unsafe { self.staging_host(8 * i).cast::<u64>().write(i) };
        }
        let mut copies = Copies::default();
        copies.push(self.machine.numbers.at(), self.staging(0), NUMBERS as usize * 8);
        let _current = self.home.enter()?;
        let stream = &self.machine.streams[0];
        // SAFETY: both outlive the copy, which is waited for; after a failure they are never freed.
        unsafe { stream.copy_in(&copies) }?;
        let (end, wait) = (Instant::now() + DRAIN_WITHIN, Wait::begin());
        while !stream.is_done()? {
            if Instant::now() > end {
                let name = format!("no end after {} s", DRAIN_WITHIN.as_secs());
                return Err(CudaError { call: "a first copy to the GPU", code: CUDA_ERROR_NOT_READY, name });
            }
            wait.rest();
        }
        Ok(())
    }

    /// Has the driver load whatever copies and memory operations need before a kernel can be in the way.
    fn warm_up(&self) -> Result<(), CudaError> {
        let _current = self.home.enter()?;
        for stream in &self.machine.streams {
            let (mut copies, mut into) = (Copies::default(), Copies::default());
            let at = |line: u64| self.machine.pinned.device() + WARM_UP_AT + line * 64;
            copies.push(at(0), self.machine.numbers.at(), 8);
            copies.push(at(1), self.machine.numbers.at() + 8, 8);
            // Back where it was.
            into.push(self.machine.numbers.at(), at(0), 8);
            // SAFETY: inside memory that outlives the streams' work (Device::close).
            unsafe {
                stream.copy(&copies)?;
                stream.copy_in(&into)?;
                stream.mem_ops(&mut [MemOp::write64(at(4), 0)])?;
            }
        }
        let Some(near) = &self.machine.near else { return Ok(()) };
        let (numbers, by) = (self.machine.numbers.at(), self.machine.pinned.device() + WARM_UP_AT);
        let mut groups = NearGroups::default();
        groups.push(numbers + 8, numbers + 8, 8, by + 5 * 64);
        // SAFETY: as above.
        unsafe { near.start(&self.machine.streams[0], &groups) }
    }

    /// Whether copies within the GPU have a stream.
    pub fn has_near_stream(&self) -> bool {
        self.machine.near.is_some()
    }

    /// Who makes calls in the application's context.
    pub fn app(&self) -> &Arc<AppThread> {
        &self.app
    }

    /// Where its own calls are made.
    pub fn home(&self) -> &Arc<Context> {
        &self.home
    }

    /// The device's number.
    pub fn ordinal(&self) -> i32 {
        self.home.device()
    }

    /// Starts submission `number`, one more than the way's last. Once all of it is done the flag says so.
    ///
    /// # Safety
    /// All addresses stay valid until the flag is there.
    pub unsafe fn launch(&self, way: CopyWay, number: u64, load: Load<'_>) -> Result<(), CudaError> {
        // What a context that has failed, or is gone, had begun is not to be built upon.
        self.app.check()?;
        self.app.stay_awake();
        let _current = self.home.enter()?;
        let (m, at) = (&self.machine, way as usize);
        let stream = &m.streams[at];
        self.started[at].store(number, Ordering::Release);
        let mut go = || {
            // SAFETY: passed on; flag and number are our own.
            unsafe {
                stream.copy(load.copies)?;
                if let (Some(near), Some(groups)) = (&m.near, load.near) {
                    near.start(stream, groups)?;
                }
                stream.copy_in(load.into)?;
                stream.mem_ops(load.ops)?;
                stream.copy_one(m.pinned.device() + FLAG_AT[at] as u64, m.numbers.at() + number % NUMBERS * 8, 8)
            }
        };
        // What is more than a refusal of this call shows once more.
        go().inspect_err(|_| drop(self.check_streams()))
    }

    /// An error that the GPU hit after a launch; one of the application's context shows some time after it was asked
    /// for.
    pub fn check(&self) -> Result<(), CudaError> {
        self.check_app()?;
        self.check_streams()
    }

    /// The same of the application's context.
    pub fn check_app(&self) -> Result<(), CudaError> {
        self.app.look();
        self.app.check()
    }

    /// The same of the streams. Others that come are not to have a context of ours that has failed.
    pub fn check_streams(&self) -> Result<(), CudaError> {
        let current = self.home.enter();
        let checked = current.and_then(|_current| self.machine.all().try_for_each(|s| s.is_done().map(drop)));
        checked.inspect_err(|_| forget(&self.home))
    }

    /// Whether nothing that was started can still touch memory: all of it is done, or the context is broken.
    pub fn is_idle(&self) -> bool {
        let Ok(_current) = self.home.enter() else { return true };
        self.machine.all().all(|s| s.is_done().unwrap_or(true))
    }

    /// The number of the last submission that is done.
    #[inline]
    pub fn flag(&self, way: CopyWay) -> u64 {
        let at = way as usize;
        // SAFETY: an aligned word of the pinned memory that the GPU writes whole.
        let low =
            unsafe { AtomicU64::from_ptr(self.machine.pinned.host().add(FLAG_AT[at]).cast()) }.load(Ordering::Acquire);
        // The last number that ends like this.
        let started = self.started[at].load(Ordering::Acquire);
        started.saturating_sub(started.wrapping_sub(low) % NUMBERS)
    }

    /// What was read to [`Device::scratch`].
    pub fn scratch_value(&self) -> u64 {
        // SAFETY: as `flag`.
        unsafe { AtomicU64::from_ptr(self.machine.pinned.host().add(SCRATCH_AT).cast()) }.load(Ordering::Acquire)
    }

    /// The first `n` words that were read there, at most [`READ_AT_ONCE`] bytes.
    pub fn scratch_values(&self, n: usize) -> Vec<u64> {
        debug_assert!(8 * n as u64 <= READ_AT_ONCE);
        // SAFETY: as `flag`, of the words behind it that are for this.
        let word = |i: usize| unsafe { AtomicU64::from_ptr(self.machine.pinned.host().add(SCRATCH_AT + 8 * i).cast()) };
        (0..n).map(|i| word(i).load(Ordering::Acquire)).collect()
    }

    /// Where the GPU reads a signal's present value to, and those of others around it.
    pub fn scratch(&self) -> u64 {
        self.machine.pinned.device() + SCRATCH_AT as u64
    }

    /// The GPU's address of a byte of the staging memory.
    pub fn staging(&self, offset: u64) -> u64 {
        self.machine.pinned.device() + STAGING_AT as u64 + offset
    }

    /// The CPU's address of it; `offset` is below the size of the staging memory.
    pub fn staging_host(&self, offset: u64) -> *mut u8 {
        debug_assert!((offset as usize) < self.machine.pinned.bytes() - STAGING_AT);
        // SAFETY: inside the pinned memory.
        unsafe { self.machine.pinned.host().add(STAGING_AT + offset as usize) }
    }

    /// Ends it, and then the thread for the application's context. `idle` as for [`Device::close`].
    pub fn close_with_app(self, idle: bool) {
        let app = self.app().clone();
        self.close(idle);
        app.end();
    }

    /// Ends it. `idle`: all submissions are done; otherwise everything is left to the process, because the GPU may
    /// still write. So it is where a stream has failed: how far its work has come, also the warm-up of a stream that
    /// was never used, nobody knows. Waits for the warm-up.
    pub fn close(mut self, idle: bool) {
        if !idle || !until(Instant::now() + DRAIN_WITHIN, || self.is_idle()) {
            return;
        }
        // A context that is gone has taken all of its own with it.
        if let Ok(_current) = self.home.enter() {
            if self.check_streams().is_err() {
                return;
            }
            // SAFETY: dropped once: `self` is consumed and has no drop of its own. Nothing is in flight.
            unsafe { ManuallyDrop::drop(&mut self.machine) };
        }
        // SAFETY: as above; nothing of ours lives in it any more.
        unsafe { ManuallyDrop::drop(&mut self.home) };
    }
}

/// Whether a context is not the application's.
fn is_private(app: &AppThread, home: &Arc<Context>) -> bool {
    !Arc::ptr_eq(app.context(), home)
}
