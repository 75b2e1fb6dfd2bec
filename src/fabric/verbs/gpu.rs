//! GPU windows: the ways to register them with a device, tried in turn.
//!
//! A DMA-BUF that the caller brings comes first, then one that the driver exports here, then registration by address,
//! which needs a peer memory module in the kernel. Data Direct, where it is used, comes before all of them, and for all
//! GPU memory of a fabric or for none: the device writes by another function then, and what comes by one does not wait
//! for what comes by the other, so that a signal could be seen before its data. Whatever way it was, devices then read,
//! write and add to GPU memory by themselves: no data passes through here, and the CPU never touches it.

use super::port::{OF_SET, OF_TRIAL};
use super::regions::WindowGuard;
use super::VerbsFabric;
use crate::error::{Error, Result};
use crate::fabric::Region;
use crate::memory::gpu::GpuMemory;
use crate::memory::window::Registration;
use crate::sys::sync::Mutex;
use oxygin_ffi::cuda::{Mapping, CUDA_ERROR_INVALID_VALUE};
use oxygin_ffi::verbs::{Access, Mr};
use std::fmt;
use std::os::fd::AsRawFd;

/// How GPU memory came to be registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RegistrationWay {
    /// By the caller's DMA-BUF.
    Given,
    /// By a DMA-BUF of our own.
    Exported,
    /// By a DMA-BUF of our own that is mapped over PCIe.
    ExportedPcie,
    /// By a DMA-BUF of our own, which the device reaches by its Data Direct function.
    DataDirect,
    /// By address, with the help of this kernel module.
    Peermem(&'static str),
}

impl fmt::Display for RegistrationWay {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Given => f.write_str("the caller's DMA-BUF"),
            Self::Exported => f.write_str("a DMA-BUF"),
            Self::ExportedPcie => f.write_str("a DMA-BUF mapped over PCIe"),
            Self::DataDirect => f.write_str("a DMA-BUF with Data Direct"),
            Self::Peermem(module) => write!(f, "address ({module})"),
        }
    }
}

/// What a fabric knows about registering GPU memory.
pub(super) struct Gpu {
    /// `NCCL_DMABUF_ENABLE`.
    pub dma_buf: bool,
    /// The kernel's peer memory module.
    pub peermem: Option<&'static str>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// The GPU of the first window: one flush covers all windows only if they are on one GPU.
    device: Option<i32>,
    /// Whether memory is registered with Data Direct: as the first was.
    is_direct: Option<bool>,
    /// The way of the last window and why not another: said once, until it changes.
    said: String,
}

impl Gpu {
    pub fn new(dma_buf: bool, peermem: Option<&'static str>) -> Self {
        Self { dma_buf, peermem, state: Mutex::default() }
    }
}

const REMEDY: &str =
    "load the kernel module nvidia-peermem, or make DMA-BUFs work (kernel 5.12 or newer, rdma-core 34 or \
                      newer, NVIDIA's open kernel modules), or set OXYGIN_FABRIC=soft; `oxygin doctor` looks at each";

impl VerbsFabric {
    /// Registers GPU memory by the first way that works.
    pub(super) fn register_on_gpu(&self, region: &Region, memory: &GpuMemory) -> Result<Registration> {
        // Signals that are never reset are signals, whatever else was said of them.
        let region = Region { strict: region.strict || memory.signals.never_reset, ..*region };
        let gpu = memory.context.device();
        let place = format!("{} bytes of GPU {gpu} at {:#x}", region.len, region.base);
        self.admit(&region, gpu, &place)?;
        let mr = self.register_device_memory(&region, memory)?;
        self.gpu.state.lock().device = Some(gpu);
        let guard = WindowGuard::new(mr, region.id, true, &self.keys, &self.regions);
        let (lkey, rkey) = guard.keys();
        Ok(Registration { lkey, rkey, guard: Box::new(guard) })
    }

