//! One context as `rma` sees it.

use super::atomic::ATOMICS;
use super::bounce::Bounce;
use super::lane::{self, EntryKind, Lane};
use super::outcome::Outcomes;
use super::progress::Progress;
use super::queues::{PostBatch, Queues, Taken};
use super::regions::DeviceRegions;
use super::template::{Again, Windows};
use crate::error::{Error, Result};
use crate::fabric::{Context, Flush, Posted, Sent};
use crate::rma::atomic::Atomics;
use crate::rma::op::{Op, Put};
use crate::rma::refusal::Refusal;
use crate::rma::seq::Seq;
use crate::sys::spin::{Spin, SpinGuard};
use oxygin_ffi::verbs::Pd;
use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};

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
    pd: Arc<Pd>,
    /// Ended after the queue pairs.
    bounce: OnceLock<Bounce>,
}

/// How much a context holds.
#[derive(Clone, Copy)]
pub(super) struct Limits {
    /// Operations to one peer that wait before no more are taken: `OXYGIN_MAX_OPERATIONS`.
    pub operations: usize,
    /// Whether the signal thread sleeps through completions that no peer marked as solicited. Not on iWARP: soft-iWARP
    /// takes no received message for a solicited one.
    pub solicited: bool,
    /// Whether the devices of all ranks have remote atomics.
    pub atomics: bool,
}

