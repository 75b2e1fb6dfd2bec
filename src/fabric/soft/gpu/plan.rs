//! Who moves an operation, decided from facts about the operation and the load: pure functions, which start nothing.
//!
//! `dispatch` and `batch` collect the facts, ask, and do what is answered.

use super::op::{Op, TransferEnd};
use super::PinnedPools;
use crate::config::GpuIssue;
use crate::memory::key::Key;
use std::time::Duration;

/// With so many other copies waiting or under way, those of more than `CROWDED_BYTES` are quicker by copy engine, many
/// in one call, than by a copy kernel of one warp, which does them one after another, at 1 to 2 GB/s. Signals and small
/// values, of which a barrier brings many at once, do not count: a submission among them would cost each of them its
/// time.
pub const CROWD: usize = 3;
pub const CROWDED_BYTES: u64 = 256;
/// The longest copy between host memory and this GPU for the copy kernel's first block: a warp loads 4 KiB from host
/// memory in 1.2 µs, where a submission of the stream takes 8 to 12 and waits until the copy kernel is through. As long
/// as small messages from other hosts get.
const HOST_UP_TO: u64 = PinnedPools::SMALL;
/// Copies above this are shared by all warps of the copy kernel's first block; shorter ones are side by side anyhow.
const SHARED_FROM: u64 = 1 << 10;
/// The shortest copies for worker blocks, where the copy kernel's first block does not do them itself.
const WORKERS_FROM: u64 = 2 << 10;
/// The longest that worker blocks take: 0.7 ms, or some 15 where the GPU had room for the kernel's first block alone. A
/// kernel does not look at its time before it is through.
const WORKERS_UP_TO: u64 = 512 << 20;
/// The longest from another GPU that worker blocks take with others about, where the stream would have to read signals
/// before it can add to them: what came behind each such signal waited for two submissions.
const CROWDED_FAR: u64 = 128 << 10;
/// From here on a lone copy within the GPU is worth a launch, and the wait for it: through pinned memory it would take
/// some 10 µs longer, which is what a launch takes, and the next copies find the kernel running.
const WORTH_A_LAUNCH: u64 = 16 << 10;
/// From here on a copy within the GPU is left to the GPU's processors, on the bulk stream: where they are free that is
/// done at once, and through pinned memory it would take 0.9 ms.
pub const SAME_GPU_BULK: u64 = 32 << 20;
/// The same where kernels have the processors: it waits 2.4 ms for their time slice, and through pinned memory it takes
/// 1.8 ms.
const SAME_GPU_BULK_BUSY: u64 = 64 << 20;
/// An operation of so many bytes does not wait for others to gather.
const LARGE: u64 = 64 << 10;
/// Copy engines do no more stores than this in one submission: each is a call of 1.3 µs.
const FEW_STORES: usize = 32;
/// Operations of one submission that are many.
const MANY: usize = 4;
/// Submissions are close together if no more time than this lies between two of them.
const CLOSE: Duration = Duration::from_micros(100);

/// Who moves an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mover {
    /// The first block of the copy kernel, which may be one warp.
    CopyKernel,
    /// The worker blocks of the copy kernel; or, where none takes commands, a launch of the size that it wants.
    WorkerBlocks,
    /// A stream for bulk copies; the operation is deferred until its copy is done.
    BulkStream,
    /// Nobody yet: it is deferred behind a bulk copy of its lane.
    Deferred,
    /// A copy engine, from GPU memory to GPU memory.
    CopyEngine,
    /// Copy engines and the CPU, through pinned memory.
    PinnedMemory,
    /// The stream itself stores a value or a signal.
    StreamStore,
    /// The CPU: no end is in GPU memory, or there is nothing to move.
    Cpu,
}

/// What the copy kernel can be asked for, as far as an operation at the head of the queue goes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KernelState {
    /// There is none, or it is not waited for.
    Absent,
    /// It takes no commands now; a launch can be asked for.
    Callable,
    /// A launch of the size that is wanted runs or may come up in time.
    Awaited,
    /// It takes commands, and no submission is in flight.
    Takes(LaunchSize),
}

/// How much of the GPU a launch of the copy kernel takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum LaunchSize {
    /// One warp.
    Warp,
    /// A block of eight warps, which share copies of more than 1 KiB.
    Block,
    /// Such a block, and worker blocks for large copies within GPU memory.
    WorkerBlocks,
}

/// Where a signal lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalAt {
    pub is_on_gpu: bool,
    pub is_aligned: bool,
}

