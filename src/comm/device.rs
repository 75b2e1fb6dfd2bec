//! Sets of contexts whose queues belong to this library: device code writes descriptors into them, the engine drains
//! them. What `createContext` returns where `OXYGIN_ENGINE` is `own`.

use super::coll::Coll;
use super::contexts::{Contexts, EngineKind};
use super::credits::{CreditKey, CreditWords};
use super::device_queues::{allocate_signals, check_numbers, signal_words, work, DeviceQueues, QueueState, Share};
use super::fabrics::on_queues;
use super::windows::WindowSpec;
use crate::error::Result;
use crate::fabric::lanes::{Holds, LaneServer, TOGETHER};
use crate::fabric::{Context, ContextSpec, World};
use crate::proxy::credits::CreditWord;
use crate::proxy::descriptor::layout::{queue_size, Layout};
use crate::proxy::descriptor::meaning::Terms;
use crate::proxy::descriptor::packing::{Packing, NO_CREDIT};
use crate::proxy::descriptor::queue::{Queue, QueueAddresses};
use crate::proxy::lane::{Common, Lane};
use crate::proxy::memory::{Block, Memory};
use crate::proxy::meter::{Meter, Metered};
use crate::rma::seq::Seq;
use crate::sys::handles::Reserved;
use crate::telemetry::stats::layout::Way;
use nccl_plugin_api::device_context::{ContextV1, ContextV2, ContextV3, PROXY_VERSION};
use nccl_plugin_api::{DeviceHandle, DEVICE_GIN_PROXY};
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::Arc;

/// Bytes between what different contexts' consumers write, so that they do not share a cache line.
const APART: usize = 128;

/// What createContext of a GIN table asks for.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSpec {
    /// Contexts, their depth and traffic class.
    pub contexts: ContextSpec,
    /// Slots of each queue, as asked.
    pub depth: i32,
    /// Signals a context.
    pub signals: u32,
    /// Counters a context.
    pub counters: u32,
    /// What device code expects.
    pub layout: Layout,
}

/// What a communicator can do for its sets.
#[derive(Clone, Copy)]
struct Abilities {
    /// Consumer indices can be where device code is.
    has_credits: bool,
    /// Kernels of peers may add to signals by themselves, from their GPUs.
    has_visitors: bool,
    /// Queues may be brought to the GPU.
    has_managed: bool,
}

/// Where things lie in a set's memory.
struct QueueBlocks {
    abilities: Abilities,
    memory: Arc<Memory>,
    queues: Block,
    cis: Block,
    /// The same in GPU memory, which device code looks at then.
    credits: Option<CreditWords>,
    counters: Block,
    signals: u64,
    packing: Packing,
    /// Bytes of a queue, of a context's consumer indices.
    queue_bytes: usize,
    cis_bytes: usize,
    size: u32,
    handle: u64,
}

