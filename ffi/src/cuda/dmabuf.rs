//! GPU memory as a DMA-BUF: a descriptor that RDMA devices register.

use super::types::*;
use super::{Context, CudaError};
use crate::Library;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::os::fd::{FromRawFd, OwnedFd};

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`: the GPU's memory can be exported (CUDA 11.7 and later).
pub const CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED: c_int = 124;
/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`.
pub const CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD: c_uint = 1;
/// `CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE` (CUDA 12.8 and later).
pub const CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE: c_ulonglong = 1;
/// `CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE` (CUDA 11.3 and later).
pub const CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE: c_uint = 15;
/// `CUDA_ERROR_NOT_SUPPORTED`.
pub const CUDA_ERROR_NOT_SUPPORTED: CUresult = 801;

/// `cuMemGetHandleForAddressRange`.
pub(super) type RangeHandle = unsafe extern "C" fn(*mut c_void, CUdeviceptr, usize, c_uint, c_ulonglong) -> CUresult;

pub(super) fn resolve(library: &Library) -> Option<RangeHandle> {
    let at = library.symbol(c"cuMemGetHandleForAddressRange", None)?;
    // SAFETY: the driver's function of this name has this signature.
    Some(unsafe { std::mem::transmute::<*mut c_void, RangeHandle>(at.as_ptr()) })
}

/// The bus over which devices reach exported memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// The platform's own choice.
    Usual,
    /// PCIe, on platforms whose own choice is another link.
    Pcie,
}

impl Context {
    /// Whether the driver exports memory of its device.
    pub fn has_dma_buf(&self) -> bool {
        let mut value = 0;
        let which = CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED;
        // SAFETY: a place for the answer; a driver that does not know the attribute fails.
        let code = unsafe { (self.cuda.device_attribute)(&mut value, which, self.device) };
        self.cuda.range_handle.is_some() && code == CUDA_SUCCESS && value != 0
    }

    /// Whether memory was allocated in a way that lets other devices reach it; `None`: the driver does not say.
    pub fn is_rdma_capable(&self, at: CUdeviceptr) -> Option<bool> {
        let mut which = CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE;
        let mut value: u64 = 0;
        let mut place: *mut c_void = (&raw mut value).cast();
        // SAFETY: one attribute and a place that is large enough whatever its size.
        let code = unsafe { (self.cuda.pointer_attributes)(1, &mut which, &mut place, at) };
        (code == CUDA_SUCCESS).then_some(value & 0xff != 0)
    }

    /// Exports `bytes` of device memory from `at` on, both multiples of the page size. Offset 0 of the descriptor is
    /// `at`. The context is current during the call only. Does not wait for the GPU.
    pub fn export_dma_buf(&self, at: CUdeviceptr, bytes: usize, mapping: Mapping) -> Result<OwnedFd, CudaError> {
        let _current = self.enter()?;
        let mut fd: c_int = -1;
        let flags = match mapping {
            Mapping::Usual => 0,
            Mapping::Pcie => CU_MEM_RANGE_FLAG_DMA_BUF_MAPPING_TYPE_PCIE,
        };
        let code = match self.cuda.range_handle {
            // SAFETY: a place for the descriptor, which for this type of handle is an int; the driver checks the range.
            Some(f) => unsafe { f((&raw mut fd).cast(), at, bytes, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, flags) },
            None => CUDA_ERROR_NOT_SUPPORTED,
        };
        self.cuda.check("cuMemGetHandleForAddressRange", code)?;
        if fd < 0 {
            let call = "cuMemGetHandleForAddressRange";
            return Err(CudaError { call, code: CUDA_ERROR_INVALID_VALUE, name: "no descriptor".into() });
        }
        // SAFETY: the driver made the descriptor for the caller.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}
