//! Windows, contexts and communicators that end, and faults, while the copy kernel is at work: it does nothing for them
//! afterwards, and nothing hangs. Through the RMA v16 table, on the fake CUDA driver.

use crate::harness::copy_kernel::take;
use crate::harness::plan::*;
use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Puts that go on until a copy kernel is at work.
fn keep_busy(fake: &Fake, put: impl FnMut()) {
    let before = fake.commands();
    repeat_until("a kernel is at work", put, || fake.commands() >= before + 8);
}

/// Posts a put with a signal; `None`: it was refused.
fn post(
    r: &Rank,
    context: i32,
    src: &Window,
    n: usize,
    dst: &GpuWindow,
    peer: u32,
    sig: &GpuWindow,
) -> Option<*mut c_void> {
    let mut request = null_mut();
    let (d, g) = (dst.as_window().handle, sig.as_window().handle);
    // SAFETY: handles of windows that this rank has registered; the source stays.
    let put = unsafe {
        T.iput_signal.unwrap()(
            r.ctx,
            context,
            0,
            src.handle,
            n,
            0,
            d,
            peer,
            0,
            g,
            1,
            SIGNAL_OP_ADD,
            true,
            0,
            &mut request,
        )
    };
    (put == NcclResult::SUCCESS).then_some(request)
}

/// Its owner takes a window away while the copy kernel is at work there: once that is done nothing changes it. Other
/// windows, and other peers, go on.
#[test]
fn a_window_that_goes_is_left_alone_and_fails_one_peer_alone() {
    let fake = take();
    fake.kernel_limits(200, 0);
    job(3, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, 8, 0);
        let goes = fake.window(r, 0, 8, 0);
        let stays = fake.window(r, 0, 8, 0);
        let sig = fake.signals(r, 0, 3, NEVER_RESET);
        src.set(0, 1);
        r.job.barrier.wait();
        if r.rank == 2 {
            keep_busy(&fake, || ok(progress(r)));
            r.dereg(goes.as_window());
            let left = [goes.get(0), goes.get(1)];
            goes.set(0, 77);
            r.job.barrier.wait();
            std::thread::sleep(Duration::from_millis(20));
            assert_eq!(goes.get(0), 77, "it was written after it was deregistered (was {left:?})");
        } else {
            let mut sent = 0;
            let mut all = Vec::new();
            let end = Instant::now() + Duration::from_secs(60);
            let mut failed = false;
            let before = fake.commands();
            // Rank 0 until the window is gone, rank 1 for as long as there is something to see.
            while !failed && (r.rank == 0 || sent < 600 || fake.commands() < before + 20) {
                let dst = if r.rank == 0 { &goes } else { &stays };
                for _ in 0..30 {
                    match post(r, 0, src.as_window(), 8, dst, 2, &sig) {
                        Some(request) => all.push(request),
                        None => failed = true,
                    }
                    sent += 1;
                }
                let outcome: Vec<_> = all.drain(..).map(|q| comes_out(r, q)).collect();
                failed |= outcome.contains(&false);
                assert!(Instant::now() < end, "rank {}: nothing failed in 60 s", r.rank);
            }
            assert_eq!(failed, r.rank == 0, "rank {}", r.rank);
            if r.rank == 1 {
                assert_eq!(stays.get(0), 0);
            }
            r.job.barrier.wait();
        }
        r.job.barrier.wait();
        if r.rank == 2 {
            assert_eq!(stays.get(0), 1);
        }
    });
    fake.check();
}

fn progress(r: &Rank) -> NcclResult {
    // SAFETY: plain call.
    unsafe { T.rma_progress.unwrap()(r.ctx) }
}

