//! Device code, played by CPU threads: what kernels do with what is behind a device handle.
//!
//! A plugin whose `createContext` returns a device handle owns the queues that device code writes. There are two kinds:
//! [`proxy`], descriptors that the plugin reads, and [`gdaki`], work queue entries and doorbells of an mlx5 device. The
//! threads here do what NCCL's headers of each version do, so that any plugin can be driven on a machine without a GPU,
//! where all memory behind the handle is the process's own.
//!
//! GPUs write a descriptor or an entry in pieces, in any order; here single words are written in any order, with pauses
//! and with garbage in the bits that device code leaves uninitialised ([`Pen`]). Every wait has an end ([`Waiting`]),
//! whose error names context, peer and index.

pub mod gdaki;
mod pen;
pub mod proxy;
mod thread;
mod wait;

pub use pen::Pen;
pub use thread::{Place, Request, Signal, Thread, CHUNK};
pub use wait::{Deadline, Waiting};

use crate::plugin::{ContextConfig, Via, Way};
use nccl_plugin_api::DeviceHandle;

/// An operation that was posted: complete once its queue has come past it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Posted {
    /// Context.
    pub context: usize,
    /// Whose queue.
    pub peer: u32,
    /// One more than the index of its last descriptor (counted modulo 2^32) or entry.
    pub next: u64,
}

/// What device code was compiled for.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Compiled {
    /// Descriptors.
    Proxy(proxy::Format),
    /// Entries, in the layout of one NCCL.
    Gdaki(gdaki::Numbers),
}

impl Compiled {
    /// What the device code of a way was compiled for; `None` where operations go in by calls. The environment may ask
    /// for another layout of descriptors ([`proxy::Format::from_env`]).
    pub fn of(way: Way) -> Result<Option<Self>, String> {
        match way.via {
            Via::Calls => Ok(None),
            Via::Queue => Ok(proxy::Format::from_env(way.kind)?.map(Self::Proxy)),
            Via::Gdaki(nccl) => {
                let known = gdaki::Numbers::of(nccl).ok_or_else(|| format!("nothing is known of NCCL {nccl}"))?;
                Ok(Some(Self::Gdaki(known)))
            }
        }
    }

    /// The backendVersion by which NCCL asks GIN v14 for this layout: 1 or 2.
    pub fn backend_version(self) -> i32 {
        match self {
            Self::Proxy(format) => format.backend_version(),
            Self::Gdaki(numbers) => numbers.backend_version(),
        }
    }
}

/// What device code of one rank sees of a `createContext`: its contexts.
pub enum Device {
    /// Queues of descriptors.
    Proxy(proxy::Kernel),
    /// Queue pairs.
    Gdaki(gdaki::Kernel<'static>),
}

impl Device {
    /// Reads what is behind a device handle, and says what is wrong with it. `config` is what `createContext` was asked
    /// for.
    ///
    /// # Safety
    /// `handle` is NULL or what the plugin's `createContext` returned, in memory that the CPU addresses. The contexts
    /// behind it live as long as the result is used.
    pub unsafe fn open(
        compiled: Compiled,
        rank: u32,
        nranks: u32,
        config: &ContextConfig,
        handle: *const DeviceHandle,
    ) -> Result<Self, String> {
        if handle.is_null() {
            return Err("createContext left the device handle NULL".into());
        }
        // SAFETY: as the caller promises.
        let handle = unsafe { handle.read() };
        // SAFETY: as the caller promises.
        unsafe {
            match compiled {
                Compiled::Proxy(format) => proxy::Kernel::open(format, rank, nranks, config, &handle).map(Self::Proxy),
                Compiled::Gdaki(numbers) => {
                    gdaki::Kernel::open(numbers, rank, nranks, config, &handle).map(Self::Gdaki)
                }
            }
        }
    }

    /// This rank.
    pub fn rank(&self) -> u32 {
        match self {
            Self::Proxy(kernel) => kernel.rank(),
            Self::Gdaki(kernel) => kernel.rank(),
        }
    }

    /// Ranks in all.
    pub fn nranks(&self) -> u32 {
        match self {
            Self::Proxy(kernel) => kernel.nranks(),
            Self::Gdaki(kernel) => kernel.nranks(),
        }
    }

    /// How many contexts there are.
    pub fn len(&self) -> usize {
        match self {
            Self::Proxy(kernel) => kernel.len(),
            Self::Gdaki(kernel) => kernel.len(),
        }
    }

    /// Never.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The queues of descriptors, if that is what there is.
    pub fn proxy(&self) -> Option<&proxy::Kernel> {
        match self {
            Self::Proxy(kernel) => Some(kernel),
            Self::Gdaki(_) => None,
        }
    }

    /// The queue pairs, if that is what there is.
    pub fn gdaki(&self) -> Option<&gdaki::Kernel<'static>> {
        match self {
            Self::Proxy(_) => None,
            Self::Gdaki(kernel) => Some(kernel),
        }
    }

    /// Slots of a queue towards this rank.
    ///
    /// # Panics
    /// If there is no context of this number.
    pub fn queue_size(&self, context: usize) -> u32 {
        match self {
            Self::Proxy(kernel) => kernel.context(context).queue_size(),
            Self::Gdaki(kernel) => kernel.queue_pair(context, kernel.rank()).map_or(0, |qp| qp.view.size),
        }
    }

    /// The most bytes that a value inside an operation may have.
    pub fn most_inline(&self) -> usize {
        match self {
            Self::Proxy(_) => size_of::<u64>(),
            Self::Gdaki(_) => gdaki::MOST_INLINE,
        }
    }

    /// What nobody has posted to yet is as it has to be at first, or says what is not.
    pub fn untouched(&self, context: usize, peer: u32) -> Result<(), String> {
        match self {
            Self::Proxy(kernel) => kernel.context(context).untouched(peer),
            Self::Gdaki(kernel) => kernel.untouched(context, peer),
        }
    }

    /// Whether an operation is complete; the error says that it has failed.
    pub fn is_complete(&self, posted: &Posted) -> Result<bool, String> {
        match self {
            Self::Proxy(kernel) => Ok(kernel.context(posted.context).is_complete(posted)),
            Self::Gdaki(kernel) => kernel.is_complete(posted),
        }
    }

    /// Says where the queue of an operation stands that is not complete.
    pub fn standing(&self, posted: &Posted) -> String {
        match self {
            Self::Proxy(kernel) => kernel.context(posted.context).standing(posted),
            Self::Gdaki(kernel) => kernel.standing(posted),
        }
    }

    /// A thread of device code that uses context `number`.
    ///
    /// # Panics
    /// If there is none of this number.
    pub fn thread<'a>(&'a self, number: usize, pen: Pen, waiting: &'a dyn Waiting) -> Thread<'a> {
        match self {
            Self::Proxy(kernel) => Thread::Proxy(kernel.thread(number, pen, waiting)),
            Self::Gdaki(kernel) => Thread::Gdaki(kernel.thread(number, pen, waiting)),
        }
    }
}
