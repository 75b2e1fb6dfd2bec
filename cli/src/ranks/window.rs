//! Memory to register: pages of its own, zero at first, optionally shared with ranks forked later.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

/// An anonymous mapping. Peers write to it behind the compiler's back, so all access is by raw pointer or atomics.
#[derive(Debug)]
pub struct Memory {
    base: *mut u8,
    len: usize,
}

// SAFETY: the mapping is owned, and access to its bytes is by pointer (unsafe) or atomic.
unsafe impl Send for Memory {}
// SAFETY: as above.
unsafe impl Sync for Memory {}

impl Memory {
    /// `len` bytes (at least one page) of private memory. Pages come into being when touched.
    pub fn new(len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_PRIVATE)
    }

    /// Memory that ranks forked afterwards share.
    pub fn shared(len: usize) -> io::Result<Self> {
        Self::map(len, libc::MAP_SHARED)
    }

    fn map(len: usize, kind: i32) -> io::Result<Self> {
        let len = len.max(1).next_multiple_of(4096);
        let access = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a fresh anonymous mapping.
        let base = unsafe { libc::mmap(std::ptr::null_mut(), len, access, kind | libc::MAP_ANONYMOUS, -1, 0) };
        match base {
            libc::MAP_FAILED => Err(io::Error::last_os_error()),
            base => Ok(Self { base: base.cast(), len }),
        }
    }

    /// First byte.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Never: a mapping has at least one page.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The 64-bit word at byte `offset`.
    ///
    /// # Panics
    /// If it is unaligned or past the end.
    pub fn word(&self, offset: usize) -> &AtomicU64 {
        assert!(offset % 8 == 0 && offset + 8 <= self.len, "word at {offset} of {}", self.len);
        // SAFETY: inside the mapping and aligned, just checked; lives as long as self.
        unsafe { AtomicU64::from_ptr(self.base.add(offset).cast()) }
    }

    /// Signal number `index`: the word at byte `8 * index`, with what was written before it.
    pub fn signal(&self, index: usize) -> u64 {
        self.word(8 * index).load(Ordering::Acquire)
    }

    /// Bytes `offset..offset + len` for a moment in which no peer writes there.
    ///
    /// # Safety
    /// Nobody writes to the range while the slice lives.
    pub unsafe fn bytes(&self, offset: usize, len: usize) -> &[u8] {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len} of {}", self.len);
        // SAFETY: in range, just checked; quiet as the caller promises.
        unsafe { std::slice::from_raw_parts(self.base.add(offset), len) }
    }

    /// The same, to write.
    ///
    /// # Safety
    /// Nobody else touches the range while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, offset: usize, len: usize) -> &mut [u8] {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.len), "{offset} + {len} of {}", self.len);
        // SAFETY: in range, just checked; exclusive as the caller promises.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(offset), len) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: our own mapping; borrows of it have ended.
        unsafe { libc::munmap(self.base.cast(), self.len) };
    }
}
