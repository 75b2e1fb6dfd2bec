//! One (context, peer): numbers its operations and says which are locally complete.

use crate::error::{Error, Result};
use crate::rma::op::{Get, Put};
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

/// Whether a peer can still be reached. One object a (communicator, peer), shared by all that speak to it.
#[derive(Default)]
pub struct Health {
    failed: AtomicBool,
    error: OnceLock<Error>,
}

impl Health {
    /// Marks the peer as failed; the first error stays and is logged, later ones are dropped.
    #[cold]
    pub fn fail(&self, error: Error) {
        if self.error.set(error).is_ok() {
            log::warn!("{}", self.error.get().map_or("", |e| e.message()));
        }
        self.failed.store(true, Ordering::Release);
    }

    /// The error that ended the path to this peer.
    #[inline]
    pub fn check(&self) -> Result<()> {
        if self.failed.load(Ordering::Acquire) {
            return Err(self.cause());
        }
        Ok(())
    }

    #[cold]
    fn cause(&self) -> Error {
        self.error.get().cloned().unwrap_or_else(|| Error::internal("peer failed without an error")).logged()
    }

    /// Whether the peer failed.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }
}

/// The operations of one context to one peer. They become locally complete in the order of their numbers.
pub struct Lane {
    /// Context number within the communicator, the same on all ranks; unique over all `createContext` calls.
    pub context: u32,
    /// The rank operations go to.
    pub peer: u32,
    /// Whether that rank can be reached.
    pub health: Arc<Health>,
    posted: AtomicU32,
    completed: AtomicU32,
    place: AtomicU32,
}

impl Lane {
    /// See [`Lane::place`].
    pub const NO_PLACE: u32 = u32::MAX;

    /// A lane without operations.
    pub fn new(context: u32, peer: u32, health: Arc<Health>) -> Self {
        let (posted, completed, place) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(Self::NO_PLACE));
        Self { context, peer, health, posted, completed, place }
    }

    /// Takes the next number. The caller holds whatever orders posting on this lane.
    #[inline]
    pub fn number(&self) -> Seq {
        let seq = Seq(self.posted.load(Ordering::Relaxed)).next();
        self.posted.store(seq.0, Ordering::Relaxed);
        seq
    }

    /// The last number taken.
    #[inline]
    pub fn last(&self) -> Seq {
        Seq(self.posted.load(Ordering::Relaxed))
    }

    /// Where the transport keeps it, which alone looks there.
    #[inline]
    pub fn place(&self) -> u32 {
        self.place.load(Ordering::Relaxed)
    }

    /// The transport keeps it there.
    pub fn set_place(&self, place: u32) {
        self.place.store(place, Ordering::Relaxed);
    }

    /// Every operation up to `seq` is locally complete. Called in order, by whoever moves the bytes.
    #[inline]
    pub fn complete(&self, seq: Seq) {
        self.completed.store(seq.0, Ordering::Release);
    }

    /// Where the newest complete operation shows.
    pub fn completed(&self) -> *const AtomicU32 {
        &raw const self.completed
    }

    /// Whether nothing is unfinished.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.posted.load(Ordering::Relaxed) == self.completed.load(Ordering::Acquire)
    }

    /// Whether `seq` is the first one that is not locally complete.
    #[inline]
    pub fn is_oldest(&self, seq: Seq) -> bool {
        Seq(self.completed.load(Ordering::Acquire)).next() == seq
    }

    /// Whether `seq` is locally complete; an error when the peer failed first.
    #[inline]
    pub fn test(&self, seq: Seq) -> Result<bool> {
        if seq.is_done(Seq(self.completed.load(Ordering::Acquire))) {
            return Ok(true);
        }
        self.health.check().map(|()| false)
    }
}

/// What a task does.
#[derive(Clone, Copy, Debug)]
pub enum Work {
    /// Write, with or without a signal behind it.
    Put(Put),
    /// Read.
    Get(Get),
}

/// An operation on its way: posted on a lane, not yet locally complete.
pub struct Task {
    /// Where it was posted.
    pub lane: Arc<Lane>,
    /// Its number there.
    pub seq: Seq,
    /// What it does. Local addresses stay valid until completion (the contract of `Context::put`).
    pub work: Work,
}
