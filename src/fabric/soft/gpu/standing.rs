//! How long those who go wait for what a GPU has begun. One that stands is waited for once, by all of them together: a
//! communicator has dozens of contexts and windows, which end one after another.

use std::time::{Duration, Instant};

/// How long one that has been waited for in vain is waited for again: it may have been let go on just now.
const AGAIN: Duration = Duration::from_millis(100);

/// What was seen by those who waited.
#[derive(Default)]
pub struct StandingWait {
    /// Since when something is under way and nothing has landed, and how much had landed then.
    stands: Option<(Instant, u64)>,
}

impl StandingWait {
    /// Until when somebody waits who has time until `end`. Something is under way, and so much has landed by now.
    pub fn end(&mut self, end: Instant, landed: u64) -> Instant {
        let now = Instant::now();
        let since = match self.stands {
            Some((since, before)) if before == landed => since,
            _ => now,
        };
        self.stands = Some((since, landed));
        end.min((since + end.saturating_duration_since(now)).max(now + AGAIN))
    }

    /// Nothing is under way.
    pub fn over(&mut self) {
        self.stands = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_stands_is_waited_for_once() {
        const WITHIN: Duration = Duration::from_secs(10);
        let begun = Instant::now() - Duration::from_secs(4);
        let left = |standing: &mut StandingWait, landed| standing.end(Instant::now() + WITHIN, landed) - Instant::now();
        let is_about = |left: Duration, seconds| (seconds - 1.0..=seconds).contains(&left.as_secs_f64());
        assert!(is_about(left(&mut StandingWait::default(), 7), 10.0));
        let mut standing = StandingWait { stands: Some((begun, 7)) };
        assert!(is_about(left(&mut standing, 7), 6.0), "4 s are over");
        assert!(is_about(left(&mut standing, 8), 10.0), "it has moved");
        let mut standing = StandingWait { stands: Some((begun - WITHIN, 7)) };
        let again = left(&mut standing, 7);
        assert!(again <= AGAIN, "{again:?}");
        let at_once = Instant::now();
        assert!(standing.end(at_once, 7) == at_once, "who has no time gets none");
        standing.over();
        assert!(is_about(left(&mut standing, 7), 10.0), "something new is under way");
    }
}
