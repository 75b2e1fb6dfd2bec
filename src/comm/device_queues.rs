//! Queues that device code writes and this library drains, whoever's format they have: how a set of contexts gets them
//! and how they end.

use super::coll::{check_contexts, Coll};
use super::contexts::{Contexts, EngineKind};
use super::fabrics::on_fabric;
use super::mlx5::HardwareQueues;
use super::rendezvous::Contribution;
use super::windows::WindowSpec;
use crate::config::{Affinity, Config};
use crate::error::{Error, Result};
use crate::fabric::lanes::LaneServer;
use crate::fabric::{Context, ContextSpec, Fabric, World};
use crate::gdaki::soft::capture::Capture;
use crate::proxy::affinity::Cpus;
use crate::proxy::descriptor::queue::Queue;
use crate::proxy::drain::{Drain, Kept, Work};
use crate::proxy::engine::{Engine, Settings, WorkId};
use crate::proxy::lane::{Common, Lane};
use crate::proxy::memory::Memory;
use crate::proxy::meter::Meter;
use crate::proxy::ring::Ring;
use crate::sys::handles::Reserved;
use crate::sys::sync::Mutex;
use crate::telemetry::trace::Trace;
use nccl_plugin_api::DeviceHandle;
use std::ffi::c_void;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

/// Counters and signals of a context at most: a descriptor can name so many.
const COUNTERS_MAX: u32 = 1 << 23;
const SIGNALS_MAX: u32 = 1 << 24;
/// Counters, and signals, of a set at most; they take 1 GiB. NCCL 2.29.7 asks for 2^19 of each in every context, and
/// 256 contexts is what the largest programs have.
const OF_A_SET_MAX: u64 = 1 << 27;

/// Whether a set may have so many contexts, and so many counters and signals in each. To be asked before memory is
/// taken for them.
pub(super) fn check_numbers(contexts: u32, counters: u32, signals: u32) -> Result<()> {
    check_contexts(contexts)?;
    for (name, asked, most, pool) in [
        ("nCounters", counters, COUNTERS_MAX, "NCCL_GIN_COUNTER_POOL_SIZE"),
        ("nSignals", signals, SIGNALS_MAX, "NCCL_GIN_SIGNAL_POOL_SIZE"),
    ] {
        if asked > most {
            return Err(Error::argument(format!("{name} = {asked}; a context has at most {most}")));
        }
        if u64::from(asked) * u64::from(contexts) > OF_A_SET_MAX {
            return Err(Error::argument(format!(
                "{name} = {asked} with nContexts = {contexts}; the contexts of a set have at most {OF_A_SET_MAX} \
                 together: ask for fewer, with NCCL 2.29.7 by {pool} or NCCL_GIN_NCONTEXTS"
            )));
        }
    }
    Ok(())
}

/// The queues of a set. Ends with the set.
pub struct DeviceQueues {
    engine: Weak<Engine>,
    ids: Mutex<Vec<WorkId>>,
    /// Freed when the engine has let go of it, too. `None`: closeColl has let go of it.
    memory: Mutex<Option<Arc<Memory>>>,
    /// Windows that end with the set, as handles: its signals, and what else is its own.
    windows: Vec<usize>,
    /// An entry was malformed or the fabric failed one.
    failed: Arc<AtomicBool>,
    /// Goes up when a window of the communicator ends.
    ended: Arc<AtomicU64>,
    /// What NCCL was given, if this is where that is made. Lives as long as this.
    handle: Option<Box<DeviceHandle>>,
    /// What is kept of what device code wrote, if anything is.
    capture: Option<Arc<Capture>>,
    /// Queues that a device executes, and not the engine.
    hardware: Mutex<Option<HardwareQueues>>,
}

/// What a set's queues share with the communicator.
pub(super) struct QueueState {
    /// See [`DeviceQueues`].
    pub(super) windows: Vec<usize>,
    /// Set by the first fault.
    pub(super) failed: Arc<AtomicBool>,
    /// Goes up when a window of the communicator ends.
    pub(super) ended: Arc<AtomicU64>,
    /// What NCCL is given, if there is anything for it.
    pub(super) handle: Option<Box<DeviceHandle>>,
    /// What is kept of what device code writes.
    pub(super) capture: Option<Arc<Capture>>,
}

// SAFETY: the handle holds addresses for device code, which nobody here follows.
unsafe impl Send for DeviceQueues {}
// SAFETY: as above.
unsafe impl Sync for DeviceQueues {}