/// What configuration sets.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlanLimits {
    /// The longest copy for the copy kernel's first block where that is one warp.
    pub kernel: u64,
    /// Launches may have more warps than one.
    pub has_workers: bool,
    /// The longest copy from another GPU for worker blocks.
    pub far: u64,
    /// The shortest copy for the bulk stream; 0: none goes there.
    pub bulk: u64,
}

impl PlanLimits {
    /// The longest copy for a first block of eight warps.
    fn of_block(&self) -> u64 {
        2 * self.kernel
    }
}

impl From<&GpuIssue> for PlanLimits {
    fn from(t: &GpuIssue) -> Self {
        Self { kernel: t.kernel, has_workers: t.workers > 0, far: t.far, bulk: t.bulk }
    }
}

/// An operation, and the load when it is its turn.
#[derive(Clone, Copy, Debug)]
pub struct Facts {
    pub from: TransferEnd,
    pub to: TransferEnd,
    pub len: u64,
    /// Bytes whose transfer has been started.
    pub done: u64,
    pub signal: Option<SignalAt>,
    /// A submission reads its signal's value, or the word that it changes.
    pub is_reading: bool,
    /// Any GPU of this process may load from and store to the caller's end.
    pub is_open: bool,
    /// It was deferred before, and its turn has come: it is not deferred again.
    pub has_turn: bool,
    /// No signal tells of its bytes.
    pub is_get: bool,
    /// Both ends are on the engine's GPU, whose copy engines cannot copy between them.
    pub is_same_gpu: bool,
    /// The GPU's processors were late of late; looked up only for what they copy otherwise.
    pub is_busy: bool,
    /// All that it names lies in windows that are registered; looked up only where the copy kernel may take it.
    pub windows_hold: bool,
    /// Operations of its lane are deferred.
    pub lane_waits: bool,
    /// Other copies that wait or are under way, as far as they matter to it.
    pub crowd: usize,
    /// The stream has to read signals of late before it can add to them.
    pub reads_signals: bool,
    pub kernel: KernelState,
    pub limits: PlanLimits,
}

/// Whether the copy kernel would have been the better way for an operation that goes by the stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Suits {
    /// Not for this one.
    No,
    /// It would.
    Kernel,
    /// It would, by a launch of this size.
    With(LaunchSize),
}

impl Facts {
    /// The facts of `op` alone, as if it were by itself and there were no copy kernel.
    pub fn of(op: &Op, limits: PlanLimits) -> Self {
        let signal =
            |s: crate::rma::op::Signal| SignalAt { is_on_gpu: Key(s.rkey).is_on_gpu(), is_aligned: s.remote % 8 == 0 };
        Self {
            from: op.from,
            to: op.to,
            len: op.len,
            done: op.done,
            signal: op.signal.map(signal),
            is_reading: op.reading.is_some() || op.fetch.is_some(),
            is_open: op.is_open,
            has_turn: op.has_turn,
            is_get: op.is_get,
            is_same_gpu: false,
            is_busy: false,
            windows_hold: false,
            lane_waits: false,
            crowd: 0,
            reads_signals: false,
            kernel: KernelState::Absent,
            limits,
        }
    }

    /// The longest copy within GPU memory for the copy kernel's first block: for one warp what configuration says, or
    /// less in a crowd; eight take twice as much.
    fn limit(&self) -> u64 {
        match self.kernel {
            KernelState::Takes(LaunchSize::Block | LaunchSize::WorkerBlocks) => self.limits.of_block(),
            _ if self.crowd < CROWD => self.limits.kernel,
            _ => self.limits.kernel.min(CROWDED_BYTES),
        }
    }

    /// The longest copy, wherever from, that is quicker by worker blocks than by a submission. With others about copy
    /// engines do more at a time, if their submissions have not to wait for signals to be read. For copies within the
    /// GPU `suits_workers` has no such limit.
    fn reach(&self) -> u64 {
        match (self.limits.has_workers, self.crowd < CROWD, self.reads_signals) {
            (false, ..) | (true, false, false) => 0,
            (true, true, _) => self.limits.far,
            (true, false, true) => self.limits.far.min(CROWDED_FAR),
        }
    }

    /// Whether one end of its copy is in host memory.
    fn has_host_end(&self) -> bool {
        self.len > 0 && !(self.from.is_on_gpu() && self.to.is_on_gpu())
    }

