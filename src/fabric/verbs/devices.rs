//! Which devices and ports there are, what they can do, and why one cannot be used.

use super::gid::{choose_infiniband, choose_roce, is_configured, GidEntry, GidWish};
use super::hca::HcaFilter;
use super::iwarp::{to_gid, Addresses};
use super::port::open_devx;
use crate::config::Config;
use oxygin_ffi::mlx5::DevxDevice;
use oxygin_ffi::verbs::types::*;
use oxygin_ffi::verbs::{Context, DeviceRef, Pd, Verbs};
use oxygin_ffi::Missing;
use std::io;
use std::net::Ipv6Addr;
use std::path::Path;
use std::sync::Arc;

/// A port of a device: one NCCL device. Ports that cannot be used are listed too, with the reason.
#[derive(Clone)]
pub struct DeviceInfo {
    /// Kernel name of the device.
    pub name: String,
    /// Port, from 1.
    pub port: u8,
    /// Path of the PCI function in sysfs, functions of one card merged as NCCL does; `None` for software devices.
    pub pci_path: Option<String>,
    /// Address of its PCI function, as it is; `None` for software devices.
    pub pci_address: Option<String>,
    /// System image GUID, as libibverbs gives it (network byte order in memory), which is what NCCL compares.
    pub guid: u64,
    /// Mbit/s; 0 when unknown.
    pub speed_mbps: u32,
    /// `IBV_LINK_LAYER_*`; 0 when unknown.
    pub link_layer: u8,
    /// Whether the device carries out 64-bit remote atomics.
    pub atomics: bool,
    /// Whether it speaks iWARP: connected through the RDMA connection manager.
    pub iwarp: bool,
    /// Whether data regions get relaxed ordering where the device knows it.
    pub relaxed_ordering: bool,
    /// Whether the kernel driver registers DMA-BUFs.
    pub dma_buf: bool,
    /// The GID that connections start from; on iWARP the IP address, IPv4 as `::ffff:a.b.c.d`.
    pub gid: Option<GidEntry>,
    /// Why the port cannot be used, with the remedy; `None`: it can.
    pub problem: Option<String>,
    pub(super) device: DeviceRef,
    pub(super) attr: Option<(ibv_device_attr, ibv_port_attr)>,
}

impl DeviceInfo {
    /// Whether a communicator can be opened on it.
    pub fn is_usable(&self) -> bool {
        self.problem.is_none()
    }

    /// What the port says now, and its GID: it may have gone down, or have another LID, MTU or address, since the
    /// devices were listed.
    pub(super) fn port_now(&self, context: &Context, config: &Config) -> Result<(ibv_port_attr, GidEntry), String> {
        let state = context
            .query_port(self.port)
            .map_err(|e| format!("port {} of {} cannot be read: {e}", self.port, self.name))?;
        check_active(&self.name, self.port, &state)?;
        let gid = match (self.iwarp, self.gid) {
            // The connection manager finds out whether the address is still there.
            (true, Some(address)) => address,
            _ => choose_gid(context, self, &state, config)?,
        };
        Ok((state, gid))
    }

    /// Opens it for DevX commands, or says why that cannot be.
    pub fn open_devx(&self) -> Result<Arc<DevxDevice>, String> {
        open_devx(&self.device)
    }
}

/// All ports of all devices, by PCI address unless libibverbs' order is wanted; those without an address last.
pub fn devices(config: &Config) -> Result<Vec<DeviceInfo>, Missing> {
    let verbs = Verbs::load()?;
    let mut refs = DeviceRef::all(&verbs).map_err(|e| match e.raw_os_error() {
        Some(libc::ENOSYS) => Missing::new(
            "the kernel has no RDMA support loaded; load the modules ib_uverbs and the driver of your device",
        ),
        Some(libc::EPERM | libc::EACCES) => Missing::new(format!(
            "RDMA devices cannot be listed: {e}; give this user access to /dev/infiniband and /sys/class/infiniband"
        )),
        _ => Missing::new(format!("RDMA devices cannot be listed: {e}")),
    })?;
    if config.ib_pci_order {
        refs.sort_by_cached_key(|device| {
            real_path(&device.sysfs()).and_then(|path| pci_address(&path)).unwrap_or(u64::MAX)
        });
    }
    let filter = HcaFilter::parse(config.ib_hca.as_deref().unwrap_or(""));
    // The connection manager opens every device: not for nothing.
    let addresses = if refs.iter().any(DeviceRef::is_iwarp) { Addresses::find() } else { Ok(Addresses::default()) };
    let wishes = Wishes { config, filter, addresses };
    Ok(refs.iter().flat_map(|device| ports(&verbs, device, &wishes)).collect())
}