impl QueueBlocks {
    /// Allocates, and fills the array for device code.
    fn allocate(spec: &DeviceSpec, world: World, abilities: Abilities) -> Result<Self> {
        let Abilities { has_credits, has_visitors, has_managed } = abilities;
        check_numbers(spec.contexts.contexts, spec.counters, spec.signals)?;
        let (n, ranks, size) = (spec.contexts.contexts as usize, world.nranks as usize, queue_size(spec.depth)?);
        let mut memory = Memory::here()?;
        let packing = Packing::new(spec.contexts.contexts, world.rank, world.nranks, spec.contexts.rank_stride);
        let queue_bytes = size as usize * spec.layout.form.bytes();
        let cis_bytes = (4 * ranks).next_multiple_of(APART);
        let is_managed = has_managed && packing.queues() <= TOGETHER;
        let queues = memory.queues(packing.queues() * queue_bytes, is_managed)?;
        let cis = memory.shared(n * cis_bytes)?;
        let mut first = vec![0; n * cis_bytes];
        let left_out = (0..world.nranks).filter(|&peer| !spec.contexts.reaches(world, peer));
        for at in left_out.flat_map(|peer| (0..n).map(move |c| c * cis_bytes + 4 * peer as usize)) {
            first[at..at + 4].copy_from_slice(&NO_CREDIT.to_ne_bytes());
        }
        // SAFETY: as many bytes were just made, and nobody else knows them yet.
        unsafe { cis.cpu.as_ptr().copy_from_nonoverlapping(first.as_ptr(), first.len()) };
        let credits = match has_credits {
            true if memory.is_on_gpu() => Some(CreditWords::allocate(&mut memory, &first)?),
            // Every rank registers some.
            true => Some(CreditWords::within(cis.device, first.len() as u64)),
            false => None,
        };
        let cis_at = credits.as_ref().map_or(cis.device, |words| words.at);
        let counters = memory.shared(8 * n * spec.counters as usize)?;
        let signals = allocate_signals(&mut memory, n, spec.signals, has_visitors)?;
        // Device code's own: produced indices, and two indices of gets a peer.
        let indices = memory.zeroed(3 * n * cis_bytes)?;
        let offsets = match spec.layout.has_signal_offsets() {
            true => memory.zeroed(8 * n * (spec.signals as usize).max(1))?,
            false => 0,
        };
        let mut array = Vec::new();
        for c in 0..n {
            let own = |which: usize| indices + ((which * n + c) * cis_bytes) as u64;
            let v1 = ContextV1 {
                nranks: world.nranks as i32,
                queue_size: size,
                // Where its queue to rank 0 is, or would be: device code adds a peer's rank times the queue's size.
                queues: queues.device.wrapping_add_signed(-packing.before(c) * queue_bytes as i64),
                pis: own(0),
                cis: cis_at + (c * cis_bytes) as u64,
                counters: counters.device + (8 * c * spec.counters as usize) as u64,
                signals: signals + (8 * c * spec.signals as usize) as u64,
            };
            let signal_offsets = offsets + (8 * c * spec.signals as usize) as u64;
            let v2 = ContextV2 { v1, signal_offsets, last_issued_get: own(1), last_visible_get: own(2) };
            let v3 = ContextV3 { v2, flushes_all_puts_on_any_signal: Coll::FLUSHES_ALL_PUTS_ON_ANY_SIGNAL };
            // SAFETY: plain data without pointers to here; the layouts are prefixes of each other, and `v3`, zeroed
            // behind its last field, is the longest.
            let bytes = unsafe {
                let mut whole = std::mem::zeroed::<ContextV3>();
                std::ptr::copy_nonoverlapping(&v3, &mut whole, 1);
                *(&raw const whole).cast::<[u8; size_of::<ContextV3>()]>()
            };
            array.extend_from_slice(&bytes[..spec.layout.context_bytes]);
        }
        let handle = memory.device(&array)?;
        let memory = Arc::new(memory);
        Ok(Self {
            abilities,
            memory,
            queues,
            cis,
            credits,
            counters,
            signals,
            packing,
            queue_bytes,
            cis_bytes,
            size,
            handle,
        })
    }

    /// Where the queue of a context to a peer is that is reached.
    fn places(&self, spec: &DeviceSpec, context: usize, peer: u32, key: Option<CreditKey>) -> QueueAddresses {
        let slots = self.packing.queue(context, peer) * self.queue_bytes;
        let index = context * self.cis_bytes + 4 * peer as usize;
        let credits = key.zip(self.credits.as_ref()).filter(|_| self.memory.is_on_gpu());
        // SAFETY: `allocate` made room for each context and peer that is reached.
        unsafe {
            QueueAddresses {
                slots: self.queues.at(slots).cpu.cast(),
                device_slots: self.queues.at(slots).device,
                is_managed: self.queues.is_managed,
                size: self.size,
                ci: self.cis.at(index).cpu.cast(),
                counters: self.counters.at(8 * context * spec.counters as usize).cpu.cast(),
                credits: credits.map(|(key, words)| CreditWord::half(key.rank, key.rkey, words.at + index as u64)),
            }
        }
    }
}

