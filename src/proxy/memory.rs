//! Memory that device code and the engine share: queues, indices, counters; and device code's own.
//!
//! Where the calling thread has a CUDA context, what the CPU reads or writes is pinned host memory and what only device
//! code touches is GPU memory. Elsewhere all is host memory, so that emulated device code can run on CPUs.
//! docs/gpu/places.md says what was measured of the places.

use crate::error::{Error, Result};
use crate::memory::gpu::{self, cuda_error, GpuMemory};
use crate::proxy::spares::{Remains, SharedMemory, SharedUser};
use crate::sys::pages::Pages;
use crate::sys::sync::Mutex;
use oxygin_ffi::cuda::{Allocation, Context, Copies, Cuda, CudaError, Managed, Mapped, Stream};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a copy of a piece at set-up may take. It has a stream of its own, but the hardware queue behind that may be
/// one that an application's kernel holds.
const COPY_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of pinned memory by which GPU memory is filled at set-up, piece by piece: what a set takes of the GPU is not
/// taken of the host as well.
const PIECE_BYTES: usize = 1 << 20;

/// This process has made its first managed memory in time.
static HAS_MANAGED: AtomicBool = AtomicBool::new(false);
/// The GPUs on which [`Memory::make_first_managed`] has been called.
static MADE_ON: Mutex<Vec<i32>> = Mutex::new(Vec::new());

/// The calling thread's; `None`: it has none, or there is no driver.
fn current_context() -> std::result::Result<Option<Context>, CudaError> {
    match Cuda::load() {
        Ok(cuda) if cuda.init().is_ok() => Cuda::current_context(&cuda),
        _ => Ok(None),
    }
}

/// A range that both sides see.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// For the CPU.
    pub cpu: NonNull<u8>,
    /// For device code.
    pub device: u64,
    /// It may be brought to the GPU ([`Memory::queues`]).
    pub is_managed: bool,
}

impl Block {
    /// `bytes` further on.
    ///
    /// # Safety
    /// That is inside the block.
    pub unsafe fn at(self, bytes: usize) -> Self {
        // SAFETY: inside (caller).
        Self { cpu: unsafe { self.cpu.add(bytes) }, device: self.device + bytes as u64, ..self }
    }
}

/// What was allocated for a set of contexts; freed by its drop, when nobody uses it any more.
pub struct Memory {
    /// Of the thread that made it; `None`: all is host memory.
    context: Option<Arc<Context>>,
    /// Of the same context.
    user: Option<SharedUser>,
    pages: Vec<Pages>,
    with_gpu: Vec<SharedMemory>,
    mapped: Vec<Mapped>,
    /// None before GPU memory is filled for the first time.
    filler: Mutex<Option<Filler>>,
    /// How long a copy of a piece may take.
    patience: Duration,
    /// Bytes that [`Memory::shared`] gave.
    shared: usize,
    /// Kernels of the application may outlive it.
    has_kernels: bool,
}

impl Memory {
    /// None yet. The calling thread's CUDA context, if it has one, is used for all that follows.
    pub fn here() -> Result<Self> {
        let context = current_context().map_err(|e| cuda_error("createContext", &e))?;
        Ok(Self::of(context.map(Arc::new)))
    }

    /// Makes managed memory in the calling thread's CUDA context, if it has one, and gives it back, for a process that
    /// is to have queues there later. With driver 580 every step of NCCL EP's low-latency kernels took 30 µs more,
    /// without this library as well, once a process had made its first managed memory behind NCCL's communicator, freed
    /// or not; and nothing more where it had done so before (docs/gpu/places.md has the figures). So `init` of a table,
    /// which NCCL calls early in making a communicator, is the time for it, and where that has made none there is none
    /// later ([`Memory::may_be_managed`]). May wait for kernels: once on each GPU, as kernels of communicators that are
    /// there may wait for the one that is being made. What fails is no loss: queues are in pinned memory then.
    pub fn make_first_managed() {
        let Ok(Some(context)) = current_context() else { return };
        let (gpu, mut made_on) = (context.device(), MADE_ON.lock());
        if made_on.contains(&gpu) {
            return;
        }
        let made = Managed::alloc(context.cuda(), gpu, 1);
        if made.is_ok() {
            made_on.push(gpu);
            HAS_MANAGED.store(true, Ordering::Relaxed);
        }
        drop(made_on);
        drop(made);
    }

