//! One way between GPU memory and pinned host memory: a stream, and buffers of one size that are handed out and come
//! back.
//!
//! Copies gather until [`PinnedPool::launch`] starts them as one *submission*: the copies, then one of the submission's
//! number to a word that the CPU polls. A buffer is a [`PinnedBuffer`]; dropped while its submission is in flight, it
//! rests until the submission is done.

use super::app::AppThread;
use super::arrived_bytes::PinnedPlace;
use super::copy_out::CopyOut;
use super::device::{CopyWay, Device, Load, Streams};
use crate::error::{Error, Result};
use crate::fabric::soft::lane::Lane;
use crate::memory::gpu::cuda_error;
use crate::sys::sync::Mutex;
use crate::sys::wait::until;
use oxygin_ffi::cuda::Copies;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Copies of one submission at most, and bytes after which it gets no more: lest the first wait for the last to be
/// thought of, and the socket for all of them. 512 KiB take PCIe some 10 µs, starting a submission costs some 5.
const FULL: usize = 32;
const FULL_BYTES: u64 = 512 << 10;
/// Submissions in flight at once: one that runs and one behind it. A submission that is full is started all the same.
const UP: u64 = 2;
/// How long nothing may be done before the stream is asked whether it failed.
const ASK_AFTER: Duration = Duration::from_millis(1);

struct PoolState {
    free: Vec<u32>,
    /// Given back before their submission was done.
    resting: VecDeque<(u64, u32)>,
    /// The same of those that the engine fills.
    resting_out: Vec<(CopyOut, u32)>,
    /// Of each buffer the lane on which the engine filled it last.
    lanes: Vec<Option<Arc<Lane>>>,
    copies: Copies,
    /// Bytes of `copies`.
    bytes: u64,
    /// The flag when it was last looked at, and when that was new.
    seen: u64,
    moved: Instant,
    failure: Option<Error>,
}

/// What a stream and its buffers are to be.
#[derive(Clone, Copy)]
pub struct Shape {
    pub buffer_bytes: u64,
    pub buffers: u32,
    /// While a submission is in flight, the next one is started with so many copies.
    pub gather: usize,
    /// They bring bytes to the GPU, not from it.
    pub inward: bool,
}

/// A stream and its buffers.
pub struct PinnedPool {
    rank: u32,
    buffer_bytes: u64,
    /// They bring bytes to the GPU, not from it.
    inward: bool,
    /// Copies that a submission needs while another is in flight: each costs its starter a driver call.
    gather: usize,
    device: ManuallyDrop<Device>,
    state: Mutex<PoolState>,
    /// Number of the last submission that was started.
    started: AtomicU64,
    /// Copies wait for a launch.
    gathering: AtomicBool,
    failed: AtomicBool,
    /// Some pool of the rank has failed, and none of them has a copy under way any more: shared by all.
    is_over: Arc<AtomicBool>,
    /// The GPU may be at a buffer that was given up, or whose copy by the engine has failed.
    is_abandoned: Arc<AtomicBool>,
    /// Somebody found no buffer.
    wanted: AtomicBool,
    /// And then one came back.
    fed: AtomicBool,
}

impl PinnedPool {
    /// Makes stream and memory. Set-up only: allocations may wait for kernels.
    pub fn open(
        rank: u32,
        app: &Arc<AppThread>,
        own: bool,
        shape: Shape,
        is_over: &Arc<AtomicBool>,
    ) -> Result<Arc<Self>> {
        let Shape { buffer_bytes, buffers, gather, inward } = shape;
        let device = Device::open_with(app, own, Streams { ways: 1, near: false }, buffer_bytes * u64::from(buffers))
            .map_err(|e| cuda_error("pinned memory for GPU windows over TCP", &e))?;
        Ok(Arc::new(Self {
            rank,
            buffer_bytes,
            inward,
            gather,
            device: ManuallyDrop::new(device),
            state: Mutex::new(PoolState {
                free: (0..buffers).rev().collect(),
                resting: VecDeque::new(),
                resting_out: Vec::new(),
                lanes: (0..buffers).map(|_| None).collect(),
                copies: Copies::default(),
                bytes: 0,
                seen: 0,
                moved: Instant::now(),
                failure: None,
            }),
            started: AtomicU64::new(0),
            gathering: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            is_over: is_over.clone(),
            is_abandoned: Arc::default(),
            wanted: AtomicBool::new(false),
            fed: AtomicBool::new(false),
        }))
    }

