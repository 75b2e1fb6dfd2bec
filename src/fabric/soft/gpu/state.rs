//! What one engine knows: its windows, what waits, what is in flight.

use super::alone::Alone;
use super::batch::NextSubmission;
use super::device::{Device, STAGING_BYTES};
use super::handover::Handover;
use super::in_flight::InFlight;
use super::op::Op;
use super::queue::OperationQueue;
use super::refusals::Refusals;
use super::staging::Staging;
use super::stall::Stall;
use super::standing::StandingWait;
use super::stats::Stats;
use super::windows::Windows;
use crate::config::GpuIssue;
use crate::error::Error;
use crate::fabric::soft::gate::Gate;
use crate::fabric::soft::lane::Lane;
use crate::memory::registry::Registry;
use std::sync::Arc;
use std::time::Instant;

/// Used under the engine's lock; each part has a file of its own.
pub struct EngineState {
    pub tuning: GpuIssue,
    /// Once there is a GPU window.
    pub device: Option<Device>,
    pub handover: Handover,
    pub windows: Windows,
    pub alone: Alone,
    /// Operations that the copy kernel had been given when signals were read last.
    pub given_at_read: u64,
    /// Copy engines store in so many more submissions.
    pub store_by_copy: u32,
    /// When a copy within the GPU had waited for the GPU's processors.
    pub processors_late: Option<Instant>,
    pub queue: OperationQueue,
    pub staging: Staging,
    /// Submissions of the stream for everything but bulk copies.
    pub small: InFlight,
    /// Submissions of the bulk stream.
    pub bulk: InFlight,
    /// Lanes of contexts that go while something of them is in flight.
    pub draining: Vec<Arc<Lane>>,
    /// How often something was done.
    pub completions: u64,
    pub stall: Stall,
    /// Of those who wait for what is in flight because something goes.
    pub standing: StandingWait,
    /// Empty; its memory is kept for the next submission.
    pub batch: NextSubmission,
    pub stats: Stats,
    /// Lanes that are about to fail.
    pub refused: Refusals,
    /// Why nothing works any more.
    pub failure: Option<Error>,
}

impl EngineState {
    /// Of `rank`, with no window, and nothing queued.
    pub fn new(rank: u32, tuning: GpuIssue, gate: Arc<Gate>) -> Self {
        Self {
            tuning,
            device: None,
            handover: Handover::default(),
            windows: Windows::of(rank),
            alone: Alone::new(gate),
            given_at_read: 0,
            store_by_copy: 0,
            processors_late: None,
            queue: OperationQueue::default(),
            staging: Staging::new(STAGING_BYTES),
            small: InFlight::default(),
            bulk: InFlight::default(),
            draining: Vec::new(),
            completions: 0,
            stall: Stall::default(),
            standing: StandingWait::default(),
            batch: NextSubmission::default(),
            stats: Stats::default(),
            refused: Refusals::default(),
            failure: None,
        }
    }

    /// Whether what a submission has read of signals, or is to read, is what they hold when the next one stores:
    /// nothing was started since.
    pub fn reads_hold(&self, submission: u64) -> bool {
        self.small.started <= submission && self.handover.given() == self.given_at_read
    }

    /// Operations come.
    #[inline]
    pub fn queue_up(&mut self, ops: impl Iterator<Item = Op>) {
        let before = self.queue.ready.len();
        self.queue.ready.extend(ops);
        self.windows.note_callers(self.queue.ready.range(before..));
    }

    /// Whether anything is in flight.
    pub fn has_submissions(&self) -> bool {
        !self.small.is_empty() || !self.bulk.is_empty() || self.handover.is_busy()
    }

    /// Whether anything is unfinished.
    pub fn has_work(&self) -> bool {
        self.has_submissions() || !self.queue.is_empty() || !self.refused.is_empty()
    }

    /// Whether the GPU may still read or write what operations named: submissions in flight, and after a refused call
    /// whatever was started before the refusal.
    pub fn is_touching_memory(&self) -> bool {
        self.has_submissions() || self.failure.is_some() && !self.is_idle()
    }

    /// Whether nothing that was started can still touch memory, as far as the driver knows.
    fn is_idle(&self) -> bool {
        self.device.as_ref().is_none_or(Device::is_idle) && self.handover.is_idle()
    }

    /// Completes what is done, then has `take` queue what has come, and starts what can start: what came while a
    /// submission was up goes with the next one. Returns whether something is under way.
    pub fn advance(&mut self, rank: u32, registry: &Registry, take: impl FnOnce(&mut Self)) -> bool {
        let mut moved = self.complete(registry);
        take(self);
        if let Some(failure) = self.failure.clone() {
            self.fail(failure);
        } else {
            moved |= self.dispatch(registry);
            while self.may_start() && self.start(rank, registry) {
                moved = true;
            }
            if !self.queue.deferred.is_empty() {
                moved |= self.start_bulk(rank, registry);
            }
            if self.small.is_empty() && (self.queue.ready.is_empty() || self.handover.is_busy()) {
                self.alone.let_in();
            }
        }
        moved |= self.tell_refused();
        if !moved && self.has_work() {
            self.check(rank);
        }
        // What is queued and waits for the copy kernel alone is under way, too, and what is to be told.
        moved || self.has_submissions() || !self.queue.ready.is_empty() || !self.refused.is_empty()
    }

    /// Fails everything that waits, and whatever comes; says why, the first time. Submissions in flight end, or are
    /// found to have failed: those who wait on the same lanes are told then.
    #[cold]
    pub fn fail(&mut self, why: Error) {
        for op in self.queue.take_all() {
            self.refused.add(op.owner, why.clone());
        }
        self.failure.get_or_insert(why);
        self.tell_refused();
    }
}
