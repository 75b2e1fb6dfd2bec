//! The bytes of a page of statistics: a [`Header`], then a [`Record`] for each (context, peer), and as many more for
//! the companions of queue pairs where there are any.
//!
//! All fields are words of 64 bits in the machine's byte order; times are nanoseconds of `CLOCK_MONOTONIC`. A reader
//! looks at the magic number and the version first; whoever changes a field raises [`VERSION`].

use std::sync::atomic::AtomicU64;

/// What a page begins with.
pub const MAGIC: u64 = u64::from_le_bytes(*b"OXYSTATS");
/// Of this layout.
pub const VERSION: u64 = 2;
/// Name of the anonymous file: `/proc/PID/fd` shows it as `/memfd:oxygin-stats (deleted)`.
pub const NAME: &str = "oxygin-stats";
/// Buckets of a histogram. Bucket i counts what took at least 2^i and less than 2^(i+1) nanoseconds; the first one
/// what took less, too, and the last one, from 9 minutes on, what took more.
pub const BUCKETS: usize = 40;

/// What fills the records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// This library's engine, batch by batch.
    Engine,
    /// Calls of a table: numbers of operations, their bytes and times of some, published from its progress function.
    Table,
}

/// What a (context, peer) is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum State {
    /// Takes entries.
    Open = 0,
    /// A flush is under way: nothing behind it is taken until it is done.
    Flushing = 1,
    /// The fabric failed it: what comes is dropped.
    Failed = 2,
    /// An entry of its context was malformed: what comes is dropped.
    Stopped = 3,
}

/// Of a page. 256 bytes.
#[repr(C)]
#[derive(Default)]
pub struct Header {
    /// [`MAGIC`], stored last, when everything else but the records stands.
    pub magic: AtomicU64,
    /// [`VERSION`].
    pub version: AtomicU64,
    /// Where the first record begins.
    pub header_bytes: AtomicU64,
    /// Bytes from one record to the next.
    pub record_bytes: AtomicU64,
    /// Records.
    pub records: AtomicU64,
    /// Records of each context. Record i is of context i / this and of the peer `first_peer` + (i % this) *
    /// `peer_step`.
    pub per_context: AtomicU64,
    /// See `per_context`.
    pub first_peer: AtomicU64,
    /// See `per_context`.
    pub peer_step: AtomicU64,
    /// 1: this library's engine; 2: the calls of a table. See [`Way`].
    pub way: AtomicU64,
    /// Number of the communicator in its process.
    pub comm: AtomicU64,
    /// Of the set of contexts in the communicator.
    pub set: AtomicU64,
    /// What NCCL calls the communicator.
    pub comm_id: AtomicU64,
    /// This rank.
    pub rank: AtomicU64,
    /// Ranks.
    pub nranks: AtomicU64,
    /// Contexts of the set.
    pub contexts: AtomicU64,
    /// Threads of the engine that fill the page; 0: callers do.
    pub threads: AtomicU64,
    /// Up to 8 ASCII characters, the first one lowest.
    pub fabric: AtomicU64,
    /// When the page was made.
    pub created: AtomicU64,
    /// When somebody last looked after it: every quarter of a second while its threads run.
    pub published: AtomicU64,
    /// `OXYGIN_STALL` in nanoseconds; 0: nobody watches.
    pub stall: AtomicU64,
    /// The number of the first record of a companion, behind those of all (context, peer): record i behind it is of the
    /// companion of what record i is of. 0: there are none.
    pub first_companion: AtomicU64,
    /// Zero.
    pub reserved: [AtomicU64; 11],
}

/// Of a (context, peer), or of its companion. 768 bytes. Counts only ever grow, but for `under_way`.
#[repr(C)]
pub struct Record {
    /// Entries taken off the queue, or operations posted by a table's calls.
    pub entries: AtomicU64,
    /// What they move.
    pub bytes: AtomicU64,
    /// Batches in which they were posted.
    pub batches: AtomicU64,
    /// Entries given back to device code, or operations that are locally complete.
    pub completed: AtomicU64,
    /// Malformed entries.
    pub refused: AtomicU64,
    /// Entries for which nothing was done, or not to its end: the fabric failed, or the context is stopped.
    pub dropped: AtomicU64,
    /// Entries that are taken and not given back.
    pub under_way: AtomicU64,
    /// Since when the oldest of them is; 0: there is none. Of a table: since when none of them has become complete.
    pub oldest: AtomicU64,
    /// See [`State`].
    pub state: AtomicU64,
    /// Sum of what `complete` counts.
    pub complete_ns: AtomicU64,
    /// From the look at the queue to posted, of one batch in some 64. Counts batches.
    pub posted: [AtomicU64; BUCKETS],
    /// From posted to complete. Counts entries, or of a table's operations samples.
    pub complete: [AtomicU64; BUCKETS],
    /// Zero.
    pub reserved: [AtomicU64; 6],
}

/// Which bucket counts a time.
#[inline(always)]
pub fn bucket(ns: u64) -> usize {
    ((ns | 1).ilog2() as usize).min(BUCKETS - 1)
}

const _: () = assert!(size_of::<Header>() == 256 && size_of::<Record>() == 768);
