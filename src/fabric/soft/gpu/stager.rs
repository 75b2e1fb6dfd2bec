//! GPU memory on its way to and from sockets: pinned slots with a stream for each direction, and for large and small.
//!
//! Everything is allocated when the first GPU window is registered, before a kernel can be in the way. Large and small
//! transfers have streams and slots of their own, so that a small one waits neither for the copies nor for the room of
//! another context's large ones.

use super::app::AppThread;
use super::slots::{Lease, Shape, Slots};
use super::DRAIN_WITHIN;
use crate::error::{Error, Result};
use crate::memory::gpu::{window_number, GPU_BIT};
use crate::memory::registry::Extent;
use crate::sync::RwLock;
use std::sync::Arc;
use std::time::Instant;

/// Small slots of a direction: 512 KiB, more small messages than sockets carry in the time of a copy.
const SMALL_SLOTS: u32 = 64;
/// Small copies that are started together while others are up.
const SMALL_GATHER: usize = 8;
/// Fewest and most large slots of a direction: 8 and 32 MiB.
const LARGE_SLOTS: (u32, u32) = (32, 128);

/// Pinned memory of one rank, its streams, and which GPU memory they may touch.
pub struct Stager {
    windows: RwLock<Vec<Option<Extent>>>,
    /// From the GPU, large and small.
    fetch: [Arc<Slots>; 2],
    /// To the GPU, large and small.
    store: [Arc<Slots>; 2],
}

impl Stager {
    /// Bytes of a large slot: a frame's payload. A copy of this size takes PCIe some 5 to 10 µs, a socket some 50.
    pub const LARGE: u64 = 256 << 10;
    /// Bytes of a small slot: the largest payload of the express connection.
    pub const SMALL: u64 = 8 << 10;

    /// Allocates for `conns` connections with bulk; `own`: in a context of our own. Set-up only.
    pub fn open(rank: u32, app: &Arc<AppThread>, own: bool, conns: u32) -> Result<Self> {
        let large = conns.saturating_mul(2).clamp(LARGE_SLOTS.0, LARGE_SLOTS.1);
        let pair = |inward| {
            let shape = Shape { slot_bytes: Self::LARGE, slots: large, gather: 1, inward };
            let small = Shape { slot_bytes: Self::SMALL, slots: SMALL_SLOTS, gather: SMALL_GATHER, inward };
            Ok([Slots::open(rank, app, own, shape)?, Slots::open(rank, app, own, small)?])
        };
        let this = Self { windows: RwLock::default(), fetch: pair(false)?, store: pair(true)? };
        let mib = (2 * (u64::from(large) * Self::LARGE + u64::from(SMALL_SLOTS) * Self::SMALL)) >> 20;
        log::info!("rank {rank}: {mib} MiB of pinned memory for GPU windows over TCP");
        Ok(this)
    }

    fn slots(&self) -> impl Iterator<Item = &Arc<Slots>> {
        self.fetch.iter().chain(&self.store)
    }

    /// Lets transfers touch a GPU window.
    pub fn add_window(&self, id: u32, extent: Extent) {
        let mut windows = self.windows.write();
        let at = id as usize;
        if windows.len() <= at {
            windows.resize(at + 1, None);
        }
        windows[at] = Some(extent);
    }

    /// Ends that; waits until nothing that was started touches the window any more. `false`: it still does.
    pub fn remove_window(&self, id: u32) -> bool {
        if let Some(slot) = self.windows.write().get_mut(id as usize) {
            *slot = None;
        }
        self.drain()
    }

    /// Waits until everything that was started has landed.
    pub fn drain(&self) -> bool {
        let end = Instant::now() + DRAIN_WITHIN;
        self.slots().filter(|s| !s.drain(end)).count() == 0
    }

    /// Waits until what was queued before has landed, at most until `end`. `false`: it has not.
    pub fn settle(&self, end: Instant) -> bool {
        self.slots().filter(|s| !s.settle(end)).count() == 0
    }

    /// Whether a GPU window holds the range.
    pub fn holds(&self, key: u32, addr: u64, len: u64) -> bool {
        key & GPU_BIT != 0 && holds(&self.windows.read(), key, addr, len)
    }

    /// Starts to bring `len` bytes, at most [`Stager::LARGE`], from a window to a slot. `None`: no slot is free now.
    pub fn fetch(&self, key: u32, addr: u64, len: u64) -> Result<Option<Lease>> {
        let slots = &self.fetch[usize::from(len <= Self::SMALL)];
        // Held until the copy is queued: a window that goes waits for what was queued.
        let windows = self.windows.read();
        if !holds(&windows, key, addr, len) {
            return Err(gone(key, addr, len));
        }
        let Some(mut lease) = slots.take()? else { return Ok(None) };
        slots.copy(&mut lease, addr, len);
        Ok(Some(lease))
    }

    /// Whether a small message of `len` bytes gets no slot yet, with `here` of them here: a peer that stops in the middle of it
    /// holds none, which others need.
    #[inline]
    pub fn gathers(len: usize, here: usize) -> bool {
        len as u64 <= Self::SMALL && here < len
    }

    /// A slot for `len` bytes, at most [`Stager::LARGE`], that will go to GPU memory. `None`: none is free now.
    pub fn slot(&self, len: u64) -> Result<Option<Lease>> {
        self.store[usize::from(len <= Self::SMALL)].take()
    }

    /// Starts to bring the `len` bytes in a slot of [`Stager::slot`] to a window. `false`: the window is gone.
    pub fn store(&self, lease: &mut Lease, key: u32, addr: u64, len: u64) -> bool {
        let slots = &self.store[usize::from(lease.bytes() == Self::SMALL)];
        let windows = self.windows.read();
        let holds = holds(&windows, key, addr, len);
        if holds && len > 0 {
            slots.copy(lease, addr, len);
        }
        holds
    }

    /// Starts what was queued.
    #[inline]
    pub fn launch(&self) {
        self.slots().for_each(|s| s.launch());
    }

    /// The same; returns whether flights are up.
    #[inline]
    pub fn poll(&self) -> bool {
        self.slots().fold(false, |up, s| s.poll() | up)
    }

    /// How many flights have landed, ever.
    #[inline]
    pub fn landed(&self) -> u64 {
        self.slots().map(|s| s.landed()).sum()
    }

    /// Whether a stream has failed.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.slots().any(|s| s.has_failed())
    }

    /// Whether a slot came back that somebody had gone without, since this was last asked.
    #[inline]
    pub fn was_fed(&self) -> bool {
        self.slots().fold(false, |fed, s| s.was_fed() | fed)
    }
}

fn holds(windows: &[Option<Extent>], key: u32, addr: u64, len: u64) -> bool {
    windows.get(window_number(key) as usize).is_some_and(|w| w.is_some_and(|e| e.holds(addr, len)))
}

#[cold]
fn gone(key: u32, addr: u64, len: u64) -> Error {
    Error::usage(format!(
        "{len} bytes at {addr:#x} are not inside GPU window {}, or it was deregistered; deregister after the last \
         operation",
        window_number(key)
    ))
}
