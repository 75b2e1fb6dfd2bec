//! One registered window: where it lies here, and where it lies at every peer.

use super::registry::Registry;
use crate::error::Result;
use crate::sys::handles::{Kind, Object};
use std::sync::atomic::AtomicU64;

/// A window at one rank. Aligned so that ranks lie a power of two apart.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
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

/// A window that every rank of a communicator registered together.
pub struct Window {
    /// Number of the communicator in this process: operations of another one refuse the window.
    pub coll: u64,
    /// Window number at this rank.
    pub id: u32,
    /// First byte here.
    pub base: u64,
    /// Bytes here.
    pub len: u64,
    /// This rank's key for local access.
    pub lkey: u32,
    /// By rank.
    pub remote: Box<[Remote]>,
    /// Ends the registration when dropped.
    pub registration: Registration,
    /// The handle NCCL holds, once there is one.
    pub handle: AtomicU64,
}

impl Object for Window {
    const KIND: Kind = Kind::Window;
}
