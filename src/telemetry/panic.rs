//! Silence on panics: this library prints nothing but through NCCL's logger.
//!
//! A panic is caught at the C boundary and logged there (`vtable::guard`). Rust's default hook would print to stderr
//! first, so it is replaced, but only in the standard library's copy inside the shared object: a program that links
//! this crate keeps its own hook.

use std::any::Any;
use std::ffi::c_void;
use std::sync::Once;

static ONCE: Once = Once::new();

/// Makes panics inside the shared object silent. Does nothing in a program that has this crate linked in.
pub fn silence() {
    ONCE.call_once(|| {
        if is_shared_object() {
            std::panic::set_hook(Box::new(|_| {}));
        }
    });
}

/// What a panic said.
pub fn text(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<&str>().copied().or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    text.unwrap_or("no message")
}

/// Whether this code was loaded as a shared object, rather than being part of the program.
fn is_shared_object() -> bool {
    let here = base_of(silence as *const c_void);
    // SAFETY: plain call; the program headers of the main program are mapped with it.
    let program = base_of(unsafe { libc::getauxval(libc::AT_PHDR) } as *const c_void);
    here.is_some() && here != program
}

fn base_of(address: *const c_void) -> Option<usize> {
    let mut info = std::mem::MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: any address may be asked for; the structure is read only when dladdr filled it.
    unsafe { (libc::dladdr(address, info.as_mut_ptr()) != 0).then(|| info.assume_init().dli_fbase as usize) }
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_test_program_is_not_a_shared_object() {
        assert!(!super::is_shared_object());
    }
}
