//! A context of the software fabric: a lane to each peer, and one more to this rank for what the library itself posts.

use super::atomic::ATOMICS;
use super::lane::Lane;
use super::lanes::Lanes;
use super::link::{TxQueue, LEAVE_WITHIN};
use super::progress::Progress;
use crate::error::Result;
use crate::fabric::lanes::{Holds, LaneServer};
use crate::fabric::{CreditIndex, Flush, Posted, Sent};
use crate::rma::atomic::Atomics;
use crate::rma::op::Op;
use crate::rma::seq::Seq;
use std::ops::Range;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

/// Operations between two polls: a caller that only ever finds its requests done must still receive.
const POLL_EVERY: u32 = 64;
/// Tests of operations that are not the oldest unfinished one of their lane, between two polls.
const LATER_EVERY: u32 = 16;

/// One context. Its lanes have locks of their own; those to a peer of this host share its ring, for as long as a
/// message is written there.
pub struct Context {
    shared: Arc<Progress>,
    tx_queues: Box<[Arc<TxQueue>]>,
    /// To this rank, for operations of the library's own: what an application does wrong to itself must not fail these.
    internal: Arc<TxQueue>,
    /// Counts tests of later operations; one caller at a time as for everything in a context, so no more than a hint.
    tests: AtomicU32,
    /// Until when the contexts that were made together, and so go together, wait for what is under way; from the first
    /// one's end on.
    leave_by: Arc<OnceLock<Instant>>,
}

impl Context {
    /// The contexts with these numbers, which no other context of the communicator has had. `confirms`: their puts are
    /// complete only when they are visible at the peer.
    pub fn make(shared: &Arc<Progress>, numbers: Range<u32>, confirms: bool) -> Vec<Self> {
        let links = shared.links();
        let mut tx_queues: Vec<_> = numbers.clone().map(|_| Vec::with_capacity(links.len())).collect();
        for link in links {
            let lane = |n| Lane::new(n, link.peer, link.health.clone()).confirming(confirms);
            let lanes = numbers.clone().map(|n| Arc::new(lane(n)));
            let added = link.add_lanes(lanes);
            tx_queues.iter_mut().zip(added).for_each(|(tx_queues, tx)| tx_queues.push(tx));
        }
        let own = shared.link(shared.world.rank);
        let internal = own.add_lanes(numbers.map(|n| Arc::new(Lane::new(n, own.peer, own.health.clone()))));
        let leave_by = Arc::new(OnceLock::new());
        let context = |(tx_queues, internal): (Vec<_>, _)| {
            let (shared, leave_by) = (shared.clone(), leave_by.clone());
            Self { shared, tx_queues: tx_queues.into(), internal, tests: AtomicU32::new(0), leave_by }
        };
        tx_queues.into_iter().zip(internal).map(context).collect()
    }

    #[inline(always)]
    fn post_any(
        &self,
        tx: &TxQueue,
        ops: &[Op],
        credit: Option<CreditIndex>,
        begin: impl FnOnce(usize),
    ) -> Result<Posted> {
        let posted = self.shared.link(tx.lane.peer).post(&self.shared, tx, ops, credit, begin)?;
        if (posted.last.0 % POLL_EVERY) < posted.taken as u32 {
            self.shared.poll();
        }
        Ok(posted)
    }

    #[inline]
    fn test_on(&self, lane: &Lane, seq: Seq) -> Result<bool> {
        if lane.test(seq)? {
            return Ok(true);
        }
        // Requests complete in order: only the oldest one's test has news to wait for. NCCL tests all of them, up to
        // 256, for each operation that it starts; whoever spins on a later one still makes progress.
        if !lane.is_oldest(seq) {
            let n = self.tests.load(Ordering::Relaxed).wrapping_add(1);
            self.tests.store(n, Ordering::Relaxed);
            if n % LATER_EVERY != 0 {
                return Ok(false);
            }
        }
        self.shared.poll();
        lane.test(seq)
    }
}

