//! Doorbell pages: plain memory, which device code and the CPU write and the fake looks at.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of a page.
pub const BYTES: usize = 4096;
/// Where its register is: rdma-core, `providers/mlx5`, `MLX5_BF_OFFSET`.
pub const REGISTER: usize = 0x800;
/// Where that of queue pairs without doorbell record is: rdma-core, `tests/mlx5_base.py`, `DB_BF_DBR_LESS_BUF_OFFSET`.
pub const REGISTER_WITHOUT_RECORD: usize = 0x600;

/// A page; unmapped when nobody holds it. Behind a descriptor, so that it can be exported.
#[derive(Debug)]
pub struct Page {
    at: u64,
    fd: i32,
}

impl Page {
    /// A page of zeros.
    pub fn new() -> Option<Self> {
        let shared = libc::PROT_READ | libc::PROT_WRITE;
        unsafe {
            let fd = libc::memfd_create(c"mlx5-uar".as_ptr(), libc::MFD_CLOEXEC);
            if fd < 0 || libc::ftruncate(fd, BYTES as libc::off_t) != 0 {
                return None;
            }
            let at = libc::mmap(null_mut(), BYTES, shared, libc::MAP_SHARED, fd, 0);
            (at != libc::MAP_FAILED).then_some(Self { at: at as u64, fd })
        }
    }

    /// Where it is.
    pub fn at(&self) -> u64 {
        self.at
    }

    /// A descriptor of it, the caller's.
    pub fn export(&self) -> i32 {
        unsafe { libc::fcntl(self.fd, libc::F_DUPFD_CLOEXEC, 0) }
    }

    /// What was written last at one of its registers.
    pub fn doorbell(&self, register: usize) -> u64 {
        // SAFETY: eight aligned bytes inside the page, which others write atomically.
        let word = unsafe { AtomicU64::from_ptr((self.at as usize + register) as *mut u64) };
        u64::from_be(word.load(Ordering::Acquire))
    }
}

impl Drop for Page {
    fn drop(&mut self) {
        unsafe {
            libc::munmap(self.at as *mut libc::c_void, BYTES);
            libc::close(self.fd);
        }
    }
}
