//! A lane fails, and no other: what waits on it is dropped, what is under way runs to its end, and then its caller is
//! told.

use super::tx_queue::{LaneQueue, LaneState, TxQueue};
use super::Link;
use crate::error::Error;
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::gpu::Bounce;
use crate::fabric::soft::lane::ends_peer;
use std::sync::atomic::Ordering;

/// A fault that is not told yet.
pub struct Failing {
    why: Error,
    /// Pieces that the GPU still brings.
    bounces: Vec<Bounce>,
    /// The kernel still copies for the lane.
    pub copying: bool,
}

impl Link {
    /// An operation of a lane failed: ends the lane or, where the error says that the peer is gone, all of them, each
    /// at the next look at it.
    #[cold]
    pub(super) fn fail_lane(&self, shared: &Domain, tx: &TxQueue, queue: &mut LaneQueue, why: Error) {
        if ends_peer(&why) {
            self.health.fail(why);
            self.backlog.fetch_sub(queue.drop_all(), Ordering::Relaxed);
            return;
        }
        let is_copying = match queue.state {
            LaneState::Vacant { .. } => return,
            _ if tx.lane.is_over() => return,
            LaneState::Copying => true,
            _ => false,
        };
        tx.lane.stop();
        self.backlog.fetch_sub(queue.tasks.len(), Ordering::Relaxed);
        let bounces = queue.tasks.drain(..).filter_map(|t| t.bounce).collect();
        if let Some(fetches) = queue.remote.unfinished_fetches() {
            shared.engine.refuse(fetches, why.clone());
        }
        // An answer that still comes finds nobody who waits for it.
        queue.state = LaneState::Failing(Box::new(Failing { why, bounces, copying: is_copying }));
        self.backlog.fetch_add(1, Ordering::Relaxed);
        shared.mark_pending(self.peer);
        self.tell_fault(shared, tx, queue);
    }

    /// Fails all lanes on which something waits.
    #[cold]
    pub(super) fn fail_waiting(&self, shared: &Domain, why: &Error) {
        for tx in self.tx_queues.all().iter() {
            let mut queue = tx.lock();
            if matches!(queue.state, LaneState::Ready) {
                self.fail_lane(shared, tx, &mut queue, why.clone());
            }
            tx.release(queue);
        }
    }

    /// The peer refused an operation of a context, and touches nothing for that one any more.
    #[cold]
    pub fn refused(&self, shared: &Domain, context: u32, why: Error) {
        let Some(tx) = self.tx_queues.of(context) else { return };
        let mut queue = tx.lock();
        let dropped = queue.remote.take_pulls();
        self.backlog.fetch_sub(dropped.len(), Ordering::Relaxed);
        if let LaneState::Vacant { asked, .. } = &mut queue.state {
            // What else is answered finds nobody.
            *asked = 0;
        }
        self.fail_lane(shared, &tx, &mut queue, why);
        tx.release(queue);
        drop(dropped);
    }

    /// Tells the fault of a lane that has nothing under way any more. Returns whether it did.
    #[cold]
    pub(super) fn tell_fault(&self, shared: &Domain, tx: &TxQueue, queue: &mut LaneQueue) -> bool {
        let LaneState::Failing(failing) = &mut queue.state else { return false };
        failing.bounces.retain(|b| matches!(b.is_full(&shared.engine), Ok(false)));
        let fetching = queue.remote.unfinished_fetches().is_some();
        if fetching {
            shared.engine.poll();
        }
        if failing.copying || fetching || !failing.bounces.is_empty() {
            return false;
        }
        // What the peer still copies it only reads, and a deregistration waits for that.
        let dropped = queue.remote.abandon();
        self.backlog.fetch_sub(dropped.len() + 1, Ordering::Relaxed);
        if let LaneState::Failing(failing) = std::mem::replace(&mut queue.state, LaneState::Idle) {
            tx.lane.fail(failing.why);
        }
        true
    }
}

impl Failing {
    /// Its context goes: what is left to wait for.
    pub(super) fn into_bounces(self) -> Vec<Bounce> {
        self.bounces
    }
}