impl Shared {
    pub(super) fn new(
        queues: Queues,
        outcomes: Outcomes,
        cq: Arc<oxygin_ffi::verbs::Cq>,
        scratch: Arc<super::regions::Scratch>,
        regions: Arc<DeviceRegions>,
        limits: Limits,
        pd: Arc<Pd>,
    ) -> Self {
        Self { queues: Spin::new(queues), outcomes, cq, scratch, regions, limits, pd, bounce: OnceLock::new() }
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
    fn settle(&self, mut queues: SpinGuard<'_, Queues>, taken: Taken, completed: &AtomicU32, seq: Seq) -> Short {
        queues.settle(taken, &self.outcomes);
        drop(queues);
        self.look(completed, seq)
    }

    /// Takes what has arrived, with the queue armed for what comes later; whether there may be more. Peers that send
    /// faster than this takes do not keep the thread from other contexts. `look`: there are events of the device.
    pub(super) fn serve(&self, look: bool) -> std::io::Result<bool> {
        /// Batches of completions taken in one go.
        const BATCHES: usize = 64;
        if look {
            self.queues.lock().look(&self.outcomes);
        }
        self.cq.arm(self.limits.solicited)?;
        Ok((0..BATCHES).all(|_| self.queues.lock().advance(&self.outcomes)))
    }

    /// The rest of `post`: several operations, none that may go straight, somebody else has the lock, or the lane is
    /// at its limit or shut.
    #[cold]
    #[inline(never)]
    fn post_long(&self, peer: u32, ops: &[Op]) -> Result<Posted> {
        if let [Op::Put(put)] = ops {
            let mut queues = self.queues.lock();
            // SAFETY: as `VerbsContext::post`, whose caller promised.
            let request = unsafe { queues.put(peer, put, &self.outcomes) };
            // SAFETY: as above.
            if let Some(request) = request.or_else(|| unsafe { queues.put_with_room(peer, put, &self.outcomes) }) {
                return Ok(Posted { taken: 1, last: Seq(request as u32) });
            }
        }
        self.outcomes.check(peer)?;
        let is_atomic = |op: &Op| matches!(op, Op::Atomic(_));
        if !self.limits.atomics && ops.iter().any(is_atomic) {
            return Err(Refusal::NoAtomics.into());
        }
        let bounce = match ops.iter().any(|op| matches!(op, Op::Value(_)) || is_atomic(op)) {
            true => Some(self.bounce()?),
            false => None,
        };
        let batch = PostBatch { ops, bounce, regions: &self.regions, limit: self.limits.operations };
        self.queues.lock().enqueue_all(peer, &batch, &self.outcomes).ok_or_else(|| no_such_peer(peer))
    }

    /// Where payloads lie, made when first asked for.
    fn bounce(&self) -> Result<&Bounce> {
        if let Some(bounce) = self.bounce.get() {
            return Ok(bounce);
        }
        // Who comes second has made one in vain.
        let made = Bounce::new(&self.pd, self.outcomes.completed.len())?;
        Ok(self.bounce.get_or_init(|| made))
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

    /// Posts a put if nothing stands in the way: no lock that is held, no backlog, no want of room. Returns its
    /// request; `None` has no effect.
    ///
    /// # Safety
    /// As for [`Context::post`]; the context lives.
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
    /// As for [`Context::post`]; `peer` is one of the communicator's ranks; the context lives; what the request goes
    /// to is writable.
    #[inline(always)]
    pub unsafe fn put_again(self, peer: u32, put: &impl Again) -> bool {
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
                lane.template.remember(windows);
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
    /// Gives each peer's requests their upper half.
    pub fn number_requests(&self, request: impl Fn(u32) -> u64) {
        for (peer, lane) in (0..).zip(&mut self.shared.queues.lock().lanes) {
            lane.name(request(peer));
        }
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
    const NAME: &'static str = "verbs";
    const SHARES_PROGRESS: bool = false;

    // Always: the tables' functions build the operation right in front of this, and then it never touches memory.
    #[inline(always)]
    unsafe fn post(&self, peer: u32, ops: &[Op]) -> Result<Posted> {
        let shared = self.shared();
        if let [Op::Put(put)] = ops {
            if let Some(mut queues) = shared.queues.try_lock() {
                // SAFETY: the caller's promise.
                if let Some(request) = unsafe { queues.put(peer, put, &shared.outcomes) } {
                    return Ok(Posted { taken: 1, last: Seq(request as u32) });
                }
            }
        }
        shared.post_long(peer, ops)
    }

    /// For host memory the completion of a read is enough: the device writes the completion behind the data, over the
    /// same way to the same memory, and without the attribute that would let it overtake. So a flush is done when the
    /// reads before it are. Device memory (a DMA-BUF) is another target than the memory of the completion queue: there
    /// a read of the place through the device, over the connection to this rank itself, pushes the data in front of it.
    /// Any place will do, as all device windows are on one GPU; but it must be there until it is read, and so it is in
    /// the window that the caller flushes. Another one may be deregistered meanwhile, by who has flushed that before.
    fn flush(&self, peer: u32, into: Option<u32>) -> Result<Flush> {
        let shared = &self.shared;
        shared.outcomes.check(peer)?;
        let mut queues = shared.queues.lock();
        let Some(lane) = queues.lanes.get_mut(peer as usize) else { return Err(no_such_peer(peer)) };
        let Some((remote, rkey)) = shared.regions.to_read(&lane.brought, into) else {
            lane.brought.clear();
            let (newest, done) = (Seq(lane.issued()), Seq(shared.outcomes.completed(peer)));
            return Ok(if newest.is_done(done) { Flush::Done } else { Flush::Until(newest) });
        };
        let (local, lkey) = shared.scratch.place();
        let op = lane::Op { kind: EntryKind::Flush, local, lkey, rkey, remote, len: 1, signal: None };
        let Some(seq) = queues.enqueue(peer, op, shared.limits.operations, &shared.outcomes) else {
            return Ok(Flush::NoRoom);
        };
        if let Some(lane) = queues.lanes.get_mut(peer as usize) {
            lane.brought.clear();
        }
        Ok(Flush::Until(seq))
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

    fn atomics(&self) -> Atomics {
        match self.shared.limits.atomics {
            true => ATOMICS,
            false => Atomics::NONE,
        }
    }

    fn sent(&self, peer: u32) -> Sent {
        self.shared.queues.lock().lanes.get(peer as usize).map_or(Sent::default(), Lane::sent)
    }

    fn completed(&self, peer: u32) -> &AtomicU32 {
        &self.shared.outcomes.completed[peer as usize]
    }

    /// Makes every lane forget the window.
    fn forget(&self, window: u64) {
        self.shared.queues.lock().lanes.iter_mut().for_each(|lane| lane.template.forget(window));
    }
}
