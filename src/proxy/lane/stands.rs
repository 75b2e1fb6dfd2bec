//! The fabric of tests of lanes and of drains.

use crate::error::{Error, Result};
use crate::fabric::{Context, Flush, Posted, Sent};
use crate::rma::atomic::Atomics;
use crate::rma::op::Op;
use crate::rma::seq::Seq;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

/// A fabric that completes nothing by itself.
#[derive(Default)]
pub(in crate::proxy) struct Stands {
    pub(in crate::proxy) completed: AtomicU32,
    pub(in crate::proxy) posted: AtomicU32,
    pub(in crate::proxy) is_full: AtomicBool,
    pub(in crate::proxy) is_gone: AtomicBool,
    /// Operations that it takes at once at most; 0: all.
    pub(in crate::proxy) most: AtomicU32,
    pub(in crate::proxy) flushes: AtomicU32,
    /// A peer that has failed; 0: none.
    pub(in crate::proxy) failed: AtomicU32,
    /// It has a fault inside the library.
    pub(in crate::proxy) panics: AtomicBool,
}

impl Stands {
    fn panic_if_told(&self) {
        assert!(!self.panics.load(Ordering::Relaxed), "a fault of this test's own");
    }

    fn check(&self, peer: u32) -> Result<()> {
        match self.failed.load(Ordering::Relaxed) {
            0 => Ok(()),
            failed if failed != peer => Ok(()),
            failed => Err(Error::system(format!("rank {failed} has ended"))),
        }
    }
}

impl Context for Stands {
    const NAME: &'static str = "stands";
    const SHARES_PROGRESS: bool = true;

    unsafe fn post(&self, _: u32, ops: &[Op]) -> Result<Posted> {
        self.panic_if_told();
        if self.is_gone.load(Ordering::Relaxed) {
            return Err(Error::system("rank 1 is gone"));
        }
        if self.is_full.load(Ordering::Relaxed) {
            return Ok(Posted::NONE);
        }
        let taken = match self.most.load(Ordering::Relaxed) {
            0 => ops.len(),
            most => ops.len().min(most as usize),
        };
        let last = self.posted.fetch_add(taken as u32, Ordering::Relaxed) + taken as u32;
        Ok(Posted { taken, last: Seq(last) })
    }
    fn flush(&self, peer: u32, _: Option<u32>) -> Result<Flush> {
        self.check(peer)?;
        self.flushes.fetch_add(1, Ordering::Relaxed);
        Ok(Flush::Until(Seq(self.posted.load(Ordering::Relaxed))))
    }
    fn test(&self, peer: u32, seq: Seq) -> Result<bool> {
        self.check(peer)?;
        Ok(seq.is_done(Seq(self.completed.load(Ordering::Relaxed))))
    }
    fn progress(&self) -> Result<()> {
        self.panic_if_told();
        Ok(())
    }
    fn has_error(&self) -> bool {
        false
    }
    fn completed(&self, _: u32) -> &AtomicU32 {
        &self.completed
    }
    fn sent(&self, _: u32) -> Sent {
        Sent { newest: Seq(self.posted.load(Ordering::Relaxed)), bytes: 0 }
    }
    fn atomics(&self) -> Atomics {
        Atomics::NONE
    }
}
