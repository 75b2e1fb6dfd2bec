//! What such a kernel has on the GPU: its code, the memory through which it talks to the host, its part of the streams.
//! All of it belongs to the application's context, so the thread for that context makes, uses and ends it; who moves
//! bytes only asks for launches.

use super::streams::Member;
use super::LAUNCH_SLOTS;
use crate::fabric::soft::gpu::app::AppThread;
use crate::memory::gpu::cuda_error;
use crate::sys::sync::Mutex;
use crate::sys::wait::until;
use oxygin_ffi::cuda::{Context, CudaError, Kernel, Pinned};
use std::borrow::Cow;
use std::ffi::CStr;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a launch waits for the driver to know that the one before in its launch slot has ended, once that one has
/// said so itself: a kernel's end takes a few microseconds. With something before it in its stream a launch would wait
/// there for everything that shares the stream's hardware queue.
const ENDED_WITHIN: Duration = Duration::from_micros(100);
/// The same of the first launches, which are made at set-up alone, where all streams have one.
const FREE_AT_SET_UP_WITHIN: Duration = Duration::from_secs(1);

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
    /// Which launch slot, hence which memory. The one before there has ended, as far as that has said so itself.
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
    /// The launch slots' memory.
    _pinned: Pinned,
}

/// Shared by who asks for launches and the thread for the application's context. Never frees anything by itself: `end`
/// does.
pub struct Launcher {
    code: Code,
    objects: ManuallyDrop<Mutex<Option<Objects>>>,
    streams: Member,
    /// The log says that the driver takes no launch for now.
    has_said: AtomicBool,
    /// The driver brings no memory to the GPU, and will bring none.
    stays: AtomicBool,
}

/// A kernel that can be launched, its launch slots' memory, and in how many of them it was run once, from the first on.
pub type Opened = (Arc<Launcher>, Vec<SlotMemory>, usize);

impl Launcher {
    /// Loads it and runs it once for each launch slot, as `first` says, briefly, so that the driver has done what it
    /// does at a first launch. Set-up only: it may wait for kernels. In the application's context, which has so many
    /// hardware queues. Where launches of others, which wait for room on the GPU, have all streams, or the driver
    /// refuses one for something that may pass, the rest are not run: the driver does what it does when they are
    /// launched. The launch slots' memory is freed by `end` alone.
    pub fn open(
        context: &Context,
        hardware_queues: u32,
        code: Code,
        first: impl Fn(usize, SlotMemory) -> Launch,
    ) -> Result<Opened, CudaError> {
        let cuda = context.cuda();
        let kernel = Kernel::load(cuda, &code.ptx, code.entry)?;
        let pinned = Pinned::alloc(cuda, LAUNCH_SLOTS * code.bytes)?;
        let memory = |i: usize| {
            // SAFETY: inside what was just allocated.
            let host = unsafe { pinned.host().add(i * code.bytes) };
            SlotMemory { host, device: pinned.device() + (i * code.bytes) as u64 }
        };
        let memories: Vec<_> = (0..LAUNCH_SLOTS).map(memory).collect();
        let streams = Member::join(context, hardware_queues)?;
        // From here on `end` alone frees them: a launch may need them.
        let objects = ManuallyDrop::new(Mutex::new(Some(Objects { kernel, _pinned: pinned })));
        let (has_said, stays) = (AtomicBool::new(false), AtomicBool::new(false));
        let launcher = Self { code, objects, streams, has_said, stays };
        let mut run = 0;
        for (slot, memory) in memories.iter().enumerate() {
            match launcher.launch(first(slot, *memory), FREE_AT_SET_UP_WITHIN) {
                Ok(true) => run += 1,
                Ok(false) => break,
                Err(e) if e.may_pass() => break,
                Err(e) => {
                    // The first one may run still.
                    launcher.end(FREE_AT_SET_UP_WITHIN);
                    return Err(e);
                }
            }
        }
        Ok((Arc::new(launcher), memories, run))
    }

    /// Launches it in the first stream that is free within so long, with the context current. `false`: none was, or the
    /// end has come; nothing is launched.
    fn launch(&self, mut what: Launch, within: Duration) -> Result<bool, CudaError> {
        let objects = self.objects.lock();
        let Some(Objects { kernel, .. }) = &*objects else { return Ok(false) };
        // SAFETY: the arguments are true. `end` alone frees the objects, when all launches are gone, or leaves them for
        // ever; a kernel is told only of memory that stays until it is done with it.
        self.streams.launch(what.slot, within, |stream| unsafe {
            kernel.launch(stream, what.blocks, what.threads, &mut what.arguments)
        })
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

    /// The launch in a launch slot is late: its stream comes last from here on.
    pub fn put_stream_last(&self, slot: usize) {
        self.streams.put_last(slot);
    }

    /// Has ranges of managed memory, of so many bytes each, brought to the GPU; they stay where they are on a GPU
    /// without room.
    pub fn bring(&self, context: &Context, ranges: &[(u64, u64)]) {
        let Some(stream) = self.streams.bringing() else { return };
        if self.stays.load(Ordering::Relaxed) {
            return;
        }
        let bring = |&(at, bytes): &(u64, u64)| stream.bring(at, bytes as usize, context.device());
        let brought = context.enter().and_then(|_current| ranges.iter().try_for_each(bring));
        let Err(e) = brought else { return };
        if !e.may_pass() && !self.stays.swap(true, Ordering::Relaxed) {
            log::info!("queues of device code stay in host memory: {}", cuda_error("managed memory", &e).message());
        }
    }

    /// Ends it, in the application's context: all launches have been told to end. `false`: one may still run, or is
    /// late and will, after `within`; code and memory are left to the process. So they are where the context has
    /// failed: each stream then has the error, whether its own launch has ended or not.
    pub fn end(&self, within: Duration) -> bool {
        let Some(objects) = self.objects.lock().take() else { return true };
        let are_done = || self.streams.are_done();
        until(Instant::now() + within, || are_done().unwrap_or(true));
        let all = are_done().unwrap_or(false);
        if !all {
            std::mem::forget(objects);
        }
        self.streams.leave();
        all
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
    /// No stream was free; nothing was launched.
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
        let launched = context.enter().and_then(|_current| launcher.launch(what, ENDED_WITHIN));
        let fate = match launched {
            Ok(true) => Fate::Launched,
            Ok(false) => Fate::NotFree,
            Err(e) => launcher.refused(rank, &e),
        };
        self.0.store(fate as u32, Ordering::Release);
    }
}
