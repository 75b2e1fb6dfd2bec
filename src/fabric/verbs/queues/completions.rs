//! What comes back from the device.

use super::super::lane::Logged;
use super::super::outcome::Outcomes;
use super::super::status::kind;
use super::super::wr_id::WrId;
use super::events::LOOK_EVERY;
use super::Queues;
use crate::error::Kind;
use oxygin_ffi::verbs::types::*;
use std::sync::atomic::Ordering;

/// Completions taken by one poll.
pub(super) const BATCH: usize = 32;

/// How far [`Queues::take`] got.
#[derive(Clone, Copy)]
pub struct Taken {
    /// The first completion of the batch that it did not take.
    next: *const ibv_wc,
    /// How many there are from there on; negative: the device refuses.
    left: i32,
}

impl Queues {
    /// Takes one batch of completions as far as they are those of operations that went straight to the device, and
    /// well. Returns whether there were any, or `Err`: there is more to do, by [`Queues::settle`].
    #[inline(always)]
    pub fn take(&mut self, outcomes: &Outcomes) -> Result<bool, Taken> {
        let first = self.completions.as_mut_ptr();
        // SAFETY: the queue is live and the array holds BATCH completions.
        let mut left = unsafe { (self.device.poll_cq)(self.device.cq, BATCH as i32, first) };
        if left <= 0 {
            return self.took_none(left);
        }
        let completed = outcomes.completed.as_ptr();
        let mut next: *const ibv_wc = first;
        while left > 0 {
            // SAFETY: poll_cq wrote as many completions as it says.
            let wc = unsafe { &*next };
            let wr_id = WrId(wc.wr_id);
            if wc.status != IBV_WC_SUCCESS || !wr_id.is_next() {
                return Err(Taken { next, left });
            }
            debug_assert!(wr_id.next_peer() < outcomes.completed.len());
            // SAFETY: this wr_id was made for one of the lanes, and there are as many counts as lanes.
            let count = unsafe { &*completed.add(wr_id.next_peer()) };
            // Written under the context's lock only.
            count.store(count.load(Ordering::Relaxed).wrapping_add(1), Ordering::Release);
            // SAFETY: at most one past the last.
            next = unsafe { next.add(1) };
            left -= 1;
        }
        if !self.waiting.is_empty() {
            return Err(Taken { next, left });
        }
        Ok(true)
    }

    /// What [`Queues::take`] returns where there are no completions: kept out of its way.
    #[inline(never)]
    fn took_none(&mut self, left: i32) -> Result<bool, Taken> {
        let taken = Taken { next: self.completions.as_ptr(), left };
        if left < 0 || !self.waiting.is_empty() {
            return Err(taken);
        }
        self.empty += 1;
        if self.empty >= LOOK_EVERY {
            return Err(taken);
        }
        Ok(false)
    }

    /// The rest of the batch, and what waits. Returns whether there were completions.
    #[cold]
    #[inline(never)]
    pub fn settle(&mut self, taken: Taken, outcomes: &Outcomes) -> bool {
        let any = taken.left > 0 || !std::ptr::eq(taken.next, self.completions.as_ptr());
        if taken.left != 0 {
            self.unusual_from(taken, outcomes);
        }
        if !any {
            self.empty += 1;
            if self.empty >= LOOK_EVERY {
                self.look(outcomes);
            }
        }
        self.pump_all(outcomes);
        any
    }

    /// The completions that are left, the first of which is not that of an operation that went straight, and well.
    fn unusual_from(&mut self, taken: Taken, outcomes: &Outcomes) {
        if taken.left < 0 {
            self.lost(outcomes);
            return;
        }
        for i in 0..taken.left as usize {
            // SAFETY: the batch has as many from `next` on; they are read before the next poll.
            let wc = unsafe { *taken.next.add(i) };
            let wr_id = WrId(wc.wr_id);
            if wc.status == IBV_WC_SUCCESS && wr_id.is_next() {
                let peer = wr_id.peer();
                outcomes.complete(peer, outcomes.completed(peer).wrapping_add(1));
            } else {
                self.unusual(&wc, outcomes);
            }
        }
    }

    #[cold]
    #[inline(never)]
    pub(super) fn lost(&mut self, outcomes: &Outcomes) {
        for peer in 0..self.lanes.len() as u32 {
            self.fail(peer, outcomes, Kind::DeviceFailed, || {
                "the device's library gives no answer that makes sense; look for the device in the kernel log".into()
            });
        }
    }

    /// An error, the end of a chain, what is no operation, a flush, or a received message.
    fn unusual(&mut self, wc: &ibv_wc, outcomes: &Outcomes) {
        let wr_id = WrId(wc.wr_id);
        let peer = wr_id.peer();
        if wc.status != IBV_WC_SUCCESS {
            self.broken(wc, outcomes);
            return;
        }
        if let Some(slots) = wr_id.chain_slots() {
            if let Some(lane) = self.lanes.get_mut(peer as usize) {
                lane.give(slots);
            }
            outcomes.complete(peer, wr_id.number());
            return;
        }
        if let Some(slots) = wr_id.aside_slots() {
            if let Some(lane) = self.lanes.get_mut(peer as usize) {
                lane.give(slots);
            }
            return;
        }
        if wr_id.is_loop() {
            return self.looped(peer, outcomes);
        }
        if wr_id.is_flush() {
            if let Some(own) = self.lanes.get_mut(self.device.rank as usize) {
                own.give(1);
            }
            if let Some(lane) = self.lanes.get_mut(peer as usize) {
                lane.flushing = false;
                lane.loops.current = None;
                lane.sent = wr_id.number();
            }
            outcomes.complete(peer, wr_id.number());
            self.wait(peer);
            return;
        }
        let (Some(messages), true) = (&mut self.messages, wr_id.is_receive()) else { return };
        if self.lanes.get(peer as usize).is_none_or(|lane| lane.failed) {
            // A signal behind one that was refused may announce what is not there.
            return;
        }
        match messages.received(peer, wr_id.number(), wc.byte_len) {
            Ok(()) => {
                if messages.owes(peer) {
                    self.wait(peer);
                }
            }
            Err(sentence) => self.fail(peer, outcomes, Kind::Protocol, || sentence),
        }
    }

    #[cold]
    #[inline(never)]
    fn broken(&mut self, wc: &ibv_wc, outcomes: &Outcomes) {
        let wr_id = WrId(wc.wr_id);
        let peer = wr_id.peer();
        let number = match wr_id {
            t if t.is_next() => Some(outcomes.completed(peer).wrapping_add(1)),
            t if t.is_part() || t.is_loop() || t.is_flush() || t.chain_slots().is_some() => Some(t.operation()),
            _ => None,
        };
        let logged = self.lanes.get(peer as usize).zip(number).map(|(lane, number)| lane.noted(number));
        let logged = logged.or_else(|| wr_id.aside_slots().map(|_| Logged::ASIDE));
        // The rank that the broken queue pair leads to: a flush goes over the one to this rank itself.
        let by = if wr_id.is_flush() { self.device.rank } else { peer };
        if by != peer {
            self.fail(by, outcomes, kind(wc.status), || outcomes.explain(by, wc, logged));
        }
        let flushed = wc.status == IBV_WC_WR_FLUSH_ERR && !wr_id.is_flush();
        if self.device.closes && flushed && self.is_idle(peer, outcomes) {
            self.close(peer, outcomes);
            return;
        }
        self.fail(peer, outcomes, kind(wc.status), || outcomes.explain(by, wc, logged));
    }
}
