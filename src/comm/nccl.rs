//! The NCCL that calls this library, where there is one: its version decides what its device code expects. A process
//! may have several, so each instance remembers that of the one whose `init` made it.

use std::ffi::{c_int, c_void, CStr};
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicI32, Ordering};

/// What `ncclGetVersion` answered last; 0: not known.
static VERSION: AtomicI32 = AtomicI32::new(0);

/// Looks up the version of the NCCL that `function`, its logger, belongs to. Where that is no NCCL: [`last`].
pub fn learn_from(function: *const c_void) -> Option<i32> {
    let version = version_of(function);
    if let Some(version) = version {
        VERSION.store(version, Ordering::Relaxed);
    }
    version.or_else(last)
}

/// Version of the NCCL that called `init` last, for what no `init` made, as 10000 × major + 100 × minor + patch;
/// `None`: not known.
pub fn last() -> Option<i32> {
    Some(VERSION.load(Ordering::Relaxed)).filter(|version| *version > 0)
}

/// Asks the library that holds `function`. Loaded or linked however: its own file is asked, not the first symbol of
/// that name in the process.
fn version_of(function: *const c_void) -> Option<i32> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a place for the answer; any address may be asked for.
    let name = unsafe {
        if function.is_null() || libc::dladdr(function, info.as_mut_ptr()) == 0 {
            return None;
        }
        info.assume_init().dli_fname
    };
    let opened = match name.is_null() {
        true => std::ptr::null_mut(),
        // SAFETY: the loader's own string; a library that is not loaded is not loaded by this.
        false => unsafe { libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_NOLOAD) },
    };
    // Part of the program itself: its symbols are the global ones.
    let library = if opened.is_null() { libc::RTLD_DEFAULT } else { opened };
    const SYMBOL: &CStr = c"ncclGetVersion";
    // SAFETY: a handle of this process and a C string.
    let at = unsafe { libc::dlsym(library, SYMBOL.as_ptr()) };
    let version = (!at.is_null()).then(|| {
        // SAFETY: NCCL's public function of this name has this signature, and only stores a number.
        let get = unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut c_int) -> c_int>(at) };
        let mut version = 0;
        // SAFETY: a place for the answer.
        (unsafe { get(&mut version) } == 0).then_some(version)
    });
    if !opened.is_null() {
        // SAFETY: opened above.
        unsafe { libc::dlclose(opened) };
    }
    version.flatten().filter(|version| *version > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_nccl_has_no_version() {
        assert_eq!(version_of(last as *const c_void), None);
        assert_eq!(version_of(libc::malloc as *const c_void), None);
        assert_eq!(version_of(std::ptr::null()), None);
        assert_eq!(version_of(std::ptr::dangling::<c_void>()), None);
    }
}
