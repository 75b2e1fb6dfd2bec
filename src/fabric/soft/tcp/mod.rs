//! TCP towards ranks on other hosts.
//!
//! Who opens a connection (the initiator) sends its puts, signals and get requests on it; two ranks that talk both ways
//! have two sets of connections. `link` is the initiator's side of a peer, `serve` the target's; both are driven from
//! [`Tcp::progress`] and, as far as nothing blocks, from [`Tcp::post`]. See `docs/soft-tcp.md`.

mod acceptor;
mod clock;
mod dial;
mod gpu;
mod life;
mod link;
mod order;
mod outstanding;
mod peer;
mod peers;
mod receive_buffer;
mod send_buffer;
mod serve;
mod sock;
mod source;
pub mod wire;

pub use link::CHUNK;
pub use sock::Timing;

use crate::error::{Error, Result};
use crate::fabric::soft::lane::{Health, Lane, Task};
use crate::fabric::World;
use crate::memory::registry::Registry;
use crate::sys::net;
use crate::sys::sync::Mutex;
use crate::sys::yielder::Yielder;
use acceptor::Acceptor;
use clock::Clock;
pub use gpu::Gpu;
use peer::Peer;
use peers::Peers;
use sock::{Poller, EVENTS};
use source::EventSource;
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, RawFd};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How often deadlines are looked after while there are any.
const TICK: Duration = Duration::from_millis(20);

/// How long a mover spins after it has moved something: longer than an exchange of 1 MiB takes, because to be woken
/// costs some 50 µs on a large machine.
const LINGER: Duration = Duration::from_micros(400);

/// Halves of a connection's work: what this rank asks of a peer, and what the peer asks of this rank.
const LINK: usize = 0;
const SERVING: usize = 1;

/// How long a deferred flush waits for more to send along while its caller posts and makes progress in turn. Progress
/// twice without a post in between means that nobody has more.
const FLUSH: Duration = Duration::from_micros(20);

/// How long it waits where the caller stops calling at all. Setting the timer costs up to 20 µs in a virtual machine,
/// so it runs out once in a while rather than being set anew for each flush.
const SILENCE: Duration = Duration::from_micros(500);

/// What this rank knows of another.
#[derive(Clone)]
pub struct PeerInfo {
    /// Where it listens; at least one.
    pub addresses: Vec<SocketAddr>,
    /// The secret it wants to see.
    pub token: [u8; 16],
    /// Where its failure is told.
    pub health: Arc<Health>,
}

/// TCP connections of one communicator.
///
/// GPU memory goes through pinned memory of `gpu`. No thread of its own: somebody calls [`Tcp::progress`] whenever
/// [`Tcp::as_fd`] is readable.
pub struct Tcp {
    /// The callers' own, then one for each mover.
    pollers: Vec<Poller>,
    token: [u8; 16],
    /// Connections opened to a peer: the express one, the middle one and the stripes.
    conns: usize,
    timing: Timing,
    clock: Clock,
    registry: Arc<Registry>,
    addresses: Vec<SocketAddr>,
    /// See [`interfaces::links`]. Asked of the kernel once a peer has a link-local address.
    links: OnceLock<Vec<SocketAddr>>,
    acceptor: Mutex<Acceptor>,
    peers: OnceLock<Peers>,
    /// Peers with a flush due.
    deferred: Mutex<Vec<u32>>,
    any_deferred: AtomicBool,
    /// When the first of them was deferred, ns after `start`.
    deferred_at: AtomicU64,
    start: Instant,
    /// The flush timer runs.
    flush_armed: AtomicBool,
    /// Something was staged since [`Tcp::progress`] was last called. A hint: who misses it sends early or late by a
    /// call.
    any_fresh: AtomicBool,
    gpu: Arc<Gpu>,
    /// Halves of peers that wait for this rank's GPU.
    staging: AtomicUsize,
    closed: AtomicBool,
}

