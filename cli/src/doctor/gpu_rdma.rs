//! Whether RDMA devices can register GPU memory, and which way.

use super::report::Section;
use oxygin::fabric::verbs::DeviceInfo;

/// Looks at each device. `dma_buf`: `NCCL_DMABUF_ENABLE`; `exports`: whether GPUs export DMA-BUFs, `None` without GPUs;
/// `peermem`: the kernel's peer memory module.
pub fn section(ports: &[DeviceInfo], dma_buf: bool, exports: Option<bool>, peermem: Option<&str>) -> Section {
    let mut section = Section::new("GPU memory over RDMA");
    let mut devices: Vec<_> = ports.iter().map(|p| (&*p.name, p.dma_buf)).collect();
    devices.dedup();
    for (name, registers) in devices {
        device(&mut section, name, DmaBuf { enabled: dma_buf, registers, exports }, peermem);
    }
    if section.findings.is_empty() {
        section.note("devices", "there is none");
    }
    section
}

/// What a DMA-BUF needs.
struct DmaBuf {
    enabled: bool,
    registers: bool,
    exports: Option<bool>,
}

fn device(section: &mut Section, name: &str, dma_buf: DmaBuf, peermem: Option<&str>) {
    let Some(exports) = dma_buf.exports else {
        return section.note(name, "host memory only: there is no CUDA driver here");
    };
    let obstacles = [
        (!dma_buf.enabled, "NCCL_DMABUF_ENABLE=0", "unset it"),
        (
            !dma_buf.registers,
            "this device registers no DMA-BUFs",
            "use a kernel of 5.12 or newer, the device's newest driver, and rdma-core 34 or newer",
        ),
        (!exports, "the GPU driver exports no DMA-BUFs", "use NVIDIA's open kernel modules"),
    ];
    let stand: Vec<_> = obstacles.into_iter().filter(|o| o.0).collect();
    let why = stand.iter().map(|o| o.1).collect::<Vec<_>>().join("; ");
    match (stand.is_empty(), peermem) {
        (true, _) => section.ok(name, "GPU memory is registered by DMA-BUF"),
        (false, Some(module)) => {
            section.ok(name, format!("GPU memory is registered by address, with {module} ({why})"))
        }
        (false, None) => {
            let remedies = stand.iter().map(|o| o.2).collect::<Vec<_>>().join(", and ");
            section.no(
                name,
                format!("GPU memory cannot be registered: {why}; and no peer memory module is loaded"),
                format!("modprobe nvidia-peermem; or: {remedies}; or set OXYGIN_FABRIC=soft"),
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::report::Verdict;
    use super::*;

    fn said(enabled: bool, registers: bool, exports: Option<bool>, peermem: Option<&str>) -> (Verdict, String) {
        let mut section = Section::new("t");
        device(&mut section, "mlx5_0", DmaBuf { enabled, registers, exports }, peermem);
        let finding = section.findings.remove(0);
        (finding.verdict, format!("{} -> {}", finding.detail, finding.remedy.unwrap_or_default()))
    }

    #[test]
    fn each_way_and_each_obstacle_is_named() {
        assert_eq!(said(true, true, None, None).0, Verdict::Note);
        let (verdict, text) = said(true, true, Some(true), None);
        assert!(verdict == Verdict::Ok && text.contains("by DMA-BUF"), "{text}");
        for (enabled, registers, exports, part) in [
            (false, true, true, "NCCL_DMABUF_ENABLE=0"),
            (true, false, true, "this device registers no DMA-BUFs"),
            (true, true, false, "the GPU driver exports no DMA-BUFs"),
        ] {
            let (verdict, text) = said(enabled, registers, Some(exports), Some("nvidia_peermem"));
            assert!(verdict == Verdict::Ok && text.contains("with nvidia_peermem (") && text.contains(part), "{text}");
            let (verdict, text) = said(enabled, registers, Some(exports), None);
            assert!(verdict == Verdict::No && text.contains(part), "{text}");
            assert!(text.contains("modprobe nvidia-peermem") && text.contains("OXYGIN_FABRIC=soft"), "{text}");
        }
    }
}