#[cfg(test)]
impl Context {
    /// Has the lane to a peer, as one who posts or moves something there.
    pub fn hold(&self, peer: u32) -> impl Drop + '_ {
        self.tx_queues[peer as usize].lock()
    }

    /// Has the kernel copy for the lane to a peer, from a window of it, and something happen meanwhile.
    pub fn copy_while(&self, peer: u32, window: u32, meanwhile: impl FnOnce()) {
        self.shared.link(peer).copy_while(&self.shared, &self.tx_queues[peer as usize], window, meanwhile);
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // First all, so that nothing new begins for it while one is waited for.
        let own = self.shared.link(self.internal.lane.peer);
        let links = self.shared.links().iter().zip(&self.tx_queues).chain([(own, &self.internal)]);
        let drain: Vec<_> = links.map(|(link, tx)| (link, link.leave(tx))).collect();
        let end = *self.leave_by.get_or_init(|| {
            let end = Instant::now() + LEAVE_WITHIN;
            // What stands does so for all from now on, although each is waited for by itself.
            self.shared.wait_by(end);
            drain.iter().for_each(|(link, _)| link.begin_wait(end));
            end
        });
        drain.into_iter().for_each(|(link, left)| link.wait_left(&self.shared, left, end));
    }
}

impl crate::fabric::Context for Context {
    const NAME: &'static str = "soft";
    /// They share everything that can advance.
    const SHARES_PROGRESS: bool = true;

    #[inline]
    unsafe fn post(&self, peer: u32, ops: &[Op]) -> Result<Posted> {
        self.post_any(&self.tx_queues[peer as usize], ops, None, |_| {})
    }

    #[inline]
    unsafe fn post_internal(&self, _rank: u32, op: &Op) -> Result<Posted> {
        self.post_any(&self.internal, std::slice::from_ref(op), None, |_| {})
    }

    #[inline]
    unsafe fn post_entries(
        &self,
        peer: u32,
        ops: &[Op],
        index: CreditIndex,
        begin: impl FnOnce(usize),
    ) -> Result<Posted> {
        self.post_any(&self.tx_queues[peer as usize], ops, Some(index), begin)
    }

    #[inline]
    fn may_count(&self, peer: u32, rkey: u32) -> bool {
        self.shared.link(peer).may_count(&self.shared, rkey)
    }

    fn paid(&self, peer: u32) -> u32 {
        self.tx_queues[peer as usize].lane.paid()
    }

    /// A get is complete when its bytes are in memory: nothing is left to order.
    fn flush(&self, peer: u32, _into: Option<u32>) -> Result<Flush> {
        self.tx_queues[peer as usize].lane.check().map(|()| Flush::Done)
    }

    fn fence(&self, peer: u32) -> Result<Flush> {
        self.shared.link(peer).fence(&self.shared, &self.tx_queues[peer as usize])
    }

    #[inline]
    fn test(&self, peer: u32, seq: Seq) -> Result<bool> {
        self.test_on(&self.tx_queues[peer as usize].lane, seq)
    }

    fn test_internal(&self, _rank: u32, seq: Seq) -> Result<bool> {
        self.test_on(&self.internal.lane, seq)
    }

    #[inline]
    fn progress(&self) -> Result<()> {
        self.shared.poll();
        Ok(())
    }

    fn has_error(&self) -> bool {
        self.shared.look_at_peers();
        self.shared.engine.has_failed() || self.tx_queues.iter().chain([&self.internal]).any(|p| p.lane.has_failed())
    }

    fn atomics(&self) -> Atomics {
        ATOMICS
    }

    fn sent(&self, peer: u32) -> Sent {
        self.tx_queues[peer as usize].lane.sent()
    }

    fn completed(&self, peer: u32) -> &AtomicU32 {
        self.tx_queues[peer as usize].lane.completed()
    }

    fn completed_internal(&self, _rank: u32) -> &AtomicU32 {
        self.internal.lane.completed()
    }

    fn lane_kernel(&self, holds: Holds) -> Option<Box<dyn LaneServer>> {
        Some(Box::new(Lanes::open(&self.shared, holds)?))
    }
}
