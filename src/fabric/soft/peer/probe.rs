//! A probe to a peer for its inbox, repeated until there is an answer.

use std::time::{Duration, Instant};

/// A probe that was not repeated for so long starts anew.
const FORGET: Duration = Duration::from_secs(1);
/// Between two probes to a peer that has not answered.
const ASK_AGAIN: Duration = Duration::from_millis(50);

/// When it was asked, first and last.
#[derive(Clone, Copy)]
pub struct Probe {
    since: Instant,
    last: Option<Instant>,
    now: Instant,
}

impl Probe {
    /// As it stands now, after what was `asked` before, if anything was.
    pub fn next(asked: Option<Self>) -> Self {
        let now = Instant::now();
        match asked {
            // Otherwise nothing had to go there for a while, so nobody asked again.
            Some(before) if before.last.is_some_and(|last| now - last <= FORGET) => Self { now, ..before },
            _ => Self { since: now, last: None, now },
        }
    }

    /// The peer has had so much time, and has not answered.
    pub fn is_late(&self, time: Duration) -> bool {
        self.now - self.since > time
    }

    /// It is time to ask, for the first time or again.
    pub fn is_due(&self) -> bool {
        self.last.is_none_or(|last| self.now - last >= ASK_AGAIN)
    }

    /// It has been asked now.
    pub fn asked(self) -> Self {
        Self { last: Some(self.now), ..self }
    }
}
