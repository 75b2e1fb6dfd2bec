//! From operations to one submission: copies, then stores and additions.

use super::coalesce::Coalesced;
use super::device::Device;
use super::in_flight::Outward;
use super::op::{Op, Owner, TransferEnd};
use super::plan::{Mover, Stores, StreamCopy};
use super::state::EngineState;
use super::windows::Windows;
use crate::error::{Error, Result};
use crate::memory::key::Key;
use crate::memory::registry::{Held, Registry};
use crate::rma::op::Signal;
use oxygin_ffi::cuda::{Copies, MemOp, MEM_OPS_MAX};
use std::sync::Arc;

/// Copies of one submission, at most about.
const COPIES_FULL: usize = 256;
/// Stores and additions after which a submission is full: one more operation (a value and its signal) still goes into
/// the same driver call.
const OPS_FULL: usize = MEM_OPS_MAX - 2;
/// Bytes of one piece through staging memory, or of one piece that the CPU copies. From one place of the GPU to another
/// each costs two copies, an event and the wait for it, so shorter ones gain nothing: round trips of 16 MiB took 1196
/// µs in pieces of 512 KiB, and 1052 in pieces of this size (H200).
pub const PIECE: u64 = 1 << 20;
/// Room for whatever else a submission takes: what copies are short of multiples of 64, and stores by copies.
const NEAR_BESIDE: u64 = 64 << 10;
/// Bytes of a submission that go that way: two submissions may be in flight, and the end of the ring may stay empty.
const NEAR_FULL: u64 = (super::device::STAGING_BYTES - PIECE) / 2 - NEAR_BESIDE;
/// How far back a signal looks for its last store: some contexts take turns.
const LOOK_BACK: usize = 16;

/// What an entry of `NextSubmission::ops` is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum BatchKind {
    /// A put's bytes.
    Data,
    /// A signal's new value.
    Sum,
    /// An addition to a signal.
    Addition,
}

/// Whose an entry of `NextSubmission::ops` is, and where it goes.
struct Tag {
    /// Address of the lane: who it is, not to be read.
    lane: usize,
    at: u64,
    kind: BatchKind,
}

/// A submission in the making.
#[derive(Default)]
pub struct NextSubmission {
    /// From GPU memory, but for:
    pub away: Coalesced,
    /// From the GPU's memory to the same GPU's memory. Copy engines do that by way of pinned memory only.
    pub near: Coalesced,
    pub near_bytes: u64,
    /// So many of them, at the front, continue an operation that an earlier submission began.
    pub near_begun: u64,
    /// From pinned memory to GPU memory.
    pub into: Copies,
    pub ops: Vec<MemOp>,
    /// Some store must become visible as a whole, or is an addition.
    pub needs_ops: bool,
    tags: Vec<Tag>,
    /// Lanes with a signal in an entry that another one began, each with the last such entry.
    joined: Vec<(usize, usize)>,
    pub finished: Vec<Owner>,
    pub outward: Vec<Outward>,
    merge: bool,
    /// Signals that were read from memory, and their values once this submission is done. A kernel that resets a signal
    /// does so between its signals, never among several that are on their way.
    pub(super) read: Vec<(u64, u64)>,
}

/// How far an operation got.
pub enum BatchStep {
    /// All of it is in this submission or an earlier one.
    Done,
    /// The rest must wait for a submission to be done; `progress`: something was done.
    Later { progress: bool },
}

/// An end, resolved.
enum End {
    Gpu(u64),
    Host(*mut u8),
}

/// Finds `len` bytes of one end of an operation.
fn end(windows: &Windows, held: &Held<'_>, op: &Op, side: TransferEnd, len: u64) -> Result<End> {
    match side {
        TransferEnd::Caller { addr, .. } if !windows.has_caller(op.window, addr, len) => {
            Err(gone(op.window.map_or(0, |w| w.key), addr, len))
        }
        TransferEnd::Caller { addr, gpu: true } => Ok(End::Gpu(addr)),
        TransferEnd::Caller { addr, gpu: false } => Ok(End::Host(addr as *mut u8)),
        TransferEnd::Window { key, addr } if Key(key).is_on_gpu() => {
            if windows.holds(key, addr, len) {
                Ok(End::Gpu(addr))
            } else {
                Err(gone(key, addr, len))
            }
        }
        TransferEnd::Window { key, addr } => {
            held.resolve(key, addr, len).map(End::Host).ok_or_else(|| gone(key, addr, len))
        }
    }
}

