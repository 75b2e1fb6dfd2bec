//! What such a kernel has on the GPU: its code, its streams, the memory through which it talks to the host. All of it
//! belongs to the application's context, so the thread for that context makes, uses and ends it; who moves bytes only
//! asks for launches.

use super::queue_share::{QueueShare, QueueTaker};
use super::LAUNCH_SLOTS;
use crate::fabric::soft::gpu::app::AppThread;
use crate::memory::gpu::cuda_error;
use crate::sys::sync::Mutex;
use crate::sys::wait::until;
use oxygin_ffi::cuda::{Context, CudaError, Kernel, Pinned, Stream};
use std::borrow::Cow;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a launch waits for the driver to know that the one before in its stream has ended, once that one has said
/// so itself: a kernel's end takes a few microseconds. With something before it in its stream it would wait there for
/// everything that shares the stream's hardware queue.
const ENDED_WITHIN: Duration = Duration::from_micros(100);

/// A kernel of ours.
#[derive(Clone)]
pub struct Code {
    /// Its text.
    pub ptx: Cow<'static, CStr>,
    /// Its entry.
    pub entry: &'static CStr,
    /// For the log: "the … kernel".
    pub name: &'static str,
    /// What happens where it cannot be launched, for the log.
    pub without: &'static str,
    /// Bytes of pinned memory that each launch slot has, a multiple of 256.
    pub bytes: usize,
}

/// The pinned memory of a launch slot, zeroed.
#[derive(Clone, Copy)]
pub struct SlotMemory {
    /// For the CPU.
    pub host: *mut u8,
    /// For the kernel.
    pub device: u64,
}

/// One launch.
#[derive(Clone, Debug)]
pub struct Launch {
    /// Which launch slot, hence which stream and memory.
    pub slot: usize,
    /// Blocks, and threads of each.
    pub blocks: u32,
    pub threads: u32,
    /// What the kernel is told.
    pub arguments: Vec<u64>,
}

/// Driver objects; made, used and dropped with the application's context current.
struct Objects {
    kernel: Kernel,
    pinned: Pinned,
    streams: Vec<Stream>,
}

/// Shared by who asks for launches and the thread for the application's context. Never frees anything by itself: `end`
/// does.
pub struct Launcher {
    code: Code,
    objects: ManuallyDrop<Mutex<Option<Objects>>>,
    /// What it may take of the context's hardware queues.
    share: Arc<QueueShare>,
    /// Which launch slot's stream was given a launch, and was not seen to be past it.
    launched: [AtomicBool; LAUNCH_SLOTS],
    /// The log says that the driver takes no launch for now.
    has_said: AtomicBool,
    /// The driver brings no memory to the GPU, and will bring none.
    stays: AtomicBool,
}

impl Launcher {
    /// Loads it and runs it once in each launch slot, as `first` says, briefly, so that the driver has done what it
    /// does at a first launch. Set-up only: it may wait for kernels. In the application's context. Returns the memory
    /// of the launch slots, which is freed by `end` alone.
    pub fn open(
        context: &Context,
        share: Arc<QueueShare>,
        code: Code,
        first: impl Fn(usize, SlotMemory) -> Launch,
    ) -> Result<(Arc<Self>, Vec<SlotMemory>), CudaError> {
        let cuda = context.cuda();
        let kernel = Kernel::load(cuda, &code.ptx, code.entry)?;
        // One after the other, for queues of their own.
        let streams = (0..LAUNCH_SLOTS).map(|_| Stream::create(cuda)).collect::<Result<Vec<_>, _>>()?;
        let pinned = Pinned::alloc(cuda, LAUNCH_SLOTS * code.bytes)?;
        let memory = |i: usize| {
            // SAFETY: inside what was just allocated.
            let host = unsafe { pinned.host().add(i * code.bytes) };
            SlotMemory { host, device: pinned.device() + (i * code.bytes) as u64 }
        };
        let memories: Vec<_> = (0..LAUNCH_SLOTS).map(memory).collect();
        let objects = Objects { kernel, pinned, streams };
        for (slot, memory) in memories.iter().enumerate() {
            // SAFETY: the objects stay until all are gone (`end`), or for ever.
            if let Err(e) = unsafe { objects.launch(first(slot, *memory)) } {
                // The first ones may run.
                std::mem::forget(objects);
                return Err(e);
            }
        }
        let objects = ManuallyDrop::new(Mutex::new(Some(objects)));
        let (has_said, stays) = (AtomicBool::new(false), AtomicBool::new(false));
        let launcher = Arc::new(Self { code, objects, share, launched: Default::default(), has_said, stays });
        launcher.share.join(&launcher);
        Ok((launcher, memories))
    }

