//! How a thread that finds nothing waits: it spins, then sleeps for longer and longer.

use std::time::{Duration, Instant};

/// Passes without anything between two looks at the clock, and at other threads that want the core.
const LOOK: u32 = 64;
/// How long it naps while something is unfinished, or little time has passed: less than a copy over a network takes.
const SHORT: Duration = Duration::from_micros(20);
/// From when on it sleeps for long, and for how long: an application between two steps.
const LONG_AFTER: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_millis(20);
/// From when on it sleeps for longest, and for how long: a communicator that nobody uses, and that is to cost no more
/// than a thousandth of a core. Each wake-up costs some 50 µs of one in a virtual machine.
const LONGEST_AFTER: Duration = Duration::from_secs(10);
const LONGEST: Duration = Duration::from_millis(80);

/// What to do after a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// The next pass, at once.
    Pass,
    /// The next pass, after others had the core.
    Yield,
    /// The next pass after so long.
    Sleep(Duration),
}

/// How a thread rests between two passes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// It does not.
    Awake,
    /// It naps, for less than a copy over a network takes.
    Naps,
    /// It sleeps for so long that a pass more costs nothing beside.
    Sleeps,
}

/// A thread's state of rest.
#[derive(Debug)]
pub struct Idle {
    /// How long it spins after the last entry; `None`: for ever.
    spin: Option<Duration>,
    passes: u32,
    since: Option<Instant>,
    /// Each pass is followed by a look at the clock where it rests.
    rest: Rest,
}

impl Idle {
    /// Awake.
    pub fn new(spin: Option<Duration>) -> Self {
        Self { spin, passes: 0, since: None, rest: Rest::Awake }
    }

    /// After a pass that moved something or did not; `now` is asked rarely.
    #[inline]
    pub fn after(&mut self, moved: bool, is_busy: bool, now: impl FnOnce() -> Instant) -> Next {
        self.passes = self.passes.wrapping_add(1);
        if moved {
            (self.since, self.rest) = (None, Rest::Awake);
        } else if self.rest != Rest::Awake || self.passes % LOOK == 0 {
            return self.look(is_busy, now());
        }
        Next::Pass
    }

    /// How it rests between passes.
    pub fn rest(&self) -> Rest {
        self.rest
    }

    fn look(&mut self, is_busy: bool, now: Instant) -> Next {
        let idle = now.duration_since(*self.since.get_or_insert(now));
        let Some(spin) = self.spin.filter(|&spin| idle >= spin) else { return Next::Yield };
        let time = match idle {
            _ if is_busy || idle < LONG_AFTER.max(spin) => SHORT,
            _ if idle < LONGEST_AFTER.max(spin) => LONG,
            _ => LONGEST,
        };
        self.rest = if time == SHORT { Rest::Naps } else { Rest::Sleeps };
        Next::Sleep(time)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Passes so many milliseconds after the start, until there is something to do between two of them.
    fn passes(idle: &mut Idle, start: Instant, ms: u64, moved: bool, is_busy: bool) -> Next {
        let most = if moved { 1 } else { LOOK };
        (0..most)
            .map(|_| idle.after(moved, is_busy, || start + Duration::from_millis(ms)))
            .find(|next| *next != Next::Pass)
            .unwrap_or(Next::Pass)
    }

    #[test]
    fn it_spins_then_naps_then_sleeps_and_wakes_at_once() {
        let (start, mut idle) = (Instant::now(), Idle::new(Some(Duration::from_millis(5))));
        for (ms, moved, is_busy, next) in [
            (0, false, false, Next::Yield),
            (4, false, false, Next::Yield),
            (5, false, false, Next::Sleep(SHORT)),
            (6, false, false, Next::Sleep(SHORT)),
            (1500, false, true, Next::Sleep(SHORT)),
            (1500, false, false, Next::Sleep(LONG)),
            (9900, false, false, Next::Sleep(LONG)),
            (10_000, false, false, Next::Sleep(LONGEST)),
            (10_001, false, true, Next::Sleep(SHORT)),
            (10_002, true, false, Next::Pass),
            (10_003, false, false, Next::Yield),
            (10_009, false, false, Next::Sleep(SHORT)),
        ] {
            assert_eq!(passes(&mut idle, start, ms, moved, is_busy), next, "at {ms} ms");
            let rest = match next {
                Next::Sleep(SHORT) => Rest::Naps,
                Next::Sleep(_) => Rest::Sleeps,
                _ => Rest::Awake,
            };
            assert_eq!(idle.rest(), rest, "at {ms} ms");
        }
        // Every pass is a look at the clock now.
        assert_eq!(idle.after(false, false, || start + Duration::from_millis(10_010)), Next::Sleep(SHORT));
    }

    #[test]
    fn it_spins_for_ever_if_told_so() {
        let start = Instant::now();
        let mut idle = Idle::new(None);
        for pass in 0..10 * LOOK {
            let next = idle.after(false, false, || start + Duration::from_secs(pass.into()));
            assert!(matches!(next, Next::Pass | Next::Yield));
        }
    }
}
