//! Backpressure: fabrics take what they have room for and never block, so whoever cannot go on with something
//! else waits here. No operation fails for want of room; a peer that ends, or a communicator that is closed, ends the
//! wait.

use crate::config::Config;
use crate::error::Result;
use crate::fabric::{Context, Flush};
use crate::rma::op::Op;
use crate::rma::seq::Seq;
use std::time::{Duration, Instant};

/// How long a wait keeps its core.
const SPIN: Duration = Duration::from_millis(1);
/// What it sleeps between two looks from then on: much less than a full queue takes to drain.
const NAP: Duration = Duration::from_micros(20);

/// How operations wait for room.
#[derive(Clone, Copy, Debug)]
pub struct Backpressure {
    /// How long an operation waits before the log says so.
    pub limit: Duration,
    /// Operations of a (context, peer) that may be unfinished, for the log.
    pub operations: u32,
}

impl Backpressure {
    /// As the environment says.
    pub fn of(config: &Config) -> Self {
        Self { limit: config.peer_limit(), operations: config.max_operations }
    }

    /// Starts an operation. `open` says whether the caller may still wait.
    ///
    /// # Safety
    /// As for [`Context::post`].
    #[inline(always)]
    pub unsafe fn start<C: Context>(
        &self,
        context: &C,
        peer: u32,
        op: &Op,
        open: impl Fn() -> Result<()>,
    ) -> Result<Seq> {
        // SAFETY: the caller's promise.
        let posted = unsafe { context.post(peer, std::slice::from_ref(op)) }?;
        if posted.taken > 0 {
            return Ok(posted.last);
        }
        self.wait(context, peer, || {
            open()?;
            // SAFETY: as above.
            let posted = unsafe { context.post(peer, std::slice::from_ref(op)) }?;
            Ok((posted.taken > 0).then_some(posted.last))
        })
    }

    /// Starts a flush, `into` a window ([`Context::flush`]); `None`: there is nothing to wait for.
    pub fn flush<C: Context>(
        &self,
        context: &C,
        peer: u32,
        into: Option<u32>,
        open: impl Fn() -> Result<()>,
    ) -> Result<Option<Seq>> {
        self.wait(context, peer, || {
            open()?;
            Ok(match context.flush(peer, into)? {
                Flush::Done => Some(None),
                Flush::Until(seq) => Some(Some(seq)),
                Flush::NoRoom => None,
            })
        })
    }

    /// Tries until there is room, and makes progress meanwhile.
    #[cold]
    #[inline(never)]
    fn wait<C: Context, T>(&self, context: &C, peer: u32, mut attempt: impl FnMut() -> Result<Option<T>>) -> Result<T> {
        let (begun, mut said) = (Instant::now(), false);
        loop {
            if let Some(started) = attempt()? {
                return Ok(started);
            }
            context.progress()?;
            if !said && begun.elapsed() >= self.limit {
                said = true;
                log::warn!(
                    "an operation to rank {peer} has waited {:?} for room: {} operations of its context to that rank \
                     are unfinished (OXYGIN_MAX_OPERATIONS); it goes on waiting until rank {peer} takes some",
                    self.limit,
                    self.operations
                );
            }
            // Whoever has waited for long is in no hurry, and others may need the core.
            match begun.elapsed() < SPIN {
                true => std::thread::yield_now(),
                false => std::thread::sleep(NAP),
            }
        }
    }
}
