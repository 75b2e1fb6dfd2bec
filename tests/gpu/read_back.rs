//! Signals that kernels may reset, on a driver whose streams cannot add: each is read, added to and written back,
//! unless the copy kernel does it.

use crate::harness::Fake;
use crate::support::common::job;
use nccl_plugin_api::MR_FLAG_FORCE_SO;

const CONTEXTS: usize = 8;
const ROUNDS: u64 = 100;
const ALL: u64 = CONTEXTS as u64 * ROUNDS;
/// So many by the copy kernel: it has taken over for good. Without that a launch now and then does a few hundred.
const MOST: u64 = ALL * 3 / 4;
/// A launch that is not up in time is given up, and on a busy machine many are.
const ATTEMPTS: usize = 30;

/// Puts with signals of many contexts at once, as kernels of NCCL 2.30.4 and of GDAKI make them: there is always one
/// that waits. Says how many of them the copy kernel did.
fn puts_of_many_contexts(fake: &Fake, gpus: i32) -> u64 {
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
    fake.commands() - before
}

#[test]
fn the_copy_kernel_takes_over_from_submissions_that_read() {
    for gpus in [1, 2] {
        let fake = Fake::take();
        fake.set_issue("kernel=4096");
        fake.settings(false, 20);
        let mut done = Vec::new();
        while done.last().is_none_or(|n| *n <= MOST) && done.len() < ATTEMPTS {
            done.push(puts_of_many_contexts(&fake, gpus));
        }
        assert!(done.last().is_some_and(|n| *n > MOST), "{gpus} GPUs: of {ALL} the copy kernel did {done:?}");
        fake.check();
    }
}
