//! What the soft fabric needs of the host: cross-memory attach, shared memory, sockets, an interface.

use super::child;
use super::report::Section;
use oxygin::config::Config;
use oxygin::sys::interfaces;
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
pub fn interfaces(config: &Config) -> Section {
    let mut section = Section::new("Interfaces for set-up and TCP");
    let chosen = interfaces::choose(config);
    let used = chosen.as_deref().unwrap_or_default();
    for one in interfaces::present().unwrap_or_default() {
        let address = one.address.ip();
        match used.iter().any(|c| c.name == one.name && c.address == one.address) {
            true => section.ok(one.name, format!("{address}: used")),
            false if !one.running => {
                section.note(one.name, format!("{address}: not used, the interface is not running"))
            }
            false => section.note(one.name, format!("{address}: not used")),
        }
    }
    if let Err(e) = chosen {
        section.wrong("choice", e.message(), "change or unset NCCL_SOCKET_IFNAME and NCCL_SOCKET_FAMILY");
    }
    section
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