impl Tcp {
    /// Listens on every address of `bind` (port 0: any). `token` is this rank's secret, which peers must present;
    /// `stripes` (1 to 16) is how many connections for bulk this rank opens to each peer it has something for; one more
    /// carries small frames, and one lone chunks.
    pub fn open(bind: &[SocketAddr], token: [u8; 16], stripes: u32, registry: Arc<Registry>) -> Result<Self> {
        Self::open_with(bind, token, stripes, registry, Timing::default())
    }

    /// [`Tcp::open`] with deadlines other than the usual.
    pub fn open_with(
        bind: &[SocketAddr],
        token: [u8; 16],
        stripes: u32,
        registry: Arc<Registry>,
        timing: Timing,
    ) -> Result<Self> {
        let max = (wire::MAX_STRIPES - order::STRIPES) as u32;
        if !(1..=max).contains(&stripes) {
            return Err(Error::argument(format!("{stripes} TCP stripes: set OXYGIN_TCP_STRIPES to 1 .. {max}")));
        }
        if bind.is_empty() {
            return Err(Error::argument("no address to listen on for TCP data connections: check NCCL_SOCKET_IFNAME"));
        }
        let os = |what: &'static str| move |e: std::io::Error| Error::system(format!("{what}: {e}"));
        let poller =
            Poller::new(EventSource::Tick.token(), EventSource::Flush.token()).map_err(os("epoll or timerfd"))?;
        let clock = Clock::new(timing.silence).map_err(os("timerfd"))?;
        poller.add(clock.fd(), libc::EPOLLIN as u32, EventSource::Pulse.token()).map_err(os("epoll"))?;
        let (mut listeners, mut addresses) = (Vec::new(), Vec::new());
        for (i, address) in bind.iter().enumerate() {
            let failed = |call: &str, e: std::io::Error| {
                Error::system(format!("{call} for TCP data connections at {address}: {e}"))
            };
            let l = net::listen(*address).map_err(|(call, e)| failed(call, e.into()))?;
            poller
                .add(l.as_raw_fd(), libc::EPOLLIN as u32, EventSource::Listener(i).token())
                .map_err(|e| failed("epoll_ctl", e))?;
            addresses.push(l.local_addr().map_err(|e| failed("getsockname", e))?);
            listeners.push(l);
        }
        Ok(Self {
            pollers: vec![poller],
            token,
            conns: order::STRIPES + stripes as usize,
            timing,
            clock,
            registry,
            links: OnceLock::new(),
            addresses,
            acceptor: Mutex::new(Acceptor::new(listeners)),
            peers: OnceLock::new(),
            deferred: Mutex::default(),
            any_deferred: AtomicBool::new(false),
            deferred_at: AtomicU64::new(0),
            start: Instant::now(),
            flush_armed: AtomicBool::new(false),
            any_fresh: AtomicBool::new(false),
            gpu: Arc::default(),
            staging: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
        })
    }

    /// Has `stripes` connections for bulk to each peer, as in [`Tcp::open`], served by `movers` threads, each of
    /// which calls [`Tcp::move_bulk`] until it is to end. Before [`Tcp::join`].
    pub fn set_movers(&mut self, movers: u32, stripes: u32) -> Result<()> {
        self.conns = order::STRIPES + stripes as usize;
        self.pollers.truncate(1);
        for _ in 0..movers {
            let poller = Poller::new(EventSource::Tick.token(), EventSource::Flush.token());
            self.pollers.push(poller.map_err(|e| Error::system(format!("epoll or timerfd: {e}")))?);
        }
        Ok(())
    }

    /// Threads that serve the connections for bulk.
    pub fn movers(&self) -> usize {
        self.pollers.len() - 1
    }

