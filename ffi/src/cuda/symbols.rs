//! The functions of the CUDA driver, resolved at run time.

use super::io::IoMemory;
use super::kernel::{KernelSettings, Kernels};
use super::managed::Managing;
use super::share::Sharing;
use super::types::*;
use crate::{InUse, Library, Missing};
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::sync::Arc;

/// The file that the dynamic linker looks for.
pub const SONAME: &str = "libcuda.so.1";

/// `OXYGIN_LIBCUDA`: path of another library to load in place of [`SONAME`], for tests and for drivers outside the
/// library path.
pub const ENV_PATH: &str = "OXYGIN_LIBCUDA";

const REMEDY: &str = "install the NVIDIA driver, or set OXYGIN_LIBCUDA to the path of libcuda.so.1";

type Copies = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const CUmemcpyAttributes,
    *const usize,
    usize,
    CUstream,
) -> CUresult;
type CopiesV1 = unsafe extern "C" fn(
    *const u64,
    *const u64,
    *const usize,
    usize,
    *const CUmemcpyAttributes,
    *const usize,
    usize,
    *mut usize,
    CUstream,
) -> CUresult;

/// cuMemcpyBatchAsync in the two shapes that drivers have.
#[derive(Clone, Copy)]
pub(super) enum CopyBatch {
    /// From CUDA 13 on.
    V2(Copies),
    /// CUDA 12.8 and 12.9: also says which copy failed.
    V1(CopiesV1),
}

