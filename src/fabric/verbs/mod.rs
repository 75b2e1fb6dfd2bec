//! The verbs fabric: reliable connections on RDMA devices, through libibverbs.
//!
//! One queue pair a (context, peer), one completion queue a context; see `docs/verbs.md`.

mod atomic;
mod bounce;
mod connect;
mod context;
mod devices;
mod ece;
mod events;
mod gid;
mod gpu;
mod hca;
mod iwarp;
mod lane;
mod message;
mod outcome;
mod pairs;
mod peermem;
mod port;
mod progress;
mod queues;
mod regions;
mod setup;
mod status;
mod template;
pub mod wire;
mod wr_id;

pub use context::{Direct, Short, VerbsContext};
pub use devices::{devices, DeviceInfo};
pub use gid::GidEntry;
pub use gpu::{page_size, pages};
pub use hca::HcaFilter;
pub use peermem::peermem;
pub use port::{PeerWay, SharedPort};
pub use setup::Pending;
pub use template::{Again, Side, Windows};

use crate::config::Config;
use crate::error::{Error, Result};
use crate::fabric::{ContextSpec, Fabric, Region, World};
use crate::memory::gpu::GpuMemory;
use crate::memory::registry::Registry;
use crate::memory::window::Registration;
use crate::sys::sync::Mutex;
use connect::Origin;
use events::{Events, WatchedPort};
use gpu::Gpu;
use iwarp::Home;
use message::Keys;
use oxygin_ffi::rdmacm::RdmaCm;
use oxygin_ffi::verbs::types::*;
use oxygin_ffi::verbs::{Access, Channel, Context as Device, Mr, Pd};
use port::Devx;
use progress::Progress;
use regions::{registration, DeviceRegions, Scratch, WindowGuard};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use wire::Hello;

/// Bytes of one work request at most, whatever ports take: long messages hold others up on some devices, and one bit of
/// a length marks gets in the log.
const MAX_MESSAGE: u32 = 1 << 30;

/// What all ranks said.
struct Joined {
    world: World,
    hellos: Vec<Hello>,
    /// Every device carries out atomics; else all signals go by message. One answer for all pairs, because additions
    /// of a device and of a processor to one word are not atomic to each other on most devices.
    atomics: bool,
    /// Two devices at least may have options of their connections to agree on.
    ece: bool,
    /// Largest message that every port takes, and no more than [`MAX_MESSAGE`].
    max_msg: u32,
}

/// A communicator's hold on one port.
pub struct VerbsFabric {
    pd: Arc<Pd>,
    devx: Devx,
    /// Device and port, for messages.
    label: String,
    /// On the PCI bus.
    pci_address: Option<String>,
    origin: Origin,
    /// On iWARP devices.
    iwarp: Option<Home>,
    /// How long queue pairs are being connected: what of `OXYGIN_TIMEOUT` leaves other ranks time to hear of it.
    patience: Duration,
    /// `NCCL_IB_TC` or `NCCL_GIN_IB_TC`; what createContext asks for counts where neither is set, as with NCCL.
    traffic_class: Option<u8>,
    /// `NCCL_IB_SL` was given.
    sl_given: bool,
    hello: Hello,
    limits: ibv_device_attr,
    relaxed: bool,
    gpu: Gpu,
    /// `OXYGIN_QUEUE_DEPTH`, or 0.
    queue_depth: u32,
    hold: context::Limits,
    scratch: Arc<Scratch>,
    registry: Arc<Registry>,
    keys: Arc<Keys>,
    regions: Arc<DeviceRegions>,
    joined: OnceLock<Joined>,
    events: Arc<Events>,
    progress: Mutex<Option<Arc<Progress>>>,
    next_context: AtomicU32,
    /// Contexts tell of a put when it is visible at the peer: [`Fabric::confirm_puts`].
    confirms: AtomicBool,
}

impl VerbsFabric {
    /// Opens a port for one communicator. `registry` is asked before a signal message of a peer touches memory.
    pub fn open(device: &DeviceInfo, config: &Config, registry: Arc<Registry>) -> Result<Self> {
        Self::open_for(device, config, registry, false)
    }

