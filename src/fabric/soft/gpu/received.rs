//! What other processes put into this rank's GPU memory: it arrives in host memory and goes on by the rank's own engine.

use super::op::CallerWindow;
use super::share::{Found, Use};
use super::{Engine, Op, Owner, Side};
use crate::fabric::soft::lane::{Health, Lane};
use crate::fabric::soft::link::Link;
use crate::fabric::soft::local::message::PullRequest;
use crate::fabric::soft::shared::Shared;
use crate::memory::gpu::BEHIND_GPU_BIT;
use crate::rma::op::Signal;
use crate::rma::seq::Seq;
use crate::sync::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};

/// Messages on their way into GPU memory before no more are read: 64 MiB of the largest.
const FULL: usize = 4096;
/// Lanes of one sender. Contexts beyond share them, which orders what need not be ordered; the engine does not look
/// further back for something to join either (`LOOK_BACK`).
const LANES: usize = 16;

/// Who sent something. A rank's number stands for what it sends without a context.
#[derive(Clone, Copy)]
pub struct Source {
    /// The rank.
    pub rank: u32,
    /// Its number for the context; messages of one context stay in order. Any number will do.
    pub context: u32,
}

impl From<u32> for Source {
    fn from(rank: u32) -> Self {
        Self { rank, context: 0 }
    }
}

/// A sender's bytes on their way from its GPU memory.
struct Pull {
    context: u32,
    behind: Seq,
    number: Seq,
    _source: Use,
}

/// Pulls of one lane, in their order.
struct Pulls {
    sender: u32,
    lane: Arc<Lane>,
    all: VecDeque<Pull>,
}

/// One rank's messages.
struct Sender {
    /// By context. Their health is their own: what fails here is the sender's to learn, and the way to tell it stays
    /// open.
    lanes: [Arc<Lane>; LANES],
    health: Arc<Health>,
    /// It was told.
    told: AtomicBool,
}

impl Sender {
    fn new(rank: u32) -> Self {
        let health: Arc<Health> = Arc::default();
        let lane = |_| Arc::new(Lane::new(u32::MAX, rank, health.clone()));
        Self { lanes: std::array::from_fn(lane), health, told: AtomicBool::new(false) }
    }

    /// Tells it, once, that what it put here found no place.
    #[cold]
    fn refuse(&self, shared: &Shared, rank: u32) {
        if let (Err(why), false) = (self.health.check(), self.told.swap(true, Ordering::Relaxed)) {
            shared.link(rank).refuse(shared, why.message().to_string());
        }
    }
}

/// Everything that arrived and is not in place yet. Used by whoever reads the inbox, one at a time.
pub struct Received {
    /// By rank, once it has sent something.
    senders: Box<[OnceLock<Box<Sender>>]>,
    /// Something was on its way since `advance` last looked for failures.
    unseen: AtomicBool,
    backlog: Arc<AtomicUsize>,
    /// How many ever arrived.
    arrivals: AtomicU64,
    waiting: AtomicUsize,
    /// Of lanes that have some.
    pulls: Mutex<Vec<Pulls>>,
}

