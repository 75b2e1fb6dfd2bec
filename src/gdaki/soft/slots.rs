//! The slots of a send queue, into which device code writes entries.
//!
//! Slots are all ones but for what device code has written and this side has not taken. Device code stores an entry and
//! rings with an order that holds on its GPU alone, so that a doorbell may be visible here before the entry is. A word
//! that is no longer all ones is the entry's; one that still is may be, or has not arrived.

use super::arrival::Shown;
use crate::gdaki::entry::send::{opcode, View};
use crate::gdaki::entry::ENTRY_BYTES;
use crate::sys::prefetch::prefetch;
use std::ptr::NonNull;
use std::sync::atomic::{fence, AtomicU64, Ordering};

/// Words of a slot.
const WORDS: usize = ENTRY_BYTES / 8;
/// Where the length of bytes that stand in an entry is, and they behind it.
const INSIDE: usize = 32;
/// The words that are all ones in no entry: a control segment's first, a remote key, and the lengths and keys of two
/// data segments.
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
        (0..slots.size).for_each(|index| slots.clear(index));
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

    /// Brings an entry's slot nearer.
    #[inline(always)]
    pub fn prefetch(&self, index: u64) {
        prefetch(self.slot(index));
    }

    /// Sets a slot for the entry that comes next.
    #[inline(always)]
    pub fn clear(&self, index: u64) {
        self.slot(index).iter().for_each(|word| word.store(u64::MAX, Ordering::Relaxed));
    }

    /// Whether anything of an entry is in a slot that was cleared.
    #[inline(always)]
    pub fn has_begun(&self, index: u64) -> bool {
        self.slot(index)[0].load(Ordering::Relaxed) != u64::MAX
    }

    /// Whether there are entries in all slots, from the oldest, `index`, to the newest.
    pub fn is_full(&self, index: u64) -> bool {
        [index, index + self.size - 1].iter().all(|&end| self.shown(end) != Shown::No)
    }

    /// How much of an entry its slot shows.
    pub fn shown(&self, index: u64) -> Shown {
        shown(&self.read(index), index)
    }
}

/// How much of entry `index` is in the bytes of its slot: of the segments that it counts, as they are what device code
/// writes. A word of data or of an operand may be meant to be all ones.
#[inline(always)]
pub fn shown(bytes: &[u8; ENTRY_BYTES], index: u64) -> Shown {
    let view = View(bytes);
    let is_blank = match (stands_inside(bytes), view.segments()) {
        // Behind the bytes nothing need be written.
        (true, _) => has_blank(bytes, INSIDE / 8) || is_blank_inside(bytes),
        // What device code writes in rows, with their numbers known here: no loop is left.
        (false, 3) => has_blank(bytes, 6),
        (false, 4) => has_blank(bytes, WORDS),
        (false, segments) => has_blank(bytes, (2 * usize::from(segments)).min(WORDS)),
    };
    match is_blank || view.index() != index as u16 {
        true => shown_in_part(bytes, index),
        false => Shown::All,
    }
}

/// Whether one of the first so many words is what words are before they are written.
#[inline(always)]
fn has_blank(bytes: &[u8; ENTRY_BYTES], words: usize) -> bool {
    // All of them are looked at: nearly always none is.
    bytes[..8 * words].chunks_exact(8).fold(false, |has, word| has | (word == [0xff; 8]))
}

/// Whether what is written to the peer stands in the entry, or its length is missing.
#[inline(always)]
fn stands_inside(bytes: &[u8; ENTRY_BYTES]) -> bool {
    View(bytes).opcode() == opcode::WRITE && bytes[INSIDE] & 0x80 != 0
}

/// Whether some of what stands in the entry is what words are before they are written. Device code stores the length,
/// and the bytes behind it, in units of 4 bytes, and in less where there are less.
#[inline(always)]
fn is_blank_inside(bytes: &[u8; ENTRY_BYTES]) -> bool {
    let is_blank = |unit: &[u8]| unit.iter().all(|&byte| byte == 0xff);
    let (length, behind) = bytes[INSIDE..].split_at(4);
    let len = u32::from_be_bytes([length[0] & 0x7f, length[1], length[2], length[3]]) as usize;
    is_blank(length) || behind[..len.min(behind.len())].chunks(4).any(is_blank)
}

#[cold]
fn shown_in_part(bytes: &[u8; ENTRY_BYTES], index: u64) -> Shown {
    match is_whole(bytes, index) {
        true => Shown::Unsure,
        false => Shown::No,
    }
}

/// Whether these bytes are entry `index`, and what its opcode says is there, as far as marked words show.
fn is_whole(bytes: &[u8; ENTRY_BYTES], index: u64) -> bool {
    let view = View(bytes);
    let marked: &[usize] = match (view.opcode(), view.segments()) {
        (opcode::WRITE | opcode::READ, 3) => &MARKED[..3],
        (opcode::WRITE | opcode::READ, 4) if bytes[32] & 0x80 == 0 || bytes[32..36] == [0xff; 4] => &MARKED,
        (opcode::WRITE, _) => &MARKED[..3],
        (opcode::FETCH_ADD | opcode::MASKED_ADD | opcode::MASKED_SWAP, _) => &[0, 3, 6],
        (opcode::WAIT | opcode::DUMP, _) => &MARKED[..2],
        _ => &MARKED[..1],
    };
    let lacks_length = stands_inside(bytes) && bytes[INSIDE..INSIDE + 4] == [0xff; 4];
    view.index() == index as u16
        && !lacks_length
        && !marked.iter().any(|&word| bytes[8 * word..8 * word + 8] == [0xff; 8])
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
        assert_eq!(slots.shown(0), Shown::Unsure, "a word may be meant so, or be missing");
        write(3, 8);
        assert_eq!((slots.shown(1), slots.shown(3)), (Shown::No, Shown::All), "another lap's");
        slots.clear(3);
        assert!(slots.slot(5).iter().all(|word| word.load(Ordering::Relaxed) == u64::MAX));
    }
}
