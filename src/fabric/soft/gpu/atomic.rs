//! Atomic operations on words in this rank's GPU memory, and on words of host memory behind what is put there.
//!
//! Only this engine changes the word for peers, so it may read, change and store it in turn: all submissions before
//! have been done when it reads, and none starts before it stores. What kernels change in between is lost, but for a
//! plain addition where the driver can add: RDMA devices without PCIe atomics promise as much (`Atomicity::Fabric`).

use super::batch::{gone, BatchKind, BatchStep, NextSubmission};
use super::op::{Op, Owner, TransferEnd};
use super::state::EngineState;
use crate::error::{Error, Result};
use crate::fabric::soft::atomic::change;
use crate::memory::key::Key;
use crate::memory::registry::Registry;
use crate::rma::atomic::{Change, Width};
use oxygin_ffi::cuda::MemOp;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

/// What a word held before: written once, by the engine.
#[derive(Default)]
pub struct Cell {
    value: AtomicU64,
    is_set: AtomicBool,
}

impl Cell {
    /// One whose value is known.
    pub fn holding(value: u64) -> Self {
        Self { value: AtomicU64::new(value), is_set: AtomicBool::new(true) }
    }

    fn set(&self, value: u64) {
        self.value.store(value, Ordering::Relaxed);
        self.is_set.store(true, Ordering::Release);
    }

    /// What it held, once that is known. The change itself is visible when the operation is complete.
    pub fn get(&self) -> Option<u64> {
        self.is_set.load(Ordering::Acquire).then(|| self.value.load(Ordering::Relaxed))
    }
}

/// Where the fetched value goes.
pub enum To {
    /// Nowhere.
    Nowhere,
    /// To a caller in this process.
    Caller(TransferEnd),
    /// To whoever answers a peer.
    Cell(Arc<Cell>),
}

/// What is left to do of an atomic operation.
pub struct AtomicStep {
    /// What becomes of the word.
    pub change: Change,
    /// Its bytes.
    pub width: Width,
    /// The key of its window.
    pub key: u32,
    /// Its address.
    pub addr: u64,
    /// Where what it held goes.
    pub to: To,
}

impl Op {
    /// An atomic operation.
    pub fn fetching(owner: Owner, fetch: AtomicStep) -> Self {
        let nowhere = TransferEnd::Caller { addr: 0, gpu: false };
        Self { fetch: Some(Box::new(fetch)), ..Self::copy(owner, nowhere, nowhere, 0) }
    }
}

/// Where a word of `width` lies in the 8-byte word around it: that one's address, and bits below.
fn around(addr: u64, width: Width) -> (u64, u32) {
    match width {
        Width::Eight => (addr, 0),
        Width::Four => (addr & !7, (addr & 4) as u32 * 8),
    }
}

impl NextSubmission {
    /// Carries out an atomic operation, or begins to.
    pub fn add_fetch(&mut self, s: &mut EngineState, registry: &Registry, op: &mut Op) -> Result<BatchStep> {
        let Some(fetch) = op.fetch.take() else { return Ok(BatchStep::Done) };
        let step = self.add_fetch_of(s, registry, op, &fetch);
        op.fetch = Some(fetch);
        step
    }

    fn add_fetch_of(
        &mut self,
        s: &mut EngineState,
        registry: &Registry,
        op: &mut Op,
        fetch: &AtomicStep,
    ) -> Result<BatchStep> {
        let later = Ok(BatchStep::Later { progress: self.has_work() });
        // Bytes for host memory are there when the CPU has delivered them.
        if !self.outward.is_empty() || s.small.outward > s.small.done {
            return later;
        }
        let &AtomicStep { change: what, width, key, addr, .. } = fetch;
        let bytes = width.bytes();
        if let To::Caller(side) = &fetch.to {
            if !s.windows.has_caller(op.window, side.addr(), bytes) {
                return Err(gone(op.window.map_or(0, |w| w.key), side.addr(), bytes));
            }
        }
        if !Key(key).is_on_gpu() {
            // The CPU changes it, once the GPU has done what comes before.
            if self.has_work() || !s.small.is_empty() {
                return later;
            }
            let Some(place) = self.place(s, &fetch.to, bytes) else { return Ok(BatchStep::Later { progress: false }) };
            let held = registry.hold();
            let at = held.resolve(key, addr, bytes).filter(|_| addr % bytes == 0);
            // SAFETY: an aligned word inside a window that is held.
            let old = unsafe { change(at.ok_or_else(|| gone(key, addr, bytes))?, &what, width) };
            drop(held);
            self.deliver(s, fetch, place, old);
            return Ok(BatchStep::Done);
        }
        if !s.windows.holds(key, addr, bytes) || addr % bytes != 0 {
            return Err(gone(key, addr, bytes));
        }
        if !self.takes_store(s) {
            return later;
        }
        let (word, shift) = around(addr, width);
        // A signal whose value the engine knows is a sum of additions and may be changed here, too.
        let known = s.windows.add(key, word, 0).ok();
        let old = match known {
            Some(sum) => sum >> shift & width.mask(),
            None => match self.read_word(s, op, addr, width)? {
                Ok(old) => old,
                Err(step) => return Ok(step),
            },
        };
        let Some(place) = self.place(s, &fetch.to, bytes) else { return later };
        if let Some(new) = what.of(old, width) {
            self.needs_ops = true;
            let store = match (known, width) {
                (Some(sum), _) => {
                    let value = sum & !(width.mask() << shift) | new << shift;
                    let _ = s.windows.add(key, word, value.wrapping_sub(sum));
                    MemOp::write64(word, value)
                }
                (None, Width::Four) => MemOp::write32(addr, new as u32),
                (None, Width::Eight) => match (what, s.device.as_ref().is_some_and(|d| d.can_add)) {
                    (Change::FetchAdd { add, boundary: 0 }, true) => MemOp::add64(addr, add),
                    _ => MemOp::write64(addr, new),
                },
            };
            // Where all of the word is stored no later signal in it may join what was stored before.
            let at = if known.is_some() { word } else { addr };
            self.push_op(op, store, at, BatchKind::Data);
        }
        self.deliver(s, fetch, place, old);
        Ok(BatchStep::Done)
    }

