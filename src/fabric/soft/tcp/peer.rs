//! One peer: its link, its connections to us, and who drives them.

mod arrived;
mod closing;
mod drain;
#[cfg(test)]
mod posting_tests;
mod pulse;
mod serving;

use super::dial::Dialer;
use super::gpu::Gpu;
use super::life::Lines;
use super::link::{Initiator, Lost, Phase};
use super::order::STRIPES;
use super::serve::{Inbound, Outcome, Serving};
use super::sock;
use super::wire::Hello;
use super::{EventSource, PeerInfo, Tcp, FLUSH, LINK, SERVING, TICK};
use crate::error::{Error, Kind};
use crate::fabric::soft::lane::Task;
use crate::fabric::World;
use crate::memory::registry::Registry;
use crate::sys::fork::Private;
use crate::sys::interfaces;
use crate::sys::sync::Mutex;
use std::collections::VecDeque;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{fence, AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, MutexGuard};
use std::time::{Duration, Instant};

/// Staged bytes that are sent without waiting for more.
const FLUSH_AT: usize = 32 * 1024;

/// A post this soon after the last one, or the last send, may be part of a burst.
const BURST: Duration = Duration::from_micros(2);

/// The second such post in a row is: it is staged, and leaves with those that follow. A put and the signal that
/// somebody posts behind it are none.
const STREAK: u32 = 2;

/// Rounds of work left by others that one caller does before it leaves the rest to `progress`.
const ROUNDS: usize = 16;

/// Bytes that a thread sends on a stripe before it looks at its others.
const BULK_TURN: usize = 1 << 20;

/// A peer. Its two halves are locked apart; nobody waits for either lock but movers, `close`, set-up, who destroys a
/// context and who tells a failure.
pub struct Peer {
    pub rank: u32,
    info: PeerInfo,
    link: Mutex<Initiator>,
    /// Operations posted while somebody else held the link.
    inbox: Mutex<VecDeque<Task>>,
    /// Whoever holds the link has to look around again: the inbox, or the peer's state, changed.
    pending: AtomicBool,
    serving: Serving,
    /// It sent its FIN.
    left: AtomicBool,
    life: Mutex<Lines>,
    /// Bytes came from it on a data connection since the last beat.
    heard: AtomicBool,
    /// Whether the link waits for this rank's GPU or for buffers, and how many connections that are served do.
    link_staging: AtomicBool,
    serving_staging: AtomicUsize,
}

impl Peer {
    pub fn new(
        rank: u32,
        info: PeerInfo,
        stripes: usize,
        (gpu, registry): (&Arc<Gpu>, &Arc<Registry>),
        movers: bool,
    ) -> Self {
        Self {
            rank,
            info,
            link: Mutex::new(Initiator::new(stripes, gpu.clone(), registry.clone(), movers)),
            inbox: Mutex::default(),
            pending: AtomicBool::new(false),
            serving: Serving::new(rank, gpu.clone()),
            left: AtomicBool::new(false),
            life: Mutex::default(),
            heard: AtomicBool::new(false),
            link_staging: AtomicBool::new(false),
            serving_staging: AtomicUsize::new(0),
        }
    }

    fn fail(&self, error: Error) {
        self.info.health.fail(error);
    }

    /// Bytes came from it: as good as a word on a life line, which it may have no descriptor for.
    fn note_heard(&self) {
        // Several threads receive, and a store takes the line from the others.
        if !self.heard.load(Ordering::Relaxed) {
            self.heard.store(true, Ordering::Relaxed);
        }
    }

    /// The connection of a stripe was lost.
    fn lost(&self, stripe: usize, e: &std::io::Error) -> Error {
        let Self { rank, info, .. } = self;
        // The socket has forgotten where it led to.
        let at = info.addresses[stripe.saturating_sub(STRIPES) % info.addresses.len()];
        let why = match e.kind() {
            std::io::ErrorKind::UnexpectedEof => {
                "it was closed without a FIN: that rank has ended or given it up, its own log says why".to_string()
            }
            std::io::ErrorKind::TimedOut => {
                format!("{e}: its host does not answer; OXYGIN_PEER_TIMEOUT sets how long to wait")
            }
            _ => e.to_string(),
        };
        let kind = match e.kind() {
            std::io::ErrorKind::InvalidData => Kind::Protocol,
            _ => Kind::PeerGone,
        };
        Error::remote(format!("lost the TCP connection with rank {rank} at {at}: {why}")).of_kind(kind)
    }

