//! Signs of life from rank 0 to those who wait in a step: its host would acknowledge what they send without it, and a
//! child that it forked may hold its sockets.

use std::time::{Duration, Instant};

/// Beats within the time that rank 0 may be silent.
const BEATS: u32 = 8;
/// Nor are two further apart than this: other ranks may have another `OXYGIN_PEER_TIMEOUT` than rank 0. As many as a
/// thousand ranks that wait are sent four thousand bytes a second.
const APART: Duration = Duration::from_millis(250);
/// So many more are waited for: its last one may be nearly as much older than the moment when it was stopped.
const MORE: u32 = 2;
/// How much longer a silence must last, or an answer stay out, once that was noticed: who was stopped itself finds what
/// came meanwhile.
pub const DOUBT: Duration = Duration::from_millis(50);

/// When rank 0 beats.
#[derive(Debug)]
pub struct Beats {
    every: Duration,
    next: Instant,
}

impl Beats {
    /// From `now` on, often enough for those who wait `silence` long for the next, and for most others.
    pub fn new(silence: Duration, now: Instant) -> Self {
        let every = (silence / BEATS).min(APART);
        Self { every, next: now + every }
    }

    /// When it is due.
    pub fn next(&self) -> Instant {
        self.next
    }

    /// Whether it is; it counts as done then.
    pub fn is_due(&mut self, now: Instant) -> bool {
        let due = now >= self.next;
        if due {
            self.next = now + self.every;
        }
        due
    }
}

/// What another rank makes of them. There is nothing to expect before the first: rank 0 may not be in the step yet.
#[derive(Debug)]
pub struct Expectation {
    /// From its last word until it counts as gone.
    patience: Duration,
    /// When it counts as gone.
    until: Option<Instant>,
    doubted: bool,
}

impl Expectation {
    /// Nothing was heard yet.
    pub fn new(silence: Duration) -> Self {
        // Rank 0 may be more patient itself.
        Self { patience: silence / BEATS * BEATS + (silence / BEATS).max(APART) * MORE, until: None, doubted: false }
    }

    /// A beat came.
    pub fn heard(&mut self, now: Instant) {
        (self.until, self.doubted) = (Some(now + self.patience), false);
    }

    /// The connection is another one.
    pub fn forget(&mut self) {
        (self.until, self.doubted) = (None, false);
    }

    /// When [`Expectation::is_over`] is to be asked again.
    pub fn until(&self) -> Option<Instant> {
        self.until
    }

    /// Whether it has been silent for too long.
    pub fn is_over(&mut self, now: Instant) -> bool {
        if self.until.is_none_or(|until| now < until) {
            return false;
        }
        if !std::mem::replace(&mut self.doubted, true) {
            self.until = Some(now + DOUBT);
            return false;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whatever each has for the time that the other may be silent.
    #[test]
    fn beats_come_in_time_for_ranks_with_other_limits() {
        let now = Instant::now();
        for (of_root, own) in [(35.0, 3.0), (600.0, 35.0), (600.0, 0.2), (0.5, 600.0)] {
            let [of_root, own] = [of_root, own].map(Duration::from_secs_f64);
            let (mut beats, mut life) = (Beats::new(of_root, now), Expectation::new(own));
            life.heard(now);
            for _ in 0..100 {
                let at = beats.next();
                assert!(!life.is_over(at), "{of_root:?} {own:?}");
                assert!(beats.is_due(at));
                life.heard(at);
            }
        }
    }

    #[test]
    fn who_was_stopped_itself_looks_before_it_judges() {
        let (s, now) = (Duration::from_secs, Instant::now());
        let mut life = Expectation::new(s(24));
        assert!(!life.is_over(now + s(1000)), "nothing to expect");
        life.heard(now);
        assert!(!life.is_over(now + s(29)));
        // This rank was stopped, and finds a beat.
        assert!(!life.is_over(now + s(100)));
        life.heard(now + s(100));
        assert!(!life.is_over(now + s(129)));
        assert!(!life.is_over(now + s(130)));
        assert_eq!(life.until(), Some(now + s(130) + DOUBT));
        assert!(life.is_over(now + s(131)));
    }
}
