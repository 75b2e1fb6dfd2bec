//! A lane's transmit queue at its link: what waits of it, behind a lock of its own.

use super::fault::Failing;
use super::pulls::Pulls;
use super::remote::RemoteCompletions;
use crate::fabric::soft::gpu::Bounce;
use crate::fabric::soft::lane::Lane;
use crate::rma::op::Op;
use crate::rma::seq::Seq;
use crate::sys::spin::{Spin, SpinGuard};
use crate::sys::sync::RwLock;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// An operation that waits or runs.
pub struct Running {
    /// Its number on the lane.
    pub seq: Seq,
    /// What it does.
    pub work: Op,
    /// Bytes already moved.
    pub done: u64,
    /// The next piece of a source in GPU memory, on its way to another process.
    pub bounce: Option<Bounce>,
    /// All of it is in the peer's ring, and it only awaits confirmation.
    pub is_pushed: bool,
}

/// What a lane is at.
pub enum LaneState {
    /// Nothing waits for a turn.
    Idle,
    /// Its first operation waits for a turn, or has it.
    Ready,
    /// The kernel copies for its first operation, and the lock is free meanwhile.
    Copying,
    /// So many of its first operations wait for the peer, which answers in their order.
    Asked(u32),
    /// An operation of it failed, and nothing more of it begins.
    Failing(Box<Failing>),
    /// Its context is gone.
    Vacant {
        /// The kernel still copies for it.
        copying: bool,
        /// So many answers of the peer are still awaited, and go nowhere.
        asked: u32,
    },
}

/// What the lock is around.
pub struct LaneQueue {
    /// Operations in their order.
    pub tasks: VecDeque<Running>,
    /// Operations that the peer or this rank's engine finishes.
    pub remote: RemoteCompletions,
    /// What the peer fetches of them.
    pub pulls: Pulls,
    /// The newest fence: all before it is in place at the peer once it is complete.
    pub fence: Seq,
    /// What the lane is at.
    pub state: LaneState,
}

/// A lane's transmit queue.
pub struct TxQueue {
    /// The lane.
    pub lane: Arc<Lane>,
    queue: Spin<LaneQueue>,
    /// Somebody has to look: an operation waits for a turn or is in this rank's engine, or a fault is to be told.
    /// Changed under the lock.
    wants: AtomicBool,
    /// The link's queues for which that is so.
    wanting: Arc<AtomicUsize>,
}

impl LaneQueue {
    /// Whether somebody has to look.
    fn wants(&self) -> bool {
        matches!(self.state, LaneState::Ready | LaneState::Failing(_)) || self.remote.wants_look()
    }

    /// Nothing waits for a turn any more, unless an operation is left. Whoever takes out the last one says so: without
    /// operations a lane may never have a turn again.
    pub fn rest(&mut self) {
        if self.tasks.is_empty() && matches!(self.state, LaneState::Ready) {
            self.state = LaneState::Idle;
        }
    }

    /// The kernel's copy for the first operation is over.
    pub fn copied(&mut self) {
        match &mut self.state {
            LaneState::Copying => self.state = LaneState::Ready,
            LaneState::Failing(failing) => failing.copying = false,
            LaneState::Vacant { copying, .. } => *copying = false,
            LaneState::Idle | LaneState::Ready | LaneState::Asked(_) => {}
        }
    }

    /// Forgets what waits, once the peer has failed. Returns how many were counted.
    pub fn drop_all(&mut self) -> usize {
        let counted = self.tasks.len() + self.remote.len() + usize::from(matches!(self.state, LaneState::Failing(_)));
        self.tasks.clear();
        self.remote.clear();
        self.state = match std::mem::replace(&mut self.state, LaneState::Idle) {
            LaneState::Copying => LaneState::Copying,
            LaneState::Failing(failing) if failing.copying => LaneState::Copying,
            LaneState::Vacant { copying, .. } => LaneState::Vacant { copying, asked: 0 },
            _ => LaneState::Idle,
        };
        counted
    }
}

impl TxQueue {
    fn new(lane: Arc<Lane>, wanting: Arc<AtomicUsize>) -> Self {
        let (remote, pulls) = (RemoteCompletions::default(), Pulls::default());
        let queue = LaneQueue { tasks: VecDeque::new(), remote, pulls, fence: Seq(0), state: LaneState::Idle };
        Self { lane, queue: Spin::new(queue), wants: AtomicBool::new(false), wanting }
    }

