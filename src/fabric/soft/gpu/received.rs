//! What other processes put into this rank's GPU memory: it arrives in host memory and goes on by the rank's own
//! engine.

use super::arrived_bytes::ArrivedBytes;
use super::atomic::{AtomicStep, Cell, To};
use super::gpu_message::arrived_signal;
use super::op::CallerWindow;
use super::{Engine, Found, GpuMessage, Op, Owner, TransferEnd, Use};
use crate::error::Error;
use crate::fabric::soft::atomic::AtomicRequest;
use crate::fabric::soft::lane::Lane;
use crate::fabric::soft::refused::Refused;
use crate::memory::key::Key;
use crate::rma::op::Signal;
use crate::rma::seq::Seq;
use crate::sys::sync::Mutex;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::Arc;

/// Messages on their way into GPU memory before no more are read: 64 MiB of the largest.
const FULL: usize = 4096;
/// Lanes of one sender. Contexts beyond share them, which orders what need not be ordered, and fails together what came
/// while they shared one.
const LANES: usize = 64;

/// Who sent something.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Source {
    /// The sender.
    pub rank: u32,
    /// Its context; messages of one stay in order. Any number will do.
    pub context: u32,
    /// It came over TCP, and so does what it is told.
    pub by_tcp: bool,
}

impl Source {
    /// Through shared memory.
    pub fn near(rank: u32, context: u32) -> Self {
        Self { rank, context, by_tcp: false }
    }

    /// Over TCP.
    pub fn far(rank: u32, context: u32) -> Self {
        Self { rank, context, by_tcp: true }
    }
}

/// What a sender asks to be fetched from its GPU memory.
pub struct Pull {
    /// Bytes.
    pub len: u64,
    /// Its number among those of the sender's context.
    pub number: Seq,
    /// Key, address and value of a signal behind the bytes.
    pub signal: Option<(u32, u64, u64)>,
}

/// Those who sent something, and are told what became of it.
pub trait Senders {
    /// Everything up to pull `number` of a context of `rank` has been fetched.
    fn acknowledge(&self, rank: u32, context: u32, number: Seq);

    /// An atomic operation of a context of `rank` was carried out on a word that held `value`.
    fn answer(&self, rank: u32, context: u32, request: &AtomicRequest, value: u64);

    /// An operation is refused; nothing is touched for its context here any more.
    fn refuse(&self, source: Source, why: Error);
}

/// A sender's bytes on their way from its GPU memory, or (without a source) all that came of its context before.
struct Pulling {
    context: u32,
    behind: Seq,
    number: Seq,
    _source: Option<Use>,
}

/// Pulls of one lane, in their order.
struct Pulls {
    sender: u32,
    lane: Arc<Lane>,
    all: VecDeque<Pulling>,
}

/// A lane of a sender, and whose messages came on it. A lane that has failed is replaced by another one.
struct Strand {
    /// Its health is its own: what fails here is the sender's to learn, and the way to tell it stays open.
    lane: Arc<Lane>,
    /// Each with how it comes here.
    contexts: Vec<Source>,
}

impl Strand {
    fn new(rank: u32) -> Self {
        Self { lane: Arc::new(Lane::new(Lane::INTERNAL, rank, Arc::default())), contexts: Vec::new() }
    }
}

/// One rank's messages.
#[derive(Default)]
struct Sender {
    /// By context, as far as there was anything.
    strands: Vec<Option<Strand>>,
    /// What comes of them is dropped.
    refused: Refused,
}

impl Sender {
    /// The lane on which something of this sender's context is on its way.
    fn busy_lane(&self, source: Source) -> Option<Arc<Lane>> {
        let strand = self.strands.get(source.context as usize % LANES)?.as_ref()?;
        let is_busy = strand.contexts.contains(&source) && !strand.lane.is_idle();
        is_busy.then(|| strand.lane.clone())
    }
}

/// What a peer on another host is to be told once the engine has done it: an atomic operation, or all before a fence.
pub struct Answered {
    lane: Arc<Lane>,
    behind: Seq,
    cell: Arc<Cell>,
}

impl Answered {
    /// What its word held, or anything, once it is done and visible; `Err`: it never will be, as its sender is told.
    pub fn value(&self) -> crate::error::Result<Option<u64>> {
        Ok(self.lane.test(self.behind)?.then(|| self.cell.get()).flatten())
    }
}

