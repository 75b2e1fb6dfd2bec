//! One context as `rma` sees it.

use super::hot::Windows;
use super::lane::{Kind, Op};
use super::lock::{Guard, Spin};
use super::outcome::Outcomes;
use super::progress::Progress;
use super::queues::{Queues, Taken};
use super::regions::DeviceRegions;
use crate::error::{Error, Result};
use crate::fabric::Context;
use crate::rma::args::LatePut;
use crate::rma::op::{Get, Put};
use crate::rma::seq::Seq;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What a context and its progress thread share.
///
/// The queues come first, and contexts point here, so that the data path computes no addresses in between.
#[repr(C)]
pub(super) struct Shared {
    queues: Spin<Queues>,
    outcomes: Outcomes,
    cq: Arc<oxygin_ffi::verbs::Cq>,
    /// Own memory that the device writes during atomics; ended after the queue pairs.
    scratch: Arc<super::regions::Scratch>,
    regions: Arc<DeviceRegions>,
    limits: Limits,
}

/// How much a context holds, and when it complains.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Operations that wait before a call waits with them: `OXYGIN_MAX_OPERATIONS`.
    pub operations: usize,
    /// How long a call waits before the log says so.
    pub timeout: Duration,
    /// Whether the signal thread sleeps through completions that no peer marked as solicited. Not on iWARP: soft-iWARP
    /// takes no received message for a solicited one.
    pub solicited: bool,
}

impl Shared {
    pub(super) fn new(
        queues: Queues,
        outcomes: Outcomes,
        cq: Arc<oxygin_ffi::verbs::Cq>,
        scratch: Arc<super::regions::Scratch>,
        regions: Arc<DeviceRegions>,
        limits: Limits,
    ) -> Self {
        Self { queues: Spin::new(queues), outcomes, cq, scratch, regions, limits }
    }

    #[inline(always)]
    fn advance(&self) {
        self.queues.lock().advance(&self.outcomes);
    }

    /// What is to be said of an operation after progress was made.
    #[inline(always)]
    fn look(&self, completed: &AtomicU32, seq: Seq) -> Short {
        if seq.is_done(Seq(completed.load(Ordering::Acquire))) {
            Short::Done
        } else if self.outcomes.is_suspect() {
            Short::Ask
        } else {
            Short::Unfinished
        }
    }

    /// The same where more was to do; apart, so that elsewhere less has to be kept at hand.
    #[cold]
    #[inline(never)]
    fn settle(&self, mut queues: Guard<'_, Queues>, taken: Taken, completed: &AtomicU32, seq: Seq) -> Short {
        queues.settle(taken, &self.outcomes);
        drop(queues);
        self.look(completed, seq)
    }

    /// Takes everything that has arrived, with the queue armed for what comes later.
    pub(super) fn serve(&self) -> std::io::Result<()> {
        self.cq.arm(self.limits.solicited)?;
        while self.queues.lock().advance(&self.outcomes) {}
        Ok(())
    }

    /// The rest of `put`: somebody else has the lock, or the lane is at its limit or shut.
    #[cold]
    #[inline(never)]
    fn put_long(&self, peer: u32, put: &Put) -> Result<Seq> {
        {
            let mut queues = self.queues.lock();
            // SAFETY: as `VerbsContext::put`, whose caller promised.
            let request = unsafe { queues.put(peer, put, &self.outcomes) };
            // SAFETY: as above.
            if let Some(request) = request.or_else(|| unsafe { queues.put_with_room(peer, put, &self.outcomes) }) {
                return Ok(Seq(request as u32));
            }
        }
        self.issue(peer, Op::put(put), put.more)
    }

    /// The way of everything that the fast path does not take.
    #[inline(never)]
    fn issue(&self, peer: u32, op: Op, more: bool) -> Result<Seq> {
        let mut since = Instant::now();
        loop {
            self.outcomes.check(peer)?;
            let mut queues = self.queues.lock();
            if queues.backlogged < self.limits.operations {
                return queues.enqueue(peer, op, more, &self.outcomes).ok_or_else(|| no_such_peer(peer));
            }
            queues.advance(&self.outcomes);
            drop(queues);
            if since.elapsed() > self.limits.timeout {
                log::warn!(
                    "a call has waited {:?} for room to send to rank {peer}, {} operations are in front (OXYGIN_MAX_OPERATIONS); it goes on waiting",
                    self.limits.timeout,
                    self.limits.operations
                );
                since = Instant::now();
            }
            std::thread::yield_now();
        }
    }
}

/// One context over verbs.
pub struct VerbsContext {
    /// What `shared` points to, without the counts of the `Arc` in front.
    at: NonNull<Shared>,
    shared: Arc<Shared>,
    progress: Option<Arc<Progress>>,
}

