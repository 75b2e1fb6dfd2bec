//! What a child of this process keeps of a library's descriptors.

#[path = "../support/mod.rs"]
mod support;

use oxygin::sys::fork::Private;
use oxygin::sys::handles::{self, Kind, Object};
use std::ffi::c_void;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;
use support::children::{self, fork};

/// A child that stays until it is told to end.
struct Child(libc::pid_t);

impl Drop for Child {
    fn drop(&mut self) {
        children::end(self.0);
    }
}

fn pair() -> (UnixStream, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    theirs.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    (ours, theirs)
}

#[test]
fn a_child_keeps_no_private_descriptor() {
    let (ours, mut theirs) = pair();
    let (kept, other) = pair();
    let (ours, gone) = (Private::new(ours), Private::new(pair().0));
    drop(gone);
    let child = Child(fork());
    // It is the parent's as before.
    (&*ours).write_all(b"x").unwrap();
    drop((ours, kept));
    let mut all = Vec::new();
    theirs.read_to_end(&mut all).expect("an end, though the child lives");
    assert_eq!(all, b"x");
    // What is not private is the child's as well.
    other.set_nonblocking(true).unwrap();
    assert_eq!((&other).read(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    drop(child);
    other.set_nonblocking(false).unwrap();
    assert_eq!((&other).read(&mut [0]).unwrap(), 0);
}

struct Window;

impl Object for Window {
    const KIND: Kind = Kind::Window;
}

/// A child that is forked while another thread changes the table of handles: that thread is not there to let go of it.
#[test]
fn a_child_is_told_at_once_that_a_handle_is_none() {
    let own = handles::insert(Arc::new(Window)).unwrap();
    let strangers = [std::ptr::null_mut(), 0x5555_1234_5678_u64 as *mut c_void, own];
    let asks_in_a_child = |_: &Window| {
        // SAFETY: the child looks the handles up, and ends by a signal if that takes too long.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: plain call.
            unsafe { libc::alarm(10) };
            let found = |&handle: &*mut c_void| {
                handles::clone::<Window>(handle).is_some() || handles::remove::<Window>(handle).is_some()
            };
            let code = strangers.iter().any(found).into();
            // SAFETY: plain call; nothing of the parent's is to be run.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: a child of ours that nobody else waits for.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(status, 0, "it found something, or waited for the lock");
        true
    };
    assert!(handles::any::<Window>(asks_in_a_child));
    handles::remove::<Window>(own).unwrap();
}
