//! What other processes put into this rank's GPU memory: it arrives in host memory and goes on by the rank's own engine.

use super::share::Use;
use super::{Engine, Op, Owner, Side};
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::link::Link;
use crate::fabric::soft::local::message::PullRequest;
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::BEHIND_GPU_BIT;
use crate::rma::op::Signal;
use crate::rma::seq::Seq;
use crate::sync::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::Arc;

/// Messages on their way into GPU memory before no more are read: 64 MiB of the largest.
const FULL: usize = 4096;

/// A get whose last bytes are on their way into GPU memory.
struct WaitingGet {
    behind: Seq,
    sender: u32,
    slot: u32,
    seq: Seq,
}

/// A sender's bytes on their way from its GPU memory.
struct Pull {
    behind: Seq,
    sender: u32,
    number: Seq,
    _source: Use,
}

/// Everything that arrived and is not in place yet. Used by whoever reads the inbox, one at a time.
pub struct Received {
    /// By sender. A lane's health is its own: what fails here is the sender's to learn, and the way to tell it stays
    /// open.
    lanes: Box<[Arc<Lane>]>,
    /// Senders that were told.
    told: Box<[AtomicBool]>,
    /// Something was on its way since `advance` last looked for failures.
    unseen: AtomicBool,
    backlog: Arc<AtomicUsize>,
    waiting: AtomicUsize,
    gets: Mutex<Vec<WaitingGet>>,
    /// In their order, which is that of the engine.
    pulls: Mutex<VecDeque<Pull>>,
}

impl Received {
    /// Nothing yet.
    pub fn new(links: &[Link]) -> Self {
        let lane = |l: &Link| Arc::new(Lane::new(u32::MAX, l.peer, Arc::default()));
        Self {
            lanes: links.iter().map(lane).collect(),
            told: links.iter().map(|_| AtomicBool::new(false)).collect(),
            unseen: AtomicBool::new(false),
            backlog: Arc::default(),
            waiting: AtomicUsize::new(0),
            gets: Mutex::default(),
            pulls: Mutex::default(),
        }
    }

    /// Whether anything is on its way.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) != 0
            || self.waiting.load(Ordering::Relaxed) != 0
            || self.unseen.load(Ordering::Relaxed)
    }

    /// Whether anything of this sender is on its way.
    pub fn is_busy_with(&self, sender: u32) -> bool {
        self.is_busy() && self.lanes.get(sender as usize).is_some_and(|lane| !lane.is_idle())
    }

    /// Whether so much is on its way that no more shall be read.
    pub fn is_full(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) >= FULL
    }

    fn owner(&self, sender: u32) -> Owner {
        let lane = self.lanes[sender as usize].clone();
        let seq = lane.number();
        self.backlog.fetch_add(1, Ordering::Relaxed);
        self.unseen.store(true, Ordering::Relaxed);
        Owner { lane, seq, backlog: self.backlog.clone() }
    }

    /// Bytes for a GPU window.
    pub fn put(&self, engine: &Engine, sender: u32, bytes: Box<[u8]>, key: u32, addr: u64) {
        engine.submit_later(Op::received(self.owner(sender), bytes, key, addr));
    }

    /// A signal in GPU memory, or behind bytes for it.
    pub fn signal(&self, engine: &Engine, sender: u32, key: u32, addr: u64, value: u64) {
        let signal = Signal { remote: addr, rkey: key & !BEHIND_GPU_BIT, value, strong: true };
        engine.submit_later(Op::signalled(self.owner(sender), signal));
    }

    /// Bytes for a GPU window that lie in memory which the sender shares, at `from`.
    pub fn pull(&self, engine: &Engine, sender: u32, to: (u32, u64), request: &PullRequest, from: u64, source: Use) {
        let owner = self.owner(sender);
        let pull = Pull { behind: owner.seq, sender, number: Seq(request.number), _source: source };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        self.pulls.lock().push_back(pull);
        let (from, to) = (Side::Caller { addr: from, gpu: true }, Side::Window { key: to.0, addr: to.1 });
        let signal = request.signal.map(|(rkey, remote, value)| Signal { remote, rkey, value, strong: true });
        // It was mapped for the GPU that copies it.
        engine.submit_later(Op { signal, is_open: true, ..Op::copy(owner, from, to, request.len) });
    }

    /// Acknowledges the pulls that are done. `advance` tells the sender of one that failed.
    fn finish_pulls(&self, shared: &Shared) -> bool {
        let mut done: Vec<(u32, Seq)> = Vec::new();
        {
            let mut pulls = self.pulls.lock();
            while let Some(pull) = pulls.front() {
                match self.lanes[pull.sender as usize].test(pull.behind) {
                    Ok(false) => break,
                    Ok(true) => match done.iter_mut().find(|(sender, _)| *sender == pull.sender) {
                        Some((_, number)) => *number = pull.number,
                        None => done.push((pull.sender, pull.number)),
                    },
                    Err(_) => {}
                }
                pulls.pop_front();
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
        }
        for &(sender, number) in &done {
            shared.link(sender).acknowledge(shared, number);
        }
        !done.is_empty()
    }

    /// The end of a get's data. `false`: nothing is on its way, the get is done.
    pub fn get_done(&self, engine: &Engine, sender: u32, slot: u32, seq: Seq) -> bool {
        if !self.is_busy() {
            return false;
        }
        let owner = self.owner(sender);
        self.gets.lock().push(WaitingGet { behind: owner.seq, sender, slot, seq });
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let nowhere = Side::Caller { addr: 0, gpu: false };
        engine.submit_later(Op::copy(owner, nowhere, nowhere, 0));
        true
    }

    /// Moves what can move. Returns whether anything is under way.
    #[cold]
    pub fn advance(&self, shared: &Shared) -> bool {
        let mut moving = shared.engine.poll();
        // A failure is there before the count falls (`Owner::give_up`).
        self.unseen.store(self.backlog.load(Ordering::Acquire) != 0, Ordering::Relaxed);
        self.lanes.iter().filter(|lane| lane.health.has_failed()).for_each(|lane| self.refuse(shared, lane));
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return moving;
        }
        moving |= self.finish_pulls(shared);
        let mut done = Vec::new();
        self.gets.lock().retain(|g| match self.lanes[g.sender as usize].test(g.behind) {
            Ok(false) => true,
            Ok(true) => {
                done.push((g.sender, g.slot, g.seq));
                false
            }
            // The data of a get of this rank's own found no place.
            Err(why) => {
                shared.link(g.sender).health.fail(why);
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                false
            }
        });
        for &(sender, slot, seq) in &done {
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            shared.link(sender).get_done(shared, slot, seq);
        }
        moving || !done.is_empty()
    }

    /// Tells a sender, once, that what it put here found no place.
    #[cold]
    fn refuse(&self, shared: &Shared, lane: &Lane) {
        if let (Err(why), false) = (lane.health.check(), self.told[lane.peer as usize].swap(true, Ordering::Relaxed)) {
            shared.link(lane.peer).refuse(shared, why.message().to_string());
        }
    }
}
