//! How a descriptor passes from device code to the engine and its slot back: the words of the slots, the consumer index
//! and the counters.
//!
//! Device code makes visible what it wrote before (a fence), waits until the consumer index gives it a credit, and
//! writes the words of its slot in any order. The engine takes a descriptor when every word shows that it has arrived,
//! clears the slot, and gives it back through the index once what was asked for is complete: from then on device code
//! may write the slot, and the memory that the descriptor named as its source.
//!
//! The words are any that several look at, so that loom can explore the protocol. It fails without each of these, as
//! `tests::every_order_is_needed` says: the fence behind the words, the order of the index and of the counters, and
//! that a slot is cleared before the index moves.

use crate::sys::prefetch::prefetch;
use nccl_plugin_api::descriptor::WORDS;
use std::ptr::NonNull;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// A word that device code and the engine share, with values of this type.
pub trait SharedWord<T> {
    /// Reads it.
    fn load(&self, order: Ordering) -> T;
    /// Writes it.
    fn store(&self, value: T, order: Ordering);
    /// What was written before a word that was read is visible from here on.
    fn acquire();
}

macro_rules! shared_word {
    ($word:ty, $value:ty) => {
        impl SharedWord<$value> for $word {
            #[inline(always)]
            fn load(&self, order: Ordering) -> $value {
                self.load(order)
            }

            #[inline(always)]
            fn store(&self, value: $value, order: Ordering) {
                self.store(value, order);
            }

            #[inline(always)]
            fn acquire() {
                fence(Ordering::Acquire);
            }
        }
    };
}

shared_word!(AtomicU64, u64);
shared_word!(AtomicU32, u32);

/// Whether a word shows that it has arrived.
#[inline(always)]
pub fn has_arrived<W: SharedWord<u64>>(word: &W) -> bool {
    word.load(Ordering::Relaxed) & 1 != 0
}

/// Whatever the descriptors before index `credited` asked for is complete: device code may write their slots again, and
/// their sources.
#[inline(always)]
pub fn give_back<W: SharedWord<u32>>(ci: &W, credited: u32) {
    ci.store(credited, Ordering::Release);
}

/// A descriptor that asked for this counter is complete: device code may write its source again.
#[inline(always)]
pub fn count<W: SharedWord<u64>>(counter: &W) {
    // Only one thread adds, and device code resets a counter only while nothing is under way for it.
    counter.store(counter.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
}

/// The slots of a queue. Of each slot the first `N` words say something.
#[derive(Clone, Copy)]
pub struct Slots<W = AtomicU64, const N: usize = WORDS> {
    first: NonNull<W>,
    /// Slots, a power of two.
    size: u32,
    /// Words from one slot to the next.
    stride: usize,
}

impl<W: SharedWord<u64>, const N: usize> Slots<W, N> {
    /// # Safety
    /// From `first` on there are `size` slots of `stride` words, at least `N`, as long as this is used, and `size` is a
    /// power of two.
    pub unsafe fn new(first: NonNull<W>, size: u32, stride: usize) -> Self {
        debug_assert!(size.is_power_of_two() && stride >= N && N >= 4);
        Self { first, size, stride }
    }

    /// Slots.
    #[inline(always)]
    pub fn size(&self) -> u32 {
        self.size
    }

    /// Words from one slot to the next.
    #[inline(always)]
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// The words of the slot of descriptor `index`.
    #[inline(always)]
    fn slot(&self, index: u32) -> &[W; N] {
        let slot = (index & (self.size - 1)) as usize;
        // SAFETY: below the size, and a slot has that many words (promised to `new`).
        unsafe { &*self.first.as_ptr().add(slot * self.stride).cast() }
    }

    /// The word by which descriptor `index` shows that it has begun to arrive.
    #[inline(always)]
    pub fn first_word(&self, index: u32) -> &W {
        &self.slot(index)[0]
    }

    /// Brings the slot of descriptor `index` nearer.
    #[inline(always)]
    pub fn prefetch(&self, index: u32) {
        prefetch(self.slot(index));
    }

    /// The words of descriptor `index` once all have arrived.
    #[inline(always)]
    pub fn words(&self, index: u32) -> Option<[u64; N]> {
        let slot = self.slot(index);
        // The usual case of an empty slot costs one load.
        let first = slot[0].load(Ordering::Relaxed);
        if first & 1 == 0 {
            return None;
        }
        let words = std::array::from_fn(|i| if i == 0 { first } else { slot[i].load(Ordering::Relaxed) });
        if words.iter().fold(1, |all, word| all & word) == 0 {
            return None;
        }
        // What device code wrote before the descriptor, and made visible to the system, is visible from here on.
        W::acquire();
        Some(words)
    }

    /// The offsets of descriptor `index`, its words 1 and 3 without what shows that they have arrived, if it differs
    /// from another one, all of whose words had arrived, in these alone.
    #[inline(always)]
    pub fn repeated(&self, index: u32, pattern: &[u64; N]) -> Option<[u64; 2]> {
        let slot = self.slot(index);
        let other = |i: usize| slot[i].load(Ordering::Relaxed) ^ pattern[i];
        // The usual case of an empty slot costs one load.
        if other(0) != 0 || (0..N).filter(|i| !matches!(i, 0 | 1 | 3)).fold(0, |all, i| all | other(i)) != 0 {
            return None;
        }
        // The words that are as the pattern's have arrived as those had.
        let [first, second] = [1, 3].map(|i| slot[i].load(Ordering::Relaxed));
        if first & second & 1 == 0 {
            return None;
        }
        // As for `words`.
        W::acquire();
        Some([first >> 1, second >> 1])
    }

    /// Clears the slot of descriptor `index`. Device code writes it again after its credit alone. Words behind these
    /// may still arrive; nobody reads them.
    #[inline(always)]
    pub fn clear(&self, index: u32) {
        for word in self.slot(index) {
            word.store(0, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
#[path = "slots_tests.rs"]
mod tests;
