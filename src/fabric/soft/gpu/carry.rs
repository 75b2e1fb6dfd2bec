//! What goes by the courier, and what by the stream: never both at once, so that order is kept.

use super::courier::{command, is_heavy, is_light, CLOSE, HEAVY_FROM};
use super::op::{Op, Owner};
use super::state::State;
use std::time::Instant;

/// So many operations in a row of the courier's kind are worth letting flights end for, so that it can take over.
const STREAK: u32 = 16;
/// Operations of one flight that are many.
const MANY: usize = 4;
/// With so many other copies about, those of more than `CROWDED_BYTES` are quicker by the copy engines, many in one call; the
/// courier does them one after another, at 1 to 2 GB/s. Signals and small values, of which a barrier brings many at once, are
/// no crowd: a flight among them would cost each of them its time.
pub const CROWD: usize = 3;
pub const CROWDED_BYTES: u64 = 256;
/// How far into the queue a copy looks for others.
const LOOK_AHEAD: usize = 16;

impl State {
    /// Completes what the courier has done, and takes back what one that is gone has not.
    pub fn land_carried(&mut self) -> bool {
        let Some(courier) = self.courier.as_mut() else { return false };
        if courier.is_off() && !courier.take_over() {
            return false;
        }
        let mut moved = false;
        while let Some(op) = courier.land() {
            op.owner.complete();
            self.back += 1;
            moved = true;
        }
        if courier.is_off() && courier.is_busy() {
            let leftovers: Vec<Op> = courier.leftovers().collect();
            self.back += leftovers.len() as u64;
            let mut at = 0;
            for op in leftovers {
                // Not added after all.
                if let Some(s) = op.signal {
                    let _ = self.windows.add(s.rkey, s.remote, s.value.wrapping_neg());
                }
                if self.is_leaving(&op.owner.lane) {
                    op.owner.give_up();
                } else {
                    self.put_back(at, op);
                    at += 1;
                }
            }
            moved = true;
        }
        // At once: flights would start otherwise.
        if let Some(courier) = self.courier.as_mut().filter(|c| c.is_off()) {
            courier.take_over();
        }
        moved
    }

    /// Copies among the next operations of the queue, that no longer count as small; not more than make a crowd.
    pub fn copies_waiting(&self) -> usize {
        let next = self.queue.iter().take(LOOK_AHEAD);
        next.filter(|op| op.len - op.done > CROWDED_BYTES).take(CROWD).count()
    }

    /// The same, if it matters to an operation.
    fn copies_beside(&self, op: &Op) -> usize {
        if op.len > CROWDED_BYTES {
            self.copies_waiting()
        } else {
            0
        }
    }

    /// The largest copy for the courier, with so many other copies beside it.
    fn limit(&self, others: usize) -> u64 {
        self.tuning.courier.min(if others < CROWD { u64::MAX } else { CROWDED_BYTES })
    }

    /// The largest copy, wherever from, that is quicker by hands than by a flight; one within the GPU is beyond that, too
    /// (`is_for_hands`). With others about copy engines do more at a time.
    fn reach(&self, others: usize) -> u64 {
        if self.tuning.hands > 0 && others < CROWD {
            self.tuning.far
        } else {
            0
        }
    }

    /// Gives the courier what it can take from the front of the queue. Returns whether that was anything.
    pub fn carry(&mut self) -> bool {
        if self.queue.is_empty() || !self.small.is_empty() {
            return false;
        }
        let Some(mut courier) = self.courier.take_if(|c| c.is_up()) else { return false };
        let mut any = false;
        while courier.has_room() {
            let Some(op) = self.queue.pop_front() else { break };
            any = true;
            if op.owner.lane.health.has_failed() {
                op.owner.give_up();
                continue;
            }
            let others = self.copies_beside(&op) + courier.copies();
            let is_in_reach = is_heavy(&op, HEAVY_FROM) && op.len <= self.reach(others);
            let limit = self.limit(others);
            let by_hands = courier.has_hands() && op.len > limit && (is_in_reach || self.is_for_hands(&op, HEAVY_FROM));
            let Some(op) = self.park(op, by_hands) else { continue };
            match command(&op, &mut self.windows, limit, by_hands) {
                Some(command) => {
                    if by_hands {
                        // What finds hands wants the next launches to have some as much as what misses them.
                        courier.wants_hands();
                    }
                    courier.post(op, command);
                }
                None => {
                    self.queue.push_front(op);
                    any = courier.is_busy();
                    break;
                }
            }
        }
        if any {
            courier.stay_up();
        }
        self.courier = Some(courier);
        any
    }

    /// Whether no flight may start now: the courier has operations, or is about to take over once flights have landed. One
    /// that does not get its place on the GPU costs no more than that flights come one at a time until it is late.
    pub fn courier_has_turn(&mut self) -> bool {
        let Some(courier) = &self.courier else { return false };
        courier.is_busy()
            || !courier.is_off() && self.streak >= STREAK && !self.small.is_empty()
            || self.hands_have_turn()
    }

    /// An operation goes by the stream; or goes on, which says nothing new.
    pub fn note(&mut self, op: &Op) {
        let others = self.copies_beside(op);
        let (limit, reach) = (self.limit(others), self.reach(others));
        let Some(courier) = self.courier.as_mut().filter(|_| op.done == 0 && op.reading.is_none()) else { return };
        self.streak = if is_light(op, limit.max(reach)) { self.streak.saturating_add(1) } else { 0 };
        if self.streak > 0 && op.len > limit {
            // Too much for the courier itself.
            courier.wants_hands();
        }
    }

    /// A flight of so many operations has started. If the courier could have carried them, and they are many or the last
    /// time is not long ago, it is called.
    pub fn call_courier(&mut self, operations: usize) {
        let Some(courier) = self.courier.as_mut().filter(|c| c.is_off() && self.streak > 0) else { return };
        let (now, before) = (Instant::now(), self.last_light);
        self.last_light = Some(now);
        if operations < MANY && before.is_none_or(|before| now - before > CLOSE) {
            return;
        }
        courier.launch(now);
    }

    /// Everything that was given to the courier, for it to fail.
    pub fn take_carried(&mut self) -> Vec<Owner> {
        let all: Vec<Owner> =
            self.courier.as_mut().map(|c| c.give_up().map(|op| op.owner).collect()).unwrap_or_default();
        self.back += all.len() as u64;
        all
    }
}
