//! From operations to one flight: copies, then stores and additions.

use super::device::Device;
use super::op::{Op, Side};
use super::state::{Outward, State};
use crate::error::{Error, Result};
use crate::fabric::soft::gpu::op::Owner;
use crate::fabric::soft::receive;
use crate::memory::gpu::GPU_BIT;
use crate::memory::registry::Registry;
use crate::rma::op::Signal;
use oxygin_ffi::cuda::{Copies, MemOp};

/// Copies and memory operations of one flight, at most about.
const FULL: usize = 256;
/// Bytes of one piece through staging memory, or of one piece that the CPU copies.
const PIECE: u64 = 1 << 20;

/// A flight in the making.
#[derive(Default)]
pub struct Batch {
    pub copies: Copies,
    pub ops: Vec<MemOp>,
    pub finished: Vec<Owner>,
    pub outward: Vec<Outward>,
    /// Where the last operation in `ops` adds, if it is a signal: the next addition there needs no store of its own.
    last_signal: Option<u64>,
    /// Signals that were read from memory, and their values once this flight is done. A kernel that resets a signal
    /// does so between its signals, never among several that are on their way.
    read: Vec<(u64, u64)>,
}

/// How far an operation got.
pub enum Step {
    /// All of it is in this flight or an earlier one.
    Done,
    /// The rest must wait for a flight to land; `progress`: something was done.
    Later { progress: bool },
}

/// An end, resolved.
enum End {
    Gpu(u64),
    Host(*mut u8),
}

impl Batch {
    /// Whether the GPU has anything to do.
    pub fn has_work(&self) -> bool {
        !self.copies.is_empty() || !self.ops.is_empty()
    }

    /// Whether the flight is as large as it should get.
    pub fn is_full(&self) -> bool {
        self.copies.len() + self.ops.len() >= FULL
    }

    /// Empty again, memory kept.
    pub fn clear(&mut self) {
        self.copies.clear();
        self.ops.clear();
        self.finished.clear();
        self.outward.clear();
        self.last_signal = None;
        self.read.clear();
    }

    /// The last thing that a flight does.
    pub fn raise_flag(&mut self, at: u64, number: u64) {
        self.ops.push(MemOp::write64(at, number));
    }

    /// Puts as much of an operation into the flight as can go.
    pub fn add(&mut self, s: &mut State, registry: &Registry, op: &mut Op) -> Result<Step> {
        let before = op.done;
        while op.done < op.len {
            if !self.add_data(s, registry, op)? {
                return Ok(Step::Later { progress: op.done > before || self.has_work() });
            }
        }
        match op.signal {
            None => Ok(Step::Done),
            Some(signal) => self.add_signal(s, registry, op, &signal),
        }
    }

    /// One piece of data. `false`: no more now.
    fn add_data(&mut self, s: &mut State, registry: &Registry, op: &mut Op) -> Result<bool> {
        let left = op.len - op.done;
        let (from_side, to_side) = (op.from.plus(op.done), op.to.plus(op.done));
        let held = registry.hold();
        let mut end = |side: Side| match side {
            Side::Caller { addr, gpu: true } => Ok(End::Gpu(addr)),
            Side::Caller { addr, gpu: false } => Ok(End::Host(addr as *mut u8)),
            Side::Window { key, addr } if key & GPU_BIT != 0 => {
                if s.windows.holds(key, addr, left) {
                    Ok(End::Gpu(addr))
                } else {
                    Err(gone(key, addr, left))
                }
            }
            Side::Window { key, addr } => {
                held.resolve(key, addr, left).map(End::Host).ok_or_else(|| gone(key, addr, left))
            }
        };
        let (from, to) = (end(from_side)?, end(to_side)?);
        let piece = left.min(PIECE);
        match (from, to) {
            (End::Gpu(from), End::Gpu(to)) => {
                self.copies.push(to, from, left as usize);
                op.done += left;
            }
            (End::Host(from), End::Gpu(to)) if inline(left, to) => {
                // SAFETY: the source is readable (Context::put; or in a held window).
                self.ops.push(unsafe { inline_store(from, left, to) });
                self.last_signal = None;
                op.done += left;
            }
            (End::Host(from), End::Gpu(to)) => {
                let Some((offset, device)) = stage(s, piece) else { return Ok(false) };
                // SAFETY: source as above; the staging bytes were just taken.
                unsafe { std::ptr::copy_nonoverlapping(from, device.staging_host(offset), piece as usize) };
                self.copies.push(to, device.staging(offset), piece as usize);
                op.done += piece;
            }
            (End::Gpu(from), End::Host(_)) => {
                let Some((offset, device)) = stage(s, piece) else { return Ok(false) };
                self.copies.push(device.staging(offset), from, piece as usize);
                self.outward.push(Outward { offset, len: piece, to: to_side });
                op.done += piece;
            }
            (End::Host(from), End::Host(to)) => {
                // SAFETY: source as above, destination in a held window or the caller's; they may overlap.
                unsafe { std::ptr::copy(from, to, piece as usize) };
                op.done += piece;
                return Ok(op.done == op.len);
            }
        }
        Ok(true)
    }

