//! Peer memory: kernel modules that let RDMA devices register GPU memory by its address.

use std::path::Path;

/// Where each module shows itself in sysfs, and its name: the places that NCCL looks at.
const MODULES: [(&str, &str); 3] = [
    ("module/nvidia_peermem/version", "nvidia_peermem"),
    ("kernel/mm/memory_peers/nv_mem/version", "nv_peer_mem"),
    ("kernel/mm/memory_peers/nv_mem_nc/version", "nv_peer_mem (nv_mem_nc)"),
];

/// The module that the kernel has loaded; `sys` is where sysfs is mounted.
pub fn peermem(sys: &Path) -> Option<&'static str> {
    MODULES.iter().find(|(file, _)| sys.join(file).exists()).map(|(_, name)| *name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_module_is_found_where_it_shows_itself() {
        let sys = std::env::temp_dir().join(format!("oxygin-peermem-{}", std::process::id()));
        assert_eq!(peermem(&sys), None);
        for (file, name) in MODULES.into_iter().rev() {
            let path = sys.join(file);
            std::fs::create_dir_all(path.parent().expect("a file has a folder")).expect("create");
            std::fs::write(path, "1.3\n").expect("write");
            assert_eq!(peermem(&sys), Some(name));
        }
        std::fs::remove_dir_all(sys).expect("clean up");
    }
}
