//! A copy from GPU memory to host memory by the engine, which somebody waits for.

use super::arrived_bytes::{HostBytes, PinnedPlace};
use super::{Engine, Op, Owner, TransferEnd};
use crate::error::Result;
use crate::fabric::soft::lane::{Health, Lane};
use crate::rma::seq::Seq;
use std::sync::atomic::AtomicUsize;
use std::sync::Arc;
use std::time::Instant;

/// A copy that was started. It has a lane by itself, so that its fault is nobody else's.
pub struct CopyOut {
    lane: Arc<Lane>,
    seq: Seq,
}

impl CopyOut {
    /// Has `len` bytes copied from `from` to `to`, from the engine's next poll on; `pinned`: `to`, if that is
    /// pinned memory. Nobody else posts on `lane`; once its health has failed, what the engine has not
    /// started it gives up. `backlog` was counted up for it, and is counted down when it is over. Until then the engine
    /// may write to the destination.
    pub fn start(
        engine: &Engine,
        lane: Arc<Lane>,
        from: TransferEnd,
        to: *mut u8,
        pinned: Option<PinnedPlace>,
        len: u64,
        backlog: Arc<AtomicUsize>,
    ) -> Self {
        let seq = lane.number();
        let owner = Owner { lane: lane.clone(), seq, backlog };
        let to = TransferEnd::Caller { addr: to as u64, gpu: false };
        let host = pinned.map_or(HostBytes::Caller, HostBytes::Pinned);
        engine.submit_later(Op { host, ..Op::copy(owner, from, to, len) });
        Self { lane, seq }
    }

    /// A lane for one after the other.
    pub fn lane(engine: &Engine, health: Arc<Health>) -> Arc<Lane> {
        Arc::new(Lane::new(Lane::INTERNAL, engine.rank, health))
    }

    /// Its lane, for the next copy; `None`: it is not over, or has failed.
    pub fn into_lane(self) -> Option<Arc<Lane>> {
        matches!(self.is_done(), Ok(true)).then_some(self.lane)
    }

    /// Whether the bytes are there; an error: they never will be, and nothing is written any more.
    #[inline]
    pub fn is_done(&self) -> Result<bool> {
        self.lane.test(self.seq)
    }

    /// Whether the engine may still write to the destination.
    #[inline]
    pub fn writes(&self) -> bool {
        matches!(self.is_done(), Ok(false))
    }

    /// Gives it up: waits, at most until `end`, until the GPU no longer reads its source.
    pub fn abandon(&self, engine: &Engine, end: Instant) {
        engine.abandon(&self.lane, end);
    }
}
