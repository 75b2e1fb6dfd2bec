//! What a child of this process keeps of a library's descriptors.

#[path = "../support/mod.rs"]
mod support;

use oxygin::sys::fork::Private;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::net::UnixStream;
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
