//! Registers of other devices, mapped for the GPU: how kernels ring a NIC's doorbell.

use super::group::group;
use super::types::{CUdevice, CUdeviceptr, CUresult};
use super::{Context, Cuda, CudaError, CUDA_ERROR_NOT_SUPPORTED};
use crate::Library;
use std::ffi::{c_int, c_uint, c_void};

/// `CU_MEMHOSTREGISTER_PORTABLE`: for every context.
pub const CU_MEMHOSTREGISTER_PORTABLE: c_uint = 1;
/// `CU_MEMHOSTREGISTER_DEVICEMAP`: GPUs get an address for it.
pub const CU_MEMHOSTREGISTER_DEVICEMAP: c_uint = 2;
/// `CU_MEMHOSTREGISTER_IOMEMORY`: it belongs to another device.
pub const CU_MEMHOSTREGISTER_IOMEMORY: c_uint = 4;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`: among whom writes of other devices are ordered (CUDA 11.3 and
/// later).
const CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING: c_int = 118;
/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: the GPU that they go to sees them in order.
const CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER: c_int = 100;

group! {
    /// The functions for it.
    IoMemory {
        register: c"cuMemHostRegister_v2" fn(*mut c_void, usize, c_uint);
        unregister: c"cuMemHostUnregister" fn(*mut c_void);
    }
}

/// A register of another device, for every GPU of the process.
pub struct IoRegister {
    context: std::sync::Arc<Context>,
    host: *mut c_void,
    device: CUdeviceptr,
}

// SAFETY: only named by addresses; who writes is the owner's affair.
unsafe impl Send for IoRegister {}
// SAFETY: as above.
unsafe impl Sync for IoRegister {}

impl IoRegister {
    /// Maps `bytes` at `host`, where the process has the register mapped. Set-up only.
    ///
    /// # Safety
    /// The process keeps it mapped while this lives.
    pub unsafe fn map(context: &std::sync::Arc<Context>, host: *mut c_void, bytes: usize) -> Result<Self, CudaError> {
        let cuda: &Cuda = context.cuda();
        let call = "cuMemHostRegister";
        let io = cuda.io_memory.as_ref().ok_or_else(|| cuda.error(call, CUDA_ERROR_NOT_SUPPORTED))?;
        let _current = context.enter()?;
        let flags = CU_MEMHOSTREGISTER_PORTABLE | CU_MEMHOSTREGISTER_DEVICEMAP | CU_MEMHOSTREGISTER_IOMEMORY;
        // SAFETY: the range is mapped (caller).
        cuda.call(&"cuMemHostRegister", || unsafe { (io.register)(host, bytes, flags) })?;
        let mut made = Self { context: context.clone(), host, device: 0 };
        // SAFETY: a place for the answer; the range was just registered with DEVICEMAP.
        let code = unsafe { (cuda.host_device_pointer)(&mut made.device, host, 0) };
        cuda.check("cuMemHostGetDevicePointer", code)?;
        Ok(made)
    }

    /// Where GPUs see it.
    pub fn device(&self) -> CUdeviceptr {
        self.device
    }
}

impl Drop for IoRegister {
    fn drop(&mut self) {
        let cuda = self.context.cuda();
        // Where the context cannot be entered it has been destroyed, and the mapping with it.
        if let (Some(io), Ok(_current)) = (&cuda.io_memory, self.context.enter()) {
            // SAFETY: registered once; kernels that ring it have ended.
            let _ = cuda.call(&"cuMemHostUnregister", || unsafe { (io.unregister)(self.host) });
        }
    }
}

impl Cuda {
    /// Whether a GPU sees what another device wrote to its memory in the order of the writes, without being asked to
    /// flush: Hopper and newer do. A driver that does not say counts as no.
    pub fn orders_rdma_writes(&self, device: CUdevice) -> bool {
        let (mut value, which) = (0, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING);
        // SAFETY: a place for the answer; a driver that does not know the attribute fails.
        let code = unsafe { (self.device_attribute)(&mut value, which, device) };
        code == super::CUDA_SUCCESS && value >= CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER
    }
}