    /// Takes the lock.
    #[inline]
    pub fn lock(&self) -> SpinGuard<'_, LaneQueue> {
        self.queue.lock()
    }

    /// Takes the lock if nobody has it.
    pub fn try_lock(&self) -> Option<SpinGuard<'_, LaneQueue>> {
        self.queue.try_lock()
    }

    /// Whether somebody has to look, as far as is known without the lock.
    #[inline]
    pub fn wants(&self) -> bool {
        self.wants.load(Ordering::Relaxed)
    }

    /// Lets the lock go, and says whether somebody has to look.
    pub fn release(&self, queue: SpinGuard<'_, LaneQueue>) {
        let wants = queue.wants();
        if self.wants.load(Ordering::Relaxed) == wants {
            return;
        }
        self.wants.store(wants, Ordering::Relaxed);
        match wants {
            true => self.wanting.fetch_add(1, Ordering::Relaxed),
            false => self.wanting.fetch_sub(1, Ordering::Relaxed),
        };
    }

    /// Nothing of it can come any more.
    fn is_empty(&self) -> bool {
        let queue = self.lock();
        matches!(queue.state, LaneState::Vacant { copying: false, asked: 0 }) && queue.remote.is_empty()
    }
}

/// The transmit queues of a link. They change when contexts come and go.
#[derive(Default)]
pub struct TxQueues {
    all: RwLock<Arc<Vec<Arc<TxQueue>>>>,
    /// Those for which somebody has to look.
    wanting: Arc<AtomicUsize>,
}

impl TxQueues {
    /// More of them, in place of those that nothing comes of any more.
    pub fn add(&self, lanes: impl Iterator<Item = Arc<Lane>>) -> Vec<Arc<TxQueue>> {
        let added: Vec<_> = lanes.map(|lane| Arc::new(TxQueue::new(lane, self.wanting.clone()))).collect();
        let mut tx_queues = self.all.write();
        let all = Arc::make_mut(&mut tx_queues);
        all.retain(|tx| !tx.is_empty());
        all.extend(added.iter().cloned());
        added
    }

    /// Takes one out, if nothing comes of it any more. Else it goes when others are added.
    pub fn remove(&self, tx: &Arc<TxQueue>) {
        if !tx.is_empty() {
            return;
        }
        let mut tx_queues = self.all.write();
        if let Some(at) = tx_queues.iter().position(|known| Arc::ptr_eq(known, tx)) {
            Arc::make_mut(&mut tx_queues).remove(at);
        }
    }

    /// Whether somebody has to look at any of them. Threads that poll ask this often, and write nothing by it.
    #[inline]
    pub fn want(&self) -> bool {
        self.wanting.load(Ordering::Relaxed) != 0
    }

    /// How many there are.
    #[cfg(test)]
    pub fn len(&self) -> usize {
        self.all.read().len()
    }

    /// All of them, as they are now.
    pub fn all(&self) -> Arc<Vec<Arc<TxQueue>>> {
        self.all.read().clone()
    }

    /// That of a context, if it is still there.
    pub fn of(&self, context: u32) -> Option<Arc<TxQueue>> {
        self.all.read().iter().find(|tx| tx.lane.context == context).cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_goes_with_its_lane_or_else_when_others_come() {
        let tx_queues = TxQueues::default();
        let lane = |context| Arc::new(Lane::new(context, 0, Arc::default()));
        let known = || tx_queues.all().iter().map(|tx| tx.lane.context).collect::<Vec<_>>();
        let set = |tx: &TxQueue, asked| tx.lock().state = LaneState::Vacant { copying: false, asked };
        let added = tx_queues.add((0..4).map(lane));
        tx_queues.remove(&added[3]);
        assert_eq!(known(), [0, 1, 2, 3], "its context is there");
        set(&added[1], 0);
        tx_queues.remove(&added[1]);
        set(&added[0], 1);
        tx_queues.remove(&added[0]);
        assert_eq!(known(), [0, 2, 3], "an answer for the first one is still to come");
        set(&added[0], 0);
        let seen = tx_queues.all();
        tx_queues.add(std::iter::once(lane(4)));
        assert_eq!((known(), seen.len()), (vec![2, 3, 4], 3));
        assert!(tx_queues.of(0).is_none() && tx_queues.of(4).is_some());
    }
}
