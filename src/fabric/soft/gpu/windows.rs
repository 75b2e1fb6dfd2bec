//! This rank's GPU windows, and the values of their signals.

use super::op::{CallerWindow, Op};
use crate::memory::key::Key;
use crate::memory::registry::Extent;
use crate::memory::table::Table;

/// A GPU window.
pub struct GpuWindow {
    extent: Extent,
    never_reset: bool,
    /// Values of its signals by word, as far as they were ever signalled.
    sums: Vec<u64>,
}

/// This rank's GPU windows.
pub struct Windows {
    rank: u32,
    by_number: Table<GpuWindow>,
}

impl Windows {
    /// Of `rank`, which has none yet.
    pub fn of(rank: u32) -> Self {
        Self { rank, by_number: Table::default() }
    }

    /// Adds one.
    pub fn insert(&mut self, id: u32, extent: Extent, never_reset: bool) {
        self.by_number.insert(id, GpuWindow { extent, never_reset, sums: Vec::new() });
    }

    /// Removes it.
    pub fn remove(&mut self, id: u32) {
        self.by_number.remove(id);
    }

    /// Whether a GPU window holds the range.
    pub fn holds(&self, key: u32, addr: u64, len: u64) -> bool {
        self.by_number.get(Key(key).number()).is_some_and(|w| w.extent.holds(addr, len))
    }

    /// Whether `len` bytes at `addr`, the end of an operation that is its caller's and in GPU memory, may be touched:
    /// not once this rank's window there is gone, whose memory may be, too. The windows of other ranks of this process
    /// are theirs to know.
    pub fn has_caller(&self, op: &Op, addr: u64, len: u64) -> bool {
        let is_own = |w: &CallerWindow| w.rank == self.rank && Key(w.key).is_on_gpu();
        op.window.filter(is_own).is_none_or(|w| self.holds(w.key, addr, len))
    }

    /// Whether kernels may reset signals of this window, so that their values are in GPU memory alone.
    pub fn may_be_reset(&self, key: u32) -> bool {
        self.by_number.get(Key(key).number()).is_some_and(|w| !w.never_reset)
    }

    /// Adds to a signal whose value only this rank's engine changes and returns the sum; `Err(true)`: kernels may reset
    /// it, its value is in GPU memory alone; `Err(false)`: it is in no window.
    pub fn add(&mut self, key: u32, addr: u64, value: u64) -> Result<u64, bool> {
        let window = self.by_number.get_mut(Key(key).number());
        let window = window.filter(|w| w.extent.holds(addr, 8) && addr % 8 == 0).ok_or(false)?;
        if !window.never_reset {
            return Err(true);
        }
        let at = ((addr - window.extent.base) / 8) as usize;
        if window.sums.len() <= at {
            window.sums.resize(at + 1, 0);
        }
        window.sums[at] = window.sums[at].wrapping_add(value);
        Ok(window.sums[at])
    }
}
