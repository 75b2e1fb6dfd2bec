//! The private context in which the engines of this process work on a GPU.
//!
//! In the application's context our streams would share hardware queues with its streams, and stand still whenever it
//! has something queued behind a kernel that spins, perhaps for our own signal. One context serves all engines of a
//! GPU, and goes with the last of them. One that has failed serves those that have it, and no other.

use crate::sys::sync::Mutex;
use oxygin_ffi::cuda::{Context, Cuda, CudaError};
use std::sync::{Arc, Weak};

/// What one takes of the GPU's memory, MiB, measured on an H200.
pub const PRIVATE_CONTEXT_MIB: u32 = 260;

/// By device.
static OWN: Mutex<Vec<(i32, Weak<Context>)>> = Mutex::new(Vec::new());

/// The context for `device`, made if there is none yet.
pub fn private_context(cuda: &Arc<Cuda>, device: i32) -> Result<Arc<Context>, CudaError> {
    // Held for as long as it takes: whoever comes second wants the same one.
    let mut all = OWN.lock();
    all.retain(|(_, context)| context.strong_count() > 0);
    if let Some(context) = all.iter().find(|(d, _)| *d == device).and_then(|(_, c)| c.upgrade()) {
        return Ok(context);
    }
    let made = Arc::new(Context::create(cuda, device)?);
    all.push((device, Arc::downgrade(&made)));
    Ok(made)
}

/// It has failed, which it does for good: whoever comes gets another one.
#[cold]
pub fn forget(context: &Arc<Context>) {
    OWN.lock().retain(|(_, known)| !std::ptr::eq(known.as_ptr(), Arc::as_ptr(context)));
}