    fn has_left(&self) -> Error {
        Error::rank_closed(self.rank)
    }
}

impl Tcp {
    /// Notes whether the link waits for this rank's GPU. The caller holds it.
    fn note_link(&self, peer: &Peer, staging: bool) {
        if peer.link_staging.swap(staging, Ordering::AcqRel) != staging {
            self.count_staging(staging);
        }
    }

    /// Lets go of a link. Returns whether others left something there meanwhile.
    fn let_go(&self, peer: &Peer, link: MutexGuard<'_, Initiator>) -> bool {
        self.note_link(peer, link.is_staging());
        drop(link);
        self.gpu.settle(&self.pollers[0]);
        // Against the store in `nudge`: either we see it, or its try_lock sees the link free.
        fence(Ordering::SeqCst);
        peer.pending.load(Ordering::Acquire)
    }

    fn count_staging(&self, more: bool) {
        match more {
            true => {
                self.staging.fetch_add(1, Ordering::SeqCst);
                // What landed meanwhile was news to nobody.
                self.gpu.renew();
            }
            false => {
                self.staging.fetch_sub(1, Ordering::AcqRel);
            }
        }
    }

    /// Takes operations and, but for a hint that more follow, sends what nothing blocks.
    pub(super) fn post_to(&self, peer: &Peer, tasks: impl Iterator<Item = Task>) {
        let tasks = tasks.filter(|task| !task.lane.is_stopped());
        if peer.info.health.has_failed() {
            // An operation has its number by being taken: the caller waits for the last one, not for the one before,
            // which may be complete.
            return tasks.for_each(drop);
        }
        let (mut tasks, mut more) = (tasks, false);
        let driven = self.drive(peer, |link| {
            // Somebody left work here, which may be to send what was deferred: it must not be deferred again.
            let is_asked = peer.pending.load(Ordering::Acquire);
            if is_asked {
                self.take_inbox(peer, link);
            }
            for task in &mut tasks {
                more = task.work.more();
                link.accept(task);
            }
            if link.phase != Phase::Up {
                return false;
            }
            let staged = link.only_staged().is_some_and(|n| n < FLUSH_AT);
            let now = Instant::now();
            let overdue = link.deferred.is_some_and(|since| now - since >= FLUSH);
            let soon = link.last_use.replace(now).is_some_and(|t| now - t < BURST);
            link.streak = if soon { link.streak.saturating_add(1) } else { 0 };
            let wait = !is_asked && staged && !overdue && (more || link.streak >= STREAK);
            if wait {
                self.any_fresh.store(true, Ordering::Relaxed);
                if link.deferred.is_none() {
                    link.deferred = Some(now);
                    self.defer(peer.rank, now);
                }
            }
            wait
        });
        if driven.is_none() {
            peer.inbox.lock().extend(tasks);
            self.nudge(peer);
        }
    }

    /// Runs `first` with the link, settles it unless `first` says that it need not be, then does what others left in
    /// the meantime. `None`: somebody else has the link.
    fn drive(&self, peer: &Peer, first: impl FnOnce(&mut Initiator) -> bool) -> Option<bool> {
        let mut link = peer.link.try_lock()?;
        let mut moved = false;
        if !first(&mut link) {
            moved |= self.settle(peer, &mut link);
        }
        for _ in 0..ROUNDS {
            if !self.let_go(peer, link) {
                return Some(moved);
            }
            match peer.link.try_lock() {
                Some(l) => link = l,
                None => return Some(moved),
            }
            moved |= self.settle(peer, &mut link);
        }
        self.note_link(peer, link.is_staging());
        drop(link);
        self.gpu.settle(&self.pollers[0]);
        self.defer(peer.rank, Instant::now());
        Some(moved)
    }

    /// Has somebody settle the link: this thread, or whoever holds it.
    fn nudge(&self, peer: &Peer) -> bool {
        peer.pending.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        self.drive(peer, |_| false).unwrap_or(false)
    }

    pub(super) fn flush(&self, peer: &Peer) -> bool {
        self.nudge(peer)
    }