/// A fault while commands are up: every operation comes out, the later ones with an error, and nothing hangs.
#[test]
fn a_fault_while_it_is_at_work_hangs_nothing() {
    for (call, after, code) in [("gpu", 3, 700), ("gpu", 40, 700), ("cuMemcpyAsync", 2, 1)] {
        for kind in [Signals::NeverReset, Signals::Added] {
            let fake = take();
            fake.kernel_limits(20, 0);
            let flags = kind.set_up(&fake);
            job(2, 2, |r| {
                let _context = fake.enter(0);
                let src = fake.window(r, 0, 64, 0);
                let dst = fake.window(r, 0, 64, 0);
                let sig = fake.signals(r, 0, 1, flags);
                r.job.barrier.wait();
                if r.rank == 0 {
                    let burst = || {
                        let all: Vec<_> =
                            (0..100).map(|i| post(r, i % 2, src.as_window(), 8 << (i % 3), &dst, 1, &sig)).collect();
                        all.into_iter().filter(|q| !q.is_some_and(|q| comes_out(r, q))).count()
                    };
                    keep_busy(&fake, || assert_eq!(burst(), 0));
                    fake.inject_after(call, after, code);
                    let end = Instant::now() + Duration::from_secs(60);
                    while burst() == 0 {
                        assert!(Instant::now() < end, "{call}: everything came out well");
                    }
                    assert_eq!(burst(), 100, "{call}: some came out well after the fault");
                }
                r.job.barrier.wait();
            });
            fake.check();
        }
    }
}

/// The communicator closes right behind the last operation.
#[test]
fn it_has_ended_when_the_communicator_has_closed() {
    let fake = take();
    let (mut rounds, mut met) = (0, 0);
    let end = Instant::now() + Duration::from_secs(60);
    while rounds < 20 || met == 0 {
        let alive = AtomicBool::new(false);
        job(2, 1, |r| {
            let _context = fake.enter(r.rank as i32);
            let src = fake.window(r, r.rank as i32, 8, 0);
            let sig = fake.signals(r, r.rank as i32, 1, NEVER_RESET);
            r.job.barrier.wait();
            if r.rank == 0 {
                let put = |_| r.put(0, (src.as_window(), 0), 8, (src.as_window(), 8), 1, Some((sig.as_window(), 0, 1)));
                let all: Vec<_> = (0..60).map(put).collect();
                all.into_iter().for_each(|q| r.wait(q));
                alive.fetch_or(fake.launched() > 0, Ordering::AcqRel);
            }
        });
        assert_eq!(fake.launched(), 0);
        fake.check();
        met += usize::from(alive.load(Ordering::Acquire));
        rounds += 1;
        assert!(Instant::now() < end, "none was alive at the end of any of {rounds} jobs");
    }
}

/// Contexts go in the middle of their puts, beside one that stays and on copy kernels that end when they like: what is
/// left of theirs is neither done by the next copy kernel nor by the stream, for its memory may be gone.
#[test]
fn nothing_is_done_for_a_context_that_is_gone() {
    const ROUNDS: u64 = 40;
    const PUTS: usize = 100;
    const GONE: u64 = u64::MAX;
    let fake = take();
    fake.kernel_limits(30, 8);
    let checked = AtomicU64::new(0);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, PUTS, 0);
        let dst = fake.window(r, 0, PUTS, 0);
        for round in 1..=ROUNDS {
            let mut config = rma_v14::ConfigV14 { n_contexts: 1, traffic_class: -1, rank_stride: 1 };
            let mut ctx = null_mut();
            // SAFETY: pointers to locals; a collective call.
            ok(unsafe { T.create_context.unwrap()(r.coll, &mut config, &mut ctx) });
            let goes = Rank { job: r.job.clone(), rank: r.rank, instance: r.instance, coll: r.coll, ctx };
            let put = |by: &Rank, i: usize, to| {
                let at = i as u64 * 8;
                by.put(0, (src.as_window(), at), 8, (to, at), 1, None)
            };
            if r.rank == 0 {
                (0..PUTS).for_each(|i| src.set(i, round));
                for i in 0..PUTS {
                    put(&goes, i, dst.as_window());
                }
            } else {
                // The same engine's, all the while.
                while checked.load(Ordering::SeqCst) < round && !r.job.barrier.has_failed() {
                    let all: Vec<_> = (0..4).map(|i| put(r, i, src.as_window())).collect();
                    all.into_iter().for_each(|q| r.wait(q));
                }
            }
            // SAFETY: destroyed once.
            ok(unsafe { T.destroy_context.unwrap()(ctx) });
            (0..PUTS).for_each(|i| src.set(i, if r.rank == 0 { GONE } else { 0 }));
            std::thread::sleep(Duration::from_millis(if r.rank == 0 { 5 } else { 0 }));
            if r.rank == 0 {
                checked.store(round, Ordering::SeqCst);
            }
            r.job.barrier.wait();
            let is_gone = r.rank == 1 && (0..PUTS).any(|i| dst.get(i) == GONE);
            assert!(!is_gone, "round {round}: copied after its context was gone");
        }
    });
    fake.check();
}
