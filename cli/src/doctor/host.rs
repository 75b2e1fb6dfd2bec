//! What the soft fabric needs of the host: cross-memory attach, shared memory, sockets, an interface.

use super::child;
use super::report::Section;
use super::select::Choice;
use std::collections::BTreeMap;
use std::ffi::CStr;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener, UnixStream};
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(10);

/// Looks at what the soft fabric uses.
pub fn soft() -> Section {
    let mut section = Section::new("Soft fabric");
    cross_memory_attach(&mut section);
    match shared_memory() {
        Ok(()) => section.ok("shared memory", "memfd_create and mmap work"),
        Err(e) => section.wrong("shared memory", e, "allow memfd_create (seccomp?); ranks of one host need it"),
    }
    match abstract_sockets() {
        Ok(()) => section.ok("abstract unix sockets", "bind and connect work"),
        Err(e) => section.no("abstract unix sockets", e, "ranks of this host will talk over TCP instead"),
    }
    section
}

/// Looks at the interfaces and at which of them is chosen.
pub fn interfaces() -> Section {
    let mut section = Section::new("Interfaces");
    let wanted = std::env::var("NCCL_SOCKET_IFNAME").ok().filter(|v| !v.is_empty());
    let family = std::env::var("NCCL_SOCKET_FAMILY").ok();
    let all = list_interfaces();
    let usable = |a: &Vec<IpAddr>| {
        a.iter().any(|ip| match family.as_deref() {
            Some("AF_INET") => ip.is_ipv4(),
            Some("AF_INET6") => ip.is_ipv6(),
            _ => true,
        })
    };
    let candidates: Vec<&String> = all.iter().filter(|(_, a)| usable(a)).map(|(n, _)| n).collect();
    let chosen = choose(&candidates, wanted.as_deref());
    for (name, addresses) in &all {
        let addresses = addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
        match chosen.contains(&name.as_str()) {
            true => section.ok(name, format!("{addresses}; used for sockets")),
            false => section.note(name, format!("{addresses}; not used")),
        }
    }
    if chosen.is_empty() {
        let wanted = wanted.map_or("no value".into(), |w| format!("{w:?}"));
        let names = all.keys().cloned().collect::<Vec<_>>().join(", ");
        section.wrong(
            "NCCL_SOCKET_IFNAME",
            format!("{wanted} leaves no interface that is up and has an address of the wanted family"),
            format!("choose among: {names}; and look at NCCL_SOCKET_FAMILY"),
        );
    }
    section
}

/// Which interfaces NCCL's rules take: those named; else InfiniBand ones, else any but docker and loopback, else
/// docker, else loopback.
pub fn choose<'a>(names: &[&'a String], wanted: Option<&str>) -> Vec<&'a str> {
    let names = names.iter().map(|n| n.as_str());
    if let Some(wanted) = wanted {
        let choice = Choice::parse(wanted, false);
        return names.filter(|n| choice.takes(n, None)).collect();
    }
    let classes: [fn(&str) -> bool; 4] = [
        |n| n.starts_with("ib"),
        |n| !n.starts_with("docker") && n != "lo",
        |n| n.starts_with("docker"),
        |n| n == "lo",
    ];
    let found = classes.iter().map(|class| names.clone().filter(|n| class(n)).collect::<Vec<_>>());
    found.into_iter().find(|f| !f.is_empty()).unwrap_or_default()
}

/// Interfaces that are up, with their addresses (link-local IPv6 ones left out).
fn list_interfaces() -> BTreeMap<String, Vec<IpAddr>> {
    let mut found: BTreeMap<String, Vec<IpAddr>> = BTreeMap::new();
    let mut head = std::ptr::null_mut();
    // SAFETY: getifaddrs fills `head` with a list that is freed below.
    if unsafe { libc::getifaddrs(&mut head) } != 0 {
        return found;
    }
    let mut at = head;
    // SAFETY: the list is valid until freeifaddrs; entries end with NULL.
    while let Some(entry) = unsafe { at.as_ref() } {
        at = entry.ifa_next;
        if entry.ifa_addr.is_null() || entry.ifa_flags & libc::IFF_UP as u32 == 0 {
            continue;
        }
        // SAFETY: not NULL; the family says which sockaddr it is.
        let ip = unsafe {
            match i32::from((*entry.ifa_addr).sa_family) {
                libc::AF_INET => {
                    let raw = (*entry.ifa_addr.cast::<libc::sockaddr_in>()).sin_addr.s_addr;
                    IpAddr::V4(Ipv4Addr::from(u32::from_be(raw)))
                }
                libc::AF_INET6 => {
                    IpAddr::V6(Ipv6Addr::from((*entry.ifa_addr.cast::<libc::sockaddr_in6>()).sin6_addr.s6_addr))
                }
                _ => continue,
            }
        };
        if matches!(ip, IpAddr::V6(v6) if v6.segments()[0] & 0xffc0 == 0xfe80) {
            continue;
        }
        // SAFETY: a C string of the list.
        let name = unsafe { CStr::from_ptr(entry.ifa_name) }.to_string_lossy().into_owned();
        found.entry(name).or_default().push(ip);
    }
    // SAFETY: what getifaddrs made, freed once.
    unsafe { libc::freeifaddrs(head) };
    found
}

