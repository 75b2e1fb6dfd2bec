//! Processes that a test starts: its own program once more, or a child that sleeps.

use super::apart;
use std::panic::Location;
use std::process::Command;

/// This program, which runs one of its tests alone: one of the file that calls this.
#[track_caller]
pub fn again(test: &str) -> Command {
    apart::again_from(test, Location::caller())
}

/// Sleeps, by system calls alone: the child of a process with threads may do no more.
pub fn sleep_for_ever() -> ! {
    loop {
        // SAFETY: plain system calls. It ends at some time, whatever becomes of the test.
        unsafe {
            libc::alarm(120);
            libc::pause();
        }
    }
}

/// A child that sleeps, made as an application makes one.
pub fn fork() -> libc::pid_t {
    // SAFETY: the child makes system calls alone.
    match unsafe { libc::fork() } {
        0 => sleep_for_ever(),
        child => child,
    }
}

/// From here on this process is the parent of what its children leave behind, and not the first process of the system.
pub fn adopt() {
    // SAFETY: plain call.
    assert_eq!(unsafe { libc::prctl(libc::PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) }, 0);
}

/// Whether this is a child of this process that nobody has waited for: as long as that is so, its number is nobody
/// else's.
pub fn is_ours(pid: libc::pid_t) -> bool {
    let flags = libc::WEXITED | libc::WNOHANG | libc::WNOWAIT;
    // SAFETY: the kernel fills a place that lives through the call.
    pid > 0 && unsafe { libc::waitid(libc::P_PID, pid as libc::id_t, &mut std::mem::zeroed(), flags) == 0 }
}

/// Sends a signal to a child, and to nobody else. Whoever else may wait for it is this thread.
pub fn signal(child: libc::pid_t, what: libc::c_int) {
    assert!(is_ours(child), "{child} is no child of this process");
    // SAFETY: a child of this process, dead or alive, but not another one.
    assert_eq!(unsafe { libc::kill(child, what) }, 0);
}

/// Ends a child, or what a child left behind, and waits for it.
pub fn end(child: libc::pid_t) {
    signal(child, libc::SIGKILL);
    // SAFETY: as above.
    assert_eq!(unsafe { libc::waitpid(child, std::ptr::null_mut(), 0) }, child);
}