/// Adds the whole copy of an operation whose ends are both in GPU memory.
pub fn add_large(copies: &mut Copies, windows: &Windows, registry: &Registry, op: &mut Op) -> Result<()> {
    let (held, left) = (registry.hold(), op.len - op.done);
    let from = end(windows, &held, op, op.from.plus(op.done), left)?;
    let to = end(windows, &held, op, op.to.plus(op.done), left)?;
    let (End::Gpu(from), End::Gpu(to)) = (from, to) else {
        return Err(Error::internal("a large copy with an end in host memory"));
    };
    copies.push(to, from, left as usize);
    op.done = op.len;
    Ok(())
}

impl NextSubmission {
    /// An empty one for the next submission of `s`.
    pub fn begin(mut self, s: &EngineState) -> Self {
        self.merge = s.tuning.merge;
        self
    }

    /// Whether the GPU has anything to do.
    pub fn has_work(&self) -> bool {
        self.copies() > 0 || !self.ops.is_empty()
    }

    /// Its copies.
    pub fn copies(&self) -> usize {
        self.away.copies.len() + self.near.copies.len() + self.into.len()
    }

    /// Whether the submission is as large as it should get.
    pub fn is_full(&self) -> bool {
        self.copies() >= COPIES_FULL || self.ops.len() >= OPS_FULL
    }

    /// Empty again, memory kept.
    pub fn clear(&mut self) {
        self.away.clear();
        self.near.clear();
        self.into.clear();
        (self.near_bytes, self.near_begun, self.needs_ops) = (0, 0, false);
        self.ops.clear();
        self.tags.clear();
        self.joined.clear();
        self.finished.clear();
        self.outward.clear();
        self.read.clear();
    }

    /// Puts as much of an operation into the submission as can go.
    pub fn add(&mut self, s: &mut EngineState, registry: &Registry, op: &mut Op) -> Result<BatchStep> {
        if op.fetch.is_none() {
            op.reading = op.reading.filter(|submission| s.reads_hold(*submission));
        }
        if op.done == 0 && op.len > 0 && !self.ops.is_empty() && self.has_to_read_for(s, op) {
            // Its signal would wait for another submission anyhow. Not begun, it is the copy kernel's if that comes up.
            return Ok(BatchStep::Later { progress: true });
        }
        if op.stores_sum() && !s.alone.is_alone(&mut s.windows) {
            return Ok(BatchStep::Later { progress: self.has_work() });
        }
        let before = op.done;
        let continues = before > 0 && self.near_bytes == 0;
        while op.done < op.len {
            let goes_on = self.add_data(s, registry, op)?;
            if continues {
                self.near_begun = self.near_bytes;
            }
            if !goes_on {
                return Ok(BatchStep::Later { progress: op.done > before || self.has_work() });
            }
        }
        match op.signal {
            None if op.fetch.is_some() => self.add_fetch(s, registry, op),
            None => Ok(BatchStep::Done),
            Some(signal) => self.add_signal(s, registry, op, &signal),
        }
    }