    /// Whether [`Memory::make_first_managed`] has made some in this process.
    pub fn may_be_managed() -> bool {
        HAS_MANAGED.load(Ordering::Relaxed)
    }

    fn of(context: Option<Arc<Context>>) -> Self {
        let (pages, with_gpu, mapped) = (Vec::new(), Vec::new(), Vec::new());
        let (user, filler) = (context.as_ref().map(SharedUser::new), Mutex::new(None));
        Self { context, user, pages, with_gpu, mapped, filler, patience: COPY_LIMIT, shared: 0, has_kernels: false }
    }

    /// Has a copy of contents fail after so long: tests cannot wait as long as programs do.
    pub fn set_patience(&mut self, patience: Duration) {
        self.patience = patience;
    }

    /// It is never freed: somebody may still be at it.
    pub fn keep(self: &Arc<Self>) {
        if let Some(user) = &self.user {
            user.leave();
        }
        std::mem::forget(self.clone());
    }

    /// Nobody but kernels of the application is at it any more: it is freed behind these, without a wait here, unless
    /// somebody else has it as well.
    pub fn leave_to_kernels(self: Arc<Self>) {
        if let Some(mut memory) = Arc::into_inner(self) {
            memory.has_kernels = true;
        }
    }

    /// Bytes that the CPU and device code share: pinned or managed memory, where there is a GPU.
    pub fn shared_bytes(&self) -> usize {
        self.shared
    }

    /// The GPU's address on the PCI bus; `None`: there is none.
    pub fn pci_address(&self) -> Option<String> {
        let context = self.context.as_ref()?;
        context.cuda().pci_address(context.device())
    }

    /// The CUDA context in which it is; `None`: it is host memory.
    pub fn context(&self) -> Option<&Arc<Context>> {
        self.context.as_ref()
    }

    /// Whether device code runs on a GPU.
    pub fn is_on_gpu(&self) -> bool {
        self.context.is_some()
    }

    /// What [`gpu::inspect`] finds of device code's own memory; `None` where that is host memory.
    pub fn inspect(&self, base: u64, len: u64, never_reset: bool) -> Result<Option<GpuMemory>> {
        if self.is_on_gpu() {
            return gpu::inspect(base, len, never_reset);
        }
        Ok(None)
    }

    /// Zeroed memory that the CPU and device code use, on pages of its own: pinned, where there is a GPU.
    pub fn shared(&mut self, bytes: usize) -> Result<Block> {
        self.shared_by(bytes, SharedUser::alloc)
    }

    /// The same for queues. `is_managed`: as managed memory, where the driver has such. It lies in host memory as well,
    /// and may be brought to the GPU for as long as a kernel of ours reads it in the CPU's place.
    pub fn queues(&mut self, bytes: usize, is_managed: bool) -> Result<Block> {
        match is_managed {
            true => self.shared_by(bytes, SharedUser::alloc_managed),
            false => self.shared(bytes),
        }
    }

    fn shared_by(
        &mut self,
        bytes: usize,
        alloc: impl FnOnce(&SharedUser, usize) -> std::result::Result<SharedMemory, CudaError>,
    ) -> Result<Block> {
        self.shared += bytes;
        let (Some(context), Some(user)) = (&self.context, &self.user) else { return self.host(bytes) };
        let made = (|| {
            let _current = context.enter()?;
            alloc(user, bytes)
        })()
        .map_err(|e| cuda_error("memory for device queues", &e))?;
        let (cpu, device) = (NonNull::new(made.host()).ok_or_else(null)?, made.device());
        let block = Block { cpu, device, is_managed: made.is_managed() };
        self.with_gpu.push(made);
        Ok(block)
    }

    /// Zeroed host memory that device code has nothing to do with, on pages of its own.
    pub fn host(&mut self, bytes: usize) -> Result<Block> {
        let pages = Pages::new(bytes)
            .map_err(|e| Error::system(format!("no memory for device queues ({bytes} bytes): {e}")))?;
        let cpu = pages.as_ptr().cast::<u8>();
        self.pages.push(pages);
        Ok(Block { cpu, device: cpu.as_ptr() as u64, is_managed: false })
    }

