//! One context: its completion queue and its lanes, under the context's lock.
//!
//! Operations go straight to the device where nothing stands in the way (`direct`), or wait in their lane's backlog
//! and go out in chains (`chain`); `completions` takes what comes back.

mod additions;
mod chain;
mod completions;
mod direct;
mod events;
mod looped;
mod post;

pub use completions::Taken;
pub use post::PostBatch;

use super::events::Events;
use super::lane::Lane;
use super::message::Messages;
use super::outcome::Outcomes;
use super::pairs::Pairs;
use crate::error::Kind;
use crate::memory::registry::Registry;
use chain::Chain;
use completions::BATCH;
use oxygin_ffi::verbs::types::*;
use std::ptr::null_mut;
use std::sync::Arc;

/// The device's calls and objects that the data path uses.
#[derive(Clone, Copy)]
pub struct Device {
    /// Takes completions.
    pub poll_cq: PollCq,
    /// Posts sends.
    pub post_send: PostSend,
    /// The context's completion queue.
    pub cq: *mut ibv_cq,
    /// Bytes that every lane takes inside a work request.
    pub max_inline: u32,
    /// Largest message in bytes that both ends of every lane take.
    pub max_msg: u64,
    /// 8 bytes that atomics may overwrite: address.
    pub scratch: u64,
    /// 8 bytes that atomics may overwrite: key.
    pub scratch_lkey: u32,
    /// This rank.
    pub rank: u32,
    /// Whether a peer that closes its end ends this one: what is posted comes back flushed then.
    pub closes: bool,
    /// Whether what is posted behind a read may complete before it: soft-iWARP reports each as it happens.
    pub overtakes: bool,
    /// Whether what was written is complete only when it is visible at the peer: behind each chain of writes a byte of
    /// what they wrote is read, which the peer's device answers behind them. An acknowledgement alone says that they
    /// have arrived there, and may overtake them on their way to memory.
    pub confirms: bool,
}

impl Device {
    /// Where a read that confirms what was written goes, if there are such reads.
    fn confirming(&self) -> Option<ibv_sge> {
        self.confirms.then_some(ibv_sge { addr: self.scratch, length: 1, lkey: self.scratch_lkey })
    }
}

/// A context's queues.
pub struct Queues {
    device: Device,
    /// Ended before `messages`: nothing arrives in their buffers any more.
    pairs: Pairs,
    /// By peer.
    pub lanes: Box<[Lane]>,
    /// The work request of those that the device refused.
    bad: *mut ibv_send_wr,
    /// Lanes with something to do that no completion will bring about by itself.
    waiting: Vec<u32>,
    chain: Chain,
    completions: [ibv_wc; BATCH],
    /// Signals by message, where the devices have no atomics.
    pub messages: Option<Messages>,
    events: Arc<Events>,
    /// Where this side writes into windows by itself.
    registry: Arc<Registry>,
    /// How many of the events this context has seen.
    seen: usize,
    /// Polls that found nothing since events were last looked for.
    empty: u32,
}

// SAFETY: the pointers are to memory that this object owns and to libibverbs objects, which any thread may use; the
// context's lock keeps threads apart.
unsafe impl Send for Queues {}

impl Queues {
    /// Queues over connected lanes.
    pub fn new(
        device: Device,
        events: Arc<Events>,
        registry: Arc<Registry>,
        pairs: Pairs,
        lanes: Vec<Lane>,
        messages: Option<Messages>,
        outcomes: &Outcomes,
    ) -> Self {
        let mut queues = Self {
            device,
            pairs,
            bad: null_mut(),
            waiting: Vec::with_capacity(lanes.len()),
            lanes: lanes.into(),
            chain: Chain::new(),
            completions: [ibv_wc::default(); BATCH],
            messages,
            seen: events.count(),
            events,
            registry,
            empty: 0,
        };
        for lane in &mut queues.lanes {
            lane.template.link(device.scratch, device.scratch_lkey);
        }
        for peer in 0..queues.lanes.len() as u32 {
            // Nothing to post: this opens the lane.
            let _ = queues.pump(peer, outcomes);
        }
        queues
    }

