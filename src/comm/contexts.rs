//! A set of contexts: what `createContext` returns, on whichever fabric the communicator settled on.

use super::backpressure::Backpressure;
use super::coll::Coll;
use super::device_queues::DeviceQueues;
use super::fabrics::{on_queues, Queues};
use super::observe::Published;
use crate::error::Result;
use crate::fabric::Context;
use crate::memory::window_pool::WindowPool;
use crate::rma::op::Op;
use crate::rma::refusal::{Refusal, Target};
use crate::rma::request::{Request, RequestForm, MAX_RANKS};
use crate::rma::seq::Seq;
use crate::sys::handles::{Kind, Object};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, OnceLock, Weak};

/// Who executes what device code of a set's contexts writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// NCCL's proxy, by calls; or a caller that is no proxy.
    Nccl,
    /// This library's engine, out of queues of descriptors.
    Own,
    /// The software NIC, out of queue pairs.
    GdakiSoft,
    /// An mlx5 device, out of its own queue pairs.
    Gdaki,
}

impl EngineKind {
    /// What asks for it in `OXYGIN_ENGINE`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nccl => "nccl",
            Self::Own => "own",
            Self::GdakiSoft => "gdaki-soft",
            Self::Gdaki => "gdaki",
        }
    }

    /// What ranks tell each other.
    pub(super) fn number(self) -> u8 {
        match self {
            Self::Nccl => 0,
            Self::Own => 1,
            Self::GdakiSoft => 2,
            Self::Gdaki => 3,
        }
    }

    /// What a rank told.
    pub(super) fn from_number(number: u8) -> Option<Self> {
        [Self::Nccl, Self::Own, Self::GdakiSoft, Self::Gdaki].into_iter().find(|kind| kind.number() == number)
    }
}

/// Which set it is.
#[derive(Clone, Copy, Debug)]
pub struct Name {
    /// Number of the communicator in this process.
    pub coll: u64,
    /// Ranks in it.
    pub nranks: u32,
    /// This set among the communicator's, from 1 on.
    pub set: u32,
}

/// What others keep of a set of contexts to find it by a shorter way. Nothing here depends on it.
pub trait Attached: Send + Sync {
    /// What requests of a (context, peer) begin with, the operation's number aside; `None`: they have the usual form.
    fn request(&self, context: u32, peer: u32) -> Option<u64>;

    /// The set has this handle from here on.
    ///
    /// # Safety
    /// The handle is live and the set's, and nobody has it yet.
    unsafe fn named(&self, handle: *mut c_void);

    /// The set takes no operations from here on.
    fn close(&self);
}

/// A set of contexts of one communicator.
pub struct Contexts {
    /// Number of the communicator in this process.
    pub coll: u64,
    /// Ranks in it.
    pub nranks: u32,
    /// Contexts that take operations: all, and none once the set is closed.
    count: AtomicU32,
    /// This set among the communicator's, from 1 on.
    pub set: u32,
    owner: Weak<Coll>,
    /// Ended before `queues`, which it may point into.
    attached: OnceLock<Box<dyn Attached>>,
    published: Published,
    backpressure: Backpressure,
    queues: Queues,
    /// In memory as long as the set: operations look windows up that may go meanwhile.
    _windows: Arc<WindowPool>,
    /// Queues of this library's that device code writes into. Ended after `queues`, which wait for what is under way: a
    /// peer's GPU engine may still count completions in memory of these.
    device: OnceLock<DeviceQueues>,
}

impl Object for Contexts {
    const KIND: Kind = Kind::Contexts;
}

impl Contexts {
    /// A set; `queues` has at least one context, or none where device code alone uses the set. `windows`: the
    /// communicator's.
    pub fn new(
        owner: Weak<Coll>,
        name: Name,
        backpressure: Backpressure,
        queues: Queues,
        windows: Arc<WindowPool>,
    ) -> Self {
        let Name { coll, nranks, set } = name;
        debug_assert!(nranks <= MAX_RANKS);
        let count = AtomicU32::new(on_queues!(&queues, q => q.len()) as u32);
        let (attached, device, published) = (OnceLock::new(), OnceLock::new(), Published::default());
        Self { coll, nranks, count, set, owner, attached, published, backpressure, queues, _windows: windows, device }
    }

    /// The contexts, by fabric.
    pub fn queues(&self) -> &Queues {
        &self.queues
    }

    /// Where the newest complete operation of a context to a peer shows; both exist.
    pub fn completed(&self, context: u32, peer: u32) -> &AtomicU32 {
        on_queues!(&self.queues, q => q[context as usize].completed(peer))
    }

    /// Attaches what somebody keeps of it; once, before it is used.
    pub fn attach(&self, attached: Box<dyn Attached>) {
        let _ = self.attached.set(attached);
    }

