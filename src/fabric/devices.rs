//! The devices that NCCL sees: each usable RDMA port, or the one software device.

use super::verbs::{self, peermem, DeviceInfo};
use crate::config::{Config, FabricChoice};
use crate::memory::gpu;
use nccl_plugin_api::{
    PropertiesV11, PropertiesV12, VDeviceProps4, VDeviceProps8, DEVICE_GIN_PROXY, PTR_CUDA, PTR_DMABUF, PTR_HOST,
};
use std::ffi::{c_int, CString};
use std::path::Path;
use std::sync::OnceLock;

/// What a device is.
pub enum DeviceKind {
    /// A port of an RDMA device.
    Verbs(Box<DeviceInfo>),
    /// The software fabric.
    Soft,
}

/// One device.
pub struct Device {
    /// What it is.
    pub kind: DeviceKind,
    /// What NCCL is told it is called; no other plugin calls a device so.
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
/// `maxComms`: as many as NCCL's socket transport says (`src/transport/net_socket.cc`); nothing here limits them.
const MAX_COMMS: c_int = 65_536;
/// `NCCL_MAX_NET_SIZE_BYTES`: one terabyte.
const MAX_BYTES: usize = 1 << 40;
/// `NCCL_NET_ID_UNDEF`.
const UNDEFINED_ID: i16 = -1;

struct Found {
    devices: Vec<Device>,
    /// Why there is no RDMA port among them.
    no_verbs: String,
}

static FOUND: OnceLock<Found> = OnceLock::new();

fn found(config: &Config) -> &'static Found {
    FOUND.get_or_init(|| find(config))
}

/// The devices of this process; looked for once, NCCL keeps pointers to their names.
pub fn all(config: &Config) -> &'static [Device] {
    &found(config).devices
}

/// Why no RDMA port is among them, with the remedy.
pub fn why_no_verbs(config: &Config) -> String {
    found(config).no_verbs.clone()
}

fn find(config: &Config) -> Found {
    if let Some(why) = config.without_verbs() {
        return Found { devices: vec![soft()], no_verbs: why.into() };
    }
    let (has_gpus, peermem) = (gpu::has_driver(), peermem(Path::new("/sys")));
    let (usable, no_verbs) = match verbs::devices(config) {
        Err(missing) => (Vec::new(), missing.to_string()),
        Ok(mut ports) => {
            if has_gpus && config.fabric == FabricChoice::Auto {
                for port in ports.iter_mut().filter(|p| p.is_usable()) {
                    port.problem = gpu_obstacle(port.dma_buf && config.dma_buf, port.atomics, peermem);
                }
            }
            let problems: Vec<_> =
                ports.iter().filter_map(|p| Some(format!("{}:{} {}", p.name, p.port, p.problem.as_ref()?))).collect();
            let why = if ports.is_empty() { "there is no RDMA device".into() } else { problems.join("; ") };
            (ports.into_iter().filter(DeviceInfo::is_usable).collect::<Vec<_>>(), why)
        }
    };
    if usable.is_empty() {
        return Found { devices: vec![soft()], no_verbs };
    }
    Found {
        devices: usable
            .into_iter()
            .map(|info| {
                let kinds = memory_kinds(has_gpus, info.dma_buf && config.dma_buf, peermem);
                port(info, kinds)
            })
            .collect(),
        no_verbs,
    }
}

fn soft() -> Device {
    Device {
        kind: DeviceKind::Soft,
        name: c"oxygin-soft".into(),
        pci_path: None,
        guid: 0,
        speed: SOFT_SPEED,
        port: 1,
        // Registers GPU memory by its address and ignores the descriptor, but NCCL takes windows over several physical
        // allocations only where DMA-BUFs are welcome.
        ptr_support: if gpu::has_driver() { PTR_HOST | PTR_CUDA | PTR_DMABUF } else { PTR_HOST },
    }
}

