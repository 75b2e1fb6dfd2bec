//! Processes that a test starts: its own program once more, or a child that sleeps.

#![allow(dead_code, reason = "every test file uses its own part")]

use std::process::Command;

/// This program, which runs one of its tests alone.
pub fn again(test: &str) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--include-ignored", "--nocapture", "--test-threads=1"]);
    command
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
