//! Atomic operations in several steps: one step at a time is with the device, and nothing behind it on the lane.

use super::super::atomic::{Loop, LoopStep};
use super::super::lane::{EntryKind, Lane, Logged};
use super::super::outcome::Outcomes;
use super::super::template::blank;
use super::super::wr_id::WrId;
use super::Queues;
use oxygin_ffi::verbs::types::*;
use std::ptr::null_mut;

impl Lane {
    /// Whether an operation of several steps is under way; the first of the backlog becomes one if everything before it
    /// is complete.
    fn begin_loop(&mut self, completed: u32) -> bool {
        if self.failed {
            return false;
        }
        if self.loops.current.is_some() {
            return true;
        }
        let is_next = !self.flushing && self.backlog.front().is_some_and(|op| op.kind == EntryKind::Loop);
        if !is_next || !self.is_drained(completed) {
            return false;
        }
        let (Some(entry), Some(wanted)) = (self.backlog.pop_front(), self.loops.waiting.pop_front()) else {
            return false;
        };
        let number = self.sent.wrapping_add(1);
        self.note(number, Logged::of(&entry));
        self.loops.current = Some(Loop::begin(wanted, entry));
        self.flushing = true;
        true
    }
}

impl Queues {
    /// Posts the next step of an atomic operation at the front of a lane. Never more than one: returns whether another
    /// chain may follow.
    pub(super) fn post_looped(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        let own = self.device.rank;
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        if !lane.begin_loop(outcomes.completed(peer)) {
            return false;
        }
        let number = lane.sent.wrapping_add(1);
        let Some(looped) = lane.loops.current.filter(|l| !l.is_up) else { return false };
        let (slot, lkey) = (looped.entry.local, looped.entry.lkey);
        let mut sge = ibv_sge { addr: slot, length: 8, lkey };
        let mut wr = ibv_send_wr { sg_list: &mut sge, num_sge: 1, send_flags: IBV_SEND_SIGNALED, ..blank() };
        let mut on_own = false;
        match (looped.step, looped.device()) {
            (LoopStep::Swap { expected, swap }, _) => {
                let (remote_addr, rkey) = (looped.around(), looped.entry.rkey);
                wr.wr_id = WrId::looped(peer, number);
                wr.opcode = IBV_WR_ATOMIC_CMP_AND_SWP;
                wr.wr.atomic = ibv_wr_atomic { remote_addr, compare_add: expected, swap, rkey };
            }
            (LoopStep::Deliver, Some((remote_addr, rkey))) => {
                if !self.own_has_room(peer, outcomes) {
                    return false;
                }
                on_own = true;
                // SAFETY: `wr` points to it, which is on this stack.
                unsafe { (*wr.sg_list).length = looped.bytes() };
                wr.wr_id = WrId::flush(peer, number);
                wr.opcode = IBV_WR_RDMA_WRITE;
                wr.wr.rdma = ibv_wr_rdma { remote_addr, rkey };
            }
            _ => return false,
        }
        let by = if on_own { own } else { peer };
        let Some(qp) = self.lanes.get(by as usize).map(|l| l.qp) else { return false };
        let mut bad = null_mut();
        // SAFETY: the queue pair is live; the slot outlives it, and the device checks keys and ranges.
        let rc = unsafe { (self.device.post_send)(qp, &mut wr, &mut bad) };
        if rc != 0 {
            self.refused_chain(peer, by, rc, std::ptr::eq(bad, &wr), outcomes);
            return false;
        }
        if let Some(by) = self.lanes.get_mut(by as usize) {
            // Its limit was for operations alone.
            by.shut(by.issued());
            by.take(1);
        }
        if on_own {
            self.wait(own);
        }
        if let Some(looped) = self.lanes.get_mut(peer as usize).and_then(|lane| lane.loops.current.as_mut()) {
            looped.is_up = true;
        }
        false
    }

    /// The device has done a step.
    pub(super) fn looped(&mut self, peer: u32, outcomes: &Outcomes) {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        lane.give(1);
        let Some(looped) = lane.loops.current.as_mut() else { return };
        looped.advance(&self.registry);
        if looped.step == LoopStep::Done {
            lane.loops.current = None;
            lane.flushing = false;
            lane.sent = lane.sent.wrapping_add(1);
            outcomes.complete(peer, lane.sent);
        }
        self.wait(peer);
    }
}
