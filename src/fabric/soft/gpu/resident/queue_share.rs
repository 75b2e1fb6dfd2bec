//! How many hardware queues of a context launches may take at once.
//!
//! CUDA gives a stream a hardware queue when it gets work and has none: a free one, as long as there is one
//! (docs/gpu/private-context.md has what was measured). Once all are taken streams share them, and then what an
//! application has queued behind a kernel that waits stands in front of other streams' kernels, for which it may wait.
//! A launch that is late keeps its queue until it gets its place on the GPU. So there are no more launches at a time
//! than half of the queues, over all kernels and ranks of the process, and the rest is the application's.

use crate::sys::sync::Mutex;
use oxygin_ffi::cuda::Context;
use std::sync::{Arc, Weak};

/// The contexts that have some.
static SHARES: Mutex<Vec<(usize, Weak<QueueShare>)>> = Mutex::new(Vec::new());

/// Who takes hardware queues.
pub trait QueueTaker: Send + Sync {
    /// How many it has now. Never waits for who is in a call of the driver.
    fn taken(&self) -> usize;
}

/// What launches may take of one context.
pub struct QueueShare {
    most: usize,
    takers: Mutex<Vec<Weak<dyn QueueTaker>>>,
}

impl QueueShare {
    /// That of a context with so many hardware queues.
    pub fn of(context: &Context, hardware_queues: u32) -> Arc<Self> {
        let mut shares = SHARES.lock();
        shares.retain(|(_, share)| share.strong_count() > 0);
        let found = shares.iter().find(|(id, _)| *id == context.id()).and_then(|(_, share)| share.upgrade());
        found.unwrap_or_else(|| {
            let made = Arc::new(Self::new(hardware_queues));
            shares.push((context.id(), Arc::downgrade(&made)));
            made
        })
    }

    fn new(hardware_queues: u32) -> Self {
        Self { most: (hardware_queues as usize / 2).max(1), takers: Mutex::default() }
    }

    /// Counts what it takes from now on, as long as it lives.
    pub fn join<T: QueueTaker + 'static>(&self, taker: &Arc<T>) {
        let mut takers = self.takers.lock();
        takers.retain(|t| t.strong_count() > 0);
        takers.push(Arc::<T>::downgrade(taker));
    }

    /// Takes one more, which `note` adds to what its taker has, unless all are taken.
    pub fn take(&self, note: impl FnOnce()) -> bool {
        let takers = self.takers.lock();
        let taken: usize = takers.iter().filter_map(Weak::upgrade).map(|t| t.taken()).sum();
        let may = taken < self.most;
        if may {
            note();
        }
        may
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    impl QueueTaker for AtomicUsize {
        fn taken(&self) -> usize {
            self.load(Relaxed)
        }
    }

    fn joined(share: &QueueShare) -> Arc<AtomicUsize> {
        let taker = Arc::new(AtomicUsize::new(0));
        share.join(&taker);
        taker
    }

    #[test]
    fn all_takers_together_get_half_of_the_queues() {
        let share = QueueShare::new(8);
        let (a, b) = (joined(&share), joined(&share));
        let takes = |taker: &AtomicUsize| share.take(|| _ = taker.fetch_add(1, Relaxed));
        assert_eq!([&a, &b, &a, &a].map(|t| takes(t)), [true; 4]);
        assert_eq!((takes(&a), takes(&b)), (false, false));
        assert_eq!((a.taken(), b.taken()), (3, 1), "nothing is noted for who gets none");
        b.store(0, Relaxed);
        assert_eq!((takes(&b), takes(&b)), (true, false), "one has come back");
        drop(a);
        assert_eq!([0; 4].map(|_| takes(&b)), [true, true, true, false], "who is gone has none");
    }

    #[test]
    fn one_may_always_be_taken() {
        for queues in [0, 1, 2, 3] {
            let share = QueueShare::new(queues);
            let taker = joined(&share);
            let takes = || share.take(|| _ = taker.fetch_add(1, Relaxed));
            assert_eq!((takes(), takes()), (true, false), "{queues}");
        }
    }
}
