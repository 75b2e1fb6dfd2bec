//! The copy kernel's worker blocks: large copies that they do arrive in order and once, and those that they do not do
//! go another way. Through the RMA v16 table, on the fake CUDA driver, whose private contexts have no processors while
//! a kernel spins.

use crate::harness::copy_kernel::FIRST;
use crate::harness::plan::*;
use crate::harness::*;
use crate::support::common::*;
use nccl_plugin_api::*;
use proptest::prelude::*;
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// A put from the beginning of a window to that of rank 1's, if it is taken.
fn try_put(r: &Rank, src: &GpuWindow, len: usize, dst: &GpuWindow) -> Option<*mut c_void> {
    let (mut request, s, d) = (null_mut(), src.as_window().handle, dst.as_window().handle);
    // SAFETY: handles of windows that this rank has registered; the source stays.
    let put = unsafe { T.iput.unwrap()(r.ctx, 0, 0, s, len, 0, d, 1, 0, &mut request) };
    (put == NcclResult::SUCCESS).then_some(request)
}

/// Puts of all sizes and alignments.
fn plan() -> Plan {
    Plan::new(&draws(200), 3, Mix::Large)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 16, max_shrink_iters: 40, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// On copy kernels that take their time and end when they like.
    #[test]
    fn puts_and_signals_arrive_in_order_and_once(
        draws in prop::collection::vec(any::<u64>(), 20..200),
        kind in any_kind(),
        contexts in 1..5usize,
        depth in prop::sample::select(vec![1, 4, 40, 1000]),
        issue in prop::sample::select(vec![
            "workers=32", "workers=1,far=0", "bulk=16384", "workers=4,submissions=4,gather=1", "own=0", "merge=0",
        ]),
        (command_us, most) in prop::sample::select(vec![(0, 0), (0, 5), (30, 0), (100, 40)]),
        gpus in 1..3,
    ) {
        let fake = Fake::take();
        fake.set_issue(issue);
        fake.kernel_limits(command_us, most);
        transfer(&fake, kind, &Plan::new(&draws, contexts, Mix::Large), contexts, depth, gpus);
    }
}

#[test]
fn workers_do_large_copies_within_a_gpu() {
    for kind in KINDS {
        let fake = Fake::take();
        let before = fake.worker_commands();
        traffic_of(&fake, kind, &plan(), 1, || fake.worker_commands() > before);
    }
}

#[test]
fn there_are_none_where_they_are_off() {
    for issue in ["workers=0", "kernel=0"] {
        let fake = Fake::take();
        fake.set_issue(issue);
        let before = fake.worker_commands();
        traffic_of(&fake, Signals::NeverReset, &plan(), 1, || true);
        traffic_of(&fake, Signals::NeverReset, &plan(), 2, || true);
        assert_eq!(fake.worker_commands(), before, "{issue}");
    }
}

/// A GPU without room for them, or a driver that does not start them: by way of pinned memory.
#[test]
fn without_them_large_copies_go_the_slow_way() {
    for is_refused in [false, true] {
        let fake = Fake::take();
        let before = (fake.worker_commands(), fake.calls("cuLaunchKernel"));
        if is_refused {
            fake.inject_after("cuLaunchKernel", FIRST as u32, 701);
        }
        let plan = plan();
        job(2, 3, |r| {
            let _context = fake.enter(0);
            let host = r.window(plan.words, 0);
            let src = fake.window(r, 0, plan.words, 0);
            let dst = fake.window(r, 0, plan.words, 0);
            let sig = fake.signals(r, 0, 6, NEVER_RESET);
            r.job.barrier.wait();
            if r.rank == 0 && !is_refused {
                wait_until("the first launches have ended", || fake.launched() == 0);
                fake.hold_kernels(true);
            }
            r.job.barrier.wait();
            match r.rank {
                0 => plan.send(r, 1, 50, &Ends { host: &host, gpu: &src, dst: &dst, sig: &sig }, 1, 0),
                _ => watch(r, &plan, 3, 1, &dst, &sig, &[0; 6]),
            }
            r.job.barrier.wait();
        });
        assert_eq!(fake.worker_commands(), before.0, "refused: {is_refused}");
        assert!(fake.calls("cuLaunchKernel") > before.1 + FIRST, "refused: {is_refused}: none was called for");
        fake.hold_kernels(false);
        wait_until("kernels have started and ended", || fake.launched() == 0);
        fake.check();
    }
}