macro_rules! driver {
    ($($(#[$doc:meta])* $field:ident: $name:literal fn($($arg:ty),*);)*) => {
        /// The functions of the driver. Holds the library.
        pub struct Cuda {
            $($(#[$doc])* pub(super) $field: unsafe extern "C" fn($($arg),*) -> CUresult,)*
            pub(super) range_handle: Option<super::dmabuf::RangeHandle>,
            pub(super) copy_batch: Option<CopyBatch>,
            pub(super) io_memory: Option<IoMemory>,
            pub(super) kernel_settings: Option<KernelSettings>,
            pub(super) sharing: Option<Sharing>,
            pub(super) kernels: Option<Kernels>,
            pub(super) managing: Option<Managing>,
            library: Library,
        }

        impl Cuda {
            fn resolve(library: Library) -> Result<Self, Missing> {
                Ok(Self {
                    $($field: {
                        let at = library.symbol($name, None).ok_or_else(|| lacks(&library, $name))?;
                        // SAFETY: the driver's function of this (versioned) name has this signature.
                        unsafe {
                            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($arg),*) -> CUresult>(at.as_ptr())
                        }
                    },)*
                    range_handle: super::dmabuf::resolve(&library),
                    copy_batch: copy_batch(&library),
                    io_memory: IoMemory::resolve(&library),
                    kernel_settings: KernelSettings::resolve(&library),
                    sharing: Sharing::resolve(&library),
                    kernels: Kernels::resolve(&library),
                    managing: Managing::resolve(&library),
                    library,
                })
            }
        }
    };
}

driver! {
    /// Must precede everything else; does nothing the second time.
    init: c"cuInit" fn(c_uint);
    /// 1000 × major + 10 × minor of the newest CUDA it serves.
    version: c"cuDriverGetVersion" fn(*mut c_int);
    /// The short name of a result.
    error_name: c"cuGetErrorName" fn(CUresult, *mut *const c_char);
    /// What it can.
    device_attribute: c"cuDeviceGetAttribute" fn(*mut c_int, c_int, CUdevice);
    /// The context that the runtime API uses on a device; counted.
    primary_retain: c"cuDevicePrimaryCtxRetain" fn(*mut CUcontext, CUdevice);
    /// Gives that up.
    primary_release: c"cuDevicePrimaryCtxRelease_v2" fn(CUdevice);
    /// What the calling thread may do while streams are being captured; gives back what it might before.
    capture_mode: c"cuThreadExchangeStreamCaptureMode" fn(*mut c_uint);
    /// The calling thread's context.
    current: c"cuCtxGetCurrent" fn(*mut CUcontext);
    /// Makes a context of our own and makes it current.
    context_create: c"cuCtxCreate_v2" fn(*mut CUcontext, c_uint, CUdevice);
    /// Ends one.
    context_destroy: c"cuCtxDestroy_v2" fn(CUcontext);
    /// How much of something the current context may have.
    context_limit: c"cuCtxSetLimit" fn(c_uint, usize);
    /// Makes one current.
    push: c"cuCtxPushCurrent_v2" fn(CUcontext);
    /// Puts back what was current.
    pop: c"cuCtxPopCurrent_v2" fn(*mut CUcontext);
    /// The current context's device.
    current_device: c"cuCtxGetDevice" fn(*mut CUdevice);
    /// What the driver knows of an address.
    pointer_attributes: c"cuPointerGetAttributes" fn(c_uint, *mut c_uint, *mut *mut c_void, CUdeviceptr);
    /// The priorities that streams of the current context can have: lowest and highest, the latter the smaller number.
    priority_range: c"cuCtxGetStreamPriorityRange" fn(*mut c_int, *mut c_int);
    /// Makes a stream.
    stream_create: c"cuStreamCreateWithPriority" fn(*mut CUstream, c_uint, c_int);
    /// Ends it once its work is done; does not wait.
    stream_destroy: c"cuStreamDestroy_v2" fn(CUstream);
    /// Whether its work is done, or failed.
    stream_query: c"cuStreamQuery" fn(CUstream);
    /// Makes an event.
    event_create: c"cuEventCreate" fn(*mut CUevent, c_uint);
    /// Ends it; what waits for it goes on to do so.
    event_destroy: c"cuEventDestroy_v2" fn(CUevent);
    /// Has it stand for what a stream has been given so far.
    event_record: c"cuEventRecord" fn(CUevent, CUstream);
    /// What comes on a stream waits for what an event stands for now.
    stream_wait: c"cuStreamWaitEvent" fn(CUstream, CUevent, c_uint);
    /// A copy between any two addresses.
    copy: c"cuMemcpyAsync" fn(CUdeviceptr, CUdeviceptr, usize, CUstream);
    /// A copy of rows.
    copy_rows: c"cuMemcpy2DAsync_v2" fn(*const CUDA_MEMCPY2D, CUstream);
    /// GPU memory of the current context.
    device_alloc: c"cuMemAlloc_v2" fn(*mut CUdeviceptr, usize);
    /// Gives it back.
    device_free: c"cuMemFree_v2" fn(CUdeviceptr);
    /// Stores and additions in stream order.
    mem_ops: c"cuStreamBatchMemOp_v2" fn(CUstream, c_uint, *mut MemOp, c_uint);
    /// Pinned host memory.
    host_alloc: c"cuMemHostAlloc" fn(*mut *mut c_void, usize, c_uint);
    /// Its address for GPUs.
    host_device_pointer: c"cuMemHostGetDevicePointer_v2" fn(*mut CUdeviceptr, *mut c_void, c_uint);
    /// Gives it back.
    host_free: c"cuMemFreeHost" fn(*mut c_void);
}

fn copy_batch(library: &Library) -> Option<CopyBatch> {
    if let Some(at) = library.symbol(c"cuMemcpyBatchAsync_v2", None) {
        // SAFETY: the driver's function of this name has this signature.
        return Some(CopyBatch::V2(unsafe { std::mem::transmute::<*mut c_void, Copies>(at.as_ptr()) }));
    }
    let at = library.symbol(c"cuMemcpyBatchAsync", None)?;
    // SAFETY: as above.
    Some(CopyBatch::V1(unsafe { std::mem::transmute::<*mut c_void, CopiesV1>(at.as_ptr()) }))
}

#[cold]
fn lacks(library: &Library, name: &CStr) -> Missing {
    Missing::new(format!(
        "{} has no function {}: the driver is older than CUDA 11.7; {REMEDY}",
        library.path(),
        name.to_string_lossy()
    ))
}

static LOADED: InUse<Cuda> = InUse::none();

impl Cuda {
    /// Loads the driver, or the library that [`ENV_PATH`] names, unless it is in use already. Does not initialise it.
    pub fn load() -> Result<Arc<Self>, Missing> {
        // SAFETY: the administrator's driver, or what the user put in its place.
        unsafe { LOADED.load(ENV_PATH, SONAME, REMEDY, Self::resolve) }
    }

    /// Loads the library at `path` unless it is in use already.
    pub fn load_path(path: &str) -> Result<Arc<Self>, Missing> {
        // SAFETY: as above.
        unsafe { LOADED.load_path(path, REMEDY, Self::resolve) }
    }

    /// Where it was loaded from.
    pub fn path(&self) -> &str {
        self.library.path()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_without_the_symbols_names_the_first() {
        let e = Cuda::load_path("libc.so.6").err().expect("libc is not the CUDA driver");
        assert!(e.sentence().contains("cuInit"), "{e}");
    }

    #[test]
    fn a_missing_library_is_a_sentence() {
        let e = Cuda::load_path("/nowhere/libcuda.so.1").err().expect("no such file");
        assert!(e.sentence().contains("/nowhere/libcuda.so.1"), "{e}");
        assert!(e.sentence().contains("OXYGIN_LIBCUDA"), "{e}");
    }
}