    /// One piece of data. `false`: no more now.
    fn add_data(&mut self, s: &mut EngineState, registry: &Registry, op: &mut Op) -> Result<bool> {
        let left = op.len - op.done;
        let to_side = op.to.plus(op.done);
        let held = registry.hold();
        let from = end(&s.windows, &held, op, op.from.plus(op.done), left)?;
        let to = end(&s.windows, &held, op, to_side, left)?;
        let piece = piece_of(left, PIECE);
        match (rest_of(op, s.is_near(op)).mover(), from, to) {
            (Mover::PinnedMemory, End::Gpu(from), End::Gpu(to)) => {
                if self.near_bytes + piece > NEAR_FULL || !self.leaves_room(s, piece) {
                    return Ok(false);
                }
                self.near.join(to, from, piece as usize, op.between().filter(|_| self.merge));
                self.near_bytes += piece;
                op.done += piece;
            }
            (_, End::Gpu(from), End::Gpu(to)) => {
                self.away.join(to, from, left as usize, op.between().filter(|_| self.merge));
                op.done += left;
            }
            (Mover::StreamStore, End::Host(_), End::Gpu(_)) if !self.takes_store(s) => return Ok(false),
            (Mover::StreamStore, End::Host(from), End::Gpu(to)) => {
                // SAFETY: the source is readable (Context::post; or in a held window).
                let store = unsafe { inline_store(from, left, to) };
                self.push_op(op, store, to, BatchKind::Data);
                op.done += left;
            }
            (_, End::Host(from), End::Gpu(to)) => {
                let Some((offset, device)) = self.stage(s, piece) else { return Ok(false) };
                // SAFETY: source as above; the staging bytes were just taken.
                unsafe { std::ptr::copy_nonoverlapping(from, device.staging_host(offset), piece as usize) };
                self.into.push(to, device.staging(offset), piece as usize);
                op.done += piece;
            }
            (_, End::Gpu(from), End::Host(_)) => {
                let Some((offset, device)) = self.stage(s, piece) else { return Ok(false) };
                self.away.push(device.staging(offset), from, piece as usize, None);
                self.outward.push(Outward { offset, len: piece, to: to_side, window: op.window });
                op.done += piece;
            }
            (_, End::Host(from), End::Host(to)) => {
                // SAFETY: source as above, destination in a held window or the caller's; they may overlap.
                unsafe { std::ptr::copy(from, to, piece as usize) };
                op.done += piece;
                return Ok(op.done == op.len);
            }
        }
        Ok(true)
    }

    /// Whether the staging memory has room for `n` bytes beside the copies within the GPU, which take theirs last.
    fn leaves_room(&self, s: &EngineState, n: u64) -> bool {
        s.staging.has_room(self.near_bytes + n + NEAR_BESIDE, n.max(PIECE))
    }

    /// Its stores, and `more`.
    pub fn stores(&self, s: &EngineState, more: usize) -> Stores {
        let were_late = s.store_by_copy > 0;
        Stores { were_late, needs_stream: self.needs_ops, count: self.ops.len() + more }
    }

    /// Whether one more store may go along. Where copy engines store, it needs room in the staging memory, or the
    /// submission would wait for the GPU's processors.
    pub fn takes_store(&self, s: &EngineState) -> bool {
        let by_copy = self.stores(s, 1).mover() == Mover::CopyEngine;
        // Beside copies within the GPU there is room for them.
        !by_copy || self.near_bytes > 0 || s.staging.fits(8 * (self.ops.len() as u64 + 1))
    }

