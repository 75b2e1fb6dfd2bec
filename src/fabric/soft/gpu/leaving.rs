//! Waiting until what was started for a context or a window that goes has landed. It is done in short turns, each with the
//! engine's lock, in between which others go on: a GPU may stand for as long as its application likes.

use super::state::State;
use super::{Engine, DRAIN_WITHIN};
use crate::fabric::soft::lane::Lane;
use std::sync::Arc;
use std::time::Instant;

/// The last that had been started at some moment.
#[derive(Clone, Copy)]
pub struct Mark {
    small: u64,
    bulk: u64,
    carried: u64,
}

impl State {
    /// What has been started by now.
    fn mark(&self) -> Mark {
        let with_courier = self.courier.as_ref().map_or(0, |c| c.busy_with() as u64);
        Mark { small: self.small.started, bulk: self.bulk.started, carried: self.back + with_courier }
    }

    /// Whether nothing of that touches memory any more.
    fn has_passed(&self, mark: &Mark) -> bool {
        if self.failure.is_some() {
            return !self.is_touching_memory();
        }
        self.small.landed >= mark.small && self.bulk.landed >= mark.bulk && self.back >= mark.carried
    }

    /// Whether the lane is going: what the courier leaves undone of it is not queued again.
    pub fn is_leaving(&self, lane: &Arc<Lane>) -> bool {
        self.leaving.iter().any(|l| Arc::ptr_eq(l, lane))
    }
}

impl Engine {
    /// Drops what waits on a lane and waits, at most until `end`, for what is in flight by now: its memory may go. Nothing
    /// more is submitted on the lane.
    pub fn abandon(&self, lane: &Arc<Lane>, end: Instant) {
        if lane.is_idle() {
            return;
        }
        let mut state = self.state.lock();
        self.take(&mut state);
        state.forget(lane);
        state.leaving.push(lane.clone());
        drop(state);
        if self.pass(end) {
            self.state.lock().leaving.retain(|l| !Arc::ptr_eq(l, lane));
        } else {
            log::warn!(
                "rank {}: transfers of a context to or from rank {} are unfinished on the GPU after its end",
                self.rank,
                lane.peer
            );
        }
    }

    /// Ends a window; waits until nothing that was started touches it any more.
    pub fn remove_window(&self, id: u32) {
        self.state.lock().windows.remove(id);
        if !self.pass(Instant::now() + DRAIN_WITHIN) {
            log::warn!(
                "rank {}: transfers on its GPU are unfinished {} s after a window was deregistered",
                self.rank,
                DRAIN_WITHIN.as_secs()
            );
        }
    }

    /// Waits for what is in flight by now. `false`: at `end` it still is.
    fn pass(&self, end: Instant) -> bool {
        let mut state = self.state.lock();
        let mark = state.mark();
        loop {
            let moved = state.land(&self.registry);
            if state.has_passed(&mark) {
                return true;
            }
            if !moved {
                state.check(self.rank);
            }
            if Instant::now() > end {
                return false;
            }
            drop(state);
            std::thread::yield_now();
            state = self.state.lock();
        }
    }
}
