//! Statistics that are read from outside while the process runs: `oxygin stats`, `oxygin top`.
//!
//! Each set of contexts has a [`Page`], an anonymous file of shared memory with the [`layout`] of this version. Whoever
//! moves entries stores into it, relaxed and without a lock, one writer a record; another process finds the file among
//! the descriptors in `/proc/PID/fd` and maps it for reading ([`read`]). The kernel shows them to whoever may look at
//! the process (the same user), and the file is gone with its last user: nothing has to be cleaned up, and nothing
//! depends on the size of `/dev/shm`. Pages of records that nobody has written take no memory.

pub mod layout;
mod page;
pub mod read;

pub use page::{About, Page};

/// Now, in nanoseconds of `CLOCK_MONOTONIC`: the clock of all times in pages and traces, the same in all processes.
#[inline]
pub fn now() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a place for the answer; this clock is always there.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