/// A refusal that waits until nothing is copied for its context any more.
struct Owed {
    source: Source,
    lane: Arc<Lane>,
    behind: Seq,
    why: Error,
}

/// An atomic operation that the engine has not carried out yet.
struct Fetching {
    lane: Arc<Lane>,
    behind: Seq,
    source: Source,
    request: AtomicRequest,
    cell: Arc<Cell>,
}

/// Everything that arrived and is not in place yet. Used by whoever reads the inbox, one at a time.
pub struct Received {
    /// By rank, once it has sent something.
    senders: Box<[Mutex<Sender>]>,
    /// Something was on its way since `advance` last looked for failures.
    unseen: AtomicBool,
    backlog: Arc<AtomicUsize>,
    /// How many ever arrived.
    arrivals: AtomicU64,
    waiting: AtomicUsize,
    /// Of lanes that have some.
    pulls: Mutex<Vec<Pulls>>,
    fetches: Mutex<Vec<Fetching>>,
    owed: Mutex<Vec<Owed>>,
    is_owing: AtomicBool,
    /// Something was ever refused.
    any_refused: AtomicBool,
    /// The engine's refusals that were looked after.
    told: AtomicU64,
}

impl Received {
    /// None on its way yet, from any of `nranks`.
    pub fn new(nranks: usize) -> Self {
        Self {
            senders: (0..nranks).map(|_| Mutex::default()).collect(),
            unseen: AtomicBool::new(false),
            backlog: Arc::default(),
            arrivals: AtomicU64::new(0),
            waiting: AtomicUsize::new(0),
            pulls: Mutex::default(),
            fetches: Mutex::default(),
            owed: Mutex::default(),
            is_owing: AtomicBool::new(false),
            any_refused: AtomicBool::new(false),
            told: AtomicU64::new(0),
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

    /// Whether a signal has to come this way: something of its sender is on its way, or was refused for its context.
    pub fn has_before(&self, source: Source) -> bool {
        if !self.is_busy() && !self.any_refused.load(Ordering::Acquire) {
            return false;
        }
        self.senders.get(source.rank as usize).is_some_and(|sender| {
            let sender = sender.lock();
            sender.refused.has(source.context) || sender.strands.iter().flatten().any(|s| !s.lane.is_idle())
        })
    }

    /// What is on its way by now: lanes, each with its last number. A lane that fails is over, too.
    pub fn marks(&self) -> Vec<(Arc<Lane>, Seq)> {
        if !self.is_busy() {
            return Vec::new();
        }
        let mut marks = Vec::new();
        for sender in &self.senders {
            let sender = sender.lock();
            let busy = sender.strands.iter().flatten().filter(|s| !s.lane.is_idle());
            marks.extend(busy.map(|s| (s.lane.clone(), s.lane.last())));
        }
        marks
    }

    /// Whether so much is on its way that no more shall be read.
    pub fn is_full(&self) -> bool {
        self.backlog.load(Ordering::Relaxed) >= FULL
    }

    /// `None`: what comes of this context is dropped.
    fn owner(&self, source: Source) -> Option<Owner> {
        let mut sender = self.senders[source.rank as usize].lock();
        if sender.refused.has(source.context) {
            return None;
        }
        let at = source.context as usize % LANES;
        if sender.strands.len() <= at {
            sender.strands.resize_with(at + 1, || None);
        }
        let strand = sender.strands[at].get_or_insert_with(|| Strand::new(source.rank));
        if !strand.contexts.contains(&source) {
            if strand.contexts.len() >= LANES && strand.lane.is_idle() {
                strand.contexts.clear();
            }
            strand.contexts.push(source);
        }
        let lane = strand.lane.clone();
        let seq = lane.number();
        drop(sender);
        self.arrivals.fetch_add(1, Ordering::Relaxed);
        self.backlog.fetch_add(1, Ordering::SeqCst);
        self.unseen.store(true, Ordering::SeqCst);
        Some(Owner { lane, seq, backlog: self.backlog.clone() })
    }

    /// Bytes for a GPU window.
    pub fn put(&self, engine: &Engine, source: Source, bytes: Box<[u8]>, key: u32, addr: u64) {
        let bytes = ArrivedBytes::Boxed(bytes);
        if let Some(op) = self.operation(GpuMessage::Put { source, bytes, key, addr, signal: None }) {
            engine.submit_later(op);
        }
    }

    /// Several messages, in their order, which the engine takes together.
    pub fn take(&self, engine: &Engine, messages: impl Iterator<Item = GpuMessage>) {
        // Numbered without the engine's lock, which others want meanwhile.
        let ops: Vec<_> = messages.filter_map(|message| self.operation(message)).collect();
        engine.submit_all_later(ops.into_iter());
    }

    /// The next operation of its sender. `None`: what comes of its context is dropped.
    fn operation(&self, message: GpuMessage) -> Option<Op> {
        match message {
            GpuMessage::Put { source, bytes, key, addr, signal } => {
                Some(Op { signal, ..Op::received(self.owner(source)?, bytes, key, addr) })
            }
            GpuMessage::Signal { source, key, addr, value } => {
                Some(Op::signalled(self.owner(source)?, arrived_signal(key, addr, value)))
            }
        }
    }

    /// Bytes of a get of this rank's own for a GPU window, an operation of `lane`. `false`: so much is on its way that
    /// they have to wait.
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
        engine.submit_later(Op::received(owner, ArrivedBytes::Boxed(bytes()), key, addr));
        true
    }

    /// A signal in GPU memory, or behind bytes for it.
    pub fn signal(&self, engine: &Engine, source: Source, key: u32, addr: u64, value: u64) {
        if let Some(op) = self.operation(GpuMessage::Signal { source, key, addr, value }) {
            engine.submit_later(op);
        }
    }

    /// An atomic operation on a word in GPU memory, or behind bytes for it. Its sender is answered once it is carried
    /// out: one of this host by `advance`, another by whoever looks into what this returns. `None`: what comes of its
    /// context is dropped.
    pub fn atomic(
        &self,
        engine: &Engine,
        source: Source,
        (key, addr): (u32, u64),
        request: AtomicRequest,
    ) -> Option<Answered> {
        let owner = self.owner(source)?;
        let (cell, lane, behind) = (Arc::<Cell>::default(), owner.lane.clone(), owner.seq);
        let AtomicRequest { change, width, .. } = request;
        if !source.by_tcp {
            self.waiting.fetch_add(1, Ordering::Relaxed);
            let (lane, cell) = (lane.clone(), cell.clone());
            self.fetches.lock().push(Fetching { lane, behind, source, request, cell });
        }
        let to = To::Cell(cell.clone());
        engine.submit_later(Op::fetching(owner, AtomicStep { change, width, key: Key(key).signalled().0, addr, to }));
        Some(Answered { lane, behind, cell })
    }

    /// Bytes for a GPU window that lie in memory which the sender shares.
    pub fn pull(&self, engine: &Engine, source: Source, to: (u32, u64), request: &Pull, from: Found) {
        let Some(owner) = self.owner(source) else { return };
        let (context, number) = (source.context, request.number);
        let pull = Pulling { context, behind: owner.seq, number, _source: Some(from.used) };
        self.await_end(source.rank, &owner.lane, pull);
        let (window, home) = (Some(CallerWindow { rank: source.rank, key: from.window }), Some(from.named));
        let (from, to) =
            (TransferEnd::Caller { addr: from.addr, gpu: true }, TransferEnd::Window { key: to.0, addr: to.1 });
        let signal = request.signal.map(|(rkey, remote, value)| Signal { remote, rkey, value, strong: true });
        // It was mapped for the GPU that copies it.
        engine.submit_later(Op { signal, window, home, is_open: true, ..Op::copy(owner, from, to, request.len) });
    }

    /// A pull, or a fence, that its sender is told of when it is done.
    fn await_end(&self, sender: u32, lane: &Arc<Lane>, pull: Pulling) {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        let mut pulls = self.pulls.lock();
        match pulls.iter_mut().find(|of| Arc::ptr_eq(&of.lane, lane)) {
            Some(of) => of.all.push_back(pull),
            None => pulls.push(Pulls { sender, lane: lane.clone(), all: VecDeque::from([pull]) }),
        }
    }

    /// The sender wants to know when all that came of its context before is in place. What is for host memory is.
    pub fn fence(&self, senders: &impl Senders, source: Source, number: Seq) {
        let lane = self.senders[source.rank as usize].lock().busy_lane(source);
        let context = source.context;
        match lane {
            None => senders.acknowledge(source.rank, context, number),
            Some(lane) => {
                let behind = lane.last();
                self.await_end(source.rank, &lane, Pulling { context, behind, number, _source: None });
            }
        }
    }

    /// What came of a context over TCP before, until it is in place; `None`: it is, as what is for host memory is.
    pub fn in_place(&self, source: Source) -> Option<Answered> {
        let lane = self.senders[source.rank as usize].lock().busy_lane(source)?;
        Some(Answered { behind: lane.last(), lane, cell: Arc::new(Cell::holding(0)) })
    }

    /// Acknowledges the pulls that are done. `advance` tells the sender of one that failed.
    fn finish_pulls(&self, senders: &impl Senders) -> bool {
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
            senders.acknowledge(sender, context, number);
        }
        !done.is_empty()
    }