impl DeviceQueues {
    /// Queues that `engine` drains.
    pub(super) fn new(engine: &Arc<Engine>, ids: Vec<WorkId>, memory: Arc<Memory>, shared: QueueState) -> Self {
        let QueueState { windows, failed, ended, handle, capture } = shared;
        let (engine, ids, memory) = (Arc::downgrade(engine), Mutex::new(ids), Mutex::new(Some(memory)));
        Self { engine, ids, memory, windows, failed, ended, handle, capture, hardware: Mutex::default() }
    }

    /// Queues that a device executes, in `memory`, and that `engine` rings where there are `ids`. `failed`: as for
    /// [`QueueState`].
    pub(super) fn of_device(
        queues: HardwareQueues,
        memory: Arc<Memory>,
        handle: Box<DeviceHandle>,
        (engine, ids): (Weak<Engine>, Vec<WorkId>),
        failed: Arc<AtomicBool>,
    ) -> Self {
        Self {
            engine,
            ids: Mutex::new(ids),
            memory: Mutex::new(Some(memory)),
            windows: Vec::new(),
            failed,
            ended: Arc::default(),
            handle: Some(handle),
            capture: None,
            hardware: Mutex::new(Some(queues)),
        }
    }

    /// For NCCL; NULL: there is none. Lives as long as the set.
    pub fn handle(&self) -> *mut DeviceHandle {
        self.handle.as_deref().map_or(std::ptr::null_mut(), |handle| std::ptr::from_ref(handle).cast_mut())
    }

    /// Whether anything failed.
    pub fn has_error(&self) -> bool {
        if self.hardware.lock().as_ref().is_some_and(HardwareQueues::have_failed) {
            self.failed.store(true, Ordering::Release);
        }
        self.failed.load(Ordering::Acquire)
    }

    /// The windows that end with the set.
    pub fn windows(&self) -> impl Iterator<Item = *mut c_void> + '_ {
        self.windows.iter().map(|&window| window as *mut c_void)
    }

    /// Bytes of memory that this process and device code share: pinned, where there is a GPU.
    pub fn shared_bytes(&self) -> usize {
        self.memory.lock().as_ref().map_or(0, |memory| memory.shared_bytes())
    }

    /// A window's registration is about to end: nothing is remembered of it.
    pub fn forget_windows(&self) {
        self.ended.fetch_add(1, Ordering::AcqRel);
    }

    /// Nothing is drained, nor rung or executed by a device, from here on.
    pub fn stop(&self) {
        let ids = std::mem::take(&mut *self.ids.lock());
        if let Some(engine) = self.engine.upgrade() {
            for id in ids {
                if !engine.take_back(id) {
                    self.keep_memory();
                }
            }
        }
        let hardware = self.hardware.lock().take();
        if let Some(hardware) = hardware {
            hardware.end();
        }
        if let Some(capture) = &self.capture {
            capture.write();
        }
    }

    /// The memory is never freed: somebody may still be at it.
    pub fn keep_memory(&self) {
        if let Some(memory) = &*self.memory.lock() {
            memory.keep();
        }
    }

    /// The set has stopped, its windows have ended, and nobody may ever destroy it: lets go of its memory, in which
    /// kernels may still be. Memory that is to be kept stays. So does host memory, which no driver frees behind device
    /// code that runs on CPUs.
    pub(super) fn leave_memory(&self) {
        let memory = self.memory.lock().take_if(|memory| memory.is_on_gpu());
        if let Some(memory) = memory {
            memory.leave_to_kernels();
        }
    }
}

/// Words in the device memory of a set, as memory to register. `only_added`: nothing but this library's additions ever
/// changes them.
pub(super) fn device_words(memory: &Memory, base: u64, len: u64, only_added: bool) -> Result<WindowSpec> {
    Ok(WindowSpec { base, len, strict: true, dma_buf: None, gpu: memory.inspect(base, len, only_added)? })
}

/// Memory for the signals of so many contexts, each with so many; where they `have_visitors`, kernels on peers' GPUs
/// may add to them by themselves.
pub(super) fn allocate_signals(memory: &mut Memory, contexts: usize, each: u32, have_visitors: bool) -> Result<u64> {
    let signals = memory.zeroed(8 * contexts * (each as usize).max(1))?;
    if have_visitors {
        memory.open_to_peers();
    }
    Ok(signals)
}

