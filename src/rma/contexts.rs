//! A set of contexts: what `createContext` returns, on whichever fabric the communicator settled on.

use super::lanes::Stretch;
use super::op::{Get, Put};
use super::seq::Seq;
use super::ticket::{Ticket, MAX_RANKS};
use crate::comm::coll::Coll;
use crate::error::{Error, Result};
use crate::fabric::verbs::Direct;
use crate::fabric::{soft, verbs, Context};
use crate::handles::{Kind, Object};
use crate::memory::cache::{Place, WindowCache};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Weak};

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

/// What the fast path of an operation reads of a set.
#[repr(C)]
pub(super) struct Fast {
    /// Contexts that take operations the short way; 0 on other fabrics than verbs, and once the set is closed.
    pub count: AtomicU32,
    /// Ranks.
    pub nranks: u32,
    /// The window cache.
    pub windows: *const Place,
    /// The contexts.
    pub contexts: *const Direct,
    /// The set's bits of a request.
    pub ticket: u64,
}

/// A set of contexts of one communicator.
#[repr(C)]
pub struct Contexts {
    /// What the fast path reads, first: see `call::fast_put`.
    pub(super) fast: Fast,
    /// Number of the communicator in this process.
    pub coll: u64,
    /// Ranks in it.
    pub nranks: u32,
    /// Contexts in the set.
    pub count: u32,
    /// Keeps `fast.windows` alive.
    _cache: Arc<WindowCache>,
    /// Keeps `fast.contexts` alive.
    _direct: Box<[Direct]>,
    /// This set among the communicator's, 1 to 63.
    pub set: u32,
    owner: Weak<Coll>,
    closed: AtomicBool,
    /// Ended before `queues`, which it points into.
    lanes: Option<Stretch>,
    queues: Queues,
}

// SAFETY: the pointers in `fast` are to what `_cache`, `_direct` and `queues` own, all of them Send and Sync.
unsafe impl Send for Contexts {}
// SAFETY: as above.
unsafe impl Sync for Contexts {}

impl Object for Contexts {
    const KIND: Kind = Kind::Contexts;
}

impl Contexts {
    /// A set; `queues` has at least one context.
    pub fn new(owner: Weak<Coll>, coll: u64, nranks: u32, set: u32, cache: Arc<WindowCache>, queues: Queues) -> Self {
        let count = match &queues {
            Queues::Verbs(q) => q.len(),
            Queues::Soft(q) => q.len(),
        } as u32;
        debug_assert!(nranks <= MAX_RANKS);
        let lanes = match &queues {
            Queues::Verbs(q) => Self::number(q, set, nranks),
            Queues::Soft(_) => None,
        };
        let direct: Box<[Direct]> = match &queues {
            Queues::Verbs(q) => q.iter().map(verbs::VerbsContext::direct).collect(),
            Queues::Soft(_) => Box::default(),
        };
        let fast = Fast {
            count: AtomicU32::new(direct.len() as u32),
            nranks,
            windows: cache.start(),
            contexts: direct.as_ptr(),
            ticket: Ticket { set, context: 0, peer: 0, seq: Seq(0) }.encode() as u64,
        };
        let closed = AtomicBool::new(false);
        Self { fast, owner, coll, nranks, count, _cache: cache, _direct: direct, set, closed, lanes, queues }
    }

    /// Gives the operations of verbs contexts their requests.
    fn number(contexts: &[verbs::VerbsContext], set: u32, nranks: u32) -> Option<Stretch> {
        let lanes = Stretch::take(contexts.len() * nranks as usize);
        for (context, c) in (0..).zip(contexts) {
            let ticket = |peer| Ticket { set, context, peer, seq: Seq(0) }.encode() as u64;
            let at = |peer| (context * nranks + peer) as usize;
            c.number_requests(|peer| lanes.as_ref().map_or(ticket(peer), |l| l.request(at(peer))));
            if let Some(lanes) = &lanes {
                (0..nranks).for_each(|peer| lanes.fill(at(peer), c.completed(peer), c.direct(), ticket(peer)));
            }
        }
        lanes
    }

    /// The communicator's handle, once NCCL has it: from then on `test` knows the short way.
    pub fn announce(&self, coll: u64) {
        if let (Some(lanes), false) = (&self.lanes, self.closed.load(Ordering::Acquire)) {
            lanes.announce(coll);
        }
    }

    /// From here on every operation is refused: the communicator is gone.
    pub fn close(&self) {
        self.fast.count.store(0, Ordering::Release);
        if let Some(lanes) = &self.lanes {
            lanes.announce(0);
        }
        self.closed.store(true, Ordering::Release);
    }

    /// A window's registration is about to end.
    pub fn forget(&self, handle: u64) {
        if let Queues::Verbs(q) = &self.queues {
            q.iter().for_each(|c| c.forget(handle));
        }
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
        match &self.queues {
            Queues::Verbs(q) => q.iter().try_for_each(|c| c.progress()),
            // They share everything that can advance.
            Queues::Soft(q) => q.iter().take(1).try_for_each(|c| c.progress()),
        }
    }

    /// Whether anything failed on any of them.
    pub fn has_error(&self) -> bool {
        on_queues!(self, q => q.iter().any(|c| c.has_error()))
    }
}
