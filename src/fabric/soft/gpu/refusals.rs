//! An operation that finds no window, or not the range that it names, fails its lane and nothing else; a GPU that
//! fails, those of all that was unfinished. What was started before runs to its end first, so that nothing touches
//! callers' memory once they are told.

use super::drain::Mark;
use super::op::Owner;
use super::state::EngineState;
use super::Engine;
use crate::error::Error;
use crate::fabric::soft::lane::Lane;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

/// A lane that is about to fail.
struct Refused {
    /// Its first operation that is refused: counted until it is told.
    owner: Owner,
    why: Error,
    /// What had been started then; `None`: that of this turn is not known yet.
    until: Option<Mark>,
}

/// All of them.
#[derive(Default)]
pub struct Refusals {
    all: Vec<Refused>,
    /// How many operations have ever failed, each counted before it is given up.
    told: Arc<AtomicU64>,
}

impl Refusals {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    /// See `Engine::refusals`.
    pub fn told(&self) -> Arc<AtomicU64> {
        self.told.clone()
    }

    /// Fails one operation, and its lane.
    pub fn fail(&self, owner: Owner, why: &Error) {
        owner.lane.fail_as_due(why.clone());
        self.told.fetch_add(1, Ordering::SeqCst);
        owner.give_up();
    }

    /// Begins nothing more of the operation's lane.
    #[cold]
    pub fn add(&mut self, owner: Owner, why: Error) {
        owner.lane.stop();
        self.all.push(Refused { owner, why, until: None });
    }
}

impl EngineState {
    /// Tells those of which nothing is under way any more. Returns whether there were any. Between turns: nothing is
    /// half started.
    #[inline]
    pub fn tell_refused(&mut self) -> bool {
        !self.refused.is_empty() && self.tell()
    }

    #[cold]
    fn tell(&mut self) -> bool {
        let mark = self.mark();
        // Whose GPU has failed is told once what it was at has ended, as far as its streams know; where it was closed
        // nothing more will be known.
        let has_failed = self.failure.is_some();
        let is_over = has_failed && (self.device.is_none() || !self.is_touching_memory());
        let mut waiting = std::mem::take(&mut self.refused.all);
        let mut told = false;
        let mut at = 0;
        while let Some(refused) = waiting.get_mut(at) {
            let until = *refused.until.get_or_insert(mark);
            if !is_over && (has_failed || !self.has_passed(&until)) {
                at += 1;
                continue;
            }
            let Refused { owner, why, .. } = waiting.swap_remove(at);
            self.refused.fail(owner, &why);
            told = true;
        }
        self.refused.all = waiting;
        told
    }
}

impl Engine {
    /// How many operations have ever failed here: once it has grown, some lane says why.
    #[inline]
    pub fn refusals(&self) -> u64 {
        self.refusals.load(Ordering::SeqCst)
    }

    /// The lane fails for a reason of its poster's: what waits is dropped, and it is told once nothing of it is under
    /// way.
    #[cold]
    pub fn refuse(&self, lane: &Arc<Lane>, why: Error) {
        let owner = Owner { lane: lane.clone(), seq: lane.last(), backlog: Arc::new(AtomicUsize::new(1)) };
        let mut state = self.state.lock();
        self.take(&mut state);
        state.refused.add(owner, why);
        drop(state);
        self.poll();
    }
}
