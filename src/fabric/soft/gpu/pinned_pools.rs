//! GPU memory on its way to and from sockets: pinned buffers with a stream for each direction, and for large and small.
//!
//! Everything is allocated when the first GPU window is registered, before a kernel can be in the way. Large and small
//! transfers have streams and buffers of their own, so that a small one waits neither for the copies nor for the room
//! of another context's large ones.

use super::app::AppThread;
use super::copy_out::CopyOut;
use super::pinned_pool::{PinnedBuffer, PinnedPool, Shape};
use super::standing::StandingWait;
use super::{Engine, TransferEnd};
use crate::error::{Error, Kind, Result};
use crate::memory::key::Key;
use crate::memory::registry::Extent;
use crate::memory::table::Table;
use crate::sys::sync::{Mutex, RwLock};
use crate::sys::wait::until;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Small buffers of a direction: 2 MiB, more small messages than sockets carry in the time of a copy.
const SMALL_BUFFERS: u32 = 128;
/// Small copies that are started together while others are in flight.
const SMALL_GATHER: usize = 8;
/// Fewest and most large buffers of a direction: 8 and 32 MiB.
const LARGE_BUFFERS: (u32, u32) = (32, 128);

/// Pinned memory of one rank, its streams, and which GPU memory they may touch.
pub struct PinnedPools {
    windows: RwLock<Table<Extent>>,
    /// From the GPU, large and small.
    fetch: [Arc<PinnedPool>; 2],
    /// To the GPU, large and small.
    store: [Arc<PinnedPool>; 2],
    /// Of those who wait for what is in flight because something goes.
    standing: Mutex<StandingWait>,
    /// One has failed, and nothing is copied for anybody any more.
    is_over: Arc<AtomicBool>,
}

impl PinnedPools {
    /// Bytes of a large buffer: a frame's payload. A copy of this size takes PCIe some 5 to 10 µs, a socket some 50.
    pub const LARGE: u64 = 256 << 10;
    /// Bytes of a small buffer: the largest payload of the express connection.
    pub const SMALL: u64 = 16 << 10;

    /// Allocates for `conns` connections with bulk; `own`: in a private context. Set-up only.
    pub fn open(rank: u32, app: &Arc<AppThread>, own: bool, conns: u32) -> Result<Self> {
        let large = conns.saturating_mul(2).clamp(LARGE_BUFFERS.0, LARGE_BUFFERS.1);
        let is_over = Arc::default();
        let pair = |inward| -> Result<_> {
            let shape = Shape { buffer_bytes: Self::LARGE, buffers: large, gather: 1, inward };
            let small = Shape { buffer_bytes: Self::SMALL, buffers: SMALL_BUFFERS, gather: SMALL_GATHER, inward };
            let open = |shape| PinnedPool::open(rank, app, own, shape, &is_over);
            Ok([open(shape)?, open(small)?])
        };
        let [fetch, store] = [pair(false)?, pair(true)?];
        let this = Self { windows: RwLock::default(), fetch, store, standing: Mutex::default(), is_over };
        let mib = (2 * (u64::from(large) * Self::LARGE + u64::from(SMALL_BUFFERS) * Self::SMALL)) >> 20;
        log::info!("rank {rank}: {mib} MiB of pinned memory for GPU windows over TCP");
        Ok(this)
    }

    fn pools(&self) -> impl Iterator<Item = &Arc<PinnedPool>> {
        self.fetch.iter().chain(&self.store)
    }

    /// Lets transfers touch a GPU window.
    pub fn add_window(&self, id: u32, extent: Extent) {
        self.windows.write().insert(id, extent);
    }

    /// Ends that; waits until nothing that was started touches the window any more, whatever others start meanwhile.
    /// `false`: it still may, after that time.
    pub fn remove_window(&self, id: u32, within: Duration) -> bool {
        // Copies are queued under this lock.
        self.windows.write().remove(id);
        self.settle(Instant::now() + within)
    }

    /// Waits until everything that was started is done. `false`: it has not, or the GPU has failed.
    pub fn drain(&self, within: Duration) -> bool {
        let end = Instant::now() + within;
        self.pools().filter(|s| !s.drain(end)).count() == 0
    }

    /// Whether the engine still fills buffers that were given up.
    pub fn is_filled_in_vain(&self) -> bool {
        self.fetch.iter().any(|s| s.is_filled_in_vain())
    }

    /// Waits until what was queued before is done, at most until `end`. `false`: it has not.
    pub fn settle(&self, end: Instant) -> bool {
        let (end, mark) = (self.wait_by(end), self.mark());
        let has_passed = || {
            let passed = self.has_passed(&mark);
            if !passed {
                self.poll();
            }
            passed
        };
        if !until(end, has_passed) {
            return false;
        }
        self.standing.lock().over();
        self.have_landed(&mark)
    }

    /// Until when somebody who goes waits for copies in flight, with time until `end`: earlier where they stand, and
    /// others have waited for that.
    pub fn wait_by(&self, end: Instant) -> Instant {
        let mut standing = self.standing.lock();
        if !self.has_passed(&self.mark()) {
            return standing.end(end, self.landed());
        }
        standing.over();
        end
    }

    /// What was queued by now.
    pub fn mark(&self) -> Vec<u64> {
        self.pools().map(|s| s.mark()).collect()
    }

