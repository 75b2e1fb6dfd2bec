//! What is queued and what is up.

use super::batch::{add_large, Batch, Step};
use super::courier::Courier;
use super::device::{Device, Load, Way, STAGING_BYTES};
use super::launch::STORES_BY_COPY;
use super::op::{Op, Owner, Side};
use super::parked::{Copy, Parked};
use super::staging::Staging;
use super::tally::Tally;
use super::track::{Flight, Outward, Track};
use super::tuning::Tuning;
use crate::error::Error;
use crate::fabric::soft::lane::Lane;
use crate::memory::gpu::{cuda_error, window_number};
use crate::memory::registry::{Extent, Registry};
use oxygin_ffi::cuda::Copies;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Flights of large copies that are up at once: one that runs and one behind it.
const BULK_FLIGHTS: usize = 2;
/// Bytes after which a flight of large copies is full: about 50 µs at the speed of NVLink.
const BULK_BYTES: u64 = 16 << 20;
/// From here on a copy within the GPU is left to its processors, on the stream for large ones: it waits 2.4 ms for their
/// time slice, and by way of host memory it takes about as long.
const NEAR_BULK: u64 = 32 << 20;
/// An operation of so many bytes does not wait for others to gather.
const LARGE: u64 = 64 << 10;
/// Polls without news between two looks at the clock.
const LOOK_EVERY: u32 = 64;
/// Flights' lists that are kept for the next ones.
const SPARES: usize = 4;
/// How long the flag may stay down before the stream is asked whether it failed.
const ASK_AFTER: Duration = Duration::from_millis(1);

/// A GPU window.
pub struct GpuWindow {
    extent: Extent,
    never_reset: bool,
    /// Values of its signals by word, as far as they were ever signalled.
    sums: Vec<u64>,
}

/// This rank's GPU windows by number.
#[derive(Default)]
pub struct Windows(Vec<Option<GpuWindow>>);

impl Windows {
    /// Adds one.
    pub fn insert(&mut self, id: u32, extent: Extent, never_reset: bool) {
        let at = id as usize;
        if self.0.len() <= at {
            self.0.resize_with(at + 1, || None);
        }
        self.0[at] = Some(GpuWindow { extent, never_reset, sums: Vec::new() });
    }

    /// Removes it.
    pub fn remove(&mut self, id: u32) {
        if let Some(slot) = self.0.get_mut(id as usize) {
            *slot = None;
        }
    }

    fn find(&mut self, key: u32, addr: u64, len: u64) -> Option<&mut GpuWindow> {
        self.0.get_mut(window_number(key) as usize)?.as_mut().filter(|w| w.extent.holds(addr, len))
    }

    /// Whether a GPU window holds the range.
    pub fn holds(&mut self, key: u32, addr: u64, len: u64) -> bool {
        self.find(key, addr, len).is_some()
    }

    /// Adds to a signal whose value only this rank's engine changes and returns the sum; `Err(true)`: kernels may reset
    /// it, its value is in GPU memory alone; `Err(false)`: it is in no window.
    pub fn add(&mut self, key: u32, addr: u64, value: u64) -> Result<u64, bool> {
        let window = self.find(key, addr, 8).filter(|_| addr % 8 == 0).ok_or(false)?;
        if !window.never_reset {
            return Err(true);
        }
        let at = ((addr - window.extent.base) / 8) as usize;
        if window.sums.len() <= at {
            window.sums.resize(at + 1, 0);
        }
        window.sums[at] = window.sums[at].wrapping_add(value);
        Ok(window.sums[at])
    }
}

/// All of it.
pub struct State {
    pub tuning: Tuning,
    /// Once there is a GPU window.
    pub device: Option<Device>,
    /// Where it could be loaded and is wanted.
    pub courier: Option<Courier>,
    /// Operations in a row that the courier could have carried and the stream did.
    pub streak: u32,
    /// When the last flight of such operations started.
    pub last_light: Option<Instant>,
    pub windows: Windows,
    /// So many flights more store by copies.
    pub store_by_copy: u32,
    pub queue: VecDeque<Op>,
    pub parked: Parked,
    pub staging: Staging,
    /// Everything but:
    pub small: Track,
    /// Large copies.
    pub bulk: Track,
    /// Operations that are back from the courier, done or not.
    pub back: u64,
    /// Lanes of contexts that go while something of them is in flight.
    pub leaving: Vec<Arc<Lane>>,
    /// The last flight with bytes for host memory.
    pub outward: u64,
    /// How often something has landed.
    pub landings: u64,
    /// Polls since something moved, and when that was first looked at.
    quiet: u32,
    since: Option<Instant>,
    batch: Batch,
    pub spare: Vec<Flight>,
    pub tally: Tally,
    /// Why nothing works any more.
    pub failure: Option<Error>,
}

