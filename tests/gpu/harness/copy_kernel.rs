//! What the tests of the copy kernel share.

use super::*;
use crate::support::common::job;

/// Places where each rank's copy kernel can be launched; each has a launch when it is made, which carries nothing.
pub const LAUNCH_SLOTS: usize = 2;
/// Launches when two ranks register.
pub const FIRST: u64 = 2 * LAUNCH_SLOTS as u64;

/// The fake driver, the copy kernel asked for.
pub fn take() -> Fake {
    let fake = Fake::take();
    fake.set_issue("kernel=4096");
    fake
}

/// What two ranks on one GPU do with two contexts: each has windows of 8 words, a source and a destination, and a
/// signal.
pub fn on_one_gpu(fake: &Fake, body: impl Fn(&Rank, [&GpuWindow; 3]) + Sync) {
    job(2, 2, |r| {
        let _context = fake.enter(0);
        let [src, dst] = [(), ()].map(|()| fake.window(r, 0, 8, 0));
        let sig = fake.signals(r, 0, 1, NEVER_RESET);
        r.job.barrier.wait();
        body(r, [&src, &dst, &sig]);
        r.job.barrier.wait();
    });
}

impl Fake {
    /// So many of the next queries of the application's streams take a while and find work.
    pub fn slow_queries(&self, n: usize) {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn(usize)>(b"fake_slow_queries")(n) }
    }

    /// How many of them are to come.
    pub fn slow_queries_left(&self) -> usize {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> usize>(b"fake_slow_queries_left")() }
    }

    /// Of the commands that copy kernels have done so far those that were to be reported with their go.
    pub fn awaited_commands(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_awaited_commands")() }
    }

    /// Of the commands that copy kernels have done so far those whose signals came behind others of their go.
    pub fn ordered_commands(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_ordered_commands")() }
    }

    /// Of the commands that copy kernels have done so far those that nobody was known to wait for.
    pub fn unawaited_commands(&self) -> u64 {
        // SAFETY: as above.
        unsafe { self.call::<extern "C" fn() -> u64>(b"fake_unawaited_commands")() }
    }
}
