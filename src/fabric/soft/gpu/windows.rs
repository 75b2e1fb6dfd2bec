//! This rank's GPU windows, and the values of their signals.

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

/// This rank's GPU windows by number.
#[derive(Default)]
pub struct Windows(Table<GpuWindow>);

impl Windows {
    /// Adds one.
    pub fn insert(&mut self, id: u32, extent: Extent, never_reset: bool) {
        self.0.insert(id, GpuWindow { extent, never_reset, sums: Vec::new() });
    }

    /// Removes it.
    pub fn remove(&mut self, id: u32) {
        self.0.remove(id);
    }

    /// Whether a GPU window holds the range.
    pub fn holds(&self, key: u32, addr: u64, len: u64) -> bool {
        self.0.get(Key(key).number()).is_some_and(|w| w.extent.holds(addr, len))
    }

    /// Whether kernels may reset signals of this window, so that their values are in GPU memory alone.
    pub fn may_be_reset(&self, key: u32) -> bool {
        self.0.get(Key(key).number()).is_some_and(|w| !w.never_reset)
    }

    /// Adds to a signal whose value only this rank's engine changes and returns the sum; `Err(true)`: kernels may reset
    /// it, its value is in GPU memory alone; `Err(false)`: it is in no window.
    pub fn add(&mut self, key: u32, addr: u64, value: u64) -> Result<u64, bool> {
        let window = self.0.get_mut(Key(key).number());
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
