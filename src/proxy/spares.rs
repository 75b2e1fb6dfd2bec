//! Memory shared with GPUs of sets that have ended, for those that come.
//!
//! To give such memory back the driver waits for the application's kernels, and holds a lock of its context all the
//! while (docs/gpu/private-context.md). A kernel that waits for a transfer would hold up whoever destroys another
//! communicator beside it. So what a set leaves is kept as long as another one is there in its context, which may be
//! the one that the kernel uses; what comes takes it from here. The last one of a context frees all.
//!
//! destroyContext says that no kernel uses a set any more. Where closeColl comes without it, as in a program that never
//! ends its device communicators, nobody says so: a kernel may still poll there, in an aborted communicator above all.
//! What such a set has ([`Remains`]) nobody else gets. It is kept beside the spares, and a thread that nobody waits for
//! frees it: what is shared with the GPU first, for which the driver waits for the kernels, and mappings after that,
//! for which it does not.

use crate::sys::sync::Mutex;
use crate::sys::thread::Thread;
use oxygin_ffi::cuda::{Context, CudaError, Managed, Mapped, Pinned, CUDA_ERROR_NOT_SUPPORTED};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Bytes that are kept in a context, of spares and of remains each. What is more a thread gives back that nobody waits
/// for.
const MOST: usize = 256 << 20;
/// Stack of that thread.
const STACK: usize = 256 << 10;
/// Bytes that memory may be larger by than what takes it, beside a half of that.
const SLACK: usize = 64 << 10;

/// Memory that the CPU and device code share.
pub enum SharedMemory {
    /// It stays in host memory.
    Pinned(Pinned),
    /// It may be brought to the GPU.
    Managed(Managed),
}

impl SharedMemory {
    /// Where the CPU sees it.
    pub fn host(&self) -> *mut u8 {
        match self {
            Self::Pinned(memory) => memory.host(),
            Self::Managed(memory) => memory.host(),
        }
    }

    /// Where device code sees it.
    pub fn device(&self) -> u64 {
        match self {
            Self::Pinned(memory) => memory.device(),
            Self::Managed(memory) => memory.device(),
        }
    }

    /// Bytes.
    fn bytes(&self) -> usize {
        match self {
            Self::Pinned(memory) => memory.bytes(),
            Self::Managed(memory) => memory.bytes(),
        }
    }

    /// Whether it may be brought to the GPU.
    pub fn is_managed(&self) -> bool {
        matches!(self, Self::Managed(_))
    }
}

/// What a set had that kernels may still use.
pub struct Remains {
    /// Not empty: to free it, before the rest, takes until the kernels have ended.
    shared: Vec<SharedMemory>,
    mapped: Vec<Mapped>,
}

impl Remains {
    /// Of a set that had this. `None`: nothing of it makes the driver wait for kernels, and the mappings stay.
    pub fn new(shared: Vec<SharedMemory>, mapped: Vec<Mapped>) -> Option<Self> {
        if shared.is_empty() {
            std::mem::forget(mapped);
            return None;
        }
        Some(Self { shared, mapped })
    }
}

/// What can be kept.
trait Kept: Send + 'static {
    /// Bytes.
    fn bytes(&self) -> usize;

    /// Takes out of what is kept, oldest first, what is too much.
    fn take_over(kept: &mut Vec<Self>) -> Vec<Self>
    where
        Self: Sized,
    {
        let (mut bytes, mut over): (usize, _) = (kept.iter().map(Self::bytes).sum(), 0);
        while bytes > MOST {
            bytes -= kept[over].bytes();
            over += 1;
        }
        kept.drain(..over).collect()
    }
}

impl Kept for SharedMemory {
    fn bytes(&self) -> usize {
        Self::bytes(self)
    }
}

impl Kept for Remains {
    fn bytes(&self) -> usize {
        self.shared.iter().map(SharedMemory::bytes).chain(self.mapped.iter().map(Mapped::bytes)).sum()
    }
}

/// What is kept in a context.
struct SparePool {
    context: Arc<Context>,
    /// Those who use such memory of the context, or may.
    users: usize,
    /// Oldest first.
    spares: Vec<SharedMemory>,
    /// Oldest first.
    remains: Vec<Remains>,
}

static POOLS: Mutex<Vec<SparePool>> = Mutex::new(Vec::new());

/// Somebody who uses memory shared with the GPU of a context.
pub struct SharedUser {
    context: Arc<Context>,
    /// It keeps what it has for ever, and is waited for no longer.
    has_left: AtomicBool,
}

impl SharedUser {
    /// Of this context.
    pub fn new(context: &Arc<Context>) -> Self {
        let mut pools = POOLS.lock();
        match pools.iter_mut().find(|pool| pool.context.is(context)) {
            Some(pool) => pool.users += 1,
            None => {
                pools.push(SparePool { context: context.clone(), users: 1, spares: Vec::new(), remains: Vec::new() })
            }
        }
        Self { context: context.clone(), has_left: AtomicBool::new(false) }
    }

