//! What goes by the copy kernel, and what by the stream: never both at once, so that order is kept.

use super::completion::deliver;
use super::device::Device;
use super::in_flight::Outward;
use super::kernel::{command, windows_hold, HostEnd, Landed, Staged, StagingRoom};
use super::op::Op;
use super::plan::{plan, Facts, KernelState, LaunchSize, Mover, PlanLimits, CROWD, CROWDED_BYTES, SAME_GPU_BULK};
use super::staging::Staging;
use super::state::EngineState;
use crate::memory::registry::Registry;

/// How far into the queue a copy looks for others.
const LOOK_AHEAD: usize = 16;

/// The staging memory has no room now.
struct NoRoom;

impl EngineState {
    /// Completes what the copy kernel has done, and takes back what one that is gone has not.
    pub fn complete_dispatched(&mut self, registry: &Registry) -> bool {
        let Some(kernel) = self.handover.kernel.as_mut() else { return false };
        if kernel.is_off() && !kernel.take_over() {
            return false;
        }
        let mut moved = false;
        while let Some(Landed { owner, to, window, len, credited, staged }) = kernel.land() {
            if let (Some(Staged { end, room: Some(room), .. }), Some(device)) = (staged, &self.device) {
                if end == HostEnd::To {
                    // SAFETY: the copy kernel has written the bytes, which are not given back yet.
                    unsafe {
                        deliver(device, &self.windows, registry, &Outward { offset: room.offset, len, to, window })
                    };
                }
                self.staging.give_back(room.until);
            }
            if credited > 0 {
                owner.lane.note_paid(credited.into());
            }
            owner.complete();
            self.handover.back += 1;
            moved = true;
        }
        if kernel.is_off() && kernel.is_busy() {
            let leftovers: Vec<Op> = kernel.leftovers().collect();
            // Beside the copy kernel nothing is in flight that uses it.
            self.staging.give_back(self.staging.position());
            self.handover.back += leftovers.len() as u64;
            let mut at = 0;
            for op in leftovers {
                // Not added after all.
                if let Some(s) = op.signal {
                    let _ = self.windows.add(s.rkey, s.remote, s.value.wrapping_neg());
                }
                if self.is_draining(&op.owner.lane) {
                    op.owner.give_up();
                } else {
                    self.queue.put_back(at, op);
                    at += 1;
                }
            }
            moved = true;
        }
        // At once: submissions would start otherwise.
        if let Some(kernel) = self.handover.kernel.as_mut().filter(|c| c.is_off()) {
            kernel.take_over();
        }
        moved
    }

    /// Copies among the next operations of the queue, of which `first` are passed over, that no longer count as small;
    /// not more than make a crowd.
    fn copies_waiting(&self, first: usize) -> usize {
        let next = self.queue.ready.iter().skip(first).take(LOOK_AHEAD);
        next.filter(|op| op.len - op.done > CROWDED_BYTES).take(CROWD).count()
    }

    /// The same, if it matters to an operation.
    pub fn copies_beside(&self, op: &Op, first: usize) -> usize {
        if op.len > CROWDED_BYTES {
            self.copies_waiting(first)
        } else {
            0
        }
    }

    /// What decides who moves an operation, with so many other copies about.
    pub fn facts(&self, op: &Op, kernel: KernelState, crowd: usize) -> Facts {
        let alone = Facts::of(op, PlanLimits::from(&self.tuning));
        let lane_waits = !self.queue.deferred.is_empty() && self.queue.deferred.has(&op.owner.lane);
        let reads_signals = self.windows.are_reset_of_late() && self.device.as_ref().is_some_and(|d| !d.can_add);
        let is_same_gpu = self.is_near(op);
        let is_busy = is_same_gpu && op.len >= SAME_GPU_BULK && self.were_processors_late();
        let mut facts = Facts { is_same_gpu, is_busy, lane_waits, crowd, reads_signals, kernel, ..alone };
        facts.windows_hold = facts.needs_windows() && windows_hold(op, &self.windows);
        facts
    }

