//! Sets of contexts of the software NIC: queue pairs that device code of NCCL's GDAKI backend writes itself, drained by
//! the communicator's engine.

use super::capture::captured;
use super::coll::Coll;
use super::contexts::{Contexts, EngineKind};
use super::credits::{CreditKey, CreditWords};
use super::device_queues::{allocate_signals, check_numbers, signal_words, work, DeviceQueues, QueueState, Share};
use super::fabrics::on_queues;
use super::gdaki::DeviceImage;
use super::windows::WindowSpec;
use crate::config::Ringing;
use crate::error::{Error, Result};
use crate::fabric::lanes::{Holds, DOORBELL_ROOM, TOGETHER};
use crate::fabric::{Context, ContextSpec, World};
use crate::gdaki::entry::ENTRY_BYTES;
use crate::gdaki::soft::doorbell::DoorbellWords;
use crate::gdaki::soft::keys::SINK;
use crate::gdaki::soft::meaning::{Counts, Terms};
use crate::gdaki::soft::queue::{QueuePairAddresses, SendQueue, SLOTS_MAX};
use crate::gdaki::soft::{PairView, QueueView, SetView, TableView};
use crate::gdaki::view::{Layout, SetShape};
use crate::proxy::credits::CreditWord;
use crate::proxy::engine::{Engine, WorkId};
use crate::proxy::lane::{Common, Lane};
use crate::proxy::memory::{Block, Memory};
use crate::proxy::meter::{Meter, Metered};
use crate::rma::seq::Seq;
use crate::sys::handles::Reserved;
use crate::telemetry::stats::layout::Way;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

/// Slots of a queue where none were asked for, as NCCL has it.
const SLOTS: u32 = 128;
/// Room of a doorbell, and where its record is in it: nobody else's queue is in the same cache line.
const BELL: usize = DOORBELL_ROOM as usize;
const RECORD_IN_BELL: usize = BELL / 2;
/// Numbers of queue pairs: they have 24 bits, and 0 is what a doorbell is before it is rung.
const FIRST: u32 = 1;
const NUMBERS: usize = 1 << 24;

/// What is asked of a set.
#[derive(Clone, Copy, Debug)]
pub struct NicSpec {
    /// Contexts, their depth at the fabric and traffic class.
    pub contexts: ContextSpec,
    /// Slots of each send queue, as asked; 0: as many as NCCL takes.
    pub depth: i32,
    /// Signals a context.
    pub signals: u32,
    /// Counters a context; 0: no companions.
    pub counters: u32,
    /// How device code rings.
    pub handler: Ringing,
    /// In which structures device code is to find it all; `None`: in none, whoever asks knows it from the view.
    pub layout: Option<Layout>,
}

impl NicSpec {
    /// The ranks and contexts by which its queue pairs and device code's structures are laid out.
    pub(super) fn shape(&self, world: World) -> SetShape {
        SetShape {
            rank: world.rank,
            ranks: world.nranks,
            stride: self.contexts.rank_stride,
            contexts: self.contexts.contexts,
        }
    }
}

/// Slots of a send queue, a power of two.
pub(super) fn slots(depth: i32) -> Result<u32> {
    match u32::try_from(depth) {
        Ok(0) => Ok(SLOTS),
        Ok(n) if n <= SLOTS_MAX => Ok(n.next_power_of_two()),
        _ => Err(Error::argument(format!("queueDepth = {depth}; a queue has 1 to {SLOTS_MAX} entries"))),
    }
}

/// Queues of one kind, to peers or companions: what device code writes, and what it is told.
struct SendBlocks {
    slots: Block,
    /// What is rung; a doorbell with its record.
    bells: Block,
    completions: Block,
}

/// Where things lie in a set's memory.
struct QueuePairBlocks {
    memory: Arc<Memory>,
    /// Of the queues to peers, and of companions, which are drained apart: who looks at the ones does not touch the
    /// others' memory.
    sends: Vec<SendBlocks>,
    counters: Block,
    signals: u64,
    size: u32,
    bell_bytes: usize,
    handler: Ringing,
    /// Peers that are reached, and the distance of their ranks.
    peers: usize,
    stride: usize,
    /// Queues of a (context, peer): 1, or 2 with the companion.
    of_pair: usize,
    image: Option<DeviceImage>,
    /// Kernels of peers may add to signals by themselves, from their GPUs.
    has_visitors: bool,
}