    /// The same, for [`VerbsFabric::share_port`] if `wants_devx` and the device takes DevX commands.
    pub fn open_for(device: &DeviceInfo, config: &Config, registry: Arc<Registry>, wants_devx: bool) -> Result<Self> {
        if let Some(problem) = &device.problem {
            return Err(Error::usage(format!("{}:{} cannot be used: {problem}", device.name, device.port)));
        }
        let (Some((limits, _)), Some(_)) = (device.attr, device.gid) else {
            return Err(Error::internal(format!("{}:{} was never examined", device.name, device.port)));
        };
        let label = format!("{}:{}", device.name, device.port);
        let (devx, context) = Devx::open(&device.device, config, wants_devx)
            .map_err(|e| Error::system(format!("opening {label}: {e}")))?;
        let (port, gid) = device.port_now(&context, config).map_err(Error::system)?;
        let pd = Pd::new(&context).map_err(|e| Error::system(format!("a protection domain on {label}: {e}")))?;
        let scratch = Arc::new(Scratch::new(&pd).map_err(|e| e.context(&label))?);
        let iwarp = match device.iwarp {
            true => Some(Home {
                cm: RdmaCm::load().map_err(|e| Error::system(e.sentence()).context(&label))?,
                address: iwarp::from_gid(gid.gid.raw),
                device: device.name.clone(),
                patience: config.timeout / 2,
            }),
            false => None,
        };
        let count = |n: i32| n.clamp(1, 255) as u8;
        let hello = Hello {
            link_layer: port.link_layer,
            active_mtu: port.active_mtu.clamp(IBV_MTU_256, IBV_MTU_4096) as u8,
            grh_required: port.flags & IBV_QPF_GRH_REQUIRED != 0,
            atomics: device.atomics,
            ece: config.ib_ece && !device.iwarp && context.verbs().has_ece(),
            iwarp: device.iwarp,
            lid: port.lid,
            max_rd_atomic: count(limits.max_qp_init_rd_atom),
            max_dest_rd_atomic: count(limits.max_qp_rd_atom),
            gid_type: gid.kind.min(IBV_GID_TYPE_ROCE_V2) as u8,
            gid: gid.gid.raw,
            // Some drivers do not say. Reliable connections carry 2 GiB.
            max_msg_sz: if port.max_msg_sz == 0 { MAX_MESSAGE } else { port.max_msg_sz },
        };
        log::debug!(
            "{label}: GID index {} ({:?}), MTU {}, {} atomics, {} Mbit/s",
            gid.index,
            std::net::Ipv6Addr::from(gid.gid.raw),
            connect::mtu_bytes(port.active_mtu),
            if device.atomics { "with" } else { "no" },
            device.speed_mbps
        );
        Ok(Self {
            events: Arc::new(Events::new(
                &context,
                WatchedPort { label: label.clone(), port: device.port, gid: (!device.iwarp).then_some(gid) },
            )),
            pd,
            devx,
            label,
            pci_address: device.pci_address.clone(),
            origin: Origin::new(config, device.port, gid, limits.vendor_id),
            iwarp,
            patience: config.timeout / 2,
            traffic_class: config.ib_tc,
            sl_given: config.ib_sl.is_some(),
            hello,
            limits,
            relaxed: device.relaxed_ordering,
            gpu: Gpu::new(config.dma_buf, peermem(Path::new("/sys"))),
            queue_depth: config.queue_depth,
            hold: context::Limits {
                operations: config.max_operations as usize,
                solicited: !device.iwarp,
                atomics: false,
            },
            scratch,
            registry,
            keys: Arc::default(),
            regions: Arc::default(),
            joined: OnceLock::new(),
            progress: Mutex::new(None),
            next_context: AtomicU32::new(0),
            confirms: AtomicBool::new(false),
        })
    }

    fn device(&self) -> &Arc<Device> {
        self.pd.context()
    }

    fn joined(&self) -> Result<&Joined> {
        self.joined.get().ok_or_else(|| Error::internal("contexts were asked for before the ranks knew each other"))
    }

    /// The signal thread, started at its first use.
    fn progress(&self) -> Result<Arc<Progress>> {
        let mut progress = self.progress.lock();
        if let Some(progress) = &*progress {
            return Ok(progress.clone());
        }
        let channel = Channel::new(self.device())
            .map_err(|e| Error::system(format!("a completion channel on {}: {e}", self.label)))?;
        let started = Arc::new(Progress::start(channel, self.events.clone())?);
        *progress = Some(started.clone());
        Ok(started)
    }

    /// Has tests believe that the kernel has a peer memory module, or none.
    #[doc(hidden)]
    pub fn pretend_peermem(&mut self, module: Option<&'static str>) {
        self.gpu.peermem = module;
    }

    /// Registers a region, in relaxed order where signals do not forbid it and the device can.
    fn register_region(&self, region: &Region) -> std::io::Result<Mr> {
        let access = Access { atomic: self.hello.atomics, relaxed: self.relaxed && !region.strict };
        match self.register_memory(region, access) {
            // An old kernel or driver that does not drop the optional flag by itself.
            Err(e) if access.relaxed && matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {
                self.register_memory(region, Access { relaxed: false, ..access })
            }
            other => other,
        }
    }

    /// Where windows are named from address 0 on, devices need them to begin on a page: addresses in it and in memory
    /// have to have the same offset in a page.
    fn check_begin(&self, region: &Region) -> Result<()> {
        if self.devx.has_zero_based_keys() && region.base % gpu::page_size() != 0 {
            return Err(Error::argument(format!(
                "data = {:#x} ({} bytes) does not begin on a page border, as windows for kernels compiled for GDAKI \
                 have to on an mlx5 device; allocate it with ncclMemAlloc, or aligned to pages",
                region.base, region.len
            )));
        }
        Ok(())
    }

