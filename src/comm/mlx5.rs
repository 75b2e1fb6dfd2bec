//! Sets of contexts of mlx5 devices: queue pairs that device code of NCCL's GDAKI backend writes and rings itself.
//! There are no contexts of the fabric's. Where the GPU cannot write the device's registers the engine's threads ring
//! for kernels; else no thread of this library is in their way.

use super::coll::{differs, told, Coll};
use super::contexts::{Contexts, EngineKind};
use super::device_queues::{check_numbers, DeviceQueues};
use super::fabrics::{AnyFabric, Queues};
use super::gdaki::DeviceImage;
use super::nic::{slots, NicSpec};
use super::rendezvous::{Call, Contribution, Gathered};
use crate::error::{Error, Result};
use crate::fabric::verbs::VerbsFabric;
use crate::fabric::{ContextSpec, World};
use crate::gdaki::mlx5::{Mlx5Nic, QueueMemory, QueueSet, SetRequest};
use crate::gdaki::view::{Description, Words};
use crate::proxy::memory::Memory;
use crate::sys::handles::Reserved;
use crate::sys::wire::Reader;
use oxygin_ffi::verbs::Mr;
use std::sync::{Arc, Weak};

/// What a device executes for a set. Ended as a whole.
pub struct HardwareQueues {
    queues: QueueSet,
    /// Keys of counters, signals and sink, which entries name: they end after the queues.
    keys: Vec<Mr>,
}

impl HardwareQueues {
    /// Whether any queue pair has failed.
    pub(super) fn have_failed(&self) -> bool {
        self.queues.has_failed()
    }

    /// Ends all of it. Nothing of the device is at the set's memory afterwards.
    pub(super) fn end(self) {
        self.queues.end();
        drop(self.keys);
    }
}

/// Where things lie in a set's memory.
struct Mlx5Blocks {
    memory: Arc<Memory>,
    request: SetRequest,
    places: QueueMemory,
    image: DeviceImage,
    /// Words of all contexts, and 8 bytes that nobody looks at; for device code.
    counters: u64,
    signals: u64,
    sink: u64,
}

/// Bytes of so many words in each context; a region has at least one.
fn words(spec: &NicSpec, each: u32) -> u64 {
    8 * u64::from(spec.contexts.contexts) * u64::from(each.max(1))
}

impl Mlx5Blocks {
    fn allocate(nic: &Mlx5Nic, spec: &NicSpec, world: World) -> Result<Self> {
        check_numbers(spec.contexts.contexts, spec.counters, spec.signals)?;
        let layout = spec.layout.ok_or_else(|| Error::internal("createContext: no structures for device code"))?;
        let request = SetRequest {
            shape: spec.shape(world),
            log_slots: slots(spec.depth)?.ilog2(),
            counts: spec.counters > 0,
            traffic_class: spec.contexts.traffic_class,
        };
        let mut memory = Memory::here()?;
        Ok(Self {
            request,
            places: QueueMemory::allocate(nic, &request, &mut memory)?,
            image: DeviceImage::allocate(layout, spec, world, &mut memory)?,
            counters: memory.zeroed(words(spec, spec.counters) as usize)?,
            signals: memory.zeroed(words(spec, spec.signals) as usize)?,
            sink: memory.device(&[0; 8])?,
            memory: Arc::new(memory),
        })
    }

    /// Registers memory of device code's.
    fn key(&self, fabric: &VerbsFabric, base: u64, len: u64) -> Result<Mr> {
        fabric.register_apart(base, len, self.memory.inspect(base, len, true)?.as_ref())
    }
}

/// What a rank tells the others of a set, beside the numbers of its queue pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct SetHello {
    counters: u32,
    signals: u32,
    /// Keys to both.
    counters_key: u32,
    signals_key: u32,
}

impl SetHello {
    fn encode(&self, spec: &ContextSpec) -> Vec<u8> {
        let mut message = told(EngineKind::Gdaki, spec);
        message.u32(self.counters).u32(self.signals).u32(self.counters_key).u32(self.signals_key).finish()
    }

    fn parse(message: &[u8]) -> Option<Self> {
        let mut r = Reader::new(message);
        let _of_every_kind = (r.u32()?, r.u8()?, r.u32()?);
        let hello = Self { counters: r.u32()?, signals: r.u32()?, counters_key: r.u32()?, signals_key: r.u32()? };
        r.end()?;
        Some(hello)
    }

    /// What every rank told; an error names the first that cannot be.
    fn of_all(&self, gathered: &Gathered, ranks: u32) -> Result<Vec<Self>> {
        (0..ranks)
            .map(|rank| {
                let theirs = Self::parse(gathered.common(rank))
                    .ok_or_else(|| Error::protocol(format!("rank {rank} sent a malformed description of its set")))?;
                if (theirs.counters, theirs.signals) != (self.counters, self.signals) {
                    return Err(Error::usage(format!(
                        "createContext: this rank asks for {} counters and {} signals and rank {rank} for {} and {}; \
                         ask for the same on all ranks",
                        self.counters, self.signals, theirs.counters, theirs.signals
                    )));
                }
                Ok(theirs)
            })
            .collect()
    }
}

