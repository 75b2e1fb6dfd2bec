//! How device code says that entries are there.
//!
//! * Handler 2, `GPU_SM_DB`: under a lock the doorbell, the doorbell record, the doorbell again; older device code the
//!   record first. Either may be the first to arrive.
//! * Handler 1, `CPU_PROXY`: the producer's index in a word of host memory, which only grows.
//! * Handler 17, `CPU_PROXY_FREE_FLOW`, from 2.31.2 on: a word of host memory for each slot, which holds its entry's
//!   index + 1, in any order; there is no lock, and no producer waits for another.
//!
//! `GPU_SM_NO_DBR` (10) is not among them: its producers ring without a lock, so that an older index can stay in the
//! register over a newer one, which a device has seen and a reader of memory may not have. `GPU_SM_BF` (6) writes
//! entries instead of indices there.

use crate::config::Ringing;
use crate::proxy::ring::Head;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

impl Ringing {
    /// Words that a queue of `size` slots rings.
    pub fn words(self, size: u32) -> usize {
        match self {
            Self::Doorbell | Self::Proxy => 1,
            Self::FreeFlow => size as usize,
        }
    }
}

/// Where the words are, as this process sees them.
#[derive(Clone, Copy)]
pub struct DoorbellWords {
    /// How they are used.
    pub handler: Ringing,
    /// The doorbell register, the producer's index, or the slots' words; 0 at first.
    pub words: NonNull<AtomicU64>,
    /// The send doorbell record; 0 at first.
    pub record: NonNull<AtomicU32>,
}

/// What doorbell and doorbell record said when they were looked at last.
#[derive(Clone, Copy, Debug, Default)]
pub struct Heard {
    bell: u16,
    record: u16,
}

impl Heard {
    /// How far an index that one of the words says is ahead of `producer`, by at most the slots of the largest ring;
    /// `before` is what that word said. Half of what 16 bits count is ahead and behind: a word that lags by so much is
    /// the one that has not changed.
    #[inline(always)]
    fn ahead(before: &mut u16, index: u16, producer: u64) -> u64 {
        const HALF: u16 = 1 << 15;
        let (n, is_new) = (index.wrapping_sub(producer as u16), *before != index);
        *before = index;
        match n < HALF || n == HALF && is_new {
            true => n.into(),
            false => 0,
        }
    }
}

/// Where it shows that an entry is there.
pub struct Look {
    word: *const AtomicU64,
    mask: u64,
    value: u64,
    /// Whether it is there if the word is greater than the value, or if it is another.
    grows: bool,
    /// The first word of its slot, where that may be all that shows it.
    slot: Option<NonNull<AtomicU64>>,
}

impl Head for Look {
    #[inline(always)]
    unsafe fn is_there(&self) -> bool {
        // SAFETY: a word of the bell, which is still there (caller).
        let word = unsafe { (*self.word).load(Ordering::Relaxed) };
        let is_rung = match self.grows {
            true => word > self.value,
            false => word & self.mask != self.value,
        };
        // SAFETY: as above.
        is_rung || self.slot.is_some_and(|slot| unsafe { slot.as_ref() }.load(Ordering::Relaxed) != u64::MAX)
    }
}

/// The first half of a doorbell: an index as in a control segment.
fn index_word(index: u64) -> u64 {
    let [a, b, c, d] = (u32::from(index as u16) << 8).to_be_bytes();
    u64::from_ne_bytes([a, b, c, d, 0, 0, 0, 0])
}

impl DoorbellWords {
    /// Where to look for entry `index`, all those before which were there; its slot, all ones before, begins at `slot`.
    #[inline(always)]
    pub fn look(&self, index: u64, size: u64, slot: NonNull<AtomicU64>) -> Look {
        let word = self.words.as_ptr().cast_const();
        let (mask, value) = (u64::MAX, index);
        match self.handler {
            Ringing::Doorbell => {
                Look { word, mask: index_word(u64::MAX), value: index_word(index), grows: false, slot: None }
            }
            Ringing::Proxy => Look { word, mask, value, grows: true, slot: None },
            // Device code that does not know free flow writes the entry and no word.
            Ringing::FreeFlow => Look { word: self.slot(index, size), mask, value, grows: true, slot: Some(slot) },
        }
    }

    #[inline(always)]
    fn slot(&self, index: u64, size: u64) -> *const AtomicU64 {
        // SAFETY: there is a word for each slot.
        unsafe { self.words.as_ptr().add((index & (size - 1)) as usize) }
    }

    /// How the word of the slot of entry `index` compares with what that entry's is: less, if it has not been rung;
    /// greater, if the slot has been used again before it was read. For free flow.
    ///
    /// # Safety
    /// The words are there.
    #[inline(always)]
    pub unsafe fn compare(&self, index: u64, size: u64) -> std::cmp::Ordering {
        // SAFETY: passed on.
        unsafe { (*self.slot(index, size)).load(Ordering::Acquire) }.cmp(&(index + 1))
    }

