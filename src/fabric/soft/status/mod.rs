//! What a rank tells its peers on this host in memory that it alone can write: whether it lives, whether it sleeps,
//! which windows it has, and from or to which of theirs it copies right now.
//!
//! The file is sealed, so that peers can map it for reading alone: glibc and the kernel follow pointers beside the
//! words of mutexes, and a peer's stray write must not reach them. Peers get the file before they may ask anything of
//! the rank, and the rank gets theirs with their question.
//!
//! **Copies and windows.** A rank announces each copy by cross-memory attach before it looks whether the window is
//! still there; a rank that takes a window back says so before it looks at the announcements. One of the two sees the
//! other ([`Status::begin_copy`], [`Status::set_window`]: a full fence in each), so a copy that has begun is waited
//! for and no other begins. Kernels that store into a rank's GPU by themselves are told of in the same way
//! ([`gate`](super::gate)).

pub mod alive;
pub mod news;

use crate::error::{Error, Result};
use crate::sys::memfd::{create, seal_writing, sealed_len, Mapping};
use crate::sys::secret;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{fence, AtomicU64, Ordering};

const MAGIC: u64 = 0x6f78_7967_696e_5302;
const PAGE: usize = 4096;
/// Windows with numbers up to here can be reached by cross-memory attach; later ones go through the ring.
pub const WINDOW_BITS: usize = 1 << 15;
/// Copies of a rank to and from windows of one peer at the same time.
pub const COPIES: usize = 8;

/// A mutex of glibc's, which only its owner's process looks into.
type MutexBytes = [u64; 8];
const _: () = assert!(std::mem::size_of::<libc::pthread_mutex_t>() <= std::mem::size_of::<MutexBytes>());

/// The file. Only ever used through raw pointers: it changes while peers look at it.
#[repr(C, align(128))]
struct Page {
    magic: u64,
    nranks: u64,
    token: [u8; 16],
    _gap: [u64; 12],
    life: MutexBytes,
    _gap2: [u64; 8],
    /// Non-zero: nobody polls the inbox, wake its owner after writing, once while it stays this number.
    sleeping: u64,
    _gap3: [u64; 15],
    /// Non-zero: kernels of others may not begin to store into this rank's GPU by themselves.
    closed: u64,
    _gap4: [u64; 15],
    windows: [u64; WINDOW_BITS / 64],
    // Then: for each rank the copies to and from its windows, a cache line; then a word for each rank that is odd while
    // a kernel of this rank may store into that one's GPU by itself.
}

/// What one rank is told of copies: see [`what`].
#[repr(C, align(64))]
struct Row([u64; COPIES]);

fn bytes(nranks: usize) -> usize {
    let row = std::mem::size_of::<Row>() + std::mem::size_of::<u64>();
    (std::mem::size_of::<Page>() + nranks * row).next_multiple_of(PAGE)
}

/// Where the word of kernels that store into the GPU of `rank`, one of `nranks`, is.
///
/// # Safety
/// `page` is the start of a mapping for so many ranks, and `rank` is one of them.
unsafe fn entries_at(page: *mut Page, nranks: u32, rank: u32) -> *mut u64 {
    // SAFETY: the caller's promise.
    unsafe { page.add(1).cast::<Row>().add(nranks as usize).cast::<u64>().add(rank as usize) }
}

/// Where the word of a copy is.
///
/// # Safety
/// `page` is the start of a mapping for more than `rank` ranks; `place` is below [`COPIES`].
unsafe fn copy_at(page: *mut Page, rank: u32, place: usize) -> *mut u64 {
    debug_assert!(place < COPIES);
    // SAFETY: the caller's promise.
    unsafe { page.add(1).cast::<Row>().add(rank as usize).cast::<u64>().add(place) }
}

/// The word for a copy to or from a window, behind the `last` word in the same place; with `window` none: no copy. Each
/// word differs from the one before.
fn what(last: u64, window: Option<u32>) -> u64 {
    ((last >> 32) + 1) << 32 | window.map_or(0, |id| u64::from(id) + 1)
}

const _: () = assert!((WINDOW_BITS as u64) < 1 << 32);

/// This rank's own.
pub struct Status {
    fd: OwnedFd,
    page: Mapping,
    nranks: u32,
    /// How often it slept.
    sleeps: AtomicU64,
}

impl Status {
    /// A new file; `token` is this rank's secret, by which a peer knows that it was given the right one.
    pub fn create(nranks: usize, token: [u8; 16]) -> Result<Self> {
        let fd = create(bytes(nranks))?;
        let page = Mapping::new(fd.as_fd(), 0, bytes(nranks))?;
        // An old kernel leaves it at peers that ask for no writable mapping.
        if !seal_writing(fd.as_fd()) {
            log::info!("this kernel cannot seal shared memory against writing (Linux 5.1 can)");
        }
        let status = Self { fd, page, nranks: nranks as u32, sleeps: AtomicU64::new(0) };
        let p = status.at();
        // SAFETY: nobody else has the memory yet; it is zero, mapped and large enough.
        unsafe {
            (&raw mut (*p).magic).write(MAGIC);
            (&raw mut (*p).nranks).write(nranks as u64);
            (&raw mut (*p).token).write(token);
            alive::init((&raw mut (*p).life).cast())?;
        }
        Ok(status)
    }

