//! Memory of queues, as the device knows it.

use super::plan::RING_BORDER;
use crate::error::{Error, Result};
use crate::fabric::verbs::{page_size, pages};
use crate::proxy::memory::Memory;
use oxygin_ffi::cuda::Mapping;
use oxygin_ffi::mlx5::{no_page_sizes, DevxDevice, Umem};
use std::io;
use std::os::fd::AsRawFd;
use std::sync::Arc;

/// A part of a set's memory in which queues lie.
pub struct QueueUmem {
    /// Given back before the memory is.
    umem: Umem,
    _memory: Arc<Memory>,
    /// First byte, for device code.
    base: u64,
    /// Bytes from the umem's beginning to it.
    skipped: u64,
}

impl QueueUmem {
    /// `bytes` of device code's memory, which begin a page there. On a GPU by DMA-BUF, unless `dma_buf` says no or the
    /// driver, the kernel or libmlx5 does not, and then by address, which needs a peer memory module.
    pub fn on_device(
        device: &Arc<DevxDevice>,
        memory: &Arc<Memory>,
        base: u64,
        bytes: usize,
        dma_buf: bool,
    ) -> Result<Self> {
        let mut failed = Vec::new();
        if let Some(context) = memory.context() {
            match dma_buf {
                false => failed.push("by DMA-BUF: NCCL_DMABUF_ENABLE=0".to_owned()),
                true if !context.has_dma_buf() => {
                    failed.push(format!("by DMA-BUF: GPU {} exports none", context.device()));
                }
                true => match Self::by_dma_buf(device, memory, base, bytes) {
                    Ok(made) => return Ok(made),
                    Err(why) => failed.push(format!("by DMA-BUF: {why}")),
                },
            }
        }
        let by_address = match memory.is_on_gpu() {
            // SAFETY: the memory is held, and given back after the umem.
            true => unsafe { Umem::by_address(device, base, bytes, RING_BORDER) },
            // SAFETY: as above.
            false => unsafe { on_host_pages(device, base, bytes) },
        };
        by_address.map(|umem| Self { umem, _memory: memory.clone(), base, skipped: 0 }).map_err(|e| {
            let remedy = match memory.is_on_gpu() {
                true => {
                    "load the kernel module nvidia-peermem, or make DMA-BUFs work (rdma-core 45, NVIDIA's open \
                         kernel modules)"
                }
                false => "raise the limit of locked memory (`ulimit -l`)",
            };
            failed.push(format!("by address: {e}"));
            let failed = failed.join("; ");
            Error::system(format!(
                "{bytes} bytes for queues at {base:#x} cannot be given to the device: {failed}; {remedy}"
            ))
        })
    }

    fn by_dma_buf(
        device: &Arc<DevxDevice>,
        memory: &Arc<Memory>,
        base: u64,
        bytes: usize,
    ) -> std::result::Result<Self, String> {
        let context = memory.context().ok_or("there is no GPU")?;
        let page = page_size();
        let (start, whole) = pages(base, bytes as u64, page).ok_or("the range ends past the last page")?;
        let fd = context.export_dma_buf(start, whole, Mapping::Usual).map_err(|e| e.to_string())?;
        let umem = Umem::by_dma_buf(device, (fd.as_raw_fd(), 0), whole, RING_BORDER).map_err(|e| e.to_string())?;
        Ok(Self { umem, _memory: memory.clone(), base, skipped: base - start })
    }

    /// `bytes` of host memory that device code has nothing to do with, which begin a page.
    pub fn on_host(device: &Arc<DevxDevice>, memory: &Arc<Memory>, base: u64, bytes: usize) -> Result<Self> {
        // SAFETY: as above.
        let umem = unsafe { on_host_pages(device, base, bytes) }.map_err(|e| {
            Error::system(format!(
                "{bytes} bytes of host memory for queues cannot be given to the device: {e}; raise the limit of locked \
                 memory (`ulimit -l`)"
            ))
        })?;
        Ok(Self { umem, _memory: memory.clone(), base, skipped: 0 })
    }

    /// Where something is that lies `offset` bytes behind the beginning: for the device.
    pub fn place(&self, offset: u64) -> super::command::completion_queue::InUmem {
        super::command::completion_queue::InUmem { umem: self.umem.number(), offset: self.skipped + offset }
    }

    /// The same for device code.
    pub fn for_kernels(&self, offset: u64) -> u64 {
        self.base + offset
    }
}

/// Host memory of our own, whose pages are small in all but rare cases if the kernel chooses their size.
///
/// # Safety
/// As [`Umem::by_address`].
unsafe fn on_host_pages(device: &Arc<DevxDevice>, base: u64, bytes: usize) -> io::Result<Umem> {
    // SAFETY: the caller's.
    unsafe { Umem::by_address(device, base, bytes, RING_BORDER) }.or_else(|e| match no_page_sizes(&e) {
        // SAFETY: the caller's.
        true => unsafe { Umem::in_any_pages(device, base, bytes) },
        false => Err(e),
    })
}
