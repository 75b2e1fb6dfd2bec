//! What everybody on this rank shares who moves bytes for one communicator: callers, and the helper thread.

use super::gpu::share::Share;
use super::gpu::{self, Engine, Received};
use super::hello::SoftHello;
use super::lane::Health;
use super::link::Link;
use super::local::contact::{Contact, Event};
use super::local::inbox::Inbox;
use super::local::status::Status;
use super::neighbours::Neighbours;
use super::receive::Receiver;
use super::tcp::{PeerInfo, Tcp};
use crate::config::{Config, SoftTransport};
use crate::error::Result;
use crate::fabric::World;
use crate::memory::registry::{Extent, Registry};
use crate::sync::Mutex;
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Between two looks at whether peers on this host live.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// Polls between two looks at the clock.
const CLOCK_EVERY: u64 = 256;

/// Polls without a find before polling slows down: some 20 µs, longer than any answer that is already on its way.
const IDLE_POLLS: u32 = 1000;
/// How much it slows down then; a PAUSE is up to 140 cycles.
const IDLE_PAUSES: u32 = 8;

/// Of a caller's polls while the helper thread works beside it, one in so many does anything: should that thread not get its
/// core, all goes on all the same.
const BESIDE_EVERY: u64 = 8;
/// Operations for this rank's GPU that arrive from other processes in a millisecond, from which on the helper thread works beside
/// the callers: more than a ping-pong brings, which one thread does sooner, and fewer than barriers or floods do.
const THICK: u64 = 100;
/// Cores that each rank of this host must have for its helper thread to work beside its callers: the application's thread and
/// NCCL's have theirs.
const CORES_BESIDE: usize = 3;

/// One communicator's moving parts on this rank.
pub struct Shared {
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
    pub status: Status,
    /// What this rank reads of them.
    pub neighbours: Neighbours,
    /// This rank's GPU.
    pub engine: Arc<Engine>,
    /// What other processes put there.
    pub received: Arc<Received>,
    /// Windows there that processes of this host share.
    pub share: Share,
    links: Box<[Link]>,
    receiver: Mutex<Receiver>,
    tcp: Tcp,
    tcp_in_use: AtomicBool,
    /// Links with something that waits: one bit each.
    pending: Box<[AtomicU64]>,
    polls: AtomicU64,
    /// The helper thread works beside the callers.
    is_beside: AtomicBool,
    /// Arrivals in a millisecond that call for it; `None`: it never comes.
    thick: Option<u64>,
    idle: AtomicU32,
    looked: Mutex<Instant>,
    attached: AtomicUsize,
    stop: AtomicBool,
    stirred: EventFd,
}

/// Whether this machine has cores for one more busy thread of each rank on it.
fn has_cores_beside(hellos: &[SoftHello], rank: u32) -> bool {
    let own = &hellos[rank as usize];
    let here = hellos.iter().filter(|h| h.is_on_host_of(own)).count();
    std::thread::available_parallelism().is_ok_and(|cores| cores.get() >= CORES_BESIDE * here.max(1))
}

