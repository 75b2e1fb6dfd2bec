//! A range of another process's GPU memory, or of its host memory for GPUs, that is mapped here, and what keeps it so.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Arc;

/// Something that uses a window: while it lives the window is not unmapped, or its deregistration waits.
pub struct Use(Arc<AtomicUsize>);

impl Use {
    /// Counts one more.
    pub fn of(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::AcqRel);
        Self(count.clone())
    }
}

impl Drop for Use {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

/// A range of a peer's window.
pub struct Found {
    /// Where it is here.
    pub addr: u64,
    /// What tells the window from all others whose memory the engine's operations name: the key of none of this rank's.
    pub window: u32,
    /// The GPU that it is on; negative: one that this process does not see, or none (`ipc::HOST`).
    pub home: i32,
    /// The GPU that the driver takes it to be on, and copies it as it copies what lies there: of one that this process
    /// does not see, the GPU that it is mapped for; of host memory as `home`.
    pub named: i32,
    /// Kernels here may add to words of that one.
    pub adds: bool,
    /// Keeps it mapped.
    pub used: Use,
}
