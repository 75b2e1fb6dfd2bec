//! A rank's inbox: the shared memory that its peers write into.
//!
//! Layout: a head (identity, which rings have news), then one ring a sender. The file is sparse: a ring that nobody
//! uses costs no memory. What a peer leaves here is looked at, never followed; what the rank itself has to say is in
//! its `status`, where peers cannot write.

use super::ring::{Consumer, Producer, POSITIONS};
use crate::error::{Error, Result};
use crate::fabric::soft::status::{alive, news, PeerStatus};
use crate::sys::memfd::{create, sealed_len, Mapping};
use crate::sys::secret;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::Arc;

const MAGIC: u64 = 0x6f78_7967_696e_0004;
const PAGE: usize = 4096;

/// The first bytes of the file, written before it is shared. Then: one bit a sender, "this ring has news".
#[repr(C, align(128))]
#[derive(Clone, Copy)]
struct Head {
    magic: u64,
    nranks: u64,
    ring_bytes: u64,
    token: [u8; 16],
    _gap: [u64; 11],
}

/// Sizes that follow from the number of ranks; alike on all of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layout {
    nranks: usize,
    /// Bytes of messages a ring holds.
    pub ring_bytes: usize,
}

impl Layout {
    /// The layout for a communicator. Rings shrink as ranks grow, so that an all-to-all does not fill the host.
    pub fn new(nranks: usize) -> Self {
        let ring_bytes = match nranks {
            0..=8 => 256 << 10,
            9..=256 => 64 << 10,
            _ => 16 << 10,
        };
        Self { nranks, ring_bytes }
    }

    fn head_bytes(self) -> usize {
        (std::mem::size_of::<Head>() + self.nranks.div_ceil(64) * 8).next_multiple_of(PAGE)
    }

    fn stride(self) -> usize {
        (POSITIONS + self.ring_bytes).next_multiple_of(PAGE)
    }

    fn total(self) -> usize {
        self.head_bytes() + self.nranks * self.stride()
    }
}

/// The head, mapped.
struct HeadRef(Mapping);

impl HeadRef {
    /// A copy: peers can write here.
    fn head(&self) -> Head {
        // SAFETY: the mapping starts with a Head, of which any bytes are one; volatile, because peers may write it.
        unsafe { self.0.ptr().cast::<Head>().read_volatile() }
    }

    fn news(&self, word: usize) -> &AtomicU64 {
        // SAFETY: the mapping has one word for each 64 ranks behind the head (Layout::head_bytes), and all who write
        // it do so atomically.
        unsafe { AtomicU64::from_ptr(self.0.ptr().add(std::mem::size_of::<Head>() + word * 8).cast()) }
    }
}

/// This rank's own inbox.
pub struct Inbox {
    fd: OwnedFd,
    head: HeadRef,
    rings: Mapping,
    layout: Layout,
}

impl Inbox {
    /// A new inbox; `token` is this rank's secret, by which a peer knows that it was given the right file.
    pub fn create(nranks: usize, token: [u8; 16]) -> Result<Self> {
        let layout = Layout::new(nranks);
        let fd = create(layout.total())?;
        let head = HeadRef(Mapping::new(fd.as_fd(), 0, layout.head_bytes())?);
        let first =
            Head { magic: MAGIC, nranks: nranks as u64, ring_bytes: layout.ring_bytes as u64, token, _gap: [0; 11] };
        // SAFETY: nobody else has the memory yet; it is zero, mapped and large enough.
        unsafe { head.0.ptr().cast::<Head>().write(first) };
        let rings = Mapping::new(fd.as_fd(), layout.head_bytes(), nranks * layout.stride())?;
        Ok(Self { fd, head, rings, layout })
    }

    /// The file, for peers.
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// The reading end of the ring of `sender`. Called once a sender.
    pub fn consumer(&self, sender: usize) -> Consumer {
        assert!(sender < self.layout.nranks);
        // SAFETY: the ring is inside the mapping, which the caller keeps beside the consumer.
        unsafe { Consumer::new(self.rings.ptr().add(sender * self.layout.stride()), self.layout.ring_bytes) }
    }

    /// The news bits of senders 64 × `word` and on. What they wrote before setting them is visible after.
    #[inline]
    pub fn news(&self, word: usize) -> u64 {
        self.head.news(word).load(Ordering::Acquire)
    }

    /// Puts one sender's news bit back: its ring is looked at without it.
    pub fn keep_news(&self, sender: usize) {
        self.head.news(sender / 64).fetch_or(1 << (sender % 64), Ordering::SeqCst);
    }

    /// Clears one sender's news bit; looking at its ring afterwards sees whatever it wrote without setting the bit.
    pub fn clear_news(&self, sender: usize) {
        news::clear(self.head.news(sender / 64), 1 << (sender % 64));
    }

    /// Words of news bits.
    pub fn news_words(&self) -> usize {
        self.layout.nranks.div_ceil(64)
    }
}

