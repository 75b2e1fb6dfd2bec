//! Who may store into a rank's GPU without asking its engine: kernels of peers that carry out device code's entries by
//! themselves ([`lane_kernel`](super::gpu::lane_kernel)).
//!
//! Such a kernel adds to this rank's signals. The rank's own engine may add to them at the same time by its copy
//! kernel, but not by its stream, which can only store sums: an addition in between would be lost. Nor may a window go
//! while such a kernel knows of it. So each rank has a *gate*: whoever is about to let its kernel at this rank's GPU
//! enters first, and leaves once that kernel has ended; whoever needs the GPU for the engine alone closes the gate and
//! waits until nobody is inside. Entering is told before the gate is looked at, and closing before the entries are
//! looked at, with a full fence in between on both sides: one of the two sees the other.
//!
//! Nobody is inside for long: a kernel that serves lanes ends by itself after [`LIFE`](super::gpu::lane_kernel::LIFE),
//! and its host has to enter again before the next one. So one whose process stands counts as gone after
//! `GONE_AFTER`.

use super::peer::neighbours::Neighbours;
use super::status::alive::Liveness;
use super::status::{PeerStatus, Status};
use crate::sys::sync::Mutex;
use crate::sys::wait::until;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long after the gate has closed whoever is still inside counts as gone: a hundred lives of a kernel. Its host
/// must stand, or it would have left.
const GONE_AFTER: Duration = Duration::from_millis(200);

/// A rank's gate.
pub struct Gate {
    rank: u32,
    /// Of this process.
    inside: AtomicU32,
    entries: AtomicU64,
    /// Who has closed it, and when the first of these did.
    closed: Mutex<(u32, Option<Instant>)>,
    is_closed: AtomicU32,
    /// What other processes are told, and what they tell; `None`: there are none.
    others: Option<(Arc<Status>, Arc<Neighbours>)>,
}

impl Gate {
    /// The gate of `rank`, which is open.
    pub fn new(rank: u32, others: Option<(Arc<Status>, Arc<Neighbours>)>) -> Self {
        Self {
            rank,
            inside: AtomicU32::new(0),
            entries: AtomicU64::new(0),
            closed: Mutex::default(),
            is_closed: AtomicU32::new(0),
            others,
        }
    }

    /// Enters, for a rank of this process. `false`: it is closed.
    pub fn enter(&self) -> bool {
        self.inside.fetch_add(1, Ordering::SeqCst);
        self.entries.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        if self.is_closed() {
            self.leave();
            return false;
        }
        true
    }

    /// Leaves.
    pub fn leave(&self) {
        self.inside.fetch_sub(1, Ordering::Release);
    }

    /// Whether somebody wants to be alone: whoever is inside leaves soon.
    #[inline]
    pub fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::SeqCst) != 0
    }

    /// Closes it, once more where it is.
    pub fn close(&self) {
        let mut closed = self.closed.lock();
        closed.0 += 1;
        if closed.0 == 1 {
            closed.1 = Some(Instant::now());
            self.is_closed.store(1, Ordering::SeqCst);
            if let Some((status, _)) = &self.others {
                status.set_closed(true);
            }
            fence(Ordering::SeqCst);
        }
    }

    /// Opens it, unless another one has closed it as well.
    pub fn open(&self) {
        let mut closed = self.closed.lock();
        closed.0 -= 1;
        if closed.0 == 0 {
            closed.1 = None;
            self.is_closed.store(0, Ordering::SeqCst);
            if let Some((status, _)) = &self.others {
                status.set_closed(false);
            }
        }
    }

    /// Whether somebody is inside.
    pub fn has_visitors(&self) -> bool {
        // The kernels of a process that has died are gone, too.
        let is_inside = |its: &PeerStatus| its.entries(self.rank) % 2 != 0 && its.look() == Liveness::Alive;
        let met = |(_, neighbours): &(Arc<Status>, Arc<Neighbours>)| neighbours.met().any(|(_, its)| is_inside(its));
        self.inside.load(Ordering::Acquire) != 0 || self.others.as_ref().is_some_and(met)
    }

    /// Whether nobody is inside, or nobody who is not gone. It is closed.
    pub fn is_empty(&self) -> bool {
        !self.has_visitors() || self.closed.lock().1.is_some_and(|since| since.elapsed() > GONE_AFTER)
    }

    /// Closes it for good, or until it is opened, and waits until nobody is inside, at most `within`. `false`: somebody
    /// still is.
    pub fn close_and_wait(&self, within: Duration) -> bool {
        self.close();
        until(Instant::now() + within, || self.is_empty())
    }

    /// A number that differs from an earlier one if somebody has entered since.
    pub fn entries(&self) -> u64 {
        let met = |(_, neighbours): &(Arc<Status>, Arc<Neighbours>)| {
            neighbours.met().map(|(_, its)| its.entries(self.rank)).fold(0, u64::wrapping_add)
        };
        self.entries.load(Ordering::Acquire).wrapping_add(self.others.as_ref().map_or(0, met))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_closed_gate_lets_nobody_in_and_waits_for_who_is_inside() {
        let gate = Gate::new(0, None);
        assert!(gate.enter() && !gate.is_closed());
        let before = gate.entries();
        gate.close();
        assert!(gate.is_closed() && !gate.is_empty() && !gate.enter());
        assert_ne!(gate.entries(), before, "one that was turned away counts, too: it may have been seen inside");
        gate.leave();
        assert!(gate.is_empty());
        gate.close();
        gate.open();
        assert!(gate.is_closed(), "two have closed it");
        gate.open();
        assert!(!gate.is_closed() && gate.enter());
    }

    #[test]
    fn who_stands_inside_counts_as_gone_after_a_while() {
        let gate = Gate::new(0, None);
        assert!(gate.enter());
        let began = Instant::now();
        assert!(gate.close_and_wait(Duration::from_secs(10)));
        assert!(began.elapsed() >= GONE_AFTER);
    }

    /// Two threads, one that enters and leaves, one that closes and opens: never is one inside while the other is
    /// alone.
    #[test]
    fn nobody_is_inside_while_it_is_closed_and_empty() {
        let (gate, shared) = (Arc::new(Gate::new(0, None)), Arc::new(AtomicU64::new(0)));
        let (other, its) = (gate.clone(), shared.clone());
        let visitor = std::thread::spawn(move || {
            for _ in 0..20_000 {
                if other.enter() {
                    its.store(its.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
                    other.leave();
                }
            }
        });
        let mut alone = 0;
        while !visitor.is_finished() || alone == 0 {
            gate.close();
            if gate.is_empty() {
                let before = shared.load(Ordering::Relaxed);
                std::thread::yield_now();
                assert_eq!(shared.load(Ordering::Relaxed), before);
                alone += 1;
            }
            gate.open();
        }
        visitor.join().unwrap();
    }
}
