//! How bytes move: one trait, two fabrics.
//!
//! `verbs` drives RDMA devices through libibverbs, `soft` moves bytes through
//! shared memory and TCP. `comm` opens one fabric for a communicator and owns
//! it; `rma` checks operations and hands them to a [`Context`]. Collective
//! steps come in two halves, so that a fabric never talks to peers itself
//! during set-up: it says what the peers need to know, `comm` moves it, and
//! the fabric is handed what the peers said.

pub mod devices;
pub mod lanes;
pub mod soft;
pub mod verbs;

use crate::error::Result;
use crate::memory::gpu::GpuMemory;
use crate::memory::window::{Registration, Remote};
use crate::rma::atomic::Atomics;
use crate::rma::op::Op;
use crate::rma::reach::is_reached;
use crate::rma::seq::Seq;
use std::sync::atomic::AtomicU32;

/// This rank among all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct World {
    /// This rank, below `nranks`.
    pub rank: u32,
    /// Ranks in the communicator.
    pub nranks: u32,
}

/// What `createContext` asks of a fabric.
#[derive(Clone, Copy, Debug)]
pub struct ContextSpec {
    /// Contexts to make.
    pub contexts: u32,
    /// Work queue entries a (context, peer) that the caller wants; 0: the fabric's choice.
    pub queue_depth: u32,
    /// Traffic class for this set; `None`: the environment's, then the fabric's default.
    pub traffic_class: Option<u8>,
    /// Only ranks that differ from this one by a multiple of it are talked to; 0 and 1: all. The same on every rank.
    pub rank_stride: u32,
}

impl ContextSpec {
    /// Whether a rank talks to a peer.
    pub fn reaches(&self, world: World, peer: u32) -> bool {
        is_reached(world.rank, peer, self.rank_stride)
    }
}

/// Memory to register.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Window number at this rank; other ranks may have another for theirs.
    pub id: u32,
    /// First byte, an address in this process, of host or GPU memory.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Signals live here: accesses must keep strict order.
    pub strict: bool,
    /// Registered through this DMA-BUF descriptor at this offset instead of by address. Borrowed.
    pub dma_buf: Option<(std::os::fd::RawFd, u64)>,
}

/// A way for bytes to move among the ranks of one communicator. One object a communicator; every method may be
/// called from any thread.
pub trait Fabric: Sized + Send + Sync + 'static {
    /// One context's queues towards all peers.
    type Context: Context;
    /// Contexts that exist here but know no peers yet.
    type Pending: Send;

    /// What every peer is to know of this rank before contexts exist.
    fn hello(&self) -> Vec<u8>;

    /// Learns what every rank (this one included, by rank) said in [`Fabric::hello`]. The bytes come from
    /// peers of any build: malformed ones are an error that names the rank, never a panic.
    fn join(&self, world: World, hellos: &[&[u8]]) -> Result<()>;

    /// Makes the queues of `spec.contexts` contexts. Returns them and, for each rank in turn, an equally long
    /// slice that this rank alone needs to know.
    fn prepare_contexts(&self, spec: &ContextSpec) -> Result<(Self::Pending, Vec<u8>)>;

    /// Begins to connect the queues where ends have to agree on more than one exchange tells; `from[r]` as for
    /// [`Fabric::finish_contexts`]. Returns slices as [`Fabric::prepare_contexts`] does, on all ranks or none, for
    /// which there is another exchange.
    fn agree(&self, _pending: &mut Self::Pending, _from: &[&[u8]]) -> Result<Option<Vec<u8>>> {
        Ok(None)
    }

    /// Takes what the ranks said in that exchange.
    fn take_agreed(&self, _pending: &mut Self::Pending, _from: &[&[u8]]) -> Result<()> {
        Ok(())
    }

    /// Connects the queues; `from[r]` is the slice that rank r addressed to this rank.
    fn finish_contexts(&self, pending: Self::Pending, from: &[&[u8]]) -> Result<Vec<Self::Context>>;

    /// Whether all ranks must have finished [`Fabric::finish_contexts`] before anyone may send.
    const BARRIER_AFTER_CONTEXTS: bool;

    /// Whether [`Fabric::confirm_puts`] does what it says. Without it a signal tells of its sender's puts alone.
    fn can_confirm_puts(&self) -> bool;

    /// Contexts that are made from here on call a put complete only when it is visible at the peer, so that any signal
    /// which is sent behind that, by whichever rank, tells of it, too.
    fn confirm_puts(&self);

    /// Registers host memory for local and remote access.
    fn register(&self, region: &Region) -> Result<Registration>;

    /// Registers GPU memory, which the CPU must not touch.
    fn register_gpu(&self, region: &Region, memory: &GpuMemory) -> Result<Registration>;

    /// What peers are to know of a window that was just registered, so that they can use its memory themselves; empty:
    /// nothing. All go on with [`Fabric::take_offers`].
    fn offer(&self, _region: &Region, _gpu: Option<&GpuMemory>) -> Vec<u8> {
        Vec::new()
    }

    /// Takes what peers offered, if anything, by rank; each has the window at one of `remotes`. Returns what they are
    /// to know where any rank has offered something.
    fn take_offers(&self, _region: &Region, _remotes: &[Remote], _offers: &[&[u8]]) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    /// Learns who has taken this rank's offer, from what each rank's `take_offers` returned.
    fn settle_offers(&self, _region: &Region, _reports: &[&[u8]]) -> Result<()> {
        Ok(())
    }

    /// The address of the device that it uses on the PCI bus; `None`: it uses none, or one that is on no such bus.
    fn pci_address(&self) -> Option<&str> {
        None
    }

    /// Ends what would outlive the last context and registration: threads, sockets.
    fn close(&self) {}
}