    fn add_signal(&mut self, s: &mut State, registry: &Registry, op: &mut Op, signal: &Signal) -> Result<Step> {
        let later = Ok(Step::Later { progress: self.has_work() });
        // Bytes for host memory are there when the CPU has delivered them.
        if !self.outward.is_empty() || s.outward > s.landed {
            return later;
        }
        if signal.rkey & GPU_BIT == 0 {
            // The CPU adds, once the GPU has done what comes before.
            if self.has_work() || s.started > s.landed {
                return later;
            }
            let held = registry.hold();
            let at = held.resolve(signal.rkey, signal.remote, 8).filter(|_| signal.remote % 8 == 0);
            receive::add(at.ok_or_else(|| gone(signal.rkey, signal.remote, 8))?, signal.value);
            return Ok(Step::Done);
        }
        match s.windows.add(signal.rkey, signal.remote, signal.value) {
            Ok(sum) => {
                self.store_signal(signal.remote, sum);
                Ok(Step::Done)
            }
            Err(true) => self.add_to_memory(s, op, signal),
            Err(false) => Err(gone(signal.rkey, signal.remote, 8)),
        }
    }

    /// Stores a signal's new value; over the last one's if that is the same signal.
    fn store_signal(&mut self, at: u64, value: u64) {
        let store = MemOp::write64(at, value);
        match self.ops.last_mut().filter(|_| self.last_signal == Some(at)) {
            Some(last) => *last = store,
            None => self.ops.push(store),
        }
        self.last_signal = Some(at);
    }

    /// A signal whose value is in GPU memory alone.
    fn add_to_memory(&mut self, s: &mut State, op: &mut Op, signal: &Signal) -> Result<Step> {
        let device = s.device.as_ref().ok_or_else(|| Error::internal("a GPU window without a GPU"))?;
        if device.can_add {
            self.ops.push(MemOp::add64(signal.remote, signal.value));
            self.last_signal = None;
            return Ok(Step::Done);
        }
        if let Some((_, value)) = self.read.iter_mut().find(|(at, _)| *at == signal.remote) {
            *value = value.wrapping_add(signal.value);
            let sum = *value;
            self.store_signal(signal.remote, sum);
            return Ok(Step::Done);
        }
        match op.reading {
            None if self.has_work() => Ok(Step::Later { progress: true }),
            None => {
                // A flight of its own: it sees all stores of the flights before it, and nothing follows until it landed.
                self.copies.push(device.scratch(), signal.remote, 8);
                op.reading = Some(s.started + 1);
                Ok(Step::Later { progress: true })
            }
            Some(flight) if s.landed < flight => Ok(Step::Later { progress: false }),
            Some(_) => {
                let sum = device.scratch_value().wrapping_add(signal.value);
                self.read.push((signal.remote, sum));
                self.store_signal(signal.remote, sum);
                Ok(Step::Done)
            }
        }
    }
}

fn stage(s: &mut State, n: u64) -> Option<(u64, &Device)> {
    let device = s.device.as_ref()?;
    Some((s.staging.take(n)?, device))
}

/// Whether the CPU can hand the bytes to the stream as one store.
fn inline(len: u64, to: u64) -> bool {
    (len == 8 || len == 4) && to % len == 0
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
fn gone(key: u32, addr: u64, len: u64) -> Error {
    Error::remote(format!(
        "{len} bytes at {addr:#x} lie outside its window {}, or it has deregistered the window that an operation names; \
         deregister after the last operation",
        key & !GPU_BIT
    ))
}
