//! Whether a kernel has all lanes of a thread, so that nobody else looks at their queues, and when these are brought to
//! the GPU.
//!
//! Queues that are there come back as soon as the thread looks at them, one by one and at a price. So where they came
//! back in the midst of traffic they are brought again once it is steady: once launches in a row have had all lanes,
//! each directly from the one before.

use std::time::{Duration, Instant};

/// Time after which the queues of a launch that has carried something are brought.
const SETTLED: Duration = Duration::from_micros(200);
/// Launches in a row that have all lanes directly from the one before are so many at most. Twice as many are asked for
/// each time that the thread had to look in the midst of traffic all the same.
const STEADY_MOST: u32 = 1024;
/// Queues that stayed for so many launches have been worth it: half as many are asked for the next time.
const WORTH_IT: u32 = 64;
/// Nothing was carried for so long: a burst is over, and that the thread looks delays nobody.
const OVER: Duration = Duration::from_micros(500);

/// What a thread knows of it.
pub struct Together {
    /// The launch that serves, or is about to, has all lanes; their queues may be brought.
    has_all: bool,
    may_bring: bool,
    /// The thread has not looked at a lane since a launch had all.
    is_direct: bool,
    /// Since when the present launch serves, and whether it has carried something, and has had queues brought.
    began: Instant,
    has_carried: bool,
    is_brought: bool,
    /// Launches in a row that had all lanes directly from the one before, that there are to be, and that these are at
    /// least.
    in_a_row: u32,
    wanted: u32,
    least: u32,
    /// Launches in a row in whose time the queues were on the GPU.
    stayed: u32,
    /// When a launch was seen to have carried something last.
    carried: Instant,
}

impl Together {
    /// No launch has anything. So many in a row, at least, are steady traffic.
    pub fn new(least: u32) -> Self {
        let now = Instant::now();
        Self {
            has_all: false,
            may_bring: false,
            is_direct: false,
            began: now,
            has_carried: false,
            is_brought: false,
            in_a_row: 0,
            wanted: least,
            least,
            stayed: 0,
            carried: now,
        }
    }

    /// All lanes are held for the next launch; or one at least is the thread's.
    pub fn hold(&mut self, all: bool) {
        self.has_all = all;
    }

    /// A launch begins with all lanes, or not. `may_bring`: they may be brought.
    pub fn begin(&mut self, all: bool, may_bring: bool, now: Instant) {
        self.may_bring = may_bring;
        self.in_a_row = if all && self.is_direct { self.in_a_row + 1 } else { 0 };
        (self.has_all, self.is_direct) = (all, all);
        (self.began, self.has_carried, self.is_brought) = (now, false, false);
    }

    /// The launch has carried something.
    pub fn carry(&mut self, now: Instant) {
        (self.has_carried, self.carried) = (true, now);
    }

    /// Whether the queues are to be brought to the GPU now; says so once a launch.
    pub fn is_to_bring(&mut self, now: Instant) -> bool {
        let is_steady = self.has_all && self.may_bring && self.in_a_row >= self.wanted;
        let is_time = is_steady && self.has_carried && !self.is_brought && now.duration_since(self.began) > SETTLED;
        if is_time {
            self.is_brought = true;
            self.stayed += 1;
        }
        is_time
    }

    /// Whether the thread need look at no lane. `false`: it is about to, and queues that were on the GPU come back.
    #[inline]
    pub fn has_all(&mut self) -> bool {
        if !self.has_all {
            self.is_direct = false;
            if self.stayed > 0 {
                self.come_back(Instant::now());
            }
        }
        self.has_all
    }

    #[cold]
    fn come_back(&mut self, now: Instant) {
        if self.stayed >= WORTH_IT {
            self.wanted = (self.wanted / 2).max(self.least);
        } else if now.saturating_duration_since(self.carried) < OVER {
            self.wanted = (2 * self.wanted).clamp(1, STEADY_MOST);
        }
        (self.stayed, self.in_a_row) = (0, 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEADY: u32 = 2;
    const MOMENT: Duration = Duration::from_micros(1);

    /// A launch has all lanes from `now` on, carries something, and ends; whether it had queues brought.
    fn launch(together: &mut Together, now: &mut Instant) -> bool {
        together.hold(true);
        assert!(together.has_all());
        together.begin(true, true, *now);
        together.carry(*now);
        assert!(!together.is_to_bring(*now + SETTLED), "a short burst may be over by then");
        *now += SETTLED + MOMENT;
        let is_brought = together.is_to_bring(*now);
        assert!(!together.is_to_bring(*now + MOMENT), "it is asked for once");
        together.carry(*now);
        together.hold(false);
        is_brought
    }

    /// Launches until one has queues brought, the first one behind a look of the thread.
    fn until_brought(together: &mut Together, now: &mut Instant) -> u32 {
        (1..).find(|_| launch(together, now)).expect("an endless row")
    }

    #[test]
    fn traffic_is_steady_where_launches_have_all_lanes_from_each_other() {
        let (mut together, mut now) = (Together::new(STEADY), Instant::now());
        assert_eq!(until_brought(&mut together, &mut now), STEADY + 1);
        assert!(launch(&mut together, &mut now), "and the next one again");
        // The thread looks in between.
        let mut together = Together::new(STEADY);
        for _ in 0..10 * STEADY {
            assert!(!launch(&mut together, &mut now) && !together.has_all());
        }
    }

    #[test]
    fn launches_that_carry_nothing_or_have_some_lanes_alone_bring_nothing() {
        let (mut together, now) = (Together::new(STEADY), Instant::now());
        for _ in 0..10 * STEADY {
            together.hold(true);
            together.begin(true, true, now);
            assert!(!together.is_to_bring(now + 2 * SETTLED), "nothing was carried");
            together.hold(false);
        }
        for _ in 0..10 * STEADY {
            together.begin(false, true, now);
            together.carry(now);
            assert!(!together.is_to_bring(now + 2 * SETTLED), "the thread looks at the others");
        }
    }

    #[test]
    fn more_is_asked_for_where_queues_came_back_in_the_midst_of_traffic() {
        let (mut together, mut now) = (Together::new(STEADY), Instant::now());
        for wanted in [STEADY, 2 * STEADY, 4 * STEADY] {
            assert_eq!(until_brought(&mut together, &mut now), wanted + 1);
            together.come_back(now);
            together.is_direct = false;
        }
        // Behind a burst they come back at no cost.
        assert_eq!(until_brought(&mut together, &mut now), 8 * STEADY + 1);
        together.come_back(now + OVER);
        together.is_direct = false;
        assert_eq!(until_brought(&mut together, &mut now), 8 * STEADY + 1);
        // They have been worth it.
        assert!((1..WORTH_IT).all(|_| launch(&mut together, &mut now)));
        together.come_back(now);
        together.is_direct = false;
        assert_eq!(until_brought(&mut together, &mut now), 4 * STEADY + 1);
        // Who asks for none has the first launch bring them, until they come back too soon.
        let mut together = Together::new(0);
        for wanted in [0, 1, 2] {
            assert_eq!(until_brought(&mut together, &mut now), wanted + 1);
            together.come_back(now);
            together.is_direct = false;
        }
        let mut together = Together::new(STEADY);
        // There is a limit to it.
        for _ in 0..20 {
            together.stayed = 1;
            together.carry(now);
            together.come_back(now);
        }
        assert_eq!(together.wanted, STEADY_MOST);
    }
}