impl QueuePairBlocks {
    fn allocate(spec: &NicSpec, world: World, has_visitors: bool, has_managed: bool) -> Result<Self> {
        check_numbers(spec.contexts.contexts, spec.counters, spec.signals)?;
        let (n, size) = (spec.contexts.contexts as usize, slots(spec.depth)?);
        let of_pair = if spec.counters > 0 { 2 } else { 1 };
        let peers = (0..world.nranks).filter(|&peer| spec.contexts.reaches(world, peer)).count();
        let queues = n * peers * of_pair;
        if queues >= NUMBERS {
            return Err(Error::argument(format!("nContexts = {n} makes {queues} queue pairs, of {NUMBERS} numbers")));
        }
        let mut memory = Memory::here()?;
        let bell_bytes = (8 * spec.handler.words(size)).next_multiple_of(BELL);
        let signals = allocate_signals(&mut memory, n, spec.signals, has_visitors)?;
        let of_kind = n * peers;
        let has_managed = has_managed && of_kind <= TOGETHER;
        let bytes = of_kind * size as usize * ENTRY_BYTES;
        let mut sends = |which: usize| -> Result<SendBlocks> {
            let is_managed = has_managed && which == 0;
            Ok(SendBlocks {
                slots: memory.queues(bytes, is_managed)?,
                bells: memory.queues(of_kind * bell_bytes, is_managed)?,
                // Where completions are counted device code does not look there.
                completions: memory.queues(bytes, is_managed && spec.handler == Ringing::Doorbell)?,
            })
        };
        let sends = (0..of_pair).map(&mut sends).collect::<Result<_>>()?;
        Ok(Self {
            sends,
            counters: memory.shared(8 * n * spec.counters as usize)?,
            signals,
            image: match spec.layout {
                Some(layout) => Some(DeviceImage::allocate(layout, spec, world, &mut memory)?),
                None => None,
            },
            memory: Arc::new(memory),
            size,
            bell_bytes,
            handler: spec.handler,
            peers,
            stride: spec.contexts.rank_stride.max(1) as usize,
            of_pair,
            has_visitors,
        })
    }

    /// Queues.
    fn queues(&self, contexts: usize) -> usize {
        contexts * self.peers * self.of_pair
    }

    /// Number of a queue among the set's, to a peer that is reached; `which`: 0, or 1 for the companion. Device code is
    /// told of each queue where it is, so those that nobody can use are not there.
    fn number(&self, context: usize, peer: u32, which: usize) -> usize {
        (context * self.peers + peer as usize / self.stride) * self.of_pair + which
    }

    /// Where device code counts completions of a queue, if they are counted for it: where it knows that, and can be
    /// told in its own memory.
    fn count(&self, key: Option<CreditKey>, context: usize, peer: u32, which: usize) -> Option<CreditWord> {
        let key = key.filter(|_| self.handler == Ringing::FreeFlow && self.memory.is_on_gpu())?;
        let at = self.image.as_ref()?.count_at(context, peer, which > 0)?;
        // Companions are queues to this rank, too.
        let is_counted = which == 0 && (peer != key.rank || self.of_pair == 1);
        Some(CreditWord::whole(key.rank, key.rkey, at, is_counted))
    }

