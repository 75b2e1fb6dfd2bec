//! Operations that take the long way: behind what waits already, behind a `more` hint, or several at once.

use super::super::atomic::{is_plain, Wanted};
use super::super::bounce::Bounce;
use super::super::lane::{Lane, Op};
use super::super::outcome::Outcomes;
use super::super::regions::DeviceRegions;
use super::chain::CHAIN;
use super::Queues;
use crate::fabric::Posted;
use crate::rma::atomic::Change;
use crate::rma::op;
use crate::rma::seq::Seq;

/// Operations to one peer, and what it takes to queue them.
#[derive(Clone, Copy)]
pub struct PostBatch<'a> {
    /// Them.
    pub ops: &'a [op::Op],
    /// Where payloads go, and what comes back for atomic operations; there if any needs it.
    pub bounce: Option<&'a Bounce>,
    /// Windows in device memory.
    pub regions: &'a DeviceRegions,
    /// Operations that may wait in the lane.
    pub limit: usize,
}

impl Queues {
    /// Takes operations of a batch while there is room, and rings once for all.
    pub fn enqueue_all(&mut self, peer: u32, batch: &PostBatch<'_>, outcomes: &Outcomes) -> Option<Posted> {
        let inline = self.device.max_inline;
        let lane = self.lanes.get_mut(peer as usize)?;
        let mut posted = Posted::NONE;
        for op in batch.ops {
            let Some(entry) = lane.entry(peer, op, batch, inline, outcomes) else { break };
            posted = Posted { taken: posted.taken + 1, last: lane.push(entry) };
            lane.count(op.len());
            let brought = match op {
                op::Op::Get(get) if get.len > 0 => Some((get.local, get.lkey)),
                op::Op::Atomic(atomic) => atomic.fetched.map(|f| (f.local, f.lkey)),
                _ => None,
            };
            if let Some((at, lkey)) = brought.filter(|_| batch.regions.any()) {
                batch.regions.note(&mut lane.brought, at, lkey);
            }
        }
        if posted.taken > 0 {
            let more = batch.ops.get(posted.taken - 1).is_some_and(op::Op::more);
            let held = more && lane.backlog.len() < CHAIN;
            if held || self.pump(peer, outcomes) {
                self.wait(peer);
            }
        }
        Some(posted)
    }

    /// Takes one operation that is no caller's; `None`: no room, or no such peer.
    pub fn enqueue(&mut self, peer: u32, op: Op, limit: usize, outcomes: &Outcomes) -> Option<Seq> {
        let lane = self.lanes.get_mut(peer as usize).filter(|lane| lane.backlog.len() < limit)?;
        let seq = lane.push(op);
        if self.pump(peer, outcomes) {
            self.wait(peer);
        }
        Some(seq)
    }
}

impl Lane {
    /// The queue's entry for an operation; `None`: no room for it.
    fn entry(&mut self, peer: u32, op: &op::Op, batch: &PostBatch<'_>, inline: u32, outcomes: &Outcomes) -> Option<Op> {
        if self.backlog.len() >= batch.limit {
            return None;
        }
        match op {
            op::Op::Put(put) => Some(Op::put(put)),
            op::Op::Get(get) => Some(Op::get(get)),
            op::Op::Value(value) => {
                let place = self.bounce_place(peer, inline, outcomes)?;
                let (local, lkey) = batch.bounce?.keep(peer, place, &value.payload)?;
                self.values.take(self.issued().wrapping_add(1));
                Some(Op::value(value, local, lkey))
            }
            op::Op::Atomic(atomic) => match atomic.change {
                Change::FetchAdd { add, .. } if is_plain(atomic) => Some(Op::fetch_add(atomic, add)),
                _ => {
                    let place = self.bounce_place(peer, inline, outcomes)?;
                    let (local, lkey) = batch.bounce?.slot(peer, place)?;
                    self.values.take(self.issued().wrapping_add(1));
                    let device = atomic.fetched.filter(|_| batch.regions.any());
                    let device = device.and_then(|to| batch.regions.rkey(to.lkey));
                    self.loops.waiting.push_back(Wanted { atomic: *atomic, device });
                    Some(Op::looped(atomic, local, lkey))
                }
            },
        }
    }

    /// A free place in the bounce area. What every place's payload fits inline for needs its place only until it is
    /// posted; an atomic operation counts as posted when it is complete.
    fn bounce_place(&mut self, peer: u32, inline: u32, outcomes: &Outcomes) -> Option<usize> {
        let gone = match inline as usize >= op::VALUE_MAX {
            false => outcomes.completed(peer),
            true if self.is_open() => self.issued(),
            true => self.sent,
        };
        let issued = self.issued();
        self.values.place(gone, issued)
    }

    /// Queues an entry behind all others; returns its number.
    fn push(&mut self, op: Op) -> Seq {
        self.shut(self.issued());
        let seq = Seq(self.number());
        self.backlog.push_back(op);
        seq
    }
}