impl Coll {
    /// Makes a set of contexts with queue pairs of the rank's mlx5 device. Collective: one exchange of everything, and
    /// one to know that all are connected. `spec` reads this rank's arguments; what is wrong with them the others are
    /// told.
    pub fn create_mlx5_contexts(
        self: &Arc<Self>,
        spec: impl FnOnce() -> Result<NicSpec>,
    ) -> Result<(Arc<Contexts>, Reserved<Contexts>)> {
        let (set, place, queues) = self.add_set(|call| {
            let (Some(nic), AnyFabric::Verbs(fabric)) = (&self.mlx5, &self.fabric) else {
                return Err(Error::internal("createContext: the communicator has no mlx5 port"));
            };
            let spec = spec()?;
            let _gpu = self.enter_gpu()?;
            let blocks = Mlx5Blocks::allocate(nic, &spec, self.world)?;
            let queues = self.connect_mlx5(call, (nic, fabric), &spec, blocks)?;
            // Device code alone uses them.
            Ok((Queues::Verbs(Box::default()), queues))
        })?;
        set.attach_device(queues);
        Ok((set, place))
    }

    fn connect_mlx5(
        &self,
        call: &mut Call<'_>,
        (nic, fabric): (&Arc<Mlx5Nic>, &VerbsFabric),
        spec: &NicSpec,
        blocks: Mlx5Blocks,
    ) -> Result<DeviceQueues> {
        let ranks = self.world.nranks;
        let counters = blocks.key(fabric, blocks.counters, words(spec, spec.counters))?;
        let signals = blocks.key(fabric, blocks.signals, words(spec, spec.signals))?;
        let sink = blocks.key(fabric, blocks.sink, 8)?;
        let mine = SetHello {
            counters: spec.counters,
            signals: spec.signals,
            counters_key: counters.rkey(),
            signals_key: signals.rkey(),
        };
        let (queues, addressed) = QueueSet::prepare(nic, blocks.request, &blocks.places, &blocks.memory)?;
        let common = mine.encode(&spec.contexts);
        let gathered = call.step(Contribution { common, addressed })?;
        let differs = |rank| differs(EngineKind::Gdaki, &spec.contexts, rank, gathered.common(rank));
        if let Some(why) = (0..ranks).find_map(differs) {
            // All ranks see it.
            call.end();
            return Err(Error::usage(why));
        }
        let hellos = mine.of_all(&gathered, ranks)?;
        let from: Vec<&[u8]> = (0..ranks).map(|rank| gathered.addressed(rank)).collect();
        queues.connect(&from)?;
        let keys = [|h: &SetHello| h.counters_key, |h: &SetHello| h.signals_key];
        let [counter_keys, signal_keys] = keys.map(|key| hellos.iter().map(key).collect::<Vec<_>>());
        let gpu = blocks.memory.context();
        let description = Description {
            queues: &queues.queues(),
            counters: Words {
                buffer: blocks.counters,
                each: spec.counters,
                rkeys: &counter_keys,
                lkey: counters.lkey(),
            },
            signals: Words { buffer: blocks.signals, each: spec.signals, rkeys: &signal_keys, lkey: signals.lkey() },
            sink_lkey: sink.lkey(),
            // Where the GPU does not order what devices write, or the device has two ways to it, data that a get
            // brought is visible behind a dump alone, as NCCL has it. And where kernels ring the doorbell a flush rings
            // for gets that were not rung (`ncclGinOptFlagsAggregateRequests`) by its dump alone.
            dump_after_gets: !queues.wants_ringing()
                || nic.uses_data_direct()
                || gpu.is_some_and(|context| !context.cuda().orders_rdma_writes(context.device())),
        };
        let handle = blocks.image.describe(&description, &blocks.memory)?;
        let engine = match queues.wants_ringing() {
            true => Some(self.engine(|| self.engine_settings(&blocks.memory))?),
            false => None,
        };
        // Whoever is ready to receive may be sent to: no kernel runs before all are.
        call.step(Contribution::default())?;
        call.end();
        let failed = Arc::default();
        let ids = match &engine {
            None => Vec::new(),
            Some(engine) => engine
                .deal(spec.contexts.contexts as usize)
                .zip(queues.ringing(engine.threads(), &failed))
                .map(|(thread, ringing)| engine.give(thread, Box::new(ringing)))
                .collect(),
        };
        let engine = engine.map_or_else(Weak::new, |engine| Arc::downgrade(&engine));
        let hardware = HardwareQueues { queues, keys: vec![counters, signals, sink] };
        Ok(DeviceQueues::of_device(hardware, blocks.memory, handle, (engine, ids), failed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hellos_come_back_and_cut_ones_do_not() {
        let hello = SetHello { counters: 3, signals: 4, counters_key: 0x0102_0304, signals_key: u32::MAX };
        let spec = ContextSpec { contexts: 7, queue_depth: 0, traffic_class: None, rank_stride: 1 };
        let message = hello.encode(&spec);
        assert_eq!(SetHello::parse(&message), Some(hello));
        assert!((0..message.len()).all(|cut| SetHello::parse(&message[..cut]).is_none()));
        assert_eq!(SetHello::parse(&[&message[..], &[0]].concat()), None);
    }
}