/// What ports are held against.
struct Wishes<'a> {
    config: &'a Config,
    filter: HcaFilter,
    /// Of iWARP devices, or why there are none.
    addresses: Result<Addresses, String>,
}

/// The ports of one device; a device that cannot even be opened counts as one unusable port.
fn ports(verbs: &Arc<Verbs>, device: &DeviceRef, wishes: &Wishes) -> Vec<DeviceInfo> {
    let path = real_path(&device.sysfs());
    let mut info = DeviceInfo {
        name: device.name(),
        port: 1,
        pci_address: path.as_ref().and_then(|path| Some(path.rsplit('/').next()?.to_owned())),
        pci_path: path.map(|path| merge_functions(path, wishes.config.ib_merge_vfs)),
        guid: 0,
        speed_mbps: 0,
        link_layer: 0,
        atomics: false,
        iwarp: device.is_iwarp(),
        relaxed_ordering: verbs.has_optional_access() && wishes.config.ib_relaxed_ordering,
        dma_buf: false,
        gid: None,
        problem: None,
        device: device.clone(),
        attr: None,
    };
    if !device.has_connections() {
        info.problem = Some(format!(
            "{} speaks neither InfiniBand, RoCE nor iWARP (as EFA and usNIC do not) and has no reliable connections; \
             the soft fabric goes by TCP over its network interface",
            info.name
        ));
        return vec![info];
    }
    let opened = device.open().map_err(|e| {
        let node = device.uverbs();
        match e.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => format!(
                "{} cannot be opened: {e}; give this user read and write access to it (in a container: pass \
                 the device in)",
                node.display()
            ),
            Some(libc::ENOENT) => format!(
                "{} does not exist; load the module ib_uverbs, or pass the device into the container",
                node.display()
            ),
            _ => format!("{} cannot be opened: {e}", info.name),
        }
    });
    let context = match opened {
        Ok(context) => context,
        Err(problem) => {
            info.problem = Some(problem);
            return vec![info];
        }
    };
    let attr = match context.query_device() {
        Ok(attr) => attr,
        Err(e) => {
            info.problem = Some(format!("the limits of {} cannot be read: {e}", info.name));
            return vec![info];
        }
    };
    info.guid = attr.sys_image_guid;
    // iWARP has no opcode for them before RFC 7306, and no device here speaks that.
    info.atomics = attr.atomic_cap != IBV_ATOMIC_NONE && !info.iwarp;
    info.dma_buf = verbs.has_dmabuf() && knows_dmabuf(&context);
    (1..=attr.phys_port_cnt)
        .map(|port| {
            let mut info = DeviceInfo { port, ..info.clone() };
            if let Err(problem) = examine(&mut info, &context, attr, wishes) {
                info.problem = Some(problem);
            }
            info
        })
        .collect()
}

/// Fills in what the port says; the error is why it cannot be used.
fn examine(info: &mut DeviceInfo, context: &Context, attr: ibv_device_attr, wishes: &Wishes) -> Result<(), String> {
    let config = wishes.config;
    let (name, port) = (info.name.clone(), info.port);
    let state = context.query_port(port).map_err(|e| format!("port {port} of {name} cannot be read: {e}"))?;
    info.attr = Some((attr, state));
    info.link_layer = state.link_layer;
    let rate = info.device.sysfs().join(format!("ports/{port}/rate"));
    info.speed_mbps = read(&rate).and_then(|t| parse_rate(&t)).unwrap_or_else(|| lane_speed(&state));
    if !wishes.filter.allows(&name, port) {
        let list = config.ib_hca.as_deref().unwrap_or("");
        return Err(format!("NCCL_IB_HCA={list} leaves {name}:{port} out"));
    }
    check_active(&name, port, &state)?;
    if !matches!(state.link_layer, IBV_LINK_LAYER_INFINIBAND | IBV_LINK_LAYER_ETHERNET) {
        return Err(format!(
            "port {port} of {name} has link layer {}, neither InfiniBand nor Ethernet",
            state.link_layer
        ));
    }
    if !info.iwarp && config.ib_pkey >= state.pkey_tbl_len.max(1) {
        return Err(format!(
            "NCCL_IB_PKEY={} is past the end of the P_Key table of {name}:{port}, which has {} entries",
            config.ib_pkey, state.pkey_tbl_len
        ));
    }
    if attr.max_qp_wr < 4 || attr.max_cqe < 4 {
        return Err(format!(
            "{name} is too small: {} work requests a queue, {} completions",
            attr.max_qp_wr, attr.max_cqe
        ));
    }
    if info.iwarp {
        info.gid = Some(address(info, wishes)?);
        return Ok(());
    }
    let chosen = choose_gid(context, info, &state, config)?;
    info.gid = Some(chosen);
    let wish = GidWish::of(config);
    let is_wished = state.link_layer == IBV_LINK_LAYER_INFINIBAND || config.ib_gid_index.is_some();
    if let Some(range) = wish.range.filter(|_| !is_wished && !wish.is_in_range(&chosen)) {
        log::warn!(
            "NCCL_IB_ADDR_RANGE={range} (NCCL_IB_ADDR_FAMILY={}): {name}:{port} has no GID there; it goes by GID {} \
             ({:?})",
            if wish.ipv6 { "AF_INET6" } else { "AF_INET" },
            chosen.index,
            Ipv6Addr::from(chosen.gid.raw)
        );
    }
    Ok(())
}