/// What a context took of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// So many operations, from the first one on.
    pub taken: usize,
    /// The number of the last one that it took; those before it have the numbers before. Says nothing if it took none.
    pub last: Seq,
}

impl Posted {
    /// None for now.
    pub const NONE: Self = Self { taken: 0, last: Seq(0) };
}

/// What a (context, peer) was given, all in all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// The number of the newest operation, complete or not.
    pub newest: Seq,
    /// Bytes that operations move there or bring from there: of an atomic one its word, of a signal none.
    pub bytes: u64,
}

/// Where this rank's device code looks how many of its entries to a peer are complete, and which operations of a batch
/// are more than one entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CreditIndex {
    /// Its address, a multiple of its size.
    pub at: u64,
    /// This rank's own key to the window that it is in.
    pub rkey: u32,
    /// It has 8 bytes, instead of 4.
    pub is_wide: bool,
    /// A bit for each operation, the lowest for the first: it is two entries. Those beyond the 32nd are one.
    pub joined: u32,
}

impl CreditIndex {
    /// The same for what comes behind the first `n` operations of the batch.
    #[inline]
    pub fn behind(self, n: usize) -> Self {
        Self { joined: self.joined.checked_shr(n as u32).unwrap_or(0), ..self }
    }

    /// How many entries operation `nth`, from 0 on, is.
    #[inline]
    pub fn entries(&self, nth: usize) -> u8 {
        1 + (self.joined.checked_shr(nth as u32).unwrap_or(0) & 1) as u8
    }
}

/// What has to be waited for until a flush is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// Nothing: it is done.
    Done,
    /// This operation.
    Until(Seq),
    /// There is no room to start it now.
    NoRoom,
}

