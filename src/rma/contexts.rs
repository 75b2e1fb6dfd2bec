//! A set of contexts: what `createContext` returns, on whichever fabric the communicator settled on.

use super::op::{Get, Put};
use super::seq::Seq;
use super::ticket::{Ticket, MAX_RANKS};
use crate::comm::coll::Coll;
use crate::error::{Error, Result};
use crate::fabric::{soft, verbs, Context};
use crate::handles::{Kind, Object};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Weak;

/// The contexts themselves, by fabric. One match a call; everything below is static.
pub enum Queues {
    /// On RDMA devices.
    Verbs(Box<[verbs::VerbsContext]>),
    /// On the software fabric.
    Soft(Box<[soft::Context]>),
}

macro_rules! on_queues {
    ($set:expr, $queues:ident => $body:expr) => {
        match &$set.queues {
            Queues::Verbs($queues) => $body,
            Queues::Soft($queues) => $body,
        }
    };
}

/// A set of contexts of one communicator.
pub struct Contexts {
    /// Number of the communicator in this process.
    pub coll: u64,
    /// Ranks in it.
    pub nranks: u32,
    /// Contexts in the set.
    pub count: u32,
    /// This set among the communicator's, 1 to 63.
    pub set: u32,
    owner: Weak<Coll>,
    closed: AtomicBool,
    queues: Queues,
}

impl Object for Contexts {
    const KIND: Kind = Kind::Contexts;
}

impl Contexts {
    /// A set; `queues` has at least one context.
    pub fn new(owner: Weak<Coll>, coll: u64, nranks: u32, set: u32, queues: Queues) -> Self {
        let count = match &queues {
            Queues::Verbs(q) => q.len(),
            Queues::Soft(q) => q.len(),
        } as u32;
        debug_assert!(nranks <= MAX_RANKS);
        Self { owner, coll, nranks, count, set, closed: AtomicBool::new(false), queues }
    }

    /// From here on every operation is refused: the communicator is gone.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Release);
    }

    /// Takes the set out of its communicator and refuses further operations.
    pub fn destroy(&self) {
        self.close();
        if let Some(coll) = self.owner.upgrade() {
            coll.destroy_contexts(self);
        }
    }

    #[inline(always)]
    fn ticket(&self, context: u32, peer: u32, seq: Seq) -> Ticket {
        Ticket { set: self.set, context, peer, seq }
    }

    #[cold]
    fn refuse(&self) -> Error {
        Error::usage("the communicator of this context is closed; destroy the context, make no more calls with it")
    }

    /// Starts a put. `context` and `peer` are in range.
    ///
    /// # Safety
    /// As for [`Context::put`]; `context` < `count`.
    #[inline(always)]
    pub unsafe fn put(&self, context: u32, peer: u32, put: &Put) -> Result<Ticket> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.refuse());
        }
        // SAFETY: the index is below `count` (caller); the local range is the caller's promise.
        let seq = on_queues!(self, q => unsafe { q.get_unchecked(context as usize).put(peer, put) })?;
        Ok(self.ticket(context, peer, seq))
    }

    /// Starts a get. `context` and `peer` are in range.
    ///
    /// # Safety
    /// As for [`Context::get`]; `context` < `count`.
    #[inline(always)]
    pub unsafe fn get(&self, context: u32, peer: u32, get: &Get) -> Result<Ticket> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.refuse());
        }
        // SAFETY: as in `put`.
        let seq = on_queues!(self, q => unsafe { q.get_unchecked(context as usize).get(peer, get) })?;
        Ok(self.ticket(context, peer, seq))
    }

    /// Starts a flush of gets from `peer`; `None`: there is nothing to wait for. `context` < `count`.
    pub fn flush(&self, context: u32, peer: u32) -> Result<Option<Ticket>> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.refuse());
        }
        let seq = on_queues!(self, q => q[context as usize].flush(peer))?;
        Ok(seq.map(|seq| self.ticket(context, peer, seq)))
    }

    /// Whether the operation is locally complete; makes progress when not. The ticket's context and peer are in range.
    ///
    /// # Safety
    /// `ticket.context` < `count`.
    #[inline(always)]
    pub unsafe fn test(&self, ticket: Ticket) -> Result<bool> {
        if self.closed.load(Ordering::Acquire) {
            return Err(self.refuse());
        }
        // SAFETY: the caller's promise.
        on_queues!(self, q => unsafe { q.get_unchecked(ticket.context as usize).test(ticket.peer, ticket.seq) })
    }

    /// Lets all contexts advance.
    pub fn progress(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Ok(());
        }
        on_queues!(self, q => q.iter().try_for_each(|c| c.progress()))
    }

    /// Whether anything failed on any of them.
    pub fn has_error(&self) -> bool {
        on_queues!(self, q => q.iter().any(|c| c.has_error()))
    }
}
