//! What other processes put into this rank's GPU memory: it arrives in host memory and goes on by the rank's own engine.

use super::{Engine, Op, Owner, Side};
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::link::Link;
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::BEHIND_GPU_BIT;
use crate::rma::op::Signal;
use crate::rma::seq::Seq;
use crate::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
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

/// Everything that arrived and is not in place yet. Used by whoever reads the inbox, one at a time.
pub struct Received {
    /// By sender.
    lanes: Box<[Arc<Lane>]>,
    backlog: Arc<AtomicUsize>,
    waiting: AtomicUsize,
    gets: Mutex<Vec<WaitingGet>>,
}

impl Received {
    /// Nothing yet.
    pub fn new(links: &[Link]) -> Self {
        let lane = |l: &Link| Arc::new(Lane::new(u32::MAX, l.peer, l.health.clone()));
        Self {
            lanes: links.iter().map(lane).collect(),
            backlog: Arc::default(),
            waiting: AtomicUsize::new(0),
            gets: Mutex::default(),
        }
    }

    /// Whether anything is on its way.
    #[inline]
    pub fn is_busy(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) != 0 || self.waiting.load(Ordering::Relaxed) != 0
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
        let moving = shared.engine.poll();
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return moving;
        }
        let mut done = Vec::new();
        self.gets.lock().retain(|g| match self.lanes[g.sender as usize].test(g.behind) {
            Ok(false) => true,
            Ok(true) => {
                done.push((g.sender, g.slot, g.seq));
                false
            }
            // The link has failed, and the get with it.
            Err(_) => {
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
}
