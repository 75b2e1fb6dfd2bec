//! A context goes, and with it its caller's promise that memory stays valid: what it posted is dropped, and what has begun is
//! waited for, without the link.

use super::outs::Dropped;
use super::{Link, Queue, Route};
use crate::fabric::soft::gpu::Bounce;
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::shared::Shared;
use std::sync::atomic::Ordering;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long destroying a context waits for copies by the GPU, and then for one of `QUANTUM` bytes by the
/// kernel.
pub const LEAVE_WITHIN: Duration = Duration::from_secs(10);

/// What a lane leaves to wait for.
pub struct Leaving {
    slot: u32,
    lane: Arc<Lane>,
    bounces: Vec<Bounce>,
    fetches: Arc<Lane>,
    /// Keeps the peer's windows mapped.
    _fetched: Dropped,
}

impl Link {
    /// The lane's context is gone: what waits is dropped. What has begun goes on until [`Link::wait_left`] has returned.
    pub fn leave(&self, slot: u32) -> Option<Leaving> {
        let mut state = self.state.lock();
        let queue = state.queues.get_mut(slot as usize)?;
        self.backlog.fetch_sub(queue.tasks.len(), Ordering::Relaxed);
        let bounces = queue.tasks.drain(..).filter_map(|t| t.bounce).collect();
        // An answer on its way keeps the place: the next lane there might take it for one to its own question.
        queue.vacant = true;
        let fetched = queue.outs.abandon();
        self.backlog.fetch_sub(fetched.len(), Ordering::Relaxed);
        let (lane, fetches) = (queue.lane.clone(), queue.outs.fetches.clone());
        Some(Leaving { slot, lane, bounces, fetches, _fetched: fetched })
    }

    /// Waits until nothing touches memory for the lane; for copies by the GPU at most until `end`.
    pub fn wait_left(&self, shared: &Shared, leaving: Leaving, end: Instant) {
        leaving.bounces.iter().for_each(|b| b.abandon(&shared.engine, end));
        shared.engine.abandon(&leaving.fetches, end);
        let engine = match &self.state.lock().route {
            Route::Gpu(engine) => Some(engine.clone()),
            _ => None,
        };
        engine.inspect(|e| e.abandon(&leaving.lane, end));
        self.wait_copied(leaving.slot, &leaving.lane);
        if matches!(self.state.lock().route, Route::Tcp) {
            shared.tcp().drop_lane(&leaving.lane);
            // This may be the caller's last call, and others may have got the room.
            shared.stir();
        }
    }

    /// Waits for the kernel, which may still copy for the lane.
    fn wait_copied(&self, slot: u32, lane: &Arc<Lane>) {
        let end = Instant::now() + LEAVE_WITHIN;
        // The next lane may have the place already.
        let copies = |queue: &Queue| queue.copying && Arc::ptr_eq(&queue.lane, lane);
        while copies(&self.state.lock().queues[slot as usize]) {
            if Instant::now() > end {
                let (peer, waited) = (self.peer, LEAVE_WITHIN.as_secs());
                log::warn!("a copy to or from rank {peer} has not ended {waited} s after its context");
                return;
            }
            std::thread::yield_now();
        }
    }
}
