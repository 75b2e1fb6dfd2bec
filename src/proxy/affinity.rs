//! Which processors the engine's threads run on: those near GPU and NIC, of those that the process may use.

use nix::sched::{sched_getaffinity, sched_setaffinity, CpuSet};
use nix::unistd::Pid;
use std::path::Path;

/// Processors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cpus(Vec<usize>);

impl Cpus {
    /// From a list as the kernel writes them: `0-3,8`. `None`: it is none, or empty.
    pub fn parse(list: &str) -> Option<Self> {
        let mut cpus = Vec::new();
        for part in list.trim().split(',') {
            let (low, high) = part.split_once('-').unwrap_or((part, part));
            let (low, high) = (low.trim().parse::<usize>().ok()?, high.trim().parse::<usize>().ok()?);
            if low > high || high >= CpuSet::count() {
                return None;
            }
            cpus.extend(low..=high);
        }
        (!cpus.is_empty()).then_some(Self(cpus))
    }

    /// Those on the node of a PCI device (`0000:1b:00.0`), where `sys` is `/sys`; `None`: it does not say.
    pub fn near(sys: &Path, pci: &str) -> Option<Self> {
        let file = sys.join("bus/pci/devices").join(pci.to_ascii_lowercase()).join("local_cpulist");
        Self::parse(&std::fs::read_to_string(file).ok()?)
    }

    /// Those near both devices, where any are; else those near the first that has any near it. `may` leaves out those
    /// that may not be used.
    pub fn near_both(
        sys: &Path,
        gpu: Option<&str>,
        nic: Option<&str>,
        may: impl Fn(&Self) -> Option<Self>,
    ) -> Option<Self> {
        let near = |pci: Option<&str>| may(&Self::near(sys, pci?)?);
        let (gpu, nic) = match (near(gpu), near(nic)) {
            (Some(gpu), Some(nic)) => (gpu, nic),
            (gpu, nic) => return gpu.or(nic),
        };
        let both: Vec<_> = gpu.0.iter().copied().filter(|cpu| nic.0.contains(cpu)).collect();
        Some(if both.is_empty() { gpu } else { Self(both) })
    }

    /// Those among them that the calling thread may run on; `None`: none, or the kernel does not say.
    pub fn allowed(&self) -> Option<Self> {
        let may = sched_getaffinity(Pid::from_raw(0)).ok()?;
        let both: Vec<_> = self.0.iter().copied().filter(|&cpu| may.is_set(cpu).unwrap_or(false)).collect();
        (!both.is_empty()).then_some(Self(both))
    }

    /// Has the calling thread run there alone. What the kernel refuses is only logged: it runs elsewhere then.
    pub fn pin_this_thread(&self) {
        let mut set = CpuSet::new();
        let all = self.0.iter().try_for_each(|&cpu| set.set(cpu));
        if let Err(error) = all.and_then(|()| sched_setaffinity(Pid::from_raw(0), &set)) {
            log::info!("an engine thread is not pinned to processors {:?}: {error}", self.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_the_kernels() {
        assert_eq!(Cpus::parse("0-2,5\n"), Some(Cpus(vec![0, 1, 2, 5])));
        for bad in ["", "3-1", "a", "0-", "0,,1", "99999999"] {
            assert_eq!(Cpus::parse(bad), None, "{bad}");
        }
    }

    #[test]
    fn only_what_the_process_may_use() {
        let may = sched_getaffinity(Pid::from_raw(0)).unwrap();
        let first = (0..CpuSet::count()).find(|&cpu| may.is_set(cpu).unwrap()).unwrap();
        assert_eq!(Cpus(vec![first, CpuSet::count() - 1]).allowed(), Some(Cpus(vec![first])));
    }

    #[test]
    fn the_device_says_what_is_near() {
        let sys = std::env::temp_dir().join(format!("oxygin-sys-{}", std::process::id()));
        for (device, list) in [("0000:1b:00.0", "0-1\n"), ("0000:2b:00.0", "1-3\n"), ("0000:3b:00.0", "4\n")] {
            let folder = sys.join("bus/pci/devices").join(device);
            std::fs::create_dir_all(&folder).unwrap();
            std::fs::write(folder.join("local_cpulist"), list).unwrap();
        }
        assert_eq!(Cpus::near(&sys, "0000:1B:00.0"), Some(Cpus(vec![0, 1])));
        assert_eq!(Cpus::near(&sys, "0000:1c:00.0"), None);
        let [gpu, nic, far, silent] = ["1b", "2b", "3b", "1c"].map(|bus| format!("0000:{bus}:00.0"));
        for (gpu, nic, near) in [
            (Some(&gpu), Some(&nic), Some(vec![1])),
            (Some(&gpu), Some(&far), Some(vec![0, 1])),
            (Some(&gpu), Some(&silent), Some(vec![0, 1])),
            (None, Some(&nic), Some(vec![1, 2, 3])),
            (Some(&silent), Some(&nic), Some(vec![1, 2, 3])),
            (Some(&silent), None, None),
        ] {
            let any = |cpus: &Cpus| Some(cpus.clone());
            let found = Cpus::near_both(&sys, gpu.map(String::as_str), nic.map(String::as_str), any);
            assert_eq!(found, near.map(Cpus), "{gpu:?} {nic:?}");
        }
        // Where the one that is near both may not be used.
        let but_1 = |cpus: &Cpus| Some(Cpus(cpus.0.iter().copied().filter(|cpu| *cpu != 1).collect()));
        assert_eq!(Cpus::near_both(&sys, Some(&gpu), Some(&nic), but_1), Some(Cpus(vec![0])));
        std::fs::remove_dir_all(&sys).unwrap();
    }
}