/// Signals that [`allocate_signals`] has made, as [`device_words`].
pub(super) fn signal_words(
    memory: &Memory,
    base: u64,
    len: u64,
    only_added: bool,
    have_visitors: bool,
) -> Result<WindowSpec> {
    let mut window = device_words(memory, base, len, only_added)?;
    if let Some(memory) = &mut window.gpu {
        memory.is_shared = have_visitors;
        memory.signals.are_ordered = false;
    }
    Ok(window)
}

/// What the threads of a communicator's engine are to be. `nic`: the address of its RDMA device on the PCI bus.
fn settings(config: &Config, comm: u64, world: World, memory: &Memory, nic: Option<&str>) -> Settings {
    let cpus = match &config.proxy_affinity {
        Affinity::Off => None,
        Affinity::Near => Cpus::near_both(Path::new("/sys"), memory.pci_address().as_deref(), nic, Cpus::allowed),
        Affinity::List(list) => Cpus::parse(list).and_then(|cpus| cpus.allowed()),
    };
    let trace = config
        .trace
        .as_ref()
        .map(|path| Arc::new(Trace::new(path, comm, (world.rank, world.nranks), config.proxy_threads as usize)));
    Settings { threads: config.proxy_threads, spin: config.proxy_poll, stall: config.stall, cpus, comm, trace }
}

impl Coll {
    /// What the threads of this communicator's engine are to be, whose first set has this memory.
    pub(super) fn engine_settings(&self, memory: &Memory) -> Settings {
        let nic = on_fabric!(&self.fabric, fabric => fabric.pci_address());
        settings(&self.instance.config, self.id, self.world, memory, nic)
    }

    /// Makes a set of contexts of this kind, with queues for device code that are drained from here on. Collective.
    ///
    /// `allocate` reads this rank's arguments and makes what the queues lie in; what is wrong there the others are
    /// told. `register` registers windows over that memory, by collective calls and nothing else, and puts the handle
    /// of each into the list. `drain` hands the queues to the engine. It may fail on one rank: a last step tells the
    /// others, whose kernels would wait for that rank's. Where anything fails the windows end first, and the memory
    /// after them: until then peers may write there.
    pub(super) fn create_with_queues<R, S, T>(
        self: &Arc<Self>,
        kind: EngineKind,
        allocate: impl FnOnce() -> Result<(ContextSpec, Arc<Memory>, R)>,
        register: impl FnOnce(&Arc<Contexts>, R, &mut Vec<usize>) -> Result<S>,
        drain: impl FnOnce(&Arc<Contexts>, S, &[usize]) -> Result<(DeviceQueues, T)>,
    ) -> Result<(Arc<Contexts>, Reserved<Contexts>, T)> {
        let mut made = None;
        let mut gpu = Ok(None);
        let (set, place) = self.create_contexts(kind, || {
            gpu = self.enter_gpu();
            gpu.as_ref().map_err(Error::clone)?;
            let (spec, memory, room) = allocate()?;
            made = Some((memory, room));
            Ok(spec)
        })?;
        let (mut memory, mut windows) = (None, Vec::new());
        let attached = made
            .ok_or_else(|| Error::internal("createContext: nothing was asked"))
            .and_then(|(kept, room)| {
                memory = Some(kept);
                register(&set, room, &mut windows)
            })
            .and_then(|registered| {
                self.exchange.call("createContext", |call| {
                    let (queues, told) = drain(&set, registered, &windows)?;
                    set.attach_device(queues);
                    call.step(Contribution::default())?;
                    call.end();
                    Ok(told)
                })
            });
        attached.map(|told| (set.clone(), place, told)).inspect_err(|_| {
            self.destroy_contexts(&set);
            for window in windows {
                if let Err(error) = self.deregister_own(window as *mut c_void) {
                    log::warn!("createContext: a window that nobody uses stays: {}", error.message());
                    memory.iter().for_each(Memory::keep);
                }
            }
        })
    }
}

/// A thread's contexts, and their lanes, each with the index of its context.
pub(super) type Share<R = Queue> = (Vec<Common>, Vec<(u32, Lane<R>)>);

/// What a thread does for its share.
pub(super) fn work<C: Context, R: Ring>(
    contexts: &[C],
    set: &Arc<Contexts>,
    (commons, lanes): Share<R>,
    meter: Option<Meter>,
    memory: &Arc<Memory>,
    lane_kernel: Option<Box<dyn LaneServer>>,
) -> Box<dyn Work> {
    // SAFETY: the contexts are the set's, which never moves them.
    let kept = unsafe { Kept::new(contexts, set.clone()) };
    Box::new(Drain::new(kept, commons, lanes, memory.clone()).metered(meter).served(lane_kernel))
}
