//! Contexts of our own, and what is needed to work in one without a processor of the GPU.
//!
//! The driver maps the streams of a context onto a few hardware queues. Where the application has something queued
//! behind a kernel that spins, its queue stands still, and with it every other stream of that context that shares it.
//! The queues of another context are others. What needs the GPU's processors there (kernels, copies within one GPU,
//! short copies from the host) waits for its time slice, 2.4 ms on an H200, if a kernel of another context runs; what a
//! copy engine does waits for nobody.

use super::objects::{Apart, Context, CudaError};
use super::stream::{Copies, Stream};
use super::types::*;
use super::Cuda;
use std::ptr::null_mut;
use std::sync::Arc;

/// The shortest copy from the host that the driver leaves to a copy engine: 16 KiB wait for the GPU's processors, 32
/// KiB do not (driver 580).
const ENGINE_BYTES: usize = 32 << 10;

impl Context {
    /// Whether both are one context of the driver's.
    pub fn is(&self, other: &Self) -> bool {
        self.id() == other.id()
    }

    /// The same for all objects that are one context of the driver's, as long as that lives: for who does not keep it.
    pub fn id(&self) -> usize {
        self.raw as usize
    }

    /// A new context on a device, destroyed by its drop. Set-up only: takes some 100 ms, and 260 MiB of the GPU's
    /// memory.
    pub fn create(cuda: &Arc<Cuda>, device: CUdevice) -> Result<Self, CudaError> {
        let (_apart, mut raw) = (Apart::new(cuda), null_mut());
        // SAFETY: a place for the answer.
        cuda.call(&"cuCtxCreate", || unsafe { (cuda.context_create)(&mut raw, 0, device) })?;
        // No kernel of ours runs in it, so no thread needs a stack: half of what a context takes. A refusal costs
        // only that.
        // SAFETY: its creation has made the context current; it is put back.
        unsafe {
            (cuda.context_limit)(CU_LIMIT_STACK_SIZE, 0);
            (cuda.pop)(&mut null_mut());
        }
        Ok(Self::owned(cuda, raw, device))
    }
}

/// A few words of GPU memory. Made and dropped with its context current.
pub struct Words {
    cuda: Arc<Cuda>,
    at: CUdeviceptr,
}

impl Words {
    /// Allocates. May wait for kernels of the current context: set-up only.
    pub fn alloc(cuda: &Arc<Cuda>, bytes: usize) -> Result<Self, CudaError> {
        let mut at = 0;
        // SAFETY: a place for the answer.
        cuda.call(&"cuMemAlloc", || unsafe { (cuda.device_alloc)(&mut at, bytes) })?;
        Ok(Self { cuda: cuda.clone(), at })
    }

    /// Where it is.
    pub fn at(&self) -> CUdeviceptr {
        self.at
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: allocated once; the owner has seen the GPU's last access.
        let _ = self.cuda.call(&"cuMemFree", || unsafe { (self.cuda.device_free)(self.at) });
    }
}

impl Stream {
    /// Starts copies from pinned memory to GPU memory, in their order, each by a copy engine (single bytes aside).
    ///
    /// # Safety
    /// As for [`Stream::copy`].
    pub unsafe fn copy_in(&self, copies: &Copies) -> Result<(), CudaError> {
        for (to, from, bytes) in copies.iter() {
            if !(2..ENGINE_BYTES).contains(&bytes) {
                // SAFETY: the caller's promise.
                unsafe { self.copy_one(to, from, bytes) }?;
                continue;
            }
            // The driver leaves short copies to the processors, unless they have rows.
            // SAFETY: the rows together are the range, whose last byte but one may be copied twice.
            unsafe {
                self.copy_rows(to, from, bytes / 2)?;
                if bytes % 2 == 1 {
                    let at = bytes as u64 - 2;
                    self.copy_rows(to + at, from + at, 1)?;
                }
            }
        }
        Ok(())
    }

    /// Two rows of `width` bytes, one behind the other.
    ///
    /// # Safety
    /// As for [`Stream::copy`].
    unsafe fn copy_rows(&self, to: CUdeviceptr, from: CUdeviceptr, width: usize) -> Result<(), CudaError> {
        let what = CUDA_MEMCPY2D {
            src_memory_type: CU_MEMORYTYPE_UNIFIED,
            src_device: from,
            src_pitch: width,
            dst_memory_type: CU_MEMORYTYPE_UNIFIED,
            dst_device: to,
            dst_pitch: width,
            width,
            height: 2,
            ..CUDA_MEMCPY2D::default()
        };
        // SAFETY: the driver reads the description before it returns; the ranges are the caller's promise.
        self.cuda().call(&"cuMemcpy2DAsync", || unsafe { (self.cuda().copy_rows)(&what, self.raw()) })
    }
}
