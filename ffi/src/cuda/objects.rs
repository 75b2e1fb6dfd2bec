//! Contexts, streams and pinned memory, each ended by its drop.

use super::calls::{Calling, Name};
use super::symbols::CopyBatch;
use super::types::*;
use super::Cuda;
use std::ffi::{c_int, c_uint, c_void, CStr};
use std::fmt;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// A driver call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaError {
    /// The function.
    pub call: &'static str,
    /// What it returned.
    pub code: CUresult,
    /// The driver's name for that.
    pub name: String,
}

impl CudaError {
    /// Whether the same call may succeed later, because what it lacked may be there then: memory, a GPU or MPS server
    /// that is ready, the end of a capture.
    pub fn may_pass(&self) -> bool {
        matches!(self.code, 2 | 46 | 802 | 805..=809 | 900..=908 | CUDA_ERROR_NOT_READY)
    }
}

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} failed with {} ({})", self.call, self.name, self.code)
    }
}

impl std::error::Error for CudaError {}

/// What the driver knows of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pointer {
    /// It is GPU memory (managed memory included).
    pub is_device: bool,
    /// It is host memory that the driver gave or has registered.
    pub is_host: bool,
    /// It is managed memory.
    pub is_managed: bool,
    /// Device it was allocated on.
    pub device: CUdevice,
    /// Context it was allocated in; NULL where the driver keeps none.
    pub context: CUcontext,
}

impl Cuda {
    pub(super) fn check(&self, call: &'static str, code: CUresult) -> Result<(), CudaError> {
        if code == CUDA_SUCCESS {
            return Ok(());
        }
        Err(self.error(call, code))
    }

    /// Makes a call that may take its time, noted for [`under_way`](super::under_way) as long as it does.
    pub(super) fn call(&self, name: Name, call: impl FnOnce() -> CUresult) -> Result<(), CudaError> {
        let noted = Calling::new(name);
        let code = call();
        drop(noted);
        self.check(name, code)
    }

    #[cold]
    pub(super) fn error(&self, call: &'static str, code: CUresult) -> CudaError {
        let mut text = std::ptr::null();
        // SAFETY: stores NULL or a static string.
        let name = unsafe {
            if (self.error_name)(code, &mut text) == CUDA_SUCCESS && !text.is_null() {
                CStr::from_ptr(text).to_string_lossy().into_owned()
            } else {
                "an unknown error".into()
            }
        };
        CudaError { call, code, name }
    }

    /// Initialises the driver in this process; at once when that was done before.
    pub fn init(&self) -> Result<(), CudaError> {
        // SAFETY: plain call.
        self.check("cuInit", unsafe { (self.init)(0) })
    }

