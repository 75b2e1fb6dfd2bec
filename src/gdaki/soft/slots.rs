//! The slots of a send queue, into which device code writes entries.
//!
//! Slots are all ones but for what device code has written and this side has not taken. Device code stores an entry and
//! rings with an order that holds on its GPU alone; what has been rung and is still all ones in a place where no entry
//! is has not arrived yet, and is waited for.

use super::arrival::Shown;
use crate::gdaki::entry::send::{opcode, View};
use crate::gdaki::entry::ENTRY_BYTES;
use std::ptr::NonNull;
use std::sync::atomic::{fence, AtomicU64, Ordering};

/// Words of a slot.
const WORDS: usize = ENTRY_BYTES / 8;
/// The words that are set to all ones once an entry is taken: those by which it shows that a control segment, a remote
/// key, and the lengths and keys of two data segments have arrived.
const MARKED: [usize; 4] = [0, 3, 4, 6];

/// The slots.
pub struct EntrySlots {
    first: NonNull<AtomicU64>,
    size: u64,
}

// SAFETY: the slots are shared with device code through atomics.
unsafe impl Send for EntrySlots {}

impl EntrySlots {
    /// Empty ones, `size` of them, a power of two.
    ///
    /// # Safety
    /// The first word of slot 0 is at `first`; all of them are valid as long as this lives.
    pub unsafe fn new(first: NonNull<AtomicU64>, size: u32) -> Self {
        let slots = Self { first, size: u64::from(size) };
        (0..slots.size).for_each(|index| slots.clear(index, true));
        slots
    }

    #[inline(always)]
    fn slot(&self, index: u64) -> &[AtomicU64; WORDS] {
        let at = (index & (self.size - 1)) as usize * WORDS;
        // SAFETY: a slot has so many words, valid as long as this.
        unsafe { &*self.first.as_ptr().add(at).cast() }
    }

    /// The word of an entry's slot that it begins with.
    #[inline(always)]
    pub fn first_word(&self, index: u64) -> NonNull<AtomicU64> {
        NonNull::from(&self.slot(index)[0])
    }

    /// The entry's bytes, read once.
    #[inline(always)]
    pub fn read(&self, index: u64) -> [u8; ENTRY_BYTES] {
        let slot = self.slot(index);
        let words: [u64; WORDS] = std::array::from_fn(|i| slot[i].load(Ordering::Relaxed));
        // What device code wrote before the entry, and made visible to the system, is visible from here on.
        fence(Ordering::Acquire);
        // SAFETY: plain bytes of the same size.
        unsafe { std::mem::transmute(words) }
    }

    /// Sets a slot for the entry that comes next: the words by which that shows that it has arrived, or all of them.
    #[inline(always)]
    pub fn clear(&self, index: u64, all: bool) {
        let slot = self.slot(index);
        match all {
            true => slot.iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed)),
            false => MARKED.iter().for_each(|&word| slot[word].store(u64::MAX, Ordering::Relaxed)),
        }
    }

    /// Whether anything of an entry is in a slot that was cleared.
    #[inline(always)]
    pub fn has_begun(&self, index: u64) -> bool {
        self.slot(index)[0].load(Ordering::Relaxed) != u64::MAX
    }

    /// Whether all of an entry is in its slot, as far as marked words show.
    pub fn has_arrived(&self, index: u64) -> bool {
        is_whole(&self.read(index), index)
    }

    /// How much of an entry a slot shows of which all words were cleared. The segments that the entry counts are
    /// written; one word of data or of an operand may be all ones.
    pub fn shown(&self, index: u64) -> Shown {
        let bytes = self.read(index);
        if !is_whole(&bytes, index) {
            return Shown::No;
        }
        let written = (16 * View(&bytes).segments() as usize).min(ENTRY_BYTES);
        match bytes[..written].chunks_exact(8).any(|word| word == [0xff; 8]) {
            true => Shown::Unsure,
            false => Shown::All,
        }
    }
}

/// Whether these bytes are entry `index`, and what its opcode says is there.
pub fn is_whole(bytes: &[u8; ENTRY_BYTES], index: u64) -> bool {
    let view = View(bytes);
    let marked: &[usize] = match (view.opcode(), view.segments()) {
        (opcode::WRITE | opcode::READ, 3) => &MARKED[..3],
        (opcode::WRITE | opcode::READ, 4) if bytes[32] & 0x80 == 0 || bytes[32..36] == [0xff; 4] => &MARKED,
        (opcode::WRITE, _) => &MARKED[..3],
        (opcode::FETCH_ADD | opcode::MASKED_ADD | opcode::MASKED_SWAP, _) => &[0, 3, 6],
        (opcode::WAIT | opcode::DUMP, _) => &MARKED[..2],
        _ => &MARKED[..1],
    };
    view.index() == index as u16 && !marked.iter().any(|&word| bytes[8 * word..8 * word + 8] == [0xff; 8])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_there_when_all_of_its_segments_are() {
        let words = [const { AtomicU64::new(0) }; 2 * WORDS];
        // SAFETY: two slots.
        let slots = unsafe { EntrySlots::new(NonNull::from(&words[0]), 2) };
        assert!(!slots.has_begun(0) && slots.shown(0) == Shown::No);
        // Nothing to do, one segment.
        let write = |index: u64, control: u64| {
            slots.slot(index)[1].store(control, Ordering::Relaxed);
            slots.slot(index)[0].store((index << 40 | 9 << 8 | 1).to_be(), Ordering::Relaxed);
        };
        write(0, 8);
        assert!(slots.has_begun(0) && slots.shown(0) == Shown::All && slots.shown(1) == Shown::No);
        write(0, u64::MAX);
        assert!(slots.has_arrived(0) && slots.shown(0) == Shown::Unsure, "a word may be meant so, or be missing");
        write(3, 8);
        assert_eq!((slots.shown(1), slots.shown(3)), (Shown::No, Shown::All), "another lap's");
        slots.clear(3, false);
        assert_eq!((slots.has_begun(5), slots.slot(5)[1].load(Ordering::Relaxed)), (false, 8));
        slots.clear(3, true);
        assert!(slots.slot(5).iter().all(|word| word.load(Ordering::Relaxed) == u64::MAX));
    }
}
