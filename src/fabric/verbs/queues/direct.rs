//! Operations that go straight to the device, by their lane's own work requests.

use super::super::lane::{Lane, Logged};
use super::super::outcome::Outcomes;
use super::super::template::Again;
use super::Queues;
use crate::rma::op::Put;
use oxygin_ffi::verbs::types::ibv_send_wr;
use std::ffi::c_void;
use std::ptr::null_mut;

impl Queues {
    /// Posts a put when nothing stands in the way and returns its request; `None`, with no effect: take the long way.
    ///
    /// # Safety
    /// As for `Context::post`.
    #[inline(always)]
    pub unsafe fn put(&mut self, peer: u32, put: &Put, outcomes: &Outcomes) -> Option<u64> {
        let lane = self.lanes.get_mut(peer as usize)?;
        let request = lane.admits()?;
        if put.more || put.len > self.device.max_msg || (put.len == 0 && put.signal.is_none()) {
            return None;
        }
        let (first, logged) = lane.template.fill(put);
        lane.count(put.len);
        let lane = &raw mut *lane;
        // SAFETY: the lane's work requests are filled in; the caller vouches for the range.
        unsafe { self.post(lane, request, first, logged, outcomes) };
        Some(request)
    }

    /// [`Queues::put`] once more, with completions taken where the lane is at its limit.
    ///
    /// # Safety
    /// As for `Context::post`.
    #[cold]
    #[inline(never)]
    pub unsafe fn put_with_room(&mut self, peer: u32, put: &Put, outcomes: &Outcomes) -> Option<u64> {
        if !self.reopen(peer, outcomes) {
            return None;
        }
        // SAFETY: passed on.
        unsafe { self.put(peer, put, outcomes) }
    }

    /// Posts a put with a signal between the windows that the lane remembers and stores its request; `false`, with no
    /// effect: other windows, or something stands in the way.
    ///
    /// # Safety
    /// As for `Context::post`; `peer` is one of the lanes; what the request goes to is writable.
    #[inline(always)]
    pub unsafe fn put_again(&mut self, peer: u32, a: &impl Again, outcomes: &Outcomes) -> bool {
        // A bare signal, or more than one message.
        if a.size().wrapping_sub(1) >= self.device.max_msg {
            return false;
        }
        // SAFETY: the caller's promise.
        let lane = unsafe { self.lanes.get_unchecked_mut(peer as usize) };
        let Some(request) = lane.admits() else { return false };
        let Some(first) = lane.template.again(a) else { return false };
        let size = a.size();
        lane.count(size);
        let logged = Logged { remote: lane.template.remote(), len: size as u32 };
        // Before the device is called, so that nothing has to be kept for afterwards.
        // SAFETY: writable (caller).
        unsafe { a.store(request as *mut c_void) };
        let lane = &raw mut *lane;
        // SAFETY: as in `put`.
        unsafe { self.post(lane, request, first, logged, outcomes) };
        true
    }

    /// Hands a lane's own work requests to the device.
    ///
    /// # Safety
    /// `lane` is one of the lanes, and the work requests from `first` on are its own and filled in.
    #[inline(always)]
    unsafe fn post(
        &mut self,
        lane: *mut Lane,
        request: u64,
        first: *mut ibv_send_wr,
        logged: Logged,
        outcomes: &Outcomes,
    ) {
        // SAFETY: the caller's promise.
        let lane = unsafe { &mut *lane };
        lane.note(request as u32, logged);
        lane.admit(request);
        // SAFETY: the queue pair is live; the caller vouches for the local range, and the device checks keys and
        // ranges.
        let rc = unsafe { (self.device.post_send)(lane.qp, first, &mut self.bad) };
        if rc != 0 {
            self.refused(outcomes);
        }
    }

    /// The device refused the newest operation, or the signal behind its data: what it did not take waits. Everything
    /// is still in the work requests, whose addresses tell the lane, so that nothing is kept for this. Whether it was
    /// want of room or worse is found out when it is posted again.
    #[cold]
    #[inline(never)]
    fn refused(&mut self, outcomes: &Outcomes) {
        let bad = std::mem::replace(&mut self.bad, null_mut());
        let Some(peer) = self.lanes.iter().position(|lane| lane.template.holds(bad)) else {
            // It broke the interface's promise to say which one: nobody knows what it took.
            self.lost(outcomes);
            return;
        };
        let lane = &mut self.lanes[peer];
        let number = lane.issued();
        let (op, taken) = lane.template.refused(bad, lane.noted(number).len == 0);
        lane.shut(number.wrapping_sub(1));
        lane.take(taken);
        lane.unsignalled = taken;
        lane.offset = if taken == 1 { op.len } else { 0 };
        lane.backlog.push_back(op);
        self.wait(peer as u32);
    }
}
