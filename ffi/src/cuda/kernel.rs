//! Kernels: loaded from PTX, launched on a stream; and who may load and store where.

use super::group::group;
use super::stream::Stream;
use super::types::{CUdevice, CUdeviceptr, CUmemLocation, CUresult, CUstream, CUDA_SUCCESS};
use super::{
    Cuda, CudaError, CUDA_ERROR_NOT_SUPPORTED, CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_LOCATION_TYPE_DEVICE,
};
use crate::Library;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void, CStr};
use std::ptr::null_mut;
use std::sync::Arc;

/// `CUmodule`.
pub type CUmodule = *mut c_void;
/// `CUfunction`.
pub type CUfunction = *mut c_void;

group! {
    /// The functions for kernels.
    Kernels {
        load: c"cuModuleLoadData" fn(*mut CUmodule, *const c_void);
        unload: c"cuModuleUnload" fn(CUmodule);
        function: c"cuModuleGetFunction" fn(*mut CUfunction, CUmodule, *const std::ffi::c_char);
        launch: c"cuLaunchKernel" fn(
            CUfunction, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, c_uint, CUstream,
            *mut *mut c_void, *mut *mut c_void
        );
        device_count: c"cuDeviceGetCount" fn(*mut c_int);
        peer_attribute: c"cuDeviceGetP2PAttribute" fn(*mut c_int, c_int, CUdevice, CUdevice);
        get_access: c"cuMemGetAccess" fn(*mut c_ulonglong, *const CUmemLocation, CUdeviceptr);
    }
}

group! {
    /// What is set of a kernel.
    KernelSettings {
        set: c"cuFuncSetAttribute" fn(CUfunction, c_int, c_int);
    }
}

/// `CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT`.
const CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT: c_int = 9;
/// `CU_SHAREDMEM_CARVEOUT_MAX_L1`.
const CU_SHAREDMEM_CARVEOUT_MAX_L1: c_int = 0;

impl Cuda {
    fn kernel(&self, call: &'static str) -> Result<&Kernels, CudaError> {
        self.kernels.as_ref().ok_or_else(|| self.error(call, CUDA_ERROR_NOT_SUPPORTED))
    }

    /// Whether a GPU may load from and store to the memory at `at`. Memory of cudaMalloc keeps no list of who may:
    /// `false`.
    pub fn is_open_to(&self, at: CUdeviceptr, device: CUdevice) -> bool {
        let Some(kernels) = &self.kernels else { return false };
        let (mut flags, place) = (0, CUmemLocation { kind: CU_MEM_LOCATION_TYPE_DEVICE, id: device });
        // SAFETY: a place for the answer; any address may be asked for.
        let code = unsafe { (kernels.get_access)(&mut flags, &place, at) };
        code == CUDA_SUCCESS && flags == c_ulonglong::from(CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
    }

    /// Whether every GPU of this process may, where the memory is on `home`, or on none of them. Of memory of
    /// cudaMalloc the answer is `true` only where there is no other GPU.
    pub fn is_open_to_all(&self, at: CUdeviceptr, home: Option<CUdevice>) -> bool {
        let count = self.devices();
        count > 0 && (0..count).filter(|&device| Some(device) != home).all(|device| self.is_open_to(at, device))
    }
}

/// `CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED`.
const CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: c_int = 3;

impl Cuda {
    /// GPUs of this process, numbered from 0 on; 0 where the driver does not say.
    pub(super) fn devices(&self) -> CUdevice {
        let (Some(kernels), mut count) = (&self.kernels, 0) else { return 0 };
        // SAFETY: a place for the answer.
        match unsafe { (kernels.device_count)(&mut count) } {
            CUDA_SUCCESS => count,
            _ => 0,
        }
    }

    /// Whether kernels on `from` may add to words in memory of `to`, atomically for those on `to` as well: over NVLink
    /// they may, over PCIe not.
    pub fn adds_at_peer(&self, from: CUdevice, to: CUdevice) -> bool {
        let Some(kernels) = self.kernels.as_ref().filter(|_| from != to) else { return from == to };
        let (mut may, which) = (0, CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED);
        // SAFETY: a place for the answer.
        unsafe { (kernels.peer_attribute)(&mut may, which, from, to) == CUDA_SUCCESS && may != 0 }
    }
}

/// One kernel of a module. Every method needs the context in which it was loaded to be current, the drop too.
pub struct Kernel {
    cuda: Arc<Cuda>,
    module: CUmodule,
    function: CUfunction,
}

// SAFETY: modules and functions may be used from any thread.
unsafe impl Send for Kernel {}
// SAFETY: as above.
unsafe impl Sync for Kernel {}

impl Kernel {
    /// Compiles PTX for the current context's GPU and loads it. May wait for kernels: set-up only.
    pub fn load(cuda: &Arc<Cuda>, ptx: &CStr, name: &CStr) -> Result<Self, CudaError> {
        let kernels = cuda.kernel("cuModuleLoadData")?;
        let mut made = Self { cuda: cuda.clone(), module: null_mut(), function: null_mut() };
        // SAFETY: a place for the answer; PTX ends with a zero.
        let loaded =
            cuda.call(&"cuModuleLoadData", || unsafe { (kernels.load)(&mut made.module, ptx.as_ptr().cast()) });
        if let Err(e) = loaded {
            made.module = null_mut();
            return Err(e);
        }
        // SAFETY: a place for the answer; the module was just loaded.
        let code = unsafe { (kernels.function)(&mut made.function, made.module, name.as_ptr()) };
        cuda.check("cuModuleGetFunction", code)?;
        made.ask_for_little();
        Ok(made)
    }

    /// Asks for no more shared memory than it has. By itself the driver gives a multiprocessor as much as would fill it
    /// with blocks of a kernel; where another kernel runs with less, none of these finds a place before that has ended
    /// (H200, driver 580). A driver that cannot be asked is as it is.
    fn ask_for_little(&self) {
        let (which, little) = (CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, CU_SHAREDMEM_CARVEOUT_MAX_L1);
        if let Some(settings) = &self.cuda.kernel_settings {
            // SAFETY: a function of a module that is loaded; it is a hint.
            unsafe { (settings.set)(self.function, which, little) };
        }
    }

    /// Starts `blocks` blocks of `threads` threads after what the stream has to do. All parameters are 64 bits wide.
    ///
    /// # Safety
    /// The kernel takes as many parameters and what they say is true; what it touches stays valid until it has ended.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        blocks: u32,
        threads: u32,
        parameters: &mut [u64],
    ) -> Result<(), CudaError> {
        let kernels = self.cuda.kernel("cuLaunchKernel")?;
        let mut places: Vec<*mut c_void> = parameters.iter_mut().map(|p| (p as *mut u64).cast()).collect();
        // SAFETY: as many places of 8 bytes each, read before the call returns; the rest is the caller's promise.
        self.cuda.call(&"cuLaunchKernel", || unsafe {
            let (f, stream) = (self.function, stream.raw());
            (kernels.launch)(f, blocks, 1, 1, threads, 1, 1, 0, stream, places.as_mut_ptr(), null_mut())
        })
    }
}

impl Drop for Kernel {
    fn drop(&mut self) {
        let Some(kernels) = self.cuda.kernels.as_ref().filter(|_| !self.module.is_null()) else { return };
        // SAFETY: loaded once by `load`; the owner has seen its last kernel end.
        let _ = self.cuda.call(&"cuModuleUnload", || unsafe { (kernels.unload)(self.module) });
    }
}
