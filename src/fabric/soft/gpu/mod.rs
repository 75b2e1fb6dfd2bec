//! Transfers that touch GPU memory: between ranks of one process directly, to others through host memory.
//!
//! Each rank has an [`Engine`]: one stream in its own CUDA context, on which everything that its peers (and it itself)
//! put into its memory runs in order. A *flight* is what is started at once: copies, then the signals behind them, then
//! a store to pinned memory that says "done", which the CPU polls. While flights are up, new operations gather for the
//! next one. Nothing here waits for the GPU.
//!
//! Signals belong to the receiver: its engine knows each one's value and writes the sum, in its own context, because
//! memory that NCCL allocated for signals is mapped for its own GPU alone. A signal that kernels may reset is added to
//! by the stream itself where the driver can, else read, added to and written back.

mod batch;
mod bounce;
mod device;
mod op;
mod received;
mod stager;
mod staging;
mod state;
mod way;

pub use bounce::Bounce;
pub use op::{Op, Owner, Side};
pub use received::Received;
pub use stager::Stager;
pub use way::Lease;

use self::device::Device;
use self::state::State;
use crate::error::{Error, Result};
use crate::fabric::soft::lane::Lane;
use crate::memory::gpu::{cuda_error, GpuMemory, GPU_BIT};
use crate::memory::registry::{Extent, Registry};
use crate::sync::Mutex;
use oxygin_ffi::cuda::Context;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// How long deregistration and closing wait for what is still in flight.
const DRAIN_WITHIN: Duration = Duration::from_secs(10);

/// What one rank does with its GPU.
pub struct Engine {
    /// The rank.
    pub rank: u32,
    registry: Arc<Registry>,
    is_open: AtomicBool,
    incoming: Mutex<Vec<Op>>,
    state: Mutex<State>,
}

/// The engines of this process, by their ranks' secret tokens: how ranks of one process find each other.
static ENGINES: Mutex<Vec<([u8; 16], Weak<Engine>)>> = Mutex::new(Vec::new());

/// The engine of the rank with this token, if it lives in this process.
pub fn of_token(token: &[u8; 16]) -> Option<Arc<Engine>> {
    ENGINES.lock().iter().find(|(t, _)| t == token).and_then(|(_, e)| e.upgrade())
}

impl Engine {
    /// The engine of a rank. It does nothing until a GPU window opens it.
    pub fn new(rank: u32, token: [u8; 16], registry: Arc<Registry>) -> Arc<Self> {
        let engine = Arc::new(Self {
            rank,
            registry,
            is_open: AtomicBool::new(false),
            incoming: Mutex::default(),
            state: Mutex::new(State::new()),
        });
        let mut all = ENGINES.lock();
        all.retain(|(_, e)| e.strong_count() > 0);
        all.push((token, Arc::downgrade(&engine)));
        engine
    }

    /// Whether this rank has (had) GPU windows.
    pub fn is_open(&self) -> bool {
        self.is_open.load(Ordering::Acquire)
    }

    /// Lets operations touch a GPU window. Returns its key.
    pub fn add_window(&self, id: u32, extent: Extent, memory: &GpuMemory) -> Result<u32> {
        let mut state = self.state.lock();
        if state.device.is_none() {
            self.open(&mut state, memory.context.clone())?;
        } else if state.device.as_ref().is_some_and(|d| d.ordinal() != memory.context.device()) {
            return Err(Error::usage(format!(
                "data = {:#x} is on GPU {}, but this communicator's windows are on another GPU; register memory of one \
                 GPU with a communicator",
                extent.base,
                memory.context.device()
            )));
        }
        state.windows.insert(id, extent, memory.never_reset);
        Ok(id | GPU_BIT)
    }

    fn open(&self, state: &mut State, context: Arc<Context>) -> Result<()> {
        let device = Device::open(context).map_err(|e| cuda_error("a stream for GPU windows", &e))?;
        log::info!(
            "rank {}: GPU {}, copies on a stream of our own; signals that kernels reset are {}",
            self.rank,
            device.ordinal(),
            if device.can_add { "added to by the stream" } else { "read and written back" }
        );
        state.device = Some(device);
        self.is_open.store(true, Ordering::Release);
        Ok(())
    }

    /// Lets a rank that has no GPU window take part in transfers with one that has: its engine works in that one's
    /// context.
    pub fn open_like(&self, other: &Engine) -> Result<()> {
        let Some(context) = other.state.lock().device.as_ref().map(Device::context) else { return Ok(()) };
        let mut state = self.state.lock();
        match state.device {
            Some(_) => Ok(()),
            None => self.open(&mut state, context),
        }
    }

    /// Ends that; waits until nothing that was started touches the window any more.
    pub fn remove_window(&self, id: u32) {
        let mut state = self.state.lock();
        state.windows.remove(id);
        if !self.drain(&mut state) {
            log::warn!(
                "rank {}: transfers on its GPU are unfinished {} s after a window was deregistered",
                self.rank,
                DRAIN_WITHIN.as_secs()
            );
        }
    }

    /// Drops what waits on a lane and waits for what is in flight: its memory may go.
    pub fn abandon(&self, lane: &Arc<Lane>) {
        let mut state = self.state.lock();
        state.queue.extend(self.incoming.lock().drain(..));
        state.forget(lane);
        self.drain(&mut state);
    }

    /// Waits for the flights that are up. `false`: they are still up.
    fn drain(&self, state: &mut State) -> bool {
        let end = Instant::now() + DRAIN_WITHIN;
        while state.has_flights() {
            if !state.land(&self.registry) {
                state.check(self.rank);
                if Instant::now() > end {
                    return false;
                }
                std::thread::yield_now();
            }
        }
        true
    }

    /// Takes an operation. Operations of one lane arrive in their order (the caller holds the lane's link).
    pub fn submit(&self, op: Op) {
        self.incoming.lock().push(op);
        self.poll();
    }

    /// Takes an operation for the next poll: for callers that hold windows in place, which starting operations does too.
    pub fn submit_later(&self, op: Op) {
        self.incoming.lock().push(op);
    }

    /// Starts what can start and completes what is done. Returns whether something is under way.
    pub fn poll(&self) -> bool {
        let Some(mut state) = self.state.try_lock() else { return true };
        {
            let mut incoming = self.incoming.lock();
            state.queue.extend(incoming.drain(..));
        }
        state.advance(self.rank, &self.registry)
    }

    /// Ends everything; operations that are unfinished fail.
    pub fn close(&self) {
        let mut state = self.state.lock();
        // After an error the GPU may still write what was started before it.
        let idle = self.drain(&mut state) && state.failure.is_none();
        state.fail(Error::remote(format!("rank {} has closed its communicator", self.rank)));
        if let Some(device) = state.device.take() {
            device.close(idle);
        }
    }
}
