//! A copy from GPU memory to host memory by the engine, which somebody waits for.

use super::arrived_bytes::HostBytes;
use super::{Engine, Op, Owner, TransferEnd};
use crate::error::Result;
use crate::fabric::soft::lane::{Health, Lane};
use crate::rma::seq::Seq;
use std::sync::atomic::AtomicUsize;
use std::sync::Arc;
use std::time::Instant;

/// A copy that was started. It has a lane of its own, so that its fault is nobody else's.
pub struct CopyOut {
    lane: Arc<Lane>,
    seq: Seq,
}

impl CopyOut {
    /// Has `len` bytes copied from `from` to `to`, from the engine's next poll on; `pinned`: where the GPU finds `to`,
    /// if that is pinned memory. Once `health` has failed, what the engine has not started it gives up. `backlog` was
    /// counted up for it, and is counted down when it is over. Until then the engine may write to the destination.
    pub fn start(
        engine: &Engine,
        health: Arc<Health>,
        from: TransferEnd,
        to: *mut u8,
        pinned: Option<u64>,
        len: u64,
        backlog: Arc<AtomicUsize>,
    ) -> Self {
        let lane = Arc::new(Lane::new(Lane::INTERNAL, engine.rank, health));
        let seq = lane.number();
        let owner = Owner { lane: lane.clone(), seq, backlog };
        let to = TransferEnd::Caller { addr: to as u64, gpu: false };
        let host = pinned.map_or(HostBytes::Caller, HostBytes::Pinned);
        engine.submit_later(Op { host, ..Op::copy(owner, from, to, len) });
        Self { lane, seq }
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