    fn at(&self) -> *mut Page {
        self.page.ptr().cast()
    }

    fn word(&self, of: impl Fn(*mut Page) -> *mut u64) -> &AtomicU64 {
        // SAFETY: an aligned word of the mapping, which lives as long as `self`; this process writes it through atomics
        // alone, and no other can write it.
        unsafe { AtomicU64::from_ptr(of(self.at())) }
    }

    /// The file, for peers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Takes up life; the calling thread must end it with [`Status::release_life`].
    pub fn hold_life(&self) -> bool {
        // SAFETY: made in `create`, mapped as long as `self`.
        unsafe { alive::hold((&raw mut (*self.at()).life).cast()) }
    }

    /// Ends life in good order.
    pub fn release_life(&self) {
        // SAFETY: as above, called by the thread that holds it.
        unsafe { alive::release((&raw mut (*self.at()).life).cast()) }
    }

    fn sleeping(&self) -> &AtomicU64 {
        // SAFETY: a field of the mapping.
        self.word(|p| unsafe { &raw mut (*p).sleeping })
    }

    /// Says whether peers must wake this rank after writing. Looking for news afterwards sees everything written
    /// before a peer could see the flag.
    pub fn set_sleeping(&self, on: bool) {
        let number = if on { self.sleeps.fetch_add(1, Ordering::Relaxed) + 1 } else { 0 };
        news::sleep(self.sleeping(), number);
    }

    /// Whether peers are asked to wake this rank. `false`: what the caller left with `SeqCst` before is seen by
    /// whoever looks after `set_sleeping`.
    #[inline]
    pub fn is_sleeping(&self) -> bool {
        self.sleeping().load(Ordering::SeqCst) != 0
    }

    /// Tells peers whether window `id` exists. Copies that peers announce later do not take place if it does not; those
    /// announced before show in [`PeerStatus::announced`].
    pub fn set_window(&self, id: u32, exists: bool) {
        let at = id as usize / 64;
        if at >= WINDOW_BITS / 64 {
            return;
        }
        // SAFETY: the index was checked.
        let word = self.word(|p| unsafe { (&raw mut (*p).windows).cast::<u64>().add(at) });
        let bit = 1 << (id % 64);
        if exists {
            word.fetch_or(bit, Ordering::SeqCst);
        } else {
            word.fetch_and(!bit, Ordering::SeqCst);
        }
        fence(Ordering::SeqCst);
    }

    fn copy(&self, peer: u32, place: usize) -> &AtomicU64 {
        assert!(peer < self.nranks && place < COPIES);
        // SAFETY: as just checked.
        self.word(|p| unsafe { copy_at(p, peer, place) })
    }

    /// Whether this rank may have window `id`: of those beyond the bits nobody knows.
    #[inline]
    pub fn may_have(&self, id: u32) -> bool {
        let at = id as usize / 64;
        if at >= WINDOW_BITS / 64 {
            return true;
        }
        // SAFETY: the index was checked.
        let word = self.word(|p| unsafe { (&raw mut (*p).windows).cast::<u64>().add(at) });
        word.load(Ordering::Relaxed) >> (id % 64) & 1 != 0
    }

    /// Announces a copy to or from a window of `peer`; the `place`, below [`COPIES`], is the caller's until the
    /// copy's end. If the window is there afterwards, and the peer alive, the copy may begin: whoever takes the
    /// window back waits for [`Status::end_copy`].
    #[inline]
    pub fn begin_copy(&self, peer: u32, place: usize, window: u32) {
        let word = self.copy(peer, place);
        word.store(what(word.load(Ordering::Relaxed), Some(window)), Ordering::Relaxed);
        fence(Ordering::SeqCst);
    }

