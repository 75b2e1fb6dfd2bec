//! What ends with its process: a child that it forks keeps neither its descriptors nor the use of its handles.
//!
//! The kernel ends a connection when its last descriptor goes. A child that an application forks for something else
//! (a data loader, say) has a copy of each; once the process that it came from is killed, peers would neither see an
//! end of the connections nor a refusal of new ones. So each child lets go of them before it does anything else.
//!
//! Handles are taken out of the tables that operations look them up in, so that the child's calls find nothing there
//! and the parent's pay nothing for it.
//!
//! A child that is made by the bare system call does not pass here, and neither does a descriptor that another thread
//! has just made or is about to close when the process forks. That rank's peers learn it from its silence.

use std::ops::Deref;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::sync::Once;

/// Descriptors that are looked after, by number: the kernel's own limit for a process (`fs.nr_open`) unless it was
/// raised.
const MOST: usize = 1 << 20;

/// Those that a child does not keep, a bit each. A table that is neither allocated nor locked, for a child of many
/// threads may do neither.
static PRIVATE: [AtomicU64; MOST / 64] = [const { AtomicU64::new(0) }; MOST / 64];

/// Words of `PRIVATE` that may have bits.
static USED: AtomicUsize = AtomicUsize::new(0);

/// Something with a descriptor, such as a socket, that children of this process do not keep.
#[derive(Debug)]
pub struct Private<T: AsRawFd>(T);

impl<T: AsRawFd> Private<T> {
    /// Keeps its descriptor from children that are forked from now on.
    pub fn new(inner: T) -> Self {
        watch();
        let fd = inner.as_raw_fd() as usize;
        if let Some(word) = PRIVATE.get(fd / 64) {
            USED.fetch_max(fd / 64 + 1, Ordering::Relaxed);
            word.fetch_or(1 << (fd % 64), Ordering::SeqCst);
        }
        Self(inner)
    }
}

impl<T: AsRawFd> Drop for Private<T> {
    /// Before it is closed: afterwards somebody else may have the number.
    fn drop(&mut self) {
        let fd = self.0.as_raw_fd() as usize;
        if let Some(word) = PRIVATE.get(fd / 64) {
            word.fetch_and(!(1 << (fd % 64)), Ordering::SeqCst);
        }
    }
}

impl<T: AsRawFd> Deref for Private<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.0
    }
}

impl<T: AsRawFd> AsRawFd for Private<T> {
    fn as_raw_fd(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl<T: AsRawFd + AsFd> AsFd for Private<T> {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

impl From<OwnedFd> for Private<OwnedFd> {
    fn from(fd: OwnedFd) -> Self {
        Self::new(fd)
    }
}

/// Tables that a child empties: more than there are.
const TABLES: usize = 8;

/// The functions that empty them.
static EMPTY: [AtomicPtr<()>; TABLES] = [const { AtomicPtr::new(null_mut()) }; TABLES];

/// Has each child that is forked from now on call `empty` before anything else, once for each function that is given
/// here. It runs where other threads held locks when the process forked: it may neither lock nor allocate.
pub fn empty_in_children(empty: fn()) {
    watch();
    let empty = empty as *mut ();
    for place in &EMPTY {
        match place.compare_exchange(null_mut(), empty, Ordering::AcqRel, Ordering::Acquire) {
            Err(taken) if taken != empty => continue,
            _ => return,
        }
    }
    debug_assert!(false, "more tables than places");
}

/// Has the C library call `in_child`. It is asked through a part of it that is linked into this library and tells whose
/// the function is, so it forgets it when this library is unloaded.
fn watch() {
    static WATCHED: Once = Once::new();
    WATCHED.call_once(|| {
        // SAFETY: the function fits its type, and is there as long as the C library may call it.
        let code = unsafe { libc::pthread_atfork(None, None, Some(in_child)) };
        if code != 0 {
            let why = std::io::Error::from_raw_os_error(code);
            log::warn!("processes that this one forks will keep its sockets and handles: pthread_atfork failed: {why}");
        }
    });
}

/// In a child, before anything else. Other threads held locks when it was forked: system calls alone.
extern "C" fn in_child() {
    for place in &EMPTY {
        let empty = place.load(Ordering::Acquire);
        if !empty.is_null() {
            // SAFETY: `empty_in_children` stored a function of this type.
            unsafe { std::mem::transmute::<*mut (), fn()>(empty)() };
        }
    }
    // The numbers stay taken: objects of this library still think that they are theirs, and may close them.
    // SAFETY: plain system call.
    let nothing = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    for (at, word) in PRIVATE.iter().enumerate().take(USED.load(Ordering::Relaxed)) {
        let mut bits = word.swap(0, Ordering::SeqCst);
        while bits != 0 {
            let fd = (at * 64) as RawFd + bits.trailing_zeros() as RawFd;
            bits &= bits - 1;
            // SAFETY: the child's own copy of a descriptor of this library, which nobody in the child uses.
            unsafe {
                if nothing < 0 || libc::dup3(nothing, fd, libc::O_CLOEXEC) < 0 {
                    libc::close(fd);
                }
            }
        }
    }
    if nothing >= 0 {
        // SAFETY: made above, and nobody else's.
        unsafe { libc::close(nothing) };
    }
}
