//! GPUs, their driver, and the modules that help RDMA devices and CPUs reach GPU memory.

use super::child;
use super::report::Section;
use oxygin_ffi::cuda::{ENV_PATH, SONAME};
use std::ffi::{c_char, c_int};
use std::path::Path;
use std::time::Duration;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED`.
const ATTRIBUTE_RDMA: c_int = 116;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
const ATTRIBUTE_DMA_BUF: c_int = 124;

/// The driver's own line; GPUs have the others.
const DRIVER: &str = "CUDA driver";

/// Looks at GPUs. Says too whether all of them export DMA-BUFs; `None` where there is no GPU. Forks.
pub fn gpu() -> (Section, Option<bool>) {
    let mut section = Section::new("GPU memory");
    let mut exports = None;
    // cuInit starts threads and may take long: not in this process.
    match child::ask(Duration::from_secs(60), query) {
        Ok(text) => {
            for line in text.lines() {
                let (subject, detail) = line.split_once('\t').unwrap_or(("GPU", line));
                if subject != DRIVER {
                    exports = Some(exports != Some(false) && detail.contains("DMA-BUF yes"));
                }
                section.ok(subject, detail);
            }
        }
        Err(e) => section.no(DRIVER, e, "host memory works without; for GPUs install the NVIDIA driver"),
    }
    if let Ok(version) = std::fs::read_to_string("/proc/driver/nvidia/version") {
        section.note("kernel driver", version.lines().next().unwrap_or_default());
    }
    let modules = std::fs::read_to_string("/proc/modules").unwrap_or_default();
    let loaded = |name: &str| modules.lines().any(|l| l.split(' ').next() == Some(name));
    match loaded("nvidia_peermem") {
        true => section.ok("nvidia_peermem", "loaded"),
        false => section.note("nvidia_peermem", "not loaded; oxygin does without it (DMA-BUF, or copies)"),
    }
    match loaded("gdrdrv") || Path::new("/dev/gdrdrv").exists() {
        true => section.ok("GDRCopy", "its driver gdrdrv is here"),
        false => section.note("GDRCopy", "its driver gdrdrv is not here; oxygin does without it"),
    }
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    let release = release.trim();
    match kernel_exports_dma_buf(release) {
        true => section.ok("DMA-BUF", format!("kernel {release} can register DMA-BUFs with RDMA devices")),
        false => {
            section.no("DMA-BUF", format!("kernel {release} is older than 5.12"), "a newer kernel, or nvidia_peermem")
        }
    }
    (section, exports)
}

fn kernel_exports_dma_buf(release: &str) -> bool {
    let mut numbers = release.split(['.', '-']).map_while(|n| n.parse::<u32>().ok());
    (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0)) >= (5, 12)
}

fn query() -> Result<String, String> {
    type Get = unsafe extern "C" fn(*mut c_int) -> c_int;
    type Name = unsafe extern "C" fn(*mut c_char, c_int, c_int) -> c_int;
    type Attribute = unsafe extern "C" fn(*mut c_int, c_int, c_int) -> c_int;
    // SAFETY: the driver library; its functions have these types in every CUDA version, and get valid places.
    unsafe {
        // As the library finds it.
        let path = std::env::var(ENV_PATH).ok().filter(|p| !p.is_empty()).unwrap_or(SONAME.into());
        let cuda = libloading::Library::new(path).map_err(|e| e.to_string())?;
        let symbol = |e: libloading::Error| e.to_string();
        let init: libloading::Symbol<'_, unsafe extern "C" fn(u32) -> c_int> = cuda.get(b"cuInit").map_err(symbol)?;
        let version: libloading::Symbol<'_, Get> = cuda.get(b"cuDriverGetVersion").map_err(symbol)?;
        let count: libloading::Symbol<'_, Get> = cuda.get(b"cuDeviceGetCount").map_err(symbol)?;
        let name: libloading::Symbol<'_, Name> = cuda.get(b"cuDeviceGetName").map_err(symbol)?;
        let attribute: libloading::Symbol<'_, Attribute> = cuda.get(b"cuDeviceGetAttribute").map_err(symbol)?;
        let code = init(0);
        if code != 0 {
            return Err(format!("cuInit failed with {code} (100: no device)"));
        }
        let (mut cuda_version, mut devices) = (0, 0);
        version(&mut cuda_version);
        count(&mut devices);
        let (major, minor) = (cuda_version / 1000, cuda_version % 1000 / 10);
        let mut text = format!("{DRIVER}\tfor CUDA {major}.{minor}, {devices} GPU(s)\n");
        for device in 0..devices {
            let mut buffer = [0_u8; 256];
            name(buffer.as_mut_ptr().cast(), 255, device);
            let label = String::from_utf8_lossy(&buffer).trim_end_matches('\0').to_owned();
            let yes = |which: c_int| {
                let mut value = 0;
                match attribute(&mut value, which, device) {
                    0 if value != 0 => "yes",
                    0 => "no",
                    _ => "not known to this driver",
                }
            };
            let (dma_buf, rdma) = (yes(ATTRIBUTE_DMA_BUF), yes(ATTRIBUTE_RDMA));
            text.push_str(&format!("GPU {device}\t{label}; DMA-BUF {dma_buf}, GPUDirect RDMA {rdma}\n"));
        }
        Ok(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_are_compared_by_number() {
        assert!(kernel_exports_dma_buf("5.12.0-rc1"));
        assert!(kernel_exports_dma_buf("6.1.0"));
        assert!(!kernel_exports_dma_buf("5.4.0-100-generic"));
        assert!(!kernel_exports_dma_buf(""));
    }
}
