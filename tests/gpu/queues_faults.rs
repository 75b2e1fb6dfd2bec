//! Device code's queues when one of them has failed: the others of its context go on.

use crate::harness::{Fake, T};
use crate::support::common::{job, ok};
use crate::support::device::{entry, wait, Ask, Device};
use nccl_plugin_api::descriptor::*;
use nccl_plugin_api::NcclResult;

/// A put to the own rank waits behind one that the GPU does not do, and its window goes meanwhile. When the GPU moves
/// again it is refused, which fails its queue. Entries of both queues of the context are given back to device code all
/// the same: it is told by operations to the own rank, too.
#[test]
fn a_fault_to_the_own_rank_leaves_device_code_its_credits() {
    for gpus in [1, 2] {
        let fake = Fake::take();
        std::env::set_var("OXYGIN_ENGINE", "own");
        std::env::set_var("OXYGIN_DEREG_TIMEOUT", "0.1");
        // What waits is in the engine, not in a stream.
        fake.set_issue("kernel=0,submissions=1");
        job(2, 1, |r| {
            let (gpu, peer) = (r.rank as i32 % gpus, 1 - r.rank);
            let _context = fake.enter(gpu);
            let [src, gone, dst] = [(); 3].map(|()| fake.window(r, gpu, 4096, 0));
            let [from, from_gone, to] = [&src, &gone, &dst].map(|window| window.as_window().handle as u64);
            let see = |at| Some(fake.peek(at) as u64).filter(|seen| *seen != 0).unwrap_or(at);
            let device = Device::seen_by(r, Ask { depth: 16, ..Ask::default() }, see);
            let increment = entry(OP_PUT | OP_SIGNAL_INC, 0).with_signal(2, 0, true);
            r.job.barrier.wait();
            if r.rank == 0 {
                fake.hold(512);
                device.post(0, 0, entry(OP_PUT, 512).first(0, from).second(0, to));
                wait(|| "a copy that is held".into(), || fake.is_holding());
                device.post(0, 0, entry(OP_PUT, 512).first(0, from_gone).second(512, to));
                // SAFETY: a plain call.
                let result = unsafe { T.dereg_mr_sym.unwrap()(r.coll, from_gone as *mut _) };
                assert_eq!(result, NcclResult::REMOTE_ERROR, "the GPU stands");
                fake.hold(0);
                wait(|| "a fault".into(), || device.has_error());
                // Many times what a queue has.
                (0..100).for_each(|_| device.post(0, peer, increment));
                device.flush(0, peer);
                (0..100).for_each(|_| device.post(0, 0, increment));
                device.flush(0, 0);
            } else {
                device.wait_signal(0, 2, 100);
                // SAFETY: a plain call.
                ok(unsafe { T.dereg_mr_sym.unwrap()(r.coll, from_gone as *mut _) });
                assert!(!device.has_error());
            }
            r.job.barrier.wait();
            device.destroy();
        });
        std::env::remove_var("OXYGIN_DEREG_TIMEOUT");
        fake.check();
    }
}