    fn register_memory(&self, region: &Region, access: Access) -> std::io::Result<Mr> {
        let len = region.len as usize;
        match (region.dma_buf, self.devx.has_zero_based_keys()) {
            (Some((fd, offset)), has_zero_based_keys) => {
                let iova = if has_zero_based_keys { 0 } else { region.base };
                Mr::register_dmabuf(&self.pd, fd, offset, iova, len, access)
            }
            // SAFETY: the owner of the window keeps it mapped until it is deregistered, as NCCL promises.
            (None, false) => unsafe { Mr::register(&self.pd, region.base, len, access) },
            // SAFETY: as above.
            (None, true) => unsafe { Mr::register_at(&self.pd, region.base, 0, len, access) },
        }
    }
}

impl Fabric for VerbsFabric {
    type Context = VerbsContext;
    type Pending = Pending;

    const BARRIER_AFTER_CONTEXTS: bool = true;

    fn pci_address(&self) -> Option<&str> {
        self.pci_address.as_deref()
    }

    fn can_confirm_puts(&self) -> bool {
        // There a read need not be answered behind the writes before it (RFC 5040, section 5.5).
        self.iwarp.is_none()
    }

    /// A signal of one queue pair says nothing of another's puts, which may still be on their way through PCIe.
    fn confirm_puts(&self) {
        self.confirms.store(self.can_confirm_puts(), Ordering::Relaxed);
    }

    fn hello(&self) -> Vec<u8> {
        self.hello.emit()
    }

    fn join(&self, world: World, hellos: &[&[u8]]) -> Result<()> {
        if hellos.len() != world.nranks as usize || world.rank >= world.nranks || world.nranks > wr_id::MAX_PEERS {
            return Err(Error::internal(format!(
                "{} hellos for rank {} of {} (at most {})",
                hellos.len(),
                world.rank,
                world.nranks,
                wr_id::MAX_PEERS
            )));
        }
        let mut parsed = Vec::with_capacity(hellos.len());
        for (rank, bytes) in hellos.iter().enumerate() {
            let hello = Hello::parse(bytes)
                .map_err(|e| Error::protocol(format!("the hello of rank {rank} cannot be read: {e}")))?;
            parsed.push(hello);
        }
        if let Some(sentence) = wire::mismatch(&parsed) {
            return Err(Error::usage(sentence));
        }
        let joined = Joined {
            world,
            atomics: parsed.iter().all(|h| h.atomics),
            ece: parsed.iter().filter(|h| h.ece).count() > 1,
            max_msg: parsed.iter().map(|h| h.max_msg_sz).min().unwrap_or(MAX_MESSAGE).min(MAX_MESSAGE),
            hellos: parsed,
        };
        if !joined.atomics {
            log::info!(
                "{}: some rank's device has no remote atomics: signals go by message, and there are no atomic \
                 operations with a fetched value",
                self.label
            );
        }
        self.joined.set(joined).map_err(|_| Error::internal("the ranks were introduced to each other twice"))
    }

    fn prepare_contexts(&self, spec: &ContextSpec) -> Result<(Pending, Vec<u8>)> {
        setup::prepare(self, spec)
    }

    fn agree(&self, pending: &mut Pending, from: &[&[u8]]) -> Result<Option<Vec<u8>>> {
        setup::agree(self, pending, from)
    }

    fn take_agreed(&self, pending: &mut Pending, from: &[&[u8]]) -> Result<()> {
        setup::take_agreed(pending, from)
    }

    fn finish_contexts(&self, pending: Pending, from: &[&[u8]]) -> Result<Vec<VerbsContext>> {
        setup::finish(self, pending, from)
    }

    fn register(&self, region: &Region) -> Result<Registration> {
        if region.len == 0 {
            // Devices refuse empty regions; no work request can name a byte of one.
            return Ok(Registration { lkey: 0, rkey: 0, guard: Box::new(()) });
        }
        self.check_begin(region)?;
        if region.dma_buf.is_some() && !self.gpu.dma_buf {
            return Err(Error::usage("a DMA-BUF was to be registered although NCCL_DMABUF_ENABLE=0"));
        }
        let mr = self.register_region(region).map_err(|e| {
            Error::system(registration(region.len, &e))
                .context(format_args!("window {} at {:#x} on {}", region.id, region.base, self.label))
        })?;
        let guard = WindowGuard::new(mr, region.id, region.dma_buf.is_some(), &self.keys, &self.regions);
        let (lkey, rkey) = guard.keys();
        Ok(Registration { lkey, rkey, guard: Box::new(guard) })
    }

    fn register_gpu(&self, region: &Region, memory: &GpuMemory) -> Result<Registration> {
        self.register_on_gpu(region, memory)
    }
}

/// Why ranks with these hellos cannot be connected to each other, said alike on every rank; `None`: they can, or
/// [`Fabric::join`] says what is wrong.
pub fn mismatch(hellos: &[&[u8]]) -> Option<String> {
    let parsed: Vec<Hello> = hellos.iter().filter_map(|bytes| Hello::parse(bytes).ok()).collect();
    if parsed.len() == hellos.len() {
        wire::mismatch(&parsed)
    } else {
        None
    }
}
