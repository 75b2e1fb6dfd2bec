//! What the engine asks of a queue format: entries in, operations out; completions in, credits out.

use crate::rma::op::Op;
use std::sync::atomic::AtomicU64;

/// What is to be done for an entry when it is complete, in the format's own terms; 0: nothing but its credit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finish(pub u32);

impl Finish {
    /// Nothing but the credit.
    pub const NONE: Self = Self(0);
}

/// What stands at a place of a ring.
#[derive(Debug, PartialEq, Eq)]
pub enum Entry {
    /// Nothing yet, or not all of it.
    Absent,
    /// An operation, which was appended to the batch.
    Op(Finish),
    /// Nothing to move: complete when what came before it is.
    Nothing(Finish),
    /// What the context's gets have brought must be visible before anything behind it.
    Flush(Finish),
    /// Something that cannot be: a sentence with the entry decoded. The context fails.
    Refused(String),
}

/// A queue of entries from device code to one peer. Used by one thread at a time.
pub trait Ring: Send + 'static {
    /// The word whose lowest bit shows that the next entry has begun to arrive. Stays readable as long as the ring.
    fn head(&self) -> *const AtomicU64;

    /// Places of the ring.
    fn capacity(&self) -> u32;

    /// A batch is about to be read: what was learned of windows that are gone since is forgotten.
    fn begin(&mut self);

    /// Reads the entry `nth` places behind the next one; `nth` is below the capacity. An operation is appended to
    /// `ops`. The entry stays: it may be read again.
    fn read(&mut self, nth: u32, ops: &mut Vec<Op>) -> Entry;

    /// Takes the next `n` entries off the ring: their places are clear from here on, but not given back.
    fn take(&mut self, n: u32);

    /// An entry is complete: what it asked for beside its data is done here.
    fn finish(&mut self, finish: Finish);

    /// Gives the oldest `n` places that were taken back to device code, which may reuse their sources from here on.
    fn credit(&mut self, n: u32);
}