    /// The driver has refused a launch: says so, once where it may pass.
    #[cold]
    fn refused(&self, rank: u32, e: &CudaError) -> Fate {
        let may_pass = e.may_pass();
        if !may_pass || !self.has_said.swap(true, Ordering::Relaxed) {
            let why = cuda_error(&format!("the {} kernel on the GPU of rank {rank}", self.code.name), e);
            let until = if may_pass { " until a launch succeeds" } else { "" };
            log::info!("{}; {}{until}", why.message(), self.code.without);
        }
        match may_pass {
            true => Fate::RefusedForNow,
            false => Fate::Refused,
        }
    }

    /// Takes a hardware queue for a launch, if one may be taken.
    fn takes_queue(&self, objects: &Objects, slot: usize) -> bool {
        self.forget_done(objects);
        self.share.take(|| self.launched[slot].store(true, Ordering::Relaxed))
    }

    /// Forgets launches that the driver knows to have ended, or whose context is gone.
    fn forget_done(&self, objects: &Objects) {
        for (launched, stream) in self.launched.iter().zip(&objects.streams) {
            if launched.load(Ordering::Relaxed) && stream.is_done().unwrap_or(true) {
                launched.store(false, Ordering::Relaxed);
            }
        }
    }

    /// Has ranges of managed memory, of so many bytes each, brought to the GPU, by the stream of a launch slot that has
    /// nothing to do; otherwise they stay where they are, as they do on a GPU without room.
    pub fn bring(&self, context: &Context, slot: usize, ranges: &[(u64, u64)]) {
        if self.stays.load(Ordering::Relaxed) {
            return;
        }
        let brought = context.enter().and_then(|_current| {
            let objects = self.objects.lock();
            let Some(stream) = objects.as_ref().map(|objects| &objects.streams[slot]) else { return Ok(()) };
            if !stream.is_done()? {
                return Ok(());
            }
            let mut all = ranges.iter();
            all.try_for_each(|&(at, bytes)| stream.bring(at, bytes as usize, context.device()))
        });
        let Err(e) = brought else { return };
        if !e.may_pass() && !self.stays.swap(true, Ordering::Relaxed) {
            log::info!("queues of device code stay in host memory: {}", cuda_error("managed memory", &e).message());
        }
    }

    /// Ends it, in the application's context: all launches have been told to end. `false`: one may still run, or is
    /// late and will, after `within`; code, rings and the streams of those are left to the process. So they are where
    /// the context has failed: each stream then has the error, whether its own launch has ended or not.
    pub fn end(&self, within: Duration) -> bool {
        let mut guard = self.objects.lock();
        let Some(objects) = guard.take() else { return true };
        let is_over = |s: &Stream| s.is_done().unwrap_or(false);
        let has_failed = |s: &Stream| s.is_done().is_err();
        let all = &objects.streams;
        until(Instant::now() + within, || all.iter().all(is_over) || all.iter().any(has_failed));
        let Objects { kernel, pinned, streams } = objects;
        let (over, late): (Vec<_>, Vec<_>) = streams.into_iter().partition(is_over);
        drop(over);
        let all = late.is_empty();
        if !all {
            std::mem::forget((kernel, pinned, late));
        }
        all
    }
}

