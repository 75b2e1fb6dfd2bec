//! From this rank to one peer: what waits, by lane, and the turns of those that wait. Who moves the bytes is for the
//! [`route`] to say; each transport posts, advances and ends its own operations.
//!
//! A lane's operations wait behind its own lock ([`tx_queue`]). The peer's ring has a lock for as long as a message is
//! written, and what the peer is owed one of its own ([`service`]).

mod atomic;
mod drain;
mod fault;
mod post;
mod pulls;
mod remote;
mod responses;
mod route;
mod service;
mod staged;
mod turn;
mod tx_queue;

pub use self::drain::LEAVE_WITHIN;
pub use self::route::RouteKind;
pub use self::tx_queue::TxQueue;

use self::route::Route;
use self::service::Service;
use self::turn::Turn;
use self::tx_queue::{LaneState, TxQueues};
use super::domain::Domain;
use super::gpu::Engine;
use super::lane::{Health, Lane};
use super::peer::finding::Finding;
use super::peer::life::{PeerWatch, Verdict};
use super::sentences::dead;
use super::status::alive;
use crate::error::Error;
use crate::sys::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::Arc;

/// Bytes moved for one operation before others get their turn: about 0.2 ms of copying.
const QUANTUM: u64 = 2 << 20;
/// Operations of one lane per turn.
const BURST: usize = 64;

/// This rank's side towards one peer.
pub struct Link {
    /// The peer.
    pub peer: u32,
    /// Whether it can be reached.
    pub health: Arc<Health>,
    route: Route,
    finding: Mutex<Finding>,
    watch: PeerWatch,
    tx_queues: TxQueues,
    /// Where the next round of turns begins.
    next: AtomicUsize,
    service: Mutex<Service>,
    /// Responses in it.
    owed: AtomicUsize,
    /// The places of copies by the kernel that are under way, a bit each.
    copies: AtomicU32,
    /// Operations that wait or are out, faults that are not told, and what the peer is owed; each is counted under the
    /// lock that it is behind.
    backlog: AtomicUsize,
    /// Operations that the peer's engine in this process, or this rank's own, has and has not completed.
    in_engine: Arc<AtomicUsize>,
}

impl Link {
    /// A link nobody has used.
    pub fn new(peer: u32, health: Arc<Health>) -> Self {
        Self {
            peer,
            health,
            route: Route::new(),
            finding: Mutex::default(),
            watch: PeerWatch::default(),
            tx_queues: TxQueues::default(),
            next: AtomicUsize::new(0),
            service: Mutex::default(),
            owed: AtomicUsize::new(0),
            copies: AtomicU32::new(0),
            backlog: AtomicUsize::new(0),
            in_engine: Arc::default(),
        }
    }

    /// Gives each lane a place, from which it posts.
    pub fn add_lanes(&self, lanes: impl Iterator<Item = Arc<Lane>>) -> Vec<Arc<TxQueue>> {
        self.tx_queues.add(lanes)
    }

    /// Whether anything waits here.
    #[inline]
    pub fn has_backlog(&self) -> bool {
        self.has_waiting() || self.in_engine.load(Ordering::Relaxed) != 0
    }

    /// Moves what can move. Returns whether anything did.
    pub fn advance(&self, shared: &Domain) -> bool {
        let has_failed = self.health.has_failed();
        // A peer that waits for this rank is told that it waits in vain.
        if has_failed && !self.owes_refusal(shared) {
            self.drop_all();
            return self.poll_engine(shared);
        }
        let mut moved = false;
        if self.has_waiting() {
            if self.route.way() == RouteKind::Unknown {
                self.find_route(shared);
            }
            if self.route.way() == RouteKind::Unknown {
                return false;
            }
            // The caller and the helper thread may poll side by side: who finds nothing to do touches no lock.
            let (owes, wants) = (self.owed.load(Ordering::Relaxed) != 0, self.tx_queues.want());
            moved = owes && self.serve(shared);
            if wants && !has_failed {
                moved |= self.take_turns(shared);
            }
            if owes || wants {
                self.publish(shared);
            }
        }
        self.poll_engine(shared) || moved
    }

    /// The way now.
    pub fn way(&self) -> RouteKind {
        self.route.way()
    }

    /// Whether the peer has failed for this rank.
    pub fn has_failed(&self) -> bool {
        self.health.has_failed()
    }

    /// The peer's engine, if it is another rank of this process whose engine has operations of this rank's.
    pub fn engine_of_peer(&self) -> Option<&Arc<Engine>> {
        self.route.engine()
    }

