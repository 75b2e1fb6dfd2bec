//! Whether a peer answers through shared memory.

use super::probe::Probe;
use nix::errno::Errno;
use std::time::Duration;

/// A peer that may be asked for its inbox.
#[derive(Default)]
pub struct Finding(Option<Probe>);

/// Why there will be no answer.
#[derive(Debug, PartialEq, Eq)]
pub enum Silent {
    /// It has had the time, and has not answered.
    Late,
    /// It cannot be asked.
    Unreachable(Errno),
}

impl Finding {
    /// Whether it was asked, so that an answer is welcome.
    pub fn is_asked(&self) -> bool {
        self.0.is_some()
    }

    /// Asks, if it is time to, for the first time or again. Called as long as there is no answer and something has to
    /// go to the peer; it gets `limit` from the first time on, or from when this was last taken up.
    pub fn step(&mut self, limit: Duration, ask: impl FnOnce() -> nix::Result<bool>) -> Result<(), Silent> {
        let probe = Probe::next(self.0);
        if probe.is_late(limit) {
            return Err(Silent::Late);
        }
        if probe.is_due() {
            ask().map_err(Silent::Unreachable)?;
            self.0 = Some(probe.asked());
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_asked_may_answer_and_who_cannot_be_is_given_up() {
        let (mut finding, hour) = (Finding::default(), Duration::from_secs(3600));
        assert_eq!(finding.step(hour, || Err(Errno::ENOENT)), Err(Silent::Unreachable(Errno::ENOENT)));
        assert!(!finding.is_asked());
        let mut asked = 0;
        for _ in 0..2 {
            let ask = || {
                asked += 1;
                Ok(true)
            };
            assert_eq!(finding.step(hour, ask), Ok(()));
        }
        assert!(finding.is_asked() && asked == 1, "asked {asked} times in a moment");
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(finding.step(Duration::from_millis(1), || unreachable!("it is late")), Err(Silent::Late));
    }
}
