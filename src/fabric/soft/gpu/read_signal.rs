//! Signals whose values are in GPU memory alone, as kernels may reset them, or others have added to them. Where the
//! stream cannot add, one submission reads such a value, and the next one stores the sum.

use super::batch::{BatchKind, BatchStep, NextSubmission};
use super::op::Op;
use super::state::EngineState;
use crate::error::{Error, Result};
use crate::memory::key::Key;
use crate::rma::op::Signal;
use oxygin_ffi::cuda::MemOp;

impl NextSubmission {
    /// Whether an operation's signal can be added to only once a submission has read it.
    pub(super) fn has_to_read_for(&self, s: &EngineState, op: &Op) -> bool {
        op.signal.filter(|_| op.reading.is_none()).is_some_and(|signal| {
            Key(signal.rkey).is_on_gpu()
                && s.windows.is_unknown(signal.rkey, signal.remote)
                && s.device.as_ref().is_some_and(|device| !device.can_add)
                && !self.read.iter().any(|(at, _)| *at == signal.remote)
        })
    }

    /// A signal whose value is in GPU memory alone.
    pub(super) fn add_to_memory(&mut self, s: &mut EngineState, op: &mut Op, signal: &Signal) -> Result<BatchStep> {
        let device = s.device.as_ref().ok_or_else(|| Error::internal("a GPU window without a GPU"))?;
        if device.can_add {
            self.needs_ops = true;
            match self.join_last(op, signal.remote, BatchKind::Addition) {
                Some(i) => self.ops[i] = self.ops[i].plus(signal.value),
                None => {
                    let addition = MemOp::add64(signal.remote, signal.value);
                    self.push_op(op, addition, signal.remote, BatchKind::Addition);
                }
            }
            return Ok(BatchStep::Done);
        }
        if let Some((_, value)) = self.read.iter_mut().find(|(at, _)| *at == signal.remote) {
            *value = value.wrapping_add(signal.value);
            let sum = *value;
            self.store_signal(op, signal.remote, sum, signal.value);
            return Ok(BatchStep::Done);
        }
        match op.reading {
            None if !self.ops.is_empty() => Ok(BatchStep::Later { progress: true }),
            None => {
                // It sees all stores of the submissions before it, there are none in this one, and nothing follows
                // until it is done.
                let (from, bytes) = s.windows.around(signal.rkey, signal.remote);
                self.away.push(device.scratch(), from, bytes as usize, None);
                let reading = s.small.started + 1;
                op.reading = Some(reading);
                s.given_at_read = s.handover.given();
                // Where nobody resets signals those around it are known from then on. They may be forgotten again among
                // stores of one submission, of which what was read knows nothing.
                if s.windows.may_be_reset(signal.rkey) {
                    let is_read = |at: u64| at.checked_sub(from).is_some_and(|at| at < bytes);
                    s.queue.note_reading(reading, |other| other.rkey == signal.rkey && is_read(other.remote));
                }
                Ok(BatchStep::Later { progress: true })
            }
            Some(submission) if s.small.done < submission => Ok(BatchStep::Later { progress: false }),
            Some(_) => {
                let sum = s.windows.take_up(signal, |bytes| device.scratch_values((bytes / 8) as usize));
                if s.windows.is_unknown(signal.rkey, signal.remote) {
                    self.read.push((signal.remote, sum));
                }
                self.store_signal(op, signal.remote, sum, signal.value);
                Ok(BatchStep::Done)
            }
        }
    }
}
