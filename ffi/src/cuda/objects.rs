//! What a pointer is, errors of the driver, and contexts, each ended by its drop.

use super::calls::{Calling, Name};
use super::types::*;
use super::Cuda;
use std::ffi::{c_int, c_uint, c_void, CStr};
use std::fmt;
use std::ptr::null_mut;
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
