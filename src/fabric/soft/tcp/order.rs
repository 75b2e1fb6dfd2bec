//! When a signal may be applied: the contract of one (context, initiator), seen from the target.
//!
//! The first connection of a pair, the express one, carries everything small and every signal, in order; the others carry
//! chunks of larger puts. So a signal never queues behind other contexts' bulk, and has to wait for nothing but chunks
//! of its own lane; it carries, for each connection, how many of them were sent there before it. No I/O and no memory here.

use super::wire::{Counts, MAX_STRIPES};
use std::collections::VecDeque;

/// The connection that keeps the order of all lanes.
pub const EXPRESS: usize = 0;

/// The connection for a lone chunk. Callers serve it, as they do the express one: no thread has to be woken first.
pub const MIDDLE: usize = 1;

/// The first of the connections for bulk.
pub const STRIPES: usize = 2;

/// What a signal waits for.
struct Held<S> {
    counts: Counts,
    signal: S,
}

/// Put frames that arrived and signals that wait.
pub struct Order<S> {
    arrived: Counts,
    held: VecDeque<Held<S>>,
}

impl<S> Default for Order<S> {
    fn default() -> Self {
        Self { arrived: [0; MAX_STRIPES], held: VecDeque::new() }
    }
}

impl<S> Order<S> {
    /// A chunk on `stripe`, which is not the express one, was applied.
    pub fn arrived(&mut self, stripe: usize) {
        self.arrived[stripe] = self.arrived[stripe].wrapping_add(1);
    }

    fn met(&self, counts: &Counts) -> bool {
        // Counts wrap; fewer than 2^31 frames of a lane are ever behind a signal.
        counts.iter().zip(&self.arrived).all(|(&c, &a)| a.wrapping_sub(c) as i32 >= 0)
    }

    /// A signal with counts arrived: applied at once if returned, else kept.
    pub fn rings(&mut self, counts: Counts, signal: S) -> Option<S> {
        if self.held.is_empty() && self.met(&counts) {
            return Some(signal);
        }
        self.held.push_back(Held { counts, signal });
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
    fn counts_wrap() {
        let mut o = Order { arrived: counts(u32::MAX, 0), held: VecDeque::new() };
        assert_eq!(o.rings(counts(1, 0), ()), None);
        o.arrived(1);
        assert_eq!(o.release(), None);
        o.arrived(1);
        assert_eq!(o.release(), Some(()));
    }
}
