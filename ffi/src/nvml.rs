//! What NVIDIA's management library knows of pairs of GPUs, also of those that `CUDA_VISIBLE_DEVICES` hides from this
//! process. It comes with the driver; containers have it with the capability `utility`.

use crate::Library;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr, CString};
use std::ptr::null_mut;

/// `nvmlDevice_t`.
type Device = *mut c_void;

/// `NVML_P2P_CAPS_INDEX_ATOMICS`.
const ATOMICS: c_uint = 3;
/// `NVML_P2P_STATUS_OK`.
const OK: c_int = 0;

/// Whether kernels on the GPU at PCI address `from` (`0000:1b:00.0`) may add to words in memory of the one at `to`,
/// atomically for those there as well. `Err` is why that cannot be said. Set-up only: takes some milliseconds.
pub fn adds_at_peer(from: &str, to: &str) -> Result<bool, String> {
    // SAFETY: it is what its name says.
    let library = unsafe { Library::open("libnvidia-ml.so.1", "it comes with the driver") };
    let library = library.map_err(|missing| missing.sentence().to_owned())?;
    let symbol = |name: &CStr| {
        let found = library.symbol(name, None).map(|at| at.as_ptr());
        found.ok_or_else(|| library.lacks(name, "it is too old").sentence().to_owned())
    };
    // SAFETY: functions of these names have these types.
    let (init, end, by_address, status) = unsafe {
        (
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(symbol(c"nvmlInit_v2")?),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> c_int>(symbol(c"nvmlShutdown")?),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*const c_char, *mut Device) -> c_int>(symbol(
                c"nvmlDeviceGetHandleByPciBusId_v2",
            )?),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(Device, Device, c_uint, *mut c_int) -> c_int>(
                symbol(c"nvmlDeviceGetP2PStatus")?,
            ),
        )
    };
    let said = |call: &str, code: c_int| match code {
        0 => Ok(()),
        code => Err(format!("{call} returned {code}")),
    };
    // SAFETY: plain call; counted, and undone below.
    said("nvmlInit", unsafe { init() })?;
    let device = |address: &str| {
        let (name, mut device) = (CString::new(address).map_err(|e| e.to_string())?, null_mut());
        // SAFETY: a C string and a place for the answer.
        said("nvmlDeviceGetHandleByPciBusId", unsafe { by_address(name.as_ptr(), &mut device) }).map(|()| device)
    };
    let answer = device(from).and_then(|from| {
        let (to, mut found) = (device(to)?, OK);
        // SAFETY: devices of the library, and a place for the answer.
        said("nvmlDeviceGetP2PStatus", unsafe { status(from, to, ATOMICS, &mut found) }).map(|()| found == OK)
    });
    // SAFETY: of `init`.
    unsafe { end() };
    answer
}
