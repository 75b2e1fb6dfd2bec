//! How the fake reads and writes what is registered: as memory of this process, or, where it lies on a real GPU, by
//! whoever carries bytes there ([`crate::gpu`]).

use crate::gpu;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};

/// Moves `bytes`, of regions, entries or local variables, which may overlap. What the sender wrote before is seen, and
/// who sees a later store sees these.
pub fn copy(from: u64, to: u64, bytes: u64) {
    if gpu::carry(from, to, bytes) {
        return;
    }
    fence(Ordering::Acquire);
    // SAFETY: both ranges are inside registered regions, entries or local variables; they may overlap.
    unsafe { std::ptr::copy(from as *const u8, to as *mut u8, bytes as usize) };
    fence(Ordering::Release);
}

/// Words of 8 bytes from `at` on, an aligned place inside a umem.
pub fn read_words(at: u64, out: &mut [u64]) {
    if gpu::carry(at, out.as_mut_ptr() as u64, 8 * out.len() as u64) {
        return;
    }
    for (word, out) in (0..).zip(out) {
        // SAFETY: inside the umem that a queue holds, aligned; others write it atomically, or before they ring.
        *out = unsafe { AtomicU64::from_ptr((at + 8 * word) as *mut u64) }.load(Ordering::Relaxed);
    }
}

/// Stores words of 8 bytes at `at`, an aligned place inside a umem; the last one behind the others.
pub fn write_words(at: u64, words: &[u64]) {
    if gpu::carry(words.as_ptr() as u64, at, 8 * words.len() as u64) {
        return;
    }
    for (nth, word) in (0..).zip(words) {
        // SAFETY: as for `read_words`; others read it atomically.
        let to = unsafe { AtomicU64::from_ptr((at + 8 * nth) as *mut u64) };
        let is_last = nth + 1 == words.len() as u64;
        to.store(*word, if is_last { Ordering::Release } else { Ordering::Relaxed });
    }
}

/// Four bytes at an aligned place inside a umem.
pub fn read_u32(at: u64) -> u32 {
    let mut word = 0_u32;
    if gpu::carry(at, (&raw mut word) as u64, 4) {
        return word;
    }
    // SAFETY: as for `read_words`.
    unsafe { AtomicU32::from_ptr(at as *mut u32) }.load(Ordering::Acquire)
}

/// Changes an aligned word of 4 or 8 bytes inside a region; returns what it was. On a real GPU it is atomic among
/// devices alone.
pub fn change(at: u64, bytes: u64, next: impl Fn(u64) -> u64) -> u64 {
    let mut old = 0_u64;
    if gpu::carry(at, (&raw mut old) as u64, bytes) {
        let new = next(old);
        gpu::carry((&raw const new) as u64, at, bytes);
        return old;
    }
    // SAFETY: aligned, inside a registered region; others change it atomically.
    unsafe {
        match bytes {
            4 => {
                let word = AtomicU32::from_ptr(at as *mut u32);
                let next = |old: u32| Some(next(old.into()) as u32);
                u64::from(word.fetch_update(Ordering::AcqRel, Ordering::Acquire, next).unwrap_or_else(|old| old))
            }
            _ => AtomicU64::from_ptr(at as *mut u64)
                .fetch_update(Ordering::AcqRel, Ordering::Acquire, |old| Some(next(old)))
                .unwrap_or_else(|old| old),
        }
    }
}
