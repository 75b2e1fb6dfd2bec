//! Memory of a rank that peers reach.

use super::world::Outcome;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::AtomicU64;

/// Memory of this rank, registered on all ranks under the same number.
pub struct Window {
    pub(super) base: *mut u8,
    pub(super) len: usize,
    /// The plugin's handle.
    pub mh: *mut c_void,
    /// The plugin's handle for device code, where the table gives one.
    pub gin: u64,
}

impl Window {
    /// Zeroed memory that no plugin knows.
    pub fn unregistered(len: usize) -> Outcome<Self> {
        // SAFETY: a new private mapping, which lives as long as the process or until `free`.
        let at = unsafe {
            let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
            libc::mmap(null_mut(), len, libc::PROT_READ | libc::PROT_WRITE, flags, -1, 0)
        };
        match at {
            libc::MAP_FAILED => Err(format!("no memory for a window of {len} bytes")),
            at => Ok(Self { base: at.cast(), len, mh: null_mut(), gin: 0 }),
        }
    }

    /// Gives the memory back. Never done by dropping: when a case fails, the plugin may still be at work in it.
    pub fn free(self) {
        // SAFETY: the mapping of `unregistered`, which no plugin knows any more.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// The aligned word at byte offset `off`.
    pub fn word(&self, off: usize) -> &AtomicU64 {
        assert!(off % 8 == 0 && off + 8 <= self.len);
        // SAFETY: aligned and in bounds; peers write it through the plugin, hence the atomic.
        unsafe { AtomicU64::from_ptr(self.base.add(off).cast()) }
    }

    /// Part of the memory. Whoever looks has first seen the signal that says nobody writes there now.
    #[allow(clippy::mut_from_ref)]
    pub fn bytes(&self, off: usize, len: usize) -> &mut [u8] {
        assert!(off.checked_add(len).is_some_and(|end| end <= self.len));
        // SAFETY: in bounds; the cases hand parts to one writer at a time.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(off), len) }
    }
}