/// A peer's inbox, as this rank writes into it.
pub struct PeerInbox {
    head: HeadRef,
    _ring: Mapping,
    word: usize,
    bit: u64,
    producer: Producer,
    status: Arc<PeerStatus>,
    /// In `status`: spares `publish` a step.
    sleeping: *const u64,
    /// The sleep out of which this rank has woken the peer last.
    woken: u64,
}

// SAFETY: `sleeping` points into the status, which goes along and may be read by any thread.
unsafe impl Send for PeerInbox {}
// SAFETY: all shared state is atomic or owned by the producer, which is used through &mut only.
unsafe impl Sync for PeerInbox {}

/// What can be asked of a peer's inbox without owning its producer.
impl PeerInbox {
    /// Maps the inbox that a peer sent, as sender `me` of `nranks`, if it is what the peer's token promises. `status`
    /// is the same peer's.
    pub fn attach(
        fd: BorrowedFd<'_>,
        status: Arc<PeerStatus>,
        nranks: usize,
        me: usize,
        token: &[u8; 16],
    ) -> Result<Self> {
        let layout = Layout::new(nranks);
        if sealed_len(fd) != Some(layout.total()) || me >= nranks {
            return Err(Error::protocol("a peer's shared memory has not the size that its communicator implies"));
        }
        let head = HeadRef(Mapping::new(fd, 0, layout.head_bytes())?);
        let h = head.head();
        if h.magic != MAGIC
            || h.nranks != nranks as u64
            || h.ring_bytes != layout.ring_bytes as u64
            || !secret::same(&h.token, token)
        {
            return Err(Error::protocol("a peer's shared memory is not the inbox of this communicator"));
        }
        let ring = Mapping::new(fd, layout.head_bytes() + me * layout.stride(), layout.stride())?;
        // SAFETY: the mapping is kept beside the producer; this rank is the only sender `me` and attaches once.
        let producer = unsafe { Producer::new(ring.ptr(), layout.ring_bytes) };
        let sleeping = status.sleeping();
        Ok(Self { head, _ring: ring, word: me / 64, bit: 1 << (me % 64), producer, status, sleeping, woken: 0 })
    }

    /// The writing end of this rank's ring.
    #[inline]
    pub fn producer(&mut self) -> &mut Producer {
        &mut self.producer
    }

    /// Publishes what was pushed. Returns whether the peer must be woken: once out of each sleep.
    #[inline]
    pub fn publish(&mut self) -> bool {
        self.producer.publish();
        // SAFETY: in `status`, which this keeps mapped; only ever loaded.
        let sleeping = unsafe { AtomicU64::from_ptr(self.sleeping.cast_mut()) };
        // Either the peer sees the message, or we see that it has taken the news bit or gone to sleep.
        let sleep = news::announce(self.head.news(self.word), self.bit, sleeping);
        sleep != 0 && std::mem::replace(&mut self.woken, sleep) != sleep
    }

    /// Whether the peer still has window `id`.
    #[inline]
    pub fn has_window(&self, id: u32) -> bool {
        self.status.has_window(id)
    }

    /// Whether the peer lives.
    pub fn look(&self) -> alive::Liveness {
        self.status.look()
    }
}

#[cfg(test)]
mod tests {
    use super::super::message::{Header, MessageKind};
    use super::*;
    use crate::fabric::soft::status::Status;

    #[test]
    fn a_message_arrives_with_news() {
        let (inbox, status) = (Inbox::create(3, [7; 16]).unwrap(), Status::create(3, [7; 16]).unwrap());
        let its = Arc::new(PeerStatus::attach(status.fd(), 3, &[7; 16]).unwrap());
        let mut peer = PeerInbox::attach(inbox.fd(), its.clone(), 3, 2, &[7; 16]).unwrap();
        assert!(PeerInbox::attach(inbox.fd(), its.clone(), 3, 2, &[8; 16]).is_err());
        assert!(PeerInbox::attach(inbox.fd(), its, 4, 2, &[7; 16]).is_err());
        let mut consumer = inbox.consumer(2);
        assert_eq!(inbox.news(0), 0);
        let h = Header { kind: MessageKind::Put, len: 3, key: 1, aux: 0, addr: 0 };
        // SAFETY: three bytes.
        assert!(unsafe { peer.producer().push(h, b"abc".as_ptr()) });
        assert!(!peer.publish());
        assert_eq!(inbox.news(0), 1 << 2);
        inbox.clear_news(2);
        assert_eq!(inbox.news(0), 0);
        let head = consumer.head();
        assert_eq!(consumer.peek(head).unwrap().unwrap().header, h);
        for _ in 0..2 {
            status.set_sleeping(true);
            assert_eq!([peer.publish(), peer.publish()], [true, false], "once a sleep");
            status.set_sleeping(false);
            assert!(!peer.publish());
        }
        assert!(!peer.has_window(5));
        status.set_window(5, true);
        assert!(peer.has_window(5));
    }
}
