//! Which GPU the memory of a window of another process is on, if it is on one.
//!
//! The driver names it by its number in this process. Of a GPU that `CUDA_VISIBLE_DEVICES` hides it names the one that
//! has mapped the memory (driver 580): each of two processes that see one GPU each would take the other's for its own.
//! So the owner says where on the PCI bus it is.

use crate::sys::sync::Mutex;
use oxygin_ffi::nvml;

/// One that this process does not see.
pub const UNSEEN: i32 = -1;
/// None: it is host memory.
pub const HOST: i32 = -2;

/// The GPU at `gpu`, which the driver has called `named`, for a process with GPU `own` at `here`.
pub fn of(named: i32, gpu: &str, own: i32, here: &str) -> i32 {
    match (gpu == here, named == own) {
        (true, _) if !gpu.is_empty() => own,
        (false, true) => UNSEEN,
        _ => named,
    }
}

/// Pairs of GPUs that were asked for, and the answers.
static ASKED: Mutex<Vec<([String; 2], bool)>> = Mutex::new(Vec::new());

/// Whether kernels on the GPU at `here` may add to words of one at `gpu` that this process does not see. Set-up only.
pub fn adds(here: &str, gpu: &str) -> bool {
    let (mut asked, pair) = (ASKED.lock(), [here, gpu].map(str::to_owned));
    if let Some((_, answer)) = asked.iter().find(|(other, _)| *other == pair) {
        return *answer;
    }
    let answer = nvml::adds_at_peer(here, gpu);
    match &answer {
        Ok(true) => log::info!("GPU {gpu} is another process's alone; kernels on GPU {here} may add to its words"),
        Ok(false) => log::info!("GPU {gpu} is another process's alone; kernels on GPU {here} may not add to its words"),
        Err(why) => log::info!(
            "GPU {gpu} is another process's alone, and whether kernels on GPU {here} may add to its words cannot be \
             asked ({why}): the lane kernel serves no queues to it. Let each process see all GPUs, or have \
             libnvidia-ml.so.1 where the driver is"
        ),
    }
    let answer = answer.unwrap_or(false);
    asked.push((pair, answer));
    answer
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_that_is_not_seen_is_none_of_this_process() {
        let (a, b) = ("0000:06:00.0", "0000:07:00.0");
        // Both see both, in this order or another.
        assert_eq!([of(0, a, 1, b), of(1, b, 0, a), of(1, a, 0, b)], [0, 1, 1]);
        // Each sees one.
        assert_eq!([of(0, a, 0, b), of(0, b, 0, a)], [UNSEEN; 2]);
        // Both are on one.
        assert_eq!([of(0, a, 0, a), of(1, b, 1, b)], [0, 1]);
        // The driver says nothing of addresses.
        assert_eq!([of(0, "", 0, ""), of(1, "", 0, "")], [0, 1]);
        assert_eq!(of(0, a, 0, ""), UNSEEN);
    }

    /// There is no such library here, or no such GPU.
    #[test]
    fn where_nobody_can_be_asked_kernels_do_not_add() {
        assert!(!adds("ffff:ff:1e.0", "ffff:ff:1f.0"));
        assert!(ASKED.lock().iter().any(|(pair, answer)| pair[0] == "ffff:ff:1e.0" && !answer));
    }
}