fn cross_memory_attach(section: &mut Section) {
    let scope = std::fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope");
    let scope = scope.map_or("yama is not in this kernel".into(), |s| format!("yama ptrace_scope is {}", s.trim()));
    // Ranks are siblings, not parent and child, and yama tells the two apart.
    let plain = child::ask(LIMIT, || write_to_sibling(false));
    let opened = plain.clone().or_else(|_| child::ask(LIMIT, || write_to_sibling(true)));
    match (plain, opened) {
        (Ok(_), _) => section.ok("cross-memory attach", format!("process_vm_writev works among siblings; {scope}")),
        (Err(_), Ok(_)) => section.ok(
            "cross-memory attach",
            format!("process_vm_writev works once the target allows it (PR_SET_PTRACER); {scope}"),
        ),
        (Err(e), Err(_)) => section.no(
            "cross-memory attach",
            format!("{e}; {scope}; puts on this host go through shared memory with one more copy"),
            "sysctl kernel.yama.ptrace_scope=0, or run the container with --cap-add=SYS_PTRACE",
        ),
    }
}

/// In a child: forks a sibling-to-be target, then a writer that writes into the target's memory.
fn write_to_sibling(allow: bool) -> Result<String, String> {
    let word = Box::new(0_u64);
    let address: *const u64 = &*word;
    let mut fds = [0; 2];
    // SAFETY: room for two descriptors.
    if unsafe { libc::pipe(fds.as_mut_ptr()) } != 0 {
        return Err("pipe failed".into());
    }
    // SAFETY: the child only makes system calls and leaves through _exit.
    let target = unsafe { libc::fork() };
    if target == 0 {
        // SAFETY: plain system calls; the child reports that it is ready, then waits to be killed.
        unsafe {
            if allow {
                libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY, 0, 0, 0);
            }
            libc::write(fds[1], [1_u8].as_ptr().cast(), 1);
            libc::sleep(LIMIT.as_secs() as u32);
            libc::_exit(0);
        }
    }
    let mut ready = [0_u8];
    // SAFETY: one byte into `ready`.
    unsafe { libc::read(fds[0], ready.as_mut_ptr().cast(), 1) };
    let result = child::ask(LIMIT, || {
        let value = 7_u64;
        let from = libc::iovec { iov_base: std::ptr::from_ref(&value).cast_mut().cast(), iov_len: 8 };
        let to = libc::iovec { iov_base: address.cast_mut().cast(), iov_len: 8 };
        // SAFETY: `address` is a u64 in the target too, which was forked after it was allocated.
        match unsafe { libc::process_vm_writev(target, &from, 1, &to, 1, 0) } {
            8 => Ok(String::new()),
            _ => Err(format!("process_vm_writev: {}", std::io::Error::last_os_error())),
        }
    });
    // SAFETY: the target is this process's own child.
    unsafe {
        libc::kill(target, libc::SIGKILL);
        libc::waitpid(target, std::ptr::null_mut(), 0);
    }
    result
}

fn shared_memory() -> Result<(), String> {
    let error = |what: &str| Err(format!("{what}: {}", std::io::Error::last_os_error()));
    // SAFETY: a new descriptor and a new mapping, both given back here.
    unsafe {
        let fd = libc::memfd_create(c"oxygin-doctor".as_ptr(), libc::MFD_CLOEXEC);
        if fd < 0 {
            return error("memfd_create");
        }
        libc::ftruncate(fd, 4096);
        let at = libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_WRITE, libc::MAP_SHARED, fd, 0);
        libc::close(fd);
        if at == libc::MAP_FAILED {
            return error("mmap of a memfd");
        }
        libc::munmap(at, 4096);
    }
    Ok(())
}

fn abstract_sockets() -> Result<(), String> {
    let name = format!("oxygin-doctor-{}", std::process::id());
    let address = SocketAddr::from_abstract_name(name).map_err(|e| e.to_string())?;
    let _listener = UnixListener::bind_addr(&address).map_err(|e| format!("bind: {e}"))?;
    UnixStream::connect_addr(&address).map_err(|e| format!("connect: {e}"))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interfaces_are_taken_in_nccls_order() {
        let names = ["docker0", "eth0", "eth1", "ib0", "lo"].map(String::from);
        let all: Vec<&String> = names.iter().collect();
        assert_eq!(choose(&all, None), ["ib0"]);
        assert_eq!(choose(&all[..3], None), ["eth0", "eth1"]);
        assert_eq!(choose(&all[..1], None), ["docker0"]);
        assert_eq!(choose(&all[4..], None), ["lo"]);
        assert_eq!(choose(&all, Some("^eth,docker")), ["ib0", "lo"]);
        assert_eq!(choose(&all, Some("=eth")), Vec::<&str>::new());
    }
}
