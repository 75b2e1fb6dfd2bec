//! What the copy kernel has on the GPU: its code, its streams, the memory of its rings. All of it belongs to the
//! application's context, so the thread for that context makes, uses and ends it; who moves bytes only asks for
//! launches.

use super::ring::{self, Ring};
use super::slot::LAUNCH_SLOTS;
use super::{IDLE, PTX, WARP};
use crate::fabric::soft::gpu::app::AppThread;
use crate::memory::gpu::cuda_error;
use crate::sys::sync::Mutex;
use oxygin_ffi::cuda::{Context, CudaError, Kernel, Pinned, Stream};
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a launch waits for the driver to know that the one before in its stream has ended, once that one has said
/// so itself: a kernel's end takes a few microseconds. With something before it in its stream it would wait there for
/// everything that shares the stream's hardware queue.
const ENDED_WITHIN: Duration = Duration::from_micros(100);

/// One launch, as its kernel is told.
#[derive(Clone, Copy)]
pub struct Parameters {
    /// Which launch slot, hence which stream and ring.
    pub slot: usize,
    /// Blocks, and threads of each.
    pub blocks: u32,
    pub threads: u32,
    /// Commands that were written there so far.
    pub posted: u64,
    /// The launch's number there.
    pub number: u64,
    /// Time without a command after which it ends.
    pub idle: Duration,
    /// Time after which it ends in any case.
    pub life: Duration,
}

/// Driver objects; made, used and dropped with the application's context current.
struct Objects {
    kernel: Kernel,
    pinned: Pinned,
    streams: Vec<Stream>,
}

/// Shared by the engine and the thread for the application's context. Never frees anything by itself: `end` does.
pub struct Launcher {
    objects: ManuallyDrop<Mutex<Option<Objects>>>,
    /// The log says that the driver takes no launch for now.
    has_said: AtomicBool,
}

impl Launcher {
    /// Loads it and runs it once in each launch slot, briefly, so that the driver has done what it does at a first
    /// launch. Set-up only: it may wait for kernels. In the application's context. Returns the rings, whose last launch
    /// is number 1.
    pub fn open(context: &Context) -> Result<(Arc<Self>, Vec<Ring>), CudaError> {
        let cuda = context.cuda();
        let kernel = Kernel::load(cuda, PTX, c"oxygin_copy")?;
        // One after the other, for queues of their own.
        let streams = (0..LAUNCH_SLOTS).map(|_| Stream::create(cuda)).collect::<Result<Vec<_>, _>>()?;
        let pinned = Pinned::alloc(cuda, LAUNCH_SLOTS * ring::BYTES)?;
        let host = pinned.host();
        // SAFETY: parts of their own of the zeroed, page-aligned memory, which is freed by `end` alone.
        let rings = (0..LAUNCH_SLOTS).map(|i| unsafe { Ring::new(host.add(i * ring::BYTES)) }).collect();
        let objects = Objects { kernel, pinned, streams };
        for slot in 0..LAUNCH_SLOTS {
            let first =
                Parameters { slot, blocks: 1, threads: WARP, posted: 0, number: 1, idle: IDLE, life: Duration::ZERO };
            // SAFETY: the objects stay until all are gone (`end`), or for ever.
            if let Err(e) = unsafe { objects.launch(first) } {
                // The first ones may run.
                std::mem::forget(objects);
                return Err(e);
            }
        }
        let objects = ManuallyDrop::new(Mutex::new(Some(objects)));
        Ok((Arc::new(Self { objects, has_said: AtomicBool::new(false) }), rings))
    }

    /// The driver has refused a launch: says so, once where it may pass.
    #[cold]
    fn refused(&self, rank: u32, e: &CudaError) -> Fate {
        let may_pass = e.may_pass();
        if !may_pass || !self.has_said.swap(true, Ordering::Relaxed) {
            let why = cuda_error(&format!("the copy kernel on the GPU of rank {rank}"), e);
            let until = if may_pass { " until a launch succeeds" } else { "" };
            log::info!("{}; all transfers go by the stream{until}", why.message());
        }
        match may_pass {
            true => Fate::RefusedForNow,
            false => Fate::Refused,
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
        let end = Instant::now() + within;
        while !objects.streams.iter().all(is_over) && !objects.streams.iter().any(has_failed) && Instant::now() < end {
            std::thread::yield_now();
        }
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

impl Objects {
    /// # Safety
    /// The objects stay until the kernel is gone; what it will be told to touch stays until then, too.
    unsafe fn launch(&self, p: Parameters) -> Result<(), CudaError> {
        let at = self.pinned.device() + (p.slot * ring::BYTES) as u64;
        let [idle, life] = [p.idle, p.life].map(|d| d.as_nanos() as u64);
        let parameters = [at, Ring::words(at), p.posted, p.number, idle, life, p.slot as u64];
        // SAFETY: what copy.ptx says of its parameters, and the caller's promise.
        unsafe { self.kernel.launch(&self.streams[p.slot], p.blocks, p.threads, parameters) }
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
    pub fn post(app: &AppThread, launcher: &Arc<Launcher>, rank: u32, what: Parameters) -> Arc<Self> {
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

    fn serve(&self, launcher: &Launcher, context: &Context, rank: u32, what: Parameters) {
        if !self.turn(Fate::Taken) {
            return;
        }
        let launched = context.enter().and_then(|_current| {
            let objects = launcher.objects.lock();
            let Some(objects) = &*objects else { return Ok(false) };
            if !objects.comes_free(what.slot)? {
                return Ok(false);
            }
            // SAFETY: the objects are freed by `end` alone, on this thread, when all are gone; commands are written
            // only for memory that stays until they are done.
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
