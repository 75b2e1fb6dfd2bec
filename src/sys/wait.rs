//! How a thread waits for what mostly comes within microseconds, and may take seconds.

use std::time::{Duration, Instant};

/// So long it looks without a pause: copies, kernels that are told to end and peers that are running come within it.
const HASTY: Duration = Duration::from_micros(200);
/// The pause between two looks afterwards; the kernel makes 100 µs of it.
const NAP: Duration = Duration::from_micros(50);
/// … once the wait has taken [`LONG`].
const LONG_NAP: Duration = Duration::from_micros(250);
const LONG: Duration = Duration::from_millis(50);

/// A wait that is under way. It yields at first and then sleeps, so that who waits for a GPU or a peer that stands does
/// not take a processor meanwhile.
#[derive(Debug)]
pub struct Wait {
    since: Instant,
}

impl Wait {
    /// A wait begins.
    pub fn begin() -> Self {
        Self { since: Instant::now() }
    }

    /// Something has come, and more is waited for as if the wait began now.
    pub fn begin_anew(&mut self) {
        self.since = Instant::now();
    }

    /// It has looked in vain: lets others go on, some time.
    pub fn rest(&self) {
        match self.pause(Instant::now()) {
            Duration::ZERO => std::thread::yield_now(),
            pause => std::thread::sleep(pause),
        }
    }

    /// How long it pauses at this moment; not at all at first.
    fn pause(&self, now: Instant) -> Duration {
        match now.saturating_duration_since(self.since) {
            waited if waited < HASTY => Duration::ZERO,
            waited if waited < LONG => NAP,
            _ => LONG_NAP,
        }
    }
}

/// Waits until something is so, at most until `end`. `false`: it is not.
pub fn until(end: Instant, mut is_so: impl FnMut() -> bool) -> bool {
    let wait = Wait::begin();
    loop {
        // First the clock: a thread that was held up looks once more.
        let is_last = Instant::now() > end;
        if is_so() {
            return true;
        }
        if is_last {
            return false;
        }
        wait.rest();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_yields_then_naps() {
        let wait = Wait::begin();
        let after = |us| wait.pause(wait.since + Duration::from_micros(us));
        assert_eq!([0, 199].map(after), [Duration::ZERO; 2]);
        assert_eq!([200, 49_999].map(after), [NAP; 2]);
        assert_eq!([50_000, 10_000_000].map(after), [LONG_NAP; 2]);
    }

    #[test]
    fn it_looks_once_after_the_end() {
        let mut looks = 0;
        assert!(!until(Instant::now() - Duration::from_millis(1), || {
            looks += 1;
            false
        }));
        assert_eq!(looks, 1);
        let held_up = Instant::now();
        let is_so = || held_up.elapsed() > Duration::from_millis(2);
        let look = || {
            let so = is_so();
            std::thread::sleep(Duration::from_millis(3));
            so
        };
        assert!(until(held_up + Duration::from_millis(1), look), "what came while it was held up");
    }
}
