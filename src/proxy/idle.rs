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

/// What a pass moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PassMoved {
    /// Nothing.
    Nothing,
    /// What a kernel carried out by itself: the thread only counts it, and others may have the processor meanwhile.
    ByKernel,
    /// Something of the thread's own.
    Own,
}

impl PassMoved {
    /// So many entries, and those of them that a kernel carried out.
    pub fn of(moved: u32, by_kernel: u32) -> Self {
        match moved {
            0 => Self::Nothing,
            _ if moved == by_kernel => Self::ByKernel,
            _ => Self::Own,
        }
    }
}

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

    /// After a pass; `now` is asked rarely.
    #[inline]
    pub fn after(&mut self, moved: PassMoved, is_busy: bool, now: impl FnOnce() -> Instant) -> Next {
        self.passes = self.passes.wrapping_add(1);
        if moved != PassMoved::Nothing {
            (self.since, self.rest) = (None, Rest::Awake);
            if moved == PassMoved::ByKernel && self.passes % LOOK == 0 {
                return Next::Yield;
            }
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
    fn passes(idle: &mut Idle, start: Instant, ms: u64, moved: PassMoved, is_busy: bool) -> Next {
        let most = if moved == PassMoved::Own { 1 } else { LOOK };
        (0..most)
            .map(|_| idle.after(moved, is_busy, || start + Duration::from_millis(ms)))
            .find(|next| *next != Next::Pass)
            .unwrap_or(Next::Pass)
    }

    #[test]
    fn it_spins_then_naps_then_sleeps_and_wakes_at_once() {
        let (start, mut idle) = (Instant::now(), Idle::new(Some(Duration::from_millis(5))));
        for (ms, moved, is_busy, next) in [
            (0, PassMoved::Nothing, false, Next::Yield),
            (4, PassMoved::Nothing, false, Next::Yield),
            (5, PassMoved::Nothing, false, Next::Sleep(SHORT)),
            (6, PassMoved::Nothing, false, Next::Sleep(SHORT)),
            (1500, PassMoved::Nothing, true, Next::Sleep(SHORT)),
            (1500, PassMoved::Nothing, false, Next::Sleep(LONG)),
            (9900, PassMoved::Nothing, false, Next::Sleep(LONG)),
            (10_000, PassMoved::Nothing, false, Next::Sleep(LONGEST)),
            (10_001, PassMoved::Nothing, true, Next::Sleep(SHORT)),
            (10_002, PassMoved::Own, false, Next::Pass),
            (10_003, PassMoved::Nothing, false, Next::Yield),
            (10_005, PassMoved::ByKernel, true, Next::Yield),
            (10_009, PassMoved::ByKernel, true, Next::Yield),
            (10_010, PassMoved::Nothing, false, Next::Yield),
            (10_015, PassMoved::Nothing, false, Next::Sleep(SHORT)),
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
        assert_eq!(idle.after(PassMoved::Nothing, false, || start + Duration::from_millis(10_016)), Next::Sleep(SHORT));
    }

    #[test]
    fn it_spins_for_ever_if_told_so() {
        let start = Instant::now();
        let mut idle = Idle::new(None);
        for pass in 0..10 * LOOK {
            let next = idle.after(PassMoved::Nothing, false, || start + Duration::from_secs(pass.into()));
            assert!(matches!(next, Next::Pass | Next::Yield));
        }
    }
}