    /// Whether the copy kernel takes operations of this kind, with copies of at most `limit` bytes within GPU memory.
    fn is_kind_of_kernel(&self, limit: u64) -> bool {
        if self.done != 0 || self.is_reading {
            return false;
        }
        let is_short = |addr| is_short_host_copy(self.limits.kernel, addr, self.len);
        let data = match (self.from, self.to) {
            _ if self.len == 0 => true,
            (TransferEnd::Caller { gpu: false, .. }, to @ TransferEnd::Window { addr, .. }) => {
                let is_inline = matches!(self.len, 1 | 2 | 4 | 8) && addr % self.len == 0;
                to.is_on_gpu() && (is_inline || is_short(addr))
            }
            // What a rank gets from host memory of its process.
            (TransferEnd::Window { .. }, TransferEnd::Caller { addr, gpu: true }) if !self.from.is_on_gpu() => {
                self.is_open && is_short(addr)
            }
            // The CPU delivers the bytes: no signal on the GPU may be in front of that.
            (from, to) if !to.is_on_gpu() && (self.is_get || matches!(to, TransferEnd::Caller { .. })) => {
                from.is_on_gpu() && is_short(from.addr()) && self.signal.is_none()
            }
            (from, to) => {
                let words = (from.addr() | to.addr() | self.len) % 4 == 0;
                self.len <= limit && words && from.is_on_gpu() && to.is_on_gpu() && self.is_open
            }
        };
        data && self.signal.is_none_or(|s| s.is_on_gpu && s.is_aligned)
    }

    /// Whether it is a copy of at least `from` bytes that worker blocks could do.
    fn is_kind_of_workers(&self, from: u64) -> bool {
        let is_long = (from.max(WORKERS_FROM)..=WORKERS_UP_TO).contains(&self.len);
        is_long && !self.has_host_end() && self.is_kind_of_kernel(u64::MAX)
    }

    /// Whether worker blocks are its way: a copy within the GPU, of at least `from` bytes. A window that is gone is
    /// found out by the stream.
    fn suits_workers(&self, from: u64) -> bool {
        self.limits.has_workers && self.is_kind_of_workers(from) && self.is_same_gpu && self.windows_hold
    }

    /// Whether the copy kernel would have been the better way for it.
    pub fn suits_kernel(&self) -> Suits {
        if self.wants_block() {
            return Suits::With(LaunchSize::Block);
        }
        let limit = self.limit();
        match self.is_kind_of_kernel(limit.max(self.reach())) {
            false => Suits::No,
            true if self.len > limit && !self.has_host_end() => Suits::With(LaunchSize::WorkerBlocks),
            true => Suits::Kernel,
        }
    }

    /// Whether `windows_hold` can make a difference: the lookup is not free.
    pub fn needs_windows(&self) -> bool {
        match self.kernel {
            KernelState::Absent => false,
            KernelState::Callable | KernelState::Awaited => self.is_same_gpu && self.len >= WORKERS_FROM,
            KernelState::Takes(_) => true,
        }
    }

    /// The size of a launch that is worth waiting for: a block does up to 16 KiB by itself.
    pub fn wanted_size(&self) -> LaunchSize {
        if self.len <= self.limits.of_block() {
            LaunchSize::Block
        } else {
            LaunchSize::WorkerBlocks
        }
    }

    /// Whether the copy kernel does it sooner with more warps than one.
    pub fn wants_block(&self) -> bool {
        self.len > SHARED_FROM && self.limits.has_workers && self.is_kind_of_kernel(self.limits.of_block())
    }

    /// Whether worker blocks that take commands now would do it. They may find out that a window is gone.
    fn is_for_workers_now(&self, size: LaunchSize) -> bool {
        let is_in_reach = self.is_kind_of_workers(WORKERS_FROM) && self.len <= self.reach();
        size == LaunchSize::WorkerBlocks && self.len > self.limit() && (is_in_reach || self.suits_workers(WORKERS_FROM))
    }

    /// `BulkStream` for a bulk copy, `Deferred` for an operation behind one; `None`: it can go on. What was deferred
    /// before is not deferred again: others of its lane that still are came later. What worker blocks do need not wait
    /// for itself.
    fn deferral(&self, by_workers: bool) -> Option<Mover> {
        if self.has_turn {
            return None;
        }
        let left = self.len - self.done;
        let bulk = match self.limits.bulk {
            0 => u64::MAX,
            bulk if self.is_same_gpu && self.is_busy => bulk.max(SAME_GPU_BULK_BUSY),
            bulk if self.is_same_gpu => bulk.max(SAME_GPU_BULK),
            bulk => bulk,
        };
        if !by_workers && left >= bulk && self.from.is_on_gpu() && self.to.is_on_gpu() {
            Some(Mover::BulkStream)
        } else {
            self.lane_waits.then_some(Mover::Deferred)
        }
    }

