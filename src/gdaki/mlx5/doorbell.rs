//! Doorbell pages: registers of the device, mapped for kernels.

use super::command::queue_pair::DoorbellMode;
use crate::error::{Error, Result};
use crate::memory::gpu::cuda_error;
use oxygin_ffi::cuda::{Context, IoRegister};
use oxygin_ffi::mlx5::{DevxDevice, Uar, UarKind};
use std::sync::Arc;

/// Where in a page a doorbell without a record is rung (NCCL's copy of DOCA GPUNetIO, `doca_verbs_uar.cpp`).
const NO_RECORD_REGISTER: usize = 0x600;
/// Where completion queues are rung (`MLX5_CQ_DOORBELL`).
const COMPLETION_REGISTER: usize = 0x20;
/// Bytes of a register.
const REGISTER_BYTES: usize = 8;

/// A non-cached doorbell page whose registers kernels can write: the one of queues with a doorbell record, and the one
/// of queues without.
///
/// Queue pairs of different peers share one: a doorbell is one store of 8 bytes that names its queue pair.
pub struct DoorbellPage {
    /// Given back before the page is.
    io: Option<IoRegister>,
    uar: Uar,
}

impl DoorbellPage {
    /// One that nobody else has, or the one that all share where there is none any more. `context`: in which kernels
    /// run; `None`: device code runs on CPUs.
    pub fn take(device: &Arc<DevxDevice>, context: Option<&Arc<Context>>) -> Result<Self> {
        Self::dedicated(device, context).or_else(|first| {
            Self::shared(device, context).map_err(|e| e.context(format_args!("{first}; and the page that all share")))
        })
    }

    /// One that nobody else has.
    pub fn dedicated(device: &Arc<DevxDevice>, context: Option<&Arc<Context>>) -> Result<Self> {
        Self::of_kind(device, UarKind::Dedicated, context)
    }

    /// The one that all of this open device share; to be taken once.
    pub fn shared(device: &Arc<DevxDevice>, context: Option<&Arc<Context>>) -> Result<Self> {
        Self::of_kind(device, UarKind::Shared, context)
    }

    fn of_kind(device: &Arc<DevxDevice>, kind: UarKind, context: Option<&Arc<Context>>) -> Result<Self> {
        let uar = Uar::new(device, kind)
            .map_err(|e| Error::system(format!("a doorbell page of the device ({kind:?}): {e}")))?;
        let mut page = Self { io: None, uar };
        if let Some(context) = context {
            page.map(context)?;
        }
        Ok(page)
    }

    /// Maps its registers for kernels.
    fn map(&mut self, context: &Arc<Context>) -> Result<()> {
        let registers = [DoorbellMode::Record, DoorbellMode::NoRecord].map(|mode| self.register(mode) as usize);
        let bytes = registers[0].abs_diff(registers[1]) + REGISTER_BYTES;
        // Both at once: the driver maps a page once.
        // SAFETY: the page is mapped until it is given back, which is after this mapping's end.
        let io = unsafe { IoRegister::map(context, self.first_register(), bytes) };
        self.io = Some(io.map_err(|e| {
            cuda_error("mapping a doorbell page for the GPU", &e).context(
                "the GPU cannot ring the device: the driver's module option PeerMappingOverride=1 or a newer driver \
                 may help",
            )
        })?);
        Ok(())
    }

    /// Why kernels cannot ring the device; `None`: they can. An error: it has no doorbell page at all. To be asked
    /// before any page of this open device is mapped.
    pub fn refused_to_kernels(device: &Arc<DevxDevice>, context: Option<&Arc<Context>>) -> Result<Option<Error>> {
        let mut page = Self::take(device, None)?;
        Ok(context.and_then(|context| page.map(context).err()))
    }

    /// The register of queues that are rung in this way.
    fn register(&self, mode: DoorbellMode) -> *mut std::ffi::c_void {
        match mode {
            DoorbellMode::Record => self.uar.register(),
            DoorbellMode::NoRecord => self.uar.page().wrapping_byte_add(NO_RECORD_REGISTER),
        }
    }

    /// The one at the lower address, from which on both are mapped for kernels.
    fn first_register(&self) -> *mut std::ffi::c_void {
        self.register(DoorbellMode::Record).min(self.register(DoorbellMode::NoRecord))
    }

    /// By which queues name it.
    pub fn number(&self) -> u32 {
        self.uar.number()
    }

    /// Rings for a send queue with a record, from this process: what was written to its record before is there for the
    /// device.
    pub fn ring_sends(&self, word: u64) {
        barrier_to_device();
        // SAFETY: a register in the page, which is mapped as long as `uar` lives.
        unsafe { self.register(DoorbellMode::Record).cast::<u64>().write_volatile(word.to_be()) };
    }

    /// Rings for a completion queue of this page, from this process: what was written to its record before is there for
    /// the device.
    pub fn ring_completions(&self, word: u64) {
        barrier_to_device();
        let at = self.uar.page().wrapping_byte_add(COMPLETION_REGISTER).cast::<u64>();
        // SAFETY: a register in the page, which is mapped as long as `uar` lives.
        unsafe { at.write_volatile(word.to_be()) };
    }

    /// The register of queues that are rung in this way, for kernels.
    pub fn for_kernels(&self, mode: DoorbellMode) -> u64 {
        let register = self.register(mode) as u64;
        let mapped = |io: &IoRegister| io.device() + (register - self.first_register() as u64);
        self.io.as_ref().map_or(register, mapped)
    }
}

/// What was stored before in memory the device sees before what is stored behind in its registers.
fn barrier_to_device() {
    // On x86 a store to non-cached memory stands behind all stores before it; the compiler has to keep the order, too.
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier for all observers, devices among them.
    unsafe {
        std::arch::asm!("dmb oshst", options(nostack, preserves_flags));
    }
}