impl State {
    /// Nothing.
    pub fn new(tuning: Tuning) -> Self {
        Self {
            tuning,
            device: None,
            courier: None,
            streak: 0,
            last_light: None,
            windows: Windows::default(),
            store_by_copy: 0,
            queue: VecDeque::new(),
            parked: Parked::default(),
            staging: Staging::new(STAGING_BYTES),
            small: Track::default(),
            bulk: Track::default(),
            back: 0,
            leaving: Vec::new(),
            outward: 0,
            landings: 0,
            quiet: 0,
            since: None,
            batch: Batch::default(),
            spare: Vec::new(),
            tally: Tally::default(),
            failure: None,
        }
    }

    /// Drops what waits on a lane.
    pub fn forget(&mut self, lane: &Arc<Lane>) {
        for _ in 0..self.queue.len() {
            match self.queue.pop_front() {
                Some(op) if Arc::ptr_eq(&op.owner.lane, lane) => op.owner.give_up(),
                Some(op) => self.queue.push_back(op),
                None => break,
            }
        }
        let gone = self.parked.remove(|op| Arc::ptr_eq(&op.owner.lane, lane));
        gone.into_iter().for_each(|op| op.owner.give_up());
    }

    /// Whether anything is up.
    pub fn has_flights(&self) -> bool {
        !self.small.is_empty() || !self.bulk.is_empty() || self.courier.as_ref().is_some_and(Courier::is_busy)
    }

    /// Whether anything is unfinished.
    pub fn has_work(&self) -> bool {
        self.has_flights() || !self.queue.is_empty() || !self.parked.is_empty()
    }

    /// Whether the GPU may still read or write what operations named: flights that are up, and after a refused call
    /// whatever was started before the refusal.
    pub fn is_touching_memory(&self) -> bool {
        self.has_flights() || self.failure.is_some() && !self.is_idle()
    }

    /// Whether nothing that was started can still touch memory, as far as the driver knows.
    fn is_idle(&self) -> bool {
        self.device.as_ref().is_none_or(Device::is_idle) && self.courier.as_ref().is_none_or(Courier::is_idle)
    }

    /// Starts what can start and completes what is done. Returns whether something is under way.
    pub fn advance(&mut self, rank: u32, registry: &Registry) -> bool {
        let mut moved = self.land(registry);
        if let Some(failure) = self.failure.clone() {
            self.fail(failure);
        } else {
            moved |= self.carry();
            while self.may_start() && self.start(rank, registry) {
                moved = true;
            }
            if !self.parked.is_empty() {
                moved |= self.start_bulk(rank, registry);
            }
        }
        if !moved && self.has_work() {
            self.check(rank);
        }
        // What is queued and waits for the courier alone is under way, too.
        moved || self.has_flights() || !self.queue.is_empty()
    }

    /// Whether a flight is worth its cost now. While one is up operations gather, but for those that cost the driver
    /// little (no copy) or the GPU much.
    fn may_start(&mut self) -> bool {
        if self.courier_has_turn() {
            return false;
        }
        let up = self.small.flights.len();
        match self.queue.front() {
            None => false,
            Some(_) if up == 0 => true,
            Some(op) => {
                let left = op.len - op.done;
                let has_no_copy = left == 0 || left <= 8 && !op.from.is_on_gpu();
                up < self.tuning.flights && (self.queue.len() >= self.tuning.gather || left >= LARGE || has_no_copy)
            }
        }
    }

