//! Waiting until what was started for a context or a window that goes is done. It is done in short turns, each with the
//! engine's lock, in between which others go on: a GPU may stand for as long as its application likes.

use super::batch::gone;
use super::state::EngineState;
use super::windows::Windows;
use super::{Engine, DRAIN_WITHIN};
use crate::fabric::soft::lane::Lane;
use crate::sys::wait::Wait;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The last that had been started at some moment.
#[derive(Clone, Copy)]
pub struct Mark {
    small: u64,
    bulk: u64,
    by_kernel: u64,
}

impl EngineState {
    /// What has been started by now.
    pub(super) fn mark(&self) -> Mark {
        Mark { small: self.small.started, bulk: self.bulk.started, by_kernel: self.handover.given() }
    }

    /// Whether nothing of that touches memory any more.
    pub(super) fn has_passed(&self, mark: &Mark) -> bool {
        if self.failure.is_some() {
            return !self.is_touching_memory();
        }
        self.small.done >= mark.small && self.bulk.done >= mark.bulk && self.handover.back >= mark.by_kernel
    }

    /// Until when somebody who goes waits for what is in flight, with time until `end`. What is done was completed.
    pub(super) fn wait_by(&mut self, end: Instant) -> Instant {
        if self.is_touching_memory() {
            return self.standing.end(end, self.completions);
        }
        self.standing.over();
        end
    }

    /// Operations that wait and whose caller's end is in this window of another rank fail, if it is gone.
    fn refuse_from(&mut self, rank: u32, id: u32) {
        let windows = &self.windows;
        let unwanted = self.queue.remove(|op| Windows::is_from(op, rank, id) && !windows.has_caller(op.window, 0, 0));
        for op in unwanted {
            let why = gone(op.window.map_or(id, |w| w.key), op.from.addr(), op.len);
            match op.owner.lane.is_over() {
                true => op.owner.give_up(),
                false => self.refused.add(op.owner, why),
            }
        }
    }

    /// Whether the lane is going: what the copy kernel leaves undone of it is not queued again.
    pub fn is_draining(&self, lane: &Arc<Lane>) -> bool {
        self.draining.iter().any(|l| Arc::ptr_eq(l, lane))
    }
}

impl Engine {
    /// Drops what waits on a lane and waits, at most until `end`, for what is in flight by now: its memory may go.
    /// Nothing more is submitted on the lane.
    pub fn abandon(&self, lane: &Arc<Lane>, end: Instant) {
        if lane.is_idle() {
            return;
        }
        let mut state = self.state.lock();
        self.take(&mut state);
        state.queue.forget(lane);
        state.draining.push(lane.clone());
        drop(state);
        if self.pass(end) {
            self.state.lock().draining.retain(|l| !Arc::ptr_eq(l, lane));
        } else {
            log::warn!(
                "rank {}: transfers of a context to or from rank {} are unfinished on the GPU after its end",
                self.rank,
                lane.peer
            );
        }
    }

    /// Until when somebody who goes waits for this GPU, with time until `end`: earlier where it stands, and others have
    /// waited for that.
    pub fn wait_by(&self, end: Instant) -> Instant {
        let mut state = self.state.lock();
        state.complete(&self.registry);
        state.wait_by(end)
    }

    /// Ends a window; waits until nothing that was started touches it any more. `false`: something still may, after
    /// that time.
    pub fn remove_window(&self, id: u32, within: Duration) -> bool {
        self.state.lock().windows.remove(id);
        self.pass(Instant::now() + within)
    }

    /// Ends a window of another rank of this process, or of this rank's own in host memory, whose operations are here:
    /// those that wait fail. Waits until nothing that was started touches it any more. `false`: something still may,
    /// after that time.
    pub fn withdraw_caller(&self, rank: u32, id: u32, is_gpu: bool, within: Duration) -> bool {
        let refuse = || {
            let mut state = self.state.lock();
            self.take(&mut state);
            let was_used = is_gpu || state.windows.is_host_caller(rank, id);
            state.windows.withdraw_caller(rank, id);
            state.refuse_from(rank, id);
            was_used
        };
        if !refuse() {
            return true;
        }
        let has_passed = self.pass(Instant::now() + within);
        // What the copy kernel left undone waits again.
        refuse();
        self.state.lock().windows.leave_caller(rank, id);
        has_passed
    }

    /// Another window of that rank has this number from here on. What still names the old one fails.
    pub fn admit_caller(&self, rank: u32, id: u32) {
        let mut state = self.state.lock();
        self.take(&mut state);
        state.refuse_from(rank, id);
        state.windows.admit_caller(rank, id);
    }

    /// Waits for what is in flight by now. `false`: the GPU may still be at work.
    pub fn settle(&self) -> bool {
        self.pass(Instant::now() + DRAIN_WITHIN) && self.state.lock().failure.is_none()
    }

    /// Waits for what is in flight by now. `false`: at `end` it still is.
    fn pass(&self, end: Instant) -> bool {
        let mut state = self.state.lock();
        let mark = state.mark();
        let mut moved = state.complete(&self.registry);
        let (end, mut wait) = (state.wait_by(end), Wait::begin());
        loop {
            if state.has_passed(&mark) {
                state.standing.over();
                return true;
            }
            match moved {
                true => wait.begin_anew(),
                false => state.check(self.rank),
            }
            // Without a device nothing can end any more.
            if state.device.is_none() || Instant::now() > end {
                return false;
            }
            drop(state);
            wait.rest();
            state = self.state.lock();
            moved = state.complete(&self.registry);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The engine closed while the GPU stood.
    #[test]
    fn nobody_waits_for_an_engine_that_has_closed() {
        let engine = Engine::new(0, [0; 16], Arc::default(), &Default::default());
        let began = Instant::now();
        assert!(engine.remove_window(1, Duration::from_secs(60)), "nothing was started");
        engine.state.lock().small.started = 1;
        assert!(!engine.remove_window(1, Duration::from_secs(60)));
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}
