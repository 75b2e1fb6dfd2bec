//! When a signal may be applied: the contract of one (context, initiator), seen from the target.
//!
//! The first connection of a pair, the express one, carries everything small and every signal, in order; the others
//! carry chunks of larger puts. So a signal never queues behind other contexts' bulk, and has to wait for nothing but
//! chunks of its own lane; it carries, for each connection, how many of them were sent there before it. No I/O and no
//! memory here.

use super::wire::{Counts, MAX_STRIPES};
use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// The connection that keeps the order of all lanes.
pub const EXPRESS: usize = 0;

/// The connection for a lone chunk. Callers serve it, as they do the express one: no thread has to be woken first.
pub const MIDDLE: usize = 1;

/// The first of the connections for bulk.
pub const STRIPES: usize = 2;

/// How many signals wait, of all lanes that share it.
#[derive(Clone, Default)]
pub struct WaitingSignals(Arc<AtomicUsize>);

impl WaitingSignals {
    /// Their number.
    pub fn count(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn one_more(&self) -> Self {
        self.0.fetch_add(1, Ordering::Relaxed);
        self.clone()
    }
}

/// Counts for as long as it lives.
struct Counted(WaitingSignals);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0 .0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// What a signal waits for.
struct Held<S> {
    counts: Counts,
    signal: S,
    _counted: Counted,
}

/// Put frames that arrived and signals that wait.
pub struct Order<S> {
    arrived: Counts,
    held: VecDeque<Held<S>>,
    /// Connections on which no more will come, a bit each.
    ended: u32,
    /// The express one aside, those are all: no more chunks come.
    has_all_chunks: bool,
    waiting: WaitingSignals,
}

impl<S> Default for Order<S> {
    fn default() -> Self {
        let (held, waiting) = (VecDeque::new(), WaitingSignals::default());
        Self { arrived: [0; MAX_STRIPES], held, ended: 0, has_all_chunks: false, waiting }
    }
}

impl<S> Order<S> {
    /// Nothing has arrived; signals that wait count in `waiting`.
    pub fn counted_in(waiting: &WaitingSignals) -> Self {
        Self { waiting: waiting.clone(), ..Self::default() }
    }

    /// A chunk on `stripe`, which is not the express one, was applied.
    pub fn arrived(&mut self, stripe: usize) {
        self.arrived[stripe] = self.arrived[stripe].wrapping_add(1);
    }

    /// No more comes on `stripe`. Once no more chunks come, what is held will never be due and is forgotten; the word
    /// that all has come may be behind more of the like, on the connection that is not read for these. `true`: no more
    /// comes on any of `conns`.
    pub fn ends(&mut self, stripe: usize, conns: u32) -> bool {
        self.ended |= 1 << stripe;
        self.has_all_chunks = (self.ended | 1 << EXPRESS) & conns == conns;
        if self.has_all_chunks {
            self.held.clear();
        }
        self.ended & conns == conns
    }

    /// Forgets what is held. `true`: nothing is known of connections that have ended, either.
    pub fn forgets(&mut self) -> bool {
        self.held.clear();
        self.ended == 0
    }

    fn met(&self, counts: &Counts) -> bool {
        // Counts wrap; fewer than 2^31 frames of a lane are ever behind a signal.
        counts.iter().zip(&self.arrived).all(|(&c, &a)| a.wrapping_sub(c) as i32 >= 0)
    }

    /// A signal with counts arrived: applied at once if returned, else kept until it is due, if it can come to be.
    pub fn rings(&mut self, counts: Counts, signal: S) -> Option<S> {
        if self.held.is_empty() && self.met(&counts) {
            return Some(signal);
        }
        if self.has_all_chunks {
            return None;
        }
        self.held.push_back(Held { counts, signal, _counted: Counted(self.waiting.one_more()) });
        None
    }

    /// The next kept signal that may be applied now.
    pub fn release(&mut self) -> Option<S> {
        if self.held.front().is_some_and(|h| self.met(&h.counts)) {
            return self.held.pop_front().map(|h| h.signal);
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(a: u32, b: u32) -> Counts {
        let mut c = [0; MAX_STRIPES];
        (c[1], c[2]) = (a, b);
        c
    }

    #[test]
    fn signals_wait_for_chunks_and_for_each_other() {
        let mut o = Order::default();
        assert_eq!(o.rings(counts(0, 0), 1), Some(1));
        assert_eq!(o.rings(counts(2, 1), 2), None);
        assert_eq!(o.rings(counts(2, 1), 3), None);
        o.arrived(1);
        o.arrived(1);
        assert_eq!(o.release(), None);
        o.arrived(2);
        // Its own counts are met, but two are in front.
        assert_eq!(o.rings(counts(2, 1), 4), None);
        assert_eq!([o.release(), o.release(), o.release(), o.release()], [Some(2), Some(3), Some(4), None]);
        assert!(o.held.is_empty());
    }

    #[test]
    fn those_that_wait_are_counted() {
        let waiting = WaitingSignals::default();
        let [mut a, mut b] = [(), ()].map(|()| Order::counted_in(&waiting));
        assert_eq!(a.rings(counts(0, 0), 1), Some(1));
        assert_eq!(waiting.count(), 0);
        for _ in 0..3 {
            assert_eq!((a.rings(counts(1, 0), 1), b.rings(counts(1, 0), 2)), (None, None));
        }
        assert_eq!(waiting.count(), 6);
        a.arrived(1);
        assert_eq!(a.release(), Some(1));
        assert_eq!(waiting.count(), 5);
        drop(b);
        assert_eq!(waiting.count(), 2, "a lane that goes takes its own along");
    }

    #[test]
    fn what_waits_for_chunks_that_do_not_come_is_forgotten() {
        let (waiting, all) = (WaitingSignals::default(), 0b111);
        let mut o = Order::counted_in(&waiting);
        assert_eq!((o.rings(counts(1, 0), 1), o.rings(counts(1, 1), 2)), (None, None));
        assert!(!o.ends(1, all));
        assert_eq!(waiting.count(), 2, "one more connection may bring some");
        assert!(!o.ends(2, all));
        assert_eq!((o.rings(counts(1, 1), 3), waiting.count()), (None, 0));
        assert_eq!(o.rings(counts(0, 0), 4), Some(4), "what waits for none");
        assert!(o.ends(EXPRESS, all));
    }

    #[test]
    fn counts_wrap() {
        let mut o = Order { arrived: counts(u32::MAX, 0), ..Order::default() };
        assert_eq!(o.rings(counts(1, 0), ()), None);
        o.arrived(1);
        assert_eq!(o.release(), None);
        o.arrived(1);
        assert_eq!(o.release(), Some(()));
    }
}
