//! Kernels that store into a rank's GPU beside its engine: this rank's own lane kernel, which is a visitor elsewhere,
//! and the gate of those that come here.

use super::lane_kernel::LaneKernel;
use super::Engine;
use crate::fabric::soft::gate::Gate;
use crate::sys::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// What an engine keeps of them.
pub struct Visitors {
    gate: Arc<Gate>,
    /// The lane kernel, once somebody has queues for it, and while nobody uses it.
    lane_kernel: Mutex<Option<Box<LaneKernel>>>,
    /// It was loaded, or could not be; there is one.
    has_asked: AtomicBool,
    has_one: AtomicBool,
}

impl Visitors {
    /// There are none; this is the gate.
    pub fn new(gate: Arc<Gate>) -> Self {
        Self { gate, lane_kernel: Mutex::default(), has_asked: AtomicBool::new(false), has_one: AtomicBool::new(false) }
    }
}

impl Engine {
    /// Who stores into this GPU beside the engine.
    pub fn gate(&self) -> &Gate {
        &self.visitors.gate
    }

    /// Loads the lane kernel, unless that was done. Set-up only: it may wait for kernels. Whether there is one.
    pub fn open_lane_kernel(&self) -> bool {
        let (_opening, visitors) = (self.opening.lock(), &self.visitors);
        let Some(app) = self.app().filter(|_| self.tuning.lanes && self.tuning.kernel > 0) else { return false };
        if visitors.has_asked.swap(true, Ordering::Relaxed) {
            return visitors.has_one.load(Ordering::Relaxed);
        }
        match LaneKernel::open(self.rank, &app) {
            Ok(kernel) => {
                *visitors.lane_kernel.lock() = Some(Box::new(kernel));
                visitors.has_one.store(true, Ordering::Relaxed);
                true
            }
            Err(e) => {
                log::info!("rank {}: no lane kernel, the engine's threads serve all queues: {e}", self.rank);
                false
            }
        }
    }

    /// The lane kernel, for one who gives it back; `None`: another one has it, or there is none.
    pub fn take_lane_kernel(&self) -> Option<Box<LaneKernel>> {
        self.visitors.lane_kernel.lock().take()
    }

    /// The lane kernel is back.
    pub fn give_lane_kernel(&self, kernel: Box<LaneKernel>) {
        *self.visitors.lane_kernel.lock() = Some(kernel);
    }

    /// Whether a GPU window of this rank's holds the range.
    pub fn has_window(&self, key: u32, addr: u64, len: u64) -> bool {
        self.state.lock().windows.holds(key, addr, len)
    }

    /// Whether kernels on this GPU may add to words in memory of another one.
    pub fn adds_at(&self, gpu: i32) -> bool {
        let (Some(context), Some(own)) = (self.context(), self.gpu()) else { return false };
        context.cuda().adds_at_peer(own, gpu)
    }

    /// Ends the lane kernel. `healthy`: the GPU has not failed.
    pub(super) fn close_lane_kernel(&self, healthy: bool) {
        let (kernel, rank) = (self.visitors.lane_kernel.lock().take(), self.rank);
        if kernel.is_none() && self.visitors.has_one.swap(false, Ordering::Relaxed) {
            log::warn!("rank {rank}: a thread that stands has the lane kernel, whose memory is left to the process");
        }
        let Some(kernel) = kernel else { return };
        self.visitors.has_one.store(false, Ordering::Relaxed);
        if kernel.services() > 0 {
            log::info!("rank {rank}: {} launches of the lane kernel served queues", kernel.services());
        }
        if !kernel.close(healthy) && healthy {
            log::warn!("rank {rank}: the lane kernel has not ended; its memory is left to the process");
        }
    }
}
