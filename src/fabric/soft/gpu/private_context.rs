//! The private context in which the engines of this process work on a GPU.
//!
//! In the application's context our streams would share hardware queues with its streams, and stand still whenever it
//! has something queued behind a kernel that spins, perhaps for our own signal. One context serves all engines of a
//! GPU, and goes with the last of them. One that has failed serves those that have it, and no other.

use crate::sys::keyed::Keyed;
use oxygin_ffi::cuda::{Context, Cuda, CudaError};
use std::sync::Arc;

/// What one takes of the GPU's memory, MiB, measured on an H200.
pub const PRIVATE_CONTEXT_MIB: u32 = 260;

/// By device.
static OWN: Keyed<i32, Context> = Keyed::empty();

/// The context for `device`, made if there is none yet.
pub fn private_context(cuda: &Arc<Cuda>, device: i32) -> Result<Arc<Context>, CudaError> {
    OWN.get_or_make(device, || Context::create(cuda, device))
}

/// It has failed, which it does for good: whoever comes gets another one.
#[cold]
pub fn forget(context: &Arc<Context>) {
    OWN.forget(context);
}
