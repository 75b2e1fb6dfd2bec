//! A lane's turn: its first operations by the transport that the route names, as far as they go for now.

use super::staged::{to_gpu, Step};
use super::tx_queue::{LaneQueue, LaneState, Running, TxQueue};
use super::{Link, RouteKind, BURST, QUANTUM};
use crate::error::{Error, Result};
use crate::fabric::soft::domain::Domain;
use crate::fabric::soft::gpu::{self, Credit, Engine, Owner};
use crate::fabric::soft::lane::{Lane, Task};
use crate::fabric::soft::local;
use crate::fabric::soft::own;
use crate::fabric::soft::shm::cma;
use crate::fabric::soft::shm::copy::{self, Piece};
use crate::fabric::soft::shm::port::RING_MAX;
use crate::fabric::soft::status::COPIES;
use crate::fabric::CreditIndex;
use crate::memory::key::Key;
use crate::rma::op::{Op, Transfer};
use crate::rma::seq::Seq;
use crate::sys::spin::SpinGuard;
use std::io;
use std::sync::atomic::Ordering;
use std::sync::Arc;

/// What became of a lane's turn.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Turn {
    /// It is over; what is left comes in the next one.
    Over,
    /// The transport has no room.
    Full,
    /// The peer failed.
    Failed,
}

/// Operations that are through with their sources, and not complete yet.
#[derive(Default)]
struct Pushed {
    last: Option<Seq>,
    count: usize,
}

/// A queue under its lock, from which it may be let go in between.
type Locked<'a> = SpinGuard<'a, LaneQueue>;