    /// Completes flights that are done. Returns whether there were any.
    pub fn land(&mut self, registry: &Registry) -> bool {
        let mut moved = self.land_carried();
        let Some(device) = &self.device else { return false };
        if !self.small.is_empty() {
            let flag = device.flag(Way::Small);
            while let Some(mut flight) = self.small.land(flag) {
                for bytes in flight.outward.drain(..) {
                    deliver(device, registry, &bytes);
                }
                flight.finished.drain(..).for_each(Owner::complete);
                self.staging.give_back(flight.staged);
                if flight.stores.take().is_some_and(|s| s.are_late()) {
                    self.store_by_copy = STORES_BY_COPY;
                }
                if let Some(behind) = self.small.flights.front_mut().and_then(|f| f.stores.as_mut()) {
                    behind.since = Instant::now();
                }
                if let Some(sample) = flight.sample.take() {
                    self.tally.landed(sample);
                }
                if self.spare.len() < SPARES {
                    self.spare.push(flight);
                }
                moved = true;
            }
        }
        if !self.bulk.is_empty() {
            let flag = device.flag(Way::Bulk);
            let landed = self.bulk.landed;
            while self.bulk.land(flag).is_some() {}
            if self.bulk.landed > landed {
                moved = true;
                self.release();
            }
        }
        if moved {
            (self.quiet, self.since) = (0, None);
            self.landings += 1;
        }
        moved
    }

    /// Lets parked operations go on: in front, because what else is queued of their lanes came later, but for what the
    /// courier left undone.
    fn release(&mut self) {
        let mut front = 0;
        for op in self.parked.release(self.bulk.landed) {
            let put_back = self.queue.iter().take_while(|q| q.has_turn).enumerate();
            let earlier = put_back.filter(|(_, q)| Arc::ptr_eq(&q.owner.lane, &op.owner.lane)).last();
            let at = earlier.map_or(front, |(i, _)| front.max(i + 1));
            front += usize::from(at == front);
            self.put_back(at, op);
        }
    }

    /// Queues an operation that was taken from there before, for its turn. One that has read its signal's value reads it
    /// again: others may go ahead of it now.
    pub fn put_back(&mut self, at: usize, op: Op) {
        if let Some(next) = self.queue.front_mut() {
            next.reading = None;
        }
        self.queue.insert(at, Op { has_turn: true, ..op });
    }

    /// Sets an operation aside if it is a large copy or behind one. `None`: it has been. What comes back from there
    /// is not set aside again: others of its lane that are still there came later. `by_hands`: the courier's hands do it, and
    /// it need not wait for itself.
    pub fn park(&mut self, op: Op, by_hands: bool) -> Option<Op> {
        if op.has_turn {
            return Some(op);
        }
        let left = op.len - op.done;
        let mut is_large =
            !by_hands && self.tuning.bulk > 0 && left >= self.tuning.bulk && op.from.is_on_gpu() && op.to.is_on_gpu();
        if is_large && self.is_near(&op) {
            is_large = left >= NEAR_BULK.max(self.tuning.bulk);
        }
        if is_large {
            self.parked.push(Op { reading: None, ..op }, Copy::Waiting);
        } else if !self.parked.is_empty() && self.parked.has(&op.owner.lane) {
            self.parked.push(Op { reading: None, ..op }, Copy::None);
        } else {
            return Some(op);
        }
        None
    }

    /// Builds one flight and starts it. `false`: nothing can start now.
    fn start(&mut self, rank: u32, registry: &Registry) -> bool {
        let mut batch = std::mem::take(&mut self.batch).begin(self);
        let mut any = false;
        loop {
            let Some(op) = self.queue.pop_front() else { break };
            if op.owner.lane.health.has_failed() {
                op.owner.give_up();
                any = true;
                continue;
            }
            if self.leaves_to_hands(&op) {
                self.queue.push_front(op);
                break;
            }
            let Some(mut op) = self.park(op, false) else {
                any = true;
                continue;
            };
            self.note(&op);
            match batch.add(self, registry, &mut op) {
                Ok(Step::Done) => {
                    batch.finished.push(op.owner);
                    any = true;
                    if batch.is_full() {
                        break;
                    }
                }
                Ok(Step::Later { progress }) => {
                    self.queue.push_front(op);
                    any |= progress;
                    break;
                }
                Err(why) => {
                    op.owner.lane.health.fail(why.context(format!("rank {rank}")));
                    op.owner.give_up();
                    any = true;
                }
            }
        }
        if batch.has_work() {
            self.launch(rank, &mut batch);
        } else if let Some(last) = self.small.flights.back_mut() {
            // Done by the CPU alone, but local completion keeps its order.
            last.finished.append(&mut batch.finished);
        } else {
            batch.finished.drain(..).for_each(Owner::complete);
        }
        batch.clear();
        self.batch = batch;
        any && self.failure.is_none()
    }

