//! A completion entry: what the device tells device code of a send entry.
//!
//! Device code for compute capability 9.0 and later looks at the owner bit alone, older device code at the index too;
//! both load at most the last four bytes at once. So [`Ring::write`] stores these last, as one word with release.

use super::{Syndrome, ENTRY_BYTES};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Opcode of a good completion of a request.
pub const GOOD: u8 = 0;
/// Opcode of one with an error.
pub const FAILED: u8 = 13;
/// The last byte of an entry that has never been written: opcode "invalid", owner 1, which is not that of the first
/// lap.
pub const NEVER: u8 = 0xf1;
/// Where the syndrome's word is: the vendor's byte, which is 0, and the syndrome are its last two.
const SYNDROME: usize = 52;
/// Where the last word is: the send entry's opcode and queue pair, its index, a signature, opcode and owner.
const LAST: usize = 56;

/// What is said of a send entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// The low 16 bits of the send entry's index.
    pub index: u16,
    /// Its opcode.
    pub opcode: u8,
    /// Its queue pair.
    pub queue: u32,
    /// Why it failed; `None`: it did not.
    pub syndrome: Option<Syndrome>,
}

/// A completion queue, as its writer has it.
pub struct Ring {
    entries: NonNull<u8>,
    size: u64,
    written: u64,
}

// SAFETY: one thread at a time writes; device code reads words that are stored as such.
unsafe impl Send for Ring {}

impl Ring {
    /// # Safety
    /// `size` entries, a power of two, at `entries`, aligned to 8 bytes, as long as the ring; nobody else writes them
    /// but whoever is noted by [`Self::note_written`].
    pub unsafe fn new(entries: NonNull<u8>, size: u32) -> Self {
        debug_assert!(size.is_power_of_two() && entries.as_ptr() as usize % 8 == 0);
        let ring = Self { entries, size: size.into(), written: 0 };
        for i in 0..ring.size {
            // SAFETY: all its bytes are the ring's.
            unsafe {
                let entry = ring.entry(i);
                std::ptr::write_bytes(entry, 0, ENTRY_BYTES);
                *entry.add(ENTRY_BYTES - 1) = NEVER;
            }
        }
        ring
    }

    #[inline(always)]
    fn entry(&self, number: u64) -> *mut u8 {
        // SAFETY: below the size.
        unsafe { self.entries.as_ptr().add((number & (self.size - 1)) as usize * ENTRY_BYTES) }
    }

    /// Entries written.
    #[inline(always)]
    pub fn written(&self) -> u64 {
        self.written
    }

    /// Somebody else has written the next `n` entries.
    pub fn note_written(&mut self, n: u32) {
        self.written += u64::from(n);
    }

    /// Writes the next entry. What was done for the send entry is visible to whoever sees it.
    #[inline(always)]
    pub fn write(&mut self, done: &Completion) {
        let (entry, owner) = (self.entry(self.written), u8::from(self.written & self.size != 0));
        let code = match done.syndrome {
            None => GOOD,
            Some(syndrome) => {
                let word = u32::from(syndrome as u8).to_be();
                // SAFETY: an aligned word of the entry.
                unsafe { (*entry.add(SYNDROME).cast::<AtomicU32>()).store(word, Ordering::Relaxed) };
                FAILED
            }
        };
        let about = u64::from(done.opcode) << 24 | u64::from(done.queue & 0xff_ffff);
        let last = about << 32 | u64::from(done.index) << 16 | u64::from(code << 4 | owner);
        // SAFETY: as above.
        unsafe { (*entry.add(LAST).cast::<AtomicU64>()).store(last.to_be(), Ordering::Release) };
        self.written += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn owner_bits_follow_the_lap_and_errors_say_why() {
        let mut memory = [0xaau64; 16];
        let at = memory.as_mut_ptr();
        // SAFETY: two entries, which outlive the ring.
        let mut ring = unsafe { Ring::new(NonNull::new_unchecked(at.cast()), 2) };
        // SAFETY: as above.
        let byte = |n: usize, i: usize| unsafe { *at.cast::<u8>().add(64 * n + i) };
        assert_eq!([byte(0, 63), byte(1, 63), byte(0, 0)], [NEVER, NEVER, 0]);
        let good = Completion { index: 0x1234, opcode: 8, queue: 0xabcdef, syndrome: None };
        ring.write(&good);
        assert_eq!((56..64).map(|i| byte(0, i)).collect::<Vec<_>>(), [8, 0xab, 0xcd, 0xef, 0x12, 0x34, 0, 0]);
        ring.write(&good);
        assert_eq!(byte(1, 63), 0);
        ring.write(&Completion { syndrome: Some(Syndrome::RemoteAccess), ..good });
        assert_eq!((byte(0, 63), byte(0, 55), byte(0, 54)), (0xd1, 0x13, 0));
        assert_eq!((byte(1, 63), ring.written()), (0, 3));
    }
}
