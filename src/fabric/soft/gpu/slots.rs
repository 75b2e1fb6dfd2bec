//! One way between GPU memory and pinned host memory: a stream, and slots of one size that are handed out and come back.
//!
//! Copies gather until [`Slots::launch`] starts them as one *flight*: the copies, then one of the flight's number to a
//! word that the CPU polls. A slot is a [`Lease`]; dropped while its flight is up, it rests until the flight has landed.

use super::app::AppThread;
use super::device::{Device, Load, Way};
use crate::error::{Error, Result};
use crate::memory::gpu::cuda_error;
use crate::sync::Mutex;
use oxygin_ffi::cuda::Copies;
use std::collections::VecDeque;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Copies of one flight at most, and bytes after which it gets no more: lest the first wait for the last to be thought
/// of, and the socket for all of them. 512 KiB take PCIe some 10 µs, starting a flight costs some 5.
const FULL: usize = 32;
const FULL_BYTES: u64 = 512 << 10;
/// Flights up at once: one that runs and one behind it. A flight that is full is started all the same.
const UP: u64 = 2;
/// How long nothing may land before the stream is asked whether it failed.
const ASK_AFTER: Duration = Duration::from_millis(1);

struct State {
    free: Vec<u32>,
    /// Given back before their flight had landed.
    resting: VecDeque<(u64, u32)>,
    copies: Copies,
    /// Bytes of `copies`.
    bytes: u64,
    /// The flag when it was last looked at, and when that was new.
    seen: u64,
    moved: Instant,
    failure: Option<Error>,
}

/// What a stream and its slots are to be.
#[derive(Clone, Copy)]
pub struct Shape {
    pub slot_bytes: u64,
    pub slots: u32,
    /// While a flight is up, the next one is started with so many copies.
    pub gather: usize,
    /// They bring bytes to the GPU, not from it.
    pub inward: bool,
}

/// A stream and its slots.
pub struct Slots {
    rank: u32,
    slot_bytes: u64,
    /// They bring bytes to the GPU, not from it.
    inward: bool,
    /// Copies that a flight needs while another is up: each costs its starter a driver call.
    gather: usize,
    device: ManuallyDrop<Device>,
    state: Mutex<State>,
    /// Number of the last flight that was started.
    started: AtomicU64,
    /// Copies wait for a launch.
    gathering: AtomicBool,
    failed: AtomicBool,
    /// Somebody found no slot.
    wanted: AtomicBool,
    /// And then one came back.
    fed: AtomicBool,
}

impl Slots {
    /// Makes stream and memory. Set-up only: allocations may wait for kernels.
    pub fn open(rank: u32, app: &Arc<AppThread>, own: bool, shape: Shape) -> Result<Arc<Self>> {
        let Shape { slot_bytes, slots, gather, inward } = shape;
        let device = Device::open_with(app, own, 1, slot_bytes * u64::from(slots))
            .map_err(|e| cuda_error("pinned memory for GPU windows over TCP", &e))?;
        Ok(Arc::new(Self {
            rank,
            slot_bytes,
            inward,
            gather,
            device: ManuallyDrop::new(device),
            state: Mutex::new(State {
                free: (0..slots).rev().collect(),
                resting: VecDeque::new(),
                copies: Copies::default(),
                bytes: 0,
                seen: 0,
                moved: Instant::now(),
                failure: None,
            }),
            started: AtomicU64::new(0),
            gathering: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            wanted: AtomicBool::new(false),
            fed: AtomicBool::new(false),
        }))
    }

    /// A slot; `None`: none is free now, and [`Slots::was_fed`] will say when to ask again.
    pub fn take(self: &Arc<Self>) -> Result<Option<Lease>> {
        let mut s = self.state.lock();
        if let Some(why) = &s.failure {
            return Err(why.clone());
        }
        let flag = self.device.flag(Way::Small);
        while s.resting.front().is_some_and(|(flight, _)| *flight <= flag) {
            let back = s.resting.pop_front().map(|(_, slot)| slot);
            s.free.extend(back);
        }
        let slot = s.free.pop();
        if slot.is_none() {
            self.wanted.store(true, Ordering::Release);
        }
        Ok(slot.map(|slot| Lease { slots: self.clone(), slot, flight: 0 }))
    }

    /// Whether a slot came back that somebody had gone without, since this was last asked.
    #[inline]
    pub fn was_fed(&self) -> bool {
        self.fed.load(Ordering::Relaxed) && self.fed.swap(false, Ordering::AcqRel)
    }

    /// Adds a copy to the next flight: `len` bytes between the slot and GPU memory at `gpu`, the way that they go here. The
    /// caller sees to it that `gpu` stays GPU memory until the flight has landed.
    pub fn copy(&self, lease: &mut Lease, gpu: u64, len: u64) {
        debug_assert!(len <= self.slot_bytes);
        let mut s = self.state.lock();
        let slot = self.device.staging(self.offset(lease.slot));
        let (to, from) = if self.inward { (gpu, slot) } else { (slot, gpu) };
        s.copies.push(to, from, len as usize);
        s.bytes += len;
        lease.flight = self.started.load(Ordering::Relaxed) + 1;
        self.gathering.store(true, Ordering::Release);
        if s.copies.len() >= FULL || s.bytes >= FULL_BYTES {
            self.start(&mut s);
        }
    }

