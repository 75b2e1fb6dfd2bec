//! Managed memory: one address for the CPU and all GPUs, whose pages the driver keeps where they are used.

use super::group::group;
use super::stream::Stream;
use super::types::{CUdevice, CUdeviceptr, CUresult, CUstream, CUDA_SUCCESS};
use super::{Cuda, CudaError, CUDA_ERROR_INVALID_VALUE, CUDA_ERROR_NOT_SUPPORTED};
use crate::Library;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

/// `CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS`: the CPU may use managed memory while kernels run.
pub const CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS: c_int = 89;
/// `CU_MEM_ATTACH_GLOBAL`: every stream of every GPU may use it.
const CU_MEM_ATTACH_GLOBAL: c_uint = 1;
/// Bytes that the driver takes back to the host at once when a CPU looks at one of them.
const MOVED_AT_ONCE: usize = 64 << 10;
/// `CU_MEM_ADVISE_SET_ACCESSED_BY`: that GPU has it mapped wherever it lies, and no fault moves it there.
const CU_MEM_ADVISE_SET_ACCESSED_BY: c_int = 5;

group! {
    /// The functions for managed memory, in the shapes that they have had since CUDA 8.
    Managing {
        alloc: c"cuMemAllocManaged" fn(*mut CUdeviceptr, usize, c_uint);
        advise: c"cuMemAdvise" fn(CUdeviceptr, usize, c_int, CUdevice);
        prefetch: c"cuMemPrefetchAsync" fn(CUdeviceptr, usize, CUdevice, CUstream);
    }
}

/// Managed memory that one GPU uses beside the CPU. It lies in host memory, and the GPU reads and writes it there, as
/// it does with pinned memory, until it is brought to the GPU ([`Stream::bring`]). From then on the GPU's accesses are
/// local, and the CPU's next one takes a part of it, 64 KiB, back to the host: a fault of some 25 µs in which no call
/// of the driver takes part (docs/gpu/places.md has the figures). No such part is shared with other allocations.
pub struct Managed {
    cuda: Arc<Cuda>,
    /// As it was allocated, and where its first part begins.
    raw: CUdeviceptr,
    at: CUdeviceptr,
    bytes: usize,
}

impl Managed {
    /// Allocates it zeroed, in the current context, which is of this device. May wait for kernels: set-up only.
    /// `NOT_SUPPORTED`: the CPU cannot use it beside kernels here, or the driver has no such functions.
    pub fn alloc(cuda: &Arc<Cuda>, device: CUdevice, bytes: usize) -> Result<Self, CudaError> {
        let missing = || cuda.error("cuMemAllocManaged", CUDA_ERROR_NOT_SUPPORTED);
        let managing = cuda.managing.as_ref().ok_or_else(missing)?;
        let (mut value, which) = (0, CU_DEVICE_ATTRIBUTE_CONCURRENT_MANAGED_ACCESS);
        // SAFETY: a place for the answer.
        if unsafe { (cuda.device_attribute)(&mut value, which, device) } != CUDA_SUCCESS || value == 0 {
            return Err(missing());
        }
        let room = bytes.checked_next_multiple_of(MOVED_AT_ONCE).and_then(|whole| whole.checked_add(MOVED_AT_ONCE));
        let room = room.ok_or_else(|| cuda.error("cuMemAllocManaged", CUDA_ERROR_INVALID_VALUE))?;
        let mut made = Self { cuda: cuda.clone(), raw: 0, at: 0, bytes };
        // SAFETY: a place for the answer.
        cuda.call(&"cuMemAllocManaged", || unsafe { (managing.alloc)(&mut made.raw, room, CU_MEM_ATTACH_GLOBAL) })?;
        made.at = made.raw.next_multiple_of(MOVED_AT_ONCE as u64);
        // SAFETY: the range was just made.
        let code = unsafe { (managing.advise)(made.raw, room, CU_MEM_ADVISE_SET_ACCESSED_BY, device) };
        cuda.check("cuMemAdvise", code)?;
        // SAFETY: freshly allocated, and the CPU may use it beside kernels.
        unsafe { made.host().write_bytes(0, bytes) };
        Ok(made)
    }

    /// Where the CPU sees it: at the same address.
    pub fn host(&self) -> *mut u8 {
        self.at as *mut u8
    }

    /// Where GPUs see it.
    pub fn device(&self) -> CUdeviceptr {
        self.at
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Managed {
    fn drop(&mut self) {
        // Nothing was made at 0.
        if self.raw != 0 {
            // SAFETY: made in `alloc`, freed once; the owner has seen the GPU's last access.
            let _ = self.cuda.call(&"cuMemFree", || unsafe { (self.cuda.device_free)(self.raw) });
        }
    }
}

impl Stream {
    /// Has managed memory brought to a GPU, behind what the stream has to do; what is there already stays. It changes
    /// no byte. Memory that is not managed is an error, and so is a GPU without room.
    pub fn bring(&self, at: CUdeviceptr, bytes: usize, device: CUdevice) -> Result<(), CudaError> {
        let missing = || self.cuda.error("cuMemPrefetchAsync", CUDA_ERROR_NOT_SUPPORTED);
        let managing = self.cuda.managing.as_ref().ok_or_else(missing)?;
        // SAFETY: the stream lives; the driver checks the range.
        self.cuda.call(&"cuMemPrefetchAsync", || unsafe { (managing.prefetch)(at, bytes, device, self.raw) })
    }
}
