//! A window of another process, mapped here.

use super::exchange::{Answer, Collected};
use super::export::is_in_host_memory;
use super::home;
use super::wire::Site;
use crate::fabric::soft::gpu::{Found, Use};
use crate::memory::registry::Extent;
use oxygin_ffi::cuda::{Allocation, Context, Mapped};
use std::mem::ManuallyDrop;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::AtomicUsize;
use std::sync::Arc;

/// A peer's window. Dropping it unmaps it; the owner has seen the GPU's last access.
pub struct Import {
    /// Where its first byte is mapped here …
    at: u64,
    /// … and where it is for the peer.
    extent: Extent,
    /// See `Found::window`.
    key: u32,
    /// The GPU that its memory is on, or [`home::HOST`], the one that the driver says, and whether kernels here may
    /// add to words of it where this process does not see it.
    home: i32,
    named: i32,
    adds: bool,
    /// Operations that name it.
    pub uses: Arc<AtomicUsize>,
    /// The number of this rank's window that was registered together with it.
    pub own: u32,
    /// This rank has deregistered that one.
    pub is_retired: bool,
    mapping: ManuallyDrop<Mapped>,
    context: Arc<Context>,
}

impl Import {
    /// Where it is for the peer, and its first byte here.
    pub fn whole(&self) -> (Extent, Found) {
        let used = Use::of(&self.uses);
        let Self { at, key, home, named, adds, .. } = *self;
        (self.extent, Found { addr: at, window: key, home, named, adds, used })
    }

    /// Where `len` bytes are that the peer has at `addr`, if the window holds them.
    pub fn find(&self, addr: u64, len: u64) -> Option<Found> {
        self.extent.holds(addr, len).then(|| {
            let (extent, first) = self.whole();
            Found { addr: first.addr + (addr - extent.base), ..first }
        })
    }
}

impl Drop for Import {
    fn drop(&mut self) {
        // A context that is gone has taken its mappings with it.
        if let Ok(_current) = self.context.enter() {
            // SAFETY: dropped once, here.
            unsafe { ManuallyDrop::drop(&mut self.mapping) };
        }
    }
}

/// A window on its way here.
pub struct Fetch {
    /// Whose.
    pub rank: u32,
    /// Its number there.
    pub window: u32,
    /// Where it is for the peer.
    extent: Extent,
    site: Site,
    collected: Collected<Allocation>,
}

impl Fetch {
    /// Nothing is here yet.
    pub fn new(rank: u32, window: u32, extent: Extent, (offset, sizes): (u64, Vec<u64>), site: Site) -> Self {
        Self { rank, window, extent, site, collected: Collected::new(offset, sizes) }
    }

    /// The first segment that is missing.
    pub fn missing(&self) -> Option<u32> {
        self.collected.missing()
    }

    /// Takes what the peer sent.
    pub fn take(&mut self, context: &Context, answer: Answer<OwnedFd>) -> Result<(), String> {
        self.collected.take(answer.segment, answer.what, answer.file, |file| {
            let imported = context.enter().and_then(|_current| Allocation::import(context.cuda(), file.as_fd()));
            imported.map_err(|e| e.to_string())
        })
    }

    /// Maps it once nothing is missing; `key` is what no other window has, `own` the number of this rank's window.
    pub fn map(self, context: &Arc<Context>, key: u32, own: u32) -> Result<Import, String> {
        let said = |e: oxygin_ffi::cuda::CudaError| e.to_string();
        let _current = context.enter().map_err(said)?;
        let (parts, offset) = self.collected.complete().ok_or("something is missing")?;
        let segments: Vec<_> = parts.iter().map(|(segment, _)| segment).collect();
        if is_in_host_memory(&segments)? != (self.site == Site::Host) {
            return Err("it sent other memory than it offered".into());
        }
        let mapping = Mapped::new(context.cuda(), &parts, context.device()).map_err(said)?;
        let (home, named, adds) = match &self.site {
            Site::Host => (home::HOST, home::HOST, false),
            Site::Gpu(gpu) => {
                let named = context.cuda().pointer(mapping.base()).map_err(said)?.device;
                let here = context.cuda().pci_address(context.device()).unwrap_or_default();
                let home = home::of(named, gpu, context.device(), &here);
                (home, named, home == home::UNSEEN && home::adds(&here, gpu))
            }
        };
        Ok(Import {
            at: mapping.base() + offset,
            home,
            named,
            adds,
            extent: self.extent,
            key,
            own,
            uses: Arc::default(),
            is_retired: false,
            mapping: ManuallyDrop::new(mapping),
            context: context.clone(),
        })
    }
}
