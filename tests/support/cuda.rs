//! GPU memory of the fake CUDA driver that devices of the fake libibverbs reach.

use super::violations;
use std::ffi::{c_char, c_int, c_void, CString};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// What `fake_dma_buf` takes.
pub mod exports {
    use std::ffi::c_int;
    /// Memory is exported.
    pub const YES: c_int = 0;
    /// The device says that it exports none.
    pub const NOT_SUPPORTED: c_int = 1;
    /// Every range is refused.
    pub const REFUSED: c_int = 2;
    /// Only mapped over PCIe.
    pub const PCIE_ONLY: c_int = 3;
    /// No range, because memory was allocated without a thought of RDMA.
    pub const NOT_CAPABLE: c_int = 4;
    /// For every mapping.
    pub const EVERY_MAPPING: c_int = 5;
}

type Resolve = extern "C" fn(c_int, u64, usize) -> *mut u8;

/// The fake CUDA driver, for the devices of one fake libibverbs. Take the fake libibverbs first: its turn is this
/// one's.
pub struct Cuda {
    library: libloading::Library,
    violations: usize,
    /// Registers that tests which failed have left mapped.
    left: usize,
}

/// A context that is current on this thread.
pub struct Entered<'a>(&'a Cuda);

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        let mut was: *mut c_void = null_mut();
        // SAFETY: the fake has a function of this type.
        unsafe { self.0.call::<unsafe extern "C" fn(*mut *mut c_void) -> c_int>(b"cuCtxPopCurrent_v2")(&mut was) };
    }
}

impl Cuda {
    /// The driver's library.
    pub fn path() -> std::path::PathBuf {
        let path = std::env::current_exe().unwrap().with_file_name("libfake_cuda.so");
        assert!(path.exists(), "{} is not there; build the package fake-cuda", path.display());
        path
    }

    /// Loads the driver, its settings at their defaults, and introduces it to the fake libibverbs at `verbs`.
    pub fn meet(verbs: &std::path::Path) -> Self {
        std::env::set_var("OXYGIN_LIBCUDA", Self::path());
        // SAFETY: our own libraries; the functions have these types. The resolver is forgotten at the next reset.
        unsafe {
            let cuda = Self::load();
            let verbs = libloading::Library::new(verbs).unwrap();
            let introduce = *verbs.get::<extern "C" fn(Resolve)>(b"fake_verbs_gpu").unwrap();
            introduce(cuda.call(b"fake_resolve"));
            cuda
        }
    }

    /// The driver, its settings at their defaults.
    pub fn load() -> Self {
        // SAFETY: our own library; the functions have these types.
        unsafe {
            let cuda = Self { library: libloading::Library::new(Self::path()).unwrap(), violations: 0, left: 0 };
            cuda.exports(exports::YES);
            cuda.refuse_registers(0);
            let (violations, left) = (violations::count(&cuda.library), cuda.registers());
            Self { violations, left, ..cuda }
        }
    }

    /// # Safety
    /// The fake has a function of this name and type.
    unsafe fn call<F: Copy>(&self, name: &[u8]) -> F {
        // SAFETY: passed on.
        unsafe { *self.library.get::<F>(name).unwrap() }
    }

    /// Which memory the driver exports: see [`exports`].
    pub fn exports(&self, mode: c_int) {
        // SAFETY: the fake has a function of this type.
        unsafe { self.call::<extern "C" fn(c_int)>(b"fake_dma_buf")(mode) }
    }

    /// The next call of a function fails.
    pub fn inject(&self, name: &str, code: c_int) {
        let name = CString::new(name).unwrap();
        // SAFETY: as above.
        unsafe { self.call::<unsafe extern "C" fn(*const c_char, u32, c_int)>(b"fake_inject")(name.as_ptr(), 0, code) }
    }

