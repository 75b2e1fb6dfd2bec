//! RDMA devices: the library, the device files, the ports and their addresses, as sysfs shows them.

use super::report::Section;
use oxygin::config::Config;
use oxygin::fabric::verbs::{devices, HcaFilter};
use oxygin_ffi::verbs::{DeviceRef, Verbs};
use std::fs;
use std::path::Path;

/// Looks at everything the verbs fabric needs.
pub fn verbs(sys: &Path, dev: &Path, config: &Config) -> Section {
    let mut section = Section::new("Verbs fabric");
    let demanded = std::env::var("OXYGIN_FABRIC").is_ok_and(|v| v == "verbs");
    let mut usable = library(&mut section);
    let names = entries(&sys.join("class/infiniband"));
    if names.is_empty() {
        section.no(
            "devices",
            "the kernel knows no RDMA device",
            "load the NIC's driver (mlx5_ib …); for a test device: modprobe rdma_rxe; rdma link add rxe0 type rxe netdev IFACE",
        );
    }
    let hca = std::env::var("NCCL_IB_HCA").ok().filter(|v| !v.is_empty());
    let choice = HcaFilter::parse(hca.as_deref().unwrap_or_default());
    let mut ports = 0;
    for name in &names {
        ports += device(&mut section, sys, dev, name, &choice);
    }
    ports += iwarp(&mut section, config);
    usable &= ports > 0;
    memlock(&mut section, !names.is_empty());
    match (usable, demanded) {
        (true, _) => section.ok("verbs fabric", format!("would be used, {ports} port(s)")),
        (false, true) => section.wrong(
            "OXYGIN_FABRIC",
            "verbs is demanded and cannot work here for the reasons above",
            "follow them, or set OXYGIN_FABRIC=auto",
        ),
        (false, false) => section.note("verbs fabric", "would not be used; the soft fabric takes over"),
    }
    section
}

/// Loads the library as the plugin does and asks every device for its atomics.
fn library(section: &mut Section) -> bool {
    let verbs = match Verbs::load() {
        Ok(verbs) => verbs,
        Err(e) => {
            section.no("libibverbs", e.to_string(), "install it (Debian, Ubuntu: libibverbs1 ibverbs-providers)");
            return false;
        }
    };
    section.ok("libibverbs", format!("{} loads", verbs.path()));
    for device in DeviceRef::all(&verbs).unwrap_or_default() {
        let name = device.name();
        match device.open().and_then(|open| open.query_device()) {
            Ok(limits) if limits.atomic_cap == 0 => {
                section.note(name, "no remote atomics: signals travel as messages that the receiver applies");
            }
            Ok(limits) => section.ok(
                name,
                format!("remote atomics; {} reads or atomics under way a queue pair", limits.max_qp_init_rd_atom),
            ),
            Err(e) => section.no(
                name,
                format!("it cannot be opened: {e}"),
                "look at the permissions of /dev/infiniband and at the provider library for this device",
            ),
        }
    }
    true
}

/// Describes one device; returns how many of its ports would be used.
fn device(section: &mut Section, sys: &Path, dev: &Path, name: &str, choice: &HcaFilter) -> usize {
    let home = sys.join("class/infiniband").join(name);
    let accessible = device_file(section, sys, dev, name);
    // What iWARP needs, sysfs does not show: `iwarp` asks the fabric.
    if is_iwarp(&home) {
        return 0;
    }
    let mut usable = 0;
    for port in entries(&home.join("ports")) {
        let subject = format!("{name} port {port}");
        let at = home.join("ports").join(&port);
        let (state, rate, link) = (read(&at.join("state")), read(&at.join("rate")), read(&at.join("link_layer")));
        let gids = usable_gids(&at);
        if !port.parse().is_ok_and(|number| choice.allows(name, number)) {
            section.no(subject, "NCCL_IB_HCA leaves it out", "name it there, or unset it");
        } else if !state.starts_with('4') {
            let state = state.split_once(": ").map_or(state.as_str(), |(_, s)| s).to_owned();
            section.no(
                subject,
                format!("the port is {state}, not ACTIVE"),
                "ip link set IFACE up; check the cable, the switch and (InfiniBand) the subnet manager",
            );
        } else if gids.is_empty() {
            section.no(subject, "no GID", "give the network interface an address, or look at NCCL_IB_GID_INDEX");
        } else if !accessible {
            section.no(subject, "active, but its device file cannot be opened", "see above");
        } else {
            section.ok(subject, format!("{link}, {rate}, {} GIDs, first {}", gids.len(), gids[0]));
            usable += 1;
        }
    }
    usable
}

fn is_iwarp(home: &Path) -> bool {
    read(&home.join("node_type")).starts_with('4')
}

/// Describes iWARP ports in the fabric's own words; returns how many would be used.
fn iwarp(section: &mut Section, config: &Config) -> usize {
    let mut usable = 0;
    for port in devices(config).unwrap_or_default().iter().filter(|d| d.iwarp) {
        let subject = format!("{} port {}", port.name, port.port);
        match (&port.problem, port.gid) {
            (None, Some(gid)) => {
                let from = std::net::Ipv6Addr::from(gid.gid.raw).to_canonical();
                let speed = f64::from(port.speed_mbps) / 1000.0;
                section.ok(
                    subject,
                    format!("iWARP, {speed} Gb/sec, connected through the RDMA connection manager from {from}"),
                );
                usable += 1;
            }
            (problem, _) => {
                let problem = problem.clone().unwrap_or_else(|| "it was never examined".into());
                let (why, remedy) = problem.split_once("; ").unwrap_or((&problem, "see docs/verbs.md"));
                section.no(subject, why, remedy);
            }
        }
    }
    usable
}

