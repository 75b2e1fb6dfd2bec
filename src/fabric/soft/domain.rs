//! What everybody on this rank shares who moves bytes for one communicator: callers, and the helper thread. It knows
//! the transports, and nobody who uses them.

use super::gate::Gate;
use super::gpu::{self, Engine, Received};
use super::hello::SoftHello;
use super::ipc::Share;
use super::peer::contact::Contact;
use super::peer::neighbours::Neighbours;
use super::shm::inbox::Inbox;
use super::status::Status;
use super::tcp::Tcp;
use crate::config::{Config, SoftTransport};
use crate::error::Result;
use crate::fabric::World;
use crate::memory::registry::{Extent, Registry};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::Instant;

/// One communicator's moving parts on this rank, but for the links to its peers.
pub struct Domain {
    /// This rank among all.
    pub world: World,
    /// The environment.
    pub config: Arc<Config>,
    /// What peers may touch.
    pub registry: Arc<Registry>,
    /// How to reach each rank.
    pub hellos: Box<[SoftHello]>,
    /// The socket for finding each other on one host.
    pub contact: Contact,
    /// Where peers on this host write.
    pub inbox: Inbox,
    /// What they read of this rank.
    pub status: Arc<Status>,
    /// What this rank reads of them.
    pub neighbours: Arc<Neighbours>,
    /// This rank's GPU.
    pub engine: Arc<Engine>,
    /// What other processes put there.
    pub received: Arc<Received>,
    /// Windows there that processes of this host share.
    pub share: Share,
    tcp: Tcp,
    tcp_in_use: AtomicBool,
    /// Links with something that waits: one bit each.
    pub(super) pending: Box<[AtomicU64]>,
    /// Peers that sleep and could not be woken: one bit each.
    unwoken: Box<[AtomicU64]>,
    /// Polls without a find since somebody posted.
    pub(super) idle: AtomicU32,
    stop: AtomicBool,
    stirred: EventFd,
    /// The helper thread is to stand, and stands.
    #[cfg(test)]
    pub(super) stands: [AtomicBool; 2],
}

