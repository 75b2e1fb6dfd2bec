//! What is done once a submission has been executed.

use super::device::{CopyWay, Device};
use super::in_flight::Outward;
use super::launch::STORES_BY_COPY;
use super::op::{Owner, TransferEnd};
use super::state::EngineState;
use super::windows::Windows;
use crate::memory::registry::Registry;
use std::time::Instant;

impl EngineState {
    /// Completes submissions that are done. Returns whether there were any.
    pub fn complete(&mut self, registry: &Registry) -> bool {
        let mut moved = self.complete_dispatched(registry);
        let Some(device) = &self.device else { return false };
        if !self.small.is_empty() {
            let flag = device.flag(CopyWay::Small);
            while let Some(mut submission) = self.small.pop_done(flag) {
                for bytes in submission.outward.drain(..) {
                    // SAFETY: the submission that wrote the staging bytes is done, and they are not given back yet.
                    unsafe { deliver(device, &self.windows, registry, &bytes) };
                }
                submission.finished.drain(..).for_each(Owner::complete);
                self.staging.give_back(submission.staged);
                if submission.by_processors.take().is_some_and(|s| s.is_late()) {
                    self.store_by_copy = STORES_BY_COPY;
                }
                self.small.begin_next();
                if let Some(sample) = submission.sample.take() {
                    self.stats.finished(sample);
                }
                self.small.keep(submission);
                moved = true;
            }
        }
        if !self.bulk.is_empty() {
            let flag = device.flag(CopyWay::Bulk);
            let before = self.bulk.done;
            while let Some(submission) = self.bulk.pop_done(flag) {
                if submission.by_processors.is_some_and(|s| s.is_late()) {
                    self.processors_late = Some(Instant::now());
                }
                self.bulk.begin_next();
            }
            if self.bulk.done > before {
                moved = true;
                self.queue.release(self.bulk.done);
            }
        }
        if moved {
            self.stall.ends();
            self.completions += 1;
        }
        moved
    }
}

/// Copies bytes from the staging memory to where they are to go in host memory.
///
/// # Safety
/// They are there, and nobody has been given their place; a caller's memory takes so many.
pub unsafe fn deliver(device: &Device, windows: &Windows, registry: &Registry, bytes: &Outward) {
    let held;
    // A window that is gone gets nothing.
    let to = match bytes.to {
        TransferEnd::Caller { addr, .. } if windows.may_deliver(bytes.window) => addr as *mut u8,
        TransferEnd::Caller { .. } => return,
        TransferEnd::Window { key, addr } => {
            held = registry.hold();
            let Some(to) = held.resolve(key, addr, bytes.len) else { return };
            to
        }
    };
    // SAFETY: the bytes are there (caller); the destination is in a held window or the caller's until completion.
    unsafe { std::ptr::copy_nonoverlapping(device.staging_host(bytes.offset), to, bytes.len as usize) };
}
