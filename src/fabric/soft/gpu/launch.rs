//! From a batch to a submission: which of the GPU's engines does what, and the driver's calls.

use super::batch::{add_large, piece_of, BatchStep, NextSubmission, PIECE};
use super::deferred::Copy;
use super::device::{CopyWay, Device, Load};
use super::in_flight::{ProcessorTime, Submission};
use super::near::NearGroups;
use super::op::{Op, Owner};
use super::plan::{plan, KernelState, Mover, Waiting};
use super::state::EngineState;
use crate::error::Error;
use crate::memory::gpu::cuda_error;
use crate::memory::registry::Registry;
use oxygin_ffi::cuda::{Copies, MemOpKind};
use std::time::Duration;

/// After a submission whose stores by the stream were late copy engines store in so many of the next ones, which costs
/// some 9 µs each but waits for nobody.
pub const STORES_BY_COPY: u32 = 256;
/// Submissions of bulk copies that are in flight at once: one that runs and one behind it.
const BULK_SUBMISSIONS: usize = 2;
/// For so long after one that was late copies within the GPU go by pinned memory where that is quicker. Whether the
/// processors are free by then only the next one tells, and may wait 2.4 ms for it.
const LATE_FOR: Duration = Duration::from_secs(1);
/// Bytes after which a submission of bulk copies is full: about 50 µs at the speed of NVLink.
const BULK_BYTES: u64 = 16 << 20;

impl EngineState {
    /// Whether both ends of an operation between GPU memories are on this engine's own GPU for the driver, which has
    /// the GPU's processors copy then: in a private context that waits for its time slice, 2.4 ms beside a kernel of
    /// the application's. So it has them copy as well where each of two processes sees its own GPU alone.
    pub fn is_near(&self, op: &Op) -> bool {
        op.is_within(self.private_gpu())
    }

    /// The GPU's number for the driver, if the streams are in a private context.
    fn private_gpu(&self) -> Option<i32> {
        self.device.as_ref().filter(|d| d.has_private_context()).map(Device::ordinal)
    }

    /// Whether a copy of the last [`LATE_FOR`] within the GPU has waited for its processors.
    pub fn were_processors_late(&self) -> bool {
        self.processors_late.is_some_and(|at| at.elapsed() < LATE_FOR)
    }

    /// Gives copies within the GPU their places in the staging memory; `NextSubmission::add` has seen to it that there
    /// are enough. Pieces of what has several go out and come back at once, by two streams.
    fn place_near(&mut self, batch: &mut NextSubmission) -> Option<NearGroups> {
        let device = self.device.as_ref()?;
        let is_long = batch.near_bytes > PIECE || batch.near_begun > 0;
        let mut groups = (is_long && device.has_near_stream()).then(|| NearGroups::after(batch.near_begun));
        let (near, away, into) = (&batch.near.copies, &mut batch.away.copies, &mut batch.into);
        for (to, from, bytes) in near.iter() {
            let (bytes, mut at) = (bytes as u64, 0);
            while at < bytes {
                let n = piece_of(bytes - at, PIECE);
                let (to, from) = (to + at, from + at);
                match (self.staging.take(n).map(|offset| device.staging(offset)), &mut groups) {
                    (Some(by), Some(groups)) => groups.push(to, from, n, by),
                    (Some(by), None) => {
                        away.push(by, from, n as usize);
                        into.push(to, by, n as usize);
                    }
                    // Slow, not wrong: the GPU's processors do it.
                    (None, _) => away.push(to, from, n as usize),
                }
                at += n;
            }
        }
        groups
    }

    /// Has copy engines do the stores, behind the copies.
    fn store_by_copy(&mut self, batch: &mut NextSubmission) {
        let mover = batch.stores(self, 0).mover();
        let (Mover::CopyEngine, Some(device)) = (mover, &self.device) else { return };
        self.store_by_copy -= 1;
        let Some(offset) = self.staging.take(8 * batch.ops.len() as u64) else { return };
        for (i, op) in batch.ops.drain(..).enumerate() {
            let offset = offset + 8 * i as u64;
            let (at, value, bytes) = match op.parse() {
                Some((at, MemOpKind::Write64(value))) => (at, value, 8),
                Some((at, MemOpKind::Write32(value))) => (at, value.into(), 4),
                _ => continue,
            };
            // SAFETY: eight bytes of the staging memory that were just taken.
            unsafe { device.staging_host(offset).cast::<u64>().write(value) };
            batch.into.push(at, device.staging(offset), bytes);
        }
    }

    /// Starts a batch.
    pub fn launch(&mut self, rank: u32, batch: &mut NextSubmission) {
        let number = self.small.started + 1;
        let (operations, copies, stores) = (batch.finished.len(), batch.copies(), batch.ops.len());
        let near = self.place_near(batch);
        self.store_by_copy(batch);
        let Some(device) = &self.device else {
            let why = Error::internal("a transfer reached a rank without a GPU");
            batch.finished.drain(..).for_each(|o| self.refused.fail(o, &why));
            return;
        };
        let sample = self.stats.before_launch();
        let may_store_by_copy = !batch.ops.is_empty() && !batch.needs_ops && device.has_private_context();
        let timed = may_store_by_copy.then(|| {
            let near = near.iter().flat_map(NearGroups::copies);
            ProcessorTime::of_stores(near.chain([&batch.away.copies, &batch.into]))
        });
        let load = Load { copies: &batch.away.copies, near: near.as_ref(), into: &batch.into, ops: &mut batch.ops };
        // SAFETY: windows are checked and wait for submissions before they go; callers keep their ends until
        // completion; staging memory is given back when the submission is done.
        let result = unsafe { device.launch(CopyWay::Small, number, load) };
        self.stats.launched(sample.as_ref(), operations, copies, stores);
        if let Err(e) = result {
            // Part of it may run; its flag never comes.
            let why = cuda_error(&format!("a transfer on the GPU of rank {rank}"), &e);
            batch.finished.drain(..).for_each(|o| self.refused.add(o, why.clone()));
            return self.fail(why);
        }
        self.small.started = number;
        if !batch.outward.is_empty() {
            self.small.outward = number;
        }
        let mut submission = self.small.spare();
        (submission.number, submission.staged, submission.sample) = (number, self.staging.position(), sample);
        submission.by_processors = timed;
        std::mem::swap(&mut submission.finished, &mut batch.finished);
        std::mem::swap(&mut submission.outward, &mut batch.outward);
        self.small.submissions.push_back(submission);
        self.handover.call(operations);
    }