    /// Polls the engine that has operations to this peer. That is this rank's own for what it fetches; as long as lanes
    /// wait for that, they poll.
    fn poll_engine(&self, shared: &Domain) -> bool {
        match self.route.engine() {
            Some(engine) => engine.poll(),
            None => !self.has_waiting() && self.has_backlog() && shared.engine.poll(),
        }
    }

    /// Whether operations, faults or responses wait at this link.
    #[inline]
    fn has_waiting(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) != 0
    }

    /// Gives each lane a turn that wants one, beginning with another one each time that there was no room.
    fn take_turns(&self, shared: &Domain) -> bool {
        let (tx_queues, mut moved, mut asked) = (self.tx_queues.all(), false, false);
        let first = self.next.load(Ordering::Relaxed);
        for at in 0..tx_queues.len() {
            let at = first.wrapping_add(at) % tx_queues.len();
            let tx = &tx_queues[at];
            if !tx.wants() {
                continue;
            }
            // Who has it posts, or gives it its turn.
            let Some(mut queue) = tx.try_lock() else { continue };
            if matches!(queue.state, LaneState::Failing(_)) {
                moved |= self.tell_fault(shared, tx, &mut queue);
            }
            if !queue.remote.is_empty() {
                moved |= self.settle(shared, tx, &mut queue, &mut asked);
            }
            let mut turn = None;
            if matches!(queue.state, LaneState::Ready) {
                let (back, step) = self.run_lane(shared, tx, queue);
                (queue, turn) = (back, Some(step));
                moved |= step != Turn::Full;
            }
            tx.release(queue);
            match turn {
                // Nobody else has room either; next time another lane comes first.
                Some(Turn::Full) => {
                    self.next.store(at + 1, Ordering::Relaxed);
                    break;
                }
                // What others have pushed is complete for them: it goes out all the same.
                Some(Turn::Failed) => break,
                Some(Turn::Over) | None => {}
            }
        }
        moved
    }

    /// Makes visible what was pushed for the peer, and wakes it if it sleeps.
    pub(super) fn publish(&self, shared: &Domain) {
        let Some(mut port) = self.route.port() else { return };
        let wake = port.inbox.producer().is_dirty() && port.inbox.publish();
        drop(port);
        if wake {
            shared.wake(self.peer);
        }
    }

    /// Ends everything that waits; called once the peer has failed. Lanes that somebody has now come another time.
    fn drop_all(&self) {
        if !self.has_waiting() {
            return;
        }
        for tx in self.tx_queues.all().iter() {
            let Some(mut queue) = tx.try_lock() else { continue };
            self.backlog.fetch_sub(queue.drop_all(), Ordering::Relaxed);
            tx.release(queue);
        }
        self.end_service();
    }

    /// Looks whether a peer on this host still lives. `is_read`: whether all that it has written for this rank is read.
    pub fn look(&self, is_read: impl FnOnce() -> bool) {
        if self.health.has_failed() {
            return;
        }
        if self.route.way() == RouteKind::Closed {
            // Posted while the link was being closed: nobody takes it, or answers.
            if self.is_unfinished() {
                self.health.fail(Error::rank_closed(self.peer));
                self.drop_all();
            }
            return;
        }
        let Some(seen) = self.route.port().map(|port| port.inbox.look()) else { return };
        let has_closed = seen == alive::Liveness::Closed;
        if has_closed {
            self.close_service();
            // Operations that go another way end that way.
            if self.route.way() != RouteKind::Near {
                return;
            }
        }
        // In this order: what is read by then is finished by then.
        let is_read = !has_closed || is_read();
        match self.watch.judge(seen, is_read, self.is_unfinished()) {
            Verdict::Stays => {}
            Verdict::Died => {
                self.health.fail(dead(self.peer));
                self.drop_all();
            }
            Verdict::Closed => self.route.close(),
            Verdict::Left => {
                self.health.fail(Error::remote(format!(
                    "rank {} has closed its communicator while operations to it were unfinished",
                    self.peer
                )));
                self.drop_all();
                self.route.close();
            }
        }
    }
}

#[cfg(test)]
impl Link {
    /// Lanes that have a place here.
    pub fn places(&self) -> usize {
        self.tx_queues.len()
    }

    /// Operations that the peer was asked for and has not answered.
    pub fn asked(&self) -> u32 {
        let asked = |state: &tx_queue::LaneState| match state {
            tx_queue::LaneState::Asked(asked) => *asked,
            _ => 0,
        };
        self.tx_queues.all().iter().map(|tx| asked(&tx.lock().state)).sum()
    }

    /// Closes the link as a look does that found nothing unfinished.
    pub fn close_idle(&self) {
        self.route.close();
    }
}
