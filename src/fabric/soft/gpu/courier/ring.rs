//! The ring of commands that the courier reads, and the words in which it answers, in pinned host memory.
//!
//! A command is 64 bytes, four chunks of 16: twelve bytes of it and a stamp, its number + 1. The GPU reads a chunk in one
//! load, and the CPU writes the half with the stamp last, so a chunk with the right stamp is whole.

use std::sync::atomic::{AtomicU64, Ordering};

/// Commands; `courier.ptx` knows the number.
pub const COMMANDS: u64 = 256;
/// Bytes of one.
const COMMAND_BYTES: usize = 64;
/// Where the courier answers: that it runs, how many commands are done, that it is gone. A line each.
const UP_AT: usize = 0;
const DONE_AT: usize = 64;
const GONE_AT: usize = 128;
/// Where the words begin, after the ring.
const WORDS_AT: usize = COMMANDS as usize * COMMAND_BYTES;
/// Bytes of all of it; rings lie one after the other, none shares a line with another.
pub const BYTES: usize = (WORDS_AT + 192).next_multiple_of(256);

/// Not in one go with the command before it.
pub const CUT: u32 = 1;
/// The courier ends.
pub const STOP: u32 = 2;
/// The bytes are `value`'s first 1, 2, 4 or 8.
pub const INLINE: u32 = 4;
/// The bytes are for the hands; the launch has some.
pub const HEAVY: u32 = 8;
/// Its signal, and those of commands behind it, must not overtake those of commands before it: there is a fence between them.
pub const AFTER: u32 = 16;

/// What the courier shall do: move `bytes` bytes, then add to a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// GPU memory that the courier's GPU may load from; unless `INLINE`.
    pub from: u64,
    /// GPU memory that it may store to; multiples of 4, as `from` and `bytes`, unless `INLINE`: of `bytes`.
    pub to: u64,
    /// 0: no data.
    pub bytes: u32,
    /// `CUT`, `STOP`, `INLINE`, `HEAVY`, `AFTER`.
    pub flags: u32,
    /// For `INLINE`.
    pub value: u64,
    /// Address of the signal, a multiple of 8; 0: none.
    pub signal: u64,
    /// What is added to it.
    pub increment: u64,
}

/// A view of the memory. Whoever holds one keeps the memory.
#[derive(Clone, Copy)]
pub struct Ring {
    host: *mut u8,
}

// SAFETY: plain memory, used under the engine's lock.
unsafe impl Send for Ring {}
// SAFETY: as above.
unsafe impl Sync for Ring {}

impl Ring {
    /// # Safety
    /// `host`: `BYTES` zeroed bytes, a multiple of 64, that outlive this.
    pub unsafe fn new(host: *mut u8) -> Self {
        Self { host }
    }

    fn word(&self, at: usize) -> &AtomicU64 {
        debug_assert!(at + 8 <= BYTES && at % 8 == 0);
        // SAFETY: an aligned word inside the memory, which outlives `self`; everyone accesses it whole.
        unsafe { AtomicU64::from_ptr(self.host.add(at).cast()) }
    }

    /// Writes command number `number`. Its place is free: fewer than `COMMANDS` are not done.
    pub fn write(&self, number: u64, c: &Command) {
        let at = (number % COMMANDS) as usize * COMMAND_BYTES;
        let stamp = (number + 1) & 0xffff_ffff;
        let whole = [c.from, c.to, u64::from(c.bytes) | u64::from(c.flags) << 32, c.value, c.signal, c.increment];
        let half = |i: usize| whole[i / 2] >> (32 * (i % 2)) & 0xffff_ffff;
        for chunk in 0..4 {
            let (at, first) = (at + 16 * chunk, 3 * chunk);
            self.word(at).store(half(first) | half(first + 1) << 32, Ordering::Relaxed);
            self.word(at + 8).store(half(first + 2) | stamp << 32, Ordering::Release);
        }
    }

    /// Number of the last courier that has started to run.
    pub fn up(&self) -> u64 {
        self.word(WORDS_AT + UP_AT).load(Ordering::Acquire)
    }

    /// How many commands are done.
    pub fn done(&self) -> u64 {
        self.word(WORDS_AT + DONE_AT).load(Ordering::Acquire)
    }

    /// Number of the last courier that has ended. `done` read after it is final.
    pub fn gone(&self) -> u64 {
        self.word(WORDS_AT + GONE_AT).load(Ordering::Acquire)
    }

    /// Where the GPU finds the words, if it finds the ring at `ring`.
    pub fn words(ring: u64) -> u64 {
        ring + WORDS_AT as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_lies_as_the_kernel_reads_it() {
        let mut memory = vec![0u64; BYTES / 8 + 8];
        let skip = memory.as_ptr().align_offset(64);
        // SAFETY: large enough, zeroed, aligned.
        let ring = unsafe { Ring::new(memory[skip..].as_mut_ptr().cast()) };
        let c = Command {
            from: 0x1111_2222_3333_4444,
            to: 0x5555_6666_7777_8888,
            bytes: 8,
            flags: CUT | INLINE,
            value: 0x9999_aaaa_bbbb_cccc,
            signal: 0xdddd_eeee_ffff_0000,
            increment: 0x0123_4567_89ab_cdef,
        };
        ring.write(COMMANDS + 3, &c);
        let words: Vec<u32> = (0..8)
            .flat_map(|i| {
                let w = ring.word(3 * 64 + 8 * i).load(Ordering::Relaxed);
                [w as u32, (w >> 32) as u32]
            })
            .collect();
        let stamp = COMMANDS as u32 + 4;
        assert_eq!(
            words,
            [
                0x3333_4444,
                0x1111_2222,
                0x7777_8888,
                stamp,
                0x5555_6666,
                8,
                CUT | INLINE,
                stamp,
                0xbbbb_cccc,
                0x9999_aaaa,
                0xffff_0000,
                stamp,
                0xdddd_eeee,
                0x89ab_cdef,
                0x0123_4567,
                stamp,
            ]
        );
        assert_eq!((ring.up(), ring.done(), ring.gone()), (0, 0, 0));
    }
}
