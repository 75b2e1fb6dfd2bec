//! Memory in pages of its own.

use nix::sys::mman::{mmap_anonymous, munmap, MapFlags, ProtFlags};
use std::ffi::c_void;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;
use std::sync::atomic::AtomicU64;

/// Host pages of our own.
pub struct Pages {
    at: NonNull<c_void>,
    bytes: usize,
}

// SAFETY: plain memory; who accesses what is the owner's affair.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Zeroed; nothing is taken from the system before it is touched.
    pub fn new(bytes: usize) -> io::Result<Self> {
        let bytes = NonZeroUsize::new(bytes).unwrap_or(NonZeroUsize::MIN);
        let (access, kind) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
        // SAFETY: a fresh mapping at an address of the kernel's choice.
        let at = unsafe { mmap_anonymous(None, bytes, access, kind | MapFlags::MAP_NORESERVE) }?;
        Ok(Self { at, bytes: bytes.get() })
    }

    /// Zeroed, for registration with a device, and not in children that are forked from now on.
    ///
    /// Where NCCL has called `ibv_fork_init` and the kernel (before 5.12) or libibverbs is old, children lack every
    /// page that something is registered in: in a page of the heap that is other memory of the program as well, and
    /// they crash at it. Where nobody has called it, the device goes on with the page that the child keeps, once this
    /// process has written to its own.
    pub fn for_devices(bytes: usize) -> io::Result<Self> {
        let pages = Self::new(bytes)?;
        // SAFETY: advice about a mapping of our own. Without it the child has a copy, as of other memory.
        unsafe { libc::madvise(pages.at.as_ptr(), pages.bytes, libc::MADV_DONTFORK) };
        Ok(pages)
    }

    /// First byte.
    pub fn as_ptr(&self) -> NonNull<c_void> {
        self.at
    }

    /// First byte, as devices name it.
    pub fn address(&self) -> u64 {
        self.at.as_ptr() as u64
    }

    /// All of it that is whole words.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: mapped and zeroed by `new`, aligned to a page, and this object's until it is dropped.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr().cast(), self.bytes / 8) }
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `new` with this size; the owner has seen the last access.
        let _ = unsafe { munmap(self.at, self.bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    #[test]
    fn children_lack_what_devices_write() {
        let (usual, registered) = (Pages::new(16).unwrap(), Pages::for_devices(4097).unwrap());
        assert_eq!(registered.address() % 4096, 0);
        assert_eq!(registered.words().len(), 512);
        registered.words()[511].store(7, Ordering::Relaxed);
        // Whether a page is there, without touching it: `mincore` says ENOMEM where nothing is mapped.
        let is_mapped = |pages: &Pages| {
            let mut resident = [0; 2];
            // SAFETY: looks at the mapping only; one page of it is asked about, and a byte is written for that.
            unsafe { libc::mincore(pages.at.as_ptr(), 1, resident.as_mut_ptr()) == 0 }
        };
        assert!(is_mapped(&usual) && is_mapped(&registered));
        // SAFETY: the child makes two system calls and ends.
        let child = unsafe { libc::fork() };
        if child == 0 {
            let code = i32::from(is_mapped(&usual)) + 2 * i32::from(is_mapped(&registered));
            // SAFETY: plain call; nothing of the parent's is to be run.
            unsafe { libc::_exit(code) };
        }
        let mut status = -1;
        // SAFETY: a child of ours that nobody else waits for.
        assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
        assert_eq!(libc::WEXITSTATUS(status), 1);
        assert_eq!(registered.words()[511].load(Ordering::Relaxed), 7);
    }
}