impl QueueTaker for Launcher {
    fn taken(&self) -> usize {
        // Who has them locked is about to launch, and may stand in the driver; or ends it.
        if let Some(objects) = self.objects.try_lock() {
            let Some(objects) = &*objects else { return 0 };
            self.forget_done(objects);
        }
        self.launched.iter().filter(|launched| launched.load(Ordering::Relaxed)).count()
    }
}

impl Objects {
    /// # Safety
    /// The arguments are true. The objects stay until the kernel is gone; what it will be told to touch stays until
    /// then, too.
    unsafe fn launch(&self, mut what: Launch) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.kernel.launch(&self.streams[what.slot], what.blocks, what.threads, &mut what.arguments) }
    }

    /// Whether the driver comes to know in time that nothing is in a stream any more.
    fn comes_free(&self, slot: usize) -> Result<bool, CudaError> {
        let end = Instant::now() + ENDED_WITHIN;
        loop {
            // First the clock: a thread that was held up asks once more.
            let is_last = Instant::now() > end;
            if self.streams[slot].is_done()? {
                return Ok(true);
            }
            if is_last {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
    }
}

/// What has become of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Fate {
    /// The thread has not come to it.
    Waits = 0,
    /// The thread is at it, and may stand in the driver.
    Taken = 1,
    /// The driver has the launch.
    Launched = 2,
    /// The stream was not free; nothing was launched.
    NotFree = 3,
    /// The driver took no launch, and will take none.
    Refused = 4,
    /// It was taken back before the thread came to it.
    Cancelled = 5,
    /// The driver took no launch, for something that may pass.
    RefusedForNow = 6,
}

impl Fate {
    /// Nothing is launched, although nobody took it back.
    pub fn is_none(self) -> bool {
        matches!(self, Self::NotFree | Self::Refused | Self::RefusedForNow)
    }

    fn from(number: u32) -> Self {
        match number {
            0 => Self::Waits,
            1 => Self::Taken,
            2 => Self::Launched,
            3 => Self::NotFree,
            4 => Self::Refused,
            6 => Self::RefusedForNow,
            _ => Self::Cancelled,
        }
    }
}

/// A launch that was asked for.
pub struct Request(AtomicU32);

impl Request {
    /// Asks for one. Never waits.
    pub fn post(app: &AppThread, launcher: &Arc<Launcher>, rank: u32, what: Launch) -> Arc<Self> {
        let request = Arc::new(Self(AtomicU32::new(Fate::Waits as u32)));
        let (own, launcher, context) = (request.clone(), launcher.clone(), app.context().clone());
        app.post(move || own.serve(&launcher, &context, rank, what));
        request
    }

    /// What has become of it.
    #[inline]
    pub fn fate(&self) -> Fate {
        Fate::from(self.0.load(Ordering::Acquire))
    }

    /// Takes it back, unless the thread is at it or was. `true`: nothing is launched.
    pub fn cancel(&self) -> bool {
        self.turn(Fate::Cancelled)
    }

    fn turn(&self, to: Fate) -> bool {
        self.0.compare_exchange(Fate::Waits as u32, to as u32, Ordering::AcqRel, Ordering::Acquire).is_ok()
    }

    fn serve(&self, launcher: &Launcher, context: &Context, rank: u32, what: Launch) {
        if !self.turn(Fate::Taken) {
            return;
        }
        let launched = context.enter().and_then(|_current| {
            let objects = launcher.objects.lock();
            let Some(objects) = &*objects else { return Ok(false) };
            if !objects.comes_free(what.slot)? || !launcher.takes_queue(objects, what.slot) {
                return Ok(false);
            }
            // SAFETY: the objects are freed by `end` alone, on this thread, when all are gone; a kernel is told only of
            // memory that stays until it is done with it.
            unsafe { objects.launch(what) }.map(|()| true)
        });
        let fate = match launched {
            Ok(true) => Fate::Launched,
            Ok(false) => Fate::NotFree,
            Err(e) => launcher.refused(rank, &e),
        };
        self.0.store(fate as u32, Ordering::Release);
    }
}
