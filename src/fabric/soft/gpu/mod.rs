//! Transfers that touch GPU memory: between ranks of one process directly, to others through host memory.
//!
//! Each rank has an [`Engine`]: one stream on its GPU, on which everything that its peers (and it itself) put into its
//! memory runs in order. A *submission* is what is started at once: copies, then the signals behind them, then a copy
//! to pinned memory that says "done", which the CPU polls. While submissions are in flight, new operations gather for
//! the next one. Bulk copies have a stream of their own (`deferred`). Nothing here waits for the GPU, and as good as
//! nothing that a submission does needs its processors, which kernels that spin may hold (`private_context`).
//!
//! Signals belong to the receiver: its engine knows each one's value and writes the sum, on its own GPU, because memory
//! that NCCL allocated for signals is mapped for that one alone. A signal that kernels may reset is added to by the
//! stream itself where the driver can, else read, added to and written back.

mod alone;
mod app;
mod arrived_bytes;
mod atomic;
mod batch;
mod bounce;
mod coalesce;
mod completion;
mod copy_out;
mod deferred;
mod device;
mod dispatch;
mod drain;
mod gpu_message;
mod handover;
mod hardware_queues;
mod in_flight;
mod kernel;
pub mod lane_kernel;
mod launch;
mod mapped;
mod near;
mod op;
mod pinned_pool;
mod pinned_pools;
mod plan;
mod private_context;
mod queue;
mod read_signal;
mod received;
mod refusals;
mod resident;
mod staging;
mod stall;
mod standing;
mod state;
mod stats;
mod visitors;
mod watch;
mod window_set;
mod windows;

pub use app::AppThread;
pub use arrived_bytes::{ArrivedBytes, PinnedBytes};
pub use atomic::{AtomicStep, Cell, To};
pub use bounce::Bounce;
pub use gpu_message::GpuMessage;
pub use mapped::{Found, Use};
pub use op::{CallerWindow, Credit, Op, Owner, TransferEnd};
pub use pinned_pool::PinnedBuffer;
pub use pinned_pools::PinnedPools;
pub use received::{Answered, Pull, Received, Senders, Source};

use self::device::Device;
use self::kernel::CopyKernel;
use self::state::EngineState;
use self::visitors::Visitors;
use self::watch::Watched;
use crate::config::{Config, GpuIssue};
use crate::error::{Error, Result};
use crate::fabric::soft::gate::Gate;
use crate::memory::gpu::{cuda_error, GpuMemory};
use crate::memory::key::Key;
use crate::memory::registry::{Extent, Registry};
use crate::sys::secret;
use crate::sys::sync::Mutex;
use crate::sys::wait::Wait;
use oxygin_ffi::cuda::Context;
use std::sync::atomic::{fence, AtomicBool, AtomicI32, AtomicU64, Ordering};
use std::sync::{Arc, MutexGuard, Weak};
use std::time::{Duration, Instant};

/// How long closing, and who gives up a peer that has failed, waits for what is still in flight.
pub const DRAIN_WITHIN: Duration = Duration::from_secs(10);

/// How often a poll goes on with what arrived during it, before it returns to its caller's own work.
const ROUNDS: usize = 4;

/// What one rank does with its GPU.
pub struct Engine {
    /// The rank whose windows it serves.
    pub rank: u32,
    registry: Arc<Registry>,
    is_open: AtomicBool,
    /// The GPU's number, -1 before it is open.
    gpu: AtomicI32,
    /// It has failed; `EngineState::failure` says why.
    has_failed: AtomicBool,
    /// Whether `incoming` may hold anything.
    knocked: AtomicBool,
    incoming: Mutex<Vec<Op>>,
    /// How often the helper thread came to work beside the callers.
    beside: AtomicU64,
    /// Polls that found another thread at work.
    busy: AtomicU64,
    /// Whether something was unfinished when it was last polled, and how often something was done then.
    under_way: AtomicBool,
    landed: AtomicU64,
    /// One opens it at a time, without the state's lock: the driver may take its time.
    opening: Mutex<Option<Watched>>,
    refusals: Arc<AtomicU64>,
    /// The copy kernel was loaded, or could not be.
    has_asked_for_kernel: AtomicBool,
    visitors: Visitors,
    /// The copy kernel took commands when it was last polled.
    kernel_is_up: AtomicBool,
    tuning: GpuIssue,
    /// Those that the streams of this process have on a GPU.
    hardware_queues: u32,
    state: Mutex<EngineState>,
}

/// Why an engine gets its streams.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Opening {
    /// Its rank registers a GPU window: whoever does waits.
    ForItself,
    /// A rank of this process that has one puts or gets here.
    ForPeer,
}