    /// Starts large copies that wait for room on their stream. Returns whether anything was started or given up.
    fn start_bulk(&mut self, rank: u32, registry: &Registry) -> bool {
        let mut any = false;
        while self.bulk.flights.len() < BULK_FLIGHTS {
            let Some(device) = &self.device else { return any };
            let (mut copies, mut bytes) = (Copies::default(), 0);
            let number = self.bulk.started + 1;
            for (op, copy) in self.parked.waiting() {
                let left = op.len - op.done;
                if !op.owner.lane.health.has_failed() {
                    match add_large(&mut copies, &mut self.windows, registry, op) {
                        Ok(()) => {
                            *copy = Copy::Up(number);
                            bytes += left;
                            if bytes >= BULK_BYTES {
                                break;
                            }
                            continue;
                        }
                        Err(why) => op.owner.lane.health.fail(why.context(format!("rank {rank}"))),
                    }
                }
                // Released with what came before it, and given up then: its lane has failed.
                *copy = Copy::None;
                any = true;
            }
            if copies.is_empty() {
                if any {
                    self.release();
                }
                return any;
            }
            let load = Load { copies: &copies, into: &Copies::default(), ops: &mut [] };
            // SAFETY: as for `launch`.
            if let Err(e) = unsafe { device.launch(Way::Bulk, number, load) } {
                self.fail(cuda_error(&format!("a transfer on the GPU of rank {rank}"), &e));
                return true;
            }
            self.tally.bulk(copies.len());
            self.bulk.started = number;
            self.bulk.flights.push_back(Flight { number, ..Flight::default() });
            any = true;
        }
        any
    }

    /// Asks the streams whether they failed, once flags have been down for long. Looks at the clock now and then only.
    pub fn check(&mut self, rank: u32) {
        self.quiet = self.quiet.wrapping_add(1);
        if self.quiet % LOOK_EVERY != 0 {
            return;
        }
        if self.since.get_or_insert_with(Instant::now).elapsed() < ASK_AFTER {
            return;
        }
        self.since = None;
        let Err(e) = self.device.as_ref().map_or(Ok(()), Device::check) else { return };
        let why = cuda_error(&format!("the GPU of rank {rank} has failed"), &e);
        let up = self.small.flights.drain(..).chain(self.bulk.flights.drain(..));
        up.flat_map(|flight| flight.finished).for_each(|o| fail_one(o, &why));
        self.take_carried().into_iter().for_each(|o| fail_one(o, &why));
        self.fail(why);
    }

    /// What waits and what is up, in words, for when nothing moves.
    #[cold]
    pub fn describe(&self) -> String {
        let courier = self.courier.as_ref().map_or("none".into(), Courier::describe);
        let why = if self.device.as_ref().is_some_and(Device::has_own_context) {
            "a stopped process on it or a debugger"
        } else {
            "what the application has queued behind a kernel that waits (set CUDA_DEVICE_MAX_CONNECTIONS=32), a kernel that \
             fills the GPU, or a stopped process on it,"
        };
        format!(
            "{} operations wait, flights {} to {} of {} and large ones {} to {} are up, the courier: {courier}; {why} may be \
             why",
            self.queue.len() + self.parked.len(),
            self.small.landed + 1,
            self.small.started,
            self.small.flights.len(),
            self.bulk.landed + 1,
            self.bulk.started
        )
    }

    /// Fails everything that waits, and whatever comes; says why, the first time. Flights that are up land, or are
    /// found to have failed.
    #[cold]
    pub fn fail(&mut self, why: Error) {
        for op in self.queue.drain(..).chain(self.parked.remove(|_| true)) {
            fail_one(op.owner, &why);
        }
        self.failure.get_or_insert(why);
    }
}

/// Fails one operation.
pub fn fail_one(owner: Owner, why: &Error) {
    owner.lane.health.fail(why.clone());
    owner.give_up();
}

fn deliver(device: &Device, registry: &Registry, bytes: &Outward) {
    let held;
    let to = match bytes.to {
        Side::Caller { addr, .. } => addr as *mut u8,
        Side::Window { key, addr } => {
            held = registry.hold();
            // A window that is gone gets nothing.
            let Some(to) = held.resolve(key, addr, bytes.len) else { return };
            to
        }
    };
    // SAFETY: the staging bytes were written by a flight that has landed and are not given back yet; the destination
    // is in a held window or the caller's until completion.
    unsafe { std::ptr::copy_nonoverlapping(device.staging_host(bytes.offset), to, bytes.len as usize) };
}