// SAFETY: `at` is another way to `shared`, which is Send and Sync.
unsafe impl Send for VerbsContext {}
// SAFETY: as above.
unsafe impl Sync for VerbsContext {}

impl VerbsContext {
    pub(super) fn new(shared: Shared, progress: Option<Arc<Progress>>) -> Self {
        let shared = Arc::new(shared);
        if let Some(progress) = &progress {
            progress.add(&shared);
        }
        Self { at: NonNull::from(&*shared), shared, progress }
    }

    #[inline(always)]
    fn shared(&self) -> &Shared {
        // SAFETY: points into `self.shared`, which lives as long as this object.
        unsafe { self.at.as_ref() }
    }
}

/// The short way to a context, for whoever keeps the context alive beside it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Direct(NonNull<Shared>);

// SAFETY: it is another way to `Shared`, which is Send and Sync.
unsafe impl Send for Direct {}
// SAFETY: as above.
unsafe impl Sync for Direct {}

/// What a second look at an operation found.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Short {
    /// It is complete.
    Done,
    /// Not yet.
    Unfinished,
    /// Not yet, and something on this context failed: the long way knows more.
    Ask,
}

impl Direct {
    /// As a plain pointer.
    pub fn into_raw(self) -> *mut c_void {
        self.0.as_ptr().cast()
    }

    /// From [`Direct::into_raw`], or `None` from NULL.
    ///
    /// # Safety
    /// A pointer that is not NULL came from there.
    #[inline(always)]
    pub unsafe fn from_raw(raw: *mut c_void) -> Option<Self> {
        NonNull::new(raw.cast()).map(Self)
    }

    /// Posts a put if nothing stands in the way: no lock that is held, no backlog, no want of room. Returns its request;
    /// `None` has no effect.
    ///
    /// # Safety
    /// As for [`Context::put`]; the context lives.
    #[inline(always)]
    pub unsafe fn put(self, peer: u32, put: &Put) -> Option<u64> {
        // SAFETY: the context lives (caller).
        let shared = unsafe { self.0.as_ref() };
        let mut queues = shared.queues.try_lock()?;
        // SAFETY: the caller's promise.
        let request = unsafe { queues.put(peer, put, &shared.outcomes) };
        // SAFETY: as above.
        request.or_else(|| unsafe { queues.put_with_room(peer, put, &shared.outcomes) })
    }

    /// Posts a put with a signal between the same windows as the last one to this peer, and stores its request. `false`
    /// has no effect.
    ///
    /// # Safety
    /// As for [`Context::put`]; `peer` is one of the communicator's ranks; the context lives; what the request goes to is
    /// writable.
    #[inline(always)]
    pub unsafe fn put_again(self, peer: u32, put: &LatePut) -> bool {
        // SAFETY: the context lives (caller).
        let shared = unsafe { self.0.as_ref() };
        let Some(mut queues) = shared.queues.try_lock() else { return false };
        // SAFETY: the caller's promise.
        unsafe { queues.put_again(peer, put, &shared.outcomes) }
    }

    /// Makes room towards a peer where [`Direct::put_again`] had none; whether there is some now.
    ///
    /// # Safety
    /// The context lives.
    #[cold]
    #[inline(never)]
    pub unsafe fn make_room(self, peer: u32) -> bool {
        // SAFETY: the context lives (caller).
        let shared = unsafe { self.0.as_ref() };
        shared.queues.try_lock().is_some_and(|mut queues| queues.reopen(peer, &shared.outcomes))
    }

    /// Remembers the windows of a put with a signal, for [`Direct::put_again`].
    ///
    /// # Safety
    /// The context lives.
    #[cold]
    pub unsafe fn remember(self, peer: u32, windows: &Windows) {
        // SAFETY: the context lives (caller).
        let mut queues = unsafe { self.0.as_ref() }.queues.lock();
        if queues.messages.is_none() {
            if let Some(lane) = queues.lanes.get_mut(peer as usize) {
                lane.hot.remember(windows);
            }
        }
    }

    /// Takes completions and looks at an operation again.
    ///
    /// # Safety
    /// The context lives.
    #[inline(always)]
    pub unsafe fn test_again<'a>(self, completed: impl FnOnce() -> &'a AtomicU32, seq: Seq) -> Short {
        // SAFETY: the context lives (caller).
        let shared = unsafe { self.0.as_ref() };
        let mut queues = shared.queues.lock();
        if let Err(taken) = queues.take(&shared.outcomes) {
            return shared.settle(queues, taken, completed(), seq);
        }
        drop(queues);
        shared.look(completed(), seq)
    }
}

