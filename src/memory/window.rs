//! One registered window: where it lies here, and where it lies at every peer.

use super::registry::Registry;
use crate::error::Result;
use crate::sys::handles::{Kind, Object};
use crate::sys::sync::Mutex;
use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering};
use std::sync::Arc;

/// A window at one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Remote {
    /// First byte, in that rank's address space.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// That rank's key.
    pub rkey: u32,
}

impl Remote {
    /// Offsets below this that are multiples of 8 are those of signals; 0 where the window does not start at such an
    /// address.
    pub fn signals(&self) -> u64 {
        if self.base % 8 == 0 {
            self.len & !7
        } else {
            0
        }
    }
}

/// What a fabric has of a registered region. Dropping it ends the registration, also where [`Guard::end`] was not
/// called.
pub trait Guard: Send + Sync {
    /// Peers may still put into the region. Applies what had arrived from them when this was called: a put that is
    /// complete at its source and is here is in its place afterwards. Waits, for a while, where it finds no room.
    fn apply_arrived(&self) {}

    /// Nobody begins anything with the memory from here on; waits, for a while, until nobody is at it any more.
    /// `Err`: somebody still may read or write it.
    fn end(&self) -> Result<()> {
        Ok(())
    }
}

/// Of a region that no device knows.
impl Guard for () {}

/// A registered region. Dropping it ends the registration.
pub struct Registration {
    /// What local work requests name the region by.
    pub lkey: u32,
    /// What peers name it by.
    pub rkey: u32,
    /// The fabric's own object.
    pub guard: Box<dyn Guard>,
}

impl Registration {
    /// Ends the registration of window `id`: applies what had arrived for it, takes it from the registry, waits until
    /// nobody is at it any more. `Err`: somebody still may read or write it.
    pub fn end(&self, registry: &Registry, id: u32) -> Result<()> {
        self.guard.apply_arrived();
        registry.remove(id);
        self.guard.end()
    }
}

/// Where a [`Remote`] is kept. Aligned so that ranks lie a power of two apart.
#[derive(Default)]
#[repr(C, align(32))]
pub struct RemoteCell {
    base: AtomicU64,
    len: AtomicU64,
    rkey: AtomicU32,
}

impl RemoteCell {
    /// What it holds.
    #[inline(always)]
    pub fn load(&self) -> Remote {
        Remote {
            base: self.base.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            rkey: self.rkey.load(Ordering::Relaxed),
        }
    }

    fn store(&self, remote: Remote) {
        self.base.store(remote.base, Ordering::Relaxed);
        self.len.store(remote.len, Ordering::Relaxed);
        self.rkey.store(remote.rkey, Ordering::Relaxed);
    }
}

/// What a window stands for: where it lies here and at every rank, and what its fabric has of it.
pub struct WindowFacts {
    /// Window number at this rank.
    pub id: u32,
    /// First byte here.
    pub base: u64,
    /// Bytes here.
    pub len: u64,
    /// By rank; as many as the communicator has.
    pub remote: Box<[Remote]>,
    /// Ends when it is let go of.
    pub registration: Registration,
}

/// A window that every rank of a communicator registered together.
///
/// NCCL ends a communicator's windows while its progress threads are still in calls that name them: `ncclCommAbort`
/// and `ncclCommDestroy` deregister what the program did not, and join these threads afterwards. So a window stays in
/// memory, whether its registration has ended or not, until the next one gets its place or the communicator and its
/// sets of contexts are gone ([`WindowPool`](super::window_pool::WindowPool)). Who reads one without a reference of
/// its own reads atomics, and asks afterwards whether the handle was still that window's
/// ([`handles::read`](crate::sys::handles::read)).
pub struct Window {
    /// Number of the communicator in this process: operations of another one refuse the window.
    pub coll: u64,
    id: AtomicU32,
    base: AtomicU64,
    len: AtomicU64,
    lkey: AtomicU32,
    remote: Box<[RemoteCell]>,
    registration: Mutex<Option<Arc<Registration>>>,
    /// The handle NCCL holds, once there is one.
    pub handle: AtomicU64,
}

impl Window {
    /// One of a communicator of so many ranks that stands for nothing yet.
    pub fn new(coll: u64, nranks: usize) -> Self {
        Self {
            coll,
            id: AtomicU32::new(0),
            base: AtomicU64::new(0),
            len: AtomicU64::new(0),
            lkey: AtomicU32::new(0),
            remote: (0..nranks).map(|_| RemoteCell::default()).collect(),
            registration: Mutex::new(None),
            handle: AtomicU64::new(0),
        }
    }

    /// One that stands for this.
    pub fn of(coll: u64, what: WindowFacts) -> Self {
        let window = Self::new(coll, what.remote.len());
        window.describe(what);
        window
    }

    /// Has it stand for this from here on. It has no handle.
    pub fn describe(&self, what: WindowFacts) {
        debug_assert_eq!(what.remote.len(), self.remote.len());
        // Who sees any of this also sees that an earlier handle is gone.
        fence(Ordering::Release);
        self.handle.store(0, Ordering::Relaxed);
        self.id.store(what.id, Ordering::Relaxed);
        self.base.store(what.base, Ordering::Relaxed);
        self.len.store(what.len, Ordering::Relaxed);
        self.lkey.store(what.registration.lkey, Ordering::Relaxed);
        self.remote.iter().zip(&what.remote).for_each(|(cell, remote)| cell.store(*remote));
        *self.registration.lock() = Some(Arc::new(what.registration));
    }

    /// Window number at this rank.
    pub fn id(&self) -> u32 {
        self.id.load(Ordering::Relaxed)
    }

    /// First byte here.
    #[inline(always)]
    pub fn base(&self) -> u64 {
        self.base.load(Ordering::Relaxed)
    }

    /// Bytes here.
    #[inline(always)]
    pub fn len(&self) -> u64 {
        self.len.load(Ordering::Relaxed)
    }

    /// Whether there is nothing; never so for a registered one.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// This rank's key for local access.
    #[inline(always)]
    pub fn lkey(&self) -> u32 {
        self.lkey.load(Ordering::Relaxed)
    }

    /// The window at each rank. Stays where it is as long as this does.
    #[inline(always)]
    pub fn remote(&self) -> &[RemoteCell] {
        &self.remote
    }

    /// What its fabric has of it; `None`: nothing any more.
    pub fn registration(&self) -> Option<Arc<Registration>> {
        self.registration.lock().clone()
    }

    /// Lets go of what its fabric has of it.
    pub fn release(&self) {
        let registration = self.registration.lock().take();
        drop(registration);
    }
}

impl Object for Window {
    const KIND: Kind = Kind::Window;
}