fn device_file(section: &mut Section, sys: &Path, dev: &Path, name: &str) -> bool {
    let verbs = sys.join("class/infiniband_verbs");
    let uverbs = entries(&verbs).into_iter().find(|u| read(&verbs.join(u).join("ibdev")) == name);
    let Some(uverbs) = uverbs else {
        section.no(name, "no uverbs device for it", "modprobe ib_uverbs");
        return false;
    };
    let file = dev.join("infiniband").join(&uverbs);
    match fs::OpenOptions::new().read(true).write(true).open(&file) {
        Ok(_) => true,
        Err(e) => {
            let remedy = "give the user read and write access, and pass /dev/infiniband into the container";
            section.no(name, format!("{}: {e}", file.display()), remedy);
            false
        }
    }
}

/// GIDs that are not zero, RoCE v2 ones with an IPv4 address first, as NCCL's NET prefers them.
fn usable_gids(port: &Path) -> Vec<String> {
    let mut gids = Vec::new();
    for index in entries(&port.join("gids")) {
        let gid = read(&port.join("gids").join(&index));
        if gid.is_empty() || gid.chars().all(|c| c == '0' || c == ':') {
            continue;
        }
        let kind = read(&port.join("gid_attrs/types").join(&index));
        let v4 = gid.starts_with("0000:0000:0000:0000:0000:ffff:");
        gids.push((!kind.contains("v2"), !v4, index.parse().unwrap_or(u32::MAX), format!("{gid} ({kind})")));
    }
    gids.sort();
    gids.into_iter().map(|g| g.3).collect()
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

fn read(file: &Path) -> String {
    fs::read_to_string(file).map(|s| s.trim().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    fn write(root: &Path, file: &str, text: &str) {
        let path = root.join(file);
        fs::create_dir_all(path.parent().expect("a file has a folder")).expect("create");
        fs::write(path, text).expect("write");
    }

    fn machine(name: &str) -> std::path::PathBuf {
        let root = std::env::temp_dir().join(format!("oxygin-doctor-{}-{name}", std::process::id()));
        let port = "class/infiniband/rxe0/ports/1";
        write(&root, "class/infiniband/rxe0/node_type", "1: CA\n");
        write(&root, &format!("{port}/state"), "4: ACTIVE\n");
        write(&root, &format!("{port}/rate"), "10 Gb/sec (1X QDR)\n");
        write(&root, &format!("{port}/link_layer"), "Ethernet\n");
        write(&root, &format!("{port}/gids/0"), "fe80:0000:0000:0000:0000:00ff:fe00:0001\n");
        write(&root, &format!("{port}/gids/1"), "0000:0000:0000:0000:0000:ffff:0a00:0001\n");
        write(&root, &format!("{port}/gids/2"), "0000:0000:0000:0000:0000:0000:0000:0000\n");
        write(&root, &format!("{port}/gid_attrs/types/0"), "RoCE v2\n");
        write(&root, &format!("{port}/gid_attrs/types/1"), "RoCE v2\n");
        write(&root, "class/infiniband_verbs/uverbs0/ibdev", "rxe0\n");
        write(&root, "infiniband/uverbs0", "");
        root
    }

    fn port(root: &Path, choice: &str) -> (usize, Vec<(Verdict, String)>) {
        let mut section = Section::new("t");
        let usable = device(&mut section, root, root, "rxe0", &HcaFilter::parse(choice));
        (usable, section.findings.into_iter().map(|f| (f.verdict, f.detail)).collect())
    }

    #[test]
    fn a_good_port_is_used_and_each_fault_is_named() {
        let root = machine("faults");
        let (usable, said) = port(&root, "");
        assert_eq!(usable, 1, "{said:?}");
        assert!(said[0].1.contains("2 GIDs, first 0000:0000:0000:0000:0000:ffff:0a00:0001"), "{said:?}");

        assert_eq!(port(&root, "^rxe0"), (0, vec![(Verdict::No, "NCCL_IB_HCA leaves it out".into())]));

        write(&root, "class/infiniband/rxe0/node_type", "4: RNIC\n");
        assert_eq!(port(&root, ""), (0, Vec::new()), "iWARP is described elsewhere");
        write(&root, "class/infiniband/rxe0/node_type", "1: CA\n");

        fs::remove_file(root.join("infiniband/uverbs0")).expect("remove");
        assert!(port(&root, "").1[0].1.contains("infiniband/uverbs0: No such file"));
        write(&root, "infiniband/uverbs0", "");

        write(&root, "class/infiniband/rxe0/ports/1/state", "1: DOWN\n");
        assert_eq!(port(&root, "").1, [(Verdict::No, "the port is DOWN, not ACTIVE".into())]);
        write(&root, "class/infiniband/rxe0/ports/1/state", "4: ACTIVE\n");

        fs::remove_dir_all(root.join("class/infiniband/rxe0/ports/1/gids")).expect("remove");
        assert_eq!(port(&root, "").1, [(Verdict::No, "no GID".into())]);
        fs::remove_dir_all(root).expect("clean up");
    }
}
