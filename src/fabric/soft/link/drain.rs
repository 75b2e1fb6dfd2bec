//! A context goes, and with it its caller's promise that memory stays valid: what it posted is dropped, and what has
//! begun is waited for, without the link.

use super::remote::Dropped;
use super::tx_queue::{LaneState, TxQueue};
use super::{Link, RouteKind};
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::gpu::Bounce;
use crate::fabric::soft::lane::Lane;
use crate::sys::wait::until;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long destroying a set of contexts waits for copies by the GPU; and for each of `QUANTUM` bytes by the kernel.
pub const LEAVE_WITHIN: Duration = Duration::from_secs(10);

/// What a lane leaves to wait for.
pub struct Draining {
    tx: Arc<TxQueue>,
    bounces: Vec<Bounce>,
    fetches: Option<Arc<Lane>>,
    /// Keeps the peer's windows mapped.
    _fetched: Dropped,
}

impl Link {
    /// The lane's context is gone: what waits is dropped. What has begun goes on until [`Link::wait_left`] has
    /// returned.
    pub fn leave(&self, tx: &Arc<TxQueue>) -> Draining {
        let mut queue = tx.lock();
        self.backlog.fetch_sub(queue.tasks.len(), Ordering::Relaxed);
        let mut bounces: Vec<_> = queue.tasks.drain(..).filter_map(|t| t.bounce).collect();
        let (copying, asked) = match &queue.state {
            LaneState::Failing(failing) => (failing.copying, 0),
            LaneState::Asked(asked) => (false, *asked),
            state => (matches!(state, LaneState::Copying), 0),
        };
        if let LaneState::Failing(failing) = std::mem::replace(&mut queue.state, LaneState::Vacant { copying, asked }) {
            self.backlog.fetch_sub(1, Ordering::Relaxed);
            bounces.extend(failing.into_bounces());
        }
        let fetched = queue.remote.abandon();
        self.backlog.fetch_sub(fetched.len(), Ordering::Relaxed);
        let fetches = queue.remote.fetches().cloned();
        tx.release(queue);
        Draining { tx: tx.clone(), bounces, fetches, _fetched: fetched }
    }

    /// Somebody who goes begins to wait for the GPU to which this leads, until `end`; see [`Domain::wait_by`].
    pub fn begin_wait(&self, end: Instant) {
        if let Some(engine) = self.route.engine() {
            engine.wait_by(end);
        }
    }

    /// Waits until nothing touches memory for the lane; for copies by the GPU at most until `end`.
    pub fn wait_left(&self, shared: &Domain, drain: Draining, end: Instant) {
        drain.bounces.iter().for_each(|b| b.abandon(&shared.engine, end));
        drain.fetches.iter().for_each(|fetches| shared.engine.abandon(fetches, end));
        let lane = &drain.tx.lane;
        if let Some(engine) = self.route.engine() {
            engine.abandon(lane, end);
        }
        self.wait_copied(&drain.tx);
        if self.route.way() == RouteKind::Far {
            shared.tcp().drop_lane(lane, end);
            // This may be the caller's last call, and others may have got the room.
            shared.stir();
        }
        self.tx_queues.remove(&drain.tx);
    }

    /// Waits for the kernel, which may still copy for the lane.
    fn wait_copied(&self, tx: &TxQueue) {
        let is_copied = || !matches!(tx.lock().state, LaneState::Vacant { copying: true, .. });
        if !until(Instant::now() + LEAVE_WITHIN, is_copied) {
            let (peer, waited) = (self.peer, LEAVE_WITHIN.as_secs());
            log::warn!("a copy to or from rank {peer} has not ended {waited} s after its context");
        }
    }
}
