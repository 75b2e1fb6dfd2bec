//! What lies under a range, and which GPU may touch it.

use super::World;
use crate::memory::{self, Memory};
use oxygin_ffi::cuda::CUdevice;

impl World {
    pub fn find(&mut self, at: u64, n: usize) -> Option<Memory> {
        self.inner().memory.iter().find(|m| m.holds(at, n)).copied()
    }

    /// What lies under a range, mapping by mapping; `None`: there is a hole.
    fn all(&mut self, at: u64, n: usize) -> Option<Vec<Memory>> {
        let (mut from, end) = (at, at + n as u64);
        let mut found = Vec::new();
        loop {
            let memory = self.find(from, 1)?;
            found.push(memory);
            from = memory.base + memory.bytes as u64;
            if from >= end {
                return Some(found);
            }
        }
    }

    pub fn pin(&mut self, context: usize, n: usize) -> *mut u8 {
        // Whole pages, as from a real driver.
        let at = memory::host(n);
        self.inner().pinned.push((at as u64, n, context));
        at
    }

    /// Pinned memory is not reused, and its bytes are gone; touching it from a stream is an error from here on. Returns
    /// how many bytes it had.
    pub fn unpin(&mut self, at: u64) -> usize {
        let Some(i) = self.inner().pinned.iter().position(|p| p.0 == at) else { return 0 };
        let bytes = self.inner().pinned.swap_remove(i).1;
        memory::empty_host(at as *mut u8, bytes);
        bytes
    }

    pub fn is_pinned(&mut self, at: u64, n: usize) -> bool {
        self.inner().pinned.iter().any(|&(base, len, _)| at >= base && at + n as u64 <= base + len as u64)
    }

    /// Whether GPU `device` may touch the range.
    pub fn reach(&mut self, at: u64, n: usize, device: CUdevice) -> bool {
        if let Some(all) = self.all(at, n) {
            return all.iter().all(|m| m.only.is_none_or(|only| only >> device & 1 != 0));
        }
        if !self.is_pinned(at, n) {
            self.violation(&format!("{n} bytes at {at:#x} are neither device memory nor pinned"));
            return false;
        }
        true
    }

    /// Where a kernel on GPU `device` finds a range that it may load from and store to.
    pub fn kernel_reach(&mut self, at: u64, n: usize, device: CUdevice) -> Option<*mut u8> {
        match self.all(at, n) {
            Some(all) if all.iter().all(|m| m.is_open_to(device)) => all.first().map(|m| m.at(at)),
            Some(_) => {
                eprintln!("fake CUDA driver: a kernel on GPU {device} may not touch {n} bytes at {at:#x}");
                None
            }
            None if self.is_pinned(at, n) => Some(at as *mut u8),
            None => {
                self.violation(&format!("a kernel touches {n} bytes at {at:#x}: neither device memory nor pinned"));
                None
            }
        }
    }

    /// Where the stream finds an address now.
    pub fn resolve(&mut self, at: u64, n: usize) -> Option<*mut u8> {
        match self.all(at, n) {
            // Mappings side by side lie side by side for the GPU as well.
            Some(all) => all.first().map(|m| m.at(at)),
            None => self.is_pinned(at, n).then_some(at as *mut u8),
        }
    }
}
