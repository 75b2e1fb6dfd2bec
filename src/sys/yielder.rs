//! How a thread that spins gives way to others, and how two that spin part.
//!
//! Two threads that spin and yield may find themselves on one processor, for example when both were woken at once: the
//! engine threads of two ranks of a host. Each then waits for the other's turn, some 35 µs, before it sees anything,
//! and the kernel leaves them there for 15 to 40 ms (6.18, measured with idle processors beside). A thread that sleeps,
//! however shortly, is placed on an idle processor when it wakes. So who sees that others take its turns sleeps once.

use std::time::{Duration, Instant};

/// From when on a yield has let another thread spin: one without takers costs 0.3 to 1 µs, a look of a thread for bulk
/// at its connections 2.
const TAKEN: Duration = Duration::from_micros(10);
/// From when on it has stood behind a thread that does not yield: no second one is waited for.
const TAKEN_LONG: Duration = Duration::from_micros(200);
/// Yields in a row that others take: one alone may be an interrupt, or a thread with a moment's work.
const IN_A_ROW: u32 = 2;
/// Between two sleeps: where no processor is idle they are in vain, and each costs 60 µs.
const SLEEP_EVERY: Duration = Duration::from_millis(2);
/// The shortest sleep there is; the kernel adds 50 µs.
const MOMENT: Duration = Duration::from_micros(1);

/// One thread's yields.
#[derive(Debug, Default)]
pub struct Yielder {
    taken: u32,
    slept: Option<Instant>,
}

impl Yielder {
    /// Lets others have the processor, and looks for another one if that was long.
    pub fn give_way(&mut self) {
        let before = Instant::now();
        std::thread::yield_now();
        let now = Instant::now();
        if self.should_part(now - before, now) {
            std::thread::sleep(MOMENT);
        }
    }

    /// Whether to sleep, after a yield that took so long.
    fn should_part(&mut self, away: Duration, now: Instant) -> bool {
        self.taken = if away < TAKEN { 0 } else { self.taken + 1 };
        let is_shared = self.taken >= IN_A_ROW || away >= TAKEN_LONG;
        if !is_shared || self.slept.is_some_and(|slept| now - slept < SLEEP_EVERY) {
            return false;
        }
        (self.taken, self.slept) = (0, Some(now));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_shares_a_processor_sleeps_now_and_then() {
        let (start, mut yielder) = (Instant::now(), Yielder::default());
        let mut after = |us, away| yielder.should_part(Duration::from_micros(away), start + Duration::from_micros(us));
        assert!((0..100).all(|i| !after(i, 2)), "nobody takes its turns");
        assert!(!after(100, 40) && !after(140, 2) && !after(180, 40), "two in a row");
        assert!(after(220, 40));
        // In vain, as it seems: not at once again.
        assert!((0..40).all(|i| !after(260 + 40 * i, 40)));
        assert!(after(2300, 40));
        assert!(!after(2400, 3000) && after(5400, 3000), "one that is long enough");
    }
}
