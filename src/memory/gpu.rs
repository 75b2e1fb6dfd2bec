//! GPU memory: whether a window is, whose, and in which CUDA context it is used.

use crate::error::{Error, Result};
use crate::memory::registry::Extent;
use oxygin_ffi::cuda::{Allocation, Context, Cuda, CudaError};
use std::sync::Arc;

/// A kernel's text, beside the file that names it, ended by a zero.
macro_rules! ptx {
    ($file:literal) => {
        match std::ffi::CStr::from_bytes_with_nul(concat!(include_str!($file), "\0").as_bytes()) {
            Ok(text) => text,
            Err(_) => panic!("the PTX holds a zero"),
        }
    };
}
pub(crate) use ptx;

/// What holds of the signals in a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalRules {
    /// They start at 0 and nobody but peers' signals ever writes them.
    pub never_reset: bool,
    /// A strong one is visible behind earlier ones of its context, too. Else, as in this library's own queues, behind
    /// earlier puts alone, which is what NCCL promises device code.
    pub are_ordered: bool,
}

impl SignalRules {
    /// Of what a table registers.
    pub const fn of_tables(never_reset: bool) -> Self {
        Self { never_reset, are_ordered: true }
    }
}

/// A window in GPU memory.
#[derive(Clone)]
pub struct GpuMemory {
    /// Where calls about it are made.
    pub context: Arc<Context>,
    /// Of its signals.
    pub signals: SignalRules,
    /// Every GPU of this process may load from it and store to it.
    pub is_open: bool,
    /// It is mapped by cuMemMap, as ncclMemAlloc and cuMemCreate have it, and belongs to no context.
    pub is_virtual: bool,
    /// Processes of its host may have it, too: true but for signals of this library's own queues that no kernel of a
    /// peer's adds to ([`lanes`](crate::fabric::lanes)).
    pub is_shared: bool,
}

/// A driver call's failure as an error of ours; 1 in NCCL's terms, a CUDA error.
#[cold]
pub fn cuda_error(what: &str, error: &CudaError) -> Error {
    Error::cuda(format!("{what}: {error}"))
}

/// Whether a CUDA driver is installed: whether GPU windows can be taken. Loads nothing that stays.
pub fn has_driver() -> bool {
    Cuda::load().is_ok()
}

/// Looks at `len` bytes at `base` that the caller says are GPU memory. `None`: they are host memory of the driver's.
/// NCCL registers windows of such memory (`CU_MEM_LOCATION_TYPE_HOST_NUMA`, one allocation) with an RMA table as type
/// 2, and with a GIN table as type 1 (2.30.7: `src/rma/rma_proxy.cc`, `src/dev_runtime.cc`).
pub fn inspect(base: u64, len: u64, never_reset: bool) -> Result<Option<GpuMemory>> {
    let what = "regMrSym of GPU memory";
    let cuda = Cuda::load().map_err(|missing| Error::usage(format!("type = 2 (CUDA): {missing}")))?;
    cuda.init().map_err(|e| cuda_error(what, &e))?;
    let pointer = cuda.pointer(base).map_err(|e| cuda_error(what, &e))?;
    if pointer.is_managed {
        return Err(Error::usage(format!(
            "data = {base:#x} ({len} bytes) is managed memory, which moves between CPU and GPU by itself and cannot be \
             a window; allocate it with ncclMemAlloc or cuMemCreate"
        )));
    }
    if pointer.is_host {
        return Ok(None);
    }
    if !pointer.is_device {
        return Err(Error::argument(format!(
            "data = {base:#x} is registered as type 2 (CUDA), but the driver knows no GPU memory there; pass type 1 \
             for host memory"
        )));
    }
    let context = Context::of(&cuda, &pointer).map_err(|e| cuda_error(what, &e))?;
    let ends = [base, base + len.max(1) - 1];
    let is_open = ends.iter().all(|&at| cuda.is_open_to_all(at, Some(pointer.device)));
    let is_virtual = ends.iter().all(|&at| Allocation::at(&cuda, at).is_ok());
    let signals = SignalRules::of_tables(never_reset);
    Ok(Some(GpuMemory { context: Arc::new(context), signals, is_open, is_virtual, is_shared: true }))
}

/// A window in host memory that the driver made on a NUMA node (`CU_MEM_LOCATION_TYPE_HOST_NUMA`), so that GPUs may be
/// let to it, and other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostMemory {
    /// Where it is.
    pub extent: Extent,
    /// This rank's GPU may load from it.
    pub is_open_here: bool,
    /// Every GPU of this process may.
    pub is_open: bool,
}

impl HostMemory {
    /// Looks at a window in host memory. `None`: it is other memory. `context` is one of this rank's GPU.
    pub fn at(context: &Context, extent: Extent) -> Option<Self> {
        let _current = context.enter().ok()?;
        let (cuda, device) = (context.cuda(), context.device());
        let ends = [extent.base, extent.base.checked_add(extent.len.checked_sub(1)?)?];
        let is_such = |&at: &u64| Allocation::at(cuda, at).and_then(|one| one.node()).is_ok_and(|node| node.is_some());
        ends.iter().all(is_such).then(|| Self {
            extent,
            is_open_here: ends.iter().all(|&at| cuda.is_open_to(at, device)),
            is_open: ends.iter().all(|&at| cuda.is_open_to_all(at, None)),
        })
    }
}
