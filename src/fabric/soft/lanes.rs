//! The lane kernel as a fabric's: which queues it can serve, into whose memory it may store, and at whose gates it is.

mod reach;

use super::gate::Entered;
use super::gpu::lane_kernel::{LaneKernel, LaneRecord};
use super::gpu::Engine;
use super::link::RouteKind;
use super::progress::Progress;
use crate::fabric::lanes::{self, Holds, LaneView, Position, Stage, WindowView, WINDOWS};
use reach::{MemoryKind, Reach};
use std::sync::Arc;
use std::time::Instant;

/// Polls between two looks at whether peers have failed.
const LOOK_EVERY: u32 = 1024;

/// A peer's GPU that the kernel may store into.
struct Inside {
    peer: u32,
    /// The engine of a rank of this process, and what its gate is left with; `None`: another process has it.
    engine: Option<(Arc<Engine>, Entered)>,
}

impl Inside {
    /// Enters. `None`: the gate is closed, or nobody knows the peer.
    fn enter(shared: &Progress, peer: u32) -> Option<Self> {
        if let Some(engine) = engine_at(shared, peer) {
            let entered = engine.gate().enter()?;
            return Some(Self { peer, engine: Some((engine.clone(), entered)) });
        }
        let its = shared.neighbours.get(peer)?;
        shared.status.enter(peer);
        if its.is_closed() {
            shared.status.leave(peer);
            return None;
        }
        Some(Self { peer, engine: None })
    }

    /// Whether somebody wants to be alone there.
    #[inline]
    fn is_unwanted(&self, shared: &Progress) -> bool {
        is_closed(shared, self.peer, self.engine.as_ref().map(|(engine, _)| engine))
    }

    fn leave(self, shared: &Progress) {
        match self.engine {
            Some((engine, entered)) => engine.gate().leave(entered),
            None => shared.status.leave(self.peer),
        }
    }
}

/// The engine of a rank of this process, this rank among them, to which nothing may have gone yet.
#[inline]
fn engine_at(shared: &Progress, rank: u32) -> Option<&Arc<Engine>> {
    match rank == shared.world.rank {
        true => Some(&shared.engine),
        false => shared.link(rank).engine_of_peer(),
    }
}

/// Whether a peer's gate is closed, or nobody knows the peer. `engine`: its own, where it is a rank of this process.
#[inline]
fn is_closed(shared: &Progress, peer: u32, engine: Option<&Arc<Engine>>) -> bool {
    match engine {
        Some(engine) => engine.gate().is_closed(),
        None => shared.neighbours.get(peer).is_none_or(|its| its.is_closed()),
    }
}

/// One user's hold on the lane kernel of a rank.
pub struct Lanes {
    shared: Arc<Progress>,
    /// While it is called or serves; others may have it otherwise.
    kernel: Option<Box<LaneKernel>>,
    /// This rank's own gate first: its windows may go as well.
    inside: Vec<Inside>,
    /// Where the windows of the lanes are, which it keeps.
    reach: Reach,
    polls: u32,
    has_failed: bool,
}

impl Lanes {
    /// Loads the kernel for such queues, if there is none yet. `None`: there can be none.
    pub fn open(shared: &Arc<Progress>, holds: Holds) -> Option<Self> {
        let shared = shared.clone();
        shared.engine.open_lane_kernel(holds).then(|| Self {
            shared,
            kernel: None,
            inside: Vec::new(),
            reach: Reach::default(),
            polls: 0,
            has_failed: false,
        })
    }

    /// A queue as the kernel is to know it; `None`: it cannot serve it.
    fn record(&mut self, view: &LaneView) -> Option<LaneRecord> {
        let mut record = LaneRecord::new(view);
        if view.is_watched {
            // Nothing of it is carried out.
            (record.view.signals, record.view.windows) = (0, [WindowView::default(); WINDOWS]);
            return Some(record);
        }
        if view.signals > 0 {
            let len = 8 * u64::from(view.signals);
            let found = self.reach.peers(&self.shared, view.peer, view.signals_key, view.signals_at, len);
            let (at, kind) = found.filter(|(_, kind)| *kind != MemoryKind::Host)?;
            (record.signals, record.is_far) = (at, kind == MemoryKind::Far);
        }
        let mut any = view.signals > 0;
        for (at, window) in view.windows.iter().enumerate().filter(|(_, window)| window.handle != 0) {
            let WindowView { lkey, base, len, rkey, remote_base, remote_len, .. } = *window;
            let known = &mut record.view.windows[at];
            match self.reach.peers(&self.shared, view.peer, rkey, remote_base, remote_len) {
                Some((remote, kind)) => {
                    (record.windows[at], any) = (remote, true);
                    record.are_read[at] = kind == MemoryKind::Host;
                    record.is_far |= kind == MemoryKind::Far;
                    // Of what is here in host memory the kernel knows no byte.
                    if !self.reach.has_own(&self.shared, lkey, base, len) {
                        known.len = 0;
                    }
                }
                None => known.handle = 0,
            }
        }
        any.then_some(record)
    }

