//! How a thread that spins gives way to others, and how two that spin part.
//!
//! Two threads that spin and yield may find themselves on one processor, for example when both were woken at once: the
//! engine threads of two ranks of a host. Each then waits for the other's turn, some 35 µs, before it sees anything,
//! and the kernel leaves them there for 15 to 40 ms (6.18, measured with idle processors beside). A thread that sleeps,
//! however shortly, is placed on an idle processor when it wakes. So who sees that others take its turns sleeps once.
//!
//! Where no processor is idle that does not help. A thread that yields to one that computes waits for the whole of that
//! one's turn, 3 to 4 ms, and yields again as soon as it has looked once: it is on the processor for a fiftieth of the
//! time, and somebody waits 1.9 ms for it on average (6.18, one other thread). Who sleeps in between instead, and takes
//! less than its share so, has the processor nearly as soon as it wakes, and is waited for 0.1 ms. So a thread that has
//! waited for whole turns sleeps where it would yield, and looks now and then whether it still has to.

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
/// From when on a yield has waited for the turn of a thread that computes. So many in a row have: a hypervisor that
/// takes the processor away does not do so at each yield.
const WHOLE_TURN: Duration = Duration::from_millis(1);
/// How long it sleeps instead then, to which the kernel adds 50 µs: shorter, and it takes so much of the processor that
/// it has to wait for turns all the same.
const NAP: Duration = Duration::from_micros(20);
/// For how long, until it yields once to see whether that still takes a whole turn; twice as long each time that it
/// does, up to a hundred turns.
const NAPS_FOR: Duration = Duration::from_millis(50);
const NAPS_FOR_MOST: Duration = Duration::from_millis(400);

/// One thread's yields.
#[derive(Debug, Default)]
pub struct Yielder {
    /// Yields in a row that others have taken, and that took a whole turn.
    taken: u32,
    turns: u32,
    slept: Option<Instant>,
    /// It sleeps instead until then, and for how long it did the last time.
    naps_until: Option<Instant>,
    naps_for: Duration,
}

impl Yielder {
    /// Lets others have the processor, and looks for another one if that was long.
    pub fn give_way(&mut self) {
        let before = Instant::now();
        if self.should_nap(before) {
            return std::thread::sleep(NAP);
        }
        std::thread::yield_now();
        let now = Instant::now();
        if self.should_part(now - before, now) {
            std::thread::sleep(MOMENT);
        }
    }

    /// Whether to sleep instead of a yield.
    fn should_nap(&self, now: Instant) -> bool {
        self.naps_until.is_some_and(|until| now < until)
    }

    /// Whether to sleep, after a yield that took so long. Notes whether to do so instead of the next ones.
    fn should_part(&mut self, away: Duration, now: Instant) -> bool {
        self.taken = if away < TAKEN { 0 } else { self.taken + 1 };
        self.turns = if away < WHOLE_TURN { 0 } else { self.turns + 1 };
        self.naps_for = match self.naps_until {
            // Behind naps one such yield tells that it is as before.
            Some(_) if self.turns > 0 => NAPS_FOR_MOST.min(2 * self.naps_for),
            None if self.turns >= IN_A_ROW => NAPS_FOR,
            _ => Duration::ZERO,
        };
        self.naps_until = (!self.naps_for.is_zero()).then(|| now + self.naps_for);
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

    #[test]
    fn who_waits_for_whole_turns_sleeps_instead() {
        let (start, mut yielder) = (Instant::now(), Yielder::default());
        let ms = |n| start + Duration::from_millis(n);
        let mut after = |at, away: u64| {
            yielder.should_part(Duration::from_millis(away), ms(at));
            (0..).find(|n| !yielder.should_nap(ms(at + n))).unwrap_or(0)
        };
        assert_eq!([after(0, 0), after(3, 3), after(4, 0), after(8, 3)], [0; 4], "one alone may be anything");
        let naps: Vec<_> = [12, 70, 180, 400, 900, 1400].map(|at| after(at, 4)).into();
        assert_eq!(naps, [50, 100, 200, 400, 400, 400]);
        assert_eq!([after(1800, 0), after(1804, 4), after(1808, 4)], [0, 0, 50], "nobody computes any more, and again");
    }
}
