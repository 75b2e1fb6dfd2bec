//! Signals that kernels may reset, on a driver whose streams cannot add: each is read, added to and written back,
//! unless the copy kernel does it.

use crate::harness::*;
use crate::support::common::{job, ok};
use nccl_plugin_api::MR_FLAG_FORCE_SO;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

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

/// Each context puts again as soon as its signal has been seen and reset, whatever the others do: what a submission has
/// read around a signal is taken for those alone whose puts waited by then. Says how many copies were no puts.
fn puts_that_take_turns(fake: &Fake) -> u64 {
    let seen: Vec<AtomicU64> = (0..CONTEXTS).map(|_| AtomicU64::new(0)).collect();
    let before = fake.copies();
    job(2, CONTEXTS as i32, |r| {
        let _context = fake.enter(r.rank as i32);
        // No put continues another one.
        let src = fake.window(r, r.rank as i32, 2 * CONTEXTS, 0);
        let dst = fake.window(r, r.rank as i32, 2 * CONTEXTS, 0);
        let sig = fake.signals(r, r.rank as i32, CONTEXTS, MR_FLAG_FORCE_SO);
        r.job.barrier.wait();
        let mut posted = [0; CONTEXTS];
        let mut under_way = [None; CONTEXTS];
        let is_over = || seen.iter().all(|n| n.load(Ordering::Acquire) == ROUNDS);
        let end = Instant::now() + Duration::from_secs(60);
        while !is_over() {
            let signals = || std::array::from_fn::<_, CONTEXTS, _>(|c| sig.get(c));
            assert!(Instant::now() < end, "{seen:?}, signals {:?}", signals());
            for c in 0..CONTEXTS {
                let done = seen[c].load(Ordering::Acquire);
                if r.rank == 1 {
                    match sig.get(c) {
                        0 => {}
                        1 => {
                            assert_eq!(dst.get(2 * c), done + 1);
                            sig.set(c, 0);
                            seen[c].store(done + 1, Ordering::Release);
                        }
                        other => panic!("signal {c} is {other} after {done}"),
                    }
                } else if done == posted[c] && done < ROUNDS {
                    under_way[c].take().into_iter().for_each(|request| r.wait(request));
                    posted[c] += 1;
                    src.set(2 * c, posted[c]);
                    let at = 16 * c as u64;
                    let signal = Some((sig.as_window(), at / 2, 1));
                    under_way[c] = Some(r.put(c as i32, (src.as_window(), at), 8, (dst.as_window(), at), 1, signal));
                }
            }
            // SAFETY: plain call.
            ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
        }
        under_way.into_iter().flatten().for_each(|request| r.wait(request));
        r.job.barrier.wait();
    });
    (fake.copies() - before) as u64 - ALL
}

#[test]
fn signals_are_read_for_all_that_wait() {
    let fake = Fake::take();
    fake.set_issue("kernel=0");
    fake.settings(false, 200);
    let read = puts_that_take_turns(&fake);
    assert!(read < ALL / 2, "{read} submissions have read, for {ALL} signals");
    fake.check();
}
