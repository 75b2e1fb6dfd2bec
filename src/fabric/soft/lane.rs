//! One (context, peer): numbers its operations and says which are locally complete.
//!
//! A fault belongs to the lane that it hit: an operation that is refused fails the rest of its lane, and no other.
//! Only what ends the peer itself, or the way to it, fails the peer for all contexts.

use crate::error::{Error, Kind, Result};
use crate::fabric::Sent;
use crate::rma::op::Op;
use crate::rma::seq::Seq;
use std::sync::atomic::{fence, AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// Whether an error ends its peer for all contexts: it is gone, or what it says cannot be trusted.
pub fn ends_peer(error: &Error) -> bool {
    matches!(error.kind(), Kind::PeerGone | Kind::Protocol)
}

/// Whether a peer can still be reached. One object a (communicator, peer), shared by all that speak to it. A lane has
/// one of its own beside it.
#[derive(Default)]
pub struct Health {
    failed: AtomicBool,
    error: OnceLock<Error>,
}

impl Health {
    /// Marks the peer as failed; the first error stays and is logged, later ones are dropped.
    #[cold]
    pub fn fail(&self, error: Error) {
        if self.set(error) {
            log::warn!("{}", self.error.get().map_or("", |e| e.message()));
        }
    }

    /// Whether it was the first one.
    fn set(&self, error: Error) -> bool {
        let is_first = self.error.set(error).is_ok();
        self.failed.store(true, Ordering::Release);
        is_first
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
    /// Why its unfinished and later operations fail.
    fault: Health,
    /// There is a fault, which is told once nothing touches its callers' memory any more.
    stopped: AtomicBool,
    /// The kernel copies for its first operation. Changed under the lock that its operations are behind.
    copying: AtomicBool,
    posted: AtomicU32,
    /// Bytes of all operations that were posted.
    bytes: AtomicU64,
    completed: AtomicU32,
    paid: AtomicU32,
    place: AtomicU32,
    /// Its puts are complete only when they are visible at the peer.
    pub confirms: bool,
}

impl Lane {
    /// See [`Lane::place`].
    pub const NO_PLACE: u32 = u32::MAX;
    /// The context of lanes that no caller knows.
    pub const INTERNAL: u32 = u32::MAX;

    /// A lane without operations.
    pub fn new(context: u32, peer: u32, health: Arc<Health>) -> Self {
        let (posted, completed, paid) = (AtomicU32::new(0), AtomicU32::new(0), AtomicU32::new(0));
        let (stopped, copying) = (AtomicBool::new(false), AtomicBool::new(false));
        let (fault, place) = (Health::default(), AtomicU32::new(Self::NO_PLACE));
        let (bytes, confirms) = (AtomicU64::new(0), false);
        Self { context, peer, health, fault, stopped, copying, posted, bytes, completed, paid, place, confirms }
    }

    /// The same, with its puts complete only when they are visible at the peer, or else once their sources are free.
    pub fn confirming(self, confirms: bool) -> Self {
        Self { confirms, ..self }
    }

    /// Begins nothing more of it: a fault is about to be told.
    pub fn stop(&self) {
        self.stopped.store(true, Ordering::Release);
    }

    /// Whether nothing more of it is to begin: it was stopped, or the peer has failed.
    #[inline]
    pub fn is_over(&self) -> bool {
        self.stopped.load(Ordering::Acquire) || self.health.has_failed()
    }

    /// Whether its own fault, rather than its peer's, is why.
    #[inline]
    pub fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Acquire)
    }

    /// Fails what is unfinished and what comes later; the first error stays. Nothing touches its callers' memory from
    /// here on.
    #[cold]
    pub fn fail(&self, error: Error) {
        self.stop();
        if self.fault.set(error.clone()) {
            match self.context {
                Self::INTERNAL => log::info!("{}", error.message()),
                context => log::warn!("context {context}, rank {}: {}", self.peer, error.message()),
            }
        }
    }

    /// Fails the peer where the error ends it, else the lane alone.
    #[cold]
    pub fn fail_as_due(&self, error: Error) {
        match ends_peer(&error) {
            true => self.health.fail(error),
            false => self.fail(error),
        }
    }

    /// The kernel is about to copy for it: its peer's failure is not told before [`Lane::end_copy`]. Returns whether it
    /// may; not where the peer has failed, since callers may have been told.
    pub fn begin_copy(&self) -> bool {
        self.copying.store(true, Ordering::Relaxed);
        // Either this sees the failure, or who tells it sees the copy.
        fence(Ordering::SeqCst);
        let may = !self.health.has_failed();
        if !may {
            self.end_copy();
        }
        may
    }

    /// The copy is over.
    pub fn end_copy(&self) {
        self.copying.store(false, Ordering::Release);
    }

    /// Whether its peer has failed and nothing touches its callers' memory any more.
    #[inline]
    fn has_lost_peer(&self) -> bool {
        self.health.has_failed() && self.is_at_rest()
    }

    #[cold]
    fn is_at_rest(&self) -> bool {
        fence(Ordering::SeqCst);
        !self.copying.load(Ordering::Acquire)
    }

    /// The error that ended it, or its peer. Nothing touches its callers' memory from then on.
    #[inline]
    pub fn check(&self) -> Result<()> {
        self.fault.check()?;
        match self.has_lost_peer() {
            true => self.health.check(),
            false => Ok(()),
        }
    }

    /// Whether it, or its peer, has failed and says so.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.fault.has_failed() || self.has_lost_peer()
    }

    /// Takes the next number. The caller holds whatever orders posting on this lane.
    #[inline]
    pub fn number(&self) -> Seq {
        let seq = Seq(self.posted.load(Ordering::Relaxed)).next();
        self.posted.store(seq.0, Ordering::Relaxed);
        seq
    }

    /// So many bytes more, of operations that have numbers. The caller holds whatever orders posting on this lane.
    #[inline]
    pub fn count(&self, bytes: u64) {
        self.bytes.store(self.bytes.load(Ordering::Relaxed).wrapping_add(bytes), Ordering::Relaxed);
    }

    /// What it was given.
    pub fn sent(&self) -> Sent {
        Sent { newest: self.last(), bytes: self.bytes.load(Ordering::Relaxed) }
    }

    /// The last number taken.
    #[inline]
    pub fn last(&self) -> Seq {
        Seq(self.posted.load(Ordering::Relaxed))
    }

    /// Operations that are not locally complete.
    #[inline]
    pub fn unfinished(&self) -> u32 {
        self.posted.load(Ordering::Relaxed).wrapping_sub(self.completed.load(Ordering::Acquire))
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
    pub fn completed(&self) -> &AtomicU32 {
        &self.completed
    }

    /// Of `n` entries of an operation that is about to be complete the poster's index was told. Called by whoever moves
    /// the bytes, which is one thread at a time.
    #[inline]
    pub fn note_paid(&self, n: u32) {
        self.paid.store(self.paid.load(Ordering::Relaxed).wrapping_add(n), Ordering::Relaxed);
    }

    /// Of how many entries it was told, at least of those of operations that are complete.
    #[inline]
    pub fn paid(&self) -> u32 {
        self.paid.load(Ordering::Relaxed)
    }

    /// Whether nothing is unfinished.
    #[inline]
    pub fn is_idle(&self) -> bool {
        self.unfinished() == 0
    }

    /// Whether `seq` is the first one that is not locally complete.
    #[inline]
    pub fn is_oldest(&self, seq: Seq) -> bool {
        Seq(self.completed.load(Ordering::Acquire)).next() == seq
    }

    /// Whether `seq` is locally complete; an error when the lane or the peer failed first.
    #[inline]
    pub fn test(&self, seq: Seq) -> Result<bool> {
        if seq.is_done(Seq(self.completed.load(Ordering::Acquire))) {
            return Ok(true);
        }
        self.check().map(|()| false)
    }
}

/// An operation on its way: posted on a lane, not yet locally complete.
pub struct Task {
    /// Where it was posted.
    pub lane: Arc<Lane>,
    /// Its number there.
    pub seq: Seq,
    /// What it does. Local addresses stay valid until completion (the contract of `Context::post`).
    pub work: Op,
}