    /// Where a queue is: for this process, and for device code.
    fn queue(&self, number: usize, credits: Option<CreditWord>) -> (QueuePairAddresses, QueueView) {
        let (of_kind, sends) = (number / self.of_pair, &self.sends[number % self.of_pair]);
        let bytes = self.size as usize * ENTRY_BYTES;
        // SAFETY: `allocate` made room for each queue.
        let [slots, completions, bell, record] = unsafe {
            [
                sends.slots.at(of_kind * bytes),
                sends.completions.at(of_kind * bytes),
                sends.bells.at(of_kind * self.bell_bytes),
                // Others than a doorbell have none: nobody looks there.
                sends.bells.at(of_kind * self.bell_bytes + RECORD_IN_BELL),
            ]
        };
        let has_bell = self.handler == Ringing::Doorbell;
        let places = QueuePairAddresses {
            slots: slots.cpu.cast(),
            device_slots: slots.device,
            device_rings: bell.device,
            device_completions: (has_bell && self.memory.is_on_gpu()).then_some(completions.device),
            is_managed: slots.is_managed && bell.is_managed && (completions.is_managed || !has_bell),
            size: self.size,
            completions: completions.cpu,
            credits,
            bell: DoorbellWords { handler: self.handler, words: bell.cpu.cast(), record: record.cpu.cast() },
            number: FIRST + number as u32,
        };
        let view = QueueView {
            slots: slots.device,
            size: self.size,
            completions: completions.device,
            is_counted: credits.is_some(),
            record: if has_bell { record.device } else { 0 },
            bell: bell.device,
            handler: self.handler,
            number: places.number,
        };
        (places, view)
    }

    /// The memory in which completions may be counted: every rank registers some, whether it counts there or not.
    fn credits(&self) -> CreditWords {
        match &self.image {
            Some(image) => image.words(),
            None => CreditWords::within(self.signals, 8),
        }
    }

    /// What is registered with every rank: the signals of all contexts, their counters.
    fn windows(&self, spec: &NicSpec) -> [Option<Result<WindowSpec>>; 2] {
        let len = |each: u32| 8 * u64::from(spec.contexts.contexts) * u64::from(each);
        // GDAKI device code resets a signal by a store of 0.
        let signals = signal_words(&self.memory, self.signals, len(spec.signals), false, self.has_visitors);
        let (base, len) = (self.counters.cpu.as_ptr() as u64, len(spec.counters));
        let counters = WindowSpec { base, len, strict: true, dma_buf: None, gpu: None };
        [(spec.signals > 0).then_some(signals), (spec.counters > 0).then_some(Ok(counters))]
    }
}

impl Coll {
    /// Makes a set of contexts with queue pairs of the software NIC, and drains them from here on. Collective. `spec`
    /// reads this rank's arguments; what is wrong with them the others are told. What device code is to be told of the
    /// set is good as long as the set.
    pub fn create_nic_contexts(
        self: &Arc<Self>,
        spec: impl FnOnce() -> Result<NicSpec>,
    ) -> Result<(Arc<Contexts>, Reserved<Contexts>, SetView)> {
        self.create_with_queues(
            EngineKind::GdakiSoft,
            || {
                let spec = spec()?;
                let has_visitors = self.instance.config.gpu_issue.lanes;
                let blocks = QueuePairBlocks::allocate(&spec, self.world, has_visitors, self.brings_queues())?;
                Ok((spec.contexts, blocks.memory.clone(), (spec, blocks)))
            },
            |set, (spec, blocks), windows| {
                let own = self.register_own(&spec, &blocks, windows)?;
                let count = match self.keeps_credits_on_gpu() {
                    true => Some(self.register_credits(&blocks.credits(), &blocks.memory, set.target(), windows)?),
                    false => None,
                };
                Ok((spec, blocks, own, count))
            },
            |set, (spec, blocks, own, count), windows| {
                let mut keys = [0; 2];
                for (key, window) in keys.iter_mut().zip(own) {
                    *key = window.map_or(Ok(0), |window| self.key_of(window as *mut c_void))?;
                }
                self.drain_nic(set, &spec, blocks, windows, keys, count)
            },
        )
    }

    /// The key by which entries of the software NIC name a window.
    pub fn key_of(&self, window: *mut c_void) -> Result<u32> {
        self.keys().add(window as u64).ok_or_else(|| Error::system("no key is left for a window; deregister some"))
    }