/// They come late, now and then, and end with work undone: each copy is done once, by them or otherwise.
#[test]
fn what_they_leave_undone_goes_another_way() {
    for kind in KINDS {
        let fake = Fake::take();
        fake.kernel_limits(100, 20);
        let (before, held) = (fake.worker_commands(), AtomicBool::new(false));
        let disturb = || {
            fake.hold_kernels(!held.fetch_xor(true, Ordering::AcqRel));
            std::thread::sleep(Duration::from_micros(700));
            fake.end_kernels();
        };
        beside(disturb, || traffic_of(&fake, kind, &plan(), 1, || fake.worker_commands() > before));
        fake.hold_kernels(false);
    }
}

/// The rank's own memory: a put to itself is a copy within its GPU wherever the others are.
#[test]
fn puts_to_oneself() {
    let fake = Fake::take();
    let before = fake.worker_commands();
    let words = 64 << 10;
    job(2, 1, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, words, 0);
        let dst = fake.window(r, gpu, words, 0);
        let sig = fake.signals(r, gpu, 1, NEVER_RESET);
        let end = Instant::now() + Duration::from_secs(60);
        let mut round = 0;
        while round < 4 || fake.worker_commands() == before {
            round += 1;
            (0..words).step_by(509).for_each(|i| src.set(i, round * 1000 + i as u64));
            let (from, to) = ((src.as_window(), 0), (dst.as_window(), 0));
            r.wait(r.put(0, from, 8 * words, to, r.rank, Some((sig.as_window(), 0, 1))));
            sig.wait(r, 0, round);
            (0..words).step_by(509).for_each(|i| assert_eq!(dst.get(i), round * 1000 + i as u64, "word {i}"));
            assert!(Instant::now() < end, "no workers in 60 s");
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// As long as large copies come up every launch has worker blocks, also where small operations call for all of the
/// launches and large copies always find worker blocks there.
#[test]
fn launches_have_worker_blocks_as_long_as_large_copies_come() {
    const LARGE: usize = 32 << 10;
    let fake = Fake::take();
    let (before, by_workers) = (fake.calls("cuLaunchKernel"), fake.worker_commands());
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, LARGE / 8, 0);
        let dst = fake.window(r, 0, LARGE / 8, 0);
        let put = |len| r.put(0, (src.as_window(), 0), len, (dst.as_window(), 0), 1, None);
        r.job.barrier.wait();
        if r.rank == 0 {
            wait_until("the first launches have ended", || fake.launched() == 0);
            repeat_until("workers are at work", || r.wait(put(LARGE)), || fake.worker_commands() > by_workers);
            let without = fake.launches_without_workers();
            while fake.calls("cuLaunchKernel") < before + FIRST + 150 {
                fake.end_kernels();
                wait_until("the kernel has ended", || fake.launched() == 0);
                let commands = fake.commands();
                let some = || [(); 32].map(|()| put(8)).into_iter().for_each(|q| r.wait(q));
                repeat_until("small puts have a kernel", some, || fake.commands() > commands);
                r.wait(put(LARGE));
            }
            assert_eq!(fake.launches_without_workers(), without, "launches without workers, of 150");
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// Copies of more than 1 KiB, which a block shares, call for launches of a block; shorter ones do not, nor do any where
/// that is switched off. In crowds they go by the copy kernel all the same.
#[test]
fn launches_have_a_block_where_copies_are_worth_one() {
    for (issue, bytes, has_block) in [("", 1024, false), ("", 1028, true), ("", 7168, true), ("workers=0", 7168, false)]
    {
        let fake = Fake::take();
        if !issue.is_empty() {
            fake.set_issue(issue);
        }
        let before = fake.launches_of_a_block();
        job(2, 1, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, 16 * 1024, 0);
            let dst = fake.window(r, gpu, 16 * 1024, 0);
            let sig = fake.signals(r, gpu, 1, NEVER_RESET);
            let put = |at: u64, len, signal| r.put(0, (src.as_window(), at), len, (dst.as_window(), at), 1, signal);
            r.job.barrier.wait();
            if r.rank == 0 {
                wait_until("the first launches have ended", || fake.launched() == 0);
                let launches = fake.calls("cuLaunchKernel");
                let some = || [(); 8].map(|()| put(0, bytes, None)).into_iter().for_each(|q| r.wait(q));
                // One of a block that starts late has launches of a warp follow it, so the first few prove nothing.
                let came = || fake.calls("cuLaunchKernel") >= launches + 4;
                repeat_until("launches come", some, || came() && (!has_block || fake.launches_of_a_block() > before));
                (0..16 * 1024).for_each(|i| src.set(i, i as u64 + 1));
                let all = (0..8).map(|i| put(8192 * i, bytes, Some((sig.as_window(), 0, 1))));
                all.collect::<Vec<_>>().into_iter().for_each(|q| r.wait(q));
            } else {
                sig.wait(r, 0, 8);
                for (i, word) in (0..8).flat_map(|i| (0..bytes / 8).map(move |word| (i, word))) {
                    assert_eq!(dst.get(1024 * i + word), (1024 * i + word) as u64 + 1, "word {word} of put {i}");
                }
            }
            r.job.barrier.wait();
        });
        assert_eq!(fake.launches_of_a_block() > before, has_block, "{issue} {bytes}");
        fake.check();
    }
}

/// Copies from another GPU: worker blocks take those that find few others, close together, and only where they are to.
#[test]
fn lone_copies_from_another_gpu() {
    for (issue, takes) in [("workers=8", true), ("workers=8,own=0", true), ("far=0", false), ("far=16384", false)] {
        let fake = Fake::take();
        fake.set_issue(issue);
        let (before, rounds) = (fake.worker_commands(), AtomicU64::new(0));
        job(2, 6, |r| {
            let gpu = r.rank as i32;
            let _context = fake.enter(gpu);
            let src = fake.window(r, gpu, 6 * 4096, 0);
            let dst = fake.window(r, gpu, 6 * 4096, 0);
            let sig = fake.signals(r, gpu, 1, NEVER_RESET);
            r.job.barrier.wait();
            let end = Instant::now() + Duration::from_secs(60);
            let mut round = 0;
            while r.rank == 0 && (round < 100 || takes && fake.worker_commands() == before) {
                round += 1;
                let all = [0, 1, 2, 3, 4, 5].map(|i| {
                    src.set(4096 * i + 4095, round);
                    let (from, to) = ((src.as_window(), 32768 * i as u64), (dst.as_window(), 32768 * i as u64));
                    r.put(i as i32, from, 32768, to, 1, Some((sig.as_window(), 0, 1)))
                });
                all.into_iter().for_each(|q| r.wait(q));
                rounds.store(round, Ordering::Release);
                assert!(Instant::now() < end, "{issue}: no workers in 60 s");
            }
            r.job.barrier.wait();
            if r.rank == 1 {
                let rounds = rounds.load(Ordering::Acquire);
                sig.wait(r, 0, 6 * rounds);
                (0..6).for_each(|i| assert_eq!(dst.get(4096 * i + 4095), rounds, "{issue}"));
            }
        });
        assert_eq!(fake.worker_commands() > before, takes, "{issue}");
        fake.check();
    }
}

/// Behind a large copy of its context that copy engines do nothing goes by worker blocks, which others have all the
/// while.
#[test]
fn they_overtake_nothing_of_a_context() {
    const LARGE: usize = 1 << 20;
    const LEN: usize = 32 << 10;
    const BEHIND: u64 = 8;
    let fake = Fake::take();
    fake.set_issue("bulk=1048576,far=65536");
    job(2, 7, |r| {
        let gpu = r.rank as i32;
        let _context = fake.enter(gpu);
        let src = fake.window(r, gpu, 2 * LARGE / 8, 0);
        let dst = fake.window(r, gpu, 2 * LARGE / 8, 0);
        // Of the large one, of those behind it, of the others.
        let sig = fake.signals(r, gpu, 3, NEVER_RESET);
        let put = |context, at: usize, len, signal: u64| {
            let (from, to) = ((src.as_window(), at as u64), (dst.as_window(), at as u64));
            r.put(context, from, len, to, 1, Some((sig.as_window(), 8 * signal, 1)))
        };
        r.job.barrier.wait();
        if r.rank == 0 {
            fake.hold(LARGE);
            let mut up = vec![put(0, 0, LARGE, 0)];
            let (before, end) = (fake.worker_commands(), Instant::now() + Duration::from_secs(60));
            while fake.worker_commands() < before + 16 || up.len() <= BEHIND as usize {
                let others: Vec<_> = (1..7).map(|i| put(i, LARGE + LEN * i as usize, LEN, 2)).collect();
                if up.len() <= BEHIND as usize {
                    up.push(put(0, LARGE, LEN, 1));
                }
                others.into_iter().for_each(|q| r.wait(q));
                assert!(Instant::now() < end, "no workers in 60 s");
            }
            r.job.barrier.wait();
            r.job.barrier.wait();
            fake.hold(0);
            up.into_iter().for_each(|q| r.wait(q));
        } else {
            r.job.barrier.wait();
            assert_eq!((sig.get(0), sig.get(1)), (0, 0), "a signal has overtaken a large copy");
            r.job.barrier.wait();
            sig.wait(r, 1, BEHIND);
            assert_eq!(sig.get(0), 1);
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// Its owner takes a window away while worker blocks may be at work there: what comes later fails, and does not wait
/// for them.
#[test]
fn a_window_that_goes_fails_its_puts() {
    let fake = Fake::take();
    let words = 8 << 10;
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, words, 0);
        let goes = fake.window(r, 0, words, 0);
        let before = fake.worker_commands();
        r.job.barrier.wait();
        if r.rank == 1 {
            // SAFETY: plain call.
            let progress = || ok(unsafe { T.rma_progress.unwrap()(r.ctx) });
            repeat_until("workers are at work", progress, || fake.worker_commands() >= before + 8);
            r.dereg(goes.as_window());
            (0..words).for_each(|i| goes.set(i, 77));
            r.job.barrier.wait();
            std::thread::sleep(Duration::from_millis(20));
            assert!((0..words).all(|i| goes.get(i) == 77), "it was written after it was deregistered");
        } else {
            let end = Instant::now() + Duration::from_secs(60);
            let mut failed = false;
            while !failed {
                let all: Vec<_> = (0..4).map(|_| try_put(r, &src, 8 * words, &goes)).collect();
                // All of them come out.
                failed = all.into_iter().map(|q| q.is_some_and(|q| comes_out(r, q))).filter(|good| !good).count() > 0;
                assert!(Instant::now() < end, "nothing failed in 60 s");
            }
            r.job.barrier.wait();
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// What arrives while the owner of the window waits for worker blocks that are at work there finds it gone: it does not
/// wait for worker blocks, which would not take it.
#[test]
fn puts_that_find_a_window_gone_do_not_wait_for_them() {
    let fake = Fake::take();
    let words = 8 << 10;
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, words, 0);
        let goes = fake.window(r, 0, words, 0);
        let before = fake.worker_commands();
        let put = || try_put(r, &src, 8 * words, &goes);
        let waits = |q: Option<*mut c_void>| q.is_some_and(|q| comes_out(r, q));
        r.job.barrier.wait();
        if r.rank == 0 {
            let puts = || assert!([put(), put(), put(), put()].into_iter().all(waits));
            repeat_until("workers are at work", puts, || fake.worker_commands() > before);
            // They stand in the middle of it.
            fake.hold(8 * words);
            let up = [put(), put()];
            r.job.barrier.wait();
            std::thread::sleep(Duration::from_millis(20));
            let (late, launches) = ([put(), put()], fake.calls("cuLaunchKernel"));
            fake.hold(0);
            // All come out, however they do, and without more and more launches that have nothing to do.
            up.into_iter().chain(late).map(waits).for_each(drop);
            assert!(fake.calls("cuLaunchKernel") < launches + 20);
            r.job.barrier.wait();
            assert!(!waits(put()), "the window is still there");
        } else {
            r.job.barrier.wait();
            r.dereg(goes.as_window());
            r.job.barrier.wait();
        }
        r.job.barrier.wait();
    });
    fake.check();
}

/// A fault while copies are up: every operation comes out, the later ones with an error, and nothing hangs.
#[test]
fn a_fault_while_they_are_at_work_hangs_nothing() {
    for after in [3, 40] {
        let fake = Fake::take();
        fake.kernel_limits(20, 0);
        job(2, 1, |r| {
            let _context = fake.enter(0);
            let src = fake.window(r, 0, 4096, 0);
            let dst = fake.window(r, 0, 4096, 0);
            let before = fake.worker_commands();
            r.job.barrier.wait();
            if r.rank == 0 {
                let burst = || {
                    let all: Vec<_> = (0..30).map(|_| try_put(r, &src, 32768, &dst)).collect();
                    all.into_iter().filter(|q| !q.is_some_and(|q| comes_out(r, q))).count()
                };
                let end = Instant::now() + Duration::from_secs(60);
                while fake.worker_commands() == before {
                    assert_eq!(burst(), 0);
                    assert!(Instant::now() < end, "no workers in 60 s");
                }
                fake.inject_after("gpu", after, 700);
                while burst() == 0 {
                    assert!(Instant::now() < end, "everything came out well");
                }
                assert_eq!(burst(), 30, "some came out well after the fault");
            }
            r.job.barrier.wait();
        });
        fake.check();
    }
}

/// Longer than what shares a go with others: between two that are shorter, and twice in a row.
#[test]
fn long_copies_stand_alone() {
    let fake = Fake::take();
    // Slow enough for commands to gather.
    fake.kernel_limits(1000, 0);
    let (before, rounds) = (fake.worker_commands(), AtomicU64::new(0));
    let (long, short) = ((64 << 20) + 4096, 32 << 10);
    job(2, 1, |r| {
        let _context = fake.enter(0);
        let src = fake.window(r, 0, long / 8, 0);
        let dst = fake.window(r, 0, long / 8, 0);
        let sig = fake.signals(r, 0, 1, NEVER_RESET);
        let end = Instant::now() + Duration::from_secs(60);
        let mut round = 0;
        r.job.barrier.wait();
        while r.rank == 0 && (round < 4 || fake.worker_commands() < before + 15) {
            round += 1;
            (0..long / 8).step_by(4093).chain([long / 8 - 1]).for_each(|i| src.set(i, round + i as u64));
            let put = |n: usize| {
                let signal = Some((sig.as_window(), 0, 1));
                r.put(0, (src.as_window(), 0), n, (dst.as_window(), 0), 1, signal)
            };
            let all = [short, long, long, short, short].map(put);
            all.into_iter().for_each(|q| r.wait(q));
            assert!(Instant::now() < end, "no workers in 60 s");
        }
        rounds.fetch_max(round, Ordering::AcqRel);
        r.job.barrier.wait();
        if r.rank == 1 {
            let round = rounds.load(Ordering::Acquire);
            sig.wait(r, 0, 5 * round);
            let words = (0..long / 8).step_by(4093).chain([long / 8 - 1]);
            words.for_each(|i| assert_eq!(dst.get(i), round + i as u64, "word {i}"));
        }
        r.job.barrier.wait();
    });
    fake.check();
}
