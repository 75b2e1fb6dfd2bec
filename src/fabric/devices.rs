//! The devices that NCCL sees: each usable RDMA port, or the one software device.

use crate::config::{Config, FabricChoice};
use nccl_plugin_api::{PropertiesV11, PropertiesV12, VDeviceProps4, VDeviceProps8, DEVICE_GIN_PROXY, PTR_HOST};
use std::ffi::{c_int, CString};
use std::sync::OnceLock;

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceKind {
    /// The software fabric.
    Soft,
}

/// One device.
#[derive(Debug)]
pub struct Device {
    /// What it is.
    pub kind: DeviceKind,
    /// Name, for logs.
    pub name: CString,
    /// sysfs path of its PCI function.
    pub pci_path: Option<CString>,
    /// Unique id of the chip.
    pub guid: u64,
    /// Mbit/s.
    pub speed: u32,
    /// Port, from 1.
    pub port: u32,
    /// Memory kinds, `PTR_*`.
    pub ptr_support: c_int,
}

/// What NCCL is told the software fabric carries, Mbit/s: about one core's copy. Only used to rank devices.
const SOFT_SPEED: u32 = 50_000;
/// `maxRecvs`: NCCL's own proxy queues hold 32 times this many descriptors a (context, peer).
const MAX_RECVS: c_int = 8;
/// `NCCL_MAX_NET_SIZE_BYTES`: one terabyte.
const MAX_BYTES: usize = 1 << 40;
/// `NCCL_NET_ID_UNDEF`.
const UNDEFINED_ID: i16 = -1;

static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();

/// The devices of this process; looked for once, NCCL keeps pointers to their names.
pub fn all(config: &Config) -> &'static [Device] {
    DEVICES.get_or_init(|| find(config))
}

fn find(config: &Config) -> Vec<Device> {
    let _ = FabricChoice::Soft == config.fabric;
    vec![Device {
        kind: DeviceKind::Soft,
        name: c"oxygin-soft".into(),
        pci_path: None,
        guid: 0,
        speed: SOFT_SPEED,
        port: 1,
        ptr_support: PTR_HOST,
    }]
}

impl Device {
    /// The properties up to GIN v12.
    pub fn properties_v11(&self, number: c_int) -> PropertiesV11 {
        PropertiesV11 {
            name: self.name.as_ptr().cast_mut(),
            pci_path: self.pci_path.as_ref().map_or(std::ptr::null_mut(), |p| p.as_ptr().cast_mut()),
            guid: self.guid,
            ptr_support: self.ptr_support,
            reg_is_global: 0,
            force_flush: 0,
            speed: self.speed as c_int,
            port: self.port as c_int,
            latency: 0.0,
            max_comms: 64 * 1024,
            max_recvs: MAX_RECVS,
            net_device_type: DEVICE_GIN_PROXY,
            net_device_version: 0,
            v_props: VDeviceProps4 { ndevs: 1, devs: [number, 0, 0, 0] },
            max_p2p_bytes: MAX_BYTES,
            max_coll_bytes: MAX_BYTES,
            max_multi_request_size: 1,
        }
    }

    /// The properties from GIN v13 on.
    pub fn properties_v12(&self, number: c_int) -> PropertiesV12 {
        let p = self.properties_v11(number);
        PropertiesV12 {
            name: p.name,
            pci_path: p.pci_path,
            guid: p.guid,
            ptr_support: p.ptr_support,
            reg_is_global: p.reg_is_global,
            force_flush: p.force_flush,
            speed: p.speed,
            port: p.port,
            latency: p.latency,
            max_comms: p.max_comms,
            max_recvs: p.max_recvs,
            net_device_type: p.net_device_type,
            net_device_version: p.net_device_version,
            v_props: VDeviceProps8 { ndevs: 1, devs: [number, 0, 0, 0, 0, 0, 0, 0] },
            max_p2p_bytes: p.max_p2p_bytes,
            max_coll_bytes: p.max_coll_bytes,
            max_multi_request_size: p.max_multi_request_size,
            rail_id: UNDEFINED_ID,
            plane_id: UNDEFINED_ID,
        }
    }
}