    /// Registers signals and counters. Returns the handles of their windows, where there are any.
    fn register_own(
        &self,
        spec: &NicSpec,
        blocks: &QueuePairBlocks,
        windows: &mut Vec<usize>,
    ) -> Result<[Option<usize>; 2]> {
        let mut own = [None; 2];
        for (own, memory) in own.iter_mut().zip(blocks.windows(spec)) {
            if let Some(memory) = memory {
                let window = self.register(|| memory)? as usize;
                windows.push(window);
                *own = Some(window);
            }
        }
        Ok(own)
    }

    /// Hands the queues of a set to the engine's threads, each its share of the contexts; a context's companions go
    /// with it, after its queues.
    fn drain_nic(
        self: &Arc<Self>,
        set: &Arc<Contexts>,
        spec: &NicSpec,
        blocks: QueuePairBlocks,
        windows: &[usize],
        keys: [u32; 2],
        count: Option<CreditKey>,
    ) -> Result<(DeviceQueues, SetView)> {
        let engine = self.engine(|| self.engine_settings(&blocks.memory))?;
        let contexts = spec.contexts.contexts as usize;
        let (failed, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let counts = Arc::new(Counts::new(FIRST, blocks.queues(contexts)));
        let capture = self.capture(set, spec, keys, blocks.memory.is_on_gpu());
        let mut shares: Vec<[Share<SendQueue>; 2]> = Vec::new();
        shares.resize_with(engine.threads().min(contexts), Default::default);
        let mut pairs = Vec::new();
        for context in 0..contexts {
            let terms = Arc::new(Terms {
                target: set.target(),
                context: context as u32,
                keys: self.keys().clone(),
                atomics: on_queues!(set.queues(), q => q[context].atomics()),
                counts: counts.clone(),
                ended: ended.clone(),
            });
            let share = context % shares.len();
            for (commons, _) in shares[share].iter_mut().take(blocks.of_pair) {
                commons.push(Common::new(context as u32, failed.clone()));
            }
            for peer in 0..self.world.nranks {
                if !spec.contexts.reaches(self.world, peer) {
                    pairs.push(None);
                    continue;
                }
                let mut add = |which: usize, to: u32| {
                    let credits = blocks.count(count, context, peer, which);
                    let (places, view) = blocks.queue(blocks.number(context, peer, which), credits);
                    // SAFETY: the memory is kept by whoever drains the queue; it is zeroed, and nobody knows it yet.
                    let queue = unsafe { SendQueue::new(places, terms.clone(), to) };
                    let tape = capture.as_ref().map(|c| c.tape(captured(&view, context, peer, which > 0)));
                    let newest = Seq(set.completed(context as u32, to).load(Ordering::Acquire));
                    let (commons, lanes) = &mut shares[share][which];
                    lanes.push((commons.len() as u32 - 1, Lane::new(queue.taped(tape), to, newest)));
                    view
                };
                let main = add(0, peer);
                // What it adds to is this rank's.
                pairs.push(Some(PairView { main, companion: (blocks.of_pair > 1).then(|| add(1, self.world.rank)) }));
            }
        }
        let table = |words, each, key| TableView { words, each, key };
        let view = SetView {
            pairs,
            signals: table(blocks.signals, spec.signals, keys[0]),
            counters: table(blocks.counters.device, spec.counters, keys[1]),
            sink: SINK,
        };
        let handle = match &blocks.image {
            Some(image) => Some(image.write(&view, &blocks.memory)?),
            None => None,
        };
        let memory = blocks.memory;
        let ids = self.give_queues(&engine, set, spec, shares, &memory);
        let shared = QueueState { windows: windows.to_vec(), failed, ended, handle, capture };
        Ok((DeviceQueues::new(&engine, ids, memory, shared), view))
    }

    /// Has each of the engine's threads drain its queues and their companions, and count what they do.
    fn give_queues(
        &self,
        engine: &Engine,
        set: &Arc<Contexts>,
        spec: &NicSpec,
        shares: Vec<[Share<SendQueue>; 2]>,
        memory: &Arc<Memory>,
    ) -> Vec<WorkId> {
        let (stride, has_companions, threads) = (spec.contexts.rank_stride, spec.counters > 0, shares.len() as u32);
        let page = self.stats_page(set, Way::Engine, stride, has_companions, threads);
        let holds = match spec.handler {
            Ringing::Doorbell => Holds::EntriesWithDoorbell,
            Ringing::FreeFlow | Ringing::Proxy => Holds::Entries,
        };
        let mut ids = Vec::new();
        for (thread, queues) in engine.deal(spec.contexts.contexts as usize).zip(shares) {
            // Companions have the order of their queue pairs, and no peer of their own.
            let (commons, lanes) = &queues[0];
            let pairs: Vec<_> = lanes.iter().map(|(at, lane)| (commons[*at as usize].number, lane.peer)).collect();
            for (share, is_companion) in queues.into_iter().zip([false, true]) {
                if share.1.is_empty() {
                    continue;
                }
                let lanes = pairs.iter().map(|&(context, peer)| Metered { context, peer, is_companion });
                // Counters are no operations of the program's: a trace has none of them.
                let trace = engine.trace().filter(|_| !is_companion);
                let meter = Meter::new(page.clone(), trace, thread, set.set, lanes);
                // Companions go to this rank's counters, in host memory.
                let kernel = match is_companion {
                    true => None,
                    false => on_queues!(set.queues(), q => self.lane_kernel(q, holds)),
                };
                let work = on_queues!(set.queues(), q => work(q, set, share, meter, memory, kernel));
                ids.push(engine.give(thread, work));
            }
        }
        ids
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::rma::reach::is_reached;

    /// Each queue has slots, completion entries, a doorbell and a record, and only peers that are reached have queues.
    #[test]
    fn what_a_set_takes_by_its_stride() {
        for (contexts, rank, stride, counters, queues) in [
            (129, 0, 1, 0, 129 * 64),
            (129, 13, 8, 0, 129 * 8),
            (129, 13, 8, 1, 2 * 129 * 8),
            (129, 5, 64, 0, 129),
            (1, 5, 7, 0, 9),
            (1, 5, 0, 0, 64),
        ] {
            let spec = NicSpec {
                contexts: ContextSpec { contexts, queue_depth: 0, traffic_class: None, rank_stride: stride },
                depth: 1024,
                signals: 2,
                counters,
                handler: Ringing::Doorbell,
                layout: None,
            };
            let blocks = QueuePairBlocks::allocate(&spec, World { rank, nranks: 64 }, false, true).unwrap();
            assert_eq!(blocks.queues(contexts as usize), queues);
            let numbers: Vec<_> = (0..contexts as usize)
                .flat_map(|c| (0..64).map(move |peer| (c, peer)))
                .filter(|&(_, peer)| is_reached(rank, peer, stride))
                .flat_map(|(c, peer)| (0..blocks.of_pair).map(move |which| (c, peer, which)))
                .map(|(c, peer, which)| blocks.number(c, peer, which))
                .collect();
            assert_eq!(numbers, (0..queues).collect::<Vec<_>>());
            let bytes = queues * (1024 * (64 + 64) + 128) + 8 * (contexts * counters) as usize;
            assert_eq!(blocks.memory.shared_bytes(), bytes, "{contexts} contexts by {stride}");
        }
    }

    #[test]
    fn what_a_set_cannot_have_is_refused_before_memory_is_taken() {
        for (contexts, signals, why) in
            [(1025, 1, "nContexts = 1025"), (1024, 1 << 18, "nSignals = 262144 with nContexts = 1024")]
        {
            let contexts = ContextSpec { contexts, queue_depth: 0, traffic_class: None, rank_stride: 1 };
            let handler = Ringing::Doorbell;
            let spec = NicSpec { contexts, depth: 0, signals, counters: 0, handler, layout: None };
            let refused = QueuePairBlocks::allocate(&spec, World { rank: 0, nranks: 2 }, false, true).err().expect(why);
            assert!(refused.message().contains(why), "{refused}");
        }
    }

    #[test]
    fn queues_have_a_power_of_two_of_slots() {
        assert_eq!([0, 1, 193, 1024, 32_768].map(|n| slots(n).ok()), [128, 1, 256, 1024, 32_768].map(Some));
        assert!(slots(-1).is_err() && slots(32_769).is_err());
    }
}
