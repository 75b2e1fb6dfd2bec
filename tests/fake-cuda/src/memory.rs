//! Device memory: no access where the application sees it, writable where the GPU does.

use std::ffi::c_int;

/// One allocation.
#[derive(Clone, Copy)]
pub struct Memory {
    base: u64,
    bytes: usize,
    alias: *mut u8,
    pub device: c_int,
    pub private: bool,
    pub managed: bool,
}

// SAFETY: addresses of mappings that stay for the process's life.
unsafe impl Send for Memory {}

impl Memory {
    pub fn map(device: c_int, bytes: usize, private: bool, managed: bool) -> Self {
        let bytes = bytes.next_multiple_of(4096);
        // SAFETY: a file of our own, mapped twice at addresses of the kernel's choice.
        unsafe {
            let fd = libc::memfd_create(c"device".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, bytes as i64) == 0);
            let map = |protection| libc::mmap(std::ptr::null_mut(), bytes, protection, libc::MAP_SHARED, fd, 0);
            let (seen, alias) = (map(libc::PROT_NONE), map(libc::PROT_READ | libc::PROT_WRITE));
            assert!(seen != libc::MAP_FAILED && alias != libc::MAP_FAILED);
            libc::close(fd);
            Self { base: seen as u64, bytes, alias: alias.cast(), device, private, managed }
        }
    }

    pub fn holds(&self, at: u64, n: usize) -> bool {
        at >= self.base && at - self.base <= self.bytes as u64 && n as u64 <= self.bytes as u64 - (at - self.base)
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    /// Where the GPU sees an address inside.
    pub fn at(&self, at: u64) -> *mut u8 {
        self.alias.wrapping_add((at - self.base) as usize)
    }
}