    /// A buffer; `None`: none is free now, and [`PinnedPool::was_fed`] will say when to ask again.
    pub fn take(self: &Arc<Self>) -> Result<Option<PinnedBuffer>> {
        self.take_if(|_, _| true)
    }

    /// A buffer that is kept for as long as a peer likes: as [`PinnedPool::take`] while more than half of all are free.
    pub fn take_for_long(self: &Arc<Self>) -> Result<Option<PinnedBuffer>> {
        self.take_if(|free, all| free > all / 2)
    }

    fn take_if(self: &Arc<Self>, may: impl Fn(usize, usize) -> bool) -> Result<Option<PinnedBuffer>> {
        let mut s = self.state.lock();
        if let Some(why) = &s.failure {
            return Err(why.clone());
        }
        let flag = self.device.flag(CopyWay::Small);
        while s.resting.front().is_some_and(|(submission, _)| *submission <= flag) {
            let back = s.resting.pop_front().map(|(_, buffer)| buffer);
            s.free.extend(back);
        }
        let PoolState { free, resting_out, .. } = &mut *s;
        resting_out.retain(|(copy, buffer)| {
            let rests = copy.writes();
            if !rests && !self.is_lost(copy) {
                free.push(*buffer);
            }
            rests
        });
        let may = may(s.free.len(), s.lanes.len());
        let Some(index) = may.then(|| s.free.pop()).flatten() else {
            self.wanted.store(true, Ordering::Release);
            return Ok(None);
        };
        let lane = s.lanes[index as usize].take();
        Ok(Some(PinnedBuffer { pool: self.clone(), index, submission: 0, lane, by_engine: None }))
    }

    /// Whether a buffer came back that somebody had gone without, since this was last asked.
    #[inline]
    pub fn was_fed(&self) -> bool {
        self.fed.load(Ordering::Relaxed) && self.fed.swap(false, Ordering::AcqRel)
    }

    /// Whether the GPU may still write what this copy was to bring, although it has failed: nobody gets its buffer.
    fn is_lost(&self, copy: &CopyOut) -> bool {
        copy.is_done().is_err() && self.is_abandoned.load(Ordering::Acquire)
    }

    /// Whether the engine still fills buffers that were given up.
    pub fn is_filled_in_vain(&self) -> bool {
        self.state.lock().resting_out.iter().any(|(copy, _)| copy.writes())
    }

    /// Adds a copy to the next submission: `len` bytes between the buffer and GPU memory at `gpu`, the way that they go
    /// here. The caller sees to it that `gpu` stays GPU memory until the submission is done.
    pub fn copy(&self, buffer: &mut PinnedBuffer, gpu: u64, len: u64) {
        debug_assert!(len <= self.buffer_bytes);
        let mut s = self.state.lock();
        let pinned = self.device.staging(self.offset(buffer.index));
        let (to, from) = if self.inward { (gpu, pinned) } else { (pinned, gpu) };
        s.copies.push(to, from, len as usize);
        s.bytes += len;
        buffer.submission = self.started.load(Ordering::Relaxed) + 1;
        self.gathering.store(true, Ordering::Release);
        if s.copies.len() >= FULL || s.bytes >= FULL_BYTES {
            self.start(&mut s);
        }
    }

