//! Atomic operations on words in host memory of this process, and as messages of peers of this host.
//!
//! Whoever may address the word changes it, by instructions of the processor: with respect to signals, which are added
//! by one as well (`memory::registry::Held::add`), and to whatever the application's threads do by such.

use crate::rma::atomic::{Atomic, Atomicity, Atomics, Change, Width};
use crate::sys::wire::Reader;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// What contexts of this fabric carry out. Words in GPU memory are changed by their owner's engine, as signals are
/// there.
pub const ATOMICS: Atomics = Atomics { host: Atomicity::Processors, gpu: Atomicity::Fabric, by_words: false };

/// Changes a word and returns what it held before.
///
/// # Safety
/// `at` is a multiple of the width, and that many bytes stay readable and writable there meanwhile; whoever else
/// changes them does so atomically.
pub unsafe fn change(at: *mut u8, change: &Change, width: Width) -> u64 {
    debug_assert_eq!(at as u64 % width.bytes(), 0);
    match (width, *change) {
        (Width::Eight, change) => {
            // SAFETY: the caller's promise.
            let word = unsafe { AtomicU64::from_ptr(at.cast()) };
            match change {
                Change::FetchAdd { add, boundary: 0 } => word.fetch_add(add, Ordering::SeqCst),
                _ => word
                    .fetch_update(Ordering::SeqCst, Ordering::SeqCst, |old| change.of(old, width))
                    .unwrap_or_else(|old| old),
            }
        }
        (Width::Four, change) => {
            // SAFETY: the caller's promise.
            let word = unsafe { AtomicU32::from_ptr(at.cast()) };
            let next = |old: u32| change.of(old.into(), width).map(|new| new as u32);
            word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, next).unwrap_or_else(|old| old).into()
        }
    }
}

/// The payload of a message that asks for an atomic operation: what becomes of the word, and whom the answer is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicRequest {
    /// What becomes of the word.
    pub change: Change,
    /// Its bytes.
    pub width: Width,
    /// Whether the fetched value is wanted.
    pub fetches: bool,
    /// The operation's number in the requester's context.
    pub seq: u32,
}

impl AtomicRequest {
    /// Bytes of the payload.
    pub const LEN: usize = 40;

    /// That of an operation with this number.
    pub fn of(atomic: &Atomic, seq: u32) -> Self {
        Self { change: atomic.change, width: atomic.width, fetches: atomic.fetched.is_some(), seq }
    }

    /// The payload.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        (b[0], b[1], b[2]) = (self.change.code(), self.width.bytes() as u8, self.fetches.into());
        b[4..8].copy_from_slice(&self.seq.to_le_bytes());
        for (place, word) in b[8..].chunks_exact_mut(8).zip(self.change.operands()) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        b
    }

    /// From a payload.
    pub fn parse(b: &[u8]) -> Option<Self> {
        let mut r = Reader::new(b);
        let (code, width, fetches, zero, seq) = (r.u8()?, r.u8()?, r.u8()?, r.u8()?, r.u32()?);
        let operands = [r.u64()?, r.u64()?, r.u64()?, r.u64()?];
        r.end()?;
        let width = Width::of(width.into()).filter(|_| fetches <= 1 && zero == 0)?;
        Some(Self { change: Change::parse(code, operands, width)?, width, fetches: fetches == 1, seq })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn words_are_changed_and_their_old_values_returned() {
        let mut word = u64::MAX;
        let at = std::ptr::from_mut(&mut word).cast::<u8>();
        let apply = |change_: Change, width| {
            // SAFETY: a word of this test's own.
            let old = unsafe { change(at, &change_, width) };
            // SAFETY: as above.
            (old, unsafe { at.cast::<u64>().read() })
        };
        assert_eq!(apply(Change::add(2), Width::Eight), (u64::MAX, 1));
        assert_eq!(apply(Change::add(u64::from(u32::MAX)), Width::Four), (1, 0));
        assert_eq!(apply(Change::compare_swap(0, 7, Width::Four), Width::Four), (0, 7));
        assert_eq!(apply(Change::compare_swap(0, 9, Width::Eight), Width::Eight), (7, 7));
        let fields = Change::FetchAdd { add: 0xf9, boundary: 0x80 };
        assert_eq!(apply(fields, Width::Eight), (7, 0));
    }

    proptest! {
        #[test]
        fn requests_come_back(code in 1u8..3, operands: [u64; 4], wide: bool, fetches: bool, seq: u32) {
            let width = if wide { Width::Eight } else { Width::Four };
            let mut operands = operands.map(|x| x & width.mask());
            if code == 1 {
                (operands[2], operands[3]) = (0, 0);
            }
            let change = Change::parse(code, operands, width).unwrap();
            let request = AtomicRequest { change, width, fetches, seq };
            prop_assert_eq!(AtomicRequest::parse(&request.encode()), Some(request));
        }

        #[test]
        fn any_bytes_parse_or_not(bytes: [u8; AtomicRequest::LEN], code in 0u8..4, width in 0u8..10) {
            let mut bytes = bytes;
            let _ = AtomicRequest::parse(&bytes);
            (bytes[0], bytes[1], bytes[2], bytes[3]) = (code, width, 1, 0);
            if let Some(request) = AtomicRequest::parse(&bytes) {
                prop_assert_eq!(request.encode(), bytes);
            }
        }
    }
}
