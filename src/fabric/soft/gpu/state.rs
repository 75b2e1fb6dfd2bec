//! What is queued and what is up.

use super::batch::{Batch, Step};
use super::device::{Device, STAGING_BYTES};
use super::op::{Op, Owner, Side};
use super::staging::Staging;
use crate::error::Error;
use crate::fabric::soft::lane::Lane;
use crate::memory::gpu::{cuda_error, GPU_BIT};
use crate::memory::registry::{Extent, Registry};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Flights that are up at once: one that runs and one behind it, so that the GPU does not idle between them.
const FLIGHTS: usize = 2;
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
        self.0.get_mut((key & !GPU_BIT) as usize)?.as_mut().filter(|w| w.extent.holds(addr, len))
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

/// Bytes in the staging memory on their way to host memory.
pub struct Outward {
    pub offset: u64,
    pub len: u64,
    pub to: Side,
}

/// What was started at once.
pub struct Flight {
    number: u64,
    finished: Vec<Owner>,
    outward: Vec<Outward>,
    staged: u64,
}

/// All of it.
pub struct State {
    /// Once there is a GPU window.
    pub device: Option<Device>,
    pub windows: Windows,
    pub queue: VecDeque<Op>,
    pub staging: Staging,
    flights: VecDeque<Flight>,
    /// Number of the last flight that was started.
    pub started: u64,
    /// Number of the last one that is done, its outward bytes delivered.
    pub landed: u64,
    /// The last one with bytes for host memory.
    pub outward: u64,
    moved: Instant,
    batch: Batch,
    /// Why nothing works any more.
    pub failure: Option<Error>,
}

impl State {
    /// Nothing.
    pub fn new() -> Self {
        Self {
            device: None,
            windows: Windows::default(),
            queue: VecDeque::new(),
            staging: Staging::new(STAGING_BYTES),
            flights: VecDeque::new(),
            started: 0,
            landed: 0,
            outward: 0,
            moved: Instant::now(),
            batch: Batch::default(),
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
    }

    /// Whether anything is up.
    pub fn has_flights(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Starts what can start and completes what is done. Returns whether something is under way.
    pub fn advance(&mut self, rank: u32, registry: &Registry) -> bool {
        let mut moved = self.land(registry);
        if let Some(failure) = self.failure.clone() {
            self.fail(failure);
            return false;
        }
        while self.flights.len() < FLIGHTS && !self.queue.is_empty() {
            if !self.start(rank, registry) {
                break;
            }
            moved = true;
        }
        if !moved && self.has_flights() {
            self.check(rank);
        }
        moved || self.has_flights()
    }

    /// Completes flights that are done. Returns whether there were any.
    pub fn land(&mut self, registry: &Registry) -> bool {
        let Some(device) = &self.device else { return false };
        if self.flights.is_empty() {
            return false;
        }
        let flag = device.flag();
        let mut moved = false;
        while self.flights.front().is_some_and(|f| f.number <= flag) {
            let Some(flight) = self.flights.pop_front() else { break };
            for bytes in &flight.outward {
                deliver(device, registry, bytes);
            }
            flight.finished.into_iter().for_each(Owner::complete);
            self.staging.give_back(flight.staged);
            self.landed = flight.number;
            moved = true;
        }
        if moved {
            self.moved = Instant::now();
        }
        moved
    }

    /// Builds one flight and starts it. `false`: nothing can start now.
    fn start(&mut self, rank: u32, registry: &Registry) -> bool {
        let mut batch = std::mem::take(&mut self.batch);
        let mut any = false;
        loop {
            let Some(mut op) = self.queue.pop_front() else { break };
            if op.owner.lane.health.has_failed() {
                op.owner.give_up();
                any = true;
                continue;
            }
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
        } else if let Some(last) = self.flights.back_mut() {
            // Done by the CPU alone, but local completion keeps its order.
            last.finished.append(&mut batch.finished);
        } else {
            batch.finished.drain(..).for_each(Owner::complete);
        }
        batch.clear();
        self.batch = batch;
        any && self.failure.is_none()
    }

    fn launch(&mut self, rank: u32, batch: &mut Batch) {
        let number = self.started + 1;
        let Some(device) = &self.device else {
            let why = Error::internal("a transfer reached a rank without a GPU");
            batch.finished.drain(..).for_each(|o| fail_one(o, &why));
            return;
        };
        batch.raise_flag(device.flag_at(), number);
        if self.flights.is_empty() {
            self.moved = Instant::now();
        }
        // SAFETY: windows are checked and wait for flights before they go; callers keep their ends until completion;
        // staging memory is given back when the flight has landed.
        let result = unsafe { device.launch(&batch.copies, &mut batch.ops) };
        self.started = number;
        if !batch.outward.is_empty() {
            self.outward = number;
        }
        self.flights.push_back(Flight {
            number,
            finished: std::mem::take(&mut batch.finished),
            outward: std::mem::take(&mut batch.outward),
            staged: self.staging.position(),
        });
        if let Err(e) = result {
            self.fail(cuda_error(&format!("a transfer on the GPU of rank {rank}"), &e));
        }
    }

    /// Asks the stream whether it failed, once the flag has been down for long.
    pub fn check(&mut self, rank: u32) {
        if self.moved.elapsed() < ASK_AFTER {
            return;
        }
        self.moved = Instant::now();
        let Some(Err(e)) = self.device.as_ref().map(Device::check) else { return };
        self.fail(cuda_error(&format!("the GPU of rank {rank} has failed"), &e));
    }

    /// Fails everything, and whatever comes.
    #[cold]
    pub fn fail(&mut self, why: Error) {
        for flight in self.flights.drain(..) {
            flight.finished.into_iter().for_each(|o| fail_one(o, &why));
        }
        for op in self.queue.drain(..) {
            fail_one(op.owner, &why);
        }
        self.failure.get_or_insert(why);
    }
}

fn fail_one(owner: Owner, why: &Error) {
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
