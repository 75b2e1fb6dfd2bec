//! An operation is refused: its lane fails, others go on. The lane's frames begun are finished from copies, answers
//! to it thrown away, and its caller is told once nobody touches its memory any more.

use super::drain::Lent;
use super::*;
use crate::fabric::soft::lane::Lane;

/// A lane whose fault is not told yet.
pub struct Failing {
    lane: Arc<Lane>,
    why: Error,
    lent: Lent,
    /// Copies by the GPU that were under way.
    copies: Option<Vec<u64>>,
}

impl Failing {
    /// Nothing is under way any more, or nobody can know.
    pub fn tell(self) {
        self.lane.fail_as_due(self.why);
    }
}

impl Initiator {
    /// Fails a lane for a reason that is its own.
    #[cold]
    pub fn fail_lane(&mut self, lane: &Arc<Lane>, why: Error) {
        if lane.is_stopped() {
            return;
        }
        lane.stop();
        let lent = self.drop_lane(lane);
        let copies = self.gpu.pools().map(|s| s.mark());
        self.failing.push(Failing { lane: lane.clone(), why, lent, copies });
        // Told by the next look at what waits for the GPU: nothing may land any more that calls for one.
        self.gpu.renew();
    }

    /// Fails the lane that has a turn.
    #[cold]
    pub(super) fn refuse(&mut self, at: usize, why: Error) -> Turn {
        if let Some(lane) = self.lanes[at].as_ref().map(|queue| queue.lane.clone()) {
            self.fail_lane(&lane, why.context(format!("towards rank {}", lane.peer)));
        }
        Turn::Empty
    }

    /// Fails lanes whose answers find no window.
    #[cold]
    pub(super) fn take_withdrawn(&mut self, stripe: usize) {
        for (at, key) in std::mem::take(&mut self.conns[stripe].withdrawn) {
            self.refuse(at as usize, local::withdrawn(key));
        }
    }

    /// What the peer refused, as far as the context is still there.
    #[cold]
    pub(super) fn take_refusals(&mut self, stripe: usize) {
        for (why, context, place) in std::mem::take(&mut self.conns[stripe].refusals) {
            let lane = self.lane_of(context);
            if let Some(lane) = lane {
                self.fail_lane(&lane, refusal(lane.peer, why, context, &place));
            }
        }
    }

    /// Tells faults of lanes that have nothing under way any more. Returns whether there were any.
    #[inline]
    pub fn tell_faults(&mut self) -> bool {
        !self.failing.is_empty() && self.tell_some()
    }

    #[cold]
    fn tell_some(&mut self) -> bool {
        let mut told = false;
        for failing in std::mem::take(&mut self.failing) {
            let (pools, copies) = (self.gpu.pools(), &failing.copies);
            let landed = pools
                .zip(copies.as_ref())
                .is_none_or(|(pools, mark)| pools.has_passed(mark) && !pools.is_filled_in_vain());
            if landed && self.were_back(&failing.lent) {
                self.reuse_of(&failing.lent);
                failing.tell();
                told = true;
            } else {
                self.failing.push(failing);
            }
        }
        told
    }
}