    /// How many entries beyond `producer` have been rung, by what either word says; not for free flow. Words that lag,
    /// or are another queue pair's, say 0. `heard` is of the look before this one.
    ///
    /// # Safety
    /// The words are there.
    #[inline(always)]
    pub unsafe fn rung(&self, producer: u64, queue: u32, heard: &mut Heard) -> u64 {
        // SAFETY: passed on.
        let word = unsafe { self.words.as_ref() }.load(Ordering::Acquire);
        if self.handler == Ringing::Proxy {
            return word.saturating_sub(producer);
        }
        let [a, b, c, d, e, f, g, h] = word.to_ne_bytes();
        let by_bell = match u32::from_be_bytes([e, f, g, h]) == queue << 8 {
            true => Heard::ahead(&mut heard.bell, (u32::from_be_bytes([a, b, c, d]) >> 8) as u16, producer),
            false => 0,
        };
        // SAFETY: passed on.
        let record = u32::from_be(unsafe { self.record.as_ref() }.load(Ordering::Acquire));
        by_bell.max(Heard::ahead(&mut heard.record, record as u16, producer))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_word_that_is_ahead_counts() {
        let (words, record) = ([const { AtomicU64::new(0) }; 4], AtomicU32::new(0));
        let bell = |handler| DoorbellWords { handler, words: NonNull::from(&words[0]), record: NonNull::from(&record) };
        let ring = |index: u32, queue: u32| {
            let bytes = [(index << 8).to_be_bytes(), (queue << 8).to_be_bytes()].concat();
            words[0].store(u64::from_ne_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
        };
        let b = bell(Ringing::Doorbell);
        let slot = AtomicU64::new(u64::MAX);
        // SAFETY: they are there.
        let rung = |p| unsafe { b.rung(p, 9, &mut Heard::default()) };
        // SAFETY: as above.
        let seen = |i| unsafe { b.look(i, 4, NonNull::from(&slot)).is_there() };
        assert_eq!((rung(0), seen(0)), (0, false));
        ring(3, 9);
        assert_eq!((rung(0), rung(3), rung(5), seen(0), seen(3)), (3, 0, 0, true, false));
        record.store(7u32.to_be(), Ordering::Relaxed);
        assert_eq!((rung(3), rung(65_534)), (4, 9));
        ring(9, 8);
        assert_eq!(rung(3), 4, "another queue pair's");
        ring(0, 9);
        assert_eq!((seen(65_536), seen(65_535)), (false, true));
        let b = bell(Ringing::Proxy);
        words[0].store(1 << 33, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe {
            let heard = &mut Heard::default();
            assert_eq!((b.rung(1 << 32, 9, heard), b.rung(1 << 34, 9, heard)), (1 << 32, 0));
            assert!(
                b.look(1, 4, NonNull::from(&slot)).is_there() && !b.look(1 << 33, 4, NonNull::from(&slot)).is_there()
            );
        }
        let b = bell(Ringing::FreeFlow);
        words[2].store(7, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe {
            assert!(b.compare(6, 4).is_eq() && b.compare(2, 4).is_gt() && b.compare(3, 4).is_lt());
            let seen = |i| b.look(i, 4, NonNull::from(&slot)).is_there();
            assert!(seen(6) && seen(2) && !seen(10), "by its word");
            slot.store(7, Ordering::Relaxed);
            assert!(seen(10), "by the entry itself");
        }
    }

    /// Rings of 2^15 slots that are filled at once: one of the words says so first, and the other lags by as much as a
    /// new one would be ahead.
    #[test]
    fn a_word_that_lags_by_all_slots_of_the_largest_ring_is_behind() {
        const SLOTS: u32 = 1 << 15;
        let (word, record) = (AtomicU64::new(0), AtomicU32::new(0));
        let handler = Ringing::Doorbell;
        let bell = DoorbellWords { handler, words: NonNull::from(&word), record: NonNull::from(&record) };
        let mut heard = Heard::default();
        let ring = |index: u32| {
            let bytes = [(index << 8).to_be_bytes(), (9_u32 << 8).to_be_bytes()].concat();
            word.store(u64::from_ne_bytes(bytes.try_into().unwrap()), Ordering::Relaxed);
        };
        let write = |index: u32| record.store((index & 0xffff).to_be(), Ordering::Relaxed);
        let mut producer = 0;
        // SAFETY: they are there.
        let mut rung = |producer| unsafe { bell.rung(producer, 9, &mut heard) };
        ring(0);
        for round in 1..=5 {
            let [first, second]: [&dyn Fn(u32); 2] = if round % 2 == 1 { [&write, &ring] } else { [&ring, &write] };
            first(round * SLOTS);
            assert_eq!(rung(producer), u64::from(SLOTS));
            producer += u64::from(SLOTS);
            assert_eq!([rung(producer), rung(producer)], [0, 0], "the other one lags");
            second(round * SLOTS);
            assert_eq!(rung(producer), 0);
        }
    }
}
