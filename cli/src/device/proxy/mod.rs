//! Device code of NCCL's proxy backend: descriptors in queues that the plugin reads.
//!
//! Device code claims a slot in the queue of a (context, peer), waits for credit, writes the words of a descriptor, and
//! learns from the consumer index when it is complete, step by step as in `gin_proxy.h` of NCCL 2.29.7, 2.30.3 and
//! 2.30.7.

mod context;
mod format;
mod thread;

pub use context::Context;
pub use format::Format;
pub use thread::Thread;

use super::{Pen, Waiting};
use crate::plugin::ContextConfig;
use nccl_plugin_api::{device_context::PROXY_VERSION, DeviceHandle, DEVICE_GIN_PROXY};

#[cfg(test)]
mod tests;

/// What device code of one rank sees of a `createContext`: its contexts.
pub struct Kernel {
    rank: u32,
    nranks: u32,
    format: Format,
    contexts: Vec<Context>,
}

impl Kernel {
    /// Reads what is behind a device handle, and says what is wrong with it. `config` is what `createContext` was asked
    /// for.
    ///
    /// # Safety
    /// `handle` is what the plugin's `createContext` returned, in memory that the CPU addresses. The contexts
    /// behind it live as long as the result is used.
    pub unsafe fn open(
        format: Format,
        rank: u32,
        nranks: u32,
        config: &ContextConfig,
        handle: &DeviceHandle,
    ) -> Result<Self, String> {
        let DeviceHandle { net_device_type: kind, net_device_version: version, needs_proxy_progress, .. } = *handle;
        if kind != DEVICE_GIN_PROXY {
            return Err(format!("the device handle's netDeviceType is {kind}: no proxy queue, which is 2"));
        }
        if version != PROXY_VERSION {
            return Err(format!("the device handle's netDeviceVersion is {version}, not {PROXY_VERSION}"));
        }
        if needs_proxy_progress != 0 {
            return Err(format!("needsProxyProgress is {needs_proxy_progress}: a queue of its own needs none"));
        }
        let array = handle.handle as usize;
        if array == 0 || array % 8 != 0 {
            return Err(format!("the device handle's array is at {array:#x}"));
        }
        let read = |number: usize| {
            let at = (array + number * format.element()) as *const u8;
            // SAFETY: as the caller promises: one element a context.
            unsafe { Context::read(at, number, &format, nranks, config) }
        };
        let contexts = (0..config.n_contexts.max(1) as usize).map(read).collect::<Result<_, _>>()?;
        Ok(Self { rank, nranks, format, contexts })
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        self.rank
    }

    /// Ranks in all.
    pub fn nranks(&self) -> u32 {
        self.nranks
    }

    /// How descriptors and contexts are laid out.
    pub fn format(&self) -> Format {
        self.format
    }

    /// How many contexts there are.
    pub fn len(&self) -> usize {
        self.contexts.len()
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.contexts.is_empty()
    }

    /// One context.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn context(&self, number: usize) -> &Context {
        &self.contexts[number]
    }

    /// A thread of device code that uses context `number`.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn thread<'a>(&'a self, number: usize, pen: Pen, waiting: &'a dyn Waiting) -> Thread<'a> {
        Thread::new(self, &self.contexts[number], pen, waiting)
    }
}
