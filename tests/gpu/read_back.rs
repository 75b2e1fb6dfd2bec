//! Signals that kernels may reset, on a driver whose streams cannot add: each is read, added to and written back,
//! unless the copy kernel does it.

use crate::harness::Fake;
use crate::support::common::job;
use nccl_plugin_api::MR_FLAG_FORCE_SO;

/// Puts with signals of many contexts at once, as kernels of NCCL 2.30.4 and of GDAKI make them: there is always one
/// that waits, and the copy kernel takes over all the same.
#[test]
fn the_copy_kernel_takes_over_from_submissions_that_read() {
    const CONTEXTS: usize = 8;
    const ROUNDS: u64 = 100;
    for gpus in [1, 2] {
        let fake = Fake::take();
        fake.set_issue("kernel=4096");
        fake.settings(false, 20);
        let before = fake.commands();
        job(2, CONTEXTS as i32, |r| {
            let gpu = r.rank as i32 % gpus;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, CONTEXTS, 0);
            let dst = fake.window(r, gpu, CONTEXTS, 0);
            let sig = fake.signals(r, gpu, CONTEXTS, MR_FLAG_FORCE_SO);
            if r.rank == 0 {
                (0..CONTEXTS).for_each(|c| src.set(c, c as u64 + 1));
                let put = |c: usize| {
                    let at = 8 * c as u64;
                    r.put(c as i32, (src.as_window(), at), 8, (dst.as_window(), at), 1, Some((sig.as_window(), at, 1)))
                };
                let mut under_way: Vec<_> = (0..CONTEXTS).map(put).collect();
                for _ in 1..ROUNDS {
                    for (c, request) in under_way.iter_mut().enumerate() {
                        r.wait(std::mem::replace(request, put(c)));
                    }
                }
                under_way.into_iter().for_each(|request| r.wait(request));
            } else {
                for c in 0..CONTEXTS {
                    sig.wait(r, c, ROUNDS);
                    assert_eq!((sig.get(c), dst.get(c)), (ROUNDS, c as u64 + 1));
                }
            }
            r.job.barrier.wait();
        });
        let (all, by_kernel) = (CONTEXTS as u64 * ROUNDS, fake.commands() - before);
        assert!(by_kernel > all / 2, "{gpus} GPUs: the copy kernel did {by_kernel} of {all} operations");
        fake.check();
    }
}
