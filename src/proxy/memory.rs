//! Memory that device code and the engine share: queues, indices, counters; and device code's own.
//!
//! Where the calling thread has a CUDA context, what the CPU reads or writes is pinned host memory and what only device
//! code touches is GPU memory. Elsewhere all is host memory, so that emulated device code can run on CPUs.
//! docs/gpu.md says what was measured of the places.

use crate::error::{Error, Result};
use crate::memory::gpu::{self, cuda_error, GpuMemory};
use nix::sys::mman::{mmap_anonymous, munmap, MapFlags, ProtFlags};
use oxygin_ffi::cuda::{Allocation, Context, Copies, Cuda, Mapped, Pinned, Stream};
use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long a copy of a piece at set-up may take. It has a stream of its own, but the hardware queue behind that may be
/// one that an application's kernel holds.
const COPY_LIMIT: Duration = Duration::from_secs(10);
/// Bytes of pinned memory at most by which GPU memory is filled at set-up, piece by piece: what a set takes of the GPU
/// is not taken of the host as well.
const PIECE_BYTES: usize = 4 << 20;

/// Host pages of our own.
struct Pages {
    at: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: plain memory; who accesses what is the owner's affair.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Zeroed; nothing is taken from the system before it is touched.
    fn new(bytes: usize) -> Result<Self> {
        let bytes = NonZeroUsize::new(bytes).unwrap_or(NonZeroUsize::MIN);
        let (access, kind) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(None, bytes, access, kind | MapFlags::MAP_NORESERVE) }
            .map_err(|e| Error::system(format!("no memory for device queues ({bytes} bytes): {e}")))?;
        Ok(Self { at, bytes: bytes.get() })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this size; the owner has seen the last access.
        let _ = unsafe { munmap(self.at, self.bytes) };
    }
}

/// A range that both sides see.
#[derive(Clone, Copy, Debug)]
pub struct Block {
    /// For the CPU.
    pub cpu: NonNull<u8>,
    /// For device code.
    pub device: u64,
}

impl Block {
    /// `bytes` further on.
    ///
    /// # Safety
    /// That is inside the block.
    pub unsafe fn at(self, bytes: usize) -> Self {
        // SAFETY: inside (caller).
        Self { cpu: unsafe { self.cpu.add(bytes) }, device: self.device + bytes as u64 }
    }
}

/// What was allocated for a set of contexts; freed by its drop, when nobody uses it any more.
pub struct Memory {
    /// Of the thread that made it; `None`: all is host memory.
    context: Option<Arc<Context>>,
    pages: Vec<Pages>,
    pinned: Vec<Pinned>,
    mapped: Vec<Mapped>,
    /// Bytes that [`Memory::shared`] gave.
    shared: usize,
}

impl Memory {
    /// None yet. The calling thread's CUDA context, if it has one, is used for all that follows.
    pub fn here() -> Result<Self> {
        let context = match Cuda::load() {
            Err(_) => None,
            Ok(cuda) => match cuda.init() {
                Err(_) => None,
                Ok(()) => Cuda::current_context(&cuda).map_err(|e| cuda_error("createContext", &e))?.map(Arc::new),
            },
        };
        Ok(Self { context, pages: Vec::new(), pinned: Vec::new(), mapped: Vec::new(), shared: 0 })
    }

