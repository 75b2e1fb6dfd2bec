//! From a batch to a flight: which of the GPU's engines does what, and the driver's calls.

use super::batch::{piece_of, Batch, NEAR_PIECE};
use super::device::{Load, Way};
use super::op::Op;
use super::state::{fail_one, State};
use super::track::Stores;
use crate::error::Error;
use crate::memory::gpu::cuda_error;
use oxygin_ffi::cuda::MemOpKind;

/// After a flight whose stores by the stream were late copy engines store in so many of the next ones, which costs some 9 µs
/// each but waits for nobody …
pub const STORES_BY_COPY: u32 = 256;
/// … where there are not more stores than this: each is a call of 1.3 µs.
pub const FEW_STORES: usize = 32;

impl State {
    /// Whether both ends of an operation between GPU memories are on this engine's own GPU.
    pub fn is_near(&self, op: &Op) -> bool {
        let Some(device) = self.device.as_ref().filter(|d| d.has_own_context()) else { return false };
        op.has_no_caller() || op.home == Some(device.ordinal())
    }

    /// Gives copies within the GPU their places in the staging memory; `Batch::add` has seen to it that there are enough.
    fn place_near(&mut self, batch: &mut Batch) {
        let Some(device) = &self.device else { return };
        let (near, away, into) = (&batch.near.copies, &mut batch.away.copies, &mut batch.into);
        for (to, from, bytes) in near.iter() {
            let (bytes, mut at) = (bytes as u64, 0);
            while at < bytes {
                let n = piece_of(bytes - at, NEAR_PIECE);
                match self.staging.take(n) {
                    Some(offset) => {
                        away.push(device.staging(offset), from + at, n as usize);
                        into.push(to + at, device.staging(offset), n as usize);
                    }
                    // Slow, not wrong: the GPU's processors do it.
                    None => away.push(to + at, from + at, n as usize),
                }
                at += n;
            }
        }
    }

    /// Has copy engines do the stores, behind the copies.
    fn store_by_copy(&mut self, batch: &mut Batch) {
        let may = self.store_by_copy > 0 && !batch.needs_ops && batch.ops.len() <= FEW_STORES;
        let (true, Some(device)) = (may, &self.device) else { return };
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
    pub fn launch(&mut self, rank: u32, batch: &mut Batch) {
        let number = self.small.started + 1;
        let (operations, copies, stores) = (batch.finished.len(), batch.copies(), batch.ops.len());
        self.place_near(batch);
        self.store_by_copy(batch);
        let Some(device) = &self.device else {
            let why = Error::internal("a transfer reached a rank without a GPU");
            batch.finished.drain(..).for_each(|o| fail_one(o, &why));
            return;
        };
        let sample = self.tally.before_launch();
        let may_store_by_copy = !batch.ops.is_empty() && !batch.needs_ops && device.has_own_context();
        let timed = may_store_by_copy.then(|| Stores::begin(&[&batch.away.copies, &batch.into]));
        let load = Load { copies: &batch.away.copies, into: &batch.into, ops: &mut batch.ops };
        // SAFETY: windows are checked and wait for flights before they go; callers keep their ends until completion;
        // staging memory is given back when the flight has landed.
        let result = unsafe { device.launch(Way::Small, number, load) };
        self.tally.launched(sample.as_ref(), operations, copies, stores);
        if let Err(e) = result {
            // Part of it may run; its flag never comes.
            let why = cuda_error(&format!("a transfer on the GPU of rank {rank}"), &e);
            batch.finished.drain(..).for_each(|o| fail_one(o, &why));
            return self.fail(why);
        }
        self.small.started = number;
        if !batch.outward.is_empty() {
            self.outward = number;
        }
        let mut flight = self.spare.pop().unwrap_or_default();
        (flight.number, flight.staged, flight.sample) = (number, self.staging.position(), sample);
        flight.stores = timed;
        std::mem::swap(&mut flight.finished, &mut batch.finished);
        std::mem::swap(&mut flight.outward, &mut batch.outward);
        self.small.flights.push_back(flight);
        self.call_courier(operations);
    }
}
