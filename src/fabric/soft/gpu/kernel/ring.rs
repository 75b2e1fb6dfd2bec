//! The ring of commands that the copy kernel reads, and the words in which it answers, in pinned host memory.
//!
//! A command is eight words of 8 bytes: six bytes of it and above them a stamp, two bytes that tell the laps of the
//! ring apart. Eight bytes are the most that one load of the GPU is promised to see whole: PTX takes a vector for as
//! many loads as it has elements, in any order. So every word has its stamp, and the CPU stores it whole. A word with
//! the right stamp is of the command that is looked for, whatever the GPU sees of the others, and a command is there
//! when all eight are.
//!
//! The last word is stored with release, and what is used was loaded with acquire at system scope: the kernel that
//! finds a command also sees what this CPU saw when it wrote it, the bytes to be copied among it.

use crate::fabric::soft::gpu::op::Credit;
use std::sync::atomic::{AtomicU64, Ordering};

/// Commands; `copy.ptx` knows the number.
pub const COMMANDS: u64 = 256;
/// Words of one, and how many bits of it each holds.
const WORDS: usize = 8;
const PART_BITS: usize = 48;
/// Bytes that it takes.
const COMMAND_BYTES: usize = 8 * WORDS;
/// So many places ahead are brought nearer while one is written.
const AHEAD: u64 = 4;
/// Where the copy kernel answers: that it runs, how many commands are done, that it is gone. A line each.
const UP_AT: usize = 0;
const DONE_AT: usize = 64;
const GONE_AT: usize = 128;
/// Where the words begin, after the ring.
const WORDS_AT: usize = COMMANDS as usize * COMMAND_BYTES;
/// Bytes of all of it; rings lie one after the other, none shares a line with another.
pub const BYTES: usize = (WORDS_AT + 192).next_multiple_of(256);

/// Not in one go with the command before it.
pub const CUT: u32 = 1;
/// The copy kernel ends.
pub const STOP: u32 = 2;
/// The bytes are `value`'s first 1, 2, 4 or 8.
pub const INLINE: u32 = 4;
/// The bytes are for the worker blocks; the launch has some.
pub const WORKERS: u32 = 8;
/// An index of the poster's counts it, at the address that [`Command::with_credit`] puts in.
pub const CREDIT: u32 = 16;
/// Somebody waits until it is done: the copy kernel says so behind its go.
pub const REPORT: u32 = 32;
/// The index of a `CREDIT` has 8 bytes, instead of 4.
pub const WIDE: u32 = 64;
/// 2 is added to the index of a `CREDIT`, instead of 1.
pub const TWICE: u32 = 128;
/// Nobody is known to wait until it is done: it is reported with others, or once two polls have found nothing.
pub const UNAWAITED: u32 = 1 << 15;
/// Of the commands whose signals its own must not overtake, a bit each from here on: the lowest for the one that is
/// [`BEHIND_MOST`] places before it, the highest for its predecessor. There is a fence between those of one go.
pub const BEHIND_BIT: u32 = 8;
/// So many places.
pub const BEHIND_MOST: usize = 7;

/// What the copy kernel shall do: move `bytes` bytes, then add to a signal.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Command {
    /// GPU or pinned memory that the copy kernel's GPU may load from; for `INLINE` the index of a `CREDIT`.
    pub from: u64,
    /// GPU or pinned memory that it may store to; multiples of 4, as `from` and `bytes`, unless `INLINE`: of `bytes`.
    pub to: u64,
    /// 0: no data.
    pub bytes: u32,
    /// `CUT`, `STOP`, `INLINE`, `WORKERS`, `CREDIT`, `REPORT`, `WIDE`, `TWICE`, from `BEHIND_BIT` on which signals come
    /// first, and `UNAWAITED`.
    pub flags: u32,
    /// For `INLINE`; otherwise the index of a `CREDIT`.
    pub value: u64,
    /// Address of the signal, a multiple of 8; 0: none.
    pub signal: u64,
    /// What is added to it.
    pub increment: u64,
}

impl Command {
    /// The same; when it is done, its entries are added to the index of the credit.
    pub fn with_credit(self, Credit { at, is_wide, entries }: Credit) -> Self {
        let of_index = if is_wide { WIDE } else { 0 } | if entries > 1 { TWICE } else { 0 };
        let flags = self.flags | CREDIT | of_index;
        match self.flags & INLINE {
            0 => Self { flags, value: at, ..self },
            _ => Self { flags, from: at, ..self },
        }
    }

    /// As it lies in the ring.
    fn words(&self, stamp: u16) -> [u64; WORDS] {
        let sizes = u64::from(self.bytes) | u64::from(self.flags) << 32;
        let fields = [self.from, self.to, sizes, self.value, self.signal, self.increment, 0];
        std::array::from_fn(|i| {
            let (field, bit) = (PART_BITS * i / 64, PART_BITS * i % 64);
            let both = u128::from(fields[field]) | u128::from(fields[field + 1]) << 64;
            (both >> bit) as u64 & ((1 << PART_BITS) - 1) | u64::from(stamp) << PART_BITS
        })
    }
}

