//! Anonymous shared memory: a memfd, so nothing has a name in /dev/shm and nothing is left when everybody is dead.

use crate::error::{Error, Result};
use std::ffi::CStr;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr::NonNull;

/// A mapping of a part of a memfd; unmapped on drop.
pub struct Mapping {
    at: NonNull<u8>,
    len: usize,
}

// SAFETY: a mapping is plain memory; who touches it how is for its users to say.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Maps `len` bytes at `offset` (a multiple of the page size) for reading and writing, shared.
    pub fn new(fd: BorrowedFd<'_>, offset: usize, len: usize) -> Result<Self> {
        Self::map(fd, offset, len, libc::PROT_READ | libc::PROT_WRITE)
    }

    /// Maps the first `len` bytes for reading alone, shared.
    pub fn read_only(fd: BorrowedFd<'_>, len: usize) -> Result<Self> {
        Self::map(fd, 0, len, libc::PROT_READ)
    }

    fn map(fd: BorrowedFd<'_>, offset: usize, len: usize, access: libc::c_int) -> Result<Self> {
        // SAFETY: a new mapping at an address that the kernel picks touches no existing memory.
        let at = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                access,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                fd.as_raw_fd(),
                offset as libc::off_t,
            )
        };
        if at == libc::MAP_FAILED {
            return Err(Error::last_os(format!("mapping {len} bytes of shared memory failed")));
        }
        NonNull::new(at.cast()).map(|at| Self { at, len }).ok_or_else(|| Error::internal("mmap returned NULL"))
    }

    /// First byte.
    pub fn ptr(&self) -> *mut u8 {
        self.at.as_ptr()
    }

    /// Bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is mapped; never so.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: the range was mapped by `new`, and nobody holds a pointer into it once its owner drops it.
        unsafe { libc::munmap(self.at.as_ptr().cast(), self.len) };
    }
}

/// A memfd of `len` zero bytes that can neither grow nor shrink any more (so that no peer can make us fault).
pub fn create(len: usize) -> Result<OwnedFd> {
    create_named(c"oxygin", len)
}

/// The same with a name that `/proc/PID/fd` shows.
pub fn create_named(name: &CStr, len: usize) -> Result<OwnedFd> {
    // SAFETY: the name is a C string; the result is checked.
    let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING) };
    if fd < 0 {
        return Err(Error::last_os("memfd_create failed"));
    }
    // SAFETY: the descriptor is new and ours.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: plain calls on our descriptor.
    let ok = unsafe {
        libc::ftruncate(fd.as_raw_fd(), len as libc::off_t) == 0
            && libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_SHRINK | libc::F_SEAL_GROW) == 0
    };
    if !ok {
        return Err(Error::last_os(format!("sizing {len} bytes of shared memory failed")));
    }
    Ok(fd)
}

/// From here on nobody gets a writable mapping of a memfd; those that there are stay so. `false`: the kernel is older
/// than Linux 5.1 and cannot.
pub fn seal_writing(fd: BorrowedFd<'_>) -> bool {
    // SAFETY: plain call.
    unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, libc::F_SEAL_FUTURE_WRITE) == 0 }
}

/// Bytes behind a descriptor, if it is a memfd that cannot shrink under us.
pub fn sealed_len(fd: BorrowedFd<'_>) -> Option<usize> {
    // SAFETY: plain call.
    let seals = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) };
    if seals < 0 || seals & libc::F_SEAL_SHRINK == 0 {
        return None;
    }
    // SAFETY: `stat` is plain data that fstat fills.
    let mut stat: libc::stat = unsafe { std::mem::zeroed() };
    // SAFETY: plain call with a valid out pointer.
    (unsafe { libc::fstat(fd.as_raw_fd(), &mut stat) } == 0).then_some(stat.st_size as usize)
}