    /// Puts a lane into the list of those to look at again.
    fn wait(&mut self, peer: u32) {
        if let Some(lane) = self.lanes.get_mut(peer as usize) {
            if !lane.waiting {
                lane.waiting = true;
                self.waiting.push(peer);
            }
        }
    }

    /// Makes room on an open lane that has reached its limit; whether there is some.
    pub fn reopen(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        // Not the others: completions would bring them nothing, and what waits behind a hint would be rung too early.
        if !self.lanes.get(peer as usize).is_some_and(|lane| lane.is_open() && lane.admits().is_none()) {
            return false;
        }
        self.advance(outcomes);
        let completed = outcomes.completed(peer);
        self.lanes.get_mut(peer as usize).is_some_and(|lane| lane.is_open() && lane.open(completed))
    }

    /// Takes one batch of completions and lets waiting lanes advance. Returns whether there were completions.
    #[inline(always)]
    pub fn advance(&mut self, outcomes: &Outcomes) -> bool {
        self.take(outcomes).unwrap_or_else(|taken| self.settle(taken, outcomes))
    }

    /// Ends a lane: what waits is dropped, everything unfinished fails. Its queue pair ends too, where no error
    /// completion has done that: what is posted must not touch memory after it was called failed, and the peer, whose
    /// operations nobody answers any more, must not wait for ever.
    #[cold]
    #[inline(never)]
    pub fn fail(&mut self, peer: u32, outcomes: &Outcomes, kind: Kind, sentence: impl FnOnce() -> String) {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        if lane.failed {
            // Work requests flushed behind the first error.
            return;
        }
        lane.failed = true;
        lane.shut(lane.issued());
        lane.backlog = Default::default();
        lane.loops = Default::default();
        if let Some(qp) = self.pairs.to(peer) {
            // A device that refuses this is one that does nothing more either.
            let _ = qp.modify(&ibv_qp_attr { qp_state: IBV_QPS_ERR, ..Default::default() }, IBV_QP_STATE);
        }
        outcomes.fail(peer, kind, sentence());
    }

    /// Whether every operation to `peer` is complete.
    fn is_idle(&self, peer: u32, outcomes: &Outcomes) -> bool {
        self.lanes.get(peer as usize).is_some_and(|lane| lane.issued() == outcomes.completed(peer))
    }

    /// The peer closed its end while nothing was unfinished: later operations fail.
    #[cold]
    fn close(&mut self, peer: u32, outcomes: &Outcomes) {
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return };
        if lane.failed {
            return;
        }
        lane.failed = true;
        lane.shut(lane.issued());
        outcomes.close(peer);
    }

    fn pump_all(&mut self, outcomes: &Outcomes) {
        let mut i = 0;
        while let Some(&peer) = self.waiting.get(i) {
            if self.pump(peer, outcomes) {
                i += 1;
                continue;
            }
            self.waiting.swap_remove(i);
            if let Some(lane) = self.lanes.get_mut(peer as usize) {
                lane.waiting = false;
            }
        }
    }

    /// Posts what waits on a lane as far as there is room; returns whether something still waits.
    #[must_use]
    fn pump(&mut self, peer: u32, outcomes: &Outcomes) -> bool {
        self.announce(peer, outcomes);
        while self.post_chain(peer, outcomes) {}
        let owes = self.messages.as_ref().is_some_and(|m| m.owes(peer));
        let by_message = self.messages.is_some();
        let Some(lane) = self.lanes.get_mut(peer as usize) else { return false };
        if lane.failed {
            return false;
        }
        lane.settle(outcomes.completed(peer));
        if !lane.backlog.is_empty() || lane.flushing || owes || lane.unconfirmed.is_some() {
            return true;
        }
        if lane.backlog.capacity() > 4096 {
            lane.backlog.shrink_to(64);
        }
        if !by_message && !self.device.confirms && !lane.is_open() && lane.unsignalled == 0 {
            lane.open(outcomes.completed(peer));
        }
        false
    }
}
