//! What a look at a peer's mark of life means.

use crate::fabric::soft::status::alive;
use std::sync::atomic::{AtomicBool, Ordering};

/// What becomes of a peer that was looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing: it lives, or what it sent last may still come.
    Stays,
    /// Its process has ended.
    Died,
    /// It has closed its communicator in good order.
    Closed,
    /// It has closed its communicator while operations to it were unfinished.
    Left,
}

/// Looks at one peer.
#[derive(Default)]
pub struct PeerWatch {
    /// Seen closed while operations were unfinished, with all read that it has written.
    is_closing: AtomicBool,
}

impl PeerWatch {
    /// What was seen just now; `is_read`: all that it has written was read by then; `is_busy`: operations to it were
    /// unfinished after that.
    pub fn judge(&self, seen: alive::Liveness, is_read: bool, is_busy: bool) -> Verdict {
        match seen {
            alive::Liveness::Alive => Verdict::Stays,
            alive::Liveness::Dead => Verdict::Died,
            alive::Liveness::Closed if !is_busy => Verdict::Closed,
            // What it sent last may be their end. Who closed writes nothing more, so read once is read.
            alive::Liveness::Closed if !is_read => Verdict::Stays,
            // What of it still waits for a thread or for this rank's GPU has until the next look.
            alive::Liveness::Closed if !self.is_closing.swap(true, Ordering::Relaxed) => Verdict::Stays,
            alive::Liveness::Closed => Verdict::Left,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alive::Liveness::{Alive, Closed, Dead};

    #[test]
    fn who_closes_gets_one_more_look_once_all_is_read() {
        let watch = PeerWatch::default();
        assert_eq!([Alive, Dead].map(|seen| watch.judge(seen, true, true)), [Verdict::Stays, Verdict::Died]);
        assert_eq!([false; 3].map(|read| watch.judge(Closed, read, true)), [Verdict::Stays; 3]);
        assert_eq!(
            [true, true, false].map(|busy| watch.judge(Closed, true, busy)),
            [Verdict::Stays, Verdict::Left, Verdict::Closed]
        );
    }
}