impl Coll {
    /// Makes a set of contexts with queues for device code, and drains them from here on. Collective. `spec` reads this
    /// rank's arguments; what is wrong with them the others are told.
    pub fn create_device_contexts(
        self: &Arc<Self>,
        spec: impl FnOnce() -> Result<DeviceSpec>,
    ) -> Result<(Arc<Contexts>, Reserved<Contexts>)> {
        let (set, place, ()) = self.create_with_queues(
            EngineKind::Own,
            || {
                let spec = spec()?;
                let abilities = Abilities {
                    has_credits: self.keeps_credits_on_gpu(),
                    has_visitors: self.instance.config.gpu_issue.lanes,
                    has_managed: self.brings_queues(),
                };
                let blocks = QueueBlocks::allocate(&spec, self.world, abilities)?;
                Ok((spec.contexts, blocks.memory.clone(), (spec, blocks)))
            },
            |set, (spec, blocks), windows| {
                windows.push(self.register(|| signal_window(&spec, &blocks))? as usize);
                let key = match &blocks.credits {
                    Some(words) => Some(self.register_credits(words, &blocks.memory, set.target(), windows)?),
                    None => None,
                };
                Ok((spec, blocks, key))
            },
            |set, (spec, blocks, key), windows| Ok((self.drain(set, &spec, blocks, windows, key)?, ())),
        )?;
        Ok((set, place))
    }

    /// Whether queues may be brought to the GPU: where a kernel may serve them, and `init` has seen to it.
    pub(super) fn brings_queues(&self) -> bool {
        self.keeps_credits_on_gpu() && self.instance.config.may_bring_queues() && Memory::may_be_managed()
    }

    /// A kernel that serves a set's queues by itself, where there can be one. What it does has no times, so there is
    /// none where each operation's are asked for.
    pub(super) fn lane_kernel<C: Context>(&self, contexts: &[C], holds: Holds) -> Option<Box<dyn LaneServer>> {
        contexts.first().filter(|_| self.instance.config.trace.is_none())?.lane_kernel(holds)
    }

