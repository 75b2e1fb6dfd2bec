//! Ranks of one process that share a GPU.
//!
//! CUDA gives the streams of a context that have work a few hardware queues. Two ranks' streams may share one, and then
//! a kernel of one rank that waits for the other's can lie in front of it: both wait for ever, and nothing of this
//! library's is under way, so that no watch of its own would ever say so.

use super::all_engines;
use std::sync::atomic::{AtomicBool, Ordering};

/// As many as a GPU has for a context: with these each busy stream of a few ranks has one of its own.
const MOST: u32 = 32;
/// Said once a process.
static IS_SAID: AtomicBool = AtomicBool::new(false);

/// Engine of `rank` is about to open on `gpu`, in a process whose contexts have so many hardware queues: warns where
/// another rank of the process has the same GPU.
pub fn warn_where_shared(rank: u32, gpu: i32, hardware_queues: u32) {
    let other = sharer(rank, gpu, hardware_queues);
    let Some(other) = other.filter(|_| !IS_SAID.swap(true, Ordering::Relaxed)) else { return };
    log::warn!(
        "ranks {} and {} of this process share GPU {gpu}, and the streams of all its ranks {hardware_queues} hardware \
         queues: a kernel that waits for another rank's can stand in front of it for ever. Set \
         CUDA_DEVICE_MAX_CONNECTIONS={MOST} before the program starts",
        rank.min(other),
        rank.max(other),
    );
}

/// Another rank that has the GPU in this process, where streams may share a hardware queue.
fn sharer(rank: u32, gpu: i32, hardware_queues: u32) -> Option<u32> {
    if hardware_queues >= MOST {
        return None;
    }
    all_engines().iter().map(|e| (e.rank, e.gpu())).find(|&(other, its)| other != rank && its == Some(gpu)).map(|e| e.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fabric::soft::gpu::Engine;
    use std::sync::Arc;

    #[test]
    fn another_rank_on_the_same_gpu_is_found() {
        // No test of this program has such a GPU.
        let (gpu, rank) = (77, 700);
        let other = Engine::new(701, [7; 16], Arc::default(), &Default::default());
        assert_eq!(sharer(rank, gpu, 8), None, "it has no GPU yet");
        other.gpu.store(gpu, Ordering::Relaxed);
        assert_eq!((sharer(rank, gpu, 8), sharer(rank, gpu, MOST)), (Some(701), None));
        assert_eq!((sharer(701, gpu, 8), sharer(rank, 78, 8)), (None, None), "the same rank; another GPU");
    }
}
