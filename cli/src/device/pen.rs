//! How the words of a descriptor or an entry get into their slot.

use crate::dice::Dice;
use nccl_plugin_api::descriptor::{Descriptor, Form, OP_FLUSH, OP_INLINE, WORDS};
use std::sync::atomic::{fence, AtomicU64, Ordering};

/// Words of the longer form.
const MOST: usize = 16;
/// Bit 0 of a word: it is there.
const VALID: u64 = 1;

/// The bits of each word that device code leaves as it found them on its stack.
fn uninitialised(d: &Descriptor) -> [u64; MOST] {
    const ALL: u64 = !VALID;
    let mut bits = [ALL; MOST];
    let (op, size) = (d.op(), d.size());
    bits[0] = if d.form == Form::Bytes64 { 0 } else { 0x60 };
    if op & OP_FLUSH == 0 {
        bits[1..6].fill(0);
        bits[6] = if d.version() < 2 { 0xfe } else { 0xfc };
        if op & OP_INLINE != 0 {
            bits[1] = 0xfe | 0xff << 56 | if size <= 4 { 0xffff << 40 } else { 0 };
            bits[2] = 0xfe | ALL << 24 | if size <= 6 { 0xffff << 8 } else { 0 };
        }
    }
    if d.form == Form::Bytes128 {
        bits[7] = 0xfe | ALL << 24;
    }
    bits
}

/// A way of writing descriptors and entries.
pub struct Pen {
    dice: Dice,
    wild: bool,
    pause: u64,
}

impl Pen {
    /// Word after word, as fast as it goes, unused bits zero.
    pub fn plain() -> Self {
        Self { dice: Dice(0), wild: false, pause: 0 }
    }

    /// Words in any order, garbage in unused bits; one in eight descriptors or entries is written with pauses of up to
    /// `pause` turns of an empty loop between its words.
    pub fn wild(seed: u64, pause: u64) -> Self {
        Self { dice: Dice(seed), wild: true, pause }
    }

    /// Writes a descriptor into its slot. What this thread wrote before is there for whoever sees a word.
    ///
    /// # Safety
    /// `slot` is aligned to 8 bytes and has room for the form; it is this thread's until it is complete.
    pub(super) unsafe fn write(&mut self, slot: *mut u64, d: &Descriptor) {
        let mut words = [VALID; MOST];
        words[..WORDS].copy_from_slice(&d.words);
        // SAFETY: as the caller promises.
        unsafe { self.words(slot, &words[..d.form.bytes() / 8], &uninitialised(d)) }
    }

    /// Writes words, at most 16, of which device code leaves the bits of `unused` as it found them on its stack.
    ///
    /// # Safety
    /// As for [`Pen::write`], with room for these words.
    pub(super) unsafe fn words(&mut self, slot: *mut u64, words: &[u64], unused: &[u64]) {
        let count = words.len();
        // SAFETY: inside the slot, as the caller promises.
        let at = |i: usize| unsafe { AtomicU64::from_ptr(slot.add(i)) };
        fence(Ordering::Release);
        if !self.wild {
            (0..count).for_each(|i| at(i).store(words[i], Ordering::Relaxed));
            return;
        }
        let mut order: [usize; MOST] = std::array::from_fn(|i| i);
        let slowly = self.pause > 0 && self.dice.below(8) == 0;
        for i in 0..count {
            order.swap(i, i + self.dice.below((count - i) as u64) as usize);
            let i = order[i];
            let garbage = self.dice.roll() & unused[i];
            at(i).store(words[i] & !unused[i] | garbage, Ordering::Relaxed);
            if slowly {
                (0..self.dice.below(self.pause)).for_each(|_| std::hint::spin_loop());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nccl_plugin_api::descriptor::{OP_GET, OP_PUT, OP_SIGNAL_ADD, OP_SIGNAL_INC};

    fn written(pen: &mut Pen, d: &Descriptor) -> [u64; MOST] {
        let mut slot = [0; MOST];
        // SAFETY: a slot of the longer form.
        unsafe { pen.write(slot.as_mut_ptr(), d) };
        slot
    }

    #[test]
    fn garbage_hides_nothing_that_is_said() {
        let mut pen = Pen::wild(7, 20);
        for form in [Form::Bytes64, Form::Bytes128] {
            for size in 1..=8 {
                let value = 0xfedc_ba98_7654_3210 >> (64 - 8 * size);
                let d = Descriptor::new(form, 2, OP_PUT | OP_INLINE | OP_SIGNAL_ADD, size)
                    .value(value)
                    .second(5, 6)
                    .with_signal(77, u64::MAX - 5, true);
                let slot = written(&mut pen, &d);
                let mut seen = Descriptor { words: [0; WORDS], form };
                seen.words.copy_from_slice(&slot[..WORDS]);
                assert_eq!((seen.op(), seen.size(), seen.version()), (d.op(), size, d.version()));
                assert_eq!(seen.inline_value() & (u64::MAX >> (64 - 8 * size)), value);
                assert_eq!((seen.second_offset(), seen.second_handle()), (5, 6));
                assert_eq!((seen.signal(), seen.signal_value(), seen.is_strong()), (77, u64::MAX - 5, true));
                let there = slot.iter().filter(|w| **w & VALID != 0).count();
                assert_eq!(there, form.bytes() / 8, "words beyond the slot stay as they were");
            }
        }
        let get = Descriptor::new(Form::Bytes128, 2, OP_GET, 99).first(1, 2).second(3, 4);
        let slot = written(&mut pen, &get);
        assert_eq!(slot[1..6], get.words[1..6]);
        assert_ne!(slot[8..], [VALID; 8], "there is garbage");
    }

    #[test]
    fn the_plain_pen_writes_what_it_is_given() {
        let d = Descriptor::new(Form::Bytes128, 2, OP_SIGNAL_INC | OP_PUT, 0).with_signal(1, 2, false);
        let slot = written(&mut Pen::plain(), &d);
        assert_eq!((&slot[..WORDS], &slot[WORDS..]), (&d.words[..], &[VALID; 8][..]));
    }
}
