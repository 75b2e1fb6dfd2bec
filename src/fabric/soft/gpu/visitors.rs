//! Kernels that store into a rank's GPU beside its engine: this rank's own lane kernel, which is a visitor elsewhere,
//! and the gate of those that come here.

use super::lane_kernel::{LaneKernel, LaneStats};
use super::Engine;
use crate::fabric::lanes::Holds;
use crate::fabric::soft::gate::Gate;
use crate::memory::gpu::HostMemory;
use crate::memory::registry::Extent;
use crate::sys::sync::Mutex;
use std::sync::{Arc, OnceLock};

/// An engine's lane kernel.
#[derive(Default)]
enum Kept {
    /// Nobody has had queues for one yet.
    #[default]
    Unasked,
    /// There is none, or none any more.
    Nothing,
    /// Nobody uses it.
    Here(Box<LaneKernel>),
    /// One who has queues for it has it.
    Lent,
}

/// What an engine keeps of them.
pub struct Visitors {
    gate: Arc<Gate>,
    lane_kernel: Mutex<Kept>,
    /// What the queues hold that it was loaded for.
    holds: OnceLock<Holds>,
}

impl Visitors {
    /// There are none; this is the gate.
    pub fn new(gate: Arc<Gate>) -> Self {
        Self { gate, lane_kernel: Mutex::default(), holds: OnceLock::new() }
    }
}

impl Engine {
    /// Who stores into this GPU beside the engine.
    pub fn gate(&self) -> &Gate {
        &self.visitors.gate
    }

    /// Loads the lane kernel for such queues, unless that was done. Set-up only: it may wait for kernels. Whether
    /// there is one. All queues of a communicator hold the same.
    pub fn open_lane_kernel(&self, holds: Holds) -> bool {
        let (_opening, visitors) = (self.opening.lock(), &self.visitors);
        let Some(app) = self.app().filter(|_| self.tuning.lanes && self.tuning.kernel > 0) else { return false };
        if *visitors.holds.get_or_init(|| holds) != holds {
            return false;
        }
        match &*visitors.lane_kernel.lock() {
            Kept::Unasked => {}
            Kept::Nothing => return false,
            Kept::Here(_) | Kept::Lent => return true,
        }
        let opened = LaneKernel::open(self.rank, &app, holds);
        let is_there = opened.is_ok();
        *visitors.lane_kernel.lock() = match opened {
            Ok(kernel) => Kept::Here(Box::new(kernel)),
            Err(e) => {
                log::info!("rank {}: no lane kernel, the engine's threads serve all queues: {e}", self.rank);
                Kept::Nothing
            }
        };
        is_there
    }

    /// Launches in a row that have had all queues of a set before these are brought to the GPU.
    pub fn steady(&self) -> u32 {
        self.tuning.steady
    }

    /// The lane kernel, for one who gives it back; `None`: another one has it, or there is none.
    pub fn take_lane_kernel(&self) -> Option<Box<LaneKernel>> {
        let mut kept = self.visitors.lane_kernel.lock();
        match std::mem::replace(&mut *kept, Kept::Lent) {
            Kept::Here(kernel) => Some(kernel),
            other => {
                *kept = other;
                None
            }
        }
    }

    /// The lane kernel is back.
    pub fn give_lane_kernel(&self, kernel: Box<LaneKernel>) {
        *self.visitors.lane_kernel.lock() = Kept::Here(kernel);
    }

    /// Where a GPU window of this rank's is.
    pub fn window(&self, key: u32) -> Option<Extent> {
        self.state.lock().windows.extent(key)
    }

    /// Window `id` of this rank, where that is host memory that GPUs may be let to.
    pub fn host_memory(&self, id: u32) -> Option<HostMemory> {
        self.state.lock().windows.host_memory(id)
    }

    /// Looks whether a window in host memory, which is being registered, is such memory.
    pub fn add_host_window(&self, id: u32, extent: Extent) {
        let memory = self.context().and_then(|context| HostMemory::at(&context, extent));
        memory.into_iter().for_each(|memory| self.state.lock().windows.insert_host(id, memory));
    }

    /// It is deregistered.
    pub fn remove_host_window(&self, id: u32) {
        self.state.lock().windows.remove(id);
    }

    /// Whether kernels on this GPU may add to words in memory of another one.
    pub fn adds_at(&self, gpu: i32) -> bool {
        let (Some(context), Some(own)) = (self.context(), self.gpu()) else { return false };
        context.cuda().adds_at_peer(own, gpu)
    }

    /// Ends the lane kernel. `healthy`: the GPU has not failed.
    pub(super) fn close_lane_kernel(&self, healthy: bool) {
        let (kept, rank) = (std::mem::replace(&mut *self.visitors.lane_kernel.lock(), Kept::Nothing), self.rank);
        let kernel = match kept {
            Kept::Here(kernel) => kernel,
            Kept::Lent => {
                log::warn!(
                    "rank {rank}: a thread that stands has the lane kernel, whose memory is left to the process"
                );
                return;
            }
            Kept::Unasked | Kept::Nothing => return,
        };
        let LaneStats { services, entries, brought, late } = kernel.stats();
        if services + late > 0 {
            log::info!(
                "rank {rank}: {services} launches of the lane kernel served queues, with {entries} entries; for \
                 {brought} the queues were brought to the GPU; {late} were late"
            );
        }
        if !kernel.close(healthy) && healthy {
            log::warn!("rank {rank}: the lane kernel has not ended; its memory is left to the process");
        }
    }
}