    /// Says whether kernels of others may begin to store into this rank's GPU by themselves. What they say afterwards
    /// shows in [`PeerStatus::entries`], or they see this.
    pub fn set_closed(&self, closed: bool) {
        // SAFETY: a field of the mapping.
        self.word(|p| unsafe { &raw mut (*p).closed }).store(closed.into(), Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    fn entries(&self, peer: u32) -> &AtomicU64 {
        assert!(peer < self.nranks);
        // SAFETY: as just checked.
        self.word(|p| unsafe { entries_at(p, self.nranks, peer) })
    }

    /// Says that a kernel of this rank is about to store into the GPU of `peer`. If that one is not
    /// [closed](PeerStatus::is_closed) afterwards it may; one thread at a time.
    pub fn enter(&self, peer: u32) {
        let word = self.entries(peer);
        word.store(word.load(Ordering::Relaxed) | 1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
    }

    /// It does not any more, or never did.
    pub fn leave(&self, peer: u32) {
        let word = self.entries(peer);
        word.store((word.load(Ordering::Relaxed) | 1) + 1, Ordering::Release);
    }

    /// The copy is over, or did not begin.
    #[inline]
    pub fn end_copy(&self, peer: u32, place: usize) {
        let word = self.copy(peer, place);
        word.store(what(word.load(Ordering::Relaxed), None), Ordering::Release);
    }
}

/// A peer's, mapped for reading alone.
pub struct PeerStatus {
    page: Mapping,
    nranks: u32,
}

/// A copy that a peer has announced to a rank.
#[derive(Clone, Copy, Debug)]
pub struct Announced {
    rank: u32,
    place: usize,
    what: u64,
}

impl PeerStatus {
    /// Maps what a peer sent, if it is what the peer's token promises.
    pub fn attach(fd: BorrowedFd<'_>, nranks: usize, token: &[u8; 16]) -> Result<Self> {
        if sealed_len(fd) != Some(bytes(nranks)) {
            return Err(Error::protocol("a peer's status has not the size that its communicator implies"));
        }
        let peer = Self { page: Mapping::read_only(fd, bytes(nranks))?, nranks: nranks as u32 };
        let p = peer.at();
        // SAFETY: inside the mapping; volatile, because another process may write it.
        let (magic, n, its) = unsafe {
            let token = (&raw const (*p).token).read_volatile();
            ((&raw const (*p).magic).read_volatile(), (&raw const (*p).nranks).read_volatile(), token)
        };
        if magic != MAGIC || n != nranks as u64 || !secret::same(&its, token) {
            return Err(Error::protocol("a peer's status is not one of this communicator"));
        }
        Ok(peer)
    }

    fn at(&self) -> *const Page {
        self.page.ptr().cast()
    }

    /// Whether the peer lives.
    #[inline]
    pub fn look(&self) -> alive::Liveness {
        // SAFETY: mapped; made by the peer.
        unsafe { alive::look((&raw const (*self.at()).life).cast()) }
    }

    /// Where the peer says which sleep it sleeps; 0: it is awake. For [`load`] while `self` lives.
    pub fn sleeping(&self) -> *const u64 {
        // SAFETY: a field of the mapping.
        unsafe { &raw const (*self.at()).sleeping }
    }

    /// Whether the peer has window `id`.
    #[inline]
    pub fn has_window(&self, id: u32) -> bool {
        let at = id as usize / 64;
        // SAFETY: inside the mapping, as just checked.
        at < WINDOW_BITS / 64
            && unsafe { load((&raw const (*self.at()).windows).cast::<u64>().add(at)) } >> (id % 64) & 1 != 0
    }

    /// Whether kernels may not begin to store into the peer's GPU by themselves.
    #[inline]
    pub fn is_closed(&self) -> bool {
        // SAFETY: a field of the mapping.
        unsafe { load(&raw const (*self.at()).closed) != 0 }
    }

    /// How often a kernel of the peer began to store into the GPU of rank `me`, and ended to: odd while it may.
    pub fn entries(&self, me: u32) -> u64 {
        assert!(me < self.nranks);
        // SAFETY: as just checked; read alone.
        unsafe { load(entries_at(self.at().cast_mut(), self.nranks, me)) }
    }

    fn copy(&self, rank: u32, place: usize) -> u64 {
        assert!(rank < self.nranks && place < COPIES);
        // SAFETY: as just checked; read alone.
        unsafe { load(copy_at(self.at().cast_mut(), rank, place)) }
    }

    /// The copies to or from window `id` of rank `me` that the peer has announced.
    pub fn announced(&self, me: u32, id: u32) -> impl Iterator<Item = Announced> + '_ {
        let all = (0..COPIES).map(move |place| Announced { rank: me, place, what: self.copy(me, place) });
        all.filter(move |a| a.what as u32 == what(0, Some(id)) as u32)
    }

    /// Whether such a copy is not over yet.
    pub fn goes_on(&self, announced: &Announced) -> bool {
        self.copy(announced.rank, announced.place) == announced.what
    }
}

/// A word that another process writes.
///
/// # Safety
/// `at` is aligned and mapped, for reading at least.
#[inline(always)]
pub unsafe fn load(at: *const u64) -> u64 {
    // SAFETY: the caller's promise; a relaxed load of eight bytes writes nothing.
    let word = unsafe { AtomicU64::from_ptr(at.cast_mut()) }.load(Ordering::Relaxed);
    fence(Ordering::Acquire);
    word
}

#[cfg(test)]
pub mod tests;