    /// Registers GPU memory by the first way that works, a window's or not.
    pub(super) fn register_device_memory(&self, region: &Region, memory: &GpuMemory) -> Result<Mr> {
        self.check_begin(region)?;
        let place = format!("{} bytes of GPU {} at {:#x}", region.len, memory.context.device(), region.base);
        let mut failed = Vec::new();
        let Some((way, mr)) = self.first_that_works(region, memory, &mut failed) else {
            if memory.context.is_rdma_capable(region.base) == Some(false) {
                failed.insert(
                    0,
                    "it was allocated without gpuDirectRDMACapable (ncclMemAlloc and cudaMalloc set it)".into(),
                );
            }
            let failed = failed.join("; ");
            return Err(Error::system(format!("{place} cannot be registered with {}: {failed}; {REMEDY}", self.label)));
        };
        self.gpu.state.lock().is_direct.get_or_insert(way == RegistrationWay::DataDirect);
        self.say(way, &failed, &place, region.id);
        Ok(mr)
    }

    /// What this fabric cannot do with GPU memory, however it is registered.
    fn admit(&self, region: &Region, gpu: i32, place: &str) -> Result<()> {
        let joined = self.joined()?;
        if region.strict && !joined.atomics {
            let lacking = (0u32..).zip(&joined.hellos).filter(|(_, h)| !h.atomics).map(|(r, _)| r.to_string());
            return Err(Error::usage(format!(
                "{place} for signals: the RDMA devices of ranks {} have no remote atomics (this rank's is {}), so the \
                 receiver's CPU would have to add, and it cannot write GPU memory; choose other devices with \
                 NCCL_IB_HCA, or set OXYGIN_FABRIC=soft",
                lacking.collect::<Vec<_>>().join(", "),
                self.label
            )));
        }
        if let Some(first) = self.gpu.state.lock().device.filter(|&first| first != gpu) {
            return Err(Error::usage(format!(
                "{place}: this communicator's windows are on GPU {first}; register memory of one GPU with a \
                 communicator"
            )));
        }
        Ok(())
    }

    fn first_that_works(
        &self,
        region: &Region,
        memory: &GpuMemory,
        failed: &mut Vec<String>,
    ) -> Option<(RegistrationWay, Mr)> {
        if self.devx.data_direct().is_some() && self.gpu.dma_buf && memory.context.has_dma_buf() {
            let way = RegistrationWay::DataDirect;
            let first = self.gpu.state.lock().is_direct;
            if first == Some(false) {
                failed.push(format!("by {way}: other memory of this communicator is not registered so"));
            } else if let Ok(mr) = self.try_export(region, memory, (way, Mapping::Pcie), failed) {
                return Some((way, mr));
            } else if first == Some(true) {
                failed.push(
                    "other ways: other memory of this communicator is registered with Data Direct, and signals could \
                     overtake data; set NCCL_IB_DATA_DIRECT=0"
                        .into(),
                );
                return None;
            }
        }
        if let Some(found) = self.by_dma_buf(region, memory, failed) {
            return Some(found);
        }
        let Some(module) = self.gpu.peermem else {
            failed.push("by address: the kernel has no peer memory module loaded".into());
            return None;
        };
        match self.register_region(&Region { dma_buf: None, ..*region }) {
            Ok(mr) => Some((RegistrationWay::Peermem(module), mr)),
            Err(e) => {
                failed.push(format!("by address, with {module} loaded: {e}"));
                None
            }
        }
    }

    fn by_dma_buf(
        &self,
        region: &Region,
        memory: &GpuMemory,
        failed: &mut Vec<String>,
    ) -> Option<(RegistrationWay, Mr)> {
        if !self.gpu.dma_buf {
            failed.push("by DMA-BUF: NCCL_DMABUF_ENABLE=0".into());
            return None;
        }
        if !self.device().verbs().has_dmabuf() {
            failed.push("by DMA-BUF: libibverbs has no ibv_reg_dmabuf_mr".into());
            return None;
        }
        if region.dma_buf.is_some() {
            match self.register_region(region) {
                Ok(mr) => return Some((RegistrationWay::Given, mr)),
                Err(e) => {
                    failed.push(format!("by the caller's DMA-BUF: {e}"));
                    if is_unknown_to_kernel(&e) {
                        return None;
                    }
                }
            }
        }
        if !memory.context.has_dma_buf() {
            failed.push(format!("by a DMA-BUF of our own: GPU {} exports none", memory.context.device()));
            return None;
        }
        for way in [(RegistrationWay::Exported, Mapping::Usual), (RegistrationWay::ExportedPcie, Mapping::Pcie)] {
            match self.try_export(region, memory, way, failed) {
                Ok(mr) => return Some((way.0, mr)),
                Err(Refused::Registration(e)) if is_unknown_to_kernel(&e) => return None,
                Err(_) => {}
            }
        }
        None
    }

