//! Pinned memory of sets that have ended, for those that come.
//!
//! To give pinned memory back the driver waits for the application's kernels, and holds a lock of its context all the
//! while (docs/gpu.md). A kernel that waits for a transfer would hold up whoever destroys another communicator beside
//! it. So what a set leaves is kept as long as another one is there in its context, which may be the one that the
//! kernel uses; what comes takes it from here. The last one of a context frees all.

use crate::sys::sync::Mutex;
use crate::sys::thread::Thread;
use oxygin_ffi::cuda::{Context, CudaError, Pinned};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::Arc;

/// Bytes that are kept in a context. What is more a thread gives back that nobody waits for.
const MOST: usize = 256 << 20;
/// Stack of that thread.
const STACK: usize = 256 << 10;
/// Bytes that memory may be larger by than what takes it, beside a half of that.
const SLACK: usize = 64 << 10;

/// What is kept in a context.
struct Shelf {
    context: Arc<Context>,
    /// Those who use pinned memory of the context, or may.
    users: usize,
    /// Oldest first.
    spares: Vec<Pinned>,
}

static SHELVES: Mutex<Vec<Shelf>> = Mutex::new(Vec::new());

/// Somebody who uses pinned memory of a context.
pub struct PinnedUser {
    context: Arc<Context>,
    /// It keeps what it has for ever, and is waited for no longer.
    has_left: AtomicBool,
}

impl PinnedUser {
    /// Of this context.
    pub fn new(context: &Arc<Context>) -> Self {
        let mut shelves = SHELVES.lock();
        match shelves.iter_mut().find(|shelf| shelf.context.is(context)) {
            Some(shelf) => shelf.users += 1,
            None => shelves.push(Shelf { context: context.clone(), users: 1, spares: Vec::new() }),
        }
        Self { context: context.clone(), has_left: AtomicBool::new(false) }
    }

    /// What it has is never given back: that of others is freed without it.
    pub fn leave(&self) {
        if self.has_left.swap(true, Ordering::AcqRel) {
            return;
        }
        let mut shelves = SHELVES.lock();
        let Some(at) = shelves.iter().position(|shelf| shelf.context.is(&self.context)) else { return };
        shelves[at].users -= 1;
        if shelves[at].users == 0 {
            let shelf = shelves.swap_remove(at);
            drop(shelves);
            free(&shelf.context, shelf.spares);
        }
    }

    /// Zeroed memory of at least so many bytes; which of it is the caller's to say. In the current context, which is
    /// this one's.
    pub fn alloc(&self, bytes: usize) -> Result<Pinned, CudaError> {
        let spare = {
            let mut shelves = SHELVES.lock();
            let shelf = shelves.iter_mut().find(|shelf| shelf.context.is(&self.context));
            shelf.and_then(|shelf| fitting(&shelf.spares, bytes).map(|at| shelf.spares.remove(at)))
        };
        match spare {
            Some(spare) => {
                // SAFETY: this much was allocated, and whoever had it has ended.
                unsafe { spare.host().write_bytes(0, bytes) };
                Ok(spare)
            }
            None => Pinned::alloc(self.context.cuda(), bytes.max(1)),
        }
    }

    /// Nobody uses this memory any more.
    pub fn give_back(&self, memory: Vec<Pinned>) {
        let mut shelves = SHELVES.lock();
        let Some(shelf) = shelves.iter_mut().find(|shelf| shelf.context.is(&self.context)) else { return };
        shelf.spares.extend(memory);
        let mut kept: usize = shelf.spares.iter().map(Pinned::bytes).sum();
        let mut over = Vec::new();
        while kept > MOST {
            kept -= shelf.spares[0].bytes();
            over.push(shelf.spares.remove(0));
        }
        drop(shelves);
        if !over.is_empty() {
            free_aside(self.context.clone(), over);
        }
    }
}

/// The smallest that has room for so many bytes and is not much larger.
fn fitting(spares: &[Pinned], bytes: usize) -> Option<usize> {
    let has_room = |spare: &Pinned| (bytes..=bytes + bytes / 2 + SLACK).contains(&spare.bytes());
    let fit = spares.iter().enumerate().filter(|(_, spare)| has_room(spare));
    fit.min_by_key(|(_, spare)| spare.bytes()).map(|(at, _)| at)
}

/// Frees memory in its context. Where that cannot be entered it has been destroyed, and its memory with it.
fn free(context: &Context, memory: Vec<Pinned>) {
    match context.enter() {
        Ok(_current) => drop(memory),
        Err(_) => std::mem::forget(memory),
    }
}

/// Has a thread free memory, which may wait for kernels.
fn free_aside(context: Arc<Context>, memory: Vec<Pinned>) {
    let bytes: usize = memory.iter().map(Pinned::bytes).sum();
    let memory = std::mem::ManuallyDrop::new(memory);
    let body = move || free(&context, std::mem::ManuallyDrop::into_inner(memory));
    match Thread::spawn("oxygin-free-gpu", STACK, body) {
        Ok(thread) => thread.leave(),
        Err(error) => log::warn!("{bytes} bytes of pinned memory stay allocated: {}", error.message()),
    }
}

impl Drop for PinnedUser {
    fn drop(&mut self) {
        self.leave();
    }
}
