//! How bytes move: one trait, two fabrics.
//!
//! `verbs` drives RDMA devices through libibverbs, `soft` moves bytes through
//! shared memory and TCP. `comm` opens one fabric for a communicator and owns
//! it; `rma` checks operations and hands them to a [`Context`]. Collective
//! steps come in two halves, so that a fabric never talks to peers itself
//! during set-up: it says what the peers need to know, `comm` moves it, and
//! the fabric is handed what the peers said.

pub mod devices;
pub mod soft;
pub mod verbs;

use crate::error::Result;
use crate::rma::op::{Get, Put};
use crate::rma::seq::Seq;

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
}

/// Memory to register.
#[derive(Clone, Copy, Debug)]
pub struct Region {
    /// Window number, the same on every rank of the communicator.
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

/// A registered region. Dropping it ends the registration.
pub struct Registration {
    /// What local work requests name the region by.
    pub lkey: u32,
    /// What peers name it by.
    pub rkey: u32,
    /// The fabric's own object.
    pub guard: Box<dyn Send + Sync>,
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

    /// Connects the queues; `from[r]` is the slice that rank r addressed to this rank.
    fn finish_contexts(&self, pending: Self::Pending, from: &[&[u8]]) -> Result<Vec<Self::Context>>;

    /// Whether all ranks must have finished [`Fabric::finish_contexts`] before anyone may send.
    const BARRIER_AFTER_CONTEXTS: bool;

    /// Registers memory for local and remote access.
    fn register(&self, region: &Region) -> Result<Registration>;
}

/// One context: its queues towards all peers. Every method may be called from any thread at any time; calls for
/// different contexts share no lock. `peer` is below the number of ranks: callers have checked it. Operations to a
/// peer are numbered in the order of the calls; they become locally complete in that order.
pub trait Context: Send + Sync + 'static {
    /// Starts a put, with or without a signal behind it. Never blocks, never refuses for want of room.
    ///
    /// # Safety
    /// The local range of `put` is readable until the operation is locally complete.
    unsafe fn put(&self, peer: u32, put: &Put) -> Result<Seq>;

    /// Starts a get.
    ///
    /// # Safety
    /// The local range of `get` is writable until the operation is locally complete.
    unsafe fn get(&self, peer: u32, get: &Get) -> Result<Seq>;

    /// Orders what gets from `peer` have brought before what the caller does next; `None`: nothing to wait for.
    fn flush(&self, peer: u32) -> Result<Option<Seq>>;

    /// Whether an operation is locally complete. Makes progress when it is not. Fails when it never will be.
    fn test(&self, peer: u32, seq: Seq) -> Result<bool>;

    /// Lets whatever is unfinished advance.
    fn progress(&self) -> Result<()>;

    /// Whether anything on this context failed.
    fn has_error(&self) -> bool;
}