    /// Starts what has gathered, if it is worth a submission by now; if not, some later call of [`PinnedPool::poll`]
    /// does.
    #[inline]
    pub fn launch(&self) {
        if self.gathering.load(Ordering::Acquire) {
            let mut s = self.state.lock();
            let up = self.started.load(Ordering::Relaxed) - self.device.flag(CopyWay::Small);
            if up == 0 || up < UP && s.copies.len() >= self.gather || s.failure.is_some() {
                self.start(&mut s);
            }
        }
    }

    fn start(&self, s: &mut PoolState) {
        s.bytes = 0;
        if s.copies.is_empty() || s.failure.is_some() {
            self.gathering.store(false, Ordering::Release);
            s.copies.clear();
            return;
        }
        let number = self.started.load(Ordering::Relaxed) + 1;
        if self.device.flag(CopyWay::Small) + 1 == number {
            s.moved = Instant::now();
        }
        // Before the driver has it, which may take its time: nobody who looks meanwhile must find that nothing is in
        // flight.
        self.started.store(number, Ordering::Release);
        self.gathering.store(false, Ordering::Release);
        let none = Copies::default();
        let (copies, into) = if self.inward { (&none, &s.copies) } else { (&s.copies, &none) };
        // SAFETY: GPU ends are checked windows, which wait for submissions before they go (`settle`); buffers come back
        // only after their submission.
        let result =
            unsafe { self.device.launch(CopyWay::Small, number, Load { copies, near: None, into, ops: &mut [] }) };
        s.copies.clear();
        if let Err(e) = result {
            self.fail(s, cuda_error(&format!("a transfer on the GPU of rank {}", self.rank), &e));
        }
    }

    #[cold]
    fn fail(&self, s: &mut PoolState, why: Error) {
        s.failure.get_or_insert(why);
        self.failed.store(true, Ordering::Release);
    }

    /// How many submissions were ever done.
    #[inline]
    pub fn landed(&self) -> u64 {
        self.device.flag(CopyWay::Small)
    }

    /// Whether the stream has failed.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Why nothing is copied any more, if that is so.
    pub fn failure(&self) -> Option<Error> {
        self.state.lock().failure.clone()
    }

    /// Begins nothing more. Whether nothing that was begun is under way any more: copies go on in their own context
    /// where the driver has refused a call, or the application's context alone has failed.
    #[cold]
    pub fn ends(&self, why: &Error) -> bool {
        // Held while one is begun.
        let mut s = self.state.lock();
        self.fail(&mut s, why.clone());
        self.device.is_idle()
    }

    /// Whether submissions are in flight, or gather. Asks the stream for an error if they have been for long.
    #[inline]
    pub fn poll(&self) -> bool {
        self.launch();
        // First: whoever ends it has counted the submission before.
        let gathering = self.gathering.load(Ordering::Acquire);
        let flag = self.device.flag(CopyWay::Small);
        if self.failed.load(Ordering::Acquire) {
            return false;
        }
        if self.started.load(Ordering::Acquire) == flag {
            // The submission that they waited for may are done just now.
            return gathering;
        }
        if let Some(mut s) = self.state.try_lock() {
            if s.seen != flag {
                (s.seen, s.moved) = (flag, Instant::now());
            } else if s.moved.elapsed() > ASK_AFTER {
                s.moved = Instant::now();
                if let Err(e) = self.device.check() {
                    self.fail(&mut s, cuda_error(&format!("the GPU of rank {} has failed", self.rank), &e));
                }
            }
        }
        true
    }

    /// What was queued by now.
    pub fn mark(&self) -> u64 {
        let s = self.state.lock();
        self.started.load(Ordering::Relaxed) + u64::from(!s.copies.is_empty())
    }

    /// Whether that has landed.
    pub fn has_landed(&self, mark: u64) -> bool {
        self.device.flag(CopyWay::Small) >= mark
    }

