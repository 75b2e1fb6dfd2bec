//! A set of contexts: what `createContext` returns, on whichever fabric the communicator settled on.

use super::lanes::Stretch;
use super::op::{Get, Put};
use super::seq::Seq;
use super::sets;
use super::ticket::{Ticket, MAX_RANKS};
use crate::comm::coll::Coll;
use crate::error::{Error, Result};
use crate::fabric::verbs::Direct;
use crate::fabric::{soft, verbs, Context};
use crate::handles::{Kind, Object};
use crate::memory::cache::WindowCache;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// The contexts themselves, by fabric. One match a call; everything below is static.
pub enum Queues {
    /// On RDMA devices.
    Verbs(Box<[verbs::VerbsContext]>),
    /// On the software fabric.
    Soft(Box<[soft::Context]>),
}

macro_rules! on_queues {
    ($all:expr, $queues:ident => $body:expr) => {
        match $all {
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
    /// Contexts that take operations: all, and none once the set is closed.
    count: AtomicU32,
    /// This set among the communicator's, 1 to 63.
    pub set: u32,
    owner: Weak<Coll>,
    /// The handle under which `sets` has the set; 0: it has not.
    handle: AtomicU64,
    cache: Arc<WindowCache>,
    /// The short ways to the contexts, over verbs.
    direct: Box<[Direct]>,
    /// Ended before `queues`, which it points into.
    lanes: Option<Stretch>,
    queues: Queues,
}

impl Object for Contexts {
    const KIND: Kind = Kind::Contexts;
}

impl Contexts {
    /// A set; `queues` has at least one context.
    pub fn new(owner: Weak<Coll>, coll: u64, nranks: u32, set: u32, cache: Arc<WindowCache>, queues: Queues) -> Self {
        debug_assert!(nranks <= MAX_RANKS);
        let count = on_queues!(&queues, q => q.len()) as u32;
        let lanes = Stretch::take(count as usize * nranks as usize);
        let direct = match &queues {
            Queues::Verbs(q) => q.iter().map(verbs::VerbsContext::direct).collect(),
            Queues::Soft(_) => Box::default(),
        };
        let (count, handle) = (AtomicU32::new(count), AtomicU64::new(0));
        let set = Self { coll, nranks, count, set, owner, handle, cache, direct, lanes, queues };
        set.fill_lanes();
        set
    }

    /// Gives each (context, peer) its requests, and `test` the way from them to what is complete.
    fn fill_lanes(&self) {
        for context in 0..self.count() {
            let direct = self.direct.get(context as usize).copied();
            if let Queues::Verbs(q) = &self.queues {
                q[context as usize].number_requests(|peer| self.request(context, peer, Seq(0)) as u64);
            }
            let Some(lanes) = &self.lanes else { continue };
            for peer in 0..self.nranks {
                let completed = on_queues!(&self.queues, q => q[context as usize].completed(peer));
                lanes.fill(self.lane(context, peer), completed, direct, self.ticket(context, peer, Seq(0)));
            }
        }
    }

    fn lane(&self, context: u32, peer: u32) -> usize {
        context as usize * self.nranks as usize + peer as usize
    }

    fn ticket(&self, context: u32, peer: u32, seq: Seq) -> Ticket {
        Ticket { set: self.set, context, peer, seq }
    }

    /// What NCCL holds of an operation.
    #[inline(always)]
    fn request(&self, context: u32, peer: u32, seq: Seq) -> *mut c_void {
        match &self.lanes {
            Some(lanes) => (lanes.request(self.lane(context, peer)) | u64::from(seq.0)) as *mut c_void,
            None => self.ticket(context, peer, seq).encode(),
        }
    }

    /// The communicator's handle, once NCCL has it: from then on `test` knows the short way.
    pub fn announce(&self, coll: u64) {
        if let (Some(lanes), true) = (&self.lanes, self.count() > 0) {
            lanes.announce(coll);
        }
    }

    /// The set's own handle: from here on operations that name it know the short way.
    ///
    /// # Safety
    /// The handle is live and this set's, and nobody has it yet.
    pub unsafe fn publish(&self, handle: *mut c_void) {
        if !self.direct.is_empty() && self.count() > 0 {
            self.handle.store(handle as u64, Ordering::Release);
            // SAFETY: passed on; `close` retracts it, at the latest when this object ends.
            unsafe { sets::publish(handle, &self.direct, self.nranks, self.cache.start()) };
        }
    }

    /// From here on every operation is refused: the communicator is gone.
    pub fn close(&self) {
        let handle = self.handle.swap(0, Ordering::AcqRel);
        if handle != 0 {
            sets::retract(handle as *mut c_void);
        }
        if let Some(lanes) = &self.lanes {
            lanes.announce(0);
        }
        self.count.store(0, Ordering::Release);
    }

    /// Contexts that take operations.
    #[inline(always)]
    pub fn count(&self) -> u32 {
        self.count.load(Ordering::Acquire)
    }

    /// Whether the set is open and has this context, and the communicator this rank.
    #[inline(always)]
    pub fn has(&self, context: i32, rank: u32) -> bool {
        (context as u32) < self.count() && rank < self.nranks
    }

    /// Whether operations are taken.
    pub fn check_open(&self) -> Result<()> {
        if self.count() > 0 {
            return Ok(());
        }
        Err(Error::usage("the communicator of this context is closed; destroy the context, make no more calls with it"))
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

    /// Starts a put and returns its request.
    ///
    /// # Safety
    /// As for [`Context::put`]; the set [`Contexts::has`] the context and the peer.
    #[inline(always)]
    pub unsafe fn put(&self, context: u32, peer: u32, put: &Put) -> Result<*mut c_void> {
        // SAFETY: the index was checked (caller); the local range is the caller's promise.
        let seq = on_queues!(&self.queues, q => unsafe { q.get_unchecked(context as usize).put(peer, put) })?;
        Ok(self.request(context, peer, seq))
    }

    /// Starts a get and returns its request.
    ///
    /// # Safety
    /// As for [`Context::get`]; the set [`Contexts::has`] the context and the peer.
    #[inline(always)]
    pub unsafe fn get(&self, context: u32, peer: u32, get: &Get) -> Result<*mut c_void> {
        // SAFETY: as in `put`.
        let seq = on_queues!(&self.queues, q => unsafe { q.get_unchecked(context as usize).get(peer, get) })?;
        Ok(self.request(context, peer, seq))
    }

    /// Starts a flush of gets from `peer`; NULL: there is nothing to wait for. The set [`Contexts::has`] both.
    pub fn flush(&self, context: u32, peer: u32) -> Result<*mut c_void> {
        let seq = on_queues!(&self.queues, q => q[context as usize].flush(peer))?;
        Ok(seq.map_or(std::ptr::null_mut(), |seq| self.request(context, peer, seq)))
    }

    /// Whether the operation is locally complete; makes progress when not.
    ///
    /// # Safety
    /// The set [`Contexts::has`] the ticket's context and peer.
    #[inline(always)]
    pub unsafe fn test(&self, ticket: Ticket) -> Result<bool> {
        // SAFETY: the caller's promise.
        on_queues!(&self.queues, q => unsafe { q.get_unchecked(ticket.context as usize).test(ticket.peer, ticket.seq) })
    }

    /// Lets all contexts advance.
    pub fn progress(&self) -> Result<()> {
        if self.count() == 0 {
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
        on_queues!(&self.queues, q => q.iter().any(|c| c.has_error()))
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        self.close();
    }
}
