//! The receiving end of a connection: a small staging buffer for headers and small frames; large payloads go past it.

use super::sock::{self, Moved};
use super::wire::{Frame, Malformed, HEADER};
use crate::fabric::soft::gpu::PinnedPools;
use std::io;
use std::os::fd::RawFd;

/// Staged bytes. Many small frames cost one system call; a large payload passes by, all but its first part.
const STAGE: usize = 128 * 1024;

// A small message for GPU memory is whole here before it gets a buffer.
const _: () = assert!(PinnedPools::SMALL as usize <= STAGE);

/// Staged behind a payload that is received directly: enough for the next header and small frames, little enough that
/// little of a next large payload has to be copied.
const BEHIND: usize = 2048;

/// Received and not yet consumed.
#[derive(Default)]
pub struct ReceiveBuffer {
    buf: Vec<u8>,
    head: usize,
    tail: usize,
}

/// What a receive brought.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Got {
    /// Bytes that went to the memory given.
    pub direct: usize,
    /// Bytes that went to the stage.
    pub staged: usize,
    /// The socket has nothing more for now.
    pub dry: bool,
    /// The peer sends no more.
    pub ended: bool,
}

impl ReceiveBuffer {
    /// What is staged.
    #[inline]
    pub fn staged(&self) -> &[u8] {
        &self.buf[self.head..self.tail]
    }

    /// Forgets the first `n` staged bytes.
    #[inline]
    pub fn consume(&mut self, n: usize) {
        self.head += n;
        debug_assert!(self.head <= self.tail);
        if self.head == self.tail {
            (self.head, self.tail) = (0, 0);
        }
    }

    /// The header at the front, if all of it is here.
    #[inline]
    pub fn header(&self) -> Option<Result<Frame, Malformed>> {
        self.staged().first_chunk::<HEADER>().map(Frame::parse)
    }

    /// Receives once: into `direct` (address and length) first, if given, then into the stage. The stage is empty when
    /// `direct` is given.
    ///
    /// # Safety
    /// `direct` names memory that may be overwritten during the call.
    pub unsafe fn fill(&mut self, fd: RawFd, direct: Option<(*mut u8, usize)>) -> io::Result<Got> {
        if self.buf.is_empty() {
            self.buf.resize(STAGE, 0);
        }
        if self.head > 0 {
            self.buf.copy_within(self.head..self.tail, 0);
            (self.head, self.tail) = (0, self.tail - self.head);
        }
        let (to, len) = direct.unwrap_or((std::ptr::null_mut(), 0));
        debug_assert!(direct.is_none() || self.tail == 0);
        let room = if direct.is_some() { BEHIND } else { STAGE - self.tail };
        let stage = libc::iovec { iov_base: self.buf[self.tail..].as_mut_ptr().cast(), iov_len: room };
        let past = libc::iovec { iov_base: to.cast(), iov_len: len };
        let io = [past, stage];
        // SAFETY: `past` is the caller's promise; `stage` lies inside `buf`.
        match unsafe { sock::receive(fd, if direct.is_some() { &io } else { &io[1..] }) }? {
            Moved::Bytes(n) => {
                let direct = n.min(len);
                self.tail += n - direct;
                // A short read emptied the socket; asking again would only tell us so.
                Ok(Got { direct, staged: n - direct, dry: n < len + room, ended: false })
            }
            Moved::Blocked => Ok(Got { direct: 0, staged: 0, dry: true, ended: false }),
            Moved::Ended => Ok(Got { direct: 0, staged: 0, dry: true, ended: true }),
        }
    }
}