impl Domain {
    /// Everything in place, nothing moving yet.
    pub fn new(
        world: World,
        config: Arc<Config>,
        registry: Arc<Registry>,
        hellos: Vec<SoftHello>,
        contact: Contact,
        tcp: Tcp,
    ) -> Result<Self> {
        let n = world.nranks as usize;
        let token = hellos[world.rank as usize].token;
        let (inbox, status) = (Inbox::create(n, token)?, Arc::new(Status::create(n, token)?));
        let neighbours = Arc::new(Neighbours::new(n));
        let gate = Gate::new(world.rank, Some((status.clone(), neighbours.clone())));
        let engine = Engine::behind(gate, world.rank, token, registry.clone(), &config);
        let received = Arc::new(Received::new(n));
        tcp.gpu().set_engine(engine.clone(), received.clone());
        let stirred = EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)
            .map_err(|e| crate::error::Error::system(format!("eventfd failed: {e}")))?;
        Ok(Self {
            received,
            share: Share::new(&config, n),
            world,
            config,
            registry,
            hellos: hellos.into(),
            contact,
            inbox,
            status,
            neighbours,
            engine,
            tcp,
            tcp_in_use: AtomicBool::new(false),
            pending: (0..n.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            unwoken: (0..n.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            idle: AtomicU32::new(0),
            stop: AtomicBool::new(false),
            stirred,
            #[cfg(test)]
            stands: Default::default(),
        })
    }

    /// The transport to other hosts.
    pub fn tcp(&self) -> &Tcp {
        &self.tcp
    }

    /// Until when somebody who goes waits for this rank's GPU, with time until `end`: one that stands is waited for
    /// once, from the first who asks on.
    pub fn wait_by(&self, end: Instant) -> Instant {
        self.engine.wait_by(end).min(self.tcp.gpu().wait_by(end))
    }

    /// From here on, polling looks at TCP as well.
    pub fn tcp_active(&self) {
        self.tcp_in_use.store(true, Ordering::Release);
    }

    /// Whether TCP is in use.
    pub fn is_tcp_active(&self) -> bool {
        self.tcp_in_use.load(Ordering::Acquire)
    }

    /// Wakes a rank that sleeps; if that cannot be now, by [`Domain::wake_left`].
    #[cold]
    pub fn wake(&self, peer: u32) {
        let hello = &self.hellos[peer as usize];
        if !self.contact.wake(&hello.contact, &hello.token, self.world.rank) {
            self.unwoken[peer as usize / 64].fetch_or(1 << (peer % 64), Ordering::SeqCst);
            // Whoever sleeps now has no reason to look.
            self.stir();
        }
    }

    /// Wakes those that could not be woken before.
    pub fn wake_left(&self) {
        for (at, word) in self.unwoken.iter().enumerate().filter(|(_, word)| word.load(Ordering::Relaxed) != 0) {
            let mut bits = word.swap(0, Ordering::SeqCst);
            while bits != 0 {
                self.wake((at * 64) as u32 + bits.trailing_zeros());
                bits &= bits - 1;
            }
        }
    }

    /// Asks a rank for its inbox. Results as for [`Contact::ask`].
    pub fn ask(&self, peer: u32) -> nix::Result<bool> {
        let hello = &self.hellos[peer as usize];
        self.contact.ask(&hello.contact, &hello.token, self.world.rank, self.status.fd())
    }

    /// Lets peers on other hosts, and operations to them, touch a GPU window. Nothing is set up where all ranks are
    /// in this process.
    pub fn add_gpu_window(&self, id: u32, extent: Extent) -> Result<()> {
        let forced = self.config.soft_transport == SoftTransport::Tcp && self.world.nranks > 1;
        if !forced && self.hellos.iter().all(|h| gpu::of_token(&h.token).is_some()) {
            return Ok(());
        }
        self.tcp.gpu().add_window(id, extent, self.tcp.bulk_conns(self.world.nranks))
    }

    /// Something waits on a link.
    pub fn mark_pending(&self, peer: u32) {
        self.pending[peer as usize / 64].fetch_or(1 << (peer % 64), Ordering::SeqCst);
    }

    /// Whether anything waits on any link, or is on its way into GPU memory, or to or from it over TCP, or a peer is to
    /// be woken: nothing would wake whoever sleeps now.
    pub fn has_pending(&self) -> bool {
        let waits = |w: &AtomicU64| w.load(Ordering::Relaxed) != 0;
        self.received.is_busy() || self.tcp.is_staging() || self.pending.iter().chain(&self.unwoken).any(waits)
    }

    /// A caller posts: polling without a find is not idling then, and must not slow down (`rest`). A sender whose peer
    /// sends nothing back finds nothing in any of its polls.
    #[inline(always)]
    pub fn keep_busy(&self) {
        self.idle.store(0, Ordering::Relaxed);
    }

    /// Wakes the helper thread, if it sleeps or is about to. What it is to find was left with `SeqCst`.
    #[inline]
    pub fn stir(&self) {
        if self.status.is_sleeping() {
            self.status.set_sleeping(false);
            let _ = self.stirred.arm();
        }
    }

    /// What the helper thread sleeps on, for stirring.
    pub fn stirred_fd(&self) -> BorrowedFd<'_> {
        self.stirred.as_fd()
    }

    /// Forgets past stirring.
    pub fn calm(&self) {
        let mut count = [0u8; 8];
        let _ = nix::unistd::read(std::os::fd::AsRawFd::as_raw_fd(&self.stirred.as_fd()), &mut count);
    }

    /// Asks the helper thread to end.
    pub fn request_stop(&self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = self.stirred.arm();
    }

    /// Whether it shall end.
    pub fn is_stopping(&self) -> bool {
        self.stop.load(Ordering::SeqCst)
    }
}
