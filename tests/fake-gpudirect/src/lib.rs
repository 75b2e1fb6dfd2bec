//! Lets the fake RDMA devices of `tests/fake-verbs` work with real GPUs: released NCCL and real kernels over the verbs
//! fabric, and over queue pairs of an mlx5 device, on a machine without RDMA. Loaded in the driver's place
//! (`OXYGIN_LIBCUDA`); it is the driver but for three functions:
//!
//! * a DMA-BUF of GPU memory is a file of no size, whose memory this library knows;
//! * a register of another device is mapped for the GPU as the plain host memory that it is here, where the driver
//!   takes it for no register;
//! * every device says that it exports DMA-BUFs.
//!
//! Bytes are carried by copy engines in contexts of its own, so that kernels which spin hold nothing up
//! (`carry.rs`).
//! `OXYGIN_LIBIBVERBS` has to name the fake.

#![allow(missing_docs, reason = "the functions are those of the driver, documented there")]
#![allow(clippy::missing_safety_doc)]
#![allow(clippy::undocumented_unsafe_blocks, reason = "the C ABI of the driver: callers pass what that ABI says")]

mod carry;

use carry::Exports;
use libloading::os::unix::Library;
use std::ffi::{c_int, c_uint, c_ulonglong, c_void};
use std::sync::OnceLock;

/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const DMA_BUF_SUPPORTED: c_int = 124;
/// `CU_MEMHOSTREGISTER_IOMEMORY`.
const IO_MEMORY: c_uint = 4;
/// `CUDA_ERROR_INVALID_VALUE`.
const INVALID_VALUE: c_int = 1;
/// `CUDA_ERROR_NOT_INITIALIZED`: there is no driver behind this.
const NO_DRIVER: c_int = 3;

type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
type Register = unsafe extern "C" fn(*mut c_void, usize, c_uint) -> c_int;

/// A function of the driver itself, which has this type.
unsafe fn of_driver<F: Copy>(name: &[u8]) -> Option<F> {
    static DRIVER: OnceLock<Option<Library>> = OnceLock::new();
    let driver = DRIVER.get_or_init(|| unsafe { Library::new("libcuda.so.1") }.ok()).as_ref()?;
    unsafe { driver.get::<F>(name) }.ok().map(|function| *function)
}

/// Tells the fake devices of this library, once.
fn meet() {
    static FAKE: OnceLock<Option<Library>> = OnceLock::new();
    FAKE.get_or_init(|| {
        let fake = unsafe { Library::new(std::env::var_os("OXYGIN_LIBIBVERBS")?) }.ok()?;
        type Resolve = extern "C" fn(c_int, u64, usize) -> *mut u8;
        type Carry = extern "C" fn(u64, u64, u64) -> c_int;
        unsafe {
            fake.get::<extern "C" fn(Resolve)>(b"fake_verbs_gpu\0").ok()?(resolve);
            fake.get::<extern "C" fn(Carry)>(b"fake_verbs_carry\0").ok()?(carry::carry);
        }
        Some(fake)
    });
}

/// Where memory is that a descriptor of [`cuMemGetHandleForAddressRange`] stands for.
extern "C" fn resolve(fd: c_int, at: u64, bytes: usize) -> *mut u8 {
    Exports::find(fd, at, bytes as u64).unwrap_or(0) as *mut u8
}

#[no_mangle]
pub unsafe extern "C" fn cuMemGetHandleForAddressRange(
    handle: *mut c_void,
    at: u64,
    bytes: usize,
    _kind: c_uint,
    _flags: c_ulonglong,
) -> c_int {
    meet();
    match Exports::add(at, bytes as u64) {
        Some(fd) => {
            unsafe { handle.cast::<c_int>().write(fd) };
            0
        }
        None => INVALID_VALUE,
    }
}

#[no_mangle]
pub unsafe extern "C" fn cuMemHostRegister_v2(at: *mut c_void, bytes: usize, flags: c_uint) -> c_int {
    let register = unsafe { of_driver::<Register>(b"cuMemHostRegister_v2\0") };
    register.map_or(NO_DRIVER, |register| match unsafe { register(at, bytes, flags) } {
        0 => 0,
        _ => unsafe { register(at, bytes, flags & !IO_MEMORY) },
    })
}

#[no_mangle]
pub unsafe extern "C" fn cuDeviceGetAttribute(value: *mut c_int, which: c_int, device: c_int) -> c_int {
    let attribute = unsafe { of_driver::<Attribute>(b"cuDeviceGetAttribute\0") };
    let code = attribute.map_or(NO_DRIVER, |attribute| unsafe { attribute(value, which, device) });
    if code == 0 && which == DMA_BUF_SUPPORTED {
        unsafe { *value = 1 };
    }
    code
}