    /// Makes a GPU's context current on this thread.
    pub fn enter(&self, gpu: c_int) -> Entered<'_> {
        // SAFETY: as above.
        unsafe {
            let context = self.call::<extern "C" fn(c_int) -> *mut c_void>(b"fake_context")(gpu);
            assert_eq!(self.call::<unsafe extern "C" fn(*mut c_void) -> c_int>(b"cuCtxPushCurrent_v2")(context), 0);
        }
        Entered(self)
    }

    /// Memory of a GPU; of none that the driver names when `private`, as NCCL allocates signals.
    pub fn alloc(&self, gpu: c_int, words: usize, private: bool, managed: bool) -> Memory {
        // SAFETY: as above.
        unsafe {
            type Alloc = extern "C" fn(c_int, usize, bool) -> u64;
            let at = match managed {
                true => self.call::<Alloc>(b"fake_malloc")(gpu, words * 8, true),
                false => self.call::<Alloc>(b"fake_alloc")(gpu, words * 8, private),
            };
            let alias = self.call::<extern "C" fn(u64) -> *mut u8>(b"fake_peek")(at).cast();
            Memory { at, alias, words }
        }
    }

    /// Where this process sees what kernels see at `at`: GPU memory, or another device's register.
    pub fn see(&self, at: u64) -> Option<u64> {
        // SAFETY: as above.
        let (memory, register) = unsafe {
            let peek = self.call::<extern "C" fn(u64) -> *mut u8>(b"fake_peek");
            (peek(at) as u64, self.call::<extern "C" fn(u64) -> u64>(b"fake_register")(at))
        };
        [memory, register].into_iter().find(|seen| *seen != 0)
    }

    /// Whether kernels see pinned memory there, which this process sees at the same address.
    pub fn is_pinned(&self, at: u64) -> bool {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(u64) -> bool>(b"fake_is_pinned")(at) }
    }

    /// Mapping a register of another device fails with this from here on; 0: it does not.
    pub fn refuse_registers(&self, code: c_int) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(c_int)>(b"fake_refuse_registers")(code) }
    }

    /// Kernels that are launched do not start until this is called with `false`.
    pub fn hold_kernels(&self, held: bool) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(bool)>(b"fake_hold_kernels")(held) }
    }

    /// Registers of other devices that this test has mapped for GPUs.
    pub fn registers(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_registers")() - self.left }
    }

    /// A descriptor of memory, as NCCL makes one.
    pub fn export(&self, gpu: c_int, memory: &Memory) -> c_int {
        let _context = self.enter(gpu);
        let mut fd: c_int = -1;
        let bytes = (memory.words * 8).next_multiple_of(4096);
        type Export = unsafe extern "C" fn(*mut c_void, u64, usize, u32, u64) -> c_int;
        // SAFETY: as above; a place for the descriptor.
        let code = unsafe {
            self.call::<Export>(b"cuMemGetHandleForAddressRange")((&raw mut fd).cast(), memory.at, bytes, 1, 0)
        };
        assert_eq!(code, 0);
        fd
    }

    /// Fails the test if the driver was used in a way that a real one would not stand, or descriptors or registers are
    /// left.
    pub fn check(&self) {
        violations::check(&self.library, self.violations);
        assert_eq!(open_exports(), 0, "descriptors are left open");
        assert_eq!(self.registers(), 0, "registers are left");
    }
}

/// Descriptors of GPU memory that this process holds.
pub fn open_exports() -> usize {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().flatten().filter_map(|e| std::fs::read_link(e.path()).ok());
    links.filter(|to| to.to_string_lossy().contains("memfd:dma-buf")).count()
}

/// GPU memory; `get` and `set` are what kernels do. The CPU dies where it touches `at`.
pub struct Memory {
    /// What the application calls it.
    pub at: u64,
    alias: *mut u64,
    /// 8-byte words.
    pub words: usize,
}

// SAFETY: a mapping that stays for the process's life, used atomically.
unsafe impl Sync for Memory {}
// SAFETY: as above.
unsafe impl Send for Memory {}

impl Memory {
    fn word(&self, i: usize) -> &AtomicU64 {
        assert!(i < self.words);
        // SAFETY: inside the mapping, aligned.
        unsafe { AtomicU64::from_ptr(self.alias.add(i)) }
    }

    /// A kernel reads.
    pub fn get(&self, i: usize) -> u64 {
        self.word(i).load(Ordering::Acquire)
    }

    /// A kernel writes.
    pub fn set(&self, i: usize, value: u64) {
        self.word(i).store(value, Ordering::Release);
    }

    /// Bytes.
    pub fn bytes(&self) -> u64 {
        self.words as u64 * 8
    }
}