    /// Enters a gate, unless that was done.
    fn enter(&mut self, peer: u32) -> bool {
        if self.inside.iter().any(|inside| inside.peer == peer) {
            return true;
        }
        let entered = match self.shared.link(peer).has_failed() {
            true => None,
            false => Inside::enter(&self.shared, peer),
        };
        let is_inside = entered.is_some();
        self.inside.extend(entered);
        is_inside
    }

    fn leave_all(&mut self) {
        self.reach.clear();
        self.inside.drain(..).for_each(|inside| inside.leave(&self.shared));
    }

    /// Whether the kernel that serves is to end.
    #[inline]
    fn is_unwanted(&mut self) -> bool {
        self.polls = self.polls.wrapping_add(1);
        let shared = &self.shared;
        let is_time = self.polls % LOOK_EVERY == 0;
        self.inside.iter().any(|i| i.is_unwanted(shared) || is_time && shared.link(i.peer).has_failed())
    }

    /// Others may have the kernel.
    fn give_back(&mut self) {
        self.leave_all();
        if let Some(kernel) = self.kernel.take() {
            self.shared.engine.give_lane_kernel(kernel);
        }
    }
}

impl lanes::LaneServer for Lanes {
    #[inline]
    fn poll(&mut self, moved: bool) -> Stage {
        if self.has_failed {
            return Stage::Failed;
        }
        let Some(kernel) = &mut self.kernel else { return Stage::Off };
        let stage = kernel.poll(moved);
        match stage {
            Stage::Serving if self.is_unwanted() => self.stop(),
            Stage::Off => self.give_back(),
            Stage::Failed => self.has_failed = true,
            _ => {}
        }
        stage
    }

    fn reaches(&self, peer: u32) -> bool {
        engine_at(&self.shared, peer).is_some() || self.shared.link(peer).way() == RouteKind::Near
    }

    fn is_let_in(&self, peer: u32) -> bool {
        let ranks = [self.shared.world.rank, peer];
        ranks.iter().all(|&rank| !is_closed(&self.shared, rank, engine_at(&self.shared, rank)))
    }

    fn is_awaited(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.is_awaited())
    }

    fn awaited_since(&self) -> Option<Instant> {
        self.kernel.as_ref().and_then(|kernel| kernel.awaited_since())
    }

    fn call(&mut self, now: Instant, lanes: usize) {
        if self.kernel.is_none() {
            self.kernel = self.shared.engine.take_lane_kernel();
        }
        if let Some(kernel) = &mut self.kernel {
            kernel.call(now, lanes);
        }
    }

    fn has_next(&self) -> bool {
        self.kernel.as_ref().is_some_and(|kernel| kernel.has_next())
    }

    fn room(&self) -> usize {
        self.kernel.as_ref().map_or(0, |kernel| kernel.room())
    }

    fn serve(&mut self, views: &[LaneView]) -> Vec<bool> {
        self.leave_all();
        let (own, most) = (self.shared.world.rank, self.room());
        let (mut served, mut records) = (vec![false; views.len()], Vec::with_capacity(views.len()));
        // First: what is looked up behind that stays until the gates are left.
        if self.enter(own) {
            for (view, served) in views.iter().zip(&mut served) {
                if records.len() == most || !view.is_watched && !self.enter(view.peer) {
                    continue;
                }
                if let Some(record) = self.record(view) {
                    records.push(record);
                    *served = true;
                }
            }
        }
        match &mut self.kernel {
            Some(kernel) if !records.is_empty() => kernel.serve(&records),
            _ => {
                self.leave_all();
                served.fill(false);
            }
        }
        served
    }

    fn steady(&self) -> u32 {
        self.shared.engine.steady()
    }

    fn bring(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.bring();
        }
    }

    #[inline]
    fn position(&self, nth: usize) -> Position {
        let position = self.kernel.as_ref().and_then(|kernel| kernel.position(nth));
        position.unwrap_or(Position { next: 0, is_over: false })
    }

    fn stop(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.stop();
        }
    }

    fn settle(&mut self) {
        if let Some(kernel) = &mut self.kernel {
            kernel.settle();
        }
        self.leave_all();
    }
}

impl Drop for Lanes {
    fn drop(&mut self) {
        match self.kernel.take() {
            // It may still run, and so does whoever let go of this: nobody may use the kernel, nor unmap what it knows.
            // It does not leave the gates where it is, which wait for it once.
            Some(kernel) if kernel.is_serving() => {
                std::mem::forget(kernel);
                self.reach.leak();
            }
            kernel => {
                self.kernel = kernel;
                self.give_back();
            }
        }
    }
}
