//! How the ranks of a job meet, between rounds of streams.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How the ranks of a job meet.
pub struct Meeting<'a> {
    barrier: Box<dyn Fn() + 'a>,
    against: &'a AtomicU64,
}

impl<'a> Meeting<'a> {
    /// `against`: a zero that all ranks share.
    pub fn new(barrier: impl Fn() + 'a, against: &'a AtomicU64) -> Self {
        Self { barrier: Box::new(barrier), against }
    }

    pub fn wait(&self) {
        (self.barrier)();
    }

    /// Whether all ranks wish so.
    pub fn all(&self, wish: bool) -> bool {
        self.against.fetch_add(u64::from(!wish), Ordering::SeqCst);
        self.wait();
        let found = self.against.load(Ordering::SeqCst);
        self.wait();
        self.against.fetch_sub(u64::from(!wish), Ordering::SeqCst);
        self.wait();
        found == 0
    }
}

/// Rounds until all ranks have enough, at least two and at most for so long.
pub fn rounds(meeting: &Meeting, what: &str, mut round: impl FnMut(usize), is_enough: impl Fn() -> bool) {
    let end = Instant::now() + Duration::from_secs(150);
    for n in 0.. {
        round(n);
        meeting.wait();
        if meeting.all(n > 0 && is_enough()) {
            return;
        }
        assert!(Instant::now() < end, "not after {} rounds: {what}", n + 1);
    }
}
