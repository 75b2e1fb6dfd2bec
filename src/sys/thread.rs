//! Threads of a library that may be unloaded: made by pthread, because the standard library leaves a thread-local with
//! a destructor on the thread that starts another one (see `sync`).

use crate::error::{Error, Result};
use std::ffi::{c_void, CString};
use std::mem::MaybeUninit;
use std::panic::{catch_unwind, AssertUnwindSafe};

/// A running thread. It must be joined: it runs code of this library.
pub struct Thread(libc::pthread_t);

// SAFETY: a pthread_t is a number that any thread may join with, once; `join` takes the value.
unsafe impl Send for Thread {}

type Body = Box<dyn FnOnce() + Send>;

extern "C" fn enter(body: *mut c_void) -> *mut c_void {
    // SAFETY: `spawn` leaked exactly this box for this thread.
    let body = unsafe { Box::from_raw(body.cast::<Body>()) };
    if catch_unwind(AssertUnwindSafe(body)).is_err() {
        let _ = catch_unwind(|| log::error!("a fault inside an oxygin thread; please report it"));
    }
    std::ptr::null_mut()
}

impl Thread {
    /// Starts `body` on a thread with this name (15 characters show) and stack, with all signals blocked: they are the
    /// host program's business.
    pub fn spawn(name: &str, stack: usize, body: impl FnOnce() + Send + 'static) -> Result<Self> {
        let name = CString::new(name).map_err(|_| Error::internal("a thread's name holds a NUL"))?;
        let body: Box<Body> = Box::new(Box::new(move || {
            // SAFETY: names the calling thread with a C string.
            unsafe { libc::pthread_setname_np(libc::pthread_self(), name.as_ptr()) };
            body()
        }));
        let body = Box::into_raw(body);
        // SAFETY: attributes and signal sets are initialised before use; `enter` gets the box that it expects.
        let (code, thread) = unsafe {
            let mut attr = MaybeUninit::<libc::pthread_attr_t>::uninit();
            let mut all = MaybeUninit::<libc::sigset_t>::uninit();
            let mut old = MaybeUninit::<libc::sigset_t>::uninit();
            let mut thread = MaybeUninit::<libc::pthread_t>::uninit();
            libc::sigfillset(all.as_mut_ptr());
            let mut code = libc::pthread_attr_init(attr.as_mut_ptr());
            if code == 0 {
                libc::pthread_attr_setstacksize(attr.as_mut_ptr(), stack);
                libc::pthread_sigmask(libc::SIG_SETMASK, all.as_ptr(), old.as_mut_ptr());
                code = libc::pthread_create(thread.as_mut_ptr(), attr.as_ptr(), enter, body.cast());
                libc::pthread_sigmask(libc::SIG_SETMASK, old.as_ptr(), std::ptr::null_mut());
                libc::pthread_attr_destroy(attr.as_mut_ptr());
            }
            (code, thread)
        };
        if code != 0 {
            // SAFETY: the thread does not exist, so the box is still ours.
            drop(unsafe { Box::from_raw(body) });
            let why = std::io::Error::from_raw_os_error(code);
            return Err(Error::system(format!(
                "starting a thread failed: {why}; raise the limit on threads (ulimit -u)"
            )));
        }
        // SAFETY: pthread_create succeeded and filled it.
        Ok(Self(unsafe { thread.assume_init() }))
    }

    /// Lets it run to its end by itself, which may be never. It runs code of this library, which stays loaded for it.
    pub fn leave(self) {
        keep_loaded();
        // SAFETY: detached or joined once, because `self` is consumed.
        unsafe { libc::pthread_detach(self.0) };
    }

    /// Waits for its end.
    pub fn join(self) {
        // SAFETY: joined once, because `self` is consumed.
        unsafe { libc::pthread_join(self.0, std::ptr::null_mut()) };
    }
}

/// Has the dynamic linker keep the library that holds this function, whoever closes it.
fn keep_loaded() {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    // SAFETY: a place for the answer; its name, if there is one, is a string that lives as long as the library.
    unsafe {
        if libc::dladdr(keep_loaded as *const c_void, info.as_mut_ptr()) != 0 {
            let name = info.assume_init().dli_fname;
            if !name.is_null() {
                libc::dlopen(name, libc::RTLD_NOW | libc::RTLD_NOLOAD | libc::RTLD_NODELETE);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::sync::Arc;

    #[test]
    fn runs_and_joins() {
        let n = Arc::new(AtomicU32::new(0));
        let m = n.clone();
        Thread::spawn("oxygin-test", 256 << 10, move || m.store(7, Ordering::SeqCst)).unwrap().join();
        assert_eq!(n.load(Ordering::SeqCst), 7);
    }
}
