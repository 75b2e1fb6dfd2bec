//! Who has news, and who sleeps: how a sender and the owner of an inbox never miss each other.
//!
//! A sender publishes its message and then looks whether its news bit is set and whether the owner sleeps. The owner
//! takes the bit away, or says that it sleeps, and then looks at the ring. There is a full fence between both steps on
//! both sides, so one of the two sees the other.

use std::sync::atomic::{fence, AtomicU64, Ordering};

/// A word that several processes look at.
pub trait Word {
    /// Reads it.
    fn load(&self, order: Ordering) -> u64;
    /// Writes it.
    fn store(&self, value: u64, order: Ordering);
    /// Sets bits.
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64;
    /// Keeps bits.
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64;
    /// A full fence for such words.
    fn fence();
}

impl Word for AtomicU64 {
    #[inline(always)]
    fn load(&self, order: Ordering) -> u64 {
        self.load(order)
    }

    #[inline(always)]
    fn store(&self, value: u64, order: Ordering) {
        self.store(value, order);
    }

    #[inline(always)]
    fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
        self.fetch_or(bits, order)
    }

    #[inline(always)]
    fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
        self.fetch_and(bits, order)
    }

    #[inline(always)]
    fn fence() {
        fence(Ordering::SeqCst);
    }
}

/// A sender has published: sets its news `bit` unless it is set. Returns the number of the sleep out of which the owner
/// must be woken; 0: it is awake.
#[inline(always)]
pub fn announce<W: Word>(news: &W, bit: u64, sleeping: &W) -> u64 {
    W::fence();
    if news.load(Ordering::Relaxed) & bit == 0 {
        news.fetch_or(bit, Ordering::SeqCst);
        // The owner may have looked for the bit since the first fence, and sleep now.
        W::fence();
    }
    sleeping.load(Ordering::Relaxed)
}

/// The owner takes a news `bit` away: a look at the ring afterwards sees whatever its sender published without setting
/// it.
pub fn clear<W: Word>(news: &W, bit: u64) {
    news.fetch_and(!bit, Ordering::SeqCst);
    // A look at the ring is no `SeqCst` access and could come before the bit is gone.
    W::fence();
}

/// The owner sleeps, for the time with this number, or does not: 0. A look for news afterwards sees whatever was
/// announced before a sender could see that. No two sleeps have one number, so that a sender knows whether it has woken
/// the owner out of this one: what it sends to wake it stays on its way until the owner receives, and takes room.
pub fn sleep<W: Word>(sleeping: &W, number: u64) {
    sleeping.store(number, Ordering::Relaxed);
    W::fence();
}

#[cfg(test)]
mod tests {
    use super::*;
    use loom::sync::atomic::AtomicU64 as Modelled;
    use loom::sync::Arc;

    impl Word for Modelled {
        fn load(&self, order: Ordering) -> u64 {
            self.load(order)
        }

        fn store(&self, value: u64, order: Ordering) {
            self.store(value, order);
        }

        fn fetch_or(&self, bits: u64, order: Ordering) -> u64 {
            self.fetch_or(bits, order)
        }

        fn fetch_and(&self, bits: u64, order: Ordering) -> u64 {
            self.fetch_and(bits, order)
        }

        fn fence() {
            loom::sync::atomic::fence(Ordering::SeqCst);
        }
    }

    /// A ring's head, the news bit of its sender, and whether its owner sleeps.
    #[derive(Default)]
    struct Shared {
        head: Modelled,
        news: Modelled,
        sleeping: Modelled,
    }

    /// The owner takes a hot ring off its list: its bit is set from before, and nothing is in the ring yet.
    #[test]
    fn a_ring_that_cools_down_loses_no_message() {
        loom::model(|| {
            let shared = Arc::new(Shared { news: Modelled::new(1), ..Shared::default() });
            let its = shared.clone();
            let sender = loom::thread::spawn(move || {
                its.head.store(1, Ordering::Release);
                announce(&its.news, 1, &its.sleeping);
            });
            clear(&shared.news, 1);
            let seen = shared.head.load(Ordering::Acquire) != 0;
            sender.join().unwrap();
            assert!(seen || shared.news.load(Ordering::Relaxed) & 1 != 0, "nobody looks at the ring any more");
        });
    }

    /// The owner goes to sleep while a message comes, be its ring hot or not.
    #[test]
    fn an_owner_that_goes_to_sleep_is_woken_or_sees_the_message() {
        for bit in [0, 1] {
            loom::model(move || {
                let shared = Arc::new(Shared { news: Modelled::new(bit), ..Shared::default() });
                let its = shared.clone();
                let sender = loom::thread::spawn(move || {
                    its.head.store(1, Ordering::Release);
                    announce(&its.news, 1, &its.sleeping)
                });
                sleep(&shared.sleeping, 1);
                if bit != 0 {
                    clear(&shared.news, 1);
                }
                let hot = bit != 0 && shared.head.load(Ordering::Acquire) != 0;
                let stays_up = hot || shared.news.load(Ordering::Acquire) & 1 != 0;
                assert!(sender.join().unwrap() != 0 || stays_up, "it sleeps, and nobody wakes it");
            });
        }
    }

    /// A sender that has woken the owner out of a sleep sends nothing more for that one: the owner, once awake, sees
    /// what came since, or goes to sleep by another number.
    #[test]
    fn who_is_woken_once_a_sleep_misses_nothing() {
        loom::model(|| {
            let shared = Arc::new(Shared { sleeping: Modelled::new(1), ..Shared::default() });
            let its = shared.clone();
            // It has woken the owner out of sleep 1.
            let sender = loom::thread::spawn(move || {
                its.head.store(1, Ordering::Release);
                !matches!(announce(&its.news, 1, &its.sleeping), 0 | 1)
            });
            sleep(&shared.sleeping, 0);
            let woken = shared.news.load(Ordering::Acquire) & 1 != 0;
            sleep(&shared.sleeping, 2);
            let stays_up = woken || shared.news.load(Ordering::Acquire) & 1 != 0;
            assert!(sender.join().unwrap() || stays_up, "it sleeps, and nobody wakes it");
        });
    }
}