fn check_active(name: &str, port: u8, state: &ibv_port_attr) -> Result<(), String> {
    if state.state == IBV_PORT_ACTIVE {
        return Ok(());
    }
    Err(format!(
        "port {port} of {name} is {}; check cable, switch{} and `rdma link`",
        state_name(state.state),
        if state.link_layer == IBV_LINK_LAYER_INFINIBAND { ", subnet manager" } else { ", the network interface" }
    ))
}

/// The IP address of an iWARP port, in place of a GID.
fn address(info: &DeviceInfo, wishes: &Wishes) -> Result<GidEntry, String> {
    let name = &info.name;
    let addresses = wishes.addresses.as_ref().map_err(|why| {
        format!("{name} speaks iWARP, whose connections only the RDMA connection manager can make: {why}")
    })?;
    let ip = addresses.of(name, info.port).ok_or_else(|| {
        format!(
            "{name} speaks iWARP and no IP address of this host leads to it; give its network interface an address and \
             bring it up (`rdma link` names the interface)"
        )
    })?;
    Ok(GidEntry { index: 0, gid: ibv_gid { raw: to_gid(ip) }, kind: IBV_GID_TYPE_IB })
}

fn choose_gid(
    context: &Context,
    info: &DeviceInfo,
    state: &ibv_port_attr,
    config: &Config,
) -> Result<GidEntry, String> {
    let (name, port) = (&info.name, info.port);
    let len = state.gid_tbl_len.clamp(0, 256) as u32;
    let entry = |index: u32| -> Option<GidEntry> {
        let (gid, kind) = context.query_gid(port, index).ok()?;
        let kind = match state.link_layer {
            // There is one type there, which old kernels do not tell.
            IBV_LINK_LAYER_INFINIBAND => kind.unwrap_or(IBV_GID_TYPE_IB),
            _ => kind.or_else(|| gid_type_from_sysfs(&info.device.sysfs(), port, index))?,
        };
        Some(GidEntry { index: index as u8, gid, kind })
    };
    if state.link_layer == IBV_LINK_LAYER_INFINIBAND {
        let flid = config.ib_flid_gid_index;
        let table: Vec<_> = [0, flid.into()].into_iter().filter(|&index| index < len).filter_map(entry).collect();
        return choose_infiniband(&table, flid)
            .ok_or_else(|| format!("port {port} of {name} has no GID; check `ibv_devinfo -v`"));
    }
    if let Some(index) = config.ib_gid_index {
        return entry(index.into()).filter(|e| is_configured(&e.gid)).ok_or_else(|| {
            format!("NCCL_IB_GID_INDEX={index}: {name}:{port} has no GID there; see `show_gids` or `ibv_devinfo -v`")
        });
    }
    let table: Vec<_> = (0..len).filter_map(entry).collect();
    choose_roce(&table, &GidWish::of(config)).ok_or_else(|| {
        format!("port {port} of {name} has no GID; give its network interface an address and bring it up")
    })
}

fn gid_type_from_sysfs(sysfs: &Path, port: u8, index: u32) -> Option<u32> {
    match read(&sysfs.join(format!("ports/{port}/gid_attrs/types/{index}")))?.trim() {
        "RoCE v2" => Some(IBV_GID_TYPE_ROCE_V2),
        _ => Some(IBV_GID_TYPE_ROCE_V1),
    }
}

