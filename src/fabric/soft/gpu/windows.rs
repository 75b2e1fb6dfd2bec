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
    /// Windows of other ranks of this process that are gone, as rank and number: nobody touches what lies there.
    withdrawn: Vec<(u32, u32)>,
}

impl Windows {
    /// Of `rank`, which has none yet.
    pub fn of(rank: u32) -> Self {
        Self { rank, by_number: Table::default(), withdrawn: Vec::new() }
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
    /// not once the window there is gone, whose memory may be, too. Of the windows of other ranks of this process only
    /// that is known.
    pub fn has_caller(&self, op: &Op, addr: u64, len: u64) -> bool {
        op.window.filter(|w| Key(w.key).is_on_gpu()).is_none_or(|w| match w.rank == self.rank {
            true => self.holds(w.key, addr, len),
            false => self.withdrawn.is_empty() || !self.withdrawn.contains(&(w.rank, Key(w.key).number())),
        })
    }

    /// Window `id` of another rank of this process is gone.
    pub fn withdraw_caller(&mut self, rank: u32, id: u32) {
        self.admit_caller(rank, id);
        self.withdrawn.push((rank, id));
    }

    /// Another one has its number.
    pub fn admit_caller(&mut self, rank: u32, id: u32) {
        self.withdrawn.retain(|&gone| gone != (rank, id));
    }

    /// Whether the caller's end of an operation is in window `id` of `rank`.
    pub fn is_from(op: &Op, rank: u32, id: u32) -> bool {
        let is_it = |w: CallerWindow| w.rank == rank && Key(w.key).is_on_gpu() && Key(w.key).number() == id;
        op.window.is_some_and(is_it)
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