    /// What a word in GPU memory holds: read by a submission of its own, which sees all stores of the submissions
    /// before it, and nothing follows until it is done. `Err`: it is not known yet.
    fn read_word(
        &mut self,
        s: &mut EngineState,
        op: &mut Op,
        addr: u64,
        width: Width,
    ) -> Result<std::result::Result<u64, BatchStep>> {
        let device = s.device.as_ref().ok_or_else(|| Error::internal("a GPU window without a GPU"))?;
        Ok(match op.reading {
            Some(submission) if s.small.done >= submission && !self.has_work() => {
                op.reading = None;
                Ok(device.scratch_value() & width.mask())
            }
            Some(submission) if s.small.done < submission => Err(BatchStep::Later { progress: false }),
            _ if self.has_work() => Err(BatchStep::Later { progress: true }),
            _ => {
                self.away.push(device.scratch(), addr, width.bytes() as usize, None);
                op.reading = Some(s.small.started + 1);
                Err(BatchStep::Later { progress: true })
            }
        })
    }

    /// Room for a fetched value on its way into GPU memory; `None`: there is none now.
    fn place(&self, s: &mut EngineState, to: &To, bytes: u64) -> Option<Option<u64>> {
        match to {
            To::Caller(side) if side.is_on_gpu() => self.stage(s, bytes).map(|(offset, _)| Some(offset)),
            _ => Some(None),
        }
    }

    fn deliver(&mut self, s: &EngineState, fetch: &AtomicStep, place: Option<u64>, old: u64) {
        let bytes = fetch.width.bytes() as usize;
        match (&fetch.to, place, &s.device) {
            (To::Nowhere, ..) => {}
            (To::Cell(cell), ..) => cell.set(old),
            (To::Caller(side), Some(offset), Some(device)) => {
                let at = device.staging_host(offset);
                // SAFETY: bytes of the staging memory that were just taken; x86 has the low ones first.
                unsafe { std::ptr::copy_nonoverlapping((&raw const old).cast(), at, bytes) };
                self.into.push(side.addr(), device.staging(offset), bytes);
            }
            // SAFETY: the caller's memory is writable until the operation completes (Context::post).
            (To::Caller(side), ..) => unsafe {
                std::ptr::copy_nonoverlapping((&raw const old).cast(), side.addr() as *mut u8, bytes)
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::GpuIssue;
    use crate::fabric::soft::gate::Gate;
    use crate::fabric::soft::lane::Lane;
    use crate::memory::gpu::SignalRules;
    use crate::memory::registry::Extent;
    use crate::rma::op::Signal;
    use crate::rma::seq::Seq;
    use oxygin_ffi::cuda::MemOpKind;
    use std::sync::atomic::AtomicUsize;

    /// A signal, an addition to the upper half of its word, and a signal again, each of a lane of its own.
    #[test]
    fn no_signal_joins_what_came_before_a_change_of_half_its_word() {
        const WORD: u64 = 0x1000;
        let key = Key::gpu(1, false).0;
        let mut state = EngineState::new(0, GpuIssue::default(), Arc::new(Gate::new(0, None)));
        state.windows.insert(1, Extent { base: WORD, len: 64 }, SignalRules::of_tables(true));
        let mut batch = NextSubmission::default().begin(&state);
        let registry = Registry::default();
        let owner = |context| {
            let lane = Arc::new(Lane::new(context, 0, Arc::default()));
            Owner { lane, seq: Seq(1), backlog: Arc::new(AtomicUsize::new(1)) }
        };
        let signal = |context| {
            let signal = Signal { remote: WORD, rkey: key, value: 5, strong: false };
            Op::signalled(owner(context), signal)
        };
        let (change, width) = (Change::add(1), Width::Four);
        let half = AtomicStep { change, width, key, addr: WORD + 4, to: To::Nowhere };
        // All of them stay: lanes are told apart by their addresses.
        let mut ops = [signal(0), Op::fetching(owner(1), half), signal(2)];
        for op in &mut ops {
            assert!(matches!(batch.add(&mut state, &registry, op), Ok(BatchStep::Done)));
        }
        let mut stores = batch.ops.iter().map(|op| match op.parse() {
            Some((WORD, MemOpKind::Write64(value))) => value,
            other => panic!("{other:?}"),
        });
        assert_eq!(stores.next_back(), Some(10 | 1 << 32), "what is stored last is all that was added");
    }
}