    /// Waits until everything that was started is done, at most until `end`. `false`: it has not.
    pub fn drain(&self, end: Instant) -> bool {
        until(end, || !self.poll()) && !self.failed.load(Ordering::Acquire)
    }

    fn offset(&self, buffer: u32) -> u64 {
        u64::from(buffer) * self.buffer_bytes
    }
}

impl Drop for PinnedPool {
    fn drop(&mut self) {
        // Whoever closes has drained; after an error the GPU may still write what was started before it.
        let idle = !self.failed.load(Ordering::Acquire)
            && !self.is_abandoned.load(Ordering::Acquire)
            && self.started.load(Ordering::Acquire) == self.device.flag(CopyWay::Small)
            && !self.is_filled_in_vain();
        // SAFETY: taken once, here.
        unsafe { ManuallyDrop::take(&mut self.device) }.close(idle);
    }
}

/// A buffer, for as long as this lives.
pub struct PinnedBuffer {
    pool: Arc<PinnedPool>,
    index: u32,
    /// The submission that its bytes go with; 0: none yet.
    submission: u64,
    /// The lane on which the engine filled it last.
    lane: Option<Arc<Lane>>,
    /// The engine fills it.
    by_engine: Option<CopyOut>,
}

impl PinnedBuffer {
    /// Where the CPU sees it.
    pub fn host(&self) -> *mut u8 {
        self.pool.device.staging_host(self.pool.offset(self.index))
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> u64 {
        self.pool.buffer_bytes
    }

    /// Where the GPU finds it.
    pub fn on_gpu(&self) -> u64 {
        self.pool.device.staging(self.pool.offset(self.index))
    }

    /// The engine fills it from here on: `start` is given the lane of the copy before, if there is one, and where the
    /// CPU and the GPU find the buffer.
    pub fn fill(&mut self, start: impl FnOnce(Option<Arc<Lane>>, *mut u8, PinnedPlace) -> CopyOut) {
        let place = PinnedPlace { at: self.on_gpu(), is_abandoned: self.pool.is_abandoned.clone() };
        self.by_engine = Some(start(self.lane.take(), self.host(), place));
    }

    /// Gives it up although the GPU may still be at it: nobody gets it again, and its memory is left to the process.
    pub fn abandon(self) {
        self.pool.is_abandoned.store(true, Ordering::Release);
        let mut this = ManuallyDrop::new(self);
        drop((this.lane.take(), this.by_engine.take()));
        // SAFETY: taken once, as `this` is never dropped.
        drop(unsafe { std::ptr::read(&this.pool) });
    }

    /// Whether its copy is done; an error: it never will be, and nothing is copied for anybody any more.
    #[inline]
    pub fn has_landed(&self) -> Result<bool> {
        if let Some(copy) = &self.by_engine {
            return copy.is_done();
        }
        if self.submission <= self.pool.device.flag(CopyWay::Small) {
            return Ok(true);
        }
        if self.pool.is_over.load(Ordering::Acquire) && self.submission > self.pool.device.flag(CopyWay::Small) {
            if let Some(why) = &self.pool.state.lock().failure {
                return Err(why.clone());
            }
        }
        Ok(false)
    }
}

impl Drop for PinnedBuffer {
    fn drop(&mut self) {
        let mut s = self.pool.state.lock();
        match self.by_engine.take() {
            Some(copy) if copy.writes() => s.resting_out.push((copy, self.index)),
            Some(copy) if self.pool.is_lost(&copy) => {}
            copy if self.submission <= self.pool.device.flag(CopyWay::Small) => {
                s.lanes[self.index as usize] = copy.map_or_else(|| self.lane.take(), CopyOut::into_lane);
                s.free.push(self.index);
            }
            _ => s.resting.push_back((self.submission, self.index)),
        }
        if self.pool.wanted.load(Ordering::Relaxed) && self.pool.wanted.swap(false, Ordering::AcqRel) {
            self.pool.fed.store(true, Ordering::Release);
        }
    }
}