    /// 1000 × major + 10 × minor of the newest CUDA that the driver serves.
    pub fn version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: a place for the answer.
        self.check("cuDriverGetVersion", unsafe { (self.version)(&mut version) })?;
        Ok(version)
    }

    /// What the driver knows of `at`. Needs no current context.
    pub fn pointer(&self, at: CUdeviceptr) -> Result<Pointer, CudaError> {
        let (mut kind, mut managed, mut device): (c_uint, c_uint, c_int) = (0, 0, -1);
        let mut context: CUcontext = null_mut();
        let mut which = [
            CU_POINTER_ATTRIBUTE_MEMORY_TYPE,
            CU_POINTER_ATTRIBUTE_IS_MANAGED,
            CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
            CU_POINTER_ATTRIBUTE_CONTEXT,
        ];
        let mut places: [*mut c_void; 4] = [
            (&mut kind as *mut c_uint).cast(),
            (&mut managed as *mut c_uint).cast(),
            (&mut device as *mut c_int).cast(),
            (&mut context as *mut CUcontext).cast(),
        ];
        // SAFETY: four attributes and a place of the right size for each.
        let code = unsafe { (self.pointer_attributes)(4, which.as_mut_ptr(), places.as_mut_ptr(), at) };
        self.check("cuPointerGetAttributes", code)?;
        let (is_device, is_host) = (kind == CU_MEMORYTYPE_DEVICE, kind == CU_MEMORYTYPE_HOST);
        Ok(Pointer { is_device, is_host, is_managed: managed & 0xff != 0, device, context })
    }

    /// Address of a device on the PCI bus as sysfs has it (`0000:1b:00.0`); `None`: the driver does not say.
    pub fn pci_address(&self, device: CUdevice) -> Option<String> {
        /// `CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID`, `_PCI_BUS_ID`, `_PCI_DEVICE_ID`.
        const WHERE: [c_int; 3] = [50, 33, 34];
        let [domain, bus, slot] = WHERE.map(|which| {
            let mut value = 0;
            // SAFETY: a place for the answer; a driver that does not know the attribute fails.
            let code = unsafe { (self.device_attribute)(&mut value, which, device) };
            (code == CUDA_SUCCESS).then_some(value)
        });
        Some(format!("{:04x}:{:02x}:{:02x}.0", domain?, bus?, slot?))
    }

    /// The calling thread's context, to be used from any thread; `None`: it has none.
    pub fn current_context(cuda: &Arc<Self>) -> Result<Option<Context>, CudaError> {
        let Some((raw, device)) = cuda.current()? else { return Ok(None) };
        Ok(Some(Context { cuda: cuda.clone(), raw, device, kept: Kept::Not }))
    }

    /// The calling thread's context and its device; `None`: it has none.
    pub fn current(&self) -> Result<Option<(CUcontext, CUdevice)>, CudaError> {
        let mut context = null_mut();
        // SAFETY: a place for the answer.
        self.check("cuCtxGetCurrent", unsafe { (self.current)(&mut context) })?;
        if context.is_null() {
            return Ok(None);
        }
        let mut device = -1;
        // SAFETY: a place for the answer.
        self.check("cuCtxGetDevice", unsafe { (self.current_device)(&mut device) })?;
        Ok(Some((context, device)))
    }
}

/// A context that calls are made in: the application's, the device's primary one, or one of our own.
pub struct Context {
    pub(super) cuda: Arc<Cuda>,
    pub(super) raw: CUcontext,
    pub(super) device: CUdevice,
    kept: Kept,
}

/// What the drop of a context has to do.
enum Kept {
    /// Nothing: others see to its life.
    Not,
    /// Give the device's primary context back.
    Retained,
    /// Destroy it.
    Owned,
}

// SAFETY: a context may be made current on any thread.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// While it lives, calls of this thread are no concern of streams that the application is capturing. In the mode that
/// captures begin with, many calls of any thread are refused and spoil the capture.
pub(super) struct Apart<'a> {
    cuda: &'a Cuda,
    mode: c_uint,
}

impl<'a> Apart<'a> {
    pub(super) fn new(cuda: &'a Cuda) -> Self {
        let mut mode = CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: a place for the answer, which a failure leaves as it is.
        unsafe { (cuda.capture_mode)(&mut mode) };
        Self { cuda, mode }
    }
}

impl Drop for Apart<'_> {
    fn drop(&mut self) {
        // SAFETY: as above.
        unsafe { (self.cuda.capture_mode)(&mut self.mode) };
    }
}

/// While it lives the context is the thread's current one.
pub struct Current<'a>(&'a Context, #[allow(dead_code, reason = "for its drop")] Apart<'a>);

impl Drop for Current<'_> {
    fn drop(&mut self) {
        let mut was = null_mut();
        // SAFETY: takes away what `enter` pushed.
        unsafe { (self.0.cuda.pop)(&mut was) };
    }
}

impl Context {
    /// The context in which `pointer` is used: its own, else the thread's current one if that is on the same device,
    /// else the device's primary one.
    pub fn of(cuda: &Arc<Cuda>, pointer: &Pointer) -> Result<Self, CudaError> {
        let made = |raw, kept| Self { cuda: cuda.clone(), raw, device: pointer.device, kept };
        if !pointer.context.is_null() {
            return Ok(made(pointer.context, Kept::Not));
        }
        if let Some((raw, device)) = cuda.current()? {
            if device == pointer.device {
                return Ok(made(raw, Kept::Not));
            }
        }
        let mut raw = null_mut();
        // SAFETY: a place for the answer.
        cuda.check("cuDevicePrimaryCtxRetain", unsafe { (cuda.primary_retain)(&mut raw, pointer.device) })?;
        Ok(made(raw, Kept::Retained))
    }

