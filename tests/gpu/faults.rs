//! GPUs and contexts that fail while operations are under way: nobody is told as long as the GPU is at its memory.
//! Through the RMA v16 table, on the fake CUDA driver.

use crate::harness::tcp::{apart, CHUNK};
use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::*;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const BYTES: usize = 64 << 10;

/// Rank 1 gets from rank 0's GPU, by that one's engine, and behind it puts. `fault`: what happens on that GPU while the
/// copy of the get is held up, or before.
fn not_told_while_a_copy_is_under_way(fault: impl Fn(&Fake) + Sync, is_before: bool) {
    let fake = Fake::take();
    fake.set_issue("kernel=0,gather=1,submissions=2");
    let released = AtomicBool::new(false);
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let [src, dst] = [(), ()].map(|()| fake.window(r, gpu, BYTES / 8, 0));
        let sig = fake.signals(r, gpu, 1, NEVER_RESET);
        r.job.barrier.wait();
        if r.rank == 1 {
            fake.hold(BYTES);
            if is_before {
                fault(&fake);
            }
            let get = r.get(0, (src.as_window(), 0), BYTES, (dst.as_window(), 0), 0);
            let put = r.put(0, (src.as_window(), 0), 64, (dst.as_window(), 64), 0, Some((sig.as_window(), 0, 1)));
            let is_told = |request, what| {
                let mut done = 0;
                // SAFETY: plain call.
                let told = unsafe { T.test.unwrap()(r.coll, request, &mut done) } != NcclResult::SUCCESS;
                assert!(!told && done == 0 || released.load(Ordering::SeqCst), "{what} is over while the GPU copies");
                told || done != 0
            };
            wait_until("the copy is under way", || {
                is_told(get, "the get");
                fake.is_holding()
            });
            if !is_before {
                fault(&fake);
            }
            // Longer than it takes to find out.
            let end = Instant::now() + Duration::from_millis(500);
            while Instant::now() < end {
                is_told(get, "the get");
                is_told(put, "the put");
            }
            released.store(true, Ordering::SeqCst);
            fake.hold(0);
            for request in [get, put] {
                wait_until("it is over", || is_told(request, ""));
            }
        }
        r.job.barrier.wait();
        fake.destroy_context(0, false);
    });
    fake.check();
}

#[test]
fn an_application_that_destroys_its_context_ends_nothing_that_is_under_way() {
    not_told_while_a_copy_is_under_way(|fake| fake.destroy_context(0, true), false);
}

/// The driver takes the copies of a submission and refuses what is behind them.
#[test]
fn a_submission_that_is_refused_half_way_is_waited_for() {
    not_told_while_a_copy_is_under_way(|fake| fake.inject_after("cuMemcpyAsync", 1, 1), true);
}

/// The same over TCP, by way of pinned memory: rank 1 puts out of its GPU, or gets into it, on two contexts, and its
/// application destroys its context. What is told first would be an operation that begins then.
fn not_told_over_tcp(threads: u32, is_get: bool) {
    let fake = apart(1, threads);
    let released = AtomicBool::new(false);
    job(2, 2, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let own = fake.window(r, gpu, 2 * CHUNK / 8, 0);
        let host = r.window(2 * CHUNK / 8, 0);
        let start = |context, bytes| {
            let (local, remote) = ((own.as_window(), 0), (&host, 0));
            match is_get {
                true => r.get(context, remote, bytes, local, 0),
                false => r.put(context, local, bytes, remote, 0, None),
            }
        };
        if r.rank == 1 {
            // The connections are up from here on.
            r.wait(start(0, CHUNK));
            fake.hold(CHUNK);
            let first = start(0, CHUNK);
            let is_told = |request, what| {
                let mut done = 0;
                // SAFETY: plain call.
                let told = unsafe { T.test.unwrap()(r.coll, request, &mut done) } != NcclResult::SUCCESS;
                assert!(!told && done == 0 || released.load(Ordering::SeqCst), "{what} is over while the GPU copies");
                told || done != 0
            };
            wait_until("the copy is under way", || {
                is_told(first, "the first one");
                fake.is_holding()
            });
            fake.destroy_context(1, true);
            let second = start(1, 512);
            let end = Instant::now() + Duration::from_millis(500);
            while Instant::now() < end {
                is_told(first, "the first one");
                let mut done = 0;
                // SAFETY: plain call; this one touches nothing.
                let _ = unsafe { T.test.unwrap()(r.coll, second, &mut done) };
            }
            released.store(true, Ordering::SeqCst);
            fake.hold(0);
            wait_until("it is over", || is_told(first, ""));
        }
        r.job.barrier.wait();
        fake.destroy_context(1, false);
    });
    fake.check();
}

#[test]
fn an_application_that_destroys_its_context_ends_nothing_over_tcp() {
    for threads in [0, 2] {
        for is_get in [false, true] {
            not_told_over_tcp(threads, is_get);
        }
    }
}
