//! Device memory: no access where the application sees it, writable where the GPU does. Memory that was made on a NUMA
//! node is writable where both do.

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

pub const PAGE: usize = 4096;
/// Whose memory it is that was made on a NUMA node: no device's.
pub const HOST: c_int = -2;
const MAGIC: u64 = 0x6661_6b65_6d65_6d31;

/// Bytes of a device, in a file that other processes can map; its last page says whose and which.
pub struct Bytes {
    pub fd: OwnedFd,
    pub bytes: usize,
    pub device: c_int,
    /// Ways it may be exported, as bits; 0 for memory of cudaMalloc.
    pub handle_types: c_int,
}

impl Bytes {
    pub fn new(device: c_int, bytes: usize, handle_types: c_int) -> Self {
        let bytes = bytes.next_multiple_of(PAGE);
        // SAFETY: a file of our own.
        let fd = unsafe {
            let fd = libc::memfd_create(c"device".as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0 && libc::ftruncate(fd, (bytes + PAGE) as i64) == 0);
            OwnedFd::from_raw_fd(fd)
        };
        let note = [MAGIC, device as u64, handle_types as u64];
        // SAFETY: 24 bytes of our own.
        assert_eq!(unsafe { libc::pwrite(fd.as_raw_fd(), note.as_ptr().cast(), 24, bytes as i64) }, 24);
        Self { fd, bytes, device, handle_types }
    }

    /// What another process made; `None`: it is something else.
    pub fn open(fd: BorrowedFd<'_>) -> Option<Self> {
        let fd = fd.try_clone_to_owned().ok()?;
        // SAFETY: plain calls with places for the answers.
        unsafe {
            let mut stat: libc::stat = std::mem::zeroed();
            if libc::fstat(fd.as_raw_fd(), &mut stat) != 0 {
                return None;
            }
            let bytes = (stat.st_size as usize).checked_sub(PAGE)?;
            let mut note = [0u64; 3];
            let n = libc::pread(fd.as_raw_fd(), note.as_mut_ptr().cast(), 24, bytes as i64);
            (n == 24 && note[0] == MAGIC).then_some(Self {
                fd,
                bytes,
                device: note[1] as c_int,
                handle_types: note[2] as c_int,
            })
        }
    }
}

/// Addresses without memory: one range that the application sees, one that the GPU sees.
#[derive(Clone, Copy)]
pub struct Range {
    pub base: u64,
    pub bytes: usize,
    alias: *mut u8,
}

// SAFETY: addresses; who touches what is the users' affair.
unsafe impl Send for Range {}

fn reserve(bytes: usize) -> *mut u8 {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let at = unsafe {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        libc::mmap(std::ptr::null_mut(), bytes, libc::PROT_NONE, flags, -1, 0)
    };
    assert!(at != libc::MAP_FAILED);
    at.cast()
}

/// Memory of this process, from a page's border on; a page stays free behind it.
pub fn host(bytes: usize) -> *mut u8 {
    let at = reserve(bytes + PAGE);
    // SAFETY: the mapping that was just made, but for its last page.
    let got = unsafe { libc::mprotect(at.cast(), bytes.next_multiple_of(PAGE), libc::PROT_READ | libc::PROT_WRITE) };
    assert_eq!(got, 0);
    at
}

/// Gives the bytes of [`host`] back to the system. The addresses stay, so that whoever still looks finds zeros, with
/// the page behind them, so that the system counts neighbours of the same kind as one mapping.
pub fn empty_host(at: *mut u8, bytes: usize) {
    let all = bytes.next_multiple_of(PAGE) + PAGE;
    // SAFETY: made by `host`; nobody is promised what is in it any more.
    let got = unsafe {
        [
            libc::madvise(at.cast(), all, libc::MADV_DONTNEED),
            libc::mprotect(at.cast(), all, libc::PROT_READ | libc::PROT_WRITE),
        ]
    };
    assert_eq!(got, [0, 0]);
}

impl Range {
    /// A page stays free behind it, so that ranges never touch.
    pub fn reserve(bytes: usize) -> Self {
        Self { base: reserve(bytes + PAGE) as u64, bytes, alias: reserve(bytes + PAGE) }
    }

    pub fn holds(&self, at: u64, n: usize) -> bool {
        at >= self.base && at - self.base <= self.bytes as u64 && n as u64 <= self.bytes as u64 - (at - self.base)
    }

    fn alias(&self, at: u64) -> *mut u8 {
        self.alias.wrapping_add((at - self.base) as usize)
    }

    /// Puts memory under a part of it.
    pub fn map(&self, at: u64, bytes: usize, memory: &Bytes) {
        let (rw, flags) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_SHARED | libc::MAP_FIXED);
        let is_seen = memory.device == HOST;
        for at in [self.alias(at), at as *mut u8].into_iter().take(1 + usize::from(is_seen)) {
            // SAFETY: inside the range (caller), which is ours.
            let got = unsafe { libc::mmap(at.cast(), bytes, rw, flags, memory.fd.as_raw_fd(), 0) };
            assert!(got != libc::MAP_FAILED);
        }
    }

    /// Gives the bytes of a mapping back to the system, here and in every process that has them. They are zeros then.
    pub fn empty(&self, at: u64, bytes: usize) {
        // SAFETY: inside the range (caller), where a file is mapped.
        unsafe { libc::madvise(self.alias(at).cast(), bytes, libc::MADV_REMOVE) };
    }

    /// Takes it away: a stream that still works there dies.
    pub fn unmap(&self, at: u64, bytes: usize) {
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
        for at in [self.alias(at), at as *mut u8] {
            // SAFETY: inside the range (caller), which is ours.
            unsafe { libc::mmap(at.cast(), bytes, libc::PROT_NONE, flags, -1, 0) };
        }
    }

    pub fn free(self) {
        // SAFETY: made by `reserve`, freed once.
        unsafe {
            libc::munmap(self.base as *mut libc::c_void, self.bytes + PAGE);
            libc::munmap(self.alias.cast(), self.bytes + PAGE);
        }
    }
}

/// What is mapped somewhere.
#[derive(Clone, Copy)]
pub struct Memory {
    pub base: u64,
    pub bytes: usize,
    pub range: Range,
    /// Whose memory it is.
    pub device: c_int,
    /// Nothing but this device may touch it, and the driver names no context for it.
    pub only: Option<u64>,
    pub managed: bool,
    /// Kernels of which GPUs may touch it, unless `only` says so: all (0), its own (1).
    pub access: c_int,
    /// The physical memory.
    pub of: u64,
    /// How it came here.
    pub kind: Kind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// cuMemAlloc.
    Whole,
    /// cuMemMap.
    Mapped,
}

impl Memory {
    pub fn holds(&self, at: u64, n: usize) -> bool {
        at >= self.base && at - self.base <= self.bytes as u64 && n as u64 <= self.bytes as u64 - (at - self.base)
    }

    /// Whether kernels of a GPU may touch it.
    pub fn is_open_to(&self, device: c_int) -> bool {
        match (self.only, self.access) {
            (Some(only), _) => only >> device & 1 != 0,
            (None, 0) => true,
            _ => self.device == device,
        }
    }

    /// Where the GPU sees an address inside.
    pub fn at(&self, at: u64) -> *mut u8 {
        self.range.alias(at)
    }
}
