//! The process's first managed memory.

use oxygin_ffi::cuda::{Cuda, Managed};

/// Makes some in the calling thread's CUDA context, if it has one, and frees it, for a process that is to have queues
/// in such memory later. With driver 580 every step of NCCL EP's low-latency kernels took 30 µs more, without this
/// library as well, once a process had made its first managed memory behind NCCL's communicator, freed or not; and
/// nothing more where it had done so before (docs/gpu.md has the figures). So `init` of a table, which NCCL calls early
/// in making a communicator, is the time for it. May wait for kernels. What fails is no loss: queues are in pinned
/// memory then.
pub fn make_first() {
    let made = || {
        let cuda = Cuda::load().ok()?;
        cuda.init().ok()?;
        let context = Cuda::current_context(&cuda).ok()??;
        let _current = context.enter().ok()?;
        Managed::alloc(&cuda, context.device(), 1).ok()
    };
    drop(made());
}