    /// Registers by a DMA-BUF of our own, or notes why not.
    fn try_export(
        &self,
        region: &Region,
        memory: &GpuMemory,
        (way, mapping): (RegistrationWay, Mapping),
        failed: &mut Vec<String>,
    ) -> std::result::Result<Mr, Refused> {
        self.export(region, memory, way, mapping).inspect_err(|refused| match refused {
            Refused::Export(why) => failed.push(format!("by {way}: {why}")),
            Refused::Registration(e) => {
                let hint = match e.raw_os_error() {
                    Some(libc::ENOMEM) => {
                        " (raise `ulimit -l`; or the GPU's BAR1 is full, see nvidia-smi -q -d MEMORY)"
                    }
                    _ => "",
                };
                failed.push(format!("by {way}: {e}{hint}"));
            }
        })
    }

    /// Registers by a DMA-BUF of our own, which is closed again: the region holds what it stands for.
    fn export(
        &self,
        region: &Region,
        memory: &GpuMemory,
        way: RegistrationWay,
        mapping: Mapping,
    ) -> std::result::Result<Mr, Refused> {
        let (start, bytes) = pages(region.base, region.len, page_size())
            .ok_or_else(|| Refused::Export("the range ends past the last page".into()))?;
        let fd = memory.context.export_dma_buf(start, bytes, mapping).map_err(|e| {
            let hint = match e.code {
                CUDA_ERROR_INVALID_VALUE => " (a range of several pieces must be of one GPU, made alike, without gaps)",
                _ => "",
            };
            Refused::Export(format!("{e}{hint}"))
        })?;
        let exported = Region { dma_buf: Some((fd.as_raw_fd(), region.base - start)), ..*region };
        let direct = self.devx.data_direct().filter(|_| way == RegistrationWay::DataDirect);
        let registered = match direct {
            Some(device) => {
                let access = Access { atomic: true, relaxed: self.relaxed && !region.strict };
                let place = (fd.as_raw_fd(), region.base - start);
                device.register_data_direct(&self.pd, place, 0, region.len as usize, access)
            }
            None => self.register_region(&exported),
        };
        registered.map_err(Refused::Registration)
    }

    fn say(&self, way: RegistrationWay, failed: &[String], place: &str, id: u32) {
        let mut said = format!("{}: GPU memory is registered by {way}", self.label);
        if !failed.is_empty() {
            said = format!("{said}; {}", failed.join("; "));
        }
        let what = match id {
            OF_SET => "memory of a set of contexts".to_owned(),
            OF_TRIAL => "memory of a trial".to_owned(),
            id => format!("window {id}"),
        };
        let mut state = self.gpu.state.lock();
        if state.said == said || id == OF_TRIAL {
            log::debug!("{}: {what}, {place}, by {way}", self.label);
        } else {
            log::info!("{said} ({what}, {place})");
            state.said = said;
        }
    }
}

/// Why a DMA-BUF of our own did not do.
enum Refused {
    Export(String),
    Registration(std::io::Error),
}

/// Whether the kernel or the device's driver has no DMA-BUF registration at all: another descriptor fares no better.
fn is_unknown_to_kernel(e: &std::io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EPROTONOSUPPORT | libc::ENOSYS))
}

/// Bytes of a page of host memory.
pub fn page_size() -> u64 {
    // SAFETY: plain call.
    u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(4096)
}

/// Start and bytes of the pages that a range touches.
pub fn pages(base: u64, len: u64, page: u64) -> Option<(u64, usize)> {
    let start = base & !(page - 1);
    let end = base.checked_add(len)?.checked_next_multiple_of(page)?;
    Some((start, usize::try_from(end - start).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_grow_to_whole_pages() {
        assert_eq!(pages(0x10_000, 4096, 4096), Some((0x10_000, 4096)));
        assert_eq!(pages(0x10_008, 8, 4096), Some((0x10_000, 4096)));
        assert_eq!(pages(0x10_ff8, 16, 4096), Some((0x10_000, 8192)));
        assert_eq!(pages(0x10_000, 1, 65_536), Some((0x10_000, 65_536)));
        assert_eq!(pages(u64::MAX - 8, 8, 4096), None);
        assert_eq!(pages(u64::MAX, 8, 4096), None);
    }
}
