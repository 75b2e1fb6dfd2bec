//! A lock for what is held for a few hundred instructions: two instructions to take (a bit set and looked at in one),
//! one plain store to release. Never held across a system call that may block, so waiting is spinning with yields; a
//! futex would double the instructions of the uncontended case, which is nearly all of them.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicU32, Ordering};

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
pub struct Guard<'a, T>(&'a Spin<T>);

impl<T> Spin<T> {
    /// A free lock around `value`.
    pub fn new(value: T) -> Self {
        Self { held: AtomicU32::new(0), value: UnsafeCell::new(value) }
    }

    /// Waits until the value is free and takes it.
    #[inline(always)]
    pub fn lock(&self) -> Guard<'_, T> {
        if !self.take() {
            self.wait();
        }
        Guard(self)
    }

    /// Whether it was free and is taken now.
    #[inline(always)]
    fn take(&self) -> bool {
        self.held.fetch_or(1, Ordering::Acquire) & 1 == 0
    }

    /// Takes the value if it is free.
    #[inline(always)]
    pub fn try_lock(&self) -> Option<Guard<'_, T>> {
        self.take().then(|| Guard(self))
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) {
        let mut round = 0u32;
        loop {
            while self.held.load(Ordering::Relaxed) != 0 {
                round += 1;
                if round % 64 == 0 {
                    std::thread::yield_now();
                } else {
                    std::hint::spin_loop();
                }
            }
            if self.take() {
                return;
            }
        }
    }
}

impl<T> Deref for Guard<'_, T> {
    type Target = T;
    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: this guard holds the lock.
        unsafe { &*self.0.value.get() }
    }
}

impl<T> DerefMut for Guard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: this guard holds the lock, and is borrowed alone.
        unsafe { &mut *self.0.value.get() }
    }
}

impl<T> Drop for Guard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.0.held.store(0, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::Spin;

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