impl Shared {
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
        let (inbox, status) = (Inbox::create(n, token)?, Status::create(n, token)?);
        let thick = match config.gpu_issue.helper {
            0 => None,
            1 => has_cores_beside(&hellos, world.rank).then_some(THICK),
            _ => Some(0),
        };
        let engine = Engine::new(world.rank, token, registry.clone(), config.gpu_issue);
        let health: Vec<_> = (0..n).map(|_| Arc::new(Health::default())).collect();
        let peers = hellos
            .iter()
            .zip(&health)
            .map(|(h, health)| PeerInfo { addresses: h.tcp.clone(), token: h.token, health: health.clone() })
            .collect();
        let links: Box<[Link]> = health.into_iter().enumerate().map(|(r, h)| Link::new(r as u32, h)).collect();
        let received = Arc::new(Received::new(&links));
        tcp.gpu().set_engine(engine.clone(), received.clone());
        tcp.join(world, peers)?;
        let receiver = Mutex::new(Receiver::new(&inbox, n));
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
            neighbours: Neighbours::new(n),
            engine,
            links,
            receiver,
            tcp,
            tcp_in_use: AtomicBool::new(false),
            pending: (0..n.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            polls: AtomicU64::new(0),
            is_beside: AtomicBool::new(false),
            thick,
            idle: AtomicU32::new(0),
            looked: Mutex::new(Instant::now()),
            attached: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            stirred,
        })
    }

    /// The link to a rank.
    #[inline(always)]
    pub fn link(&self, peer: u32) -> &Link {
        &self.links[peer as usize]
    }

    /// The link to a rank whose number came from outside.
    pub fn links(&self) -> &[Link] {
        &self.links
    }

    /// The transport to other hosts.
    pub fn tcp(&self) -> &Tcp {
        &self.tcp
    }

    /// From here on, polling looks at TCP as well.
    pub fn tcp_active(&self) {
        self.tcp_in_use.store(true, Ordering::Release);
    }

    /// Whether TCP is in use.
    pub fn is_tcp_active(&self) -> bool {
        self.tcp_in_use.load(Ordering::Acquire)
    }

    /// Wakes a rank that sleeps.
    #[cold]
    pub fn wake(&self, peer: u32) {
        let hello = &self.hellos[peer as usize];
        self.contact.wake(&hello.contact, &hello.token, self.world.rank);
    }

    /// Asks a rank for its inbox. Results as for [`Contact::ask`].
    pub fn ask(&self, peer: u32) -> nix::Result<bool> {
        let hello = &self.hellos[peer as usize];
        self.contact.ask(&hello.contact, &hello.token, self.world.rank, self.status.fd())
    }

    /// Lets peers on other hosts, and operations to them, touch a GPU window. Nothing is set up where all ranks are in this
    /// process.
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

    /// Whether anything waits on any link, or is on its way into GPU memory, or to or from it over TCP: nothing would wake
    /// whoever sleeps now.
    pub fn has_pending(&self) -> bool {
        let waits = |w: &AtomicU64| w.load(Ordering::Relaxed) != 0;
        self.received.is_busy() || self.tcp.is_staging() || self.pending.iter().any(waits)
    }

    /// How often anybody polled: the helper thread stays out of the way while this grows.
    pub fn polls(&self) -> u64 {
        self.polls.load(Ordering::Relaxed)
    }

    /// Lets everything advance: what arrived, what waits, the other hosts. Returns whether anything moved.
    #[inline]
    pub fn poll(&self) -> bool {
        let n = self.polls.fetch_add(1, Ordering::SeqCst) + 1;
        if self.is_beside.load(Ordering::SeqCst) && n % BESIDE_EVERY != 0 {
            return false;
        }
        let mut moved = self.step();
        if self.is_tcp_active() {
            moved |= self.tcp.progress();
        }
        // Last: this may have begun what somebody has to finish, and this may have been the caller's last poll. Either we
        // see that the helper thread goes to bed, or it sees that there was a poll.
        self.stir();
        if n % CLOCK_EVERY == 0 {
            self.look_at_peers();
        }
        if moved {
            self.idle.store(0, Ordering::Relaxed);
        } else {
            self.rest();
        }
        moved
    }

    /// A caller posts: polling without a find is not idling then, and must not slow down (`rest`). A sender whose peer
    /// sends nothing back finds nothing in any of its polls.
    #[inline(always)]
    pub fn keep_busy(&self) {
        self.idle.store(0, Ordering::Relaxed);
    }

    /// Leaves the core to its sibling hyperthread once polling has found nothing for a while: that one may be copying.
    #[inline]
    fn rest(&self) {
        let idle = self.idle.load(Ordering::Relaxed).saturating_add(1);
        self.idle.store(idle, Ordering::Relaxed);
        if idle > IDLE_POLLS {
            for _ in 0..IDLE_PAUSES {
                std::hint::spin_loop();
            }
        }
    }

    /// Whether so many arrivals in so long a time call the helper thread to work beside the callers.
    pub fn is_thick(&self, arrivals: u64, time: Duration) -> bool {
        self.thick
            .is_some_and(|thick| arrivals > 0 && u128::from(arrivals) * 1000 >= u128::from(thick) * time.as_micros())
    }

    /// The helper thread begins to work beside the callers, or ends it. What they left to it is found by the first `step` after
    /// the end: they had counted a poll before they looked.
    pub fn set_beside(&self, on: bool) {
        self.is_beside.store(on, Ordering::SeqCst);
        if on {
            self.engine.note_beside();
        }
    }

    /// The part of polling that makes no system call.
    #[inline]
    pub fn step(&self) -> bool {
        let mut moved = match self.receiver.try_lock() {
            Some(mut receiver) => receiver.drain(self),
            None => false,
        };
        if self.received.is_busy() {
            moved |= self.received.advance(self);
        }
        for (at, word) in self.pending.iter().enumerate() {
            if word.load(Ordering::Relaxed) != 0 {
                moved |= self.advance_links(at, word);
            }
        }
        moved
    }

    fn advance_links(&self, at: usize, word: &AtomicU64) -> bool {
        let mut moved = false;
        let mut bits = word.load(Ordering::Relaxed);
        while bits != 0 {
            let bit = bits.trailing_zeros();
            bits &= bits - 1;
            let link = &self.links[at * 64 + bit as usize];
            moved |= link.advance(self);
            if !link.has_backlog() {
                word.fetch_and(!(1 << bit), Ordering::SeqCst);
                // Whoever queued between the two looks has set the bit before or finds it set again here.
                if link.has_backlog() {
                    word.fetch_or(1 << bit, Ordering::SeqCst);
                }
            }
        }
        moved
    }

    /// Looks at the peers on this host, at most every `LOOK_EVERY`.
    #[cold]
    pub fn look_at_peers(&self) {
        {
            let Some(mut looked) = self.looked.try_lock() else { return };
            if looked.elapsed() < LOOK_EVERY {
                return;
            }
            *looked = Instant::now();
        }
        if self.attached.load(Ordering::Relaxed) > 0 {
            self.links.iter().for_each(Link::look);
        }
        self.share.reap(self);
    }

    /// Answers what came to the contact socket. Called by the helper thread, and by who waits for an answer.
    pub fn answer_contacts(&self) {
        while let Some(event) = self.contact.receive() {
            match event {
                Event::Asked { rank, status } => {
                    let Some(h) = self.hellos.get(rank as usize) else { continue };
                    // From here on it may copy, and this rank must be able to see that.
                    if self.neighbours.meet(rank, status, &h.token).is_some() {
                        let files = [self.inbox.fd(), self.status.fd()];
                        self.contact.answer(&h.contact, &h.token, self.world.rank, files);
                    }
                }
                Event::Answered { rank, inbox, status, pid } => {
                    let Some(h) = self.hellos.get(rank as usize) else { continue };
                    if let Some(status) = self.neighbours.meet(rank, status, &h.token) {
                        self.attached.fetch_add(1, Ordering::Relaxed);
                        self.link(rank).attach(self, inbox, status.clone(), pid);
                    }
                }
                Event::Sharing { rank, body, file } => self.share.on_datagram(self, rank, &body, file),
                // The helper thread still sleeps if another one reads this.
                Event::Woken => self.stir(),
            }
        }
    }

    /// Gets the helper thread out of bed, if it is there or on its way. What it is to find was left with `SeqCst`.
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

    /// Whether the receiver has nothing to read, looked at after `set_sleeping`.
    pub fn cool_down(&self) -> bool {
        self.receiver.lock().cool_down(self)
    }

    /// Sends what peers wait for and only has to be sent, before this rank goes.
    pub fn flush(&self, within: Duration) {
        let end = Instant::now() + within;
        while (self.received.is_busy() || self.links.iter().any(Link::owes)) && Instant::now() < end {
            if !self.step() {
                std::thread::yield_now();
            }
        }
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
