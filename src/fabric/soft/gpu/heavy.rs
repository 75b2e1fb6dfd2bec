//! Large copies within one GPU: by the courier's hands where they can be had, otherwise by way of pinned memory.
//!
//! Copy engines of a context of our own cannot copy within a GPU without its processors, for which a kernel of the
//! application may leave no time. A kernel in the application's context can, if it comes up: so such a copy calls for the
//! courier, with hands, and waits for it as long as it may still come up in time. If it does not, the copy goes the slow way,
//! and so does one that is not in words of four bytes.

use super::carry::CROWD;
use super::courier::{is_heavy, windows_hold, Courier, HEAVY_FROM};
use super::op::Op;
use super::state::State;
use std::time::Instant;

/// From here on a lone copy is worth a launch, and the wait for it: by way of pinned memory it would take some 10 µs longer, which
/// is what a launch takes, and the next ones find it up.
const WORTH_A_CALL: u64 = 16 << 10;

impl State {
    /// Whether hands can do an operation: a copy within the GPU, of at least so many bytes.
    pub fn is_for_hands(&mut self, op: &Op, from: u64) -> bool {
        let is_of_kind = self.tuning.hands > 0 && is_heavy(op, from) && self.is_near(op);
        // A window that is gone is found out where it goes by the stream; `carry` would never take it.
        is_of_kind && windows_hold(op, &mut self.windows)
    }

    /// Whether the first of the queue waits for hands that run or may come up in time, and no flight may start before it. While
    /// they run `carry` takes it, as soon as flights have landed; while they are awaited, their launch comes up or is late soon.
    pub fn hands_have_turn(&mut self) -> bool {
        if !self.courier.as_ref().is_some_and(Courier::has_hands) {
            return false;
        }
        let Some(op) = self.queue.pop_front() else { return false };
        let waits = self.is_for_hands(&op, HEAVY_FROM);
        self.queue.push_front(op);
        waits
    }

    /// Whether an operation that is about to go by the stream is left to hands instead: some run, or were launched, if need be
    /// now. A launch that is late is no more (`Courier::is_off`), and after some of those there are none for a while
    /// (`Backoff`).
    pub fn leaves_to_hands(&mut self, op: &Op) -> bool {
        let worth = if self.copies_waiting() >= CROWD { HEAVY_FROM } else { WORTH_A_CALL };
        if self.courier.is_none() || !self.is_for_hands(op, worth) {
            return false;
        }
        let Some(courier) = self.courier.as_mut() else { return false };
        courier.wants_hands();
        if courier.is_off() {
            courier.launch(Instant::now());
        }
        courier.has_hands()
    }
}
