//! Pinned host memory.

use super::objects::CudaError;
use super::types::*;
use super::Cuda;
use std::ptr::null_mut;
use std::sync::Arc;

/// Pinned host memory that every GPU of the process reads and writes.
pub struct Pinned {
    cuda: Arc<Cuda>,
    host: *mut u8,
    device: CUdeviceptr,
    bytes: usize,
}

// SAFETY: plain memory; who accesses what is the owner's affair.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Allocates in the current context. May wait for kernels: set-up only.
    pub fn alloc(cuda: &Arc<Cuda>, bytes: usize) -> Result<Self, CudaError> {
        let mut host = null_mut();
        let flags = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: a place for the answer.
        cuda.call(&"cuMemHostAlloc", || unsafe { (cuda.host_alloc)(&mut host, bytes, flags) })?;
        let mut made = Self { cuda: cuda.clone(), host: host.cast(), device: 0, bytes };
        // SAFETY: a place for the answer; the memory was just made with DEVICEMAP.
        let code = unsafe { (cuda.host_device_pointer)(&mut made.device, host, 0) };
        cuda.check("cuMemHostGetDevicePointer", code)?;
        // SAFETY: freshly allocated.
        unsafe { made.host.write_bytes(0, bytes) };
        Ok(made)
    }

    /// Where the CPU sees it.
    pub fn host(&self) -> *mut u8 {
        self.host
    }

    /// Where GPUs see it.
    pub fn device(&self) -> CUdeviceptr {
        self.device
    }

    /// Bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: made in `alloc`, freed once; the owner has seen the GPU's last access.
        let _ = self.cuda.call(&"cuMemFreeHost", || unsafe { (self.cuda.host_free)(self.host.cast()) });
    }
}
