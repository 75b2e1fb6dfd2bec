//! The fabric's port for queue pairs that are not the fabric's: those of GDAKI on mlx5 devices. They are in the same
//! protection domain and go the same ways to peers.

use super::connect::{address, Origin};
use super::wire::Hello;
use super::VerbsFabric;
use crate::config::Config;
use crate::error::{Error, Result};
use crate::fabric::{Region, World};
use crate::memory::gpu::GpuMemory;
use oxygin_ffi::mlx5::{DevxDevice, Mlx5};
use oxygin_ffi::verbs::types::*;
use oxygin_ffi::verbs::{Context, DeviceRef, Mr, Pd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Numbers of regions that are no windows: memory of a set, and of a trial. No window has them.
pub(super) const OF_SET: u32 = u32::MAX;
pub(super) const OF_TRIAL: u32 = u32::MAX - 1;

/// What a fabric has of libmlx5.
pub(super) struct Devx {
    /// The device, if it takes DevX commands; else why not.
    device: std::result::Result<Arc<DevxDevice>, String>,
    /// Windows are named from address 0 on, as device code of GDAKI does, and not from their own address on.
    has_zero_based_keys: AtomicBool,
    /// `NCCL_IB_DATA_DIRECT`.
    data_direct: bool,
}

impl Devx {
    /// Opens a device: for DevX commands if they are wanted and it takes them.
    pub fn open(device: &DeviceRef, config: &Config, is_wanted: bool) -> std::io::Result<(Self, Arc<Context>)> {
        let devx = if is_wanted { open_devx(device) } else { Err("it was not opened for DevX commands".into()) };
        let context = match &devx {
            Ok(device) => device.context().clone(),
            Err(_) => device.open()?,
        };
        Ok((
            Self { device: devx, has_zero_based_keys: AtomicBool::new(false), data_direct: config.ib_data_direct },
            context,
        ))
    }

    /// Whether windows are named from address 0 on.
    pub fn has_zero_based_keys(&self) -> bool {
        self.has_zero_based_keys.load(Ordering::Relaxed)
    }

    /// The device, if memory is to be registered with Data Direct.
    pub fn data_direct(&self) -> Option<&Arc<DevxDevice>> {
        self.device
            .as_ref()
            .ok()
            .filter(|device| self.data_direct && self.has_zero_based_keys() && device.has_data_direct())
    }
}

/// Opens a device for DevX commands, or says why that cannot be.
pub fn open_devx(device: &DeviceRef) -> std::result::Result<Arc<DevxDevice>, String> {
    let mlx5 = Mlx5::load().map_err(|missing| missing.to_string())?;
    if !DevxDevice::is_mlx5(&mlx5, device) {
        return Err(format!(
            "{} is no mlx5 device for {} (a ConnectX-6 Dx or newer is needed, and the libmlx5 by which libibverbs \
             drives it: OXYGIN_LIBMLX5)",
            device.name(),
            mlx5.path()
        ));
    }
    DevxDevice::open(&mlx5, device).map_err(|e| {
        format!(
            "{} cannot be opened for DevX commands: {e}; update its firmware, the kernel's driver (mlx5_ib) and \
             rdma-core",
            device.name()
        )
    })
}

/// The way to a peer, as both ends' ports have it.
#[derive(Clone, Copy, Debug)]
pub struct PeerWay {
    /// The address.
    pub address: ibv_ah_attr,
    /// `IBV_MTU_*`: the smaller one of both ports.
    pub mtu: u8,
    /// Reads and atomics that this rank may have under way.
    pub reads_out: u32,
    /// Those of the peer that may be arriving.
    pub reads_in: u32,
}

/// A port, and what is to be known of its peers.
pub struct SharedPort {
    /// The device.
    pub devx: Arc<DevxDevice>,
    /// The protection domain, which windows are registered in.
    pub pd: Arc<Pd>,
    /// Device and port, for messages.
    pub label: String,
    /// This rank among all.
    pub world: World,
    /// Index of the P_Key.
    pub pkey_index: u16,
    /// 4.096 µs × 2^n.
    pub timeout: u8,
    /// Retries after a timeout.
    pub retries: u8,
    /// The GID is one of RoCE v2.
    pub has_udp: bool,
    origin: Origin,
    sl_given: bool,
    traffic_class: Option<u8>,
    mine: Hello,
    peers: Vec<Hello>,
}

impl SharedPort {
    /// Whether the port is an Ethernet one.
    pub fn is_ethernet(&self) -> bool {
        self.mine.link_layer == IBV_LINK_LAYER_ETHERNET
    }

    /// From 1.
    pub fn number(&self) -> u8 {
        self.origin.port
    }

    /// The way to a rank, this one included; it is below the number of ranks. `class`: what the set of contexts asks
    /// for.
    pub fn way(&self, peer: u32, class: Option<u8>) -> PeerWay {
        let theirs = &self.peers[peer as usize];
        let origin = with_class(self.origin, &self.mine, self.sl_given, class);
        PeerWay {
            address: address(&origin, &self.mine, theirs, self.traffic_class.or(class).unwrap_or(0)),
            mtu: self.mine.active_mtu.min(theirs.active_mtu),
            reads_out: self.mine.max_rd_atomic.min(theirs.max_dest_rd_atomic).into(),
            reads_in: self.mine.max_dest_rd_atomic.min(theirs.max_rd_atomic).into(),
        }
    }
}

/// InfiniBand has service levels in place of traffic classes; NCCL maps one to the other like this.
pub(super) fn with_class(mut origin: Origin, mine: &Hello, sl_given: bool, class: Option<u8>) -> Origin {
    let infinite_band = mine.link_layer == IBV_LINK_LAYER_INFINIBAND;
    if let (true, false, Some(class @ 0..=15)) = (infinite_band, sl_given, class) {
        origin.sl = class;
    }
    origin
}

impl VerbsFabric {
    /// The port, for queue pairs of GDAKI; the ranks know each other. From here on windows are named from address 0 on,
    /// so that this fabric's own contexts cannot use them: it is asked for before there are any.
    pub fn share_port(&self) -> Result<SharedPort> {
        let joined = self.joined()?;
        let devx = self.devx.device.clone().map_err(Error::usage)?;
        if let Some(rank) = joined.hellos.iter().position(|hello| !hello.atomics) {
            return Err(Error::usage(format!("the RDMA device of rank {rank} has no remote atomics")));
        }
        self.devx.has_zero_based_keys.store(true, Ordering::Relaxed);
        Ok(SharedPort {
            devx,
            pd: self.pd.clone(),
            label: self.label.clone(),
            world: joined.world,
            pkey_index: self.origin.pkey_index,
            timeout: self.origin.timeout,
            retries: self.origin.retry_cnt,
            has_udp: u32::from(self.hello.gid_type) == IBV_GID_TYPE_ROCE_V2,
            origin: self.origin,
            sl_given: self.sl_given,
            traffic_class: self.traffic_class,
            mine: self.hello,
            peers: joined.hellos.clone(),
        })
    }

    /// Registers memory of a set of contexts of GDAKI, named from address 0 on, in strict order. It is no window.
    pub fn register_apart(&self, base: u64, len: u64, memory: Option<&GpuMemory>) -> Result<Mr> {
        self.register_as(OF_SET, (base, len), memory)
    }

    /// The same of memory by which queue pairs are tried: users are not told how it is registered.
    pub fn register_for_trial(&self, base: u64, len: u64, memory: Option<&GpuMemory>) -> Result<Mr> {
        self.register_as(OF_TRIAL, (base, len), memory)
    }

    fn register_as(&self, id: u32, (base, len): (u64, u64), memory: Option<&GpuMemory>) -> Result<Mr> {
        let region = Region { id, base, len, strict: true, dma_buf: None };
        match memory {
            Some(memory) => self.register_device_memory(&region, memory),
            None => self.register_region(&region).map_err(|e| {
                Error::system(super::regions::registration(len, &e)).context(format_args!("{base:#x}, {}", self.label))
            }),
        }
    }

    /// Whether GPU memory is registered with Data Direct: what a read brought is then visible behind a dump alone.
    pub fn uses_data_direct(&self) -> bool {
        self.devx.data_direct().is_some()
    }
}