/// The engines of this process, by their ranks' secret tokens: how ranks of one process find each other.
static ENGINES: Mutex<Vec<([u8; 16], Weak<Engine>)>> = Mutex::new(Vec::new());

/// All engines.
fn all_engines() -> Vec<Arc<Engine>> {
    ENGINES.lock().iter().filter_map(|(_, e)| e.upgrade()).collect()
}

/// The engine of the rank with this token, if it lives in this process.
pub fn of_token(token: &[u8; 16]) -> Option<Arc<Engine>> {
    ENGINES.lock().iter().find(|(t, _)| secret::same(t, token)).and_then(|(_, e)| e.upgrade())
}

impl Engine {
    /// The engine of a rank into whose GPU no kernel of another process stores.
    pub fn new(rank: u32, token: [u8; 16], registry: Arc<Registry>, config: &Config) -> Arc<Self> {
        Self::behind(Gate::new(rank, None), rank, token, registry, config)
    }

    /// The engine of a rank with this gate. It does nothing until a GPU window opens it.
    pub fn behind(gate: Gate, rank: u32, token: [u8; 16], registry: Arc<Registry>, config: &Config) -> Arc<Self> {
        let (tuning, gate) = (config.gpu_issue, Arc::new(gate));
        let state = EngineState::new(rank, tuning, gate.clone());
        let engine = Arc::new(Self {
            rank,
            registry,
            is_open: AtomicBool::new(false),
            gpu: AtomicI32::new(-1),
            has_failed: AtomicBool::new(false),
            knocked: AtomicBool::new(false),
            incoming: Mutex::default(),
            beside: AtomicU64::new(0),
            busy: AtomicU64::new(0),
            under_way: AtomicBool::new(false),
            landed: AtomicU64::new(0),
            opening: Mutex::default(),
            refusals: state.refused.told(),
            has_asked_for_kernel: AtomicBool::new(false),
            visitors: Visitors::new(gate),
            kernel_is_up: AtomicBool::new(false),
            tuning,
            hardware_queues: config.hardware_queues,
            state: Mutex::new(state),
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

    /// Whether this rank's GPU, or the driver on its behalf, has failed.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.has_failed.load(Ordering::Acquire)
    }

    /// The GPU of its windows.
    pub fn gpu(&self) -> Option<i32> {
        Some(self.gpu.load(Ordering::Acquire)).filter(|&gpu| gpu >= 0)
    }

    /// Lets operations touch a GPU window. Returns its key.
    pub fn add_window(&self, id: u32, extent: Extent, memory: &GpuMemory) -> Result<u32> {
        if !memory.is_virtual {
            return Err(Error::usage(format!(
                "data = {:#x} ({} bytes) is memory of cudaMalloc: the driver lets copies to it wait while the \
                 application is in certain calls (loading a module, cudaFree), and these wait for kernels that may \
                 wait for the copies; allocate windows with ncclMemAlloc or cuMemCreate",
                extent.base, extent.len
            )));
        }
        self.open(memory.context.clone(), Opening::ForItself)?;
        if let Some(gpu) = self.gpu().filter(|&gpu| gpu != memory.context.device()) {
            return Err(Error::usage(format!(
                "data = {:#x} is on GPU {}, but what this rank does on a GPU for this communicator it does on GPU \
                 {gpu}, where its other windows are or, as it had none, those of the first rank of this process that \
                 put or got here; register memory of one GPU with a communicator, and on all ranks before the first \
                 operation",
                extent.base,
                memory.context.device()
            )));
        }
        self.open_kernel();
        let mut state = self.state.lock();
        state.windows.insert(id, extent, memory.signals);
        Ok(Key::gpu(id, memory.is_open).0)
    }

    /// Makes streams, unless there are some.
    fn open(&self, context: Arc<Context>, why: Opening) -> Result<()> {
        let mut opening = self.opening.lock();
        if self.is_open() {
            return Ok(());
        }
        if self.has_failed() {
            return Err(Error::rank_closed(self.rank));
        }
        let tuning = self.state.lock().tuning;
        let failed = |e| cuda_error("a stream for GPU windows", &e);
        let app = AppThread::start(self.rank, context, self.hardware_queues)?;
        if why == Opening::ForItself {
            app.wait_started();
        }
        let opened = app.check().map_err(failed).and_then(|()| Device::open(&app, &tuning).map_err(failed));
        let device = match opened {
            Ok(device) => device,
            Err(e) => {
                app.end();
                return Err(e);
            }
        };
        log::info!(
            "rank {}: GPU {}, copies on streams in {}; signals that kernels reset are {}",
            self.rank,
            device.ordinal(),
            if device.has_private_context() { "a private context" } else { "the application's context" },
            if device.can_add { "added to by the stream" } else { "read and written back" }
        );
        *opening = Watched::begin().inspect_err(|e| log::info!("nobody watches the GPUs: {}", e.message())).ok();
        hardware_queues::warn_where_shared(self.rank, device.ordinal(), self.hardware_queues);
        self.gpu.store(device.ordinal(), Ordering::Release);
        let mut state = self.state.lock();
        if self.has_failed() {
            // It was closed meanwhile, and nobody will close this one.
            drop(state);
            device.close_with_app(true);
            return Err(Error::rank_closed(self.rank));
        }
        state.device = Some(device);
        self.is_open.store(true, Ordering::Release);
        Ok(())
    }

    /// Loads the copy kernel, unless that was done. Set-up only: it may wait for kernels.
    fn open_kernel(&self) {
        let _opening = self.opening.lock();
        let Some(app) = self.app().filter(|_| self.tuning.kernel > 0) else { return };
        if self.has_asked_for_kernel.swap(true, Ordering::Relaxed) {
            return;
        }
        let opened = CopyKernel::open(self.rank, &app, self.tuning.workers);
        let opened = opened
            .inspect_err(|e| log::info!("rank {}: no copy kernel, all transfers go by the stream: {e}", self.rank));
        self.state.lock().handover.kernel = opened.ok().map(Box::new);
    }

    /// Who makes calls in the application's context; `None` before there is a GPU window and after it is closed.
    pub fn app(&self) -> Option<Arc<AppThread>> {
        self.state.lock().device.as_ref().map(|d| d.app().clone())
    }

    /// Where calls are made that need a context and wait for nobody; `None` as for `app`.
    pub fn context(&self) -> Option<Arc<Context>> {
        self.state.lock().device.as_ref().map(|d| d.home().clone())
    }

    /// Has something done by a thread that may stand in the driver; at once, once it is closed.
    pub fn defer(&self, job: impl FnOnce() + Send + 'static) {
        match self.app() {
            Some(app) => app.post(job),
            None => job(),
        }
    }

    /// Where it stands, as a number that changes when something is done; `None`: nothing is under way.
    fn stands_at(&self) -> Option<u64> {
        self.under_way.load(Ordering::Relaxed).then(|| self.landed.load(Ordering::Relaxed))
    }

    /// What waits and what is in flight; `None`: another thread is at work.
    fn describe(&self) -> Option<String> {
        Some(self.state.try_lock()?.describe())
    }

    /// Whether its streams are to be in a private context.
    pub fn wants_private_context(&self) -> bool {
        self.state.lock().tuning.own
    }

    /// Lets a rank that has no GPU window take part in transfers with one that has: its engine works in that one's
    /// context. Waits for no call there, and does without a copy kernel: it is a post or a poll that does this. One
    /// that was closed stays so, and fails what it is given.
    pub fn open_like(&self, other: &Engine) -> Result<()> {
        match other.app().filter(|_| !self.has_failed()) {
            Some(app) => self.open(app.context().clone(), Opening::ForPeer),
            None => Ok(()),
        }
    }

    /// Waits for the submissions in flight. `false`: they still are.
    fn drain(&self, state: &mut EngineState) -> bool {
        let (end, wait) = (Instant::now() + DRAIN_WITHIN, Wait::begin());
        while state.is_touching_memory() {
            if !state.complete(&self.registry) {
                state.check(self.rank);
                if Instant::now() > end {
                    return false;
                }
                wait.rest();
            }
        }
        true
    }

    /// Takes operations and starts what can start. Those of one lane arrive in their order: the caller holds the lane.
    #[inline]
    pub fn submit(&self, ops: impl Iterator<Item = Op>) {
        // By way of `incoming` only where another thread is at work, which finds them there: each lock and each word
        // that says so is memory that another processor may have had last.
        match self.state.try_lock() {
            Some(mut state) => {
                self.take(&mut state);
                state.queue_up(ops);
                if self.advance(state).is_none() {
                    self.poll();
                }
            }
            None => {
                self.submit_all_later(ops);
                self.poll();
            }
        }
    }

    /// The helper thread works beside the callers: said at the end.
    pub fn note_beside(&self) {
        self.beside.fetch_add(1, Ordering::Relaxed);
    }

    /// Takes an operation for the next poll: for callers that hold windows in place, which starting operations does
    /// too.
    pub fn submit_later(&self, op: Op) {
        self.submit_all_later(std::iter::once(op));
    }

    /// The same of several, which are taken together.
    pub fn submit_all_later(&self, ops: impl Iterator<Item = Op>) {
        self.incoming.lock().extend(ops);
        self.knocked.store(true, Ordering::Release);
    }

    fn take(&self, state: &mut EngineState) {
        if self.knocked.load(Ordering::Relaxed) && self.knocked.swap(false, Ordering::Acquire) {
            state.queue_up(self.incoming.lock().drain(..));
        }
    }

    /// Starts what can start and completes what is done, as the only one who does, and lets go. Returns whether
    /// something is under way; `None`: operations came meanwhile, which nobody may have seen.
    fn advance(&self, mut state: MutexGuard<'_, EngineState>) -> Option<bool> {
        let under_way = state.advance(self.rank, &self.registry, |state| self.take(state));
        self.note(&state);
        if state.failure.is_some() {
            self.say_failed(&state);
        }
        drop(state);
        // Whoever submits finds the lock free, or is seen here: `submit_all_later` and `poll`.
        fence(Ordering::SeqCst);
        (!self.knocked.load(Ordering::Relaxed)).then_some(under_way)
    }

    /// Starts what can start and completes what is done. Returns whether something is under way.
    pub fn poll(&self) -> bool {
        for _ in 0..ROUNDS {
            // With the one in `advance`: whoever submits finds the lock free, or its holder sees it after letting go.
            fence(Ordering::SeqCst);
            let Some(state) = self.state.try_lock() else {
                self.busy.fetch_add(1, Ordering::Relaxed);
                return true;
            };
            if let Some(under_way) = self.advance(state) {
                return under_way;
            }
        }
        true
    }

    /// For the watch. What has not changed is not stored: several threads poll.
    #[inline]
    fn note(&self, state: &EngineState) {
        if self.landed.load(Ordering::Relaxed) != state.completions {
            self.landed.store(state.completions, Ordering::Relaxed);
        }
        let is_up = state.handover.kernel.as_ref().is_some_and(|kernel| kernel.is_up());
        if self.kernel_is_up.load(Ordering::Relaxed) != is_up {
            self.kernel_is_up.store(is_up, Ordering::Relaxed);
        }
        let has_work = state.has_work();
        if self.under_way.load(Ordering::Relaxed) != has_work {
            self.under_way.store(has_work, Ordering::Relaxed);
        }
    }

    /// Says on this rank what its peers learn by their operations.
    #[cold]
    fn say_failed(&self, state: &EngineState) {
        if !self.has_failed.swap(true, Ordering::AcqRel) {
            if let Some(why) = &state.failure {
                log::warn!("{}; no operation moves memory of this GPU any more", why.message());
            }
        }
    }

    /// Whether the copy kernel would bring `len` bytes from `addr` to host memory now, or nearly.
    pub fn fetches_now(&self, addr: u64, len: u64) -> bool {
        self.kernel_is_up.load(Ordering::Relaxed) && self.could_fetch(addr, len)
    }

    /// Somebody else does what the copy kernel would, if one ran: calls for one where that happens often.
    pub fn miss_kernel(&self, addr: u64, len: u64) {
        if self.could_fetch(addr, len) {
            if let Some(mut state) = self.state.try_lock() {
                state.handover.miss();
            }
        }
    }

    fn could_fetch(&self, addr: u64, len: u64) -> bool {
        plan::is_short_host_copy(self.tuning.kernel, addr, len)
    }

    /// Ends everything; operations that are unfinished fail. `false`: the GPU may still be at work.
    pub fn close(&self) -> bool {
        // Nobody comes in any more.
        self.gate().close_and_wait(DRAIN_WITHIN);
        let mut state = self.state.lock();
        self.take(&mut state);
        // After an error the GPU may still write what was started before it.
        let idle = self.drain(&mut state) && state.failure.is_none();
        self.has_failed.store(true, Ordering::Release);
        let why = Error::rank_closed(self.rank);
        if !idle {
            state.fail_kernel(&why);
        }
        state.fail(why);
        let by_kernel = state.handover.kernel.as_ref().map(|kernel| kernel.stats()).unwrap_or_default();
        // Whoever closes it again has nothing to say.
        if let Some(line) = std::mem::take(&mut state.stats).line(self.rank, &self.busy, &self.beside, by_kernel) {
            log::info!("{line}");
        }
        let (kernel, device) = (state.handover.kernel.take(), state.device.take());
        state.tell_refused();
        // The driver may take its time; peers that ask find a closed engine meanwhile.
        drop(state);
        self.under_way.store(false, Ordering::Relaxed);
        if let Some(kernel) = kernel {
            if !kernel.close(idle) && idle {
                log::warn!(
                    "rank {}: the copy kernel has not ended, or its context has failed; its memory is left to \
                     the process",
                    self.rank
                );
            }
        }
        self.close_lane_kernel(idle);
        device.into_iter().for_each(|device| device.close_with_app(idle));
        let watched = self.opening.lock().take();
        drop(watched);
        idle
    }
}