    /// What it has is never given back: that of others is freed without it.
    pub fn leave(&self) {
        if let Some(SparePool { context, spares, remains, .. }) = self.end() {
            free(&context, spares);
            free_aside(context, remains);
        }
    }

    /// It has ended, and leaves this behind. Waits for no kernel.
    pub fn leave_behind(self, remains: Option<Remains>) {
        let mut pools = POOLS.lock();
        let Some(pool) = pools.iter_mut().find(|pool| pool.context.is(&self.context)) else {
            return std::mem::forget(remains);
        };
        pool.remains.extend(remains);
        let over = Kept::take_over(&mut pool.remains);
        drop(pools);
        free_aside(self.context.clone(), over);
        if let Some(SparePool { context, spares, remains, .. }) = self.end() {
            free_aside(context.clone(), spares);
            free_aside(context, remains);
        }
    }

    /// It uses nothing from here on. What is kept, if it was the last one.
    fn end(&self) -> Option<SparePool> {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return None;
        }
        let mut pools = POOLS.lock();
        let at = pools.iter().position(|pool| pool.context.is(&self.context))?;
        pools[at].users -= 1;
        (pools[at].users == 0).then(|| pools.swap_remove(at))
    }

    /// Zeroed pinned memory of at least so many bytes; which of it is the caller's to say. In the current context,
    /// which is this one's.
    pub fn alloc(&self, bytes: usize) -> Result<SharedMemory, CudaError> {
        match self.take(bytes, false) {
            Some(spare) => Ok(spare),
            None => Pinned::alloc(self.context.cuda(), bytes.max(1)).map(SharedMemory::Pinned),
        }
    }

    /// The same, as managed memory where there is such; the memory says which it is.
    pub fn alloc_managed(&self, bytes: usize) -> Result<SharedMemory, CudaError> {
        if let Some(spare) = self.take(bytes, true) {
            return Ok(spare);
        }
        match Managed::alloc(self.context.cuda(), self.context.device(), bytes.max(1)) {
            Ok(made) => Ok(SharedMemory::Managed(made)),
            Err(e) => {
                if e.code != CUDA_ERROR_NOT_SUPPORTED {
                    log::info!("queues of device code are in pinned memory: {e}");
                }
                self.alloc(bytes)
            }
        }
    }

    /// Of what others have left, zeroed.
    fn take(&self, bytes: usize, is_managed: bool) -> Option<SharedMemory> {
        let spare = {
            let mut pools = POOLS.lock();
            let pool = pools.iter_mut().find(|pool| pool.context.is(&self.context))?;
            fitting(&pool.spares, bytes, is_managed).map(|at| pool.spares.remove(at))
        }?;
        // SAFETY: this much was allocated, and whoever had it has ended.
        unsafe { spare.host().write_bytes(0, bytes) };
        Some(spare)
    }

    /// Nobody uses this memory any more.
    pub fn give_back(&self, memory: Vec<SharedMemory>) {
        let mut pools = POOLS.lock();
        let Some(pool) = pools.iter_mut().find(|pool| pool.context.is(&self.context)) else { return };
        pool.spares.extend(memory);
        let over = Kept::take_over(&mut pool.spares);
        drop(pools);
        free_aside(self.context.clone(), over);
    }
}

/// The smallest of this kind that has room for so many bytes and is not much larger.
fn fitting(spares: &[SharedMemory], bytes: usize, is_managed: bool) -> Option<usize> {
    let has_room = |spare: &SharedMemory| {
        spare.is_managed() == is_managed && (bytes..=bytes + bytes / 2 + SLACK).contains(&spare.bytes())
    };
    let fit = spares.iter().enumerate().filter(|(_, spare)| has_room(spare));
    fit.min_by_key(|(_, spare)| spare.bytes()).map(|(at, _)| at)
}

/// Frees memory in its context. Where that cannot be entered it has been destroyed, and its memory with it.
fn free<K: Kept>(context: &Context, memory: Vec<K>) {
    match context.enter() {
        Ok(_current) => drop(memory),
        Err(_) => std::mem::forget(memory),
    }
}

/// Has a thread free memory, if there is any, which may wait for kernels.
fn free_aside<K: Kept>(context: Arc<Context>, memory: Vec<K>) {
    if memory.is_empty() {
        return;
    }
    let bytes: usize = memory.iter().map(K::bytes).sum();
    let memory = std::mem::ManuallyDrop::new(memory);
    let body = move || free(&context, std::mem::ManuallyDrop::into_inner(memory));
    match Thread::spawn("oxygin-free-gpu", STACK, body) {
        Ok(thread) => thread.leave(),
        Err(error) => log::warn!("{bytes} bytes of memory shared with a GPU stay allocated: {}", error.message()),
    }
}

impl Drop for SharedUser {
    fn drop(&mut self) {
        self.leave();
    }
}