    /// Answers atomic operations that are done. `advance` tells the sender of one that failed.
    fn finish_fetches(&self, senders: &impl Senders) -> bool {
        let mut done = Vec::new();
        self.fetches.lock().retain(|f| {
            match f.lane.test(f.behind) {
                Ok(false) => return true,
                Ok(true) => done.extend(f.cell.get().map(|value| (f.source, f.request, value))),
                Err(_) => {}
            }
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            false
        });
        for (source, request, value) in &done {
            senders.answer(source.rank, source.context, request, *value);
        }
        !done.is_empty()
    }

    /// Refuses an operation of a context: its sender is told once nothing is copied for that one here any more.
    #[cold]
    pub fn refuse(&self, senders: &impl Senders, source: Source, why: Error) {
        let mut sender = self.senders[source.rank as usize].lock();
        sender.refused.add(source.context);
        self.any_refused.store(true, Ordering::Release);
        let lane = sender.busy_lane(source);
        drop(sender);
        match lane {
            None => senders.refuse(source, why),
            Some(lane) => {
                self.waiting.fetch_add(1, Ordering::Relaxed);
                let behind = lane.last();
                self.owed.lock().push(Owed { source, lane, behind, why });
                self.is_owing.store(true, Ordering::SeqCst);
            }
        }
    }