    /// Gives the copy kernel what it can take from the front of the queue. Returns whether that was anything.
    pub fn dispatch(&mut self, registry: &Registry) -> bool {
        if self.queue.ready.is_empty() || !self.small.is_empty() {
            return false;
        }
        let Some(mut kernel) = self.handover.kernel.take_if(|c| c.is_up()) else { return false };
        let mut any = false;
        while kernel.has_room() {
            // Looked at where it is: each time that one is moved costs as much as the decision.
            let Some(op) = self.queue.ready.front() else { break };
            any = true;
            if op.owner.lane.is_over() {
                self.queue.ready.pop_front().into_iter().for_each(|op| op.owner.give_up());
                continue;
            }
            let takes = KernelState::Takes(kernel.size());
            let mut facts = self.facts(op, takes, self.copies_beside(op, 1) + kernel.copies());
            // Until the bytes have been copied.
            let held = op.host_window().map(|(key, addr)| (registry.hold(), key, addr));
            facts.windows_hold &=
                held.as_ref().is_none_or(|(held, key, addr)| held.resolve(*key, *addr, op.len).is_some());
            match plan(&facts) {
                mover @ (Mover::CopyKernel | Mover::WorkerBlocks) => {
                    let by_workers = mover == Mover::WorkerBlocks;
                    let Ok(staged) = place_host_end(op, self.device.as_ref(), &mut self.staging) else {
                        // What was given before has the room.
                        any = kernel.is_busy();
                        break;
                    };
                    // What finds warps enough wants them in the next launches as much as what misses them.
                    if by_workers || facts.wants_block() {
                        kernel.wants(if by_workers { LaunchSize::WorkerBlocks } else { LaunchSize::Block });
                    }
                    let command = command(op, &mut self.windows, by_workers, staged.as_ref());
                    // A weak signal has an order with nothing but its own data.
                    let in_order = op.signal.is_some_and(|s| s.strong && self.windows.orders_signals(s.rkey));
                    self.queue.ready.pop_front().into_iter().for_each(|op| kernel.post(op, command, staged, in_order));
                }
                mover @ (Mover::BulkStream | Mover::Deferred) => {
                    let is_bulk = mover == Mover::BulkStream;
                    self.queue.ready.pop_front().into_iter().for_each(|op| self.queue.defer(op, is_bulk));
                }
                Mover::CopyEngine | Mover::PinnedMemory | Mover::StreamStore | Mover::Cpu => {
                    any = kernel.is_busy();
                    break;
                }
            }
        }
        if any {
            kernel.stay_up();
        }
        self.handover.kernel = Some(kernel);
        any
    }

    /// Whether no submission may start now: the copy kernel has operations, or is about to take over.
    pub fn kernel_has_turn(&self) -> bool {
        self.handover.has_turn(!self.small.is_empty()) || self.workers_have_turn()
    }

    /// Whether the first of the queue waits for a launch that runs or may come up in time, and no submission may
    /// start before it. While they run `dispatch` takes it, as soon as no submission is in flight; while they are
    /// awaited, their launch comes up or is late soon.
    fn workers_have_turn(&self) -> bool {
        let first = self.queue.ready.front().filter(|_| self.handover.size() > LaunchSize::Warp);
        first
            .map(|op| self.facts(op, KernelState::Awaited, 0))
            .is_some_and(|facts| plan(&facts) == Mover::WorkerBlocks && self.handover.size() >= facts.wanted_size())
    }
}

/// The place of an operation's end in host memory, if the copy kernel needs one for it; what it reads is there.
fn place_host_end(op: &Op, device: Option<&Device>, staging: &mut Staging) -> Result<Option<Staged>, NoRoom> {
    let (Some(end), Some(device)) = (HostEnd::of(op), device) else { return Ok(None) };
    if let Some(at) = op.host.pinned() {
        return Ok(Some(Staged { end, at, room: None }));
    }
    let offset = staging.take(op.len).ok_or(NoRoom)?;
    if end == HostEnd::From {
        let (from, to) = (op.from.addr() as *const u8, device.staging_host(offset));
        // SAFETY: the source is readable (Context::post), held, or kept with the operation; the staging bytes were just
        // taken.
        unsafe { std::ptr::copy_nonoverlapping(from, to, op.len as usize) };
    }
    let room = StagingRoom { offset, until: staging.position() };
    Ok(Some(Staged { end, at: device.staging(offset), room: Some(room) }))
}