/// Whether the kernel driver knows DMA-BUF: a registration without a descriptor fails with EBADF where it does.
fn knows_dmabuf(context: &Arc<Context>) -> bool {
    let Ok(pd) = Pd::new(context) else { return false };
    let access = oxygin_ffi::verbs::Access { atomic: false, relaxed: false };
    match oxygin_ffi::verbs::Mr::register_dmabuf(&pd, -1, 0, 0, 0, access) {
        Ok(_) => true,
        Err(e) => !matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS)),
    }
}

/// Where sysfs has the device's PCI function: a subfunction (`mlx5_core.sf.4`) lies in that of its card, and NCCL would
/// take it for a device that is near no GPU.
fn real_path(sysfs: &Path) -> Option<String> {
    let real = std::fs::canonicalize(sysfs.join("device")).ok()?;
    let function = real.ancestors().find(|path| path.to_str().and_then(pci_address).is_some());
    function.unwrap_or(&real).to_str().map(str::to_owned)
}

/// The last part of a path, `[dd]dddd:bb:dd.f`, as a number.
fn pci_address(path: &str) -> Option<u64> {
    let (_, last) = path.rsplit_once('/')?;
    let (bus, function) = last.rsplit_once('.')?;
    let (front, device) = bus.rsplit_once(':')?;
    let (domain, bus) = front.rsplit_once(':')?;
    [bus, device, function].iter().try_fold(u64::from_str_radix(domain, 16).ok()?, |address, part| {
        Some(address << 8 | u64::from(u8::from_str_radix(part, 16).ok()?))
    })
}

/// The PCI function with its number zeroed, so that ports of one card compare equal, and with `merge_vfs`, as NCCL does
/// by default, a virtual function's too.
fn merge_functions(mut path: String, merge_vfs: bool) -> String {
    if pci_address(&path).is_some() {
        path.truncate(path.len() - if merge_vfs { 4 } else { 1 });
        path.push_str(if merge_vfs { "00.0" } else { "0" });
    }
    path
}

fn read(path: &Path) -> Option<String> {
    let text: io::Result<String> = std::fs::read_to_string(path);
    text.ok()
}

/// "200 Gb/sec (4X HDR)" in Mbit/s.
fn parse_rate(text: &str) -> Option<u32> {
    let (number, rest) = text.trim().split_once(' ')?;
    let gbps: f64 = number.parse().ok()?;
    (rest.starts_with("Gb/sec") && gbps > 0.0).then_some((gbps * 1000.0) as u32)
}

/// Lanes × speed of a lane; both are one-bit fields.
fn lane_speed(state: &ibv_port_attr) -> u32 {
    let first = |bits: u8, table: &[u32]| table.get(bits.trailing_zeros() as usize).copied().unwrap_or(0);
    let lanes = first(state.active_width, &[1, 4, 8, 12, 2]);
    let lane = first(state.active_speed, &[2_500, 5_000, 10_000, 10_000, 14_000, 25_000, 50_000, 100_000]);
    lanes * lane
}

fn state_name(state: u32) -> &'static str {
    ["in an unknown state", "down", "initialising", "armed but not active", "active", "active, deferred"]
        .get(state as usize)
        .copied()
        .unwrap_or("in an unknown state")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_read() {
        assert_eq!(parse_rate("200 Gb/sec (4X HDR)\n"), Some(200_000));
        assert_eq!(parse_rate("2.5 Gb/sec (1X SDR)"), Some(2_500));
        assert_eq!(parse_rate("fast"), None);
        let edr = ibv_port_attr { active_width: 2, active_speed: 32, ..Default::default() };
        assert_eq!(lane_speed(&edr), 100_000);
        assert_eq!(lane_speed(&ibv_port_attr::default()), 0);
    }

    #[test]
    fn functions_of_a_card_are_merged() {
        let path = |f: &str, merge_vfs| {
            merge_functions(format!("/sys/devices/pci0000:00/0000:00:01.0/{f}"), merge_vfs)
                .replace("/sys/devices/pci0000:00/0000:00:01.0/", "")
        };
        assert_eq!(path("0000:3b:00.1", true), "0000:3b:00.0");
        assert_eq!(path("0000:3b:02.7", true), "0000:3b:00.0");
        assert_eq!(path("0000:3b:02.7", false), "0000:3b:02.0");
        assert_eq!(path("virtual", true), "virtual");
        let address = |f: &str| pci_address(&format!("/sys/devices/{f}"));
        assert_eq!(address("10101:3b:02.7"), Some(0x101_013b_0207));
        assert_eq!([address("virtual"), address("serial8250:0:0.1"), pci_address("0000:3b:02.7")], [None; 3]);
    }
}