    fn take_inbox(&self, peer: &Peer, link: &mut Initiator) {
        peer.pending.store(false, Ordering::Release);
        fence(Ordering::SeqCst);
        let tasks = std::mem::take(&mut *peer.inbox.lock());
        for task in tasks {
            link.accept(task);
        }
    }

    /// Brings a link up to date: takes what was posted, sees to failures, connects, sends.
    fn settle(&self, peer: &Peer, link: &mut Initiator) -> bool {
        self.take_inbox(peer, link);
        link.deferred = None;
        link.tell_faults();
        if peer.info.health.has_failed() {
            link.cut_off();
            return false;
        }
        if (link.phase == Phase::Down || peer.left.load(Ordering::Acquire)) && link.is_busy() {
            link.cut_off();
            // This rank may be the one: posting has met its close.
            let is_own = self.closed.load(Ordering::Acquire) && !peer.left.load(Ordering::Acquire);
            peer.fail(if is_own { super::posted_when_closed(peer.rank) } else { peer.has_left() });
            return false;
        }
        if link.phase == Phase::Idle && link.is_busy() {
            self.pollers[0].arm_tick(TICK);
            self.clock.run();
            let result = self.with_dialer(peer, |d| d.start(link, |s| EventSource::Link(peer.rank, s).token()));
            self.dialed(peer, link, result);
        }
        self.gpu.start_fetches();
        let moved = match link.pump() {
            Ok(moved) => moved,
            Err((stripe, e)) => {
                self.send_failed(peer, link, stripe, e);
                return true;
            }
        };
        if link.fault.as_ref().is_some_and(|e| !self.gpu.may_tell(e)) {
            return moved;
        }
        if let Some(e) = link.fault.take() {
            link.cut_off();
            peer.fail(e.context(format!("towards rank {}", peer.rank)));
            return true;
        }
        self.watch(peer, link);
        moved
    }

    /// Has epoll watch for what the link waits for.
    fn watch(&self, peer: &Peer, link: &mut Initiator) {
        if link.phase != Phase::Up {
            return;
        }
        for stripe in 0..link.conns.len() {
            let wanted = link.wanted(stripe);
            let conn = &mut link.conns[stripe];
            if let (Some(fd), true) = (&conn.fd, conn.interest != wanted) {
                let token = EventSource::Link(peer.rank, stripe).token();
                self.poller_of(peer.rank, stripe, LINK).watch(fd.as_raw_fd(), &mut conn.interest, wanted, token);
            }
        }
    }

    fn with_dialer<R>(&self, peer: &Peer, f: impl FnOnce(&Dialer) -> R) -> R {
        // Only these are reached by one of several interfaces.
        let links = match peer.info.addresses.iter().any(interfaces::link_local) {
            true => self.links.get_or_init(|| interfaces::links(&self.addresses)),
            false => &self.addresses,
        };
        f(&Dialer {
            world: self.peers.get().map_or(World { rank: 0, nranks: 0 }, |peers| peers.world),
            own_token: &self.token,
            local: &self.addresses,
            links,
            rank: peer.rank,
            peer: &peer.info,
            timing: &self.timing,
            clock: &self.clock,
            poller: &|stripe| self.poller_of(peer.rank, stripe, LINK),
        })
    }

    fn dialed(&self, peer: &Peer, link: &mut Initiator, result: crate::error::Result<()>) {
        if let Err(e) = result {
            link.cut_off();
            peer.fail(e);
        }
    }

    /// Looks after deadlines. Returns whether to look again.
    pub(super) fn dial_tick(&self, peer: &Peer) -> bool {
        let mut dialing = false;
        let driven = self.drive(peer, |link| {
            if link.phase != Phase::Dialing {
                return true;
            }
            let result = self.with_dialer(peer, |d| d.step_all(link, |s| EventSource::Link(peer.rank, s).token()));
            self.dialed(peer, link, result);
            dialing = link.phase == Phase::Dialing;
            false
        });
        dialing || driven.is_none()
    }