    /// Whether a submission is worth its cost now.
    pub fn may_start(&self) -> bool {
        if self.kernel_has_turn() {
            return false;
        }
        let Some(op) = self.queue.ready.front() else { return false };
        let waiting = Waiting {
            in_flight: self.small.submissions.len(),
            most: self.tuning.submissions,
            queued: self.queue.ready.len(),
            gather: self.tuning.gather,
            left: op.len - op.done,
            from_gpu: op.from.is_on_gpu(),
        };
        waiting.is_due()
    }

    /// Whether the first operation of the queue waits for the copy kernel, which takes it, because kernels of others
    /// add to this rank's signals: it adds as they do, and the stream would have to wait until they are gone.
    fn is_better_by_kernel(&mut self, op: &Op) -> bool {
        if !op.stores_sum() || !self.alone.has_visitors() {
            return false;
        }
        let facts = self.facts(op, KernelState::Takes(self.handover.size()), self.copies_beside(op, 0));
        plan(&facts) == Mover::CopyKernel && self.handover.call_now()
    }

    /// Builds one submission and starts it. `false`: nothing can start now.
    pub fn start(&mut self, rank: u32, registry: &Registry) -> bool {
        let mut batch = std::mem::take(&mut self.batch).begin(self);
        let mut any = false;
        loop {
            let Some(mut op) = self.queue.ready.pop_front() else { break };
            if op.owner.lane.is_over() {
                op.owner.give_up();
                any = true;
                continue;
            }
            if self.is_better_by_kernel(&op) {
                self.queue.ready.push_front(op);
                break;
            }
            let mut facts = self.facts(&op, self.handover.for_stream(), self.copies_beside(&op, 0));
            let mut mover = plan(&facts);
            if mover == Mover::WorkerBlocks {
                if self.handover.call_size(facts.wanted_size()) {
                    self.queue.ready.push_front(op);
                    break;
                }
                facts.kernel = KernelState::Absent;
                mover = plan(&facts);
            }
            if let Mover::BulkStream | Mover::Deferred = mover {
                self.queue.defer(op, mover == Mover::BulkStream);
                any = true;
                continue;
            }
            self.handover.note(&facts);
            match batch.add(self, registry, &mut op) {
                Ok(BatchStep::Done) => {
                    batch.finished.push(op.owner);
                    any = true;
                    if batch.is_full() {
                        break;
                    }
                }
                Ok(BatchStep::Later { progress }) => {
                    self.queue.ready.push_front(op);
                    any |= progress;
                    break;
                }
                Err(why) => {
                    self.refused.add(op.owner, why.context(format!("rank {rank}")));
                    any = true;
                }
            }
        }
        if batch.has_work() {
            self.launch(rank, &mut batch);
        } else if let Some(last) = self.small.submissions.back_mut() {
            // Done by the CPU alone, but local completion keeps its order.
            last.finished.append(&mut batch.finished);
        } else {
            batch.finished.drain(..).for_each(Owner::complete);
        }
        batch.clear();
        self.batch = batch;
        any && self.failure.is_none()
    }

    /// Starts bulk copies that wait for room on their stream. Returns whether anything was started or given up.
    pub fn start_bulk(&mut self, rank: u32, registry: &Registry) -> bool {
        let mut any = false;
        while self.bulk.submissions.len() < BULK_SUBMISSIONS {
            let Some(device) = &self.device else { return any };
            let gpu = self.private_gpu();
            let (mut copies, mut bytes, mut has_near) = (Copies::default(), 0, false);
            let number = self.bulk.started + 1;
            for (op, copy) in self.queue.deferred.waiting() {
                let left = op.len - op.done;
                if !op.owner.lane.is_over() {
                    match add_large(&mut copies, &self.windows, registry, op) {
                        Ok(()) => {
                            *copy = Copy::Up(number);
                            bytes += left;
                            has_near |= op.is_within(gpu);
                            if bytes >= BULK_BYTES {
                                break;
                            }
                            continue;
                        }
                        Err(why) => self.refused.add(op.owner.unowned(), why.context(format!("rank {rank}"))),
                    }
                }
                // Released with what came before it, and given up then: its lane has failed.
                *copy = Copy::None;
                any = true;
            }
            if copies.is_empty() {
                if any {
                    self.queue.release(self.bulk.done);
                }
                return any;
            }
            let load = Load { copies: &copies, near: None, into: &Copies::default(), ops: &mut [] };
            // SAFETY: as for `launch`.
            if let Err(e) = unsafe { device.launch(CopyWay::Bulk, number, load) } {
                self.fail(cuda_error(&format!("a transfer on the GPU of rank {rank}"), &e));
                return true;
            }
            self.stats.bulk(copies.len());
            self.bulk.started = number;
            let by_processors = has_near.then(|| ProcessorTime::of_copies(bytes));
            self.bulk.submissions.push_back(Submission { number, by_processors, ..Submission::default() });
            any = true;
        }
        any
    }
}
