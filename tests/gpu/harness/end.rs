//! The end of a test on the fake driver: it waits for what the test has left on the GPUs.

use super::Fake;
use std::time::{Duration, Instant};

/// How long it waits.
const ENDED_WITHIN: Duration = Duration::from_secs(1);

impl Drop for Fake {
    fn drop(&mut self) {
        // A GPU that has failed is left to itself: what its streams and its copy kernel were given may be under way, in
        // memory that goes.
        self.hold(0);
        (0..4).for_each(|gpu| self.block(gpu, false));
        self.hold_kernels(false);
        self.hold_launches(0);
        self.end_kernels();
        let end = Instant::now() + ENDED_WITHIN;
        while self.launched() > 0 && Instant::now() < end {
            std::thread::sleep(Duration::from_micros(100));
        }
        self.rest();
        // SAFETY: the fake has a function of this type; no communicator of the test is there any more.
        unsafe { self.call::<extern "C" fn()>(b"fake_free_all")() };
    }
}