    /// Memory for device code alone, with these contents, on pages of its own. Returns its address there.
    pub fn device(&mut self, contents: &[u8]) -> Result<u64> {
        self.filled(contents.len(), copies_of(contents))
    }

    /// The same, zeroed.
    pub fn zeroed(&mut self, bytes: usize) -> Result<u64> {
        self.filled(bytes, |_, _| ())
    }

    /// Lets kernels on other GPUs of this process load from and store to what [`Memory::zeroed`] and the like made
    /// last.
    pub fn open_to_peers(&self) {
        if let (Some(context), Some(last)) = (&self.context, self.mapped.last()) {
            last.open_to_peers(context.device());
        }
    }

    /// The same, with the contents that `fill` gives it: it is called with each piece in turn, which is zeroed, and
    /// with where that begins. Pieces begin at multiples of 64 bytes.
    pub fn filled(&mut self, bytes: usize, mut fill: impl FnMut(usize, &mut [u8])) -> Result<u64> {
        let Some(context) = &self.context else {
            let block = self.host(bytes)?;
            // SAFETY: that many bytes were just made, and nobody else has them.
            fill(0, unsafe { std::slice::from_raw_parts_mut(block.cpu.as_ptr(), bytes) });
            return Ok(block.device);
        };
        let what = "GPU memory for device queues";
        let made = (|| {
            let (allocation, bytes) = Allocation::create(context.cuda(), context.device(), bytes)?;
            Mapped::new(context.cuda(), &[(allocation, bytes)], context.device())
        })()
        .map_err(|e| cuda_error(what, &e))?;
        let at = made.base();
        // Before it is filled: a copy that is late writes there when its time is over.
        self.mapped.push(made);
        self.fill_gpu(at, bytes, fill)?;
        Ok(at)
    }

    /// Writes contents anew into what [`Memory::device`] returned, or a part of it.
    ///
    /// # Safety
    /// They lie inside it, and nobody reads or writes there meanwhile.
    pub unsafe fn write_device(&self, at: u64, contents: &[u8]) -> Result<()> {
        if self.is_on_gpu() {
            return self.fill_gpu(at, contents.len(), copies_of(contents));
        }
        // SAFETY: host memory, of this many bytes, which nobody else uses (caller).
        unsafe { (at as *mut u8).copy_from_nonoverlapping(contents.as_ptr(), contents.len()) };
        Ok(())
    }

    /// Fills GPU memory with what `fill` writes into each piece, waiting for each.
    fn fill_gpu(&self, at: u64, bytes: usize, mut fill: impl FnMut(usize, &mut [u8])) -> Result<()> {
        let what = "a copy to device queues";
        let failed = |e| cuda_error(what, &e);
        let (Some(context), Some(user)) = (&self.context, &self.user) else { return Ok(()) };
        let _current = context.enter().map_err(failed)?;
        let mut filler = self.filler.lock();
        let filler = match &mut *filler {
            Some(filler) => filler,
            none => none.insert(Filler::new(user).map_err(failed)?),
        };
        let Filler { staging, stream: kept } = filler;
        let stream = match &mut *kept {
            Some(late) => late,
            none => none.insert(Stream::create(context.cuda()).map_err(failed)?),
        };
        for begin in (0..bytes).step_by(PIECE_BYTES) {
            let len = PIECE_BYTES.min(bytes - begin);
            // The copy before may be late, which another call gave up.
            let has_ended = has_ended(stream, self.patience).map_err(failed)? && {
                // SAFETY: that many bytes were asked for; the copy before has ended, so that nobody else has them.
                let piece = unsafe { std::slice::from_raw_parts_mut(staging.host(), len) };
                piece.fill(0);
                fill(begin, piece);
                let mut copies = Copies::default();
                copies.push(at + begin as u64, staging.device(), len);
                // SAFETY: both ends stay until the stream is done, or for ever.
                unsafe { stream.copy_in(&copies) }.map_err(failed)?;
                has_ended(stream, self.patience).map_err(failed)?
            };
            if !has_ended {
                return Err(Error::cuda(format!(
                    "{what} has not ended for {:?}: a kernel of the application holds the GPU; make device \
                     communicators while none waits for another rank",
                    self.patience
                )));
            }
        }
        *kept = None;
        Ok(())
    }
}

