//! The sending end of a connection: headers and small payloads copied to a stage, large payloads borrowed.

use super::sock::{self, Moved};
use crate::fabric::soft::gpu::PinnedBuffer;
use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;

/// Most bytes staged.
pub const STAGE: usize = 256 * 1024;

/// Vectors a system call: enough that one carries a stage full of mixed traffic.
const VECTORS: usize = 64;

/// Which operation a borrowed payload belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FrameOwner {
    /// Lane, by index.
    pub lane: u32,
    /// Its number among the lane's operations.
    pub operation: u64,
}

/// Some staged bytes and, behind them, a borrowed payload (`len` 0: none).
struct Segment {
    staged: usize,
    addr: u64,
    len: usize,
    owner: FrameOwner,
    /// The pinned memory that `addr` is in, if it comes from a GPU.
    buffer: Option<PinnedBuffer>,
}

/// Bytes on their way to the kernel, in order.
#[derive(Default)]
pub struct SendBuffer {
    stage: Vec<u8>,
    head: usize,
    segments: VecDeque<Segment>,
    borrowed: usize,
}

impl FrameOwner {
    /// No operation, or none any more.
    pub const NOBODY: Self = Self { lane: u32::MAX, operation: 0 };
}

impl SendBuffer {
    /// Nothing to send.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.segments.is_empty()
    }

    /// Bytes staged.
    #[inline]
    pub fn staged(&self) -> usize {
        self.stage.len() - self.head
    }

    /// Bytes borrowed.
    #[inline]
    pub fn borrowed(&self) -> usize {
        self.borrowed
    }

    /// Whether `n` more bytes may be staged.
    #[inline]
    pub fn has_room(&self, n: usize) -> bool {
        self.staged() + n <= STAGE
    }

    #[inline]
    fn grow(&mut self, n: usize) {
        if self.head > STAGE {
            self.stage.drain(..self.head);
            self.head = 0;
        }
        match self.segments.back_mut() {
            Some(s) if s.len == 0 => s.staged += n,
            _ => {
                self.segments.push_back(Segment { staged: n, addr: 0, len: 0, owner: FrameOwner::NOBODY, buffer: None })
            }
        }
    }

    /// Stages `bytes`.
    #[inline]
    pub fn copy(&mut self, bytes: &[u8]) {
        self.grow(bytes.len());
        self.stage.extend_from_slice(bytes);
    }

    /// Stages `len` bytes at `addr`.
    ///
    /// # Safety
    /// They are readable.
    #[inline]
    pub unsafe fn copy_from(&mut self, addr: u64, len: usize) {
        if len == 0 {
            return;
        }
        self.grow(len);
        self.stage.reserve(len);
        let at = self.stage.len();
        // SAFETY: the source is the caller's promise; `reserve` made room for `len` bytes behind `at`, and a Vec of our
        // own does not overlap the caller's memory. A raw copy, not a slice: peers may write the source meanwhile.
        unsafe {
            std::ptr::copy_nonoverlapping(addr as *const u8, self.stage.as_mut_ptr().add(at), len);
            self.stage.set_len(at + len);
        }
    }

    /// Sends `len` bytes at `addr` from where they are; `owner` learns when they are gone. `buffer` goes with them.
    #[inline]
    pub fn borrow(&mut self, addr: u64, len: usize, owner: FrameOwner, buffer: Option<PinnedBuffer>) {
        debug_assert!(len > 0);
        self.borrowed += len;
        match self.segments.back_mut() {
            Some(s) if s.len == 0 => (s.addr, s.len, s.owner, s.buffer) = (addr, len, owner, buffer),
            _ => self.segments.push_back(Segment { staged: 0, addr, len, owner, buffer }),
        }
    }

    /// Sends once. `gone` is told of every borrowed payload that the kernel has taken whole. Returns whether everything
    /// the call offered was taken, that is, whether it is worth calling again; `None` if there was nothing to do.
    ///
    /// # Safety
    /// Borrowed memory is still the operation's (unmapped memory is an error, not a fault).
    pub unsafe fn send(&mut self, fd: RawFd, mut gone: impl FnMut(FrameOwner)) -> io::Result<Option<bool>> {
        if self.segments.is_empty() {
            return Ok(None);
        }
        let mut io = [libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 }; VECTORS];
        let (mut n, mut at, mut offered) = (0, self.head, 0);
        for s in &self.segments {
            if n + 2 > VECTORS {
                break;
            }
            if s.staged > 0 {
                io[n] = libc::iovec { iov_base: self.stage[at..].as_ptr().cast_mut().cast(), iov_len: s.staged };
                at += s.staged;
                n += 1;
            }
            if s.len > 0 {
                io[n] = libc::iovec { iov_base: s.addr as *mut libc::c_void, iov_len: s.len };
                n += 1;
            }
            offered += s.staged + s.len;
        }
        // SAFETY: staged parts lie in `stage`, which is not touched meanwhile; borrowed ones are the caller's promise.
        let sent = match unsafe { sock::send(fd, &io[..n]) }? {
            Moved::Bytes(n) => n,
            _ => return Ok(Some(false)),
        };
        self.sent(sent, &mut gone);
        Ok(Some(sent == offered))
    }

    fn sent(&mut self, mut n: usize, gone: &mut impl FnMut(FrameOwner)) {
        while n > 0 {
            let Some(s) = self.segments.front_mut() else { break };
            let staged = n.min(s.staged);
            s.staged -= staged;
            self.head += staged;
            n -= staged;
            let taken = n.min(s.len);
            s.addr += taken as u64;
            s.len -= taken;
            self.borrowed -= taken;
            n -= taken;
            if s.staged > 0 || s.len > 0 {
                break;
            }
            let owner = s.owner;
            self.segments.pop_front();
            if owner != FrameOwner::NOBODY {
                gone(owner);
            }
        }
        if self.head == self.stage.len() {
            self.stage.clear();
            self.head = 0;
        }
    }

    /// Whether a frame has begun whose payload is still borrowed.
    pub fn is_lending(&self) -> bool {
        self.borrowed > 0
    }

    /// Copies what is still borrowed of the operations that `is_gone` names, so that the frames begun can be finished
    /// after these are given up. What pinned memory has of them is sent from there. Of what is not there any more
    /// zeros are sent: nobody waits for it.
    ///
    /// # Safety
    /// Memory borrowed from them that `is_there` is readable.
    pub unsafe fn take_over_from(
        &mut self,
        is_gone: impl Fn(FrameOwner) -> bool,
        is_there: impl Fn(u64, usize) -> bool,
    ) {
        let mut any = false;
        for s in self.segments.iter_mut().filter(|s| s.len > 0 && is_gone(s.owner)) {
            any |= s.buffer.is_none();
            s.owner = FrameOwner::NOBODY;
        }
        if any {
            // SAFETY: the caller's promise.
            unsafe { self.rebuild(|s| s.owner == FrameOwner::NOBODY && s.buffer.is_none(), is_there) };
        }
    }

    /// Copies what is nobody's any more and in pinned memory, which others may use from then on. Returns whether there
    /// was any.
    pub fn give_buffers_back(&mut self) -> bool {
        let is_copied = |s: &Segment| s.buffer.is_some() && s.owner == FrameOwner::NOBODY;
        let any = self.segments.iter().any(is_copied);
        if any {
            // SAFETY: a segment keeps its buffer until its bytes are copied.
            unsafe { self.rebuild(is_copied, |_, _| true) };
        }
        any
    }

    /// Copies the payloads that `is_copied` names.
    ///
    /// # Safety
    /// Those that are there are readable.
    unsafe fn rebuild(&mut self, is_copied: impl Fn(&Segment) -> bool, is_there: impl Fn(u64, usize) -> bool) {
        let mut own = SendBuffer::default();
        let mut at = self.head;
        for s in std::mem::take(&mut self.segments) {
            own.copy(&self.stage[at..at + s.staged]);
            at += s.staged;
            if is_copied(&s) && s.len > 0 && !is_there(s.addr, s.len) {
                own.copy(&vec![0; s.len]);
            } else if is_copied(&s) {
                // SAFETY: the caller's promise.
                unsafe { own.copy_from(s.addr, s.len) };
            } else if s.len > 0 {
                own.borrow(s.addr, s.len, s.owner, s.buffer);
            }
        }
        *self = own;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;
    use std::os::fd::AsRawFd;
    use std::os::unix::net::UnixStream;

    #[test]
    fn bytes_leave_in_order_and_owners_learn_of_it() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let large = vec![7u8; 1000];
        let mut o = SendBuffer::default();
        let (first, second) = (FrameOwner { lane: 1, operation: 5 }, FrameOwner { lane: 2, operation: 6 });
        o.copy(b"head");
        o.borrow(large.as_ptr() as u64, large.len(), first, None);
        o.borrow(large.as_ptr() as u64, 10, second, None);
        o.copy(b"tail");
        let mut gone = Vec::new();
        // SAFETY: `large` is alive.
        assert_eq!(unsafe { o.send(a.as_raw_fd(), |x| gone.push(x)) }.unwrap(), Some(true));
        assert_eq!(gone, [first, second]);
        assert!(o.is_empty() && o.borrowed() == 0 && o.staged() == 0);
        drop(a);
        let mut all = Vec::new();
        b.read_to_end(&mut all).unwrap();
        assert_eq!(all, [b"head", &large[..], &large[..10], b"tail"].concat());
    }

    #[test]
    fn a_taken_over_send_buffer_needs_no_memory_of_others() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let mut large = vec![7u8; 1000];
        let mut o = SendBuffer::default();
        o.copy(b"head");
        o.borrow(large.as_ptr() as u64, large.len(), FrameOwner { lane: 1, operation: 5 }, None);
        o.copy(b"tail");
        // SAFETY: `large` is alive.
        unsafe { o.take_over_from(|_| true, |_, _| true) };
        large.fill(8);
        assert!(!o.is_lending());
        // SAFETY: nothing is borrowed.
        unsafe { o.send(a.as_raw_fd(), |_| panic!("nobody owns it")) }.unwrap();
        drop(a);
        let mut all = Vec::new();
        b.read_to_end(&mut all).unwrap();
        assert_eq!(all, [&b"head"[..], &[7; 1000], b"tail"].concat());
    }

    #[test]
    fn what_others_lend_is_sent_from_where_it_is() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let (mut gone, mut stays) = (vec![7u8; 1000], vec![7u8; 1000]);
        let mut o = SendBuffer::default();
        let owner = FrameOwner { lane: 2, operation: 6 };
        o.copy(b"head");
        o.borrow(gone.as_ptr() as u64, 1000, FrameOwner { lane: 1, operation: 5 }, None);
        o.borrow(stays.as_ptr() as u64, 1000, owner, None);
        o.borrow(gone.as_ptr() as u64, 10, FrameOwner { lane: 1, operation: 5 }, None);
        o.copy(b"tail");
        // SAFETY: `gone` is alive.
        unsafe { o.take_over_from(|o| o.lane == 1, |_, _| true) };
        gone.fill(8);
        stays.fill(9);
        assert_eq!((o.borrowed(), o.staged()), (1000, 1018));
        let mut told = Vec::new();
        // SAFETY: `stays` is alive.
        unsafe { o.send(a.as_raw_fd(), |x| told.push(x)) }.unwrap();
        assert_eq!(told, [owner]);
        drop(a);
        let mut all = Vec::new();
        b.read_to_end(&mut all).unwrap();
        assert_eq!(all, [&b"head"[..], &[7; 1000], &[9; 1000], &[7; 10], b"tail"].concat());
    }

    #[test]
    fn of_what_is_not_there_any_more_zeros_are_sent() {
        let (a, mut b) = UnixStream::pair().unwrap();
        let mut o = SendBuffer::default();
        o.copy(b"head");
        o.borrow(0x10, 100, FrameOwner { lane: 1, operation: 5 }, None);
        o.copy(b"tail");
        // SAFETY: nothing is there.
        unsafe { o.take_over_from(|_| true, |addr, len| (addr, len) != (0x10, 100)) };
        // SAFETY: nothing is borrowed.
        unsafe { o.send(a.as_raw_fd(), |_| panic!("nobody owns it")) }.unwrap();
        drop(a);
        let mut all = Vec::new();
        b.read_to_end(&mut all).unwrap();
        assert_eq!(all, [&b"head"[..], &[0; 100], b"tail"].concat());
    }
}