    /// What is left of it, for a submission.
    fn rest(&self) -> StreamCopy {
        StreamCopy {
            from_gpu: self.from.is_on_gpu(),
            to_gpu: self.to.is_on_gpu(),
            is_same_gpu: self.is_same_gpu,
            left: self.len - self.done,
            to: self.to.addr().wrapping_add(self.done),
        }
    }
}

/// Who moves an operation.
pub fn plan(f: &Facts) -> Mover {
    let mut by_workers = false;
    match f.kernel {
        KernelState::Takes(size) => by_workers = f.is_for_workers_now(size),
        KernelState::Awaited if f.suits_workers(WORKERS_FROM) => return Mover::WorkerBlocks,
        KernelState::Callable if f.suits_workers(if f.crowd >= CROWD { WORKERS_FROM } else { WORTH_A_LAUNCH }) => {
            return Mover::WorkerBlocks
        }
        _ => {}
    }
    if let Some(deferral) = f.deferral(by_workers) {
        return deferral;
    }
    if matches!(f.kernel, KernelState::Takes(_)) && f.windows_hold {
        if by_workers {
            return Mover::WorkerBlocks;
        }
        if f.is_kind_of_kernel(f.limit()) {
            return Mover::CopyKernel;
        }
    }
    match f.rest() {
        rest if rest.left > 0 => rest.mover(),
        _ if f.signal.is_some_and(|s| s.is_on_gpu) => Mover::StreamStore,
        _ => Mover::Cpu,
    }
}

/// Whether a copy of `len` bytes between host memory and GPU memory at `addr` is one for the copy kernel, whose longest
/// copies within GPU memory have `limit` bytes: twice as many are still quicker than by the stream, which takes a copy
/// engine to and from host memory.
pub fn is_short_host_copy(limit: u64, addr: u64, len: u64) -> bool {
    len <= (2 * limit).min(HOST_UP_TO) && (addr | len) % 4 == 0
}

/// What is left of an operation's data, for a submission on the stream.
#[derive(Clone, Copy, Debug)]
pub struct StreamCopy {
    pub from_gpu: bool,
    pub to_gpu: bool,
    /// Both ends are on the engine's GPU, whose copy engines cannot copy between them.
    pub is_same_gpu: bool,
    /// Bytes, not 0.
    pub left: u64,
    /// Address of the destination.
    pub to: u64,
}

impl StreamCopy {
    /// Who moves it, or the next part of it.
    pub fn mover(&self) -> Mover {
        match (self.from_gpu, self.to_gpu) {
            (true, true) if self.is_same_gpu => Mover::PinnedMemory,
            (true, true) => Mover::CopyEngine,
            (false, true) if matches!(self.left, 4 | 8) && self.to % self.left == 0 => Mover::StreamStore,
            (false, true) | (true, false) => Mover::PinnedMemory,
            (false, false) => Mover::Cpu,
        }
    }
}

/// The stores of one submission.
#[derive(Clone, Copy, Debug)]
pub struct Stores {
    /// Stores of the stream were late in a submission not long ago.
    pub were_late: bool,
    /// One of them must become visible as a whole, or is an addition.
    pub needs_stream: bool,
    pub count: usize,
}

impl Stores {
    /// Who does them: copy engines wait for nobody, but cost some 9 µs a submission.
    pub fn mover(&self) -> Mover {
        if self.were_late && !self.needs_stream && self.count <= FEW_STORES {
            Mover::CopyEngine
        } else {
            Mover::StreamStore
        }
    }
}

/// The queue when the stream could take a submission.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    /// Submissions in flight, and how many may be.
    pub in_flight: usize,
    pub most: usize,
    /// Operations that wait, and how many make a submission worth its cost.
    pub queued: usize,
    pub gather: usize,
    /// What is left of the first one.
    pub left: u64,
    pub from_gpu: bool,
}

impl Waiting {
    /// Whether a submission is worth its cost now. While one is in flight operations gather, but for those that cost
    /// the driver little (no copy) or the GPU much.
    pub fn is_due(&self) -> bool {
        let has_no_copy = self.left == 0 || self.left <= 8 && !self.from_gpu;
        let is_worth_it = self.queued >= self.gather || self.left >= LARGE || has_no_copy;
        self.queued > 0 && (self.in_flight == 0 || self.in_flight < self.most && is_worth_it)
    }
}

/// Whether a submission of `operations` that the copy kernel could have moved, `since` the last one, is worth a launch.
pub fn is_worth_a_launch(operations: usize, since: Option<Duration>) -> bool {
    operations >= MANY || since.is_some_and(|since| since <= CLOSE)
}

#[cfg(test)]
#[path = "plan_tests.rs"]
mod tests;
