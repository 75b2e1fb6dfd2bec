//! GPU memory on its way to another process: a piece of it in host memory.

use super::copy_out::CopyOut;
use super::{Engine, TransferEnd};
use crate::error::Result;
use crate::fabric::soft::lane::Health;
use std::sync::atomic::AtomicUsize;
use std::sync::Arc;
use std::time::Instant;

/// Bytes of a piece.
const PIECE: u64 = 1 << 20;

/// A piece, being filled or full.
pub struct Bounce {
    /// Where in the operation it starts.
    at: u64,
    bytes: Box<[u8]>,
    copy: CopyOut,
}

impl Bounce {
    /// Starts to bring the bytes from `from`, which is `at` bytes into an operation of which `left` remain. Once
    /// `health` has failed what the engine has not started it gives up, because the source may be gone then.
    pub fn start(engine: &Engine, health: Arc<Health>, from: TransferEnd, at: u64, left: u64) -> Self {
        let mut bytes = vec![0; left.min(PIECE) as usize].into_boxed_slice();
        let (to, len, uncounted) = (bytes.as_mut_ptr(), bytes.len() as u64, Arc::new(AtomicUsize::new(1)));
        // The engine writes to the bytes until the operation is complete; a bounce that is dropped before that gives
        // them up, never back (see `drop`).
        let copy = CopyOut::start(engine, CopyOut::lane(engine, health), from, to, None, len, uncounted);
        engine.poll();
        Self { at, bytes, copy }
    }

    /// Whether the bytes are there.
    pub fn is_full(&self, engine: &Engine) -> Result<bool> {
        if self.copy.is_done()? {
            return Ok(true);
        }
        engine.poll();
        self.copy.is_done()
    }

    /// The operation is given up: waits, at most until `end`, until the GPU no longer reads its source.
    pub fn abandon(&self, engine: &Engine, end: Instant) {
        self.copy.abandon(engine, end);
    }

    /// Where the operation would start if it were in host memory as this piece is.
    pub fn origin(&self) -> u64 {
        (self.bytes.as_ptr() as u64).wrapping_sub(self.at)
    }

    /// Where in the operation it ends.
    pub fn end(&self) -> u64 {
        self.at + self.bytes.len() as u64
    }
}

impl Drop for Bounce {
    fn drop(&mut self) {
        if !matches!(self.copy.is_done(), Ok(true)) {
            std::mem::forget(std::mem::take(&mut self.bytes));
        }
    }
}
