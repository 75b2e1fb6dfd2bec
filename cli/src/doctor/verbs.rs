//! RDMA devices, as the library itself sees them: its loader, its list of ports, its reasons.

use super::child;
use super::report::Section;
use oxygin::config::{Config, FabricChoice};
use oxygin::fabric::devices::gpu_obstacle;
use oxygin::fabric::verbs::{devices, peermem, DeviceInfo};
use oxygin_ffi::verbs::types::{IBV_LINK_LAYER_ETHERNET, IBV_LINK_LAYER_INFINIBAND};
use oxygin_ffi::verbs::Verbs;
use std::fs;
use std::net::Ipv6Addr;
use std::path::Path;
use std::time::Duration;

/// How long the libraries of all devices may take.
const PROBE_LIMIT: Duration = Duration::from_secs(20);

/// Looks at everything the verbs fabric needs. `has_gpus`: a CUDA driver is here. Returns the ports too, none where
/// there is no library.
pub fn verbs(sys: &Path, config: &Config, has_gpus: bool) -> (Section, Vec<DeviceInfo>) {
    let mut section = Section::new("Verbs fabric");
    let kernel = entries(&sys.join("class/infiniband"));
    let ports = ports(&mut section, config);
    match (ports.is_empty(), kernel.is_empty()) {
        (true, true) => section.no(
            "devices",
            "the kernel knows no RDMA device",
            "load the NIC's driver (mlx5_ib …); for a test device: modprobe rdma_rxe; rdma link add rxe0 type rxe \
             netdev IFACE",
        ),
        (true, false) => section.no(
            "devices",
            format!("the kernel has {}, the library shows none", kernel.join(", ")),
            "install the library of the device's provider (Debian, Ubuntu: ibverbs-providers)",
        ),
        _ => {}
    }
    let mut usable = 0;
    for port in &ports {
        let judged = has_gpus && config.fabric == FabricChoice::Auto && port.is_usable();
        let obstacle =
            judged.then(|| gpu_obstacle(port.dma_buf && config.dma_buf, port.atomics, peermem(sys))).flatten();
        describe(&mut section, port, port.problem.as_ref().or(obstacle.as_ref()));
        usable += usize::from(port.is_usable() && obstacle.is_none());
    }
    memlock(&mut section, !ports.is_empty());
    match (usable, config.fabric == FabricChoice::Verbs) {
        (0, true) => section.wrong(
            "OXYGIN_FABRIC",
            "verbs is demanded and cannot work here for the reasons above",
            "follow them, or set OXYGIN_FABRIC=auto",
        ),
        (0, false) => section.note("verbs fabric", "would not be used; the soft fabric takes over"),
        (n, _) => match config.without_verbs() {
            Some(why) => section.note("verbs fabric", format!("{why}: not used, although {n} port(s) could be")),
            None => section.ok("verbs fabric", format!("would be used, {n} port(s)")),
        },
    }
    (section, ports)
}

/// All ports. Libraries of others are loaded and asked in a child first: they may crash or hang.
fn ports(section: &mut Section, config: &Config) -> Vec<DeviceInfo> {
    let probed = child::ask(PROBE_LIMIT, || {
        let _ = Verbs::load().map(|_verbs| devices(config));
        Ok(String::new())
    });
    if let Err(why) = probed {
        let (said, fix) =
            (format!("its devices cannot be listed: {why}"), "see what ibv_devinfo says, or set OXYGIN_FABRIC=soft");
        match config.fabric {
            FabricChoice::Soft => section.no("libibverbs", said, fix),
            _ => section.wrong("libibverbs", said, fix),
        }
        return Vec::new();
    }
    // Held, so that the library is loaded once for all that follows.
    let loaded = Verbs::load();
    let found = match &loaded {
        Ok(verbs) => {
            section.ok("libibverbs", format!("{} loads", verbs.path()));
            devices(config)
        }
        Err(missing) => Err(missing.clone()),
    };
    found.unwrap_or_else(|missing| {
        refuse(section, if loaded.is_ok() { "devices" } else { "libibverbs" }, missing.sentence());
        Vec::new()
    })
}

/// One port: what it offers, or why it cannot be used.
fn describe(section: &mut Section, port: &DeviceInfo, problem: Option<&String>) {
    let subject = format!("{} port {}", port.name, port.port);
    if let Some(problem) = problem {
        return refuse(section, &subject, problem);
    }
    let link = match port.link_layer {
        IBV_LINK_LAYER_INFINIBAND => "InfiniBand",
        IBV_LINK_LAYER_ETHERNET => "Ethernet",
        _ => "unknown link layer",
    };
    let found = match port.gid {
        Some(gid) if port.iwarp => {
            let from = Ipv6Addr::from(gid.gid.raw).to_canonical();
            format!("iWARP, {} Mbit/s, connected through the RDMA connection manager from {from}", port.speed_mbps)
        }
        Some(gid) => {
            format!("{link}, {} Mbit/s, GID {} ({})", port.speed_mbps, gid.index, Ipv6Addr::from(gid.gid.raw))
        }
        None => format!("{link}, {} Mbit/s, no GID", port.speed_mbps),
    };
    section.ok(&subject, found);
    if !port.atomics {
        section.note(subject, "no remote atomics: signals travel as messages that the receiver applies");
    }
}

/// The library's sentences end in the remedy.
fn refuse(section: &mut Section, subject: &str, sentence: &str) {
    match sentence.split_once("; ") {
        Some((detail, remedy)) => section.no(subject, detail, remedy),
        None => section.no(subject, sentence, "docs/troubleshooting.md"),
    }
}

fn memlock(section: &mut Section, matters: bool) {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: fills `limit`.
    unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &mut limit) };
    // SAFETY: no arguments, no side effects.
    let root = unsafe { libc::geteuid() } == 0;
    match limit.rlim_cur {
        libc::RLIM_INFINITY => section.ok("memlock limit", "unlimited"),
        n if root => section.ok("memlock limit", format!("{} KiB; root may exceed it", n >> 10)),
        n if matters => section.no(
            "memlock limit",
            format!("{} KiB can be registered with RDMA devices", n >> 10),
            "ulimit -l unlimited (limits.conf, LimitMEMLOCK=infinity, docker --ulimit memlock=-1)",
        ),
        n => section.note("memlock limit", format!("{} KiB; matters to verbs only", n >> 10)),
    }
}

fn entries(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(dir)
        .map(|d| d.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.sort();
    names
}