impl Link {
    /// Runs the first operations of one lane for a turn. May let go of the lock in between.
    pub(super) fn run_lane<'a>(&'a self, shared: &Domain, tx: &'a TxQueue, queue: Locked<'a>) -> (Locked<'a>, Turn) {
        let mut pushed = Pushed::default();
        let (queue, turn) = self.run_first(shared, tx, queue, &mut pushed);
        self.complete(shared, tx, &mut pushed);
        (queue, turn)
    }

    /// Completes what was pushed. The peer finds in its ring what is complete here, if it looks: it may be told by
    /// other means that it is there.
    fn complete(&self, shared: &Domain, tx: &TxQueue, pushed: &mut Pushed) {
        if let Some(last) = pushed.last.take() {
            self.publish(shared);
            tx.lane.complete(last);
            self.backlog.fetch_sub(std::mem::take(&mut pushed.count), Ordering::Relaxed);
        }
    }

    fn run_first<'a>(
        &'a self,
        shared: &Domain,
        tx: &'a TxQueue,
        mut queue: Locked<'a>,
        pushed: &mut Pushed,
    ) -> (Locked<'a>, Turn) {
        let mut budget = QUANTUM;
        for _ in 0..BURST {
            let Some(task) = queue.tasks.front() else { break };
            let seq = task.seq;
            let is_small = task.work.len() - task.done <= RING_MAX && !task.work.is_on_gpu();
            if !is_small || self.route.way() != RouteKind::Near {
                // The lock may be let go for this one, or somebody else completes it.
                self.complete(shared, tx, pushed);
            }
            let (back, step) = self.step(shared, tx, queue, budget);
            queue = back;
            let step = match step {
                Ok(step) => step,
                Err(error) => {
                    self.complete(shared, tx, pushed);
                    self.fail_lane(shared, tx, &mut queue, error);
                    return (queue, if self.health.has_failed() { Turn::Failed } else { Turn::Over });
                }
            };
            // It may have been dropped while the lock was free.
            let Some(task) = queue.tasks.front_mut().filter(|t| t.seq == seq) else { continue };
            let finished = match step {
                Step::Moved(n) => {
                    task.done += n;
                    budget = budget.saturating_sub(n);
                    task.done == task.work.len() && task.work.signal().is_none()
                }
                Step::Finished => true,
                Step::HandedOver => {
                    queue.tasks.pop_front();
                    self.backlog.fetch_sub(1, Ordering::Relaxed);
                    continue;
                }
                Step::Out(until, used) => {
                    queue.tasks.pop_front();
                    queue.remote.push(seq, until, used);
                    continue;
                }
                Step::Full => return (queue, Turn::Full),
                Step::Fetching => return (queue, Turn::Over),
                Step::Waiting => {
                    queue.state = LaneState::Asked(1);
                    self.ask_more(tx, &mut queue);
                    return (queue, Turn::Over);
                }
            };
            if finished && tx.lane.confirms && self.awaits_confirmation(task) {
                task.is_pushed = true;
                continue;
            }
            if finished {
                queue.tasks.pop_front();
                match queue.remote.is_empty() {
                    true => (pushed.last, pushed.count) = (Some(seq), pushed.count + 1),
                    false => self.finish(tx, &mut queue, seq),
                }
            }
            if budget == 0 {
                break;
            }
        }
        queue.rest();
        (queue, Turn::Over)
    }

    /// Whether the peer is to say when an operation is in place, all of which is on its way.
    fn awaits_confirmation(&self, task: &Running) -> bool {
        let is_put = || matches!(task.work.transfer(), Transfer::Put(put) if put.len > 0);
        !task.is_pushed && self.route.way() == RouteKind::Near && is_put()
    }

    /// One step of the first operation, of at most `budget` bytes.
    fn step<'a>(
        &'a self,
        shared: &Domain,
        tx: &'a TxQueue,
        mut queue: Locked<'a>,
        budget: u64,
    ) -> (Locked<'a>, Result<Step>) {
        let (lane, way) = (&tx.lane, self.route.way());
        let Some(task) = queue.tasks.front_mut() else { return (queue, Ok(Step::Full)) };
        if task.is_pushed {
            let step = self.ask_to_confirm(tx, &mut queue);
            return (queue, Ok(step));
        }
        let on_gpu = task.work.is_on_gpu();
        if on_gpu && matches!(way, RouteKind::Own | RouteKind::Near) {
            match self.route_by_gpu(shared) {
                Ok(true) => {}
                Ok(false) => return (queue, Ok(Step::Full)),
                Err(error) => return (queue, Err(error)),
            }
        }
        let result = match self.route.way() {
            RouteKind::Gpu => {
                // The engine is told of windows that go from here on: one that has gone since this was posted is not
                // known to it.
                let left = task.work.len() - task.done;
                if let Err(error) = local::check(&shared.registry.hold(), &task.work, task.done, left) {
                    return (queue, Err(error));
                }
                let begun = std::iter::once((task.seq, &task.work, task.done));
                self.route.engine().inspect(|engine| self.submit(shared, engine, lane, None, begun));
                Ok(Step::HandedOver)
            }
            RouteKind::Far => {
                shared.tcp().post(Task { lane: lane.clone(), seq: task.seq, work: task.work });
                Ok(Step::HandedOver)
            }
            RouteKind::Own => {
                let n = (task.work.len() - task.done).min(budget);
                let moved = own::step(&shared.registry, shared.world.rank, &task.work, task.done, n);
                moved.map(|n| n.map_or(Step::Finished, Step::Moved))
            }
            RouteKind::Near if on_gpu => to_gpu(shared, &self.route, &self.in_engine, &mut queue, lane),
            RouteKind::Near => return self.step_near(shared, tx, queue, budget),
            RouteKind::Unknown | RouteKind::Closed => Ok(Step::Full),
        };
        (queue, result)
    }

    /// One step of the first operation through shared memory, both ends in host memory.
    fn step_near<'a>(
        &'a self,
        shared: &Domain,
        tx: &'a TxQueue,
        queue: Locked<'a>,
        budget: u64,
    ) -> (Locked<'a>, Result<Step>) {
        // First: who holds the port waits for nothing.
        let held = shared.registry.hold();
        let full = Ok(Step::Full);
        let (Some(task), Some(mut port)) = (queue.tasks.front(), self.route.near()) else {
            drop(held);
            return (queue, full);
        };
        let (work, done, context) = (task.work, task.done, tx.lane.context);
        let left = task.work.len() - done;
        let n = left.min(budget) as usize;
        let transfer = work.transfer();
        let by_kernel = match &transfer {
            Transfer::Put(put) if left > RING_MAX => port.pid_for(put.rkey),
            Transfer::Get(get) => port.pid_for(get.rkey),
            _ => None,
        };
        if let Some(pid) = by_kernel {
            drop((port, held));
            return self.step_by_kernel(shared, tx, queue, pid, (&work, done, n));
        }
        let step = match &transfer {
            Transfer::Put(put) => local::check(&held, &work, done, left).map(|()| {
                let chunked = port.pid_for(put.rkey).is_none();
                port.push_put(put, context, done, chunked)
            }),
            Transfer::Atomic(atomic) => Ok(port.push_atomic(atomic, context, task.seq)),
            Transfer::Get(get) => Ok(port.push_get(get, context, task.seq)),
        };
        drop((port, held));
        (queue, step.map(Step::from))
    }

    /// The same where the kernel copies, `n` bytes from `done` on of an operation.
    fn step_by_kernel<'a>(
        &'a self,
        shared: &Domain,
        tx: &'a TxQueue,
        queue: Locked<'a>,
        pid: libc::pid_t,
        (work, done, n): (&Op, u64, usize),
    ) -> (Locked<'a>, Result<Step>) {
        let (piece, local) = match work.transfer() {
            Transfer::Get(get) => {
                let piece = Piece { what: "read", window: get.rkey, remote: get.remote + done, len: n };
                (piece, get.local + done)
            }
            Transfer::Put(put) => {
                let piece = Piece { what: "write", window: put.rkey, remote: put.remote + done, len: n };
                (piece, put.local + done)
            }
            Transfer::Atomic(_) => return (queue, Err(Error::internal("no copy changes a word"))),
        };
        let (is_get, remote, mut gone) = (piece.what == "read", piece.remote, None);
        let (queue, result) = self.copy(shared, tx, queue, &piece, || {
            // Held meanwhile: a window that goes waits.
            let held = shared.registry.hold();
            if let Err(e) = local::check(&held, work, done, n as u64) {
                gone = Some(e);
                return Ok(0);
            }
            // SAFETY: this rank's end is inside a held window.
            unsafe {
                match is_get {
                    true => cma::read(pid, local, remote, n),
                    false => cma::write(pid, local, remote, n),
                }
            }
        });
        (queue, gone.map_or(result, Err))
    }

    /// Has the kernel copy for the first operation of a lane. Others may post and move meanwhile, on this lane too; the
    /// lane is at that, so its first operation stays.
    fn copy<'a>(
        &'a self,
        shared: &Domain,
        tx: &'a TxQueue,
        mut queue: Locked<'a>,
        piece: &Piece,
        copy: impl FnOnce() -> io::Result<usize>,
    ) -> (Locked<'a>, Result<Step>) {
        let Some(its) = shared.neighbours.get(self.peer) else {
            return (queue, Err(Error::internal(format!("rank {} is reached, but was never met", self.peer))));
        };
        let Some(place) = self.take_place() else { return (queue, Ok(Step::Full)) };
        if !tx.lane.begin_copy() {
            // What waits is dropped by who looks next.
            self.give_place(place);
            return (queue, Ok(Step::Full));
        }
        queue.state = LaneState::Copying;
        drop(queue);
        let result = copy::run(&shared.status, its, (self.peer, place), piece, copy);
        self.give_place(place);
        let mut queue = tx.lock();
        queue.copied();
        tx.lane.end_copy();
        // Closed: what it sent last is read first (`look`).
        (queue, result.map(|n| n.map_or(Step::Full, Step::Moved)))
    }

    /// A place for a copy, a bit each; with more threads than places some wait.
    fn take_place(&self) -> Option<usize> {
        let free = |copies: u32| Some(copies.trailing_ones() as usize).filter(|&place| place < COPIES);
        let take = |copies| free(copies).map(|place| copies | 1 << place);
        self.copies.fetch_update(Ordering::Acquire, Ordering::Relaxed, take).ok().and_then(free)
    }

    /// The copy in that place is over.
    fn give_place(&self, place: usize) {
        self.copies.fetch_and(!(1 << place), Ordering::Release);
    }

    /// Hands what waits on a lane to TCP.
    pub(super) fn hand_to_tcp(&self, shared: &Domain, tx: &TxQueue, queue: &mut LaneQueue) {
        for task in queue.tasks.drain(..) {
            self.backlog.fetch_sub(1, Ordering::Relaxed);
            shared.tcp().post(Task { lane: tx.lane.clone(), seq: task.seq, work: task.work });
        }
        queue.rest();
    }

    /// Whether the engine that moves what goes to this peer may count at an index of this rank's.
    pub fn may_count(&self, shared: &Domain, rkey: u32) -> bool {
        self.route.engine().is_some_and(|engine| is_countable(shared, engine, rkey))
    }

    /// Hands operations of a lane to the engine that moves them; nothing of the lane waits before them. Their
    /// completions are counted at `credit` where the engine's GPU can store there. Each comes with its number and the
    /// bytes of it that have been moved.
    #[inline]
    pub(super) fn submit<'a>(
        &self,
        shared: &Domain,
        engine: &Engine,
        lane: &Arc<Lane>,
        credit: Option<CreditIndex>,
        ops: impl ExactSizeIterator<Item = (Seq, &'a Op, u64)>,
    ) {
        self.in_engine.fetch_add(ops.len(), Ordering::Relaxed);
        shared.mark_pending(self.peer);
        let (rank, home) = (shared.world.rank, shared.engine.gpu());
        let credit = credit.filter(|index| is_countable(shared, engine, index.rkey));
        engine.submit(ops.enumerate().map(|(nth, (seq, work, done))| {
            let owner = Owner { lane: lane.clone(), seq, backlog: self.in_engine.clone() };
            let credit = credit.map(|i| Credit { at: i.at, is_wide: i.is_wide, entries: i.entries(nth) });
            gpu::Op { credit, ..gpu::Op::new(owner, rank, home, work, done) }
        }));
    }
}

/// Whether the engine's GPU can store to an index in this rank's window with that key.
fn is_countable(shared: &Domain, engine: &Engine, rkey: u32) -> bool {
    let key = Key(rkey);
    key.is_on_gpu() && (key.is_open() || shared.engine.gpu() == engine.gpu())
}

#[cfg(test)]
impl Link {
    /// Has the kernel copy for a lane, to no purpose, and something happen meanwhile.
    pub fn copy_while(&self, shared: &Domain, tx: &TxQueue, window: u32, meanwhile: impl FnOnce()) {
        let piece = Piece { what: "read", window, remote: 0, len: 0 };
        let copy = || {
            meanwhile();
            Ok(0)
        };
        let (queue, _) = self.copy(shared, tx, tx.lock(), &piece, copy);
        tx.release(queue);
    }
}