impl VerbsContext {
    /// Makes every lane forget a window, before its registration ends.
    pub fn forget(&self, handle: u64) {
        self.shared.queues.lock().lanes.iter_mut().for_each(|lane| lane.hot.forget(handle));
    }

    /// Gives each peer's requests their upper half.
    pub fn number_requests(&self, request: impl Fn(u32) -> u64) {
        for (peer, lane) in (0..).zip(&mut self.shared.queues.lock().lanes) {
            lane.name(request(peer));
        }
    }

    /// Where the newest complete operation to `peer` shows; lives as long as the context.
    pub fn completed(&self, peer: u32) -> *const AtomicU32 {
        &raw const self.shared.outcomes.completed[peer as usize]
    }

    /// The short way to this context.
    pub fn direct(&self) -> Direct {
        Direct(self.at)
    }

    /// Lets the numbers of operations to `peer` go on after `number`, so that tests see them wrap. Nothing may be
    /// unfinished.
    #[doc(hidden)]
    pub fn renumber(&self, peer: u32, number: u32) {
        let mut queues = self.shared.queues.lock();
        if let Some(lane) = queues.lanes.get_mut(peer as usize) {
            lane.renumber(number);
            self.shared.outcomes.complete(peer, number);
        }
    }
}

impl Drop for VerbsContext {
    fn drop(&mut self) {
        if let Some(progress) = &self.progress {
            progress.remove(&self.shared);
        }
    }
}

#[cold]
fn no_such_peer(peer: u32) -> Error {
    Error::argument(format!("rank {peer} is not one of this communicator"))
}

impl Context for VerbsContext {
    // Always: the tables' functions build the operation right in front of this, and then it never touches memory.
    #[inline(always)]
    unsafe fn put(&self, peer: u32, put: &Put) -> Result<Seq> {
        let shared = self.shared();
        if let Some(mut queues) = shared.queues.try_lock() {
            // SAFETY: the caller's promise.
            if let Some(request) = unsafe { queues.put(peer, put, &shared.outcomes) } {
                return Ok(Seq(request as u32));
            }
        }
        shared.put_long(peer, put)
    }

    unsafe fn get(&self, peer: u32, get: &Get) -> Result<Seq> {
        let seq = self.shared.issue(peer, Op::get(get), get.more)?;
        if get.len > 0 && self.shared.regions.any() && self.shared.regions.rkey(get.lkey).is_some() {
            if let Some(lane) = self.shared.queues.lock().lanes.get_mut(peer as usize) {
                lane.flush_from = Some((get.local, get.lkey));
            }
        }
        Ok(seq)
    }

    /// For host memory the completion of a read is enough: the device writes the completion behind the data, over the
    /// same way to the same memory, and without the attribute that would let it overtake. So a flush is done when the
    /// reads before it are. Device memory (a DMA-BUF) is another target than the memory of the completion queue: there
    /// a read of the place through the device, over the connection to this rank itself, pushes the data in front of it.
    fn flush(&self, peer: u32) -> Result<Option<Seq>> {
        let shared = &self.shared;
        shared.outcomes.check(peer)?;
        let from = {
            let mut queues = shared.queues.lock();
            let Some(lane) = queues.lanes.get_mut(peer as usize) else { return Err(no_such_peer(peer)) };
            match lane.flush_from.take().and_then(|(at, lkey)| Some((at, shared.regions.rkey(lkey)?))) {
                Some(from) => from,
                None => {
                    let newest = Seq(lane.issued());
                    let done = shared.outcomes.completed.get(peer as usize);
                    let done = done.map_or(newest, |d| Seq(d.load(Ordering::Acquire)));
                    return Ok((!newest.is_done(done)).then_some(newest));
                }
            }
        };
        let (local, lkey) = shared.scratch.place();
        let op = Op { kind: Kind::Flush, local, lkey, rkey: from.1, remote: from.0, len: 1, signal: None };
        shared.issue(peer, op, false).map(Some)
    }

    #[inline(always)]
    fn test(&self, peer: u32, seq: Seq) -> Result<bool> {
        let shared = self.shared();
        let Some(completed) = shared.outcomes.completed.get(peer as usize) else { return Err(no_such_peer(peer)) };
        if seq.is_done(Seq(completed.load(Ordering::Acquire))) {
            return Ok(true);
        }
        shared.advance();
        match shared.look(completed, seq) {
            Short::Done => Ok(true),
            Short::Unfinished => Ok(false),
            Short::Ask => shared.outcomes.verdict(peer),
        }
    }

    fn progress(&self) -> Result<()> {
        self.shared.advance();
        Ok(())
    }

    fn has_error(&self) -> bool {
        self.shared.outcomes.has_error()
    }
}