    /// Hands the queues of a set to the engine's threads, each its share of the contexts.
    fn drain(
        self: &Arc<Self>,
        set: &Arc<Contexts>,
        spec: &DeviceSpec,
        blocks: QueueBlocks,
        windows: &[usize],
        key: Option<CreditKey>,
    ) -> Result<DeviceQueues> {
        let engine = self.engine(|| self.engine_settings(&blocks.memory))?;
        let (failed, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let handle = Box::new(DeviceHandle {
            net_device_type: DEVICE_GIN_PROXY,
            net_device_version: PROXY_VERSION,
            handle: blocks.handle as *mut c_void,
            size: 0,
            needs_proxy_progress: 0,
        });
        let mut shares: Vec<Share> = Vec::new();
        shares.resize_with(engine.threads().min(spec.contexts.contexts as usize), Default::default);
        for context in 0..spec.contexts.contexts {
            let terms = Arc::new(Terms {
                form: spec.layout.form,
                target: set.target(),
                context,
                counters: spec.counters,
                signals: spec.signals,
                signal_window: windows[0],
                ended: ended.clone(),
            });
            let share = context as usize % shares.len();
            let (commons, lanes) = &mut shares[share];
            commons.push(Common::new(context, failed.clone()));
            let reached = (0..self.world.nranks).filter(|&p| spec.contexts.reaches(self.world, p));
            lanes.extend(reached.map(|peer| {
                let places = blocks.places(spec, context as usize, peer, key);
                // SAFETY: the memory is kept by whoever drains the queue; it is zeroed.
                let queue = unsafe { Queue::new(places, terms.clone(), peer) };
                let newest = Seq(set.completed(context, peer).load(Ordering::Acquire));
                (commons.len() as u32 - 1, Lane::new(queue, peer, newest))
            }));
        }
        let memory = blocks.memory;
        let page = self.stats_page(set, Way::Engine, spec.contexts.rank_stride, false, shares.len() as u32);
        let threads = engine.deal(spec.contexts.contexts as usize);
        let ids = threads.zip(shares).map(|(thread, share)| {
            let lanes = share.1.iter().map(|(common, lane)| (share.0[*common as usize].number, lane.peer));
            let lanes = lanes.map(|(context, peer)| Metered { context, peer, is_companion: false });
            let meter = Meter::new(page.clone(), engine.trace(), thread, set.set, lanes);
            let kernel = on_queues!(set.queues(), q => self.lane_kernel(q, Holds::Descriptors));
            engine.give(thread, on_queues!(set.queues(), q => work(q, set, share, meter, &memory, kernel)))
        });
        let shared = QueueState { windows: windows.to_vec(), failed, ended, handle: Some(handle), capture: None };
        Ok(DeviceQueues::new(&engine, ids.collect(), memory, shared))
    }
}

/// The signals of all contexts, as memory to register.
fn signal_window(spec: &DeviceSpec, blocks: &QueueBlocks) -> Result<WindowSpec> {
    let len = 8 * u64::from(spec.contexts.contexts) * u64::from(spec.signals.max(1));
    let only_added = spec.layout.has_signal_offsets();
    signal_words(&blocks.memory, blocks.signals, len, only_added, blocks.abilities.has_visitors)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::proxy::descriptor::layout::Table;

    const ALL: Abilities = Abilities { has_credits: true, has_visitors: true, has_managed: true };

    /// 129 contexts of depth 1024 among 64 ranks: 1032 MiB without a stride; eight peers each take 129 MiB of queues,
    /// and a context that is alone in its group 6 more.
    #[test]
    fn what_a_large_set_takes_by_its_stride() {
        for (contexts, rank, stride, queues) in [
            (129, 0, 1, 129 * 64),
            (129, 0, 8, 16 * 64 + 57),
            (129, 13, 8, 16 * 64 + 57),
            (128, 63, 8, 128 * 8),
            (129, 5, 64, 129),
            (17, 5, 8, 2 * 64 + 57),
            (1, 5, 8, 57),
        ] {
            let spec = DeviceSpec {
                contexts: ContextSpec { contexts, queue_depth: 0, traffic_class: None, rank_stride: stride },
                depth: 1024,
                signals: 2,
                counters: 3,
                layout: Layout::choose(Table::V14(2), None, None).unwrap(),
            };
            let blocks = QueueBlocks::allocate(&spec, World { rank, nranks: 64 }, ALL).unwrap();
            let fixed = contexts as usize * (4 * 64 + 3 * 8);
            assert_eq!(blocks.memory.shared_bytes(), queues * 1024 * 128 + fixed, "{contexts} contexts by {stride}");
        }
    }

    #[test]
    fn what_a_set_cannot_have_is_refused_before_memory_is_taken() {
        for (contexts, signals, counters, why) in [
            (0, 1, 1, "nContexts = 0"),
            (1025, 1, 1, "nContexts = 1025"),
            (1 << 29, 0, 0, "nContexts = 536870912"),
            (1024, 1 << 18, 0, "nSignals = 262144 with nContexts = 1024"),
            (33, 0, 1 << 22, "nCounters = 4194304 with nContexts = 33"),
            (1, 0, (1 << 23) + 1, "nCounters = 8388609; a context has"),
            (1, (1 << 24) + 1, 0, "nSignals = 16777217; a context has"),
        ] {
            let contexts = ContextSpec { contexts, queue_depth: 0, traffic_class: None, rank_stride: 1 };
            let layout = Layout::choose(Table::V14(2), None, None).unwrap();
            let spec = DeviceSpec { contexts, depth: 0, signals, counters, layout };
            let refused = QueueBlocks::allocate(&spec, World { rank: 0, nranks: 2 }, ALL).err().expect(why);
            assert!(refused.message().contains(why), "{refused}");
        }
    }

    /// NCCL 2.29.7 asks for 2^19 counters and signals in each context, however many these are.
    #[test]
    fn a_set_has_what_every_nccl_asks_for_many_contexts() {
        for contexts in [33, 129, 256] {
            assert!(check_numbers(contexts, 1 << 19, 1 << 19).is_ok(), "{contexts}");
        }
    }
}