    /// Tells senders what was refused, here and by the engine.
    #[cold]
    fn tell_refused(&self, senders: &impl Senders) {
        // Told without any lock.
        let mut due = Vec::new();
        let mut owed = self.owed.lock();
        owed.retain(|owed| {
            let waits = matches!(owed.lane.test(owed.behind), Ok(false));
            if !waits {
                self.waiting.fetch_sub(1, Ordering::Relaxed);
                due.push((owed.source, owed.why.clone()));
            }
            waits
        });
        self.is_owing.store(!owed.is_empty(), Ordering::SeqCst);
        drop(owed);
        for sender in &self.senders {
            let mut sender = sender.lock();
            for at in 0..sender.strands.len() {
                let Some(Err(why)) = sender.strands[at].as_ref().map(|s| s.lane.check()) else { continue };
                let Some(strand) = sender.strands[at].take() else { continue };
                for source in strand.contexts {
                    if sender.refused.add(source.context) {
                        log::info!("refused for context {} of rank {}: {}", source.context, source.rank, why.message());
                        due.push((source, why.clone()));
                    }
                }
                self.any_refused.store(true, Ordering::Release);
            }
        }
        due.into_iter().for_each(|(source, why)| senders.refuse(source, why));
    }

    /// Moves what can move. Returns whether anything is under way.
    #[cold]
    pub fn advance(&self, engine: &Engine, senders: &impl Senders) -> bool {
        let moving = engine.poll();
        // A failure is there before the count falls (`Owner::give_up`). What comes after the first store sets the flag
        // itself.
        self.unseen.store(false, Ordering::SeqCst);
        if self.backlog.load(Ordering::SeqCst) != 0 {
            self.unseen.store(true, Ordering::SeqCst);
        }
        let told = engine.refusals();
        if self.told.swap(told, Ordering::SeqCst) != told || self.is_owing.load(Ordering::Relaxed) {
            self.tell_refused(senders);
        }
        if self.waiting.load(Ordering::Relaxed) == 0 {
            return moving;
        }
        self.finish_pulls(senders) | self.finish_fetches(senders) || moving
    }
}
