//! Who is alive: a robust mutex in shared memory that its owner holds for life.
//!
//! When the owner's thread ends, by any signal or by `exec`, the kernel marks the mutex, before it gives the process
//! number away; peers see the mark with one load and need no descriptor, no heartbeat and no process number. A forked
//! child does not hold what its parent holds.
//!
//! glibc and, at a thread's end, the kernel follow what lies beside the word, so the memory must be the owner's to
//! write alone (`status`). Peers read the word and nothing else.

use crate::error::{Error, Result};
use std::sync::atomic::{fence, AtomicU32, Ordering};

/// What a peer finds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Liveness {
    /// Its owner holds it.
    Alive,
    /// Its owner ended in good order.
    Closed,
    /// Its owner was killed.
    Dead,
}

/// Makes the mutex in shared memory.
///
/// # Safety
/// `at` is aligned shared memory that this process alone can write and that nobody uses yet.
pub unsafe fn init(at: *mut libc::pthread_mutex_t) -> Result<()> {
    // SAFETY: the attribute object is initialised before use and destroyed after; `at` is the caller's promise.
    let code = unsafe {
        let mut attr = std::mem::MaybeUninit::<libc::pthread_mutexattr_t>::uninit();
        let mut code = libc::pthread_mutexattr_init(attr.as_mut_ptr());
        if code == 0 {
            code = libc::pthread_mutexattr_setpshared(attr.as_mut_ptr(), libc::PTHREAD_PROCESS_SHARED);
            if code == 0 {
                code = libc::pthread_mutexattr_setrobust(attr.as_mut_ptr(), libc::PTHREAD_MUTEX_ROBUST);
            }
            if code == 0 {
                code = libc::pthread_mutex_init(at, attr.as_ptr());
            }
            libc::pthread_mutexattr_destroy(attr.as_mut_ptr());
        }
        code
    };
    match code {
        0 => Ok(()),
        code => {
            Err(Error::system(format!("making a robust mutex failed: {}", std::io::Error::from_raw_os_error(code))))
        }
    }
}

/// Takes the mutex for the rest of the calling thread's life.
///
/// # Safety
/// `at` was made by [`init`] and stays mapped until [`release`], or until the thread has ended.
pub unsafe fn hold(at: *mut libc::pthread_mutex_t) -> bool {
    // SAFETY: the caller's promise.
    unsafe { libc::pthread_mutex_trylock(at) == 0 }
}

/// Ends in good order. Called by the thread that holds the mutex.
///
/// # Safety
/// As for [`hold`].
pub unsafe fn release(at: *mut libc::pthread_mutex_t) {
    // SAFETY: the caller's promise.
    unsafe { libc::pthread_mutex_unlock(at) };
}

/// `FUTEX_OWNER_DIED` of linux/futex.h: the kernel sets it in the word of every robust mutex that a dying thread holds.
const OWNER_DIED: u32 = 0x4000_0000;

/// Looks, without waiting and without touching: the memory may be mapped for reading alone.
///
/// # Safety
/// `at` is mapped shared memory of the right size; its bytes may be anything that its owner left there.
#[inline]
pub unsafe fn look(at: *const libc::pthread_mutex_t) -> Liveness {
    // SAFETY: mapped (caller) and aligned; a relaxed load of four bytes writes nothing. The futex word is the first
    // of a pthread_mutex_t on every Linux glibc (`__data.__lock`): the owner's thread number, 0 when free.
    let word = unsafe { AtomicU32::from_ptr(at.cast_mut().cast()) }.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    match word {
        0 => Liveness::Closed,
        _ if word & OWNER_DIED != 0 => Liveness::Dead,
        _ => Liveness::Alive,
    }
}