    /// Bytes that the CPU and device code share: pinned memory, where there is a GPU.
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
        self.is_on_gpu().then(|| gpu::inspect(base, len, never_reset)).transpose()
    }

    /// Zeroed memory that the CPU and device code use, on pages of its own.
    pub fn shared(&mut self, bytes: usize) -> Result<Block> {
        self.shared += bytes;
        let Some(context) = &self.context else { return self.host(bytes) };
        let made = (|| {
            let _current = context.enter()?;
            Pinned::alloc(context.cuda(), bytes.max(1))
        })()
        .map_err(|e| cuda_error("pinned memory for device queues", &e))?;
        let block = Block { cpu: NonNull::new(made.host()).ok_or_else(null)?, device: made.device() };
        self.pinned.push(made);
        Ok(block)
    }

    /// Zeroed host memory that device code has nothing to do with, on pages of its own.
    pub fn host(&mut self, bytes: usize) -> Result<Block> {
        let pages = Pages::new(bytes)?;
        let cpu = pages.at.cast::<u8>();
        self.pages.push(pages);
        Ok(Block { cpu, device: cpu.as_ptr() as u64 })
    }

    /// Memory for device code alone, with these contents, on pages of its own. Returns its address there.
    pub fn device(&mut self, contents: &[u8]) -> Result<u64> {
        self.filled(contents.len(), copies_of(contents))
    }

    /// The same, zeroed.
    pub fn zeroed(&mut self, bytes: usize) -> Result<u64> {
        self.filled(bytes, |_, _| ())
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
        fill_gpu(context, at, bytes, fill)?;
        self.mapped.push(made);
        Ok(at)
    }

    /// Writes contents anew into what [`Memory::device`] returned, or a part of it.
    ///
    /// # Safety
    /// They lie inside it, and nobody reads or writes there meanwhile.
    pub unsafe fn write_device(&self, at: u64, contents: &[u8]) -> Result<()> {
        match &self.context {
            Some(context) => fill_gpu(context, at, contents.len(), copies_of(contents)),
            None => {
                // SAFETY: host memory, of this many bytes, which nobody else uses (caller).
                unsafe { (at as *mut u8).copy_from_nonoverlapping(contents.as_ptr(), contents.len()) };
                Ok(())
            }
        }
    }
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

/// Fills GPU memory with what `fill` writes into each piece: by a stream of its own, waiting for each.
fn fill_gpu(context: &Context, at: u64, bytes: usize, mut fill: impl FnMut(usize, &mut [u8])) -> Result<()> {
    let what = "a copy to device queues";
    let failed = |e| cuda_error(what, &e);
    let _current = context.enter().map_err(failed)?;
    let staging = Pinned::alloc(context.cuda(), bytes.clamp(1, PIECE_BYTES)).map_err(failed)?;
    let stream = Stream::create(context.cuda()).map_err(failed)?;
    for begin in (0..bytes).step_by(PIECE_BYTES) {
        let len = PIECE_BYTES.min(bytes - begin);
        // SAFETY: that many bytes were asked for; the copy before has ended, so that nobody else has them.
        let piece = unsafe { std::slice::from_raw_parts_mut(staging.host(), len) };
        piece.fill(0);
        fill(begin, piece);
        let mut copies = Copies::default();
        copies.push(at + begin as u64, staging.device(), len);
        // SAFETY: both ends stay until the stream is done, or for ever.
        unsafe { stream.copy_in(&copies) }.map_err(failed)?;
        let end = Instant::now() + COPY_LIMIT;
        while !stream.is_done().map_err(failed)? {
            if Instant::now() > end {
                std::mem::forget((staging, stream));
                return Err(Error::cuda(format!(
                    "{what} has not ended for {COPY_LIMIT:?}: a kernel of the application holds the GPU; make device \
                     communicators while none waits for another rank"
                )));
            }
            std::thread::sleep(Duration::from_micros(20));
        }
    }
    Ok(())
}

impl Drop for Memory {
    fn drop(&mut self) {
        let Some(context) = &self.context else { return };
        // Where it cannot be entered, it has been destroyed, and its memory with it.
        if let Ok(_current) = context.enter() {
            self.mapped.clear();
            self.pinned.clear();
        } else {
            std::mem::take(&mut self.pinned).into_iter().for_each(std::mem::forget);
            std::mem::take(&mut self.mapped).into_iter().for_each(std::mem::forget);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_gpu_all_is_zeroed_host_memory() {
        let mut memory = Memory { context: None, pages: Vec::new(), pinned: Vec::new(), mapped: Vec::new(), shared: 0 };
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