/// Stamp of the words of a command: its lap, from 1 on, as the ring is zero at first. What lies in its place when it is
/// written is the command of one lap before.
fn stamp(number: u64) -> u16 {
    (number / COMMANDS + 1) as u16
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

    /// Brings the place of command number `number` nearer, to be written: another processor may have written it last.
    #[inline(always)]
    fn prefetch(&self, number: u64) {
        #[cfg(target_arch = "x86_64")]
        {
            use std::arch::x86_64::{_mm_prefetch, _MM_HINT_ET0};
            let word = self.word((number % COMMANDS) as usize * COMMAND_BYTES);
            // SAFETY: it changes nothing, at an address that there is.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(std::ptr::from_ref(word).cast()) };
        }
        #[cfg(not(target_arch = "x86_64"))]
        let _ = number;
    }

    /// Writes command number `number`. Its place is free: fewer than `COMMANDS` are not done.
    pub fn write(&self, number: u64, c: &Command) {
        self.prefetch(number + AHEAD);
        let at = (number % COMMANDS) as usize * COMMAND_BYTES;
        for (i, word) in c.words(stamp(number)).into_iter().enumerate() {
            let order = if i == WORDS - 1 { Ordering::Release } else { Ordering::Relaxed };
            self.word(at + 8 * i).store(word, order);
        }
    }

    /// Number of the last copy kernel that has started to run.
    pub fn up(&self) -> u64 {
        self.word(WORDS_AT + UP_AT).load(Ordering::Acquire)
    }

    /// How many commands are done.
    pub fn done(&self) -> u64 {
        self.word(WORDS_AT + DONE_AT).load(Ordering::Acquire)
    }

    /// Number of the last copy kernel that has ended. `done` read after it is final.
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

    const COMMAND: Command = Command {
        from: 0x1111_2222_3333_4444,
        to: 0x5555_6666_7777_8888,
        bytes: 8,
        flags: CUT | INLINE,
        value: 0x9999_aaaa_bbbb_cccc,
        signal: 0xdddd_eeee_ffff_0000,
        increment: 0x0123_4567_89ab_cdef,
    };

    /// With a ring in zeroed memory.
    fn with_ring(test: impl Fn(Ring)) {
        let mut memory = vec![0u64; BYTES / 8 + 8];
        let skip = memory.as_ptr().align_offset(64);
        // SAFETY: large enough, zeroed, aligned, and there until the test is over.
        test(unsafe { Ring::new(memory[skip..].as_mut_ptr().cast()) });
    }

    /// What the memory of command number `number` holds.
    fn words(ring: &Ring, number: u64) -> [u64; 8] {
        std::array::from_fn(|i| ring.word((number % COMMANDS) as usize * 64 + 8 * i).load(Ordering::Acquire))
    }

    /// Command number `number` as the GPU takes it from words that it loaded one by one.
    fn taken(words: [u64; 8], number: u64) -> Option<Command> {
        let lap = ((number >> 8) + 1) & 0xffff;
        let bytes: Vec<u8> = words.iter().flat_map(|w| w.to_le_bytes()[..6].to_vec()).collect();
        let field = |i: usize| u64::from_le_bytes(bytes[8 * i..8 * i + 8].try_into().unwrap());
        words.iter().all(|w| w >> 48 == lap).then(|| Command {
            from: field(0),
            to: field(1),
            bytes: field(2) as u32,
            flags: (field(2) >> 32) as u32,
            value: field(3),
            signal: field(4),
            increment: field(5),
        })
    }

    #[test]
    fn a_command_lies_as_the_kernel_reads_it() {
        with_ring(|ring| {
            let number = COMMANDS + 3;
            ring.write(number, &COMMAND);
            assert_eq!(
                words(&ring, number),
                [
                    0x0002_2222_3333_4444,
                    0x0002_7777_8888_1111,
                    0x0002_0008_5555_6666,
                    0x0002_0000_0005_0000,
                    0x0002_aaaa_bbbb_cccc,
                    0x0002_ffff_0000_9999,
                    0x0002_cdef_dddd_eeee,
                    0x0002_0123_4567_89ab,
                ]
            );
            assert_eq!((ring.up(), ring.done(), ring.gone()), (0, 0, 0));
        });
    }

    /// Each word may be read before or after it is written, whichever of the others were.
    #[test]
    fn of_a_command_that_is_being_written_nothing_is_taken() {
        with_ring(|ring| {
            // The first lap, the second, and where stamps begin again.
            for number in [3, COMMANDS + 3, 65_535 * COMMANDS - 1, 65_535 * COMMANDS, 65_536 * COMMANDS + 255] {
                if let Some(before) = number.checked_sub(COMMANDS) {
                    ring.write(before, &Command { signal: 0x1234_5678_9abc_def0, ..COMMAND });
                }
                let before = words(&ring, number);
                let command = Command { increment: number, ..COMMAND };
                ring.write(number, &command);
                let after = words(&ring, number);
                for new in 0..=255 {
                    let seen = std::array::from_fn(|i| if new >> i & 1 == 1 { after[i] } else { before[i] });
                    assert_eq!(taken(seen, number), (new == 255).then_some(command), "{number}: words {new:#b}");
                }
            }
        });
    }
}