    /// Whether that has landed, or never will: nothing of it touches memory any more.
    pub fn has_passed(&self, mark: &[u64]) -> bool {
        self.is_over() || self.have_landed(mark)
    }

    fn have_landed(&self, mark: &[u64]) -> bool {
        self.pools().zip(mark).all(|(s, &mark)| s.has_landed(mark))
    }

    /// Whether a stream has failed, and nothing is copied any more.
    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Acquire)
    }

    /// Nothing more is begun. Whether nothing that was begun is under way any more.
    #[cold]
    pub fn ends(&self, why: &Error) -> bool {
        if !self.is_over() && self.pools().fold(true, |is_idle, s| s.ends(why) & is_idle) {
            self.is_over.store(true, Ordering::Release);
        }
        self.is_over()
    }

    /// Whether a GPU window holds the range.
    pub fn holds(&self, key: u32, addr: u64, len: u64) -> bool {
        Key(key).is_on_gpu() && holds(&self.windows.read(), key, addr, len)
    }

    /// Starts to bring `len` bytes, at most [`PinnedPools::LARGE`], from a window to a buffer. `None`: no buffer is
    /// free now.
    pub fn fetch(&self, key: u32, addr: u64, len: u64) -> Result<Option<PinnedBuffer>> {
        let pool = &self.fetch[usize::from(len <= Self::SMALL)];
        // Held until the copy is queued: a window that goes waits for what was queued.
        let windows = self.windows.read();
        if !holds(&windows, key, addr, len) {
            return Err(gone(key, addr, len));
        }
        let Some(mut buffer) = pool.take()? else { return Ok(None) };
        pool.copy(&mut buffer, addr, len);
        Ok(Some(buffer))
    }

    /// The same by the engine, of at most [`PinnedPools::SMALL`] bytes. Counted in `backlog` until it is over.
    pub fn fetch_by(
        &self,
        engine: &Engine,
        backlog: &Arc<AtomicUsize>,
        key: u32,
        addr: u64,
        len: u64,
    ) -> Result<Option<PinnedBuffer>> {
        if !self.holds(key, addr, len) {
            return Err(gone(key, addr, len));
        }
        let Some(mut buffer) = self.fetch[1].take()? else { return Ok(None) };
        backlog.fetch_add(1, Ordering::AcqRel);
        let from = TransferEnd::Window { key, addr };
        buffer.fill(|lane, to, place| {
            let lane = lane.unwrap_or_else(|| CopyOut::lane(engine, Arc::default()));
            CopyOut::start(engine, lane, from, to, Some(place), len, backlog.clone())
        });
        Ok(Some(buffer))
    }

    /// Whether a small message of `len` bytes gets no buffer yet, with `here` of them here: a peer that stops in the
    /// middle of it holds none, which others need.
    #[inline]
    pub fn gathers(len: usize, here: usize) -> bool {
        len as u64 <= Self::SMALL && here < len
    }

    /// A buffer for `len` bytes, at most [`PinnedPools::LARGE`], that will go to GPU memory. `None`: none is free now.
    pub fn buffer(&self, len: u64) -> Result<Option<PinnedBuffer>> {
        self.store[usize::from(len <= Self::SMALL)].take()
    }

    /// A small one for what a peer answers when it likes: others that wait for less find some.
    pub fn buffer_for_long(&self) -> Result<Option<PinnedBuffer>> {
        self.store[1].take_for_long()
    }

    /// Starts to bring the `len` bytes in a buffer of [`PinnedPools::buffer`] to a window. `false`: the window is gone.
    pub fn store(&self, buffer: &mut PinnedBuffer, key: u32, addr: u64, len: u64) -> bool {
        let pool = &self.store[usize::from(buffer.bytes() == Self::SMALL)];
        let windows = self.windows.read();
        let holds = holds(&windows, key, addr, len);
        if holds && len > 0 {
            pool.copy(buffer, addr, len);
        }
        holds
    }

    /// Starts what was queued.
    #[inline]
    pub fn launch(&self) {
        self.pools().for_each(|s| s.launch());
    }

    /// The same; returns whether submissions are in flight.
    #[inline]
    pub fn poll(&self) -> bool {
        let up = self.pools().fold(false, |up, s| s.poll() | up);
        if !self.has_failed() || self.is_over() {
            return up;
        }
        self.pools().find_map(|s| s.failure()).is_some_and(|why| !self.ends(&why))
    }

    /// How many submissions were ever done.
    #[inline]
    pub fn landed(&self) -> u64 {
        self.pools().map(|s| s.landed()).sum()
    }

    /// Whether a stream has failed.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.pools().any(|s| s.has_failed())
    }

    /// Whether a buffer came back that somebody had gone without, since this was last asked.
    #[inline]
    pub fn was_fed(&self) -> bool {
        self.pools().fold(false, |fed, s| s.was_fed() | fed)
    }
}

fn holds(windows: &Table<Extent>, key: u32, addr: u64, len: u64) -> bool {
    windows.get(Key(key).number()).is_some_and(|e| e.holds(addr, len))
}

#[cold]
fn gone(key: u32, addr: u64, len: u64) -> Error {
    Error::usage(format!(
        "{len} bytes at {addr:#x} are not inside GPU window {}, or it was deregistered; deregister after the last \
         operation",
        Key(key).number()
    ))
    .of_kind(Kind::LocalProtection)
}
