//! Credits for device code that looks for them in GPU memory.

use crate::rma::op::{Op, Put, Signal};

/// A consumer index, of 4 or 8 bytes, in a window of this rank's.
#[derive(Clone, Copy, Debug)]
pub struct CreditWord {
    rank: u32,
    rkey: u32,
    /// The 8-byte word around it, or that it is, and its lowest bit there.
    word: u64,
    shift: u32,
    is_half: bool,
}

impl CreditWord {
    /// Of 4 bytes at `at`, on a border of as many. `rank` is this rank, `rkey` its own key to the window.
    pub fn half(rank: u32, rkey: u32, at: u64) -> Self {
        Self { rank, rkey, word: at & !7, shift: 8 * (at & 4) as u32, is_half: true }
    }

    /// The same of 8 bytes.
    pub fn whole(rank: u32, rkey: u32, at: u64) -> Self {
        Self { rank, rkey, word: at, shift: 0, is_half: false }
    }
}

/// What device code was told of an index, and what it has not been told.
#[derive(Debug)]
pub struct Owed {
    at: CreditWord,
    /// So many credits are worth an operation while more follow.
    worth: u32,
    told: u32,
    credits: u32,
}

impl Owed {
    /// Of an index that is 0. `worth`: so many credits are worth an operation while more follow, a part of the ring's
    /// slots, so that a producer that waits for room finds some before all is used up.
    pub fn new(at: CreditWord, worth: u32) -> Self {
        Self { at, worth, told: 0, credits: 0 }
    }

    /// Device code is owed `n` more.
    #[inline(always)]
    pub fn add(&mut self, n: u32) {
        self.credits += n;
    }

    /// The operation that tells it, and the rank that it goes to, which is this one. It stays until [`Owed::paid`].
    /// `more_follow`: entries are under way, so that a few credits can wait for theirs.
    ///
    /// An addition: whatever order several arrive in, the index never goes back. The word's other half is another
    /// queue's index, into which nothing is carried.
    #[inline(always)]
    pub fn post(&self, more_follow: bool) -> Option<(u32, Op)> {
        let least = if more_follow { self.worth } else { 1 };
        if self.credits < least.max(1) {
            return None;
        }
        let CreditWord { rank, rkey, word, shift, is_half } = self.at;
        let begins_anew = is_half && shift == 0 && self.told.checked_add(self.credits).is_none();
        let carry = if begins_anew { 1 << 32 } else { 0 };
        let value = (u64::from(self.credits) << shift).wrapping_sub(carry);
        let signal = Some(Signal { remote: word, rkey, value, strong: false });
        Some((rank, Op::Put(Put { local: 0, lkey: 0, rkey: 0, remote: 0, len: 0, signal, more: false })))
    }

    /// It was posted.
    pub fn paid(&mut self) {
        self.told = self.told.wrapping_add(std::mem::take(&mut self.credits));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn value(owed: &Owed) -> u64 {
        match owed.post(false) {
            Some((3, Op::Put(Put { len: 0, signal: Some(signal), .. }))) => signal.value,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn few_credits_can_wait() {
        let mut owed = Owed::new(CreditWord::half(3, 7, 64), 4);
        assert!(owed.post(false).is_none() && owed.post(true).is_none());
        owed.add(3);
        assert!(owed.post(true).is_none() && owed.post(false).is_some());
        owed.add(1);
        assert!(owed.post(true).is_some());
        owed.paid();
        assert!(owed.post(false).is_none());
        let no_part = Owed::new(CreditWord::half(3, 7, 64), 0);
        assert!(no_part.post(true).is_none(), "nothing is worth nothing");
    }

    #[test]
    fn an_index_of_eight_bytes_counts_on() {
        let mut owed = Owed::new(CreditWord::whole(3, 7, 72), 1);
        let mut index = 0_u64;
        for n in [u32::MAX, 1, 5, u32::MAX] {
            owed.add(n);
            index += value(&owed);
            owed.paid();
        }
        assert_eq!(index, 2 * u64::from(u32::MAX) + 6);
    }

    proptest! {
        /// Two indices side by side, whatever is added to them in whatever steps, and over the end of their 32 bits.
        #[test]
        fn indices_that_share_a_word_keep_to_themselves(
            steps in prop::collection::vec((any::<bool>(), 1..=u32::MAX / 2), 1..50),
        ) {
            let mut owed = [64, 68].map(|at| Owed::new(CreditWord::half(3, 7, at), 1));
            let (mut word, mut wanted) = (0_u64, [0_u32; 2]);
            for (which, n) in steps {
                let which = usize::from(which);
                owed[which].add(n);
                word = word.wrapping_add(value(&owed[which]));
                owed[which].paid();
                wanted[which] = wanted[which].wrapping_add(n);
                prop_assert_eq!([word as u32, (word >> 32) as u32], wanted);
            }
        }
    }
}