    /// One that was created for this.
    pub(super) fn owned(cuda: &Arc<Cuda>, raw: CUcontext, device: CUdevice) -> Self {
        Self { cuda: cuda.clone(), raw, device, kept: Kept::Owned }
    }

    /// The driver.
    pub fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Its device.
    pub fn device(&self) -> CUdevice {
        self.device
    }

    /// Whether streams of its device can add to memory.
    pub fn has_stream_add(&self) -> bool {
        let mut value = 0;
        let which = CU_DEVICE_ATTRIBUTE_ATOMIC_REDUCTION_SUPPORTED;
        // SAFETY: a place for the answer; a driver that does not know the attribute fails.
        unsafe { (self.cuda.device_attribute)(&mut value, which, self.device) == CUDA_SUCCESS && value != 0 }
    }

    /// Makes it current until the guard is dropped, on this thread.
    pub fn enter(&self) -> Result<Current<'_>, CudaError> {
        // SAFETY: the context lives as long as the communicator's memory in it (NCCL's contract); a destroyed one is an
        // error here.
        self.cuda.call(&"cuCtxPushCurrent", || unsafe { (self.cuda.push)(self.raw) })?;
        Ok(Current(self, Apart::new(&self.cuda)))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: gives back what `of` retained, or ends what was created for this, in which nothing lives any more.
        let _ = unsafe {
            match self.kept {
                Kept::Not => Ok(()),
                Kept::Retained => {
                    self.cuda.call(&"cuDevicePrimaryCtxRelease", || (self.cuda.primary_release)(self.device))
                }
                Kept::Owned => self.cuda.call(&"cuCtxDestroy", || (self.cuda.context_destroy)(self.raw)),
            }
        };
    }
}

/// A stream without implicit order to any other. Every method needs the stream's context to be current.
pub struct Stream {
    pub(super) cuda: Arc<Cuda>,
    pub(super) raw: CUstream,
    /// The driver refused a batch of copies once: one by one from then on.
    no_batch: AtomicBool,
}

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

/// Copies of one call.
#[derive(Default)]
pub struct Copies {
    to: Vec<CUdeviceptr>,
    from: Vec<CUdeviceptr>,
    bytes: Vec<usize>,
}

impl Copies {
    /// Adds one between any two addresses.
    pub fn push(&mut self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) {
        self.to.push(to);
        self.from.push(from);
        self.bytes.push(bytes);
    }

    /// Makes the copy at place `i` longer, if this one begins at both ends where that ends.
    pub fn join(&mut self, i: usize, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> bool {
        let n = self.bytes[i] as u64;
        let follows = self.to[i] + n == to && self.from[i] + n == from;
        if follows {
            self.bytes[i] += bytes;
        }
        follows
    }

    /// Each one's destination, source and bytes.
    pub fn iter(&self) -> impl Iterator<Item = (CUdeviceptr, CUdeviceptr, usize)> + '_ {
        self.to.iter().zip(&self.from).zip(&self.bytes).map(|((&to, &from), &bytes)| (to, from, bytes))
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.to.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.to.is_empty()
    }

    /// Forgets all.
    pub fn clear(&mut self) {
        self.to.clear();
        self.from.clear();
        self.bytes.clear();
    }
}

/// Operations that one cuStreamBatchMemOp takes: the driver API's manual says of `count` "Must be less than 256", and
/// driver 580 refuses 257 with CUDA_ERROR_INVALID_VALUE.
pub const MEM_OPS_MAX: usize = 255;
/// Copies that go in one cuMemcpyBatchAsync. The manual names no limit; 256 were measured.
const COPIES_MAX: usize = 256;

impl Stream {
    /// A stream in the current context, of the highest priority: what it does is short, and kernels wait for it.
    pub fn create(cuda: &Arc<Cuda>) -> Result<Self, CudaError> {
        let (mut lowest, mut highest, mut raw) = (0, 0, null_mut());
        // SAFETY: places for the answers.
        let code = unsafe { (cuda.priority_range)(&mut lowest, &mut highest) };
        cuda.check("cuCtxGetStreamPriorityRange", code)?;
        // SAFETY: a place for the answer.
        cuda.call(&"cuStreamCreateWithPriority", || unsafe {
            (cuda.stream_create)(&mut raw, CU_STREAM_NON_BLOCKING, highest)
        })?;
        Ok(Self { cuda: cuda.clone(), raw, no_batch: AtomicBool::new(false) })
    }

