//! Where the next launch goes, and when there is none for a while.

use std::time::{Duration, Instant};

/// How many there are: one for the launch that runs or is late, and one for the next. `copy.ptx` has boards for as
/// many.
pub const LAUNCH_SLOTS: usize = 2;
/// First pause once as many launches in a row were late as there are launch slots; it doubles with each more late
/// launch.
const PAUSE: Duration = Duration::from_millis(1);
/// The pause doubles at most so often.
const DOUBLED: u32 = 6;
/// The same of launches that the driver refuses: each is a call for nothing. About a second then.
const REFUSED_DOUBLED: u32 = 10;

/// The first that is free, from `last` on: where the last launch came up at once the next one probably does.
pub fn choose(last: usize, count: usize, is_free: impl Fn(usize) -> bool) -> Option<usize> {
    (last..last + count).map(|i| i % count).find(|&i| is_free(i))
}

/// Whether one more launch makes sense after others were late. As long as one launch slot is good there is no pause;
/// where all are late, on a GPU that is full or has its turn with another process, launches become rare.
#[derive(Debug, Default)]
pub struct Backoff {
    /// Late launches since one was in time.
    late: u32,
    /// Those that the driver has refused since then.
    refused: u32,
    until: Option<Instant>,
}

impl Backoff {
    /// A launch was in time.
    pub fn in_time(&mut self) {
        *self = Self::default();
    }

    /// A launch is late.
    pub fn late(&mut self, now: Instant) {
        self.late = self.late.saturating_add(1);
        if let Some(more) = self.late.checked_sub(LAUNCH_SLOTS as u32) {
            self.until = self.until.max(Some(now + PAUSE * (1 << more.min(DOUBLED))));
        }
    }

    /// There was no stream for a launch. It cost next to nothing, and the launches that have them end within
    /// milliseconds, unless they are late themselves.
    pub fn no_stream(&mut self, now: Instant) {
        self.until = self.until.max(Some(now + PAUSE));
    }

    /// The driver has refused a launch, for something that may pass.
    pub fn refused(&mut self, now: Instant) {
        let until = now + PAUSE * (1 << self.refused.min(REFUSED_DOUBLED));
        self.refused = self.refused.saturating_add(1);
        self.until = self.until.max(Some(until));
    }

    /// Whether one may be launched.
    pub fn allows(&self, now: Instant) -> bool {
        self.until.is_none_or(|until| now >= until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_slot_is_taken_again_as_long_as_it_is_free() {
        assert_eq!(choose(2, 4, |_| true), Some(2));
        assert_eq!(choose(2, 4, |i| i != 2), Some(3));
        assert_eq!(choose(2, 4, |i| i < 2), Some(0));
        assert_eq!(choose(2, 4, |i| i == 1), Some(1));
        assert_eq!(choose(2, 4, |_| false), None);
    }

    #[test]
    fn pauses_begin_when_all_were_late_and_grow_up_to_a_limit() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        for _ in 1..LAUNCH_SLOTS {
            backoff.late(now);
            assert!(backoff.allows(now));
        }
        for factor in [1, 2, 4, 8, 16, 32, 64, 64, 64] {
            backoff.late(now);
            let end = now + PAUSE * factor;
            assert!(!backoff.allows(end - Duration::from_nanos(1)), "{factor}");
            assert!(backoff.allows(end), "{factor}");
        }
        backoff.in_time();
        assert!(backoff.allows(now));
        backoff.late(now);
        assert!(backoff.allows(now), "one that is late says nothing of the others");
    }

    #[test]
    fn the_pause_for_want_of_a_stream_is_always_the_same() {
        let (mut backoff, mut now) = (Backoff::default(), Instant::now());
        for _ in 0..3 * LAUNCH_SLOTS {
            backoff.no_stream(now);
            assert!(!backoff.allows(now + PAUSE - Duration::from_nanos(1)));
            now += PAUSE;
            assert!(backoff.allows(now));
        }
        (0..LAUNCH_SLOTS + 1).for_each(|_| backoff.late(now));
        backoff.no_stream(now);
        assert!(!backoff.allows(now + PAUSE), "it shortens no other pause");
    }

    #[test]
    fn each_refusal_doubles_the_pause_up_to_a_second() {
        let (mut backoff, now) = (Backoff::default(), Instant::now());
        for factor in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024] {
            backoff.refused(now);
            // One that was refused is not up in time either.
            backoff.late(now);
            let end = now + PAUSE * factor;
            let late = now + PAUSE * 64;
            assert!(!backoff.allows(end - Duration::from_nanos(1)), "{factor}");
            assert!(backoff.allows(end.max(late)), "{factor}");
        }
        backoff.in_time();
        assert!(backoff.allows(now));
    }
}