    /// Starts what has gathered, if it is worth a flight by now; if not, some later call of [`Slots::poll`] does.
    #[inline]
    pub fn launch(&self) {
        if self.gathering.load(Ordering::Acquire) {
            let mut s = self.state.lock();
            let up = self.started.load(Ordering::Relaxed) - self.device.flag(Way::Small);
            if up == 0 || up < UP && s.copies.len() >= self.gather || s.failure.is_some() {
                self.start(&mut s);
            }
        }
    }

    fn start(&self, s: &mut State) {
        s.bytes = 0;
        if s.copies.is_empty() || s.failure.is_some() {
            self.gathering.store(false, Ordering::Release);
            s.copies.clear();
            return;
        }
        let number = self.started.load(Ordering::Relaxed) + 1;
        if self.device.flag(Way::Small) + 1 == number {
            s.moved = Instant::now();
        }
        // Before the driver has it, which may take its time: nobody who looks meanwhile must find that nothing is up.
        self.started.store(number, Ordering::Release);
        self.gathering.store(false, Ordering::Release);
        let none = Copies::default();
        let (copies, into) = if self.inward { (&none, &s.copies) } else { (&s.copies, &none) };
        // SAFETY: GPU ends are checked windows, which wait for flights before they go (`drain`); slots come back only
        // after their flight.
        let result = unsafe { self.device.launch(Way::Small, number, Load { copies, into, ops: &mut [] }) };
        s.copies.clear();
        if let Err(e) = result {
            self.fail(s, cuda_error(&format!("a transfer on the GPU of rank {}", self.rank), &e));
        }
    }

    #[cold]
    fn fail(&self, s: &mut State, why: Error) {
        s.failure.get_or_insert(why);
        self.failed.store(true, Ordering::Release);
    }

    /// How many flights have landed, ever.
    #[inline]
    pub fn landed(&self) -> u64 {
        self.device.flag(Way::Small)
    }

    /// Whether the stream has failed.
    #[inline]
    pub fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    /// Whether flights are up, or gather. Asks the stream for an error if they have been for long.
    #[inline]
    pub fn poll(&self) -> bool {
        self.launch();
        // First: whoever ends it has counted the flight before.
        let gathering = self.gathering.load(Ordering::Acquire);
        let flag = self.device.flag(Way::Small);
        if self.failed.load(Ordering::Acquire) {
            return false;
        }
        if self.started.load(Ordering::Acquire) == flag {
            // The flight that they waited for may have landed just now.
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

    /// Waits until what was queued before has landed, whatever others queue meanwhile, at most until `end`. `false`: it
    /// has not.
    pub fn settle(&self, end: Instant) -> bool {
        let last = {
            let s = self.state.lock();
            self.started.load(Ordering::Relaxed) + u64::from(!s.copies.is_empty())
        };
        while self.device.flag(Way::Small) < last {
            if !self.poll() && self.has_failed() || Instant::now() > end {
                return false;
            }
            std::thread::yield_now();
        }
        true
    }

    /// Waits until everything that was started has landed, at most until `end`. `false`: it has not.
    pub fn drain(&self, end: Instant) -> bool {
        while self.poll() {
            if Instant::now() > end {
                return false;
            }
            std::thread::yield_now();
        }
        !self.failed.load(Ordering::Acquire)
    }

    fn offset(&self, slot: u32) -> u64 {
        u64::from(slot) * self.slot_bytes
    }
}

impl Drop for Slots {
    fn drop(&mut self) {
        // Whoever closes has drained; after an error the GPU may still write what was started before it.
        let idle = !self.failed.load(Ordering::Acquire)
            && self.started.load(Ordering::Acquire) == self.device.flag(Way::Small);
        // SAFETY: taken once, here.
        unsafe { ManuallyDrop::take(&mut self.device) }.close(idle);
    }
}

/// A slot, for as long as this lives.
pub struct Lease {
    slots: Arc<Slots>,
    slot: u32,
    /// The flight that its bytes go with; 0: none yet.
    flight: u64,
}

impl Lease {
    /// Where the CPU sees it.
    pub fn host(&self) -> *mut u8 {
        self.slots.device.staging_host(self.slots.offset(self.slot))
    }

    /// Bytes that it holds.
    pub fn bytes(&self) -> u64 {
        self.slots.slot_bytes
    }

    /// Whether its copy is done.
    #[inline]
    pub fn has_landed(&self) -> Result<bool> {
        if self.flight <= self.slots.device.flag(Way::Small) {
            return Ok(true);
        }
        if self.slots.failed.load(Ordering::Acquire) {
            if let Some(why) = &self.slots.state.lock().failure {
                return Err(why.clone());
            }
        }
        Ok(false)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut s = self.slots.state.lock();
        if self.flight <= self.slots.device.flag(Way::Small) {
            s.free.push(self.slot);
        } else {
            s.resting.push_back((self.flight, self.slot));
        }
        if self.slots.wanted.load(Ordering::Relaxed) && self.slots.wanted.swap(false, Ordering::AcqRel) {
            self.slots.fed.store(true, Ordering::Release);
        }
    }
}