/// One context: its queues towards all peers. Every method may be called from any thread at any time and none blocks:
/// what there is no room for is not taken, and the caller decides whether it waits. What is unfinished to one peer
/// takes no room from another. `peer` is below the number of ranks: callers have checked it. Operations to a peer are
/// numbered consecutively in the order of the calls; they become locally complete in that order.
pub trait Context: Send + Sync + 'static {
    /// The fabric's name, for the log and statistics: up to 8 ASCII characters.
    const NAME: &'static str;

    /// Whether progress on one context of a communicator is progress on all.
    const SHARES_PROGRESS: bool;

    /// Starts operations to one peer in their order, as many as there is room for: `OXYGIN_MAX_OPERATIONS` a
    /// (context, peer). Those that it takes cost one doorbell, one wake-up, one submission. Fails, and takes none, if
    /// the peer cannot be reached any more, or an operation is atomic and [`Context::atomics`] says that there is none.
    ///
    /// # Safety
    /// The local ranges of puts are readable, those of gets and of fetched values writable, until the operation is
    /// locally complete. The operations themselves are copied.
    unsafe fn post(&self, peer: u32, ops: &[Op]) -> Result<Posted>;

    /// The same for operations that are entries of device code's, one or two each, and no gets into host memory: as
    /// each becomes locally complete, and all before it to this peer are, the fabric may add its entries to `index`
    /// itself. [`Context::paid`] says how many it has. `begin` is told how many operations it takes before any of them
    /// can be counted: device code reuses an entry's place as soon as it is. The call may fail behind that, and then
    /// completes none.
    ///
    /// # Safety
    /// As for [`Context::post`]. The index's window lives until the operations are complete, or the context is gone;
    /// nothing else changes the index until the operations are complete.
    unsafe fn post_entries(
        &self,
        peer: u32,
        ops: &[Op],
        _index: CreditIndex,
        begin: impl FnOnce(usize),
    ) -> Result<Posted> {
        // SAFETY: the caller's promise.
        let posted = unsafe { self.post(peer, ops) }?;
        begin(posted.taken);
        Ok(posted)
    }

    /// As [`Context::post`], an operation of this library's own to this rank, which is `rank`, that names no memory of
    /// the application's. Where the fabric can, it keeps these apart from all others: they have numbers and room of
    /// their own and no order with others, and no fault of another operation ends them.
    ///
    /// # Safety
    /// As for [`Context::post`].
    unsafe fn post_internal(&self, rank: u32, op: &Op) -> Result<Posted> {
        // SAFETY: the caller's promise.
        unsafe { self.post(rank, std::slice::from_ref(op)) }
    }

    /// As [`Context::test`], for one of these.
    fn test_internal(&self, rank: u32, seq: Seq) -> Result<bool> {
        self.test(rank, seq)
    }

    /// As [`Context::completed`], for these.
    fn completed_internal(&self, rank: u32) -> &AtomicU32 {
        self.completed(rank)
    }

    /// Whether the fabric may count entries of operations to `peer` at an index in the window with this key; once it
    /// may, it may for good.
    fn may_count(&self, _peer: u32, _rkey: u32) -> bool {
        false
    }

    /// How many entries of operations to `peer`, modulo 2^32, the fabric has added to the index that came with them: it
    /// counts those of each before [`Context::completed`] shows it.
    fn paid(&self, _peer: u32) -> u32 {
        0
    }

    /// Orders what gets from `peer` have brought, into whatever windows, before what the caller does next. `into`: the
    /// local key of a window that stays registered until the flush is done, if the caller knows of one.
    fn flush(&self, peer: u32, into: Option<u32>) -> Result<Flush>;

    /// Says when all operations to `peer` that are locally complete by now have been carried out there: what somebody
    /// else stores there from then on comes behind them. For who has nothing unfinished to that peer.
    fn fence(&self, _peer: u32) -> Result<Flush> {
        Ok(Flush::Done)
    }

    /// Whether an operation is locally complete. Makes progress when it is not. Fails when it never will be.
    fn test(&self, peer: u32, seq: Seq) -> Result<bool>;

    /// Lets whatever is unfinished advance.
    fn progress(&self) -> Result<()>;

    /// Whether anything on this context failed.
    fn has_error(&self) -> bool;

    /// The number of the newest operation to `peer` that is locally complete; lives as long as the context.
    fn completed(&self, peer: u32) -> &AtomicU32;

    /// What was posted to `peer` by now. For statistics: it may be waited for as long as an operation is posted.
    fn sent(&self, peer: u32) -> Sent;

    /// Which atomic operations it carries out; the same for all contexts of a communicator. Where there are none, the
    /// fabric has said so once when contexts were made, and [`Context::post`] fails for each.
    fn atomics(&self) -> Atomics;

    /// The registration of the window with this handle is about to end: nothing may be remembered of it.
    fn forget(&self, _window: u64) {}

    /// A kernel on this rank's GPU that serves lanes in place of [`Context::post`], for who drains such queues of
    /// device code; `None`: there is none. Set-up only: it may wait for kernels.
    fn lane_kernel(&self, _holds: lanes::Holds) -> Option<Box<dyn lanes::LaneServer>> {
        None
    }
}