    /// What mover `number` does until `end` says that it is to end; it looks after [`Tcp::wake_movers`].
    pub fn move_bulk(&self, number: usize, end: impl Fn() -> bool) {
        let Some(poller) = self.pollers.get(number + 1) else { return };
        let (mut last, mut yielder) = (Instant::now(), Yielder::default());
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        while !end() {
            let mut moved = self.advance_staged_by(Gpu::poll_pools);
            let sleep = if !moved && last.elapsed() > LINGER { -1 } else { 0 };
            for e in poller.wait(&mut events, sleep) {
                let bits = e.events;
                let (out, other) = (bits & libc::EPOLLOUT as u32, bits & !(libc::EPOLLOUT as u32));
                moved |= match EventSource::of(e.u64) {
                    EventSource::Link(peer, stripe) => self.peer(peer).is_some_and(|p| {
                        // Also what makes a connection.
                        self.link_event(p, stripe, bits) | (out != 0 && self.send_bulk(p, stripe)) | (other != 0)
                    }),
                    EventSource::Serving(peer, stripe) => {
                        self.peer(peer).is_some_and(|p| self.serve_event(p, stripe, bits, true))
                    }
                    _ => {
                        poller.heard_flush();
                        false
                    }
                };
            }
            if self.gpu.was_stirred() {
                // The engine is the callers' and the helper thread's.
                self.pollers[0].arm_flush(Duration::from_nanos(1));
            }
            if moved {
                last = Instant::now();
            } else {
                // Where cores are few, somebody else has more use for this one.
                yielder.give_way();
            }
        }
    }

    /// Has the movers look whether they are to end.
    pub fn wake_movers(&self) {
        self.pollers[1..].iter().for_each(|p| p.arm_flush(Duration::from_nanos(1)));
    }

    /// Whether callers serve a connection themselves.
    fn is_own(&self, stripe: usize) -> bool {
        stripe < order::STRIPES || self.movers() == 0
    }

    /// Who watches a connection: callers, or a mover. The two halves of a stripe go to different ones, if there are
    /// two.
    fn poller_of(&self, rank: u32, stripe: usize, half: usize) -> &Poller {
        if self.is_own(stripe) {
            return &self.pollers[0];
        }
        let number = (rank as usize * (self.conns - order::STRIPES) + stripe - order::STRIPES) * 2 + half;
        &self.pollers[1 + number % self.movers()]
    }

    /// What is known of this rank's GPU.
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Connections for bulk that this rank opens, if it talks to every other of `nranks`.
    pub fn bulk_conns(&self, nranks: u32) -> u32 {
        (self.conns - order::STRIPES) as u32 * nranks.saturating_sub(1)
    }

