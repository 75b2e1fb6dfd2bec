//! Registered memory.

use super::objects::{made, Pd};
use super::types::*;
use std::ffi::c_int;
use std::io;
use std::os::fd::RawFd;
use std::ptr::NonNull;
use std::sync::Arc;

/// What may be done with a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Access {
    /// Peers may add to its words.
    pub atomic: bool,
    /// Writes may pass each other on their way to memory.
    pub relaxed: bool,
}

impl Access {
    pub(crate) fn flags(self) -> u32 {
        IBV_ACCESS_LOCAL_WRITE
            | IBV_ACCESS_REMOTE_WRITE
            | IBV_ACCESS_REMOTE_READ
            | if self.atomic { IBV_ACCESS_REMOTE_ATOMIC } else { 0 }
            | if self.relaxed { IBV_ACCESS_RELAXED_ORDERING } else { 0 }
    }
}

/// A registered region.
pub struct Mr {
    pd: Arc<Pd>,
    at: NonNull<ibv_mr>,
}

// SAFETY: libibverbs objects may be used from any thread.
unsafe impl Send for Mr {}
// SAFETY: as for Context.
unsafe impl Sync for Mr {}

impl Mr {
    /// Registers `len` bytes at `base` for local and remote access.
    ///
    /// # Safety
    /// The memory stays mapped while the region lives: the device and, through it, peers read and write it.
    pub unsafe fn register(pd: &Arc<Pd>, base: u64, len: usize, access: Access) -> io::Result<Self> {
        let verbs = &pd.context().verbs();
        let flags = access.flags();
        let at = match (access.relaxed, verbs.reg_mr_iova2) {
            // SAFETY: the domain is live; the caller vouches for the memory.
            (true, Some(register)) => unsafe { register(pd.as_ptr(), base as *mut _, len, base, flags) },
            _ => {
                let flags = flags & !IBV_ACCESS_RELAXED_ORDERING;
                // SAFETY: as above.
                unsafe { (verbs.reg_mr)(pd.as_ptr(), base as *mut _, len, flags as c_int) }
            }
        };
        Ok(Self { pd: pd.clone(), at: made(at)? })
    }

    /// Registers `len` bytes at `base`, which peers and work requests name from `iova` on; both have the same offset in
    /// a page.
    ///
    /// # Safety
    /// As for [`Mr::register`].
    pub unsafe fn register_at(pd: &Arc<Pd>, base: u64, iova: u64, len: usize, access: Access) -> io::Result<Self> {
        let Some(register) = pd.context().verbs().reg_mr_iova2 else {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        };
        // SAFETY: the domain is live; the caller vouches for the memory.
        let at = unsafe { register(pd.as_ptr(), base as *mut _, len, iova, access.flags()) };
        Ok(Self { pd: pd.clone(), at: made(at)? })
    }

    /// Owns one that another library registered.
    ///
    /// # Safety
    /// It is of `pd`, live, nobody else's, and ended as those of libibverbs are.
    pub(crate) unsafe fn from_raw(pd: &Arc<Pd>, at: NonNull<ibv_mr>) -> Self {
        Self { pd: pd.clone(), at }
    }

    /// Registers `len` bytes at `offset` of a DMA-BUF; peers and work requests name them from `base` on. The
    /// descriptor is needed during the call only.
    pub fn register_dmabuf(
        pd: &Arc<Pd>,
        fd: RawFd,
        offset: u64,
        base: u64,
        len: usize,
        access: Access,
    ) -> io::Result<Self> {
        let Some(register) = pd.context().verbs().reg_dmabuf_mr else {
            return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
        };
        // SAFETY: the domain is live; the kernel checks descriptor and range.
        let at = unsafe { register(pd.as_ptr(), offset, len, base, fd, access.flags() as c_int) };
        Ok(Self { pd: pd.clone(), at: made(at)? })
    }

    /// Local key.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { self.at.as_ref() }.lkey
    }

    /// Remote key.
    pub fn rkey(&self) -> u32 {
        // SAFETY: the region is live.
        unsafe { self.at.as_ref() }.rkey
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: ended once.
        unsafe { (self.pd.context().verbs().dereg_mr)(self.at.as_ptr()) };
    }
}
