//! How a look of the lane kernel reads a queue: word by word in any order, while device code writes there.

use crate::kernel::Reach;
use crate::lane_entry::{may_lack_bytes, EntryQueue};
use crate::lane_record::{low, Record, Rung};
use crate::random::Random;
use crate::world::world;
use nccl_plugin_api::descriptor::WORDS;
use oxygin_ffi::cuda::CUresult;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Between slots and the words that ring, at times: long enough for device code to write all of an entry.
const PAUSE: Duration = Duration::from_micros(20);

/// The slots of a lane, from its next one on.
pub struct Slots<'a> {
    record: &'a Record,
    next: u32,
    queue: *const u8,
    /// Of entries, with what the board says of them.
    rings: Option<(&'a EntryQueue, *const u8)>,
}

impl<'a> Slots<'a> {
    pub fn new(record: &'a Record, next: u32, gpu: Reach) -> Result<Self, CUresult> {
        let queue = gpu.at(record.queue, record.queue_bytes())?.cast_const();
        let rings = match &record.entries {
            Some(entries) => Some((entries, gpu.at(entries.rings, entries.ring_bytes(record.slots()))?.cast_const())),
            None => None,
        };
        Ok(Self { record, next, queue, rings })
    }

    /// Whether the first word of the next slot is not what it is before it is written.
    pub fn has_begun(&self, blank: u64) -> bool {
        self.load(0, 0) != blank
    }

    /// What is in the next slots, up to the first one that is not whole, at most so many.
    pub fn whole(&self, at_once: u64, left: u64, random: &mut Random) -> Vec<[u64; WORDS]> {
        // Mostly there is nothing, and this look costs a CPU more than a GPU.
        let is_vain = match self.rings {
            // At times the slots are read all the same, and what rings comes in the meantime.
            Some(_) => !self.is_rung(0) && random.below(16) != 0,
            None => self.load(0, 0) & 1 == 0,
        };
        if is_vain {
            return Vec::new();
        }
        // None is read twice where there are fewer slots.
        let at_once = at_once.min(self.record.slots());
        let most = if random.below(4) == 0 { random.below(at_once) + 1 } else { at_once }.min(left);
        let mut found = self.read(most as usize, random);
        match self.rings {
            Some((entries, _)) => self.keep_rung(entries, &mut found, random),
            None => {
                let whole = found.iter().take_while(|words| words.iter().all(|w| w & 1 == 1)).count();
                found.truncate(whole);
            }
        }
        found
    }

    /// Word by word, in any order, and at times with a pause: what a GPU may do.
    fn read(&self, most: usize, random: &mut Random) -> Vec<[u64; WORDS]> {
        let mut found = vec![[0; WORDS]; most];
        let pause = random.below(8) == 0;
        for i in random.order(WORDS * most) {
            found[i / WORDS][i % WORDS] = self.load(i / WORDS, i % WORDS);
            if pause && random.below(8) == 0 {
                std::thread::yield_now();
            }
        }
        found
    }

    /// Of entries that were read, those that had been rung by then. What was read of one before its word was may be
    /// what its slot is before it is written; behind the word all of it is there.
    fn keep_rung(&self, entries: &EntryQueue, found: &mut Vec<[u64; WORDS]>, random: &mut Random) {
        // Where device code is at an entry this is the look that finds some of it and then what rings.
        let has_begun = found.iter().flatten().any(|&word| word != u64::MAX) && !self.is_rung(0);
        if random.below(if has_begun { 2 } else { 16 }) == 0 {
            std::thread::sleep(PAUSE);
        }
        let mut are_rung = vec![false; found.len()];
        random.order(found.len()).into_iter().for_each(|i| are_rung[i] = self.is_rung(i));
        found.truncate(are_rung.iter().take_while(|is_rung| **is_rung).count());
        for (i, words) in found.iter_mut().enumerate() {
            if may_lack_bytes(*words) {
                *words = std::array::from_fn(|word| self.load(i, word));
            }
            let (word, index) = (self.ring(i), entries.index(self.index(i)));
            if entries.rung == Rung::BySlot && word != index + 1 {
                world().violation(&format!("entry {index:#x} is rung by {word:#x}"));
            }
        }
    }

    /// Whether the `nth` entry's word, or the doorbell, says that it is there.
    fn is_rung(&self, nth: usize) -> bool {
        match self.rings {
            Some((entries, _)) if entries.rung == Rung::ByDoorbell => {
                entries.rung_beyond(self.ring(nth), self.next, self.record.slots()) > nth as u64
            }
            _ => low(self.ring(nth)) == self.index(nth).wrapping_add(1),
        }
    }

    fn index(&self, nth: usize) -> u32 {
        self.next.wrapping_add(nth as u32)
    }

    fn load(&self, nth: usize, word: usize) -> u64 {
        let at = self.record.slot(self.index(nth)) + 8 * word;
        // SAFETY: an aligned word of the queue, which is mapped.
        unsafe { AtomicU64::from_ptr(self.queue.add(at).cast_mut().cast()) }.load(Ordering::Acquire)
    }

    fn ring(&self, nth: usize) -> u64 {
        let Some((entries, first)) = self.rings else { return 0 };
        let at = match entries.rung {
            Rung::BySlot => 8 * self.record.place(self.index(nth)),
            Rung::ByDoorbell => 0,
        };
        // SAFETY: an aligned word of those that ring, one for each slot or one for all, which are mapped.
        unsafe { AtomicU64::from_ptr(first.add(at).cast_mut().cast()) }.load(Ordering::Acquire)
    }
}