    /// Where this rank listens: what peers need to know.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        self.addresses.clone()
    }

    /// Learns the peers, `peers[r]` being rank r (this rank's own entry included). Called once, before [`Tcp::post`].
    pub fn join(&self, world: World, peers: Vec<PeerInfo>) -> Result<()> {
        if peers.len() != world.nranks as usize || world.rank >= world.nranks {
            return Err(Error::internal(format!("{} TCP peers for {world:?}", peers.len())));
        }
        if let Some(r) = peers.iter().position(|p| p.addresses.is_empty()) {
            return Err(Error::protocol(format!("rank {r} names no address for TCP data connections")));
        }
        self.clock.set_turns(Self::turns_of(peers.len()));
        if self.peers.set(Peers::new(world, peers)).is_err() {
            return Err(Error::internal("TCP peers were told twice"));
        }
        let mut acceptor = self.acceptor.lock();
        for at in acceptor.greeted() {
            if let Some(hello) = acceptor.hear(at, &self.token) {
                self.admit(&mut acceptor, at, hello);
            }
        }
        Ok(())
    }

    /// Queues an operation: [`Tcp::post_all`] of one.
    pub fn post(&self, task: Task) {
        let lane = task.lane.clone();
        self.post_all(&lane, std::iter::once(task));
    }

    /// Queues operations of one lane and, if nothing blocks, sends them. Any thread; operations of one lane in the
    /// order of their numbers. A failure shows in the lane's health.
    pub fn post_all(&self, lane: &Lane, tasks: impl Iterator<Item = Task>) {
        let peer = if self.closed.load(Ordering::Acquire) { None } else { self.make_peer(lane.peer) };
        match peer {
            Some(peer) => self.post_to(peer, tasks),
            None => {
                let rank = lane.peer;
                lane.health.fail(posted_when_closed(rank));
                // As in `post_to`.
                tasks.for_each(drop);
            }
        }
    }

    /// Advances whatever can move, without blocking. Any thread. Returns whether anything moved.
    pub fn progress(&self) -> bool {
        if self.closed.load(Ordering::Acquire) {
            // A timer that fired would keep the descriptor readable.
            self.pollers[0].heard_tick();
            self.pollers[0].heard_flush();
            self.clock.has_struck();
            return false;
        }
        let mut moved = !self.gathers() && self.flush_deferred();
        moved |= self.advance_staged();
        let mut events = [libc::epoll_event { events: 0, u64: 0 }; EVENTS];
        for e in self.pollers[0].ready(&mut events) {
            let (bits, token) = (e.events, e.u64);
            moved |= match EventSource::of(token) {
                EventSource::Tick => {
                    self.pollers[0].heard_tick();
                    self.tick();
                    false
                }
                EventSource::Flush => {
                    self.pollers[0].heard_flush();
                    // Against `defer`: either it sees that the timer does not run, or we see what it deferred.
                    self.flush_armed.store(false, Ordering::SeqCst);
                    self.flush_deferred()
                }
                EventSource::Pulse => self.pulse(),
                EventSource::Listener(i) => self.acceptor.try_lock().is_some_and(|mut acceptor| {
                    self.pollers[0].arm_tick(TICK);
                    let (l, c) = (|i| EventSource::Listener(i).token(), |i| EventSource::Caller(i).token());
                    acceptor.accept(i, &self.pollers[0], &self.timing, l, c)
                }),
                EventSource::Caller(i) => self.acceptor.try_lock().is_some_and(|mut acceptor| {
                    if bits & (libc::EPOLLHUP | libc::EPOLLERR) as u32 != 0 {
                        // Reported even while it is not watched, waiting for `join`.
                        acceptor.take(i);
                    }
                    let hello = acceptor.hear(i, &self.token);
                    hello.is_some_and(|h| self.admit(&mut acceptor, i, h))
                }),
                EventSource::Link(peer, stripe) => self.peer(peer).is_some_and(|p| self.link_event(p, stripe, bits)),
                EventSource::Serving(peer, stripe) => {
                    self.peer(peer).is_some_and(|p| self.serve_event(p, stripe, bits, true))
                }
            };
        }
        self.gpu.stir();
        moved
    }

    /// An epoll descriptor that is readable when [`Tcp::progress`] has something to do. Open as long as this object.
    pub fn as_fd(&self) -> RawFd {
        self.pollers[0].fd()
    }

    /// Sends what was promised, as long as [`Timing::linger`] and [`Timing::leave`] allow, takes leave of the peers
    /// and closes every connection. Unfinished operations fail. Later calls do nothing.
    pub fn close(&self) {
        if self.closed.swap(true, Ordering::AcqRel) {
            return;
        }
        self.acceptor.lock().close();
        if let Some(peers) = self.peers.get() {
            peers.close();
            self.close_peers(peers.all(), peers.world.rank);
        }
    }

    /// Whether anything waits for this rank's GPU: [`Tcp::as_fd`] says nothing of it.
    pub fn is_staging(&self) -> bool {
        self.staging.load(Ordering::Acquire) > 0
    }

    /// A rank that this one has something to do with.
    fn peer(&self, rank: u32) -> Option<&Peer> {
        self.peers.get()?.get(rank)
    }

    /// A rank that this one has something to do with from here on; `None`: there is no such rank, or the end has come.
    fn make_peer(&self, rank: u32) -> Option<&Peer> {
        let make = |info| Peer::new(rank, info, self.conns, (&self.gpu, &self.registry), self.pollers.len() > 1);
        self.peers.get()?.get_or_make(rank, make)
    }

    /// Lets a greeted caller in, if it knows this communicator; before `join` it has to wait.
    fn admit(&self, acceptor: &mut Acceptor, at: usize, hello: wire::Hello) -> bool {
        let Some(world) = self.peers.get().map(|peers| &peers.world) else {
            acceptor.keep(at, &self.pollers[0], EventSource::Caller(at).token());
            return false;
        };
        let Some(fd) = acceptor.take(at) else { return false };
        if hello.to != world.rank || hello.nranks != world.nranks {
            log::warn!("a TCP data connection for rank {} of {} came to {world:?}", hello.to, hello.nranks);
            return false;
        }
        let Some(peer) = self.make_peer(hello.from) else { return false };
        match hello.is_life() {
            true => self.admit_life(peer, fd, &hello),
            false => self.serve_new(peer, world, fd, hello),
        }
        true
    }

    fn tick(&self) {
        let l = |i| EventSource::Listener(i).token();
        let mut again =
            self.acceptor.try_lock().is_none_or(|mut acceptor| acceptor.expire(&self.pollers[0], &self.timing, l));
        for peer in self.peers.get().iter().flat_map(|peers| peers.all()) {
            again |= self.dial_tick(peer);
        }
        if again {
            self.pollers[0].arm_tick(TICK);
        }
    }

    /// Leaves a flush to the next call of `progress`, and sees to it that there is one.
    fn defer(&self, peer: u32, now: Instant) {
        self.deferred.lock().push(peer);
        if !self.any_deferred.load(Ordering::Relaxed) {
            self.deferred_at.store((now - self.start).as_nanos() as u64, Ordering::Relaxed);
        }
        self.any_deferred.store(true, Ordering::SeqCst);
        if !self.flush_armed.swap(true, Ordering::SeqCst) {
            self.pollers[0].arm_flush(SILENCE);
        }
    }

    /// Whether a deferred flush is better left alone for now: a caller that posts and makes progress in turn is about
    /// to post more, and each send costs it a system call of some 10 µs.
    fn gathers(&self) -> bool {
        if !self.any_fresh.load(Ordering::Relaxed) {
            return false;
        }
        self.any_fresh.store(false, Ordering::Relaxed);
        let at = Duration::from_nanos(self.deferred_at.load(Ordering::Relaxed));
        self.start.elapsed().saturating_sub(at) < FLUSH
    }

    /// Moves on what waited for this rank's GPU, without a look at the sockets. Returns whether operations are up, or
    /// anything moved.
    #[inline]
    pub fn advance_staged(&self) -> bool {
        self.advance_staged_by(Gpu::poll)
    }

    /// The same, with what `poll` says of operations that are up and of news.
    #[inline]
    fn advance_staged_by(&self, poll: impl Fn(&Gpu) -> (bool, bool)) -> bool {
        if !self.is_staging() {
            return false;
        }
        // First, so that an operation that lands now is seen below.
        let (up, news) = poll(&self.gpu);
        if !news {
            return up;
        }
        let peers = self.peers.get().into_iter().flat_map(Peers::all);
        let moved = peers.fold(up, |moved, p| moved | self.advance_staged_of(p));
        moved | self.gpu.is_renewed()
    }

    fn flush_deferred(&self) -> bool {
        if !self.any_deferred.load(Ordering::SeqCst) || !self.any_deferred.swap(false, Ordering::SeqCst) {
            return false;
        }
        let due = std::mem::take(&mut *self.deferred.lock());
        due.iter().filter_map(|&p| self.peer(p)).fold(false, |moved, p| moved | self.flush(p))
    }
}

/// What becomes of an operation that is posted when this rank has closed.
#[cold]
fn posted_when_closed(rank: u32) -> Error {
    Error::usage(format!("an operation to rank {rank} on a closed communicator"))
}

impl Drop for Tcp {
    fn drop(&mut self) {
        self.close();
    }
}