    /// A place in the staging memory, if there is one now.
    pub fn stage<'a>(&self, s: &'a mut EngineState, n: u64) -> Option<(u64, &'a Device)> {
        if self.near_bytes > 0 && !self.leaves_room(s, n) {
            return None;
        }
        let device = s.device.as_ref()?;
        // Stores that are in the submission already keep their room.
        let stores = if s.store_by_copy > 0 { 8 * self.ops.len() as u64 } else { 0 };
        Some((s.staging.take_beside(n, stores)?, device))
    }

    pub fn push_op(&mut self, op: &Op, memory: MemOp, at: u64, kind: BatchKind) {
        self.ops.push(memory);
        self.tags.push(Tag { lane: Arc::as_ptr(&op.owner.lane) as usize, at, kind });
    }

    fn add_signal(
        &mut self,
        s: &mut EngineState,
        registry: &Registry,
        op: &mut Op,
        signal: &Signal,
    ) -> Result<BatchStep> {
        let later = Ok(BatchStep::Later { progress: self.has_work() });
        // Bytes for host memory are there when the CPU has delivered them.
        if !self.outward.is_empty() || s.small.outward > s.small.done {
            return later;
        }
        if !Key(signal.rkey).is_on_gpu() {
            // The CPU adds, once the GPU has done what comes before.
            if self.has_work() || !s.small.is_empty() {
                return later;
            }
            let added = registry.hold().add(signal.rkey, signal.remote, signal.value);
            return if added { Ok(BatchStep::Done) } else { Err(gone(signal.rkey, signal.remote, 8)) };
        }
        if !self.takes_store(s) {
            return later;
        }
        match s.windows.add(signal.rkey, signal.remote, signal.value) {
            Ok(sum) => {
                self.store_signal(op, signal.remote, sum, signal.value);
                Ok(BatchStep::Done)
            }
            Err(true) => self.add_to_memory(s, op, signal),
            Err(false) => Err(gone(signal.rkey, signal.remote, 8)),
        }
    }

    /// Stores a signal's new value, `by` more than before; in place of the last one if that may be visible when this
    /// one is.
    pub(super) fn store_signal(&mut self, op: &Op, at: u64, value: u64, by: u64) {
        // Of half a word nobody can tell as long as the other half stays.
        self.needs_ops |= value >> 32 != value.wrapping_sub(by) >> 32;
        if let Some(i) = self.join_last(op, at, BatchKind::Sum) {
            self.ops[i] = MemOp::write64(at, value);
            return;
        }
        self.push_op(op, MemOp::write64(at, value), at, BatchKind::Sum);
    }

    /// The entry that a signal joins, if it may: the last one at its address, unless its own lane has stored something
    /// since, which it would overtake, in an entry of its own or in one that it joined. All copies of a submission come
    /// before its stores.
    pub(super) fn join_last(&mut self, op: &Op, at: u64, kind: BatchKind) -> Option<usize> {
        if !self.merge {
            return None;
        }
        let lane = Arc::as_ptr(&op.owner.lane) as usize;
        let look = (0..self.tags.len()).rev().take(LOOK_BACK);
        let last = look.map(|i| (i, &self.tags[i])).find(|(_, tag)| tag.at == at || tag.lane == lane);
        let (i, began) = last.filter(|(_, t)| t.at == at && t.kind == kind).map(|(i, t)| (i, t.lane))?;
        match self.joined.iter_mut().find(|(of, _)| *of == lane) {
            Some((_, joined)) if *joined > i => return None,
            Some((_, joined)) => *joined = i,
            None if began != lane => self.joined.push((lane, i)),
            None => {}
        }
        Some(i)
    }
}

/// The next piece of `left` bytes, at most `most`. None leaves a single byte, which no copy engine would take.
pub fn piece_of(left: u64, most: u64) -> u64 {
    left.min(most) - u64::from(left == most + 1)
}

/// What is left of an operation's data.
fn rest_of(op: &Op, is_same_gpu: bool) -> StreamCopy {
    let to = op.to.plus(op.done);
    let (from_gpu, to_gpu) = (op.from.is_on_gpu(), to.is_on_gpu());
    StreamCopy { from_gpu, to_gpu, is_same_gpu, left: op.len - op.done, to: to.addr() }
}

/// # Safety
/// `len` (4 or 8) bytes are readable at `from`.
unsafe fn inline_store(from: *const u8, len: u64, to: u64) -> MemOp {
    // SAFETY: the caller's promise.
    unsafe {
        match len {
            8 => MemOp::write64(to, from.cast::<u64>().read_unaligned()),
            _ => MemOp::write32(to, from.cast::<u32>().read_unaligned()),
        }
    }
}