    /// Device code writes into these queues from here on; once.
    pub fn attach_device(&self, queues: DeviceQueues) {
        let _ = self.device.set(queues);
    }

    /// The queues that device code writes into, if this library drains them.
    pub fn device(&self) -> Option<&DeviceQueues> {
        self.device.get()
    }

    /// The set has this handle from here on.
    ///
    /// # Safety
    /// The handle is live and this set's, and nobody has it yet.
    pub unsafe fn set_handle(&self, handle: *mut c_void) {
        if let Some(attached) = self.attached.get().filter(|_| self.count() > 0) {
            // SAFETY: passed on.
            unsafe { attached.named(handle) };
        }
    }

    /// What NCCL holds of an operation.
    pub fn request(&self, context: u32, peer: u32, seq: Seq) -> *mut c_void {
        match self.attached.get().and_then(|a| a.request(context, peer)) {
            Some(upper) => (upper | u64::from(seq.0)) as *mut c_void,
            None => RequestForm::of(self.nranks).encode(Request { set: self.set, context, peer, seq }),
        }
    }

    /// From here on every operation is refused: the communicator is gone.
    pub fn close(&self) {
        if let Some(attached) = self.attached.get() {
            attached.close();
        }
        if let Some(device) = self.device.get() {
            device.stop();
        }
        self.count.store(0, Ordering::Release);
    }

    /// What operations of this set are held against.
    pub fn target(&self) -> Target {
        Target { coll: self.coll, contexts: self.count(), nranks: self.nranks }
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
        Err(Refusal::Closed.into())
    }

    /// A window's registration is about to end.
    pub fn forget(&self, handle: u64) {
        if let Some(device) = self.device.get() {
            device.forget_windows();
        }
        on_queues!(&self.queues, q => q.iter().for_each(|c| c.forget(handle)))
    }

    /// Takes the set out of its communicator and refuses further operations.
    pub fn destroy(&self) {
        self.close();
        if let Some(coll) = self.owner.upgrade() {
            coll.destroy_contexts(self);
            if let Some(device) = self.device.get() {
                for window in device.windows() {
                    if let Err(error) = coll.deregister_own(window) {
                        log::warn!("destroyContext: a set's memory stays allocated: {}", error.message());
                        device.keep_memory();
                    }
                }
            }
        }
    }

    /// Starts an operation; waits for room where there is none.
    ///
    /// # Safety
    /// As for [`Context::post`]; the set [`Contexts::has`] the context and the peer.
    #[inline(always)]
    pub unsafe fn start(&self, context: u32, peer: u32, op: &Op) -> Result<Seq> {
        let open = || self.check_open();
        // SAFETY: the index was checked (caller); the local range is the caller's promise.
        on_queues!(&self.queues, q => unsafe {
            self.backpressure.start(q.get_unchecked(context as usize), peer, op, open)
        })
    }

    /// Starts a flush of gets from `peer`, into a window with this local key among others, if one is named, and waits
    /// for room where there is none; `None`: there is nothing to wait for. The set [`Contexts::has`] both.
    pub fn flush(&self, context: u32, peer: u32, into: Option<u32>) -> Result<Option<Seq>> {
        let open = || self.check_open();
        on_queues!(&self.queues, q => self.backpressure.flush(&q[context as usize], peer, into, open))
    }

    /// Whether the operation is locally complete; makes progress when not.
    ///
    /// # Safety
    /// The set [`Contexts::has`] the request's context and peer.
    #[inline(always)]
    pub unsafe fn test(&self, request: Request) -> Result<bool> {
        let (context, peer, seq) = (request.context as usize, request.peer, request.seq);
        // SAFETY: the caller's promise.
        on_queues!(&self.queues, q => unsafe { q.get_unchecked(context).test(peer, seq) })
    }

    /// Lets all contexts advance.
    pub fn progress(&self) -> Result<()> {
        if self.count() == 0 {
            return Ok(());
        }
        if self.device.get().is_none() {
            self.published.tick(self, || self.owner.upgrade());
        }
        fn all<C: Context>(contexts: &[C]) -> Result<()> {
            let enough = if C::SHARES_PROGRESS { 1 } else { contexts.len() };
            contexts.iter().take(enough).try_for_each(C::progress)
        }
        on_queues!(&self.queues, q => all(q))
    }

    /// Whether anything failed on any of them.
    pub fn has_error(&self) -> bool {
        self.device.get().is_some_and(DeviceQueues::has_error)
            || on_queues!(&self.queues, q => q.iter().any(|c| c.has_error()))
    }
}

impl Drop for Contexts {
    fn drop(&mut self) {
        self.close();
    }
}
