//! Where the windows are that lanes name, for one hand-over to the kernel.
//!
//! Hundreds of lanes name the same few windows, and to find one takes the engine's lock, or that of all that is mapped
//! here, and a call of the driver, while no lane is served by anybody. So each is found once.

use super::engine_at;
use crate::fabric::soft::gpu::Use;
use crate::fabric::soft::ipc;
use crate::fabric::soft::link::RouteKind;
use crate::fabric::soft::progress::Progress;
use crate::memory::key::Key;
use crate::memory::registry::Extent;

/// A peer's window.
#[derive(Clone, Copy)]
struct Reached {
    /// Where it is for the peer …
    extent: Extent,
    /// … and its first byte for the kernel.
    at: u64,
    kind: MemoryKind,
}

/// What a peer's window is for the kernel.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of this GPU.
    Near,
    /// Memory of another one.
    Far,
    /// Host memory, from which gets are carried out. Nothing else is: kernels of another GPU, and CPUs, may add to
    /// words there, and not all of them see each other's additions.
    Host,
}

/// What has been found.
#[derive(Default)]
pub struct Reach {
    /// By peer and key; `None`: the kernel does not reach it.
    peers: Vec<((u32, u32), Option<Reached>)>,
    /// This rank's own, by key; `None`: there is none on the GPU.
    own: Vec<(u32, Option<Extent>)>,
    /// Keeps windows of other processes mapped.
    uses: Vec<Use>,
}

impl Reach {
    /// Where the kernel finds `len` bytes of a peer's window, and what that is.
    pub fn peers(&mut self, shared: &Progress, peer: u32, rkey: u32, base: u64, len: u64) -> Option<(u64, MemoryKind)> {
        let uses = &mut self.uses;
        let found = once(&mut self.peers, (peer, rkey), || look_up(shared, peer, Key(rkey), uses));
        let Reached { extent, at, kind } = found?;
        extent.holds(base, len).then(|| (at + (base - extent.base), kind))
    }

    /// Whether this rank has the range in a window on its GPU.
    pub fn has_own(&mut self, shared: &Progress, lkey: u32, base: u64, len: u64) -> bool {
        let find = || shared.engine.window(lkey).filter(|_| Key(lkey).is_on_gpu());
        once(&mut self.own, lkey, find).is_some_and(|extent| extent.holds(base, len))
    }

    /// Nothing is known any more, and nothing kept.
    pub fn clear(&mut self) {
        self.peers.clear();
        self.own.clear();
        self.uses.clear();
    }

    /// The windows of other processes that are kept stay mapped for good.
    pub fn leak(&mut self) {
        std::mem::forget(std::mem::take(&mut self.uses));
    }
}

/// What is known of something, or what `find` says, which is known from then on.
fn once<K: PartialEq, V: Copy>(known: &mut Vec<(K, V)>, what: K, find: impl FnOnce() -> V) -> V {
    if let Some((_, found)) = known.iter().find(|(of, _)| *of == what) {
        return *found;
    }
    let found = find();
    known.push((what, found));
    found
}

/// A peer's window; what keeps it mapped goes to `uses`.
fn look_up(shared: &Progress, peer: u32, key: Key, uses: &mut Vec<Use>) -> Option<Reached> {
    match engine_at(shared, peer) {
        Some(engine) if key.is_on_gpu() => {
            let (own, its) = (shared.engine.gpu()?, engine.gpu()?);
            let extent = engine.window(key.0)?;
            let is_reached = own == its || key.is_open() && shared.engine.adds_at(its);
            let kind = if own == its { MemoryKind::Near } else { MemoryKind::Far };
            is_reached.then_some(Reached { extent, at: extent.base, kind })
        }
        Some(engine) => {
            let memory = engine.host_memory(key.number())?;
            let is_reached = memory.is_open || memory.is_open_here && shared.engine.gpu()? == engine.gpu()?;
            is_reached.then_some(Reached { extent: memory.extent, at: memory.extent.base, kind: MemoryKind::Host })
        }
        None => look_up_mapped(shared, peer, key, uses),
    }
}

/// The same of a rank in another process.
fn look_up_mapped(shared: &Progress, peer: u32, key: Key, uses: &mut Vec<Use>) -> Option<Reached> {
    if shared.link(peer).way() != RouteKind::Near || !shared.neighbours.get(peer)?.has_window(key.number()) {
        return None;
    }
    let (extent, first) = shared.share.whole(peer, key.number())?;
    let kind = match first.home {
        ipc::HOST => MemoryKind::Host,
        home if shared.engine.gpu() == Some(home) => MemoryKind::Near,
        _ => MemoryKind::Far,
    };
    // Who has it in GPU memory calls it so.
    if key.is_on_gpu() == (kind == MemoryKind::Host) {
        return None;
    }
    let may_add = || if first.home < 0 { first.adds } else { shared.engine.adds_at(first.home) };
    if kind != MemoryKind::Host && !may_add() {
        return None;
    }
    uses.push(first.used);
    Some(Reached { extent, at: first.addr, kind })
}