impl Received {
    /// Nothing yet.
    pub fn new(links: &[Link]) -> Self {
        Self {
            senders: links.iter().map(|_| OnceLock::new()).collect(),
            unseen: AtomicBool::new(false),
            backlog: Arc::default(),
            arrivals: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
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

    /// How many operations of other processes have ever arrived.
    pub fn arrivals(&self) -> u64 {
        self.arrivals.load(Ordering::Relaxed)
    }

    /// Whether anything of this sender is on its way.
    pub fn is_busy_with(&self, sender: u32) -> bool {
        let sender = || self.senders.get(sender as usize)?.get();
        self.is_busy() && sender().is_some_and(|s| s.lanes.iter().any(|lane| !lane.is_idle()))
    }

    /// Whether something of this sender has failed: its copies that are still on their way are not counted any more.
    pub fn has_failed(&self, sender: u32) -> bool {
        let sender = self.senders.get(sender as usize).and_then(OnceLock::get);
        sender.is_some_and(|s| s.health.has_failed())
    }

    /// Whether so much is on its way that no more shall be read.
    pub fn is_full(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) >= FULL
    }

    fn owner(&self, source: Source) -> Owner {
        let sender = self.senders[source.rank as usize].get_or_init(|| Box::new(Sender::new(source.rank)));
        let lane = sender.lanes[source.context as usize % LANES].clone();
        let seq = lane.number();
        self.arrivals.fetch_add(1, Ordering::Relaxed);
        self.backlog.fetch_add(1, Ordering::SeqCst);
        self.unseen.store(true, Ordering::SeqCst);
        Owner { lane, seq, backlog: self.backlog.clone() }
    }

    /// Bytes for a GPU window.
    pub fn put(&self, engine: &Engine, source: impl Into<Source>, bytes: Box<[u8]>, key: u32, addr: u64) {
        engine.submit_later(Op::received(self.owner(source.into()), bytes, key, addr));
    }

    /// Bytes of a get of this rank's own for a GPU window, an operation of `lane`. `false`: so much is on its way that they
    /// have to wait.
    pub fn fetched(
        &self,
        engine: &Engine,
        lane: &Arc<Lane>,
        bytes: impl FnOnce() -> Box<[u8]>,
        key: u32,
        addr: u64,
    ) -> bool {
        if self.is_full() {
            return false;
        }
        self.backlog.fetch_add(1, Ordering::SeqCst);
        let owner = Owner { lane: lane.clone(), seq: lane.number(), backlog: self.backlog.clone() };
        engine.submit_later(Op::received(owner, bytes(), key, addr));
        true
    }

    /// A signal in GPU memory, or behind bytes for it.
    pub fn signal(&self, engine: &Engine, source: impl Into<Source>, key: u32, addr: u64, value: u64) {
        let signal = Signal { remote: addr, rkey: key & !BEHIND_GPU_BIT, value, strong: true };
        engine.submit_later(Op::signalled(self.owner(source.into()), signal));
    }

    /// Bytes for a GPU window that lie in memory which the sender shares.
    pub fn pull(&self, engine: &Engine, source: Source, to: (u32, u64), request: &PullRequest, from: Found) {
        let owner = self.owner(source);
        let (context, number) = (source.context, Seq(request.number));
        let pull = Pull { context, behind: owner.seq, number, _source: from.used };
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut pulls = self.pulls.lock();
        match pulls.iter_mut().find(|of| Arc::ptr_eq(&of.lane, &owner.lane)) {
            Some(of) => of.all.push_back(pull),
            None => pulls.push(Pulls { sender: source.rank, lane: owner.lane.clone(), all: VecDeque::from([pull]) }),
        }
        drop(pulls);
        let (window, home) = (Some(CallerWindow { rank: source.rank, key: from.window }), Some(from.home));
        let (from, to) = (Side::Caller { addr: from.addr, gpu: true }, Side::Window { key: to.0, addr: to.1 });
        let signal = request.signal.map(|(rkey, remote, value)| Signal { remote, rkey, value, strong: true });
        // It was mapped for the GPU that copies it.
        engine.submit_later(Op { signal, window, home, is_open: true, ..Op::copy(owner, from, to, request.len) });
    }

    /// Acknowledges the pulls that are done. `advance` tells the sender of one that failed.
    fn finish_pulls(&self, shared: &Shared) -> bool {
        // Senders' contexts, each with its last number.
        let mut done: Vec<(u32, u32, Seq)> = Vec::new();
        self.pulls.lock().retain_mut(|of| {
            while let Some(pull) = of.all.front() {
                match of.lane.test(pull.behind) {
                    Ok(false) => break,
                    Ok(true) => match done.iter_mut().rev().find(|d| (d.0, d.1) == (of.sender, pull.context)) {
                        Some((_, _, number)) => *number = pull.number,
                        None => done.push((of.sender, pull.context, pull.number)),
                    },
                    Err(_) => {}
                }
                of.all.pop_front();
                self.waiting.fetch_sub(1, Ordering::Relaxed);
            }
            !of.all.is_empty()
        });
        for &(sender, context, number) in &done {
            shared.link(sender).acknowledge(shared, context, number);
        }
        !done.is_empty()
    }

    /// Moves what can move. Returns whether anything is under way.
    #[cold]
    pub fn advance(&self, shared: &Shared) -> bool {
        let moving = shared.engine.poll();
        // A failure is there before the count falls (`Owner::give_up`). What comes after the first store sets the flag itself.
        self.unseen.store(false, Ordering::SeqCst);
        if self.backlog.load(Ordering::SeqCst) != 0 {
            self.unseen.store(true, Ordering::SeqCst);
        }
        let known = self.senders.iter().zip(0..).filter_map(|(s, rank)| Some((s.get()?, rank)));
        known.filter(|(s, _)| s.health.has_failed()).for_each(|(s, rank)| s.refuse(shared, rank));
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return moving;
        }
        self.finish_pulls(shared) || moving
    }
}