#[cold]
pub fn gone(key: u32, addr: u64, len: u64) -> Error {
    Error::remote_access(format!(
        "{len} bytes at {addr:#x} lie outside its window {}, or it has deregistered the window that an operation \
         names; deregister after the last operation",
        Key(key).number()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::gpu::kernel::windows_hold;
    use crate::fabric::soft::lane::Lane;
    use crate::memory::gpu::SignalRules;
    use crate::memory::registry::Extent;
    use crate::rma::op::{self, Put};
    use crate::rma::seq::Seq;
    use oxygin_ffi::cuda::MemOpKind;
    use std::sync::atomic::AtomicUsize;

    const X: u64 = 0x1000;
    const Y: u64 = 0x2000;

    fn op(lane: &Arc<Lane>) -> Op {
        let owner = Owner { lane: lane.clone(), seq: Seq(1), backlog: Arc::new(AtomicUsize::new(1)) };
        let nowhere = TransferEnd::Caller { addr: 0, gpu: false };
        Op::copy(owner, nowhere, nowhere, 0)
    }

    fn stores(batch: &NextSubmission) -> Vec<(u64, u64)> {
        let parts = |m: &MemOp| match m.parse() {
            Some((at, MemOpKind::Write64(value))) => (at, value),
            other => panic!("{other:?}"),
        };
        batch.ops.iter().map(parts).collect()
    }

    #[test]
    fn a_signal_joins_its_last_store_unless_its_lane_would_overtake_itself() {
        let [a, b, c] = [0, 1, 2].map(|context| Arc::new(Lane::new(context, 0, Arc::default())));
        let run = |signals: &[(&Arc<Lane>, u64, u64)]| {
            let mut batch = NextSubmission { merge: true, ..NextSubmission::default() };
            signals.iter().for_each(|(lane, at, value)| batch.store_signal(&op(lane), *at, *value, 1));
            stores(&batch)
        };
        assert_eq!(run(&[(&a, X, 1), (&b, Y, 1), (&a, X, 2), (&b, Y, 2)]), [(X, 2), (Y, 2)]);
        assert_eq!(run(&[(&a, X, 1), (&b, X, 2), (&a, X, 3)]), [(X, 3)]);
        assert_eq!(run(&[(&a, X, 1), (&a, Y, 1), (&a, X, 2)]), [(X, 1), (Y, 1), (X, 2)]);
        // b's own addition to X is in the first entry, but its Y came after.
        assert_eq!(run(&[(&a, X, 1), (&b, X, 2), (&b, Y, 1), (&b, X, 3)]), [(X, 2), (Y, 1), (X, 3)]);
        // a's addition to X is in an entry that b began, behind a's own Y.
        assert_eq!(run(&[(&a, Y, 1), (&b, X, 1), (&a, X, 2), (&a, Y, 2)]), [(Y, 1), (X, 2), (Y, 2)]);
        // The same where a began neither; c is in nobody's way and joins both.
        let all = [(&b, Y, 1), (&b, X, 1), (&a, X, 2), (&a, Y, 2), (&c, X, 3), (&c, Y, 3), (&c, X, 4)];
        assert_eq!(run(&all), [(Y, 1), (X, 3), (Y, 3), (X, 4)]);
    }

    #[test]
    fn nothing_is_copied_from_a_window_of_this_rank_that_is_gone() {
        let extent = Extent { base: X, len: 64 };
        let lane = Arc::new(Lane::new(0, 0, Arc::default()));
        let (own, to) = (Key::gpu(1, false).0, Key::gpu(2, false).0);
        let put = Put { local: X, lkey: own, rkey: to, remote: Y, len: 64, signal: None, more: false };
        let posted_by = |rank| Op::new(op(&lane).owner, rank, Some(0), &op::Op::Put(put), 0);
        let mut windows = Windows::of(0);
        let signals = SignalRules::of_tables(true);
        windows.insert(1, extent, signals);
        windows.insert(2, Extent { base: Y, len: 64 }, signals);
        let go = |windows: &Windows, rank| {
            let mut op = posted_by(rank);
            let (mut copies, may_run) = (Copies::default(), windows_hold(&op, windows));
            let added = add_large(&mut copies, windows, &Registry::default(), &mut op).is_ok();
            (may_run, added, copies.is_empty())
        };
        assert_eq!(go(&windows, 0), (true, true, false));
        windows.remove(1);
        assert_eq!(go(&windows, 0), (false, false, true));
        assert_eq!(go(&windows, 1), (true, true, false), "another rank of this process has windows of its own");
        windows.withdraw_caller(1, 1);
        assert_eq!(go(&windows, 1), (false, false, true), "and tells when they go");
        assert_eq!(go(&windows, 3), (true, true, false));
        windows.admit_caller(1, 1);
        assert_eq!(go(&windows, 1), (true, true, false), "another one has that number");
    }
}
