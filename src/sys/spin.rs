//! A lock for what is held for a few hundred instructions: two instructions to take (a bit set and looked at in one),
//! one plain store to release. Never held across a system call that may block, so waiting is spinning with yields; a
//! futex would double the instructions of the uncontended case, which is nearly all of them.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

/// The word that says whether somebody has it: bit 0. The protocol is written for any such word, so that loom can
/// explore it.
pub trait Flag {
    /// Sets bits; returns what was there.
    fn fetch_or(&self, bits: u32, order: Ordering) -> u32;
    /// Reads it.
    fn load(&self, order: Ordering) -> u32;
    /// Writes it.
    fn store(&self, value: u32, order: Ordering);
    /// One look more did not find it free.
    fn pause(round: u32);
}

impl Flag for AtomicU32 {
    #[inline(always)]
    fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
        self.fetch_or(bits, order)
    }

    #[inline(always)]
    fn load(&self, order: Ordering) -> u32 {
        self.load(order)
    }

    #[inline(always)]
    fn store(&self, value: u32, order: Ordering) {
        self.store(value, order);
    }

    #[inline(always)]
    fn pause(round: u32) {
        if round % 64 == 0 {
            std::thread::yield_now();
        } else {
            std::hint::spin_loop();
        }
    }
}

/// Whether it was free and is taken now.
#[inline(always)]
pub fn take(flag: &impl Flag) -> bool {
    flag.fetch_or(1, Ordering::Acquire) & 1 == 0
}

/// Waits until it is free and takes it.
#[inline(always)]
pub fn wait<F: Flag>(flag: &F) {
    let mut round = 0u32;
    loop {
        while flag.load(Ordering::Relaxed) != 0 {
            round = round.wrapping_add(1);
            F::pause(round);
        }
        if take(flag) {
            return;
        }
    }
}

/// Lets it go.
#[inline(always)]
pub fn release(flag: &impl Flag) {
    flag.store(0, Ordering::Release);
}

/// A value that one thread at a time may touch. What holds the lock holds its address: the flag comes first, so that
/// this is the address of the whole.
#[repr(C)]
pub struct Spin<T> {
    /// Bit 0: somebody has it.
    held: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: the value moves between threads under the lock only.
unsafe impl<T: Send> Send for Spin<T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for Spin<T> {}

/// The value, held.
pub struct SpinGuard<'a, T>(&'a Spin<T>);

impl<T> Spin<T> {
    /// A free lock around `value`.
    pub fn new(value: T) -> Self {
        Self { held: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits until the value is free and takes it.
    #[inline(always)]
    pub fn lock(&self) -> SpinGuard<'_, T> {
        if !take(&self.held) {
            self.wait();
        }
        SpinGuard(self)
    }

    /// Takes the value if it is free.
    #[inline(always)]
    pub fn try_lock(&self) -> Option<SpinGuard<'_, T>> {
        take(&self.held).then(|| SpinGuard(self))
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) {
        wait(&self.held);
    }
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock, and is borrowed alone.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        release(&self.0.held);
    }
}

#[cfg(test)]
#[allow(missing_docs, reason = "of tests")]
pub mod tests {
    use super::{release, take, wait, Flag, Spin};
    use loom::sync::atomic::AtomicU32 as Modelled;
    use std::sync::atomic::Ordering;

    impl Flag for Modelled {
        /// Where the bit is set the real one writes what is there. To loom that is one more store, which need not come
        /// before that of whoever lets go, so that the thread could see its own for ever.
        fn fetch_or(&self, bits: u32, order: Ordering) -> u32 {
            self.compare_exchange(0, bits, order, Ordering::Relaxed).unwrap_or_else(|there| there)
        }

        fn load(&self, order: Ordering) -> u32 {
            self.load(order)
        }

        fn store(&self, value: u32, order: Ordering) {
            self.store(value, order);
        }

        fn pause(_: u32) {
            loom::thread::yield_now();
        }
    }

    /// The lock as loom runs it, around a value that loom watches.
    pub struct ModelSpin<T> {
        held: Modelled,
        value: loom::cell::UnsafeCell<T>,
    }

    impl<T> ModelSpin<T> {
        pub fn new(value: T) -> Self {
            Self { held: Modelled::new(0), value: loom::cell::UnsafeCell::new(value) }
        }

        pub fn with<R>(&self, body: impl FnOnce(&mut T) -> R) -> R {
            if !take(&self.held) {
                wait(&self.held);
            }
            // SAFETY: the lock is held; loom fails where that does not make this the only access.
            let result = self.value.with_mut(|value| body(unsafe { &mut *value }));
            release(&self.held);
            result
        }

        /// Whether it was free.
        fn try_with(&self, body: impl FnOnce(&mut T)) -> bool {
            let is_free = take(&self.held);
            if is_free {
                // SAFETY: as above.
                self.value.with_mut(|value| body(unsafe { &mut *value }));
                release(&self.held);
            }
            is_free
        }
    }

    // SAFETY: as for `Spin`, which loom is to find out.
    unsafe impl<T: Send> Sync for ModelSpin<T> {}

    /// Two threads post, a third gives the lane its turn if nobody has it.
    #[test]
    fn whoever_has_the_lock_is_alone_and_sees_what_was_done_before() {
        let mut model = loom::model::Builder::new();
        model.preemption_bound = Some(2);
        model.check(|| {
            let lane = loom::sync::Arc::new(ModelSpin::new(0u32));
            let its = lane.clone();
            let poster = loom::thread::spawn(move || its.with(|n| *n += 1));
            let its = lane.clone();
            let poller = loom::thread::spawn(move || u32::from(its.try_with(|n| *n += 1)));
            lane.with(|n| *n += 1);
            poster.join().unwrap();
            let turns = poller.join().unwrap();
            assert_eq!(lane.with(|n| *n), 2 + turns);
        });
    }

    #[test]
    fn additions_of_several_threads_add_up() {
        let total = Spin::new(0u64);
        std::thread::scope(|s| {
            for _ in 0..4 {
                s.spawn(|| {
                    for _ in 0..20_000 {
                        *total.lock() += 1;
                    }
                });
            }
        });
        assert_eq!(*total.lock(), 80_000);
    }
}