/// By what GPU memory is filled. It is kept as long as that: pinned memory is given back behind the application's
/// kernels, and a copy that is late still reads it.
struct Filler {
    staging: SharedMemory,
    /// None but where a copy is late: streams share hardware queues with the application's.
    stream: Option<Stream>,
}

impl Filler {
    /// In the current context.
    fn new(user: &SharedUser) -> std::result::Result<Self, CudaError> {
        Ok(Self { staging: user.alloc(PIECE_BYTES)?, stream: None })
    }

    /// Whether a copy is under way. A stream that has failed does nothing more.
    fn is_late(&self) -> bool {
        self.stream.as_ref().is_some_and(|stream| stream.is_done() == Ok(false))
    }
}

/// Waits for the copy that was started last, that long at most; whether it has ended.
fn has_ended(stream: &Stream, patience: Duration) -> std::result::Result<bool, CudaError> {
    let end = Instant::now() + patience;
    while !stream.is_done()? {
        if Instant::now() > end {
            return Ok(false);
        }
        std::thread::sleep(Duration::from_micros(20));
    }
    Ok(true)
}

#[cold]
fn null() -> Error {
    Error::internal("the driver returned no memory")
}

/// Gives each piece its part of the contents.
fn copies_of(contents: &[u8]) -> impl FnMut(usize, &mut [u8]) + '_ {
    |begin, piece| piece.copy_from_slice(&contents[begin..][..piece.len()])
}

/// Zeros in host memory; an error where there is not so much.
pub fn zeros(bytes: usize) -> Result<Vec<u8>> {
    let mut zeros = Vec::new();
    zeros
        .try_reserve_exact(bytes)
        .map_err(|e| Error::system(format!("no memory for what device code is given ({bytes} bytes): {e}")))?;
    zeros.resize(bytes, 0);
    Ok(zeros)
}

impl Drop for Memory {
    fn drop(&mut self) {
        let (Some(context), Some(user)) = (&self.context, self.user.take()) else { return };
        let (mut with_gpu, mapped) = (std::mem::take(&mut self.with_gpu), std::mem::take(&mut self.mapped));
        let filler = self.filler.lock().take();
        if self.has_kernels {
            match filler {
                // A copy has failed, or is late: both its ends stay.
                Some(Filler { stream: Some(_), .. }) => std::mem::forget((filler, mapped, with_gpu)),
                filler => {
                    with_gpu.extend(filler.map(|filler| filler.staging));
                    user.leave_behind(Remains::new(with_gpu, mapped));
                }
            }
            return;
        }
        // Where it cannot be entered, it has been destroyed, and its memory with it.
        let current = context.enter();
        // A copy that is late needs both its ends, and to give pinned memory back waits for the kernel that it waits
        // for.
        let is_at_rest = || !filler.as_ref().is_some_and(Filler::is_late);
        match current.is_ok() && is_at_rest() {
            true => {
                drop(mapped);
                if let Some(Filler { staging, stream }) = filler {
                    drop(stream);
                    with_gpu.push(staging);
                }
                // For others, or freed where there are none.
                user.give_back(with_gpu);
            }
            false => std::mem::forget((filler, mapped, with_gpu)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_all_is_zeroed_host_memory() {
        let mut memory = Memory::of(None);
        let shared = memory.shared(10_000).unwrap();
        let own = memory.device(&[1, 2, 3]).unwrap();
        // SAFETY: both were just made.
        unsafe {
            assert!(std::slice::from_raw_parts(shared.cpu.as_ptr(), 10_000).iter().all(|b| *b == 0));
            assert_eq!(std::slice::from_raw_parts(own as *const u8, 4), [1, 2, 3, 0]);
        }
        let pattern = memory.filled(100, |begin, piece| piece.iter_mut().zip(begin..).for_each(|(b, i)| *b = i as u8));
        // SAFETY: as above.
        let pattern = unsafe { std::slice::from_raw_parts(pattern.unwrap() as *const u8, 100) };
        assert!(pattern.iter().zip(0..).all(|(b, i)| *b == i));
        assert_eq!((shared.device, memory.is_on_gpu()), (shared.cpu.as_ptr() as u64, false));
        assert_eq!(memory.shared_bytes(), 10_000);
        // What there is not is an error.
        assert!(memory.zeroed(1 << 60).is_err() && zeros(1 << 60).is_err());
    }
}