    pub(super) fn raw(&self) -> CUstream {
        self.raw
    }

    pub(super) fn cuda(&self) -> &Arc<Cuda> {
        &self.cuda
    }

    /// Starts copies, after what was started before. Among themselves they have no order.
    ///
    /// # Safety
    /// The ranges stay valid until the stream is past them.
    pub unsafe fn copy(&self, copies: &Copies) -> Result<(), CudaError> {
        let n = copies.len();
        if let Some(batch) = self.cuda.copy_batch.filter(|_| n > 1 && !self.no_batch.load(Ordering::Relaxed)) {
            // SAFETY: passed on.
            if (0..n).step_by(COPIES_MAX).all(|at| unsafe { self.copy_batch(batch, copies, at) }.is_ok()) {
                return Ok(());
            }
            // A real fault shows again below; copies that were started before are only repeated.
            self.no_batch.store(true, Ordering::Relaxed);
        }
        // SAFETY: the caller's promise.
        copies.iter().try_for_each(|(to, from, bytes)| unsafe { self.copy_one(to, from, bytes) })
    }

    /// Starts one copy.
    ///
    /// # Safety
    /// As for `copy`.
    pub unsafe fn copy_one(&self, to: CUdeviceptr, from: CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        self.cuda.call(&"cuMemcpyAsync", || unsafe { (self.cuda.copy)(to, from, bytes, self.raw) })
    }

    /// Up to `COPIES_MAX` copies from number `at` on, which exists.
    ///
    /// # Safety
    /// As for `copy`.
    unsafe fn copy_batch(&self, batch: CopyBatch, c: &Copies, at: usize) -> Result<(), CudaError> {
        let n = (c.len() - at).min(COPIES_MAX);
        let (to, from, bytes) = (c.to[at..].as_ptr(), c.from[at..].as_ptr(), c.bytes[at..].as_ptr());
        let attributes =
            CUmemcpyAttributes { src_access_order: CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, ..Default::default() };
        let (first, mut failed) = (0usize, 0usize);
        // SAFETY: n of each; one attribute set that holds from copy 0 on; the ranges are the caller's promise.
        self.cuda.call(&"cuMemcpyBatchAsync", || unsafe {
            match batch {
                CopyBatch::V2(f) => f(to, from, bytes, n, &attributes, &first, 1, self.raw),
                CopyBatch::V1(f) => f(to, from, bytes, n, &attributes, &first, 1, &mut failed, self.raw),
            }
        })
    }

    /// Starts stores and additions, in their order, after what was started before.
    ///
    /// # Safety
    /// The words stay valid until the stream is past them.
    pub unsafe fn mem_ops(&self, ops: &mut [MemOp]) -> Result<(), CudaError> {
        for chunk in ops.chunks_mut(MEM_OPS_MAX) {
            // SAFETY: as many as said; the words are the caller's promise.
            self.cuda.call(&"cuStreamBatchMemOp", || unsafe {
                (self.cuda.mem_ops)(self.raw, chunk.len() as c_uint, chunk.as_mut_ptr(), 0)
            })?;
        }
        Ok(())
    }

    /// Whether everything started is done; an error when something failed. Does not wait.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let mut code = CUDA_SUCCESS;
        self.cuda.call(&"cuStreamQuery", || {
            // SAFETY: the stream lives.
            code = unsafe { (self.cuda.stream_query)(self.raw) };
            // No error, and asked for too often to make a sentence of it.
            if code == CUDA_ERROR_NOT_READY {
                CUDA_SUCCESS
            } else {
                code
            }
        })?;
        Ok(code == CUDA_SUCCESS)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `create`, ended once; the driver lets its work finish.
        let _ = self.cuda.call(&"cuStreamDestroy", || unsafe { (self.cuda.stream_destroy)(self.raw) });
    }
}

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
