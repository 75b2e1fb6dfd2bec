//! Facts of this machine and process for reports, and binding to cores.

use std::fs;

/// Cores that this process may run on.
pub fn cores() -> Vec<usize> {
    // SAFETY: cpu_set_t is plain bits, zero is valid; the call fills a set of the size given.
    let set = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        if libc::sched_getaffinity(0, std::mem::size_of_val(&set), &mut set) != 0 {
            return vec![0];
        }
        set
    };
    // SAFETY: below the size of the set.
    (0..libc::CPU_SETSIZE as usize).filter(|&c| unsafe { libc::CPU_ISSET(c, &set) }).collect()
}

/// Lets the calling thread run on these cores only. Threads that the plugin has started keep theirs.
pub fn bind(cores: &[usize]) -> std::io::Result<()> {
    // SAFETY: as above; the numbers come from `cores`, so they are below the size of the set.
    let result = unsafe {
        let mut set: libc::cpu_set_t = std::mem::zeroed();
        cores.iter().for_each(|&core| libc::CPU_SET(core, &mut set));
        libc::sched_setaffinity(0, std::mem::size_of_val(&set), &set)
    };
    match result {
        0 => Ok(()),
        _ => Err(std::io::Error::last_os_error()),
    }
}

/// One line on the machine: processor, cores, kernel, host.
pub fn describe() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|l| l.strip_prefix("model name"))
        .map_or("unknown processor", |l| l.trim_start_matches([' ', '\t', ':']));
    let kernel = read("/proc/sys/kernel/osrelease");
    let host = read("/proc/sys/kernel/hostname");
    format!("{model}, {} cores, Linux {}, {}", cores().len(), kernel.trim(), host.trim())
}

/// Bytes of this process that are its own: anonymous and shared memory, not files (program, libraries).
pub fn own_memory() -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap_or_default();
    let field = |name: &str| -> u64 {
        let line = status.lines().find_map(|l| l.strip_prefix(name));
        line.and_then(|l| l.trim().trim_end_matches("kB").trim().parse::<u64>().ok()).unwrap_or(0) * 1024
    };
    field("RssAnon:") + field("RssShmem:")
}

/// Threads of this process.
pub fn threads() -> u64 {
    fs::read_dir("/proc/self/task").map_or(0, |d| d.count() as u64)
}

/// Descriptors of this process, the one that looks not counted.
pub fn descriptors() -> u64 {
    fs::read_dir("/proc/self/fd").map_or(0, |d| d.count().saturating_sub(1) as u64)
}

/// TCP segments with data that this network namespace has sent, all processes together.
pub fn tcp_data_segments() -> Option<u64> {
    let text = fs::read_to_string("/proc/self/net/netstat").ok()?;
    let mut lines = text.lines().filter_map(|l| l.strip_prefix("TcpExt:"));
    let (names, values) = (lines.next()?, lines.next()?);
    let at = names.split_whitespace().position(|n| n == "TCPOrigDataSent")?;
    values.split_whitespace().nth(at)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn facts_are_there() {
        assert!(!cores().is_empty());
        assert!(own_memory() > 0 && threads() > 0 && descriptors() > 0);
        assert!(tcp_data_segments().is_some());
        assert!(describe().contains("cores, Linux"));
    }
}