/// NCCL's topology has one entry for all devices of a name, whichever plugin they are of, and the number that the
/// plugin has for it that was asked last: with the kernel's name, a rank would get the device that has its number in
/// NET's list. What NCCL knows of an entry is what the first plugin said, so that NET's port, speed and GPUDirect would
/// be this library's.
fn property_name(device: &str, port: u8) -> String {
    format!("oxygin-{device}:{port}")
}

fn port(info: DeviceInfo, ptr_support: c_int) -> Device {
    Device {
        name: CString::new(property_name(&info.name, info.port)).unwrap_or_default(),
        pci_path: info.pci_path.clone().and_then(|p| CString::new(p).ok()),
        guid: info.guid,
        speed: info.speed_mbps,
        port: info.port.into(),
        ptr_support,
        kind: DeviceKind::Verbs(Box::new(info)),
    }
}

/// Why `auto` leaves a port alone where there are GPUs, with the remedy: the signals that NCCL allocates, and mostly
/// the data too, are in GPU memory. `dma_buf`: it registers DMA-BUFs and may. `None`: it takes GPU memory, as far as
/// can be told without asking the GPU.
pub fn gpu_obstacle(dma_buf: bool, atomics: bool, peermem: Option<&str>) -> Option<String> {
    if !dma_buf && peermem.is_none() {
        return Some(
            "cannot register GPU memory: it registers no DMA-BUFs (or NCCL_DMABUF_ENABLE=0) and no peer memory module \
             is loaded; modprobe nvidia-peermem, or set OXYGIN_FABRIC=verbs if all windows are in host memory"
                .into(),
        );
    }
    (!atomics).then(|| {
        "has no remote atomics, so that signals cannot go to GPU memory; set OXYGIN_FABRIC=verbs if all signals are in \
         host memory"
            .into()
    })
}

/// What a port takes.
fn memory_kinds(has_gpus: bool, dma_buf: bool, peermem: Option<&str>) -> c_int {
    match (has_gpus, dma_buf, peermem) {
        (false, ..) | (_, false, None) => PTR_HOST,
        (true, true, _) => PTR_HOST | PTR_CUDA | PTR_DMABUF,
        (true, false, Some(_)) => PTR_HOST | PTR_CUDA,
    }
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
            max_comms: MAX_COMMS,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_device_is_opened_where_the_environment_forbids_it() {
        let why = |fabric, ib_disable| {
            let config = Config { fabric, ib_disable, ib_hca: Some("=none-of-this-name".into()), ..Config::default() };
            let found = find(&config);
            assert!(matches!(found.devices[..], [Device { kind: DeviceKind::Soft, .. }]));
            found.no_verbs
        };
        assert_eq!(why(FabricChoice::Soft, false), "OXYGIN_FABRIC=soft");
        assert_eq!(why(FabricChoice::Auto, true), "NCCL_IB_DISABLE is set");
        assert_ne!(why(FabricChoice::Verbs, true), "NCCL_IB_DISABLE is set");
    }

    #[test]
    fn gpu_memory_is_announced_where_it_can_be_registered() {
        let module = Some("nvidia_peermem");
        assert_eq!(memory_kinds(true, false, None), PTR_HOST);
        assert_eq!(memory_kinds(false, true, module), PTR_HOST);
        assert_eq!(memory_kinds(true, false, module), PTR_HOST | PTR_CUDA);
        assert_eq!(memory_kinds(true, true, None), PTR_HOST | PTR_CUDA | PTR_DMABUF);
    }

    #[test]
    fn auto_takes_ports_that_can_do_what_gpus_need() {
        assert_eq!(gpu_obstacle(true, true, None), None);
        assert_eq!(gpu_obstacle(false, true, Some("nvidia_peermem")), None);
        for (dma_buf, atomics, part) in [(false, true, "modprobe nvidia-peermem"), (true, false, "remote atomics")] {
            let why = gpu_obstacle(dma_buf, atomics, None).expect("an obstacle");
            assert!(why.contains(part) && why.contains("; ") && why.contains("OXYGIN_FABRIC=verbs"), "{why}");
        }
    }
}