    pub(super) fn link_event(&self, peer: &Peer, stripe: usize, bits: u32) -> bool {
        let mut received = false;
        let driven = self.drive(peer, |link| {
            if peer.info.health.has_failed() {
                // The destinations of gets may be gone; `settle` cuts the link off.
                return false;
            }
            match link.phase {
                Phase::Dialing => {
                    let token = EventSource::Link(peer.rank, stripe).token();
                    let result = self.with_dialer(peer, |d| d.step(link, stripe, true, token));
                    self.dialed(peer, link, result);
                }
                Phase::Up => {
                    if bits & libc::EPOLLOUT as u32 != 0 {
                        link.conns[stripe].blocked = false;
                    }
                    link.conns[stripe].over |= bits & libc::EPOLLHUP as u32 != 0;
                    if bits & !(libc::EPOLLOUT as u32) != 0 {
                        match link.receive(stripe) {
                            Ok(r) => received = r,
                            // As for any other fault of the GPU: once nothing is copied.
                            Err(Lost::Gpu(e)) => drop(link.fault.get_or_insert(e)),
                            Err(l) => self.end_link(peer, link, stripe, l),
                        }
                    }
                }
                Phase::Idle | Phase::Down => {}
            }
            false
        });
        if received {
            peer.note_heard();
        }
        if driven.is_none() {
            // Also called without an event that would come again.
            self.gpu.renew();
        }
        driven.unwrap_or(false) | received
    }

    /// A connection of the link takes nothing any more.
    fn send_failed(&self, peer: &Peer, link: &mut Initiator, stripe: usize, e: std::io::Error) {
        // The destinations of gets may be gone once the peer has failed.
        let why = match peer.info.health.has_failed() {
            true => Lost::Io(e),
            false => link.last_word(stripe, e),
        };
        self.end_link(peer, link, stripe, why);
    }

    /// A connection of the link ended: what that means for the rest.
    fn end_link(&self, peer: &Peer, link: &mut Initiator, stripe: usize, why: Lost) {
        let error = match why {
            Lost::Fin => {
                link.confirm_all();
                peer.left.store(true, Ordering::Release);
                link.is_busy().then(|| peer.has_left())
            }
            Lost::Io(_) if peer.left.load(Ordering::Acquire) => link.is_busy().then(|| peer.has_left()),
            Lost::Gpu(e) => Some(e.context(format!("towards rank {}", peer.rank))),
            Lost::Io(e) => Some(peer.lost(stripe, &e)),
        };
        link.cut_off();
        if let Some(e) = error {
            peer.fail(e);
        }
    }

    /// Moves on what waited for this rank's GPU.
    pub(super) fn advance_staged_of(&self, peer: &Peer) -> bool {
        let mut moved = false;
        if peer.link_staging.load(Ordering::Acquire) {
            moved |= self.nudge(peer);
            let mut first = 0;
            while let Some(stripe) = self.starved(peer, first) {
                moved |= self.link_event(peer, stripe, libc::EPOLLIN as u32);
                first = stripe + 1;
            }
        }
        if peer.serving_staging.load(Ordering::Acquire) > 0 {
            for stripe in 0..peer.serving.stripes() {
                moved |= self.serve_event(peer, stripe, 0, self.is_own(stripe));
            }
        }
        moved
    }

    /// The next connection of the link, from `first` on, that waits for a buffer.
    fn starved(&self, peer: &Peer, first: usize) -> Option<usize> {
        let Some(link) = peer.link.try_lock() else {
            self.gpu.renew();
            return None;
        };
        let starved = link.starved(first);
        drop(link);
        // As in `drive`: whoever came meanwhile has left its work to us.
        fence(Ordering::SeqCst);
        if peer.pending.load(Ordering::Acquire) {
            self.nudge(peer);
        }
        starved
    }

    /// Sends on a stripe for a while, on a thread of its own.
    pub(super) fn send_bulk(&self, peer: &Peer, stripe: usize) -> bool {
        let (mut total, mut loan) = (0, None);
        loop {
            let mut link = peer.link.lock();
            if let Some(Err(e)) = loan.take().map(|l| link.take_back(l)) {
                self.send_failed(peer, &mut link, stripe, e);
            }
            self.settle(peer, &mut link);
            loan = if total < BULK_TURN { link.lend(stripe) } else { None };
            if self.let_go(peer, link) && loan.is_none() {
                self.nudge(peer);
            }
            let Some(l) = &mut loan else { return total > 0 };
            // SAFETY: borrowed ranges belong to unfinished operations, whose callers keep them readable.
            total += unsafe { l.send() };
        }
    }
}
